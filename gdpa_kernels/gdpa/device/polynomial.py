"""GELU and SiLU of a share of the scores by a polynomial on FMA units instead of MUFU, for the
forward rungs of Blackwell.

GELU(x) and SiLU(x) are x / 2 (1 + t(x)), t odd and rising from -1 to 1. t is computed as its
minimax polynomial v (c0 + c1 v^2 + c2 v^4 + ...) in v = x / (2 LIMIT), clamped to -1/2 .. 1/2. So
its error has a bound for every x: up to LIMIT the largest of the fit; beyond, where the polynomial
is constant and t rises, the error at LIMIT or at infinity.

With x = scale s a score s has v = s v_per_score, v_per_score = scale / (2 LIMIT). One FMA with
.sat, which clamps to 0 .. 1 for nothing, gives v + 1/2; adding -1/2 leaves v. Of `gelu_tanh`, LIMIT
47 / 15 and scale 1 / 8, v_per_score is 0.01995: a score of 8, x = 1, has v = 0.1596, t = 0.6829 and
GELU 0.8414, exactly 0.8412; one of 40, x = 5, has v + 1/2 = 1.298, clamped to 1, and t = 0.9993.

| name        | degree | LIMIT | error of t, all x | of the activation |
|-------------|--------|-------|-------------------|-------------------|
| `gelu`      | 9      | 3.17  | 7.8e-4            | 3.9e-4 abs(x)     |
| `gelu_tanh` | 9      | 3.13  | 7.7e-4            | 3.9e-4 abs(x)     |
| `silu`      | 17     | 7.53  | 6.8e-4            | 3.4e-4 abs(x)     |

That includes the rounding of each step to fp32. t is then rounded to bf16, and to 1 where it is
above 1 - 2**-9, so a saturated score gives exactly x or 0. The error of `tanh.approx.bf16x2`, which
computes the rest of the scores, is up to 2**-8.

`assembly` is one block of PTX for 1 / SHARE pairs of scores, packed two to a register: the last
pair takes the polynomial, the others MUFU, so that the two units work side by side.
"""

import struct
from typing import NamedTuple

import triton
import triton.language as tl

from gdpa_kernels.gdpa.device.activations import (
    activate_per_head,
    multiply_add_packed,
    tanh_factors,
    tanh_packed,
)
from gdpa_kernels.gdpa.device.query_tiles import mask_pairs

SHARES = (0.125, 0.25, 0.5)
"""Shares of the scores of a row: one pair of every eight, four or two."""


class Polynomial(NamedTuple):
    """LIMIT; c0, c1, ...; and the error of t."""

    limit: float
    coefficients: tuple[float, ...]
    error: float


POLYNOMIALS = {
    "gelu": Polynomial(
        19 / 6, (5.03512192, -32.1164627, 159.050171, -450.675354, 535.966614), 7.8e-4
    ),
    "gelu_tanh": Polynomial(
        47 / 15, (4.98213482, -31.2363701, 153.327408, -433.497742, 516.075867), 7.7e-4
    ),
    "silu": Polynomial(
        7.526666666666666,
        (7.50252056, -134.175247, 2412.51074, -32231.9668, 292288.781, -1714572.5, 6178068.0,
         -12377411.0, 10528795.0),
        6.8e-4,
    ),
}  # fmt: skip

# PTX of u = x linear, or of u = x (linear + cubic x^2), of one pair: t is tanh(u).
_TANH = {
    "silu": "mul.rn.bf16x2 u, {x}, {linear};",
    "gelu": "mul.rn.bf16x2 u, {x}, {x}; fma.rn.bf16x2 u, u, {cubic}, {linear}; "
    "mul.rn.bf16x2 u, u, {x};",
}
_TANH["gelu_tanh"] = _TANH["gelu"]


def _literal(value: float) -> str:
    """An fp32 constant in PTX."""
    return "0f" + struct.pack(">f", value).hex().upper()


