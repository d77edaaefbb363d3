"""Replaces `triton.language` in a lowered kernel.

OPERATIONS holds what Triton implements in its compiler. What Triton writes in Triton (`tl.sum`,
`tl.max`, `tl.cdiv`, `tl.sigmoid`, `tl.sort`, ...) is lowered from the installed Triton like any
helper function, so it follows that version exactly. What is in neither raises `Unsupported`.

Accuracy: elementary functions are torch's, right to about one ulp, where the device's `exp` and
fp32 division are off by up to two. Multiplications and additions are not fused.
"""

import contextlib
import functools
import math
from collections.abc import Callable, Iterator, Sequence
from itertools import product
from types import FunctionType, ModuleType
from typing import Any

import torch
import triton.language as tl
from triton.language.core import is_builtin
from triton.language.extra.cuda import libdevice
from triton.runtime import _allocation
from triton.runtime.jit import JITFunction

from . import library, rewrite, suppressions, tile, undefined
from .blocks import BlockPointer
from .errors import InvalidKernel, UndefinedValue, Unsupported
from .instructions import execute, fused_multiply_add, instruction_counts, round_fraction
from .launch import current
from .memory import REDUCTIONS, Descriptor
from .rewrite import constant, static_int
from .tile import WORK, Tile, cast, scalar, to_tile

OPERATIONS: dict[str, Any] = {}

# Operations whose values may go through shared memory, in which all warps of a program meet.
_MEETING = (
    *("dot", "dot_scaled", "reduce", "_reduce_with_indices", "associative_scan", "gather"),
    *("histogram", "debug_barrier"),
)

try:  # fbtriton has it, upstream's Triton does not
    from triton.language.extra.cuda import inline_ptx_lib
except ImportError:
    inline_ptx_lib = None


def _is_helper(function: Any) -> bool:
    """Return whether it is plain Python of `tl.core`, which Triton calls while it compiles."""
    plain = isinstance(function, FunctionType) and function.__module__ == tl.core.__name__
    return plain and not (is_builtin(function) or "_semantic" in function.__code__.co_varnames)


class Namespace:
    """A module of operations; `sources` are the Triton modules whose library completes it."""

    def __init__(self, name: str, table: dict[str, Any], *sources: Any):
        self.__dict__.update(table)
        self._name, self._sources = name, sources

    def __getattr__(self, operation: str) -> Any:
        candidates = (vars(source).get(operation) for source in self._sources)
        real = next((value for value in candidates if value is not None), None)
        if isinstance(real, (JITFunction, rewrite.ConstexprFunction, tl.constexpr, ModuleType)):
            return current().lowering.convert(real)
        if isinstance(real, tl.dtype):
            return real
        if _is_helper(real):
            return rewrite.on_constants(real)
        module = getattr(real, "__module__", "")
        if module == libdevice.__name__:
            return undefined.on_each(library.function(operation, real))
        if inline_ptx_lib and module == inline_ptx_lib.__name__:
            # A builtin that is Python on other builtins: the same code on ours.
            inner = real.__wrapped__
            names = {"core": LANGUAGE, "__builtins__": __builtins__}
            return FunctionType(inner.__code__, names, inner.__name__, inner.__defaults__)
        raise Unsupported(f"{self._name}.{operation}")


def _operation(function: Callable) -> Callable:
    OPERATIONS[function.__name__.removesuffix("_")] = function
    return function


def _sizes(values: tuple[Any, ...]) -> tuple[int, ...]:
    """Return the integers of `f(x, (a, b))` or `f(x, a, b)`."""
    values = values[0] if len(values) == 1 and isinstance(values[0], tuple) else values
    return tuple(static_int(value) for value in values)


def _axis(axis: int, rank: int) -> int:
    if not -rank <= static_int(axis) < rank:
        raise InvalidKernel(f"axis must lie in [{-rank}, {rank}), got {axis}")
    return axis % rank


@_operation
def arange(start: int, end: int) -> Tile:
    tile.check_shape((static_int(end) - static_int(start),))
    return Tile(torch.arange(start, end, dtype=torch.int32), tl.int32)


@_operation
def full(shape: Any, value: Any, dtype: tl.dtype) -> Tile:
    value = cast(value, dtype) if isinstance(value, Tile) else scalar(value, dtype)
    return value.like(value.data.expand(tile.check_shape(shape)))


@_operation
def broadcast(input: Tile, other: Tile) -> tuple[Tile, Tile]:
    x, y = torch.broadcast_tensors(input.data, other.data)
    return input.like(x), other.like(y)


@_operation
def broadcast_to(input: Tile, *shape: Any) -> Tile:
    sizes = tile.check_shape(_sizes(shape))
    if len(input.shape) not in (0, len(sizes)):
        raise InvalidKernel(f"broadcast must keep the rank, got {input!r} to {sizes}")
    return input.shaped(lambda data: data.expand(sizes))


