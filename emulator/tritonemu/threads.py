"""Threads of a program: whether its warps have met between two accesses to global memory.

A program of several warps is one instruction stream here. On a GPU each thread has some elements of
a block, which ones the compiler decides anew at every load and store, and nothing orders what two
warps do to global memory but a barrier. The compiler puts barriers where values go through shared
memory (reductions, conversions of layouts, results of scalar atomics), and none for global memory:
that is what `tl.debug_barrier` is for. So two things are races, unless a barrier lies between:

- a role loads an element, or changes it, at another place of a block than it stored it at: another
  thread may have stored it. At the same place of blocks of one size it is usually one thread, which
  is not promised (triton-lang/triton#10924): the layouts of the compiled launch say if it is.
- a block is stored, then a scalar atomic releases it: that is what one thread does, which speaks
  for itself alone. Whoever acquires knows of the rest only what a barrier before the release says.
  Triton 3.9 puts one there (triton-lang/triton#10816).

Stores after loads of the same program are not judged: values that only change places within a
thread, as those of `tl.join`, would be alarms.

Whether a barrier lies between says the machine code of this launch: a finding needs a way from the
store to the load, or to the release, on which there is none (`Code`). What may meet in shared
memory counts as a barrier, too, when it is carried out.
"""

import bisect
import math
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from . import suppressions
from .clocks import Access
from .errors import Location, Race, location, option
from .scheduler import Role

_STORES, _POSITIONS = "stores of blocks", "positions in blocks"


@dataclass(frozen=True)
class Block:
    """What a block of pointers touches. index: elements, one for each lane that is on. size: of the
    block. active: its lanes that are on, None for all."""

    index: torch.Tensor
    size: int
    active: torch.Tensor | None = None

    @property
    def positions(self) -> torch.Tensor:
        if self.active is None:
            return torch.arange(self.size)
        return self.active.reshape(-1).nonzero().reshape(-1)


@dataclass(frozen=True)
class _Store:
    access: Access
    program: tuple[int, ...]
    size: int


class Threads:
    """Who stored the elements of blocks in one launch. code: its machine code."""

    def __init__(self, launch: Any, code: Callable[[], "Code"]):
        self._launch, self._code = launch, code
        self._stores: list[_Store] = []
        self._released: dict[int, list[tuple[int, Location]]] = {}

    def release(self, role: Role) -> None:
        """One thread of the role is about to release."""
        self._released.setdefault(role.index, []).append((role.epoch, location()))

    def store(self, region: Any, block: Block, raw: torch.Tensor) -> None:
        """The running role is about to store these values; raises Race as `load` does."""
        if _STORES in region.shadow.tables:
            self.load(region, block, region.flat[block.index] != raw)
        role = self._launch.role
        if role.warps == 1:
            self.forget(region.cells, region.shadow, block.index)
            return
        role.stored = role.epoch
        store = _Store(role.access(True, 0, name=region.name), self._launch.program, block.size)
        if not self._stores or self._stores[-1] != store:
            self._stores.append(store)
        cells = region.cells(region.shadow.table(_STORES))
        places = region.cells(region.shadow.table(_POSITIONS))
        cells[block.index] = _rows(len(self._stores), cells)
        places[block.index] = _rows(block.positions.to(torch.int32), places)

    def forget(self, view: Callable, shadow: Any, where: Any) -> None:
        """Others than threads have written `view(table)[where]`."""
        if _STORES in shadow.tables:
            view(shadow.tables[_STORES])[where] = 0

    def load(self, region: Any, block: Block, changed: torch.Tensor | None = None) -> None:
        """Raise Race if another thread stored what the running role loads, or changes."""
        if _STORES not in region.shadow.tables:
            return
        numbers = _first(region.cells(region.shadow.tables[_STORES])[block.index])
        if changed is not None:
            numbers = numbers * changed
        kind = "load" if changed is None else "store"
        for number in _distinct(numbers):
            store = self._stores[number - 1]
            if number and self._is_unguarded(store):
                positions = block.positions[numbers == number]
                same = self._is_in_place(region, block, store, numbers == number)
                if same and self._code().is_of_one_warp(
                    (store.access.at, "store"), (location(), kind), block.size, positions
                ):
                    continue
                self._judge(region, store, kind, same)

    def _is_unguarded(self, store: _Store) -> bool:
        """Whether nothing orders a store with the running role but what holds for some threads."""
        role, old = self._launch.role, store.access
        epochs = role.clock.epochs
        if epochs.get(-old.role, 0) >= old.epoch or epochs.get(old.role, 0) < old.epoch:
            return False  # ordered, or not at all, of which `Memory` tells
        return old.role == role.index or store.size > 1

    def _judge(self, region: Any, store: _Store, kind: str, same: bool) -> None:
        """Raise Race unless the machine code has a barrier. same: whether the place is."""
        role, old = self._launch.role, store.access
        does = "loads" if kind == "load" else "stores to"
        what, (file, line) = f"{does} an element of {region.name} that", old.at
        if old.role == role.index:
            here, kinds = location(), (kind,)
            told = f"a thread {what} another one may have stored to at {file}:{line}"
            if same:
                told = (
                    f"a warp {what} another one stored to at {file}:{line}: the compiler gave the "
                    f"two blocks different layouts"
                )
        else:
            here, kinds = self._release_of(old), ("atomic", "load", "store")
            told = (
                f"program {self._launch.program} {what} program {store.program} stored to at "
                f"{file}:{line}, and one of its threads released at {here[0]}:{here[1]}"
            )
        if not self._code().meets(old.at, here, kinds):
            finding = Race(
                f"{told}; warps of a program meet at tl.debug_barrier(): put it between the two, "
                f"or allow it with {option('unguarded', 'allow')}",
                other=old.at,
                programs=(store.program, self._launch.program),
                buffer=region.name,
                marks=(old.mark, role.access(kind == "store", 0, name=region.name).mark),
                missing="no barrier of the warps lies between 1 and 2",
            )
            suppressions.judge(finding, self._launch.report)

    def _is_in_place(self, region: Any, block: Block, store: _Store, mine: torch.Tensor) -> bool:
        """Whether these elements lie in this block where they lay in that of the role's store."""
        if block.size != store.size or store.access.role != self._launch.role.index:
            return False
        before = _first(region.cells(region.shadow.tables[_POSITIONS])[block.index[mine]])
        return torch.equal(before.to(torch.int64), block.positions[mine])

    def _release_of(self, access: Access) -> Location:
        """Where the role of this access first released afterwards."""
        released = self._released[access.role]
        return released[bisect.bisect_left(released, access.epoch, key=lambda each: each[0])][1]


