# ---
# jupyter:
#   kernelspec: {display_name: Python 3, language: python, name: python3}
# ---

# %% [markdown]
# # How to plan a kernel
#
# How many cycles will a block of keys take, which unit sets that number, and do registers and
# buffers fit?
#
# :::{admonition} In this chapter (50 minutes)
# You will turn an order of issue into a period, name the unit that limits it, share out registers,
# count buffer slots by Little's law, and fill in a table of barriers. Then you plan a kernel for
# head_dim 64 yourself and check it in the emulator.
# :::

# %% tags=["hide-input"]
import pandas as pd
import torch

import tritonemu
from _lib import studies
from gdpa_kernels.gdpa.ladder import v4_warp_specialized, v5_pingpong
from gdpa_kernels.gdpa.ladder import v8_own_waits as lesson
from gdpa_lab.measuring import compile_check
from gdpa_lab.report import charts
from gdpa_lab.report.chapter import Chapter

# %% tags=["parameters"]
mode = "replay"
device = "cpu"
data_dir = "data"

# %% tags=["remove-cell"]
chapter = Chapter("forward/planning", mode=mode, device=device, data_dir=data_dir)
RUNGS = {
    "v4_warp_specialized": "forward v4", "v6_short_kv": "forward v6",
    "v7_packed": "forward v7", "v8_own_waits": "forward v8",
}  # fmt: skip
LONG = {f"gdpa-self-full-{n}": n for n in (1024, 2048)}
loops = chapter.rows(
    "measuring/power_wall", scope="sustained", direction="forward",
    workload=list(LONG), impl=list(RUNGS),
)  # fmt: skip
tiles = 1152 * 4 * loops["workload"].map(LONG) / 128
loops["cycles"] = loops["time_us_p50"] * loops["sm_clock_mhz"] * 132 / tiles  # of an SM: 128 rows
loops["doubt"] = loops["cycles"] * 15 / loops["sm_clock_mhz"]  # a clock is read in steps of 15 MHz
by_workload = loops.pivot_table(index="impl", columns="workload", values=["cycles", "doubt"])
short, long = (by_workload.xs(name, axis=1, level="workload") for name in LONG)
of_block = (long["cycles"] - short["cycles"]) / 8  # a block of 128 keys more
doubt = ((long["doubt"] + short["doubt"]) / 8)[list(RUNGS)].rename(RUNGS).to_frame(
    "cycles of a block")  # fmt: skip
of_block = of_block[list(RUNGS)].rename(RUNGS).to_frame("cycles of a block")
least, most = 2048, 2048 + 1024
by_name = of_block["cycles of a block"]
assert abs(by_name["forward v4"] / most - 1) < 0.06, "the text: nothing overlaps"
assert least < by_name["forward v8"] < by_name["forward v7"] < 2600, "the text"
chapter.glue(
    found_v4=by_name["forward v4"], found_v8=by_name["forward v8"],
    above_v8=100 * (by_name["forward v8"] / least - 1),
    doubt_v8=doubt.loc["forward v8"].item(),
)  # fmt: skip

# %% tags=["remove-input"]
# | name: fig-plan-found
# | caption: >
# |   **The plan says what was measured: forward v4 overlaps nothing, forward v8 most of its
# |   activation.** Cycles of an SM that 128 keys more cost a tile of 128 rows, from 1,024 to 2,048
# |   tokens, back to back. Bars: one step of the clock's reading. Dashed: the tensor cores alone,
# |   and tensor cores and tanh one after the other (both on paper).
# | alt: >
# |   A dot for each of four forward kernels, and two dashed lines. v4 and v6 lie at the right line,
# |   where nothing overlaps. v7 and v8 lie nearer to the left line, the tensor cores alone.
chapter.figure(
    charts.dots(
        of_block, low=of_block - doubt, high=of_block + doubt, form=",.0f",
        xlabel="cycles of an SM per block of 128 keys",
        levels={"tensor cores alone": least, "one after the other": most},
    ),
    measured=loops, modelled="the sums of this chapter",
)  # fmt: skip

