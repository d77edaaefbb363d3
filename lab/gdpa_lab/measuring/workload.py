"""Workloads: what is computed, described without tensors.

A workload names a problem: batch, heads, head_dim, the distribution of its lengths, and a seed.
Lengths, visible pairs, FLOPs and the fewest bytes follow on a CPU, before any kernel runs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np

from gdpa_lab.measuring.length_distributions import Full, LengthDistribution, require_fields
from gdpa_lab.measuring.require import is_finite, require, require_int

if TYPE_CHECKING:
    from gdpa_kernels.gdpa.mask import Mask

DIRECTIONS = ("forward", "backward")
STEP = "forward and backward"
"""A whole step of training, where a direction or the variant of a row is told."""

DTYPE_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}
OPERATORS = ("gdpa", "block_attention")

_MAX_SEQLENS = ("max_seqlen_q", "max_seqlen_k")
_BLOCK_ONLY = ("block_size", "rotary", "rotate_v")


@dataclass(frozen=True)
class Workload:
    """One problem: sizes, length distributions, options and a seed.

    Lengths count tokens. `lengths_k=None` gives every sequence as many K/V rows as it has Q rows.
    `shared_q=True` is pooling by seed queries: q is [max_seqlen_q, num_heads_q, head_dim], one
    tensor for the whole batch, and every sequence has max_seqlen_q output rows. `scale=None` means
    head_dim ** -0.5. The fields that `Mask` has, causal and window, make `mask`; positions count
    from the start of each sequence, so causal is a bool. `target_share` of a sequence's tokens,
    rounded down, are targets, its last ones.

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
    lengths_q: LengthDistribution
    lengths_k: LengthDistribution | None = None
    operator: str = "gdpa"
    shared_q: bool = False
    dtype: str = "bfloat16"
    activation: str | tuple[str, ...] = "gelu_tanh"
    scale: float | None = None
    output_scale: float = 1.0
    causal: bool = False
    window: int | None = None
    target_share: float = 0.0
    seed: int = 2025
    block_size: int = 64
    rotary: bool = False
    rotate_v: bool = False

    def __post_init__(self) -> None:
        name = self.name
        require(isinstance(name, str) and name != "", "name", "a non-empty string", name)
        for name in ("batch", "num_heads_q", "num_heads_k", "head_dim", *_MAX_SEQLENS):
            require_int(name, getattr(self, name), 1)
        require_int("seed", self.seed, 0)
        heads_q, heads_k = self.num_heads_q, self.num_heads_k
        multiple = f"a multiple of num_heads_k ({heads_k})"
        require(heads_q % heads_k == 0, "num_heads_q", multiple, heads_q)
        for name, known in (("operator", OPERATORS), ("dtype", (*DTYPE_BYTES,))):
            require(getattr(self, name) in known, name, f"one of {known}", getattr(self, name))
        for name in ("shared_q", "causal", "rotary", "rotate_v"):
            require(isinstance(getattr(self, name), bool), name, "a bool", getattr(self, name))
        self._check_operator()
        self._check_lengths()
        self._check_options()

    def _check_operator(self) -> None:
        size, rotary = self.block_size, self.rotary
        if size != _DEFAULTS["block_size"]:
            from gdpa_kernels.block_attention.api import BLOCK_SIZES

            known = size in BLOCK_SIZES and not isinstance(size, bool)
            require(known, "block_size", f"one of {BLOCK_SIZES}", size)
        require(rotary or not self.rotate_v, "rotate_v", "False without rotary", self.rotate_v)
        require(not rotary or self.head_dim % 2 == 0, "head_dim", "even with rotary", self.head_dim)
        for name in self._foreign():
            value, default = getattr(self, name), _DEFAULTS[name]
            require(value == default, name, f"{default!r} with operator {self.operator!r}", value)

    def _foreign(self) -> tuple[str, ...]:
        """The fields that mean something only to the other operator."""
        return _BLOCK_ONLY if self.operator == "gdpa" else _GDPA_ONLY

    def _check_lengths(self) -> None:
        of_q, of_k, shared = self.lengths_q, self.lengths_k, self.shared_q
        require(isinstance(of_q, LengthDistribution), "lengths_q", "a LengthDistribution", of_q)
        ok = isinstance(of_k, LengthDistribution | None)
        require(ok, "lengths_k", "a LengthDistribution or None", of_k)
        require(not shared or of_q == Full(), "lengths_q", "Full() with shared_q", of_q)
        ok = of_k is not None or not shared
        require(ok, "lengths_k", "a LengthDistribution with shared_q", of_k)
        if of_k is None and self.max_seqlen_k != self.max_seqlen_q:
            raise ValueError(
                f"max_seqlen_k must equal max_seqlen_q ({self.max_seqlen_q}) when lengths_k is "
                f"None, got {self.max_seqlen_k}"
            )

    def _check_options(self) -> None:
        is_tuple = isinstance(self.activation, tuple)
        names = self.activation if is_tuple else (self.activation,)
        ok = all(isinstance(name, str) and name for name in names)
        require(ok, "activation", "a name or a tuple of names", self.activation)
        if is_tuple and len(names) != self.num_heads_q:
            raise ValueError(
                f"activation must have one name per head ({self.num_heads_q}), got {len(names)}"
            )
        ok = self.scale is None or is_finite(self.scale)
        require(ok, "scale", "a finite number or None", self.scale)
        require(is_finite(self.output_scale), "output_scale", "a finite number", self.output_scale)
        if self.window is not None:
            require_int("window", self.window, 0)
        share = self.target_share
        ok = is_finite(share) and 0 <= share < 1
        require(ok, "target_share", "a number of at least 0 and less than 1", share)
        ok = share == 0 or (self.causal and self.lengths_k is None)
        require(ok, "target_share", "0 but in causal self-attention", share)

    @property
    def masked(self) -> bool:
        """True if the mask hides keys of a sequence from a query."""
        return any(getattr(self, name) != _DEFAULTS[name] for name in _MASK_FIELDS)

    @cached_property
    def mask(self) -> Mask:
        """The keys that a query sees, as `gdpa` takes them, without the batch's targets."""
        from gdpa_kernels.gdpa.mask import Mask

        return Mask(**{name: getattr(self, name) for name in _MASK_FIELDS})

    def _sample(self, lengths: LengthDistribution, most: int, stream: int) -> tuple[int, ...]:
        return _sampled(lengths, self.batch, most, self.seed, stream)

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
    def num_targets(self) -> tuple[int, ...]:
        """Targets of each sequence, [batch]."""
        return tuple(int(self.target_share * length) for length in self.seqlens_q)

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
        if self.target_share:
            from gdpa_kernels.gdpa.mask import segment_pairs

            segments = [(targets, 0) for targets in self.num_targets]
            return segment_pairs(self.seqlens_q, self.seqlens_k, segments, self.mask)
        return visible_pairs(self.seqlens_q, self.seqlens_k, self.mask if self.masked else None)

    def flops(self, direction: str) -> int:
        """Useful FLOPs: forward 4 * num_heads_q * head_dim * pairs; backward 2.5 times that.

        Forward is two matmuls (Q K^T and P V) of 2 FLOPs per multiply-add; backward needs five. The
        activation is not counted, nor is a matmul that an implementation recomputes.
        """
        check_direction(direction)
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
        check_direction(direction)
        size = self._tensor_bytes()
        read = size["q"] + size["k"] + size["v"] + size["turns"]
        return read if direction == "forward" else read + size["o"]

    def bytes_written(self, direction: str) -> int:
        """Fewest bytes written: forward o; backward the gradients of q, k and v."""
        check_direction(direction)
        size = self._tensor_bytes()
        return size["o"] if direction == "forward" else size["q"] + size["k"] + size["v"]

    def bytes(self, direction: str) -> int:
        """Fewest bytes moved, read plus written; cu_seqlens are not counted."""
        return self.bytes_read(direction) + self.bytes_written(direction)

    def to_dict(self) -> dict[str, Any]:
        """The workload as JSON values; `from_dict` restores an equal one.

        Fields of the other operator are left out, and target_share where it is 0, as in records
        older than the field.
        """
        data = {f.name: getattr(self, f.name) for f in fields(self)}
        data["lengths_q"] = self.lengths_q.to_dict()
        data["lengths_k"] = None if self.lengths_k is None else self.lengths_k.to_dict()
        if isinstance(self.activation, tuple):
            data["activation"] = list(self.activation)
        out = self._foreign() if self.target_share else (*self._foreign(), "target_share")
        return {name: value for name, value in data.items() if name not in out}

    @staticmethod
    def from_dict(data: Mapping[str, Any]) -> Workload:
        """Rebuild a workload from `to_dict`; ValueError for unknown, missing or wrong fields."""
        require(isinstance(data, Mapping), "workload", "a mapping", data)
        values = dict(data)
        require_fields("workload", Workload, values)
        for name in ("lengths_q", "lengths_k"):
            if name == "lengths_q" or values.get(name) is not None:
                values[name] = LengthDistribution.from_dict(values[name])
        if isinstance(values.get("activation"), list):
            values["activation"] = tuple(values["activation"])
        return Workload(**values)


