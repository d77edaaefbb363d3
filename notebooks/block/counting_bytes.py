# ---
# jupyter:
#   kernelspec: {name: python3, display_name: Python 3}
# ---

# %% [markdown]
# # Counting bytes: what one tile can win before it exists
#
# A block is so small that its arithmetic hardly counts. What does its memory traffic allow, and
# what can a kernel for blocks win over a general one at most?
#
# :::{admonition} In this chapter
# - Forward moves four tensors and does 32 FLOP per byte, backward seven and 46, whatever the heads
#   and head_dim. An H200 needs {glue:text}`cb_ridge_forward:.0f` and
#   {glue:text}`cb_ridge_backward:.0f` before its tensor cores matter.
# - FlashAttention-2's general design moves {glue:text}`cb_general_forward:.2f` tensors forward and,
#   as our v0 is built, {glue:text}`cb_general_backward:.1f` backward. By bytes alone one tile is
#   worth a factor of {glue:text}`cb_bound_forward:.2f` forward and at most
#   {glue:text}`cb_bound_backward:.2f` backward.
# - The published speed-ups are larger than that in both directions. What the number of bytes does
#   not explain is the rate at which they move.
# :::

# %% tags=["remove-cell"]
from pathlib import Path

import numpy as np
import pandas as pd
import torch
from IPython.display import display
from matplotlib.patches import Rectangle

from gdpa_kernels import emulator
from gdpa_kernels.block_attention import v0_flash
from gdpa_kernels.block_attention.batch import Batch
from gdpa_kernels.measuring import roofline
from gdpa_kernels.measuring import system as systems
from gdpa_kernels.measuring.inputs import cu_seqlens
from gdpa_kernels.measuring.workload import (
    BLOCK_SIZES,
    BLOCK_TABLES,
    BLOCK_WORKLOADS,
    DIRECTIONS,
    Full,
    Workload,
    workload,
)
from gdpa_kernels.report import claims, figures, results
from gdpa_kernels.report.house import RUNG_COLOURS

# %% tags=["parameters"]
mode = "replay"
device = "cpu"
data_dir = "data"

# %% tags=["remove-cell"]
RECORD = results.latest_record(data_dir, notebook="notebooks/block/results.py", system="h200")
MACHINE = systems.load(Path(data_dir) / "systems" / f"{RECORD.system}.json")
CEILINGS = results.ceilings(RECORD)
TABLE5 = workload(*BLOCK_TABLES["table5"])
COLOURS = {"forward": RUNG_COLOURS[1], "backward": RUNG_COLOURS[3]}
MIXES = {"forward": (3, 1), "backward": (4, 3)}


def glue(name: str, value: float) -> None:
    figures.glue_number(f"cb_{name}", value)


assert {mix for mix, _ in CEILINGS.copies} >= {4 / 3, 3.0}, "the record must hold both mixes"
rates = {way: CEILINGS.gbytes_per_s(*mix) for way, mix in MIXES.items()}
ridges = {way: 1e3 * CEILINGS.tflops / rate for way, rate in rates.items()}
for way in DIRECTIONS:
    glue(f"ridge_{way}", ridges[way])

# %% [markdown]
# ## FLOPs per byte
#
# A full block of $b$ tokens and one head of dimension $d$: forward does two products of $2 b^2 d$
# FLOPs, reads q, k and v and writes the output, four tensors of $b\,d$ numbers with 2 bytes each.
# Backward needs five products, reads the output's gradient too, and writes three gradients: seven
# tensors ({doc}`block_attention`). The head dimension cancels:
#
# $$
# I_\text{forward} = \frac{4 b^2 d}{4 \cdot 2 b d} = \frac{b}{2}, \qquad
# I_\text{backward} = \frac{10 b^2 d}{7 \cdot 2 b d} = \frac{5 b}{7}.
# $$ (eq-block-intensity)
#
# With $b = 64$ these are 32 and 46 FLOP per byte. Nothing else enters: not the length of the
# sequences, not the heads, not the batch. Shorter blocks at the ends of sequences lower both a
# little, since a workload counts useful pairs only:

# %%
for name in ("block-fill70-1000", "block-fill70-8000", "block-fill70-2000-d64"):
    work = workload(name)
    for way, tensors in (("forward", 4), ("backward", 7)):
        row = work.num_heads_q * work.head_dim * 2  # bytes
        assert work.bytes(way) == tensors * work.total_q * row
        intensity = work.flops(way) / work.bytes(way)
        print(f"{name:22} {way:9} {intensity:5.1f} FLOP/byte")

# %% tags=["remove-cell"]
busy = {
    way: 100 * roofline.bracket(TABLE5, way, CEILINGS).tflops_at_lower / CEILINGS.tflops
    for way in DIRECTIONS
}
first_bound = {
    "forward": 2 * ridges["forward"],
    "backward": 1.4 * ridges["backward"],
}
assert all(roofline.bracket(w, d, CEILINGS).bound == "memory"
           for w in BLOCK_WORKLOADS.values() for d in DIRECTIONS)  # fmt: skip
assert min(first_bound.values()) > 2 * max(BLOCK_SIZES), "the text: no block size is near"
for way in DIRECTIONS:
    glue(f"busy_{way}", busy[way])
    glue(f"compute_bound_{way}", first_bound[way])
    glue(f"below_{way}", ridges[way] / (TABLE5.flops(way) / TABLE5.bytes(way)))

