"""Pictures, not plots of a table: the jagged layout, scores and tiles, activations, laws of length,
a roof, and what a kernel does in order, as lanes or strips.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import accumulate, groupby, pairwise
from typing import NamedTuple

import numpy as np
import pandas as pd
import torch
from matplotlib.axes import Axes
from matplotlib.colors import to_rgb
from matplotlib.patches import Rectangle

from gdpa_kernels.gdpa.reference import ACTIVATIONS
from gdpa_lab.measuring.roofline import Ceilings
from gdpa_lab.measuring.workload import Workload
from gdpa_lab.report import style
from gdpa_lab.report.charts import coloured, head, list_rows
from gdpa_lab.report.roles import role_colour
from gdpa_lab.report.style import GREY, INK, PAGE, SERIES, Figure, canvas, note
from tritonemu import Timeline
from tritonemu.timeline import KINDS

COLOURS = SERIES
FAMILIES = {
    "gdpa-self-full": "self, full",
    "gdpa-self-half-dense": "self, half, dense keys",
    "gdpa-self-half-jagged": "self, half, jagged",
    "gdpa-cross-full": "cross, 256 keys",
    "": "real histories",
}
"""The workloads of `gdpa`, by the beginning of their names."""


@style.drawn
def jagged(lengths: Sequence[int]) -> Figure:
    """Sequences of these lengths as they lie in memory, cu_seqlens below; then the padded batch."""
    starts = [0, *accumulate(lengths)]
    high = float(len(lengths))
    with canvas(width=7.2, height=1.7 + 0.55 * high) as (chart, axis):
        for i, length in enumerate(lengths):
            row = high - 1 - i
            for t in range(max(lengths)):
                _cell(axis, t, row, COLOURS[i] if t < length else "none", t if t < length else "")
                if t < length:
                    _cell(axis, starts[i] + t, high + 2.2, COLOURS[i], t)
            axis.text(max(lengths) + 0.3, row + 0.5, f"sequence {i}, {length} tokens", va="center")
        for start in sorted(set(starts)):
            entries = ", ".join(f"[{i}]" for i, value in enumerate(starts) if value == start)
            axis.text(start, high + 2.0, f"{start}", ha="center", va="top")
            axis.text(start, high + 1.4, entries, ha="center", va="top", fontsize=8)
        axis.text(starts[-1] + 0.5, high + 1.95, "cu_seqlens", va="top")
        axis.text(starts[-1] + 0.5, high + 2.7, "rows in memory", va="center")
        axis.set_xlim(-0.4, starts[-1] + 3.2)
        axis.set_ylim(-0.2, high + 3.4)
        axis.set_axis_off()
        return chart


@style.drawn
def scores(uses: Mapping[str, Sequence[tuple[int, int]]]) -> Figure:
    """A panel for each use: the score matrix of each sequence, (queries, keys), to scale."""
    wide = max(sum(keys + 2.0 for _, keys in shapes) for shapes in uses.values())
    deep = max(queries for shapes in uses.values() for queries, _ in shapes)
    with canvas(1, len(uses), width=8.4, height=3.3, squeeze=False) as (chart, axes):
        for axis, (title, shapes) in zip(axes[0], uses.items(), strict=True):
            x = 0.0
            for i, (queries, keys) in enumerate(shapes):
                axis.add_patch(
                    Rectangle((x, -queries), keys, queries, facecolor=COLOURS[i], edgecolor=INK)
                )
                axis.text(x + keys / 2, 0.35, f"{keys}", ha="center", va="bottom", fontsize=8.5)
                axis.text(x - 0.25, -queries / 2, f"{queries}", ha="right", va="center", fontsize=8)
                x += keys + 2.0
            axis.set_title(title)
            axis.set_xlim(-1.2, wide - 1.5)
            axis.set_ylim(-deep - 0.5, 1.8)
            axis.set_aspect("equal")
            axis.set_axis_off()
        return chart


@style.drawn
def laws(workloads: Mapping[str, Workload]) -> Figure:
    """A panel for each workload, by title: its query lengths over max_seqlen_q, longest first, and
    in grey the padding, which the second panel names."""
    rows = -(-len(workloads) // 3)
    with canvas(rows, 3, width=8.4, height=2.2 * rows, sharex=True, sharey=True) as (chart, axes):
        for axis, (text, work) in zip(axes.flat, workloads.items(), strict=True):
            height = np.sort(work.seqlens_q)[::-1] / work.max_seqlen_q
            axis.axhspan(0, 1, color=GREY, alpha=0.35, linewidth=0)
            axis.fill_between(np.linspace(0, 1, work.batch), height, color=COLOURS[0], linewidth=0)
            axis.set(xlim=(0, 1), ylim=(0, 1))
            axis.set_title(f"{text}:\nN = {work.max_seqlen_q:,}, fill {work.fill:.2f}")
            axis.grid(visible=False)
            axis.set_xticks([0, 0.5, 1], ["0", "50 %", "100 %"])
            axis.set_yticks([0, 1], ["0", "N"])
            axis.set_xlabel("sequences")
            axis.label_outer()
        axes.flat[1].text(0.73, 0.73, "padding", ha="center", va="center", color=INK)
        return chart


@style.drawn
def activations(names: Sequence[str]) -> Figure:
    """A panel for each activation from -4 to 4, four in a row: solid, its derivative dashed."""
    x = torch.linspace(-4, 4, 401, dtype=torch.float64)
    rows = -(-len(names) // 4)
    with canvas(rows, 4, width=8.4, height=2.1 * rows, sharex=True, sharey=True) as (chart, axes):
        for axis, name in zip(axes.flat, names, strict=True):
            axis.plot(x, ACTIVATIONS[name].function(x), color=COLOURS[0])
            axis.plot(x, ACTIVATIONS[name].derivative(x), color=COLOURS[2], linestyle=(0, (4, 2)))
            axis.set(title=name, ylim=(-1.2, 4), xticks=[-4, -2, 0, 2, 4])
        return chart


class Tiles(NamedTuple):
    """A panel of `tiles`: the tile at hand, as (row, column); shaded ones; strips around the grid,
    from the inside out, as (name, "left", "right", "above" or "below", summed)."""

    tile: tuple[int, int]
    shaded: Collection[tuple[int, int]]
    strips: Sequence[tuple[str, str, bool]]


@style.drawn
def tiles(panels: Mapping[str, Tiles], count: int = 5) -> Figure:
    """Grids of `count` x `count` tiles of scores, queries down and keys to the right, by title.

    The tile at hand is filled. In each strip, of a tensor with the rows of queries or of keys, its
    part is framed, or filled if it is a sum.
    """
    sides = ("left", "right", "above", "below")
    placed = [[side for _, side, _ in panel.strips] for panel in panels.values()]
    most = {side: 0.75 * max(used_sides.count(side) for used_sides in placed) for side in sides}
    with canvas(1, len(panels), width=4.1 * len(panels), height=4.1, squeeze=False) as (
        chart,
        axes,
    ):
        for axis, (title, panel) in zip(axes[0], panels.items(), strict=True):
            for row in range(count):
                for column in range(count):
                    pale = 0.3 if (row, column) in panel.shaded else 0
                    _square(axis, column, row, 1 if (row, column) == panel.tile else pale)
            used = dict.fromkeys(sides, 0.0)
            for name, side, summed in panel.strips:
                used[side] += 0.75
                out = -used[side] if side in ("left", "above") else count + used[side] - 0.55
                down = side in ("left", "right")
                for index in range(count):
                    in_hand = index == panel.tile[0 if down else 1]
                    corner, size = ((out, index), (0.55, 1)) if down else ((index, out), (1, 0.55))
                    _square(axis, *corner, summed * in_hand, size, framed=in_hand)
                corner = (out + 0.27, -0.2) if down else (-0.2, out + 0.27)
                axis.text(*corner, name, ha="center" if down else "right", va="bottom" if down
                          else "center")  # fmt: skip
            axis.set_xlim(-most["left"] - 0.7, count + most["right"] + 0.2)
            axis.set_ylim(count + most["below"] + 0.2, -most["above"] - 0.7)
            axis.set_title(title)
            axis.set_aspect("equal")
            axis.set_axis_off()
        return chart


def _square(
    axis: Axes, x: float, y: float, filled: float, size: tuple[float, float] = (1, 1), *,
    framed: bool = False,
) -> None:  # fmt: skip
    shown = SERIES[0]
    face = (*to_rgb(shown), filled)
    edge = {"edgecolor": shown if framed else INK, "linewidth": 1.8 if framed else 0.6}
    axis.add_patch(Rectangle((x, y), *size, facecolor=face, zorder=2 if framed else 1, **edge))


@style.drawn
def ring(blocks: int, slots: int = 2) -> Figure:
    """A ring of buffers over time, a copy and a read of a block taking one step each: what a slot
    holds, and the phases of its two barriers in the colour of their parity; a dot stands where a
    wait for a phase passes. The phase before the first is dashed."""
    shades = dict(enumerate(SERIES[:2]))
    rows = [f"{name}[{slot}]" for slot in range(slots) for name in ("slot", "full", "empty")]
    with canvas(width=7.4, height=0.7 + 0.3 * len(rows)) as (chart, axis):
        for slot in range(slots):
            held, full, empty = range(3 * slot, 3 * slot + 3)
            ends = {full: [], empty: [slot]}  # of phase 0 and on, of phase -1 and on
            for block in range(slot, blocks, slots):
                for start, what, pale in ((block, "copy", 0.1), (block + 1, "read", 0.35)):
                    axis.barh(held, 1, 0.72, left=start, color=(*to_rgb(INK), pale), edgecolor=PAGE)
                    axis.text(start + 0.5, held, f"{what} {block}", ha="center", va="center",
                              fontsize=8)  # fmt: skip
                ends[full].append(block + 1)
                ends[empty].append(block + 2)
            for row, first in ((full, 0), (empty, -1)):
                for phase, (start, end) in enumerate(pairwise([-1, *ends[row]]), first):
                    shade = shades[phase % 2]
                    axis.barh(row, end - start, 0.5, left=start, color=(*to_rgb(shade), 0.3),
                              edgecolor=shade, linestyle="-" if phase >= 0 else "--")  # fmt: skip
                    if row == full or end != ends[empty][-1]:  # nobody fills the slot again
                        axis.plot([end], [row], "o", color=shade, markersize=5)
                    axis.text((start + end) / 2, row, f"{phase}".replace("-", "−"), ha="center",
                              va="center", fontsize=8)  # fmt: skip
        list_rows(axis, rows)
        axis.grid(visible=False)
        axis.set_xlim(-1.1, blocks + 1.2)
        axis.set_xticks(range(blocks + 2))
        axis.set_xlabel("time, in blocks; in a bar the phase")
        looks = {f"parity {parity}": Rectangle((0, 0), 1, 1, color=(*to_rgb(shade), 0.3))
                 for parity, shade in shades.items()}  # fmt: skip
        chart.legend(looks.values(), looks, loc="outside lower left", ncols=2)
        return chart


@style.drawn
def strips(rows: Mapping[str, Sequence[str]], *, xlabel: str, highlight: Sequence[str]) -> Figure:
    """A strip for each row, a cell for each of its steps in order, such as `loops.in_sass` lists.

    `highlight`: kinds of steps in colour. Other steps are taller, and what follows the first word
    of such a step stands above it: "wait 1" as 1.
    """
    shades = coloured(highlight)
    with canvas(width=8.2, height=0.9 + 0.55 * len(rows)) as (chart, axis):
        for row, steps in enumerate(rows.values()):
            labels = [""] * len(steps)
            for number, step in enumerate(steps):
                kind, _, label = step.partition(" ")
                strong = kind in shades
                axis.barh(row, 0.86, 0.44 if strong else 0.66, left=number, linewidth=0,
                          color=shades.get(kind, INK))  # fmt: skip
                labels[number] = label
            for first, last, text in _runs(labels):
                axis.annotate(text, ((first + last) / 2 + 0.43, row - 0.34), ha="center",
                              va="bottom", fontsize=8)  # fmt: skip
        others = {step.split()[0] for steps in rows.values() for step in steps} - set(shades)
        for kind in (*shades, *sorted(others)):
            axis.barh(0, 0, color=shades.get(kind, INK), label=kind)
        list_rows(axis, list(rows))
        axis.set_ylim(len(rows) - 0.5, -0.75)
        axis.grid(visible=False)
        axis.set_xlabel(xlabel)
        head(axis)
        return chart


def _runs(labels: Sequence[str]) -> Iterator[tuple[int, int, str]]:
    """Group labels beside one another: where they begin and end, and all of them as one text."""
    for has, run in groupby(enumerate(labels), key=lambda numbered: bool(numbered[1])):
        places, texts = zip(*run, strict=True)
        if has:
            yield places[0], places[-1], " ".join(texts)


@style.drawn
def gantt(panels: Mapping[str, pd.DataFrame], *, xlabel: str, hue: str = "") -> Figure:
    """Bars on lanes over time, a panel for each title, two in a row: frames with the columns lane,
    start, time and label; a bar without a label is thin and grey."""
    rows = -(-len(panels) // 2)
    shade = role_colour(hue) if hue else SERIES[0]
    lanes = 1 + max(frame["lane"].max() for frame in panels.values())
    with canvas(rows, 2, width=7.6, height=0.4 + rows * (0.6 + 0.24 * lanes),
                sharex=True, sharey=True, squeeze=False) as (chart, axes):  # fmt: skip
        for axis in axes.flat[len(panels) :]:
            axis.set_axis_off()
        for axis, (title, frame) in zip(axes.flat, panels.items(), strict=False):
            for bar in frame.itertuples():
                axis.barh(
                    bar.lane, bar.time, 0.74 if bar.label else 0.24, left=bar.start, linewidth=0.6,
                    color=shade if bar.label else GREY, edgecolor=PAGE,
                )  # fmt: skip
                axis.text(bar.start + bar.time / 2, bar.lane, bar.label, color=PAGE, ha="center",
                          va="center", fontsize=8)  # fmt: skip
            axis.set(title=title, xlabel=xlabel)
            list_rows(axis, list(range(lanes)))
            axis.label_outer()
        return chart


@style.drawn
def segments(
    rows: Mapping[str, Sequence[tuple[float, float, str, str]]],
    kinds: Sequence[str],
    *,
    ticks: Mapping[float, str],
    xlabel: str = "",
) -> Figure:
    """A row by its name of what lies in it: (first, last excluded, text, kind) for each part.

    `kinds`: the legend; the first is grey, and what is "dead" or "written" hollow. `ticks`: texts
    by x.
    """
    shades = dict(zip(kinds, (GREY, *SERIES), strict=False))
    looks = {kind: {"facecolor": shade, "edgecolor": INK} for kind, shade in shades.items()}
    for kind, line in (("dead", ":"), ("written", "-")):
        looks[kind] = {"facecolor": "none", "edgecolor": INK, "linestyle": line}
    with canvas(width=7.4, height=0.9 + 0.4 * len(rows)) as (chart, axis):
        for row, parts in enumerate(rows.values()):
            for first, last, text, kind in parts:
                axis.add_patch(Rectangle((first, row - 0.38), last - first, 0.76, linewidth=0.6,
                                         **looks[kind]))  # fmt: skip
                ink = INK if looks[kind]["facecolor"] == "none" else PAGE
                axis.text((first + last) / 2, row, style.wrapped(text, 9), ha="center",
                          va="center", color=ink, fontsize=8.5)  # fmt: skip
        list_rows(axis, list(rows))
        axis.set_xlim(min(ticks), max(x[1] for parts in rows.values() for x in parts))
        axis.set_xticks(list(ticks), [style.wrapped(text, 8) for text in ticks.values()])
        axis.set_xlabel(xlabel)
        axis.grid(visible=False)
        axis.spines[:].set_visible(False)
        for kind in kinds:
            axis.add_patch(Rectangle((0, 0), 0, 0, label=kind, **looks[kind]))
        head(axis)
        return chart


_BOXES = {"compute": 2, "mma": 1, "copy": 0, "store": 3}
"""Kinds of events that `timelines` draws, and their colours; a wait is what is left free."""


@style.drawn
def timelines(lines: Mapping[str, Timeline], *, core_alone: bool = False) -> Figure:
    """Timelines of CTA 0 below one another on one axis of modelled cycles, by title, the tensor
    core shaded where it is idle; at each end, how many cycles fewer or more than the first.
    `core_alone`: the lane of the tensor core alone, of lines that do not do the same work."""
    shown = {title: [e for e in line.events if e.cta == 0 and e.kind in _BOXES]
             for title, line in lines.items()}  # fmt: skip
    lanes = {title: [lane for lane in line.lanes(0) if any(e.lane == lane for e in shown[title])]
             for title, line in lines.items()}  # fmt: skip
    if core_alone:
        shown = {title: [e for e in events if e.kind == "mma"] for title, events in shown.items()}
        lanes = {title: list({e.lane: None for e in events}) for title, events in shown.items()}
    ends = {title: max(e.end for e in line.events if e.cta == 0) for title, line in lines.items()}
    (_, base), *_ = ends.items()
    rows = max(map(len, lanes.values()))
    with canvas(len(lines), 1, width=7.4, height=0.6 + len(lines) * (0.5 + 0.27 * rows),
                sharex=True, squeeze=False) as (chart, axes):  # fmt: skip
        for axis, (title, events) in zip(axes[:, 0], shown.items(), strict=True):
            for event in events:
                axis.barh(
                    lanes[title].index(event.lane), event.end - event.start, 0.72,
                    left=event.start, color=SERIES[_BOXES[event.kind]], linewidth=0.4,
                    edgecolor=PAGE,
                )  # fmt: skip
            mmas = sorted((e.start, e.end) for e in events if e.kind == "mma")
            idle, last_end = [], 0.0
            for start, end in [*mmas, (ends[title], ends[title])]:
                idle.append((last_end, max(0.0, start - last_end)))
                last_end = max(last_end, end)
            core = lanes[title].index(next(e.lane for e in events if e.kind == "mma"))
            axis.broken_barh(
                idle, (core - 0.36, 0.72), facecolor=(*to_rgb(GREY), 0.3), edgecolor=GREY
            )
            busy = 100 - 100 * sum(width for _, width in idle) / ends[title]
            axis.set_title(f"{title}: {ends[title]:,.0f} cycles, tensor core busy {busy:.0f} %")
            list_rows(axis, lanes[title])
            axis.grid(visible=False)
            if core_alone:
                continue
            axis.axvline(base, color=GREY, linewidth=0.8, linestyle=":")
            less = ends[title] - base
            if less:
                bracket = {"arrowstyle": "|-|,widthA=.3,widthB=.3", "color": INK}
                axis.annotate("", (ends[title], -0.7), (base, -0.7), annotation_clip=False,
                              arrowprops=bracket)  # fmt: skip
                note(axis, f"{less:+,.0f} cycles".replace("-", "−"), (base, -0.7), (-2, 5),
                     ha="right", annotation_clip=False)  # fmt: skip
        axes[-1, 0].set_xlabel("cycles (modelled)")
        axes[-1, 0].set_xlim(0, 1.02 * max(ends.values()))
        looks = {KINDS[kind].word: Rectangle((0, 0), 1, 1, color=SERIES[of])
                 for kind, of in _BOXES.items()
                 if any(e.kind == kind for events in shown.values() for e in events)}  # fmt: skip
        looks["tensor core idle"] = Rectangle(
            (0, 0), 1, 1, facecolor=(*to_rgb(GREY), 0.3), edgecolor=GREY
        )
        chart.legend(looks.values(), looks, loc="outside lower left", ncols=style.columns(5))
        return chart


@style.drawn
def roofline(
    brackets: pd.DataFrame,
    climbs: pd.DataFrame,
    ceilings: Ceilings,
    levels: Mapping[str, float],
    labels: Mapping[str, str],
) -> Figure:
    """Kernels under a roof, both axes logarithmic: a thin bar from `low` to `high` for each of
    `brackets`, an arrow from `first` to `last` for each of `climbs`.

    Both by workload, with the column `intensity` (FLOP/byte); the others in TFLOP/s. `levels`:
    further horizontal lines by text. `labels`: texts below arrows, by workload.
    """
    with canvas(width=8.2, height=4.6) as (chart, axis):
        along = np.geomspace(45, 2600, 200)
        roofs = [np.minimum(along * rate / 1e3, ceilings.tflops) for _, rate in ceilings.copies]
        axis.fill_between(along, roofs[0], roofs[-1], color=INK, alpha=0.35, linewidth=0)
        axis.plot(along, roofs[-1], color=INK, linewidth=1.4)
        texts = {f"bf16 matmul: {ceilings.tflops:.0f}": ceilings.tflops}
        for text, level in (texts | dict(levels)).items():
            note(axis, text, (2600, level), (0, 3), ha="right", va="bottom")
            if text not in texts:
                axis.axhline(level, color=INK, linewidth=1, linestyle=(0, (1, 2)))
        axis.vlines(brackets["intensity"], brackets["low"], brackets["high"], color=INK,
                    linewidth=3, alpha=0.4, label="bracket: no overlap to perfect")  # fmt: skip
        families = [
            next(stem for stem in FAMILIES if name.startswith(stem)) for name in climbs.index
        ]
        for i, (stem, label) in enumerate(FAMILIES.items()):
            members = climbs[[stem == of for of in families]]
            arrow = {"arrowstyle": "->", "color": COLOURS[i], "linewidth": 1.6}
            for row in members.itertuples():
                axis.annotate("", (row.intensity, row.last), (row.intensity, row.first),
                              arrowprops=arrow | {"shrinkA": 0, "shrinkB": 0})  # fmt: skip
            if len(members):
                axis.plot(members["intensity"], members["first"], "o", color=COLOURS[i],
                          markersize=4, label=label)  # fmt: skip
        for name, text in labels.items():
            point = climbs["intensity"][name], climbs["first"][name]
            note(axis, text, point, (0, -5), ha="center", va="top")
        axis.set_xscale("log", base=2)
        axis.set_yscale("log", base=2)
        ticks = [64, 128, 256, 512, 1024, 2048]
        axis.set_xticks(ticks, ticks)
        axis.set_yticks(ticks[1:5], ticks[1:5])
        axis.set_xlim(45, 2700)
        axis.set_ylim(180, 1400)
        axis.grid(visible=True, axis="both")
        axis.set_xlabel("arithmetic intensity (useful FLOP / fewest byte)")
        axis.set_ylabel("TFLOP/s, back to back")
        axis.legend(loc="upper left")
        return chart


def _cell(axis: Axes, x: float, y: float, shade: str, text: object) -> None:
    axis.add_patch(Rectangle((x, y), 1, 1, edgecolor=INK, linewidth=0.8, facecolor=shade))
    axis.text(x + 0.5, y + 0.5, text, ha="center", va="center", fontsize=8.5, color=PAGE)
