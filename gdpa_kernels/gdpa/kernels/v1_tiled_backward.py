"""v1, backward: two fused kernels on jagged tensors; one owns keys, the other queries.

The inputs are q, k, v and the gradient of the output alone: without softmax there is no log-sum-exp
and no rowsum(O * dO). A program of the first kernel owns BLOCK_N keys of one (sequence, key head),
loops over the queries that see them, of all its query heads, and accumulates dK and dV. One of the
second owns BLOCK_M queries of one (sequence, head), loops over their keys and accumulates dQ.

    S = scale Q K^T, dP = dO V^T, dS = activation'(S) * dP,
    dV = output_scale activation(S)^T dO, dK = scale output_scale dS^T Q, dQ likewise dS K.

The price: S and dP are computed twice, 7 matmuls where 5 suffice. The first kernel computes them as
[keys, queries]: P and dS are then A operands of the next MMAs in the layout that they have.

| role      | warps     | registers | work                                                |
|-----------|-----------|-----------|-----------------------------------------------------|
| all warps | num_warps | up to 255 | addresses, cp.async of the other side's tiles, MMAs |

| barrier         | arrivals  | filled by -> drained by                                 |
|-----------------|-----------|---------------------------------------------------------|
| cp.async groups | all warps | the streamed tiles, num_stages - 1 blocks ahead -> MMAs |

Deterministic: both kernels write what they own once. For a shared q PyTorch sums the dQ of all
sequences, in fp32 and in a fixed order. All arguments may have any strides.
"""

from dataclasses import asdict, dataclass

import torch
import triton
import triton.language as tl

from gdpa_kernels.calling.launch import cdiv, launch, next_power_of_2, shared_memory
from gdpa_kernels.device.sequences import sequence
from gdpa_kernels.device.vendor import precision
from gdpa_kernels.gdpa.batch import Batch
from gdpa_kernels.gdpa.device import bias_gradient
from gdpa_kernels.gdpa.device.bias_tiles import add_bias
from gdpa_kernels.gdpa.device.derivatives import value_and_slope_per_head
from gdpa_kernels.gdpa.device.masks import key_range, mask_probabilities, mask_transposed, row_range
from gdpa_kernels.gdpa.device.pointer_tiles import tile_pointers
from gdpa_kernels.gdpa.device.segments import (
    key_intervals,
    load_segments,
    row_intervals,
    sees,
    skip_gap,
)


@dataclass(frozen=True)
class Tile:
    """Launch constants of one kernel: query rows and keys of a tile, warps, tiles in flight."""

    BLOCK_M: int = 64
    BLOCK_N: int = 128
    num_warps: int = 8
    num_stages: int = 2


@dataclass(frozen=True)
class Config:
    """The tiles of the two kernels."""

    keys: Tile = Tile()
    queries: Tile = Tile(BLOCK_M=128, BLOCK_N=64)


def default_config(batch: Batch) -> Config:
    """Smaller tiles where registers run out, or shared memory, as on sm_86, sm_89 and sm_120. Not
    measured."""
    if batch.dtype == torch.float32:
        rows = 32 if batch.head_dim <= 64 else 16
        tile = Tile(BLOCK_M=rows, BLOCK_N=rows, num_stages=1)
        return Config(tile, tile)
    if batch.head_dim > 128:
        small = Tile(BLOCK_M=32, BLOCK_N=32, num_stages=1)
        fits = shared_memory(batch.device) >= 102_400
        return Config(Tile(BLOCK_M=64, BLOCK_N=32, num_stages=1) if fits else small, small)
    if batch.bias.is_given:  # its loads would have buffers too
        return Config(Tile(BLOCK_M=32, BLOCK_N=64, num_stages=1), Tile(BLOCK_N=32, num_stages=1))
    return Config()