# %% tags=["remove-input"]
# | name: fig-bytes-intensity
# | caption: >
# |   Intensity of full blocks by block size (modelled) and the ridges of the H200 for the two mixes
# |   of reads and writes (dashed, from measured ceilings). Dots: the block sizes that the operator
# |   takes, 64 filled. Above its ridge a kernel would be limited by tensor cores.
# | alt: >
# |   Two parallel rising lines over a logarithmic axis of block sizes from 16 to 1024, backward
# |   above forward. They cross the dashed ridges, near 180 FLOP per byte, at block sizes between
# |   256 and 512; all dots, 16 to 128, lie far below.
with figures.style():
    figure, axis = figures.subplots(width=7.2, height=3.6)
    sizes = np.geomspace(16, 1024, 50)
    for way, slope in (("forward", 1 / 2), ("backward", 5 / 7)):
        axis.plot(sizes, slope * sizes, color=COLOURS[way])
        for size in BLOCK_SIZES:
            fill = COLOURS[way] if size == TABLE5.block_size else "none"
            axis.plot(
                size, slope * size, "o", color=COLOURS[way], markerfacecolor=fill, markersize=7
            )
        axis.annotate(
            way, (640, slope * 640), xytext=(-8, 4) if way == "backward" else (8, -10),
            textcoords="offset points", color=COLOURS[way],
            ha="right" if way == "backward" else "left",
        )  # fmt: skip
        axis.axhline(ridges[way], color=COLOURS[way], linewidth=1.2, linestyle=(0, (4, 2)))
    axis.text(16, max(ridges.values()) * 1.08, "ridge", va="bottom")
    axis.set_xscale("log", base=2)
    axis.set_yscale("log", base=2)
    ticks = [16, 32, 64, 128, 256, 512, 1024]
    axis.set_xticks(ticks, [str(size) for size in ticks])
    axis.set_yticks([8, 16, 32, 64, 128, 256, 512], ["8", "16", "32", "64", "128", "256", "512"])
    axis.set_xlabel("block size (tokens)")
    axis.set_ylabel("FLOP/byte")
display(figure)

# %% tags=["remove-input"]
figures.source(
    "modelled", f"b/2 and 5b/7; ridges from the ceilings measured in record {RECORD.id}."
)

# %% [markdown]
# The ridges lie at {glue:text}`cb_ridge_forward:.0f` and {glue:text}`cb_ridge_backward:.0f` FLOP
# per byte: forward is {glue:text}`cb_below_forward:.1f` times below its own, backward
# {glue:text}`cb_below_backward:.1f` times. A kernel that moves its bytes as fast as a copy keeps
# the tensor cores busy for {glue:text}`cb_busy_forward:.0f` and
# {glue:text}`cb_busy_backward:.0f` % of the time. Blocks would have to have
# {glue:text}`cb_compute_bound_forward:.0f` tokens forward, or
# {glue:text}`cb_compute_bound_backward:.0f` backward, for that to be otherwise. In the chapters
# that follow everything is bytes, and a rung is judged by GB/s, not by TFLOP/s. For its B200 the
# publication puts the ridge at 281 and the forward pass at "about 33" FLOP per byte
# {cite}`siso2026block`; the second number is 32.
#
# ## A ceiling for each mix
#
# Which GB/s? DRAM loses time when it turns from reading to writing, so a copy of one tensor is
# slower than a sum of three ({doc}`../measuring/roofline`). Forward reads three bytes for each byte
# it writes and has a library function with that mix, `addcmul`. Backward reads four for three;
# PyTorch has no one kernel for this. `gdpa_kernels/measuring/copies.py` therefore has two kernels
# of our own that do nothing but read three tensors and write one, or read four and write three, in
# programs of four sizes. The fastest of a mix is the ceiling of that mix, whoever wrote it.

# %% tags=["remove-cell"]
rows = []
for limit in RECORD.ceilings:
    if limit.kind == "copy":
        size = limit.bytes_read + limit.bytes_written
        p20, p50, p80 = np.quantile(limit.samples_us, (0.2, 0.5, 0.8))
        rows.append(
            {
                "what ran": limit.shape,
                "by": "this package" if "programs of" in limit.shape else "PyTorch",
                "read / written": limit.bytes_read / limit.bytes_written,
                "time p50 (µs)": p50,
                "GB/s": size / p50 / 1e3,
                "GB/s at p80": size / p80 / 1e3,
                "GB/s at p20": size / p20 / 1e3,
            }
        )
copies = pd.DataFrame(rows)
library = copies[copies["by"] == "PyTorch"]
own = copies[copies["by"] == "this package"]
assert len(library) == 3 and set(own["read / written"].round(3)) == {3.0, 1.333}
rule = roofline.Ceilings(
    tflops=CEILINGS.tflops,
    copies=tuple(sorted(library.groupby("read / written")["GB/s"].max().items())),
)
off = 100 * (rule.gbytes_per_s(4, 3) / rates["backward"] - 1)
spread = own.groupby(own["read / written"].round(3))["GB/s"].agg(
    lambda r: 100 * (r.max() / r.min() - 1)
)
best_three = copies[np.isclose(copies["read / written"], 3)].sort_values("GB/s")["by"].iloc[-1]
glue("rule", rule.gbytes_per_s(4, 3))
glue("rate_backward", rates["backward"])
figures.glue_text("cb_rule_off", f"{off:+.1f}")
figures.glue_text("cb_rule_verdict", "would have done" if abs(off) < 1 else "would not have done")
figures.glue_text("cb_best_three", best_three)
glue("spread", spread.max())
glue("mix_gap", 100 * (rates["forward"] / rates["backward"] - 1))
assert CEILINGS.gbytes_per_s(1, 1) < rates["forward"], "the text: the mix matters"

