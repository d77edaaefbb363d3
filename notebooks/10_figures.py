# ---
# jupyter:
#   kernelspec: {name: python3, display_name: Python 3}
# measures: true
# ---

# %% [markdown]
# # The published figures, measured again
#
# Six charts announced these operators. What do their forward halves look like on a machine one can
# rent, with every kernel checked before it is timed?
#
# :::{admonition} Overview
# - Each published chart stands beside ours: same axes, same scale, two machines, never mixed.
# - The best of {glue:text}`rung_count:.0f` rungs is ahead of FlashAttention-2 on all
#   {glue:text}`workload_count:.0f` workloads, by {glue:text}`least_over_fa2:.2f` to
#   {glue:text}`most_over_fa2:.2f` times. No rung is ahead of cuDNN on dense batches.
# - Short keys are hard on both machines, for different reasons.
# :::

# %% tags=["remove-cell"]
import tempfile
from pathlib import Path

import pandas as pd
from IPython.display import Markdown, display

from gdpa_kernels import baselines, claims, figures, ladder, results
from gdpa_kernels.workload import FIGURES, workload

# %% tags=["parameters"]
mode = "replay"
device = "cpu"
data_dir = "data"

# %% [markdown]
# ## What runs
#
# The workloads are those of the published benchmark: batch 1152, 4 heads, head_dim 128, bf16. In
# the *full* figure all sequences have the length on the axis; in the *half* figure lengths are
# uniform from 1 to that length; in the *cross* figure queries have that length and keys and
# values 256. The published script keeps K and V dense at the full length in the half figure too:
# we measure that (`dense`), and the batch the title promises, with K/V lengths equal to Q lengths
# (`jagged`). {doc}`Chapter 3 <03_workloads>` counts their FLOPs and bytes, {doc}`chapter 5
# <05_measuring>` describes the protocol.
#
# Inputs are drawn from N(0, 1) as published; the scale is 1/sqrt(head_dim) instead of 1, so that
# GELU sees logits of standard deviation 1 and not 11, where it is a straight line on one side and
# zero on the other ({doc}`chapter 2 <02_activations>`). {doc}`Chapter 5 <05_measuring>` shows
# what the choice does to time.
#
# This cell measures; it runs with `make measure NOTEBOOKS=10`, on a GPU.

# %% tags=["hide-input"]
if mode in ("measure", "compare"):
    from gdpa_kernels import measure

    session = measure.Session("notebooks/10_figures.py", device)
    impls = [*(rung.impl for rung in ladder.RUNGS), *baselines.BASELINES]
    names = [n for figure in FIGURES if "-fwd-" in figure for n in FIGURES[figure]]
    if mode == "compare":
        impls = [impl for impl in impls if impl not in ("v0_eager", "torch_compile")]
        names = [n for n in names if n.endswith(("-512", "-1024"))]
    for name in dict.fromkeys(names):
        session.measure(workload(name), impls, scopes=("kernel", "op"))
    if mode == "measure":
        print(session.write(data_dir))

# %% tags=["remove-cell"]
SYSTEM = "h200"
RUNGS = [rung.impl for rung in ladder.RUNGS]
PEERS = ["fa2_varlen", "cudnn", "cudnn_varlen", "torch_compile"]

record = results.latest_record(data_dir, notebook="notebooks/10_figures.py", system=SYSTEM)
table = results.table(data_dir, system=SYSTEM)
table = table[(table["variant"] == "") & (table["record"] == record.id)]
kernels = table[(table["scope"] == "kernel") & (table["direction"] == "forward")]
published = claims.published_figures()

