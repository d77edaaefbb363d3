"""Shared and tensor memory of Gluon: descriptors are buffers with Gluon's methods."""

import math
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import triton.language as tl

from ..assembly import short
from ..buffers import LANES, Buffer, Storage, packed
from ..errors import InvalidKernel, OutOfBounds, Race, Unsupported, current_location
from ..launch import current
from ..machine import copies, views
from ..machine.sync import remote
from ..machine.table import blackwell_only, point
from ..rewrite import static_int
from ..scheduler import Operation, Role
from ..tile import Tile, bytes_of, from_raw, held, to_tile
from .barriers import Cells, MBarriers, barriers_of
from .ctas import (
    Box,
    Sharding,
    all_here,
    common,
    cut,
    in_ctas,
    registers,
    required,
    sharding_of,
    slices,
)


@dataclass(eq=False)
class Memory(Storage):
    """A storage that knows which values still name it.

    cells: barriers that are made of it. location: where it was allocated. earlier: shared memory
    allocated before it, with which it may share bytes.
    """

    views: Any = field(default_factory=weakref.WeakSet)
    cells: Cells | None = None
    location: Any = field(default_factory=current_location)
    earlier: list["Memory"] = field(default_factory=list)

    @property
    def barriers(self) -> Any:
        return () if self.cells is None else self.cells.barriers

    def shares_with(self, other: "Memory") -> bool:
        """Return whether the compiler lets both share bytes."""

        def spans(memory: "Memory") -> list[range]:
            calls = tuple(map(short, reversed(memory.location.chain)))
            every = current().placed()
            offsets = (offset for where, offset in every if where[: len(calls)] == calls)
            return [range(offset, offset + memory.num_bytes) for offset in offsets]

        pairs = [(a, b) for a in spans(self) for b in spans(other)]
        if not pairs:
            question = "whether this buffer shares bytes with that of"
            current().report.give_up(question, other.location)
        return bool(pairs) and all(a.start < b.stop and b.start < a.stop for a, b in pairs)


@dataclass(eq=False)
class View(Buffer):
    """`shared_memory_descriptor` and `tensor_memory_descriptor`."""

    layout: Any = None

    def __post_init__(self) -> None:
        self.storage.views.add(self)

    def _access(self, actor: Role | Operation, write: bool) -> None:
        """Raise Race also if this write meets operations in flight on the same bytes."""
        super()._access(actor, write)
        while write and current().races and self.storage.earlier:
            old, access = self.storage.earlier[-1], actor.access(True, 0, name=self.name)
            pending = [each for each in old.shadow.accesses if not actor.clock.knows(each)]
            if pending and self.storage.shares_with(old):
                other = pending[0]
                does, (file, line) = "writes" if other.write else "reads", other.location
                raise Race(
                    f"{access.who} writes {self.label}, which the compiler puts where {other.name} "
                    f"was, as no operation comes that uses that; {other.who} {does} it at "
                    f"{file}:{line}, and nothing orders the two",
                    access.location,
                    other=other.location,
                    buffer=self.name,
                    marks=(other.mark, access.mark),
                    **current().scheduler.around(access, other),
                )
            self.storage.earlier.pop()

    @property
    def nbytes_per_cta(self) -> int:
        return self.num_bytes * max(1, self.num)

    @property
    def rank(self) -> int:
        return len(self.shape) + bool(self.num)

    def load(self, layout: Any = None) -> Tile:
        return views.local_load(self)

    def store(self, value: Any, pred: Any = True) -> None:
        if bool(pred):
            views.local_store(self, value)

    def index(self, index: Any) -> "View":
        if self.rank < 2:
            raise InvalidKernel(f"index of {self.name} needs rank 2 or more, got {self.rank}")
        return self[index]

    def slice(self, start: Any, length: Any, dim: int | None = None) -> "View":
        axis = static_int((1 if self.storage.tensor else 0) if dim is None else dim)
        begin, shape = [0] * len(self.shape), list(self.shape)
        begin[axis], shape[axis] = static_int(start), static_int(length)
        if self.storage.tensor and axis != 1:
            raise Unsupported(f"a slice of {self.name} along rows of tensor memory")
        return self.window(tuple(begin), tuple(shape))

    def permute(self, order: Any) -> "View":
        point()
        return super().permute(tuple(static_int(dim) for dim in order))

    def reshape(self, shape: Any) -> "View":
        one = self.single()
        if one.storage.tensor or one.strides == packed(one.shape):
            return views.local_reshape(self, shape)
        point()
        sizes = tuple(static_int(size) for size in shape)
        if math.prod(sizes) != math.prod(one.shape):
            raise InvalidKernel(f"reshape must keep the size of {self.name}, got {[*sizes]}")
        laid = one._strided().shape, one.strides
        return replace(one, shape=sizes, strides=packed(sizes), laid=laid)

    def reinterpret(self, dtype: Any = None, shape: Any = None, layout: Any = None) -> "View":
        sizes = None if shape is None else tuple(static_int(size) for size in shape)
        new_layout = self.layout if layout is None else layout
        return replace(super().reinterpret(dtype or self.dtype, sizes), layout=new_layout)

    def _keep_alive(self) -> None:
        """Use the buffer, which keeps it alive until here."""

    def contents(self) -> torch.Tensor:
        """Contents, read without recording an access."""
        return from_raw(self._view().clone(), self.dtype).reshape(self.shape)

    def gather(self, indices: Any, axis: int) -> Tile:
        return views.local_gather(self, indices, axis)

    def scatter(self, values: Tile, indices: Any, axis: int) -> None:
        views.local_scatter(self, values, indices, axis)

    def get_reg_layout(self, num_warps: Any = None, instr_variant: str = "32x32b") -> Any:
        """Return a name for a layout: values do not depend on it."""
        return ("tensor memory", self.shape, instr_variant)

    def as_barriers(self) -> MBarriers:
        return _barriers_in(self, Sharding())


