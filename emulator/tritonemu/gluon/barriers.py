"""mbarriers of Gluon: memory that `init` makes a barrier and `invalidate` makes memory again.

CTAs whose ranks differ only in bits that the layout leaves out have one barrier, which lies in the
first of them: all of them arrive there, `init` counts for each, and only the first one waits.
"""

from typing import Any

import triton.language as tl
from triton.experimental.gluon.language.nvidia.ampere.mbarrier import MBarrierLayout

from ..errors import BarrierMisuse, current_location
from ..launch import current
from ..machine.table import point
from ..rewrite import static_int
from .ctas import all_here, in_ctas, others
from .memory import Sharded, allocate_shared_memory, free


def performed(pred: Any) -> bool:
    """Return whether an operation with this predicate, a constant or a scalar, is performed."""
    return pred is None or bool(pred)


def allocate_mbarrier(batch: Any = None, two_ctas: bool = False) -> Sharded:
    number = current().num_ctas // (2 if two_ctas else 1)
    shape = (number,) if batch is None else (batch, number)
    layout = MBarrierLayout.multicta(current().num_ctas, bool(two_ctas))
    return allocate_shared_memory(tl.int64, shape, layout)


def init(mbarrier: Sharded, count: int) -> None:
    point()
    role, group, index = all_here("init"), free(mbarrier), mbarrier.view.offset
    initialisers = [(lane.index, lane.epoch) for lane in role.lanes]
    for lane in in_ctas():
        clock, array = lane.release(), mbarrier.barriers_of(lane.cta.rank)
        if lane.cta.rank & group:
            continue
        if index in array.live:
            name = array.name_of(index)
            raise BarrierMisuse(f"{name} is initialised again without invalidate", barrier=name)
        barrier = array.init(index, clock, static_int(count) << group.bit_count())
        barrier.initialisers = initialisers


def invalidate(mbarrier: Sharded) -> None:
    point()
    all_here("invalidate")
    for lane in in_ctas():
        if lane.cta.rank & free(mbarrier):
            continue
        barrier = mbarrier.barrier_of(lane.cta.rank)
        if barrier.waiters:
            raise barrier.misuse(f"invalidated while {barrier.waiters[0][0].label} waits for it")
        barrier.finish()
        del mbarrier.barriers_of(lane.cta.rank).live[mbarrier.view.offset]


def _arrive(
    mbarrier: Sharded, count: int, pred: Any, from_cta: Any, num_bytes: int | None = None
) -> None:
    """Arrive in each CTA at its own barrier; with from_cta once per value of the other bits."""
    sent = 0 if from_cta is None else (current().num_ctas - 1) & ~static_int(from_cta)
    location = current_location()
    for lane in in_ctas():
        point()
        if performed(pred) and not lane.cta.rank & sent:
            clock = lane.release() if num_bytes is None else lane.release_by_one("expect", location)
            for rank in others(lane.cta.rank, sent):
                one = mbarrier.barrier_of(rank)
                one.arrive(count, clock, lane.time, lane, location, num_bytes=num_bytes or 0)


def expect(
    mbarrier: Sharded, bytes_per_cta: Any, pred: Any = True, *, from_cta: Any = None
) -> None:
    _arrive(mbarrier, 1, pred, from_cta, int(bytes_per_cta))


def arrive(mbarrier: Sharded, *, count: int = 1, pred: Any = True, from_cta: Any = None) -> None:
    _arrive(mbarrier, static_int(count), pred, from_cta)


def wait(mbarrier: Sharded, phase: Any, pred: Any = True, deps: Any = ()) -> None:
    for lane in in_ctas():
        point()
        if performed(pred) and not lane.cta.rank & free(mbarrier):
            barrier = mbarrier.barrier_of(lane.cta.rank)
            if not barrier.passes(int(phase)):
                all_here(f"a wait for {barrier.name}")
            barrier.wait(lane, phase)


def fence_async_shared(cluster: bool = False) -> None:
    for _ in in_ctas():
        point().fence()


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
