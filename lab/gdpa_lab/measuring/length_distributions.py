"""Distributions of sequence lengths.

A seed gives the same lengths on every platform and NumPy version: the distributions use only full
64-bit words of PCG64 (its raw stream, which NumPy keeps fixed) and their own arithmetic on them.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, fields
from statistics import NormalDist
from typing import Any

import numpy as np

from gdpa_lab.measuring.require import is_finite, require, require_int


def _words(batch: int, rng: np.random.Generator) -> list[int]:
    """Draw `batch` words uniform on 0 .. 2**64 - 1, the raw stream unchanged."""
    words = rng.integers(0, 2**64 - 1, size=batch, dtype=np.uint64, endpoint=True)
    return [int(word) for word in words]


def _unit(word: int) -> float:
    """Map a 64-bit word to the centre of one of 2**52 equal cells of (0, 1); exact in fp64."""
    return ((word >> 12) + 0.5) * 2.0**-52


class LengthDistribution:
    """A distribution of sequence lengths in tokens, capped by the workload's max_seqlen.

    `sample` returns `batch` lengths in 1 .. max_seqlen, a deterministic function of `rng`'s state.
    """

    kind: str

    def sample(self, batch: int, max_seqlen: int, rng: np.random.Generator) -> list[int]:
        """Draw `batch` lengths (tokens) of at most `max_seqlen`."""
        raise NotImplementedError

    def to_dict(self) -> dict[str, Any]:
        """The distribution as JSON values, tagged by `kind`."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}  # type: ignore
        return {"kind": self.kind, **{name: _plain(value) for name, value in values.items()}}

    @staticmethod
    def from_dict(data: Mapping[str, Any]) -> LengthDistribution:
        """Rebuild a distribution from `to_dict`; ValueError for an unknown kind or wrong fields."""
        require(isinstance(data, Mapping), "length distribution", "a mapping with a kind", data)
        values = dict(data)
        kind = values.pop("kind", None)
        known = isinstance(kind, str) and kind in DISTRIBUTIONS
        require(known, "kind", f"one of {sorted(DISTRIBUTIONS)}", kind)
        require_fields(f"length distribution {kind!r}", DISTRIBUTIONS[kind], values)
        for name, value in values.items():
            if isinstance(value, list):
                values[name] = tuple(value)
            elif isinstance(value, Mapping):
                values[name] = LengthDistribution.from_dict(value)
        return DISTRIBUTIONS[kind](**values)


def _plain(value: Any) -> Any:
    """Convert a field of a distribution to a JSON value."""
    if isinstance(value, LengthDistribution):
        return value.to_dict()
    return list(value) if isinstance(value, tuple) else value


@dataclass(frozen=True)
class Full(LengthDistribution):
    """Constant length: every sequence has max_seqlen tokens."""

    kind = "full"

    def sample(self, batch: int, max_seqlen: int, rng: np.random.Generator) -> list[int]:
        return [max_seqlen] * batch


@dataclass(frozen=True)
class OneLong(LengthDistribution):
    """One sequence of max_seqlen tokens, and all others of `rest`."""

    rest: int
    kind = "one_long"

    def __post_init__(self) -> None:
        require_int("rest", self.rest, 1)

    def sample(self, batch: int, max_seqlen: int, rng: np.random.Generator) -> list[int]:
        return [max_seqlen, *[min(self.rest, max_seqlen)] * (batch - 1)][:batch]


@dataclass(frozen=True)
class Uniform(LengthDistribution):
    """Integers with mean close to fill * max_seqlen, as in the published GDPA benchmark.

    For N = max_seqlen: uniform on max(1, floor((2 fill - 1) N)) .. N when fill >= 0.5, else on
    1 .. max(1, floor(2 fill N)). fill = 0.5 gives 1 .. N, with mean (N + 1) / 2.
    As published, the bounds are computed in fp64: fill 0.7 of 1000 gives 399 .. 1000, not 400.
    Source: gdpa/utils/utils.py of facebookresearch/ads_model_kernel_library (there `sparsity`).
    """

    fill: float

    kind = "uniform"

    def __post_init__(self) -> None:
        ok = is_finite(self.fill) and 0 < self.fill <= 1
        require(ok, "fill", "a number in (0, 1]", self.fill)

    def sample(self, batch: int, max_seqlen: int, rng: np.random.Generator) -> list[int]:
        if self.fill >= 0.5:
            low, high = max(1, math.floor((2 * self.fill - 1) * max_seqlen)), max_seqlen
        else:
            low, high = 1, max(1, math.floor(2 * self.fill * max_seqlen))
        return [low + (word * (high - low + 1) >> 64) for word in _words(batch, rng)]


