# ---
# jupyter:
#   kernelspec: {display_name: Python 3, language: python, name: python3}
# measures: true
# ---

# %% [markdown]
# # Roofline
#
# How fast could GDPA run on this GPU if nobody made a mistake?
#
# :::{admonition} In this chapter (30 minutes)
# You will put any workload between two times, one for perfect overlap of arithmetic and traffic and
# one for none. Of the {glue:text}`published:.0f` published shapes {glue:text}`memory_bound:.0f` are
# memory-bound, and a kernel whose tensor cores wait for the tanh cannot exceed
# {glue:text}`in_turns:.0f` TFLOP/s. A *burst* is one launch on a rested GPU; *back to back* is a
# second without pauses ({doc}`protocol`).
# :::

# %% tags=["hide-input"]
import functools

import pandas as pd
import torch

from _lib import drawings
from gdpa_lab.measuring import cost_model, roofline, timing
from gdpa_lab.measuring import record as records
from gdpa_lab.measuring import system as systems
from gdpa_lab.measuring.workloads import FIGURES, WORKLOADS, workload
from gdpa_lab.report import charts, claims, results
from gdpa_lab.report.chapter import Chapter
from notebooks.measuring import _repeats

# %% tags=["parameters"]
mode = "replay"
device = "cpu"
data_dir = "data"

# %% tags=["remove-cell"]
chapter = Chapter("measuring/roofline", mode=mode, device=device, data_dir=data_dir)


def plan(session):
    """Square matmuls of random numbers and of zeros, by size."""
    matmuls, options = {}, {"device": session.device, "dtype": torch.bfloat16}
    for size in (1024, 2048, 4096, 8192, 16384):
        for values, make in {"random": torch.randn, "zeros": torch.zeros}.items():
            pair = (make((size, size), **options) for _ in range(2))
            matmuls[values, size, 2 * size**3] = functools.partial(torch.mm, *pair)
    samples = timing.sample_kernels(matmuls, session.device, session.protocol)
    session.tabulate("matmul", ("values", "size", "flops"), samples)


chapter.measure(plan)
compared = chapter.compare(plan)
record = chapter.record()
machine = systems.load(chapter.data_dir / "systems" / f"{record.system}.json")
ceilings = results.ceilings(record)
tanh_per_us = 16 * machine.num_sms * machine.max_sm_clock_mhz  # 16 per SM and clock
tanh = tanh_per_us * 4 * 128 / 1e6  # as TFLOP/s of matmuls at head_dim 128
in_turns = 1 / (1 / ceilings.tflops + 1 / tanh)


def brackets(names, ceilings):
    """The ends of the bracket of each workload, in TFLOP/s."""
    rows = {}
    for name in names:
        work = WORKLOADS[name]
        bracket = roofline.bracket(work, "forward", ceilings)
        rows[name] = {
            "intensity": work.flops("forward") / work.bytes("forward"),
            "bound": bracket.bound,
            "high": bracket.tflops_at_lower,
            "low": work.flops("forward") / bracket.upper_us / 1e6,
        }
    return pd.DataFrame(rows).T.rename_axis("workload").infer_objects()


everything = brackets(WORKLOADS, ceilings)
loop = results.ceilings(chapter.record("measuring/power_wall"), "sustained")
climbed = ["v1_tiled", "v8_own_waits"]
measured = chapter.rows("measuring/power_wall", scope="sustained", direction="forward",
                        impl=climbed)  # fmt: skip
measured = measured[measured["workload"].isin(list(WORKLOADS))]
climbs = measured.pivot(index="workload", columns="impl", values="tflops").dropna()
climbs = climbs.set_axis(["first", "last"], axis=1).join(everything["intensity"])
under = brackets(climbs.index, loop)

# %% tags=["remove-input"]
# | name: fig-roofline-workloads
# | caption: >
# |   **From forward v1 to v8 the kernels climb most of the way to the roof.** H200, back to back.
# |   Arrows: from forward v1 to v8. Bars: brackets, from no overlap to perfect overlap. Dotted:
# |   matmuls and tanh in turns.
# | alt: >
# |   A roof: a slope, then a flat top. Under it stand upright arrows in three colours. Each begins
# |   at half to two thirds of the roof and ends inside or just below a grey bar that touches the
# |   roof.
turns_loop = 1 / (1 / loop.tflops + 1 / tanh)
levels = {f"in turns: {turns_loop:.0f}": turns_loop}
labels = {f"gdpa-self-full-{n}": f"{n}" for n in (256, 1024)}
chapter.figure(drawings.roofline(under, climbs, loop, levels, labels), measured=measured)

