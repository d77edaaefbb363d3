# ---
# jupyter:
#   kernelspec: {display_name: Python 3, language: python, name: python3}
# ---

# %% [markdown]
# # Workloads
#
# What does a batch of histories cost, before any kernel runs?
#
# :::{admonition} In this chapter (20 minutes)
# You will compute a batch's FLOPs, fewest bytes and padding waste from its lengths, and predict how
# evenly a list of tiles loads the GPU. For MovieLens 20M a padded kernel computes
# {glue:text}`waste:.0f` scores for each one that is needed.
# :::

# %% tags=["hide-input"]
from dataclasses import replace

import numpy as np
import pandas as pd

from _lib import drawings
from gdpa_kernels.gdpa import list_model
from gdpa_kernels.gdpa.ladder import v3_persistent
from gdpa_lab.measuring import cost_model
from gdpa_lab.measuring.workload import Workload
from gdpa_lab.measuring.workloads import WORKLOADS, workload
from gdpa_lab.report import charts, claims
from gdpa_lab.report.chapter import Chapter

# %% tags=["parameters"]
mode = "replay"
device = "cpu"
data_dir = "data"

# %% tags=["remove-cell"]
chapter = Chapter("operator/workloads", mode=mode, device=device, data_dir=data_dir)

# %% tags=["remove-input"]
# | name: fig-workload-laws
# | caption: >
# |   **Most real histories fill little of a padded batch.** Lengths of six workloads, longest
# |   sequence first, up to N, the padded length. Blue is tokens; its share is the fill.
# | alt: >
# |   Six panels. The full batch has no padding. The uniform one is a triangle. The two MovieLens
# |   panels and KuaiRand-Pure are thin spikes at the left edge that fall off quickly. KuaiRand-1K
# |   is filled to nine tenths, because most of its histories are longer than the cap.
SHOWN = {
    "gdpa-self-full-1024": "every sequence has N tokens",
    "gdpa-self-half-jagged-1024": "uniform, published generator",
    "gdpa-self-ml1m-1024": "MovieLens 1M",
    "gdpa-self-ml20m-2048": "MovieLens 20M",
    "gdpa-self-kuairandpure-512": "KuaiRand-Pure",
    "gdpa-self-kuairand1k-4096": "KuaiRand-1K",
}
lengths = {name: sorted(WORKLOADS[name].seqlens_q, reverse=True) for name in SHOWN}
chapter.figure(
    drawings.laws({text: WORKLOADS[name] for name, text in SHOWN.items()}),
    data=pd.DataFrame(lengths),
    modelled="the distributions of lab/gdpa_lab/measuring/length_distributions.py, seed 2025",
)

# %% [markdown]
# ## A workload is a name without tensors
#
# Every measurement in this book names its workload: sizes, a *length distribution* for queries and
# perhaps another for keys, and a seed. The batch is 1,152 sequences with 4 heads of head_dim 128 in
# bf16, as published. `self` is self-attention; `cross` has 256 dense keys for every length of
# queries, the shape of a {term}`PFFN` ({doc}`gdpa`).

# %%
w = workload("gdpa-self-half-jagged-1024")
print(w.lengths_q, "first lengths:", w.seqlens_q[:6])
n = np.array(w.seqlens_q)
pairs = int((n * n).sum())  # self-attention
flops = 4 * w.num_heads_q * w.head_dim * pairs
rows = 4 * int(n.sum()) * w.num_heads_q  # of q, k and v, read, and o, written
moved = rows * w.head_dim * 2  # bf16
assert (pairs, flops, moved) == (w.pairs, w.flops("forward"), w.bytes("forward"))
print(f"{pairs:,} pairs, {flops:.3e} FLOP, {moved:,} bytes")

