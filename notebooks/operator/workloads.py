# ---
# jupyter:
#   kernelspec: {name: python3, display_name: Python 3}
# ---

# %% [markdown]
# # Jagged workloads: a half-full batch holds a third of the work
#
# What does a batch of histories cost, before any kernel runs?
#
# :::{admonition} In this chapter
# - A workload is a name, sizes, a law of lengths and a seed. Its pairs, FLOPs and fewest bytes
#   follow on paper.
# - Tokens fill a padded batch in proportion to the mean length, pairs to the mean *square*:
#   padding wastes more work than memory.
# - Real histories have heavy tails. That makes the order in which tiles are computed matter, and
#   the published synthetic batch cannot show it.
# :::

# %% tags=["hide-input"]
import math
from dataclasses import replace

import numpy as np
import pandas as pd
from IPython.display import display

from gdpa_kernels.gdpa import schedule, v3_persistent
from gdpa_kernels.measuring.workload import MOVIELENS, WORKLOADS, Workload, workload
from gdpa_kernels.report import figures
from gdpa_kernels.report.house import INK, RUNG_COLOURS

# %% tags=["parameters"]
mode = "replay"
device = "cpu"
data_dir = "data"

# %% [markdown]
# ## A workload is a name without tensors
#
# Every measurement in this book names its workload. A workload is a description: sizes, a *length
# law* for queries and perhaps another for keys, and a seed. From these the lengths follow, the
# same on every machine, and from the lengths everything that can be said in advance.

# %%
w = workload("gdpa-self-half-jagged-1024")
print(w.lengths_q, "first lengths:", w.seqlens_q[:6])

lengths = np.array(w.seqlens_q)
pairs = int((lengths * lengths).sum())  # self-attention
flops = 4 * w.num_heads_q * w.head_dim * pairs
row = w.num_heads_q * w.head_dim * 2  # one bf16 row, in bytes
read, written = 3 * int(lengths.sum()) * row, int(lengths.sum()) * row

assert pairs == w.pairs
assert flops == w.flops("forward")
assert (read, written) == (w.bytes_read("forward"), w.bytes_written("forward"))
print(f"{pairs:,} pairs, {flops:.3e} FLOP, {read + written:,} bytes")

# %% [markdown]
# Three conventions are in these lines. A pair costs $4 \cdot \mathtt{head\_dim}$ FLOPs per head: a
# multiplication and an addition in each of two products; the activation is not counted, nor is
# work on padding, for anybody. The fewest bytes are those of $Q$, $K$, $V$ read once and $O$
# written once. And the backward pass, with five products instead of two, counts 2.5 times the
# FLOPs.
#
# ## Laws of length
#
# `fill` is the mean length over the largest one. The published benchmark calls this number
# *sparsity*, although its sparsity of 1.0 is a batch without an empty place: it is a density. Its
# generator draws lengths uniformly from 1 to $N$ for 0.5, and from $(2f - 1)N$ to $N$ for larger
# values $f$ {cite}`adsmodelkernellibrary`. Real histories look different
# ({numref}`fig-workload-laws`):
#
# - **MovieLens**: ratings per user follow a shifted log-normal law; we use the fits of the LensKit
#   Codex {cite}`lenskitcodex,harper2015movielens`. Users with fewer than 20 ratings are not in
#   these data sets.
# - **KuaiRand**: interactions per user, from published quantiles
#   {cite}`gao2022kuairand,kuairandlongseq`; between two quantiles the law is linear in the
#   logarithm of the length. Its mean is a few percent above the reported one.
#
# A model caps every history at `max_seqlen`; so do we. No raw data is part of this repository,
# only these laws.

# %% tags=["remove-cell"]
SHOWN = {
    "gdpa-self-full-1024": "every sequence has N tokens",
    "gdpa-self-half-jagged-1024": "uniform, published generator",
    "gdpa-self-ml1m-1024": "MovieLens 1M",
    "gdpa-self-ml20m-2048": "MovieLens 20M",
    "gdpa-self-kuairandpure-512": "KuaiRand-Pure",
    "gdpa-self-kuairand1k-4096": "KuaiRand-1K",
}


def padded_pairs(work: Workload) -> int:
    """Pairs that a padded batch computes, one head."""
    return work.batch * work.max_seqlen_q * work.max_seqlen_k


def share(work: Workload) -> float:
    """Useful pairs over padded pairs."""
    return work.pairs / padded_pairs(work)


def variation(work: Workload) -> float:
    """Coefficient of variation of the query lengths: standard deviation over mean."""
    return float(np.std(work.seqlens_q) / np.mean(work.seqlens_q))


