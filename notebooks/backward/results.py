# ---
# jupyter:
#   kernelspec: {name: python3, display_name: Python 3}
# measures: true
# ---

# %% [markdown]
# # The published backward charts, measured again
#
# Three of the six published charts show the backward pass. What do they look like on an H200, and
# why is one of them wrong?
#
# :::{admonition} Overview
# - The best rung reaches {glue:text}`bwd_best_least:.0f` to {glue:text}`bwd_best_most:.0f` TFLOP/s,
#   {glue:text}`bwd_share_least:.0f` to {glue:text}`bwd_share_most:.0f` % of the roofline.
#   {glue:text}`bwd_firsts`
# - It is {glue:text}`bwd_over_v1_least:.2f` to {glue:text}`bwd_over_v1_most:.2f` times as fast as
#   `v1_tiled_backward`, which makes seven products where five are necessary. Against
#   FlashAttention-2 the quotient is {glue:text}`bwd_over_fa2_least:.2f` to
#   {glue:text}`bwd_over_fa2_most:.2f`, against the dense cuDNN
#   {glue:text}`bwd_over_cudnn_least:.2f` to {glue:text}`bwd_over_cudnn_most:.2f`: it is faster on
#   {glue:text}`bwd_cudnn_won:.0f` of {glue:text}`bwd_cudnn_count:.0f` dense workloads.
# - {glue:text}`bwd_fa4_line`
# - In the published cross-attention chart one series is that of the forward chart.
# :::

# %% tags=["remove-cell"]
import tempfile
from pathlib import Path

import pandas as pd
from IPython.display import Markdown, display

from gdpa_kernels.calling import ladder
from gdpa_kernels.measuring import baselines
from gdpa_kernels.measuring.baselines import STEP
from gdpa_kernels.measuring.workload import FIGURES, workload
from gdpa_kernels.report import claims, figures, results
from gdpa_kernels.report.house import INK

# %% tags=["parameters"]
mode = "replay"
device = "cpu"
data_dir = "data"

# %% [markdown]
# ## What runs
#
# The workloads are those of {doc}`../forward/results`: batch 1152, 4 heads, head_dim 128, bf16;
# lengths full, half-full with dense or jagged keys, and queries on 256 keys. Inputs and the
# gradient of the output are drawn from N(0, 1).
#
# *Kernel time* is that of all kernels of the pass. A rung that adds up dQ in fp32 pays for the zero
# fill before and for the rounding after ({doc}`v2_fused_backward`), a peer for the row sums that
# softmax needs. Lists of work are made before ({doc}`v4_warp_specialized_backward`). *Useful FLOPs*
# are five products for everybody, 2.5 times those of forward; v1 makes seven and is credited with
# five, as in the publication. *Fewest bytes* are q, k, v and the gradient read once and three
# gradients written once ({doc}`by_hand`).
#
# Peers are timed through autograd, their backward alone. All of them compute softmax. The dense
# cuDNN takes batches of one length only; the ragged one stands in for it on half-full batches with
# dense keys, which are those of the published chart, and on one full batch, where the two can be
# compared. Whatever cannot be had or cannot take a batch is asked all the same: the reason is in
# the record, and in a table below. FlashAttention-3 is not on PyPI; where it is
# installed, the same command measures it.
#
# | rung | kernels of the pass | products | who writes dQ |
# |:--|:--|--:|:--|
# | v1, {doc}`v1_tiled_backward` | two | 7 | its owner, once |
# | v2, {doc}`v2_fused_backward` | zero fill, one, rounding | 5 | additions by TMA |
# | v2a, {doc}`v2_fused_backward` | zero fill, one for 128 keys, rounding | 5 | additions in order |
# | v4, {doc}`v4_warp_specialized_backward` | zero fill, one, rounding | 5 | additions by TMA |
# | v5, {doc}`v5_short_kv_backward` | one, up to 256 keys | 5 | its owner, once |
#
# Each takes its default constants.
#
# ## Predictions
#
# Written on 2026-11-21, after a first run without a record of the rungs, FlashAttention-2 and
# cuDNN. That run had neither half-full batches of 2,048 tokens nor FlashAttention-4; nobody had
# timed a step, and of memory only the backward call's was known.
#
# 1. *Half-full, 2,048 tokens.* The best rung is at least 1.2 times as fast as FlashAttention-2,
#    with dense keys and with jagged ones.
# 2. *FlashAttention-4* is slower than FlashAttention-2 where there are 256 keys, as it is forward,
#    and faster on full batches of 2,048.
# 3. *A step*, forward and backward of the op with everything the host does, takes 1.15 to 1.40
#    times the backward kernels alone on full batches of 1,024: forward has two products of seven,
#    at a higher rate.
# 4. *Memory*, in units of q at equal lengths: a step needs the output and three gradients, 4, and
#    with an fp32 dQ 6; with 256 keys and 2,048 queries 2.25 and 4.25. Within 5 %.
#
# ## Measuring
#
# This cell measures; it runs with `make measure NOTEBOOKS=backward/results`, on a GPU.

# %% tags=["hide-input"]
NOTEBOOK = "notebooks/backward/results.py"
RUNGS = [rung.impl for rung in ladder.BACKWARD_RUNGS]
V1, V2, V2A, V4, V5 = RUNGS
SHORT_KEYS = 256  # what v5 takes
NAMES = list(dict.fromkeys(n for f in FIGURES if "-bwd-" in f for n in FIGURES[f]))
BOTH_CUDNN = "gdpa-self-full-1024"
STEPS = (
    "gdpa-self-full-1024",
    "gdpa-cross-full-2048",
    "gdpa-self-full-256",
)
MEMORY = STEPS[:2]


def rungs_on(name: str) -> list[str]:
    """The rungs that take a workload."""
    short = workload(name).max_seqlen_k <= SHORT_KEYS
    return [impl for impl in RUNGS if impl != V5 or short]


def peers_on(name: str) -> list[str]:
    """The peers that are asked; what they cannot take is a row with its reason."""
    ragged = "half-dense" in name or name == BOTH_CUDNN
    return ["fa2_varlen", "cudnn", *(["cudnn_varlen"] if ragged else []), "fa3", "fa4"]


if mode in ("measure", "compare"):
    from gdpa_kernels.measuring.session import Session

    session = Session(NOTEBOOK, device)
    asked = NAMES if mode == "measure" else [n for n in NAMES if n.endswith(("-512", "-1024"))]
    for name in asked:
        session.measure(
            workload(name),
            [*rungs_on(name), *peers_on(name)],
            direction="backward",
            scopes=("kernel", "op") if name in STEPS and mode == "measure" else ("kernel",),
        )
    if mode == "measure":
        for name in MEMORY:
            session.memory(workload(name), [*rungs_on(name), "fa2_varlen"])
        print(session.write(data_dir))

