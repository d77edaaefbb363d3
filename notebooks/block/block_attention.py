# ---
# jupyter:
#   kernelspec: {display_name: Python 3, language: python, name: python3}
# ---

# %% [markdown]
# # What block attention computes
#
# Attention over a history of thousands of events costs the square of its length. What is left, and
# what does it cost, if every token sees at most 63 others?
#
# :::{admonition} In this chapter (20 minutes)
# You will be able to write block attention from its definition, run it on any kernel that takes
# {term}`jagged` batches, and say what its backward pass must keep.
# :::
#
# Cut the history into blocks of 64 events and attend inside each block: the work
# then grows with the length and no longer with its square.

# %% tags=["hide-input"]
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pandas as pd
import torch
import torch.nn.functional as F
from torch.testing import assert_close

from _lib import block_bytes, block_studies
from gdpa_kernels import block_attention
from gdpa_kernels.block_attention.kernels import v1_one_tile
from gdpa_kernels.block_attention.ladder import v0_flash
from gdpa_lab.measuring.inputs import cu_seqlens
from gdpa_lab.measuring.workloads import BLOCK_TABLES, workload
from gdpa_lab.report import charts
from gdpa_lab.report.chapter import Chapter

# %% tags=["parameters"]
mode = "replay"
device = "cpu"
data_dir = "data"

# %% tags=["remove-cell"]
chapter = Chapter("block/block_attention", mode=mode, device=device, data_dir=data_dir)

# %% tags=["remove-cell"]
torch.manual_seed(0)
lengths = [20, 0, 16, 5]
offsets, total = cu_seqlens(lengths, "cpu"), sum(lengths)
identity = torch.eye(total, dtype=torch.float64)[:, None]
queries, keys = torch.randn(2, total, 1, total, dtype=torch.float64)
p = block_attention(queries, keys, identity, offsets, block_size=16)[:, 0]

# %% tags=["remove-input"]
# | name: fig-block-mask
# | caption: >
# |   **A query gives weight only to keys of its own block.** The weights P of four sequences with
# |   20, 0, 16 and 5 tokens, in blocks of 16. Frames: pairs that full attention would compute.
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
# In a jagged batch ({doc}`../operator/gdpa`) blocks of `block_size` tokens, 64 by default, are
# counted from the start of each sequence, and the last one may be shorter. Within a block and head,
#
# $$
# S = s\, Q K^{\mathsf T}, \qquad P = \mathrm{softmax}(S), \qquad O = P V,
# $$ (eq-block)
#
# without a causal mask, with $s = 1/\sqrt{\mathtt{head\_dim}}$ unless given. Tokens of different
# blocks do not see each other.
#
# What is left is a batch of small dense problems, so any kernel for jagged batches can run it if it
# is told that each block is a sequence. Here PyTorch's attention does, and gives the same output.
# Four query heads share two heads of keys and values:

# %% tags=["hide-input"]
q, k, v = (torch.randn(total, heads, 16, dtype=torch.float64) for heads in (4, 2, 2))
out = block_attention(q, k, v, offsets, block_size=16)
parts = [min(16, n - first) for n in lengths for first in range(0, n, 16)]
dense = []
for start, end in pairwise([0, *np.cumsum(parts).tolist()]):
    one = (t[start:end].transpose(0, 1) for t in (q, k, v))
    dense.append(F.scaled_dot_product_attention(*one, enable_gqa=True).transpose(0, 1))
assert_close(torch.cat(dense), out)
print(f"{len(lengths)} sequences, {len(parts)} blocks: {parts}")

# %% [markdown]
# This is also how we call FlashAttention-2 {cite}`dao2024flashattention2` as a baseline: the 1,152
# sequences of a published batch become {glue:text}`blocks:,.0f` of at most 64 tokens.
#
# ## It saves FLOPs and costs reach
#
# For the batch of the published main table {cite}`siso2026block`, blocks do {glue:text}`fewer:.0f`
# times fewer FLOPs in the forward pass than full attention (counted from lengths). The bytes stay
# the same, so the operator falls from {glue:text}`full:.0f` FLOP per byte to {glue:text}`few:.0f`:
# memory is now the limit.

# %% tags=["remove-cell"]
main = workload(*BLOCK_TABLES["table5"])
full = sum(n * n for n in main.seqlens_q) / main.pairs  # pairs of full attention / of blocks
flops, size = main.flops("forward"), main.bytes("forward")
chapter.glue(left_out=100 - 100 / full, fewer=full, full=flops * full / size, few=flops / size)
chapter.glue(blocks=main.blocks, fill=main.fill)

