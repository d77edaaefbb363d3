"""The activations together with their derivatives, as Triton functions, for backward.

`value_and_slope(s, scale, NAME, APPROX)` returns (activation(x), activation'(x)) with x = scale s,
for a tile of raw scores `s` in fp32. What the two have in common is computed once, and the value is
the one that `activations.activate` computes. A derivative that jumps takes the value that PyTorch's
has there: 0 at 0 for relu, 0.01 at 0 for leaky_relu, 0 at -3 and 1 at 3 for hardswish.

| name               | error of the derivative, APPROX              |
|--------------------|----------------------------------------------|
| `identity`, `relu` | none                                         |
| `silu`             | 2**-11 (1 + abs(x)), all x                   |
| `gelu_tanh`        | 2**-11 (1 + 2 abs(x)), abs(x) <= 1e13        |
| `gelu`             | 8e-4 + 2**-11 (1 + 2 abs(x)), abs(x) <= 1e13 |
| `gelu_taylor6`     | 8.5e-3 for abs(x) <= 1; none beyond          |
| the others         | rounding only                                |

Without APPROX the smooth derivatives are within 2e-6 (1 + abs(x)) on the same ranges.

Both GELUs multiply 1 - tanh(u)^2 by 0.5 x u', which grows as x^3. By the documented error of
`tanh.approx.f32` alone, 2**-11 of the result, their bounds hold for abs(x) <= 3.8. Beyond, they
take that the instruction returns exactly 1 or -1 where tanh is within 2**-12 of it. Above 2e13 the
factor overflows, and the derivative is NaN. The 8e-4 of `gelu` are the fit's
(`activations.tanh_factors`): less than half of the least half unit of bf16, but more than fp16's.

`value_and_slope_folded` leaves factors of GELU and SiLU to the sums that they end in. With the same
t it returns y = s (1 + t) and c, so that activation(scale s) = (scale / 2) y, the derivative is
(1 + c) / 2 and dS = (dP + c dP) / 2. With that last step GELU has 9 instructions instead of 12, and
SiLU 5 instead of 6, beside one MUFU. `dv_factor` and `dk_factor` bring in what is left out.
"""

import torch
import triton
import triton.language as tl

from gdpa_kernels.calling.launch import cdiv, launch
from gdpa_kernels.gdpa.device.activations import (
    activate,
    count,
    custom_value_and_slope,
    is_custom,
    pick,
    relu,
    tanh_approx,
    tanh_argument,
)
from gdpa_kernels.gdpa.device.masks import mask_transposed

INSTRUCTIONS = {
    "identity": (1, 0), "relu": (4, 0), "relu_squared": (4, 0), "leaky_relu": (4, 0),
    "hardswish": (11, 0), "silu": (5, 1), "gelu_tanh": (11, 1), "gelu": (11, 1),
    "gelu_taylor6": (9, 0),
}  # fmt: skip
"""fp32 and MUFU instructions of one element's value and slope with APPROX, compiled for sm_90a."""


@triton.jit
def gelu_and_slope(s, scale, NAME: tl.constexpr, APPROX: tl.constexpr):
    """GELU and its derivative, with t = tanh(u): 0.5 x (1 + t) and 0.5 (1 + t) + 0.5 x u' (1 -
    t^2)."""
    linear, cubic = tanh_argument(scale, NAME)
    square = s * s
    u = s * (linear + cubic * square)
    half = s * (0.5 * scale)
    if APPROX:
        t = tanh_approx(u)
        y = half + half * t
    else:
        e = tl.exp(-2.0 * u)
        t = 2.0 / (1.0 + e) - 1.0
        y = s * scale / (1.0 + e)
    half_x_du = 0.5 * s * (linear + 3.0 * cubic * square)  # 0.5 x u'
    return y, (0.5 + 0.5 * t) + half_x_du * (1.0 - t * t)


@triton.jit
def silu_and_slope(s, scale, APPROX: tl.constexpr):
    """SiLU and its derivative, with g = sigmoid(x): x g and g + x g (1 - g)."""
    if APPROX:
        half = s * (0.5 * scale)
        t = tanh_approx(half)
        y = half + half * t
        sigmoid = 0.5 + 0.5 * t
    else:
        x = s * scale
        sigmoid = 1.0 / (1.0 + tl.exp(-x))
        y = x / (1.0 + tl.exp(-x))
    return y, sigmoid + (y - y * sigmoid)


@triton.jit
def gelu_taylor6_slope(x):
    """The derivative of the polynomial `activations.gelu_taylor6`."""
    square = x * x
    return 0.5 + x * (2 * 0.3989422804 + square * (-4 * 0.0664903801 + square * (6 * 0.0099735570)))


