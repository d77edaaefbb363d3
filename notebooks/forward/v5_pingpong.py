# ---
# jupyter:
#   kernelspec: {display_name: Python 3, language: python, name: python3}
# measures: true
# ---

# %% [markdown]
# # Forward v5: ping-pong
#
# Can a warp group evaluate the activation while its own MMA runs?
#
# :::{admonition} In this chapter (35 minutes)
# You will software-pipeline a consumer loop by half an iteration, read in the emulator what that
# hides, and find in the SASS what the compiler made of it. On full batches forward v5 is
# {glue:text}`faster_min:.0f` to {glue:text}`faster_max:.0f` % faster than forward v4 in bursts of
# {doc}`the results <results>`, and {glue:text}`steady:.0f` % faster back to back at 1,024 tokens.
# :::

# %% tags=["hide-input"]
from _lib import drawings, loops, studies
from gdpa_kernels.gdpa.device import activations
from gdpa_kernels.gdpa.ladder import v4_warp_specialized, v5_pingpong
from gdpa_kernels.gdpa.ladder.v5_pingpong import Config
from gdpa_lab.measuring import compile_check
from gdpa_lab.measuring.workloads import workload
from gdpa_lab.report import charts
from gdpa_lab.report.chapter import Chapter

# %% tags=["parameters"]
mode = "replay"
device = "cpu"
data_dir = "data"

# %% tags=["remove-cell"]
chapter = Chapter("forward/v5_pingpong", mode=mode, device=device, data_dir=data_dir)
V4, V5 = "v4_warp_specialized", "v5_pingpong"
us = chapter.times("forward/results", together=[V4, V5], direction="forward")
ratio = us[V5] / us[V4]
full = ratio[[f"gdpa-self-full-{n}" for n in (256, 512, 1024, 2048)]]
half = ratio["gdpa-self-half-jagged-256"]
assert half > 1, "the text: empty tiles cost v5 time"
steady = chapter.rows(
    "forward/results", scope="sustained", workload="gdpa-self-full-1024", direction="forward"
).set_index("impl")["time_us_p50"]
assert steady["cudnn"] < steady[V5] < steady[[V4, "v2_tma"]].min(), "the caption"
chapter.glue(
    faster_min=100 * (1 / full.max() - 1), faster_max=100 * (1 / full.min() - 1),
    steady=100 * (steady[V4] / steady[V5] - 1), half=100 * (half - 1),
)  # fmt: skip

# %% tags=["remove-input"]
# | name: fig-v5-ladder
# | caption: >
# |   **Forward v5 is a little faster than forward v4 and forward v2, and cuDNN is still ahead.**
# |   Time of each rung on gdpa-self-full-1024, back to back; each tick leads to its chapter.
# |   Dashed: libraries.
# | alt: >
# |   An axis of milliseconds with a tick for each rung and dashed lines for the libraries. v5
# |   lies a little left of v4 and v2, and cuDNN left of it.
chapter.ladder(V5)

# %% [markdown]
# ## What changes
#
# In {doc}`forward v4 <v4_warp_specialized>` a consumer warp group issues an MMA and waits for it.
# It need not wait, since `wgmma` is asynchronous. P V of a block needs that block's activation, but
# not that of the *next* block, whose scores may already exist. So the loop is shifted by half an
# iteration. FlashAttention-3 hides its softmax in the same way {cite}`shah2024flashattention3`.
#
# | | forward v4 | forward v5 |
# |:--|:--|:--|
# | one iteration | S, activation, P V of block j | S of block j + 1, P V of block j, activation |
# | alive beside the accumulator | S, then P | S and P |
# | K and V | released after their own MMA | the same; V is held for one block longer |
#
# Roles and barriers stay. The loop of a consumer:

# %% tags=["remove-input"]
chapter.code(v5_pingpong.math, "for block in", "store_rows")

