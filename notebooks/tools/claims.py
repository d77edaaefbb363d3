# ---
# jupyter:
#   kernelspec: {name: python3, display_name: Python 3}
# ---

# %% [markdown]
# # The claims, one by one
#
# Which published statements about these operators hold, and on which machine?
#
# :::{admonition} In this chapter (20 minutes)
# You will look up any published claim with our answer, and refute some by arithmetic. Of
# {glue:text}`total:.0f` claims {glue:text}`measured:.0f` are measured, {glue:text}`answered:.0f`
# answered by a chapter, {glue:text}`refuted:.0f` refuted, {glue:text}`comparable:.0f` not
# comparable and {glue:text}`open:.0f` open. Our gains are smaller than the published ones forward
# and mostly larger backward.
# :::

# %%
import math

import numpy as np
from IPython.display import Markdown, display

from _lib import answers
from _lib import approximations as approx
from gdpa_lab.measuring.workloads import FIGURES, workload
from gdpa_lab.report import charts, claims, page, results
from gdpa_lab.report.chapter import Chapter
from gdpa_lab.report.house import RUNG_COLOURS, is_rung

# %% tags=["parameters"]
mode = "replay"
device = "cpu"
data_dir = "data"

# %% tags=["remove-cell"]
chapter = Chapter("tools/claims", mode=mode, device=device, data_dir=data_dir)
every = results.table(data_dir, gpu=chapter.gpu, latest=False)
judged = claims.judged(every, claims=claims.load(data_dir))
shown = answers.answered(judged, answers.numbers(chapter))
records = sorted({x for ids in judged["ours_record"] for x in ids.split(", ") if x})

# %% tags=["remove-input"]
# | name: fig-claims-ratios
# | caption: >
# |   Our largest ratio over the published one, for each series of the six charts. Right of the
# |   dashed line ours is larger. Theirs are from a B200, ours from an H200.
# | alt: >
# |   A dot plot with a row for each chart. Forward all marks lie left of the dashed line, backward
# |   nearly all right of it.
ratios = answers.plotted(judged, "ratio").astype(float)
chapter.figure(
    charts.dots(
        ratios, xlabel="our quotient / published quotient", log=True, colours=RUNG_COLOURS[1:4]
    ),
    data=answers.told(judged, shown), measured=records,
)  # fmt: skip

# %% [markdown]
# ## How a claim gets its status
#
# `data/claims.yml` holds each claim with its value, hardware and source. Where records can answer,
# it has a *selector* of rows, evaluated when this page is built.
#
# measured
# : A selector found correct times on one machine, back to back like the published loops. *Stale*:
#   a kernel changed since.
#
# answered
# : A statement about mathematics, design or causes that a chapter decides.
#
# refuted
# : The published numbers contradict each other or the counts of the workload.
#
# not comparable, open
# : No measurement here can decide it, or none has yet. The last column says what is missing.
#
# A measured claim is not a confirmed one: three baselines are stand-ins. `v1_tiled`, or
# `v1_tiled_backward` with seven matmuls, stands for the published Triton kernel, of which there is
# no record yet; cuDNN for CUTLASS FMHA on Blackwell; the path for Hopper of
# flash-attn-4 4.0.0b36 for FlashAttention-4. The last two compute softmax and are compared on time
# alone.
#
# ## The charts and tables
#
# Published → measured, the largest ratio and rate of each series of the six charts; below, tables 5
# and 6 of block attention, over FlashAttention-2:

# %% tags=["remove-input", "full-width"]
display(page.show_table(answers.plotted(judged).rename_axis("chart").reset_index()))
chapter.table(answers.tabulated(judged).reset_index(), measured=records, published="table 5 and 6")

# %% tags=["remove-cell"]
us = chapter.times("forward/results", scope="sustained", direction="forward")
best = us.filter(regex="^v[1-9]").min(axis=1)
half = [name for name in FIGURES["gdpa-self-fwd-half"] if "dense" in name]
peers = (us[us.columns[~us.columns.map(is_rung)]].min(axis=1) / best)[half]
cross = us.div(best, axis=0).loc[[*FIGURES["gdpa-cross-fwd-full"]]]
forward = ratios.index.str.contains("forward")
assert not (ratios[forward] >= 1).any(axis=None), "forward: smaller"
assert (ratios[~forward] > 1).sum(axis=None) >= 6, "backward: larger"
counts = shown["status"].value_counts()
rest = judged[judged["id"].map(answers.in_tables)]["status"].value_counts()
rest.index = rest.index.str.replace("_by_arithmetic", "").str.replace("_", " ")
for status in ("measured", "answered", "refuted", "not comparable", "open"):
    chapter.glue(**{status.split()[-1]: counts.get(status, 0) + rest.get(status, 0)})
