"""What the layers of both operators share."""

from __future__ import annotations

import torch
from torch import nn

from gdpa_kernels.calling import jagged
from gdpa_kernels.calling.jagged import Jagged


class Tokenwise(nn.Sequential):
    """Modules one after another on the values of a jagged batch, so that norms, linear layers and
    dropout stand beside attention in an `nn.Sequential`:

    >>> nn.Sequential(Tokenwise(nn.RMSNorm(32)), GDPASelfAttention(32, 4))    # doctest: +SKIP

    Nested tensors need it where a module of theirs does not take them.
    """

    def forward(self, x: torch.Tensor | Jagged) -> torch.Tensor | Jagged:
        """x, its values `[total_tokens, ...]` replaced; offsets are not read."""
        values, offsets, _ = jagged.read(x, validate=False)
        return jagged.like(x, super().forward(values), offsets)


def check_positive(**sizes: object) -> None:
    """Raises ValueError unless every size is an integer of at least 1."""
    for name, value in sizes.items():
        if not _is_positive(value):
            raise ValueError(f"{name} must be an integer of at least 1, got {value!r}")


def check_heads(embed_dim: object, num_heads: object, num_kv_heads: object) -> None:
    """Raises ValueError unless they are positive integers, each a divisor of the one before."""
    check_positive(embed_dim=embed_dim)
    whole, of = embed_dim, "embed_dim"
    for name, value in (("num_heads", num_heads), ("num_kv_heads", num_kv_heads)):
        if not _is_positive(value) or whole % value:
            raise ValueError(f"{name} must be a positive divisor of {of} {whole}, got {value!r}")
        whole, of = value, name


def _is_positive(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1
