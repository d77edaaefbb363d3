"""The machine code of a launch: the paths on which its warps meet.

PTX tells of the ways from one line of the source to another. Of lines that it does not tell of the
answer is None.
"""

import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from .errors import Location

# Kind of an instruction, and its line of the source.
Step = tuple[str, Location]


class _Step(NamedTuple):
    """Relevant part of an instruction. kind: one of `_KINDS`, of which "wait" counts as a barrier
    for global memory, or "". target: the label that it may jump to. ends: whether it does not go on
    to the next one."""

    kind: str
    location: tuple[str, int]
    target: str
    ends: bool


# A label; or a predicate, an opcode, and its first operand.
_LINE = re.compile(r"([$\w]+):|(@!?%\w+\s+)?([\w.:]+)\s*([$\w]*)")
_KINDS = {
    "barrier": re.compile(
        r"(?:bar(?:rier)?(?:\.cta)?\.(?:sync|red)|barrier\.cluster\.wait|call|brx)\b"
    ),
    "wait": re.compile(r"mbarrier\.(?:try|test)_wait"),
    "tensor load": re.compile(r"tcgen05\.ld\."),
    "tensor store": re.compile(r"tcgen05\.st\."),
    "mma": re.compile(r"tcgen05\.(?:mma|cp)\."),
    "commit": re.compile(r"tcgen05\.commit\."),
    "shared load": re.compile(r"ld\.shared|ldmatrix"),
    "shared store": re.compile(r"st\.shared|stmatrix"),
    "copy": re.compile(r"cp\.async\.bulk\.(?!commit|wait)"),
    "expect": re.compile(r"mbarrier\.arrive\.expect_tx"),
    "store": re.compile(r"st\.(?!shared|param|local|async)"),
    "load": re.compile(r"(?:ld\.(?!shared|param|local|const)|cp\.async\.c[ag])"),
    "atomic": re.compile(r"(?:atom|red)\.(?!shared|async)"),
}


class Code:
    """Machine code: the paths from one line of the source to another.

    Lines of inline assembly count on from that of the statement, so that of the first counts.
    """

    def __init__(self, ptx: str):
        self._steps: list[_Step] = []
        self._labels: dict[str, int] = {}
        for match, location in _placed(ptx):
            label, predicate, opcode, operand = match.groups("")
            if label:
                self._labels[label] = len(self._steps)
                continue
            kind = next((kind for kind, form in _KINDS.items() if form.match(opcode)), "")
            name = opcode.partition(".")[0]
            ends = not predicate and name in ("bra", "ret", "exit", "trap")
            target = operand if name == "bra" else ""
            if kind or target or ends:
                self._steps.append(_Step(kind, location, target, ends))

    def meets(self, first: Step, second: Location, kinds: tuple[str, ...]) -> bool | None:
        """Return whether the warps meet on every path from the first access to one of these kinds
        in the second line; None if the code does not tell of such accesses."""
        begin, ends = self._at(first), {i for kind in kinds for i in self._at((kind, second))}
        return (
            self._reached(begin, ("barrier", "wait")).isdisjoint(ends) if begin and ends else None
        )

    def is_open(self, path: Sequence[Step]) -> bool | None:
        """Return whether warps need not meet on the path along these accesses, one after the other;
        None if the code does not tell of the first or of the last one.

        Accesses between them that the code does not tell of are left out. Each of several
        instructions of the first one must have such a path.
        """
        first, *others = map(self._at, path)
        if not (first and others and others[-1]):
            return None
        return all(self._follows({start}, filter(None, others)) for start in first)

    def _follows(self, steps: set[int], others: Iterable[list[int]]) -> bool:
        for targets in others:
            steps = set(targets) & self._reached(steps, ("barrier",))
            if not steps:
                return False
        return True

    def _at(self, step: Step) -> list[int]:
        key = step[0], short(step[1])
        return [i for i, each in enumerate(self._steps) if (each.kind, each.location) == key]

    def _reached(self, begin: Iterable[int], barriers: tuple[str, ...]) -> set[int]:
        """Return what comes after these, on paths without one of these barriers before it."""
        todo, seen = list(begin), set()
        while todo:
            for index in self._after(todo.pop()):
                if index not in seen:
                    seen.add(index)
                    if self._steps[index].kind not in barriers:
                        todo.append(index)
        return seen

    def _after(self, index: int) -> Iterator[int]:
        step = self._steps[index]
        for each in (self._labels.get(step.target), None if step.ends else index + 1):
            if each is not None and each < len(self._steps):
                yield each


def short(location: Sequence[Any]) -> tuple[str, int]:
    """Return file name, without folders, and line of a location."""
    return location[0].rpartition("/")[2], location[1]


def _placed(text: str) -> Iterator[tuple[re.Match[str], tuple[str, int]]]:
    """Yield labels and instructions of PTX, with the file and line of the source of each."""
    files: dict[str, str] = {}
    for name in re.finditer(r'^\s*\.file\s+(\d+)\s+"([^"]*)"(?:\s+"([^"]*)")?', text, re.MULTILINE):
        files[name[1]] = (name[3] or name[2]).rpartition("/")[2]
    location, inline, fixed = ("", 0), False, False
    for line in map(str.strip, text.splitlines()):
        if line.startswith(("// begin inline asm", "// end inline asm")):
            inline, fixed = line.startswith("// begin"), False
        elif match := re.match(r"\.loc\s+(\d+)\s+(\d+)", line):
            if not (inline and fixed):
                location, fixed = (files.get(match[1], ""), int(match[2])), True
        elif not line.startswith(".") and (match := _LINE.match(line)):
            yield match, location