# %% [markdown]
# ## Sum 1: what a block asks of each unit
#
# The kernel has $c$ {term}`consumer warp groups <consumer warp group>` of 64 query rows each. In
# one *period* $T$, in cycles, all of them work through one block of $n$ keys at head_dim $d$. Each
# unit of an SM ({doc}`../operator/machine`) has its rate, and work divided by rate is a bound on
# $T$:
#
# | unit | rate per cycle | one consumer asks for | $n = d = 128$ |
# |:--|:--|:--|--:|
# | tensor cores | 4,096 FLOPs | two MMAs of $M = nd/32$ cycles | 2 × 512 |
# | {term}`MUFU` | 16 results | $4nu$, with $u$ results per score | 512 |
# | issue slots | 128 results | $ni/2$, with $i$ instructions per score | 416 |
# | shared-memory port | 128 bytes | Q and K for S, V for P V | 384 + 256 |
#
# The MUFU row is for one tanh per score ($u = 1$) and the issue row for the GELU of forward v4
# ($i = 6.5$, {doc}`v7_packed`). The tensor core reads K and V from {term}`shared
# memory` for *each* consumer, and for S also the consumer's 64 rows of Q. P comes from registers
# and does not use the port. That is $2d(64 + n)$ bytes for S and $2dn$ for P V. {term}`TMA` writes
# each block of K and V once, $4nd$ bytes.
#
# Divide by 128, compare with the $2cM$ cycles of the tensor cores, and $d$ cancels:
#
# $$
# \frac{\text{port}}{\text{tensor cores}} = \frac{1}{2} + \frac{16}{n} + \frac{1}{2c}.
# $$
#
# The terms are K and V as operands, Q, and the copies. With two consumers and 128 keys the port is
# busy 88 % of the time; with 64 keys, 100 %, and the slightest collision costs time.


# %% tags=["remove-cell"]
def budget(d, n, c, u=1.0, i=6.5):
    """Cycles of each unit for c consumers on a block of n keys."""
    operands = c * (2 * d * (64 + n) + 2 * d * n) / 128
    return {
        "tensor cores": c * 2 * n * d / 32,
        "MUFU": c * 4 * n * u,
        "issue": c * n * i / 2,
        "port": operands + 4 * n * d / 128,
    }


# %% tags=["remove-input"]
SHAPES = {"128, 128, 2": 1, "128, 64, 2": 2, "64, 128, 2": 1, "64, 64, 4": 1}
sums = {
    shape: pd.Series(budget(*map(int, shape.split(",")))) * times for shape, times in SHAPES.items()
}
assert sums["128, 128, 2"]["port"] == 1792, "the text: 88 %"
assert sums["128, 64, 2"]["port"] == sums["128, 64, 2"]["tensor cores"]
chapter.table(
    pd.DataFrame(sums).round(0).astype(int).rename_axis("unit").reset_index(),
    caption="**At head_dim 128 the tensor cores are the largest sum, at 64 MUFU is as large.** "
    "Cycles of an SM; columns are d, n, c. The second column counts two blocks of 64 keys.",
    modelled="the formulas above, rates of a Hopper SM",
)

# %% [markdown]
# The largest number of a column is the *bound*. Tensor cores and MUFU meet at $d = 64u$, head_dim
# 64 with one tanh per score; tensor cores and issue slots at $d = 8i$, so at head_dim 128 an
# activation may take 16 instructions per score, at 64 only 8, everything else in the loop included.
#

