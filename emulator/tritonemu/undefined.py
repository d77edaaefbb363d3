"""Values of lanes that a mask turns off and no `other` fills.

On NVIDIA GPUs they happen to be zero. Here a float is NaN by default, with a mark: the number of
the load, from 1 on, in the upper bits of its fraction, where arithmetic and conversions leave it.
So the load is known when a NaN that grew out of it is stored to memory. Where floats become
something else, by a comparison, a conversion to integers, or an extremum that drops NaN, it is
lost.

An integer, or a float of 8 bits, is a number that is as good as any, and the tile an `Undefined`,
which holds what it would be with two others, one of them zero. Operations are carried out for each
of the three. What ends up the same depends on none: a sum behind `tl.where`, a product with zero.
What differs must not be stored, nor be an address or a mask, nor decide a branch. A comparison of
such a lane is undefined whatever it yields. Through shared memory go integers of 32 and 64 bits, by
a mark of their own.
"""

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import triton.language as tl

from . import suppressions, tile
from .errors import Location, UndefinedValue, option
from .launch import current
from .tile import RAW, WORK, Tile, from_raw

MODES = ("nan", "zero")
# Marks that fit; all ones are not one of them, as a NaN without a mark has them, too.
MOST = 62

# Pattern of a dtype without a mark, and the lowest bit of the mark.
_PATTERNS = {
    "bf16": (0x7FC0, 0),
    "fp16": (0x7E00, 3),
    "fp32": (0x7FC00000, 16),
    "fp64": (0x7FF8 << 48, 45),
    **{f"{sign}int32": (0x5A5A5A00, 0) for sign in ("", "u")},
    **{f"{sign}int64": (0x5A5A5A5A5A5A5A00, 0) for sign in ("", "u")},
}
_INTEGERS = {2: torch.int16, 4: torch.int32, 8: torch.int64}
# Location of a load, and what it is, with places for file and line.
Source = tuple[Location, str]


def fills(dtype: tl.dtype, shape: torch.Size, mode: str, mark: int) -> list[torch.Tensor]:
    """Create undefined elements, in memory's representation: one tensor, or the three of an
    `Undefined`. mode: of MODES; mark: 0 for none."""
    raw = RAW[dtype.name]
    if mode == "zero":
        return [torch.zeros(shape, dtype=raw)]
    if dtype.name in _PATTERNS:
        pattern, shift = _PATTERNS[dtype.name]
        value = torch.tensor(pattern | mark << shift, dtype=_INTEGERS[raw.itemsize]).view(raw)
    else:
        pattern = 0x7F if dtype.is_fp8() else 0x5A5A >> 16 - max(8, dtype.int_bitwidth)
        value = torch.tensor(pattern, dtype=raw)
    zero = torch.zeros_like(value)
    values = [value] if raw.is_floating_point else [value, ~value, zero]
    return [each.expand(shape) for each in values]


def marks(raw: torch.Tensor, dtype: tl.dtype) -> torch.Tensor:
    """Extract the mark of each element that a load of this launch has left, 0 where there is
    none."""
    pattern, shift = _PATTERNS.get(dtype.name, (0, 0))
    most = min(MOST, len(current().undefined))
    if not pattern or not most:
        return torch.zeros((), dtype=torch.int64)
    bits = raw.view(_INTEGERS[raw.itemsize])
    if raw.is_floating_point():
        numbers = torch.where(raw.isnan(), bits >> shift & MOST + 1, 0)
    else:
        numbers = bits - pattern
    return torch.where((numbers > 0) & (numbers <= most), numbers, 0)


class Undefined(Tile):
    """A tile with undefined lanes. others: its data if these hold something else; source: of the
    first of them."""

    __slots__ = ("others", "source")

    def __init__(self, first: Tile, others: Sequence[torch.Tensor], source: Source):
        super().__init__(first.data, first.dtype, first.base)
        self.others, self.source = tuple(others), source

    @property
    def lanes(self) -> torch.Tensor:
        """Mask of the undefined lanes."""
        return torch.stack([_differ(self.data, each) for each in self.others]).any(0)

    def chosen(self, number: int) -> Tile:
        return self.like(self.others[number - 1] if number else self.data)

    def __bool__(self) -> bool:
        refuse("a condition that decides where the kernel goes on", self.source)
        return super().__bool__()

    def __int__(self) -> int:
        refuse("an integer that the kernel needs to know", self.source)
        return super().__int__()


