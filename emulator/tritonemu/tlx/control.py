"""Cluster launch control, descriptors made on the device, stoch_round, and small questions."""

from dataclasses import dataclass
from typing import Any

import torch
import triton.language as tl

from .. import language
from ..buffers import Buffer
from ..errors import InvalidKernel, OutOfBounds, Unsupported
from ..launch import current
from ..machine import sync
from ..machine.copies import try_cancel
from ..machine.table import blackwell_only, op, point
from ..machine.views import local_load
from ..memory import Descriptor
from ..rewrite import constant, static_int
from ..tile import Tile, cast, held, scalar, to_tile
from .allocations import local_alloc


@dataclass
class LaunchControl:
    """`tlx.clc_create_context`: barriers and responses of the requests for another CTA's work."""

    empty: sync.Barriers
    full: sync.Barriers
    responses: Buffer


@op
def clc_create_context(num_consumers: int, num_stages: int = 1) -> LaunchControl:
    blackwell_only("clc_create_context")
    context = LaunchControl(
        sync.alloc_barriers(num_stages, num_consumers),
        sync.alloc_barriers(num_stages),
        local_alloc((4,), tl.int32, num_stages),
    )
    context.empty.call_it("clc_empty")
    context.full.call_it("clc_full")
    context.responses.name = "clc_responses"
    return context


@op
def clc_producer(
    context: LaunchControl, p_producer: Any = None, multi_ctas: bool = False, k: Any = 0
) -> None:
    rank = current().role.cta.rank
    if rank == 0 or not multi_ctas:
        sync.barrier_wait(context.empty[k], p_producer)
    sync.barrier_expect_bytes(context.full[k], 16)
    if rank == 0 or not multi_ctas:
        ranks = range(len(current().role.cta.cluster.ctas))
        try_cancel(context.responses[k], [sync.in_cta(context.full[k], rank) for rank in ranks])


@op
def clc_consumer(
    context: LaunchControl, p_consumer: Any = None, multi_ctas: bool = False, k: Any = 0,
    return_3d: bool = False,
) -> Any:  # fmt: skip
    sync.barrier_wait(context.full[k], p_consumer)
    response = local_load(context.responses[k]).data
    x, y, z, valid = (int(value) for value in response)
    if valid:
        x += current().role.cta.rank
        sync.barrier_arrive(context.empty[k], 1, 0 if multi_ctas else None)
    tiles = tuple(scalar(value, tl.int32) for value in (x, y, z))
    return tiles if return_3d else tiles[0]


@op
def async_task_replica_id() -> int:
    replica = current().role.replica
    if replica is None:
        raise InvalidKernel("async_task_replica_id must be called inside an async_task")
    return replica


@op
def vote_ballot_sync(mask: int, pred: Any) -> Tile:
    """Return the ballot of each warp, assuming that the predicate's rows are a warp's lanes."""
    pred = cast(to_tile(pred), tl.int1)
    if mask != 0xFFFFFFFF or pred.numel % 32 or pred.shape[-1:] not in ((), (1,), (pred.numel,)):
        raise Unsupported(f"vote_ballot_sync of {pred!r} with mask {mask:#x}")
    votes = pred.data.reshape(-1, 32).to(torch.int64)
    ballots = (votes << torch.arange(32)).sum(1, keepdim=True)
    signed = (ballots + 2**31) % 2**32 - 2**31
    return Tile(signed.expand(-1, 32).reshape(pred.shape).to(torch.int32), tl.int32)


@dataclass
class DescriptorSlot:
    """`tlx.allocate_tensor_descriptor`: places for descriptors made on the device."""

    slots: list[Descriptor | None]
    first: int = 0

    def __getitem__(self, index: Any) -> "DescriptorSlot":
        number = self.first + int(index)
        if not 0 <= number < len(self.slots):
            raise OutOfBounds(f"{len(self.slots)} descriptors are allocated, got index {number}")
        return DescriptorSlot(self.slots, number)


@op
def allocate_tensor_descriptor(num: int) -> DescriptorSlot:
    return DescriptorSlot([None] * static_int(num))


@op
def make_tensor_descriptor(
    desc_ptr: DescriptorSlot | None, base: Tile, shape: Any, strides: Any, block_shape: Any,
    padding_option: str = "zero",
) -> Descriptor:  # fmt: skip
    descriptor = language.make_tensor_descriptor(base, shape, strides, block_shape, padding_option)
    if desc_ptr is None:
        return descriptor.placed()
    previous = desc_ptr.slots[desc_ptr.first]
    desc_ptr.slots[desc_ptr.first] = descriptor
    return descriptor.placed([] if previous is None else previous.reads)


@op
def reinterpret_tensor_descriptor(
    desc_ptr: DescriptorSlot, block_shape: Any, dtype: tl.dtype
) -> Descriptor:
    descriptor = desc_ptr.slots[desc_ptr.first]
    if descriptor is None or descriptor.block_shape != tuple(block_shape):
        raise InvalidKernel(f"no descriptor of box {tuple(block_shape)} has been made here")
    return descriptor


# Fraction bits of a dtype, and the exponent of its smallest normal number.
_FORMATS = {"bf16": (7, -126), "fp16": (10, -14), "fp8e4nv": (3, -6), "fp8e5": (2, -14)}


@op
def stoch_round(src: Tile, dst_ty: tl.dtype, rand_bits: Any) -> Tile:
    """Round by cvt.rs.satfinite: up if the lower 16 of an element's random bits say so, else down.

    Which bits of the registers the device takes for an element depends on the layout.
    """
    blackwell_only("stoch_round")
    if src.dtype.name != "fp32" or dst_ty.name not in _FORMATS:
        raise InvalidKernel(f"stoch_round takes fp32 to {(*_FORMATS,)}, got {src!r} to {dst_ty}")
    if rand_bits.dtype.int_bitwidth != 32 or rand_bits.shape != src.shape:
        expected = list(src.shape)
        raise InvalidKernel(f"rand_bits of stoch_round must be uint32{expected}, got {rand_bits!r}")
    fraction, least = _FORMATS[dst_ty.name]
    size = src.data.abs().to(torch.float64)
    exponent = (torch.frexp(size).exponent - 1).clamp(min=least)
    step = torch.ldexp(torch.ones_like(size), exponent - fraction)
    rounded = (size / step + (rand_bits.data & 0xFFFF) / 2**16).floor() * step
    limit = torch.finfo(held(dst_ty)).max
    rounded = torch.where(size.isnan(), size, rounded.clamp(max=limit)).copysign(src.data)
    return Tile(rounded.to(torch.float32).to(held(dst_ty)), dst_ty)


for _name, _operation in {
    "dtype_of": lambda value: value.dtype.element_ty if value.dtype.is_ptr() else value.dtype,
    "size_of": lambda dtype: constant(dtype).primitive_bitwidth // 8,
    "get_fp8_format_name": lambda dtype: {"fp8e5": "e5m2", "fp8e4nv": "e4m3"}[dtype.name],
    # Modelled cycles.
    "clock64": lambda: scalar(int(point().scheduler.tell_time()), tl.int64),
}.items():
    op(_operation, _name)