# %% tags=["remove-input"]
figures.show_table(copies)

# %% tags=["remove-input"]
figures.provenance([RECORD.id], data_dir=Path(data_dir))

# %% [markdown]
# The two ceilings differ by {glue:text}`cb_mix_gap:.1f` %. Holding a backward pass against the copy
# that happens to be at hand would make it look that much worse or better. For 4:3 the rule of
# {doc}`../measuring/roofline`, interpolation between PyTorch's mixes, gives
# {glue:text}`cb_rule:.0f` GB/s, {glue:text}`cb_rule_off` % against the
# {glue:text}`cb_rate_backward:.0f` measured: with a tolerance of 1 % the rule
# {glue:text}`cb_rule_verdict`. At 3:1 the fastest copy is by {glue:text}`cb_best_three`. The size
# of the programs changes our own copies by up to {glue:text}`cb_spread:.1f` %, so a ceiling too has
# to be looked for.
#
# ## What a general kernel moves
#
# FlashAttention-2 {cite}`dao2024flashattention2` is made for rows of scores that do not fit on the
# chip. It keeps the output and the log-sum-exp of each row for the backward pass, computes
# $D = \mathrm{rowsum}(dO \odot O)$ in a kernel of its own, and recovers P tile by tile. The
# gradients of k and v are sums over queries, that of q is a sum over keys. One kernel can do both,
# with atomic additions to an fp32 dq; or two kernels do it one after the other, each with an order
# of its own, and the results are the same from run to run. Our {doc}`v0 <v0_flash>` is the
# second. As lists of what each kernel reads and writes:

# %%
DESIGNS = {
    "forward": {
        "one tile": [("q k v", "out")],
        "general": [("q k v", "out lse")],
    },
    "backward": {
        "one tile": [("q k v dO", "dq dk dv")],
        "... that reads the output": [("q k v dO out", "dq dk dv")],
        "... and D by a kernel": [("dO out", "D"), ("q k v dO lse D", "dq dk dv")],
        "general, two passes (v0)": [
            ("dO out", "D"),
            ("q k v dO lse D", "dk dv"),
            ("q k v dO lse D", "dq"),
        ],
    },
}


def size_of(tensor: str, work: Workload) -> int:
    """Bytes of a tensor of this name; lse and D hold one fp32 number per row and head."""
    if tensor in ("lse", "D"):
        return 4 * work.total_q * work.num_heads_q
    heads = work.num_heads_k if tensor in ("k", "v", "dk", "dv") else work.num_heads_q
    return 2 * work.total_q * heads * work.head_dim


def moved(kernels: list, work: Workload) -> tuple[int, int]:
    """Bytes (read, written) if no kernel finds in a cache what another one touched."""
    return tuple(
        sum(size_of(name, work) for kernel in kernels for name in kernel[side].split())
        for side in (0, 1)
    )


for way in DIRECTIONS:
    fewest = TABLE5.bytes_read(way), TABLE5.bytes_written(way)
    assert moved(DESIGNS[way]["one tile"], TABLE5) == fewest

# %% [markdown]
# The assumption in the last docstring holds for these batches: one tensor of the published batch
# has {glue:text}`cb_tensor_mb:,.0f` MB, the L2 cache {glue:text}`cb_l2_mb:.0f` MB (nominal). When
# the next kernel starts, what the last one touched first is long gone. And the lists are right: the
# emulator counts what v0's kernels load and store, here for a sequence of 148 tokens and one head
# of dimension 128, in units of q.


# %%
def emulated(length: int, block_size: int) -> dict[str, tuple[float, float]]:
    """(loaded, stored) by each of v0's kernels, in units of q."""
    q, k, v, grad = (torch.randn(length, 1, 128).bfloat16() for _ in range(4))
    batch = Batch(q, k, v, cu_seqlens([length], "cpu"), 128**-0.5, block_size)
    with emulator.enabled() as reports:
        _, saved = v0_flash.forward(batch)
        v0_flash.backward(grad, batch, saved)
    return {
        report.kernel: (report.bytes_loaded / q.nbytes, report.bytes_stored / q.nbytes)
        for report in reports
        if report.kernel != "block_list_kernel"
    }


counted = emulated(148, 64)
for name, (loaded, stored) in counted.items():
    print(f"emulated {name:14} loads {loaded:.3f}, stores {stored:.3f}")

# %% tags=["remove-cell"]
one = Workload(
    name="one-sequence", operator="block_attention", batch=1, num_heads_q=1, num_heads_k=1,
    head_dim=128, max_seqlen_q=148, max_seqlen_k=148, lengths_q=Full(),
)  # fmt: skip
listed = (*DESIGNS["forward"]["general"], *DESIGNS["backward"]["general, two passes (v0)"])
unit = size_of("q", one)
for (loaded, stored), kernel in zip(counted.values(), listed, strict=True):
    read, written = moved([kernel], one)
    assert stored == written / unit
    assert 0 <= loaded - read / unit < 0.01, "the list of blocks is read too"

found = []
for way, designs in DESIGNS.items():
    for name, kernels in designs.items():
        read, written = moved(kernels, TABLE5)
        rate = CEILINGS.gbytes_per_s(read, written)
        found.append(
            {
                "direction": way,
                "design": name,
                "kernels": len(kernels),
                "tensors": (read + written) / size_of("q", TABLE5),
                "GB": (read + written) / 1e9,
                "read : written": f"{read / written:.2f} : 1",
                "ceiling (GB/s)": rate,
                "floor (ms)": (read + written) / rate / 1e6,
            }
        )
