"""Steps of an eager program, counted on tensors without contents."""

import pytest
import torch

from gdpa_lab.measuring.roofline import Ceilings
from notebooks.forward import _counted


def meta(*shape: int) -> torch.Tensor:
    return torch.empty(shape, dtype=torch.bfloat16, device="meta")


def test_a_step_reads_its_inputs_and_writes_its_result_once():
    a, b = meta(2, 8, 4), meta(2, 4, 16)
    steps, peak = _counted.count(lambda: torch.relu(a @ b), a, b)
    assert list(steps["op"]) == ["bmm", "relu"]
    assert list(steps["bytes_read"]) == [2 * (64 + 128), 512]
    assert list(steps["bytes_written"]) == [512, 512]
    assert list(steps["flops"]) == [2 * 2 * 8 * 16 * 4, 0]
    assert peak == 1024


def test_a_step_takes_the_longer_of_bytes_and_flops():
    a, b = meta(1, 4, 4), meta(1, 4, 4)
    steps, _ = _counted.count(lambda: torch.relu(a @ b), a, b)
    slow_math = _counted.modelled_us(steps, Ceilings(1e-6, ((1.0, 1e3),)))
    assert slow_math == pytest.approx([128.0, 64e-6])