# %% [markdown]
# `async_dot_wait(1, s)` is what PTX calls `wait_group 1`: it returns when at most one
# {term}`commit group` is still in flight. Groups complete in order, so S is ready and P V may still
# run. Before the loop stands a prologue, the first block's S and activation; after it an epilogue,
# the last block's P V.
#
# P waits in fp32 and is converted just before its {term}`MMA`, because registers that a `wgmma`
# reads must not be written while another one runs. S, P in both formats and the {term}`accumulator`
# take 224 registers, where an even share is 168. So {ref}`moving registers <rule-registers>` pays
# now.
#
# An option adds the *turns* of FlashAttention-3's ping-pong schedule, after which the file is
# named. With a pair of {term}`named barriers <named barrier>` (`take_turn`, `pass_turn`) one
# consumer issues its MMAs while the other evaluates.
#
# ## Prediction
#
# A consumer owns 64 rows. Per block of 128 keys, each of its two MMAs takes 512 cycles if it has
# the tensor core to itself. Its activation takes at least {glue:text}`least:.0f` cycles, those of
# {term}`MUFU`, and at most {glue:text}`most:.0f`, if MUFU and the FMA pipe never overlap. In v4 the
# three add up. In v5 the longer of P V and activation counts. For one consumer alone:

# %% tags=["hide-input"]
fp32, mufu = activations.INSTRUCTIONS["gelu_tanh"]
scores, mma = 64 * 128, 512  # of a block; cycles of S, or of P V
least = mufu * scores / 16
most = least + (fp32 + mufu + 0.5) * scores / 128
for activation in (least, most):
    v4, v5 = 2 * mma + activation, mma + max(mma, activation)
    print(f"activation {activation:.0f}: v4 {v4:,.0f}, v5 {v5:,.0f} cycles, {v4 / v5:.2f} times")

# %% tags=["remove-cell"]
chapter.glue(least=least, most=most)
chapter.predict(
    "On no full batch is v5 slower than v4 (3 % for noise).", full, most=1.03, shown=False
)

# %% [markdown]
# The kernel must gain less: two consumers out of step fill some gaps in v4 already.
#
# ## A timeline

# %% tags=["remove-cell"]
ALONE = ("MATH_ROLES = tl.constexpr(2)", "MATH_ROLES = tl.constexpr(1)")
v4_alone, after = studies.changed(v4_warp_specialized, ALONE), studies.changed(v5_pingpong, ALONE)
OLD, NEW = v4_warp_specialized.Config(BLOCK_N=64, num_stages=4), Config(BLOCK_N=64, num_stages=4)
tile = studies.batch((64,), (256,))
pair = studies.timeline(v4_alone, tile, OLD), studies.timeline(after, tile, NEW)
ends = [max(event.end for event in trace.events) for trace in pair]
assert ends[1] < ends[0], "the text: v5 ends earlier"
chapter.glue(saved=ends[0] - ends[1], saved_share=100 * (1 - ends[1] / ends[0]))

# %% tags=["remove-input"]
# | name: fig-v5-alone
# | caption: >
# |   **In forward v4 the tensor core waits for every activation; in forward v5 the activation runs
# |   under P V.** One consumer, 64 rows, 256 keys in four blocks. Shaded: the tensor core is idle.
# |   Modelled cycles.
# | alt: >
# |   Two timelines on one axis, each with lanes for load, math, TMA and tensor core. In v4 the
# |   tensor core has a shaded gap between each S and the P V that follows, in which math computes.
# |   In v5 it runs S and P V without a gap between them from the second block on, and the tile ends
# |   earlier.
chapter.figure(
    drawings.timelines({"Forward v4": pair[0], "Forward v5": pair[1]}),
    emulated="forward v4 and v5 with one consumer",
)

# %% tags=["remove-input"]
studies.stepper(
    {"forward v4": pair[0], "forward v5": pair[1]}, "forward-v5_pingpong-steps",
    title="Forward v4 and v5 with one consumer, step by step",
)  # fmt: skip

