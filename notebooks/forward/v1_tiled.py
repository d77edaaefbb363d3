# ---
# jupyter:
#   kernelspec: {display_name: Python 3, language: python, name: python3}
# measures: true
# ---

# %% [markdown]
# # Forward v1: tiled
#
# What is left to pay for when a score never leaves the chip?
#
# :::{admonition} In this chapter (30 minutes)
# You will write attention without softmax as one tiled kernel, account for its time, and choose its
# {term}`tile` by an SM's registers and shared memory. You need the units of an SM from
# {doc}`../operator/machine`.
# :::

# %% tags=["hide-input"]
from pathlib import Path

import pandas as pd

from _lib import drawings, rare_charts
from _lib.listings import decided
from gdpa_kernels.gdpa.device import activations
from gdpa_kernels.gdpa.kernels import v1_tiled
from gdpa_kernels.gdpa.ladder import v2_tma
from gdpa_lab.measuring import roofline, system
from gdpa_lab.measuring.workloads import workload
from gdpa_lab.report import charts, results
from gdpa_lab.report.chapter import Chapter

# %% tags=["parameters"]
mode = "replay"
device = "cpu"
data_dir = "data"

# %% tags=["remove-cell"]
chapter = Chapter("forward/v1_tiled", mode=mode, device=device, data_dir=data_dir)
SHAPES = [(128, 32, 8, 4), (128, 64, 4, 2), (128, 64, 8, 3), (128, 128, 8, 2), (64, 32, 4, 3)]
SHAPES += [(64, 64, 4, 3), (64, 64, 4, 2), (64, 128, 4, 2)]
SELF, V1 = "gdpa-self-full-1024", "v1_tiled"


@chapter.measure
def _(session):
    rungs = ((V1, v1_tiled), ("v2_tma", v2_tma))
    listed = [(rung, "x".join(map(str, s)), {"config": module.Config(*s)})
              for s in SHAPES for rung, module in rungs]  # fmt: skip
    for name in ("gdpa-self-full-256", SELF, "gdpa-cross-full-1024"):
        session.measure(workload(name), listed)


# %% tags=["remove-input"]
# | name: fig-v1-ladder
# | caption: >
# |   **Forward v1 is several times as fast as forward v0 and passes FlashAttention-2.** Time of
# |   each rung on gdpa-self-full-1024, back to back; each tick leads to its chapter. Dashed:
# |   libraries.
# | alt: >
# |   An axis of milliseconds with a tick for each rung and dashed lines for the libraries. v1
# |   lies left of FlashAttention-2 and right of cuDNN.
chapter.ladder(V1)

# %% [markdown]
# ## What changes
#
# | | {doc}`forward v0 <v0_eager>` | forward v1 |
# |:--|:--|:--|
# | work split | a library kernel for each step | a program for `BLOCK_M` rows of one head |
# | data path | scores through memory, six times | scores stay in registers |
# | synchronisation | between kernels | `cp.async` copies, awaited in groups |
#
# With {term}`cp.async` a thread asks for 16 bytes from memory to {term}`shared memory` and goes on;
# later it waits until at most so many *commit groups* of copies are under way. Triton generates
# both from a loop with `num_stages` blocks in flight.
#
# A program holds its rows of Q and walks over the keys. For each block of keys it computes a tile
# of scores, applies the activation, and accumulates P V:

# %% tags=["remove-input"]
# | name: fig-v1-tiles
# | caption: >
# |   **A program keeps its tiles of Q and O and visits K and V block by block.** One head, queries
# |   down, keys to the right. The program of the second row of tiles has finished three blocks of
# |   keys (pale) and works on the fourth.
# | alt: >
# |   A square of tiles of scores with strips around it: Q at its left, K above, V below, O at its
# |   right. In the second row three tiles are pale and one is filled; its Q, K and V are framed.
strips = [("Q", "left", False), ("K", "above", False), ("V", "below", False), ("O", "right", True)]
walk = drawings.Tiles((1, 3), [(1, column) for column in range(3)], strips)
chapter.figure(drawings.tiles({"": walk}), modelled="drawn from the loop of tiled_kernel")

