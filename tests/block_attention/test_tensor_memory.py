"""b1, for sm_100: any order of events, mistakes that are found, what the compiler makes of it.

Against the definition it is held with the other rungs, in test_rungs.py.
"""

from dataclasses import replace
from functools import cache, partial

import pytest
import torch

import tritonemu
from emulator.tests.judging import SAMPLED, SCHEDULES, surviving
from gdpa_kernels.block_attention.batch import Batch
from gdpa_kernels.block_attention.block_list import BlockListRecipe
from gdpa_kernels.block_attention.kernels import b1_warp_specialized as b1
from gdpa_kernels.calling import ladder
from gdpa_lab.measuring.compile_check import SHARED_BYTES
from tests.block_attention.cases import DEVICE, Case, check, results
from tests.block_attention.compiling import built, read_once
from tests.calls import assert_same_bits
from tests.tiers import swept

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
emulated = pytest.mark.skipif(DEVICE == "cuda", reason="is about the emulator")
# Three blocks of two heads: one program uses its slots more than once.
PLAIN = Case("orders", (66, 0, 5))
TURNED = replace(PLAIN, rotary=True, rotate_v=True)
GROUPED = replace(TURNED, num_heads_k=1)
WIDE = replace(GROUPED, head_dim=128)
ONE_HEAD = replace(TURNED, seqlens=(130, 0, 70), num_heads=1, num_heads_k=1)
FEW = b1.Config(num_stages=2)


@cache
def expected(case: Case) -> tuple[torch.Tensor, ...]:
    return results(b1, case.tensors(BF16), case.options())


@cache
def work_list_of(case: Case) -> tuple[torch.Tensor]:
    ends = case.tensors(BF16)["cu_seqlens"]
    with tritonemu.enabled():
        return BlockListRecipe(sum(case.seqlens), 64).make(ends)


def run(module, case: Case, direction: str, config, schedule: str | int) -> None:
    """One direction of b1 or of a changed one: a wrong result is an AssertionError."""
    grad_out, *others = case.tensors(BF16).values()
    batch = Batch(*others, **case.options())
    out, *gradients = expected(case)
    given = {"config": config, "work_list": work_list_of(case)}
    with tritonemu.enabled("sm_100", multiprocessors=1, schedule=schedule, max_steps=20_000):
        if direction == "forward":
            assert torch.equal(module.forward(batch, **given)[0], out)
        else:
            assert_same_bits(module.backward(grad_out, batch, **given), gradients)


@emulated
@SCHEDULES
@pytest.mark.parametrize("case", (PLAIN, TURNED), ids=("plain", "rotary"))
@pytest.mark.parametrize("direction", ("forward", "backward"))
def test_any_order_of_events_gives_the_same_bits(direction, case, seeds):
    for seed in seeds:
        run(b1, case, direction, FEW if seed % 2 else None, seed)


@emulated
@pytest.mark.parametrize("config", (b1.Config(1), b1.Config(5, num_turns=2)), ids=str)
@pytest.mark.parametrize("case", (GROUPED, ONE_HEAD), ids=("grouped", "one head"))
def test_any_config_gives_the_same_bits(case, config):
    for direction in ("forward", "backward"):
        for schedule in ("modelled", 0):
            run(b1, case, direction, config, schedule)


@emulated
def test_sums_of_a_group_at_head_dim_128_match_the_definition():
    check(b1, replace(WIDE, num_heads=3), BF16)


def test_runs_on_its_major_version_alone():
    assert ladder.rung("b1_warp_specialized", "block_attention").requires.only_major


LAUNCHES = {
    "forward": ((ONE_HEAD, b1.Config(4, num_turns=2)), (TURNED, FEW), (PLAIN, None)),
    "backward": (
        *((ONE_HEAD, b1.Config(4, num_turns=2)), (TURNED, FEW)),
        *((WIDE, None), (PLAIN, None)),
    ),
}


@emulated
@SAMPLED
@pytest.mark.parametrize("direction", ("forward", "backward"))
def test_every_mistake_in_synchronisation_is_found(direction, every):
    def launch(case, config, module, schedule):
        run(module, case, direction, config, schedule)

    for case, _ in LAUNCHES[direction]:
        expected(case)  # its launches execute lines of the other direction
    calls = [partial(launch, *options) for options in LAUNCHES[direction]]
    judged = surviving(b1, f"{direction}_kernel", calls, every)
    assert judged.executed > 120 and judged.survivors == []


OPTIONS = (
    (BF16, FP32, {"head_dim": 64}),
    (FP16, FP32, {"head_dim": 128}),
    (FP16, BF16, {"head_dim": 64, "num_heads_k": 2, "rotary": True}),
    (BF16, FP32, {"head_dim": 128, "rotary": True, "rotate_v": True}),
)
# Rotary at head_dim 128: what all roles need of the launch's arguments, stored once a program.
MOST_SPILLED = 52


@pytest.mark.parametrize("dtype, turns, case", swept(OPTIONS, OPTIONS[-1:]), ids=str)
@pytest.mark.parametrize("direction", ("forward", "backward"))
def test_blackwell_code(direction, dtype, turns, case):
    backward, wide = direction == "backward", case["head_dim"] == 128
    kernel = built("b1_warp_specialized", dtype, turns, 100, **case)[f"{direction}_kernel"]
    made, columns = read_once(kernel), kernel.metadata.tmem_size
    assert made.spill_bytes <= (MOST_SPILLED if wide and case.get("rotary") else 0)
    assert made.registers == (128 if case.get("rotary") else 168)
    assert made.shared_bytes <= SHARED_BYTES[100]
    assert columns == (512 if backward else 2 * case["head_dim"])
    # An MMA of 64 rows takes 16 columns or rows of K at a time: S and dP head_dim, others 64.
    mmas = (2 if backward else 1) * case["head_dim"] // 16 + (3 if backward else 1) * 64 // 16
    # Barriers s_full and o_full. Were there more, the compiler would wait for MMAs by its own.
    assert made.instructions["UTCHMMA"] == mmas and made.instructions["UTCBAR"] == 2
    # 64 columns of one half of the lanes each, and of the other half
    assert made.instructions["LDTM"] == (10 if backward else 4)
    assert made.instructions["UTMALDG"] > 0 and made.instructions["UTMASTG"] > 0
    assert made.instructions["USETMAXREG"] > 0 and made.instructions["HGMMA"] == 0
    assert made.wide["LDG"] == made.wide["STG"] == 0