# %% [markdown]
# ## FLOPs per byte
#
# The useful FLOPs and fewest bytes of a {term}`workload` need no kernel. In the forward pass, with
# $h$ heads of dimension $d$ and 2 bytes per number, a sequence of $n$ queries and $m$ keys needs
# two matmuls at two FLOPs per multiply-add; q, k and v are read once and o is written once. Heads
# and head dimension cancel in the quotient, the **{term}`arithmetic intensity`**
#
# $$
# I = \frac{4\,h\,d\,n\,m}{2\,h\,d\,(2n + 2m)} = \frac{n\,m}{n + m} \;\text{FLOP/byte}.
# $$ (eq-roofline-intensity)
#
# Self-attention has $n = m = N$ and $I = N/2$. Cross-attention with 256 keys cannot exceed
# $I = 256$, however many queries there are.
#
# (rule-ceiling)=
# ## Two ceilings, measured
#
# A {term}`roofline` {cite}`williams2009roofline` is usually drawn from a data sheet. Ours is
# measured in the same run as the kernels held against it, since the power limit lowers the clock.
# The compute ceiling is one large matmul of random bf16 matrices, {glue:text}`matmul:.0f` TFLOP/s.
# The memory ceiling is a copy with the kernel's own mix of reads and writes. Self-attention reads
# three tensors and writes one. A plain copy is slower, because DRAM loses time when it turns from
# reading to writing. Between measured mixes we interpolate:

# %% tags=["remove-input"]
mixes = pd.DataFrame(ceilings.copies, columns=["read per written byte", "GB/s"])
chapter.table(
    mixes.round({"read per written byte": 2, "GB/s": 0}),
    caption="**The more a copy reads for each byte it writes, the faster it is.** Copies by mix.",
    measured=[record.id],
)

# %% tags=["remove-cell"]
sweep = chapter.recorded("matmul").groupby(["size", "values", "flops"])["time_us"].median()
rates = sweep.reset_index().assign(tflops=lambda t: t["flops"] / t["time_us"] / 1e6)
rates = rates.pivot(index="size", columns="values", values="tflops")
gain = 100 * (rates["zeros"] / rates["random"] - 1)

# %% tags=["remove-input"]
# | name: fig-roofline-ceilings
# | caption: >
# |   **Zeros are faster than random numbers, by the same instructions.** Square bf16 matmuls by
# |   size, in bursts. Dashed: the ceiling of this record, a matmul of 8,192.
# | alt: >
# |   Two lines over a logarithmic size axis. Both rise steeply at first and level off near
# |   the dashed ceiling, zeros above random numbers.
chart = charts.lines(
    rates, xlabel="size of the square matrices", ylabel="TFLOP/s, burst",
    highlight=["random"], log="x", levels={"matmul of 8,192": ceilings.tflops},
)  # fmt: skip
chapter.figure(chart, data=rates.reset_index(), measured=[record.id])
chapter.glue(
    matmul=ceilings.tflops, small_matmul=rates["random"][1024],
    zeros_8192=gain[8192],
)  # fmt: skip
assert (gain[gain.index >= 2048] > 0).all(), "the caption"

# %% tags=["remove-cell"]
runs = [run for run in records.load_all(chapter.data_dir) if run.system == record.system]
all_limits = _repeats.ceilings(runs)
for key, column in {"burst": "matmul, burst", "sustained": "matmul, back to back",
                    "copies": "copy 1:1, burst (GB/s)"}.items():  # fmt: skip
    values = all_limits[column].dropna().astype(float)
    chapter.glue(**{f"{key}_median": values.median(),
                    f"{key}_drift": 100 * (values.max() / values.min() - 1)})  # fmt: skip
    assert values.max() / values.min() < 1.05, "the text: a few per cent"

