# ---
# jupyter:
#   kernelspec: {display_name: Python 3, language: python, name: python3}
# measures: false
# ---

# %% [markdown]
# # Backward v1: tiled
#
# Five MMAs are necessary. What do two more buy?
#
# :::{admonition} In this chapter (30 minutes)
# You will split a backward pass so that every gradient has one owner, and choose the orientation of
# a tile so that nothing is transposed in registers. Backward v1 reaches {glue:text}`percent:.0f` %
# of the roofline on full batches of 1,024 tokens.
# :::

# %% tags=["hide-input"]
import re
from dataclasses import replace
from pathlib import Path

import pandas as pd
import torch

from _lib import drawings, studies
from _lib.listings import decided
from gdpa_kernels import Mask
from gdpa_kernels.gdpa.device import derivatives
from gdpa_kernels.gdpa.kernels import v1_tiled_backward
from gdpa_lab.measuring import system
from gdpa_lab.measuring.workloads import workload
from gdpa_lab.report import charts, results
from gdpa_lab.report.chapter import Chapter
from gdpa_lab.report.style import is_rung

# %% tags=["parameters"]
mode = "replay"
device = "cpu"
data_dir = "data"

# %% tags=["remove-cell"]
chapter = Chapter("backward/v1_tiled_backward", mode=mode, device=device, data_dir=data_dir)
V1, SELF, LATER = "v1_tiled_backward", "gdpa-self-full-1024", r"v[2-9]"
record = chapter.record("backward/results")
machine = system.load(Path(data_dir) / "systems" / f"{record.system}.json")
limits, of = results.ceilings(record, "sustained"), {"scope": "sustained", "direction": "backward"}
us = chapter.times("backward/results", **of)
rates = chapter.times("backward/results", "tflops", **of)[V1]
share = chapter.times("backward/results", "percent_of_roofline", **of)[V1]
gain, fa2 = us[V1] / us.filter(regex=LATER).min(axis=1), us["fa2_varlen"] / us[V1]
chapter.glue(
    percent=share[SELF], fa2_min=fa2.min(), fa2_max=fa2.max(),
    gain_min=gain.min(), gain_max=gain.max(),
    sms=machine.num_sms,
    best_peer=us[V1][SELF] / us.loc[SELF, [x for x in us if not is_rung(x)]].min(),
)  # fmt: skip
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
over = costs["v1, measured"] / costs["sum"]
assert over > 1.03, "the text: more than the sum"
assert fa2[SELF] > 0.97 and us[V1][SELF] > us[["fa4", "cudnn"]].loc[SELF].max(), "the caption"
assert 1.05 < over < 1.15, "the alt text: a tenth"
chapter.glue(over=over)
chapter.predict(
    "By analogy, before anything had run on a GPU: backward v1 reaches 200 to 260 useful TFLOP/s "
    "on full batches of 1,024 tokens.",
    rates[SELF], least=200, most=260, form=".0f",
)  # fmt: skip

# %% tags=["remove-input"]
# | name: fig-seven-ladder
# | caption: >
# |   **Two extra matmuls cost backward v1 less than they seem to: it keeps up with
# |   FlashAttention-2.** Time of each rung on gdpa-self-full-1024, back to back; each tick leads
# |   to its chapter. Dashed: libraries.
# | alt: >
# |   An axis of milliseconds with a tick for each rung and dashed lines for the libraries. v1 and
# |   FlashAttention-2 lie near each other at the right.
chapter.ladder(V1, "backward")

# %% [markdown]
# ## What stays, what changes
#
# Copies, tails and masks are those of {doc}`forward v1 <../forward/v1_tiled>`. Backward v1 does not
# resolve the conflict of {doc}`by_hand`. It walks both ways, with a kernel for each:

# %% tags=["remove-input"]
# | name: fig-seven-walks
# | caption: >
# |   **With two walks every gradient is summed in the registers of one program.** Left: a program
# |   of the first kernel owns the keys of a column and walks down. Right: one of the second owns
# |   the queries of a row. Pale: done; filled: now. Around the tiles: what is held (framed) and
# |   what is summed (filled).
# | alt: >
# |   Two grids of tiles. On the left a column is pale down to a filled tile, with parts of K and V
# |   framed above it and parts of dK and dV filled below. On the right a row is pale up to a filled
# |   tile, with parts of Q and dO framed at its left and one of dQ filled at its right.
down = [("V", "above", False), ("K", "above", False), ("dK", "below", True), ("dV", "below", True)]
along = [("dO", "left", False), ("Q", "left", False), ("dQ", "right", True)]
walks = {
    "owns keys: dK, dV": drawings.Tiles((3, 2), [(row, 2) for row in range(3)], down),
    "owns queries: dQ": drawings.Tiles((3, 2), [(3, column) for column in range(2)], along),
}
chapter.figure(drawings.tiles(walks), modelled="the loops of keys_kernel and queries_kernel")