for name, values in {"peers": peers, "dense": cross["cudnn"], "fa4": cross["fa4"]}.items():
    chapter.glue(**{f"{name}_least": values.min(), f"{name}_most": values.max()})
chapter.glue(total=len(judged))

# %% [markdown]
# **A maximum finds the weakest peer.** On half-full batches FMHA's stand-in, the ragged cuDNN, is
# slower to call than to run, so no ratio over it says anything. Over the best peer at each length
# we are {glue:text}`peers_least:.2f` to {glue:text}`peers_most:.2f` times as fast: remember those.
#
# **FlashAttention-4 is not the strong peer here.** With 256 keys we are {glue:text}`fa4_least:.2f`
# to {glue:text}`fa4_most:.2f` times as fast as its path for Hopper, and
# {glue:text}`dense_least:.2f` to {glue:text}`dense_most:.2f` times as fast as cuDNN: quote that.
#
# ## The other claims

# %% tags=["remove-input", "full-width", "ledger"]
order = ["measured", "answered", "refuted", "not comparable", "open"]
listed = shown.sort_values("status", key=lambda x: x.map(order.index), kind="stable")
listed["where"] = listed["where"].str.replace(r"^missing: ([^,]*).*", r"\1", regex=True)
listed = listed.groupby(["status", "ours", "where"], sort=False)["claim"].agg("<br>".join)
letters = "; ".join(f"{x} {{cite}}`{key}`" for key, x in answers.sources(judged).items())
chapter.table(
    listed.reset_index()[["status", "claim", "ours", "where"]],
    data=shown.rename(columns={"where": "where or what is missing"}).merge(
        judged[["id", "published", "unit", "hardware", "source", "note"]]
    ),
    measured=records, published="by the sources below",
)  # fmt: skip
display(Markdown(f"Sources: {letters}. The CSV has ids and all that is missing."))

# %% [markdown]
# ## Refuted by arithmetic
#
# Most of these are slips in describing kernels that are as fast as claimed.
#
# ### The benchmark does not compute GELU
#
# The script draws q and k from N(0, 1) with head dimension 128 and applies no scale: a score is a
# sum of 128 products of variance 1. The kernel evaluates GELU as the degree-6 polynomial of its
# series around zero. An error of 4e-3 is visible in bf16:

# %%
sigma = 128**0.5
limit = approx.within(approx.taylor6, 4e-3)
inside = math.erf(limit / sigma / math.sqrt(2))
at = approx.GRID[int(sigma * 10_000)]
off = (approx.taylor6(at) - approx.gelu(at)).abs().item()
print(f"good up to {limit:.2f}; standard deviation {sigma:.1f}, {100 * inside:.0f} % inside,")
print(f"at one deviation off by {off:,.0f}")
assert inside < 0.1 and off > 1e4

# %% [markdown]
# What was timed is a polynomial between two matmuls. The rates are valid, since a polynomial costs
# the same everywhere; the output is not attention with GELU. Nor is the scale $1/\sqrt{d}$ enough
# ({doc}`../operator/activations`).
#
# ### "Sparsity 0.5" is half jagged
#
# In self-attention on a {term}`jagged` batch a sequence of $l$ tokens has $l^2$ scores. The script
# draws query lengths and leaves keys at the maximum:

# %%
square = workload("gdpa-self-full-1024").pairs
for kind in ("dense", "jagged"):
    print(kind, f"{workload(f'gdpa-self-half-{kind}-1024').pairs / square:.3f} of a full batch")

# %% [markdown]
# With dense keys all tiles cost the same: the hard part of a jagged batch is absent too
# ({doc}`../operator/workloads`).
#
# ### A series that was plotted twice
#
# In the chart of the cross-attention *backward* pass the bars of FlashAttention-4 equal those of
# the *forward* chart ({numref}`fig-cross-fwd-full`), within the error of reading bars:

