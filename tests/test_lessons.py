"""Lessons: as narrow as they say, of the machine code of their products, and short."""

from __future__ import annotations

import importlib
import statistics
from types import ModuleType

import pytest
import torch

from gdpa_kernels.calling import ladder
from gdpa_kernels.calling.launches import launches
from gdpa_kernels.calling.rung import Rung
from gdpa_kernels.gdpa.batch import Batch
from gdpa_lab.measuring import compile_check, machine_code
from gdpa_lab.report import lessons

RUNGS = [rung for rungs in ladder.LADDERS.values() for rung in rungs]
VIEWS = [rung for rung in RUNGS if rung.lesson != rung.path]
FORMS = [(64, 256), (64, 1024), (128, 256), (128, 512), (128, 1024)]
"""head_dim, and keys of each of two sequences: K and V that stay, and blocks of both sizes."""


def view(rung: Rung) -> ModuleType:
    return importlib.import_module(f"gdpa_kernels.{rung.lesson.parents[1].name}.ladder.{rung.impl}")


def codes(rung: Rung, module: ModuleType, head_dim: int, keys: int, activation: str) -> list[str]:
    """Of what a call of `module` launches on the published form."""
    x = torch.zeros(2 * keys, 4, head_dim, dtype=torch.bfloat16)
    ends = torch.tensor([0, keys, 2 * keys], dtype=torch.int32)
    batch = Batch(x, x, x, ends, ends, keys, keys, (activation,), head_dim**-0.5)
    with launches(run=False) as seen:
        module.backward(x, batch) if rung.operator == "gdpa_backward" else module.forward(batch)
    capability = 10 * rung.requires.capability[0]
    built = [compile_check.build_launch(launch, capability=capability) for launch in seen]
    return [machine_code.digest(each.asm["cubin"]) for each in built]


@pytest.mark.parametrize("head_dim, keys", FORMS)
@pytest.mark.parametrize("rung", VIEWS, ids=lambda rung: rung.impl)
def test_a_lesson_is_the_product_on_the_published_form(rung, head_dim, keys):
    for activation in ("silu", "gelu_tanh"):
        call = head_dim, keys, activation
        assert codes(rung, view(rung), *call) == codes(rung, rung.module(), *call)


def test_another_lesson_has_other_code():
    one, other = VIEWS[:2]
    assert codes(one, view(one), 128, 256, "silu") != codes(other, view(other), 128, 256, "silu")


LONG = {
    "v5_short_kv_backward", "v6_one_tile_backward", "b1_tensor_memory_backward",
    "b2_short_kv_backward", "v4_rotary", "v4a_turning_role", "b1_warp_specialized",
}  # fmt: skip
"""Products without a view, and a rung that has not been stripped yet."""
REWRITES = {
    "b5_cta_pair", "b6_pair_stream", "v4_warp_specialized_backward", "v5_short_kv_backward",
    "v7_wide_backward", "b1_tensor_memory_backward", "v1_one_tile", "v2_slab",
    "v3_warp_specialized", "b1_warp_specialized",
}  # fmt: skip
"""Steps to another structure."""


@pytest.mark.parametrize("step", list(lessons.steps()), ids=lambda step: step.impl)
def test_lessons_and_steps_are_short(step):
    long = step.operator == "block_attention" or step.operator == "gdpa_backward"
    if step.impl not in LONG:
        assert step.jit <= 200 and step.file <= (360 if long else 350)
    if step.impl not in REWRITES:
        assert step.changed <= 200


def test_the_median_step():
    assert statistics.median(step.changed for step in lessons.steps()) <= 140