@_operation
def trans(input: Tile, *dims: Any) -> Tile:
    rank = len(input.shape)
    if not dims and rank < 2:
        raise InvalidKernel(f"tl.trans needs rank 2 or more, got {input!r}")
    order = _sizes(dims) if dims else (*range(rank - 2), rank - 1, rank - 2)
    return input.like(input.data.permute(order))


@_operation
def expand_dims(input: Any, axis: Any) -> Tile:
    input = to_tile(input)
    axes = axis if isinstance(axis, tuple) else (axis,)
    rank, data = len(input.shape) + len(axes), input.data
    for dim in sorted(_axis(a, rank) for a in axes):
        data = data.unsqueeze(dim)
    return input.like(data)


def _one_dtype(name: str, a: Tile, b: Tile) -> None:
    if a.dtype.name != b.dtype.name:
        raise InvalidKernel(f"operands of tl.{name} must have one dtype, got {a!r} and {b!r}")


@_operation
def join(a: Any, b: Any) -> Tile:
    a, b = broadcast(to_tile(a), to_tile(b))
    _one_dtype("join", a, b)
    return a.like(torch.stack((a.data, b.data), -1))


@_operation
def split(a: Tile) -> tuple[Tile, Tile]:
    if a.shape[-1:] != (2,):
        raise InvalidKernel(f"tl.split needs a last dimension of 2, got {a!r}")
    return a.like(a.data[..., 0]), a.like(a.data[..., 1])


@_operation
def cat(input: Tile, other: Tile, can_reorder: bool = False, dim: int = 0) -> Tile:
    _one_dtype("cat", input, other)
    return input.like(torch.cat((input.data, other.data), dim))


@_operation
def load(
    pointer: Any, mask: Any = None, other: Any = None, boundary_check: Any = (),
    padding_option: str = "", cache_modifier: str = "", eviction_policy: str = "",
    volatile: bool = False, latency: int | None = None,
) -> Tile:  # fmt: skip
    if isinstance(pointer, BlockPointer):
        if mask is not None or other is not None:
            raise InvalidKernel("tl.load of a block pointer takes no `mask` and no `other`")
        return pointer.load(boundary_check, padding_option)
    if boundary_check or padding_option:
        raise InvalidKernel("boundary_check and padding_option need a block pointer")
    if mask is None and other is not None:
        raise InvalidKernel("tl.load takes `other` only with `mask`, got no mask")
    return current().memory.load(pointer, mask, other)


@_operation
def store(
    pointer: Any, value: Any, mask: Any = None, boundary_check: Any = (),
    cache_modifier: str = "", eviction_policy: str = "",
) -> None:  # fmt: skip
    if isinstance(pointer, BlockPointer):
        if mask is not None:
            raise InvalidKernel("tl.store to a block pointer takes no `mask`")
        pointer.store(value, boundary_check)
        return
    if boundary_check:
        raise InvalidKernel("boundary_check needs a block pointer")
    current().memory.store(pointer, value, mask)


@_operation
def advance(base: Any, offsets: Any) -> BlockPointer:
    if not isinstance(base, BlockPointer):
        raise InvalidKernel(f"tl.advance needs a block pointer, got {base!r}")
    return base.advance(offsets)


@_operation
def histogram(input: Tile, num_bins: int, mask: Any = None) -> Tile:
    """Count 0 .. num_bins - 1.

    NVIDIA GPUs count by the low bits of a value, of at least 32 bins. Which bin gets a value that
    lies outside is not Triton's word: that bin is undefined, as lanes are that a mask turns off.
    """
    if len(input.shape) != 1 or not input.dtype.is_int():
        raise InvalidKernel(f"tl.histogram takes integers of rank 1, got {input!r}")
    (bins,) = tile.check_shape((static_int(num_bins),))
    values = input.data.to(torch.int64)
    if mask is not None:
        values = values[to_tile(mask).data.expand(values.shape)]
    outside = values[(values < 0) | (values >= bins)]
    counted = values & max(bins, 32) - 1
    counts = [torch.bincount(counted, minlength=bins)[:bins].to(torch.int32)]
    source = None
    if outside.numel() and current().masked != "zero":
        what = (
            f"the tl.histogram at {{}}:{{}}, which got {int(outside[0])} and has bins [0, {bins}); "
            "give it a `mask`"
        )
        values, source = current().memory.undefined(tl.int32, counts[0].shape, what)
        affected = torch.bincount(outside & bins - 1, minlength=bins) > 0
        counts = [torch.where(affected, value, counts[0]) for value in values]
    return undefined.of(counts, tl.int32, source)


