# ---
# jupyter:
#   kernelspec: {display_name: Python 3, language: python, name: python3}
# measures: true
# ---

# %% [markdown]
# # Attention that adds up
#
# Softmax divides each weight by a sum over all keys. GDPA divides by nothing. What does that buy
# when you serve a model?
#
# :::{admonition} In this chapter (30 minutes)
# You will split a call over its keys and add up the parts, tell when cached keys and values may be
# used again, and say what deleting an event by subtraction can promise.
# :::

# %% tags=["hide-input"]
import functools
import random

import pandas as pd
import torch

import tritonemu
from gdpa_kernels import GDPASelfAttention, Mask, gdpa
from gdpa_kernels.serving import HistoryRules, PagedCache, score
from gdpa_kernels.serving.layers import extend
from gdpa_kernels.serving.sums import StoredSums
from gdpa_lab.measuring.inputs import cu_seqlens
from gdpa_lab.measuring.workloads import workload
from gdpa_lab.report import charts, results
from gdpa_lab.report.chapter import Chapter
from notebooks.serving import _times

# %% tags=["parameters"]
mode = "replay"
device = "cpu"
data_dir = "data"

# %% tags=["remove-cell"]
chapter = Chapter("serving/adds_up", mode=mode, device=device, data_dir=data_dir)


@chapter.measure
def _(session):
    rungs = ["v8_own_waits", "v1_tiled"]
    of = workload("gdpa-self-full-256")
    session.launch("serving", of, rungs, functools.partial(_times.measure, session))


torch.manual_seed(0)
EVENTS, SEEDS, UPDATES = 256, 4, 10_000
MARKS = (10, 100, 1_000, UPDATES)
SAME, OTHER, LOW = "one kernel", "two kernels", "sum in bf16"


def draw(rows: int, heads: int = 1, dim: int = 32, dtype=torch.bfloat16) -> torch.Tensor:
    return torch.randn(rows, heads, dim).to(dtype)


def apart(actual: torch.Tensor, wanted: torch.Tensor) -> float:
    """The relative error."""
    return float((actual.double() - wanted).norm() / wanted.double().norm())


def parts(impl: str) -> torch.Tensor:
    """Sums that each event adds to the queries, by one implementation: fp32 `[events, ...]`."""
    each = torch.arange(EVENTS + 1, dtype=torch.int32)
    with tritonemu.enabled():
        out = gdpa(q, k, v, None, each, SEEDS, 1, impl=impl, out_dtype=torch.float32)
    return out.view(EVENTS, *q.shape)


q, k, v = draw(SEEDS), draw(EVENTS), draw(EVENTS)
kernel_parts, theirs = parts("v1_tiled"), parts("reference")
# Of each sum: what an event adds, and what its deletion takes away.
ways = {
    SAME: (kernel_parts, kernel_parts),
    OTHER: (kernel_parts, theirs),
    LOW: (kernel_parts.bfloat16(), kernel_parts.bfloat16()),
}
sums = {name: functools.reduce(torch.add, added) for name, (added, _) in ways.items()}
held, errors, chosen = [True] * EVENTS, {}, random.Random(0)
for update in range(1, UPDATES + 1):
    event = chosen.randrange(EVENTS)
    for name, (added, deleted) in ways.items():
        sums[name] = sums[name] + (-deleted[event] if held[event] else added[event])
    held[event] = not held[event]
    if update in MARKS:
        wanted = kernel_parts[torch.tensor(held)].double().sum(0)
        errors[update] = {name: apart(x, wanted) for name, x in sums.items()}
errors = pd.DataFrame(errors).T.rename_axis("updates")
last = errors.loc[UPDATES]
assert last[SAME] < 1e-5 < 1e-3 < last[[OTHER, LOW]].min(), "the caption"
assert 5 < last[OTHER] / errors.loc[1_000, OTHER] < 20, "the text: in proportion"

