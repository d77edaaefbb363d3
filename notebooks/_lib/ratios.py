"""Ratios of rungs to peers and to each other in a record of results: published charts redrawn,
the best rung against the best peer, ranges of ratios, another GPU next to ours."""

from __future__ import annotations

import math
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import pandas as pd
from IPython.display import Markdown, display

from _lib import published_charts
from gdpa_lab.measuring import cost_model
from gdpa_lab.measuring.baselines import taking
from gdpa_lab.measuring.roofline import bracket
from gdpa_lab.measuring.workloads import figure_direction, workload
from gdpa_lab.report import claims, page, peers, results
from gdpa_lab.report.chapter import Chapter
from gdpa_lab.report.roles import display_name
from gdpa_lab.report.style import is_rung

if TYPE_CHECKING:
    from gdpa_kernels.calling.rung import Rung
    from gdpa_lab.measuring.session import Session

PUBLISHED = "cutedsl_gdpa"
"""The published kernel in the published charts."""


def short(name: str) -> str:
    """A workload's name without what all of gdpa share."""
    return name.removeprefix("gdpa-")


def listed(items: Sequence[str]) -> str:
    """Items as a list in a sentence; "none" without any."""
    items = list(items)
    return " and ".join(filter(None, (", ".join(items[:-1]), items[-1]))) if items else "none"


def spread(values: pd.Series) -> str:
    """'0.98 to 1.03': the least and the most of some quotients; of one '1.03'. ValueError naming
    what is missing."""
    missing = values.index[values.isna()]
    if values.empty or len(missing):
        named = ", ".join(map(str, missing)) or "anything"
        raise ValueError(f"values must all be there, got none for {named}")
    least, most = f"{values.min():.2f}", f"{values.max():.2f}"
    return least if len(values) == 1 else f"{least} to {most}"


def counted(values: pd.Series) -> str:
    """'0.98 to 1.03 (n = 4)': `spread`, and of how many, for a cell or a line under a figure."""
    return f"{spread(values)} (n = {len(values)})"


def redrawn(
    chapter: Chapter, titles: Mapping[str, str], rungs: Sequence[str], finding: str
) -> None:
    """Show published charts of one direction redrawn (`published_charts.shares`), `titles` by
    figure. Where the chapter has a record of the GPU of the published bars, it shows that too: its
    own rungs (b1 and up; other rungs if none has a time) and its best baseline."""
    published = claims.published_figures(chapter.data_dir)
    published = published[published["figure"].isin(titles)]
    way, names = figure_direction(next(iter(titles))), set(published["workload"])
    rows, there = (
        x[x["workload"].isin(names) & (x["direction"] == way)]
        for x in (chapter.rows(direction=way, scope="sustained"), _on(chapter, published))
    )
    timed = {impl for impl in there["impl"][there["tflops"].notna()] if is_rung(impl)}
    timed = {impl for impl in timed if impl.startswith("b")} or timed
    there = there[there["impl"].isin(timed) | ~there["impl"].map(is_rung).astype(bool)]
    roofs = {name: bracket(workload(name), way, cost_model.ASSUMED).tflops_at_lower
             for name in names}  # fmt: skip
    chart = published_charts.shares(
        rows, titles, rungs=[impl for impl in rungs if impl in set(rows["impl"])],
        published=published, roofs=roofs, finding=finding, there=None if there.empty else there,
    )  # fmt: skip
    chapter.figure(
        chart, measured=rows if there.empty else pd.concat([rows, there]),
        published="the charts of the publication", modelled="the roofline of a B200",
    )  # fmt: skip


def _on(chapter: Chapter, published: pd.DataFrame) -> pd.DataFrame:
    """Times back to back of the chapter's newest record of the published GPU; none without one."""
    gpu = published["hardware"].iloc[0]
    there = Chapter(chapter.slug, data_dir=chapter.data_dir, gpu=gpu)
    try:
        rows = there.rows(scope="sustained")
    except LookupError:
        rows = chapter.rows(scope=None).iloc[:0]
    return rows.iloc[:0] if chapter.gpu == gpu else rows


def best_rung(rows: pd.DataFrame) -> pd.Series:
    """The fastest rung among rows of one workload, direction and scope; LookupError without one."""
    return _fastest(rows, rows["impl"].map(is_rung), "a rung")


def best_peer(rows: pd.DataFrame, math: str | None = None) -> pd.Series:
    """The fastest peer among rows of one workload, direction and scope, whatever its layout: a
    dense form counts where it takes the batch. `math`: only peers that compute "activation" or
    "softmax". LookupError without one."""
    peers = ~rows["impl"].map(is_rung)
    if math is not None:
        peers &= rows["math"] == math
    return _fastest(rows, peers, "a peer" if math is None else f"a peer that computes {math}")


