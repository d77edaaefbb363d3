# ---
# jupyter:
#   kernelspec: {name: python3, display_name: Python 3}
# measures: true
# ---

# %% [markdown]
# # Roofline: a bracket of time before there is a kernel
#
# How fast could GDPA run on this GPU if nobody made a mistake?
#
# :::{admonition} In this chapter (20 minutes)
# You will put any workload between two times, one for perfect overlap of arithmetic and traffic and
# one for none, from two measured ceilings: matmuls at {glue:text}`matmul:.0f` TFLOP/s, copies at
# {glue:text}`copy_gbytes:.0f` to {glue:text}`copy_high:.0f` GB/s. {glue:text}`memory_bound:.0f` of
# the {glue:text}`published:.0f` published shapes are memory-bound, and a kernel whose tensor cores
# wait for the tanh ends at {glue:text}`in_turns:.0f` TFLOP/s.
# :::

# %%
import functools

import pandas as pd
import torch
from IPython.display import display

from gdpa_kernels.measuring import roofline, timing
from gdpa_kernels.measuring import system as systems
from gdpa_kernels.measuring.workload import FIGURES, WORKLOADS, Full, Workload, workload
from gdpa_kernels.report import charts, claims, drawings, page, results
from gdpa_kernels.report.chapter import Chapter

# %% tags=["parameters"]
mode = "replay"
device = "cpu"
data_dir = "data"

# %% tags=["hide-input"]
chapter = Chapter("measuring/roofline", mode=mode, device=device, data_dir=data_dir)


def plan(session):
    """Square matmuls of random numbers and of zeros, and copies, by size."""
    matmuls, copies, options = {}, {}, {"device": session.device, "dtype": torch.bfloat16}
    for size in (1024, 2048, 4096, 8192, 16384):
        for values, make in {"random": torch.randn, "zeros": torch.zeros}.items():
            pair = (make((size, size), **options) for _ in range(2))
            matmuls[values, size, 2 * size**3] = functools.partial(torch.mm, *pair)
    samples = timing.sample_kernels(matmuls, session.device, session.protocol)
    session.tabulate("matmul", ("values", "size", "flops"), samples)
    for megabytes in (4, 16, 64, 256, 1024, 4096):
        source = torch.randn(megabytes * 2**19, **options)
        key = (megabytes, megabytes * 2**21)
        copies[key] = functools.partial(torch.empty_like(source).copy_, source)
    samples = timing.sample_kernels(copies, session.device, session.protocol)
    session.tabulate("copy", ("megabytes", "bytes"), samples)


chapter.measure(plan)
compared = chapter.compare(plan)

# %%
record = chapter.record()
machine = systems.load(chapter.data_dir / "systems" / f"{record.system}.json")
ceilings = results.ceilings(record)
tanh_per_us = 16 * machine.num_sms * machine.max_sm_clock_mhz  # 16 per SM and clock
tanh = tanh_per_us * 4 * 128 / 1e6  # as TFLOP/s of matmuls at head_dim 128
in_turns = 1 / (1 / ceilings.tflops + 1 / tanh)


def placed(name: str) -> dict:
    """What a workload and the ceilings say of its forward pass."""
    work = WORKLOADS[name]
    found = roofline.bracket(work, "forward", ceilings)
    return {
        "workload": name,
        "FLOP/byte": work.flops("forward") / work.bytes("forward"),
        "matmul floor (µs)": found.compute_us,
        "memory floor (µs)": found.memory_us,
        "lower (µs)": found.lower_us,
        "upper (µs)": found.upper_us,
        "bound by": "memory" if found.bound == "memory" else "matmul",
        "high": found.tflops_at_lower,
        "low": work.flops("forward") / found.upper_us / 1e6,
    }


everything = pd.DataFrame([placed(name) for name in WORKLOADS]).set_index("workload")
chapter.glue(tanh=tanh, in_turns=in_turns, tera=tanh_per_us / 1e6, sms=machine.num_sms,
             clock=machine.max_sm_clock_mhz, watts=machine.power_limit_w)  # fmt: skip