# %% tags=["remove-input"]
# | name: fig-sum-rounding
# | caption: >
# |   **A stored sum stays right if the kernel that added an event also deletes it.** Relative error
# |   of a stored sum: four fixed queries over a changing set of 256 events, after so many random
# |   additions and deletions. One kernel, or two, with a sum in fp32; one with a sum in bf16.
# | alt: >
# |   Three lines on logarithmic axes. The fp32 sum with one kernel rises slowly and stays far below
# |   the other two: the fp32 sum with two kernels, which rises steeply, and the sum in bf16.
chart = charts.lines(
    errors, xlabel="updates", ylabel="relative error", log="xy", highlight=[SAME, OTHER],
    ylim=(1e-8, 1.0),
)  # fmt: skip
chapter.figure(chart, data=errors.reset_index(), emulated="v1_tiled on a CPU; sums by PyTorch")

# %% [markdown]
# ## One step of algebra
#
# Take one query $q$ over the keys of two sets, $A$ and $B$. With activation $f$ and the factors of
# {eq}`eq-gdpa`:
#
# $$
# \begin{aligned}
# O(A \cup B) &= c \sum_{j \in A \cup B} f(s\, q \cdot k_j)\, v_j \\
# &= c \sum_{j \in A} f(s\, q \cdot k_j)\, v_j \;+\; c \sum_{j \in B} f(s\, q \cdot k_j)\, v_j \\
# &= O(A) + O(B) .
# \end{aligned}
# $$ (eq-adds-up)
#
# In softmax attention a part must return the logarithm of its own sum, and a merge rescales both
# parts {cite}`milakov2018online,dao2022flashattention`. Here only rounding remains: `gdpa` returns
# its fp32 sum if asked (`out_dtype`), and can add to one before it rounds (`add_to`):


# %% tags=["remove-cell"]
def keys_of(first: int, last: int) -> tuple:
    """Arguments of `gdpa` for 16 queries over keys first to last."""
    ends = (cu_seqlens([n], "cpu") for n in (16, last - first))
    return q, k[first:last], v[first:last], *ends, 16, last - first


q, k, v = draw(16, 2), draw(1000, 2), draw(1000, 2)
exact = gdpa(*(x.double() for x in (q, k, v)), *keys_of(0, 1000)[3:], impl="reference")

# %%
# keys_of: the queries, some of the keys and values, their offsets and lengths
with tritonemu.enabled():
    first = gdpa(*keys_of(0, 600), impl="v1_tiled", out_dtype=torch.float32)
    summed = gdpa(*keys_of(600, 1000), impl="v1_tiled", add_to=first)

# %% tags=["remove-input"]
with tritonemu.enabled():
    whole, rest = (gdpa(*keys_of(n, 1000), impl="v1_tiled") for n in (0, 600))
outputs = {"one call": whole, "two, in fp32": summed, "two, in bf16": first.bfloat16() + rest}
off = [apart(x, exact) for x in outputs.values()]
for name, error in zip(outputs, off, strict=True):
    print(f"{name:12} {error:.1e} from fp64")
assert off[1] < 1.05 * off[0] < off[2]

# %% [markdown]
# ## Split keys: every SM works for one user
#
# One user with 64 rows and four heads is work for four of 132 SMs. Forward v8 therefore cuts the
# keys of small batches into pieces, as many as fill the chip (SMs over tiles, rounded down:
# {glue:text}`pieces:.0f` for that user), each with an fp32 sum, and a second kernel adds these in a
# fixed order, so every run gives the same bits.

# %% tags=["remove-input"]
limits = results.ceilings(chapter.record("forward/results"))


def counts(users: int, rows: int, keys: int, heads: int = 4, dim: int = 128) -> tuple:
    """FLOPs, bytes read and bytes written of attention in bf16."""
    held, written = (users * n * heads * dim * 2 for n in (keys, rows))
    return 4 * users * rows * keys * heads * dim, 2 * held + written, written


def medians(table: str, columns: list[str]) -> pd.Series:
    """Median microseconds of the samples of a table."""
    return chapter.recorded(table).groupby(columns, sort=False)["time_us"].median()


SIZES = ["users", "rows", "keys"]
split = {}
for size, us in medians("splits", [*SIZES, "pieces"]).groupby(SIZES, sort=False):
    pieces = us.index.get_level_values("pieces")
    split[size] = {
        "pieces": pieces.max(), "whole, µs": us.iloc[pieces.argmin()],
        "split, µs": us.iloc[pieces.argmax()], "factor": us.iloc[0] / us.iloc[-1],
        "at least, µs": limits.floor_us(*counts(*size)),
    }  # fmt: skip
