"""TMA and cp.async of Gluon."""

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
import triton.language as tl

from ..barriers import MBarrier
from ..errors import Unsupported, current_location
from ..language import make_tensor_descriptor as make_descriptor
from ..launch import current
from ..machine import copies, views
from ..machine.table import blackwell_only, point, uncharged
from ..memory import REDUCTIONS
from ..rewrite import static_int
from ..scheduler import Role
from ..tile import Tile, scalar
from .barriers import performed
from .ctas import all_here, cut, in_ctas, others
from .memory import View, described, free


def _box(desc: Any, coord: Any, memory: Any, cta: Any) -> tuple[Any, Any]:
    """Return the descriptor of the box that the CTA has, and the coordinates where it begins."""
    shape, sharding = desc.block_shape, memory.sharding
    box, local = sharding.box(shape, cta.rank), desc.with_box(sharding.local(shape))
    return local, tuple(x + start if start else x for x, (start, _) in zip(coord, box, strict=True))


def _loads(
    barrier: Any, result: Any, pred: Any, multicast: bool
) -> Iterator[tuple[Role, View, list[tuple[int, MBarrier]]]]:
    """Yield the role of each CTA, its part, and the CTAs that get it, each with its barrier.

    With multicast one CTA loads for all that have the same part.
    """
    several = free(result) if multicast else 0
    for lane in in_ctas() if performed(pred) else ():
        point()
        if not lane.cta.rank & several:
            targets = [(rank, barrier.barrier_of(rank)) for rank in others(lane.cta.rank, several)]
            yield lane, result.of(lane.cta).single(), targets


def _stores(source: Any) -> Iterator[tuple[Any, View]]:
    """Yield CTAs and their parts; the first one stores for all that have the same part."""
    for lane in in_ctas():
        if not lane.cta.rank & free(source):
            yield lane.cta, source.of(lane.cta)


def async_load(
    tensor_desc: Any, coord: Any, barrier: Any, result: Any, pred: Any = True,
    multicast: bool = False, cache_policy: Any = None,
) -> None:  # fmt: skip
    for lane, view, targets in _loads(barrier, result, pred, multicast):
        desc, start = _box(tensor_desc, coord, result, lane.cta)
        copies.load(lane, desc, view, desc.block_shape, partial(desc.fetch, start), targets)


def async_load_im2col(
    tensor_desc: Any, coord: Any, offsets: Any, barrier: Any, result: Any, pred: Any = True,
    multicast: bool = False, cache_policy: Any = None,
) -> None:  # fmt: skip
    if current().num_ctas > 1:
        raise Unsupported("async_load_im2col in a program of several CTAs")
    for lane, view, targets in _loads(barrier, result, pred, multicast):
        fetch = partial(tensor_desc.fetch, (coord, offsets))
        copies.load(lane, tensor_desc, view, tensor_desc.block_shape, fetch, targets)


def async_store(
    tensor_desc: Any, coord: Any, src: Any, cache_policy: Any = None, kind: str = ""
) -> None:
    for cta, view in _stores(src):
        desc, start = _box(tensor_desc, coord, src, cta)
        copies.async_descriptor_store(desc, view, start, store_reduce=kind)


def store_wait(pendings: int, read_only: bool = True) -> None:
    for _ in in_ctas():
        if read_only:
            copies.async_descriptor_store_wait(pendings)
        else:
            copies.wait_for_landings(static_int(pendings))


def make_tensor_descriptor(
    base: Any, shape: Any, strides: Any, block_shape: Any, layout: Any,
    padding_option: str = "zero",
) -> Any:  # fmt: skip
    descriptor = make_descriptor(base, shape, strides, block_shape, padding_option)
    return described(descriptor.placed(), layout)


TMA = {
    **{f.__name__: f for f in (async_load, async_load_im2col, async_store, store_wait)},
    "make_tensor_descriptor": make_tensor_descriptor,
    **{f"async_atomic_{kind}": partial(async_store, kind=kind) for kind in REDUCTIONS},
}


