# ---
# jupyter:
#   kernelspec: {display_name: Python 3, language: python, name: python3}
# measures: true
# ---

# %% [markdown]
# # Block v2: a persistent program loses to many small ones in three cases of four
#
# What does a kernel gain when each program walks through the heads of a block, then takes the next
# block, and TMA does the addressing?
#
# :::{admonition} In this chapter (20 minutes)
# You will be able to tell from a compiled loop whether anything overlaps its loads. In bursts at
# head_dim 128 the best variant of block v2 takes {glue:text}`forward_128:.2f` times the time of
# {doc}`block v1 <v1_one_tile>` in the forward pass and {glue:text}`backward_128:.2f` times in the
# backward pass.
# :::

# %% tags=["hide-input"]
from dataclasses import replace

import pandas as pd
import torch

from _lib import block_studies, loops
from gdpa_kernels.block_attention.kernels import v1_one_tile
from gdpa_kernels.block_attention.ladder import v2_slab
from gdpa_kernels.block_attention.ladder.v2_slab import Config
from gdpa_lab.measuring import system
from gdpa_lab.measuring.workloads import workload
from gdpa_lab.report import charts
from gdpa_lab.report.chapter import Chapter

# %% tags=["parameters"]
mode = "replay"
device = "cpu"
data_dir = "data"

# %% tags=["remove-cell"]
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
five = [name for name in VARIANTS if "5 stages" in name]
ratio = pd.DataFrame({
    "one to three stages": us.loc[[name for name in VARIANTS if name not in five]].min(),
    "five stages": us.loc[five].min(),
}).div(us.loc[V1], axis=0)  # fmt: skip
ratio.index = [shape.replace(" ", ", head_dim ") for shape in ratio.index]
chapter.glue(**{name.replace(" ", "_"): ratio for name, ratio in best.items()})

# %% tags=["remove-input"]
# | name: fig-slab-shares
# | caption: >
# |   **Block v2 beats block v1 in one case of four, and only with five stages.** Time of the
# |   fastest variant of block v2 with one to three stages and with five, over the time of block v1
# |   (dashed), in bursts. Shorter is better.
# | alt: >
# |   A dot plot with four rows, forward and backward at head_dim 128 and 64. All marks lie at 1 or
# |   right of it, except backward at head_dim 128 with five stages, which lies well left.
chapter.figure(charts.dots(ratio, xlabel="time / time of block v1"), measured=rows)

# %% [markdown]
# ## One program takes all heads of a block
#
# | | {doc}`block v1 <v1_one_tile>` | block v2 |
# |:--|:--|:--|
# | work of a program | one block of one head | all heads of a block, then another block |
# | programs | many, short | few, long ({term}`persistent <persistent kernel>`) |
# | addressing | every thread computes pointers and masks | one thread issues a TMA load per tile |
#
# The tensors are `[total, num_heads, head_dim]`: the heads of a token lie side by side. At head_dim
# 128 in bf16 the tile of one head is 64 pieces of 256 bytes, 1,024 bytes apart. The tiles of all
# four heads, a *slab*, are 64 KiB without a gap. Each of $P$ programs takes every $P$-th slab. The
# forward loop:

# %% tags=["remove-input", "hide-output"]
chapter.code(v2_slab.forward_kernel, "    for step in")

# %% [markdown]
# Block v2 touches a slab in four visits. At any moment all its programs are at head 0, later all at
# head 1. In block v1 the four programs of a block run at the same time, so the slab is read at once
# ({numref}`fig-bv1-order`).
#
# ## Stages are not buffers: with three stages no load is in flight during the MMAs
#
# `num_stages` of the loop should decide how far loads run ahead of the {term}`MMAs <MMA>`. The
# steps of the forward loop as compiled: *ask* starts {term}`TMA` loads, *wait* waits for tiles,
# *stored* waits until a TMA store has read {term}`shared memory`, *list* loads from the list of
# blocks:

# %% tags=["remove-input"]
BUFFERS = {1: 1, 2: 2, 3: 2, 5: 3}
for stages, buffers in BUFFERS.items():
    kernels = block_studies.built(v2_slab, "forward", Config(num_stages=stages))
    loop = loops.pipeline(kernels["forward_kernel"])
    print(f"num_stages={stages}, buffers={buffers}: {loop.shown()}")
    assert (loop.ahead, loop.room) == (buffers - 1, buffers)

