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
# :::{admonition} In this chapter (25 minutes)
# You will place the operands of five matmuls between registers and shared memory, tell a dependency
# chain from a throughput bound, and shorten such a chain. On the H200, v4 runs full batches of
# 1,024 tokens {glue:text}`over_v2:.2f` times as fast as v2; six small ideas are
# account for a factor of {glue:text}`over_none:.2f`.
# :::

# %%
from collections import Counter

from gdpa_kernels.device import rows
from gdpa_kernels.gdpa import v4_warp_specialized_backward as v4
from gdpa_kernels.gdpa.v4_warp_specialized_backward import Config
from gdpa_kernels.measuring import compile_check
from gdpa_kernels.measuring.workload import workload
from gdpa_kernels.report import charts, studies
from gdpa_kernels.report.chapter import Chapter

# %% tags=["parameters"]
mode = "replay"
device = "cpu"
data_dir = "data"

# %% tags=["remove-cell"]
V2, V4, BIG = "v2_fused_backward", "v4_warp_specialized_backward", "gdpa-self-full-1024"
chapter = Chapter(f"backward/{V4}", mode=mode, device=device, data_dir=data_dir)
results = chapter.times("backward/results", direction="backward").loc[BIG]
chapter.glue(over_v2=results[V2] / results[V4])

# %% tags=["remove-input"]
# | name: fig-bw4-ladder
# | caption: >
# |   The backward ladder up to v4 on gdpa-self-full-1024, kernels alone, and its peers.
# | alt: >
# |   Horizontal bars of TFLOP/s. v4 is the longest; FlashAttention-4 and cuDNN follow; v2 is well
# |   behind. All end left of the dashed line of the roofline.
chapter.ladder(V4, BIG, direction="backward")

# %% [markdown]
# ## What stays, what changes
#
# | | {doc}`v2 <v2_fused_backward>` | v4 |
# |:--|:--|:--|
# | work of a program | one tile of 128 keys of a head, all rows | a list of tiles; persistent |
# | who computes | all warps, on the whole tile | two consumer warp groups, 64 keys each |
# | loads | issued by a thread of those warps | a producer warp group |
# | S and dP | [keys, rows] | the same |
# | dQ | TMA reduce-add, waited for | TMA reduce-add, sent one step later |
# | FLOPs, bytes | | the same |
# | forward rungs that do so | | {doc}`v4 <../forward/v4_warp_specialized>` to v8 |

# %% tags=["remove-input"]
chapter.roles(V4, "gdpa_backward")

# %% [markdown]
# ### Where the operands of five matmuls are
#
# A `wgmma` reads B from shared memory and A from there or from registers, where its result stays. S
# is computed transposed, so a thread's part of P^T has the layout that the A operand of dV needs.
# The same holds for dS^T and dK. dQ sums over keys, and half of them belong to the other consumer:
# for dQ alone dS goes through shared memory. A step is 64 rows and 128 keys of head_dim 128:
#
# | matmul | A | B | cycles, both consumers | shared memory read |
# |:--|:--|:--|--:|--:|
# | S^T = K Q^T | K, 64 keys | Q | 512 | 64 KB |
# | dP^T = V dO^T | V, 64 keys | dO | 512 | 64 KB |
# | dV += P^T dO | registers | dO | 512 | 32 KB |
# | dK += dS^T Q | registers | Q | 512 | 32 KB |
# | dQ = dS K | dS of all 128 keys | K, 64 columns | 512 | 64 KB |
#
# Each consumer computes half of the columns of dQ, so that one addition per tile is enough. With dS
# stored (16 KB), dQ written and read again (64) and Q and dO landing (32), 368 KB pass shared
# memory. At 128 bytes a cycle that is 2,944 cycles, more than the matmuls' 2,560: the bound, it
# seems.
#
# ## A timeline

# %%
step_by_step = studies.backward(v4, studies.batch((512,), (128,)), trace=True, multiprocessors=1)
timeline = step_by_step.reports["backward_kernel"].timeline
done = [e.end for e in timeline.events if e.kind == "mma" and e.name.startswith("registers @ q")]
chapter.glue(busy_model=studies.tensor_core(timeline)["busy"], step_model=(done[-3] - done[3]) / 5)

# %% tags=["remove-input"]
# | name: fig-bw4-timeline
# | caption: >
# |   v4 in the middle of a tile of 128 keys: two steps of 64 rows. Modelled cycles.
# | alt: >
# |   Five lanes. load waits for free stages and asks for Q and dO. The math roles alternate: while
# |   one evaluates the activation, MMAs of the other run. The tensor core has almost no gap.
chapter.figure(timeline.svg(start=done[5], end=done[9], width=760), emulated="v4, one program")

