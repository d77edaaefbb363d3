"""The state of one kernel launch: architecture, grid, CTAs, memory, and the report."""

import contextvars
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from itertools import product
from typing import Any

from .clocks import Clock
from .engines import NAMES as ENGINES
from .engines import Engine
from .errors import EarlyExit, EmulatorError, Location, ResourceLimit, current_location
from .timeline import Mark, Timeline

SHARED_BYTES = 232448
TENSOR_COLUMNS = 512
REGISTERS = 65536

# Named barriers that fbtriton 3.7.4 uses, and what for; `tasks` adds those of tasks.
_COMPILERS_BARRIERS = {0: "the warps of the default task", 1: "the start and end of tasks"}

CHECKS = ("bounds", "race", "descriptor", "shared", "barrier")


@dataclass
class BarrierUse:
    """Use of an mbarrier: of those of one name, in all CTAs, the most that one did.

    count: the arrivals that a phase takes. phases: that were completed. arrivals: of each role, or
    engine. waits: by role and parity, how many passed; 0: none ever did. turns: whether a wait
    computes its parity, so that other data may use the barrier again.
    """

    count: int
    phases: int = 0
    arrivals: dict[str, int] = field(default_factory=dict)
    waits: dict[tuple[str, int], int] = field(default_factory=dict)
    turns: bool = False

    def join(self, other: "BarrierUse") -> None:
        """Take the most of both."""
        self.phases, self.turns = max(self.phases, other.phases), self.turns or other.turns
        for counts, others in ((self.arrivals, other.arrivals), (self.waits, other.waits)):
            counts.update({key: max(n, counts.get(key, 0)) for key, n in others.items()})

    @property
    def missing(self) -> str:
        """Name what was not seen of its phases: "" after two, with a wait for each parity."""
        if self.phases < 2:
            return "one phase only" if self.phases else "no phase"
        parities = {parity for (_, parity), passed in self.waits.items() if passed}
        return "" if len(parities) == 2 else "one parity only"


@dataclass
class Report:
    """Report of one launch of `kernel`.

    programs: CTAs executed (with cluster launch control fewer than the grid has). bytes_loaded,
    bytes_stored: of global memory; active lanes, unclipped elements of boxes, atomics as both.
    shared_bytes, tensor_columns, barriers: the most that one CTA allocated, without what the
    compiler adds for the values that tasks capture, some hundred bytes. barrier_use: what mbarriers
    did, by name. warps: of each role of a CTA, default first. checks: accesses examined, by kind.
    uninitialized: reads of unwritten memory that were let pass. updated: the tensors of which it
    changed what it had read, or did so by atomics. notes: what may be meant so, such as one value
    that several programs store to one place. allowed: findings that a comment allows, how many of
    each (kind, file, line, reason). unjudged: accesses of which the compiled kernel does not tell
    enough, how many of each (file, line, question). cycles: modelled, at the end of the last event.
    timeline: with `trace=True`.
    """

    arch: str
    kernel: str = ""
    programs: int = 0
    bytes_loaded: int = 0
    bytes_stored: int = 0
    dots: int = 0
    shared_bytes: int = 0
    tensor_columns: int = 0
    barriers: int = 0
    barrier_use: dict[str, BarrierUse] = field(default_factory=dict)
    warps: dict[str, int] = field(default_factory=dict)
    checks: dict[str, int] = field(default_factory=lambda: dict.fromkeys(CHECKS, 0))
    cycles: float = 0.0
    uninitialized: int = 0
    updated: set[str] = field(default_factory=set)
    notes: list[str] = field(default_factory=list)
    allowed: dict[tuple[str, str, int, str], int] = field(default_factory=dict)
    unjudged: dict[tuple[str, int, str], int] = field(default_factory=dict)
    timeline: Timeline | None = None

    def give_up(self, question: str, other: Location) -> None:
        """Count the access at hand, of which the compiled kernel does not tell this."""
        key = *current_location(), f"{question} {other[0]}:{other[1]}"
        self.unjudged[key] = self.unjudged.get(key, 0) + 1


