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
# :::{admonition} Overview
# - Two ceilings, both measured: matrix products reach {glue:text}`matmul_tflops:.0f` TFLOP/s,
#   copies {glue:text}`copy_low:.0f` to {glue:text}`copy_high:.0f` GB/s, depending on how much they
#   read for each byte they write.
# - Together they put every workload between two times, one for perfect overlap of arithmetic and
#   traffic and one for none. {glue:text}`memory_bound:.0f` of the
#   {glue:text}`published_count:.0f` published shapes are memory-bound.
# - A third ceiling, the unit that computes tanh, is far away as long as it works beside the tensor
#   cores. A kernel that lets them take turns ends at {glue:text}`serial_tflops:.0f` TFLOP/s. Like
#   the brackets this is modelled, from counts and measured ceilings.
# :::

# %% tags=["remove-cell"]
import numpy as np
import pandas as pd
from IPython.display import Markdown, display

from gdpa_kernels.measuring import roofline
from gdpa_kernels.measuring import system as systems
from gdpa_kernels.measuring.workload import FIGURES, WORKLOADS, Full, Workload, workload
from gdpa_kernels.report import claims, figures, results
from gdpa_kernels.report.house import INK, RUNG_COLOURS

# %% tags=["parameters"]
mode = "replay"
device = "cpu"
data_dir = "data"

# %% [markdown]
# ## FLOPs per byte
#
# A workload knows two numbers without any kernel: its useful FLOPs and its fewest bytes. Forward,
# with $h$ heads of dimension $d$ and 2 bytes per number, a sequence of $n$ queries and $m$ keys
# costs
#
# $$
# \text{FLOPs} = 4\,h\,d\,n\,m, \qquad \text{bytes} = 2\,h\,d\,(2n + 2m),
# $$ (eq-roofline-counts)
#
# two products of two FLOPs per multiply-add, and q, k, v read once and o written once. Heads and
# head dimension cancel in the quotient, the **arithmetic intensity**
#
# $$
# I = \frac{n\,m}{n + m} \;\text{FLOP/byte}.
# $$ (eq-roofline-intensity)
#
# Self-attention has $n = m = N$, so $I = N/2$. Cross-attention with 256 keys cannot exceed
# $I = 256$, however many queries there are. For lengths uniform from 1 to $N$ the sums over the
# batch take the place of $n m$ and $n + m$, and both versions of the half-filled batch end at
# $I \approx N/3$. The formula and the counts of the package agree:

# %%
for n in (256, 512, 1024, 2048):
    for name, m in ((f"gdpa-self-full-{n}", n), (f"gdpa-cross-full-{n}", 256)):
        work = workload(name)
        intensity = work.flops("forward") / work.bytes("forward")
        assert intensity == n * m / (n + m)
        print(f"{name:20} {intensity:7.1f} FLOP/byte")

# %% [markdown]
# ## Two ceilings, measured
#
# A roofline {cite}`williams2009roofline` is usually drawn from a data sheet. Ours is measured, in
# the same run as every kernel that is held against it, because what a chip sustains is not what it
# is sold for: a long matrix product draws more power than the board may have, and the clock falls
# until it does not.
#
# The compute ceiling is one large product of random bf16 matrices. The memory ceiling is a copy
# with the kernel's own mix of reads and writes. Self-attention reads three tensors and writes one,
# so its mix is 3:1; a plain copy has 1:1 and is slower: DRAM loses time whenever it turns from
# reading to writing. Between measured mixes the rate is interpolated.
#
# The cell runs with `make measure NOTEBOOKS=measuring/roofline`. It also sweeps sizes, and it
# multiplies zeros.

