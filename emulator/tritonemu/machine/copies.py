"""Asynchronous copies: TMA, bulk copies, cp.async, and those between the CTAs of a cluster."""

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import triton.language as tl

from ..barriers import MBarrier
from ..buffers import Buffer
from ..engines import COPY_BYTES, SHARED_BYTES
from ..errors import InvalidKernel
from ..instructions import EFFECTS
from ..launch import current
from ..memory import Descriptor
from ..rewrite import static_int
from ..scheduler import COPY_LATENCY, Operation, Role
from ..tile import Tile, held, scalar
from .sync import in_cta, remote, single
from .table import holds, op, point, uncharged
from .views import stored, touch


def copy(role: Role, kind: str, buffer: Buffer, num_bytes: int) -> Operation:
    """Issue a copy of shared memory: read when the copy begins, written as its bytes arrive."""
    operation = role.scheduler.issue("copy")
    start, end = role.cta.engines["TMA"].queue(role.time, num_bytes / COPY_BYTES)
    port = buffer.storage.cta.engines["shared memory"]
    moved = port.fit(start + (COPY_LATENCY if kind == "copy" else 0), num_bytes / SHARED_BYTES)
    operation.end = max(end + COPY_LATENCY, moved)
    fields = {"cta": role.cta.number, "target": buffer.name, "bytes": num_bytes}
    role.scheduler.trace(kind, buffer.name, "TMA", start, operation.end, **fields)
    return operation


def land(
    operation: Operation, target: Buffer, data: torch.Tensor, barrier: MBarrier, num_bytes: int,
    alone: bool = False,
) -> None:  # fmt: skip
    """Write the data of a copy, and count it on the barrier when the copy completes.

    alone: whoever waits for that learns of the copy, not of what its role did to memory before.
    """
    operation.role.scheduler.synchronises("arrival", operation.role, barrier, operation.location)
    target.write(data, operation)
    clock = operation.clock.landed(operation.bit) if alone else operation.clock
    done = clock, operation.end, "TMA", operation.location
    operation.role.scheduler.at(operation.end, lambda: barrier.arrive(0, *done, -num_bytes))


@op
def async_descriptor_load(
    desc: Descriptor, result: Buffer, offsets: Any, barrier: Any, pred: Any = None,
    cache_modifier: str = "", eviction_policy: str = "", multicast_targets: Any = (),
    two_ctas: bool = False,
) -> None:  # fmt: skip
    role = point()
    barrier = single(barrier)
    if holds(pred):
        ranks = [int(rank) for rank in multicast_targets] or [role.cta.rank]
        pair = role.cta.rank & ~1
        targets = [(rank, in_cta(barrier, pair if two_ctas else rank)) for rank in ranks]
        fetch = partial(desc.fetch, offsets)
        load(role, desc, result.single(), desc.block_shape, fetch, targets)


@uncharged
def load(
    role: Role, desc: Descriptor, result: Buffer, shape: Sequence[int],
    fetch: Callable[[Operation], Tile], targets: Sequence[tuple[int, MBarrier]],
) -> None:  # fmt: skip
    """Load elements of this shape to these CTAs by TMA, each counted on the barrier beside it."""
    if math.prod(shape) != math.prod(result.shape) or desc.dtype.name != result.dtype.name:
        raise InvalidKernel(f"{result.name} must be {desc.dtype}{[*shape]} as the descriptor")
    first = operation = copy(role, "copy", result, result.num_bytes)
    desc.read_by(operation)
    data = fetch(operation).data
    for rank, barrier in targets:
        target = remote(result, rank)
        if rank != targets[0][0]:
            # To know of the copy in one CTA is not to know of it in another.
            operation = role.scheduler.issue("copy", end=first.end)
            port = target.storage.cta.engines["shared memory"]
            port.fit(first.end, result.num_bytes / SHARED_BYTES)
        land(operation, target, data, barrier, result.num_bytes)


@op
def async_descriptor_store(
    desc: Descriptor, source: Buffer, offsets: Any, eviction_policy: str = "",
    store_reduce: str = "",
) -> None:  # fmt: skip
    role, source = point(), source.single()
    operation = copy(role, "store", source, source.num_bytes)
    desc.read_by(operation)
    box = Tile(source.read(operation).reshape(desc.block_shape), source.dtype)
    desc.store(offsets, box, store_reduce, landing(role, operation))


@op
def async_descriptor_scatter(desc: Descriptor, source: Buffer, rows: Tile, column: Any) -> None:
    role, source = point(), source.single()
    operation = copy(role, "store", source, source.num_bytes)
    desc.read_by(operation)
    value = Tile(source.read(operation), source.dtype)
    desc.scatter(value, rows, column, landing(role, operation))


@op
def try_cancel(response: Buffer, barriers: Sequence[MBarrier]) -> None:
    """Take a cluster that has not started, or nothing; all CTAs of this one learn which.

    The response is four int32: its first program, and whether there is one. barriers: of each CTA.
    """
    role, launch = point(), current()
    program = launch.steal()
    answer = torch.tensor([*program, 1] if program else [-1, -1, -1, 0], dtype=torch.int32)
    answer = answer.view(held(response.dtype))
    first = copy(role, "copy", response, 16)
    for rank, barrier in enumerate(barriers):
        local = rank == role.cta.rank
        operation = first if local else role.scheduler.issue("copy", end=first.end)
        land(operation, remote(response, rank), answer, barrier, 16, alone=True)


