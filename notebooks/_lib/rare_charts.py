"""Charts of tables that few chapters draw: named points, samples, a heat map, stacked bars."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import numpy as np
import pandas as pd
import seaborn as sns
from matplotlib.axes import Axes
from matplotlib.transforms import Bbox

from gdpa_lab.report import style
from gdpa_lab.report.charts import (
    NOT_TIMED,
    check_complete,
    coloured,
    head,
    list_rows,
    reference,
)  # fmt: skip
from gdpa_lab.report.roles import palette, role_colour
from gdpa_lab.report.style import GREY, INK, PAGE, SERIES, SMALL, Figure, canvas, note

_LOOKS: dict[str, tuple[bool, dict[str, object]]] = {
    "filled": (True, {}),
    "pale": (True, {"alpha": 0.35}),
    "hollow": (False, {}),
    "hatched": (False, {"hatch": "////"}),
}
_ON = {"filled": PAGE, "pale": INK}
"""The colour of a text on a part that is not the page's."""


@style.drawn
def scatter(
    groups: Mapping[str, pd.DataFrame],
    *,
    xlabel: str,
    ylabel: str,
    levels: Mapping[str, float] | None = None,
    most: tuple[str, float] | None = None,
) -> Figure:
    """At most three groups of points, a mark and a colour each; x is logarithmic, y from zero.

    A frame has a row for each point, its name as the index, x in the first column and y in the
    second. Names stand at the points. `levels`: dashed horizontal lines by name. `most`: a name and
    the largest x allowed; then a line joins the points of a group than which none is as far left
    and as high, and the others are small and grey, without a name.
    """
    for points in groups.values():
        check_complete(points)
    names = ["name", "x", "y"]
    table = pd.concat(
        {of: points.reset_index().set_axis(names, axis=1) for of, points in groups.items()},
        names=["group"],
    ).reset_index()
    with canvas(width=7.6, height=4.6) as (chart, axis):
        shades = coloured(list(groups))
        if most:
            first = table.apply(lambda p: not (
                (table["group"] == p["group"]) & (table["x"] <= p["x"]) & (table["y"] > p["y"])
            ).any(), axis=1)  # fmt: skip
            axis.plot(table["x"][~first], table["y"][~first], ".", color=GREY)
            table = table[first].sort_values("x")
            for group, points in table.groupby("group"):
                axis.plot(points["x"], points["y"], color=shades[group], linewidth=1.2)
        sns.scatterplot(
            table, x="x", y="y", hue="group", style="group", palette=shades,
            markers=dict(zip(groups, "os^", strict=False)), s=42, alpha=0.85, ax=axis,
        )  # fmt: skip
        axis.set(xscale="log", ylim=(0, 1.15 * table["y"].max()), xlabel=xlabel, ylabel=ylabel)
        axis.margins(x=0.14)
        axis.minorticks_off()
        reference(axis, levels)
        if most:
            axis.autoscale(False)
            axis.axvspan(most[1], axis.get_xlim()[1], color=GREY, alpha=0.15, linewidth=0)
            note(axis, most[0], (most[1], 0), (5, 5), fontsize=SMALL)
        head(axis)
        chart.draw_without_rendering()
        _name_points(axis, table, list((levels or {}).values()))
        return chart


def _name_points(axis: Axes, table: pd.DataFrame, levels: Sequence[float]) -> None:
    """Each point's name beside it, where it covers the least of other points and names."""
    pixels = axis.transData.transform(table[["x", "y"]].to_numpy())
    taken = [Bbox.from_bounds(x - 4, y - 4, 8, 8) for x, y in pixels]
    taken += [text.get_window_extent() for text in axis.texts]
    heights = axis.transData.transform([(1, level) for level in levels])[:, 1] if levels else []
    taken += [Bbox.from_extents(-1e4, y - 1, 1e4, y + 1) for y in heights]
    for name, point in zip(table["name"], table[["x", "y"]].to_numpy(), strict=True):
        tried = []
        for right, up, ha in ((7, -3, "left"), (-7, -3, "right"), (0, 7, "center"),
                              (0, -13, "center"), (6, 6, "left"), (6, -12, "left"),
                              (-6, 6, "right"), (-6, -12, "right")):  # fmt: skip
            text = note(axis, name, point, (right, up), fontsize=8, ha=ha)
            box = text.get_window_extent()
            covered = sum(box.overlaps(other) for other in taken)
            tried.append((covered, len(tried), text, box))
        best, *rest = sorted(tried, key=lambda one: one[:2])
        taken.append(best[3])
        for _, _, text, _ in rest:
            text.remove()