# %% tags=["hide-input"]
if mode in ("measure", "compare"):
    import functools

    import torch

    from gdpa_kernels.measuring import timing
    from gdpa_kernels.measuring.session import Session

    session = Session("notebooks/measuring/roofline.py", device)
    products = {}
    for size in (1024, 2048, 4096, 8192, 16384):
        shape = {"size": (size, size), "device": session.device, "dtype": torch.bfloat16}
        for values, make in {"random": torch.randn, "zeros": torch.zeros}.items():
            key = (values, size, 2 * size**3)
            products[key] = functools.partial(torch.mm, make(**shape), make(**shape))
    samples = timing.sample_kernels(products, session.device, session.protocol)
    session.tabulate("matmul", ("values", "size", "flops"), samples)
    copies = {}
    for megabytes in (4, 16, 64, 256, 1024, 4096):
        source = torch.randn(megabytes * 2**19, device=session.device, dtype=torch.bfloat16)
        key = (megabytes, megabytes * 2**21)
        copies[key] = functools.partial(torch.empty_like(source).copy_, source)
    samples = timing.sample_kernels(copies, session.device, session.protocol)
    session.tabulate("copy", ("megabytes", "bytes"), samples)
    if mode == "measure":
        print(session.write(data_dir))

# %% tags=["remove-cell"]
RECORD = results.latest_record(data_dir, notebook="notebooks/measuring/roofline.py", system="h200")
MACHINE = systems.load(f"{data_dir}/systems/{RECORD.system}.json")
CEILINGS = results.ceilings(RECORD)


def quantiles(samples) -> pd.Series:
    """p20, p50 and p80 of times in microseconds."""
    return pd.Series(np.quantile(samples, (0.2, 0.5, 0.8)), index=["p20", "p50", "p80"])


def ceiling_table(limits) -> pd.DataFrame:
    """One row for each measured ceiling: what ran, its time and its rate."""
    rows = []
    for limit in limits:
        time = quantiles(limit.samples_us)
        if limit.kind == "matmul":
            amount, rate, unit, mix = limit.flops, limit.flops / time["p50"] / 1e6, "TFLOP/s", ""
        else:
            amount = limit.bytes_read + limit.bytes_written
            rate, unit = amount / time["p50"] / 1e3, "GB/s"
            mix = f"{limit.bytes_read // limit.bytes_written}:1"
        rows.append((limit.shape, mix, time["p50"], time["p20"], time["p80"], rate, unit))
    columns = ["what ran", "read : written", "time p50 (µs)", "p20", "p80", "rate", "unit"]
    return pd.DataFrame(rows, columns=columns)


def swept(record, name: str, amount: str) -> pd.DataFrame:
    """A size sweep of the record: quantiles of time, and `amount` per second in 1e12."""
    table = results.notebook_table(record, name)
    keys = [c for c in table.columns if c not in ("sample", "time_us")]
    found = table.groupby(keys, sort=False)["time_us"].apply(quantiles).unstack().reset_index()
    for quantile in ("p20", "p50", "p80"):
        found[f"rate_{quantile}"] = found[amount] / found[quantile] / 1e6
    return found


matmul, copy = swept(RECORD, "matmul", "flops"), swept(RECORD, "copy", "bytes")
random, zeros = (matmul[matmul["values"] == v].set_index("size") for v in ("random", "zeros"))
gain = 100 * (random["p50"] / zeros["p50"] - 1)
scatter = pd.DataFrame(
    {"random": random["p80"] / random["p20"], "zeros": zeros["p80"] / zeros["p20"]}
)
scatter = 100 * (scatter - 1)
small_copy, large_copy = copy["rate_p50"].iloc[0] * 1e3, copy["rate_p50"].iloc[-1] * 1e3

assert (gain[gain.index >= 2048] > 0).all(), "the text says that zeros run faster from 2048 on"
assert abs(gain[1024]) < 2, "the text says that zeros gain nothing at 1024"
assert (scatter["zeros"] > 2 * scatter["random"])[8192], "the text says that zeros scatter"
assert [mix for mix, _ in CEILINGS.copies] == [1, 2, 3]
assert CEILINGS.copies[0][1] < CEILINGS.copies[1][1] < CEILINGS.copies[2][1]