# %% tags=["remove-input"]
# | name: fig-roofline-workloads
# | caption: >
# |   The roofline of the H200 and every forward workload under it, both axes logarithmic. A mark is
# |   the fast end of the bracket (perfect overlap), the line below it reaches to the slow end
# |   (none). Grey slope: copies of 1:1 to 3:1. Dotted: one tanh per score alone, and matmuls and
# |   tanh in turns. Half dense and half jagged coincide, and so do self and cross at 256.
# | alt: >
# |   A roof: a slope, then a flat top from about 180 FLOP per byte on. Marks of five families lie
# |   on it: short self-attention on the slope, long self-attention on the flat part,
# |   cross-attention crowded around the knee. The line of tanh lies far above the roof.
points = everything.rename(columns={"FLOP/byte": "intensity"})
levels = {f"one tanh per score: {tanh:.0f}": tanh, f"in turns: {in_turns:.0f}": in_turns}
labels = {f"gdpa-self-full-{n}": f"{n}" for n in (256, 1024)}
chapter.figure(
    drawings.roofline(points, ceilings, levels, labels), data=everything.reset_index(),
    modelled=f"counts of the workloads over the ceilings measured in record {record.id}",
)  # fmt: skip

# %% [markdown]
# ## FLOPs per byte
#
# A workload knows its useful FLOPs and its fewest bytes without any kernel. Forward, with $h$ heads
# of dimension $d$ and 2 bytes per number, a sequence of $n$ queries and $m$ keys costs
#
# $$
# \text{FLOPs} = 4\,h\,d\,n\,m, \qquad \text{bytes} = 2\,h\,d\,(2n + 2m):
# $$ (eq-roofline-counts)
#
# two matmuls of two FLOPs per multiply-add; q, k, v read once and o written once. Heads and head
# dimension cancel in the quotient, the **arithmetic intensity**
#
# $$
# I = \frac{n\,m}{n + m} \;\text{FLOP/byte}.
# $$ (eq-roofline-intensity)
#
# Self-attention has $n = m = N$ and $I = N/2$. Cross-attention with 256 keys cannot exceed
# $I = 256$, however many queries there are. The counts of the package agree:

# %%
for n in (256, 2048):
    for name, m in ((f"gdpa-self-full-{n}", n), (f"gdpa-cross-full-{n}", 256)):
        assert everything["FLOP/byte"][name] == n * m / (n + m)
        print(f"{name:20} {n * m / (n + m):7.1f} FLOP/byte")

# %% [markdown]
# ## Two ceilings, measured
#
# A roofline {cite}`williams2009roofline` is usually drawn from a data sheet. Ours is measured, in
# the same run as every kernel that is held against it: a long matmul draws more power than the
# board may have, and the clock falls until it does not. The compute ceiling is one large matmul of
# random bf16 matrices. The memory ceiling is a copy with the kernel's own mix of reads and writes.
# Self-attention reads three tensors and writes one, 3:1. A plain copy is 1:1 and slower, because
# DRAM loses time whenever it turns from reading to writing. Between measured mixes the rate is
# interpolated.


# %%
def ceiling_table(limits) -> pd.DataFrame:
    rows = []
    for limit in limits:
        time, moved = pd.Series(limit.samples_us).median(), limit.bytes_read + limit.bytes_written
        if limit.kind == "matmul":
            rows.append((limit.shape, "", limit.flops / time / 1e6, "TFLOP/s"))
        else:
            mix = f"{limit.bytes_read // limit.bytes_written}:1"
            rows.append((limit.shape, mix, moved / time / 1e3, "GB/s"))
    return pd.DataFrame(rows, columns=["what ran", "read : written", "rate", "unit"])


# %% tags=["remove-input"]
chapter.table(ceiling_table(record.ceilings), measured=[record.id])