# %% [markdown]
# The consumers fall out of step by themselves: one evaluates while the other's MMAs run. In the
# model a step takes {glue:text}`step_model:,.0f` cycles and the tensor core is busy for
# {glue:text}`busy_model:.0f` % of the tile. The model has no issue slots and no bandwidth of shared
# memory: it shows that the barriers permit the overlap, and nothing of its price.
#
# ## No unit is busy
#
# The first v4 was profiled once (2026-11-21; Nsight Compute, full batches of 1,024; without a
# record). A step took about 5,200 cycles, and the tensor pipe was active for 49.5 % of them, the
# issue slots for 33 %. A consumer spent 31 % of its loop in activation and derivative, 13 % waiting
# for MMAs, 12 % on fences and writing dQ to shared memory. Of the loop's 805 instructions 62 were
# R2UR, which copy a register to a uniform register.
#
# Each consumer is a chain: issue an MMA, wait, run 300 instructions of arithmetic, store, fence,
# issue, wait. Each of an SM's four schedulers has two warps to choose from, one of each consumer,
# and mostly one of them waits. With two chains of $t$ cycles a step takes $t$, however idle the
# units are, and *every* instruction counts. Six ideas follow, all of one kind: a shorter chain.
#
# **1. Fold.** With $x = s \cdot scale$ and $t = \tanh u(x)$, GELU is
# $\tfrac{scale}{2} \cdot s(1 + t)$ and its derivative $\tfrac12(1 + c)$ with
# $c = t + x\,u'(x)(1 - t^2)$. The constants $\tfrac{scale}{2}$ and $\tfrac12$ are the same for all
# scores. They leave P and dS and are multiplied into dV, dK and dQ, once per tile instead of once
# per score. That takes three of twelve floating-point instructions off a score. In fp16 the missing
# factor may overflow, so only bf16 is folded.
#
# **2. Uniform.** The number of steps is loaded from a list. The compiler cannot know that all
# threads of a warp loaded the same number, so everything derived from it, stages and addresses,
# lives in ordinary registers. `wgmma` and TMA want uniform registers: an R2UR before each MMA. A
# shuffle from lane 0 changes no value; it tells the compiler that there is only one. To undo it:

# %%
NOT_UNIFORM = ("        steps = uniform(steps)\n", "")

# %% [markdown]
# **3. K ahead.** K is read by the first MMA of a tile and by the last. With one stage the next K
# cannot be requested before the last dQ is done. A second stage costs one of Q and one of dO.
#
# **4. dQ put aside.** TMA sees what threads wrote to shared memory only behind a fence. dS needs a
# fence in each step anyway, so dQ is written and sent behind the *next* step's fence.
#
# **5. S first.** S of the next step is issued before dQ of the last one, so a single wait serves
# both. The last step has no next S and computes its own again: an MMA behind a branch costs more.
#
# **6. Late addresses.** The addresses of V, K and the staging buffer are the same in all steps, so
# the compiler hoists them out of the loop. A `wgmma` takes an address as a 64-bit descriptor, one
# for every 16 columns. There are more of these than registers: they are spilled, and each MMA waits
# for a load and an R2UR. What the compiler cannot know to be invariant it cannot hoist:

# %% tags=["remove-input"]
chapter.code(rows.nothing, "return")

# %%
KEPT = ("            zero = nothing(step)\n", "            zero = 0\n")

# %% [markdown]
# ptxas, which comes later, sees that `xor` of a number with itself is 0 and computes the
# descriptors in uniform registers. The idea comes from {doc}`the next chapter
# <v5_short_kv_backward>`, where it decides. The loop with all six:

# %% tags=["remove-input"]
chapter.code(v4.math, "for step in tl.range(1,", "count += steps")

# %% [markdown]
# ## Measurement
#
# `Config` switches fold and K ahead. The other ideas are undone by replacing a piece of the source.

# %% tags=["hide-input"]
FENCE = '            tlx.fence("async_shared")\n'
PUT = "            put_aside(staging[role + zero], dq)\n"
LATER = studies.piece(v4, "            if step > 1", "            dk = tlx")
LAST = studies.piece(v4, FENCE[4:] + "        if steps", "        put_aside(staging[role], dq)")
NOW = LATER.replace("step > 1", "True").replace("step - 2", "step - 1")
DQ_AT_ONCE = ((LATER, ""), (LAST, ""), (PUT, PUT + FENCE + NOW))
NEXT = studies.piece(
    v4, "            s = scores(k.buffer[k_at + role + zero]", "            dq = dq_"
)
FIRST = studies.piece(v4, "        s = scores(k.buffer[k_at + role], q, tl.min", "        tlx.bar")
WAIT = "            s = tlx.async_dot_wait(0, s)\n"
DQ_WAIT = "            dq = tlx.async_dot_wait(0, dq)\n"
OWN = NEXT.replace("tl.minimum(now + 1, last)", "now") + WAIT
S_AFTER_DQ = (
    (FIRST, ""), (NEXT, ""), (WAIT + DQ_WAIT, DQ_WAIT), (KEPT[0], KEPT[0] + OWN),
)  # fmt: skip

