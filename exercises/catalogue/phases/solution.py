"""One buffer, one producer, one consumer: out = 2 x, a block of rows at a time."""

import triton
import triton.language as tl
import triton.language.extra.tlx as tlx

ROWS = 64


@triton.jit
def fetch(desc, buffer, full, row):
    """Start the copy of ROWS rows; it arrives on `full`, with the bytes that it announces there."""
    tlx.barrier_expect_bytes(full, desc.block_shape[0] * desc.block_shape[1] * 2)
    tlx.async_descriptor_load(desc, buffer, [row, 0], full)


@triton.jit
def kernel(x_desc, out_ptr, blocks, DIM: tl.constexpr, ROWS: tl.constexpr):
    buffer = tlx.local_alloc((ROWS, DIM), tl.bfloat16, 1)
    # >>> Two barriers. A phase of `full` ends with one arrival, that of the copy, and its
    # bytes; a phase of `empty` when all threads of the consumer, 4 warps, have let go of the
    # buffer.
    # blank: full = tlx.alloc_barriers(1)
    # blank: empty = tlx.alloc_barriers(1)
    full = tlx.alloc_barriers(1)
    empty = tlx.alloc_warp_barrier(1, 4)
    # <<<
    with tlx.async_tasks():
        with tlx.async_task("default"):
            for block in tl.range(0, blocks):
                # >>> The producer: wait until the buffer is empty, then fetch(x_desc,
                # buffer[0], full[0], block * ROWS). Which phase? A wait for parity 1 passes a
                # fresh barrier.
                tlx.barrier_wait(empty[0], (block & 1) ^ 1)
                fetch(x_desc, buffer[0], full[0], block * ROWS)
                # <<<
        with tlx.async_task(num_warps=4):
            rows = tl.arange(0, ROWS)[:, None] * DIM
            for block in tl.range(0, blocks):
                # >>> The consumer: wait until the buffer is full, x =
                # tlx.local_load(buffer[0]), let go of it, and store 2 x.
                # blank: x = tl.zeros([ROWS, DIM], tl.float32)
                tlx.barrier_wait(full[0], block & 1)
                x = tlx.local_load(buffer[0])
                tlx.barrier_arrive(empty[0])
                # <<<
                tl.store(out_ptr + block * ROWS * DIM + rows + tl.arange(0, DIM)[None, :], 2 * x)
