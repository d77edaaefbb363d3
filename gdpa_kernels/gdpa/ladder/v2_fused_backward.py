"""v2, backward: one pass over the keys makes all three gradients.

Changes from v1_tiled_backward: the second kernel is gone. The program that owns BLOCK_N keys of one
(sequence, key head) holds dS of each block of queries anyway; it also computes dS K and adds it to
an fp32 dQ in memory. All tensors are accessed by TMA, dQ too: a reduce-add of a tile [BLOCK_M,
head_dim], done in L2 (gradients.py), which drops the rows beyond the sequence.

Why it should help: S and dP are computed once, 5 matmuls instead of 7, and so is the activation.
Why it may not: for every element of dQ 4 bytes are filled with zero, 4 are added by each block of
keys that sees its row, and at last 4 are read and 2 written by a kernel that scales and rounds. In
v1 it is 2 bytes in all.

| role      | warps     | registers | work                                                      |
|-----------|-----------|-----------|-----------------------------------------------------------|
| all warps | num_warps | up to 255 | five MMAs; thread 0 issues TMA loads, stores, reduce-adds |

| barrier       | arrivals    | filled by -> drained by                                            |
|---------------|-------------|--------------------------------------------------------------------|
| one per stage | 1 and bytes | TMA load of Q or dO, num_stages - 1 blocks ahead -> MMAs           |
| bulk group    | TMA         | reduce-add of a dQ tile has read its buffer -> the next tile of dQ |

The compiler makes the barriers. dQ is not deterministic: its reduce-adds land in any order. A
grad_out that TMA cannot read is copied first.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from gdpa_kernels.calling.launch import launch
from gdpa_kernels.device.ragged import load_rows, ragged_descriptor, store_rows, tma_readable
from gdpa_kernels.device.sequences import sequence
from gdpa_kernels.gdpa.batch import Batch
from gdpa_kernels.gdpa.device.derivatives import value_and_slope_per_head
from gdpa_kernels.gdpa.device.gradients import add_rows, round_kernel
from gdpa_kernels.gdpa.device.masks import mask_transposed, row_range


@dataclass(frozen=True)
class Config:
    """Launch constants: query rows and keys of a tile, warps, tiles of Q and dO in flight; whether
    dQ is added by TMA or by every thread."""

    BLOCK_M: int = 64
    BLOCK_N: int = 128
    num_warps: int = 8
    num_stages: int = 3
    by_tma: bool = True


def default_config(batch: Batch) -> Config:
    """Constants that compile without spills, but for a mask together with grouped heads at head_dim
    128; not measured."""
    return Config()


def is_deterministic(batch: Batch) -> bool:
    """Two additions to zero commute; with a third their order shows."""
    return batch.max_seqlen_k <= 2 * Config.BLOCK_N and not batch.shared_q


@triton.jit
def add_rows_by_threads(
    ptr, start, length, head, first_row, rows, NUM_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr
):
    """`add_rows` to a contiguous `[total, NUM_HEADS, HEAD_DIM]`, by atomic adds of every thread."""
    row = first_row + tl.arange(0, rows.shape[0])
    dim = tl.arange(0, rows.shape[1])
    first = (tl.cast(start, tl.int64) * NUM_HEADS + head) * HEAD_DIM
    offsets = row.to(tl.int64)[:, None] * (NUM_HEADS * HEAD_DIM) + dim[None, :]
    mask = (row < length)[:, None]
    if rows.shape[1] != HEAD_DIM:
        mask = mask & (dim < HEAD_DIM)[None, :]
    tl.atomic_add(ptr + first + offsets, rows, mask=mask, sem="relaxed")


@triton.jit(do_not_specialize=["max_seqlen_q", "max_seqlen_k"])
def fused_kernel(
    grad_desc, q_desc, k_desc, v_desc, dq_desc, dq_ptr, dk_desc, dv_desc,
    cu_seqlens_q_ptr, cu_seqlens_k_ptr, max_seqlen_q, max_seqlen_k, scale, output_scale,
    NUM_HEADS_K: tl.constexpr, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr,
    ACTIVATION: tl.constexpr, CAUSAL: tl.constexpr, WINDOW: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """dK and dV of BLOCK_N keys of one (sequence, key head), and what they add to dQ, unscaled.

    cu_seqlens_q_ptr None: one q for all sequences. dQ is added through dq_desc, or else through
    dq_ptr. A gradient for which there is neither is not needed, and the compiler drops its MMA.
    """
    blocks = tl.cdiv(max_seqlen_k, BLOCK_N)
    pid = tl.program_id(0)
    first_key = pid % blocks * BLOCK_N
    head_k = pid // blocks % NUM_HEADS_K
    batch = pid // blocks // NUM_HEADS_K

    start_q, start_out, len_q, start_k, len_k = sequence(
        cu_seqlens_q_ptr, cu_seqlens_k_ptr, batch, max_seqlen_q
    )
    if first_key >= len_k:
        return

    k = load_rows(k_desc, start_k, len_k, head_k, first_key)
    v = load_rows(v_desc, start_k, len_k, head_k, first_key)
    dk = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
    dv = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
    start, end = row_range(first_key, len_q, BLOCK_M, BLOCK_N, CAUSAL, WINDOW)
    span = tl.cdiv(end - start, BLOCK_M) * BLOCK_M
    for first_row in tl.range(start, start + span * GROUP, BLOCK_M):
        head = head_k * GROUP
        if GROUP > 1:
            member = (first_row - start) // span
            head += member
            first_row -= member * span
        q = load_rows(q_desc, start_q, len_q, head, first_row)
        s = tl.dot(k, q.T)
        p, slope = value_and_slope_per_head(s, scale, head, ACTIVATION, True)
        p = mask_transposed(p, first_row, first_key, CAUSAL, WINDOW)
        slope = mask_transposed(slope, first_row, first_key, CAUSAL, WINDOW)
        grad = load_rows(grad_desc, start_out, len_q, head, first_row)
        dp = tl.dot(v, grad.T)
        dv = tl.dot(p.to(grad.dtype), grad, dv)
        ds = (slope * dp).to(q.dtype)
        dk = tl.dot(ds, q, dk)
        dq = tl.dot(ds.T, k)
        if dq_desc is not None:
            add_rows(dq_desc, start_q, len_q, head, first_row, dq)
        elif dq_ptr is not None:
            add_rows_by_threads(
                dq_ptr, start_q, len_q, head, first_row, dq, NUM_HEADS_K * GROUP, HEAD_DIM
            )

    if dk_desc is not None:
        dk = (dk * (scale * output_scale)).to(k.dtype)
        store_rows(dk_desc, start_k, len_k, head_k, first_key, dk)
    if dv_desc is not None:
        dv = (dv * output_scale).to(v.dtype)
        store_rows(dv_desc, start_k, len_k, head_k, first_key, dv)


def backward(
    grad_out: torch.Tensor,
    batch: Batch,
    *,
    needs: tuple[bool, bool, bool] = (True, True, True),
    config: Config | None = None,
) -> tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]:
    """(dq, dk, dv), shaped as q, k and v, contiguous; None where `needs` is False.

    grad_out `[total_q, num_heads, head_dim]` of any strides. What is not needed is not computed.
    """
    if not any(needs):
        return None, None, None
    q, k, v = batch.q, batch.k, batch.v
    config = config or default_config(batch)
    dk, dv = (k.new_empty(k.shape) if need else None for need in needs[1:])
    sums = q.new_zeros(q.shape, dtype=torch.float32) if needs[0] else None
    tiles = triton.cdiv(batch.max_seqlen_k, config.BLOCK_N)
    k_desc = ragged_descriptor(k, config.BLOCK_N)
    launch(
        fused_kernel, (tiles * batch.num_heads_k * batch.sequences,), batch.device,
        ragged_descriptor(tma_readable(grad_out), config.BLOCK_M),
        ragged_descriptor(q, config.BLOCK_M), k_desc, ragged_descriptor(v, config.BLOCK_N),
        ragged_descriptor(sums, config.BLOCK_M) if needs[0] and config.by_tma else None,
        sums if needs[0] and not config.by_tma else None,
        ragged_descriptor(dk, config.BLOCK_N) if needs[1] else None,
        ragged_descriptor(dv, config.BLOCK_N) if needs[2] else None,
        batch.cu_seqlens_q, batch.cu_seqlens_k, batch.max_seqlen_q, batch.max_seqlen_k,
        batch.scale, batch.output_scale,
        NUM_HEADS_K=batch.num_heads_k, GROUP=batch.group, HEAD_DIM=batch.head_dim,
        ACTIVATION=batch.names, CAUSAL=batch.causal, WINDOW=batch.window,
        BLOCK_M=config.BLOCK_M, BLOCK_N=config.BLOCK_N, BLOCK_D=k_desc.block_shape[-1],
        num_warps=config.num_warps, num_stages=config.num_stages,
        early_tma_store_lowering=False,  # waits only where the next reduce-add needs the buffer
    )  # fmt: skip
    if not needs[0]:
        return None, dk, dv
    dq = q.new_empty(q.shape)
    launch(
        round_kernel, (triton.cdiv(dq.numel(), 4096),), batch.device,
        sums, dq, batch.scale * batch.output_scale, dq.numel(), BLOCK=4096,
    )  # fmt: skip
    return dq, dk, dv
