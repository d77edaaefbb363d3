# ---
# jupyter:
#   kernelspec: {display_name: Python 3, language: python, name: python3}
# measures: true
# ---

# %% [markdown]
# # How a time is taken
#
# When may one kernel be called faster than another?
#
# :::{admonition} In this chapter (35 minutes)
# You will set the error budget of a kernel from its inputs, time it so that the number means
# something, and say which differences are noise and how many runs settle a question. A wrong
# protocol errs by a factor of {glue:text}`protocol_worst:.0f` up or
# {glue:text}`protocol_lowest:.1f` down.
# :::

# %% tags=["hide-input"]
from dataclasses import replace
from functools import partial
from itertools import product

import numpy as np
import pandas as pd
import torch
import triton
import triton.language as tl

import tritonemu
from _lib import rare_charts
from gdpa_kernels.gdpa.ladder import v2_tma
from gdpa_lab.measuring import record as records
from gdpa_lab.measuring import timing
from gdpa_lab.measuring.workloads import workload
from gdpa_lab.report import charts, page
from gdpa_lab.report.chapter import Chapter
from gdpa_lab.report.roles import display_name
from notebooks.measuring import _needs, _repeats

# %% tags=["parameters"]
mode = "replay"
device = "cpu"
data_dir = "data"

# %% tags=["remove-cell"]
chapter = Chapter("measuring/protocol", mode=mode, device=device, data_dir=data_dir)
SHORT, LONG = "gdpa-self-full-256", "gdpa-self-full-1024"
BARE, HOST = "no L2 flush, no lead, no warm-up", "host clock, no synchronisation"


def plan(session):
    for name in (SHORT, LONG):
        session.measure(workload(name), [("v2_tma", f"replicate {i}", {}) for i in range(8)])
    ours = replace(session.protocol, interleaved=False)
    warm = replace(ours, l2_flush_bytes=0)
    bare = replace(warm, pause_us=0.0, warmup=0)
    samples = {}

    def sample(inputs):
        work, call = inputs.workload, partial(v2_tma.forward, inputs.batch())
        size, flops = ", batch 32" if work.batch == 32 else "", work.flops("forward")
        for what, how in (("ours", ours), ("no L2 flush", warm), (BARE, bare)):
            times = timing.sample_kernels({"x": call}, session.device, how)["x"]
            samples[work.name, what + size, flops] = times
        times = timing.sample_calls({"x": call}, session.device, in_a_row=30, rounds=1)["x"]
        samples[work.name, HOST + size, flops] = times
        session.tabulate("protocols", ("workload", "protocol", "flops"), samples)

    for name, batch in product((SHORT, LONG), (1152, 32)):
        work = replace(workload(name), batch=batch)
        session.launch("protocols", work, ["v2_tma"], sample)


chapter.measure(plan)
compared = chapter.compare(plan)
rates = _repeats.apparent(chapter.recorded("protocols"))
shown = [name for name in rates.index.unique(0) if name.startswith(("ours", "no L2", "host"))]
us, rate, relative, low, high = (rates[column].unstack().loc[shown] for column in rates)

# %% tags=["remove-input"]
# | name: fig-measuring-protocols
# | caption: >
# |   **A wrong protocol prints rates that the kernel does not have.** Apparent rate of
# |   forward v2 at two batch sizes, relative to our protocol at the same batch (logarithmic). Bars
# |   from p20 to p80.
# | alt: >
# |   A row for each protocol, two marks a row. Most lie close to one. Without lead and warm-up the
# |   small batch of length 256 lies far left. The host clock lies far right.
run = chapter.record()
chart = charts.dots(
    relative, xlabel="apparent rate / ours", low=low, high=high, log=True,
)  # fmt: skip
chapter.figure(chart, data=rates.reset_index(), measured=[run.id])
chapter.glue(
    protocol_worst=relative.max().max(), protocol_lowest=1 / relative.min().min(),
    host_us=us.loc[HOST, SHORT], host_short=rate.loc[HOST, SHORT], host_long=rate.loc[HOST, LONG],
    small_us=us.loc["ours, batch 32", SHORT], bare_us=us.loc[f"{BARE}, batch 32", SHORT],
    warm=100 * (relative.loc["no L2 flush, batch 32", SHORT] - 1),
    rest=100 * (1 - relative.loc[BARE, LONG]), samples=run.protocol.samples,
    warmup=run.protocol.warmup, flush=run.protocol.l2_flush_bytes / 2**20,
    pause=timing.DEFAULT.pause_us,
)  # fmt: skip

