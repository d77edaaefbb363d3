"""What the compiler makes of the rungs on Hopper: their instructions, spills, room to share."""

import re

import pytest
import torch

from gdpa_kernels.block_attention import rotary as rotation
from gdpa_kernels.block_attention.batch import Batch
from gdpa_kernels.block_attention.kernels import v4a_turning_role as v4a
from gdpa_kernels.calling.launches import launches
from gdpa_lab.measuring.compile_check import disassemble
from tests.block_attention.cases import BLACKWELL, RUNGS
from tests.block_attention.compiling import Compiled, built, compile_launch, compiled
from tests.tiers import sweep, swept

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
DIMS = pytest.mark.parametrize("head_dim", (sweep(64), 128))

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
    ("v4a_turning_role", {"head_dim": 128, "num_heads_k": 2, "rotate_v": True}, 344),
)


def programs_on_an_sm(made: Compiled, num_warps: int = 4) -> int:
    """How many programs shared memory and registers admit."""
    per_warp = (made.registers * 32 + 255) // 256 * 256
    by_registers = REGISTERS_OF_AN_SM // (per_warp * num_warps)
    return min(by_registers, SMEM_OF_AN_SM // (made.shared_bytes + 1024))


@DIMS
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


@pytest.mark.parametrize("head_dim, forward, backward", (sweep(64, 6, 3), (128, 4, 3)))
def test_programs_of_v1_share_an_sm(head_dim, forward, backward):
    made = compiled("v1_one_tile", head_dim=head_dim)
    assert programs_on_an_sm(made["forward_kernel"]) >= forward
    assert programs_on_an_sm(made["backward_kernel"]) >= backward


@DIMS
def test_v1_moves_every_byte_once_and_16_at_a_time(head_dim):
    # A tile [64, head_dim] of 2 bytes by 128 threads is head_dim / 16 accesses of 16 bytes each.
    made, accesses = compiled("v1_one_tile", head_dim=head_dim), head_dim // 16
    forward, backward = made["forward_kernel"].wide, made["backward_kernel"].wide
    assert forward["LDG"] == 3 * accesses and forward["STG"] == accesses
    assert backward["LDG"] == 4 * accesses and backward["STG"] == 3 * accesses


@pytest.mark.parametrize("rotary", (False, sweep(True)))
@DIMS
def test_programs_of_v2_fit_as_its_config_says(head_dim, rotary):
    """Programs that take a few slabs and end must share an SM, or nothing hides their ends."""
    made = compiled("v2_slab", head_dim=head_dim, rotary=rotary)
    for direction in ("forward", "backward"):
        q = torch.empty(3, 4, head_dim, dtype=BF16)
        turns = (torch.empty(3, head_dim // 2),) * 2 if rotary else None
        config = RUNGS["v2_slab"].default_config(direction, Batch(q, q, q, None, 1.0, 64, turns))
        fit = programs_on_an_sm(made[f"{direction}_kernel"], config.num_warps)
        assert fit >= (2 if config.slabs_per_program else config.programs_per_sm)


OF_OPTIONS = [
    *(("v2_slab", dtype, case) for dtype in (BF16, FP16) for case in (
        {"head_dim": 64, "rotary": True, "rotate_v": True},
        {"head_dim": 128, "rotary": True},
    )),
    *(("v1_one_tile", BF16, case) for case in (
        {"head_dim": 48},
        {"head_dim": 128, "block_size": 128},
        {"head_dim": 128, "block_size": 16},
        {"head_dim": 64, "rotary": True, "rotate_v": True},
        {"head_dim": 64, "num_heads_k": 2},
    )),
]  # fmt: skip


@pytest.mark.sweep
@pytest.mark.parametrize("rung, dtype, case", OF_OPTIONS, ids=str)
def test_options_do_not_spill(rung, dtype, case):
    for made in compiled(rung, dtype, **case).values():
        assert made.spill_bytes == 0 and not made.serialised


@pytest.mark.parametrize(
    "rung, case, most",
    swept(KNOWN_SPILLS, lambda rung, case, most: case == {"head_dim": 128}),
    ids=str,
)
def test_known_spills_do_not_grow(rung, case, most):
    made = compiled(rung, **case)
    assert made["forward_kernel"].spill_bytes == 0
    assert 0 < made["backward_kernel"].spill_bytes <= most
    assert not made["backward_kernel"].serialised


OPTIONS_OF_ROLES = (
    (BF16, FP32, {"head_dim": 64}),
    (BF16, FP32, {"head_dim": 128}),
    (FP16, FP32, {"head_dim": 128}),
    (FP16, FP32, {"head_dim": 64, "num_heads_k": 2}),
    (BF16, FP32, {"head_dim": 64, "num_heads_k": 2, "rotate_v": True}),
    (BF16, FP32, {"head_dim": 128, "num_heads_k": 2, "rotate_v": True}),
    (BF16, FP32, {"head_dim": 128, "rotate_v": True}),
    (FP16, BF16, {"head_dim": 128, "rotate_v": True}),
    (BF16, FP32, {"head_dim": 96}),
    (BF16, BF16, {"head_dim": 96, "rotate_v": True}),
    (BF16, FP32, {"head_dim": 192, "rotate_v": True}),
    (BF16, FP32, {"head_dim": 256, "rotate_v": True}),
    (BF16, BF16, {"head_dim": 256, "rotate_v": True}),
)
OF_V3_AND_V4 = (
    (BF16, FP32, {"head_dim": 128, "num_heads_k": 2}),
    (BF16, FP16, {"head_dim": 128, "rotate_v": True}),
    (BF16, FP32, {"head_dim": 192}),
    (FP16, FP32, {"head_dim": 256}),
)
OF_V4A = (
    (BF16, FP32, {"head_dim": 256}),
    (BF16, BF16, {"head_dim": 128, "rotate_v": True, "config": v4a.Config(1, 3, 1)}),
    (BF16, FP32, {"head_dim": 64, "rotate_v": True, "config": v4a.Config(2, 4, 2, 1, 184, 112)}),
)
OF_ROLES = [
    *(("v3_warp_specialized", *each) for each in (*OPTIONS_OF_ROLES, *OF_V3_AND_V4)
      if "rotate_v" not in each[-1]),
    *(("v4_rotary", *each) for each in (*OPTIONS_OF_ROLES, *OF_V3_AND_V4)),
    *(("v4a_turning_role", *each) for each in (*OPTIONS_OF_ROLES, *OF_V4A)),
]  # fmt: skip


@pytest.mark.parametrize(
    "rung, dtype, turns, case",
    swept(OF_ROLES, lambda rung, *options: options == (BF16, FP32, {"head_dim": 128})),
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
    q = torch.zeros(64, 4, 128, dtype=BF16)
    turns = (torch.zeros(64, 64), torch.zeros(64, 64))
    with launches(run=False) as seen:
        rotation.rotary(q, q, None, turns)
    (only,) = seen
    made = compile_launch(only)
    assert made.wide["LDG"] > 0 and made.wide["STG"] > 0
    assert made.instructions["SHFL"] == 0 and made.instructions["STS"] == 0
    assert made.spill_bytes == 0 and made.shared_bytes == 0


def innermost_loops(sass: str) -> list[list[str]]:
    """The mnemonics of each loop that contains no other of more than 100 instructions."""
    lines, labels, loops = [], {}, []
    for line in map(str.strip, sass.splitlines()):
        if label := re.match(r"(\.L\w*):", line):
            labels[label[1]] = len(lines)
        elif instruction := re.match(r"/\*[0-9a-f]+\*/\s+(.*?);", line):
            lines.append(instruction[1])
    for end, line in enumerate(lines):
        if (jump := re.search(r"BRA\S*\s.*`\((\.L\w*)\)", line)) and jump[1] in labels:
            loops.append((labels[jump[1]], end + 1))
    loops = [(begin, end) for begin, end in loops if end - begin > 100]
    inner = [a for a in loops if not any(b != a and a[0] <= b[0] and b[1] <= a[1] for b in loops)]
    name = re.compile(r"(?:@!?\w+\s+)?([A-Z][A-Z0-9]*)")
    return [[name.match(line)[1] for line in lines[begin:end]] for begin, end in inner]


# (direction, head_dim): most instructions of a warp for an item in the math role, the turn role.
INSTRUCTIONS = {
    ("backward", 128): (1320, 880), ("forward", 128): (550, 880),
    ("backward", 64): (1000, 460), ("forward", 64): (450, 460),
}  # fmt: skip


@pytest.mark.sweep
@pytest.mark.parametrize("direction, head_dim", INSTRUCTIONS)
def test_roles_share_the_instructions_of_v4(direction, head_dim):
    """Per item: sin and cos are not read, no gradient crosses shared memory, nothing is spilt."""

    def loops(rung):
        made = built(rung, BF16, BF16, head_dim=head_dim, rotate_v=True)
        return innermost_loops(disassemble(made[f"{direction}_kernel"]))

    math, turn, both = (
        min((loop for loop in loops(rung) if is_it(loop)), key=len)
        for rung, is_it in (
            ("v4a_turning_role", lambda loop: "HGMMA" in loop),
            ("v4a_turning_role", lambda loop: "HGMMA" not in loop and loop.count("FFMA") > 50),
            ("v4_rotary", lambda loop: "HGMMA" in loop),
        )
    )
    most_of_math, most_of_turn = INSTRUCTIONS[direction, head_dim]
    assert len(math) <= most_of_math and len(turn) <= most_of_turn
    assert len(math) < 0.55 * len(both) and len(math) + len(turn) < len(both)
    assert math.count("LDS") == math.count("STS") == math.count("LDSM") == 0
    assert turn.count("LDS") == turn.count("STS") == 3 * head_dim // 16
    assert "LDL" not in math + turn and "STL" not in math + turn
