"""Tiles: the values of a kernel, and Triton's arithmetic on them.

A `Tile` is a torch CPU tensor of the real dtype with Triton's dtype beside it. A scalar is a tile
of rank 0, so that int32 wraps and bf16 rounds as it does in a tile. Compile-time constants are
plain Python numbers. That is Triton's own difference between `tl.constexpr` and `tl.tensor`, and
its promotion rules rest on it: a constant is weak (`bf16_tile * 0.1` stays bf16), a variable is not
(`x = 0.1; bf16_tile * x` is fp32).

Results are never written in place, so tiles may share or broadcast storage. Unsigned integers are
held in int64 and reduced modulo 2^width after each operation, because torch lacks most arithmetic
on uint16 and uint32; a uint64 is the int64 of the same bits. fp8 can be loaded, stored, cast and
multiplied by `tl.dot`, nothing else.
"""

import math
import operator
from collections.abc import Callable, Sequence
from functools import cache, lru_cache
from typing import Any

import numpy as np
import torch
import triton.language as tl
from triton._utils import TRITON_MAX_TENSOR_NUMEL
from triton.language.semantic import TritonSemantic

from .errors import InvalidKernel, Unsupported, current_location
from .launch import current, is_wide

_INTEGERS = {f"int{width}": getattr(torch, f"int{width}") for width in (8, 16, 32, 64)}
_UNSIGNED = {"uint8": 8, "uint16": 16, "uint32": 32}
_FP8 = {"fp8e4nv": torch.float8_e4m3fn, "fp8e5": torch.float8_e5m2}
_FLOATS = {
    **{"fp16": torch.float16, "bf16": torch.bfloat16},
    **{"fp32": torch.float32, "fp64": torch.float64},
}
_HELD = {
    "int1": torch.bool,
    **_INTEGERS,
    **dict.fromkeys((*_UNSIGNED, "uint64"), torch.int64),
    **_FP8,
    **_FLOATS,
}

# Representation of a dtype in memory: the same width, in a type that torch gathers and scatters.
RAW = {
    **_HELD,
    **{name: _INTEGERS[name[1:]] for name in _UNSIGNED},
    **dict.fromkeys(_FP8, torch.int8),
}
# Kernels compare with `is`, too.
_TYPES = {each.name: each for each in vars(tl).values() if isinstance(each, tl.dtype)}
FROM_TORCH = {
    torch.bool: tl.int1,
    **{held: _TYPES[name] for name, held in {**_INTEGERS, **_FP8, **_FLOATS}.items()},
    **{getattr(torch, name): _TYPES[name] for name in (*_UNSIGNED, "uint64")},
}


def held(dtype: tl.dtype) -> torch.dtype:
    """Return the torch dtype in which a tile holds `dtype`."""
    if dtype.name not in _HELD:
        raise Unsupported(f"dtype {dtype}")
    return _HELD[dtype.name]


