"""Searches: which orders to try, and what they have covered.

The first order is always the modelled one. "random" goes on with `schedules` seeds,
"exhaustive" tries every interleaving, up to those that cannot differ, and stops after `schedules`.

Exhaustive search is dynamic partial-order reduction: source sets and sleep sets (Abdulla et al.,
POPL 2014). A step of a thread reaches from one choice to the next. Two steps of different threads
are dependent, and tried in both orders unless something else orders them, if both

- change the state of a barrier, in different phases. Arrivals in one phase add up, in any order. A
  wait depends on arrivals in the phase that follows its own; those before release it, so that there
  is no other order;
- are atomics on one element, one of which changes it, or one such atomic and a plain access to the
  tensor;
- ask for the work of another CTA.

Plain accesses to one buffer or element are not tried in both orders: if nothing orders them, they
are a `Race` under any order. So races must be judged. What is left out then needs no trying: a
kernel whose only synchronisation is mbarriers, used rightly, has one class of interleavings.

An interleaving is one of steps, which end before operations on barriers and buffers, scalar
atomics, and turns of `while`. A loop that waits for memory has no bound on its turns: such a search
ends at `schedules`, and is not exhausted.
"""

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from .orders import Choices, Order, Random, order_of

DEFAULTS = {"random": 4, "exhaustive": 1000}
KINDS = tuple(DEFAULTS)

_Thread = tuple[int, int]
_Note = tuple[Hashable, str, Any]


class Search:
    """Iterates over orders, each for one execution; str() says what was covered.

    kind: one of KINDS. schedules: orders beside the modelled one, as in DEFAULTS if not given; for
    "exhaustive", the most of them. only: the name of an order, tried instead of all others. tried:
    executions begun. order: that of the last one. ValueError for other kinds and names.
    """

    def __init__(self, kind: str = "random", schedules: int | None = None, only: str | None = None):
        if kind not in KINDS:
            raise ValueError(f"search must be one of {KINDS}, got {kind!r}")
        self.kind, self.only = kind, only
        self.schedules = DEFAULTS[kind] if schedules is None else schedules
        if self.schedules < 0:
            raise ValueError(f"schedules must be at least 0, got {schedules}")
        self._first = "modelled" if only is None else only
        self.tried, self.order = 0, order_of(self._first)
        self._tree = _Tree()

    def __iter__(self) -> Iterator[Order]:
        for tried, order in enumerate(self._orders(), 1):
            self.tried, self.order = tried, order
            yield order

    def _orders(self) -> Iterator[Order]:
        yield order_of(self._first)
        if self.only is not None:
            return
        if self.kind == "exhaustive":
            yield from self._tree.executions(self.schedules)
        else:
            yield from map(Random, range(self.schedules))

    @property
    def exhausted(self) -> bool:
        """True if no other interleaving is left."""
        return self._tree.exhausted

    def as_json(self) -> dict[str, Any]:
        """Coverage, as docs/api.md lists it."""
        out: dict[str, Any] = {"search": self.only or self.kind, "schedules": self.tried}
        if self.only is None and self.kind == "exhaustive":
            classes, redundant = self._tree.classes, self._tree.useless
            out |= {"exhausted": self.exhausted, "classes": classes, "redundant": redundant}
        return out

    def __str__(self) -> str:
        if self.only is not None:
            return f"schedule {self.only}"
        if self.kind == "random":
            return f"the modelled and {self.tried - 1} random schedules"
        number = self._tree.classes
        classes = f"{number} {'class' if number == 1 else 'classes'} of interleavings"
        if self.exhausted:
            return f"all interleavings: {classes}, in {self.tried} executions"
        return f"{classes} in {self.tried} executions; there are more"


def _dependent(a: _Note, b: _Note) -> bool:
    """Return whether the order of two notes about the same thing matters, the one made after the
    other.

    Kinds and their tags: "arrive" (phase, whether it completes that), "wait" and "block" (the phase
    that follows what is waited for), "wake"; "atomic" (element or None for all, whether it changes
    it), "plain" (whether it stores).
    """
    (_, kind, tag), (_, other, of) = a, b
    if kind == "plain" or other == "plain":
        stores = [t if k == "plain" else t[1] for _, k, t in (a, b)]
        return kind != other and any(stores)
    if kind == "atomic":
        return (tag[1] or of[1]) and (tag[0] == of[0] or None in (tag[0], of[0]))
    if kind == other == "arrive":
        return tag[0] != of[0]
    if "wake" in (kind, other) or "arrive" not in (kind, other):
        return False
    return tag[0] >= of if kind == "arrive" else of[0] >= tag


def _conflict(a: Sequence[_Note], b: Sequence[_Note]) -> bool:
    """Return whether the order of two steps matters that one state permits, either of them first.

    After an arrival that completes a phase another one is in the next.
    """
    for x in a:
        for y in b:
            completes = x[1] == y[1] == "arrive" and (x[2][1] or y[2][1])
            if x[0] == y[0] and (completes or _dependent(x, y)):
                return True
    return False


@dataclass
class _Step:
    """A step of an execution: its thread, those that were able, what it did.

    after: steps that made it possible. floor: the first step of its group of clusters. sleep: what
    the next step of threads does that need not be tried here, as it was, or is covered elsewhere.
    wanted: threads to be tried here.
    """

    thread: _Thread
    able: list[_Thread]
    sleep: dict[_Thread, list[_Note]]
    floor: int
    wanted: set[_Thread]
    after: list[int] = field(default_factory=list)
    notes: list[_Note] = field(default_factory=list)