# %% tags=["remove-cell"]
SYSTEM = "h200"
PEERS = ["fa2_varlen", "fa3", "fa4", "cudnn", "cudnn_varlen"]
TITLES = {impl: baseline.title for impl, baseline in baselines.BASELINES.items()}
VERDICT = {True: "kept", False: "broken"}
FAMILIES = {
    "full": "gdpa-self-full",
    "half_dense": "gdpa-self-half-dense",
    "half_jagged": "gdpa-self-half-jagged",
    "cross": "gdpa-cross-full",
}
LENGTHS = (256, 512, 1024, 2048)
ORDER = [f"{stem}-{n}" for stem in FAMILIES.values() for n in LENGTHS]


def glue(name: str, value: float) -> None:
    figures.glue_number(f"bwd_{name}", value)


def glue_word(name: str, value: str) -> None:
    figures.glue_text(f"bwd_{name}", value)


def spread(name: str, values: pd.Series) -> None:
    """The least and the most of some quotients."""
    glue(f"{name}_least", values.min())
    glue(f"{name}_most", values.max())


def listed(items) -> str:
    """Items as a list in a sentence."""
    items = list(items)
    return " and ".join(filter(None, (", ".join(items[:-1]), items[-1]))) if items else "none"


def short_name(name: str) -> str:
    """A workload's name without what all of them share."""
    return name.removeprefix("gdpa-")


record = results.latest_record(data_dir, notebook=NOTEBOOK, system=SYSTEM)
limits = results.ceilings(record)
table = results.table(data_dir, system=SYSTEM, latest=False)
table = table[(table["record"] == record.id) & (table["direction"] == "backward")]
kernels = table[(table["scope"] == "kernel") & (table["variant"] == "")]
single = kernels.drop_duplicates(["workload", "impl"])
published = claims.published_figures(data_dir)
missing = [
    (name, impl)
    for name in ORDER
    for impl in rungs_on(name)
    if single[(single["workload"] == name) & (single["impl"] == impl)]["tflops"].isna().all()
]
assert not missing, f"{record.id} lacks times of rungs: {missing}"
wrong = single[single["time_us_p50"].notna() & ~single["correct"].fillna(False).astype(bool)]
assert wrong.empty, f"timed without a passed check: {wrong['impl'].tolist()}"

times, rates, shares = (
    single.pivot(index="workload", columns="impl", values=column)
    .reindex(index=ORDER, columns=[*RUNGS, *PEERS])
    for column in ("time_us_p50", "tflops", "percent_of_roofline")
)  # fmt: skip
best = times[RUNGS].min(axis=1)
best_impl = times[RUNGS].idxmin(axis=1)
best_rate = rates[RUNGS].max(axis=1)
best_share = shares[RUNGS].max(axis=1)
over = {peer: (times[peer] / best).dropna() for peer in PEERS}
over_v1 = times[V1] / best
has_fa4 = len(over["fa4"]) > 0
assert len(over["fa2_varlen"]) == len(ORDER), "the text compares with FlashAttention-2 everywhere"
assert len(over["cudnn"]) == 8, "the text compares with the dense cuDNN on all full batches"
assert (best_share < 100).all() and (over_v1 >= 1).all()

glue("best_least", best_rate.min())
glue("best_most", best_rate.max())
spread("share", best_share)
spread("over_v1", over_v1)
spread("over_fa2", over["fa2_varlen"])
spread("over_cudnn", over["cudnn"])
glue("cudnn_won", (over["cudnn"] > 1).sum())
glue("cudnn_count", len(over["cudnn"]))
glue("checked", single["time_us_p50"].notna().sum())
glue("workloads", len(ORDER))
firsts = best_impl.value_counts()
glue_word(
    "firsts",
    listed(f"`{impl}` is the fastest rung on {count} of {len(ORDER)} workloads"
           if i == 0 else f"`{impl}` on {count}" for i, (impl, count) in enumerate(firsts.items()))
    + ".",
)  # fmt: skip
short = [n for n in ORDER if workload(n).max_seqlen_k <= SHORT_KEYS]
longer = [n for n in ORDER if n not in short]


def against(peer: str, names: list[str] = ORDER) -> str:
    """'a to b' of the best rung's quotients over a peer."""
    ratios = over[peer].reindex(names).dropna()
    return f"{ratios.min():.2f} to {ratios.max():.2f}"


glue_word(
    "fa4_line",
    f"Against a pre-release of FlashAttention-4, on its path for Hopper, it is {against('fa4')}."
    if has_fa4
    else "FlashAttention-4 has no time in this record; the table of refusals says why.",
)


def shown(figure: str, keys: str = "") -> pd.DataFrame:
    """The kernel rows of one figure; `keys` picks the family with those K/V lengths."""
    rows = kernels[kernels["figure"] == figure]
    return rows[rows["workload"].str.contains(keys)] if keys else rows


def drawn(rows: pd.DataFrame) -> list[str]:
    """What a chart shows: v2a, and peers with at most one time, stand in the tables only."""
    points = rows.dropna(subset=["tflops"]).groupby("impl").size()
    peers = [peer for peer in PEERS if points.get(peer, 0) > 1]
    return [impl for impl in (V1, V2, V4, V5) if impl in points] + peers


def chart(figure: str, keys: str = ""):
    rows = shown(figure, keys)
    return figures.figure_tflops(
        rows, figure, system=SYSTEM, impls=drawn(rows), published=published
    )


def numbers(rows: pd.DataFrame) -> pd.DataFrame:
    """TFLOP/s by implementation and workload, and the best rung's share of the roofline."""
    wide = rows.pivot(index="impl", columns="workload", values="tflops")
    order = [name for name in ORDER if name in wide.columns]
    wide = wide.loc[[i for i in (*RUNGS, *PEERS) if i in wide.index], order]
    wide.loc["best rung, % of roofline"] = best_share[order]
    return wide.dropna(how="all").round(0).rename(columns=short_name).reset_index()


# %% [markdown]
# All {glue:text}`bwd_checked:.0f` times below belong to gradients that were compared, element by
# element, with fp64, and stayed within twice the error that PyTorch makes in bf16 plus one
# rounding. A softmax peer is held to the gradients of softmax.
#
# ## Self-attention, full

# %% tags=["remove-input"]
# | name: fig-self-bwd-full
# | caption: >
# |   Self-attention backward, all sequences of one length. Left: measured. Right: published.
# | alt: >
# |   Two charts of TFLOP/s over sequence length on one scale. All measured lines rise with length
# |   and stay below the dashed roofline; which one is the highest, the table below says. On the
# |   published chart all bars rise with length, and the CuTeDSL kernel is the highest.
chart("gdpa-self-bwd-full")

# %% tags=["remove-input"]
figures.save_csv(shown("gdpa-self-bwd-full"), "gdpa-self-bwd-full")
figures.provenance(shown("gdpa-self-bwd-full"), csv="gdpa-self-bwd-full", data_dir=Path(data_dir))

# %% tags=["remove-input"]
figures.show_table(numbers(shown("gdpa-self-bwd-full")))

# %% tags=["remove-cell"]
FULL = [f"gdpa-self-full-{n}" for n in LENGTHS]
for n in LENGTHS:
    name = f"gdpa-self-full-{n}"
    glue(f"full_share_{n}", best_share[name])
    glue(f"over_cudnn_{n}", over["cudnn"][name])
