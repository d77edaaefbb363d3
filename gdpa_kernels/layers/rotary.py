"""Rotary embeddings of the layers: sines and cosines by position, and the rotation itself.

The layers call `sin_cos` for the positions of a batch and serving/layers.py `sin_cos_at` for those
behind a history; kernels rotate by them, or `rotate` by PyTorch.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from gdpa_kernels.calling import checks
from gdpa_kernels.calling.lengths import Lengths
from gdpa_kernels.calling.recipe import Recipe
from gdpa_kernels.calling.sequences import Sequences, token_positions


def sin_cos(
    base: float | None, head_dim: int, values: torch.Tensor, sequences: Sequences | Lengths
) -> tuple[torch.Tensor, torch.Tensor] | None:
    """(sin, cos) of the rotary embedding of every row of `values`, `[total_tokens, head_dim // 2]`,
    fp32, of fp64 values fp64; of `Lengths` made once for all layers. Waits for no device. None of
    base None."""
    if base is None:
        return None
    dtype = torch.promote_types(values.dtype, torch.float32)
    return sequences.once(_SinCos(base, head_dim, dtype, values.shape[0]))


@dataclass(frozen=True)
class _SinCos(Recipe[tuple[torch.Tensor, torch.Tensor]]):
    base: float
    head_dim: int
    dtype: torch.dtype
    total: int

    def make(self, cu_seqlens, beside=None):
        _, positions = token_positions(self.total, cu_seqlens)
        return sin_cos_at(self.base, self.head_dim, positions, self.dtype)


def sin_cos_at(
    base: float, head_dim: int, positions: torch.Tensor, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """`sin_cos` of rows at these positions, `[rows]`."""
    pairs = torch.arange(head_dim // 2, dtype=dtype, device=positions.device)
    angles = positions[:, None] * base ** (-2.0 * pairs / head_dim)
    return angles.sin(), angles.cos()


def rotate(x: torch.Tensor, sin: torch.Tensor, cos: torch.Tensor) -> torch.Tensor:
    """x `[total_tokens, num_heads, head_dim]`, each pair (x[2i], x[2i + 1]) rotated."""
    even, odd = x.unflatten(-1, (-1, 2)).unbind(-1)
    sin, cos = sin[:, None], cos[:, None]
    rotated = torch.stack((even * cos - odd * sin, odd * cos + even * sin), dim=-1)
    return rotated.flatten(-2).to(x.dtype)


def check_rotary(rotary: object, head_dim: int) -> None:
    """Raises TypeError or ValueError unless rotary is None, or a positive number and head_dim
    even."""
    if rotary is None:
        return
    checks.check_float("rotary", rotary)
    if rotary <= 0:
        raise ValueError(f"rotary must be None or a base above 0, got {rotary!r}")
    if head_dim % 2:
        raise ValueError(
            f"embed_dim // num_heads must be even for a rotary embedding, got {head_dim}"
        )
