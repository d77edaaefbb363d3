# ---
# jupyter:
#   kernelspec: {name: python3, display_name: Python 3}
# ---

# %% [markdown]
# # Counting bytes: what one tile can win before it exists
#
# A block is so small that its arithmetic hardly counts. What does memory traffic allow, and what
# can a kernel for blocks win over a general one at most?
#
# :::{admonition} In this chapter (20 minutes)
# You will count what a design moves from a list of names, turn bytes into a floor in microseconds,
# and test published times against it. By bytes alone one tile is worth a factor of
# {glue:text}`bound_forward:.2f` forward and {glue:text}`bound_backward:.2f` backward. All published
# speed-ups are larger.
# :::

# %%
import pandas as pd

from gdpa_kernels.block_attention import v0_flash
from gdpa_kernels.measuring import roofline
from gdpa_kernels.measuring import system as systems
from gdpa_kernels.measuring.workload import BLOCK_TABLES, Workload, workload
from gdpa_kernels.report import block_bytes, block_studies, charts, results
from gdpa_kernels.report.chapter import Chapter

main, with_rotary = workload(*BLOCK_TABLES["table5"]), workload(*BLOCK_TABLES["table7"])
DESIGNS = {  # what each kernel reads and writes
    "forward, one tile": [("q k v", "out")],
    "forward, general": [("q k v", "out lse")],
    "backward, one tile": [("q k v dO", "dq dk dv")],
    "... that reads the output": [("q k v dO out", "dq dk dv")],
    "... and D by a kernel": [("dO out", "D"), ("q k v dO lse D", "dq dk dv")],
    "backward, general (v0)": [
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
# |   What each design moves, one box per tensor: filled is read, outlined is written, slivers are
# |   the fp32 rows lse and D. A gap separates kernels. Equal heads, head_dim 128.
# | alt: >
# |   Six rows of boxes. Forward: four boxes for one tile, the same and a sliver for the general
# |   design. Backward: seven boxes for one tile, eight with the output, nine with D computed by a
# |   kernel of its own, and thirteen in three groups for v0.
chapter.figure(
    block_bytes.boxes(DESIGNS, main, "backward, one tile"), modelled="drawn from the lists above"
)

# %% [markdown]
# ## FLOPs per byte
#
# A full block of $b$ tokens and one head of dimension $d$: forward has two matmuls of $2 b^2 d$
# FLOPs each, reads q, k and v, and writes the output: four tensors of $b\,d$ numbers, 2 bytes each.
# Backward has five matmuls, reads the output's gradient too, and writes three gradients: seven
# tensors ({doc}`block_attention`). The head dimension cancels:
#
# $$
# I_\text{forward} = \frac{4 b^2 d}{4 \cdot 2 b d} = \frac{b}{2}, \qquad
# I_\text{backward} = \frac{10 b^2 d}{7 \cdot 2 b d} = \frac{5 b}{7}.
# $$ (eq-block-intensity)
#
# With $b = 64$ these are 32 and 46 FLOP per byte, whatever the lengths, heads and batch. (The
# publication says "about 33" forward {cite}`siso2026block`.) The H200 needs
# {glue:text}`ridge_forward:.0f` and {glue:text}`ridge_backward:.0f` before its tensor cores matter,
# so a block would need {glue:text}`size_forward:.0f` tokens forward and
# {glue:text}`size_backward:.0f` backward to be compute-bound. At the rate of a copy the tensor
# cores are busy {glue:text}`busy_forward:.0f` and {glue:text}`busy_backward:.0f` % of the time.
# In this part a rung is judged by GB/s.

# %%
record = chapter.record("block/results")
limits = results.ceilings(record)
machine = systems.load(chapter.data_dir / "systems" / f"{record.system}.json")
rate = {"forward": limits.gbytes_per_s(3, 1), "backward": limits.gbytes_per_s(4, 3)}
ridge = {way: 1e3 * limits.tflops / each for way, each in rate.items()}

# %% tags=["remove-cell"]
bracket = {way: roofline.bracket(main, way, limits) for way in rate}
assert all(most.bound == "memory" for most in bracket.values())
for way in rate:
    chapter.glue(**{f"ridge_{way}": ridge[way], f"rate_{way}": rate[way]})
    chapter.glue(**{f"busy_{way}": 100 * bracket[way].tflops_at_lower / limits.tflops})
chapter.glue(
    size_forward=2 * ridge["forward"], size_backward=7 / 5 * ridge["backward"],
    mix_gap=100 * (rate["forward"] / rate["backward"] - 1),
)  # fmt: skip

# %% [markdown]
# ## A ceiling for each mix
#
# Which GB/s? DRAM loses time when it turns from reading to writing ({doc}`../measuring/roofline`).
# Forward reads three bytes for each byte it writes, backward four for three. PyTorch has a function
# with the first mix, `addcmul`, and none with the second, so `gdpa_kernels/measuring/copies.py` has
# kernels that do nothing but read three tensors and write one, or read four and write three. The
# fastest copy of a mix is its ceiling: {glue:text}`rate_forward:,.0f` GB/s for 3:1 and
# {glue:text}`rate_backward:,.0f` for 4:3. To hold a backward pass against the wrong copy is an
# error of {glue:text}`mix_gap:.0f` %.
#
# ## What a general kernel moves
#
# FlashAttention-2 {cite}`dao2024flashattention2` is made for rows of scores that do not fit on the
# chip. It keeps the output and the log-sum-exp for the backward pass, computes
# $D = \mathrm{rowsum}(dO \odot O)$ in a kernel of its own, and recovers P tile by tile. The
# gradients of k and v are sums over queries, that of q is a sum over keys: one kernel with atomic
# additions, or two kernels that are deterministic. Our {doc}`v0 <v0_flash>` is the second.
#
# Bytes follow from the names, if no kernel finds in a cache what another one touched:

# %% tags=["remove-input"]
chapter.code(block_bytes.moved)

# %%
moved = pd.DataFrame({
    "tensors": {name: block_bytes.tensors(each, main) for name, each in DESIGNS.items()},
    "GB": {name: sum(block_bytes.moved(each, main)) / 1e9 for name, each in DESIGNS.items()},
    "floor (µs)": {
        name: block_bytes.floor_us(each, main, limits) for name, each in DESIGNS.items()
    },
})  # fmt: skip
for way in rate:
    assert sum(block_bytes.moved(DESIGNS[f"{way}, one tile"], main)) == main.bytes(way)

# %% tags=["remove-input"]
chapter.table(
    moved.rename_axis("design").reset_index(),
    modelled=f"bytes of {main.name} over the copy rates measured in record {record.id}",
)
size, floor = moved["GB"], moved["floor (µs)"]
lse = block_bytes.size_of("lse", main)
chapter.glue(
    bound_forward=floor["forward, general"] / floor["forward, one tile"],
    bound_backward=floor["backward, general (v0)"] / floor["backward, one tile"],
    general=moved["tensors"]["backward, general (v0)"],
    with_d=moved["tensors"]["... and D by a kernel"], tensor_mb=main.bytes("forward") / 4e6,
    l2_mb=machine.l2_bytes / 1e6, lse_mb=lse / 1e6, lse_share=100 * lse / main.bytes("backward"),
)  # fmt: skip

# %% [markdown]
# The assumption holds: one tensor has {glue:text}`tensor_mb:,.0f` MB, the L2 cache
# {glue:text}`l2_mb:.0f` (nominal). And the lists are right. The emulator counts what v0's kernels
# load and store on a sequence of 148 tokens, in tensors of q's size:

# %%
asked = block_studies.traffic(v0_flash, block_studies.batch((148,), heads=1, head_dim=128))

# %% tags=["remove-input"]
chapter.table(
    asked.round(3), emulated="v0_flash, one head of dimension 128; with the list of blocks"
)

# %% [markdown]
# **Forward there is nothing to win by bytes.** The log-sum-exp is {glue:text}`lse_mb:.0f` MB.
# **Backward there is a factor of {glue:text}`bound_backward:.2f`**, most of it from the second pass
# over the inputs: {glue:text}`general:.1f` tensors become {glue:text}`with_d:.1f`. The
# publication explains its backward gain by the round trip of the log-sum-exp
# {cite}`siso2026block`; that tensor is {glue:text}`lse_share:.1f` % of what backward must move.
#
# These are bounds between two kernels that both move their bytes at the rate of a copy. If one tile
# gains more, the general kernel must be slower than its own bytes.
#
# ## The published times
#
# Table 5 of the publication times a forward and a backward pass, each by the new kernel and by a
# baseline, the authors' own Triton kernel after FlashAttention-2; table 7 times backward passes
# with rotary embeddings {cite}`siso2026block`. All ran on a B200, 8 TB/s (nominal
# {cite}`nvidiablackwell`). The fewest bytes over the time is the least rate that a kernel had:

# %%
plain = Workload.from_dict(
    {**with_rotary.to_dict(), "name": "plain", "rotary": False, "rotate_v": False}
)
gradients = plain.bytes_written("backward")
fewest = {
    "forward": main.bytes("forward"),
    "backward": main.bytes("backward"),
    "attention_backward": plain.bytes("backward"),
    "rotary_backward": 2 * gradients + with_rotary.bytes("forward") - plain.bytes("forward"),
    "attention_and_rotary_backward": with_rotary.bytes("backward"),
}
fewest["unfused"] = fewest["attention_backward"] + fewest["rotary_backward"]
TOGETHER, NEW, OLD = "attention_and_rotary_backward", "tlx_block_attention", "fa2_jfa"
times = pd.read_csv(chapter.data_dir / "published" / "block_attention_times.csv")
both = times["kernel"].eq("unfused") & times["direction"].eq(TOGETHER)
moved_by = times["direction"].where(~both, "unfused").map(fewest)
times["GB/s at least"] = moved_by / times["time_ms"] / 1e6
times["% of 8 TB/s"] = times["GB/s at least"] / 80
by_kernel = times.set_index(["direction", "kernel"])
time, least = by_kernel["time_ms"], by_kernel["GB/s at least"]
per_token = [  # of the attention backward, tokens and heads divided out: tables 5 and 7
    time["backward", NEW] / main.total_q / main.num_heads_q,
    time["attention_backward", NEW] / with_rotary.total_q / with_rotary.num_heads_q,
]
empty = 0.3 / main.fill  # tokens of a batch with 70 % empty places, over those of the fill

# %% tags=["remove-input"]
chapter.table(
    times[["table", "direction", "kernel", "time_ms", "GB/s at least", "% of 8 TB/s"]].round(3),
    published="times: NVIDIA B200, siso2026block, tables 5 and 7; bytes are ours, the fewest",
)
chapter.glue(
    forward=least["forward", NEW] / 80, backward=least["backward", NEW] / 80,
    alone=least["rotary_backward", "unfused"] / 80, cheaper=100 * (1 - per_token[1] / per_token[0]),
    fused=time[TOGETHER, "unfused"] / time[TOGETHER, "fused"],
    fewer=fewest["unfused"] / fewest[TOGETHER],
    stated=least["attention_backward", NEW], as_fill=least["backward", NEW],
    as_empty=least["backward", NEW] * empty, empty_forward=least["forward", NEW] * empty / 80,
)  # fmt: skip

# %% [markdown]
# The published forward kernel runs at {glue:text}`forward:.0f` % of the nominal rate or more, the
# backward one at {glue:text}`backward:.0f` %. The headline of the rotary part, a factor of
# {glue:text}`fused:.2f` by fusion, rests on a separate rotary kernel at {glue:text}`alone:.0f` %;
# by bytes the fusion is worth {glue:text}`fewer:.2f` ({doc}`v4_rotary`).
#
# The tables disagree in one place: the attention backward is {glue:text}`cheaper:.0f` % cheaper in
# table 7 than in table 5, tokens and heads divided out, and no reason is given. A speed-up must not
# mix the two. And they settle what "sparsity 0.7" means. Table 7 states its tokens, and its
# backward moves {glue:text}`stated:,.0f` GB/s. Read as a fill, table 5 gives the same kernel
# {glue:text}`as_fill:,.0f`. Read as 70 % empty places it gives {glue:text}`as_empty:,.0f`, and the
# forward kernel would run at {glue:text}`empty_forward:.0f` % of the nominal rate. Only the fill
# fits kernels that their authors call memory-bound ({doc}`../tools/claims`).
#
# ## Little's law: how much has to be in flight
#
# A rate is kept only if enough bytes are on their way at any time: *bytes in flight = rate x
# latency*. Nobody waits for a store, so only reads count. We have no measured latency of a busy
# memory; a microsecond is assumed. For each SM:

# %%
tile = 64 * 128 * 2  # bytes: one tensor, one block, one head of dimension 128
law = {}
for way, (read, written) in {"forward": (3, 1), "backward": (4, 3)}.items():
    per_sm = rate[way] / machine.num_sms  # bytes per nanosecond
    law[way] = {
        "KB in flight for 1 µs": per_sm * read / (read + written),
        "KB that one tile loads": read * tile / 1e3,
        "µs per tile": (read + written) * tile / per_sm / 1e3,
    }

# %% tags=["remove-input"]
law = pd.DataFrame(law).T
chapter.table(law.rename_axis("direction").reset_index().round(1),
              modelled=f"copy rates of record {record.id}; latency assumed")  # fmt: skip
assert (1.5 * law["KB in flight for 1 µs"] < law["KB that one tile loads"]).all()

# %% [markdown]
# The loads of *one* tile are enough, even at 1.5 µs. Depth is not scarce. What matters is that
# loads are in flight *all the time*: a program that loads, computes, stores and ends has none in
# flight while it computes. Hence two ways to keep memory busy: several programs per SM, which load
# while others compute ({doc}`v1_one_tile`), or one that never stops loading ({doc}`v2_slab`,
# {doc}`v3_warp_specialized`). Registers decide how many programs fit.
#
# ## The surprise
#
# If bytes were everything, and the published baseline moved what v0 moves, no published speed-up
# would exceed the quotient of bytes.

# %%
bars = pd.read_csv(chapter.data_dir / "published" / "block_attention_speedups.csv")
bars = bars[bars["direction"] != "total"]
smallest = bars.groupby("direction")["speedup_vs_fa2_jfa"].min()
allowed = {
    "forward": size["forward, general"] / size["forward, one tile"],
    "backward": size["backward, general (v0)"] / size["backward, one tile"],
}
held = {
    way: least[way, OLD] * allowed[way] for way in rate
}  # GB/s of a baseline that moves so much

# %% tags=["remove-input"]
for way in rate:
    text = f"Published speed-up, {way}, the smallest of all lengths."
    chapter.predict(text, smallest[way], most=allowed[way])

# %% tags=["remove-input"]
# | name: fig-bytes-speedups
# | caption: >
# |   Published speed-ups over the authors' FlashAttention-2 baseline (B200, read from bars).
# |   Dashed: what bytes allow backward; forward they allow 1.00.
# | alt: >
# |   Four lines over the largest length from 1000 to 8000. Backward both lie near 2.5, forward
# |   between 1.7 and 2.1. A dashed line at the backward bound lies below the backward lines.
bars["bar"] = bars["direction"] + ", fill " + bars["fill"].astype(str)
shown = bars.pivot(index="max_seqlen", columns="bar", values="speedup_vs_fa2_jfa")
chart = charts.lines(shown, xlabel="largest length (tokens)", ylabel="times as fast", log=False,
                     highlight=["backward, fill 0.7"], ceiling=allowed["backward"])  # fmt: skip
chapter.figure(chart, data=bars, published="NVIDIA B200, siso2026block, table 6, read from bars")
assert abs(held["forward"] / held["backward"] - 1) < 0.03, "the text: the same rate"
chapter.glue(held_forward=held["forward"], held_backward=held["backward"],
             held_share=held["forward"] / 80)  # fmt: skip

# %% [markdown]
# A speed-up is a quotient of bytes times a quotient of rates. The source of the baseline is not
# published; that it moves what v0 moves is an assumption. With it, its times in table 5 mean
# {glue:text}`held_forward:,.0f` GB/s forward and {glue:text}`held_backward:,.0f` backward: the same
# rate in both directions, {glue:text}`held_share:.0f` % of the nominal one. That proves nothing,
# but the simplest story that fits is a baseline held at one rate by something other than its bytes.
# What that something is, the ladder has to find out.
#
# ## Exercises
#
# :::{exercise} One head of keys for four of queries
# :label: ex-bytes-grouped
#
# Let the four query heads of the main batch share one head of keys and values. How many tensors'
# worth of bytes do forward and backward move, and what is the intensity of a full block? Is it
# compute-bound now? *(paper)*
# :::
#
# :::{solution} ex-bytes-grouped
# :class: dropdown
#
# Forward $1 + \tfrac14 + \tfrac14 + 1 = 2.5$ instead of 4, backward
# $2 + 2 \cdot \tfrac14 + 1 + 2 \cdot \tfrac14 = 4$ instead of 7. A full block has
# $32 \cdot 4 / 2.5 = 51$ and $45.7 \cdot 7 / 4 = 80$ FLOP per byte, still far from the ridge. A
# kernel that reads the shared head once per block has 1.6 and 1.75 times fewer bytes to move.
# :::
#
# :::{exercise} Atomic additions
# :label: ex-bytes-atomic
#
# FlashAttention-2 makes all three gradients in one pass: a program owns a tile of keys and adds its
# part of dq with atomic additions. Let it add to an fp32 tensor that is set to zero before and
# converted to bf16 after. Count in units of q what a backward pass moves, for blocks of one tile, D
# in a kernel of its own. Which part depends on the L2 cache? *(paper, ten minutes)*
# :::
#
# :::{solution} ex-bytes-atomic
# :class: dropdown
#
# D: dO and out, 2. Zeros: the fp32 tensor has two units, 2 written. The pass: 4 read; dk and dv, 2
# written; the additions are done in L2, where they read 2 units from memory and eventually write 2
# back, unless the zeros are still there. Conversion: 2 read, 1 written. Together 13 without the
# additions and 17 with them, plus lse and D: no better than two passes. With one tile per block
# each element of dq receives exactly one addition, to a zero. A general kernel cannot know that.
# :::
#
# :::{exercise} A block of two tiles
# :label: ex-bytes-two-tiles
#
# v0 with `block_size=128` and tiles of 64: how many units do its backward kernels *ask for*, and
# how many must come from memory? What does the order of the programs have to do with it?
# *(`block_studies.traffic`, ten minutes)*
# :::

# %% tags=["remove-cell"]
two = block_studies.batch((256,), heads=1, head_dim=128, block_size=128)
wide = block_studies.traffic(v0_flash, two).set_index("kernel").sum(axis=1).round()
assert wide.tolist()[1:] == [2, 8, 7], "the answer counts these"

# %% [markdown]
# :::{solution} ex-bytes-two-tiles
# :class: dropdown
#
# The kernel of dk and dv has two programs per block and head. Each reads its own k and v, and all
# of q and dO: $1 + 1 + 2 + 2 = 6$ units, where 4 sufficed for one tile. The kernel of dq does the
# same with the roles exchanged, 6. With D's 2 and the gradients' 3 the kernels ask for 17 units. In
# 4 of them a kernel reads for the second time what it has read already; these come from L2 if the
# two programs of a block run at about the same time. In v0 they are neighbours in the grid, so they
# do. A profiler's counters of DRAM and L2 traffic show the difference; a clock alone does not.
# :::
#
# ## Takeaways
#
# - $b/2$ and $5b/7$ FLOP per byte: with blocks of 64 only bytes count, and the ceiling is a copy
#   with the same mix of reads and writes.
# - One tile saves nothing forward and nearly half of v0's bytes backward. Whatever it gains beyond
#   that, it gains in rate.
# - One tile's loads in flight to each SM are enough, if they are in flight all the time.
