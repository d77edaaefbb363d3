"""Where numbers lie in threads, drawn: one row of an accumulator, its pairs, and their sines."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.patches import Rectangle

from gdpa_lab.report.style import INK, PAGE, SERIES, Figure, canvas

THREADS = 4
"""Threads that share a row of a wgmma accumulator."""
_SHADES = tuple(SERIES[i] for i in range(4))


def owner(column: int) -> int:
    """The thread of four that holds a column of its row of a wgmma accumulator."""
    return column % 8 // 2


def rotary(columns: int = 16) -> Figure:
    """A row of an accumulator, the pairs of interleaved and of half-split rotary, and the sines of
    the former where they are needed and where loads of 16 bytes of fp32 put them."""
    half = columns // 2
    rows = {
        "accumulator": (4.6, [owner(i) for i in range(columns)]),
        "sin, as needed": (1.2, [owner(2 * i) for i in range(half)]),
        "sin, as loaded": (0.0, [i // 4 for i in range(half)]),
    }
    with canvas(width=7.4, height=3.6) as (chart, axis):
        for name, (height, threads) in rows.items():
            _cells(axis, height, threads, columns / len(threads))
            axis.text(-0.3, height + 0.4, name, ha="right", va="center")
        for i in range(columns):
            axis.text(i + 0.5, 5.5, f"{i}", ha="center", va="bottom", fontsize=8)
        for name, height, pairs in (
            ("interleaved pairs", 3.9, [(2 * i, 2 * i + 1) for i in range(half)]),
            ("half-split pairs", 2.9, [(i, i + half) for i in range(half)]),
        ):
            axis.text(-0.3, height, name, ha="right", va="center")
            for first, second in pairs:
                x = np.linspace(first + 0.5, second + 0.5, 30)
                depth = 0.5 * np.sin(np.pi * np.linspace(0, 1, 30))
                axis.plot(x, height + 0.25 - depth, color=_SHADES[owner(first)], linewidth=1.1)
        axis.set(xlim=(-4.2, columns + 0.1), ylim=(-0.1, 6.1))
        axis.set_axis_off()
        return chart


def _cells(axis: Axes, height: float, threads: Sequence[int], wide: float) -> None:
    for index, thread in enumerate(threads):
        axis.add_patch(
            Rectangle((index * wide, height), wide, 0.8, facecolor=_SHADES[thread], edgecolor=INK)
        )
        axis.text((index + 0.5) * wide, height + 0.4, f"T{thread}", ha="center", va="center",
                  color=PAGE, fontsize=8.5)  # fmt: skip
