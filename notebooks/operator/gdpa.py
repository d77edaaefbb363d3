# ---
# jupyter:
#   kernelspec: {name: python3, display_name: Python 3}
# ---

# %% [markdown]
# # What is GDPA? Two matrix products around an activation
#
# What is left of attention when softmax is replaced by a function of one number?
#
# :::{admonition} In this chapter
# - Without softmax nothing in a row of scores depends on the rest of the row: no maximum, no sum,
#   no rescaling.
# - Self-attention, pooling by learned seeds (PMA) and a feed-forward layer whose weights are data
#   (PFFN) are the same call with different lengths.
# - Where the scale stands, inside or outside the activation, changes the function. Two published
#   conventions differ in exactly this.
# :::
#
# ## The definition
#
# A batch holds sequences of different lengths. For each sequence and each head, with queries $Q$
# (`len_q` rows of `head_dim` numbers), keys $K$ and values $V$ (`len_k` rows each), generalized
# dot-product attention {cite}`xu2026gdpa,hou2026kunlun` computes
#
# $$
# S = s\, Q K^{\mathsf T}, \qquad P = \mathrm{act}(S), \qquad O = c\, P V .
# $$ (eq-gdpa)
#
# The activation acts on each score alone: GELU, SiLU, ReLU and others of the
# {doc}`next chapter <activations>`. The number $s$ is called `scale`, $c$ is called
# `output_scale`, and a pair of query and key that a mask removes contributes exactly zero to $O$.
# The activation may be one for all heads or one per head, and several heads of queries may share a
# head of keys and values {cite}`shazeer2019mqa,ainslie2023gqa`. That is the whole operator. In
# Python it is one function; `impl="reference"` asks for its definition in PyTorch, which may run
# in double precision.

# %% tags=["hide-input"]
import textwrap
from collections.abc import Sequence

import pandas as pd
import torch
import torch.nn.functional as F
from IPython.display import display
from matplotlib.patches import Rectangle
from torch.testing import assert_close

from gdpa_kernels import emulator, gdpa
from gdpa_kernels.gdpa import reference
from gdpa_kernels.measuring import testing
from gdpa_kernels.measuring.inputs import cu_seqlens
from gdpa_kernels.report import figures
from gdpa_kernels.report.house import INK, RUNG_COLOURS

# %% tags=["parameters"]
mode = "replay"
device = "cpu"
data_dir = "data"

# %%
torch.manual_seed(0)


def draw(rows: int, heads: int = 2, dim: int = 8) -> torch.Tensor:
    """Standard normal numbers, [rows, heads, dim], in fp64."""
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
# `[total_tokens, num_heads, head_dim]`. The int32 tensor `cu_seqlens` has one entry more than
# there are sequences: sequence $i$ owns the rows from `cu_seqlens[i]` up to, not including,
# `cu_seqlens[i + 1]`. A sequence of length zero is two equal entries and nothing else
# ({numref}`fig-gdpa-jagged`). This is the layout in which recommendation models keep user
# histories {cite}`xu2024jagged`.

# %% tags=["remove-input"]
# | name: fig-gdpa-jagged
# | caption: >
# |   The batch of the code above. Top: the ten rows that exist, as they lie in memory, with
# |   cu_seqlens below them. Bottom: the same batch padded to its longest sequence; the empty cells
# |   would be read, multiplied and written for nothing.
# | alt: >
# |   Ten coloured cells in one line: three of sequence 0, five of sequence 2, two of sequence 3,
# |   with the offsets 0, 3, 3, 8 and 10 under their borders. Below, a grid of four rows and five
# |   columns in which only ten of the twenty cells are coloured.
COLOURS = [RUNG_COLOURS[i] for i in (1, 0, 3, 2)]


def cell(axis, x: float, y: float, colour: str | None, text: str = "") -> None:
    box = {"facecolor": colour} if colour else {"facecolor": "none"}
    axis.add_patch(Rectangle((x, y), 1, 1, edgecolor=INK, linewidth=0.8, **box))
    axis.text(x + 0.5, y + 0.5, text, ha="center", va="center", fontsize=8.5, color="#000000")


