# ---
# jupyter:
#   kernelspec: {display_name: Python 3, language: python, name: python3}
# measures: true
# ---

# %% [markdown]
# # Backward v4: warp-specialized
#
# A profile says that no unit of the SM is busy. What is the kernel waiting for?
#
# :::{admonition} In this chapter (45 minutes)
# You will place the operands of five matmuls between registers and shared memory, and tell a
# dependency chain from a throughput bound. Back to back, backward v4 runs full batches of 1,024
# tokens {glue:text}`over_v2:.2f` times as fast as v2; six small ideas contribute a factor of
# {glue:text}`over_none:.2f` (in bursts).
# :::

# %% tags=["hide-input"]
import re

from _lib import studies
from gdpa_kernels.gdpa.kernels import v4_warp_specialized_backward as v4
from gdpa_kernels.gdpa.kernels.v4_warp_specialized_backward import Config
from gdpa_kernels.gdpa.ladder import v4_warp_specialized_backward as lesson
from gdpa_lab.measuring import compile_check
from gdpa_lab.measuring.workloads import workload
from gdpa_lab.report import charts
from gdpa_lab.report.chapter import Chapter

# %% tags=["parameters"]
mode = "replay"
device = "cpu"
data_dir = "data"

# %% tags=["remove-cell"]
V2, V4 = "v2_fused_backward", "v4_warp_specialized_backward"
BIG, LONG = "gdpa-self-full-1024", "gdpa-self-full-2048"
chapter = Chapter(f"backward/{V4}", mode=mode, device=device, data_dir=data_dir)
loops = chapter.times("backward/results", scope="sustained", direction="backward").loc[BIG]
as_fast = loops.index[(loops / loops[V4]).between(0.98, 1.02)].drop(V4)
assert {*as_fast} == {"fa3", "fa3_dense", "fa4_dense"}, "the caption"
assert loops.drop(as_fast).idxmin() == V4, "the caption"
chapter.glue(over_v2=loops[V2] / loops[V4])

# %% tags=["remove-input"]
# | name: fig-bw4-ladder
# | caption: >
# |   **Backward v4 comes within 2 % of FlashAttention-3 and of FlashAttention-4's dense form, and
# |   is faster than all else.** Time of each rung on gdpa-self-full-1024, back to back; each tick
# |   leads to its chapter. Dashed: libraries.
# | alt: >
# |   An axis of milliseconds with a tick for each rung and dashed lines for the libraries. v4
# |   lies beside FlashAttention-3 and -4 at the left, v2 well to the right.
chapter.ladder(V4, "backward")

# %% [markdown]
# ## What stays, what changes
#
# | | {doc}`backward v2 <v2_fused_backward>` | backward v4 |
# |:--|:--|:--|
# | work of a program | one tile of 128 keys of a head | a list of such tiles; persistent |
# | who computes | all warps, on the whole tile | two consumer warp groups, 64 keys each |
# | loads | issued by a thread of those warps | a producer warp group |
# | dQ | TMA reduce-add, waited for | TMA reduce-add, sent one step later |
#
# There is no backward v3.

# %% tags=["remove-input"]
chapter.roles(V4)

