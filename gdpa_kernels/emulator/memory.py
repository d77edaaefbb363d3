"""Global memory: pointers, bounds, atomics, tensor descriptors, and who wrote what.

Every access of a kernel passes through `Memory`, one per launch; here bounds are checked, and here
the order of accesses is judged.

Bounds: a pointer remembers the tensor argument it was made from, and may touch what lies between
the first and the last element that this tensor (view) reaches. Masked-off lanes may point anywhere.

Undefined values: a masked-off lane of a load without `other` reads NaN, or a large recognisable
integer, so that a kernel that uses it is noticed.

Races: programs run one after another here, and in any order on a device. A shadow of each storage
that is stored to keeps the last writer; a plain store to an element that another program stored to
is a `Race`. Reads and atomics are not judged.

TMA: the hardware compares each index with the shape, then computes the address as
`base + sum(index * stride)` in 64-bit bytes that wrap. Both happen in this order here, so huge
strides that wrap to negative steps work as on the device. A box clipped at the shape is again a
box; it is accessed as a strided view.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
import triton.language as tl

from .errors import (
    DescriptorError,
    InvalidKernel,
    Location,
    OutOfBounds,
    Race,
    Unsupported,
    location,
)
from .launch import Launch
from .tile import FROM_TORCH, RAW, Tile, cast, from_raw, scalar, to_raw, to_tile


def _undefined(dtype: tl.dtype) -> torch.Tensor:
    """What an undefined lane holds, in memory's representation."""
    if dtype.is_fp8():
        pattern = 0x7F
    elif dtype.is_floating():
        pattern = math.nan
    else:
        pattern = 0x5A5A5A5A5A5A5A5A >> 64 - max(8, dtype.int_bitwidth)
    return torch.tensor(pattern, dtype=RAW[dtype.name])


