"""Charts that chapters draw from their own tables.

At most three series stand out, in their colours; the others are grey. Names stand at the lines,
values at the marks, and lines of reference say what they are. A missing value is refused, or
"not timed" stands at its place.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import numpy as np
import pandas as pd
import seaborn as sns
from matplotlib.axes import Axes
from matplotlib.colors import to_rgb
from matplotlib.ticker import NullFormatter

from gdpa_lab.report import roles, style
from gdpa_lab.report.roles import MOST_COLOURED, palette, role_colour
from gdpa_lab.report.style import DASHED, GREY, SMALL, Figure, canvas, note

STEP = 0.01
"""Least share of a time that a step of a ladder saves, if it is not drawn pale."""
MOST_MARKED = 12
"""Maximum points of a line with a mark and a tick each; a longer line is smooth."""
NOT_TIMED = "not timed"
_PHONE_TICKS = 24
"""Maximum letters of an axis's ticks on a phone; beyond it every second tick has none."""


@style.drawn
def lines(
    frames: pd.DataFrame | Mapping[str, pd.DataFrame],
    *,
    xlabel: str,
    ylabel: str,
    highlight: Sequence[str],
    names: Mapping[str, str] | None = None,
    levels: Mapping[str, float] | None = None,
    points: Mapping[float, str] | None = None,
    log: str = "",
    ylim: tuple[float, float] | None = None,
) -> Figure:
    """Draw a line for each column of a frame over its index, named at its right end; several
    frames, by title, stand side by side on one scale.

    `highlight`: the columns in colour, at most three. `names`: what is written for columns.
    `levels`: dashed lines by name. `points`: texts by x, on the first highlighted line. `log`: the
    logarithmic axes, "", "x", "y" or "xy"; a linear y begins at zero. `ylim`: beyond it nothing is
    drawn. A short line has marks, and "not timed" stands where it has a gap; a smooth one may end
    before the others, but have no gap: ValueError.
    """
    panels = {"": frames} if isinstance(frames, pd.DataFrame) else dict(frames)
    columns = list(dict.fromkeys(name for frame in panels.values() for name in frame))
    shades = _behind(columns) | coloured(highlight, columns)
    top = max(frame.max().max() for frame in panels.values())
    low, high = ylim or (0, 1.08 * max(top, *(levels or {"": 0}).values()))
    with canvas(1, len(panels), width=2.5 + 4.3 * len(panels), height=3.9, sharey=True,
                squeeze=False) as (chart, axes):  # fmt: skip
        axes[0, 0].set(ylabel=ylabel, ylim=(low, high), yscale="log" if "y" in log else "linear")
        for axis, (title, frame) in zip(axes[0], panels.items(), strict=True):
            short = len(frame) <= MOST_MARKED
            if "x" in log:
                axis.set_xscale("log", base=2 if short else 10)
            if not short:
                for name in frame:
                    check_complete(frame.loc[: frame[name].last_valid_index(), [name]])
                axis.xaxis.set_major_formatter(lambda x, _: f"{x:g}")
                axis.xaxis.set_minor_formatter(NullFormatter())
            within = frame.where(frame.isna() | frame.ge(low) & frame.le(high))
            long = within.rename_axis(index="x").melt(
                var_name="line", value_name="y", ignore_index=False
            )
            long["run"] = long["y"].isna().cumsum()  # a gap is no bridge
            order = sorted(frame, key=lambda name: name in highlight)
            sns.lineplot(
                long.dropna().reset_index(), x="x", y="y", hue="line", hue_order=order, units="run",
                palette=shades, estimator=None, legend=False, ax=axis, size="line", sizes={
                    name: 1.8 if name in highlight else 1.1 for name in frame
                }, **({"marker": "o", "markeredgewidth": 0} if short else {}),
            )  # fmt: skip
            if short:
                ticks = [f"{x:,}" for x in frame.index]
                if style.is_narrow() and sum(map(len, ticks)) > _PHONE_TICKS:
                    ticks[-2::-2] = [""] * (len(ticks) // 2)
                axis.set_xticks(list(frame.index), ticks)
                axis.minorticks_off()
                _not_timed_below(axis, frame, names or {})
            ends = {name: within[name].dropna().iloc[-1] for name in frame}
            named = {(names or {}).get(n, n): (y, shades[n]) for n, y in ends.items()}
            style.label_ends(axis, named)
            reference(axis, levels)
            for x, text in (points or {}).items():
                nearest = within.index[abs(within.index - x).argmin()]
                point, shade = (nearest, within.loc[nearest, highlight[0]]), shades[highlight[0]]
                axis.plot(*point, "o", color=shade)
                note(axis, text, point, (-8, 2), ha="right", color=shade)
            axis.set(title=title, xlabel=xlabel)
            axis.label_outer(remove_inner_ticks=True)
            axis.set_xlabel(xlabel)
        return chart


@style.drawn
def bars(
    values: pd.Series,
    *,
    xlabel: str,
    highlight: Sequence[str],
    names: Mapping[str, str] | None = None,
    levels: Mapping[str, float] | None = None,
    form: str = "",
) -> Figure:
    """Draw a horizontal bar for each entry of `values`, from the top, with its number, or "not
    timed".

    `highlight`: the bars in colour, at most three; `names`: what is written for entries; `levels`:
    dashed lines by name.
    """
    shades = _behind(values.index) | coloured(highlight, values.index)
    form = form or roles.form_of(values)
    with canvas(width=7.0, height=0.9 + 0.34 * len(values)) as (chart, axis):
        reference(axis, levels, upright=True)
        sns.barplot(x=values.to_numpy(), y=list(values.index), hue=list(values.index), ax=axis,
                    palette=shades, width=0.66, saturation=1, legend=False)  # fmt: skip
        for row, (name, value) in enumerate(values.items()):
            ahead = any(value <= x < 1.12 * value for x in (levels or {}).values())
            strong = {"fontweight": "bold"} if name in highlight else {}
            if np.isnan(value):
                note(axis, NOT_TIMED, (0, row), (5, 0), va="center", fontsize=SMALL)
            elif ahead and value > 0.2 * values.max():  # clear of the line
                note(axis, f"{value:{form}}", (value, row), (-5, 0), va="center", ha="right",
                     color=style.PAGE, **strong)  # fmt: skip
            else:
                note(axis, f"{value:{form}}", (value, row), (5, 0), va="center",
                     color=shades[name], **strong)  # fmt: skip
        list_rows(axis, [(names or {}).get(name, name) for name in values.index])
        axis.set_xlim(0, 1.12 * max(values.max(), *(levels or {"": 0}).values()))
        axis.set_xlabel(xlabel)
        return chart


@style.drawn
def ladder(rungs: pd.Series, peers: pd.Series, *, xlabel: str, height: float = 3.3) -> Figure:
    """Draw `draw_ladder` of times as a figure of its own."""
    high = height if not style.is_narrow() else 1.4 + 0.36 * len(rungs)
    with canvas(width=7.4, height=high) as (chart, axis):
        draw_ladder(axis, rungs, peers)
        axis.set_xlabel(xlabel)
        return chart


def draw_ladder(axis: Axes, rungs: pd.Series, peers: pd.Series, *, size: float = SMALL) -> None:
    """Draw the times of `rungs` (ms) as bars from zero, each with its name and idea inside, and
    those of `peers` as lines across them; `size` of texts in points.

    The index names them: a rung, and after ": " its idea. A bar beyond the last peer is broken
    off, one that saves less than `STEP` of the best time before is pale. The first and the last
    bar say how they compare with the last and with the fastest peer.
    """
    last, most = rungs.iloc[-1], 1.07 * peers.max()
    count, box = len(rungs), {"edgecolor": "none", "pad": 1.0}
    axis.set(xlim=(0, most), ylim=(count - 0.45, -0.55))
    best = rungs.cummin().shift()
    for row, (name, time) in enumerate(rungs.items()):
        rung, _, idea = name.partition(": ")
        shade, pale = role_colour(rung), bool(time > (1 - STEP) * best.iloc[row])
        axis.barh(row, min(time, most), 0.8, color=(*to_rgb(shade), 0.3) if pale else shade,
                  linewidth=0)  # fmt: skip
        if time > most:
            x = np.array([0.955, 0.97, 0.965, 0.98, 0.965, 0.955, 0.965, 0.95]) * most
            y = row + np.array([-0.5, -0.5, 0, 0.5, 0.5, 0.5, 0, -0.5])
            axis.fill(x, y, color=style.PAGE, linewidth=0, zorder=2)
        axis.text(0.01 * most, row, style.wrapped(f"{rung}  {idea}", 24), va="center",
                  fontsize=size, color=style.INK if pale else style.PAGE, zorder=4)  # fmt: skip
        note(axis, f"{time:.2f}", (1, row), (5, 0), va="center", fontsize=size, color=shade,
             fontweight="bold", xycoords=("axes fraction", "data"))  # fmt: skip
    for name, time in peers.items():
        axis.axvline(time, color=role_colour(name), linestyle=roles.dash(name), linewidth=1.2,
                     zorder=3)  # fmt: skip
    _name_above(axis, peers, size)
    ahead = f"{peers.min() / last:.2f} times as fast as {peers.idxmin()}"
    axis.text(last + 0.012 * most, count - 1, style.wrapped(ahead, 26), va="center", fontsize=size,
              fontweight="bold", color=role_colour(rungs.index[-1]), zorder=4,
              bbox=box | {"facecolor": style.PAGE})  # fmt: skip
    if rungs.iloc[0] > most:
        axis.text(0.94 * most, 0, f"{rungs.iloc[0] / last:.1f} times as long", ha="right",
                  va="center", fontsize=size, color=style.PAGE, zorder=4,
                  bbox=box | {"facecolor": role_colour(rungs.index[0])})  # fmt: skip
    axis.set_yticks([])
    axis.grid(visible=False)
    axis.spines["left"].set_visible(False)
    axis.tick_params(axis="x", labelsize=size)


def _name_above(axis: Axes, values: pd.Series, size: float) -> None:
    """Name upright lines above `axis`, in as few rows as keep the names apart."""
    figure = axis.get_figure()
    ends: list[float] = []  # the right end of the last name of each row, pixels
    figure.draw_without_rendering()
    for name, value in values.sort_values(ascending=False).items():
        text = note(axis, name, (value, 1), (-2, 3), ha="right", fontsize=size,
                    color=role_colour(name), xycoords=("data", "axes fraction"))  # fmt: skip
        box = text.get_window_extent()
        row = next((n for n, left in enumerate(ends) if box.x1 + 4 < left), len(ends))
        ends[row : row + 1] = [box.x0]
        text.set_position((-2, 3 + 1.25 * size * row))


@style.drawn
def dots(
    frame: pd.DataFrame,
    *,
    xlabel: str,
    low: pd.DataFrame | None = None,
    high: pd.DataFrame | None = None,
    levels: Mapping[str, float] | None = None,
    hue: str = "",
    log: bool = False,
    form: str = "",
    missing: str = NOT_TIMED,
    finding: str = "",
) -> Figure:
    """Draw a row for each index entry of `frame`, with a mark and its value for each column.

    `low` and `high`: ends of error bars, shaped as `frame`. `levels`: dashed lines by name; None: 1
    without a name. `hue`: the implementation whose colour columns have that are no kernel. `log`:
    powers of two to the right. `form`: of the values. `missing` stands where a column has no value.
    """
    columns, pitch = list(frame), 0.17  # inches between the marks of a row
    room = pitch * len(columns) + 0.13
    shades, looks = palette(columns, hue), dict(zip(columns, roles.marks(columns), strict=True))
    form = form or roles.form_of(frame)
    with canvas(width=7.4, height=0.9 + room * len(frame)) as (chart, axis):
        if log:
            axis.set_xscale("log", base=2)
            axis.xaxis.set_major_formatter(lambda x, _: f"{x:g}")
        reference(axis, {"": 1.0} if levels is None else levels, upright=True)
        for number, name in enumerate(columns):
            places = np.arange(len(frame)) + (number - (len(columns) - 1) / 2) * pitch / room
            ends = frame[name] if high is None else high[name]
            if low is not None:
                axis.hlines(places, low[name], ends, color=shades[name], linewidth=1)
            axis.plot(frame[name], places, color=shades[name], label=name, markersize=5,
                      linestyle="none", **looks[name])  # fmt: skip
            for y, value, end in zip(places, frame[name], ends, strict=True):
                if np.isnan(value):
                    note(axis, missing, (0, y), (3, 0), va="center", fontsize=8,
                         xycoords=("axes fraction", "data"))  # fmt: skip
                else:
                    note(axis, f"{value:{form}}", (end, y), (6, 0), va="center", fontsize=8)
        list_rows(axis, list(frame.index))
        axis.margins(x=0.08)
        axis.set(xlabel=xlabel, ylabel="")
        head(axis, finding, named=len(columns) > 1)
        return chart


@style.drawn
def dumbbells(
    ways: Mapping[str, pd.DataFrame],
    *,
    xlabel: str,
    levels: Mapping[str, float] | None = None,
    change: bool = False,
    form: str = "",
    finding: str = "",
) -> Figure:
    """Draw a row for each index entry and a line in it for each of `ways`: from a small dot for the
    first column of its frame, past a tick for those between, to a large dot for the last.

    The line has the colour of its name, and each column its own. At the ends stand the two values,
    or with `change` how much the last is above the first.
    """
    (index, *_), pitch = [frame.index for frame in ways.values()], 0.2
    room = pitch * len(ways) + 0.12
    shades = palette(ways)
    form = form or roles.form_of(pd.concat(ways.values(), axis=1))
    with canvas(width=7.4, height=0.9 + room * len(index)) as (chart, axis):
        reference(axis, levels, upright=True)
        for number, (way, frame) in enumerate(ways.items()):
            places = np.arange(len(index)) + (number - (len(ways) - 1) / 2) * pitch / room
            first, *between, last = frame
            axis.hlines(places, frame[first], frame[last], color=shades[way], linewidth=1.6,
                        alpha=0.5)  # fmt: skip
            for name, marker, size in ((first, "o", 3.5), *((x, "|", 8) for x in between),
                                       (last, "o", 7)):  # fmt: skip
                shade = role_colour(name)
                axis.plot(frame[name], places, marker, color=shades[way] if shade == style.INK
                          else shade, markersize=size, label=name if len(ways) == 1 else
                          way if name == last else "")  # fmt: skip
            for y, start, end in zip(places, frame[first], frame[last], strict=True):
                side = {"va": "center", "fontsize": 8}
                right, left = ((8, 0), {"ha": "left"}), ((-8, 0), {"ha": "right"})
                if change:
                    text = f"{100 * (end / start - 1):+.0f} %".replace("-", "−")
                    shift, ha = right if end >= start else left
                    note(axis, text, (end, y), shift, **ha, **side)
                    continue
                for value, (shift, ha) in zip(sorted((start, end)), (left, right), strict=True):
                    note(axis, f"{value:{form}}", (value, y), shift, **ha, **side)
        list_rows(axis, list(index))
        axis.margins(x=0.2 if style.is_narrow() else 0.1)
        axis.set_xlabel(xlabel)
        head(axis, finding)
        return chart


def check_complete(frame: pd.DataFrame) -> None:
    missing = [f"{name} at {row}" for name in frame for row in frame.index[frame[name].isna()]]
    if missing:
        raise ValueError(f"every value must be there, got none for {', '.join(missing)}")


def _not_timed_below(axis: Axes, frame: pd.DataFrame, names: Mapping[str, str]) -> None:
    """Say above the x axis which columns have gaps, and where."""
    where: dict[str, list[str]] = {}
    for name in frame:
        if rows := ", ".join(f"{x:,}" for x in frame.index[frame[name].isna()]):
            where.setdefault(rows, []).append(names.get(name, name))
    lines = [f"{NOT_TIMED} at {rows}:\n   {', '.join(of)}" for rows, of in where.items()]
    note(axis, "\n".join(lines), (0, 0), (4, 4), fontsize=SMALL, xycoords="axes fraction")


def reference(axis: Axes, levels: Mapping[str, float] | None, *, upright: bool = False) -> None:
    """Draw a dashed line for each of `levels`, across or upright, with its name."""
    ordered = sorted((levels or {}).items(), key=lambda level: -level[1])
    for height, (name, value) in enumerate(ordered):
        if upright:
            axis.axvline(value, **DASHED)
            note(axis, name, (value, 1), (-3, 3 + 12 * height), fontsize=SMALL, ha="right",
                 xycoords=("data", "axes fraction"))  # fmt: skip
        else:
            axis.axhline(value, **DASHED)
            note(axis, name, (1, value), (-2, 3), fontsize=SMALL, ha="right",
                 xycoords=("axes fraction", "data"))  # fmt: skip


def head(axis: Axes, finding: str = "", *, named: bool = True, ncols: int = 4) -> None:
    """Write the finding above the figure, and below it the names of its marks, if `named`."""
    handles, labels = axis.get_legend_handles_labels() if named else ([], [])
    if axis.get_legend():
        axis.get_legend().remove()
    if handles or finding:
        axis.get_figure().legend(
            handles, labels, loc="outside upper left", ncols=style.columns(ncols, labels),
            columnspacing=1.2, alignment="left", title=style.wrapped(finding, 46),
            title_fontproperties={"weight": "bold", "size": SMALL + 0.5},
        )  # fmt: skip


def coloured(names: Sequence[str], among: Collection[str] | None = None) -> dict[str, str]:
    """Assign each name its `roles.palette`; ValueError unless they are one to three of `among`."""
    unknown = [name for name in names if among is not None and name not in among]
    if unknown or not 1 <= len(names) <= MOST_COLOURED:
        known = names if among is None else among
        raise ValueError(
            f"highlight must name one to {MOST_COLOURED} of {', '.join(map(str, known))}, "
            f"got {', '.join(names) or 'none'}"
        )
    return palette(names)


def _behind(names: Sequence[str]) -> dict[str, str]:
    """Colours of what does not stand out: of a kernel its own."""
    return {name: GREY if (x := role_colour(name)) == style.INK else x for name in names}


def list_rows(axis: Axes, names: Sequence[str]) -> None:
    """List names of rows, from the top, down the left of `axis`, with an upright grid. A figure
    that is too low for the names on a phone grows."""
    labels = [style.wrapped(str(name), 18) for name in names]
    lines, figure = max((label.count("\n") + 1 for label in labels), default=1), axis.get_figure()
    needed = 1.0 + 0.18 * lines * len(labels)  # inches
    if lines > 1:
        figure.set_figheight(max(figure.get_figheight(), needed))
    axis.set_yticks(range(len(names)), labels)
    axis.set_ylim(len(names) - 0.4, -0.6)
    axis.grid(visible=False, axis="y")
    axis.grid(visible=True, axis="x")
    axis.tick_params(axis="y", length=0)
