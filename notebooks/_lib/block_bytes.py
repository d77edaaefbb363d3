"""Bytes that kernels of block attention move, counted by the names of tensors and drawn; and grids
of cells, which show what a program owns or sees.

A kernel is a pair of names, ("q k v", "out"): what it reads and what it writes. lse and D hold one
fp32 number for each row and head; every other tensor is as large as q, or as k if it is k, v, dk or
dv. Nothing is found in a cache that another kernel touched.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import pandas as pd
from matplotlib.patches import Rectangle

from _lib import drawings
from gdpa_lab.measuring.roofline import Ceilings
from gdpa_lab.measuring.workload import Workload
from gdpa_lab.report.style import INK, PAGE, SERIES, Figure, canvas

Kernels = Sequence[tuple[str, str]]
KINDS = "read", "written"


def size_of(tensor: str, work: Workload) -> int:
    """Bytes of a tensor of this name."""
    if tensor in ("lse", "D"):
        return 4 * work.total_q * work.num_heads_q
    heads = work.num_heads_k if tensor in ("k", "v", "dk", "dv") else work.num_heads_q
    return 2 * work.total_q * heads * work.head_dim


def moved(kernels: Kernels, work: Workload) -> tuple[int, int]:
    """Bytes (read, written) by all of `kernels`."""
    read, written = (
        sum(size_of(name, work) for kernel in kernels for name in kernel[side].split())
        for side in (0, 1)
    )
    return read, written


def tensors(kernels: Kernels, work: Workload) -> float:
    """Count what `kernels` move, in tensors of q's size."""
    return sum(moved(kernels, work)) / size_of("q", work)


def floor_us(kernels: Kernels, work: Workload, limits: Ceilings) -> float:
    """The time of copies with as many bytes, each at the measured rate of its kernel's mix."""
    each = (moved([kernel], work) for kernel in kernels)
    return sum((r + w) / limits.gbytes_per_s(r, w) / 1e3 for r, w in each)


def boxes(designs: Mapping[str, Kernels], work: Workload) -> Figure:
    """A row for each design, a box for each tensor that it moves: filled if read, outlined if
    written, with a gap between kernels."""
    rows = {}
    for name, kernels in designs.items():
        parts, x = [], 0.0
        for kernel in kernels:
            for kind, tensor in ((k, t) for k, ts in zip(KINDS, kernel, strict=True)
                                 for t in ts.split()):  # fmt: skip
                width = size_of(tensor, work) / size_of("q", work)
                parts.append((x + 0.03, x + width - 0.02, tensor if width > 0.2 else "", kind))
                x += width
            x += 0.3
        rows[name] = parts
    return drawings.segments(rows, KINDS, ticks={0: ""})


def cells(
    panels: Mapping[str, pd.DataFrame],
    *,
    xlabel: str,
    ylabel: str,
    frames: Sequence[tuple[int, int, str]] = (),
    numbers: Mapping[str, pd.DataFrame] | None = None,
) -> Figure:
    """Grids by title, a cell the stronger the larger its value in 0 .. 1.

    frames: (first, last, text) of squares on the diagonal, last excluded; their ends become ticks.
    numbers: what stands in the cells of each panel.
    """
    width = 5.6 if len(panels) == 1 else 3.3 * len(panels)
    with canvas(1, len(panels), width=width, height=0.85 * width / len(panels) + 0.2,
                squeeze=False) as (chart, axes):  # fmt: skip
        for axis, (title, values) in zip(axes[0], panels.items(), strict=True):
            for (row, column), value in values.stack().items():
                face = SERIES[0] if value else "none"
                edge = {"edgecolor": INK, "linewidth": 0.8} if numbers else {"linewidth": 0}
                axis.add_patch(Rectangle((column, row), 1, 1, facecolor=face, alpha=value or 1,
                                         **edge))  # fmt: skip
                if numbers:
                    shown = str(numbers[title].loc[row, column])
                    axis.text(column + 0.5, row + 0.5, shown, ha="center", va="center",
                              color=PAGE if value else INK)  # fmt: skip
            for first, last, text in frames:
                size = last - first
                axis.add_patch(Rectangle((first, first), size, size, fill=False, edgecolor=INK))
                axis.text(last + 0.8, first + size / 2, text, va="center")
            ends = sorted({end for frame in frames for end in frame[:2]})
            axis.set_xlim(-0.1, values.shape[1] + 0.1)
            axis.set_ylim(values.shape[0] + 0.1, -0.1)
            axis.set_xticks(ends)
            axis.set_yticks(ends)
            axis.set_aspect("equal")
            axis.set_xlabel(xlabel)
            axis.set_ylabel(ylabel)
            axis.set_title(title)
            axis.grid(visible=False)
        return chart