def _fastest(rows: pd.DataFrame, which: pd.Series, what: str) -> pd.Series:
    for column in rows.columns.intersection(["workload", "direction", "scope"]):
        if rows[column].nunique() > 1:
            raise ValueError(f"rows must be of one {column}, got {sorted(rows[column].unique())}")
    timed = rows[which.astype(bool) & rows["time_us_p50"].notna()]
    if timed.empty:
        raise LookupError(f"rows must hold a time of {what} on {', '.join(rows['workload'][:1])}")
    return timed.loc[timed["time_us_p50"].idxmin()]


def best(rows: pd.DataFrame, elsewhere: pd.DataFrame | None = None) -> pd.DataFrame:
    """`best_rung` and `best_peer` of each workload among rows of `Chapter.rows`.

    Columns: roofline and rates in TFLOP/s, shares of that roofline in percent, and the peer's time
    over the rung's. A planned peer without a time may be ahead of all that have one: if a quotient
    of the two from bursts says so, or from `elsewhere` (of `sustained`), that one counts, and
    `open` says where it is from. LookupError for a workload without either.
    """
    lines = []
    for name, group in rows.groupby("workload", sort=False):
        if group["time_us_p50"].isna().all():
            continue
        rung, peer = best_rung(group), best_peer(group)
        ratio, is_open = peer["time_us_p50"] / rung["time_us_p50"], ""
        for source, bounds in _bounds(group, rung, elsewhere).items():
            if bounds.min() < ratio:
                ratio, is_open = bounds.min(), source
                peer = pd.Series({"impl": bounds.idxmin(), "tflops": math.nan})
        peers.checked(ratio, peer["impl"], name, rung.get("direction", ""))
        lines.append({
            "workload": name,
            "roofline": 100 * rung["tflops"] / rung["percent_of_roofline"],
            "best rung": rung["impl"],
            "rate": rung["tflops"],
            "share (%)": rung["percent_of_roofline"],
            "best peer": peer["impl"],
            "its rate": peer["tflops"],
            "its share (%)": peer.get("percent_of_roofline", math.nan),
            "peer / rung (time)": ratio,
            "open": is_open,
        })  # fmt: skip
    return pd.DataFrame(lines).set_index("workload")


def _bounds(
    group: pd.DataFrame, rung: pd.Series, elsewhere: pd.DataFrame | None
) -> dict[str, pd.Series]:
    """The times of peers that lack one in `group` over the rung's, by where both have one."""
    untimed = group[~group["impl"].map(is_rung) & group["time_us_p50"].isna()]
    bounds = {"by bursts alone": untimed.set_index("impl")["burst_us"].dropna() / rung["burst_us"]}
    if elsewhere is not None:
        timed = {*group["impl"][group["time_us_p50"].notna()]}
        same = (elsewhere[["workload", "direction"]] == rung[["workload", "direction"]]).all(axis=1)
        times = elsewhere[same].pivot_table(
            index="record", columns="impl", values="time_us_p50", sort=False
        )
        if rung["impl"] in times:
            lacking = {*taking(workload(rung["workload"]), rung["direction"])} - timed
            quotients = times[[x for x in times if x in lacking]].div(times[rung["impl"]], axis=0)
            bounds["in another run"] = quotients.ffill().iloc[-1].dropna()
    return bounds


def sustained(chapter: Chapter) -> pd.DataFrame:
    """All times back to back on the chapter's GPU that today's kernels would have, oldest record
    first."""
    rows = results.table(chapter.data_dir, gpu=chapter.gpu, latest=False)
    rows = rows[(rows["scope"] == "sustained") & (rows["variant"] == "") & ~rows["stale"]]
    return rows[rows["time_us_p50"].notna()]


def behind(rows: pd.DataFrame, standing: pd.DataFrame, elsewhere: pd.DataFrame) -> pd.DataFrame:
    """Select the rows that `best` of `rows` and `elsewhere` is computed from, those of other
    records included."""
    parts = [rows]
    for name, line in standing[standing["open"] == "in another run"].iterrows():
        same = (elsewhere["workload"] == name) & elsewhere["direction"].isin(rows["direction"])
        pair = elsewhere[same & elsewhere["impl"].isin([line["best rung"], line["best peer"]])]
        both = pair.groupby("record")["impl"].nunique() == 2
        parts.append(pair[pair["record"] == both[both].index.max()])
    return pd.concat(parts)