# %% tags=["remove-input"]
plain = {"segments_ptr": None, "add_ptr": None, "LOWER_RIGHT": False, "BIAS": None}
chapter.code(decided(v1_tiled.tiled_kernel, **plain), "q_ptrs, q_mask = tile")
chapter.roles(V1)

# %% [markdown]
# **No maximum.** Blocks just add up ({doc}`../operator/gdpa`), in the {term}`accumulator` of the
# tensor cores: `tl.dot(p, v, acc)`.
#
# **Tails.** A load of rows that do not exist returns zeros, of K and of V, so the tail of the keys
# needs {ref}`no mask <rule-masks>`. Rows beyond the end of Q are computed and not stored.
#
# ## Prediction
#
# Three things remain to be paid for:
#
# - *Memory.* Inputs once, the output once: {glue:text}`gbytes:.1f` GB on gdpa-self-full-1024, where
#   v0 moved {glue:text}`v0_eager.ipynb::gbytes:.0f` (modelled). Each row of tiles reads K and V of
#   its head again, but at about the same time, so the L2 cache should serve these reads.
# - *Tensor cores.* `4 * head_dim` FLOPs per score.
# - *The activation.* GELU in its tanh form takes {glue:text}`fp32:.0f` fp32 instructions and
#   {glue:text}`mufu:.0f` of the MUFU unit ({doc}`../operator/activations`). An SM issues to 128
#   lanes per clock, of which MUFU serves 16, so MUFU is the limit: {glue:text}`clocks:.4f` clocks
#   of an SM per score.

# %% tags=["hide-input"]
fp32, mufu = activations.INSTRUCTIONS["gelu_tanh"]
clocks = max((fp32 + mufu + 0.5) / 128, mufu / 16)  # 0.5: two probabilities packed into bf16


def costs_us(name: str) -> dict[str, float]:
    """Costs of a workload, in us, if each were alone on the machine."""
    work = workload(name)
    bracket = roofline.bracket(work, "forward", limits)
    sm_clocks = work.num_heads_q * work.pairs * clocks
    activation = sm_clocks / (machine.num_sms * machine.max_sm_clock_mhz)
    return {"memory": bracket.memory_us, "tensor cores": bracket.compute_us,
            "activation": activation}  # fmt: skip


# %% tags=["remove-cell"]
us = chapter.times("forward/results", direction="forward")
record = chapter.record("forward/results")
limits = results.ceilings(record)
machine = system.load(Path(data_dir) / "systems" / f"{record.system}.json")
costs = pd.DataFrame({name: costs_us(name) for name in us.index}).T
relative = (us[V1] / costs.sum(axis=1)).rename("v1, measured")
half, full = "gdpa-self-half-jagged-256", [f"gdpa-self-full-{n}" for n in (256, 512, 1024, 2048)]
loops = chapter.times("forward/results", direction="forward", scope="sustained").loc[us.index]
faster = (loops["fa2_varlen"] > loops[V1]).all() and (loops["cudnn"] < loops[V1])[full].all()
assert faster, "the text: ahead of FlashAttention-2 everywhere, behind cuDNN on full batches"
chapter.glue(
    gbytes=workload(SELF).bytes("forward") / 1e9, fp32=fp32, mufu=mufu, clocks=clocks,
    over_v0=loops["v0_eager"][SELF] / loops[V1][SELF],
    over_v0_half=us["v0_eager"][half] / us[V1][half], cudnn=loops[V1][SELF] / loops["cudnn"][SELF],
    dense_least=relative[full].min(), dense_most=relative[full].max(), above=(relative > 1).sum(),
)  # fmt: skip

