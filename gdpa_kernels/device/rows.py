"""Loads and stores of the rows of tiles, for the warp-specialized rungs.

The copies are those of ragged.py, issued by a role and awaited on an mbarrier.
"""

import triton
import triton.language as tl
import triton.language.extra.tlx as tlx

from gdpa_kernels.device.ragged import BOUND


@triton.jit
def uniform(x):
    """The int32 scalar x, which the compiler then knows to be uniform across a warp.

    It does not know that about a loaded number. It keeps what it computes from one, stages and
    their addresses, in a register of every thread, and moves it to a uniform register before each
    MMA.
    """
    return tl.inline_asm_elementwise(
        "shfl.sync.idx.b32 $0, $1, 0, 31, 0xffffffff;", "=r,r", [x], dtype=tl.int32, is_pure=True,
        pack=1,
    )  # fmt: skip


@triton.jit
def keep_runtime(x):
    """0, which the compiler takes for a value that depends on x; ptxas knows that it is 0.

    Added to a buffer's index in a loop over x, it keeps the compiler from hoisting all buffer
    addresses out of the loop. There are more of them than registers: they would spill, and each
    MMA would wait for a load and for a move to a uniform register.
    """
    return tl.inline_asm_elementwise(
        "xor.b32 $0, $1, $1;", "=r,r", [x], dtype=tl.int32, is_pure=True, pack=1
    )


@triton.jit
def fetch_rows(desc, buffer, full, start, length, head, first_row):
    """Start the TMA load of rows first_row .. of one head; it arrives on `full`.

    Rows from `length` on become zero; the copy counts the bytes of the whole box all the same.
    """
    ROWS: tl.constexpr = desc.block_shape[3]
    WIDTH: tl.constexpr = desc.block_shape[4]
    tlx.barrier_expect_bytes(full, ROWS * WIDTH * tlx.size_of(tlx.dtype_of(desc)))
    coords = [BOUND, start + length, head, BOUND - length + first_row, 0]
    tlx.async_descriptor_load(desc, buffer, coords, full)


@triton.jit
def put_rows(desc, buffer, start, length, head, first_row, rows):
    """Start the TMA store of `rows` through `buffer`; rows from `length` on are dropped.

    The buffer is free again when `tlx.async_descriptor_store_wait` says so.
    """
    tlx.local_store(buffer, rows)
    tlx.fence("async_shared")
    coords = [BOUND, start + length, head, BOUND - length + first_row, 0]
    tlx.async_descriptor_store(desc, buffer, coords)


@triton.jit
def put_out(desc, buffer, start, length, head, row, rows):
    """Start the store of `rows` through `buffer`, in halves where that is half as wide; it waits
    until what the buffer held has been read."""
    if rows.shape[1] == desc.block_shape[4]:
        tlx.async_descriptor_store_wait(0)
        put_rows(desc, buffer, start, length, head, row, rows)
    else:
        WIDTH: tl.constexpr = desc.block_shape[4]
        halves = tl.permute(tl.reshape(rows, [rows.shape[0], 2, WIDTH]), (0, 2, 1))
        for half in tl.static_range(2):
            tlx.async_descriptor_store_wait(0)
            part = tl.split(halves)[half]
            tlx.local_store(buffer, part)
            tlx.fence("async_shared")
            coords = [BOUND, start + length, head, BOUND - length + row, half * WIDTH]
            tlx.async_descriptor_store(desc, buffer, coords)