# %% [markdown]
# **Which ceiling to use.** The matmul drifts by {glue:text}`burst_drift:.0f` % between runs in
# bursts and, with temperature and voltage, by {glue:text}`sustained_drift:.0f` % back to back,
# copies by {glue:text}`copies_drift:.0f` %; every figure uses those of its own run. For arithmetic
# on paper take the medians, {glue:text}`burst_median:.0f` TFLOP/s in bursts,
# {glue:text}`sustained_median:.0f` back to back and {glue:text}`copies_median:,.0f` GB/s.
#
# *Small problems do not reach the ceiling.* A matmul of 1,024 has 64 output tiles of 128 by 128 for
# {glue:text}`sms:.0f` SMs and reaches {glue:text}`small_matmul:.0f` TFLOP/s.
#
# *Zeros are faster* than random numbers, by {glue:text}`zeros_8192:.1f` % at 8,192. The likely
# reason is power: zeros switch fewer transistors, and under a limit of {glue:text}`watts:.0f` W the
# energy saved allows a higher clock.
#
# ## The bracket
#
# FLOPs over the compute ceiling is one floor, bytes over the memory ceiling another. With perfect
# overlap a kernel takes the larger of the two, with none their sum:

# %%
work = workload("gdpa-self-full-1024")
bracket = roofline.bracket(work, "forward", ceilings)
print(f"floors: matmul {bracket.compute_us:.0f}, memory {bracket.memory_us:.0f} us")
print(f"bracket: {bracket.lower_us:.0f} to {bracket.upper_us:.0f} us")

# %% [markdown]
# `percent_of_roofline`, in every table of this book, is `lower_us` over the measured time. A kernel
# *above* the bracket wastes more than overlap: it moves bytes twice, leaves SMs idle, or is limited
# by something that the two ceilings leave out. A correct kernel *below* it would mean that FLOPs or
# bytes are counted wrongly, or that a ceiling is too low.

# %% tags=["remove-cell"]
timed = chapter.rows("forward/results", direction="forward").dropna(subset=["percent_of_roofline"])
chapter.predict(
    f"None of {len(timed)} correct times in bursts of the forward results lies below its bracket.",
    timed["percent_of_roofline"].max(), most=100, form=".0f", unit=" % of the roofline",
)  # fmt: skip

names = {name for f in FIGURES if "-fwd-" in f for name in FIGURES[f]}
ridges = [ceilings.tflops * 1e3 / rate for _, rate in ceilings.copies]
spread = everything["high"] / everything["low"]
chapter.glue(
    published=len(names), memory_bound=(everything.loc[list(names), "bound"] == "memory").sum(),
    ridge_low=min(ridges), ridge_high=max(ridges), full_256=spread["gdpa-self-full-256"],
    gap=100 * (spread["gdpa-self-full-2048"] - 1), widest=spread.idxmax(), factor=spread.max(),
    cross=1 / (spread["gdpa-cross-full-2048"] - 1), causal=4 * min(ridges),
    share=100 * ceilings.tflops / tanh, turns_share=100 * in_turns / ceilings.tflops,
    tanh=tanh, in_turns=in_turns, tera=tanh_per_us / 1e6, sms=machine.num_sms,
    clock=machine.max_sm_clock_mhz, watts=machine.power_limit_w,
)  # fmt: skip

# %% [markdown]
# The **ridge** of the roof is where both floors are equal: {glue:text}`ridge_low:.0f` to
# {glue:text}`ridge_high:.0f` FLOP/byte, depending on the mix. Left of it bytes decide. At length
# 256 the slow end of the bracket is {glue:text}`full_256:.1f` times the fast one, at 2,048
# {glue:text}`gap:.0f` % above it.
#
# ## A third ceiling: the tanh
#
# One score costs one `tanh.approx` of the {term}`MUFU` and $4d$ FLOPs of matmul. At the highest
# clock of this machine, {glue:text}`clock:,.0f` MHz on {glue:text}`sms:.0f` SMs, that is
# {glue:text}`tera:.2f` · 10¹² scores per second, or {glue:text}`tanh:,.0f` TFLOP/s of useful work
# at head_dim 128 (modelled), and half of that at 64.
#
# In *cycles* one `tanh` per score takes {glue:text}`cycles:.0f` % of the tensor cores' time
# ({doc}`../operator/machine`); use that to plan a kernel, since its units share one clock. In
# *time* it is {glue:text}`share:.0f` % of the measured matmul, which the power limit keeps at
# {glue:text}`ghz:.2f` GHz.
#
# Overlapped with the matmuls the tanh costs nothing. *Between* them it costs all of its time. A
# kernel whose tensor cores wait meanwhile reaches at most {glue:text}`in_turns:.0f` TFLOP/s in a
# burst, {glue:text}`turns_share:.0f` % of the compute ceiling. The kernels up to {doc}`forward v3
# <../forward/v3_persistent>` overlap the two only by chance, so we expect them to stay below that
# line:

