"""Draws a Timeline as SVG: lanes, boxes, barrier arrows, an axis in modelled cycles."""

import html
import math
import textwrap
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

KINDS = {
    "compute": "compute",
    "mma": "MMA",
    "copy": "TMA load",
    "store": "TMA store",
    "read": "read a buffer",
    "write": "write a buffer",
    "wait": "wait",
    "arrive": "arrive",
}
"""Kinds of events and their words in the legend."""

# Contrast of the fills: at least 4.5 with their white labels, 3.5 with a dark page.
COLOURS = {
    **{"compute": "#007a63", "mma": "#c24a00", "copy": "#1a73b8", "store": "#7257d0"},
    **{"read": "#7d6b00", "write": "#b04488", "wait": "#787878", "arrive": "#6b6b6b"},
}
_STRIPES = '<path d="M-2 2l4-4M0 8l8-8M6 10l4-4"/>'
_HATCHES = {
    "mma": '<circle cx="2" cy="2" r="1"/><circle cx="6" cy="6" r="1"/>',
    "copy": _STRIPES,
    "store": '<path d="M-2 6l4 4M0 0l8 8M6-2l4 4"/>',
    "read": '<path d="M0 2h8M0 6h8"/>',
    "write": '<path d="M2 0v8M6 0v8"/>',
    "wait": _STRIPES,
}
# An image cannot see the theme of its page: mid-grey there, the colour of the text when inlined.
_STYLE = """
.gdpa-timeline text { font: 11.5px "DejaVu Sans", Verdana, system-ui, sans-serif; fill: #787878 }
.gdpa-timeline .label { fill: #fff; font-size: 11px; paint-order: stroke; stroke-width: 3px;
  stroke-linejoin: round; text-anchor: middle }
.gdpa-timeline .wait .label { fill: #787878; stroke: none }
.gdpa-timeline .gutter { fill: none }
.gdpa-timeline .grid { stroke: #787878; stroke-opacity: .22; stroke-width: .7 }
.gdpa-timeline .band { fill: #787878; fill-opacity: .09 }
.gdpa-timeline .arrow { fill: none; stroke: #787878; stroke-width: 1.2;
  stroke-opacity: .85 }
.gdpa-timeline .head { fill: #787878 }
html .gdpa-timeline text, html .gdpa-timeline .wait .label { fill: currentColor }
html .gdpa-timeline .label { fill: #fff }
html .gdpa-timeline .arrow { stroke: currentColor }
html .gdpa-timeline .head { fill: currentColor }
"""
# Contrast of this red: 4.9 with white, 3.8 with a dark page.
_MARKS = """
.gdpa-timeline .mark { fill: #cf3a3a; stroke: #fff }
.gdpa-timeline .missing { fill: none; stroke: #cf3a3a; stroke-width: 2; stroke-dasharray: 5 4 }
.gdpa-timeline .cross { fill: none; stroke: #cf3a3a; stroke-width: 3 }
"""
_ROW, _GAP = 26.0, 22.0  # height of a row, and between two lanes
_CHAR = 6.9  # width of a letter, rather wide
_MARGIN = 10.0
_ARROW = "completes a phase: the wait ends"


@dataclass(frozen=True)
class Event:
    """An event of a role or an engine; `Timeline.events` are in order of occurrence."""

    cta: int
    lane: str
    kind: str  # one of KINDS
    name: str
    start: float
    end: float
    line: int  # of Timeline.file; 0 if it was not called from there
    target: str = ""  # barrier or buffer: "k_full[1]", "k[1]"
    phase: int = -1  # waited for or arrived in; its parity is phase & 1
    pending: int = 0  # arrivals that `phase` still lacks after the event: 0 if it is complete
    bytes: int = 0  # that `phase` still expects after the event; of a copy or store: bytes moved


@dataclass(frozen=True)
class Arrow:
    """An arrival that completed a phase of a barrier, and a wait that it released."""

    cta: int
    barrier: str
    phase: int
    source: str  # lane of the arrival: a role or an engine
    left: float  # its time
    target: str  # lane of the wait
    right: float  # when the wait ended


Spot = tuple[int, str, float]
"""CTA, lane and time of a timeline."""


@dataclass(frozen=True)
class Mark:
    """Mark of a finding, in a lane at a time. lasts: it does not end."""

    cta: int
    lane: str
    time: float
    line: int
    what: str
    lasts: bool = False


@dataclass
class Box:
    """Events drawn as one box, in the row-th row of their lane."""

    events: list[Event]
    row: int = 0

    def __post_init__(self) -> None:
        self.lane, self.kind = self.events[0].lane, self.events[0].kind
        self.start = min(event.start for event in self.events)
        self.end = max(event.end for event in self.events)


