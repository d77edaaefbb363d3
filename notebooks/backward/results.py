# ---
# jupyter:
#   kernelspec: {name: python3, display_name: Python 3}
# measures: true
# ---

# %% [markdown]
# # The published backward charts, measured again
#
# Three published charts show the backward pass. What do they look like on an H200, and why can one
# not be right?
#
# :::{admonition} In this chapter (20 minutes)
# You will read each published backward chart beside ours, find the series that cannot be what it
# says, and price a whole training step in time and memory. Back to back on the H200, as training
# runs them, the best rung is {glue:text}`over_peer` times as fast as the best peer: ahead on
# {glue:text}`won:.0f` of {glue:text}`count:.0f` workloads, behind on {glue:text}`lost`.
# :::

# %%
import pandas as pd

from _lib import gradients, ratios
from _lib.ratios import short, spread
from gdpa_kernels.calling import ladder
from gdpa_kernels.gdpa.kernels.v5_short_kv_backward import MOST_KEYS
from gdpa_lab.measuring.baselines import taking
from gdpa_lab.measuring.workload import STEP
from gdpa_lab.measuring.workloads import FIGURES, HSTU, workload
from gdpa_lab.report import claims
from gdpa_lab.report.chapter import Chapter
from gdpa_lab.report.peers import missing_peers

# %% tags=["parameters"]
mode = "replay"
device = "cpu"
data_dir = "data"

# %% [markdown]
# ## What runs
#
# The workloads of {doc}`../forward/results`, with a gradient of the output drawn from N(0, 1).
# *Kernel time* covers all kernels of the pass: a rung that sums dQ in fp32 pays for the zero fill
# and the rounding, a softmax peer for its row sums. Lists of work are made beforehand. *Useful
# FLOPs* are five matmuls for everybody, 2.5 times those of forward. v1 does seven and is credited
# with five, as in the publication.
#
# | rung | kernels of the pass | matmuls | who writes dQ |
# |:--|:--|--:|:--|
# | v1, {doc}`v1_tiled_backward` | two | 7 | its owner, once |
# | v2, {doc}`v2_fused_backward` | zero fill, one, rounding | 5 | TMA reduce-add |
# | v2a, {doc}`v2_fused_backward` | zero fill, one per 128 keys, rounding | 5 | additions in order |
# | v4, {doc}`v4_warp_specialized_backward` | zero fill, one, rounding | 5 | TMA reduce-add |
# | v5, {doc}`v5_short_kv_backward` | one, up to 256 keys | 5 | its owner, once |
#
# There is no v3: its persistent schedule came with v4. No figure has shapes for v6, at most 128
# keys, or v7, wide heads, both in {doc}`v5_short_kv_backward`. All peers
# compute softmax; they are timed through autograd, their backward alone. All run
# {term}`back to back <sustained scope>`, on full batches also in {term}`bursts <burst>`, each under
# ceilings timed the same way. Numbers are back to back unless it says burst.

# %%
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
        given, rungs = workload(name), rungs_on(name)
        others = [*BLACKWELL, *taking(given, "backward")]
        others.remove("torch_compile")
        if "half-dense" not in name and name != STEPS[0]:
            others.remove("cudnn_varlen")  # its gradients fail the check
        if name != STEPS[0] and "flex" in others:
            others.remove("flex")  # it compiles a minute for every shape
        impls = [*rungs, *others]
        bursts = impls if "self-full" in name else []
        scopes = {"kernel": bursts, "sustained": impls, "op": impls if name in steps else []}
        session.measure(given, impls, scopes=scopes, **how)
    for given in map(workload, HSTU):
        impls = [V1, V4, *taking(given, "backward", "activation")]
        session.measure(given, impls, scopes=("sustained",), **how)
    for name in steps[:2]:
        gradients.memory(session, workload(name), [*rungs_on(name), "fa2_varlen"])


chapter.measure(plan)
few = [name for name in NAMES if name.endswith(("-512", "-1024"))]
here = chapter.compare(lambda session: plan(session, few, []))

# %%
shown = {"direction": "backward", "scope": "sustained", "workload": NAMES}
rows, us, burst = chapter.rows(**shown), chapter.times(**shown), chapter.times(direction="backward")
timed = rows[rows["time_us_p50"].notna()]
best = ratios.best(rows).replace({"best rung": "_.*"}, "", regex=True)
ours = us.columns.intersection(RUNGS)
over = us.div(us[ours].min(axis=1), axis=0)  # times of the best rung's time