times = kernels.drop_duplicates(["workload", "impl"]).pivot(
    index="workload", columns="impl", values="time_us_p50"
)
best = times[[impl for impl in RUNGS if impl in times]].min(axis=1)
over_fa2 = times["fa2_varlen"] / best
over_cudnn = (times["cudnn"] / best).dropna()
wrong = kernels[kernels["time_us_p50"].notna() & ~kernels["correct"].fillna(False).astype(bool)]
assert wrong.empty, f"timed without a passed check: {wrong['impl'].tolist()}"
jagged = kernels[kernels["workload"].str.contains("half")].drop_duplicates(["workload", "impl"])
jagged = jagged.pivot(index="workload", columns="impl", values="time_us_p50")
assert (jagged[["fa2_varlen", "cudnn_varlen"]].min(axis=1) > jagged[RUNGS].min(axis=1)).all(), (
    "the text says that on jagged batches the installed peers are slower"
)
assert (over_fa2 > 1).all(), "the text says that the best rung is ahead of FlashAttention-2"
assert (over_cudnn < 1).all(), "the text says that no rung is ahead of cuDNN on dense batches"

figures.glue_number("rung_count", len(RUNGS))
figures.glue_number("workload_count", len(times))
figures.glue_number("least_over_fa2", over_fa2.min())
figures.glue_number("most_over_fa2", over_fa2.max())
figures.glue_number(
    "checked_rows",
    len(kernels.drop_duplicates(["workload", "impl"]).dropna(subset=["time_us_p50"])),
)


def rate(name: str, impl: str) -> float:
    """Measured TFLOP/s of `impl` on the workload `name`."""
    rows = kernels.drop_duplicates(["workload", "impl"])
    return float(results.one(rows, workload=name, impl=impl)["tflops"])


def roofline(name: str, impl: str) -> float:
    """Measured % of roofline of `impl` on the workload `name`."""
    rows = kernels.drop_duplicates(["workload", "impl"])
    return float(results.one(rows, workload=name, impl=impl)["percent_of_roofline"])


for length in (256, 512, 1024, 2048):
    for kind in ("self-full", "self-half-dense", "self-half-jagged", "cross-full"):
        name = f"gdpa-{kind}-{length}"
        figures.glue_number(f"best_{kind}_{length}", max(rate(name, impl) for impl in RUNGS))
        figures.glue_number(f"fa2_{kind}_{length}", rate(name, "fa2_varlen"))
        figures.glue_number(f"share_{kind}_{length}", max(roofline(name, i) for i in RUNGS))
for length in (256, 1024, 2048):
    figures.glue_number(f"cudnn_self_{length}", rate(f"gdpa-self-full-{length}", "cudnn"))
figures.glue_number("cudnn_cross_2048", rate("gdpa-cross-full-2048", "cudnn"))


def shown(figure: str, keys: str = "") -> pd.DataFrame:
    """The kernel rows of one figure; `keys` picks the family with those K/V lengths."""
    rows = kernels[kernels["figure"] == figure]
    return rows[rows["workload"].str.contains(keys)] if keys else rows


def numbers(rows: pd.DataFrame) -> pd.DataFrame:
    """TFLOP/s by implementation and workload, and the best rung's share of the roofline."""
    wide = rows.pivot(index="impl", columns="workload", values="tflops")
    order = sorted(wide.columns, key=lambda name: int(name.rsplit("-", 1)[1]))
    wide = wide.loc[[i for i in (*RUNGS, *PEERS) if i in wide.index], order]
    share = rows[rows["impl"].isin(RUNGS)].groupby("workload")["percent_of_roofline"].max()
    wide.loc["best rung, % of roofline"] = share[order]
    return wide.round(0).reset_index()


# %% [markdown]
# All {glue:text}`checked_rows:.0f` times below belong to outputs that were compared, element by
# element, with an fp64 result, and stayed within twice the error that PyTorch makes in bf16 plus
# one rounding.
#
# ## Self-attention, full

