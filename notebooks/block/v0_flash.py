# ---
# jupyter:
#   kernelspec: {name: python3, display_name: Python 3}
# measures: false
# ---

# %% [markdown]
# # v0: FlashAttention-2 on this mask
#
# Softmax inside blocks of 64 tokens is attention over very many very short sequences. Kernels for
# attention exist. What do they pay here for what long sequences need?
#
# :::{admonition} In this chapter
# - Backward moves {glue:text}`bv0_tensors:.0f` tensors where {glue:text}`bv0_least_tensors:.0f`
#   would do. At the rate of a copy this alone leaves {glue:text}`bv0_bound_128:.0f` % of what the
#   memory allows; v0 reaches {glue:text}`bv0_backward_128:.0f` % at head_dim 128 and
#   {glue:text}`bv0_backward_64:.0f` % at 64.
# - Forward moves hardly a byte too many, and reaches {glue:text}`bv0_forward_128:.0f` and
#   {glue:text}`bv0_forward_64:.0f` %. Bytes do not explain that.
# - The baseline is fair: the FlashAttention-2 of PyTorch, with a sequence for each block, takes
#   {glue:text}`bv0_fa2_forward_128:.2f` times as long forward and
#   {glue:text}`bv0_fa2_backward_128:.2f` times as long backward, at head_dim 128.
# :::

# %% tags=["remove-cell"]
import functools
import inspect
import re
from dataclasses import replace
from pathlib import Path

import pandas as pd
import torch
import triton
from IPython.display import Markdown, display

from gdpa_kernels import emulator
from gdpa_kernels.block_attention import reference, v0_flash
from gdpa_kernels.block_attention.batch import Batch
from gdpa_kernels.calling.launches import Launch, launches
from gdpa_kernels.measuring import compile_check, testing
from gdpa_kernels.measuring.inputs import cu_seqlens
from gdpa_kernels.measuring.workload import workload
from gdpa_kernels.report import figures, results
from gdpa_kernels.report.house import INK

# %% tags=["parameters"]
mode = "replay"
device = "cpu"
data_dir = "data"

# %% tags=["remove-cell"]
IMPL = "v0_flash"
PEERS = {"fa2_varlen": "FlashAttention-2", "cudnn_varlen": "cuDNN"}
DIRECTIONS = ("forward", "backward")
NAMES = {128: "block-fill70-2000", 64: "block-fill70-2000-d64"}
WORK = {dim: workload(name) for dim, name in NAMES.items()}
VERDICT = {True: "kept", False: "broken"}

found = results.latest_record(data_dir, notebook="notebooks/block/results.py", system="h200")
limits = results.ceilings(found)
everything = results.table(data_dir, system="h200", latest=False)
everything = everything.drop_duplicates(
    ["workload", "direction", "impl", "scope", "variant", "record"]
)
everything = everything[everything["workload"].isin(NAMES.values())]
everything = everything[everything["scope"] == "kernel"]
everything["head_dim"] = everything["workload"].map({name: dim for dim, name in NAMES.items()})
ladder_rows = everything[(everything["record"] == found.id) & (everything["variant"] == "")]
own = results.latest_record(data_dir, notebook="notebooks/block/v1_one_tile.py", system="h200")
stages = everything[(everything["record"] == own.id) & (everything["impl"] == IMPL)]


def glue(name: str, value: float) -> None:
    figures.glue_number(f"bv0_{name}", value)


def glue_word(name: str, value: str) -> None:
    figures.glue_text(f"bv0_{name}", value)


def measured(rows: pd.DataFrame, column: str) -> pd.DataFrame:
    """`column` by (direction, head_dim) and implementation or variant."""
    by = "variant" if rows is stages else "impl"
    return rows.pivot(index=["direction", "head_dim"], columns=by, values=column)


time, share = measured(ladder_rows, "time_us_p50"), measured(ladder_rows, "percent_of_roofline")
assert time[IMPL].notna().all() and len(time) == 4, "the record lacks a time of v0"
for direction, dim in time.index:
    glue(f"{direction}_{dim}", share.loc[(direction, dim), IMPL])

# %% [markdown]
# ## What it is
#
# A block of tokens is a sequence of its own, and on these sequences runs what FlashAttention-2 is
# {cite}`dao2024flashattention2`: four kernels of plain Triton, written for this book. Everything in
# them has a reason, and the reason is that a sequence is longer than a tile.
#
# :::{list-table}
# :header-rows: 1
#
# * - what
#   - why, on a long sequence
#   - on a block of 64
# * - a loop over keys
#   - the scores of all keys do not fit
#   - one trip
# * - a running maximum, by which sum and output are rescaled {cite}`milakov2018online`
#   - the largest score is known at the end only
#   - known at once
# * - the log-sum-exp, written forward, read backward
#   - to have P again without a second pass over the keys
#   - a row of scores is at hand
# * - `delta`, the row sums of O ∘ dO, by a kernel of its own
#   - dS needs a sum over all keys
#   - the row is at hand
# * - dK and dV in one kernel, dQ in another
#   - who sums owns the result, without atomics
#   - one owner for all
# :::
#
# The same list is what v1 will leave out ({doc}`v1_one_tile`). To be able to say what leaving
# out is worth, somebody has to do it all first, and do it well.
#
# The loop of the forward kernel:

