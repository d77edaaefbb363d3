# ---
# jupyter:
#   kernelspec: {display_name: Python 3, language: python, name: python3}
# measures: true
# ---

# %% [markdown]
# # Forward v4: warp-specialized
#
# What does a kernel gain when the warps that compute no longer issue copies?
#
# :::{admonition} In this chapter (30 minutes)
# You will give each {term}`role` its registers, see on a timeline what fills the tensor core, and
# separate what a block costs from what a tile costs. Back to back on the H200 a block of 128 keys
# takes {glue:text}`block_v4:.2f` µs of an SM in forward v4 and {glue:text}`block_v2:.2f` µs in
# forward v2, but a tile also pays a fixed {glue:text}`fixed_v4:.1f` instead of
# {glue:text}`fixed_v2:.1f` µs. The variants were timed {ref}`in bursts <rule-scope>` only.
# :::

# %% tags=["hide-input"]
import numpy as np
import pandas as pd

from _lib import studies
from gdpa_kernels.gdpa.device import activations
from gdpa_kernels.gdpa.ladder import v2_tma, v4_warp_specialized
from gdpa_kernels.gdpa.ladder.v4_warp_specialized import Config
from gdpa_lab.measuring.workloads import workload
from gdpa_lab.report import charts, results
from gdpa_lab.report.chapter import Chapter

# %% tags=["parameters"]
mode = "replay"
device = "cpu"
data_dir = "data"