# %% tags=["remove-input"]
# | name: fig-self-fwd-full
# | caption: >
# |   Self-attention forward, all sequences of one length. Left: measured. Right: published.
# | alt: >
# |   Two charts of TFLOP/s over sequence length on one scale. Measured on the H200, the rungs rise
# |   with length towards about two thirds of the roofline, above FlashAttention-2 and below cuDNN.
# |   Published for the B200, the CuTeDSL kernel is the highest at every length.
figures.figure_tflops(
    shown("gdpa-self-fwd-full"),
    "gdpa-self-fwd-full",
    system=SYSTEM,
    impls=[*RUNGS, *PEERS],
    published=published,
)

# %% tags=["remove-input"]
figures.save_csv(shown("gdpa-self-fwd-full"), "gdpa-self-fwd-full")
figures.provenance(shown("gdpa-self-fwd-full"), csv="gdpa-self-fwd-full")

# %% tags=["remove-input"]
figures.show_table(numbers(shown("gdpa-self-fwd-full")))

# %% [markdown]
# At length 256 both machines are short of bytes, not of FLOPs. On the H200 the best rung reaches
# {glue:text}`best_self-full_256:.0f` TFLOP/s, which is {glue:text}`share_self-full_256:.0f` % of
# the roofline; from 512 on the roofline is that of the tensor cores, and the best rung climbs to
# {glue:text}`share_self-full_2048:.0f` % of it at 2,048.
#
# cuDNN, which computes softmax on a dense batch, reaches {glue:text}`cudnn_self_2048:.0f` TFLOP/s,
# with more arithmetic per score than GELU needs. Its source is closed; open kernels of its class
# give copies, products and the rest to different warps {cite}`shah2024flashattention3`. In a plain
# Triton kernel the same warps wait for copies, start products and evaluate activations, one after
# another. Closing that gap is the business of the rungs that follow.
#
# ## Self-attention, half full
#
# First as the published script has it: Q jagged, K and V dense at the length on the axis.

# %% tags=["remove-input"]
# | name: fig-self-fwd-half-dense
# | caption: >
# |   Self-attention forward at fill 0.5, K/V dense as in the published script.
# | alt: >
# |   Two charts of TFLOP/s over sequence length. Measured rates at fill 0.5 are lower than at
# |   fill 1, most at length 256 and 512; the published bars show the same pattern.
figures.figure_tflops(
    shown("gdpa-self-fwd-half", "dense"),
    "gdpa-self-fwd-half",
    system=SYSTEM,
    impls=[*RUNGS, "fa2_varlen", "cudnn_varlen", "torch_compile"],
    published=published,
)

# %% tags=["remove-input"]
figures.save_csv(shown("gdpa-self-fwd-half", "dense"), "gdpa-self-fwd-half-dense")
figures.provenance(shown("gdpa-self-fwd-half", "dense"), csv="gdpa-self-fwd-half-dense")

# %% [markdown]
# Then as self-attention is: K and V have the lengths of Q. There is no published chart of this; the
# right axes repeat the dense one.

# %% tags=["remove-input"]
# | name: fig-self-fwd-half-jagged
# | caption: >
# |   Self-attention forward at fill 0.5, K/V jagged. The published chart, right, has K/V dense.
# | alt: >
# |   Two charts of TFLOP/s over sequence length. The measured jagged rates lie a little below the
# |   dense ones at every length; FlashAttention-2 stays below all fused rungs.
figures.figure_tflops(
    shown("gdpa-self-fwd-half", "jagged"),
    "gdpa-self-fwd-half",
    system=SYSTEM,
    impls=[*RUNGS, "fa2_varlen", "cudnn_varlen", "torch_compile"],
    published=published,
)

# %% tags=["remove-input"]
figures.save_csv(shown("gdpa-self-fwd-half", "jagged"), "gdpa-self-fwd-half-jagged")
figures.provenance(shown("gdpa-self-fwd-half", "jagged"), csv="gdpa-self-fwd-half-jagged")

# %% tags=["remove-input"]
figures.show_table(
    pd.concat(
        [
            numbers(shown("gdpa-self-fwd-half", keys)).rename(
                columns=lambda c: c.removeprefix("gdpa-self-half-")
            )
            for keys in ("dense", "jagged")
        ],
        axis=1,
    ).loc[:, lambda wide: ~wide.columns.duplicated()]
)

