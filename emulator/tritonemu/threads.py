"""Threads of a program: whether its warps have met between two accesses to memory.

A program of several warps is one instruction stream here. On a GPU each thread has some elements of
a block, which ones the compiler decides anew at every load and store, and nothing orders what two
warps do but a barrier.

What is a race is told to users; here is why. Global memory: the compiler puts barriers where values
go through shared memory, and none for global memory; an element that several warps have, as
a scalar, counts as that of the first one, which stores it. A scalar atomic releases what one thread
did; Triton 3.9 puts a barrier there (triton-lang/triton#10816). Shared and tensor memory: the
compiler guards what a role does to shared memory, aliases included, an arrival unless every thread
arrives, and a store to tensor memory, of which it knows nothing else
(facebookexperimental/triton#1993); each of four warps has 32 lanes of it, and no others. Loops: a
load is a race if the compiled loop moves it (`ttgir`) before the store of an earlier iteration.

Whether a barrier lies between says the machine code of this launch: a finding needs a way from the
first access to the second, or to the release, on which there is none (`assembly`). For global
memory an operation that may go through shared memory counts as a barrier, too. For the other
memories the path includes all that the role does between, and a wait for an mbarrier is no barrier.
If the code does not tell, the report counts the access as one that could not be judged.
"""

import bisect
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any

import torch

from . import suppressions
from .assembly import Code, Step
from .clocks import Access
from .errors import Location, Race, current_location, option
from .scheduler import Operation, Role, Turn
from .ttgir import Module

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

    @cached_property
    def bounds(self) -> tuple[int, int]:
        low, high = torch.aminmax(self.index)
        return int(low), int(high)

    def within(self, other: "Block") -> tuple[torch.Tensor, torch.Tensor]:
        """Return a mask of the elements that another block has, too, and their positions there."""
        order = other.index.argsort()
        where = torch.searchsorted(other.index[order], self.index).clamp(max=len(order) - 1)
        both = other.index[order[where]] == self.index
        return both, other.positions[order[where[both]]]


@dataclass(frozen=True)
class _Earlier:
    """An access to a block, by a role of so many warps. size: of the block, 0 for a box, which no
    warp accesses. turns: the iterations that it is in."""

    access: Access
    program: tuple[int, ...]
    warps: int
    size: int
    turns: tuple[Turn, ...]

    @property
    def step(self) -> Step:
        return "store" if self.access.write else "load", self.access.location


# Up to so many warps each has lanes of tensor memory of its own.
_OWN_LANES = 4