# ## Sum 2: the period of an order of issue
#
# What a kernel gets depends on the order in which a consumer issues and waits. Let $A$ be the
# cycles of its activation if it has the units to itself, the larger of the MUFU and issue rows (512
# above).
#
# | order of issue | one consumer | two consumers |
# |:--|:--|:--|
# | serial ({doc}`forward v4 <v4_warp_specialized>`) | $2M + A$ | $4M$ to $2(2M + A)$ |
# | pipelined ({doc}`forward v5 <v5_pingpong>` to v8) | $M + \max(M, A)$ | $4M$, if that is more |
# | ping-pong with turns | no gain | $\max(4M, 2M + A)$ |
#
# *Serial* is S, activation, P V, each awaited: a chain of $2M + A = 1{,}536$ cycles, for $A$ of
# which the tensor core idles. A second consumer fills that gap only by chance. Out of step with the
# first, it makes the period $\max(4M, 2M + A) = 2{,}048$; in step, $2(2M + A) = 3{,}072$.
# *Pipelined*, S of the next block and P V of this one are issued together, and only S is waited
# for. The chain is $M + \max(M, A) = 1{,}024$, so even one consumer could keep the tensor core
# busy. The price is registers. *Ping-pong* arranges what serial consumers reach by luck: a pair of
# {term}`named barriers <named barrier>` passes the turn. It needs $A \le 2M$ and no more registers
# than the serial order.
#
# **Take the largest of the units' sums and of the chain.** A kernel is then *bound by* the tensor
# cores ($2cM$), MUFU ($4cnu$), issue ($cni/2$), the port, or by its own chain. Only in the last
# case does another order of issue help.
#
# ### Check it in the emulator
#
# The emulator has the same units with the same rates ({doc}`../tools/emulator`). For SiLU MUFU
# alone sets $A = 512$. In the difference between 2,048 and 1,024 keys the ends of the tile drop
# out:


# %%
def period(module, config, rows, d=128, activation="silu"):
    """Emulated cycles for 128 keys more."""
    ends = []
    for keys in (1024, 2048):
        tile = studies.batch((rows,), (keys,), head_dim=d, activation=activation)
        trace = studies.timeline(module, tile, config)
        ends.append(max(event.end for event in trace.events))
    return (ends[1] - ends[0]) / 8


# %% tags=["remove-cell"]
ALONE = ("MATH_ROLES = tl.constexpr(2)", "MATH_ROLES = tl.constexpr(1)")
one_v4, one_v5 = (studies.changed(module, ALONE) for module in (v4_warp_specialized, v5_pingpong))
V4, V5 = v4_warp_specialized.Config, v5_pingpong.Config
slow_s = 384 + 256  # the port while S runs and a copy arrives
ORDERS = [
    ("serial, one", one_v4, V4(), 64, 1536, slow_s + 1024),
    ("serial, two", v4_warp_specialized, V4(), 128, 2048, 2 * (slow_s + 1024)),
    ("pipelined, one", one_v5, V5(), 64, 1024, slow_s + 512),
    ("pipelined, two", v5_pingpong, V5(), 128, 2048, 2 * (slow_s + 512)),
    ("ping-pong, two", v5_pingpong, V5(turns=True), 128, 2048, 2 * (slow_s + 512)),
]
orders = pd.DataFrame(
    [(name, low, high, period(*how)) for name, *how, low, high in ORDERS],
    columns=["order, consumers", "at least", "at most", "emulated"],
).set_index("order, consumers")
inside = orders["emulated"].between(orders["at least"], orders["at most"])
assert list(inside[~inside].index) == ["pipelined, one"], "the text: one row"
three = period(one_v5, V5(num_stages=3), 64)
single = orders.loc["pipelined, one", "emulated"]
assert three < 0.9 * single
chapter.glue(single=single, three=three)

# %% tags=["remove-input"]
chapter.table(
    orders.round(0).astype(int).reset_index(),
    caption="**Four of five orders lie inside their plan; the fifth lacks buffers.** Cycles per "
    "block of 128 keys at head_dim 128, two slots for K and V.",
    modelled="the formulas above", emulated="forward v4 and v5, SiLU",
)  # fmt: skip

