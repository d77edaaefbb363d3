"""Records -> axes: the charts of the book.

One scale for ours and theirs, rates from zero, the ceiling always drawn, the best baseline marked,
labels beside the lines instead of a legend.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes

from gdpa_lab.measuring.workloads import WORKLOADS, figure_direction
from gdpa_lab.report import house, results
from gdpa_lab.report.charts import list_rows
from gdpa_lab.report.house import DASHED, INK, SMALL, Figure, canvas, colour, is_rung, note

PUBLISHED_COLOURS = {
    "triton_gdpa": "#1f83c4", "cutedsl_gdpa": "#7a6ad8", "cutlass_fmha": INK,
    "cutedsl_fa4": "#a06a4a",
}  # fmt: skip
_HEADROOM = 1.08


def figure_tflops(
    table: pd.DataFrame,
    figure: str,
    *,
    gpu: str,
    impls: Sequence[str],
    published: pd.DataFrame,
    there: pd.DataFrame | None = None,
) -> Figure:
    """A published chart redrawn: ours measured back to back on the left, theirs on the right, one
    scale. Between them, if there is any, what was measured on the hardware of the published one.

    `table`: rows of `results.table`; if `figure` has two families of workloads (dense and jagged
    keys), pass the rows of one. `gpu`: its exact name. `impls`: what to draw, rungs and baselines.
    `published`: `claims.published_figures()`. `there`: rows of another system, of which
    all are drawn.

    Error bars: p20-p80. Steps: the roofline of each workload, with the ceilings of its record.
    Ring: the best baseline at that length. Cross: no time there. Dash: a rung's burst, where
    `table` has it. ValueError if an impl has no row, if the rows come from two systems, or if one
    length has two workloads.
    """
    rows = _figure_rows(table[table["gpu"] == gpu], figure, impls)
    _require_impls(rows, impls, f"{figure} on {gpu}", "sustained")
    lengths = sorted(rows["length"].unique())
    panels = [(rows, impls)]
    if there is not None:
        names = list(dict.fromkeys(there["impl"]))
        panels.append((_figure_rows(there, figure, names), names))
    theirs = published[published["figure"] == figure]
    if theirs.empty:
        raise ValueError(f"published must hold rows of {figure}, got none")
    found = sorted(theirs["length"].unique())
    if found != lengths:
        raise ValueError(f"published must hold the lengths {lengths}, got {found}")
    widths = [1.05] * len(panels) + [1]
    with canvas(1, len(widths), width=(8.8, 12.4)[len(panels) - 1], height=4.4, sharey=True,
                gridspec_kw={"width_ratios": widths}) as (chart, axes):  # fmt: skip
        tops = []
        for axis, (measured, names) in zip(axes, panels, strict=False):
            tops.append(_draw_measured(axis, measured, lengths, names))
            axis.set_title(f"measured {results.TIMED['sustained']}, {_machine(measured)}")
        rungs = [impl for impl in impls if is_rung(impl)]
        bursts = _figure_rows(table[table["gpu"] == gpu], figure, rungs, "kernel")
        tops.append(_draw_bursts(axes[0], bursts, lengths))
        axes[0].set_ylabel("TFLOP/s")
        tops.append(_draw_published(axes[-1], theirs, lengths))
        axes[-1].set_title(f"published, {_only(theirs, 'hardware')}")
        for axis in axes:
            axis.set_xticks(range(len(lengths)), [str(length) for length in lengths])
            axis.set_xlabel("max_seqlen_q (tokens)")
        axes[0].set_ylim(0, np.nanmax(tops) * _HEADROOM)
        for axis in axes[:-1]:
            _place_labels(axis)
        return chart


def figure_ladder(
    table: pd.DataFrame,
    workload: str,
    rungs: Sequence[str],
    highlight: str,
    direction: str = "forward",
) -> Figure:
    """The ladder so far on one workload, back to back: a bar for each rung, then each baseline.

    `table`: rows of `results.table` of one system. `rungs`: in the order to show; `highlight`: the
    one in colour. Every baseline of the table with a time is shown, slowest first.
    Labels: TFLOP/s and % of roofline; error bars: p20-p80. ValueError if a rung has no row.
    """
    if highlight not in rungs:
        raise ValueError(f"highlight must be one of {', '.join(rungs)}, got {highlight!r}")
    rows = _timed_rows(table[table["workload"] == workload], direction, "sustained")
    rows = rows.drop_duplicates(["impl", "system"], keep="last")
    _require_impls(rows, rungs, f"{workload}, {direction}", "sustained")
    others = rows.dropna(subset=["tflops"]).sort_values("tflops")["impl"]
    order = [*rungs, *(impl for impl in others if not is_rung(impl) and impl not in rungs)]
    with canvas(width=7.0, height=1.1 + 0.34 * len(order)) as (chart, axis):
        ceiling = _ceiling(rows)
        axis.axvline(ceiling, **DASHED)
        note(axis, f"roofline {ceiling:.0f}", (ceiling, 1.0), (-4, 3), ha="right", va="bottom",
             xycoords=("data", "axes fraction"))  # fmt: skip
        for position, impl in enumerate(order):
            row = rows[rows["impl"] == impl].iloc[0]
            rate, strong = float(row["tflops"]), impl == highlight
            if math.isnan(rate):
                note(axis, f"failed: {row['failure']}", (0, position), (4, 0), va="center")
                continue
            shown, (below, above) = colour(impl) if strong else INK, _spread(row)
            axis.barh(
                position, rate, 0.62, color=shown if is_rung(impl) else "none", edgecolor=shown,
                xerr=[[below], [above]], error_kw={"ecolor": INK, "elinewidth": 1.2, "capsize": 2},
            )  # fmt: skip
            label = f"{rate:.0f}  {row['percent_of_roofline']:.0f} %"
            note(axis, label, (rate + above, position), (5, 0), va="center", color=shown,
                 fontweight="bold" if strong else "normal")  # fmt: skip
        list_rows(axis, [_label(rows, impl) for impl in order])
        axis.get_yticklabels()[order.index(highlight)].set_color(colour(highlight))
        axis.set_xlim(0, ceiling * _HEADROOM)
        axis.set_xlabel(f"TFLOP/s {results.TIMED['sustained']}, {workload}, {_machine(rows)}")
        return chart


def _figure_rows(
    table: pd.DataFrame, figure: str, impls: Sequence[str], scope: str = "sustained"
) -> pd.DataFrame:
    """The rows of `impls` in a figure, each with its `length`."""
    rows = _timed_rows(table, figure_direction(figure), scope)
    rows = rows[(rows["figure"] == figure) & rows["impl"].isin(impls)]
    rows = rows.assign(length=[WORKLOADS[name].max_seqlen_q for name in rows["workload"]])
    for length, names in rows.groupby("length")["workload"].unique().items():
        if len(names) > 1:
            raise ValueError(
                f"table must hold one workload per length, got {', '.join(names)} for {length}"
            )
    return rows


def _timed_rows(table: pd.DataFrame, direction: str, scope: str) -> pd.DataFrame:
    keep = (table["scope"] == scope) & (table["variant"] == "")
    return table[keep & (table["direction"] == direction)]


def _require_impls(rows: pd.DataFrame, impls: Sequence[str], where: str, scope: str) -> None:
    missing = [impl for impl in impls if impl not in set(rows["impl"])]
    if missing or rows.empty:
        wanted = ", ".join(missing) or "at least one impl"
        raise ValueError(f"table must hold {scope} rows of {wanted} for {where}, got none")
    _only(rows, "system")


def _only(rows: pd.DataFrame, column: str) -> str:
    values = sorted(set(rows[column]))
    if len(values) != 1:
        raise ValueError(
            f"table must hold one {column}, got {', '.join(map(str, values)) or 'none'}"
        )
    return str(values[0])


def _machine(rows: pd.DataFrame) -> str:
    dates = sorted(set(rows["date"]))
    period = dates[0] if len(dates) == 1 else f"{dates[0]} to {dates[-1]}"
    return f"{_only(rows, 'gpu') or _only(rows, 'system')}, {period}"


def _ceiling(rows: pd.DataFrame) -> float:
    """Roofline of one workload (TFLOP/s), from the newest row that has a rate."""
    timed = rows.dropna(subset=["tflops", "percent_of_roofline"]).sort_values(["date", "record"])
    if timed.empty:
        raise ValueError(f"table must hold a correct time for {_only(rows, 'workload')}, got none")
    last = timed.iloc[-1]
    return 100 * float(last["tflops"]) / float(last["percent_of_roofline"])


def _spread(rows: pd.DataFrame | pd.Series) -> Any:
    """Distance of the p80 and p20 times from the p50 rate, in TFLOP/s: (below, above)."""
    rate = rows["tflops"]
    below = rate - rate * rows["time_us_p50"] / rows["time_us_p80"]
    return below, rate * rows["time_us_p50"] / rows["time_us_p20"] - rate


def _label(rows: pd.DataFrame, impl: str) -> str:
    math_of = rows[rows["impl"] == impl]["math"].iloc[0]
    return impl if is_rung(impl) else f"{impl} ({math_of})"


def _draw_measured(
    axis: Axes, rows: pd.DataFrame, lengths: Sequence[int], impls: Sequence[str]
) -> float:
    place = {length: position for position, length in enumerate(lengths)}
    timed = set(rows["length"][rows["tflops"].notna()])
    ceilings = [_ceiling(rows[rows["length"] == n]) if n in timed else np.nan for n in lengths]
    edges = np.arange(len(lengths) + 1) - 0.5
    axis.stairs(ceilings, edges, baseline=None, **DASHED)
    first = int(np.argmax(np.isfinite(ceilings)))
    note(axis, "roofline", (first - 0.5, ceilings[first]), (2, 4), va="bottom")
    baselines, crossed = [impl for impl in impls if not is_rung(impl)], False
    for impl in (*baselines, *(impl for impl in impls if is_rung(impl))):
        ours = rows[rows["impl"] == impl].sort_values("length")
        timed = ours.dropna(subset=["tflops"])
        shown = colour(impl)
        axis.errorbar(
            [place[length] for length in timed["length"]], timed["tflops"], yerr=_spread(timed),
            color=shown, marker="o", linewidth=1.8 if is_rung(impl) else 1.0, elinewidth=1.0,
            capsize=2, label=_label(ours, impl),
        )  # fmt: skip
        for length in set(lengths) - set(timed["length"]):
            crossed = True
            axis.plot(place[length], 0, "x", color=shown, markersize=7, clip_on=False, zorder=5)
    best = rows[rows["impl"].isin(baselines)].dropna(subset=["tflops"])
    best = best.sort_values("tflops").groupby("length").last()
    axis.plot(
        [place[length] for length in best.index], best["tflops"], "o", markersize=10,
        markerfacecolor="none", markeredgecolor=INK, gid="best-baseline",
    )  # fmt: skip
    axis.set_xlim(-0.5, len(lengths) - 0.75)
    notes = [] if best.empty else ["ring: best baseline"]
    notes += ["cross: not timed"] if crossed else []
    _below(axis, "; ".join([*notes, "dash: burst"]))
    return float(np.nanmax([*ceilings, *rows["tflops"]]))


def _draw_bursts(axis: Axes, rows: pd.DataFrame, lengths: Sequence[int]) -> float:
    """A dash for each rate, in the colour of its line."""
    for impl, ours in rows.dropna(subset=["tflops"]).groupby("impl"):
        places = [lengths.index(length) for length in ours["length"]]
        axis.plot(places, ours["tflops"], "_", color=colour(impl), markersize=14, gid="burst")
    return float(rows["tflops"].max())


def _draw_published(axis: Axes, rows: pd.DataFrame, lengths: Sequence[int]) -> float:
    kernels = list(dict.fromkeys(rows["kernel"]))
    width = 0.84 / len(kernels)
    for index, kernel in enumerate(kernels):
        bars = rows[rows["kernel"] == kernel].sort_values("length")
        positions = np.arange(len(lengths)) - 0.42 + width * (index + 0.5)
        drawn = axis.bar(
            positions, bars["tflops"], width * 0.92, yerr=bars["tflops_error"],
            color=PUBLISHED_COLOURS[kernel], error_kw={"ecolor": INK, "elinewidth": 1.0},
            label=kernel,
        )  # fmt: skip
        for bar, suspect in zip(drawn, bars["suspect"], strict=True):
            if suspect:
                bar.set(facecolor="none", edgecolor=PUBLISHED_COLOURS[kernel], hatch="////")
        note(axis, kernel, (positions[-1], 0), (0, 5), rotation=90, ha="center", va="bottom",
             color=INK if bars["suspect"].iloc[-1] else "white", fontsize=SMALL)  # fmt: skip
    _below(axis, "hatched: doubtful in the original" if rows["suspect"].any() else "")
    return float((rows["tflops"] + rows["tflops_error"]).max())


def _below(axis: Axes, text: str) -> None:
    note(axis, text, (0, 0), (0, -36), xycoords="axes fraction", va="top", fontsize=SMALL)


def _place_labels(axis: Axes) -> None:
    """Write each line's label at its right end."""
    lines = {c.get_label(): c.lines[0] for c in axis.containers if len(c.lines[0].get_ydata())}
    house.label_ends(axis, {name: (x.get_ydata()[-1], x.get_color()) for name, x in lines.items()})
