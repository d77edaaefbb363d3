"""The definition, against numbers worked out by hand and against autograd."""

import pytest
import torch

from gdpa_kernels.block_attention import reference
from gdpa_kernels.block_attention.batch import Batch
from gdpa_lab.measuring.inputs import cu_seqlens


def draw(*shape):
    return torch.randn(*shape, dtype=torch.float64)


def test_two_tokens_by_hand():
    # Scores of the first query: 0 and log 3, so P = (1/4, 3/4); of the second: 0 and 0.
    q = torch.tensor([[[1.0, 0.0]], [[0.0, 0.0]]]).double()
    k = torch.tensor([[[0.0, 5.0]], [[2.0, 0.0]]]).double()
    v = torch.tensor([[[4.0, 0.0]], [[0.0, 8.0]]]).double()
    scale = torch.tensor(3.0).double().log().item() / 2
    out = reference.forward(Batch(q, k, v, cu_seqlens([2], "cpu"), block_size=16, scale=scale))[0]
    torch.testing.assert_close(out[:, 0], torch.tensor([[1.0, 6.0], [2.0, 4.0]]).double())


def test_blocks_start_with_their_sequence():
    tokens = reference.tokens_of_blocks(cu_seqlens([3, 0, 2, 5], "cpu"), 2)
    assert tokens.tolist() == [[0, 1], [2, -1], [3, 4], [5, 6], [7, 8], [9, -1]]
    assert reference.tokens_of_blocks(cu_seqlens([], "cpu"), 2).shape == (0, 2)


def test_a_rotation_by_hand():
    # A quarter turn of the first pair, nothing for the second; interleaved pairs.
    x = torch.tensor([[[1.0, 2.0, 3.0, 4.0]]])
    sin, cos = torch.tensor([[1.0, 0.0]]), torch.tensor([[0.0, 1.0]])
    assert reference.rotate(x, sin, cos).tolist() == [[[-2.0, 1.0, 3.0, 4.0]]]
    assert reference.rotate_transposed(x, sin, cos).tolist() == [[[2.0, -1.0, 3.0, 4.0]]]


@pytest.mark.parametrize("rotary", ("none", "q_and_k", "v_too"))
def test_gradients_are_those_of_autograd(rotary):
    q, k, v = draw(45, 4, 16), draw(45, 2, 16), draw(45, 2, 16)
    options = {
        "block_size": 16,
        "scale": 0.3,
        "rotary": None if rotary == "none" else (draw(45, 8), draw(45, 8)),
        "rotate_v": rotary == "v_too",
    }
    ends, grad_out = cu_seqlens([17, 0, 16, 12], "cpu"), draw(45, 4, 16)
    leaves = [t.requires_grad_() for t in (q, k, v)]
    expected = torch.autograd.grad(
        reference.forward(Batch(q, k, v, ends, **options))[0], leaves, grad_out
    )
    with torch.no_grad():
        actual = reference.backward(grad_out, Batch(q, k, v, ends, **options))
    torch.testing.assert_close(actual, expected)


@pytest.mark.parametrize("dtype", (torch.float16, torch.bfloat16))
@pytest.mark.parametrize("rotated", (False, True))
def test_the_definition_rounds_once(dtype, rotated):
    """After what is rotated first; scores of 200, and gradients that fp16's sums would lose."""
    q, k, v = (draw(45, 2, 16).mul(size).to(dtype) for size in (12, 12, 1))
    ends, turns = cu_seqlens([17, 0, 28], "cpu"), (draw(45, 8).to(dtype), draw(45, 8).to(dtype))
    grad_out, scale = (draw(45, 2, 16) * 100).to(dtype), 0.25
    batch = Batch(q, k, v, ends, scale, 32, turns if rotated else None)
    wide = tuple(turn.double() for turn in turns)
    if rotated:
        q, k = (reference.rotate(x.double(), *wide).to(dtype) for x in (q, k))
    exact = Batch(q.double(), k.double(), v.double(), ends, scale, 32)
    dq, dk, dv = reference.backward(grad_out.double(), exact)
    if rotated:
        dq, dk = (reference.rotate_transposed(x, *wide) for x in (dq, dk))
    wanted = reference.forward(exact)[0], dq, dk, dv
    found = reference.forward(batch)[0], *reference.backward(grad_out, batch)
    for result, right in zip(found, wanted, strict=True):
        assert result.dtype == dtype
        error, size = (result.double() - right).abs(), right.abs().clamp(min=right.abs().max() / 64)
        assert (error <= 0.51 * torch.finfo(dtype).eps * size).all()


def test_a_block_is_attention_of_its_own():
    q, k, v = (draw(80, 2, 16) for _ in range(3))
    out = reference.forward(Batch(q, k, v, cu_seqlens([30, 50], "cpu"), block_size=32, scale=0.25))[
        0
    ]
    for rows in (slice(0, 30), slice(30, 62), slice(62, 80)):
        own = (t[rows].transpose(0, 1) for t in (q, k, v))
        expected = torch.nn.functional.scaled_dot_product_attention(*own, scale=0.25)
        torch.testing.assert_close(out[rows], expected.transpose(0, 1))
