"""The activations, which take the place of softmax, as Triton functions.

`activate(s, scale, NAME, APPROX)` returns `activation(scale * s)` for a tile of raw scores `s` in
fp32. The scale is folded into the activation's constants, where it has any.

`APPROX` chooses the arithmetic of the smooth activations. True: one `tanh.approx.f32` per element,
whose relative error is at most 2**-11 (PTX ISA, "tanh"). The rounding of the probabilities to bf16
that follows is an error of up to 2**-9 to 2**-8 of each. False: `exp` and a division, or
`erf`, for fp32.

| name                | error against the exact function, APPROX |
|---------------------|------------------------------------------|
| `silu`, `gelu_tanh` | 2**-11 abs(x / 2), all x                 |
| `gelu`              | 4e-4 abs(x), all x                       |
| `gelu_taylor6`      | 1.2e-3 for abs(x) <= 1; none beyond      |
| the others          | rounding only                            |

Of the error of `gelu` 1.5e-4 abs(x) is that of `tanh_factors`, whose tanh stands for erf. For
positive x that is at most a ninth of a half unit of bf16, and nearly one of fp16.
"""

import torch
import triton
import triton.language as tl
from triton.language.target_info import is_hip

from gdpa_kernels.calling.launch import cdiv, launch
from gdpa_kernels.gdpa.device.custom import CUSTOM, Custom

INSTRUCTIONS = {
    "identity": (1, 0), "relu": (2, 0), "relu_squared": (3, 0), "leaky_relu": (3, 0),
    "hardswish": (6, 0), "silu": (2, 1), "gelu_tanh": (5, 1), "gelu": (5, 1),
    "gelu_taylor6": (6, 0),
}  # fmt: skip
"""fp32 and MUFU instructions of one element with APPROX, compiled for sm_90a."""


def _registered(key: str) -> Custom:
    return CUSTOM[key.partition("@")[0]]


# Triton's hash of a kernel holds each global that it reaches, but of what is marked as a builtin.
# CUSTOM grows with each registration, for which no kernel is to be compiled anew: the digest of an
# activation's source is in its name (`cache_key`).
_registered.__triton_builtin__ = True


@triton.constexpr_function
def is_custom(name):
    """True for the name of a registered activation, as `cache_key` makes it."""
    return "@" in name


@triton.constexpr_function
def custom_value(name):
    """The registered jit function x -> y of a name as `cache_key` made it."""
    return _registered(name).value


@triton.constexpr_function
def custom_value_and_slope(name):
    """The registered jit function x -> (y, slope) of a name as `cache_key` made it."""
    return _registered(name).value_and_slope


@triton.jit
def tanh_approx(x):
    """tanh in one MUFU instruction, whose relative error is at most 2**-11; on AMD, which has no
    such instruction, by exp, within 2**-22."""
    if is_hip():
        y = 2.0 / (1.0 + tl.exp(-2.0 * x)) - 1.0
    else:
        y = tl.inline_asm_elementwise(
            "tanh.approx.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
        )
    return y


@triton.jit
def relu(x):
    """max(x, 0), which propagates NaN."""
    return tl.maximum(x, 0.0, propagate_nan=tl.PropagateNan.ALL)


@triton.constexpr_function
def tanh_factors(name):
    """(linear, cubic) of u = linear x + cubic x^3, with which GELU is 0.5 x (1 + tanh(u)), by its
    tanh form or "gelu" by erf, and SiLU as well.

    For "gelu" tanh(u) is erf(x / sqrt(2)) to 2.9e-4 for all x, and the derivative of the whole is
    GELU's to 8e-4. No coefficient is negative: u rises everywhere, and x needs no clamp.
    """
    return {
        "gelu": (0.798801444, 0.0352820472),
        "gelu_tanh": (0.7978845608028654, 0.7978845608028654 * 0.044715),
        "silu": (0.5, 0.0),
    }[name]


