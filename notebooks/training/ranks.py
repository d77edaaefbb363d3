# ---
# jupyter:
#   kernelspec: {display_name: Python 3, language: python, name: python3}
# measures: true
# ---

# %% [markdown]
# # Two GPUs: sorted rows cost more than communication
#
# Jagged batches give the ranks of a training job unequal work, and every step ends when the slowest
# rank has finished. What does that cost, and what do gradients on their way cost?
#
# :::{admonition} In this chapter (30 minutes)
# You will tell waiting for a slower rank from waiting for gradients, count the bytes of the
# collectives, see what communication does to a persistent kernel, and deal rows so that ranks are
# equal. On two H200s we train {glue:text}`weak:.2f` times the samples of one. With 128 long rows
# per rank, sorting them on purpose makes a step {glue:text}`sorted_step:.2f` times as long.
# :::

# %% tags=["hide-input"]
import pandas as pd

from _lib import drawings, steps
from gdpa_lab.measuring import record
from gdpa_lab.report.chapter import Chapter

# %% tags=["parameters"]
mode = "replay"
device = "cpu"
data_dir = "data"

# %% tags=["remove-cell"]
chapter = Chapter("training/ranks", mode=mode, device=device, data_dir=data_dir)
LONG = ["--law", "half", "--max-seqlen", 4096]
DEALS = ["--deals", "order", "snake", "sorted", "balanced"]
RUNS = {
    "one GPU": (1, ["--batch", 576]),
    "DDP, twice the rows": (2, ["--engine", "ddp", "--batch", 1152]),
    "DDP, the same rows": (2, ["--engine", "ddp", "--batch", 576]),
    "FSDP2, twice the rows": (2, ["--engine", "fsdp2", "--batch", 1152]),
    "32 rows a rank": (2, ["--engine", "ddp", "--batch", 64, *LONG, *DEALS]),
    "128 rows a rank": (2, ["--engine", "ddp", "--batch", 256, *LONG, *DEALS]),
}
NUMBERS = ("engine", "deal", "ranks", "batch", "step_s", "samples_per_s", "slowest_s", "skew")


@chapter.measure
def _(session):
    rows, samples, link = [], [], steps.link()
    session.uses(max(ranks for ranks, _ in RUNS.values()))
    for run, (ranks, options) in RUNS.items():
        for row in steps.run("ranks", *options, ranks=ranks):
            most = max(row["tokens"]) / (sum(row["tokens"]) / ranks)
            rows.append((run, link, most, *(row[number] for number in NUMBERS)))
            for what, each in row["samples_s"].items():
                for rank, times in enumerate(each):
                    samples += [(run, row["deal"], what, rank, i, s) for i, s in enumerate(times)]
    columns = ("run", "link", "tokens_most_over_mean", *NUMBERS)
    session.tables["ranks"] = record.Table(columns, tuple(rows))
    columns = ("run", "deal", "what", "rank", "sample", "time_s")
    session.tables["samples"] = record.Table(columns, tuple(samples))


