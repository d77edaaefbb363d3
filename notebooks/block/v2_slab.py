# ---
# jupyter:
#   kernelspec: {name: python3, display_name: Python 3}
# measures: true
# ---

# %% [markdown]
# # v2: all heads of a block
#
# What does a kernel gain when its programs go from head to head and from block to block, and TMA
# does the addressing?
#
# :::{admonition} In this chapter (20 minutes)
# You will read from a compiled loop whether its loads are overlapped with anything, and tell
# contiguous in memory from contiguous in time. The best variant of v2 takes
# {glue:text}`forward_128:.2f` and {glue:text}`forward_64:.2f` times the time of v1 forward
# (head_dim 128 and 64), {glue:text}`backward_128:.2f` and {glue:text}`backward_64:.2f` times
# backward. Only backward at head_dim 128 gains, and only with five stages.
# :::

# %%
from dataclasses import replace

import pandas as pd
import torch

from gdpa_kernels.block_attention import v1_one_tile, v2_slab
from gdpa_kernels.block_attention.v2_slab import Config
from gdpa_kernels.measuring import system
from gdpa_kernels.measuring.workload import workload
from gdpa_kernels.report import block_studies, charts, pipelines, results
from gdpa_kernels.report.chapter import Chapter
from gdpa_kernels.report.house import RUNG_COLOURS

# %% tags=["parameters"]
mode = "replay"
device = "cpu"
data_dir = "data"

# %% tags=["hide-input"]
chapter = Chapter("block/v2_slab", mode=mode, device=device, data_dir=data_dir)
NAMES = {"block-fill70-2000": "128", "block-fill70-2000-d64": "64"}  # head_dim by workload
VARIANTS = {"1 head, 1 stage": Config(heads_per_program=1, slabs_per_program=1, num_stages=1)}
for n in (1, 2, 3):
    VARIANTS[f"1 slab, {n} stage{'s' * (n > 1)}"] = Config(slabs_per_program=1, num_stages=n)
VARIANTS["2 slabs, 3 stages"] = Config(slabs_per_program=2, num_stages=3)
for n, stages in ((1, 3), (2, 3), (3, 3), (1, 5), (2, 5)):
    VARIANTS[f"{n} per SM, {stages} stages"] = Config(programs_per_sm=n, num_stages=stages)
VARIANTS["2 per SM, 3 stages, 1 head"] = Config(heads_per_program=1, num_stages=3)


@chapter.measure
def _(session):
    listed = [("v2_slab", name, {"config": config}) for name, config in VARIANTS.items()]
    for name, dim in NAMES.items():
        for direction in ("forward", "backward"):
            usual = v1_one_tile.default_config(direction, block_studies.blank(int(dim)))
            v1 = [
                ("v1_one_tile", f"{x} follow", {"config": replace(usual, heads_inner=x == "heads")})
                for x in ("blocks", "heads")
            ]
            session.measure(workload(name), [*v1, *listed], direction=direction)


# %% tags=["remove-cell"]
rows = chapter.rows(variant=None)
rows["case"] = rows["impl"].map({"v1_one_tile": "v1, ", "v2_slab": ""}) + rows["variant"]
rows["shape"] = rows["direction"] + " " + rows["workload"].map(NAMES)
us = rows.pivot(index="case", columns="shape", values="time_us_p50").loc[
    rows["case"].unique(), ["forward 128", "forward 64", "backward 128", "backward 64"]
]
V1 = "v1, heads follow"
best = us.loc[list(VARIANTS)].min() / us.loc[V1]
chapter.glue(**{name.replace(" ", "_"): ratio for name, ratio in best.items()})

# %% tags=["remove-input"]
# | name: fig-slab-shares
# | caption: >
# |   Time of v1 with its blocks in the other order, and of variants of v2, divided by the time of
# |   v1; less is better. Filled: head_dim 128, hollow: 64; blue: forward, orange: backward.
# | alt: >
# |   A dot plot, a row for each variant, four marks a row. Nearly all marks of v2 lie right of the
# |   line at 1. One persistent program per SM with three stages is far right of it except backward
# |   at head_dim 128. With five stages that one lies well left of the line.
COLOURS = [RUNG_COLOURS[1]] * 2 + [RUNG_COLOURS[3]] * 2
ratio = us.div(us.loc[V1]).drop(V1)
chapter.figure(charts.dots(ratio, xlabel="time / time of v1", colours=COLOURS), measured=rows)

