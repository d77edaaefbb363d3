# ---
# jupyter:
#   kernelspec: {display_name: Python 3, language: python, name: python3}
# measures: true
# ---

# %% [markdown]
# # Backward v2: fused
#
# A program that owns keys has dS, all that dQ needs. But the rows of dQ belong to every program of
# the sequence. What does it cost to add to them in memory?
#
# :::{admonition} In this chapter (30 minutes)
# You will count the bytes of a sum across programs, and tell from the number of summands whether it
# is deterministic. Backward v2 is {glue:text}`loops:.2f` times as fast as v1 back to back on full
# batches of 1,024 tokens, where saving two MMAs of seven would give 1.40. The chapter's other times
# are {ref}`in bursts <rule-scope>`.
# :::

# %% tags=["hide-input"]
import pandas as pd
import torch

from _lib import rare_charts, studies
from gdpa_kernels.calling.launch import launch
from gdpa_kernels.gdpa.device import gradients
from gdpa_kernels.gdpa.kernels import v2a_ordered_backward
from gdpa_kernels.gdpa.ladder import v2_fused_backward
from gdpa_lab.measuring import timing
from gdpa_lab.measuring.workloads import workload
from gdpa_lab.report import results
from gdpa_lab.report.chapter import Chapter

# %% tags=["parameters"]
mode = "replay"
device = "cpu"
data_dir = "data"

# %% tags=["remove-cell"]
chapter = Chapter("backward/v2_fused_backward", mode=mode, device=device, data_dir=data_dir)
V1, V2, V2A = "v1_tiled_backward", "v2_fused_backward", "v2a_ordered_backward"
LONG, CROSS = "gdpa-self-full-1024", "gdpa-cross-full-2048"
loops = chapter.times("backward/results", scope="sustained", direction="backward").loc[LONG]
assert loops[V1] / loops[V2] < 7 / 5, "the text: MMAs alone would give more"
chapter.glue(loops=loops[V1] / loops[V2])

# %% tags=["remove-input"]
# | name: fig-five-ladder
# | caption: >
# |   **Backward v2 gains less than two saved matmuls promise.** Time of each rung on gdpa-self-
# |   full-1024, back to back; each tick leads to its chapter. Dashed: libraries.
# | alt: >
# |   An axis of milliseconds with a tick for each rung and dashed lines for the libraries. v2
# |   lies left of v1; cuDNN and two newer FlashAttentions lie further left.
chapter.ladder(V2, "backward")

# %% [markdown]
# ## What stays, what changes
#
# | | {doc}`backward v1 <v1_tiled_backward>` | backward v2 | backward v2a |
# |:--|:--|:--|:--|
# | kernels | one owns keys, one owns queries | one owns keys | the same |
# | launches | two | one | one for each block of keys |
# | MMAs of a tile | 4 and 3 | 5 | 5 |
# | dQ | written once, by its owner | added up in fp32, then rounded | the same, in order |
# | copies | `cp.async` | TMA | TMA |
# | same bits in every run | yes | no, beyond two blocks of keys | yes |
#
# The program of a block of keys has dS in registers, and multiplies it by K on the spot. The
# programs of a sequence add their parts of dQ in memory, at the end of the loop:

# %% tags=["remove-input"]
chapter.code(v2_fused_backward.fused_kernel, "q = load_rows(q_desc", "elif dq_ptr")

# %% [markdown]
# `add_rows` is a {term}`TMA` *reduce-add*. The tile goes through {term}`shared memory` to L2, which
# does the addition. Each element is added atomically, but the order of the programs is left open.
#
# ## Counting bytes
#
# Bytes per element of dQ; an addition sends 4 bytes to L2:
#
# | | zero fill | additions | rounding reads | written | sum |
# |:--|--:|--:|--:|--:|--:|
# | backward v1 | | | | 2 | 2 |
# | backward v2, 256 keys: two blocks of 128 | 4 | 8 | 4 | 2 | 18 |
# | backward v2, 1,024 keys: eight blocks | 4 | 32 | 4 | 2 | 42 |
#
# Not all of that reaches memory: L2 may still hold a row of dQ when the next block of keys comes.
#
# ## Nondeterminism begins at three summands
#
# Floating-point addition is commutative but not associative. dQ begins as 0. With two blocks of
# keys it becomes $(0 + a) + b$ or $(0 + b) + a$, the same number. With three there are $(a + b) +
# c$ and $(a + c) + b$, which round differently. So v2 should be deterministic up to 256 keys. The
# emulator runs programs in the order of their numbers. Over all rotations of the numbers, the
# largest share of fp32 sums that differ:

# %% tags=["remove-input"]
LINE = "    pid = tl.program_id(0)\n"


def sums(module, inputs):
    """dQ in fp32, before it is rounded."""
    return studies.backward(module, inputs).launched["round_kernel"].arguments["sums_ptr"]


differ = {}
for keys in (256, 384, 1024):
    ragged, shares = studies.batch((64,), (keys,), head_dim=64), []
    for turn in range(1, keys // 128):
        number = f"    pid = (tl.program_id(0) + {turn}) % tl.num_programs(0)\n"
        other = sums(studies.changed(v2_fused_backward, (LINE, number)), ragged)
        shares.append((other != sums(v2_fused_backward, ragged)).float().mean().item())
    differ[keys] = 100 * max(shares)
    print(f"{keys:5,} keys: {differ[keys]:3.0f} %")
assert differ[256] == 0 < differ[384] < differ[1024]

# %% [markdown]
# Rounding to bf16 hides nearly all of it: neighbouring bf16 numbers lie 65,536 units of fp32 apart.
# **v2a** gives each launch one block of keys of every sequence and runs the launches one after
# another, so the order is fixed.
#
# ## Is it right?
#
# In the emulator, against fp64; then with a tile that is stored instead of added, to which the
# emulator objects before any number is wrong:

# %% tags=["remove-input"]
ragged = studies.batch((0, 1, 65, 130), (3, 0, 129, 257), heads=2, head_dim=64)
for name, module in {"v2": v2_fused_backward, "v2a": v2a_ordered_backward}.items():
    errors = studies.compare_gradients(studies.backward(module, ragged).gradients, ragged)
    most = errors["% of allowed"].max()
    print(f"backward {name}, largest error: {most:.0f} % of what is allowed")

stored = studies.changed(v2_fused_backward, ("    add_rows(dq_desc,", "    store_rows(dq_desc,"))
print(studies.findings(lambda: stored.backward(studies.gradient(ragged), ragged), ["modelled"])[0])

# %% [markdown]
# ## dQ costs more than predicted
#
# We also timed *parts* of v2: the zero fill, the rounding, the pass without dQ, and a version,
# wrong on purpose, that stores its tiles of dQ instead of adding them. Every variant then ran five
# times, and its bits were compared.

# %% tags=["remove-cell"]
VARIANTS = [
    (V1, "default", {}),
    (V2, "by TMA", {}),
    (V2A, "1 slice", {"config": v2a_ordered_backward.Config(slices=1)}),
]


def parts(inputs) -> dict:
    grad, batch, dq = inputs.grad_out, inputs.batch(), torch.empty_like(inputs.q)
    total, factor = torch.zeros_like(dq, dtype=torch.float32), batch.scale * batch.output_scale
    rounding = (-(-dq.numel() // 4096),), dq.device, total, dq, factor, dq.numel()
    return {
        "zero fill": lambda: torch.zeros_like(total),
        "rounding": lambda: launch(gradients.round_kernel, *rounding, BLOCK=4096),
        "without dQ": lambda: v2_fused_backward.backward(grad, batch, needs=(False, True, True)),
        "stored": lambda: stored.backward(grad, batch),
    }


@chapter.measure
def _(session):
    samples = {}

    def time_parts(inputs):
        timed = timing.sample_kernels(parts(inputs), session.device, session.protocol)
        samples.update({(inputs.workload.name, part): times for part, times in timed.items()})
        session.tabulate("parts", ("workload", "part"), samples)

    for work in (workload(LONG), workload(CROSS)):
        session.measure(work, VARIANTS, direction="backward")
        session.launch("parts", work, [V2], time_parts, direction="backward")
        studies.repeat_backward(session, work, VARIANTS)


rows, timed = chapter.rows(variant=None), chapter.recorded("parts")
timed = timed.pivot_table("time_us", index="part", columns="workload", aggfunc="median")
us = pd.concat([chapter.times(columns="variant", variant=None).T, timed])
long, cross = ((us / us.loc["by TMA"])[x] for x in (LONG, CROSS))
fixed = us.loc["zero fill"] + us.loc["rounding"]
added = us.loc["by TMA"] - us.loc["without dQ"] - fixed  # the fifth MMA and the additions
limits, copied, mma = results.ceilings(chapter.record()), {}, {}
for x in (LONG, CROSS):  # modelled, in microseconds
    copied[x] = 10 * workload(x).total_q * 512 / limits.gbytes_per_s(1, 1) / 1e3
    mma[x] = workload(x).flops("backward") / 5 / limits.tflops / 1e6

# %% tags=["remove-input"]
# | name: fig-five-parts
# | caption: >
# |   **Most of what dQ costs is its way to L2, and with few keys also zero fill and rounding.**
# |   Backward v2 in bursts, on full batches of 1,024 tokens and with 2,048 queries on 256 keys.
# | alt: >
# |   Two stacked bars. With 1,024 keys the pass without dQ is about half, the fifth MMA and the
# |   additions most of the rest. With 256 keys zero fill and rounding are a quarter.
split = us.loc[["without dQ", "zero fill", "rounding"], [LONG, CROSS]].T / 1e3
split["fifth MMA, additions"] = added / 1e3
looks = dict(zip(split, ("filled", "hatched", "hollow", "pale"), strict=True))
split.index = ["1,024 keys", "256 keys"]
chart = rare_charts.stacked(split, xlabel="ms", looks=looks, hue=V2)
chapter.figure(chart, measured=rows, data=split.reset_index(names="batch"))

# %% tags=["remove-cell"]
assert rows["correct"].astype(bool).all(), "all variants with a time passed the check"
chapter.glue(
    mma=(pd.Series(mma) / added[[*mma]]).max(),
    price_long=100 * long["1 slice"] - 100, price_cross=100 * cross["1 slice"] - 100,
    fixed_long=100 * fixed[LONG] / us[LONG]["by TMA"],
    fixed_cross=100 * fixed[CROSS] / us[CROSS]["by TMA"],
)  # fmt: skip
chapter.predict(
    "Zero fill and rounding take what their 10 bytes per element take in a copy, within 20 %.",
    fixed[[*copied]] / pd.Series(copied), least=0.8, most=1.2, shown=False,
)  # fmt: skip
chapter.predict(
    "Without dQ, backward v2 takes 60 to 75 % of its time with 1,024 keys.",
    long["without dQ"], least=0.60, most=0.75,
)  # fmt: skip
chapter.predict(
    "Storing tiles of dQ instead of adding them changes the time by less than 5 %, since what "
    "costs is the way to L2.",
    min(long["stored"], cross["stored"]), least=0.95, most=1.05,
)  # fmt: skip
bits = chapter.recorded("bits")
bits["ppm"] = 1e6 * bits["different"] / bits["elements"]
most = bits.groupby(["impl", "gradient", "workload"])[["ppm", "most_apart"]].max()
assert set(most[most["ppm"] > 0].index.droplevel(2)) == {(V2, "dq")}, "nothing else ever differs"
chapter.predict(
    "With 256 keys, dQ of backward v2 is the same in every run: elements that differ, in a "
    "million.",
    most["ppm"][V2, "dq", CROSS], most=0, form=".0f",
)  # fmt: skip
(error,) = (r.error for r in chapter.record().rows if (r.workload, r.variant) == (LONG, "by TMA"))
ppm, apart = most.loc[(V2, "dq", LONG)]
chapter.glue(apart=apart, ppm=ppm, error=error.max_abs)

# %% [markdown]
# Zero fill and rounding are {glue:text}`fixed_long:.0f` % of v2's time with 1,024 keys and
# {glue:text}`fixed_cross:.0f` % with 256. Of the last part the MMA is at most
# {glue:text}`mma:.2f`; most of it is the path to L2. {doc}`Backward v4
# <v4_warp_specialized_backward>` overlaps the additions with the next step's MMAs, and
# {doc}`backward v5 <v5_short_kv_backward>` needs none.

# %% tags=["remove-input"]
chapter.predictions()

# %% [markdown]
# ## What differs between two runs
#
# On the GPU, with 1,024 keys, up to {glue:text}`ppm:.0f` elements of dQ in a million differ between
# runs. dK and dV of v2 never do, nor does any gradient of v1 and v2a. Two runs of v2 are at most
# {glue:text}`apart:.2g` apart, and each is up to {glue:text}`error:.2g` from the exact gradient.
# Backward v2a takes {glue:text}`price_long:.0f` % more time with 1,024 keys, and
# {glue:text}`price_cross:.0f` % with 256, where it buys nothing.

# %% tags=["remove-input"]
chapter.profile("v2_fused_backward", workload="gdpa-self-full-512", direction="backward")

# %% [markdown]
# ## Exercises
#
# {doc}`Write it </exercises>`: `make exercise NAME=dq`.
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
# The first two summands commute, so only n! / 2 orders can differ: three for three blocks, where it
# matters which block comes last, and 20,160 for eight. Most of them round to the same few numbers.
# :::
#
# :::{exercise} No fp32 at all
# :label: ex-five-bf16
#
# The published kernel adds into dQ in bf16 {cite}`adsmodelkernellibrary`, which saves the rounding
# pass and half of the additions' bytes. Simulate eight summands from N(0, 1): by what factor does
# the error of the sum grow, against fp32 sums that are rounded once? *(paper, then five lines of
# code)*
# :::
#
# :::{solution} ex-five-bf16
# :class: dropdown
#
# A rounding error is proportional to what is rounded, and a sum of k summands grows like the root
# of k. The squares of the errors add up: 8 for the summands and 2 + 3 + .. + 8 = 35 for the partial
# sums, against 8 for one rounding at the end. The root of 43 / 8 is 2.3; a simulation gives about
# 2.4.
# :::
#
# :::{exercise} When is backward v1 the better choice?
# :label: ex-five-memory
#
# How many GB does the fp32 dQ of full batches of 2,048 tokens take? How many programs has a launch
# of v2a on eight such sequences, with one block of keys each? Name two situations in which seven
# MMAs are better than five. *(paper, five minutes)*
# :::
#
# :::{solution} ex-five-memory
# :class: dropdown
#
# 1,152 × 2,048 × 4 × 128 elements of 4 bytes: 4.8 GB. A launch has 8 × 4 = 32 programs for 132 SMs.
# v1 wins where memory is short, and where a small batch must give the same bits.
# :::
#
# :::{exercise} The planted bug
# :label: ex-five-bug
#
# Someone wants to save the zero fill: the program of the *first* block of keys stores its tiles of
# dQ, all others add theirs. (a) Say in one sentence why that is wrong, and which orders of programs
# hide it. (b) Make the change with `studies.changed` (the store is `store_rows`; the first block
# has `first_key == 0`) and let the emulator look at it under ten schedules with `studies.findings`.
# What does it report, and would a comparison of results report it too? (c) Give a version that is
# right, and its price. *(emulator, forty minutes, as in an exam)*
# :::
#
# :::{solution} ex-five-bug
# :class: dropdown
#
# (a) An addition that comes before the store is lost, or added to what the memory held before. If
# the first block always runs first, as in the order of program numbers, no result is wrong. (b) The
# emulator reports a race between the store and the additions, in every schedule, since no barrier
# orders them. A comparison finds it only if some addition came first, and on a GPU a program with a
# low number nearly always starts early. (c) One launch for the first block of every sequence, then
# one for the others, whose additions the end of the first launch orders. It saves the 4
# bytes of zero fill per element, and costs a launch and its tail.
# :::
#
# ## Takeaways
#
# - A sum whose parts live in different programs has a price in bytes: a zero fill, an addition for
#   each part, a rounding. Zero fill and rounding hurt where keys are few.
# - Nondeterminism begins at three summands. Two commute.
