"""Workloads: what is computed, described without tensors.

A workload names a problem: batch, heads, head_dim, the law of its sequence lengths, and a seed.
Lengths, visible pairs, FLOPs and the fewest bytes follow on a CPU, before any kernel runs.

Lengths are the same for the same seed on every platform and NumPy version: the laws use only full
64-bit words of PCG64 (its raw stream, which NumPy keeps fixed) and their own arithmetic on them.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, fields, replace
from functools import cached_property
from statistics import NormalDist
from typing import Any

import numpy as np

DIRECTIONS = ("forward", "backward")
STEP = "forward and backward"
"""A whole step of training, where a direction or the variant of a row is told."""

DTYPE_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}
OPERATORS = ("gdpa", "block_attention")
BLOCK_SIZES = (16, 32, 64, 128)

_GDPA_ONLY = ("activation", "output_scale", "causal", "window", "shared_q", "lengths_k")
_BLOCK_ONLY = ("block_size", "rotary", "rotate_v")


def _check_int(name: str, value: object, least: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ValueError(f"{name} must be an integer of at least {least}, got {value!r}")


def _check_number(name: str, value: object, expectation: str, ok: bool) -> None:
    if not ok:
        raise ValueError(f"{name} must be {expectation}, got {value!r}")


def _is_finite(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _words(batch: int, rng: np.random.Generator) -> list[int]:
    """`batch` words uniform on 0 .. 2**64 - 1; the full range returns the raw stream unchanged."""
    words = rng.integers(0, 2**64 - 1, size=batch, dtype=np.uint64, endpoint=True)
    return [int(word) for word in words]


def _unit(word: int) -> float:
    """Map a 64-bit word to the centre of one of 2**52 equal cells of (0, 1); exact in fp64."""
    return ((word >> 12) + 0.5) * 2.0**-52


class LengthLaw:
    """A distribution of sequence lengths in tokens, capped by the workload's max_seqlen.

    `sample` returns `batch` lengths in 1 .. max_seqlen, a deterministic function of `rng`'s state.
    """

    kind: str

    def sample(self, batch: int, max_seqlen: int, rng: np.random.Generator) -> list[int]:
        """Draw `batch` lengths (tokens) of at most `max_seqlen`."""
        raise NotImplementedError

    def to_dict(self) -> dict[str, Any]:
        """The law as JSON values, tagged by `kind`."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}  # type: ignore
        return {"kind": self.kind, **{name: _plain(value) for name, value in values.items()}}

    @staticmethod
    def from_dict(data: Mapping[str, Any]) -> LengthLaw:
        """Rebuild a law from `to_dict`; ValueError for an unknown kind or wrong fields."""
        if not isinstance(data, Mapping):
            raise ValueError(f"length law must be a mapping with a kind, got {data!r}")
        kind = data.get("kind")
        if not isinstance(kind, str) or kind not in LAWS:
            raise ValueError(f"kind must be one of {sorted(LAWS)}, got {kind!r}")
        law = LAWS[kind]
        values = {name: value for name, value in data.items() if name != "kind"}
        _check_fields(f"length law {law.kind!r}", law, values)
        for name, value in values.items():
            if isinstance(value, list):
                values[name] = tuple(value)
            elif isinstance(value, Mapping):
                values[name] = LengthLaw.from_dict(value)
        return law(**values)


def _plain(value: Any) -> Any:
    """A field of a law as a JSON value."""
    if isinstance(value, LengthLaw):
        return value.to_dict()
    return list(value) if isinstance(value, tuple) else value


@dataclass(frozen=True)
class Full(LengthLaw):
    """Every sequence has max_seqlen tokens."""

    kind = "full"

    def sample(self, batch: int, max_seqlen: int, rng: np.random.Generator) -> list[int]:
        return [max_seqlen] * batch


