# ---
# jupyter:
#   kernelspec: {name: python3, display_name: Python 3}
# measures: false
# ---

# %% [markdown]
# # v1 backward: seven MMAs
#
# Five MMAs are necessary. What do two more buy?
#
# :::{admonition} In this chapter (20 minutes)
# You will split a backward pass so that every gradient has one owner, choose the orientation of a
# tile so that nothing is transposed in registers, and see why only the GPU can check the compiler.
# v1 makes {glue:text}`rate:.0f` useful TFLOP/s on gdpa-self-full-1024, {glue:text}`percent:.0f` %
# of the roofline, without atomics, an fp32 buffer or a bit that differs between runs.
# :::

# %%
import re
from dataclasses import replace
from pathlib import Path

import pandas as pd
import torch

from gdpa_kernels.gdpa import derivatives, v1_tiled_backward
from gdpa_kernels.gdpa.v1_tiled_backward import Config, Tile
from gdpa_kernels.measuring import system
from gdpa_kernels.measuring.workload import workload
from gdpa_kernels.report import charts, results, studies
from gdpa_kernels.report.chapter import Chapter

# %% tags=["parameters"]
mode = "replay"
device = "cpu"
data_dir = "data"

# %% tags=["remove-cell"]
chapter = Chapter("backward/v1_tiled_backward", mode=mode, device=device, data_dir=data_dir)
V1, SELF, LATER = "v1_tiled_backward", "gdpa-self-full-1024", r"v[2-9]"
record = chapter.record("backward/results")
machine = system.load(Path(data_dir) / "systems" / f"{record.system}.json")
limits = results.ceilings(record)
us = chapter.times("backward/results", direction="backward")
rates = chapter.times("backward/results", "tflops", direction="backward")[V1]
share = chapter.times("backward/results", "percent_of_roofline", direction="backward")[V1]
ahead = chapter.times("forward/results", "tflops", direction="forward")["v1_tiled"]
gain = us[V1] / us.filter(regex=LATER).min(axis=1)
fa2 = us["fa2_varlen"] / us[V1]
chapter.glue(
    rate=rates[SELF], percent=share[SELF], forward=ahead[SELF], executed=7 / 5 * rates[SELF],
    fa2_min=fa2.min(), fa2_max=fa2.max(), gain_min=gain.min(), gain_max=gain.max(),
    share_min=share.min(), share_max=share.max(), sms=machine.num_sms,
)  # fmt: skip

# %% tags=["remove-input"]
# | name: fig-seven-peers
# | caption: >
# |   v1 backward and the peers on gdpa-self-full-1024, kernel alone. Peers compute softmax.
# | alt: >
# |   Horizontal bars of TFLOP/s. v1 is a little longer than FlashAttention-2; FlashAttention-4 and
# |   cuDNN are much longer. All end below the dashed line of the roofline.
chapter.ladder(V1, SELF, direction="backward")

# %% [markdown]
# ## What stays, what changes
#
# v1 backward stands on {doc}`forward v1 <../forward/v1_tiled>`: the same copies, tails and masks.
# {doc}`by_hand` ends with a conflict: dK and dV are sums over queries, dQ is one over keys. v1 does
# not resolve it. It walks both ways, with a kernel each:

# %% tags=["remove-input"]
# | name: fig-seven-walks
# | caption: >
# |   One head, tiles of scores. Left: a program of the first kernel owns the keys of a column and
# |   walks down. Right: one of the second owns the queries of a row and walks along it. Pale: done;
# |   full: now. Around the tiles: what is held (framed) and what is summed (filled).
# | alt: >
# |   Two grids of tiles. On the left a column is pale down to a filled tile, with parts of K and V
# |   framed above it and parts of dK and dV filled below. On the right a row is pale up to a filled
# |   tile, with parts of Q and dO framed at its left and one of dQ filled at its right.
down = [("V", "above", False), ("K", "above", False), ("dK", "below", True), ("dV", "below", True)]
along = [("dO", "left", False), ("Q", "left", False), ("dQ", "right", True)]
walks = {
    "owns keys: dK, dV": charts.Tiles((3, 2), [(row, 2) for row in range(3)], down),
    "owns queries: dQ": charts.Tiles((3, 2), [(3, column) for column in range(2)], along),
}
chapter.figure(charts.tiles(walks), modelled="the loops of keys_kernel and queries_kernel")

