# ---
# jupyter:
#   kernelspec: {name: python3, display_name: Python 3}
# measures: false
# ---

# %% [markdown]
# # The backward on Blackwell
#
# The backward has five accumulators, and tensor memory holds four. Which two can share their
# columns, and what becomes the bound when the accumulators have left the registers?
#
# :::{admonition} In this chapter (30 minutes)
# You will plan the 512 columns of {term}`tensor memory` over a step, find the waits that this plan
# needs and those that it makes superfluous, and count shared memory traffic until it explains the
# emulated time: {glue:text}`b1_smem:,.0f` clocks of its port for {glue:text}`mma:,.0f` clocks of
# MMAs. Then two CTAs exchange halves of dQ. Nothing here is measured: kernels are compiled for
# sm_100a, executed in the emulator, and counted.
# :::

# %%
from functools import partial

import pandas as pd

from _lib import studies
from gdpa_kernels.calling.launches import launches
from gdpa_kernels.gdpa.kernels import b1_tensor_memory_backward as b1
from gdpa_kernels.gdpa.kernels import b2_short_kv_backward as b2
from gdpa_lab.measuring import compile_check, units
from gdpa_lab.report.chapter import Chapter

# %% tags=["parameters"]
mode = "replay"
device = "cpu"
data_dir = "data"

# %% tags=["remove-cell"]
B1, B2 = "b1_tensor_memory_backward", "b2_short_kv_backward"
chapter = Chapter("blackwell/backward", mode=mode, device=device, data_dir=data_dir)
MMA = units.mma(units.B200, 1)  # clocks of one of 128 x 128 x 128


def built(module):
    """The rung's kernel for sm_100a, of 130 tokens and four heads of 128."""
    given = studies.batch((130,), heads=4)
    with launches(run=False) as seen:
        module.backward(studies.gradient(given), given)
    (launch,) = (x for x in seen if x.name == "backward_kernel")
    return compile_check.build_launch(launch, capability=100)


# %% [markdown]
# ## Five accumulators, four places
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
# Each accumulator is 128 lanes of 128 fp32: 128 columns at head_dim 128, five of them 640. There
# are 512. dV and dK stay. So dQ must reuse the columns of S or dP. P^T and dS^T need columns too,
# 64 each in bf16, to be operands: A may come from tensor memory if its rows are lanes. P^T and
# dS^T, [keys, rows], qualify. For dQ, A is dS, [rows, keys], so dS must go to shared memory in any
# case. Three plans:
#
# - *halves*: dS^T in columns 0-63 of dP as operand of dK, dQ in two halves of 64 columns, beside
#   P^T and beside dS^T;
# - *whole*: dS in shared memory alone, for dK as for dQ, and dQ in all of dP's columns;
# - *dK first*: dS^T in columns of dP, dQ over all of them once dK has read it, as FlashAttention-4
#   does (`flash_bwd_sm100.py`: dS and dQ begin where dP does).
#
# Half of dQ is an MMA with 64 columns, which reads all of A again. Reads from shared memory for dK
# and dQ:

# %%
TILE = 128 * 128 * 2 / 1024  # KiB: an operand of an MMA in bf16
halves, whole, first = TILE + 2 * (TILE + TILE / 2), 2 * TILE + 2 * TILE, TILE + 2 * TILE
print(f"halves: {halves:.0f} KiB, whole: {whole:.0f} KiB, dK first: {first:.0f} KiB")

# %% [markdown]
# *Halves* needs the other half of S's columns, so the next S, the first thing a step needs, would
# wait for dQ to leave. *dK first* has no MMA left to run while dQ leaves. b1 takes *whole*, not the
# cheapest, as we see below. Its columns over time, from one S to the next:
#
# | MMA | 0-127 | 128-255 | 256-383 | 384-511 |
# |:--|:--|:--|:--|:--|
# | S of step i+1 | S(i+1) written | dP(i) → dS(i), read by math | dV | dK |
# | dQ of step i | S(i+1) → P(i+1) | **dQ(i)** written | | |
# | dK of step i | S(i+1) → P(i+1) | dQ(i) taken out | | dK += |
# | dP of step i+1 | P(i+1) | dP(i+1) written | | |
# | dV of step i+1 | P(i+1) read | dP(i+1) → dS(i+1) | dV += | |
#
# While the MMAs of one line run, math works on what the line shows. Two math roles share a step, 64
# rows each. P overwrites S, and a role may only overwrite scores that it has read itself: P of role
# 0 is in columns 0-31, that of role 1 in 64-95, and dV takes two MMAs of 64 rows.
#
# ## Roles and barriers

