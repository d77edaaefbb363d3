"""Barriers: mbarriers, named barriers, and the barrier of a cluster.

An mbarrier counts arrivals and bytes. Its phase completes when the expected arrivals and bytes are
in; the next phase starts at once. A wait names a parity: it passes if the phase of that parity is
the last completed one. So a fresh barrier lets a wait for parity 1 pass, which is how a producer
finds its buffers empty, and a barrier that completes two phases while somebody waits for the first
has been missed.

Some of the 16 named barriers are the compiler's: 0 for the warps of the default task, 1 for the
start and end of tasks, 2 + i for the warps of the other task i, if it has more than one.

Four mistakes are reported as `BarrierMisuse` even when this run gets away with them: an arrival
that the phase does not expect; one that is not known to come after the end of the previous phase,
and may be one too many for that; a phase that receives other bytes than it was told; and a phase
that can complete although a role that waited for the previous one is not known to have noticed (on
a device that role may come late, find the wrong parity and sleep for ever).

The opposite of being late is being early. A wait that begins before the phase before its own is
over meets the same parity one round earlier, and passes at once. So when a wait passes for phase k,
the role must have known before it that phase k - 1 was over: it has waited for that phase itself,
or for something that comes after it. If it has not, the order of this run was luck, and the wait is
an `AliasedWait`. Like a race it is found in the clocks, under any schedule. A wait for phase 0 or
for the phase of a fresh barrier, -1, has nothing to prove. If the slots of a ring are filled by the
stores of one role, to have waited for a later slot is proof enough; copies complete in any order.
"""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from .clocks import Clock
from .errors import (
    AliasedWait,
    BarrierMisuse,
    InvalidKernel,
    Location,
    ResourceLimit,
    Wait,
    current_location,
)
from .launch import BarrierUse
from .scheduler import Role, Scheduler
from .timeline import Mark, Spot

NUM_NAMED_BARRIERS = 16


def _name(lane: Any) -> str:
    """Format the name of a role, or of what works for it."""
    return getattr(lane, "label", f"the {lane}")


@dataclass(frozen=True)
class Arrival:
    """Arrivals, or bytes, of somebody: what it knows, whose it is, where and when."""

    clock: Clock
    lane: Any
    location: Location
    time: float

    def mark(self, barrier: "MBarrier") -> Mark:
        where = getattr(self.lane, "cta", barrier.cta).number, getattr(self.lane, "name", self.lane)
        what = f"{_name(self.lane)} arrives at {barrier.name}"
        return Mark(*where, self.time, self.location[1], what)


