"""TTGIR of a launch: which warp, or CTA, has which element of a block, where buffers lie, and which
loads come early.

The software pipeliner lets a loop issue loads of later iterations before stores of earlier ones; it
does not ask whether their memory overlaps. Of what TTGIR does not tell the answer is None.
"""

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from .assembly import Step, short
from .errors import Location

# Dimension, and bit of the position in it, that each bit of the number of a warp is.
_WarpBits = tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class _Layout:
    """Which warp has which element of a block of this shape."""

    shape: tuple[int, ...]
    warps: _WarpBits

    def warps_of(self, positions: torch.Tensor) -> torch.Tensor:
        """Return the first warp that has each element, which is the one that stores it."""
        index = torch.unravel_index(positions, self.shape)
        bits = ((index[dim] >> bit & 1) << i for i, (dim, bit) in enumerate(self.warps))
        return sum(bits, torch.zeros_like(positions))


def _bases(text: str) -> dict[str, list[tuple[int, ...]]]:
    """Parse the bases of a linear layout, by the name of what has them."""
    lists = re.findall(r"(\w+) = \[((?:\[[\d, ]+\](?:, )?)*)\]", text)
    return {name: [*map(_numbers, re.findall(r"\[([\d, ]+)\]", each))] for name, each in lists}


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(map(int, text.split(",")))


def _linear(text: str) -> _WarpBits | None:
    """Parse a linear layout; None if several warps have an element, or if no bit of its position
    alone says which has it."""
    bases = _bases(text)
    steps = [(sum(base), max(base)) for several in bases.values() for base in several]
    single = all(total == step and not step & step - 1 for total, step in steps)
    if not single or not all(map(any, bases.get("warp", [()]))):
        return None
    return tuple((base.index(max(base)), max(base).bit_length() - 1) for base in bases["warp"])


def _blocked(text: str) -> _WarpBits:
    lists = {name: _numbers(each) for name, each in re.findall(r"(\w+) = \[([\d, ]+)\]", text)}
    bits: list[tuple[int, int]] = []
    for dim in lists["order"]:
        span = lists["sizePerThread"][dim] * lists["threadsPerWarp"][dim]
        ends = span.bit_length() - 1, (span * lists["warpsPerCTA"][dim]).bit_length() - 1
        bits += [(dim, bit) for bit in range(*ends)]
    return tuple(bits)


_PARSERS = {"blocked": _blocked, "tensor blocked": _blocked, "tensor linear": _linear}
# Operations that load or store, without the names of their dialects.
_KINDS = {
    **dict.fromkeys(("load", "descriptor_load", "descriptor_gather"), "load"),
    **dict.fromkeys(("async_copy_global_to_local", "async_tma_copy_global_to_local"), "load"),
    **dict.fromkeys(("store", "descriptor_store", "descriptor_scatter"), "store"),
    **{"async_tma_copy_local_to_global": "store", "async_tma_scatter": "store"},
    **{"async_tma_gather": "load", "tmem_load": "tensor load", "tmem_store": "tensor store"},
}
_OPERATION = re.compile(r"(?:%\S+ = )?tt(?:n?g)?\.(\w+) ")
_BLOCK = re.compile(r".*\btensor<([\dx]+)x(?:!tt\.ptr<[^>]*>|\w+), (#\w+)>")


def calls(loc: str, known: Mapping[str, str]) -> Iterator[tuple[str, int]]:
    """Resolve a location of MLIR to files, without folders, and lines, innermost first."""
    text = known.get(loc, loc)
    if match := re.match(r'"([^"]*)":(\d+):\d+$', text):
        yield short((match[1], int(match[2])))
    for inner in re.findall(r"#loc\d*", text):
        yield from calls(inner, known)


def names(text: str) -> dict[str, str]:
    """Map the names of locations and layouts to what they stand for."""
    return dict(re.findall(r"^(#\w+) = (?:loc\()?(.*?)\)?$", text, re.MULTILINE))


Calls = tuple[tuple[str, int], ...]
"""File name, without folders, and line of an allocation and of the calls that lead there, innermost
first."""


def places(text: str) -> list[tuple[Calls, int]]:
    """Locate the allocations of a module that the allocator has seen, with offsets in bytes."""
    form = r"local_alloc .*allocation\.offset = (\d+) .*loc\((#loc\d*)\)$"
    known, every = names(text), re.findall(form, text, re.MULTILINE)
    return [(tuple(calls(loc, known)), int(offset)) for offset, loc in every]


def shared_bytes(text: str) -> int:
    """Return the bytes of shared memory that the allocator takes, 0 if it does not tell."""
    match = re.search(r"ttg\.shared = (\d+) : i32", text)
    return int(match[1]) if match else 0


CtaBases = tuple[tuple[str, tuple[tuple[int, ...], ...]], ...]
"""`cga_layout` or `block_bases` of a layout, by that name; nothing of one that has neither."""


