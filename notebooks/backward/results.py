# ---
# jupyter:
#   kernelspec: {display_name: Python 3, language: python, name: python3}
# measures: true
# ---

# %% [markdown]
# # Results: backward
#
# Three published charts show the backward pass. What do they look like on an H200?
#
# :::{admonition} In this chapter (20 minutes)
# You will read the published backward charts beside ours, and price a whole training step in time
# and memory. Back to back on the H200, as training runs them, our best kernel is
# {glue:text}`over_peer` times as fast as the best baseline. It is ahead on {glue:text}`won:.0f` of
# {glue:text}`count:.0f` workloads, and behind on {glue:text}`lost`.
# :::

# %% tags=["hide-input"]
import pandas as pd

from _lib import gradients, ratios
from _lib.ratios import spread
from gdpa_kernels.calling import ladder
from gdpa_kernels.gdpa.kernels.v5_short_kv_backward import MOST_KEYS
from gdpa_lab.measuring.baselines import taking
from gdpa_lab.measuring.workload import STEP
from gdpa_lab.measuring.workloads import FIGURES, HSTU, workload
from gdpa_lab.report.chapter import Chapter
from gdpa_lab.report.peers import missing_peers
from gdpa_lab.report.roles import display_name

# %% tags=["parameters"]
mode = "replay"
device = "cpu"
data_dir = "data"

# %% tags=["remove-cell"]
chapter = Chapter("backward/results", mode=mode, device=device, data_dir=data_dir)
RUNGS = [rung.impl for rung in ladder.BACKWARD_RUNGS]
V1, V2, V2A, V4, V5 = RUNGS[:5]
BLACKWELL = [rung.impl for rung in ladder.BLACKWELL_BACKWARD_RUNGS]
NAMES = list(dict.fromkeys(n for figure in FIGURES if "-bwd-" in figure for n in FIGURES[figure]))
STEPS = ["gdpa-self-full-1024", "gdpa-cross-full-2048", "gdpa-self-full-256"]


def rungs_on(name):
    return [V1, V2, V2A, V4, *[V5] * (workload(name).max_seqlen_k <= MOST_KEYS)]


def plan(session, names=NAMES, steps=STEPS):
    how = {"direction": "backward", "seconds": 0.7}
    for name in names:
        work, rungs = workload(name), rungs_on(name)
        others = [*BLACKWELL, *taking(work, "backward")]
        others.remove("torch_compile")
        if "cudnn" in others:
            others.remove("cudnn_varlen")  # its dense form is timed
        if name != STEPS[0] and "flex" in others:
            others.remove("flex")  # it compiles a minute for every shape
        impls = [*rungs, *others]
        bursts = impls if "self-full" in name else []
        scopes = {"kernel": bursts, "sustained": impls, "op": impls if name in steps else []}
        session.measure(work, impls, scopes=scopes, **how)
    for work in map(workload, HSTU):
        impls = [V1, V4, *taking(work, "backward", "activation")]
        session.measure(work, impls, scopes=("sustained",), **how)
    for name in steps[:2]:
        gradients.memory(session, workload(name), [*rungs_on(name), "fa2_varlen"])


chapter.measure(plan)
few = [name for name in NAMES if name.endswith(("-512", "-1024"))]
here = chapter.compare(lambda session: plan(session, few, []))

