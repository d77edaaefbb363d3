"""libdevice: the elementary functions of NVIDIA's device library, by their names in Triton.

The installed Triton says which types a function takes and gives; here is what it computes. Results
are torch's, where the device's may be off by some units in the last place. fp32 results in a
directed rounding (`_rz`, `_rd`, `_ru`) are those of fp64, rounded.
"""

import math
import re
from collections.abc import Callable
from types import FunctionType, SimpleNamespace
from typing import Any

import torch
import triton.language as tl

from .errors import InvalidKernel, Unsupported
from .instructions import fused_multiply_add, saturate
from .tile import Tile, cast, common_shape, held, reinterpret, to_tile, upper_half

Function = Callable[..., torch.Tensor]


def _away_from_zero(x: torch.Tensor) -> torch.Tensor:
    whole = x.trunc()
    return torch.where((x - whole).abs() >= 0.5, whole + x.sign(), whole)


def _bits(x: torch.Tensor) -> torch.Tensor:
    """Return the bits of integers, the last dimension, lowest first."""
    return x.unsqueeze(-1) >> torch.arange(8 * x.itemsize).to(x.dtype) & 1


def _number(bits: torch.Tensor) -> torch.Tensor:
    return (bits << torch.arange(bits.shape[-1]).to(bits.dtype)).sum(-1).to(bits.dtype)


def _zeros_before_one(bits: torch.Tensor) -> torch.Tensor:
    return (bits.cumsum(-1) == 0).sum(-1)


def _byte_perm(x: torch.Tensor, y: torch.Tensor, selector: torch.Tensor) -> torch.Tensor:
    both = (y.to(torch.int64) << 32) | (x.to(torch.int64) & 0xFFFFFFFF)
    chosen = [both >> (8 * (selector >> 4 * i & 7).to(torch.int64)) & 0xFF for i in range(4)]
    return sum(byte << 8 * i for i, byte in enumerate(chosen)).to(torch.int32)


def _low_24(x: torch.Tensor) -> torch.Tensor:
    low = x.to(torch.int64) & 0xFFFFFF
    return low - (low >> 23 << 24) if x.dtype == torch.int32 else low


def _log_of_gamma_sign(x: torch.Tensor) -> torch.Tensor:
    negative = (x < 0) & (x.floor() % 2 != 0)
    return torch.where(negative, -1.0, 1.0).to(x.dtype)