def bytes_of(dtype: tl.dtype) -> int:
    return max(1, dtype.primitive_bitwidth // 8)


def _wrap(data: torch.Tensor, dtype: tl.dtype) -> torch.Tensor:
    width = _UNSIGNED.get(dtype.name)
    return data if width is None else data & ((1 << width) - 1)


def from_raw(raw: torch.Tensor, dtype: tl.dtype) -> torch.Tensor:
    """Convert memory's representation to a tile's."""
    if dtype.name in _UNSIGNED:
        return _wrap(raw.to(torch.int64), dtype)
    return raw.view(_FP8[dtype.name]) if dtype.name in _FP8 else raw


def to_raw(data: torch.Tensor, dtype: tl.dtype) -> torch.Tensor:
    """Convert a tile's representation to memory's."""
    return data.view(torch.int8) if dtype.name in _FP8 else data.to(RAW[dtype.name])


@cache
def limits(dtype: tl.dtype) -> tuple[int, int]:
    """Return the least and the greatest integer of the type."""
    return dtype.get_int_min_value(), dtype.get_int_max_value()


# Triton's own rules of promotion, which its versions differ in.
_RULES = TritonSemantic(None)


def literal_type(value: bool | int | float) -> tl.dtype:
    """Return the dtype that a Python number gets when it becomes a value."""
    if isinstance(value, Unbound):
        value.refuse()
    if not isinstance(value, (bool, int, float)):
        raise InvalidKernel(f"value must be a number or a tile, got {type(value).__name__}")
    try:
        return _RULES.to_tensor_type(value)
    except ValueError as error:
        raise Unsupported(f"integer {value}, which does not fit 64 bits") from error


@cache
def computation_type(
    a: tl.dtype, a_weak: bool, b: tl.dtype, b_weak: bool, division: bool = False
) -> tl.dtype:
    """Return the dtype in which `a op b` is computed; weak operands are Python numbers."""
    try:
        return _RULES.computation_type_impl(a, a_weak, b, b_weak, division)
    except TypeError as error:
        raise InvalidKernel(f"operands must have compatible types: {error}") from error


def promote_integers(a: tl.dtype, b: tl.dtype) -> tl.dtype:
    return _RULES.integer_promote_impl(a, b)


# Since a role was last charged for them: elements computed, and MUFU results among them.
WORK = [0, 0]


class Tile:
    """A value: `data` (torch, rank 0 for scalars), `dtype` (Triton's), and for pointers `base`.

    The data of pointers are int64 offsets, in elements, from the start of the storage that the
    `memory.Region` in `base` describes. exact: what they would be had no int32 wrapped around, and
    where the first did; None if they are that, or if nobody needs to know (`Launch.wide`).
    """

    __slots__ = ("base", "data", "dtype", "exact")

    def __init__(self, data: torch.Tensor, dtype: tl.dtype, base: Any = None):
        self.data, self.dtype, self.base, self.exact = data, dtype, base, None
        if data.ndim:
            WORK[0] += (count := data.numel())
            if count > TRITON_MAX_TENSOR_NUMEL:
                most = f"a block has at most {TRITON_MAX_TENSOR_NUMEL} elements"
                raise InvalidKernel(f"{most}, got {count}: {self!r}")

    def like(self, data: torch.Tensor) -> "Tile":
        """Build the same kind of value with other data."""
        return Tile(data, self.dtype, self.base)

    def shaped(self, view: Callable[[torch.Tensor], torch.Tensor]) -> "Tile":
        """Build a tile with the same elements in another shape."""
        result = self.like(view(self.data))
        if self.exact is not None:
            result.exact = view(self.exact[0]), self.exact[1]
        return result

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.data.shape)

    @property
    def numel(self) -> int:
        return self.data.numel()

    @property
    def type(self) -> tl.dtype:
        return tl.block_type(self.dtype, list(self.shape)) if self.shape else self.dtype

    @property
    def T(self) -> "Tile":
        return self.like(self.data.permute(1, 0))

    def __repr__(self) -> str:
        return f"{self.dtype}{list(self.shape)}"

    def __bool__(self) -> bool:
        if self.numel != 1:
            raise InvalidKernel(f"condition must be a scalar, got {self!r}")
        return bool(self.data.item())

    def __int__(self) -> int:
        # For the emulator's own use: a kernel's `int` is another function.
        return int(self.data.item())

    def __getitem__(self, index: Any) -> "Tile":
        def view(data: torch.Tensor) -> torch.Tensor:
            for dim, item in enumerate(index if isinstance(index, tuple) else (index,)):
                if item is None:
                    # `scalar[:, None]` is a tile of one element.
                    data = data.unsqueeze(dim if self.shape else min(dim, data.ndim))
                elif not (isinstance(item, slice) and item == slice(None)):
                    raise InvalidKernel(f"index of a tile must be None or ':', got {item!r}")
            return data

        return self.shaped(view)

    def to(
        self, dtype: tl.dtype, fp_downcast_rounding: Any = None, bitcast: bool = False,
        _semantic: Any = None,
    ) -> "Tile":  # fmt: skip
        if fp_downcast_rounding not in (None, "rtne", "rtz"):
            rule = "fp_downcast_rounding must be 'rtne' or 'rtz'"
            raise InvalidKernel(f"{rule}, got {fp_downcast_rounding!r}")
        if fp_downcast_rounding == "rtz":
            return _towards_zero(self, dtype)
        return reinterpret(self, dtype) if bitcast else cast(self, dtype)


