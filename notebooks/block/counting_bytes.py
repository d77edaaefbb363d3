# ---
# jupyter:
#   kernelspec: {display_name: Python 3, language: python, name: python3}
# ---

# %% [markdown]
# # Counting bytes
#
# What does memory traffic allow, and how much can a kernel made for blocks of 64 tokens gain over a
# general one?
#
# :::{admonition} In this chapter (20 minutes)
# You will be able to count a design's bytes, turn them into a floor in microseconds, and test
# published times against it.
# :::

# %% tags=["hide-input"]
import pandas as pd

from _lib import block_bytes
from gdpa_lab.measuring import system as systems
from gdpa_lab.measuring.workloads import BLOCK_TABLES, workload
from gdpa_lab.report import charts, results
from gdpa_lab.report.chapter import Chapter

main, with_rotary = workload(*BLOCK_TABLES["table5"]), workload(*BLOCK_TABLES["table7"])
DESIGNS = {  # what each kernel reads and writes
    "forward, one tile": [("q k v", "out")],
    "forward, general": [("q k v", "out lse")],
    "backward, one tile": [("q k v dO", "dq dk dv")],
    "... with D by a kernel": [("dO out", "D"), ("q k v dO lse D", "dq dk dv")],
    "backward, general (block v0)": [
        ("dO out", "D"), ("q k v dO lse D", "dk dv"), ("q k v dO lse D", "dq"),
    ],
}  # fmt: skip

# %% tags=["parameters"]
mode = "replay"
device = "cpu"
data_dir = "data"

# %% tags=["remove-cell"]
chapter = Chapter("block/counting_bytes", mode=mode, device=device, data_dir=data_dir)

# %% tags=["remove-input"]
# | name: fig-bytes-designs
# | caption: >
# |   **In the backward pass one tile moves about half of what a general design moves.** One box per
# |   tensor: filled boxes are read, outlined ones are written, slivers are the fp32 rows lse and D.
# |   A gap separates kernels.
# | alt: >
# |   Five rows of boxes. Forward: four boxes for one tile, the same and a sliver for the general
# |   design. Backward: seven boxes for one tile, nine with D, thirteen in three groups for v0.
chapter.figure(block_bytes.boxes(DESIGNS, main), modelled="drawn from the lists above")

# %% [markdown]
# ## FLOPs per byte
#
# Take a full block of $b$ tokens and one head of dimension $d$. The forward pass has two matmuls of
# $2 b^2 d$ FLOPs each, reads q, k and v, and writes the output: four tensors of $b\,d$ numbers of 2
# bytes. The backward pass has five matmuls, also reads dO, and writes three gradients: seven
# tensors ({doc}`block_attention`). The head dimension cancels:
#
# $$
# I_\text{forward} = \frac{4 b^2 d}{4 \cdot 2 b d} = \frac{b}{2}, \qquad
# I_\text{backward} = \frac{10 b^2 d}{7 \cdot 2 b d} = \frac{5 b}{7}.
# $$ (eq-block-intensity)
#
# With $b = 64$ these are 32 and 46 FLOP per byte, whatever the lengths, heads and batch. The H200
# needs {glue:text}`ridge_forward:.0f` and {glue:text}`ridge_backward:.0f` before its tensor cores
# become the limit. To be compute-bound, a block would need {glue:text}`size_forward:.0f` or
# {glue:text}`size_backward:.0f` tokens. In this part a kernel is therefore judged by GB/s.

# %% tags=["remove-cell"]
record = chapter.record("block/results")
limits = results.ceilings(record, "sustained")
machine = systems.load(chapter.data_dir / "systems" / f"{record.system}.json")
rate = {"forward": limits.gbytes_per_s(3, 1), "backward": limits.gbytes_per_s(4, 3)}
ridge = {way: 1e3 * limits.tflops / each for way, each in rate.items()}
chapter.glue(
    **{f"ridge_{way}": ridge[way] for way in rate}, **{f"rate_{way}": rate[way] for way in rate},
    size_forward=2 * ridge["forward"], size_backward=7 / 5 * ridge["backward"],
)  # fmt: skip

