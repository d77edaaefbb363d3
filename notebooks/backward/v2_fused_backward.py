# ---
# jupyter:
#   kernelspec: {name: python3, display_name: Python 3}
# measures: true
# ---

# %% [markdown]
# # v2 backward: one pass, five MMAs
#
# A kernel that owns keys has everything that dQ needs, except dQ's rows. What does it cost to add
# to rows that belong to nobody?
#
# :::{admonition} In this chapter (20 minutes)
# You will count the bytes of a sum whose parts live in different programs, and tell from the number
# of summands whether it is deterministic. v2 takes {glue:text}`of_v1_long:.2f` of v1's time on full
# batches of 1,024 tokens; MMAs alone would give 5/7. The difference is dQ in fp32.
# :::

# %%
from dataclasses import replace

import pandas as pd
import torch

from gdpa_kernels.calling.launch import launch
from gdpa_kernels.gdpa import gradients, v2_fused_backward, v2a_ordered_backward
from gdpa_kernels.gdpa.v2_fused_backward import Config
from gdpa_kernels.measuring import timing
from gdpa_kernels.measuring.inputs import make_inputs
from gdpa_kernels.measuring.workload import workload
from gdpa_kernels.report import charts, results, studies
from gdpa_kernels.report.chapter import Chapter

# %% tags=["parameters"]
mode = "replay"
device = "cpu"
data_dir = "data"

# %% tags=["remove-cell"]
chapter = Chapter("backward/v2_fused_backward", mode=mode, device=device, data_dir=data_dir)
V1, V2, V2A = "v1_tiled_backward", "v2_fused_backward", "v2a_ordered_backward"
LONG, CROSS = "gdpa-self-full-1024", "gdpa-cross-full-2048"

# %% tags=["remove-input"]
# | name: fig-five-ladder
# | caption: >
# |   The backward ladder up to v2 on gdpa-self-full-1024, kernel alone. Peers compute softmax.
# | alt: >
# |   Horizontal bars of TFLOP/s. v2 is about a quarter longer than v1 and FlashAttention-2;
# |   FlashAttention-4 and cuDNN are longer still. All end below the dashed line of the roofline.
chapter.ladder(V2, LONG, direction="backward")

# %% [markdown]
# ## What stays, what changes
#
# | | {doc}`v1 <v1_tiled_backward>` | v2 | v2a |
# |:--|:--|:--|:--|
# | kernels | one owns keys, one owns queries | one owns keys | the same |
# | launches | two | one | one for some blocks of keys |
# | MMAs of a tile | 4 and 3 | 5 | 5 |
# | dQ | written once, by its owner | added up in fp32, then rounded | the same, in order |
# | copies | `cp.async` | TMA | TMA |
# | same bits in every run | yes | no, beyond two blocks of keys | yes |
#
# The program of a block of keys has dS in registers. v1 multiplies it by Q for dK and forgets it;
# another kernel computes it again, for dQ. v2 multiplies it by K where it is. But a row of dQ is a
# sum over *all* keys, and the programs of its sequence each hold a part. So they add to memory, at
# the end of the loop:

# %% tags=["remove-input"]
chapter.code(v2_fused_backward.fused_kernel, "q = load_rows(q_desc", "if dk_desc is not None")

# %% [markdown]
# The first way is a TMA reduce-add: the tile goes through shared memory, and the copy engine sends
# it to L2, which adds. The second is `red.global.add.f32` of each thread, four elements at a time.
# Both are atomic for each element. Neither says when.
#
# ## Counting
#
# Bytes of one element of dQ, by who makes it; an addition sends 4 bytes to L2:
#
# | | zero fill | additions | rounding reads | written | sum |
# |:--|--:|--:|--:|--:|--:|
# | v1 | | | | 2 | 2 |
# | v2, 256 keys: two blocks of 128 | 4 | 8 | 4 | 2 | 18 |
# | v2, 1,024 keys: eight | 4 | 32 | 4 | 2 | 42 |
#
# Not all of that reaches memory: L2 adds by itself, and whether a row of dQ is still there when the
# next block of keys comes depends on who runs when. MMAs grow with keys, zero fill and rounding do
# not. So the fewer keys, the more of the pass is dQ.
#
# ## The order of additions
#
# Addition in floating point is commutative but not associative. dQ begins as 0. With two blocks of
# keys it becomes $(0 + a) + b$ or $(0 + b) + a$, the same number. With three there are
# $(a + b) + c$ and $(a + c) + b$, which round differently. So v2 should be deterministic up to 256
# keys, by no effort of its own.
#
# The emulator runs programs in the order of their numbers. Any other order is legal; renumbering
# them, one line of the kernel, gives one. Over all rotations, how many fp32 sums differ?