class Unbound:
    """Placeholder of a variable without a value, not yet or not any more: it cannot be used."""

    __slots__ = ("name",)

    def __init__(self, name: str):
        self.name = name

    def refuse(self, *args: Any) -> None:
        raise InvalidKernel(
            f"{self.name} is not defined here; a variable that a loop or one branch on runtime "
            f"values assigns first ends with it"
        )

    __getattr__ = __bool__ = __call__ = __index__ = __iter__ = __getitem__ = __repr__ = refuse


def special(tile: Tile) -> Tile:
    """Count the elements of a tile as results of the MUFU, one for each, and return it."""
    WORK[1] += tile.numel if tile.shape else 0
    return tile


def scalar(value: bool | int | float, dtype: tl.dtype) -> Tile:
    """Build a tile of rank 0; integers must fit."""
    if type(value) is int and dtype.is_int():
        return _integer(value, dtype)
    if dtype.is_int() and not isinstance(value, bool):
        raise InvalidKernel(f"constant must fit {dtype}, got {value}")
    return Tile(torch.tensor(value, dtype=held(dtype)), dtype)


@lru_cache(maxsize=4096)
def _integer(value: int, dtype: tl.dtype) -> Tile:
    # Tiles are never changed, so that equal ones may be one.
    low, high = limits(dtype)
    if not low <= value <= high:
        raise InvalidKernel(f"constant must fit {dtype}, got {value}")
    return Tile(torch.tensor(_signed(value), dtype=held(dtype)), dtype)


def _signed(value: int) -> int:
    """Return the integer that int64 has in the bits of this one of uint64."""
    return value - (2**64 if value >= 2**63 else 0)


def to_tile(value: Any) -> Tile:
    """Convert to a tile; a Python number becomes a scalar of its literal type."""
    return value if isinstance(value, Tile) else scalar(value, literal_type(value))


def cast(value: Any, dtype: tl.dtype) -> Tile:
    """Convert a value: floats round to nearest even; to integers they truncate and saturate."""
    tile = to_tile(value)
    source, data = tile.dtype, tile.data
    if source.is_ptr() and dtype.is_ptr():
        region, offsets = tile.base.reinterpret(dtype.element_ty, data)
        return Tile(offsets, dtype, region)
    if dtype.is_ptr() and source.name in ("int64", "uint64"):
        return current().memory.at_addresses(data, dtype)
    if source.is_ptr() and dtype.name in ("int1", "int64", "uint64"):
        address = data * tile.base.itemsize + tile.base.flat.data_ptr()
        return Tile(address != 0 if dtype.name == "int1" else address, dtype)
    if source.is_ptr() or dtype.is_ptr():
        raise Unsupported(f"cast of {source} to {dtype}")
    if source.name == dtype.name:
        return tile
    if dtype.name == "int1":
        data = data != 0
    elif source.name == "uint64" and dtype.is_floating():
        data = data.view(torch.uint64).to(held(dtype))
    elif source.is_floating() and dtype.is_int():
        # cvt.rzi saturates and turns NaN into 0; torch's conversion is undefined out of range.
        low, high = limits(dtype)
        wide, end = data.to(torch.float64).nan_to_num(0.0, math.inf, -math.inf), high + 1.0
        whole = wide.clamp(low, math.nextafter(end, 0.0))
        whole = whole.to(torch.uint64 if high >= 2**63 else torch.int64).view(torch.int64)
        data = torch.where(wide >= end, _signed(high), whole).to(held(dtype))
    elif dtype.is_fp8():
        # cvt.rn.satfinite: whatever exceeds the largest finite number becomes it; NaN stays NaN.
        limit = torch.finfo(held(dtype)).max
        data = data.to(torch.float32).clamp(-limit, limit).to(held(dtype))
    elif dtype.name == "bf16" and current().undefined:
        data = _round_with_marks(data)
    else:
        data = _wrap(data.to(held(dtype)), dtype)
    result = Tile(data, dtype)
    if tile.exact is not None and dtype.name == "int64":
        result.exact = tile.exact
    return result


def _flip(data: torch.Tensor) -> torch.Tensor:
    """Map uint64 to int64 of the same order, or back."""
    return data ^ -(2**63)


def unsigned(extremum: Callable) -> Callable:
    """Apply an extremum of int64 to patterns of uint64."""
    return lambda x, y: _flip(extremum(_flip(x), _flip(y)))


