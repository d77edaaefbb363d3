# ---
# jupyter:
#   kernelspec: {display_name: Python 3, language: python, name: python3}
# measures: true
# ---

# %% [markdown]
# # Block v2 and v3: warp-specialized
#
# This operator is bound by bytes, and neither persistent programs nor {term}`warp specialization`
# save any. What can they buy?
#
# :::{admonition} In this chapter (30 minutes)
# You will be able to tell from a compiled loop whether anything overlaps its loads, to decide by
# Little's law how many slots a kernel needs, and to store results in tiles that are no longer
# needed. At head_dim 128 block v3 is {glue:text}`faster_v1:.0f` % faster than block v1 in the
# backward pass, back to back, and {glue:text}`forward_more:.1f` % slower in the forward pass.
# :::

# %% tags=["hide-input"]
import math
from dataclasses import replace

import pandas as pd
import torch

from _lib import block_studies, drawings, loops, studies
from gdpa_kernels.block_attention import slots
from gdpa_kernels.block_attention.kernels import v1_one_tile
from gdpa_kernels.block_attention.kernels import v3_warp_specialized as v3
from gdpa_kernels.block_attention.kernels.v3_warp_specialized import Config
from gdpa_kernels.block_attention.ladder import v2_slab
from gdpa_lab.measuring import system
from gdpa_lab.measuring.workloads import workload
from gdpa_lab.report import charts, results
from gdpa_lab.report.chapter import Chapter

# %% tags=["parameters"]
mode = "replay"
device = "cpu"
data_dir = "data"

# %% tags=["remove-cell"]
chapter = Chapter("block/v3_warp_specialized", mode=mode, device=device, data_dir=data_dir)
NAMES = {"block-fill70-2000": "128", "block-fill70-2000-d64": "64"}  # head_dim by workload
SHAPES = ["forward 128", "forward 64", "backward 128", "backward 64"]
V1, V2, V3 = "v1_one_tile", "v2_slab", "v3_warp_specialized"
# Variants of block v2, then of block v3: consumers, slots, heads whose loads are issued together.
HEADS = {"1 head, 1 stage": v2_slab.Config(heads_per_program=1, slabs_per_program=1, num_stages=1)}
for n in (1, 2, 3):
    HEADS[f"1 slab, {n} stage{'s' * (n > 1)}"] = v2_slab.Config(slabs_per_program=1, num_stages=n)
HEADS["2 slabs, 3 stages"] = v2_slab.Config(slabs_per_program=2, num_stages=3)
for n, stages in ((1, 3), (2, 3), (3, 3), (1, 5), (2, 5)):
    HEADS[f"{n} per SM, {stages} stages"] = v2_slab.Config(programs_per_sm=n, num_stages=stages)
HEADS["2 per SM, 3 stages, 1 head"] = v2_slab.Config(heads_per_program=1, num_stages=3)
WIDE = [(1, 1, 1), (1, 2, 1), (1, 3, 1), (2, 2, 1), (1, 3, 2)]
MORE = [(1, 4, 1), (2, 4, 1), (1, 4, 2)]
NARROW = [(1, 6, 1), (2, 6, 1), (1, 5, 2), (1, 6, 2), (1, 5, 4), (1, 6, 4), (2, 6, 2)]
FITS = {"backward 128": WIDE, "forward 128": WIDE + MORE}
FITS |= {f"{direction} 64": WIDE + MORE + NARROW for direction in ("backward", "forward")}


def label(consumers: int, slots: int, together: int = 1) -> str:
    """The variant's name in the record."""
    roles = f"{consumers} math role{'s' * (consumers > 1)}, {slots} slot{'s' * (slots > 1)}"
    return f"{roles}, {together} heads together" if together > 1 else roles


@chapter.measure
def _(session):
    for name, dim in NAMES.items():
        for direction in ("backward", "forward"):
            usual = v1_one_tile.default_config(direction, block_studies.blank(int(dim)))
            follow = {"config": replace(usual, heads_inner=True)}
            listed = [(V1, "heads follow", follow), (V2, "default", {})]
            listed += [(V2, variant, {"config": config}) for variant, config in HEADS.items()]
            listed += [(V3, label(*c), {"config": Config(*c)}) for c in FITS[f"{direction} {dim}"]]
            session.measure(workload(name), listed, direction=direction)


