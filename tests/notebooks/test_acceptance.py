"""The acceptance test of Your own operator, whose chapter runs all of it."""

from dataclasses import replace

import pytest
import torch

from notebooks.serving import _acceptance as acceptance


def test_new_memory_is_full_of_nan_within_and_the_setting_comes_back():
    with acceptance.new_memory_of_nan():
        assert torch.empty(3).isnan().all() and torch.zeros(1).new_empty(3).isnan().all()
    assert not torch.are_deterministic_algorithms_enabled()


@pytest.mark.parametrize("name", ["slices of a packed tensor", "a mask, with gradients"])
def test_a_check_finds_its_fault_and_nothing_in_the_kernel_without_it(name):
    (check,) = (check for check in acceptance.CHECKS if check.inputs == name)
    assert acceptance.failure(check) == ""
    assert "beyond budget" in acceptance.failure(check, check.wrong())


def test_an_output_that_nobody_writes_is_found():
    lazy = replace(acceptance.RIGHT, forward=lambda batch: batch.new_out())
    assert "out: max error nan" in acceptance.failure(acceptance.FULL, lazy)
