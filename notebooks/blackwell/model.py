# ---
# jupyter:
#   kernelspec: {display_name: Python 3, language: python, name: python3}
# measures: false
# ---

# %% [markdown]
# # What a B200 should show
#
# One published kernel on one GPU reaches {glue:text}`best:,.0f` TFLOP/s on one shape of a full
# batch and {glue:text}`worst:,.0f` on another. Why?
#
# :::{admonition} In this chapter (25 minutes)
# You will be able to count what a tile costs each unit of an SM, and to get the published forward
# rates on full batches to {glue:text}`rms_ledger:.1f` % (root mean square) with one constant from
# outside, where the {term}`roofline` misses them by {glue:text}`rms_roofline:.0f` %. Then the same
# count predicts our own kernels on a B200.
# :::

# %% tags=["hide-input"]
import numpy as np
import pandas as pd

from gdpa_lab.measuring import cost_model
from gdpa_lab.measuring.roofline import Ceilings, bracket
from gdpa_lab.measuring.workloads import workload
from gdpa_lab.report import charts, claims, clock_free, predictions, results
from gdpa_lab.report.chapter import Chapter
from notebooks.blackwell import _tile_law, _two_ctas

# %% tags=["parameters"]
mode = "replay"
device = "cpu"
data_dir = "data"

# %% tags=["remove-cell"]
chapter = Chapter("blackwell/model", mode=mode, device=device, data_dir=data_dir)
every = claims.published_figures().query("not suspect")
bars = every[(every["kernel"] == "cutedsl_gdpa") & (every["direction"] == "forward")]
bars = bars.set_index("workload")["tflops"]
full = [name for name in bars.index if "full" in name]


def rms(ratios):
    """Root mean square of the relative errors, in percent."""
    return 100 * np.sqrt(np.mean(np.square(np.asarray(ratios) - 1)))


# %% tags=["remove-cell"]
def modelled(names, design=cost_model.PUBLISHED, ceilings=cost_model.ASSUMED):
    """Rates of the unit ledger and of the roofline, TFLOP/s."""
    rates = {
        name: (
            cost_model.cost(workload(name), design, ceilings).tflops,
            bracket(workload(name), "forward", ceilings).tflops_at_lower,
        )
        for name in names
    }
    return pd.DataFrame.from_dict(rates, orient="index", columns=["unit ledger", "roofline"])


over = modelled(bars.index).div(bars, axis=0)

length = over.index.str.extract(r"(\d+)$", expand=False).astype(int)
over = over.assign(kind=over.index.str.rstrip("0123456789"), length=length)
over = over.sort_values(["kind", "length"], ascending=[False, True])[["unit ledger", "roofline"]]
short = over.set_axis(over.index.str.removeprefix("gdpa-"))

# %% tags=["remove-input"]
# | name: fig-model-bars
# | caption: >
# |   **The ledger of units is near the published rates, the roofline is not.** Modelled rate over
# |   published rate of the GDPA forward kernel, NVIDIA B200, 750 W. Dashed: the model is right.
# |   Both models have the same {ref}`ceilings <rule-ceiling>`, assumed from other people's reports.
# | alt: >
# |   A dot plot over twelve workloads. Points of the unit ledger lie near one, except half-full
# |   batches of 256 at 0.78. Points of the roofline lie between 0.94 and 1.77, most well above one.
chapter.figure(
    charts.dots(short, xlabel="modelled / published",),
    data=over.reset_index(names="workload"), modelled="the unit ledger and the roofline under "
    "assumed ceilings, over the published bars of a B200",
)  # fmt: skip
chapter.glue(
    rms_ledger=rms(over.loc[full, "unit ledger"]), rms_roofline=rms(over.loc[full, "roofline"]),
    cross_roof=100 * (over.loc["gdpa-cross-full-1024", "roofline"] - 1),
    half_256=100 * (1 - over.loc["gdpa-self-half-dense-256", "unit ledger"]),
    long=100 * (1 - over.loc["gdpa-self-full-2048", "unit ledger"]),
)  # fmt: skip