def upper_half(a: Any, b: Any) -> Tile:
    """Return the upper half of the bits of a product of integers of 32 or 64 bits."""
    x, y, dtype = operands(a, b)
    if not dtype.is_int() or dtype.int_bitwidth not in (32, 64):
        raise InvalidKernel(f"umulhi takes integers of 32 or 64 bits, got {dtype}")
    if dtype.int_bitwidth == 32:
        return Tile(_wrap((x.to(torch.int64) * y.to(torch.int64)) >> 32, dtype).to(x.dtype), dtype)
    kind = np.uint64 if dtype.name == "uint64" else np.int64
    # Objects are Python's integers, of any size.
    p, q = (operand.contiguous().numpy().view(kind).astype(object) for operand in (x, y))
    upper = np.asarray(p * q >> 64).astype(kind).view(np.int64)
    return Tile(torch.from_numpy(upper), dtype)


def _towards_zero(tile: Tile, dtype: tl.dtype) -> Tile:
    """Convert fp32 or fp64 to a shorter float, cutting off what does not fit."""
    near = cast(tile, dtype)
    if dtype.name not in ("fp16", "bf16", "fp32") or not tile.dtype.is_floating():
        raise Unsupported(f'fp_downcast_rounding="rtz" from {tile.dtype} to {dtype}')
    bits = near.data.contiguous().view(torch.int32 if dtype.name == "fp32" else torch.int16)
    too_large = near.data.to(tile.data.dtype).abs() > tile.data.abs()
    return near.like((bits - too_large.to(bits.dtype)).view(near.data.dtype))


def _round_with_marks(data: torch.Tensor) -> torch.Tensor:
    """Round to bf16; keep the mark in a NaN's fraction (see `undefined`), which torch drops."""
    high = data.to(torch.float32).contiguous().view(torch.int32) >> 16
    marked = high.to(torch.int16).view(torch.bfloat16)
    return torch.where(data.isnan(), marked, data.to(torch.bfloat16))


def reinterpret(tile: Tile, dtype: tl.dtype) -> Tile:
    """Reinterpret the bits as another type of the same width."""
    if tile.dtype.is_ptr() or dtype.is_ptr() or tile.dtype.name == dtype.name:
        return cast(tile, dtype)
    if tile.dtype.primitive_bitwidth != dtype.primitive_bitwidth:
        raise InvalidKernel(f"bitcast must keep the width, got {tile.dtype} to {dtype}")
    return Tile(from_raw(to_raw(tile.data, tile.dtype).view(RAW[dtype.name]), dtype), dtype)


def operands(a: Any, b: Any, division: bool = False) -> tuple[torch.Tensor, torch.Tensor, tl.dtype]:
    """Return the data of both operands in their computation type, and that type."""
    a_weak, b_weak = not isinstance(a, Tile), not isinstance(b, Tile)
    a_type = literal_type(a) if a_weak else a.dtype
    b_type = literal_type(b) if b_weak else b.dtype
    if a_type.is_ptr() or b_type.is_ptr():
        raise Unsupported(f"this operation on {a_type} and {b_type}")
    dtype = computation_type(a_type, a_weak, b_type, b_weak, division)
    if dtype.is_fp8():
        raise Unsupported(f"arithmetic in {dtype}; cast to a wider type first")
    x = scalar(a, dtype) if a_weak else cast(a, dtype)
    y = scalar(b, dtype) if b_weak else cast(b, dtype)
    return x.data, y.data, dtype


def _arithmetic(op: Callable, a: Any, b: Any) -> Tile:
    x, y, dtype = operands(a, b)
    if dtype.name == "int1":
        return Tile((op(x.to(torch.int64), y.to(torch.int64)) & 1).bool(), dtype)
    result = Tile(_wrap(op(x, y), dtype), dtype)
    if dtype.name in ("int32", "int64") and is_wide():
        _note_wrapped(op, result, (a, x), (b, y))
    return result


def _note_wrapped(op: Callable, result: Tile, *operands: tuple[Any, torch.Tensor]) -> None:
    """Record the exact integer of a result that has wrapped around, or comes from one."""
    known = [value.exact for value, _ in operands if isinstance(value, Tile) and value.exact]
    if not known and result.dtype.name != "int32":
        return
    x, y = (
        value.exact[0] if isinstance(value, Tile) and value.exact else data.to(torch.int64)
        for value, data in operands
    )
    exact = op(x, y)
    if not torch.equal(exact, result.data.to(torch.int64)):
        result.exact = exact, known[0][1] if known else current_location()


