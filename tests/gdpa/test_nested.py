"""Nested tensors of layout torch.jagged in place of offsets: the same call, and a nested result."""

import pytest
import torch

from gdpa_kernels import gdpa

ENDS, KEY_ENDS = torch.tensor([0, 4, 4, 9]), torch.tensor([0, 2, 5, 11])
FORMS = ("self", "cross", "shared", "packed", "kv_packed", "keys_alone")


def nest(values: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
    return torch.nested.nested_tensor_from_jagged(values, offsets)


def call_of(form: str) -> tuple[list[torch.Tensor], dict, dict]:
    """Leaves, and the same call with offsets and with nested tensors."""
    keys = ENDS if form in ("self", "packed") else KEY_ENDS
    heads = {"packed": (6, 0, 0), "kv_packed": (2, 4, 0)}.get(form, (2, 2, 2))
    rows = 3 if form == "shared" else 9, int(keys[-1]), int(keys[-1])
    leaves = [
        torch.randn(n, count, 8, dtype=torch.float64).requires_grad_() if count else None
        for n, count in zip(rows, heads, strict=True)
    ]
    given = dict(zip("qkv", leaves, strict=True))
    ends = {"cu_seqlens_q": None if form == "shared" else ENDS, "cu_seqlens_k": keys}
    nested = {
        name: nest(x, ENDS if name == "q" else keys) if x is not None else None
        for name, x in given.items()
    }
    if form in ("shared", "keys_alone"):
        nested["q"] = given["q"]
    if form == "keys_alone":
        nested["cu_seqlens_q"] = ENDS
    return [x for x in leaves if x is not None], given | ends, nested


@pytest.mark.parametrize("compiled", (False, True))
@pytest.mark.parametrize("form", FORMS)
def test_nested_tensors_bring_their_offsets(form, compiled):
    leaves, call, nested = call_of(form)
    call, nested = ({k: v for k, v in x.items() if v is not None} for x in (call, nested))
    function = torch.compile(gdpa, backend="aot_eager", fullgraph=True) if compiled else gdpa
    expected, found = gdpa(**call), function(**nested)
    assert found.is_nested == nested["q"].is_nested
    if found.is_nested:
        assert found.offsets() is nested["q"].offsets()
        found = found.values()
    torch.testing.assert_close(found, expected)
    weights = torch.randn_like(expected)
    for a, b in zip(*(torch.autograd.grad(y, leaves, weights) for y in (found, expected)),
                    strict=True):  # fmt: skip
        assert b.abs().max() > 0
        torch.testing.assert_close(a, b)


def test_a_nested_sum_is_added_to():
    _, call, nested = call_of("cross")
    part = gdpa(**nested)
    expected = gdpa(**call, add_to=part.values())
    assert torch.equal(gdpa(**nested, add_to=part).values(), expected)
    with pytest.raises(ValueError, match="add_to must be nested with the offsets of q, got a Ten"):
        gdpa(**nested, add_to=part.values())


@pytest.mark.parametrize("letter", "qk")
def test_a_longest_sequence_that_is_too_short_is_refused(letter):
    *_, nested = call_of("packed")
    name = f"max_seqlen_{letter}"
    with pytest.raises(ValueError, match=f"{name} must be at least the longest .*, 5 .*, got 1"):
        gdpa(**nested, **{name: 1})
