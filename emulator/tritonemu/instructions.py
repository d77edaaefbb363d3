"""Inline PTX: a table of known instructions, each with the error its documentation allows.

An approximate instruction is emulated by the exact value rounded to fewer bits, as few as make the
error come close to the bound of the PTX ISA (9.1, sections 9.7.3 and 9.7.4) without exceeding it.
A kernel that needs more accuracy than the device promises then fails its tests here.

Rounding to b fraction bits has a relative error of at most 2^-(b + 1). `.ftz` flushes subnormal
inputs and results to zero. fma, add, sub, mul, min and max round once; `.sat` then clamps to
0 .. 1 and makes NaN zero. `x2` forms work on pairs; in fp32 they are four, and need sm_100, as
conversions to e2m1 do.
"""

import re
import struct
from collections.abc import Callable
from functools import cache
from itertools import product

import torch

from .errors import InvalidKernel, Unsupported


def round_fraction(x: torch.Tensor, bits: int) -> torch.Tensor:
    """Round fp32 or fp64 to nearest even with `bits` fraction bits; infinities, NaN unchanged."""
    single = x.dtype == torch.float32
    drop = (23 if single else 52) - bits
    pattern = x.contiguous().view(torch.int32 if single else torch.int64)
    rounded = (pattern + (1 << drop - 1) - 1 + (pattern >> drop & 1)) & -(1 << drop)
    return torch.where(x.isfinite(), rounded.view(x.dtype), x)


def _flush(x: torch.Tensor) -> torch.Tensor:
    return torch.where(x.abs() < 2.0**-126, torch.zeros_like(x).copysign(x), x)


def _approximate(exact: Callable, bits: int) -> Callable:
    return lambda x: round_fraction(exact(x.to(torch.float64)), bits).to(x.dtype)


def fused_multiply_add(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor) -> torch.Tensor:
    """Compute a * b + c for fp32 and shorter: rounded to fp64, then to the type.

    The product is exact in fp64; the double rounding differs from one rounding in rare ties.
    """
    return (a.to(torch.float64) * b.to(torch.float64) + c.to(torch.float64)).to(a.dtype)


def saturate(x: torch.Tensor) -> torch.Tensor:
    """Clamp to 0 .. 1; NaN becomes +0, as the `.sat` modifier has it."""
    return x.nan_to_num(0.0).clamp(0, 1) + 0.0


def _modified(function: Callable, flush: bool, clamp: bool = False) -> Callable:
    def evaluate(*lanes: torch.Tensor) -> torch.Tensor:
        value = function(*map(_flush, lanes)) if flush else function(*lanes)
        value = saturate(value) if clamp else value
        return _flush(value) if flush else value

    return evaluate