# %%
sweep = chapter.recorded("matmul").groupby(["size", "values", "flops"])["time_us"].median()
rates = sweep.reset_index().assign(tflops=lambda t: t["flops"] / t["time_us"] / 1e6)
rates = rates.pivot(index="size", columns="values", values="tflops")
gain = 100 * (rates["zeros"] / rates["random"] - 1)
copies = chapter.recorded("copy").groupby(["megabytes", "bytes"])["time_us"].median().reset_index()
copies = (copies["bytes"] / copies["time_us"] / 1e3).set_axis(copies["megabytes"])

# %% tags=["remove-input"]
# | name: fig-roofline-ceilings
# | caption: >
# |   Square bf16 matmuls by size, of random numbers and of zeros: the same instructions. Dashed:
# |   the ceiling of this record, a matmul of 8192.
# | alt: >
# |   Two lines over a logarithmic size axis. Both rise steeply from 1024 to 4096 and level off near
# |   the dashed ceiling, zeros above random numbers.
chart = charts.lines(
    rates, xlabel="size of the square matrices", ylabel="TFLOP/s",
    highlight=["random"], ceiling=ceilings.tflops,
)  # fmt: skip
chapter.figure(chart, data=rates.reset_index(), measured=[record.id])
chapter.glue(
    matmul=ceilings.tflops, copy_gbytes=ceilings.copies[0][1], copy_high=ceilings.copies[-1][1],
    small_matmul=rates["random"][1024], small_copy=copies[4], swept=rates["random"][8192],
    zeros_4096=gain[4096], zeros_8192=gain[8192],
)  # fmt: skip
assert (gain[gain.index >= 2048] > 0).all() and abs(gain[1024]) < 2, "the text says so"

# %% [markdown]
# *Small problems reach neither ceiling.* A matmul of 1024 has 64 output tiles of 128 by 128 for
# {glue:text}`sms:.0f` SMs and ends at {glue:text}`small_matmul:.0f` TFLOP/s; a copy of 4 MiB ends
# at {glue:text}`small_copy:.0f` GB/s. The bracket knows nothing about that. It is meant for
# launches that fill the machine, as batch 1,152 does.
#
# *Zeros are faster*, by {glue:text}`zeros_4096:.1f` % at 4096 and {glue:text}`zeros_8192:.1f` % at
# 8192, and not at all at 1024, where nothing is hot. The likely reason is power: zeros switch fewer
# transistors, and under a limit of {glue:text}`watts:.0f` W energy that is not spent comes back as
# clock frequency. A benchmark that allocates its inputs with `zeros` or `empty` measures another
# chip.
#
# ## The bracket
#
# FLOPs over the compute ceiling is one floor, bytes over the memory ceiling is another. With
# perfect overlap a kernel takes the larger of the two, without any it takes their sum:

# %%
found = roofline.bracket(workload("gdpa-self-full-1024"), "forward", ceilings)
print(f"matmul floor {found.compute_us:.0f} us, memory floor {found.memory_us:.0f} us")
print(f"bracket {found.lower_us:.0f} to {found.upper_us:.0f} us, bound by {found.bound}")

# %% [markdown]
# `percent_of_roofline`, in every table of this book, is `lower_us` over the measured time. A kernel
# *above* the bracket wastes more than overlap: it moves bytes twice, leaves SMs idle, or is limited
# by something that the two ceilings do not contain. A correct kernel *below* it would mean that
# FLOPs or bytes are counted wrongly, or that the ceiling is none. All forward kernels of
# {doc}`../forward/results`, each with the ceilings of its record:

# %% tags=["remove-input"]
timed = chapter.rows("forward/results", direction="forward").dropna(subset=["percent_of_roofline"])
chapter.predict(
    f"None of {len(timed)} correct kernel times lies below its bracket.",
    timed["percent_of_roofline"].max(), most=100, form=".0f", unit=" % of the roofline",
)  # fmt: skip

# %% [markdown]
# The published shapes, modelled before any kernel has run:

# %%
names = list(dict.fromkeys(name for f in FIGURES if "-fwd-" in f for name in FIGURES[f]))
floors = everything.loc[names].drop(columns=["high", "low"]).round(1).reset_index()
ridges = [ceilings.tflops * 1e3 / rate for _, rate in ceilings.copies]
spread = everything["upper (µs)"] / everything["lower (µs)"]
cross = everything.loc["gdpa-cross-full-2048"]
chapter.glue(
    published=len(names), memory_bound=(floors["bound by"] == "memory").sum(),
    ridge_low=min(ridges), ridge_high=max(ridges), full_256=spread["gdpa-self-full-256"],
    gap=100 * (spread["gdpa-self-full-2048"] - 1), widest=spread.idxmax(), factor=spread.max(),
    cross=cross["matmul floor (µs)"] / cross["memory floor (µs)"],
    share=100 * ceilings.tflops / tanh, turns_share=100 * in_turns / ceilings.tflops,
)  # fmt: skip

# %% tags=["remove-input"]
chapter.table(floors, modelled=f"counts over the ceilings of record {record.id}")

# %% [markdown]
# The knee of the roof, the **ridge**, is where both floors are equal: {glue:text}`ridge_low:.0f` to
# {glue:text}`ridge_high:.0f` FLOP/byte, depending on the mix. Left of it bytes decide. At length
# 256 the slow end of the bracket is {glue:text}`full_256:.1f` times the fast one: what a kernel
# hides decides more than how well it multiplies. At 2,048 the two lie {glue:text}`gap:.0f` % apart,
# and traffic hardly counts.
#
# ## A third ceiling
#
# `tanh.approx` runs on the special function units, which deliver 16 results per SM and clock. One
# score costs one of them and $4d$ FLOPs of matmul. At the highest clock of this machine,
# {glue:text}`clock:.0f` MHz on {glue:text}`sms:.0f` SMs, that is {glue:text}`tera:.2f` · 10¹²
# scores per second, or {glue:text}`tanh:.0f` TFLOP/s of useful work (modelled; for an H100
# FlashAttention-3 states 3.9 TFLOP/s of special functions and 989 TFLOP/s of matmul, nominal
# {cite}`shah2024flashattention3`).
#
# So the tanh of a tile takes {glue:text}`share:.0f` % of the time of its two matmuls. Overlapped
# with them it costs nothing. *Between* them it costs all of that, because scores must be multiplied
# before they can be activated, and activated before they can be multiplied again. A kernel whose
# tensor cores wait meanwhile reaches at most {glue:text}`in_turns:.0f` TFLOP/s,
# {glue:text}`turns_share:.0f` % of the compute ceiling. A rung above that line must overlap the
# two. The rungs up to {doc}`v3 <../forward/v3_persistent>` overlap them only as far as the hardware
# happens to interleave independent programs, and do not get there:

# %% tags=["remove-input"]
early = timed[timed["impl"].isin(["v1_tiled", "v2_tma", "v3_persistent"])]
chapter.predict(
    "No rung from v1 to v3 passes the line of matmuls and tanh in turns.",
    early["tflops"].max(), most=in_turns, form=".0f", unit=" TFLOP/s",
)  # fmt: skip

# %% [markdown]
# The share grows as heads shrink: at head_dim 64 the same tanh stands against half the FLOPs.
#
# ## What the published bars say about another machine
#
# The published charts come from an NVIDIA B200, whose ceilings are not in our records. But a bar is
# also a lower bound on the machine that made it: useful FLOPs at a rate $r$ move at least $r / I$
# bytes per second.

# %%
bars = claims.published_figures()
bars = bars[bars["figure"].str.contains("-fwd-")].set_index("workload")
gbytes = 1e3 * bars["tflops"] / everything["FLOP/byte"].reindex(bars.index)
chapter.glue(
    b200_gbytes=gbytes.max(), b200_busiest=gbytes.idxmax(), b200_fastest=bars["tflops"].idxmax(),
    b200_tflops=bars["tflops"].max(), over_memory=gbytes.max() / ceilings.copies[-1][1],
    over_matmul=bars["tflops"].max() / ceilings.tflops,
)  # fmt: skip