def _power(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return torch.pow(x, y.to(x.dtype))


def _norm(*values: torch.Tensor) -> torch.Tensor:
    return torch.stack(torch.broadcast_tensors(*values)).norm(dim=0)


def _exponent(x: torch.Tensor) -> torch.Tensor:
    return torch.frexp(x).exponent - 1


def _ilogb(x: torch.Tensor) -> torch.Tensor:
    special = torch.where(x.isnan() | (x == 0), -(2**31), 2**31 - 1)
    return torch.where(x.isfinite() & (x != 0), _exponent(x), special)


def _logb(x: torch.Tensor) -> torch.Tensor:
    return torch.where(x.isfinite() & (x != 0), _exponent(x).to(x.dtype), x.abs().log())


_EXACT: dict[str, Function] = {
    **{name: getattr(torch, name) for name in ("add", "sub", "mul", "div", "sqrt", "rsqrt")},
    "rcp": torch.reciprocal,
    "fma": lambda x, y, z: x * y + z,
}
_SAME = (
    *("abs", "floor", "ceil", "trunc", "rsqrt", "exp2", "sqrt", "signbit", "copysign", "isnan"),
    *("nextafter", "isinf", "sin", "cos", "log2", "tan", "exp", "cosh", "sinh", "tanh", "atan2"),
    *("atan", "asin", "acos", "log", "log10", "log1p", "acosh", "asinh", "atanh", "expm1", "hypot"),
    *("erf", "erfinv", "erfc", "lgamma", "ldexp", "fmod"),
)
_FAST = ("sin", "cos", "tan", "log", "log2", "log10", "exp")
_FUNCTIONS: dict[str, Function] = {
    **{name: getattr(torch, name) for name in _SAME},
    "clz": lambda x: _zeros_before_one(_bits(x).flip(-1)),
    "popc": lambda x: _bits(x).sum(-1),
    "brev": lambda x: _number(_bits(x).flip(-1)),
    "ffs": lambda x: torch.where(x == 0, 0, _zeros_before_one(_bits(x)) + 1),
    "byte_perm": _byte_perm,
    "mul24": lambda x, y: _low_24(x) * _low_24(y),
    "sad": lambda x, y, z: (x.to(torch.int64) - y.to(torch.int64)).abs() + z,
    "hadd": lambda x, y: (x.to(torch.int64) + y.to(torch.int64)) >> 1,
    "rhadd": lambda x, y: (x.to(torch.int64) + y.to(torch.int64) + 1) >> 1,
    "saturatef": saturate,
    **dict.fromkeys(("rint", "nearbyint", "llrint"), torch.round),
    **dict.fromkeys(("round", "llround"), _away_from_zero),
    **dict.fromkeys(("finitef", "isfinited"), torch.isfinite),
    "sinpi": lambda x: torch.sin(math.pi * x.remainder(2)),
    "cospi": lambda x: torch.cos(math.pi * x.remainder(2)),
    **dict.fromkeys(("exp10", "fast_exp10f"), lambda x: torch.pow(10.0, x)),
    "rhypot": lambda x, y: 1 / torch.hypot(x, y),
    **dict.fromkeys(("norm3d", "norm4d"), _norm),
    **dict.fromkeys(("rnorm3d", "rnorm4d"), lambda *values: 1 / _norm(*values)),
    "cbrt": lambda x: x.abs().pow(1 / 3).copysign(x),
    "rcbrt": lambda x: x.abs().pow(-1 / 3).copysign(x),
    **{name: getattr(torch.special, f"bessel_{name}") for name in ("j0", "j1", "y0", "y1")},
    "cyl_bessel_i0": torch.special.i0,
    "cyl_bessel_i1": torch.special.i1,
    "erfcx": torch.special.erfcx,
    "erfcinv": lambda x: torch.erfinv(1 - x),
    "normcdf": torch.special.ndtr,
    "normcdfinv": torch.special.ndtri,
    "tgamma": lambda x: torch.exp(torch.lgamma(x)) * _log_of_gamma_sign(x),
    "scalbn": torch.ldexp,
    "remainder": lambda x, y: x - y * torch.round(x / y),
    **dict.fromkeys(("pow", "fast_powf"), _power),
    "fdim": lambda x, y: torch.where(x.isnan() | y.isnan(), math.nan, (x - y).clamp(min=0)),
    "ilogb": _ilogb,
    "logb": _logb,
    "fast_dividef": torch.div,
    **{f"fast_{name}f": getattr(torch, name) for name in _FAST},
    "hiloint2double": lambda high, low: (
        (high.to(torch.int64) << 32) | (low.to(torch.int64) & 0xFFFFFFFF)
    ).view(torch.float64),
    "double2loint": lambda x: x.contiguous().view(torch.int64).to(torch.int32),
    "double2hiint": lambda x: (x.contiguous().view(torch.int64) >> 32).to(torch.int32),
}
_ROUNDINGS = {"rn": torch.round, "rz": torch.trunc, "rd": torch.floor, "ru": torch.ceil}
# In the names of conversions: a type, and the one of the other signedness that it passes for.
_TYPES = {
    **{"float": tl.float32, "double": tl.float64, "int": tl.int32, "uint": tl.uint32},
    **{"ll": tl.int64, "ull": tl.uint64, "longlong": tl.int64},
}


def _directed(exact: torch.Tensor, rounding: str) -> torch.Tensor:
    """Round fp64 to fp32 towards zero (`rz`), down (`rd`) or up (`ru`); `rn`: to nearest."""
    near = exact.to(torch.float32)
    wide = near.to(torch.float64)
    down = torch.where(wide > exact, torch.nextafter(near, torch.tensor(-math.inf)), near)
    up = torch.where(wide < exact, torch.nextafter(near, torch.tensor(math.inf)), near)
    towards_zero = torch.where(exact > 0, down, up)
    return {"rn": near, "rz": towards_zero, "rd": down, "ru": up}[rounding]


def _convert(x: Tile, source: str, target: str, rounding: str) -> Tile:
    dtype = _TYPES[target]
    x = reinterpret(x, _TYPES[source]) if x.dtype.is_int() else x
    if dtype.is_int() and x.dtype.is_floating():
        return cast(x.like(_ROUNDINGS[rounding](x.data)), dtype)
    if dtype is tl.float32:
        return Tile(_directed(cast(x, tl.float64).data, rounding), dtype)
    return cast(x, dtype)


def call(name: str, tiles: list[Tile], result: tl.dtype) -> Tile:
    """Call `libdevice.name` on values that have its types and one shape."""
    named, rounding = name.rpartition("_")[::2]
    conversion = re.fullmatch(r"(float|double|u?int|u?ll)2(float|double|u?int|u?ll)", named)
    if conversion and rounding in _ROUNDINGS:
        return reinterpret(_convert(tiles[0], *conversion.groups(), rounding), result)
    if re.fullmatch(r"\w+_as_\w+", name):
        return reinterpret(tiles[0], result)
    if name == "mulhi":
        return upper_half(*tiles)
    data = [tile.data for tile in tiles]
    if rounding in _ROUNDINGS and named in _EXACT and result.name == "fp32":
        wide = _EXACT[named](*(d.to(torch.float64) for d in data))
        return Tile(_directed(wide, rounding), result)
    if name == "fma" and result.name == "fp32":
        return Tile(fused_multiply_add(*data), result)
    function = _FUNCTIONS.get(name) or (_EXACT.get(named) if rounding == "rn" else None)
    if function is None or (name == "fma_rn" and result.name == "fp64"):
        raise Unsupported(f"libdevice.{name} of {tiles[0]!r}")
    computed = function(*data)
    if result.is_int() and computed.dtype.is_floating_point:
        wide = tl.float64 if computed.dtype == torch.float64 else tl.float32
        return cast(Tile(computed, wide), result)
    return Tile(computed.to(held(result)), result)


def _apply(name: str, args: list[Any], table: dict[Any, Any]) -> Tile:
    """Implement `core.extern_elementwise` for the code of libdevice's functions."""
    tiles = [to_tile(value) for value in args]
    dtypes = tuple(tile.dtype for tile in tiles)
    if dtypes not in table:
        known = " or ".join(_listed(types) for types in table)
        raise InvalidKernel(f"libdevice.{name} takes {known}, got {_listed(dtypes)}")
    shape = common_shape(tiles)
    tiles = [tile.like(tile.data.expand(shape)) for tile in tiles]
    return call(name, tiles, table[dtypes][1])


def _listed(types: tuple[tl.dtype, ...]) -> str:
    return f"({', '.join(map(str, types))})"


def function(name: str, real: Any) -> Callable[..., Tile]:
    """Build the function of Triton's libdevice, on tiles."""
    inner = getattr(real, "__wrapped__", real)
    core = SimpleNamespace(
        **{"dtype": tl.dtype, "int1": tl.int1, "constexpr": tl.constexpr},
        extern_elementwise=lambda lib, path, args, table, is_pure, _semantic=None: _apply(
            name, args, table
        ),
    )
    names = {"core": core, "__builtins__": __builtins__}
    return FunctionType(inner.__code__, names, name, inner.__defaults__)
