"""`PagedCache`, its pages and layers, which requests of many users share."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import count as numbers

import torch

from gdpa_kernels import GDPASelfAttention, Lengths, Mask
from gdpa_kernels.serving import PagedCache, Pages, score
from gdpa_kernels.serving.layers import candidates, extend
from gdpa_kernels.serving.validity import HistoryRules
from tests.stateful.batches import differentiated, drawn, emulated
from tests.stateful.machine import (
    LINES_OF_TWO,
    MODES,
    Interruption,
    Machine,
    Refusal,
    difference,
    interleaved,
    is_refusal,
    mode_of,
    operation,
)

HEADS, NUM_PAGES = 2, 9
TOKENS = 512
"""Rows that tokens have, by their numbers."""
Row = tuple[torch.Tensor, torch.Tensor]
"""Of a token in a layer: k and v."""


def token(user: int, epoch: int, position: int) -> int:
    """Which one stands there."""
    return (user * 97 + epoch * 31 + position) % TOKENS


@dataclass(eq=False)
class History:
    """What a cache should know of a user: tokens, and of each layer the rows that were written.

    expected: events after an edit, until they are there again.
    """

    epoch: int
    tokens: list[int] = field(default_factory=list)
    rows: dict[tuple[int, int], Row] = field(default_factory=dict)
    expected: int | None = None

    def written(self, layer: int, begin: int, end: int) -> list[Row] | None:
        """Rows of a layer, None unless all are there."""
        rows = [self.rows.get((layer, i)) for i in range(begin, end)]
        return None if None in rows else rows

    @property
    def is_whole(self) -> bool:
        return self.expected is None


@dataclass(frozen=True)
class Part:
    """Of some pages: rows [begin, end) of a user's history, and whether they were all of it."""

    user: int
    history: History
    begin: int
    end: int
    is_whole: bool


@dataclass(frozen=True)
class Handle:
    """`Pages` that a caller holds."""

    pages: Pages | None
    parts: tuple[Part, ...]
    appended: bool

    @property
    def users(self) -> list[int]:
        return [part.user for part in self.parts]


class Cache:
    """A shared cache with the layers that use it, and its rules."""

    def __init__(
        self, rules: HistoryRules, layers: Sequence[GDPASelfAttention], page_size: int = 4
    ):
        self.rules, self.layers, self.page_size = rules, layers, page_size
        self.dtype, self.head_dim = layers[0].qkv.weight.dtype, layers[0].head_dim
        self.cache = self.new()
        self.histories: dict[int, History] = {}
        self.handles: list[Handle] = []
        self.epochs = numbers(1)

    def new(self, num_pages: int = NUM_PAGES) -> PagedCache:
        size = self.page_size, HEADS, self.head_dim
        cache = PagedCache(self.rules, num_pages, *size, dtype=self.dtype)
        cache.data.fill_(torch.nan)
        return cache

    def rows(self, seed: int, count: int = TOKENS) -> torch.Tensor:
        """What goes into a layer."""
        return drawn(seed, count, HEADS * self.head_dim, dtype=self.dtype)

    def heads(self, seed: int, count: int = TOKENS) -> torch.Tensor:
        """Queries, keys or values."""
        return drawn(seed, count, HEADS, self.head_dim, dtype=self.dtype)

    def kernels(self):
        """The context in which candidates are scored: pages of 64 are for an emulated GPU."""
        return emulated("v8_own_waits") if self.page_size == 64 else contextlib.nullcontext()

    def epoch(self, user: int) -> int:
        return self.histories[user].epoch if user in self.histories else 0

    def length(self, user: int) -> int:
        return len(self.histories[user].tokens) if user in self.histories else 0

    def part(self, user: int, begin: int = 0) -> Part:
        history = self.histories.get(user, History(self.epoch(user)))
        return Part(user, history, begin, len(history.tokens), history.is_whole)

    def handle(self, at: int, appended: bool | None = None) -> Handle | None:
        some = [x for x in self.handles if appended in (None, x.appended)]
        return some[-1 - at % len(some)] if some else None

    def again(self, layer: int, handle: Handle, *, filled: bool = True) -> tuple[PagedCache, Pages]:
        """A fresh cache with the rows of a handle in a layer, zeros for those that are not written,
        and its pages; of an append those that it added are written if `filled`."""
        cache = self.new(64)
        users = handle.users
        begins = [part.begin if handle.appended else part.end for part in handle.parts]
        before = cache.append(users, begins)
        self.fill(
            cache, layer, before, [(p, 0, n) for p, n in zip(handle.parts, begins, strict=True)]
        )
        if not handle.appended:
            return cache, cache.pages(users)
        ends = [part.end - part.begin for part in handle.parts]
        pages = cache.append(users, ends)
        if filled:
            self.fill(cache, layer, pages, [(p, p.begin, p.end) for p in handle.parts])
        return cache, pages

    def fill(
        self, cache: PagedCache, layer: int, at: Pages, parts: list[tuple[Part, int, int]]
    ) -> None:
        zeros = torch.zeros(HEADS, self.head_dim, dtype=self.dtype)
        rows = [
            part.history.rows.get((layer, i), (zeros, zeros))
            for part, begin, end in parts
            for i in range(begin, end)
        ]
        if rows:
            with torch.no_grad():
                cache.write(layer, at, *(torch.stack(x) for x in zip(*rows, strict=True)))

    def is_written(self, layer: int, handle: Handle, *, before: bool = False) -> bool:
        """Whether the rows of a handle are there in a layer; `before`: those before it."""
        spans = [(0, p.begin) if before else (p.begin, p.end) for p in handle.parts]
        parts = zip(handle.parts, spans, strict=True)
        return all(part.history.written(layer, *span) is not None for part, span in parts)