# %% [markdown]
# The column "at most" adds the port phase by phase: while S runs it needs 384 of 512 cycles for
# operands, and a copy that arrives just then (64 bytes a cycle in the emulator) wants another 256.
# S then takes 640 cycles, and two pipelined consumers a little more than 2,048. **An average below
# 100 % does not mean that a phase is.**
#
# One row misses its plan: one pipelined consumer, {glue:text}`single:,.0f` cycles where the plan
# allows 1,152. It runs out of buffers (sum 3).
#
# ### Check it on the GPU
#
# In {numref}`fig-plan-found` the clock of each run turns times into cycles. Forward v4 needs
# {glue:text}`found_v4:,.0f` cycles for a block, as if its consumers ran in step; the emulator was
# too kind. Forward v8 needs {glue:text}`found_v8:,.0f`, {glue:text}`above_v8:.0f` % more than its
# tensor cores alone, give or take {glue:text}`doubt_v8:.0f` cycles for the reading of the clock.
#
# ## Sum 3: slots by Little's law
#
# Little's law: what is under way is rate times time. A buffer slot is taken from the moment when
# the producer asks for the copy until the last consumer gives it back. That time consists of the
# latency $L$ of memory, the transfer $C$ of the block, and the time $H$ for which consumers hold
# it. One slot is needed per period, so
#
# $$
# \text{slots} \ge \frac{L + C + H}{T}, \qquad\text{or, with given slots,}\qquad
# T \ge \frac{L + C + H}{\text{slots}}.
# $$
#
# The emulator has $L = 600$, and a block of 32 KiB takes $C = 512$ cycles. In the serial order two
# consumers hold K for two S at least: $H = 2M = 1{,}024$ and $2{,}136 / 2{,}048 = 1.04$. So one
# slot is just too few and two are plenty. In the pipelined order V is held while both consumers
# issue the next S *and* P V: $H = 4M = 2{,}048$ and $3{,}160 / 2{,}048 = 1.5$. So a single slot
# costs more than a third of the speed. In the emulator a block takes the two orders
# {glue:text}`serial_one:,.0f` and {glue:text}`pipelined_one:,.0f` cycles with one slot,
# {glue:text}`serial_two:,.0f` and {glue:text}`pipelined_two:,.0f` with two (SiLU).

# %% tags=["remove-cell"]
TAKEN = {"serial": (v4_warp_specialized, V4, 2136), "pipelined": (v5_pingpong, V5, 3160)}
lost = {}
for order, (module, config, taken) in TAKEN.items():
    one, two = (period(module, config(num_stages=n), 128) for n in (1, 2))
    assert one > taken and two < 1.1 * 2048, "the text: a bound"
    chapter.glue(**{f"{order}_one": one, f"{order}_two": two})
    lost[order] = 1 - two / one
assert lost["pipelined"] > 1 / 3 > lost["serial"], "the text: more than a third"

