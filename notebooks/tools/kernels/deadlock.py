"""Exercise: why does this kernel hang, and for which numbers of rows does it not?

The sum of each column of `x`. `load` fills two buffers of 32 rows in turn, `add` drains them.
Run it with `python -m tritonemu notebooks/tools/kernels/deadlock.py:main`.
"""

import torch
import triton
import triton.language as tl
import triton.language.extra.tlx as tlx
from triton.tools.tensor_descriptor import TensorDescriptor


@triton.jit
def load(x_desc, x, x_full, x_empty, rows, BLOCK: tl.constexpr, COLUMNS: tl.constexpr):
    for i in tl.range(rows // BLOCK):
        stage, phase = i % 2, i // 2 % 2
        tlx.barrier_wait(x_empty[stage], phase ^ 1)
        tlx.barrier_expect_bytes(x_full[stage], 4 * BLOCK * COLUMNS)
        tlx.async_descriptor_load(x_desc, x[stage], [i * BLOCK, 0], x_full[stage])


@triton.jit
def add(out_ptr, x, x_full, x_empty, rows, BLOCK: tl.constexpr, COLUMNS: tl.constexpr):
    total = tl.zeros([COLUMNS], tl.float32)
    for i in tl.range(tl.cdiv(rows, BLOCK)):
        stage, phase = i % 2, i // 2 % 2
        tlx.barrier_wait(x_full[stage], phase)
        tile = tlx.local_load(x[stage])
        tlx.barrier_arrive(x_empty[stage])
        total += tl.sum(tile, 0)
    tl.store(out_ptr + tl.arange(0, COLUMNS), total)


@triton.jit
def sum_kernel(x_desc, out_ptr, rows, BLOCK: tl.constexpr, COLUMNS: tl.constexpr):
    x = tlx.local_alloc((BLOCK, COLUMNS), tl.float32, 2)
    x_full = tlx.alloc_barriers(2)
    x_empty = tlx.alloc_barriers(2)
    with tlx.async_tasks():
        with tlx.async_task("default"):
            add(out_ptr, x, x_full, x_empty, rows, BLOCK, COLUMNS)
        with tlx.async_task(num_warps=1):
            load(x_desc, x, x_full, x_empty, rows, BLOCK, COLUMNS)


def main(rows: int = 100) -> None:
    x = torch.arange(rows * 32, dtype=torch.float32).reshape(rows, 32)
    out = torch.full((32,), float("nan"))
    sum_kernel[(1,)](TensorDescriptor(x, [rows, 32], [32, 1], [32, 32]), out, rows, 32, 32)
    torch.testing.assert_close(out, x.sum(0))
