"""Kernels of block attention as chapters show them: run in the emulator, compiled, rounded; and the
answers to exercises that take a launch."""

import pytest
import torch

import tritonemu
from _lib import block_studies, loops, studies
from gdpa_kernels.block_attention.batch import Batch
from gdpa_kernels.block_attention.kernels import v1_one_tile, v3_warp_specialized
from gdpa_kernels.block_attention.kernels.v3_warp_specialized import Config
from gdpa_kernels.block_attention.ladder import v0_flash, v2_slab
from gdpa_lab.measuring.inputs import cu_seqlens
from notebooks.block import _roundings

pytestmark = pytest.mark.sweep


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
    made = block_studies.built(v3_warp_specialized, "forward", inputs=block_studies.blank(64))
    found = loops.of_an_item(made["forward_kernel"])
    assert found["HGMMA"] == 8  # S and P V, 64 columns of each operand in steps of 16
    assert 100 < found["for an item"] < 2000 and found["for a block"] > 0
    with pytest.raises(ValueError, match="must have a role with matmuls False"):
        loops.of_an_item(made["forward_kernel"], matmuls=False)


def test_without_roundings_fp32_is_close_to_fp64():
    found = _roundings.study(_roundings.draw(2, dim=32), {"none": ()}, groups=2)
    assert found["largest"].max() < 1e-4
    assert found["by_group"].map(max).tolist() == found["largest"].tolist()


def test_a_place_must_be_known():
    with pytest.raises(ValueError, match="places must be of"):
        _roundings.gradients(_roundings.draw(1, dim=32), torch.float32, ("dV",))


@pytest.mark.parametrize(
    ("rung", "places"),
    [
        (v1_one_tile, _roundings.FUSED),
        (v0_flash, (*_roundings.FUSED, "stored twice", "D")),
    ],
)
def test_mean_errors_are_those_of_the_kernels(rung, places):
    """v1 applies rotary to gradients in fp32, v0 to stored ones, and v0 reads the output."""
    inputs = _roundings.draw(1, heads=2)
    q, k, v, dO = (x.transpose(1, 2).flatten(0, 1) for x in inputs[:4])
    turns = inputs[4][:, 0].flatten(0, 1)
    turns = turns.imag.contiguous(), turns.real.contiguous()
    batch = Batch(q, k, v, cu_seqlens((64,), "cpu"), 128**-0.5, rotary=turns, rotate_v=True)
    with tritonemu.enabled():
        _, saved = rung.forward(batch)
        found = rung.backward(dO, batch, saved)
    exact = _roundings.gradients(inputs, torch.float64, ())
    modelled = _roundings.gradients(inputs, torch.float32, places)
    for kernel, model, right in zip(found, modelled, exact, strict=True):
        kernel = kernel.unflatten(0, (1, 64)).transpose(1, 2).double()
        ratio = (kernel - right).abs().mean() / (model.double() - right).abs().mean()
        assert ratio == pytest.approx(1, abs=0.05)
