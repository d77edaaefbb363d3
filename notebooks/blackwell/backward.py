# ---
# jupyter:
#   kernelspec: {display_name: Python 3, language: python, name: python3}
# measures: false
# ---

# %% [markdown]
# # Backward on Blackwell: five accumulators in four places, bound by shared memory
#
# The backward pass has five accumulators, and {term}`tensor memory` holds four. Which two can share
# their columns, and what becomes the bound?
#
# :::{admonition} In this chapter (50 minutes)
# You will be able to plan the 512 columns of tensor memory over a step, to find the waits that this
# plan needs, and to count shared memory traffic until it explains the emulated time:
# {glue:text}`b1_smem:,.0f` clocks of its port for {glue:text}`mma:,.0f` clocks of MMAs. Nothing
# here is measured.
# :::

# %% tags=["hide-input"]
from functools import partial

import pandas as pd

from _lib import studies
from gdpa_kernels.calling.launches import launches
from gdpa_kernels.gdpa.device import tensor_memory
from gdpa_kernels.gdpa.kernels import b1_tensor_memory_backward as b1
from gdpa_kernels.gdpa.kernels import b2_short_kv_backward as b2
from gdpa_kernels.gdpa.kernels import b3_dk_first_backward as b3
from gdpa_kernels.gdpa.kernels import b4_pair_backward as b4
from gdpa_kernels.gdpa.kernels import b5_stream_backward as b5
from gdpa_kernels.gdpa.kernels import b6_dq_once_backward as b6
from gdpa_lab.measuring import compile_check, cost_model
from gdpa_lab.report.chapter import Chapter
from notebooks.blackwell import _columns

# %% tags=["parameters"]
mode = "replay"
device = "cpu"
data_dir = "data"

# %% tags=["remove-cell"]
B1, B2, B3 = "b1_tensor_memory_backward", "b2_short_kv_backward", "b3_dk_first_backward"
chapter = Chapter("blackwell/backward", mode=mode, device=device, data_dir=data_dir)
MMA = cost_model.mma(cost_model.B200, 1)  # clocks of one of 128 x 128 x 128


def built(module):
    """The rung's kernel for sm_100a, of 130 tokens and four heads of 128."""
    inputs = studies.batch((130,), heads=4)
    with launches(run=False) as seen:
        module.backward(studies.gradient(inputs), inputs)
    (launch,) = (x for x in seen if x.name == "backward_kernel")
    return compile_check.build_launch(launch, capability=100)


TILE = 128 * 128 * 2 / 1024  # KiB: an operand of an MMA in bf16
halves, whole, first = TILE + 2 * (TILE + TILE / 2), 2 * TILE + 2 * TILE, TILE + 2 * TILE
chapter.glue(halves=halves, whole=whole, first=first)

# %% tags=["remove-input"]
# | name: fig-b200b-columns
# | caption: >
# |   **dQ borrows the columns of dP while dS is in shared memory.** Blackwell backward b1: what
# |   lies in the 512 columns while the MMA of each row runs, from one S to the next. Orange:
# |   written by this MMA. Blue: read or replaced meanwhile by the warps of the activation.
# | alt: >
# |   Five rows of 512 columns: MMA of S, dQ, dK, dP and dV. Columns 0 to 127 hold S, then P; 128 to
# |   255 hold dP, then dQ, then the next dP; the right half holds the sums dV and dK throughout.
KEPT, MATH, WRITTEN = "kept or read by an MMA", "with math or output", "written by the MMA"
dv, dk = (256, 384, "dV", KEPT), (384, 512, "dK", KEPT)
ROWS = {
    "S of step i+1": [(0, 128, "S(i+1)", WRITTEN), (128, 256, "dP(i) → dS(i)", MATH), dv, dk],
    "dQ of step i": [(0, 128, "S → P(i+1)", MATH), (128, 256, "dQ(i)", WRITTEN), dv, dk],
    "dK of step i": [(0, 128, "S → P(i+1)", MATH), (128, 256, "dQ(i) leaves", MATH), dv,
                     (384, 512, "dK +=", WRITTEN)],
    "dP of step i+1": [(0, 128, "P(i+1)", KEPT), (128, 256, "dP(i+1)", WRITTEN), dv, dk],
    "dV of step i+1": [(0, 128, "P(i+1)", KEPT), (128, 256, "dP → dS(i+1)", MATH),
                       (256, 384, "dV +=", WRITTEN), dk],
}  # fmt: skip
chapter.figure(
    _columns.over_time(ROWS, [KEPT, MATH, WRITTEN]),
    computed="the order of MMAs in the source of b1, head_dim 128",
)

