"""Reading PTX: tiles that reach the async proxy without a fence, and what a thread computes."""

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import ModuleType

from _lib import studies
from gdpa_kernels.device import pairs
from gdpa_kernels.gdpa.device import single_cta, tensor_memory

SHARED = pairs, single_cta, tensor_memory

STORED = re.compile(r"\bst\.shared\.v4\.b32\s+\[%r")  # not the constants that roles are handed
FENCE = re.compile(r"\bfence\.proxy\.async\b")
READ_BACK = re.compile(r"\bld\.shared\.v[24]\b")
TOLD = re.compile(r"\bmbarrier\.arrive\b")
ASYNC = re.compile(r"\bcp\.(?:reduce\.)?async\.bulk\S*\.global\.shared|\btcgen05\.mma\b")
END = re.compile(r"\bbra\b(?!.*waitLoop)|\bret;")


def unfenced(ptx: str) -> list[str]:
    """Where tiles that threads stored into shared memory lack a proxy fence: TMA or an MMA comes
    first, or the block ends and no barrier is told after a fence. A tile that threads read back
    themselves needs none."""
    found, stored, fenced = [], False, False
    for line in ptx.splitlines():
        if STORED.search(line):
            stored, fenced = True, False
        elif READ_BACK.search(line):
            stored = False
        elif FENCE.search(line):
            fenced = True
        elif stored and fenced and (TOLD.search(line) or ASYNC.search(line)):
            stored = False
        elif stored and (END.search(line) or ASYNC.search(line)):
            found.append(line.strip())
            stored = False
    return found


DEFINED = re.compile(r"\s*(?:@!?%p\d+\s+)?([a-z0-9_.:]+)\s+(%r[ds]?\d+),\s*(.*);")
MMA = re.compile(
    r"tcgen05\.mma\S*\s+\[\s*(%\w+)\s*\+\s*(\d+)\s*\],\s*(\[.*?\]|%\w+),\s*(%\w+),\s*(%\w+),"
)
OPERATIONS = {
    "mov": lambda a: a, "mapa": lambda a, _: a, "cvt": lambda a: a, "shfl": lambda a, *_: a,
    "add": lambda a, b: a + b, "sub": lambda a, b: a - b, "mul": lambda a, b: a * b,
    "mad": lambda a, b, c: a * b + c, "shl": lambda a, b: a << b, "shr": lambda a, b: a >> b,
    "and": lambda a, b: a & b, "or": lambda a, b: a | b, "xor": lambda a, b: a ^ b,
    "bfe": lambda a, b, c: (a >> b) & ((1 << c) - 1),
}  # fmt: skip


class Values:
    """Values of registers for one thread, with shared memory at 0. What comes from memory counts as
    0, and of a register that a loop changes the first value: the first slot."""

    def __init__(self, ptx: str, thread: int = 0) -> None:
        self.lines = ptx.splitlines()
        self._known = {"%tid.x": thread}
        self._defined = {}
        for line in self.lines:
            if found := DEFINED.match(line):
                operands = [operand.strip() for operand in found[3].split(",")]
                self._defined.setdefault(found[2], (found[1].split("."), operands))

    def __getitem__(self, operand: str) -> int:
        """The value of a register or a number."""
        if re.fullmatch(r"-?\d+", operand):
            return int(operand)
        if operand not in self._known:
            self._known[operand] = 0  # of a loop
            name, operands = self._defined.get(operand, (["none"], []))
            if name[0] in OPERATIONS:
                wide = name[0] == "cvt" or any("64" in part for part in name)
                value = OPERATIONS[name[0]](*(self[x] for x in operands))
                self._known[operand] = value & ((1 << (64 if wide else 32)) - 1)
        return self._known[operand]