ranks = chapter.recorded("ranks").set_index(["run", "deal"])
one, twice = ranks.loc["one GPU", "balanced"], ranks.loc["DDP, twice the rows", "balanced"]
weak = twice["samples_per_s"] / one["samples_per_s"]
strong = ranks.loc[("DDP, the same rows", "balanced"), "samples_per_s"] / one["samples_per_s"]
exposed = 1e3 * (ranks["step_s"] - ranks["slowest_s"])
few, many = (ranks.loc[f"{n} rows a rank"] for n in (32, 128))
LINK_GBYTES, GRADIENTS = 450, 200  # of NV18 in one direction, in GB/s; of the model, in MB
chapter.glue(
    weak=weak, strong=strong, link=ranks["link"].iloc[0],
    many=many.loc["order", "skew"], sorted_many=many.loc["sorted", "skew"],
    sorted_step=many.loc["sorted", "step_s"] / many.loc["balanced", "step_s"],
    most=many.loc["sorted", "tokens_most_over_mean"],
    quarter=250 * many.loc["balanced", "step_s"], least=1e3 * few["step_s"].min(),
    longest=1e3 * few["step_s"].max(), exposed=exposed["DDP, twice the rows", "balanced"],
    lowest=exposed["32 rows a rank"].min(), highest=exposed["32 rows a rank"].max(),
    moving=GRADIENTS / LINK_GBYTES,
    fsdp=100 * (ranks.loc[("FSDP2, twice the rows", "balanced"), "step_s"] / twice["step_s"] - 1),
)  # fmt: skip
long = exposed["128 rows a rank"]
alone, skew = many.loc["order", ["slowest_s", "skew"]].astype(float)
chance = 1e3 * alone * (1 - 1 / skew)  # of the slower rank beyond the mean
assert 0 < chance < long.min(), "the text: less than is exposed"
chapter.glue(long_least=long.min(), long_most=long.max(), chance=chance)
assert exposed["32 rows a rank"].max() > 3 * long.max() and long.min() > 0, "the text says so"
assert long.max() < 1e3 * many.loc["sorted", "step_s"] - 1e3 * many["step_s"].min(), "the title"
worse = {n: of.loc["sorted", "step_s"] / of.loc["balanced", "step_s"] for n, of in
         {"few": few, "many": many}.items()}  # fmt: skip
assert worse["few"] < 1.1 < 1.3 < worse["many"], "the caption: with 32 rows no deal decides"
steps_s = chapter.recorded("samples").set_index("what").loc["step"]
steps_s = steps_s[steps_s["run"] == "DDP, twice the rows"]["time_s"]
varies = 1e3 * (steps_s.quantile(0.8) - steps_s.quantile(0.2))
assert exposed["DDP, twice the rows", "balanced"] < varies, "the text: less than a step varies"
chapter.predict(
    "Two GPUs with twice the rows train 1.9 to 2.0 times the samples of one.",
    weak, least=1.9, most=2.0,
)  # fmt: skip
chapter.predict(
    "A DDP step hides all but one millisecond of its communication.",
    exposed["DDP, twice the rows", "balanced"], most=1, unit=" ms",
)  # fmt: skip
chapter.predict(
    "With 32 rows per rank in the order they come, the slower rank takes 1.05 to 1.19 times the "
    "mean.",
    few.loc["order", "skew"], least=1.05, most=1.19,
)  # fmt: skip
chapter.predict(
    "With 128 rows per rank in the order they come, the slower rank takes at most 1.09 times the "
    "mean.",
    many.loc["order", "skew"], least=1.0, most=1.09, shown=False,
)  # fmt: skip
chapter.predict(
    "With 32 balanced rows per rank, the slower rank takes at most 1.02 times the mean.",
    few.loc["balanced", "skew"], most=1.02, shown=False,
)  # fmt: skip


def trace(run: str, deal: str) -> pd.DataFrame:
    """A step of two GPUs, from medians: what each computes, and what it waits for."""
    row = 1e3 * ranks.loc[(run, deal), ["step_s", "slowest_s"]].astype(float)
    slow = row["slowest_s"]
    fast = 2 * slow / ranks.loc[(run, deal), "skew"] - slow
    bars = [(gpu, 0.0, own_ms, f"{own_ms:.0f} ms") for gpu, own_ms in enumerate((slow, fast))]
    bars += [(gpu, own_ms, row["step_s"] - own_ms, "") for gpu, own_ms in enumerate((slow, fast))]
    return pd.DataFrame(bars, columns=["lane", "start", "time", "label"])


