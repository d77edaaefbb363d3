# ---
# jupyter:
#   kernelspec: {display_name: Python 3, language: python, name: python3}
# measures: true
# ---

# %% [markdown]
# # Several GPUs
#
# Jagged batches give the ranks of a training job unequal work, and every step ends when the slowest
# rank has finished. What does that cost, and what do gradients on their way cost?
#
# :::{admonition} In this chapter (30 minutes)
# You will tell waiting for a slower rank from waiting for gradients, count the bytes of the
# collectives, see what communication does to a persistent kernel, deal rows so that ranks are
# equal, and choose how to cut one sequence. On two H200s we train {glue:text}`weak:.2f` times the
# samples of one. With 128 long rows per rank, sorting them on purpose makes a step
# {glue:text}`sorted_step:.2f` times as long.
# :::

# %% tags=["hide-input"]
import contextlib
import io

import pandas as pd
import torch

from _lib import drawings, steps
from gdpa_kernels.parallel import predicted_bytes
from gdpa_lab.measuring import record
from gdpa_lab.report import results
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
HISTORIES = (1, 65_536), (8, 16_384)  # causal ones, and the tokens of the longest
NUMBERS = ("engine", "deal", "ranks", "batch", "step_s", "samples_per_s", "slowest_s", "skew")


def plan(session):
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
    columns = ("histories", "longest", "stationary", "layout", "direction")
    session.tabulate("context", columns, context())


def context() -> dict[tuple, list[float]]:
    """Microseconds of attention cut between two GPUs, of the slower one, and of one GPU."""
    times = {}
    for batch, longest in HISTORIES:
        options = "--context", "--batch", batch, "--max-seqlen", longest
        rows = steps.run("ranks", *options, ranks=2)
        alone = {"stationary": "all", "layout": "one GPU"}
        alone |= dict(zip(("forward_s", "backward_s"), rows[0]["alone_s"], strict=True))
        for row in (alone, *rows):
            for way in ("forward", "backward"):
                key = batch, longest, row["stationary"], row["layout"], way
                times[key] = [1e6 * seconds for seconds in row[f"{way}_s"]]
    return times


chapter.measure(plan)
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
# |   hardly shows.** One step on two GPUs, from medians. Bars: a GPU computes. Thin: it waits, for
# |   the other GPU or for gradients.
# | alt: >
# |   Four panels with two bars each. In three panels both bars end together, with a hardly visible
# |   thin line behind them. With sorted rows one bar is two to three times as long as the other,
# |   whose thin line fills the rest.
DRAWN = {"576 rows a rank, balanced": ("DDP, twice the rows", "balanced")}
DEALT = {"balanced": "balanced", "order": "as they come", "sorted": "sorted"}
DRAWN |= {f"128 long rows, {text}": ("128 rows a rank", deal) for deal, text in DEALT.items()}
panels = {title: trace(*arguments) for title, arguments in DRAWN.items()}
chart = drawings.gantt(panels, xlabel="ms")
waits = panels["128 long rows, sorted"]
assert waits["time"].iloc[-1] > 0.5 * waits["time"].iloc[0], "the caption says so"
assert 2 < waits["time"].iloc[0] / waits["time"].iloc[1] < 3, "the alt text says so"
chapter.figure(chart, data=ranks.reset_index(), measured=chapter.holders("ranks"))

