"""The gradients of a relative bias's tables: sums of dS over pairs, in a fixed order. Backward v1
calls `table_gradients`.

A program has a stripe: the tiles [rows, keys] along a diagonal, of one head and of CHUNK sequences,
whose pairs have the same distances key - row; their sums stay in registers. A tile sums along its
columns alone, so its diagonals are made columns: row r is rotated left by r. Of 3 keys a, b, c,
where key a is `first_distance` D from row 0:

    row 0   a b c   ->   a b c   distances   D    D + 1    D + 2
    row 1   a b c   ->   b c a               D    D + 1    D - 1
    row 2   a b c   ->   c a b               D    D - 2    D - 1

Column c then holds distance D + c, and D + c - 3 where a row has wrapped around: a distance of the
stripe before. The two are summed apart, in `stripe_sums` and `previous_sums`.

For the times a program sums over each bucket from a tile's least to its greatest: few where events
are in order, but for tiles at the diagonal. PyTorch adds the sums of the programs.

No atomics: the same bits in every run. S and dP are computed once more.
"""

import math
from dataclasses import asdict, dataclass

import torch
import triton
import triton.language as tl

from gdpa_kernels.calling.launch import cdiv, launch, next_power_of_2
from gdpa_kernels.device.sequences import sequence
from gdpa_kernels.device.vendor import precision
from gdpa_kernels.gdpa import bias
from gdpa_kernels.gdpa.batch import Batch
from gdpa_kernels.gdpa.device.bias_tiles import add_bias, time_buckets
from gdpa_kernels.gdpa.device.derivatives import value_and_slope_per_head
from gdpa_kernels.gdpa.device.masks import mask_probabilities
from gdpa_kernels.gdpa.device.segments import load_segments, sees

PROGRAMS = 1056  # about as many are launched: 8 for each SM of an H200


@dataclass(frozen=True)
class Config:
    """Launch constants: rows and keys of a tile, warps."""

    BLOCK: int = 64
    num_warps: int = 8


def default_config(batch: Batch) -> Config:
    """Smaller tiles where registers run out. Not measured."""
    if batch.dtype == torch.float32:
        return Config(BLOCK=32 if batch.head_dim <= 64 else 16, num_warps=4)
    return Config() if batch.head_dim <= 128 else Config(BLOCK=32, num_warps=4)