def common_shape(tiles: Sequence[Tile]) -> torch.Size:
    """Return the shape that the tiles broadcast to."""
    shapes = {tile.data.shape for tile in tiles}
    return shapes.pop() if len(shapes) == 1 else torch.broadcast_shapes(*shapes)


def is_pointer(value: Any) -> bool:
    return isinstance(value, Tile) and value.dtype.is_ptr()


def _advance(op: Callable, pointer: Tile, offset: Any) -> Tile:
    offset = to_tile(offset)
    if not offset.dtype.is_int():
        raise InvalidKernel(f"pointer offset must be an integer, got {offset!r}")
    result = pointer.like(op(pointer.data, offset.data.to(torch.int64)))
    if pointer.exact or offset.exact:
        _note_wrapped(op, result, (pointer, pointer.data), (offset, offset.data))
    return result


def add(a: Any, b: Any) -> Tile:
    if is_pointer(a) or is_pointer(b):
        return _advance(torch.add, *((a, b) if is_pointer(a) else (b, a)))
    return _arithmetic(torch.add, a, b)


def sub(a: Any, b: Any) -> Tile:
    return (_advance if is_pointer(a) else _arithmetic)(torch.sub, a, b)


def truediv(a: Any, b: Any) -> Tile:
    """Divide; integers and 16-bit floats are divided in fp32 and stay there."""
    x, y, dtype = operands(a, b, division=True)
    if dtype.is_int():
        x, y, dtype = x.to(torch.float32), y.to(torch.float32), tl.float32
    return special(Tile(x / y, dtype))


