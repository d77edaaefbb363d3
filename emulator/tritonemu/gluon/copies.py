"""TMA and cp.async of Gluon."""

from typing import Any

from ..errors import location
from ..language import make_tensor_descriptor as make_descriptor
from ..machine import copies
from ..machine.table import point
from ..rewrite import static_int
from .barriers import barrier_of, performed
from .memory import described


def async_load(
    tensor_desc: Any, coord: Any, barrier: Any, result: Any, pred: Any = True,
    multicast: bool = False, cache_policy: Any = None,
) -> None:  # fmt: skip
    if performed(pred):
        copies.async_descriptor_load(tensor_desc, result, coord, barrier_of(barrier))


def async_store(tensor_desc: Any, coord: Any, src: Any, cache_policy: Any = None) -> None:
    copies.async_descriptor_store(tensor_desc, src, coord)


def _atomic(kind: str) -> Any:
    def store(tensor_desc: Any, coord: Any, src: Any) -> None:
        copies.async_descriptor_store(tensor_desc, src, coord, store_reduce=kind)

    return store


def store_wait(pendings: int, read_only: bool = True) -> None:
    if read_only:
        copies.async_descriptor_store_wait(pendings)
    else:
        copies.wait_for_landings(static_int(pendings))


def make_tensor_descriptor(
    base: Any, shape: Any, strides: Any, block_shape: Any, layout: Any,
    padding_option: str = "zero",
) -> Any:  # fmt: skip
    made = make_descriptor(base, shape, strides, block_shape, padding_option)
    return described(made, layout)


TMA = {
    **{f.__name__: f for f in (async_load, async_store, store_wait, make_tensor_descriptor)},
    **{f"async_atomic_{kind}": _atomic(kind) for kind in ("add", "min", "max", "and", "or", "xor")},
}


def cp_async(
    smem: Any, pointer: Any, mask: Any = None, cache_modifier: Any = None,
    eviction_policy: Any = None, volatile: bool = False, cache_policy: Any = None,
) -> None:  # fmt: skip
    copies.async_load(pointer, smem, mask)


def commit_group() -> None:
    copies.async_load_commit_group()


def wait_group(num_outstanding: int = 0) -> None:
    copies.async_load_wait_group(num_outstanding)


def mbarrier_arrive(mbarrier: Any, increment_count: bool = True) -> None:
    """Every thread arrives when the role's cp.async so far are complete.

    With increment_count the barrier expects as many more arrivals: only those of others count.
    """
    role, barrier, at = point(), barrier_of(mbarrier), location()
    threads, clock, end = 32 * role.warps, role.release(), role.time
    if increment_count:
        barrier.pending += threads
    for operation in (operation for group in role.copies for operation in group):
        clock.join(operation.clock)
        end = max(end, operation.end)
    role.scheduler.at(end, lambda: barrier.arrive(threads, clock, end, "cp.async", at))


ASYNC_COPY = {
    "async_load": cp_async,
    **{f.__name__: f for f in (commit_group, wait_group, mbarrier_arrive)},
}