# %% [markdown]
# ## Five accumulators need 640 columns, and there are 512
#
# A {term}`CTA` owns 128 keys and walks over the rows of Q, 128 a step. With keys as rows of the
# accumulators, a step is five {term}`MMAs <MMA>`:
#
# | | A | B | accumulator |
# |:--|:--|:--|:--|
# | S^T = K Q^T | K, shared memory | Q | new every step |
# | dP^T = V dO^T | V, shared memory | dO | new every step |
# | dV += P^T dO | P^T | dO | one for all steps |
# | dK += dS^T Q | dS^T | Q | one for all steps |
# | dQ = dS K | dS, shared memory | K | new every step |
#
# Each accumulator has 128 columns at head_dim 128, and five of them are 640. dV and dK stay, so dQ
# must reuse the columns of S or dP. P^T and dS^T, [keys, rows], may be operands in tensor memory,
# in 64 columns each. For dQ, A is dS, [rows, keys], so dS must go to shared memory in any case.
# Three plans, with the KiB that dK and dQ then read from shared memory:
#
# - *halves*, {glue:text}`halves:.0f` KiB: dS^T stays in columns of dP as operand of dK, and dQ
#   comes in two halves of 64 columns, beside P^T and beside dS^T. But half of dQ then lies in
#   columns that the next S needs, so the next step would have to wait until dQ is gone.
# - *whole*, {glue:text}`whole:.0f` KiB: dS is in shared memory alone, for dK as for dQ, and dQ
#   takes all of dP's columns. The next S can start at once.
# - *dK first*, {glue:text}`first:.0f` KiB: dS^T is in columns of dP, and dQ takes them all once dK
#   has read it, as in FlashAttention-4. But then dV must come before dP, or no MMA is left to run
#   while dQ leaves.
#
# b1 takes *whole* ({numref}`fig-b200b-columns`), which is not the cheapest. Two warp roles `math`
# share a step, 64 rows each. P overwrites S, and a role may only overwrite scores that it has read
# itself, so dV takes two MMAs of 64 rows. `math` computes the slope of the activation together with
# P and keeps it in registers until dP has come.
#
# ## The order of MMAs makes most waits superfluous

# %% tags=["remove-input"]
chapter.roles(B1)

# %% [markdown]
# MMAs of one thread run in the order of their issue. S of a step comes before dQ and dK of the
# previous one: while it runs, math finishes the dS that those two need. `from_ds` waits for it and
# issues both. Then come dP and, when P is stored, dV:

# %% tags=["remove-input"]
chapter.code(b1.mma, "if step == 0:", "for half in")

# %% [markdown]
# Count the waits that are *not* there:
#
# - S overwrites the previous step's P without asking: dV, which read it, is earlier in the queue.
# - math overwrites dS in shared memory without asking whether dK and dQ have read it. It has waited
#   for dP, which is later in the queue than both.
# - The first dV of a tile overwrites the sums of the last one, which math takes out. It comes after
#   dP, which needs V, and `v.empty` says that dV and dK are stored.
#
# The plan itself costs one wait, `dq.empty`: dP of the next step may not be written before the role
# `output` has dQ in registers. dK runs in between, for {glue:text}`one:.0f` clocks.
#
# ## Shared memory is the bound
#
# An SM does {glue:text}`flops:,.0f` bf16 FLOPs a clock, twice Hopper's, but its shared memory still
# moves 128 bytes a clock. Every read and every write of a step, in KiB:

# %% tags=["remove-cell"]
same = {
    "S = K Q": 2 * TILE, "dP = V dO": 2 * TILE, "dV (P in TMEM)": TILE, "dK": 2 * TILE,
    "dQ": 2 * TILE, "dS stored": TILE, "Q, dO by TMA": 2 * TILE,
}  # fmt: skip
# b1: 128 columns of fp32 are written and read. b2: 64 arrive and are read, and leave in bf16.
count = pd.DataFrame({
    B1: same | {"dQ out": 4 * TILE},
    B2: same | {"dQ out": 3 * TILE},
    B3: same | {"dK": TILE, "dQ out": 4 * TILE},
})  # fmt: skip
clocks = count.sum().map(cost_model.kibibytes)
assert clocks[B1] - clocks[B3] == cost_model.kibibytes(whole - first), "the plans say so"
STEPS = 4
ONCE = 2 * TILE + 4 * TILE  # of a tile: K and V in, dV and dK through


def emulated(module, keys: int) -> tuple:
    """A tile's timeline, the KiB that its port moves, and the clocks of a step: from dP to dP."""
    inputs = studies.batch((STEPS * 128,), (keys,))
    run = studies.backward(module, inputs, arch="sm_100", trace=True)
    line = run.reports["backward_kernel"].timeline
    mmas = (e for e in line.events if e.cta == 0 and e.kind == "mma")
    of_dp = [e.start for e in mmas if e.name.startswith("v[0]")]
    return line, line.busy[0]["shared memory"], (of_dp[-1] - of_dp[1]) / (STEPS - 2)


took, picture = {}, None
for impl, module, keys in ((B1, b1, 128), (B2, b2, 256), (B3, b3, 128)):
    line, port, took[impl] = emulated(module, keys)
    picture = picture or line
    assert port == STEPS * clocks[impl] + cost_model.kibibytes(ONCE), "the text: to the clock"
took = pd.Series(took)
assert (took / clocks).between(1, 1.1).all(), "the caption"

# %% tags=["remove-input"]
sums = {"together": count.sum(), "clocks of the port": clocks, "clocks of a step, emulated": took,
        "of these with an MMA, %": 100 * 5 * MMA / took}  # fmt: skip
table = pd.concat([count, pd.DataFrame(sums).T]).rename(columns=lambda impl: impl[:2])
chapter.table(
    table.round(0).add_prefix("backward ").rename_axis("of a step").reset_index(),
    caption="**The port needs more clocks than the MMAs, and a step takes little longer than it.** "
    "KiB through the port of shared memory in a step of Blackwell backward b1 to b3, and clocks.",
    name="tab-b200b-port",
    modelled="128 rows by 128 keys, head_dim 128; 128 bytes a clock",
    emulated=f"{STEPS} steps, without what a tile moves once; modelled schedule, sm_100",
)
chapter.glue(
    b1_smem=clocks[B1], first_smem=clocks[B3], mma=5 * MMA, one=MMA, flops=cost_model.B200.flops,
    b1_step=took[B1], b3_step=took[B3],
    b1_share=500 * MMA / clocks[B1], b2_share=500 * MMA / clocks[B2],
)  # fmt: skip

# %% [markdown]
# The MMAs take {glue:text}`mma:,.0f` clocks. So b1 can keep the tensor cores busy at most
# {glue:text}`b1_share:.0f` % of the time, b2 {glue:text}`b2_share:.0f` %. A measurement above this
# bound would refute the count.
#
# A step of b1 takes {glue:text}`b1_step:,.0f` clocks, little more than its port is busy: better
# overlap would gain nothing. Backward b3 takes the plan *dK first*, with
# {glue:text}`first_smem:,.0f` clocks of the port and {glue:text}`b3_step:,.0f` a step.

# %% tags=["remove-input"]
# | name: fig-b200-backward
# | caption: >
# |   **Math and output run beside the MMAs, with one gap a step.** Four steps of Blackwell backward
# |   b1's tile of keys, five MMAs each. Modelled cycles.
# | alt: >
# |   A timeline with lanes for load, mma, two math roles, output, TMA and the tensor core. From the
# |   second step on the tensor core has one gap a step, before dP; math works under dQ and dK.
chapter.figure(picture, emulated=f"{B1}, modelled schedule, sm_100")