# %% [markdown]
# The price is reach. A sliding window of 32 tokens to each side costs about the same per token, and
# after one, two and three layers a token has seen 65, 129 and 193 tokens. Block borders are the
# same in every layer, so a token sees 64 tokens however many layers there are. Something else has
# to carry information between blocks, such as pooling by learned seeds
# {cite}`zeng2024interformer,hou2026kunlun`.
#
# ## Rotary embeddings
#
# A {term}`rotary` embedding {cite}`su2021roformer` rotates pairs of numbers of q and k by an angle
# that depends on the position. The operator takes sines and cosines as they are,
# `rotary=(sin, cos)`, each `[total_tokens, head_dim // 2]`, the same for all heads:
#
# $$
# \begin{pmatrix} y_{2i} \\ y_{2i+1} \end{pmatrix} =
# \begin{pmatrix} \cos_i & -\sin_i \\ \sin_i & \cos_i \end{pmatrix}
# \begin{pmatrix} x_{2i} \\ x_{2i+1} \end{pmatrix}.
# $$ (eq-block-rotary)
#
# Pairs are *interleaved*: neighbouring columns form a pair. Many models use *half-split* rotary
# instead, which pairs column $i$ with column $i + \mathtt{head\_dim} / 2$. Confusing the two gives
# plausible but wrong numbers; {doc}`v4_rotary` draws both. Three choices follow the published
# operator {cite}`adsmodelkernellibrary`. Sines and cosines are an input without a gradient.
# $\sin^2 + \cos^2 = 1$ is not assumed, so the gradients take the *transpose* of
# {eq}`eq-block-rotary` and not its inverse. And v may be rotated too, with `rotate_v=True`.
#
# ## The gradients need no output
#
# Given $dO$, the gradients of one block and one head are
#
# $$
# \begin{gathered} dV = P^{\mathsf T} dO, \qquad dP = dO\, V^{\mathsf T}, \qquad
# dS_{ij} = P_{ij} (dP_{ij} - D_i), \\
# dQ = s\, dS\, K, \qquad dK = s\, dS^{\mathsf T} Q \end{gathered}
# $$ (eq-block-gradients)
#
# with one number $D_i = \sum_j P_{ij}\, dP_{ij}$ for each row, derived in
# {doc}`../backward/by_hand`. With the whole row in one tile it needs no output
# ({doc}`backward_alone`).
#
# *Rotary.* With $R_i$ for the rotation {eq}`eq-block-rotary` of row $i$, the score is $s\,(R_i q_i)
# \cdot (R_j k_j)$, so
#
# $$
# dq_i = R_i^{\mathsf T} \, s \sum_j dS_{ij}\,R_j k_j, \qquad
# dk_j = R_j^{\mathsf T} \, s \sum_i dS_{ij}\,R_i q_i .
# $$ (eq-block-rotary-gradient)
#
# If $\sin^2 + \cos^2 = 1$, $R_i^{\mathsf T}$ turns by $-\theta_i$. The angle depends on the row
# alone and not on what is summed, so it comes out of the sum: a kernel turns each row of a gradient
# once, after its last block. Since turning is linear, partial sums may also be turned first and
# added then.

# %% [markdown]
# ## The same call on a kernel
#
# Block v1 with shared key heads and rotary, in the emulator, against fp64:

# %% tags=["hide-input"]
options = {"heads": 4, "heads_k": 2, "head_dim": 16, "block_size": 16, "rotary": torch.float32}
small = block_studies.batch(lengths, **options)
checked = block_studies.comparison(v1_one_tile, small)
chapter.table(
    checked,
    caption="**Block v1 agrees with fp64.** Largest errors of the output and the gradients.",
    name="tab-block-errors",
    emulated="v1_one_tile, bf16; allowed: twice PyTorch's error and one rounding",
)

# %% [markdown]
# ## Nobody reads a neighbour's rows
#
# A tile has 64 rows even if the block has fewer; those after it are another user's tokens. A mask
# makes their probabilities zero, which does {ref}`not stop a NaN <rule-masks>`. The published
# kernels load them (read in their source, not run {cite}`adsmodelkernellibrary`). Ours never read
# another block's values: with NaN in all other tokens the results of four do not change in a bit.

# %% tags=["hide-input"]
in_block = (torch.arange(total) >= 16) & (torch.arange(total) < 20)
plain = block_studies.batch(lengths, head_dim=16, block_size=16)
clean_inputs = (plain.q, plain.k, plain.v, block_studies.gradient(plain))
*qkv, hurt_grad = (x.masked_fill(~in_block.view(-1, 1, 1), torch.nan) for x in clean_inputs)
hurt = replace(plain, **dict(zip("qkv", qkv, strict=True)))
for module in (v0_flash, v1_one_tile):
    clean, _ = block_studies.emulated(module, plain)
    dirty, _ = block_studies.emulated(module, hurt, grad_out=hurt_grad)
    assert all(torch.equal(a[in_block], b[in_block]) for a, b in zip(clean, dirty, strict=True))
    assert all(b[~in_block].isnan().all() for b in dirty)