figures.glue_number("matmul_tflops", CEILINGS.tflops)
figures.glue_number("copy_low", CEILINGS.copies[0][1])
figures.glue_number("copy_gbytes", CEILINGS.copies[0][1])
figures.glue_number("copy_high", CEILINGS.copies[-1][1])
figures.glue_number("copy_gain", 100 * (CEILINGS.copies[-1][1] / CEILINGS.copies[0][1] - 1))
figures.glue_number("copy_small_gbytes", small_copy)
figures.glue_number("copy_large_gbytes", large_copy)
figures.glue_number("matmul_small_tflops", random["rate_p50"][1024])
figures.glue_number("matmul_swept_tflops", random["rate_p50"][8192])
figures.glue_number("zeros_gain_4096", gain[4096])
figures.glue_number("zeros_gain_8192", gain[8192])
figures.glue_number("zeros_scatter_8192", scatter["zeros"][8192])
figures.glue_number("random_scatter_8192", scatter["random"][8192])
figures.glue_number("power_limit", MACHINE.power_limit_w)

# %% tags=["remove-input"]
figures.show_table(ceiling_table(RECORD.ceilings))

# %% tags=["remove-input"]
figures.provenance([RECORD.id])

# %% tags=["remove-input"]
# | name: fig-roofline-ceilings
# | caption: >
# |   Rates by size. Left: square bf16 products of random numbers and of zeros. Right: copies of one
# |   tensor. Dashed: the two ceilings this record uses, a product of 8192 and a copy of 1 GiB.
# |   Error bars: p20-p80.
# | alt: >
# |   Two charts over a logarithmic size axis. Matrix products rise steeply from 1024 to 4096 and
# |   level off near the dashed ceiling, with zeros above random numbers and with longer error bars.
# |   Copies rise from under two to over four terabytes per second and level off.
with figures.style():
    chart, (left, right) = figures.subplots(1, 2, width=8.6, height=3.6)
    for values, colour, below in (
        ("zeros", RUNG_COLOURS[3], False),
        ("random", RUNG_COLOURS[1], True),
    ):
        rows = matmul[matmul["values"] == values]
        error = [rows["rate_p50"] - rows["rate_p80"], rows["rate_p20"] - rows["rate_p50"]]
        left.errorbar(rows["size"], rows["rate_p50"], error, marker="o", color=colour, capsize=2)
        last = rows[rows["size"] == 4096].iloc[0]
        left.annotate(
            values,
            (4096, last["rate_p50"]),
            xytext=(8, -16) if below else (-4, 8),
            textcoords="offset points",
            ha="left" if below else "right",
            color=colour,
        )
    error = [copy["rate_p50"] - copy["rate_p80"], copy["rate_p20"] - copy["rate_p50"]]
    right.errorbar(
        copy["megabytes"],
        1e3 * copy["rate_p50"],
        [1e3 * e for e in error],
        marker="o",
        color=RUNG_COLOURS[2],
        capsize=2,
    )
    for axis, ceiling in ((left, CEILINGS.tflops), (right, CEILINGS.copies[0][1])):
        axis.axhline(ceiling, color=INK, linewidth=1.2, linestyle=(0, (4, 2)))
        axis.set_xscale("log", base=2)
        axis.set_ylim(0, 1.2 * ceiling)
    left.set_xticks(random.index, [str(size) for size in random.index])
    left.set_xlabel("size of the square matrices")
    left.set_ylabel("TFLOP/s")
    right.set_xticks(copy["megabytes"], [str(size) for size in copy["megabytes"]])
    right.set_xlabel("size of the tensor (MiB)")
    right.set_ylabel("GB/s, read + written")
display(chart)

# %% tags=["remove-input"]
columns = ["rate_p50", "rate_p20", "rate_p80"]
sweep = pd.concat(
    [
        matmul[["values", "size", *columns]].assign(what="matmul, TFLOP/s"),
        copy.rename(columns={"megabytes": "size"})[["size", *columns]].assign(what="copy, TB/s"),
    ]
)
figures.save_csv(sweep[["what", "values", "size", *columns]], "roofline-ceilings")
figures.provenance([RECORD.id], csv="roofline-ceilings")