@triton.jit
def load_rows(
    ptr, start, head, row, exists,
    STRIDES: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """The rows [rows, BLOCK_D] of one head of the sequence at row `start`; 0 where none exists."""
    ptr += tl.cast(start, tl.int64) * STRIDES[0] + tl.cast(head, tl.int64) * STRIDES[1]
    dims = tl.arange(0, BLOCK_D)
    ptrs = ptr + (row.to(tl.int64)[:, None] * STRIDES[0] + dims.to(tl.int64)[None, :] * STRIDES[2])
    return tl.load(ptrs, mask=exists[:, None] & (dims < HEAD_DIM)[None, :], other=0.0)


@triton.jit(do_not_specialize=["sequences", "first_stripe", "stripes"])
def bias_kernel(
    grad_ptr, q_ptr, k_ptr, v_ptr, distances_ptr, buckets_ptr, cu_seqlens_q_ptr, cu_seqlens_k_ptr,
    sequences, first_stripe, stripes, scale,
    GRAD_STRIDES: tl.constexpr, Q_STRIDES: tl.constexpr, K_STRIDES: tl.constexpr,
    V_STRIDES: tl.constexpr, NUM_HEADS: tl.constexpr, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr,
    ACTIVATION: tl.constexpr, CAUSAL: tl.constexpr, WINDOW: tl.constexpr,
    CHUNK: tl.constexpr, BLOCK: tl.constexpr, BLOCK_D: tl.constexpr, WIDTH: tl.constexpr,
    LOWER_RIGHT: tl.constexpr = False, segments_ptr=None, TARGET_GROUP: tl.constexpr = 1,
    FULL_ROWS: tl.constexpr = 0, OWN_RANKS: tl.constexpr = False,
    position_ptr=None, time_ptr=None, times_q_ptr=None, times_k_ptr=None, thresholds_ptr=None,
    BIAS: tl.constexpr = None,
):  # fmt: skip
    """Sums of dS of one stripe. distances_ptr [programs, 2 or 3, BLOCK]: of distance first_distance
    + c, of first_distance + c - BLOCK, and of pairs of targets that share a position; buckets_ptr
    [programs, WIDTH]; None: not needed."""
    SHARED: tl.constexpr = segments_ptr is not None and distances_ptr is not None and not OWN_RANKS
    pid = tl.program_id(0)
    first_distance = (first_stripe + pid % stripes) * BLOCK
    head = pid // stripes % NUM_HEADS
    chunk = pid // stripes // NUM_HEADS
    EXACT: tl.constexpr = q_ptr.dtype.element_ty == tl.float32
    PRECISION: tl.constexpr = precision(EXACT)
    offsets = tl.arange(0, BLOCK)
    rotated_key = offsets[:, None] + offsets[None, :]  # of row r at column c; less BLOCK if wrapped
    stripe_sums = tl.zeros([BLOCK], tl.float32)
    previous_sums = tl.zeros([BLOCK], tl.float32)
    sums_of_targets = tl.zeros([BLOCK], tl.float32)
    if buckets_ptr is not None:
        entries = tl.arange(0, WIDTH)
        sums = tl.zeros([WIDTH], tl.float32)
    for batch in range(chunk * CHUNK, tl.minimum(chunk * CHUNK + CHUNK, sequences)):
        start_q, start_out, len_q, start_k, len_k = sequence(
            cu_seqlens_q_ptr, cu_seqlens_k_ptr, batch, 0
        )
        shift = 0
        if LOWER_RIGHT:
            shift = len_k - len_q
        ahead = shift + first_distance  # from a tile's first row to its first key
        shared_from = None
        if segments_ptr is not None:
            segments = load_segments(
                segments_ptr, batch, len_k, WINDOW, TARGET_GROUP, FULL_ROWS, OWN_RANKS
            )
            if not OWN_RANKS:
                shared_from = segments.first_target
        # First along the diagonals; then rows of targets, over the keys of the history at this
        # stripe's distances from the first target.
        for of_targets in tl.static_range(1 + SHARED):
            if of_targets:
                begin = tl.maximum(shared_from - shift, 0)
                end = tl.where(first_distance < 0, len_q, begin)
            else:
                begin = tl.maximum(-ahead, 0) // BLOCK * BLOCK
                end = tl.minimum(len_q, len_k - ahead)
            for first_row in range(begin, end, BLOCK):
                first_key = shared_from + first_distance if of_targets else first_row + ahead
                row, key = first_row + offsets, first_key + offsets
                i, j = row[:, None] + shift, key[None, :]
                is_row, is_key = row < len_q, (key >= 0) & (key < len_k)
                q = load_rows(q_ptr, start_q, head, row, is_row, Q_STRIDES, HEAD_DIM, BLOCK_D)
                k = load_rows(
                    k_ptr, start_k, head // GROUP, key, is_key, K_STRIDES, HEAD_DIM, BLOCK_D
                )
                s = tl.dot(q, k.T, input_precision=PRECISION) * scale
                s = add_bias(
                    s, first_row, first_row + shift, first_key, head, len_q, len_k, start_q,
                    start_k, position_ptr, time_ptr, times_q_ptr, times_k_ptr, thresholds_ptr, BIAS,
                    False, shared_from,
                )  # fmt: skip
                _, slope = value_and_slope_per_head(s, 1.0, head, ACTIVATION, not EXACT)
                if segments_ptr is None:
                    slope = mask_probabilities(slope, first_row + shift, first_key, CAUSAL, WINDOW)
                else:
                    slope = tl.where(sees(i, j, segments), slope, 0.0)
                grad = load_rows(
                    grad_ptr, start_out, head, row, is_row, GRAD_STRIDES, HEAD_DIM, BLOCK_D
                )
                v = load_rows(
                    v_ptr, start_k, head // GROUP, key, is_key, V_STRIDES, HEAD_DIM, BLOCK_D
                )
                exists = is_row[:, None] & is_key[None, :]
                ds = slope * tl.dot(grad, v.T, input_precision=PRECISION)
                ds = tl.where(exists, ds, 0.0)
                if of_targets:
                    stripe_sums += tl.sum(tl.where(j < shared_from, ds, 0.0), 0)
                elif distances_ptr is not None:
                    apart = ds
                    if SHARED:
                        sums_of_targets += tl.sum(tl.where(j >= shared_from, ds, 0.0), 0)
                        apart = tl.where(i < shared_from, ds, 0.0)
                    rotated = tl.gather(apart, rotated_key % BLOCK, 1)
                    stripe_sums += tl.sum(tl.where(rotated_key < BLOCK, rotated, 0.0), 0)
                    previous_sums += tl.sum(tl.where(rotated_key < BLOCK, 0.0, rotated), 0)
                if buckets_ptr is not None and not of_targets:
                    bucket = time_buckets(
                        i, j, shift, len_q, len_k, start_q, start_k,
                        times_q_ptr, times_k_ptr, thresholds_ptr, BIAS[2],
                    )  # fmt: skip
                    added = exists & (ds != 0.0)  # a NaN is not 0
                    least = tl.min(tl.where(added, bucket, WIDTH))
                    most = tl.max(tl.where(added, bucket, -1))
                    for entry in range(least, most + 1):
                        total = tl.sum(tl.where(bucket == entry, ds, 0.0))
                        sums += tl.where(entries == entry, total, 0.0)

    program = pid.to(tl.int64)
    if distances_ptr is not None:
        distances_ptr += program * ((2 + SHARED) * BLOCK)
        tl.store(distances_ptr + offsets, stripe_sums)
        tl.store(distances_ptr + BLOCK + offsets, previous_sums)
        if SHARED:
            tl.store(distances_ptr + 2 * BLOCK + offsets, sums_of_targets)
    if buckets_ptr is not None:
        tl.store(buckets_ptr + program * WIDTH + entries, sums)


def stripes_of(batch: Batch, block: int) -> tuple[int, int]:
    """The first and the last stripe in which a pair of the batch may lie. Stripe n has distances
    n * block + c, 0 <= c < block, and those `block` less."""
    reach_back, reach_ahead = batch.max_seqlen_q, batch.max_seqlen_k
    if batch.lower_right:
        reach_back, reach_ahead = reach_ahead, reach_back
    first, last = -cdiv(max(reach_back - 1, 0), block), cdiv(max(reach_ahead - 1, 0), block)
    if batch.segments is None:  # contexts see ahead, and a window counts their ranks
        if batch.causal:
            last = 0
        if batch.window is not None:
            reach = (batch.window + block - 1) // block
            first, last = max(first, -reach), min(last, reach)
    return first, last


def table_gradients(
    grad_out: torch.Tensor, batch: Batch, needs: tuple[bool, bool], config: Config | None = None
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """The gradients of the tables of positions and of times, shaped as they are, each rounded once;
    None for a table that is absent or not needed."""
    tables = batch.bias.position_table, batch.bias.time_table
    position, time = (x if need else None for x, need in zip(tables, needs, strict=True))
    if position is None and time is None:
        return None, None
    config = config or default_config(batch)
    first, last = stripes_of(batch, config.BLOCK)
    distances, buckets = launch_sums(
        grad_out, batch, config, first, last - first + 1, position is not None, time is not None
    )
    if position is not None:
        sums = _of_tables(distances.sum(0), position)
        by_distance = sums.new_zeros(len(sums), last - first + 2, config.BLOCK)
        by_distance[:, 1:] += sums[:, :, 0]
        by_distance[:, :-1] += sums[:, :, 1]  # of the stripe before
        least = (first - 1) * config.BLOCK
        by_distance = by_distance.flatten(1)
        if batch.shares_positions:
            by_distance[:, -least] += sums[:, :, 2].sum((1, 2))
        sums = bias.onto_table(by_distance, least, position.shape[1])
        position = (sums * batch.output_scale).to(position.dtype)
    if time is not None:
        sums = _of_tables(buckets.sum((0, 2)), time)[:, : time.shape[1]]
        time = (sums * batch.output_scale).to(time.dtype)
    return position, time


def _of_tables(sums: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    """Sums `[heads, ...]`, or `[1, ...]` over all heads where these share one table."""
    return sums if len(table) > 1 else sums.sum(0, keepdim=True)


def launch_sums(
    grad_out: torch.Tensor, batch: Batch, config: Config, first: int, stripes: int,
    by_distance: bool, by_bucket: bool,
) -> tuple[torch.Tensor | None, torch.Tensor | None]:  # fmt: skip
    """The sums of `bias_kernel` by distance, fp32 `[chunks, heads, stripes, 2 or 3, BLOCK]`, and by
    bucket, `[chunks, heads, stripes, buckets or more]`; None for those that are not asked for."""
    q, k, v, time = batch.q, batch.k, batch.v, batch.bias.time_table
    chunks = min(cdiv(PROGRAMS, stripes * batch.num_heads), max(batch.sequences, 1))
    chunk = next_power_of_2(max(cdiv(batch.sequences, chunks), 1))
    shape = cdiv(batch.sequences, chunk), batch.num_heads, stripes
    width = 16 if time is None else max(16, next_power_of_2(time.shape[1]))
    distances = buckets = None
    if by_distance:
        distances = q.new_empty(
            *shape, 2 + batch.shares_positions, config.BLOCK, dtype=torch.float32
        )
    if by_bucket:
        buckets = q.new_empty(*shape, width, dtype=torch.float32)
    launch(
        bias_kernel, (math.prod(shape),), batch.device,
        grad_out, q, k, v, distances, buckets, batch.cu_seqlens_q, batch.cu_seqlens_k,
        batch.sequences, first, stripes, batch.scale,
        GRAD_STRIDES=grad_out.stride(), Q_STRIDES=q.stride(), K_STRIDES=k.stride(),
        V_STRIDES=v.stride(), NUM_HEADS=batch.num_heads, GROUP=batch.group,
        HEAD_DIM=batch.head_dim, ACTIVATION=batch.names, CAUSAL=bool(batch.causal),
        WINDOW=batch.window, CHUNK=chunk, WIDTH=width, LOWER_RIGHT=batch.lower_right,
        BLOCK_D=max(16, next_power_of_2(batch.head_dim)), **asdict(config), num_stages=1,
        **batch.segment_options, **batch.bias_options,
    )  # fmt: skip
    return distances, buckets
