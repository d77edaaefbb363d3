"""The rotary kernel: the map, its transpose, in place, any strides."""

import pytest
import torch

from gdpa_kernels.block_attention import reference
from gdpa_kernels.block_attention.rotary import rotary
from gdpa_lab.measuring.testing import assert_close
from tests.block_attention.cases import DEVICE, kernels_run


def draw(*shape, dtype=torch.float32):
    return torch.randn(*shape, device=DEVICE).to(dtype)


def test_the_transpose_is_that_of_autograd_in_fp64():
    x = torch.randn(9, 2, 16, dtype=torch.float64, requires_grad=True)
    sin, cos = torch.randn(2, 9, 8, dtype=torch.float64)
    grad = torch.randn_like(x)
    (expected,) = torch.autograd.grad(reference.rotate(x, sin, cos), x, grad)
    torch.testing.assert_close(reference.rotate_transposed(grad, sin, cos), expected)


@pytest.mark.parametrize("transposed", (False, True))
@pytest.mark.parametrize("head_dim", (16, 48, 128))
@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float16, torch.float32), ids=str)
def test_matches_the_definition(dtype, head_dim, transposed):
    q, k, v = draw(70, 3, head_dim, dtype=dtype), *draw(2, 70, 1, head_dim, dtype=dtype)
    turns = tuple(2 * torch.rand(2, 70, head_dim // 2, device=DEVICE) - 1)  # as in cases.py
    with kernels_run():
        actual = rotary(q, k, v, turns, transposed=transposed)
    apply = reference.rotate_transposed if transposed else reference.rotate
    for name, x, y in zip("qkv", (q, k, v), actual, strict=True):
        exact = apply(x.double(), *(t.double() for t in turns))
        assert_close(name=name, actual=y, expected=exact, baseline=apply(x, *turns))


def test_in_place_strided_and_without_v():
    packed = draw(40, 4, 32, dtype=torch.bfloat16)
    turns = draw(40, 32).split(16, dim=1)
    q, k, _ = packed.split([2, 1, 1], dim=1)
    expected = [reference.rotate(x, *turns) for x in (q, k)]
    untouched = packed[:, 3].clone()
    with kernels_run():
        made = rotary(q, k, None, turns, in_place=True)
    assert made[0] is q and made[1] is k and made[2] is None
    for x, y in zip((q, k), expected, strict=True):
        torch.testing.assert_close(x, y, atol=0.02, rtol=0.02)
    assert torch.equal(packed[:, 3], untouched)
