"""Both operators once more: dense, in fp64, from the formulas alone, for tests that draw calls."""

from __future__ import annotations

import math

import torch

ACTIVATIONS = {
    "identity": lambda x: x,
    "relu": lambda x: x.clamp(min=0),
    "relu_squared": lambda x: x.clamp(min=0) ** 2,
    "leaky_relu": lambda x: torch.where(x > 0, x, 0.01 * x),
    "gelu": lambda x: x * 0.5 * (1 + torch.erf(x / math.sqrt(2))),
    "gelu_tanh": lambda x: x / (1 + torch.exp(-math.sqrt(8 / math.pi) * (x + 0.044715 * x**3))),
    "silu": lambda x: x / (1 + torch.exp(-x)),
    "hardswish": lambda x: x * (x + 3).clamp(0, 6) / 6,
}  # fmt: skip


def turned(x: torch.Tensor, sin: torch.Tensor, cos: torch.Tensor) -> torch.Tensor:
    """The pairs of x `[rows, heads, head_dim]` rotated by sin and cos `[rows, head_dim // 2]`."""
    even, odd = x.unflatten(-1, (-1, 2)).unbind(-1)
    sin, cos = sin[:, None], cos[:, None]
    return torch.stack((even * cos - odd * sin, odd * cos + even * sin), -1).flatten(-2)


def scores(q, k, scale):
    """S and the keys' heads repeated, `[heads, rows, keys]` of one sequence's q and k."""
    k = k.repeat_interleave(q.shape[1] // k.shape[1], 1)
    return scale * torch.einsum("nhd,mhd->hnm", q, k)


def attend(
    q, k, v, *, names, scale, output_scale=1.0, causal=False, window=None, functions=ACTIVATIONS
):
    """GDPA of one sequence: q `[rows, heads, head_dim]`, k and v `[keys, kv_heads, head_dim]`."""
    s = scores(q, k, scale)
    row, key = torch.arange(q.shape[0])[:, None], torch.arange(k.shape[0])
    keep = torch.ones(q.shape[0], k.shape[0], dtype=torch.bool)
    if causal:
        keep &= key <= row
    if window is not None:
        keep &= (row - key).abs() <= window
    names = names if len(names) > 1 else names * q.shape[1]
    p = torch.stack([functions[name](each) for name, each in zip(names, s, strict=True)])
    p = torch.where(keep, p, torch.zeros((), dtype=p.dtype))
    v = v.repeat_interleave(q.shape[1] // v.shape[1], 1)
    return output_scale * torch.einsum("hnm,mhd->nhd", p, v)


def attend_blocks(q, k, v, *, scale, block_size):
    """Block attention of one sequence."""
    outs = [q[:0]]
    for first in range(0, q.shape[0], block_size):
        rows = slice(first, first + block_size)
        p = scores(q[rows], k[rows], scale).softmax(-1)
        values = v[rows].repeat_interleave(q.shape[1] // v.shape[1], 1)
        outs.append(torch.einsum("hnm,mhd->nhd", p, values))
    return torch.cat(outs)


def jagged(function, lengths, q, k, v, lengths_q=None) -> torch.Tensor:
    """`function(q, k, v)` of each sequence; q of each sequence, or shared where there are no
    `lengths_q`."""
    keys = zip(k.split(lengths), v.split(lengths), strict=True)
    queries = [q] * len(lengths) if lengths_q is None else q.split(lengths_q)
    outs = [function(own, *pair) for own, pair in zip(queries, keys, strict=True)]
    return torch.cat([q[:0], *outs])
