# ---
# jupyter:
#   kernelspec: {display_name: Python 3, language: python, name: python3}
# measures: true
# ---

# %% [markdown]
# # Results: forward
#
# The published forward charts show one kernel on one GPU. What do they look like on a GPU that you
# can rent, with every kernel checked before it is timed?
#
# :::{admonition} In this chapter (20 minutes)
# You will read each published forward chart beside ours, name the baseline to beat for a given
# batch, and see what changes on a second board. Back to back on the H200 our best kernel
# is {glue:text}`over_peer` times as fast as the best baseline.
# {doc}`Forward v8 <v8_own_waits>` is that kernel on all {glue:text}`count:.0f` workloads.
# :::

# %% tags=["hide-input"]
import pandas as pd

from _lib import rare_charts, ratios
from _lib.ratios import spread
from gdpa_kernels.calling import ladder
from gdpa_lab.measuring.baselines import BASELINES, taking
from gdpa_lab.measuring.workloads import FIGURES, HSTU, workload
from gdpa_lab.report import results
from gdpa_lab.report.chapter import Chapter
from gdpa_lab.report.peers import missing_peers
from gdpa_lab.report.roles import display_name

# %% tags=["parameters"]
mode = "replay"
device = "cpu"
data_dir = "data"

# %% tags=["remove-cell"]
chapter = Chapter("forward/results", mode=mode, device=device, data_dir=data_dir)
RUNGS, BLACKWELL = ([rung.impl for rung in x] for x in (ladder.RUNGS, ladder.BLACKWELL_RUNGS))
NAMES = list(dict.fromkeys(n for figure in FIGURES if "-fwd-" in figure for n in FIGURES[figure]))
V1, V5, V7, V8 = "v1_tiled", "v5_pingpong", "v7_packed", "v8_own_waits"
SLOW = ("v0_eager", "torch_compile")
COMPILED = ("flex", "torch_compile")  # a minute for every shape
LADDER = "gdpa-self-full-1024"
CALLED = ["gdpa-self-full-256", LADDER, "gdpa-self-half-jagged-256", "gdpa-cross-full-2048"]


def plan(session, names=NAMES, left_out=()):
    for name in names:
        work = workload(name)
        here = name == LADDER
        peers = [peer for peer in taking(work, "forward") if here or peer not in COMPILED]
        if "cudnn" in peers:
            peers.remove("cudnn_varlen")  # its dense form is timed
        rungs = RUNGS if here else RUNGS[1:]  # eager takes seconds a call
        every = [*RUNGS, *BLACKWELL, *peers]
        timed = [*rungs, *BLACKWELL, *(peer for peer in peers if peer != "torch_compile")]
        every, timed = ([impl for impl in x if impl not in left_out] for x in (every, timed))
        bursts = every if "self-full" in name or name in CALLED else []
        scopes = {"kernel": bursts, "sustained": timed, "op": RUNGS if name in CALLED else []}
        session.measure(work, bursts or timed, scopes=scopes, seconds=0.7)
    for work in map(workload, HSTU):
        impls = [V1, V8, *taking(work, "forward", "activation")]
        session.measure(work, impls, scopes=("sustained",), seconds=0.7)


chapter.measure(plan)
few = [name for name in NAMES if name.endswith(("-512", "-1024"))]
here = chapter.compare(lambda session: plan(session, few, SLOW))

# %% tags=["remove-cell"]
shown = {"direction": "forward", "scope": "sustained", "workload": NAMES}
rows, us, rates = (chapter.rows(**shown), chapter.times(**shown),
                   chapter.times(value="tflops", **shown))  # fmt: skip