ahead = [f"{n:,}" for n in LENGTHS if over["cudnn"][f"gdpa-self-full-{n}"] > 1]
behind = [f"{n:,}" for n in LENGTHS if f"{n:,}" not in ahead]
glue_word(
    "full_cudnn",
    "the best rung is ahead at every length" if not behind
    else "cuDNN is ahead at every length" if not ahead
    else f"the best rung is ahead at {listed(ahead)} tokens, cuDNN at {listed(behind)}",
)  # fmt: skip
has_ragged = bool(times.get("cudnn_varlen", pd.Series(dtype=float)).get(BOTH_CUDNN, 0) > 0)
glue_word(
    "ragged_line",
    "The same library asked for a ragged batch takes "
    f"{times['cudnn_varlen'][BOTH_CUDNN] / times['cudnn'][BOTH_CUDNN]:.1f} times the time of its "
    "dense path on the full batch of 1,024."
    if has_ragged
    else "The same library asked for a ragged batch, by the interface that PyTorch has for it, "
    "gave gradients that failed the check: it has no time, and its errors stand in the table of "
    "refusals.",
)

# %% [markdown]
# From 512 tokens on the tensor cores are the ceiling. In percent of the roofline the best rung has
# {glue:text}`bwd_full_share_512:.0f` at 512, {glue:text}`bwd_full_share_1024:.0f` at 1,024 and
# {glue:text}`bwd_full_share_2048:.0f` at 2,048. Forward, with two products and one accumulator,
# more is reached ({doc}`../forward/results`). Backward five products want three accumulators, and
# dQ has to leave for memory after every 128 keys.
#
# Against the dense cuDNN {glue:text}`bwd_full_cudnn`: its time is
# {glue:text}`bwd_over_cudnn_256:.2f`, {glue:text}`bwd_over_cudnn_512:.2f`,
# {glue:text}`bwd_over_cudnn_1024:.2f` and {glue:text}`bwd_over_cudnn_2048:.2f` times ours from 256
# to 2,048 tokens. {glue:text}`bwd_ragged_line`
#
# ## Self-attention, half full
#
# First as the published script has it: Q jagged, K and V dense.

# %% tags=["remove-input"]
# | name: fig-self-bwd-half-dense
# | caption: >
# |   Self-attention backward at fill 0.5, K/V dense as in the published script.
# | alt: >
# |   Two charts of TFLOP/s over sequence length. Measured lines rise with length and are lower than
# |   on full batches. The published bars rise too.
chart("gdpa-self-bwd-half", "dense")

# %% tags=["remove-input"]
figures.save_csv(shown("gdpa-self-bwd-half", "dense"), "gdpa-self-bwd-half-dense")
figures.provenance(
    shown("gdpa-self-bwd-half", "dense"), csv="gdpa-self-bwd-half-dense", data_dir=Path(data_dir)
)

# %% [markdown]
# Then with K and V as long as Q. The right axes repeat the dense chart; a jagged one was not
# published.

# %% tags=["remove-input"]
# | name: fig-self-bwd-half-jagged
# | caption: >
# |   Self-attention backward at fill 0.5, K/V jagged. The published chart, right, has K/V dense.
# | alt: >
# |   Two charts of TFLOP/s over sequence length. The measured lines with jagged keys have the shape
# |   of those with dense keys.
chart("gdpa-self-bwd-half", "jagged")

# %% tags=["remove-input"]
figures.save_csv(shown("gdpa-self-bwd-half", "jagged"), "gdpa-self-bwd-half-jagged")
figures.provenance(
    shown("gdpa-self-bwd-half", "jagged"), csv="gdpa-self-bwd-half-jagged", data_dir=Path(data_dir)
)

# %% tags=["remove-input"]
figures.show_table(
    pd.concat(
        [
            numbers(shown("gdpa-self-bwd-half", keys)).rename(
                columns=lambda c: c.removeprefix("self-half-")
            )
            for keys in ("dense", "jagged")
        ],
        axis=1,
    ).loc[:, lambda wide: ~wide.columns.duplicated()]
)

# %% tags=["remove-cell"]
HALF = [n for n in ORDER if "half" in n]
takes_half = [peer for peer in PEERS if times[peer].reindex(HALF).notna().any()]
half_peer = times.loc[HALF, takes_half].min(axis=1)
half_over = half_peer / best[HALF]
spread("half_over", half_over)
glue_word("half_peers", listed(TITLES[peer] for peer in takes_half))
for keys in ("dense", "jagged"):
    for n in (256, 2048):
        glue(f"half_{keys}_{n}", best_share[f"gdpa-self-half-{keys}-{n}"])
lost = {n: best_rate[f"gdpa-self-half-jagged-{n}"] / best_rate[f"gdpa-self-full-{n}"]
        for n in LENGTHS}  # fmt: skip
glue("half_lost_most", 100 * (1 - min(lost.values())))
glue("half_lost_least", 100 * (1 - max(lost.values())))
glue_word(
    "half_won",
    "The best rung is ahead of all of them on every batch" if (half_over > 1).all()
    else f"The best rung is ahead of all of them on {(half_over > 1).sum()} of {len(HALF)} batches",
)  # fmt: skip

# %% [markdown]
# Tiles of keys and steps of rows that are partly empty cost as much as full ones, and their FLOPs
# do not count. With jagged keys the rate is {glue:text}`bwd_half_lost_least:.0f` to
# {glue:text}`bwd_half_lost_most:.0f` % below that of the full batch of the same maximum. The best
# rung has {glue:text}`bwd_half_jagged_256:.0f` % of the roofline at 256 and
# {glue:text}`bwd_half_jagged_2048:.0f` % at 2,048; with dense keys
# {glue:text}`bwd_half_dense_256:.0f` and {glue:text}`bwd_half_dense_2048:.0f` %.
#
# The peers of such batches in this record are {glue:text}`bwd_half_peers`.
# {glue:text}`bwd_half_won`; over the fastest of them at each length the quotient is
# {glue:text}`bwd_half_over_least:.2f` to {glue:text}`bwd_half_over_most:.2f`.
#
# ## Cross-attention with 256 keys

# %% tags=["remove-input"]
# | name: fig-cross-bwd-full
# | caption: >
# |   Cross-attention backward, 256 keys, queries of the length on the axis. The hatched series is
# |   doubtful in the original.
# | alt: >
# |   Two charts of TFLOP/s over query length. The measured lines rise less than those of
# |   self-attention. On the published chart the FlashAttention-4 bars are hatched.
chart("gdpa-cross-bwd-full")

# %% tags=["remove-input"]
figures.save_csv(shown("gdpa-cross-bwd-full"), "gdpa-cross-bwd-full")
figures.provenance(shown("gdpa-cross-bwd-full"), csv="gdpa-cross-bwd-full", data_dir=Path(data_dir))

# %% tags=["remove-input"]
figures.show_table(numbers(shown("gdpa-cross-bwd-full")))

