"""Allocations of shared and tensor memory, and their aliases."""

from typing import Any

import triton.language as tl
from triton.language.extra import tlx

from ..buffers import LANES, AliasSpec, Buffer, ReuseGroup, Storage, packed
from ..errors import InvalidKernel, Unsupported
from ..machine.table import OPERATIONS, blackwell_only, op, point
from ..rewrite import static_int
from ..tile import bytes_of


@op
def local_alloc(
    shape: Any, dtype: tl.dtype, num: int, storage: Any = tlx.storage_kind.smem,
    reuse: Any = None, layout: Any = None,
) -> Buffer:  # fmt: skip
    tensor = storage == tlx.storage_kind.tmem
    if tensor:
        blackwell_only("local_alloc in tensor memory")
    sizes = tuple(static_int(size) for size in shape)
    role = point()
    if reuse is None:
        where, offset, spec = Storage(role.cta, tensor), 0, None
    elif isinstance(reuse, AliasSpec):
        where, offset, spec = reuse.storage, 0, reuse
    else:
        where, spec = reuse.storage, reuse.spec
        offset = reuse.offset * reuse.itemsize // bytes_of(dtype)
    if where.tensor != tensor:
        raise InvalidKernel(f"reuse must be in {storage}, got another kind of memory")
    alone = len(role.cta.cluster.ctas) == 1
    if tensor and alone and isinstance(reuse, Buffer) and reuse.shape[0] < sizes[0]:
        raise InvalidKernel(
            f"reuse must have {sizes[0]} rows of tensor memory as the buffer, got {reuse.shape[0]} "
            f"in {reuse.name}: the compiler may give its other lanes to another buffer"
        )
    if tensor and (len(sizes) != 2 or sizes[0] not in (64, LANES)):
        raise Unsupported(f"tensor memory of shape {list(sizes)}")
    halved = tensor and spec is not None and sizes[0] == 64 and not alone
    where.paired = True if halved else where.paired
    number = static_int(num)
    buffer = Buffer(where, dtype, sizes, packed(sizes), offset, number, "buffer", spec, halved)
    buffer.fit()
    if reuse is None:
        role.cta.allocate(where)
    return buffer


@op
def storage_alias_spec(
    storage: Any = tlx.storage_kind.smem, buffer_size_bytes: int | None = None
) -> AliasSpec:
    role = point()
    spec = AliasSpec(Storage(role.cta, storage == tlx.storage_kind.tmem), buffer_size_bytes)
    role.cta.allocate(spec.storage)
    return spec


@op
def reuse_group(*members: Any, group_type: Any = None, group_size: int = 1) -> ReuseGroup:
    return ReuseGroup(members, group_type == tlx.reuse_group_type.distinct, group_size)


OPERATIONS.update(storage_kind=tlx.storage_kind, reuse_group_type=tlx.reuse_group_type)
