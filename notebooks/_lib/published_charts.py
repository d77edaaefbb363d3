"""The published charts of rates, redrawn beside what was measured.

One scale for ours and theirs, rates from zero, the ceiling always drawn, the best baseline marked,
labels beside the lines instead of a legend.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import pandas as pd
from matplotlib.axes import Axes

from gdpa_lab.measuring.workloads import WORKLOADS, figure_direction
from gdpa_lab.report import rates, results, style
from gdpa_lab.report.roles import role_colour
from gdpa_lab.report.style import DASHED, GREY, INK, SMALL, Figure, canvas, is_rung, note

PUBLISHED_COLOURS = {
    "triton_gdpa": style.RUNG_COLOURS[1],
    "cutedsl_gdpa": style.RUNG_COLOURS[4],
    "cutlass_fmha": GREY,
    "cutedsl_fa4": style.RUNG_COLOURS[6],
}


@style.drawn
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
    Ring: the best baseline at that length. Cross: tried there, without a time. Dash: a rung's
    burst, where `table` has it. ValueError if an impl has no row, if the rows come from two
    systems, or if one length has two workloads.
    """
    rows = _figure_rows(table[table["gpu"] == gpu], figure, impls)
    rates.require_impls(rows, impls, f"{figure} on {gpu}", "sustained")
    lengths = sorted(rows["length"].unique())
    panels = [(rows, impls)]
    if there is not None:
        names = list(dict.fromkeys(there["impl"]))
        panels.append((_figure_rows(there, figure, names), names))
    theirs = published[published["figure"] == figure]
    if theirs.empty:
        raise ValueError(f"published must hold rows of {figure}, got none")
    published_lengths = sorted(theirs["length"].unique())
    if published_lengths != lengths:
        raise ValueError(f"published must hold the lengths {lengths}, got {published_lengths}")
    widths = [1.05] * len(panels) + [1]
    with canvas(1, len(widths), width=(8.8, 12.4)[len(panels) - 1], height=4.4, sharey=True,
                gridspec_kw={"width_ratios": widths}) as (chart, axes):  # fmt: skip
        tops = []
        for axis, (measured, names) in zip(axes, panels, strict=False):
            tops.append(_draw_measured(axis, measured, lengths, names))
            axis.set_title(f"measured {results.TIMED['sustained']}, {rates.machine(measured)}")
        rungs = [impl for impl in impls if is_rung(impl)]
        bursts = _figure_rows(table[table["gpu"] == gpu], figure, rungs, "kernel")
        tops.append(_draw_bursts(axes[0], bursts, lengths))
        axes[0].set_ylabel("TFLOP/s")
        tops.append(_draw_published(axes[-1], theirs, lengths))
        axes[-1].set_title(f"published, {rates.only(theirs, 'hardware')}")
        for axis in axes:
            axis.set_xticks(range(len(lengths)), [str(length) for length in lengths])
            axis.set_xlabel("max_seqlen_q (tokens)")
        axes[0].set_ylim(0, np.nanmax(tops) * rates.HEADROOM)
        for axis in axes[:-1]:
            _place_labels(axis)
        return chart


@style.drawn
def shares(
    table: pd.DataFrame,
    titles: Mapping[str, str],
    *,
    gpu: str,
    impls: Sequence[str],
    published: pd.DataFrame,
    roofs: Mapping[str, float],
) -> Figure:
    """Shares of the own roofline by length, a panel for each published figure of `titles`: a line
    for each of `impls`, back to back, and a pale tick for each published bar, on its own GPU.

    `table`, `gpu`, `published`: as for `figure_tflops`. `roofs`: the roofline of each workload on
    the GPU of the published bars (TFLOP/s). A gap is not timed. ValueError if an impl has no row.
    """
    shades = {impl: role_colour(impl) for impl in impls}
    with canvas(1, len(titles), width=7.4, height=3.4, sharey=True, squeeze=False) as (chart, axes):
        for axis, (figure, title) in zip(axes[0], titles.items(), strict=True):
            rows = _figure_rows(table[table["gpu"] == gpu], figure, impls)
            rates.require_impls(rows, impls, f"{figure} on {gpu}", "sustained")
            lengths = sorted(rows["length"].unique())
            theirs = published[published["figure"] == figure]
            for bar in theirs[theirs["length"].isin(lengths)].itertuples():
                axis.plot(lengths.index(bar.length), 100 * bar.tflops / roofs[bar.workload], "_",
                          color=GREY, alpha=0.8, markersize=16, gid="published")  # fmt: skip
            share = rows.pivot_table(index="length", columns="impl", values="percent_of_roofline")
            share = share.reindex(index=lengths, columns=list(impls))
            for impl in impls:
                axis.plot(range(len(lengths)), share[impl], "o-", color=shades[impl], label=impl,
                          linewidth=1.8 if is_rung(impl) else 1.1)  # fmt: skip
            axis.set_xticks(range(len(lengths)), [f"{length:,}" for length in lengths])
            axis.set(title=title, ylim=(0, 105), xlim=(-0.4, len(lengths) - 0.6))
            axis.axhline(100, **DASHED)
        axes[0, 0].set_ylabel("% of the own roofline")
        axes[0, -1].set_xlabel("max_seqlen_q (tokens)")
        axes[0, 0].plot([], [], "_", color=GREY, markersize=12, label="published")
        chart.legend(*axes[0, 0].get_legend_handles_labels(), loc="outside lower left",
                     ncols=style.columns(4))  # fmt: skip
        return chart


