"""Interleaved rotary embedding of a tile in registers: pairs of adjacent columns are rotated."""

import triton
import triton.language as tl


@triton.jit
def rotate(x, sin, cos):
    """Rotate pairs of adjacent columns of x [rows, width], fp32; sin, cos [rows, width // 2]."""
    ROWS: tl.constexpr = x.shape[0]
    WIDTH: tl.constexpr = x.shape[1]
    even, odd = tl.split(tl.reshape(x, [ROWS, WIDTH // 2, 2]))
    pairs = tl.join(even * cos - odd * sin, odd * cos + even * sin)
    return tl.reshape(pairs, [ROWS, WIDTH])


@triton.jit
def rotate_transposed(g, sin, cos):
    """The transpose of `rotate`, applied to g [rows, width], fp32."""
    return rotate(g, -sin, cos)


@triton.jit
def rotate_back(g, sin, cos):
    """`rotate_transposed` without a negated sin, which would take registers where sin is kept."""
    ROWS: tl.constexpr = g.shape[0]
    WIDTH: tl.constexpr = g.shape[1]
    even, odd = tl.split(tl.reshape(g, [ROWS, WIDTH // 2, 2]))
    pairs = tl.join(even * cos + odd * sin, odd * cos - even * sin)
    return tl.reshape(pairs, [ROWS, WIDTH])
