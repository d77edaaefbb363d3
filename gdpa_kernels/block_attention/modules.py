"""`BlockAttention`: block attention as a layer, with its projections."""

from __future__ import annotations

import torch
from torch import nn

from gdpa_kernels.block_attention.api import BLOCK_SIZES, IMPLS, block_attention
from gdpa_kernels.calling import checks, jagged, layers
from gdpa_kernels.calling.jagged import Jagged, Offsets
from gdpa_kernels.calling.lengths import Lengths


class BlockAttention(nn.Module):
    """Self-attention inside blocks of consecutive tokens of each sequence of a jagged batch.

    One linear layer makes q, k and v, which the kernels read in place; another one mixes the
    heads: y = W_out block_attention(W_qkv x). Under autocast it follows its linear layers.

    Args:
        embed_dim: features of a token.
        num_heads: query heads; must divide embed_dim. head_dim is embed_dim // num_heads.
        num_kv_heads: key and value heads; must divide num_heads. None means num_heads.
        block_size: 16, 32, 64 or 128 tokens.
        rotary: the base of a rotary embedding of q and k, or None for none. Pair i of a head is
            rotated by position * base ** (-2 i / head_dim) radians; positions start at 0 with each
            sequence, and do not start again with each block.
        rotate_v: rotate v too.
        bias: whether the two projections have one.
        impl: as `block_attention`.
        validate: check the values of the offsets; as `block_attention`.
        device, dtype: of the parameters.

    Raises:
        ValueError: an argument is wrong: its name, what is expected, what was received.
    """

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        num_kv_heads: int | None = None,
        block_size: int = 64,
        *,
        rotary: float | None = None,
        rotate_v: bool = False,
        bias: bool = True,
        impl: str = "auto",
        validate: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ):
        super().__init__()
        num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        layers.check_heads(embed_dim, num_heads, num_kv_heads)
        if not isinstance(block_size, int) or block_size not in BLOCK_SIZES:
            raise ValueError(
                f"block_size must be one of {', '.join(map(str, BLOCK_SIZES))}, got {block_size!r}"
            )
        if rotary is not None and (
            isinstance(rotary, bool) or not isinstance(rotary, int | float) or not rotary > 0
        ):
            raise ValueError(f"rotary must be None or a base above 0, got {rotary!r}")
        if rotate_v and rotary is None:
            raise ValueError("rotate_v must be False without rotary, got True")
        checks.check_impl(impl, IMPLS)
        head_dim = embed_dim // num_heads
        if rotary is not None and head_dim % 2:
            raise ValueError(
                f"embed_dim // num_heads must be even for a rotary embedding, got {head_dim}"
            )
        self.num_heads, self.num_kv_heads, self.head_dim = num_heads, num_kv_heads, head_dim
        self.embed_dim, self.block_size = embed_dim, block_size
        self.rotary, self.rotate_v = rotary, rotate_v
        self.impl, self.validate = impl, validate
        made = {"bias": bias, "device": device, "dtype": dtype}
        self.qkv = nn.Linear(embed_dim, (num_heads + 2 * num_kv_heads) * head_dim, **made)
        self.out = nn.Linear(embed_dim, embed_dim, **made)

    def forward(self, x: torch.Tensor | Jagged) -> torch.Tensor | Jagged:
        """The layer's output, of the kind and shape of x.

        x: a pair (values `[total_tokens, embed_dim]`, offsets `[batch + 1]` or `Lengths`), or a
        nested tensor `[batch, jagged, embed_dim]` of layout torch.jagged. A pair's int64 offsets
        come back as int32; a nested tensor's are converted in each call, `Lengths` once.
        """
        values, offsets, _ = jagged.read(x, self.embed_dim, validate=self.validate)
        return jagged.like(x, self._attend(values, offsets), offsets)

    def _attend(self, values: torch.Tensor, offsets: Offsets) -> torch.Tensor:
        """W_out block_attention(W_qkv values); the offsets are those that `forward` checked."""
        heads = [self.num_heads, self.num_kv_heads, self.num_kv_heads]
        qkv = self.qkv(values).unflatten(1, (sum(heads), self.head_dim))
        q, k, v = qkv.split(heads, dim=1)
        out = block_attention(
            q, k, v, offsets,
            block_size=self.block_size, rotary=self._turns(values, offsets),
            rotate_v=self.rotate_v, impl=self.impl, validate=False,
        )  # fmt: skip
        return self.out(out.flatten(1))

    def _turns(
        self, values: torch.Tensor, offsets: Offsets
    ) -> tuple[torch.Tensor, torch.Tensor] | None:
        """(sin, cos) of every token, fp32 `[total_tokens, head_dim // 2]`; waits for no device.
        With `Lengths` they are made once for all layers."""
        if self.rotary is None:
            return None
        made = self.rotary, self.head_dim, values.shape[0], offsets
        if not isinstance(offsets, Lengths):
            return _turns(*made)
        return offsets.once(("turns", *made[:2]), lambda: _turns(*made))

    def extra_repr(self) -> str:
        return (
            f"num_heads={self.num_heads}, num_kv_heads={self.num_kv_heads}, "
            f"block_size={self.block_size}, rotary={self.rotary}"
        )


def _turns(
    base: float, head_dim: int, total: int, offsets: Offsets
) -> tuple[torch.Tensor, torch.Tensor]:
    _, positions = jagged.places(total, offsets)
    pairs = torch.arange(head_dim // 2, device=positions.device)
    angles = positions[:, None] * base ** (-2.0 * pairs / head_dim)
    return angles.sin(), angles.cos()
