"""Attention of a model, exchanged alone: the package's operators, and what else one could use.

Each function takes q, k, v `[rows, num_heads, head_dim]` and the lengths of both sides; lengths_q
None is one q for all sequences. `padded_sdpa` and `fa2_varlen` have softmax, whatever activation
and output_scale say: their times can be compared, their functions are others.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch
from torch.nn import functional as F

from gdpa_kernels import PFFN, PMA, BlockAttention, GDPASelfAttention, Lengths, gdpa, jagged
from gdpa_kernels.calling.recipe import Recipe
from gdpa_kernels.gdpa.reference import ACTIVATIONS
from gdpa_kernels.layers.rotary import rotate, sin_cos

OURS = {
    "gdpa": {"gdpa": {}, "block_attention": {}},
    "v1": {
        "gdpa": {"impl": "v1_tiled", "backward_impl": "v1_tiled_backward"},
        "block_attention": {"impl": "v1_one_tile"},
    },
}
"""Arguments of the layers and operators: the fastest rungs, and the first ones in plain Triton."""


def fa2_varlen(q, k, v, lengths_q, lengths_k, *, scale, causal=False, window=None, **_):
    """FlashAttention-2 on jagged batches, as PyTorch has it; bf16 or fp16 on a GPU."""
    from torch.nn.attention.varlen import varlen_attn

    if lengths_q is None:
        rows, batch = q.shape[0], lengths_k.batch
        lengths_q = equal(lengths_k, rows)
        q = q.repeat(batch, 1, 1)
    side = -1 if window is None else window
    masked = {"window_size": (side, 0 if causal else side)} if causal or side >= 0 else {}
    return varlen_attn(
        q, k, v, lengths_q.cu_seqlens, lengths_k.cu_seqlens, lengths_q.max_seqlen,
        lengths_k.max_seqlen, scale=scale, **masked,
    )  # fmt: skip


def padded_sdpa(q, k, v, lengths_q, lengths_k, *, scale, causal=False, window=None, **_):
    """PyTorch's attention on padded batches with a mask, padding and unpadding included."""
    (q, k, v), keep = _padded(q, k, v, lengths_q, lengths_k, causal, window)
    some = keep.any(-1, keepdim=True)  # a row without keys: no NaN, which gradients would keep
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=keep | ~some, scale=scale)
    return _unpadded(out.masked_fill(~some, 0), lengths_q)


def eager(
    q, k, v, lengths_q, lengths_k, *, scale, output_scale=1.0, activation=None, causal=False,
    window=None,
):  # fmt: skip
    """The operators' mathematics in plain PyTorch, padded; activation None is softmax."""
    (q, k, v), keep = _padded(q, k, v, lengths_q, lengths_k, causal, window)
    scores = scale * q @ k.mT
    if activation is None:
        scores = scores.masked_fill(~keep, torch.finfo(scores.dtype).min).softmax(-1)
    else:
        scores = ACTIVATIONS[activation].function(scores)
    out = output_scale * scores.masked_fill(~keep, 0).to(v.dtype) @ v
    return _unpadded(out, lengths_q)