# %% [markdown]
# The forward pass reads three bytes for each byte it writes, the backward pass four for every
# three. The fastest copy of that mix is the {ref}`ceiling <rule-ceiling>`:
# {glue:text}`rate_forward:,.0f` GB/s for 3:1 and {glue:text}`rate_backward:,.0f` for 4:3.
#
# ## What a general kernel moves
#
# FlashAttention-2 {cite}`dao2024flashattention2` keeps the output and the log-sum-exp for the
# backward pass and computes $D = \mathrm{rowsum}(dO \odot O)$ in a separate kernel. The gradients
# of k and v are sums over queries, that of q is a sum over keys. That takes one kernel with atomic
# additions, or two deterministic ones as in our {doc}`block v0 <v0_flash>`.
#
# One tensor has {glue:text}`tensor_mb:,.0f` MB, far more than the L2 cache
# ({glue:text}`l2_mib:.0f` MiB, device query), so no kernel finds there what another one left.
# Listing the tensors gives the bytes:

# %% tags=["remove-cell"]
moved = pd.DataFrame({
    "tensors": {name: block_bytes.tensors(each, main) for name, each in DESIGNS.items()},
    "floor (µs)": {
        name: block_bytes.floor_us(each, main, limits) for name, each in DESIGNS.items()
    },
})  # fmt: skip

# %% tags=["remove-input"]
chapter.table(
    moved.rename_axis("design").reset_index(),
    caption="**One tile has nothing to save in the forward pass and half of the bytes in the "
    "backward pass.** Tensors of q's size, and the time of copies with as many bytes.",
    name="tab-bytes-designs",
    digits={"tensors": 2, "floor (µs)": 0},
    modelled=f"bytes of {main.name} over the copy rates measured in record {record.id}",
)
size, floor = moved["tensors"], moved["floor (µs)"]
chapter.glue(
    bound_backward=floor["backward, general (block v0)"] / floor["backward, one tile"],
    allowed_backward=size["backward, general (block v0)"] / size["backward, one tile"],
    general=size["backward, general (block v0)"], with_d=size["... with D by a kernel"],
    tensor_mb=main.bytes("forward") / 4e6, l2_mib=machine.l2_bytes / 2**20,
    lse_share=100 * block_bytes.size_of("lse", main) / main.bytes("backward"),
)  # fmt: skip

# %% [markdown]
# **In the forward pass the bytes leave nothing to gain. In the backward pass they leave a factor of
# {glue:text}`allowed_backward:.2f`**, or {glue:text}`bound_backward:.2f` in the time of copies,
# most of it from the second pass over the inputs: {glue:text}`general:.1f` tensors become
# {glue:text}`with_d:.1f`. The publication explains its gain by the round trip of the log-sum-exp
# {cite}`siso2026block`, but that tensor is only {glue:text}`lse_share:.1f` % of what the pass must
# move.
#
# ## The published times
#
# Table 5 of the publication times the new kernel and a baseline, the authors' own Triton kernel
# after FlashAttention-2 {cite}`siso2026block`, on a B200, 8 TB/s (nominal
# {cite}`nvidiablackwell`). The fewest bytes divided by the time bound a kernel's rate from below:

# %% tags=["remove-cell"]
NEW, OLD = "tlx_block_attention", "fa2_jfa"
times = pd.read_csv(chapter.data_dir / "published" / "block_attention_times.csv")
five = times[times["table"] == "table5"][["direction", "kernel", "time_ms"]]
five["GB/s at least"] = five["direction"].map(main.bytes) / five["time_ms"] / 1e6
five["% of 8 TB/s"] = five["GB/s at least"] / 80
least = five.set_index(["direction", "kernel"])["GB/s at least"]
assert (five[five["kernel"] == OLD]["% of 8 TB/s"] < 50).all(), "the caption says so"
seven = sum(block_bytes.moved(DESIGNS["backward, one tile"], with_rotary))
(alone,) = times[times["direction"] == "attention_backward"]["time_ms"]  # in table 7
stated = seven / alone / 1e6  # GB/s, for the tokens that table 7 states
empty = 0.3 / main.fill  # tokens of a batch with 70 % empty places, over those of the fill