# %% tags=["remove-input"]
chapter.roles(B1)

# %% [markdown]
# One thread issues all MMAs, and they run in the order of their issue. In the loop, S of a step
# comes before dQ and dK of the previous one: while it runs, math finishes the dS that those two
# need. `from_ds` waits for it and issues both. Then come dP and, when P is stored, dV:

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
# `output` has dQ in registers. dK runs in between, {glue:text}`one:.0f` clocks.
#
# ## What shared memory costs
#
# An SM does {glue:text}`flops:,.0f` bf16 FLOPs a clock, twice Hopper's, but its shared memory still
# moves 128 bytes a clock. Every read and every write of a step, in KiB:

# %%
same = {
    "S = K Q": 2 * TILE, "dP = V dO": 2 * TILE, "dV (P in TMEM)": TILE, "dK": 2 * TILE,
    "dQ": 2 * TILE, "dS stored": TILE, "Q, dO by TMA": 2 * TILE,
}  # fmt: skip
# b1: 128 columns of fp32 are written and read. b2: 64 arrive and are read, and leave in bf16.
count = pd.DataFrame({B1: same | {"dQ out": 4 * TILE}, B2: same | {"dQ out": 3 * TILE}})
clocks = count.sum().map(units.kibibytes)

# %% tags=["remove-input"]
table = pd.concat([count, count.sum().to_frame("KiB").T, clocks.to_frame("clocks").T])
chapter.table(
    table.rename(columns={B1: "b1", B2: "b2"}).rename_axis("of a step").reset_index(),
    modelled="128 rows by 128 keys, head_dim 128; 128 bytes a clock",
)
shares = {f"{impl[:2]}_share": 100 * 5 * MMA / clocks[impl] for impl in (B1, B2)}
first_smem = clocks[B1] - units.kibibytes(whole - first)
chapter.glue(
    b1_smem=clocks[B1],
    first_smem=first_smem,
    mma=5 * MMA,
    one=MMA,
    flops=units.B200.flops,
    **shares,
)

# %% [markdown]
# The MMAs take {glue:text}`mma:,.0f` clocks. So b1 can keep the tensor cores busy at most
# {glue:text}`b1_share:.0f` % of the time, b2 {glue:text}`b2_share:.0f` %: a bound from counting,
# which a measurement above it would refute. (The ledger of {doc}`model` counts 448 KiB for such a
# design: it counts dQ's way out once.) The emulator counts independently, access by access:

# %%
STEPS, lines = 4, {}
for impl, module, keys in ((B1, b1, 128), (B2, b2, 256)):
    given = studies.batch((STEPS * 128,), (keys,))
    run = studies.backward(module, given, arch="sm_100", trace=True)
    lines[impl] = run.reports["backward_kernel"].timeline

# %% tags=["remove-input"]
ONCE = 2 * TILE + 4 * TILE  # of a tile: K and V in, dV and dK through
books = []
for impl, line in lines.items():
    port = line.busy[0]["shared memory"]
    mmas = [e for e in line.events if e.kind == "mma" and e.cta == 0]
    of_dp = [e.start for e in mmas if e.name.startswith("v[0]")]
    step = (of_dp[-1] - of_dp[1]) / (STEPS - 2)
    books.append((impl[:2], (port - units.kibibytes(ONCE)) / STEPS, step, 5 * MMA / step * 100))
    assert books[-1][1] == clocks[impl], "the text says so"
books = pd.DataFrame(books, columns=["rung", "port busy", "a step takes", "MMAs (%)"])
how = f"clocks of a step, {STEPS} steps, without what a tile moves once; modelled schedule, sm_100"
chapter.table(books, emulated=how)

# %% tags=["remove-cell"]
chapter.glue(b1_step=books["a step takes"][0])
assert (books["a step takes"] / books["port busy"]).between(1, 1.1).all(), "the text says so"

# %% [markdown]
# They agree to the clock, so no access is forgotten; only a B200 can say whether it counts the same
# way. A step takes {glue:text}`b1_step:,.0f` clocks in b1, little more than its port is busy: the
# schedule hides the chain of S, activation, dS and dQ. Better overlap gains nothing. Bytes have to
# go; the cheapest are those of *dK first*, {glue:text}`first_smem:,.0f` clocks, not built.

# %% tags=["remove-input"]
# | name: fig-b200-backward
# | caption: >
# |   Four steps of b1's tile of keys: five MMAs each, math and output beside them. Modelled cycles.
# | alt: >
# |   A timeline with lanes for load, mma, two math roles, output, TMA and the tensor core. From the
# |   second step on the tensor core has one gap a step, before dP; math works under dQ and dK.
chapter.figure(lines[B1], emulated=f"{B1}, modelled schedule, sm_100")

