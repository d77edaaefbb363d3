"""Rows of a head, for the kernels of joined.py and diagonal.py."""

from __future__ import annotations

import triton
import triton.language as tl

ELEMENTS = 4096  # of a tile: with four warps 32 of each tensor in a thread


@triton.jit
def row_pointers(ptr, row, head, dim, STRIDES: tl.constexpr):
    """Pointers [rows, dims] to one head of some rows; strides are (token, head, dim)."""
    base = ptr + row.to(tl.int64)[:, None] * STRIDES[0] + head.to(tl.int64) * STRIDES[1]
    return base + dim.to(tl.int64)[None, :] * STRIDES[2]