@dataclass(frozen=True)
class Uniform(LengthLaw):
    """Integers with mean close to fill * max_seqlen: the law of the published GDPA benchmark.

    For N = max_seqlen: uniform on max(1, floor((2 fill - 1) N)) .. N when fill >= 0.5, else on
    1 .. max(1, floor(2 fill N)). fill = 0.5 gives 1 .. N, with mean (N + 1) / 2.
    As published, the bounds are computed in fp64: fill 0.7 of 1000 gives 399 .. 1000, not 400.
    Source: gdpa/utils/utils.py of facebookresearch/ads_model_kernel_library (there `sparsity`).
    """

    fill: float

    kind = "uniform"

    def __post_init__(self) -> None:
        ok = _is_finite(self.fill) and 0 < self.fill <= 1
        _check_number("fill", self.fill, "a number in (0, 1]", ok)

    def sample(self, batch: int, max_seqlen: int, rng: np.random.Generator) -> list[int]:
        if self.fill >= 0.5:
            low, high = max(1, math.floor((2 * self.fill - 1) * max_seqlen)), max_seqlen
        else:
            low, high = 1, max(1, math.floor(2 * self.fill * max_seqlen))
        return [low + (word * (high - low + 1) >> 64) for word in _words(batch, rng)]


@dataclass(frozen=True)
class Between(LengthLaw):
    """Integers n with round(low * N) <= n < round(high * N), N = max_seqlen: the law of the
    published block attention benchmark.

    With `total`, every length is then moved by the same number of tokens, and the first ones by one
    more, so that they sum to `total`; ValueError if one would leave 1 .. N.
    """

    low: float
    high: float
    total: int | None = None

    kind = "between"

    def __post_init__(self) -> None:
        ok = _is_finite(self.low) and 0 < self.low <= 1
        _check_number("low", self.low, "a number in (0, 1]", ok)
        ok = _is_finite(self.high) and self.low < self.high <= 1
        _check_number("high", self.high, f"a number in ({self.low}, 1]", ok)
        if self.total is not None:
            _check_int("total", self.total, 1)

    def sample(self, batch: int, max_seqlen: int, rng: np.random.Generator) -> list[int]:
        low = max(1, round(self.low * max_seqlen))
        high = max(low, round(self.high * max_seqlen) - 1)
        lengths = [low + (word * (high - low + 1) >> 64) for word in _words(batch, rng)]
        if self.total is None or batch == 0:
            return lengths
        each, extra = divmod(self.total - sum(lengths), batch)
        moved = [n + each + (i < extra) for i, n in enumerate(lengths)]
        if not 1 <= min(moved) <= max(moved) <= max_seqlen:
            raise ValueError(
                f"total must leave every length in 1 .. {max_seqlen}, got {self.total} for "
                f"{batch} lengths of {sum(lengths)} together"
            )
        return moved


@dataclass(frozen=True)
class LogNormal(LengthLaw):
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
        ok = _is_finite(self.sigma) and self.sigma > 0
        _check_number("sigma", self.sigma, "a positive number", ok)
        _check_number("loc", self.loc, "a finite number", _is_finite(self.loc))
        ok = _is_finite(self.scale) and self.scale > 0
        _check_number("scale", self.scale, "a positive number", ok)
        _check_int("minimum", self.minimum, 1)

    def sample(self, batch: int, max_seqlen: int, rng: np.random.Generator) -> list[int]:
        _check_cap(self.minimum, max_seqlen)
        normal = NormalDist()
        draws = (
            self.loc + self.scale * math.exp(self.sigma * normal.inv_cdf(_unit(word)))
            for word in _words(batch, rng)
        )
        return [min(max(math.floor(x + 0.5), self.minimum), max_seqlen) for x in draws]