# %% tags=["remove-cell"]
rows = chapter.rows("block/results", scope="sustained", workload=list(NAMES), impl=[V1, V2, V3])
rows["shape"] = rows["direction"] + " " + rows["workload"].map(NAMES)
us = rows.pivot(index="shape", columns="impl", values="time_us_p50").loc[SHAPES]
over_v1, over_v2 = us[V3] / us[V1], us[V3] / us[V2]
chapter.glue(
    faster_v1=100 * (1 / over_v1["backward 128"] - 1),
    forward_more=100 * (over_v1["forward 128"] - 1),
)  # fmt: skip

# %% tags=["remove-input"]
# | name: fig-b-v3-ladder
# | caption: >
# |   **Block v3 on the ladder.** Time of the backward pass of each rung on block-fill70-2000, back
# |   to back; each tick leads to its chapter. Dashed: libraries.
# | alt: >
# |   An axis of milliseconds with a tick for each rung, that of v3 thick, and dashed lines for the
# |   libraries.
chapter.ladder("v3_warp_specialized", "block")

# %% tags=["remove-input"]
# | name: fig-roles-slots
# | caption: >
# |   **Warp roles pay in the backward pass, most where one program fills an SM.** Percent of the
# |   rate of the best copy with the same mix of reads and writes, back to back.
# | alt: >
# |   A dot plot with four rows, forward and backward at head_dim 128 and 64. Forward the three
# |   rungs lie close together. Backward v3 is furthest right, at head_dim 128 by a wide margin.
defaults = rows.pivot(index="shape", columns="impl", values="percent_of_roofline").loc[SHAPES]
chapter.figure(
    charts.dots(
        defaults.rename(columns={V1: "block v1", V2: "block v2", V3: "block v3"}),
        xlabel="% of the copy", levels={"copy": 100},
    ),
    measured=rows,
)  # fmt: skip

# %% [markdown]
# ## What changes
#
# | | {doc}`block v1 <v1_one_tile>` | block v2 | block v3 |
# |:--|:--|:--|:--|
# | a program | one head of a block | all heads of a block, then the next block | as block v2 |
# | loads | pointers of every thread | a thread asks TMA, between two items | a producer asks TMA |
# | barriers | made by the compiler | the same | two arrays, made by us |
# | results | pointers of every thread | through buffers of their own | through the inputs' tiles |
#
# The heads of a token lie side by side, so the tiles of all heads of a block, a *slab*, are one
# piece of memory: 64 KiB without a gap at head_dim 128. An *item* is one head of one block.
#
# ## Block v2: stages are not buffers
#
# Block v2 is {term}`persistent <persistent kernel>`, and only loads that run ahead keep it busy:

# %% tags=["remove-cell"]
# Block v2 had a chapter of its own; its record counts until one of this chapter has its variants.
slabs = chapter
if not any(row.impl == V2 and row.variant in HEADS for row in chapter.record().rows):
    slabs = Chapter("block/v2_slab", data_dir=data_dir)
slab_rows = slabs.rows(variant=["heads follow", *HEADS], impl=[V1, V2])
slab_rows["shape"] = slab_rows["direction"] + " " + slab_rows["workload"].map(NAMES)
slab_us = slab_rows.pivot(index="variant", columns="shape", values="time_us_p50")[SHAPES]
slab_best = slab_us.loc[list(HEADS)].min() / slab_us.loc["heads follow"]
is_five = slab_us.index.str.contains("5 stages")
over_block_v1 = pd.DataFrame({
    "one to three stages": slab_us[~is_five].drop("heads follow").min(),
    "five stages": slab_us[is_five].min(),
}).div(slab_us.loc["heads follow"], axis=0)  # fmt: skip
over_block_v1.index = [shape.replace(" ", ", head_dim ") for shape in SHAPES]
side_by_side = slab_us.loc["2 per SM, 3 stages, 1 head"] / slab_us.loc["2 per SM, 3 stages"]
fifth = slab_us.loc["1 per SM, 5 stages"] / slab_us.loc["1 per SM, 3 stages"]
fits = block_studies.compiled({
    "v1": (v1_one_tile, "forward", None),
    "v2": (v2_slab, "forward", v2_slab.Config(num_stages=3)),
}).set_index("case")["programs on an SM"]  # fmt: skip
assert slab_best["backward 128"] < 0.9 and slab_best[["forward 128", "forward 64"]].min() > 1
assert (over_block_v1 > 1).sum(axis=None) == 7, "the caption: one case of four, with five stages"
chapter.glue(v1_fit=fits["v1"], v2_fit=fits["v2"],
             fifth_least=100 * (1 - fifth.max()), fifth_most=100 * (1 - fifth.min()))  # fmt: skip
