# ---
# jupyter:
#   kernelspec: {name: python3, display_name: Python 3}
# measures: true
# ---

# %% [markdown]
# # How we measure, and what we would have claimed otherwise
#
# When may one kernel be called faster than another?
#
# :::{admonition} In this chapter (25 minutes)
# You will check a kernel against a budget computed from its inputs, time it so that the number
# means something, and say which differences are noise. A kernel that competes with seven copies of
# itself differs from them by at most {glue:text}`noise_floor:.1f` %; in two records of one system
# it differs by up to {glue:text}`between_worst:.0f` %. A wrong protocol errs by a factor of
# {glue:text}`protocol_worst:.0f` up or {glue:text}`protocol_lowest:.1f` down.
# :::

# %%
from dataclasses import replace

import pandas as pd
import torch
from IPython.display import display

from gdpa_kernels import emulator
from gdpa_kernels.gdpa import reference, v1_tiled, v2_tma
from gdpa_kernels.measuring import record as records
from gdpa_kernels.measuring import system as systems
from gdpa_kernels.measuring import testing, timing
from gdpa_kernels.measuring.inputs import make_inputs
from gdpa_kernels.measuring.workload import workload
from gdpa_kernels.report import charts, needs, page, repeats, results, studies
from gdpa_kernels.report.chapter import Chapter
from gdpa_kernels.report.house import RUNG_COLOURS

# %% tags=["parameters"]
mode = "replay"
device = "cpu"
data_dir = "data"

# %% tags=["remove-cell"]
chapter = Chapter("measuring/protocol", mode=mode, device=device, data_dir=data_dir)

# %% [markdown]
# ## One rung, timed in nine ways
#
# v2 as replicates of itself, then under our protocol at two batch sizes and in seven wrong ways,
# one after another, so that a few percent may be drift:

# %%
SHORT, LONG = "gdpa-self-full-256", "gdpa-self-full-1024"
BARE, HOST = "no L2 flush, no lead, no warm-up", "host clock, no synchronisation"


def call(session, work, zeros=False, **changes):
    batch = replace(make_inputs(work, device=session.device).batch(), **changes)
    if zeros:
        batch = replace(batch, **{x: torch.zeros_like(getattr(batch, x)) for x in "qkv"})
    return lambda: v2_tma.forward(batch)


def plan(session):
    for name in (SHORT, LONG):
        session.measure(workload(name), [("v2_tma", f"replicate {i}", {}) for i in range(8)])
    cold = replace(session.protocol, interleaved=False)
    warm = replace(cold, l2_flush_bytes=0)
    bare = replace(warm, pause_us=0.0, warmup=0)
    samples = {}
    for work in map(workload, (SHORT, LONG)):
        small = replace(work, batch=32)
        for what, used, changes, how in (
            ("ours", work, {}, cold),
            ("all inputs zero", work, {"zeros": True}, cold),
            ("scale 1, as published", work, {"scale": 1.0}, cold),
            ("no L2 flush", work, {}, warm),
            (BARE, work, {}, bare),
            ("ours, batch 32", small, {}, cold),
            ("no L2 flush, batch 32", small, {}, warm),
            (f"{BARE}, batch 32", small, {}, bare),
        ):
            function = {"x": call(session, used, **changes)}
            times = timing.sample_kernels(function, session.device, how)["x"]
            samples[work.name, what, used.flops("forward")] = times
        function = {"x": call(session, work)}
        times = timing.sample_calls(function, session.device, in_a_row=30, rounds=1)["x"]
        samples[work.name, HOST, work.flops("forward")] = times
    session.tabulate("protocols", ("workload", "protocol", "flops"), samples)


chapter.measure(plan)
compared = chapter.compare(plan)
found = repeats.apparent(chapter.recorded("protocols"))
us, rate, relative, low, high = (found[column].unstack() for column in found)