# %% [markdown]
# ## A tile costs four units clocks, and each can be counted
#
# For 128 queries and 128 keys of head_dim 128:
#
# - *Tensor cores.* Two {term}`MMAs <MMA>` are 8.4 million FLOPs. An SM of a B200 does 8,192 of them
#   a clock, one of an H200 4,096.
# - *The port of {term}`shared memory`* moves 128 bytes a clock, on both: operands of MMAs, tiles
#   that TMA writes, staged outputs.
# - *{term}`MUFU`* gives 16 results a clock, on both; one `tanh` a score makes 16,384.
# - *Issue slots.* Four schedulers issue an instruction a clock each.
#
# In the published design a {term}`CTA` has two tiles of 128 queries. S reads Q (32 KiB) and K (32),
# P V reads V (32). K and V are written once for both tiles: 32 KiB for each. That is 128 KiB, or
# 1,024 clocks. And every 128 queries add 96 KiB, however many keys there
# are: Q in, O out of registers and out to memory. In our b5 and b6 two CTAs share K and V
# ({doc}`pairs_and_columns`).

# %% tags=["remove-input"]
ours = {x.impl: x.design for x in predictions.EXPECTED["forward"]}
designs = [cost_model.V8_STREAM, cost_model.PUBLISHED, ours["b4_mixed"], ours["b5_cta_pair"],
           ours["b6_pair_stream"]]  # fmt: skip
columns = {"mma": "MMA", "smem": "shared memory", "mufu": "MUFU", "issue": "issue"}
counted = pd.DataFrame([design.pairs for design in designs])[list(columns)].rename(columns=columns)
counted.insert(0, "design", [f"{design.name} ({design.chip.name[7:]})" for design in designs])
counted["and for 128 queries"] = [design.queries["smem"] for design in designs]
counted["design"] = [
    "forward v8, H200", "published, B200", *(f"forward b{n}, B200" for n in (4, 5, 6))
]  # fmt: skip
assert len(counted) == 5, "a name for each"
chapter.table(
    counted.rename(columns={"and for 128 queries": "128 queries"}),
    caption="**On Blackwell shared memory takes as long as the MMAs, unless two CTAs share them.** "
    "Clocks of each unit for a tile of 128 x 128 pairs, and of shared memory for 128 queries.",
    name="tab-model-ledger", digits=dict.fromkeys([*columns.values(), "128 queries"], 0),
    modelled="counted from the operands",
)  # fmt: skip

# %% [markdown]
# On Hopper the MMAs take longest. In the published design shared memory takes as long as they do,
# *and then* come Q and O. With 256 keys that is 2 × 1,024 + 768 clocks of the port against 2,048 of
# the tensor cores. The roofline, which counts only matmuls and memory, is
# {glue:text}`cross_roof:.0f` % too high there.
#
# ## Clocks are not seconds
#
# A B200's nominal clock is 1,965 MHz, and at 750 W it does not hold it. So the ledger takes the
# clock at which all tensor cores together would deliver the rate of a large matmul, back to back:
# {glue:text}`clock_h200:.2f` GHz on our H200 (measured ceiling, 700 W) and
# {glue:text}`clock_b200:.2f` GHz on a B200 (assumed ceiling, 750 W).

# %% tags=["remove-cell"]
run = chapter.record("forward/results")
ceilings = results.ceilings(run, "sustained")
matmul = next(c for c in run.ceilings if c.kind == "matmul" and c.scope == "sustained")
nvml = matmul.load.sm_clock_mhz / 1e3  # GHz, of the H200
clock = cost_model.H200.clock_ghz(ceilings.tflops)
chapter.glue(
    best=bars.max(), worst=bars[full].min(), assumed=cost_model.ASSUMED.tflops,
    nvml=nvml, clock_h200=clock,
    clock_b200=cost_model.B200.clock_ghz(cost_model.ASSUMED.tflops), in_use=100 * clock / nvml,
)  # fmt: skip

