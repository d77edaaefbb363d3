"""The timeline of an emulated launch: its events, and a figure of them as SVG.

Times are modelled cycles, not measured ones. Needs the standard library only.
"""

import html
import math
import textwrap
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

_STRIPES = '<path d="M-2 2l4-4M0 8l8-8M6 10l4-4"/>'


class Kind(NamedTuple):
    """A kind of events: its word in the legend, and its fill, hatched for readers who cannot tell
    colours. Contrast of the fills: at least 4.5 with their white labels, 3.5 with a dark page."""

    word: str
    colour: str
    hatch: str = ""


KINDS = {
    "compute": Kind("compute", "#007a63"),
    "mma": Kind("MMA", "#c24a00", '<circle cx="2" cy="2" r="1"/><circle cx="6" cy="6" r="1"/>'),
    "copy": Kind("TMA load", "#1a73b8", _STRIPES),
    "store": Kind("TMA store", "#7257d0", '<path d="M-2 6l4 4M0 0l8 8M6-2l4 4"/>'),
    "read": Kind("read a buffer", "#7d6b00", '<path d="M0 2h8M0 6h8"/>'),
    "write": Kind("write a buffer", "#b04488", '<path d="M2 0v8M6 0v8"/>'),
    "wait": Kind("wait", "#787878", _STRIPES),
    "arrive": Kind("arrive", "#6b6b6b"),
}

ENGINES = ("TMA", "tensor core")
"""Lanes that are no role, drawn below the roles in this order."""

MOST_MARKS = 6  # of a finding that one figure shows
MOST_ZOOM = 8  # how much a figure of a finding enlarges,
LEAST_CYCLES = 1000  # and how many cycles it shows at least


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

    def __str__(self) -> str:
        return f"{self.what}, line {self.line}" if self.line else self.what


@dataclass
class Timeline:
    """The trace of one launch. `file` holds the kernel.

    busy: of each CTA, the cycles that each of its engines worked; more than the lanes show. marks,
    missing: of a finding that ended the launch, where it shows, and what there should have been
    between two marks.
    """

    file: str
    events: list[Event] = field(default_factory=list)
    arrows: list[Arrow] = field(default_factory=list)
    busy: dict[int, dict[str, float]] = field(default_factory=dict)
    marks: tuple[Mark, ...] = ()
    missing: str = ""

    def lanes(self, cta: int = 0) -> list[str]:
        """List roles in order of appearance, then the engines that did something."""
        names = dict.fromkeys(e.lane for e in (*self.events, *self.marks) if e.cta == cta)
        roles = [lane for lane in names if lane not in ENGINES]
        return roles + [lane for lane in ENGINES if lane in names]

    def svg(
        self, cta: int = 0, *, start: float | None = None, end: float | None = None,
        width: float = 720,
    ) -> str:  # fmt: skip
        """Draw one CTA: a row per role, then TMA and tensor core, and barrier arrows.

        start, end: cycles to show, everything by default. width: in pixels, of the whole figure.
        The same text for the same timeline; readable on white and on black. ValueError if the CTA
        did nothing between start and end.
        """
        marks = self._placed(self.marks) if any(mark.cta == cta for mark in self.marks) else []
        return _Figure(self, [cta], marks, start, end, width).svg()

    def finding(self, width: float = 720) -> str:
        """Draw the first marks: the CTAs that they are in, at about that time.

        All of the first CTA if there are no marks; ValueError if nothing happened there either.
        """
        marks = self._placed(self.marks[:MOST_MARKS])
        if not marks:
            return self.svg(min((event.cta for event in self.events), default=0), width=width)
        ctas = sorted({mark.cta for mark in marks})
        times = _times((e for e in self.events if e.cta in ctas), marks)
        first, last = min(mark.time for mark in marks), max(mark.time for mark in marks)
        around = max(last - first, (max(times) - min(times)) / MOST_ZOOM, LEAST_CYCLES)
        start, end = max(first - around / 2, min(times)), min(last + around / 2, max(times))
        return _Figure(self, ctas, marks, start, max(end, start + 1), width).svg()

    def _placed(self, marks: Iterable[Mark]) -> list[Mark]:
        """Move marks in an engine to the middle of the work that the same line asked for."""
        placed = []
        for mark in marks:
            there = mark.cta, mark.lane, mark.line
            events = (e for e in self.events if (e.cta, e.lane, e.line) == there)
            work = (e for e in events if e.kind != "arrive" and e.start >= mark.time)
            event = next(work, None) if mark.lane in ENGINES else None
            middle = (event.start + event.end) / 2 if event else mark.time
            placed.append(replace(mark, time=middle))
        return placed