@style.drawn
def swarm(
    table: pd.DataFrame, *, xlabel: str, grey: Collection[str] = (), log: bool = False,
    mirrored: bool = False, levels: Mapping[str, float] | None = None, finding: str = "",
) -> Figure:  # fmt: skip
    """Every sample as a point, a row for each name in the column `row`, from the top, with its
    count; x is the column `value`. A third column, if there is one, names the colour.

    `grey`: rows, or names of colours, without one. `log`: a logarithmic axis, `mirrored` one on
    both sides of zero. `levels`: dashed lines by name.
    """
    check_complete(table)
    rows = table.groupby("row", sort=False).size()
    hue = next(iter(table.columns.difference(["row", "value"])), "row")
    names = list(dict.fromkeys(table[hue]))
    shades = palette(names) | dict.fromkeys(grey, GREY)
    with canvas(width=7.4, height=1.0 + 0.42 * len(rows)) as (chart, axis):
        if log:
            axis.set_xscale("log")
            axis.xaxis.set_major_formatter(lambda x, _: f"{x:g}")
        if mirrored:
            axis.set_xscale("symlog", linthresh=0.1)
            axis.xaxis.set_major_formatter(lambda x, _: f"{abs(x):g}")
            ticks = [-100, -10, -1, 0, 1, 10, 100, 1000]
            axis.set_xticks(ticks[:: 2 if style.is_narrow() else 1])
            axis.axvline(0, color=INK, linewidth=0.8)
        reference(axis, levels, upright=True)
        sns.swarmplot(
            table, x="value", y="row", hue=hue, dodge=hue != "row", palette=shades, size=3.6,
            alpha=0.85, ax=axis, legend=hue != "row", warn_thresh=1,
        )  # fmt: skip
        list_rows(axis, [f"{name} ({count})" for name, count in rows.items()])
        axis.set(xlabel=xlabel, ylabel="")
        head(axis, finding, named=hue != "row")
        chart.draw_without_rendering()
        for points in axis.collections:  # seaborn places them again whenever they are drawn
            vars(points).pop("draw", None)
        return chart


@style.drawn
def heat(
    frame: pd.DataFrame, *, label: str, low: float, high: float, cmap: str = "crest",
    form: str = ".0f", gains: pd.Series | None = None, finding: str = "",
) -> Figure:  # fmt: skip
    """A cell with its value for each entry of `frame`, its colour from `low` to `high` of a map of
    seaborn's; "not timed" stands in one without. `label`: what the values are. `gains`: a column
    right of them."""
    with canvas(width=2.4 + 0.62 * frame.shape[1], height=1.3 + 0.31 * len(frame)) as (chart, axis):
        texts = frame.map(lambda x: f"{x:{form}}")
        sns.heatmap(frame, annot=texts, fmt="", vmin=low, vmax=high, cmap=cmap, cbar=False, ax=axis,
                    linewidths=1, linecolor="none", annot_kws={"fontsize": 8})  # fmt: skip
        chart.draw_without_rendering()
        cells = axis.collections[0].get_facecolors()[frame.notna().to_numpy().ravel()]
        for text, cell in zip(axis.texts, cells, strict=True):  # alike on light and dark pages
            light = ((cell[:3] + 0.055) / 1.055) ** 2.4 @ (0.2126, 0.7152, 0.0722)
            text.set_color(_ON_DARK if light < 0.18 else _ON_LIGHT)
        for row, column in np.argwhere(frame.isna().to_numpy()):
            axis.text(column + 0.5, row + 0.5, NOT_TIMED.replace(" ", "\n"), ha="center",
                      va="center", fontsize=8)  # fmt: skip
        for row, gain in enumerate([] if gains is None else gains):
            note(axis, f"× {gain:.2f}", (1, row + 0.5), (8, 0), va="center", fontsize=8,
                 xycoords=("axes fraction", "data"))  # fmt: skip
        if gains is not None:
            note(axis, gains.name, (1, 1), (8, 4), fontsize=8, xycoords="axes fraction")
        axis.set_yticklabels([style.wrapped(str(x), 18) for x in frame.index], rotation=0)
        axis.set_xticklabels([style.wrapped(str(x), 9) for x in frame], rotation=0)
        axis.set(xlabel=label, ylabel="")
        axis.tick_params(length=0)
        axis.grid(visible=False)
        head(axis, finding, named=False)
        return chart