# %% [markdown]
# That clock is too low: on the H200 NVML shows {glue:text}`nvml:.2f` GHz, so a matmul has
# {glue:text}`in_use:.0f` % of the tensor cores busy. This ledger bounds what a kernel gets beside a
# matmul, not what the hardware could do. The ceiling, {glue:text}`assumed:,.0f` TFLOP/s, is our
# choice between two reports for such a machine; the copies are an H200's shares of the nominal
# rate. A modelled time is that of the busiest unit, or of the bytes if it is longer.
#
# ## The ledger holds where we can measure
#
# First {doc}`v8 <../forward/v8_own_waits>` on our H200, with the ceilings of its own record:

# %% tags=["remove-cell"]
rates = chapter.times("forward/results", value="tflops", direction="forward", scope="sustained")
rates, of_v8 = rates["v8_own_waits"][full], {}
v8_rows = chapter.rows("forward/results", impl="v8_own_waits", scope="sustained", workload=full)
for name, record_id in v8_rows.set_index("workload")["record"].items():
    kind = cost_model.V8_RESIDENT if workload(name).max_seqlen_k <= 256 else cost_model.V8_STREAM
    limits = results.ceilings(chapter.record(record_id), "sustained")
    ledger, rate = cost_model.cost(workload(name), kind, limits), rates[name]
    of_v8[name] = ledger.bound, ledger.tflops, rate, rate / ledger.tflops
of_v8 = pd.DataFrame.from_dict(
    of_v8, orient="index", columns=["bound", "ledger", "measured", "measured / ledger"]
)

# %% tags=["remove-input"]
# | name: fig-model-v8
# | caption: >
# |   **Forward v8 stays below its ledger on every full batch.** Its rate back to back on an H200,
# |   in percent of the rate that its ledger allows, and the unit that decides. Dashed: the ledger.
# | alt: >
# |   Eight bars, all short of the dashed line: from three quarters of it with 256 keys to nearly
# |   all of it with 2,048.
named = of_v8.index.str.removeprefix("gdpa-") + ": " + of_v8["bound"].replace("mma", "MMAs")
chapter.figure(
    charts.bars(100 * of_v8["measured / ledger"].set_axis(named), xlabel="% of the ledger",
                highlight=[named.iloc[3]], levels={"ledger": 100}),
    measured=v8_rows, modelled="the ledger under the ceilings of the same record",
)  # fmt: skip
share = of_v8["measured / ledger"]
assert share.max() < 1, "the caption: on every full batch"
assert share.idxmax() == "gdpa-self-full-2048" and share.max() > 0.94, "the alt text"
assert "cross" in share.idxmin() and 0.7 < share.min() < 0.8, "the alt text"
chapter.predict(
    "No forward kernel is faster than its modelled bound (the largest measured / ledger).", share,
    most=1, shown=False,
)  # fmt: skip
chapter.predict(
    "Forward v8 comes within a quarter of its modelled bound (the smallest measured / ledger).",
    share, least=0.75, shown=False,
)  # fmt: skip
chapter.glue(eta=share.mean(), eta_sd=share.std())

# %% [markdown]
# Forward v8 reaches {glue:text}`eta:.3f` of its ledger on average, with a standard deviation of
# {glue:text}`eta_sd:.3f`, a property of *our code*.
#
# ## The published bars follow without a fit
#
# {numref}`fig-model-bars` applies the same count to the published design. With the two reported
# ceilings, {glue:text}`low_ceiling:,.0f` and {glue:text}`high_ceiling:,.0f` TFLOP/s, the error on
# full batches is {glue:text}`rms_low:.1f` and {glue:text}`rms_high:.1f` %.

# %% tags=["remove-cell"]
for end, tflops in (("low", 1059), ("high", 1088)):
    limits = Ceilings(float(tflops), cost_model.ASSUMED.copies)
    off = modelled(full, ceilings=limits)["unit ledger"] / bars[full]
    chapter.glue(**{f"{end}_ceiling": tflops, f"rms_{end}": rms(off)})