# %% [markdown]
# This explains the row that failed. With one pipelined consumer $T$ should be 1,024, and V is taken
# for $600 + 512 + 1{,}024 = 2{,}136$ cycles: three slots, not two. With three the emulator reports
# {glue:text}`three:,.0f` cycles.
#
# On a real GPU $L$ grows under load, so plan one slot more than the sum.
#
# ## Sum 4: registers per role
#
# Of an SM's 65,536 registers one {term}`CTA` with $g$ warp groups of 128 threads can give each
# thread $65{,}536 / (128 g)$, rounded down to a multiple of 8: 168 for a producer and two
# consumers. {ref}`Moved between roles <rule-registers>`, they still add up to no more:
#
# $$
# r_\text{producer} + c\, r_\text{consumer} \le g \cdot r_\text{launch},
# \qquad\text{e.g. } 24 + 2 \cdot 240 = 3 \cdot 168 = 504.
# $$
#
# What a consumer thread needs is a sum over what is alive at the same time. A tile of 64 × $x$
# values has $x/2$ per thread in fp32 and $x/4$ in bf16:
#
# | alive in the loop | forward v4 | forward v5 | forward v8 |
# |:--|--:|--:|--:|
# | {term}`accumulator`, fp32, $d/2$ | 64 | 64 | 64 |
# | S, fp32, $n/2$ | 64 | 64 | 64 |
# | carried to P V | – | P, fp32: 64 | pairs $x$, $t$ in bf16: 64 |
# | P, bf16, $n/4$ | 32 | 32 | – |
# | sum for $n = d = 128$ | 160 | 224 | 192 |
#
# Add 20 to 40 for addresses, phases and temporaries, and compare with what you can grant, at most
# 240 here. Then let the compiler confirm it: no {term}`spills <spill>`, and MMAs that are not
# {term}`serialised <serialised wgmma>`.
#
# ## Sum 5: shared memory
#
# A CTA may use 227 KiB of shared memory on Hopper and Blackwell. With $s$ slots, $q$ slots of Q for
# each consumer and bf16, in bytes:
#
# $$
# \underbrace{2 \cdot 64\,d\,c\,q}_{Q} + \underbrace{4\,n\,d\,s}_{K, V} +
# \underbrace{2 \cdot 64\,d\,c}_{O} .
# $$
#
# Forward v8 has $q = s = 2$: 64 + 128 + 32 = 224 KiB. A third slot of 128 keys needs 64 KiB more
# and does not fit; the emulator refuses such a kernel as a GPU would.
#
# Blackwell adds a sixth sum, over {ref}`columns <rule-columns>` of tensor memory
# ({doc}`../blackwell/tensor_memory`).
#
# ## The barrier form
#
# Each buffer has two barriers, *full* and *empty*. Fill in one line for each before writing code.
# For forward v8 ($c = 2$, $n = d = 128$):
#
# | barrier | who arrives | arrivals | KiB | who waits |
# |:--|:--|--:|--:|:--|
# | `q_full` | TMA, for the producer | 1 | 16 | its consumer |
# | `q_empty` | its consumer, after its last S | 128 | | producer |
# | `k_full` | TMA | 1 | 32 | both consumers |
# | `k_empty` | both consumers, after their S | 256 | | producer |
# | `v_full` | TMA | 1 | 32 | both consumers |
# | `v_empty` | both consumers, after their P V | 256 | | producer |
#
# Five questions catch most errors; {doc}`first_tlx_kernel` has the rules of the first three:
#
# 1. *Does each use of a slot wait and arrive once,* in the right {ref}`phase <rule-phases>`?
# 2. *Do the {ref}`arrivals <rule-arrivals>` add up?* The table counts threads, those of an
#    `alloc_warp_barrier`.
# 3. *Do the {ref}`bytes <rule-expect-tx>` add up?*
# 4. *Who is last?* A buffer is free when the MMA that reads it has completed, not when it was
#    issued.
# 5. *With multicast,* does the sender wait for the empty barriers of all receivers?
#
# ## Your turn: head_dim 64
#
# Plan the forward kernel for head_dim 64, with tanh GELU as forward v7 computes it, one tanh and
# three other instructions per score ($u = 1$, $i = 4$). Open each answer only after your own.
#
# :::{exercise} Step 1: which unit?
# :label: ex-plan-unit
#
# Two consumers, blocks of 128 keys. Compute the four sums. Which units share the first place, and
# what does that say about a better order of issue? *(paper)*
# :::
#
# :::{solution} ex-plan-unit
# :class: dropdown
#
# $M = 128 \cdot 64 / 32 = 256$: tensor cores $4M = 1{,}024$. MUFU: $2 \cdot 4 \cdot 128 = 1{,}024$.
# Issue: $2 \cdot 128 \cdot 4 / 2 = 512$. Port: $(1/2 + 1/8 + 1/4) \cdot 1{,}024 = 896$. Tensor
# cores and MUFU are both full, and the port nearly so. No order can go below 1,024, and one that
# lets either unit wait loses.
# :::
#
# :::{exercise} Step 2: how many consumers, how many keys?
# :label: ex-plan-consumers
#
# Compare two consumers with 128 keys, two with 64, and four with 64: port, registers of a consumer
# thread in the manner of forward v8, and what the launch can grant. *(paper)*
# :::
#
# :::{solution} ex-plan-consumers
# :class: dropdown
#
# Port: 88 %, 100 %, and $1/2 + 1/4 + 1/8 = 88$ %. Alive: $d/2 + n/2 + n/2$ is 160 for 128 keys and
# 96 for 64. Two consumers may have 240. Four make five groups, 96 registers at launch, 480 in all:
# $4 \cdot 112 + 32$. So 112 for a consumer leave 16 besides the 96, which is tight, and 32 for the
# producer. With 120 none would be left for it. Four consumers have twice as many chains to fill
# a gap; two with 128 keys have more registers.
# :::
#
# :::{exercise} Step 3: buffers and slots
# :label: ex-plan-buffers
#
# For four consumers with 64 keys: how many slots by Little's law, with $L = 600$, $C = 128$ for 8
# KiB, and $H = 8M$ for V? How much shared memory with two slots of Q? *(paper)*
# :::
#
# :::{solution} ex-plan-buffers
# :class: dropdown
#
# $M = 64 \cdot 64 / 32 = 128$ and $T = 8M = 1{,}024$. V: $(600 + 128 + 1{,}024) / 1{,}024 = 1.7$,
# two slots; take four, since a real latency is longer and there is room. Q: $2 \cdot 64 \cdot 64
# \cdot 4 \cdot 2$ bytes = 64 KiB; K and V: $4 \cdot 64 \cdot 64 \cdot 4$ = 64 KiB; O: 32 KiB.
# Together 160 of 227 KiB.
# :::
#
# ### The plan against emulator and compiler
#
# Forward v8 takes the numbers of the plan as its `Config`:

