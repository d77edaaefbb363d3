"""Barriers of all kinds, and the counterparts of barriers and buffers in other CTAs."""

from collections.abc import Callable
from typing import Any

import triton.language as tl

from ..barriers import MBarrier, named_barrier
from ..buffers import Buffer
from ..errors import InvalidKernel, OutOfBounds, Wait, current_location
from ..launch import current
from ..rewrite import static_int
from ..tile import scalar
from .table import OPERATIONS, holds, op, point

# mbarriers.


class Barriers:
    """`tlx.alloc_barriers`: an array of mbarriers."""

    def __init__(self, cta: Any, number: int, count: int, threads: bool):
        self.cta, self.name = cta, "barriers"
        scheduler = cta.cluster.scheduler
        self.barriers = [MBarrier(scheduler, cta, "barrier", count, threads) for _ in range(number)]
        for i, barrier in enumerate(self.barriers):
            barrier.key = (cta.number, len(cta.allocations), i)

    def call_it(self, name: str) -> None:
        """Name the barriers after the variable they are first assigned to."""
        if self.name != "barriers":
            return
        self.name = name
        for i, barrier in enumerate(self.barriers):
            barrier.name = f"{name}[{i}]" if len(self.barriers) > 1 else name

    def __getitem__(self, index: Any) -> MBarrier:
        number = int(index)
        if not 0 <= number < len(self.barriers):
            raise OutOfBounds(f"{self.name} has {len(self.barriers)} barriers, got index {number}")
        return self.barriers[number]


def _alloc_barriers(number: int, count: int, threads: bool) -> Barriers:
    role = point()
    barriers = Barriers(role.cta, static_int(number), static_int(count), threads)
    role.cta.reserve(8 * len(barriers.barriers))
    for barrier in barriers.barriers:
        barrier.clock.join(role.clock)
    role.release()
    report = current().report
    role.cta.allocate(barriers)
    kinds = [a for a in role.cta.allocations if isinstance(a, Barriers)]
    report.barriers = max(report.barriers, sum(len(b.barriers) for b in kinds))
    return barriers


@op
def alloc_barriers(num_barriers: int, arrive_count: int = 1) -> Barriers:
    return _alloc_barriers(num_barriers, arrive_count, False)


@op
def alloc_warp_barrier(num_barriers: int, num_warps: int = 1, num_arrivals: int = 1) -> Barriers:
    """Allocate barriers on which every thread of the arriving role arrives."""
    return _alloc_barriers(num_barriers, num_warps * 32 * num_arrivals, True)


def counterpart(cta: Any, what: Any) -> Any:
    """Return the allocation of `cta` that corresponds to `what`; waits until the CTA has made it.

    On a device the cluster is synchronised after its barriers have been initialised.
    """
    number = what.cta.allocations.index(what)
    role = current().role
    while len(cta.allocations) <= number:
        location = current_location()
        cta.waiting.append((number, role))
        wait = Wait(role.label, location, f"start of CTA {cta.number}", 0, 1, 0)
        role.scheduler.block(lambda wait=wait: wait)
    return cta.allocations[number]


def single(barrier: Any) -> MBarrier:
    if isinstance(barrier, Barriers):
        if len(barrier.barriers) != 1:
            raise InvalidKernel(f"{barrier.name} is {len(barrier.barriers)} barriers; index it")
        return barrier[0]
    if not isinstance(barrier, MBarrier):
        raise InvalidKernel(f"an mbarrier is needed here, got {barrier!r}")
    return barrier


def in_cta(barrier: MBarrier, rank: int) -> MBarrier:
    """Return the same barrier in another CTA of the cluster."""
    if rank == barrier.cta.rank:
        return barrier
    array = next(
        a for a in barrier.cta.allocations if isinstance(a, Barriers) and barrier in a.barriers
    )
    other = counterpart(barrier.cta.peer(rank), array)
    return other.barriers[array.barriers.index(barrier)]


def remote(buffer: Buffer, rank: int) -> Buffer:
    """Return the same view of shared or tensor memory in another CTA of the cluster."""
    cta = buffer.storage.cta
    return buffer if rank == cta.rank else buffer.on(counterpart(cta.peer(rank), buffer.storage))


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
        current().report.checks["barrier"] += 1
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


def _meet_by_name(wait: bool) -> Callable:
    def meet(bar: Any, arrive_count: int) -> None:
        role = point()
        named_barrier(role, int(bar)).arrive(role, int(arrive_count), wait)

    return meet


def _cluster() -> Any:
    return current().role.cta.cluster


for _name, _operation in {
    "named_barrier_wait": _meet_by_name(True),
    "named_barrier_arrive": _meet_by_name(False),
    "cluster_barrier": lambda: _cluster().barrier.wait(point()),
    "remote_view": lambda barrier, remote_cta_rank: in_cta(single(barrier), int(remote_cta_rank)),
    "cluster_cta_rank": lambda: scalar(current().role.cta.rank, tl.int32),
    "cluster_size_1d": lambda: scalar(len(_cluster().ctas), tl.int32),
    "fence_async_shared": lambda: current().role.fence(),
}.items():
    op(_operation, _name)
# Hints, and operations that the clocks do not need.
for _name in (
    *("fence_mbarrier_init_cluster", "prefetch", "async_descriptor_prefetch_tensor"),
    *("assert_same_layout", "dump_layout"),
):
    OPERATIONS[_name] = lambda *args, **kwargs: None
