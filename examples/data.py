"""Generated clicks whose best possible loss is known, with the lengths of real histories.

A user has a history of events, oldest first: an item, and whether it was liked. Items belong to
topics. What is shown next is clicked with probability sigmoid(logit),

    logit = bias + quality(shown) + strength * sum over events of the shown item's topic of
            (+1 if liked, else -1) * 2 ** (-age / 2) * (2 behind an event of the same topic, else 1)

with age = floor(log2(events after it + 1)). So a model needs items alone (quality), whole histories
(the sum), order (age) and neighbours (2 or 1). The logit depends on nothing that a model is not
given, so no model has a smaller expected loss than the mean entropy of these probabilities.

Every number is a hash of (seed, step, row, event): a row is the same on every device, and for any
number of ranks.
"""

from __future__ import annotations

import heapq
import math
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from gdpa_kernels import Lengths

sys.path.append(str(Path(__file__).resolve().parents[1] / "lab"))  # in a checkout, uninstalled
from gdpa_lab.measuring.length_distributions import (  # noqa: E402
    KUAIRAND,
    MOVIELENS,
    Full,
    LogNormal,
    Uniform,
)

LAWS = {
    "full": Full(),
    "half": Uniform(0.5),
    "lognormal": LogNormal(sigma=1.3, loc=2, scale=16),
    **MOVIELENS,
    **KUAIRAND,
}
HELD_OUT = 2**40
"""The first step of the rows that are never trained on."""
ROWS = ("users", "events")
DEALS = ("order", "balanced", "snake", "sorted")


@dataclass(frozen=True)
class World:
    """Parameters that the clicks depend on."""

    items: int = 20_000
    topics: int = 16
    strength: float = 0.7
    bias: float = -0.5
    seed: int = 7


@dataclass(frozen=True)
class Traffic:
    """The lengths of histories: `max_seqlen` most recent events of each.

    A row is a user, whose whole history it is; or, as a trainer sees it, an event of a user, whose
    history are the events before it, so that users count as often as they act. The share `cold` of
    the rows has no history.
    """

    law: str = "half"
    max_seqlen: int = 1024
    rows: str = "users"
    cold: float = 0.0
    seed: int = 7

    def sample(self, step: int, batch: int) -> np.ndarray:
        """The lengths of a step's global batch, int64 `[batch]`."""
        rng = np.random.default_rng([self.seed, step])
        whole, law = self.rows == "users", LAWS[self.law]
        most = self.max_seqlen if whole or isinstance(law, Full | Uniform) else 10**6
        lengths = np.array(law.sample(batch if whole else 8 * batch, most, rng), dtype=np.int64)
        if not whole:
            lengths_drawn = rng.choice(lengths, batch, p=lengths / lengths.sum())
            lengths = np.minimum(
                (rng.random(batch) * lengths_drawn).astype(np.int64), self.max_seqlen
            )
        lengths[rng.permutation(batch)[: int(self.cold * batch)]] = 0
        return lengths


def cost(lengths: np.ndarray, linear: float) -> np.ndarray:
    """The work of each sequence, in pairs of tokens: a token costs as much as `linear` pairs."""
    return lengths * (lengths + linear)


def deal(lengths: np.ndarray, ranks: int, how: str, linear: float = 4096.0) -> np.ndarray:
    """The rows of each rank, `[ranks, batch / ranks]`.

    "order": as they come. "balanced": the longest first, each to the rank with the least work that
    has room. "snake": groups of 16 rows, the heaviest first, from rank 0 up and back; one group may
    hold the longest of all, and nothing weighs against it. "sorted": rank 0 has the longest.
    """
    batch, work = len(lengths), cost(lengths, linear)
    each = batch // ranks
    longest = np.argsort(-work, kind="stable")
    if how == "order":
        return np.arange(batch).reshape(ranks, each)
    if how == "sorted":
        return longest.reshape(ranks, each)
    size = math.gcd(16, each)
    if how == "snake":
        groups = np.arange(batch).reshape(-1, size)
        groups = groups[np.argsort(-work[groups].sum(1), kind="stable")].reshape(-1, ranks, size)
        groups[1::2] = groups[1::2, ::-1].copy()
        return groups.swapaxes(0, 1).reshape(ranks, each)
    rows_of: list[list[int]] = [[] for _ in range(ranks)]
    loads = [(0.0, rank) for rank in range(ranks)]
    for row in longest:
        load, rank = heapq.heappop(loads)
        rows_of[rank].append(row)
        if len(rows_of[rank]) < each:
            heapq.heappush(loads, (load + work[row], rank))
    return np.sort(np.array(rows_of), axis=1)


@dataclass(frozen=True)
class Clicks:
    """Generated rows, step by step."""

    world: World
    traffic: Traffic

    def sample(self, step: int, batch: int) -> np.ndarray:
        """The lengths of a step's global batch, int64 `[batch]`."""
        return self.traffic.sample(step, batch)

    def make_batch(self, lengths, rows, step, device="cpu", max_seqlen=None) -> Batch:
        """The rows `rows` of a step, whose global batch has `lengths`."""
        return make_batch(self.world, lengths[rows], rows, step, device, max_seqlen)


