"""Barriers: mbarriers, named barriers, and the barrier of a cluster.

An mbarrier counts arrivals and bytes. Its phase completes when the expected arrivals and bytes are
in; the next phase starts at once. A wait names a parity: it passes if the phase of that parity is
the last completed one. So a fresh barrier lets a wait for parity 1 pass, which is how a producer
finds its buffers empty, and a barrier that completes two phases while somebody waits for the first
has been missed.

Of the 16 named barriers some are the compiler's: 0 for the warps of the default task, 1 for the
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
for the phase of a fresh barrier, -1, has nothing to prove. The typical case is a ring of slots that
several consumers take in turn, where the number of slots is no multiple of the number of consumers:
a slot passes from one to another, and who waits for a fill has not waited for the fill before. If
the slots are filled by the stores of one role, to have waited for a later slot is proof enough;
copies complete in any order.
"""

from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Any

from .clocks import Clock
from .errors import (
    AliasedWait,
    BarrierMisuse,
    InvalidKernel,
    Location,
    ResourceLimit,
    Wait,
    location,
)
from .scheduler import Role, Scheduler

NUM_NAMED_BARRIERS = 16


@dataclass(eq=False)
class MBarrier:
    """One mbarrier of a CTA; `phase` is the number of completed phases.

    clock: gathers the clocks of the arrivals; phases are ordered, so it only grows. released: the
    clock at the end of the last completed phase, which a role learns that passes a wait for it;
    before: at the end of the phase before that one. observers: roles that passed a wait for the
    last completed phase. waiters: roles that wait, for which parity, and where. key: what `search`
    knows it by. arrivals: of the last phase that has any; what each knows, whose it is, and where.
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
    before: Clock = field(default_factory=Clock)
    observers: dict[Role, int] = field(default_factory=dict)
    waiters: list[tuple[Role, int, Location]] = field(default_factory=list)
    key: Hashable = None
    arrivals: list[tuple[Clock, Any, Location]] = field(default_factory=list)

    def __post_init__(self) -> None:
        if not 1 <= self.count < 2**20:
            raise InvalidKernel(f"arrive_count must be in [1, 2**20), got {self.count}")
        self.pending = self.count

    @property
    def label(self) -> str:
        return f"{self.name} of CTA {self.cta.number}"

    def _trace(self, kind: str, lane: Any, start: float, end: float, at: Location) -> None:
        waited = kind == "wait"
        self.scheduler.trace(
            kind,
            f"{kind} {self.name}",
            lane,
            start,
            end,
            cta=self.cta.number,
            line=at[1],
            target=self.name,
            phase=self.phase - waited,
            pending=0 if waited else self.pending,
            bytes=0 if waited else self.missing_bytes,
        )

    def misuse(self, what: str, at: Location | None = None) -> BarrierMisuse:
        return BarrierMisuse(f"{self.label}: {what}", self.name, at)

    def arrive(self, count: int, clock: Clock, time: float, lane: Any, at: Location) -> None:
        """`count` arrivals of somebody whose clock is `clock`."""
        self._note(clock, lane, at)
        self._tell(self.pending - count, self.missing_bytes)
        if self.phase and not clock.includes(self.released):
            raise self.misuse(
                f"an arrival in phase {self.phase} is not ordered after the end of phase "
                f"{self.phase - 1}, and may come too early",
                at,
            )
        if count > self.pending:
            raise self.misuse(
                f"{count} arrivals in phase {self.phase}, which expects {self.pending} more of "
                f"{self.count}",
                at,
            )
        self.pending -= count
        self.clock.join(clock)
        self._check_bytes(at)
        self._trace("arrive", lane, time, time, at)
        self._complete(time, lane, at)

    def expect(self, num_bytes: int, clock: Clock, time: float, lane: Any, at: Location) -> None:
        """One arrival that also announces bytes."""
        self.missing_bytes += num_bytes
        self.arrive(1, clock, time, lane, at)

    def deliver(self, num_bytes: int, clock: Clock, time: float, lane: Any, at: Location) -> None:
        """Bytes of a copy have been written."""
        self._note(clock, lane, at)
        self._tell(self.pending, self.missing_bytes - num_bytes)
        self.missing_bytes -= num_bytes
        self.clock.join(clock)
        self._check_bytes(at)
        self._trace("arrive", lane, time, time, at)
        self._complete(time, lane, at)

    def _note(self, clock: Clock, lane: Any, at: Location) -> None:
        if self.pending == self.count and not self.missing_bytes:
            self.arrivals = []
        self.arrivals.append((clock, lane, at))
        if self.cta.ended is not None:
            self.check_end()

    def check_end(self) -> None:
        """Raise EarlyExit if the CTA ends, or has ended, without knowing of an arrival.

        An earlier phase ends before arrivals of the last one, so they stand for all.
        """
        for clock, lane, at in self.arrivals:
            if self.cta.launch.races and not self.cta.ended.includes(clock):
                who = getattr(lane, "label", f"the {lane}")
                raise self.cta.too_early(self.name, who, at)

    def _tell(self, pending: int, missing_bytes: int) -> None:
        """Note an arrival or bytes for `search`, after which so much is missing."""
        completes = not pending and not missing_bytes
        self.scheduler.order.note(self.key, "arrive", (self.phase, completes))

    def _check_bytes(self, at: Location) -> None:
        # While arrivals are missing, bytes may come before they are announced.
        if self.pending == 0 and self.missing_bytes < 0:
            raise self.misuse(
                f"phase {self.phase} receives {-self.missing_bytes} bytes more than expected", at
            )

    def _complete(self, time: float, lane: Any, at: Location) -> None:
        if self.pending or self.missing_bytes:
            return
        for role, epoch in self.observers.items():
            if self.clock.epochs.get(role.index, 0) < epoch:
                raise self.misuse(
                    f"phase {self.phase} can complete before {role.label}, which waits for phase "
                    f"{self.phase - 1}, has noticed that one: a missed phase",
                    at,
                )
        self.phase += 1
        self.pending = self.count
        self.before, self.released = self.released, self.clock.copy()
        self.observers = {}
        waiters, self.waiters = self.waiters, []
        for role, parity, place in waiters:
            if self._passes(parity):
                self.scheduler.wake(role, time)
                self.scheduler.order.note(self.key, "wait", self.phase, role)
                self._observe(role, place, lane, time)
            else:
                self.waiters.append((role, parity, place))

    def _passes(self, parity: int) -> bool:
        return self.phase % 2 != parity

    def _observe(self, role: Role, at: Location, lane: Any = None, time: float = 0.0) -> None:
        """The role passes its wait: what it knew before must prove which phase this is."""
        if self.phase > 1 and not role.clock.includes(self.before):
            raise AliasedWait(self.label, self.phase - 1, self.name, role.label, at)
        role.clock.join(self.released)
        self.observers[role] = role.epoch
        if lane is not None:
            self.scheduler.trace(
                "arrow", self.name, lane, time, role.time, waiter=role, phase=self.phase - 1
            )

    def wait(self, role: Role, parity: int) -> None:
        """Suspend the role until the phase of this parity is the last completed one."""
        if parity not in (0, 1):
            raise self.misuse(f"a wait takes phase 0 or 1, got {parity}")
        start, at = role.time, location()
        if self._passes(parity):
            self.scheduler.order.note(self.key, "wait", self.phase)
            self._observe(role, at)
        else:
            self.scheduler.order.note(self.key, "block", self.phase + 1)
            self.waiters.append((role, parity, at))
            self.scheduler.block(lambda: self._describe(role, at))
        self._trace("wait", role, start, role.time, at)

    def _describe(self, role: Role, at: Location) -> Wait:
        note = ""
        if self.phase >= 2:
            note = f"phase {self.phase - 2} of that parity is over, and {self.phase - 1} too"
        missing = (self.phase, self.pending, self.missing_bytes)
        return Wait(role.label, at, self.label, *missing, note)

    def finish(self) -> None:
        """At the end of the kernel: bytes must not be left over."""
        if self.missing_bytes:
            what = "is still expecting" if self.missing_bytes > 0 else "received in excess"
            raise self.misuse(
                f"phase {self.phase} {what} {abs(self.missing_bytes)} bytes when the kernel ends"
            )


@dataclass(eq=False)
class NamedBarrier:
    """`bar.sync` and `bar.arrive`: a number of threads, which whole roles make up."""

    scheduler: Scheduler
    cta: Any
    name: str
    threads: int = 0
    arrived: int = 0
    clock: Clock = field(default_factory=Clock)
    roles: list[Role] = field(default_factory=list)
    waiters: list[Role] = field(default_factory=list)
    generation: int = 0

    @property
    def label(self) -> str:
        return f"{self.name} of CTA {self.cta.number}"

    def arrive(self, role: Role, threads: int, wait: bool) -> None:
        """Count the role's threads in; with `wait`, suspend it until all have come."""
        own, start = 32 * role.warps, role.time
        if threads < 32 or threads % 32:
            raise InvalidKernel(f"a named barrier takes a multiple of 32 threads, got {threads}")
        self.threads = self.threads or threads
        if threads != self.threads:
            self._misuse(f"waits for {self.threads} threads, but {role.label} says {threads}")
        if role in self.roles:
            self._misuse(f"{role.label} arrives twice before {self.threads} threads have come")
        completes = self.arrived + own == self.threads
        self.scheduler.order.note(self.label, "arrive", (self.generation, completes))
        self.roles.append(role)
        self.arrived += own
        if self.arrived > self.threads:
            self._misuse(f"{self.arrived} threads arrive, {self.threads} are expected")
        self.clock.join(role.release())
        generation = self.generation
        if wait:
            self.waiters.append(role)
        if self.arrived == self.threads:
            self._complete(role)
        elif wait:
            at = location()
            self.scheduler.block(
                lambda: Wait(role.label, at, self.label, generation, self.threads - self.arrived, 0)
            )
        kind = "wait" if wait else "arrive"
        missing = self.threads - self.arrived if self.generation == generation else 0
        self.scheduler.trace(
            kind,
            f"{kind} {self.name}",
            role,
            start,
            role.time,
            target=self.name,
            phase=generation,
            pending=missing,
        )

    def _misuse(self, what: str) -> None:
        raise BarrierMisuse(f"{self.label}: {what}", self.name)

    def _complete(self, last: Role) -> None:
        for role in self.waiters:
            role.clock.join(self.clock)
            self.scheduler.order.note(self.label, "wake", self.generation + 1, role)
            if role is last:
                continue
            self.scheduler.wake(role, last.time)
            self.scheduler.trace(
                "arrow", self.name, last, last.time, role.time, waiter=role, phase=self.generation
            )
        self.threads = self.arrived = 0
        self.roles, self.waiters = [], []
        self.generation += 1


