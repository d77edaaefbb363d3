"""The style of charts: transparent SVG, text as text, one colour per implementation and theme.

A colour is written as a CSS variable with a value for a light and a dark page. The site sets it by
its theme, a stand-alone file by the reader's preference. Charts do without pyplot: nothing is
global, and a chart is shown once, where a notebook cell ends with it. A chart function decorated
with `drawn` renders its chart twice, for a wide page and for a phone.
"""

from __future__ import annotations

import io
import re
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial, wraps
from typing import Any

import matplotlib as mpl
import seaborn as sns
from matplotlib.axes import Axes
from matplotlib.figure import Figure as BaseFigure
from matplotlib.text import Annotation

INK, GREY, PAGE = "#333333", "#767676", "#ffffff"
"""Colours of axes and text; of baselines and the background; of the page and of text on bars."""

RUNG_COLOURS = (
    "#7d6b00", "#0b6fb8", "#008573", "#c74a00", "#7a5ae0", "#b83280", "#6b3a10", "#12306e",
    "#3f7f00",
)  # fmt: skip
"""Colour of rung v0, v1, ... on a light page: at least 4.5:1, since names have it too."""

_DARK_RUNGS = (
    "#c9b400", "#4aa8f0", "#2cc7ae", "#ff8a3c", "#a794ff", "#f07ac0", "#c99a6b", "#a8c6ff",
    "#8fd14a",
)  # fmt: skip
GREYS = GREY, "#5e5e5e", "#474747"
"""Colours of baselines."""
SERIES = "#2f6690", "#9c4f2b", "#546b1c", "#7b4173", "#1e6f6b"
"""Colours of what is no kernel: muted, so that none is taken for a rung's."""
THEMES = {
    "ink": (INK, "#d6d6d6"), "grey": (GREY, "#8e8e8e"), "page": (PAGE, "#121212"),
    "grey-2": (GREYS[1], "#a9a9a9"), "grey-3": (GREYS[2], "#c3c3c3"),
    **{f"series-{n}": both for n, both in enumerate(zip(
        SERIES, ("#86b6db", "#dd9a78", "#a9c264", "#cf9ac8", "#78c4bf"), strict=True))},
    **{f"rung-{n}": both for n, both in enumerate(zip(RUNG_COLOURS, _DARK_RUNGS, strict=True))},
}  # fmt: skip
"""Colours of each variable on a light and on a dark page."""
_VARIABLES = {light: name for name, (light, _) in THEMES.items()}
_PAGE, _PHONE = 7.4, 4.0
"""Width of a chart for a page, at most, and for a phone, inches: 8 points are 9.5 px or more."""
_narrow: ContextVar[bool] = ContextVar("narrow", default=False)

DASHED: dict[str, Any] = {"color": INK, "linewidth": 1.2, "linestyle": (0, (4, 2))}
"""A ceiling or another line of reference."""

SMALL = 8.5
"""Size of texts beside marks and lines."""

_STYLE: dict[str, Any] = {
    "font.family": "sans-serif",
    "font.sans-serif": ["DejaVu Sans", "Verdana", "Arial"],
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
    "svg.fonttype": "none",
    "svg.hashsalt": "gdpa-kernels",
}
_RUNG = re.compile(r"[bv](\d+)(?!\d)")


class Figure(BaseFigure):
    """A matplotlib figure in this style that a notebook shows as SVG.

    `again` draws it once more, so that `to_svg` includes the narrow form.
    """

    again: Callable[[], Figure] | None = None

    def to_svg(self) -> str:
        """Render as SVG text, in both forms if it is `drawn`; the same data give the same bytes."""
        if self.again is None:
            return self.drawn_svg()
        with narrowed():
            narrow = self.again().drawn_svg()
        return both(self.drawn_svg(), narrow)

    def drawn_svg(self) -> str:
        buffer = io.StringIO()
        with context():
            self.savefig(buffer, format="svg", metadata={"Date": None, "Creator": None})
        return themed(_rounded(buffer.getvalue()))

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> dict[str, str]:
        return {"image/svg+xml": self.to_svg(), "text/plain": repr(self)}


def drawn(draw: Callable[..., Figure]) -> Callable[..., Figure]:
    """Decorate a chart function: its figure is drawn again, narrow, when it is shown."""

    @wraps(draw)
    def once(*args: Any, **options: Any) -> Figure:
        figure = draw(*args, **options)
        figure.again = partial(draw, *args, **options)
        return figure

    return once


@contextmanager
def narrowed() -> Iterator[None]:
    """Draw for a phone inside the block."""
    token = _narrow.set(True)
    try:
        yield
    finally:
        _narrow.reset(token)


def both(wide: str, narrow: str) -> str:
    """Combine two SVGs: `wide` is shown, and the site shows `narrow` on a phone."""
    end, inner = wide.rindex("</svg>"), narrow[narrow.index("<svg") + 4 :].rstrip()
    return f'{wide[:end]}<svg data-form="narrow" display="none"{inner}\n</svg>\n'