with figures.style():
    figure, axis = figures.subplots(width=7.2, height=3.9)
    starts = offsets.tolist()
    for i, length in enumerate(lengths):
        for t in range(length):
            cell(axis, starts[i] + t, 6.2, COLOURS[i], f"{t}")
            cell(axis, t, 3.0 - i, COLOURS[i], f"{t}")
        for t in range(length, max(lengths)):
            cell(axis, t, 3.0 - i, None)
        axis.text(5.3, 3.5 - i, f"sequence {i}, {length} tokens", va="center")
    for start in sorted(set(starts)):
        entries = [i for i, value in enumerate(starts) if value == start]
        axis.text(start, 6.0, f"{start}", ha="center", va="top")
        names = ", ".join(f"[{i}]" for i in entries)
        axis.text(start, 5.4, names, ha="center", va="top", fontsize=8)
    axis.text(10.5, 5.95, "cu_seqlens", va="top")
    axis.text(10.5, 6.7, "rows in memory", va="center")
    axis.set_xlim(-0.4, 13.2)
    axis.set_ylim(-0.2, 7.4)
    axis.set_axis_off()
display(figure)

# %% tags=["remove-input"]
figures.source("modelled", "drawn from the lengths 3, 0, 5 and 2 of the code above.")

# %% [markdown]
# ## From softmax to an activation
#
# Softmax attention {cite}`vaswani2017attention` divides each exponential by the sum over its row.
# A kernel that sees one block of keys at a time cannot know that sum, nor the maximum that keeps
# the exponential finite, until the last block. It carries both along and corrects what it has
# accumulated whenever the maximum rises {cite}`milakov2018online,dao2022flashattention`. With an
# element-wise activation a block of keys is finished as soon as it is multiplied:


# %%
Blocks = Sequence[tuple[torch.Tensor, torch.Tensor]]


def gdpa_in_blocks(q: torch.Tensor, blocks: Blocks) -> torch.Tensor:
    """GDPA of one head over blocks of (keys, values)."""
    out = torch.zeros_like(q)
    for k, v in blocks:
        out += F.gelu(q @ k.T) @ v
    return out


def softmax_in_blocks(q: torch.Tensor, blocks: Blocks) -> torch.Tensor:
    """Softmax attention of one head over blocks of (keys, values)."""
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
gelu_once = F.gelu(one @ keys.T) @ values
softmax_once = (one @ keys.T).softmax(1) @ values
for order in ([0, 1, 2, 3], [2, 0, 3, 1]):
    shuffled = [blocks[i] for i in order]
    assert_close(gdpa_in_blocks(one, shuffled), gelu_once)
    assert_close(softmax_in_blocks(one, shuffled), softmax_once)

# %% [markdown]
# :::{list-table} What disappears, and what stays
# :header-rows: 1
# :name: tab-gdpa-softmax
#
# * -
#   - softmax attention
#   - GDPA
# * - two matrix products, `4 * head_dim` FLOPs per pair
#   - yes
#   - yes
# * - scores kept on the chip, never in memory
#   - yes
#   - yes
# * - one non-linear function per score
#   - exponential
#   - activation
# * - running maximum of a row, reduced across threads
#   - yes
#   - no
# * - running sum of a row, reduced across threads
#   - yes
#   - no
# * - rescaling of the accumulator, division at the end
#   - yes
#   - no
# * - row statistics written for the backward pass (log-sum-exp, row sum of $dO \odot O$)
#   - yes
#   - no
# * - blocks of keys on different processors
#   - need their statistics to be merged
#   - add up
# * - a query without keys
#   - 0/0
#   - 0
# :::
#
# The rescaling is what the warps between the two products do in a softmax kernel; the published
# GDPA kernel deleted a whole stage of four warps with it {cite}`meta2026gem`. Something is lost as
# well. A softmax row is an average of values, whatever the number of keys; a GDPA row is a sum,
# and it grows with the number of keys unless a scale prevents it. We come back to that scale
# below.
#
# ## One operator, three uses
#
# What changes from one use to the next is where the rows of $Q$ and of $K$, $V$ come from, and so
# the shape of the scores ({numref}`fig-gdpa-uses`).