split = pd.DataFrame(split).T.rename_axis(SIZES).reset_index()
chapter.table(
    split, name="tab-sum-split", digits=dict.fromkeys((*SIZES, "pieces"), 0) | {"factor": 1},
    caption="**Splitting keys pays most where a batch has the fewest tiles.** Time of a call of "
    "forward v8 in a CUDA graph, sums included; head_dim 128, 4 heads.",
    measured=chapter.holders("splits"),
    modelled="the last column: the larger of FLOPs and bytes, at the ceilings of our H200",
)  # fmt: skip
pieces = split.query("users == 1 and rows == 64")["pieces"].max()
assert pieces == 132 // 4, "the text: SMs over tiles"
chapter.glue(pieces=pieces)
assert split["factor"].idxmax() == 1 and split["factor"].min() > 0.95, "the caption"

# %% [markdown]
# ## When a cache of keys and values is valid
#
# A server wants to keep the keys and values of every layer and compute only the rows of new events.
# That is right if no old row changes when an event is appended. `HistoryRules` says which rows
# stay:

# %% tags=["hide-input"]
ROWS, AT = 12, 6
kinds = {
    "causal": {}, "causal, window of 2": {"mask": Mask(True, window=2)},
    "bidirectional": {"mask": Mask(False)},
    "positions counted from the end": {"positions": "from_end"},
    "time until the query": {"query_time": True},
    "divided by the present length": {"constant_divisor": False},
}  # fmt: skip
reused = {}
for kind, options in kinds.items():
    for change, rows, position in (("append", ROWS, ROWS), ("delete", ROWS - 1, AT)):
        right = [rows - len(wrong) for wrong in HistoryRules(3, **options).changed(rows, position)]
        reused.setdefault(kind, {})[f"{change}: layers 1, 2, 3"] = ", ".join(map(str, right))
assert reused["causal"]["append: layers 1, 2, 3"] == "12, 12, 12", "the caption"

# %% tags=["remove-input"]
chapter.table(
    pd.DataFrame(reused).T.rename_axis("model").reset_index(), name="tab-sum-kept",
    caption="**A causal model keeps its cache when events are appended; several popular features "
    "break that.** Rows whose keys and values stay right: of 12 after an append, of 11 others "
    "after the seventh event is deleted.",
    computed="serving.validity.HistoryRules, which tests compare with models by brute force",
)  # fmt: skip

# %% [markdown]
# In a bidirectional model the new event is already in the keys of the second layer. The next two
# rows are causal models that embed recency {cite}`generativerecommenders`. `PagedCache` refuses an
# append that would make rows wrong:

# %%
recent = HistoryRules(3, positions="from_end")
cache = PagedCache(recent, num_pages=8, page_size=4, num_kv_heads=2, head_dim=8)
cache.append(["ann"], [5])
try:
    cache.append(["ann"], [1])
except ValueError as error:
    print(error)

# %% [markdown]
# For a model that passes, five events and then two more give the same rows as one call over all
# seven:

# %% tags=["hide-input"]
layers = [GDPASelfAttention(16, 2, causal=True, dtype=torch.float64) for _ in range(2)]
cache = PagedCache(HistoryRules(2), 8, 4, num_kv_heads=2, head_dim=8, dtype=torch.float64)
events = torch.randn(7, 16, dtype=torch.float64)
for x in events.split([5, 2]):
    new = cache.append(["ann"], [len(x)])
    for index, layer in enumerate(layers):
        x = extend(layer, x, cache, index, new, cache.pages(["ann"]))
whole = events
for layer in layers:
    whole, _ = layer((whole, cu_seqlens([7], "cpu")))
print(f"largest difference {(x - whole[5:]).abs().max().item():.1e}")
assert (x - whole[5:]).abs().max() < 1e-12

