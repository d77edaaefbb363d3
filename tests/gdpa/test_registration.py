"""Activations of one's own: right in every product, in both directions, or refused in words."""

import runpy
from contextlib import contextmanager
from functools import partial

import pytest
import torch
import triton
import triton.language as tl

from gdpa_kernels import GDPASelfAttention, gdpa, register_activation
from gdpa_kernels.calling import ladder
from gdpa_kernels.calling.launches import launches
from gdpa_kernels.gdpa import registration
from gdpa_kernels.gdpa.device import custom
from gdpa_kernels.gdpa.reference import ACTIVATIONS
from gdpa_lab.measuring.compile_check import build_launch
from tests.budget import within_budget
from tests.calls import DEVICE, kernels_run
from tests.gdpa.cases import Case, batch_of, check_gradients, gradients, of_pytorch
from tests.tiers import swept

BF16, FP32 = torch.bfloat16, torch.float32


@triton.jit
def sigmoid(x):
    return 1.0 / (1.0 + tl.exp(-x))


@triton.jit
def sigmoid_and_slope(x):
    y = sigmoid(x)
    return y, y * (1.0 - y)


@triton.jit
def elu(x):
    return tl.where(x > 0, x, tl.exp(x) - 1.0)


@triton.jit
def elu_and_slope(x):
    return elu(x), tl.where(x > 0, 1.0, tl.exp(x))


@triton.jit
def half_slope(x):
    return sigmoid(x), 0.5 * sigmoid(x) * (1.0 - sigmoid(x))


@triton.jit
def short(x):
    return tl.where(tl.abs(x) > 24.0, 0.0, x)


@triton.jit
def short_and_slope(x):
    return x, tl.where(tl.abs(x) > 24.0, 0.0, 1.0)


@triton.jit
def overflowing(x):
    return tl.log(1.0 + tl.exp(x))


@triton.jit
def identity(x):
    return x


@triton.jit
def fourth(x):
    return x * x * (x * x)


@triton.jit
def fourth_and_slope(x):
    return fourth(x), 4.0 * x * x * x


@triton.jit
def two_arguments(x, y):
    return x + y


SIGMOID = sigmoid, sigmoid_and_slope, torch.sigmoid
ELU = elu, elu_and_slope, torch.nn.functional.elu


@contextmanager
def registered_activations():
    """Sigmoid and ELU are known; what is registered inside is forgotten."""
    tables = (custom.CUSTOM, ACTIVATIONS)
    before = [dict(table) for table in tables]
    register_activation("sigmoid", *SIGMOID)
    register_activation("elu", *ELU)
    try:
        yield
    finally:
        for table, kept in zip(tables, before, strict=True):
            table.clear()
            table.update(kept)


@pytest.fixture(autouse=True)
def registered():
    """After a test, and after its monkeypatch, what it registered is forgotten."""
    with registered_activations():
        yield


PRODUCTS = {
    way: [x for x in ladder.impls(direction=way)[1:] if not ladder.rung(x).is_lesson]
    for way in ("forward", "backward")
}
OPTIONS = {
    "sigmoid": {"activation": "sigmoid"},
    "elu": {"activation": "elu"},
    "per_head": {"activation": ("sigmoid", "gelu_tanh")},
    "masked": {"activation": "sigmoid", "causal": "upper_left", "window": 20},
}


def case_of(impl: str, options: str) -> Case:
    """A jagged batch with tails of tiles, of a width and with keys that the kernel takes."""
    head_dim = 256 if "wide" in impl else 128 if impl.startswith("v5") else 64
    keys = (100, 1, 0, 70) if "v6_one" in impl else (130, 1, 0, 200)
    return Case(options, (70, 129, 5, 0), keys, head_dim=head_dim, options=OPTIONS[options])


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("impl", PRODUCTS["forward"])
def test_forward_products_are_right(impl, options):
    case = case_of(impl, options)

    def draw(i: int) -> tuple:
        call = case.arguments(BF16, i)
        with kernels_run(impl):
            out = gdpa(**call, impl=impl)
        return [out], *of_pytorch(batch_of(call))

    within_budget(draw, ["out"], least=8192)