# %% [markdown]
# Three things in {numref}`fig-roofline-ceilings` matter later.
#
# *Small problems reach neither ceiling.* A product of 1024 has 64 output tiles of 128 by 128 for
# {glue:text}`num_sms:.0f` SMs and ends at {glue:text}`matmul_small_tflops:.0f` TFLOP/s; a copy of 4
# MiB ends at {glue:text}`copy_small_gbytes:.0f` GB/s. The bracket below knows nothing about that.
# It is meant for launches that fill the machine, as batch 1152 does.
#
# *Zeros are faster.* The instructions are the same, and they run
# {glue:text}`zeros_gain_4096:.1f` % faster at 4096, {glue:text}`zeros_gain_8192:.1f` % at 8192,
# not at all at 1024, where nothing is hot. The likely reason is power: zeros switch fewer
# transistors, and under a limit of {glue:text}`power_limit:.0f` W energy that is not spent comes
# back as clock frequency. They are also less repeatable: at 8192 the p80 lies
# {glue:text}`zeros_scatter_8192:.0f` % above the p20, and {glue:text}`random_scatter_8192:.0f` %
# for random numbers. A benchmark that allocates its inputs with `zeros` or `empty` measures another
# chip.
#
# *The mix matters, a little.* Three reads per write are {glue:text}`copy_gain:.0f` % faster than
# one.
#
# ## The bracket
#
# FLOPs over the compute ceiling is one floor, bytes over the memory ceiling is another. With
# perfect overlap a kernel takes the larger of the two, without any it takes their sum:

# %%
found = roofline.bracket(workload("gdpa-self-full-1024"), "forward", CEILINGS)
print(f"matmul floor {found.compute_us:.0f} us, memory floor {found.memory_us:.0f} us")
print(f"bracket {found.lower_us:.0f} to {found.upper_us:.0f} us, bound by {found.bound}")

# %% [markdown]
# `percent_of_roofline`, in every table of this book, is `lower_us` over the measured time. The
# bracket is a prediction and can be wrong in two ways. A correct kernel **below the bracket** would
# mean that the FLOPs or bytes are counted wrongly, or that the ceiling is none. A kernel **above
# the bracket** wastes more than overlap: it moves bytes twice, leaves SMs idle, or is limited by
# something that the two ceilings do not contain.
#
# ## Every forward workload on one chart
#
# {numref}`fig-roofline-workloads` places all workloads of this book. The knee of the roof, the
# **ridge**, is where both floors are equal: {glue:text}`ridge_low:.0f` to
# {glue:text}`ridge_high:.0f` FLOP/byte, depending on the mix. Left of it bytes decide.

# %% tags=["remove-cell"]
PUBLISHED = list(dict.fromkeys(n for f in FIGURES if "-fwd-" in f for n in FIGURES[f]))
SFU_PER_CLOCK = 16  # special function results per SM and clock, see the text
HEAD_DIM = 128
tanh_per_us = SFU_PER_CLOCK * MACHINE.num_sms * MACHINE.max_sm_clock_mhz
tanh_tflops = tanh_per_us * 4 * HEAD_DIM / 1e6
serial_tflops = 1 / (1 / CEILINGS.tflops + 1 / tanh_tflops)


def placed(name: str) -> dict:
    """A workload's intensity, floors and bracket, forward, in the units of the table."""
    work = WORKLOADS[name]
    found = roofline.bracket(work, "forward", CEILINGS)
    read, written = work.bytes_read("forward"), work.bytes_written("forward")
    ridge = CEILINGS.tflops * 1e3 / CEILINGS.gbytes_per_s(read, written)
    return {
        "workload": name,
        "GFLOP": work.flops("forward") / 1e9,
        "MB": work.bytes("forward") / 1e6,
        "FLOP/byte": work.flops("forward") / work.bytes("forward"),
        "ridge": ridge,
        "matmul floor (µs)": found.compute_us,
        "memory floor (µs)": found.memory_us,
        "tanh floor (µs)": work.num_heads_q * work.pairs / tanh_per_us,
        "lower (µs)": found.lower_us,
        "upper (µs)": found.upper_us,
        "bound by": {"compute": "matmul", "memory": "memory"}[found.bound],
        "TFLOP/s at lower": found.tflops_at_lower,
        "TFLOP/s at upper": work.flops("forward") / found.upper_us / 1e6,
    }


