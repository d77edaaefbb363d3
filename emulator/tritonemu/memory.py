"""Global memory: pointers, bounds, atomics, tensor descriptors, and who wrote what.

Every access of a kernel passes through `Memory`, one per launch; here bounds are checked, and here
the order of accesses is judged.

Bounds: a pointer remembers the tensor argument it was made from, and may touch what lies between
the first and the last element that this tensor (view) reaches, or of its storage if it is expanded.
Masked-off lanes may point anywhere. If int32 cannot count the elements of a tensor, an offset in
which one has overflowed is `OutOfBounds`, too, wherever it points.

Undefined values: a masked-off lane of a load without `other` reads what `undefined` says. To store
one, or what depends on one, is an `UndefinedValue`; so is an address or a mask that does.

Races: two plain accesses to an element, one of them a store, are a `Race` unless one happens before
the other (see `clocks`). So are a reduction of TMA and a plain access; two reductions are not. A
shadow of each storage keeps, per element, the last store, the last load of the clusters of CTAs
that run together, the last load of earlier ones, and the last reductions. Atomics on one address
order what comes before the one with what comes after the other; they are not judged. A store that
changes no bit is let pass: programs may well compute one result twice. If another program stored
that value the report notes it, as other data may differ; with `strict` it is a store as any other.

TMA: the hardware compares each index with the shape, then computes the address as
`base + sum(index * stride)` in 64-bit bytes that wrap. Both happen in this order here, so huge
strides that wrap to negative steps work as on the device. A box clipped at the shape is again a
box; it is accessed as a strided view.
"""

import gc
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl

from . import suppressions, unwritten
from .clocks import Access, Clock
from .errors import (
    DescriptorError,
    InvalidKernel,
    Location,
    OutOfBounds,
    Race,
    UninitializedRead,
    Unsupported,
    current_location,
    option,
)
from .launch import Launch, current
from .scheduler import ATOMIC_LATENCY, Operation
from .threads import Block, distinct
from .tile import FROM_TORCH, RAW, Tile, from_raw, held, scalar, to_raw, to_tile
from .undefined import MOST, Source, Undefined, cast, fills, marks, of, refuse, versions

# A descriptor's store casts its value upstream, and does not in fbtriton 3.7.
_CASTS = tuple(map(int, triton.__version__.split(".")[:2])) >= (3, 8)


