# ---
# jupyter:
#   kernelspec: {display_name: Python 3, language: python, name: python3}
# ---

# %% [markdown]
# # Refuted by arithmetic
#
# Which published numbers about these operators cannot be right, and how does one see that without a
# GPU?
#
# :::{admonition} In this chapter (10 minutes)
# You will test {glue:text}`refuted:.0f` published statements by multiplying counts and comparing
# them with each other and with the machine. {doc}`claims` has every claim with its answer.
# :::

# %% tags=["hide-input"]
import math

import numpy as np
import pandas as pd

from _lib import approximations as approx
from _lib.ratios import spread
from gdpa_lab.measuring.workloads import workload
from gdpa_lab.report import charts, claims
from gdpa_lab.report.chapter import Chapter

# %% tags=["parameters"]
mode = "replay"
device = "cpu"
data_dir = "data"

# %% tags=["remove-cell"]
chapter = Chapter("tools/refuted", mode=mode, device=device, data_dir=data_dir)
bars = claims.published_figures(data_dir)
flash = bars[bars["kernel"] == "cutedsl_fa4"]
flash = flash.pivot(index="length", columns="figure", values="tflops")
flash = flash[["gdpa-cross-fwd-full", "gdpa-cross-bwd-full"]]
assert flash.diff(axis=1).abs().max(axis=None) <= 7.5, "two errors of reading, 5 and 2.5"
flash.columns = ["forward chart", "backward chart"]
by_pass = bars.assign(chart=bars["figure"].str.replace("-(?:fwd|bwd)", "", regex=True)).pivot(
    index=["kernel", "chart", "length"], columns="direction", values="tflops"
)
quotient = by_pass["backward"] / by_pass["forward"]
suspect = quotient.xs(("cutedsl_fa4", "gdpa-cross-full"), drop_level=False)
others = quotient.drop(suspect.index)
assert others.max() < 0.95 < suspect.min(), "the text: one pair stands out"
same_shape = bars[(bars["length"] == 256) & bars["figure"].str.contains("bwd-full")]
apart = same_shape.groupby("kernel")["tflops"].agg(lambda x: x.max() - x.min())
assert apart.idxmax() == "cutedsl_fa4" and apart.drop("cutedsl_fa4").max() < 2.5, "the solution"
assert len(apart) - 1 == 3, "the solution: three kernels"
chapter.glue(
    refuted=sum(x.status == "refuted_by_arithmetic" for x in claims.load(data_dir)),
    suspect=spread(suspect), rest=spread(others),
)  # fmt: skip
ours = bars[(bars["kernel"] == "cutedsl_gdpa") & bars["figure"].str.contains("cross")]
ours = ours.pivot(index="length", columns="direction", values="tflops")
ours = ours[["forward", "backward"]].set_axis(["forward chart", "backward chart"], axis=1)

# %% tags=["remove-input"]
# | name: fig-refuted-twice
# | caption: >
# |   **FlashAttention-4 has the same rates in two published charts, one of the forward and one of
# |   the backward pass.** Cross-attention with 256 keys. Left: FlashAttention-4. Right: the
# |   published GDPA kernel, whose backward pass is slower, as it must be.
# | alt: >
# |   Two charts of TFLOP/s over query length. On the left two lines lie on each other. On the right
# |   the line of the backward chart lies far below that of the forward chart.
panels = {"FlashAttention-4": flash, "published GDPA kernel": ours}
chapter.figure(
    charts.lines(panels, xlabel="queries", ylabel="TFLOP/s, published",
                 highlight=["backward chart"], log="x"),
    data=pd.concat(panels).reset_index(names=["kernel", "queries"]),
    published="bars of the README of ads_model_kernel_library/gdpa, NVIDIA B200",
)  # fmt: skip

# %% [markdown]
# ## A series that was plotted twice
#
# In the chart of the cross-attention *backward* pass the bars of FlashAttention-4 equal those of
# the *forward* chart, within the error of reading bars. Over the
# bars of the forward pass they are {glue:text}`suspect`, those of all other kernels and charts
# {glue:text}`rest`. So every factor over FlashAttention-4 in that chart has no basis.
#
# ## The others