designs = pd.DataFrame(found)
floors = designs.set_index(["direction", "design"])["floor (ms)"]
designs["floor / one tile"] = [
    row["floor (ms)"] / floors[row["direction"], "one tile"] for _, row in designs.iterrows()
]
general = {way: designs[designs["direction"] == way].iloc[-1] for way in DIRECTIONS}
assert general["backward"]["design"] == "general, two passes (v0)"
for way in DIRECTIONS:
    glue(f"general_{way}", general[way]["tensors"])
    glue(f"bound_{way}", general[way]["floor / one tile"])
middle = designs[designs["direction"] == "backward"].set_index("design")["tensors"]
glue("with_delta", middle["... and D by a kernel"])
glue("tensor_mb", size_of("q", TABLE5) / 1e6)
glue("l2_mb", MACHINE.l2_bytes / 1e6)
glue("lse_mb", size_of("lse", TABLE5) / 1e6)
glue("lse_share", 100 * size_of("lse", TABLE5) / TABLE5.bytes("backward"))
assert size_of("q", TABLE5) > 10 * MACHINE.l2_bytes, "the text: nothing survives between kernels"
assert general["forward"]["floor / one tile"] < 1.01 < 1.5 < general["backward"]["floor / one tile"]

# %% tags=["remove-input"]
# | name: fig-bytes-designs
# | caption: >
# |   What each design moves, one box per tensor; slivers are the fp32 rows lse and D. Full colour:
# |   read, outlined: written. A gap separates kernels. Equal heads, head_dim 128.
# | alt: >
# |   Six rows of boxes. Forward: four boxes for one tile, the same and a sliver for the general
# |   design. Backward: seven boxes for one tile, eight with the output, nine with D computed by a
# |   kernel of its own, and thirteen in three groups for v0.
with figures.style():
    figure, axis = figures.subplots(width=8.6, height=3.6)
    y = 0.0
    for way, entries in DESIGNS.items():
        for name, kernels in entries.items():
            x = 0.0
            for kernel in kernels:
                for side, tensors in enumerate(kernel):
                    for tensor in tensors.split():
                        width = size_of(tensor, TABLE5) / size_of("q", TABLE5)
                        look = {"facecolor": COLOURS[way]} if side == 0 else {"fill": False}
                        gap = 0.04 if width > 0.5 else 0.0
                        axis.add_patch(
                            Rectangle(
                                (x + gap, y), width - 2 * gap, 0.72, edgecolor=COLOURS[way], **look
                            )
                        )
                        if width > 0.5:
                            colour = "#ffffff" if side == 0 else COLOURS[way]
                            axis.text(x + width / 2, y + 0.36, tensor, ha="center", va="center",
                                      color=colour, fontsize=8.5)  # fmt: skip
                        x += width
                x += 0.25
            axis.text(-0.2, y + 0.36, f"{way}: {name}", ha="right", va="center")
            y -= 1.0
        y -= 0.3
    axis.set_xlim(-5.2, 14)
    axis.set_ylim(y + 1.1, 0.9)
    axis.set_axis_off()
display(figure)

# %% tags=["remove-input"]
figures.source("modelled", "drawn from the lists of the code above.")

# %% tags=["remove-input"]
figures.show_table(designs)

# %% tags=["remove-input"]
figures.source(
    "modelled",
    f"bytes of {TABLE5.name} over the copy rates measured in record {RECORD.id}; between mixes "
    "linear, above 3:1 that of 3:1.",
)

# %% [markdown]
# **Forward there is nothing to win by bytes.** The log-sum-exp, all that the general design writes
# beside the output, is {glue:text}`cb_lse_mb:.0f` MB. **Backward there is a factor of
# {glue:text}`cb_bound_backward:.2f`**, less than the quotient of bytes because two passes read more
# for each byte they write, and reads are cheaper. Most of it is the second pass over the inputs:
# from {glue:text}`cb_general_backward:.1f` tensors to {glue:text}`cb_with_delta:.1f`. Computing D
# inside the kernel saves one more, not reading the output the next. The publication explains its
# backward gain by the round trip of the log-sum-exp {cite}`siso2026block`; that tensor is
# {glue:text}`cb_lse_share:.1f` % of what the backward pass must move.
#
# These are bounds and no predictions: they know nothing of how good a kernel is. They hold between
# two kernels that both move their bytes at the rate of a copy. If one tile gains *more* than its
# bound, the general kernel must be slower than its own bytes. {doc}`v1_one_tile` puts what is
# eliminated back one part at a time and compares; {doc}`results` measures every shape.
#
# ## The floor of every published shape

# %% tags=["remove-input"]
shapes = [*BLOCK_TABLES["table6"], *BLOCK_TABLES["table7"]]
table = pd.DataFrame(
    {
        "workload": f'<span style="white-space: nowrap">{name}</span>',
        "tokens, k": workload(name).total_q / 1e3,
        **{
            f"{way}, {what}": value
            for way in DIRECTIONS
            for what, value in (
                ("GB", workload(name).bytes(way) / 1e9),
                ("floor (ms)", roofline.bracket(workload(name), way, CEILINGS).lower_us / 1e3),
            )
        },
    }
    for name in shapes
)
figures.save_csv(table.assign(workload=shapes), "block-floors")
figures.show_table(table)