# %% [markdown]
# S is computed transposed, keys × queries. A thread's part of P^T then has exactly the layout in
# registers that the A operand of dV needs, and the same holds for dS^T and dK. Only dQ is
# different. It sums over keys, half of which belong to the other consumer, so for dQ alone dS goes
# through shared memory. In a step of 64 rows and 128 keys of head_dim 128, each matmul takes 512
# cycles:
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
# is 2,944 cycles, more than the 2,560 of the matmuls.
#
# ## No unit is busy
#
# In a profile of the first v4 ({doc}`lab notes <../../notes/gdpa_backward>`) the tensor cores were
# active for half of the cycles of a step, the issue slots for a third.
#
# Each consumer is a *dependency chain*: issue an MMA, wait for it, run 300 instructions of
# arithmetic, store, fence, issue, wait. Each of an SM's four schedulers has two warps to choose
# from, one of each consumer, and usually one of them waits. With two chains of $t$ cycles a step
# takes about $t$, however idle the units are. Six ideas make the chain shorter:
#
# | idea | what leaves the chain |
# |:--|:--|
# | fold | GELU's factors ½ and `scale` move from every score to dV, dK and dQ, once per tile |
# | K ahead | the wait for the next tile's K, which gets a second buffer |
# | dQ put aside | a wait at a fence: dQ is sent behind the *next* step's, which dS needs |
# | S first | a wait: S of the next step is issued before dQ of the last, one wait serves both |
# | uniform | moves to uniform registers, by telling the compiler that a step count is uniform |
# | late addresses | more such moves, and spills, by adding an opaque zero |
#
# *Fold* is arithmetic. With $x = s \cdot scale$ and $t = \tanh u(x)$, GELU is
# $\tfrac{scale}{2} \cdot s(1 + t)$ and its derivative $\tfrac12(1 + c)$ with
# $c = t + x\,u'(x)(1 - t^2)$. The constants $\tfrac{scale}{2}$ and $\tfrac12$ are the same for all
# scores, so they can be multiplied into the sums: three of twelve floating-point instructions fewer
# per score. (In fp16 the missing factor may overflow, so only bf16 is folded.)
#
# ## Late addresses: a zero that one compiler cannot see through
#
# An MMA on shared memory takes its address as a 64-bit descriptor, one for every 16 columns, from
# *uniform* registers, which belong to a warp and not to each of its threads. The addresses of V, K
# and the staging buffer never change in the loop. So the first compiler, LLVM, computes them once,
# before the loop, in ordinary registers. Those are few, so others {term}`spill`. And in every step
# two moves to uniform registers, `R2UR`, stand between an MMA and the one before it.
#
# The fix is a zero that LLVM cannot see through. `keep_runtime(step)` is `step ^ step`, written in
# assembly. An address that adds it seems to depend on `step`, so LLVM leaves it in the loop. The
# second compiler, ptxas, knows that the xor is 0, drops the addition and computes the descriptor
# where it is needed, in uniform registers from the start. The machine code between the third and
# the fourth MMA of dP, without the zero, then with it (`UR` are uniform registers, `gdesc` is the
# descriptor):