# %% [markdown]
# The bar of {glue:text}`b200_busiest` implies at least {glue:text}`b200_gbytes:.0f` GB/s, that of
# {glue:text}`b200_fastest` at least {glue:text}`b200_tflops:.0f` TFLOP/s (published rates, our
# arithmetic): {glue:text}`over_memory:.1f` and {glue:text}`over_matmul:.1f` times our ceilings. A
# rate from that machine says nothing about a kernel on this one. What can be compared is a share of
# a ceiling, or a ratio of two kernels on one machine.
#
# ## The surprise
#
# Cross-attention with many queries does not become compute-bound like long self-attention. With 256
# keys every query brings and takes its own rows, and the intensity ends at 256. At 2,048 queries
# the matmul floor is only {glue:text}`cross:.2f` times the memory floor. The widest bracket of all
# workloads, a factor of {glue:text}`factor:.2f`, belongs to {glue:text}`widest`. Near the ridge
# overlap is worth the most, and by the published account that is where the operator lives: queries
# of the order of 1,000, keys of the order of 128 {cite}`zhou2026normalization`.
#
# A ceiling is itself a measurement. In the size sweep the matmul of 8192 reached
# {glue:text}`swept:.0f` TFLOP/s, and the ceiling of the same record, seconds apart, is
# {glue:text}`matmul:.0f`. What a difference like that means is the question of the
# {doc}`next chapter <protocol>`.

# %% tags=["remove-input"]
if compared:
    here, ours = ceiling_table(compared.ceilings), ceiling_table(record.ceilings)["rate"]
    display(page.show_table(here.assign(record=ours, ratio=here["rate"] / ours)))

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
# :::{exercise} Pooling by 32 seeds
# :label: ex-roofline-pma
#
# Write the `Workload` of PMA: batch 1,152, 4 heads, head_dim 128, 32 learned queries shared by all
# sequences, 1,024 keys each. Which floor decides, and what does that say about the tensor cores?
# *(code, ten minutes, no GPU)*
# :::

# %% tags=["remove-cell"]
seeds = Workload(
    name="pma", batch=1152, num_heads_q=4, num_heads_k=4, head_dim=128, shared_q=True,
    max_seqlen_q=32, max_seqlen_k=1024, lengths_q=Full(), lengths_k=Full(),
)  # fmt: skip
pooled = roofline.bracket(seeds, "forward", ceilings)
assert pooled.bound == "memory", "the answer says so"
chapter.glue(pma=seeds.flops("forward") / seeds.bytes("forward"), pma_us=pooled.lower_us,
             pma_tflops=pooled.tflops_at_lower, causal=4 * max(ridges))  # fmt: skip

# %% [markdown]
# :::{solution} ex-roofline-pma
# :class: dropdown
#
# `Workload(..., max_seqlen_q=32, max_seqlen_k=1024, shared_q=True)` with both laws `Full()`. The
# intensity is {glue:text}`pma:.0f` FLOP/byte: k and v are read once for 32 queries. The memory
# floor of {glue:text}`pma_us:.0f` µs decides, and at that time the tensor cores deliver
# {glue:text}`pma_tflops:.0f` TFLOP/s. They could idle most of the time, as long as the copies never
# stop.
# :::
#
# :::{exercise} A ceiling that is too low
# :label: ex-roofline-falsify
#
# Find a way to make `percent_of_roofline` exceed 100 for a correct kernel, without touching the
# kernel. Then say how the records of this book rule it out. *(thought, then a GPU)*
# :::
#
# :::{solution} ex-roofline-falsify
# :class: dropdown
#
# Time a kernel on inputs that fit into the L2 cache without flushing it: its bytes no longer come
# from memory. Or give the kernel zeros and the ceiling random numbers. Or measure the ceiling on a
# hot machine and the kernel on a cool one. The protocol flushes, both use random inputs, and each
# record holds its own ceilings.
# :::
#
# ## Takeaways
#
# - Arithmetic intensity is $nm/(n+m)$: heads and head_dim cancel, and the shorter of the two sides
#   caps it.
# - A bracket is two numbers, perfect overlap and none. No correct kernel can be below it; a kernel
#   above it is limited by something else.
# - The tanh unit is a third ceiling: harmless when overlapped with the tensor cores, costly in
#   turns with them.
