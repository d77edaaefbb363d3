"""mbarriers of Gluon: memory that `init` makes a barrier and `invalidate` makes memory again."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from ..barriers import MBarrier
from ..errors import BarrierMisuse, InvalidKernel, OutOfBounds, Unsupported, location
from ..launch import current
from ..machine.sync import cluster_barrier
from ..machine.table import point
from ..rewrite import static_int


@dataclass(eq=False)
class Cells:
    """The barriers of one allocation: those that are initialised, and how many there may be.

    made: index and epoch of the role that initialised each.
    """

    cta: Any
    number: int
    name: str = "barriers"
    live: dict[int, MBarrier] = field(default_factory=dict)
    made: dict[int, tuple[int, int]] = field(default_factory=dict)

    @property
    def barriers(self) -> Sequence[MBarrier]:
        return tuple(self.live.values())


@dataclass(eq=False)
class MBarriers:
    """A descriptor of one barrier, or of an array of them."""

    cells: Cells
    shape: tuple[int, ...]
    at: int = 0

    @classmethod
    def allocate(cls, role: Any, shape: tuple[int, ...]) -> "MBarriers":
        if len(shape) not in (1, 2) or shape[-1] != 1:
            raise InvalidKernel(f"mbarriers of one CTA have shape [1] or [N, 1], got {[*shape]}")
        cells = Cells(role.cta, shape[0] if len(shape) == 2 else 1)
        role.cta.reserve(8 * cells.number)
        role.cta.allocate(cells)
        return cls(cells, shape)

    @property
    def type(self) -> "MBarriers":
        return self

    def call_it(self, name: str) -> None:
        if self.cells.name == "barriers":
            self.cells.name = name

    def index(self, index: Any) -> "MBarriers":
        """The barrier there; that there is one, its use asks for."""
        number = int(index)
        if len(self.shape) != 2:
            raise InvalidKernel(f"{self.cells.name} is one barrier, and has no index")
        return MBarriers(self.cells, (1,), number)

    @property
    def name(self) -> str:
        several = self.cells.number > 1
        return f"{self.cells.name}[{self.at}]" if several else self.cells.name

    @property
    def barrier(self) -> MBarrier:
        """The barrier that `init` has made of it; raises BarrierMisuse if none did."""
        if len(self.shape) != 1:
            raise InvalidKernel(f"{self.cells.name} is {self.cells.number} barriers; index it")
        if not 0 <= self.at < self.cells.number:
            raise OutOfBounds(
                f"{self.cells.name} has {self.cells.number} barriers, got index {self.at}"
            )
        if self.at not in self.cells.live:
            raise BarrierMisuse(
                f"{self.name} is used before init, or after invalidate", barrier=self.name
            )
        index, epoch = self.cells.made[self.at]
        if current().role.clock.epochs.get(index, 0) < epoch:
            raise BarrierMisuse(
                f"{self.name} is used, and nothing orders that after its init", barrier=self.name
            )
        return self.cells.live[self.at]


def performed(pred: Any) -> bool:
    """Whether an operation with this predicate, a constant or a scalar, is performed."""
    return pred is None or bool(pred)


def barrier_of(what: Any) -> MBarrier:
    if not isinstance(what, MBarriers):
        raise InvalidKernel(f"an mbarrier is needed here, got {what!r}")
    return what.barrier


def allocate_mbarrier(batch: Any = None, two_ctas: bool = False) -> MBarriers:
    if two_ctas:
        raise Unsupported("allocate_mbarrier(two_ctas=True)")
    shape = (1,) if batch is None else (static_int(batch), 1)
    return MBarriers.allocate(point(), shape)


def init(mbarrier: MBarriers, count: int) -> None:
    role = point()
    if mbarrier.at in mbarrier.cells.live:
        raise BarrierMisuse(
            f"{mbarrier.name} is initialised again without invalidate", barrier=mbarrier.name
        )
    made = MBarrier(role.scheduler, role.cta, mbarrier.name, static_int(count), False)
    made.key = (role.cta.number, id(mbarrier.cells), mbarrier.at)
    mbarrier.cells.made[mbarrier.at] = (role.index, role.epoch)
    made.clock.join(role.release())
    mbarrier.cells.live[mbarrier.at] = made
    current().report.barriers += 1


def invalidate(mbarrier: MBarriers) -> None:
    point()
    barrier = barrier_of(mbarrier)
    if barrier.waiters:
        raise barrier.misuse(f"invalidated while {barrier.waiters[0][0].label} waits for it")
    barrier.finish()
    del mbarrier.cells.live[mbarrier.at]


def _own(from_cta: Any) -> None:
    if from_cta is not None:
        raise Unsupported("an mbarrier of another CTA (from_cta)")


def expect(
    mbarrier: MBarriers, bytes_per_cta: Any = None, pred: Any = True, *, from_cta: Any = None
) -> None:
    role = point()
    _own(from_cta)
    if bytes_per_cta is None:
        raise InvalidKernel("mbarrier.expect needs bytes_per_cta")
    if performed(pred):
        number, barrier, at = int(bytes_per_cta), barrier_of(mbarrier), location()
        clock = role.release_by_one("expect", at)
        barrier.arrive(1, clock, role.time, role, at, num_bytes=number)


def arrive(mbarrier: MBarriers, *, count: int = 1, pred: Any = True, from_cta: Any = None) -> None:
    role = point()
    _own(from_cta)
    if performed(pred):
        barrier = barrier_of(mbarrier)
        barrier.arrive(static_int(count), role.release(), role.time, role, location())


def wait(mbarrier: MBarriers, phase: Any, pred: Any = True, deps: Any = ()) -> None:
    role = point()
    if performed(pred):
        barrier = barrier_of(mbarrier)
        current().report.checks["barrier"] += 1
        barrier.wait(role, int(phase))


def fence_async_shared(cluster: bool = False) -> None:
    point().fence()


def barrier(*, cluster: bool = False) -> None:
    """`gl.barrier`: of the warps of a partition, which run as one here."""
    point().meet()
    if cluster:
        cluster_barrier()


OPERATIONS = {
    each.__name__: each for each in (allocate_mbarrier, init, invalidate, expect, arrive, wait)
}