def _atomic(name: str, update: Callable) -> Callable:
    def atomic(
        pointer: Tile, val: Any, mask: Any = None, sem: Any = None, scope: Any = None
    ) -> Tile:
        if not tile.is_pointer(pointer):
            raise InvalidKernel(f"tl.atomic_{name} needs a pointer, got {pointer!r}")
        element = pointer.dtype.element_ty
        refused = element.primitive_bitwidth < 16 or element.name in ("int16", "uint16")
        refused |= element.primitive_bitwidth == 16 and name != "add"
        if refused or (name in ("and", "or", "xor") and not element.is_int()):
            raise InvalidKernel(f"tl.atomic_{name} has no {element}")
        unsigned = element.name == "uint64" and name in ("max", "min")
        combine = tile.unsigned(update) if unsigned else update
        return current().memory.atomic(pointer, combine, [val], mask, sem, name != "xchg", scope)

    return atomic


def atomic_load(pointer: Tile, mask: Any = None, sem: Any = None, scope: Any = None) -> Tile:
    return current().memory.atomic(
        pointer, lambda old: old, [], mask, sem or "acquire", scope=scope
    )


for _name, _combine in {**REDUCTIONS, "xchg": lambda old, value: value}.items():
    OPERATIONS[f"atomic_{_name}"] = _atomic(_name, _combine)
OPERATIONS.update(
    atomic_load=atomic_load,
    atomic_store=lambda pointer, val, mask=None, sem=None, scope=None: current().memory.atomic(
        pointer, lambda old, new: new, [val], mask, sem or "release", False, scope
    ),
    atomic_cas=lambda pointer, cmp, val, sem=None, scope=None: current().memory.atomic(
        pointer,
        lambda old, is_, new: torch.where(old == is_, new, old),
        [cmp, val],
        sem=sem,
        scope=scope,
    ),
)


@_operation
def atomic_poll(
    pointer: Tile, expected_value: Any, sem: Any = None, scope: Any = None, timeout_ns: Any = None
) -> Tile:
    """Load until the value is there. A nanosecond of the timeout is a cycle of modelled time."""
    if pointer.shape:
        raise Unsupported("tl.atomic_poll of a block of pointers")
    role, scheduler = current().role, current().scheduler
    end = math.inf if timeout_ns is None else role.time + int(to_tile(timeout_ns))
    while True:
        equal = atomic_load(pointer, None, sem, scope) == expected_value
        if bool(equal) or role.time >= end:
            return equal
        scheduler.changes += timeout_ns is not None  # of the time
        rewrite.again(True)


@_operation
def expect_zero(x: Any, mask: Any) -> Any:
    """Check that `x` is zero where the mask holds, as debug builds do."""
    x = to_tile(x)
    rewrite.check((x == 0) | ~to_tile(mask), "tl.expect_zero")
    return x


@_operation
def make_tensor_descriptor(
    base: Tile, shape: Any, strides: Any, block_shape: Any, padding_option: str = "zero"
) -> Descriptor:
    if isinstance(_allocation._allocator.get(), _allocation.NullAllocator):
        raise InvalidKernel(
            "a descriptor made here needs memory of triton.set_allocator; none is set"
        )
    if isinstance(strides[-1], Tile):
        raise InvalidKernel("last stride of a descriptor must be the constant 1, got a value")
    sizes, steps = ([int(value) for value in values] for values in (shape, strides))
    return Descriptor(base, sizes, steps, tile.check_shape(block_shape), padding_option)


# Parts of a fp32 operand, and their fraction bits.
_PRECISIONS = {
    **{"ieee": (1, 23), "tf32": (1, 10), "tf32x3": (2, 10)},
    **{"bf16x3": (2, 7), "bf16x6": (3, 7)},
}


def _parts(x: torch.Tensor, count: int, bits: int) -> list[torch.Tensor]:
    """Split x into short floats whose sum is about x, the largest first."""
    parts = []
    for _ in range(count):
        parts.append(round_fraction(x, bits) if bits < 23 else x)
        x = x - parts[-1]
    return parts