# %% tags=["remove-cell"]
shown = {"direction": "backward", "scope": "sustained", "workload": NAMES}
rows, us, burst = chapter.rows(**shown), chapter.times(**shown), chapter.times(direction="backward")
timed, elsewhere = rows[rows["time_us_p50"].notna()], ratios.sustained(chapter)
best = ratios.best(rows, elsewhere)
planned = chapter.rows(**shown | {"workload": [*NAMES, *HSTU]})
ours, every = us.columns.intersection(RUNGS), burst.columns.intersection(RUNGS)
over = us.div(us[ours].min(axis=1), axis=0)  # times of the best kernel's time
DRAWN = [V1, V4, V5]
assert "fa4" in us, "the text compares with flash-attn-4==4.0.0b36: install it and measure again"
assert timed["correct"].all(), "the text says that nothing is timed without a passed check"
ahead, share = best["peer / rung (time)"], best["share (%)"]
lost = ratios.listed(f"{ratios.row(n)} ({x:.2f})" for n, x in ahead[ahead < 1].items())
assert best["rate"]["gdpa-self-full-256"] > best["rate"]["gdpa-self-full-512"], "the surprise"
assert ahead.filter(like="cross").min() > 1.5, "the caption: v5 far above"
fits = [workload(name).max_seqlen_k <= MOST_KEYS for name in best.index]
assert (best["best rung"][fits] == V5).all() and ahead[fits].min() > 1.1, "the table's caption"
by_rung = best["best rung"].filter(regex="self-full|half-dense")
short_keys = by_rung.index.str.endswith("-256")
assert (by_rung[short_keys] == V5).all() and (by_rung[~short_keys] == V4).all(), "the captions"
long = best.loc[["gdpa-self-full-1024", "gdpa-self-full-2048"]]
assert long["best peer"].str.startswith("fa").all(), "the caption: FlashAttention"
assert long["peer / rung (time)"].between(0.94, 1).all(), "the caption: just ahead"
ragged = rows[rows["impl"] == "cudnn_varlen"]
failed = ragged["failure"].str.contains("check failed")
assert (failed == ragged["time_us_p50"].isna()).all(), "the text says so"
fa4_by_fa2 = (us["fa4"] / us["fa2_varlen"]).dropna()
retained = 100 * (burst / us)[ours].min(axis=1)
chapter.glue(over_peer=ratios.ahead(best), won=(ahead >= 1).sum(), count=len(best), lost=lost,
             few_keys=share.filter(regex="cross|-256").max(), checked=len(timed),
             more_keys=share.filter(regex="self.*-(?:512|1024|2048)").max(),
             kept=f"{retained.min():.0f} to {retained.max():.0f}",
             over_triton=spread(over["gdpa_triton"].dropna()),
             ragged_timed=(~failed).sum(), ragged_failed=failed.sum(),
             fa3_first=best["best peer"].isin(["fa3", "fa3_dense"]).sum(),
             fa4_first=best["best peer"].isin(["fa4", "fa4_dense"]).sum(),
             missing="; ".join(missing_peers(planned)),
             **ratios.glued(best))  # fmt: skip

# %% tags=["remove-input"]
# | name: fig-self-bwd-full
# | caption: >
# |   **Backward v5 leads where 256 keys are all, and with few keys has the chart to itself; from
# |   1,024 tokens on full batches FlashAttention is just ahead of backward v4.** Percent of the own
# |   roofline, back to back. Bars: the published kernel on its GPU, under assumed
# |   {ref}`ceilings <rule-ceiling>`.
# | alt: >
# |   Three small charts over sequence length. v5 is far above the grey line of the best baseline at
# |   256 tokens and at every number of queries on 256 keys. v4 and the baseline meet as they rise.
# |   Hollow bars stand for the published kernel.
CHARTS = {"gdpa-self-bwd-full": "full", "gdpa-self-bwd-half": "half full, dense keys",
          "gdpa-cross-bwd-full": "256 keys"}  # fmt: skip
few = ahead.filter(like="cross")
ratios.redrawn(
    chapter,
    CHARTS,
    DRAWN,
    f"With 256 keys backward v5 is {spread(few)} times as fast as the best baseline.",
)

# %% [markdown]
# ## What was compared
#
# The workloads are those of {doc}`../forward/results`, with a gradient of the output drawn from
# N(0, 1). A time covers all kernels of the pass: a kernel that sums dQ in fp32 pays for the zero
# fill and the rounding, a softmax baseline for its row sums. *Useful FLOPs* are five matmuls for
# everybody. All {glue:text}`checked:.0f` times {ref}`back to back <rule-scope>` belong to gradients
# that passed the check against fp64; our kernels keep {glue:text}`kept` % of their burst rates.

# %% tags=["remove-input"]
ratios.against(
    chapter, ratios.shown(best, "backward"),
    "Backward v5 leads wherever all keys fit on the chip; beyond, FlashAttention comes level.",
    ratios.behind(timed, best, elsewhere), "tab-backward-best",
)  # fmt: skip

# %% [markdown]
# The backward pass stays farther from its roofline than the forward pass. Its five matmuls need
# three {term}`accumulators <accumulator>`, and dQ has to leave the SM after every 128 keys. A full
# batch of 256 tokens runs faster than one of 512: backward v5 keeps all keys on chip, and 256 is
# the most that fit. The publication claims 1.6 times Triton {cite}`xu2026gdpa`; over that kernel
# the factor here is {glue:text}`over_triton`.

# %% [markdown]
# With few keys, a dQ in fp32 is zeroed, added to twice and read again; backward v5 does none of it.
#
# ## The baselines
#
# FlashAttention-4 is the best baseline on {glue:text}`fa4_first:.0f` workloads, FlashAttention-3 on
# {glue:text}`fa3_first:.0f`. Ragged cuDNN, called by its own frontend, is right and timed on
# {glue:text}`ragged_timed:.0f` workloads; called through PyTorch, in older runs, its gradients fail
# the check on {glue:text}`ragged_failed:.0f`. Without a time back to back:
# {glue:text}`missing`.

# %% tags=["remove-input"]
ratios.untimed(chapter, planned)

