"""Accuracy of formulas for GELU, against values known otherwise."""

import math

import pytest
import torch

from _lib import approximations as approx


def test_a_relative_error_of_one_per_cent_is_one_per_cent():
    assert approx.normal_l2(lambda x: 1.01 * approx.gelu(x)) == pytest.approx(0.01)


def test_the_integral_agrees_with_samples():
    scores = 0.5 * torch.randn(10**6, generator=torch.Generator().manual_seed(0)).double()
    error = approx.taylor6(scores) - approx.gelu(scores)
    sampled = (error.norm() / approx.gelu(scores).norm()).item()
    assert approx.normal_l2(approx.taylor6, 0.5) == pytest.approx(sampled, rel=0.1)


def test_a_formula_that_never_leaves_reaches_everywhere():
    assert approx.reach(approx.gelu) == math.inf and approx.reach(approx.gelu, -1) == -math.inf
    assert -1 < approx.reach(approx.taylor6, -1) < 0 < approx.reach(approx.taylor6) < 1.2


def test_the_fit_is_better_than_the_series_on_its_inputs():
    assert approx.normal_l2(approx.fitted) < approx.normal_l2(approx.taylor6) / 10


def test_the_fitted_tanh_is_nearer_to_gelu_than_its_usual_form():
    assert 3.8e-4 < approx.worst(approx.fitted_tanh) < 4.7e-4 < approx.worst(approx.gelu_tanh)
    assert approx.normal_l2(approx.fitted_tanh) < approx.normal_l2(approx.gelu_tanh)


def test_tables_hold_the_formulas_and_the_yardstick():
    for table in (approx.by_std, approx.by_score):
        found = table({"tanh": approx.gelu_tanh})
        assert list(found) == ["tanh", "half a bf16 unit"] and (found >= 0).all(axis=None)