chapter.predict(
    "The best variant of block v2 saves more than 3 % of block v1's time in all four cases (the "
    "worst ratio).",
    slab_best, most=0.97, registered="block/v2_slab#1",
)  # fmt: skip
chapter.predict(
    "One persistent program per SM takes at least 10 % less time with five stages than with three "
    "(the largest of four ratios).",
    fifth, most=0.90, shown=False, registered="block/v2_slab#2",
)  # fmt: skip
chapter.predict(
    "Heads side by side (`heads_per_program=1`) save time in the forward pass (the larger ratio).",
    side_by_side.iloc[:2], most=0.999, form=".3f", shown=False, registered="block/v2_slab#3",
)  # fmt: skip
ragged = block_studies.batch((0, 1, 63, 64, 65, 130))
expected, _ = block_studies.emulated(v1_one_tile, ragged)
for walk in ("1 head, 1 stage", "2 slabs, 3 stages", "2 per SM, 3 stages"):
    actual, _ = block_studies.emulated(v2_slab, ragged, config=HEADS[walk])
    assert all(map(torch.equal, actual, expected)), "the text: the bits of block v1"

# %% tags=["remove-input"]
# | name: fig-slab-shares
# | caption: >
# |   **Block v2 beats block v1 in one case of four, and only with five stages.** Time of its
# |   fastest variant over that of block v1 (dashed), in bursts.
# | alt: >
# |   A dot plot with four rows, forward and backward at head_dim 128 and 64. All marks lie at 1 or
# |   right of it, except backward at head_dim 128 with five stages, which lies well left.
chart = charts.dots(over_block_v1, xlabel="time / time of block v1")
chapter.figure(chart, measured=slab_rows)

# %% [markdown]
# `num_stages` should decide how far loads run ahead of the {term}`MMAs <MMA>`. The forward loop as
# compiled: *ask* starts {term}`TMA` loads, *wait* waits for tiles, *stored* waits until a TMA store
# has read {term}`shared memory`, *list* loads from the list of blocks:

# %% tags=["remove-input"]
BUFFERS = {1: 1, 2: 2, 3: 2, 5: 3}
for stages, buffers in BUFFERS.items():
    kernels = block_studies.built(v2_slab, "forward", v2_slab.Config(num_stages=stages))
    loop = loops.pipeline(kernels["forward_kernel"])
    print(f"num_stages={stages}, buffers={buffers}: {loop.shown()}")
    assert (loop.ahead, loop.room) == (buffers - 1, buffers)

# %% [markdown]
# With two stages the tiles of the next head are asked for at the *end* of the loop, which then
# waits for them at once. With three there are still two buffers: the address of a tile depends on
# the list, and the third stage goes to that load. Five stages are the first to have a head in
# flight during the MMAs, and one program on an SM takes {glue:text}`fifth_least:.0f` to
# {glue:text}`fifth_most:.0f` % less time than with three.
#
# Until then only another program on the SM can fill the gaps, and {glue:text}`v2_fit:.0f` programs
# of block v2 fit, where {glue:text}`v1_fit:.0f` of block v1 do: a second buffer of each tile takes
# shared memory. Many small programs overlap for free, since the hardware starts another when one
# ends. (Results have block v1's bits, emulated.)
#
# ## Block v3: a producer loads, consumers compute
#
# Block v3 has two {term}`roles <role>`, `load` and `math`. The tiles of an item fill a *slot*: Q, K
# and V in the forward pass, and grad_out as well in the backward pass.

