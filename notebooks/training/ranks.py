# ---
# jupyter:
#   kernelspec: {name: python3, display_name: Python 3}
# measures: true
# ---

# %% [markdown]
# # Two GPUs
#
# Jagged batches give ranks unequal work, and every step ends when the slowest has. What does that
# cost, and what do gradients on their way cost?
#
# :::{admonition} In this chapter (10 minutes)
# You will tell waiting for a slower rank from waiting for gradients, deal rows so that ranks are
# equal, and see when that matters. On two H200s we train {glue:text}`weak:.2f` times the samples of
# one. With 128 long rows a rank, a bad deal makes the slower one {glue:text}`sorted_many:.2f` times
# as slow as the mean, a good one {glue:text}`balanced_many:.3f`.
# :::

# %%
from _lib import steps
from gdpa_lab.measuring import record
from gdpa_lab.report.chapter import Chapter

# %% tags=["parameters"]
mode = "replay"
device = "cpu"
data_dir = "data"

# %%
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

# %% tags=["remove-cell"]
NUMBERS = ("engine", "deal", "ranks", "batch", "step_s", "samples_per_s", "slowest_s", "skew")


@chapter.measure
def _(session):
    found, samples, link = [], [], steps.link()
    session.uses(max(ranks for ranks, _ in RUNS.values()))
    for run, (ranks, options) in RUNS.items():
        for row in steps.run("ranks", *options, ranks=ranks):
            most = max(row["tokens"]) / (sum(row["tokens"]) / ranks)
            found.append((run, link, most, *(row[number] for number in NUMBERS)))
            for what, each in row["samples_s"].items():
                for rank, times in enumerate(each):
                    samples += [(run, row["deal"], what, rank, i, s) for i, s in enumerate(times)]
    columns = ("run", "link", "tokens_most_over_mean", *NUMBERS)
    session.tables["ranks"] = record.Table(columns, tuple(found))
    columns = ("run", "deal", "what", "rank", "sample", "time_s")
    session.tables["samples"] = record.Table(columns, tuple(samples))


# %% [markdown]
# ## What is measured
#
# `examples/ranks.py` runs KunlunLite ({doc}`step`) under torchrun, on PyTorch's own engines: DDP,
# which averages gradients while backward still runs, and FSDP2, which also shards the weights. For
# each way to deal rows it times whole steps. Then the same steps without any communication
# (`no_sync`), each rank on its own: the slowest of them is what the step must wait for, and what a
# step takes beyond that is communication nobody hides.
#
# | rows go | |
# |:--|:--|
# | `order` | as they come |
# | `snake` | groups of 16, heaviest first, to and fro over the ranks |
# | `sorted` | the longest half to rank 0: the worst case |
# | `balanced` | the longest first, each to the rank with the least work that has room |
#
# ## Predictions
#
# From lengths alone, with work $n^2 + 4{,}096 n$ for a row of n tokens, and from the bytes of the
# gradients: about 200 MB, 0.7 ms by a script's all-reduce on such a pair.

# %%
ranks = chapter.recorded("ranks").set_index(["run", "deal"])
one, twice = ranks.loc["one GPU", "balanced"], ranks.loc["DDP, twice the rows", "balanced"]
weak = twice["samples_per_s"] / one["samples_per_s"]
strong = ranks.loc[("DDP, the same rows", "balanced"), "samples_per_s"] / one["samples_per_s"]
exposed = 1e3 * (ranks["step_s"] - ranks["slowest_s"])
few, many = (ranks.loc[f"{n} rows a rank"] for n in (32, 128))

# %% tags=["remove-input"]
chapter.predict(
    "Two GPUs with twice the rows train so many times the samples of one.",
    weak,
    least=1.9,
    most=2.0,
)
chapter.predict("Communication that a DDP step does not hide.", exposed["DDP, twice the rows",
                "balanced"], most=1, unit=" ms")  # fmt: skip
chapter.predict("32 rows a rank in order: slowest over mean.", few.loc["order", "skew"],
                least=1.05, most=1.19)  # fmt: skip
chapter.predict("128 rows a rank in order.", many.loc["order", "skew"], least=1.0, most=1.09)
chapter.predict("Balanced, 32 rows.", few.loc["balanced", "skew"], most=1.02)

# %% [markdown]
# ## Measurement

# %% tags=["remove-input"]
shown = ranks.assign(
    step_ms=1e3 * ranks["step_s"], own_ms=1e3 * ranks["slowest_s"], exposed=exposed
)
names = {"step_ms": "step, ms", "own_ms": "slowest rank alone, ms", "exposed": "beyond it, ms",
         "skew": "slowest / mean", "tokens_most_over_mean": "most tokens / mean",
         "samples_per_s": "rows/s"}  # fmt: skip