everything = pd.DataFrame([placed(name) for name in WORKLOADS])
floors = everything[everything["workload"].isin(PUBLISHED)]
bytes_decide = list(floors["workload"][floors["bound by"] == "memory"])
ridges = [CEILINGS.tflops * 1e3 / rate for _, rate in CEILINGS.copies]
cross = everything[everything["workload"].str.startswith("gdpa-cross")]
share = float((everything["tanh floor (µs)"] / everything["matmul floor (µs)"]).iloc[0])
widest = everything.loc[(everything["upper (µs)"] / everything["lower (µs)"]).idxmax()]

assert (
    (everything["FLOP/byte"] < everything["ridge"]) == (everything["bound by"] == "memory")
).all()
assert bytes_decide == [
    "gdpa-self-full-256",
    "gdpa-self-half-dense-256",
    "gdpa-self-half-dense-512",
    "gdpa-self-half-jagged-256",
    "gdpa-self-half-jagged-512",
    "gdpa-cross-full-256",
    "gdpa-cross-full-512",
], "the text lists the memory-bound shapes"
assert (cross["FLOP/byte"] < 1.3 * max(ridges)).all(), "the text: cross stays near the ridge"
assert tanh_tflops > 2 * CEILINGS.tflops, "the text: the tanh ceiling is more than twice as high"

figures.glue_number("ridge_low", min(ridges))
figures.glue_number("ridge_high", max(ridges))
figures.glue_number("memory_bound", len(bytes_decide))
figures.glue_number("published_count", len(PUBLISHED))
figures.glue_number("num_sms", MACHINE.num_sms)
figures.glue_number("max_clock", MACHINE.max_sm_clock_mhz)
figures.glue_number("tanh_tera", tanh_per_us / 1e6)
figures.glue_number("tanh_tflops", tanh_tflops)
figures.glue_number("tanh_share", 100 * share)
figures.glue_number("tanh_share_64", 200 * share)
figures.glue_number("serial_tflops", serial_tflops)
figures.glue_number("serial_percent", 100 * serial_tflops / CEILINGS.tflops)
cross_2048 = results.one(everything, workload="gdpa-cross-full-2048")
figures.glue_number(
    "cross_2048_ratio", cross_2048["matmul floor (µs)"] / cross_2048["memory floor (µs)"]
)
figures.glue_number("cross_2048_lower", cross_2048["lower (µs)"])
figures.glue_number("cross_2048_upper", cross_2048["upper (µs)"])
figures.glue_text("widest", widest["workload"])
figures.glue_number("widest_ratio", widest["upper (µs)"] / widest["lower (µs)"])
full = [results.one(everything, workload=f"gdpa-self-full-{n}") for n in (256, 2048)]
figures.glue_number("full_256_lower", full[0]["lower (µs)"])
figures.glue_number("full_256_upper", full[0]["upper (µs)"])
figures.glue_number("full_2048_gap", 100 * (full[1]["upper (µs)"] / full[1]["lower (µs)"] - 1))

