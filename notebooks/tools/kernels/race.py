"""Exercise: the result of this kernel is right, and the kernel is wrong. Where?

One tile of `a @ b`, 64 columns of `a` at a time. `load` fills two buffers of each in turn; `math`
keeps one product in flight while it asks for the next.
Run it with `python -m tritonemu notebooks/tools/kernels/race.py:main`.
"""

import torch
import triton
import triton.language as tl
import triton.language.extra.tlx as tlx
from triton.tools.tensor_descriptor import TensorDescriptor


@triton.jit
def load(a_desc, b_desc, a, b, full, empty, blocks):
    for i in tl.range(blocks):
        stage, phase = i % 2, i // 2 % 2
        tlx.barrier_wait(empty[stage], phase ^ 1)
        tlx.barrier_expect_bytes(full[stage], 2 * 2 * 64 * 64)
        tlx.async_descriptor_load(a_desc, a[stage], [0, i * 64], full[stage])
        tlx.async_descriptor_load(b_desc, b[stage], [i * 64, 0], full[stage])


@triton.jit
def math(out_desc, a, b, full, empty, blocks):
    acc = tl.zeros([64, 64], tl.float32)
    for i in tl.range(blocks):
        stage, phase = i % 2, i // 2 % 2
        tlx.barrier_wait(full[stage], phase)
        acc = tlx.async_dot(a[stage], b[stage], acc)
        acc = tlx.async_dot_wait(1, acc)
        tlx.barrier_arrive(empty[stage])
    acc = tlx.async_dot_wait(0, acc)
    out_desc.store([0, 0], acc)


@triton.jit
def product_kernel(a_desc, b_desc, out_desc, blocks):
    a = tlx.local_alloc((64, 64), tl.bfloat16, 2)
    b = tlx.local_alloc((64, 64), tl.bfloat16, 2)
    full = tlx.alloc_barriers(2)
    empty = tlx.alloc_barriers(2)
    with tlx.async_tasks():
        with tlx.async_task("default"):
            math(out_desc, a, b, full, empty, blocks)
        with tlx.async_task(num_warps=1):
            load(a_desc, b_desc, a, b, full, empty, blocks)


def main(blocks: int = 4) -> None:
    make = torch.Generator().manual_seed(2025)
    a = torch.randn(64, 64 * blocks, generator=make).bfloat16()
    b = torch.randn(64 * blocks, 64, generator=make).bfloat16()
    out = torch.full((64, 64), float("nan"))
    descriptors = [
        TensorDescriptor(x, list(x.shape), list(x.stride()), [64, 64]) for x in (a, b, out)
    ]
    product_kernel[(1,)](*descriptors, blocks)
    torch.testing.assert_close(out, a.float() @ b.float(), atol=1e-4, rtol=1e-4)