@dataclass(frozen=True)
class Quantiles(LengthLaw):
    """Lengths from a quantile table, capped at max_seqlen.

    The inverse CDF is piecewise linear in the logarithm of the length between tabulated levels;
    `levels` rise strictly from 0 to 1 and `lengths` (tokens) do not fall.
    """

    levels: tuple[float, ...]
    lengths: tuple[int, ...]

    kind = "quantiles"

    def __post_init__(self) -> None:
        levels, lengths = self.levels, self.lengths
        ok = isinstance(levels, tuple) and len(levels) >= 2 and all(map(_is_finite, levels))
        ok = ok and levels[0] == 0 and levels[-1] == 1
        ok = ok and all(a < b for a, b in zip(levels, levels[1:], strict=False))
        _check_number("levels", levels, "a tuple rising strictly from 0 to 1", ok)
        ok = isinstance(lengths, tuple) and len(lengths) == len(levels)
        _check_number("lengths", lengths, f"a tuple of {len(levels)}, one per level", ok)
        for length in lengths:
            _check_int("every length", length, 1)
        ok = all(a <= b for a, b in zip(lengths, lengths[1:], strict=False))
        _check_number("lengths", lengths, "non-decreasing", ok)

    def inverse_cdf(self, level: float) -> float:
        """The length (tokens, not rounded) at `level` in [0, 1]."""
        ok = _is_finite(level) and 0 <= level <= 1
        _check_number("level", level, "a number in [0, 1]", ok)
        i = next(i for i in range(1, len(self.levels)) if level <= self.levels[i])
        t = (level - self.levels[i - 1]) / (self.levels[i] - self.levels[i - 1])
        low, high = math.log(self.lengths[i - 1]), math.log(self.lengths[i])
        return math.exp(low + t * (high - low))

    def sample(self, batch: int, max_seqlen: int, rng: np.random.Generator) -> list[int]:
        draws = (self.inverse_cdf(_unit(word)) for word in _words(batch, rng))
        return [min(math.floor(x + 0.5), max_seqlen) for x in draws]


@dataclass(frozen=True)
class Events(LengthLaw):
    """Histories that a trainer sees: `law` gives the events of a user, and training draws an event.

    A user among `USERS` of `law` in proportion to its events, one of them uniformly: the length is
    the events up to it, the newest max_seqlen of them.
    """

    law: LengthLaw

    kind = "events"
    USERS = 20_000

    def __post_init__(self) -> None:
        _check_law(self.law)

    def sample(self, batch: int, max_seqlen: int, rng: np.random.Generator) -> list[int]:
        ends = np.cumsum(self.law.sample(self.USERS, 10**6, rng)).tolist()
        drawn = (word * ends[-1] >> 64 for word in _words(batch, rng))  # an event of all users'
        users = ((event, bisect_right(ends, event)) for event in drawn)
        return [min(event - (ends[i - 1] if i else 0) + 1, max_seqlen) for event, i in users]