# %% tags=["remove-input"]
# | name: fig-roofline-workloads
# | caption: >
# |   The roofline of the H200 and every forward workload under it, both axes logarithmic. A dot is
# |   the bracket's fast end (perfect overlap), the line below it reaches to the slow end (none).
# |   Slopes: copies of 1:1 and 3:1. Solid: bf16 products. Dash-dotted: one tanh per score. Half
# |   dense and half jagged coincide, and so do self and cross at 256.
# | alt: >
# |   A roof: a slope, then a flat top from about 180 FLOP per byte on. Dots of five families lie on
# |   it: short self-attention on the slope, long self-attention on the flat part, cross-attention
# |   crowded around the knee. The line of tanh lies far above the roof.
FAMILIES = {
    "gdpa-self-full": (RUNG_COLOURS[1], "o", "self, full"),
    "gdpa-self-half-dense": (RUNG_COLOURS[2], "s", "self, half, dense keys"),
    "gdpa-self-half-jagged": (RUNG_COLOURS[0], "^", "self, half, jagged"),
    "gdpa-cross-full": (RUNG_COLOURS[3], "D", "cross, 256 keys"),
    "": (RUNG_COLOURS[4], "v", "real histories"),
}
with figures.style():
    chart, axis = figures.subplots(width=8.2, height=5.0)
    intensity = np.geomspace(45, 2600, 200)
    roofs = [np.minimum(intensity * rate / 1e3, CEILINGS.tflops) for _, rate in CEILINGS.copies]
    axis.fill_between(intensity, roofs[0], roofs[-1], color=INK, alpha=0.35, linewidth=0)
    axis.plot(intensity, roofs[-1], color=INK, linewidth=1.4)
    axis.axhline(tanh_tflops, color=INK, linewidth=1.2, linestyle=(0, (6, 2, 1, 2)))
    axis.axhline(serial_tflops, color=INK, linewidth=0.8, linestyle=(0, (1, 2)))
    for height, text in (
        (tanh_tflops, f"one tanh per score, head_dim {HEAD_DIM}: {tanh_tflops:.0f}"),
        (CEILINGS.tflops, f"bf16 products: {CEILINGS.tflops:.0f}"),
        (serial_tflops, f"products and tanh by turns: {serial_tflops:.0f}"),
    ):
        axis.annotate(
            text, (2600, height), xytext=(0, 3), textcoords="offset points", ha="right", va="bottom"
        )
    for name in ("gdpa-self-full-256", "gdpa-self-full-512", "gdpa-self-full-1024"):
        dot = results.one(everything, workload=name)
        axis.annotate(
            name.rsplit("-", 1)[1],
            (dot["FLOP/byte"], dot["TFLOP/s at lower"]),
            xytext=(-6, 3) if name.endswith("-256") else (5, 4),
            textcoords="offset points",
            ha="right" if name.endswith("-256") else "left",
            color=FAMILIES["gdpa-self-full"][0],
        )
    axis.annotate(
        "2048",
        (cross_2048["FLOP/byte"], cross_2048["TFLOP/s at upper"]),
        xytext=(0, -4),
        textcoords="offset points",
        ha="center",
        va="top",
        color=FAMILIES["gdpa-cross-full"][0],
    )
    drawn = set()
    for index, (stem, (colour, marker, label)) in enumerate(FAMILIES.items()):
        names = [n for n in everything["workload"] if n.startswith(stem) and n not in drawn]
        drawn.update(names)
        rows = everything[everything["workload"].isin(names)]
        low, high = rows["TFLOP/s at upper"], rows["TFLOP/s at lower"]
        axis.vlines(rows["FLOP/byte"], low, high, color=colour, linewidth=1.4)
        axis.plot(rows["FLOP/byte"], high, marker, color=colour, markersize=6, alpha=0.9)
        height = 0.05 + 0.058 * (len(FAMILIES) - 1 - index)
        axis.plot(0.72, height, marker, color=colour, markersize=6, transform=axis.transAxes)
        axis.text(0.74, height, label, color=colour, va="center", transform=axis.transAxes)
    axis.set_xscale("log", base=2)
    axis.set_yscale("log", base=2)
    axis.set_xlim(45, 2700)
    axis.set_ylim(120, 2900)
    axis.set_xticks([64, 128, 256, 512, 1024, 2048], ["64", "128", "256", "512", "1024", "2048"])
    axis.set_yticks([128, 256, 512, 1024, 2048], ["128", "256", "512", "1024", "2048"])
    axis.grid(visible=True, axis="both")
    axis.set_xlabel("arithmetic intensity (useful FLOP / fewest byte)")
    axis.set_ylabel("attainable TFLOP/s")
display(chart)

# %% tags=["remove-input"]
figures.save_csv(everything, "roofline-workloads")
figures.source(
    "modelled",
    f"brackets of the workloads' counts and the ceilings measured in record {RECORD.id}.",
    csv="roofline-workloads",
)

# %% [markdown]
# The published shapes in numbers. All of them are modelled: no kernel has run.

# %% tags=["remove-input"]
shown = floors.drop(columns=["GFLOP", "MB", "ridge", "TFLOP/s at upper"]).round(1)
shown["workload"] = [f'<span style="white-space: nowrap">{n}</span>' for n in shown["workload"]]
figures.show_table(shown)

