# ---
# jupyter:
#   kernelspec: {display_name: Python 3, language: python, name: python3}
# measures: true
# ---

# %% [markdown]
# # Profiles of the rungs
#
# Times say which kernel is faster. What were its warps doing meanwhile?
#
# :::{admonition} In this chapter (10 minutes)
# You will read counters of Nsight Compute for one call of each rung, and see which guesses of the
# chapters they decide. At 512 tokens the tensor cores are busy {glue:text}`v1_tensor:.0f` % of the
# time in forward v1 and {glue:text}`v8_tensor:.0f` % in forward v8, and
# {glue:text}`v4_tensor:.0f` % in backward v4.
# :::

# %% tags=["hide-input"]
import pandas as pd

from gdpa_lab.measuring.workloads import workload
from gdpa_lab.report import profiles
from gdpa_lab.report.chapter import Chapter

# %% tags=["parameters"]
mode = "replay"
device = "cpu"
data_dir = "data"

# %% tags=["remove-cell"]
chapter = Chapter(profiles.CHAPTER, mode=mode, device=device, data_dir=data_dir)
V8, V4_BACKWARD = "v8_own_waits", "v4_warp_specialized_backward"
LADDER = {
    "forward": [
        "v0_eager", "v1_tiled", "v2_tma", "v3_persistent", "v4_warp_specialized", "v5_pingpong",
        "v6a_persistent", "v6b_stream", "v6_short_kv", "v7_packed", V8,
    ],
    "backward": ["v1_tiled_backward", "v2_fused_backward", "v2a_ordered_backward", V4_BACKWARD],
}  # fmt: skip
BLOCK = ["v0_flash", "v1_one_tile", "v2_slab", "v3_warp_specialized"]
ROTARY = ["v4_rotary", "v4a_turning_role"]
PLAN = {
    "gdpa-self-full-512": LADDER,
    "gdpa-cross-full-512": {
        "forward": ["v6_short_kv", V8], "backward": [V4_BACKWARD, "v5_short_kv_backward"]
    },
    "gdpa-cross-full-1024-kv128-d64": {"backward": [V4_BACKWARD, "v6_one_tile_backward"]},
    "gdpa-self-full-512-b256-d256": {"forward": [V8], "backward": ["v7_wide_backward"]},
    "gdpa-self-full-2048": {"forward": ["v7_packed", V8], "backward": [V4_BACKWARD]},
    "gdpa-self-lognormal-6000-b48-causal": {"forward": [V8], "backward": [V4_BACKWARD]},
    "block-fill70-4000": {"forward": BLOCK, "backward": BLOCK},
    "block-rotary-1735537": {"forward": ROTARY, "backward": ROTARY},
}  # fmt: skip


@chapter.measure
def _(session):
    calls = [
        (workload(name), way, impls) for name, ways in PLAN.items() for way, impls in ways.items()
    ]
    for of, way, impls in calls:
        session.measure(of, impls, direction=way)
    session.profile([(of, way, impl) for of, way, impls in calls for impl in impls])


# %% [markdown]
# (profile-counters)=
# ## How to read them
#
# A profiler starts each kernel alone, several times, once for each group of counters, with cold
# caches. So a duration here is *profiled*, which is not *measured*: it has no neighbours, no
# repetition and a clock of its own, {glue:text}`slowest_clock:,.0f` to
# {glue:text}`fastest_clock:,.0f` MHz in these launches. Compare within a table, not with other
# pages.
#
# - *tensor*, *DRAM*: busy, in percent of the launch's time. Hopper counts MMAs of a
#   warp group there.
# - *issue*: slots in which a scheduler issued an instruction, in percent of the time in which its
#   SM had a warp.
# - *could issue*: warps of a scheduler that had an instruction ready, on average.
#   Where it is far below one, instructions wait for each other and not for a slot.
# - *waits*: the greatest reason for which warps did not issue, in percent of their time, producers
#   included. *Memory or mbarrier*, the profiler's long scoreboard, is in kernels with roles above
#   all the wait at an {term}`mbarrier`; *fixed latency* is that of arithmetic.
#
# The rungs' chapters, but for forward v0, show their own counters under *Profile*.

# %% tags=["remove-cell"]
counted = chapter.recorded("profiles")
holders = chapter.holders("profiles")
LIMITS = counted["sm_hz"].min() / 1e6, counted["sm_hz"].max() / 1e6
chapter.glue(slowest_clock=LIMITS[0], fastest_clock=LIMITS[1])


def of_calls(way: str, names: list[str]) -> pd.DataFrame:
    """`profiles.kernels` of the workloads, which the index names where there are several."""
    parts = []
    for name in names:
        rows = counted[(counted["direction"] == way) & (counted["workload"] == name)]
        part = profiles.kernels(rows)
        if len(names) > 1:
            part.index = [f"{rung}, {name}" for rung in part.index]
        parts.append(part)
    return pd.concat(parts)


def short(name: str) -> str:
    """A rung by its number, and its kernel where there are several."""
    call, _, work = name.partition(", ")
    rung, _, kernel = call.partition(": ")
    kernel = "matmul" if kernel.startswith("nvjet") else kernel.removesuffix("_kernel")
    parts = rung.partition("_")[0], kernel.removeprefix("vectorized_"), work
    return ", ".join(filter(None, parts))