def _times(events: Iterable[Event], marks: Iterable[Mark]) -> list[float]:
    ends = [time for event in events for time in (event.start, event.end)]
    return ends + [mark.time for mark in marks]


class _Box:
    """Events of one lane that are drawn as one box, in the row-th row of the lane."""

    def __init__(self, events: list[Event]):
        self.kind, self.target, self.row = events[0].kind, events[0].target, 0
        self.start = min(event.start for event in events)
        self.end = max(event.end for event in events)
        self.names = [name for name in dict.fromkeys(event.name for event in events) if name]
        self.lines = sorted({event.line for event in events if event.line})

    def __str__(self) -> str:
        lines = self.lines or [0]
        where = f"line {lines[0]}" if len(lines) == 1 else f"lines {lines[0]} to {lines[-1]}"
        cycles = f"cycles {_number(self.start)} to {_number(self.end)}"
        return f"{', '.join(self.names) or KINDS[self.kind].word}: {cycles}, {where}"


def _boxes(events: Iterable[Event], gap: float) -> list[_Box]:
    """Box the events of one lane, compute events at most `gap` apart together.

    Each box is in the first row that is free when it starts. What takes no time shares the row of
    the box at whose end, or else in which, it happens.
    """
    groups: list[list[Event]] = []
    for event in sorted(events, key=lambda e: e.start):
        last = groups[-1][-1] if groups else None
        merge = last is not None and last.kind == event.kind == "compute"
        if merge and event.start - last.end <= gap:
            groups[-1].append(event)
        else:
            groups.append([event])
    boxes = sorted(map(_Box, groups), key=lambda box: (box.start, -box.end))
    free: list[float] = []
    lasting = [box for box in boxes if box.end > box.start]
    for box in lasting:
        box.row = next((row for row, end in enumerate(free) if end <= box.start), len(free))
        free[box.row : box.row + 1] = [box.end]
    for box in boxes:
        if box.end == box.start:
            box.row = _row_at(lasting, box.start)
    return boxes


def _row_at(boxes: Iterable[_Box], time: float, line: int = 0) -> int:
    """Return the row of the box of a lane that ends at `time`, or else of the one around it that
    ends first, of those of `line` if there are any; 0 without a box."""
    around = [box for box in boxes if box.start <= time <= box.end]
    nearest = min(around, key=lambda box: (line not in box.lines, box.end), default=None)
    return nearest.row if nearest else 0


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
_TOP, _MARGIN = 10.0, 10.0
_CHAR = 6.9  # width of a letter, rather wide
_ARROW = "completes a phase: the wait ends"


def _number(value: float) -> str:
    return f"{value:.1f}".removesuffix(".0")


def _text(text: str) -> str:
    return html.escape(text, quote=False)


def _pattern(kind: str) -> str:
    """Draw the fill of a kind, hatched in white, or for a wait the hatch alone."""
    _, colour, hatch = KINDS[kind]
    ground, ink, strength = f'<rect width="8" height="8" fill="{colour}"/>', "#fff", 0.3
    if kind == "wait":
        ground, ink, strength = "", colour, 0.38
    fill = ink if kind == "mma" else "none"
    return (
        f'<pattern id="gdpa-{kind}" width="8" height="8" patternUnits="userSpaceOnUse">{ground}'
        f'<g stroke="{ink}" stroke-width=".8" opacity="{strength}" fill="{fill}">{hatch}'
        f"</g></pattern>"
    )