# %%
CANDIDATES = {
    "two, 128 keys": lesson.Config(128, 3, 240),
    "two, 64 keys": lesson.Config(64, 4, 240),
    "four, 64 keys": lesson.Config(64, 4, 112, math_roles=4),
}
rows = []
for name, config in CANDIDATES.items():
    count = config.math_roles
    cycles = period(lesson, config, 64 * count, 64, "gelu_tanh")
    built = compile_check.build_rung(lesson, head_dim=64, config=config)
    spilled = compile_check.read(built).spill_bytes
    shared = built.metadata.shared / 1024
    rows.append((name, cycles * 2 / count, shared, spilled))

# %% tags=["remove-input"]
columns = ["consumers", "cycles", "shared (KiB)", "spilled (B)"]
checked = pd.DataFrame(rows, columns=columns).set_index("consumers")
assert (checked["spilled (B)"] == 0).all() and (checked["cycles"] >= 1024).all()
assert checked["cycles"].idxmax() == "two, 64 keys", "the text: the worst"
assert checked["cycles"].max() < 1.2 * 1024
chapter.table(
    checked.round(0).astype(int).reset_index(),
    caption="**All three fit, and the one with a full port is the slowest.** Emulated cycles per "
    "128 rows and 128 keys at head_dim 64; the plan says 1,024 at least.",
    emulated="forward v8, tanh GELU", compiled="for sm_90a when this page was built",
)  # fmt: skip

# %% tags=["remove-cell"]
PACKED = "20261121T155119Z-17-v7-packed-nvidia-h200-62ac9e84"
measured = chapter.rows(
    PACKED, workload="packed-head64-512", impl="v7_packed",
    variant=["2 roles", "4 roles"],
).set_index("variant")["tflops"]  # fmt: skip
gain = 100 * (measured["4 roles"] / measured["2 roles"] - 1)
assert gain > 3, "the text: four are faster"
studies.comparison(lesson, studies.batch(studies.EDGES, head_dim=64), CANDIDATES["four, 64 keys"])
chapter.glue(gain=gain)