@uncharged
def cp_async(
    smem: Any, pointer: Any, mask: Any = None, cache_modifier: Any = None,
    eviction_policy: Any = None, volatile: bool = False, cache_policy: Any = None,
) -> None:  # fmt: skip
    for lane in in_ctas():
        box = smem.box(lane.cta)
        copies.async_load(cut(pointer, box), smem.of(lane.cta), cut(mask, box))


def commit_group() -> None:
    for _ in in_ctas():
        copies.async_load_commit_group()


def wait_group(num_outstanding: int = 0) -> None:
    for _ in in_ctas():
        copies.async_load_wait_group(num_outstanding)


def mbarrier_arrive(mbarrier: Any, increment_count: bool = True) -> None:
    """Arrive with every thread when the role's cp.async so far are complete.

    With increment_count the barrier expects as many more arrivals: only those of others count.
    """
    location = current_location()
    for lane in in_ctas():
        role, barrier = point(), mbarrier.barrier_of(lane.cta.rank)
        threads, clock, end = 32 * role.warps, role.release_by_each(), role.time
        if increment_count:
            barrier.pending += threads
        for operation in (operation for group in role.copies for operation in group):
            clock.join(operation.clock)
            end = max(end, operation.end)
        role.scheduler.at(end, partial(barrier.arrive, threads, clock, end, "cp.async", location))


def _rows(desc: Any, x_offsets: Any, y_offset: Any, memory: Any, cta: Any) -> tuple[Any, Any, Any]:
    """Return the descriptor, rows and column of the CTA's part."""
    shape = *x_offsets.shape, desc.block_shape[-1]
    rows, (column, width) = memory.sharding.box(shape, cta.rank)
    offset = y_offset + column if column else y_offset
    return desc.with_box((1, width)), cut(x_offsets, (rows,)), offset


def async_gather(
    tensor_desc: Any, x_offsets: Any, y_offset: Any, barrier: Any, result: Any, pred: Any = True,
    multicast: bool = False, cache_policy: Any = None,
) -> None:  # fmt: skip
    for lane, view, targets in _loads(barrier, result, pred, multicast):
        desc, rows, column = _rows(tensor_desc, x_offsets, y_offset, result, lane.cta)
        shape, fetch = (len(rows.data), desc.block_shape[1]), partial(desc.gather, rows, column)
        copies.load(lane, desc, view, shape, fetch, targets)


def async_scatter(
    tensor_desc: Any, x_offsets: Any, y_offset: Any, src: Any, cache_policy: Any = None
) -> None:
    for cta, view in _stores(src):
        desc, rows, column = _rows(tensor_desc, x_offsets, y_offset, src, cta)
        copies.async_descriptor_scatter(desc, view, rows, column)


BLACKWELL_TMA = {**TMA, "async_gather": async_gather, "async_scatter": async_scatter}


class Canceled:
    """Result of `clc.load_result`: the program that was taken over, if any."""

    def __init__(self, response: list[int]):
        self.program, self.valid = response[:3], bool(response[3])

    def is_canceled(self) -> Tile:
        return scalar(self.valid, tl.int1)

    def program_id(self, dim: Any) -> Tile:
        return scalar(self.program[static_int(dim)], tl.int32)


def try_cancel(result: Any, barrier: Any) -> None:
    """Take over a cluster once for all CTAs, issued by the first one."""
    blackwell_only("clc.try_cancel")
    point()
    role = all_here("try_cancel")
    barriers = [barrier.barrier_of(lane.cta.rank) for lane in role.lanes]
    copies.try_cancel(result.of(role.cta).single(), barriers)


def load_result(src: Any) -> Canceled:
    response, *_ = [views.local_load(src.of(lane.cta)) for lane in in_ctas()]
    return Canceled(response.data.view(torch.int32).tolist())


def store_async(dst: Any, value: Any, mbarrier: Any) -> None:
    """Implement `hopper.async_store`, which Triton refuses in a program of one CTA."""
    dst.async_store(value, mbarrier)


CLC = {"try_cancel": try_cancel, "load_result": load_result}
ASYNC_COPY = {
    "async_load": cp_async,
    **{f.__name__: f for f in (commit_group, wait_group, mbarrier_arrive)},
}