# %% [markdown]
# | MMA | keys kernel | queries kernel | necessary |
# |:--|:--|:--|:--|
# | scores | $K Q^{\mathsf T}$ | $Q K^{\mathsf T}$ | once |
# | dP | $V dO^{\mathsf T}$ | $dO\,V^{\mathsf T}$ | once |
# | dV | $P^{\mathsf T} dO$ | | once |
# | dK | $dS^{\mathsf T} Q$ | | once |
# | dQ | | $dS\,K$ | once |
#
# Two of the seven {term}`MMAs <MMA>` are repetitions, and so is the activation's slope. Loads grow
# with the length, since every block of keys reads all of Q and dO, and every block of queries all
# of K and V. Neighbours in the grid read the same rows at about the same time, so L2, the cache
# that all SMs share, can serve them.
#
# The loop of the first kernel, where `member` counts the query heads that share a key head:

# %% tags=["remove-input"]
plain = {"segments_ptr": None, "LOWER_RIGHT": False, "BIAS": None}
chapter.code(decided(v1_tiled_backward.keys_kernel, **plain), "for member", "dk_ptrs")

# %% [markdown]
# The second kernel is its mirror image, with one {term}`accumulator`. A row of a gradient belongs
# to one program, which adds its tiles, and the heads of a group, in the order of a loop. So the
# result is deterministic, without atomics and fp32 buffers.
#
# ## Nothing is transposed in registers
#
# The textbook writes $S = Q K^{\mathsf T}$ everywhere and then `tl.dot(tl.trans(p), grad)`. In the
# emulator the first kernel, written that way, gives the same bits. To the compiler the two differ:

# %% tags=["remove-cell"]
textbook = studies.changed(
    v1_tiled_backward,
    ("s = tl.dot(k, q.T, input_", "s = tl.dot(q, k.T, input_"),
    ("p = mask_transposed(p,", "p = mask_probabilities(p,"),
    ("slope = mask_transposed(slope,", "slope = mask_probabilities(slope,"),
    ("dv = tl.dot(p.to(grad.dtype), grad,", "dv = tl.dot(tl.trans(p.to(grad.dtype)), grad,"),
    ("            dp = tl.dot(v, grad.T,", "            dp = tl.dot(grad, v.T,"),
    ("dk = tl.dot((slope * dp).to(q.dtype),", "dk = tl.dot(tl.trans((slope * dp).to(q.dtype)),"),
)
one_head = studies.batch((512,))
ran = studies.backward(v1_tiled_backward, one_head)
same = studies.backward(textbook, one_head).gradients
assert all(map(torch.equal, same, ran.gradients)), "the text: the same bits"
built = {
    name: studies.build_backward(module, "keys_kernel", needs=(False, True, True))
    for name, module in {"K Qᵀ (v1)": v1_tiled_backward, "Q Kᵀ (textbook)": textbook}.items()
}
orders = studies.facts(built, ("STSM", "BAR")).drop(columns="serialised")
counted = [len(re.findall(r"\btt\.trans\b", x.asm["ttgir"])) for x in built.values()]
orders.insert(1, "transposes", counted)
assert orders["transposes"].tolist() == [0, 2], "the text: P and dS"
spills, more_spills = orders["spilled (B)"]
assert more_spills > spills, "the caption says so"
chapter.glue(spills=spills, more_spills=more_spills)

# %% tags=["remove-input"]
chapter.table(
    orders.rename(columns={"kernel": "scores as"}), name="tab-seven-orders",
    caption="**The textbook's orientation transposes twice, through shared memory, and spills "
    "more.** STSM stores a tile to shared memory, BAR is a barrier of the whole CTA.",
    compiled="keys kernel compiled for sm_90a, head_dim 128, bf16",
)  # fmt: skip