# %% tags=["remove-input"]
# | name: fig-workload-laws
# | caption: >
# |   Lengths of six workloads, longest sequence first, each over its max_seqlen. The coloured area
# |   is what exists, the frame is the padded batch: their ratio is the fill.
# | alt: >
# |   Six panels. The full batch fills its frame. The uniform one is a triangle. The two MovieLens
# |   panels and KuaiRand-Pure are thin spikes at the left edge that fall off quickly. KuaiRand-1K
# |   fills nine tenths of its frame, because most of its histories are longer than the cap.
with figures.style():
    figure, axes = figures.subplots(2, 3, width=8.4, height=4.4, sharex=True, sharey=True)
    for axis, (name, text) in zip(axes.flat, SHOWN.items(), strict=True):
        work = WORKLOADS[name]
        height = np.sort(work.seqlens_q)[::-1] / work.max_seqlen_q
        axis.fill_between(np.linspace(0, 1, work.batch), height, color=RUNG_COLOURS[1], linewidth=0)
        axis.plot([0, 1, 1, 0, 0], [0, 0, 1, 1, 0], color=INK, linewidth=0.8)
        axis.set_title(f"{text}\nN = {work.max_seqlen_q}, fill {work.fill:.2f}")
        axis.grid(visible=False)
        axis.set_xticks([0, 0.5, 1], ["0", "50 %", "100 %"])
        axis.set_yticks([0, 1], ["0", "N"])
    for axis in axes[1]:
        axis.set_xlabel("sequences")
lines = {name: sorted(WORKLOADS[name].seqlens_q, reverse=True) for name in SHOWN}
figures.save_csv(pd.DataFrame(lines), "workload-laws")
display(figure)

# %% tags=["remove-input"]
figures.source(
    "modelled", "the laws of gdpa_kernels/measuring/workload.py, seed 2025.", csv="workload-laws"
)

# %% [markdown]
# ## What padding wastes
#
# A padded batch has $B N$ places, of which a share `fill` $= f$ is used. But the scores of a
# sequence of length $n$ are $n^2$, so the share of useful *pairs* is
#
# $$
# \frac{E[n^2]}{N^2} \;=\; f^2\,(1 + \mathrm{CV}^2),
# $$ (eq-padding)
#
# with the coefficient of variation CV, the standard deviation of the lengths over their mean.
# Uniform lengths from 1 to $N$ have $f = 1/2$ and $\mathrm{CV}^2 = 1/3$: half of the memory, a
# third of the work.

# %% tags=["remove-input"]
table = pd.DataFrame(
    {
        "workload": name,
        "fill": WORKLOADS[name].fill,
        "CV": variation(WORKLOADS[name]),
        "useful pairs, %": 100 * share(WORKLOADS[name]),
        "padded / useful": 1 / share(WORKLOADS[name]),
    }
    for name in SHOWN
)
for name in SHOWN:
    work = WORKLOADS[name]
    assert math.isclose(share(work), work.fill**2 * (1 + variation(work) ** 2), rel_tol=1e-9)
half = WORKLOADS["gdpa-self-half-jagged-1024"]
assert abs(share(half) - 1 / 3) < 0.01
ml20m = WORKLOADS["gdpa-self-ml20m-2048"]
figures.glue_number("waste_ml20m", 1 / share(ml20m))
figures.glue_number("fill_ml20m_percent", 100 * ml20m.fill)
figures.glue_number("waste_half", 1 / share(half))
figures.show_table(table)

# %% tags=["remove-input"]
figures.source("modelled", "lengths drawn from the laws, counted.")

# %% [markdown]
# For MovieLens 20M, capped at 2048, {glue:text}`fill_ml20m_percent:.0f` percent of the places are
# used, and a padded kernel computes {glue:text}`waste_ml20m:.0f` scores for each one that is
# needed. No improvement of a padded kernel makes up for that; this is why all rungs after
# {doc}`v0 <../forward/v0_eager>` work on the jagged layout.
#
# ## Dense keys in a jagged batch
#
# One of the published charts is called self-attention with sparsity 0.5. Its script, however,
# shortens the queries only: keys and values stay at full length for every sequence
# {cite}`adsmodelkernellibrary`. That is not self-attention on a jagged batch. We measure both and
# name them `half-dense` and `half-jagged`:

# %% tags=["remove-input"]
dense = WORKLOADS["gdpa-self-half-dense-1024"]
kinds = (
    ("queries and keys full", "full"),
    ("keys dense", "half-dense"),
    ("both jagged", "half-jagged"),
)
rows = []
for text, kind in kinds:
    work = WORKLOADS[f"gdpa-self-{kind}-1024"]
    rows.append(
        {
            "workload": work.name,
            "lengths": text,
            "query tokens": work.total_q,
            "key tokens": work.total_k,
            "useful pairs, % of padded": 100 * share(work),
            "keys per query": work.pairs / work.total_q,
        }
    )
assert dense.seqlens_q == half.seqlens_q
figures.glue_number("dense_over_jagged", dense.pairs / half.pairs)
figures.show_table(pd.DataFrame(rows))

# %% tags=["remove-input"]
figures.source("modelled", "lengths drawn from the laws, counted.")

# %% [markdown]
# With dense keys the batch has {glue:text}`dense_over_jagged:.2f` times the FLOPs of the truly
# jagged one. The difference in kind matters more: with dense keys *every tile of queries costs the
# same*, because each walks over the same number of keys. Such a batch can show what skipping empty
# tiles is worth. It cannot show what a clever order of tiles is worth. The published kernel has
# one, zigzag, and the published chart cannot tell whether it helps.
#
# ## Whose histories?
#
# The laws above count users: each user once. A ranking model is trained on *events*, and the
# history of an event is what its user did before. Active users have more events, and their events
# have longer histories, so the batch that a trainer sees is fuller than the law of users suggests.
# The cell draws users from the MovieLens 25M law and compares.

# %%
law = MOVIELENS["ml25m"]
rng = np.random.Generator(np.random.PCG64(2025))
users = np.array(law.sample(50_000, 10**6, rng))  # no cap yet

prefixes = np.arange(1, users.max() + 1)
shorter = np.searchsorted(np.sort(users), prefixes)
events = users.size - shorter  # with a history of this length

for cap in (256, 1024):
    per_user = np.minimum(users, cap).mean() / cap
    per_event = (np.minimum(prefixes, cap) * events).sum() / events.sum() / cap
    print(f"cap {cap}: fill {per_user:.2f} per user, {per_event:.2f} per event")

# %% tags=["remove-cell"]
assert math.isclose(events.sum(), users.sum())
assert per_event > 1.3 * per_user
figures.glue_number("fill_user", per_user)
figures.glue_number("fill_event", per_event)

# %% [markdown]
# At a cap of 1024 the fill is {glue:text}`fill_user:.2f` per user and {glue:text}`fill_event:.2f`
# per event (modelled, from the fitted law). Neither is the published 0.5, and production systems
# differ again: caps, several kinds of events, subsampling. A fill is a property of a trainer as
# much as of a data set. Our workloads named after data sets weight users, and say so here.
#
# ## All workloads
#
# The batch is 1152 sequences with 4 heads of head_dim 128 in bf16, as published, everywhere.
# `cross` has 256 keys, dense, for every length of queries: the shape of a PFFN ({doc}`gdpa`).

# %% tags=["remove-input"]
everything = pd.DataFrame(
    {
        "workload": work.name,
        "fill": work.fill,
        "query tokens, k": round(work.total_q / 1e3),
        "pairs, M": round(work.pairs / 1e6),
        "GFLOP": round(work.flops("forward") / 1e9),
        "GB": work.bytes("forward") / 1e9,
        "FLOP/byte": work.flops("forward") / work.bytes("forward"),
    }
    for work in WORKLOADS.values()
)
figures.save_csv(everything, "workloads")
least, most = everything["FLOP/byte"].min(), everything["FLOP/byte"].max()
figures.glue_number("least_intensity", least)
figures.glue_number("most_intensity", most)
figures.show_table(everything)

# %% tags=["remove-input"]
figures.source("modelled", "forward pass, counted from the lengths.", csv="workloads")

# %% [markdown]
# The last column spans {glue:text}`least_intensity:.0f` to {glue:text}`most_intensity:.0f` FLOP
# per byte. {doc}`../measuring/roofline` says which of them an H200 finishes as fast as its memory
# allows, and which as fast as its tensor cores do.
#
# ## A preview: who gets which tile
#
# A kernel cuts the queries of each sequence into tiles of `BLOCK_M` rows, and each tile walks over
# the keys of its sequence in blocks of `BLOCK_N`. Programs share the tiles. The batch is finished
# when the *last* program is: the imbalance is its load over the mean load of useful work. Four
# orders of a list of tiles, from which program $p$ of $P$ takes the entries $p$, $p + P$, $p + 2P$
# and so on:
#
# - `padded`: all tiles of the padded batch, empty ones included, which cost little but are handed
#   out blindly;
# - `valid`: only tiles that exist, in their natural order;
# - `longest_first`: the same, sorted by falling cost;
# - `zigzag`: longest first, but every second round of $P$ tiles in reverse, as in the published
#   kernel.

