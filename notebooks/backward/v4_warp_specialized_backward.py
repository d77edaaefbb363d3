# ---
# jupyter:
#   kernelspec: {name: python3, display_name: Python 3}
# measures: true
# ---

# %% [markdown]
# # v4 backward: warp specialization
#
# A profile says that no unit of the SM is busy. What is the kernel waiting for?
#
# :::{admonition} In this chapter (20 minutes)
# You will place the operands of five matmuls between registers and shared memory, tell a dependency
# chain from a throughput bound, and shorten such a chain. Back to back, v4 runs full batches of
# 1,024 tokens {glue:text}`over_v2:.2f` times as fast as v2. Six small ideas contribute a factor of
# {glue:text}`over_none:.2f` (in bursts).
# :::

# %%
from gdpa_kernels.gdpa.kernels import v4_warp_specialized_backward as v4
from gdpa_kernels.gdpa.kernels.v4_warp_specialized_backward import Config
from gdpa_lab.measuring.workloads import workload
from gdpa_lab.report import charts, studies
from gdpa_lab.report.chapter import Chapter

# %% tags=["parameters"]
mode = "replay"
device = "cpu"
data_dir = "data"

# %% tags=["remove-cell"]
V2, V4 = "v2_fused_backward", "v4_warp_specialized_backward"
BIG, LONG = "gdpa-self-full-1024", "gdpa-self-full-2048"
chapter = Chapter(f"backward/{V4}", mode=mode, device=device, data_dir=data_dir)
loops = chapter.times("measuring/power_wall", scope="sustained", direction="backward").loc[BIG]
chapter.glue(over_v2=loops[V2] / loops[V4])

# %% tags=["remove-input"]
# | name: fig-bw4-ladder
# | caption: >
# |   The backward ladder up to v4 on gdpa-self-full-1024, kernels alone, and its peers.
# | alt: >
# |   Bars of TFLOP/s. v4 is the longest; FlashAttention-4 and cuDNN follow; v2 is well behind.
chapter.ladder(V4, "backward")

# %% [markdown]
# ## What stays, what changes
#
# | | {doc}`v2 <v2_fused_backward>` | v4 |
# |:--|:--|:--|
# | work of a program | one tile of 128 keys of a head, all rows | a list of tiles; persistent |
# | who computes | all warps, on the whole tile | two consumer warp groups, 64 keys each |
# | loads | issued by a thread of those warps | a producer warp group |
# | dQ | TMA reduce-add, waited for | TMA reduce-add, sent one step later |

# %% tags=["remove-input"]
chapter.roles(V4)