# %% tags=["remove-input"]
chapter.table(
    five.replace({"kernel": {OLD: "baseline", NEW: "new kernel"}})
    .rename(columns={"time_ms": "ms"})
    .round(3),
    caption="**The published baseline runs below half of the nominal rate.** Times of table 5, and "
    "the fewest bytes over them.",
    name="tab-bytes-published",
    digits={"GB/s at least": 0, "% of 8 TB/s": 0},
    published="times: NVIDIA B200, siso2026block, table 5; bytes are ours, the fewest",
)
chapter.glue(
    stated=stated, as_fill=least["backward", NEW], as_empty=least["backward", NEW] * empty,
)  # fmt: skip

# %% [markdown]
# These times also settle what "sparsity 0.7" means. Table 7 times the same backward kernel on a
# batch whose number of tokens is stated, and there it runs at {glue:text}`stated:,.0f` GB/s. If 0.7
# is a fill, the kernel of table 5 runs at {glue:text}`as_fill:,.0f`, and with 70 % empty rows at
# {glue:text}`as_empty:,.0f`. Only the fill fits a memory-bound kernel.
#
# ## Little's law: one tile in flight per SM is enough
#
# *Bytes in flight = rate x latency*. No warp waits for a store, so only reads count. With an
# assumed latency of 1 µs under load, for each SM:

# %% tags=["remove-input"]
tile = 64 * 128 * 2 / 1024  # KiB: one tensor, one block, one head of dimension 128
for way, (read, written) in {"forward": (3, 1), "backward": (4, 3)}.items():
    per_us = rate[way] * 1e3 / 1024 / machine.num_sms * read / (read + written)  # KiB, of each SM
    print(f"{way:8} {per_us:.0f} KiB in flight for 1 µs; a program loads {read * tile:.0f} KiB")
    assert 1.5 * per_us < read * tile

# %% [markdown]
# At head_dim 128 the loads of *one* tile are enough, even at 1.5 µs. But loads must be in flight
# *all the time*, and a program that loads, computes, stores and ends has none in flight while it
# computes. So there are two ways to keep memory busy: several programs per SM, which load while
# others compute ({doc}`v1_one_tile`), or one program that never stops loading
# ({doc}`v3_warp_specialized`).
#
# ## All published speedups exceed the ratio of bytes
#
# If bytes were everything, no published speedup would exceed the ratio of bytes. That is a
# prediction, and it fails.

# %% tags=["remove-cell"]
bars = pd.read_csv(chapter.data_dir / "published" / "block_attention_speedups.csv")
bars = bars[bars["direction"] != "total"]
smallest = bars.groupby("direction")["speedup_vs_fa2_jfa"].min()
allowed = {
    "forward": size["forward, general"] / size["forward, one tile"],
    "backward": size["backward, general (block v0)"] / size["backward, one tile"],
}
held = {way: least[way, OLD] * allowed[way] for way in rate}  # GB/s if it moves what v0 moves
assert all(smallest[way] > allowed[way] for way in rate), "the caption: every speedup"

# %% tags=["remove-input"]
# | name: fig-bytes-speedups
# | caption: >
# |   **Every published speedup is larger than bytes allow.** Over the authors' FlashAttention-2
# |   (B200, read from bars). Dashed: what bytes allow in the backward pass. In the forward pass
# |   they allow none.
# | alt: >
# |   Four lines over the largest length from 1000 to 8000. Backward both lie near 2.5, forward
# |   between 1.7 and 2.1. A dashed line at the backward bound lies below the backward lines.
bars["bar"] = bars["direction"] + ", fill " + bars["fill"].astype(str)
shown = bars.pivot(index="max_seqlen", columns="bar", values="speedup_vs_fa2_jfa")
shown.index //= 1000
chart = charts.lines(shown, xlabel="largest length (thousand tokens)", ylabel="times as fast",
                     highlight=["backward, fill 0.7", "forward, fill 0.7"],
                     levels={"what bytes allow, backward": allowed["backward"]})  # fmt: skip