def _shape(kind: str, x: float, y: float, width: float, height: float) -> str:
    """Draw a box of a kind; an arrival that takes no time is a pin."""
    _, colour, hatch = KINDS[kind]
    if kind == "arrive" and width < 5:
        return (
            f'<path d="M{x:.1f} {y - 4:.1f}v{height + 4:.1f}" stroke="{colour}" '
            f'stroke-width="2"/><circle cx="{x:.1f}" cy="{y - 4:.1f}" r="3.4" '
            f'fill="{colour}"/>'
        )
    fill = f"url(#gdpa-{kind})" if hatch else colour
    return (
        f'<rect x="{x + 0.8:.1f}" y="{y + 1:.1f}" width="{max(width - 1.6, 0.4):.1f}" '
        f'height="{height - 2:.1f}" rx="2" fill="{fill}" stroke="{colour}"/>'
    )


def _pin(number: int, x: float, y: float) -> str:
    return (
        f'<circle class="mark" cx="{x:.1f}" cy="{y:.1f}" r="8"/>'
        f'<text class="label" x="{x:.1f}" y="{y + 4:.1f}" stroke="none">{number}</text>'
    )


def _cross(x: float, y: float) -> str:
    return f'<path class="cross" d="M{x - 5:.1f} {y - 5:.1f}l10 10m0-10l-10 10"/>'


