"""Orders: who runs next, wherever a schedule has a choice.

A *thread* is a role, or a queue of asynchronous operations that complete one after the other; most
copies are a queue of their own. An order is repeated by `run(schedule=...)` with its name:

| name               | order |
|--------------------|-------|
| `modelled`         | what is due first in modelled time |
| `7`                | random, of this seed |
| `choices:0.12=1`   | the least recently chosen, but at choice 12 of group 0 thread 1 |

What one order decides for a launch it decides for each group of clusters that run together.
"""

import random
from collections.abc import Sequence
from typing import Any

LATE_COPIES = 4
LATENESS = 32


class Order:
    """Chooses among threads; this one by modelled time, for which the scheduler knows all."""

    name = "modelled"
    modelled = True

    def begin(self) -> None:
        """Begin a group of clusters, before they start."""

    def enter(self, thread: Any, alone: bool = False) -> None:
        """Register a new thread; `alone`: it is a single operation."""

    def enables(self, thread: Any) -> None:
        """Record that the running thread makes another, which could not, take a step."""

    def note(self, what: str, kind: str, tag: Any, thread: Any = None) -> None:
        """Record that the running thread, or `thread` next, does to `what` what others notice."""

    def choose(self, able: Sequence[Any]) -> Any:
        """Choose who of those that can runs next."""
        raise NotImplementedError

    def __str__(self) -> str:
        return self.name


class Random(Order):
    """Order with equal chances, but one copy in LATE_COPIES is late, as one that touches a page for
    the first time: it is among the candidates of one choice in LATENESS, and of those without any
    other."""

    modelled = False

    def __init__(self, seed: int):
        self.name, self._seed = str(seed), seed

    def begin(self) -> None:
        self._random, self._late = random.Random(self._seed), set()

    def enter(self, thread: Any, alone: bool = False) -> None:
        if alone and not self._random.randrange(LATE_COPIES):
            self._late.add(thread)

    def choose(self, able: Sequence[Any]) -> Any:
        prompt = [one for one in able if one not in self._late]
        if prompt and self._random.randrange(LATENESS):
            able = prompt
        return self._random.choice(able)


class Choices(Order):
    """Order of the least recently chosen thread, except where `exceptions` names another.

    exceptions: (group, choice) -> number of the thread, in the order in which they became known.
    taken: those that were not the usual one. groups: of clusters, that have begun. step: choices
    made in the last.
    """

    modelled = False

    def __init__(self, exceptions: dict[tuple[int, int], int] | None = None):
        self._exceptions, self.groups = exceptions or {}, 0
        self.taken: dict[tuple[int, int], int] = {}

    @property
    def name(self) -> str:
        parts = (f"{group}.{step}={thread}" for (group, step), thread in self.taken.items())
        return f"choices:{','.join(parts)}"

    def begin(self) -> None:
        self.groups, self.step = self.groups + 1, 0
        self.numbers: dict[Any, int] = {}
        self._turns: dict[Any, int] = {}

    def enter(self, thread: Any, alone: bool = False) -> None:
        self.numbers[thread], self._turns[thread] = len(self.numbers), 0

    def choose(self, able: Sequence[Any]) -> Any:
        self.step += 1
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
    raise ValueError(f'schedule must be "modelled", a seed or "choices:...", got {schedule!r}')