@_operation
def dot(
    input: Tile, other: Tile, acc: Tile | None = None, input_precision: str | None = None,
    allow_tf32: bool | None = None, max_num_imprecise_acc: int | None = None,
    out_dtype: tl.dtype = tl.float32, attrs: Any = None,
) -> Tile:  # fmt: skip
    """Multiply in fp32 (fp64 for fp64, int32 for int8); products of 16-bit floats are exact.

    fp32 operands are rounded to tf32, 10 fraction bits, unless input_precision is "ieee"; the
    hardware may truncate instead. "tf32x3", "bf16x3" and "bf16x6" split them into sums of two or
    three short parts. The short accumulator of fp8 on Hopper is not modelled.
    """
    if input_precision is not None and allow_tf32 is not None:
        raise InvalidKernel("tl.dot takes one of input_precision and allow_tf32, got both")
    precision = input_precision or ("ieee" if allow_tf32 is False else "tf32")
    if precision not in _PRECISIONS:
        raise InvalidKernel(f"input_precision must be one of {(*_PRECISIONS,)}, got {precision!r}")
    a, b, rank = input.dtype, other.dtype, len(input.shape)
    if not (a.is_fp8() and b.is_fp8()):
        _one_dtype("dot", input, other)
    if not (a.is_floating() or a.name == "int8") or out_dtype.name == "bf16":
        raise InvalidKernel(f"tl.dot takes floats or int8, and gives no bf16, got {a}, {out_dtype}")
    if rank not in (2, 3) or len(other.shape) != rank or input.shape[-1] != other.shape[-2]:
        raise InvalidKernel(f"shapes of tl.dot must match, got {input!r} and {other!r}")
    if input.shape[-1] < (32 if a.primitive_bitwidth == 8 else 16):
        raise InvalidKernel(f"inner size of tl.dot must be 16, 32 for 8 bits, got {input!r}")
    current().report.dots += 1
    wide = {"int8": tl.int32, "fp64": tl.float64}.get(a.name, tl.float32)
    x, y = (operand.data.to(tile.held(wide)) for operand in (input, other))
    if a.name == "fp32":
        parts, bits = _PRECISIONS[precision]
        xs, ys = _parts(x, parts, bits), _parts(y, parts, bits)
        # The smallest products first; those of two small parts are left out.
        order = sorted(product(range(parts), repeat=2), key=lambda pair: -sum(pair))
        summed = sum(xs[i] @ ys[j] for i, j in order if i + j < parts)
    else:
        summed = x @ y
    result = out_dtype if a.name == "fp16" or a.is_fp8() else wide
    if acc is not None:
        if acc.dtype.name != result.name or acc.data.shape != summed.shape:
            expected = f"{result}{list(summed.shape)}"
            raise InvalidKernel(f"acc of tl.dot must be {expected}, got {acc!r}")
        summed = summed + acc.data.to(summed.dtype)
    return Tile(summed.to(tile.held(result)), result)


_E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
_SCALED = {"e2m1": "uint8", "e4m3": "fp8e4nv", "e5m2": "fp8e5", "bf16": "bf16", "fp16": "fp16"}


def _unscaled(x: Tile, element: str, packed: int) -> torch.Tensor:
    """Convert an operand of tl.dot_scaled to fp32. packed: the dimension of pairs."""
    expected = _SCALED.get(element)
    if expected is None:
        raise InvalidKernel(f"format of tl.dot_scaled must be one of {(*_SCALED,)}, got {element}")
    if element in ("e4m3", "e5m2") and x.dtype.name in ("uint8", "int8"):
        x = tile.reinterpret(x, tl.dtype(expected))
    if x.dtype.name not in (expected, "int8" if element == "e2m1" else expected):
        raise InvalidKernel(f"tl.dot_scaled takes {expected} for {element}, got {x!r}")
    if element != "e2m1":
        return x.data.to(torch.float32)
    bits = x.data.to(torch.int64)
    pairs = torch.stack((bits & 15, bits >> 4 & 15), -1).movedim(-1, packed % bits.ndim + 1)
    values = pairs.flatten(packed % bits.ndim, packed % bits.ndim + 1)
    return _E2M1[values & 7] * (1 - (values >> 3) * 2)


