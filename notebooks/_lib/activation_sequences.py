"""Instruction sequences for the activations: what each costs, and the error it may make.

`sequence(x, NAME)` evaluates one sequence on a tile in fp32; SEQUENCES lists them with the function
that each stands for and the largest error, as a share of abs(x), that follows from the documented
errors of its instructions. All but `gelu_taylor6` hold for abs(x) < 2**125 and let a NaN through;
an infinite x gives what the formula gives, as in PyTorch: inf, and NaN for 0 * -inf.

Three ideas carry them:

- GELU and SiLU are x * gate(x), where the gate rises from 0 to 1 and gate(x) - 1/2 is odd. An error
  d of the gate is an error of d abs(x), however large x is.
- A gate by the special function unit is (1 + tanh(u)) / 2: one MUFU. By definition it is
  1 / (1 + exp(-2u)): two.
- A gate by a polynomial is 1/2 + x Q(x^2), clamped to [0, 1] by the `.sat` modifier of the last
  multiply-add, which costs nothing. Q's last coefficient is positive, so that beyond the fitted
  range the clamp, and not the polynomial, decides. The coefficients of Q, and of the odd
  polynomial inside a tanh, are found by tests/report/gates.py.
"""

import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

import numpy as np
import torch
import triton
import triton.language as tl
from triton.compiler import CompiledKernel

from gdpa_kernels.calling.launch import launch
from gdpa_kernels.gdpa.device.activations import gelu_tanh, gelu_taylor6, relu, silu, tanh_approx
from gdpa_lab.measuring import compile_check

# Results that an SM of sm_90 delivers in a clock: CUDA C++ programming guide, "Throughput of Native
# Arithmetic Instructions", column 9.0.
ISSUE_RATE = 128  # four schedulers, 32 lanes each; fp32 add, multiply, multiply-add too
ALU_RATE = 64  # minimum, maximum, compare, convert, integer
MUFU_RATE = 16  # tanh, ex2, rcp

TANH_BITS = 2.0**-12
"""Error of a gate (1 + tanh(u)) / 2 by tanh.approx.f32: half of the documented 2**-11."""


class Sequence(NamedTuple):
    """One way to compute one function.

    `exact`: the function, a name of reference.ACTIVATIONS. `how`: in words. `bound`: abs(error) is
    at most bound * abs(x) + 2**-149 (one subnormal unit) for abs(x) < 2**125, by the documented
    errors of the instructions and that of the fit; None if there is no bound.
    """

    name: str
    exact: str
    how: str
    bound: float | None


# Rounding in fp32, and the two roundings of ex2 and rcp (2 ulp, 1 ulp).
_FP32 = 2.0**-20
# tanh.approx.f16 and .bf16 have absolute errors of 2**-10.987 and 2**-8; u is rounded first, by a
# share of at most 2**-11 and 2**-8, and u sech(u)^2 is at most 0.448.
_F16 = (2.0**-10.987 + 0.448 * 2.0**-11) / 2
_BF16 = (2.0**-8 + 0.448 * 2.0**-8) / 2

SEQUENCES = (
    Sequence("gelu_tanh.tanh", "gelu_tanh", "1 tanh", TANH_BITS + _FP32),
    Sequence("gelu_tanh.mix_quarter", "gelu_tanh", "1 tanh; 1 of 4 by poly9", 5.0e-4),
    Sequence("gelu_tanh.f16x2", "gelu_tanh", "1 tanh for a pair in fp16", _F16 + _FP32),
    Sequence("gelu_tanh.bf16x2", "gelu_tanh", "1 tanh for a pair in bf16", _BF16 + _FP32),
    Sequence("gelu.erf", "gelu", "tl.erf", _FP32),
    Sequence("gelu.tanh3", "gelu", "1 tanh of a fitted cubic", TANH_BITS + 1.5e-4),
    Sequence("gelu.poly5", "gelu", "polynomial of degree 5", 4.5e-3),
    Sequence("gelu.poly9", "gelu", "polynomial of degree 9", 5.2e-4),
    Sequence("gelu.poly13", "gelu", "polynomial of degree 13", 7.0e-5),
    Sequence("gelu_taylor6", "gelu", "published polynomial, no range", None),
    Sequence("silu.tanh", "silu", "1 tanh", TANH_BITS + _FP32),
    Sequence("silu.ex2_rcp", "silu", "ex2 and rcp", _FP32),
    Sequence("silu.mix_quarter", "silu", "1 tanh; 1 of 4 by poly13", 9.3e-4),
    Sequence("hardswish.clamp", "hardswish", "minimum and maximum", _FP32),
    Sequence("hardswish.sat", "hardswish", "one saturating multiply-add", _FP32),
    Sequence("relu", "relu", "maximum", 0.0),
)
BY_NAME = {sequence.name: sequence for sequence in SEQUENCES}