@dataclass(frozen=True)
class Between(LengthDistribution):
    """Integers n with round(low * N) <= n < round(high * N), N = max_seqlen, as in the
    published block attention benchmark.

    `total` shifts every length by the same number of tokens, and the first ones by one more, so
    that they sum to `total`; ValueError if a length would leave 1 .. N.
    """

    low: float
    high: float
    total: int | None = None

    kind = "between"

    def __post_init__(self) -> None:
        ok = is_finite(self.low) and 0 < self.low <= 1
        require(ok, "low", "a number in (0, 1]", self.low)
        ok = is_finite(self.high) and self.low < self.high <= 1
        require(ok, "high", f"a number in ({self.low}, 1]", self.high)
        if self.total is not None:
            require_int("total", self.total, 1)

    def sample(self, batch: int, max_seqlen: int, rng: np.random.Generator) -> list[int]:
        low = max(1, round(self.low * max_seqlen))
        high = max(low, round(self.high * max_seqlen) - 1)
        lengths = [low + (word * (high - low + 1) >> 64) for word in _words(batch, rng)]
        if self.total is None or batch == 0:
            return lengths
        each, extra = divmod(self.total - sum(lengths), batch)
        moved = [n + each + (1 if i < extra else 0) for i, n in enumerate(lengths)]
        if not 1 <= min(moved) <= max(moved) <= max_seqlen:
            raise ValueError(
                f"total must leave every length in 1 .. {max_seqlen}, got {self.total} for "
                f"{batch} lengths of {sum(lengths)} together"
            )
        return moved


@dataclass(frozen=True)
class LogNormal(LengthDistribution):
    """round(loc + scale * exp(sigma * z)) with z standard normal, clipped to minimum .. max_seqlen.

    z is the inverse normal CDF of a uniform draw. `sigma`, `loc` and `scale` are what SciPy calls
    s, loc and scale of lognorm; `loc` and `scale` are in tokens.
    """

    sigma: float
    loc: float
    scale: float
    minimum: int = 1

    kind = "log_normal"

    def __post_init__(self) -> None:
        for name in ("sigma", "scale"):
            value = getattr(self, name)
            require(is_finite(value) and value > 0, name, "a positive number", value)
        require(is_finite(self.loc), "loc", "a finite number", self.loc)
        require_int("minimum", self.minimum, 1)

    def sample(self, batch: int, max_seqlen: int, rng: np.random.Generator) -> list[int]:
        least = f"at least the minimum, {self.minimum}"
        require(max_seqlen >= self.minimum, "max_seqlen", least, max_seqlen)
        normal = NormalDist()
        draws = (
            self.loc + self.scale * math.exp(self.sigma * normal.inv_cdf(_unit(word)))
            for word in _words(batch, rng)
        )
        return [min(max(math.floor(x + 0.5), self.minimum), max_seqlen) for x in draws]


@dataclass(frozen=True)
class Quantiles(LengthDistribution):
    """Lengths from a quantile table, capped at max_seqlen.

    The inverse CDF is piecewise linear in the logarithm of the length between tabulated levels;
    `levels` rise strictly from 0 to 1 and `lengths` (tokens) do not fall.
    """

    levels: tuple[float, ...]
    lengths: tuple[int, ...]

    kind = "quantiles"

    def __post_init__(self) -> None:
        levels, lengths = self.levels, self.lengths
        ok = isinstance(levels, tuple) and len(levels) >= 2 and all(map(is_finite, levels))
        ok = ok and levels[0] == 0 and levels[-1] == 1
        ok = ok and all(a < b for a, b in zip(levels, levels[1:], strict=False))
        require(ok, "levels", "a tuple rising strictly from 0 to 1", levels)
        ok = isinstance(lengths, tuple) and len(lengths) == len(levels)
        require(ok, "lengths", f"a tuple of {len(levels)}, one per level", lengths)
        for length in lengths:
            require_int("every length", length, 1)
        require(list(lengths) == sorted(lengths), "lengths", "non-decreasing", lengths)

    def inverse_cdf(self, level: float) -> float:
        """The length (tokens, not rounded) at `level` in [0, 1]."""
        require(is_finite(level) and 0 <= level <= 1, "level", "a number in [0, 1]", level)
        i = next(i for i in range(1, len(self.levels)) if level <= self.levels[i])
        t = (level - self.levels[i - 1]) / (self.levels[i] - self.levels[i - 1])
        low, high = math.log(self.lengths[i - 1]), math.log(self.lengths[i])
        return math.exp(low + t * (high - low))

    def sample(self, batch: int, max_seqlen: int, rng: np.random.Generator) -> list[int]:
        draws = (self.inverse_cdf(_unit(word)) for word in _words(batch, rng))
        return [min(math.floor(x + 0.5), max_seqlen) for x in draws]