@dataclass(frozen=True)
class Rounded(LengthLaw):
    """Lengths of `law` rounded up to a multiple of `multiple`, at most max_seqlen."""

    law: LengthLaw
    multiple: int

    kind = "rounded"

    def __post_init__(self) -> None:
        _check_law(self.law)
        _check_int("multiple", self.multiple, 1)

    def sample(self, batch: int, max_seqlen: int, rng: np.random.Generator) -> list[int]:
        lengths = self.law.sample(batch, max_seqlen, rng)
        return [min(-(-n // self.multiple) * self.multiple, max_seqlen) for n in lengths]


@dataclass(frozen=True)
class Sorted(LengthLaw):
    """Lengths of `law`, the longest first."""

    law: LengthLaw

    kind = "sorted"

    def __post_init__(self) -> None:
        _check_law(self.law)

    def sample(self, batch: int, max_seqlen: int, rng: np.random.Generator) -> list[int]:
        return sorted(self.law.sample(batch, max_seqlen, rng), reverse=True)


LAWS: dict[str, type[LengthLaw]] = {
    law.kind: law for law in (Full, Uniform, Between, LogNormal, Quantiles, Events, Rounded, Sorted)
}


def _check_law(law: object) -> None:
    if not isinstance(law, LengthLaw):
        raise ValueError(f"law must be a LengthLaw, got {law!r}")


def _check_cap(minimum: int, max_seqlen: int) -> None:
    if max_seqlen < minimum:
        raise ValueError(f"max_seqlen must be at least the law's {minimum}, got {max_seqlen}")


def _check_fields(what: str, kind: type, values: Mapping[str, Any]) -> None:
    known = {f.name: f for f in fields(kind)}
    unknown = sorted(set(values) - set(known))
    if unknown:
        raise ValueError(f"{what} must have fields among {sorted(known)}, got {unknown}")
    missing = [n for n, f in known.items() if f.default is MISSING and n not in values]
    if missing:
        raise ValueError(f"{what} must have the fields {missing}, got {sorted(values)}")


@dataclass(frozen=True)
class Workload:
    """One problem: sizes, length laws, options and a seed.

    Lengths count tokens. `lengths_k=None` gives every sequence as many K/V rows as it has Q rows.
    `shared_q=True` is pooling by seed queries: q is [max_seqlen_q, num_heads_q, head_dim], one
    tensor for the whole batch, and every sequence has max_seqlen_q output rows. `scale=None` means
    head_dim ** -0.5. Visibility counts positions from the start of each sequence: with `causal` key
    j is visible to query i iff j <= i, with `window` W iff |i - j| <= W, with both iff both hold.

    With operator "block_attention" key j is visible to query i iff both lie in the same block of
    `block_size` tokens from the start of their sequence. `rotary` rotates q and k by (sin, cos) in
    the workload's dtype, and `rotate_v` v too. Fields of the other operator keep their defaults.

    ValueError, naming argument, expectation and received value, if a field is out of range.
    """

    name: str
    batch: int
    num_heads_q: int
    num_heads_k: int
    head_dim: int
    max_seqlen_q: int
    max_seqlen_k: int
    lengths_q: LengthLaw
    lengths_k: LengthLaw | None = None
    operator: str = "gdpa"
    shared_q: bool = False
    dtype: str = "bfloat16"
    activation: str | tuple[str, ...] = "gelu_tanh"
    scale: float | None = None
    output_scale: float = 1.0
    causal: bool = False
    window: int | None = None
    seed: int = 2025
    block_size: int = 64
    rotary: bool = False
    rotate_v: bool = False

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not self.name:
            raise ValueError(f"name must be a non-empty string, got {self.name!r}")
        for name in ("batch", "num_heads_q", "num_heads_k", "head_dim"):
            _check_int(name, getattr(self, name), 1)
        _check_int("max_seqlen_q", self.max_seqlen_q, 1)
        _check_int("max_seqlen_k", self.max_seqlen_k, 1)
        _check_int("seed", self.seed, 0)
        if self.num_heads_q % self.num_heads_k:
            raise ValueError(
                f"num_heads_q must be a multiple of num_heads_k ({self.num_heads_k}), "
                f"got {self.num_heads_q}"
            )
        if self.operator not in OPERATORS:
            raise ValueError(f"operator must be one of {OPERATORS}, got {self.operator!r}")
        if self.dtype not in tuple(DTYPE_BYTES):
            raise ValueError(f"dtype must be one of {tuple(DTYPE_BYTES)}, got {self.dtype!r}")
        for name in ("shared_q", "causal", "rotary", "rotate_v"):
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"{name} must be a bool, got {getattr(self, name)!r}")
        self._check_operator()
        self._check_lengths()
        self._check_options()

    def _check_operator(self) -> None:
        if self.block_size not in BLOCK_SIZES or isinstance(self.block_size, bool):
            raise ValueError(f"block_size must be one of {BLOCK_SIZES}, got {self.block_size!r}")
        if self.rotate_v and not self.rotary:
            raise ValueError(f"rotate_v must be False without rotary, got {self.rotate_v!r}")
        if self.rotary and self.head_dim % 2:
            raise ValueError(f"head_dim must be even with rotary, got {self.head_dim}")
        for name in self._foreign():
            default = _DEFAULTS[name]
            if getattr(self, name) != default:
                raise ValueError(
                    f"{name} must be {default!r} with operator {self.operator!r}, "
                    f"got {getattr(self, name)!r}"
                )

    def _foreign(self) -> tuple[str, ...]:
        """The fields that mean something only to the other operator."""
        return _BLOCK_ONLY if self.operator == "gdpa" else _GDPA_ONLY

    def _check_lengths(self) -> None:
        if not isinstance(self.lengths_q, LengthLaw):
            raise ValueError(f"lengths_q must be a LengthLaw, got {self.lengths_q!r}")
        if self.lengths_k is not None and not isinstance(self.lengths_k, LengthLaw):
            raise ValueError(f"lengths_k must be a LengthLaw or None, got {self.lengths_k!r}")
        if self.shared_q and self.lengths_q != Full():
            raise ValueError(f"lengths_q must be Full() with shared_q, got {self.lengths_q!r}")
        if self.shared_q and self.lengths_k is None:
            raise ValueError("lengths_k must be a LengthLaw with shared_q, got None")
        if self.lengths_k is None and self.max_seqlen_k != self.max_seqlen_q:
            raise ValueError(
                f"max_seqlen_k must equal max_seqlen_q ({self.max_seqlen_q}) when lengths_k is "
                f"None, got {self.max_seqlen_k}"
            )

    def _check_options(self) -> None:
        names = self.activation if isinstance(self.activation, tuple) else (self.activation,)
        if not all(isinstance(name, str) and name for name in names):
            raise ValueError(
                f"activation must be a name or a tuple of names, got {self.activation!r}"
            )
        if isinstance(self.activation, tuple) and len(names) != self.num_heads_q:
            raise ValueError(
                f"activation must have one name per head ({self.num_heads_q}), got {len(names)}"
            )
        ok = self.scale is None or _is_finite(self.scale)
        _check_number("scale", self.scale, "a finite number or None", ok)
        _check_number(
            "output_scale", self.output_scale, "a finite number", _is_finite(self.output_scale)
        )
        if self.window is not None:
            _check_int("window", self.window, 0)

    def _sample(self, law: LengthLaw, max_seqlen: int, stream: int) -> tuple[int, ...]:
        rng = np.random.Generator(np.random.PCG64([self.seed, stream]))
        return tuple(law.sample(self.batch, max_seqlen, rng))

    @cached_property
    def seqlens_q(self) -> tuple[int, ...]:
        """Query rows of each sequence, [batch]."""
        return self._sample(self.lengths_q, self.max_seqlen_q, 0)

    @cached_property
    def seqlens_k(self) -> tuple[int, ...]:
        """Key/value rows of each sequence, [batch]; drawn independently of the query rows."""
        if self.lengths_k is None:
            return self.seqlens_q
        return self._sample(self.lengths_k, self.max_seqlen_k, 1)

    @property
    def total_q(self) -> int:
        """Query rows over the batch = rows of the output, also with a shared q."""
        return sum(self.seqlens_q)

    @property
    def rows_q(self) -> int:
        """Rows of the tensor q: total_q, or max_seqlen_q with a shared q."""
        return self.max_seqlen_q if self.shared_q else self.total_q

    @property
    def total_k(self) -> int:
        """Key/value rows over the batch."""
        return sum(self.seqlens_k)

    @property
    def blocks(self) -> int:
        """Blocks over the batch, of block attention: a sequence's last one may be shorter."""
        return sum(-(-n // self.block_size) for n in self.seqlens_q)

    @property
    def fill(self) -> float:
        """Mean query length of this draw over max_seqlen_q."""
        return self.total_q / (self.batch * self.max_seqlen_q)

    @cached_property
    def pairs(self) -> int:
        """Visible (query, key) pairs over the batch, one head; exact."""
        if self.operator == "block_attention":
            parts = [divmod(n, self.block_size) for n in self.seqlens_q]
            return sum(full * self.block_size**2 + rest**2 for full, rest in parts)
        return visible_pairs(self.seqlens_q, self.seqlens_k, causal=self.causal, window=self.window)

    def flops(self, direction: str) -> int:
        """Useful FLOPs: forward 4 * num_heads_q * head_dim * pairs; backward 2.5 times that.

        Forward is two matmuls (Q K^T and P V) of 2 FLOPs per multiply-add; backward needs five. The
        activation is not counted, nor is a matmul that an implementation recomputes.
        """
        _check_direction(direction)
        products = {"forward": 2, "backward": 5}[direction]
        return 2 * products * self.num_heads_q * self.head_dim * self.pairs

    def _tensor_bytes(self) -> dict[str, int]:
        row = self.head_dim * DTYPE_BYTES[self.dtype]
        return {
            "q": self.rows_q * self.num_heads_q * row,
            "k": self.total_k * self.num_heads_k * row,
            "v": self.total_k * self.num_heads_k * row,
            "o": self.total_q * self.num_heads_q * row,
            "turns": self.total_q * row if self.rotary else 0,  # sin and cos, half a row each
        }

    def bytes_read(self, direction: str) -> int:
        """Fewest bytes read: q, k, v, sin and cos once; backward also the gradient of o (not o, no
        LSE)."""
        _check_direction(direction)
        size = self._tensor_bytes()
        read = size["q"] + size["k"] + size["v"] + size["turns"]
        return read if direction == "forward" else read + size["o"]

    def bytes_written(self, direction: str) -> int:
        """Fewest bytes written: forward o; backward the gradients of q, k and v."""
        _check_direction(direction)
        size = self._tensor_bytes()
        return size["o"] if direction == "forward" else size["q"] + size["k"] + size["v"]

    def bytes(self, direction: str) -> int:
        """Fewest bytes moved, read plus written; cu_seqlens are not counted."""
        return self.bytes_read(direction) + self.bytes_written(direction)

    def to_dict(self) -> dict[str, Any]:
        """The workload as JSON values; `from_dict` restores an equal one.

        Fields of the other operator are left out.
        """
        data = {f.name: getattr(self, f.name) for f in fields(self)}
        data["lengths_q"] = self.lengths_q.to_dict()
        data["lengths_k"] = None if self.lengths_k is None else self.lengths_k.to_dict()
        if isinstance(self.activation, tuple):
            data["activation"] = list(self.activation)
        foreign = self._foreign()
        return {name: value for name, value in data.items() if name not in foreign}

    @staticmethod
    def from_dict(data: Mapping[str, Any]) -> Workload:
        """Rebuild a workload from `to_dict`; ValueError for unknown, missing or wrong fields."""
        if not isinstance(data, Mapping):
            raise ValueError(f"workload must be a mapping, got {data!r}")
        values = dict(data)
        _check_fields("workload", Workload, values)
        values["lengths_q"] = LengthLaw.from_dict(values["lengths_q"])
        if values.get("lengths_k") is not None:
            values["lengths_k"] = LengthLaw.from_dict(values["lengths_k"])
        if isinstance(values.get("activation"), list):
            values["activation"] = tuple(values["activation"])
        return Workload(**values)


_DEFAULTS: dict[str, Any] = {f.name: f.default for f in fields(Workload)}


def _check_direction(direction: str) -> None:
    if direction not in DIRECTIONS:
        raise ValueError(f"direction must be one of {DIRECTIONS}, got {direction!r}")


def visible_pairs(
    seqlens_q: tuple[int, ...],
    seqlens_k: tuple[int, ...],
    *,
    causal: bool = False,
    window: int | None = None,
) -> int:
    """Visible (query, key) pairs over a batch, one head, in closed form per sequence.

    Pairs with j <= i + c, for 0 <= i < lq and 0 <= j < lk, number S(lq + c) - S(c), where S(n) is
    the sum of min(t, lk) over t = 1 .. n. A mask is a band low <= j - i <= high, so its pairs are
    those with j <= i + high less those with j <= i + low - 1.
    """
    lq = np.asarray(seqlens_q, dtype=np.int64)
    lk = np.asarray(seqlens_k, dtype=np.int64)
    if lq.shape != lk.shape or lq.ndim != 1:
        raise ValueError(f"seqlens_k must have the {lq.size} entries of seqlens_q, got {lk.size}")
    if lq.size == 0 or (not causal and window is None):
        return sum((lq * lk).tolist())

    def staircase(n: np.ndarray) -> np.ndarray:
        n = np.maximum(n, 0)
        ramp = np.minimum(n, lk)
        return ramp * (ramp + 1) // 2 + (n - ramp) * lk

    def at_most(c: int) -> np.ndarray:
        return staircase(lq + c) - staircase(np.full_like(lq, c))

    width = int(max(lq.max(), lk.max())) if window is None else window
    width = min(width, int(max(lq.max(), lk.max())))
    band = at_most(0 if causal else width) - at_most(-width - 1)
    return sum(band.tolist())


_PUBLISHED: dict[str, int] = {
    "batch": 1152,
    "num_heads_q": 4,
    "num_heads_k": 4,
    "head_dim": 128,
}
_LENGTHS = (256, 512, 1024, 2048)

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
The interpolated laws have means of 12,440 and 56.6; the reports' means are 11,713 and 53.
"""


def _self(name: str, n: int, law: LengthLaw, lengths_k: LengthLaw | None = None) -> Workload:
    return Workload(
        name=f"gdpa-self-{name}-{n}",
        max_seqlen_q=n,
        max_seqlen_k=n,
        lengths_q=law,
        lengths_k=lengths_k,
        **_PUBLISHED,
    )


def _workloads() -> dict[str, Workload]:
    found = [_self("full", n, Full()) for n in _LENGTHS]
    found += [_self("half-dense", n, Uniform(0.5), Full()) for n in _LENGTHS]
    found += [_self("half-jagged", n, Uniform(0.5)) for n in _LENGTHS]
    found += [
        Workload(
            name=f"gdpa-cross-full-{n}",
            max_seqlen_q=n,
            max_seqlen_k=256,
            lengths_q=Full(),
            lengths_k=Full(),
            **_PUBLISHED,
        )
        for n in _LENGTHS
    ]
    found += [
        _self("ml1m", 1024, MOVIELENS["ml1m"]),
        _self("ml20m", 2048, MOVIELENS["ml20m"]),
        _self("ml25m", 1024, MOVIELENS["ml25m"]),
        _self("ml25m-events", 1024, Events(MOVIELENS["ml25m"])),
        _self("kuairandpure", 512, KUAIRAND["kuairandpure"]),
        _self("kuairand1k", 4096, KUAIRAND["kuairand1k"]),
    ]
    return {w.name: w for w in (*found, *_other_shapes())}


def _other_shapes() -> list[Workload]:
    """What no published figure shows; full batches of 1152, 4 heads, head_dim 128, GELU by tanh,
    but for what the name says."""

    def full(suffix: str, n: int = 1024, keys: int | None = None, **options: Any) -> Workload:
        kind = "self" if keys is None else "cross"
        return Workload(
            name=f"gdpa-{kind}-full-{n}{suffix}", max_seqlen_q=n, max_seqlen_k=keys or n,
            lengths_q=Full(), lengths_k=None if keys is None else Full(), **_PUBLISHED | options,
        )  # fmt: skip

    return [
        full("-h3", num_heads_q=3, num_heads_k=3),
        full("-kv192-h6", keys=192, num_heads_q=6, num_heads_k=6),
        full("-gqa", num_heads_q=8, num_heads_k=2),
        full("-causal", causal=True),
        full("-window128", window=128),
        full("-gelu", activation="gelu"),
        full("", 384),
        full("", 640),
        full("-kv320", 2048, 320),
        full("-b64", 4096, batch=64),
        full("-b8", 8192, batch=8),
        full("-b256-d256", 512, batch=256, head_dim=256),
        full("-kv128-d64", keys=128, head_dim=64),
        replace(_self("half-jagged", 800, Uniform(0.5)), name="gdpa-self-half-jagged-800-d64",
                head_dim=64),
    ]  # fmt: skip


WORKLOADS: dict[str, Workload] = _workloads()
"""Every named workload of GDPA. The published ones: batch 1152, 4 heads, head_dim 128, bfloat16."""

BLOCK_MAX_SEQLENS = (1000, 2000, 3000, 4000, 5000, 6000, 7000, 8000)


def _block(name: str, n: int, law: LengthLaw, **options: Any) -> Workload:
    options = {"num_heads_q": 4, "num_heads_k": 4, "head_dim": 128, **options}
    return Workload(
        name=name,
        operator="block_attention",
        batch=1152 if n <= 7000 else 768,
        max_seqlen_q=n,
        max_seqlen_k=n,
        lengths_q=law,
        **options,
    )


def _block_workloads() -> dict[str, Workload]:
    laws = {"fill70": Between(0.4, 1.0), "fill100": Full()}
    found = [
        _block(f"block-{fill}-{n}{suffix}", n, law, head_dim=head_dim)
        for head_dim, suffix in ((128, ""), (64, "-d64"))
        for fill, law in laws.items()
        for n in BLOCK_MAX_SEQLENS
    ]
    found += [
        _block(f"block-fill70-2000-d{head_dim}", 2000, laws["fill70"], head_dim=head_dim)
        for head_dim in (96, 256)
    ]
    tokens = 1_735_537
    law = Between(0.4, 1.0, total=tokens)
    rotated = {"num_heads_q": 3, "num_heads_k": 3, "rotary": True, "rotate_v": True}
    found += [
        _block(f"block-rotary-{tokens}{suffix}", 2200, law, head_dim=head_dim, **rotated)
        for head_dim, suffix in ((128, ""), (96, "-d96"), (256, "-d256"))
    ]
    return {w.name: w for w in found}


BLOCK_WORKLOADS: dict[str, Workload] = _block_workloads()
"""Every named workload of block attention: batch 1152 (768 above 7000), bfloat16, blocks of 64.

fill70: lengths uniform in [0.4, 1.0) of the maximum; fill100: every length is the maximum. Of the
rotary one only the tokens, batch, heads and head_dim are published; its law of lengths is ours.
-d64, -d96, -d256: the same lengths at another head_dim; none at 96 or 256 is published.
"""

BLOCK_TABLES: dict[str, tuple[str, ...]] = {
    "table5": ("block-fill70-2000",),
    "table6": tuple(
        f"block-{fill}-{n}" for fill in ("fill70", "fill100") for n in BLOCK_MAX_SEQLENS
    ),
    "table7": ("block-rotary-1735537",),
}
"""Table of data/published/block_attention_*.csv -> names of the workloads that it shows."""


def _family(*stems: str) -> tuple[str, ...]:
    return tuple(f"{stem}-{n}" for stem in stems for n in _LENGTHS)


FIGURES: dict[str, tuple[str, ...]] = {
    "gdpa-self-fwd-full": _family("gdpa-self-full"),
    "gdpa-self-fwd-half": _family("gdpa-self-half-dense", "gdpa-self-half-jagged"),
    "gdpa-cross-fwd-full": _family("gdpa-cross-full"),
    "gdpa-self-bwd-full": _family("gdpa-self-full"),
    "gdpa-self-bwd-half": _family("gdpa-self-half-dense", "gdpa-self-half-jagged"),
    "gdpa-cross-bwd-full": _family("gdpa-cross-full"),
}
"""Published figure -> names of the workloads that it shows, shortest first within a family."""


def figure_direction(figure: str) -> str:
    """The direction, "forward" or "backward", of a name in FIGURES; ValueError for any other."""
    if figure not in FIGURES:
        raise ValueError(f"figure must be one of {sorted(FIGURES)}, got {figure!r}")
    return "forward" if "-fwd-" in figure else "backward"


def figures_of(name: str, direction: str) -> tuple[str, ...]:
    """Figures that show workload `name` in `direction`; empty if none does."""
    _check_direction(direction)
    return tuple(
        f for f, names in FIGURES.items() if name in names and figure_direction(f) == direction
    )


def workload(name: str) -> Workload:
    """The workload called `name`; ValueError listing the names if there is none."""
    if name in BLOCK_WORKLOADS:
        return BLOCK_WORKLOADS[name]
    if name not in WORKLOADS:
        known = ", ".join((*sorted(WORKLOADS), *sorted(BLOCK_WORKLOADS)))
        raise ValueError(f"name must be one of {known}, got {name!r}")
    return WORKLOADS[name]