# %% [markdown]
# The emulator ranks them as the port does, but cannot choose between the first and the third. On
# the GPU forward v7 with four consumers of 64 keys was {glue:text}`gain:.0f` % faster than with
# two, on full batches of 512 tokens (in bursts, record 20261121T155119Z). Forward v7 and v8
# therefore take four.
#
# ## Exercises
#
# :::{exercise} P through shared memory
# :label: ex-plan-port
#
# A first Hopper kernel often writes P to shared memory and lets the second MMA read both operands
# from there. Take two consumers and $n = d = 128$. (a) How many bytes does each consumer add to a
# block? (b) Which unit limits the kernel now, and at which period? (c) Would blocks of 256 keys
# help? (d) How many registers are gained? *(paper, 30 minutes)*
# :::
#
# :::{solution} ex-plan-port
# :class: dropdown
#
# (a) 64 × 128 values of two bytes are 16 KiB, written once and read once: 32 KiB, 256 cycles of the
# port. (b) $1{,}792 + 2 \cdot 256 = 2{,}304$ cycles: the port, 12 % above the tensor cores. (c) Per
# 128 keys the share of Q halves, from 256 to 128 cycles: 2,176, still the port. And S of 256 keys
# alone would take 128 registers. (d) 32, those of P in bf16. On Blackwell P lies in tensor memory,
# which has its own port.
# :::
#
# :::{exercise} The planted bug
# :label: ex-plan-bug
#
# A colleague has simplified the loop of forward v5. The kernel runs, and its output has the same
# bits as before. What is wrong, which line of the barrier form does it break, how many keys does a
# sequence need for it to matter, and how would you have found it without reading? *(paper, then the
# emulator; 30 minutes)*
# :::

# %% tags=["remove-input"]
EVALUATE = "        p = activate(s, scale, options.ACTIVATION, True)\n"
AWAIT = "        acc = tlx.async_dot_wait(0, acc)\n"
FREE_K = "        tlx.barrier_arrive(k.empty[stage])\n"
FREE_V = "        tlx.barrier_arrive(v.empty[v_stage])\n"
planted = studies.changed(
    v5_pingpong,
    (FREE_K + EVALUATE + AWAIT + FREE_V, FREE_K + FREE_V + EVALUATE + AWAIT),
)
chapter.code(planted.math, "for block in", "last = v.wait")

# %% tags=["remove-cell"]
races = {}
for keys in (256, 384, 512):
    tile = studies.batch((128,), (keys,))
    with tritonemu.enabled(races=False):
        assert torch.equal(planted.forward(tile), v5_pingpong.forward(tile))
    races[keys] = studies.findings(lambda: planted.forward(tile))  # noqa: B023
assert not any(races[256]) and all(x.startswith("Race") for x in races[384])
chapter.glue(race=races[384][0])

# %% [markdown]
# :::{solution} ex-plan-bug
# :class: dropdown
#
# V is given back right after the wait for S. `async_dot_wait(1, s)` lets the newest MMA run on, and
# that is P V, which still reads V. The form says `v_empty`: "after their P V". With two slots the
# third V is the first that overwrites one, so 256 keys are safe and 384 are not. Bits stay right as
# long as a copy takes longer than the rest of P V, which is nearly always. The emulator does not
# rely on luck: "{glue:text}`race`".
# :::
#
# ## Takeaways
#
# - The period is the largest of the units' sums and the chain of the order of issue; the second
#   largest says how fragile the plan is.
# - Slots, registers and bytes of shared memory can each veto the plan.
# - Fill in the barrier form first. A missing line is a bug that tests may never see.