# %%
ALL, NONE = "all six", "none of the six"
FOUR = "fold, K ahead, dQ put aside, S first"
LATE = "without late addresses"
ONE_K = {"q_stages": 3, "g_stages": 3, "k_stages": 1}
OLD_LOOP = (*DQ_AT_ONCE, *S_AFTER_DQ, NOT_UNIFORM, KEPT)
VARIANTS = {
    NONE: (OLD_LOOP, Config(fold=False, **ONE_K)),
    "fold": (OLD_LOOP, Config(**ONE_K)),
    "fold, K ahead": (OLD_LOOP, Config()),
    "fold, K ahead, dQ put aside": ((*S_AFTER_DQ, NOT_UNIFORM, KEPT), Config()),
    FOUR: ((NOT_UNIFORM, KEPT), Config()),
    LATE: ((KEPT,), Config()),
    ALL: ((), Config()),
    "without fold": ((), Config(fold=False)),
    "without uniform": ((NOT_UNIFORM,), Config()),
    "without K ahead": ((), Config(**ONE_K)),
    "without dQ put aside": (DQ_AT_ONCE, Config()),
    "without S first": (S_AFTER_DQ, Config()),
}
LADDER = {
    NONE: "v4, none of the six", "fold": "+ fold", "fold, K ahead": "+ K ahead",
    "fold, K ahead, dQ put aside": "+ dQ put aside", FOUR: "+ S first", LATE: "+ uniform",
    ALL: "+ late addresses: v4",
}  # fmt: skip
modules = {name: studies.changed(v4, *changes) for name, (changes, _) in VARIANTS.items()}


@chapter.measure
def _(session):
    listed = [(V4, n, {"config": VARIANTS[n][1], "module": modules[n]}) for n in VARIANTS]
    ends = [entry for entry in listed if entry[1] in (ALL, NONE)]
    plan = {BIG: listed, "gdpa-self-half-jagged-512": listed}
    plan |= {f"gdpa-self-full-{n}": ends for n in (256, 512, 2048)}
    for name, entries in plan.items():
        session.measure(workload(name), [(V2, "default", {}), *entries], direction="backward")


# %% [markdown]
# ### Predictions
#
# Written before any run on a GPU (2026-11-21), for v4 without the six ideas. The time of a step
# comes from two lengths: whatever a tile takes besides its steps, and what zero fill and rounding
# of dQ take, cancels between them. The clock of 1.55 GHz is assumed.

# %%
us = chapter.times(columns="variant", variant=None)
tflops = chapter.times("", "tflops", "variant", variant=None)
LONG, HALF, SMS, GHZ = "gdpa-self-full-2048", "gdpa-self-half-jagged-512", 132, 1.55
tiles = workload(LONG).batch * workload(LONG).num_heads_k * 2048 // 128
step = (us.loc[LONG] - 2 * us.loc[BIG]) * 1e3 * GHZ * SMS / (tiles * 1024 / 64)

# %% tags=["remove-cell"]
lost, busy = us[NONE][BIG] / us[ALL][BIG], 100 * 2560 / step
chapter.glue(step_all=step[ALL], tensor_all=busy[ALL], tensor_none=busy[NONE], over_none=lost,
             all_2048=tflops[ALL][LONG], all_lost=100 * (lost - 1))  # fmt: skip

# %% tags=["remove-input"]
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
# {glue:text}`step_all:,.0f` cycles and 2,048 tokens run at {glue:text}`all_2048:.0f` TFLOP/s. This
# is not the record of the first figure: compare bars within one figure.
#
# ### What each idea is worth

# %% tags=["remove-input"]
# | name: fig-bw4-ideas
# | caption: >
# |   From none of the six ideas to all of them, added one after the other; gdpa-self-full-1024.
# | alt: >
# |   Horizontal bars of TFLOP/s, v2 first, then seven variants of v4. The rate rises with each idea
# |   except S first, which lowers it; the last two raise it above all before.
shown = tflops.loc[BIG, ["default", *LADDER]].rename({"default": V2, ALL: V4})
chart = charts.bars(
    shown, xlabel="TFLOP/s", highlight=[V4], names=LADDER | {V2: "v2", V4: LADDER[ALL]}
)
chapter.figure(chart, measured=chapter.rows(variant=None))

# %% tags=["remove-input"]
without = [name for name in VARIANTS if name.startswith("without")]
alone = 100 * (us[without].div(us[ALL], axis=0) - 1).loc[[BIG, HALF]].T
chapter.glue(three=shown.iloc[4], four=shown.iloc[5], sum_alone=alone[BIG].sum(),
             first_alone=alone.loc["without S first", BIG])  # fmt: skip
