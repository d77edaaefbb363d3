"""Exercise: for which numbers of blocks does this kernel work, and why not for the others?

The maxima of several tiles, one after the other, in one persistent program. Both roles count the
blocks of each tile from zero.
Run it with `python -m tritonemu notebooks/tools/kernels/phase.py:main`.
"""

import torch
import triton
import triton.language as tl
import triton.language.extra.tlx as tlx
from triton.tools.tensor_descriptor import TensorDescriptor

BLOCKS = 3


@triton.jit
def load(x_desc, x, x_full, x_empty, tiles, blocks):
    for tile in tl.range(tiles):
        for i in tl.range(blocks):
            stage, phase = i % 2, i // 2 % 2
            tlx.barrier_wait(x_empty[stage], phase ^ 1)
            tlx.barrier_expect_bytes(x_full[stage], 4 * 128)
            tlx.async_descriptor_load(x_desc, x[stage], [(tile * blocks + i) * 128], x_full[stage])


@triton.jit
def largest(out_ptr, x, x_full, x_empty, tiles, blocks):
    for tile in tl.range(tiles):
        best = tl.full([128], float("-inf"), tl.float32)
        for i in tl.range(blocks):
            stage, phase = i % 2, i // 2 % 2
            tlx.barrier_wait(x_full[stage], phase)
            best = tl.maximum(best, tlx.local_load(x[stage]))
            tlx.barrier_arrive(x_empty[stage])
        tl.store(out_ptr + tile, tl.max(best))


@triton.jit
def largest_kernel(x_desc, out_ptr, tiles, blocks):
    x = tlx.local_alloc((128,), tl.float32, 2)
    x_full = tlx.alloc_barriers(2)
    x_empty = tlx.alloc_barriers(2)
    with tlx.async_tasks():
        with tlx.async_task("default"):
            largest(out_ptr, x, x_full, x_empty, tiles, blocks)
        with tlx.async_task(num_warps=1):
            load(x_desc, x, x_full, x_empty, tiles, blocks)


def main(blocks: int = BLOCKS, tiles: int = 3) -> None:
    x = torch.randn(tiles, blocks * 128, generator=torch.Generator().manual_seed(2025))
    out = torch.full((tiles,), float("nan"))
    x_desc = TensorDescriptor(x.flatten(), [x.numel()], [1], [128])
    largest_kernel[(1,)](x_desc, out, tiles, blocks)
    torch.testing.assert_close(out, x.amax(1))
