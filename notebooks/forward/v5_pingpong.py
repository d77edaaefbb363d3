# ---
# jupyter:
#   kernelspec: {name: python3, display_name: Python 3}
# measures: true
# ---

# %% [markdown]
# # v5: software pipelining
#
# Can a warp group evaluate the activation while its own MMA runs?
#
# :::{admonition} In this chapter (20 minutes)
# You will software-pipeline a consumer loop by half an iteration, read in the emulator what that
# hides, and find in the SASS what the compiler made of it. On the H200, v5 takes
# {glue:text}`full_min:.2f` to {glue:text}`full_max:.2f` times the time of v4 on full batches.
# :::

# %%
import pandas as pd

from gdpa_kernels.gdpa import activations, v4_warp_specialized, v5_pingpong
from gdpa_kernels.gdpa.v5_pingpong import Config
from gdpa_kernels.measuring import compile_check
from gdpa_kernels.measuring.workload import workload
from gdpa_kernels.report import charts, loops, studies
from gdpa_kernels.report.chapter import Chapter

# %% tags=["parameters"]
mode = "replay"
device = "cpu"
data_dir = "data"

# %% tags=["remove-cell"]
chapter = Chapter("forward/v5_pingpong", mode=mode, device=device, data_dir=data_dir)
V4, V5 = "v4_warp_specialized", "v5_pingpong"
us = chapter.times("forward/results", direction="forward")
ratio = us[V5] / us[V4]
full = ratio[[f"gdpa-self-full-{n}" for n in (256, 512, 1024, 2048)]]
half = ratio[[f"gdpa-self-half-dense-{n}" for n in (512, 1024)]]
chapter.glue(full_min=full.min(), full_max=full.max(), half_min=half.min(), half_max=half.max())

# %% tags=["remove-input"]
# | name: fig-v5-ladder
# | caption: >
# |   The ladder up to v5 on gdpa-self-full-1024, forward, kernel alone.
# | alt: >
# |   Horizontal bars of TFLOP/s. v5 is a little longer than v4 and v2; cuDNN is longer still. All
# |   end below the dashed line of the roofline.
chapter.ladder(V5, "gdpa-self-full-1024")

# %% [markdown]
# ## What changes
#
# In {doc}`v4 <v4_warp_specialized>` a consumer warp group issues an MMA and waits for it. It need
# not: `wgmma` is asynchronous {cite}`nvidiaptx`, so the warp group may go on until it needs the
# result. All it lacks is something useful to do. P V of a block needs the activation of that block.
# It does not need the activation of the *next* block, if the scores of that one exist already.
# FlashAttention-3 hides its softmax in the same way {cite}`shah2024flashattention3`.
#
# | | v4 | v5 |
# |:--|:--|:--|
# | one iteration | S, activation, P V of block j | S of block j + 1, P V of block j, activation |
# | alive together | S, then P | S, P and the accumulator |
# | K and V | released after their own MMA | the same; V is held for one block longer |
#
# The loop of a consumer:

# %% tags=["remove-input"]
chapter.code(v5_pingpong.math, "for block in", "store_rows")

# %% [markdown]
# `async_dot_wait(1, s)` is what PTX calls `wait_group 1`: it returns when at most one commit group
# is still in flight. Groups complete in order, so S is ready and P V may still run. Before the loop
# stands a prologue, the first block's S and activation; after it an epilogue, the last block's P V.
#
# P waits in fp32 and is converted just before its MMA, because registers that a `wgmma` reads must
# not be written while another one runs.
#
# The roles and barriers are those of v4, except for an optional pair of named barriers, the *turns*
# of FlashAttention-3's ping-pong schedule:

# %% tags=["remove-input"]
chapter.roles(V5)

# %% tags=["remove-input"]
chapter.changes(V5)

# %% [markdown]
# ## Prediction
#
# A consumer owns 64 rows. Per block of 128 keys, each of its two MMAs takes 512 cycles if it has
# the tensor core to itself. Its activation takes at least {glue:text}`least:.0f` cycles, those of
# MUFU, and at most {glue:text}`most:.0f`, if MUFU and the FMA pipe never overlap. In v4 the three
# add up. In v5 the longer of P V and activation counts:

