"""`StoredSums` of queries that are trained on."""

from __future__ import annotations

import copy
from functools import partial

import torch

from gdpa_kernels.serving.sums import StoredSums
from tests.stateful.batches import drawn
from tests.stateful.machine import (
    LINES_OF_TWO,
    MODES,
    Interruption,
    Machine,
    difference,
    interleaved,
    is_refusal,
    mode_of,
    operation,
)

USERS, EVENTS, HEAD_DIM = 4, 40, 33
CHANGES = (((0,), (3,)), ((1,), (1,)), ((0, 1), (2, 5)), ((2, 0, 1), (1, 0, 7)), ((3,), (20,)))
"""Users, and how many events of each."""
KINDS = (("reference", True), ("v0_eager", True), ("v0_eager", False), ("reference", False))
"""impl, and whether sums are exact."""
MOST_CALLS = 12
Call = tuple[str, tuple[int, ...], tuple[tuple[int, ...], ...]]
"""add, delete or clear; whose events; which of each."""
AT = tuple(range(len(KINDS)))


def events_held(calls: list[Call], user: int) -> list[int]:
    events: list[int] = []
    for name, users, parts in calls:
        for event in parts[users.index(user)] if user in users else ():
            events.append(event) if name == "add" else events.remove(event)
        if name == "clear" and user in users:
            events = []
    return events


def make(sums: StoredSums, name: str, users: tuple[int, ...], parts: tuple) -> None:
    """A call on sums."""
    if name == "clear":
        return sums.clear(torch.tensor(users))
    events = [event for part in parts for event in part]
    k, v = (drawn(71 + i, EVENTS, 2, HEAD_DIM)[events] for i in range(2))
    ends = torch.tensor([0, *map(len, parts)]).cumsum(0)
    return getattr(sums, name)(torch.tensor(users), k, v, ends)


def values(sums: StoredSums) -> tuple[torch.Tensor, ...]:
    return sums.value(), sums.count.clone(), sums.stale()


class Stored:
    """Shared sums of the queries as they are now, and the calls that made them."""

    def __init__(self, q: torch.Tensor, impl: str, exact: bool):
        self.options = {"impl": impl, "exact": exact}
        self.queries = q.clone()
        self.sums = StoredSums(q, USERS, **self.options)
        self.calls: list[Call] = []

    def values(self, calls: list[Call]) -> tuple[torch.Tensor, ...]:
        """What the same calls give on new sums; of exact ones what they leave, each event alone."""
        sums = StoredSums(self.queries, USERS, **self.options)
        if self.options["exact"]:
            users = range(USERS)
            calls = [("add", (u,), ((event,),)) for u in users for event in events_held(calls, u)]
        for call in calls:
            make(sums, *call)
        return values(sums)


class Sums(Machine):
    """Stored sums: events come and go, queries change, states are stored and loaded."""

    def __init__(self) -> None:
        super().__init__()
        self.queries = [drawn(70, 3, 2, HEAD_DIM).clone() for _ in KINDS]
        self.stored: list[Stored | None] = [None] * len(KINDS)
        self.states: list[tuple[int, dict, Stored, list[Call]]] = []

    def sums_of(self, at: int) -> Stored:
        """Shared sums, made when they are first asked for. Raises Refusal if the library does not
        make such."""
        if self.stored[at] is None:
            self.stored[at] = self.attempt(lambda: Stored(self.queries[at], *KINDS[at]))
        return self.stored[at]

    def call_of(self, stored: Stored, name: str, users: tuple, counts: tuple) -> Call:
        """A call with events that are new, or held."""
        held = [events_held(stored.calls, user) for user in users]
        if name == "add":
            parts = [
                tuple((len(x) * 5 + 7 * user + i) % EVENTS for i in range(n))
                for user, n, x in zip(users, counts, held, strict=True)
            ]
        else:
            parts = [tuple(x[:n]) for n, x in zip(counts, held, strict=True)]
        return name, users, tuple(parts) if name != "clear" else ((),) * len(users)

    def _settle(self, stored: Stored, call: Call) -> None:
        """After a call that was interrupted: it was made, or it was not."""
        after = stored.values([*stored.calls, call])
        actual = values(stored.sums)
        if not difference(actual, after):
            stored.calls.append(call)
        elif difference(actual, stored.values(stored.calls)):
            self.fault("half of a call", difference(actual, after))
            self.stored[self.stored.index(stored)] = None

    @operation(10, at=AT, name=("add", "add", "delete", "clear"), change=CHANGES, mode=MODES)
    def change(self, at, name, change, mode) -> None:
        stored = self.sums_of(at)
        if len(stored.calls) >= MOST_CALLS:
            self.stored[at] = None
            return
        call = self.call_of(stored, name, *change)
        try:
            with mode_of(mode):
                self.attempt(lambda: make(stored.sums, *call))
        except Interruption:
            self._settle(stored, call)
            raise
        self.answered["change"] += 1
        stored.calls.append(call)

    @operation(6, at=AT, mode=MODES)
    def value(self, at, mode) -> None:
        stored = self.sums_of(at)

        def shared() -> tuple[torch.Tensor, ...]:
            with mode_of(mode):
                return values(stored.sums)

        self.judge(shared, lambda: stored.values(stored.calls))

    @operation(2, at=AT)
    def train(self, at) -> None:
        """An optimizer's step on the queries, which change where they are."""
        self.queries[at].mul_(1.5)

    @operation(1, at=AT)
    def again(self, at) -> None:
        """New sums, of the queries as they are now."""
        self.stored[at] = None
        self.sums_of(at)

    @operation(2, at=AT)
    def save(self, at) -> None:
        stored = self.sums_of(at)
        state = copy.deepcopy(self.attempt(stored.sums.state_dict))
        self.states.append((at, state, stored, [*stored.calls]))

    @operation(2, back=tuple(range(3)))
    def load(self, back) -> None:
        """Into the sums of the same options that are there now."""
        if not self.states:
            return
        at, state, saved, calls = self.states[-1 - back % len(self.states)]
        stored = self.sums_of(at)
        try:
            self.attempt(lambda: stored.sums.load_state_dict(state))
        except Interruption:
            self.stored[at] = None
            raise
        self.answered["load"] += 1
        if difference(stored.queries, saved.queries):
            self.fault("answer where none is right", "sums of other queries were loaded")
            self.stored[at] = None
            return
        stored.calls = [*calls]

    @operation(1, at=AT, line=LINES_OF_TWO)
    def two_changes(self, at, line) -> None:
        """Events of two users in two threads."""
        stored = self.sums_of(at)
        calls = [self.call_of(stored, "add", (user,), (3 + user,)) for user in (1, 2)]
        for error in interleaved(*(partial(make, stored.sums, *call) for call in calls), line):
            if isinstance(error, Exception):
                if not is_refusal(error):
                    raise error
                self.stored[at] = None
                return
        stored.calls += calls
        self.judge(lambda: values(stored.sums), lambda: stored.values(stored.calls))
