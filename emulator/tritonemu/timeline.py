"""The timeline of an emulated launch: a trace, a figure of it, and a page to step through.

Times are modelled cycles, not measured ones. Needs the standard library only.
"""

import html
import json
import math
import re
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

from .drawing import Arrow, Event, Mark, draw

ENGINES = ("TMA", "tensor core")
"""Lanes that are no role, drawn below the roles in this order."""

MOST_MARKS = 6  # of a finding that one figure shows
MOST_ZOOM = 8  # how much a figure of a finding enlarges,
LEAST_CYCLES = 1000  # and how many cycles it shows at least


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
        self,
        cta: int = 0,
        *,
        start: float | None = None,
        end: float | None = None,
        width: float = 720,
    ) -> str:
        """Draw one CTA: a row per role, then TMA and tensor core, and barrier arrows.

        start, end: cycles to show, everything by default. width: in pixels, of the whole figure.
        The same text for the same timeline; readable on white and on black. ValueError if the CTA
        did nothing between start and end.
        """
        marks = [self._placed(mark) for mark in self.marks]
        marks = marks if any(mark.cta == cta for mark in marks) else []
        return self._drawn([cta], marks, start, end, width)

    def finding(self, width: float = 720) -> str:
        """Draw the first marks: the CTAs that they are in, at about that time.

        All of the first CTA if there are no marks; ValueError if nothing happened there either.
        """
        marks = [self._placed(mark) for mark in self.marks[:MOST_MARKS]]
        if not marks:
            return self.svg(min((event.cta for event in self.events), default=0), width=width)
        ctas = sorted({mark.cta for mark in marks})
        times = [t for e in self.events if e.cta in ctas for t in (e.start, e.end)]
        times += [mark.time for mark in marks]
        first, last = min(mark.time for mark in marks), max(mark.time for mark in marks)
        around = max(last - first, (max(times) - min(times)) / MOST_ZOOM, LEAST_CYCLES)
        start, end = max(first - around / 2, min(times)), min(last + around / 2, max(times))
        return self._drawn(ctas, marks, start, max(end, start + 1), width)

    def _placed(self, mark: Mark) -> Mark:
        """Move a mark in an engine to the middle of the work that the same line asked for."""
        if mark.lane not in ENGINES:
            return mark
        there = mark.cta, mark.lane, mark.line
        work = (e for e in self.events if (e.cta, e.lane, e.line) == there and e.kind != "arrive")
        event = next((e for e in work if e.start >= mark.time), None)
        return mark if event is None else replace(mark, time=(event.start + event.end) / 2)

    def _drawn(
        self, ctas: list[int], marks: list[Mark], start: float | None, end: float | None,
        width: float,
    ) -> str:  # fmt: skip
        name = f"CTA {ctas[0]}"
        if len(ctas) > 1:
            name = f"CTAs {', '.join(map(str, ctas[:-1]))} and {ctas[-1]}"

        def lane(cta: int, lane: str) -> str:
            return lane if len(ctas) == 1 else f"CTA {cta} {lane}"

        events = [replace(e, lane=lane(e.cta, e.lane)) for e in self.events if e.cta in ctas]
        times = [t for e in events for t in (e.start, e.end)]
        times += [mark.time for mark in marks if mark.cta in ctas]
        left = min(times, default=0.0) if start is None else start
        right = max(times, default=0.0) if end is None else end
        arrows = [
            replace(a, source=lane(a.cta, a.source), target=lane(a.cta, a.target))
            for a in self.arrows
            if a.cta in ctas and left <= a.left <= a.right <= right
        ]
        shown = [e for e in events if e.end >= left and e.start <= right]
        if not (shown or marks) or right <= left:
            raise ValueError(f"{name} must do something in [{left}, {right}], got no event")
        lanes = [lane(cta, each) for cta in ctas for each in self.lanes(cta)]
        here = [replace(m, lane=lane(m.cta, m.lane) if m.cta in ctas else "") for m in marks]
        span = {"name": name, "missing": self.missing, "left": left, "right": right}
        return draw(shown, arrows, lanes, here, **span, width=width)


def barrier_states(events: list[Event]) -> dict[str, list[tuple[float, int, int, int]]]:
    """Compute the changes of each barrier by time: (time, current phase, arrivals and bytes that it
    lacks)."""
    used = [event for event in events if event.kind in ("wait", "arrive") and event.target]
    arrivals = [event for event in used if event.kind == "arrive"]
    count = dict.fromkeys(_by_name(event.target for event in used), 1)
    for event in arrivals:
        if event.lane != "TMA":  # which brings bytes, and is no arrival
            count[event.target] = max(count[event.target], event.pending + 1)
    states = {name: [(-math.inf, 0, count[name], 0)] for name in count}
    for event in sorted(arrivals, key=lambda e: e.end):
        after = (event.phase, event.pending, event.bytes)
        if event.pending == event.bytes == 0:
            after = (event.phase + 1, count[event.target], 0)
        states[event.target].append((event.end, *after))
    return states


def buffer_states(
    events: list[Event], barriers: dict[str, list[tuple[float, int, int, int]]]
) -> dict[str, list[tuple[float, str, str]]]:
    """Compute the changes of each buffer by time: (time, state, lanes that cause it).

    `barriers`: from `barrier_states`. A phase of barrier `k_empty[1]` that completes releases
    buffer `k[1]`; a buffer without such a barrier stays full.
    """
    uses: dict[str, list[Event]] = {}
    for event in events:
        if event.kind in ("copy", "write", "read", "store", "mma"):
            for name in event.target.split(" @ "):  # the operands of an MMA
                if name and name != "registers":
                    uses.setdefault(name, []).append(event)
    states = {}
    for name in _by_name(uses):
        history = barriers.get(re.sub(r"(\[|$)", r"_empty\1", name, count=1), [])
        released = [b[0] for a, b in pairwise(history) if b[1] > a[1]]
        times = {t for e in uses[name] for t in (e.start, e.end)} | set(released)
        states[name] = [(-math.inf, "empty", "")]
        for now in sorted(times):
            state = _buffer_state(uses[name], released, bool(history), now)
            if state != states[name][-1][1:]:
                states[name].append((now, *state))
    return states