# %%
fp32, mufu = activations.INSTRUCTIONS["gelu_tanh"]
scores, mma = 64 * 128, 512  # of a block; cycles of S, or of P V
least = mufu * scores / 16
most = least + (fp32 + mufu + 0.5) * scores / 128
model = pd.DataFrame({"activation (cycles)": [least, (least + most) / 2, most]})
model["v4"] = 2 * mma + model["activation (cycles)"]
model["v5"] = mma + model["activation (cycles)"].clip(lower=mma)
model["v4 / v5"] = (model["v4"] / model["v5"]).round(2)
chapter.glue(least=least, most=most)

# %% tags=["remove-input"]
chapter.table(model.round(2), modelled="one consumer alone on an SM, head_dim 128, gelu_tanh")
p50 = chapter.times(columns="variant", variant=None).T
turns = p50.loc["128 keys, turns"] / p50.loc["128 keys"]
spilled = studies.compiled({"even": (V5, Config(registers=168))})["spilled (B)"][0]
chapter.predict("On no full batch is v5 slower than v4 (3 % for noise).", full.max(), most=1.03)
chapter.predict(
    "The gain stays below what the model offers a consumer that is alone: the smallest v5 / v4.",
    full.min(), least=1 / model["v4 / v5"].max(),
)  # fmt: skip
chapter.predict("Turns save 3 % or more.", turns.max(), most=0.97)
chapter.predict(
    "S, P in fp32, the accumulator and P in bf16 are 224 registers: an even share of 168 spills.",
    spilled, least=1, form=",.0f", unit=" B",
)  # fmt: skip

# %% [markdown]
# The register file is now full, so `setmaxnreg` pays: the producer gives up what consumers need.
# The turns fail on their own terms. Why, and why the gain is small, is the surprise below.
#
# ## A timeline
#
# One consumer alone, 256 keys in blocks of 64: first v4, then v5.

# %%
ALONE = ("MATH_ROLES = tl.constexpr(2)", "MATH_ROLES = tl.constexpr(1)")
before, after = studies.changed(v4_warp_specialized, ALONE), studies.changed(v5_pingpong, ALONE)
OLD, NEW = v4_warp_specialized.Config(BLOCK_N=64, num_stages=4), Config(BLOCK_N=64, num_stages=4)
tile, long_tile = studies.batch((64,), (256,)), studies.batch((64,), (2048,))
busy = {
    "v4": studies.tensor_core(studies.timeline(before, long_tile, OLD))["busy"],
    "v5": studies.tensor_core(studies.timeline(after, long_tile, NEW))["busy"],
}
chapter.glue(busy_v4=busy["v4"], busy_v5=busy["v5"])

# %% tags=["remove-input"]
# | name: fig-v5-alone-v4
# | caption: >
# |   v4, one consumer: 64 rows, 256 keys in four blocks. Modelled cycles.
# | alt: >
# |   Lanes load, math, TMA and tensor core. The tensor core has a gap between each S and the P V
# |   that follows; in each gap math computes.
chapter.figure(studies.timeline(before, tile, OLD), emulated="v4 with one consumer")

# %% tags=["remove-input"]
# | name: fig-v5-alone-v5
# | caption: >
# |   v5, the same consumer on the same inputs. Modelled cycles.
# | alt: >
# |   The same lanes. From the second block on the tensor core runs S and P V without a gap
# |   between them, and math computes beneath P V. The tile ends earlier.
chapter.figure(studies.timeline(after, tile, NEW), emulated="v5 with one consumer")

# %% [markdown]
# In v4 no MMA is overlapped with an activation. In v5 the activation runs under P V. On a tile with
# 2,048 keys the tensor core is busy {glue:text}`busy_v4:.0f` % of the time in v4 and
# {glue:text}`busy_v5:.0f` % in v5; the rest is activation that P V is too short to hide. With two
# consumers v4 comes close to that by luck, when they fall out of step. v5 does not need the luck.
#
# ## Is it right?
#
# Lengths around the edges of a warp group and a tile, in the emulator, against fp64:

# %%
checked = studies.comparison(v5_pingpong, studies.batch(studies.EDGES, heads=2))

# %% tags=["remove-input"]
chapter.table(checked, emulated="two heads, bf16; allowed: twice PyTorch's error and one rounding")

# %% [markdown]
# Two ways to get it wrong: P V issued before S, and, with `turns=True`, a first turn that nobody
# gives.