# %% [markdown]
# With perfect overlap v1 takes the largest of the three, with none their sum. Inside a program they
# hardly overlap. Copies run ahead, but a {term}`warp group` (four warps whose 128 threads issue one
# MMA together) needs its scores before it can evaluate the activation, and meanwhile gives the
# tensor cores nothing to do. Only another program on the same SM can use them, and nothing makes
# the two alternate. Still, some overlap should be left:

# %% tags=["remove-input"]
chapter.predict(
    "Two programs share an SM, so v1 takes less than the sum everywhere: the largest v1 / sum.",
    relative, most=1,
)  # fmt: skip
chapter.predictions()

# %% [markdown]
# ## Measurement
#
# At 1,024 tokens v1 is {glue:text}`over_v0:.1f` times as fast as v0 back to back. On half-full
# batches of 256 tokens, timed in bursts only, it is {glue:text}`over_v0_half:.0f` times as fast,
# because it skips the padding. It beats FlashAttention-2 everywhere. On full batches dense cuDNN is
# ahead, {glue:text}`cudnn:.2f` times as fast at 1,024 tokens; but it computes softmax, and takes no
# {term}`jagged` batch.
#
# ## The surprise: the time is a sum, as if nothing overlapped

# %% tags=["remove-input"]
# | name: fig-v1-costs
# | caption: >
# |   **On long batches forward v1 takes the sum of its three costs.** Bars: what memory, tensor
# |   cores and activation need one after another, as parts of their sum (modelled). Dots: the time
# |   of forward v1 in bursts, in the same unit (measured).
# | alt: >
# |   Sixteen horizontal bars of equal length, divided into three parts. Memory shrinks and the
# |   tensor cores grow with length. The dots lie near the ends of the bars, those of dense batches
# |   of 256 tokens lowest.
share = costs.div(costs.sum(axis=1), axis=0).rename(index=lambda name: name.removeprefix("gdpa-"))
looks = {"memory": "hollow", "tensor cores": "pale", "activation": "hatched"}
chart = rare_charts.stacked(
    share, xlabel="time / sum of costs", looks=looks, marks=relative, hue=V1
)
chapter.figure(chart, measured=chapter.rows("forward/results", direction="forward", impl=V1))

# %% [markdown]
# On full batches v1 takes {glue:text}`dense_least:.2f` to {glue:text}`dense_most:.2f` times the
# sum, and on {glue:text}`above:.0f` workloads it takes more. Either two programs on an SM hide
# little of each other's activation, or something else costs what they save. Our count leaves out
# padding inside partial tiles and all other instructions of the loop. {doc}`The next chapter
# <v2_tma>` counts those instructions.
#
# ## Which tile
#
# The tile is chosen by measurement, within what fits. A program keeps its rows of Q and
# `num_stages` blocks of K and V in shared memory, and in registers at least the accumulator, a tile
# of scores and its bf16 copy.