# %% tags=["remove-input"]
figures.source(
    "modelled",
    f"fewest bytes over the copy rates measured in record {RECORD.id}; the rotary workload reads "
    "sines and cosines once, in bf16.",
    csv="block-floors",
)

# %% [markdown]
# ## The published times
#
# Table 5 of the publication has a forward and a backward pass, each by the new kernel and by a
# baseline, the authors' own Triton kernel after FlashAttention-2; table 7 has backward passes with
# rotary embeddings {cite}`siso2026block`. All ran on a B200, whose memory moves 8 TB/s (nominal
# {cite}`nvidiablackwell`). The fewest bytes over the time is the least rate that a kernel must have
# had. The last column is the floor of the same work on our machine: a time of a B200 must not be
# held against it, but shares of a ceiling may be compared.

# %% tags=["remove-cell"]
NOMINAL = 8000  # GB/s of a B200, data sheet
published = pd.read_csv(Path(data_dir) / "published" / "block_attention_times.csv")
rotary_work = workload(*BLOCK_TABLES["table7"])
plain = {"name": "plain", "rotary": False, "rotate_v": False}
attention = Workload.from_dict({**rotary_work.to_dict(), **plain})
turns = rotary_work.bytes_read("forward") - attention.bytes_read("forward")
half = attention.bytes_written("backward")
COUNTS = {  # bytes read and written by the best kernels for what was timed
    ("table5", "forward"): [(TABLE5.bytes_read("forward"), TABLE5.bytes_written("forward"))],
    ("table5", "backward"): [(TABLE5.bytes_read("backward"), TABLE5.bytes_written("backward"))],
    ("table7", "attention_backward"): [
        (attention.bytes_read("backward"), attention.bytes_written("backward"))
    ],
    ("table7", "rotary_backward"): [(half + turns, half)],
    ("table7", "attention_and_rotary_backward"): [
        (rotary_work.bytes_read("backward"), rotary_work.bytes_written("backward"))
    ],
}
rows = []
for row in published.itertuples():
    parts = COUNTS[row.table, row.direction]
    if row.kernel == "unfused" and row.direction == "attention_and_rotary_backward":
        parts = COUNTS["table7", "attention_backward"] + COUNTS["table7", "rotary_backward"]
    size = sum(read + written for read, written in parts)
    floor = sum((r + w) / CEILINGS.gbytes_per_s(r, w) for r, w in parts) / 1e6
    rows.append(
        {
            "table": row.table.removeprefix("table"),
            "what": row.direction.replace("_", " "),
            "kernel": row.kernel,
            "GB": size / 1e9,
            "published (ms)": row.time_ms,
            "GB/s at least": size / row.time_ms / 1e6,
            "% of 8 TB/s": 100 * size / row.time_ms / 1e6 / NOMINAL,
            "H200 floor (ms)": floor,
        }
    )
times = pd.DataFrame(rows)
figures.save_csv(times, "block-published-times")


def cell(what: str, kernel: str, column: str) -> float:
    return results.one(times, what=what, kernel=kernel)[column]


share = {
    way: cell(way, "tlx_block_attention", "% of 8 TB/s") for way in DIRECTIONS
}  # fmt: skip
glue("published_forward", share["forward"])
glue("published_backward", share["backward"])
glue("published_rotary", cell("rotary backward", "unfused", "% of 8 TB/s"))
together = cell("attention and rotary backward", "unfused", "H200 floor (ms)")
alone = cell("attention and rotary backward", "fused", "H200 floor (ms)")
printed = {
    kernel: cell("attention and rotary backward", kernel, "published (ms)")
    for kernel in ("unfused", "fused")
}
glue("fusion_bound", together / alone)
glue("fusion_printed", printed["unfused"] / printed["fused"])
assert share["forward"] > share["backward"] > cell("rotary backward", "unfused", "% of 8 TB/s")

# %% tags=["remove-input"]
figures.show_table(times)

# %% tags=["remove-input"]
figures.source(
    "published",
    "times: NVIDIA B200, siso2026block, tables 5 and 7. Bytes are ours (the fewest, whoever moves "
    f"more), and so is the H200 floor, modelled from the ceilings of record {RECORD.id}.",
    csv="block-published-times",
)

# %% [markdown]
# By this count the published forward kernel runs at {glue:text}`cb_published_forward:.0f` % of the
# nominal rate and the backward one at {glue:text}`cb_published_backward:.0f` %. The headline of the
# rotary part, a factor of {glue:text}`cb_fusion_printed:.2f` by fusing it, rests on a separate
# rotary kernel at {glue:text}`cb_published_rotary:.0f` %. Between two kernels that both run at a
# copy's rate the fusion is worth {glue:text}`cb_fusion_bound:.2f` ({doc}`v4_rotary`). What a
# plain copy reaches on that machine is not published, so how much its kernels leave is not known.
#
# ## Where the published tables disagree

# %%
tokens5, tokens7 = TABLE5.total_q, rotary_work.total_q
per_token = {
    "5": cell("backward", "tlx_block_attention", "published (ms)") / (tokens5 * 4),
    "7": cell("attention backward", "tlx_block_attention", "published (ms)") / (tokens7 * 3),
}
law = np.array(range(800, 2000))  # table 5, as a fill
error_of_mean = law.std() / TABLE5.batch**0.5
apart = (tokens7 / TABLE5.batch - law.mean()) / error_of_mean