# %% [markdown]
# ## One kernel under four protocols
#
# {numref}`fig-measuring-protocols` times one kernel, {doc}`forward v2 <../forward/v2_tma>`, in four
# ways:
#
# - *The host clock without synchronisation* times the enqueueing, {glue:text}`host_us:.0f` µs
#   whatever the kernel does afterwards, and prints {glue:text}`host_short:,.0f` and
#   {glue:text}`host_long:,.0f` TFLOP/s, beyond any {ref}`ceiling <rule-ceiling>`.
# - *Without a lead-in* (third bar) the error goes the other way. At batch 32 and length 256 the
#   kernel takes {glue:text}`small_us:.0f` µs, less than its launch. The first event fires while the
#   host is still preparing the call, so the clock starts too early and shows
#   {glue:text}`bare_us:.0f` µs.
# - *No flush* changes little for the published batch, which is much larger than any cache. At batch
#   32 and length 256 all tensors stay in L2, and the kernel gains {glue:text}`warm:.0f` %.
# - *Back to back*, the same bar, the long kernel is **slower** by {glue:text}`rest:.1f` %: our
#   pauses also let a power-limited chip recover.
#
# ## Right before fast
#
# Our tolerance is a measurement. On the inputs that will be timed we compute the result in fp64,
# the *oracle*, and in PyTorch in the kernel's dtype. The kernel may be wrong by **twice** PyTorch's
# error, plus one rounding of the oracle: in the largest error, which finds a wrong element, and in
# the root mean square, which finds a wrong distribution. The output starts as NaN, so an unwritten
# element shows.
#
# ## One sample
#
# This loop takes the samples of each time "in bursts" in this book:

# %% tags=["remove-input"]
chapter.code(timing.sample_kernels, "for turn in rounds:", "return")

# %% [markdown]
# 1. **Flush.** {glue:text}`flush:.0f` MiB are written before each sample, several times the L2. A
#    layer in a model finds the cache full of something else.
# 2. **Lead-in.** The device idles for at least {glue:text}`pause:.0f` µs and twice the host's time
#    to enqueue the call. When the first event fires, the kernel is already queued.
# 3. **Turns.** All implementations of a workload alternate in an order shuffled every round, after
#    {glue:text}`warmup:.0f` calls of warm-up. Whatever drifts, drifts for all.
# 4. **Everything is kept.** {glue:text}`samples:.0f` samples go into the record; tables show the
#    median (p50) and the 20th and 80th percentile. Nothing on the machine is set.
#
# (rule-scope)=
# ## Four scopes
#
# What is timed is called the *scope* of a number. A rate means nothing without it, and is compared
# with rates and ceilings of the same scope:
#
# | scope | what is timed | where it stands |
# |:--|:--|:--|
# | `kernel`, a *burst* | one launch at a time, with the pauses above | figures that say burst |
# | `sustained`, *back to back* | one kernel for a second, without pauses | everywhere else |
# | `op` | a whole call on an idle device, with checks and schedule | where it is named |
# | `host` | until the call returns, while the device works | {doc}`../training/host_time` |
#
# A burst shows what a kernel can do on a rested chip, back to back what a training loop gets
# ({doc}`power_wall`).
#
# ## The noise floor
#
# First compare a kernel with itself. Eight replicates of forward v2 took turns:

# %% tags=["remove-cell"]
same = chapter.rows(variant=[f"replicate {i}" for i in range(8)])
p20, p50, p80 = (
    same.pivot(index="variant", columns="workload", values=f"time_us_p{q}") for q in (20, 50, 80)
)
noise = 100 * (p50.max() / p50.min() - 1)
scatter = (100 * (p80 - p20) / p50).median()

