"""Columns of tensor memory, drawn: who lies where, from one step to the next."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from matplotlib.patches import Patch, Rectangle

from gdpa_lab.measuring.compile_check import TENSOR_COLUMNS
from gdpa_lab.report import style
from gdpa_lab.report.style import GREY, INK, PAGE, SERIES, Figure, canvas, drawn

_SHADES = (GREY, *(SERIES[i] for i in (0, 1, 2)))


@drawn
def over_time(
    steps: Mapping[str, Sequence[tuple[int, int, str, str]]], kinds: Sequence[str]
) -> Figure:
    """A row for each step, by its name: what lies in columns (first, last excluded, text, kind).

    `kinds`: the legend, up to four; the first is grey.
    """
    shades = dict(zip(kinds, _SHADES, strict=False))
    with canvas(width=7.4, height=0.9 + 0.4 * len(steps)) as (chart, axis):
        for row, cells in enumerate(steps.values()):
            axis.add_patch(
                Rectangle((0, row - 0.38), TENSOR_COLUMNS, 0.76, facecolor="none", edgecolor=INK,
                          linewidth=0.6)
            )  # fmt: skip
            for first, last, text, kind in cells:
                axis.add_patch(
                    Rectangle((first, row - 0.38), last - first, 0.76, facecolor=shades[kind],
                              edgecolor=INK, linewidth=0.6)
                )  # fmt: skip
                axis.text((first + last) / 2, row, style.wrapped(text, 9), ha="center",
                          va="center", color=PAGE)  # fmt: skip
        axis.set_yticks(range(len(steps)), [style.wrapped(name, 14) for name in steps])
        axis.tick_params(length=0)
        axis.set_ylim(len(steps) - 0.5, -0.5)
        axis.set_xlim(0, TENSOR_COLUMNS)
        axis.set_xticks(range(0, TENSOR_COLUMNS + 1, 128))
        axis.set_xlabel("column of tensor memory")
        axis.grid(visible=False)
        for side in axis.spines.values():
            side.set_visible(False)
        chart.legend(handles=[Patch(color=shades[kind], label=kind) for kind in kinds],
                     loc="outside upper left", ncols=style.columns(len(kinds)))  # fmt: skip
        return chart