bars = pd.read_csv(Path(data_dir) / "published" / "block_attention_speedups.csv")
at_2000 = bars[(bars["max_seqlen"] == 2000) & (bars["fill"] == 0.7)].set_index("direction")
quotients = {
    way: cell(way, "fa2_jfa", "published (ms)") / cell(way, "tlx_block_attention", "published (ms)")
    for way in DIRECTIONS
}
for way, quotient in quotients.items():
    bar, error = at_2000.loc[way, ["speedup_vs_fa2_jfa", "error"]]
    print(f"{way:9} table 5: {quotient:.3f}, table 6: {bar:.2f} +- {error}")
for table, time in per_token.items():
    print(f"attention backward, table {table}: {1e6 * time:.3f} ns per token and head")
print(f"mean length of table 7: {apart:.0f} standard errors above the law of table 5")

# %% tags=["remove-cell"]
ledger = {claim.id: claim for claim in claims.load(data_dir)}
parts = sum(cell(w, "tlx_block_attention", "published (ms)") for w in DIRECTIONS)
assert 3.335 < parts < 3.345 and "3.33 ms" in ledger["block-total-over-fa2"].claim
forward_bars = bars[bars["direction"] == "forward"]["speedup_vs_fa2_jfa"]
backward_bars = bars[bars["direction"] == "backward"]["speedup_vs_fa2_jfa"]
glue("cheaper", 100 * (1 - per_token["7"] / per_token["5"]))
glue("apart", apart)
glue("bars_low", forward_bars.min())
glue("bars_high", forward_bars.max())
glue("bars_backward_low", backward_bars.min())
glue("bars_backward_high", backward_bars.max())
empty = 0.3 / TABLE5.fill
glue("empty_forward", share["forward"] * empty)
rate7 = cell("attention backward", "tlx_block_attention", "GB/s at least")
rate5 = cell("backward", "tlx_block_attention", "GB/s at least")
glue("rate7", rate7)
glue("rate5", rate5)
glue("rate5_empty", rate5 * empty)
glue("readings_fill", rate7 / rate5)
glue("readings_empty", rate7 / (rate5 * empty))
assert rate7 / rate5 < 1.5 < 2.5 < rate7 / (rate5 * empty)
off_bar = at_2000["speedup_vs_fa2_jfa"] - pd.Series(quotients)
assert apart > 5 and abs(off_bar["forward"]) < 0.02 < off_bar["backward"] < 0.05

# %% [markdown]
# - **The same kernel, two costs.** The attention backward is {glue:text}`cb_cheaper:.0f` % cheaper
#   in table 7 than in table 5, tokens and heads divided out. Something else differs between the two
#   runs, and is not said. A speed-up must not mix the tables.
# - **Another law.** The mean length of table 7 is {glue:text}`cb_apart:.0f` standard errors above
#   that of table 5 for the same batch. Its law is not published.
# - **Bars and digits.** At a largest length of 2000 the bars of table 6 and the quotients of table
#   5 agree forward to within the reading of a bar; backward the bar is higher by more than that.
#   The printed total of 3.33 ms is 0.01 ms below the sum of its parts. Both are small.
# - **A constant that varies.** The speed-up is said not to depend on the lengths; the forward bars
#   go from {glue:text}`cb_bars_low:.2f` to {glue:text}`cb_bars_high:.2f`, the backward ones from
#   {glue:text}`cb_bars_backward_low:.2f` to {glue:text}`cb_bars_backward_high:.2f`.
#
# Table 7 also settles what "sparsity 0.7" means in table 5, because it states its tokens. They give
# the attention backward {glue:text}`cb_rate7:.0f` GB/s. Read as a fill, table 5 gives the same
# kernel {glue:text}`cb_rate5:.0f` GB/s, a factor of {glue:text}`cb_readings_fill:.2f` less. Read as
# 70 % empty places it gives {glue:text}`cb_rate5_empty:.0f`, a factor of
# {glue:text}`cb_readings_empty:.1f`, and the forward kernel would run at
# {glue:text}`cb_empty_forward:.0f` % of the nominal rate. Only the fill is consistent with kernels
# that are called memory-bound by their authors ({doc}`../tools/claims`).
#
# ## Little's law: how much has to be on the way
#
# A rate is kept only if enough bytes are on their way at any time: *bytes in flight = rate x
# latency*. Of the rate only the reads count here: nobody waits for a store. The latency of a busy
# memory is not in our records; the table takes it as a parameter, around a microsecond (assumed).

# %%
head_tile = 64 * 128 * 2  # bytes: one tensor, one block, one head of dimension 128
rows = []
for way, (read, written) in MIXES.items():
    per_sm = rates[way] / MACHINE.num_sms  # GB/s = bytes per nanosecond
    loads = per_sm * read / (read + written)
    rows.append(
        {
            "direction": way,
            "loads of a tile (KB)": read * head_tile / 1e3,
            "bytes per ns and SM": per_sm,
            "time per tile and SM (µs)": (read + written) * head_tile / per_sm / 1e3,
            **{f"KB in flight, {ns} ns": loads * ns / 1e3 for ns in (500, 1000, 1500)},
        }
    )
little = pd.DataFrame(rows)