# %% [markdown]
# ## What changes
#
# | | {doc}`v1 <v1_one_tile>` | v2 |
# |:--|:--|:--|
# | work of a program | one block of one head | all heads of a block, then another block |
# | programs | as many as there is work, short | as few as one likes, long |
# | addressing | every thread computes pointers and masks | one thread issues a TMA load per tile |
# | barriers | none | made by the compiler |
# | arithmetic, bytes | | the same |
#
# The tensors are `[total, num_heads, head_dim]`, so the heads of a token lie side by side. At
# head_dim 128 in bf16 the tile of one head is 64 pieces of 256 bytes, 1,024 bytes apart. The tiles
# of all four heads, a *slab*, are 64 KB without a gap. v2 gives slabs to its programs: slab $p$,
# $p + P$, $p + 2P$, ... to program $p$ of $P$. The forward loop:

# %% tags=["remove-input"]
chapter.code(v2_slab.forward_kernel, "    for step in")

# %% [markdown]
# `load_rows` and `store_rows` use the descriptors of {doc}`../forward/v2_tma`, which end wherever a
# block ends: one descriptor per tensor serves all blocks, all heads and the stores. No thread
# computes a pointer or a mask.
#
# ### Contiguous when?
#
# A picture holds a doubt already. Twelve programs run at the same time on four heads and sixteen
# blocks. In which step is each tile worked on?

# %%
HEADS, BLOCKS, TOGETHER = 4, 16, 12
ORDERS = {
    "v1, blocks follow": lambda block, head: (head * BLOCKS + block) // TOGETHER,
    "v1, heads follow": lambda block, head: (block * HEADS + head) // TOGETHER,
    "v2, slabs": lambda block, head: block // TOGETHER * HEADS + head,
}
for name, order in ORDERS.items():
    print(name)
    for head in range(HEADS):
        print(f"  head {head}:", *(order(block, head) + 1 for block in range(BLOCKS)))

# %% [markdown]
# In memory a column of this picture is contiguous. In v2 the programs own columns, but in any one
# step they all work in the same row, as in the first order of v1.
#
# ## Prediction
#
# Written before the kernel had run: a slab is contiguous memory; loads are in flight all the time,
# where a program of v1 has none in flight once its MMAs start; and TMA sets registers free. Runs
# differ by 3 %. The worst of the four ratios to v1:

# %% tags=["remove-input"]
chapter.predict("So the best v2 saves more than 3 % in all four cases.", best.max(), most=0.97)

# %% [markdown]
# ## What the compiler made of it
#
# The next predictions come from the compiled kernel. The steps of the forward loop in Triton's GPU
# IR, for four values of `num_stages`; *ask* is the start of TMA loads, *wait* the wait for tiles,
# *stored* the wait until a TMA store has read shared memory, *list* a load from the list of blocks:

# %%
made = {
    stages: block_studies.built(v2_slab, "forward", Config(num_stages=stages))["forward_kernel"]
    for stages in (1, 2, 3, 5)
}
loops = {stages: pipelines.of_loop(kernel) for stages, kernel in made.items()}
for stages, loop in loops.items():
    print(f"num_stages={stages}, {loop.room} buffers: {loop.shown()}")
assert [(loop.ahead, loop.room) for loop in loops.values()] == [(0, 1), (1, 2), (1, 2), (2, 3)]

# %% [markdown]
# - *One stage* asks for q and waits, then for k, then for v: three latencies in a row.
# - *Two stages* ask for the three tiles together, one head ahead. But they do so at the **end** of
#   the loop, after the store of this head has been awaited, and the next thing the loop does is to
#   wait for them. While the program multiplies, nothing is in flight.
# - *Three stages* have two buffers as well. The address of a tile depends on a load from the list
#   of blocks, and the compiler shares the stages between the two loads. The third goes to the list.
# - *Five stages* are the first to ask two heads ahead: one head is in flight during the MMAs.
#
# So with two or three stages a program is as serial as one of v1. Only other programs on the same
# SM can be overlapped with it. How many are there?

# %%
CASES = {
    f"{name}, {direction}": (module, direction, config)
    for direction in ("forward", "backward")
    for name, module, config in (
        ("v1", v1_one_tile, None),
        ("v2, 3 stages", v2_slab, Config(num_stages=3)),
        ("v2, 5 stages", v2_slab, Config(num_stages=5)),
    )
}
fits = block_studies.compiled(CASES).drop(columns="kernel").set_index("case")
chapter.table(fits.reset_index().round(0), modelled="compiled for sm_90a, head_dim 128, four heads")