chapter.table(alone.rename_axis(index="variant", columns=None).round(1).reset_index(),
              measured=chapter.rows(variant=without))  # fmt: skip

# %% [markdown]
# The table holds the extra time, in %, without one of the ideas. On the long batch these add up to
# {glue:text}`sum_alone:.0f` %, while taking all six away costs {glue:text}`all_lost:.0f` %: the
# ideas depend on each other. *S first* took the rate from {glue:text}`three:.0f` to
# {glue:text}`four:.0f` TFLOP/s when it came, and taking it away from the finished kernel costs
# {glue:text}`first_alone:.1f` % of time. *Uniform* helped when it came and is worth nothing now.
# The compiler's output shows why, for the loop of one consumer:

# %%
built = {n: studies.build_backward(modules[n]) for n in ("fold, K ahead", FOUR, ALL)}
facts = studies.facts(built).set_index("kernel")
for name, kernel in built.items():
    loop = Counter(compile_check.shortest_loop(kernel, "MUFU", 64 * 64 // 128))
    facts.loc[name, ["loop", "R2UR"]] = loop.total(), loop["R2UR"]

# %% tags=["remove-input"]
two, four, six = facts["R2UR"]
assert four > 2 * two and six < two / 2 and facts["spilled (B)"][ALL] == 0, "the text says so"
chapter.table(facts.reset_index(), modelled="compiled for sm_90a when this page was built")

# %% [markdown]
# *S first* brings more addresses into the loop, and with them R2UR and spills. *Uniform* takes most
# of the R2UR away again, late addresses all of both, with or without *uniform*.
#
# ## Is it right?
#
# A ragged batch with several tiles of keys, in the emulator, against fp64. Then three mistakes that
# the ideas invite: the S of a step that does not exist, dQ over dQ that TMA has not read, and dS
# over dS that the other consumer has not read.

# %%
ragged = studies.batch((0, 1, 63, 130), (3, 70, 129, 257), heads=2)
for name in (ALL, NONE):
    found = studies.backward(modules[name], ragged, VARIANTS[name][1], multiprocessors=2)
    errors = studies.compare_gradients(found.gradients, ragged)["% of allowed"]
    print(f"{name}: largest error {errors.max():.0f} % of what is allowed")

READ = "    tlx.async_descriptor_store_wait(0)\n"
STORE = "    tlx.local_store(buffer, x)"
FREE = "    tlx.barrier_wait(ds.empty[at], ((count // 2) & 1) ^ 1)\n"
MISTAKES = (("tl.minimum(now + 1, last)", "now + 1"), (READ + STORE, STORE), (FREE, ""))
small = studies.batch((192,), (512,))
for mistake in MISTAKES:
    wrong = studies.changed(v4, mistake)
    says = studies.findings(lambda to=wrong: to.backward(studies.gradient(small), small))
    print(says[0].splitlines()[0])

# %% [markdown]
# Each is found. The emulator does not check the fence itself: it takes
# for granted that TMA sees what was written before it. *dQ put aside* rests on that fence, and on
# the check of results that precedes each measurement on the GPU.
#
# ## The surprise: a bound that no count contains
#
# The prediction counted MMAs, instructions and bytes and took the largest: a roofline of units. It
# holds when enough independent chains feed the units, and two do not. Inside a chain the terms
# *add*. By the measured times the matmuls take {glue:text}`tensor_none:.0f` % of a step without
# the ideas and {glue:text}`tensor_all:.0f` % with them; no unit can be blamed for the rest. A third
# chain would be a third consumer, which does not fit (second exercise). With 256 keys or fewer the
# price of dQ remains as well: {doc}`v5_short_kv_backward`.
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
# sums, and with it one power of the scale in the value. ReLU has no constant: only the scale could
# be left out, one instruction.
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
# 65,536 registers less 128 x 24, for 384 threads: 162, in steps of eight 160. dK and dV take 128
# of them, one tile of scores in fp32 another 32, and S or its slope, dP and dQ are never alone.
# Nothing is left for addresses. Consumers of 32 keys do not exist, since a `wgmma` has 64 rows.
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
# The result of an MMA in flight behind a branch exists on one path only, and the wait for it stands
# on both, so the compiler has to make the accumulator whole where the paths meet. ptxas reports
# spills again, where v4 has none.
# :::
#
# ## Takeaways
#
# - Count units first. If none is busy, look for a dependency chain and count how many there are.
# - In a chain every instruction counts, those that move addresses too. Tell the compiler what it
#   cannot see: that all threads loaded the same number.
# - An optimisation can be worth less than nothing until another one is there. Add ideas one by one,
#   then take them away one by one.