timed, elsewhere = rows[rows["time_us_p50"].notna()], ratios.sustained(chapter)
best = ratios.best(rows, elsewhere)
hstu = chapter.times(direction="forward", scope="sustained", workload=list(HSTU))
causal = hstu.filter(like="causal", axis=0).dropna(axis=1)
same = [x for x in causal if BASELINES.get(x) and x != "torch_compile"]  # it is no kernel
peers_of_hstu = ratios.listed([BASELINES[x].title for x in same])
same = causal[same].min(axis=1) / causal[V8]
assert same.min() > 1, "the text: ahead of all"
over = us.div(us[us.columns.intersection(RUNGS)].min(axis=1), axis=0)  # times of the best kernel's
planned = chapter.rows(**shown | {"workload": [*NAMES, *HSTU]})
missing = missing_peers(planned)
burst, bursts = (chapter.times(value=x, direction="forward") for x in ("time_us_p50", "tflops"))
assert "fa4" in us, "the text compares with flash-attn-4==4.0.0b36: install it and measure again"
assert timed["correct"].all(), "the text says that nothing is timed without a passed check"
assert (best["peer / rung (time)"] > 1).all(), "the title: ahead of every baseline"
full, half = (best["share (%)"].filter(like=kind) for kind in ("-full-", "-half-"))
cross, fa4_by_fa2 = [n for n in us.index if "cross" in n], us["fa4"] / us["fa2_varlen"]
assert (fa4_by_fa2[cross] > 1).all(), "the text: with 256 keys FA4 is slower than FA2"
retained = 100 * rates[V8] / bursts[V8]
assert (over[V8] == 1).all(), "the text: v8 is the best kernel everywhere"
rising = rates.filter(like="self-full", axis=0).drop(columns=RUNGS, errors="ignore")
rising = rising.join(rates[[V1, V8]]).dropna(axis=1)
assert rising.diff().iloc[1:].gt(0).all(axis=None), "the alt text: both rise"
ops, kernel = chapter.times(direction="forward", scope="op")[RUNGS], burst.loc[CALLED, RUNGS]
extra, in_kernels = (ops - kernel).median(), ops[V8] / kernel[V8]
chapter.glue(v8_extra=extra[V8], v8_short=in_kernels[CALLED[0]])
chapter.glue(over_peer=ratios.ahead(best), count=len(us), checked=len(timed),
             triton_at_256=over["gdpa_triton"]["gdpa-self-full-256"], full_least=full.min(),
             full_most=full.max(),
             half_least=half.min(), half_most=half.max(),
             kept=f"{retained.min():.0f} to {retained.max():.0f}",
             missing="; ".join(missing) or "none", same=spread(same), peers_of_hstu=peers_of_hstu,
             fa4_by_fa2_cross=spread(fa4_by_fa2[cross]),
             **ratios.glued(best))  # fmt: skip
chapter.glue_origin("front", rows[rows["workload"] == LADDER])

# %% tags=["remove-input"]
# | name: fig-self-fwd-full
# | caption: >
# |   **Forward v8 is ahead of every baseline on every batch, and nearest to its roofline on long
# |   sequences.** Percent of the own roofline, back to back. Bars: the published kernel on
# |   its GPU, under assumed {ref}`ceilings <rule-ceiling>`. The third chart has 256 keys.
# | alt: >
# |   Three small charts over sequence length. In each the green line of v8 lies above the grey one
# |   of the best baseline, and both rise; hollow bars stand for the published kernel. On half-full
# |   batches all lie lower.
CHARTS = {"gdpa-self-fwd-full": "full", "gdpa-self-fwd-half": "half full, dense keys",
          "gdpa-cross-fwd-full": "256 keys"}  # fmt: skip
ratios.redrawn(
    chapter,
    CHARTS,
    [V1, V8],
    f"Forward v8 is {ratios.ahead(best)} times as fast as the best baseline.",
)

# %% [markdown]
# ## What was compared
#
# The workloads are those of the published benchmark ({doc}`../operator/workloads`), but with a
# scale, 1/sqrt(head_dim). *Cross* batches have 256 keys; half-full ones keep all keys (*dense*) or
# give keys the lengths of the queries (*jagged*). Rates and {ref}`ceilings <rule-ceiling>` are
# {ref}`back to back <rule-scope>`, where forward v8 keeps {glue:text}`kept` per cent of its rate in
# bursts ({doc}`../measuring/power_wall`). All {glue:text}`checked:.0f` times belong to outputs that
# passed the check against fp64. They are times of kernels: a call of forward v8 on an idle device
# takes {glue:text}`v8_extra:.0f` µs more, the median of four batches, and
# {glue:text}`v8_short:.2f` times as long as the kernel on full batches of 256 tokens
# ({doc}`../training/host_time`).