# %% tags=["remove-input"]
studies.stepper(
    {"Blackwell backward b1": picture},
    "blackwell-backward-steps",
    title="Blackwell backward b1, step by step",
)

# %% [markdown]
# ## Blackwell backward b2: halves of dQ change hands
#
# With at most 256 keys two CTAs of a {term}`cluster` own all of them, as in {doc}`backward v5
# <../backward/v5_short_kv_backward>`. To exchange dS as there, K, V, two steps of Q, dO and dS,
# half of the other CTA's K and an inbox for its dS would take {glue:text}`of_ds:.0f` KiB of shared
# memory, of which there are {glue:text}`most:.0f`. So b2 exchanges results: 64 columns of dQ in
# fp32, for which {glue:text}`of_dq:.0f` KiB suffice. Only the role `output` changes:

# %% tags=["remove-cell"]
most, of_dq = compile_check.SHARED_BYTES[100] / 1024, 7 * TILE
chapter.glue(most=most, of_ds=of_dq + TILE / 2, of_dq=of_dq)
assert of_dq + TILE / 2 > most > of_dq, "the text says so"

# %% tags=["remove-input"]
chapter.code(b2.output, "tlx.barrier_wait(inbox.empty", "coords = [BOUND")

# %% [markdown]
# It stores the peer's half into the peer's *inbox*, through distributed shared memory, straight
# from registers; the bytes complete a barrier over there. Then it adds what has arrived to its own
# half. Two summands commute, so dQ is deterministic. The sum leaves in bf16 through the inbox. With
# 256 keys a row of head_dim 128 moves 768 bytes instead of b1's 2,816, if L2 keeps Q and dO for the
# second reader.
#
# ## One argument keeps the compiler from adding waits
#
# In b1 the loop over MMAs has `num_stages=0`. Without it the compiler pipelines the loop itself,
# with {glue:text}`theirs:.0f` commits instead of {glue:text}`own:.0f` in the machine code, and
# waits for MMAs whose results are not needed yet.

# %% tags=["remove-cell"]
kernels = {"b1": built(b1), "b2": built(b2), "b3": built(b3)}
loop = "range(0, steps * options.GROUP, num_stages=0)"
left = studies.changed(b1, (loop, loop.replace(", num_stages=0", "")))
kernels["b1, loop left alone"] = built(left)
facts = studies.facts(kernels, ("UTCBAR",)).set_index("kernel")
commits = facts["UTCBAR"]
chapter.glue(own=commits["b1"], theirs=commits["b1, loop left alone"])

# %% [markdown]
# ## The emulator finds every wait that is left out
#
# All three agree with fp64. Now forget a wait, or where P may go:

# %% tags=["remove-cell"]
inputs = studies.batch(studies.EDGES, studies.EDGES[::-1], head_dim=64)
for module in (b1, b2, b3):
    studies.compare_gradients(studies.backward(module, inputs, arch="sm_100").gradients, inputs)

# %% tags=["remove-input"]
forgotten = {
    "dQ still in dP's columns":
        (b1, "            tlx.barrier_wait(dq.empty[0], (now & 1) ^ 1)\n", ""),
    "P over scores of the other role":
        (b1, "p.buffer[2 * role]", "p.buffer[role]", tensor_memory),
    "inbox not yet free": (b2, "            tlx.barrier_wait(inbox.empty[0], now ^ 1)\n", ""),
    "leaving before the peer is done":
        (b2, "    tlx.barrier_wait(inbox.empty[0], (count & 1) ^ 1)\n", ""),
}  # fmt: skip
inputs = studies.batch((300,), (256,), head_dim=64)
for what, (module, old, new, *shared) in forgotten.items():
    wrong = studies.changed(module, (old, new), shared=next(iter(shared), None))
    call = partial(wrong.backward, studies.gradient(inputs), inputs)
    (says,) = studies.findings(call, [0], arch="sm_100")
    assert says, "the text says so"
    print(f"{what}: {says.partition(':')[0]}")