# %% tags=["remove-cell"]
SHARED = 227 * 1024  # bytes of shared memory that a program may have on sm_90
at = little.set_index("direction")
for way, (read, _) in MIXES.items():
    glue(f"flight_{way}", at.loc[way, "KB in flight, 1000 ns"])
    glue(f"tile_{way}", at.loc[way, "loads of a tile (KB)"])
    glue(f"tile_time_{way}", at.loc[way, "time per tile and SM (µs)"])
    glue(f"slots_{way}", SHARED // (read * head_tile))
    products = TABLE5.flops(way) / TABLE5.pairs / TABLE5.num_heads_q * 64**2
    clock = products / 4096  # bf16 FLOPs of an SM in a clock
    glue(f"product_time_{way}", clock / MACHINE.max_sm_clock_mhz)
assert (at["KB in flight, 1500 ns"] < at["loads of a tile (KB)"]).all(), (
    "the text: one tile is enough"
)

# %% tags=["remove-input"]
figures.show_table(little)

# %% tags=["remove-input"]
figures.source(
    "modelled",
    f"copy rates measured in record {RECORD.id}, {MACHINE.num_sms} SMs; latencies assumed.",
)

# %% [markdown]
# At one microsecond {glue:text}`cb_flight_forward:.0f` KB forward and
# {glue:text}`cb_flight_backward:.0f` KB backward have to be on the way to each SM. The loads of
# *one* tile, {glue:text}`cb_tile_forward:.0f` and {glue:text}`cb_tile_backward:.0f` KB, are more
# than that, even at 1,500 ns. Shared memory could hold those of {glue:text}`cb_slots_forward:.0f`
# and {glue:text}`cb_slots_backward:.0f`. Depth is not what is scarce. What matters is that loads
# are on the way *all the time*: a program that loads, computes, stores and ends has none under way
# while it computes. An SM has {glue:text}`cb_tile_time_forward:.1f` µs for each tile forward and
# {glue:text}`cb_tile_time_backward:.1f` µs backward, of which the products of a full block need
# {glue:text}`cb_product_time_forward:.1f` and {glue:text}`cb_product_time_backward:.1f` µs of its
# tensor cores at their full rate; $n$ programs on an SM may take $n$ times as long, each. Hence two
# ways to keep memory busy: several programs per SM, which load while others compute
# ({doc}`v1_one_tile`), or one that never stops loading ({doc}`v2_slab`,
# {doc}`v3_warp_specialized`). How many programs fit is decided by registers, and a backward program
# needs many of them.
#
# ## The surprise
#
# If bytes were everything, and the published baseline moved what v0 moves, the published kernel for
# blocks would be as fast as it forward, and less than twice as fast backward. In
# {numref}`fig-bytes-speedups` all published speed-ups lie above that.

# %% tags=["remove-cell"]
quotient_of_bytes = {
    way: sum(moved(list(DESIGNS[way].values())[-1], TABLE5)) / TABLE5.bytes(way)
    for way in DIRECTIONS
}
lowest = bars[bars["direction"] != "total"].groupby("direction")["speedup_vs_fa2_jfa"].min()
assert all(lowest[way] > quotient_of_bytes[way] for way in DIRECTIONS)
baseline = {
    way: cell(way, "fa2_jfa", "GB/s at least") * quotient_of_bytes[way] for way in DIRECTIONS
}
assert abs(baseline["forward"] / baseline["backward"] - 1) < 0.03, "the text: the same rate"
glue("baseline_share", 100 * baseline["forward"] / NOMINAL)
for way in DIRECTIONS:
    glue(f"quotient_{way}", quotient_of_bytes[way])
    glue(f"speedup_{way}", quotients[way])
    glue(f"rest_{way}", quotients[way] / quotient_of_bytes[way])
    glue(f"baseline_{way}", baseline[way])

# %% tags=["remove-input"]
# | name: fig-bytes-speedups
# | caption: >
# |   Published speed-ups over the authors' FlashAttention-2 baseline (B200, read from bars), fill
# |   0.7 filled and fill 1.0 open. Dashed: the quotient of bytes between v0's design and one tile
# |   (modelled).
# | alt: >
# |   Two charts over the largest length from 1000 to 8000. Forward: dots between 1.7 and 2.1, and a
# |   dashed line at 1.00 far below them. Backward: dots near 2.5, the dashed line at 1.87.
with figures.style():
    figure, axes = figures.subplots(1, 2, width=8.4, height=3.4, sharey=True)
    for axis, way in zip(axes, DIRECTIONS, strict=True):
        for fill in (0.7, 1.0):
            some = bars[(bars["direction"] == way) & (bars["fill"] == fill)]
            axis.errorbar(
                some["max_seqlen"], some["speedup_vs_fa2_jfa"], some["error"], fmt="o",
                color=COLOURS[way], markerfacecolor=COLOURS[way] if fill == 0.7 else "none",
            )  # fmt: skip
        bound = quotient_of_bytes[way]
        axis.axhline(bound, color=COLOURS[way], linewidth=1.2, linestyle=(0, (4, 2)))
        axis.text(8300, bound + 0.03, f"bytes: {bound:.2f}", color=COLOURS[way], ha="right")
        axis.set_title(way)
        axis.set_xlabel("largest length (tokens)")
    axes[0].set_ylim(0.8, 2.8)
    axes[0].set_ylabel("times as fast")
figures.save_csv(bars, "block-published-speedups")
display(figure)

# %% tags=["remove-input"]
figures.source(
    "published",
    "NVIDIA B200, siso2026block, table 6, read from the bars; dashed lines are our count of bytes.",
    csv="block-published-speedups",
)

# %% [markdown]
# A speed-up is a quotient of bytes times a quotient of rates. The source of the baseline is not
# published; that it moves what v0 moves is an assumption. With it, its times in table 5 mean
# {glue:text}`cb_baseline_forward:.0f` GB/s forward and {glue:text}`cb_baseline_backward:.0f`
# backward: the same rate in both directions, {glue:text}`cb_baseline_share:.0f` % of the nominal
# one. The forward speed-up of {glue:text}`cb_speedup_forward:.2f` is then
# {glue:text}`cb_quotient_forward:.2f` by bytes and {glue:text}`cb_rest_forward:.2f` by rate; the
# backward one of {glue:text}`cb_speedup_backward:.2f` is {glue:text}`cb_quotient_backward:.2f` by
# bytes and {glue:text}`cb_rest_backward:.2f` by rate. That the two rates agree proves nothing, but
# it is the simplest story that fits: a baseline held at one rate by something other than its bytes,
# and a kernel that has fewer bytes to move and moves them faster. What that something is, the
# ladder has to find out.

# %% tags=["remove-cell"]
grouped = Workload.from_dict({**TABLE5.to_dict(), "name": "grouped", "num_heads_k": 1})
for way in DIRECTIONS:
    glue(f"grouped_{way}", grouped.flops(way) / grouped.bytes(way))
    glue(f"grouped_gain_{way}", TABLE5.bytes(way) / grouped.bytes(way))
    assert roofline.bracket(grouped, way, CEILINGS).bound == "memory"
atomic = 2 + 4 + 2 + 2 + 3  # dO out; q k v dO; dk dv; zeros of an fp32 dq; dq from fp32 to bf16
glue("atomic_least", atomic)
glue("atomic_most", atomic + 4)
wide = emulated(256, 128)  # two blocks of 128, in tiles of 64
asked = [round(sum(wide[name])) for name in ("delta_kernel", "dk_dv_kernel", "dq_kernel")]
assert asked == [2, 6 + 2, 6 + 1], "the solution counts these"

# %% [markdown]
# ## Exercises
#
# :::{exercise} One head of keys for four of queries
# :label: ex-bytes-grouped
#
# Let the four query heads of the main batch share one head of keys and values. How many tensors'
# worth of bytes do forward and backward move, and what is the intensity of a full block? Is it
# compute-bound now? *(paper, then `Workload`)*
# :::
#
# :::{solution} ex-bytes-grouped
# :class: dropdown
#
# Forward $1 + \tfrac14 + \tfrac14 + 1 = 2.5$ instead of 4, backward
# $2 + 2 \cdot \tfrac14 + 1 + 2 \cdot \tfrac14 = 4$ instead of 7. A full block has
# $32 \cdot 4 / 2.5 = 51$ and $45.7 \cdot 7 / 4 = 80$ FLOP per byte; the workload, with its shorter
# blocks, {glue:text}`cb_grouped_forward:.1f` and {glue:text}`cb_grouped_backward:.1f`. That is
# still far from the ridge. A kernel that reads the shared head once per block has
# {glue:text}`cb_grouped_gain_forward:.2f` and {glue:text}`cb_grouped_gain_backward:.2f` times fewer
# bytes to move.
# :::
#
# :::{exercise} Atomic additions
# :label: ex-bytes-atomic
#
# FlashAttention-2 makes all three gradients in one pass: a program owns a tile of keys and adds its
# part of dq with atomic additions {cite}`dao2024flashattention2`. Let it add to an fp32 tensor that
# is set to zero before and converted to bf16 after. Count in units of q what a backward pass moves,
# for blocks of one tile, D in a kernel of its own. Which part depends on the L2 cache? *(paper, ten
# minutes)*
# :::
#
# :::{solution} ex-bytes-atomic
# :class: dropdown
#
# D: dO and out, 2. Zeros: the fp32 tensor has two units, 2 written. The pass: q, k, v, dO, 4 read;
# dk, dv, 2 written; the additions are done in L2, where they read 2 units from memory and
# eventually write 2 back, unless the zeros are still there. Conversion: 2 read, 1 written. Together
# {glue:text}`cb_atomic_least:.0f` without the additions and {glue:text}`cb_atomic_most:.0f` with
# them, plus lse and D: no better than two passes. With one tile per block each element of dq
# receives exactly one addition, to a zero. A general kernel cannot know that.
# :::
#
# :::{exercise} A block of two tiles
# :label: ex-bytes-two-tiles
#
# v0 with `block_size=128` and tiles of 64: how many units do its backward kernels *ask for*, and
# how many must come from memory? What does the order of the programs have to do with it? How would
# you measure it? *(thought, then a GPU with counters)*
# :::
#
# :::{solution} ex-bytes-two-tiles
# :class: dropdown
#
# The kernel of dk and dv has two programs per block and head. Each reads its own k and v, and all
# of q and dO: 1 + 1 + 2 + 2 = 6 units, where 4 sufficed for one tile. The kernel of dq the same
# with the roles exchanged, 6. With D's 2 and the gradients' 3 the kernels ask for 17 units. In 4 of
# them a kernel reads for the second time what it has read already; these come from L2 if the two
# programs of a block run at about the same time. In v0 they are neighbours in the grid, so they do.
# If tiles of one block were far apart in the grid, 17 would come from memory. A profiler's counters
# of DRAM and L2 traffic show the difference; a clock alone does not.
# :::
#
# ## Takeaways
#
# :::{admonition} Three things to remember
# :class: tip
#
# 1. $b/2$ and $5b/7$ FLOP per byte: with blocks of 64 only bytes count, and the ceiling is a copy
#    with the same mix of reads and writes.
# 2. One tile saves nothing forward and nearly half of v0's bytes backward. Whatever it gains beyond
#    that, it gains in rate.
# 3. One tile's loads on the way to each SM are enough, if they are on the way all the time.
# :::