# %% tags=["remove-input"]
ratios.against(
    chapter, ratios.shown(best, "forward"),
    "Forward v8 is the best kernel everywhere, and the best baseline depends on the batch.",
    ratios.behind(timed, best, elsewhere), "tab-forward-best",
)  # fmt: skip

# %% [markdown]
# On full batches of 256 tokens the limit is memory, from 512 on the tensor cores. At 512, where
# both limits nearly meet, only a perfect overlap of copies and matmuls could reach the roofline. On
# half-full batches empty rows of a {term}`tile` take time and do not count.
#
# With 256 keys more queries add tiles, not keys: each tile keeps two blocks, so start and end stay
# a large share. Forward v8 prepares the next tile while it computes this one.
#
# ## Which baseline to beat
#
# Most baselines compute softmax, another function with about the same FLOPs, so we compare times
# alone.

# %% tags=["remove-input"]
peers = over[[impl for impl in BASELINES if impl in over]]
behind = pd.DataFrame({
    "baseline": [display_name(impl, "forward") for impl in peers],
    "workloads": peers.count().to_numpy(), "least": peers.min().round(2).to_numpy(),
    "median": peers.median().round(2).to_numpy(), "most": peers.max().round(2).to_numpy(),
})  # fmt: skip
chapter.table(
    behind, measured=timed, name="tab-forward-baselines",
    caption="**Dense cuDNN is the closest baseline in the median.** Time over that of the best "
    "kernel, back to back.",
)  # fmt: skip
assert peers.median().idxmin() == "cudnn", "the caption: closest in the median"

# %% [markdown]
# FlashAttention-4 is the pre-release 4.0.0b36, written for Blackwell; what runs here is its path
# for Hopper ({doc}`../blackwell/flash_attention_4`). With 256 keys it takes
# {glue:text}`fa4_by_fa2_cross` times as long as FlashAttention-2. Without a time back to back:
# {glue:text}`missing`.

# %% tags=["remove-input"]
ratios.untimed(chapter, planned)

# %% [markdown]
# With SiLU and a causal mask, the function of HSTU, forward v8 is {glue:text}`same` times as fast
# as the fastest of those timed there: {glue:text}`peers_of_hstu`.
#
# ## Every kernel on every workload

# %% tags=["remove-cell"]
tiled = {"direction": "forward", "impl": RUNGS[1:], "scope": "sustained"}
measured = chapter.together("forward/results", RUNGS[1:], **tiled)
share = "percent_of_roofline"
shares = chapter.times("forward/results", share, together=RUNGS[1:], **tiled)[RUNGS[1:]]
shares = shares.rename(index=ratios.row, columns=lambda impl: impl.split("_")[0])
assert (shares["v8"] > shares["v1"]).all(), "the caption: every batch gains"
short = shares.filter(regex="^half-.*-(256|512)$", axis=0)
assert short[["v4", "v5"]].lt(short["v2"], axis=0).all(axis=None), "the text: lighter"
assert shares["v8"].nsmallest(2).index.str.fullmatch("half-.*-512").all(), "the caption: farthest"

# %% tags=["remove-input"]
# | name: fig-forward-shares
# | caption: >
# |   **Every batch gains from the ladder, and half-full batches of 512 tokens stay farthest from
# |   their roofline.** Forward v1 to v8 in percent of the workload's roofline, back to back.
# | alt: >
# |   A heat map, a row for each workload, the best on top, and a column for each kernel. In every
# |   row v8 is darker than v1; on half-full batches of 512 or fewer v4 and v5 are lighter than v2.
# |   Half-full rows of 512 end lightest, at the bottom.
shares = shares.sort_values("v8", ascending=False)
gains = (shares["v8"] / shares["v1"]).rename("v8 / v1")
chart = rare_charts.heat(
    shares,
    label="% of the roofline, back to back",
    low=30,
    high=100,
    gains=gains,
    finding=f"From v1 to v8 every batch gains: {gains.min():.2f} to {gains.max():.2f} times.",
)
chapter.figure(chart, measured=measured)

