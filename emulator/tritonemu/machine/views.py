"""Views of buffers, and copies from and to registers."""

import math
from typing import Any

import torch

from ..buffers import Buffer
from ..engines import SHARED_BYTES, TENSOR_BYTES
from ..errors import InvalidKernel
from ..rewrite import static_int
from ..scheduler import Role
from ..tile import Tile, to_tile
from .table import op, point


@op
def local_slice(buffer: Buffer, offset: Any, shape: Any) -> Buffer:
    start = tuple(static_int(value) for value in offset)
    if buffer.storage.tensor and (start[0] or shape[0] != buffer.shape[0]):
        raise InvalidKernel("a slice of tensor memory takes all rows")
    return buffer.window(start, tuple(static_int(size) for size in shape))


@op
def subslice(buffer: Buffer, offset: int, size: int) -> Buffer:
    if not buffer.storage.tensor:
        raise InvalidKernel("tlx.subslice takes tensor memory, got shared memory")
    rows = buffer.single().shape[0]
    return buffer.window((0, static_int(offset)), (rows, static_int(size)))


@op
def local_reshape(buffer: Buffer, shape: Any) -> Buffer:
    if buffer.storage.tensor:
        raise InvalidKernel("tlx.local_reshape takes shared memory, got tensor memory")
    sizes = tuple(static_int(size) for size in shape)
    if math.prod(sizes) != math.prod(buffer.single().shape):
        raise InvalidKernel(f"tlx.local_reshape must keep the size of {buffer.name}, got {sizes}")
    return buffer.reinterpret(buffer.dtype, sizes)


# Registers to buffers and back.


def touch(kind: str, name: str, buffer: Buffer) -> Role:
    """Charge a read or write of the buffer by a role to the port of its memory."""
    role, called = point(), f"{name} {buffer.name}"
    port, speed = "shared memory", SHARED_BYTES
    if buffer.storage.tensor:
        port, speed = "tensor memory", TENSOR_BYTES
    start, engine = role.time, buffer.storage.cta.engines[port]
    role.time = engine.share(start, buffer.num_bytes / speed)
    role.scheduler.trace(kind, called, role, start, role.time, target=buffer.name)
    return role


@op
def local_load(
    buffer: Buffer, token: Any = None, layout: Any = None, relaxed: bool = False
) -> Tile:
    buffer = buffer.single()
    return Tile(buffer.read(touch("read", "local_load", buffer)), buffer.dtype)


def stored(buffer: Buffer, value: Any, name: str) -> torch.Tensor:
    value = to_tile(value)
    if value.dtype.name != buffer.dtype.name or math.prod(value.shape) != math.prod(buffer.shape):
        expected = f"{buffer.dtype}{list(buffer.shape)}"
        raise InvalidKernel(f"{name} into {buffer.name} takes {expected}, got {value!r}")
    return value.data


@op
def local_store(buffer: Buffer, value: Any) -> None:
    buffer = buffer.single()
    data = stored(buffer, value, "local_store")
    buffer.write(data, touch("write", "local_store", buffer))


@op
def local_gather(buffer: Buffer, indices: Any, axis: int, token: Any = None) -> Tile:
    source = local_load(buffer)
    index = local_load(indices) if isinstance(indices, Buffer) else indices
    return source.like(source.data.gather(axis, index.data.to(torch.int64)))


@op
def local_scatter(buffer: Buffer, value: Tile, indices: Any, axis: int, token: Any = None) -> None:
    index = local_load(indices) if isinstance(indices, Buffer) else indices
    old = local_load(buffer)
    new = old.data.scatter(axis, index.data.to(torch.int64), value.data)
    local_store(buffer, old.like(new))


for _name, _operation in {
    "local_view": lambda buffers, index: buffers[index],
    "local_trans": lambda buffer, dims=(1, 0): buffer.single().permute(
        tuple(map(static_int, dims))
    ),
    "local_reinterpret": lambda buffer, dtype, shape=None: buffer.reinterpret(dtype, shape),
}.items():
    op(_operation, _name)
