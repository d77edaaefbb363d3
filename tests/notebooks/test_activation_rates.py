"""What the chapter on activation arithmetic measures: tables of errors, and reading a record."""

import torch

import tritonemu
from _lib import activation_rates as rates
from gdpa_lab.report.chapter import Chapter


def test_errors_are_rows_of_the_record():
    names = ["silu.tanh", "gelu.poly5"]
    with tritonemu.enabled():
        accuracy = rates.errors(torch.linspace(-60, 60, 201), names)
    recorded = Chapter("forward/activation_arithmetic").recorded("accuracy")
    assert set(accuracy.columns) <= set(recorded.columns)
    assert [row[0] for row in accuracy.rows] == names


def test_speeds_hold_every_sequence_of_the_record():
    found = rates.speeds(Chapter("forward/activation_arithmetic"))
    assert set(rates.NAMES) <= set(found.index)
    assert (found["rate"] * found["clocks"] - 1).abs().max() < 1e-12
    assert found.loc["gelu_taylor6", "error"] > 1e3 > found.loc["gelu.poly5", "error"]