# %% tags=["remove-cell"]
resident = fits["programs on an SM"]
assert fits["registers"]["v2, 3 stages, forward"] > 0.9 * fits["registers"]["v1, forward"]
chapter.glue(v1_fit=resident["v1, forward"], v2_fit=resident["v2, 3 stages, forward"])

# %% [markdown]
# TMA sets no registers free to speak of, and the second buffer of each tile takes shared memory:
# {glue:text}`v1_fit:.0f` programs of v1 fit on an SM forward, {glue:text}`v2_fit:.0f` of v2.
#
# ## One change at a time
#
# Measured times, each divided by that of the variant with one thing less:

# %%
CHANGES = {
    "TMA for pointers": (V1, "1 head, 1 stage"),
    "all heads in a program": ("1 head, 1 stage", "1 slab, 1 stage"),
    "a second stage": ("1 slab, 1 stage", "1 slab, 2 stages"),
    "a third stage": ("1 slab, 2 stages", "1 slab, 3 stages"),
    "persistent, 2 per SM": ("2 slabs, 3 stages", "2 per SM, 3 stages"),
    "heads side by side": ("2 per SM, 3 stages", "2 per SM, 3 stages, 1 head"),
    "five stages for three": ("1 per SM, 3 stages", "1 per SM, 5 stages"),
    "for comparison: v1, heads side by side": ("v1, blocks follow", V1),
}
effects = pd.DataFrame({name: us.loc[to] / us.loc[of] for name, (of, to) in CHANGES.items()}).T

# %% tags=["remove-input"]
chapter.table(effects.round(3).rename_axis("change").reset_index(), measured=[chapter.record().id])
fifth = effects.loc["five stages for three"]
chapter.glue(fifth_least=fifth.min(), fifth_most=fifth.max())
chapter.predict(
    "A third stage changes the time by at most 5 % (the largest of four changes).",
    100 * (effects.loc["a third stage"] - 1).abs().max(), most=5, form=".1f", unit=" %",
)  # fmt: skip
chapter.predict(
    "The fifth stage counts: one persistent program per SM takes at least 10 % less time with five "
    "stages than with three (the largest of four ratios).",
    fifth.max(), most=0.90,
)  # fmt: skip
chapter.predict(
    "Heads side by side (`heads_per_program=1`) save time forward (the larger ratio).",
    effects.loc["heads side by side"].iloc[:2].max(), most=0.999, form=".3f",
)  # fmt: skip

# %% [markdown]
# TMA alone, in the place of pointers, costs time; the second stage wins most of it back. Heads of
# the same block side by side do nothing for a persistent grid. In v1 the same change pays.
#
# ## Is it right?
#
# A ragged batch in the emulator. However programs walk, the bits are those of v1:

# %%
ragged = block_studies.batch((0, 1, 63, 64, 65, 130))
expected, _ = block_studies.emulated(v1_one_tile, ragged)
for walk in ("1 head, 1 stage", "2 slabs, 3 stages", "2 per SM, 3 stages"):
    found, _ = block_studies.emulated(v2_slab, ragged, config=VARIANTS[walk])
    print(f"{walk:20} equal to v1: {all(map(torch.equal, found, expected))}")
checked = block_studies.comparison(v2_slab, ragged)

# %% tags=["remove-input"]
chapter.table(
    checked, emulated="two heads of 64, bf16; allowed: twice PyTorch's error and one rounding"
)

# %% [markdown]
# ## Where the time goes
#
# A step is one head of one block. If R programs share an SM and memory runs at the rate of the
# copy, each may take R times the bytes of a step over an SM's share of that rate: its budget. What
# a step does take follows from the measured time. Forward, head_dim 128:

# %%
drawn, run = workload("block-fill70-2000"), chapter.record()
sms = system.load(chapter.data_dir / "systems" / f"{run.system}.json").num_sms
limits = results.ceilings(run)
copy = limits.gbytes_per_s(drawn.bytes_read("forward"), drawn.bytes_written("forward"))
of_a_step = sms / (drawn.blocks * drawn.num_heads_q)
together = pd.Series({V1: resident["v1, forward"], "1 per SM, 3 stages": 1,
                      "2 per SM, 3 stages": 2, "1 per SM, 5 stages": 1})  # fmt: skip