@dataclass(frozen=True)
class DerivedDistribution(LengthDistribution):
    """A distribution derived from another, `law`."""

    law: LengthDistribution

    def __post_init__(self) -> None:
        require(isinstance(self.law, LengthDistribution), "law", "a LengthDistribution", self.law)


@dataclass(frozen=True)
class Events(DerivedDistribution):
    """Histories that a trainer sees: `law` gives the number of events of a user.

    Training draws one event uniformly from all events of `USERS` users, of at most `MOST_EVENTS`
    each. The length is the number of that user's events up to it, capped at max_seqlen.
    """

    kind = "events"
    USERS = 20_000
    MOST_EVENTS = 10**6

    def sample(self, batch: int, max_seqlen: int, rng: np.random.Generator) -> list[int]:
        ends = np.cumsum(self.law.sample(self.USERS, self.MOST_EVENTS, rng)).tolist()
        drawn = (word * ends[-1] >> 64 for word in _words(batch, rng))  # an event of all users'
        users = ((event, bisect_right(ends, event)) for event in drawn)
        return [min(event - (ends[i - 1] if i else 0) + 1, max_seqlen) for event, i in users]


@dataclass(frozen=True)
class Rounded(DerivedDistribution):
    """Lengths of `law` rounded up to a multiple of `multiple`, at most max_seqlen."""

    multiple: int

    kind = "rounded"

    def __post_init__(self) -> None:
        super().__post_init__()
        require_int("multiple", self.multiple, 1)

    def sample(self, batch: int, max_seqlen: int, rng: np.random.Generator) -> list[int]:
        lengths = self.law.sample(batch, max_seqlen, rng)
        return [min(-(-n // self.multiple) * self.multiple, max_seqlen) for n in lengths]


@dataclass(frozen=True)
class Sorted(DerivedDistribution):
    """Lengths of `law` in descending order."""

    kind = "sorted"

    def sample(self, batch: int, max_seqlen: int, rng: np.random.Generator) -> list[int]:
        return sorted(self.law.sample(batch, max_seqlen, rng), reverse=True)


DISTRIBUTIONS: dict[str, type[LengthDistribution]] = {
    each.kind: each
    for each in (Full, OneLong, Uniform, Between, LogNormal, Quantiles, Events, Rounded, Sorted)
}


def require_fields(what: str, kind: type, values: Mapping[str, Any]) -> None:
    """Raise ValueError if `values` lacks a field of the dataclass `kind` or has an unknown one."""
    known = {f.name: f for f in fields(kind)}
    unknown = sorted(set(values) - set(known))
    if unknown:
        raise ValueError(f"{what} must have fields among {sorted(known)}, got {unknown}")
    missing = [n for n, f in known.items() if f.default is MISSING and n not in values]
    if missing:
        raise ValueError(f"{what} must have the fields {missing}, got {sorted(values)}")


MOVIELENS = {
    "ml1m": LogNormal(sigma=1.387, loc=17.7, scale=67.3, minimum=20),
    "ml20m": LogNormal(sigma=1.609, loc=19.078, scale=43.087, minimum=20),
    "ml25m": LogNormal(sigma=1.589, loc=18.636, scale=39.862, minimum=20),
}
"""Ratings per user of MovieLens 1M, 20M and 25M: published shifted log-normal fits.

Source: LensKit codex, codex.lenskit.org/movielens/{ML1M,ML20M,ML25M}/description.html, "User
Activity Distributions". The data sets leave out users with fewer than 20 ratings: the minimum.
"""

_KUAIRAND_LEVELS = (0.0, 0.10, 0.25, 0.50, 0.75, 0.90, 0.99, 1.0)
KUAIRAND = {
    "kuairand1k": Quantiles(
        _KUAIRAND_LEVELS, (1186, 1998, 4370, 8327, 14990, 24418, 62626, 127557)
    ),
    "kuairandpure": Quantiles(_KUAIRAND_LEVELS, (5, 8, 18, 39, 72, 115, 234, 910)),
}
"""Interactions per user of KuaiRand-1K and KuaiRand-Pure: published quantiles and maximum.

Source: github.com/TommyYoungtc/kuairand-longseq-rec, reports/eda_1k.md and reports/eda_pure.md
(P10, P25, P50, P75, P90, P99, maximum). The reports give no minimum: the length at level 0 is our
extrapolation, which continues the line from P25 to P10 (level against log length) to level 0.
The interpolated distributions have means of 12,440 and 56.6; the reports' means are 11,713 and 53.
"""
