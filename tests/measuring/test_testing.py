"""The error budget: computed, and it can fail."""

import pytest
import torch

from gdpa_lab.measuring.testing import assert_close, compare


def made(seed: int = 0) -> dict:
    expected = torch.randn(1000, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    return {"expected": expected, "baseline": (expected + 0.01).bfloat16()}


def test_budget_is_twice_the_baseline_plus_one_rounding():
    # the second rounds to 1 in bf16
    expected = torch.tensor([1.0, 1.0 + 2**-9], dtype=torch.float64)
    baseline = torch.tensor([1.0, 1.0078125], dtype=torch.bfloat16)
    result = compare(name="x", actual=baseline, expected=expected, baseline=baseline)
    assert result.max_abs == 1.0078125 - (1 + 2**-9)
    assert result.max_abs_budget == 2 * result.max_abs + 2**-9
    assert result.passed


@pytest.mark.parametrize("damage", ("one element", "everywhere", "nan", "zeros"))
def test_damage_is_found(damage):
    data = made()
    actual = data["expected"].bfloat16()
    assert compare(name="x", actual=actual, **data).passed
    if damage == "one element":
        actual[17] += 0.25
    elif damage == "everywhere":
        actual += 0.03125
    elif damage == "nan":
        actual[3] = float("nan")
    else:
        actual.zero_()
    with pytest.raises(AssertionError, match="x: max error .* beyond budget over 1000 elements"):
        assert_close(name="x", actual=actual, **data)


def test_arguments_are_checked():
    data = made()
    right = data["baseline"]
    for changes, message in (
        ({"expected": right}, "expected must be float64"),
        ({"actual": right[:5]}, "must have expected's shape"),
        ({"actual": right.half()}, "baseline must have actual's dtype"),
    ):
        with pytest.raises(ValueError, match=message):
            compare(**{"name": "x", "actual": right, **data, **changes})
