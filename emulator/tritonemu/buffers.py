"""Shared and tensor memory: allocations, views, aliases, and what they may hold.

A `Storage` is the bytes of one allocation. Shared memory is a row of bytes in the logical order of
the buffer (swizzles permute it within the allocation and are not modelled). Tensor memory is 128
lanes of 32-bit columns; 64 rows take 16 of the 32 lanes of each warp, and another allocation may
have the rest. The accumulator of a pair of CTAs, 64 rows in each, takes all lanes of half as many
columns. Aliases are buffers on one storage: `reuse=` of another buffer, or an alias specification,
which is laid out by its overlap definition when the first of its buffers is used.

Contents start as NaN. Every access is recorded in the storage's `Shadow`: reads of bytes that
nobody wrote are `UninitializedRead`, unordered accesses are `Race`. Tensor memory is recorded by
byte of a row, for all lanes at once.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import triton.language as tl

from . import suppressions
from .clocks import Access, Shadow
from .errors import InvalidKernel, MissingFence, OutOfBounds, Race, UninitializedRead, Unsupported
from .launch import current
from .scheduler import Operation, Role
from .tile import RAW, bytes_of, from_raw, to_raw

LANES = 128
_ALIGNMENT = 128


@dataclass(eq=False)
class Storage:
    """Bytes of shared memory, or 128 lanes of `num_bytes` bytes of tensor memory.

    name: that of its first buffer. For tensor memory: columns: the most that its buffers of 64 rows
    and of 128 take. paired: whether 64 rows are those of a pair of CTAs, None before their first
    use. beside: the storage whose lanes it shares, that of the other operand in tensor memory.
    """

    cta: Any
    tensor: bool
    num_bytes: int = 0
    shadow: Shadow = field(default_factory=Shadow)
    masks: dict[Any, int] = field(default_factory=dict)
    columns: dict[int, int] = field(default_factory=lambda: {64: 0, LANES: 0})
    paired: bool | None = None
    beside: "Storage | None" = None
    name: str = ""
    _data: torch.Tensor | None = None

    @property
    def data(self) -> torch.Tensor:
        if self._data is None:
            shape = (LANES, self.num_bytes) if self.tensor else (self.num_bytes,)
            self._data = torch.full(shape, 0xFF, dtype=torch.uint8)
        return self._data

    @property
    def block(self) -> tuple[int, int]:
        """Lanes and columns of tensor memory that are its own."""
        narrow, wide = self.columns.values()
        if self.paired:
            return LANES, max(wide, -(-narrow // 2))
        return LANES if wide else 64, max(wide, narrow)

    def reserve(self, num_bytes: int, rows: int = LANES) -> None:
        """Grow to at least `num_bytes`; the hardware's limit is checked for the CTA."""
        if self.tensor:
            self.columns[rows] = max(self.columns[rows], -(-num_bytes // 4))
            self.cta.reserve_columns(self)
        if num_bytes <= self.num_bytes:
            return
        if not self.tensor:
            self.cta.reserve(num_bytes - self.num_bytes)
        previous, self._data, self.num_bytes = self._data, None, num_bytes
        if previous is not None:
            self.data[..., : previous.shape[-1]] = previous


@dataclass(eq=False)
class AliasSpec:
    """`tlx.storage_alias_spec`: one storage that several allocations share as equals."""

    storage: Storage
    limit: int | None
    defined: bool = False

    def set_buffer_overlap(self, group: "ReuseGroup") -> None:
        """Place the buffers of the group: shared ones at one offset, distinct ones side by side.

        Sizes are bytes in shared memory and columns in tensor memory. Consecutive buffers of an
        allocation are `unit` apart, a multiple of their own size; with group sizes, buffer i lies
        at slot `unit / size * i + i % group_size`.
        """
        if self.defined:
            raise InvalidKernel("a storage_alias_spec takes one set_buffer_overlap, got two")
        self.defined = True
        group.place(0, 1, _round_up(group.units, group.step))


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


@dataclass
class ReuseGroup:
    """`tlx.reuse_group`: a tree of buffers that share memory, or must not.

    A member, a buffer or a group, has a size in `units` and a `step`: the multiple at which it
    starts in a distinct group.
    """

    members: tuple[Any, ...]
    distinct: bool
    group_size: int

    @property
    def step(self) -> int:
        return max(member.step for member in self.members)

    @property
    def units(self) -> int:
        if not self.distinct:
            return max(member.units for member in self.members) * self.group_size
        total = 0
        for member in self.members:
            total = _round_up(total, member.step) + member.units
        return total

    def place(self, offset: int, group_size: int, total: int) -> None:
        for member in self.members:
            if self.distinct:
                offset = _round_up(offset, member.step)
                member.place(offset, group_size, total)
                offset += member.units
            else:
                member.place(offset, group_size * self.group_size, total)


@dataclass
class Placement:
    """Slots of the buffers of an allocation, in units of their size: buffer i at slot `scale * i +
    first + i % group`."""

    scale: int = 1
    first: int = 0
    group: int = 1

    def slot(self, index: int) -> int:
        return self.scale * index + self.first + index % self.group


@dataclass(frozen=True)
class Lanes:
    """Positions of a view's elements in the lanes of tensor memory, `num_bytes` each."""

    num_bytes: int
    itemsize: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int

    def spread(self, numbers: torch.Tensor) -> torch.Tensor:
        """Spread a number below 255 for each element over the bytes of the lanes, 255 outside."""
        data = torch.full((LANES, self.num_bytes // self.itemsize, self.itemsize), 255)
        steps = *(step * self.itemsize for step in self.strides), 1
        view = data.as_strided((*self.shape, self.itemsize), steps, self.offset * self.itemsize)
        view.copy_(numbers.reshape(*self.shape, 1))
        return data.reshape(LANES, -1)


@dataclass(eq=False)
class Buffer:
    """A view of shared or tensor memory: `num` buffers of one shape, or a single one (num 0).

    offset and strides count elements of dtype within the storage (for tensor memory, a lane is
    `num_bytes` long). placement: that of the allocation, shared by its views.
    halved: whether `units` are those of a pair of CTAs, which has to be known before their first
    use where an alias specification lays them out; it is then taken for granted in a cluster.
    laid: shape and strides of the elements, if those of `shape` have no strides of their own.
    """

    storage: Storage
    dtype: tl.dtype
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int
    num: int
    name: str
    spec: AliasSpec | None = None
    halved: bool = False
    placement: Placement = field(default_factory=Placement)
    laid: tuple[tuple[int, ...], tuple[int, ...]] | None = None

    @property
    def itemsize(self) -> int:
        return bytes_of(self.dtype)

    @property
    def units(self) -> int:
        """Size of one buffer: bytes of shared memory, columns of tensor memory."""
        if self.storage.tensor:
            return -(-self.width * self.itemsize // (8 if self.halved else 4))
        return self.num_bytes

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * self.itemsize

    @property
    def width(self) -> int:
        """Elements of tensor memory that a lane holds."""
        return self.shape[1]

    @property
    def rows(self) -> int:
        """Lanes of tensor memory that it takes, 64 or 128; 128 of a pair of CTAs."""
        return LANES if self.halved else self.shape[0]

    @property
    def paired(self) -> bool:
        """True if its right half of columns lies in lanes 64 to 127, under the left half."""
        return bool(self.storage.paired) and self.shape[0] == 64

    @property
    def type(self) -> "Buffer":
        return self

    @property
    def label(self) -> str:
        return f"{self.name} of CTA {self.storage.cta.number}"

    def call_it(self, name: str) -> None:
        """Name an allocation after the variable it is first assigned to."""
        self.name = name if self.name == "buffer" else self.name
        self.storage.name = self.storage.name or name

    @property
    def step(self) -> int:
        return self.units if self.storage.tensor else _ALIGNMENT

    def place(self, offset: int, group_size: int, total: int) -> None:
        """Lay out the allocation, as `AliasSpec` says, in its storage of `total` units."""
        unit = total // group_size
        if offset % self.units or unit % self.units:
            raise InvalidKernel(
                f"{self.name} of {self.units} units must lie at a multiple of its size, got offset "
                f"{offset} and distance {unit}"
            )
        placement = self.placement
        placement.scale, placement.first = unit // self.units, offset // self.units
        placement.group = group_size
        self.fit()

    def fit(self) -> None:
        """Make the storage large enough for all buffers of this allocation."""
        slots = [self.placement.slot(i) for i in range(max(1, self.num))]
        unit = 4 if self.storage.tensor else 1
        end = self.offset * self.itemsize + (max(slots) + 1) * self.units * unit
        if self.spec is not None and self.spec.limit is not None:
            rows = LANES if self.storage.tensor else 1
            if end * rows > self.spec.limit:
                raise InvalidKernel(
                    f"{self.name} must fit the {self.spec.limit} bytes of its storage_alias_spec, "
                    f"got {end * rows}"
                )
        self.storage.reserve(end, self.rows)

    def __getitem__(self, index: Any) -> "Buffer":
        """Implement `tlx.local_view`: buffer `index`; of a single buffer, the part at `index`."""
        number = int(index)
        if self.num == 0:
            if len(self.shape) == 1:
                return self.window((number,), (1,))
            rest = (0,) * (len(self.shape) - 1)
            part = self.window((number, *rest), (1, *self.shape[1:]))
            return replace(part, shape=part.shape[1:], strides=part.strides[1:])
        if not 0 <= number < self.num:
            raise OutOfBounds(f"{self.label} has {self.num} buffers, got index {number}")
        pitch = self.units * (4 if self.storage.tensor else 1) // self.itemsize
        offset = self.offset + self.placement.slot(number) * pitch
        return replace(self, offset=offset, num=0, name=f"{self.name}[{number}]")

    def single(self) -> "Buffer":
        """Return one buffer: itself, or the only one of an allocation."""
        if self.num > 1:
            raise InvalidKernel(f"{self.name} is {self.num} buffers; index it")
        return self[0] if self.num else self

    def window(self, start: tuple[int, ...], shape: tuple[int, ...]) -> "Buffer":
        """Implement `tlx.local_slice`: a box of the buffer."""
        one = self.single()._strided()
        for begin, size, extent in zip(start, shape, one.shape, strict=True):
            if begin < 0 or begin + size > extent:
                raise OutOfBounds(f"slice {start} + {shape} leaves {self.label} {list(one.shape)}")
        if one.storage.tensor and one.paired and shape[1] != one.shape[1]:
            raise Unsupported(f"a slice of {self.name}, whose 64 rows are those of a pair of CTAs")
        move = sum(begin * step for begin, step in zip(start, one.strides, strict=True))
        return replace(one, offset=one.offset + move, shape=tuple(shape))

    def _strided(self) -> "Buffer":
        if self.laid is not None:
            raise Unsupported(f"a part of {self.name}, reshaped after it was permuted")
        return self

    def permute(self, dims: tuple[int, ...]) -> "Buffer":
        self._strided()
        shape = tuple(self.shape[d] for d in dims)
        return replace(self, shape=shape, strides=tuple(self.strides[d] for d in dims))

    def reinterpret(self, dtype: tl.dtype, shape: tuple[int, ...] | None) -> "Buffer":
        """View the same bytes as other elements."""
        one = self.single()._strided()
        item = bytes_of(dtype)
        shape = one.shape if shape is None else tuple(shape)
        if one.storage.tensor:
            if math.prod(shape[1:]) * item > math.prod(one.shape[1:]) * one.itemsize:
                raise InvalidKernel(f"{self.name} is too small for {dtype}{list(shape)}")
            strides = (0, 1)
        else:
            if math.prod(shape) * item > one.num_bytes or one.strides != packed(one.shape):
                raise InvalidKernel(f"{self.name} cannot be seen as {dtype}{list(shape)}")
            strides = packed(shape)
        offset = one.offset * one.itemsize // item
        return replace(one, dtype=dtype, shape=shape, strides=strides, offset=offset)

    def _strided_as(self) -> tuple[tuple[int, ...], tuple[int, ...], int]:
        """Return shape, strides and offset of the view in all elements of the storage."""
        if not self.storage.tensor:
            return *(self.laid or (self.shape, self.strides)), self.offset
        (rows, columns), lane = self.shape, self.storage.num_bytes // self.itemsize
        if self.paired:
            return (rows, 2, columns // 2), (lane, 64 * lane, 1), self.offset
        if rows == 64:
            return (4, 16, columns), (32 * lane, lane, 1), self.offset
        return self.shape, (lane, 1), self.offset

    @property
    def lanes(self) -> Lanes | None:
        if not self.storage.tensor:
            return None
        return Lanes(self.storage.num_bytes, self.itemsize, *self._strided_as())

    def _view(self) -> torch.Tensor:
        return self.storage.data.view(RAW[self.dtype.name]).as_strided(*self._strided_as())

    @property
    def mask(self) -> int:
        """Bytes of the view, as bits; for tensor memory, the bytes of a row."""
        shape, strides = self.laid or (self.shape, self.strides)
        key = (self.offset, shape, strides, self.itemsize)
        masks = self.storage.masks
        if key not in masks:
            dims = zip(shape, strides, strict=True)
            if self.storage.tensor:
                dims = [(self.width // (2 if self.paired else 1), 1)]
            bits = (1 << self.itemsize) - 1
            for size, stride in dims:
                bits = _repeat(bits, stride * self.itemsize, size)
            masks[key] = bits << self.offset * self.itemsize
        return masks[key]

    def settle(self, paired: bool) -> None:
        """Decide before the first use if these 64 rows are an accumulator of a pair of CTAs."""
        storage = self.storage
        if not storage.tensor or self.shape[0] != 64 or storage.paired == paired:
            return
        several = storage.columns[LANES] and storage.columns[64] > self.units
        if storage.paired is not None or (paired and several):
            raise Unsupported(f"{self.name}, 64 rows both of a pair of CTAs and of one CTA")
        storage.paired = paired
        storage.cta.reserve_columns(storage)

    def _access(self, actor: Role | Operation, write: bool) -> None:
        """Record an access at the actor's present; raises Race and UninitializedRead."""
        if self.storage.paired is None:
            self.settle(False)
        launch, shadow, mask = current(), self.storage.shadow, self.mask
        launch.report.checks["shared"] += 1
        if not write and mask & ~shadow.written:
            if launch.uninitialized == "error":
                read = actor.access(write, mask, name=self.name)
                finding = UninitializedRead(
                    f"{self.label} is read before it has been written",
                    buffer=self.name,
                    **launch.scheduler.around(read),
                )
                suppressions.judge(finding, launch.report)
            else:
                launch.report.uninitialized += 1
        if launch.threads is not None:
            launch.threads.access(self, actor, write)
        access = actor.access(write, mask, name=self.name, where=self.lanes)
        if not launch.races:
            shadow.written |= mask if write else 0
            return
        if self.storage.cta.ended is not None:
            raise self.storage.cta.too_early(self.name, access.who, access.location, access.mark)
        if launch.partition_fences and isinstance(actor, Operation) and not actor.generic:
            self._demand_partition_fence(actor, write)
        elif launch.partition_fences and isinstance(actor, Role):
            actor.touch(self.storage, mask, write)
        for old in shadow.record(access, actor.clock):
            facts = launch.scheduler.around(access, old)
            self._judge(Race, access, old, "nothing orders the two", **facts)

    def _judge(
        self, kind: Callable[..., Race | MissingFence], new: Access, old: Access, remark: str,
        **facts: Any,
    ) -> None:  # fmt: skip
        """Raise a finding about two accesses, unless a comment allows it."""
        verb, (file, line) = {True: "writes", False: "reads"}, old.location
        alias = f"as {old.name} " if old.name != self.name else ""
        finding = kind(
            f"{new.who} {verb[new.write]} {self.label}, which {old.who} {verb[old.write]} {alias}"
            f"at {file}:{line}; {remark}",
            other=old.location,
            buffer=self.name,
            marks=(old.mark, new.mark),
            **facts,
        )
        suppressions.judge(finding, current().report)

    def demand_fence(self, copy: Operation) -> None:
        """Raise MissingFence if the copy reads what a role stored without a fence after it.

        The copy is by the asynchronous proxy, the store by the generic one (PTX ISA 9.1, 8.3). Not
        asked for where the compiler inserts the fence, before TMA stores and MMAs.
        """
        read = copy.access(False, self.mask, self.name)
        for old in self.storage.shadow.accesses:
            stored = old.write and not old.operation
            if stored and old.mask & self.mask and not copy.clock.fences(old):
                remark = 'tlx.fence("async_shared") must lie between the two'
                self._judge(MissingFence, read, old, remark)

    def _demand_partition_fence(self, copy: Operation, write: bool) -> None:
        """Raise MissingFence if a copy or an MMA meets an access of another partition, one of them
        a write, that it is ordered after without a fence.

        If the role itself has such an access behind it, in any CTA of its program, and no fence
        since, the compiler inserts one, there and so whenever the role comes there again.
        """
        if self.storage.tensor:
            return
        leader = copy.role.leader
        reads, writes = leader.touched.get(self.storage, (0, 0))
        if (writes | (reads if write else 0)) & self.mask or copy.location in leader.fences:
            leader.fences.add(copy.location)
            for lane in leader.lanes:
                lane.fence()
            return
        access = copy.access(write, self.mask, self.name)
        for old in self.storage.shadow.accesses:
            meets = old.generic and (write or old.write) and old.mask & self.mask
            if meets and copy.clock.knows(old) and not copy.clock.fences(old):
                remark = "fence_async_shared must lie between the two"
                self._judge(MissingFence, access, old, remark)

    def read(self, actor: Role | Operation) -> torch.Tensor:
        """Read the contents at the actor's present."""
        self._access(actor, write=False)
        return self.contents()

    def contents(self) -> torch.Tensor:
        """Return the contents, as a tile holds them, without an access."""
        return from_raw(self._view().clone(), self.dtype).reshape(self.shape)

    def write(self, data: torch.Tensor, actor: Role | Operation) -> None:
        self._access(actor, write=True)
        view = self._view()
        current().scheduler.changes += 1
        view.copy_(to_raw(data, self.dtype).reshape(view.shape))
        if self.storage.tensor and isinstance(actor, Role):
            actor.meet()  # the compiler puts a barrier there

    def on(self, storage: Storage) -> "Buffer":
        return replace(self, storage=storage)


def _repeat(bits: int, step: int, times: int) -> int:
    if times == 1:
        return bits
    half = _repeat(bits, step, times // 2)
    both = half | half << step * (times // 2)
    return both | bits << step * (times - 1) if times % 2 else both


def packed(shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(math.prod(shape[i + 1 :]) for i in range(len(shape)))
