"""Roles, and the order in which they run.

A `Role` is one instruction stream of a CTA: the kernel itself, or an `async_task` of it. Roles are
greenlets: exactly one runs, until it reaches an operation that another role can notice. There the
scheduler chooses who continues. Asynchronous units (TMA, tensor cores) are a queue of events.

`schedule="modelled"`: the role or event with the smallest modelled time goes first. Any other order
(see `orders`) chooses freely: every interleaving that the barriers permit can occur. Copies then
complete in any order, whoever asked for them, as the hardware promises no other.

Modelled time is in cycles and serves the timeline only. What a role computes takes the time of its
own warps, and waits for the `engines` that it shares with other roles. COPY_LATENCY is that of a
TMA copy on an idle machine, to the nearest hundred cycles.
"""

import contextvars
import math
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from greenlet import greenlet

from .clocks import Access, Clock
from .engines import ISSUED_RESULTS, MUFU_RESULTS, SCHEDULERS
from .errors import Deadlock, EmulatorError, Location, Ordering, Wait, current_location, line_in
from .orders import Order
from .tile import WORK
from .timeline import Arrow, Event, Mark, Spot, Timeline

REMEMBERED = 64  # waits and arrivals of a role, for findings, and loads
COPY_LATENCY = 600
ATOMIC_LATENCY = 700


class Turn(NamedTuple):
    """An iteration of a `for` loop. loop: which execution of it."""

    loop: Any
    location: Location
    number: int


