"""Barriers of all kinds, and the counterparts of barriers and buffers in other CTAs."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import triton.language as tl

from ..barriers import MBarrier, named_barrier
from ..buffers import Buffer
from ..clocks import Clock
from ..errors import BarrierMisuse, InvalidKernel, OutOfBounds, Wait, current_location
from ..launch import current
from ..rewrite import static_int
from ..tile import scalar
from .table import OPERATIONS, holds, op, point

# mbarriers.


@dataclass(eq=False)
class Barriers:
    """mbarriers of one allocation in a CTA, which is its allocation `serial`.

    number: how many there may be. live: those that are initialised, by their index.
    """

    cta: Any
    serial: int
    number: int
    name: str = "barriers"
    live: dict[int, MBarrier] = field(default_factory=dict)

    @property
    def barriers(self) -> Iterable[MBarrier]:
        return self.live.values()

    def init(self, index: int, clock: Clock, count: int, threads: bool = False) -> MBarrier:
        """Initialise one of them, by somebody whose clock is `clock`."""
        scheduler, report = self.cta.cluster.scheduler, current().report
        barrier = MBarrier(scheduler, self.cta, self.name_of(index), count, threads)
        barrier.key = self.cta.number, self.serial, index
        barrier.clock.join(clock)
        self.live[index] = barrier
        numbers = (len(getattr(each, "barriers", ())) for each in self.cta.allocations)
        report.barriers = max(report.barriers, sum(numbers))
        return barrier

    def name_of(self, index: int) -> str:
        return f"{self.name}[{index}]" if self.number > 1 else self.name

    def call_it(self, name: str) -> None:
        """Name the barriers after the variable they are first assigned to."""
        self.name = name if self.name == "barriers" else self.name
        for index, barrier in self.live.items():
            barrier.name = self.name_of(index)

    def __getitem__(self, index: Any) -> MBarrier:
        """Return one that is initialised; raises OutOfBounds and BarrierMisuse."""
        number = int(index)
        if not 0 <= number < self.number:
            raise OutOfBounds(f"{self.name} has {self.number} barriers, got index {number}")
        if number not in self.live:
            name = self.name_of(number)
            raise BarrierMisuse(f"{name} is used before init, or after invalidate", barrier=name)
        return self.live[number]


@op
def alloc_barriers(num_barriers: int, arrive_count: int = 1, *, threads: bool = False) -> Barriers:
    """Allocate barriers; threads: every thread of the arriving role arrives on them."""
    role = point()
    barriers = Barriers(role.cta, len(role.cta.allocations), static_int(num_barriers))
    role.cta.reserve(8 * barriers.number)
    role.cta.allocate(barriers)
    for index in range(barriers.number):
        barriers.init(index, role.clock, static_int(arrive_count), threads)
    role.release()
    return barriers


@op
def alloc_warp_barrier(num_barriers: int, num_warps: int = 1, num_arrivals: int = 1) -> Barriers:
    return alloc_barriers(num_barriers, num_warps * 32 * num_arrivals, threads=True)


def counterpart(cta: Any, number: int) -> Any:
    """Return the allocation `number` of `cta`; waits until the CTA has made it.

    On a device the cluster is synchronised after its barriers have been initialised.
    """
    role = current().role
    while len(cta.allocations) <= number:
        location = current_location()
        cta.waiting.append((number, role))
        wait = Wait(role.label, location, f"start of CTA {cta.number}", 0, 1, 0)
        role.scheduler.block(lambda wait=wait: wait)
    return cta.allocations[number]


def single(barrier: Any) -> MBarrier:
    if isinstance(barrier, Barriers):
        if barrier.number != 1:
            raise InvalidKernel(f"{barrier.name} is {barrier.number} barriers; index it")
        return barrier[0]
    if not isinstance(barrier, MBarrier):
        raise InvalidKernel(f"an mbarrier is needed here, got {barrier!r}")
    return barrier


def in_cta(barrier: MBarrier, rank: int) -> MBarrier:
    """Return the same barrier in another CTA of the cluster."""
    if rank == barrier.cta.rank:
        return barrier
    _, number, index = barrier.key
    return counterpart(barrier.cta.peer(rank), number)[index]


def remote(buffer: Buffer, rank: int) -> Buffer:
    """Return the same view of shared or tensor memory in another CTA of the cluster."""
    cta = buffer.storage.cta
    if rank == cta.rank:
        return buffer
    return buffer.on(counterpart(cta.peer(rank), cta.allocations.index(buffer.storage)))


@op
def barrier_expect_bytes(bar: Any, size: int, pred: Any = None) -> None:
    role, bar = point(), single(bar)
    if holds(pred):
        location = current_location()
        clock = role.release_by_one("expect", location)
        bar.arrive(1, clock, role.time, role, location, num_bytes=int(size))


@op
def barrier_wait(bar: Any, phase: Any, pred: Any = None) -> None:
    role, bar = point(), single(bar)
    if bar.cta is not role.cta:
        raise InvalidKernel("barrier_wait takes a barrier of its own CTA")
    if holds(pred):
        bar.wait(role, phase)


@op
def barrier_arrive(
    bar: Any, arrive_count: int = 1, remote_cta_rank: Any = None, pred: Any = None
) -> None:
    role, bar = point(), single(bar)
    if remote_cta_rank is not None:
        bar = in_cta(bar, int(remote_cta_rank))
    if holds(pred):
        count = arrive_count * (32 * role.warps if bar.threads else 1)
        clock = role.release_by_each() if bar.threads else role.release()
        bar.arrive(count, clock, role.time, role, current_location())


@op
def fence(scope: str) -> None:
    if scope not in ("gpu", "sys", "async_shared"):
        raise InvalidKernel(f'scope of fence must be "gpu", "sys" or "async_shared", got {scope!r}')
    if scope == "async_shared":
        current().role.fence()


def _meet(bar: Any, arrive_count: int, wait: bool) -> None:
    role = point()
    named_barrier(role, int(bar)).arrive(role, int(arrive_count), wait)


for _name, _operation in {
    "named_barrier_wait": lambda bar, arrive_count: _meet(bar, arrive_count, True),
    "named_barrier_arrive": lambda bar, arrive_count: _meet(bar, arrive_count, False),
    "cluster_barrier": lambda: current().role.cta.cluster.barrier.count(point(), 1, wait=True),
    "remote_view": lambda barrier, remote_cta_rank: in_cta(single(barrier), int(remote_cta_rank)),
    "cluster_cta_rank": lambda: scalar(current().role.cta.rank, tl.int32),
    "cluster_size_1d": lambda: scalar(len(current().role.cta.cluster.ctas), tl.int32),
    "fence_async_shared": lambda: current().role.fence(),
}.items():
    op(_operation, _name)
# Hints, and operations that the clocks do not need.
for _name in (
    *("fence_mbarrier_init_cluster", "prefetch", "async_descriptor_prefetch_tensor"),
    *("assert_same_layout", "dump_layout"),
):
    OPERATIONS[_name] = lambda *args, **kwargs: None
