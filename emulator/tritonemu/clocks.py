"""Happens-before: what every role knows, and which bytes of a storage it may access.

Two accesses to the same bytes, one of them a write, race unless one happens before the other:
unless a chain of program order and synchronisation (arrive -> wait, fork -> join, issue ->
completion) leads from the first to the second. Whether such a chain exists does not depend on the
order in which the emulator happened to run the roles, so a race is found under any schedule.

A `Clock` is the set of accesses that happen before the present moment of its owner. A role numbers
its own accesses by *epochs*: the epoch grows at every release (arrive, fork, issue), so "everything
role r did up to epoch e" is one number per role. An asynchronous operation (a TMA copy, an MMA) is
not ordered with the role that issued it until somebody waits for it; each is one bit, and the set
of those known is one Python integer. Joining two clocks is a maximum and an `or`.

A `Shadow` keeps, per storage, the accesses that may still race with a later one. Bytes are a bit
mask in one Python integer: overlap is `&`, and an access is forgotten byte by byte once a later one
stands for it.
"""

from dataclasses import dataclass, field, replace
from typing import Any

from .errors import Location
from .timeline import Mark, Spot


@dataclass(eq=False, slots=True)
class Clock:
    """Set of past events: epochs of roles, and bits of asynchronous operations.

    epochs: under the index of a role those of any of its warps, under the negative index those that
    all of its warps have passed (see `threads`).
    fenced: the epochs behind a fence, whose stores to shared memory a copy of it may rely on;
    settled: the operations behind one.
    past: the epochs, and past_operations the operations, that are over at that moment, as the role
    of a request knew them when it made it: nobody has released what they did to memory.
    met: as negative indices, but of shared and tensor memory, and for fewer reasons.
    """

    epochs: dict[int, int] = field(default_factory=dict)
    operations: int = 0
    fenced: dict[int, int] = field(default_factory=dict)
    met: dict[int, int] = field(default_factory=dict)
    settled: int = 0
    past: dict[int, int] = field(default_factory=dict)
    past_operations: int = 0

    def copy(self) -> "Clock":
        fenced, met = dict(self.fenced), dict(self.met)
        past = self.past, self.past_operations  # never changed in place
        return Clock(dict(self.epochs), self.operations, fenced, met, self.settled, *past)

    def landed(self, operation: int) -> "Clock":
        """Build the clock of whoever learns that an operation issued at this one is complete."""
        past = dict(self.epochs)
        _raise(past, self.past)
        operations = self.operations | self.past_operations
        return Clock(operations=operation, past=past, past_operations=operations)

    def join(self, other: "Clock") -> None:
        """Learn everything the other knows."""
        self.operations |= other.operations
        self.settled |= other.settled
        self.past_operations |= other.past_operations
        if other.past and other.past is not self.past:
            self.past = past = dict(self.past)
            _raise(past, other.past)
        _raise(self.epochs, other.epochs)
        _raise(self.met, other.met)
        if other.fenced:
            _raise(self.fenced, other.fenced)

    def includes(self, other: "Clock") -> bool:
        """Return whether everything the other knows is over at this clock's moment."""
        known, past = self.epochs, self.past
        return not other.operations & ~(self.operations | self.past_operations) and all(
            known.get(role, 0) >= epoch or past.get(role, 0) >= epoch
            for role, epoch in other.epochs.items()
        )

    def reaches(self, role: int, epoch: int) -> bool:
        """Return whether this epoch of a role has begun at this clock's moment."""
        return max(self.epochs.get(role, 0), self.past.get(role, 0)) >= epoch

    def knows(self, access: "Access") -> bool:
        """Return whether the access happens before this clock's moment."""
        if access.operation:
            return bool(self.operations & access.operation)
        return self.epochs.get(access.role, 0) >= access.epoch

    def splits(self, access: "Access") -> bool:
        """Return whether it happens before this clock's moment for one warp of its role only."""
        met, known = self.met.get(access.role, 0), self.epochs.get(access.role, 0)
        return not access.operation and met < access.epoch <= known

    def fences(self, access: "Access") -> bool:
        """Return whether a fence lies between this access and the clock's moment."""
        if access.operation:
            return bool(self.settled & access.operation)
        return self.fenced.get(access.role, 0) >= access.epoch


def _raise(target: dict[int, int], source: dict[int, int]) -> None:
    for role, epoch in source.items():
        if target.get(role, 0) < epoch:
            target[role] = epoch


@dataclass(frozen=True, slots=True)
class Access:
    """One read or write of the bytes in `mask`, by a role or by an operation it issued.

    role, epoch: index of the role and its epoch then. operation: the bit of the asynchronous
    operation, 0 if the role itself touched the bytes. who: for messages. name: of the memory, as
    the access names it. where: its `Lanes`, of tensor memory. spot: CTA, lane and time of the
    timeline. generic: whether it is of registers, by the role or by an operation. kind: of the
    operation ("copy", "async_dot", ...), "" if the role itself touched the bytes.
    """

    role: int
    epoch: int
    operation: int
    write: bool
    mask: int
    location: Location
    who: str
    name: str = ""
    where: Any = None
    spot: Spot = field(default=(0, "", 0.0), compare=False)
    generic: bool = True
    kind: str = ""

    @property
    def actor(self) -> str:
        """The role that made it, or issued its operation."""
        return self.who.rpartition(" issued by ")[2]

    @property
    def mark(self) -> Mark:
        does = "writes" if self.write else "reads"
        return Mark(*self.spot, self.location[1], f"{self.who} {does} {self.name}")


@dataclass(eq=False, slots=True)
class Shadow:
    """The accesses to one storage that a later access may race with. written: the bytes."""

    accesses: list[Access] = field(default_factory=list)
    written: int = 0

    def record(self, new: Access, clock: Clock) -> list[Access]:
        """Add an access made at `clock`; return earlier ones that race with it.

        Bytes of an earlier access are dropped when the new one stands for it: if it happens before
        the new one, and the new one is a write or both are reads, then whatever is ordered after
        the new one is ordered after it too.
        """
        remaining, racing = [], []
        for old in self.accesses:
            common = old.mask & new.mask
            if common:
                known = clock.knows(old)
                if not known and (old.write or new.write):
                    racing.append(old)
                if known and (new.write or not old.write):
                    if rest := old.mask ^ common:
                        remaining.append(replace(old, mask=rest))
                    continue
            remaining.append(old)
        remaining.append(new)
        self.accesses = remaining
        if new.write:
            self.written |= new.mask
        return racing