# %% tags=["hide-input"]
def on_an_sm(block_m, block_n, num_warps, num_stages, registers=None):
    """Programs that fit on an SM; `registers` of a thread, by default the least."""
    shared = (block_m + 2 * num_stages * block_n) * 128 * 2  # head_dim, bf16
    threads = 32 * num_warps
    least = (block_m * 128 + 3 * block_m * block_n // 2) // threads
    allocated = -(-(registers or least) // 8) * 8  # in steps of 8
    return min(228 * 1024 // (shared + 1024), 65536 // (threads * allocated))


# %% tags=["remove-cell"]
groups = {"x".join(map(str, s)): on_an_sm(*s) * s[2] // 4 for s in SHAPES}
swept = chapter.times(columns="variant", variant=None, impl=V1).T
best = swept.div(swept.min()).sort_values(SELF)
chapter.glue(
    worst=best.max()[SELF], copy_rate=limits.copies[-1][1] / 1e3,
    l2_rate=4608 * 16 * 2**19 / swept[SELF]["64x32x4x3"] / 1e6,  # heads, programs, bytes
)  # fmt: skip

# %% tags=["remove-input"]
# | name: fig-v1-shapes
# | caption: >
# |   **The more warp groups an SM holds, the faster the shape.** Time of eight tile shapes (BLOCK_M
# |   x BLOCK_N x warps x stages) in bursts, relative to the best, on three workloads; in brackets
# |   the warp groups that an SM holds.
# | alt: >
# |   A dot plot with eight rows. v1 is fastest at 128 by 32 with eight warps and two programs on an
# |   SM; 64 by 128 with a single one takes longest.
for shapes in (best.groupby(groups)[name] for name in best):
    assert (shapes.min().iloc[:-1].values > shapes.max().iloc[1:].values).all(), "ordered by groups"
chart = charts.dots(
    best.rename(lambda s: f"{s} ({groups[s]})"), xlabel="time / best of forward v1, in bursts"
)
chapter.figure(chart, measured=chapter.rows(variant=None, impl=V1))

# %% [markdown]
# On all three workloads the warp groups on an SM order the shapes: while one warp group evaluates
# its activation, the others, if any, have the tensor cores. 64 x 128, with a single one, takes
# {glue:text}`worst:.1f` times as long.
#
# Registers limit the warp groups, and the 64-bit addresses that every thread computes take their
# share. {doc}`Forward v2 <v2_tma>` gives the addressing to the copy engine.

# %% tags=["remove-input"]
chapter.profile("v1_tiled", workload="gdpa-self-full-512")

# %% [markdown]
# ## Exercises
#
# {doc}`Write it </exercises>`: `make exercise NAME=tiled`.
#
# :::{exercise} One stage more
# :label: ex-v1-stages
#
# With 128 x 32 and eight warps, how many stages can K and V have before the second program no
# longer fits on the SM? *(paper, five minutes)*
# :::
#
# :::{solution} ex-v1-stages
# :class: dropdown
#
# A stage takes 16 KiB: with five a program takes `(128 + 2 * 5 * 32) * 256` bytes = 112 KiB, and
# two programs still fit; six stages are too many.
# :::
#
# :::{exercise} Where do K and V come from?
# :label: ex-v1-l2
#
# With 64 query rows per program, how many bytes of K and V do all programs of gdpa-self-full-1024
# load together? Divide by the time of 64 x 32 (data of the figure). Where do they come from?
# *(paper, ten minutes)*
# :::
#
# :::{solution} ex-v1-l2
# :class: dropdown
#
# 4,608 heads, 16 programs each, 512 KiB of K and V each: 39 GB, at {glue:text}`l2_rate:.1f` TB/s. A
# copy reaches {glue:text}`copy_rate:.1f`, so much of it came from the L2 cache. The programs of one
# head are neighbours in the grid and run together.
# :::
#
# :::{exercise} A pointer is not free
# :label: ex-v1-pointers
#
# `tile_pointers` computes the pointers of each block from the row's number, in every iteration.
# Computed once and advanced by a constant, they would stay alive through both {term}`MMAs <MMA>`.
# Suppose this takes 8 registers more than the 127 that the kernel has. How many programs fit on an
# SM? *(paper, five minutes)*
# :::
#
# :::{solution} ex-v1-pointers
# :class: dropdown
#
# With 127 registers, allocated in steps of 8, a program of 256 threads takes 32,768 of the SM's
# 65,536, and two programs fit. With 8 more only one does: half of the warp groups are gone.
# Recomputing costs issue slots, remembering costs registers, and here registers are dearer.
# :::
#
# ## Takeaways
#
# - Do not write what you can recompute or keep. Without the scores, memory is no longer the limit.
# - A kernel whose warps all do everything overlaps only by accident. Count warp groups on an SM.
# - Registers are a budget of the SM, not of the thread. A few too many cost half the warps.