# %% tags=["remove-input"]
# | name: fig-measuring-protocols
# | caption: >
# |   Apparent rate of v2 under our protocol, at two batch sizes, and in seven wrong ways, relative
# |   to ours at the same batch (logarithmic). Bars from p20 to p80.
# | alt: >
# |   A row for each protocol, two marks a row. Most lie within a few percent of one. Without lead
# |   and warm-up the small batch of length 256 falls to a quarter. The host clock lies far right,
# |   above six and above sixty.
run = chapter.record()
order = list(dict.fromkeys(protocol for protocol, _ in found.index))
chart = charts.dots(
    relative.loc[order], xlabel="apparent rate / ours", low=low.loc[order], high=high.loc[order],
    colours=(RUNG_COLOURS[3], RUNG_COLOURS[2]), log=True,
)  # fmt: skip
chapter.figure(chart, data=found.reset_index(), measured=[run.id])

# %%
ceilings = results.ceilings(run)
machine = systems.load(chapter.data_dir / "systems" / f"{run.system}.json")
small_bytes = [workload(name).bytes("forward") * 32 / 1152 for name in (SHORT, LONG)]
gain = 100 * (relative - 1)
assert small_bytes[0] < machine.l2_bytes < small_bytes[1], "the text says which batch fits"
assert (rate.loc[HOST] > ceilings.tflops).all(), "the text: beyond the ceiling"
assert gain.loc[["scale 1, as published", "no L2 flush"]].abs().max(axis=None) < 2
chapter.glue(
    protocol_worst=relative.max().max(), protocol_lowest=1 / relative.min().min(),
    host_us=us.loc[HOST, SHORT], host_long=rate.loc[HOST, LONG], ceiling=ceilings.tflops,
    small_us=us.loc["ours, batch 32", SHORT], bare_us=us.loc[f"{BARE}, batch 32", SHORT],
    small_mib=small_bytes[0] / 2**20, warm=gain.loc["no L2 flush, batch 32", SHORT],
    zeros=gain.loc["all inputs zero", LONG], rest=-gain.loc[BARE, LONG],
    watts=machine.power_limit_w,
)  # fmt: skip

# %% [markdown]
# - *The host clock without synchronisation* times the enqueueing, {glue:text}`host_us:.0f` µs
#   whatever the kernel does afterwards, and prints up to {glue:text}`host_long:,.0f` TFLOP/s on a
#   machine whose ceiling is {glue:text}`ceiling:.0f`.
# - *No lead* is the same mistake in reverse. At batch 32 and length 256 the kernel takes
#   {glue:text}`small_us:.0f` µs, less than its launch. The first event fires while the host is
#   still preparing the call, and {glue:text}`bare_us:.0f` µs are measured. Short kernels look alike
#   under such a protocol, good or bad.
# - *No flush* does next to nothing to the published batch, which is much larger than any cache. At
#   batch 32 and length 256 all tensors are {glue:text}`small_mib:.0f` MiB, stay in L2, and the
#   kernel gains {glue:text}`warm:.0f` %.
# - *Zeros* gain {glue:text}`zeros:.1f` % at 1,024 with the same instructions. Less power and a
#   higher clock are the likely reason ({doc}`roofline`). Scale 1, as published, changes hardly
#   anything.
# - *Back to back*, without flush, lead or warm-up, the long kernel is **slower** by
#   {glue:text}`rest:.1f` %: the pauses of our protocol are also rests for a chip at its power
#   limit.
#
# ## Right before fast
#
# A tolerance such as `atol=1e-2` is a wish. Ours is a measurement. On the inputs that will be timed
# we compute the result in fp64, the *oracle*, and again in PyTorch in the kernel's dtype. The
# kernel may be wrong by **twice** what PyTorch is wrong by, plus one rounding of the oracle. The
# largest error must keep this budget, which finds a wrong element, and so must the root mean
# square, which finds a wrong distribution. The output holds NaN beforehand, so that an element
# nobody wrote cannot pass by luck. What fails is recorded with its error and without a sample. v1
# in the emulator, and three ways to damage its output:

# %%
given = studies.batch((30, 20, 10), heads=2, head_dim=32)
with emulator.enabled():
    out = v1_tiled.forward(given)
expected = reference.forward(replace(given, **{x: getattr(given, x).double() for x in "qkv"}))
baseline = reference.forward(given)