# %% [markdown]
# The book's conventions: a pair costs $4 \cdot \mathtt{head\_dim}$ FLOPs per head, a multiply-add
# in each of two matmuls. Neither the activation nor work on padding counts, for any implementation.
# The fewest bytes are $Q$, $K$ and $V$ read once and $O$ written once. The backward pass has five
# matmuls and counts 2.5 times the FLOPs.
#
# ## Length distributions
#
# `fill` is the mean length over the largest one. The published benchmark calls it *sparsity*: read
# "sparsity 0.5" as "half full". Its generator draws lengths uniformly from 1 to $N$ for 0.5, and
# from $(2f - 1)N$ to $N$ for larger values $f$ {cite}`adsmodelkernellibrary`. Real histories look
# different ({numref}`fig-workload-laws`):
#
# - **MovieLens**: ratings per user follow a shifted log-normal distribution; we use the fits of the
#   LensKit Codex {cite}`lenskitcodex,harper2015movielens`.
# - **KuaiRand**: interactions per user, interpolated between published quantiles
#   {cite}`gao2022kuairand,kuairandlongseq`.
#
# Every history is capped at `max_seqlen`. These distributions count each user once, but a ranking
# model is trained on *events*, of which active users have more. Drawn by events
# (`ml25m-events`), MovieLens 25M fills {glue:text}`events:.0f` % of 1,024 rows instead of
# {glue:text}`users:.0f` %.
#
# ## What padding wastes
#
# A padded batch uses a share `fill` $= f$ of its rows. But a sequence of length $n$ has $n^2$
# scores, so the share of useful *pairs* is
#
# $$
# \frac{E[n^2]}{N^2} \;=\; f^2\,(1 + \mathrm{CV}^2),
# $$ (eq-padding)
#
# with the coefficient of variation CV, the standard deviation of the lengths over their mean.
# Uniform lengths from 1 to $N$ have $f = 1/2$ and $\mathrm{CV}^2 = 1/3$: half of the memory, a
# third of the work.


# %% tags=["hide-input"]
def padding(work: Workload) -> dict:
    n = np.array(work.seqlens_q)
    variation = n.std() / n.mean()
    useful = work.pairs / (work.batch * work.max_seqlen_q * work.max_seqlen_k)
    assert np.isclose(useful, work.fill**2 * (1 + variation**2))
    return {"fill": work.fill, "CV": variation, "useful pairs, %": 100 * useful}


waste = pd.DataFrame({name: padding(WORKLOADS[name]) for name in SHOWN}).T
waste.index = waste.index.str.removeprefix("gdpa-self-")
chapter.table(
    waste.round({"fill": 2, "CV": 2, "useful pairs, %": 1}).reset_index(names="workload"),
    caption="**Half full is a third of the work, and most real histories are less.** Fill, "
    "coefficient of variation of the lengths, and the share of useful pairs in a padded batch.",
    digits={"fill": 2, "CV": 2, "useful pairs, %": 1},
    modelled="lengths of the distributions, counted",
)

# %% tags=["remove-cell"]
ml20m = waste.loc["ml20m-2048"]
events, users = (100 * workload(f"gdpa-self-ml25m{x}-1024").fill for x in ("-events", ""))
chapter.glue(waste=100 / ml20m["useful pairs, %"], events=events, users=users)  # fmt: skip
for key, name in (("luck_half", "half-jagged-1024"), ("luck_ml20m", "ml20m-2048")):
    counts = [replace(WORKLOADS[f"gdpa-self-{name}"], seed=seed).pairs for seed in range(20)]
    chapter.glue(**{key: 100 * np.std(counts) / np.mean(counts)})