# %% [markdown]
# ### Where the operands of five matmuls are
#
# A `wgmma` reads B from {term}`shared memory` and A from there or from registers, where its result
# stays. S is computed transposed, so a thread's part of P^T has the layout that the A operand of dV
# needs. The same holds for dS^T and dK. dQ sums over keys, half of which belong to the other
# consumer: for it alone dS goes through shared memory. In a step of 64 rows and 128 keys of
# head_dim 128, each matmul takes 512 cycles:
#
# | matmul | A | B | shared memory read |
# |:--|:--|:--|--:|
# | S^T = K Q^T | K, 64 keys | Q | 64 KiB |
# | dP^T = V dO^T | V, 64 keys | dO | 64 KiB |
# | dV += P^T dO | registers | dO | 32 KiB |
# | dK += dS^T Q | registers | Q | 32 KiB |
# | dQ = dS K | dS of all 128 keys | K, 64 columns | 64 KiB |
#
# Each consumer computes half of the columns of dQ. With dS stored (16 KiB), dQ written and read
# again (64) and Q and dO landing (32), 368 KiB go through shared memory. At 128 bytes a cycle that
# is 2,944 cycles, more than the matmuls' 2,560: the bound, it seems.
#
# ## No unit is busy
#
# The first v4 was profiled once, without a record ({doc}`lab notes <../../notes/gdpa_backward>`).
# The tensor pipe was active for half of the cycles of a step, the issue slots for a third. Many of
# the loop's instructions were R2UR: register to uniform register.
#
# Each consumer is a chain: issue an {term}`MMA`, wait, run 300 instructions of arithmetic, store,
# fence, issue, wait. Each of an SM's four schedulers has two warps to choose from, one of each
# consumer, and usually one of them waits. With two chains of $t$ cycles a step takes $t$, however
# idle the units are, and *every* instruction counts. Six ideas shorten the chain:
#
# **1. Fold.** With $x = s \cdot scale$ and $t = \tanh u(x)$, GELU is
# $\tfrac{scale}{2} \cdot s(1 + t)$ and its derivative $\tfrac12(1 + c)$ with
# $c = t + x\,u'(x)(1 - t^2)$. The constants $\tfrac{scale}{2}$ and $\tfrac12$ leave P and dS and
# are multiplied into dV, dK and dQ, once per tile: three of twelve floating-point instructions less
# per score. In fp16 the missing factor may overflow, so only bf16 is folded.
#
# **2. Uniform.** The number of steps is loaded from a list. The compiler cannot know that all
# threads of a warp loaded the same number, so stages and addresses derived from it live in ordinary
# registers. `wgmma` and {term}`TMA` want uniform ones: an R2UR before each MMA. A shuffle from lane
# 0 leaves the value and tells the compiler that it is uniform.
#
# **3. K ahead.** The last MMA of a tile still reads K. A second stage lets the next K be requested
# earlier. It costs one stage of Q and one of dO.
#
# **4. dQ put aside.** TMA sees what threads wrote to shared memory only after a fence. dS needs a
# fence in each step anyway, so dQ is sent after the *next* step's fence.
#
# **5. S first.** S of the next step is issued before dQ of the last one, so a single wait serves
# both. The last step computes its own S again: an MMA behind a branch costs more.
#
# **6. Late addresses.** The addresses of V, K and the staging buffer never change, so the compiler
# hoists them out of the loop. A `wgmma` takes a 64-bit descriptor for every 16 columns, too many
# for the register file. They spill, and each MMA waits for a load and an R2UR. `opaque_zero(step)`
# is `step ^ step` in inline assembly, so an address that adds it cannot be hoisted. ptxas, which
# comes later, sees the 0 and computes the descriptors in uniform registers. The loop with all six:

# %% tags=["remove-input"]
chapter.code(v4.math, "for step in tl.range(1,", "count += all_steps")

# %% [markdown]
# ## Measurement
#
# `Config` switches fold and K ahead. The other ideas are undone by replacing a piece of the source.

# %% tags=["remove-cell"]
NOT_UNIFORM = ("uniform(steps * GROUP)", "steps * GROUP")
KEPT = ("            zero = opaque_zero(step)\n", "            zero = 0\n")
FENCE = '            tlx.fence("async_shared")\n'
PUT = "            put_aside(staging[role + zero], dq)\n"
LATER = studies.piece(v4, "            if step > 1", "            dk = tlx")
LAST = studies.piece(v4, FENCE[4:] + "        if all", "        put_aside(staging[role], dq)")
NOW = LATER.replace("step > 1", "True").replace("step - 2", "step - 1")
DQ_AT_ONCE = ((LATER, ""), (LAST, ""), (PUT, PUT + FENCE + NOW))
NEXT = studies.piece(v4, "            s = scores(k.buffer[k_at + role + zero]", "            dq = ")
FIRST = studies.piece(v4, "        s = scores(k.buffer[k_at + role], q, tl.min", "        tlx.bar")
WAIT = "            s = tlx.async_dot_wait(0, s)\n"
DQ_WAIT = "            dq = tlx.async_dot_wait(0, dq)\n"
OWN = NEXT.replace("tl.minimum(now + 1, last)", "now") + WAIT
S_AFTER_DQ = ((FIRST, ""), (NEXT, ""), (WAIT + DQ_WAIT, DQ_WAIT), (KEPT[0], KEPT[0] + OWN))
ADDRESSES = (NOT_UNIFORM, KEPT)
OLD_LOOP = (*DQ_AT_ONCE, *S_AFTER_DQ, *ADDRESSES)