@triton.jit
def tanh_argument(scale, NAME: tl.constexpr):
    """(linear, cubic) of u = linear s + cubic s^3, that of `tanh_factors` for x = scale s."""
    FACTORS: tl.constexpr = tanh_factors(NAME)
    return FACTORS[0] * scale, FACTORS[1] * scale * scale * scale


@triton.jit
def gelu_tanh(s, scale, APPROX: tl.constexpr):
    """0.5 x (1 + tanh(u)) with u = sqrt(2/pi) (x + 0.044715 x^3) and x = scale s."""
    linear, cubic = tanh_argument(scale, "gelu_tanh")
    u = s * (linear + cubic * (s * s))
    if APPROX:
        half = s * (0.5 * scale)
        y = half + half * tanh_approx(u)
    else:
        y = s * scale / (1.0 + tl.exp(-2.0 * u))
    return y


@triton.jit
def gelu(s, scale, APPROX: tl.constexpr):
    """0.5 x (1 + erf(x / sqrt(2))) with x = scale s."""
    if APPROX:
        linear, cubic = tanh_argument(scale, "gelu")
        half = s * (0.5 * scale)
        y = half + half * tanh_approx(s * (linear + cubic * (s * s)))
    else:
        x = s * scale
        y = 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))
    return y


@triton.jit
def silu(s, scale, APPROX: tl.constexpr):
    """x / (1 + exp(-x)), as h (1 + tanh(h)) with h = x / 2: one MUFU instead of two."""
    if APPROX:
        half = s * (0.5 * scale)
        y = half + half * tanh_approx(half)
    else:
        x = s * scale
        y = x / (1.0 + tl.exp(-x))
    return y


@triton.jit
def gelu_taylor6(x):
    """The Maclaurin polynomial of erf-GELU to degree 6; not GELU for abs(x) above about 1.2."""
    square = x * x
    tail = square * (0.3989422804 + square * (-0.0664903801 + square * 0.0099735570))
    return 0.5 * x + tail


@triton.jit
def activate(s, scale, NAME: tl.constexpr, APPROX: tl.constexpr):
    """activation(scale * s), element by element, in fp32."""
    if NAME == "gelu_tanh":
        y = gelu_tanh(s, scale, APPROX)
    elif NAME == "gelu":
        y = gelu(s, scale, APPROX)
    elif NAME == "silu":
        y = silu(s, scale, APPROX)
    elif is_custom(NAME):
        y = custom_value(NAME)(s * scale)
    else:
        x = s * scale
        if NAME == "identity":
            y = x
        elif NAME == "relu":
            y = relu(x)
        elif NAME == "relu_squared":
            y = relu(x) * relu(x)
        elif NAME == "leaky_relu":
            y = tl.where(x < 0, 0.01 * x, x)
        elif NAME == "hardswish":
            y = x * tl.minimum(relu(x + 3.0), 6.0, propagate_nan=tl.PropagateNan.ALL) * (1.0 / 6.0)
        else:
            tl.static_assert(NAME == "gelu_taylor6", "unknown activation")
            y = gelu_taylor6(x)
    return y


@triton.constexpr_function
def count(names):
    """The number of names in a comma-separated list."""
    return len(names.split(","))


@triton.constexpr_function
def pick(names, index):
    """The name at `index` of a comma-separated list."""
    return names.split(",")[index]


@triton.jit
def activate_per_head(s, scale, head, ACTIVATION: tl.constexpr, APPROX: tl.constexpr):
    """activation(scale * s) of this head; ACTIVATION is one name, or one per head, comma-separated:
    then the program takes one uniform branch per tile."""
    if count(ACTIVATION) == 1:
        y = activate(s, scale, ACTIVATION, APPROX)
    else:
        y = s
        for index in tl.static_range(count(ACTIVATION)):
            if head == index:
                y = activate(s, scale, pick(ACTIVATION, index), APPROX)
    return y


FOLDABLE = ("gelu", "gelu_tanh", "silu")