# %% [markdown]
# The tile ends {glue:text}`saved:,.0f` cycles earlier, which is {glue:text}`saved_share:.0f` % of
# it.
#
# ## Measurement
#
# We also measure the kernel with turns, and with its loop written as `while`, for a reason that the
# next section gives:

# %% tags=["remove-cell"]
FOR = "    for block in tl.range(1, blocks):\n"
LAST = "        tlx.barrier_arrive(v.empty[v_stage])\n"
WHILE = "    block = 1\n    while block < blocks:\n"
as_while = studies.changed(v5_pingpong, (FOR, WHILE), (LAST, LAST + "        block += 1\n"))
VARIANTS = {
    "128 keys": {"module": v5_pingpong, "config": Config()},
    "128 keys, turns": {"module": v5_pingpong, "config": Config(turns=True)},
    "128 keys, while loop": {"module": as_while, "config": Config()},
}


@chapter.measure
def _(session):
    listed = [(V5, name, options) for name, options in VARIANTS.items()]
    for name in ("gdpa-self-full-512", "gdpa-self-full-2048", "gdpa-cross-full-1024"):
        session.measure(workload(name), [(V4, "v4", {}), *listed])


# %% tags=["remove-input"]
# | name: fig-v5-variants
# | caption: >
# |   **As it is, forward v5 beats forward v4; with turns or as a `while` loop it loses.** Time over
# |   that of forward v4, in bursts.
# | alt: >
# |   A dot plot, three marks a row, one for each workload. The line at 1 is v4. v5 as it is lies
# |   left of the line; with turns and as a while loop it lies right of it.
p50 = chapter.times(columns="variant", variant=None).T
chapter.figure(
    charts.dots(
        p50.div(p50.loc["v4"]).loc[list(VARIANTS)], xlabel="time / time of forward v4, in bursts"
    ),
    measured=chapter.rows(variant=None),
)
turns, loop = (p50.loc[f"128 keys, {x}"] / p50.loc["128 keys"] for x in ("turns", "while loop"))
chapter.predict("Turns save 3 % or more of v5's time.", turns, most=0.97)
chapter.predict("Written as a while loop, v5 is not faster than as it is.", loop, least=0.97)

# %% tags=["remove-input"]
chapter.predictions()

# %% [markdown]
# On half-full batches of 256 tokens v5 takes {glue:text}`half:.0f` % more time than v4. Prologue
# and {term}`epilogue` need a block, so an empty tile now multiplies zeros, until
# {doc}`v6_short_kv`.
#
# ## The surprise: the compiler adds waits to the loop
#
# The emulator runs the source; the GPU runs what the compiler makes of it. The consumer's loop in
# Triton's IR and in {term}`SASS`, as it is and with the loop option `num_stages=0`:

# %% tags=["hide-input"]
as_is = studies.changed(v5_pingpong, (FOR, FOR.replace("blocks)", "blocks, num_stages=0)")))
LOOPS = {"v5": v5_pingpong, "num_stages=0": as_is}
built = {name: compile_check.build_rung(module) for name, module in LOOPS.items()}
ir = {name: loops.in_ir(kernel) for name, kernel in built.items()}
sass = {name: loops.in_sass(kernel, 16) for name, kernel in built.items()}
for name in LOOPS:
    print(f"{name}\n  IR:   {loops.shown(ir[name])}\n  SASS: {loops.shown(sass[name])}")

# %% tags=["remove-cell"]
assert ir["v5"][:4] == ["S", "wait 0", "PV", "wait 0"], "the text: a wait behind each MMA"
assert ir["num_stages=0"] == ["S", "PV", "wait 1", "activation", "wait 0"], "the text: as written"
tanh, under_v5 = sass["v5"].count("tanh"), loops.overlapped(sass["v5"])
chapter.glue(tanh=tanh, under_v5=under_v5)