def ahead(standing: pd.DataFrame) -> str:
    """The spread of the quotients of `best`: '1.12 to 1.51 (2 of 16 in another run; by bursts
    alone 1.50 on self-half-jagged-256)'."""
    quotients, is_open = standing["peer / rung (time)"], standing["open"]
    alone = quotients[is_open == "by bursts alone"]
    notes = []
    if elsewhere := (is_open == "in another run").sum():
        notes.append(f"{elsewhere} of {len(standing)} in another run")
    if len(alone):
        notes.append(
            f"by bursts alone {listed([f'{x:.2f} on {short(name)}' for name, x in alone.items()])}"
        )
    return spread(quotients.drop(alone.index)) + (f" ({'; '.join(notes)})" if notes else "")


def row(name: str) -> str:
    """A workload's name as a table's first column has it: self-attention goes without saying."""
    return short(name).removeprefix("self-")


def shown(standing: pd.DataFrame, direction: str) -> pd.DataFrame:
    """`best` as a page shows it: a row for each workload, names in words, rates and shares without
    decimals."""
    names = [
        [display_name(x, direction) for x in standing[f"best {kind}"]] for kind in ("rung", "peer")
    ]
    names[1] = [
        f"{name}, {source}" if source else name
        for name, source in zip(names[1], standing["open"], strict=True)
    ]
    rates = {"TFLOP/s": standing["rate"].round(0), "% of roofline": standing["share (%)"].round(0)}
    return opposed(
        {"workload": standing.index.map(row)}, *names, rates, standing["peer / rung (time)"]
    )


def opposed(
    batch: dict[str, Sequence], kernels: Sequence[str], baselines: Sequence[str],
    rates: dict[str, pd.Series], quotients: pd.Series,
) -> pd.DataFrame:  # fmt: skip
    """The best kernel against the best baseline: a row for each batch, its columns first."""
    return pd.DataFrame(
        {
            **batch,
            "best kernel": list(kernels),
            **{name: rate.to_numpy() for name, rate in rates.items()},
            "best baseline": list(baselines),
            "times as fast": quotients.round(2).to_numpy(),
        }
    )


def against(
    chapter: Chapter, frame: pd.DataFrame, finding: str, measured: pd.DataFrame, name: str
) -> None:
    """Show a table of `opposed`, of rows timed back to back; `finding` is its caption's first
    sentence."""
    gpu = chapter.gpu.removeprefix("NVIDIA ")
    caption = (
        f"**{finding}** Back to back on the {gpu}; last: the baseline's time over the kernel's."
    )
    chapter.table(frame, measured=measured, name=name, caption=caption)


def untimed(chapter: Chapter, planned: pd.DataFrame) -> None:
    """Show, behind a button, why peers lack a time back to back on batches of `planned`, rows of
    the chapter, and which of them many other records time."""
    lines = [f"{title}: {why}." for title, why in peers.missing_peers(planned).items()]
    lines += peers.lost_peers(planned, results.table(chapter.data_dir, latest=False))
    text = "\n".join(f"- {line}" for line in lines)
    display(Markdown(f"<details><summary>Why not timed</summary>\n\n{text}\n\n</details>"))


def beside_published(chapter: Chapter, standing: pd.DataFrame, direction: str) -> pd.DataFrame:
    """Compare the time of the best baseline over that of the best kernel at each published shape,
    as measured (`best`) and as published; doubtful bars aside."""
    bars = claims.published_figures(chapter.data_dir)
    bars = bars[(bars["direction"] == direction) & ~bars["suspect"]]
    rates = bars.pivot(index="workload", columns="kernel", values="tflops")
    theirs = rates[PUBLISHED] / rates.drop(columns=PUBLISHED).max(axis=1)
    ours = standing["peer / rung (time)"]
    columns = {f"measured, {chapter.gpu}": ours, f"published, {bars['hardware'].iloc[0]}": theirs}
    return pd.DataFrame(columns).loc[[n for n in standing.index if n in theirs]].rename(index=row)


def glued(standing: pd.DataFrame) -> dict[str, float]:
    """Rate and share of `best` for `Chapter.glue`: best_self-full_256, share_self-full_256."""
    return {
        f"{key}_{'_'.join(short(name).rsplit('-', 1))}": value
        for key, column in (("best", "rate"), ("share", "share (%)"))
        for name, value in standing[column].items()
    }


def steps(times: pd.DataFrame, rungs: Sequence[Rung]) -> pd.DataFrame:
    """The time of each rung's predecessor over its own, of `Chapter.times`: columns "v1 / v2"."""
    columns = {
        f"{rung.predecessor.split('_')[0]} / {rung.impl.split('_')[0]}": times[rung.predecessor]
        / times[rung.impl]
        for rung in rungs
        if rung.predecessor in times and rung.impl in times
    }
    return pd.DataFrame(columns)