def _divide(op: Callable, x: torch.Tensor, y: torch.Tensor, dtype: tl.dtype) -> Tile:
    # Division by zero does not trap on the device; its result is garbage, in practice all ones.
    zero = y == 0
    if dtype.name != "uint64" and not bool(zero.any()):
        return Tile(op(x, y), dtype)
    garbage = _wrap(torch.full_like(x, -1), dtype)
    if dtype.name == "uint64":
        pair = torch.broadcast_tensors(x, torch.where(zero, 1, y))
        p, q = (operand.contiguous().numpy().view(np.uint64) for operand in pair)
        result = np.asarray(p % q if op is torch.fmod else p // q)
        return Tile(torch.where(zero, garbage, torch.from_numpy(result.view(np.int64))), dtype)
    return Tile(torch.where(zero, garbage, op(x, torch.where(zero, 1, y))), dtype)


def floordiv(a: Any, b: Any) -> Tile:
    """Divide integers as in C: truncating towards zero."""
    x, y, dtype = operands(a, b, division=True)
    if not dtype.is_int():
        raise InvalidKernel(f"operands of // must be integers, got {dtype}")
    return _divide(lambda p, q: torch.div(p, q, rounding_mode="trunc"), x, y, dtype)


def mod(a: Any, b: Any) -> Tile:
    """Compute the remainder as in C: it has the sign of the dividend."""
    x, y, dtype = operands(a, b, division=True)
    if dtype.is_floating():
        return Tile(torch.fmod(x, y), dtype)
    return _divide(torch.fmod, x, y, dtype)


def _compare(op: Callable, a: Any, b: Any) -> Tile:
    # Unlike arithmetic, a comparison makes constants values: `bf16_tile < 0.1` compares in fp32.
    x, y, dtype = operands(to_tile(a), to_tile(b))
    if dtype.name == "uint64":
        x, y = _flip(x), _flip(y)
    return Tile(op(x, y), tl.int1)


def _bitwise(op: Callable, a: Any, b: Any) -> Tile:
    x, y, dtype = operands(a, b)
    if not dtype.is_int():
        raise InvalidKernel(f"operands of a bitwise operation must be integers, got {dtype}")
    if dtype.name == "uint64" and op is _shift_right:
        op = _shift_right_logically
    return Tile(_wrap(op(x, y), dtype), dtype)


def _shift_left(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    # By the width or more nothing is left, as the device's shl has it.
    width = 8 * x.itemsize
    return torch.where(y < width, x << y.clamp(0, width - 1), 0)


def _shift_right(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return x >> y.clamp(0, 8 * x.itemsize - 1)


def _shift_right_logically(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    mask = (1 << (64 - y).clamp(1, 63)) - 1
    shifted = torch.where(y <= 0, x, x >> y.clamp(0, 63) & mask)
    return torch.where(_flip(y) >= _flip(torch.tensor(64)), 0, shifted)


def invert(a: Tile) -> Tile:
    if not a.dtype.is_int():
        raise InvalidKernel(f"operand of ~ must be an integer, got {a!r}")
    return Tile(_wrap(~a.data, a.dtype), a.dtype)


def logical(op: Callable, *values: Tile) -> Tile:
    """Apply `and`, `or`, `not` to runtime values: element-wise, and only for int1."""
    for value in values:
        if value.dtype.name != "int1":
            raise InvalidKernel(f"operands of and, or, not must be int1, got {value!r}")
    return Tile(op(*(value.data for value in values)), tl.int1)


def _extremum(drop_nan: Callable, keep_nan: Callable) -> Callable:
    def choose(x: Any, y: Any, propagate_nan: Any = tl.PropagateNan.NONE) -> Tile:
        """Compute the extremum, of bf16 in fp32; a NaN loses unless propagate_nan is ALL."""
        x, y = (cast(t, tl.float32) if t.dtype.name == "bf16" else t for t in map(to_tile, (x, y)))
        p, q, dtype = operands(x, y)
        if dtype.name == "uint64":
            return Tile(unsigned(keep_nan)(p, q), dtype)
        keep = not dtype.is_floating() or propagate_nan == tl.PropagateNan.ALL
        return Tile((keep_nan if keep else drop_nan)(p, q), dtype)

    return choose


minimum = _extremum(torch.fmin, torch.minimum)
maximum = _extremum(torch.fmax, torch.maximum)


def where(condition: Any, x: Any, y: Any) -> Tile:
    """Choose element-wise; x and y follow the promotion rules."""
    mask = cast(condition, tl.int1).data
    if is_pointer(x) and is_pointer(y):
        if x.base is not y.base and bool(mask.any()) and not bool(mask.all()):
            raise Unsupported("tl.where between pointers into different tensors")
        return (x if bool(mask.any()) else y).like(torch.where(mask, x.data, y.data))
    p, q, dtype = operands(x, y)
    return Tile(torch.where(mask, p, q), dtype)


def check_shape(shape: Any) -> tuple[int, ...]:
    """Check a tile's shape: constants, each a power of two."""
    for size in shape:
        if not isinstance(size, int) or size < 1 or size & (size - 1):
            raise InvalidKernel(f"tile sizes must be constant powers of two, got {tuple(shape)}")
    return tuple(shape)


def reshape(tile: Tile, shape: tuple[int, ...]) -> Tile:
    if math.prod(check_shape(shape)) != tile.numel:
        raise InvalidKernel(f"reshape must keep the number of elements, got {tile!r} to {shape}")
    return tile.like(tile.data.reshape(shape))


BINARY = {
    "add": add,
    "sub": sub,
    "mul": lambda a, b: _arithmetic(torch.mul, a, b),
    "truediv": truediv,
    "floordiv": floordiv,
    "mod": mod,
    "and": lambda a, b: _bitwise(torch.bitwise_and, a, b),
    "or": lambda a, b: _bitwise(torch.bitwise_or, a, b),
    "xor": lambda a, b: _bitwise(torch.bitwise_xor, a, b),
    "lshift": lambda a, b: _bitwise(_shift_left, a, b),
    "rshift": lambda a, b: _bitwise(_shift_right, a, b),
}
for _name, _function in BINARY.items():
    setattr(Unbound, f"__{_name}__", Unbound.refuse)
    setattr(Unbound, f"__r{_name}__", Unbound.refuse)
    setattr(Tile, f"__{_name}__", lambda self, other, f=_function: f(self, other))
    setattr(Tile, f"__r{_name}__", lambda self, other, f=_function: f(other, self))
for _name in ("lt", "le", "gt", "ge", "eq", "ne"):
    _op = getattr(operator, _name)
    setattr(Tile, f"__{_name}__", lambda self, other, op=_op: _compare(op, self, other))
    setattr(Unbound, f"__{_name}__", Unbound.refuse)
Tile.__neg__ = lambda self: sub(0, self)
Tile.__pos__ = lambda self: self
Tile.__invert__ = invert