# %% tags=["remove-input"]
chapter.roles("v3_warp_specialized", "block_attention")

# %% [markdown]
# ### Tiles that are dead hold the results
#
# {term}`TMA` stores from {term}`shared memory`, so results need room there. When a result is ready,
# some tile of its item is *dead*: no later step reads it, and it has the same shape.

# %% tags=["remove-input"]
# | name: fig-roles-dead
# | caption: >
# |   **Every result of the backward pass finds a tile that nobody reads any more.** The tiles of an
# |   item from left to right, as its five MMAs end; only dS has room of its own.
# | alt: >
# |   Five rows over six steps. The tile of V turns dead after S and dP, then holds P, then dV. That
# |   of grad_out turns dead after dV and holds dQ; that of K turns dead after dQ and holds dK.
steps = ["loads landed", "S, dP done", "softmax", "dV done", "dQ done", "dK done"]
chapter.figure(
    drawings.segments(
        {
            "V's tile": [(0, 1, "V", "read"), (1, 2, "dead", "dead"), (2, 3, "P", "between MMAs"),
                         (3, 6, "dV", "a result")],
            "grad_out's": [(0, 3, "grad_out", "read"), (3, 4, "dead", "dead"),
                           (4, 6, "dQ", "a result")],
            "K's": [(0, 4, "K", "read"), (4, 5, "dead", "dead"), (5, 6, "dK", "a result")],
            "Q's": [(0, 5, "Q", "read"), (5, 6, "dead", "dead")],
            "8 KiB apart": [(2, 5, "dS", "between MMAs"), (5, 6, "dead", "dead")],
        },
        ["read", "between MMAs", "a result", "dead"],
        ticks=dict(enumerate(steps)),
    ),
    computed="the stores in the source of math_backward",
)  # fmt: skip

# %% [markdown]
# A slot has one consumer. Two consumers that share three slots would need a wait that tells "not
# yet filled" from "filled twice", and an {term}`mbarrier` shows only the {ref}`parity
# <rule-phases>` of its phase. `Config` refuses such variants, which failed on the H200 in some of
# many launches ({doc}`../tools/emulator` has the smallest example).
#
# ### The backward kernel, with notes

# %% tags=["remove-input"]
NOTES = {
    "LATER: tl.constexpr":
        "With another slot to work on, a slot is given back one item later, so that its stores "
        "overlap with the next item.",
    "dp = tlx.async_dot(grad[stage], tlx.local_trans(tiles.v[stage]), dp)":
        "S and dP are issued together; neither waits for the other.",
    "s = tlx.async_dot_wait(1, s)":
        "Wait until at most one MMA is in flight: S is there, and dP may still run.",
    "p_tile = p[stage * (WIDTH // BLOCK)]": "V is dead from here on, and P takes its place.",
    'tlx.fence("async_shared")':
        "Makes what threads have written to shared memory visible to MMAs and TMA.",
    "tlx.barrier_wait(tiles.empty[stage], phase ^ 1)":
        "The only wait of the producer: is the slot free? The first time it passes at once.",
    "for tile in tl.static_range(TILES):":
        "Tensor by tensor, for several heads if `TOGETHER` says so: the order in which memory is "
        "asked.",
    'with tlx.async_task("default"):': "The producer's four warps, of which one thread works.",
}  # fmt: skip
chapter.annotated([v3.math_backward, v3.load, v3.backward_kernel], NOTES,
                  folded="The consumer, the producer, and the kernel that starts them")  # fmt: skip

# %% [markdown]
# ## Little's law counts the slots, and one more pays
#
# Little's law, with 1 µs of latency (an assumption) and measured copy rates:

# %% tags=["remove-cell"]
run = chapter.record("block/results")
sms = system.load(chapter.data_dir / "systems" / f"{run.system}.json").num_sms
dims, little = {dim: name for name, dim in NAMES.items()}, {}
for shape in SHAPES:
    direction, dim = shape.split()
    work = workload(dims[dim])
    read, written = work.bytes_read(direction), work.bytes_written(direction)
    rate = results.ceilings(run).gbytes_per_s(read, written) * read / (read + written)
    needed = rate * 1e9 * 1e-6 / sms / 1024
    slot = (3 if direction == "forward" else 4) * 64 * int(dim) * 2 / 1024
    little[shape] = needed, slot, 1 + math.ceil(needed / slot)
little = pd.DataFrame(little, index=["needed (KiB)", "slot (KiB)", "slots, by the count"]).T

# %% tags=["remove-input"]
chapter.table(
    little.round(1).rename_axis("shape").reset_index(),
    caption="**By the count, two slots are enough at head_dim 128.** KiB in flight to an SM, the "
    "size of a slot, and the slots that hold them, with the one in use.",
    name="tab-roles-little", modelled="Little's law; tiles of bf16",
)  # fmt: skip
assert little.loc[["forward 128", "backward 128"], "slots, by the count"].eq(2).all(), "caption"
near = over_v2.drop("backward 128")
chapter.predict(
    "Block v3 takes the time of block v2 within 5 % in the forward pass, and in the backward pass "
    "at head_dim 64 (the ratio furthest from 1).",
    near, least=0.95, most=1.05, shown=False,
)  # fmt: skip
chapter.predict(
    "In the backward pass at head_dim 128, where one program of block v2 fills an SM, block v3 "
    "takes 5 to 15 % less time.",
    over_v2["backward 128"], least=0.85, most=0.95,
)  # fmt: skip

# %% [markdown]
# The variants that fit into 227 KiB of shared memory:

# %% tags=["remove-cell"]
variants = chapter.rows(variant=None, impl=V3)
variants["shape"] = variants["direction"] + " " + variants["workload"].map(NAMES)
time = variants.pivot(index="shape", columns="variant", values="time_us_p50")
share = variants.pivot(index="variant", columns="shape", values="percent_of_roofline")[SHAPES]


def best(consumers: int, together: bool) -> pd.Series:
    """The least time of each shape with so many consumers, heads together or not."""
    chosen = {x: [label(*c) for c in FITS[x] if c[0] == consumers and (c[2] > 1) == together]
              for x in SHAPES}  # fmt: skip
    return pd.Series({shape: time.loc[shape, names].min() for shape, names in chosen.items()})


one, two, three = (time[label(1, n)] for n in (1, 2, 3))
second = best(2, False) / best(1, False)
gain = 100 * (1 - best(1, True) / best(1, False))
wide, narrow = gain[["forward 128", "backward 128"]], gain[["forward 64", "backward 64"]]
by_slots = share.loc[[label(1, n) for n in (1, 2, 3, 4, 6)]].set_axis([1, 2, 3, 4, 6])
by_slots = by_slots.rename_axis("slots").reset_index()

# %% tags=["remove-input"]
chapter.table(
    by_slots,
    caption="**Two slots are far better than one.** Percent of a copy's rate with one consumer, by "
    "pass and head_dim, in bursts.",
    name="tab-roles-slots", digits=dict.fromkeys(SHAPES, 0), missing="no room", measured=variants,
    data=variants,
)  # fmt: skip
third = 100 * (three / two - 1)
chapter.glue(third_narrow=-third["forward 64"], third_forward=-third["forward 128"],
             third_backward=-third["backward 64"])  # fmt: skip
assert third.abs().idxmax() == "forward 64", "the text: found where the count gives three"
chapter.predict(
    "With one slot block v3 is block v2 again: it takes at least 25 % more time than with two (the "
    "smallest of four ratios).",
    (one / two), least=1.25, shown=False,
)  # fmt: skip
chapter.predict(
    "Two slots are enough: a third changes the time by at most 5 % (the largest change).",
    third.abs(), most=5, form=".0f", unit=" %",
)  # fmt: skip
chapter.predict(
    "One consumer is enough: a second is nowhere more than 3 % faster (the smallest ratio).",
    second, least=0.97, shown=False,
)  # fmt: skip
assert second.min() > 0.99, "the text: a second one gains nowhere"