@dataclass(eq=False)
class MBarrier:
    """One mbarrier of a CTA; `phase` is the number of completed phases.

    clock: gathers the clocks of the arrivals; phases are ordered, so it only grows. released: the
    clock at the end of the last completed phase, which a role learns that passes a wait for it;
    previous: at the end of the phase before that one. observers: roles that passed a wait for the
    last completed phase, since when, where, and its spot. waiters: roles that wait, for which
    parity, and where. use: what it did. key: what `search` knows it by: numbers of its CTA, of the
    allocation in that, and its index there. arrivals: of the last phase that has any. location:
    where it was made. initialisers: index and epoch of the role that initialised it, in every CTA
    of a Gluon program: the compiler makes these wait for each other before they use it.
    """

    scheduler: Scheduler
    cta: Any
    name: str
    count: int
    threads: bool
    phase: int = 0
    pending: int = 0
    missing_bytes: int = 0
    clock: Clock = field(default_factory=Clock)
    released: Clock = field(default_factory=Clock)
    previous: Clock = field(default_factory=Clock)
    observers: dict[Role, tuple[int, Location, Spot]] = field(default_factory=dict)
    waiters: list[tuple[Role, int, Location]] = field(default_factory=list)
    use: BarrierUse = field(init=False)
    key: tuple[int, int, int] | None = None
    arrivals: list[Arrival] = field(default_factory=list)
    location: Location = field(default_factory=current_location)
    initialisers: Sequence[tuple[int, int]] = ()

    def __post_init__(self) -> None:
        if not 1 <= self.count < 2**20:
            raise InvalidKernel(f"arrive_count must be in [1, 2**20), got {self.count}")
        self.pending, self.use = self.count, BarrierUse(self.count)

    @property
    def label(self) -> str:
        return f"{self.name} of CTA {self.cta.number}"

    @cached_property
    def summary(self) -> BarrierUse:
        """What the report says of barriers of this name."""
        return self.cta.launch.report.barrier_use.setdefault(self.name, BarrierUse(self.count))

    def _add(self, what: str, key: Hashable, number: int) -> None:
        """Add to what the barrier did, and to the most that one did."""
        counts, most = getattr(self.use, what), getattr(self.summary, what)
        counts[key] = counts.get(key, 0) + number
        most[key] = max(most.get(key, 0), counts[key])

    @property
    def known(self) -> tuple[str, Location, int]:
        """Name of the allocation, where it is, and the arrivals that a phase takes."""
        return self.name.partition("[")[0], self.location, self.count

    def misuse(self, what: str, location: Location | None = None, **facts: Any) -> BarrierMisuse:
        """Build the finding, with where the barrier was made."""
        facts |= {"barrier": self.name, "barriers": (self.known,)}
        return BarrierMisuse(f"{self.label}: {what}", location, **facts)

    def _arrived(self) -> tuple[tuple[str, Location], ...]:
        """List who arrived in the last phase that has arrivals, and where, each location once."""
        named = ((f"arrival of {_name(each.lane)}", each.location) for each in self.arrivals)
        return tuple(dict.fromkeys(named))

    def _miscount(self, what: str, location: Location) -> BarrierMisuse:
        """Build the finding that a phase gets too much, from its arrivals."""
        marks = tuple(each.mark(self) for each in self.arrivals)
        return self.misuse(what, location, related=self._arrived(), marks=marks)

    def arrive(
        self, count: int, clock: Clock, time: float, lane: Any, location: Location,
        num_bytes: int = 0,
    ) -> None:  # fmt: skip
        """Count `count` arrivals of somebody whose clock is `clock`.

        num_bytes: announced by that; negative: written by a copy, which is no arrival (count 0).
        """
        if self.pending == self.count and not self.missing_bytes:
            self.arrivals = []
        self.arrivals.append(Arrival(clock, lane, location, time))
        if isinstance(lane, Role):
            self.scheduler.synchronises("arrival", lane, self, location)
        if self.cta.ended is not None:
            self.check_end()
        self.missing_bytes += num_bytes
        completes = self.pending == count and not self.missing_bytes
        self.scheduler.changes += 1
        self.scheduler.order.note(self.key, "arrive", (self.phase, completes))
        if count and self.phase and not clock.includes(self.released):
            raise self.misuse(
                f"an arrival in phase {self.phase} is not ordered after the end of phase "
                f"{self.phase - 1}, and may come too early",
                location,
            )
        if count > self.pending:
            raise self._miscount(
                f"{count} arrival{'s' * (count != 1)} in phase {self.phase}, which expects "
                f"{self.pending} more of {self.count}",
                location,
            )
        self.pending -= count
        if count:
            self._add("arrivals", getattr(lane, "name", lane), count)
        self.clock.join(clock)
        # While arrivals are missing, bytes may come before they are announced.
        if self.pending == 0 and self.missing_bytes < 0:
            what = f"phase {self.phase} receives {-self.missing_bytes} bytes more than expected"
            raise self._miscount(what, location)
        missing = {"pending": self.pending, "bytes": self.missing_bytes}
        self._trace("arrive", lane, time, time, location, phase=self.phase, **missing)
        if completes:
            self._complete(time, lane, location)

    def _trace(
        self, kind: str, lane: Any, start: float, end: float, location: Location, **fields: Any
    ) -> None:
        fields |= {"cta": self.cta.number, "location": location, "target": self.name}
        self.scheduler.trace(kind, f"{kind} {self.name}", lane, start, end, **fields)

    def check_end(self) -> None:
        """Raise EarlyExit if the CTA ends, or has ended, without knowing of an arrival.

        An earlier phase ends before arrivals of the last one, so they stand for all.
        """
        for each in self.arrivals:
            if self.cta.launch.races and not self.cta.ended.includes(each.clock):
                who = _name(each.lane)
                raise self.cta.too_early(self.name, who, each.location, each.mark(self))

    def _complete(self, time: float, lane: Any, location: Location) -> None:
        for role, (epoch, wait_location, spot) in self.observers.items():
            if not self.clock.reaches(role.index, epoch):
                waits = f"{role.label} waits for phase {self.phase - 1} of {self.name}"
                raise self.misuse(
                    f"phase {self.phase} can complete before {role.label}, which waits for phase "
                    f"{self.phase - 1}, has noticed that one: a missed phase",
                    location,
                    related=((f"wait of {role.label}", wait_location),),
                    marks=(Mark(*spot, wait_location[1], waits), self.arrivals[-1].mark(self)),
                    missing="1 and 2 are not ordered: the wait may pass too late",
                )
        self.phase += 1
        self.use.phases = self.phase
        self.summary.phases = max(self.summary.phases, self.phase)
        self.pending = self.count
        self.previous, self.released = self.released, self.clock.copy()
        self.observers = {}
        waiters, self.waiters = self.waiters, []
        for role, parity, wait_location in waiters:
            if self.passes(parity):
                self.scheduler.wake(role, time)
                self.scheduler.order.note(self.key, "wait", self.phase, role.leader)
                self._observe(role, wait_location)
                self.scheduler.trace_release(self.name, self.phase - 1, lane, time, role)
            else:
                self.waiters.append((role, parity, wait_location))

    def passes(self, parity: int) -> bool:
        return self.phase % 2 != parity

    def _observe(self, role: Role, location: Location) -> None:
        """Let the role pass its wait: what it knew before must prove which phase this is."""
        phase = self.phase - 1
        if phase and not role.clock.includes(self.previous):
            early = "as on a fresh barrier" if phase == 1 else f"for phase {phase - 2}"
            raise AliasedWait(
                f"{self.label}: this wait passes for phase {phase}, but nothing proves that phase "
                f"{phase - 1} was over when it began. If phase {phase - 1} ends late, say because "
                f"a copy is slow, parity {phase % 2} passes at once, {early}. Let an earlier wait "
                f"of the role prove it, for phase {phase - 1} or for something after it; where "
                f"roles take the slots of a ring in turn, make the slots a multiple of the roles, "
                f"so that each slot has one owner",
                location,
                barrier=self.name,
                phase=phase,
                role=role.label,
                barriers=(self.known,),
            )
        role.clock.join(self.released)
        self.observers[role] = role.epoch, location, role.spot
        self._add("waits", (role.name, phase % 2), 1)

    def wait(self, role: Role, parity: Any) -> None:
        """Suspend the role until the phase of this parity is the last completed one."""
        self.summary.turns |= not isinstance(parity, int)
        self.cta.launch.report.checks["barrier"] += 1
        parity = int(parity)
        if parity not in (0, 1):
            raise self.misuse(f"a wait takes phase 0 or 1, got {parity}")
        start, location, passes = role.time, current_location(), self.passes(parity)
        self.scheduler.synchronises("wait", role, self, location, self.phase - passes)
        self._add("waits", (role.name, parity), 0)
        if passes:
            self.scheduler.order.note(self.key, "wait", self.phase)
            self._observe(role, location)
        else:
            self.scheduler.order.note(self.key, "block", self.phase + 1)
            self.waiters.append((role, parity, location))
            self.scheduler.block(lambda: self._describe(role, location, parity))
        self._trace("wait", role, start, role.time, location, phase=self.phase - 1)

    def _describe(self, role: Role, location: Location, parity: int) -> Wait:
        note = ""
        if self.phase >= 2:
            note = f"phase {self.phase - 2} of that parity is over, and {self.phase - 1} too"
        missing = (self.phase, self.pending, self.missing_bytes)
        begun = self.pending < self.count or self.missing_bytes
        related = self._arrived() if begun else ()
        passed = sum(n for (name, _), n in self.use.waits.items() if name == role.name)
        barriers = (self.known,)
        return Wait(
            role.label, location, self.label, *missing, note, related, barriers, parity, passed
        )

    def finish(self) -> None:
        """Check at the end of the kernel that no bytes are left over."""
        self.summary.join(self.use)
        if self.missing_bytes:
            what = "is still expecting" if self.missing_bytes > 0 else "received in excess"
            raise self.misuse(
                f"phase {self.phase} {what} {abs(self.missing_bytes)} bytes when the kernel ends",
                related=self._arrived(),
            )


