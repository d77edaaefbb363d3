"""Shared and tensor memory of Gluon: descriptors are buffers with Gluon's methods."""

import math
import weakref
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

import torch
from triton.experimental.gluon.language.nvidia.ampere.mbarrier import MBarrierLayout
from triton.experimental.gluon.language.nvidia.blackwell import TensorMemoryScalesLayout

from ..assembly import short
from ..barriers import MBarrier
from ..buffers import LANES, Buffer, Storage, packed
from ..errors import BarrierMisuse, InvalidKernel, OutOfBounds, Race, Unsupported, current_location
from ..launch import current
from ..machine import copies, views
from ..machine.sync import Barriers, remote
from ..machine.table import blackwell_only, point, uncharged
from ..rewrite import static_int
from ..scheduler import Operation, Role
from ..tile import Tile, held, to_tile
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
    shifted,
    slices,
)


@dataclass(eq=False)
class Memory(Storage):
    """A storage that knows which values still name it.

    array: of the barriers that it is, None if it is other memory. location: where it was allocated.
    earlier: shared memory allocated before it, with which it may share bytes.
    """

    views: Any = field(default_factory=weakref.WeakSet)
    array: Barriers | None = None
    location: Any = field(default_factory=current_location)
    earlier: list["Memory"] = field(default_factory=list)

    @property
    def barriers(self) -> Any:
        return () if self.array is None else self.array.barriers

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
    """The part of a descriptor that lies in one CTA."""

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
                remark = (
                    f"the compiler puts it where {pending[0].name} was, as no operation comes that "
                    f"uses that, and nothing orders the two"
                )
                facts = current().scheduler.around(access, pending[0])
                self._judge(Race, access, pending[0], remark, **facts)
            self.storage.earlier.pop()

    def reshape(self, sizes: tuple[int, ...]) -> "View":
        one = self.single()
        if one.storage.tensor or one.strides == packed(one.shape):
            return views.local_reshape(self, sizes)
        point()
        laid = one._strided().shape, one.strides
        return replace(one, shape=sizes, strides=packed(sizes), laid=laid)


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