def foldable(activation: tuple[str, ...], dtype: torch.dtype) -> bool:
    """True for what `tanh_packed`, and `value_and_slope_folded` of derivatives.py, can compute:
    GELU or SiLU for all heads, in bf16.

    In fp16 x + x t, or 2 dS, may exceed 65504 where the activation, or dS, does not.
    """
    return dtype == torch.bfloat16 and len(activation) == 1 and activation[0] in FOLDABLE


@triton.jit
def multiply_add_packed(a, b, c):
    """a * b + c in bf16, rounded once, two elements in one instruction."""
    return tl.inline_asm_elementwise(
        "fma.rn.bf16x2 $0, $1, $2, $3;", "=r,r,r,r", [a, b, c], dtype=tl.bfloat16, is_pure=True,
        pack=2,
    )  # fmt: skip


@triton.jit
def tanh_cubic_packed(s, linear, cubic):
    """(x, tanh(x (linear + cubic x^2))) in bf16, in pairs, with x = s rounded.

    One block of assembly: given the instructions one by one, the compiler unpacks the pairs and
    keeps more intermediate values live than there are registers.
    """
    return tl.inline_asm_elementwise(
        """{
        .reg .b32 u;
        cvt.rn.bf16x2.f32 $0, $3, $2;
        mul.rn.bf16x2 u, $0, $0;
        fma.rn.bf16x2 u, u, $5, $4;
        mul.rn.bf16x2 u, u, $0;
        tanh.approx.bf16x2 $1, u;
        }""",
        "=&r,=&r,f,f,r,r", [s, linear, cubic], dtype=(tl.bfloat16, tl.bfloat16), is_pure=True,
        pack=2,
    )  # fmt: skip


@triton.jit
def tanh_linear_packed(s, linear):
    """(x, tanh(x linear)) in bf16, in pairs, with x = s rounded."""
    return tl.inline_asm_elementwise(
        """{
        .reg .b32 u;
        cvt.rn.bf16x2.f32 $0, $3, $2;
        mul.rn.bf16x2 u, $0, $4;
        tanh.approx.bf16x2 $1, u;
        }""",
        "=&r,=&r,f,f,r", [s, linear], dtype=(tl.bfloat16, tl.bfloat16), is_pure=True, pack=2,
    )  # fmt: skip


@triton.jit
def tanh_packed(s, scale, NAME: tl.constexpr):
    """(x, t) in bf16 with x = s and x + x t = activation(scale * s) / (scale / 2); NAME: FOLDABLE.

    GELU and SiLU are scale / 2 * s * (1 + tanh(u)): the factor is left to the epilogue. The
    scores are rounded to bf16 first, as PyTorch rounds them. By the documented errors of the
    instructions the result is within 0.016 abs(x); emulated, within 0.010, where PyTorch's own GELU
    of bf16 scores is within 0.0078 and one rounding of the exact result within 0.0039.
    """
    if NAME == "silu":
        x, t = tanh_linear_packed(s, (0.5 * scale).to(tl.bfloat16))
    else:
        linear, cubic = tanh_argument(scale, NAME)
        linear, cubic = linear.to(tl.bfloat16), cubic.to(tl.bfloat16)
        x, t = tanh_cubic_packed(s, linear, cubic)
    return x, t


@triton.jit
def activate_kernel(
    x_ptr, y_ptr, scale, count, NAME: tl.constexpr, APPROX: tl.constexpr, BLOCK: tl.constexpr
):
    """y = activation(scale * x) on `count` fp32 elements."""
    offsets = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + offsets, mask=offsets < count, other=0.0)
    tl.store(y_ptr + offsets, activate(x, scale, NAME, APPROX), mask=offsets < count)


def evaluate(
    x: torch.Tensor, name: str, *, scale: float = 1.0, approx: bool = True
) -> torch.Tensor:
    """activation(scale * x) of a contiguous fp32 tensor, as the kernels compute it: `approx` is of
    bf16 and fp16 calls."""
    y = torch.empty_like(x)
    launch(
        activate_kernel, (cdiv(x.numel(), 1024),), x.device, x, y, scale, x.numel(),
        NAME=name, APPROX=approx, BLOCK=1024,
    )  # fmt: skip
    return y