# %% [markdown]
# So all kernels after {doc}`forward v0 <../forward/v0_eager>` work on the {term}`jagged` layout.
#
# ## Dense keys in a jagged batch
#
# One of the published charts is called self-attention with sparsity 0.5. Its script shortens the
# queries only: keys and values stay at full length for every sequence
# {cite}`adsmodelkernellibrary`. That is not self-attention on a jagged batch, where a query meets
# {glue:text}`keys:.0f` keys on average instead of 1,024. We measure both; `half-dense` has
# {glue:text}`dense_over_jagged:.2f` times the FLOPs of `half-jagged`.
#
# **Half-dense and half-jagged have the same FLOPs per byte.** A sequence of $n$ queries and $m$
# keys has $n m$ pairs and moves $n + m$ rows, up to constant factors. Over a batch of uniform
# lengths the quotient is:
#
# - dense: $E[n N] / E[n + N] = \tfrac12 N^2 / \tfrac32 N = N/3$;
# - jagged: $E[n^2] / E[2n] = \tfrac13 N^2 / N = N/3$.
#
# With dense keys *every tile of queries costs the same*. Such a batch cannot show whether the order
# of tiles matters.
#
# ## What "97 % busy" means
#
# The published forward kernel keeps the tensor cores "97 % busy" {cite}`meta2026gem`, and its
# highest bar is {glue:text}`b200:,.0f` TFLOP/s (published), about half of what 148 SMs do at their
# nominal clock. Both can be true: at {glue:text}`ghz:.2f` GHz, {glue:text}`nominal:.0f` % of the
# nominal 1.965 GHz, to which a power limit may lower the clock (modelled). A share of *cycles* is
# no share of the *peak* ({doc}`../measuring/power_wall`).
#
# ## Who gets which tile
#
# A kernel cuts the queries of each sequence into tiles and gives them to programs. The batch is
# finished when the *last* program is. {doc}`../forward/v3_persistent` explains and measures the
# lists of this figure:

# %% tags=["hide-input"]
config = v3_persistent.Config()
PROGRAMS = 132 * config.programs_per_sm  # an H200 has 132 SMs
BATCHES = ("full-1024", "half-dense-1024", "half-jagged-1024",
           "ml1m-1024", "ml20m-2048", "kuairandpure-512")  # fmt: skip
balance = {}
for batch in BATCHES:
    work = workload(f"gdpa-self-{batch}")
    lists = {
        order: list_model.build(
            order, work.seqlens_q, work.seqlens_k, num_heads=work.num_heads_q,
            num_programs=PROGRAMS, block_m=config.BLOCK_M, block_n=config.BLOCK_N,
            max_seqlen_q=work.max_seqlen_q, fastest="block",
        )
        for order in ("padded", "valid", "zigzag")
    }  # fmt: skip
    balance[batch] = {order: plan.imbalance() for order, plan in lists.items()}
    balance[batch]["by the hardware"] = lists["padded"].imbalance(dynamic=True)
balance = pd.DataFrame(balance).T

# %% tags=["remove-input"]
# | name: fig-workload-balance
# | caption: >
# |   **A padded list leaves programs idle; a sorted list or the hardware's queue does not.** Load
# |   of the busiest program over the mean useful load, for three lists of tiles and for a padded
# |   grid that the hardware hands out. 264 programs, tiles of 128 queries, blocks of 64 keys.
# | alt: >
# |   Horizontal dot chart, one row per workload. For the full batch all dots are at 1. The padded
# |   list lies between 1.5 and almost 4 for the other batches, the valid list reaches about 1.5 on
# |   real histories; zigzag stays close to 1 everywhere, the hardware's queue nearly so.
assert (config.BLOCK_M, config.BLOCK_N, PROGRAMS) == (128, 64, 264), "the caption says so"
chapter.figure(
    charts.dots(
        balance, xlabel="imbalance (1: no program waits)",
        finding=f"On real histories a padded list takes up to {balance['padded'].max():.1f} times "
        f"as long, a zigzag one {balance['zigzag'].max():.2f}.",
    ),
    data=balance.rename_axis("workload").reset_index(),
    modelled="list_model.py: a tile costs one unit plus one per block of keys, an empty one 0.15",
)  # fmt: skip

# %% [markdown]
# **The padded list collides with the grid size.** With dense keys all existing tiles cost the same,
# and still the busiest program has {glue:text}`padded_half:.2f` times the mean load: 264 is a
# multiple of a sequence's 8 row blocks, so each program gets the same one of every sequence. Row
# block 0 exists in each, the mean of the eight in 9/16 of them, so we expect 16/9 = 1.78:

# %% tags=["remove-cell"]
dense, jagged = (workload(f"gdpa-self-half-{kind}-1024") for kind in ("dense", "jagged"))
exists = [np.mean(np.array(dense.seqlens_q) > config.BLOCK_M * block) for block in range(8)]
resonance = max(exists) / np.mean(exists)
padded = balance["padded"]["half-dense-1024"]
chapter.predict(
    f"The busiest program has {resonance:.2f} times the mean load, within 3 %.",
    padded, least=0.97 * resonance, most=1.03 * resonance,
)  # fmt: skip
chapter.glue(
    dense_over_jagged=dense.pairs / jagged.pairs, keys=jagged.pairs / jagged.total_q,
    padded_half=padded,
    zigzag_worst=100 * (balance["zigzag"].max() - 1), queue_worst=balance["by the hardware"].max(),
)  # fmt: skip
ratio = [w.flops("forward") / w.bytes("forward") for w in (dense, jagged)]
assert abs(ratio[0] / ratio[1] - 1) < 0.02, "the text: the same FLOPs per byte"
b200 = claims.published_figures().query("kernel == 'cutedsl_gdpa' and direction == 'forward'")
b200 = b200.loc[~b200["suspect"], "tflops"].max()
ghz = cost_model.B200.clock_ghz(b200 / 0.97)
chapter.glue(b200=b200, ghz=ghz, nominal=100 * ghz / 1.965)
assert 45 < 100 * ghz / 1.965 < 55, "the text: about half"

# %% tags=["remove-input"]
chapter.predictions()

# %% [markdown]
# Sorted lists balance everything here to within {glue:text}`zigzag_worst:.0f` %, and the hardware's
# queue, which a {term}`tile scheduler` has to beat, to {glue:text}`queue_worst:.2f`. What else one
# may do, and what it costs: {doc}`../measuring/masked_batches`.
#
# ## Exercises
#
# {doc}`Write it </exercises>`: `make exercise NAME=lengths`.
#
# :::{exercise} A quarter full
# :label: ex-workloads-quarter
#
# For lengths uniform from 1 to $N/2$ (fill 0.25): tokens, pairs, FLOP per byte, relative to the
# full batch of the same $N$. *(paper, five minutes)*
# :::
#
# :::{solution} ex-workloads-quarter
# :class: dropdown
#
# Tokens: 1/4. Pairs: $(1/2)^2 / 3 = 1/12$. FLOP per byte: $(1/12)/(1/4) = 1/3$ of that of the full
# batch. {eq}`eq-padding` agrees: $f^2 (1 + \mathrm{CV}^2) = \tfrac{1}{16} \cdot \tfrac43$.
# :::
#
# :::{exercise} How much is luck
# :label: ex-workloads-seed
#
# All this is one draw, seed 2025. How much does the number of pairs change from seed to seed for
# `gdpa-self-half-jagged-1024` and for `gdpa-self-ml20m-2048`? Guess, then draw twenty with
# `dataclasses.replace(work, seed=...)`. *(paper, then one line of Python)*
# :::
#
# :::{solution} ex-workloads-seed
# :class: dropdown
#
# The standard deviation over twenty seeds is {glue:text}`luck_half:.1f` % of the mean for the
# uniform distribution and {glue:text}`luck_ml20m:.1f` % for the log-normal one: a heavy tail shows
# even in sums over 1,152 sequences. Compare machines on the same seed, or on many.
# :::
#
# :::{exercise} Your own histories
# :label: ex-workloads-own
#
# Make a `Workload` of the deciles of your own data (`Quantiles`). At which cap is the valid order
# no longer good enough? *(Python, open)*
# :::
#
# :::{solution} ex-workloads-own
# :class: dropdown
#
# A cap far below the median makes the batch nearly full, and any order will do (KuaiRand-1K at
# 4,096). A cap far above it gives most pairs to a few long sequences: the natural order fails
# first, and in the end a single tile exceeds the mean load. Then only splitting keys helps.
# :::
#
# ## Takeaways
#
# - Work is pairs, not tokens: the useful share of a padded batch is $f^2(1 + \mathrm{CV}^2)$.
# - Ask which tensors are jagged, and whether a share is one of cycles, before comparing numbers.
# - On heavy-tailed histories the order of tiles matters.