# %% tags=["remove-input"]
# | name: fig-gdpa-uses
# | caption: >
# |   The score matrices of one batch, three sequences of 6, 2 and 9 tokens. Rows are queries,
# |   columns are keys. Self-attention is square and of a different size for each sequence; PMA has
# |   as many rows as there are seeds; PFFN has as many columns as the hidden layer is wide.
# | alt: >
# |   Three panels. Self-attention: squares of side 6, 2 and 9. PMA: rectangles of height 4 and
# |   widths 6, 2 and 9. PFFN: rectangles of width 4 and heights 6, 2 and 9.
SIZES = (6, 2, 9)
USES = {
    "self-attention": [(n, n) for n in SIZES],
    "PMA, 4 seeds": [(4, n) for n in SIZES],
    "PFFN, width 4": [(n, 4) for n in SIZES],
}
with figures.style():
    figure, axes = figures.subplots(1, 3, width=8.4, height=3.3)
    for axis, (title, shapes) in zip(axes, USES.items(), strict=True):
        x = 0.0
        for i, (rows, columns) in enumerate(shapes):
            axis.add_patch(
                Rectangle(
                    (x, -rows), columns, rows, facecolor=COLOURS[(0, 2, 3)[i]], 
                    edgecolor=INK, linewidth=0.8,
                )
            )  # fmt: skip
            axis.text(x + columns / 2, 0.35, f"{columns}", ha="center", va="bottom", fontsize=8.5)
            axis.text(x - 0.25, -rows / 2, f"{rows}", ha="right", va="center", fontsize=8.5)
            x += columns + 2.0
        axis.set_title(title)
        axis.set_xlim(-1.2, 21.5)
        axis.set_ylim(-9.5, 1.8)
        axis.set_aspect("equal")
        axis.set_axis_off()
display(figure)

# %% tags=["remove-input"]
figures.source("modelled", "drawn from the lengths in the caption.")

# %% [markdown]
# **Self-attention.** All three tensors are projections of the same tokens, and `cu_seqlens_q` is
# `cu_seqlens_k`. That was the first cell.
#
# **PMA**, pooling by multi-head attention {cite}`lee2019settransformer`, summarises a history of
# any length in a fixed number of rows. The original is a softmax; GDPA keeps its shape. The
# queries are learned *seeds*, the same for every sample. A batch of $B$ samples does not need $B$
# copies of them: `q` holds the seeds once, `cu_seqlens_q=None` says so, and the output has $B$
# times as many rows.

# %%
seeds = draw(4)
pooled = gdpa(seeds, k, v, None, offsets, 4, 5, impl="reference")

copies = seeds.repeat(len(lengths), 1, 1)
fours = cu_seqlens([4] * len(lengths), "cpu")
same = gdpa(copies, k, v, fours, offsets, 4, 5, impl="reference")
assert_close(pooled, same)
assert (pooled[4:8] == 0).all()  # sequence 1 has no tokens
print(f"{list(seeds.shape)} -> {list(pooled.shape)}")

# %% [markdown]
# **PFFN**, the personalised feed-forward network of InterFormer {cite}`zeng2024interformer` and
# Kunlun {cite}`hou2026kunlun`, sends every token of a sample through a two-layer perceptron whose
# weights belong to that sample: they are computed from its context features, which are not a
# sequence. Read {eq}`eq-gdpa` with that in mind. $Q$ holds the tokens, $K^{\mathsf T}$ is the
# first layer's weight matrix $W_1$ (`head_dim` to `len_k`), the activation is the activation, and
# $V$ is the second layer's $W_2$ (`len_k` to `head_dim`). The number of keys is the width of the
# hidden layer.

# %%
width = 6
layers = cu_seqlens([width] * len(lengths), "cpu")
first, second = draw(24), draw(24)  # computed from the context
out = gdpa(
    q, first, second, offsets, layers, 5, width,
    scale=1.0, impl="reference",
)  # fmt: skip

sample = slice(2 * width, 3 * width)
w1, w2 = first[sample, 0].T, second[sample, 0]
perceptron = F.gelu(q[3:8, 0] @ w1, approximate="tanh") @ w2
assert_close(out[3:8, 0], perceptron)
print(f"W1 {list(w1.shape)}, W2 {list(w2.shape)}: sample 2, head 0")