# %% [markdown]
# ## The published "sparsity 0.7" is a fill
#
# The published tables name a batch of 1,152 sequences (768 above 7,000 tokens), 4 heads of head_dim
# 128, a largest length, and a "sparsity" of 0.7 or 1.0 "discrete uniform" {cite}`siso2026block`.
# Generators of the same company use the word for the mean length over the largest one: 0.7 draws
# lengths uniformly from 0.4 to 1.0 of it {cite}`generativerecommenders,tritonbench`. We call it the
# *fill* ({doc}`../operator/workloads`).

# %% tags=["remove-input"]
# | name: fig-block-lengths
# | caption: >
# |   **Fill 0.7 means lengths between 0.4 and 1.0 of the largest.** Sorted lengths of two published
# |   batches. Dashed: the mean if 70 % of the rows were empty.
# | alt: >
# |   Two lines over the sequences, longest first. Fill 0.7 falls from 2000 to 800 in a straight
# |   line, fill 1.0 is level at 2000. A dashed line at 600 lies below every length.
share = np.arange(0, 101, 10)
both = {"fill 0.7": main, "fill 1.0": workload("block-fill100-2000")}
ranked = {name: np.percentile(work.seqlens_q, 100 - share) for name, work in both.items()}
ranked = pd.DataFrame(ranked, index=share)
chapter.figure(
    charts.lines(ranked, xlabel="sequences, longest first (%)", ylabel="length (tokens)",
                 highlight=["fill 0.7"], levels={"70 % empty rows": 0.3 * main.max_seqlen_q}),
    data=ranked.rename_axis("sequences (%)").reset_index(),
    modelled=f"lengths of {main.name}, drawn with seed {main.seed}",
)  # fmt: skip

# %% [markdown]
# A padded batch would be {glue:text}`fill:.2f` full: that is the published 0.7. The blocks leave
# out {glue:text}`left_out:.1f` % of the pairs. {doc}`counting_bytes` shows that only the fill fits
# the published times.
#
# ## Exercises
#
# :::{exercise} Little to save
# :label: ex-block-pairs
#
# How many pairs does the batch of {numref}`fig-block-mask` have with blocks of 16, and how many
# with full attention? From which length on do blocks of $b$ tokens save nine tenths of the pairs?
# *(paper)*
# :::
#
# :::{solution} ex-block-pairs
# :class: dropdown
#
# $16^2 + 4^2 + 16^2 + 5^2 = 553$ and $20^2 + 16^2 + 5^2 = 681$: the sequences are hardly longer
# than a block. A sequence of $n$ tokens, a multiple of $b$, has $n b$ pairs instead of $n^2$. Nine
# tenths are saved from $n = 10 b$ on, 640 tokens for blocks of 64.
# :::
#
# :::{exercise} Positions that start again
# :label: ex-block-positions
#
# Let the positions start again at 0 with each block instead of each sequence. Which results of
# `block_attention` change, without and with `rotate_v`? *(emulator, ten lines)*
# :::
#
# :::{solution} ex-block-positions
# :class: dropdown
#
# Without `rotate_v` nothing changes: a score depends on the difference of two positions, and both
# lie in one block. With `rotate_v` the outputs change. With $o$ the start of the block, rotating
# $v_j$ for the position $o + j'$ is rotating it for $j'$ and then for $o$. The rotation for $o$ is
# the same for all keys of the block and can be taken out of the sum: the output is that of the
# restarted positions, rotated for the start of the block. Both need $\sin^2 + \cos^2 = 1$.
# :::
#
# :::{exercise} An angle for each pair
# :label: ex-block-angle
#
# Let the angle depend on the pair, as $R_{ij}$ in $q_i \cdot R_{ij} k_j$. What is $dq_i$ now, and
# what does the kernel lose? When is it still one rotation per row? *(paper, ten minutes)*
# :::
#
# :::{solution} ex-block-angle
# :class: dropdown
#
# $dq_i = s \sum_j dS_{ij} R_{ij} k_j$. Nothing comes out of the sum: every pair needs a rotated key
# of its own, and neither the scores nor $dq$ are matmuls any more. If the angle is a difference,
# $R_{ij} = R_i^{\mathsf T} R_j$, it is one rotation per row again: that is rotary.
# :::
#
# :::{exercise} A history that moves
# :label: ex-block-moving
#
# A model keeps the newest 2,000 events of each user, oldest first. A new event arrives, the oldest
# goes. What happens to the blocks? How likely are two events $d$ apart to share a block, and what
# would you change if that mattered? *(paper, open)*
# :::
#
# :::{solution} ex-block-moving
# :class: dropdown
#
# All borders move by one event: a pair that shared a block today may be apart tomorrow. Over all
# positions of a border, two events share a block with probability $1 - d/64$, and never for $d \ge
# 64$. Counting blocks from a fixed event keeps the borders. Shifting them by half a block in every
# second layer lets information travel. Neither needs another kernel: a first block of another size
# is just another sequence.
# :::
#
# ## Takeaways
#
# - Block attention is a batch of small dense softmax problems, one tile per block and head.
# - It removes FLOPs but no bytes, so what is left is limited by memory.
# - The gradients need q, k, v and $dO$ alone.