# %% tags=["remove-cell"]
CROSS = [f"gdpa-cross-full-{n}" for n in LENGTHS]
v5_gain = (times[V4] / times[V5]).reindex(short)
spread("v5_gain", v5_gain)
glue("cross_2048", best_rate[CROSS[3]])
glue("cross_share_2048", best_share[CROSS[3]])
glue_word("cross_best", best_impl[CROSS[3]])
glue_word("cross_cudnn", against("cudnn", CROSS))
last = workload(CROSS[3])
rows_bytes = last.total_q * last.num_heads_q * last.head_dim
extra_gb = rows_bytes * (4 + 2 * 4 + 4) / 1e9  # zero fill, two additions, read for the rounding
glue("cross_extra_gb", extra_gb)
glue("cross_fewest_gb", last.bytes("backward") / 1e9)

# %% [markdown]
# Here dQ is most of what is written, and two tiles of keys add to each of its rows. An fp32 dQ at
# 2,048 queries is filled, added to twice and read again, {glue:text}`bwd_cross_extra_gb:.0f` GB
# (modelled), beside the {glue:text}`bwd_cross_fewest_gb:.0f` GB that the pass has to move. v5
# does none of it ({doc}`v5_short_kv_backward`): on the workloads with at most 256 keys v4 takes
# {glue:text}`bwd_v5_gain_least:.2f` to {glue:text}`bwd_v5_gain_most:.2f` times its time. At 2,048
# queries {glue:text}`bwd_cross_best` reaches {glue:text}`bwd_cross_2048:.0f` TFLOP/s,
# {glue:text}`bwd_cross_share_2048:.0f` % of the roofline; cuDNN takes
# {glue:text}`bwd_cross_cudnn` times the time of the best rung over the four lengths.
#
# ### The hatched bars
#
# The FlashAttention-4 bars of the published chart cannot be what it says. Three comparisons of the
# published numbers, none of which needs a GPU:

# %%
bars = published.set_index(["figure", "kernel", "length"]).sort_index()
flash = {way: bars.loc[f"gdpa-cross-{way}-full", "cutedsl_fa4"] for way in ("fwd", "bwd")}
side_by_side = pd.DataFrame(
    {
        "backward chart": flash["bwd"]["tflops"],
        "forward chart": flash["fwd"]["tflops"],
        "difference": (flash["bwd"]["tflops"] - flash["fwd"]["tflops"]).abs(),
        "reading error": flash["bwd"]["tflops_error"] + flash["fwd"]["tflops_error"],
    }
)
print(side_by_side.round(1).to_string())

# %% tags=["remove-cell"]
at_256 = published[published["length"] == 256].set_index(["figure", "kernel"])["tflops"]
twin = (at_256["gdpa-cross-bwd-full"] / at_256["gdpa-self-bwd-full"]).rename("cross / self")
others = twin.drop("cutedsl_fa4")
stem = published["figure"].str.replace("-bwd-", "-").str.replace("-fwd-", "-")
both = published.assign(stem=stem).pivot_table(
    index=["stem", "kernel", "length"], columns="direction", values="tflops"
)
quotient = (both["backward"] / both["forward"]).rename("quotient").reset_index()
own = quotient[(quotient["stem"] == "gdpa-cross-full") & (quotient["kernel"] == "cutedsl_fa4")]
rest = quotient.drop(own.index)
assert (side_by_side["difference"] <= side_by_side["reading error"]).all()
assert (others - 1).abs().max() < 0.05 < twin["cutedsl_fa4"] - 1
assert rest["quotient"].max() < 0.95 < own["quotient"].min() and own["quotient"].max() < 1.05
glue("bars_apart", side_by_side["difference"].max())
glue("bars_error", side_by_side["reading error"].min())
glue("twin_fa4", 100 * (twin["cutedsl_fa4"] - 1))
glue("twin_others", 100 * (others - 1).abs().max())
glue("quotient_own_least", own["quotient"].min())
glue("quotient_own_most", own["quotient"].max())
glue("quotient_rest_least", rest["quotient"].min())
glue("quotient_rest_most", rest["quotient"].max())
of_forward = results.latest_record(data_dir, notebook="notebooks/forward/results.py", system=SYSTEM)
forward = results.table(data_dir, system=SYSTEM, latest=False)
forward = forward[
    (forward["record"] == of_forward.id) & (forward["scope"] == "kernel")
    & (forward["variant"] == "") & (forward["direction"] == "forward")
].drop_duplicates(["workload", "impl"])  # fmt: skip
forward = forward.pivot(index="workload", columns="impl", values="tflops")
ours_both = {peer: (rates[peer] / forward[peer]).reindex(CROSS).dropna()
             for peer in ("fa2_varlen", "cudnn")}  # fmt: skip
glue("quotient_ours_least", min(r.min() for r in ours_both.values()))
glue("quotient_ours_most", max(r.max() for r in ours_both.values()))
fmha = bars.loc["gdpa-cross-bwd-full", "cutedsl_gdpa"]["tflops"]
stated = fmha / flash["bwd"]["tflops"]
glue("stated_least", stated.min())
glue("stated_most", stated.max())
glue("stated_256", stated[256])
glue("true_256", fmha[256] / at_256["gdpa-self-bwd-full", "cutedsl_fa4"])

# %% tags=["remove-input"]
# | name: fig-backward-over-forward
# | caption: >
# |   Rate of the backward bar over that of the forward bar, four published kernels, by length. At 1
# |   a kernel is as fast backward as forward.
# | alt: >
# |   Three small charts, full and half-full self-attention and cross-attention. In the first two
# |   all lines lie between one third and nine tenths. In the third three lines do too, and that of
# |   FlashAttention-4 lies on 1 at all four lengths.
with figures.style():
    picture, axes = figures.subplots(1, 3, width=8.6, height=3.4, sharey=True)
    panels = {
        "gdpa-self-full": "self, full",
        "gdpa-self-half": "self, half full",
        "gdpa-cross-full": "cross, 256 keys",
    }
    from gdpa_kernels.report.figures import PUBLISHED_COLOURS

    for axis, (name, title) in zip(axes, panels.items(), strict=True):
        for kernel, lines in quotient[quotient["stem"] == name].groupby("kernel"):
            suspect = kernel == "cutedsl_fa4" and name == "gdpa-cross-full"
            axis.plot(
                range(len(lines)), lines.sort_values("length")["quotient"],
                "o--" if suspect else "o-", color=PUBLISHED_COLOURS[kernel], label=kernel,
                markersize=7 if suspect else 4.5,
            )  # fmt: skip
        axis.axhline(1, color=INK, linewidth=1)
        axis.set_title(title)
        axis.set_xticks(range(4), [str(n) for n in LENGTHS])
        axis.set_ylim(0, 1.15)
        axis.set_xlabel("length (tokens)")
    axes[0].set_ylabel("backward / forward rate")
    axes[0].legend(loc="lower right", fontsize=8)
display(picture)

# %% tags=["remove-input"]
figures.save_csv(quotient, "gdpa-backward-over-forward")
figures.source(
    "published",
    "bars of the README of ads_model_kernel_library/gdpa, NVIDIA B200",
    csv="gdpa-backward-over-forward",
)