# %% tags=["remove-cell"]
DRAWN = [V1, *RUNGS[3:], "fa2_varlen", "fa3", "fa4", "cudnn", "cudnn_varlen"]
assert "fa4" in us, "the text compares with flash-attn-4==4.0.0b36: install it and measure again"
assert timed["correct"].all(), "the text says that nothing is timed without a passed check"
ahead = best["peer / rung (time)"]
lost = ratios.listed(f"{short(n)} ({x:.2f})" for n, x in ahead[ahead < 1].items())
chapter.glue(over_peer=spread(ahead), won=(ahead >= 1).sum(), count=len(best), lost=lost,
             few_keys=best["share (%)"].filter(regex="cross|-256").max(),
             more_keys=best["share (%)"].filter(regex="self.*-(?:512|1024|2048)").max(),
             checked=len(timed), cudnn=spread(over["cudnn"].dropna()),
             kept=spread((burst / us)[ours].min(axis=1)),
             **ratios.glued(best))  # fmt: skip

# %% [markdown]
# All {glue:text}`checked:.0f` times back to back are of gradients that passed the check against
# fp64 ({doc}`../measuring/protocol`), for a softmax peer against those of softmax.
#
# ## Self-attention, full

# %% tags=["remove-input"]
# | name: fig-self-bwd-full
# | caption: >
# |   Self-attention backward, all sequences of one length. Left: measured back to back; dashes are
# |   bursts, under a higher ceiling of their own. Right: published.
# | alt: >
# |   Two charts of TFLOP/s over sequence length on one scale. Measured on the H200, v5 has one
# |   point, at 256, far above all others. Our newest rungs rise, with dense cuDNN and
# |   FlashAttention-4 close by at 2,048. On the published chart all bars rise, and the CuTeDSL
# |   kernel is the highest.
ratios.redrawn(chapter, "gdpa-self-bwd-full", DRAWN)

# %% [markdown]
# From 512 tokens on the limit is the tensor cores. The best rung has
# {glue:text}`share_self-full_512:.0f` % of the roofline at 512 and
# {glue:text}`share_self-full_2048:.0f` % at 2,048, less than forward: five matmuls need three
# accumulators, and dQ has to leave after every 128 keys. Dense cuDNN takes {glue:text}`cudnn` times
# the time of the best rung on the batches of one length, here and below. Back to back our rungs
# keep {glue:text}`kept` of their rates in bursts.
#
# ## Self-attention, half full
#
# First with K and V dense, as in the published script:

# %% tags=["remove-input"]
# | name: fig-self-bwd-half-dense
# | caption: >
# |   Self-attention backward at fill 0.5, K/V dense as in the published script. Left: measured.
# |   Right: published.
# | alt: >
# |   Two charts of TFLOP/s over sequence length. Measured lines rise and are lower than on full
# |   batches; ours are the highest. The published bars rise too.
ratios.redrawn(chapter, "gdpa-self-bwd-half", DRAWN, "dense")

# %% [markdown]
# Then with K and V as long as Q. The right panel is the published dense chart again:

# %% tags=["remove-input"]
# | name: fig-self-bwd-half-jagged
# | caption: >
# |   Self-attention backward at fill 0.5, K/V jagged. Left: measured. The published chart, right,
# |   has K/V dense.
# | alt: >
# |   Two charts of TFLOP/s over sequence length. The measured lines with jagged keys have the shape
# |   of those with dense keys, a little lower.
ratios.redrawn(chapter, "gdpa-self-bwd-half", DRAWN, "jagged")

# %% [markdown]
# A tile of keys or a step of rows that is partly empty costs as much as a full one, and its FLOPs
# do not count. At 256 tokens the best rung falls from {glue:text}`best_self-full_256:.0f` TFLOP/s
# on the full batch to {glue:text}`best_self-half-jagged_256:.0f` with {term}`jagged` keys, at 2,048
# from {glue:text}`best_self-full_2048:.0f` to {glue:text}`best_self-half-jagged_2048:.0f`.
#
# ## Cross-attention with 256 keys

# %% tags=["remove-input"]
# | name: fig-cross-bwd-full
# | caption: >
# |   Cross-attention backward, 256 keys, queries of the length on the axis. Left: measured. Right:
# |   published; the hatched series is doubtful in the original.
# | alt: >
# |   Two charts of TFLOP/s over query length. v5 lies far above all peers and rises. On the
# |   published chart the bars of FlashAttention-4 are hatched.
ratios.redrawn(chapter, "gdpa-cross-bwd-full", DRAWN)

# %% [markdown]
# Here dQ is most of what is written. An fp32 dQ is zeroed, added to twice and read again; v5 does
# none of it. With 2,048 queries it has {glue:text}`share_cross-full_2048:.0f` % of the
# {term}`roofline`.
#
# ### The hatched bars
#
# The published numbers alone show that these FlashAttention-4 bars cannot be backward rates. Divide
# the rate of each backward bar by that of its forward bar:

# %%
published = claims.published_figures(data_dir)
bars = published.assign(chart=published["figure"].str.replace("-(?:fwd|bwd)", "", regex=True))
both = bars.pivot_table(index=["kernel", "chart", "length"], columns="direction", values="tflops")
quotient = (both["backward"] / both["forward"]).rename("quotient")
spans = quotient.groupby(["kernel", "chart"]).agg(["min", "max"]).round(2)
source = "bars of the README of ads_model_kernel_library/gdpa, NVIDIA B200"
chapter.table(spans.reset_index(), data=quotient.reset_index(), published=source)

# %% tags=["remove-cell"]
suspect = quotient.xs(("cutedsl_fa4", "gdpa-cross-full"), drop_level=False)
others = quotient.drop(suspect.index)
assert others.max() < 0.95 < suspect.min(), "the text says that one pair stands out"
chapter.glue(suspect=spread(suspect), rest=spread(others))

# %% [markdown]
# No kernel is as fast backward as forward: all other published pairs have {glue:text}`rest`, the
# suspect one {glue:text}`suspect`. The forward series was probably plotted twice; {doc}`the claims
# <../tools/claims>` say what that does to the published factor.
#
# ## Best rung, best peer
#
# Rates are in TFLOP/s. The last column is the peer's time over the rung's.

# %% tags=["remove-input"]
chapter.table(ratios.shown(best), measured=timed)

# %% [markdown]
# And each peer against the best rung, over the workloads for which it has a time:

# %%
peers = over.drop(columns=ours)
chapter.table(ratios.ranges(peers, "time of a peer / best rung").round(2), measured=timed)

# %% tags=["remove-input"]
ragged = rows[rows["impl"] == "cudnn_varlen"]
assert ragged["failure"].str.contains("check failed").all(), "the text says so"
chapter.glue(asked=len(ragged), fa4_first=best["best peer"].isin(["fa4", "fa4_dense"]).sum(),
             missing="; ".join(missing_peers(rows)) or "none")  # fmt: skip
fa4_by_fa2 = (us["fa4"] / us["fa2_varlen"]).dropna()
chapter.predict(
    "FlashAttention-4 is slower than FlashAttention-2 where there are 256 keys, as it is forward: "
    "the smallest ratio of times.", fa4_by_fa2.filter(regex="full-256|cross"), least=1,
)  # fmt: skip
chapter.predict(
    "And faster on full batches of 2,048 tokens.", fa4_by_fa2["gdpa-self-full-2048"], most=1
)

# %% [markdown]
# FlashAttention-4 is the best peer on {glue:text}`fa4_first:.0f` workloads. Ragged cuDNN, called
# through PyTorch, has no time on any of the {glue:text}`asked:.0f` workloads it was tried on: its
# gradients fail the check. Without a time back to back in this record:
# {glue:text}`missing`.
#
# ## What the ladder shows
#
# The time of the rung before over that of the rung, in bursts:

# %%
climb, every = ratios.steps(burst, ladder.BACKWARD_RUNGS), burst.columns.intersection(RUNGS)
bursts = chapter.rows(direction="backward", impl=RUNGS)
chapter.table(ratios.ranges(climb, "step").round(2), measured=bursts)

# %% tags=["remove-cell"]
of = {step.split(" / ")[1]: column.dropna() for step, column in climb.items()}
assert (of["v2a"] < 1).all() and (of["v4"] > 1).all() and (of["v5"] > 1).all(), "the text says so"
assert (of["v2"] < 7 / 5).all(), "the text says so"
chapter.glue(**{name: spread(x) for name, x in of.items()}, over_v1=over[V1].max(),
             price=100 * (1 / of["v2a"] - 1).max(),
             all=spread(burst[V1] / burst[every].min(axis=1)))  # fmt: skip

# %% [markdown]
# **v2**, one pass instead of two, gives {glue:text}`v2`. By matmuls alone it would be 7/5, reached
# on no workload: dQ now goes through memory in fp32. **v4**,
# {term}`warp specialization`, gives {glue:text}`v4`, and **v5**, with keys that stay,
# {glue:text}`v5` where it applies. All together it is {glue:text}`all` over v1. One rung is slower
# than its predecessor on every workload, by up to {glue:text}`price:.0f` %: v2a, which adds in a
# fixed order so that its gradients have the same bits in every run.
#
# The surprise is at 256 tokens. With v5 a full batch of 256 runs at
# {glue:text}`best_self-full_256:.0f` TFLOP/s, one of 512 at {glue:text}`best_self-full_512:.0f`: v5
# needs all keys on chip, and 256 is the most that fit.
#
# The publication claims 1.6 times Triton {cite}`xu2026gdpa`. Over v1, which like that Triton kernel
# makes seven matmuls, the largest factor here is {glue:text}`over_v1:.2f`, and the count alone
# would give 1.4. {doc}`The ledger <../tools/claims>` has the rest.
#
# ## A whole step
#
# Training calls forward and backward. A *step* is `gdpa` on tensors that require gradients and
# `torch.autograd.grad` of its result: checks, allocations, lists, launches, waiting for the end.
# Forward is the rung that `impl="auto"` takes. *Backward, op* is autograd's backward alone. Whole
# calls have pauses between them, so compare them with kernels in bursts.

