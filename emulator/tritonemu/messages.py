"""Formats a finding: source, calls and schedule; as text, JSON and a page."""

import linecache
import os
import re
import shlex
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .errors import PYTEST, TOOL, EmulatorError, Location, calls_to
from .launch import BarrierUse, Report
from .stepper import interactive


def _places(error: EmulatorError) -> list[tuple[str, Location]]:
    """List the statements that a finding is about, each with its part in the finding."""
    statements = [("here", error.location)]
    if hasattr(error, "other"):
        statements.append(("earlier", error.other))
    waits = getattr(error, "waits", ())
    statements += [(wait.role, wait.location) for wait in waits]
    statements += error.related
    statements += [statement for wait in waits for statement in getattr(wait, "related", ())]
    statements += [("barrier", location) for _, location, _ in error.barriers]
    return [(what, location) for what, location in dict.fromkeys(statements) if location[1]]


def _functions(lines: list[str]) -> dict[str, range]:
    """Map the functions at the top of a file to their lines."""
    ranges: dict[str, range] = {}
    for begin, text in enumerate(lines, 1):
        if name := re.match(r"(?:async )?def (\w+)", text):
            end = begin
            while end < len(lines) and re.match(r"\s|\)|$", lines[end]):
                end += 1
            ranges[name[1]] = range(begin, end + 1)
    return ranges


def uses(name: str, definition: Location) -> list[int]:
    """List the lines that name a barrier, or a view of it: of the function that makes it, and of
    those that this calls in the same file."""
    file, line = definition
    lines = ["", *linecache.getlines(file)]
    functions = _functions(lines[1:])
    todo = [each for each, where in functions.items() if line in where]
    reached: dict[str, dict[int, str]] = {}
    while todo:
        each = todo.pop()
        reached[each] = {i: lines[i].partition("#")[0] for i in functions[each][1:]}
        called = set(re.findall(r"(\w+)\(", "".join(reached[each].values())))
        todo += sorted((called & functions.keys()) - reached.keys() - set(todo))
    used = []
    view = re.compile(rf"\s*(\w+) = (?:\w+\.)?(?:local_view\()?{re.escape(name)}\b")
    for numbered in reached.values():
        names = {name, *(of[1] for text in numbered.values() if (of := view.match(text)))}
        named = re.compile(rf"\b(?:{'|'.join(map(re.escape, sorted(names)))})\b")
        used += [i for i, text in numbered.items() if i != line and named.search(text)]
    return sorted(used)


def _calls(location: Location) -> tuple[tuple[str, int, str], ...]:
    """List (file, line, function) from the outermost call, "" for a task, to the statement."""
    calls = calls_to(location)
    return tuple((file, line, name if name != "__task__" else "") for file, line, name in calls)


def _line(file: str, line: int) -> str:
    return linecache.getline(file, line).strip()


def tested() -> str:
    """Return the id of the test that the plugin emulates now, "" if none."""
    test = os.environ.get("PYTEST_CURRENT_TEST", "") if TOOL.get().begin == PYTEST else ""
    return test.rpartition(" (")[0]


def explain(error: EmulatorError) -> str:
    """Format the source of the statements, with the calls that lead there, and the schedule."""
    lines = []
    for what, location in _places(error):
        for i, (file, line, function) in enumerate(reversed(_calls(location))):
            start = f"  {what}: " if i == 0 else "    called from "
            lines.append(f"{start}{file}:{line}{f' in {function}' if function else ''}")
            lines.append(f"      {_line(file, line)}")
    for name, definition, count in error.barriers:
        used = ", ".join(map(str, uses(name, definition)))
        takes = f"{count} arrival{'s' * (count != 1)}"
        lines.append(f"  {name}: {takes} a phase; used in lines {used or 'of other functions'}")
    if test := tested():
        lines.append(f"  again with {TOOL.get().command}{shlex.quote(test)}")
    elif error.schedule:
        lines.append(f'  again with schedule="{error.schedule}"')
    return "\n".join(lines)


def described(error: EmulatorError) -> str:
    """Format a finding: what it is first, then where."""
    schedule = f" (schedule {error.schedule})" * bool(error.schedule)
    return f"{type(error).__name__}{schedule}: {error}\n{explain(error)}"


def painted(text: str, stream: Any) -> str:
    """Colour the verdict, which comes first, if the stream is a terminal that wants colours."""
    if not stream.isatty() or os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb":
        return text
    colour = 32 if text.startswith("nothing found") else 31
    return re.sub(r"\A[^:;\n]+", rf"\033[1;{colour}m\g<0>\033[0m", text)


