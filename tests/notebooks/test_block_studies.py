"""Passes of block attention in the emulator, what they move, what is compiled of them."""

import pytest
import torch

from _lib import block_studies, studies
from gdpa_kernels.block_attention.kernels import v0_flash, v1_one_tile


@pytest.mark.parametrize("rung", (v0_flash, v1_one_tile))
@pytest.mark.parametrize("rotary", (None, torch.float32))
def test_a_pass_of_block_attention_is_compared_with_fp64(rung, rotary):
    given = block_studies.batch((0, 17, 33), head_dim=32, block_size=16, rotary=rotary)
    found = block_studies.comparison(rung, given)
    assert list(found["tensor"]) == list(block_studies.RESULTS)
    wrong = studies.changed(v1_one_tile, ("return out, ()", "return -out, ()"))
    with pytest.raises(AssertionError, match="out"):
        block_studies.comparison(wrong, given)


def test_the_traffic_of_one_tile():
    given = block_studies.batch((128,), head_dim=128)
    counted = block_studies.traffic(v1_one_tile, given).set_index("kernel")
    assert counted.loc["forward_kernel"].round().tolist() == [3, 1]
    assert counted.loc["backward_kernel", "written"] == 3


def test_the_timeline_of_one_program():
    given = block_studies.batch((64, 64), heads=1, head_dim=32, rotary=torch.bfloat16)
    line = block_studies.timeline(v1_one_tile, given, program=1, lanes={"default": "all warps"})
    assert {event.cta for event in line.events} == {1} and "all warps" in line.lanes(1)


def test_what_the_compiler_makes_of_a_pass():
    (row,) = block_studies.compiled({"v1": (v1_one_tile, "forward")}, ["HGMMA"]).to_dict("records")
    assert row["kernel"] == "forward_kernel" and row["HGMMA"] and row["programs on an SM"] > 1
