# ---
# jupyter:
#   kernelspec: {display_name: Python 3, language: python, name: python3}
# ---

# %% [markdown]
# # Refuted by arithmetic: numbers that a pencil can test
#
# Which published numbers about these operators cannot be right, and how does one see that without a
# GPU?
#
# :::{admonition} In this chapter (20 minutes)
# You will test seven published statements by multiplying counts and comparing them with each other
# and with the machine. {doc}`claims` has every claim with its answer.
# :::

# %% tags=["hide-input"]
import math

import numpy as np
import pandas as pd

from _lib import approximations as approx
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
# the *forward* chart ({numref}`fig-cross-fwd-full`), within the error of reading bars. No other
# published kernel reaches the same rate in both. So the forward series was probably drawn twice,
# and every factor over FlashAttention-4 in that chart is without a basis.
# {doc}`../backward/results` divides all pairs.
#
# ## The benchmark does not compute GELU
#
# The script draws q and k from N(0, 1) with head dimension 128 and applies no scale: a score is a
# sum of 128 products of variance 1. The kernel evaluates GELU as the degree-6 polynomial of its
# series around zero. An error of 4e-3 is visible in bf16.

# %% tags=["remove-cell"]
sigma = 128**0.5
limit = approx.within(approx.taylor6, 4e-3)
inside = math.erf(limit / sigma / math.sqrt(2))
score = approx.GRID[int(sigma * 10_000)]
off = (approx.taylor6(score) - approx.gelu(score)).abs().item()
assert inside < 0.1 and off > 1e4, "the text: few scores inside, and far off"
chapter.glue(sigma=sigma, limit=limit, inside=100 * inside, off=off)

# %% [markdown]
# The polynomial is good up to {glue:text}`limit:.2f`. Scores have a standard deviation of
# {glue:text}`sigma:.1f`, so {glue:text}`inside:.0f` % of them lie inside. At a score of
# {glue:text}`sigma:.1f` the polynomial is off by {glue:text}`off:,.0f`, where GELU is
# {glue:text}`sigma:.1f`. The rates are valid; the output is not attention with GELU. Nor is the
# scale $1/\sqrt{d}$ enough ({doc}`../operator/activations`).
#
# ## "Sparsity 0.5" is half jagged
#
# The script draws query lengths and leaves keys at the maximum.

# %% tags=["remove-cell"]
square = workload("gdpa-self-full-1024").pairs
part = {kind: 100 * workload(f"gdpa-self-half-{kind}-1024").pairs / square
        for kind in ("dense", "jagged")}  # fmt: skip
assert part["dense"] > 1.4 * part["jagged"], "the text: far more scores"
chapter.glue(**part)

# %% [markdown]
# With dense keys a half-full batch has {glue:text}`dense:.0f` % of the scores of a full one, with
# jagged keys {glue:text}`jagged:.0f` % ({doc}`../operator/workloads`).
#
# ## The log-sum-exp does not explain the backward gain
#
# Block attention gains 1.85 in the forward pass and 2.50 in the backward pass, and the text credits
# the log-sum-exp that need not be read. For 1152 sequences of 1,400 tokens and four heads it is
# 25.8 MB, beside 11.6 GB of inputs and gradients. Not reading O for a separate pass, one of eight
# tensors, saves 12.5 %.
#
# ## Budgets larger than the machine
#
# Two tables give registers per thread and warps for each stage. In the forward pass that is 32 (3 x
# 48 + 4 x 120 + 8 x 200) = 71,168 registers, in the backward pass 88,064; an SM has 65,536
# (nominal). They are requests, and a compiler may grant less. Three {term}`stages <stage>` of q, k,
# v (16 KiB each) and P (8) are the 168 KiB of the forward kernel, and fit in the 228 KiB that an SM
# has. 256 KiB is the size of *tensor* memory {cite}`nvidiaptx`, all of which the backward kernel
# takes. The pinned compiler makes kernels of 640 and 768 threads, where 480 and 640 are published:
# tasks are padded to four warps.
#
# ## Seventy percent sparse
#
# Block attention keeps 64 keys a query. The tables use "sparsity 0.7" for lengths between 0.4 and
# 1.0 of the maximum, that is, a {term}`fill`.

# %% tags=["remove-cell"]
batch = workload("block-fill70-2000")
lengths = np.array(batch.seqlens_q, dtype=float)
empty = 1 - 64 * lengths.sum() / (lengths**2).sum()
moved = batch.bytes("forward") / 0.98e-3 / 1e12  # in the published 0.98 ms
assert empty > 0.9 and 4 < moved < 8, "the text"
chapter.glue(fill=batch.fill, empty=100 * empty)

# %% [markdown]
# With that fill of {glue:text}`fill:.2f`, {glue:text}`empty:.0f` % of the scores are left out, not
# 70 %. The published time of 0.98 ms fits that fill alone ({doc}`../block/counting_bytes`).
#
# ## Exercises
#
# :::{exercise} Thirty percent of what?
# :label: ex-refuted-amdahl
#
# In the published charts both passes together gain a factor of at most
# {glue:text}`step_gain:.2f` over Triton. Training throughput is said to rise by 30 %. What share of
# a training step must attention have had? *(paper)*
# :::

# %% tags=["remove-cell"]
speed = bars.pivot(index=["workload", "direction"], columns="kernel", values="tflops")
step = sum(weight / speed.xs(way, level="direction")
           for way, weight in {"forward": 1.0, "backward": 2.5}.items())  # fmt: skip
gain = (step["triton_gdpa"] / step["cutedsl_gdpa"]).max()
chapter.glue(step_gain=gain, training_share=100 * (1 - 1 / 1.3) / (1 - 1 / gain))

# %% [markdown]
# :::{solution} ex-refuted-amdahl
# :class: dropdown
#
# The step shrinks to 1/1.3. If attention was a share $f$ of it and gained $g$, then
# $1 - f (1 - 1/g) = 1/1.3$. With $g$ = {glue:text}`step_gain:.2f` the share is
# {glue:text}`training_share:.0f` %, with a smaller gain it is larger.
# :::
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
# ## Takeaways
#
# - One shape that appears twice, two passes that must differ: compare a chart with itself first.
# - Multiply the counts, and compare with the machine.
# - A wrong description can belong to a fast kernel.
