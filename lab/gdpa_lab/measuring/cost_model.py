"""Cost model: the clocks that a kernel's design needs on each unit of an SM, and the time.

A design states what a tile of 128 queries by 128 keys costs the tensor cores, shared memory, the
MUFU and the issue slots, and what each 128 queries and 128 keys add. The busiest unit, or memory,
bounds the time. Nothing is fitted: costs are counted from tiles, and the clock is that at which all
tensor cores reach the measured matmul ceiling. A power limit enters through this ceiling alone.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

from gdpa_lab.measuring.bounds import FLOPS
from gdpa_lab.measuring.roofline import Ceilings
from gdpa_lab.measuring.workload import Workload

TILE = 128
"""Queries, keys and head_dim of the tile that a design is counted for."""
MUFU_LANES = 16
SMEM_BYTES = 128
"""Results of the MUFU and bytes of shared memory, per clock of an SM; both chips."""


@dataclass(frozen=True)
class Chip:
    """A GPU. `flops`: dense bf16 FLOPs of an SM per clock."""

    name: str
    sms: int
    flops: int

    def clock_ghz(self, tflops: float) -> float:
        """The clock at which all tensor cores together reach `tflops` TFLOP/s."""
        return tflops * 1e3 / (self.sms * self.flops)


H200 = Chip("NVIDIA H200", 132, FLOPS["9.0"])
B200 = Chip("NVIDIA B200", 148, FLOPS["10.0"])
"""SMs: a device query in github.com/pytorch/ao/issues/4002; rate: so, too, the FlashAttention-4
paper."""

ASSUMED = Ceilings(1080.0, ((1.0, 6600.0), (4 / 3, 6750.0), (2.0, 6950.0), (3.0, 7100.0)))
"""Ceilings of a B200 limited to 750 W, from outside: nobody here has measured one.

Matmul: cuBLAS at 8192^3, 1059 and 1088 TFLOP/s on the published machine (issues 814 and 854 of
github.com/facebookexperimental/triton). Copies: the shares of the nominal rate that an H200 reaches
(.86 to .93), of 7.67 TB/s; 6.52 TB/s at 1 : 1 is reported in github.com/NVIDIA/cutlass/issues/2917.
"""


@dataclass(frozen=True)
class Design:
    """A kernel design: clocks of each unit ("mma", "smem", "mufu", "issue") for a tile of 128 x 128
    pairs, for 128 queries and for 128 keys of a head.

    `tile`: queries and keys that a program computes at once; lengths are padded to them.
    `in_turns`: units that wait for each other, so their clocks add up. `start_us`: microseconds of
    an SM for the prologue and epilogue of a program, per 128 queries (forward) or 128 keys
    (backward), unless they are hidden. `row_bytes`: bytes that separate kernels move before and
    after, per query of a head.
    """

    name: str
    chip: Chip
    pairs: Mapping[str, float]
    queries: Mapping[str, float] = field(default_factory=dict)
    keys: Mapping[str, float] = field(default_factory=dict)
    tile: tuple[int, int] = (TILE, TILE)
    direction: str = "forward"
    in_turns: tuple[str, ...] = ()
    start_us: float = 0.0
    row_bytes: int = 0

    def __post_init__(self) -> None:
        units = {*self.pairs, *self.queries, *self.keys}
        if not set(self.in_turns) <= units:
            raise ValueError(f"in_turns must be among {sorted(units)}, got {self.in_turns}")


def kibibytes(size: float) -> float:
    """Clocks of the shared memory port for `size` KiB."""
    return size * 1024 / SMEM_BYTES


def mma(chip: Chip, products: int) -> float:
    """Clocks of an SM's tensor cores for `products` MMAs of 128 x 128 x 128."""
    return products * 2 * TILE**3 / chip.flops


def forward(
    name: str, chip: Chip, reads: float, fills: float, *, keys: float = 0, mufu: float = 1,
    issue: float = 0, **options: object,
) -> Design:  # fmt: skip
    """A forward design. `reads`: KiB of shared memory that both MMAs read for a tile of pairs;
    `fills`: KiB that TMA writes for it, or `keys`: KiB written once for 128 keys. `mufu`: MUFU
    results per score. `issue`: instructions of a warp in the loop, as compiled.

    Q is written once, O is written and read: 96 KiB for 128 queries.
    """
    loop = {"mma": mma(chip, 2), "smem": kibibytes(reads + fills), "issue": issue}
    loop["mufu"] = mufu * TILE * TILE / MUFU_LANES
    each = {"queries": {"smem": kibibytes(96)}, "keys": {"smem": kibibytes(keys)}}
    return Design(name, chip, loop, **each, **options)