# %% [markdown]
# Useful FLOPs are counted over tokens that exist, so partial tiles show as lower rates: at a mean
# of 128 rows a sequence, a tile of 128 rows is on average far from full. That is why 256 and 512
# lose most ({glue:text}`best_self-half-jagged_256:.0f` against
# {glue:text}`best_self-full_256:.0f` TFLOP/s at 256), and 2,048 almost nothing
# ({glue:text}`best_self-half-jagged_2048:.0f` against {glue:text}`best_self-full_2048:.0f`). v0
# and `torch.compile` pay for padding in full: their time at fill 0.5 is that of the full batch.
#
# ## Cross-attention with 256 keys

# %% tags=["remove-input"]
# | name: fig-cross-fwd-full
# | caption: >
# |   Cross-attention forward, 256 keys, queries of the length on the axis.
# | alt: >
# |   Two charts of TFLOP/s over query length. Measured rates hardly grow with query length and stay
# |   near half of the roofline; on the published chart all kernels but one are flat as well.
figures.figure_tflops(
    shown("gdpa-cross-fwd-full"),
    "gdpa-cross-fwd-full",
    system=SYSTEM,
    impls=[*RUNGS, *PEERS],
    published=published,
)

# %% tags=["remove-input"]
figures.save_csv(shown("gdpa-cross-fwd-full"), "gdpa-cross-fwd-full")
figures.provenance(shown("gdpa-cross-fwd-full"), csv="gdpa-cross-fwd-full")

# %% tags=["remove-input"]
figures.show_table(numbers(shown("gdpa-cross-fwd-full")))

# %% [markdown]
# Longer queries add work without adding keys, so the roofline moves away from memory: at 2,048
# queries the ceiling is that of the tensor cores. The rungs do not follow. With 256 keys a tile has
# four or eight blocks of keys; before the first and after the last of them nothing overlaps, and
# that cost is paid for every tile. The best rung stays at {glue:text}`best_cross-full_2048:.0f`
# TFLOP/s, {glue:text}`share_cross-full_2048:.0f` % of the roofline; cuDNN reaches
# {glue:text}`cudnn_cross_2048:.0f`. On the B200 the same workload held all kernels back but the one
# that overlaps across tiles. It is where this ladder has most to gain.
#
# ## The whole call
#
# A caller pays for more than the kernel: checks, output allocation, descriptors, the schedule of
# v3. `op` is host time from the call to the result on an idle device; the published benchmark
# makes its schedule outside the timed region.

# %% tags=["remove-cell"]
ops = table[(table["scope"] == "op") & (table["direction"] == "forward")]
ops = ops.drop_duplicates(["workload", "impl"]).pivot(
    index="workload", columns="impl", values="time_us_p50"
)
extra = (ops[RUNGS[1:]] - times[RUNGS[1:]]).reset_index()
overhead = extra[RUNGS[1:]].median()
assert overhead["v3_persistent"] > 2 * overhead["v2_tma"], "the text says the schedule costs most"
for impl in RUNGS[1:]:
    figures.glue_number(f"overhead_{impl}", overhead[impl])

# %% tags=["remove-input"]
figures.show_table(
    extra.rename(columns={impl: f"{impl}, op - kernel (us)" for impl in RUNGS[1:]}).round(0)
)

# %% [markdown]
# The median difference is {glue:text}`overhead_v1_tiled:.0f` µs for v1,
# {glue:text}`overhead_v2_tma:.0f` µs for v2 and {glue:text}`overhead_v3_persistent:.0f` µs for v3,
# whose schedule takes some forty small device operations. At 256 tokens v3's call costs more than
# twice its kernel. {doc}`Chapter 9 <09_v3_persistent>` takes that apart.
#
# ## Other machines
#
# `make measure NOTEBOOKS=10` on your GPU appends a record; the next `make book` draws its figures
# here. `make compare NOTEBOOKS=10` measures a part of them without keeping a record.


