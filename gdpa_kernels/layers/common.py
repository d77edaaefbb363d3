"""What the layers of both operators share: `Tokenwise`, norms of heads, checks of sizes.

gdpa.py and block_attention.py use it, and serving/layers.py `norm_and_rotate`.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

from gdpa_kernels.calling import checks, jagged, packed
from gdpa_kernels.calling.jagged import Jagged
from gdpa_kernels.layers.rotary import rotate

EPSILON = 1e-6
"""Added to the mean square of a row of q or k before it is normalised."""


class Tokenwise(nn.Sequential):
    """Modules one after another on the values of a jagged batch, so that norms, linear layers and
    dropout stand beside attention in an `nn.Sequential`:

    >>> nn.Sequential(Tokenwise(nn.RMSNorm(32)), GDPASelfAttention(32, 4))    # doctest: +SKIP

    Nested tensors need it where a module of theirs does not take them.
    """

    def forward(self, x: torch.Tensor | Jagged) -> torch.Tensor | Jagged:
        """x, its values `[total_tokens, ...]` replaced; offsets are not read."""
        values, sequences = jagged.read_jagged(x, validate=False, allow_padding=True)
        return jagged.like(x, super().forward(values), sequences)


class HeadNorm(nn.RMSNorm):
    """RMSNorm of the rows of each head, one weight for all heads: x / rms(x) * weight, in x's
    dtype, also under autocast, which on a GPU would make it fp32."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with checks.without_autocast(x):
            return F.rms_norm(x, self.normalized_shape, self.weight.to(x.dtype), self.eps)


def head_norms(
    qk_norm: bool, head_dim: int, factory_kwargs: dict
) -> tuple[HeadNorm | None, HeadNorm | None]:
    """The norms of q and of k, of the device and dtype in factory_kwargs; None without qk_norm."""
    if not qk_norm:
        return None, None
    q_norm, k_norm = (HeadNorm(head_dim, EPSILON, **factory_kwargs) for _ in "qk")
    return q_norm, k_norm


def norm_and_rotate(
    q: torch.Tensor, k: torch.Tensor | None, v: torch.Tensor | None, num_kv_heads: int,
    q_norm: HeadNorm | None, k_norm: HeadNorm | None,
    rotation: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:  # fmt: skip
    """q, k and v `[total_tokens, heads, head_dim]`, normalised and rotated by PyTorch, which makes
    them three tensors; without norms and rotation as they were."""
    if q_norm is not None or rotation is not None:
        q, k, v = packed.unpack(q, k, v, num_kv_heads)
    if q_norm is not None:
        q, k = q_norm(q), k_norm(k)
    if rotation is not None:
        q, k = rotate(q, *rotation), rotate(k, *rotation)
    return q, k, v


def check_fused(qk_norm: bool, fused_qk_norm: object) -> bool:
    """fused_qk_norm. Raises TypeError unless both are bools, ValueError if it is true without
    qk_norm."""
    checks.check_bool(qk_norm=qk_norm, fused_qk_norm=fused_qk_norm)
    if fused_qk_norm and not qk_norm:
        raise ValueError(f"fused_qk_norm must be False without qk_norm, got {fused_qk_norm!r}")
    return fused_qk_norm


def check_heads(embed_dim: object, num_heads: object, num_kv_heads: object) -> tuple[int, int, int]:
    """The three as integers of Python, num_kv_heads of None those of q. Raises TypeError or
    ValueError unless they are positive integers, each a divisor of the one before."""
    num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
    checks.check_positive(embed_dim=embed_dim)
    for name, value, multiple, size in (
        ("num_heads", num_heads, "embed_dim", embed_dim),
        ("num_kv_heads", num_kv_heads, "num_heads", num_heads),
    ):
        integer = checks.is_integer(value)
        if not integer or value < 1 or size % value:
            error = ValueError if integer else TypeError
            raise error(f"{name} must be a positive divisor of {multiple} {size}, got {value!r}")
    return int(embed_dim), int(num_heads), int(num_kv_heads)