# %% [markdown]
# A third slot saves {glue:text}`third_narrow:.0f` % in the forward pass at 64, as counted, but also
# {glue:text}`third_forward:.0f` % there at 128 and {glue:text}`third_backward:.0f` % in the
# backward pass at 64: the latency is longer than 1 µs, or items vary. In the backward pass at 128,
# where a slot is 64 KiB, two are enough.
#
# ## With two slots the stores of one item overlap with the MMAs of the next
#
# The backward pass in the emulator, one consumer and four items. With one slot it takes
# {glue:text}`cycles:.2f` times the modelled cycles.

# %% tags=["remove-cell"]
two_blocks = block_studies.batch((5 * 64,), head_dim=128)  # of five, for one of three programs
timelines = {
    n: block_studies.timeline(v3, two_blocks, "backward", Config(1, n), lanes={"task0": "math"})
    for n in (1, 2)
}
cycles = {n: max(event.end for event in line.events) for n, line in timelines.items()}
chapter.glue(cycles=cycles[1] / cycles[2])

# %% tags=["remove-input"]
# | name: fig-roles-two-slots
# | caption: >
# |   **With two slots loads and stores go on beside the MMAs.** An arrow leads from the arrival
# |   that completed a phase to the wait that it ended. Modelled cycles.
# | alt: >
# |   Four lanes. load asks for two slots at once and then waits. TMA loads the second slot while
# |   math computes on the first; the three stores of the first item overlap with the first MMAs of
# |   the second, and the loads of the third item begin as soon as they have ended.
chapter.figure(timelines[2], emulated="v3_warp_specialized backward, modelled schedule")

# %% tags=["remove-input"]
studies.stepper(
    {"two slots": timelines[2], "one slot": timelines[1]},
    "block-v3_warp_specialized-steps",
    title="Block v3 with two slots and with one, step by step",
)

# %% [markdown]
# ## The emulator finds the wait that a test of results would miss
#
# Block v3 agrees with fp64 on lengths around the edges of a block. What if `release` forgets its
# wait, so that a slot goes back while its {ref}`stores <rule-stores>` may still read it?

# %% tags=["remove-cell"]
for config in (Config(1, 1), Config(1, 3, 2), Config(2, 4)):
    block_studies.comparison(v3, ragged, config, schedule=0)

# %% tags=["remove-input"]
hasty = studies.changed(v3)
hasty.release = studies.changed(slots, ("    tlx.async_descriptor_store_wait(0)\n", "")).release
grad_out = block_studies.gradient(two_blocks)
said = studies.findings(lambda: hasty.backward(grad_out, two_blocks, config=Config(1, 2)))
print(said[0].replace("; ", ";\n  "))

# %% [markdown]
# ## The order in which memory is asked matters at head_dim 64
#
# At head_dim 64 no number of slots or consumers brings the backward pass above
# {glue:text}`alone_64:.0f` % of the copy. A row of a tile is only 128 bytes there. Block v3 loads
# all rows of one head, later all rows of the next; by then DRAM's *page* may be closed. The option
# `heads_together` issues the loads of several heads together, tensor by tensor.

# %% tags=["remove-cell"]
chapter.predict(
    "Loading several heads together saves at least 1 % at head_dim 64 (the smaller saving), and "
    "less at 128.",
    narrow, least=max(1, wide.max()), form=".1f", unit=" %", shown=False,
)  # fmt: skip
five = slabs.times(value="percent_of_roofline", columns="variant", variant=None, impl=V2,
                   direction="backward")["1 per SM, 5 stages"]  # fmt: skip
chapter.glue(
    alone_64=share.loc[[label(*c) for c in FITS["backward 64"] if c[2] == 1], "backward 64"].max(),
    narrow_64=narrow.min(), wide_128=wide.max(), best_64=defaults[V3]["backward 64"],
    best_128=defaults[V3]["backward 128"],
    v2_five=five["block-fill70-2000"],
    of_peak=100 * workload("block-fill70-2000").flops("backward") / us[V3]["backward 128"] / 1e6
    / results.ceilings(run, "sustained").tflops,
)  # fmt: skip

