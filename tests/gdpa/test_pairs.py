"""GELU and SiLU of pairs of bf16: errors over all scores, corners, and how to do without."""

import math
import struct

import pytest
import torch
import triton
import triton.language as tl

import tritonemu
from gdpa_kernels import gdpa
from gdpa_kernels.calling import ladder
from gdpa_kernels.calling.launch import launch
from gdpa_kernels.calling.launches import launches
from gdpa_kernels.gdpa import reference
from gdpa_kernels.gdpa.device.activations import FOLDABLE, foldable, multiply_add_packed
from gdpa_kernels.gdpa.device.polynomial import POLYNOMIALS, SHARES, mixed_packed
from tests.gdpa.cases import Case, batch_of, kernels_run
from tests.gdpa.test_forward import call
from tests.tiers import sweep

BOUND = 0.016  # of abs(x), from the documented errors of the instructions


@triton.jit
def pairs_kernel(
    s_ptr, y_ptr, t_ptr, scale, NAME: tl.constexpr, SHARE: tl.constexpr, N: tl.constexpr
):  # fmt: skip
    offsets = tl.program_id(0) * N + tl.arange(0, N)
    s = tl.load(s_ptr + offsets)
    x, t = mixed_packed(s, scale, NAME, SHARE)
    tl.store(t_ptr + offsets, t)
    tl.store(y_ptr + offsets, multiply_add_packed(x, t, x))