def finding_as_json(error: EmulatorError, replay: str = "") -> dict[str, Any]:
    """Convert a finding to JSON values; its fields are in docs/api.md."""
    places = []
    for what, location in _places(error):
        calls = [
            {"file": file, "line": line, "function": function, "source": _line(file, line)}
            for file, line, function in _calls(location)
        ]
        places.append({"what": what, "calls": calls})
    named = {name: getattr(error, name, "") for name in ("role", "buffer", "barrier")}
    barriers = [
        {"name": name, "count": count, "lines": uses(name, definition)}
        for name, definition, count in error.barriers
    ]
    return {
        "kind": type(error).__name__,
        "message": str(error.args[0]),
        **named,
        "places": places,
        "barriers": barriers,
        "kernel": error.report.kernel if error.report else "",
        "schedule": error.schedule,
        "replay": replay,
    }


def page(report: Any, error: EmulatorError | None = None) -> str:
    """Build a page that steps through a report's traced launch, up to a finding if any: the CTA of
    its last mark, or the first traced."""
    timeline, name = report.timeline, report.kernel
    source = Path(timeline.file).read_text(encoding="utf-8")
    traced = {event.cta for event in timeline.events}
    marked = [mark.cta for mark in timeline.marks if mark.cta in traced]
    return interactive(
        {name: timeline},
        {name: source},
        title=f"{type(error).__name__} in {name}" if error else name,
        outcomes={name: f"{error}\n{explain(error)}" if error else "The kernel ends."},
        cta=marked[-1] if marked else min(traced),
    )


def unjudged_line(file: str, line: int, question: str, times: int) -> str:
    return (
        f"could not judge {times} access{'es' * (times != 1)} at {file}:{line}: the compiled code "
        f"does not tell {question}"
    )


def unwrapped_line(kernel: str, barrier: str, missing: str) -> str:
    return f"barrier {barrier} of {kernel}: {missing}"


@dataclass
class Remarks:
    """Notes of launches beside their findings.

    notes: what may be meant so. allowed: how often a comment allowed each (kind, file, line,
    reason). unjudged: how often each (file, line, question) could not be judged. barriers: use of
    each mbarrier, by kernel and name: the most of all launches.
    """

    notes: list[str] = field(default_factory=list)
    allowed: dict[tuple[str, str, int, str], int] = field(default_factory=dict)
    unjudged: dict[tuple[str, int, str], int] = field(default_factory=dict)
    barriers: dict[tuple[str, str], BarrierUse] = field(default_factory=dict)

    def add(self, reports: Iterable[Report]) -> None:
        for report in reports:
            self.notes += [note for note in report.notes if note not in self.notes]
            for times, others in (
                (self.allowed, report.allowed), (self.unjudged, report.unjudged),
            ):  # fmt: skip
                times.update({key: times.get(key, 0) + n for key, n in others.items()})
            for name, use in report.barrier_use.items():
                self.barriers.setdefault((report.kernel, name), BarrierUse(use.count)).join(use)

    @property
    def unwrapped(self) -> dict[tuple[str, str], str]:
        """Phases of mbarriers that were not seen, by kernel and name.

        Of those only whose parity is computed, as in a ring; an array of which all lack the same is
        named once.
        """
        arrays: dict[tuple[str, str], dict[str, BarrierUse]] = {}
        for (kernel, name), use in self.barriers.items():
            arrays.setdefault((kernel, name.partition("[")[0]), {})[name] = use
        missing: dict[tuple[str, str], str] = {}
        for (kernel, array), members in arrays.items():
            if any(use.turns for use in members.values()):
                named = {name: use.missing for name, use in members.items()}
                if len(set(named.values())) == 1:
                    named = {array: next(iter(named.values()))}
                missing |= {(kernel, name): what for name, what in named.items() if what}
        return missing

    def lines(self, after: Mapping[Any, str] | None = None) -> list[str]:
        """Format a line for each; after: texts to go on with, by note or key."""
        lines = {note: f"note: {note}" for note in self.notes}
        for (kind, file, line, reason), times in self.allowed.items():
            often = "once" if times == 1 else f"{times} times"
            text = f"allowed: {kind} at {file}:{line}, found {often}: {reason}"
            lines[kind, file, line, reason] = text
        lines |= {key: unjudged_line(*key, times) for key, times in self.unjudged.items()}
        lines |= {key: unwrapped_line(*key, missing) for key, missing in self.unwrapped.items()}
        return [f"{line}{(after or {}).get(key, '')}" for key, line in lines.items()]

    def as_json(self) -> dict[str, Any]:
        """Convert to JSON values; the fields are in docs/api.md."""

        def listed(values: Mapping[Any, Any], *names: str) -> list[dict[str, Any]]:
            return [dict(zip(names, (*key, n), strict=True)) for key, n in values.items()]

        return {
            "notes": self.notes,
            "allowed": listed(self.allowed, "kind", "file", "line", "reason", "times"),
            "unjudged": listed(self.unjudged, "file", "line", "question", "times"),
            "unwrapped": listed(self.unwrapped, "kernel", "barrier", "missing"),
        }
