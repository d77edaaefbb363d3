"""`BlockAttention`: block attention as a layer, with its projections.

Every row of x passes the projections; attention sees the sequences that `read_jagged` has checked.
"""

from __future__ import annotations

import torch
from torch import nn

from gdpa_kernels.block_attention.api import block_attention, check_block_size, check_impls
from gdpa_kernels.calling import checks, jagged
from gdpa_kernels.calling.jagged import Jagged
from gdpa_kernels.layers import common
from gdpa_kernels.layers.rotary import check_rotary, sin_cos
from gdpa_kernels.norms.api import head_norm


class BlockAttention(nn.Module):
    """Self-attention inside blocks of consecutive tokens of each sequence of a jagged batch.

    One linear layer makes q, k and v, which the kernels read where they lie and whose gradient they
    write so; another one mixes the heads: y = W_out block_attention(W_qkv x). Under autocast it
    follows its linear layers.

    Args:
        embed_dim: features of a token.
        num_heads: query heads; must divide embed_dim. head_dim is embed_dim // num_heads.
        num_kv_heads: key and value heads; must divide num_heads. None means num_heads.
        block_size: 16, 32, 64 or 128 tokens.
        rotary: the base of a rotary embedding of q and k, or None for none. It is interleaved: the
            pair (x[2i], x[2i + 1]) of a head is rotated by position * base ** (-2 i / head_dim)
            radians; positions start at 0 with each sequence, and do not start again with each
            block. (sin, cos) are made once for the layers that share `Lengths`.
        rotate_v: rotate v too.
        qk_norm: RMSNorm of each head's rows of q and of k, with learned weights, before they are
            rotated. With it q and k are copies, and PyTorch concatenates the gradients.
        fused_qk_norm: qk_norm by `norms.api.head_norm`, over what the linear layer made, which no
            hook may keep, and with one packed gradient; as `GDPASelfAttention`.
        bias: whether the two projections have one.
        impl, backward_impl: as `block_attention`.
        validate: check the values of the offsets; as `block_attention`.
        device, dtype: of the parameters.

    Raises:
        TypeError, ValueError: an argument is wrong: its name, what is expected, what was received.
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
        qk_norm: bool = False,
        fused_qk_norm: bool = False,
        bias: bool = True,
        impl: str = "auto",
        backward_impl: str | None = None,
        validate: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ):
        super().__init__()
        embed_dim, num_heads, num_kv_heads = common.check_heads(embed_dim, num_heads, num_kv_heads)
        check_block_size(block_size)
        head_dim = embed_dim // num_heads
        check_rotary(rotary, head_dim)
        checks.check_bool(rotate_v=rotate_v, bias=bias, validate=validate)
        if rotate_v and rotary is None:
            raise ValueError("rotate_v must be False without rotary, got True")
        check_impls(impl, backward_impl)
        self.num_heads, self.num_kv_heads, self.head_dim = num_heads, num_kv_heads, head_dim
        self.embed_dim, self.block_size = embed_dim, block_size
        self.rotary, self.rotate_v = rotary, rotate_v
        self.impl, self.backward_impl, self.validate = impl, backward_impl, validate
        factory_kwargs = {"device": device, "dtype": dtype}
        self.qkv = nn.Linear(
            embed_dim, (num_heads + 2 * num_kv_heads) * head_dim, bias, **factory_kwargs
        )
        self.out = nn.Linear(embed_dim, embed_dim, bias, **factory_kwargs)
        self.q_norm, self.k_norm = common.head_norms(qk_norm, head_dim, factory_kwargs)
        self.fused_qk_norm = common.check_fused(qk_norm, fused_qk_norm)

    def forward(self, x: torch.Tensor | Jagged) -> torch.Tensor | Jagged:
        """The layer's output, of the kind and shape of x.

        x: a pair (values `[total_tokens, embed_dim]`, offsets `[batch + 1]` or `Lengths`), or a
        nested tensor `[batch, jagged, embed_dim]` of layout torch.jagged. A pair's int64 offsets
        come back as int32; a nested tensor's are converted in each call, `Lengths` once. Rows that
        follow the last sequence attend to nothing, and pass the projections as all rows do.
        """
        values, sequences = jagged.read_jagged(
            x, self.embed_dim, validate=self.validate, allow_padding=True
        )
        qkv = self.qkv(values)
        if self.fused_qk_norm:
            qkv = head_norm(
                qkv, (self.q_norm.weight, self.k_norm.weight), (self.num_heads, self.num_kv_heads),
                eps=common.EPSILON, overwrite_gradient=True,
            )  # fmt: skip
        q, k, v = qkv.unflatten(1, (-1, self.head_dim)), None, None
        if not self.fused_qk_norm:
            norms = self.q_norm, self.k_norm
            q, k, v = common.norm_and_rotate(q, k, v, self.num_kv_heads, *norms)
        rotation = sin_cos(self.rotary, self.head_dim, values, sequences)
        out = block_attention(
            q, k, v, sequences, num_kv_heads=self.num_kv_heads if k is None else None,
            block_size=self.block_size, rotary=rotation, rotate_v=self.rotate_v,
            impl=self.impl, backward_impl=self.backward_impl,
        )  # fmt: skip
        return jagged.like(x, self.out(out.flatten(1)), sequences)

    def extra_repr(self) -> str:
        return (
            f"num_heads={self.num_heads}, num_kv_heads={self.num_kv_heads}, "
            f"block_size={self.block_size}, rotary={self.rotary}"
        )