# %% tags=["remove-input"]
# | name: fig-measuring-aa
# | caption: >
# |   **Eight copies of one kernel cannot be told apart.** Every sample of each replicate of forward
# |   v2, relative to the median of all replicates on that workload.
# | alt: >
# |   Eight rows, two swarms of points each. All eight rows look alike: most points within three
# |   percent of one, and a few groups further up.
samples = pd.DataFrame(
    [(row.variant, us / p50[row.workload].median(), row.workload) for row in chapter.record().rows
     if row.scope == "kernel" and row.variant in p50.index for us in row.samples_us],
    columns=["row", "value", "workload"],
)  # fmt: skip
chart = rare_charts.swarm(
    samples.sort_values(["row", "workload"]), xlabel="time / median of all replicates",
    levels={"": 1.0},
)  # fmt: skip
chapter.figure(chart, measured=same)
assert (noise < scatter).all(), "the text: medians agree better than samples"
chapter.glue(noise_floor=noise.max(), scatter=scatter.max())

# %% [markdown]
# The samples scatter by up to {glue:text}`scatter:.1f` % (p20 to p80). The medians agree within
# {glue:text}`noise_floor:.1f` %, the **noise floor** of this book: a smaller difference within a
# record is none.
#
# ## Between runs
#
# A {term}`record` is what one run of one chapter leaves behind. Every kernel that is unchanged in
# several records of this machine:

# %% tags=["remove-cell"]
runs = [run for run in records.load_all(data_dir) if run.system == chapter.record().system]
again = _repeats.repeated(runs)
worst = again.groupby(["workload", "impl"], as_index=False).agg(
    time_us=("time_us_p50", "min"), slower=("slower", "max")
)
ratios = _repeats.ratios(again)
example = again[(again["workload"] == LONG) & (again["impl"] == "v2_tma")]
example = example.sort_values("time_us_p50")
short = worst[worst["time_us"] < 2000]["slower"]

# %% tags=["remove-input"]
# | name: fig-measuring-runs
# | caption: >
# |   **Kernels of every length differ between runs by many times the noise floor.** The same kernel
# |   in several runs on one machine: its slowest run relative to its fastest.
# | alt: >
# |   A scatter over time. Short kernels stay low, and so does v0 at any length. Some kernels of
# |   full self-attention at 1,024 and 2,048 lie several times as high.
kind = worst["impl"].eq("v0_eager").map({True: "forward v0, waiting for memory", False: "others"})
labelled = worst["slower"].rank(ascending=False) <= 3
names = worst["impl"].map(lambda impl: display_name(impl, "forward"))
points = worst[["time_us", "slower"]].set_axis(names.where(labelled, ""))
groups = dict(list(points.groupby(kind.to_numpy())))
chart = rare_charts.scatter(groups, xlabel="time (µs)", ylabel="slowest over fastest record (%)")
chapter.figure(
    chart, data=again.drop(columns="source"),
    measured=[*again["record"].unique()],
)  # fmt: skip
assert (example["notebook"].tail(3) == "measuring/protocol").all(), "the text says so"
chapter.glue(
    between_worst=example["slower"].max(), records=example["record"].nunique(),
    factor=example["slower"].max() / noise.max(), short=short.max(),
    ratio_worst=ratios["ratios differ by (%)"].max(), pairs=len(ratios),
    ratio_median=ratios["ratios differ by (%)"].median(),
    time_median=ratios["times differ by (%)"].median(),
    deviation=(deviation := ratios.loc[ratios["records"] > 2, "deviation (%)"].median()),
    settled=(settled := next(n for n in range(2, 99)
                             if _repeats.students_t(n) * deviation / n**0.5 < 1)),
)  # fmt: skip

# %% [markdown]
# Kernels shorter than 2 ms repeat within {glue:text}`short:.1f` %. Forward v2 on full
# self-attention at 1,024 differs by {glue:text}`between_worst:.0f` % between
# {glue:text}`records:.0f` runs, {glue:text}`factor:.0f` times the noise floor, which no error bar
# of one run shows. The slow runs are this chapter's own, where v2 ran among eight copies of itself
# and the chip never cooled.
#
# Do **ratios** of two kernels measured in the same run hold up better? {glue:text}`pairs:.0f` pairs
# of kernels met on the same workload in two or more runs. Between runs a time moved by
# {glue:text}`time_median:.1f` % in the median and a ratio by {glue:text}`ratio_median:.1f` %; the
# worst ratio moved nearly as much as the worst time:

# %% tags=["remove-input"]
chapter.predict(
    "The most that a ratio differs between records is less than the most that a time differs.",
    ratios["ratios differ by (%)"].max(), most=ratios["times differ by (%)"].max(),
    form=".1f", unit=" %",
)  # fmt: skip
chapter.predictions()

