"""GELU and SiLU of pairs of bf16: errors over all scores, corners, and how to do without."""

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
from gdpa_kernels.gdpa.activations import FOLDABLE, foldable, multiply_add_pairs, tanh_of_pairs
from tests.gdpa.cases import Case, batch_of, kernels_run
from tests.gdpa.test_forward import call

BOUND = 0.016  # of abs(x), from the documented errors of the instructions


@triton.jit
def pairs_kernel(s_ptr, y_ptr, scale, NAME: tl.constexpr, N: tl.constexpr):
    offsets = tl.program_id(0) * N + tl.arange(0, N)
    x, t = tanh_of_pairs(tl.load(s_ptr + offsets), scale, NAME)
    tl.store(y_ptr + offsets, multiply_add_pairs(x, t, x))


def evaluate(scores: torch.Tensor, name: str, scale: float) -> torch.Tensor:
    """activation(scale * scores) in fp64, of what the kernels compute in bf16."""
    out = torch.empty(scores.shape, dtype=torch.bfloat16)
    with tritonemu.enabled():
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


# Rungs with packed arithmetic: `Config` of the first two can also do without.
PAIRED = ["v7_packed", "v8_own_waits", "b6_pair_stream"]
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


@pytest.mark.parametrize("name", FOLDABLE)
@pytest.mark.parametrize("impl", PAIRED)
def test_precise_is_as_v6(impl, name):
    """The same bits where the keys are added up in the same order; errors as `gdpa` documents."""
    arguments = case(name)
    with launches() as seen:
        packed = call(impl, arguments)
        precise = call(impl, arguments | {"precise": True})
    pairs = [launch.constants["PAIRS"] for launch in seen if "PAIRS" in launch.constants]
    assert pairs == [True, False]
    v6 = call("v6_short_kv", arguments)
    assert torch.equal(precise, v6) or impl.startswith("b")
    assert 3.2e-3 < relative_error(packed, arguments) < 3.8e-3
    found = relative_error(precise, arguments)
    assert found < 2.45e-3 and found <= 1.005 * relative_error(v6, arguments)


def test_precise_changes_nothing_elsewhere():
    arguments = case("relu")
    for impl in ("v0_eager", "v1_tiled", "v8_own_waits"):
        assert torch.equal(call(impl, arguments), call(impl, arguments | {"precise": True})), impl


@pytest.mark.parametrize("impl", ("v7_packed", "v8_own_waits"))
def test_a_config_can_do_without_pairs(impl):
    arguments, module = case("gelu_tanh"), ladder.rung(impl).module()
    with kernels_run(impl):
        out = module.forward(batch_of(arguments), config=module.Config(pairs=False))
    assert torch.equal(out, call(impl, arguments | {"precise": True}))
