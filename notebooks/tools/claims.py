# ---
# jupyter:
#   kernelspec: {display_name: Python 3, language: python, name: python3}
# ---

# %% [markdown]
# # All published claims
#
# Which published statements about these operators hold, and on which machine? This page is a list
# to look things up in; {doc}`refuted` is the part to read.
#
# :::{admonition} In this chapter (10 minutes, then for reference)
# You will find any published claim with our answer. Of {glue:text}`total:.0f` claims
# {glue:text}`measured:.0f` are measured, {glue:text}`answered:.0f` answered by a chapter,
# {glue:text}`refuted:.0f` refuted, {glue:text}`comparable:.0f` not comparable and
# {glue:text}`open:.0f` open. Our gains are smaller than the published ones in the forward pass and
# mostly larger in the backward pass.
# :::

# %% tags=["hide-input"]
from IPython.display import Markdown, display

from gdpa_lab.measuring import record
from gdpa_lab.measuring.workloads import FIGURES, WORKLOADS
from gdpa_lab.report import charts, claims, results, stand_ins
from gdpa_lab.report.chapter import Chapter
from gdpa_lab.report.style import is_rung
from notebooks.tools import _answers

# %% tags=["parameters"]
mode = "replay"
device = "cpu"
data_dir = "data"

# %% tags=["remove-cell"]
chapter = Chapter("tools/claims", mode=mode, device=device, data_dir=data_dir)
every = results.table(data_dir, gpu=chapter.gpu, latest=False)
chapters = {run.id: (run.chapter or "").removeprefix("notebooks/").removesuffix(".py")
            for run in record.load_all(data_dir)}  # fmt: skip
judged = claims.judged(every, claims=claims.load(data_dir), chapters=chapters)
shown = _answers.answered(judged, _answers.numbers(chapter))
replaced = stand_ins.used(judged)
assert not {"gdpa_triton"} & {x for each in replaced for x in each.originals}, "the text: itself"
chapter.glue(stand_ins="; ".join(map(str, replaced)))
records = sorted({x for ids in judged["ours_record"] for x in ids.split(", ") if x})

# %% tags=["remove-input"]
# | name: fig-claims-ratios
# | caption: >
# |   **Our gains are smaller than the published ones in the forward pass, and mostly larger in the
# |   backward pass.** Our largest ratio (H200) over the published one (B200), for each series of
# |   the six charts. *No ratio*: the table below says why.
# | alt: >
# |   A dot plot with a row for each chart. In the forward pass all marks lie left of the dashed
# |   line, in the backward pass nearly all right of it.
ratios = _answers.plotted(judged, "ratio").astype(float)
chapter.figure(
    charts.dots(
        ratios, xlabel="our largest ratio / the published one", log=True, missing="no ratio",
    ),
    data=_answers.told(judged, shown), measured=records,
)  # fmt: skip

# %% [markdown]
# ## How a claim gets its status
#
# `data/claims.yml` holds each claim with its value, hardware and source. Where records can answer,
# it has a *selector* of rows, evaluated when this page is built.
#
# measured
# : A selector found correct times on one machine, back to back like the published loops. *Stale*:
#   a kernel changed since.
#
# answered
# : A statement about mathematics, design or causes that a chapter decides.
#
# refuted
# : The published numbers contradict each other or the counts of the workload ({doc}`refuted`).
#
# not comparable, open
# : No measurement here can decide it, as a rate or a time of another machine, or none has yet. The
#   last column says what is missing.
#
# A measured claim is not a confirmed one, since baselines are stand-ins:
# {glue:text}`stand_ins`. The published Triton GDPA is itself.
#
# ## The charts and tables
#
# "Published → measured" stands in each cell, and rates of the two machines beside each other. A
# largest ratio is the one number that the published text quotes of a chart.

# %% tags=["remove-input"]
chapter.table(
    _answers.plotted(judged).rename_axis("chart").reset_index(), data=_answers.told(judged, shown),
    measured=records, published="six charts, NVIDIA B200", name="tab-claims-charts",
    caption="**Largest ratios are smaller here in the forward pass and mostly larger in the "
    "backward pass.** Over each baseline, published → measured, and the largest rates.",
)  # fmt: skip
chapter.table(
    _answers.tabulated(judged).reset_index(), measured=records, published="table 5 and 6",
    name="tab-claims-block",
    caption="**Block attention gains less than published in the forward pass, and more in the "
    "backward pass.** Times as fast as FlashAttention-2, published → measured.",
)  # fmt: skip