# %% [markdown]
# - The two series are {glue:text}`bwd_bars_apart:.1f` TFLOP/s apart at most, and a bar of either
#   chart can be read to no better than {glue:text}`bwd_bars_error:.0f` TFLOP/s for the pair.
# - With 256 queries and 256 keys this *is* full self-attention. There three kernels have the same
#   bar in both backward charts, within {glue:text}`bwd_twin_others:.1f` %. FlashAttention-4 is
#   {glue:text}`bwd_twin_fa4:.0f` % faster in one of them.
# - No kernel is as fast backward as forward. Over all other published pairs the quotient of the
#   rates is {glue:text}`bwd_quotient_rest_least:.2f` to {glue:text}`bwd_quotient_rest_most:.2f`,
#   and {glue:text}`bwd_quotient_own_least:.2f` to {glue:text}`bwd_quotient_own_most:.2f` in the
#   suspect one. FlashAttention-2 and cuDNN on the H200 have
#   {glue:text}`bwd_quotient_ours_least:.2f` to {glue:text}`bwd_quotient_ours_most:.2f` on these
#   workloads (measured, this record over that of {doc}`../forward/results`).
#
# The forward series was probably plotted twice. What follows for the claim? From the chart as
# printed the kernel is {glue:text}`bwd_stated_least:.2f` to {glue:text}`bwd_stated_most:.2f` times
# as fast as FlashAttention-4, {glue:text}`bwd_stated_256:.2f` at 256 queries. With the bar of the
# self-attention chart it would be {glue:text}`bwd_true_256:.2f` there. So the slip does not flatter
# the kernel; the number beside it just has no basis.
#
# ## How far from the roofline?
#
# For each workload the roofline (measured ceilings of this record), the best rung, and the best
# peer that takes it. Rates are TFLOP/s, shares percent of that roofline.

# %% tags=["remove-cell"]


def bound_of(name: str) -> tuple[str, float]:
    """(what limits a workload, its roofline in TFLOP/s)."""
    given = workload(name)
    read, written = given.bytes_read("backward"), given.bytes_written("backward")
    flops = given.flops("backward")
    memory = flops / ((read + written) / limits.gbytes_per_s(read, written)) / 1e3
    return ("bytes", memory) if memory < limits.tflops else ("products", limits.tflops)


best_peer = times[PEERS].idxmin(axis=1)
peer_over = times[PEERS].min(axis=1) / best
roof = pd.DataFrame(
    {
        "workload": short_name(name),
        "bound": bound_of(name)[0],
        "roofline": bound_of(name)[1],
        "best rung": best_impl[name].split("_")[0],
        "rate": best_rate[name],
        "share (%)": best_share[name],
        "best peer": best_peer[name],
        "its rate": rates[best_peer[name]][name],
        "its share (%)": shares[best_peer[name]][name],
        "rung / peer": peer_over[name],
    }
    for name in ORDER
)
for name in ORDER:  # the table's own arithmetic, against the record's
    assert abs(100 * best_rate[name] / bound_of(name)[1] / best_share[name] - 1) < 0.01, name
won = [n for n in ORDER if peer_over[n] > 1]
spread("peer_over", peer_over)
glue("peers_won", len(won))
lost_to = [short_name(n) for n in ORDER if n not in won]
glue_word(
    "peers_lost",
    f"It is behind on {listed(lost_to)}." if lost_to else "It is behind on none.",
)
memory_bound = [n for n in ORDER if bound_of(n)[0] == "bytes"]
glue_word("memory_bound", listed(short_name(n) for n in memory_bound))
glue("share_short", best_share[short].max())
glue("share_long", best_share[longer].max())

# %% tags=["remove-input"]
figures.show_table(roof.round({"roofline": 0, "rate": 0, "share (%)": 0, "its rate": 0,
                               "its share (%)": 0, "rung / peer": 2}))  # fmt: skip

# %% tags=["remove-input"]
figures.save_csv(roof, "gdpa-backward-roofline")
figures.provenance(kernels, csv="gdpa-backward-roofline", data_dir=Path(data_dir))

# %% [markdown]
# Bytes bound {glue:text}`bwd_memory_bound`, products all others. The best rung is ahead of the best
# peer on {glue:text}`bwd_peers_won:.0f` of {glue:text}`bwd_workloads:.0f` workloads, by factors
# from {glue:text}`bwd_peer_over_least:.2f` to {glue:text}`bwd_peer_over_most:.2f`.
# {glue:text}`bwd_peers_lost` A roofline assumes that the tensor cores never wait. What keeps them
# waiting is the subject of {doc}`v4_warp_specialized_backward`: mostly the instructions of a role,
# one after the other.
#
# ## Step by step
#
# Each column is a quotient of two measured times of one record: above 1 the second is faster.

# %% tags=["remove-cell"]
steps = pd.DataFrame(
    {
        "v1 / v2": times[V1] / times[V2],
        "v2 / v2a": times[V2] / times[V2A],
        "v2 / v4": times[V2] / times[V4],
        "v4 / v5": times[V4] / times[V5],
        "v1 / best": over_v1,
    }
)
for column, name in (
    ("v1 / v2", "fused"), ("v2 / v2a", "ordered"), ("v2 / v4", "roles"), ("v4 / v5", "swapped"),
):  # fmt: skip
    spread(name, steps[column].dropna())
losers = [
    f"{column} on {short_name(name)} ({value:.2f})"
    for column in ("v1 / v2", "v2 / v4", "v4 / v5")
    for name, value in steps[column].dropna().items()
    if value < 0.98
]
glue_word(
    "losers",
    "Nowhere is a later rung slower than the one before it by more than 2 %." if not losers
    else f"Slower than the rung before it by more than 2 %: {listed(losers)}.",
)  # fmt: skip
glue("seven_of_five", 7 / 5)
reached = (steps["v1 / v2"] >= 7 / 5).sum()
glue_word(
    "seven",
    "is nowhere reached" if reached == 0 else f"is reached on {reached} of {len(ORDER)} workloads",
)
glue("ordered_price", 100 * (1 / steps["v2 / v2a"].min() - 1))

# %% tags=["remove-input"]
figures.show_table(
    pd.concat([times[RUNGS].rename(columns=lambda i: f"{i.split('_')[0]} (ms)") / 1e3, steps],
              axis=1).round(2).rename(index=short_name).reset_index(names="workload")
)  # fmt: skip

# %% tags=["remove-input"]
figures.provenance(kernels[kernels["impl"].isin(RUNGS)], data_dir=Path(data_dir))

