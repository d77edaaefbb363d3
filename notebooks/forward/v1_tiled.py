# ---
# jupyter:
#   kernelspec: {name: python3, display_name: Python 3}
# measures: true
# ---

# %% [markdown]
# # v1: never write the scores down
#
# What is left to pay for when a score never leaves the chip?
#
# :::{admonition} In this chapter
# - A program computes a tile of queries, block of keys by block of keys, and keeps the scores in
#   registers. Memory sees {glue:text}`v1_gbytes:.1f` GB instead of v0's
#   {glue:text}`v0_eager.ipynb::v0_gbytes:.0f`, and the kernel is {glue:text}`v1_over_v0:.1f`
#   times as fast.
# - It is ahead of FlashAttention-2 on all {glue:text}`v1_workloads:.0f` workloads, by
#   {glue:text}`v1_fa2_least:.2f` to {glue:text}`v1_fa2_most:.2f` times.
# - Its time is {glue:text}`v1_sum_least:.2f` to {glue:text}`v1_sum_most:.2f` of what memory, tensor
#   cores and activation would need one after another: as if hardly anything overlapped.
# :::

# %% tags=["remove-cell"]
import difflib
import inspect
import re
from pathlib import Path

import pandas as pd
import torch
from IPython.display import Markdown, display
from matplotlib.patches import Rectangle

from gdpa_kernels import emulator, gdpa
from gdpa_kernels.calling import ladder
from gdpa_kernels.gdpa import activations, v1_tiled
from gdpa_kernels.measuring import compile_check, roofline, system, testing
from gdpa_kernels.measuring.inputs import cu_seqlens
from gdpa_kernels.measuring.workload import WORKLOADS, workload
from gdpa_kernels.report import figures, results
from gdpa_kernels.report.house import INK
from gdpa_kernels.report.studies import changed

# %% tags=["parameters"]
mode = "replay"
device = "cpu"
data_dir = "data"

# %% [markdown]
# This cell measures the tile shapes of a later section, with
# `make measure NOTEBOOKS=forward/v1_tiled` on a GPU. All other times are those of the record behind
# {doc}`results`.

# %% tags=["hide-input"]
if mode == "measure":
    from gdpa_kernels.gdpa import v1_tiled, v2_tma
    from gdpa_kernels.measuring.session import Session
    from gdpa_kernels.measuring.workload import workload

    session = Session("notebooks/forward/v1_tiled.py", device)
    shapes = [(128, 32, 8, 4), (128, 64, 4, 2), (128, 64, 8, 3), (128, 128, 8, 2), (64, 32, 4, 3)]
    shapes += [(64, 64, 4, 3), (64, 64, 4, 2), (64, 128, 4, 2)]
    for name in ("gdpa-self-full-256", "gdpa-self-full-1024", "gdpa-cross-full-1024"):
        session.measure(
            workload(name),
            [
                (
                    module.__name__.split(".")[-1],
                    "x".join(map(str, s)),
                    {"config": module.Config(*s)},
                )
                for s in shapes
                for module in (v1_tiled, v2_tma)
            ],
        )
    print(session.write(data_dir))

# %% tags=["remove-cell"]
SELF = "gdpa-self-full-1024"
SWEPT = ("gdpa-self-full-256", "gdpa-self-full-1024", "gdpa-cross-full-1024")

record = results.latest_record(data_dir, notebook="notebooks/forward/results.py", system="h200")
limits = results.ceilings(record)
machine = system.load(Path(data_dir) / "systems" / f"{record.system}.json")
everything = results.table(data_dir, system="h200")
everything = everything[everything["scope"] == "kernel"]
everything = everything.drop_duplicates(["workload", "impl", "variant", "record"])
kernels = everything[(everything["record"] == record.id) & (everything["variant"] == "")]
sweep = everything[everything["variant"].str.fullmatch(r"\d+x\d+x\d+x\d+")]
assert sweep["record"].nunique() == 1, "tile shapes are compared within one record"
NAMES = list(dict.fromkeys(kernels["workload"]))


def measured_us(impl: str, name: str) -> float:
    return results.one(kernels, workload=name, impl=impl)["time_us_p50"]


def code(text: str, language: str = "python") -> Markdown:
    return Markdown(f"```{language}\n{text.rstrip()}\n```")


# %% [markdown]
# ## What stays, what changes
#
# :::{list-table}
# :header-rows: 1
#
# * -
#   - {doc}`v0 <v0_eager>`
#   - v1
# * - work split
#   - one library kernel for each step, over the padded batch
#   - one program for each `BLOCK_M` query rows of one head of one sequence
# * - data path
#   - scores through memory, six times
#   - q, k and v in, the output out; scores stay in registers
# * - synchronisation
#   - between kernels
#   - inside a program: wait for the K and V that were asked for `num_stages - 1` blocks ago
# :::
#
# The mathematics stays. {numref}`fig-v1-tiles` shows what a program does: it holds its rows of Q,
# walks over the keys, and for each block of them computes a tile of scores, applies the activation,
# and multiplies with the same block of V into an accumulator.