# %% [markdown]
# One kernel therefore serves three modules of a model, with very different shapes: square and
# ragged, a few rows against long histories, or long histories against a few hundred keys. The
# {doc}`workloads <workloads>` of this book are chosen to cover them.
#
# ### The same call on a kernel
#
# `impl` names an implementation. The rungs `v1` and above are GPU kernels; inside
# `emulator.enabled()` the same source runs on the CPU, program by program, and every access is
# checked. Its result is compared with double precision, and the error it may make is derived, not
# chosen: twice what PyTorch makes in the same type, plus one rounding
# ({doc}`../measuring/protocol`).

# %%
half = [draw(10, dim=16).bfloat16() for _ in range(3)]
where = (offsets, offsets, 5, 5)
exact = gdpa(*(t.double() for t in half), *where, impl="reference")
pytorch = gdpa(*half, *where, impl="reference")
with emulator.enabled():
    kernel = gdpa(*half, *where, impl="v1_tiled")

verdict = testing.compare(
    name="out", actual=kernel, expected=exact, baseline=pytorch
)  # fmt: skip
assert verdict.passed
print(f"emulated v1_tiled\n{verdict}")

# %% [markdown]
# ## Without the activation it would be linear algebra
#
# Take the identity as activation and set both scales to one. Then the parentheses move:
#
# $$
# (Q K^{\mathsf T})\, V = Q\, (K^{\mathsf T} V).
# $$ (eq-gdpa-identity)
#
# The right-hand side multiplies each token by one `head_dim` × `head_dim` matrix per sample and
# head, of rank at most `len_k`. This is InterFormer's original PFFN: a matrix computed from the
# context, applied to each token {cite}`zeng2024interformer`. Nothing in it has the size of the
# score matrix.

# %%
linear = gdpa(
    q, k, v, offsets, offsets, 5, 5,
    activation="identity", scale=1.0, impl="reference",
)  # fmt: skip
per_sample = k[8:10, 0].T @ v[8:10, 0]  # sequence 3: two tokens
assert_close(linear[8:10, 0], q[8:10, 0] @ per_sample)

scores = draw(64)[:, 0] @ draw(64)[:, 0].T
rank = {
    "K^T V of two keys": torch.linalg.matrix_rank(per_sample).item(),
    "scores": torch.linalg.matrix_rank(scores).item(),
    "gelu(scores)": torch.linalg.matrix_rank(F.gelu(scores)).item(),
}
print(rank)

# %% tags=["remove-cell"]
assert rank == {"K^T V of two keys": 2, "scores": 8, "gelu(scores)": 64}
LEN_Q, LEN_K, HEAD_DIM = 1000, 256, 128
left = 4 * LEN_Q * LEN_K * HEAD_DIM
right = 2 * LEN_K * HEAD_DIM**2 + 2 * LEN_Q * HEAD_DIM**2
figures.glue_number("identity_left_mflop", left / 1e6)
figures.glue_number("identity_right_mflop", right / 1e6)
figures.glue_number("identity_ratio", left / right)
figures.glue_number("rank_scores", rank["scores"])
figures.glue_number("rank_gelu", rank["gelu(scores)"])

# %% [markdown]
# For 1000 tokens, 256 keys and head_dim 128 the left-hand side costs
# {glue:text}`identity_left_mflop:.0f` MFLOP, the right-hand side
# {glue:text}`identity_right_mflop:.0f` MFLOP, {glue:text}`identity_ratio:.1f` times fewer, and for
# longer sequences the gap widens. The activation forbids this shortcut: it is the reason why the
# scores must be formed one by one, and why this book has kernels to write. It also buys something.
# In the cell above, 64 × 64 scores of head_dim 8 have rank {glue:text}`rank_scores:.0f`; after
# GELU the matrix has rank {glue:text}`rank_gelu:.0f`.
#
# ## Two scales, and where they stand
#
# Softmax attention has one convention, $1/\sqrt{\mathtt{head\_dim}}$ in front of $QK^{\mathsf T}$.
# GDPA has at least two, and they disagree about the side of the activation:
#
# - **Inside.** Kunlun divides the scores by the largest sequence length before the activation
#   {cite}`hou2026kunlun`, so public summaries of the paper say. In {eq}`eq-gdpa` that is
#   $s = 1/\mathtt{max\_seqlen}$, $c = 1$.
# - **Outside.** The published Triton kernel has an argument `qk_scale`, by default 1, that
#   multiplies the *activated* scores: $s = 1$, $c = \mathtt{qk\_scale}$. HSTU, a relative with
#   SiLU, also divides by the largest length outside {cite}`zhai2024hstu,generativerecommenders`.
#
# The published kernel for Blackwell accepts a `softmax_scale`, stores it, and never reads it; the
# benchmark passes 1 to its Triton counterpart, so that the two agree there
# {cite}`adsmodelkernellibrary`. In this book `scale` and `output_scale` are separate arguments.
# `scale` defaults to $1/\sqrt{\mathtt{head\_dim}}$, which keeps the scores of standard normal
# inputs at a standard deviation of one.
#
# Does the side matter? The cell computes both with the same factor, for each activation, and takes
# the relative difference of the outputs.