unwritten, spike = out.clone(), out.clone()
unwritten[-1, 0, 0] = float("nan")
spike.view(-1)[expected.abs().argmax()] *= 1.02
bias = (out.float() * 1.01).to(out.dtype)
outputs = {"v1": out, "largest element + 2 %": spike, "all + 1 %": bias, "unwritten": unwritten}
found = [testing.compare(name=name, actual=actual, expected=expected, baseline=baseline)
         for name, actual in outputs.items()]  # fmt: skip
print(*found, sep="\n")
assert [one.passed for one in found] == [True, False, False, False]

# %% tags=["remove-cell"]
assert found[1].rms < found[1].rms_budget and found[2].max_abs < found[2].max_abs_budget
kernels = chapter.record("forward/results")
errors = [row.error for row in kernels.rows if row.scope == "kernel" and row.impl.startswith("v")]
assert all(error.passed for error in errors if error), "the text: all passed"
budget = max(100 * error.max_abs / error.budget for error in errors if error)
chapter.glue(checked=sum(map(bool, errors)), budget=budget)

# %% [markdown]
# One large element breaks the first budget only, a bias of one percent the second only. On the GPU
# the record of {doc}`../forward/results` holds {glue:text}`checked:.0f` checks of rungs. All
# passed, and the worst uses {glue:text}`budget:.0f` % of its budget.
#
# ## One sample
#
# This loop takes the samples of every kernel time in this book:

# %% tags=["remove-input"]
chapter.code(timing.sample_kernels, "for turn in rounds:", "return")
rule = run.protocol
assert rule.interleaved and rule.l2_flush_bytes > 2 * machine.l2_bytes, "the text says so"
op, kernel = (chapter.times("forward/results", scope=scope)["v3_persistent"][SHORT]
              for scope in ("op", "kernel"))  # fmt: skip
chapter.glue(samples=rule.samples, warmup=rule.warmup, flush=rule.l2_flush_bytes / 2**20,
             l2=machine.l2_bytes / 2**20, pause=timing.DEFAULT.pause_us,
             op=op - kernel, kernel=kernel)  # fmt: skip

# %% [markdown]
# 1. **Flush.** {glue:text}`flush:.0f` MiB are written before each sample, several times the
#    {glue:text}`l2:.0f` MiB of L2. A layer in a model finds the cache full of something else.
# 2. **Lead.** A pause on the device, at least {glue:text}`pause:.0f` µs and at least twice what the
#    host needs to enqueue the call. When the first event fires, the kernel is already waiting.
# 3. **Turns.** All implementations of a workload alternate in an order shuffled every round, after
#    {glue:text}`warmup:.0f` calls of warm-up. Whatever drifts, drifts for all.
# 4. **Everything is kept.** {glue:text}`samples:.0f` samples go into the record; tables show the
#    median (p50) and the 20th and 80th percentile. Nothing on the machine is set.
#
# That is scope `kernel`, the device time of the launch. Scope `op` is what a caller waits for on an
# idle device: checks, allocation, a tile schedule if the rung needs one, launch, completion. v3
# makes its schedule in each call: at length 256 all this adds {glue:text}`op:.0f` µs to a kernel of
# {glue:text}`kernel:.0f` µs. The published benchmark leaves its schedule outside the timed region;
# we show both. Kernel time is for comparing kernels, not for predicting a training step.
#
# ## The noise floor
#
# Before two kernels are compared, one is compared with itself: eight replicates of v2 took turns.

# %%
same = chapter.rows(variant=[f"replicate {i}" for i in range(8)])
p20, p50, p80 = (
    same.pivot(index="variant", columns="workload", values=f"time_us_p{q}") for q in (20, 50, 80)
)
noise = 100 * (p50.max() / p50.min() - 1)
scatter = (100 * (p80 - p20) / p50).median()