LOOP = "loop"
"""Not a sequence: the identity, which leaves the measuring loop and its one multiply-add."""

# The coefficients of x, x^3, x^5, ... of gate(x) - 1/2, minimax, in fp32.
GATE_GELU_5 = tl.constexpr((0.38647633, -0.0488137474, 0.00295336609))
GATE_GELU_9 = tl.constexpr((
    0.397126293, -0.0625883185, 0.00754255112, -0.000511840697, 1.44055845e-05
))  # fmt: skip
GATE_GELU_13 = tl.constexpr((
    0.398663828, -0.0656898606, 0.00929737416, -0.000926343553, 6.001205e-05, -2.23123613e-06,
    3.56959259e-08
))  # fmt: skip
GATE_TANH_9 = tl.constexpr((
    0.397151019, -0.0628625794, 0.00767410623, -0.000531194447, 1.53049148e-05
))  # fmt: skip
GATE_SILU_13 = tl.constexpr((
    0.247648479, -0.0182548141, 0.00119814907, -5.12262923e-05, 1.2932295e-06, -1.7348571e-08,
    9.49050911e-11
))  # fmt: skip
# tanh of this cubic is erf(x / sqrt(2)).
ERF_3 = tl.constexpr((0.798801444, 0.0352820472))


@triton.jit
def horner(z, COEFFICIENTS: tl.constexpr):
    """c[0] + c[1] z + c[2] z^2 + ..., a multiply-add for each but the first."""
    y = z * COEFFICIENTS[len(COEFFICIENTS) - 1] + COEFFICIENTS[len(COEFFICIENTS) - 2]
    for i in tl.static_range(2, len(COEFFICIENTS)):
        y = y * z + COEFFICIENTS[len(COEFFICIENTS) - 1 - i]
    return y


@triton.jit
def saturated(a, b, c):
    """a * b + c, clamped to [0, 1] by the same instruction; 0 for NaN."""
    return tl.inline_asm_elementwise(
        "fma.rn.sat.f32 $0, $1, $2, $3;", "=f,f,f,f", [a, b, c], dtype=tl.float32, is_pure=True,
        pack=1,
    )  # fmt: skip


@triton.jit
def by_polynomial(x, COEFFICIENTS: tl.constexpr):
    """x * gate(x). A NaN of x is 0 in the gate and comes back in the product."""
    return x * saturated(x, horner(x * x, COEFFICIENTS), 0.5)


@triton.jit
def ex2(x):
    """2**x in one MUFU instruction: at most 2 ulp; subnormal results are 0."""
    return tl.inline_asm_elementwise(
        "ex2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
    )


@triton.jit
def rcp(x):
    """1 / x in one MUFU instruction: at most 1 ulp; subnormal results are 0."""
    return tl.inline_asm_elementwise(
        "rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
    )


@triton.jit
def tanh_f16x2(x):
    """tanh of pairs in fp16: one PTX instruction for two; absolute error at most 2**-10.987."""
    return tl.inline_asm_elementwise(
        "tanh.approx.f16x2 $0, $1;", "=r,r", [x], dtype=tl.float16, is_pure=True, pack=2
    )


@triton.jit
def tanh_bf16x2(x):
    """tanh of pairs in bf16: one PTX instruction for two; absolute error at most 2**-8."""
    return tl.inline_asm_elementwise(
        "tanh.approx.bf16x2 $0, $1;", "=r,r", [x], dtype=tl.bfloat16, is_pure=True, pack=2
    )


