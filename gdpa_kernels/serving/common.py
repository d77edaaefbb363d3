"""When the kernels of joined.py and diagonal.py may run, and what stands in for a copy of rows."""

from __future__ import annotations

import torch

from gdpa_kernels.calling import checks, compiler
from gdpa_kernels.calling.rung import capability
from gdpa_kernels.calling.sequences import token_positions


def can_launch(*tensors: torch.Tensor) -> bool:
    """Whether a kernel without gradients may take these tensors, of one dtype and device: up to
    fp32, on a GPU from sm_80 on, outside of autocast and of `torch.compile`, where there is a
    Triton to compile it."""
    first = tensors[0]
    return (
        first.dtype in checks.DTYPES
        and (capability(first.device) or (0, 0)) >= (8, 0)
        and not (torch.is_grad_enabled() and any(x.requires_grad for x in tensors))
        and not torch.is_autocast_enabled(first.device.type)
        and not torch.compiler.is_compiling()
        and compiler.problem(tlx=False) is None
    )


def join_copies(
    cached: torch.Tensor,
    candidates: torch.Tensor,
    cached_ends: torch.Tensor,
    new_ends: torch.Tensor,
) -> torch.Tensor:
    """`joined.join` by PyTorch, of rows that were copied out of the pages; waits for no device."""
    out = cached.new_empty(len(cached) + len(candidates), *cached.shape[1:])
    user, position = token_positions(len(cached), cached_ends)
    out[cached_ends[user] + new_ends[user] + position] = cached
    user, position = token_positions(len(candidates), new_ends)
    out[cached_ends[user + 1] + new_ends[user] + position] = candidates
    return out