# %%
LINE = "    pid = tl.program_id(0)\n"


def sums(module, given):
    """dQ in fp32, before it is rounded."""
    return studies.backward(module, given).launched["round_kernel"].arguments["sums_ptr"]


differ = {}
for keys in (256, 384, 1024):
    given = studies.batch((64,), (keys,), head_dim=64)
    for name, module in (("v2", v2_fused_backward), ("v2a", v2a_ordered_backward)):
        plain, shares = sums(module, given), []
        for turn in range(1, keys // 128):
            number = f"    pid = (tl.program_id(0) + {turn}) % tl.num_programs(0)\n"
            other = studies.changed(module, (LINE, number))
            shares.append((sums(other, given) != plain).float().mean().item())
        differ[name, keys] = 100 * max(shares)
print(
    "\n".join(f"{name:4} {keys:5,} keys: {share:3.0f} %" for (name, keys), share in differ.items())
)
assert differ["v2", 256] == differ["v2a", 1024] == 0 < differ["v2", 384] < differ["v2", 1024]

# %% [markdown]
# Rounding to bf16 hides nearly all of it. A sum moves by about one unit in its 24th bit, and two
# bf16 numbers lie 65,536 times farther apart. How often does a sum of eight summands from N(0, 1)
# cross a boundary between them, from one random order to another?

# %%
make, crossed, drawn = torch.Generator().manual_seed(7), 0, 0
for _ in range(32):
    parts = torch.randn(8, 2**17, generator=make)
    one, two = (torch.zeros(2**17), torch.zeros(2**17))
    for i, j in enumerate(torch.randperm(8, generator=make)):
        one += parts[i]
        two += parts[j]
    crossed += int((one.bfloat16() != two.bfloat16()).sum())
    drawn += parts.shape[1]
simulated = 1e6 * crossed / drawn
print(f"{simulated:.0f} in a million")

# %% [markdown]
# ### An order for everybody: v2a
#
# If no two programs of a launch add to the same element, a launch has no order to lose. v2a gives
# each launch one block of keys of every sequence, and launches follow each other: v2's work with
# barriers across the whole device. Where a launch would have few programs it takes several blocks
# and gives each a *slice*, a dQ of its own, and PyTorch adds up the slices in a fixed order. The
# shapes of the call alone decide how many, so another GPU makes the same sums:

# %% tags=["remove-input"]
chapter.code(v2a_ordered_backward.count_slices)

# %% [markdown]
# ## Is it right?
#
# Lengths on both sides of a block, in the emulator, against fp64:

# %%
given = studies.batch((0, 1, 65, 130), (3, 0, 129, 257), heads=2, head_dim=64)
RUNGS = {
    "v2, by TMA": (v2_fused_backward, Config()),
    "v2, by threads": (v2_fused_backward, Config(by_tma=False)),
    "v2a, 2 slices": (v2a_ordered_backward, v2a_ordered_backward.Config(slices=2)),
}
for name, (module, config) in RUNGS.items():
    errors = studies.compare_gradients(studies.backward(module, given, config).gradients, given)
    print(f"{name:15} % of what is allowed: {errors['% of allowed'].round().to_dict()}")

# %% [markdown]
# Two ways to get it wrong: dQ that was not filled with zeros, which only numbers show, and a tile
# that is stored instead of added, for which the emulator does not wait for a wrong number:

# %%
ADD, STORE = "            add_rows(dq_desc,", "            store_rows(dq_desc,"
hasty = studies.changed(v2_fused_backward, ("q.new_zeros(q.shape", "q.new_full(q.shape, 1e3"))
stored = studies.changed(v2_fused_backward, (ADD, STORE))
try:
    studies.compare_gradients(studies.backward(hasty, given).gradients, given)
except AssertionError as error:
    print(error)
grad = studies.gradient(given)
print(studies.findings(lambda: stored.backward(grad, given), ["modelled"])[0])

# %% [markdown]
# ## Measurement
#
# Three batches: two published ones and a small one of eight sequences. The *parts* are timed by the
# same clock: zero fill, rounding, v2 without dQ, and v2 with its tiles stored instead of added,
# whose dQ is wrong on purpose. Then every variant runs five times on the same inputs, and its bits
# are compared with those of its first run.

# %%
SMALL = replace(workload("gdpa-self-full-2048"), name="gdpa-self-full-2048-batch8", batch=8)
SLICES = {LONG: (1, 2, 4), CROSS: (1, 2), SMALL.name: (1, 4, 16)}


def variants(name: str) -> list[tuple]:
    """(rung, variant, options) to be timed on a workload."""
    listed = [(V1, "default", {}), (V2, "by TMA", {"config": Config()})]
    listed.append((V2, "by threads", {"config": Config(by_tma=False)}))
    for n in SLICES[name]:
        config = v2a_ordered_backward.Config(slices=n)
        listed.append((V2A, f"{n} slice{'s' * (n > 1)}", {"config": config}))
    return listed


# %%
def parts(inputs) -> dict:
    """What is timed beside the rungs, by name."""
    grad, batch, dq = inputs.grad_out, inputs.batch(), torch.empty_like(inputs.q)
    total, factor = torch.zeros_like(dq, dtype=torch.float32), batch.scale * batch.output_scale
    rounding = (-(-dq.numel() // 4096),), dq.device, total, dq, factor, dq.numel()
    return {
        "zero fill": lambda: torch.zeros_like(total),
        "rounding": lambda: launch(gradients.round_kernel, *rounding, BLOCK=4096),
        "without dQ": lambda: v2_fused_backward.backward(grad, batch, needs=(False, True, True)),
        "stored": lambda: stored.backward(grad, batch),
    }


# %% tags=["hide-input"]
@chapter.measure
def _(session):
    samples = {}
    for work in (workload(LONG), workload(CROSS), SMALL):
        session.measure(work, variants(work.name), direction="backward")
        made = parts(make_inputs(work, device=session.device))
        timed = timing.sample_kernels(made, session.device, session.protocol)
        samples |= {(work.name, part): times for part, times in timed.items()}
        studies.repeat_backward(session, work, variants(work.name))
    session.tabulate("parts", ("workload", "part"), samples)


# %% tags=["remove-cell"]
own, parts_of = chapter.rows(variant=None), chapter.recorded("parts")
assert own["correct"].astype(bool).all(), "all variants with a time passed the check"
parts_of = parts_of.pivot_table("time_us", index="part", columns="workload", aggfunc="median")
us = pd.concat([chapter.times(columns="variant", variant=None).T, parts_of])
ratios = us / us.loc["by TMA"]
assert (ratios.loc["by threads"] - 1).abs().max() < 0.03, "the text: level"
long, cross, small = (ratios[x] for x in (LONG, CROSS, SMALL.name))
chapter.glue(
    of_v1_long=1 / long["default"], of_v1_cross=1 / cross["default"],
    price_long=100 * long["1 slice"] - 100, price_cross=100 * cross["1 slice"] - 100,
    small_1=small["1 slice"], small_4=small["4 slices"], small_16=small["16 slices"],
)  # fmt: skip

# %% tags=["remove-input"]
# | name: fig-five-variants
# | caption: >
# |   Time divided by that of v2 by TMA; less is better. Below the variants: v2 with its tiles
# |   stored or without dQ, and its zero fill and rounding alone.
# | alt: >
# |   A dot plot with a row for each variant and part, two marks a row. By threads and stored lie
# |   just below 1, v1 and v2a above; without dQ near a half; rounding and zero fill near 0.
titles = {"default": "v1", "by threads": "v2 by threads", "1 slice": "v2a, 1 slice"}
titles |= {"2 slices": "v2a, 2 slices", "stored": "v2 stored", "without dQ": "v2 without dQ"}
drawn = ratios[[LONG, CROSS]].drop("by TMA").dropna().rename(titles)
chart = charts.dots(drawn, xlabel="time / time of v2 by TMA")
chapter.figure(chart, measured=own, data=drawn.reset_index(names="what"))

# %% [markdown]
# On the long batch v2 takes {glue:text}`of_v1_long:.2f` of v1's time, with 256 keys
# {glue:text}`of_v1_cross:.2f`. TMA and threads are level: additions are additions, whoever sends
# them. On the small batch v2a with one slice, 16 launches of 32 programs on 132 SMs, takes
# {glue:text}`small_1:.1f` times v2's time. `count_slices` chooses 16 slices and
# {glue:text}`small_16:.2f` times; four would have taken {glue:text}`small_4:.2f`.
#
# ## Where the time of dQ goes
#
# The last two columns are modelled: the MMA at the rate of large matmuls, and 10 bytes for each
# element of dQ, those of zero fill and rounding, at the rate of a copy. The predictions date from
# when whole passes on full batches had been timed, and neither parts nor slices nor bits.

# %%
limits = results.ceilings(chapter.record())
split = {}
for title, x in {"self, 1,024 tokens": LONG, "cross, 256 keys": CROSS}.items():
    ms, work = us[x] / 1e3, workload(x)
    split[title] = ms[["by TMA", "without dQ", "zero fill", "rounding"]].to_dict() | {
        "the rest": ms["by TMA"] - ms[["without dQ", "zero fill", "rounding"]].sum(),
        "fifth MMA at the ceiling": work.flops("backward") / 5 / limits.tflops / 1e9,
        "10 bytes of dQ": 10 * work.total_q * 512 / limits.gbytes_per_s(1, 1) / 1e6,
    }
split = pd.DataFrame(split).T

# %% tags=["remove-input"]
chapter.table(split.round(2).reset_index(names="ms"), measured=own)
fixed = split["zero fill"] + split["rounding"]
share = 100 * fixed / split["by TMA"]
bytes_ratio = fixed / split["10 bytes of dQ"]
text = "Zero fill and rounding take what their bytes take at the rate of a copy, within 20 %."
chapter.predict(text, bytes_ratio.min(), least=0.8, most=1.2)
text = "Without dQ v2 takes 60 to 75 % of its time on the long batch."
chapter.predict(text, long["without dQ"], least=0.60, most=0.75)
text = "Stored instead of added changes the time by less than 5 %: what costs is the way to L2."
chapter.predict(text, min(long["stored"], cross["stored"]), least=0.95, most=1.05)
text = "Two slices instead of one cost v2a 8 to 18 % on the long batch."
chapter.predict(text, long["2 slices"] / long["1 slice"], least=1.08, most=1.18)
chapter.glue(
    fixed_long=share.iloc[0], fixed_cross=share.iloc[1],
    mma=(split["fifth MMA at the ceiling"] / split["the rest"]).max(),
)  # fmt: skip

# %% [markdown]
# Two are broken: dQ costs more than predicted, and so does a slice. Zero fill and rounding are
# {glue:text}`fixed_long:.0f` % of v2's time on the long batch and {glue:text}`fixed_cross:.0f` %
# with 256 keys. *The rest* is the fifth MMA with its additions. The MMA alone would be
# {glue:text}`mma:.2f` of that; most of it is the way to L2 and what waits for it.
# {doc}`v4_warp_specialized_backward` overlaps the additions with the MMAs of the next step;
# {doc}`v5_short_kv_backward` makes them superfluous.
#
# ## The surprise: bits
#
# Five runs each, on the same inputs:

# %% tags=["remove-input"]
bits = chapter.recorded("bits")
bits["ppm"] = 1e6 * bits["different"] / bits["elements"]
most = bits.groupby(["impl", "gradient", "workload"])[["ppm", "most_apart"]].max()
assert set(most[most["ppm"] > 0].index.droplevel(2)) == {(V2, "dq")}, "nothing else ever differs"
text = "With 256 keys dQ of v2 is the same in every run: elements that differ, in a million."
chapter.predict(text, most["ppm"][V2, "dq", CROSS], most=0, form=".0f")
text = "With 1,024 keys it is not; at most as many differ as in random orders of eight summands."
chapter.predict(text, most["ppm"][V2, "dq", LONG], least=1e-6, most=simulated, form=".0f")
(error,) = (r.error for r in chapter.record().rows if (r.workload, r.variant) == (LONG, "by TMA"))
chapter.glue(apart=most["most_apart"][V2, "dq", LONG], error=error.max_abs)

# %% [markdown]
# dK and dV of v2 never differ, nor any gradient of v1 and v2a. Two runs of v2 are at most
# {glue:text}`apart:.2g` apart, and each is up to {glue:text}`error:.2g` from the exact gradient. So
# the spread is no question of accuracy. It is one of debugging: a training run that cannot be
# repeated bit by bit cannot be bisected. The price of v2a is {glue:text}`price_long:.0f` % on the
# long batch, and {glue:text}`price_cross:.0f` % with 256 keys, where it buys nothing.
#
# ## Exercises
#
# :::{exercise} Three blocks
# :label: ex-five-three
#
# With two blocks of keys there is one result, whatever the order. How many different results can
# three blocks give at most, how many eight? *(paper, ten minutes)*
# :::
#
# :::{solution} ex-five-three
# :class: dropdown
#
# The first two summands commute, so of the 3! orders two at a time agree: three results, and it
# only matters which block comes last. In general n! / 2, for eight 20,160. Most of them round to
# the same few numbers.
# :::
#
# :::{exercise} No fp32 at all
# :label: ex-five-bf16
#
# The published kernel adds into dQ in bf16 {cite}`adsmodelkernellibrary`, which saves the rounding
# pass and half of the additions' bytes. Simulate eight summands from N(0, 1): by what factor does
# the root mean square error of the sum grow, against fp32 sums that are rounded once? *(code, ten
# minutes, no GPU)*
# :::
#
# :::{solution} ex-five-bf16
# :class: dropdown
#
# A rounding error is proportional to what is rounded, and a sum of k summands is as large as the
# root of k. Their squares add up: 8 for the summands, 2 + 3 + .. + 8 = 35 for the sums on the way,
# against 8 for one rounding at the end. The root of 43 / 8 is 2.3, and a simulation says about 2.4.
# In general the factor grows with the root of the number of blocks. Up to two blocks the order
# still does not matter.
# :::
#
# :::{exercise} When is v1 the better choice?
# :label: ex-five-memory
#
# How many GB does the fp32 dQ of full batches of 2,048 tokens take, and how many would four slices?
# Name two situations in which seven MMAs are better than five. *(paper, five minutes)*
# :::
#
# :::{solution} ex-five-memory
# :class: dropdown
#
# 1,152 × 2,048 × 4 × 128 elements of 4 bytes: 4.8 GB, with four slices 19.3. v1 wins where memory
# is short; and where the same bits are wanted with few programs, so that v2a needs many launches or
# many slices. v1 also takes what v2 does not: fp32, other strides, head_dim 256.
# :::
#
# ## Takeaways
#
# - A sum whose parts live in different programs has a price in bytes: a zero fill, an addition for
#   each part, a rounding. Count them before counting MMAs.
# - MMAs grow with keys, dQ does not. The fewer keys, the more of the pass is dQ.
# - Nondeterminism begins at three summands. Two commute.