# %% tags=["remove-cell"]
def draw_others() -> None:
    """The figures of every other GPU in the records, or a sentence that there is none."""
    everything = results.table(data_dir, per="gpu")
    forward = everything[
        everything["figure"].str.contains("-fwd-")
        & (everything["scope"] == "kernel")
        & (everything["variant"] == "")
        & ~everything["system"].str.contains(SYSTEM)
    ]
    if forward.empty:
        display(Markdown("No other machine has been measured yet."))
    for gpu, rows in forward.groupby("gpu"):
        ours = kernels[["workload", "impl", "tflops"]].drop_duplicates()
        beside = rows[["workload", "impl", "tflops", "percent_of_roofline", "date"]]
        display(Markdown(f"**{gpu}**, TFLOP/s beside the H200's."))
        display(
            figures.show_table(
                beside.merge(ours, on=["workload", "impl"], suffixes=("", "_h200")).round(0)
            )
        )


def draw_comparison() -> None:
    """What `make compare` just measured, beside the record; nothing is kept."""
    with tempfile.TemporaryDirectory() as folder:
        for part in ("records", "systems"):
            (Path(folder) / part).mkdir()
        session.write(folder)
        fresh = results.table(folder)
    fresh = fresh[fresh["scope"] == "kernel"].drop_duplicates(["workload", "impl"])
    ours = kernels.drop_duplicates(["workload", "impl"])[["workload", "impl", "tflops"]]
    both = fresh[["workload", "impl", "tflops", "percent_of_roofline", "correct", "failure"]]
    both = both.merge(ours, on=["workload", "impl"], how="left", suffixes=("", "_h200"))
    both["ratio"] = (both["tflops"] / both["tflops_h200"]).round(2)
    display(figures.show_table(both.round(2)))


# %% tags=["remove-input"]
draw_comparison() if mode == "compare" else draw_others()

# %% [markdown]
# ## Exercises
#
# :::{exercise} Read a chart twice
# :label: ex-figures-ratio
#
# The published chart for full self-attention claims 2.08 times the Triton kernel at length 256.
# Which two bars give that number, and what would the same quotient be here, best rung over
# `v1_tiled`? *(paper)*
# :::
#
# :::{solution} ex-figures-ratio
# :class: dropdown
#
# The bars of the CuTeDSL kernel and of Triton. Here it is the quotient of two rows of the table
# under {numref}`fig-self-fwd-full`. The denominators differ: the published Triton kernel was not
# tuned for that length. {doc}`Chapter 11 <11_claims>` computes the quotient for every claim.
# :::
#
# :::{exercise} Bytes at 256
# :label: ex-figures-bytes
#
# At length 256 the output is a quarter of the traffic. How far would the roofline rise if the
# output were fp8, everything else equal? *(paper)*
# :::
#
# :::{solution} ex-figures-bytes
# :class: dropdown
#
# Bytes fall from 4 parts to 3.5, so a memory-bound ceiling rises by one seventh.
# :::
#
# :::{exercise} A fourth figure
# :label: ex-figures-heads
#
# Add the workload gdpa-self-full-1024 with one K/V head for four query heads to a measuring run.
# Which term of the bracket moves, and do you expect v2 to notice? *(one change, a GPU)*
# :::
#
# :::{solution} ex-figures-heads
# :class: dropdown
#
# K and V shrink to a quarter: the memory floor falls by more than a third, the FLOPs stay. At 1,024
# the tensor cores are the ceiling, so v2 should hardly notice; at 256 it should.
# :::
#
# ## Takeaways
#
# 1. On dense batches the ladder is at two thirds of the roofline; the best softmax kernel is at
#    four fifths. The missing part is overlap, not arithmetic.
# 2. On jagged batches the peers one can install are slower than plain Triton written for the
#    layout.
# 3. A kernel's time and a call's time are different numbers; short batches live in the difference.