class Role:
    """An instruction stream: its clock, its modelled time, and what it has in flight.

    dots, stores, landings, copies: asynchronous operations that the role waits for by their order
    (wgmma, what TMA stores read, what they write, cp.async groups), oldest first. mma: the tcgen05
    operations to be committed. dots_issued: the bits of all its MMAs; they execute in order. task:
    whether it is a task rather than the kernel around it. tiles: those of the kernel around it, by
    name, which it must not use. staged: bytes of shared memory of `stage`. word: region and element
    of global memory that it read last; spun: those of the last turn of a loop. stored: its epoch
    when it last stored a block there, or accessed other memory. loaded: the last blocks that it has
    loaded there since its warps met. turns: of the `for` loops it is in, outermost first. turn,
    spins, spins_at: of `spinning`: the last test of a loop; after which change, and where, it was
    known to spin. lanes: the role in each CTA of its program, itself first, where one instruction
    stream (Gluon) stands for all of them; each has a clock, a time and operations in flight of its
    own. leader: the first one, which has the greenlet. branch: the lanes that take the branch it is
    in. fences: where the compiler has put fences for it. touched: bytes of storages that it, or a
    lane, has read and written since it last had one.
    """

    def __init__(
        self, scheduler: "Scheduler", cta: Any, name: str, warps: int, body: Callable,
        leader: "Role | None" = None,
    ):  # fmt: skip
        self.scheduler, self.cta, self.name, self.warps = scheduler, cta, name, warps
        scheduler.numbers["roles"] += 1
        self.index = scheduler.numbers["roles"]
        self.epoch, self.stored = 1, 0
        self.clock = Clock({self.index: 1})
        self.time = 0.0
        self.replica: int | None = None
        self.waiting: Callable[[], Wait] | None = None
        self.dots: list[Operation] = []
        self.stores: list[Operation] = []
        self.landings: list[Operation] = []
        self.copies: list[list[Operation]] = [[]]
        self.mma: list[Operation] = []
        self.dots_issued = 0
        self.word: tuple[Any, int] | None = None
        self.spun: tuple[Any, int] | None = None
        self.turns: tuple[Turn, ...] = ()
        self.loaded: deque[Any] = deque(maxlen=REMEMBERED)
        self.turn: Any = None
        self.spins, self.spins_at = -1, ("", 0)
        self.task, self.tiles, self.staged = False, {}, 0
        self.fences: set[Location] = set()
        self.touched: dict[Any, tuple[int, int]] = {}
        self.leader, self.lanes = leader or self, [self]
        self.branch = self.lanes
        if leader is not None:
            leader.lanes.append(self)
            return
        self.greenlet = greenlet(lambda: self._run(body))
        self.greenlet.gr_context = contextvars.copy_context()

    @property
    def label(self) -> str:
        return f"{self.name} of CTA {self.cta.number}"

    @property
    def spot(self) -> Spot:
        """CTA, lane and present time, which counts tile arithmetic that is not charged yet."""
        (results, special), share = WORK, min(self.warps / SCHEDULERS, 1)
        work = max(results / ISSUED_RESULTS, special / MUFU_RESULTS) / share
        return self.cta.number, self.name, self.time + work

    def mark(self, line: int, what: str, lasts: bool = False) -> Mark:
        """Create a mark at the role's present."""
        return Mark(*self.spot, line, f"{self.label} {what}", lasts)

    def _run(self, body: Callable) -> None:
        try:
            body()
            self.charge()
        except EmulatorError as error:
            self.charge()
            error.role = error.role or self.scheduler.role.label
            error.marks = error.marks or (self.mark(error.line, f"ends: {type(error).__name__}"),)
            raise

    def charge(self, cycles: float = 0.0) -> None:
        """Advance time by the tile arithmetic done since the last call, and by `cycles`."""
        results, special = WORK
        if results or special:
            WORK[:] = 0, 0
            share, engines = min(self.warps / SCHEDULERS, 1), self.cta.engines
            end = max(
                self.time + results / ISSUED_RESULTS / share,
                self.time + special / MUFU_RESULTS / share,
                engines["issue"].fit(self.time, results / ISSUED_RESULTS),
                engines["MUFU"].fit(self.time, special / MUFU_RESULTS),
            )
            self.scheduler.trace("compute", "", self, self.time, end)
            self.time = end
        self.time += cycles

    def stage(self, num_bytes: int) -> None:
        """Count the staging memory of a descriptor's own `load` or `store` of registers.

        The compiler allocates it, for each task anew, and for the kernel around the tasks where a
        dead buffer may have been: that is not counted.
        """
        if self.task and num_bytes > self.staged:
            self.cta.reserve(num_bytes - self.staged)
            self.staged = num_bytes

    def release(self, all_warps: bool = True, met: bool = True) -> Clock:
        """Return the clock to hand over; what the role does from now on is not in it.

        all_warps: not so if one thread hands it over, before which the others need not have come.
        met: the same of shared and tensor memory.
        """
        if all_warps:
            self.clock.epochs[-self.index] = self.epoch
        if met or self.warps == 1:
            self.clock.met[self.index] = self.epoch
        clock = self.clock.copy()
        self.epoch += 1
        self.clock.epochs[self.index] = self.epoch
        return clock

    def in_step(self) -> "Iterator[Role]":
        """Yield the lanes of this branch, each as the running role until the next one. Run it to
        its end: after an exception the lane stays the running role, which is whose fault it is."""
        for lane in self.branch:
            lane.time = max(lane.time, self.time)
            self.scheduler.role = lane
            yield lane
        self.scheduler.role = self
        end = max(lane.time for lane in self.lanes)
        for lane in self.lanes:
            lane.time = end

    def joined(self) -> None:
        """Let the lanes meet: what each knows, all of them know."""
        clocks = [lane.release() for lane in self.lanes]
        for lane in self.lanes:
            for clock in clocks:
                lane.clock.join(clock)

    def known(self) -> Clock:
        """Join the knowledge of all lanes."""
        if len(self.lanes) == 1:
            return self.clock
        clock = Clock()
        for lane in self.lanes:
            clock.join(lane.clock)
        return clock

    def release_by_one(self, kind: str, location: Location) -> Clock:
        """Release by one thread, with an instruction of this kind (see `assembly`)."""
        if self.warps > 1 and self.cta.launch.threads is not None:
            self.cta.launch.threads.note(self, kind, location)
        return self.release(met=False)

    def release_by_each(self) -> Clock:
        """Release by every thread for itself: they need not have met."""
        clock = self.release(met=False)
        clock.met[self.index] = self.epoch - 1
        return clock

    def meet(self) -> None:
        """Let all warps meet: what each has done to memory, all of them know."""
        self.loaded.clear()
        if self.stored > self.clock.met.get(self.index, 0):
            self.release()

    def retire(self) -> None:
        """End the role, and with it its cp.async, which are its threads' own."""
        for operation in (operation for group in self.copies for operation in group):
            self.clock.operations |= operation.bit

    def fence(self) -> None:
        """Let later copies rely on what the role knows of shared memory."""
        released = self.release(met=False)
        self.clock.fenced, self.clock.settled = released.epochs, released.operations
        self.leader.touched.clear()

    def touch(self, storage: Any, mask: int, write: bool) -> None:
        """Record that the role itself accesses these bytes of shared memory."""
        reads, writes = self.leader.touched.get(storage, (0, 0))
        masks = (reads, writes | mask) if write else (reads | mask, writes)
        self.leader.touched[storage] = masks

    def access(
        self, write: bool, mask: int, location: Location | None = None, name: str = "",
        where: Any = None,
    ) -> Access:  # fmt: skip
        location, who = location or current_location(), self.label
        return Access(self.index, self.epoch, 0, write, mask, location, who, name, where, self.spot)


