"""The study of roundings rounds as the kernels do."""

from __future__ import annotations

import pytest
import torch

import tritonemu
from _lib import roundings
from gdpa_kernels.block_attention.batch import Batch
from gdpa_kernels.block_attention.kernels import v0_flash, v1_one_tile
from gdpa_lab.measuring.inputs import cu_seqlens


def test_without_roundings_fp32_is_close_to_fp64():
    found = roundings.study(roundings.draw(2, dim=32), {"none": ()}, groups=2)
    assert found["largest"].max() < 1e-4
    assert found["by_group"].map(max).tolist() == found["largest"].tolist()


def test_a_place_must_be_known():
    with pytest.raises(ValueError, match="places must be of"):
        roundings.gradients(roundings.draw(1, dim=32), torch.float32, ("dV",))


@pytest.mark.parametrize(
    ("rung", "places"),
    [
        (v1_one_tile, roundings.FUSED),
        (v0_flash, (*roundings.FUSED, "stored twice", "D")),
    ],
)
def test_mean_errors_are_those_of_the_kernels(rung, places):
    """v1 applies rotary to gradients in fp32, v0 to stored ones, and v0 reads the output."""
    inputs = roundings.draw(1, heads=2)
    q, k, v, dO = (x.transpose(1, 2).flatten(0, 1) for x in inputs[:4])
    turns = inputs[4][:, 0].flatten(0, 1)
    turns = turns.imag.contiguous(), turns.real.contiguous()
    batch = Batch(q, k, v, cu_seqlens((64,), "cpu"), 128**-0.5, rotary=turns, rotate_v=True)
    with tritonemu.enabled():
        _, saved = rung.forward(batch)
        found = rung.backward(dO, batch, saved)
    exact = roundings.gradients(inputs, torch.float64, ())
    modelled = roundings.gradients(inputs, torch.float32, places)
    for kernel, model, right in zip(found, modelled, exact, strict=True):
        kernel = kernel.unflatten(0, (1, 64)).transpose(1, 2).double()
        ratio = (kernel - right).abs().mean() / (model.double() - right).abs().mean()
        assert ratio == pytest.approx(1, abs=0.05)