@cache
def columns_of(blocks: tuple[tuple[int, int, int], ...]) -> int:
    """Compute the columns of tensor memory that hold all blocks, each (lanes, columns, number of an
    earlier).

    As fbtriton 3.7.4 places them: one after the other, each at the first column where it fits; 64
    lanes in the one or the other half (16 of every 32), that of the earlier block `number` if it
    names one. The kernel gets the next power of two.
    """
    placed: list[tuple[int, int, int]] = []
    for lanes, columns, earlier in blocks:
        halves = (3,) if lanes == 128 else (1, 2)
        if earlier >= 0 and placed[earlier][0] in halves:
            halves = (placed[earlier][0],)
        starts = sorted({0, *(end for _, _, end in placed)})
        slot = next(
            (half, start, start + columns)
            for start, half in product(starts, halves)
            if not any(half & h and start < e and s < start + columns for h, s, e in placed)
        )
        placed.append(slot)
    return max((end for _, _, end in placed), default=0)


@dataclass(eq=False)
class Cluster:
    """CTAs that run together. `scheduler` runs their roles, `barrier` is their common barrier.

    waits: whether the compiler makes them wait for each other at the end: for MMAs of pairs of
    CTAs, unless `async_tasks` says `no_ending_cluster_sync`. It always does in Gluon.
    """

    scheduler: Any
    barrier: Any
    ctas: list["Cta"] = field(default_factory=list)
    waits: bool | None = None


@dataclass(eq=False)
class Cta:
    """A CTA: its place in the grid and in its cluster, its memory, and its barriers.

    allocations: storages and barriers in the order of allocation, so that a peer's counterpart is
    the one with the same number. tensor: its storages of tensor memory. compilers_barriers: named
    barriers that are not the kernel's. engines: those of its multiprocessor. ended: what it knew at
    its end, None before; ended_at: when, in modelled cycles.
    """

    launch: "Launch"
    cluster: Cluster
    number: int
    rank: int
    program: tuple[int, int, int]
    shared_bytes: int = 0
    tensor_columns: int = 0
    allocations: list[Any] = field(default_factory=list)
    tensor: list[Any] = field(default_factory=list)
    waiting: list[tuple[int, Any]] = field(default_factory=list)
    named_barriers: dict[int, Any] = field(default_factory=dict)
    compilers_barriers: dict[int, str] = field(default_factory=lambda: dict(_COMPILERS_BARRIERS))
    engines: dict[str, Engine] = field(default_factory=lambda: {n: Engine() for n in ENGINES})
    ended: Clock | None = None
    ended_at: float = 0.0

    def end(self, role: Any) -> None:
        """End the kernel: whatever has used this CTA's memory must be known to be done."""
        self.ended, self.ended_at = role.clock, role.time
        for allocation in self.allocations:
            for access in getattr(getattr(allocation, "shadow", None), "accesses", ()):
                if not self.ended.knows(access):
                    raise self.too_early(allocation.name, access.who, access.location, access.mark)
            for barrier in getattr(allocation, "barriers", ()):
                barrier.check_end()

    def too_early(self, what: str, who: str, location: Location, use: Mark) -> EarlyExit:
        """Build the finding that this CTA ends while its buffer or barrier `what` may be in use."""
        other = ", or the CTAs of a cluster for each other (tlx.cluster_barrier)"
        last = Mark(self.number, "default", self.ended_at, 0, f"the end of CTA {self.number}")
        return EarlyExit(
            f"CTA {self.number} may end before this use of its {what}, which ends with it; "
            f"let it wait for this{'' if self.launch.partition_fences else other}",
            location,
            what=what,
            role=who,
            marks=(use, last),
        )

    def reserve(self, num_bytes: int) -> None:
        report = self.launch.report
        self.shared_bytes += num_bytes
        needed = self.shared_bytes
        if needed > SHARED_BYTES:  # if buffers do not share them
            needed = self.launch.compiled_bytes() or needed
        report.shared_bytes = max(report.shared_bytes, needed)
        if needed > SHARED_BYTES:
            raise ResourceLimit(f"shared memory has {SHARED_BYTES} bytes per CTA, got {needed}")

    def reserve_columns(self, storage: Any) -> None:
        """Count the columns of all tensor memory, after `storage` came or changed."""
        if storage not in self.tensor:
            self.tensor.append(storage)
        numbers = {each: i for i, each in enumerate(self.tensor)}
        pairs = [sorted((i, numbers.get(each.beside, i))) for each, i in numbers.items()]
        earlier = {late: early for early, late in pairs if early < late}
        blocks = tuple((*each.block, earlier.get(i, -1)) for each, i in numbers.items())
        self.tensor_columns, report = columns_of(blocks), self.launch.report
        report.tensor_columns = max(report.tensor_columns, self.tensor_columns)
        if self.tensor_columns > TENSOR_COLUMNS:
            raise ResourceLimit(
                f"tensor memory has {TENSOR_COLUMNS} columns, got {self.tensor_columns}"
            )

    def allocate(self, what: Any) -> None:
        """Number an allocation, and wake peers that wait for it."""
        self.allocations.append(what)
        count = len(self.allocations)
        scheduler = self.cluster.scheduler
        for number, role in [w for w in self.waiting if w[0] < count]:
            self.waiting.remove((number, role))
            scheduler.wake(role, scheduler.role.time)

    def peer(self, rank: int) -> "Cta":
        if not 0 <= rank < len(self.cluster.ctas):
            raise EmulatorError(
                f"CTA rank must be in [0, {len(self.cluster.ctas)}), the cluster, got {rank}"
            )
        return self.cluster.ctas[rank]