@dataclass(eq=False)
class Rendezvous:
    """A barrier that roles reach until `expected` are there, each of which counts as several.

    name: that of timelines, "" for none. key: what `search` knows it by.
    """

    scheduler: Scheduler
    name: str
    label: str
    key: Hashable
    expected: int = 0
    arrived: int = 0
    generation: int = 0
    clock: Clock = field(default_factory=Clock)
    waiters: list[Role] = field(default_factory=list)

    def count(self, role: Role, number: int, wait: bool) -> None:
        """Count the role in; with `wait`, suspend it until all have come."""
        self.arrived += number
        completes = self.arrived == self.expected
        self.scheduler.changes += 1
        self.scheduler.order.note(self.key, "arrive", (self.generation, completes))
        self.clock.join(role.release() if wait else role.release_by_each())
        if wait:
            self.waiters.append(role)
        if not completes:
            if wait:
                waiting = role.label, current_location(), self.label, self.generation
                self.scheduler.block(lambda: Wait(*waiting, self.expected - self.arrived, 0))
            return
        for waiter in self.waiters:
            waiter.clock.join(self.clock)
            self.scheduler.order.note(self.key, "wake", self.generation + 1, waiter)
            if waiter is not role:
                self.scheduler.wake(waiter, role.time)
                if self.name:
                    self.scheduler.trace_release(
                        self.name, self.generation, role, role.time, waiter
                    )
        self.arrived, self.waiters = 0, []
        self.generation += 1