@dataclass(eq=False)
class Operation:
    """An asynchronous operation: its bit, and the clock of whoever learns that it completed.

    generic: whether it accesses shared memory as its role does, as cp.async. stores: whether it
    stores registers there, as st.async.
    """

    role: Role
    kind: str
    bit: int
    clock: Clock
    location: Location
    end: float = 0.0
    generic: bool = False
    stores: bool = False

    def access(self, write: bool, mask: int, name: str = "", where: Any = None) -> Access:
        who, role = f"{self.kind} issued by {self.role.label}", self.role
        spot = role.cta.number, "tensor core" if self.kind == "async_dot" else "TMA", role.time
        return Access(
            *(role.index, role.epoch, self.bit, write, mask, self.location, who, name, where, spot),
            generic=self.stores,
            kind=self.kind,
        )

    def known(self) -> Clock:
        """Join what the operation follows with what any lane of its role knows."""
        if len(self.role.leader.lanes) == 1:
            return self.clock
        clock = self.role.leader.known()
        clock.join(self.clock)
        return clock


@dataclass(frozen=True)
class Synced:
    """A wait for a phase or an arrival in it, who it is, and its epoch then."""

    kind: str
    epoch: int
    who: str
    barrier: Any
    phase: int
    location: Location


def _several(synced: Iterable[Synced]) -> list[Synced]:
    """Select the first two at different arrays of barriers."""
    by_array: dict[Any, Synced] = {}
    for each in synced:
        by_array.setdefault(each.barrier.known, each)
    return list(by_array.values())[:2]