# %%
FACTOR = 1 / 32
some = cu_seqlens([32, 20, 7], "cpu")
tensors = [draw(59, dim=64) for _ in range(3)]


def output(name: str, **scales: float) -> torch.Tensor:
    """The output of one activation with the given scales."""
    return gdpa(
        *tensors, some, some, 32, 32,
        activation=name, impl="reference", **scales,
    )  # fmt: skip


difference = {}
for name in reference.ACTIVATIONS:
    inside = output(name, scale=FACTOR, output_scale=1.0)
    outside = output(name, scale=1.0, output_scale=FACTOR)
    error = (inside - outside).norm() / outside.norm()
    difference[name] = error.item()

# %% tags=["remove-input"]
same_function = {name for name, value in difference.items() if value < 1e-12}
assert same_function == {"identity", "relu", "leaky_relu"}, (
    f"positively homogeneous: {same_function}"
)
squared = output("relu_squared", scale=FACTOR) - output(
    "relu_squared", scale=1.0, output_scale=FACTOR**2
)
assert squared.abs().max() < 1e-12
smooth = {name: difference[name] for name in ("gelu", "gelu_tanh", "silu", "hardswish")}
figures.glue_number("scale_side_least_percent", 100 * min(smooth.values()))
figures.glue_number("scale_side_most_percent", 100 * max(smooth.values()))
figures.show_table(
    pd.DataFrame(
        {
            "activation": list(difference),
            "relative difference": [f"{value:.2f}" for value in difference.values()],
            "same function": ["yes" if name in same_function else "no" for name in difference],
        }
    )
)

# %% [markdown]
# The two agree exactly for the activations that are *positively homogeneous*,
# $\mathrm{act}(s x) = s\, \mathrm{act}(x)$ for $s > 0$: identity, ReLU, leaky ReLU. Squared ReLU
# is homogeneous of degree two, and agrees if the outer factor is squared. For GELU, SiLU and hard
# swish the outputs differ by {glue:text}`scale_side_least_percent:.0f` to
# {glue:text}`scale_side_most_percent:.0f` percent here: not a rounding matter but another
# function, because a small inner scale keeps the scores near zero, where these activations are
# almost $x/2$. A model trained with one convention does not run with the other.
#
# ## Masks act after the activation
#
# A softmax kernel removes a pair by setting its score to $-\infty$. Here that is wrong: the
# activation of $-\infty$ is zero for ReLU, and for most others it is not a number.

# %%
removed = torch.tensor(-torch.inf, dtype=torch.float64)
zero = torch.zeros((), dtype=torch.float64)
table = pd.DataFrame(
    {
        "activation": activation.name,
        "act(-inf)": activation.function(removed).item(),
        "act(0)": activation.function(zero).item(),
        "act'(0)": activation.derivative(zero).item(),
    }
    for activation in reference.ACTIVATIONS.values()
)

# %% tags=["remove-cell"]
assert (table["act(0)"] == 0).all()
assert (table["act'(0)"] != 0).sum() > len(table) / 2
assert table["act(-inf)"].isna().sum() > len(table) / 2

# %% tags=["remove-input"]
figures.show_table(table.assign(**{"act(-inf)": [f"{x:.0f}" for x in table["act(-inf)"]]}))