# %% tags=["remove-input"]
# | name: fig-ranks-steps
# | caption: >
# |   **If all the long rows go to one GPU, the other one waits for most of the step; communication
# |   hardly shows.** One step on two GPUs (rows 0 and 1), drawn from medians. Bars: the time that a
# |   GPU takes for its own rows. Thin: it waits, for the other GPU or for gradients.
# | alt: >
# |   Four panels with two bars each. In three panels both bars end together, with a hardly visible
# |   thin line behind them. With sorted rows one bar is two to three times as long as the other,
# |   whose thin line fills the rest.
DRAWN = {"576 rows a rank, balanced": ("DDP, twice the rows", "balanced")}
DEALT = {"balanced": "balanced", "order": "as they come", "sorted": "sorted"}
DRAWN |= {f"128 long rows, {text}": ("128 rows a rank", deal) for deal, text in DEALT.items()}
panels = {title: trace(*arguments) for title, arguments in DRAWN.items()}
chart = drawings.gantt(panels, xlabel="ms", hue="v1_tiled")
waits = panels["128 long rows, sorted"]
assert waits["time"].iloc[-1] > 0.5 * waits["time"].iloc[0], "the caption says so"
assert 2 < waits["time"].iloc[0] / waits["time"].iloc[1] < 3, "the alt text says so"
chapter.figure(chart, data=ranks.reset_index(), measured=chapter.holders("ranks"))

# %% [markdown]
# ## Two kinds of waiting
#
# `examples/ranks.py` runs KunlunLite ({doc}`step`) on PyTorch's own engines, one process per GPU.
# *DDP* keeps the whole model on every rank and averages gradients while the backward pass is still
# running; *FSDP2* also shards the weights. Waiting for a slower rank and waiting for gradients look
# alike in the time of a step. To tell them apart, time it twice: as usual, then without any
# communication (`no_sync`). The slowest rank alone is what the step *must* wait for; the remainder
# is {term}`exposed communication`.

# %% tags=["remove-input"]
names = {"step_ms": "step, ms", "own_ms": "slowest alone, ms", "exposed": "exposed, ms",
         "samples_per_s": "rows/s"}  # fmt: skip
shown = ranks.assign(
    step_ms=1e3 * ranks["step_s"], own_ms=1e3 * ranks["slowest_s"], exposed=exposed
)
engines = shown.xs("balanced", level="deal")[list(names)].rename(columns=names).iloc[:4]
chapter.table(
    engines.reset_index(), missing="", name="tab-ranks-engines",
    digits={"step, ms": 1, "slowest alone, ms": 1, "exposed, ms": 1, "rows/s": 0},
    caption="**With twice the rows two GPUs train almost twice the rows of one, and little "
    "communication is exposed.** Half-full batches of 1,024 tokens, balanced.",
    data=ranks.reset_index(), measured=chapter.holders("ranks"),
)  # fmt: skip
assert exposed["DDP, twice the rows", "balanced"] < 0.04 * 1e3 * twice["step_s"], "the caption"

# %% [markdown]
# With the same rows in total two GPUs train {glue:text}`strong:.2f` times the rows of one. The step
# of FSDP2 differs from that of DDP by {glue:text}`fsdp:.0f` %: this model need not be sharded.
#
# ## The bytes of the collectives
#
# In a {term}`collective` all ranks take part. DDP needs the *all-reduce*: every rank has gradients
# of its own and needs their sum. Done in a ring of $R$ ranks, it has two halves. In a
# *reduce-scatter* each rank ends up with one $R$-th of the sum; in an *all-gather* it collects the
# other parts. In each half a rank sends $(R-1)/R$ of the $G$ bytes. FSDP2 gathers the weights
# twice, before each pass, and reduce-scatters the gradients. In one precision:
#
# | | collectives of a step | a rank sends | 2 ranks | 8 ranks |
# |:--|:--|:--|--:|--:|
# | DDP | all-reduce of gradients | $2\,\frac{R-1}{R}\,G$ | 200 MB | 350 MB |
# | FSDP2 | all-gather of weights, twice; reduce-scatter | $3\,\frac{R-1}{R}\,G$ | 300 MB | 525 MB |
#
# The columns are for our model with about 200 MB of gradients. The H200s are joined by
# {glue:text}`link`, eighteen links with 450 GB/s in each direction, so DDP's bytes take
# {glue:text}`moving:.2f` ms at the least (modelled). We exposed {glue:text}`exposed:.1f` ms, more
# than the bytes explain, and less than a step varies.
#
# ## Communication beside a persistent kernel
#
# Hidden, NCCL's kernels run *beside* ours, and they occupy SMs, one per channel. For an ordinary
# kernel that is a small loss: if NCCL holds 16 of 132 SMs, the blocks are spread over the other
# 116, and the kernel takes 14 % longer. A {term}`persistent kernel` that divides its list of work
# beforehand is more sensitive. Sixteen programs find no free SM. They start when others have ended,
# with a full share each, so the kernel takes *twice* as long:

# %% tags=["remove-input"]
# | name: fig-ranks-nccl
# | caption: >
# |   **With static shares a persistent kernel takes twice its time if it lacks a few SMs; with a
# |   shared counter it takes only as much longer as SMs are missing.** Modelled: six SMs, of which
# |   communication holds two (thin lines), and six programs of four items; numbers are programs.
# | alt: >
# |   Two panels of six lanes. Left, lanes 0 and 1 run their program and then a second one, and end
# |   at 8; lanes 2 and 3 idle from 4 on. Right, lanes 0 to 3 run six items each and end at 6.
held = [(lane, 0.0, 8.0, "") for lane in (4, 5)]
static = [(lane, start + i, 1.0, f"{program}") for lane, start, program in
          [(0, 0, 0), (1, 0, 1), (2, 0, 2), (3, 0, 3), (0, 4, 4), (1, 4, 5)]
          for i in range(4)]  # fmt: skip
counter = [(lane, float(i), 1.0, f"{lane}") for lane in range(4) for i in range(6)]
columns = ["lane", "start", "time", "label"]
panels = {"static shares: 8": pd.DataFrame(static + held, columns=columns),
          "a shared counter: 6": pd.DataFrame(counter + [(x, 0.0, 6.0, "") for x, *_ in held],
                                              columns=columns)}  # fmt: skip
chart = drawings.gantt(panels, xlabel="time of an item", hue="v1_tiled")
chapter.figure(chart, modelled="six SMs, 24 items, two SMs held throughout")

# %% [markdown]
# If the persistent kernel comes first, NCCL's programs find no room until it ends, and
# communication is not hidden at all. The ways out: launch fewer programs than SMs; let programs
# take their next item from a shared counter ({doc}`../measuring/masked_batches`); or give NCCL
# fewer channels (`NCCL_MAX_CTAS`). Without a mask our kernels have static shares; whether one ever
# took twice its time here was not measured.
#
# ## Dealing rows
#
# | deal | rows go |
# |:--|:--|
# | order | as they come |
# | snake | in groups of 16, heaviest first, to and fro over the ranks |
# | sorted | the longest half to rank 0: the worst case |
# | balanced | the longest first, each to the rank with the least work that has room |
#
# The work of a row of $n$ tokens is taken as $n^2 + 4{,}096\,n$: attention grows with pairs,
# projections with tokens. Rows have up to 4,096 tokens:

# %% tags=["remove-input"]
names = {"tokens_most_over_mean": "most tokens / mean", "skew": "slowest / mean",
         "step_ms": "step, ms", "exposed": "exposed, ms"}  # fmt: skip
deals = shown.loc[["128 rows a rank", "32 rows a rank"], list(names)].rename(columns=names)
deals = deals.rename(index=lambda run: run.split()[0], level=0).rename_axis(["rows", "deal"])
chapter.table(
    deals.reset_index(), name="tab-ranks-deals",
    digits={"most tokens / mean": 2, "slowest / mean": 2, "step, ms": 1, "exposed, ms": 1},
    caption="**Sorted rows show with 128 rows per rank and not with 32.** DDP on two GPUs.",
    data=ranks.reset_index(), measured=chapter.holders("ranks"),
)  # fmt: skip