class Threads:
    """Accesses of threads in one launch. asm: what it is compiled to."""

    def __init__(self, launch: Any, asm: Callable[[], Mapping[str, Any]]):
        self._launch = launch
        self._code = cache(lambda: Code(asm()["ptx"]))
        self._module = cache(lambda: Module(asm()["ttgir"]))
        self._meets = cache(lambda *question: self._code().meets(*question))
        self._issues_ahead = cache(lambda *question: self._module().issues_ahead(*question))
        self._stores: list[_Earlier] = []
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
        of_one_warp: bool | None = False
        if actor is role:
            here = _kind(True, write), current_location()
            of_one_warp = self._is_of_one_warp(buffer.lanes, here, old)
            path, message = [*path, here], "they have its bytes otherwise now, and "
        self._judge_path(buffer, actor, write, old, path, message, of_one_warp)

    def _is_of_one_warp(self, lanes: Any, here: Step, old: Access) -> bool | None:
        """Return whether one warp makes both accesses of each byte; None if unknown."""
        both = []
        there = _kind(True, old.write), old.location
        for where, step in ((lanes, here), (old.where, there)):
            warps = self._module().warps_of(step, math.prod(where.shape))
            if warps is None or where.num_bytes != lanes.num_bytes:
                return None
            both.append(where.spread(warps))
        current, earlier = both
        return bool(((current == 255) | (earlier == 255) | (current == earlier)).all())

    def _judge_path(
        self, buffer: Any, actor: Role | Operation, write: bool, old: Access, path: list[Step],
        message: str, of_one_warp: bool | None = False,
    ) -> None:  # fmt: skip
        """Raise Race if the warps of the old access's role need not meet on this path, unless one
        of them makes both accesses."""
        is_open = self._code().is_open(path)
        if of_one_warp or is_open is False:
            return
        if None in (of_one_warp, is_open):
            question = "whether warps meet between it and"
            self._launch.report.give_up(question, old.location)
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

    def store(self, region: Any, block: Block, raw: torch.Tensor, access: Access) -> None:
        """Record that the running role will store these values; raises Race if another thread
        stored what it changes, or may not have loaded it yet."""
        role, changed = self._launch.role, None
        for old, chosen, then in (*self._stored(region, block), *self._loaded(region, block)):
            changed = region.flat[block.index] != raw if changed is None else changed
            differ = changed[chosen]
            if bool(differ.any()):
                now = block.positions[chosen][differ]
                self._judge(region, old, then[differ], now, block.size, "store")
        if role.warps > 1:
            role.stored = role.epoch
        cells = region.cells(region.shadow.table(_STORES))
        cells[block.index] = self._number(access, block.size)
        stored, positions = region.cells(region.shadow.table(_POSITIONS)), block.positions.int()
        stored[block.index] = positions if stored.ndim == 1 else positions[:, None]

    def load(self, region: Any, block: Block, access: Access) -> None:
        """Raise Race if another thread stored what the running role loads, or if it stores it in an
        earlier turn of a loop, and loads it before."""
        role = self._launch.role
        self._judge_turns(region, lambda table: region.cells(table)[block.index])
        for old, chosen, then in self._stored(region, block):
            self._judge(region, old, then, block.positions[chosen], block.size, "load")
        if role.warps > 1:
            role.loaded.append((region.shadow, block, self._entry(access, block.size)))

    def access_box(self, region: Any, view: Callable, access: Access) -> None:
        """Record that the running role stores the box `view(table, parts)`; or raise Race as `load`
        does, of turns of a loop."""
        if access.write:
            number = self._number(access, 0)
            view(region.shadow.table(_STORES), region.granules)[...] = number
        else:
            self._judge_turns(region, lambda table: view(table, region.granules))

    def forget(self, region: Any, view: Callable, where: Any) -> None:
        """Forget threads: something else has written `view(table, parts)[where]`."""
        if _STORES in region.shadow.tables:
            view(region.shadow.tables[_STORES], region.granules)[where] = 0

    def _entry(self, access: Access, size: int) -> _Earlier:
        role = self._launch.role
        return _Earlier(access, self._launch.program, role.warps, size, role.turns)

    def _number(self, access: Access, size: int) -> int:
        entry = self._entry(access, size)
        if not self._stores or self._stores[-1] != entry:
            self._stores.append(entry)
        return len(self._stores)

    def _stored(
        self, region: Any, block: Block
    ) -> Iterator[tuple[_Earlier, torch.Tensor, torch.Tensor]]:
        """Yield the last stores to elements of a block, of those that are unguarded; each with a
        mask of the elements, and their positions then."""
        if _STORES in region.shadow.tables:
            numbers = _first(region.cells(region.shadow.tables[_STORES])[block.index])
            for number in distinct(numbers):
                if number and self._is_unguarded(self._stores[number - 1]):
                    chosen = numbers == number
                    places = region.cells(region.shadow.table(_POSITIONS))[block.index[chosen]]
                    yield self._stores[number - 1], chosen, _first(places).to(torch.int64)

    def _loaded(
        self, region: Any, block: Block
    ) -> Iterator[tuple[_Earlier, torch.Tensor, torch.Tensor]]:
        """Yield the same of loads of the running role since its warps last met; those of an equal
        block are left out."""
        for shadow, old, entry in self._launch.role.loaded:
            comparable = shadow is region.shadow and len(old.index) and len(block.index)
            if comparable and self._is_unguarded(entry):
                (low, high), (first, last) = old.bounds, block.bounds
                same = old.size == block.size and torch.equal(old.index, block.index)
                if low <= last and first <= high and not same:
                    yield (entry, *block.within(old))

    def _is_unguarded(self, earlier: _Earlier) -> bool:
        """Return whether only some threads of the running role are ordered after an access."""
        role, old = self._launch.role, earlier.access
        epochs = role.clock.epochs
        if epochs.get(-old.role, 0) >= old.epoch or epochs.get(old.role, 0) < old.epoch:
            return False  # ordered, or not at all, of which `Memory` tells
        by_warps = earlier.warps > 1 and earlier.size > 0
        return by_warps and (old.role == role.index or earlier.size > 1)

    def _judge(
        self, region: Any, earlier: _Earlier, then: torch.Tensor, now: torch.Tensor, size: int,
        kind: str,
    ) -> None:  # fmt: skip
        """Raise Race unless the code has a barrier, or one warp makes both accesses. then, now:
        positions of the elements in the earlier block, and in this one of such a size."""
        role, old, here = self._launch.role, earlier.access, current_location()
        end, kinds = here, (kind,)
        same, of_one_warp = False, False
        if old.role == role.index:
            same = earlier.size == size and torch.equal(then, now)
            if same and (size == 1 or not old.write):
                return
            if same or not old.write:
                first = self._module().warps_of(earlier.step, earlier.size)
                second = self._module().warps_of((kind, here), size)
                known = first is not None and second is not None
                of_one_warp = torch.equal(first[then], second[now]) if known else None
        else:
            end, kinds = self._release_of(old), ("atomic", "load", "store")
        meets = of_one_warp or self._meets(earlier.step, end, kinds)
        if meets:
            return
        if None in (meets, of_one_warp):
            what = "warps meet between it" if meets is None else "one warp does both, it"
            self._launch.report.give_up(f"whether {what} and", old.location)
            return
        finding = Race(
            f"{self._message(region, earlier, kind, same, end)}; warps of a program meet at "
            f"tl.debug_barrier(): put it between the two, or allow it with "
            f"{option('unguarded', 'allow')}",
            other=old.location,
            programs=(earlier.program, self._launch.program),
            buffer=region.name,
            marks=(old.mark, role.access(kind == "store", 0, name=region.name).mark),
            missing="no barrier of the warps lies between 1 and 2",
        )
        suppressions.judge(finding, self._launch.report)

    def _message(self, region: Any, earlier: _Earlier, kind: str, same: bool, end: Location) -> str:
        """Say what is wrong. end: the release by another role, if it is not this one's access."""
        old, (file, line) = earlier.access, earlier.access.location
        what = f"{'loads' if kind == 'load' else 'stores to'} an element of {region.name} that"
        if old.role != self._launch.role.index:
            return (
                f"program {self._launch.program} {what} program {earlier.program} stored to at "
                f"{file}:{line}, and one of its threads released at {end[0]}:{end[1]}"
            )
        if not old.write:
            return f"a warp {what} another one may not have loaded yet at {file}:{line}"
        if same:
            return (
                f"a warp {what} another one stored to at {file}:{line}: the compiler gave the two "
                f"blocks different layouts"
            )
        return f"a thread {what} another one may have stored to at {file}:{line}"

    def _judge_turns(self, region: Any, view: Callable) -> None:
        """Raise Race if the running role loads what it stored in an earlier turn of a loop, and the
        compiled loop loads it before. view: of a table, what it loads."""
        role = self._launch.role
        if role.turns and _STORES in region.shadow.tables:
            for number in distinct(view(region.shadow.tables[_STORES])):
                store = self._stores[number - 1]
                level = _level(store.turns, role.turns)
                if number and store.access.role == role.index and level is not None:
                    self._judge_loop(region, store, level)

    def _judge_loop(self, region: Any, store: _Earlier, level: int) -> None:
        role, old, here = self._launch.role, store.access, current_location()
        then, now = store.turns[level], role.turns[level]
        question = (*(now.location, here, old.location), now.number - then.number)
        ahead = self._issues_ahead(*question, len(role.turns) > level + 1)
        if ahead is None:
            self._launch.report.give_up("whether the loop issues it before", old.location)
        if ahead:
            (file, line), loop = old.location, now.location
            finding = Race(
                f"iteration {now.number} of the loop at {loop[0]}:{loop[1]} loads an element of "
                f"{region.name} that iteration {then.number} stored to at {file}:{line}, and "
                f"Triton's software pipeliner issues this load before that store; "
                f"tl.range(..., num_stages=1) keeps their order",
                other=old.location,
                programs=(store.program, self._launch.program),
                buffer=region.name,
                marks=(old.mark, role.access(False, 0, name=region.name).mark),
                missing="the compiled loop issues 2 before 1",
            )
            suppressions.judge(finding, self._launch.report)

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


def _level(then: tuple[Turn, ...], now: tuple[Turn, ...]) -> int | None:
    """Return the level of the loop of which these are two iterations; None if of none."""
    pairs = enumerate(zip(then, now, strict=False))
    return next((i if a.loop is b.loop else None for i, (a, b) in pairs if a != b), None)


def distinct(numbers: torch.Tensor) -> list[int]:
    """Return the sorted distinct numbers; torch sorts few of them slower than Python does."""
    if numbers.numel() <= 64:
        return sorted(set(numbers.reshape(-1).tolist()))
    low, high = map(int, torch.aminmax(numbers))
    return [low] if low == high else numbers.unique().tolist()


def _first(cells: torch.Tensor) -> torch.Tensor:
    """Select the first granule of each element."""
    return cells if cells.ndim == 1 else cells[:, 0]