steps = pd.DataFrame({"programs on an SM": together})
steps["budget (us)"] = together * of_a_step * drawn.bytes("forward") / copy / 1e3
steps["a step takes (us)"] = together * of_a_step * us["forward 128"][steps.index]
steps["% of the copy"] = 100 * steps["budget (us)"] / steps["a step takes (us)"]
chapter.table(
    steps.rename_axis("case").reset_index().round(2),
    modelled="measured times and the measured copy rate of the same record, by programs and steps",
)

# %% tags=["remove-cell"]
chapter.glue(b200=2 * 4 * 64 * 128 * 2 * 148 / 8e12 * 1e6)
chapter.glue(h200=steps["budget (us)"]["2 per SM, 3 stages"])
assert best["backward 128"] < 0.9 and min(best["forward 128"], best["forward 64"]) > 1, "the text"

# %% [markdown]
# A step of v2 alone on its SM is not slow; it is shorter than a program of v1 among its neighbours.
# But it is a chain of latencies (ask, wait, S, softmax, P V, store) longer than the budget of one.
# Where that is so, several steps must be in flight at once. v1 gets this for nothing: when one
# program ends, the hardware starts another. A persistent program has to earn it back.
#
# ## The surprise: stages are not buffers
#
# A first sweep over `num_stages`, from 1 to 3, said that a third stage brings little, as if two
# were enough. The compiled loop says that neither has a load in flight while it computes, and that
# the third is not a buffer at all. The sweep ended before the first value that tests the idea.
#
# With five stages the idea works: one program per SM takes {glue:text}`fifth_least:.2f` to
# {glue:text}`fifth_most:.2f` times the time it takes with three. Backward at head_dim 128, where
# shared memory holds one program whatever one does, that is the fastest variant by far, and v1 is
# behind. Forward the third buffer costs the second program its place, and v1 stays ahead.
#
# What remains is that one kind of warp asks, waits, computes and stores, in an order that the
# compiler chose. {doc}`v3_warp_specialized` gives the asking to a role of its own.

# %% [markdown]
# ## Exercises
#
# :::{exercise} A budget for a B200
# :label: ex-slab-b200
#
# A B200 has 148 SMs and a nominal 8 TB/s {cite}`nvidiablackwell`. Two programs of v2 share an SM.
# What is the budget of a forward step at head_dim 128, for full blocks? Is it easier or harder to
# keep than on the H200? *(paper, five minutes)*
# :::
#
# :::{solution} ex-slab-b200
# :class: dropdown
#
# Four tiles of 64 × 128 × 2 bytes per step, 148 SMs, two programs: {glue:text}`b200:.2f` µs.
# The H200 allows {glue:text}`h200:.2f` µs. A chain of latencies does not become shorter on the
# newer machine, so more steps must be in flight at once.
# :::
#
# :::{exercise} How many stages for three tiles?
# :label: ex-slab-stages
#
# Compile the forward kernel at head_dim 64 with `num_stages` from 2 to 7, and count the buffers
# (`pipelines.of_loop`). Find the rule. *(code, ten minutes, no GPU)*
# :::
#
# :::{solution} ex-slab-stages
# :class: dropdown
#
# 2, 2, 2, 3, 3, 4. Two loads depend on each other, the list's and TMA's, and the compiler gives
# each half of num_stages − 1, rounded down, but at least one step where there is one to give. There
# is one buffer more than the steps that TMA is ahead.
# :::
#
# :::{exercise} Without the list
# :label: ex-slab-list
#
# If all lengths are multiples of 64, the place of a block is its number times 64, and no list is
# needed. Change `place` in a copy of the file, compile with three stages, and say what the loop
# does now. *(code, half an hour, no GPU)*
# :::
#
# :::{solution} ex-slab-list
# :class: dropdown
#
# `first_row, rows = slab // SLABS * 64, 64`. There are three buffers, and one head is in flight
# during the MMAs, as with five stages before. If something other than the loop fetched the entries
# of the list, a role or a register that holds the next entry, ragged batches would have the same.
# :::
#
# ## Takeaways
#
# - Many small programs overlap with each other for nothing. A persistent program starts without
#   that and has to earn it back.
# - `num_stages` counts stages of a loop, shared by all loads that depend on each other. Read the
#   loop: what is asked for between the last wait and the first MMA?
# - Contiguous in memory is not contiguous in time. What counts is what the programs that run
#   together ask for together.
