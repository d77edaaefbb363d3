# ---
# jupyter:
#   kernelspec: {display_name: Python 3, language: python, name: python3}
# ---

# %% [markdown]
# # What GDPA computes
#
# What is left of attention when an element-wise activation replaces the softmax?
#
# :::{admonition} In this chapter (30 minutes)
# You will call the operator in its three uses, stream it over blocks of keys in four lines, and
# tell two published scale conventions apart.
# :::

# %% tags=["hide-input"]
import torch
import torch.nn.functional as F
from torch.testing import assert_close

from _lib import drawings
from gdpa_kernels import gdpa
from gdpa_lab.measuring.inputs import cu_seqlens
from gdpa_lab.report.chapter import Chapter

# %% tags=["parameters"]
mode = "replay"
device = "cpu"
data_dir = "data"

# %% tags=["remove-cell"]
chapter = Chapter("operator/gdpa", mode=mode, device=device, data_dir=data_dir)

# %% tags=["remove-input"]
# | name: fig-gdpa-uses
# | caption: >
# |   **One operator has three uses, which differ only in their lengths.** Score matrices of three
# |   sequences with 6, 2 and 9 tokens: rows are queries, columns keys
# |   ({doc}`how to read our figures <../../figures>`).
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
# The activation acts on each score alone ({doc}`activations`). $s$ is the argument `scale`, by
# default $1/\sqrt{\mathtt{head\_dim}}$, and $c$ is `output_scale`. Several query heads may share a
# head of keys and values {cite}`shazeer2019mqa,ainslie2023gqa`. `impl` selects a kernel;
# `"reference"` is the definition in PyTorch, here in double precision:

# %%
torch.manual_seed(0)


def draw(rows: int, heads: int = 2, dim: int = 8) -> torch.Tensor:
    return torch.randn(rows, heads, dim, dtype=torch.float64)


lengths = [3, 0, 5, 2]
offsets = cu_seqlens(lengths, "cpu")
q, k, v = (draw(10) for _ in range(3))
out = gdpa(q, k, v, offsets, offsets, 5, 5, impl="reference")

s = q[3:8, 0] @ k[3:8, 0].T * 8**-0.5  # sequence 2, head 0
p = F.gelu(s, approximate="tanh")
assert_close(out[3:8, 0], p @ v[3:8, 0])
print(f"cu_seqlens {offsets.tolist()}, out {list(out.shape)}")

# %% [markdown]
# ## The jagged layout
#
# Sequences lie one after another, without padding, in tensors of shape `[total_tokens, num_heads,
# head_dim]`. The int32 tensor `cu_seqlens` has one more entry than there are sequences: sequence
# $i$ owns the rows from `cu_seqlens[i]` up to but not including `cu_seqlens[i + 1]`. An empty
# sequence is two equal entries ({numref}`fig-gdpa-jagged`).

# %% tags=["remove-input"]
# | name: fig-gdpa-jagged
# | caption: >
# |   **Padding doubles this batch; packing adds nothing but offsets.** The batch of the code above.
# |   Top: its ten rows in memory, with cu_seqlens below them. Bottom: the same batch padded.
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
# exponential finite. It carries both along and rescales its {term}`accumulator` whenever the
# maximum rises {cite}`milakov2018online,dao2022flashattention`. With an element-wise activation
# each block of keys adds its share and is done:


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


# %% tags=["remove-cell"]
one, keys, values = draw(64)[:, 0], draw(64)[:, 0], draw(64)[:, 0]
blocks = list(zip(keys.split(16), values.split(16), strict=True))
for some in (blocks, blocks[::-1]):
    assert_close(gdpa_in_blocks(one, some), F.gelu(one @ keys.T) @ values)
    assert_close(softmax_in_blocks(one, some), (one @ keys.T).softmax(1) @ values)

# %% [markdown]
# | | softmax attention | GDPA |
# |:--|:--|:--|
# | per score | an exponential | an activation |
# | running maximum, running sum, rescaling of the accumulator | yes | no |
# | row statistics saved for the backward pass | yes | no |
# | blocks of keys on different processors of a GPU | merged by their statistics | added |
# | a query without keys | 0/0 | 0 |
#
# FlashAttention-4 keeps 128 threads only for rescaling the output
# {cite}`zadouri2026flashattention4`. There is a price: a GDPA row sums its values, so it grows with
# the number of keys unless a scale prevents it.
#
# ## One operator, three uses
#
# In **self-attention** ({numref}`fig-gdpa-uses`) all three tensors are projections of the same
# tokens; the first example has their shapes.
#
# **{term}`PMA`**, pooling by multi-head attention {cite}`lee2019settransformer`, summarises a
# history of any length in a fixed number of rows. The original uses softmax; GDPA keeps its shape.
# The queries are learned *seeds*, the same for every sample. `q` holds them once,
# `cu_seqlens_q=None` says so, and the output has as many rows for each sample:

# %%
seeds = draw(4)
pooled = gdpa(seeds, k, v, None, offsets, 4, 5, impl="reference")
assert (pooled[4:8] == 0).all()  # sequence 1 has no tokens
print(f"{list(seeds.shape)} -> {list(pooled.shape)}")