# %% [markdown]
# Setting the score to zero works in the forward pass, since all these activations vanish there. It
# fails in the backward pass, where most derivatives at zero do not. So the rule in all our kernels
# is: compute the activation, then set what is masked to zero, and do the same with the derivative.
# Positions of queries and keys are counted from the start of their own sequence; `causal=True`
# keeps keys at or before the query, `window=W` keeps keys at most `W` positions away.

# %%
masked = gdpa(
    q, k, v, offsets, offsets, 5, 5,
    causal=True, window=1, impl="reference",
)  # fmt: skip
visible = reference.visible(5, 5, causal=True, window=1)
print(visible.int())
assert_close(masked[3:8, 0], p * visible @ v[3:8, 0])

# %% [markdown]
# ## What it refuses
#
# The published kernels accept arguments and ignore them: a scale that is not read, or a name of an
# activation that quietly becomes GELU {cite}`adsmodelkernellibrary`. An operator that is easy to
# call wrongly should complain early, with the name of the argument, what was expected and what it
# got.


# %%
def refused(**changes: object) -> str:
    """What the first call raises with some arguments changed."""
    arguments = {
        "q": q, "k": k, "v": v,
        "cu_seqlens_q": offsets, "cu_seqlens_k": offsets,
        "max_seqlen_q": 5, "max_seqlen_k": 5,
    }  # fmt: skip
    try:
        gdpa(**(arguments | changes))
    except (TypeError, ValueError, NotImplementedError) as error:
        return f"{type(error).__name__}: {error}"
    raise AssertionError(f"{changes} must be refused")


messages = [
    refused(activation="swish"),
    refused(k=k.float()),
    refused(k=draw(10, heads=3), v=draw(10, heads=3)),
    refused(cu_seqlens_k=offsets + 1),
    refused(max_seqlen_k=4),
    refused(cu_seqlens_q=None),
    refused(window=-1),
    refused(impl="v2_tma"),
]
print("\n\n".join(textwrap.fill(text, 72) for text in messages))

# %% [markdown]
# The last one matters most for measurements: an implementation that is asked for by name never
# hands the work to another one.
#
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
# but only 38 percent of the pairs; chapter {doc}`workloads` has the general formula.
# :::
#
# :::{exercise} Split the keys
# :label: ex-gdpa-split
#
# One query row, a million keys, 132 processors. Write GDPA so that each processor works on its own
# keys, and say what the processors exchange at the end. What would softmax add? *(ten lines of
# PyTorch)*
# :::
#
# :::{solution} ex-gdpa-split
# :class: dropdown
#
# `sum(gdpa_in_blocks(q, part) for part in parts)`: one partial output per processor, added. In
# fp32 and in a fixed order the result is also the same from run to run. Softmax needs each
# processor's maximum and sum too, and each partial output must be rescaled before it is added.
# :::
#
# :::{exercise} A feed-forward layer with a bias
# :label: ex-gdpa-bias
#
# A perceptron usually has a bias in its first layer: $\mathrm{act}(Q W_1 + b)\, W_2$, with $b$ of
# length `len_k`, one per sample. Obtain it from `gdpa` without changing the kernel. What does it
# cost? *(open)*
# :::
#
# :::{solution} ex-gdpa-bias
# :class: dropdown
#
# Append a column of ones to $Q$ and the column $b$ to $K$; append a zero column to $V$ and drop
# the last column of the output. The head_dim grows by one, and since TMA copies and matrix
# instructions want multiples of 8 or 16, in fact by 8: about 6 percent more bytes at head_dim 128,
# and a kernel that pads head_dim to a power of two would pay twice. A bias inside the kernel would
# be cheaper: one vector of `len_k` numbers per sample.
# :::
#
# ## Takeaways
#
# :::{admonition} Three things to remember
# :class: tip
#
# 1. $O = c\,\mathrm{act}(s\,QK^{\mathsf T})\,V$. No row statistics: blocks of keys add up in any
#    order, and an empty row is zero.
# 2. Self-attention, PMA and PFFN are one operator on a jagged batch; only lengths and the origin
#    of $Q$ differ.
# 3. Say where the scale stands. Inside and outside are the same function only for positively
#    homogeneous activations.
# :::
