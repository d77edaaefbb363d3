"""What the fused backward rungs share: the rows of a step, adding to a sum in fp32, rounding it."""

import torch
import triton
import triton.language as tl

from gdpa_kernels.calling.launch import launch
from gdpa_kernels.device.ragged import BOUND
from gdpa_kernels.gdpa.batch import Batch


def requires_few_keys(batch: Batch, most: int) -> str | None:
    """Why a rung that writes dQ once, from all of at most `most` keys, cannot take a call, or
    None."""
    if batch.shared_q:
        return "needs cu_seqlens_q, got None: a shared q"
    if batch.max_seqlen_k > most:
        return f"needs a max_seqlen_k of at most {most}, got {batch.max_seqlen_k}"
    return None


@triton.aggregate
class Gradients:
    """Where dQ, or what adds up to it, dK and dV go: TMA descriptors."""

    dq: tl.tensor_descriptor
    dk: tl.tensor_descriptor
    dv: tl.tensor_descriptor


@triton.jit
def place(step, steps, start, head_k, GROUP: tl.constexpr, ROWS: tl.constexpr):
    """(head, row) of a step: the rows from `start` on of the group's first head, in `steps` steps,
    then of the next."""
    if GROUP == 1:
        return head_k, start + step * ROWS
    return head_k * GROUP + step // steps, start + step % steps * ROWS


@triton.jit
def add_rows(desc, start, length, head, first_row, rows):
    """Add `rows` of one head at first_row, by a TMA reduce-add; rows from `length` on are dropped.

    Addressed as in `ragged.store_rows`. Each element is added atomically, in any order.
    """
    box = tl.reshape(rows, [1, 1, 1, desc.block_shape[3], desc.block_shape[4]])
    desc.atomic_add([BOUND, start + length, head, BOUND - length + first_row, 0], box)


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


@triton.jit
def round_kernel(
    sums_ptr, out_ptr, factor, count, BLOCK: tl.constexpr,
    WIDTH: tl.constexpr = 1, STRIDE: tl.constexpr = 1,
):  # fmt: skip
    """out = factor * sums, `count` elements, rounded to out's dtype; rows of WIDTH elements, which
    start STRIDE apart in out."""
    offsets = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = offsets < count
    sums = tl.load(sums_ptr + offsets, mask=mask, other=0.0)
    if STRIDE != WIDTH:
        offsets = offsets // WIDTH * STRIDE + offsets % WIDTH
    tl.store(out_ptr + offsets, (factor * sums).to(out_ptr.dtype.element_ty), mask=mask)


def rounded(sums: torch.Tensor, dq: torch.Tensor, factor: float, batch: Batch) -> torch.Tensor:
    """dq = factor * sums, fp32 `[rows, num_heads, head_dim]`; of a shared q, summed over the
    sequences, in new memory."""
    if batch.shared_q:
        return (sums.view(batch.sequences, *dq.shape).sum(0) * factor).to(dq.dtype)
    launch(
        round_kernel, (triton.cdiv(dq.numel(), 4096),), batch.device,
        sums, dq, factor, dq.numel(), BLOCK=4096,
        WIDTH=dq.shape[1] * dq.shape[2], STRIDE=dq.stride(0),
    )  # fmt: skip
    return dq