def backward(name: str, chip: Chip, moved: float, keys: float, **options: object) -> Design:
    """A backward design: five MMAs, `moved` KiB of shared memory for a tile of pairs, `keys` KiB
    for 128 keys (K and V in, dK and dV through)."""
    loop = {"mma": mma(chip, 5), "smem": kibibytes(moved)}
    more = {"smem": kibibytes(keys)}
    return Design(name, chip, loop, {}, more, direction="backward", **options)


V8_STREAM = forward("v8, K and V stream", H200, 32 + 64 + 64, 64, issue=850)
V8_RESIDENT = forward("v8, K and V stay", H200, 32 + 64 + 64, 0, keys=64, issue=850)
"""Two consumers of 64 rows: each reads its half of Q and all of K and V for itself."""
PUBLISHED = forward(
    "published, two tiles a CTA", B200, 64 + 32, 32, mufu=0, issue=450, tile=(256, TILE)
)
"""The published kernel by its blog post and source: CuTeDSL, a polynomial for the activation."""


@dataclass(frozen=True)
class Cost:
    """The cost of a workload with a design: clocks of an SM by unit, and the times that follow.

    `unit_us`: time of the busiest unit (`in_turns` joined by "+"), prologue and epilogue included;
    `memory_us`: time of the fewest bytes; `more_us`: time of the kernels before and after. `us`:
    the larger of the first two, named by `bound`, plus the third. `tflops`: useful FLOPs over `us`.
    """

    clocks: dict[str, float]
    unit: str
    unit_us: float
    memory_us: float
    more_us: float
    flops: int

    @property
    def us(self) -> float:
        return max(self.unit_us, self.memory_us) + self.more_us

    @property
    def bound(self) -> str:
        return "memory" if self.memory_us > self.unit_us else self.unit

    @property
    def tflops(self) -> float:
        return self.flops / self.us / 1e6


def counts(work: Workload, tile: tuple[int, int] = (TILE, TILE)) -> tuple[float, float, float]:
    """Count (128 queries, 128 keys, tiles of 128 by 128 pairs) of all heads, lengths padded to
    `tile`. ValueError for another operator, a mask or a head_dim other than 128."""
    if work.operator != "gdpa" or work.masked or work.head_dim != TILE:
        raise ValueError(f"work must be GDPA of head_dim {TILE} without a mask, got {work.name!r}")
    queries = [-(-n // tile[0]) * tile[0] / TILE for n in work.seqlens_q]
    keys = [-(-n // tile[1]) * tile[1] / TILE for n in work.seqlens_k]
    pairs = sum(q * k for q, k in zip(queries, keys, strict=True))
    return tuple(work.num_heads_q * x for x in (sum(queries), sum(keys), pairs))


def cost(work: Workload, design: Design, ceilings: Ceilings) -> Cost:
    """Compute the cost of a workload spread evenly over the SMs, at the clock of the ceiling."""
    chip, amounts = design.chip, counts(work, design.tile)
    parts = design.queries, design.keys, design.pairs
    clocks: Counter[str] = Counter(dict.fromkeys(design.pairs, 0.0))
    for part, amount in zip(parts, amounts, strict=True):
        clocks.update({unit: each * amount / chip.sms for unit, each in part.items()})
    alone = {unit: x for unit, x in clocks.items() if unit not in design.in_turns}
    if design.in_turns:
        alone["+".join(design.in_turns)] = sum(clocks[unit] for unit in design.in_turns)
    unit = max(alone, key=alone.__getitem__)
    begun = amounts[0] if design.direction == "forward" else amounts[1]
    unit_us = alone[unit] / chip.clock_ghz(ceilings.tflops) / 1e3
    unit_us += design.start_us * begun / chip.sms
    read, written = work.bytes_read(design.direction), work.bytes_written(design.direction)
    memory_us = ceilings.memory_us(read, written)
    more_us = design.row_bytes * work.total_q * work.num_heads_q
    more_us /= ceilings.gbytes_per_s(1, 1) * 1e3
    return Cost(clocks, unit, unit_us, memory_us, more_us, work.flops(design.direction))
