"""Loops of compiled kernels: the pipeliner's stages, the instructions of a role."""

from __future__ import annotations

import pytest

from _lib import block_studies, loops, studies
from gdpa_kernels.block_attention.kernels import v3_warp_specialized
from gdpa_kernels.block_attention.ladder import v2_slab


def loop(stages: int) -> loops.Pipeline:
    config = v2_slab.Config(num_stages=stages)
    made = block_studies.built(v2_slab, "forward", config, block_studies.blank(64))
    return loops.pipeline(made["forward_kernel"])


@pytest.mark.parametrize(
    ("stages", "ahead", "room"), [(1, 0, 1), (2, 1, 2), (4, 1, 2), (5, 2, 3), (6, 2, 3), (7, 3, 4)]
)
def test_stages_are_shared_with_the_loads_of_the_list(stages, ahead, room):
    found = loop(stages)
    assert (found.ahead, found.room) == (ahead, room)
    assert found.steps.count("MMA") == 2 and found.steps.count("store") == 1


def test_tiles_asked_for_in_a_row_are_shown_together():
    found = loops.Pipeline(["wait", "MMA", "list", "ask q", "ask k", "ask v"], 1, 2)
    assert found.shown() == "wait | MMA | list | ask q k v"


def test_without_a_list_all_stages_are_of_tiles():
    """The answer to an exercise of the chapter on v2."""
    unlisted = studies.changed(
        v2_slab,
        (
            "    first_row, rows = block_entry(blocks_ptr, slab // SLABS)\n",
            "    first_row, rows = slab // SLABS * 64, 64\n",
        ),
    )
    made = block_studies.built(unlisted, "forward", v2_slab.Config(num_stages=3))
    found = loops.pipeline(made["forward_kernel"])
    assert (found.ahead, found.room) == (2, 3) and "list" not in found.steps


def test_of_an_item_counts_the_loop_over_heads():
    made = block_studies.built(v3_warp_specialized, "forward", given=block_studies.blank(64))
    found = loops.of_an_item(made["forward_kernel"])
    assert found["HGMMA"] == 8  # S and P V, 64 columns of each operand in steps of 16
    assert 100 < found["for an item"] < 2000 and found["for a block"] > 0
    with pytest.raises(ValueError, match="must have a role with matmuls False"):
        loops.of_an_item(made["forward_kernel"], matmuls=False)
