# ---
# jupyter:
#   kernelspec: {name: python3, display_name: Python 3}
# ---

# %% [markdown]
# # What is GDPA? Two matmuls around an activation
#
# What is left of attention when an element-wise activation replaces the softmax?
#
# :::{admonition} In this chapter (20 minutes)
# You will call the operator in its three uses, stream it over blocks of keys in four lines, and
# tell two published scale conventions apart. Without softmax a row of scores needs no maximum, no
# sum and no rescaling: blocks of keys simply add up.
# :::

# %%
import pandas as pd
import torch
import torch.nn.functional as F
from torch.testing import assert_close

from gdpa_kernels import emulator, gdpa
from gdpa_kernels.gdpa import reference
from gdpa_kernels.measuring import testing
from gdpa_kernels.measuring.inputs import cu_seqlens
from gdpa_kernels.report import drawings
from gdpa_kernels.report.chapter import Chapter

# %% tags=["parameters"]
mode = "replay"
device = "cpu"
data_dir = "data"

# %% tags=["remove-cell"]
chapter = Chapter("operator/gdpa", mode=mode, device=device, data_dir=data_dir)

# %% tags=["remove-input"]
# | name: fig-gdpa-uses
# | caption: >
# |   One operator, three uses: the score matrices of three sequences with 6, 2 and 9 tokens. Rows
# |   are queries, columns are keys.
# | alt: >
# |   Three panels. Self-attention: squares of side 6, 2 and 9. PMA: rectangles of height 4 and
# |   widths 6, 2 and 9. PFFN: rectangles of width 4 and heights 6, 2 and 9.
SIZES = (6, 2, 9)
chapter.figure(
    drawings.scores(
        {
            "self-attention": [(n, n) for n in SIZES],
            "PMA, 4 seeds": [(4, n) for n in SIZES],
            "PFFN, width 4": [(n, 4) for n in SIZES],
        }
    ),
    modelled="drawn from the lengths in the caption",
)

# %% [markdown]
# ## The definition
#
# A batch holds sequences of different lengths. For each sequence and head, with queries $Q$
# (`len_q` rows of `head_dim` numbers) and keys and values $K$, $V$ (`len_k` rows each), generalized
# dot-product attention {cite}`xu2026gdpa,hou2026kunlun` computes
#
# $$
# S = s\, Q K^{\mathsf T}, \qquad P = \mathrm{act}(S), \qquad O = c\, P V .
# $$ (eq-gdpa)
#
# The activation acts on each score alone: GELU, SiLU, ReLU and others of the
# {doc}`next chapter <activations>`. $s$ is the argument `scale`, $c$ is `output_scale`. A pair of
# query and key that a mask removes contributes exactly zero. Each head may have its own activation,
# and several query heads may share a head of keys and values {cite}`shazeer2019mqa,ainslie2023gqa`.
# `impl="reference"` asks for this definition in PyTorch, here in double precision:

# %%
torch.manual_seed(0)


def draw(rows: int, heads: int = 2, dim: int = 8) -> torch.Tensor:
    return torch.randn(rows, heads, dim, dtype=torch.float64)


lengths = [3, 0, 5, 2]
offsets = cu_seqlens(lengths, "cpu")
q, k, v = draw(10), draw(10), draw(10)
out = gdpa(q, k, v, offsets, offsets, 5, 5, impl="reference")

s = q[3:8, 0] @ k[3:8, 0].T * 8**-0.5  # sequence 2, head 0
p = F.gelu(s, approximate="tanh")
assert_close(out[3:8, 0], p @ v[3:8, 0])
print(f"cu_seqlens {offsets.tolist()}, out {list(out.shape)}")

# %% [markdown]
# ## The jagged layout
#
# Sequences lie one after another, without padding, in tensors of shape
# `[total_tokens, num_heads, head_dim]`. The int32 tensor `cu_seqlens` has one entry more than there
# are sequences: sequence $i$ owns the rows from `cu_seqlens[i]` up to, not including,
# `cu_seqlens[i + 1]`. An empty sequence is two equal entries ({numref}`fig-gdpa-jagged`).
# Recommendation models keep user histories in this layout {cite}`xu2024jagged`.

# %% tags=["remove-input"]
# | name: fig-gdpa-jagged
# | caption: >
# |   The batch of the code above. Top: its ten rows in memory, with cu_seqlens below them. Bottom:
# |   the same batch padded to its longest sequence. Empty cells would be read, multiplied and
# |   written for nothing.
# | alt: >
# |   Ten coloured cells in one line: three of sequence 0, five of sequence 2, two of sequence 3,
# |   with the offsets 0, 3, 3, 8 and 10 under their borders. Below, a grid of four rows and five
# |   columns in which only ten of the twenty cells are coloured.
chapter.figure(drawings.jagged(lengths), modelled="drawn from the lengths 3, 0, 5 and 2")