def descriptor(value: int) -> dict[str, int]:
    """The fields of a shared memory descriptor, addresses and offsets in bytes (PTX ISA)."""
    fields = {"address": 0, "leading": 16, "stride": 32}
    found = {name: ((value >> bit) & 0x3FFF) << 4 for name, bit in fields.items()}
    return found | {"version": (value >> 46) & 3, "swizzle": (value >> 61) & 7}


def operands(ptx: str) -> list[tuple[str, int, dict[str, int] | None]]:
    """Of each MMA, A and then B: (name, whether its rows run along K, descriptor); None for an
    operand in tensor memory. Source: PTX ISA, tcgen05 instruction descriptor."""
    values, found = Values(ptx), []
    for line in values.lines:
        if mma := MMA.search(line):
            for name, bit, operand in (("A", 15, mma[3]), ("B", 16, mma[4])):
                of = None if operand[0] == "[" else descriptor(values[operand])
                found.append((name, values[mma[5]] >> bit & 1, of))
    return found


def check_operands(ptx: str, rows: Mapping[tuple[str, int], int]) -> Counter:
    """Of every MMA, the descriptors of bf16 buffers with 128-byte swizzle, `rows` by operand and by
    whether its rows run along K: 16 columns further are 32 bytes, 64 columns are all rows; 16 rows
    further are 2,048 bytes, and a second block of 64 columns lies all rows of its *buffer* away.
    How often an operand begins anew, and how often it goes on behind all rows."""
    last: dict[str, tuple[int, int]] = {}
    counts: Counter = Counter()
    found = [x for x in operands(ptx) if x[2] is not None]
    assert {(name, along) for name, along, _ in found} == set(rows)
    for name, along, of in found:
        assert (of["stride"], of["version"], of["swizzle"]) == (1024, 1, 2)
        size, step = 128 * rows[name, along], 2048 if along else 32
        assert of["leading"] in ((0, size) if along else (0,)), (name, of)
        was, before = last.get(name, (None, 0))
        moved = of["address"] - before if was == along else None
        behind = moved == size - 96 and not along
        assert moved == step or behind or of["address"] % 1024 == 0, (name, of, before)
        counts[name, along, "behind" if behind else "begins"] += moved != step
        last[name] = along, of["address"]
    return counts


def check_stores(
    ptx: str, tiles: int, *, skipped: Sequence[int] = (), kind: str = "shared"
) -> None:
    """`tiles` of 128 rows by 128 bytes that 128 threads store with 128-byte swizzle, a row each, 16
    bytes at a time: every address. kind: "async" to a peer. skipped: stores of others."""
    found = re.findall(rf"st\.{kind}\S*\.v4\.b32\s+\[ ?(%r\d+) ?\+? ?(\d+)?\s*\]", ptx)
    places = [place for number, place in enumerate(found) if number not in skipped]
    assert len(places) == 8 * tiles
    threads = [Values(ptx, thread) for thread in range(128, 256)]  # of a whole warp group
    for first in range(0, len(places), 8):
        found = [
            [thread[register] + int(offset or 0) for register, offset in places[first : first + 8]]
            for thread in threads
        ]
        base = min(map(min, found))
        swizzled = [[base + 128 * t + (16 * j ^ t % 8 << 4) for j in range(8)] for t in range(128)]
        assert base % 1024 == 0 and found == swizzled


def without_fence(module: ModuleType) -> Iterator[ModuleType]:
    """Copies of a rung, each without one `tlx.fence("async_shared")` of its own, or of a function
    that it has of a module in SHARED."""
    for home in (module, *SHARED):
        lines = Path(home.__file__).read_text().splitlines(keepends=True)
        function = ""
        for number, line in enumerate(lines):
            function = line[4 : line.index("(")] if line.startswith("def ") else function
            used = vars(module).get(function) is vars(home).get(function)
            if used and 'tlx.fence("async_shared")' in line:
                around = lines[number - 6 : number], lines[number + 1 : number + 6]
                before, after = map("".join, around)
                change = before + line + after, before + after
                yield studies.changed(module, change, shared=None if home is module else home)