# %% tags=["remove-input"]
# | name: fig-measuring-aa
# | caption: >
# |   One kernel, eight names. Median of each replicate of v2, relative to the median of all on that
# |   workload; bars from p20 to p80 of its samples.
# | alt: >
# |   Eight rows, two marks each. The marks stay within half a percent of one; the bars reach about
# |   one percent down, and further up.
chart = charts.dots(
    p50 / p50.median(), low=p20 / p50.median(), high=p80 / p50.median(),
    xlabel="time / median of all replicates", colours=(RUNG_COLOURS[2], RUNG_COLOURS[3]),
)  # fmt: skip
chapter.figure(chart, measured=same)
assert (noise < scatter).all(), "the text: medians agree better than samples"
chapter.glue(noise_floor=noise.max(), scatter=scatter.max())

# %% [markdown]
# The samples scatter by up to {glue:text}`scatter:.1f` % (p20 to p80). The medians agree within
# {glue:text}`noise_floor:.1f` %, the **noise floor** of this book: a smaller difference between two
# rows of a record is no difference.
#
# ## Between records
#
# Every rung that ran in several records of this system with the same source, configuration and
# workload:

# %%
runs = [run for run in records.load_all(data_dir) if run.system == chapter.record().system]
again = repeats.repeated(runs)
worst = repeats.worst(again)
hot = worst["workload"].isin([LONG, "gdpa-self-full-2048"])
kind = hot.map({True: "full self-attention, 1,024 and 2,048", False: "others"})
kind = kind.where(worst["impl"] != "v0_eager", "v0, which waits for memory")

# %% tags=["remove-input"]
# | name: fig-measuring-runs
# | caption: >
# |   The same kernel in several records of one machine: its slowest record relative to its fastest.
# | alt: >
# |   A scatter over time. Short kernels stay below three percent, and so does v0 up to nearly 100
# |   ms. Some kernels of full self-attention at 1,024 and 2,048 reach about ten percent.
points = worst[["time_us", "slower"]].set_axis(worst["impl"].where(worst["slower"] > 6, ""))
groups = dict(list(points.groupby(kind.to_numpy())))
chart = charts.scatter(groups, xlabel="time (µs)", ylabel="slowest over fastest record (%)")
chapter.figure(chart, data=again.drop(columns="source"), measured=sorted(set(again["record"])))

# %%
ratios = repeats.ratios(again)
example = again[(again["workload"] == LONG) & (again["impl"] == "v2_tma")]
short = worst[worst["time_us"] < 2000]["slower"]
states = repeats.states(runs, example.set_index("record")["time_us_p50"])
chapter.glue(
    between_worst=example["slower"].max(), records=example["record"].nunique(),
    factor=example["slower"].max() / noise.max(), short=short.max(), short_middle=short.median(),
    ratio_worst=ratios["ratios differ by (%)"].max(), pairs=len(ratios),
    slow_clock=states["SM clock (MHz)"].iloc[-1], fast_clock=states["SM clock (MHz)"].iloc[0],
)  # fmt: skip

# %% [markdown]
# Kernels shorter than 2 ms repeat within {glue:text}`short_middle:.1f` % in the median and
# {glue:text}`short:.1f` % at worst. v2 on full self-attention at 1,024 differs by
# {glue:text}`between_worst:.0f` % between {glue:text}`records:.0f` records, {glue:text}`factor:.0f`
# times the noise floor. No error bar inside a record shows that, because all samples of a record
# share their circumstances. Which ones? The state of the device, read once after the last sample:

# %% tags=["remove-input"]
assert (states["notebook"].tail(3) == "measuring/protocol").all(), "the text says so"
chapter.table(states, measured=list(example["record"]))

# %% [markdown]
# The slow records are those of this chapter, where the kernel competed with copies of itself only.
# In the others it took turns with kernels of all kinds, some of which mostly wait for memory. A
# long kernel that keeps the tensor cores busy meets the power limit of {glue:text}`watts:.0f` W,
# and the clock that is left depends on what ran just before: {glue:text}`fast_clock:.0f` MHz after
# the fastest record, {glue:text}`slow_clock:.0f` after the slowest. The states fit that explanation
# without proving it.
#
# What survives is the **ratio** of two kernels of one record. For {glue:text}`pairs:.0f` pairs of
# rungs that met on the same workload in two or more records:

# %% tags=["remove-input"]
chapter.predict(
    "The most that a ratio differs between records is less than the most that a time differs.",
    ratios["ratios differ by (%)"].max(), most=ratios["times differ by (%)"].max(),
    form=".1f", unit=" %",
)  # fmt: skip

