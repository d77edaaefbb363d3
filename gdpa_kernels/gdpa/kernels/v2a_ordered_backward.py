"""v2a, backward: v2 with a fixed order of additions, and so the same bits in every run.

Changes from v2_fused_backward: not one launch for all blocks of keys, but one after another, each
for `slices` of them. Block i of a launch adds to slice i of an fp32 buffer [slices, total_q,
num_heads, head_dim]. So within a launch no two programs add to the same element, launches are
serial, and at the end PyTorch sums the slices in a fixed order.

What it costs: a launch for every BLOCK_N keys up to max_seqlen_k, each with a tail in which SMs
idle until its last programs end. Where launches would be small they take several blocks
(`count_slices`), and a slice costs 8 bytes for every element of dQ. The shapes of the call alone
decide, not the device: the order of additions is the same everywhere.

| role      | warps     | registers | work                                                      |
|-----------|-----------|-----------|-----------------------------------------------------------|
| all warps | num_warps | up to 255 | five MMAs; thread 0 issues TMA loads, stores, reduce-adds |

| barrier       | arrivals    | filled by -> drained by                                            |
|---------------|-------------|--------------------------------------------------------------------|
| one per stage | 1 and bytes | TMA load of Q or dO, num_stages - 1 blocks ahead -> MMAs           |
| bulk group    | TMA         | reduce-add of a dQ tile has read its buffer -> the next tile of dQ |
| launch        | all         | reduce-adds of its blocks of keys -> those of the next launch      |

The compiler makes the barriers. For a shared q every sequence has rows of its own in the buffer.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from gdpa_kernels.calling.launch import cdiv, launch
from gdpa_kernels.device.ragged import load_rows, ragged_descriptor, store_rows, tma_readable
from gdpa_kernels.device.sequences import sequence
from gdpa_kernels.gdpa.batch import Batch
from gdpa_kernels.gdpa.device.derivatives import value_and_slope_per_head
from gdpa_kernels.gdpa.device.gradients import add_rows, round_kernel
from gdpa_kernels.gdpa.device.masks import mask_transposed, row_range

PROGRAMS = 528
MOST_BYTES = 2**30


@dataclass(frozen=True)
class Config:
    """Launch constants: query rows and keys of a tile, warps, tiles of Q and dO in flight, slices;
    0 means `count_slices`."""

    BLOCK_M: int = 64
    BLOCK_N: int = 128
    num_warps: int = 8
    num_stages: int = 3
    slices: int = 0


def default_config(batch: Batch) -> Config:
    """Constants that compile without spills, but for a mask together with grouped heads at head_dim
    128; not measured."""
    return Config()


def count_slices(programs: int, blocks: int, dq_bytes: int) -> int:
    """The number of slices, at most `blocks` blocks of keys, that a launch takes, each with
    `programs` programs and an fp32 dQ of `dq_bytes` of its own."""
    wanted = cdiv(PROGRAMS, max(programs, 1))
    return max(1, min(blocks, wanted, 1 + MOST_BYTES // max(dq_bytes, 1)))


@triton.jit(do_not_specialize=["first_block", "rows", "max_seqlen_q"])
def ordered_kernel(
    grad_desc, q_desc, k_desc, v_desc, dq_desc, dk_desc, dv_desc,
    cu_seqlens_q_ptr, cu_seqlens_k_ptr, first_block, slices, rows, max_seqlen_q,
    scale, output_scale, NUM_HEADS_K: tl.constexpr, GROUP: tl.constexpr,
    ACTIVATION: tl.constexpr, CAUSAL: tl.constexpr, WINDOW: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """dK and dV of BLOCK_N keys of one (sequence, key head), and what they add to dQ, unscaled.

    The launch has `slices` blocks of keys from first_block on; a slice of dQ has `rows` rows.
    cu_seqlens_q_ptr None: one q for all sequences. A gradient whose descriptor is None is not
    needed, and the compiler drops its MMA.
    """
    pid = tl.program_id(0)
    first_key = (first_block + pid % slices) * BLOCK_N
    head_k = pid // slices % NUM_HEADS_K
    batch = pid // slices // NUM_HEADS_K

    start_q, start_out, len_q, start_k, len_k = sequence(
        cu_seqlens_q_ptr, cu_seqlens_k_ptr, batch, max_seqlen_q
    )
    start_dq = pid % slices * rows + start_out
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
            add_rows(dq_desc, start_dq, len_q, head, first_row, dq)

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
    blocks = slices = cdiv(batch.max_seqlen_k, config.BLOCK_N)
    sums = None
    if needs[0]:
        slices = config.slices or count_slices(
            batch.num_heads_k * batch.sequences,
            blocks,
            4 * batch.rows * batch.num_heads * batch.head_dim,
        )
        sums = q.new_zeros(slices * batch.rows, *q.shape[1:], dtype=torch.float32)
    k_desc = ragged_descriptor(k, config.BLOCK_N)
    arguments = (
        ragged_descriptor(tma_readable(grad_out), config.BLOCK_M),
        ragged_descriptor(q, config.BLOCK_M), k_desc, ragged_descriptor(v, config.BLOCK_N),
        ragged_descriptor(sums, config.BLOCK_M) if needs[0] else None,
        ragged_descriptor(dk, config.BLOCK_N) if needs[1] else None,
        ragged_descriptor(dv, config.BLOCK_N) if needs[2] else None,
        batch.cu_seqlens_q, batch.cu_seqlens_k,
    )  # fmt: skip
    for first_block in range(0, blocks, max(slices, 1)):
        launch(
            ordered_kernel, (slices * batch.num_heads_k * batch.sequences,), batch.device,
            *arguments, first_block, slices, batch.rows, batch.max_seqlen_q,
            batch.scale, batch.output_scale,
            NUM_HEADS_K=batch.num_heads_k, GROUP=batch.group,
            ACTIVATION=batch.names, CAUSAL=batch.causal, WINDOW=batch.window,
            BLOCK_M=config.BLOCK_M, BLOCK_N=config.BLOCK_N, BLOCK_D=k_desc.block_shape[-1],
            num_warps=config.num_warps, num_stages=config.num_stages,
            early_tma_store_lowering=False,  # waits only where the next reduce-add needs the buffer
        )  # fmt: skip
    if not needs[0]:
        return None, dk, dv
    parts = slices * (batch.sequences if batch.shared_q else 1)
    if parts != 1:
        sums = sums.view(parts, *q.shape).sum(0)
    dq = q.new_empty(q.shape)
    launch(
        round_kernel, (cdiv(dq.numel(), 4096),), batch.device,
        sums, dq, batch.scale * batch.output_scale, dq.numel(), BLOCK=4096,
    )  # fmt: skip
    return dq, dk, dv