# %% tags=["remove-input"]
bars = claims.published_figures(data_dir)
flash = bars[bars["kernel"] == "cutedsl_fa4"]
flash = flash.pivot(index="length", columns="figure", values="tflops")
flash = flash[["gdpa-cross-fwd-full", "gdpa-cross-bwd-full"]]
print(flash.to_string())
assert flash.diff(axis=1).abs().max(axis=None) <= 7.5, "two errors of reading, 5 and 2.5"

# %% [markdown]
# An exercise of {doc}`../backward/results` asks for a second check.
#
# ### The log-sum-exp does not explain the backward gain
#
# Block attention gains 1.85 forward and 2.50 backward. For 1152 sequences of 1,400 tokens and four
# heads the log-sum-exp is 25.8 MB beside 11.6 GB of inputs and gradients. Not reading O for a
# separate pass, one of eight tensors, saves 12.5 %.
#
# ### Budgets larger than the machine
#
# Two tables give registers per thread and warps for each stage. Forward that is 32 (3 x 48 + 4 x
# 120 + 8 x 200) = 71,168 registers, backward 88,064; an SM has 65,536 (nominal). They are requests;
# a compiler may grant less. Three stages of q, k, v (16 KiB each) and P (8) are the 168 KiB of the
# forward kernel, and fit in the 228 KiB that an SM has. 256 KiB is the size of *tensor* memory
# {cite}`nvidiaptx`, all of which the backward kernel takes. The pinned compiler, fbtriton 3.6.1,
# refuses the source, for it gives the default task a register budget. Without that argument 3.6.1
# and 3.7.4 make kernels of 640 and 768 threads, where 480 and 640 are published: tasks are padded
# to four warps.
#
# ### Seventy percent sparse
#
# Block attention keeps 64 keys a query. The tables use "sparsity 0.7" for lengths between 0.4 and
# 1.0 of the maximum, that is, a *fill*:

# %%
batch = workload("block-fill70-2000")
lengths = np.array(batch.seqlens_q, dtype=float)
empty = 1 - 64 * lengths.sum() / (lengths**2).sum()
moved = batch.bytes("forward") / 0.98e-3 / 1e12  # in the published 0.98 ms
print(f"fill {batch.fill:.2f}, {100 * empty:.0f} % of the scores left out")
print(f"{moved:.1f} TB/s; were 70 % of the tokens missing, {0.3 / batch.fill * moved:.1f} TB/s")
assert empty > 0.9

# %% [markdown]
# Only the fill makes it the memory-bound kernel that was published
# ({doc}`../block/counting_bytes`).
#
# ## Exercises
#
# :::{exercise} Thirty percent of what?
# :label: ex-claims-amdahl
#
# In the published charts forward and backward together gain a factor of at most
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
# :::{solution} ex-claims-amdahl
# :class: dropdown
#
# The step shrinks to 1/1.3. If attention was a share $f$ of it and gained $g$, then
# $1 - f (1 - 1/g) = 1/1.3$. With $g$ = {glue:text}`step_gain:.2f` the share is
# {glue:text}`training_share:.0f` %, with a smaller gain it is larger.
# :::
#
# :::{exercise} Close an open claim
# :label: ex-claims-selector
#
# Which rows of a record would answer the claim `gdpa-eleven-activations`, which of them exist, and
# why is a selector of the kind `best_rate` not enough? *(reading `claims.py`)*
# :::
#
# :::{solution} ex-claims-selector
# :class: dropdown
#
# One correct row per activation; the records hold rows with GELU only. The claim is a count of
# correct rows, not a rate, and needs a new kind of selector.
# :::
#
# :::{exercise} Refute us
# :label: ex-claims-refute
#
# Try to break a measured number: another stand-in, length or GPU. What moves the ratio most? *(a
# GPU, an hour)*
# :::
#
# :::{solution} ex-claims-refute
# :class: dropdown
#
# `make measure NOTEBOOKS=forward/results`, then this page again. For the half-full chart the
# stand-in decides. A record that contradicts the prose stops the build.
# :::
#
# ## Takeaways
#
# - A claim is a value, a machine, a baseline and a source. Without all four, nobody can check it.
# - A maximum over shapes finds the weakest baseline. Ask for the whole row.
# - Many numbers can be tested without hardware: multiply the counts, compare with the machine.
