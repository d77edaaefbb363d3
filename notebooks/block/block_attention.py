# ---
# jupyter:
#   kernelspec: {name: python3, display_name: Python 3}
# ---

# %% [markdown]
# # What is block attention? Softmax that never leaves its block
#
# What becomes of attention over a long history when every token sees at most 63 others?
#
# :::{admonition} In this chapter (20 minutes)
# You will be able to write block attention from its definition, run it on any kernel that takes
# jagged batches, and say what its backward pass must keep. On the published batch the blocks leave
# out {glue:text}`left_out:.1f` % of the pairs of full attention. The "sparsity 0.7" of the
# published tables is a different number: a fill, the mean length over the largest one.
# :::

# %%
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pandas as pd
import torch
import torch.nn.functional as F
from torch.testing import assert_close

from gdpa_kernels import block_attention, emulator
from gdpa_kernels.block_attention import reference, v0_flash, v1_one_tile
from gdpa_kernels.measuring.inputs import cu_seqlens
from gdpa_kernels.measuring.workload import BLOCK_TABLES, workload
from gdpa_kernels.report import block_bytes, block_studies, charts
from gdpa_kernels.report.chapter import Chapter

# %% tags=["parameters"]
mode = "replay"
device = "cpu"
data_dir = "data"

# %% tags=["remove-cell"]
chapter = Chapter("block/block_attention", mode=mode, device=device, data_dir=data_dir)

# %% [markdown]
# Give the operator the identity matrix for $V$: then $O = P$, and it draws its own mask.

# %%
torch.manual_seed(0)
lengths = [20, 0, 16, 5]
offsets, total = cu_seqlens(lengths, "cpu"), sum(lengths)
identity = torch.eye(total, dtype=torch.float64)[:, None]
queries, keys = torch.randn(2, total, 1, total, dtype=torch.float64)
p = block_attention(queries, keys, identity, offsets, block_size=16)[:, 0]
print(f"{(p > 0).sum()} of {total**2} entries are not zero")

# %% tags=["remove-input"]
# | name: fig-block-mask
# | caption: >
# |   P of a batch of four sequences with 20, 0, 16 and 5 tokens, blocks of 16. A darker cell is a
# |   larger probability. Frames: sequences, whose pairs full attention would compute.
# | alt: >
# |   A square of 41 by 41 cells. Along the diagonal lie four filled squares with sides 16, 4, 16
# |   and 5, the first two in a frame of side 20. Everything else is empty.
strength = pd.DataFrame((p.sqrt() / p.sqrt().amax(1, keepdim=True)).numpy())
spots = [(a, b, f"{b - a} tokens") for a, b in pairwise(offsets.tolist()) if b > a]
chapter.figure(
    block_bytes.cells({"": strength}, xlabel="key", ylabel="query", frames=spots),
    modelled="the output of block_attention for random q and k, V = identity, fp64",
)
assert (p > 0).sum() == 16**2 + 4**2 + 16**2 + 5**2

# %% [markdown]
# ## The definition
#
# The batch is {doc}`jagged <../operator/gdpa>`: sequence $i$ owns the tokens from `cu_seqlens[i]`
# up to, not including, `cu_seqlens[i + 1]`. Block $j$ of sequence $i$ is
#
# $$
# B_{ij} = \{\, t : o_i + b\,j \;\le\; t \;<\; \min(o_i + b\,(j + 1),\; o_{i+1}) \,\},
# $$ (eq-block-tokens)
#
# with $o_i$ for `cu_seqlens[i]` and $b$ for `block_size`, 64 unless stated otherwise. Blocks are
# counted from the start of each sequence, and the last block of a sequence may be shorter. Within a
# block and a head,
#
# $$
# S = s\, Q K^{\mathsf T}, \qquad P = \mathrm{softmax}(S), \qquad O = P V,
# $$ (eq-block)
#
# in both directions, with $s = 1/\sqrt{\mathtt{head\_dim}}$ unless given. Across blocks: nothing.


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


q, k, v = (torch.randn(total, heads, 16, dtype=torch.float64) for heads in (4, 2, 2))
out = block_attention(q, k, v, offsets, block_size=16)
assert_close(out, naive(q, k, v, offsets, 16))

# %% [markdown]
# On a CPU `block_attention` runs its definition in PyTorch, all blocks at once. Four query heads
# share two heads of keys and values {cite}`shazeer2019mqa,ainslie2023gqa`; the sequence without
# tokens is no special case.
#
# "Sparse attention" names what is missing. What is left is a batch of small dense problems, so any
# kernel for jagged batches can run it. Let each block be a sequence of its own:

# %%
parts = [min(16, n - first) for n in lengths for first in range(0, n, 16)]
dense = []
for start, end in pairwise([0, *np.cumsum(parts).tolist()]):
    one = (t[start:end].transpose(0, 1) for t in (q, k, v))
    dense.append(F.scaled_dot_product_attention(*one, enable_gqa=True).transpose(0, 1))
assert_close(torch.cat(dense), out)
print(f"{len(lengths)} sequences, {len(parts)} blocks: {parts}")

# %% [markdown]
# This is how we call FlashAttention-2 {cite}`dao2024flashattention2` as a peer: the 1,152 sequences
# of a published batch become {glue:text}`blocks:,.0f` of at most 64 tokens. What a general kernel
# does there that a single tile does not need is counted in {doc}`counting_bytes` and removed in
# {doc}`v1_one_tile`.
#
# ## What it saves, and what it costs
#
# The published account speaks of production batches of 1,152 sequences of up to about four thousand
# tokens {cite}`siso2026block`. Forward, counted from the lengths:

# %%
rows = []
for n in (1000, 2000, 4000, 8000):
    work = workload(f"block-fill70-{n}")
    full = sum(n * n for n in work.seqlens_q) / work.pairs  # pairs of full attention / of blocks
    flops, size = work.flops("forward"), work.bytes("forward")
    row = {"workload": work.name, "pairs left out (%)": 100 - 100 / full, "GB": size / 1e9}
    row |= {"TFLOP, full": flops * full / 1e12, "TFLOP, blocks": flops / 1e12}
    row |= {"FLOP/byte, full": flops * full / size, "FLOP/byte, blocks": flops / size}
    rows.append(row)

# %% tags=["remove-input"]
chapter.table(pd.DataFrame(rows), modelled="counted from the lengths of each workload")
main = workload(*BLOCK_TABLES["table5"])
row = next(row for row in rows if row["workload"] == main.name)
chapter.glue(
    left_out=row["pairs left out (%)"], fewer=row["TFLOP, full"] / row["TFLOP, blocks"],
    full=row["FLOP/byte, full"], few=row["FLOP/byte, blocks"],
    blocks=main.blocks, fill=main.fill, mean=main.total_q / main.batch,
)  # fmt: skip

# %% [markdown]
# Work now grows with the number of tokens instead of its square: {glue:text}`fewer:.0f` times fewer
# FLOPs on the batch of the main published table, `block-fill70-2000`. The bytes stay. The operator
# falls from {glue:text}`full:.0f` FLOP per byte to {glue:text}`few:.0f`, and from a problem of
# tensor cores to one of memory.
#
# The price is reach. A sliding window of 32 to each side costs about the same per token, and its
# tokens hear from 65, 129 and 193 tokens after one, two and three layers. Borders of blocks are in
# the same places in every layer: 64 tokens, after any number of them.
#
# Something else has to carry information between blocks: pooling by learned seeds, or a
# feed-forward layer whose weights come from the whole sample ({doc}`../operator/gdpa`), are parts
# of published models of this kind {cite}`zeng2024interformer,hou2026kunlun`. The window pays for
# its reach in the kernel: its key tiles overlap, and a row of scores spans several of them. A block
# shares nothing, and that is what makes it fast.
#
# ## Rotary embeddings
#
# A rotary embedding {cite}`su2021roformer` rotates pairs of numbers of q and k by an angle that
# depends on the position. The operator takes sines and cosines as they are, `rotary=(sin, cos)`,
# each `[total_tokens, head_dim // 2]`, the same for all heads:
#
# $$
# \begin{pmatrix} y_{2i} \\ y_{2i+1} \end{pmatrix} =
# \begin{pmatrix} \cos_i & -\sin_i \\ \sin_i & \cos_i \end{pmatrix}
# \begin{pmatrix} x_{2i} \\ x_{2i+1} \end{pmatrix}.
# $$ (eq-block-rotary)
#
# Pairs are *interleaved*. Many models pair $i$ with $i + \mathtt{head\_dim} / 2$; whoever mixes the
# two up gets numbers that look right.