# %% tags=["remove-cell"]
sigma = 128**0.5
limit = approx.within(approx.taylor6, 4e-3)
inside = math.erf(limit / sigma / math.sqrt(2))
score = approx.GRID[int(sigma * 10_000)]
off = (approx.taylor6(score) - approx.gelu(score)).abs().item()
assert inside < 0.1 and off > 1e4, "the text: few scores inside, and far off"
square = workload("gdpa-self-full-1024").pairs
part = {kind: 100 * workload(f"gdpa-self-half-{kind}-1024").pairs / square
        for kind in ("dense", "jagged")}  # fmt: skip
assert part["dense"] > 1.4 * part["jagged"], "the text: far more scores"
batch = workload("block-fill70-2000")
lengths = np.array(batch.seqlens_q, dtype=float)
empty = 1 - 64 * lengths.sum() / (lengths**2).sum()
moved = batch.bytes("forward") / 0.98e-3 / 1e12  # in the published 0.98 ms
assert empty > 0.9 and 4 < moved < 8, "the text"
assert abs(batch.fill - 0.7) < 0.01, "the text: a fill"
chapter.glue(sigma=sigma, limit=limit, inside=100 * inside, off=off, empty=100 * empty, **part)

# %% [markdown]
# The benchmark times attention with GELU
# : It applies no scale, so scores have a standard deviation of {glue:text}`sigma:.1f`. The
#   polynomial in GELU's place is good up to {glue:text}`limit:.2f`, for {glue:text}`inside:.0f` %
#   of them; at a score of {glue:text}`sigma:.1f` it is off by {glue:text}`off:,.0f`
#   ({doc}`../operator/activations`). The rates are valid, the output is not GELU's.
#
# Charts with "sparsity 0.5" show jagged self-attention
# : Keys stay at the maximum: {glue:text}`dense:.0f` % of the scores of a full batch, where jagged
#   keys leave {glue:text}`jagged:.0f` % ({doc}`../operator/workloads`).
#
# Block attention gains 2.50 backward and 1.85 forward, since the log-sum-exp need not be read
# : For 1,152 sequences of 1,400 tokens and four heads that is 25.8 MB, beside 11.6 GB. Not reading
#   O, one of eight tensors if its pass is fused, saves 12.5 % ({doc}`../block/counting_bytes`).
#
# Its tables have "sparsity 0.7"
# : 64 keys a query leave out {glue:text}`empty:.0f` % of the scores. 0.7 is a {term}`fill`, and the
#   published times fit nothing else ({doc}`../block/counting_bytes`).
#
# Its table 2 gives registers per thread and warps
# : 32 (3 × 48 + 4 × 120 + 8 × 200) = 71,168 registers; an SM has 65,536 (nominal). A compiler may
#   grant less than is asked.
#
# So does table 4, for the backward pass
# : 88,064 registers.
#
# Its kernels use 169 and 162 of 256 KB of shared memory
# : An SM has 228 KB; 256 KB is its *tensor* memory {cite}`nvidiaptx`.
#
# ## Exercises
#
# :::{exercise} A mean that does not fit
# :label: ex-refuted-mean
#
# Table 7 of block attention states 1,735,537 tokens in 1152 sequences. Which fill would that be at
# a largest length of 2000, and could it be a draw from lengths uniform on 800 to 1999? *(paper,
# {doc}`../block/counting_bytes`)*
# :::
#
# :::{solution} ex-refuted-mean
# :class: dropdown
#
# A mean of 1506.5, a fill of 0.753. Uniform on 800 to 1999 has a mean of 1399.5 and a standard
# deviation of 346; the mean of 1152 draws has one of 10.2. A mean ten of them away is no such draw.
# :::
#
# :::{exercise} A series that cannot be
# :label: ex-bwd-suspect
#
# The quotient of two passes is one check. Invent another that would also have caught the series
# plotted twice. *(paper, `data/published`)*
# :::
#
# :::{solution} ex-bwd-suspect
# :class: dropdown
#
# With 256 queries and 256 keys, cross-attention *is* full self-attention, so a kernel must have the
# same bar in both charts. Three kernels do, FlashAttention-4 does not. A check that misses it: at
# 1,024 its bar is about the same fraction of the self-attention bar as that of CUTLASS FMHA.
# Plausible is not right.
# :::
#
# ## Takeaways
#
# - One shape that appears twice, two passes that must differ: compare a chart with itself first.
# - Multiply the counts, and compare with the machine.
# - A wrong description can belong to a fast kernel.