# %%
ops, step = (chapter.times(direction="backward", scope="op", variant=v).loc[STEPS]
             for v in ("", STEP))  # fmt: skip
call = pd.DataFrame({
    "fastest rung": step.idxmin(axis=1), "kernels (ms)": burst.loc[STEPS, every].min(axis=1) / 1e3,
    "backward, op (ms)": ops.min(axis=1) / 1e3, "step (ms)": step.min(axis=1) / 1e3,
    "step of v1 / step": step[V1] / step.min(axis=1),
})  # fmt: skip

# %% tags=["remove-input"]
called = chapter.rows(direction="backward", scope="op", variant=["", STEP])
chapter.table(call.round(2).rename(index=short).reset_index(names="workload"), measured=called)
chapter.predict(
    "Forward has two matmuls of seven, at a higher rate: on full batches of 1,024 a step takes "
    "this many times the backward kernels.",
    call["step (ms)"][STEPS[0]] / call["kernels (ms)"][STEPS[0]], least=1.15, most=1.40,
)  # fmt: skip

# %% [markdown]
# ## Memory of a step
#
# The peak allocation of a step, beside its inputs. It must hold the output, three gradients, and
# for an fp32 dQ twice q more:

# %%
memory = chapter.recorded("memory").set_index(["workload", "impl"])["bytes"].astype(float)
counted = {}
for name, impl in memory.drop("fa2_varlen", level="impl").index:
    given = workload(name)
    q, k = 256 * given.num_heads_q * given.total_q, 256 * given.num_heads_k * given.total_k  # bytes
    counted[name, impl] = 2 * q + 2 * k + (2 * q if impl in (V2, V2A, V4) else 0)
counted = pd.Series(counted)

# %% tags=["remove-input"]
gib = (memory / 2**30).unstack("workload").loc[[*every, "fa2_varlen"], STEPS[:2]].round(2)
gib = gib.rename(columns=lambda name: f"{short(name)} (GiB)").reset_index()
chapter.table(gib, measured=[chapter.record().id])
chapter.predict("Every rung is within 5 % of the count: the largest difference.",
                100 * (memory[counted.index] / counted - 1).abs(), most=5, form=".1f",
                unit=" %")  # fmt: skip

# %% [markdown]
# If memory is short and time is not, take v1, or v5 where it applies.
#
# ## Other machines
#
# `make compare NOTEBOOKS=backward/results` shows two lengths of every chart on your GPU beside
# ours; `make measure` appends a record.

# %% tags=["remove-input"]
ratios.others(chapter, here, "backward")

# %% [markdown]
# ## Exercises
#
# :::{exercise} Credit for seven
# :label: ex-bwd-credit
#
# By which factor would the rate of v1 rise if its seven matmuls counted, and would the order of two
# rungs in any chart above change? *(paper)*
# :::
#
# :::{solution} ex-bwd-credit
# :class: dropdown
#
# By 7/5. The order by time stays. The order by rate would change wherever v1 takes less than 1.4
# times another rung's time: a kernel could climb a chart by wasting work.
# :::
#
# :::{exercise} A series that cannot be
# :label: ex-bwd-suspect
#
# The quotient of two directions is one check. Invent another that would also have caught the slip,
# from the published numbers alone. *(paper, `data/published`)*
# :::
#
# :::{solution} ex-bwd-suspect
# :class: dropdown
#
# With 256 queries and 256 keys, cross-attention *is* full self-attention, so a kernel must have the
# same bar in both charts. Three kernels do, FlashAttention-4 does not. A check that misses it: at
# 1,024 its bar is about the same fraction of the self-attention bar as that of CUTLASS FMHA.
# Plausible is not right.
# :::
#
# ## Takeaways
#
# - Back to back with at most 256 keys, where dQ can stay on chip, the best rung reaches
#   {glue:text}`few_keys:.0f` % of the roofline, with more keys {glue:text}`more_keys:.0f` %.
# - Name the peer, the batch and the range. The largest "times as fast" belongs to the weakest peer.
# - Test a chart with a pencil: one shape that appears twice, two directions that must differ.