# %% tags=["remove-cell"]
us = chapter.times("forward/results", scope="sustained", direction="forward")
best = us.filter(regex="^v[1-9]").min(axis=1)
half = [name for name in FIGURES["gdpa-self-fwd-half"] if "dense" in name]
peers = (us[us.columns[~us.columns.map(is_rung)]].min(axis=1) / best)[half]
cross = us.div(best, axis=0).loc[[*FIGURES["gdpa-cross-fwd-full"]]]
forward = ratios.index.str.contains("forward")
assert not (ratios[forward] >= 1).any(axis=None), "forward: smaller"
assert (ratios[~forward] > 1).sum(axis=None) >= 5, "backward: larger"
block = judged.set_index("id")["ratio"]
assert block["block-forward-over-fa2"] < 1 < block["block-backward-over-fa2"], "the caption"
counts = shown["status"].value_counts()
rest = judged[judged["id"].map(_answers.in_tables)]["status"].value_counts()
rest.index = rest.index.str.replace("_by_arithmetic", "").str.replace("_", " ")
for status in ("measured", "answered", "refuted", "not comparable", "open"):
    chapter.glue(**{status.split()[-1]: counts.get(status, 0) + rest.get(status, 0)})
for name, values in {"peers": peers, "dense": cross["cudnn"], "fa4": cross["fa4"]}.items():
    chapter.glue(**{f"{name}_least": values.min(), f"{name}_most": values.max()})
timed = every[(every["impl"] == "gdpa_triton") & every["tflops"].notna()]["workload"]
seen = {WORKLOADS[name].activation for name in timed if name in WORKLOADS}
chapter.glue(total=len(judged), seen=" and ".join(sorted(seen)))

# %% [markdown]
# A maximum finds the weakest baseline. On half-full batches the stand-in for FMHA, the ragged
# cuDNN, is slower to call than to run, so no ratio over it says anything. Over the best baseline at
# each length our forward pass is {glue:text}`peers_least:.2f` to {glue:text}`peers_most:.2f` times
# as fast there.
#
# With 256 keys it is {glue:text}`fa4_least:.2f` to {glue:text}`fa4_most:.2f` times as fast as
# FlashAttention-4's path for Hopper, and {glue:text}`dense_least:.2f` to
# {glue:text}`dense_most:.2f` times as fast as cuDNN. Quote the latter.
#
# ## The other claims

# %% tags=["remove-input", "ledger"]
order = ["measured", "answered", "refuted", "not comparable", "open"]
listed = shown.sort_values("status", key=lambda x: x.map(order.index), kind="stable")
listed["where"] = listed["where"].str.replace(r"^missing: ([^,]*).*", r"\1", regex=True)
listed = listed.groupby(["status", "ours", "where"], sort=False)["claim"].agg("<br>".join)
letters = "; ".join(f"{x} {{cite}}`{key}`" for key, x in _answers.sources(judged).items())
chapter.table(
    listed.reset_index()[["status", "claim", "ours", "where"]], name="tab-claims-others",
    caption="**A chapter answers what a record cannot: designs, causes and mathematics.** Every "
    "claim that no table above has, by status; small letters name the sources.",
    data=shown.rename(columns={"where": "where or what is missing"}).merge(
        judged[["id", "published", "unit", "hardware", "source", "note"]]
    ),
    measured=records, published="by the sources below",
)  # fmt: skip
display(Markdown(f"Sources: {letters}. The CSV has ids and all that is missing."))

# %% [markdown]
# ## Exercises
#
# :::{exercise} Close an open claim
# :label: ex-claims-selector
#
# Which rows of a record would answer the claim `gdpa-eleven-activations`, which of them exist, and
# why is a selector of the kind `best_rate` not enough? *(reading `claims.py`)*
# :::
#
# :::{solution} ex-claims-selector
# :class: dropdown
#
# One correct row of each published kernel per activation. Of the Triton kernel the records hold
# rows with {glue:text}`seen`; of the other none, since it needs a B200. The claim is a count of
# correct rows, not a rate, and needs a new kind of selector.
# :::
#
# :::{exercise} Refute us
# :label: ex-claims-refute
#
# Try to break a measured number: another stand-in, length or GPU. What moves the ratio most? *(a
# GPU, an hour)*
# :::
#
# :::{solution} ex-claims-refute
# :class: dropdown
#
# `make measure NOTEBOOKS=forward/results`, then this page again. For the half-full chart the
# stand-in decides. A record that contradicts the prose stops the build.
# :::
#
# ## Takeaways
#
# - A claim is a value, a machine, a baseline and a source. Without all four, nobody can check it.
# - A maximum over shapes finds the weakest baseline. Ask for the whole row.
# - Many numbers can be tested without hardware: {doc}`refuted` multiplies the counts.
