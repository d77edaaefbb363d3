# ---
# jupyter:
#   kernelspec: {name: python3, display_name: Python 3}
# measures: false
# ---

# %% [markdown]
# # The backward from q, k, v alone
#
# What must a forward pass keep for its backward, and what does rounding a gradient once instead of
# twice gain?
#
# :::{admonition} In this chapter (25 minutes)
# You will derive the backward pass of one block, decide what it needs from forward, test it with
# gradients of any strides, and rank the roundings of a bf16 kernel. Backward needs its inputs and
# nothing else, so it moves seven tensors. Rounding once instead of twice lowers the mean error of
# dq by {glue:text}`gain:.0f` % (emulated); {glue:text}`published_gain:.0f` % are published.
# :::

# %%
import pandas as pd
import torch

import tritonemu
from _lib import block_studies, roundings, studies
from _lib.roundings import ONCE, TWICE
from gdpa_kernels.block_attention import reference
from gdpa_kernels.block_attention.kernels import v0_flash, v1_one_tile
from gdpa_kernels.block_attention.ladder import v2_slab
from gdpa_lab.report import charts, results
from gdpa_lab.report.chapter import Chapter

# %% tags=["parameters"]
mode = "replay"
device = "cpu"
data_dir = "data"

# %% tags=["remove-cell"]
chapter = Chapter("block/backward_alone", mode=mode, device=device, data_dir=data_dir)
found = roundings.study(roundings.draw(64), roundings.STUDIES, groups=16)
mean = found["mean"].unstack().loc[list(roundings.STUDIES)]
twice = mean.loc[TWICE] / mean.loc[ONCE]
published = chapter.data_dir / "published" / "block_attention_accuracy.csv"
table8 = pd.read_csv(published).set_index(["gradient", "statistic"])
of_published = (table8["fa2_jfa"] / table8["tlx_block_attention"])["dq", "mean_abs_error"]
chapter.glue(
    gain=100 * (1 - 1 / twice["dq"]), published_gain=100 * (1 - 1 / of_published),
    of_published=of_published, twice_dq=twice["dq"], twice_dk=twice["dk"],
)  # fmt: skip

# %% tags=["remove-input"]
# | name: fig-alone-roundings
# | caption: >
# |   Mean error of dq with only one rounding switched on, and with all of them, in percent of that
# |   of a fused kernel. Independent errors add as squares.
# | alt: >
# |   Horizontal bars. All roundings, twice and once: 108 and 100. The longest single one is that of
# |   q, k and v after rotary, about 80; then dS and stored, about 40 each; D is short, P zero.
chapter.figure(
    charts.bars(
        100 * mean["dq"][:7] / mean["dq"][ONCE],
        xlabel="mean error of dq, % of the fused kernel's", highlight=[TWICE, ONCE, "only rotary"],
    ),
    data=mean.reset_index(), emulated="roundings switched on in fp32, against fp64; 4,096 tokens",
)  # fmt: skip

# %% [markdown]
# ## What stays, what changes
#
# | | {doc}`FlashAttention-2 on this mask <v0_flash>` | {doc}`one tile <v1_one_tile>` |
# |:--|:--|:--|
# | kept by forward | q, k, v, the output, a log-sum-exp per row | q, k, v |
# | kernels of backward | row sums; dk and dv; dq | one |
# | P | from the log-sum-exp | from the scores of the row, as in forward |
# | $D$, one number per row | from the output, in a separate kernel | from P and dP, in place |
# | tensors moved | {glue:text}`flash_tensors:.0f` | {glue:text}`tensors:.0f` |
#
# ## The gradient of one block
#
# One block, one head: $S = s\,Q K^{\mathsf T}$, $P$ the softmax of each row of $S$, $O = P V$.
# Given $dO$,
#
# $$
# dV = P^{\mathsf T} dO, \qquad dP = dO\,V^{\mathsf T} .
# $$
#
# *Through the softmax.* Each row of $P$ depends on its own row of $S$, with
# $\partial P_{ij} / \partial S_{ik} = P_{ij} (\delta_{jk} - P_{ik})$. Summed against $dP$:
#
# $$
# dS_{ik} = P_{ik} (dP_{ik} - D_i), \qquad D_i = \sum_j P_{ij}\,dP_{ij} .
# $$ (eq-alone-softmax)
#
# *To the inputs.* $dQ = s\,dS\,K$ and $dK = s\,dS^{\mathsf T} Q$.
#
# *The row sum from the output.* Put $dP_{ij} = \sum_c dO_{ic} V_{jc}$ into $D_i$ and swap the sums:
#
# $$
# D_i = \sum_c dO_{ic} \sum_j P_{ij} V_{jc} = \sum_c dO_{ic}\,O_{ic} .
# $$ (eq-alone-delta)
#
# A kernel that loops over keys never has a whole row, so it needs the right side: it reads the
# output and computes $D$ beforehand. A kernel that holds the row in registers takes the left side.
# In fp64 both agree, and so do the gradients with autograd:

