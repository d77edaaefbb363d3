"""KunlunLite and HSTULite: two models of click-through rate on jagged histories."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from attentions import ATTENTIONS, make
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from data import AGES, Batch, World
from gdpa_kernels import PFFN, PMA, BlockAttention, GDPASelfAttention, jagged
from gdpa_kernels.norms.api import add_rms_norm

MIXERS = ("gdpa", "block", "window")
NORMS = ("eager", "fused")
STREAMS = ("fp32", "autocast")
EMBEDDINGS = ("matmul", "lookups")
EPSILON = 1e-6
WINDOW = 100
BLOCK = 64
ROTARY = 10_000.0


@dataclass(frozen=True)
class Config:
    """Sizes of a model, and its attention: a name of `attentions.ATTENTIONS`.

    mixer: self-attention of KunlunLite: "gdpa" sees the whole history, "window" 100 tokens to each
    side, "block" is softmax in blocks of 64. norms: of KunlunLite, by PyTorch's operators or fused
    with the addition before them, and those of q and k in place. stream: dtype of the tokens that
    layers add to, fp32 or autocast's. embedding: rows of small tables are summed by a
    matmul, or looked up; torch.compile adds the gradients of lookups with atomics.
    """

    model: str = "kunlun"
    mixer: str = "gdpa"
    attention: str = "gdpa"
    dim: int = 512
    heads: int = 4
    layers: int = 2
    tokens: int = 8
    keys: int = 256
    seeds: int = 64
    max_seqlen: int = 1024
    recompute: bool = False
    norms: str = "eager"
    stream: str = "fp32"
    embedding: str = "matmul"


class Events(nn.Module):
    """Embeddings of events, and of what is shown: sums of a row for the item and one each for
    topic, like and age, whose tables follow each other in `small`."""

    def __init__(self, c: Config, world: World):
        super().__init__()
        self.stream, self.matmul = c.stream, c.embedding == "matmul"
        sizes = torch.tensor((world.topics, 3, AGES))
        self.register_buffer("first", sizes.cumsum(0) - sizes, persistent=False)
        self.item = nn.Embedding(world.items, c.dim)
        rows = -(-int(sizes.sum()) // 8) * 8  # as matmuls want them
        self.small = nn.Parameter(torch.empty(rows, c.dim))
        for table in (self.item.weight, self.small):
            nn.init.normal_(table, std=c.dim**-0.5)

    def forward(self, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        """The tokens of the histories `[total_tokens, dim]`, and one for what is shown `[batch,
        dim]`, which is neither liked nor not."""
        x = self.item(batch.items) + self._sum(batch.topics, batch.likes, batch.ages)
        likes = torch.full_like(batch.shown, 2)
        shown = self.item(batch.shown) + self._sum(batch.topic, likes)
        kind = x.device.type
        if self.stream == "autocast" and torch.is_autocast_enabled(kind):
            dtype = torch.get_autocast_dtype(kind)
            x, shown = x.to(dtype), shown.to(dtype)
        return x, shown

    def _sum(self, *features: torch.Tensor) -> torch.Tensor:
        rows = torch.stack(features, 1) + self.first[: len(features)]
        if not self.matmul:
            return sum(F.embedding(each, self.small) for each in rows.unbind(1))
        hot = self.small.new_zeros(len(rows), len(self.small)).scatter_(1, rows, 1.0)
        return hot @ self.small


class Norm(nn.RMSNorm):
    """Adds a branch to the residual stream: (norm(stream), stream), in one kernel each way if
    fused."""

    def __init__(self, c: Config):
        super().__init__(c.dim, eps=EPSILON)
        self.fused = c.norms == "fused"

    def forward(self, stream, branch=None):
        if self.fused:
            inputs = (stream, None) if branch is None else (branch, stream)
            return add_rms_norm(*inputs, self.weight, eps=self.eps)
        stream = stream if branch is None else stream + branch
        return super().forward(stream), stream


class Interaction(nn.Module):
    """Pairwise products of a row's tokens and a perceptron: `[batch, n, dim]` to `[batch, tokens,
    dim]`."""

    def __init__(self, n: int, tokens: int, dim: int):
        super().__init__()
        self.norm, self.narrow = nn.RMSNorm(dim), nn.Linear(dim, dim // 4)
        width = n * n + n * (dim // 4)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * dim), nn.GELU(), nn.Linear(4 * dim, tokens * dim)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        z = self.norm(x)
        products = torch.bmm(z, z.mT) * z.shape[-1] ** -0.5
        features = torch.cat((products.flatten(1), self.narrow(z).flatten(1)), 1)
        return self.mlp(features).unflatten(1, (-1, x.shape[-1]))


class KunlunLayer(nn.Module):
    """Events attend to each other, pass through a perceptron made from the row's tokens (PFFN), and
    are pooled (PMA, mixed to `tokens`); then the row's tokens and the pooled ones interact."""

    def __init__(self, c: Config):
        super().__init__()
        common = {"qk_norm": True, "fused_qk_norm": c.norms == "fused"}
        sums = {"output_scale": c.max_seqlen**-0.5, **common}
        if c.mixer == "block":
            self.mixer = make(
                c.attention, BlockAttention, c.dim, c.heads, block_size=BLOCK, rotary=ROTARY
            )
        else:
            window = WINDOW if c.mixer == "window" else None
            self.mixer = make(c.attention, GDPASelfAttention, c.dim, c.heads, window=window, **sums)
        self.mixer_norm, self.norm, self.pool_norm = (Norm(c) for _ in range(3))
        self.personal = make(
            c.attention, PFFN, c.dim, c.heads, c.dim, c.keys, summary_tokens=c.tokens,
            output_scale=c.keys**-0.5, **common,
        )  # fmt: skip
        self.pool = make(c.attention, PMA, c.dim, c.heads, c.seeds, **sums)
        self.mix = nn.Linear(c.seeds, c.tokens)
        self.interaction = Interaction(2 * c.tokens, c.tokens, c.dim)

    def forward(self, x, tokens, lengths):
        y, x = self.mixer_norm(x)
        y, x = self.norm(x, self.mixer((y, lengths))[0])
        y, x = self.pool_norm(x, self.personal((y, lengths), tokens)[0])
        pooled = self.mix(self.pool((y, lengths)).mT).mT
        tokens = tokens + self.interaction(torch.cat((tokens, pooled), 1))
        return x, tokens


class KunlunLite(nn.Module):
    """After Kunlun (arXiv 2602.10016): `batch` to logits `[batch]`.

    Every layer pools, where Kunlun's share what every other one pooled; seeds are mixed to tokens
    by one matrix, where Kunlun has a sum of Kronecker products.
    """

    def __init__(self, c: Config, world: World):
        super().__init__()
        self.events = Events(c, world)
        self.spread = nn.Linear(c.dim, c.tokens * c.dim)
        self.layers = nn.ModuleList(KunlunLayer(c) for _ in range(c.layers))
        self.head = nn.Sequential(nn.RMSNorm(c.tokens * c.dim), nn.Linear(c.tokens * c.dim, 1))
        self.recompute = c.recompute

    def forward(self, batch: Batch) -> torch.Tensor:
        x, shown = self.events(batch)
        tokens = self.spread(shown).unflatten(1, (-1, shown.shape[1]))
        for layer in self.layers:
            x, tokens = _run(self.recompute, layer, x, tokens, batch.lengths)
        return self.head(tokens.flatten(1))[:, 0]


class HSTULayer(nn.Module):
    """x + W_o (norm(attention(q, k, v)) * u), with u, q, k, v = SiLU(W norm(x)): SiLU for softmax,
    divided by the longest history; causal."""

    def __init__(self, c: Config):
        super().__init__()
        self.norm, self.inner = nn.LayerNorm(c.dim), nn.LayerNorm(c.dim)
        self.uqkv, self.out = nn.Linear(c.dim, 4 * c.dim), nn.Linear(c.dim, c.dim)
        self.heads, self.attend = c.heads, ATTENTIONS[c.attention]
        self.options = {
            "activation": "silu", "scale": (c.dim // c.heads) ** -0.5,
            "output_scale": 1 / c.max_seqlen, "causal": True,
        }  # fmt: skip

    def forward(self, x, lengths):
        u, *qkv = F.silu(self.uqkv(self.norm(x))).chunk(4, 1)
        q, k, v = (each.unflatten(1, (self.heads, -1)) for each in qkv)
        y = self.attend(q, k, v, lengths, lengths, **self.options).flatten(1)
        return x + self.out(self.inner(y) * u)


class HSTULite(nn.Module):
    """After HSTU (arXiv 2402.17152), without its bias of positions and times: `batch` to logits
    `[batch]`. What is shown is the last token, whose row makes the logit."""

    def __init__(self, c: Config, world: World):
        super().__init__()
        self.events = Events(c, world)
        self.layers = nn.ModuleList(HSTULayer(c) for _ in range(c.layers))
        self.head = nn.Sequential(nn.LayerNorm(c.dim), nn.Linear(c.dim, 1))
        self.recompute = c.recompute

    def forward(self, batch: Batch) -> torch.Tensor:
        x, shown = self.events(batch)
        x, lengths = jagged.append((x, batch.lengths), shown[:, None])
        for layer in self.layers:
            x = _run(self.recompute, layer, x, lengths)
        last = lengths.cu_seqlens[1:].long() - 1
        return self.head(x[last])[:, 0]


def _run(recompute: bool, layer: nn.Module, *arguments):
    """A layer, whose activations are kept for backward or computed again."""
    return checkpoint(layer, *arguments, use_reentrant=False) if recompute else layer(*arguments)


MODELS = {"kunlun": KunlunLite, "hstu": HSTULite}


def build(c: Config, world: World) -> nn.Module:
    """The model of a configuration, on the CPU."""
    return MODELS[c.model](c, world)