@triton.jit
def load_tile(
    ptr, first_row, length, ROWS: tl.constexpr,
    STRIDES: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """The tile [ROWS, BLOCK_D]; what does not exist reads as zero, and so adds nothing to any
    gradient."""
    ptrs, mask = tile_pointers(ptr, first_row, length, ROWS, STRIDES, HEAD_DIM, BLOCK_D)
    return tl.load(ptrs, mask=mask, other=0.0)


@triton.jit
def rows_of(ptr, start, head, STRIDES: tl.constexpr):
    """The pointer to the first row of one head of the sequence at row `start`."""
    return ptr + tl.cast(start, tl.int64) * STRIDES[0] + tl.cast(head, tl.int64) * STRIDES[1]


@triton.jit(do_not_specialize=["max_seqlen_q", "max_seqlen_k"])
def keys_kernel(
    grad_ptr, q_ptr, k_ptr, v_ptr, dk_ptr, dv_ptr, cu_seqlens_q_ptr, cu_seqlens_k_ptr,
    max_seqlen_q, max_seqlen_k, scale, output_scale,
    GRAD_STRIDES: tl.constexpr, Q_STRIDES: tl.constexpr, K_STRIDES: tl.constexpr,
    V_STRIDES: tl.constexpr, DK_STRIDES: tl.constexpr,
    NUM_HEADS_K: tl.constexpr, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr,
    ACTIVATION: tl.constexpr, CAUSAL: tl.constexpr, WINDOW: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
    LOWER_RIGHT: tl.constexpr = False, segments_ptr=None, TARGET_GROUP: tl.constexpr = 1,
    FULL_ROWS: tl.constexpr = 0, OWN_RANKS: tl.constexpr = False, BIAS: tl.constexpr = None,
    position_ptr=None, time_ptr=None, times_q_ptr=None, times_k_ptr=None, thresholds_ptr=None,
):  # fmt: skip
    """dK and dV of BLOCK_N keys of one (sequence, key head)."""
    blocks = tl.cdiv(max_seqlen_k, BLOCK_N)
    pid = tl.program_id(0)
    first_key = pid % blocks * BLOCK_N
    head_k = pid // blocks % NUM_HEADS_K
    batch = (pid // blocks // NUM_HEADS_K).to(tl.int64)
    start_q, start_out, len_q, start_k, len_k = sequence(
        cu_seqlens_q_ptr, cu_seqlens_k_ptr, batch, max_seqlen_q
    )
    if first_key >= len_k:
        return

    EXACT: tl.constexpr = q_ptr.dtype.element_ty == tl.float32
    PRECISION: tl.constexpr = precision(EXACT)
    k = load_tile(
        rows_of(k_ptr, start_k, head_k, K_STRIDES), first_key, len_k, BLOCK_N,
        K_STRIDES, HEAD_DIM, BLOCK_D,
    )  # fmt: skip
    v = load_tile(
        rows_of(v_ptr, start_k, head_k, V_STRIDES), first_key, len_k, BLOCK_N,
        V_STRIDES, HEAD_DIM, BLOCK_D,
    )  # fmt: skip
    dk = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
    dv = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
    first = first_key
    if LOWER_RIGHT:
        first = tl.maximum(first_key - (len_k - len_q), 0)
    shared_from = None
    if segments_ptr is None:
        start, end = row_range(first, len_q, BLOCK_M, BLOCK_N, CAUSAL, WINDOW)
    else:
        segments = load_segments(
            segments_ptr, batch, len_k, WINDOW, TARGET_GROUP, FULL_ROWS, OWN_RANKS
        )
        if not OWN_RANKS:
            shared_from = segments.first_target
        start, end, gap_start, gap_end = row_intervals(
            first_key, BLOCK_N, len_q, len_k, segments, BLOCK_M
        )
    for member in range(GROUP):
        head = head_k * GROUP + member
        q_rows = rows_of(q_ptr, start_q, head, Q_STRIDES)
        grad_rows = rows_of(grad_ptr, start_out, head, GRAD_STRIDES)
        for first_row in tl.range(start, end, BLOCK_M):
            if segments_ptr is not None:
                first_row = skip_gap(first_row, gap_start, gap_end)
            q = load_tile(q_rows, first_row, len_q, BLOCK_M, Q_STRIDES, HEAD_DIM, BLOCK_D)
            s = tl.dot(k, q.T, input_precision=PRECISION)
            position = first_row
            if LOWER_RIGHT:
                position += len_k - len_q
            if BIAS is not None:
                s = add_bias(
                    s * scale, first_row, position, first_key, head, len_q, len_k, start_q, start_k,
                    position_ptr, time_ptr, times_q_ptr, times_k_ptr, thresholds_ptr, BIAS, True,
                    shared_from,
                )  # fmt: skip
            factor = scale if BIAS is None else 1.0
            p, slope = value_and_slope_per_head(s, factor, head, ACTIVATION, not EXACT)
            if segments_ptr is None:
                p = mask_transposed(p, position, first_key, CAUSAL, WINDOW)
                slope = mask_transposed(slope, position, first_key, CAUSAL, WINDOW)
            else:
                i = position + tl.arange(0, BLOCK_M)[None, :]
                j = first_key + tl.arange(0, BLOCK_N)[:, None]
                seen = sees(i, j, segments)
                p, slope = tl.where(seen, p, 0.0), tl.where(seen, slope, 0.0)
            grad = load_tile(grad_rows, first_row, len_q, BLOCK_M, GRAD_STRIDES, HEAD_DIM, BLOCK_D)
            dv = tl.dot(p.to(grad.dtype), grad, dv, input_precision=PRECISION)
            dp = tl.dot(v, grad.T, input_precision=PRECISION)
            dk = tl.dot((slope * dp).to(q.dtype), q, dk, input_precision=PRECISION)

    dk_ptrs, mask = tile_pointers(
        rows_of(dk_ptr, start_k, head_k, DK_STRIDES), first_key, len_k, BLOCK_N,
        DK_STRIDES, HEAD_DIM, BLOCK_D,
    )  # fmt: skip
    tl.store(dk_ptrs, (dk * (scale * output_scale)).to(k.dtype), mask=mask)
    dv_ptrs, mask = tile_pointers(
        rows_of(dv_ptr, start_k, head_k, DK_STRIDES), first_key, len_k, BLOCK_N,
        DK_STRIDES, HEAD_DIM, BLOCK_D,
    )  # fmt: skip
    tl.store(dv_ptrs, (dv * output_scale).to(v.dtype), mask=mask)


@triton.jit(do_not_specialize=["max_seqlen_q"])
def queries_kernel(
    grad_ptr, q_ptr, k_ptr, v_ptr, dq_ptr, cu_seqlens_q_ptr, cu_seqlens_k_ptr,
    max_seqlen_q, scale, output_scale,
    GRAD_STRIDES: tl.constexpr, Q_STRIDES: tl.constexpr, K_STRIDES: tl.constexpr,
    V_STRIDES: tl.constexpr, DQ_STRIDES: tl.constexpr,
    NUM_HEADS: tl.constexpr, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr,
    ACTIVATION: tl.constexpr, CAUSAL: tl.constexpr, WINDOW: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
    LOWER_RIGHT: tl.constexpr = False, segments_ptr=None, TARGET_GROUP: tl.constexpr = 1,
    FULL_ROWS: tl.constexpr = 0, OWN_RANKS: tl.constexpr = False, BIAS: tl.constexpr = None,
    position_ptr=None, time_ptr=None, times_q_ptr=None, times_k_ptr=None, thresholds_ptr=None,
):  # fmt: skip
    """dQ of BLOCK_M queries of one (sequence, head), where the rows of the output are."""
    blocks = tl.cdiv(max_seqlen_q, BLOCK_M)
    pid = tl.program_id(0)
    first_row = pid % blocks * BLOCK_M
    head = pid // blocks % NUM_HEADS
    batch = (pid // blocks // NUM_HEADS).to(tl.int64)
    start_q, start_out, len_q, start_k, len_k = sequence(
        cu_seqlens_q_ptr, cu_seqlens_k_ptr, batch, max_seqlen_q
    )
    if first_row >= len_q:
        return

    EXACT: tl.constexpr = q_ptr.dtype.element_ty == tl.float32
    PRECISION: tl.constexpr = precision(EXACT)
    q = load_tile(
        rows_of(q_ptr, start_q, head, Q_STRIDES), first_row, len_q, BLOCK_M,
        Q_STRIDES, HEAD_DIM, BLOCK_D,
    )  # fmt: skip
    grad = load_tile(
        rows_of(grad_ptr, start_out, head, GRAD_STRIDES), first_row, len_q, BLOCK_M,
        GRAD_STRIDES, HEAD_DIM, BLOCK_D,
    )  # fmt: skip
    k_rows = rows_of(k_ptr, start_k, head // GROUP, K_STRIDES)
    v_rows = rows_of(v_ptr, start_k, head // GROUP, V_STRIDES)
    dq = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    position = first_row
    if LOWER_RIGHT:
        position += len_k - len_q
    shared_from = None
    if segments_ptr is None:
        start, end = key_range(position, len_k, BLOCK_M, BLOCK_N, CAUSAL, WINDOW)
    else:
        segments = load_segments(
            segments_ptr, batch, len_k, WINDOW, TARGET_GROUP, FULL_ROWS, OWN_RANKS
        )
        if not OWN_RANKS:
            shared_from = segments.first_target
        start, end, gap_start, gap_end = key_intervals(position, BLOCK_M, len_k, segments, BLOCK_N)
    for first_key in tl.range(start, end, BLOCK_N):
        if segments_ptr is not None:
            first_key = skip_gap(first_key, gap_start, gap_end)
        k = load_tile(k_rows, first_key, len_k, BLOCK_N, K_STRIDES, HEAD_DIM, BLOCK_D)
        s = tl.dot(q, k.T, input_precision=PRECISION)
        if BIAS is not None:
            s = add_bias(
                s * scale, first_row, position, first_key, head, len_q, len_k, start_q, start_k,
                position_ptr, time_ptr, times_q_ptr, times_k_ptr, thresholds_ptr, BIAS, False,
                shared_from,
            )  # fmt: skip
        factor = scale if BIAS is None else 1.0
        _, slope = value_and_slope_per_head(s, factor, head, ACTIVATION, not EXACT)
        if segments_ptr is None:
            slope = mask_probabilities(slope, position, first_key, CAUSAL, WINDOW)
        else:
            i = position + tl.arange(0, BLOCK_M)[:, None]
            j = first_key + tl.arange(0, BLOCK_N)[None, :]
            seen = sees(i, j, segments)
            slope = tl.where(seen, slope, 0.0)
        v = load_tile(v_rows, first_key, len_k, BLOCK_N, V_STRIDES, HEAD_DIM, BLOCK_D)
        dp = tl.dot(grad, v.T, input_precision=PRECISION)
        dq = tl.dot((slope * dp).to(k.dtype), k, dq, input_precision=PRECISION)

    dq_ptrs, mask = tile_pointers(
        rows_of(dq_ptr, start_out, head, DQ_STRIDES), first_row, len_q, BLOCK_M,
        DQ_STRIDES, HEAD_DIM, BLOCK_D,
    )  # fmt: skip
    tl.store(dq_ptrs, (dq * (scale * output_scale)).to(dq_ptr.dtype.element_ty), mask=mask)


def backward(
    grad_out: torch.Tensor,
    batch: Batch,
    *,
    needs: tuple[bool, bool, bool] = (True, True, True),
    config: Config | None = None,
) -> tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]:
    """(dq, dk, dv), shaped as q, k and v, contiguous; None where `needs` is False.

    grad_out `[total_q, num_heads, head_dim]` of any strides. A kernel none of whose results is
    needed is not launched.
    """
    q, k, v = batch.q, batch.k, batch.v
    config = config or default_config(batch)
    common = {
        "GRAD_STRIDES": grad_out.stride(), "Q_STRIDES": q.stride(), "K_STRIDES": k.stride(),
        "V_STRIDES": v.stride(), "GROUP": batch.group, "HEAD_DIM": batch.head_dim,
        "ACTIVATION": batch.names, "CAUSAL": bool(batch.causal), "WINDOW": batch.window,
        "LOWER_RIGHT": batch.lower_right, **batch.segment_options,
        **batch.bias_options, "BLOCK_D": max(16, next_power_of_2(batch.head_dim)),
    }  # fmt: skip
    dq = dk = dv = None
    if needs[1] or needs[2]:
        dk, dv = k.new_empty(k.shape), v.new_empty(v.shape)
        tiles = cdiv(batch.max_seqlen_k, config.keys.BLOCK_N)
        launch(
            keys_kernel, (tiles * batch.num_heads_k * batch.sequences,), batch.device,
            grad_out, q, k, v, dk, dv, batch.cu_seqlens_q, batch.cu_seqlens_k,
            batch.max_seqlen_q, batch.max_seqlen_k, batch.scale, batch.output_scale,
            DK_STRIDES=dk.stride(), NUM_HEADS_K=batch.num_heads_k, **asdict(config.keys), **common,
        )  # fmt: skip
    if needs[0]:
        dtype = torch.float32 if batch.shared_q else q.dtype
        dq = q.new_empty(batch.rows, *q.shape[1:], dtype=dtype)
        tiles = cdiv(batch.max_seqlen_q, config.queries.BLOCK_M)
        launch(
            queries_kernel, (tiles * batch.num_heads * batch.sequences,), batch.device,
            grad_out, q, k, v, dq, batch.cu_seqlens_q, batch.cu_seqlens_k,
            batch.max_seqlen_q, batch.scale, batch.output_scale,
            DQ_STRIDES=dq.stride(), NUM_HEADS=batch.num_heads, **asdict(config.queries), **common,
        )  # fmt: skip
        if batch.shared_q:
            dq = dq.view(batch.sequences, *q.shape).sum(0).to(q.dtype)
    return dq, dk if needs[1] else None, dv if needs[2] else None


def bias_backward(
    grad_out: torch.Tensor, batch: Batch, needs: tuple[bool, bool] = (True, True)
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """The gradients of batch.bias's tables of positions and of times; None where `needs` is False.
    A third kernel (bias_gradient.py), deterministic as the others."""
    return bias_gradient.table_gradients(grad_out, batch, needs)
