"""Both operators once more, and their layers: dense, from the formulas alone."""

import math

import torch
from torch.nn.functional import linear

from gdpa_kernels import PFFN, PMA, BlockAttention

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

TAYLOR = {"gelu_taylor6": lambda x: x / 2 + (x**2 - x**4 / 6 + x**6 / 40) / math.sqrt(2 * math.pi)}
"""Of small scores alone, and so not for tests that draw."""


def turned(x: torch.Tensor, sin: torch.Tensor, cos: torch.Tensor) -> torch.Tensor:
    """The pairs of x `[rows, heads, head_dim]` rotated by sin and cos `[rows, head_dim // 2]`."""
    even, odd = x.unflatten(-1, (-1, 2)).unbind(-1)
    sin, cos = sin[:, None], cos[:, None]
    return torch.stack((even * cos - odd * sin, odd * cos + even * sin), -1).flatten(-2)


def scores(q, k, scale):
    """S and the keys' heads repeated, `[heads, rows, keys]` of one sequence's q and k."""
    k = k.repeat_interleave(q.shape[1] // k.shape[1], 1)
    return scale * torch.einsum("nhd,mhd->hnm", q, k)


def meta(i, j, n, m, c, window, full):
    """Whether i sees j in generative-recommenders: ranks, shared by all targets."""
    h = n - m
    rank = (lambda x: max(min(x, h) - c + 1, 0)) if c else (lambda x: min(x, h))
    top, mine, theirs = rank(h), rank(i), rank(j)
    near = window is None or mine - theirs <= window or (full > 0 and mine >= top - full)
    return i == j or (mine > theirs and near) or (c > 0 and mine == 0 and theirs < top)


def nvidia(i, j, n, m, c, window, group):
    """Whether i sees j in recsys-examples: targets keep their ranks and see their group."""
    h = n - m
    rank = (lambda x: max(x - c + 1, 0)) if c else (lambda x: x)
    groups = [-1 if x < h else (x - h) // group for x in (i, j)]
    seen = i == j or rank(i) > rank(j)
    seen = seen and (groups[0] == groups[1] or -1 in groups)
    seen = seen and (window is None or rank(i) - rank(j) <= window)
    return seen or (c > 0 and rank(i) == 0 and j < h)


def attend(
    q, k, v, *, names, scale, output_scale=1.0, causal=False, window=None, keep=None,
    functions=ACTIVATIONS, bias=None,
):  # fmt: skip
    """GDPA of one sequence: q `[rows, heads, head_dim]`, k and v `[keys, kv_heads, head_dim]`;
    `keep`: which pairs count, of those that the masks let through; `bias`: added to the scores."""
    s = scores(q, k, scale)
    s = s if bias is None else s + bias
    row, key = torch.arange(q.shape[0])[:, None], torch.arange(k.shape[0])
    row = row + (k.shape[0] - q.shape[0]) * (causal == "lower_right")
    if keep is None:
        keep = torch.ones(q.shape[0], k.shape[0], dtype=torch.bool)
    if causal:
        keep = keep & (key <= row)
    if window is not None:
        keep = keep & ((row - key).abs() <= window)
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


def normalised(norm, x):
    return (
        x if norm is None else x * (x.square().mean(-1, keepdim=True) + 1e-6).rsqrt() * norm.weight
    )


def rotated(x, base):
    """x `[tokens, heads, dim]`, its pairs of neighbours turned as complex numbers."""
    if base is None:
        return x
    dim = x.shape[-1]
    angles = torch.arange(len(x))[:, None] * base ** (-torch.arange(0, dim, 2).double() / dim)
    turns = torch.polar(torch.ones_like(angles), angles)[:, None]
    pairs = torch.view_as_complex(x.unflatten(-1, (-1, 2)).contiguous())
    return torch.view_as_real(pairs * turns).flatten(-2).to(x.dtype)


def composed(layer, values, lengths, summary, **given):
    """A layer from its parameters, one sequence after another; `given`: options that it was made
    with, the others as it says itself."""

    def option(name):
        homes = layer, getattr(layer, "options", None), getattr(layer, "mask", None)
        known = [getattr(home, name) for home in homes if hasattr(home, name)]
        return given[name] if name in given else next(iter(known), None)

    def mixed(q, k, v):
        """One sequence: q [rows, heads * dim], k and v [keys, kv heads * dim]."""
        q, k, v = (x.unflatten(1, (-1, layer.head_dim)) for x in (q, k, v))
        q, k = normalised(layer.q_norm, q), normalised(layer.k_norm, k)
        q, k = rotated(q, option("rotary")), rotated(k, option("rotary"))
        scale = layer.head_dim**-0.5 if option("scale") is None else option("scale")
        if isinstance(layer, BlockAttention):
            v = rotated(v, option("rotary")) if option("rotate_v") else v
            return attend_blocks(q, k, v, scale=scale, block_size=option("block_size")).flatten(1)
        names = option("activation")
        options = {name: option(name) for name in ("causal", "window", "output_scale")}
        options |= {"names": [names] if isinstance(names, str) else names, "scale": scale}
        return attend(q, k, v, **options, functions=ACTIVATIONS | TAYLOR).flatten(1)

    def projected(x, of):
        return linear(x, of.weight, of.bias)

    rows = []
    for i, tokens in enumerate(values.split(lengths)):
        if isinstance(layer, PMA):
            parts = layer.seeds, *projected(tokens, layer.kv).chunk(2, 1)
        elif isinstance(layer, PFFN):
            kv = projected(summary[i], layer.kv)
            kv = kv if layer.mix is None else layer.mix.weight @ kv
            parts = projected(tokens, layer.q), *kv.view(layer.num_keys, -1).chunk(2, 1)
        else:
            width = layer.num_kv_heads * layer.head_dim
            parts = projected(tokens, layer.qkv).split([values.shape[1], width, width], 1)
        rows.append(projected(mixed(*parts), layer.out))
    return torch.stack(rows) if isinstance(layer, PMA) else torch.cat(rows)
