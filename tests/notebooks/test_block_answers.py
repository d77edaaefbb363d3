"""Answers to exercises of the chapters on block attention that take an emulated launch."""

from __future__ import annotations

import pytest
import torch

from _lib import block_studies, studies
from gdpa_kernels.block_attention.kernels import v3_warp_specialized
from gdpa_kernels.block_attention.kernels.v3_warp_specialized import Config
from gdpa_kernels.block_attention.ladder import v4_rotary

DEAD = "dead = grad[stage] if GROUP == 1"
PUT_DV = "put(dv_desc, tiles.v[stage], block, head_k, dv, column)"
GIVEN = block_studies.batch((5 * 64,), head_dim=128)


def backward(module):
    return block_studies.emulated(module, GIVEN, "backward", config=Config(1, 2))[0]


def test_dq_over_q_is_a_race():
    over_q = studies.changed(v3_warp_specialized, (DEAD, DEAD.replace("grad[", "tiles.q[")))
    assert studies.findings(lambda: backward(over_q), ("modelled",))[0].startswith("Race")


@pytest.mark.parametrize("schedule", ("modelled", 0))
def test_dv_over_q_is_no_race_and_wrong(schedule):
    over_q = studies.changed(v3_warp_specialized, (PUT_DV, PUT_DV.replace("tiles.v", "tiles.q")))
    options = {"config": Config(1, 2), "schedule": schedule}
    found, _ = block_studies.emulated(over_q, GIVEN, "backward", **options)
    right = backward(v3_warp_specialized)
    assert [torch.equal(a, b) for a, b in zip(found, right, strict=True)] == [True, False, True]


def test_the_emulator_does_not_miss_the_fence_after_rotary():
    given = block_studies.batch((130,), rotary=torch.bfloat16, rotate_v=True)
    bare = studies.changed(v4_rotary, ('    tlx.fence("async_shared")\n\n', "\n"))
    found, right = (block_studies.emulated(m, given, "forward")[0] for m in (bare, v4_rotary))
    assert torch.equal(found[0], right[0])
