"""`Mask`: the same call by one value and by keywords, and what it refuses."""

import pytest
import torch

from gdpa_kernels import GDPASelfAttention, Mask, gdpa
from gdpa_kernels.gdpa.mask import ALL, of_rule

OFFSETS = torch.tensor([0, 9, 9, 23], dtype=torch.int32)
COUNTS = torch.tensor([2, 0, 5])
MASKS = [
    {"causal": True},
    {"causal": "upper_left", "window": 3},
    {"window": 0},
    {"causal": True, "num_targets": COUNTS},
    {"causal": True, "num_targets": COUNTS, "target_group_size": 3, "num_contexts": 2},
    {"causal": True, "num_targets": COUNTS, "window": 4, "target_ranks": "own"},
    {"causal": True, "window": 2, "full_rows": 3},
]


@pytest.mark.parametrize("fields", MASKS, ids=str)
def test_keywords_are_the_same_call(fields):
    q, k, v = (torch.randn(23, 2, 8, dtype=torch.float64, requires_grad=True) for _ in "qkv")
    grad = torch.randn(23, 2, 8, dtype=torch.float64)
    outs = [
        gdpa(q, k, v, OFFSETS, OFFSETS, mask=Mask(**fields)),
        gdpa(q, k, v, OFFSETS, OFFSETS, **fields),
    ]
    gradients = [torch.autograd.grad(out, (q, k, v), grad) for out in outs]
    assert torch.equal(*outs)
    assert all(torch.equal(*pair) for pair in zip(*gradients, strict=True))


@pytest.mark.parametrize("fields", MASKS, ids=str)
@pytest.mark.parametrize("lower_right", (False, True))
def test_a_rule_brings_the_mask_back(fields, lower_right):
    mask = Mask(**fields)
    again = of_rule(mask.rule(lower_right))
    assert bool(again.causal) == bool(mask.causal)
    assert (again.causal == "lower_right") == (lower_right and bool(mask.causal))
    assert (again.window, again.full_rows, again.grouping) == (
        mask.window, mask.full_rows, mask.grouping,
    )  # fmt: skip
    assert of_rule(ALL.rule(False)).plain


@pytest.mark.parametrize(
    "error, message, fields",
    [
        (TypeError, "causal must be a bool, .* got 1", {"causal": 1}),
        (ValueError, "causal must be a bool, .* got 'left'", {"causal": "left"}),
        (ValueError, "window must be None or an integer of at least 0, got -1", {"window": -1}),
        (
            ValueError,
            "target_group_size must be .* got 0",
            {"causal": True, "target_group_size": 0},
        ),
        (ValueError, "target_ranks must be one of", {"causal": True, "target_ranks": "x"}),
        (ValueError, "full_rows must be 0 without a window", {"causal": True, "full_rows": 3}),
        (ValueError, "causal must be True", {"num_contexts": 3}),
        (ValueError, "causal must be True", {"target_group_size": 3}),
    ],
)
def test_wrong_fields_say_what_is_wrong(error, message, fields):
    with pytest.raises(error, match=message):
        Mask(**fields)


def test_a_mask_and_its_fields_are_not_both_given():
    x = torch.randn(23, 2, 8)
    with pytest.raises(TypeError, match="keywords must be left out beside mask, got causal"):
        gdpa(x, x, x, OFFSETS, OFFSETS, mask=Mask(window=1), causal=True)
    with pytest.raises(TypeError, match="keywords must be fields of Mask .* got casual"):
        gdpa(x, x, x, OFFSETS, OFFSETS, casual=True)
    with pytest.raises(TypeError, match="mask must be a Mask, got True"):
        gdpa(x, x, x, OFFSETS, OFFSETS, mask=True)
    with pytest.raises(ValueError, match="come with each batch"):
        GDPASelfAttention(16, 2, mask=Mask(True, num_contexts=2))