# %% [markdown]
# ## From softmax to an activation
#
# Softmax attention {cite}`vaswani2017attention` divides each exponential by the sum over its row. A
# kernel that sees one block of keys at a time knows neither that sum nor the maximum that keeps the
# exponential finite. It carries both along and corrects its accumulator whenever the maximum rises
# {cite}`milakov2018online,dao2022flashattention`. With an element-wise activation a block of keys
# is finished as soon as it is multiplied:


# %%
def gdpa_in_blocks(q, blocks):
    out = torch.zeros_like(q)
    for k, v in blocks:
        out += F.gelu(q @ k.T) @ v
    return out


def softmax_in_blocks(q, blocks):
    out = torch.zeros_like(q)
    row_sum = torch.zeros_like(q[:, :1])
    row_max = torch.full_like(row_sum, -torch.inf)
    for k, v in blocks:
        s = q @ k.T
        new_max = torch.maximum(row_max, s.amax(1, keepdim=True))
        rescale = torch.exp(row_max - new_max)
        p = torch.exp(s - new_max)
        row_sum = row_sum * rescale + p.sum(1, keepdim=True)
        out = out * rescale + p @ v
        row_max = new_max
    return out / row_sum


one, keys, values = draw(64)[:, 0], draw(64)[:, 0], draw(64)[:, 0]
blocks = list(zip(keys.split(16), values.split(16), strict=True))
for order in ([0, 1, 2, 3], [2, 0, 3, 1]):
    shuffled = [blocks[i] for i in order]
    assert_close(gdpa_in_blocks(one, shuffled), F.gelu(one @ keys.T) @ values)
    assert_close(softmax_in_blocks(one, shuffled), (one @ keys.T).softmax(1) @ values)

# %% [markdown]
# | | softmax attention | GDPA |
# |:--|:--|:--|
# | two matmuls, `4 * head_dim` FLOPs per pair | yes | yes |
# | scores stay on the chip | yes | yes |
# | per score | an exponential | an activation |
# | running maximum, running sum, rescaling of the accumulator | yes | no |
# | row statistics saved for the backward pass | yes | no |
# | blocks of keys on different SMs | merged by their statistics | added |
# | a query without keys | 0/0 | 0 |
#
# The published GDPA kernel deleted a whole stage of four warps together with the rescaling
# {cite}`meta2026gem`. The price: a softmax row is an average of values, whatever the number of
# keys. A GDPA row is a sum, and it grows with the number of keys unless a scale prevents it.
#
# ## One operator, three uses
#
# What differs between the panels of {numref}`fig-gdpa-uses` is where the rows come from.
#
# **Self-attention.** All three tensors are projections of the same tokens, and `cu_seqlens_q` is
# `cu_seqlens_k`, as in the first cell.
#
# **PMA**, pooling by multi-head attention {cite}`lee2019settransformer`, summarises a history of
# any length in a fixed number of rows. The original uses softmax; GDPA keeps its shape. The queries
# are learned *seeds*, the same for every sample. `q` holds them once, `cu_seqlens_q=None` says so,
# and the output has one copy of the rows for each sample.

# %%
seeds = draw(4)
pooled = gdpa(seeds, k, v, None, offsets, 4, 5, impl="reference")

copies, fours = seeds.repeat(4, 1, 1), cu_seqlens([4] * 4, "cpu")
assert_close(pooled, gdpa(copies, k, v, fours, offsets, 4, 5, impl="reference"))
assert (pooled[4:8] == 0).all()  # sequence 1 has no tokens
print(f"{list(seeds.shape)} -> {list(pooled.shape)}")

# %% [markdown]
# **PFFN**, the personalised feed-forward network of InterFormer {cite}`zeng2024interformer` and
# Kunlun {cite}`hou2026kunlun`, sends every token of a sample through a two-layer perceptron whose
# weights belong to that sample: they are computed from its context features, which are not a
# sequence. In {eq}`eq-gdpa`, $K^{\mathsf T}$ is the first layer's weight matrix $W_1$ and $V$ the
# second layer's $W_2$. The number of keys is the width of the hidden layer.

# %%
width = 6
layers = cu_seqlens([width] * len(lengths), "cpu")
first, second = draw(24), draw(24)  # computed from the context
out = gdpa(q, first, second, offsets, layers, 5, width, scale=1.0, impl="reference")