# %% [markdown]
# Pages also belong to an epoch, a value of yours that changes whenever the past is edited, so an
# edited history never finds its old keys.
#
# ## Deletion by subtraction: what it can promise
#
# After a deletion later rows must be computed again ({numref}`tab-sum-kept`), with one exception.
# If the *queries* are fixed, like the seeds of a {term}`PMA` over per-event features, each event is
# one term of {eq}`eq-adds-up`, and deleting it means subtracting its term. `StoredSums` keeps such
# sums:

# %%
q, k, v = draw(SEEDS), draw(5), draw(5)
first, user = cu_seqlens([5], "cpu"), torch.tensor([0])
stored = StoredSums(q, users=2, impl="reference", exact=True)
stored.add(user, k, v, first)
stored.delete(user, k[3:], v[3:], cu_seqlens([2], "cpu"))
stored.add(torch.tensor([1]), k[:3], v[:3], cu_seqlens([3], "cpu"))
print("the same bits as without the two:", torch.equal(stored.total[0], stored.total[1]))

# %% [markdown]
# {numref}`fig-sum-rounding` shows the catch. Forward v1 rounds $P$ to bf16 before its second matmul
# and the definition does not. If one adds and the other deletes, the difference stays behind, and
# the error grows in proportion to the updates. So `StoredSums` refuses to go on with a sum of
# another kernel.
#
# With `exact=True` each term is rounded once to an integer number of $2^{-30}$. Integers add
# without error, so nothing of a deleted event remains. If you delete for privacy, use it: an fp32
# sum keeps a trace in its last digits. Behind a second layer `PagedCache.edit` keeps the rows
# before the event, and you compute the others again.
#
# ## Candidates over a history
#
# A ranking model scores many candidates for each user. A candidate sees the history and itself, so
# its attention is a sum of two terms:

# %% tags=["remove-cell"]
assert torch.equal(stored.total[0], stored.total[1]), "the text"
HISTORY, SHOWN = [9, 4], [3, 5]
old, new = (draw(sum(n), 2, 16, torch.float64) for n in (HISTORY, SHOWN))
cache = PagedCache(HistoryRules(1), 8, 4, num_kv_heads=2, head_dim=16, dtype=torch.float64)
cache.write(0, cache.append(["ann", "bob"], HISTORY), old, old)
pages, offsets = cache.pages(["ann", "bob"]), cu_seqlens(SHOWN, "cpu")
q = k = v = new

# %%
scores = score(q, k, v, offsets, 5, cache, 0, pages, activation="silu")

# %% tags=["remove-cell"]
both = torch.cat([x for pair in zip(old.split(HISTORY), new.split(SHOWN), strict=True)
                  for x in pair])  # fmt: skip
ends = cu_seqlens([a + b for a, b in zip(HISTORY, SHOWN, strict=True)], "cpu")
one = gdpa(both, both, both, ends, ends, 12, 12, activation="silu", causal=True,
           num_targets=torch.tensor(SHOWN, dtype=torch.int32))  # fmt: skip
theirs = torch.cat([x[n:] for x, n in zip(one.split(ends.diff().tolist()), HISTORY, strict=True)])
assert (scores - theirs).abs().max() < 1e-12
ridge = limits.tflops / limits.gbytes_per_s(1, 0) * 1e3
SCORED = ["users", "events", "candidates"]
scored = medians("scores", [*SCORED, "way"]).unstack("way")[[*_times.WAYS]]
paged = scored["pages of 64"]
chapter.glue(
    ridge=ridge,
    gathering=(scored["gathered"] / paged).max(), floor=limits.floor_us(*counts(10, 2048, 6300)),
    dlrm=paged.loc[10, 6300, 2048],
)  # fmt: skip
requests = chapter.recorded("requests")

# %% [markdown]
# One call over history and candidates with the mask `num_targets` gives the same scores.
#
# A key and its value are $4 d$ bytes in bf16 and take part in $4 m d$ FLOPs with $m$ candidates:
# $m$ FLOPs per byte. At the rates of our H200 memory is the limit below {glue:text}`ridge:.0f`
# candidates per user, matmuls above (modelled). For ten users with 6,300 events and 2,048
# candidates each, as in MLPerf's DLRMv3, the history takes at least {glue:text}`floor:.0f` µs
# (modelled), and `score` {glue:text}`dlrm:.0f` µs, the candidates' own term included. Forward v8
# reads pages of a multiple of 64 tokens where they are, up to {glue:text}`gathering:.1f` times as
# fast as with a gather before it.