# %% [markdown]
# In the IR of v5 a `wait 0` follows each MMA, so nothing overlaps inside a consumer: a pass of
# Triton adds one wherever it cannot prove that none is needed. ptxas then interleaves the
# activation with the HGMMAs of P V, {glue:text}`under_v5:.0f` of {glue:text}`tanh:.0f` `tanh`, so
# the overlap is back, but the consumer still waits for S with nothing else in flight.
# {doc}`v8_own_waits` explains the pass and measures the loop without it.
#
# Turns fail for the same reason. The source passes the turn as soon as both MMAs are issued. In
# SASS the consumer waits for both first, so its whole activation lies within its turn.

# %% tags=["remove-input"]
chapter.profile("v4_warp_specialized", "v5_pingpong", workload="gdpa-self-full-512")

# %% [markdown]
# ## Exercises
#
# {doc}`Write it </exercises>`: `make exercise NAME=pingpong`.
#
# :::{exercise} Which one is waited for?
# :label: ex-v5-wait
#
# Replace `async_dot_wait(1, s)` in the loop with `async_dot_wait(0, s)`, then with
# `async_dot_wait(2, s)`. How do result and time change? *(paper, then the emulator)*
# :::

# %% tags=["remove-cell"]
ASK = "tlx.async_dot_wait(1, s)"
strict, loose = (studies.changed(after, (ASK, ASK.replace("1", x))) for x in "02")
assert studies.tensor_core(studies.timeline(strict, tile, NEW))["overlapped"] == 0, "as in v4"
chapter.glue(loose=studies.findings(lambda: loose.forward(tile, config=NEW))[0])

# %% [markdown]
# :::{solution} ex-v5-wait
# :class: dropdown
#
# With 0 both MMAs must be complete before the activation begins: the result is right, and the
# overlap is gone. With 2 nothing is waited for, and the activation reads scores that do not exist
# yet: "{glue:text}`loose`".
# :::
#
# :::{exercise} The other order
# :label: ex-v5-order
#
# Issue P V before S. What is wrong if the waits stay as they are? If the consumer waits for both,
# what can still overlap, and what is gained instead? *(paper, then the emulator)*
# :::
#
# :::{solution} ex-v5-order
# :class: dropdown
#
# `wait_group 1` lets the newest group run on. That is now S, and the activation reads it too early.
# With a wait for both, nothing overlaps inside a consumer. What is gained is one long stretch of
# tensor work instead of two short ones. Two consumers that take turns could alternate, one
# multiplying while the other evaluates ({doc}`planning` computes the period).
# :::
#
# :::{exercise} Registers
# :label: ex-v5-registers
#
# Give the consumers of v5 200 registers, then 168, an even share. What does ptxas do in each case?
# What with 200 registers and `num_stages=0`? *(compiler, ten minutes, no GPU)*
# :::

# %% tags=["remove-cell"]
asked = {"200": (V5, Config(registers=200)), "even": (V5, Config(registers=168)),
         "as is": (as_is, Config(registers=200))}  # fmt: skip
cut = studies.compiled(asked).set_index("kernel")
assert list(cut["serialised"]) == ["no", "yes", "no"] and cut["spilled (B)"]["as is"] == 0
chapter.glue(spilled=cut["spilled (B)"]["200"], even=cut["spilled (B)"]["even"])

# %% [markdown]
# :::{solution} ex-v5-registers
# :class: dropdown
#
# With 200 it {term}`spills <spill>` {glue:text}`spilled:.0f` bytes: it interleaves the activation
# with the HGMMAs of P V, so S, P in both formats and the accumulator are alive together. With 168
# it spills {glue:text}`even:.0f` bytes and serializes the MMAs, one HGMMA and one wait after
# another. With `num_stages=0` nothing spills, because most of the activation comes after P V.
# Overlap costs registers, whoever arranges it.
# :::
#
# ## Takeaways
#
# - To overlap two dependent steps, take them from different iterations. The price is registers.
# - SASS decides: count what stands between the first instruction of an MMA and the wait for it.
# - A loop with a prologue makes every empty tile pay for one block.
