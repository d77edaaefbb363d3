"""v1: one fused kernel on jagged tensors; the scores never reach memory.

Changes from v0_eager: a program owns BLOCK_M query rows of one (sequence, head) and loops over the
keys in blocks of BLOCK_N. S = Q K^T, the activation and P V stay in registers; the batch is never
padded.

Why it should help: v0 writes and reads every score several times, two bytes each time. At 1,024
tokens a head's scores are 2 MB against 1 MB of q, k, v and out together. Here the traffic is the
inputs and the output alone. Without softmax there is no running maximum, no sum and no rescaling:
blocks of keys simply add up.

| role      | warps     | registers | work                                                 |
|-----------|-----------|-----------|------------------------------------------------------|
| all warps | num_warps | 127       | addresses, cp.async of K and V, both MMAs, the store |

| barrier         | arrivals  | filled by -> drained by                           |
|-----------------|-----------|---------------------------------------------------|
| cp.async groups | all warps | K and V, num_stages - 1 blocks ahead -> both MMAs |

At the default shape two programs fit on an SM, four warp groups in all: while one evaluates its
activation, another keeps the tensor cores busy. That is the only overlap here, and it is left to
the warp schedulers. The tensors may have any strides.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from gdpa_kernels.calling.launch import cdiv, launch, next_power_of_2
from gdpa_kernels.device.sequences import sequence
from gdpa_kernels.device.vendor import precision
from gdpa_kernels.gdpa.batch import Batch
from gdpa_kernels.gdpa.device.activations import activate_per_head
from gdpa_kernels.gdpa.device.bias_tiles import add_bias
from gdpa_kernels.gdpa.device.masks import key_range, mask_probabilities
from gdpa_kernels.gdpa.device.pointer_tiles import tile_pointers
from gdpa_kernels.gdpa.device.segments import key_intervals, load_segments, sees, skip_gap


@dataclass(frozen=True)
class Config:
    """Launch constants: query rows and keys of a tile, warps of a program, K/V blocks in flight."""

    BLOCK_M: int = 128
    BLOCK_N: int = 32
    num_warps: int = 8
    num_stages: int = 4


def default_config(batch: Batch) -> Config:
    """The fastest of the swept constants at head_dim 128; smaller tiles where registers run out.
    With a bias one block in flight, whose loads would have buffers too; not measured."""
    if batch.dtype == torch.float32:
        return Config(BLOCK_M=32 if batch.head_dim <= 128 else 16, num_warps=4, num_stages=2)
    if batch.bias.is_given:
        return Config(BLOCK_M=128 if batch.head_dim <= 128 else 64, num_stages=1)
    if batch.head_dim > 128:
        return Config(BLOCK_M=64, BLOCK_N=32, num_warps=4, num_stages=2)
    return Config()


@triton.jit(do_not_specialize=["max_seqlen_q"])
def tiled_kernel(
    q_ptr, k_ptr, v_ptr, out_ptr, cu_seqlens_q_ptr, cu_seqlens_k_ptr,
    max_seqlen_q, scale, output_scale,
    Q_STRIDES: tl.constexpr, K_STRIDES: tl.constexpr,
    V_STRIDES: tl.constexpr, OUT_STRIDES: tl.constexpr,
    NUM_HEADS: tl.constexpr, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr,
    ACTIVATION: tl.constexpr, CAUSAL: tl.constexpr, WINDOW: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
    LOWER_RIGHT: tl.constexpr = False, add_ptr=None, segments_ptr=None,
    TARGET_GROUP: tl.constexpr = 1, FULL_ROWS: tl.constexpr = 0, OWN_RANKS: tl.constexpr = False,
    BIAS: tl.constexpr = None, position_ptr=None, time_ptr=None, times_q_ptr=None,
    times_k_ptr=None, thresholds_ptr=None,
):  # fmt: skip
    """output_scale * activation(scale * Q K^T) V for BLOCK_M rows of one (sequence, head).

    Strides are (token, head, dim), in elements. cu_seqlens_q_ptr None: one q for all sequences.
    LOWER_RIGHT: positions end with their sequence. add_ptr: what is added before the result is
    rounded, with OUT_STRIDES; None for nothing. segments_ptr: targets and contexts (segments.py).
    BIAS: of what is added to the scores (bias_tiles.py).
    """
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

    head_k = (head // GROUP).to(tl.int64)
    q_ptr += tl.cast(start_q, tl.int64) * Q_STRIDES[0] + head.to(tl.int64) * Q_STRIDES[1]
    k_ptr += tl.cast(start_k, tl.int64) * K_STRIDES[0] + head_k * K_STRIDES[1]
    v_ptr += tl.cast(start_k, tl.int64) * V_STRIDES[0] + head_k * V_STRIDES[1]
    out_ptr += tl.cast(start_out, tl.int64) * OUT_STRIDES[0] + head.to(tl.int64) * OUT_STRIDES[1]

    EXACT: tl.constexpr = q_ptr.dtype.element_ty == tl.float32
    PRECISION: tl.constexpr = precision(EXACT)
    q_ptrs, q_mask = tile_pointers(q_ptr, first_row, len_q, BLOCK_M, Q_STRIDES, HEAD_DIM, BLOCK_D)
    q = tl.load(q_ptrs, mask=q_mask, other=0.0)
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
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
        k_ptrs, mask = tile_pointers(k_ptr, first_key, len_k, BLOCK_N, K_STRIDES, HEAD_DIM, BLOCK_D)
        k = tl.load(k_ptrs, mask=mask, other=0.0)
        s = tl.dot(q, k.T, input_precision=PRECISION)
        if BIAS is not None:
            s = add_bias(
                s * scale, first_row, position, first_key, head, len_q, len_k, start_q, start_k,
                position_ptr, time_ptr, times_q_ptr, times_k_ptr, thresholds_ptr, BIAS, False,
                shared_from,
            )  # fmt: skip
        factor = scale if BIAS is None else 1.0
        p = activate_per_head(s, factor, head, ACTIVATION, not EXACT)
        if segments_ptr is None:
            p = mask_probabilities(p, position, first_key, CAUSAL, WINDOW)
        else:
            i = position + tl.arange(0, BLOCK_M)[:, None]
            j = first_key + tl.arange(0, BLOCK_N)[None, :]
            p = tl.where(sees(i, j, segments), p, 0.0)
        v_ptrs, mask = tile_pointers(v_ptr, first_key, len_k, BLOCK_N, V_STRIDES, HEAD_DIM, BLOCK_D)
        v = tl.load(v_ptrs, mask=mask, other=0.0)
        acc = tl.dot(p.to(v.dtype), v, acc, input_precision=PRECISION)

    out_ptrs, _ = tile_pointers(out_ptr, first_row, len_q, BLOCK_M, OUT_STRIDES, HEAD_DIM, BLOCK_D)
    out = acc * output_scale
    if add_ptr is not None:
        add_ptr += tl.cast(start_out, tl.int64) * OUT_STRIDES[0]
        add_ptr += head.to(tl.int64) * OUT_STRIDES[1]
        add_ptrs, _ = tile_pointers(
            add_ptr, first_row, len_q, BLOCK_M, OUT_STRIDES, HEAD_DIM, BLOCK_D
        )
        out += tl.load(add_ptrs, mask=q_mask, other=0.0).to(tl.float32)
    tl.store(out_ptrs, out.to(out_ptr.dtype.element_ty), mask=q_mask)


def forward(batch: Batch, *, config: Config | None = None) -> torch.Tensor:
    """The output, `[total_q, num_heads, head_dim]`."""
    out = batch.new_out()
    q, k, v = batch.q, batch.k, batch.v
    config = config or default_config(batch)
    tiles = cdiv(batch.max_seqlen_q, config.BLOCK_M)
    launch(
        tiled_kernel, (tiles * batch.num_heads * batch.sequences,), batch.device,
        q, k, v, out, batch.cu_seqlens_q, batch.cu_seqlens_k,
        batch.max_seqlen_q, batch.scale, batch.output_scale,
        Q_STRIDES=q.stride(), K_STRIDES=k.stride(), V_STRIDES=v.stride(), OUT_STRIDES=out.stride(),
        NUM_HEADS=batch.num_heads, GROUP=batch.group, HEAD_DIM=batch.head_dim,
        ACTIVATION=batch.names, CAUSAL=bool(batch.causal), WINDOW=batch.window,
        BLOCK_M=config.BLOCK_M, BLOCK_N=config.BLOCK_N,
        BLOCK_D=max(16, next_power_of_2(batch.head_dim)),
        LOWER_RIGHT=batch.lower_right,
        add_ptr=None if batch.add_to is None else batch.add_to.contiguous(),
        **batch.segment_options, **batch.bias_options,
        num_warps=config.num_warps, num_stages=config.num_stages,
    )  # fmt: skip
    return out
