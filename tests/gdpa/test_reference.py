"""The definition, against numbers worked out by hand and against derivatives taken numerically."""

import math

import pytest
import torch

from gdpa_kernels import gdpa
from gdpa_kernels.gdpa import reference
from gdpa_lab.measuring.inputs import cu_seqlens
from tests.gdpa.cases import CASES, Case, batch_of

FP64 = torch.float64


def test_two_tokens_by_hand():
    # q = [1, 0], k = [[2, 0], [-3, 0]], v = [[1, 10], [100, 1000]], scale 0.5:
    # scores 1 and -1.5, relu 1 and 0, so the output is the first value row, times output_scale 3.
    q = torch.tensor([[[1.0, 0.0]]], dtype=FP64)
    k = torch.tensor([[[2.0, 0.0]], [[-3.0, 0.0]]], dtype=FP64)
    v = torch.tensor([[[1.0, 10.0]], [[100.0, 1000.0]]], dtype=FP64)
    out = gdpa(
        q, k, v, cu_seqlens([1], "cpu"), cu_seqlens([2], "cpu"), 1, 2,
        activation="relu", scale=0.5, output_scale=3.0, impl="reference",
    )  # fmt: skip
    assert out.tolist() == [[[3.0, 30.0]]]


def test_identity_is_linear_attention():
    # With the identity, (Q K^T) V = Q (K^T V): the d x d matrix of InterFormer's PFFN.
    q, k, v = (torch.randn(20, 1, 8, dtype=FP64) for _ in range(3))
    ends = cu_seqlens([20], "cpu")
    out = gdpa(q, k, v, ends, ends, 20, 20, activation="identity", scale=1.0, impl="reference")
    torch.testing.assert_close(out[:, 0], q[:, 0] @ (k[:, 0].T @ v[:, 0]))


POINTS = (-2.0, 0.0, 1.5)
VALUES = {
    "identity": [-2.0, 0.0, 1.5],
    "relu": [0.0, 0.0, 1.5],
    "relu_squared": [0.0, 0.0, 2.25],
    "leaky_relu": [-0.02, 0.0, 1.5],
    "gelu": [-math.erfc(math.sqrt(2)), 0.0, 1.5 * (1 - 0.5 * math.erfc(1.5 / math.sqrt(2)))],
    "gelu_tanh": [
        x / 2 * (1 + math.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))) for x in POINTS
    ],
    "silu": [-2 / (1 + math.e**2), 0.0, 1.5 / (1 + math.exp(-1.5))],
    "hardswish": [-2 / 6, 0.0, 1.5 * 4.5 / 6],
    "gelu_taylor6": [
        0.5 * x + (x**2 - x**4 / 6 + x**6 / 40) / math.sqrt(2 * math.pi) for x in POINTS
    ],
}


@pytest.mark.parametrize("name", reference.ACTIVATIONS)
def test_activation_values(name):
    x, expected = (torch.tensor(values, dtype=FP64) for values in (POINTS, VALUES[name]))
    torch.testing.assert_close(reference.ACTIVATIONS[name].function(x), expected)


@pytest.mark.parametrize("name", reference.ACTIVATIONS)
def test_derivative_is_the_slope(name):
    x = torch.linspace(-5, 5, 400, dtype=FP64)  # misses the kinks at -3, 0 and 3
    activation, step = reference.ACTIVATIONS[name], 1e-6
    slope = (activation.function(x + step) - activation.function(x - step)) / (2 * step)
    torch.testing.assert_close(activation.derivative(x), slope, atol=2e-7, rtol=2e-7)


def test_every_activation_is_zero_at_zero():
    # The kernels rely on it: keys beyond a sequence's end read as zero and must add nothing.
    for activation in reference.ACTIVATIONS.values():
        assert activation.function(torch.zeros(1)).item() == 0.0


def test_masked_pairs_contribute_exactly_zero():
    # GELU'(0) = 0.5 and act(0) = 0: a mask must act after the activation, on any activation.
    keep = reference.visible(4, 6, causal=True, window=2)
    assert keep.int().tolist() == [
        [1, 0, 0, 0, 0, 0],
        [1, 1, 0, 0, 0, 0],
        [1, 1, 1, 0, 0, 0],
        [0, 1, 1, 1, 0, 0],
    ]