# %% tags=["remove-input"]
figures.source(
    "modelled",
    "counts of each workload over the measured ceilings; tanh floor: scores over "
    f"{SFU_PER_CLOCK} per SM and clock at {MACHINE.max_sm_clock_mhz:.0f} MHz.",
)

# %% [markdown]
# Memory-bound are full self-attention at 256, the half-filled batches at 256 and 512, and
# cross-attention with 256 and 512 queries. At length 256 the bracket runs from
# {glue:text}`full_256_lower:.0f` to {glue:text}`full_256_upper:.0f` µs: what a kernel hides decides
# more than how well it multiplies. At 2048 the two ends lie {glue:text}`full_2048_gap:.0f` % apart
# and traffic hardly counts.
#
# ## A third ceiling
#
# The activation is not free. `tanh.approx` runs on the special function units, which deliver 16
# results per SM and clock; one score costs one of them and $4d$ FLOPs of matrix product. At the
# highest clock of this machine, {glue:text}`max_clock:.0f` MHz on {glue:text}`num_sms:.0f` SMs,
# that is {glue:text}`tanh_tera:.2f` · 10¹² scores per second, or as a rate of useful work
# {glue:text}`tanh_tflops:.0f` TFLOP/s (modelled; FlashAttention-3 states the same unit as 3.9
# TFLOP/s beside 989 TFLOP/s of products, for an H100, nominal {cite}`shah2024flashattention3`).
#
# So the tanh of a tile takes {glue:text}`tanh_share:.0f` % of the time of its two products. Beside
# them it costs nothing. *Between* them it costs all of that: scores must be multiplied before they
# can be activated, and activated before they can be multiplied again. A kernel whose tensor cores
# wait meanwhile reaches at most {glue:text}`serial_tflops:.0f` TFLOP/s,
# {glue:text}`serial_percent:.0f` % of the compute ceiling. That is the dotted line of
# {numref}`fig-roofline-workloads`, and a prediction for the ladder: the rungs up to
# {doc}`v3 <../forward/v3_persistent>` overlap the two only as far as the hardware happens to
# interleave independent programs. A rung above the dotted line must overlap the two.
#
# The share grows as heads shrink: at head_dim 64 the same tanh stands against half the FLOPs, and
# takes {glue:text}`tanh_share_64:.0f` % of their time.

# %% [markdown]
# ## What the published bars say about another machine
#
# The published charts come from an NVIDIA B200. We have none, and its ceilings are not in our
# records. But a bar is also a lower bound on the machine that made it: whoever does the useful
# FLOPs at a rate $r$ moves at least $r / I$ bytes per second.

# %% tags=["remove-cell"]
bars = claims.published_figures()
bars = bars[bars["figure"].str.contains("-fwd-")].copy()
bars["intensity"] = [
    WORKLOADS[n].flops("forward") / WORKLOADS[n].bytes("forward") for n in bars["workload"]
]
bars["gbytes"] = 1e3 * bars["tflops"] / bars["intensity"]
busiest, fastest = bars.loc[bars["gbytes"].idxmax()], bars.loc[bars["tflops"].idxmax()]
assert busiest["gbytes"] > CEILINGS.copies[-1][1] and fastest["tflops"] > CEILINGS.tflops
figures.glue_number("b200_gbytes", busiest["gbytes"])
figures.glue_text("b200_busiest", busiest["workload"])
figures.glue_number("b200_tflops", fastest["tflops"])
figures.glue_text("b200_fastest", fastest["workload"])
figures.glue_number("b200_over_memory", busiest["gbytes"] / CEILINGS.copies[-1][1])
figures.glue_number("b200_over_matmul", fastest["tflops"] / CEILINGS.tflops)

