"""GELU and SiLU of pairs of bf16: their error over all scores, and the corners."""

import pytest
import torch
import triton
import triton.language as tl

from gdpa_kernels import emulator
from gdpa_kernels.calling.launch import launch
from gdpa_kernels.gdpa import reference
from gdpa_kernels.gdpa.activations import FOLDABLE, foldable, multiply_add_pairs, tanh_of_pairs

BOUND = 0.016  # of abs(x), from the documented errors of the instructions


@triton.jit
def pairs_kernel(s_ptr, y_ptr, scale, NAME: tl.constexpr, N: tl.constexpr):
    offsets = tl.program_id(0) * N + tl.arange(0, N)
    x, t = tanh_of_pairs(tl.load(s_ptr + offsets), scale, NAME)
    tl.store(y_ptr + offsets, multiply_add_pairs(x, t, x))


def evaluate(scores: torch.Tensor, name: str, scale: float) -> torch.Tensor:
    """activation(scale * scores) in fp64, of what the kernels compute in bf16."""
    out = torch.empty(scores.shape, dtype=torch.bfloat16)
    with emulator.enabled():
        launch(
            pairs_kernel, (scores.numel() // 1024,), scores.device, scores, out, scale,
            NAME=name, N=1024,
        )  # fmt: skip
    return out.double() * scale / 2


def exact(x: torch.Tensor, name: str) -> torch.Tensor:
    return reference.ACTIVATIONS[name].function(x)


@pytest.mark.parametrize("scale", (1.0, 128**-0.5, 0.03))
@pytest.mark.parametrize("name", FOLDABLE)
def test_error_stays_within_a_share_of_the_score(name, scale):
    x = torch.cat([torch.linspace(-60, 60, 31 * 1024), torch.linspace(-4, 4, 33 * 1024)])
    scores = (x.double() / scale).float()
    x = scores.double() * scale
    error = (evaluate(scores, name, scale) - exact(x, name)).abs()
    assert (error <= BOUND * x.abs() + 1e-30).all()
    assert error.max() > 1e-3  # 8 bits: a smaller error would mean that something else ran


@pytest.mark.parametrize("name", FOLDABLE)
def test_corners(name):
    """0 stays 0, which is what masks rely on; any finite score gives what the limits demand."""
    scores = torch.zeros(1024)
    scores[1:7] = torch.tensor([1e4, -1e4, 1e38, -1e38, float("nan"), float("inf")])
    scores[7] = -0.0
    y = evaluate(scores, name, 1.0)
    assert (y[0], y[7], y[8]) == (0, 0, 0)
    assert abs(y[1] / 1e4 - 1) < 2**-8 and abs(y[3] / 1e38 - 1) < 2**-8
    assert (y[2], y[4]) == (0, 0)
    assert y[5].isnan() and y[6] == float("inf")


def test_which_calls_are_computed_in_pairs():
    assert foldable(("gelu",), torch.bfloat16) and foldable(("silu",), torch.bfloat16)
    assert not foldable(("gelu_tanh",), torch.float16)  # x + x t may exceed 65504
    assert not foldable(("gelu_tanh", "silu"), torch.bfloat16)
    assert not foldable(("relu",), torch.bfloat16)
