"""Padding, means and more tokens of jagged batches; layers in an `nn.Sequential`."""

from functools import partial

import pytest
import torch
from torch import nn

from gdpa_kernels import PMA, BlockAttention, GDPASelfAttention, Lengths, Tokenwise, jagged
from gdpa_lab.measuring.inputs import cu_seqlens

LENGTHS = [0, 5, 9, 0, 1]
KINDS = ("int32", "int64", "Lengths", "nested")


def batch(kind: str, lengths=LENGTHS, width: int = 3, dtype=torch.float64):
    """values that want a gradient, and a jagged batch of them."""
    values = torch.randn(sum(lengths), width, dtype=dtype).requires_grad_()
    ends = cu_seqlens(lengths, "cpu")
    if kind == "nested":
        return values, torch.nested.nested_tensor_from_jagged(values, ends.long())
    given = {"int32": lambda: ends, "int64": ends.long, "Lengths": lambda: Lengths(ends)}
    return values, (values, given[kind]())


def same(found: torch.Tensor, expected: torch.Tensor, leaves: list[torch.Tensor]) -> None:
    """Two results and their gradients, which every leaf has."""
    torch.testing.assert_close(found, expected)
    weights = torch.randn_like(expected)
    wanted = torch.autograd.grad(expected, leaves, weights)
    for a, b in zip(torch.autograd.grad(found, leaves, weights), wanted, strict=True):
        assert b.abs().max() > 0
        torch.testing.assert_close(a, b)


def parts(y) -> tuple[torch.Tensor, list[int]]:
    """values and lengths of a batch of any kind."""
    values, offsets = (y.values(), y.offsets()) if isinstance(y, torch.Tensor) else y
    offsets = offsets.cu_seqlens if isinstance(offsets, Lengths) else offsets
    return values, offsets.diff().tolist()


@pytest.mark.parametrize("kind", KINDS)
def test_padded_and_back(kind):
    values, x = batch(kind)
    padded = jagged.to_padded_tensor(x, -1.0)
    rows = values.split(LENGTHS)
    expected = nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=-1.0)
    same(padded, expected, [values])
    assert jagged.to_padded_tensor(x, max_seqlen=12).shape == (5, 12, 3)
    offsets = x.offsets() if kind == "nested" else x[1]
    same(jagged.from_padded_tensor(jagged.to_padded_tensor(x), offsets)[0], values * 1, [values])


@pytest.mark.parametrize("kind", KINDS)
def test_means(kind):
    values, x = batch(kind)
    expected = torch.stack([r.mean(0) if len(r) else r.sum(0) for r in values.split(LENGTHS)])
    same(jagged.mean(x), expected, [values])


def test_a_mean_of_half_precision_is_summed_in_fp32():
    values = torch.full((4096, 1), 1.0, dtype=torch.bfloat16)  # in bf16 the sum stops at 256
    assert jagged.mean((values, cu_seqlens([4096], "cpu"))).item() == 1


@pytest.mark.parametrize("count", (0, 1, 2))
@pytest.mark.parametrize("kind", KINDS)
def test_tokens_at_the_ends(kind, count):
    values, x = batch(kind)
    tokens = torch.randn(5, count, 3, dtype=torch.float64).requires_grad_()
    y = jagged.append(x, tokens)
    found, lengths = parts(y)
    assert type(y) is type(x) and lengths == [n + count for n in LENGTHS]
    both = zip(values.split(LENGTHS), tokens, strict=True)
    expected = torch.cat([torch.cat(rows) for rows in both])
    same(found, expected, [values, tokens] if count else [values])
    if kind == "Lengths":
        assert (y[1].total, y[1].max_seqlen) == (15 + 5 * count, 9 + count)
        assert jagged.append(x, tokens)[1] is y[1], "made once"
    elif kind != "nested":
        assert y[1].dtype == torch.int32


@pytest.mark.parametrize("lengths", ([], [0, 0], [1]))
@pytest.mark.parametrize("kind", KINDS)
def test_hardly_any_tokens(kind, lengths):
    _, x = batch(kind, lengths)
    longest = max(lengths, default=0)
    assert jagged.to_padded_tensor(x).shape == (len(lengths), longest, 3)
    assert jagged.mean(x).shape == (len(lengths), 3)
    tokens = torch.ones(len(lengths), 1, 3)
    assert parts(jagged.append(x, tokens))[0].shape == (sum(lengths) + len(lengths), 3)