# %%
make = torch.Generator().manual_seed(2025)
scale = 32**-0.5
Q, K, V, dO = (torch.randn(64, 32, generator=make, dtype=torch.float64) for _ in range(4))

P = (scale * Q @ K.T).softmax(1)
dP = dO @ V.T
D = (P * dP).sum(1, keepdim=True)
dS = P * (dP - D)
by_hand = scale * dS @ K, scale * dS.T @ Q, P.T @ dO

leaves = [tensor.clone().requires_grad_() for tensor in (Q, K, V)]
out = (scale * leaves[0] @ leaves[1].T).softmax(1) @ leaves[2]
by_autograd = torch.autograd.grad(out, leaves, dO)
gap = max((a - b).abs().max() for a, b in zip(by_hand, by_autograd, strict=True))
print(f"gradients, by hand against autograd: {gap:.0e}")
print(f"D from P and dP against D from O:    {(D[:, 0] - (out * dO).sum(1)).abs().max():.0e}")
assert gap < 1e-12

# %% [markdown]
# *Rows beyond the end of a block* need no mask. Their Q is zero, so their P is uniform nonsense.
# But their $dO$ is zero too, so they add nothing to $dV$; their $dP$, $D$ and $dS$ vanish, so they
# add nothing to $dK$; and their $dQ$ is never stored.
#
# ## The lines that matter
#
# From v1, after the loads:

# %% tags=["remove-input"]
chapter.code(v1_one_tile.backward_kernel, "        p, total = softmax_parts")

# %% [markdown]
# Each row of each gradient is written once, by one program. There are no atomics and no sum whose
# order depends on scheduling, so every run gives the same bits. With grouped heads, $dK$ and $dV$
# are sums over a group of query heads: one program takes the whole group (`member` counts through
# it) and adds in its {term}`accumulators <accumulator>` in a fixed order.
#
# ## The transpose, not the inverse
#
# With {term}`rotary` embeddings the kernel computes attention of $R q$ and $R k$, where $R$ is
# block-diagonal with $\begin{pmatrix} c & -s \\ s & c \end{pmatrix}$ for each pair of columns. The
# gradient of $q$ is $R^{\mathsf T}$ times that of $R q$, whatever $R$ is. Only if $s^2 + c^2 = 1$
# is this also $R^{-1}$. The operator takes sin and cos as they come, as the published one does
# {cite}`adsmodelkernellibrary`. If $s^2 + c^2 \ne 1$, $R^{\mathsf T} R\,x$ is $(s^2 + c^2)\,x$:

# %%
x, y = (torch.randn(50, 3, 16, generator=make, dtype=torch.float64) for _ in range(2))
sin, cos = (torch.randn(50, 8, generator=make, dtype=torch.float64) for _ in range(2))
applied, back = reference.rotate(x, sin, cos), reference.rotate_transposed(y, sin, cos)
print(f"<R x, y> = {(applied * y).sum():.12f}")
print(f"<x, R' y> = {(x * back).sum():.12f}")
norm = (sin**2 + cos**2).repeat_interleave(2, 1)[:, None]
round_trip = reference.rotate_transposed(applied, sin, cos)
print("R' R x is x:                ", torch.allclose(round_trip, x))
print("R' R x is (sin^2 + cos^2) x:", torch.allclose(round_trip, norm * x))
assert torch.allclose(round_trip, norm * x) and not torch.allclose(round_trip, x)

# %% [markdown]
# ## Seven tensors
#
# Emulated loads and stores for one full block and one head of dimension 128, in units of q:

# %%
RUNGS = {"v0": v0_flash, "v1": v1_one_tile, "v2": v2_slab}
full_block = block_studies.batch((64,), heads=1, head_dim=128)
moved = pd.concat({name: block_studies.traffic(rung, full_block) for name, rung in RUNGS.items()})
moved = moved[moved["kernel"] != "forward_kernel"].droplevel(1).rename_axis("rung").reset_index()
total = moved.groupby("rung")[["read", "written"]].sum().sum(axis=1).round(2)
assert round(total["v2"]) == 7 and round(total["v0"]) == 13 and round(total["v1"]) == 10

# %% tags=["remove-input"]
chapter.table(moved.round(2), emulated="bytes of all loads and stores, without caches")
limits = results.ceilings(chapter.record("block/results"))
chapter.glue(
    tensors=total["v2"], flash_tensors=total["v0"],
    floor=13 / 7 * limits.gbytes_per_s(4, 3) / limits.gbytes_per_s(10, 3),
)  # fmt: skip

# %% [markdown]
# The source of v1 loads three tiles twice, because wide heads are processed in pieces. At head_dim
# 128 the compiler merges them and moves seven as well; a test counts the loads in the {term}`SASS`.
# At the measured rates of copies, moving thirteen tensors takes {glue:text}`floor:.2f` times as
# long as moving seven (modelled).
#
# ## Gradients as they come
#
# `out.sum().backward()` hands over a gradient whose strides are all 0: one number in memory. v1
# passes the strides to its kernel. v2 reads by {term}`TMA`, which cannot step by zero, so it copies
# such a gradient first. A kernel must not assume that a gradient is laid out like q:

# %%
given = block_studies.batch((70, 3))
ones = torch.ones((), dtype=torch.bfloat16).expand(given.q.shape)
for rung in (v1_one_tile, v2_slab):
    with tritonemu.enabled():
        sparse, dense = rung.backward(ones, given), rung.backward(ones.contiguous(), given)
    same = all(map(torch.equal, sparse, dense))
    print(f"{rung.__name__.split('.')[-1]:12} strides {ones.stride()}: as with a dense one: {same}")
    assert same

wrong = studies.changed(v1_one_tile, ("GRAD_STRIDES=grad_out.stride()", "GRAD_STRIDES=q.stride()"))
print(studies.findings(lambda: wrong.backward(ones, given), ("modelled",))[0].splitlines()[0])

# %% [markdown]
# On a GPU that load would most likely succeed and return whatever follows the 1 in memory.
#
# ## Is it right?
#
# v1 on ragged lengths, with grouped heads, rotary on q, k and v, and $\sin^2 + \cos^2 \ne 1$, in
# the emulator, against fp64:

# %%
ragged = block_studies.batch(
    (0, 1, 63, 64, 65, 3), heads=4, heads_k=2, rotary=torch.float32, rotate_v=True
)
checked = block_studies.comparison(v1_one_tile, ragged)

# %% tags=["remove-input"]
chapter.table(checked, emulated="bf16; allowed: twice PyTorch's error and one rounding")

