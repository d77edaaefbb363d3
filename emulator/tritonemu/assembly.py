"""The machine code of a launch: the paths on which its warps meet, and which of them has what.

PTX tells of the ways from one line of the source to another, and TTGIR of layouts. Whatever they do
not tell counts as in order.
"""

import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from .errors import Location

# Kind of an instruction, and its line of the source.
Step = tuple[str, Location]


@dataclass
class _Step:
    """Relevant part of an instruction. kind: one of `_KINDS`, "barrier", "wait" (which counts as
    one for global memory), or ""."""

    kind: str
    location: tuple[str, int]
    next: tuple[str, ...] = ()
    ends: bool = False


_BARRIER = re.compile(
    r"(?:bar(?:\.cta)?\.(?:sync|red)|barrier(?:\.cta)?\.(?:sync|red)|barrier\.cluster\.wait"
    r"|call|brx)\b"
)
_KINDS = {
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


@dataclass(frozen=True)
class _Blocked:
    """A blocked layout of a block of this shape: which warp has which element."""

    shape: tuple[int, ...]
    spans: tuple[int, ...]
    warps: tuple[int, ...]
    order: tuple[int, ...]

    def warps_of(self, positions: torch.Tensor) -> torch.Tensor:
        """Return the first warp that has each element, which is the one that stores it."""
        index = torch.unravel_index(positions, self.shape)
        number, step = torch.zeros_like(positions), 1
        for dim in self.order:
            number = number + index[dim] // self.spans[dim] % self.warps[dim] * step
            step *= self.warps[dim]
        return number


@dataclass(frozen=True)
class _Linear:
    """A linear layout of a block of this shape. warps: dimension and bit of the place in the block
    that each bit of the number of a warp is."""

    shape: tuple[int, ...]
    warps: tuple[tuple[int, int], ...]

    def warps_of(self, positions: torch.Tensor) -> torch.Tensor:
        index = torch.unravel_index(positions, self.shape)
        bits = ((index[dim] >> bit & 1) << i for i, (dim, bit) in enumerate(self.warps))
        return sum(bits, torch.zeros_like(positions))


def _linear(sizes: tuple[int, ...], text: str) -> _Linear | None:
    """Parse a linear layout; None if several warps have an element, or if no bit of its position
    alone says which has it."""
    lists = re.findall(r"(\w+) = \[((?:\[[\d, ]+\](?:, )?)*)\]", text)
    bases = {
        name: [tuple(map(int, base.split(","))) for base in re.findall(r"\[([\d, ]+)\]", each)]
        for name, each in lists
    }
    steps = [max(base) for several in bases.values() for base in several if sum(base) == max(base)]
    count = sum(map(len, bases.values()))
    if len(steps) < count or any(step & step - 1 for step in steps) or "warp" not in bases:
        return None
    if not all(map(any, bases["warp"])):
        return None
    return _Linear(sizes, tuple((b.index(max(b)), max(b).bit_length() - 1) for b in bases["warp"]))


def _blocked(sizes: tuple[int, ...], text: str) -> _Blocked:
    lists = {
        name: tuple(map(int, numbers.split(",")))
        for name, numbers in re.findall(r"(\w+) = \[([\d, ]+)\]", text)
    }
    spans = zip(lists["sizePerThread"], lists["threadsPerWarp"], strict=True)
    return _Blocked(sizes, tuple(a * b for a, b in spans), lists["warpsPerCTA"], lists["order"])


_FORMS = {
    "": r"tt\.(store|load) .*: tensor<([\dx]+)x!tt\.ptr<[^>]*>, (.*)> loc\((.*)\)$",
    "tensor ": r"ttng\.tmem_(load|store) .*\btensor<([\dx]+)x\w+, (#\w+)>.* loc\((.*)\)$",
}
_PARSERS = {"blocked": _blocked, "tensor blocked": _blocked, "tensor linear": _linear}


def _layouts(text: str) -> dict[Step, set[_Blocked | _Linear | None]]:
    """Collect from TTGIR the layouts of the blocks that each line stores or loads, or None."""
    known = re.findall(r"^(#\w+) = #ttg\.(\w+)<(.*)>$", text, re.MULTILINE)
    layouts = {name: (kind, written) for name, kind, written in known}
    places = dict(re.findall(r"^(#loc\d*) = loc\((.*)\)$", text, re.MULTILINE))
    accessed: dict[Step, set[_Blocked | _Linear | None]] = {}
    for memory, form in _FORMS.items():
        for kind, shape, name, loc in re.findall(form, text, re.MULTILINE):
            for _ in range(8):  # a name, or the call of a helper: what is in it comes first
                inner = re.search(r"#loc\d*", loc)
                loc = places.get(inner[0], "") if inner else loc
            line = re.match(r'"(.*)":(\d+)', loc)
            if line:
                key = memory + kind, (line[1].rpartition("/")[2], int(line[2]))
                layout, written = layouts.get(name, ("", ""))
                sizes = tuple(map(int, shape.split("x")))
                parse = _PARSERS.get(memory + layout, lambda sizes, written: None)
                accessed.setdefault(key, set()).add(parse(sizes, written))
    return accessed


class Code:
    """Machine code. PTX: the paths from one line of the source to another; TTGIR: which warps have
    what.

    Lines of inline assembly count on from that of the statement, so that of the first counts.
    """

    @classmethod
    def of(cls, asm: Mapping[str, Any]) -> "Code":
        return cls(asm.get("ptx", ""), asm.get("ttgir", ""))

    def __init__(self, text: str, layouts: str = ""):
        self._layouts = _layouts(layouts)
        self._steps: list[_Step] = []
        self._labels: dict[str, int] = {}
        self._known: dict[tuple[Any, ...], bool] = {}
        for line, location in _placed(text):
            label = re.match(r"(\$?[\w$]+):", line)
            if label:
                self._labels[label[1]] = len(self._steps)
                continue
            instruction = re.sub(r"^@!?%\w+\s+", "", line)
            target = re.match(r"bra(?:\.uni)?\s+(\$?[\w$]+)", instruction)
            always = instruction == line
            ends = always and (bool(target) or instruction.startswith(("ret", "exit", "trap")))
            kinds = (kind for kind, form in _KINDS.items() if form.match(instruction))
            kind = "barrier" if _BARRIER.match(instruction) else next(kinds, "")
            if kind or target or ends:
                next_ = (target[1],) if target else ()
                self._steps.append(_Step(kind, location, next_, ends))

    def meets(
        self, first: Location, second: Location, kinds: tuple[str, ...] = ("load", "atomic")
    ) -> bool:
        """Return whether the warps meet on every path from a store of the first line to an access
        of the second; True if the code tells of no such accesses."""
        key = tuple(first), tuple(second), kinds
        if key not in self._known:
            self._known[key] = not self._leads(*key)
        return self._known[key]

    def is_of_one_warp(
        self, first: tuple[Location, str], second: tuple[Location, str], size: int,
        positions: torch.Tensor,
    ) -> bool:  # fmt: skip
        """Return whether one warp makes both accesses of the elements at these positions of
        blocks of this size; True if the code does not tell. first, second: location and kind of
        an access."""
        both = [self._layout(*each, size) for each in (first, second)]
        if None in both or both[0] == both[1]:
            return True
        return torch.equal(*(each.warps_of(positions) for each in both))

    def _layout(self, location: Location, kind: str, size: int) -> _Blocked | _Linear | None:
        """Return the layout of blocks of this size that a line accesses, None if unknown."""
        layouts = self._layouts.get((kind, short(location)), {None})
        layout = next(iter(layouts)) if len(layouts) == 1 else None
        return layout if layout and math.prod(layout.shape) == size else None

    def warps_of(self, location: Location, kind: str, size: int) -> torch.Tensor | None:
        """Return the warp that accesses each element of a block of this size, None if unknown."""
        layout = self._layout(location, kind, size)
        return None if layout is None else layout.warps_of(torch.arange(size))

    def is_open(self, path: Sequence[Step]) -> bool:
        """Return whether warps need not meet on the path along these accesses, one after the other;
        False if the code does not tell of the first or of the last one.

        Accesses between them that the code does not tell of are left out. Each of several
        instructions of the first one must have such a path.
        """
        first, *others = map(self._at, path)
        return bool(first and others and others[-1]) and all(
            self._follows({start}, filter(None, others)) for start in first
        )

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

    def _leads(self, first: Location, second: Location, kinds: tuple[str, ...]) -> bool:
        """Return whether there is a path without a barrier."""
        reached = self._reached(self._at(("store", first)), ("barrier", "wait"))
        ends = (self._steps[index] for index in reached)
        return any(step.kind in kinds and step.location == short(second) for step in ends)

    def _after(self, index: int) -> Iterator[int]:
        step = self._steps[index]
        following = [self._labels[label] for label in step.next if label in self._labels]
        for each in [*following, *([] if step.ends else [index + 1])]:
            if each < len(self._steps):
                yield each


def short(location: Sequence[Any]) -> tuple[str, int]:
    """Return file name, without folders, and line of a location."""
    return location[0].rpartition("/")[2], location[1]


def _placed(text: str) -> Iterator[tuple[str, tuple[str, int]]]:
    """Yield lines of PTX without comments, with the file and line of the source of each."""
    files: dict[str, str] = {}
    for name in re.finditer(r'^\s*\.file\s+(\d+)\s+"([^"]*)"(?:\s+"([^"]*)")?', text, re.MULTILINE):
        files[name[1]] = (name[3] or name[2]).rpartition("/")[2]
    location, inline, fixed = ("", 0), False, False
    for raw in text.splitlines():
        line = raw.strip()
        if line.startswith("// begin inline asm"):
            inline, fixed = True, False
        elif line.startswith("// end inline asm"):
            inline = False
        match = re.match(r"\.loc\s+(\d+)\s+(\d+)", line)
        if match and not (inline and fixed):
            location, fixed = (files.get(match[1], ""), int(match[2])), True
        line = line.partition("//")[0].strip()
        if line and not line.startswith("."):
            yield line, location