@dataclass
class Batch:
    """Rows of a step. A token is an event: items, topics, likes, ages are int64 `[total_tokens]`;
    shown, topic int64, label, logit fp32 `[batch]`. logit: of the true probability, None where
    nobody knows it."""

    lengths: Lengths
    items: torch.Tensor
    topics: torch.Tensor
    likes: torch.Tensor
    ages: torch.Tensor
    shown: torch.Tensor
    topic: torch.Tensor
    label: torch.Tensor | None
    logit: torch.Tensor | None

    def showing(self, item: int, world: World) -> Batch:
        """The same histories, with one item shown to all; without label and logit."""
        shown = torch.full_like(self.shown, item)
        return replace(self, shown=shown, topic=shown % world.topics, label=None, logit=None)


AGES = 32


class Places(NamedTuple):
    """Position of each event of jagged histories `[total_tokens]`: its row, how many events of that
    row come before it, and floor(log2(events after it + 1))."""

    row: torch.Tensor
    position: torch.Tensor
    age: torch.Tensor


def places(
    lengths: np.ndarray, device: torch.device | str, max_seqlen: int | None
) -> tuple[Lengths, Places]:
    """Waits for no device; max_seqlen: as `Lengths`, None for the longest."""
    ends = torch.from_numpy(np.concatenate(([0], lengths)).cumsum())
    offsets, total = Lengths(ends, max_seqlen, device=device), int(ends[-1])
    sizes = torch.from_numpy(lengths).to(device, non_blocking=True)
    row = torch.arange(len(lengths), device=device).repeat_interleave(sizes, output_size=total)
    position = torch.arange(total, device=device) - offsets.cu_seqlens[row].long()
    age = torch.frexp((sizes[row] - position).double()).exponent.long() - 1
    return offsets, Places(row, position, age)


def make_batch(
    world: World,
    lengths: np.ndarray,
    rows: np.ndarray,
    step: int,
    device: torch.device | str = "cpu",
    max_seqlen: int | None = None,
) -> Batch:
    """The rows `rows` of a step, whose histories have `lengths` events; waits for no device.

    max_seqlen: as `Lengths`; None for the longest.
    """
    offsets, (sequence, position, ages) = places(lengths, device, max_seqlen)
    row = torch.from_numpy(rows).to(device, non_blocking=True)
    row = _hash(_hash(torch.full_like(row, world.seed), step), row)
    event = _hash(row[sequence], position + 1)

    # A user cares for three topics: 60, 25 and 15 % of the events; 10 % of what is shown is others.
    first = _below(row, -1, world.topics)
    u = _unit(event, 1)
    topics = (first[sequence] + (u > 0.6) + 2 * (u > 0.85)) % world.topics
    u = _unit(row, -2)
    topic = (first + (u > 0.5) + 2 * (u > 0.75)) % world.topics
    topic = torch.where(u > 0.9, _below(row, -3, world.topics), topic)
    items, shown = _item(world, topics, _unit(event, 2)), _item(world, topic, _unit(row, -4))
    likes = (_unit(event, 3) < 0.5).long()

    behind = (topics == topics.roll(1)) & (position > 0)
    weight = (
        (2 * likes - 1) * (topics == topic[sequence]) * (1 + behind.long()) * 2.0 ** (-ages / 2)
    )
    interest = torch.zeros(len(rows), dtype=torch.float64, device=device)
    interest = interest.index_add_(0, sequence, weight.double())
    quality = (_unit(_hash(torch.full_like(shown, world.seed), shown), -5) - 0.5) * 12**0.5
    logit = world.bias + quality + world.strength * interest
    label = (_unit(row, -6) < logit.sigmoid()).float()
    return Batch(offsets, items, topics, likes, ages, shown, topic, label, logit.float())


def _item(world: World, topic: torch.Tensor, u: torch.Tensor) -> torch.Tensor:
    """An item of each topic; the first ones are the most popular."""
    return topic + world.topics * (u**3 * (world.items // world.topics)).long()


_MASKS = {shift: (1 << 64 - shift) - 1 for shift in (30, 27, 31)}
_FACTORS = {30: 0xBF58476D1CE4E5B9 - (1 << 64), 27: 0x94D049BB133111EB - (1 << 64), 31: 1}
_GOLDEN = 0x9E3779B97F4A7C15 - (1 << 64)


def _hash(state: torch.Tensor, key: torch.Tensor | int) -> torch.Tensor:
    """SplitMix64 of int64 words, element by element; integers wrap around."""
    step = (key + 1) * _GOLDEN
    if isinstance(step, int):
        step = (step + (1 << 63)) % (1 << 64) - (1 << 63)
    x = state + step
    for shift, mask in _MASKS.items():
        x = (x ^ ((x >> shift) & mask)) * _FACTORS[shift]
    return x


def _unit(state: torch.Tensor, key: int) -> torch.Tensor:
    """fp64 numbers in [0, 1)."""
    return ((_hash(state, key) >> 11) & ((1 << 53) - 1)) * 2.0**-53


def _below(state: torch.Tensor, key: int, most: int) -> torch.Tensor:
    return (_unit(state, key) * most).long()