# %% [markdown]
# Hence the rule of this book: two kernels are compared within one record, with the ceilings of that
# record. A rate from another record is another experiment.
#
# ## The surprise
#
# The protocol was built against caches, launches and the host. They are there, and it removes them.
# What remained was the power limit: it makes zeros fast, rest valuable and yesterday's record
# incomparable. Measuring longer does not remove it. Measuring *together* does. Even then a kernel
# measured among slow, cool rivals looks a little better than in a model full of its own kind. For
# your circumstances there is `make compare` ({doc}`../../reproduce`).

# %% tags=["remove-input"]
page.glue_html("support", needs.support_html())  # for book/reproduce.md, as what follows
v2, v3 = ([time / 1e3 for time in repeats.median_interval(kernels, "gdpa-self-full-2048", impl)]
          for impl in ("v2_tma", "v3_persistent"))  # fmt: skip
assert max(v2[0], v3[0]) < min(v2[1], v3[1]), "the answer says that they overlap"
chapter.glue(v2_low=v2[0], v2_high=v2[1], v3_low=v3[0], v3_high=v3[1],
             **needs.gigabytes(kernels, runs))  # fmt: skip
assert needs.heaviest(runs) == "gdpa-self-kuairand1k-4096", "book/reproduce.md names it"
if compared:
    both = {"noise floor (%)": repeats.noise(compared.rows), "record": noise}
    display(page.show_table(pd.DataFrame(both).rename_axis("workload").reset_index()))
    taken = compared.tables["protocols"]
    here = repeats.apparent(pd.DataFrame(list(taken.rows), columns=list(taken.columns)))
    display(page.show_table(here["relative"].unstack().reset_index()))

# %% [markdown]
# ## Exercises
#
# :::{exercise} Two percent
# :label: ex-measuring-two-percent
#
# A pull request makes v2 2 % faster at gdpa-self-full-1024: the author ran `make measure` before
# and after, on the machine of this book. Do you believe it? What would convince you? *(thought,
# five minutes)*
# :::
#
# :::{solution} ex-measuring-two-percent
# :class: dropdown
#
# Two records of that workload differ by up to {glue:text}`between_worst:.0f` % without any change.
# Both versions in one run would convince: there 2 % is several times the noise floor.
# :::
#
# :::{exercise} The interval of a median
# :label: ex-measuring-median
#
# Where there are no replicates the samples still say something: the 10th and the 21st of 30 sorted
# samples enclose the true median with a probability of 96 %, whatever the distribution. Why? Does
# `repeats.median_interval` tell v2 from v3 at gdpa-self-full-2048? *(paper and a line of code)*
# :::
#
# :::{solution} ex-measuring-median
# :class: dropdown
#
# Each sample falls below the true median with probability 1/2. The interval misses it only if fewer
# than 10 or more than 20 of 30 do: a binomial sum. It reaches from {glue:text}`v2_low:.1f` to
# {glue:text}`v2_high:.1f` ms for v2 and from {glue:text}`v3_low:.1f` to {glue:text}`v3_high:.1f` ms
# for v3. They overlap: which of the two is faster, the record does not know. The samples must be
# independent, which a warming chip does not quite give.
# :::
#
# :::{exercise} Cold rivals
# :label: ex-measuring-rivals
#
# Change `plan` so that v2 at gdpa-self-full-1024 takes turns once with seven copies of itself and
# once with seven copies of 1 GiB. Predict the two medians, then measure. *(a GPU, half an hour)*
# :::
#
# :::{solution} ex-measuring-rivals
# :class: dropdown
#
# If power is the reason, the second median is smaller, by up to {glue:text}`between_worst:.0f` %.
# If it is not, this chapter is wrong and its table of states a coincidence.
# :::
#
# ## Takeaways
#
# - Check first, with a budget computed from the data. A fast wrong kernel has no time at all.
# - Flush, lead, turns, and every sample kept. Measure a kernel against itself before you measure it
#   against another.
# - Compare within a record. A long kernel at the power limit remembers its company.
