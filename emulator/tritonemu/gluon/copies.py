"""TMA and cp.async of Gluon."""

from typing import Any

import torch
import triton.language as tl

from ..errors import Unsupported, current_location
from ..language import make_tensor_descriptor as make_descriptor
from ..machine import copies, views
from ..machine.table import blackwell_only, point
from ..rewrite import static_int
from ..scheduler import Role
from ..tile import Tile, scalar
from .barriers import barriers_of, performed
from .ctas import all_here, cut, in_ctas, others
from .memory import Sharded, described, free, part


def _box(desc: Any, coord: Any, memory: Any, cta: Any) -> tuple[Any, Any]:
    """Return the descriptor of the box that the CTA has, and the coordinates where it begins."""
    if not isinstance(memory, Sharded):
        return desc, coord
    shape, sharding = desc.block_shape, memory.sharding
    box, local = sharding.box(shape, cta.rank), desc.with_box(sharding.local(shape))
    return local, tuple(x + start if start else x for x, (start, _) in zip(coord, box, strict=True))


def _to_shared(barrier: Any, result: Any, multicast: bool, load: Any) -> None:
    """Load the part of each CTA; with multicast one CTA loads for all that have the same part.

    load: called with the role, the part, and the CTAs that get it, each with its barrier.
    """
    bars, several = barriers_of(barrier), free(result) if multicast else 0

    def act(lane: Role) -> None:
        point()
        if not lane.cta.rank & several:
            ranks = others(lane.cta.rank, several)
            load(lane, part(result, lane.cta).single(), [(r, bars.of(r)) for r in ranks])

    in_ctas(act)


def async_load(
    tensor_desc: Any, coord: Any, barrier: Any, result: Any, pred: Any = True,
    multicast: bool = False, cache_policy: Any = None,
) -> None:  # fmt: skip
    def load(lane: Role, view: Any, targets: Any) -> None:
        desc, start = _box(tensor_desc, coord, result, lane.cta)
        copies.load_box(lane, desc, view, start, targets)

    if performed(pred):
        _to_shared(barrier, result, multicast, load)


def async_load_im2col(
    tensor_desc: Any, coord: Any, offsets: Any, barrier: Any, result: Any, pred: Any = True,
    multicast: bool = False, cache_policy: Any = None,
) -> None:  # fmt: skip
    def load(lane: Role, view: Any, targets: Any) -> None:
        copies.load_box(lane, tensor_desc, view, (coord, offsets), targets)

    if isinstance(result, Sharded):
        raise Unsupported("async_load_im2col in a program of several CTAs")
    if performed(pred):
        _to_shared(barrier, result, multicast, load)


def _from_shared(src: Any, store: Any) -> None:
    """Store the part of each CTA; the first one stores for all that have the same part."""
    in_ctas(lambda lane: lane.cta.rank & free(src) or store(lane.cta, part(src, lane.cta)))


def async_store(
    tensor_desc: Any, coord: Any, src: Any, cache_policy: Any = None, kind: str = ""
) -> None:
    def store(cta: Any, view: Any) -> None:
        desc, start = _box(tensor_desc, coord, src, cta)
        copies.async_descriptor_store(desc, view, start, store_reduce=kind)

    _from_shared(src, store)


def _atomic(kind: str) -> Any:
    def store(tensor_desc: Any, coord: Any, src: Any) -> None:
        async_store(tensor_desc, coord, src, kind=kind)

    return store


def store_wait(pendings: int, read_only: bool = True) -> None:
    if read_only:
        in_ctas(lambda lane: copies.async_descriptor_store_wait(pendings))
    else:
        in_ctas(lambda lane: copies.wait_for_landings(static_int(pendings)))


def make_tensor_descriptor(
    base: Any, shape: Any, strides: Any, block_shape: Any, layout: Any,
    padding_option: str = "zero",
) -> Any:  # fmt: skip
    descriptor = make_descriptor(base, shape, strides, block_shape, padding_option)
    return described(descriptor.placed(), layout)