@op
def async_store(dst_global_ptr: Tile, src_smem: Buffer, size: Any) -> None:
    """Store `size` bytes of shared memory to consecutive global addresses."""
    role, source = point(), src_smem.single()
    count, rest = divmod(int(size), source.itemsize)
    if rest or count > math.prod(source.shape) or int(size) % 16:
        raise InvalidKernel(f"async_store moves multiples of 16 bytes of the buffer, got {size!r}")
    operation = copy(role, "store", source, int(size))
    data = source.read(operation).reshape(-1)[:count]
    source.demand_fence(operation)
    steps = Tile(torch.arange(count, dtype=torch.int32), tl.int32)
    landed = landing(role, operation)
    current().memory.store(dst_global_ptr + steps, Tile(data, source.dtype), None, landed)


def landing(role: Role, reading: Operation) -> Operation:
    """Issue the writes of a copy to global memory, which complete after its reads."""
    operation = role.scheduler.issue("store", end=reading.end)
    role.stores.append(reading)
    role.landings.append(operation)
    return operation


@op
def async_descriptor_store_wait(pendings: int) -> None:
    """Wait by cp.async.bulk.wait_group.read until the buffers have been read."""
    role = point()
    drain(role, role.stores, static_int(pendings), "wait store")


def wait_for_landings(pendings: str | int) -> None:
    """Wait by cp.async.bulk.wait_group until the stores are in memory, too."""
    role = point()
    drain(role, role.landings, int(pendings), "wait store")
    drain(role, role.stores, int(pendings), "wait store")


EFFECTS["cp.async.bulk.wait_group"] = wait_for_landings
EFFECTS["fence.proxy.async.global"] = lambda arguments: None
for _name in ("fence.proxy.async", "fence.proxy.async.shared::cta"):
    EFFECTS[_name] = lambda arguments: point().fence()


def drain(role: Role, queue: list[Operation], pendings: int, name: str) -> None:
    """Wait until at most `pendings` operations of the queue are in flight."""
    start = role.time
    while len(queue) > pendings:
        operation = queue.pop(0)
        role.clock.operations |= operation.bit
        role.time = max(role.time, operation.end)
    if role.time > start:
        role.scheduler.trace("wait", name, role, start, role.time)


@op
def async_load(
    src: Tile, result: Buffer, mask: Any = None, other: Any = None, cache_modifier: str = "",
    eviction_policy: str = "", is_volatile: bool = False, bulk: bool = False,
    bulk_size: Any = None, barrier: Any = None,
) -> None:  # fmt: skip
    """Issue cp.async, awaited by groups; with `bulk`, cp.async.bulk, awaited on a barrier."""
    role, result = point(), result.single()
    memory = current().memory
    if bulk:
        num_bytes = result.num_bytes if bulk_size is None else int(bulk_size)
        operation = copy(role, "copy", result, num_bytes)
        count = num_bytes // result.itemsize
        steps = Tile(torch.arange(count, dtype=torch.int32), tl.int32)
        data = memory.load(src + steps, by=operation).data
        land(operation, result.window((0,), (count,)), data, single(barrier), num_bytes)
        return
    operation = copy(role, "copy", result, result.num_bytes)
    operation.generic = True
    zero = scalar(0.0 if result.dtype.is_floating() else 0, result.dtype)
    value = memory.load(src, mask, zero if mask is not None and other is None else other, operation)
    result.write(value.data, operation)
    role.copies[-1].append(operation)


@op
def async_load_commit_group(tokens: Any = ()) -> None:
    point().copies.append([])


@op
def async_load_wait_group(pendings: int, tokens: Any = ()) -> None:
    role = point()
    done = max(0, len(role.copies) - 1 - static_int(pendings))
    for group in role.copies[:done]:
        drain(role, group, 0, "wait copies")
    del role.copies[:done]


@op
def remote_shmem_store(dst: Buffer, src: Tile, remote_cta_rank: Any) -> None:
    target = remote(dst.single(), int(remote_cta_rank))
    data = stored(target, src, "remote_shmem_store")
    target.write(data, touch("write", "remote store", target))


@op
def async_remote_shmem_store(dst: Buffer, src: Tile, remote_cta_rank: Any, barrier: Any) -> None:
    """Store registers to a peer's shared memory; the bytes are counted on the peer's barrier."""
    role, rank = point(), int(remote_cta_rank)
    store_shared(role, remote(dst.single(), rank), src, in_cta(single(barrier), rank))


@uncharged
def store_shared(role: Role, target: Buffer, value: Tile, barrier: MBarrier) -> None:
    """Store registers to any CTA's shared memory, asynchronously, outside other copies' proxy."""
    data = stored(target, value, "an asynchronous store")
    operation = copy(role, "copy", target, target.num_bytes)
    operation.generic = operation.stores = True
    land(operation, target, data, barrier, target.num_bytes)


@op
def async_remote_shmem_copy(dst: Buffer, src: Buffer, remote_cta_rank: Any, barrier: Any) -> None:
    """Copy shared memory to a peer's; the bytes are counted on the peer's barrier."""
    role, rank, source = point(), int(remote_cta_rank), src.single()
    target = remote(dst.single(), rank)
    operation = copy(role, "copy", target, target.num_bytes)
    data = source.read(operation).reshape(target.shape)
    source.demand_fence(operation)
    land(operation, target, data, in_cta(single(barrier), rank), target.num_bytes)