sample = slice(2 * width, 3 * width)
w1, w2 = first[sample, 0].T, second[sample, 0]
perceptron = F.gelu(q[3:8, 0] @ w1, approximate="tanh") @ w2
assert_close(out[3:8, 0], perceptron)
print(f"W1 {list(w1.shape)}, W2 {list(w2.shape)}: sample 2, head 0")

# %% [markdown]
# One kernel serves three modules with very different shapes ({doc}`workloads`). `impl` selects a
# kernel; it never falls back silently. An error names the argument, the expectation and what was
# received. The published kernels accept a scale that is not read, and turn an unknown activation
# into GELU without a word {cite}`adsmodelkernellibrary`. Inside `emulator.enabled()` the GPU kernel
# of a rung runs on the CPU, and every memory access is checked. Its error may be twice that of
# PyTorch in the same dtype, plus one rounding ({doc}`../measuring/protocol`).

# %%
half = [draw(10, dim=16).bfloat16() for _ in range(3)]
where = (offsets, offsets, 5, 5)
exact = gdpa(*(t.double() for t in half), *where, impl="reference")
pytorch = gdpa(*half, *where, impl="reference")
with emulator.enabled():
    kernel = gdpa(*half, *where, impl="v1_tiled")
print(testing.compare(name="v1_tiled", actual=kernel, expected=exact, baseline=pytorch))

# %% [markdown]
# ## Why the scores must exist
#
# With the identity as activation the parentheses move,
# $(Q K^{\mathsf T})\, V = Q\, (K^{\mathsf T} V)$: each token is multiplied by one `head_dim` ×
# `head_dim` matrix, and nothing has the size of the scores. That is InterFormer's original PFFN
# {cite}`zeng2024interformer`. For 1,000 tokens, 256 keys and head_dim 128 it needs
# {glue:text}`identity:.1f` times fewer FLOPs, and the gap widens with the length. The activation
# forbids the shortcut, which is why this book has kernels to write. It also buys something: the
# rank of the scores is no longer limited by head_dim.

# %%
scores = draw(64)[:, 0] @ draw(64)[:, 0].T
for name, matrix in {"scores": scores, "gelu(scores)": F.gelu(scores)}.items():
    print(f"rank of {name}: {torch.linalg.matrix_rank(matrix)}")
ratio = 4 * 1000 * 256 * 128 / (2 * 128**2 * (1000 + 256))

# %% [markdown]
# ## The surprise: two scales, two functions
#
# Softmax attention has one convention, $1/\sqrt{\mathtt{head\_dim}}$ in front of $QK^{\mathsf T}$.
# GDPA has at least two, on different sides of the activation:
#
# - **Inside.** According to public summaries of the paper, Kunlun divides the scores by the largest
#   sequence length before the activation {cite}`hou2026kunlun`: $s = 1/\mathtt{max\_seqlen}$,
#   $c = 1$.
# - **Outside.** The published Triton kernel multiplies the *activated* scores by an argument
#   `qk_scale`, 1 by default: $s = 1$, $c = \mathtt{qk\_scale}$. HSTU, a relative with SiLU, also
#   divides by the largest length outside {cite}`zhai2024hstu,generativerecommenders`.
#
# The published Blackwell kernel accepts a `softmax_scale`, stores it and never reads it; the
# benchmark passes 1 to the Triton kernel, so the two agree there {cite}`adsmodelkernellibrary`. In
# this book both are arguments. `scale` defaults to $1/\sqrt{\mathtt{head\_dim}}$, which gives the
# scores of standard normal inputs a standard deviation of one. Here the same factor stands on
# either side:

# %%
some = cu_seqlens([32, 20, 7], "cpu")
tensors = [draw(59, dim=64) for _ in range(3)]


def output(name: str, **scales: float) -> torch.Tensor:
    return gdpa(*tensors, some, some, 32, 32, activation=name, impl="reference", **scales)


difference = {}
for name in reference.ACTIVATIONS:
    inside = output(name, scale=1 / 32, output_scale=1.0)
    outside = output(name, scale=1.0, output_scale=1 / 32)
    difference[name] = ((inside - outside).norm() / outside.norm()).item()

# %% tags=["remove-input"]
same_function = {name for name, value in difference.items() if value < 1e-12}
assert same_function == {"identity", "relu", "leaky_relu"}, "the text names these three"
smooth = [difference[name] for name in ("gelu", "gelu_tanh", "silu", "hardswish")]
chapter.glue(least=100 * min(smooth), most=100 * max(smooth), identity=ratio)
chapter.table(
    pd.DataFrame([difference]).map("{:.2f}".format),
    modelled="relative difference of the outputs, one small batch in double precision",
)

