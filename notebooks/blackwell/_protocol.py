"""The protocol of two CTAs in a step of Blackwell backward b4, drawn: who tells whom."""

from __future__ import annotations

from matplotlib.axes import Axes
from matplotlib.patches import FancyBboxPatch

from gdpa_lab.report.style import INK, PAGE, SERIES, SMALL, Figure, canvas, drawn, wrapped

BARRIERS = {
    "1": "p.full", "2": "ds.for_dk.full", "3": "ds.peer.full", "4 and 5": "ds.for_dq.full",
    "6": "dq.full", "7": "dq.empty",
}  # fmt: skip
"""The barrier on which the messages of these numbers arrive."""
_MATH, _STORED, _MMA, _OUTPUT = (SERIES[i] for i in (0, 2, 1, 3))


@drawn
def two_ctas() -> Figure:
    """The leader left, its peer right; from the top the math roles, dS in shared memory, the roles
    of the MMAs, and output. An arrow ends where somebody waits; its dots are messages."""
    with canvas(width=7.4, height=4.5) as (chart, axis):
        for cta, (name, rows) in enumerate((("the leader", "0–63"), ("its peer", "64–127"))):
            x = 58 * cta
            _box(axis, x, 42, 1.0, 8.6, "", INK, 0.05)
            title = f"CTA {cta}, {name}:\ndQ of rows {rows}"
            axis.text(x + 21, 10.3, title, ha="center", va="center", fontweight="bold")
            for half in (0, 1):
                _box(axis, x + 2 + 20 * half, 18, 7.9, 1.2, f"math {half}", _MATH)
                _box(axis, x + 2 + 20 * half, 18, 5.5, 1.2, f"dS, keys\nof CTA {half}", _STORED)
                _line(axis, (x + 11 + 20 * half, 9.1), (x + 11 + 20 * half, 9.4))
            _box(axis, x + 2, 38, 3.4, 1.2, ("issues all MMAs", "tells the leader")[cta], _MMA)
            _box(axis, x + 2, 38, 1.3, 1.2, "output", _OUTPUT)
        _arrow(axis, (89, 9.4), (-3, 9.4), (-3, 4.0), (2, 4.0))
        _arrow(axis, (31, 7.9), (69, 6.7), shade=_STORED, width=2.2)
        _arrow(axis, (69, 7.9), (31, 6.7), shade=_STORED, width=2.2)
        for x in (11, 89):
            _arrow(axis, (x, 7.9), (x, 6.7))
        for x in (11, 31, 69):
            _arrow(axis, (x, 5.5), (x, 4.6))
        _arrow(axis, (89, 5.5), (89, 5.05), (36, 5.05), (36, 4.6))
        _arrow(axis, (60, 4.0), (40, 4.0))
        _arrow(axis, (11, 3.4), (11, 2.5))
        _arrow(axis, (21, 2.5), (21, 3.4))
        _arrow(axis, (31, 3.4), (31, 3.1), (74, 3.1), (74, 2.5))
        _arrow(axis, (84, 2.5), (84, 2.8), (36, 2.8), (36, 3.4))
        for number, x, y in (
            (1, 46, 9.4), (2, 54, 9.4), (3, 43.5, 7.5), (3, 56.5, 7.5), (4, 11, 5.05),
            (4, 50, 5.05), (5, 50, 4.0), (6, 46, 3.1), (7, 54, 2.8), (6, 11, 2.95), (7, 21, 2.95),
        ):  # fmt: skip
            axis.text(x, y, str(number), ha="center", va="center", color=PAGE, fontsize=SMALL,
                      fontweight="bold", zorder=5,
                      bbox={"boxstyle": "circle,pad=0.2", "facecolor": INK, "linewidth": 0},
                      )  # fmt: skip
        names = ", ".join(f"{number} {name}" for number, name in BARRIERS.items())
        axis.text(49, 0.6, wrapped(names, 52), ha="center", va="top", fontsize=SMALL)
        axis.set(xlim=(-5, 102), ylim=(-0.2, 10.9))
        axis.set_axis_off()
        return chart


def _box(
    axis: Axes, x: float, width: float, y: float, height: float, text: str, shade: str,
    filled: float = 0.16,
) -> None:  # fmt: skip
    axis.add_patch(
        FancyBboxPatch((x, y), width, height, boxstyle="round,pad=0,rounding_size=0.4",
                       mutation_aspect=0.15, facecolor=(shade, filled), edgecolor=shade)
    )  # fmt: skip
    axis.text(x + width / 2, y + height / 2, text, ha="center", va="center", fontsize=SMALL)


def _line(axis: Axes, *points: tuple[float, float], shade: str = INK, width: float = 1.0) -> None:
    axis.plot(*zip(*points, strict=True), color=shade, linewidth=width, solid_joinstyle="miter")


def _arrow(axis: Axes, *points: tuple[float, float], shade: str = INK, width: float = 1.0) -> None:
    """A line through `points` with a head at its end."""
    _line(axis, *points, shade=shade, width=width)
    head = {"arrowstyle": "-|>", "color": shade, "linewidth": width, "shrinkA": 0, "shrinkB": 0}
    axis.annotate("", points[-1], points[-2], arrowprops=head)