def show(kernels: pd.DataFrame, caption: str) -> None:
    """Show the columns that fit a page."""
    frame = pd.DataFrame(
        {
            "rung": kernels.index.map(short),
            "µs": kernels["duration_ns"] / 1e3,
            "tensor %": kernels["tensor_percent"],
            "issue %": kernels["issue_percent"],
            "could issue": kernels["eligible_warps"],
            "L2 hits %": kernels["l2_hit_percent"],
            "DRAM %": kernels["dram_percent"],
            "waits": [profiles.waits(row, 1) for _, row in kernels.iterrows()],
        }
    )
    digits = {"µs": 0, "tensor %": 0, "issue %": 0, "could issue": 2, "L2 hits %": 0,
              "DRAM %": 0}  # fmt: skip
    chapter.table(frame, caption=caption, digits=digits, data=counted, profiled=holders)


forward = of_calls("forward", ["gdpa-self-full-512"])
backward = of_calls("backward", ["gdpa-self-full-512"])
others = {}
for way in ("forward", "backward"):
    names = [name for name in PLAN if name.startswith("gdpa") and way in PLAN[name]][1:]
    rows = of_calls(way, names)
    rows = rows[~rows.index.str.contains("elementwise|round_")]  # of backward v4 and v7
    rows.index = rows.index.str.replace(": backward_kernel|full-|gdpa-|self-", "", regex=True)
    others[way] = rows
block = {way: of_calls(way, ["block-fill70-4000", "block-rotary-1735537"])
         for way in ("forward", "backward")}  # fmt: skip
v7, v8 = (forward.loc[name] for name in ("v7_packed", V8))
v4 = backward.loc[f"{V4_BACKWARD}: backward_kernel"]
slow = forward.loc[["v0_eager: elementwise_kernel", "v0_eager: index_elementwise_kernel"]]
assert slow["issue_percent"].min() > 66 and slow["dram_percent"].max() < 34, "copies of rows"
assert v8["barrier"] < v7["barrier"] and v8["tensor_percent"] > v7["tensor_percent"], "the text"
roles = {"v3_warp_specialized", "v4a_turning_role"}
for way, fast in (("forward", {"v1_one_tile", "v2_slab", *roles}), ("backward", roles)):
    dram = block[way]["dram_percent"]
    near = {name.partition(",")[0] for name in dram.index[dram > 80]}
    assert {name.partition(":")[0] for name in near} - {"v0_flash"} == fast, "the captions"
chapter.glue(
    v1_tensor=forward.loc["v1_tiled", "tensor_percent"], v7_tensor=v7["tensor_percent"],
    v8_tensor=v8["tensor_percent"], v4_tensor=v4["tensor_percent"],
    v7_barrier=v7["barrier"], v8_barrier=v8["barrier"],
)  # fmt: skip

# %% [markdown]
# ## Forward

# %% tags=["remove-input"]
show(forward, "**From rung to rung the tensor cores wait less.** gdpa-self-full-512.")

# %% [markdown]
# *Why v0's copies cost* ({doc}`../forward/v0_eager`). Its matmuls and most passes along the scores
# come near the rate of DRAM. The kernels that touch rows of q, k, v and the output do not: three
# copies that exchange dimensions, three fills with zeros behind the gathers, and the gather of the
# output. Their issue slots are two thirds full or more while DRAM is at most a third busy: they
# handle elements of two bytes one by one and compute the address of each.
#
# *Whether v8's queue runs empty less often* ({doc}`../forward/v8_own_waits`). It does: barriers,
# waits for MMAs among them, take {glue:text}`v8_barrier:.0f` instead of
# {glue:text}`v7_barrier:.0f` % of the warps' time, and the tensor cores are busy
# {glue:text}`v8_tensor:.0f` instead of {glue:text}`v7_tensor:.0f` %.
#
# ## Backward

# %% tags=["remove-input"]
show(backward, "**No backward rung keeps the tensor cores busy.** gdpa-self-full-512.")

# %% [markdown]
# The fill with zeros and the rounding of the fp32 sum stream near DRAM's rate: what they cost is
# their bytes. The {doc}`lab notes <../../notes/profiles>` have samples of where the roles of
# backward v4 wait, and the {doc}`notes on the power wall <../../notes/at_the_wall>` two changes
# that these counters suggested and measurements refuted.
#
# ## Other shapes

# %% tags=["remove-input"]
show(others["forward"], "**Forward, long sequences fill the tensor cores, short keys do not.**")
show(
    others["backward"],
    "**Backward, long sequences fill them to two thirds.** Without fill and rounding of dQ.",
)
tensor = {way: rows["tensor_percent"] for way, rows in others.items()}
assert tensor["forward"].idxmax() == "v8_own_waits, 2048", "the caption"
assert 60 < tensor["backward"].max() < 70, "the caption"

# %% [markdown]
# ## Block attention

# %% tags=["remove-input"]
show(block["forward"], "**Forward, all but v0 and v4 are near the rate of DRAM.**")
show(block["backward"], "**Backward, only the warp roles of v3 and v4a come near it.**")
