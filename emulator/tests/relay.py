"""A kernel of three roles for planted mistakes: tiles are loaded, doubled, and sent away."""

import triton
import triton.language as tl

from emulator.tests.checking import tlx


@triton.jit
def relay_kernel(desc, y, SIZE: tl.constexpr, STEPS: tl.constexpr, SLOTS: tl.constexpr):
    arrived = tlx.local_alloc((SIZE,), tl.float32, SLOTS)
    doubled = tlx.local_alloc((SIZE,), tl.float32, SLOTS)
    # Tiles that have come, and slots that have been read.
    come = tlx.alloc_barriers(SLOTS)
    read = tlx.alloc_barriers(SLOTS)
    # Tiles that are ready to go, and slots that have been sent.
    ready = tlx.alloc_barriers(SLOTS)
    sent = tlx.alloc_barriers(SLOTS)
    with tlx.async_tasks():
        # The role that loads.
        with tlx.async_task(num_warps=1):
            for i in tl.range(STEPS):
                slot = i % SLOTS
                turn = i // SLOTS % 2
                tlx.barrier_wait(read[slot], turn ^ 1)
                tlx.barrier_expect_bytes(come[slot], 4 * SIZE)
                tlx.async_descriptor_load(desc, arrived[slot], [i * SIZE], come[slot])

        # The role that computes.
        with tlx.async_task("default"):
            for i in tl.range(STEPS):
                slot = i % SLOTS
                turn = i // SLOTS % 2
                tlx.barrier_wait(come[slot], turn)
                tile = tlx.local_load(arrived[slot])
                tlx.barrier_arrive(read[slot])
                tile = tile + tile

                # The slot that the tile goes to may still be read by a copy.
                tlx.barrier_wait(sent[slot], turn ^ 1)
                tlx.local_store(doubled[slot], tile)
                tlx.fence("async_shared")
                tlx.barrier_arrive(ready[slot])

        # The role that sends.
        with tlx.async_task(num_warps=1):
            for i in tl.range(STEPS):
                slot = i % SLOTS
                turn = i // SLOTS % 2
                tlx.barrier_wait(ready[slot], turn)
                tlx.async_store(y + i * SIZE, doubled[slot], 4 * SIZE)
                tlx.async_descriptor_store_wait(0)
                tlx.barrier_arrive(sent[slot])
