"""A page that steps through a launch: its timeline, its source, its barriers and its buffers."""

import html
import json
import re
from collections.abc import Iterable
from dataclasses import asdict
from itertools import pairwise
from pathlib import Path

from .timeline import Event, Timeline

BarrierStates = dict[str, list[tuple[float | None, int, int, int]]]
"""Changes of each barrier: (time, current phase, arrivals and bytes that it lacks). None: before
all time."""
BufferStates = dict[str, list[tuple[float | None, str, str]]]
"""Changes of each buffer: (time, state, lanes that cause it)."""


def barrier_states(events: list[Event]) -> BarrierStates:
    """Compute the changes of each barrier by time."""
    used = [event for event in events if event.kind in ("wait", "arrive") and event.target]
    arrivals = [event for event in used if event.kind == "arrive"]
    count = dict.fromkeys(_by_name(event.target for event in used), 1)
    for event in arrivals:
        if event.lane != "TMA":  # which brings bytes, and is no arrival
            count[event.target] = max(count[event.target], event.pending + 1)
    states: BarrierStates = {name: [(None, 0, count[name], 0)] for name in count}
    for event in sorted(arrivals, key=lambda e: e.end):
        after = (event.phase, event.pending, event.bytes)
        if event.pending == event.bytes == 0:
            after = (event.phase + 1, count[event.target], 0)
        states[event.target].append((event.end, *after))
    return states


def buffer_states(events: list[Event], barriers: BarrierStates) -> BufferStates:
    """Compute the changes of each buffer by time; `barriers`: from `barrier_states`.

    A phase of barrier `k_empty[1]` that completes releases buffer `k[1]`; a buffer without such a
    barrier stays full.
    """
    uses: dict[str, list[Event]] = {}
    for event in events:
        if event.kind in ("copy", "write", "read", "store", "mma"):
            for name in event.target.split(" @ "):  # the operands of an MMA
                if name and name != "registers":
                    uses.setdefault(name, []).append(event)
    states: BufferStates = {}
    for name in _by_name(uses):
        history = barriers.get(re.sub(r"(\[|$)", r"_empty\1", name, count=1), [])
        released = [b[0] for a, b in pairwise(history) if b[1] > a[1]]
        times = {t for e in uses[name] for t in (e.start, e.end)} | set(released)
        states[name] = [(None, "empty", "")]
        for now in sorted(times):
            state = _buffer_state(uses[name], released, bool(history), now)
            if state != states[name][-1][1:]:
                states[name].append((now, *state))
    return states


def _by_name(names: Iterable[str]) -> list[str]:
    """List each name once, k[0], k[1], ... together, in order of the first of them."""
    names = list(dict.fromkeys(names))
    arrays = [re.sub(r"\d+", "", name) for name in names]
    numbers = [[int(digits) for digits in re.findall(r"\d+", name)] for name in names]
    keys = [(arrays.index(array), of_name) for array, of_name in zip(arrays, numbers, strict=True)]
    return [name for _, name in sorted(zip(keys, names, strict=True))]


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
    data = {}
    for name, timeline in timelines.items():
        barriers = barrier_states(events[name])
        first, lines = _excerpt(sources[name], events[name])
        data[name] = {
            "lanes": timeline.lanes(cta),
            "events": [asdict(event) for event in events[name]],
            "times": sorted({t for event in events[name] for t in (event.start, event.end)}),
            "barriers": barriers,
            "buffers": buffer_states(events[name], barriers),
            "svg": timeline.svg(cta, start=start, end=end),
            "wide": timeline.svg(cta, start=start, end=end, width=wide),
            "first": first,
            "lines": lines,
            "outcome": outcomes[name],
        }
    parts = {"TITLE": html.escape(title), "DATA": json.dumps(data).replace("<", "\\u003c")}
    template = Path(__file__).with_name("pipeline.html").read_text(encoding="utf-8")
    return re.sub("__(TITLE|DATA)__", lambda match: parts[match[1]], template)
