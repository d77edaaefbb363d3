"""Builds the timeline of a launch from what the scheduler and the barriers report."""

from typing import Any

from .errors import location
from .timeline import Arrow, Event, Timeline


class Tracer:
    """Called at every event; lanes are roles, or the names of engines."""

    def __init__(self, file: str):
        self.timeline = Timeline(file)

    def __call__(
        self,
        kind: str,
        name: str,
        lane: Any,
        start: float,
        end: float,
        cta: int = -1,
        line: int | None = None,
        waiter: Any = None,
        **fields: Any,
    ) -> None:
        if hasattr(lane, "cta"):
            lane, cta = lane.name, lane.cta.number
        if kind == "arrow":
            arrow = Arrow(waiter.cta.number, name, fields["phase"], lane, start, waiter.name, end)
            self.timeline.arrows.append(arrow)
            return
        line = location()[1] if line is None else line
        self.timeline.events.append(Event(cta, lane, kind, name, start, end, line, **fields))