class Execution(Choices):
    """Follows the steps of an earlier execution, then avoids threads that sleep.

    steps: the choices so far. useless: the first one at which all able threads sleep, or None.
    """

    def __init__(self, prefix: list[_Thread], sleep: dict[_Thread, list[_Note]], reduced: bool):
        super().__init__()
        self._prefix, self._sleep, self._reduced = prefix, sleep, reduced
        self.trace: list[_Step] = []
        self.useless: int | None = None
        self._floor = 0
        self._enabled: dict[Any, list[int]] = {}
        self._notes: dict[Any, list[_Note]] = {}

    def begin(self) -> None:
        super().begin()
        self._floor = len(self.trace)

    def enables(self, thread: Any) -> None:
        self._enabled.setdefault(thread, []).append(len(self.trace) - 1)

    def note(self, what: Hashable, kind: str, tag: Any, thread: Any = None) -> None:
        if thread is not None:
            self._notes.setdefault(thread, []).append((what, kind, tag))
        elif self.trace and (note := (what, kind, tag)) not in self.trace[-1].notes:
            self.trace[-1].notes.append(note)

    def decide(self, able: Sequence[Any], usual: Any) -> Any:
        index, of = len(self.trace), {(self.groups - 1, self.numbers[each]): each for each in able}
        if index < len(self._prefix):
            number = self._prefix[index]
        else:
            last = self.trace[-1].notes if self.trace else []
            sleeping = self._sleep.items() if self._reduced else ()
            self._sleep = {t: n for t, n in sleeping if not _conflict(n, last)}
            awake = [thread for thread in of if thread not in self._sleep]
            if self.useless is None and not awake:
                self.useless = index
            candidates = of if self.useless is not None else awake
            number = min(candidates, key=lambda thread: (self._turns[of[thread]], thread))
        chosen = of[number]
        step = _Step(number, list(of), dict(self._sleep), self._floor, {number})
        enablers = self._enabled.get(chosen)
        step.after = [enablers.pop(0)] if enablers else []
        step.notes = self._notes.pop(chosen, [])
        self.trace.append(step)
        return chosen


class _Tree:
    """All executions, depth first. `reduced=False`: as if all steps depended on each other."""

    def __init__(self, reduced: bool = True):
        self._reduced = reduced
        self._nodes: list[_Step] = []  # of the current execution
        self.classes = self.useless = 0
        self.exhausted = False

    def executions(self, most: int) -> Iterator[Execution]:
        prefix: list[_Thread] | None = []
        sleep: dict[_Thread, list[_Note]] = {}
        for _ in range(most):
            order = Execution(prefix, sleep, self._reduced)
            yield order
            if order.useless is None:
                self.classes += 1
            else:
                self.useless += 1
            self._learn(order.trace[: order.useless], len(prefix))
            prefix, sleep = self._next()
            if prefix is None:
                self.exhausted = True
                return

    def _next(self) -> tuple[list[_Thread] | None, dict[_Thread, list[_Note]]]:
        """Return the steps up to the deepest choice that is left, and what sleeps after them."""
        while self._nodes:
            node = self._nodes[-1]
            left = [thread for thread in node.able if thread in node.wanted - node.sleep.keys()]
            if left:
                node.thread = left[0]
                return [each.thread for each in self._nodes], dict(node.sleep)
            self._nodes.pop()
        return None, {}

    def _learn(self, trace: list[_Step], known: int) -> None:
        """Learn from a finished execution about each of its choices. `known`: steps seen before."""
        self._nodes += trace[len(self._nodes) :]
        self._find_races(trace, known)
        for node, step in zip(self._nodes, trace, strict=False):
            node.sleep[step.thread] = step.notes

    def _find_races(self, trace: list[_Step], known: int) -> None:
        """Schedule the reversal of dependent steps that could change places."""
        predecessors: list[int] = []  # bits of the steps that happen before each, and of itself
        last: dict[_Thread, int] = {}
        notes: dict[Hashable, list[tuple[int, _Note]]] = {}
        for j, step in enumerate(trace):
            ordered = (1 << step.floor) - 1
            for i in (*step.after, last.get(step.thread, -1)):
                ordered |= predecessors[i] if i >= 0 else 0
            racing = set() if self._reduced else set(range(step.floor, j))
            for note in step.notes:
                for i, other in notes.get(note[0], ()):
                    releases = note[1] in ("wait", "wake") and other[1] == "arrive"
                    if releases and other[2][0] < note[2]:
                        ordered |= predecessors[i]
                    elif _dependent(note, other):
                        racing.add(i)
            for i in sorted(racing, reverse=True):
                if j >= known - 1 and not ordered >> i & 1 and trace[i].thread != step.thread:
                    self._reverse(trace, predecessors, i, j, ordered)
                ordered |= predecessors[i]
            predecessors.append(ordered | 1 << j)
            last[step.thread] = j
            for note in step.notes:
                notes.setdefault(note[0], []).append((j, note))

    def _reverse(
        self, trace: list[_Step], predecessors: list[int], i: int, j: int, ordered: int
    ) -> None:
        """Schedule a thread in place of step i that leads to step j without step i.

        ordered: what happens before step j, but for step i.
        """
        node, seen, first = self._nodes[i], 0, []
        for k in range(i + 1, j + 1):
            if k < j and predecessors[k] >> i & 1:
                continue
            earlier = predecessors[k] if k < j else ordered
            if not earlier & seen and trace[k].thread in node.able:
                first.append(trace[k].thread)
            seen |= 1 << k
        if not first:
            node.wanted.update(node.able)
        elif not node.wanted & set(first):
            node.wanted.add(trace[j].thread if trace[j].thread in first else first[0])