# %%
config = v3_persistent.Config()
PROGRAMS = 132 * config.programs_per_sm  # an H200 has 132 SMs


def tiles(work: Workload, order: str) -> schedule.Schedule:
    """The list that the kernel v3 would walk."""
    return schedule.build(
        order, work.seqlens_q, work.seqlens_k,
        num_heads=work.num_heads_q, num_programs=PROGRAMS,
        block_m=config.BLOCK_M, block_n=config.BLOCK_N,
        max_seqlen_q=work.max_seqlen_q, fastest="block",
    )  # fmt: skip


BATCHES = (
    "full-1024", "half-dense-1024", "half-jagged-1024", "ml1m-1024",
    "ml20m-2048", "ml25m-1024", "kuairandpure-512", "kuairand1k-4096",
)  # fmt: skip
balance = {}
for batch in BATCHES:
    work = workload(f"gdpa-self-{batch}")
    lists = {order: tiles(work, order) for order in schedule.ORDERS}
    balance[batch] = {o: lists[o].imbalance() for o in lists}
    queue = lists["padded"].imbalance(dynamic=True)
    balance[batch]["padded, by the hardware"] = queue

# %% tags=["remove-cell"]
frame = pd.DataFrame(balance).T
REAL = [name for name in BATCHES if name.startswith(("ml", "kuairand"))]
sorted_orders = frame[["longest_first", "zigzag"]]
assert frame.loc["full-1024"].max() < 1.05, "a full batch is balanced in any order"
assert frame.loc["half-dense-1024", "valid"] < 1.05
assert frame.loc["half-dense-1024", "zigzag"] > frame.loc["half-dense-1024", "valid"] - 0.01
assert sorted_orders.max().max() < 1.1
assert frame.loc[REAL, "valid"].max() > 1.2
assert (frame["padded, by the hardware"] <= frame["padded"] + 1e-9).all()
figures.glue_number("padded_half", frame.loc["half-dense-1024", "padded"])
figures.glue_number("padded_worst", frame["padded"].max())
figures.glue_number("valid_worst", frame["valid"].max())
figures.glue_number("sorted_worst_percent", 100 * (sorted_orders.max().max() - 1))
figures.glue_number("hardware_worst", frame["padded, by the hardware"].max())
rows_of_blocks = 1024 // config.BLOCK_M
assert math.gcd(PROGRAMS, rows_of_blocks) == rows_of_blocks
exists = [np.mean(np.array(dense.seqlens_q) > config.BLOCK_M * b) for b in range(rows_of_blocks)]
predicted = max(exists) / np.mean(exists)
assert abs(predicted / frame.loc["half-dense-1024", "padded"] - 1) < 0.03
figures.glue_number("padded_predicted", predicted)
figures.glue_number("programs", PROGRAMS)

# %% tags=["remove-input"]
# | name: fig-workload-balance
# | caption: >
# |   Load of the busiest program over the mean useful load, for four lists of tiles and, in grey,
# |   for a padded grid whose tiles the hardware hands to whichever program is free. 264 programs,
# |   tiles of 128 queries, blocks of 64 keys.
# | alt: >
# |   Horizontal dot chart, one row per workload. For the full batch all dots are at 1. The padded
# |   list reaches between 1.5 and almost 4 for the jagged batches, the valid list up to about 1.5
# |   on real histories; zigzag and longest first stay close to 1 everywhere, the hardware's queue
# |   nearly so.
LOOKS = {
    "padded": ("o", RUNG_COLOURS[3]),
    "valid": ("s", RUNG_COLOURS[0]),
    "padded, by the hardware": ("D", INK),
    "longest_first": ("v", RUNG_COLOURS[2]),
    "zigzag": ("^", RUNG_COLOURS[1]),
}
with figures.style():
    figure, axis = figures.subplots(width=7.6, height=4.0)
    for order, (marker, colour) in LOOKS.items():
        axis.plot(
            frame[order], range(len(frame)), marker, color=colour, label=order, markersize=6,
            alpha=0.9,
        )  # fmt: skip
    axis.axvline(1, color=INK, linewidth=0.8)
    axis.set_yticks(range(len(frame)), list(frame.index))
    axis.invert_yaxis()
    axis.grid(visible=False, axis="y")
    axis.grid(visible=True, axis="x")
    axis.set_xlim(0.9, None)
    axis.set_xlabel("imbalance (1 = no program waits)")
    axis.legend(loc="upper right")