# %% tags=["remove-cell"]
chapter = Chapter("forward/v4_warp_specialized", mode=mode, device=device, data_dir=data_dir)
V2, V4 = "v2_tma", "v4_warp_specialized"
FULL = {n // 128: f"gdpa-self-full-{n}" for n in (256, 512, 1024, 2048)}  # by blocks of a tile
SHOWN = [V2, V4, "cudnn"]
us = chapter.times("forward/results", together=[V2, V4], direction="forward")[SHOWN]
ratio = us[V4] / us[V2]
of_full = {"workload": [*FULL.values()], "impl": SHOWN, "scope": "sustained"}
of_full = chapter.rows("forward/results", direction="forward", **of_full)
on_sm = of_full.pivot(index="workload", columns="impl", values="time_us_p50").loc[[*FULL.values()]]
on_sm = (on_sm[SHOWN] * 132 / (1152 * 4)).set_axis(list(FULL)).div(list(FULL), axis=0)  # of a tile
peak = results.ceilings(chapter.record(of_full["record"].max()), "sustained").tflops
ideal = 4 * 128**3 * 132 / peak / 1e6  # of a block, in µs of an SM

# %% tags=["remove-input"]
# | name: fig-v4-ladder
# | caption: >
# |   **Forward v4 on the ladder.** Time of each rung on gdpa-self-full-1024, back to back; each
# |   tick leads to its chapter. Dashed: libraries.
# | alt: >
# |   An axis of milliseconds with a tick for each rung, that of v4 thick, and dashed lines for the
# |   libraries.
chapter.ladder("v4_warp_specialized")

# %% tags=["remove-input"]
# | name: fig-v4-blocks
# | caption: >
# |   **Short tiles are dearer in forward v4 than in forward v2, long ones are not.** Time of a tile
# |   on its SM, back to back, per block of 128 keys, on gdpa-self-full-256 to 2048. Less is better.
# |   Dashed: a block at the rate of the measured matmul.
# | alt: >
# |   Three lines fall toward the dashed one. v4 begins highest and meets v2; cuDNN is lowest.
chapter.figure(
    charts.lines(
        on_sm.div(on_sm.index, axis=0), xlabel="blocks of 128 keys in a tile",
        ylabel="µs of an SM per block, back to back", highlight=[V2, V4], log="x",
        levels={"matmul": ideal}, names={V2: "forward v2", V4: "forward v4", "cudnn": "cuDNN"},
    ),
    measured=of_full,
)  # fmt: skip

# %% [markdown]
# ## What changes
#
# | | {doc}`forward v2 <v2_tma>` | forward v4 |
# |:--|:--|:--|
# | warps | all share 128 rows | two consumers own 64 rows each, a producer copies |
# | copies | TMA, issued by a thread that also computes | TMA, issued by the producer |
# | barriers | made by the compiler | five arrays of mbarriers, made by us |
# | CTAs per SM | two | one |
#
# The roles are those of {doc}`first_tlx_kernel`, on jagged rows now, whose tails {ref}`TMA clips
# <rule-masks>`. `async_task` gets `registers`, what each thread of a consumer asks for. K and V
# have rings of their own: a consumer lets go of K as soon as its scores are complete, and of V
# after P V:

# %% tags=["remove-input"]
chapter.code(v4_warp_specialized.math, "for block in", "store_rows")
chapter.roles(V4)

# %% [markdown]
# The later kernels write the first three lines of this loop as `stage = k.wait(block)`, and the
# producer's as `stage = k.acquire(block)`.
#
# ## Prediction
#
# A block of 128 keys asks for {glue:text}`mma:,.0f` cycles of the tensor cores, for the 128 rows of
# a tile, and for {glue:text}`tanh:,.0f` cycles of {term}`MUFU`, which evaluates tanh
# ({doc}`planning` derives both).

# %% tags=["remove-cell"]
_, mufu = activations.INSTRUCTIONS["gelu_tanh"]
mma, tanh = 4 * 128 * 128 * 128 / 4096, mufu * 128 * 128 / 16
chapter.glue(mma=mma, tanh=tanh, in_step=mma + tanh, in_step_share=100 * mma / (mma + tanh))

# %% [markdown]
# A consumer itself works as before. Its MMA, its activation and its next MMA follow each other. An
# MMA can overlap only with the activation of the *other* consumer, and that is left to chance. If
# the two run in step, a block takes {glue:text}`in_step:,.0f` cycles, and the tensor cores work in
# {glue:text}`in_step_share:.0f` % of them. Perfectly out of step only the tensor cores count. The
# two CTAs that v2 has on an SM have the same limits. So long tiles gain nothing and short ones
# lose, since the SM stands still at both ends of a tile. (Prototypes had shown both.)
#
# The third prediction is about registers. By {ref}`setmaxnreg <rule-registers>` the producer keeps
# 24 and each consumer gets 240, where an even share is 168 ({doc}`../operator/machine`). S, the
# {term}`accumulator` and P take 160, so moving registers should not help yet.

# %% tags=["remove-cell"]
EMPTY = "gdpa-self-half-dense-512"  # shown in the chapter of forward v6
MAKE_Q = "    q = tlx.local_alloc("
EARLY = (MAKE_Q, "    if first_row >= len_q:\n        return\n" + MAKE_Q)
VARIANTS = {
    "128 keys": Config(),
    "128 keys, 168 registers": Config(registers=168),
    "128 keys, 152 registers": Config(registers=152),
    "64 keys, 4 stages": Config(BLOCK_N=64, num_stages=4),
    "64 keys, 2 stages": Config(BLOCK_N=64, num_stages=2),
}


@chapter.measure
def _(session):
    listed = [(V2, "default", {}), *((V4, x, {"config": c}) for x, c in VARIANTS.items())]
    for name in ("gdpa-self-full-512", "gdpa-self-full-2048", "gdpa-cross-full-1024"):
        session.measure(workload(name), listed)
    early = {"config": Config(), "module": studies.changed(v4_warp_specialized, EARLY)}
    session.measure(workload(EMPTY), [*listed[:2], (V4, "early return", early)])


# %% tags=["remove-input"]
p50 = chapter.times(columns="variant", variant=None).T
to_v4 = p50.div(p50.loc["128 keys"])
short = ratio[[name for name in ratio.index if "cross" in name or name == FULL[2]]]
with_168, spilling = (to_v4.loc[f"128 keys, {n} registers"].drop(EMPTY) for n in (168, 152))
chapter.predict(
    "From 1,024 keys on, v4 takes the time of v2 within 10 %: the largest difference.",
    100 * (ratio[[FULL[8], FULL[16]]] - 1).abs(), most=10, form=".0f", unit=" %",
)  # fmt: skip
chapter.predict("With 256 keys v4 is slower than v2: the smallest v4 / v2.", short, least=1)
chapter.predict("168 registers a thread are at most 5 % slower than 240.", with_168, most=1.05)
chapter.predictions()

# %% [markdown]
# ## A timeline
#
# The emulator shows the five arrays of barriers at work on one tile of 128 rows and 512 keys:

# %% tags=["remove-cell"]
tile = studies.batch((128,), (512,))
trace = studies.timeline(v4_warp_specialized, tile, Config())
core, end = studies.tensor_core(trace), max(event.end for event in trace.events)
chapter.glue(busy=core["busy"], ends=100 - core["busy"] * core["span"] / end)

# %% tags=["remove-input"]
# | name: fig-v4-timeline
# | caption: >
# |   **The second consumer starts half a block late, and that fills the tensor core.** Forward v4
# |   on one tile of 128 rows and 512 keys. Roles above, engines below; an arrow leads from the
# |   arrival that completed a phase to the wait that it ended. Modelled cycles.
# | alt: >
# |   Five lanes. load issues copies of Q and two blocks of K and V, then waits. math[0] alternates
# |   between waits and activations; math[1] does the same half a block later. The tensor core
# |   begins late and then has almost no gap.
chapter.figure(trace, emulated="gdpa_kernels/gdpa/ladder/v4_warp_specialized.py, modelled schedule")

# %% tags=["remove-input"]
studies.stepper(
    {"forward v4": trace}, "forward-v4_warp_specialized-steps", title="Forward v4, step by step"
)

# %% [markdown]
# From its first {term}`MMA` to its last the tensor core is busy {glue:text}`busy:.0f` % of the
# time, by luck: the model serves one MMA after the other, so the second consumer starts half a
# block late and stays there. During {glue:text}`ends:.0f` % of the tile no MMA runs at all; in v2 a
# second CTA would use that time.
#
# ## Is it right?
#
# Lengths around the edges of a {term}`warp group` and a tile in the emulator, against fp64:

# %% tags=["hide-input"]
edges = studies.batch(studies.EDGES, heads=2)
checked = studies.comparison(v4_warp_specialized, edges)
print(f"largest error: {(checked['largest error'] / checked['allowed']).max():.2f} of the allowed")

# %% [markdown]
# ## The surprise: a tile has a fixed price
#
# With 256 keys, self or cross, v4 takes {glue:text}`short_min:.2f` to {glue:text}`short_max:.2f`
# times the time of v2 (in bursts), and it is behind cuDNN on all full batches. A line through the
# four points of {numref}`fig-v4-blocks` says why. Say that a tile of $n$ blocks takes $a + b n$,
# where $b$ is the price of a block and $a$ what the tile costs besides:


# %% tags=["remove-cell"]
def line(times: pd.Series) -> pd.Series:
    """a and b, by least squares of relative errors, and the largest of these in percent."""
    terms = np.stack([np.ones(len(times)), times.index], axis=1) / times.to_numpy()[:, None]
    a, b = np.linalg.lstsq(terms, np.ones(len(times)), rcond=None)[0]
    return pd.Series({"a": a, "b": b, "error": 100 * np.abs(terms @ (a, b) - 1).max()})


prices, steps = on_sm.apply(line).T, on_sm.diff().iloc[1:]
cheaper = 100 * (1 - steps[V4] / steps[V2])  # from each length to the next
assert prices["a"][V4] > 1.2 * prices["a"][V2] and prices["b"][V4] < prices["b"][V2], "the text"
assert cheaper.min() > 0 and (on_sm[V4] / on_sm[V2]).iloc[-1] < 1.01, "the text, the caption"
assert on_sm[V4].iloc[0] > 1.1 * on_sm[V2].iloc[0], "the caption: short tiles"
assert not (us[V4] <= us["cudnn"]).any() and not (on_sm[V4] <= on_sm["cudnn"]).any(), "the text"
chapter.glue(**{f"block_{x}": prices["b"][impl] for x, impl in (("v2", V2), ("v4", V4))})
chapter.glue(**{f"fixed_{x}": prices["a"][impl] for x, impl in (("v2", V2), ("v4", V4))})
chapter.glue(short_min=short.min(), short_max=short.max(), spilling=spilling.min())
chapter.glue(cheaper=f"{cheaper.min():.0f} to {cheaper.max():.0f}")

# %% tags=["remove-input"]
shown = prices.assign(half=prices["a"] / prices["b"])[["a", "b", "half", "error"]]
shown = shown.round({"a": 1, "b": 2, "half": 1, "error": 1}).rename(columns={
    "a": "tile, µs", "b": "block, µs", "half": "blocks for half the rate", "error": "off, %",
})  # fmt: skip
chapter.table(
    shown.rename(index={V2: "forward v2", V4: "forward v4", "cudnn": "cuDNN"}).reset_index(
        names="kernel"
    ),
    measured=of_full, name="tab-v4-prices",
    caption="**Forward v4 has cheaper blocks than forward v2, and the dearest tiles.** Of lines "
    "through all four lengths, back to back; last: by how much a line misses the worst of them.",
)  # fmt: skip
assert prices["a"].idxmax() == V4, "the caption: dearest"

# %% [markdown]
# With one CTA per SM no other CTA hides the beginning and the end of a tile. From each length to
# the next v4 adds {glue:text}`cheaper` % less time than v2. The rate follows $n / (n + a/b)$, so
# $a/b$ is the number of blocks at which half of the rate is reached.
#
# ### What the compiler made of it

# %% tags=["remove-cell"]
listed = {
    "forward v2, 128 keys": (V2, v2_tma.Config(BLOCK_N=128)),
    "forward v4, 240 registers": (V4, Config()),
    "forward v4, 168 registers": (V4, Config(registers=168)),
    "forward v4, 152 registers": (V4, Config(registers=152)),
}
built = studies.compiled(listed, ("HGMMA", "UTMALDG", "USETMAXREG"))

# %% tags=["remove-input"]
short_names = {"registers": "at launch", "HGMMA": "MMA", "UTMALDG": "TMA loads"}
chapter.table(
    built.drop(columns="USETMAXREG").rename(columns=short_names),
    caption="**Two consumers make room for 128 keys; 152 registers are too few.** Registers per "
    "thread at launch, bytes spilled, whether MMAs are serialised, and instructions.",
    compiled="for sm_90a when this page was built",
)
assert list(built["spilled (B)"] > 0) == [True, False, False, True], "the text says so"

# %% [markdown]
# What makes room for 128 keys is the split into two consumers. One warp group with all 128 rows
# {term}`spills <spill>`. Two with 64 rows do not, even with an even share of the registers. With
# 152 registers ptxas spills, and it also *serialises* the MMAs: it waits for each one right after
# issuing it ({term}`serialised wgmma`). v4 then takes at least {glue:text}`spilling:.1f` times as
# long.

# %% tags=["remove-input"]
chapter.profile("v3_persistent", "v4_warp_specialized", workload="gdpa-self-full-512")

# %% [markdown]
# ## Exercises
#
# {doc}`Write it </exercises>`: `make exercise NAME=predict`.
#
# :::{exercise} Half the head
# :label: ex-v4-head-dim
#
# Repeat the count of this chapter for head_dim 64. Between which two shares of the peak must v4
# lie, and what would you rather optimise there? *(paper, five minutes)*
# :::
#
# :::{solution} ex-v4-head-dim
# :class: dropdown
#
# The MMAs halve to 1,024 cycles; the activation keeps its 1,024 cycles of {term}`MUFU`. In step
# that is 50 % of the peak. Perfectly out of step, tensor cores and MUFU are both always busy, and
# any other instruction is one too many. Then a cheaper activation is worth more than better
# overlap.
# :::
#
# ## Takeaways
#
# - Warp specialization separates what a kernel computes from when it asks for data. By itself it
#   overlaps no MMA with an activation, since a consumer still does one thing after another.
# - With one CTA per SM, prologue and epilogue are time of the whole SM. Measure what a tile costs
#   besides its blocks before you make it bigger.
# - Count registers before you move them, and let the compiler confirm the count.
