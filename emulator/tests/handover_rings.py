"""handover.py's kernel with a ring: what waits and arrives stands in another file."""

import triton
import triton.language as tl

from emulator.tests.checking import tlx
from emulator.tests.rings import ring


@triton.jit
def handover_kernel(desc, out_ptr, SIZE: tl.constexpr, STEPS: tl.constexpr, AGAIN: tl.constexpr):
    tiles = ring(tlx.local_alloc((SIZE,), tl.float32, 2), 2)
    with tlx.async_tasks():
        with tlx.async_task("default"):
            for i in tl.range(STEPS):
                stage = tiles.acquire(i)
                tlx.barrier_expect_bytes(tiles.full[stage], 4 * SIZE)
                tlx.async_descriptor_load(desc, tiles.tiles[stage], [i * SIZE], tiles.full[stage])
                if AGAIN:
                    tlx.barrier_arrive(tiles.full[stage])
        with tlx.async_task(num_warps=4):
            for i in tl.range(STEPS):
                stage = tiles.wait(i)
                tile = tlx.local_load(tiles.tiles[stage])
                tiles.release(i)
                tl.store(out_ptr + i * SIZE + tl.arange(0, SIZE), tile)