_ON_LIGHT, _ON_DARK = "#000000", "#fefefe"
VERDICTS = {
    "found": SERIES[2], "hangs": SERIES[0], "crashes": SERIES[0], "missed": SERIES[1],
    "cannot run": INK,
}  # fmt: skip
"""Colours of what a tool says of a mistake: named, noticed, missed, not asked."""


@style.drawn
def verdicts(frame: pd.DataFrame) -> Figure:
    """A cell in the colour of `VERDICTS`, with its word, for each mistake (row) and tool.
    ValueError for another word."""
    if unknown := set(frame.to_numpy().ravel()) - set(VERDICTS):
        raise ValueError(f"verdicts must be of {', '.join(VERDICTS)}, got {sorted(unknown)}")
    codes, words = frame.map(list(VERDICTS).index), frame.map(lambda x: style.wrapped(x, 7))
    look = {"color": PAGE} | ({"fontsize": 8} if style.is_narrow() else {})
    width = 2.9 + 0.92 * frame.shape[1]
    with canvas(width=width, height=0.9 + 0.33 * len(frame)) as (chart, axis):
        sns.heatmap(
            codes, annot=words, fmt="", cmap=list(VERDICTS.values()), vmin=0,
            vmax=len(VERDICTS) - 1, linewidths=1.5, linecolor="none", cbar=False, ax=axis,
            annot_kws=look,
        )  # fmt: skip
        axis.set(xlabel="", ylabel="")
        axis.set_yticklabels([style.wrapped(str(name), 16) for name in frame.index])
        axis.tick_params(length=0)
        axis.tick_params(axis="x", rotation=90 if style.is_narrow() else 0)
        axis.tick_params(axis="y", rotation=0)
        axis.xaxis.tick_top()
        axis.grid(visible=False)
        return chart


@style.drawn
def stacked(
    frame: pd.DataFrame,
    *,
    xlabel: str,
    looks: Mapping[str, str],
    hue: str = "",
    inside: bool = False,
    marks: pd.Series | None = None,
    levels: Mapping[str, float] | None = None,
) -> Figure:
    """A horizontal bar for each row of `frame`, its columns end to end.

    `looks`: "filled", "pale", "hollow" or "hatched" for each column; `inside`: names and values in
    the parts, instead of a legend; on a phone the names in the first bar alone. `marks`: a point
    for each row, named in the legend. `hue`: the implementation whose colour the marks have, or the
    bars if there are none.
    """
    if missing := [name for name in frame if looks.get(name) not in _LOOKS]:
        raise ValueError(f"looks must be {', '.join(_LOOKS)} for each column, not so {missing}")
    check_complete(frame)
    check_complete(pd.DataFrame() if marks is None else marks.to_frame())
    shown = role_colour(hue) if hue and marks is None else GREY if hue else SERIES[0]
    with canvas(width=7.8, height=1.1 + (0.6 if inside else 0.3) * len(frame)) as (chart, axis):
        left = pd.Series(0.0, index=frame.index)
        for name in frame:
            fill, options = _LOOKS[looks[name]]
            axis.barh(
                range(len(frame)), frame[name], 0.66, left=left, label=name,
                edgecolor=PAGE if looks[name] == "filled" else shown,
                color=shown if fill else "none", **options,
            )  # fmt: skip
            for row, (start, width) in enumerate(zip(left, frame[name], strict=True)):
                value, most = f"{width:.1f}", frame.sum(axis=1).max()
                if style.is_narrow():  # one row is enough to tell the names
                    text, needed = f"{name}\n{value}" if row == 0 else value, 2.2 * len(value)
                else:
                    text, needed = f"{name}\n{value}", len(name)
                if inside and 100 * width > needed * most:
                    axis.text(
                        start + width / 2, row, text, fontsize=8, ha="center",
                        va="center", color=_ON.get(looks[name], shown),
                    )  # fmt: skip
            left = left + frame[name]
        if marks is not None:
            axis.plot(marks, range(len(frame)), "o", markersize=7, color=role_colour(hue),
                      markeredgecolor=PAGE, label=marks.name)  # fmt: skip
        reference(axis, levels, upright=True)
        list_rows(axis, list(frame.index))
        axis.set_xlabel(xlabel)
        if not inside:
            head(axis)
        return chart