@dataclass
class _Shadow:
    """The last plain store to each granule of a storage, as a number in `Memory._accesses`.

    The granule is the smallest element of the tensors that share the storage, in bytes.
    """

    num_bytes: int
    granule: int
    _writers: torch.Tensor | None = None

    @property
    def writers(self) -> torch.Tensor:
        if self._writers is None:
            self._writers = torch.zeros(-(-self.num_bytes // self.granule), dtype=torch.int32)
        return self._writers


@dataclass(eq=False)
class Region:
    """What pointers made from one tensor argument may touch.

    flat: the whole storage, one-dimensional, in memory's representation of `dtype`.
    low, high: the elements [low, high) of `flat` that the tensor reaches.
    """

    memory: "Memory"
    name: str
    dtype: tl.dtype
    flat: torch.Tensor
    low: int
    high: int
    shadow: _Shadow

    @property
    def itemsize(self) -> int:
        return self.flat.itemsize

    @property
    def granules(self) -> int:
        """How many granules of the shadow an element covers."""
        return max(1, self.itemsize // self.shadow.granule)

    def reinterpret(self, dtype: tl.dtype, offsets: torch.Tensor) -> tuple["Region", torch.Tensor]:
        """The same bytes as elements of another type, and the offsets counted in them."""
        flat = self.flat.view(RAW[dtype.name])
        old, new = self.itemsize, flat.itemsize
        if bool((offsets * old % new).any()):
            raise InvalidKernel(f"pointer to {dtype} must be aligned to {new} bytes")
        low, high = -(-self.low * old // new), self.high * old // new
        return replace(self, dtype=dtype, flat=flat, low=low, high=high), offsets * old // new


class Memory:
    """All global memory of one launch."""

    def __init__(self, launch: Launch):
        self._launch, self._report = launch, launch.report
        self._shadows: dict[tuple[int, int], _Shadow] = {}
        self._accesses: list[tuple[tuple[int, int, int], Location]] = []
        self._program: tuple[int, int, int] | None = None
        self._first_access = 0

    def pointer(self, name: str, tensor: torch.Tensor) -> Tile:
        """A scalar pointer to the first element of a tensor argument."""
        if tensor.device.type != "cpu" or tensor.dtype not in FROM_TORCH:
            raise ValueError(
                f"{name} must be a CPU tensor of a dtype known to Triton, "
                f"got {tensor.dtype} on {tensor.device}"
            )
        dtype, tensor = FROM_TORCH[tensor.dtype], tensor.detach()
        storage = tensor.untyped_storage()
        num_bytes, item = storage.nbytes(), tensor.itemsize
        flat = tensor.as_strided((num_bytes // item,), (1,), 0).view(RAW[dtype.name])
        key = (storage.data_ptr(), num_bytes)
        shadow = self._shadows.setdefault(key, _Shadow(num_bytes, item))
        shadow.granule = min(shadow.granule, item)
        low = high = tensor.storage_offset()
        if tensor.numel():
            high += 1 + sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
        region = Region(self, name, dtype, flat, low, high, shadow)
        return Tile(torch.tensor(low), tl.pointer_type(dtype), region)

    def _out_of_bounds(self, region: Region, what: str, element: int) -> None:
        raise OutOfBounds(
            f"{what} of {region.name} must stay in elements [0, {region.high - region.low}), "
            f"got element {element - region.low} in program {self._launch.program}"
        )

    def _judge(self, region: Region, writers: torch.Tensor) -> int:
        """Raise Race if another program wrote these granules; return the number of this access.

        Programs run one at a time, so those of the running one are the last on the list.
        """
        program = self._launch.program
        if self._program != program:
            self._program, self._first_access = program, len(self._accesses) + 1
        self._report.checks["race"] += 1
        foreign = (writers > 0) & (writers < self._first_access)
        if bool(foreign.any()):
            earlier, (file, line) = self._accesses[int(writers[foreign][0]) - 1]
            raise Race(
                f"program {program} stores to an element of {region.name} that program {earlier} "
                f"stored to at {file}:{line}",
                (file, line),
                (earlier, program),
            )
        access = (program, location())
        if not self._accesses or self._accesses[-1] != access:
            self._accesses.append(access)
        return len(self._accesses)

    def _lanes(
        self, what: str, pointer: Tile, mask: Any
    ) -> tuple[Region, torch.Tensor, torch.Tensor | None]:
        """The region, the element of each lane, and the active lanes if not all; checks bounds."""
        if not (isinstance(pointer, Tile) and pointer.dtype.is_ptr()):
            raise InvalidKernel(f"{what} needs a pointer, got {pointer!r}")
        region, index, active = pointer.base, pointer.data, None
        if mask is not None:
            mask = to_tile(mask)
            if mask.dtype.name != "int1":
                raise InvalidKernel(f"mask must be int1, got {mask!r}")
            index, active = torch.broadcast_tensors(index, mask.data)
            active = None if bool(mask.data.all()) else active
        self._report.checks["bounds"] += 1
        used = index if active is None else index[active]
        if used.numel():
            for element in map(int, torch.aminmax(used)):
                if not region.low <= element < region.high:
                    self._out_of_bounds(region, what, element)
        return region, index, active

    def load(self, pointer: Tile, mask: Any = None, other: Any = None) -> Tile:
        """Gather; inactive lanes read `other`, or an undefined value."""
        region, index, active = self._lanes("load", pointer, mask)
        if active is None:
            raw = region.flat.index_select(0, index.reshape(-1)).reshape(index.shape)
            count = index.numel()
        else:
            default = _undefined(region.dtype)
            if other is not None:
                default = to_raw(cast(other, region.dtype).data, region.dtype)
            used = index[active]
            raw = default.expand(index.shape).clone()
            raw[active] = region.flat.index_select(0, used)
            count = used.numel()
        self._report.bytes_loaded += count * region.itemsize
        return Tile(from_raw(raw, region.dtype), region.dtype)

    def store(self, pointer: Tile, value: Any, mask: Any = None) -> None:
        """Scatter of the active lanes; the value is converted to the element type."""
        region, index, active = self._lanes("store", pointer, mask)
        value = cast(value, region.dtype)
        if index.shape != pointer.data.shape:
            raise InvalidKernel(f"mask must not be larger than the pointers, got {pointer!r}")
        raw = to_raw(value.data, region.dtype).expand(index.shape)
        chosen = ... if active is None else active
        index, raw = index[chosen].reshape(-1), raw[chosen].reshape(-1)
        if self._launch.races:
            parts, granules = region.granules, index
            if parts > 1:
                granules = (index[:, None] * parts + torch.arange(parts)).reshape(-1)
            writers = region.shadow.writers
            writers[granules] = self._judge(region, writers[granules])
        region.flat[index] = raw
        self._report.bytes_stored += index.numel() * region.itemsize

    def atomic(self, pointer: Tile, update: Callable, values: list[Any], mask: Any = None) -> Tile:
        """Read-modify-write with `update(old, *values)` on torch data; returns the old values.

        Lanes that name the same element take their turns.
        """
        region, index, active = self._lanes("atomic", pointer, mask)
        dtype, chosen = region.dtype, ... if active is None else active
        data = [cast(v, dtype).data.expand(index.shape)[chosen].reshape(-1) for v in values]
        where = index[chosen].reshape(-1)
        count = where.numel()
        before = torch.empty(count, dtype=region.flat.dtype)
        unique = where.unique().numel() == count
        for turn in [slice(None)] if unique else [slice(i, i + 1) for i in range(count)]:
            before[turn] = region.flat[where[turn]]
            new = update(from_raw(before[turn], dtype), *(d[turn] for d in data))
            region.flat[where[turn]] = to_raw(new, dtype)
        result = _undefined(dtype).expand(index.shape).clone()
        result[chosen] = before.reshape(result[chosen].shape)
        self._report.bytes_loaded += count * region.itemsize
        self._report.bytes_stored += count * region.itemsize
        return Tile(from_raw(result, dtype), dtype)

    def _window(self, desc: "Descriptor", coordinates: Any, what: str) -> "_Window | None":
        """The part of a box that lies inside the shape; None if nothing does."""
        self._report.checks["descriptor"] += 1
        if len(coordinates) != len(desc.sizes):
            raise InvalidKernel(f"{what} needs {len(desc.sizes)} coordinates, got {coordinates}")
        address, inside, sizes, steps = desc.address, [], [], []
        for value, size, step, box in zip(
            coordinates, desc.sizes, desc.steps, desc.block_shape, strict=True
        ):
            at = _coordinate(value)
            start, stop = max(0, -at), min(box, size - at)
            address += (at + start) * step
            inside.append(slice(start, stop))
            sizes.append(stop - start)
            # The step of a dimension of one element is never taken, and may be huge.
            steps.append(step if stop - start > 1 else 0)
        if min(sizes) <= 0:
            return None
        region = desc.region
        first = ((address + 2**63) % 2**64 - 2**63) // region.itemsize
        strides = [step // region.itemsize for step in steps]
        last = first + sum((n - 1) * s for n, s in zip(sizes, strides, strict=True))
        for element in (first, last):
            if not region.low <= element < region.high:
                self._out_of_bounds(region, what, element)
        return _Window(tuple(inside), first, sizes, strides)

    def load_box(self, desc: "Descriptor", coordinates: Any) -> Tile:
        """The box at `coordinates`; elements outside the shape read the padding."""
        window, region = self._window(desc, coordinates, "descriptor load"), desc.region
        raw = desc.padding.expand(desc.block_shape).clone()
        if window is not None:
            raw[window.inside] = window.of(region.flat)
            self._report.bytes_loaded += math.prod(window.sizes) * region.itemsize
        return Tile(from_raw(raw, region.dtype), region.dtype)

    def store_box(
        self, desc: "Descriptor", coordinates: Any, value: Tile, update: Callable | None = None
    ) -> None:
        """Write the box, or `update(old, value)`; elements outside the shape are dropped."""
        region, dtype = desc.region, desc.dtype
        if not (value.dtype.name == dtype.name and value.shape == desc.block_shape):
            expected = f"{dtype}{list(desc.block_shape)}"
            raise InvalidKernel(f"value must be {expected} as the descriptor, got {value!r}")
        window = self._window(desc, coordinates, "descriptor store")
        if window is None:
            return
        target, data = window.of(region.flat), value.data[window.inside]
        num_bytes = data.numel() * region.itemsize
        if update is not None:
            data = update(from_raw(target, dtype), data)
            self._report.bytes_loaded += num_bytes
        elif self._launch.races:
            writers = window.of(region.shadow.writers, region.granules)
            writers.fill_(self._judge(region, writers))
        target.copy_(to_raw(data, dtype))
        self._report.bytes_stored += num_bytes


@dataclass
class _Window:
    """Part of a box: its place in the box, its first element in memory, its sizes and strides."""

    inside: tuple[slice, ...]
    first: int
    sizes: list[int]
    strides: list[int]

    def of(self, flat: torch.Tensor, parts: int = 1) -> torch.Tensor:
        """A view of these elements, each of them `parts` consecutive items of `flat`."""
        strides = [stride * parts for stride in self.strides]
        return flat.as_strided([*self.sizes, parts], [*strides, 1], self.first * parts).squeeze(-1)


def _coordinate(value: Any) -> int:
    if isinstance(value, Tile) and (value.shape or value.dtype.int_bitwidth > 32):
        raise InvalidKernel(f"descriptor coordinates must be int32 scalars, got {value!r}")
    if not -(2**31) <= int(value) < 2**31:
        raise DescriptorError(f"descriptor coordinates must fit int32, got {int(value)}")
    return int(value)


_REDUCTIONS = {
    "add": torch.add,
    "min": torch.minimum,
    "max": torch.maximum,
    "and": torch.bitwise_and,
    "or": torch.bitwise_or,
    "xor": torch.bitwise_xor,
}
# The floats for which TMA has a reduction.
_REDUCED = {"add": ("fp16", "bf16", "fp32"), "min": ("fp16", "bf16"), "max": ("fp16", "bf16")}


class Descriptor:
    """A tensor descriptor: sizes and block_shape in elements, steps (strides) and address in bytes.

    The address counts from the start of the storage. Raises DescriptorError for what the driver's
    cuTensorMapEncodeTiled refuses.
    """

    def __init__(
        self, base: Tile, sizes: Any, strides: Any, block_shape: Any, padding: str = "zero"
    ):
        self.region = base.base
        self.dtype, item = self.region.dtype, self.region.itemsize
        self.sizes, self.block_shape = list(sizes), tuple(block_shape)
        self.steps = [stride * item for stride in strides]
        self.address = int(base) * item
        self.padding = _undefined(self.dtype)
        if padding == "zero":
            self.padding = torch.zeros_like(self.padding)
        ranks = (len(self.sizes), len(self.steps), len(self.block_shape))
        misaligned = (self.region.flat.data_ptr() + self.address) % 16
        rules = (
            (ranks[0] in range(1, 6) and len(set(ranks)) == 1, "one rank of 1 to 5", ranks),
            (padding == "zero" or self.dtype.is_floating(), "zero padding of integers", padding),
            (padding in ("zero", "nan"), "padding 'zero' or 'nan'", padding),
            (misaligned == 0, "a base aligned to 16 bytes", f"{misaligned} bytes off"),
            (all(0 < n <= 2**32 for n in self.sizes), "sizes in [1, 2**32]", self.sizes),
            (self.steps[-1] == item, "a last stride of 1", strides),
            (
                all(step % 16 == 0 and 0 <= step < 2**40 for step in self.steps[:-1]),
                "strides in bytes that are multiples of 16 below 2**40",
                self.steps,
            ),
            (self.block_shape[-1] * item >= 16, "boxes at least 16 bytes wide", self.block_shape),
        )
        for holds, expectation, received in rules:
            if not holds:
                name = self.region.name
                raise DescriptorError(f"descriptor of {name} needs {expectation}, got {received}")

    @property
    def shape(self) -> tuple[Tile, ...]:
        return tuple(scalar(size, tl.int32 if size < 2**31 else tl.int64) for size in self.sizes)

    @property
    def strides(self) -> tuple[Tile, ...]:
        return tuple(scalar(step // self.region.itemsize, tl.int64) for step in self.steps)

    def load(self, offsets: Any, latency: int | None = None) -> Tile:
        return self.region.memory.load_box(self, offsets)

    def store(self, offsets: Any, value: Tile, store_reduce: str = "") -> None:
        """Store, or with store_reduce combine with what is there, each element atomically."""
        update = None
        if store_reduce:
            reduced = not self.dtype.is_floating() or self.dtype.name in _REDUCED.get(
                store_reduce, ()
            )
            if store_reduce not in _REDUCTIONS or not reduced:
                raise InvalidKernel(f"TMA has no reduction {store_reduce!r} of {self.dtype}")
            update = _REDUCTIONS[store_reduce]
        self.region.memory.store_box(self, offsets, value, update)

    def __getattr__(self, name: str) -> Callable:
        # atomic_add, atomic_min, ... are the reductions under another name.
        kind = name.removeprefix("atomic_")
        if kind == name or kind not in _REDUCTIONS:
            raise Unsupported(f"tensor_descriptor.{name}")
        return lambda offsets, value: self.store(offsets, value, kind)