def ranges(quotients: pd.DataFrame, of: str) -> pd.DataFrame:
    """Summarise each column of `quotients` over workloads: the least, the median, the most, where
    the first and the last are, and how many there are; `of`: what the columns are called."""
    by = quotients.rename(index=short)
    columns = {"least": by.min(), "on": by.idxmin(), "median": by.median(), "most": by.max()}
    columns |= {"on ": by.idxmax(), "workloads": by.count()}
    return pd.DataFrame(columns).rename_axis(of).reset_index()


def of_today(rows: pd.DataFrame) -> pd.DataFrame:
    """Select of each GPU's `rows` those of workloads on which no kernel has changed since, if there
    are any; otherwise all of them."""
    board = rows.columns.intersection(["gpu", "handle"]).tolist()
    run = [*board, *rows.columns.intersection(["workload", "direction", "scope"])]
    same = ~rows.groupby(run)["stale"].transform("any")
    return rows[same | ~same.groupby([rows[name] for name in board]).transform("any")]


def others(
    chapter: Chapter, session: Session | None, direction: str, scope: str = "sustained"
) -> None:
    """Show another GPU: rates of the session of `Chapter.compare`, of which nothing is kept, beside
    those of the chapter's record; without one the best kernel against the best baseline on each
    other GPU of the records and of data/community, and how many workloads are left out because a
    kernel has changed since."""
    if session is not None:
        ours = chapter.rows(direction=direction, scope=scope)
        rows = _of(_measured(session), direction, scope)
        timed = results.TIMED[scope]
        display(Markdown(f"**This machine**, TFLOP/s {timed}, next to those of the record."))
        beside = _beside(rows, ours)
        beside.insert(1, "direction", direction)
        display(page.show_table(beside), metadata={"compared": True})
        return
    everything = results.table(chapter.data_dir, per="gpu").assign(handle="")
    guests = results.community(chapter.data_dir, per="gpu")
    selected = _of(pd.concat([everything, guests]).query("figure != ''"), direction, scope)
    selected = _compared(selected[(selected["handle"] != "") | (selected["gpu"] != chapter.gpu)])
    whole = selected.groupby(["gpu", "handle"])["workload"].nunique()
    selected = of_today(selected)
    for (gpu, handle), rows in selected.groupby(["gpu", "handle"]):
        standing = best(rows)
        left = whole[gpu, handle] - len(standing)
        machine = f"{gpu}, data/community/{handle}" if handle else gpu
        over = ahead(standing)
        caption = (
            f"**{machine}: the best kernel is {over} times as fast as the best baseline.** "
            f"Rates {results.TIMED[scope]} in TFLOP/s, shares of the roofline of that board."
        )
        if left:
            caption += f" Workloads left out, since a kernel has changed: {left}."
        display(page.show_table(shown(standing, direction), caption))
        if not handle:
            display(page.provenance(rows, data_dir=chapter.data_dir))
    if selected.empty:
        display(Markdown("No other GPU has been measured yet."))


def _compared(rows: pd.DataFrame) -> pd.DataFrame:
    """Select the rows of workloads on which a board has times of a rung and of a peer."""
    board = ["gpu", "handle", "workload"]
    timed = rows[rows["time_us_p50"].notna()]
    kinds = timed.assign(rung=timed["impl"].map(is_rung)).groupby(board)["rung"].nunique()
    return rows[pd.MultiIndex.from_frame(rows[board]).isin(kinds.index[kinds == 2])]


def _of(rows: pd.DataFrame, direction: str, scope: str) -> pd.DataFrame:
    rows = rows[(rows["scope"] == scope) & (rows["variant"] == "")]
    by = rows.columns.intersection(["gpu", "handle"]).tolist()
    return rows[rows["direction"] == direction].drop_duplicates([*by, "workload", "impl"])


def _beside(rows: pd.DataFrame, ours: pd.DataFrame) -> pd.DataFrame:
    both = rows[["workload", "impl", "tflops", "percent_of_roofline", "failure"]].merge(
        ours[["workload", "impl", "tflops"]], on=["workload", "impl"], how="left",
        suffixes=("", "_record"),
    )  # fmt: skip
    return both.assign(ratio=both["tflops"] / both["tflops_record"]).round(2)


def _measured(session: Session) -> pd.DataFrame:
    """The rows of a session, written to a folder that is gone afterwards."""
    with tempfile.TemporaryDirectory() as folder:
        for part in ("records", "systems"):
            (Path(folder) / part).mkdir()
        session.write(folder)
        return results.table(folder)