def merged(events: Iterable[Event], gap: float) -> list[list[Event]]:
    """Group the events of one lane by start; compute events at most `gap` apart are one group."""
    groups: list[list[Event]] = []
    for event in sorted(events, key=lambda e: e.start):
        last = groups[-1][-1] if groups else None
        merge = last is not None and last.kind == event.kind == "compute"
        if merge and event.start - last.end <= gap:
            groups[-1].append(event)
        else:
            groups.append([event])
    return groups


def placed(groups: Iterable[list[Event]]) -> list[Box]:
    """Place boxes of one lane by start, each in the first row that is free then.

    What takes no time shares the row of the box at whose end, or else in which, it happens.
    """
    free: list[float] = []
    boxes = sorted(map(Box, groups), key=lambda box: (box.start, -box.end))
    lasting = [box for box in boxes if box.end > box.start]
    for box in lasting:
        box.row = next((row for row, end in enumerate(free) if end <= box.start), len(free))
        free[box.row : box.row + 1] = [box.end]
    for box in boxes:
        if box.end == box.start:
            around = box_at(lasting, box.lane, box.start)
            box.row = around.row if around else 0
    return boxes


def box_at(boxes: Iterable[Box], lane: str, time: float) -> Box | None:
    """Return the box of a lane that ends at `time`, or else the one around it that ends first."""
    candidates = [box for box in boxes if box.lane == lane and box.start <= time <= box.end]
    return min(candidates, key=lambda box: box.end, default=None)


def _number(value: float) -> str:
    return f"{value:.1f}".removesuffix(".0")


def _text(text: str) -> str:
    return html.escape(text, quote=False)


def _pattern(kind: str) -> str:
    """Draw the fill of a kind: its colour, and a hatch for readers who cannot tell colours."""
    ground, ink, strength = f'<rect width="8" height="8" fill="{COLOURS[kind]}"/>', "#fff", 0.3
    if kind == "wait":
        ground, ink, strength = "", COLOURS[kind], 0.38
    fill = ink if kind == "mma" else "none"
    return (
        f'<pattern id="gdpa-{kind}" width="8" height="8" patternUnits="userSpaceOnUse">{ground}'
        f'<g stroke="{ink}" stroke-width=".8" opacity="{strength}" fill="{fill}">{_HATCHES[kind]}'
        f"</g></pattern>"
    )


def _shape(kind: str, x: float, y: float, width: float, height: float) -> str:
    """Draw a box of a kind; an arrival that takes no time is a pin."""
    if kind == "arrive" and width < 5:
        return (
            f'<path d="M{x:.1f} {y - 4:.1f}v{height + 4:.1f}" stroke="{COLOURS[kind]}" '
            f'stroke-width="2"/><circle cx="{x:.1f}" cy="{y - 4:.1f}" r="3.4" '
            f'fill="{COLOURS[kind]}"/>'
        )
    fill = f"url(#gdpa-{kind})" if kind in _HATCHES else COLOURS[kind]
    return (
        f'<rect x="{x + 0.8:.1f}" y="{y + 1:.1f}" width="{max(width - 1.6, 0.4):.1f}" '
        f'height="{height - 2:.1f}" rx="2" fill="{fill}" stroke="{COLOURS[kind]}"/>'
    )


def _draw_box(box: Box, left: float, right: float, top: float) -> str:
    """Draw a box with its tooltip, and the longest of its names that fits."""
    names = [name for name in dict.fromkeys(event.name for event in box.events) if name]
    candidates = [", ".join(names), *names[:1], box.events[0].target]
    fits = (name for name in candidates if name and _CHAR * len(name) + 8 <= right - left)
    label = next(fits, "")
    if label:
        label = (
            f'<text class="label" x="{(left + right) / 2:.1f}" y="{top + 17:.1f}" '
            f'stroke="{COLOURS[box.kind]}">{_text(label)}</text>'
        )
    lines = sorted({event.line for event in box.events if event.line}) or [0]
    where = f"line {lines[0]}" if len(lines) == 1 else f"lines {lines[0]} to {lines[-1]}"
    cycles = f"cycles {_number(box.start)} to {_number(box.end)}"
    return (
        f'<g class="{box.kind}">'
        f"<title>{_text(candidates[0] or KINDS[box.kind])}: {cycles}, {where}</title>"
        f"{_shape(box.kind, left, top, right - left, _ROW)}{label}</g>"
    )