@pytest.mark.parametrize("options", swept(OPTIONS, ("per_head", "masked")))
@pytest.mark.parametrize("impl", PRODUCTS["backward"])
def test_backward_products_are_right(impl, options):
    check_gradients(partial(gradients, impl), case_of(impl, options), BF16, least=2048)


def test_two_sources_of_a_name_are_two_kernels(monkeypatch):
    first = custom.cache_key("sigmoid")
    monkeypatch.delitem(custom.CUSTOM, "sigmoid")
    monkeypatch.delitem(ACTIVATIONS, "sigmoid")
    register_activation("sigmoid", *ELU)
    key = custom.cache_key("sigmoid")
    assert key != first and key.startswith("sigmoid@")
    assert custom.cache_key("gelu") == "gelu"


def test_the_same_again_is_fine_and_another_source_is_refused():
    register_activation("sigmoid", *SIGMOID)
    assert (
        GDPASelfAttention(32, 2, activation=("sigmoid", "relu")).options.activation[0] == "sigmoid"
    )
    with pytest.raises(ValueError, match="name must be new, got 'sigmoid', which is registered"):
        register_activation("sigmoid", *ELU)


MODULE = """
import torch, triton, triton.language as tl
from gdpa_kernels import register_activation

@triton.jit
def bounded(x):
    return x / (1.0 + tl.abs(x))

@triton.jit
def bounded_and_slope(x):
    y = 1.0 / (1.0 + tl.abs(x))
    return x * y, y * y

register_activation("bounded", bounded, bounded_and_slope, lambda x: {})
"""


def test_a_cell_that_is_run_again_is_the_same(tmp_path):
    """Its functions are other objects; what they compute is compared, in both directions."""
    path = tmp_path / "cell.py"

    def run(definition: str) -> None:
        path.write_text(MODULE.format(definition))
        runpy.run_path(str(path))

    run("x / (1 + x.abs())")
    first = custom.CUSTOM["bounded"]
    run("x / (x.abs() + 1)")
    assert custom.CUSTOM["bounded"] is first
    for another in ("x / (1.001 + x.abs())", "torch.where(x.abs() > 24, 0, x / (1 + x.abs()))",
                    "(x / (1 + x.abs())).detach() + x - x.detach()"):  # fmt: skip
        with pytest.raises(ValueError, match="name must be new, got 'bounded', which is"):
            run(another)


def with_closure():
    """The same functions, whose helper is no global."""

    @triton.jit
    def helper(x):
        return 1.0 / (1.0 + tl.exp(-x))

    @triton.jit
    def value(x):
        return helper(x)

    @triton.jit
    def value_and_slope(x):
        y = helper(x)
        return y, y * (1.0 - y)

    def redefine() -> None:
        nonlocal helper
        helper = two_arguments

    return (value, value_and_slope, torch.sigmoid), redefine


@pytest.mark.parametrize("where", ("globals", "closure"))
def test_a_helper_that_is_defined_anew_changes_nothing(where, monkeypatch):
    """As by a later cell of a notebook: what was proved is what is compiled."""
    functions, redefine = with_closure() if where == "closure" else (SIGMOID, None)
    register_activation("mine", *functions)
    if redefine is None:
        monkeypatch.setitem(globals(), "sigmoid", two_arguments)
    else:
        redefine()
    for dtype in (BF16, FP32):
        call = Case("call", (9,), options={"activation": "mine"}).arguments(dtype)
        with kernels_run(), launches() as seen:
            out = gdpa(**call, impl="v1_tiled")
        wanted = gdpa(**call, impl="reference")
        torch.testing.assert_close(out, wanted, rtol=2e-2, atol=2e-2)
        assert build_launch(seen[-1]).asm["ptx"]