# %% [markdown]
# ## b2: halves of dQ change hands
#
# With at most 256 keys two CTAs of a {term}`cluster` own all of them, as in {doc}`v5
# <../backward/v5_short_kv_backward>`. There the CTAs exchange dS, in bf16, before the MMA, which
# moved fewer bytes than adding results in fp32. Count here what a CTA sends in a step of 128 rows,
# and what has to fit into {glue:text}`most:.0f` KiB:

# %%
ROOM = {"K": TILE, "V": TILE, "Q, two steps": 2 * TILE, "dO": TILE, "dS": TILE}
designs = pd.DataFrame(
    {
        "dS": {"sent": TILE, **ROOM, "half of the peer's K": TILE / 2, "inbox": TILE},
        "half of dQ": {"sent": 128 * 64 * 4 / 1024, **ROOM, "inbox": 128 * 64 * 4 / 1024},
    }
).fillna(0)
designs.loc["together"] = designs.iloc[1:].sum()
chapter.table(
    designs.rename_axis("KiB").reset_index(),
    modelled="128 rows a step, 128 keys a CTA, head_dim 128",
)

# %% tags=["remove-cell"]
most, together = compile_check.SHARED_BYTES[100] / 1024, designs.loc["together"]
chapter.glue(most=most, ds_together=together["dS"])
assert together["dS"] > most > together["half of dQ"], "the text says so"

# %% [markdown]
# Each sends 32 KiB: dS of 128 keys in bf16 is as large as 64 columns of dQ in fp32. v5 computed
# half of the columns from all keys and thus needed half of the other CTA's K; that does not fit,
# {glue:text}`ds_together:.0f` KiB. So b2 leaves b1's MMAs as they are and adds results. Only the
# role `output` changes:

# %% tags=["remove-input"]
chapter.code(b2.output, "tlx.barrier_wait(inbox.empty", "at = [BOUND")

# %% [markdown]
# It stores the peer's half into the peer's *inbox*, through distributed shared memory, straight
# from registers; the bytes complete a barrier over there. Then it adds what has arrived to its own
# half. Two summands commute, so dQ is deterministic. The sum leaves in bf16 through the inbox,
# whose content is in registers by then. Last, it tells the peer that the inbox is free. With 256
# keys a row of head_dim 128 moves 768 bytes instead of b1's 2,816, if L2 keeps Q and dO for the
# second reader.
#
# ## What the compiler says

# %%
kernels = {"b1": built(b1), "b2": built(b2)}
loop = "range(0, steps * options.GROUP, num_stages=0)"
left = studies.changed(b1, (loop, loop.replace(", num_stages=0", "")))
kernels["b1, loop left alone"] = built(left)
facts = studies.facts(kernels, ("UTCHMMA", "UTCBAR", "UTMAREDG", "STAS"))
facts["shared (B)"] = [kernel.metadata.shared for kernel in kernels.values()]
facts["columns"] = [kernel.metadata.tmem_size for kernel in kernels.values()]
facts = facts.drop(columns="serialised").set_index("kernel")
chapter.table(facts.reset_index(), compiled="SASS for sm_100a, head_dim 128, bf16")

# %% tags=["remove-cell"]
b1_loop = compile_check.shortest_loop(kernels["b1"], "MUFU", 64)
assert not {"LDL", "STL"} & set(b1_loop), "the text says so"
commits, spilled = facts["UTCBAR"], facts["spilled (B)"]
chapter.glue(own=commits["b1"], theirs=commits.iloc[2])
chapter.glue(spilled=max(spilled["b1"], spilled["b2"]), loop=len(b1_loop))

# %% [markdown]
# The {glue:text}`spilled:.0f` bytes are constants that roles carry into their loops; the loops of
# math and mma touch no local memory. math's has {glue:text}`loop:.0f` instructions for a thread's
# 64 scores.
#
# **The surprise** is the last line. Without `num_stages=0` the compiler pipelines the loop over
# MMAs itself. It gives each MMA a barrier, {glue:text}`theirs:.0f` commits instead of
# {glue:text}`own:.0f`, peels the first step, and waits for MMAs that nobody needs yet. Results are
# the same, so no test of results sees it. Count commits.
#
# ## Is it right?
#
# Lengths around all edges, empty sequences among them, against fp64:

# %%
errors = {}
given = studies.batch(studies.EDGES, studies.EDGES[::-1], head_dim=64)
for name, module in (("b1", b1), ("b2", b2)):
    found = studies.backward(module, given, arch="sm_100").gradients
    errors[name] = studies.compare_gradients(found, given)["% of allowed"]
errors = pd.DataFrame(errors).reset_index()
chapter.table(errors, emulated="largest error, % of what is allowed; bf16")

# %% [markdown]
# Now forget a wait, or where P may go:

# %%
forgotten = {
    "dQ still in dP's columns":
        (b1, "            tlx.barrier_wait(dq.empty[0], (now & 1) ^ 1)\n", ""),
    "P over scores of the other role": (b1, "p.buffer[2 * role]", "p.buffer[role]"),
    "inbox not yet free": (b2, "            tlx.barrier_wait(inbox.empty[0], now ^ 1)\n", ""),
    "leaving before the peer is done":
        (b2, "    tlx.barrier_wait(inbox.empty[0], (count & 1) ^ 1)\n", ""),
}  # fmt: skip
given = studies.batch((300,), (256,), head_dim=64)
for what, (module, *change) in forgotten.items():
    wrong = studies.changed(module, tuple(change))
    call = partial(wrong.backward, studies.gradient(given), given)
    (says,) = studies.findings(call, [0], arch="sm_100")
    assert says, "the text says so"
    print(f"{what}: {says.splitlines()[0][:70]}")
assert "EarlyExit" in says, "the last one"

# %% [markdown]
# All four are found, the last because a CTA must not exit while its peer writes to its memory. The
# tests make every such mistake, one at a time.
#
# **What is not proved**, beyond the list in {doc}`tensor_memory`: remote arrivals have the scope
# that the compiler gives them, and four kinds of traffic at once are assumed to share the port's
# one rate.
#
# ## A pair of CTAs
#
# tcgen05 can run one MMA on two SMs (`cta_group::2`): each CTA then holds half of B, and reads of B
# halve. For long K and V a third rung would use that. By the same count, of a step and CTA: S, dP
# and dK read 48 KiB each, dV 16. But dQ of 128 rows must sum over the keys of *both*, so halves of
# dS change hands, each CTA has 64 rows of dQ, and those leave as fp32. A CTA loads three quarters
# of Q and dO: its own 64 rows, and its own 64 columns of the others.

# %%
pair = {
    "S, dP, dK": 3 * 1.5 * TILE, "dV": TILE / 2, "dQ": TILE + TILE, "dS stored": TILE,
    "dS out and in": TILE, "Q, dO by TMA": 1.5 * TILE, "dQ out": 2 * TILE,
}  # fmt: skip
pair_clocks = units.kibibytes(sum(pair.values()))
both_clocks = pair_clocks - units.kibibytes(TILE)
print(f"{pair_clocks:,.0f} clocks of the port a step, {both_clocks:,.0f} with dK first")

# %% tags=["remove-cell"]
saved = {"gain": pair_clocks, "both_gain": both_clocks}
chapter.glue(**{name: 100 * (1 - n / clocks[B1]) for name, n in saved.items()}, half_mma=6 * MMA)
assert 5 * MMA < both_clocks < 6 * MMA < pair_clocks, "the text says so"

# %% [markdown]
# All MMAs of a kernel must be a pair's, dQ too, with 64 rows per CTA. We assume the full rate for
# it, {glue:text}`mma:,.0f` clocks of MMAs; at half rate they would be {glue:text}`half_mma:,.0f`.
# By the count that b1 reaches, the pair saves at most {glue:text}`gain:.0f` % of the time, with *dK
# first* {glue:text}`both_gain:.0f` %, at the full rate. That rung is not built.
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
# next step would wait for no one. `dq.empty` would guard the next dQ, a step later.
# :::
#
# :::{exercise} P in shared memory
# :label: ex-b200b-p
#
# If P had to go through shared memory, how many KiB would a step of b1 move, and how busy could
# MMAs be at most? *(paper, five minutes)*
# :::
#
# :::{solution} ex-b200b-p
# :class: dropdown
#
# 32 KiB to store it and 32 more to read it as operand A: 576 KiB, 4,608 clocks, 56 %.
# :::
#
# :::{exercise} Early release
# :label: ex-b200b-early
#
# In b2's `output` move the arrival on `inbox.empty` above `async_descriptor_store_wait(0)`. The
# peer may then write the inbox while TMA still reads the sum from it. Does the emulator find it,
# and under which schedule? *(a laptop, ten minutes)*
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
# - Exchange operands or results? Count: Blackwell's answer differs from Hopper's.