def _draw_arrow(arrow: Arrow, a: float, b: float, source_y: float, target_y: float) -> str:
    """Draw a curve from the box of an arrival (top at source_y) to the box of a wait."""
    down = 1 if target_y > source_y else -1
    from_y = source_y + (_ROW if down > 0 else 0)
    to_y = target_y + (_ROW if target_y < source_y else 0)
    bend = max(abs(to_y - from_y) / 2, 14) * down
    end = to_y - 5 * down
    title = (
        f"{arrow.barrier}, phase {arrow.phase}: {arrow.source} at {_number(arrow.left)} "
        f"releases {arrow.target} at {_number(arrow.right)}"
    )
    return (
        f'<g class="release"><title>{_text(title)}</title><path class="arrow" d="M{a:.1f} '
        f"{from_y:.1f}C{a:.1f} {from_y + bend:.1f} {b:.1f} {to_y - bend:.1f} {b:.1f} "
        f'{end:.1f}"/><path class="head" d="M{b:.1f} {to_y:.1f}l-3.4 {-7 * down}h6.8z"/></g>'
    )


def _pin(number: int, x: float, y: float) -> str:
    return (
        f'<circle class="mark" cx="{x:.1f}" cy="{y:.1f}" r="8"/>'
        f'<text class="label" x="{x:.1f}" y="{y + 4:.1f}" stroke="none">{number}</text>'
    )


def _cross(x: float, y: float) -> str:
    return f'<path class="cross" d="M{x - 5:.1f} {y - 5:.1f}l10 10m0-10l-10 10"/>'


def _draw_marks(places: dict[int, tuple[float, float]], missing: str) -> list[str]:
    """Draw pins with their numbers, and what is missing between the first two, by a cross."""
    drawn = []
    if missing and len(places) == 2:
        (a, c), (b, d) = places.values()
        drawn.append(
            f'<g class="unordered"><title>{_text(missing)}</title>'
            f'<path class="missing" d="M{a:.1f} {c:.1f}L{b:.1f} {d:.1f}"/>'
            f"{_cross((a + b) / 2, (c + d) / 2)}</g>"
        )
    return drawn + [_pin(number, *point) for number, point in places.items()]


def _describe_marks(
    marks: Sequence[Mark], missing: str, y: float, width: float
) -> tuple[list[str], float]:
    """Describe each mark and what is missing, in lines from y on; return the y of the last."""
    drawn = []
    lines = [f"{mark.what}, line {mark.line}" if mark.line else mark.what for mark in marks]
    for number, text in enumerate([*lines, missing] if missing else lines, 1):
        sign = _pin(number, 9, y - 4) if number <= len(marks) else _cross(9, y - 4)
        drawn.append(sign)
        for part in textwrap.wrap(text, max(int((width - 30) / _CHAR), 20)):
            drawn.append(f'<text x="25" y="{y:g}">{_text(part)}</text>')
            y += 17
        y += 6
    return drawn, y - 23


def _ticks(left: float, right: float, scale: float) -> list[float]:
    """Choose multiples of 1, 2 or 5 times a power of ten, at least 64 pixels apart."""
    power = 10.0 ** math.floor(math.log10(64 / scale))
    step = next(power * n for n in (1, 2, 5, 10) if power * n * scale >= 64)
    return [n * step for n in range(math.ceil(left / step), math.floor(right / step) + 1)]


def _legend(kinds: list[str], arrows: bool, y: float, width: float) -> tuple[list[str], float]:
    """Draw swatches and words in lines of `width`, the first at y; return the y of the last."""
    entries, x = [], 0.0
    for kind, word in [(kind, KINDS[kind]) for kind in kinds] + [("", _ARROW)] * arrows:
        advance = 40 + _CHAR * len(word)
        if x and x + advance > width:
            x, y = 0.0, y + 21
        if kind == "arrive":
            swatch = _shape(kind, x + 9, y - 7, 0, 9)
        elif kind:
            swatch = _shape(kind, x, y - 11, 18, 13)
        else:
            swatch = (
                f'<path class="arrow" d="M{x:.1f} {y - 4:g}h14"/>'
                f'<path class="head" d="M{x + 19:.1f} {y - 4:g}l-7-3.4v6.8z"/>'
            )
        entries.append(f'{swatch}<text x="{x + 25:.1f}" y="{y:g}">{_text(word)}</text>')
        x += advance
    return entries, y


