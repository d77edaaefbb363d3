"""The ladder in a strip: a tick for each rung on one axis of time, the one at hand lit, and lines
for the peers. Each tick is a link to the rung's chapter."""

from __future__ import annotations

import html
import os
from collections.abc import Mapping
from pathlib import Path

from matplotlib.ticker import MaxNLocator

from gdpa_kernels.calling.rung import Rung
from gdpa_lab.measuring.record import ROOT
from gdpa_lab.report import style
from gdpa_lab.report.roles import display_name, role_colour
from gdpa_lab.report.style import INK, PAGE

_SPACE = ' xmlns="http://www.w3.org/2000/svg"'
_TOLD_IN = {"v2_slab": "v3_warp_specialized"}
"""Chapters that begin with another rung's number than the one they tell of."""
_EDGE, _BAR, _LETTER = 14, 62, 6.3
"""Margin at both ends, height of the axis, and mean width of a letter of a name, px."""


def page_of(rung: Rung, folder: str, notebooks: Path = ROOT / "notebooks") -> str | None:
    """Return the chapter in `folder` that tells of a rung: its own, that of another form of it, or
    the one of the last rung before; None if there is none."""
    number = int(rung.impl[1])
    pages = {path.stem: int(path.stem[1]) for path in (notebooks / folder).glob("v[0-9]*_*.py")}
    if (name := _TOLD_IN.get(rung.impl, rung.impl)) in pages:
        return name
    earlier = sorted((n, name) for name, n in pages.items() if n <= number)
    return earlier[-1][1] if earlier else None


def draw(
    rungs: Mapping[Rung, float], peers: Mapping[str, float], lit: str, folder: str, slug: str
) -> str:
    """Draw the strip as SVG in both forms. `rungs`, `peers`: their times (ms); `lit`: the rung at
    hand; `folder`: of its chapters; `slug`: of the page."""
    wide, narrow = (
        style.themed(_draw(rungs, peers, lit, folder, slug, width)) for width in (736, 350)
    )
    return style.both(wide, narrow.replace(_SPACE, "", 1))  # else it becomes the first attribute


def _draw(
    rungs: Mapping[Rung, float], peers: Mapping[str, float], lit: str, folder: str, slug: str,
    width: int,
) -> str:  # fmt: skip
    times = [*rungs.values(), *peers.values()]
    low = 0.96 * min(times)
    high = 1.04 * max(x for x in times if x < 2.2 * min(times))
    room = width - 2 * _EDGE
    spots = {key: _EDGE + room * min(1, (x - low) / (high - low))
          for key, x in (*rungs.items(), *peers.items())}  # fmt: skip
    lines = []
    named = sorted((spots[rung], rung.impl, rung) for rung in rungs)
    labels = [display_name(impl) for _, impl, _ in named]
    xs = style.apart([x for x, *_ in named], [_LETTER * len(s) + 7 for s in labels], _EDGE)
    xs = [x - max(0.0, xs[-1] - (width - _EDGE - 4)) * n / len(xs) for n, x in enumerate(xs, 1)]
    for (x, impl, rung), label, nx in zip(named, labels, xs, strict=True):
        strong, shade, beyond = impl == lit, role_colour(impl), rungs[rung] > high
        text = f"{rungs[rung]:.1f} ▸" if beyond else ""
        tick = (
            f'<title>{label}: {html.escape(rung.title)}, {rungs[rung]:.2f} ms</title>'
            f'<path d="M{nx:.1f} 22 L{x:.1f} {_BAR - 18} V{_BAR}" fill="none" stroke="{shade}" '
            f'stroke-width="{4 if strong else 1.5}"/>'
            f'<text x="{nx:.1f}" y="16" text-anchor="middle" font-size="{13 if strong else 11}" '
            f'font-weight="{"bold" if strong else "normal"}" fill="{shade}">{label}</text>'
            + (f'<text x="{x:.1f}" y="{_BAR - 3}" text-anchor="end" dx="-5" font-size="10" '
               f'fill="{shade}">{text}</text>' if text else "")
        )  # fmt: skip
        page = page_of(rung, folder)
        if page and f"{folder}/{page}" != slug:
            target = os.path.relpath(f"{folder}/{page}.html", os.path.dirname(slug))
            tick = f'<a href="{target}">{tick}</a>'
        lines.append(f"<g>{tick}</g>")
    ends: list[float] = []
    halo = f'stroke="{PAGE}" stroke-width="3" paint-order="stroke"'
    texts: list[str] = []
    for name in sorted(peers, key=peers.get):
        text = f"{name}, {peers[name]:.1f} ▸" if peers[name] > high else name
        x, shade, wide = spots[name], role_colour(name), _LETTER * 0.95 * len(text)
        left = min(x - 2, width - wide - 2)
        row = next((n for n, end in enumerate(ends) if end + 8 < left), len(ends))
        ends[row : row + 1] = [left + wide]
        y = _BAR + 34 + 14 * row
        if peers[name] <= high:
            lines.append(f'<path d="M{x:.1f} {_BAR - 12} V{y - 9}" stroke="{shade}" '
                         'stroke-dasharray="4 2"/>')  # fmt: skip
        anchor = f'x="{left:.1f}"' if peers[name] <= high else f'x="{width - 2}" text-anchor="end"'
        texts.append(f'<text {anchor} y="{y}" font-size="11" fill="{shade}" {halo}>'
                     f"{html.escape(text)}</text>")  # fmt: skip
    lines += texts
    ticks = MaxNLocator(4 if width < 500 else 8, steps=[1, 2, 5, 10]).tick_values(low, high)
    ticks = [tick for tick in ticks if low < tick < high]
    for tick in ticks:
        x = _EDGE + room * (tick - low) / (high - low)
        lines.append(
            f'<path d="M{x:.1f} {_BAR} v4" stroke="{INK}"/><text x="{x:.1f}" y="{_BAR + 15}" '
            f'text-anchor="middle" font-size="10" fill="{INK}" {halo}>'
            f"{tick:g}{' ms' if tick == ticks[-1] else ''}</text>"
        )
    height = _BAR + 28 + 14 * len(ends) + 12
    head = (
        f'<svg{_SPACE} class="strip" width="{width}" height="{height}" '
        f'viewBox="0 0 {width} {height}" font-family="sans-serif">'
    )
    axis = f'<path d="M{_EDGE} {_BAR} H{width - _EDGE}" stroke="{INK}"/>'
    return "\n".join((head, axis, *lines, "</svg>"))