class _Figure:
    """Some CTAs of a timeline between two times, and where they lie in the drawing.

    A lane is a CTA and a name. boxes: of each. tops: the y of its first row. left, right: the
    times. gutter: the x of `left`; plot: how wide the rest is, by `scale` a cycle. bottom: the y of
    the axis. ValueError if nothing happens there.
    """

    def __init__(
        self, timeline: Timeline, ctas: list[int], marks: Sequence[Mark], start: float | None,
        end: float | None, width: float,
    ):  # fmt: skip
        self.ctas, self.marks, self.missing, self.width = ctas, marks, timeline.missing, width
        events = [event for event in timeline.events if event.cta in ctas]
        times = _times(events, (mark for mark in marks if mark.cta in ctas))
        self.left = left = min(times, default=0.0) if start is None else start
        self.right = right = max(times, default=0.0) if end is None else end
        events = [event for event in events if event.end >= left and event.start <= right]
        if not (events or marks) or right <= left:
            raise ValueError(f"{self.name} must do something in [{left}, {right}], got no event")
        arrows = (arrow for arrow in timeline.arrows if arrow.cta in ctas)
        self.arrows = [arrow for arrow in arrows if left <= arrow.left <= arrow.right <= right]
        lanes = [(cta, lane) for cta in ctas for lane in timeline.lanes(cta)]
        self.gutter = round(_CHAR * max(len(self.label(*lane)) for lane in lanes) + 14)
        self.plot = width - self.gutter - _MARGIN
        self.scale = self.plot / (right - left)
        self.boxes: dict[tuple[int, str], list[_Box]] = {}
        self.tops, y = {}, _TOP
        for lane in lanes:
            of_lane = (event for event in events if (event.cta, event.lane) == lane)
            self.boxes[lane], self.tops[lane] = _boxes(of_lane, 0.5 / self.scale), y
            y += self.height(lane) + _GAP
        self.bottom = y - _GAP + 7

    @property
    def name(self) -> str:
        *others, last = map(str, self.ctas)
        return f"CTAs {', '.join(others)} and {last}" if others else f"CTA {last}"

    def label(self, cta: int, lane: str) -> str:
        return lane if len(self.ctas) == 1 else f"CTA {cta} {lane}"

    def height(self, lane: tuple[int, str]) -> float:
        return _ROW * (1 + max((box.row for box in self.boxes[lane]), default=0))

    def x(self, time: float) -> float:
        return self.gutter + (min(max(time, self.left), self.right) - self.left) * self.scale

    def y(self, lane: tuple[int, str], time: float, line: int = 0) -> float:
        """Compute the top of the row in which something happens; that of the figure elsewhere."""
        return self.tops.get(lane, _TOP) + _ROW * _row_at(self.boxes.get(lane, ()), time, line)

    def svg(self) -> str:
        boxes = [(lane, box) for lane, of_lane in self.boxes.items() for box in of_lane]
        count = Counter(box.kind for _, box in boxes)
        kinds = [kind for kind in KINDS if count[kind]]
        frames, pins = self._draw_marks()
        narrow, y = self.width if self.width <= 720 else 350, self.bottom + 52
        notes: list[str] = []
        if self.marks:
            notes, y = self._describe_marks(y, max(narrow, 500))
        legend, y = self._draw_legend(kinds, y, narrow)
        described = [
            f"{self.name}, modelled cycles {_number(self.left)} to {_number(self.right)}.",
            f"Lanes: {', '.join(self.label(*lane) for lane in self.boxes)}.",
            f"Boxes: {', '.join(f'{count[kind]} {KINDS[kind].word}' for kind in kinds)}.",
            f"{len(self.arrows)} arrows from an arrival to a wait.",
            *(f"{number}: {mark}." for number, mark in enumerate(self.marks, 1)),
        ]
        if self.marks and self.missing:
            described.append(f"{self.missing[0].upper()}{self.missing[1:]}.")
        patterns = "".join(_pattern(kind) for kind in kinds if KINDS[kind].hatch)
        lines = [
            f'<svg xmlns="http://www.w3.org/2000/svg" class="gdpa-timeline" role="img" '
            f'width="{self.width:g}" height="{y + 8:g}" viewBox="0 0 {self.width:g} {y + 8:g}" '
            f'data-start="{self.left:.10g}" data-x="{self.gutter}" '
            f'data-scale="{self.scale:.10g}" data-bottom="{self.bottom:g}">',
            f"<title>Timeline of {self.name}</title><desc>{_text(' '.join(described))}</desc>",
            f"<style>{_STYLE}{_MARKS if self.marks else ''}</style><defs>{patterns}</defs>",
            *(
                f'<rect class="band" x="{self.gutter}" y="{top:g}" width="{self.plot:g}" '
                f'height="{self.height(lane):g}"/>'
                for lane, top in self.tops.items()
            ),
            *self._draw_axis(),
            *(self._draw_box(lane, box) for lane, box in boxes),
            *frames,
            *map(self._draw_arrow, self.arrows),
            *pins,
            f'<g class="names"><rect class="gutter" width="{self.gutter - 4}" '
            f'height="{self.bottom + 20:g}"/>',
            *(
                f'<text x="0" y="{top + 17:g}">{_text(self.label(*lane))}</text>'
                for lane, top in self.tops.items()
            ),
            f'<text x="{self.gutter}" y="{self.bottom + 30:g}">cycles (modelled)</text>',
            *notes, *legend, "</g></svg>\n",
        ]  # fmt: skip
        return "\n".join(filter(None, lines))

    def _draw_axis(self) -> Iterable[str]:
        """Draw multiples of 1, 2 or 5 times a power of ten, at least 64 pixels apart."""
        power = 10.0 ** math.floor(math.log10(64 / self.scale))
        step = next(power * n for n in (1, 2, 5, 10) if power * n * self.scale >= 64)
        for n in range(math.ceil(self.left / step), math.floor(self.right / step) + 1):
            x, anchor = self.x(n * step), "middle"
            yield f'<path class="grid" d="M{x:.1f} {_TOP - 4:g}V{self.bottom:g}"/>'
            if x > self.width - 20:
                x, anchor = self.width, "end"
            yield (
                f'<text x="{x:.1f}" y="{self.bottom + 13:g}" text-anchor="{anchor}">'
                f"{n * step:g}</text>"
            )

    def _draw_box(self, lane: tuple[int, str], box: _Box) -> str:
        """Draw a box with its tooltip, and the longest of its names that fits."""
        left, right, top = self.x(box.start), self.x(box.end), self.tops[lane] + _ROW * box.row
        if box.kind == "wait" and right - left <= 1:
            return ""
        candidates = [", ".join(box.names), *box.names[:1], box.target]
        fits = (name for name in candidates if name and _CHAR * len(name) + 8 <= right - left)
        label = next(fits, "")
        if label:
            label = (
                f'<text class="label" x="{(left + right) / 2:.1f}" y="{top + 17:.1f}" '
                f'stroke="{KINDS[box.kind].colour}">{_text(label)}</text>'
            )
        return (
            f'<g class="{box.kind}"><title>{_text(str(box))}</title>'
            f"{_shape(box.kind, left, top, right - left, _ROW)}{label}</g>"
        )

    def _draw_arrow(self, arrow: Arrow) -> str:
        """Draw a curve from the box of an arrival to the box of a wait."""
        source, target = (arrow.cta, arrow.source), (arrow.cta, arrow.target)
        a, b = self.x(arrow.left), self.x(arrow.right)
        from_y, to_y = self.y(source, arrow.left), self.y(target, arrow.right)
        down = 1 if to_y > from_y else -1
        to_y += _ROW if to_y < from_y else 0
        from_y += _ROW if down > 0 else 0
        bend = max(abs(to_y - from_y) / 2, 14) * down
        title = (
            f"{arrow.barrier}, phase {arrow.phase}: {self.label(*source)} at "
            f"{_number(arrow.left)} releases {self.label(*target)} at {_number(arrow.right)}"
        )
        return (
            f'<g class="release"><title>{_text(title)}</title><path class="arrow" d="M{a:.1f} '
            f"{from_y:.1f}C{a:.1f} {from_y + bend:.1f} {b:.1f} {to_y - bend:.1f} {b:.1f} "
            f'{to_y - 5 * down:.1f}"/>'
            f'<path class="head" d="M{b:.1f} {to_y:.1f}l-3.4 {-7 * down}h6.8z"/></g>'
        )

    def _draw_marks(self) -> tuple[list[str], list[str]]:
        """Draw what lasts to the end, and the pins of marks, with what is missing between two."""
        frames: list[str] = []
        places: dict[int, tuple[float, float]] = {}
        for number, mark in enumerate(self.marks, 1):
            lane = mark.cta, mark.lane
            if lane not in self.tops or not self.left <= mark.time <= self.right:
                continue
            x, top = self.x(mark.time), self.y(lane, mark.time, mark.line)
            if mark.lasts:
                frames.append(
                    f'<rect class="missing" x="{x:.1f}" y="{top + 1:.1f}" '
                    f'width="{max(self.gutter + self.plot - x, 2):.1f}" height="{_ROW - 2:g}"/>'
                )
            middle = top + _ROW / 2
            near = [a for a, b in places.values() if b == middle and abs(a - x) < 18]
            places[number] = min(max(near) + 18 if near else x, self.width - 9), middle
        pins = [_pin(number, *point) for number, point in places.items()]
        if self.missing and len(places) == 2:
            (a, c), (b, d) = places.values()
            pins.insert(
                0,
                f'<g class="unordered"><title>{_text(self.missing)}</title>'
                f'<path class="missing" d="M{a:.1f} {c:.1f}L{b:.1f} {d:.1f}"/>'
                f"{_cross((a + b) / 2, (c + d) / 2)}</g>",
            )
        return frames, pins

    def _describe_marks(self, y: float, width: float) -> tuple[list[str], float]:
        """Write each mark and what is missing in lines of `width`; return them, and the y below."""
        drawn = []
        for number, mark in enumerate([*self.marks, *filter(None, [self.missing])], 1):
            drawn.append(_pin(number, 9, y - 4) if isinstance(mark, Mark) else _cross(9, y - 4))
            for part in textwrap.wrap(str(mark), max(int((width - 30) / _CHAR), 20)):
                drawn.append(f'<text x="25" y="{y:g}">{_text(part)}</text>')
                y += 17
            y += 6
        return drawn, y + 6

    def _draw_legend(self, kinds: list[str], y: float, width: float) -> tuple[list[str], float]:
        """Draw swatches and words in lines of `width`, the first at y; return the y of the last."""
        entries, x = [], 0.0
        words = [(kind, KINDS[kind].word) for kind in kinds] + [("", _ARROW)] * bool(self.arrows)
        for kind, word in words:
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
