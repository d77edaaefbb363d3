"""b1 to b4: any order of events, the bound of the polynomial."""

from __future__ import annotations

import math
import struct

import pytest
import torch
import triton
import triton.language as tl

import tritonemu
from gdpa_kernels.calling import ladder
from gdpa_kernels.calling.launch import launch
from gdpa_kernels.gdpa import reference
from gdpa_kernels.gdpa.activations import multiply_add_pairs
from gdpa_kernels.gdpa.polynomial import POLYNOMIALS, mixed_pairs
from tests.budget import within_budget
from tests.gdpa.cases import Case, batch_of, of_pytorch

RUNGS = ("b1_tensor_memory", "b2_two_tiles", "b3_stream", "b4_mixed")
# Tiles with one block of keys and with several, with one tile of queries and two, empty sequences
# of queries and of keys; each of the three programs has several items.
JAGGED = Case("jagged", (300, 0, 17, 129), (130, 40, 0, 200), num_heads_k=2, head_dim=64)


@pytest.mark.parametrize("impl", RUNGS)
def test_any_order_of_events_gives_the_same_result(impl):
    """As modelled, and 20 random orders; races are looked for in each of them."""
    call = JAGGED.arguments(torch.bfloat16) | {"scale": 0.25}
    batch, forward = batch_of(call), ladder.rung(impl).module().forward
    outs = []
    for schedule in ("modelled", *range(20)):
        with tritonemu.enabled("sm_100", schedule=schedule) as reports:
            outs.append(forward(batch))
        assert reports[-1].checks["race"] > 0 and reports[-1].dots > 0
    within_budget(lambda _: ([outs[0]], *of_pytorch(batch)), ["out"], most=1)
    for out in outs[1:]:
        assert torch.equal(out, outs[0])


@triton.jit
def mixed_kernel(s_ptr, y_ptr, t_ptr, scale, NAME: tl.constexpr, N: tl.constexpr):
    offsets = tl.program_id(0) * N + tl.arange(0, N)
    x, t = mixed_pairs(tl.load(s_ptr + offsets), scale, NAME)
    tl.store(t_ptr + offsets, t)
    tl.store(y_ptr + offsets, multiply_add_pairs(x, t, x))


def evaluate(scores: torch.Tensor, name: str, scale: float) -> tuple[torch.Tensor, torch.Tensor]:
    """(activation(scale * scores), t) as the kernel computes them, in fp64."""
    y, t = (torch.empty(scores.shape, dtype=torch.bfloat16) for _ in range(2))
    with tritonemu.enabled("sm_100"):
        launch(
            mixed_kernel, (scores.numel() // 1024,), scores.device, scores, y, t, scale,
            NAME=name, N=1024,
        )  # fmt: skip
    return y.double() * scale / 2, t.double()


def exact(x: torch.Tensor, name: str) -> torch.Tensor:
    """t with activation(x) = x / 2 (1 + t), in fp64."""
    if name == "gelu":
        return torch.erf(x / math.sqrt(2))
    return torch.tanh(x / 2 if name == "silu" else math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))


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


@pytest.mark.parametrize("scale", (1.0, 128**-0.5, -0.3))
@pytest.mark.parametrize("name", POLYNOMIALS)
def test_error_of_the_kernel(name, scale):
    """The polynomial's two of eight lanes within its bound and the rounding to bf16."""
    x = torch.cat([torch.linspace(-60, 60, 15 * 1024), torch.linspace(-9, 9, 49 * 1024)])
    scores = (x.double() / scale).float()
    x = scores.double() * scale
    y, t = evaluate(scores, name, scale)
    lanes = torch.arange(scores.numel()) % 8 >= 6
    limit, _, bound = POLYNOMIALS[name]
    error = (t - exact(x, name)).abs()
    assert error[lanes].max() <= bound + 2**-9
    assert error[~lanes].max() > bound + 2**-9  # MUFU's: so it matters which lanes are which
    saturated = lanes & (x.abs() >= limit)
    assert torch.equal(t[saturated], x[saturated].sign())
    activation = reference.ACTIVATIONS[name].function
    assert ((y - activation(x)).abs() <= 0.016 * x.abs() + 1e-30).all()


@pytest.mark.parametrize("name", POLYNOMIALS)
def test_corners(name):
    """Zero, huge, infinite and NaN scores in all lanes; what is saturated is x or 0."""
    corners = torch.tensor([0.0, -0.0, 1e4, -1e4, 1e38, -1e38, math.inf, math.nan])
    scores = corners.repeat_interleave(128)
    y, _ = evaluate(scores, name, 1.0)
    y = y.reshape(8, 128)
    assert (y[:2] == 0).all()
    assert ((y[2] / 1e4 - 1).abs() < 2**-8).all() and ((y[4] / 1e38 - 1).abs() < 2**-8).all()
    assert (y[3] == 0).all() and (y[5] == 0).all()
    assert (y[6] == math.inf).all() and y[7].isnan().all()
