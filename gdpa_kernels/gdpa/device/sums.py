"""Sums of partial outputs, of splits of the keys, which without softmax need no rescaling."""

import torch
import triton
import triton.language as tl

from gdpa_kernels.calling.launch import cdiv, launch, next_power_of_2


@triton.jit(do_not_specialize=["parts"])
def sum_kernel(
    parts_ptr, add_ptr, out_ptr, parts, size, MOST: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """BLOCK elements of the sum of `parts`, at most MOST, of `size` elements each, and of add_ptr's
    unless None."""
    offsets = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = offsets < size
    total = tl.zeros([BLOCK], tl.float32)
    for part in tl.static_range(MOST):
        mask = inside & (part < parts)
        total += tl.load(parts_ptr + part * size.to(tl.int64) + offsets, mask=mask, other=0.0)
    if add_ptr is not None:
        total += tl.load(add_ptr + offsets, mask=inside, other=0.0).to(tl.float32)
    tl.store(out_ptr + offsets, total.to(out_ptr.dtype.element_ty), mask=inside)


def add_up(parts: torch.Tensor, add_to: torch.Tensor | None, out: torch.Tensor) -> torch.Tensor:
    """`out`, contiguous, with the sum of fp32 `parts` `[n, *out.shape]`, always in the same order,
    and of `add_to`, of out's shape or None; rounded once."""
    size, block = out.numel(), 1024
    launch(
        sum_kernel, (cdiv(size, block),), out.device,
        parts, None if add_to is None else add_to.contiguous(), out, parts.shape[0], size,
        MOST=next_power_of_2(parts.shape[0]), BLOCK=block, num_warps=4,
    )  # fmt: skip
    return out