@dataclass
class _Shadow:
    """The last accesses of each granule of a storage, as numbers in `Memory._accesses`; 0: none.

    The granule is the smallest element of the pointers into the storage so far, in bytes. number:
    of the storage, in order of appearance. fresh: which of it is written, if not all.
    """

    num_bytes: int
    granule: int
    number: int = 0
    fresh: unwritten.Fresh | None = None
    tables: dict[str, torch.Tensor] = field(default_factory=dict)

    def table(self, name: str) -> torch.Tensor:
        if name not in self.tables:
            size = -(-self.num_bytes // self.granule)
            self.tables[name] = unwritten.zeros(size, np.int32)
        return self.tables[name]

    def refine(self, size: int) -> None:
        """Refine the granules to at most this many bytes."""
        if size < self.granule:
            self.tables = {
                name: table.repeat_interleave(self.granule // size)
                for name, table in self.tables.items()
            }
            self.granule = size


@dataclass(eq=False)
class Region:
    """Memory that pointers made from one tensor argument may touch.

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
        """Number of granules of the shadow that an element covers."""
        return max(1, self.itemsize // self.shadow.granule)

    def cells(self, table: torch.Tensor) -> torch.Tensor:
        """Group a table of the shadow, or `flat`, by elements."""
        return _rows(table, self.granules)

    def reinterpret(self, dtype: tl.dtype, offsets: torch.Tensor) -> tuple["Region", torch.Tensor]:
        """View the same bytes as elements of another type, with offsets counted in them."""
        flat = self.flat.view(RAW[dtype.name])
        old, new = self.itemsize, flat.itemsize
        if bool((offsets * old % new).any()):
            raise InvalidKernel(f"pointer to {dtype} must be aligned to {new} bytes")
        self.shadow.refine(new)
        low, high = -(-self.low * old // new), self.high * old // new
        return replace(self, dtype=dtype, flat=flat, low=low, high=high), offsets * old // new


class Memory:
    """Global memory of one launch."""

    def __init__(self, launch: Launch):
        self._launch, self._report = launch, launch.report
        self._threads = launch.threads
        self._shadows: dict[tuple[int, int], _Shadow] = {}
        self._accesses: list[tuple[Access, tuple[int, int, int]]] = []
        self._reductions: list[tuple[int, ...]] = [()]
        self._numbers: dict[tuple[int, ...], int] = {(): 0}
        self._first_of_cluster = 1
        self._atomics: dict[tuple[int, int], dict[Any, Clock]] = {}
        self.maps: dict[Any, list[Access]] = {}
        self._reachable: Sequence[torch.Tensor] = ()
        self._writers: dict[tuple[int, int], tuple[int, str, Location]] = {}
        self._same: set[tuple[Any, ...]] = set()
        self._again = False  # whether the store at hand changes what its program has loaded

    def last(self, region: Region, element: int) -> tuple[Any, tuple[str, Location] | None]:
        """Return an element's value, and the last store or scalar atomic that changed it, or
        None."""
        value = from_raw(region.flat[element], region.dtype).item()
        written = self._writers.get((id(region.shadow), element * region.itemsize))
        if "stores" in region.shadow.tables:
            number = int(_rows(region.shadow.table("stores"), region.granules)[element].max())
            if number and (written is None or number > written[0]):
                access = self._accesses[number - 1][0]
                return value, (access.who, access.location)
        return value, written and written[1:]

    def start_clusters(self) -> None:
        self._first_of_cluster = len(self._accesses) + 1

    def pointer(self, name: str, tensor: torch.Tensor) -> Tile:
        """Build a scalar pointer to the first element of a tensor argument."""
        with torch._C.DisableTorchFunction():  # that of `fake_gpu`
            if tensor.device.type != "cpu" or tensor.dtype not in FROM_TORCH:
                raise ValueError(
                    f"{name} must be a CPU tensor of a dtype known to Triton, "
                    f"got {tensor.dtype} on {tensor.device}"
                )
            fresh = unwritten.of(tensor)
            if fresh is not None:
                fresh.report = self._report
            # `data`, whose version is its own: as on a GPU a kernel's stores change none.
            dtype, tensor = FROM_TORCH[tensor.dtype], tensor.data
            storage = tensor.untyped_storage()
            num_bytes, item = storage.nbytes(), tensor.itemsize
            flat = tensor.as_strided((num_bytes // item,), (1,), 0).view(RAW[dtype.name])
            key = (storage.data_ptr(), num_bytes)
            new = _Shadow(num_bytes, item, len(self._shadows), fresh)
            shadow = self._shadows.setdefault(key, new)
            shadow.refine(item)
            first = low = tensor.storage_offset()
            high = first + _reach(tensor) // item
            dims = zip(tensor.shape, tensor.stride(), strict=True)
            if any(step == 0 and n > 1 for n, step in dims) or self._launch.whole_storage:
                # Expanded: a kernel that has its own strides for it may use all of the storage.
                low, high = 0, flat.numel()
            self._launch.wide |= high - low > 2**31
            region = Region(self, name, dtype, flat, low, high, shadow)
            return Tile(torch.tensor(first), tl.pointer_type(dtype), region)

    def at_addresses(self, addresses: torch.Tensor, dtype: tl.dtype) -> Tile:
        """Resolve integers to pointers: into a tensor that is alive.

        Among several tensors the one that begins there counts, then the one that reaches farthest.
        One tensor has all: lanes outside of it must be off, and all lanes if no tensor has any.
        """
        lanes = dict.fromkeys(addresses.flatten().tolist())
        tensor = self._holding(*lanes)
        if tensor is None:
            self._reachable = _live_tensors()
            tensor = self._holding(*lanes)
        if tensor is None:
            name = f"memory at {next(iter(lanes)):#x}, which lies in no tensor,"
            pointer = cast(self.pointer(name, torch.empty(0, dtype=torch.uint8)), dtype)
            return pointer.like(addresses // pointer.base.itemsize)
        pointer = cast(self.pointer("memory", tensor), dtype)
        begin, size = tensor.data_ptr(), pointer.base.itemsize
        if any(address % size and 0 <= address - begin < _reach(tensor) for address in lanes):
            raise InvalidKernel(f"pointer to {dtype.element_ty} must be aligned to {size} bytes")
        if bool((addresses.flatten().diff() != size).any()):
            beside = (x for x in lanes if not 0 <= x - begin < _reach(tensor))
            if self._holding(*beside) is not None:
                raise Unsupported("a block of pointers into several tensors")
        return pointer.like(pointer.data + (addresses - begin) // size)

    def _holding(self, *addresses: int) -> torch.Tensor | None:
        """Return the tensor that holds the first of these addresses that lies in one."""
        for address in addresses:
            held = [x for x in self._reachable if 0 <= address - x.data_ptr() < _reach(x)]
            if held:
                return max(held, key=lambda x: (x.data_ptr() == address, _reach(x)))
        return None

    def _out_of_bounds(self, region: Region, what: str, element: int) -> None:
        around = 0 <= element < region.flat.numel()
        allow = f"; allow the memory around it with {option('bounds', 'storage')}" * around
        raise OutOfBounds(
            f"{what} of {region.name} must stay in elements [0, {region.high - region.low}), "
            f"got element {element - region.low} in program {self._launch.program}{allow}"
        )

    def _judge(
        self, region: Region, actor: Operation | None, view: Callable, where: Any,
        stored: torch.Tensor | None = None, reduces: bool = False,
    ) -> Access | None:  # fmt: skip
        """Raise Race if nothing orders this access with earlier ones; remember it, and return it.

        `view(table, parts)[where]` are its elements, or granules. stored: for a store, their new
        values; those that change no bit are let pass. reduces: a reduction.
        """
        if not self._launch.races:
            return None
        changed = None if stored is None else view(region.flat, 1)[where] != stored
        if changed is not None and self._launch.strict:
            changed = torch.ones_like(changed)
        if changed is not None and not changed.numel():
            return None
        self._report.checks["race"] += 1
        self._again = False
        actor, write = actor or self._launch.role, changed is not None or reduces
        # The CTAs of one program count as one here.
        clock = actor.known()
        self._launch.scheduler.order.note(("memory", region.shadow.number), "plain", write)
        shadow, access = region.shadow, actor.access(write, 0, name=region.name)
        if not self._accesses or self._accesses[-1][0] != access:
            self._accesses.append((access, self._launch.program))
        number = len(self._accesses)
        for name in ("stores", "loads", "earlier loads", "reductions"):
            if name not in shadow.tables or (not write and "loads" in name):
                continue
            numbers = view(shadow.tables[name], region.granules)[where]
            if changed is not None:
                by_element, chosen = numbers.reshape(changed.numel(), -1), changed.reshape(-1)
                if name == "stores" and not bool(chosen.all()):
                    again = distinct(by_element[~chosen])
                    self._note_same(region, again, clock, access)
                numbers = by_element[chosen]
            accesses = distinct(numbers)
            if "loads" in name and any(accesses):
                self._report.updated.add(region.name)
                programs = (self._accesses[n - 1][1] for n in accesses if n)
                self._again = self._again or self._launch.program in programs
            if name == "reductions":
                groups = () if reduces else accesses
                accesses = sorted({each for group in groups for each in self._reductions[group]})
            self._check_order(region, accesses, clock, access)
        name = "reductions" if reduces else "stores" if write else "loads"
        table = view(shadow.table(name), region.granules)
        previous = table[where]
        if reduces:
            updated = torch.empty_like(previous)
            for group in distinct(previous):
                updated[previous == group] = self._joined(group, number, clock)
            table[where] = updated
            return access
        if not write:
            earlier = (previous > 0) & (previous < self._first_of_cluster)
            if bool(earlier.any()):
                previous_loads = view(shadow.table("earlier loads"), region.granules)
                previous_loads[where] = torch.where(earlier, previous, previous_loads[where])
        table[where] = number
        return access

    def _check_written(self, region: Region, what: str, view: Callable, where: Any) -> None:
        """Raise UninitializedRead if nothing has written `view(table, parts)[where]`."""
        fresh = region.shadow.fresh
        if fresh is None:
            return
        read = view(fresh.written(region.itemsize), 1)[where]
        unread = int((read != -1).sum())
        if not unread:
            return
        if self._launch.uninitialized == "allow":
            self._report.uninitialized += 1
            return
        finding = UninitializedRead(
            f"{what} of {region.name} reads {unread} of {read.numel()} elements in program "
            f"{self._launch.program} that nothing has written; the memory is made, without values, "
            f"at {fresh.location[0]}:{fresh.location[1]}; write to it first, or allow it with "
            f"{option('uninitialized', 'allow')}",
            other=fresh.location,
            buffer=region.name,
        )
        suppressions.judge(finding, self._report)

    @staticmethod
    def _mark_written(region: Region, view: Callable, where: Any) -> None:
        if region.shadow.fresh is not None:
            view(region.shadow.fresh.written(region.itemsize), 1)[where] = -1

    def _joined(self, group: int, number: int, clock: Clock) -> int:
        """Return the number of a group of reductions without those the clock knows, and one
        more."""
        earlier = self._reductions[group]
        unordered = (n for n in earlier if not clock.knows(self._accesses[n - 1][0]))
        members = (*unordered, number)
        if members not in self._numbers:
            self._numbers[members] = len(self._reductions)
            self._reductions.append(members)
        return self._numbers[members]

    def _unordered(self, numbers: Sequence[int], clock: Clock) -> Iterator[tuple[Access, Any]]:
        """Yield those of the numbered accesses that the clock does not know, and their programs."""
        for number in numbers:
            if number and not clock.knows(self._accesses[number - 1][0]):
                yield self._accesses[number - 1]

    def _note_same(
        self, region: Region, numbers: Sequence[int], clock: Clock, access: Access
    ) -> None:
        """Note the first pair of statements by which two programs store one value."""
        for old, other_program in self._unordered(numbers, clock):
            places = tuple(old.location), tuple(access.location)
            if other_program == self._launch.program or places in self._same:
                continue
            self._same.add(places)
            (file, line), (other_file, other_line) = places
            self._report.notes.append(
                f"programs {other_program}, at {file}:{line}, and {self._launch.program}, at "
                f"{other_file}:{other_line}, store the same value to an element of {region.name}; "
                f"nothing orders the two: a race if values differ ({option('strict', True)})"
            )

    def _check_order(
        self, region: Region, numbers: Sequence[int], clock: Clock, access: Access
    ) -> None:
        for old, other_program in self._unordered(numbers, clock):
            program, (file, line) = self._launch.program, old.location
            first, second = access.who, old.who
            if other_program != program:
                first, second = f"program {program}", f"program {other_program}"
            does = "stores to" if access.write else "loads"
            did = "stored to" if old.write else "loaded"
            alias = f"as {old.name} " if old.name != region.name else ""
            finding = Race(
                f"{first} {does} an element of {region.name} that {second} {did} {alias}"
                f"at {file}:{line}; nothing orders the two",
                other=old.location,
                programs=(other_program, program),
                buffer=region.name,
                marks=(old.mark, access.mark),
                accesses=(old, access),
            )
            suppressions.judge(finding, self._report)

    def _lanes(
        self, what: str, pointer: Tile, mask: Any
    ) -> tuple[Region, torch.Tensor, torch.Tensor | None]:
        """Return the region, each lane's element, and the active lanes if not all; checks
        bounds."""
        if not (isinstance(pointer, Tile) and pointer.dtype.is_ptr()):
            raise InvalidKernel(f"{what} needs a pointer, got {pointer!r}")
        region, index, active = pointer.base, pointer.data, None
        if mask is not None:
            mask = to_tile(mask)
            if mask.dtype.name != "int1":
                raise InvalidKernel(f"mask must be int1, got {mask!r}")
            index, active = torch.broadcast_tensors(index, mask.data)
            if isinstance(mask, Undefined) and what == "load":
                active = torch.stack(versions(mask)).any(0).expand(index.shape)
            elif bool(mask.data.all()):
                active = None
        self._report.checks["bounds"] += 1
        used, chosen = (index, ...) if active is None else (index[active], active)
        whose = f"of a {what} of {region.name}"
        if what != "load":
            self._check_lanes(region, mask, index.shape, ..., f"the mask {whose}")
        self._check_lanes(region, pointer, index.shape, chosen, f"an address {whose}")
        if pointer.exact is not None:
            self._check_exact(region, what, pointer, index, active)
        if used.numel():
            for element in map(int, torch.aminmax(used)):
                if not region.low <= element < region.high:
                    self._out_of_bounds(region, what, element)
        return region, index, active

    def _check_exact(
        self, region: Region, what: str, pointer: Tile, index: torch.Tensor, active: Any
    ) -> None:
        """Raise OutOfBounds if an active lane points elsewhere because an int32 wrapped around."""
        exact, location = pointer.exact
        wrong = exact.expand(index.shape) != index
        wrong = wrong if active is None else wrong & active
        if bool(wrong.any()):
            meant, got = (int(x.expand(index.shape)[wrong][0]) for x in (exact, index))
            raise OutOfBounds(
                f"{what} of {region.name} must be at element {meant - region.low}, got element "
                f"{got - region.low} in program {self._launch.program}: an int32 overflows at "
                f"{location[0]}:{location[1]}; compute it in int64, say from "
                f"tl.program_id(0).to(tl.int64)",
                other=location,
                buffer=region.name,
            )

    def undefined(
        self, dtype: tl.dtype, shape: torch.Size,
        what: str = "the load at {}:{}, in a lane that its mask turns off; give it `other`",
    ) -> tuple[list[torch.Tensor], Source]:  # fmt: skip
        """Return the versions of values that inactive lanes read, in tensors of this shape."""
        known, location = self._launch.undefined, current_location()
        if self._launch.masked == "nan":
            known.setdefault(location, what)
        numbers = dict(zip(known, range(1, MOST + 1), strict=False))
        mark = numbers.get(location, 0)
        return fills(dtype, shape, self._launch.masked, mark), (location, what)

    def _filled(
        self, raw: torch.Tensor, dtype: tl.dtype, shape: torch.Size, active: torch.Tensor | None,
        mask: Any, other: Any = None,
    ) -> Tile:  # fmt: skip
        """Return what lanes read: `raw` the active ones in order, and `other` those that are off.
        If the mask is undefined, lanes are active that may be. active: None for all."""
        if active is None:
            return Tile(from_raw(raw.reshape(shape), dtype), dtype)
        if other is None:
            values, source = self.undefined(dtype, shape)
        else:
            other = cast(other, dtype)
            values, source = [to_raw(each, dtype) for each in versions(other)], None
        whole = values[0].expand(shape).masked_scatter(active, raw)
        masks = versions(to_tile(mask))
        if len(values) == len(masks) == 1:
            return Tile(from_raw(whole, dtype), dtype)
        count = max(len(values), len(masks))
        pairs = zip(masks * (count // len(masks)), values * (count // len(values)), strict=True)
        source = getattr(mask, "source", None) or getattr(other, "source", source)
        return of([torch.where(on, whole, value) for on, value in pairs], dtype, source)

    def _check_lanes(
        self, region: Region, value: Any, shape: torch.Size, chosen: Any, what: str = ""
    ) -> None:
        """Raise UndefinedValue if one of these lanes is undefined, of a value to be stored or of
        something else."""
        if isinstance(value, Undefined) and bool(value.lanes.expand(shape)[chosen].any()):
            refuse(what or f"{region.name} gets a value that", value.source, region.name)

    def _check_defined(self, region: Region, raw: torch.Tensor) -> None:
        """Raise UndefinedValue if an element to be stored has the mark of an undefined lane."""
        numbers = marks(raw, region.dtype)
        if (numbers := numbers[numbers > 0]).numel():
            source = list(self._launch.undefined.items())[int(numbers[0]) - 1]
            refuse(f"{region.name} gets a value that", source, region.name)

    def load(
        self, pointer: Tile, mask: Any = None, other: Any = None, by: Operation | None = None
    ) -> Tile:
        """Gather elements; inactive lanes read `other`, or an undefined value. by: the operation,
        if not the role itself."""
        region, index, active = self._lanes("load", pointer, mask)
        used = index.reshape(-1) if active is None else index[active]
        access = self._judge(region, by, _rows, used)
        if by is None and self._threads is not None:
            self._threads.load(region, Block(used, index.numel(), active), access)
        self._check_written(region, "load", _rows, used)
        if by is None and used.numel():
            self._launch.role.word = region, int(used[-1])
        raw = region.flat.index_select(0, used)
        self._report.bytes_loaded += used.numel() * region.itemsize
        return self._filled(raw, region.dtype, index.shape, active, mask, other)

    def store(
        self, pointer: Tile, value: Any, mask: Any = None, by: Operation | None = None
    ) -> None:
        """Scatter the active lanes; the value is converted to the element type."""
        region, index, active = self._lanes("store", pointer, mask)
        value = cast(value, region.dtype)
        if index.shape != pointer.data.shape:
            raise InvalidKernel(f"mask must not be larger than the pointers, got {pointer!r}")
        raw = to_raw(value.data, region.dtype).expand(index.shape)
        chosen, size = ... if active is None else active, index.numel()
        self._check_lanes(region, value, index.shape, chosen)
        index, raw = index[chosen].reshape(-1), raw[chosen].reshape(-1)
        self._check_defined(region, raw)
        access = self._judge(region, by, _rows, index, raw)
        if self._threads is not None and by is None and access is not None:
            self._threads.store(region, Block(index, size, active), raw, access)
        elif self._threads is not None:
            self._threads.forget(region, _rows, index)
        self._launch.scheduler.changes += 1
        changed = index[region.flat[index] != raw] if self._again else index[:0]
        region.flat[index] = raw
        self._check_kept(region, index, raw, changed)
        self._mark_written(region, _rows, index)
        self._report.bytes_stored += index.numel() * region.itemsize

    def _check_kept(
        self, region: Region, index: torch.Tensor, raw: torch.Tensor, changed: torch.Tensor
    ) -> None:
        """Raise Race if lanes of a store, just done, gave an element several values; note it if
        they gave one, and that element had been loaded, and `changed`."""
        if not self._launch.races:
            return
        if (twice := (changed := changed.sort().values)[1:][changed.diff() == 0]).numel():
            file, line = current_location()
            text = (
                f"lanes of the store at {file}:{line} give element {int(twice[0]) - region.low} of "
                f"{region.name}, which the program has loaded, one and the same new value: if each "
                f"of them is to count, that takes an atomic"
            )
            if self._launch.strict:
                suppressions.judge(Race(text, buffer=region.name), self._report)
            elif (key := ("lanes", file, line)) not in self._same:
                self._same.add(key)
                self._report.notes.append(text)
        raw = raw.clone(memory_format=torch.contiguous_format)  # a stride of 0 cannot be viewed
        lost = region.flat[index].view(torch.uint8) != raw.view(torch.uint8)
        if bool(lost.any()):
            element = int(index[lost.reshape(len(index), -1).any(1)][0]) - region.low
            finding = Race(
                f"lanes of this store give element {element} of {region.name} several values in "
                f"program {self._launch.program}, and nothing says which of them stays; name each "
                "element once, or use an atomic",
                buffer=region.name,
            )
            suppressions.judge(finding, self._report)

    def atomic(
        self, pointer: Tile, update: Callable, values: list[Any], mask: Any = None,
        sem: str | None = None, reads: bool = True, scope: str | None = None,
    ) -> Tile:  # fmt: skip
        """Read, modify and write with `update(old, *values)` on torch data; returns the old values.

        Lanes that name the same element take turns. sem: as in Triton, None is "acq_rel";
        only a scalar atomic orders other accesses. reads: whether the new value needs the old.
        scope: "gpu", which is None's, "sys", or "cta": then it orders nothing between two programs,
        and is no atomic for another one.
        """
        for what, value, known in (("sem", sem, SEMANTICS), ("scope", scope, SCOPES)):
            if value not in known:
                raise InvalidKernel(
                    f"{what} of an atomic must be one of {known[1:]}, got {value!r}"
                )
        if not pointer.shape:
            self._launch.scheduler.checkpoint(ATOMIC_LATENCY)
        region, index, active = self._lanes("atomic", pointer, mask)
        dtype, chosen = region.dtype, ... if active is None else active
        operands = [cast(v, dtype) for v in values]
        data = [each.data.expand(index.shape)[chosen].reshape(-1) for each in operands]
        for each, operand in zip(operands, data, strict=True):
            self._check_lanes(region, each, index.shape, chosen)
            self._check_defined(region, to_raw(operand, dtype))
        where = index[chosen].reshape(-1)
        count, role = where.numel(), self._launch.role
        element = None if index.shape or not count else int(where) * region.itemsize
        key = id(region.shadow), element
        if count and self._launch.races:
            self._check_scope(region, where, scope == "cta")
        if reads:
            self._check_written(region, "atomic", _rows, where)
        if values:
            self._mark_written(region, _rows, where)
        if element is not None:
            # What a release tells its own program, and what it tells all.
            clocks, here = self._atomics.setdefault(key, {}), self._launch.program
            shared = [
                clocks.setdefault(who, Clock()) for who in (here, None)[: 1 + (scope != "cta")]
            ]
            if sem in (None, "acquire", "acq_rel"):
                for lane in role.lanes:
                    for clock in shared:
                        lane.clock.join(clock)
            if sem in (None, "release", "acq_rel"):
                if self._threads is not None:
                    self._threads.release(role)
                for lane in role.lanes:
                    released = lane.release(self._threads is None, met=self._threads is None)
                    for clock in shared:
                        clock.join(released)
            role.meet()
        if self._threads is not None:
            self._threads.forget(region, _rows, where)
        old = torch.empty(count, dtype=region.flat.dtype)
        unique, changed = where.unique().numel() == count, []
        for turn in [slice(None)] if unique else [slice(i, i + 1) for i in range(count)]:
            old[turn] = region.flat[where[turn]]
            new = update(from_raw(old[turn], dtype), *(d[turn] for d in data))
            changed.append(not torch.equal(old[turn], raw := to_raw(new, dtype)))
            region.flat[where[turn]] = raw
        if count:
            role.word = region, int(where[-1])
        if any(changed):
            self._launch.scheduler.changes += 1
            self._report.updated.add(region.name)
            if element is not None:
                self._writers[key] = len(self._accesses), role.label, current_location()
        tag = element, any(changed)
        self._launch.scheduler.order.note(("memory", region.shadow.number), "atomic", tag)
        self._report.bytes_loaded += count * region.itemsize
        self._report.bytes_stored += count * region.itemsize
        return self._filled(old, dtype, index.shape, active, mask)

    def _check_scope(self, region: Region, where: torch.Tensor, of_program: bool) -> None:
        """Raise Race if an atomic is one for its program only, and nothing orders it with another
        program's."""
        if of_program or "own atomics" in region.shadow.tables:
            role, cells = self._launch.role, region.cells(region.shadow.table("own atomics"))
            access, here = role.access(True, 0, name=region.name), self._launch.program
            others = [n for n in distinct(cells[where]) if n and self._accesses[n - 1][1] != here]
            self._check_order(region, others, role.known(), access)
            if of_program:
                self._accesses.append((access, here))
                cells[where] = len(self._accesses)

    def _window(self, desc: "Descriptor", coordinates: Any, what: str) -> "_Window | None":
        """Return the part of a box that lies inside the shape; None if nothing does."""
        self._report.checks["descriptor"] += 1
        if len(coordinates) != len(desc.sizes):
            raise InvalidKernel(f"{what} needs {len(desc.sizes)} coordinates, got {coordinates}")
        address, inside, sizes, steps = desc.address, [], [], []
        dims = zip(coordinates, desc.sizes, desc.steps, desc.block_shape, strict=True)
        for value, size, step, box in dims:
            coordinate = _coordinate(value)
            start, stop = max(0, -coordinate), min(box, size - coordinate)
            address += (coordinate + start) * step
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

    def _check_chunk(self, desc: "Descriptor", coordinates: Any, window: "_Window") -> None:
        """Raise OutOfBounds if a store writes elements behind the shape: a row of a box ends with
        16 bytes, where it is cut off by the shape, too (triton-lang/triton#11583)."""
        region, size = desc.region, desc.sizes[-1]
        chunk = 16 // region.itemsize
        end = min(_coordinate(coordinates[-1]) + desc.block_shape[-1], -(-size // chunk) * chunk)
        exist = window.first + window.sizes[-1] < region.flat.numel()
        if end > size and exist and not self._launch.whole_storage:
            raise OutOfBounds(
                f"descriptor store of {region.name} writes whole chunks of 16 bytes: of a row with "
                f"{size} elements also those up to {end}, which are no part of its shape; allow it "
                f"with {option('bounds', 'storage')}",
                buffer=region.name,
            )

    def load_box(self, desc: "Descriptor", coordinates: Any, by: Operation | None = None) -> Tile:
        """Load the box at `coordinates`; elements outside the shape read the padding."""
        window, region = self._window(desc, coordinates, "descriptor load"), desc.region
        raw = desc.padding.expand(desc.block_shape).clone()
        if window is not None:
            access = self._judge(region, by, window.of, ...)
            if self._threads is not None and by is None:
                self._threads.access_box(region, window.of, access)
            self._check_written(region, "descriptor load", window.of, ...)
            raw[window.inside] = window.of(region.flat)
            self._report.bytes_loaded += math.prod(window.sizes) * region.itemsize
        return Tile(from_raw(raw, region.dtype), region.dtype)

    def store_box(
        self, desc: "Descriptor", coordinates: Any, value: Tile, update: Callable | None = None,
        by: Operation | None = None,
    ) -> None:  # fmt: skip
        """Write the box, or `update(old, value)`; elements outside the shape are dropped."""
        region, dtype = desc.region, desc.dtype
        if not (value.dtype.name == dtype.name and value.shape == desc.block_shape):
            expected = f"{dtype}{list(desc.block_shape)}"
            raise InvalidKernel(f"value must be {expected} as the descriptor, got {value!r}")
        window = self._window(desc, coordinates, "descriptor store")
        if window is None:
            return
        if update is None:
            self._check_chunk(desc, coordinates, window)
        target, data = window.of(region.flat), value.data[window.inside]
        num_bytes = data.numel() * region.itemsize
        if update is not None:
            self._check_written(region, "descriptor reduction", window.of, ...)
            self._report.updated.add(region.name)
            data = update(from_raw(target, dtype), data)
            self._report.bytes_loaded += num_bytes
        raw = to_raw(data, dtype)
        stored = None if update else raw
        access = self._judge(region, by, window.of, ..., stored, reduces=bool(update))
        self._check_lanes(region, value, value.data.shape, window.inside)
        self._check_defined(region, raw)
        target.copy_(raw)
        if self._threads is not None and by is None:
            self._threads.access_box(region, window.of, access)
        elif self._threads is not None:
            self._threads.forget(region, window.of, ...)
        self._launch.scheduler.changes += 1
        self._mark_written(region, window.of, ...)
        self._report.bytes_stored += num_bytes


def _reach(tensor: torch.Tensor) -> int:
    """Count the bytes from the first to the last element."""
    if not tensor.numel():
        return 0
    last = sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
    return (1 + last) * tensor.itemsize


def _live_tensors() -> list[torch.Tensor]:
    """List CPU tensors of dtypes that Triton knows, as Python's garbage collector sees them."""
    tensors = [x for x in gc.get_objects() if type(x) in (torch.Tensor, torch.nn.Parameter)]
    return [
        x for x in tensors
        if x.layout == torch.strided and x.device.type == "cpu" and x.dtype in FROM_TORCH
    ]  # fmt: skip


def _rows(flat: torch.Tensor, parts: int) -> torch.Tensor:
    """View `flat` as a row for each element: its consecutive `parts`."""
    return flat if parts == 1 else flat[: len(flat) // parts * parts].view(-1, parts)


@dataclass
class _Window:
    """Part of a box: its place in the box, its first element in memory, its sizes and strides."""

    inside: tuple[slice, ...]
    first: int
    sizes: list[int]
    strides: list[int]

    def of(self, flat: torch.Tensor, parts: int = 1) -> torch.Tensor:
        """View these elements, each of them `parts` consecutive items of `flat`."""
        strides = [stride * parts for stride in self.strides]
        return flat.as_strided([*self.sizes, parts], [*strides, 1], self.first * parts).squeeze(-1)


def _coordinate(value: Any) -> int:
    if isinstance(value, Tile) and (value.shape or value.dtype.int_bitwidth > 32):
        raise InvalidKernel(f"descriptor coordinates must be int32 scalars, got {value!r}")
    if not -(2**31) <= int(value) < 2**31:
        raise DescriptorError(f"descriptor coordinates must fit int32, got {int(value)}")
    return int(value)


SEMANTICS = (None, "acquire", "release", "acq_rel", "relaxed")
SCOPES = (None, "gpu", "cta", "sys")
REDUCTIONS = {
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

    The address counts from the start of the storage. reads: of a descriptor that a kernel made, the
    copies that have used it; the next one made in the same place overwrites it. Raises
    DescriptorError for what the driver's cuTensorMapEncodeTiled refuses, and for strides of 0,
    which it does not describe.
    """

    reads: list[Access] | None = None

    def __init__(
        self, base: Tile, sizes: Any, strides: Any, block_shape: Any, padding: str = "zero"
    ):
        self.region = base.base
        self.dtype, item = self.region.dtype, self.region.itemsize
        self.sizes, self.block_shape = list(sizes), tuple(block_shape)
        self.steps = [stride * item for stride in strides]
        self.address = int(base) * item
        self.padding = torch.zeros((), dtype=self.region.flat.dtype)
        if padding == "nan":
            nan = torch.tensor(math.nan).to(held(self.dtype))
            self.padding = to_raw(nan, self.dtype)
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
            (
                all(step or size == 1 for step, size in zip(self.steps, self.sizes, strict=False)),
                "strides above 0 along dimensions longer than 1",
                self.steps,
            ),
            (self.block_shape[-1] * item >= 16, "boxes at least 16 bytes wide", self.block_shape),
        )
        for holds, expectation, received in rules:
            if not holds:
                name = self.region.name
                raise DescriptorError(f"descriptor of {name} needs {expectation}, got {received}")

    @property
    def __class__(self) -> type:
        """Triton's type, which a `constexpr_function` asks for."""
        return tl.tensor_descriptor

    def placed(self, reads: list[Access] | None = None) -> "Descriptor":
        """Place it in global memory, by default that of this statement: what `reads` the one before
        must be over."""
        role, memory = current().role, self.region.memory
        if reads is None:
            reads = memory.maps.setdefault((role.index, current_location()), [])
        for old in reads if current().races else ():
            if not role.known().knows(old):
                file, line = old.location
                finding = Race(
                    f"a descriptor of {self.region.name} is made where {old.who}, at {file}:{line},"
                    " may still read the one before; wait for that copy, or use more slots",
                    other=old.location,
                    buffer=self.region.name,
                )
                suppressions.judge(finding, current().report)
        reads.clear()
        self.reads = reads
        return self

    def read_by(self, operation: Operation) -> None:
        if self.reads is not None:
            self.reads.append(operation.access(False, 0, name=self.region.name))

    def with_box(self, block_shape: Sequence[int]) -> "Descriptor":
        """Build this descriptor with another box."""
        other = Descriptor.__new__(Descriptor)
        vars(other).update(vars(self), block_shape=tuple(block_shape))
        return other

    @property
    def shape(self) -> tuple[Tile, ...]:
        return tuple(scalar(size, tl.int32 if size < 2**31 else tl.int64) for size in self.sizes)

    @property
    def strides(self) -> tuple[Tile, ...]:
        return tuple(scalar(step // self.region.itemsize, tl.int64) for step in self.steps)

    def load(self, offsets: Any, latency: int | None = None) -> Tile:
        self._stage()
        return self.region.memory.load_box(self, offsets)

    def fetch(self, start: Any, by: Operation | None = None) -> Tile:
        """Load the box for a copy."""
        return self.region.memory.load_box(self, start, by)

    def store(
        self, offsets: Any, value: Tile, store_reduce: str = "", by: Operation | None = None
    ) -> None:
        """Store, or with store_reduce combine with what is there, each element atomically."""
        update = None
        if store_reduce:
            floats = _REDUCED.get(store_reduce, ())
            reduced = not self.dtype.is_floating() or self.dtype.name in floats
            if store_reduce not in REDUCTIONS or not reduced:
                raise InvalidKernel(f"TMA has no reduction {store_reduce!r} of {self.dtype}")
            update = REDUCTIONS[store_reduce]
        elif by is None and _CASTS:
            value = cast(value, self.dtype)
        if by is None:
            self._stage()
        self.region.memory.store_box(self, offsets, value, update, by)

    def _rows(self, x_offsets: Tile, what: str) -> list[int]:
        if current().arch != "sm_100":
            raise InvalidKernel(f"descriptor {what} needs arch sm_100, got {current().arch}")
        if len(self.sizes) != 2 or self.block_shape[0] != 1 or len(x_offsets.shape) != 1:
            raise InvalidKernel(
                f"descriptor {what} needs boxes [1, N] and offsets of rank 1, got "
                f"{list(self.block_shape)} and {x_offsets!r}"
            )
        return x_offsets.data.tolist()

    def gather(self, x_offsets: Tile, y_offset: Any, by: Operation | None = None) -> Tile:
        memory, rows = self.region.memory, self._rows(x_offsets, "gather")
        boxes = [memory.load_box(self, (row, y_offset), by).data for row in rows]
        return Tile(torch.cat(boxes), self.dtype)

    def scatter(
        self, value: Tile, x_offsets: Tile, y_offset: Any, by: Operation | None = None
    ) -> None:
        rows = self._rows(x_offsets, "scatter")
        if value.shape != (len(rows), self.block_shape[1]):
            expected = [len(rows), self.block_shape[1]]
            raise InvalidKernel(f"value of descriptor scatter must be {expected}, got {value!r}")
        for row, data in zip(rows, value.data.split(1), strict=True):
            self.region.memory.store_box(self, (row, y_offset), value.like(data), by=by)

    def _stage(self) -> None:
        current().role.stage(math.prod(self.block_shape) * self.region.itemsize)

    def __getattr__(self, name: str) -> Callable:
        # atomic_add, atomic_min, ... are the reductions under another name.
        kind = name.removeprefix("atomic_")
        if kind == name or kind not in REDUCTIONS:
            raise Unsupported(f"tensor_descriptor.{name}")
        return lambda offsets, value: self.store(offsets, value, kind)