@triton.jit
def value_and_slope(s, scale, NAME: tl.constexpr, APPROX: tl.constexpr):
    """(activation(scale s), activation'(scale s)), element by element, in fp32."""
    if NAME == "gelu_tanh" or (NAME == "gelu" and APPROX):
        y, slope = gelu_and_slope(s, scale, NAME, APPROX)
    elif NAME == "silu":
        y, slope = silu_and_slope(s, scale, APPROX)
    elif is_custom(NAME):
        y, slope = custom_value_and_slope(NAME)(s * scale)
    else:
        x = s * scale
        y = activate(s, scale, NAME, APPROX)
        if NAME == "identity":
            slope = tl.full(s.shape, 1.0, tl.float32)
        elif NAME == "relu":
            slope = tl.where(x > 0, 1.0, 0.0)
        elif NAME == "relu_squared":
            slope = 2.0 * relu(x)
        elif NAME == "leaky_relu":
            y = tl.where(x > 0, x, 0.01 * x)  # with the same comparison
            slope = tl.where(x > 0, 1.0, 0.01)
        elif NAME == "gelu":
            cdf = 0.5 + 0.5 * tl.erf(x * 0.7071067811865476)
            slope = cdf + x * (0.3989422804014327 * tl.exp(-0.5 * x * x))
        elif NAME == "hardswish":
            slope = tl.where(x >= 3.0, 1.0, tl.where(x <= -3.0, 0.0, x * (1.0 / 3.0) + 0.5))
        else:
            tl.static_assert(NAME == "gelu_taylor6", "unknown activation")
            slope = gelu_taylor6_slope(x)
    return y, slope


@triton.jit
def value_and_slope_per_head(s, scale, head, ACTIVATION: tl.constexpr, APPROX: tl.constexpr):
    """`value_and_slope` of this head; ACTIVATION: see `activate_per_head`."""
    if count(ACTIVATION) == 1:
        y, slope = value_and_slope(s, scale, ACTIVATION, APPROX)
    else:
        y, slope = s, s
        for index in tl.static_range(count(ACTIVATION)):
            if head == index:
                y, slope = value_and_slope(s, scale, pick(ACTIVATION, index), APPROX)
    return y, slope


@triton.jit
def value_and_slope_folded(s, scale, NAME: tl.constexpr):
    """(y, c) in fp32: activation(scale s) = (scale / 2) y, its derivative is (1 + c) / 2; with
    tanh.approx. NAME: FOLDABLE."""
    if NAME == "silu":
        x_du = s * (0.5 * scale)  # u itself, x / 2
        t = tanh_approx(x_du)
    else:
        linear, cubic = tanh_argument(scale, NAME)
        square = s * s
        t = tanh_approx(s * (linear + cubic * square))
        x_du = s * (linear + 3.0 * cubic * square)  # x u'
    return s + s * t, t + x_du * (1.0 - t * t)


@triton.jit
def value_and_factor(s, scale, head, ACTIVATION: tl.constexpr, FOLD: tl.constexpr):
    """The value that becomes P, and the slope from which `times_slope` computes dS.

    FOLD: `value_and_slope_folded`; P still lacks the factor scale / 2, and dS 1 / 2.
    A slope of -1 makes dS zero.
    """
    if FOLD:
        y, slope = value_and_slope_folded(s, scale, ACTIVATION)
    else:
        y, slope = value_and_slope_per_head(s, scale, head, ACTIVATION, True)
    return y, slope


@triton.jit
def mask_slope(slope, row, key, CAUSAL: tl.constexpr, WINDOW: tl.constexpr, FOLD: tl.constexpr):
    """The slope of `value_and_factor` [keys, rows], so that dS is zero where nothing is seen."""
    if FOLD and (CAUSAL or WINDOW is not None):
        slope = mask_transposed(slope + 1.0, row, key, CAUSAL, WINDOW) - 1.0
    else:
        slope = mask_transposed(slope, row, key, CAUSAL, WINDOW)
    return slope


@triton.jit
def dv_factor(scale, output_scale, FOLD: tl.constexpr):
    """The factor of a complete dV."""
    return 0.5 * scale * output_scale if FOLD else output_scale


@triton.jit
def dk_factor(scale, output_scale, FOLD: tl.constexpr):
    """The factor of complete dK and dQ."""
    return 0.5 * scale * output_scale if FOLD else scale * output_scale


@triton.jit
def times_slope(dp, slope, FOLD: tl.constexpr):
    """dS from dP and the slope of `value_and_factor`."""
    return dp + slope * dp if FOLD else slope * dp


@triton.jit
def evaluate_kernel(x_ptr, out_ptr, count, NAME: tl.constexpr, BLOCK: tl.constexpr):
    """Value alone, and value and slope together, of `count` points."""
    offsets = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + offsets, mask=offsets < count, other=0.0)
    y, slope = value_and_slope(x, 1.0, NAME, True)
    tl.store(out_ptr + offsets, activate(x, 1.0, NAME, True), mask=offsets < count)
    tl.store(out_ptr + count + offsets, y, mask=offsets < count)
    tl.store(out_ptr + count + count + offsets, slope, mask=offsets < count)


def evaluate_both(x: torch.Tensor, name: str) -> torch.Tensor:
    """`[3, n]` of n fp32 points: the value as forward kernels compute it, and value and slope as
    backward kernels do."""
    results = torch.empty(3, x.numel(), device=x.device)
    launch(
        evaluate_kernel, (cdiv(x.numel(), 1024),), x.device, x, results, x.numel(),
        NAME=name, BLOCK=1024,
    )  # fmt: skip
    return results
