"""The arguments of a call of `block_attention` as its implementations take them."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from gdpa_kernels.calling import checks
from gdpa_kernels.calling.base_batch import BaseBatch, GradientTriple
from gdpa_kernels.calling.recipe import WorkList as WorkList

Rotary = tuple[torch.Tensor, torch.Tensor]


@dataclass(frozen=True)
class Batch(BaseBatch):
    """A jagged batch and what is to be computed of it; already validated.

    q `[total, num_heads, head_dim]`, k and v `[total, num_heads_k, head_dim]`; cu_seqlens int32
    `[sequences + 1]`; rotary (sin, cos), each `[total, head_dim // 2]`, or None. `gradients`: where
    dq, dk and dv are to be written, of any strides; None for memory of their own.
    """

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    cu_seqlens: torch.Tensor
    scale: float
    block_size: int = 64
    rotary: Rotary | None = None
    rotate_v: bool = False
    gradients: GradientTriple = (None, None, None)

    @property
    def offsets(self) -> tuple[torch.Tensor]:
        """The offsets as a `Recipe` takes them."""
        return (self.cu_seqlens,)

    @property
    def total(self) -> int:
        return self.q.shape[0]

    def pairs(self) -> int:
        """Pairs of a query and a key of one block, of one head. Reads the offsets, which waits for
        the device; where they cannot be read, as in fake calls, all blocks are full."""
        size = self.block_size
        if not checks.is_readable(self.cu_seqlens):
            return self.total * size
        lengths = self.cu_seqlens.diff().long()
        return int((lengths // size * size**2 + (lengths % size) ** 2).sum())