# %% [markdown]
# ## What a training step costs
#
# A *step* is `gdpa` with `impl="auto"` on tensors that require gradients, and `torch.autograd.grad`
# of its result. Steps have pauses between them, so kernels stand beside them in bursts.

# %% tags=["remove-cell"]
ops, step = (chapter.times(direction="backward", scope="op", variant=v).loc[STEPS]
             for v in ("", STEP))  # fmt: skip
call = pd.DataFrame({
    "fastest": [display_name(impl, "backward") for impl in step.idxmin(axis=1)],
    "kernels (ms)": (burst.loc[STEPS, every].min(axis=1) / 1e3).round(2),
    "backward call (ms)": (ops.min(axis=1) / 1e3).round(2),
    "step (ms)": (step.min(axis=1) / 1e3).round(2),
    "step of v1 / step": (step[V1] / step.min(axis=1)).round(2),
})  # fmt: skip
called = chapter.rows(direction="backward", scope="op", variant=["", STEP])
forward = chapter.times("forward/results", direction="forward").loc[STEPS[-1], "v8_own_waits"]
in_kernels = call["kernels (ms)"].iloc[-1] + forward / 1e3
assert call["step (ms)"].iloc[-1] > 2 * in_kernels, "the text: half of a step"

# %% tags=["remove-input"]
chapter.table(
    call.rename(index=ratios.row).reset_index(names="workload"), measured=called,
    name="tab-backward-step", digits={"kernels (ms)": 2},
    caption="**The call around the kernels decides short batches.** Kernels in bursts, autograd's "
    "backward call alone, and a whole step; the last column is backward v1's step over the best.",
)  # fmt: skip

# %% [markdown]
# On full batches of 256 tokens more than half of a step passes outside the kernels of both passes
# ({doc}`../training/host_time`).
#
# ## Memory of a step
#
# A step must hold the output and three gradients, and for an fp32 dQ twice the size of q more:

# %% tags=["remove-cell"]
memory = chapter.recorded("memory").set_index(["workload", "impl"])["bytes"].astype(float)
counted = {}
for name, impl in memory.drop("fa2_varlen", level="impl").index:
    work = workload(name)
    q, k = 256 * work.num_heads_q * work.total_q, 256 * work.num_heads_k * work.total_k  # bytes
    counted[name, impl] = 2 * q + 2 * k + (2 * q if impl in (V2, V2A, V4) else 0)
counted = pd.Series(counted)

# %% tags=["remove-input"]
gib = (memory / 2**30).unstack("workload").loc[[*every, "fa2_varlen"], STEPS[:2]].round(2)
gib = gib.rename(columns=ratios.row, index=lambda x: display_name(x, "backward"))
chapter.table(
    gib.reset_index(names="GiB"), measured=chapter.holders("memory"), name="tab-backward-memory",
    caption="**A dQ in fp32 costs memory: v1 and v5 do without.** Peak allocation of a "
    "step beside its inputs, GiB.", missing="does not take it",
)  # fmt: skip

# %% tags=["remove-cell"]
chapter.predict(
    "FlashAttention-4 is slower than FlashAttention-2 where there are 256 keys, as it is in the "
    "forward pass; the smallest ratio of their times decides.",
    fa4_by_fa2.filter(regex="full-256|cross"), least=1,
)  # fmt: skip
chapter.predict(
    "FlashAttention-4 is faster than FlashAttention-2 on full batches of 2,048 tokens.",
    fa4_by_fa2["gdpa-self-full-2048"], most=1, shown=False,
)  # fmt: skip
chapter.predict(
    "A step takes 1.15 to 1.40 times the time of its backward kernels on full batches of 1,024 "
    "tokens, since the forward pass has two matmuls of seven, at a higher rate.",
    step.loc[STEPS[0]].min() / burst.loc[STEPS[0], every].min(), least=1.15, most=1.40,
)  # fmt: skip
chapter.predict(
    "The peak memory of every kernel's step is within 5 % of the count; the largest difference "
    "decides.",
    100 * (memory[counted.index] / counted - 1).abs(), most=5, form=".1f", unit=" %",
)  # fmt: skip

# %% [markdown]
# If memory is short and time is not, take backward v1, or v5 where it applies.

# %% tags=["remove-input"]
chapter.predictions()

# %% [markdown]
# ## Other boards
#
# `make compare NOTEBOOKS=backward/results` shows two lengths of every chart on your GPU beside
# ours; `make measure` appends a record.

# %% tags=["remove-input"]
ratios.others(chapter, here, "backward")

# %% [markdown]
# ## Takeaways
#
# - Back to back with at most 256 keys, where dQ can stay on chip, the best kernel reaches
#   {glue:text}`few_keys:.0f` % of the roofline, with more keys {glue:text}`more_keys:.0f` %.
# - Name the baseline, the batch and the range. The largest "times as fast" belongs to the weakest
#   baseline.