@dataclass(eq=False)
class Sharded:
    """A descriptor of memory of which each CTA of the program has a part, or all.

    view: the part of the first CTA; those of the others lie at the same place of their memory.
    slices: start and size of what is left of it, along each dimension, if a slice crosses parts.
    """

    view: View
    sharding: Sharding
    slices: Box | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        if self.slices is not None:
            return tuple(size for _, size in self.slices)
        return self.sharding.whole(self.view.shape)

    @property
    def type(self) -> "Sharded":
        return self

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        if name not in ("dtype", "layout", "nbytes_per_cta", "rank", "name", "get_reg_layout"):
            raise Unsupported(f"{name} of {self.view.name} in a program of several CTAs")
        return getattr(self.view, name)

    def call_it(self, name: str) -> None:
        self.view.call_it(name)
        for cta in self.view.storage.cta.cluster.ctas:
            remote(self.view, cta.rank).storage.name = self.view.storage.name

    def _whole(self) -> "Sharded":
        if self.slices is not None:
            raise Unsupported(f"this use of a slice of {self.view.name} over the parts of CTAs")
        return self

    def of(self, cta: Any) -> View:
        return remote(self._whole().view, cta.rank)

    def box(self, cta: Any) -> Box:
        """Box of this CTA."""
        return self._whole().sharding.box(self.shape, cta.rank)

    def _pieces(self, lane: Any) -> list[tuple[Box, Box, Any]]:
        """List the pieces that CTAs have, where each lies in its part, and its owner: of several
        with the same part this CTA, or the first one."""
        owners: dict[Box, Any] = {}
        full = self.sharding.whole(self.view.shape)
        for cta in (lane.cta, *lane.cta.cluster.ctas):
            owners.setdefault(self.sharding.box(full, cta.rank), cta)
        pieces = []
        for box, cta in owners.items():
            both = box if self.slices is None else common(box, self.slices)
            if both is not None:
                inner = tuple((x - y, n) for (x, n), (y, _) in zip(both, box, strict=True))
                starts = [0] * len(full) if self.slices is None else [x for x, _ in self.slices]
                outer = tuple((x - y, n) for (x, n), y in zip(both, starts, strict=True))
                pieces.append((outer, inner, cta))
        return pieces

    def _parts(self, lane: Any, box: Box) -> Iterator[tuple[Box, View]]:
        """Yield the parts of a box, from the CTAs that have them, or from this one if it has
        all."""
        pieces = self._pieces(lane)
        local = [x for x in pieces if x[2] is lane.cta and common(x[0], box) == box]
        for outer, inner, cta in local or pieces:
            both = common(outer, box)
            if both is not None:
                moves = zip(both, outer, inner, strict=True)
                starts = tuple(x - y + z for (x, _), (y, _), (z, _) in moves)
                view, sizes = remote(self.view, cta.rank), tuple(n for _, n in both)
                yield both, view if sizes == view.shape else view.window(starts, sizes)

    def _same(self, view: View) -> "Sharded":
        self._whole()
        if any(len(basis) > len(view.shape) for basis in self.sharding.bases):
            raise InvalidKernel(f"{self.view.name} has no dimension left to index")
        return Sharded(view, self.sharding)

    def load(self, layout: Any = None) -> Tile:
        """Load each CTA's registers by this layout, from the CTAs that have the data."""
        has = sharding_of(layout, self.shape) or self._whole().sharding
        data = torch.zeros(self.shape, dtype=held(self.view.dtype))

        def act(lane: Any) -> None:
            for box, view in self._parts(lane, has.box(self.shape, lane.cta.rank)):
                data[slices(box)] = views.local_load(view).data

        in_ctas(act)
        return Tile(data, self.view.dtype)

    def _fits(self, value: Any) -> Tile:
        value = to_tile(value)
        if tuple(value.shape) != self.shape:
            raise InvalidKernel(f"{self.view.name} is {[*self.shape]}, got {value!r}")
        return value

    def store(self, value: Any, pred: Any = True) -> None:
        value = self._fits(value)
        layout = self.sharding if self.slices is None else registers(self.shape)

        def act(lane: Any) -> None:
            for box, view in self._parts(lane, layout.box(self.shape, lane.cta.rank)):
                view.store(cut(value, box))

        if bool(pred):
            in_ctas(act)

    def async_store(self, value: Any, barrier: Any) -> None:
        """Store registers asynchronously from their owners, counted on the receiver's barrier."""
        value, bars, layout = self._fits(value), barriers_of(barrier), registers(self.shape)

        def act(lane: Any) -> None:
            for box, view in self._parts(lane, layout.box(self.shape, lane.cta.rank)):
                target = bars.of(view.storage.cta.rank)
                copies.store_shared(point(), view, cut(value, box), target)

        in_ctas(act)

    def _boxes(self, lane: Any, indices: Tile, axis: int) -> Iterator[tuple[Any, Any, View]]:
        """Resolve this CTA's indices along `axis`: for each part of the memory the mask of the
        indices, their positions in the view of the box around them, and the view."""
        index = indices.data.to(torch.int64)
        local = torch.zeros(index.shape, dtype=torch.bool)
        local[slices(registers(index.shape).box(index.shape, lane.cta.rank))] = True
        if bool(((index < 0) | (index >= self.shape[axis]))[local].any()):
            raise OutOfBounds(f"an index of {self.view.name}, which has {self.shape[axis]} there")
        for piece, _, _ in self._pieces(lane):
            start, size = piece[axis]
            here = local & (index >= start) & (index < start + size)
            for d, (first, number) in enumerate(piece):
                if d != axis:
                    places = torch.arange(index.shape[d]).view(
                        *(-1 if e == d else 1 for e in range(index.ndim))
                    )
                    here = here & (places >= first) & (places < first + number)
            if bool(here.any()):
                places = [*here.nonzero(as_tuple=True)]
                places[axis] = index[here]
                box = tuple((int(p.min()), int(p.max() - p.min()) + 1) for p in places)
                inside = tuple(p - first for p, (first, _) in zip(places, box, strict=True))
                ((_, view),) = self._parts(lane, box)
                yield here, inside, view

    def gather(self, indices: Tile, axis: int) -> Tile:
        data = torch.zeros(indices.shape, dtype=held(self.view.dtype))

        def act(lane: Any) -> None:
            for here, inside, view in self._boxes(lane, indices, axis):
                data[here] = views.local_load(view).data[inside]

        in_ctas(act)
        return Tile(data, self.view.dtype)

    def scatter(self, values: Tile, indices: Tile, axis: int) -> None:
        value, index = torch.broadcast_tensors(to_tile(values).data, indices.data)

        def act(lane: Any) -> None:
            for here, inside, view in self._boxes(lane, indices.like(index), axis):
                data = view.contents()
                data[inside] = value[here]
                views.local_store(view, Tile(data, self.view.dtype))

        in_ctas(act)

    def index(self, index: Any) -> "Sharded":
        return self._same(self.view.index(index))

    def slice(self, start: Any, length: Any, dim: int | None = None) -> "Sharded":
        axis = static_int((1 if self.view.storage.tensor else 0) if dim is None else dim)
        if self.slices is not None or self.sharding.parts(len(self.shape))[axis] > 1:
            begin, size = static_int(start), static_int(length)
            if (begin, size) == (0, self.shape[axis]):
                return self
            if begin < 0 or size < 1 or begin + size > self.shape[axis]:
                raise OutOfBounds(f"slice {begin} + {size} leaves {self.view.name} {[*self.shape]}")
            left = [*(self.slices or ((0, n) for n in self.shape))]
            left[axis] = left[axis][0] + begin, size
            return replace(self, slices=tuple(left))
        return self._same(self.view.slice(start, length, axis))

    def permute(self, order: Any) -> "Sharded":
        dims = tuple(static_int(dim) for dim in order)
        self._whole()
        return Sharded(self.view.permute(dims), self.sharding.permuted(dims))

    def reshape(self, shape: Any) -> "Sharded":
        """Reshape; parts stay parts if split along the first dimension that is longer than 1."""
        sizes = tuple(static_int(size) for size in shape)
        self._whole()
        first = [next((d for d, n in enumerate(s) if n > 1), 0) for s in (self.shape, sizes)]
        parts = list(self.sharding.parts(len(self.shape)))
        number = parts.pop(first[0])
        if max(parts, default=1) > 1 or sizes[first[1]] % number:
            raise Unsupported(f"reshape of {self.view.name}, whose parts would be none of {sizes}")
        rest = len(sizes) - 1 - first[1]
        steps = (max(basis, default=0) for basis in self.sharding.bases)
        sharding = Sharding(tuple((*(0,) * first[1], step, *(0,) * rest) for step in steps))
        return Sharded(self.view.reshape(sharding.local(sizes)), sharding)

    def reinterpret(self, dtype: Any = None, shape: Any = None, layout: Any = None) -> "Sharded":
        sizes = self.shape if shape is None else tuple(static_int(size) for size in shape)
        self._whole()
        sharding = self.sharding if layout is None else required(layout, sizes)
        return Sharded(self.view.reinterpret(dtype, sharding.local(sizes), layout), sharding)

    def as_barriers(self) -> MBarriers:
        return _barriers_in(self._whole().view, self.sharding)