# %% [markdown]
# ## Two kinds of waiting
#
# `examples/ranks.py` runs KunlunLite ({doc}`step`) on PyTorch's own engines, one process per GPU.
# *DDP* keeps the whole model on every rank and averages gradients during the backward pass; *FSDP2*
# also shards the weights. Waiting for a slower rank and for gradients look alike. To tell them
# apart, time a step again without communication (`no_sync`). The slowest rank alone is what the
# step *must* wait for; the remainder is {term}`exposed communication`. Embedding tables too large
# for one GPU are sharded: `examples/torchrec_embeddings.py` does it with TorchRec.

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
# In a {term}`collective` all ranks take part. DDP needs the *all-reduce*, the sum of the gradients
# of all. In a ring of $R$ ranks it has two halves: in a *reduce-scatter* each rank gets one $R$-th
# of the sum, in an *all-gather* it collects the other parts. In each half it sends $(R-1)/R$ of the
# $G$ bytes. In one precision:
#
# | | collectives of a step | a rank sends | 2 ranks | 8 ranks |
# |:--|:--|:--|--:|--:|
# | DDP | all-reduce of gradients | $2\,\frac{R-1}{R}\,G$ | 200 MB | 350 MB |
# | FSDP2 | all-gather of weights, twice; reduce-scatter | $3\,\frac{R-1}{R}\,G$ | 300 MB | 525 MB |
#
# Our model has about 200 MB of gradients. {glue:text}`link` joins the H200s with 450 GB/s in each
# direction, so DDP's bytes take {glue:text}`moving:.2f` ms at the least (modelled). We exposed
# {glue:text}`exposed:.1f` ms, more than the bytes explain, and less than a step varies.
#
# ## Communication beside a persistent kernel
#
# Hidden, NCCL's kernels run *beside* ours and occupy SMs, one per channel. If NCCL holds 16 of 132
# SMs, an ordinary kernel is spread over the other 116 and takes 14 % longer. Of a
# {term}`persistent kernel` that divides its work beforehand, sixteen programs find no free SM. They
# start when others have ended, with a full share each, so it takes *twice* as long:

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
chart = drawings.gantt(panels, xlabel="time of an item")
chapter.figure(chart, modelled="six SMs, 24 items, two SMs held throughout")

# %% [markdown]
# If the persistent kernel comes first, NCCL's programs find no room until it ends. The ways out:
# launch fewer programs than SMs; let programs take their next item from a shared counter
# ({doc}`../measuring/masked_batches`); or give NCCL fewer channels (`NCCL_MAX_CTAS`). Without a
# mask our kernels have static shares; whether one ever took twice its time was not measured.
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
# {glue:text}`least:.0f` to {glue:text}`longest:.0f` ms, whatever the deal: in eager mode the host
# enqueues kernels more slowly than the device executes them, and unequal work disappears behind
# that. The last column of {numref}`tab-ranks-deals`, {glue:text}`lowest:.1f` to
# {glue:text}`highest:.1f` ms with 32 rows and {glue:text}`long_least:.1f` to
# {glue:text}`long_most:.1f` with 128, counts only where the device is the limit. So balance large
# batches, and compile small ones first ({doc}`host_time`).
#
# ## What we predicted
#
# From lengths, and from the bytes of the gradients:

# %% tags=["remove-input"]
chapter.predictions()

# %% [markdown]
# ## Is it right?
#
# In the tests two processes on a CPU train the same steps as one, a rank without a token included.
# If a rank is killed, the others end with an error that says so, and a run that resumes from the
# last checkpoint, on another number of ranks too, has the same loss.
#
# ```bash
# torchrun --nproc-per-node 2 examples/train.py --engine ddp --compile \
#     --checkpoint runs/first
# ```
#
# ## One sequence on several GPUs
#
# {term}`Context parallelism <context parallelism>` cuts one sequence of $N$ tokens between $P$
# ranks, and each query needs all keys. What a rank receives in the forward pass, for $H$ query and
# $K$ key heads of $d$ numbers in bf16 and $f = (P - 1) / P$:
#
# | way | what travels | bytes | hides behind |
# |:--|:--|--:|:--|
# | *ring* (softmax) | K and V, hop by hop | $4 N K d f$ | the step with the last hop's keys |
# | *queries stay* | K and V, all-gather | $4 N K d f$ | the same, if it comes in pieces |
# | *keys stay* | Q; fp32 sums, reduce-scatter | $6 N H d f$ | the same |
# | *heads exchanged* | Q, K, V, then O, all-to-all | $4 N (H + K) d f / P$ | other heads at best |
#
# Softmax must merge what arrives; sums of GDPA need none ({doc}`../serving/adds_up`). With heads
# exchanged a rank has all rows of some heads and calls an ordinary kernel. For 131,072 tokens, 8
# ranks and $d = 128$:

# %% tags=["remove-input"]
N, RANKS, DIM = 131_072, 8, 128
WAYS = {"queries": "queries stay", "keys": "keys stay", "sequences": "heads exchanged"}