# %% tags=["remove-input"]
body = inspect.getsource(v0_flash.forward_kernel.fn)
body = body[body.index("    highest = tl.full") :].rstrip()
assert body.count("\n") < 25
Markdown(f"```python\n{inspect.cleandoc(chr(10) + body)}\n```")

# %% [markdown]
# With the maximum $m$ of a row so far, the sum $l$ and the output $a$, a step with scores $t$ in
# units of $\log_2$ sets
#
# $$m' = \max(m, \max_j t_j), \quad f = 2^{m - m'}, \quad l' = f l + \sum_j 2^{t_j - m'}, \quad
# a' = f a + \sum_j 2^{t_j - m'} v_j .$$
#
# At the first step $m = -\infty$, so that $f = 0$ and multiplies zeros. Here there is no second
# step:


# %%
def blank(dim: int) -> Batch:
    """One sequence of four heads, with nothing in it."""
    q = torch.zeros(67, 4, dim, dtype=torch.bfloat16)
    return Batch(q, q, q, cu_seqlens((len(q),), "cpu"), dim**-0.5)


for dim, work in WORK.items():
    config = v0_flash.default_config("forward", blank(dim))
    trips = -(-work.block_size // config.BLOCK_N)
    print(f"{work.name}: {work.blocks:,} blocks, at most {trips} trip of the loop")

# %% tags=["remove-cell"]
assert trips == 1, "the text says that the loop runs once"
glue("blocks", WORK[128].blocks)
glue("tokens", WORK[128].total_q)
glue("least_rows", 100 * WORK[128].total_q / (WORK[128].blocks * 64))

# %% [markdown]
# The compiler cannot know that, since the number of rows is read from a list at run time.
#
# Roles, as the file states them:

# %% tags=["remove-input"]
tables = re.findall(r"(?:^\|.*\n)+", inspect.getdoc(v0_flash) + "\n", flags=re.MULTILINE)
Markdown("\n".join(tables))

# %% [markdown]
# A program owns 64 rows of one head: queries in the forward kernel and for dQ, keys for dK and dV.
# Neighbouring programs own neighbouring blocks of the same head.
#
# ## Prediction
#
# {doc}`counting_bytes` shows that memory decides here, by a wide margin. So count bytes. The
# unit is one tensor, all of q, which is larger than any cache; a log-sum-exp or `delta` has 4 bytes
# for each row of it.


# %% tags=["remove-cell"]
def traffic(work) -> list[tuple[str, str, float, float]]:
    """(direction, kernel, bytes read, bytes written) of v0; the list of blocks left out."""
    tensor = work.total_q * work.num_heads_q * work.head_dim * 2
    lane = work.total_q * work.num_heads_q * 4
    return [
        ("forward", "forward_kernel", 3 * tensor, tensor + lane),
        ("backward", "delta_kernel", 2 * tensor, lane),
        ("backward", "dk_dv_kernel", 4 * tensor + 2 * lane, 2 * tensor),
        ("backward", "dq_kernel", 4 * tensor + 2 * lane, tensor),
    ]


def floor_us(read: float, written: float) -> float:
    """The time of a copy with as many bytes, at the measured rate of its mix."""
    return (read + written) / limits.gbytes_per_s(int(read), int(written)) / 1e3


counted = []
for dim, work in WORK.items():
    tensor = work.total_q * work.num_heads_q * dim * 2
    for direction, kernel, read, written in traffic(work):
        counted.append(
            {
                "direction": direction, "kernel": kernel, "head_dim": dim,
                "read": read / tensor, "written": written / tensor,
                "us": floor_us(read, written),
            }
        )  # fmt: skip
counted = pd.DataFrame(counted)
bytes_of = counted.assign(tensors=counted["read"] + counted["written"])
bytes_of = bytes_of.groupby(["direction", "head_dim"])[["tensors", "us"]].sum()
least = pd.Series(
    {
        (direction, dim): floor_us(work.bytes_read(direction), work.bytes_written(direction))
        for direction in DIRECTIONS
        for dim, work in WORK.items()
    }
)
least.index.names = bytes_of.index.names
bound = 100 * least / bytes_of["us"]
tensor_gb = WORK[128].bytes("forward") / 4e9
glue("tensor_gb", tensor_gb)
whole = counted[(counted["head_dim"] == 128) & (counted["direction"] == "backward")]
glue("tensors", (whole["read"].round() + whole["written"].round()).sum())
glue("least_tensors", WORK[128].bytes("backward") / (tensor_gb * 1e9))
glue("bound_128", bound["backward", 128])
glue("bound_64", bound["backward", 64])

# %% tags=["remove-input"]
# | name: fig-bv0-bytes
# | caption: >
# |   What the kernels of v0 move, in tensors of q's size (filled: read, hatched: written), and the
# |   least that a pass must move (grey). Head_dim 128.
# | alt: >
# |   Four horizontal bars. Forward, v0 reads three tensors and writes one, as the least does.
# |   Backward, its three kernels add up to thirteen: delta reads two, the kernel of dK and dV reads
# |   four and writes two, that of dQ reads four and writes one. The least is four and three, seven.
with figures.style():
    chart, axis = figures.subplots(width=7.6, height=2.7)
    mine = counted[counted["head_dim"] == 128]
    bars = {
        f"{direction}, {label}": pieces
        for direction, needed in (("forward", (3, 1)), ("backward", (4, 3)))
        for label, pieces in (
            (
                "v0",
                [
                    (row.kernel, row.read, row.written)
                    for row in mine[mine["direction"] == direction].itertuples()
                ],
            ),
            ("least", [("", *needed)]),
        )
    }
    for place, (label, pieces) in enumerate(bars.items()):
        shade, start = figures.colour(IMPL) if label.endswith("v0") else INK, 0.0
        for kernel, read, written in pieces:
            style = {"left": start, "edgecolor": shade, "linewidth": 1}
            axis.barh(place, read - 0.03, 0.5, color=shade, **style)
            style["left"] += read
            if written > 0.1:  # delta is too thin to be seen
                axis.barh(place, written - 0.03, 0.5, color="none", hatch="//////", **style)
            axis.annotate(
                kernel, (start, place - 0.28), xytext=(0, 1), textcoords="offset points",
                va="bottom", fontsize=8.5,
            )  # fmt: skip
            start += read + written
    axis.set_yticks(range(len(bars)), list(bars))
    axis.set_ylim(len(bars) - 0.5, -0.75)
    axis.grid(visible=False, axis="y")
    axis.grid(visible=True, axis="x")
    axis.tick_params(axis="y", length=0)
    axis.set_xlim(0, 13.6)
    axis.set_xlabel("tensors")
display(chart)

# %% tags=["remove-input"]
figures.save_csv(counted, "block-v0-bytes")
figures.source(
    "modelled",
    "bytes of each kernel if nothing is met again in a cache; us: at the measured rate of a copy",
    csv="block-v0-bytes",
)

# %% tags=["remove-input"]
wide = counted.pivot(index=["direction", "kernel"], columns="head_dim", values="us")
wide = wide.loc[[(d, k) for d, k, *_ in traffic(WORK[128])], list(WORK)].reset_index()
figures.show_table(wide.rename(columns={d: f"head_dim {d} (us)" for d in WORK}).round(0))

# %% [markdown]
# On {glue:text}`bv0_tokens:,.0f` tokens with 4 heads a tensor has {glue:text}`bv0_tensor_gb:.2f` GB
# at head_dim 128. The table has the time of a copy with the bytes of each kernel and its own mix of
# reads and writes (modelled from the copies of the record).
#
# Two predictions follow, from the count alone. That 13 tensors are moved where 7 would do, and that
# nothing else matters, stands in the first lines of v0's file, which were written before anything
# was measured; the threshold of the second was set with this page (2026-11-21), when first runs
# without a record had been seen.
#
# 1. *Backward cannot pass {glue:text}`bv0_bound_128:.0f` % of the copy's rate*, counted by the
#    least bytes ({glue:text}`bv0_bound_64:.0f` % at head_dim 64). More would say that the count is
#    wrong and that tiles are met again in L2.
# 2. *Nothing else matters*: at so few FLOPs per byte, at least 90 % of what the bytes allow,
#    forward and backward. Less would say that something besides bytes has a price.
#
# ## What the compiler made of it
#
# All kernels at their default constants, compiled for sm_90a here:


# %% tags=["remove-cell"]
def launched(module, dim: int, direction: str, config) -> list[Launch]:
    """Every launch of one pass; nothing runs."""
    batch = blank(dim)
    options = {"config": config, "schedule": (torch.zeros(3, 2, dtype=torch.int32),)}
    with launches(run=False) as seen:
        if direction == "forward":
            module.forward(batch, **options)
        else:
            saved = (batch.q, torch.zeros(4, batch.total))
            module.backward(batch.q, batch, saved, **options)
    return seen


@functools.cache
def compiled(module, dim: int, direction: str, config) -> dict[str, compile_check.Compiled]:
    """The kernels of one pass by name, compiled for Hopper with 4 warps."""
    seen = launched(module, dim, direction, config)
    for launch in seen:
        assert launch.options["num_warps"] == 4, "the text and programs_on_an_sm speak of 4 warps"
    return {launch.name: compile_check.read(compile_check.build_launch(launch)) for launch in seen}


def programs_on_an_sm(made: compile_check.Compiled) -> int:
    """How many programs of 4 warps fit: 64 Ki registers, 228 KiB of shared memory, 64 warps."""
    registers = -(-made.registers * 32 // 256) * 256 * 4
    return min(65536 // registers, 228 * 1024 // (made.shared_bytes + 1024), 16)


COMPILED = {
    (direction, kernel, dim): made
    for dim in WORK
    for direction in DIRECTIONS
    for kernel, made in compiled(
        v0_flash, dim, direction, v0_flash.default_config(direction, blank(dim))
    ).items()
}
facts = pd.DataFrame(
    {
        "kernel": kernel, "head_dim": dim, "registers": made.registers,
        "bytes spilled": made.spill_bytes, "shared (KiB)": made.shared_bytes / 1024,
        "programs on an SM": programs_on_an_sm(made),
        "HGMMA": made.instructions["HGMMA"],
        "instructions": sum(made.instructions.values()),
    }
    for (direction, kernel, dim), made in COMPILED.items()
)  # fmt: skip
delta = COMPILED["backward", "delta_kernel", 64]
for (_, kernel, _), made in COMPILED.items():
    assert not made.serialised
    if kernel != "delta_kernel":
        assert made.spill_bytes == 0, "the text says that only the delta kernel spills"
        assert made.instructions["HGMMA"], "the text says that products are wgmma"
        assert programs_on_an_sm(made) in (2, 3), "the text says two or three"
assert delta.spill_bytes > 0 == COMPILED["backward", "delta_kernel", 128].spill_bytes
assert delta.registers == 32, "the text names its registers"
glue("delta_spill", delta.spill_bytes)
glue("delta_stl", delta.instructions["STL"])
glue("delta_programs", programs_on_an_sm(delta))
glue("programs_128", programs_on_an_sm(COMPILED["forward", "forward_kernel", 128]))
glue("programs_64", programs_on_an_sm(COMPILED["forward", "forward_kernel", 64]))

# %% tags=["remove-input"]
figures.show_table(facts)

# %% tags=["remove-input"]
figures.source(
    "modelled",
    f"ptxas and nvdisasm on the kernels compiled for sm_90a, triton {triton.__version__}; "
    "programs: what registers, shared memory and warps of an SM admit",
)

# %% [markdown]
# Products are HGMMA, the asynchronous ones of Hopper. No kernel with products spills. One spills
# that has none: the `delta` kernel at head_dim 64, the simplest of all, which multiplies two tiles
# and adds up rows. ptxas gives it 32 registers, with which {glue:text}`bv0_delta_programs:.0f`
# programs fit on an SM, as many as its warps admit, and puts {glue:text}`bv0_delta_spill:.0f` bytes
# of each thread into local memory ({glue:text}`bv0_delta_stl:.0f` stores). At head_dim 128 it takes
# more registers and spills nothing. Each thread writes and reads these bytes once, within a moment,
# so that they will hardly leave L1.
#
# The column to remember is that of the programs. {glue:text}`bv0_programs_128:.0f` programs of the
# forward kernel share an SM at head_dim 128, and {glue:text}`bv0_programs_64:.0f` at 64. Whatever
# one of them waits for, only the others can cover.
#
# ## Is it right?
#
# A ragged batch in the emulator, with empty sequences and lengths on both sides of a block; the
# output, the log-sum-exp and the three gradients against fp64. A step of 32 keys makes the loop run
# twice, so that the rescaling is tested too.


# %%
def problem(lengths, num_heads=2, num_heads_k=2, head_dim=64, block_size=64):
    """(the gradient of the output, the batch)."""
    make = torch.Generator().manual_seed(2025)

    def draw(heads):
        return torch.randn(sum(lengths), heads, head_dim, generator=make).bfloat16()

    q, k, v = draw(num_heads), draw(num_heads_k), draw(num_heads_k)
    batch = Batch(q, k, v, cu_seqlens(lengths, "cpu"), scale=0.125, block_size=block_size)
    return draw(num_heads), batch


def defined(grad_out, batch, dtype) -> tuple[torch.Tensor, ...]:
    """out, dq, dk and dv by the definition, computed in `dtype`."""
    batch = replace(batch, **{name: getattr(batch, name).to(dtype) for name in "qkv"})
    return reference.forward(batch)[0], *reference.backward(grad_out.to(dtype), batch)


RAGGED = (0, 1, 63, 64, 65, 0, 130)
grad_out, batch = problem(RAGGED)
expected = defined(grad_out, batch, torch.float64)
baseline = defined(grad_out, batch, torch.bfloat16)
for step in (64, 32):
    config = v0_flash.Config(BLOCK_N=step)
    with emulator.enabled():
        out, saved = v0_flash.forward(batch, config=config)
        gradients = v0_flash.backward(grad_out, batch, saved, config=config)
    print(f"{step} keys a step")
    for name, *found_and_right in zip(
        ("out", "dq", "dk", "dv"), (out, *gradients), expected, baseline, strict=True
    ):
        actual, right, other = found_and_right
        error = testing.compare(name=name, actual=actual, expected=right, baseline=other)
        print(" ", error)
        assert error.passed

# %% tags=["remove-cell"]
lse = saved[1]
starts = [sum(RAGGED[:i]) for i in range(len(RAGGED))]
for start, length in zip(starts, RAGGED, strict=True):
    for first in range(start, start + length, 64):
        rows = slice(first, min(first + 64, start + length))
        q, k = batch.q[rows].double(), batch.k[rows].double()
        scores = torch.einsum("qhd,khd->hqk", q, k) * batch.scale
        right = scores.logsumexp(-1) / torch.tensor(2.0).log()
        torch.testing.assert_close(lse[:, rows].double(), right, atol=1e-4, rtol=1e-4)
checked = ladder_rows[ladder_rows["impl"] == IMPL]
assert checked["correct"].fillna(False).astype(bool).all(), "a check of v0 on the GPU failed"

# %% [markdown]
# The log-sum-exp of these runs agrees with fp64 to 0.0001 (this page checks it when it is built).
# On the GPU, v0's rows in the record below passed the same check on all tokens before they were
# timed. `tests/block_attention/test_rungs.py` adds grouped heads, packed tensors, other block sizes
# and head_dims, and poisoned neighbours.
#
# And are the bytes counted right? The emulator counts what a kernel asks for, without caches. On
# full blocks, in tensors:


# %% tags=["remove-cell"]
def emulated(module, grad_out, batch, config=None) -> dict[str, emulator.Report]:
    """The reports of the kernels of forward and backward, by name."""
    with emulator.enabled() as reports:
        _, saved = module.forward(batch, config=config)
        module.backward(grad_out, batch, saved, config=config)
    return {report.kernel: report for report in reports}


FULL_BLOCKS = problem((128, 64), head_dim=128)
unit = FULL_BLOCKS[0].nbytes
asked = emulated(v0_flash, *FULL_BLOCKS)
counts = counted[counted["head_dim"] == 128].set_index("kernel")
for kernel, row in counts.iterrows():
    assert abs(asked[kernel].bytes_loaded / unit - row["read"]) < 0.01, kernel
    assert abs(asked[kernel].bytes_stored / unit - row["written"]) < 0.01, kernel

# %% tags=["remove-input"]
figures.show_table(
    pd.DataFrame(
        {
            "kernel": kernel, "read, counted": row["read"],
            "read, emulated": asked[kernel].bytes_loaded / unit,
            "written, counted": row["written"],
            "written, emulated": asked[kernel].bytes_stored / unit,
        }
        for kernel, row in counts.iterrows()
    ).round(3)
)  # fmt: skip

# %% tags=["remove-input"]
figures.source(
    "emulated",
    "gdpa_kernels/block_attention/v0_flash.py on 192 tokens, 2 heads, head_dim 128; counted: the "
    "formula of the prediction. What differs in the last digit is the list of blocks.",
)

# %% [markdown]
# ## Measurement
#
# The record is that of {doc}`results`: all rungs and peers in one run, kernels alone. The
# workload is that of the published table: 1,152 sequences, lengths uniform between 800 and 1,999,
# {glue:text}`bv0_blocks:,.0f` blocks of 64, of whose rows {glue:text}`bv0_least_rows:.0f` % exist.
# This chapter measures nothing of its own.

# %% tags=["remove-input"]
# | name: fig-bv0-share
# | caption: >
# |   The rate of the least bytes, in percent of the best copy with the same mix of reads and
# |   writes: v0, FlashAttention-2 and cuDNN, with a sequence for each block. Ticks: what v0's own
# |   bytes allow. Error bars: p20 to p80.
# | alt: >
# |   Two panels of horizontal bars for head_dim 128 and 64. Forward, the bars of v0 end well below
# |   their tick, which is near 100; backward below a tick a little above 50. The bars of
# |   FlashAttention-2 are shorter than those of v0 in both panels.
with figures.style():
    chart, axes = figures.subplots(1, 2, width=8.4, height=3.0, sharey=True)
    order = [(dim, impl) for dim in WORK for impl in (IMPL, *PEERS)]
    for axis, direction in zip(axes, DIRECTIONS, strict=True):
        for place, (dim, impl) in enumerate(order):
            row = ladder_rows[
                (ladder_rows["direction"] == direction)
                & (ladder_rows["head_dim"] == dim)
                & (ladder_rows["impl"] == impl)
            ]
            if row.empty or row["failure"].iloc[0]:
                axis.annotate("failed", (0, place), xytext=(4, 0), textcoords="offset points",
                              va="center")  # fmt: skip
                continue
            row = row.iloc[0]
            rate = row["percent_of_roofline"]
            spread = [
                [rate - rate * row["time_us_p50"] / row["time_us_p80"]],
                [rate * row["time_us_p50"] / row["time_us_p20"] - rate],
            ]
            shade = figures.colour(impl)
            axis.barh(
                place, rate, 0.62, color=shade if impl == IMPL else "none", edgecolor=shade,
                xerr=spread, error_kw={"ecolor": INK, "elinewidth": 1.2, "capsize": 2},
            )  # fmt: skip
            if impl == IMPL:
                axis.plot(bound[direction, dim], place, "|", color=INK, markersize=16)
        axis.set_title(direction)
        axis.set_xlim(0, 105)
        axis.set_ylim(len(order) - 0.4, -0.6)
        labels = {IMPL: "v0", **PEERS}
        axis.set_yticks(range(len(order)), [f"{labels[impl]}, {dim}" for dim, impl in order])
        axis.grid(visible=False, axis="y")
        axis.grid(visible=True, axis="x")
        axis.tick_params(axis="y", length=0)
        axis.set_xlabel("% of the copy")
display(chart)

# %% tags=["remove-input"]
shown = ladder_rows[ladder_rows["impl"].isin([IMPL, *PEERS])]
figures.save_csv(shown, "block-v0-share")
figures.provenance(shown, csv="block-v0-share", data_dir=Path(data_dir))

# %% tags=["remove-input"]
columns = {
    "direction": "direction", "head_dim": "head_dim", "impl": "impl", "time_us_p50": "time (us)",
    "gbytes_per_s": "GB/s of the least bytes", "percent_of_roofline": "% of the copy",
}  # fmt: skip
listed = shown.sort_values(["direction", "head_dim", "time_us_p50"], ascending=[False, False, True])
if (listed["failure"] != "").any():
    columns["failure"] = "failure"
figures.show_table(listed[list(columns)].rename(columns=columns).round(1))

# %% tags=["remove-cell"]
reached = share[IMPL]
of_bound = 100 * reached / bound
for direction, dim in of_bound.index:
    glue(f"of_bound_{direction}_{dim}", of_bound[direction, dim])
for direction in DIRECTIONS:
    total_us = time.loc[(direction, 128), IMPL]
    glue(f"missing_{direction}", total_us - bytes_of.loc[(direction, 128), "us"])
    products_us = WORK[128].flops(direction) / limits.tflops / 1e6
    glue(f"compute_{direction}", 100 * products_us / total_us)
    assert products_us < 0.5 * total_us, "the text says that products are not what takes the time"
glue_word("verdict_1", VERDICT[bool((reached["backward"] <= bound["backward"] + 2).all())])
glue_word("verdict_2", VERDICT[bool((of_bound >= 90).all())])
under = [
    f"{direction} at head_dim {dim}"
    for direction in DIRECTIONS
    for dim in WORK
    if of_bound[direction, dim] < 90
]
glue_word("under", "; ".join(under) if under else "nowhere")
ratio = {impl: time[impl] / time[IMPL] for impl in PEERS if impl in time}
assert "fa2_varlen" in ratio and ratio["fa2_varlen"].notna().all(), "the text compares with it"
for direction, dim in time.index:
    glue(f"fa2_{direction}_{dim}", ratio["fa2_varlen"][direction, dim])
assert ratio["fa2_varlen"].min() > 1.05, "the text says that v0 is the faster one"
cudnn = ratio.get("cudnn_varlen", pd.Series(dtype=float)).dropna()
glue_word(
    "cudnn",
    f"cuDNN takes {cudnn.min():.2f} to {cudnn.max():.2f} times as long as v0"
    + (" where it runs." if len(cudnn) < 4 else ".")
    if len(cudnn)
    else "cuDNN does not run on this workload; the table says why.",
)

# %% [markdown]
# 1. *Backward under its bytes*: **{glue:text}`bv0_verdict_1`**. {glue:text}`bv0_backward_128:.1f` %
#    of the copy, of {glue:text}`bv0_bound_128:.1f` that the bytes allow; at head_dim 64
#    {glue:text}`bv0_backward_64:.1f` of {glue:text}`bv0_bound_64:.1f` %.
# 2. *Nothing else matters*: **{glue:text}`bv0_verdict_2`**. Of what its bytes allow v0 reaches
#    {glue:text}`bv0_of_bound_forward_128:.0f` % forward and
#    {glue:text}`bv0_of_bound_backward_128:.0f` % backward at head_dim 128,
#    {glue:text}`bv0_of_bound_forward_64:.0f` and {glue:text}`bv0_of_bound_backward_64:.0f` % at 64.
#    Under 90 %: {glue:text}`bv0_under`.
#
# The time beyond the bytes is {glue:text}`bv0_missing_forward:,.0f` µs forward and
# {glue:text}`bv0_missing_backward:,.0f` µs backward at head_dim 128 (measured, less modelled).
# Where does it go? Not to the tensor cores: at the rate of a large matrix product, the products of
# a pass take {glue:text}`bv0_compute_forward:.0f` % of v0's time forward and
# {glue:text}`bv0_compute_backward:.0f` % backward. A program asks for tiles and waits, computes and
# asks for nothing, stores and ends. With two or three programs on an SM there are moments in which
# nobody asks for anything. That is a description, not a proof; {doc}`v1_one_tile` can test it,
# by taking the pieces out one at a time.
#
# ### Is it a fair baseline?
#
# The library kernels are called with a sequence for each block. FlashAttention-2 takes
# {glue:text}`bv0_fa2_forward_128:.2f` and {glue:text}`bv0_fa2_backward_128:.2f` times as long as v0
# forward and backward at head_dim 128, {glue:text}`bv0_fa2_forward_64:.2f` and
# {glue:text}`bv0_fa2_backward_64:.2f` times at 64. {glue:text}`bv0_cudnn` Both are made for long
# sequences; rows of a tile that a block of 64 does not fill move no bytes, but take time all the
# same.

# %% tags=["remove-cell"]
# Data sheets: 8 TB/s for a B200, 4.8 TB/s for an H200.
B200_GB, H200_GB = 8000, 4800
published = pd.read_csv(Path(data_dir) / "published" / "block_attention_times.csv")
table5 = published[(published["table"] == "table5") & (published["kernel"] == "fa2_jfa")]
assert len(table5) == 2
weaker = []
for row in table5.itertuples():
    theirs = WORK[128].bytes(row.direction) / row.time_ms / 1e6
    ours = WORK[128].bytes(row.direction) / time.loc[(row.direction, 128), IMPL] / 1e3
    glue(f"published_{row.direction}", 100 * theirs / B200_GB)
    glue(f"sheet_{row.direction}", 100 * ours / H200_GB)
    if ours / H200_GB < theirs / B200_GB:
        weaker.append(row.direction)
glue_word(
    "opponent",
    f"By this measure v0 is the weaker opponent {' and '.join(weaker)}."
    if weaker
    else "By this measure v0 is not the weaker opponent, and a speed-up over it says something "
    "about what was changed.",
)

# %% [markdown]
# The published kernels are compared with an implementation of the same algorithm in Triton that is
# not public {cite}`siso2026block`. On a B200 its published times, with our count of the least bytes
# on a batch of the same law, are {glue:text}`bv0_published_forward:.0f` % of the 8 TB/s of the data
# sheet forward and {glue:text}`bv0_published_backward:.0f` % backward. v0 reaches
# {glue:text}`bv0_sheet_forward:.0f` and {glue:text}`bv0_sheet_backward:.0f` % of the 4.8 TB/s of an
# H200. {glue:text}`bv0_opponent`
#
# ## The surprise: a pipeline for a loop that runs once
#
# `tl.range` can keep several steps of a loop in flight, so that the next K and V are on their way
# while this step computes. Our loop has no next step. We left `num_stages` at 1, where there is no
# pipeline. Then we tried 2 all the same:

# %% tags=["remove-cell"]
steps = measured(stages, "time_us_p50")
assert set(steps.columns) == {"one stage", "two stages"} and steps.notna().all().all()
pipelined = steps["two stages"] / steps["one stage"]
comparison, dearer = [], []
for direction in DIRECTIONS:
    for dim in WORK:
        for kernel in (k for d, k, *_ in traffic(WORK[dim]) if d == direction):
            if kernel == "delta_kernel":
                continue
            one, two = (
                compiled(v0_flash, dim, direction, v0_flash.Config(num_stages=n))[kernel]
                for n in (1, 2)
            )
            assert one.instructions["LDGSTS"] == 0 < two.instructions["LDGSTS"], "the text says so"
            lost = programs_on_an_sm(one) - programs_on_an_sm(two)
            if direction == "forward":
                assert lost == 0 == two.spill_bytes, "the text says that only the path changes"
            if lost > 0:
                dearer.append(f"`{kernel}` at head_dim {dim} loses a program on an SM")
            if two.spill_bytes > one.spill_bytes:
                more = two.spill_bytes - one.spill_bytes
                dearer.append(f"`{kernel}` at head_dim {dim} spills {more} bytes")
            comparison.append(
                {
                    "direction": direction, "head_dim": dim, "kernel": kernel,
                    "registers": f"{one.registers}, {two.registers}",
                    "bytes spilled": f"{one.spill_bytes}, {two.spill_bytes}",
                    "LDGSTS": f"{one.instructions['LDGSTS']}, {two.instructions['LDGSTS']}",
                    "programs on an SM": f"{programs_on_an_sm(one)}, {programs_on_an_sm(two)}",
                }
            )  # fmt: skip
for direction, dim in pipelined.index:
    glue(f"pipelined_{direction}_{dim}", pipelined[direction, dim])
chosen = {d: v0_flash.default_config(d, blank(128)).num_stages for d in DIRECTIONS}
better = {d: 2 if pipelined[d].mean() < 1 else 1 for d in DIRECTIONS}
elsewhere = [f"{better[d]} would be faster {d}" for d in DIRECTIONS if chosen[d] != better[d]]
glue_word(
    "chosen",
    f"v0 has {chosen['forward']} stages forward and {chosen['backward']} backward"
    + (f"; by this record {' and '.join(elsewhere)}." if elsewhere else ", by measurement."),
)
glue_word(
    "why",
    "The number of programs stays the same, the sums stay the same, and the time does not."
    if (pipelined["forward"] - 1).abs().max() > 0.02
    else "The number of programs stays the same, the sums stay the same, and so does the time.",
)
glue_word(
    "dearer",
    f"Backward the second step costs something besides: {'; '.join(dearer)}."
    if dearer
    else "Backward too, no kernel loses a program or spills.",
)

# %% tags=["remove-input"]
comparison = pd.DataFrame(comparison)
comparison["time, two / one"] = [
    pipelined[row.direction, row.head_dim] for row in comparison.itertuples()
]
figures.show_table(comparison.round(3))

# %% tags=["remove-input"]
figures.save_csv(stages, "block-v0-stages")
figures.provenance(stages, csv="block-v0-stages", data_dir=Path(data_dir))

# %% [markdown]
# Left of the last column: compiled for sm_90a, with one stage and with two. The last column is
# measured, for all kernels of the direction together, in the record of {doc}`v1_one_tile`.
#
# Forward, two stages take {glue:text}`bv0_pipelined_forward_128:.2f` times the time of one at
# head_dim 128 and {glue:text}`bv0_pipelined_forward_64:.2f` times at 64; backward
# {glue:text}`bv0_pipelined_backward_128:.2f` and {glue:text}`bv0_pipelined_backward_64:.2f` times.
# {glue:text}`bv0_why`
#
# What a pipeline changes besides its depth is the path. With one stage K and V are loaded into
# registers and stored into shared memory from there, by the warps, once they have arrived. A
# pipeline asks with LDGSTS instead: the data go to shared memory without a stop in registers, and
# the warp is free until it needs them. Forward that is the only difference to be seen in the table.
# {glue:text}`bv0_dearer`
#
# {glue:text}`bv0_chosen` A baseline is fair only when its constants have been tried, also those
# that cannot matter.
#
# ## Exercises
#
# :::{exercise} The price of a log-sum-exp
# :label: ex-bv0-lse
#
# Which share of all bytes of v0 are the log-sum-exp and `delta`, forward and backward, at head_dim
# 128? For which head_dim would they be a tenth forward? *(paper, five minutes)*
# :::

# %% tags=["remove-cell"]
forward_row = counted[(counted["direction"] == "forward") & (counted["head_dim"] == 128)].iloc[0]
extra = forward_row["read"] + forward_row["written"] - 4
glue("lse_forward", 100 * extra / (4 + extra))
extra = (whole["read"] + whole["written"]).sum() - 13
glue("lse_backward", 100 * extra / (13 + extra))
glue("lanes_backward", round(extra / (4 / (2 * 128))))
tenth = 4 / (0.1 / 0.9 * 4 * 2)
assert abs(tenth - 4.5) < 0.01, "the answer names it"

# %% [markdown]
# :::{solution} ex-bv0-lse
# :class: dropdown
#
# A row of a tensor has $2 \cdot 128$ bytes, a row of the log-sum-exp 4. Forward writes it once
# beside four tensors: {glue:text}`bv0_lse_forward:.2f` %. Backward moves
# {glue:text}`bv0_lanes_backward:.0f` such rows (`delta` written once and read twice, the
# log-sum-exp read twice) beside thirteen tensors: {glue:text}`bv0_lse_backward:.2f` %. A tenth
# forward means $4 = 0.1 (4 + 8 d)$, $d = 4.5$: no head is so small. To leave the log-sum-exp out
# cannot bring much by its bytes.
# :::
#
# :::{exercise} Shared keys
# :label: ex-bv0-groups
#
# Four query heads share one head of K and V. How many tensors of q's size does v0's backward move
# now, and how many are the least? Which of the bytes too many could L2 spare? *(paper, then the
# emulator; fifteen minutes)*
# :::

# %% tags=["remove-cell"]
grouped = problem((128, 64), num_heads=4, num_heads_k=1, head_dim=128)
reports = emulated(v0_flash, *grouped)
moved = sum(
    reports[name].bytes_loaded + reports[name].bytes_stored
    for name in ("delta_kernel", "dk_dv_kernel", "dq_kernel")
)
moved /= grouped[0].nbytes
assert abs(moved - 10) < 0.2, "the answer counts ten"
glue("grouped", moved)
between = WORK[128].blocks * 64 * 128 * 2 * 2
glue("between_mb", between / 1e6)
assert between > 4 * 60e6, "the answer says that L2 is too small"

# %% [markdown]
# :::{solution} ex-bv0-groups
# :class: dropdown
#
# K, V and their gradients are now a quarter of a tensor each. The least is q, dO and dQ and four
# quarters: 4. v0 reads out and dO for `delta`, 2; for dK and dV a program owns a head of keys and
# reads four heads of q and dO, $2 + 2 \cdot \frac14$, and writes $2 \cdot \frac14$; for dQ each of
# the four query heads reads K and V for itself, $2 + 2$, and writes 1. Together 10, and the
# emulator counts {glue:text}`bv0_grouped:.2f` with `delta` and the log-sum-exp. L2 could spare the
# K and V of the three other heads, if their programs ran at about the same time. They do not:
# neighbours own blocks of the same head, and between a block and the same block of the next head
# lie {glue:text}`bv0_between_mb:.0f` MB of K and V.
# :::
#
# :::{exercise} Two tiles in a block
# :label: ex-bv0-two-tiles
#
# Blocks of 128 tokens with the same tiles of 64. What does the emulator count for the forward
# kernel? What would memory see on a GPU? *(the emulator, ten minutes)*
# :::

# %% tags=["remove-cell"]
larger = problem((256, 128), head_dim=64, block_size=128)
report = emulated(v0_flash, *larger, config=v0_flash.Config())["forward_kernel"]
counted_128 = (report.bytes_loaded + report.bytes_stored) / larger[0].nbytes
assert abs(counted_128 - 6) < 0.1, "the answer counts six tensors"
glue("two_tiles", counted_128)

# %% [markdown]
# :::{solution} ex-bv0-two-tiles
# :class: dropdown
#
# A block has two programs, one for each 64 queries, and each reads all 128 keys: q once, K and V
# twice, the output once, 6 tensors and not 4 ({glue:text}`bv0_two_tiles:.2f` emulated, with the
# log-sum-exp). Memory should see 4: the two programs are neighbours, start together, and read the
# same 128 rows at about the same time. The loop now runs twice, and the machinery of
# FlashAttention-2 has something to do.
# :::
#
# ## Takeaways
#
# - Count the bytes of every kernel of a pass, not of the operator. Here the two passes and the
#   extra kernel of backward cost more than everything else together.
# - A bound by bytes is a bound. What is missing to it is the next question, and it has no bytes.
# - Try the constants of a baseline, also the pointless ones.