def part(what: Any, cta: Any) -> Any:
    """Return the CTA's part of memory; anything else stays whole."""
    return what.of(cta) if isinstance(what, Sharded) else what


def free(what: Any) -> int:
    """Return the bits of the rank in which CTAs with the same part of this memory differ."""
    return what._whole().sharding.free if isinstance(what, Sharded) else 0


def _barriers_in(view: View, sharding: Sharding) -> MBarriers:
    if view.dtype.name != "int64" or view.shape != (1,):
        raise InvalidKernel(f"an mbarrier is one int64 in each CTA, got {view.name}")
    cells = []
    for cta in view.storage.cta.cluster.ctas:
        storage = remote(view, cta.rank).storage
        if storage.cells is None:
            storage.cells = Cells(cta, storage.num_bytes // 8, view.storage.name or view.name)
        cells.append(storage.cells)
    return MBarriers(tuple(cells), (1,), sharding.free, view.offset)


@dataclass(eq=False)
class Scales(View):
    """`TensorMemoryScalesLayout`: 8-bit factors [rows, groups]; 32 rows stand in a column."""

    @property
    def width(self) -> int:
        return self.shape[0] // 32 * self.shape[1]

    @property
    def rows(self) -> int:
        return LANES

    def _strided(self) -> "Scales":
        raise Unsupported(f"a part of {self.name}, scales in tensor memory")

    def _strided_as(self) -> Any:
        shape = (self.shape[0] // 32, 32, self.shape[1])
        return shape, (self.shape[1], self.storage.num_bytes, 1), self.offset

    def settle(self, paired: bool) -> None:
        self.storage.paired = False


def _allocate(
    tensor: bool, num_bytes: int, layout: Any, sharding: Sharding, value: Any,
    make: Callable[[Memory], View],
) -> Any:  # fmt: skip
    """Allocate memory in each CTA, or reuse an allocation of the same size that no value names any
    more: its accesses remain. make: builds the view."""
    first, *rest = all_here("an allocation").lanes
    old = first.cta.allocations
    free = (
        i
        for i, each in enumerate(old)
        if isinstance(each, Memory) and not each.views
        if each.tensor == tensor and each.num_bytes == num_bytes
    )
    number, buffers = next(free, len(old)), []
    for lane in (first, *rest):
        cta = lane.cta
        if number < len(cta.allocations):
            storage = cta.allocations[number]
            storage.shadow.written, storage.location = 0, current_location()
            buffers.append(make(storage))
            buffers[-1].fit()
        else:
            buffers.append(make(storage := Memory(cta, tensor)))
            buffers[-1].fit()
            cta.allocate(storage)
        storage.earlier = _others(storage)
    buffers[0].layout = layout
    view = Sharded(buffers[0], sharding) if rest else buffers[0]
    if value is not None:
        view.store(value)
    return view


def _others(memory: Memory) -> list[Memory]:
    """List the other shared memory of its CTA so far; none for tensor memory."""
    every = (each for each in memory.cta.allocations if isinstance(each, Memory))
    return [each for each in every if each is not memory and not (memory.tensor or each.tensor)]


def allocate_shared_memory(element_ty: Any, shape: Any, layout: Any, value: Any = None) -> Any:
    sizes, role = tuple(static_int(size) for size in shape), point()
    if type(layout).__name__ == "MBarrierLayout":
        return MBarriers.allocate(role, sizes, layout)
    sharding = required(layout, sizes)
    sizes = sharding.local(sizes)
    num_bytes = math.prod(sizes) * element_ty.primitive_bitwidth // 8
    return _allocate(
        *(False, num_bytes, layout, sharding, value),
        lambda where: View(where, element_ty, sizes, packed(sizes), 0, 0, "buffer"),
    )


def allocate_tensor_memory(element_ty: Any, shape: Any, layout: Any, value: Any = None) -> Any:
    blackwell_only("allocate_tensor_memory")
    sizes, _ = tuple(static_int(size) for size in shape), point()
    number, sizes = (sizes[0], sizes[1:]) if len(sizes) == 3 else (0, sizes)
    sharding, scales = required(layout, sizes), type(layout).__name__ == "TensorMemoryScalesLayout"
    current().pairs |= bool(getattr(layout, "two_ctas", False))
    sizes = sharding.local(sizes)
    if scales:
        if len(sizes) != 2 or sizes[0] % 32 or bytes_of(element_ty) != 1:
            raise InvalidKernel(f"scales must be [32 N, groups] of 8 bits, got {element_ty}{sizes}")
        row = -(-sizes[0] // 32 * sizes[1] // 4) * 4 * max(1, number)
    elif len(sizes) != 2 or sizes[0] not in (64, LANES):
        raise Unsupported(f"tensor memory of shape {[*sizes]} in a CTA")
    else:
        row = -(-sizes[1] * element_ty.primitive_bitwidth // 32) * 4 * max(1, number)
    kind = Scales if scales else View
    return _allocate(
        *(True, row, layout, sharding, value),
        lambda where: kind(where, element_ty, sizes, packed(sizes), 0, number, "buffer"),
    )


@dataclass(frozen=True)
class BlockType:
    """`desc.block_type`."""

    shape: tuple[int, ...]
    element_ty: tl.dtype

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.element_ty.primitive_bitwidth // 8


def described(descriptor: Any, layout: Any) -> Any:
    """Add the members of Gluon's descriptors to a `memory.Descriptor`."""
    descriptor.layout = layout
    descriptor.block_type = BlockType(descriptor.block_shape, descriptor.dtype)
    shape = descriptor.block_shape
    parts = math.prod((sharding_of(layout, shape) or Sharding()).parts(len(shape)))
    descriptor.nbytes_per_cta = descriptor.block_type.nbytes // parts
    descriptor.type = descriptor
    return descriptor
