"""Shared and tensor memory of Gluon: descriptors are buffers with Gluon's methods."""

import math
import weakref
from dataclasses import dataclass, field, replace
from typing import Any

import triton.language as tl

from ..buffers import LANES, Buffer, Storage, packed
from ..errors import InvalidKernel, Race, Unsupported, location
from ..launch import current
from ..machine import views
from ..machine.table import blackwell_only, point
from ..rewrite import static_int
from ..scheduler import Operation, Role
from ..tile import RAW, Tile, bytes_of
from .barriers import MBarriers


@dataclass(eq=False)
class Memory(Storage):
    """A storage that knows which values still name it.

    made: where it was allocated. before: shared memory that was allocated before, with which it may
    share bytes.
    """

    views: Any = field(default_factory=weakref.WeakSet)
    made: Any = field(default_factory=location)
    before: list["Memory"] = field(default_factory=list)

    def shares_with(self, other: "Memory") -> bool:
        """Whether the compiler gives bytes to both."""

        def spans(memory: "Memory") -> list[range]:
            calls = tuple((file, line) for file, line, _ in reversed(memory.made.chain))
            every = current().placed()
            mine = (at for where, at in every if where[: len(calls)] == calls)
            return [range(at, at + memory.num_bytes) for at in mine]

        pairs = [(a, b) for a in spans(self) for b in spans(other)]
        return bool(pairs) and all(a.start < b.stop and b.start < a.stop for a, b in pairs)


@dataclass(eq=False)
class View(Buffer):
    """`shared_memory_descriptor` and `tensor_memory_descriptor`."""

    layout: Any = None

    def __post_init__(self) -> None:
        self.storage.views.add(self)

    def _access(self, actor: Role | Operation, write: bool) -> None:
        """Raise Race, too, if this write meets what is in flight on memory of the same bytes."""
        super()._access(actor, write)
        while write and current().races and self.storage.before:
            old, access = self.storage.before[-1], actor.access(True, 0, name=self.name)
            pending = [each for each in old.shadow.accesses if not actor.clock.knows(each)]
            if pending and self.storage.shares_with(old):
                other = pending[0]
                does, (file, line) = "writes" if other.write else "reads", other.at
                raise Race(
                    f"{access.who} writes {self.label}, which the compiler puts where {other.name} "
                    f"was, as no operation comes that uses that; {other.who} {does} it at "
                    f"{file}:{line}, and nothing orders the two",
                    access.at,
                    other=other.at,
                    buffer=self.name,
                    marks=(other.mark, access.mark),
                    **current().scheduler.around(access, other),
                )
            self.storage.before.pop()

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
        kept = self.layout if layout is None else layout
        return replace(super().reinterpret(dtype or self.dtype, sizes), layout=kept)

    def _keep_alive(self) -> None:
        """A use of the buffer, up to which it is alive."""

    def gather(self, indices: Any, axis: int) -> Tile:
        return views.local_gather(self, indices, axis)

    def scatter(self, values: Tile, indices: Any, axis: int) -> None:
        views.local_scatter(self, values, indices, axis)

    def get_reg_layout(self, num_warps: Any = None, instr_variant: str = "32x32b") -> Any:
        """A name for a layout: values do not depend on it."""
        return ("tensor memory", self.shape, instr_variant)


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

    def _view(self) -> Any:
        data = self.storage.data
        shape = (self.shape[0] // 32, 32, self.shape[1])
        strides = (self.shape[1], data.shape[1], 1)
        return data.view(RAW[self.dtype.name]).as_strided(shape, strides, self.offset)

    def settle(self, paired: bool) -> None:
        self.storage.paired = False


def _storage(cta: Any, tensor: bool, num_bytes: int) -> Memory:
    """New memory, or such of the same size as no value names any more: its accesses remain."""
    for old in cta.allocations:
        free = isinstance(old, Memory) and not old.views
        if free and old.tensor == tensor and old.num_bytes == num_bytes:
            old.shadow.written, old.made = 0, location()
            old.before = _others(old)
            return old
    made = Memory(cta, tensor)
    made.before = _others(made)
    return made


def _others(memory: Memory) -> list[Memory]:
    """The other shared memory of its CTA so far; none for tensor memory."""
    every = (each for each in memory.cta.allocations if isinstance(each, Memory))
    return [each for each in every if each is not memory and not (memory.tensor or each.tensor)]


def allocate_shared_memory(element_ty: Any, shape: Any, layout: Any, value: Any = None) -> Any:
    sizes, role = tuple(static_int(size) for size in shape), point()
    if type(layout).__name__ == "MBarrierLayout":
        return MBarriers.allocate(role, sizes)
    num_bytes = math.prod(sizes) * element_ty.primitive_bitwidth // 8
    where = _storage(role.cta, False, num_bytes)
    return _made(
        View(where, element_ty, sizes, packed(sizes), 0, 0, "buffer", layout=layout), value
    )


def allocate_tensor_memory(element_ty: Any, shape: Any, layout: Any, value: Any = None) -> View:
    blackwell_only("allocate_tensor_memory")
    sizes, role = tuple(static_int(size) for size in shape), point()
    number, sizes = (sizes[0], sizes[1:]) if len(sizes) == 3 else (0, sizes)
    if type(layout).__name__ == "TensorMemoryScalesLayout":
        if len(sizes) != 2 or sizes[0] % 32 or bytes_of(element_ty) != 1:
            raise InvalidKernel(f"scales must be [32 N, groups] of 8 bits, got {element_ty}{sizes}")
        row = -(-sizes[0] // 32 * sizes[1] // 4) * 4 * max(1, number)
        where = _storage(role.cta, True, row)
        made = Scales(where, element_ty, sizes, packed(sizes), 0, number, "buffer", layout=layout)
        return _made(made, value)
    if len(sizes) != 2 or sizes[0] not in (64, LANES):
        raise Unsupported(f"tensor memory of shape {[*shape]}")
    row = -(-sizes[1] * element_ty.primitive_bitwidth // 32) * 4 * max(1, number)
    where = _storage(role.cta, True, row)
    return _made(
        View(where, element_ty, sizes, packed(sizes), 0, number, "buffer", layout=layout), value
    )


def _made(view: View, value: Any) -> View:
    view.fit()
    if view.storage not in view.storage.cta.allocations:
        view.storage.cta.allocate(view.storage)
    if value is not None:
        view.store(value)
    return view


@dataclass(frozen=True)
class BlockType:
    """`desc.block_type`."""

    shape: tuple[int, ...]
    element_ty: tl.dtype

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.element_ty.primitive_bitwidth // 8


def described(descriptor: Any, layout: Any) -> Any:
    """A `memory.Descriptor` with the members that Gluon's have."""
    descriptor.layout = layout
    descriptor.block_type = BlockType(descriptor.block_shape, descriptor.dtype)
    descriptor.nbytes_per_cta = descriptor.block_type.nbytes
    descriptor.type = descriptor
    return descriptor


def check_launch(num_ctas: int) -> None:
    """Raise Unsupported for a program that spans CTAs."""
    if num_ctas > 1:
        raise Unsupported(
            f"a Gluon program of num_ctas={num_ctas}: only programs of one CTA run here", ("", 0)
        )
    current().partition_fences = True