def refuse(what: str, source: Source, buffer: str = "") -> None:
    """Raise UndefinedValue, unless a comment allows it."""
    location, load = source
    finding = UndefinedValue(
        f"{what} comes from {load.format(*location)}, or allow it with {option('masked', 'zero')}",
        other=location,
        buffer=buffer,
    )
    suppressions.judge(finding, current().report)


def _differ(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    if x.is_floating_point():
        x, y = x.to(torch.float64), y.to(torch.float64)
        return (x != y) & ~(x.isnan() & y.isnan())
    return x != y


def versions(value: Tile) -> list[torch.Tensor]:
    """Return the data of a tile, and of an `Undefined` what they may be as well."""
    return [value.data, *getattr(value, "others", ())]


def of(raw: Sequence[torch.Tensor], dtype: tl.dtype, source: Source | None) -> Tile:
    """Build a tile from versions of it in memory's representation."""
    first, *others = (from_raw(each, dtype) for each in raw)
    return _built(Tile(first, dtype), others, source)


def _built(first: Tile, others: Sequence[torch.Tensor], source: Source | None) -> Tile:
    if any(bool(_differ(first.data, each).any()) for each in others):
        return Undefined(first, others, source)
    return first


def _undefined(values: Iterable[Any]) -> Undefined | None:
    for value in values:
        if isinstance(value, Undefined):
            return value
        if isinstance(value, (tuple, list)) and (inner := _undefined(value)) is not None:
            return inner
    return None


def _chosen(value: Any, number: int) -> Any:
    if isinstance(value, (tuple, list)):
        items = [_chosen(each, number) for each in value]
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    return value.chosen(number) if isinstance(value, Undefined) else value


def _joined(first: Any, *others: Any, source: Source) -> Any:
    """Join the results of an operation on several versions of its operands."""
    if isinstance(first, tuple):
        items = [_joined(*each, source=source) for each in zip(first, *others, strict=True)]
        return type(first)(*items) if hasattr(first, "_fields") else tuple(items)
    if not isinstance(first, Tile) or isinstance(first, Undefined):
        return first
    return _built(first, [each.data for each in others], source)


def on_each(function: Callable) -> Callable:
    """Let an operation take tiles with undefined lanes: it is carried out for each version."""

    @functools.wraps(function)
    def apply(*args: Any, **kwargs: Any) -> Any:
        first = _undefined((args, tuple(kwargs.values())))
        if first is None:
            return function(*args, **kwargs)
        results, report = [], current().report
        for number in range(1 + len(first.others)):
            named = {name: _chosen(value, number) for name, value in kwargs.items()}
            results.append(function(*_chosen(args, number), **named))
            if not number:
                work, dots = WORK[:], report.dots
        WORK[:], report.dots = work, dots
        return _joined(*results, source=first.source)

    return apply


def _comparison(name: str) -> Callable:
    def apply(self: Undefined, other: Any) -> Tile:
        result = getattr(Tile, name)(*_chosen((self, other), 0))
        reverse = result.data
        for each in (self, other):
            if isinstance(each, Undefined):
                reverse = torch.where(each.lanes, ~result.data, reverse)
        return _built(result, [reverse] * len(self.others), self.source)

    return apply


_BOTH = ("add", "sub", "mul", "truediv", "floordiv", "mod", "and", "or", "xor", "lshift", "rshift")
for _name in (*_BOTH, *(f"r{name}" for name in _BOTH), "neg", "invert", "getitem"):
    setattr(Undefined, f"__{_name}__", on_each(getattr(Tile, f"__{_name}__")))
for _name in ("lt", "le", "gt", "ge", "eq", "ne"):
    setattr(Undefined, f"__{_name}__", _comparison(f"__{_name}__"))
Undefined.to, Undefined.T = on_each(Tile.to), property(on_each(Tile.T.fget))

cast, logical = on_each(tile.cast), on_each(tile.logical)
