"""The activations together with their derivatives: values, errors, corners and instructions."""

import functools
import math

import pytest
import torch
import triton
import triton.language as tl

from _lib.activation_sequences import ERF_3
from gdpa_kernels.calling.launch import launch
from gdpa_kernels.gdpa.device import activations, derivatives
from gdpa_kernels.gdpa.device.activations import FOLDABLE
from gdpa_kernels.gdpa.reference import ACTIVATIONS
from gdpa_lab.measuring.compile_check import build, read
from tests.gdpa.cases import DEVICE, kernels_run
from tests.tiers import swept

SMOOTH = ("silu", "gelu_tanh", "gelu")
KINKED = ("relu", "leaky_relu", "hardswish")
ROOT = math.sqrt(2 / math.pi)
# GELU is 0.5 x (1 + tanh(c0 x + c1 x^3)).
CUBICS = {"gelu_tanh": (ROOT, 0.044715 * ROOT), "gelu": ERF_3.value}


@triton.jit
def both_kernel(
    s_ptr, y_ptr, slope_ptr, scale,
    NAME: tl.constexpr, APPROX: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """(y, slope) of BLOCK scores per program; NAME None only moves them."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    s = tl.load(s_ptr + at)
    if NAME is None:
        y, slope = s, s
    else:
        y, slope = derivatives.value_and_slope(s, scale, NAME, APPROX)
    tl.store(y_ptr + at, y)
    tl.store(slope_ptr + at, slope)


@triton.jit
def value_kernel(
    s_ptr, y_ptr, scale, NAME: tl.constexpr, APPROX: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """y of BLOCK scores per program; NAME None only moves them."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    y = tl.load(s_ptr + at)
    if NAME is not None:
        y = activations.activate(y, scale, NAME, APPROX)
    tl.store(y_ptr + at, y)


def both(s: torch.Tensor, name: str, approx: bool, scale: float = 1.0):
    """(activation, derivative) of scale * s in fp32, as the kernels compute them."""
    padded = torch.zeros(triton.cdiv(s.numel(), 1024) * 1024, device=DEVICE)
    padded[: s.numel()] = s
    y, slope = torch.empty_like(padded), torch.empty_like(padded)
    with kernels_run():
        launch(
            both_kernel, (padded.numel() // 1024,), padded.device, padded, y, slope, scale,
            NAME=name, APPROX=approx, BLOCK=1024,
        )  # fmt: skip
    return y[: s.numel()], slope[: s.numel()]


@triton.jit
def folded_kernel(s_ptr, y_ptr, slope_ptr, scale, NAME: tl.constexpr, BLOCK: tl.constexpr):
    """What `value_and_slope` returns, from what the folded form leaves out."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    y, c = derivatives.value_and_slope_folded(tl.load(s_ptr + at), scale, NAME)
    tl.store(y_ptr + at, 0.5 * scale * y)
    tl.store(slope_ptr + at, 0.5 * derivatives.times_slope(1.0, c, True))


@pytest.mark.parametrize("scale", (1.0, 0.088))
@pytest.mark.parametrize("name", FOLDABLE)
def test_the_folded_form_is_the_same_function(name, scale):
    s = torch.linspace(-40, 40, 4096, device=DEVICE) / scale
    y, slope = torch.empty_like(s), torch.empty_like(s)
    with kernels_run():
        launch(
            folded_kernel, (4,), s.device, s, y, slope, scale, NAME=name, BLOCK=1024,
        )  # fmt: skip
    expected, expected_slope = both(s, name, True, scale)
    size = 1 + (s * scale).abs()
    assert ((y - expected).abs() <= 2.0**-20 * size).all()
    assert ((slope - expected_slope).abs() <= 2.0**-20 * size).all()


def points(limit: float = math.inf) -> torch.Tensor:
    """fp32 values of both signs from 2**-149 to 2**127, dense from -60 to 60; up to `limit`."""
    wide = torch.logspace(-149, 127, 1104, base=2, dtype=torch.float64).float()
    found = torch.cat([torch.linspace(-60, 60, 12_001), wide, -wide, torch.tensor([0.0, -0.0])])
    return found[found.abs() <= limit].to(DEVICE)


def exact(x: torch.Tensor, name: str) -> torch.Tensor:
    return ACTIVATIONS[name].derivative(x.double())


@pytest.mark.parametrize("scale", (1.0, -0.3))
@pytest.mark.parametrize("approx", (True, False))
@pytest.mark.parametrize("name", ACTIVATIONS)
def test_the_value_is_that_of_the_forward_pass(name, approx, scale):
    s = torch.cat([points(), torch.tensor([math.nan, math.inf, -math.inf], device=DEVICE)])
    y, _ = both(s, name, approx, scale)
    with kernels_run():
        expected = activations.evaluate(s, name, scale=scale, approx=approx)
    assert torch.equal(y.isnan(), expected.isnan())
    assert torch.equal(y.nan_to_num().view(torch.int32), expected.nan_to_num().view(torch.int32))


def bound(name: str, approx: bool, x: torch.Tensor) -> torch.Tensor:
    """The documented error of the derivative at x, in fp64."""
    size = x.double().abs()
    if name in SMOOTH and not approx:
        return 2e-6 * (1 + size)
    if name in SMOOTH:
        fit = 8e-4 if name == "gelu" else 0.0
        return fit + 2.0**-11 * (1 + (1 if name == "silu" else 2) * size)
    if name == "gelu_taylor6":  # of its own polynomial: a few roundings of its terms
        return 2.0**-22 * (1 + size + size**3 + size**5)
    slope = exact(x, name).abs()
    return 0 * size if name in ("identity", "relu") else 2.0**-22 * (slope + (slope > 0))


LIMITS = {"gelu": 1e13, "gelu_tanh": 1e13, "gelu_taylor6": 1e7, "relu_squared": 2.0**126}


@pytest.mark.parametrize("scale", (1.0, -0.5))
@pytest.mark.parametrize("approx", (True, False))
@pytest.mark.parametrize("name", ACTIVATIONS)
def test_errors_stay_within_the_documented_bound(name, approx, scale):
    s = points(LIMITS.get(name, math.inf))
    x = s * scale  # exact, but for the smallest, which fp32 rounds to zero
    error = (both(s, name, approx, scale)[1].double() - exact(x, name)).abs()
    within = error <= bound(name, approx, x)
    assert within.all(), (s[~within][:5], error[~within][:5])


@pytest.mark.parametrize("scale", (1.0, -0.5))
@pytest.mark.parametrize("name, share", (("silu", 2**-12), ("gelu_tanh", 2**-12), ("gelu", 4e-4)))
def test_errors_of_the_value_stay_within_the_documented_share(name, share, scale):
    """Of abs(x), for all x; a few roundings to fp32 come on top."""
    s = points()
    x = s.double() * scale
    with kernels_run():
        y = activations.evaluate(s, name, scale=scale).double()
    error = (y - ACTIVATIONS[name].function(x)).abs()
    assert (error <= (share + 2.0**-22) * x.abs() + 2.0**-149).all()


@triton.jit
def argument_kernel(out_ptr, scale, NAME: tl.constexpr):
    linear, cubic = activations.tanh_argument(scale, NAME)
    tl.store(out_ptr, linear)
    tl.store(out_ptr + 1, cubic)


@pytest.mark.parametrize("name", CUBICS)
def test_the_coefficients_are_these(name):
    out = torch.zeros(2, device=DEVICE)
    with kernels_run():
        launch(argument_kernel, (1,), out.device, out, 1.0, NAME=name)
    torch.testing.assert_close(out.cpu(), torch.tensor(CUBICS[name]), rtol=2.0**-23, atol=0)


def test_the_fit_of_gelu_is_as_documented():
    """Evaluated exactly: the tanh and the derivative against GELU, for both signs."""
    x = torch.linspace(-12, 12, 24_001, dtype=torch.float64)
    linear, cubic = CUBICS["gelu"]
    t = torch.tanh(linear * x + cubic * x**3)
    slope = 0.5 * (1 + t) + 0.5 * x * (linear + 3 * cubic * x * x) * (1 - t * t)
    off = (t - torch.erf(x * math.sqrt(0.5))).abs()
    assert 2.7e-4 < off.max() < 2.9e-4
    assert 7.5e-4 < (slope - exact(x, "gelu")).abs().max() < 8e-4


@pytest.mark.skipif(DEVICE != "cpu", reason="the emulator's tanh is at its worst, the GPU's is not")
@pytest.mark.parametrize("name", ("silu", "gelu_tanh", "gelu"))
def test_bounds_are_not_idle(name):
    """With tanh at its worst documented error, the error comes within a factor of 6 of the
    bound."""
    s = points(60)
    error = (both(s, name, True)[1].double() - exact(s, name)).abs()
    assert (error / bound(name, True, s)).max() > 1 / 6


@pytest.mark.parametrize("name", CUBICS)
def test_the_bound_of_gelu_by_the_documented_error_alone(name):
    """Whatever tanh returns within 2**-11 of itself, the bound holds up to 3.8, and not to 5."""
    x = torch.linspace(-5, 5, 10_001, dtype=torch.float64)
    linear, cubic = CUBICS[name]
    t = torch.tanh(linear * x + cubic * x**3)
    weight = 0.5 * x * (linear + 3 * cubic * x * x)
    plain = exact(x, name)
    worst = torch.zeros_like(x)
    for error in (-(2.0**-11), 2.0**-11):
        off = (t * (1 + error)).clamp(-1, 1)
        worst = worst.maximum((0.5 * (1 + off) + weight * (1 - off * off) - plain).abs())
    holds = worst <= bound(name, True, x)
    assert holds[x.abs() <= 3.8].all() and not holds.all()


def test_the_polynomial_is_near_gelu_only_near_zero():
    x = torch.linspace(-1, 1, 2001)
    _, slope = both(x.to(DEVICE), "gelu_taylor6", True)
    assert (slope.cpu().double() - exact(x, "gelu")).abs().max() <= 8.5e-3
    _, slope = both(torch.tensor([4.0], device=DEVICE), "gelu_taylor6", True)
    assert (slope.cpu().double() - exact(torch.tensor([4.0]), "gelu")).abs() > 30


@pytest.mark.parametrize("approx", (True, False))
@pytest.mark.parametrize("name", KINKED)
def test_at_a_jump_it_is_pytorchs(name, approx):
    """Where the derivative jumps, the kernels and the definition take autograd's value."""
    at = torch.tensor([0.0, -0.0, 3.0, -3.0])
    _, slope = both(at.to(DEVICE), name, approx)
    x = at.double().requires_grad_()
    (wanted,) = torch.autograd.grad(ACTIVATIONS[name].function(x).sum(), x)
    torch.testing.assert_close(slope.cpu().double(), wanted, atol=0, rtol=2.0**-24)
    assert torch.equal(exact(at, name), wanted)


@pytest.mark.parametrize("approx", (True, False))
@pytest.mark.parametrize("name", ACTIVATIONS)
def test_what_is_not_finite(name, approx):
    """At an infinity the limit, or NaN where the formula of the definition gives it too. NaN stays
    visible wherever the derivative depends on x continuously."""
    at = torch.tensor([math.inf, -math.inf, math.nan])
    slope = both(at.to(DEVICE), name, approx)[1].cpu().double()
    expected = exact(at, name)
    near = (slope - expected).abs() <= 1e-9
    assert (near | (slope == expected) | (slope.isnan() & expected.isnan())).all()
    assert slope[2].isnan() == (name not in ("identity", "relu", "leaky_relu"))


@pytest.mark.parametrize("name", CUBICS)
def test_beyond_its_range_the_derivative_of_gelu_is_nan(name):
    _, slope = both(torch.tensor([1e13, -1e13, 2e14, -2e14], device=DEVICE), name, True)
    assert slope[:2].tolist() == [1.0, 0.0] and slope[2:].isnan().all()


ARITHMETIC = ("FADD", "FMUL", "FFMA", "FSEL", "SEL", "FSETP", "FMNMX")


@functools.cache
def instructions(kernel, name: str | None):
    types = {n: "*fp32" for n in kernel.arg_names if n.endswith("_ptr")} | {"scale": "fp32"}
    constants = {"NAME": name, "APPROX": True, "BLOCK": 512}
    return read(build(kernel, types, constants, options={"num_warps": 1})).instructions


@pytest.mark.parametrize("name", swept(ACTIVATIONS, ("gelu", "silu")))
@pytest.mark.parametrize(
    ("kernel", "table"),
    [(value_kernel, activations.INSTRUCTIONS), (both_kernel, derivatives.INSTRUCTIONS)],
    ids=["value", "both"],
)
def test_instructions_are_as_documented(kernel, table, name):
    """More than those that move the 16 elements of a thread; a few more make the constants."""
    fp32, mufu = table[name]
    made, moved = instructions(kernel, name), instructions(kernel, None)
    found = {m: made[m] - moved[m] for m in ("MUFU", *ARITHMETIC)}
    assert found.pop("MUFU") == 16 * mufu
    assert 0 <= sum(found.values()) - 16 * fp32 <= 8