# %% [markdown]
# The bar of {glue:text}`b200_busiest` implies at least {glue:text}`b200_gbytes:.0f` GB/s, that of
# {glue:text}`b200_fastest` at least {glue:text}`b200_tflops:.0f` TFLOP/s (published rates, our
# arithmetic). Those are {glue:text}`b200_over_memory:.1f` and {glue:text}`b200_over_matmul:.1f`
# times our ceilings. A rate from that machine therefore says nothing about a kernel on this one:
# what can be compared is a share of a ceiling, or a ratio of two kernels on one machine.
#
# ## The surprise
#
# We expected cross-attention with many queries to become compute-bound like long self-attention.
# It does not get far: with 256 keys every query brings and takes its own rows, and the intensity
# ends at 256. At 2048 queries the matmul floor is only {glue:text}`cross_2048_ratio:.2f` times the
# memory floor, and the bracket reaches from {glue:text}`cross_2048_lower:.0f` to
# {glue:text}`cross_2048_upper:.0f` µs. The widest bracket of all workloads, a factor of
# {glue:text}`widest_ratio:.2f`, belongs to {glue:text}`widest`. Near the ridge overlap is worth
# the most. By the published account that is where the operator lives: queries of the order of
# 1000, keys of the order of 128 {cite}`zhou2026normalization`.
#
# The limit of this chapter: a ceiling is itself a measurement. In the size sweep the product of
# 8192 reached {glue:text}`matmul_swept_tflops:.0f` TFLOP/s, not the
# {glue:text}`matmul_tflops:.0f` of the ceiling, in the same record, on the same machine, seconds
# later. What a difference like that means is the {doc}`next chapter <protocol>`'s question.


# %% tags=["remove-input"]
def compare() -> Markdown:
    """This machine's ceilings beside the record's; nothing is kept."""
    here, ours = (ceiling_table(limits) for limits in (session.ceilings, RECORD.ceilings))
    both = here[["what ran", "rate", "unit"]].rename(columns={"rate": session.system.id})
    both[RECORD.system] = ours["rate"]
    both["ratio"] = here["rate"] / ours["rate"]
    return figures.show_table(both)


compare() if mode == "compare" else None

# %% tags=["remove-cell"]
seeds = Workload(
    name="pma",
    batch=1152,
    num_heads_q=4,
    num_heads_k=4,
    head_dim=128,
    max_seqlen_q=32,
    max_seqlen_k=1024,
    lengths_q=Full(),
    lengths_k=Full(),
    shared_q=True,
)
pooled = roofline.bracket(seeds, "forward", CEILINGS)
assert pooled.bound == "memory"
figures.glue_number("pma_intensity", seeds.flops("forward") / seeds.bytes("forward"))
figures.glue_number("pma_lower", pooled.lower_us)
figures.glue_number("pma_tflops", pooled.tflops_at_lower)
needed = [n for n in range(256, 1024) if n / 4 > max(ridges)]
figures.glue_number("causal_length", needed[0])

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
# The intensity is about $N/4$; it must exceed the ridge. With the ceilings above that happens at a
# length of about {glue:text}`causal_length:.0f`, twice as late as without the mask.
# :::
#
# :::{exercise} Pooling by 32 seeds
# :label: ex-roofline-pma
#
# Write the `Workload` of PMA: batch 1152, 4 heads, head_dim 128, 32 learned queries shared by all
# sequences, 1024 keys each. Compute its bracket. Which floor decides, and what does that say about
# the tensor cores? *(code, ten minutes, no GPU)*
# :::
#
# :::{solution} ex-roofline-pma
# :class: dropdown
#
# `Workload(..., max_seqlen_q=32, max_seqlen_k=1024, lengths_q=Full(), lengths_k=Full(),
# shared_q=True)`. The intensity is {glue:text}`pma_intensity:.0f` FLOP/byte: k and v are read once
# for 32 queries. The memory floor of {glue:text}`pma_lower:.0f` µs decides, and at that time the
# tensor cores deliver {glue:text}`pma_tflops:.0f` TFLOP/s. They could idle most of the time; what
# counts is that the copies never stop.
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
# record holds its own ceilings, taken minutes apart at most.
# :::
#
# ## Takeaways
#
# :::{admonition} Three things to remember
# 1. Arithmetic intensity is $nm/(n+m)$: heads and head_dim cancel, and the shorter of the two sides
#    caps it.
# 2. A bracket is two numbers, perfect overlap and none. Below it nothing can be; above it something
#    else is wrong.
# 3. The tanh unit is the hidden third ceiling: harmless beside the tensor cores, costly in turns.
# :::