# %% tags=["remove-input"]
# | name: fig-v1-tiles
# | caption: >
# |   One head of a sequence of 333 tokens, tiles of 128 queries and 32 keys. The program of the
# |   second row of tiles has finished four blocks of keys (pale) and works on the fifth (full
# |   colour). Hatched: rows and keys beyond the end of the sequence.
# | alt: >
# |   A square of scores divided into three rows of tiles and eleven columns. Q is a strip at its
# |   left, K a strip above, V a strip below, O a strip at its right. In the second row four tiles
# |   are pale and one is coloured; the blocks of K and V above and below the coloured tile and the
# |   tiles of Q and O beside it are coloured too. The last row and the last column of tiles are
# |   hatched in part.
LENGTH, ROWS, KEYS, STRIP, GAP = 333, 128, 32, 46, 14


def cell(axis, x: float, y: float, width: float, height: float, **style) -> None:
    style = {"facecolor": "none", "edgecolor": INK, "linewidth": 0.7} | style
    axis.add_patch(Rectangle((x, -y - height), width, height, **style))


with figures.style():
    figure, axis = figures.subplots(width=6.4, height=5.0)
    mine = {"facecolor": figures.colour("v1_tiled")}
    light = mine | {"alpha": 0.35}
    blocks, columns = -(-LENGTH // ROWS), -(-LENGTH // KEYS)
    left, bottom = -GAP - STRIP, blocks * ROWS + GAP
    for i in range(blocks):
        for x in (left, columns * KEYS + GAP):
            cell(axis, x, i * ROWS, STRIP, ROWS, **(mine if i == 1 else {}))
        for j in range(columns):
            own = mine if j == 4 else light if j < 4 else {}
            cell(axis, j * KEYS, i * ROWS, KEYS, ROWS, **(own if i == 1 else {}))
    for j in range(columns):
        for y in (left, bottom):
            cell(axis, j * KEYS, y, KEYS, STRIP, **(mine if j == 4 else {}))
    beyond = {"hatch": "//////", "linewidth": 0}
    for x, width in ((left, STRIP), (0, columns * KEYS), (columns * KEYS + GAP, STRIP)):
        cell(axis, x, LENGTH, width, blocks * ROWS - LENGTH, **beyond)
    for y, height in ((left, STRIP), (0, LENGTH), (bottom, STRIP)):
        cell(axis, LENGTH, y, columns * KEYS - LENGTH, height, **beyond)
    middle = columns * KEYS / 2
    for x, y, text in (
        (left + STRIP / 2, -8, "Q"), (columns * KEYS + GAP + STRIP / 2, -8, "O"),
        (middle, left - 8, "$K^T$"),
    ):  # fmt: skip
        axis.text(x, -y, text, ha="center", va="bottom")
    axis.text(middle, -bottom - STRIP - 8, "V", ha="center", va="top")
    axis.set_xlim(left - 8, columns * KEYS + GAP + STRIP + 8)
    axis.set_ylim(-bottom - STRIP - 34, -left + 34)
    axis.set_aspect("equal")
    axis.set_axis_off()
display(figure)

# %% tags=["remove-input"]
figures.source("modelled", "drawn from the loop of tiled_kernel for the sizes in the caption.")

# %% [markdown]
# The twenty lines that do it, from the file of the rung:

# %% tags=["remove-input"]
kernel_source = inspect.getsource(v1_tiled.tiled_kernel.fn)
start = kernel_source.index("    EXACT: tl.constexpr")
code(inspect.cleandoc(" " * 4 + kernel_source[start:].lstrip()))

# %% tags=["remove-cell"]
assert kernel_source[start:].count("\n") < 25
figures.glue_number("v1_changed_lines", ladder.changed_lines("v1_tiled"))

# %% [markdown]
# The diff against v0 ({glue:text}`v1_changed_lines:.0f` changed lines) has hardly a line in common:

# %% tags=["remove-input", "hide-output"]
code(ladder.diff("v1_tiled"), "diff")

# %% [markdown]
# **No maximum.** A softmax kernel must carry the largest score and the sum of each row from block
# to block and rescale its accumulator whenever the maximum rises
# {cite}`milakov2018online,dao2022flashattention`. Here blocks just add up
# ({doc}`../operator/gdpa`), and the sum is the accumulator of the tensor cores itself:
# `tl.dot(p, v, acc)`.
#
# **Tails.** A load of rows that do not exist returns zeros. A zero key gives a score of zero, all
# our activations are zero at zero, and so the tail of the keys needs no mask on the scores. V is
# loaded with zeros as well, because 0 times whatever the neighbour has there, a NaN for example, is
# not 0. Rows beyond the end of Q are computed and not stored.
#
# **Masks.** Causal and window masks set probabilities to zero *after* the activation, for the
# reasons given in {doc}`the first chapter <../operator/gdpa>`. `key_range` leaves out the blocks
# that they would empty.
#
# **Offsets have 64 bits.** A packed tensor easily holds more than $2^{31}$ elements:

# %%
longest = workload("gdpa-self-kuairand1k-4096")
elements = longest.total_q * longest.num_heads_q * longest.head_dim
print(f"{longest.name}: {longest.total_q:,} tokens, {elements / 2**31:.3f} * 2**31 elements of q")

# %% tags=["remove-cell"]
assert elements > 2**31, "the text says that this workload needs 64-bit offsets"

# %% [markdown]
# **Everything else `gdpa` promises**: any strides, such as slices of one packed qkv tensor; groups
# of query heads that share K and V {cite}`ainslie2023gqa`; one q for the whole batch; fp16 and
# fp32; any head_dim up to 256. v1 is the rung that later, faster ones leave these cases to.
#
# Roles and barriers, as the file states them:

# %% tags=["remove-input"]
Markdown("\n".join(re.findall(r"(?:^\|.*\n)+", v1_tiled.__doc__, flags=re.MULTILINE)))

# %% [markdown]
# ## Prediction
#
# Three things remain to be paid for.
#
# *Memory.* Inputs once, the output once: {glue:text}`v1_gbytes:.1f` GB for gdpa-self-full-1024.
# Each row of tiles reads K and V of its head again, but those programs run at about the same time,
# and we expect the L2 cache to answer.
#
# *Tensor cores.* `4 * head_dim` FLOPs per score.
#
# *The activation.* The {doc}`chapter on activations <../operator/activations>` counts
# {glue:text}`v1_fp32:.0f` fp32 instructions and {glue:text}`v1_mufu:.0f` of the MUFU unit for the
# tanh form of GELU, and half an instruction packs a probability into bf16. An SM issues to 128
# lanes per clock, of which MUFU serves 16. So MUFU is the limit, with {glue:text}`v1_clocks:.4f`
# clocks of an SM per score.

# %% tags=["remove-cell"]
fp32, mufu = activations.INSTRUCTIONS["gelu_tanh"]
clocks = max((fp32 + mufu + 0.5) / 128, mufu / 16)
assert clocks == mufu / 16, "the text says that MUFU is the limit of the activation"
figures.glue_number("v1_fp32", fp32)
figures.glue_number("v1_mufu", mufu)
figures.glue_number("v1_clocks", clocks)


# %% tags=["remove-cell"]
def costs_us(name: str) -> dict[str, float]:
    """What a workload pays for, in us, if each were alone on the machine."""
    work = WORKLOADS[name]
    bracket = roofline.bracket(work, "forward", limits)
    per_us = machine.num_sms * machine.max_sm_clock_mhz
    return {
        "memory": bracket.memory_us,
        "tensor cores": bracket.compute_us,
        "activation": work.num_heads_q * work.pairs * clocks / per_us,
    }


costs = pd.DataFrame({name: costs_us(name) for name in NAMES}).T
PARTS = list(costs.columns)
costs["largest"] = costs[PARTS].max(axis=1)
costs["sum"] = costs[PARTS].sum(axis=1)
costs["upper"] = costs["memory"] + costs["tensor cores"]
costs["v1"] = [measured_us("v1_tiled", name) for name in costs.index]
figures.glue_number("v1_gbytes", workload(SELF).bytes("forward") / 1e9)
figures.glue_number("v1_sm_clock", machine.max_sm_clock_mhz)
figures.glue_number("v1_largest_us", costs["largest"][SELF])
figures.glue_number("v1_sum_us", costs["sum"][SELF])
figures.glue_number("v1_upper_us", costs["upper"][SELF])

# %% [markdown]
# With the ceilings of the record for the first two, and {glue:text}`v1_sm_clock:,.0f` MHz for the
# third (all modelled, in µs):

# %% tags=["remove-input"]
shown = costs.loc[[n for n in NAMES if "self-full" in n], [*PARTS, "largest", "sum"]]
figures.show_table(shown.round(0).reset_index(names="workload"))

# %% [markdown]
# With perfect overlap v1 would take the largest of the three, without any their sum:
# {glue:text}`v1_largest_us:,.0f` to {glue:text}`v1_sum_us:,.0f` µs at 1,024 tokens. (The bracket of
# the {doc}`roofline <../measuring/roofline>`, which knows only the first two, ends at
# {glue:text}`v1_upper_us:,.0f`.) Inside a program there is little overlap. Copies run ahead, but a
# warp group must have its scores before it can evaluate the activation, and meanwhile gives nothing
# to the tensor cores. Only another program on the same SM can use them. So we expect a time clearly
# inside: below the sum, because two programs share an SM, and above the largest, because nobody
# arranges that they alternate. A time above the sum would say that something else is being paid
# for.
#
# ## Is it right
#
# v1 in the emulator, on the CPU: a packed qkv tensor, grouped heads, one q for all, fp32. Each is
# compared with double precision, within a computed budget ({doc}`../measuring/protocol`).

# %%
torch.manual_seed(0)
ends = cu_seqlens([40, 0, 129], "cpu")
q, k, v = torch.randn(169, 6, 16).split(2, dim=1)
same = (ends, ends, 129, 129)
half = torch.cat([q, k, v], dim=1).bfloat16().split(2, dim=1)
cases = {
    "packed qkv": (half, same),
    "one K/V head for two": ((half[0], half[1][:, :1], half[2][:, :1]), same),
    "one q for all, fp32": ((q[:20], k, v), (None, ends, 20, 129)),
}
for name, (tensors, lengths) in cases.items():
    exact = [t.double() for t in tensors]
    with emulator.enabled():
        out = gdpa(*tensors, *lengths, impl="v1_tiled")
    comparison = testing.compare(
        name="out",
        actual=out,
        expected=gdpa(*exact, *lengths, impl="reference"),
        baseline=gdpa(*tensors, *lengths, impl="reference"),
    )
    assert comparison.passed
    error, budget = comparison.max_abs, comparison.max_abs_budget
    print(f"{name}: max error {error:.2g}, budget {budget:.2g}")

# %% tags=["remove-cell"]
row = next(r for r in record.rows if (r.workload, r.impl, r.scope) == (SELF, "v1_tiled", "kernel"))
assert row.error.passed
figures.glue_number("v1_error", row.error.max_abs)
figures.glue_number("v1_budget", row.error.budget)
assert row.peak_bytes == workload(SELF).bytes_written("forward"), "only the output is allocated"

# %% [markdown]
# On the GPU, on the inputs that were timed: largest error {glue:text}`v1_error:.2f`, budget
# {glue:text}`v1_budget:.2f` (measured). The tests `test_matches_the_definition`,
# `test_neighbours_do_not_leak` and `test_random_batches_and_options` in
# `tests/gdpa/test_forward.py` run this source over lengths around tile edges, poisoned neighbours
# and random options.
#
# ## Measurement

# %% tags=["remove-cell"]
v1 = {name: measured_us("v1_tiled", name) for name in NAMES}
over_v0 = {name: measured_us("v0_eager", name) / v1[name] for name in NAMES}
over_fa2 = {name: measured_us("fa2_varlen", name) / v1[name] for name in NAMES}
relative = costs["v1"] / costs["sum"]
dense = [
    name for name in NAMES if name.endswith(("full-256", "full-512", "full-1024", "full-2048"))
]
above = relative[relative > 1]
assert min(over_fa2.values()) > 1, "the text says that v1 is ahead of FlashAttention-2 everywhere"
assert measured_us("cudnn", SELF) < v1[SELF], "the text says that cuDNN is ahead on dense batches"
assert (costs["v1"] > costs["largest"]).all()
assert relative.min() > 0.75, "the text says that little overlaps"
assert over_v0["gdpa-self-half-jagged-1024"] > 2 * over_v0[SELF]
assert set(above.index) & set(dense) <= {"gdpa-self-full-2048"}
longer = [name for name in dense if "256" not in name.rsplit("-", 1)[1]]
assert (costs["v1"] > costs["upper"])[longer].all(), "the text says: above the two-term bracket"

figures.glue_number("v1_workloads", len(NAMES))
figures.glue_number("v1_over_v0", over_v0[SELF])
figures.glue_number("v1_over_v0_half", over_v0["gdpa-self-half-jagged-1024"])
figures.glue_number("v1_fa2_least", min(over_fa2.values()))
figures.glue_number("v1_fa2_most", max(over_fa2.values()))
figures.glue_number("v1_us", v1[SELF])
figures.glue_number(
    "v1_percent", results.one(kernels, workload=SELF, impl="v1_tiled")["percent_of_roofline"]
)
figures.glue_number("v1_cudnn_over", v1[SELF] / measured_us("cudnn", SELF))
figures.glue_number("v1_sum_least", relative.min())
figures.glue_number("v1_sum_most", relative.max())
figures.glue_number("v1_dense_least", relative[dense].min())
figures.glue_number("v1_dense_most", relative[dense].max())
figures.glue_number("v1_above", len(above))
figures.glue_text("v1_above_names", ", ".join(above.index.str.removeprefix("gdpa-")))

# %% tags=["remove-input"]
# | name: fig-v1-ladder
# | caption: >
# |   The ladder up to v1 on gdpa-self-full-1024, forward.
# | alt: >
# |   Horizontal bars of TFLOP/s. The tiled kernel is nearly seven times as long as the eager one,
# |   longer than FlashAttention-2 and both padded baselines, and shorter than dense cuDNN; none
# |   reaches the dashed line of the roofline.
figures.figure_ladder(kernels, SELF, ["v0_eager", "v1_tiled"], "v1_tiled")

# %% tags=["remove-input"]
drawn = kernels[kernels["workload"] == SELF]
figures.save_csv(drawn, "v1-ladder")
figures.provenance(drawn, csv="v1-ladder")

# %% tags=["remove-input"]
# | name: fig-v1-ladder-2048
# | caption: >
# |   The same on gdpa-self-full-2048.
# | alt: >
# |   Horizontal bars of TFLOP/s. The tiled kernel is about five times as long as the eager one and
# |   about as long as at 1,024 tokens; both cuDNN bars are longer now.
figures.figure_ladder(kernels, "gdpa-self-full-2048", ["v0_eager", "v1_tiled"], "v1_tiled")

# %% tags=["remove-input"]
drawn = kernels[kernels["workload"] == "gdpa-self-full-2048"]
figures.save_csv(drawn, "v1-ladder-2048")
figures.provenance(drawn, csv="v1-ladder-2048")

# %% [markdown]
# v1 takes {glue:text}`v1_us:,.0f` µs at 1,024 tokens, {glue:text}`v1_percent:.0f` % of the roofline
# (measured), and {glue:text}`v1_over_v0:.1f` times less than v0. When the batch is half full, the
# jagged layout comes on top and the factor is {glue:text}`v1_over_v0_half:.1f`. The best baseline,
# dense cuDNN, needs {glue:text}`v1_cudnn_over:.2f` times less than v1; it computes softmax, and
# takes no jagged batch. All lengths, measured:

# %% tags=["remove-input"]
overview = pd.DataFrame(
    {
        "workload": NAMES,
        "v1 (us)": [round(v1[n]) for n in NAMES],
        "TFLOP/s": [results.one(kernels, workload=n, impl="v1_tiled")["tflops"] for n in NAMES],
        "% of roofline": [
            results.one(kernels, workload=n, impl="v1_tiled")["percent_of_roofline"] for n in NAMES
        ],
        "v0 / v1": [over_v0[n] for n in NAMES],
        "FA2 / v1": [over_fa2[n] for n in NAMES],
    }
)
figures.show_table(overview.round({"TFLOP/s": 0, "% of roofline": 0, "v0 / v1": 1, "FA2 / v1": 2}))

# %% [markdown]
# ## The first surprise: as if nothing overlapped
#
# {numref}`fig-v1-costs` lays each measured time over the three costs.

# %% tags=["remove-input"]
# | name: fig-v1-costs
# | caption: >
# |   What memory, tensor cores and activation need one after another, as parts of their sum
# |   (modelled), and the time of v1 in the same unit (dots, measured).
# | alt: >
# |   Sixteen horizontal bars of equal length, divided into three parts. Memory shrinks and the
# |   tensor cores grow with length. The dots lie between 0.8 and 1.1 of the bars' length, those of
# |   dense batches of 256 tokens lowest; the jagged ones and the longest dense one lie at the end
# |   or beyond it.
with figures.style():
    figure, axis = figures.subplots(width=7.6, height=5.6)
    looks = (
        {"color": "none"},
        {"color": INK, "alpha": 0.45},
        {"color": "none", "hatch": "/////"},
    )
    start = pd.Series(0.0, index=costs.index)
    for part, look in zip(PARTS, looks, strict=True):
        share = costs[part] / costs["sum"]
        axis.barh(range(len(costs)), share, 0.66, left=start, edgecolor=INK, label=part, **look)
        start = start + share
    axis.plot(
        relative, range(len(costs)), "o", markersize=7, color=figures.colour("v1_tiled"),
        label="v1_tiled, measured",
    )  # fmt: skip
    axis.set_yticks(range(len(costs)), costs.index.str.removeprefix("gdpa-"))
    axis.set_ylim(len(costs) - 0.4, -0.6)
    axis.set_xlim(0, 1.15)
    axis.grid(visible=False, axis="y")
    axis.set_xlabel("time / sum of the three costs")
    axis.legend(loc="lower center", bbox_to_anchor=(0.45, 1.0), ncols=4, fontsize=8.5)
display(figure)

# %% tags=["remove-input"]
figures.save_csv(costs.reset_index(names="workload"), "v1-costs")
figures.provenance(kernels[kernels["impl"] == "v1_tiled"], csv="v1-costs")

# %% tags=["remove-input"]
figures.source(
    "modelled", "the parts of the bars: bytes, FLOPs and MUFU instructions of each workload."
)

# %% [markdown]
# On dense batches v1 takes {glue:text}`v1_dense_least:.2f` to {glue:text}`v1_dense_most:.2f` of the
# sum, and from 512 tokens on it is above the bracket of the
# {doc}`roofline <../measuring/roofline>`. On {glue:text}`v1_above:.0f` workloads
# ({glue:text}`v1_above_names`) it is above the sum, which was the falsifying case. Either two
# programs on an SM hide little of each other's activation, or something else costs what they save.
# Two things are missing from our count: rows and keys that do not exist, which matter in short
# jagged batches, where a tile is seldom full; and all instructions of the loop that are neither
# activation nor product. {doc}`The next chapter <v2_tma>` counts those.
#
# ## Which tile
#
# The constants of a rung are chosen by measurement. What they may be is arithmetic. A program keeps
# its rows of Q and `num_stages` blocks of K and V in shared memory, and in registers at least the
# accumulator, a tile of scores and its bf16 copy. An SM has 228 KiB of shared memory, of which each
# program takes one more, and 65,536 registers.


# %%
def on_an_sm(block_m, block_n, num_warps, num_stages, registers=None):
    """What an SM holds; `registers` of a thread, by default the least."""
    shared = (block_m + 2 * num_stages * block_n) * 128 * 2  # head_dim, bf16
    threads = 32 * num_warps
    least = (block_m * 128 + 3 * block_m * block_n // 2) // threads
    allocated = -(-(registers or least) // 8) * 8  # in steps of 8
    by_shared = 228 * 1024 // (shared + 1024)
    programs = min(by_shared, 65536 // (threads * allocated))
    return {
        "shared (KiB)": shared / 1024,
        "registers, least": least,
        "programs": programs,
        "warp groups": programs * num_warps // 4,
    }


# %% tags=["remove-cell"]
def shape_of(variant: str) -> tuple[int, ...]:
    return tuple(map(int, variant.split("x")))


times = sweep.pivot(index="variant", columns=["impl", "workload"], values="time_us_p50")
order = times["v1_tiled"][SELF].sort_values().index
fits = pd.DataFrame({v: on_an_sm(*shape_of(v)) for v in order}).T
BEST, WORST, WIDE = "128x32x8x4", "64x128x4x2", "128x64x4x2"
for name in SWEPT:
    ranks = times["v1_tiled"][name].groupby(fits["warp groups"])
    assert (ranks.min().iloc[:-1].values > ranks.max().iloc[1:].values).all(), (
        f"the text says that more warp groups are faster, on {name} too"
    )
    assert times["v1_tiled"][name].idxmin() == BEST and times["v1_tiled"][name].idxmax() == WORST
    assert (times["v2_tma"][name] < times["v1_tiled"][name]).all()
assert times["v2_tma"][SELF].idxmin() == WIDE, "the text says that v2 prefers another shape"
assert "x".join(map(str, (128, 32, 8, 4))) == BEST
assert v1_tiled.Config() == v1_tiled.Config(*shape_of(BEST))
elsewhere = measured_us("v1_tiled", SELF)
figures.glue_number(
    "v1_worst_over_best", (times["v1_tiled"].loc[WORST] / times["v1_tiled"].loc[BEST])[SELF]
)
assert times["v1_tiled"][SELF][BEST] > 1.02 * elsewhere, "the text warns of a difference"
figures.glue_number("v1_sweep_percent", 100 * (times["v1_tiled"][SELF][BEST] / elsewhere - 1))
assert fits["warp groups"][WORST] == 1 and fits["warp groups"][BEST] == 4
figures.glue_number(
    "v1_stage_gain", (times["v1_tiled"].loc["64x64x4x2"] / times["v1_tiled"].loc["64x64x4x3"])[SELF]
)
assert fits["warp groups"]["64x64x4x2"] == fits["warp groups"]["64x64x4x3"]

# %% tags=["remove-input"]
listed = fits.assign(**{name: times["v1_tiled"][name] for name in SWEPT})
listed = listed.astype({"programs": int, "warp groups": int}).round(0)
listed = listed.rename(columns={name: f"{name.removeprefix('gdpa-')} (us)" for name in SWEPT})
figures.show_table(listed.reset_index(names="BLOCK_M x BLOCK_N x warps x stages"))

# %% [markdown]
# The left half is modelled; the right half, the default constants and seven others, is measured.

# %% tags=["remove-input"]
# | name: fig-v1-shapes
# | caption: >
# |   Time of eight tile shapes, relative to the best of v1, on three workloads. Beside each shape:
# |   the warp groups that an SM holds. Filled dots: v1; hollow: the next rung with the same shapes.
# | alt: >
# |   Three panels with eight rows of dots. v1 is fastest at 128 by 32 with eight warps, where an SM
# |   holds four warp groups, then at 64 by 32 with three; the shapes with two groups follow, and 64
# |   by 128 with a single group takes about twice as long. Hollow dots lie left of the filled ones.
with figures.style():
    figure, axes = figures.subplots(1, 3, width=8.8, height=3.5, sharey=True)
    for axis, name in zip(axes, SWEPT, strict=True):
        unit = times["v1_tiled"][name].min()
        for impl, fill in (("v1_tiled", figures.colour("v1_tiled")), ("v2_tma", "none")):
            axis.plot(
                times[impl][name][order] / unit, range(len(order)), "o", markersize=6,
                color=figures.colour(impl), markerfacecolor=fill, label=impl,
            )  # fmt: skip
        axis.set_title(name.removeprefix("gdpa-"))
        axis.set_xlim(0, 2.3)
        axis.grid(visible=True, axis="x")
        axis.set_xlabel("time / best v1")
    labels = [f"{v.replace('x', ' x ')}:  {fits['warp groups'][v]:.0f}" for v in order]
    axes[0].set_yticks(range(len(order)), labels)
    axes[0].set_ylim(len(order) - 0.4, -0.6)
    axes[2].legend(loc="upper right", fontsize=8.5)
display(figure)

# %% tags=["remove-input"]
drawn = sweep[sweep["workload"].isin(SWEPT)]
figures.save_csv(drawn, "v1-shapes")
figures.provenance(drawn, csv="v1-shapes")

# %% [markdown]
# On all three workloads v1's shapes are ordered by one number, the warp groups on an SM: four
# before three, three before two, two before one. That much does overlap: a warp group in its
# activation leaves the tensor cores to the others, if there are any. 64 × 128 with four warps has
# shared memory for one program of one warp group, and takes {glue:text}`v1_worst_over_best:.1f`
# times as long. Among equals depth matters: 64 × 64 with two stages instead of three takes
# {glue:text}`v1_stage_gain:.2f` times as long, because copies start only one block ahead.
#
# The shape 128 × 64 with four warps loses here, and wins for {doc}`v2 <v2_tma>` at 1,024 tokens.
# Both have the same scores and the same products. What differs is the addressing.
#
# One warning about this record. The same kernel with the same constants took
# {glue:text}`v1_sweep_percent:.0f` % longer here than in {numref}`fig-v1-ladder`: in the sweep only
# tensor-heavy kernels take turns, there v0 and `torch.compile` ran in between, and we suspect the
# power limit. Times are compared within a record ({doc}`../measuring/protocol`).
#
# ## The second surprise: a pointer is not free
#
# Why does `tile` compute each block's pointers from the row's number, in 64 bits, in every turn of
# the loop? The obvious code computes them once and adds a constant per block. This is that variant:

# %% tags=["remove-cell"]
TILE = "{x}_ptrs, mask = tile({x}_ptr, first_key, len_k, BLOCK_N, {X}_STRIDES, HEAD_DIM, BLOCK_D)\n"
LOOP = "    for first_key in tl.range(start, end, BLOCK_N):\n"
LAST = "acc = tl.dot(p.to(v.dtype), v, acc, input_precision=PRECISION)\n"
K, V = (TILE.format(x=x, X=x.upper()) for x in "kv")

hoisted = changed(
    v1_tiled,
    (K, "mask = (first_key + tl.arange(0, BLOCK_N) < len_k)[:, None]\n"),
    (" " * 8 + V, ""),
    (LOOP, "".join(" " * 4 + t.replace("first_key", "start") for t in (K, V)) + LOOP),
    (LAST, LAST + "".join(f"        {x}_ptrs += BLOCK_N * {x.upper()}_STRIDES[0]\n" for x in "kv")),
)

# %% tags=["remove-input"]
lines = (
    Path(module.__file__).read_text().splitlines(keepends=True) for module in (v1_tiled, hoisted)
)
code("".join(list(difflib.unified_diff(*lines, n=1))[2:]), "diff")

# %% [markdown]
# Compiled for sm_90a, both:

# %% tags=["hide-input"]
made = {
    "computed in each turn (v1)": compile_check.compile_rung(v1_tiled),
    "computed once, advanced": compile_check.compile_rung(hoisted),
}
tensors, lengths = cases["packed qkv"]
how = {"activation": ("gelu_tanh",), "scale": tensors[0].shape[-1] ** -0.5, "output_scale": 1.0}
how |= {"causal": False, "window": None}
with emulator.enabled():
    assert torch.equal(*(m.forward(*tensors, *lengths, **how) for m in (v1_tiled, hoisted)))
figures.show_table(
    pd.DataFrame(
        {
            "pointers": name,
            "registers": m.registers,
            "bytes spilled": m.spill_bytes,
            "shared (KiB)": m.shared_bytes / 1024,
            "programs on an SM": on_an_sm(128, 32, 8, 4, m.registers)["programs"],
        }
        for name, m in made.items()
    )
)

# %% tags=["remove-cell"]
ours, theirs = made.values()
held = [on_an_sm(128, 32, 8, 4, m.registers)["programs"] for m in (ours, theirs)]
assert held == [2, 1], f"the text says that hoisting costs the second program, got {held}"
assert ours.shared_bytes == theirs.shared_bytes == 1024 * fits["shared (KiB)"][BEST]
assert ours.spill_bytes == theirs.spill_bytes == 0
figures.glue_number("v1_registers", ours.registers)
figures.glue_number("v1_registers_hoisted", theirs.registers)
figures.glue_number("v1_register_limit", 65536 // (2 * 256))
figures.glue_number(
    "v1_most_stages", max(s for s in range(2, 9) if on_an_sm(128, 32, 8, s)["programs"] == 2)
)
figures.glue_number("v1_shared", fits["shared (KiB)"][BEST])
read = workload(SELF)
tile_gb = read.batch * read.num_heads_q * (1024 // 64) * 2 * 1024 * 128 * 2 / 1e9
figures.glue_number("v1_l2_gbytes", tile_gb)
figures.glue_number("v1_l2_rate", tile_gb / times["v1_tiled"][SELF]["64x32x4x3"] * 1e3)
figures.glue_number("v1_copy_rate", limits.copies[-1][1] / 1e3)
figures.glue_number("v1_l2_mb", machine.l2_bytes / 1e6)
figures.glue_number("v1_resident_mb", 2 * machine.num_sms * 2 * 1024 * 128 * 2 / 1e6)
assert tile_gb / times["v1_tiled"][SELF]["64x32x4x3"] * 1e3 > limits.copies[-1][1] / 1e3
assert 2 * machine.num_sms * 2 * 1024 * 128 * 2 > machine.l2_bytes

# %% [markdown]
# Two programs of 256 threads may have {glue:text}`v1_register_limit:.0f` registers a thread. v1
# needs {glue:text}`v1_registers:.0f`. The pointers that wait for the next turn, through both
# products, raise that to {glue:text}`v1_registers_hoisted:.0f`, and half of the warp groups are
# gone. With the wider tile that v1 had at first, whose accumulator alone takes half of a thread's
# 255 registers, the same change fills the loop with spills. Arithmetic that is repeated costs issue
# slots; arithmetic that is remembered costs registers; here registers are dearer.
#
# Which leads to the limit of this rung. In each turn every thread computes 64-bit addresses for its
# pieces of K and V, compares their rows with the end of the sequence, and issues the copies. None
# of it is attention, all of it takes issue slots and registers from the warps that should feed the
# tensor cores. Who else could do the addressing? That is the question of {doc}`v2 <v2_tma>`.
#
# ## Exercises
#
# :::{exercise} One stage more
# :label: ex-v1-stages
#
# With 128 × 32 and eight warps, how many stages can K and V have before the second program no
# longer fits on the SM? And in fp32, with four stages? *(paper, or one line of the cell above)*
# :::
#
# :::{solution} ex-v1-stages
# :class: dropdown
#
# A stage takes 16 KiB: with {glue:text}`v1_most_stages:.0f` stages a program takes
# `(128 + 2 * 5 * 32) * 256` bytes = 112 KiB, and two still fit; six are too many. fp32 doubles
# everything: 192 KiB, one program. That, and products without tensor cores, is why
# `default_config` chooses smaller tiles for fp32.
# :::
#
# :::{exercise} Where do K and V come from?
# :label: ex-v1-l2
#
# With 64 query rows per program, how many bytes of K and V do all programs of gdpa-self-full-1024
# load together? Divide by the measured time of 64 × 32 in the table. Where can they have come from?
# *(paper)*
# :::
#
# :::{solution} ex-v1-l2
# :class: dropdown
#
# 4,608 heads, 16 programs each, 512 KiB of K and V each: {glue:text}`v1_l2_gbytes:.0f` GB, at
# {glue:text}`v1_l2_rate:.1f` TB/s. A copy reaches {glue:text}`v1_copy_rate:.1f`, so most came from
# the L2 cache. The programs of one head are neighbours in the grid and run together.
# :::
#
# :::{exercise} Neighbours apart
# :label: ex-v1-order
#
# Change the order of programs so that neighbours work on different sequences: let `batch` vary
# fastest in `pid`. Predict what happens at 1,024 tokens, from the size of the L2 cache,
# {glue:text}`v1_l2_mb:.0f` MB; then measure. *(one change, a GPU)*
# :::
#
# :::{solution} ex-v1-order
# :class: dropdown
#
# Two programs on each SM now read K and V of different heads: {glue:text}`v1_resident_mb:.0f` MB at
# a time, more than the cache holds, and by the time the next tile of a head runs its K and V are
# gone. Each tile would read them from memory. With 128 rows that is half of the bytes of the
# previous exercise; divide by the rate of a copy and compare with v1's time.
# :::
#
# ## Takeaways
#
# :::{admonition} Three things to remember
# :class: tip
#
# 1. Do not write what you can recompute or keep: without the scores, memory is no longer the limit,
#    and the jagged layout comes for free.
# 2. A kernel whose warps all do everything overlaps only by accident. Count the warp groups on an
#    SM first.
# 3. Registers are a budget of the SM, not of the thread: a few too many cost half the warps.
# :::