def megabytes(heads: int, heads_k: int) -> dict[str, tuple[float, float]]:
    """Of each way what a rank receives, forward and backward."""
    of = {
        name: predicted_bytes(way, N // RANKS, RANKS, heads, heads_k, DIM, torch.bfloat16)
        for way, name in WAYS.items()
    }
    hop = 2 * N // RANKS * heads_k * DIM  # numbers of K and V, or of their gradients, on a rank
    of = {"ring": ((RANKS - 1) * hop * 2, (RANKS - 1) * hop * 2 + RANKS * hop * 4)} | of
    return {name: (forward / 1e6, backward / 1e6) for name, (forward, backward) in of.items()}


moved = pd.concat(
    {
        f"{heads} heads on {heads_k}": pd.DataFrame(megabytes(heads, heads_k), ["fwd", "bwd"]).T
        for heads, heads_k in ((8, 8), (32, 8))
    },
    axis=1,
)
moved.columns = [f"{heads}, {way}" for heads, way in moved]
chapter.table(
    moved.reset_index(names="way"), name="tab-ranks-context", digits=dict.fromkeys(moved, 0),
    caption="**Heads exchanged move the fewest bytes.** Megabytes that each rank receives, "
    "gradients of K and V in fp32.",
    modelled="parallel.predicted_bytes; of the ring K and V in bf16, and dK and dV over P hops",
)  # fmt: skip
assert (moved.idxmin() == "heads exchanged").all(), "the caption"
assert moved.loc["queries stay", "8 heads on 8, fwd"] == moved.loc["ring", "8 heads on 8, fwd"]
rate = results.ceilings(chapter.record("measuring/power_wall"), "sustained").tflops * 1e12
takes = 4 * N**2 * DIM * 8 / RANKS / rate  # all pairs, as without a mask
chapter.glue(
    hides=rate / (LINK_GBYTES * 1e9), matmuls=1e3 * takes,
    exchange=moved.loc["heads exchanged", "8 heads on 8, fwd"] / LINK_GBYTES,
    gather=moved.loc["queries stay", "8 heads on 8, fwd"] / LINK_GBYTES,
)  # fmt: skip

# %% [markdown]
# *Backward.* With Q, K and V at hand, heads exchanged receive dO and give back dQ, dK and dV in 16
# bits. Where queries stay, dK and dV return in fp32; where keys stay, dO comes and dQ returns.
#
# *Limit.* Ranks must divide the key heads, of which grouped heads leave few.
#
# *Overlap.* A hop of $n = N / P$ rows is $4 n K d$ bytes and brings $4 n^2 H d$ FLOPs. With $H =
# K$, at the rate of a matmul back to back and 450 GB/s, it hides from $n$ = {glue:text}`hides:,.0f`
# rows on (modelled). An exchange has little to hide behind: the first score of a head needs rows of
# all ranks, and O goes back after the last. Only other heads could run meanwhile. But with 8 heads
# it takes {glue:text}`exchange:.2f` ms of the link, a gather {glue:text}`gather:.1f`, beside
# {glue:text}`matmuls:.0f` ms of matmuls (modelled). Our calls gather in one piece and hide nothing.
#
# *Balance.* Under a causal mask late rows see more keys. Heads exchanged are equal work; otherwise
# *zigzag* shards, an early and a late piece for each rank, even it out.

# %% tags=["remove-cell"]
SMALL = ["--context", "--size", "tiny", "--batch", 3, "--max-seqlen", 64, "--device", "cpu"]
SMALL += ["--warmup", 1, "--repeats", 1]
with contextlib.redirect_stdout(io.StringIO()):
    checked = pd.DataFrame(steps.run("ranks", *SMALL, ranks=2))
assert (checked["received"] == checked["predicted"]).all(), "the text"
busy = checked[checked["stationary"] == "queries"].set_index("layout")["busiest"]
assert max(map(max, checked["errors"])) < 1e-14 and busy["zigzag"] < busy["contiguous"], "the text"
chapter.glue(contiguous=busy["contiguous"], zigzag=busy["zigzag"])
# Measured before it was part of this chapter's plan.
BEFORE = "20261129T162355Z-serving-adds-up-nvidia-h200-c5ad890e"
of = None if "context" in chapter.record().tables else BEFORE

# %% [markdown]
# Two processes on a CPU gave the results of one and received the bytes predicted; the busier had
# {glue:text}`contiguous:.2f` times the mean work with contiguous, {glue:text}`zigzag:.2f` times
# with zigzag shards. On two GPUs:

# %% tags=["remove-input"]
spent = chapter.recorded("context", of).replace({"stationary": WAYS})
key = ["histories", "layout", "stationary"]
spent = spent.groupby([*key, "direction"], sort=False)["time_us"].median().groupby(key).sum()
alone, shared = spent.xs("one GPU", level="layout"), spent.drop("one GPU", level="layout")
gains = (alone.droplevel("stationary") / shared).unstack("histories")
gains.columns = ["one history, gain", "eight"]
most = gains.idxmax()
chapter.table(
    gains.reset_index().rename(columns={"stationary": "way"}), name="tab-ranks-gains",
    caption="**One history gains most where heads are exchanged, eight from contiguous shards.** "
    "Forward and backward of up to 65,536 and 16,384 tokens, two H200 beside one.",
    measured=chapter.holders("context", of),
)  # fmt: skip
assert [*most] == [("contiguous", "heads exchanged"), ("contiguous", "keys stay")], "the caption"
zigzag = gains.loc["zigzag"] / gains.loc["contiguous"]
in_place = zigzag.index.drop("heads exchanged")
assert (zigzag.loc[in_place, "one history, gain"] > 1).all(), "the text"
assert (zigzag["eight"] < 1).all(), "the text: every way"
eight = gains.loc["contiguous", "eight"]
assert eight["heads exchanged"] < eight[in_place].min(), "the text: in place is ahead"

# %% [markdown]
# Zigzag shards help one long history where keys or queries travel. With eight histories every way
# is faster with contiguous shards, and what stays in place beats an exchange of heads.
#
# ## Exercises
#
# :::{exercise} Sixteen ranks, eight key heads
# :label: ex-ranks-context
#
# 262,144 tokens, 32 query heads on 8 key heads of 128, bf16, 16 ranks. (a) Which ways are there,
# and what does a rank receive in the forward pass? (b) Combine two. *(paper, fifteen minutes)*
# :::

# %% tags=["remove-cell"]
LONG_N, OF_16 = 2 * N, (32, 8, DIM, torch.bfloat16)
gathered, summed = (
    predicted_bytes(way, LONG_N // 16, 16, *OF_16)[0] for way in ("queries", "keys")
)
swapped = predicted_bytes("sequences", LONG_N // 16, 8, *OF_16)[0]
paired = 2 * LONG_N // 2 * DIM * 2  # K and V of one head, from the other group
chapter.glue(gathered=gathered / 1e9, summed=summed / 1e9, swapped=swapped / 1e6,
             paired=paired / 1e6, both=(swapped + paired) / 1e6)  # fmt: skip

# %% [markdown]
# :::{solution} ex-ranks-context
# :class: dropdown
#
# (a) 16 ranks do not divide 8 key heads. Queries that stay receive $4 N K d \cdot 15/16$ =
# {glue:text}`gathered:.1f` GB, keys that stay {glue:text}`summed:.1f` GB. (b) Two groups of eight
# exchange heads: {glue:text}`swapped:.0f` MB. Then a rank has half of the rows of one key head and
# gathers the other half from the other group, {glue:text}`paired:.0f` MB, together
# {glue:text}`both:.0f`; this hides behind its own half.
# :::
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
# Eight GPUs of 132 SMs train with DDP: 2 GB of gradients, 450 GB/s in each direction, a persistent
# backward kernel of 10 ms with static shares. (a) How many bytes does a rank send, in which time at
# the least? (b) The all-reduce runs on 8 SMs at half the link's rate and starts just before the
# kernel. How long does the kernel take with 132 programs? (c) With 124? With a shared counter? (d)
# Which would you ship, and what does it cost on one GPU? *(paper, thirty minutes)*
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
# - For one long sequence exchange heads, if the ranks divide them. For several, time contiguous
#   shards whose keys or queries stay first.