def _by_name(names: Iterable[str]) -> list[str]:
    """List each name once, k[0], k[1], ... together, in order of the first of them."""
    groups: dict[str, dict[str, None]] = {}
    for name in names:
        groups.setdefault(re.sub(r"\d+", "", name), {})[name] = None
    number = {
        n: [int(d) for d in re.findall(r"\d+", n)] for group in groups.values() for n in group
    }
    return [name for group in groups.values() for name in sorted(group, key=number.get)]


def _buffer_state(
    users: list[Event], released: list[float], guarded: bool, now: float
) -> tuple[str, str]:
    """Return the state of one buffer at a time, and the lanes that cause it."""
    fills = [e for e in users if e.kind in ("copy", "write") and e.start <= now]
    reads = [e for e in users if e.kind not in ("copy", "write") and e.start <= now]
    active = [e for e in fills + reads if now < e.end or e.start == now == e.end]
    lanes = " and ".join(dict.fromkeys(event.lane for event in active))
    if not fills:
        return ("being read", lanes) if active else ("empty", "")
    fill = max(fills, key=lambda e: e.start)
    clash = [e.lane for e in reads if e.start < fill.end and fill.start < e.end]
    if clash:
        return "overwritten while read", f"{fill.lane} over {clash[-1]}"
    earlier = [e.end for e in fills if e.end <= fill.start and e is not fill]
    if guarded and earlier and not any(max(earlier) <= t <= fill.start for t in released):
        return "overwritten before its release", fill.lane
    if fill in active:
        return "filling", lanes
    if active:
        return "being read", lanes
    return ("released", "") if any(fill.end <= t <= now for t in released) else ("full", "")


def _excerpt(source: str, events: list[Event]) -> tuple[int, list[str]]:
    """Return the lines of a file from the function of the first line used to the last one used."""
    lines = source.splitlines()
    used = [event.line for event in events if 0 < event.line <= len(lines)]
    first, last = min(used, default=1), max(used, default=len(lines))
    while first > 1 and not re.match(r"(async )?def ", lines[first - 1]):
        first -= 1
    while first > 1 and lines[first - 2].strip():  # its decorators
        first -= 1
    while last < len(lines) and re.match(r"\s|$", lines[last]):
        last += 1
    return first, "\n".join(lines[first - 1 : last]).rstrip().splitlines()


def _variant(
    events: list[Event], timeline: Timeline, source: str, outcome: str, wide: float, **span: float
) -> dict[str, Any]:
    """Build the data of one variant for the page: `events` are those of its CTA, `span` what is
    drawn, `wide` the width of the second drawing."""
    barriers = barrier_states(events)
    cta = events[0].cta
    first, lines = _excerpt(source, events)
    return {
        "lanes": timeline.lanes(cta),
        "events": [asdict(event) for event in events],
        "times": sorted({t for event in events for t in (event.start, event.end)}),
        "barriers": _finite(barriers),
        "buffers": _finite(buffer_states(events, barriers)),
        "svg": timeline.svg(cta, **span),
        "wide": timeline.svg(cta, **span, width=wide),
        "first": first,
        "lines": lines,
        "outcome": outcome,
    }


def _finite(states: dict[str, list[tuple]]) -> dict[str, list[list]]:
    """Convert states to JSON, which has no infinity: null is before everything."""
    return {name: [[None, *list_[0][1:]], *map(list, list_[1:])] for name, list_ in states.items()}


def interactive(
    timelines: dict[str, Timeline],
    sources: dict[str, str],
    *,
    title: str,
    outcomes: dict[str, str],
    cta: int = 0,
) -> str:
    """Build a self-contained HTML page that steps through one CTA of each variant, on one axis.

    timelines: variant -> its trace, in the order of the buttons. sources: variant -> the text of
    the whole file `Timeline.file`. outcomes: variant -> what is shown after its last step.
    ValueError if the three do not name the same variants, or one of them does nothing on the CTA.
    """
    if not timelines or not timelines.keys() == sources.keys() == outcomes.keys():
        got = [list(names) for names in (timelines, sources, outcomes)]
        raise ValueError(f"timelines, sources and outcomes must name the same variants, got {got}")
    events = {name: [e for e in of.events if e.cta == cta] for name, of in timelines.items()}
    if idle := [name for name, of_cta in events.items() if not of_cta]:
        raise ValueError(f"CTA {cta} must do something in every variant, got no event of {idle}")
    every = [event for of_cta in events.values() for event in of_cta]
    start, end = min(e.start for e in every), max(e.end for e in every)
    long = sorted(e.end - e.start for e in every if e.end > e.start) or [1.0]
    wide = round(min(max(40 * (end - start) / long[len(long) // 2], 1160), 5000))
    drawn = {"wide": wide, "start": start, "end": end}
    data = {
        name: _variant(events[name], timeline, sources[name], outcomes[name], **drawn)
        for name, timeline in timelines.items()
    }
    parts = {"TITLE": html.escape(title), "DATA": json.dumps(data).replace("<", "\\u003c")}
    template = Path(__file__).with_name("pipeline.html").read_text(encoding="utf-8")
    return re.sub("__(TITLE|DATA)__", lambda match: parts[match[1]], template)