@triton.jit
def inner(x):
    """u = sqrt(2/pi) (x + 0.044715 x^3), the argument of GELU's tanh."""
    return x * (0.7978845608028654 + (0.7978845608028654 * 0.044715) * (x * x))


@triton.jit
def gelu_tanh_half(x, PAIR: tl.constexpr):
    """GELU with tanh in 16 bits; what follows is in fp32 again."""
    if PAIR == "f16x2":
        gate = tanh_f16x2(inner(x).to(tl.float16)).to(tl.float32)
    else:
        gate = tanh_bf16x2(inner(x).to(tl.bfloat16)).to(tl.float32)
    half = 0.5 * x
    return half + half * gate


@triton.jit
def mixed(x, NAME: tl.constexpr, EVERY: tl.constexpr):
    """Compute the last of EVERY (2 or 4) neighbouring elements by polynomial, the others by tanh.

    Which is which is known when the kernel is compiled: neighbours are registers of one thread, so
    that taking the tile apart and putting it together moves nothing.
    """
    even, odd = tl.split(tl.reshape(x, (x.shape[0] // 2, 2)))
    first = silu(even, 1.0, True) if NAME == "silu" else gelu_tanh(even, 1.0, True)
    rest = mixed_polynomial(odd, NAME) if EVERY == 2 else mixed(odd, NAME, 2)
    return tl.reshape(tl.join(first, rest), (x.shape[0],))


@triton.jit
def mixed_polynomial(x, NAME: tl.constexpr):
    """The share of `mixed` that needs no MUFU."""
    return by_polynomial(x, GATE_SILU_13 if NAME == "silu" else GATE_TANH_9)


@triton.jit
def sequence(x, NAME: tl.constexpr):
    """Sequence NAME on a tile in fp32."""
    if NAME == "loop":
        y = x
    elif NAME == "gelu_tanh.tanh":
        y = gelu_tanh(x, 1.0, True)
    elif NAME == "gelu_tanh.mix_quarter":
        y = mixed(x, "gelu_tanh", 4)
    elif NAME == "gelu_tanh.f16x2":
        y = gelu_tanh_half(x, "f16x2")
    elif NAME == "gelu_tanh.bf16x2":
        y = gelu_tanh_half(x, "bf16x2")
    elif NAME == "gelu.erf":
        half = 0.5 * x
        y = half + half * tl.erf(x * 0.7071067811865476)
    elif NAME == "gelu.tanh3":
        half = 0.5 * x
        y = half + half * tanh_approx(x * horner(x * x, ERF_3))
    elif NAME == "gelu.poly5":
        y = by_polynomial(x, GATE_GELU_5)
    elif NAME == "gelu.poly9":
        y = by_polynomial(x, GATE_GELU_9)
    elif NAME == "gelu.poly13":
        y = by_polynomial(x, GATE_GELU_13)
    elif NAME == "gelu_taylor6":
        y = gelu_taylor6(x)
    elif NAME == "silu.tanh":
        y = silu(x, 1.0, True)
    elif NAME == "silu.ex2_rcp":
        y = x * rcp(1.0 + ex2(-1.4426950408889634 * x))
    elif NAME == "silu.mix_quarter":
        y = mixed(x, "silu", 4)
    elif NAME == "hardswish.clamp":
        y = x * tl.minimum(relu(x + 3.0), 6.0, propagate_nan=tl.PropagateNan.ALL) * (1.0 / 6.0)
    elif NAME == "hardswish.sat":
        y = x * saturated(x, 1.0 / 6.0, 0.5)
    else:
        tl.static_assert(NAME == "relu", "unknown sequence")
        y = relu(x)
    return y


# The gate of GELU and its polynomials. fp64, on the CPU.


def normal_gate(x: np.ndarray) -> np.ndarray:
    """Phi(x), the gate of GELU."""
    return torch.special.ndtr(torch.from_numpy(x)).numpy()


def odd_polynomial(x: np.ndarray, coefficients: Iterable[float]) -> np.ndarray:
    """c[0] x + c[1] x^3 + c[2] x^5 + ..."""
    return sum(c * x ** (2 * i + 1) for i, c in enumerate(coefficients))


# Kernels: every sequence once on each element, and one sequence again and again in registers.


@triton.jit
def evaluate_kernel(x_ptr, y_ptr, count, NAME: tl.constexpr, BLOCK: tl.constexpr):
    """y = sequence NAME of `count` fp32 elements."""
    offsets = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + offsets, mask=offsets < count, other=0.0)
    tl.store(y_ptr + offsets, sequence(x, NAME), mask=offsets < count)


def evaluate(x: torch.Tensor, name: str) -> torch.Tensor:
    """Sequence `name` of a contiguous fp32 tensor, as a kernel computes it."""
    y = torch.empty_like(x)
    grid = (triton.cdiv(x.numel(), 1024),)
    launch(evaluate_kernel, grid, x.device, x, y, x.numel(), NAME=name, BLOCK=1024)
    return y


def error_per_x(name: str, function: Callable, x: torch.Tensor) -> float:
    """The largest abs(error) / abs(x) of sequence `name` over those of the fp32 points `x` that are
    at least 2**-100 in magnitude; `function` is the exact one, in fp64."""
    wide = x.double()
    error = (evaluate(x, name).double() - function(wide)).abs() / wide.abs()
    return error[wide.abs() >= 2.0**-100].max().item()


@triton.jit
def clock():
    """The SM's clock, in cycles; the SMs do not share a zero."""
    return tl.inline_asm_elementwise(
        "mov.u64 $0, %clock64;", "=l", [], dtype=tl.int64, is_pure=False, pack=1
    )


@triton.jit
def multiprocessor():
    """The number of the SM that runs this program."""
    return tl.inline_asm_elementwise(
        "mov.u32 $0, %smid;", "=r", [], dtype=tl.int32, is_pure=False, pack=1
    )


FEEDBACK = tl.constexpr(0.0625)
"""x grows by this share of the result before the next evaluation: nothing can be hoisted."""


@triton.jit
def repeat_kernel(
    x_ptr, y_ptr, clock_ptr, rounds,
    NAME: tl.constexpr, UNROLL: tl.constexpr, BLOCK: tl.constexpr, CLOCK: tl.constexpr,
):  # fmt: skip
    """rounds * UNROLL evaluations of sequence NAME, each of x = x0 + FEEDBACK * (the last result).

    y: the last result, [programs, BLOCK]. clock, [programs, 3], if CLOCK: cycles of the SM at the
    begin and at the end of the loop, when all warps have arrived, and the SM's number. The emulator
    has no clock: there CLOCK is False.
    """
    program = tl.program_id(0)
    offsets = program * BLOCK + tl.arange(0, BLOCK)
    start = tl.load(x_ptr + offsets)
    x = start
    y = start
    tl.debug_barrier()
    if CLOCK:
        tl.store(clock_ptr + 3 * program, clock())
    for _ in range(rounds):
        for _ in tl.static_range(UNROLL):
            y = sequence(x, NAME)
            x = y * FEEDBACK + start
    tl.debug_barrier()
    if CLOCK:
        tl.store(clock_ptr + 3 * program + 1, clock())
        tl.store(clock_ptr + 3 * program + 2, multiprocessor().to(tl.int64))
    tl.store(y_ptr + offsets, y)


WARPS = 16
ELEMENTS = 8
UNROLL = 4


@dataclass(frozen=True)
class Repeated:
    """Buffers of `repeat_kernel` for one program on each of `programs` SMs.

    x, y: fp32 [programs, block]; clocks: int64 [programs, 3].
    """

    x: torch.Tensor
    y: torch.Tensor
    clocks: torch.Tensor
    rounds: int

    @staticmethod
    def make(
        device: torch.device | str, programs: int, rounds: int, block: int = 4096
    ) -> "Repeated":
        """x evenly from -2 to 2, so that even the published polynomial stays small."""
        x = torch.linspace(-2, 2, programs * block, device=device).reshape(programs, block)
        clocks = torch.zeros(programs, 3, dtype=torch.int64, device=device)
        return Repeated(x, torch.full_like(x, math.nan), clocks, rounds)

    @property
    def evaluations(self) -> int:
        """Evaluations of the sequence by one program."""
        return self.rounds * UNROLL * self.x.shape[1]

    def run(self, name: str) -> None:
        """One launch."""
        programs, block = self.x.shape
        launch(
            repeat_kernel, (programs,), self.x.device, self.x, self.y, self.clocks, self.rounds,
            NAME=name, UNROLL=UNROLL, BLOCK=block, CLOCK=self.x.device.type == "cuda",
            num_warps=WARPS,
        )  # fmt: skip

    def error_per_x(self, name: str, function: Callable) -> float:
        """Run once; the largest error of the last result in proportion to abs(x0).

        `function` is what the sequence computes, in fp64. The recurrence is a contraction, so that
        after 64 steps fp64 has reached its fixed point; an error of the sequence comes through
        hardly larger (by 1 / (1 - FEEDBACK * slope)). inf if a result is not finite.
        """
        self.y.fill_(math.nan)
        self.run(name)
        x = start = self.x.double()
        for _ in range(min(self.rounds * UNROLL, 64)):
            y = function(x)
            x = y * FEEDBACK.value + start
        error = ((self.y.double() - y) / start).abs().max().item()
        return error if math.isfinite(error) else math.inf

    def cycles(self) -> tuple[list[int], int]:
        """Cycles that the last launch took in each program, and how many SMs ran one."""
        begin, end, number = self.clocks.unbind(1)
        return (end - begin).tolist(), number.unique().numel()


# What the compiler makes of the loop.

ALU_PIPE = {
    "FMNMX", "FSETP", "FSEL", "FSET", "F2FP", "LOP3", "PRMT", "SHF", "IADD3", "ISETP", "SEL", "LEA",
    "VIADD", "MOV", "IMNMX", "SGXT", "VIMNMX", "BREV", "FCHK", "PLOP3", "R2P", "P2R",
}  # fmt: skip


class Cost(NamedTuple):
    """Instructions of the loop for each element and evaluation, its share of the loop included;
    `mnemonics`: how many of each."""

    mnemonics: Mapping[str, float]

    @property
    def mufu(self) -> float:
        """Results of the special function unit."""
        return self.mnemonics.get("MUFU", 0.0)

    @property
    def issued(self) -> float:
        """All instructions."""
        return sum(self.mnemonics.values())

    @property
    def clocks(self) -> float:
        """Modelled clocks of an SM for one element: the slowest of the three limits."""
        alu = sum(count for name, count in self.mnemonics.items() if name in ALU_PIPE)
        return max(self.issued / ISSUE_RATE, alu / ALU_RATE, self.mufu / MUFU_RATE)


@cache
def loop_cost(name: str) -> Cost:
    """The loop of `repeat_kernel` as compiled for sm_90a, with everything that belongs to it.

    RuntimeError if there is no loop, or if it does not hold whole evaluations.
    """
    return count(*compile_check.sass(built(name)))


def built(name: str) -> CompiledKernel:
    """`repeat_kernel` for sequence `name`, compiled for sm_90a as it is measured."""
    constants = {"NAME": name, "UNROLL": UNROLL, "BLOCK": 32 * WARPS * ELEMENTS, "CLOCK": True}
    types = {"x_ptr": "*fp32", "y_ptr": "*fp32", "clock_ptr": "*i64", "rounds": "i32"}
    return compile_check.build(
        repeat_kernel, types, constants, multiples_of_16=("rounds",), options={"num_warps": WARPS}
    )


def count(code: list[str], loops: list[range]) -> Cost:
    """Count the largest loop of `compile_check.sass`; the multiply-adds of the feedback count
    evaluations."""
    if not loops:
        raise RuntimeError("the listing must have a loop, got none")
    body = [re.sub(r"^@\S+\s+", "", code[i]) for i in loops[-1]]
    feedback = f", {FEEDBACK.value:g}, "
    evaluations = sum(line.startswith("FFMA") and feedback in line for line in body)
    if evaluations == 0 or evaluations % (UNROLL * ELEMENTS):
        raise RuntimeError(
            f"the loop must hold a multiple of {UNROLL * ELEMENTS} evaluations, got {evaluations}"
        )
    mnemonics = Counter(re.match(r"\w+", line)[0] for line in body)
    return Cost({name: total / evaluations for name, total in mnemonics.items()})