# %% [markdown]
# ## What each rounding costs
#
# Between loads and stores everything is fp32, except for the operands of {term}`MMAs <MMA>`:
#
# | rounding | what is rounded | in which kernels |
# |:--|:--|:--|
# | rotary | q, k and v after rotary, before any MMA | all |
# | P, dS | before $P^{\mathsf T} dO$; before $dS\,K$ and $dS^{\mathsf T} Q$ | all |
# | D | the output, from which $D$ is computed | those that read the output |
# | stored | the gradient at the end | all |
# | stored twice | the gradient before rotary is applied to it | with a separate rotary kernel |
#
# The publication credits the last line for the better accuracy of its fused kernel
# {cite}`siso2026block`. A rounding to bf16 is a relative error of about $2^{-9}$. If storing were
# the only one, two would give $\sqrt 2 = 1.41$ times the error of one. dS should add as much as
# storing does, which leaves $\sqrt{3 / 2}$, or a little less.
#
# The model computes in fp32 and rounds where told to; a test compares it with the kernels of v0 and
# v1. Its core:

# %% tags=["remove-input"]
chapter.code(roundings.gradients, "    q, k, v = (at(")

# %% tags=["remove-input"]
dq = mean["dq"]
chapter.predict(
    "Two roundings of dq and dk cost 1.15 to 1.25 times the mean error of one (here dq).",
    twice["dq"], least=1.15, most=1.25,
)  # fmt: skip
chapter.predict(
    "dS alone gives dq an error within a factor of 1.5 of that of storing alone.",
    dq["only dS"] / dq["only stored"], least=1 / 1.5, most=1.5,
)  # fmt: skip
chapter.predict(
    "D from a rounded output changes the mean errors of dq and dk by less than 5 %.",
    100 * (mean.loc["all and D"] / mean.loc[ONCE] - 1).abs(), most=5, form=".1f", unit=" %",
)  # fmt: skip
chapter.glue(
    of_rotary=100 * (dq["only rotary"] / dq[ONCE]) ** 2,
    without=dq["no rotary before, twice"] / dq["no rotary before, once"],
    alone=dq["only stored, twice"] / dq["only stored"],
)

# %% [markdown]
# The first prediction counted two kinds of rounding and forgot the third. q, k and v are rounded
# after rotary, before the first MMA, which changes the scores and with them P. That one is
# {glue:text}`of_rotary:.0f` % of the squared error of dq, and every kernel has it, fused or not.
# Switch it off, and two roundings cost {glue:text}`without:.2f` times one, as predicted.
#
# ## Measured
#
# Mean errors of fused kernels, and of kernels with a separate rotary pass, against fp64. The ratios
# are those of the model within 2 %:

# %% tags=["remove-input"]
accuracy = chapter.recorded("accuracy", "block/results").astype({"roundings": int})
wide = accuracy.pivot(index="gradient", columns="roundings", values="mean_abs")
measured = pd.DataFrame({"rounded once": wide[1], "rounded twice": wide[2]})
measured["measured ratio"] = (wide[2] / wide[1]).round(3)
measured["emulated ratio"] = twice.round(3)
assert (measured["measured ratio"] / measured["emulated ratio"] - 1).abs().max() < 0.02
chapter.table(measured.reset_index(), measured=[chapter.record("block/results").id])

# %% [markdown]
# ## The surprise: what the published table can mean
#
# The published mean error of dq is {glue:text}`of_published:.2f` times as large with FA2 as with
# the fused kernel. That is $\sqrt 2$: the output rounded twice and *nothing else* rounded
# ({glue:text}`alone:.2f` in the model). A kernel that rounds q, k and dS cannot show that against
# an exact reference, only against one that rounds these likewise. Which was used is not published.
#
# The published *largest* error of dq halves, and that of dk stays the same. But k gets rotary as q
# does, and the second rounding costs both alike on average ({glue:text}`twice_dq:.2f` and
# {glue:text}`twice_dk:.2f`). A largest error belongs to one element, and which one is luck. Cut the
# inputs into 16 batches and divide the largest error of dq with two roundings by that with one,
# with sin and cos of angles and from N(0, 1), as the published tests draw them
# {cite}`adsmodelkernellibrary`:

# %%
four = {key: roundings.STUDIES[key] for key in (TWICE, ONCE, "all and D", "only stored")}
normal = roundings.study(roundings.draw(64, angles=False), four, groups=16)
for law, kept in (("angles", found), ("N(0, 1)", normal)):
    two, one = (pd.Series(kept["by_group"][study, "dq"]) for study in (TWICE, ONCE))
    ratio = two / one
    print(f"{law:8} {ratio.min():.2f} to {ratio.max():.2f}; {(ratio <= 1).sum()} of 16 at most 1")

# %% tags=["remove-cell"]
over = normal["mean"].unstack().div(normal["mean"].unstack().loc[ONCE])
printed = table8["tlx_block_attention"]
chapter.glue(
    normal_output=100 * (over.loc["all and D", ["dq", "dk"]].max() - 1),
    normal_twice=100 * (over.loc[TWICE, "dq"] - 1),
    printed_dq=printed["dq", "max_abs_error"], printed_dv=printed["dv", "max_abs_error"],
    normal_stored=normal["largest"]["only stored", "dq"],
)  # fmt: skip

# %% [markdown]
# The roundings they share decide it. Another difference between the two kernels has nothing to do
# with rotary: with normal sin and cos, D from a rounded output raises a mean error by up to
# {glue:text}`normal_output:.0f` %, the second rounding that of dq by
# {glue:text}`normal_twice:.0f` %.
#
# ## Exercises
#
# :::{exercise} The inverse
# :label: ex-alone-inverse
#
# A colleague applies the inverse of rotary to gradients and has a test with real angles in bf16,
# which passes. By how much is dq wrong if all sines and cosines are scaled by 1.1? Which test would
# you suggest? *(paper, five minutes)*
# :::
#
# :::{solution} ex-alone-inverse
# :class: dropdown
#
# The inverse is the transpose divided by $\sin^2 + \cos^2 = 1.21$, so dq and dk come out 1.21 times
# too small. A test needs sines and cosines with $\sin^2 + \cos^2 \ne 1$. Then $\langle R x, y
# \rangle = \langle x, R^{\mathsf T} y \rangle$ for random x and y finds the error without any
# attention.
# :::
#
# :::{exercise} Read the magnitude off the error
# :label: ex-alone-ulp
#
# bf16 has 8 bits of precision: between $2^e$ and $2^{e + 1}$ its numbers are $2^{e - 7}$ apart. If
# storing were the only error, how large must the largest element of dq have been for the published
# error of {glue:text}`printed_dq:.4f`, and that of dv for {glue:text}`printed_dv:.4f`? *(paper,
# five minutes)*
# :::
#
# :::{solution} ex-alone-ulp
# :class: dropdown
#
# Storing a number between $2^e$ and $2^{e + 1}$ costs at most $2^{e - 8}$. The first needs
# $2^{-3} = 0.125$, so an element of at least 32; the second $2^{-6} \approx 0.0156$, so at least 4.
# In the model with normal sin and cos, storing alone makes an error of
# {glue:text}`normal_stored:.2f` in dq. The published largest error may be little more than the
# output's grid.
# :::
#
# :::{exercise} What a copy of the gradient costs
# :label: ex-alone-copy
#
# v2 copies a gradient that TMA cannot read. By how much does the traffic of backward grow if the
# gradient is (a) transposed, (b) that of `out.sum()`? Change v2 so that (b) costs nothing.
# *(paper; code, half an hour)*
# :::
#
# :::{solution} ex-alone-copy
# :class: dropdown
#
# (a) One more tensor is read and written: 2/7, or 29 %, and a transposed one is not read at full
# speed. (b) Only the write counts, half of that, since the one element stays in cache. For (b) let
# a constexpr replace the load of the tile by a load of one number, broadcast.
# :::
#
# ## Takeaways
#
# - With a whole row in registers, backward needs nothing from forward but its inputs.
# - Gradients go through the transpose. Test with numbers for which that is not the inverse, and
#   with gradients whose strides are 0.
# - Before crediting one rounding, switch all of them on one by one.