def registers(text: str) -> dict[tuple[str, int], set[CtaBases]]:
    """Collect the CTA layouts of registers in lines that move them to or from shared memory."""
    known = names(text)
    layouts: dict[tuple[str, int], set[CtaBases]] = {}
    operation = r" t\w+\.(?:async_shared_store|local_store|local_gather|local_scatter) "
    for types, loc in re.findall(operation + r"(.*) loc\((.*)\)$", text, re.MULTILINE):
        for layout in re.findall(r"tensor<[^,>]*, (#[\w.]+(?:<\{.*?\}>)?)>", types):
            location = next(calls(loc, known), ("", 0))
            layouts.setdefault(location, set()).add(_of_ctas(layout, known))
    return layouts


def _of_ctas(layout: str, known: Mapping[str, str]) -> CtaBases:
    text = known.get(layout, layout)
    if part := re.match(r"#ttg\.slice<\{dim = (\d+), parent = (.*)\}>$", text):
        dim = int(part[1])
        return tuple(
            (name, tuple(basis[:dim] + basis[dim + 1 :] for basis in bases))
            for name, bases in _of_ctas(part[2], known)
        )
    bases = _bases(text)
    named = (("CGALayout", "cga_layout"), ("block", "block_bases"))
    return next((((name, (*bases[each],)),) for each, name in named if each in bases), ())


@dataclass
class _Region:
    """Loads and stores [begin, end) within braces, in others that begin with `outer`. loop: line of
    the loop that these are the body of."""

    begin: int
    outer: int
    end: int = 0
    loop: tuple[str, int] = ("", 0)


class Module:
    """A module of TTGIR: its loads and stores, in order."""

    def __init__(self, text: str):
        self._known = names(text)
        self._steps: list[Step] = []
        self._layouts: dict[Step, set[_Layout | None]] = {}
        self._loops: list[_Region] = []
        regions = [_Region(0, 0)]
        for line in map(str.strip, text.splitlines()):
            if line.startswith("}") and len(regions) > 1:
                region = regions.pop()
                region.end, region.loop = len(self._steps), self._line(line)
            operation = _OPERATION.match(line)
            if kind := operation and _KINDS.get(operation[1]):
                self._steps.append((kind, self._line(line)))
                layout = self._layout(kind, line)
                self._layouts.setdefault(self._steps[-1], set()).add(layout)
            if line.endswith("{"):
                regions.append(_Region(len(self._steps), regions[-1].begin))
                self._loops += [regions[-1]] * ("scf.for " in line)

    def _line(self, text: str) -> tuple[str, int]:
        loc = re.search(r" loc\((.*)\)$", text)
        return next(calls(loc[1], self._known), ("", 0)) if loc else ("", 0)

    def _layout(self, kind: str, line: str) -> _Layout | None:
        block = _BLOCK.match(line)
        written = re.match(r"#ttg\.(\w+)<(.*)>$", self._known.get(block[2], "") if block else "")
        memory = "tensor " * kind.startswith("tensor ")
        parse = written and _PARSERS.get(memory + written[1])
        warps = parse(written[2]) if parse else None
        return None if warps is None else _Layout(tuple(map(int, block[1].split("x"))), warps)

    def warps_of(self, step: Step, size: int) -> torch.Tensor | None:
        """Return the first warp that accesses each element of a block of this size, None if
        unknown."""
        if size == 1:
            return torch.zeros(1, dtype=torch.int64)
        layouts = self._layouts.get((step[0], short(step[1])), {None})
        layout = next(iter(layouts)) if len(layouts) == 1 else None
        known = layout and math.prod(layout.shape) == size
        return layout.warps_of(torch.arange(size)) if known else None

    def issues_ahead(
        self, loop: Location, load: Location, store: Location, distance: int, nested: bool = False
    ) -> bool | None:
        """Return whether a loop issues a load of one line before the store of another line, as many
        iterations earlier. nested: whether the source has the load in a loop within this one."""
        steps = ("load", short(load)), ("store", short(store))
        loops = [each for each in self._loops if each.loop == short(loop)]
        answers = {
            self._is_ahead(each, loops, *steps, distance, nested)
            for each in loops
            if steps[1] in self._steps[each.begin : each.end]
        }
        return answers.pop() if len(answers) == 1 else None

    def _is_ahead(
        self, loop: _Region, loops: Sequence[_Region], load: Step, store: Step, distance: int,
        nested: bool,
    ) -> bool | None:  # fmt: skip
        """Compare how many of each have been moved before the loop; after others of its line."""
        begin = max(loop.outer, *(each.end * (each.end <= loop.begin) for each in loops))
        peeled, body = self._steps[begin : loop.begin], self._steps[loop.begin : loop.end]
        if load not in body or (nested and load in peeled):  # hoisted, or two loops are one
            return True if load in peeled and not nested else None
        ahead = peeled.count(load) / body.count(load) - peeled.count(store) / body.count(store)
        return distance < ahead or (distance == ahead and body.index(load) < body.index(store))