# %% [markdown]
# | MMA | keys kernel | queries kernel | necessary |
# |:--|:--|:--|:--|
# | scores | $K Q^{\mathsf T}$ | $Q K^{\mathsf T}$ | once |
# | dP | $V dO^{\mathsf T}$ | $dO\,V^{\mathsf T}$ | once |
# | dV | $P^{\mathsf T} dO$ | | once |
# | dK | $dS^{\mathsf T} Q$ | | once |
# | dQ | | $dS\,K$ | once |
#
# Two MMAs of seven are repetitions, and so is the activation's slope. The emulator counts, on one
# head of 512 tokens:

# %%
one_head = studies.batch((512,))
ran = studies.backward(v1_tiled_backward, one_head)
counts = pd.DataFrame(
    {
        "kernel": name, "MMAs for each tile of scores": report.dots / (512 // 64 * 512 // 128),
        "loaded, in units of q": report.bytes_loaded / one_head.q.nbytes,
        "stored, in units of q": report.bytes_stored / one_head.q.nbytes,
    }
    for name, report in ran.reports.items()
)  # fmt: skip

# %% tags=["remove-input"]
chapter.table(counts.round(1), emulated="one head of 512 tokens, head_dim 128, default tiles")

# %% [markdown]
# Each gradient is stored once. What is loaded grows with the length, since every block of keys
# reads all of Q and dO, and every block of queries all of K and V. Neighbours in the grid read the
# same rows at about the same time, so L2 can answer.
#
# ## The code
#
# The loop of the first kernel. `member` counts the query heads that share a key head:

# %% tags=["remove-input"]
chapter.code(v1_tiled_backward.keys_kernel, "for member", "dk_ptrs")

# %% [markdown]
# And of the second:

# %% tags=["remove-input"]
chapter.code(v1_tiled_backward.queries_kernel, "for first_key", "dq_ptrs")

# %% tags=["remove-input"]
chapter.roles(V1, "gdpa_backward")

# %% [markdown]
# **Deterministic.** A row of a gradient belongs to one program, which adds its tiles in the order
# of a loop; the heads of a group too. With a shared q the second kernel writes a dQ for each
# sequence in fp32, and PyTorch adds them up.
#
# **Only what is needed.** `needs_input_grad` reaches the launcher: where k and v want no gradient,
# the first kernel is not launched, and the other way round.
#
# ## Nothing is transposed in registers
#
# The textbook writes $S = Q K^{\mathsf T}$ everywhere and then `tl.dot(tl.trans(p), grad)`. It is
# the same mathematics. The first kernel, so written:

# %%
textbook = studies.changed(
    v1_tiled_backward,
    ("s = tl.dot(k, q.T, input_", "s = tl.dot(q, k.T, input_"),
    ("p = mask_transposed(p,", "p = mask_probabilities(p,"),
    ("slope = mask_transposed(slope,", "slope = mask_probabilities(slope,"),
    ("dv = tl.dot(p.to(grad.dtype), grad,", "dv = tl.dot(tl.trans(p.to(grad.dtype)), grad,"),
    ("            dp = tl.dot(v, grad.T,", "            dp = tl.dot(grad, v.T,"),
    ("dk = tl.dot((slope * dp).to(q.dtype),", "dk = tl.dot(tl.trans((slope * dp).to(q.dtype)),"),
)
same = studies.backward(textbook, one_head).gradients
print("the same bits:", all(map(torch.equal, same, ran.gradients)))

# %% [markdown]
# In the emulator the two agree to the last bit. The compiler does not see it that way:

# %%
made = {
    "K Q^T (v1)": (v1_tiled_backward, Config()),
    "Q K^T (textbook)": (textbook, Config()),
    "v1 with four warps": (v1_tiled_backward, Config(keys=Tile(num_warps=4))),
}
built = {
    name: studies.build_backward(module, "keys_kernel", config, needs=(False, True, True))
    for name, (module, config) in made.items()
}
orders = studies.facts(built, ("HGMMA", "STSM", "BAR"))
orders["transposes"] = [len(re.findall(r"\btt\.trans\b", x.asm["ttgir"])) for x in built.values()]

# %% tags=["remove-input"]
chapter.table(orders, modelled="keys kernel compiled for sm_90a, head_dim 128, bf16")
assert orders["transposes"].tolist() == [0, 2, 0], "the text: P and dS"
spills, more_spills, few_spills = orders["spilled (B)"]
chapter.glue(spills=spills, more_spills=more_spills, few_spills=few_spills)

# %% [markdown]
# *It is slower code.* A Hopper tensor core takes its first operand from registers, in the layout in
# which it leaves results, or from shared memory. P transposed fits neither, so it is written to
# shared memory and read back between two barriers, and {glue:text}`more_spills:.0f` bytes of
# registers spill instead of {glue:text}`spills:.0f`. What v1 transposes are *loaded* tiles, `q.T`
# and `grad.T`. Those lie in shared memory, and the instruction reads them either way.
#
# *It was wrong code.* On Hopper, Triton compiled exactly this pattern, `tl.dot(tl.trans(x), ...)`
# with an `x` that comes from another MMA, to wrong results. It was reported [for
# 3.2.0](https://github.com/triton-lang/triton/issues/6124), and a library of linear attention
# traced wrong gradients [to such a
# line](https://github.com/fla-org/flash-linear-attention/pull/826); it now
# [refuses](https://github.com/fla-org/flash-linear-attention/pull/983) Hopper with Triton from
# 3.4.0 to before 3.7.1. No error, no warning, a plausible gradient. Nor is an operand in registers
# beyond suspicion: the assembler of CUDA 12.9 may reuse its registers before the tensor core [has
# read them](https://github.com/triton-lang/triton/pull/11781).
#
# v1 avoids the pattern because it has two kernels. A kernel that computes dQ beside dK transposes
# dS once, so {doc}`the next rung <v2_fused_backward>` depends on a compiler that gets it right.
#
# ## Is it right?
#
# | what | catches | misses |
# |:--|:--|:--|
# | differences of the definition ({doc}`by_hand`) | a wrong formula | the kernels |
# | the emulator, on every change | a wrong kernel, a race, a tail, a mask | the compiler |
# | reading what was compiled | transposes, spills, serialised wgmma | wrong code |
# | the same tests on a GPU | wrong code, on the shapes of the tests | other shapes |
# | the check before each timing | wrong code, on the shape that is timed | other shapes |
#
# The second row, against fp64 by the rule of {doc}`../measuring/protocol`:

# %%
CASES = {
    "ragged": studies.batch((0, 1, 63, 130), (65, 1, 0, 129)),
    "causal, window": studies.batch((150, 3), heads=2, head_dim=64, causal=True, window=40),
    "silu": studies.batch((70,), (90,), head_dim=32, activation="silu", output_scale=1 / 64),
}
shares = {}
for name, given in CASES.items():
    found = studies.backward(v1_tiled_backward, given).gradients
    shares[name] = studies.compare_gradients(found, given)["% of allowed"]
    again = studies.backward(v1_tiled_backward, given, schedule=1).gradients
    assert all(map(torch.equal, found, again)), "the same bits in another order of programs"

# %% tags=["remove-input"]
chapter.table(
    pd.DataFrame(shares).T.round(0).reset_index(names="case"),
    emulated="largest error in % of what is allowed: twice PyTorch's and one rounding",
)

# %% [markdown]
# ## Which tile
#
# The first kernel keeps two accumulators of keys × head_dim in fp32: with 128 keys, head_dim 128
# and 8 warps that is 128 registers of each thread, half of what a thread may have, before a score
# is computed. At 255 registers an SM holds 65,536 / 256 / 32 = 8 warps: one program, or with 64
# keys two of four warps. With four warps the accumulators of 128 keys alone fill the registers, and
# {glue:text}`few_spills:,.0f` bytes spill (the last row above). What leads out of this corner is
# not a better constant but other work for each warp ({doc}`v4_warp_specialized_backward`).
#
# ## Measurement
#
# The times are those of {doc}`results`, where all rungs and peers ran on all workloads.

# %% tags=["remove-input"]
chapter.predict(
    "By analogy, before anything had run on a GPU: useful TFLOP/s on gdpa-self-full-1024.",
    rates[SELF], least=200, most=260, form=".0f",
)  # fmt: skip

# %% [markdown]
# Broken from above, and no more than a guess. The yardstick is forward v1: if seven MMAs went as
# fast as its two, v1 would execute {glue:text}`forward:.0f` TFLOP/s at 1,024 tokens. It executes
# {glue:text}`executed:.0f`. Over all workloads it has {glue:text}`share_min:.0f` to
# {glue:text}`share_max:.0f` % of the roofline with two MMAs of seven thrown away, and
# FlashAttention-2 takes {glue:text}`fa2_min:.2f` to {glue:text}`fa2_max:.2f` times its time. The
# best later rung is {glue:text}`gain_min:.1f` to {glue:text}`gain_max:.1f` times as fast.
#
# ## The surprise: the chain, not the repetition
#
# What memory, tensor cores and activation would need one after another, each alone on the machine,
# with 11 tensors instead of 7, since both kernels read all inputs:

# %%
w = workload(SELF)
fp32, mufu = derivatives.INSTRUCTIONS["gelu_tanh"]
slots = (fp32 + mufu + 2) + (fp32 - 1 + mufu + 1.5)  # issue slots of a score, in the two kernels
read, written = 2 * w.bytes_read("backward"), w.bytes_written("backward")
clock = machine.num_sms * machine.max_sm_clock_mhz * 1e3  # of all SMs, in a millisecond
costs = pd.Series(
    {
        "memory": (read + written) / limits.gbytes_per_s(read, written) / 1e6,
        "MMAs, five": w.flops("backward") / limits.tflops / 1e9,
        "MMAs, two repeated": 2 / 5 * w.flops("backward") / limits.tflops / 1e9,
        "activation": w.num_heads_q * w.pairs * slots / 128 / clock,
    }
)
costs["sum"] = costs.sum()
costs["v1, measured"] = us[V1][SELF] / 1e3

# %% tags=["remove-input"]
# | name: fig-seven-costs
# | caption: >
# |   gdpa-self-full-1024, backward: what each resource needs alone, their sum (modelled) and v1.
# | alt: >
# |   Horizontal bars in ms. The five MMAs are the longest part; the two repeated ones are shorter
# |   than the activation. The sum is longer than any, and v1 is about a quarter longer still.
chapter.figure(
    charts.bars(costs, xlabel="ms", highlight=["v1, measured"], form=".1f"),
    measured=chapter.rows("backward/results", workload=SELF, impl=V1, direction="backward"),
)
over = costs["v1, measured"] / costs["sum"]
tensor = w.bytes("backward") / 7
loaded = (2 + 2 * w.max_seqlen_k / 128) * 2 * tensor
assert over > 1.03, "the text: more than the sum"
chapter.glue(
    over=over, waste=costs["MMAs, two repeated"], total=costs["v1, measured"],
    loads=loaded / us[V1][SELF] / 1e6, copy=limits.gbytes_per_s(4, 3) / 1e3,
)  # fmt: skip

# %% [markdown]
# Two MMAs of seven look like the obvious waste: {glue:text}`waste:.1f` ms of
# {glue:text}`total:.1f` at the rate of the ceiling. Yet v1 takes {glue:text}`over:.2f` times the
# *sum*: whatever overlaps is less than what the count leaves out. The MMAs hang on a chain. The
# scores come before the activation and that before dV, slope and dP before dS, dS before dK. An SM
# holds one program, so nothing fills the gaps. Loads are not the reason: {glue:text}`loads:.1f`
# TB/s, against {glue:text}`copy:.1f` for a copy.
#
# What would it take to have the two MMAs back? Whoever owns keys has dS in hand and could multiply
# it by K too, but the result belongs to somebody else. That is {doc}`v2_fused_backward`.
#
# ## Exercises
#
# :::{exercise} Write dS down
# :label: ex-seven-ds
#
# Let the first kernel write dS in bf16, and a second one compute $dQ = dS\,K$ from it: five MMAs,
# deterministic. For gdpa-self-full-1024, how many GB is dS, and how long do writing and reading it
# take at the rate of a copy, against the two repeated MMAs? *(paper, ten minutes)*
# :::

# %% tags=["remove-cell"]
stored = 2 * w.pairs * w.num_heads_q
there_and_back = 2 * stored / limits.gbytes_per_s(1, 1) / 1e6
assert there_and_back > costs["MMAs, two repeated"], "the answer: it is cheaper to repeat"
masked = studies.backward(v1_tiled_backward, replace(one_head, causal=True)).reports
kept = {100 * masked[name].dots / ran.reports[name].dots for name in masked}
assert len(kept) == 1, "the answer: the same share in both kernels"
chapter.glue(ds_gb=stored / 1e9, ds_ms=there_and_back, causal=kept.pop())

# %% [markdown]
# :::{solution} ex-seven-ds
# :class: dropdown
#
# {glue:text}`ds_gb:.1f` GB, and {glue:text}`ds_ms:.1f` ms there and back; the two MMAs take
# {glue:text}`waste:.1f` ms. To compute again is cheaper, even before the memory for dS has been
# found. With few keys it is closer: dS has as many columns as there are keys.
# :::
#
# :::{exercise} What a causal mask saves
# :label: ex-seven-causal
#
# Of 512 × 512 scores half count under a causal mask. Which share of its MMAs does each kernel
# compute, with the default tiles? Work it out from `row_range` and `key_range` in `masks.py`; then
# let `studies.backward` count. *(paper; emulator, ten minutes)*
# :::
#
# :::{solution} ex-seven-causal
# :class: dropdown
#
# A block of keys skips the tiles of queries that end before its first key; a block of queries the
# tiles of keys that begin after its last row. `report.dots` with `causal=True` against without is
# {glue:text}`causal:.1f` % in both kernels. The excess over half is the diagonal, where tiles are
# computed whole and masked; it shrinks with the length.
# :::
#
# :::{exercise} Who has work?
# :label: ex-seven-few
#
# A batch of 8 sequences, 4 query heads on one key head, 256 keys and 4,096 queries each. How many
# programs does each kernel have, on {glue:text}`sms:.0f` SMs? Which kernel suffers, and how could
# it be helped without atomics? *(paper, ten minutes)*
# :::
#
# :::{solution} ex-seven-few
# :class: dropdown
#
# 8 × 2 = 16 programs of the first kernel, whose owner of keys walks over the queries of all four
# heads, and 8 × 4 × 32 = 1,024 of the second. The first leaves most of the machine idle. Let
# several programs share a block of keys, each for a range of queries or for one head, write partial
# sums of dK and dV in fp32, and add them in a fixed order afterwards.
# :::
#
# ## Takeaways
#
# - If two owners disagree, compute twice. It is deterministic, needs no memory, and gives each
#   kernel its own order of operands.
# - Choose the orientation in which a result is the next operand. A transpose in registers costs a
#   trip through shared memory, and has been compiled wrongly.
# - An emulator checks the source. Only a comparison on the machine checks the compiler, and it must
#   look at every gradient.