def draw(
    events: list[Event],
    arrows: list[Arrow],
    lanes: list[str],
    marks: Sequence[Mark],
    *,
    name: str,
    missing: str,
    left: float,
    right: float,
    width: float,
) -> str:
    """Draw the SVG of `Timeline.svg`; the page needs the cycles in its data- attributes."""
    gutter = round(_CHAR * max(map(len, lanes)) + 14)
    plot = width - gutter - _MARGIN
    scale = plot / (right - left)

    def x(time: float) -> float:
        return gutter + (min(max(time, left), right) - left) * scale

    bands, grid, shapes, curves, words = [], [], [], [], []
    boxes: list[Box] = []
    tops: dict[str, float] = {}
    y = first = 10.0
    for lane in lanes:
        lane_boxes = placed(merged((e for e in events if e.lane == lane), 0.5 / scale))
        boxes += lane_boxes
        tops[lane] = y
        rows = 1 + max((box.row for box in lane_boxes), default=0)
        bands.append(
            f'<rect class="band" x="{gutter}" y="{y:g}" width="{plot:g}" height="{_ROW * rows:g}"/>'
        )
        words.append(f'<text x="0" y="{y + 17:g}">{_text(lane)}</text>')
        y += _ROW * rows + _GAP
    bottom = y - _GAP + 7

    for time in _ticks(left, right, scale):
        tick = x(time)
        grid.append(f'<path class="grid" d="M{tick:.1f} {first - 4:g}V{bottom:g}"/>')
        tick, anchor = (width, "end") if tick > width - 20 else (tick, "middle")
        grid.append(
            f'<text x="{tick:.1f}" y="{bottom + 13:g}" text-anchor="{anchor}">{time:g}</text>'
        )
    words.append(f'<text x="{gutter}" y="{bottom + 30:g}">cycles (modelled)</text>')

    for box in boxes:
        a, b = x(box.start), x(box.end)
        if box.kind != "wait" or b - a > 1:
            shapes.append(_draw_box(box, a, b, tops[box.lane] + _ROW * box.row))
    for arrow in arrows:
        ends = []
        for lane, time in ((arrow.source, arrow.left), (arrow.target, arrow.right)):
            box = box_at(boxes, lane, time)
            ends.append(tops.get(lane, first) + _ROW * (box.row if box else 0))
        curves.append(_draw_arrow(arrow, x(arrow.left), x(arrow.right), *ends))

    places: dict[int, tuple[float, float]] = {}
    for number, mark in enumerate(marks, 1):
        if mark.lane in tops and left <= mark.time <= right:
            on_line = (b for b in boxes if mark.line in {event.line for event in b.events})
            box = box_at(on_line, mark.lane, mark.time) or box_at(boxes, mark.lane, mark.time)
            pin_x, top = x(mark.time), tops[mark.lane] + _ROW * (box.row if box else 0)
            if mark.lasts:
                shapes.append(
                    f'<rect class="missing" x="{pin_x:.1f}" y="{top + 1:.1f}" '
                    f'width="{max(gutter + plot - pin_x, 2):.1f}" height="{_ROW - 2:g}"/>'
                )
            near = [a for a, b in places.values() if b == top + _ROW / 2 and abs(a - pin_x) < 18]
            pin_x = max(near) + 18 if near else pin_x
            places[number] = (min(pin_x, width - 9), top + _ROW / 2)
    curves += _draw_marks(places, missing)

    kinds = [kind for kind in KINDS if any(box.kind == kind for box in boxes)]
    narrow, y = width if width <= 720 else 350, bottom + 52
    if marks:
        notes, y = _describe_marks(marks, missing, y, max(narrow, 500))
        words, y = words + notes, y + 29
    legend, y = _legend(kinds, bool(arrows), y, narrow)
    count = Counter(box.kind for box in boxes)
    counted = ", ".join(f"{count[kind]} {KINDS[kind]}" for kind in kinds)
    described = (
        f"{name}, modelled cycles {_number(left)} to {_number(right)}. Lanes: "
        f"{', '.join(lanes)}. Boxes: {counted}. {len(arrows)} arrows from an arrival to a wait."
    )
    described += "".join(f" {i}: {m.what}, line {m.line}." for i, m in enumerate(marks, 1))
    described += f" {missing[0].upper()}{missing[1:]}." * bool(marks) if missing else ""
    patterns = "".join(_pattern(kind) for kind in kinds if kind in _HATCHES)
    size = f"{width:g} {y + 8:g}"
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" class="gdpa-timeline" role="img" '
        f'width="{width:g}" height="{y + 8:g}" viewBox="0 0 {size}" data-start="{left:.10g}" '
        f'data-x="{gutter}" data-scale="{scale:.10g}" data-bottom="{bottom:g}">',
        f"<title>Timeline of {name}</title><desc>{_text(described)}</desc>",
        f"<style>{_STYLE}{_MARKS if marks else ''}</style><defs>{patterns}</defs>",
        *bands, *grid, *shapes, *curves,
        f'<g class="names"><rect class="gutter" width="{gutter - 4}" height="{bottom + 20:g}"/>',
        *words, *legend, "</g></svg>\n",
    ]  # fmt: skip
    return "\n".join(lines)
