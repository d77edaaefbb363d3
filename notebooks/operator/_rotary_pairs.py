"""Rotary of an accumulator, by two pairings: a kernel of one MMA, to see what the compiler moves.

out = the rotated product of a and b. Pairs of columns are (2 i, 2 i + 1), "interleaved", or
(i, i + DIM / 2), "half-split".
"""

from __future__ import annotations

import math
import re

import torch
import triton
import triton.language as tl
import triton.language.extra.tlx as tlx
from triton.tools.tensor_descriptor import TensorDescriptor

from gdpa_lab.measuring import compile_check

INNER = tl.constexpr(64)
PAIRINGS = ("interleaved", "half-split")
ROWS = {90: 64, 100: 128}
"""Rows of an MMA by compute capability."""


@triton.jit
def product(a, b, IN_TENSOR_MEMORY: tl.constexpr):
    """The accumulator, in registers."""
    if IN_TENSOR_MEMORY:
        acc = tlx.local_alloc((a.shape[0], b.shape[1]), tl.float32, 1, tlx.storage_kind.tmem)
        done = tlx.alloc_barriers(1)
        tlx.async_dot(a, b, acc[0], use_acc=False, mBarriers=[done[0]])
        tlx.barrier_wait(done[0], 0)
        return tlx.local_load(acc[0])
    else:
        return tlx.async_dot_wait(0, tlx.async_dot(a, b))


@triton.jit
def interleaved(x, sin, cos):
    HALF: tl.constexpr = x.shape[1] // 2
    even, odd = tl.split(tl.reshape(x, [x.shape[0], HALF, 2]))
    pairs = tl.join(even * cos - odd * sin, odd * cos + even * sin)
    return tl.reshape(pairs, x.shape)


@triton.jit
def half_split(x, sin, cos):
    HALF: tl.constexpr = x.shape[1] // 2
    low, high = tl.split(tl.permute(tl.reshape(x, [x.shape[0], 2, HALF]), [0, 2, 1]))
    pairs = tl.join(low * cos - high * sin, high * cos + low * sin)
    return tl.reshape(tl.permute(pairs, [0, 2, 1]), x.shape)


@triton.jit
def rotary_kernel(
    a_desc, b_desc, sin_cos_desc, out_desc, ROWS: tl.constexpr, DIM: tl.constexpr,
    PAIRING: tl.constexpr, SINES_FIRST: tl.constexpr, IN_TENSOR_MEMORY: tl.constexpr,
):  # fmt: skip
    a = tlx.local_alloc((ROWS, INNER), tl.bfloat16, 1)
    b = tlx.local_alloc((INNER, DIM), tl.bfloat16, 1)
    sin_cos = tlx.local_alloc((ROWS, DIM // 2), tl.float32, 2)
    out = tlx.local_alloc((ROWS, DIM), tl.bfloat16, 1)
    full = tlx.alloc_barriers(1)
    tlx.barrier_expect_bytes(full[0], 2 * INNER * (ROWS + DIM) + 4 * ROWS * DIM)
    tlx.async_descriptor_load(a_desc, a[0], [0, 0], full[0])
    tlx.async_descriptor_load(b_desc, b[0], [0, 0], full[0])
    tlx.async_descriptor_load(sin_cos_desc, sin_cos[0], [0, 0], full[0])
    tlx.async_descriptor_load(sin_cos_desc, sin_cos[1], [ROWS, 0], full[0])
    tlx.barrier_wait(full[0], 0)
    if SINES_FIRST:
        sin, cos = tlx.local_load(sin_cos[0]), tlx.local_load(sin_cos[1])
        x = product(a[0], b[0], IN_TENSOR_MEMORY)
    else:
        x = product(a[0], b[0], IN_TENSOR_MEMORY)
        sin, cos = tlx.local_load(sin_cos[0]), tlx.local_load(sin_cos[1])
    x = interleaved(x, sin, cos) if PAIRING == "interleaved" else half_split(x, sin, cos)
    tlx.local_store(out[0], x.to(tl.bfloat16))
    tlx.fence("async_shared")
    tlx.async_descriptor_store(out_desc, out[0], [0, 0])
    tlx.async_descriptor_store_wait(0)


def converted(ttgir: str) -> int:
    """Numbers of fp32 tiles that a kernel moves between threads to change their layout."""
    tiles = re.findall(r"ttg\.convert_layout .* -> tensor<([\dx]+)xf32", ttgir)
    return sum(math.prod(map(int, tile.split("x"))) for tile in tiles)


def build(
    pairing: str, sines_first: bool, capability: int, dim: int = 128
) -> triton.compiler.CompiledKernel:
    """The kernel for sm_<capability>; nothing runs."""
    rows = ROWS[capability]
    boxes = {
        "a_desc": ("bf16", rows, INNER.value), "b_desc": ("bf16", INNER.value, dim),
        "sin_cos_desc": ("fp32", rows, dim // 2), "out_desc": ("bf16", rows, dim),
    }  # fmt: skip
    types = {name: f"tensordesc<{kind}[{m}, {n}]>" for name, (kind, m, n) in boxes.items()}
    constants = {
        "ROWS": rows,
        "DIM": dim,
        "PAIRING": pairing,
        "SINES_FIRST": sines_first,
        "IN_TENSOR_MEMORY": capability > 90,
    }
    return compile_check.build(
        rotary_kernel, types, constants, capability=capability, options={"num_warps": 4}
    )


def check(pairing: str, sines_first: bool, capability: int, dim: int = 128) -> None:
    """Run the kernel, for instance in the emulator, against PyTorch."""
    make, rows, half = torch.Generator().manual_seed(0), ROWS[capability], dim // 2
    a = torch.randn(rows, INNER.value, generator=make).bfloat16()
    b = torch.randn(INNER.value, dim, generator=make).bfloat16()
    angles = torch.rand(rows, half, generator=make)
    sin_cos = torch.cat([angles.sin(), angles.cos()])
    out = torch.full((rows, dim), float("nan"), dtype=torch.bfloat16)
    boxes = [TensorDescriptor.from_tensor(x, [n, x.shape[1]])
             for x, n in ((a, rows), (b, INNER.value), (sin_cos, rows), (out, rows))]  # fmt: skip
    rotary_kernel[(1,)](*boxes, rows, dim, pairing, sines_first, capability > 90, num_warps=4)
    columns = torch.arange(dim)
    low, high = columns.view(half, 2).T if pairing == "interleaved" else columns.view(2, half)
    x, expected = a.float() @ b.float(), torch.empty(rows, dim)
    expected[:, low] = x[:, low] * angles.cos() - x[:, high] * angles.sin()
    expected[:, high] = x[:, high] * angles.cos() + x[:, low] * angles.sin()
    torch.testing.assert_close(out.float(), expected, rtol=2**-8, atol=1e-3)
