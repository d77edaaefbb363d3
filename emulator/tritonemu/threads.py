"""Threads of a program: whether its warps have met between two accesses to memory.

A program of several warps is one instruction stream here. On a GPU each thread has some elements of
a block, which ones the compiler decides anew at every load and store, and nothing orders what two
warps do but a barrier.

Global memory. The compiler puts barriers where values go through shared memory (reductions,
conversions of layouts, results of scalar atomics), and none for global memory: that is what
`tl.debug_barrier` is for. So two things are races, unless a barrier lies between:

- a role loads an element, or changes it, at another place of a block than it stored it at: another
  thread may have stored it. At the same place of blocks of one size it is usually one thread, which
  is not promised (triton-lang/triton#10924): the layouts of the compiled launch say if it is.
- a block is stored, then a scalar atomic releases it: that is what one thread does, which speaks
  for itself alone. Whoever acquires knows of the rest only what a barrier before the release says.
  Triton 3.9 puts one there (triton-lang/triton#10816).

Stores after loads of the same program are not judged: values that only change places within a
thread, as those of `tl.join`, would be alarms.

Shared and tensor memory. What a role does to shared memory, aliases included, the compiler puts a
barrier between, if bytes overlap; and one before an arrival, unless every thread arrives, and after
a store to tensor memory. It knows nothing else of tensor memory (facebookexperimental/triton#1993).
So these are races, unless a barrier lies between:

- warps load from tensor memory, and then store to the same bytes, through an alias or with another
  layout, so that another warp has them. Each of four warps has 32 lanes, and no others; with more
  warps the layouts of the compiled launch say who has what.
- warps load from tensor memory, and then one thread issues an MMA, or a copy, that writes there.
- one thread speaks for itself alone: it issues an MMA or a copy, commits, or announces bytes, and
  who waits for that meets what other warps do before it.

Whether a barrier lies between says the machine code of this launch: a finding needs a way from the
first access to the second, or to the release, on which there is none (`assembly`). For global
memory an operation that may go through shared memory counts as a barrier, too. For the other
memories the path includes all that the role does between, and a wait for an mbarrier is no barrier.
"""

import bisect
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from . import suppressions
from .assembly import Code, Step
from .clocks import Access
from .errors import Location, Race, current_location, option
from .scheduler import Operation, Role

_STORES, _POSITIONS = "stores of blocks", "positions in blocks"


@dataclass(frozen=True)
class Block:
    """Elements that a block of pointers accesses. index: elements, one for each active lane. size:
    number of lanes. active: mask of the active lanes, None for all."""

    index: torch.Tensor
    size: int
    active: torch.Tensor | None = None

    @property
    def positions(self) -> torch.Tensor:
        if self.active is None:
            return torch.arange(self.size)
        return self.active.reshape(-1).nonzero().reshape(-1)


@dataclass(frozen=True)
class _Store:
    access: Access
    program: tuple[int, ...]
    size: int


# Up to so many warps each has lanes of tensor memory of its own.
_OWN_LANES = 4


