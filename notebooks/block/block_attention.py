# ---
# jupyter:
#   kernelspec: {name: python3, display_name: Python 3}
# ---

# %% [markdown]
# # What is block attention? Softmax that never leaves its block
#
# What becomes of attention over a long history when every token sees at most 63 others?
#
# :::{admonition} In this chapter
# - A sequence is cut into blocks of 64 consecutive tokens. Inside a block: ordinary softmax
#   attention, in both directions. Across blocks: nothing.
# - On the published batch this leaves out {glue:text}`ba_left_out:.1f` % of the pairs of full
#   attention. The "sparsity 0.7" of the published tables is not that number. It is a fill: the mean
#   length over the largest one.
# - The gradients of q, k and v follow from q, k, v and the gradient of the output alone. Nothing
#   else has to be kept, and a block never sees another one's values, NaN included.
# :::

# %% tags=["hide-input"]
import math
import textwrap
from itertools import pairwise

import numpy as np
import pandas as pd
import torch
import torch.nn.functional as F
from IPython.display import display
from matplotlib.patches import Rectangle
from torch.testing import assert_close

from gdpa_kernels import BlockAttention, block_attention, emulator
from gdpa_kernels.block_attention import reference
from gdpa_kernels.measuring import testing
from gdpa_kernels.measuring.inputs import cu_seqlens
from gdpa_kernels.measuring.workload import BLOCK_TABLES, BLOCK_WORKLOADS, Workload
from gdpa_kernels.report import figures
from gdpa_kernels.report.house import INK, RUNG_COLOURS

# %% tags=["parameters"]
mode = "replay"
device = "cpu"
data_dir = "data"

# %% [markdown]
# ## The definition
#
# The batch is {doc}`jagged <../operator/gdpa>`: sequence $i$ owns the tokens from `cu_seqlens[i]`
# up to, not including, `cu_seqlens[i + 1]`. Its block $j$ is the set of tokens
#
# $$
# B_{ij} = \{\, t : o_i + b\,j \;\le\; t \;<\; \min(o_i + b\,(j + 1),\; o_{i+1}) \,\},
# $$ (eq-block-tokens)
#
# with $o_i$ for `cu_seqlens[i]` and $b$ for `block_size`, 64 unless stated otherwise. Blocks are
# counted from the start of each sequence; no block belongs to two sequences, and the last block of
# a sequence may be shorter. For each block and each head, with the rows of $Q$, $K$ and $V$ that
# belong to it,
#
# $$
# S = s\, Q K^{\mathsf T}, \qquad P = \mathrm{softmax}(S), \qquad O = P V,
# $$ (eq-block)
#
# the softmax taken over each row of $S$. The scale $s$ is $1/\sqrt{\mathtt{head\_dim}}$ unless
# given. That is the operator. Written down as it is read:


# %%
def naive(q, k, v, cu_seqlens, block_size: int = 64):
    """Block attention, one block and one head after another."""
    group = q.shape[1] // k.shape[1]
    scale = q.shape[2] ** -0.5
    out = torch.zeros_like(q)
    for start, end in pairwise(cu_seqlens.tolist()):
        for first in range(start, end, block_size):
            rows = slice(first, min(first + block_size, end))
            for head in range(q.shape[1]):
                s = scale * q[rows, head] @ k[rows, head // group].T
                out[rows, head] = s.softmax(1) @ v[rows, head // group]
    return out


torch.manual_seed(0)
lengths = [20, 0, 16, 5]
offsets = cu_seqlens(lengths, "cpu")


def draw(heads: int, dim: int = 16) -> torch.Tensor:
    """Standard normal numbers for the tokens of the batch, in fp64."""
    return torch.randn(sum(lengths), heads, dim, dtype=torch.float64)


q, k, v = draw(4), draw(2), draw(2)
out = block_attention(q, k, v, offsets, block_size=16)
assert_close(out, naive(q, k, v, offsets, 16))
print(f"cu_seqlens {offsets.tolist()}, out {list(out.shape)}")

# %% [markdown]
# On a CPU and in fp64 `block_attention` runs its definition in PyTorch, all blocks at once
# (`impl="reference"`); there it agrees with the loops. Four query heads share two heads of keys and
# values, head $h$ using key head $\lfloor h / 2 \rfloor$ {cite}`shazeer2019mqa,ainslie2023gqa`, and
# the sequence without tokens is no special case.
#
# What does the operator look at? Let $V$ be the identity matrix: then $O = P$, and the operator
# draws its own mask ({numref}`fig-block-mask`).

# %%
total = sum(lengths)
keys = torch.randn(total, 1, total, dtype=torch.float64)
queries = torch.randn(total, 1, total, dtype=torch.float64)
identity = torch.eye(total, dtype=torch.float64)[:, None]
p = block_attention(queries, keys, identity, offsets, block_size=16)[:, 0]
print(f"{(p > 0).sum()} of {total**2} entries are not zero")

# %% tags=["remove-cell"]
PAIRS = 16**2 + 4**2 + 16**2 + 5**2
assert (p > 0).sum() == PAIRS and torch.allclose(p.sum(1), torch.ones(total, dtype=torch.float64))
figures.glue_number("ba_tiny_pairs", PAIRS)
figures.glue_number("ba_tiny_full", sum(n**2 for n in lengths))
figures.glue_number("ba_tiny_padded", len(lengths) * max(lengths) ** 2)

# %% tags=["remove-input"]
# | name: fig-block-mask
# | caption: >
# |   P of the batch of the code: 41 tokens of four sequences with 20, 0, 16 and 5 tokens, blocks of
# |   16. Rows are queries, columns are keys, a darker cell is a larger probability. Grey frames:
# |   sequences, whose pairs full attention would compute. The first sequence has a full block and
# |   one of four tokens; the second sequence has nothing to show.
# | alt: >
# |   A square of 41 by 41 cells. Along the diagonal lie four filled squares with sides 16, 4, 16
# |   and 5. A frame of side 20 surrounds the first two, the other two fill their frames. Everything
# |   else is empty.
COLOURS = [RUNG_COLOURS[i] for i in (1, 0, 3, 2)]
with figures.style():
    figure, axis = figures.subplots(width=5.6, height=4.9)
    spots = [(start, end) for start, end in pairwise(offsets.tolist())]
    for i, (start, end) in enumerate(spots):
        for first in range(start, end, 16):
            size = min(16, end - first)
            colour = COLOURS[i]
            for a in range(first, first + size):
                for b in range(first, first + size):
                    strength = 0.12 + 0.88 * float(p[a, b] / p[first : first + size].max())
                    box = Rectangle((b, a), 1, 1, facecolor=colour, alpha=strength, linewidth=0)
                    axis.add_patch(box)
            axis.add_patch(Rectangle((first, first), size, size, fill=False, edgecolor=colour))
        if end > start:
            side = end - start
            axis.add_patch(Rectangle((start, start), side, side, fill=False, edgecolor=INK))
        text = f"sequence {i}, {end - start} tokens"
        axis.text(end + 0.8, (start + end) / 2 - (0 if end > start else 1.6), text, va="center")
    axis.set_xlim(-0.5, total + 0.5)
    axis.set_ylim(total + 0.5, -0.5)
    axis.set_aspect("equal")
    axis.set_xticks([0, 16, 20, 36, 41])
    axis.set_yticks([0, 16, 20, 36, 41])
    axis.set_xlabel("key")
    axis.set_ylabel("query")
    axis.grid(visible=False)
display(figure)

# %% tags=["remove-input"]
figures.source("modelled", "the output of block_attention for random q and k, V = identity, fp64.")

# %% [markdown]
# The name "sparse attention" says what is missing. What is left has a better description: a batch
# of small dense problems. Nothing but the offsets has to change for any kernel that knows jagged
# batches: let each block be a sequence of its own.


# %%
def blocks_as_sequences(lengths: list[int], block_size: int) -> list[int]:
    """The lengths of the blocks."""
    return [
        min(block_size, n - first) for n in lengths for first in range(0, n, block_size)
    ]  # fmt: skip


parts = blocks_as_sequences(lengths, 16)
dense = []
for start, end in pairwise([0, *np.cumsum(parts).tolist()]):
    one = (t[start:end].transpose(0, 1) for t in (q, k, v))
    dense.append(F.scaled_dot_product_attention(*one, enable_gqa=True).transpose(0, 1))
assert_close(torch.cat(dense), out)
print(f"{len(lengths)} sequences, {len(parts)} blocks: {parts}")

# %% [markdown]
# This is how we call FlashAttention-2 {cite}`dao2024flashattention2` as a peer: the 1,152 sequences
# of a published batch become {glue:text}`ba_blocks:,.0f` of at most 64 tokens. A general kernel can
# do it. What it does that a single tile does not need is counted in {doc}`counting_bytes`, and
# removed in {doc}`v1_one_tile`. Masks of blocks can also be given to FlexAttention
# {cite}`dong2024flexattention` as a function of two positions.
#
# ## Why a recommendation model would use it
#
# A history has hundreds to thousands of events, and full attention pays for each pair of them. The
# published account speaks of production batches of 1,152 sequences of up to about four thousand
# tokens {cite}`siso2026block`. What blocks save there can be counted from the lengths:


# %%
def counted(work: Workload) -> dict:
    """One forward pass over the same lengths, with full attention and with blocks."""
    full = sum(n * n for n in work.seqlens_q)  # pairs, one head
    flops, size = work.flops("forward"), work.bytes("forward")
    return {
        "workload": work.name,
        "pairs left out, %": 100 * (1 - work.pairs / full),
        "TFLOP, full": flops * full / work.pairs / 1e12,
        "TFLOP, blocks": flops / 1e12,
        "GB, either": size / 1e9,
        "FLOP/byte, full": flops * full / work.pairs / size,
        "FLOP/byte, blocks": flops / size,
    }


rows = [counted(BLOCK_WORKLOADS[f"block-fill70-{n}"]) for n in (1000, 2000, 4000, 8000)]

# %% tags=["remove-input"]
TABLE5 = BLOCK_WORKLOADS[BLOCK_TABLES["table5"][0]]
assert BLOCK_TABLES["table5"] == ("block-fill70-2000",), "the text speaks of this batch"
saved = pd.DataFrame(rows).set_index("workload")
table5 = saved.loc[TABLE5.name]
assert (saved["FLOP/byte, blocks"] < 32).all() and (saved["FLOP/byte, full"] > 300).all()
figures.glue_number("ba_left_out", table5["pairs left out, %"])
figures.glue_number("ba_fewer_flops", table5["TFLOP, full"] / table5["TFLOP, blocks"])
figures.glue_number("ba_intensity_full", table5["FLOP/byte, full"])
figures.glue_number("ba_intensity_blocks", table5["FLOP/byte, blocks"])
figures.glue_number("ba_blocks", TABLE5.blocks)
figures.show_table(pd.DataFrame(rows))

# %% tags=["remove-input"]
figures.source("modelled", "forward pass, counted from the lengths of each workload.")

# %% [markdown]
# With blocks the work grows with the number of tokens and no longer with its square: on the batch
# of the main published table, lengths of 800 to 1,999, {glue:text}`ba_fewer_flops:.0f` times fewer
# FLOPs. The bytes do not change at all. Every row of q, k and v must still be read and every row of
# the output written. From {glue:text}`ba_intensity_full:.0f` FLOP per byte the operator falls to
# {glue:text}`ba_intensity_blocks:.0f`, and with that it is no longer limited by tensor cores but by
# memory: {doc}`counting_bytes`.
#
# For the self-attention layers of the production model two gains in model FLOPs utilisation are
# published: 30.6 % over an earlier Triton kernel for the same blocks, and roughly 44 % over
# sliding-window attention {cite}`siso2026block,meta2026gem`. Whether these are percent or
# percentage points is not said, and the model is not public; the {doc}`ledger <../tools/claims>`
# lists them as not comparable.
#
# ### What it costs
#
# A token learns nothing from outside its block. A sliding window has the same cost per token, and
# with each further layer its tokens hear from farther away. Blocks do not have this: their borders
# are in the same places in every layer.


# %%
def reach(mask: torch.Tensor, layers: int) -> int:
    """From how many tokens the middle one hears after `layers` layers."""
    heard = torch.linalg.matrix_power(mask.double(), layers)
    return int((heard[len(mask) // 2] > 0).sum())


at = torch.arange(512)
masks = {
    "blocks of 64": at[:, None] // 64 == at // 64,
    "window of 32 to each side": (at[:, None] - at).abs() <= 32,
}
heard = {name: [reach(mask, n) for n in (1, 2, 3)] for name, mask in masks.items()}
print(pd.DataFrame(heard, index=["1 layer", "2 layers", "3 layers"]))

# %% tags=["remove-cell"]
assert heard == {"blocks of 64": [64, 64, 64], "window of 32 to each side": [65, 129, 193]}

# %% [markdown]
# A model made of block attention alone would be a model of 64 events. Something else has to carry
# information between blocks: pooling by learned seeds, or a feed-forward layer whose weights come
# from the whole sample ({doc}`../operator/gdpa`), are parts of published models of this kind
# {cite}`zeng2024interformer,hou2026kunlun`. The window pays for its reach: its tiles of queries and
# keys overlap those of their neighbours, keys are loaded more than once or kept, and a row of
# scores again spans several tiles. In a block nothing is shared, and that is what makes it fast.
#
# ## Rotary embeddings
#
# Softmax attention does not know the order of its keys. A rotary embedding {cite}`su2021roformer`
# tells it by turning pairs of numbers of q and k by an angle that depends on the token's position
# and on the pair. The operator takes the sines and cosines as they are, `rotary=(sin, cos)`, each
# `[total_tokens, head_dim // 2]`, one row per token and the same for all heads, and turns
#
# $$
# \begin{pmatrix} y_{2i} \\ y_{2i+1} \end{pmatrix} =
# \begin{pmatrix} \cos_i & -\sin_i \\ \sin_i & \cos_i \end{pmatrix}
# \begin{pmatrix} x_{2i} \\ x_{2i+1} \end{pmatrix}.
# $$ (eq-block-rotary)
#
# The pairs are *interleaved*: neighbours $2i$ and $2i + 1$. Many models pair $i$ with
# $i + \mathtt{head\_dim} / 2$ instead. The two differ by a permutation of the columns, and whoever
# mixes them up gets numbers that look right.


# %%
def turns(positions: torch.Tensor, dim: int, base: float = 10_000.0):
    """(sin, cos) `[tokens, dim // 2]`: pair i turns by position * base ** (-2 i / dim)."""
    frequencies = base ** (-2.0 * torch.arange(dim // 2) / dim)
    angles = positions[:, None].double() * frequencies.double()
    return angles.sin(), angles.cos()


positions = torch.cat([torch.arange(n) for n in lengths])
sin, cos = turns(positions, 16)
turned = reference.rotate(q, sin, cos)
pairs = torch.view_as_complex(q.unflatten(2, (8, 2)))
as_complex = pairs * torch.complex(cos, sin)[:, None]
assert_close(turned, torch.view_as_real(as_complex).flatten(2))

swapped = torch.cat([torch.arange(0, 16, 2), torch.arange(1, 16, 2)])
halves = reference.rotate(q[..., swapped.argsort()], sin, cos)[..., swapped]
print(f"halves instead of neighbours: off by {(halves - turned).abs().max():.1f}")

rotated = block_attention(q, k, v, offsets, block_size=16, rotary=(sin, cos))
by_hand = naive(turned, reference.rotate(k, sin, cos), v, offsets, 16)
assert_close(rotated, by_hand)

# %% tags=["remove-cell"]
assert (halves - turned).abs().max() > 1, "the text: mixing them up is not a small error"

# %% [markdown]
# Three things follow the published operator {cite}`adsmodelkernellibrary`. The sines and cosines
# are an input, with no gradient of their own. It is not assumed that $\sin^2 + \cos^2 = 1$, so the
# gradients take the *transpose* of {eq}`eq-block-rotary` and not its inverse. And v may be turned
# as well, `rotate_v=True`, as the published layer does it; an exercise below asks what that does.
#
# ## The gradients need no output
#
# Given $dO$, the gradients of one block and one head are
#
# $$
# dV = P^{\mathsf T} dO, \quad dP = dO\, V^{\mathsf T}, \quad
# dS_{ij} = P_{ij} (dP_{ij} - D_i), \quad dQ = s\, dS\, K, \quad dK = s\, dS^{\mathsf T} Q
# $$ (eq-block-gradients)
#
# with one number for each row,
#
# $$
# D_i = \sum_j P_{ij}\, dP_{ij} = \sum_c O_{ic}\, dO_{ic} .
# $$ (eq-block-delta)
#
# A kernel that sees a row of scores in pieces cannot form the first sum before the last piece, so
# FlashAttention-2 uses the second one: it keeps the output, computes $D$ in a kernel of its own,
# and keeps the logarithm of each row's sum of exponentials, to recover $P$ piece by piece
# {cite}`dao2024flashattention2`. Where the whole row is in one tile, the first sum is at hand, and
# so are the maximum and the sum of the softmax. The output, the log-sum-exp and the kernel for $D$
# are not needed. For a block of 20 tokens, against autograd:

# %%
x_q, x_k, x_v, x_grad = (torch.randn(20, 8, dtype=torch.float64) for _ in range(4))
scale = 8**-0.5
p = (scale * x_q @ x_k.T).softmax(1)
dp = x_grad @ x_v.T
delta = (p * dp).sum(1, keepdim=True)
ds = p * (dp - delta)
by_formula = scale * ds @ x_k, scale * ds.T @ x_q, p.T @ x_grad

leaves = [t.requires_grad_() for t in (x_q, x_k, x_v)]
o = (scale * x_q @ x_k.T).softmax(1) @ x_v
assert_close(by_formula, torch.autograd.grad(o, leaves, x_grad))
assert_close(delta, (o * x_grad).sum(1, keepdim=True))

# %% [markdown]
# The operator does the same for the batch. `gradcheck` compares its gradients with differences of
# its outputs, in fp64, with grouped heads, empty and partial blocks, and sines and cosines that lie
# on no circle:

# %%
free = torch.randn(total, 4, dtype=torch.float64), torch.randn(total, 4, dtype=torch.float64)
small = [draw(heads, 8).requires_grad_() for heads in (2, 1, 1)]


def turned_everything(q, k, v):
    return block_attention(q, k, v, offsets, block_size=16, rotary=free, rotate_v=True)


assert torch.autograd.gradcheck(turned_everything, small, fast_mode=True)

kept = []
with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
    block_attention(*small, offsets, block_size=16)
names = {t.data_ptr(): name for name, t in zip("qkv", small, strict=True)}
names[offsets.data_ptr()] = "cu_seqlens"
print("kept for backward:", ", ".join(names[t.data_ptr()] for t in kept))

# %% tags=["remove-cell"]
assert [names[t.data_ptr()] for t in kept] == ["q", "k", "v", "cu_seqlens"]

# %% [markdown]
# What is kept exists anyway. The activations that this layer adds to the memory of a training step
# are q, k and v; where they are slices of one projection, not even copies of these. A kernel's
# forward also hands its list of blocks to backward, 8 bytes for each block.
#
# ## The same call on a kernel
#
# `impl` names a rung; inside `emulator.enabled()` its Triton kernels run on the CPU and every
# access is checked ({doc}`../tools/emulator`). Outputs and gradients are compared with fp64, the
# error allowed being twice that of PyTorch in bf16, plus one rounding
# ({doc}`../measuring/protocol`):

# %%
angles = sin.float(), cos.float()


def outcome(q, k, v, grad, rotary=angles, impl="reference"):
    """The output and the three gradients."""
    leaves = [t.detach().requires_grad_() for t in (q, k, v)]
    out = block_attention(*leaves, offsets, block_size=16, rotary=rotary, impl=impl)
    return out.detach(), *torch.autograd.grad(out, leaves, grad)


half = [t.bfloat16() for t in (q, k, v, draw(4))]
exact = outcome(*(t.double() for t in half))
pytorch = outcome(*half)
with emulator.enabled():
    kernel = outcome(*half, impl="v1_one_tile")

verdicts = [
    testing.compare(name=name, actual=a, expected=e, baseline=b)
    for name, a, e, b in zip(("out", "dq", "dk", "dv"), kernel, exact, pytorch, strict=True)
]
assert all(verdict.passed for verdict in verdicts)
print("emulated v1_one_tile")
print(*(textwrap.fill(str(v), 76, subsequent_indent="  ") for v in verdicts), sep="\n")

# %% [markdown]
# Grouped heads, slices of a larger tensor and gradients of any strides are ordinary calls. The
# published operator accepts different numbers of query and key heads and computes as if they were
# equal, and its backward pass takes inputs and gradients for contiguous (read in its source, not
# run {cite}`adsmodelkernellibrary`).
#
# As a layer with its projections it is one line. The layer numbers positions from the start of each
# sequence, and its q, k and v are slices of one tensor that the kernels read where they lie:

# %%
layer = BlockAttention(64, num_heads=4, num_kv_heads=2, block_size=16, rotary=10_000.0)
history, _ = layer((torch.randn(total, 64), offsets))
print(layer, list(history.shape), sep="\n")

# %% [markdown]
# ## Neighbours
#
# A tile has 64 rows whether the block has or not. In a jagged batch the rows after the end of a
# sequence are no padding: they are somebody else's tokens. A mask on the scores makes their
# probabilities zero, but $0 \cdot \mathrm{NaN}$ is NaN, so a kernel that loads those rows of V and
# relies on the mask hands one user's NaN to another. The published kernels load them; so we read in
# their source, we have not run it {cite}`adsmodelkernellibrary`. The rule in this book: a block
# never sees another one's values. Here everything but the last four tokens of the first sequence
# becomes NaN, the gradient of the output included, and the results for these four tokens must not
# change in a single bit:

# %%
own = (torch.arange(total) >= 16) & (torch.arange(total) < 20)


def poisoned(tensor: torch.Tensor) -> torch.Tensor:
    """NaN everywhere but in one block."""
    return torch.where(own.view(-1, *[1] * (tensor.dim() - 1)), tensor, math.nan)


hurt = [poisoned(t) for t in half]
spoiled = tuple(map(poisoned, angles))
with emulator.enabled():
    for impl in ("reference", "v0_flash", "v1_one_tile"):
        clean, dirty = outcome(*half, impl=impl), outcome(*hurt, spoiled, impl=impl)
        for a, b in zip(clean, dirty, strict=True):
            assert torch.equal(a[own], b[own]) and b[~own].isnan().all()
        print(f"{impl}: the block keeps its results, all others are NaN")

# %% [markdown]
# The other direction matters as much: a NaN of a block's own must not be swallowed. The first half
# of the check would pass for a kernel that reads NaN as zero; the second half would not.
#
# ## The workloads, and what "sparsity 0.7" means
#
# The published tables name a batch of 1,152 sequences (768 above 7,000 tokens), 4 heads of head_dim
# 128, a largest length from 1,000 to 8,000, and a "sparsity" of 0.7 or 1.0 "discrete uniform"
# {cite}`siso2026block`. What that means is not explained and no generator is published with them.
# Generators of the same company use the word for the mean length over the largest one: 0.7 draws
# lengths uniformly from 0.4 to 1.0 of it, 1.0 is a batch without an empty place
# {cite}`generativerecommenders,tritonbench`. We take it so, call it the *fill*
# ({doc}`../operator/workloads`), and build the workloads accordingly:

# %% tags=["remove-input"]
listed = pd.DataFrame(
    {
        "workload": work.name,
        "law": "full" if work.fill == 1 else f"{min(work.seqlens_q):,} to {max(work.seqlens_q):,}",
        "fill": work.fill,
        "heads": work.num_heads_q,
        "tokens, k": work.total_q / 1e3,
        "blocks": work.blocks,
        "shorter blocks, %": 100 * sum(n % 64 > 0 for n in work.seqlens_q) / work.blocks,
        "GFLOP": work.flops("forward") / 1e9,
    }
    for work in BLOCK_WORKLOADS.values()
    if work.head_dim == 128
)
sixty_four = [work for work in BLOCK_WORKLOADS.values() if work.head_dim == 64]
assert len(sixty_four) == len(listed) - 1 == 16
figures.show_table(listed)

# %% tags=["remove-input"]
figures.source("modelled", "counted from the lengths of each workload; forward pass.")

# %% tags=["remove-cell"]
MEAN_EMPTY = 0.3 * TABLE5.max_seqlen_q
padded = TABLE5.blocks * TABLE5.block_size**2
rotary_work = BLOCK_WORKLOADS[BLOCK_TABLES["table7"][0]]
assert rotary_work.total_q == 1_735_537
figures.glue_number("ba_fill", TABLE5.fill)
figures.glue_number("ba_tokens_m", TABLE5.total_q / 1e6)
figures.glue_number("ba_mean_empty", MEAN_EMPTY)
figures.glue_number("ba_padding_work", 100 * (padded / TABLE5.pairs - 1))
figures.glue_number("ba_padding_rows", 100 * (64 * TABLE5.blocks / TABLE5.total_q - 1))
figures.glue_number("ba_rotary_mean", rotary_work.total_q / rotary_work.batch)
figures.glue_number("ba_partial_1000", listed.set_index("workload").iloc[0]["shorter blocks, %"])
figures.glue_number(
    "ba_partial_8000",
    listed.set_index("workload").loc["block-fill70-8000", "shorter blocks, %"],
)

# %% tags=["remove-input"]
# | name: fig-block-lengths
# | caption: >
# |   Lengths of the two published batches with a largest length of 2000, in bins of 50 tokens.
# |   Dashed: where the mean would be if 70 % of the places were empty.
# | alt: >
# |   A histogram of lengths. The batch with fill 0.7 is a flat band between 800 and 2000 tokens,
# |   with some fifty sequences in each bin; the full batch is one line at 2000. A dashed line at
# |   600 lies left of every length that occurs.
with figures.style():
    figure, axis = figures.subplots(width=7.2, height=3.1)
    bins = np.arange(0, 2051, 50)
    counts, _ = np.histogram(TABLE5.seqlens_q, bins)
    axis.bar(bins[:-1] + 25, counts, 46, color=RUNG_COLOURS[1])
    mean = TABLE5.total_q / TABLE5.batch
    top = 1.45 * counts.max()
    axis.vlines(mean, 0, counts.max() * 1.08, color=RUNG_COLOURS[3])
    axis.text(mean, counts.max() * 1.1, f"fill {TABLE5.fill:.2f}: mean {mean:.0f}", ha="center")
    axis.vlines(MEAN_EMPTY, 0, counts.max() * 1.08, color=INK, linestyle=(0, (4, 2)))
    axis.text(MEAN_EMPTY, counts.max() * 1.1, f"70 % empty: mean {MEAN_EMPTY:.0f}", ha="center")
    axis.vlines(2000, 0, top, color=RUNG_COLOURS[0])
    axis.text(1990, top * 0.96, "fill 1.0: all 1,152 sequences", ha="right", va="center")
    axis.set_xlim(0, 2050)
    axis.set_ylim(0, top)
    axis.grid(visible=False)
    axis.set_xlabel("length (tokens)")
    axis.set_ylabel("sequences per bin")
figures.save_csv(pd.DataFrame({"from": bins[:-1], "sequences": counts}), "block-lengths")
display(figure)

# %% tags=["remove-input"]
figures.source(
    "modelled", f"lengths of {TABLE5.name}, drawn with seed {TABLE5.seed}.", csv="block-lengths"
)

# %% [markdown]
# Three numbers compete for the word. Of the padded batch of {numref}`fig-block-lengths`
# {glue:text}`ba_fill:.2f` is used: that is the published 0.7, and it makes
# {glue:text}`ba_tokens_m:.2f` million tokens. The share of pairs of full attention that the blocks
# leave out is {glue:text}`ba_left_out:.1f` %, and it depends on the lengths. A batch of which 70 %
# of the places were empty, finally, would have a mean length of {glue:text}`ba_mean_empty:.0f`, and
# under that law no sequence is so short. The post itself speaks of 70 % sparsity in the structure
# of the attention, which is none of the three; {doc}`counting_bytes` shows that of the readings
# of 0.7 only the fill fits the published times.
#
# Two choices are ours. Of the batch with rotary embeddings only the tokens, the sequences, the
# heads and head_dim are published; a mean of {glue:text}`ba_rotary_mean:.0f` tokens does not belong
# to the law of the others. We draw lengths of 0.4 to 1.0 of 2,200 and move them to the published
# total. The second set of workloads has head_dim 64 and is otherwise the same.
#
# Shorter blocks are {glue:text}`ba_partial_1000:.0f` % of all at a largest length of 1,000 and
# {glue:text}`ba_partial_8000:.1f` % at 8,000. A kernel that computes whole tiles for them does
# {glue:text}`ba_padding_work:.1f` % more than the useful work on the batch above, and if it also
# moved whole tiles, {glue:text}`ba_padding_rows:.1f` % more bytes. Neither is counted for anybody.


# %% tags=["remove-cell"]
def together(distance: int) -> float:
    """Share of the 64 places of the first block border where two events share a block."""
    return float(np.mean([(first // 64) == (first + distance) // 64 for first in range(64)]))


assert all(math.isclose(together(d), max(0, 1 - d / 64)) for d in (1, 16, 63, 64, 200))
local = torch.cat([torch.arange(n) % 16 for n in lengths])
starts = positions - local


def at_positions(p: torch.Tensor, **options) -> torch.Tensor:
    rotary = turns(p, 16)
    return block_attention(q, k, v, offsets, block_size=16, rotary=rotary, **options)


assert_close(at_positions(positions), at_positions(local))
far = at_positions(positions, rotate_v=True)
near = at_positions(local, rotate_v=True)
assert (far - near).abs().max() > 0.1
assert_close(far, reference.rotate(near, *turns(starts, 16)))

# %% [markdown]
# ## Exercises
#
# :::{exercise} Little to save
# :label: ex-block-pairs
#
# How many pairs does the batch of {numref}`fig-block-mask` have with blocks of 16, with full
# attention, and padded to 20 tokens? Why is so little saved, and from which length on do blocks of
# $b$ tokens save nine tenths of the pairs? *(paper, five minutes)*
# :::
#
# :::{solution} ex-block-pairs
# :class: dropdown
#
# $16^2 + 4^2 + 16^2 + 5^2$ = {glue:text}`ba_tiny_pairs:.0f`; $20^2 + 16^2 + 5^2$ =
# {glue:text}`ba_tiny_full:.0f`; $4 \cdot 20^2$ = {glue:text}`ba_tiny_padded:.0f`. The sequences are
# hardly longer than a block. A sequence of $n$ tokens, a multiple of $b$, has $n b$ pairs instead
# of $n^2$: nine tenths are saved from $n = 10 b$ on, 640 tokens for blocks of 64.
# :::
#
# :::{exercise} Positions that start again
# :label: ex-block-positions
#
# Let the positions start again at 0 with each block instead of each sequence. Which results of
# `block_attention` change, without and with `rotate_v`? Find out with the functions above, then
# explain it. *(code, ten lines)*
# :::
#
# :::{solution} ex-block-positions
# :class: dropdown
#
# Without `rotate_v` nothing changes: rotations of q and k by angles proportional to the positions
# enter a score only through the difference of two positions, and both lie in the same block. With
# `rotate_v` the outputs change. $v_j$ turned by the position $o + j'$, $o$ being where the block
# starts, is the rotation for $o$ applied to $v_j$ turned by $j'$, and since the rotation for $o$ is
# the same for all keys of the block it can be taken out of the sum: the output is that of the
# restarted positions, turned by the start of the block. That is the only way in which the output of
# a block depends on where in the history it lies. Both statements need $\sin^2 + \cos^2 = 1$.
# :::
#
# :::{exercise} A history that moves
# :label: ex-block-moving
#
# A model keeps the newest 2,000 events of each user, oldest first. A new event arrives, the oldest
# one goes. What happens to the blocks? How likely do two events that lie $d$ apart share a block,
# and what would you change if that were a concern? *(thought, open)*
# :::
#
# :::{solution} ex-block-moving
# :class: dropdown
#
# Every event moves one place forward, so all borders between blocks move by one event: a pair that
# shared a block today may be apart tomorrow. Over all positions of a border two events share a
# block with probability $1 - d/64$, and never for $d \ge 64$. The model sees an augmentation that
# nobody asked for, and the output for the same two events changes from day to day. Counting blocks
# from a fixed event, for instance from the user's first, keeps the borders; then the first block
# too is partial. Counting from the end keeps the newest 64 events together, which may be the pairs
# that matter most. Shifting the borders by half a block in every second layer also lets information
# travel. None of this needs another kernel: a first block of another size is passed as a sequence
# of its own.
# :::
#
# ## Takeaways
#
# :::{admonition} Three things to remember
# :class: tip
#
# 1. Block attention is a batch of small dense softmax problems: one tile per block and head, and no
#    tile knows another.
# 2. It removes FLOPs and not bytes. What is left is limited by memory.
# 3. Gradients need q, k, v and $dO$. "Sparsity 0.7" is a fill of 0.7.
# :::