# %%
def angles(positions: torch.Tensor, dim: int = 16, base: float = 10_000.0):
    """(sin, cos) `[tokens, dim // 2]`: pair i has the angle position * base ** (-2 i / dim)."""
    frequencies = base ** (-2.0 * torch.arange(dim // 2) / dim)
    found = positions[:, None].double() * frequencies.double()
    return found.sin(), found.cos()


positions = torch.cat([torch.arange(n) for n in lengths])
sin, cos = angles(positions)
rotated = reference.rotate(q, sin, cos)
permuted = torch.cat([torch.arange(0, 16, 2), torch.arange(1, 16, 2)])
halves = reference.rotate(q[..., permuted.argsort()], sin, cos)[..., permuted]
print(f"halves instead of neighbours: off by {(halves - rotated).abs().max():.1f}")

# %% [markdown]
# Three things follow the published operator {cite}`adsmodelkernellibrary`. Sines and cosines are an
# input without a gradient. $\sin^2 + \cos^2 = 1$ is not assumed, so the gradients take the
# *transpose* of {eq}`eq-block-rotary` and not its inverse. And v may be rotated too,
# `rotate_v=True`; an exercise asks what that does.
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
# with $D_i = \sum_j P_{ij}\, dP_{ij} = \sum_c O_{ic}\, dO_{ic}$, one number for each row. A kernel
# that sees a row of scores in pieces lacks the first sum until the last piece. FlashAttention-2
# therefore keeps the output, computes $D$ from it in a kernel of its own, and keeps the log-sum-exp
# of each row to recover $P$ {cite}`dao2024flashattention2`. With the whole row in one tile the
# first sum is at hand, and none of that is needed:

# %%
x_q, x_k, x_v, x_grad = torch.randn(4, 20, 8, dtype=torch.float64)
leaves = [t.requires_grad_() for t in (x_q, x_k, x_v)]
p = (8**-0.5 * x_q @ x_k.T).softmax(1)
dp = x_grad @ x_v.T
ds = p * (dp - (p * dp).sum(1, keepdim=True))
by_formula = 8**-0.5 * ds @ x_k, 8**-0.5 * ds.T @ x_q, p.T @ x_grad
assert_close(by_formula, torch.autograd.grad(p @ x_v, leaves, x_grad))

with emulator.enabled():
    _, saved = v1_one_tile.forward(block_studies.batch((20,)))
print("kept for backward besides q, k, v and the offsets:", saved)

# %% [markdown]
# A public call also hands the list of blocks from forward to backward, 8 bytes for each block.
#
# ## The same call on a kernel
#
# `impl` names a rung; inside `emulator.enabled()` its kernels run on the CPU and every access is
# checked ({doc}`../tools/emulator`). Errors against fp64, with shared key heads and rotary:

# %%
options = {"heads": 4, "heads_k": 2, "head_dim": 16, "block_size": 16, "rotary": torch.float32}
small = block_studies.batch(lengths, **options)
checked = block_studies.comparison(v1_one_tile, small)

# %% tags=["remove-input"]
chapter.table(
    checked, emulated="v1_one_tile, bf16; allowed: twice PyTorch's error and one rounding"
)

# %% [markdown]
# ## Neighbours
#
# A tile has 64 rows whether the block has or not. In a jagged batch the rows after the end of a
# sequence are somebody else's tokens. A mask makes their probabilities zero, but
# $0 \cdot \mathrm{NaN}$ is NaN: a kernel that loads those rows of V and relies on the mask hands
# one user's NaN to another. The published kernels load them (read in their source, not run
# {cite}`adsmodelkernellibrary`). The rule in this book: a block never sees another one's values.
# Here all but the last four tokens of the first sequence become NaN, and the results for these four
# must not change in a single bit:

# %%
own = (torch.arange(total) >= 16) & (torch.arange(total) < 20)
plain = block_studies.batch(lengths, head_dim=16, block_size=16)
clean_inputs = (plain.q, plain.k, plain.v, block_studies.gradient(plain))
*qkv, hurt_grad = (x.masked_fill(~own.view(-1, 1, 1), torch.nan) for x in clean_inputs)
hurt = replace(plain, **dict(zip("qkv", qkv, strict=True)))
for module in (v0_flash, v1_one_tile):
    clean, _ = block_studies.emulated(module, plain)
    dirty, _ = block_studies.emulated(module, hurt, grad_out=hurt_grad)
    assert all(torch.equal(a[own], b[own]) for a, b in zip(clean, dirty, strict=True))
    assert all(b[~own].isnan().all() for b in dirty)

# %% [markdown]
# The last line matters as much: a NaN of a block's own must not be swallowed.
#
# ## What "sparsity 0.7" means
#
# The published tables name a batch of 1,152 sequences (768 above 7,000 tokens), 4 heads of head_dim
# 128, a largest length from 1,000 to 8,000, and a "sparsity" of 0.7 or 1.0 "discrete uniform"
# {cite}`siso2026block`. No generator comes with them. Generators of the same company use the word
# for the mean length over the largest one: 0.7 draws lengths uniformly from 0.4 to 1.0 of it
# {cite}`generativerecommenders,tritonbench`. We call it the *fill* ({doc}`../operator/workloads`).

# %% tags=["remove-input"]
# | name: fig-block-lengths
# | caption: >
# |   Lengths of the two published batches with a largest length of 2000, sorted. Dashed: what the
# |   mean would be if 70 % of the places were empty.
# | alt: >
# |   Two lines over the sequences, longest first. Fill 0.7 falls from 2000 to 800 in a straight
# |   line, fill 1.0 is level at 2000. A dashed line at 600 lies below every length.
share = np.arange(0, 101, 10)
both = {"fill 0.7": main, "fill 1.0": workload("block-fill100-2000")}
ranked = {name: np.percentile(work.seqlens_q, 100 - share) for name, work in both.items()}
ranked = pd.DataFrame(ranked, index=share)
chapter.figure(
    charts.lines(ranked, xlabel="sequences, longest first (%)", ylabel="length (tokens)",
                 highlight=["fill 0.7"], ceiling=0.3 * main.max_seqlen_q, log=False),
    data=ranked.rename_axis("sequences (%)").reset_index(),
    modelled=f"lengths of {main.name}, drawn with seed {main.seed}",
)  # fmt: skip
tail = 100 * (64 * main.blocks / main.total_q - 1)
padded = 100 * (main.blocks * main.block_size**2 / main.pairs - 1)
chapter.glue(empty=0.3 * main.max_seqlen_q, tail=tail, padded=padded)

# %% [markdown]
# Three numbers compete for the word. A padded batch would be {glue:text}`fill:.2f` full: that is
# the published 0.7, with a mean of {glue:text}`mean:,.0f` tokens. The share of pairs that the
# blocks leave out is {glue:text}`left_out:.1f` %. And a batch of which 70 % of the places were
# empty would have a mean length of {glue:text}`empty:.0f`, which is shorter than its shortest
# sequence. {doc}`counting_bytes` shows that only the fill fits the published times.
#
# The last block of a sequence is usually partial. A kernel that computes whole tiles does
# {glue:text}`padded:.1f` % more than the useful work on this batch, and would move
# {glue:text}`tail:.1f` % more bytes if it also moved whole tiles. Neither is counted for anybody.

# %% tags=["remove-cell"]
local = torch.cat([torch.arange(n) % 16 for n in lengths])


def at_positions(p: torch.Tensor, **options) -> torch.Tensor:
    return block_attention(q, k, v, offsets, block_size=16, rotary=angles(p), **options)


assert_close(at_positions(positions), at_positions(local))
far, near = at_positions(positions, rotate_v=True), at_positions(local, rotate_v=True)
assert (far - near).abs().max() > 0.1
assert_close(far, reference.rotate(near, *angles(positions - local)))

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
# $16^2 + 4^2 + 16^2 + 5^2 = 553$; $20^2 + 16^2 + 5^2 = 681$; $4 \cdot 20^2 = 1600$. The sequences
# are hardly longer than a block. A sequence of $n$ tokens, a multiple of $b$, has $n b$ pairs
# instead of $n^2$: nine tenths are saved from $n = 10 b$ on, 640 tokens for blocks of 64.
# :::
#
# :::{exercise} Positions that start again
# :label: ex-block-positions
#
# Let the positions start again at 0 with each block instead of each sequence. Which results of
# `block_attention` change, without and with `rotate_v`? *(code, ten lines)*
# :::
#
# :::{solution} ex-block-positions
# :class: dropdown
#
# Without `rotate_v` nothing changes: a score depends on the difference of two positions, and both
# lie in one block. With `rotate_v` the outputs change. $v_j$ rotated for the position $o + j'$,
# with $o$ the start of the block, is the rotation for $o$ applied to $v_j$ rotated for $j'$. The
# rotation for $o$ is the same for all keys of the block and can be taken out of the sum: the output
# is that of the restarted positions, rotated for the start of the block. Both statements need
# $\sin^2 + \cos^2 = 1$.
# :::
#
# :::{exercise} A history that moves
# :label: ex-block-moving
#
# A model keeps the newest 2,000 events of each user, oldest first. A new event arrives, the oldest
# goes. What happens to the blocks? How likely do two events $d$ apart share a block, and what would
# you change if that were a concern? *(thought, open)*
# :::
#
# :::{solution} ex-block-moving
# :class: dropdown
#
# All borders move by one event: a pair that shared a block today may be apart tomorrow. Over all
# positions of a border two events share a block with probability $1 - d/64$, and never for
# $d \ge 64$. Counting blocks from a fixed event keeps the borders. Counting from the end keeps the
# newest 64 events together. Shifting the borders by half a block in every second layer lets
# information travel. None of this needs another kernel: a first block of another size is passed as
# a sequence of its own.
# :::
#
# ## Takeaways
#
# - Block attention is a batch of small dense softmax problems: one tile per block and head, and no
#   tile knows another.
# - It removes FLOPs and not bytes. What is left is limited by memory.
# - Gradients need q, k, v and $dO$. "Sparsity 0.7" is a fill of 0.7.
