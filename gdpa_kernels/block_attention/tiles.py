"""The tile of a block and its softmax, for the kernels on plain pointers."""

import triton
import triton.language as tl

LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def tile(
    ptr, first_row, rows, head, first_dim,
    ROWS: tl.constexpr, STRIDES: tl.constexpr, HEAD_DIM: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Pointers [ROWS, WIDTH] to one head of the rows from first_row on, and the mask of those that
    exist.

    STRIDES are (token, head, dim), in elements. Only the first `rows` rows exist.
    """
    local = tl.arange(0, ROWS)
    dims = first_dim + tl.arange(0, WIDTH)
    start = ptr + first_row.to(tl.int64) * STRIDES[0] + tl.cast(head, tl.int64) * STRIDES[1]
    ptrs = start + (
        local.to(tl.int64)[:, None] * STRIDES[0] + dims.to(tl.int64)[None, :] * STRIDES[2]
    )
    mask = (local < rows)[:, None]
    if HEAD_DIM % WIDTH != 0:
        mask = mask & (dims < HEAD_DIM)[None, :]
    return ptrs, mask


@triton.jit
def load_tile(
    ptr, first_row, rows, head, first_dim,
    ROWS: tl.constexpr, STRIDES: tl.constexpr, HEAD_DIM: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """The tile [ROWS, WIDTH]; rows that do not exist read as zero, so that a neighbour's NaN stays
    where it is."""
    ptrs, mask = tile(ptr, first_row, rows, head, first_dim, ROWS, STRIDES, HEAD_DIM, WIDTH)
    return tl.load(ptrs, mask=mask, other=0.0)


@triton.jit
def store_tile(
    ptr, first_row, rows, head, first_dim, values,
    STRIDES: tl.constexpr, HEAD_DIM: tl.constexpr,
):  # fmt: skip
    """Write `values`, rounded once; rows that do not exist are not written."""
    ROWS: tl.constexpr = values.shape[0]
    WIDTH: tl.constexpr = values.shape[1]
    ptrs, mask = tile(ptr, first_row, rows, head, first_dim, ROWS, STRIDES, HEAD_DIM, WIDTH)
    tl.store(ptrs, values.to(ptr.dtype.element_ty), mask=mask)


@triton.jit
def softmax_parts(s, scale, rows):
    """exp2(t - max t) and its sum, for each row of t = log2(e) scale s over its first `rows`
    columns; the others become 0."""
    t = s * (scale * LOG2_E)
    t = tl.where((tl.arange(0, s.shape[1]) < rows)[None, :], t, float("-inf"))
    p = tl.exp2(t - tl.max(t, 1)[:, None])
    return p, tl.sum(p, 1)
