"""What the compiler makes of the rungs on Hopper: their instructions, spills, room to share."""

from __future__ import annotations

import pytest
import torch

from gdpa_kernels.block_attention.batch import Batch
from gdpa_kernels.calling.launches import launches
from tests.block_attention.cases import BLACKWELL, RUNGS, rotaries
from tests.block_attention.compiling import Compiled, compile_launch, compiled

SMEM_OF_AN_SM = 228 * 1024
SMEM_OF_A_PROGRAM = 227 * 1024
REGISTERS_OF_AN_SM = 64 * 1024

# Bytes that backward spills in bf16: in these calls it runs out of registers. The first is the
# price of a third program on an SM (`default_config`).
KNOWN_SPILLS = (
    ("v1_one_tile", {"head_dim": 128}, 60),
    ("v1_one_tile", {"head_dim": 128, "num_heads_k": 2}, 60),
    ("v1_one_tile", {"head_dim": 128, "rotary": True}, 152),
    ("v1_one_tile", {"head_dim": 128, "rotary": True, "rotate_v": True}, 72),
    ("v1_one_tile", {"head_dim": 128, "rotary": True, "num_heads_k": 2}, 144),
    ("v2_slab", {"head_dim": 128, "rotary": True, "rotate_v": True}, 458),
    ("v4_rotary", {"head_dim": 128, "num_heads_k": 2}, 44),
    ("v4_rotary", {"head_dim": 128, "num_heads_k": 2, "rotate_v": True}, 284),
)


