"""mbarriers of Gluon: memory that `init` makes a barrier and `invalidate` makes memory again.

CTAs whose ranks differ only in bits that the layout leaves out have one barrier, which lies in the
first of them: all of them arrive there, `init` counts for each, and only the first one waits.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from triton.experimental.gluon.language.nvidia.ampere.mbarrier import MBarrierLayout

from ..barriers import MBarrier
from ..errors import BarrierMisuse, InvalidKernel, OutOfBounds, current_location
from ..launch import current
from ..machine.table import point
from ..rewrite import static_int
from .ctas import all_here, in_ctas, others, required


@dataclass(eq=False)
class Cells:
    """Barriers of one allocation in one CTA: the initialised ones, and how many there may be.

    initialisers: index and epoch of the role that initialised each, in every CTA of the program:
    the compiler makes these wait for each other before they use it.
    """

    cta: Any
    number: int
    name: str = "barriers"
    live: dict[int, MBarrier] = field(default_factory=dict)
    initialisers: dict[int, list[tuple[int, int]]] = field(default_factory=dict)

    @property
    def barriers(self) -> Sequence[MBarrier]:
        return tuple(self.live.values())


@dataclass(eq=False)
class MBarriers:
    """A descriptor of one barrier for each group of CTAs, or of an array of them.

    cells: of each CTA. group: the bits of the rank in which CTAs with one barrier differ.
    """

    cells: tuple[Cells, ...]
    shape: tuple[int, ...]
    group: int = 0
    position: int = 0

    @classmethod
    def allocate(cls, role: Any, shape: tuple[int, ...], layout: Any) -> "MBarriers":
        group = required(layout, shape).free
        several = len(role.lanes) >> group.bit_count()
        if len(shape) not in (1, 2) or shape[-1] != several:
            raise InvalidKernel(
                f"mbarriers of {several} CTAs, or groups of them, have shape [{several}] or "
                f"[N, {several}], got {[*shape]}"
            )
        number = shape[0] if len(shape) == 2 else 1
        cells = tuple(Cells(lane.cta, number) for lane in role.lanes)
        for each in cells:
            each.cta.reserve(8 * number)
            each.cta.allocate(each)
        return cls(cells, shape, group)

    @property
    def type(self) -> "MBarriers":
        return self

    def call_it(self, name: str) -> None:
        for cells in self.cells:
            if cells.name == "barriers":
                cells.name = name

    def index(self, index: Any) -> "MBarriers":
        """Return the barrier at an index, whose bounds are checked on use."""
        number = int(index)
        if len(self.shape) != 2:
            raise InvalidKernel(f"{self.cells[0].name} is one barrier, and has no index")
        return MBarriers(self.cells, self.shape[1:], self.group, number)

    @property
    def name(self) -> str:
        several, name = self.cells[0].number > 1, self.cells[0].name
        return f"{name}[{self.position}]" if several else name

    def of(self, rank: int) -> MBarrier:
        """Return the mbarrier that `init` made for this CTA; raises BarrierMisuse before that."""
        cells = self.cells[rank & ~self.group]
        if len(self.shape) != 1:
            raise InvalidKernel(f"{cells.name} is {cells.number} barriers; index it")
        if not 0 <= self.position < cells.number:
            count, index = cells.number, self.position
            raise OutOfBounds(f"{cells.name} has {count} barriers, got index {index}")
        if self.position not in cells.live:
            raise BarrierMisuse(
                f"{self.name} is used before init, or after invalidate", barrier=self.name
            )
        role = current().role
        index, epoch = cells.initialisers[self.position][role.cta.rank]
        if role.clock.epochs.get(index, 0) < epoch:
            raise BarrierMisuse(
                f"{self.name} is used, and nothing orders that after its init", barrier=self.name
            )
        return cells.live[self.position]


def performed(pred: Any) -> bool:
    """Return whether an operation with this predicate, a constant or a scalar, is performed."""
    return pred is None or bool(pred)


def barriers_of(what: Any) -> MBarriers:
    """Convert to a descriptor of a barrier; one of plain memory may become one."""
    what = what.as_barriers() if hasattr(what, "as_barriers") else what
    if not isinstance(what, MBarriers):
        raise InvalidKernel(f"an mbarrier is needed here, got {what!r}")
    return what


def allocate_mbarrier(batch: Any = None, two_ctas: bool = False) -> MBarriers:
    point()
    role = all_here("allocate_mbarrier")
    number = len(role.lanes) // (2 if two_ctas else 1)
    shape = (number,) if batch is None else (static_int(batch), number)
    layout = MBarrierLayout.multicta(len(role.lanes), bool(two_ctas))
    return MBarriers.allocate(role, shape, layout)


def init(mbarrier: Any, count: int) -> None:
    point()
    role, barriers = all_here("init"), barriers_of(mbarrier)
    arrivals = static_int(count) << barriers.group.bit_count()
    initialisers = [(lane.index, lane.epoch) for lane in role.lanes]

    def make(lane: Any) -> None:
        clock, cells = lane.release(), barriers.cells[lane.cta.rank]
        if lane.cta.rank & barriers.group:
            return
        if barriers.position in cells.live:
            raise BarrierMisuse(
                f"{barriers.name} is initialised again without invalidate", barrier=barriers.name
            )
        one = MBarrier(role.scheduler, lane.cta, barriers.name, arrivals, False)
        one.key = (lane.cta.number, id(cells), barriers.position)
        one.clock.join(clock)
        cells.initialisers[barriers.position], cells.live[barriers.position] = initialisers, one
        report, all_cells = current().report, [c for c in lane.cta.allocations if type(c) is Cells]
        report.barriers = max(report.barriers, sum(len(c.live) for c in all_cells))

    in_ctas(make)


def invalidate(mbarrier: Any) -> None:
    point()
    all_here("invalidate")
    barriers = barriers_of(mbarrier)

    def end(lane: Any) -> None:
        if lane.cta.rank & barriers.group:
            return
        barrier = barriers.of(lane.cta.rank)
        if barrier.waiters:
            raise barrier.misuse(f"invalidated while {barrier.waiters[0][0].label} waits for it")
        barrier.finish()
        del barriers.cells[lane.cta.rank].live[barriers.position]

    in_ctas(end)


def _arrive(
    mbarrier: Any, count: int, pred: Any, from_cta: Any, num_bytes: int | None = None
) -> None:
    """Arrive in each CTA at its own barrier; with from_cta once per value of the other bits."""
    barriers, last = barriers_of(mbarrier), current().num_ctas - 1
    if from_cta is not None and (barriers.group or not 0 <= static_int(from_cta) <= last):
        raise InvalidKernel(
            f"from_cta takes a barrier of each CTA and a mask in [0, {last}], got {from_cta!r}"
        )
    sent = 0 if from_cta is None else last & ~static_int(from_cta)

    def act(lane: Any) -> None:
        point()
        if performed(pred) and not lane.cta.rank & sent:
            location = current_location()
            clock = lane.release() if num_bytes is None else lane.release_by_one("expect", location)
            for rank in others(lane.cta.rank, sent):
                one = barriers.of(rank)
                one.arrive(count, clock, lane.time, lane, location, num_bytes=num_bytes or 0)

    in_ctas(act)


def expect(
    mbarrier: Any, bytes_per_cta: Any = None, pred: Any = True, *, from_cta: Any = None
) -> None:
    if bytes_per_cta is None:
        raise InvalidKernel("mbarrier.expect needs bytes_per_cta")
    _arrive(mbarrier, 1, pred, from_cta, int(bytes_per_cta))


def arrive(mbarrier: Any, *, count: int = 1, pred: Any = True, from_cta: Any = None) -> None:
    _arrive(mbarrier, static_int(count), pred, from_cta)


def wait(mbarrier: Any, phase: Any, pred: Any = True, deps: Any = ()) -> None:
    barriers = barriers_of(mbarrier)

    def act(lane: Any) -> None:
        point()
        if performed(pred) and not lane.cta.rank & barriers.group:
            barrier = barriers.of(lane.cta.rank)
            if not barrier.passes(int(phase)):
                all_here(f"a wait for {barriers.name}")
            current().report.checks["barrier"] += 1
            barrier.wait(lane, phase)

    in_ctas(act)


def fence_async_shared(cluster: bool = False) -> None:
    in_ctas(lambda lane: point().fence())


def barrier(*, cluster: bool = False) -> None:
    """Implement `gl.barrier`: for a partition's warps, one here, or for all CTAs."""
    point().meet()
    if cluster:
        cluster_barrier()


def cluster_barrier(relaxed: bool = False) -> None:
    """Implement `cluster.barrier`; a relaxed one orders no memory."""
    point()
    role = all_here("a cluster barrier")
    if not relaxed:
        role.joined()


OPERATIONS = {
    each.__name__: each for each in (allocate_mbarrier, init, invalidate, expect, arrive, wait)
}