# %% tags=["remove-cell"]
chapter.predict(
    "Without a fit the ledger finds the published rates on full batches to 10 % (root mean "
    "square).",
    rms(over.loc[full, "unit ledger"]), most=10, form=".1f", unit=" %",
)  # fmt: skip

# %% [markdown]
# ## Where the ledger fails
#
# *Half-full batches of 256*, {glue:text}`half_256:.0f` % too low. The ledger pads a sequence to the
# two tiles of a CTA; a kernel may skip an empty second tile. From 512 on the padding is right.
#
# *2,048 full tokens*, {glue:text}`long:.0f` % too low. The published rate exceeds the assumed
# ceiling itself. Either an attention kernel, with its pauses, runs at a higher clock than a matmul,
# or the ceiling was higher that day. Only a record with both in one run can decide.
#
# *The backward pass.* The same count, 448 KiB per tile of pairs, is within a quarter for long
# sequences and misses many microseconds for each 128 keys.
#
# Where we cannot count tiles, a law fits three constants of a kernel, the times of 128 queries, 128
# keys and a tile of pairs, to its full batches ({doc}`lab notes <../../notes/blackwell>`). It
# explains one kernel and predicts no other; {doc}`flash_attention_4` uses one.

# %% tags=["remove-cell"]
laws = _tile_law.published(every)
chapter.predict(
    "A law fitted to GDPA's forward pass on full batches finds the half-full ones to 10 % (the "
    "largest error).",
    laws.loc[("forward", "GDPA"), [f"half {n}" for n in (256, 512, 1024, 2048)]].abs(),
    most=10, form=".0f", unit=" %",
)  # fmt: skip

# %% [markdown]
# ## The first registration: a rate for every kernel and workload
#
# `data/predictions/b200.csv` says for each published workload and each of our Blackwell rungs which
# share of the ceilings it will reach. It is the ledger's, times {glue:text}`pairs_share:.2f` for
# pairs of CTAs, {glue:text}`two_share:.2f` for two tiles on one CTA and less for what idles between
# tiles. `python -m gdpa_lab predictions` prints all {glue:text}`rows:.0f` and judges each measured
# row.

# %% tags=["remove-input"]
# | name: fig-model-registered
# | caption: >
# |   **Pairs of CTAs should be fastest in the forward pass.** Rates that are registered for a B200
# |   and their intervals, with 1,024 queries and as many keys (self) or 256 keys (cross), under the
# |   assumed ceilings.
# | alt: >
# |   A dot with an error bar in each row. The forward kernels b1 to b6 rise from row to row on self
# |   and cross, b7 is not above b6; the backward kernels lie lower. Most intervals are wider than
# |   the differences.
table = predictions.judged(predictions.registered(), data_dir)
wanted = table[table["workload"].isin(["gdpa-self-full-1024", "gdpa-cross-full-1024"])]
wanted = wanted.sort_values(["direction", "workload", "impl"], ascending=[False, False, True])
wanted.index = [
    f"{row.direction} {row.impl[:2]}, {row.workload.split('-')[1]}" for row in wanted.itertuples()
]
forward = wanted[wanted["direction"] == "forward"]["predicted"]
assert forward.idxmax()[8:10] in ("b5", "b6"), "the caption says so"
chapter.figure(
    charts.dots(
        wanted[["predicted"]], xlabel="TFLOP/s", levels={},
        low=wanted[["from"]].set_axis(["predicted"], axis=1),
        high=wanted[["to"]].set_axis(["predicted"], axis=1), form=",.0f",
    ),
    data=table,
    modelled="TFLOP/s, registered 2026-11-22, backward b3-6, b7 2026-11-27; all rows in the data",
)  # fmt: skip
*_, b3, _, b5, _, _ = predictions.EXPECTED["forward"]
chapter.glue(pairs_share=b5.centre, two_share=b3.centre, rows=len(table))