# %% [markdown]
# - *One stage* asks for q and waits, then for k, then for v: three latencies in a row.
# - *Two stages* ask for the three tiles together, one head ahead. But they do so at the **end** of
#   the loop, and the next thing the loop does is wait for them.
# - *Three stages* still have two buffers. The address of a tile depends on a load from the list of
#   blocks, and the compiler gives the third stage to that load.
# - *Five stages* are the first to ask two heads ahead: one head is in flight during the MMAs.
#
# So with two or three stages a program is as serial as one of block v1, and only another program on
# the same SM can fill its gaps. But {glue:text}`v1_fit:.0f` programs of block v1 fit on an SM in
# the forward pass and {glue:text}`v2_fit:.0f` of block v2, since the second buffer of each tile
# takes shared memory and TMA frees hardly any registers (compiled for sm_90a).

# %% tags=["remove-cell"]
CHANGES = {
    "TMA for pointers": (V1, "1 head, 1 stage"),
    "all heads in a program": ("1 head, 1 stage", "1 slab, 1 stage"),
    "a second stage": ("1 slab, 1 stage", "1 slab, 2 stages"),
    "a third stage": ("1 slab, 2 stages", "1 slab, 3 stages"),
    "persistent, 2 per SM": ("2 slabs, 3 stages", "2 per SM, 3 stages"),
    "heads side by side": ("2 per SM, 3 stages", "2 per SM, 3 stages, 1 head"),
    "five stages for three": ("1 per SM, 3 stages", "1 per SM, 5 stages"),
}
effects = pd.DataFrame({name: us.loc[to] / us.loc[of] for name, (of, to) in CHANGES.items()}).T

CASES = {
    f"{name}, {direction}": (module, direction, config)
    for direction in ("forward", "backward")
    for name, module, config in (
        ("v1", v1_one_tile, None),
        ("v2, 3 stages", v2_slab, Config(num_stages=3)),
        ("v2, 5 stages", v2_slab, Config(num_stages=5)),
    )
}
fits = block_studies.compiled(CASES).drop(columns=["kernel", "spilled (B)"]).set_index("case")
resident = fits["programs on an SM"]
work, machine = workload("block-fill70-2000"), chapter.record().system
sms = system.load(chapter.data_dir / "systems" / f"{machine}.json").num_sms
took = sms / (work.blocks * work.num_heads_q) * us["forward 128"]  # a step of an SM, µs
fifth = effects.loc["five stages for three"]
chapter.glue(budget=took[V1], v1_step=took[V1] * resident["v1, forward"])
chapter.glue(v1_fit=resident["v1, forward"], v2_fit=resident["v2, 3 stages, forward"])
chapter.glue(three=took["1 per SM, 3 stages"], five=took["1 per SM, 5 stages"])
chapter.glue(b200=2 * 4 * 64 * 128 * 2 * 148 / 8e12 * 1e6)
chapter.glue(fifth_least=100 * (1 - fifth.max()), fifth_most=100 * (1 - fifth.min()))
assert best["backward 128"] < 0.9 and min(best["forward 128"], best["forward 64"]) > 1, "the text"
assert (ratio > 1).sum(axis=None) == 7, "the caption: one case of four, with five stages"
pays = effects.index.isin(["a second stage", "five stages for three"])
assert effects[pays].max(axis=None) < 0.95 < 0.98 < effects[~pays].min(axis=None), "the caption"
assert resident["v2, 5 stages, forward"] == resident["v2, 3 stages, backward"] == 1, "the text"
assert (us.loc[V1] < us.loc["v1, blocks follow"]).all(), "the text: in block v1 it pays"

# %% tags=["remove-input"]
chapter.table(
    effects.round(3).rename_axis("change").reset_index(),
    caption="**Only the second stage and, on one program per SM, the fifth pay.** Block v2, "
    "times over those of the variant with one change less, in bursts.",
    name="tab-slab-changes", digits=dict.fromkeys(effects, 2), measured=rows,
)  # fmt: skip
chapter.predict(
    "The best variant of block v2 saves more than 3 % of block v1's time in all four cases (the "
    "worst ratio).",
    best, most=0.97,
)  # fmt: skip
chapter.predict(
    "One persistent program per SM takes at least 10 % less time with five stages than with three "
    "(the largest of four ratios).",
    fifth, most=0.90,
)  # fmt: skip
chapter.predict(
    "Heads side by side (`heads_per_program=1`) save time in the forward pass (the larger ratio).",
    effects.loc["heads side by side"].iloc[:2], most=0.999, form=".3f", shown=False,
)  # fmt: skip

