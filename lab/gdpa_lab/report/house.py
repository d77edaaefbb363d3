"""The house style: transparent SVG, mid-grey axes, one colour per implementation.

One file reads on white and on black. Charts are made without pyplot: nothing is global, and a chart
is shown once, where a notebook cell ends with it.
"""

from __future__ import annotations

import io
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import matplotlib as mpl
import seaborn as sns
from matplotlib.axes import Axes
from matplotlib.figure import Figure as BaseFigure
from matplotlib.text import Annotation

INK = "#787878"
"""Axes, text, baselines and ceilings: contrast above 4 on white and on the dark page."""

RUNG_COLOURS = (
    "#8f7d00", "#1f83c4", "#00937a", "#d55e00", "#7a6ad8", "#c0609a", "#b8860b", "#0072b2",
    "#5b8a00",
)  # fmt: skip
"""Colour of rung v0, v1, ...: hues of Okabe and Ito, at least 3:1 on white and on black."""

DASHED: dict[str, Any] = {"color": INK, "linewidth": 1.2, "linestyle": (0, (4, 2))}
"""A ceiling or another line of reference."""

SMALL = 8.5
"""Size of texts beside marks and lines."""

_STYLE: dict[str, Any] = {
    "font.family": "sans-serif",
    "font.sans-serif": ["DejaVu Sans"],
    "font.size": 9.5,
    "text.color": INK,
    "axes.edgecolor": INK,
    "axes.labelcolor": INK,
    "axes.titlecolor": INK,
    "axes.labelsize": 9.5,
    "axes.titlesize": 9.5,
    "xtick.labelsize": 9,
    "ytick.labelsize": 9.5,
    "legend.fontsize": SMALL,
    "axes.titlelocation": "left",
    "axes.facecolor": "none",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.grid.axis": "y",
    "axes.axisbelow": True,
    "grid.color": INK,
    "grid.alpha": 0.25,
    "grid.linewidth": 0.6,
    "xtick.color": INK,
    "ytick.color": INK,
    "lines.linewidth": 1.8,
    "lines.markersize": 4.5,
    "legend.frameon": False,
    "figure.facecolor": "none",
    "savefig.facecolor": "none",
    "savefig.bbox": "tight",
    "savefig.pad_inches": 0.06,
    "svg.fonttype": "path",
    "svg.hashsalt": "gdpa-kernels",
}
_RUNG = re.compile(r"[bv](\d+)(?!\d)")


class Figure(BaseFigure):
    """A matplotlib figure in the house style that a notebook shows as SVG."""

    def to_svg(self) -> str:
        """The figure as SVG text: the same bytes for the same data."""
        buffer = io.StringIO()
        with style():
            self.savefig(buffer, format="svg", metadata={"Date": None, "Creator": None})
        return buffer.getvalue()

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> dict[str, str]:
        return {"image/svg+xml": self.to_svg(), "text/plain": repr(self)}


@contextmanager
def style() -> Iterator[None]:
    """The house style, for whatever is drawn inside the block."""
    with mpl.rc_context():
        mpl.rcdefaults()
        sns.set_theme("paper", "ticks", palette=RUNG_COLOURS, rc=_STYLE)
        yield


@contextmanager
def canvas(
    nrows: int = 1, ncols: int = 1, *, width: float = 8.0, height: float = 4.0, **options: Any
) -> Iterator[tuple[Figure, Any]]:
    """A Figure of `width` x `height` inches and its axes, as `Figure.subplots` gives them, in the
    house style for whatever is drawn inside the block."""
    with style():
        figure = Figure(figsize=(width, height), layout="constrained")
        yield figure, figure.subplots(nrows, ncols, **options)


def note(
    axis: Axes, text: str, at: Sequence[float], shift: tuple[float, float], **options: Any
) -> Annotation:
    """Write `text` at a point of `axis`, moved by `shift` points; `options`: of `annotate`."""
    return axis.annotate(text, at, xytext=shift, textcoords="offset points", **options)


def label_ends(axis: Axes, ends: Mapping[str, tuple[float, str]]) -> None:
    """Names right of `axis`, each at its value and in its colour, moved apart where they meet;
    `ends`: (value, colour) by name."""
    to_axes = axis.transData + axis.transAxes.inverted()
    found = sorted((to_axes.transform((axis.get_xlim()[1], y))[1], n) for n, (y, _) in ends.items())
    levels, step = [end for end, _ in found], 16 / (72 * axis.get_figure().get_figheight())
    for _ in range(100):
        for n in range(1, len(levels)):
            near = max(0.0, step - (levels[n] - levels[n - 1])) / 2
            levels[n - 1 : n + 1] = max(0.0, levels[n - 1] - near), levels[n] + near
    for level, (end, name) in zip(levels, found, strict=True):
        arrow = {"arrowstyle": "-", "color": ends[name][1], "linewidth": 0.5, "shrinkA": 0}
        axis.annotate(
            name, (1, end), xytext=(1.03, level), xycoords="axes fraction",
            textcoords="axes fraction", va="center", fontsize=SMALL, color=ends[name][1],
            arrowprops=arrow, annotation_clip=False,
        )  # fmt: skip


def is_rung(impl: str) -> bool:
    """True for a rung (v0_eager, ..., b1_tensor_memory, ...), False for a baseline."""
    return _RUNG.match(impl) is not None


def colour(impl: str) -> str:
    """The colour of an implementation: its own for a rung, INK for every baseline."""
    match = _RUNG.match(impl)
    return RUNG_COLOURS[int(match[1]) % len(RUNG_COLOURS)] if match else INK