def _caches() -> tuple[Cache, ...]:
    torch.manual_seed(0)
    plain = [GDPASelfAttention(8, HEADS, causal=True) for _ in range(2)]
    turning = GDPASelfAttention(8, HEADS, rotary=100.0, window=3, qk_norm=True, causal=True)
    wide = GDPASelfAttention(64 * HEADS, HEADS, causal=True, dtype=torch.bfloat16)
    return (
        Cache(HistoryRules(2), plain),
        Cache(HistoryRules(1, Mask(True, window=3), positions="index"), [turning]),
        Cache(HistoryRules(1), [wide], page_size=64),
    )


CACHES = (0, 0, 0, 1, 1, 1, 2)
USERS = (
    (0,), (1,), (2,), (3,), (0, 1), (1, 0), (2, 3), (0, 1, 2), (3, 1), (4, 5, 6), (5,), (6, 7),
)  # fmt: skip
COUNTS = (4, 1, 2, 5, 6, 9, 0)
AT = tuple(range(4))
"""Which pages, the latest first."""
NOW = (0, 1, 2, "now", "now")
"""The same, or pages of the latest's users that are asked for now."""
LAYER = (0, 1)


class Histories(Machine):
    """Caches whose requests come in any order, on their way in two threads, or fail."""

    def __init__(self) -> None:
        super().__init__()
        self.caches = _caches()
        self.ends = {n: Lengths.uniform(n, 3, "cpu") for n in (1, 2, 3)}

    def check(self) -> None:
        super().check()
        for held in self.caches:
            if held.cache.data.requires_grad:
                self.fault("the cache requires grad")
                held.cache.data = held.cache.data.detach()

    def looked_up(self, held: Cache, at: int | str) -> Handle | None:
        """A handle that a caller holds, or asks for now."""
        if at != "now" or not held.handles:
            return held.handle(0 if at == "now" else at)
        users = held.handles[-1].users
        epochs = [held.epoch(user) for user in users]
        pages = self.attempt(lambda: held.cache.pages(users, epochs))
        held.handles.append(Handle(pages, tuple(held.part(user) for user in users), False))
        return held.handles[-1]

    def settle(self, held: Cache) -> None:
        """Forget whom the cache has evicted; nobody else may be shorter or longer."""
        for user, history in [*held.histories.items()]:
            length = held.cache.length(user, history.epoch)
            if length != len(history.tokens):
                del held.histories[user]
                if length:
                    self.fault("other length", f"{length} for {len(history.tokens)}")
                    held.cache.evict(user)

    def forget(self, held: Cache, history: History) -> None:
        """Evict the user of a history that is half overwritten."""
        for user, each in [*held.histories.items()]:
            if each is history:
                held.cache.evict(user)
                del held.histories[user]

    def grown(self, held: Cache, user: int, epoch: int, count: int) -> Part:
        """The model's side of an append."""
        history = held.histories.get(user)
        if history is None or history.epoch != epoch:
            history = held.histories[user] = History(epoch)
        begin = len(history.tokens)
        history.tokens += [token(user, epoch, i) for i in range(begin, begin + count)]
        if history.expected is not None and len(history.tokens) >= history.expected:
            history.expected = None
        return held.part(user, begin)

    @operation(6, cache=CACHES, users=USERS, count=COUNTS, renew=(False,) * 12 + (True,),
               mode=MODES)  # fmt: skip
    def append(self, cache, users, count, renew, mode) -> None:
        """Room for new tokens; `renew`: of another epoch."""
        held = self.caches[cache]
        counts = [count + i for i in range(len(users))]
        epochs = [next(held.epochs) if renew else held.epoch(user) for user in users]
        lengths = [0 if renew else held.length(user) for user in users]
        each = [*zip(users, epochs, counts, lengths, strict=True)]
        try:
            with mode_of(mode):
                pages = self.attempt(lambda: held.cache.append(users, counts, epochs))
        except Refusal:
            self.settle(held)
            return
        except Interruption:
            for user, epoch, count, length in each:
                if count and held.cache.length(user, epoch) == length + count:
                    self.grown(held, user, epoch, count)
            self.settle(held)
            raise
        self.answered["append"] += 1
        for user, _, _, length in each:
            if not length:  # what was there may have been evicted
                held.histories.pop(user, None)
        parts = tuple(self.grown(held, user, epoch, count) for user, epoch, count, _ in each)
        self.settle(held)
        held.handles.append(Handle(pages, parts, True))
        positions = [i for part in parts for i in range(part.begin, part.end)]
        if pages.positions.tolist() != positions:
            self.fault("other positions", f"{pages.positions.tolist()} for {positions}")

    @operation(4, cache=CACHES, users=USERS, mode=MODES)
    def pages(self, cache, users, mode) -> None:
        """Where histories lie."""
        held = self.caches[cache]
        epochs = [held.epoch(user) for user in users]
        with mode_of(mode):
            pages = self.attempt(lambda: held.cache.pages(users, epochs))
        self.answered["pages"] += 1
        held.handles.append(Handle(pages, tuple(held.part(user) for user in users), False))

    @operation(6, cache=CACHES, at=AT, layer=(*LAYER, None, None), mode=MODES,
               learns=(False, True))  # fmt: skip
    def write(self, cache, at, layer, mode, learns) -> None:
        """Rows of an append, which may have a graph, of a layer or of all."""
        held = self.caches[cache]
        handle = held.handle(at, True)
        if handle is None:
            return
        for each in range(len(held.layers)) if layer is None else [layer % len(held.layers)]:
            self._write(held, handle, each, mode, learns)

    def _write(self, held: Cache, handle: Handle, layer: int, mode: str, learns: bool) -> None:
        tokens = [t for p in handle.parts for t in p.history.tokens[p.begin : p.end]]
        k, v = (held.heads(30 + layer + 2 * i)[tokens] for i in range(2))
        with mode_of(mode):
            k = k.clone().requires_grad_(learns)
            self._writes(
                held, handle, layer, lambda: held.cache.write(layer, handle.pages, k, v),
                (k.detach(), v),
            )  # fmt: skip

    def _writes(
        self, held: Cache, handle: Handle, layer: int, call: Callable[[], object], rows: Sequence
    ) -> object:
        """A call that stores the rows of an append."""
        try:
            result = self.attempt(call)
        except (Refusal, Interruption):
            # Where it stopped nobody knows: rows are those, or what reads them is refused.
            for history in self._wrote(handle, layer, rows):
                self.forget(held, history)
            raise
        self.answered[self.step.name] += 1
        self._wrote(handle, layer, rows)
        return result

    @staticmethod
    def _wrote(handle: Handle, layer: int, rows: Sequence[torch.Tensor]) -> set[History]:
        """The model's side of a write: histories of which other rows were there."""
        values = zip(*rows, strict=True)
        changed = set()
        for part in handle.parts:
            for i in range(part.begin, part.end):
                row = next(values)
                if difference(part.history.rows.setdefault((layer, i), row), row):
                    part.history.rows[layer, i] = row
                    changed.add(part.history)
        return changed

    @operation(6, cache=CACHES, at=NOW, layer=LAYER, mode=MODES)
    def read(self, cache, at, layer, mode) -> None:
        held = self.caches[cache]
        handle, layer = self.looked_up(held, at), layer % len(held.layers)
        if handle is None:
            return
        parts = [part.history.written(layer, part.begin, part.end) for part in handle.parts]
        rows = None if None in parts else [row for part in parts for row in part]

        def fresh() -> list[torch.Tensor]:
            none = held.cache.data.new_zeros(2, 0, HEADS, held.head_dim)
            return [torch.stack(x) for x in zip(*rows, strict=True)] if rows else [*none]

        with mode_of(mode):
            self.judge(
                lambda: held.cache.read(layer, handle.pages), None if rows is None else fresh
            )

    @operation(12, cache=CACHES, at=AT, whole=(None, None, 0, 1, 2), layer=LAYER, mode=MODES)
    def extend(self, cache, at, whole, layer, mode) -> None:
        """A layer's output for an append, with pages that were asked for now, or before."""
        held = self.caches[cache]
        new, layer = held.handle(at, True), layer % len(held.layers)
        pages = None if whole is None else held.handle(whole, False)
        if new is None or (whole is not None and pages is None):
            return
        tokens = [t for p in new.parts for t in p.history.tokens[p.begin : p.end]]
        x = held.rows(40 + layer)[tokens]
        epochs = [part.history.epoch for part in new.parts]

        def shared() -> torch.Tensor:
            at = held.cache.pages(new.users, epochs) if pages is None else pages.pages
            return extend(held.layers[layer], x, held.cache, layer, new.pages, at)

        with mode_of(mode):
            if mode == "autocast" and held.dtype != torch.bfloat16:
                self.judge(shared, None)
                return
            fresh, rows = self._extended(held, new, layer, x)
            right = held.is_written(layer, new, before=True)
            actual = self._writes(held, new, layer, shared, rows)
            self.compare(actual, (lambda: fresh) if right else None)

    @staticmethod
    def _extended(held: Cache, new: Handle, layer: int, x: torch.Tensor) -> tuple:
        """What a copy of a layer gives for an append to a fresh cache, and the rows it stores."""
        cache, at = held.again(layer, new, filled=False)
        twin = copy.deepcopy(held.layers[layer])
        y = extend(twin, x, cache, layer, at, cache.pages(new.users))
        return y, cache.read(layer, at)

    @operation(12, cache=CACHES, users=USERS, count=COUNTS, mode=MODES)
    def serve(self, cache, users, count, mode) -> None:
        """A request as it should be: an append, and all layers."""
        self.append(cache, users, count, False, mode)
        for layer in range(len(self.caches[cache].layers)):
            self.extend(cache, 0, None, layer, mode)

    @operation(5, cache=CACHES, at=NOW, layer=LAYER, mode=MODES, shared=(True, False))
    def candidates(self, cache, at, layer, mode, shared) -> None:
        """A layer's output for three candidates of each user."""
        held = self.caches[cache]
        handle, layer = self.looked_up(held, at), layer % len(held.layers)
        if handle is None or (handle.appended and not held.is_written(layer, handle, before=True)):
            return
        users = len(handle.users)
        x = held.rows(50, 3 * users)
        right = held.is_written(layer, handle) and all(p.is_whole for p in handle.parts)
        ends = self.ends[users] if shared else self.ends[users].cu_seqlens

        def fresh() -> torch.Tensor:
            cache, pages = held.again(layer, handle)
            twin, lengths = copy.deepcopy(held.layers[layer]), Lengths.uniform(users, 3, "cpu")
            return candidates(twin, x, lengths, 3, cache, layer, pages)

        with held.kernels(), mode_of(mode):
            self.judge(
                lambda: candidates(
                    held.layers[layer], x, ends, 3, held.cache, layer, handle.pages
                ),
                fresh if right else None,
            )  # fmt: skip

    @operation(5, cache=CACHES, at=NOW, layer=LAYER, mode=MODES, group=(1, 2), learns=(False, True),
               in_one_call=(None, True, False))  # fmt: skip
    def score(self, cache, at, layer, mode, group, learns, in_one_call) -> None:
        """The operator under `candidates`, with gradients."""
        held = self.caches[cache]
        handle, layer = self.looked_up(held, at), layer % len(held.layers)
        if handle is None or (handle.appended and not held.is_written(layer, handle, before=True)):
            return
        users = len(handle.users)
        tensors = [held.heads(60 + i, 3 * users) for i in range(3)]
        right = held.is_written(layer, handle) and all(p.is_whole for p in handle.parts)
        options = {"target_group_size": group, "in_one_call": in_one_call}

        def call(ends: Lengths, cache: PagedCache, pages: Pages) -> tuple[torch.Tensor, ...]:
            leaves = [x.clone().requires_grad_(learns and mode != "inference") for x in tensors]
            out = score(*leaves, ends, 3, cache, layer, pages, **options)
            return out, *differentiated(out, leaves)

        def fresh() -> tuple[torch.Tensor, ...]:
            return call(Lengths.uniform(users, 3, "cpu"), *held.again(layer, handle))

        with held.kernels(), mode_of(mode):
            self.judge(
                lambda: call(self.ends[users], held.cache, handle.pages), fresh if right else None
            )

    @operation(2, cache=CACHES, user=(0, 1, 2, 3), at=(3, 0, 1, 8), added=(False, True), mode=MODES)
    def edit(self, cache, user, at, added, mode) -> None:
        """An event is added or deleted; the rows before it stay."""
        held = self.caches[cache]
        history = held.histories.get(user, History(held.epoch(user)))
        events = len(history.tokens) if history.is_whole else history.expected
        epoch = next(held.epochs)

        def edited(length: int) -> None:
            held.histories.pop(user, None)
            if length:
                rows = {(n, i): row for (n, i), row in history.rows.items() if i < length}
                tokens, expected = history.tokens[:length], events + (1 if added else -1)
                held.histories[user] = History(epoch, tokens, rows, expected)

        try:
            with mode_of(mode):
                length = self.attempt(
                    lambda: held.cache.edit(user, at, epoch, history.epoch, added=added)
                )
        except Interruption:
            length = held.cache.length(user, epoch)
            if length or not held.cache.length(user, history.epoch):
                edited(length)
            raise
        self.answered["edit"] += 1
        edited(length)
        self.settle(held)

    @operation(1, cache=CACHES, user=tuple(range(8)))
    def evict(self, cache, user) -> None:
        held = self.caches[cache]
        try:
            self.attempt(lambda: held.cache.evict(user))
        finally:
            self.settle(held)

    @operation(6, cache=CACHES, users=((0, 1), (2, 3), (4, 5), (0, 6)), counts=((30, 30), (6, 30),
               (4, 8), (13, 25)), line=LINES_OF_TWO)  # fmt: skip
    def requests(self, cache, users, counts, line) -> None:
        """Two threads append to users of their own, and extend a layer."""
        held, layer = self.caches[cache], 0
        table = held.rows(40)

        def request(user: int, count: int) -> tuple[Pages, torch.Tensor]:
            epoch = held.epoch(user)
            new = held.cache.append([user], [count], [epoch])
            pages = held.cache.pages([user], [epoch])
            x = table[[token(user, epoch, i) for i in new.positions.tolist()]]
            return new, extend(held.layers[layer], x, held.cache, layer, new, pages)

        both = [partial(request, *each) for each in zip(users, counts, strict=True)]
        results = interleaved(*both, line)
        for user, count, result in zip(users, counts, results, strict=True):
            failed, epoch = isinstance(result, Exception), held.epoch(user)
            if failed and not is_refusal(result):
                self.fault(f"raised {type(result).__name__}", f"{result}"[:300])
            if failed and held.cache.length(user, epoch) != held.length(user) + count:
                continue
            begin = held.length(user) if failed else result[0].positions.tolist()[0]
            if begin == 0:  # what was there was evicted
                held.histories.pop(user, None)
            elif begin != held.length(user):
                self.fault("other positions", f"from {begin} on for {held.length(user)}")
                continue
            part = self.grown(held, user, epoch, count)
            new = Handle(None if failed else result[0], (part,), True)
            fresh, rows = self._extended(held, new, layer, table[part.history.tokens[begin:]])
            if not failed:
                self.answered["requests"] += 1
                right = held.is_written(layer, new, before=True)
                self.compare(result[1], (lambda y=fresh: y) if right else None)
            self._wrote(new, layer, rows)
        self.settle(held)