# %% [markdown]
# ## The second registration: ratios, at the clock of the row
#
# The first has three faults: that clock, intervals typed by hand, and {glue:text}`rows:.0f` rows
# that share a dozen causes. `data/predictions/b200_2.csv` stands beside it. A row is judged back to
# back at the clock that NVML shows for it, so a power limit drops out. The intervals come from all
# our kernels with warp roles on an H200, and ratios of two kernels are registered too
# ({numref}`tab-pairs-ratios`).

# %% tags=["remove-cell"]
second = clock_free.judged(data_dir)
gains = _two_ctas.published(data_dir)
chapter.glue(
    low=second["low"][0], high=second["high"][0],
    **{f"{kind}_{way}": gains.loc[way, kind] for way in gains.index for kind in gains},
)  # fmt: skip
assert abs(gains.loc["forward", "published"] - gains.loc["forward", "ledger"]) < 0.02, "the text"
assert gains.loc["backward", "published"] - 1 < 0.26 * (gains.loc["backward", "ledger"] - 1)

# %% [markdown]
# A single rate says little: any of our kernels may land between {glue:text}`low:.2f` and
# {glue:text}`high:.2f` of the ledger. A ratio says more: if b5 is not faster than b4 with 256 keys,
# the port is refuted. We give the model up if 13 or fewer of 19 lie inside; chance does that in
# under 1 %.
#
# Others have published what a second CTA gains. In the forward pass, FA4 with two over TLX with one
# ([#2560](https://github.com/facebookexperimental/triton/pull/2560)),
# {glue:text}`published_forward:.2f`, the ledger is right with {glue:text}`ledger_forward:.2f`. In
# the backward pass of FA4 ([#2280](https://github.com/Dao-AILab/flash-attention/pull/2280)),
# {glue:text}`published_backward:.2f`, it is wrong with {glue:text}`ledger_backward:.2f`. At one
# clock that contradicts the port, but we do not know the clocks.
#
# ## Surprise: a faster tensor core made shared memory the bound
#
# A kernel bound by its MMAs on Hopper is bound by shared memory here. The published bars show it:
# with 256 keys the rate does not rise from 512 to 2,048 queries, as it would if launches and tails
# were the cost.

# %% tags=["remove-input"]
chapter.predictions()

# %% [markdown]
# ## Exercises
#
# :::{exercise} Keys that pay for Q and O
# :label: ex-model-keys
#
# From how many keys on do Q and O cost the published design less than 5 % of its MMAs? *(paper)*
# :::

# %% tags=["remove-cell"]
blocks = cost_model.PUBLISHED.queries["smem"] / (0.05 * cost_model.PUBLISHED.pairs["mma"])
chapter.glue(blocks=blocks, keys_needed=128 * np.ceil(blocks))

# %% [markdown]
# :::{solution} ex-model-keys
# :class: dropdown
#
# 768 clocks for 128 queries, against 1,024 for each 128 keys: 768 / (0.05 × 1,024) =
# {glue:text}`blocks:.0f` blocks, {glue:text}`keys_needed:,.0f` keys.
# :::
#
# :::{exercise} What would refute the port
# :label: ex-model-refute
#
# Someone says that b5 will be no faster than b4 with 256 keys, and that the bars are explained by
# start and end of tiles. Which single measurement on a B200 decides? *(paper)*
# :::
#
# :::{solution} ex-model-refute
# :class: dropdown
#
# b4 without its output store and with one Q for all items: the port has 96 KiB less for each 128
# queries, while tiles begin and end as before. By the ledger the rate with 256 keys rises from 73 %
# of the MMAs' to all of it; by the other account it stays. Its results are wrong, so this is
# a test, not a row of a record.
# :::
#
# ## Takeaways
#
# - Count clocks of every unit before you look for stalls, and read the clock from NVML.
# - A count with one constant from outside can be tried on two machines.
# - A prediction counts if it is in a file before the measurement, with an interval and a command.