@pytest.mark.parametrize("kind", ("int32", "nested"))
def test_torch_compile_sees_one_graph(kind):
    def step(x):
        return jagged.mean(jagged.append(x, jagged.to_padded_tensor(x, max_seqlen=9)[:, :2]))

    torch._dynamo.reset()
    values, x = batch(kind)
    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    same(compiled(x), step(x), [values])


@pytest.mark.parametrize("kind", KINDS)
def test_a_batch_passes_through_a_sequential(kind):
    torch.manual_seed(0)
    layers = nn.Sequential(
        Tokenwise(nn.RMSNorm(32), nn.Linear(32, 32)), GDPASelfAttention(32, 4),
        Tokenwise(nn.LayerNorm(32), nn.GELU()), BlockAttention(32, 4, rotary=1e4),
        PMA(32, 4, 2),
    ).double()  # fmt: skip
    values, x = batch(kind, width=32)
    inner = layers[0], layers[1], layers[2], layers[3]
    ends, y = cu_seqlens(LENGTHS, "cpu"), values
    for layer in inner:
        wrapped = isinstance(layer, Tokenwise)
        y = nn.Sequential.forward(layer, y) if wrapped else layer((y, ends))[0]
    same(layers(x), layers[4]((y, ends)), [values, *inner[0].parameters()])


def test_wrong_arguments_say_what_is_wrong():
    values, ends = torch.randn(15, 3), cu_seqlens(LENGTHS, "cpu")
    x = values, ends
    append = partial(jagged.append, tokens=values[:5, None])
    for call in (jagged.to_padded_tensor, jagged.mean, append):
        with pytest.raises(ValueError, match="must run from 0 to the 15 rows .* got 0 to 14"):
            call((values, ends[:-1]))
        with pytest.raises(ValueError, match="offsets must be of 15 rows .* got Lengths"):
            call((values, Lengths(ends[:-1])))
    with pytest.raises(TypeError, match="validate must be a bool, got 1"):
        jagged.mean(x, validate=1)
    with pytest.raises(ValueError, match="max_seqlen must be at least the longest .* 9 .* got 8"):
        jagged.to_padded_tensor(x, max_seqlen=8)
    with pytest.raises(ValueError, match="max_seqlen must be at least 9, got 8"):
        jagged.to_padded_tensor((values, Lengths(ends)), max_seqlen=8)
    with pytest.raises(ValueError, match="max_seqlen must be an integer of at least 0, got -1"):
        jagged.to_padded_tensor(x, max_seqlen=-1)
    for offsets, batch, longest in ((ends, 5, 8), (Lengths(ends), 5, 8), (Lengths(ends), 4, 9)):
        told = f"padded must be of 5 sequences, of up to 9 tokens, got {batch} of {longest}"
        with pytest.raises(ValueError, match=told):
            jagged.from_padded_tensor(torch.ones(batch, longest, 3), offsets)
    with pytest.raises(ValueError, match="offsets must run from 0 .* got 0 to -1"):
        jagged.from_padded_tensor(torch.ones(1, 9, 3), torch.tensor([0, -1]))
    for wrong in (torch.ones(4, 1, 3), torch.ones(5, 1, 2)):
        with pytest.raises(ValueError, match=r"tokens must have shape \[5, count, 3\], got \["):
            jagged.append(x, wrong)
    nested = torch.nested.nested_tensor_from_jagged(values, ends.long())
    for call, name in (
        (lambda y: jagged.append(x, y), "tokens"),
        (lambda y: jagged.from_padded_tensor(y, ends), "padded"),
    ):
        with pytest.raises(TypeError, match=f"{name} must be a tensor, got NoneType"):
            call(None)
        for wrong in (torch.ones(5), nested):
            with pytest.raises(ValueError, match=rf"{name} must have shape \[batch, .*, got"):
                call(wrong)
    with pytest.raises(TypeError, match="tokens must be of a kind with x's torch.int64, got torch"):
        jagged.append((values.long(), ends), torch.ones(5, 1, 3))
    for wrong in ([0, 15], ends[:0], ends.float(), None):
        with pytest.raises((TypeError, ValueError), match="offsets must (be|have) .* got"):
            jagged.from_padded_tensor(torch.ones(5, 9, 3), wrong)
    with pytest.raises(TypeError, match="x must have a floating-point dtype, got torch.int64"):
        jagged.mean((torch.arange(15), ends))