chapter.figure(chart, data=bars, published="NVIDIA B200, siso2026block, table 6, read from bars")
for way in rate:
    chapter.predict(
        f"If bytes decide, the published {way} kernel is faster than its baseline by no more than "
        "the ratio of their bytes (here the smallest speedup of all lengths).",
        smallest[way], most=allowed[way], shown=way == "backward",
    )  # fmt: skip
assert abs(held["forward"] / held["backward"] - 1) < 0.03, "the text: the same rate"
chapter.glue(held_forward=held["forward"], held_backward=held["backward"],
             held_share=held["forward"] / 80)  # fmt: skip

# %% [markdown]
# A speedup is a ratio of bytes times a ratio of rates. The baseline's source is not published, and
# that it moves what block v0 moves is our assumption. If so, its times in table 5 mean
# {glue:text}`held_forward:,.0f` GB/s in the forward pass and {glue:text}`held_backward:,.0f` in the
# backward pass, {glue:text}`held_share:.0f` % of the nominal rate in both. The equality suggests a
# rate that is set by something other than bytes.

# %% tags=["remove-input"]
chapter.predictions()

# %% [markdown]
# ## Exercises
#
# :::{exercise} One head of keys for four of queries
# :label: ex-bytes-grouped
#
# Let the four query heads of the main batch share one head of keys and values. How many tensors'
# worth of bytes do the two passes move, and how many FLOP per byte does a full block have? Is
# it compute-bound now? *(paper)*
# :::
#
# :::{solution} ex-bytes-grouped
# :class: dropdown
#
# The forward pass moves $1 + \tfrac14 + \tfrac14 + 1 = 2.5$ instead of 4, the backward pass $2 + 2
# \cdot \tfrac14 + 1 + 2
# \cdot \tfrac14 = 4$ instead of 7. A full block has $32 \cdot 4 / 2.5 = 51$ and $45.7 \cdot 7 / 4 =
# 80$ FLOP per byte, still far below what the H200 needs.
# :::
#
# :::{exercise} Atomic additions
# :label: ex-bytes-atomic
#
# FlashAttention-2 makes all three gradients in one pass: a program owns a tile of keys and adds its
# part of dq with atomic additions. Let it add to an fp32 tensor that is zeroed before and converted
# to bf16 after, with D from a separate kernel. Count in units of q what a backward pass moves for
# blocks of one tile. Which part depends on the L2 cache? *(paper, ten minutes)*
# :::
#
# :::{solution} ex-bytes-atomic
# :class: dropdown
#
# D: dO and out, 2. Zeros: the fp32 tensor has two units, 2 written. The pass: 4 read; dk and dv, 2
# written; the additions happen in L2, where they read 2 units from memory and eventually write 2
# back, unless the zeros are still there. Conversion: 2 read, 1 written. Together 13 without the
# additions and 17 with them, plus lse and D: no better than two passes. With one tile per block
# each element of dq receives exactly one addition, to a zero, which a general kernel cannot know.
# :::
#
# :::{exercise} Rotary in a separate kernel
# :label: ex-bytes-rotary
#
# A batch has 3 heads and {term}`rotary` embeddings on q, k and v; sin and cos, in bf16, hold
# `head_dim / 2` numbers per token each, the same for all heads. Backward, compare a fused kernel
# with attention followed by a kernel that rotates the three gradients in place. What is fusing
# worth by bytes? *(paper, five minutes)*
# :::
#
# :::{solution} ex-bytes-rotary
# :class: dropdown
#
# In units of one head, sin and cos together are 1. Fused: $7 \cdot 3 + 1 = 22$. Apart: $7 \cdot 3$,
# then $2 \cdot 3 \cdot 3 + 1$ to rotate, 40 in all, or 1.82 times as much. The published gain is
# about twice that ({doc}`results`): by the fewest bytes, its separate kernel ran at a fifth of the
# nominal rate.
# :::
#
# ## Takeaways
#
# - $b/2$ and $5b/7$ FLOP per byte: with blocks of 64 only bytes count.
# - One tile saves nothing in the forward pass and nearly half of the bytes in the backward pass.
#   What a kernel gains beyond that is rate.
# - One tile's loads in flight on each SM are enough, if they never pause.