def programs_on_an_sm(made: Compiled, num_warps: int = 4) -> int:
    """How many programs shared memory and registers admit."""
    per_warp = (made.registers * 32 + 255) // 256 * 256
    by_registers = REGISTERS_OF_AN_SM // (per_warp * num_warps)
    return min(by_registers, SMEM_OF_AN_SM // (made.shared_bytes + 1024))


@pytest.mark.parametrize("head_dim", (64, 128))
@pytest.mark.parametrize("rung", [rung for rung in RUNGS if rung not in BLACKWELL])
def test_hopper_code_of_the_measured_shapes(rung, head_dim):
    known = [(impl, case) for impl, case, _ in KNOWN_SPILLS]
    for name, made in compiled(rung, head_dim=head_dim).items():
        if name == "delta_kernel":
            continue
        assert made.instructions["HGMMA"] > 0 and not made.serialised, name
        spills = name == "backward_kernel" and (rung, {"head_dim": head_dim}) in known
        assert spills or made.spill_bytes == 0, name
        if rung in ("v0_flash", "v1_one_tile"):
            assert made.wide["LDG"] > 0 and made.wide["STG"] > 0
        else:
            assert made.instructions["UTMALDG"] > 0 and made.instructions["UTMASTG"] > 0
            assert made.wide["LDG"] == made.wide["STG"] == 0


@pytest.mark.parametrize("head_dim, forward, backward", ((64, 6, 3), (128, 4, 3)))
def test_programs_of_v1_share_an_sm(head_dim, forward, backward):
    made = compiled("v1_one_tile", head_dim=head_dim)
    assert programs_on_an_sm(made["forward_kernel"]) >= forward
    assert programs_on_an_sm(made["backward_kernel"]) >= backward


@pytest.mark.parametrize("head_dim", (64, 128))
def test_v1_moves_every_byte_once_and_16_at_a_time(head_dim):
    # A tile [64, head_dim] of 2 bytes by 128 threads is head_dim / 16 accesses of 16 bytes each.
    made, accesses = compiled("v1_one_tile", head_dim=head_dim), head_dim // 16
    forward, backward = made["forward_kernel"].wide, made["backward_kernel"].wide
    assert forward["LDG"] == 3 * accesses and forward["STG"] == accesses
    assert backward["LDG"] == 4 * accesses and backward["STG"] == 3 * accesses


@pytest.mark.parametrize("rotary", (False, True))
@pytest.mark.parametrize("head_dim", (64, 128))
def test_programs_of_v2_fit_as_its_config_says(head_dim, rotary):
    """Programs that take a few slabs and end must share an SM, or nothing hides their ends."""
    made = compiled("v2_slab", head_dim=head_dim, rotary=rotary)
    for direction in ("forward", "backward"):
        q = torch.empty(3, 4, head_dim, dtype=torch.bfloat16)
        turns = (torch.empty(3, head_dim // 2),) * 2 if rotary else None
        config = RUNGS["v2_slab"].default_config(direction, Batch(q, q, q, None, 1.0, 64, turns))
        fit = programs_on_an_sm(made[f"{direction}_kernel"], config.num_warps)
        assert fit >= (2 if config.slabs_per_program else config.programs_per_sm)


@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float16), ids=str)
@pytest.mark.parametrize(
    "case",
    (
        {"head_dim": 64, "rotary": True, "rotate_v": True},
        {"head_dim": 128, "rotary": True},
    ),
    ids=str,
)
def test_options_of_v2_do_not_spill(case, dtype):
    for made in compiled("v2_slab", dtype, **case).values():
        assert made.spill_bytes == 0 and not made.serialised


@pytest.mark.parametrize("rung, case, most", KNOWN_SPILLS, ids=str)
def test_known_spills_do_not_grow(rung, case, most):
    made = compiled(rung, **case)
    assert made["forward_kernel"].spill_bytes == 0
    assert 0 < made["backward_kernel"].spill_bytes <= most
    assert not made["backward_kernel"].serialised


@pytest.mark.parametrize(
    "case",
    (
        {"head_dim": 48},
        {"head_dim": 128, "block_size": 128},
        {"head_dim": 128, "block_size": 16},
        {"head_dim": 64, "rotary": True, "rotate_v": True},
        {"head_dim": 64, "num_heads_k": 2},
    ),
    ids=str,
)
def test_options_of_v1_do_not_spill(case):
    for made in compiled("v1_one_tile", **case).values():
        assert made.spill_bytes == 0 and not made.serialised


BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
OPTIONS_OF_ROLES = (
    (BF16, FP32, {"head_dim": 64}),
    (BF16, FP32, {"head_dim": 128}),
    (FP16, FP32, {"head_dim": 128}),
    (FP16, FP32, {"head_dim": 64, "num_heads_k": 2}),
    (BF16, FP32, {"head_dim": 128, "num_heads_k": 2}),
    (BF16, FP32, {"head_dim": 64, "num_heads_k": 2, "rotate_v": True}),
    (BF16, FP32, {"head_dim": 128, "num_heads_k": 2, "rotate_v": True}),
    (BF16, FP32, {"head_dim": 128, "rotate_v": True}),
    (FP16, BF16, {"head_dim": 128, "rotate_v": True}),
    (BF16, FP16, {"head_dim": 128, "rotate_v": True}),
    (BF16, FP32, {"head_dim": 96}),
    (BF16, BF16, {"head_dim": 96, "rotate_v": True}),
    (BF16, FP32, {"head_dim": 192, "rotate_v": True}),
    (BF16, FP32, {"head_dim": 192}),
    (FP16, FP32, {"head_dim": 256}),
    (BF16, FP32, {"head_dim": 256, "rotate_v": True}),
    (BF16, BF16, {"head_dim": 256, "rotate_v": True}),
)


@pytest.mark.parametrize(
    "rung, dtype, turns, case",
    [
        (rung, *options)
        for rung in ("v3_warp_specialized", "v4_rotary")
        for options in OPTIONS_OF_ROLES
        if rotaries(rung)[-1] or "rotate_v" not in options[-1]
    ],
    ids=str,
)
def test_hopper_code_of_roles(rung, dtype, turns, case):
    known = [(impl, others) for impl, others, _ in KNOWN_SPILLS]
    for name, made in compiled(rung, dtype, turns, **case).items():
        spills = name == "backward_kernel" and (rung, case) in known
        assert (spills or made.spill_bytes == 0) and not made.serialised, name
        assert made.shared_bytes <= SMEM_OF_A_PROGRAM, name
        for instruction in ("HGMMA", "UTMALDG", "UTMASTG", "USETMAXREG"):
            assert made.instructions[instruction] > 0, (name, instruction)
        assert made.wide["LDG"] == made.wide["STG"] == 0, name


def test_rotation_is_local_to_a_thread():
    """The pairs of a tile lie side by side in a thread: rotary in the standalone kernel takes no
    shuffle and no shared memory."""
    from gdpa_kernels.block_attention import rotary

    q = torch.zeros(64, 4, 128, dtype=torch.bfloat16)
    turns = (torch.zeros(64, 64), torch.zeros(64, 64))
    with launches(run=False) as seen:
        rotary.rotary(q, q, None, turns)
    (only,) = seen
    made = compile_launch(only)
    assert made.wide["LDG"] > 0 and made.wide["STG"] > 0
    assert made.instructions["SHFL"] == 0 and made.instructions["STS"] == 0
    assert made.spill_bytes == 0 and made.shared_bytes == 0