# %% [markdown]
# *One pass instead of two* (v1 to v2) gives {glue:text}`bwd_fused_least:.2f` to
# {glue:text}`bwd_fused_most:.2f`. Counting products alone it would be
# {glue:text}`bwd_seven_of_five:.1f`; that {glue:text}`bwd_seven`, since dQ now goes through memory
# in fp32 ({doc}`v2_fused_backward`). *An order for the additions* (v2a) costs
# {glue:text}`bwd_ordered_price:.0f` % at most on these batches. *Roles* (v4) give
# {glue:text}`bwd_roles_least:.2f` to {glue:text}`bwd_roles_most:.2f`, *swapped roles* (v5)
# {glue:text}`bwd_swapped_least:.2f` to {glue:text}`bwd_swapped_most:.2f` where they apply.
# {glue:text}`bwd_losers`
#
# There is no v3: the persistent schedule that was to be a rung of its own came with the roles of
# v4.
#
# ## Peers
#
# How many times the best rung's time a peer takes, over the workloads that it takes:

# %% tags=["remove-cell"]
ranges = pd.DataFrame(
    {
        "peer": TITLES[peer],
        "workloads": len(ratios),
        "least": ratios.min(),
        "on": short_name(ratios.idxmin()),
        "most": ratios.max(),
        "on ": short_name(ratios.idxmax()),
        "rung is faster on": int((ratios > 1).sum()),
    }
    for peer, ratios in over.items()
    if len(ratios)
)
refused = single[single["failure"] != ""]
refusals = (
    refused.groupby(["impl", "failure"], sort=False)["workload"]
    .agg(["size", lambda names: listed(map(short_name, list(names)[:2]))])
    .reset_index()
    .set_axis(["implementation", "why there is no time", "workloads", "for example"], axis=1)
)
assert not set(refused["impl"]) & set(RUNGS)
strongest = best_peer[FULL + CROSS].value_counts().idxmax()
glue_word("strongest", TITLES[strongest])
glue("strongest_count", (best_peer[FULL + CROSS] == strongest).sum())
glue("dense_count", len(FULL + CROSS))
# FlashAttention-4, if it was there.
fa4_by_fa2 = (times["fa4"] / times["fa2_varlen"]).dropna()


def judged(ok: bool | None) -> str:
    """A verdict; None where the record cannot say."""
    return "not decided by this record" if ok is None else VERDICT[ok]


short_cross = [n for n in short if "half" not in n]
verdict_fa4 = None
if has_fa4 and {*short_cross, FULL[3]} <= set(fa4_by_fa2.index):
    verdict_fa4 = bool((fa4_by_fa2[short_cross] > 1).all() and fa4_by_fa2[FULL[3]] < 1)
glue_word("verdict_fa4", judged(verdict_fa4))
glue_word(
    "fa4_by_fa2",
    f"it takes {fa4_by_fa2.min():.2f} to {fa4_by_fa2.max():.2f} times the time of "
    f"FlashAttention-2, least on {short_name(fa4_by_fa2.idxmin())} and most on "
    f"{short_name(fa4_by_fa2.idxmax())}"
    if has_fa4
    else "this record has no time of it",
)

# %% tags=["remove-input"]
figures.show_table(ranges.round(2))

# %% tags=["remove-input"]
figures.provenance(kernels, data_dir=Path(data_dir))

# %% [markdown]
# On the {glue:text}`bwd_dense_count:.0f` dense workloads the fastest peer is most often
# {glue:text}`bwd_strongest` ({glue:text}`bwd_strongest_count:.0f` times). As for FlashAttention-4,
# {glue:text}`bwd_fa4_by_fa2`. And what could not be timed, with the reason that the record keeps:

# %% tags=["remove-input"]
figures.show_table(refusals)

# %% [markdown]
# ## The published claims
#
# The publication states three numbers of the backward pass {cite}`xu2026gdpa`. They belong to a
# B200. Beside them, the same quantities of this record; {doc}`../tools/claims` keeps the ledger.

# %% tags=["remove-cell"]
comparable = [n for n in ORDER if "jagged" not in n]  # those of the published charts
bars_of = published[published["direction"] == "backward"].pivot(
    index="workload", columns="kernel", values="tflops"
)
theirs_triton = (bars_of["cutedsl_gdpa"] / bars_of["triton_gdpa"]).loc[comparable]
theirs_fa4 = (bars_of["cutedsl_gdpa"] / bars_of["cutedsl_fa4"]).loc[comparable]
suspects = published[published["suspect"]]["workload"]
ours_triton = over_v1[comparable]
ours_fa4 = over["fa4"].reindex(comparable).dropna()
top = best_rate[comparable].idxmax()
claimed = pd.DataFrame(
    [
        {
            "claim": "times as fast as Triton", "published": "up to 1.6",
            "in their charts": f"{theirs_triton.min():.2f} to {theirs_triton.max():.2f}",
            "here": f"{ours_triton.min():.2f} to {ours_triton.max():.2f}",
            "most on": short_name(ours_triton.idxmax()),
            "what is compared": "best rung and v1_tiled_backward",
        },
        {
            "claim": "times as fast as FlashAttention-4", "published": "up to 1.6",
            "in their charts": (
                f"{theirs_fa4.drop(suspects).min():.2f} to {theirs_fa4.drop(suspects).max():.2f} "
                "without the suspect bars"
            ),
            "here": f"{ours_fa4.min():.2f} to {ours_fa4.max():.2f}" if len(ours_fa4) else "no time",
            "most on": short_name(ours_fa4.idxmax()) if len(ours_fa4) else "",
            "what is compared": "best rung and fa4 (softmax, its path for Hopper)",
        },
        {
            "claim": "TFLOP/s", "published": "702",
            "in their charts": f"{bars_of['cutedsl_gdpa'].max():.0f}",
            "here": f"{best_rate[top]:.0f}", "most on": short_name(top),
            "what is compared": "best rung, five products counted",
        },
    ]
)  # fmt: skip
assert abs(bars_of["cutedsl_gdpa"].max() - 702) < 6, "the text of the post and its chart agree"
glue("claim_triton", ours_triton.max())
glue("claim_triton_least", ours_triton.min())
glue_word(
    "claim_triton_word",
    "above" if ours_triton.max() > 1.65 else "below" if ours_triton.max() < 1.55 else "close to",
)
glue("claim_rate", best_rate[top])
glue("claim_rate_share", best_share[top])
glue("claim_rate_theirs", bars_of["cutedsl_gdpa"].max())
glue_word("claim_rate_at", short_name(top))
glue("claim_fa4_least", theirs_fa4.drop(suspects).min())
glue("claim_fa4_most", theirs_fa4.drop(suspects).max())
glue_word(
    "claim_fa4",
    f"Here the best rung is {against('fa4', comparable)} times as fast as the pre-release of "
    f"FlashAttention-4, most on {short_name(ours_fa4.idxmax())}: on another machine than theirs, "
    "and not by the kernel that they timed."
    if len(ours_fa4)
    else "This record has no time of FlashAttention-4, so the claim stays open.",
)
strong = pd.concat([times["fa2_varlen"], times["cudnn"]], axis=1).min(axis=1) / best
glue("strong_least", strong[comparable].min())
glue("strong_most", strong[comparable].max())

# %% tags=["remove-input"]
figures.show_table(claimed)

# %% tags=["remove-input"]
figures.provenance(kernels, data_dir=Path(data_dir))