@dataclass
class Launch:
    """One launch.

    races, uninitialized, masked, strict: as in `execution.execute`; whole_storage: whether its
    `bounds` are "storage". num_ctas: how many CTAs a program spans. pairs: whether MMAs are those
    of pairs of CTAs. clusters: numbers of those that have not started, and may be cancelled. loops:
    turns of while loops that each role has made. undecided: whether there is an `if` whose branches
    may disagree about a type. undefined: the loads that have left undefined values, and what else
    did, each with its name. wide: whether a tensor has elements that an int32 cannot count.
    together: the most clusters that ran at the same time. start_next: starts a cluster beside those
    that run. partition_fences: whether fences are demanded between partitions, and there only.
    threads: who judges what warps of one program do to memory, None for nobody. placed: where the
    compiler puts the shared memory of Gluon, see `ttgir.places`; compiled_bytes: how many bytes
    that takes, 0 if unknown; registers: how their operands in registers lie, see there.
    """

    arch: str
    grid: tuple[int, int, int]
    cluster_shape: tuple[int, int, int]
    num_warps: int
    report: Report
    races: bool
    uninitialized: str
    lowering: Any
    masked: str = "nan"
    memory: Any = None
    scheduler: Any = None
    clusters: deque = field(default_factory=deque)
    loops: dict[Any, int] = field(default_factory=dict)
    undecided: bool = False
    undefined: dict[Location, str] = field(default_factory=dict)
    strict: bool = False
    whole_storage: bool = False
    wide: bool = False
    together: int = 0
    start_next: Callable[[], None] | None = None
    partition_fences: bool = False
    threads: Any = None
    num_ctas: int = 1
    pairs: bool = False
    placed: Callable[[], list[Any]] = list
    compiled_bytes: Callable[[], int] = int
    registers: Callable[[], dict[Any, Any]] = dict

    def steal(self) -> tuple[int, int, int] | None:
        """Cancel a cluster that has not started; return the program id of its first CTA, or None.

        One cluster is always left to start by itself, as on a device with two of them resident.
        """
        self.scheduler.changes += 1
        self.scheduler.order.note("clusters", "atomic", (None, True))
        if len(self.clusters) < 2:
            return None
        return self.place(self.clusters.popleft(), 0)

    def place(self, cluster: int, rank: int) -> tuple[int, int, int]:
        """Compute the program id of a CTA: clusters, and CTAs in them, count x fastest."""
        program, step = [], 1
        for size, shape in zip(self.grid, self.cluster_shape, strict=True):
            across = size // shape
            program.append(cluster % across * shape + rank // step % shape)
            cluster //= across
            step *= shape
        return tuple(program)

    @property
    def role(self) -> Any:
        return self.scheduler.role

    @property
    def program(self) -> tuple[int, int, int]:
        return self.scheduler.role.cta.program if self.scheduler else (0, 0, 0)


CURRENT: contextvars.ContextVar[Launch] = contextvars.ContextVar("emulator_launch")


def is_wide() -> bool:
    """Return whether there is a launch, and it is `wide`."""
    launch = CURRENT.get(None)
    return launch is not None and launch.wide


def current() -> Launch:
    launch = CURRENT.get(None)
    if launch is None:
        raise EmulatorError("operations must be called inside tritonemu.run, got no launch")
    return launch