def named_barrier(role: Role, number: int) -> NamedBarrier:
    """The named barrier `number` of the role's CTA."""
    barriers = role.cta.named_barriers
    if not 0 <= number < NUM_NAMED_BARRIERS:
        raise ResourceLimit(f"named barriers are 0 to {NUM_NAMED_BARRIERS - 1}, got {number}")
    name, use = f"named barrier {number}", role.cta.compilers_barriers.get(number)
    if use:
        last = NUM_NAMED_BARRIERS - 1
        raise BarrierMisuse(f"{name} is the compiler's, for {use}; take another, say {last}", name)
    if number not in barriers:
        barriers[number] = NamedBarrier(role.scheduler, role.cta, name)
    return barriers[number]


@dataclass(eq=False)
class ClusterBarrier:
    """`barrier.cluster`: one role of each CTA must come."""

    scheduler: Scheduler
    size: int
    clock: Clock = field(default_factory=Clock)
    waiters: list[Role] = field(default_factory=list)
    arrived: int = 0
    generation: int = 0

    def wait(self, role: Role) -> None:
        key = ("cluster", role.cta.number - role.cta.rank)
        completes = self.arrived + 1 == self.size
        self.scheduler.order.note(key, "arrive", (self.generation, completes))
        self.clock.join(role.release())
        self.arrived += 1
        if self.arrived < self.size:
            at, generation = location(), self.generation
            self.waiters.append(role)
            self.scheduler.block(
                lambda: Wait(
                    role.label, at, "cluster barrier", generation, self.size - self.arrived, 0
                )
            )
            return
        for other in self.waiters:
            self.scheduler.order.note(key, "wake", self.generation + 1, other)
            other.clock.join(self.clock)
            self.scheduler.wake(other, role.time)
        role.clock.join(self.clock)
        self.arrived, self.waiters = 0, []
        self.generation += 1
