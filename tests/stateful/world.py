"""All shared objects in one machine, and walks through it."""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import dataclass, field

import torch

from tests.stateful.batches import Batches
from tests.stateful.histories import Histories
from tests.stateful.machine import Drawing, Fault, Step, poisoned
from tests.stateful.stored import Sums

STEPS = 100
"""Of a walk, before all objects are made anew."""


class World(Batches, Histories, Sums):
    """Everything that outlives a call."""


@dataclass
class Walks:
    """What walks have shown: of each kind of fault the first, with the steps before it."""

    steps: int = 0
    seconds: float = 0.0
    answered: Counter[str] = field(default_factory=Counter)
    refused: Counter[str] = field(default_factory=Counter)
    spent: Counter[str] = field(default_factory=Counter)
    faults: dict[tuple[str, str], tuple[Fault, float, list[Step]]] = field(default_factory=dict)

    def walk(self, seed: str, steps: int = STEPS, only: tuple[str, ...] = ()) -> None:
        """One walk on new objects."""
        drawing, taken = Drawing(World, seed, only), []
        start = time.perf_counter()
        with poisoned():
            world = World()
            for _ in range(steps):
                before, begin = len(world.faults), time.perf_counter()
                taken.append(drawing.step())
                world.run(taken[-1])
                now = time.perf_counter()
                self.spent[taken[-1].name] += now - begin
                for fault in world.faults[before:]:
                    shown = fault, self.seconds + now - start, [*taken]
                    self.faults.setdefault(fault.key, shown)
        self.seconds += time.perf_counter() - start
        self.steps += steps
        self.answered += world.answered
        self.refused += world.refused


def walked(seed: int, steps: int, minutes: float = float("inf"), only=()) -> Walks:
    """Walks until so many steps are taken or minutes are over."""
    torch.set_num_threads(1)
    walks = Walks()
    number = 0
    while walks.steps < steps and walks.seconds < 60 * minutes:
        walks.walk(f"{seed} {number}", min(STEPS, steps - walks.steps), only)
        number += 1
    return walks