# %% [markdown]
# **1.6 times Triton.** Ours is up to {glue:text}`bwd_claim_triton:.2f`,
# {glue:text}`bwd_claim_triton_word` the published value, and at least
# {glue:text}`bwd_claim_triton_least:.2f`. Both compare a kernel of five products with one of
# seven: the count alone would give {glue:text}`bwd_seven_of_five:.1f`. The Triton kernel of the
# publication is not ours, and our v1 runs with the constants of its file.
#
# **1.6 times FlashAttention-4**, in production settings. Without the suspect bars their charts
# show {glue:text}`bwd_claim_fa4_least:.2f` to {glue:text}`bwd_claim_fa4_most:.2f`.
# {glue:text}`bwd_claim_fa4` The quotient over the stronger of FlashAttention-2 and the dense cuDNN,
# {glue:text}`bwd_strong_least:.2f` to {glue:text}`bwd_strong_most:.2f`, is the one to remember.
#
# **702 TFLOP/s.** The chart has {glue:text}`bwd_claim_rate_theirs:.0f`. Here it is
# {glue:text}`bwd_claim_rate:.0f` ({glue:text}`bwd_claim_rate_at`),
# {glue:text}`bwd_claim_rate_share:.0f` % of this machine's roofline. The ceiling of theirs was not
# published, and a rate without its ceiling does not travel.
#
# ## A whole step
#
# Training calls forward and backward. Timed is `gdpa`, called on tensors that require gradients,
# and `torch.autograd.grad` of its result: checks, allocations, lists, launches, waiting for the
# end. The forward is the rung that `impl="auto"` takes. *Backward, op* is autograd's backward alone
# from the call to its end; *kernels* is the time used so far.

# %% tags=["remove-cell"]
ops = table[(table["scope"] == "op")].drop_duplicates(["workload", "impl", "variant"])
op_time = {
    variant: ops[ops["variant"] == variant]
    .pivot(index="workload", columns="impl", values="time_us_p50")
    .reindex(index=list(STEPS), columns=RUNGS)
    for variant in ("", STEP)
}
step_table = pd.DataFrame(
    {
        "workload": short_name(name),
        "rung": impl.split("_")[0],
        "kernels (ms)": times[impl][name] / 1e3,
        "backward, op (ms)": op_time[""][impl][name] / 1e3,
        "step (ms)": op_time[STEP][impl][name] / 1e3,
        "step / kernels": op_time[STEP][impl][name] / times[impl][name],
        "step of v1 / step": op_time[STEP][V1][name] / op_time[STEP][impl][name],
    }
    for name in STEPS
    for impl in rungs_on(name)
)
assert step_table["step (ms)"].notna().all(), f"{record.id} lacks steps"
step_best = op_time[STEP].min(axis=1)
step_gain = op_time[STEP][V1] / step_best
spread("step_gain", step_gain)
ratio_1024 = step_best[STEPS[0]] / best[STEPS[0]]
glue("step_1024", ratio_1024)
glue("step_ms_1024", step_best[STEPS[0]] / 1e3)
glue_word("verdict_step", VERDICT[bool(1.15 <= ratio_1024 <= 1.40)])
host = (op_time[""] - times.reindex(index=list(STEPS), columns=RUNGS)).stack()
host_256 = op_time[""].loc[STEPS[2]] - times.loc[STEPS[2], RUNGS]
glue("host_256_least", host_256.min())
glue("host_256_most", host_256.max())
both_words = {row.config.get("forward") for row in record.rows if row.variant == STEP}
glue_word("step_forward", listed(sorted(filter(None, both_words))))

# %% tags=["remove-input"]
figures.show_table(step_table.round(2))

# %% tags=["remove-input"]
figures.save_csv(step_table, "gdpa-backward-steps")
figures.provenance(ops, csv="gdpa-backward-steps", data_dir=Path(data_dir))

# %% [markdown]
# With {glue:text}`bwd_step_forward` forward, the step of the fastest rung takes
# {glue:text}`bwd_step_ms_1024:.1f` ms on full batches of 1,024, {glue:text}`bwd_step_1024:.2f`
# times its backward kernels. The gain of the ladder over a step with v1 is
# {glue:text}`bwd_step_gain_least:.2f` to {glue:text}`bwd_step_gain_most:.2f`. On full batches of
# 256 tokens the backward op takes {glue:text}`bwd_host_256_least:.0f` to
# {glue:text}`bwd_host_256_most:.0f` µs more than its kernels.
#
# ## Memory of a step
#
# The most that a step had allocated at once, beside q, k, v and the gradient of the output. What it
# must be: the output, which exists when backward begins, and the three gradients; with an fp32 dQ
# twice q more. Softmax keeps a number for each row besides, and its peers have buffers of their
# own.

# %% tags=["remove-cell"]
memory = results.notebook_table(record, "memory")


def modelled_bytes(name: str, impl: str) -> float:
    """Output, gradients and an fp32 dQ where a rung has one; NaN for a peer."""
    if impl not in RUNGS:
        return float("nan")
    given = workload(name)
    q, k = (
        total * heads * given.head_dim * 2
        for total, heads in ((given.total_q, given.num_heads_q), (given.total_k, given.num_heads_k))
    )
    return 2 * q + 2 * k + (2 * q if impl in (V2, V2A, V4) else 0)


memory["bytes"] = pd.to_numeric(memory["bytes"])
memory["modelled"] = [modelled_bytes(*row) for row in memory[["workload", "impl"]].to_numpy()]
of_rungs = memory[memory["impl"].isin(RUNGS)]
assert of_rungs["bytes"].notna().all(), f"{record.id} lacks the memory of a rung"
apart = (of_rungs["bytes"] / of_rungs["modelled"] - 1).abs()
glue_word("verdict_memory", VERDICT[bool(apart.max() <= 0.05)])
glue("memory_apart", 100 * apart.max())
gib = memory.set_index(["workload", "impl"])["bytes"] / 2**30
for name, key in zip(MEMORY, ("self", "cross"), strict=True):
    glue(f"memory_v4_{key}", gib[name, V4])
    glue(f"memory_v1_{key}", gib[name, V1])
    glue(f"memory_fa2_{key}", gib[name, "fa2_varlen"])
glue("memory_v5_cross", gib[MEMORY[1], V5])
memory_shown = pd.DataFrame(
    {
        "workload": memory["workload"].map(short_name),
        "implementation": memory["impl"],
        "measured (GiB)": memory["bytes"] / 2**30,
        "modelled (GiB)": memory["modelled"] / 2**30,
        "in units of q": memory["bytes"]
        / [workload(n).total_q * workload(n).num_heads_q * 256 for n in memory["workload"]],
    }
)

# %% tags=["remove-input"]
figures.show_table(memory_shown.round(2))

# %% tags=["remove-input"]
figures.provenance([record.id], data_dir=Path(data_dir))