# %% [markdown]
# **{term}`PFFN`**, the personalised feed-forward network of InterFormer {cite}`zeng2024interformer`
# and Kunlun {cite}`hou2026kunlun`, sends every token of a sample through a two-layer perceptron
# whose weights are computed from that sample's context features. In {eq}`eq-gdpa`, $K^{\mathsf T}$
# is the first layer's weight matrix $W_1$ and $V$ the second layer's $W_2$. The number of keys is
# the width of the hidden layer.

# %%
width = 6
layers = cu_seqlens([width] * len(lengths), "cpu")
first, second = draw(24), draw(24)  # computed from the context
out = gdpa(
    q, first, second, offsets, layers, 5, width, scale=1.0, impl="reference"
)  # fmt: skip
sample = slice(2 * width, 3 * width)
w1, w2 = first[sample, 0].T, second[sample, 0]
assert_close(out[3:8, 0], F.gelu(q[3:8, 0] @ w1, approximate="tanh") @ w2)
print(f"sample 2, head 0: W1 {list(w1.shape)}, W2 {list(w2.shape)}")

# %% [markdown]
# ## Why the scores cannot be skipped
#
# With the identity as activation the parentheses move, $(Q K^{\mathsf T})\, V = Q\, (K^{\mathsf T}
# V)$: each token is multiplied by one `head_dim` × `head_dim` matrix, and nothing has the size of
# the scores. That is InterFormer's original PFFN {cite}`zeng2024interformer`. For 1,000 tokens, 256
# keys and head_dim 128 it needs a third of the FLOPs. The activation forbids the shortcut.
#
# ## Two scales are two functions
#
# Softmax attention has one convention, $1/\sqrt{\mathtt{head\_dim}}$ in front of $QK^{\mathsf T}$.
# GDPA has at least two, on different sides of the activation:
#
# - **Inside.** According to public summaries of the paper, Kunlun divides the scores by the largest
#   length before the activation {cite}`hou2026kunlun`: $s = 1/\mathtt{max\_seqlen}$, $c = 1$.
# - **Outside.** The published Triton kernel multiplies the *activated* scores by an argument
#   `qk_scale`, 1 by default: $s = 1$, $c = \mathtt{qk\_scale}$ {cite}`adsmodelkernellibrary`. HSTU,
#   a relative with SiLU, also divides by the largest length outside
#   {cite}`zhai2024hstu,generativerecommenders`.
#
# A factor of 1/32 on either side, for one small batch:

# %% tags=["remove-input"]
some = cu_seqlens([32, 20, 7], "cpu")
tensors = [draw(59, dim=64) for _ in range(3)]
for name in ("identity", "relu", "leaky_relu", "gelu", "silu", "hardswish"):
    inside, outside = (
        gdpa(*tensors, some, some, 32, 32, activation=name, impl="reference", **scales)
        for scales in ({"scale": 1 / 32}, {"scale": 1.0, "output_scale": 1 / 32})
    )
    difference = (inside - outside).norm() / outside.norm()
    assert difference < 1e-12 or difference > 0.5
    print(f"{name:11} the two differ by {difference:.2f} of the output")

# %% [markdown]
# They agree exactly where the activation is *positively homogeneous*, $\mathrm{act}(s x) = s\,
# \mathrm{act}(x)$ for $s > 0$. For GELU, SiLU and hard swish the outputs are more than 50 % apart:
# a small inner scale keeps the scores near zero, where these activations are almost $x/2$. A model
# trained with one convention is wrong with the other.
#
# ## Masks act after the activation
#
# A softmax kernel masks a pair by setting its score to $-\infty$. GELU and SiLU would compute
# $-\infty \cdot 0$, a NaN. So our kernels set masked pairs to zero after the activation, and after
# its derivative ({doc}`../backward/by_hand`). {doc}`../serving/own_operator` lists the masks.
#
# ## Exercises
#
# {doc}`Write it </exercises>`: `make exercise NAME=rows`.
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
# but only 38 % of the pairs ({doc}`workloads`).
# :::
#
# :::{exercise} Split the keys
# :label: ex-gdpa-split
#
# One query row, a million keys, a GPU with 132 processors ({term}`SMs <SM>`). Write GDPA so that
# each works on its own keys, and say what they exchange at the end. What would softmax add? When
# does the split pay, and where does a division by the number of keys go? *(PyTorch, ten lines)*
# :::
#
# :::{solution} ex-gdpa-split
# :class: dropdown
#
# `sum(gdpa_in_blocks(q, part) for part in parts)`: one partial output per SM, added. In fixed order
# the result repeats bit for bit. Softmax also needs each SM's maximum and sum, and rescales each
# partial output before adding it.
#
# *It pays when queries are few.* $p$ parts write $p$ partial outputs in fp32: against the keys and
# values, which are read once either way, $p$ times the queries over the keys. With many queries
# there are tiles enough for all SMs without a split. *Divide after the last sum,* by the number of
# all keys: parts that were divided by their own numbers do not add up. *Several users share a
# launch:* a part has the offsets of its user, so all parts of all users are items of one work list.
# {doc}`../serving/adds_up` does it with the library.
# :::
#
# ## Takeaways
#
# - $O = c\,\mathrm{act}(s\,QK^{\mathsf T})\,V$ has no row statistics: blocks of keys add up in any
#   order, and a row without keys is zero.
# - Self-attention, PMA and PFFN are one operator on a jagged batch.
# - Whenever you publish a GDPA kernel, state whether the scale is applied before or after the
#   activation. They are the same function only for positively homogeneous activations.