def not_finite(x):
    return 1 / x


WRONG = (
    (TypeError, "name must be a string, got int", (3, *SIGMOID)),
    (ValueError, "name must be an identifier other than .*gelu.*, got 'gelu'", ("gelu", *SIGMOID)),
    (ValueError, "name must be an identifier .*, got 'a,b'", ("a,b", *SIGMOID)),
    (TypeError, "value must be a @triton.jit function of x alone, got <",
     ("mine", torch.sigmoid, *SIGMOID[1:])),
    (TypeError, "value_and_slope must be a @triton.jit function of x alone",
     ("mine", sigmoid, two_arguments, torch.sigmoid)),
    (TypeError, "reference must be callable, got str", ("mine", *SIGMOID[:2], "sigmoid")),
    (ValueError, "reference must be finite at 0", ("mine", *SIGMOID[:2], not_finite)),
    (ValueError, r"reference must be computed element by element, got .0.24, .* and .1.0, 1.0, 1.0",
     ("mine", *SIGMOID[:2], lambda x: x.softmax(-1).round(decimals=2))),
    (ValueError, "reference must be a differentiable function, got 'NoneType' object",
     ("mine", *SIGMOID[:2], lambda x: x.grad.sum())),
    (ValueError, "its derivative must be a differentiable function, got element 0 of tensors does",
     ("mine", *SIGMOID[:2], lambda x: x.detach())),
    (ValueError, "its derivative must be finite at 0", ("mine", *SIGMOID[:2], torch.sqrt)),
)  # fmt: skip


@pytest.mark.parametrize("error, message, given", WRONG)
def test_what_is_wrong_is_said_when_it_is_registered(error, message, given):
    with pytest.raises(error, match=message):
        register_activation(*given)
    assert "mine" not in ACTIVATIONS


FALSE = (
    ("value", (elu, sigmoid_and_slope, torch.sigmoid)),
    ("value_and_slope's value", (sigmoid, elu_and_slope, torch.sigmoid)),
    ("slope", (sigmoid, half_slope, torch.sigmoid)),
    ("value", (short, short_and_slope, torch.clone)),
    ("slope", (identity, short_and_slope, torch.clone)),
    ("value", (overflowing, sigmoid_and_slope, torch.nn.functional.softplus)),
)


@pytest.mark.parametrize("impl", ("v1_tiled", "auto"))
@pytest.mark.parametrize("part, given", FALSE)
def test_a_function_that_is_not_its_reference_computes_nothing(part, given, impl):
    register_activation("mine", *given)
    call = Case("call", (9,), options={"activation": "mine"}).arguments(BF16)
    says = rf"the {part} of activation 'mine' must be within 0.00098 .* got .* at x = -?[\d.e+]+$"
    for _ in range(2):  # it is not taken for proved
        with kernels_run(), pytest.raises(ValueError, match=says):
            gdpa(**call, impl=impl)


def test_what_exceeds_fp32_is_compared_where_it_does_not():
    """x ** 4 beyond 2 ** 32."""
    register_activation("mine", fourth, fourth_and_slope, lambda x: x**4)
    with kernels_run():
        registration.prove(("mine",), torch.device(DEVICE))


def test_an_unknown_name_is_told_how_to_become_known():
    call = Case("call", (9,), options={"activation": "mish"}).arguments(BF16)
    with pytest.raises(ValueError, match="or one that register_activation has made known, got"):
        gdpa(**call)


def test_each_kind_of_device_is_proved_once(monkeypatch):
    monkeypatch.setattr(registration, "_proved", set())
    with kernels_run(), launches() as seen:
        for _ in range(2):
            registration.prove(("gelu", "sigmoid", "elu"), torch.device(DEVICE))
    assert [launch.name for launch in seen] == ["evaluate_kernel"] * 2