# %% [markdown]
# With 128 rows, sorted, one rank has {glue:text}`most:.2f` times the mean of tokens and takes
# {glue:text}`sorted_many:.2f` times as long as the mean. In the order they come, chance makes that
# {glue:text}`many:.3f`: {glue:text}`chance:.1f` ms, less than the communication that is exposed.
#
# ## Small ranks wait for their hosts
#
# 32 rows should take a quarter of the time of 128, {glue:text}`quarter:.0f` ms. They take
# {glue:text}`least:.0f` to {glue:text}`longest:.0f` ms, whatever the deal. In eager mode the host
# enqueues kernels more slowly than the device executes them, and unequal work disappears behind
# that. So balance large batches, and compile small ones first ({doc}`host_time`).
#
# The host also explains the last column of {numref}`tab-ranks-deals`: {glue:text}`lowest:.1f` to
# {glue:text}`highest:.1f` ms of communication seem to be exposed with 32 rows, for the same
# gradients of which 128 rows expose {glue:text}`long_least:.1f` to {glue:text}`long_most:.1f` ms.
# It can be read only where the device is the limit.
#
# ## What we predicted
#
# The predictions come from lengths alone, and from the bytes of the gradients: about 200 MB, 0.7 ms
# by a script's all-reduce on such a pair.

# %% tags=["remove-input"]
chapter.predictions()

# %% [markdown]
# ## Is it right?
#
# In the tests two processes on a CPU train the same steps as one, with equal losses. A rank without
# a token takes part. If a rank is killed, the others end with an error that says so, and a run that
# resumes from the last checkpoint, on another number of ranks too, has the same loss.
#
# ```bash
# torchrun --nproc-per-node 2 examples/train.py --engine ddp --compile \
#     --checkpoint runs/first
# ```
#
# ## Exercises
#
# :::{exercise} More ranks
# :label: ex-ranks-more
#
# The slowest of R ranks, each with 32 rows: how does it grow with R? *(paper; ten lines with
# `examples/data.py` to check)*
# :::
#
# :::{solution} ex-ranks-more
# :class: dropdown
#
# A row's work under this length distribution has a standard deviation of 0.7 of its mean, a sum of
# 32 of 12 %, and the largest of R normal numbers lies 1.4 (8 ranks) to 2.4 (64) deviations up: 1.18
# and 1.29. `deal(lengths, R, "order")` and `cost` give the exact value.
# :::
#
# :::{exercise} An all-reduce beside a persistent kernel
# :label: ex-ranks-nccl
#
# Eight GPUs of 132 SMs train with DDP. Gradients have 2 GB in fp32; a link carries 450 GB/s in each
# direction. A backward kernel of 10 ms is persistent with static shares. (a) How many bytes does a
# rank send, and how long does that take at the least? (b) The all-reduce runs on 8 SMs at half the
# link's rate and starts just before the kernel. How long does the kernel take if it launches 132
# programs? (c) And with 124 programs? With a shared counter? (d) Which of the three would you ship,
# and what does it cost on one GPU? *(paper, thirty minutes, as in an exam)*
# :::
#
# :::{solution} ex-ranks-nccl
# :class: dropdown
#
# (a) 2 × 7/8 × 2 GB = 3.5 GB, 7.8 ms. (b) At half the rate the all-reduce takes 15.6 ms, longer
# than the kernel. 124 programs start and end after 10 ms; the other 8 start then and need another
# 10 ms: 20 ms. (c) With 124 programs each has 132/124 of the work, 10.6 ms. A shared counter gives
# the same 10.6 ms while the 8 SMs are held, and would use them as soon as they are free. (d) The
# counter costs an atomic addition per item and adapts. 124 programs cost 6 % in every step without
# communication too, so make the number an option that the training script sets.
# :::
#
# ## Takeaways
#
# - Time each rank without communication before you blame the network.
# - Deal rows by work, equally many to each rank, once the device is the limit.
# - A persistent kernel with static shares needs all the SMs that it was divided for.
#
# One sequence on several GPUs: {doc}`../serving/adds_up`.