# %% [markdown]
# ## A second board

# %% tags=["remove-cell"]
H100 = "NVIDIA H100 80GB HBM3"
there = Chapter("forward/results", data_dir=data_dir, gpu=H100)
theirs = ratios.of_today(there.rows(direction="forward", scope="sustained"))
board, at_256 = ratios.best(theirs), "gdpa-self-full-256"
limits = [
    results.ceilings(run, "sustained")
    for run in (chapter.record(), there.record(theirs["record"].max()))
]
copies, matmuls = [each.copies for each in limits], [each.tflops for each in limits]
bytes_ratio = dict(copies[0])[3.0] / dict(copies[1])[3.0]
assert abs(matmuls[1] / matmuls[0] - 1) < 0.05 and bytes_ratio > 1.3, "the text: memory differs"
assert board["share (%)"][at_256] > best["share (%)"][at_256], "the text: nearer to its roofline"
ratio = "peer / rung (time)"
less = 100 * (1 - board[ratio] / best[ratio].reindex(board.index))
short = less.index.str.endswith("-256")
assert less[short].min() > 10, "the text: clearly smaller at 256 tokens"
assert less[~short].abs().max() < 5, "the text: nearly the same at 512 and 1,024"
assert [name.rpartition("-")[2] for name in board.index] == ["256", "512", "1024"], "the text"
triton = rows[rows["impl"].isin(["gdpa_triton", V8])]
triton = triton.pivot(index="workload", columns="impl", values="time_us_p50").dropna()
chapter.glue(
    memory=bytes_ratio, matmul=100 * (matmuls[1] / matmuls[0] - 1),
    h100_share=board["share (%)"][at_256], h100_less=less[~short].abs().max(),
    over_triton=spread(triton["gdpa_triton"] / triton[V8]),
    by_triton=(best["best peer"] == "gdpa_triton").sum(),
)  # fmt: skip

# %% [markdown]
# An H100 has the SMs and the power limit of an H200, and older memory: the H200's fastest copy is
# {glue:text}`memory:.2f` times as fast, its fastest matmul differs by {glue:text}`matmul:.0f` %.

# %% tags=["remove-input"]
ratios.others(chapter, here, "forward")

# %% [markdown]
# At 512 and 1,024 tokens the lead is within {glue:text}`h100_less:.0f` % of that on the H200, but
# over another baseline: FlashAttention-3's dense form was not timed there. At 256 tokens, where
# memory is the limit, little is left to win at {glue:text}`h100_share:.0f` % of the roofline.
#
# The published Triton kernel computes GDPA itself. On the H200 forward v8 is
# {glue:text}`over_triton` times as fast, and on {glue:text}`by_triton:.0f` of
# {glue:text}`count:.0f` batches that kernel is the best baseline. `make compare
# NOTEBOOKS=forward/results` shows your GPU beside ours.
#
# ## Exercises
#
# :::{exercise} Read a chart twice
# :label: ex-figures-ratio
#
# The published chart for full self-attention claims 2.08 times the Triton kernel at length 256.
# Which two bars give that ratio, and what is it here, best kernel over the same one? *(paper)*
# :::
#
# :::{solution} ex-figures-ratio
# :class: dropdown
#
# The bars of the CuTeDSL kernel and of Triton. Here it is {glue:text}`triton_at_256:.2f`.
# {doc}`The table of claims <../tools/claims>` computes the quotient for every claim.
# :::
#
# ## Takeaways
#
# - Back to back the best kernel has {glue:text}`full_least:.0f` to {glue:text}`full_most:.0f` % of
#   the roofline on full batches and {glue:text}`half_least:.0f` to {glue:text}`half_most:.0f` % on
#   half-full ones.
# - Name the baseline, the board and the way of timing before the factor. The best baseline depends
#   on the batch.