@dataclass(eq=False)
class Sharded:
    """`shared_memory_descriptor` and `tensor_memory_descriptor`: memory of which each CTA of the
    program has a part, or all.

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

    @property
    def rank(self) -> int:
        return len(self.view.shape) + bool(self.view.num)

    @property
    def nbytes_per_cta(self) -> int:
        return self.view.num_bytes * max(1, self.view.num)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        if name not in ("dtype", "layout", "name"):
            raise Unsupported(f"{name} of {self.view.name}")
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

    def _pieces(self, lane: Any) -> dict[Box, Any]:
        """Map the boxes of the CTAs' parts, as coordinates of what is left, to their owners: of
        several with the same part this CTA, or the first one."""
        full, owners = self.sharding.whole(self.view.shape), {}
        origin = self.slices or ((0, 0),) * len(full)
        for cta in (lane.cta, *lane.cta.cluster.ctas):
            owners.setdefault(shifted(self.sharding.box(full, cta.rank), origin), cta)
        return owners

    def _parts(self, lane: Any, box: Box) -> Iterator[tuple[Box, View]]:
        """Yield the parts of a box, from the CTAs that have them, or from this one if it has
        all."""
        pieces = self._pieces(lane).items()
        local = [(x, cta) for x, cta in pieces if cta is lane.cta and common(x, box) == box]
        for piece, cta in local or pieces:
            both = common(piece, box)
            if both is not None:
                view = remote(self.view, cta.rank)
                starts, sizes = zip(*shifted(both, piece), strict=True)
                yield both, view if sizes == view.shape else view.window(starts, sizes)

    def _same(self, view: View) -> "Sharded":
        self._whole()
        return Sharded(view, self.sharding)

    @uncharged
    def load(self, layout: Any = None) -> Tile:
        """Load each CTA's registers by this layout, from the CTAs that have the data."""
        has = sharding_of(layout, self.shape) or self._whole().sharding
        data = torch.zeros(self.shape, dtype=held(self.view.dtype))
        for lane in in_ctas():
            for box, view in self._parts(lane, has.box(self.shape, lane.cta.rank)):
                data[slices(box)] = views.local_load(view).data
        return Tile(data, self.view.dtype)

    def _keep_alive(self) -> None:
        """Use the buffer, which keeps it alive until here."""

    def get_reg_layout(self, num_warps: Any = None, instr_variant: str = "32x32b") -> Any:
        """Return a name for a layout: values do not depend on it."""
        return ("tensor memory", self.view.shape, instr_variant)

    @uncharged
    def store(self, value: Any, pred: Any = True) -> None:
        layout = self.sharding if self.slices is None else registers(self.shape)
        for lane in in_ctas() if bool(pred) else ():
            for box, view in self._parts(lane, layout.box(self.shape, lane.cta.rank)):
                views.local_store(view, cut(value, box))

    @uncharged
    def async_store(self, value: Any, barrier: Any) -> None:
        """Store registers asynchronously from their owners, counted on the receiver's barrier."""
        layout = registers(self.shape)
        for lane in in_ctas():
            for box, view in self._parts(lane, layout.box(self.shape, lane.cta.rank)):
                target = barrier.barrier_of(view.storage.cta.rank)
                copies.store_shared(point(), view, cut(value, box), target)

    def _boxes(self, lane: Any, indices: Tile, axis: int) -> Iterator[tuple[Any, Any, View]]:
        """Resolve this CTA's indices along `axis`: for each part of the memory the positions of the
        indices, theirs in the view of the box around them, and the view."""
        box = registers(indices.shape).box(indices.shape, lane.cta.rank)
        offsets = torch.tensor([start for start, _ in box])
        index = indices.data[slices(box)].to(torch.int64)
        positions = torch.ones_like(index).nonzero() + offsets
        places = positions.clone()
        places[:, axis] = index.reshape(-1)
        if bool(((index < 0) | (index >= self.shape[axis])).any()):
            raise OutOfBounds(f"an index of {self.view.name}, which has {self.shape[axis]} there")
        for piece in self._pieces(lane):
            first, size = torch.tensor(piece).T
            here = ((places >= first) & (places < first + size)).all(1)
            if bool(here.any()):
                low, high = places[here].aminmax(dim=0)
                if self.view.laid:  # its parts are not boxes
                    low, high = first, first + size - 1
                box = tuple(zip(low.tolist(), (high - low + 1).tolist(), strict=True))
                ((_, view),) = self._parts(lane, box)
                yield positions[here].unbind(1), (places[here] - low).unbind(1), view

    @uncharged
    def gather(self, indices: Tile, axis: int) -> Tile:
        data = torch.zeros(indices.shape, dtype=held(self.view.dtype))
        for lane in in_ctas():
            for here, inside, view in self._boxes(lane, indices, axis):
                data[here] = views.local_load(view).data[inside]
        return Tile(data, self.view.dtype)

    @uncharged
    def scatter(self, values: Tile, indices: Tile, axis: int) -> None:
        value, index = torch.broadcast_tensors(to_tile(values).data, indices.data)
        for lane in in_ctas():
            for here, inside, view in self._boxes(lane, indices.like(index), axis):
                data = view.contents()
                data[inside] = value[here]
                views.local_store(view, Tile(data, self.view.dtype))

    def index(self, index: Any) -> "Sharded":
        if type(self.layout) is MBarrierLayout:
            # Its bounds are checked on use: it may be of no barrier where nothing is performed.
            offset = self.view.offset + int(index)
            return self._same(replace(self.view, shape=(1,), strides=(1,), offset=offset))
        return self._same(self.view[index])

    def slice(self, start: Any, length: Any, dim: int | None = None) -> "Sharded":
        tensor = self.view.storage.tensor
        axis = static_int(int(tensor) if dim is None else dim)
        begin, size = static_int(start), static_int(length)
        if self.slices is not None or self.sharding.parts(len(self.shape))[axis] > 1:
            if (begin, size) == (0, self.shape[axis]):
                return self
            left = [*(self.slices or ((0, n) for n in self.shape))]
            left[axis] = left[axis][0] + begin, size
            return replace(self, slices=tuple(left))
        if tensor and axis != 1:
            raise Unsupported(f"a slice of {self.name} along rows of tensor memory")
        starts, shape = [0] * len(self.shape), list(self.view.shape)
        starts[axis], shape[axis] = begin, size
        return self._same(self.view.window(tuple(starts), tuple(shape)))

    def permute(self, order: Any) -> "Sharded":
        point()
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
        view = self.view.reinterpret(dtype or self.dtype, sharding.local(sizes))
        return Sharded(replace(view, layout=layout or self.layout), sharding)

    def barriers_of(self, rank: int) -> Barriers:
        """Return the barriers of this CTA that it is one of; others may have them in common."""
        view = remote(self._whole().view, rank & ~self.sharding.free)
        storage, cta = view.storage, view.storage.cta
        if storage.array is None:
            serial, name = cta.allocations.index(storage), storage.name or "barriers"
            storage.array = Barriers(cta, serial, storage.num_bytes // 8, name)
        return storage.array

    def barrier_of(self, rank: int) -> MBarrier:
        """Return the mbarrier that `init` made for this CTA; raises BarrierMisuse before that."""
        barrier, role = self.barriers_of(rank)[self.view.offset], current().role
        index, epoch = barrier.initialisers[role.cta.rank]
        if role.clock.epochs.get(index, 0) < epoch:
            what = f"{barrier.name} is used, and nothing orders that after its init"
            raise BarrierMisuse(what, barrier=barrier.name)
        return barrier


def part(what: Any, cta: Any) -> Any:
    """Return the CTA's part of memory; anything else stays whole."""
    return what.of(cta) if isinstance(what, Sharded) else what


def free(what: Any) -> int:
    """Return the bits of the rank in which CTAs with the same part of this memory differ."""
    return what._whole().sharding.free if isinstance(what, Sharded) else 0


def _allocate(
    kind: type[View], tensor: bool, element_ty: Any, shape: tuple[int, ...], number: int,
    layout: Any, value: Any,
) -> Sharded:  # fmt: skip
    """Allocate memory in each CTA, or reuse an allocation of the same size that no value names any
    more: its accesses remain. number: of buffers of this shape in tensor memory, 0 for one."""
    lanes, sharding = all_here("an allocation").lanes, required(layout, shape)
    sizes = sharding.local(shape)
    view = kind(
        *(Memory(lanes[0].cta, tensor), element_ty, sizes, packed(sizes), 0, number, "buffer"),
        layout=layout,
    )
    num_bytes = view.units * (4 if tensor else 1) * max(1, number)
    earlier = lanes[0].cta.allocations
    unused = (
        i
        for i, each in enumerate(earlier)
        if isinstance(each, Memory) and not each.views and not each.barriers
        if each.tensor == tensor and each.num_bytes == num_bytes
    )
    serial = next(unused, len(earlier))
    for lane in lanes:
        if serial == len(lane.cta.allocations):
            lane.cta.allocate(Memory(lane.cta, tensor))
        storage = lane.cta.allocations[serial]
        storage.shadow.written, storage.location = 0, current_location()
        if storage.array is not None:  # of barriers that are gone
            storage.array, storage.name = None, ""
        others = (each for each in lane.cta.allocations if isinstance(each, Memory))
        storage.earlier = [x for x in others if not (x is storage or tensor or x.tensor)]
        view.on(storage).fit()
    memory = Sharded(view.on(earlier[serial]), sharding)
    if value is not None:
        memory.store(value)
    return memory


def allocate_shared_memory(element_ty: Any, shape: Any, layout: Any, value: Any = None) -> Any:
    sizes, _ = tuple(static_int(size) for size in shape), point()
    return _allocate(View, False, element_ty, sizes, 0, layout, value)


def allocate_tensor_memory(element_ty: Any, shape: Any, layout: Any, value: Any = None) -> Any:
    blackwell_only("allocate_tensor_memory")
    sizes, _ = tuple(static_int(size) for size in shape), point()
    number, sizes = (sizes[0], sizes[1:]) if len(sizes) == 3 else (0, sizes)
    local, scales = required(layout, sizes).local(sizes), type(layout) is TensorMemoryScalesLayout
    current().pairs |= bool(getattr(layout, "two_ctas", False))
    if scales and local[0] % 32:
        raise InvalidKernel(f"scales must be [32 N, groups], got {[*local]}")
    if not scales and (len(local) != 2 or local[0] not in (64, LANES)):
        raise Unsupported(f"tensor memory of shape {[*local]} in a CTA")
    kind = Scales if scales else View
    return _allocate(kind, True, element_ty, sizes, number, layout, value)


def described(descriptor: Any, layout: Any) -> Any:
    """Add the members of Gluon's descriptors to a `memory.Descriptor`."""
    shape, element_ty = descriptor.block_shape, descriptor.dtype
    nbytes = math.prod(shape) * element_ty.primitive_bitwidth // 8
    parts = math.prod((sharding_of(layout, shape) or Sharding()).parts(len(shape)))
    descriptor.block_type = SimpleNamespace(shape=shape, element_ty=element_ty, nbytes=nbytes)
    descriptor.layout, descriptor.nbytes_per_cta = layout, nbytes // parts
    descriptor.type = descriptor
    return descriptor