assert "EarlyExit" in says, "the last one"

# %% [markdown]
# The tests make every such mistake, one at a time. *Not proved*, beyond the list in
# {doc}`tensor_memory`: that remote arrivals order what follows, and that four kinds of traffic at
# once share the port's one rate, as we assume.
#
# ## Blackwell backward b4: a pair of CTAs exchanges dS
#
# tcgen05 can run one MMA on two SMs (`cta_group::2`): each CTA then holds half of B, and reads of B
# halve. But dQ of 128 rows must sum over the keys of *both*, so halves of dS change hands, and each
# CTA's 64 rows of dQ leave as fp32.

# %% tags=["remove-cell"]
pair = {
    "S, dP": 2 * 1.5 * TILE, "dV, dK (P, dS in TMEM)": 2 * TILE / 2, "dQ": TILE + TILE,
    "dS here and in": TILE, "Q, dO by TMA": 2 * TILE, "dQ out": 2 * TILE,
}  # fmt: skip
pair_clocks = cost_model.kibibytes(sum(pair.values()))
_, port, pair_step = emulated(b4, 256)
assert port - cost_model.kibibytes(ONCE + TILE) == STEPS * pair_clocks, "K in two forms; they agree"
chapter.glue(gain=100 * (1 - pair_clocks / clocks[B3]), pair_smem=pair_clocks, pair_step=pair_step)
ends = {}
for module in (b4, b5, b6):
    both = []
    for items in (2, 3):
        inputs = studies.batch((256,) * items, (256,) * items)
        how = {"arch": "sm_100", "trace": True, "multiprocessors": 2}
        line = studies.backward(module, inputs, **how).reports["backward_kernel"].timeline
        both.append((max(e.end for e in line.events), line.busy[0]["shared memory"]))
    ends[module] = [three - two for two, three in zip(*both, strict=True)]
chapter.glue(b4_item=ends[b4][0], b5_item=ends[b5][0])
assert ends[b5][0] < 1.05 * ends[b5][1], "the text says so"

# %% [markdown]
# So b4 needs {glue:text}`pair_smem:,.0f` clocks of the port a step, {glue:text}`gain:.0f` % less
# than b3; emulated, with MMAs of 64 rows at the full rate, {glue:text}`pair_step:,.0f`.
#
# With 256 queries an item has two steps, yet it takes b4 {glue:text}`b4_item:,.0f` clocks: between
# items nothing overlaps. Backward b5 issues S of the next item before the last dK and dQ of this
# one: {glue:text}`b5_item:,.0f` clocks, for nearly all of which the port is busy. With at most 256
# keys b6 writes dQ once, in bf16, as b2 does.
#
# ## Exercises
#
# :::{exercise} head_dim 64
# :label: ex-b200b-64
#
# How many columns do the five accumulators need at head_dim 64? Does dQ have to share any? What
# would that remove from the roles above? *(paper, five minutes)*
# :::
#
# :::{solution} ex-b200b-64
# :class: dropdown
#
# S and dP have 128 each, dV, dK and dQ 64: 448. dQ could have columns of its own, and dP of the
# next step would not have to wait. `dq.empty` would guard the next dQ, a step later.
# :::
#
# :::{exercise} Early release
# :label: ex-b200b-early
#
# In b2's `output` move the arrival on `inbox.empty` above `async_descriptor_store_wait(0)`. The
# peer may then write the inbox while TMA still reads the sum from it. Does the emulator find it,
# and under which schedule? *(emulator, ten minutes)*
# :::
#
# :::{solution} ex-b200b-early
# :class: dropdown
#
# Yes, a race between the peer's remote store and the TMA store, even under the modelled schedule:
# whether two accesses are ordered does not depend on who runs first.
# :::
#
# ## Takeaways
#
# - Plan tensor memory as a table of columns over time; what is never alive at once may share.
# - MMAs of one thread run in order. Each wait that this order implies can be left out.
# - When the accumulators leave the registers, shared memory is the bound: count its bytes.
