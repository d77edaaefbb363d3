"""What the fused backward rungs share: adding to a sum in fp32, and rounding it."""

import triton
import triton.language as tl

from gdpa_kernels.device.ragged import BOUND


@triton.aggregate
class Gradients:
    """Where dQ, or what adds up to it, dK and dV go: TMA descriptors."""

    dq: tl.tensor_descriptor
    dk: tl.tensor_descriptor
    dv: tl.tensor_descriptor


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
