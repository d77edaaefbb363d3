"""Copies with the mixes of attention: three tensors read for one written, four for three.

Forward reads q, k and v and writes its output; backward also reads the output's gradient, and
writes those of q, k and v. PyTorch has no single kernel for the second mix.
"""

import torch
import triton
import triton.language as tl

from gdpa_kernels.calling.launch import launch


@triton.jit
def forward_copy(a_ptr, b_ptr, c_ptr, out_ptr, size, BLOCK: tl.constexpr):
    """out = a + b + c."""
    offsets = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = offsets < size
    a, b = tl.load(a_ptr + offsets, mask=mask), tl.load(b_ptr + offsets, mask=mask)
    c = tl.load(c_ptr + offsets, mask=mask)
    tl.store(out_ptr + offsets, a + b + c, mask=mask)


@triton.jit
def backward_copy(
    a_ptr, b_ptr, c_ptr, d_ptr, out_a_ptr, out_b_ptr, out_c_ptr, size, BLOCK: tl.constexpr
):
    """out_a = a + d, out_b = b + d, out_c = c + d."""
    offsets = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = offsets < size
    a, b = tl.load(a_ptr + offsets, mask=mask), tl.load(b_ptr + offsets, mask=mask)
    c, d = tl.load(c_ptr + offsets, mask=mask), tl.load(d_ptr + offsets, mask=mask)
    tl.store(out_a_ptr + offsets, a + d, mask=mask)
    tl.store(out_b_ptr + offsets, b + d, mask=mask)
    tl.store(out_c_ptr + offsets, c + d, mask=mask)


def copy(
    reads: tuple[torch.Tensor, ...],
    writes: tuple[torch.Tensor, ...],
    *,
    block: int = 2048,
    num_warps: int = 4,
) -> None:
    """Read three tensors and write one, or read four and write three, all contiguous and alike."""
    kernels = {(3, 1): forward_copy, (4, 3): backward_copy}
    mix = len(reads), len(writes)
    if mix not in kernels:
        raise ValueError(f"reads and writes must be 3 and 1 or 4 and 3 tensors, got {mix}")
    size = reads[0].numel()
    launch(
        kernels[mix], (triton.cdiv(size, block),), reads[0].device, *reads, *writes, size,
        BLOCK=block, num_warps=num_warps,
    )  # fmt: skip