@lru_cache(maxsize=512)  # every record that has a workload asks for the same
def _sampled(
    lengths: LengthDistribution, batch: int, most: int, seed: int, stream: int
) -> tuple[int, ...]:
    rng = np.random.Generator(np.random.PCG64([seed, stream]))
    return tuple(lengths.sample(batch, most, rng))


_DEFAULTS: dict[str, Any] = {f.name: f.default for f in fields(Workload)}
_MASK_FIELDS = ("causal", "window")
_GDPA_ONLY = (
    "activation", "output_scale", *_MASK_FIELDS, "target_share", "shared_q", "lengths_k"
)  # fmt: skip


def check_direction(direction: str) -> None:
    require(direction in DIRECTIONS, "direction", f"one of {DIRECTIONS}", direction)


def visible_pairs(
    seqlens_q: tuple[int, ...], seqlens_k: tuple[int, ...], mask: Mask | None = None
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
    if mask is not None and (not mask.plain or mask.causal == "lower_right"):
        raise ValueError(f"mask must count from the start, causal and window alone, got {mask}")
    if lq.size == 0 or mask is None or not (mask.causal or mask.window is not None):
        return sum((lq * lk).tolist())

    def staircase(n: np.ndarray) -> np.ndarray:
        n = np.maximum(n, 0)
        ramp = np.minimum(n, lk)
        return ramp * (ramp + 1) // 2 + (n - ramp) * lk

    def at_most(c: int) -> np.ndarray:
        return staircase(lq + c) - staircase(np.full_like(lq, c))

    longest = int(max(lq.max(), lk.max()))
    width = longest if mask.window is None else min(mask.window, longest)
    band = at_most(0 if mask.causal else width) - at_most(-width - 1)
    return sum(band.tolist())