# %% tags=["remove-input"]
chapter.table(
    scored.drop(columns="pages of 128").reset_index(), name="tab-sum-scores",
    digits=dict.fromkeys(SCORED, 0),
    caption="**Reading pages in place wins at every size.** Microseconds of a layer's `score` in a "
    "CUDA graph; 4 heads, head_dim 128, bf16.",
    measured=chapter.holders("scores"),
)  # fmt: skip
assert (paged < scored[["gathered", "one call of v1"]].min(axis=1)).all(), "the caption"

# %% [markdown]
# `examples/serve.py` is a whole server: five layers, ten users a request with histories of up to
# 16,384 events, 2,048 candidates each. With 8,000 pages of 64 tokens not all users fit, and those
# who were evicted are read again:

# %% tags=["remove-input"]
SETTING = ["pages", "qps", "served_qps", "hit_ratio"]
served = requests.groupby(SETTING, sort=False)["time_us"].quantile([0.5, 0.99]).unstack() / 1e3
served.columns = ["p50, ms", "p99, ms"]
served = (
    served.reset_index()
    .rename(columns={"qps": "requests a second", "hit_ratio": "found in pages"})
    .drop(columns="served_qps")
)
chapter.table(
    served, name="tab-sum-requests",
    digits={"pages": 0, "requests a second": 0, "found in pages": 2, "p50, ms": 1,
            "p99, ms": 1},
    caption="**Half of the requests take at most 20 ms, also where histories are read again.** "
    "Latency of requests at a fixed rate, without the first two.",
    measured=chapter.holders("requests"),
)  # fmt: skip
assert served["p50, ms"].max() < 20.5, "the caption"
assert served["p99, ms"].idxmax() == 0 and served["p99, ms"].iloc[1:].max() < 30, "the text"

# %% [markdown]
# The first server's p99 is a compilation: warm a server up before it serves.
#
# ## Limits
#
# - A norm, a gate or a division comes *after* the sum: store the sum, not its result.
# - `scale` stands inside the activation. If it is one over the present length, every term changes
#   when an event arrives. Use a constant.
#
# ## Exercise
#
# :::{exercise} When to recompute
# :label: ex-sum-recompute
#
# In {numref}`fig-sum-rounding` each update adds as much to the square of the error of the fp32 sum
# with one kernel, beside what it begins with. After how many updates does the error reach an eighth
# of a rounding to bf16, about $2 \cdot 10^{-4}$? Use its last point. *(paper, five minutes)*
# :::

# %% tags=["remove-cell"]
squared = errors[SAME] ** 2
each = (squared.iloc[-1] - squared.iloc[0]) / (UPDATES - MARKS[0])  # what an update adds
law = (squared.iloc[0] + each * (errors.index - MARKS[0])) ** 0.5
law_off = 100 * (law / errors[SAME] - 1).abs().max()
assert law_off < 15 and each * UPDATES > 0.95 * squared.iloc[-1], "the exercise: the law"
chapter.glue(after=UPDATES * (2e-4 / last[SAME]) ** 2 / 1e6, law=last[SAME] / UPDATES**0.5,
             law_off=law_off)  # fmt: skip

# %% [markdown]
# :::{solution} ex-sum-recompute
# :class: dropdown
#
# In the end the error is {glue:text}`law:.2e` times the square root of the updates, so it takes
# {glue:text}`after:.0f` million of them. (With what it begins with, the law misses no mark of the
# figure by more than {glue:text}`law_off:.0f` %.) `StoredSums.stale` uses such a law, and also the
# largest size the sum has had, since the rounding of a large sum remains when it has become small.
# :::
#
# ## Takeaways
#
# - Attention without softmax over a union is the sum over its parts. Keep them in fp32 and round
#   once.
# - A cache is valid if old rows depend on nothing later.
# - Delete with the kernel that added, or use integers. Behind a second layer, recompute.