def evaluate(
    scores: torch.Tensor, name: str, scale: float, share: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """(activation(scale * scores), t) in fp64, of what the kernels compute in bf16: by MUFU, a
    share by the polynomial."""
    y, t = (torch.empty(scores.shape, dtype=torch.bfloat16) for _ in range(2))
    with tritonemu.enabled("sm_100" if share else "sm_90"):
        launch(
            pairs_kernel, (scores.numel() // 1024,), scores.device, scores, y, t, scale,
            NAME=name, SHARE=share, N=1024,
        )  # fmt: skip
    return y.double() * scale / 2, t.double()


def exact(x: torch.Tensor, name: str) -> torch.Tensor:
    """t with activation(x) = x / 2 (1 + t), in fp64."""
    if name == "gelu":
        return torch.erf(x / math.sqrt(2))
    return torch.tanh(x / 2 if name == "silu" else math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))


def scores_and_x(scale: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Scores in fp32 and what they are times `scale`."""
    x = torch.cat([torch.linspace(-60, 60, 31 * 1024), torch.linspace(-9, 9, 33 * 1024)])
    scores = (x.double() / scale).float()
    return scores, scores.double() * scale


of_any_scale = pytest.mark.parametrize("scale", (sweep(1.0), 128**-0.5, sweep(0.03), -0.3))
by_all = pytest.mark.parametrize("share", (0.0, *SHARES))
each = pytest.mark.parametrize("name", FOLDABLE)


@by_all
@of_any_scale
@each
def test_error_stays_within_a_share_of_the_score(name, scale, share):
    scores, x = scores_and_x(scale)
    y, _ = evaluate(scores, name, scale, share)
    error = (y - reference.ACTIVATIONS[name].function(x)).abs()
    assert (error <= BOUND * x.abs() + 1e-30).all()
    assert error.max() > 1e-3  # 8 bits: a smaller error would mean that something else ran


@pytest.mark.parametrize("share", SHARES)
@of_any_scale
@each
def test_a_share_of_the_lanes_is_the_polynomials(name, scale, share):
    """Within its bound and the rounding to bf16."""
    scores, x = scores_and_x(scale)
    _, t = evaluate(scores, name, scale, share)
    lanes = torch.arange(scores.numel()) % (2 / share) >= 2 / share - 2
    limit, _, bound = POLYNOMIALS[name]
    error = (t - exact(x, name)).abs()
    assert error[lanes].max() <= bound + 2**-9
    assert error[~lanes].max() > bound + 2**-9  # MUFU's: so it matters which lanes are which
    saturated = lanes & (x.abs() >= limit)
    assert torch.equal(t[saturated], x[saturated].sign())


@by_all
@each
def test_corners(name, share):
    """Zero, which masks rely on, huge, infinite and NaN scores in all lanes; what is saturated is x
    or 0."""
    corners = torch.tensor([0.0, -0.0, 1e4, -1e4, 1e38, -1e38, math.inf, math.nan])
    y, _ = evaluate(corners.repeat_interleave(128), name, 1.0, share)
    y = y.reshape(8, 128)
    assert (y[:2] == 0).all()
    assert ((y[2] / 1e4 - 1).abs() < 2**-8).all() and ((y[4] / 1e38 - 1).abs() < 2**-8).all()
    assert (y[3] == 0).all() and (y[5] == 0).all()
    assert (y[6] == math.inf).all() and y[7].isnan().all()


@pytest.mark.parametrize("name", POLYNOMIALS)
def test_bound_of_the_polynomial(name):
    """For every x, not only on the grid: error and slope there, and a bound of the curvature.

    Beyond the limit t rises from t(limit) to 1 and the polynomial stays. Rounding to fp32: of each
    step of Horner's scheme half a unit of its value, of v two and of w one.
    """
    limit, coefficients, error = POLYNOMIALS[name]
    c = [struct.unpack("f", struct.pack("f", value))[0] for value in coefficients]
    powers = range(len(c))
    v, step = torch.linspace(0, 0.5, 2**18 + 1, dtype=torch.float64), 0.5 / 2**18
    x, w, unit = v * 2 * limit, v * v, 2.0**-24
    partial, rounding = torch.zeros_like(v), torch.zeros_like(v)
    for k in reversed(powers):
        partial = partial * w + c[k]
        rounding = rounding * w + partial.abs() * unit
    value = partial * v
    slope = sum((2 * k + 1) * c[k] * w**k for k in powers)
    rounding = rounding * v + value.abs() * unit + slope.abs() * (2 * v + 1) * unit
    t = exact(x, name)
    t_slope = (t[1:] - t[:-1]) / step  # within its own curvature, which is added below
    curvature = sum(2 * k * (2 * k + 1) * abs(c[k]) * 0.5 ** (2 * k - 1) for k in powers)
    curvature += 2 * (2 * limit) ** 2  # |t''| < 1 in x for all three, twice
    off = (value - t).abs() + rounding
    between = (slope[1:] - t_slope).abs() * step / 2 + curvature * step**2
    inside = (torch.maximum(off[1:], off[:-1]) + between).max()
    beyond = max(off[-1], (1 - value[-1]).abs() + rounding[-1])
    assert max(inside, beyond) <= error <= 1e-3
    assert off.max() > 0.9 * error - 1e-4  # the bound is not far from what happens
    assert value[-1] > 1 - 2**-9  # saturated, t is 1 in bf16


def test_which_calls_are_computed_in_pairs():
    assert all(foldable((name,), torch.bfloat16) for name in FOLDABLE)
    assert not foldable(("gelu_tanh",), torch.float16)  # x + x t, or 2 dS, may exceed 65504
    assert not foldable(("gelu_tanh", "silu"), torch.bfloat16)
    assert not foldable(("relu",), torch.bfloat16)


# Rungs with packed arithmetic: `Config` of the second can also do without.
PAIRED = ["v7_packed", "v8_own_waits", "b6_pair_stream", "b7_split_stream"]
LESSONS = [rung.impl for rung in ladder.BLACKWELL_RUNGS if rung.is_lesson]


def case(name: str) -> dict:
    """Several tiles and blocks of keys; inputs from N(0, 1)."""
    shape = Case("pairs", (130, 70), (200, 64), head_dim=128, options={"activation": name})
    return shape.arguments(torch.bfloat16)


def relative_error(out: torch.Tensor, arguments: dict) -> float:
    """In L2, against fp64."""
    doubled = {n: t.double() if n in "qkv" else t for n, t in arguments.items()}
    expected = gdpa(**doubled, impl="reference")
    return ((out.double() - expected).norm() / expected.norm()).item()


@pytest.mark.parametrize("name", FOLDABLE)
@pytest.mark.parametrize("impl", LESSONS)
def test_lessons_compute_in_pairs_alone(impl, name):
    arguments = case(name)
    assert 3.2e-3 < relative_error(call(impl, arguments), arguments) < 3.8e-3
    with pytest.raises(NotImplementedError, match="needs precise False, got True"):
        call(impl, arguments | {"precise": True})
    with pytest.raises(NotImplementedError, match="needs GELU or SiLU, got relu"):
        call(impl, arguments | {"activation": "relu"})


@pytest.mark.parametrize("share", (0.0, *SHARES))
@pytest.mark.parametrize("impl", PAIRED[2:])
def test_any_share_has_the_same_error(impl, share):
    arguments, module = case("gelu_tanh"), ladder.rung(impl).module()
    with kernels_run(impl):
        out = module.forward(batch_of(arguments), config=module.Config(share=share))
    assert 3.2e-3 < relative_error(out, arguments) < 3.8e-3


@pytest.mark.parametrize("name", FOLDABLE)
@pytest.mark.parametrize("impl", PAIRED)
def test_precise_is_as_v6(impl, name):
    """The same bits where the keys are added up in the same order; errors as `gdpa` documents."""
    arguments = case(name)
    with launches() as seen:
        packed = call(impl, arguments)
        precise = call(impl, arguments | {"precise": True})
    constants = [pair for launch in seen for pair in launch.constants.items()]
    assert [x for name, x in constants if name in ("PACKED", "PAIRS")] == [True, False]
    v6 = call("v6_short_kv", arguments)
    assert torch.equal(precise, v6) or impl.startswith("b")
    assert 3.2e-3 < relative_error(packed, arguments) < 3.8e-3
    found = relative_error(precise, arguments)
    assert found < 2.45e-3 and found <= 1.005 * relative_error(v6, arguments)


def test_precise_changes_nothing_elsewhere():
    arguments = case("relu")
    for impl in ("v0_eager", "v1_tiled", "v8_own_waits"):
        assert torch.equal(call(impl, arguments), call(impl, arguments | {"precise": True})), impl


def test_a_config_can_do_without_pairs():
    arguments, module = case("gelu_tanh"), ladder.rung("v8_own_waits").module()
    with kernels_run("v8_own_waits"):
        out = module.forward(batch_of(arguments), config=module.Config(pairs=False))
    assert torch.equal(out, call("v8_own_waits", arguments | {"precise": True}))