# %%
ALL, NONE, FOUR = "all six", "none of the six", "fold, K ahead, dQ put aside, S first"
ONE_K = {"q_stages": 3, "g_stages": 3, "k_stages": 1}
VARIANTS = {
    NONE: (OLD_LOOP, Config(fold=False, **ONE_K)),
    "fold": (OLD_LOOP, Config(**ONE_K)),
    "fold, K ahead": (OLD_LOOP, Config()),
    "fold, K ahead, dQ put aside": ((*S_AFTER_DQ, *ADDRESSES), Config()),
    FOUR: (ADDRESSES, Config()),
    "without late addresses": ((KEPT,), Config()),
    ALL: ((), Config()),
    "without uniform": ((NOT_UNIFORM,), Config()),
    "without S first": (S_AFTER_DQ, Config()),
}

modules = {name: studies.changed(v4, *changes) for name, (changes, _) in VARIANTS.items()}


@chapter.measure
def _(session):
    listed = [(V4, n, {"config": VARIANTS[n][1], "module": modules[n]}) for n in VARIANTS]
    ends = [entry for entry in listed if entry[1] in (ALL, NONE)]
    for name, entries in {BIG: listed, LONG: ends}.items():
        session.measure(workload(name), [(V2, "default", {}), *entries], direction="backward")


# %% [markdown]
# ### Predictions
#
# Written before any run on a GPU (2026-11-21), for v4 without the six ideas, at an assumed clock of
# 1.55 GHz. The difference between two lengths cancels a tile's fixed cost.

# %%
us = chapter.times(columns="variant", variant=None)
tflops = chapter.times("", "tflops", "variant", variant=None)
SMS, GHZ, tiles = 132, 1.55, workload(LONG).batch * workload(LONG).num_heads_k * 2048 // 128
step = (us.loc[LONG] - 2 * us.loc[BIG]) * 1e3 * GHZ * SMS / (tiles * 1024 / 64)

# %% tags=["remove-input"]
busy, lost = 100 * 2560 / step, us.loc[BIG] / us[ALL][BIG]
chapter.glue(tensor_all=busy[ALL], tensor_none=busy[NONE], over_none=lost[NONE], step_all=step[ALL],
             all_2048=tflops[ALL][LONG], first=100 * (lost["without S first"] - 1))  # fmt: skip
chapter.predict(
    "As first written, a step takes 3,400 to 3,900 cycles at about 1.55 GHz.",
    step[NONE], least=3400, most=3900, form=",.0f",
)  # fmt: skip
chapter.predict(
    "It reaches 480 TFLOP/s on full batches of 2,048; below 430 the design is refuted.",
    tflops[NONE][LONG], least=430, form=".0f", unit=" TFLOP/s",
)  # fmt: skip

# %% [markdown]
# By its own test the design was refuted. With the six ideas a step takes
# {glue:text}`step_all:,.0f` cycles and 2,048 tokens run at {glue:text}`all_2048:.0f` TFLOP/s.
#
# ### What each idea is worth

# %% tags=["remove-input"]
# | name: fig-bw4-ideas
# | caption: >
# |   The six ideas added one after the other, the last being late addresses; gdpa-self-full-1024.
# | alt: >
# |   Horizontal bars of TFLOP/s, v2 first, then seven variants of v4. The rate rises with each idea
# |   except S first, which lowers it; the last two raise it above all before.
NAMES = ("v2", NONE, "+ fold", "+ K ahead", "+ dQ put aside", "+ S first", "+ uniform", "v4")
shown = tflops.loc[BIG, ["default", *list(VARIANTS)[:7]]].set_axis(NAMES)
chart = charts.bars(shown, xlabel="TFLOP/s", highlight=["v4"])
chapter.figure(chart, measured=chapter.rows(variant=None))
chapter.glue(three=shown["+ dQ put aside"], four=shown["+ S first"])