def test_positions_that_end_with_their_sequence():
    keep = reference.visible(3, 5, causal="lower_right", window=None)
    assert keep.int().tolist() == [[1, 1, 1, 0, 0], [1, 1, 1, 1, 0], [1, 1, 1, 1, 1]]
    keep = reference.visible(4, 2, causal="lower_right", window=0)
    assert keep.int().tolist() == [[0, 0], [0, 0], [1, 0], [0, 1]]
    for mask in ({"causal": "upper_left", "window": None}, {"causal": True, "window": None}):
        assert reference.visible(2, 3, **mask).int().tolist() == [[1, 0, 0], [1, 1, 0]]


def test_a_masked_nan_reaches_its_own_sequence_alone():
    call = Case("nan", (3, 4), options={"causal": True}).arguments(FP64)
    clean = reference.forward(batch_of(call))
    call["v"][2] = float("nan")  # the last key of the first sequence, which its last row alone sees
    out = reference.forward(batch_of(call))
    assert out[:3].isnan().all() and torch.equal(out[3:], clean[3:])
    dq, dk, dv = reference.backward(torch.ones_like(out), batch_of(call))
    assert dq[:3].isnan().all()
    assert all(gradient[3:].isfinite().all() for gradient in (dq, dk, dv))


EXTREMES = {
    "steep": (1000**0.5 / 4, 0.01, 1.0, 1.0),  # scores of 1000: x * x is beyond fp16
    "scaled_inside": (250.0, 1.0, 1e-5, 1.0),
    "scaled_outside": (3.0, 250.0, 1.0, 2.0**-10),
}


@pytest.mark.parametrize("name", ("identity", "gelu", "gelu_tanh", "silu", "hardswish"))
@pytest.mark.parametrize("size", EXTREMES)
@pytest.mark.parametrize("dtype", (torch.float16, torch.bfloat16))
def test_the_definition_rounds_once(name, size, dtype):
    """What `auto` computes on a CPU is what fp64 gives, rounded, but for errors of fp32."""
    of_qk, of_v, scale, output_scale = EXTREMES[size]
    make = torch.Generator().manual_seed(0)
    q, k, v = (
        (torch.ones(64, 2, 16) * size + torch.randn(64, 2, 16, generator=make) / 64).to(dtype)
        for size in (of_qk, of_qk, of_v)
    )
    ends, found = cu_seqlens([40, 24], "cpu"), {}
    for kind in (dtype, FP64):
        leaves = [x.to(kind).requires_grad_() for x in (q, k, v)]
        options = {"activation": name, "scale": scale, "output_scale": output_scale}
        out = gdpa(*leaves, ends, ends, 40, 40, **options)
        found[kind] = out, *torch.autograd.grad(out, leaves, torch.full_like(out, 2.0**-10))
    bound = 0.51 * torch.finfo(dtype).eps
    for result, exact in zip(found[dtype], found[FP64], strict=True):
        assert result.isfinite().all()
        error = (result.double() - exact).abs()
        assert (error <= bound * exact.abs().clamp(min=exact.abs().max() / 64)).all()


def assert_backward_is_autograds(call: dict, atol: float = 1e-11) -> None:
    call = call | {name: call[name].detach().requires_grad_() for name in "qkv"}
    out = reference.forward(batch_of(call))
    grad_out = torch.randn_like(out)
    # Added, since autograd gives None for what the output of an empty batch does not depend on.
    total = (out * grad_out).sum() + sum(0 * call[name].sum() for name in "qkv")
    expected = torch.autograd.grad(total, [call[name] for name in "qkv"])
    with torch.no_grad():
        found = reference.backward(grad_out, batch_of(call))
    for name, actual, wanted in zip("qkv", found, expected, strict=True):
        torch.testing.assert_close(
            actual, wanted, atol=atol, rtol=1e-11, msg=lambda m, n=name: n + m
        )


@pytest.mark.parametrize("case", CASES, ids=str)
def test_backward_is_the_derivative_of_forward(case):
    assert_backward_is_autograds(case.arguments(FP64))


@pytest.mark.parametrize("name", reference.ACTIVATIONS)
def test_backward_of_every_activation(name):
    options = {"activation": (name,), "scale": 0.7, "output_scale": -0.5}
    call = Case("activation", (20, 0, 7), (9, 4, 30), num_heads=4, options=options).arguments(FP64)
    scores = 0.7 * torch.einsum("qhd,khd->hqk", call["q"], call["k"].repeat_interleave(2, 1))
    steepest = reference.ACTIVATIONS[name].derivative(scores).abs().max().item()
    # 130 roundings each way, of terms whose sizes sum to at most 1000 slopes (gelu_taylor6: 1e5).
    assert_backward_is_autograds(call, atol=2 * 130 * 2**-53 * 1000 * steepest)