figures.save_csv(frame.rename_axis("workload").reset_index(), "workload-balance")
display(figure)

# %% tags=["remove-input"]
figures.source(
    "modelled",
    "schedule.py: a tile costs one unit plus one per block of keys, an empty tile 0.15.",
    csv="workload-balance",
)

# %% [markdown]
# Four things can be read off {numref}`fig-workload-balance`, all modelled:
#
# - **The padded list resonates.** With dense keys all existing tiles cost the same, and still the
#   busiest program has {glue:text}`padded_half:.2f` times the mean load. A sequence has 8 row
#   blocks, {glue:text}`programs:.0f` is a multiple of 8, so each program gets the same row block
#   of every sequence: those that always get the first one always have work, those with the eighth
#   rarely. The share of existing tiles per row block alone predicts
#   {glue:text}`padded_predicted:.2f`.
# - **Leaving out empty tiles repairs that**, completely with dense keys, and not with real
#   histories, where up to {glue:text}`valid_worst:.2f` remains.
# - **Sorted lists balance everything here** to within {glue:text}`sorted_worst_percent:.0f`
#   percent.
# - **A queue needs no list.** If the hardware gives the next tile of an ordinary padded grid to
#   the first free slot, the imbalance is at most {glue:text}`hardware_worst:.2f`.
#
# The last point is the one to remember. A schedule has to be better than a launch grid that costs
# nothing to make. {doc}`../forward/v3_persistent` measures whether it is.
#
# ## Exercises
#
# :::{exercise} A quarter full
# :label: ex-workloads-quarter
#
# Redo the arithmetic for lengths uniform from 1 to $N/2$ (fill 0.25): tokens, pairs, FLOP per
# byte, each relative to the full batch of the same $N$. *(paper, five minutes)*
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
# Everything above is one draw, seed 2025. Predict how much the number of pairs changes from seed
# to seed for `gdpa-self-half-jagged-1024` and for `gdpa-self-ml20m-2048`, then draw twenty seeds
# with `dataclasses.replace(work, seed=...)`. *(one line to change)*
# :::
#
# :::{solution} ex-workloads-seed
# :class: dropdown
#
# The standard deviation over twenty seeds is {glue:text}`luck_half:.1f` percent of the mean for
# the uniform law and {glue:text}`luck_ml20m:.1f` percent for the log-normal one: a heavy tail is
# felt in sums over 1152 sequences. Two machines must be compared on the same seed, or on many.
# :::
#
# :::{exercise} Your own histories
# :label: ex-workloads-own
#
# Write the deciles of your own data as a `Quantiles` law, make a `Workload` of it, and compute its
# share of useful pairs and the imbalance of the four orders. At which cap does the valid order
# stop being good enough? *(open)*
# :::
#
# :::{solution} ex-workloads-own
# :class: dropdown
#
# There is no one answer, but there are two limits. A cap far below the median makes the batch
# nearly full, and any order does (KuaiRand-1K at 4096). A cap far above it makes a few long
# sequences carry most of the pairs; then the natural order fails first, and with few enough
# sequences a single tile can be longer than the mean load, where no order helps and only splitting
# the keys does.
# :::


# %% tags=["remove-cell"]
def luck(name: str) -> float:
    """Standard deviation of the pairs over twenty seeds, in percent of their mean."""
    counts = [replace(WORKLOADS[name], seed=seed).pairs for seed in range(20)]
    return float(100 * np.std(counts) / np.mean(counts))


figures.glue_number("luck_half", luck("gdpa-self-half-jagged-1024"))
figures.glue_number("luck_ml20m", luck("gdpa-self-ml20m-2048"))
assert luck("gdpa-self-ml20m-2048") > 2 * luck("gdpa-self-half-jagged-1024")

# %% [markdown]
# ## Takeaways
#
# :::{admonition} Three things to remember
# :class: tip
#
# 1. Pairs, not tokens, are the work: the useful share of a padded batch is
#    $f^2(1 + \mathrm{CV}^2)$.
# 2. "Sparsity 0.5" is a fill of 0.5, and with dense keys every tile costs the same. Ask which
#    tensors are jagged before comparing numbers.
# 3. On heavy-tailed histories the order of tiles matters, and the order to beat is the one the
#    hardware's queue gives for nothing.
# :::
