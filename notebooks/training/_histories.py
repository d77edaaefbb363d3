"""Users with histories of events, and whether they click: made up, so that the best loss is known.

An event is of one of `KINDS` kinds, so is what a user is shown. With n events of the shown kind in
the history a click has the probability sigmoid(0.8 n - 1.5). One user in five has no history; the
other lengths are uniform from 1 to `LONGEST`.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch

KINDS, LONGEST = 3, 15
EMPTY = 0.2


class Users(NamedTuple):
    """events `[tokens]`, offsets `[users + 1]`, shown `[users]`; `same`: events of the shown kind;
    `logit` of a click; `clicked`, drawn with it."""

    events: torch.Tensor
    offsets: torch.Tensor
    shown: torch.Tensor
    same: torch.Tensor
    logit: torch.Tensor
    clicked: torch.Tensor


def users(count: int, seed: int) -> Users:
    """`count` users, the same for the same seed."""
    make = torch.Generator().manual_seed(seed)
    some = torch.rand(count, generator=make) >= EMPTY
    lengths = torch.randint(1, LONGEST + 1, (count,), generator=make) * some
    offsets = torch.nn.functional.pad(lengths.cumsum(0), (1, 0)).int()
    events = torch.randint(0, KINDS, (int(offsets[-1]),), generator=make)
    shown = torch.randint(0, KINDS, (count,), generator=make)
    owner = torch.repeat_interleave(torch.arange(count), lengths)
    same = torch.zeros(count).index_add_(0, owner, (events == shown[owner]).float())
    logit = 0.8 * same - 1.5
    clicked = (torch.rand(count, generator=make) < torch.sigmoid(logit)).float()
    return Users(events, offsets, shown, same, logit, clicked)


def probability(same: int) -> float:
    """Probability of a click, with so many events of the shown kind."""
    return 1 / (1 + math.exp(1.5 - 0.8 * same))


def best_losses() -> dict[str, float]:
    """The least mean cross entropy (nats) of who knows the "counts" of the kinds in a history,
    their "shares" in it, or "no history": sums over all histories that there are."""
    counts = EMPTY * _entropy(probability(0))
    shares = {(0, 0, 0): [EMPTY, EMPTY * probability(0)]}  # users and clicks
    for length in range(1, LONGEST + 1):
        for a in range(length + 1):
            for b in range(length - a + 1):
                ways = math.comb(length, a) * math.comb(length - a, b) / KINDS**length
                weight = (1 - EMPTY) / LONGEST * ways
                common = math.gcd(a, b, length)
                key = a // common, b // common, length // common
                known = shares.setdefault(key, [0.0, 0.0])
                known[0] += weight
                known[1] += weight * probability(a)
                counts += weight * _entropy(probability(a))
    return {
        "counts": counts,
        "shares": sum(weight * _entropy(hits / weight) for weight, hits in shares.values()),
        "no history": _entropy(sum(hits for _, hits in shares.values())),
    }


def _entropy(p: float) -> float:
    return -p * math.log(p) - (1 - p) * math.log(1 - p)