def _scales(scale: Tile | None, size: int, k: int) -> torch.Tensor | float:
    """Return the factor of each element of [size, k]: e8m0, or e4m3 for groups of 16."""
    if scale is None:
        return 1.0
    groups = scale.shape[-1]
    if scale.shape[-2] != size or k % groups or k // groups not in (16, 32):
        raise InvalidKernel(f"scales of tl.dot_scaled must be [{size}, {k} / 32], got {scale!r}")
    if scale.dtype.is_fp8():
        factors = scale.data.to(torch.float32)
    else:
        bits = scale.data.to(torch.int64) & 255
        exponents = torch.exp2((bits - 127).to(torch.float64)).to(torch.float32)
        factors = torch.where(bits == 255, math.nan, exponents)
    return factors.repeat_interleave(k // groups, -1)


def scaled(x: Tile, scale: Tile, element: str) -> torch.Tensor:
    """Return the elements [rows, K] of rows in a microscaling format and their factors."""
    values = _unscaled(x, element, -1)
    return values * _scales(scale, *values.shape)


@_operation
def dot_scaled(
    lhs: Tile, lhs_scale: Tile | None, lhs_format: str, rhs: Tile, rhs_scale: Tile | None,
    rhs_format: str, acc: Tile | None = None, fast_math: bool = False, lhs_k_pack: bool = True,
    rhs_k_pack: bool = True, out_dtype: tl.dtype = tl.float32,
) -> Tile:  # fmt: skip
    """Multiply microscaling formats, in fp32; sm_90 rounds the scaled operands to bf16."""
    a = _unscaled(lhs, lhs_format, -1 if lhs_k_pack else -2)
    b = _unscaled(rhs, rhs_format, -2 if rhs_k_pack else -1).mT
    if a.shape[-1] != b.shape[-1] or a.ndim != b.ndim:
        raise InvalidKernel(f"shapes of tl.dot_scaled must match, got {lhs!r} and {rhs!r}")
    a = a * _scales(lhs_scale, *a.shape[-2:])
    b = b * _scales(rhs_scale, *b.shape[-2:])
    if current().arch == "sm_90":
        a, b = (x.to(torch.bfloat16).to(torch.float32) for x in (a, b))
    current().report.dots += 1
    product = a @ b.mT
    if acc is not None:
        if acc.shape != tuple(product.shape) or acc.dtype.name != out_dtype.name:
            raise InvalidKernel(f"acc of tl.dot_scaled must be {list(product.shape)}, got {acc!r}")
        product = product + acc.data
    return cast(Tile(product, tl.float32), out_dtype)


_MUFU = ("exp", "exp2", "log", "log2", "cos", "sin", "sqrt", "rsqrt", "erf", "sqrt_rn")


def _float_function(
    name: str, function: Callable, dtypes: Sequence[str] = ("fp32", "fp64")
) -> Callable:
    def apply(x: Any) -> Tile:
        x = to_tile(x)
        if x.dtype.name not in dtypes:
            raise InvalidKernel(f"{name} takes {' or '.join(dtypes)}, got {x!r}")
        result = x.like(function(x.data))
        return tile.special(result) if name.removeprefix("tl.") in _MUFU else result

    return apply


for _name in ("exp", "exp2", "log", "log2", "cos", "sin", "sqrt", "rsqrt", "erf", "floor", "ceil"):
    OPERATIONS[_name] = _float_function(f"tl.{_name}", getattr(torch, _name))
OPERATIONS["sqrt_rn"] = _float_function("tl.sqrt_rn", torch.sqrt, ("fp32",))


@_operation
def abs_(x: Any) -> Tile:
    x = to_tile(x)
    return x if x.dtype.is_int_unsigned() else x.like(x.data.abs())


@_operation
def clamp(x: Any, min: Any, max: Any, propagate_nan: Any = tl.PropagateNan.NONE) -> Tile:
    result = tile.minimum(tile.maximum(x, min, propagate_nan), max, propagate_nan)
    if not result.dtype.is_floating():
        raise InvalidKernel(f"tl.clamp takes floats, got {result!r}")
    return result


@_operation
def fdiv(x: Any, y: Any, ieee_rounding: bool = False) -> Tile:
    p, q, dtype = tile.operands(to_tile(x), to_tile(y))
    if not dtype.is_floating():
        raise InvalidKernel(f"tl.fdiv takes floats, got {dtype}")
    return tile.special(Tile(p / q, dtype))


@_operation
def fma(x: Any, y: Any, z: Any) -> Tile:
    x, y, z = (to_tile(value) for value in (x, y, z))
    dtype = tile.operands(cast(x, tile.operands(x, y)[2]), z)[2]
    if dtype.name == "fp64":
        raise Unsupported("tl.fma in fp64")
    return Tile(fused_multiply_add(*(cast(value, dtype).data for value in (x, y, z))), dtype)


@_operation
def inline_asm_elementwise(
    asm: str, constraints: str, args: Any, dtype: Any, is_pure: bool, pack: int,
    _semantic: Any = None,
) -> Any:  # fmt: skip
    """Execute inline PTX through the table in `instructions`, on `pack` elements at a time.

    Values shorter than 32 bits share a register. Which elements form a pack is unspecified on the
    device; here it is consecutive ones.
    """
    tiles = [to_tile(value) for value in args]
    shape = tile.common_shape(tiles)
    several = isinstance(dtype, (tuple, list))
    dtypes = dtype if several else (dtype,)

    def lanes(element: tl.dtype) -> int:
        return min(pack, max(1, 32 // element.primitive_bitwidth))

    inputs = []
    for t in tiles:
        data = t.data if tile.is_pointer(t) else tile.to_raw(t.data, t.dtype)
        columns = data.expand(shape).reshape(-1, pack).unbind(-1)
        step = lanes(t.dtype)
        inputs += [columns[i : i + step] for i in range(0, pack, step)]
    counts, work = [pack // lanes(element) for element in dtypes], WORK[0]
    registers = execute(asm, inputs, sum(counts), current().arch)
    issued, results_of_mufu = instruction_counts(asm)
    packs = math.prod(shape) // pack if shape else 0
    results = []
    for element, count in zip(dtypes, counts, strict=True):
        columns = [lane for register in registers[:count] for lane in register]
        registers = registers[count:]
        if len(columns) != pack or columns[0].dtype != tile.RAW[element.name]:
            raise InvalidKernel(f"inline assembly must return {pack} values of {element}")
        raw = torch.stack(torch.broadcast_tensors(*columns), -1)
        raw = raw.expand(math.prod(shape) // pack, pack).reshape(shape)
        results.append(Tile(tile.from_raw(raw, element), element))
    WORK[:] = work + issued * packs, WORK[1] + results_of_mufu * packs
    return tuple(results) if several else results[0]


@_operation
def map_elementwise(scalar_fn: Callable, *args: Any, pack: int = 1) -> Any:
    """Apply the scalar function to whole tiles; one that branches on an element is refused."""
    tiles = [to_tile(value) for value in args]
    shape = tile.common_shape(tiles)
    if pack != 1:
        raise Unsupported(f"tl.map_elementwise with pack={pack}")
    return scalar_fn(*(t.like(t.data.expand(shape)) for t in tiles))


def _items(value: Any) -> tuple[Tile, ...]:
    return value if isinstance(value, tuple) else (value,)


def _combined(
    combine_fn: Callable, tiles: Sequence[Tile], *operands: Sequence[torch.Tensor]
) -> list[torch.Tensor]:
    """Combine the data of two values, each of tiles like these."""
    values = [t.like(d) for data in operands for t, d in zip(tiles, data, strict=True)]
    return [t.data for t in _items(combine_fn(*values))]


def _like(input: Any, data: list[torch.Tensor]) -> Any:
    """Build tiles like the input's, a tuple if that is one."""
    results = tuple(t.like(d) for t, d in zip(_items(input), data, strict=True))
    return results if isinstance(input, tuple) else results[0]


def _is_the_users(combine_fn: Callable) -> bool:
    """Return whether it is not Triton's own, which is known to be associative."""
    return combine_fn.__module__.partition(".")[0] not in ("triton", __package__)


@contextlib.contextmanager
def _aside() -> Iterator[None]:
    """Compute what the kernel does not."""
    work = WORK[:]
    yield
    WORK[:] = work


def _with_marks(
    data: list[torch.Tensor], lanes: list[torch.Tensor], tiles: Sequence[Tile], reduced: Callable
) -> list[torch.Tensor]:
    """Return an extremum with the marks of masked-off lanes that it has dropped, where zeros, which
    NVIDIA GPUs have there, would change it."""
    marked = [
        (undefined.marks(d, t.dtype) > 0).expand_as(d) & d.isnan()
        for d, t in zip(lanes, tiles, strict=True)
    ]
    if not any(bool(each.any()) for each in marked):
        return data
    zeros = [d.masked_fill(m, 0) for d, m in zip(lanes, marked, strict=True)]
    differ = torch.stack([x != y for x, y in zip(data, reduced(zeros), strict=True)]).any(0)
    return [
        torch.where(differ & ~d.isnan(), lane[m][0], d) if bool(m.any()) else d
        for d, lane, m in zip(data, lanes, marked, strict=True)
    ]


def _scanned(data: list[torch.Tensor], tiles: Any, combine_fn: Callable) -> list[torch.Tensor]:
    """Scan the halves, and combine the last of the first one with each of the second one."""
    if data[0].shape[0] == 1:
        return data
    first, second = (
        _scanned(list(half), tiles, combine_fn)
        for half in zip(*(d.chunk(2) for d in data), strict=True)
    )
    last = [d[-1:].expand_as(d) for d in first]
    combined = _combined(combine_fn, tiles, last, second)
    return [torch.cat(pair) for pair in zip(first, combined, strict=True)]


def _check_orders(
    what: str, must: str, results: Sequence[torch.Tensor], others: Sequence[torch.Tensor],
    seen: Sequence[torch.Tensor], tiles: Sequence[Tile],
) -> None:  # fmt: skip
    """Raise UndefinedValue if two orders differ by more than rounding of what was `seen`."""
    floats = [d.to(torch.float64) for d in seen if d.is_floating_point()]
    largest = max(
        (float(d[d.isfinite()].abs().max()) for d in floats if d.isfinite().any()), default=0
    )
    for result, other, t in zip(results, others, tiles, strict=True):
        differ = result != other
        if result.is_floating_point():
            error = (result.to(torch.float64) - other.to(torch.float64)).abs()
            differ &= error > max(1e-3, 16 * torch.finfo(t.data.dtype).eps) * largest
        if bool(differ.any()):
            values = " or ".join(str(x[differ].flatten()[0].item()) for x in (result, other))
            finding = UndefinedValue(
                f"the operator of {what} must be {must}: in two orders of its lanes, of which the "
                f"layout decides, the result is {values}"
            )
            suppressions.judge(finding, current().report)


@_operation
def reduce(
    input: Any, axis: int | None, combine_fn: Callable, keep_dims: bool = False,
    reduction_ordering: Any = None,
) -> Any:  # fmt: skip
    """Reduce as a tree: the two halves of the axis are combined until one element is left.

    `combine_fn` gets all pairs at once. Its rounding, in the tile's own dtype, is kept; the order
    on a device depends on the layout.
    """
    tiles = _items(input)
    rank = len(tiles[0].shape)
    dim = 0 if axis is None else _axis(axis, rank)
    data = [t.data.reshape(-1) if axis is None else t.data.movedim(dim, 0) for t in tiles]

    def reduced(lanes: list[torch.Tensor], parts: int = 2, step: int = 1) -> list[torch.Tensor]:
        """Combine so many parts one after the other, by `step` through them, until they are one."""
        while (size := lanes[0].shape[0]) > 1:
            pieces = [*zip(*(d.chunk(min(parts, size)) for d in lanes), strict=True)][::step]
            lanes = pieces[0]
            for piece in pieces[1:]:
                lanes = _combined(combine_fn, tiles, lanes, piece)
                seen.extend(lanes)
        return [d.squeeze(0) for d in lanes]

    lanes, seen = data, list(data)
    data = reduced(lanes)
    with _aside():
        if not _is_the_users(combine_fn):
            data = _with_marks(data, lanes, tiles, reduced) if current().undefined else data
        elif reduction_ordering is None:
            must, other = "associative and commutative", reduced(lanes, 4, -1)
            _check_orders("tl.reduce", must, data, other, seen, tiles)
    if keep_dims:
        data = [d.reshape((1,) * rank) if axis is None else d.unsqueeze(dim) for d in data]
    return _like(input, data)


@_operation
def associative_scan(input: Any, axis: int, combine_fn: Callable, reverse: bool = False) -> Any:
    """Scan inclusively in log2 steps: step k combines an element with the one 2^k before."""
    tiles = _items(input)
    dim = _axis(axis, len(tiles[0].shape))
    data = [t.data.movedim(dim, 0) for t in tiles]
    data = [d.flip(0) for d in data] if reverse else data
    lanes, step = data, 1
    while step < data[0].shape[0]:
        earlier, later = [d[:-step] for d in data], [d[step:] for d in data]
        combined = _combined(combine_fn, tiles, earlier, later)
        data = [torch.cat((d[:step], c)) for d, c in zip(data, combined, strict=True)]
        step *= 2
    if _is_the_users(combine_fn):
        with _aside():
            other = _scanned(lanes, tiles, combine_fn)
        _check_orders("tl.associative_scan", "associative", data, other, [*lanes, *data], tiles)
    data = [d.flip(0) for d in data] if reverse else data
    return _like(input, [d.movedim(0, dim) for d in data])


@_operation
def _reduce_with_indices(input: Tile, axis: int, combine_fn: Callable, **options: Any) -> Any:
    rank = len(input.shape)
    index = arange(0, input.shape[_axis(axis, rank)])
    shape = [-1 if dim == axis % rank else 1 for dim in range(rank)]
    index = index.like(index.data.reshape(shape).expand(input.shape))
    return reduce((input, index), axis, combine_fn, **options)


@_operation
def static_assert(cond: Any, msg: str = "") -> None:
    if not constant(cond):
        message = f"tl.static_assert must hold, got a false constant: {msg}"
        raise InvalidKernel(message, unfit=True)


@_operation
def device_print(prefix: str, *args: Any, hex: bool = False) -> None:
    values = (value.data if isinstance(value, Tile) else value for value in args)
    print(current().program, prefix, *values)


def _extreme(python: Callable, combine: Callable) -> Callable:
    """Build min or max: Python's for constants, else Triton's, two by two."""

    def apply(*values: Any) -> Any:
        runtime = any(isinstance(value, Tile) for value in values)
        return functools.reduce(combine, values) if runtime else python(*values)

    return apply


OPERATIONS.update(
    program_id=lambda axis: scalar(current().program[axis], tl.int32),
    num_programs=lambda axis: scalar(current().grid[axis], tl.int32),
    gather=lambda src, index, axis: src.like(
        src.data.gather(_axis(axis, len(src.shape)), index.data.to(torch.int64))
    ),
    cast=lambda input, dtype, *rounding, **options: to_tile(input).to(dtype, *rounding, **options),
    _promote_bfloat16_to_float32=lambda t: cast(t, tl.float32) if t.dtype.name == "bf16" else t,
    assume=lambda cond: rewrite.check(cond, "tl.assume"),
    # Always, as with `debug=True` on a device.
    device_assert=lambda cond, msg="", mask=None: rewrite.check(
        cond if mask is None else to_tile(cond) | ~to_tile(mask), msg
    ),
    static_print=lambda *values, sep=" ", end="\n", **options: print(*values, sep=sep, end=end),
    item=lambda input: tile.reshape(input, ()),
    permute=lambda input, *dims: input.like(input.data.permute(_sizes(dims))),
    **dict.fromkeys(
        ("reshape", "view"),
        lambda input, *shape, can_reorder=False: tile.reshape(input, _sizes(shape)),
    ),
    make_block_ptr=BlockPointer,
    load_tensor_descriptor=Descriptor.load,
    store_tensor_descriptor=Descriptor.store,
    umulhi=lambda x, y: tile.upper_half(to_tile(x), to_tile(y)),
    where=tile.where,
    minimum=tile.minimum,
    maximum=tile.maximum,
    add=lambda x, y, sanitize_overflow=True: tile.add(x, y),
    sub=lambda x, y, sanitize_overflow=True: tile.sub(x, y),
    mul=lambda x, y, sanitize_overflow=True: tile.BINARY["mul"](x, y),
    div_rn=fdiv,
    to_tensor=to_tile,
    logical_and=lambda x, y: tile.logical(torch.logical_and, to_tile(x), to_tile(y)),
    logical_or=lambda x, y: tile.logical(torch.logical_or, to_tile(x), to_tile(y)),
    **dict.fromkeys(
        ("multiple_of", "max_contiguous", "max_constancy"), lambda input, values: input
    ),
    debug_barrier=lambda: None,
    condition=lambda condition, disable_licm=False: condition,
    range=rewrite.Range,
    static_range=rewrite.StaticRange,
    constexpr=constant,
    tensor=Tile,
    tensor_descriptor=Descriptor,
    tensor_descriptor_base=Descriptor,
    tuple=tuple,
    dtype=tl.dtype,
    pointer_type=tl.pointer_type,
    block_type=lambda element_ty, shape: tl.block_type(element_ty, list(shape)),
    PropagateNan=tl.PropagateNan,
)


def _meeting(function: Callable) -> Callable:
    @functools.wraps(function)
    def apply(*args: Any, **kwargs: Any) -> Any:
        current().role.meet()
        return function(*args, **kwargs)

    return apply


for _name in _MEETING:
    OPERATIONS[_name] = _meeting(OPERATIONS[_name])

# Operations that do more than compute a value.
_ACTING = (
    *("load", "store", "advance", "make_tensor_descriptor", "load_tensor_descriptor"),
    *("store_tensor_descriptor", "expect_zero", "assume", "device_assert", "device_print"),
)
for _name, _function in OPERATIONS.items():
    acts = _name in _ACTING or _name.startswith("atomic_")
    if isinstance(_function, FunctionType) and not acts:
        OPERATIONS[_name] = undefined.on_each(_function)

LANGUAGE = Namespace("tl", OPERATIONS, tl, tl.core, tl.standard, tl.random)
LANGUAGE.__dict__["math"] = LANGUAGE
LIBDEVICE = Namespace("libdevice", {}, libdevice)
CUDA = Namespace(
    "tl.extra.cuda",
    {
        "libdevice": LIBDEVICE,
        # Multiprocessors of the emulated device, one after the other.
        "smid": lambda: scalar(current().role.cta.number % 132, tl.int32),
        # Nanoseconds: cycles of the modelled time.
        "globaltimer": lambda: scalar(int(current().scheduler.tell_time()), tl.int64),
        "num_warps": lambda: current().num_warps,
        "num_threads": lambda: 32 * current().num_warps,
        # Programmatic dependent launch: launches run one after the other here.
        "gdc_wait": lambda: None,
        "gdc_launch_dependents": lambda: None,
    },
)

# Triton's modules -> what a kernel sees in their place.
MODULES: dict[str, Any] = {
    "triton.language.extra.cuda.inline_ptx_lib": Namespace("inline_ptx_lib", {}, inline_ptx_lib),
    **{f"triton.language{part}": LANGUAGE for part in ("", ".core", ".math", ".standard")},
    **{f"triton.language.extra.{part}libdevice": LIBDEVICE for part in ("", "cuda.")},
    **{f"triton.language.extra.cuda{part}": CUDA for part in ("", ".utils", ".gdc")},
    "triton.language.random": LANGUAGE,
}


def _integer(value: Any) -> int:
    return int(constant(value))


# Classes that callables of kernels stand for; Triton hands no constexpr to isinstance.
_CLASSES = {_integer: int, OPERATIONS["constexpr"]: (), OPERATIONS["block_type"]: tl.block_type}


def _isinstance(value: Any, kinds: Any) -> bool:
    kinds = kinds if isinstance(kinds, tuple) else (kinds,)
    return isinstance(value, tuple(_CLASSES.get(kind, kind) for kind in kinds))


# Python's names that a kernel may use.
NAMES: dict[str, Any] = {
    "len": len,
    "list": tuple,
    "float": float,
    "int": _integer,
    "isinstance": _isinstance,
    "getattr": getattr,
    "hasattr": hasattr,
    "range": rewrite.Range,
    "print": device_print,
    "min": _extreme(min, OPERATIONS["minimum"]),
    "max": _extreme(max, OPERATIONS["maximum"]),
}


def _member(self: Tile, name: str) -> Callable:
    """Resolve `x.sum(axis)` to `tl.sum(x, axis)` for functions that are tensor members."""
    if name.startswith("__") or not hasattr(tl.tensor, name):
        raise AttributeError(f"a tile has no attribute {name}")
    function = getattr(LANGUAGE, name)
    return lambda *args, **kwargs: function(self, *args, **kwargs)


Tile.__getattr__ = _member