# %% [markdown]
# What a run shares cancels in a ratio; what company, rest and power do to one kernel more than to
# another does not.
#
# ## How many runs: the process is the sample
#
# Thirty samples of one process share a temperature, a memory layout and a clock. So *one process is
# one sample* of "is B faster than A".
#
# Take $n$ processes, each with its own ratio $r_i$ of the two kernels. Their mean has the
# **standard error** $s / \sqrt{n}$, where $s$ is the standard deviation of the $r_i$. With few runs
# $s$ itself is uncertain, so the 95 % interval is wider than the familiar two standard errors: $t\,
# s / \sqrt{n}$ to either side, with Student's $t$ for $n - 1$ degrees of freedom. Among the pairs
# above that met in three or more runs, the median of $s$ is {glue:text}`deviation:.1f` %:

# %% tags=["remove-input"]
counts = (2, 3, 5, 10)
needed = pd.DataFrame({"processes": counts})
needed["Student's t"] = [round(_repeats.students_t(n), 2) for n in counts]
needed["interval, ± %"] = [
    round(_repeats.students_t(n) * deviation / n**0.5, 1) for n in counts
]  # fmt: skip
chapter.table(
    needed,
    caption="**Two processes settle almost nothing.** Half width of the 95 % interval of a ratio.",
    computed=f"t s / sqrt(n) with s = {deviation:.1f} %, the median over pairs of these records",
)

# %% [markdown]
# *A worked number.* Three processes say that B is 1.9 %, 2.6 % and 2.1 % faster. The mean is 2.2 %,
# $s = 0.36$ points, the standard error $0.36 / \sqrt{3} = 0.21$. With $t = 4.30$ the interval is
# 2.2 ± 0.9 %: B is faster. To resolve 1 % one needs about {glue:text}`settled:.0f` processes.
#
# Most chapters of this book have one run per figure. So read differences of one or two per cent
# between two kernels as ties, unless the text says how often they were repeated. For your own GPU
# run `make compare` ({doc}`../../reproduce`).
#
# ## Choosing constants: the winner was lucky
#
# Tiles, warps and buffers are searched. Here a chapter times the few candidates that fit, such as
# eight in {doc}`forward v1 <../forward/v1_tiled>` and three in {doc}`../forward/planning`, and
# `default_config` keeps the best; no kernel tunes itself at run time.
#
# The smallest of $N$ times of equal configurations lies below their mean by luck: by
# {glue:text}`luck_2:.2f` standard deviations $\sigma$ of a time for two, {glue:text}`luck_8:.2f`
# for eight, {glue:text}`luck_100:.2f` for a hundred, if the noise is normal, and below
# $\sigma \sqrt{2 \ln N}$ for any $N$. The replicates of
# {numref}`fig-measuring-aa` are equal. Choose one by the median of some samples, then time it by
# its others:

# %% tags=["remove-cell"]
taken = np.array([row.samples_us for row in chapter.record().rows if row.workload == LONG
                  and row.scope == "kernel" and row.variant in p50.index])  # fmt: skip
lucky = {size: _repeats.chosen(taken, size) for size in (1, 3, 10)}
lucky = pd.DataFrame(lucky).T.rename_axis("samples")
swept = chapter.times("forward/v1_tiled", columns="variant", variant=None, impl="v1_tiled")
margin = swept.apply(lambda times: 100 * (times.nsmallest(2).iloc[1] / times.min() - 1), axis=1)
assert lucky["again, %"].abs().max() < 0.3 < 1.5 < lucky["ahead, %"].max(), "the caption"
assert lucky["ahead, %"].max() < margin.min(), "the text"
chapter.glue(**{f"luck_{n}": _repeats.luck(n) for n in (2, 8, 100)}, margin=margin.min())

# %% tags=["remove-input"]
chapter.table(
    lucky.reset_index(), name="tab-measuring-luck",
    digits=dict.fromkeys(lucky, 1) | {"samples": 0},
    caption="**The winner among eight equals leads until it is timed again.** Forward v2, 1,024 "
    "tokens: how far the chosen replicate is ahead of the mean, expected, found, and in its other "
    f"samples; means of {_repeats.DRAWS:,} draws.",
    measured=[chapter.record().id], computed="samples drawn without replacement, seed 0",
)  # fmt: skip

