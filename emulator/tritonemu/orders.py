"""Orders: who runs next, wherever a schedule has a choice.

A *thread* is a role, or a queue of asynchronous operations that complete one after the other; most
copies are a queue of their own. An order is repeated by `run(schedule=...)` with its name:

| name               | order |
|--------------------|-------|
| `modelled`         | what is due first in modelled time |
| `7`                | random, of this seed |
| `pct:7:3:450`      | by random priorities: seed 7, depth 3, 450 steps (see `Priorities`) |
| `choices:0.12=1`   | the least recently chosen, but at choice 12 of group 0 thread 1 |

What one order decides for a launch it decides for each group of clusters that run together.
"""

import random
from collections.abc import Sequence
from typing import Any

LATE_COPIES = 4
LATENESS = 32


class Order:
    """Chooses among threads; this one by modelled time, for which the scheduler knows all.

    steps, threads: the most choices made, and threads met, in one group of clusters.
    """

    name = "modelled"
    modelled = True

    def __init__(self) -> None:
        self.groups = self.steps = self.threads = self.step = self.met = 0

    def begin(self) -> None:
        """Begin a group of clusters, before they start."""
        self.groups += 1
        self.step = self.met = 0

    def enter(self, thread: Any, alone: bool = False) -> None:
        """Register a new thread; `alone`: it is a single operation."""
        self.met += 1
        self.threads = max(self.threads, self.met)

    def enables(self, thread: Any) -> None:
        """Record that the running thread makes another, which could not, take a step."""

    def note(self, what: str, kind: str, tag: Any, thread: Any = None) -> None:
        """Record that the running thread, or `thread` next, does to `what` what others notice."""

    def choose(self, able: Sequence[Any]) -> Any:
        self.step += 1
        self.steps = max(self.steps, self.step)
        return self.pick(able)

    def pick(self, able: Sequence[Any]) -> Any:
        raise NotImplementedError

    def __str__(self) -> str:
        return self.name


class Random(Order):
    """Order with equal chances, but one copy in LATE_COPIES is late, as one that touches a page for
    the first time: it is among the candidates of one choice in LATENESS, and of those without any
    other."""

    modelled = False

    def __init__(self, seed: int):
        super().__init__()
        self.name = str(seed)
        self._seed = seed

    def begin(self) -> None:
        super().begin()
        self._random, self._late = random.Random(self._seed), set()

    def enter(self, thread: Any, alone: bool = False) -> None:
        super().enter(thread, alone)
        if alone and not self._random.randrange(LATE_COPIES):
            self._late.add(thread)

    def pick(self, able: Sequence[Any]) -> Any:
        prompt = [one for one in able if one not in self._late]
        if prompt and self._random.randrange(LATENESS):
            able = prompt
        return self._random.choice(able)


class Priorities(Order):
    """Probabilistic concurrency testing: Burckhardt et al., ASPLOS 2010.

    Each thread gets a random priority, and the first of those that can run does. At depth - 1
    random ones of the steps, the thread that would run falls below all others. With n threads and k
    steps, a mistake that needs `depth` steps in a certain order shows with a probability of at
    least 1 / (n k^(depth - 1)). A thread that was chosen PATIENCE times in a row while others could
    run, which a loop that waits for memory does, falls too; the bound is for kernels without such.
    """

    modelled = False
    PATIENCE = 200

    def __init__(self, seed: int, depth: int = 3, steps: int = 0):
        super().__init__()
        self.name = f"pct:{seed}:{depth}:{steps}"
        self._seed, self._depth, self._length = seed, depth, steps

    def begin(self) -> None:
        super().begin()
        self._random = random.Random(f"{self._seed} {self.groups}")
        self._priorities: dict[Any, float] = {}
        changes = range(self._depth - 1 if self._length else 0)
        self._changes = {self._random.randint(1, self._length): -1 - i for i in changes}
        self._lowest, self._last, self._repeated = -float(self._depth), None, 0

    def enter(self, thread: Any, alone: bool = False) -> None:
        super().enter(thread, alone)
        self._priorities[thread] = self._random.random()

    def pick(self, able: Sequence[Any]) -> Any:
        first = max(able, key=self._priorities.__getitem__)
        if self.step in self._changes:
            self._priorities[first] = self._changes[self.step]
            first = max(able, key=self._priorities.__getitem__)
        self._repeated = self._repeated + 1 if first is self._last else 0
        if self._repeated > self.PATIENCE and len(able) > 1:
            self._lowest -= 1
            self._priorities[first], self._repeated = self._lowest, 0
            first = max(able, key=self._priorities.__getitem__)
        self._last = first
        return first

    def bound(self) -> float:
        """Bound the probability from below, for the threads and steps met so far."""
        return 1 / (max(1, self.threads) * max(1, self.steps) ** (self._depth - 1))


class Choices(Order):
    """Order of the least recently chosen thread, except where `exceptions` names another.

    exceptions: (group, choice) -> number of the thread, in the order in which they became known.
    """

    modelled = False

    def __init__(self, exceptions: dict[tuple[int, int], int] | None = None):
        super().__init__()
        self._exceptions = exceptions or {}
        self.taken: dict[tuple[int, int], int] = {}

    @property
    def name(self) -> str:
        parts = (f"{group}.{step}={thread}" for (group, step), thread in self.taken.items())
        return f"choices:{','.join(parts)}"

    def begin(self) -> None:
        super().begin()
        self.numbers: dict[Any, int] = {}
        self._turns: dict[Any, int] = {}

    def enter(self, thread: Any, alone: bool = False) -> None:
        super().enter(thread, alone)
        self.numbers[thread], self._turns[thread] = len(self.numbers), 0

    def pick(self, able: Sequence[Any]) -> Any:
        usual = min(able, key=lambda each: (self._turns[each], self.numbers[each]))
        chosen = self.decide(able, usual)
        if chosen is not usual:
            self.taken[self.groups - 1, self.step - 1] = self.numbers[chosen]
        self._turns[chosen] = self.step
        return chosen

    def decide(self, able: Sequence[Any], usual: Any) -> Any:
        number = self._exceptions.get((self.groups - 1, self.step - 1))
        return next((each for each in able if self.numbers[each] == number), usual)


def order_of(schedule: "str | int | Order") -> Order:
    """Return the order of a name; ValueError for other names."""
    if isinstance(schedule, Order):
        return schedule
    kind, _, rest = str(schedule).partition(":")
    try:
        if kind == "modelled" and not rest:
            return Order()
        if kind == "pct":
            return Priorities(*map(int, rest.split(":")))
        if kind == "choices":
            exceptions = {}
            for part in filter(None, rest.split(",")):
                choice, thread = part.split("=")
                group, step = choice.split(".")
                exceptions[int(group), int(step)] = int(thread)
            return Choices(exceptions)
        if isinstance(schedule, (int, str)) and not isinstance(schedule, bool):
            return Random(int(schedule))
    except (TypeError, ValueError):
        pass
    raise ValueError(
        'schedule must be "modelled", a seed, "pct:SEED:DEPTH:STEPS" or "choices:...", got '
        f"{schedule!r}"
    )
