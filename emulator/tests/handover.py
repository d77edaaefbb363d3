"""A small kernel for the test of the mutants: one role loads, another stores."""

import triton
import triton.language as tl

from emulator.tests.checking import tlx


@triton.jit
def handover_kernel(desc, out_ptr, SIZE: tl.constexpr, STEPS: tl.constexpr, AGAIN: tl.constexpr):
    tiles = tlx.local_alloc((SIZE,), tl.float32, 2)
    full = tlx.alloc_barriers(2)
    empty = tlx.alloc_barriers(2)
    with tlx.async_tasks():
        with tlx.async_task("default"):
            for i in tl.range(STEPS):
                tlx.barrier_wait(
                    empty[i % 2],
                    (i // 2 + 1) % 2,
                )
                tlx.barrier_expect_bytes(full[i % 2], 4 * SIZE)
                tlx.async_descriptor_load(desc, tiles[i % 2], [i * SIZE], full[i % 2])
                if AGAIN:
                    tlx.barrier_arrive(full[i % 2])
        with tlx.async_task(num_warps=4):
            for i in tl.range(STEPS):
                tlx.barrier_wait(full[i % 2], i // 2 % 2)
                tile = tlx.local_load(tiles[i % 2])
                tlx.barrier_arrive(empty[i % 2])
                tl.store(out_ptr + i * SIZE + tl.arange(0, SIZE), tile)