def _steps(name: str, low: str, high: str, v_per_score: str, out: str) -> list[str]:
    """PTX of t of the scores `low` and `high`, fp32, as the bf16 pair `out`: v = sat(s
    v_per_score + 1/2) - 1/2, w = v^2 and t by Horner's rule, both scores in one register of two
    fp32."""
    *rest, highest = (_literal(c) for c in POLYNOMIALS[name].coefficients)
    half = _literal(0.5)
    return [
        f"fma.rn.sat.f32 a, {low}, {v_per_score}, {half};",
        f"fma.rn.sat.f32 b, {high}, {v_per_score}, {half};",
        "mov.b64 v, {a, b};",
        f"mov.b64 c, {{{_literal(-0.5)}, {_literal(-0.5)}}};",
        "add.rn.f32x2 v, v, c;",
        "mul.rn.f32x2 w, v, v;",
        f"mov.b64 t, {{{highest}, {highest}}};",
        *(
            step
            for value in reversed(rest)
            for step in (f"mov.b64 c, {{{value}, {value}}};", "fma.rn.f32x2 t, t, w, c;")
        ),
        "mul.rn.f32x2 t, t, v;",
        "mov.b64 {a, b}, t;",
        f"cvt.rn.bf16x2.f32 {out}, b, a;",
    ]


def _assembly(name: str, pairs: int) -> str:
    """PTX of `pairs` pairs of scores, the last by polynomial. Its operands, for four pairs: outputs
    x $0-3 and t $4-7; inputs s $8-15, linear $16-19, cubic $20-23, v_per_score $24-31. Those in
    bf16 hold a pair each, s and v_per_score a score."""
    lines = [".reg .b32 u;", ".reg .f32 a, b;", ".reg .b64 v, w, t, c;"]
    for pair in range(pairs):
        x, t = f"${pair}", f"${pairs + pair}"
        low, high = (f"${2 * (pairs + pair) + i}" for i in range(2))
        lines.append(f"cvt.rn.bf16x2.f32 {x}, {high}, {low};")
        if pair + 1 < pairs:
            linear, cubic = f"${4 * pairs}", f"${5 * pairs}"
            lines.append(_TANH[name].format(x=x, linear=linear, cubic=cubic))
            lines.append(f"tanh.approx.bf16x2 {t}, u;")
        else:
            lines += _steps(name, low, high, f"${6 * pairs}", t)
    return "{\n" + "\n".join(lines) + "\n}"


ASSEMBLY = {
    (name, share): _assembly(name, round(1 / share)) for name in POLYNOMIALS for share in SHARES
}


@triton.constexpr_function
def assembly(name, share):
    """The PTX of `mixed_packed`."""
    return ASSEMBLY[name, share]


@triton.constexpr_function
def operands(share):
    """Constraints of the operands of `assembly`: x and t; s; linear and cubic; v_per_score."""
    scores = 2 * round(1 / share)
    return ",".join(["=&r"] * scores + ["f"] * scores + ["r"] * scores + ["f"] * scores)


@triton.constexpr_function
def scores_at_once(share):
    """The number of scores that one run of `assembly` computes."""
    return 2 * round(1 / share)


@triton.constexpr_function
def constants(name):
    """(linear, cubic, v_per_score) of scale 1: t(x) = tanh(x (linear + cubic x^2))."""
    return *tanh_factors(name), 0.5 / POLYNOMIALS[name].limit


@triton.jit
def mixed_packed(s, scale, NAME: tl.constexpr, SHARE: tl.constexpr):
    """(x, t) of `activations.tanh_packed`; SHARE of the scores of a row, 0 or one of `SHARES`, by
    the polynomial."""
    if SHARE == 0:
        x, t = tanh_packed(s, scale, NAME)
    else:
        FACTORS: tl.constexpr = constants(NAME)
        linear = (FACTORS[0] * scale).to(tl.bfloat16)
        cubic = (FACTORS[1] * scale * scale * scale).to(tl.bfloat16)
        x, t = tl.inline_asm_elementwise(
            assembly(NAME, SHARE), operands(SHARE), [s, linear, cubic, FACTORS[2] * scale],
            dtype=(tl.bfloat16, tl.bfloat16), is_pure=True, pack=scores_at_once(SHARE),
        )  # fmt: skip
    return x, t


@triton.jit
def mixed_probabilities(s, scale, head, row, first_key, mask, options):
    """activation(scale * s) in options.DTYPE, masked pairs zero; if options.PACKED `mixed_packed`
    computes it divided by scale / 2, a factor that the epilogue brings in.

    GELU and SiLU of 0 are 0: masking the scores is as good, and leaves the pairs of bf16 whole.
    """
    if options.PACKED:
        s = mask_pairs(s, row, first_key, mask, options)
        x, t = mixed_packed(s, scale, options.ACTIVATION, options.SHARE)
        p = multiply_add_packed(x, t, x)
    else:
        p = activate_per_head(s, scale, head, options.ACTIVATION, True)
        p = mask_pairs(p, row, first_key, mask, options)
        p = p.to(options.DTYPE)
    return p