# %% [markdown]
# The ideas depend on each other. *S first* took the rate from {glue:text}`three:.0f` to
# {glue:text}`four:.0f` TFLOP/s when it was added; removing it from the finished kernel costs
# {glue:text}`first:.1f` % of time. *Uniform* helped when added and is worth nothing now. The
# compiler's output shows why:

# %% tags=["remove-input"]
built = {n: studies.build_backward(modules[n]) for n in ("fold, K ahead", FOUR, ALL)}
facts = studies.facts(built, ["R2UR"])
two, four, six = facts["R2UR"]
assert four > two > six and facts["spilled (B)"].iloc[-1] == 0, "the text says so"
chapter.table(facts, compiled="compiled for sm_90a when this page was built")

# %% [markdown]
# *S first* brings more addresses into the loop, and with them R2UR and {term}`spills <spill>`. Late
# addresses take the spills and most R2UR away, with or without *uniform*.
#
# ## Is it right?
#
# A ragged batch with several tiles of keys, in the emulator, against fp64. The emulator does not
# model the fence: there *dQ put aside* rests on the check before each measurement.

# %%
ragged = studies.batch((0, 1, 63, 130), (3, 70, 129, 257), heads=2)
for name in (ALL, NONE):
    found = studies.backward(modules[name], ragged, VARIANTS[name][1], multiprocessors=2)
    errors = studies.compare_gradients(found.gradients, ragged)["% of allowed"]
    print(f"{name}: largest error {errors.max():.0f} % of what is allowed")

# %% [markdown]
# ## The surprise: a bound that no count contains
#
# The prediction counted MMAs, instructions and bytes and took the largest: a {term}`roofline` of
# units. It holds when enough independent chains feed the units, and two do not. Inside a chain the
# terms *add*. By the measured times the matmuls take {glue:text}`tensor_none:.0f` % of a step
# without the ideas and {glue:text}`tensor_all:.0f` % with them. A third chain would be a third
# consumer, which does not fit (second exercise). {doc}`v5_short_kv_backward` pays less for dQ.
#
# ## Exercises
#
# :::{exercise} Fold hardswish
# :label: ex-bw4-fold
#
# Hardswish is $x \cdot \min(\max(x + 3, 0), 6) / 6$. Which factor of value and derivative can be
# folded? Why would ReLU gain next to nothing? *(paper, ten minutes)*
# :::
#
# :::{solution} ex-bw4-fold
# :class: dropdown
#
# With $m = \min(\max(x + 3, 0), 6)$ the value is $\tfrac16 x m$; the derivative is
# $\tfrac16 (m + x)$ between -3 and 3 and $\tfrac16 m$ beyond. The common $\tfrac16$ can go to the
# sums. ReLU has no constant: only the scale could be left out, one instruction.
# :::
#
# :::{exercise} A third consumer
# :label: ex-bw4-third
#
# Suppose three consumers of 64 keys and a producer with 24 registers a thread. How many registers
# can a thread of a consumer have? What does it need? *(paper, five minutes)*
# :::
#
# :::{solution} ex-bw4-third
# :class: dropdown
#
# 65,536 registers less 128 x 24, for 384 threads: 162, in steps of eight 160. dK and dV take 128,
# one tile of scores in fp32 another 32. Nothing is left for addresses.
# :::
#
# :::{exercise} The useless MMA
# :label: ex-bw4-useless
#
# Put the S of the next step behind `if now < last` and compile it. What do you expect of its
# registers? *(`studies.changed`, `studies.build_backward`, `studies.facts`; ten minutes)*
# :::
#
# :::{solution} ex-bw4-useless
# :class: dropdown
#
# The result of an MMA behind a branch exists on one path, and the wait for it is on both, so the
# compiler has to materialise the accumulator where they meet. ptxas reports spills again.
# :::
#
# ## Takeaways
#
# - Count units first. If none is busy, look for a dependency chain and count how many there are.
# - In a chain every instruction counts, those that move addresses too.
# - An optimisation can be worth less than nothing until another one is there.