def _rounded(svg: str) -> str:
    """Round coordinates to a hundredth of a point, of which nothing is seen."""

    def short(attribute: re.Match[str]) -> str:
        return re.sub(r"-?\d+\.\d{3,}", lambda x: f"{round(float(x[0]), 2):g}", attribute[0])

    return re.sub(r'\b(?:d|x|y|width|height|points|transform)="[^"]*"', short, svg)


def themed(svg: str) -> str:
    """Replace the colours of this style in an SVG by variables, and add their values."""
    svg = re.sub("#[0-9a-f]{6}", lambda x: f"var(--{_VARIABLES[x[0]]})" if x[0] in _VARIABLES
                 else x[0], svg)  # fmt: skip
    light, dark = (
        "".join(f"--{name}:{theme[of]};" for name, theme in THEMES.items() if f"--{name})" in svg)
        for of in (0, 1)
    )
    values = f"svg{{{light}}}@media(prefers-color-scheme:dark){{svg{{{dark}}}}}"
    return re.sub("(<svg[^>]*>)", rf"\1\n<style>{values}</style>", svg, count=1)


@contextmanager
def context() -> Iterator[None]:
    """Apply the style to whatever is drawn inside the block."""
    with mpl.rc_context():
        mpl.rcdefaults()
        sns.set_theme("paper", "ticks", palette=RUNG_COLOURS, rc=_STYLE)
        yield


@contextmanager
def canvas(
    nrows: int = 1, ncols: int = 1, *, width: float = 8.0, height: float = 4.0, **options: Any
) -> Iterator[tuple[Figure, Any]]:
    """Create a Figure of at most `width` x `height` inches and its axes, as `Figure.subplots` does,
    and apply the style inside the block. For a phone, columns stand below one another."""
    with context():
        if not _narrow.get():
            figure = Figure(figsize=(min(width, _PAGE), height), layout="constrained")
            yield figure, figure.subplots(nrows, ncols, **options)
            return
        figure = Figure(figsize=(_PHONE, height * ncols), layout="constrained")
        options.pop("gridspec_kw", None)
        squeeze = options.pop("squeeze", True)
        axes = figure.subplots(nrows * ncols, 1, squeeze=False, **options).reshape(nrows, ncols)
        yield figure, (axes[0, 0] if axes.size == 1 else axes.squeeze()) if squeeze else axes
        for axis in figure.axes:
            axis.set_xlabel(wrapped(axis.get_xlabel(), 44))
            axis.set_title(wrapped(axis.get_title("left"), 44), loc="left")


def is_narrow() -> bool:
    """Return whether drawing is for a phone now."""
    return _narrow.get()


def columns(most: int, names: Sequence[str] = ()) -> int:
    """Columns of a legend: as many as fit on a phone, where two have room for short names."""
    if not _narrow.get():
        fits = int(118 / (6 + max(map(len, names), default=0)))
        return max(1, min(most, fits))
    return min(most, 2) if max(map(len, names), default=0) <= 20 else 1


def wrapped(text: str, width: int) -> str:
    """Wrap the text into lines of at most `width` letters, for a phone alone."""
    return textwrap.fill(text, width, break_long_words=False) if _narrow.get() else text


def note(
    axis: Axes, text: str, point: Sequence[float], shift: tuple[float, float], **options: Any
) -> Annotation:
    """Write `text` at `point`, shifted by `shift` points; `options` go to `annotate`."""
    return axis.annotate(text, point, xytext=shift, textcoords="offset points", **options)


def apart(levels: Sequence[float], sizes: Sequence[float], least: float = 0.0) -> list[float]:
    """Push ordered positions apart by what lies there, from `least` on, until nothing overlaps."""
    levels = list(levels)
    for _ in range(200):
        for n in range(1, len(levels)):
            near = max(0.0, (sizes[n - 1] + sizes[n]) / 2 - (levels[n] - levels[n - 1])) / 2
            levels[n - 1 : n + 1] = max(least, levels[n - 1] - near), levels[n] + near
    return levels


def label_ends(axis: Axes, ends: Mapping[str, tuple[float, str]]) -> None:
    """Write names right of `axis`, each at its value and in its colour, apart from one another;
    `ends`: (value, colour) by name."""
    to_axes = axis.transData + axis.transAxes.inverted()
    x = axis.get_xlim()[1]
    by_height = sorted((to_axes.transform((x, y))[1], n) for n, (y, _) in ends.items())
    inches = axis.get_position().height * axis.get_figure().get_figheight()
    texts = [wrapped(name, 14) for _, name in by_height]
    high = [12 * (1 + text.count("\n")) / (72 * inches) for text in texts]
    levels = apart([end for end, _ in by_height], high)
    for level, text, (end, name) in zip(levels, texts, by_height, strict=True):
        arrow = {"arrowstyle": "-", "color": ends[name][1], "linewidth": 0.5, "shrinkA": 0}
        axis.annotate(
            text, (1, end), xytext=(1.03, level), xycoords="axes fraction",
            textcoords="axes fraction", va="center", ha="left", fontsize=SMALL, color=ends[name][1],
            arrowprops=arrow, annotation_clip=False,
        )  # fmt: skip


def is_rung(impl: str) -> bool:
    """Return True for a rung (v0_eager, b1_tensor_memory, ...), False for a baseline."""
    return _RUNG.match(impl) is not None