# %% [markdown]
# So time winner and default once more, in turns, and report only that. The best tile of forward v1
# is at least {glue:text}`margin:.1f` % ahead of the second on each workload, which is no luck.
#
# ## An autotuner runs the kernel more often than you
#
# `triton.autotune` times all configurations in the first call of each *key*, on the caller's
# tensors. (A key of shapes holds no lengths: the first jagged batch decides for all.) A kernel that
# *adds*, as many add dQ, adds each time:


# %%
@triton.jit
def sum_kernel(x_ptr, out_ptr, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.atomic_add(out_ptr, tl.sum(tl.load(x_ptr + i), 0))


def launch(sizes, **options):
    """The emulator's notes on one call, tuned over these block sizes."""
    configs = [triton.Config({"BLOCK": size}) for size in sizes]
    tuned = triton.autotune(configs, key=[], **options)(sum_kernel)
    with tritonemu.enabled() as reports:
        tuned[lambda chosen: (64 // chosen["BLOCK"],)](torch.ones(64), torch.zeros(1))
    return reports[-1].notes


x, out = torch.ones(64), torch.zeros(1)
with tritonemu.enabled():
    for size in (16, 32, 32):  # each configuration once, then the best one as asked
        sum_kernel[(64 // size,)](x, out, size)
print("sum of 64 ones:", out.item())
print(*launch([16, 32]))
print("reset:", launch([16, 32], reset_to_zero=["out_ptr"]), "one:", launch([16]))

# %% [markdown]
# `reset_to_zero` clears the tensor before each launch of the tuner and the one that counts,
# `restore_value` puts back what was there, and the `pre_hook` of a `Config` runs before every
# launch, later ones too. **One configuration hides the fault**, since nothing is timed; so does a
# second call, whose key is known. Test the first call of a key, with two configurations.
#

# %% tags=["remove-input"]
page.glue_html("support", _needs.support())  # for book/reproduce.md, as what follows
chapter.glue(**_needs.gigabytes(chapter.record("forward/results"), runs))
assert _needs.heaviest(runs) == "gdpa-self-kuairand1k-4096", "book/reproduce.md names it"
if compared:
    medians = {(x.workload, x.variant): pd.Series(x.samples_us).median() for x in compared.rows}
    each = pd.Series(medians).groupby(level=0)
    here = 100 * (each.max() / each.min() - 1)
    print(pd.DataFrame({"noise floor (%)": here, "record": noise}))
    taken = compared.tables["protocols"]
    print(_repeats.apparent(pd.DataFrame(list(taken.rows), columns=list(taken.columns))))

# %% [markdown]
# ## Exercises
#
# :::{exercise} Two percent
# :label: ex-measuring-two-percent
#
# A pull request makes forward v2 2 % faster at gdpa-self-full-1024, by `make measure` before and
# after, on the machine of this book. What would convince you? *(paper, five minutes)*
# :::
#
# :::{solution} ex-measuring-two-percent
# :class: dropdown
#
# Two runs of that workload differ by up to {glue:text}`between_worst:.0f` % without any change.
# Measure both versions in one run, where 2 % is several times the noise floor, and repeat the run
# in five processes: the interval of the ratio should exclude one.
# :::
#
# :::{exercise} The interval of a median
# :label: ex-measuring-median
#
# The 10th and the 21st of 30 sorted samples enclose the true median with a probability of 96 %,
# whatever the distribution. Why? And what if two such intervals overlap? *(paper, ten minutes)*
# :::
#
# :::{solution} ex-measuring-median
# :class: dropdown
#
# Each sample falls below the true median with probability 1/2. The interval misses it only if fewer
# than 10 or more than 20 of 30 do: a binomial sum. If two intervals overlap, the record does not
# know which kernel is faster.
# :::
#
# :::{exercise} Gradients that accumulate
# :label: ex-measuring-tuner
#
# A tuned kernel adds dW into the gradient of earlier batches. Which of the three remedies is right,
# and what is wrong with the others? *(paper)*
# :::
#
# :::{solution} ex-measuring-tuner
# :class: dropdown
#
# `restore_value`, which copies the gradient before each timing and puts it back. The others wipe
# out the earlier batches: `reset_to_zero` in the first call of a key, a hook that clears in each.
# :::
#
# ## Takeaways
#
# - Check first, with a budget computed from the data. A fast wrong kernel has no time at all.
# - Flush, lead in, take turns. Measure a kernel against itself before measuring it against another.
# - Compare within one run, and count processes, not samples.