# %% [markdown]
# They agree exactly where the activation is *positively homogeneous*,
# $\mathrm{act}(s x) = s\, \mathrm{act}(x)$ for $s > 0$: identity, ReLU and leaky ReLU. For GELU,
# SiLU and hard swish the outputs differ by {glue:text}`least:.0f` to {glue:text}`most:.0f` %. A
# small inner scale keeps the scores near zero, where these activations are almost $x/2$: another
# function. A model trained with one convention does not run with the other.
#
# ## Masks act after the activation
#
# A softmax kernel removes a pair by setting its score to $-\infty$. GELU and SiLU of $-\infty$ are
# NaN as computed, $-\infty \cdot 0$. Setting the score to zero works forward, since all activations
# here vanish at zero, and fails backward, where most derivatives at zero are 1/2. So our kernels
# evaluate the activation first and then set masked pairs to zero, and do the same with the
# derivative. `causal=True` keeps keys at or before the query, `window=W` keys at most `W` positions
# away, counted from the start of the sequence.

# %%
gelu = reference.ACTIVATIONS["gelu"]
ends = torch.tensor([-torch.inf, 0.0])
print(f"gelu(-inf) = {gelu.function(ends)[0]}, gelu'(0) = {gelu.derivative(ends)[1]}")

masked = gdpa(q, k, v, offsets, offsets, 5, 5, causal=True, window=1, impl="reference")
visible = reference.visible(5, 5, causal=True, window=1)
assert_close(masked[3:8, 0], p * visible @ v[3:8, 0])

# %% [markdown]
# ## Exercises
#
# :::{exercise} The padded bill
# :label: ex-gdpa-padded
#
# The batch of {numref}`fig-gdpa-jagged` is padded to five tokens. How many of the scores of one
# head belong to pairs of tokens that exist? *(paper, five minutes)*
# :::
#
# :::{solution} ex-gdpa-padded
# :class: dropdown
#
# Existing pairs: $3^2 + 0 + 5^2 + 2^2 = 38$. Padded: $4 \cdot 5^2 = 100$. Half of the rows exist,
# but only 38 % of the pairs. {doc}`workloads` has the general formula.
# :::
#
# :::{exercise} Split the keys
# :label: ex-gdpa-split
#
# One query row, a million keys, 132 SMs. Write GDPA so that each SM works on its own keys, and say
# what the SMs exchange at the end. What would softmax add? *(ten lines of PyTorch)*
# :::
#
# :::{solution} ex-gdpa-split
# :class: dropdown
#
# `sum(gdpa_in_blocks(q, part) for part in parts)`: one partial output per SM, added. In fp32 and in
# a fixed order the result is the same from run to run. Softmax needs each SM's maximum and sum too,
# and each partial output must be rescaled before it is added.
# :::
#
# :::{exercise} Not zero at zero
# :label: ex-gdpa-tail
#
# `v1_tiled` reads the last block of keys past the end of the sequence as zeros and masks nothing
# there. Would it still be right for an activation with $\mathrm{act}(0) = 1$? *(paper, five
# minutes)*
# :::
#
# :::{solution} ex-gdpa-tail
# :class: dropdown
#
# Yes. A key that does not exist has the score 0, so $P$ is 1 there, but its row of $V$ is zero too
# and adds nothing: $V = 0$ carries the tail. A kernel that zeroed $K$ alone would be wrong. A pair
# removed by `causal` or `window` has a row of $V$ that exists, and needs the mask on $P$.
# :::
#
# :::{exercise} A feed-forward layer with a bias
# :label: ex-gdpa-bias
#
# Obtain $\mathrm{act}(Q W_1 + b)\, W_2$, one $b$ of length `len_k` per sample, from `gdpa` without
# changing the kernel. What does it cost? *(open)*
# :::
#
# :::{solution} ex-gdpa-bias
# :class: dropdown
#
# Append a column of ones to $Q$ and the column $b$ to $K$; append a zero column to $V$ and drop the
# last column of the output. head_dim grows by one, in practice by 8, since TMA copies and MMA want
# multiples of 8 or 16: about 6 % more bytes at head_dim 128, and twice the cost in a kernel that
# pads head_dim to a power of two.
# :::
#
# ## Takeaways
#
# - $O = c\,\mathrm{act}(s\,QK^{\mathsf T})\,V$ has no row statistics: blocks of keys add up in any
#   order, and a row without keys is zero.
# - Self-attention, PMA and PFFN are one operator on a jagged batch. Only the lengths and the origin
#   of $Q$, $K$ and $V$ differ.
# - Say where the scale stands. Inside and outside are the same function only for positively
#   homogeneous activations.