def _distinct(numbers: torch.Tensor) -> list[int]:
    if not numbers.numel():
        return []
    low, high = map(int, torch.aminmax(numbers))
    return [low] if low == high else numbers.unique().tolist()


def _first(cells: torch.Tensor) -> torch.Tensor:
    """Of the granules of an element the first."""
    return cells if cells.ndim == 1 else cells[:, 0]


def _rows(values: Any, cells: torch.Tensor) -> Any:
    return values[:, None] if cells.ndim > 1 and isinstance(values, torch.Tensor) else values


@dataclass
class _Step:
    """What counts of an instruction. kind: "store", "load", "atomic", "barrier" or ""."""

    kind: str
    place: tuple[str, int]
    next: tuple[str, ...] = ()
    ends: bool = False


_BARRIER = re.compile(
    r"(?:bar(?:\.cta)?\.(?:sync|red)|barrier(?:\.cta)?\.(?:sync|red)|barrier\.cluster\.wait"
    r"|mbarrier\.(?:try|test)_wait|call|brx)\b"
)
_KINDS = {
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
        """Of several that have an element the first, which is the one that stores it."""
        at = torch.unravel_index(positions, self.shape)
        number, step = torch.zeros_like(positions), 1
        for dim in self.order:
            number = number + at[dim] // self.spans[dim] % self.warps[dim] * step
            step *= self.warps[dim]
        return number


def _blocked(shape: str, text: str) -> _Blocked:
    """Of a shape such as "8x256" and the text of `#ttg.blocked`."""
    lists = {
        name: tuple(map(int, numbers.split(",")))
        for name, numbers in re.findall(r"(\w+) = \[([\d, ]+)\]", text)
    }
    spans = zip(lists["sizePerThread"], lists["threadsPerWarp"], strict=True)
    sizes = tuple(map(int, shape.split("x")))
    return _Blocked(sizes, tuple(a * b for a, b in spans), lists["warpsPerCTA"], lists["order"])


def _layouts(text: str) -> dict[tuple[str, tuple[str, int]], set[_Blocked | None]]:
    """Of TTGIR: the layouts of the blocks that each line stores or loads, None for others."""
    known = dict(re.findall(r"^(#\w+) = #ttg\.blocked<(.*)>$", text, re.MULTILINE))
    places = dict(re.findall(r"^(#loc\d*) = loc\((.*)\)$", text, re.MULTILINE))
    found: dict[tuple[str, tuple[str, int]], set[_Blocked | None]] = {}
    form = r"tt\.(store|load) .*: tensor<([\dx]+)x!tt\.ptr<[^>]*>, (.*)> loc\((.*)\)$"
    for kind, shape, layout, place in re.findall(form, text, re.MULTILINE):
        for _ in range(8):  # a name, or the call of a helper: what is in it comes first
            inner = re.search(r"#loc\d*", place)
            place = places.get(inner[0], "") if inner else place
        line = re.match(r'"(.*)":(\d+)', place)
        if line:
            key = kind, (line[1].rpartition("/")[2], int(line[2]))
            text_ = known.get(layout)
            found.setdefault(key, set()).add(_blocked(shape, text_) if text_ else None)
    return found


class Code:
    """PTX: which ways lead from one line of the source to another; TTGIR: which warps have what.

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
        for line, place in _placed(text):
            label = re.match(r"(\$?[\w$]+):", line)
            if label:
                self._labels[label[1]] = len(self._steps)
                continue
            said = re.sub(r"^@!?%\w+\s+", "", line)
            target = re.match(r"bra(?:\.uni)?\s+(\$?[\w$]+)", said)
            always = said == line
            ends = always and (bool(target) or said.startswith(("ret", "exit", "trap", "}")))
            kinds = (kind for kind, form in _KINDS.items() if form.match(said))
            kind = "barrier" if _BARRIER.match(said) else next(kinds, "")
            if kind or target or ends:
                next_ = (target[1],) if target else ()
                self._steps.append(_Step(kind, place, next_, ends))

    def meets(
        self, first: Location, second: Location, kinds: tuple[str, ...] = ("load", "atomic")
    ) -> bool:
        """Whether the warps meet on every way from a store of the first line to an access of the
        second; also if the code tells of no such accesses."""
        key = tuple(first), tuple(second), kinds
        if key not in self._known:
            self._known[key] = not self._leads(*key)
        return self._known[key]

    def is_of_one_warp(
        self, first: tuple[Location, str], second: tuple[Location, str], size: int,
        positions: torch.Tensor,
    ) -> bool:  # fmt: skip
        """Whether one warp makes both accesses of the elements at these positions of blocks of this
        size; also if the code does not tell. first, second: place and kind of an access."""
        both = []
        for (file, line), kind in (first, second):
            layouts = self._layouts.get((kind, (file.rpartition("/")[2], line)), set())
            if len(layouts) != 1 or None in layouts:
                return True
            (layout,) = layouts
            if math.prod(layout.shape) != size:
                return True
            both.append(layout)
        return both[0] == both[1] or torch.equal(*(each.warps_of(positions) for each in both))

    def _leads(self, first: Location, second: Location, kinds: tuple[str, ...]) -> bool:
        """Whether there is a way without a barrier."""
        begin, end = ((file.rpartition("/")[2], line) for file, line in (first, second))
        todo = [
            i for i, step in enumerate(self._steps) if (step.kind, step.place) == ("store", begin)
        ]
        seen: set[int] = set()
        while todo:
            for at in self._after(todo.pop()):
                step = self._steps[at]
                if step.kind in kinds and step.place == end:
                    return True
                if at not in seen and step.kind != "barrier":
                    seen.add(at)
                    todo.append(at)
        return False

    def _after(self, at: int) -> Iterator[int]:
        step = self._steps[at]
        following = [self._labels[label] for label in step.next if label in self._labels]
        for each in [*following, *([] if step.ends else [at + 1])]:
            if each < len(self._steps):
                yield each


def _placed(text: str) -> Iterator[tuple[str, tuple[str, int]]]:
    """Lines of PTX without comments, and the file and line of the source of each."""
    files: dict[str, str] = {}
    for name in re.finditer(r'^\s*\.file\s+(\d+)\s+"([^"]*)"(?:\s+"([^"]*)")?', text, re.MULTILINE):
        files[name[1]] = (name[3] or name[2]).rpartition("/")[2]
    place, inline, fixed = ("", 0), False, False
    for raw in text.splitlines():
        line = raw.strip()
        if line.startswith("// begin inline asm"):
            inline, fixed = True, False
        elif line.startswith("// end inline asm"):
            inline = False
        told = re.match(r"\.loc\s+(\d+)\s+(\d+)", line)
        if told and not (inline and fixed):
            place, fixed = (files.get(told[1], ""), int(told[2])), True
        line = line.partition("//")[0].strip()
        if line and not line.startswith("."):
            yield line, place