@dataclass
class Scheduler:
    """Runs the roles of the clusters of CTAs that run together to the end.

    order: who runs next. numbers: counters of roles, operations and steps, shared by all clusters
    of a launch. deadline: the `time.monotonic` by which it must end. timeline: to be filled, or
    None. changes: how often anything changed that a loop may wait for. synced: of each role, by its
    index, the last waits and arrivals on mbarriers. last: the end of the last event.
    """

    order: Order
    numbers: dict[str, int]
    timeline: Timeline | None = None
    max_steps: int | None = None
    deadline: float = math.inf
    changes: int = 0
    last: float = 0.0
    ready: list[Role] = field(default_factory=list)
    blocked: list[Role] = field(default_factory=list)
    queues: dict[Any, deque] = field(default_factory=dict)
    role: Role | None = None
    synced: dict[int, deque[Synced]] = field(default_factory=dict)
    _known: set[Any] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.order.begin()
        WORK[:] = 0, 0  # of a launch that ended with an exception

    def trace(
        self, kind: str, name: str, lane: Any, start: float, end: float, cta: int = -1,
        location: Location | None = None, **fields: Any,
    ) -> None:  # fmt: skip
        """Add an event to the timeline, at the line of its file that leads to `location`. lane: a
        role, or the name of an engine of `cta`."""
        self.last = max(self.last, end)
        if self.timeline is None:
            return
        if isinstance(lane, Role):
            lane, cta = lane.name, lane.cta.number
        line = line_in(location or current_location(), self.timeline.file)
        self.timeline.events.append(Event(cta, lane, kind, name, start, end, line, **fields))

    def trace_release(self, name: str, phase: int, lane: Any, time: float, waiter: Role) -> None:
        """Trace that `lane` completes a phase of the barrier `name`, and `waiter` goes on."""
        if self.timeline is not None:
            source, released = getattr(lane, "name", lane), (waiter.name, waiter.time)
            arrow = Arrow(waiter.cta.number, name, phase, source, time, *released)
            self.timeline.arrows.append(arrow)

    def issue(self, kind: str, after: int = 0, end: float = 0.0) -> Operation:
        """Issue an asynchronous operation of the running role; `after`: earlier ones it follows."""
        role = self.role
        bit = 1 << self.numbers["operations"]
        self.numbers["operations"] += 1
        location = current_location()
        clock = role.release_by_one("mma" if kind == "async_dot" else "copy", location)
        clock.operations |= bit | after
        return Operation(role, kind, bit, clock, location, end)

    def at(self, time: float, action: Callable[[], None], queue: Any = None) -> None:
        """Perform `action` at a modelled time; those of one queue are performed in order."""
        self.changes += 1
        key = object() if queue is None else queue
        if key not in self._known:
            self._known.add(key)
            self.order.enter(key, queue is None)
        self.queues.setdefault(key, deque()).append((time, action))
        self.order.enables(key)

    def start(self, role: Role) -> None:
        self.changes += 1
        self.ready.append(role)
        self.order.enter(role)
        self.order.enables(role)

    def run(self) -> None:
        """Run until every role has ended; raises Deadlock if none can continue."""
        while self.ready or self.queues:
            chosen = self._choose()
            if isinstance(chosen, Role):
                self.ready.remove(chosen)
                self.role = chosen
                chosen.greenlet.parent = greenlet.getcurrent()
                chosen.greenlet.switch()
                if chosen.greenlet.dead:
                    self.changes += 1
                self.role = None
            else:
                self.changes += 1
                queue = self.queues[chosen]
                _, action = queue.popleft()
                if not queue:
                    del self.queues[chosen]
                action()
        if self.blocked:
            raise Deadlock(self.stuck())

    def stuck(self) -> list[tuple[Role, Wait]]:
        """List the roles that wait for more than others to end, and what for."""
        return [(role, role.waiting()) for role in self.blocked if role.waiting]

    def _choose(self) -> Any:
        if not self.order.modelled:
            return self.order.choose([*self.ready, *self.queues])
        role = min(self.ready, key=lambda r: r.time, default=None)
        if self.queues:
            queue = min(self.queues, key=lambda q: self.queues[q][0][0])
            if role is None or self.queues[queue][0][0] <= role.time:
                return queue
        return role

    def checkpoint(self, cycles: float = 0.0) -> Role:
        """Yield before an operation that other roles can notice: what is due first runs first."""
        role = self.role
        role.charge()
        self.numbers["steps"] += 1
        self.check_time()
        if self.max_steps is not None and self.numbers["steps"] > self.max_steps:
            raise EmulatorError(f"the kernel must end within max_steps={self.max_steps} steps")
        if self.ready or self.queues:
            early = not self.order.modelled or any(r.time < role.time for r in self.ready)
            if early or any(queue[0][0] <= role.time for queue in self.queues.values()):
                self.ready.append(role.leader)
                self._leave(role)
        role.charge(cycles)
        return role

    def check_time(self) -> None:
        """Raise EmulatorError after the deadline."""
        if time.monotonic() > self.deadline:
            raise EmulatorError("the kernel must end within its timeout, and is still here")

    def synchronises(
        self, kind: str, role: Role, barrier: Any, location: Location, phase: int | None = None
    ) -> None:
        """Record that a role waits for or arrives at an mbarrier, or requests an arrival; phase:
        that it waits for, None for the present one."""
        log = self.synced.setdefault(role.index, deque(maxlen=REMEMBERED))
        phase = barrier.phase if phase is None else phase
        log.append(Synced(kind, role.epoch, role.label, barrier, phase, location))

    def around(self, new: Access, old: Access | None = None) -> dict[str, Any]:
        """Collect two accesses and what might have ordered them, for a finding: the last waits
        before `new`, the arrivals about `old`, and their barriers."""
        waits = [s for s in self.synced.get(new.role, ()) if s.kind == "wait"]
        near = [("before", s) for s in _several(reversed(waits))]
        if old is not None:
            arrivals = [s for s in self.synced.get(old.role, ()) if s.kind == "arrival"]
            # A role's own accesses come before what it hands over in a later epoch.
            first = old.epoch + (not old.operation)
            later = [s for s in arrivals if s.epoch >= first]
            earlier = [s for s in arrivals if s.epoch < first]
            near += [("after", s) for s in _several(later)]
            near += [("before", s) for s in earlier[-1:]]
        if new.operation:
            issued = [s for s in self.synced.get(new.role, ()) if s.kind == "arrival"]
            near += [("after", s) for s in issued[-1:] if s.epoch >= new.epoch]
        orderings = tuple(
            Ordering(s.who, s.kind, s.barrier.name, s.phase, when, s.location) for when, s in near
        )
        return {
            "related": tuple((each.what, each.location) for each in orderings),
            "orderings": orderings,
            "barriers": tuple(dict.fromkeys(s.barrier.known for _, s in near)),
            "accesses": (new,) if old is None else (old, new),
        }

    def tell_time(self) -> float:
        """Return the modelled time of the running role, a different one at each call."""
        self.changes += 1
        return self.role.time

    def block(self, waiting: Callable[[], Wait] | None) -> None:
        """Suspend the running role until somebody wakes it; `waiting` says what for.

        None: it waits for other roles to end, and is not to blame in a deadlock.
        """
        role = self.role
        self.changes += 1
        role.waiting = waiting
        self.blocked.append(role)
        self._leave(role)

    def _leave(self, role: Role) -> None:
        """Suspend the running role; another lane may have its greenlet."""
        role.leader.greenlet.parent.switch()
        self.role = role

    def wake(self, role: Role, time: float) -> None:
        self.changes += 1
        self.blocked.remove(role)
        role.waiting = None
        role.time = max(role.time, time)
        self.ready.append(role.leader)
        self.order.enables(role.leader)