# %%
S = "        s = tlx.async_dot(q[role], tlx.local_trans(k.buffer[stage]))\n"
PV = "        acc = tlx.async_dot(p, v.buffer[before], acc)\n"
FIRST = "    if role == 1:\n        pass_turn(role, options.TURNS)\n"
tile = studies.batch((128,), (512,))
swapped = studies.changed(v5_pingpong, (S + PV, PV + S))
stuck = studies.changed(v5_pingpong, (FIRST, ""))
print(studies.findings(lambda: swapped.forward(tile))[0])
print(studies.findings(lambda: stuck.forward(tile, config=Config(turns=True)))[0])

# %% [markdown]
# `wait_group` counts from the last group back. In the other order the group that may still run is
# S, and the activation reads it. A turn is a token: with none in the game, each consumer waits for
# the other.
#
# ## Measurement
#
# The rung as it is, with turns, with narrower blocks, and with its loop written as `while`:

# %%
FOR, LAST = (
    "    for block in tl.range(1, blocks):\n",
    "        tlx.barrier_arrive(v.empty[before])\n",
)
WHILE = "    block = 1\n    while block < blocks:\n"
as_while = studies.changed(v5_pingpong, (FOR, WHILE), (LAST, LAST + "        block += 1\n"))

# %% tags=["hide-input"]
VARIANTS = {
    "128 keys": (v5_pingpong, Config()),
    "128 keys, turns": (v5_pingpong, Config(turns=True)),
    "64 keys, 4 stages": (v5_pingpong, Config(BLOCK_N=64, num_stages=4)),
    "128 keys, while loop": (as_while, Config()),
    "128 keys, while loop, turns": (as_while, Config(turns=True)),
}


@chapter.measure
def _(session):
    listed = [(V5, name, {"config": c, "module": m}) for name, (m, c) in VARIANTS.items()]
    for name in ("gdpa-self-full-512", "gdpa-self-full-2048", "gdpa-cross-full-1024"):
        session.measure(workload(name), [(V4, "v4", {}), *listed])


# %% tags=["remove-input"]
# | name: fig-v5-variants
# | caption: >
# |   Time of the variants of v5 divided by the time of v4; less is better.
# | alt: >
# |   A dot plot with a row for each variant of v5, three marks a row, one for each workload. The
# |   line at 1 is v4. What the rows show is said in the text.
chapter.figure(
    charts.dots(p50.div(p50.loc["v4"]).drop("v4"), xlabel="time / time of v4"),
    measured=chapter.rows(variant=None),
)
loop = p50.loc["128 keys, while loop"] / p50.loc["128 keys"]
chapter.predict("Written as a while loop, v5 is not faster.", loop.min(), least=0.97)

# %% [markdown]
# On half-full batches v5 takes {glue:text}`half_min:.2f` to {glue:text}`half_max:.2f` times the
# time of v4. Prologue and epilogue need at least one block, so an empty tile now fetches one and
# multiplies zeros. {doc}`v6_short_kv` ends that: it never starts an empty tile.

# %% [markdown]
# ## The surprise: waits that nobody wrote
#
# The emulator runs the source, and the source overlaps. The GPU runs what the compiler makes of it.
# MMAs, waits and activations in the consumer's loop, first in Triton's IR, then in SASS; a `while`
# loop and a loop with `num_stages=0` beside it:

# %%
as_is = studies.changed(v5_pingpong, (FOR, FOR.replace("blocks)", "blocks, num_stages=0)")))
LOOPS = {"for": v5_pingpong, "while": as_while, "num_stages=0": as_is}
built = {name: compile_check.build_rung(module) for name, module in LOOPS.items()}
ir = {name: loops.in_ir(kernel) for name, kernel in built.items()}
sass = {name: loops.in_sass(kernel, 16) for name, kernel in built.items()}
assert ir["while"] == ir["num_stages=0"] == ["S", "PV", "wait 1", "activation", "wait 0"]
assert ir["for"][:3] == ["S", "wait 0", "PV"], "the text says that S is awaited first"
chapter.glue(
    tanh=sass["for"].count("tanh"),
    **{f"overlapped_{n[:3]}": loops.overlapped(x) for n, x in sass.items()},
)

# %%
orders = [f"{where:5} {name:13} {loops.shown(steps)}"
          for where, of in (("IR", ir), ("SASS", sass)) for name, steps in of.items()]  # fmt: skip
print("\n".join(orders))

# %% tags=["remove-input"]
chapter.table(
    studies.compiled({name: (module, Config()) for name, module in LOOPS.items()}),
    modelled="compiled for sm_90a when this page was built",
)