def _padded(q, k, v, lengths_q, lengths_k, causal, window):
    """q, k, v `[batch, num_heads, length, head_dim]`, and which pairs count."""

    def pad(x, lengths):
        if lengths is None:
            return x.transpose(0, 1).expand(lengths_k.batch, -1, -1, -1)
        longest = max(8, -(-lengths.max_seqlen // 8) * 8)  # SDPA's kernels want masks of 8 k
        return jagged.to_padded_tensor((x, lengths), max_seqlen=longest).transpose(1, 2)

    q, k, v = pad(q, lengths_q), pad(k, lengths_k), pad(v, lengths_k)
    key = torch.arange(k.shape[2], device=k.device)
    distance = torch.arange(q.shape[2], device=k.device)[:, None] - key
    keep = key < lengths_k.cu_seqlens.diff()[:, None, None, None]
    keep = keep & (distance >= 0) if causal else keep
    return (q, k, v), keep if window is None else keep & (distance.abs() <= window)


def _unpadded(out, lengths_q):
    out = out.transpose(1, 2)
    return out.flatten(0, 1) if lengths_q is None else jagged.from_padded_tensor(out, lengths_q)[0]


ATTENTIONS = {
    **{name: partial(gdpa, **options["gdpa"]) for name, options in OURS.items()},
    "padded_sdpa": padded_sdpa,
    "fa2_varlen": fa2_varlen,
    "eager": eager,
}


class _Peer:
    """A layer of the package with its parameters, and another attention between them."""

    def __init__(self, attend, *arguments, **options):
        super().__init__(*arguments, **options)
        self.attend = attend

    def _call(self, q, k, v, lengths_q, lengths_k, **mask):
        q, k, v = (x.to(v.dtype).unflatten(1, (-1, self.head_dim)) for x in (q, k, v))
        if self.q_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        base = getattr(self, "rotary", None)
        if base is not None:
            angles = sin_cos(base, self.head_dim, q, lengths_q)
            q, k = rotate(q, *angles), rotate(k, *angles)
        if isinstance(self, BlockAttention):
            lengths_q = lengths_k = blocks(lengths_q, self.block_size)
            scale, mask = None, {}
        else:
            scale = self.options.scale
            names = "activation", "output_scale"
            mask |= {name: getattr(self.options, name) for name in names}
        scale = self.head_dim**-0.5 if scale is None else scale
        return self.out(self.attend(q, k, v, lengths_q, lengths_k, scale=scale, **mask).flatten(1))


class _Self(_Peer, GDPASelfAttention):
    def forward(self, x):
        mask = {"causal": self.mask.causal, "window": self.mask.window}
        return self._call(*self.qkv(x[0]).chunk(3, 1), x[1], x[1], **mask), x[1]


class _Block(_Peer, BlockAttention):
    def forward(self, x):
        return self._call(*self.qkv(x[0]).chunk(3, 1), x[1], x[1]), x[1]


class _Pool(_Peer, PMA):
    def forward(self, x):
        y = self._call(self.seeds, *self.kv(x[0]).chunk(2, 1), None, x[1])
        return y.unflatten(0, (x[1].batch, self.num_seeds))


class _Personal(_Peer, PFFN):
    def forward(self, x, summary):
        lengths, keys = x[1], self.num_keys
        kv = (self.mix.weight @ self.kv(summary)).flatten(0, 1)
        out = self._call(self.q(x[0]), *kv.chunk(2, 1), lengths, equal(lengths, keys))
        return out, lengths


PEERS = {GDPASelfAttention: _Self, BlockAttention: _Block, PMA: _Pool, PFFN: _Personal}


def make(attention: str, layer: type, *arguments, **options) -> torch.nn.Module:
    """A layer of the package with an attention of ATTENTIONS."""
    if attention not in OURS:
        return PEERS[layer](ATTENTIONS[attention], *arguments, **options)
    kind = "block_attention" if layer is BlockAttention else "gdpa"
    return layer(*arguments, **options, **OURS[attention][kind])


@torch.compiler.disable
def equal(lengths: Lengths, rows: int) -> Lengths:
    """As many sequences, of `rows` rows each; made once for each batch."""
    return lengths.once(Equal(rows))


@dataclass(frozen=True)
class Equal(Recipe[Lengths]):
    rows: int

    def make(self, cu_seqlens, beside=None):
        return Lengths.uniform(len(cu_seqlens) - 1, self.rows, cu_seqlens.device)


@torch.compiler.disable
def blocks(lengths: Lengths, size: int) -> Lengths:
    """Every block as a sequence of its own; waits for the device, once for each batch."""
    return lengths.once(Blocks(size))


@dataclass(frozen=True)
class Blocks(Recipe[Lengths]):
    size: int

    def make(self, cu_seqlens, beside=None):
        ends, size = cu_seqlens.cpu().long(), self.size
        count = (ends.diff() + size - 1) // size
        first = (ends[:-1] - (count.cumsum(0) - count) * size).repeat_interleave(count)
        starts = first + torch.arange(len(first)) * size
        return Lengths(torch.cat((starts, ends[-1:])), size, device=cu_seqlens.device)