TMA = {
    **{f.__name__: f for f in (async_load, async_load_im2col, async_store, store_wait)},
    "make_tensor_descriptor": make_tensor_descriptor,
    **{f"async_atomic_{kind}": _atomic(kind) for kind in ("add", "min", "max", "and", "or", "xor")},
}


def cp_async(
    smem: Any, pointer: Any, mask: Any = None, cache_modifier: Any = None,
    eviction_policy: Any = None, volatile: bool = False, cache_policy: Any = None,
) -> None:  # fmt: skip
    def act(lane: Role) -> None:
        box = smem.box(lane.cta) if isinstance(smem, Sharded) else None
        arguments = (pointer, mask) if box is None else (cut(pointer, box), cut(mask, box))
        copies.async_load(arguments[0], part(smem, lane.cta), arguments[1])

    in_ctas(act)


def commit_group() -> None:
    in_ctas(lambda lane: copies.async_load_commit_group())


def wait_group(num_outstanding: int = 0) -> None:
    in_ctas(lambda lane: copies.async_load_wait_group(num_outstanding))


def mbarrier_arrive(mbarrier: Any, increment_count: bool = True) -> None:
    """Arrive with every thread when the role's cp.async so far are complete.

    With increment_count the barrier expects as many more arrivals: only those of others count.
    """
    bars, location = barriers_of(mbarrier), current_location()

    def act(lane: Role) -> None:
        role, barrier = point(), bars.of(lane.cta.rank)
        threads, clock, end = 32 * role.warps, role.release_by_each(), role.time
        if increment_count:
            barrier.pending += threads
        for operation in (operation for group in role.copies for operation in group):
            clock.join(operation.clock)
            end = max(end, operation.end)
        role.scheduler.at(end, lambda: barrier.arrive(threads, clock, end, "cp.async", location))

    in_ctas(act)


def _rows(desc: Any, x_offsets: Any, y_offset: Any, memory: Any, cta: Any) -> tuple[Any, Any, Any]:
    """Return the descriptor, rows and column of the CTA's part."""
    if not isinstance(memory, Sharded):
        return desc, x_offsets, y_offset
    rows, (column, width) = memory.box(cta)
    offset = y_offset + column if column else y_offset
    return desc.with_box((1, width)), cut(x_offsets, (rows,)), offset


def async_gather(
    tensor_desc: Any, x_offsets: Any, y_offset: Any, barrier: Any, result: Any, pred: Any = True,
    multicast: bool = False, cache_policy: Any = None,
) -> None:  # fmt: skip
    def load(lane: Role, view: Any, targets: Any) -> None:
        desc, rows, column = _rows(tensor_desc, x_offsets, y_offset, result, lane.cta)
        copies.gather(lane, desc, view, rows, column, targets)

    if performed(pred):
        _to_shared(barrier, result, multicast, load)


def async_scatter(
    tensor_desc: Any, x_offsets: Any, y_offset: Any, src: Any, cache_policy: Any = None
) -> None:
    def store(cta: Any, view: Any) -> None:
        desc, rows, column = _rows(tensor_desc, x_offsets, y_offset, src, cta)
        copies.async_descriptor_scatter(desc, view, rows, column)

    _from_shared(src, store)


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
    role, bars = all_here("try_cancel"), barriers_of(barrier)
    ranks = range(len(role.lanes))
    copies.try_cancel(part(result, role.cta).single(), [bars.of(rank) for rank in ranks])


def load_result(src: Any) -> Canceled:
    read = in_ctas(lambda lane: views.local_load(part(src, lane.cta)))
    return Canceled(read[0].data.view(torch.int32).tolist())


CLC = {"try_cancel": try_cancel, "load_result": load_result}


def store_async(dst: Any, value: Any, mbarrier: Any) -> None:
    """Implement `hopper.async_store`, which Triton refuses in a program of one CTA."""
    dst.async_store(value, mbarrier)


ASYNC_COPY = {
    "async_load": cp_async,
    **{f.__name__: f for f in (commit_group, wait_group, mbarrier_arrive)},
}