table = shown[list(names)].rename(columns=names).round(3).reset_index()
chapter.table(table, data=ranks.reset_index(), measured=[chapter.record().id])
chapter.lacks("samples", "This record keeps medians of steps, not the steps. Its system names one "
              "GPU; the rows of two ran on two of them.")  # fmt: skip

# %% tags=["remove-cell"]
chapter.glue(
    weak=weak, strong=strong, link=ranks["link"].iloc[0], sorted=few.loc["sorted", "skew"],
    many=many.loc["order", "skew"], sorted_many=many.loc["sorted", "skew"],
    balanced_many=many.loc["balanced", "skew"], most=many.loc["sorted", "tokens_most_over_mean"],
    quarter=250 * many.loc["balanced", "step_s"], least=1e3 * few["step_s"].min(),
    longest=1e3 * few["step_s"].max(),
    fsdp=ranks.loc[("FSDP2, twice the rows", "balanced"), "step_s"] / twice["step_s"],
)  # fmt: skip

# %% [markdown]
# The link is {glue:text}`link`. With twice the rows two GPUs train {glue:text}`weak:.2f` times the
# rows of one, with the same rows {glue:text}`strong:.2f` times. FSDP2 takes {glue:text}`fsdp:.2f`
# times DDP's step: this model fits on one GPU many times over, and sharding it only adds messages.
#
# Rows with up to 4,096 tokens: sorted, one rank has {glue:text}`most:.2f` times the mean of tokens
# and takes {glue:text}`sorted_many:.2f` times as long. In the order they come, chance makes that
# {glue:text}`many:.3f`, too little to care; balanced {glue:text}`balanced_many:.3f`.
#
# ## The surprise: small ranks wait for their hosts
#
# 32 rows should take a quarter of the time of 128, {glue:text}`quarter:.0f` ms. They take
# {glue:text}`least:.0f` to {glue:text}`longest:.0f`, whatever the deal: in eager mode the host
# enqueues more slowly than the device works, and unequal work hides behind it. Even sorted rows
# cost only {glue:text}`sorted:.2f`. The predictions came from lengths alone and did not know the
# host. Balance large batches; compile small ones first ({doc}`host_time`).
#
# The snake over groups fails where one group holds the longest of all rows and nothing weighs
# against it. On uniform lengths that does not happen.
#
# ## Is it right?
#
# In the tests two processes on a CPU train the same steps as one, with equal losses; a rank without
# a token takes part; if a rank is killed the others end with an error that says so, and a run that
# resumes from the last checkpoint, on another number of ranks too, has the same loss.
#
# ```bash
# torchrun --nproc-per-node 2 examples/train.py --engine ddp --compile --checkpoint runs/first
# ```
#
# ## Exercises
#
# :::{exercise} More ranks
# :label: ex-ranks-more
#
# The slowest of R ranks, each with 32 rows: how does it grow with R? *(ten lines,
# `examples/data.py`)*
# :::
#
# :::{solution} ex-ranks-more
# :class: dropdown
#
# A work of this law has a standard deviation of 0.7 of its mean, a sum of 32 of 12 %, and the
# largest of R normal numbers lies 1.4 (8 ranks) to 2.4 (64) deviations up: 1.18 and 1.29.
# `deal(lengths, R, "order")` and `cost` give the exact value.
# :::
#
# :::{exercise} What to balance
# :label: ex-ranks-what
#
# Ranks with equally many tokens: what remains unequal? When does it not matter? *(paper)*
# :::
#
# :::{solution} ex-ranks-what
# :class: dropdown
#
# Pairs. It does not matter where projections outweigh attention, that is for mean lengths well
# below 4,096 at a width of 512.
# :::
#
# :::{exercise} Unequally many rows
# :label: ex-ranks-rows
#
# If ranks could have different numbers of rows, balancing would be easier. What goes wrong in the
# gradient, and what mends it? *(paper)*
# :::
#
# :::{solution} ex-ranks-rows
# :class: dropdown
#
# DDP averages over ranks, and each rank's loss is a mean over its rows, so rows of a small rank
# weigh more. Scale each rank's loss by its rows times ranks over all rows.
# :::
#
# ## Takeaways
#
# - Time each rank without communication before you blame the network.
# - Deal rows by work, equally many to each rank, once the device is the limit.
# - A model that fits needs DDP, not sharding.