# %% [markdown]
# Several heads together save at least {glue:text}`narrow_64:.1f` % at head_dim 64 and at most
# {glue:text}`wide_128:.1f` % at 128 (in bursts). In the backward pass at 64 block v3 now reaches
# {glue:text}`best_64:.0f` % of the copy back to back.
#
# ## Surprise: four warps are enough
#
# One consumer, 128 of the 2,048 threads that an SM can hold, evaluates softmax and five MMAs for
# the whole SM, at {glue:text}`of_peak:.0f` % of the rate that matmuls reach on this machine, and a
# second one gains in no case.
#
# MMAs and softmax still follow each other. What counts is that *loading* no longer waits for
# computing. Block v2 gets that with five stages, and pays with a third buffer of each tile: in the
# backward pass at head_dim 128 it reaches {glue:text}`v2_five:.0f` % of the copy in bursts, block
# v3 {glue:text}`best_128:.0f` % back to back.

# %% tags=["remove-input"]
chapter.predictions()

# %% tags=["remove-input"]
chapter.profile(V1, V2, V3, workload="block-fill70-4000")
chapter.profile(V1, V2, V3, workload="block-fill70-4000", direction="backward")

# %% [markdown]
# ## Exercises
#
# :::{exercise} How many stages for three tiles?
# :label: ex-slab-stages
#
# Compile block v2's forward kernel at head_dim 64 with `num_stages` from 2 to 7, and count the
# buffers (`loops.pipeline`). Find the rule. *(compiler, ten minutes, no GPU)*
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
# :::{exercise} Tiles of their own
# :label: ex-roles-own
#
# Give the results tiles of their own in each slot: O in the forward pass, dQ, dK, dV and P in the
# backward pass. How many slots fit into 227 KiB at head_dim 128? Where would such a kernel be in
# {numref}`fig-roles-slots`? *(paper, ten minutes)*
# :::
#
# :::{solution} ex-roles-own
# :class: dropdown
#
# In the forward pass a slot is 64 KiB, three fit, and no harm is done. In the backward pass it is 7
# tiles of 16 KiB and P, 120 KiB, and dS on top: one slot, with which nothing is in flight during
# the MMAs. Without the dead tiles there would be no reason to have roles.
# :::
#
# :::{exercise} Dead or not
# :label: ex-roles-dead
#
# In a copy of the file store dQ from Q's tile, and in another one dV. What does the emulator say
# about each, and what do the results say? *(emulator, ten minutes)*
# :::
#
# :::{solution} ex-roles-dead
# :class: dropdown
#
# dQ over Q is a race: the MMA of dK, which is in flight, still reads Q. dV over Q is none under any
# schedule: the MMA of dK is issued after dV has been written and reads it in good order. But it
# reads dV, so dK is wrong while dQ and dV are right. A race checker finds what has no order. Only a
# comparison with the reference shows that an order is wrong.
# :::
#
# :::{exercise} Slots for a B200
# :label: ex-roles-b200
#
# A B200 has 148 SMs and a nominal 8 TB/s {cite}`nvidiablackwell`. How many KiB of loads must be in
# flight to an SM at a latency of 1 µs, in each pass, and how many slots is that at head_dim
# 128? *(paper, five minutes)*
# :::
#
# :::{solution} ex-roles-b200
# :class: dropdown
#
# In the forward pass three bytes of four are read: $8 \cdot 10^{12} \cdot \tfrac34 \cdot 10^{-6} /
# 148$, or 40 KiB, and in the backward pass with four of seven 30 KiB. One slot holds 48 and 64 KiB,
# so the count is two slots in both directions. The slots suffice, but an item must become faster as
# well, and then one consumer may no longer be enough.
# :::
#
# ## Takeaways
#
# - Many small programs overlap for free. Where one program fills an SM, a producer keeps memory
#   busy.
# - `num_stages` counts stages of a loop, shared by all loads that depend on each other. Read the
#   loop: which loads start between the last wait and the first MMA?
# - Little's law gives the least that must be in flight. Measure one slot more than it says.
# - Find shared memory by asking of every tile when it is dead.