# %% [markdown]
# *It is slower code.* A Hopper tensor core takes its first operand from {term}`shared memory`, or
# from registers in the layout in which it leaves results. P transposed is in neither place, so it
# is written to shared memory and read back between two barriers, and {glue:text}`more_spills:.0f`
# bytes of registers {term}`spill` instead of {glue:text}`spills:.0f`. What v1 transposes are
# *loaded* tiles, `q.T` and `grad.T`. Those lie in shared memory, and `wgmma` reads them either way.
#
# *It was wrong code.* On Hopper, Triton compiled exactly this pattern, `tl.dot(tl.trans(x), ...)`
# with an `x` that comes from another MMA, to wrong results. It was reported [for
# 3.2.0](https://github.com/triton-lang/triton/issues/6124), and a library of linear attention
# [refuses](https://github.com/fla-org/flash-linear-attention/pull/983) Hopper with Triton from
# 3.4.0 to before 3.7.1 for [such a
# line](https://github.com/fla-org/flash-linear-attention/pull/826). v1 avoids the pattern. A kernel
# of all three gradients transposes dS once, so {doc}`backward v2 <v2_fused_backward>` depends on a
# compiler that gets it right.
#
# ## Is it right?
#
# | what | catches | misses |
# |:--|:--|:--|
# | autograd and differences of the definition | a wrong formula | the kernels |
# | the emulator, on every change | a wrong kernel, a race, a tail, a mask | the compiler |
# | reading what was compiled | transposes, spills, serialised wgmma | wrong code |
# | the same tests on a GPU | wrong code, on the shapes of the tests | other shapes |
# | the check before each timing | wrong code, on the shape that is timed | other shapes |
#
# ## The chain costs more than the repetition
#
# What do memory, tensor cores and activation need, each alone on the machine? Both kernels read all
# inputs, so 11 tensors are moved instead of 7:

# %% tags=["remove-input"]
# | name: fig-seven-costs
# | caption: >
# |   **Backward v1 takes longer than the sum of all that it needs.** Full batches of 1,024 tokens.
# |   Parts and sum are modelled.
# | alt: >
# |   Horizontal bars in ms. The five MMAs are the longest part; the two repeated ones are shorter
# |   than the activation. The sum is longer than any, and v1 is about a tenth longer still.
chapter.figure(
    charts.bars(costs, xlabel="ms", highlight=["v1, measured"], form=".1f"),
    measured=chapter.rows("backward/results", workload=SELF, impl=V1, **of),
)

# %% [markdown]
# v1 takes {glue:text}`over:.2f` times the *sum* of everything, so whatever overlaps is less than
# what the count leaves out, the waiting. The MMAs form a chain: scores come before the activation,
# the activation before dV, slope and dP before dS, and dS before dK.
#
# No other work fills the gaps, because an SM holds one program of the first kernel. dK and dV of
# 128 keys alone take 128 registers of each of its threads, half of what a thread may have. The way
# out is different work for each warp ({doc}`v4_warp_specialized_backward`).
#
# ## What we predicted

# %% tags=["remove-input"]
chapter.predictions()

# %% [markdown]
# It did better. Over all workloads, v1 is {glue:text}`fa2_min:.2f` to {glue:text}`fa2_max:.2f`
# times as fast as FlashAttention-2. On full batches of 1,024 tokens the best baseline is
# {glue:text}`best_peer:.2f` times as fast as v1. The best later kernel is {glue:text}`gain_min:.1f`
# to {glue:text}`gain_max:.1f` times as fast over all workloads (all back to back).

# %% tags=["remove-input"]
chapter.profile("v1_tiled_backward", workload="gdpa-self-full-512", direction="backward")

# %% [markdown]
# ## Exercises
#
# :::{exercise} What a causal mask saves
# :label: ex-seven-causal
#
# Of 512 × 512 scores half count under a causal mask. Which share of its MMAs does each kernel
# compute, with the default tiles? Check with `studies.backward`. *(paper, then emulator; ten
# minutes)*
# :::

# %% tags=["remove-cell"]
masked = studies.backward(v1_tiled_backward, replace(one_head, mask=Mask(causal=True))).reports
causal_share = {100 * masked[name].dots / ran.reports[name].dots for name in masked}
assert len(causal_share) == 1, "the answer: the same share in both kernels"
chapter.glue(causal=causal_share.pop())

# %% [markdown]
# :::{solution} ex-seven-causal
# :class: dropdown
#
# A block of keys skips the tiles of queries that end before its first key, and a block of queries
# skips the tiles of keys that begin after its last row. That leaves {glue:text}`causal:.1f` % of
# the MMAs in both kernels. The excess over half is the diagonal, where tiles are computed whole and
# masked.
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
# several programs share a block of keys, write partial sums of dK and dV in fp32, and add them in
# fixed order.
# :::
#
# ## Takeaways
#
# - If a tile has two owners, compute it twice: that is deterministic and needs no memory.
# - Choose the orientation in which a result is the next operand. A transpose of a result costs a
#   trip through shared memory.
# - An emulator checks the source. Only a comparison on the machine checks the compiler, and it must
#   look at every gradient.