def _max_xorsign_abs(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    most = torch.maximum(a.abs(), b.abs())
    return torch.where(a.signbit() ^ b.signbit(), -most, most)


_F32, _F16, _BF16, _I32 = torch.float32, torch.float16, torch.bfloat16, torch.int32
# Instruction, type, exact function, fraction bits kept; and the documented maximum error, relative
# if nothing else is said.
_APPROXIMATE = (
    ("tanh.approx.f32", _F32, torch.tanh, 10),  # 2^-11
    ("tanh.approx.f16", _F16, torch.tanh, 9),  # 2^-10.987 absolute
    ("tanh.approx.bf16", _BF16, torch.tanh, 6),  # 2^-8 absolute
    ("ex2.approx.f16", _F16, torch.exp2, 9),  # 2^-9.9
    ("ex2.approx.ftz.bf16", _BF16, torch.exp2, 6),  # 2^-7
    *((f"ex2.approx{ftz}.f32", _F32, torch.exp2, 21) for ftz in ("", ".ftz")),  # 2 ulp
    *((f"rcp.approx{ftz}.f32", _F32, torch.reciprocal, 22) for ftz in ("", ".ftz")),  # 1 ulp
    *((f"sqrt.approx{ftz}.f32", _F32, torch.sqrt, 22) for ftz in ("", ".ftz")),  # 2^-23
    *((f"rsqrt.approx{ftz}.f32", _F32, torch.rsqrt, 22) for ftz in ("", ".ftz")),  # 2^-22.9
    *((f"lg2.approx{ftz}.f32", _F32, torch.log2, 21) for ftz in ("", ".ftz")),  # 2^-22, or absolute
)
_FP32 = {
    "fma.rn": fused_multiply_add,
    **{
        f"{name}{rounding}": getattr(torch, name)
        for name, rounding in product(("add", "sub", "mul"), ("", ".rn"))
    },
}
# Mnemonic, without x2 -> element type and function of lanes.
INSTRUCTIONS: dict[str, tuple[torch.dtype, Callable]] = {
    **{
        name: (dtype, _modified(_approximate(exact, bits), ".ftz" in name))
        for name, dtype, exact, bits in _APPROXIMATE
    },
    **{
        f"{name}{ftz}{sat}.f32": (_F32, _modified(function, bool(ftz), bool(sat)))
        for (name, function), ftz, sat in product(_FP32.items(), ("", ".ftz"), ("", ".sat"))
    },
    "mul.rn.bf16": (_BF16, torch.mul),
    "fma.rn.bf16": (_BF16, fused_multiply_add),
    "min.f32": (_F32, torch.fmin),
    "max.f32": (_F32, torch.fmax),
    "max.NaN.xorsign.abs.f32": (_F32, _max_xorsign_abs),
}

# INSTRUCTIONS that exist for a pair of fp32, in a 64-bit register.
PAIRS_OF_FP32 = {f"{name}{ftz}.f32" for name, ftz in product(_FP32, ("", ".ftz"))}


def _to_fp8(dtype: torch.dtype) -> Callable:
    def convert(x: torch.Tensor) -> torch.Tensor:
        limit = torch.finfo(dtype).max
        return torch.where(x.isnan(), torch.nan, x.clamp(-limit, limit)).to(dtype).view(torch.int8)

    return convert


def _to_e2m1(x: torch.Tensor) -> torch.Tensor:
    """Convert to four bits, to nearest even; NaN becomes the greatest number."""
    size, code = x.abs().nan_to_num(6.0), torch.zeros_like(x, dtype=torch.int8)
    for below, middle in enumerate((0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)):
        code += size >= middle if below % 2 else size > middle
    return code | (x.signbit() & ~x.isnan()).to(torch.int8) << 3


# d = {low half: b, high half: a}, each rounded to nearest.
PACKING: dict[str, Callable] = {
    "cvt.rn.bf16x2.f32": lambda x: x.to(_BF16),
    "cvt.rn.f16x2.f32": lambda x: x.to(_F16),
    "cvt.rn.satfinite.e4m3x2.f32": _to_fp8(torch.float8_e4m3fn),
    "cvt.rn.satfinite.e5m2x2.f32": _to_fp8(torch.float8_e5m2),
    "cvt.rn.satfinite.e2m1x2.f32": _to_e2m1,
}

# Functions of bits, as int64 that are not negative.
WORDS: dict[str, Callable] = {
    **{f"{name}.b32": getattr(torch, f"bitwise_{name}") for name in ("and", "or", "xor", "not")},
    "shl.b32": lambda x, by: x << by.clamp(max=32),
    **dict.fromkeys(("shr.b32", "shr.u32"), lambda x, by: x >> by.clamp(max=32)),
    **dict.fromkeys(("cvt.u32.u16", "cvt.u32.u8"), lambda x: x),
}

# Instructions without a result -> what the role does, given their operands.
EFFECTS: dict[str, Callable[[str], None]] = {}

# Lane, clamp and threads that take part, of `shfl.sync.idx.b32 d, a, 0, 31, 0xffffffff`.
FROM_THREAD_0 = [["0"], ["31"], ["0xffffffff"]]

# A register: one lane for a 32-bit value, two for a pair; a value per run of the assembly in each.
Register = tuple[torch.Tensor, ...]


def execute(
    asm: str, inputs: list[Register], num_outputs: int, arch: str = "sm_100"
) -> list[Register]:
    """Run the assembly; its operands $0, $1, ... are the outputs followed by the inputs.

    `mov` joins and splits pairs: `mov.b64 r, {a, b}` and `mov.b64 {a, b}, r`. `0f3F800000` is the
    fp32 number of that pattern. A `shfl` that gives all threads the value of thread 0 is known for
    scalars, which are the same in all.
    Integers are known as sources of those in WORDS alone.
    Raises Unsupported for anything else that is not in INSTRUCTIONS, and InvalidKernel for pairs of
    fp32 before sm_100.
    """
    registers = {f"${num_outputs + i}": register for i, register in enumerate(inputs)}
    for mnemonic, arguments in _statements(asm):
        if mnemonic in EFFECTS:
            EFFECTS[mnemonic](arguments)
            continue
        try:
            target, *sources = (names.split(",") for names in _operands(arguments))
            if mnemonic == "shfl.sync.idx.b32":
                source, *sources = sources
                if sources != FROM_THREAD_0 or registers[source[0]][0].numel() != 1:
                    raise ValueError("not a broadcast of a scalar")
                sources = [source]
            integers = mnemonic in WORDS
            values = [
                sum((_value(registers, name, integers) for name in names), ()) for names in sources
            ]
            if mnemonic in ("mov.b32", "mov.b64", "shfl.sync.idx.b32"):
                (result,) = values
            elif mnemonic in PACKING:
                ((high,), (low,)) = values
                if high.dtype != _F32 or low.dtype != _F32:
                    raise ValueError("operands of another type")
                result = tuple(map(PACKING[mnemonic], (low, high)))
                if "e2m1" in mnemonic:
                    if arch == "sm_90":
                        raise InvalidKernel(f"{mnemonic} needs sm_100, got {arch}")
                    result = (result[0] | result[1] << 4,)
            elif integers:
                width = {"u16": 16, "u8": 8}.get(mnemonic.rpartition(".")[2], 32)
                result = (WORDS[mnemonic](*(bits(value, width) for value in values)).to(_I32),)
            else:
                name = mnemonic.removesuffix("x2")
                lanes, (dtype, function) = 1 + (name != mnemonic), INSTRUCTIONS[name]
                if lanes == 2 and dtype == _F32:
                    if name not in PAIRS_OF_FP32:
                        raise ValueError("no instruction of PTX")
                    if arch == "sm_90":
                        raise InvalidKernel(f"{mnemonic} needs sm_100, got {arch}")
                if any(len(value) != lanes or value[0].dtype != dtype for value in values):
                    raise ValueError("operands of another type")
                result = tuple(function(*lane) for lane in zip(*values, strict=True))
            share, rest = divmod(len(result), len(target))
            if rest:
                raise ValueError("results do not fill the registers")
        except (KeyError, TypeError, ValueError) as error:
            raise Unsupported(f"inline assembly {mnemonic + ' ' + arguments!r}") from error
        for i, name in enumerate(target):
            registers[name] = result[i * share : (i + 1) * share]
    missing = [f"${i}" for i in range(num_outputs) if f"${i}" not in registers]
    if missing:
        raise Unsupported(f"inline assembly that does not write {missing}")
    return [registers[f"${i}"] for i in range(num_outputs)]


def bits(register: Register, width: int) -> torch.Tensor:
    """Return the bits of an integer register of this total width, the first lane lowest."""
    word, shift = torch.zeros((), dtype=torch.int64), 0
    for lane in register:
        size = 8 * lane.itemsize
        if lane.dtype.is_floating_point:
            raise ValueError("a float")
        word, shift = word | (lane.to(torch.int64) & (1 << size) - 1) << shift, shift + size
    if shift != width:
        raise ValueError("another width")
    return word


def _value(registers: dict[str, Register], name: str, integers: bool) -> Register:
    """Return the value of a register, of a fp32 number or, if they are known, of an integer."""
    if name not in registers and re.fullmatch(r"0[fF][0-9a-fA-F]{8}", name):
        return (torch.tensor(struct.unpack(">f", bytes.fromhex(name[2:])), dtype=_F32),)
    if integers and re.fullmatch(r"0[xX][0-9a-fA-F]+|\d+", name):
        return (torch.tensor(int(name, 0)).to(_I32),)
    return registers[name]


@cache
def _statements(asm: str) -> list[tuple[str, str]]:
    """Split the assembly into mnemonic and operands of each instruction."""
    body = re.sub(r"//.*", "", asm).strip()
    body = body[1:-1] if body.startswith("{") and body.endswith("}") else body
    parts = (statement.strip().partition(" ") for statement in body.split(";"))
    return [(name, arguments) for name, _, arguments in parts if name not in ("", ".reg")]


@cache
def instruction_counts(asm: str) -> tuple[int, int]:
    """Count the instructions that a thread issues, moves aside, and results of the MUFU."""
    names = [name for name, _ in _statements(asm) if not name.startswith("mov.")]
    special = {name for name, *_ in _APPROXIMATE}
    of_pairs = sum(1 + name.endswith("x2") for name in names if name.removesuffix("x2") in special)
    return len(names), of_pairs


@cache
def _operands(arguments: str) -> list[str]:
    """Split operands: `{a, b}, r` -> ["a,b", "r"]."""
    parts = re.findall(r"\{[^}]*\}|[^,]+", re.sub(r"\s", "", arguments))
    return [operand.strip("{}") for operand in parts]
