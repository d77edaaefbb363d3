"""Charts that chapters draw of their own tables, in the house style.

At most three series stand out, in their colours; the others are grey. Labels stand at the lines.
A missing value is refused, or "not timed" stands at its place.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.colors import to_rgb
from matplotlib.patches import Rectangle
from matplotlib.ticker import NullFormatter

from gdpa_lab.report import house
from gdpa_lab.report.house import DASHED, INK, SMALL, Figure, canvas, colour, is_rung, note

MOST_COLOURED = 3
GREY = "#a8a8a8"
NOT_TIMED = "not timed"
_MARKS = "os^Dv"
_LOOKS: dict[str, tuple[bool, dict[str, object]]] = {
    "filled": (True, {}),
    "pale": (True, {"alpha": 0.35}),
    "hollow": (False, {}),
    "hatched": (False, {"hatch": "////"}),
}


def lines(
    frame: pd.DataFrame,
    *,
    xlabel: str,
    ylabel: str,
    highlight: Sequence[str],
    names: Mapping[str, str] | None = None,
    ceiling: float | None = None,
    log: bool = True,
) -> Figure:
    """A line for each column of `frame` over its index, labels at the right ends.

    `highlight`: the columns in colour, at most three; `names`: what labels say; `ceiling`: a dashed
    line; `log`: powers of two to the right. Rates and times begin at zero. "not timed" stands where
    a column has no value, and its line has a gap there.
    """
    _check_highlight(highlight, frame.columns)
    with canvas(width=6.8, height=3.9) as (chart, axis):
        for column in sorted(frame, key=lambda name: name in highlight):
            strong = column in highlight
            axis.plot(frame.index, frame[column], "o-", color=_colour(column, strong),
                      linewidth=1.8 if strong else 1.0)  # fmt: skip
        if ceiling is not None:
            axis.axhline(ceiling, **DASHED)
        if log:
            axis.set_xscale("log", base=2)
        axis.set_xticks(list(frame.index), [f"{x:,}" for x in frame.index])
        axis.minorticks_off()
        axis.set_ylim(0, 1.08 * max(frame.max().max(), ceiling or 0))
        axis.set_xlabel(xlabel)
        axis.set_ylabel(ylabel)
        _label_ends(axis, frame, highlight, names or {})
        _not_timed_below(axis, frame)
        return chart


def bars(
    values: pd.Series,
    *,
    xlabel: str,
    highlight: Sequence[str],
    names: Mapping[str, str] | None = None,
    ceiling: float | None = None,
    marks: Mapping[str, float] | None = None,
    form: str = ".0f",
) -> Figure:
    """A horizontal bar for each entry of `values`, from the top, with its number, or "not timed".

    `ceiling`: a dashed line; `marks`: thin lines with a name and a number above the bars.
    """
    _check_highlight(highlight, values.index)
    with canvas(width=7.0, height=0.9 + 0.34 * len(values)) as (chart, axis):
        for place, (name, value) in enumerate(values.items()):
            strong = name in highlight
            if np.isnan(value):
                note(axis, NOT_TIMED, (0, place), (5, 0), va="center", fontsize=SMALL)
                continue
            axis.barh(place, value, 0.62, color=_colour(name, strong))
            inside = bool(marks) and value > 0.2 * values.max()  # clear of the lines
            shade = ("white" if strong else "black") if inside else INK
            note(axis, f"{value:{form}}", (0 if inside else value, place), (5, 0), va="center",
                 color=shade, fontweight="bold" if strong else "normal")  # fmt: skip
        if ceiling is not None:
            axis.axvline(ceiling, **DASHED)
        for height, (name, value) in enumerate(sorted((marks or {}).items(), key=lambda m: -m[1])):
            axis.axvline(value, color=INK, linewidth=1.0)
            note(axis, f"{name} {value:{form}}", (value, 1), (3, 3 + 12 * height), fontsize=SMALL,
                 xycoords=("data", "axes fraction"))  # fmt: skip
        _list(axis, [(names or {}).get(name, name) for name in values.index])
        axis.set_xlim(0, 1.12 * max(values.max(), ceiling or 0, *(marks or {"": 0}).values()))
        axis.set_xlabel(xlabel)
        return chart


def dots(
    frame: pd.DataFrame,
    *,
    xlabel: str,
    low: pd.DataFrame | None = None,
    high: pd.DataFrame | None = None,
    baseline: float = 1.0,
    colours: Sequence[str] = (INK,),
    log: bool = False,
) -> Figure:
    """A row for each index entry of `frame`, a mark for each column; a line at `baseline`.

    `low` and `high`: ends of error bars, shaped as `frame`. `colours`: one, or one for each column.
    `log`: powers of two to the right. "not timed" stands where a column has no value.
    """
    with canvas(width=7.4, height=1.3 + 0.42 * len(frame)) as (chart, axis):
        axis.axvline(baseline, **DASHED)
        for number, column in enumerate(frame):
            shift = (number - (frame.shape[1] - 1) / 2) * 0.22
            errors = None
            if low is not None and high is not None:
                errors = [frame[column] - low[column], high[column] - frame[column]]
            axis.errorbar(
                frame[column], [place + shift for place in range(len(frame))], xerr=errors,
                fmt=_MARKS[number % len(_MARKS)], linestyle="none", elinewidth=1, label=column,
                color=colours[number % len(colours)],
                markerfacecolor="none" if number % 2 else None,
            )  # fmt: skip
            for place in np.flatnonzero(frame[column].isna()):
                note(axis, NOT_TIMED, (0, place + shift), (3, 0), va="center", fontsize=SMALL,
                     color=colours[number % len(colours)],
                     xycoords=("axes fraction", "data"))  # fmt: skip
        _list(axis, list(frame.index))
        if log:
            axis.set_xscale("log", base=2)
            axis.xaxis.set_major_formatter(lambda x, _: f"{x:g}")
        axis.set_xlabel(xlabel)
        if frame.shape[1] > 1:
            axis.legend(
                loc="lower left",
                bbox_to_anchor=(0, 1),
                ncols=min(3, frame.shape[1]),
                fontsize=SMALL,
            )
        return chart


def loglog(
    frame: pd.DataFrame,
    *,
    xlabel: str,
    ylabel: str,
    highlight: Sequence[str],
    ylim: tuple[float, float],
    marks: Mapping[float, str] | None = None,
) -> Figure:
    """A smooth line for each column of `frame` over its index, both axes logarithmic, labels at the
    right ends.

    `highlight`: the columns in colour, at most three; what is grey is dashed. `marks`: points on
    the first highlighted line, a text by x. Nothing is drawn beyond `ylim`.
    """
    _check_highlight(highlight, frame.columns)
    _check_complete(frame)
    colours = dict(zip(highlight, (house.RUNG_COLOURS[i] for i in (3, 1, 2)), strict=False))
    with canvas(width=6.6, height=3.8) as (chart, axis):
        axis.set_xscale("log")
        axis.set_yscale("log")
        axis.set_ylim(*ylim)
        ends = []
        for column in frame:
            series = frame[column][frame[column].between(*ylim)]
            strong = column in highlight
            axis.plot(
                series.index, series, color=colours.get(column, INK),
                linestyle="-" if strong else (0, (4, 2)), linewidth=1.8 if strong else 1.2,
            )  # fmt: skip
            ends.append((math.log(series.iloc[-1] / ylim[0]) / math.log(ylim[1] / ylim[0]), column))
        level = -1.0
        for end, column in sorted(ends):
            level = max(end, level + 0.065)
            axis.annotate(column, (1.02, level), xycoords="axes fraction", va="center",
                          fontsize=SMALL, color=colours.get(column, INK))  # fmt: skip
        first = frame[highlight[0]]
        for x, text in (marks or {}).items():
            y = first.iloc[(abs(first.index - x)).argmin()]
            axis.plot(x, y, "o", color=colours[highlight[0]])
            note(axis, text, (x, y), (-8, 2), ha="right")
        for side in (axis.xaxis, axis.yaxis):
            side.set_minor_formatter(NullFormatter())
        axis.xaxis.set_major_formatter(lambda x, _: f"{x:g}")
        axis.set_xlabel(xlabel)
        axis.set_ylabel(ylabel)
        return chart


def stacked(
    frame: pd.DataFrame,
    *,
    xlabel: str,
    looks: Mapping[str, str],
    hue: str = "",
    inside: bool = False,
    marks: pd.Series | None = None,
    ceiling: float | None = None,
) -> Figure:
    """A horizontal bar for each row of `frame`, its columns end to end.

    `looks`: "filled", "pale", "hollow" or "hatched" for each column; `inside`: names and values in
    the parts, instead of a legend. `marks`: a point for each row, named in the legend. `hue`: the
    implementation whose colour the marks have, or the bars if there are none.
    """
    if missing := [name for name in frame if looks.get(name) not in _LOOKS]:
        raise ValueError(f"looks must be {', '.join(_LOOKS)} for each column, not so {missing}")
    _check_complete(frame)
    _check_complete(pd.DataFrame() if marks is None else marks.to_frame())
    shown = colour(hue) if hue and marks is None else INK
    with canvas(width=7.8, height=1.1 + (0.6 if inside else 0.3) * len(frame)) as (chart, axis):
        left = pd.Series(0.0, index=frame.index)
        for name in frame:
            fill, options = _LOOKS[looks[name]]
            axis.barh(
                range(len(frame)), frame[name], 0.66, left=left, label=name,
                edgecolor="white" if looks[name] == "filled" else shown,
                color=shown if fill else "none", **options,
            )  # fmt: skip
            for place, (start, width) in enumerate(zip(left, frame[name], strict=True)):
                if inside and 100 * width > len(name) * frame.sum(axis=1).max():
                    axis.text(
                        start + width / 2, place, f"{name}\n{width:.1f}", fontsize=8, ha="center",
                        va="center", color="white" if looks[name] == "filled" else INK,
                    )  # fmt: skip
            left = left + frame[name]
        if marks is not None:
            axis.plot(marks, range(len(frame)), "o", markersize=7, color=colour(hue),
                      markeredgecolor="white", label=marks.name)  # fmt: skip
        if ceiling is not None:
            axis.axvline(ceiling, **DASHED)
        _list(axis, list(frame.index))
        axis.set_xlabel(xlabel)
        if not inside:
            axis.legend(loc="lower left", bbox_to_anchor=(0, 1), ncols=4, fontsize=SMALL)
        return chart


def panels(
    frames: Mapping[str, pd.DataFrame], *, xlabel: str, ylabel: str, highlight: Sequence[str]
) -> Figure:
    """Line charts side by side on one scale from zero, by title; a line for each column of a frame
    over its index, named at its right end. Other columns than those of `highlight` are grey.
    "not timed" stands where a column has no value, and its line has a gap there."""
    shades = _shades(highlight)
    with canvas(1, len(frames), width=4.3 * len(frames), height=3.6, sharey=True,
                squeeze=False) as (chart, axes):  # fmt: skip
        axes[0, 0].set_ylim(0, 1.1 * max(frame.max().max() for frame in frames.values()))
        axes[0, 0].set_ylabel(ylabel)
        for axis, (title, frame) in zip(axes[0], frames.items(), strict=True):
            for column in frame:
                axis.plot(frame.index, frame[column], "o-", color=shades.get(column, GREY))
            _label_ends(axis, frame, highlight, {}, shades)
            _not_timed_below(axis, frame)
            axis.set_title(title)
            axis.set_xlabel(xlabel)
        return chart


class Tiles(NamedTuple):
    """A panel of `tiles`: the tile at hand, as (row, column); shaded ones; strips around the grid,
    from the inside out, as (name, "left", "right", "above" or "below", summed)."""

    tile: tuple[int, int]
    shaded: Collection[tuple[int, int]]
    strips: Sequence[tuple[str, str, bool]]


def tiles(panels: Mapping[str, Tiles], count: int = 5) -> Figure:
    """Grids of `count` x `count` tiles of scores, queries down and keys to the right, by title.

    The tile at hand is filled. In each strip, of a tensor with the rows of queries or of keys, its
    part is framed, or filled if it is a sum.
    """
    sides = ("left", "right", "above", "below")
    placed = [[side for _, side, _ in panel.strips] for panel in panels.values()]
    most = {side: 0.75 * max(found.count(side) for found in placed) for side in sides}
    with canvas(1, len(panels), width=4.1 * len(panels), height=4.1, squeeze=False) as (
        chart,
        axes,
    ):
        for axis, (title, panel) in zip(axes[0], panels.items(), strict=True):
            for row in range(count):
                for column in range(count):
                    pale = 0.3 if (row, column) in panel.shaded else 0
                    _cell(axis, column, row, 1 if (row, column) == panel.tile else pale)
            used = dict.fromkeys(sides, 0.0)
            for name, side, summed in panel.strips:
                used[side] += 0.75
                out = -used[side] if side in ("left", "above") else count + used[side] - 0.55
                down = side in ("left", "right")
                for place in range(count):
                    mine = place == panel.tile[0 if down else 1]
                    at, size = ((out, place), (0.55, 1)) if down else ((place, out), (1, 0.55))
                    _cell(axis, *at, summed * mine, size, framed=mine)
                at = (out + 0.27, -0.2) if down else (-0.2, out + 0.27)
                axis.text(*at, name, ha="center" if down else "right", va="bottom" if down
                          else "center")  # fmt: skip
            axis.set_xlim(-most["left"] - 0.7, count + most["right"] + 0.2)
            axis.set_ylim(count + most["below"] + 0.2, -most["above"] - 0.7)
            axis.set_title(title)
            axis.set_aspect("equal")
            axis.set_axis_off()
        return chart


def _cell(
    axis: Axes, x: float, y: float, filled: float, size: tuple[float, float] = (1, 1), *,
    framed: bool = False,
) -> None:  # fmt: skip
    shown = colour("v1_tiled")
    face = (*to_rgb(shown), filled)
    edge = {"edgecolor": shown if framed else INK, "linewidth": 1.8 if framed else 0.6}
    axis.add_patch(Rectangle((x, y), *size, facecolor=face, zorder=2 if framed else 1, **edge))


def curves(
    frame: pd.DataFrame,
    *,
    xlabel: str,
    ylabel: str,
    highlight: Sequence[str],
    levels: Mapping[str, float] | None = None,
    lowest: float | None = None,
) -> Figure:
    """A curve without marks for each column of `frame` over its index, and a legend above.

    `levels`: dashed horizontal lines by label. `lowest`: where a logarithmic axis begins; None: the
    axis is linear, from zero. Colours are those of rungs, or the first free ones. A curve may end
    before the others.
    """
    _check_highlight(highlight, frame.columns)
    for column in frame:
        _check_complete(frame.loc[: frame[column].last_valid_index(), [column]])
    shades = _shades(highlight)
    with canvas(width=7.2, height=3.6) as (chart, axis):
        for column in sorted(frame, key=lambda name: name in highlight):
            axis.plot(frame.index, frame[column], color=shades.get(column, GREY), label=column)
        for label, level in (levels or {}).items():
            axis.axhline(level, color=INK, linewidth=1, linestyle=(0, (4, 2)))
            note(axis, label, (frame.index[-1], level), (0, 2), ha="right", va="bottom",
                 fontsize=SMALL)  # fmt: skip
        if lowest is None:
            axis.set_ylim(bottom=0)
        else:
            axis.set_yscale("log")
            axis.set_ylim(bottom=lowest)
        axis.set_xlabel(xlabel)
        axis.set_ylabel(ylabel)
        axis.legend(loc="lower center", bbox_to_anchor=(0.5, 1), ncols=4, fontsize=SMALL)
        return chart


def scatter(
    groups: Mapping[str, pd.DataFrame],
    *,
    xlabel: str,
    ylabel: str,
    shifts: Mapping[str, tuple[float, float]] | None = None,
    levels: Mapping[str, float] | None = None,
    limits: Mapping[str, float] | None = None,
) -> Figure:
    """At most three groups of points, a mark and a colour each; x is logarithmic, y from zero.

    A frame has a row for each point, its name as the index, x in the first column and y in the
    second. Names stand at the points; `shifts` moves some by points. `levels`: dashed horizontal
    lines by label, `limits`: dotted vertical ones.
    """
    shades = _shades(list(groups))
    with canvas(width=7.6, height=4.4) as (chart, axis):
        for number, (group, points) in enumerate(groups.items()):
            _check_complete(points)
            x, y = points.iloc[:, 0], points.iloc[:, 1]
            axis.plot(x, y, _MARKS[number], markersize=7, color=shades[group], label=group)
            for name, *at in zip(points.index, x, y, strict=True):
                right, up = (shifts or {}).get(name, (7, -3))
                note(axis, name, at, (right, up), fontsize=8, ha="left" if right > 0 else "right")
        axis.set_xscale("log")
        axis.set_ylim(0, 1.15 * max(points.iloc[:, 1].max() for points in groups.values()))
        axis.margins(x=0.14)
        for label, level in (levels or {}).items():
            axis.axhline(level, color=INK, linewidth=1, linestyle=(0, (4, 2)))
            note(axis, label, (1, level), (0, 2), xycoords=("axes fraction", "data"), ha="right",
                 fontsize=SMALL)  # fmt: skip
        for label, limit in (limits or {}).items():
            axis.axvline(limit, color=INK, linewidth=1, linestyle=":")
            note(axis, label, (limit, 0), (2, 3), fontsize=SMALL)
        axis.minorticks_off()
        axis.set_xlabel(xlabel)
        axis.set_ylabel(ylabel)
        axis.legend(loc="lower center", bbox_to_anchor=(0.5, 1), ncols=3, fontsize=SMALL)
        return chart


def swarm(groups: Mapping[str, pd.Series], *, xlabel: str, grey: Collection[str] = ()) -> Figure:
    """A row of points for each group, from the top, a colour each; `grey`: groups without one. x is
    logarithmic; points of a row are set apart vertically."""
    colours = [*house.RUNG_COLOURS[1:], *house.RUNG_COLOURS[1:]]
    with canvas(width=7.4, height=1.0 + 0.36 * len(groups)) as (chart, axis):
        for place, (name, values) in enumerate(groups.items()):
            _check_complete(values.to_frame(name))
            heights = [place + 0.11 * (number % 5 - 2) for number in range(len(values))]
            shown = GREY if name in grey else colours[place % len(colours)]
            axis.plot(values.sort_values(), heights, "o", markersize=5, alpha=0.8, color=shown)
        _list(axis, [f"{name} ({len(values)})" for name, values in groups.items()])
        axis.set_xscale("log")
        axis.xaxis.set_major_formatter(lambda x, _: f"{x:g}")
        axis.set_xlabel(xlabel)
        return chart


def strips(rows: Mapping[str, Sequence[str]], *, xlabel: str, highlight: Sequence[str]) -> Figure:
    """A strip for each row, a cell for each of its steps in order, such as `loops.in_sass` lists.

    `highlight`: kinds of steps in colour. Other steps are taller, and what follows the first word
    of such a step stands above it: "wait 1" as 1.
    """
    shades = _shades(highlight)
    with canvas(width=8.2, height=0.9 + 0.55 * len(rows)) as (chart, axis):
        for place, steps in enumerate(rows.values()):
            for number, step in enumerate(steps):
                kind, _, label = step.partition(" ")
                strong = kind in shades
                axis.barh(place, 0.86, 0.44 if strong else 0.66, left=number, linewidth=0,
                          color=shades.get(kind, INK))  # fmt: skip
                axis.annotate(label, (number + 0.43, place - 0.34), ha="center", va="bottom",
                              fontsize=7)  # fmt: skip
        others = {step.split()[0] for steps in rows.values() for step in steps} - set(shades)
        for kind in (*shades, *sorted(others)):
            axis.barh(0, 0, color=shades.get(kind, INK), label=kind)
        _list(axis, list(rows))
        axis.set_ylim(len(rows) - 0.5, -0.75)
        axis.grid(visible=False)
        axis.set_xlabel(xlabel)
        axis.legend(loc="lower left", bbox_to_anchor=(0, 1), ncols=4, fontsize=SMALL)
        return chart


def gantt(panels: Mapping[str, pd.DataFrame], *, xlabel: str, hue: str) -> Figure:
    """Bars on lanes over time, a panel for each title, two in a row: frames with the columns lane,
    start, time and label; a bar without a label is thin and grey."""
    rows = -(-len(panels) // 2)
    lanes = 1 + max(frame["lane"].max() for frame in panels.values())
    with canvas(rows, 2, width=7.6, height=0.4 + rows * (0.6 + 0.24 * lanes),
                sharex=True, sharey=True, squeeze=False) as (chart, axes):  # fmt: skip
        for axis in axes.flat[len(panels) :]:
            axis.set_axis_off()
        for axis, (title, frame) in zip(axes.flat, panels.items(), strict=False):
            for bar in frame.itertuples():
                axis.barh(
                    bar.lane, bar.time, 0.74 if bar.label else 0.24, left=bar.start, linewidth=0.6,
                    color=colour(hue) if bar.label else GREY, edgecolor="white",
                )  # fmt: skip
                axis.text(bar.start + bar.time / 2, bar.lane, bar.label, color="white", ha="center",
                          va="center", fontsize=8)  # fmt: skip
            axis.set_title(title)
            _list(axis, list(range(lanes)))
        for axis in axes[-1]:
            axis.set_xlabel(xlabel)
        return chart


def _check_highlight(highlight: Sequence[str], names: Sequence[str]) -> None:
    missing = [name for name in highlight if name not in names]
    if missing or not 1 <= len(highlight) <= MOST_COLOURED:
        raise ValueError(
            f"highlight must name one to {MOST_COLOURED} of {', '.join(map(str, names))}, "
            f"got {', '.join(highlight) or 'none'}"
        )


def _check_complete(frame: pd.DataFrame) -> None:
    missing = [f"{name} at {row}" for name in frame for row in frame.index[frame[name].isna()]]
    if missing:
        raise ValueError(f"every value must be there, got none for {', '.join(missing)}")


def _not_timed_below(axis: Axes, frame: pd.DataFrame) -> None:
    """Name at the bottom of each place the columns that have no value there."""
    for row, values in frame.iterrows():
        if missing := list(values.index[values.isna()]):
            text = f"{NOT_TIMED}: {', '.join(map(str, missing))}"
            note(axis, text, (row, 0), (0, 4), rotation=90, ha="center", va="bottom",
                 fontsize=SMALL)  # fmt: skip


def _colour(name: str, strong: bool) -> str:
    return colour(name) if strong else GREY


def _shades(names: Sequence[str]) -> dict[str, str]:
    """A colour for each name: a rung's own, or the next of the rungs' colours."""
    if len(names) > MOST_COLOURED:
        raise ValueError(f"names must be at most {MOST_COLOURED}, got {', '.join(names)}")
    free = iter(house.RUNG_COLOURS[1:])
    return {name: colour(name) if is_rung(name) else next(free) for name in names}


def _list(axis: Axes, names: Sequence[str]) -> None:
    axis.set_yticks(range(len(names)), names)
    axis.set_ylim(len(names) - 0.4, -0.6)
    axis.grid(visible=False, axis="y")
    axis.grid(visible=True, axis="x")
    axis.tick_params(axis="y", length=0)


def _label_ends(
    axis: Axes,
    frame: pd.DataFrame,
    highlight: Sequence[str],
    names: Mapping[str, str],
    shades: Mapping[str, str] | None = None,
) -> None:
    """Each column's name right of its last value, moved apart where two would meet."""
    ends = sorted((frame[column].dropna().iloc[-1], column) for column in frame)
    step, level = 0.062 * axis.get_ylim()[1], float("-inf")
    for value, column in ends:
        level = max(value, level + step)
        axis.annotate(
            names.get(column, column), (frame[column].dropna().index[-1], value),
            xytext=(1.02, level), textcoords=("axes fraction", "data"), va="center", fontsize=SMALL,
            color=(shades or {}).get(column, _colour(column, column in highlight))
            if column in highlight else INK, annotation_clip=False,
        )  # fmt: skip