# %% tags=["remove-input"]
early = timed[timed["impl"].isin(["v1_tiled", "v2_tma", "v3_persistent"])]
chapter.predict(
    "No kernel from forward v1 to v3 passes the line of matmuls and tanh in turns.",
    early["tflops"].max(), most=in_turns, form=".0f", unit=" TFLOP/s",
)  # fmt: skip
chapter.predictions()
ghz = cost_model.H200.clock_ghz(ceilings.tflops)
cycles = 100 * 128**2 / cost_model.MUFU_LANES / cost_model.mma(cost_model.H200, 2)
highest = machine.max_sm_clock_mhz / 1e3
assert abs(cycles * ghz / highest - 100 * ceilings.tflops / tanh) < 0.1, "the text: the two clocks"
chapter.glue(cycles=cycles, ghz=ghz)

# %% [markdown]
# ## Short keys never become compute-bound
#
# In cross-attention every query moves rows of its own, and 256 keys cap the intensity at 256. At
# 2,048 queries the matmul floor is only {glue:text}`cross:.2f` times the memory floor. The widest
# bracket of all workloads, a factor of {glue:text}`factor:.2f`, belongs to {glue:text}`widest`.
# Near the ridge overlap is worth the most, and by the published account that is where the operator
# lives: queries of the order of 1,000, keys of the order of 128 {cite}`zhou2026normalization`.

# %% tags=["remove-input"]
if compared:
    print("here:", roofline.Ceilings.measured(compared.ceilings), "ours:", ceilings, sep="\n")
bars = claims.published_figures()
bars = bars[bars["figure"].str.contains("-fwd-")].set_index("workload")
gbytes = 1e3 * bars["tflops"] / everything["intensity"].reindex(bars.index)
chapter.glue(b200_gbytes=gbytes.max(), b200_busiest=gbytes.idxmax(),
             over_memory=gbytes.max() / ceilings.copies[-1][1])  # fmt: skip

# %% [markdown]
# ## Exercises
#
# :::{exercise} A causal mask
# :label: ex-roofline-causal
#
# A causal mask halves the pairs of self-attention and leaves the bytes alone. From which length on
# is the causal forward pass compute-bound? *(paper, five minutes)*
# :::
#
# :::{solution} ex-roofline-causal
# :class: dropdown
#
# The intensity is about $N/4$ and must exceed the ridge: from about {glue:text}`causal:.0f` on,
# twice as late as without the mask.
# :::
#
# :::{exercise} What a bar says about a machine
# :label: ex-roofline-bar
#
# The published charts come from a B200, whose ceilings we have not measured. What do they say about
# its memory? Begin with the highest bar of {glue:text}`b200_busiest`. *(paper, five minutes)*
# :::
#
# :::{solution} ex-roofline-bar
# :class: dropdown
#
# Useful FLOPs at a rate $r$ move at least $r / I$ bytes per second. That bar implies at least
# {glue:text}`b200_gbytes:,.0f` GB/s (a published rate, our arithmetic),
# {glue:text}`over_memory:.1f` times our fastest copy. A rate from that machine says nothing about a
# kernel on this one. Shares of a ceiling can be compared, or ratios of kernels on one machine.
# :::
#
# :::{exercise} A ceiling that is too low
# :label: ex-roofline-falsify
#
# Make `percent_of_roofline` exceed 100 for a correct kernel without touching the kernel. How do the
# records of this book rule that out? *(paper, then GPU)*
# :::
#
# :::{solution} ex-roofline-falsify
# :class: dropdown
#
# Time a kernel on inputs that fit into the L2 cache without flushing it: its bytes no longer come
# from memory. Or give the kernel zeros and the ceiling random numbers, or measure the ceiling on a
# hot machine and the kernel on a cool one. A burst flushes the cache, and back to back the
# published batches are too large for it; both use random inputs, and each record has its own
# ceilings.
# :::
#
# ## Takeaways
#
# - Arithmetic intensity is $nm/(n+m)$: heads and head_dim cancel, and the shorter side caps it.
# - No correct kernel can be below its bracket; a kernel above it is limited by something else.
# - The tanh unit is a third ceiling: harmless when overlapped with the tensor cores, costly in
#   turns.