class NamedBarrier(Rendezvous):
    """`bar.sync` and `bar.arrive`: a number of threads, which whole roles make up."""

    def __init__(self, scheduler: Scheduler, cta: Any, name: str):
        label = f"{name} of CTA {cta.number}"
        super().__init__(scheduler, name, label, label)
        self.roles: list[Role] = []

    def arrive(self, role: Role, threads: int, wait: bool) -> None:
        """Count the role's threads in; with `wait`, suspend it until all have come."""
        arriving, start, generation = 32 * role.warps, role.time, self.generation
        if threads < 32 or threads % 32:
            raise InvalidKernel(f"a named barrier takes a multiple of 32 threads, got {threads}")
        if not self.arrived:
            self.expected, self.roles = threads, []
        if threads != self.expected:
            self._misuse(f"waits for {self.expected} threads, but {role.label} says {threads}")
        if role in self.roles:
            self._misuse(f"{role.label} arrives twice before {threads} threads have come")
        if self.arrived + arriving > threads:
            self._misuse(f"{self.arrived + arriving} threads arrive, {threads} are expected")
        self.roles.append(role)
        self.count(role, arriving, wait)
        kind = "wait" if wait else "arrive"
        missing = threads - self.arrived if self.generation == generation else 0
        fields = {"target": self.name, "phase": generation, "pending": missing}
        self.scheduler.trace(kind, f"{kind} {self.name}", role, start, role.time, **fields)

    def _misuse(self, what: str) -> None:
        raise BarrierMisuse(f"{self.label}: {what}", barrier=self.name)


def named_barrier(role: Role, number: int) -> NamedBarrier:
    """Return the named barrier `number` of the role's CTA."""
    barriers = role.cta.named_barriers
    if not 0 <= number < NUM_NAMED_BARRIERS:
        raise ResourceLimit(f"named barriers are 0 to {NUM_NAMED_BARRIERS - 1}, got {number}")
    name, use = f"named barrier {number}", role.cta.compilers_barriers.get(number)
    if use:
        last = NUM_NAMED_BARRIERS - 1
        raise BarrierMisuse(
            f"{name} is the compiler's, for {use}; take another, say {last}", barrier=name
        )
    if number not in barriers:
        barriers[number] = NamedBarrier(role.scheduler, role.cta, name)
    return barriers[number]
