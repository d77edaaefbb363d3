"""Tiles of the rows of a sequence by pointers, for forward and backward v1: of any strides."""

import triton
import triton.language as tl


@triton.jit
def tile_pointers(
    ptr, first_row, length, ROWS: tl.constexpr,
    STRIDES: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Pointers [ROWS, BLOCK_D] to the rows from first_row on, and the mask of those that exist.

    Offsets are 64-bit and start from the row's number: pointers the compiler can hoist out of the
    loop stay alive across both MMAs, and spill.
    """
    rows = first_row + tl.arange(0, ROWS)
    dims = tl.arange(0, BLOCK_D)
    ptrs = ptr + (rows.to(tl.int64)[:, None] * STRIDES[0] + dims.to(tl.int64)[None, :] * STRIDES[2])
    mask = (rows < length)[:, None]
    if BLOCK_D != HEAD_DIM:
        mask = mask & (dims < HEAD_DIM)[None, :]
    return ptrs, mask
