"""Formats a finding: source, calls and schedule; as text, JSON and a page."""

import linecache
import os
import re
import shlex
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from .errors import PYTEST, EmulatorError, Location, flags_begin, pytest_command
from .launch import BarrierUse
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
    calls = getattr(location, "chain", ()) or ((*location, ""),)
    return tuple((file, line, name if name != "__task__" else "") for file, line, name in calls)


def _line(file: str, line: int) -> str:
    return linecache.getline(file, line).strip()


def tested() -> str:
    """Return the id of the test that the plugin emulates now, "" if none."""
    test = os.environ.get("PYTEST_CURRENT_TEST", "") if flags_begin() == PYTEST else ""
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
        lines.append(f"  again with {pytest_command()}{shlex.quote(test)}")
    elif error.schedule:
        lines.append(f'  again with schedule="{error.schedule}"')
    return "\n".join(lines)


def described(error: EmulatorError) -> str:
    """Format a finding: what it is first, then where."""
    schedule = f" (schedule {error.schedule})" * bool(error.schedule)
    return f"{type(error).__name__}{schedule}: {error}\n{explain(error)}"


def remarks(reports: Iterable[Any]) -> list[str]:
    """List, a line for each, what there is to say of launches without a finding."""
    return [
        *(f"note: {note}" for note in notes(reports)),
        *allowed_messages(allowed(reports)),
        *unjudged_messages(unjudged(reports)),
        *unwrapped_messages(unwrapped(barriers(reports))),
    ]


def painted(text: str, stream: Any) -> str:
    """Colour what is said first, the places and their source, if the stream is a terminal and
    NO_COLOR is not set."""
    if not stream.isatty() or os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb":
        return text
    verdict = "32" if text.startswith("nothing found") else "31"
    text = re.sub(r"\A[^:;\n]+", rf"\033[1;{verdict}m\g<0>\033[0m", text)
    text = re.sub(r"(?m)^  (?:[^\s:][^:\n]*:)(?= \S+:\d)", "\033[36m\\g<0>\033[0m", text)
    return re.sub(r"(?m)^      .*", "\033[1m\\g<0>\033[0m", text)


def as_json(error: EmulatorError, replay: str = "") -> dict[str, Any]:
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


def cta_of(error: EmulatorError) -> int:
    """Choose the CTA whose timeline shows a finding: its last mark's, or the first traced."""
    traced = {event.cta for event in error.report.timeline.events}
    return next((mark.cta for mark in reversed(error.marks) if mark.cta in traced), min(traced))


def page(report: Any, error: EmulatorError | None = None) -> str:
    """Build a page that steps through a report's traced launch, up to a finding if any."""
    timeline, name = report.timeline, report.kernel
    source = Path(timeline.file).read_text(encoding="utf-8")
    return interactive(
        {name: timeline},
        {name: source},
        title=f"{type(error).__name__} in {name}" if error else name,
        outcomes={name: f"{error}\n{explain(error)}" if error else "The kernel ends."},
        cta=cta_of(error) if error else min(event.cta for event in timeline.events),
    )


def allowed(reports: Iterable[Any]) -> Counter[tuple[str, str, int, str]]:
    """Count the findings of all launches that comments allow, by kind, file, line and reason."""
    return sum((Counter(report.allowed) for report in reports), Counter())


def allowed_messages(times: Counter[tuple[str, str, int, str]]) -> list[str]:
    """Format a line for each of `allowed`."""
    return [
        f"allowed: {kind} at {file}:{line}, found {'once' if n == 1 else f'{n} times'}: {reason}"
        for (kind, file, line, reason), n in times.items()
    ]


def unjudged(reports: Iterable[Any]) -> Counter[tuple[str, int, str]]:
    """Count the accesses of all launches that were not judged, by file, line and question."""
    return sum((Counter(report.unjudged) for report in reports), Counter())


def unjudged_messages(times: Counter[tuple[str, int, str]]) -> list[str]:
    """Format a line for each of `unjudged`."""
    return [
        f"could not judge {n} access{'es' * (n != 1)} at {file}:{line}: the compiled code does not "
        f"tell {question}"
        for (file, line, question), n in times.items()
    ]


def barriers(
    reports: Iterable[Any], uses: dict[tuple[str, str], BarrierUse] | None = None
) -> dict[tuple[str, str], BarrierUse]:
    """Join, by kernel and name, what mbarriers did in all launches; to `uses`, if any."""
    uses = {} if uses is None else uses
    for report in reports:
        for name, use in report.barrier_use.items():
            uses.setdefault((report.kernel, name), BarrierUse(use.count)).join(use)
    return uses


def unwrapped(uses: dict[tuple[str, str], BarrierUse]) -> dict[tuple[str, str], str]:
    """Tell, by kernel and name, what was not seen of the phases of mbarriers.

    Of those only whose parity is computed, as in a ring; an array of which all lack the same is
    named once.
    """
    arrays: dict[tuple[str, str], dict[str, BarrierUse]] = {}
    for (kernel, name), use in uses.items():
        arrays.setdefault((kernel, name.partition("[")[0]), {})[name] = use
    missing: dict[tuple[str, str], str] = {}
    for (kernel, array), members in arrays.items():
        if any(use.turns for use in members.values()):
            whole = {use.missing for use in members.values()}
            named = {array: whole.pop()} if len(whole) == 1 else {
                name: use.missing for name, use in members.items()
            }  # fmt: skip
            missing |= {(kernel, name): what for name, what in named.items() if what}
    return missing


def unwrapped_messages(missing: dict[tuple[str, str], str]) -> list[str]:
    """Format a line for each of `unwrapped`."""
    return [f"barrier {name} of {kernel}: {what}" for (kernel, name), what in missing.items()]


def notes(reports: Iterable[Any]) -> list[str]:
    """List the notes of all launches, each once."""
    return list(dict.fromkeys(note for report in reports for note in report.notes))


def report_of(
    finding: EmulatorError | None, replay: str, covered: dict[str, Any], reports: list[Any]
) -> dict[str, Any]:
    """Build the report of `--json`: a finding, what `reports` of one schedule tell, and what the
    search covered."""

    def counted(times: Counter[Any], *names: str) -> list[dict[str, Any]]:
        return [dict(zip(names, key, strict=True)) | {"times": n} for key, n in times.items()]

    return {
        "found": as_json(finding, replay) if finding is not None else None,
        "notes": notes(reports),
        "allowed": counted(allowed(reports), "kind", "file", "line", "reason"),
        "unjudged": counted(unjudged(reports), "file", "line", "question"),
        "unwrapped": [
            {"kernel": kernel, "barrier": name, "missing": what}
            for (kernel, name), what in unwrapped(barriers(reports)).items()
        ],
        "covered": covered,
    }