# %% tags=["remove-cell"]
ragged = block_studies.batch((0, 1, 63, 64, 65, 130))
expected, _ = block_studies.emulated(v1_one_tile, ragged)
for walk in ("1 head, 1 stage", "2 slabs, 3 stages", "2 per SM, 3 stages"):
    actual, _ = block_studies.emulated(v2_slab, ragged, config=VARIANTS[walk])
    assert all(map(torch.equal, actual, expected)), "the text: the bits of block v1"

# %% [markdown]
# TMA in place of pointers costs time, and the second stage wins most of it back. Putting the heads
# of a block next to each other does nothing for a persistent grid, while in block v1 it pays.
# Whatever the order of the work, the results are bit for bit those of block v1 (emulated, a ragged
# batch).
#
# With five stages one program per SM takes {glue:text}`fifth_least:.0f` to
# {glue:text}`fifth_most:.0f` % less time than with three. In the backward pass at head_dim 128,
# where shared memory holds one program in any case, that variant beats block v1.
#
# ## Many small programs overlap for free
#
# A step is one head of one block. An SM with block v1 completes one every {glue:text}`budget:.2f`
# µs (forward pass, head_dim 128), which is the rate of the copy. With {glue:text}`v1_fit:.0f`
# programs on the SM, each may take {glue:text}`v1_step:.2f` µs. Alone on its SM, a step of block v2
# takes {glue:text}`three:.2f` µs with three stages and {glue:text}`five:.2f` with five: far less,
# but still too long. A step is a chain of latencies (load, wait, S, softmax, P V, store), so
# several must be in flight at once. Block v1 gets that for free: when one program ends, the
# hardware starts another.

# %% tags=["remove-input"]
chapter.predictions()

# %% tags=["remove-input"]
chapter.profile("v1_one_tile", "v2_slab", workload="block-fill70-4000")
chapter.profile("v1_one_tile", "v2_slab", workload="block-fill70-4000", direction="backward")

# %% [markdown]
# ## Exercises
#
# :::{exercise} A budget for a B200
# :label: ex-slab-b200
#
# A B200 has 148 SMs and a nominal 8 TB/s {cite}`nvidiablackwell`. Two programs of block v2 share an
# SM. How long may a forward step take at head_dim 128, for full blocks? Is that easier or harder to
# keep than on the H200? *(paper, five minutes)*
# :::
#
# :::{solution} ex-slab-b200
# :class: dropdown
#
# Four tiles of 64 × 128 × 2 bytes per step, 148 SMs, two programs: {glue:text}`b200:.2f` µs. The
# H200 allows twice {glue:text}`budget:.2f` µs. A chain of latencies does not become shorter on the
# newer machine, so more steps must be in flight at once.
# :::
#
# :::{exercise} How many stages for three tiles?
# :label: ex-slab-stages
#
# Compile the forward kernel at head_dim 64 with `num_stages` from 2 to 7, and count the buffers
# (`loops.pipeline`). Find the rule. *(emulator: compile it without a GPU, ten minutes)*
# :::
#
# :::{solution} ex-slab-stages
# :class: dropdown
#
# 2, 2, 2, 3, 3, 4. The loads from the list and by TMA depend on each other. Each gets half of
# num_stages − 1, rounded down, but at least one if there is one to give. There is one buffer more
# than the steps that TMA runs ahead.
# :::
#
# :::{exercise} Without the list
# :label: ex-slab-list
#
# If all lengths are multiples of 64, a block starts at its number times 64, and no list is needed.
# Change `place` in a copy of the file and compile with three stages. What does the loop do now?
# *(emulator: compile it without a GPU, half an hour)*
# :::
#
# :::{solution} ex-slab-list
# :class: dropdown
#
# `first_row, rows = slab // SLABS * 64, 64`. There are three buffers, and one head is in flight
# during the MMAs, as with five stages before. Ragged batches could have the same if something else
# fetched the entries of the list, such as a producer or a register that holds the next entry.
# :::
#
# ## Takeaways
#
# - Many small programs overlap for free. A persistent program has to earn that back.
# - `num_stages` counts stages of a loop, shared by all loads that depend on each other. Read the
#   loop: which loads start between the last wait and the first MMA?
# - Contiguous in memory is not contiguous in time.