def _figure_rows(
    table: pd.DataFrame, figure: str, impls: Sequence[str], scope: str = "sustained"
) -> pd.DataFrame:
    """The rows of `impls` in a figure, each with its `length`."""
    rows = rates.timed_rows(table, figure_direction(figure), scope)
    rows = rows[(rows["figure"] == figure) & rows["impl"].isin(impls)]
    rows = rows.assign(length=[WORKLOADS[name].max_seqlen_q for name in rows["workload"]])
    for length, names in rows.groupby("length")["workload"].unique().items():
        if len(names) > 1:
            raise ValueError(
                f"table must hold one workload per length, got {', '.join(names)} for {length}"
            )
    return rows


def _draw_measured(
    axis: Axes, rows: pd.DataFrame, lengths: Sequence[int], impls: Sequence[str]
) -> float:
    position_of = {length: position for position, length in enumerate(lengths)}
    timed = set(rows["length"][rows["tflops"].notna()])
    ceilings = [
        rates.ceiling_of(rows[rows["length"] == n]) if n in timed else np.nan for n in lengths
    ]
    edges = np.arange(len(lengths) + 1) - 0.5
    axis.stairs(ceilings, edges, baseline=None, **DASHED)
    first = int(np.argmax(np.isfinite(ceilings)))
    note(axis, "roofline", (first - 0.5, ceilings[first]), (2, 4), va="bottom")
    baselines, crossed = [impl for impl in impls if not is_rung(impl)], False
    for impl in (*baselines, *(impl for impl in impls if is_rung(impl))):
        ours = rows[rows["impl"] == impl].sort_values("length")
        timed = ours.dropna(subset=["tflops"])
        shown = role_colour(impl)
        axis.errorbar(
            [position_of[length] for length in timed["length"]], timed["tflops"],
            yerr=rates.spread_of(timed), label=rates.label_of(ours, impl), color=shown, marker="o",
            linewidth=1.8 if is_rung(impl) else 1.0, elinewidth=1.0, capsize=2,
        )  # fmt: skip
        for length in set(ours["length"]) - set(timed["length"]):
            crossed = True
            axis.plot(
                position_of[length], 0, "x", color=shown, markersize=7, clip_on=False, zorder=5
            )
    best = rows[rows["impl"].isin(baselines)].dropna(subset=["tflops"])
    best = best.sort_values("tflops").groupby("length").last()
    axis.plot(
        [position_of[length] for length in best.index], best["tflops"], "o", markersize=10,
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
        axis.plot(places, ours["tflops"], "_", color=role_colour(impl), markersize=14, gid="burst")
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
        if not style.is_narrow():
            note(axis, kernel, (positions[-1], 0), (0, 5), rotation=90, ha="center", va="bottom",
                 color=INK if bars["suspect"].iloc[-1] else style.PAGE, fontsize=SMALL)  # fmt: skip
    if style.is_narrow():
        axis.legend(loc="upper left", bbox_to_anchor=(0, -0.28), ncols=2)
    _below(axis, "hatched: doubtful in the original" if rows["suspect"].any() else "")
    return float((rows["tflops"] + rows["tflops_error"]).max())


def _below(axis: Axes, text: str) -> None:
    note(axis, text, (0, 0), (0, -36), xycoords="axes fraction", va="top", fontsize=SMALL)


def _place_labels(axis: Axes) -> None:
    """Write each line's label at its right end."""
    lines = {c.get_label(): c.lines[0] for c in axis.containers if len(c.lines[0].get_ydata())}
    style.label_ends(axis, {name: (x.get_ydata()[-1], x.get_color()) for name, x in lines.items()})