# %% tags=["remove-cell"]
NOT_UNIFORM = ("uniform(steps * GROUP)", "steps * GROUP")
KEPT = ("        zero = keep_runtime(step)\n", "        zero = 0\n")
FENCE = '        tlx.fence("async_shared")\n'
PUT = "        stage_tile(staging[role + zero], dq)\n"
LATER = studies.piece(v4, "        if step > 1", "        dk = tlx")
LAST = studies.piece(v4, FENCE[4:] + "    if all", "    stage_tile(staging[role], dq)")
NOW = LATER.replace("step > 1", "True").replace("step - 2", "step - 1")
DQ_AT_ONCE = ((LATER, ""), (LAST, ""), (PUT, PUT + FENCE + NOW))
NEXT = studies.piece(v4, "        s = scores(k.buffer[k_buffer + role + zero]", "        dq = ")
FIRST = studies.piece(v4, "    s = scores(k.buffer[k_buffer + role], q, tl.min", "    tlx.bar")
WAIT = "        s = tlx.async_dot_wait(0, s)\n"
DQ_WAIT = "        dq = tlx.async_dot_wait(0, dq)\n"
OWN = NEXT.replace("tl.minimum(now + 1, last)", "now") + WAIT
S_AFTER_DQ = ((FIRST, ""), (NEXT, ""), (WAIT + DQ_WAIT, DQ_WAIT), (KEPT[0], KEPT[0] + OWN))
ADDRESSES = (NOT_UNIFORM, KEPT)
OLD_LOOP = (*DQ_AT_ONCE, *S_AFTER_DQ, *ADDRESSES)
ALL, NONE, FOUR = "all six", "none of the six", "fold, K ahead, dQ put aside, S first"
NOT_LATE = "without late addresses"
ONE_K = {"q_stages": 3, "g_stages": 3, "k_stages": 1}
VARIANTS = {
    NONE: (OLD_LOOP, Config(fold=False, **ONE_K)),
    "fold": (OLD_LOOP, Config(**ONE_K)),
    "fold, K ahead": (OLD_LOOP, Config()),
    "fold, K ahead, dQ put aside": ((*S_AFTER_DQ, *ADDRESSES), Config()),
    FOUR: (ADDRESSES, Config()),
    NOT_LATE: ((KEPT,), Config()),
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


us = chapter.times(columns="variant", variant=None)
tflops = chapter.times("", "tflops", "variant", variant=None)
SMS, GHZ, tiles = 132, 1.55, workload(LONG).batch * workload(LONG).num_heads_k * 2048 // 128
step = (us.loc[LONG] - 2 * us.loc[BIG]) * 1e3 * GHZ * SMS / (tiles * 1024 / 64)
busy, lost = 100 * 2560 / step, us.loc[BIG] / us[ALL][BIG]
chapter.glue(tensor_all=busy[ALL], tensor_none=busy[NONE], over_none=lost[NONE],
             first=100 * (lost["without S first"] - 1))  # fmt: skip
chapter.predict(
    "As first written, a step of backward v4 takes 3,400 to 3,900 cycles at about 1.55 GHz.",
    step[NONE], least=3400, most=3900, form=",.0f",
)  # fmt: skip
chapter.predict(
    "As first written, backward v4 reaches 480 TFLOP/s on full batches of 2,048 tokens; below 430 "
    "the design is refuted.",
    tflops[NONE][LONG], least=430, form=".0f", unit=" TFLOP/s",
)  # fmt: skip

# %% tags=["remove-cell"]
built = {n: studies.build_backward(modules[n]) for n in ("fold, K ahead", FOUR, NOT_LATE, ALL)}


def between_mmas(kernel) -> list[str]:
    """The loop's instructions from its third MMA, of dP, to the fourth."""
    code, loops = compile_check.sass(kernel)
    body = next(x for x in loops if sum("MUFU" in code[i] for i in x) >= 32)
    lines = [re.sub(r"\s+", " ", code[i]).strip(" ;") for i in body]
    mmas = [i for i, line in enumerate(lines) if line.startswith("HGMMA")]
    return lines[mmas[2] : mmas[3] + 1]


listed = {name: between_mmas(built[name]) for name in (NOT_LATE, ALL)}
moves = {name: sum("R2UR" in line for line in lines) for name, lines in listed.items()}
assert moves == {NOT_LATE: 2, ALL: 0}, "the text: two moves, and none"

# %% tags=["remove-input"]
titles = {NOT_LATE: "; without late addresses", ALL: "; with late addresses"}
shown = [line for name, lines in listed.items() for line in ("", titles[name], *lines)]
chapter.code("\n".join(shown[1:]), language="text")

# %% [markdown]
# In the first, two ordinary registers must become uniform before the fourth MMA may start; in the
# second, uniform arithmetic runs beside the MMAs.
#
# ## What each idea is worth

# %% tags=["remove-input"]
# | name: fig-bw4-ideas
# | caption: >
# |   **Five of the six ideas help when they are added, and "S first" hurts then, and helps in the
# |   finished kernel.** TFLOP/s in bursts on gdpa-self-full-1024, ideas added from top to bottom;
# |   in brackets what each one changes.
# | alt: >
# |   Horizontal bars of TFLOP/s, backward v2 first, then seven variants of backward v4. The rate
# |   rises with each idea except S first, which lowers it; the last two raise it above all before.
NAMES = ("backward v2", "v4, none of the six", "+ fold", "+ K ahead", "+ dQ put aside", "+ S first",
         "+ uniform", "+ late addresses: v4")  # fmt: skip
shown = tflops.loc[BIG, ["default", *list(VARIANTS)[:7]]].set_axis(NAMES)
gains = shown.diff()
assert (gains.drop("+ S first").dropna() > 0).all() and gains["+ S first"] < 0, "the caption"
labels = [f"{name} ({gains[name]:+.0f})" if name[0] == "+" else name for name in NAMES]
chart = charts.bars(shown.set_axis(labels), xlabel="TFLOP/s in bursts", highlight=labels[-1:])
chapter.figure(chart, measured=chapter.rows(variant=None))
chapter.glue(three=shown["+ dQ put aside"], four=shown["+ S first"])

# %% [markdown]
# The ideas depend on each other. *S first* took the rate from {glue:text}`three:.0f` to
# {glue:text}`four:.0f` TFLOP/s when it was added, but removing it from the finished kernel costs
# {glue:text}`first:.1f` % of time. *Uniform* helped when added and is worth nothing now. The
# compiler's output shows why:

# %% tags=["remove-input"]
facts = studies.facts(built, ["R2UR"]).drop(columns=["registers", "serialised"])
two, four, _, six = facts["R2UR"]
assert four > two > six and facts["spilled (B)"].iloc[-1] == 0, "the text says so"
facts["kernel"] = ["fold, K ahead", "+ dQ put aside, S first", "all but late addresses", "all six"]
chapter.table(
    facts, name="tab-bw4-compiled",
    caption="**Late addresses end all spills and most moves to uniform registers.** What the "
    "compiler makes of four variants of backward v4.",
    compiled="for sm_90a when this page was built",
)  # fmt: skip

# %% [markdown]
# ## The kernel with notes
#
# The consumer of backward v4's lesson, for GELU or SiLU without masks and grouped heads. The rest
# is folded below it.

# %% tags=["remove-input"]
CALLED = ("load", "fetch_both", "scores", "differentiate", "store_ds", "dq_product", "stage_tile",
          "add_rows", "backward_kernel")  # fmt: skip
ROLES_NOTES = {
    "steps = uniform(steps_of(len_q, options))": "*Uniform*: a shuffle from lane 0 leaves the "
    "value and tells the compiler that all threads have the same.",
    "zero = keep_runtime(step)": "*Late addresses*: added to buffer numbers below.",
    "staged_dq, row = staging[role + zero], (step - 2) * options.ROWS": "*dQ put aside*: now, "
    "behind this step's fence, dQ of two steps ago leaves.",
    "s = scores(k.buffer[k_buffer + role + zero]": "*S first*: the next step's S is issued before "
    "dQ. The last step computes its own S again, since an MMA behind a branch costs more.",
    "tlx.barrier_arrive(ds.empty[(now - 1) & 1])": "dS of the last step has been read: its buffer "
    "may be overwritten.",
    "dv = dv * (0.5 * scale * output_scale)": "The folded factors, once per tile.",
    "dk_staging = staged[role * (128 // HEAD_DIM)]": "dK leaves through the memory that staged dQ.",
}
CALLED_NOTES = {
    "tlx.barrier_wait(v.empty[0], (tile & 1) ^ 1)": "V comes after the first rows of Q: S needs "
    "only K and Q, so the consumers begin earlier.",
    "tlx.barrier_expect_bytes(ring.full[stage], BYTES)": "One barrier for both halves of a tile: "
    "it completes when all bytes are there.",
    "return tlx.async_dot(k, tlx.local_trans(q.buffer[stage]))": "S transposed: keys are the rows "
    "of the {term}`accumulator`, so P and dS can be A operands of dV and dK.",
    "p, slope = value_and_factor(": "*Fold*: value and slope without their constant factors.",
    "dp = tlx.async_dot_wait(1, dp)": "One MMA may still be in flight: dP is there, dV still runs "
    "under the arithmetic of dS.",
    "tlx.local_store(ds_tile, d)": "dS for the other consumer. The fence below it also covers dQ "
    "that the step before has put aside.",
    "d = tlx.local_slice(ds.buffer[stage * MATH_ROLES], ": "dQ sums over all 128 keys: those of "
    "consumer 0 here, those of consumer 1 below.",
    "staging = tlx.local_alloc((64, 64), tl.float32, MATH_ROLES)": "Half of dQ of a step, in fp32, "
    "for each consumer.",
    "with tlx.async_task(num_warps=4, registers=REGISTERS": "The two consumers: one function, "
    "compiled for each role.",
}
chapter.annotated(lesson.math, ROLES_NOTES)
called = [getattr(lesson, name) for name in CALLED]
chapter.annotated(
    called,
    CALLED_NOTES,
    folded="The producer, what the roles call, and the kernel that starts them",
)

# %% [markdown]
# ## Is it right?
#
# A ragged batch with several tiles of keys, in the emulator, against fp64. (The {ref}`fence
# <rule-fences>` before dQ's TMA store is the compiler's.)

# %% tags=["remove-input"]
ragged = studies.batch((0, 1, 63, 130), (3, 70, 129, 257), heads=2)
for name in (ALL, NONE):
    emulated = studies.backward(modules[name], ragged, VARIANTS[name][1], multiprocessors=2)
    errors = studies.compare_gradients(emulated.gradients, ragged)["% of allowed"]
    print(f"{name}: largest error {errors.max():.0f} % of what is allowed")

# %% [markdown]
# ## A bound that no count contains
#
# Before any run on a GPU (2026-11-21) we predicted v4 without the six ideas, at an assumed clock of
# 1.55 GHz. The difference between two lengths cancels a tile's fixed cost and leaves a step.

# %% tags=["remove-input"]
chapter.predictions()

# %% [markdown]
# The prediction took the largest of MMAs, instructions and bytes, a {term}`roofline` of units. Such
# a count holds when enough independent chains feed the units, and two do not. Inside a chain the
# terms *add*. By the measured times the matmuls take {glue:text}`tensor_none:.0f` % of a step
# without the ideas and {glue:text}`tensor_all:.0f` % with them. A third chain would be a third
# consumer, which does not fit (second exercise).

# %% tags=["remove-input"]
chapter.profile("v4_warp_specialized_backward", workload="gdpa-self-full-512", direction="backward")

# %% [markdown]
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
# 65,536 registers less 128 × 24, for 384 threads: 162, in steps of eight 160. dK and dV take 128,
# one tile of scores in fp32 another 32. Nothing is left for addresses.
# :::
#
# :::{exercise} Count the port at head_dim 64
# :label: ex-bw4-port
#
# At head_dim 64 a step of backward v4 has 128 rows, and each consumer computes dQ of 64 of them
# (all 64 columns). (a) Redo the table of five matmuls: cycles of the tensor cores and KiB read
# from shared memory. (b) Add dS stored, dQ written and read in fp32, and Q and dO landing. Which is
# the larger bound now? (c) The arithmetic of a score stays the same. How does its share of the
# chain change, and what does that say about head_dim 64? *(paper, thirty minutes, as in an exam)*
# :::
#
# :::{solution} ex-bw4-port
# :class: dropdown
#
# (a) Each matmul still has 128 × 128 × 64 multiply-adds, 512 cycles, 2,560 in all. A consumer's S
# reads K, 64 keys by 64 columns (8 KiB), and Q, 128 rows by 64 (16): 24, for both 48. dP likewise
# 48. dV and dK read dO or Q, 16 for each consumer: 32 each. dQ reads dS of 64 rows and all 128
# keys (16) and K (16): 32 for each consumer, 64. Sum: 224 KiB. (b) dS is 128 × 128 × 2 bytes, 32;
# dQ 128 × 64 × 4 bytes, written and read, 64; Q and dO 32: 352 KiB, 2,816 cycles. Shared memory is
# still the larger bound, by 10 % instead of 15 %. (c) A step has twice the scores for the same
# matmul cycles. The arithmetic of the activation takes twice its share, so a rate at head_dim 64
# must be lower, whatever the two bounds say.
# :::
#
# :::{exercise} The useless MMA
# :label: ex-bw4-useless
#
# Put the S of the next step behind `if now < last` and compile it. What do you expect of its
# registers? *(emulator, no GPU: `studies.changed`, `studies.build_backward`, `studies.facts`; ten
# minutes)*
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
