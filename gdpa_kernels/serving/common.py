"""What the kernels of joined.py and diagonal.py share: when they may run, and rows of a head."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from gdpa_kernels.calling import checks
from gdpa_kernels.calling.rung import capability

ELEMENTS = 4096  # of a tile: with four warps 32 of each tensor in a thread


@triton.jit
def row_pointers(ptr, row, head, dim, STRIDES: tl.constexpr):
    """Pointers [rows, dims] to one head of some rows; strides are (token, head, dim)."""
    base = ptr + row.to(tl.int64)[:, None] * STRIDES[0] + head.to(tl.int64) * STRIDES[1]
    return base + dim.to(tl.int64)[None, :] * STRIDES[2]


def can_launch(*tensors: torch.Tensor) -> bool:
    """Whether a kernel without gradients may take these tensors, of one dtype and device: up to
    fp32, on a GPU from sm_80 on, outside of autocast and of `torch.compile`."""
    first = tensors[0]
    return (
        first.dtype in checks.DTYPES
        and (capability(first.device) or (0, 0)) >= (8, 0)
        and not (torch.is_grad_enabled() and any(x.requires_grad for x in tensors))
        and not torch.is_autocast_enabled(first.device.type)
        and not torch.compiler.is_compiling()
    )