class Threads:
    """Accesses of threads in one launch. code: its machine code."""

    def __init__(self, launch: Any, code: Callable[[], Code]):
        self._launch, self._code = launch, code
        self._stores: list[_Store] = []
        self._released: dict[int, list[tuple[int, Location]]] = {}
        # Epochs and accesses to shared and tensor memory of roles of several warps.
        self._trails: dict[int, list[tuple[int, Step]]] = {}

    def note(self, role: Role, kind: str, location: Location) -> None:
        """Record that the role, or one thread of it, is about to do such an operation
        (`assembly`)."""
        self._trails.setdefault(role.index, []).append((role.epoch, (kind, location)))

    def access(self, buffer: Any, actor: Role | Operation, write: bool) -> None:
        """Check an access of a role, or of its operation, to shared or tensor memory; raises Race
        if a warp may not have made its earlier access yet."""
        role, guarded = actor if isinstance(actor, Role) else actor.role, False
        mask, tensor = buffer.mask, buffer.storage.tensor
        alone = role.warps <= (_OWN_LANES if actor is role else 1)
        for old in buffer.storage.shadow.accesses:
            if old.mask & mask and (write or old.write) and actor.clock.splits(old):
                if old.role != role.index:
                    self._judge_released(buffer, actor, write, old)
                elif not tensor:
                    guarded = True
                elif not alone:
                    self._judge_own(buffer, actor, write, old)
        if actor is not role:
            if guarded:  # the compiler has put a barrier before the operation
                actor.clock.met[role.index] = role.clock.met[role.index] = role.epoch - 1
        elif role.warps > 1:
            if guarded:
                role.release()
            role.stored = role.epoch
            self.note(role, _kind(tensor, write), current_location())

    def _judge_released(
        self, buffer: Any, actor: Role | Operation, write: bool, old: Access
    ) -> None:
        """Check an access of another role that one of its threads has released."""
        trail, known = self._trails[old.role], actor.clock.epochs[old.role]
        end = bisect.bisect_right(trail, known, key=lambda each: each[0])
        begin = _last(trail[:end], old)
        if begin is not None and trail[end - 1][0] == known:
            file, line = trail[end - 1][1][1]
            message = f"one of its threads speaks for itself alone at {file}:{line}, and "
            self._judge_path(buffer, actor, write, old, [s for _, s in trail[begin:end]], message)

    def _judge_own(self, buffer: Any, actor: Role | Operation, write: bool, old: Access) -> None:
        """Check an access of the same role: by its warps, then by its warps or one thread."""
        role = actor if isinstance(actor, Role) else actor.role
        trail = self._trails[role.index]
        begin = _last(trail, old)
        if begin is None:
            return
        path, message = [step for _, step in trail[begin:]], "one thread issues it, and "
        if actor is role:
            here = _kind(True, write), current_location()
            if self._is_of_one_warp(buffer.lanes, here, old):
                return
            path, message = [*path, here], "they have its bytes otherwise now, and "
        self._judge_path(buffer, actor, write, old, path, message)

    def _is_of_one_warp(self, lanes: Any, here: Step, old: Access) -> bool:
        """Return whether one warp makes both accesses of each byte; True if unknown."""
        both = []
        there = _kind(True, old.write), old.location
        for where, (kind, location) in ((lanes, here), (old.where, there)):
            warps = self._code().warps_of(location, kind, math.prod(where.shape))
            if warps is None or where.num_bytes != lanes.num_bytes:
                return True
            both.append(where.spread(warps))
        current, earlier = both
        return bool(((current == 255) | (earlier == 255) | (current == earlier)).all())

    def _judge_path(
        self, buffer: Any, actor: Role | Operation, write: bool, old: Access, path: list[Step],
        message: str,
    ) -> None:  # fmt: skip
        """Raise Race if the warps of the old access's role need not meet on this path."""
        if not self._code().is_open(path):
            return
        who = getattr(actor, "label", "")
        if isinstance(actor, Operation):
            who = f"{actor.kind} issued by {actor.role.label}"
        does, did = "writes" if write else "reads", "written" if old.write else "read"
        alias = f"as {old.name} " if old.name != buffer.name else ""
        file, line = old.location
        finding = Race(
            f"{who} {does} {buffer.label}, which a warp of {old.who} may not have {did} yet "
            f"{alias}at {file}:{line}: {message}no barrier makes warps of the role meet before; "
            f"put tl.debug_barrier() there, or allow it with {option('unguarded', 'allow')}",
            other=old.location,
            buffer=buffer.name,
        )
        suppressions.judge(finding, self._launch.report)

    def release(self, role: Role) -> None:
        """Record that one thread of the role is about to release by an atomic."""
        location = current_location()
        self._released.setdefault(role.index, []).append((role.epoch, location))
        self.note(role, "atomic", location)

    def store(self, region: Any, block: Block, raw: torch.Tensor) -> None:
        """Record that the running role will store these values; raises Race as `load` does."""
        if _STORES in region.shadow.tables:
            self.load(region, block, region.flat[block.index] != raw)
        role = self._launch.role
        if role.warps == 1:
            self.forget(region.cells, region.shadow, block.index)
            return
        role.stored = role.epoch
        store = _Store(role.access(True, 0, name=region.name), self._launch.program, block.size)
        if not self._stores or self._stores[-1] != store:
            self._stores.append(store)
        cells = region.cells(region.shadow.table(_STORES))
        places = region.cells(region.shadow.table(_POSITIONS))
        cells[block.index] = _rows(len(self._stores), cells)
        places[block.index] = _rows(block.positions.to(torch.int32), places)

    def forget(self, view: Callable, shadow: Any, where: Any) -> None:
        """Forget threads: something else has written `view(table)[where]`."""
        if _STORES in shadow.tables:
            view(shadow.tables[_STORES])[where] = 0

    def load(self, region: Any, block: Block, changed: torch.Tensor | None = None) -> None:
        """Raise Race if another thread stored what the running role loads, or changes."""
        if _STORES not in region.shadow.tables:
            return
        numbers = _first(region.cells(region.shadow.tables[_STORES])[block.index])
        if changed is not None:
            numbers = numbers * changed
        kind = "load" if changed is None else "store"
        for number in _distinct(numbers):
            store = self._stores[number - 1]
            if number and self._is_unguarded(store):
                positions = block.positions[numbers == number]
                same = self._is_in_place(region, block, store, numbers == number)
                steps = (store.access.location, "store"), (current_location(), kind)
                if same and self._code().is_of_one_warp(*steps, block.size, positions):
                    continue
                self._judge(region, store, kind, same)

    def _is_unguarded(self, store: _Store) -> bool:
        """Return whether only some threads of the running role are ordered after a store."""
        role, old = self._launch.role, store.access
        epochs = role.clock.epochs
        if epochs.get(-old.role, 0) >= old.epoch or epochs.get(old.role, 0) < old.epoch:
            return False  # ordered, or not at all, of which `Memory` tells
        return old.role == role.index or store.size > 1

    def _judge(self, region: Any, store: _Store, kind: str, same: bool) -> None:
        """Raise Race unless the code has a barrier. same: whether the position is the same."""
        role, old = self._launch.role, store.access
        does = "loads" if kind == "load" else "stores to"
        what, (file, line) = f"{does} an element of {region.name} that", old.location
        if old.role == role.index:
            here, kinds = current_location(), (kind,)
            message = f"a thread {what} another one may have stored to at {file}:{line}"
            if same:
                message = (
                    f"a warp {what} another one stored to at {file}:{line}: the compiler gave the "
                    f"two blocks different layouts"
                )
        else:
            here, kinds = self._release_of(old), ("atomic", "load", "store")
            message = (
                f"program {self._launch.program} {what} program {store.program} stored to at "
                f"{file}:{line}, and one of its threads released at {here[0]}:{here[1]}"
            )
        if not self._code().meets(old.location, here, kinds):
            finding = Race(
                f"{message}; warps of a program meet at tl.debug_barrier(): put it between the "
                f"two, or allow it with {option('unguarded', 'allow')}",
                other=old.location,
                programs=(store.program, self._launch.program),
                buffer=region.name,
                marks=(old.mark, role.access(kind == "store", 0, name=region.name).mark),
                missing="no barrier of the warps lies between 1 and 2",
            )
            suppressions.judge(finding, self._launch.report)

    def _is_in_place(self, region: Any, block: Block, store: _Store, mask: torch.Tensor) -> bool:
        """Return whether these elements have the same positions in both blocks, this and the
        store's."""
        if block.size != store.size or store.access.role != self._launch.role.index:
            return False
        positions = _first(region.cells(region.shadow.tables[_POSITIONS])[block.index[mask]])
        return torch.equal(positions.to(torch.int64), block.positions[mask])

    def _release_of(self, access: Access) -> Location:
        """Return the location where the role of this access first released afterwards."""
        released = self._released[access.role]
        return released[bisect.bisect_left(released, access.epoch, key=lambda each: each[0])][1]


def _kind(tensor: bool, write: bool) -> str:
    return f"{'tensor' if tensor else 'shared'} {'store' if write else 'load'}"


def _last(trail: list[tuple[int, Step]], access: Access) -> int | None:
    """Return the index of the last time a role made this access; None if it is not in the trail."""
    step = access.epoch, (_kind(access.where is not None, access.write), access.location)
    return next((i for i in reversed(range(len(trail))) if trail[i] == step), None)


def _distinct(numbers: torch.Tensor) -> list[int]:
    if not numbers.numel():
        return []
    low, high = map(int, torch.aminmax(numbers))
    return [low] if low == high else numbers.unique().tolist()


def _first(cells: torch.Tensor) -> torch.Tensor:
    """Select the first granule of each element."""
    return cells if cells.ndim == 1 else cells[:, 0]


def _rows(values: Any, cells: torch.Tensor) -> Any:
    return values[:, None] if cells.ndim > 1 and isinstance(values, torch.Tensor) else values
