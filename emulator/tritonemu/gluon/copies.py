"""TMA and cp.async of Gluon."""

from typing import Any

import torch
import triton.language as tl

from ..errors import location
from ..language import make_tensor_descriptor as make_descriptor
from ..machine import copies, views
from ..machine.table import blackwell_only, point
from ..rewrite import static_int
from ..tile import Tile, scalar
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
    threads, clock, end = 32 * role.warps, role.release_by_each(), role.time
    if increment_count:
        barrier.pending += threads
    for operation in (operation for group in role.copies for operation in group):
        clock.join(operation.clock)
        end = max(end, operation.end)
    role.scheduler.at(end, lambda: barrier.arrive(threads, clock, end, "cp.async", at))


def async_gather(
    tensor_desc: Any, x_offsets: Any, y_offset: Any, barrier: Any, result: Any, pred: Any = True,
    multicast: bool = False, cache_policy: Any = None,
) -> None:  # fmt: skip
    if performed(pred):
        bar = barrier_of(barrier)
        copies.async_descriptor_gather(tensor_desc, result, x_offsets, y_offset, bar)


def async_scatter(
    tensor_desc: Any, x_offsets: Any, y_offset: Any, src: Any, cache_policy: Any = None
) -> None:
    copies.async_descriptor_scatter(tensor_desc, src, x_offsets, y_offset)


BLACKWELL_TMA = {**TMA, "async_gather": async_gather, "async_scatter": async_scatter}


class Canceled:
    """What `clc.load_result` reads: the program that was taken over, if any."""

    def __init__(self, response: list[int]):
        self.program, self.valid = response[:3], bool(response[3])

    def is_canceled(self) -> Tile:
        return scalar(self.valid, tl.int1)

    def program_id(self, dim: Any) -> Tile:
        return scalar(self.program[static_int(dim)], tl.int32)


def try_cancel(result: Any, barrier: Any) -> None:
    blackwell_only("clc.try_cancel")
    copies.try_cancel(result, barrier_of(barrier))


def load_result(src: Any) -> Canceled:
    return Canceled(views.local_load(src).data.view(torch.int32).tolist())


CLC = {"try_cancel": try_cancel, "load_result": load_result}

ASYNC_COPY = {
    "async_load": cp_async,
    **{f.__name__: f for f in (commit_group, wait_group, mbarrier_arrive)},
}