# %% [markdown]
# In the `for` loop the IR has a `wait 0` behind each MMA. A pass of Triton makes the MMAs of `for`
# loops asynchronous; it does not ask who wrote them, and puts a wait behind each one that it cannot
# prove safe {cite}`fbtriton`. By this order nothing overlaps inside a consumer.
#
# Then ptxas moves things again. S is complete when P V begins, so the activation depends on nothing
# in flight, and ptxas deals it out between the HGMMAs of P V: {glue:text}`overlapped_for:.0f` of
# {glue:text}`tanh:.0f` `tanh` stand there. The overlap is back, made by a scheduler that knows
# nothing of it. What it cannot give back is the time in which the consumer waits for S with nothing
# else in flight. In the loops without the extra waits ptxas moves the last wait up instead, and
# only {glue:text}`overlapped_whi:.0f` and {glue:text}`overlapped_num:.0f` `tanh` are left.
#
# The `while` loop says little about the waits: it also converts its accumulator through shared
# memory in each block. `num_stages=0` changes nothing else. It was found later, and
# {doc}`v8_own_waits` is built on it.
#
# Turns fail for the same reason. The source passes the turn as soon as both MMAs are issued; in
# SASS the consumer first waits for both, and its whole activation lies within its turn.
#
# ## Exercises
#
# :::{exercise} Which one is waited for?
# :label: ex-v5-wait
#
# Replace `async_dot_wait(1, s)` in the loop by `async_dot_wait(0, s)`, then by
# `async_dot_wait(2, s)`. What does each do to the result and to the time? *(paper, then one digit)*
# :::

# %% tags=["remove-cell"]
ASK = "tlx.async_dot_wait(1, s)"
strict = studies.changed(after, (ASK, ASK.replace("1", "0")))
loose = studies.changed(v5_pingpong, (ASK, ASK.replace("1", "2")))
core = studies.tensor_core(studies.timeline(strict, long_tile, NEW))
assert core["overlapped"] == 0, "the answer says so"
chapter.glue(strict=core["busy"], loose=studies.findings(lambda: loose.forward(tile))[0])

# %% [markdown]
# :::{solution} ex-v5-wait
# :class: dropdown
#
# With 0 both MMAs must be complete before the activation begins: the result is right, the overlap
# is gone, and the tensor core is busy {glue:text}`strict:.0f` % of the time. With 2 nothing is
# waited for, and the activation reads scores that do not exist yet: "{glue:text}`loose`".
# :::
#
# :::{exercise} The other order
# :label: ex-v5-order
#
# Issue P V before S and wait for both with `async_dot_wait(0, ...)`. What can still overlap? What
# is gained instead? *(emulator, half an hour)*
# :::
#
# :::{solution} ex-v5-order
# :class: dropdown
#
# Nothing inside a consumer: both MMAs are complete before the activation begins. What is gained is
# one long stretch of tensor work instead of two short ones. Two consumers that take turns could
# then alternate, one multiplying while the other evaluates.
# :::
#
# :::{exercise} Registers
# :label: ex-v5-registers
#
# Give the consumers 200 registers, 40 fewer than they have. Which of the three loops spills?
# *(`studies.compiled`, ten minutes)*
# :::

# %% tags=["remove-cell"]
cut = studies.compiled({name: (module, Config(registers=200)) for name, module in LOOPS.items()})
spills = cut.set_index("kernel")["spilled (B)"]
assert spills["num_stages=0"] == 0 < spills["while"] < spills["for"], "the answer says so"
chapter.glue(spills=spills["for"], spills_while=spills["while"])

# %% [markdown]
# :::{solution} ex-v5-registers
# :class: dropdown
#
# The `for` loop, {glue:text}`spills:.0f` bytes: its activation is dealt out between the HGMMAs of
# P V, so S, P in both formats and the accumulator are alive together. And the `while` loop,
# {glue:text}`spills_while:.0f` bytes, which converts its accumulator. With `num_stages=0` nothing
# spills, and nothing overlaps P V either: overlap costs registers, whoever arranges it.
# :::
#
# ## Takeaways
#
# - To overlap two dependent steps, take them from different iterations. The price is registers.
# - Source, IR and SASS can tell three stories. Overlap is decided in the last: count what stands
#   between the first instruction of an MMA and the wait for it.
# - A loop with a prologue makes every empty tile pay for one block.