# %% [markdown]
# The rungs are within {glue:text}`bwd_memory_apart:.1f` % of the count. On self-attention v4 needs
# {glue:text}`bwd_memory_v4_self:.2f` GiB, v1 {glue:text}`bwd_memory_v1_self:.2f`, FlashAttention-2
# {glue:text}`bwd_memory_fa2_self:.2f`; on cross-attention v4 {glue:text}`bwd_memory_v4_cross:.2f`
# and v5 {glue:text}`bwd_memory_v5_cross:.2f`. Whoever is short of memory and not of time takes v1.
#
# ## The predictions
#
# 1. *Half-full, 2,048 tokens*: {glue:text}`bwd_half_2048_dense:.2f` times as fast as
#    FlashAttention-2 with dense keys, {glue:text}`bwd_half_2048_jagged:.2f` with jagged ones.
#    **{glue:text}`bwd_verdict_half`**.
# 2. *FlashAttention-4*: {glue:text}`bwd_fa4_by_fa2`. **{glue:text}`bwd_verdict_fa4`**.
# 3. *A step*: {glue:text}`bwd_step_1024:.2f` times the kernels. **{glue:text}`bwd_verdict_step`**.
# 4. *Memory*: within {glue:text}`bwd_memory_apart:.1f` %. **{glue:text}`bwd_verdict_memory`**.

# %% tags=["remove-cell"]
half_2048 = {
    keys: over["fa2_varlen"][f"gdpa-self-half-{keys}-2048"] for keys in ("dense", "jagged")
}
for keys, value in half_2048.items():
    glue(f"half_2048_{keys}", value)
glue_word("verdict_half", VERDICT[bool(min(half_2048.values()) >= 1.2)])

# %% [markdown]
# ## Other machines
#
# `make measure NOTEBOOKS=backward/results` on your GPU appends a record; the next `make book` draws
# its figures here. `make compare NOTEBOOKS=backward/results` measures a part of them without
# keeping a record.


# %% tags=["remove-cell"]
def draw_others() -> None:
    """What every other GPU in the records reaches, or a sentence that there is none."""
    everything = results.table(data_dir, per="gpu")
    away = everything[
        everything["figure"].str.contains("-bwd-")
        & (everything["scope"] == "kernel")
        & (everything["variant"] == "")
        & ~everything["system"].str.contains(SYSTEM)
    ]
    if away.empty:
        display(Markdown("No other machine has been measured yet."))
    for gpu, rows in away.groupby("gpu"):
        display(Markdown(f"**{gpu}**, TFLOP/s beside the H200's."))
        display(beside(rows.drop_duplicates(["workload", "impl"])))


def beside(rows: pd.DataFrame) -> Markdown:
    """Rows of another machine or run, with the rates of this record."""
    ours = single[["workload", "impl", "tflops"]]
    both = rows[["workload", "impl", "tflops", "percent_of_roofline"]].merge(
        ours, on=["workload", "impl"], how="left", suffixes=("", "_h200")
    )
    both["ratio"] = (both["tflops"] / both["tflops_h200"]).round(2)
    return figures.show_table(both.round(2))


def draw_comparison() -> None:
    """What `make compare` just measured, beside the record; nothing is kept."""
    with tempfile.TemporaryDirectory() as folder:
        for part in ("records", "systems"):
            (Path(folder) / part).mkdir()
        session.write(folder)
        fresh = results.table(folder)
    fresh = fresh[fresh["scope"] == "kernel"].drop_duplicates(["workload", "impl"])
    display(beside(fresh))


# %% tags=["remove-input"]
draw_comparison() if mode == "compare" else draw_others()

# %% [markdown]
# ## Exercises
#
# :::{exercise} Credit for seven
# :label: ex-bwd-credit
#
# Useful FLOPs are 2.5 times those of forward for everybody. By which factor would the rate of v1
# rise if its seven products counted, and would the order of two rungs in any table above change?
# *(paper)*
# :::
#
# :::{solution} ex-bwd-credit
# :class: dropdown
#
# By 7/5. The order by time stays, since time does not know what is counted. The order by rate would
# change wherever v1 takes less than {glue:text}`bwd_seven_of_five:.1f` times another rung's time: a
# kernel could climb a table by wasting work. That is why useful work is counted.
# :::
#
# :::{exercise} A series that cannot be
# :label: ex-bwd-suspect
#
# Take the three checks of {numref}`fig-backward-over-forward` and invent a fourth that would also
# have caught the slip, from the published numbers alone. *(paper, `data/published`)*
# :::
#
# :::{solution} ex-bwd-suspect
# :class: dropdown
#
# For example the rise from 256 to 2,048 queries. Forward the other kernels rise by factors of
# {glue:text}`bwd_rise_fwd_least:.2f` to {glue:text}`bwd_rise_fwd_most:.2f`, backward by
# {glue:text}`bwd_rise_bwd_least:.2f` to {glue:text}`bwd_rise_bwd_most:.2f`; FlashAttention-4 by
# {glue:text}`bwd_rise_fa4_fwd:.2f` and {glue:text}`bwd_rise_fa4_bwd:.2f`. A check that does *not*
# catch it: at 1,024 its cross bar is {glue:text}`bwd_fall_fa4:.2f` of its self bar, that of CUTLASS
# FMHA {glue:text}`bwd_fall_fmha:.2f`. A plausible number is not a right one.
# :::

# %% tags=["remove-cell"]
fall = bars.loc["gdpa-cross-bwd-full"]["tflops"] / bars.loc["gdpa-self-bwd-full"]["tflops"]
glue("fall_fa4", fall["cutedsl_fa4", 1024])
glue("fall_fmha", fall["cutlass_fmha", 1024])
assert abs(fall["cutedsl_fa4", 1024] - fall["cutlass_fmha", 1024]) < 0.03, "the text: not caught"
for way in ("fwd", "bwd"):
    chart_bars = bars.loc[f"gdpa-cross-{way}-full"]["tflops"].unstack("length")
    rise = chart_bars[2048] / chart_bars[256]
    glue(f"rise_fa4_{way}", rise["cutedsl_fa4"])
    spread(f"rise_{way}", rise.drop("cutedsl_fa4"))

# %% [markdown]
# :::{exercise} Your own peer
# :label: ex-bwd-peer
#
# Add a baseline to `gdpa_kernels/measuring/baselines.py`: a function that prepares a call of a
# package which you can install. What must it return for `direction="backward"`, and what is checked
# before it is timed? *(code, a GPU)*
# :::
#
# :::{solution} ex-bwd-peer
# :class: dropdown
#
# `prepare(inputs, direction)` returns a call without arguments that gives dq, dk and dv;
# `differentiate` makes it of any function of q, k and v. Before a sample is taken the call runs
# twice, on memory full of NaN the second time, and all its gradients are held against fp64, within
# twice the error of PyTorch in the same dtype. `math` says whose gradients those are.
# :::
#
# ## Takeaways
#
# 1. The best rung has {glue:text}`bwd_share_short:.0f` % of the roofline at best with 256 keys and
#    {glue:text}`bwd_share_long:.0f` % with more. {glue:text}`bwd_firsts`
# 2. Name the peer, the batch and the range. "Times as fast" has one value for each of them, and the
#    largest belongs to the weakest peer.
# 3. A chart can be tested with a pencil: two shapes that are one, two directions that cannot be
#    equal.
