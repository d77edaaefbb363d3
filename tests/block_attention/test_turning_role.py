"""v4a: the bits of v4_rotary from three kinds of roles, in any order of events."""

from __future__ import annotations

import re
from dataclasses import replace
from functools import cache, partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import tritonemu
from gdpa_kernels.block_attention.batch import Batch
from gdpa_kernels.block_attention.kernels import v4a_turning_role as v4a
from gdpa_kernels.block_attention.ladder import v4_rotary as v4
from gdpa_kernels.calling.launches import launches
from gdpa_lab.measuring.compile_check import build_launch, disassemble, read
from tests.block_attention.cases import (
    BLOCKS,
    CASES,
    DEVICE,
    NAMES,
    NEIGHBOURS,
    Case,
    check,
    poisoned,
    results,
)
from tests.emulator.mutants import surviving

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
emulated = pytest.mark.skipif(DEVICE == "cuda", reason="is about the emulator")


def supported(case: Case, dtype: torch.dtype) -> bool:
    _, *others = case.tensors(dtype).values()
    return v4a.requires(Batch(*others, **case.options())) is None


def assert_same_bits(found, expected, note=None) -> None:
    for name, a, b in zip(NAMES, found, expected, strict=True):
        assert torch.equal(a, b), (name, note)


@pytest.mark.parametrize(
    "case, dtype",
    [
        (case, dtype)
        for case in dict.fromkeys(replace(case, rotary=True) for case in CASES)
        for dtype in (BF16, FP16)
        if supported(case, dtype)
    ],
    ids=str,
)
def test_matches_the_definition(case, dtype):
    check(v4a, case, dtype)


@pytest.mark.parametrize("rotate_v", (False, True))
@pytest.mark.parametrize("heads, heads_k", ((2, 2), (2, 1)))
@pytest.mark.parametrize("head_dim", (64, 128))
def test_options_match_the_definition(head_dim, heads, heads_k, rotate_v):
    case = Case("options", (65, 0, 30), heads, heads_k, head_dim, rotary=True, rotate_v=rotate_v)
    check(v4a, case, BF16)


@emulated  # on a GPU the compiler decides in each kernel which products and sums it fuses
@pytest.mark.parametrize("turns", (FP32, BF16, FP16), ids=str)
@pytest.mark.parametrize("dtype", (BF16, FP16), ids=str)
@pytest.mark.parametrize(
    "head_dim, heads_k",
    ((64, 2), (64, 1), (96, 2), (96, 1), (128, 2), (128, 1), (192, 2), (256, 2)),
)
def test_same_bits_as_v4(head_dim, heads_k, dtype, turns):
    """Whatever the dtype of sin and cos: one rounding, in the same place."""
    for rotate_v in (False, True):
        case = Case("bits", (65, 0, 40), 2, heads_k, head_dim, rotary=True, rotate_v=rotate_v)
        tensors, options = case.tensors(dtype), case.options()
        options["rotary"] = tuple(t.to(turns) for t in options["rotary"])
        expected = results(v4, tensors, options)
        assert_same_bits(results(v4a, tensors, options), expected, rotate_v)


# (math_roles, num_stages, num_turns, whether the loads of all heads are issued together)
CONFIGS = (
    *((1, 1, 1, False), (1, 2, 1, False), (1, 2, 3, False), (1, 3, 2, False), (1, 4, 1, True)),
    *((2, 2, 2, False), (2, 4, 2, False), (2, 4, 4, False), (3, 3, 3, False)),
)


def configs(heads: int) -> list[v4a.Config]:
    registers = {
        1: {}, 2: {"registers": 184, "turn_registers": 112},
        3: {"registers": 120, "turn_registers": 96},
    }  # fmt: skip
    return [
        v4a.Config(roles, stages, turns, heads if together else 1, **registers[roles])
        for roles, stages, turns, together in CONFIGS
        if not together or stages // roles > heads
    ]


def scheduled(case: Case, schedule: str | int, config=None) -> tuple[torch.Tensor, ...]:
    """(out, dq, dk, dv) of v4a, the roles ordered by `schedule`."""
    grad_out, *others = case.tensors(BF16).values()
    batch = Batch(*others, **case.options())
    with tritonemu.enabled(schedule=schedule, max_steps=50_000):
        out, saved = v4a.forward(batch, config=config)
        return out, *v4a.backward(grad_out, batch, saved, config=config)


@cache
def of_v4(case: Case) -> tuple[torch.Tensor, ...]:
    return results(v4, case.tensors(BF16), case.options())


@emulated
@pytest.mark.parametrize(
    "heads, heads_k, config, seed",
    [
        (*heads, config, (config.num_stages + heads[0]) % 2)
        for heads in ((2, 2), (3, 1))
        for config in configs(heads[0])
    ],
    ids=str,
)
def test_any_schedule_and_config_gives_the_bits_of_v4(heads, heads_k, config, seed):
    """Slots are used several times over, the last round has fewer units than there are roles.

    A configuration meets one seed with two heads, the other with three.
    """
    case = Case("orders", (130, 0, 300, 64, 1), heads, heads_k, rotary=True, rotate_v=True)
    for schedule in ("modelled", seed):
        assert_same_bits(scheduled(case, schedule, config), of_v4(case), schedule)


@emulated
@pytest.mark.parametrize("head_dim, heads_k", ((128, 2), (128, 1), (192, 2), (256, 2)))
def test_any_schedule_of_wide_heads(head_dim, heads_k):
    """Grouped heads, two math roles, or pieces leave sin and cos in shared memory here."""
    case = Case("orders", (130, 70), 2, heads_k, head_dim, rotary=True, rotate_v=True)
    expected = results(v4, case.tensors(BF16), case.options())
    two = v4a.Config(math_roles=2, registers=184, turn_registers=112)
    for config in (None, two) if head_dim == 128 else (None,):
        for schedule in (0, 1):
            options = (case, schedule, config)
            assert_same_bits(scheduled(*options), expected, options)


@settings(deadline=None, max_examples=8)
@given(data=st.data())
def test_random_batches_and_configs(data):
    group, heads_k = data.draw(st.sampled_from([(1, 1), (1, 2), (1, 3), (2, 1), (2, 2), (3, 1)]))
    case = Case(
        "random",
        tuple(data.draw(st.lists(st.integers(0, 300), min_size=1, max_size=5))),
        num_heads=group * heads_k,
        num_heads_k=heads_k,
        rotary=True,
        rotate_v=data.draw(st.booleans()),
    )
    heads = min(case.num_heads, 3)
    config = data.draw(st.sampled_from(configs(heads if case.num_heads % heads == 0 else 1)))
    if DEVICE == "cuda":
        check(v4a, case, BF16, config=config)
        return
    tensors, options = case.tensors(BF16), case.options()
    expected = results(v4, tensors, options)
    assert_same_bits(results(v4a, tensors, options, config=config), expected)


@pytest.mark.parametrize("heads_k", (1, 2))
def test_neighbours_do_not_leak(heads_k):
    """Other blocks hold NaN, infinities, large values: this one's results are bitwise equal."""
    case = Case("neighbours", (5, 70, 64, 3), 2, heads_k, rotary=True, rotate_v=True)
    tensors, options = case.tensors(BF16), case.options()
    before = results(v4a, tensors, options)
    for own, finite in NEIGHBOURS:
        changed = {
            name: tensor if name == "cu_seqlens" else poisoned(tensor, own, finite)
            for name, tensor in tensors.items()
        }
        turns = tuple(poisoned(turn, own, finite) for turn in options["rotary"])
        after = results(v4a, changed, options | {"rotary": turns})
        own_rows = [[x[BLOCKS[own]] for x in group] for group in (after, before)]
        assert_same_bits(*own_rows, note=(own, finite))


def test_results_are_written_whole(monkeypatch):
    """Memory is full of NaN before the call, and every element is finite after it."""
    empty = torch.Tensor.new_empty
    monkeypatch.setattr(
        torch.Tensor,
        "new_empty",
        lambda self, *shape, **options: empty(self, *shape, **options).fill_(float("nan")),
    )
    case = replace(CASES[0], rotary=True)
    for name, result in zip(NAMES, results(v4a, case.tensors(BF16), case.options()), strict=True):
        assert result.isfinite().all(), name


def test_loads_as_v4():
    assert v4a.load.src == v4.load.src


def test_needs_what_v4_needs():
    q, turns = torch.zeros(3, 2, 64, dtype=BF16), torch.zeros(3, 32)
    shifted = torch.zeros(3, 2, 72, dtype=BF16)[..., 1:65]
    calls = (
        (64, q, q, q, []),
        (64, q, q, q, [(turns, turns)]),
        (32, q, q, q, [(turns, turns)]),
        (64, q, shifted, q, [(turns, turns)]),
        (64, q, q, q, [(turns.double(), turns)]),
        (64, q, q, q, [(turns, turns[:1].expand(3, 32))]),
        (64, q.float(), q, q, [(turns, turns)]),
        (64, q[..., :48], q[..., :48], q[..., :48], [(turns, turns)]),
        (64, torch.zeros(3, 2, 256, dtype=BF16), *[torch.zeros(3, 1, 256, dtype=BF16)] * 2, []),
    )
    batches = [
        Batch(*tensors, None, 1.0, block_size, *rotary) for block_size, *tensors, rotary in calls
    ]
    found = [v4a.requires(batch) for batch in batches]
    assert found == [v4.requires(batch) for batch in batches]
    assert found.count(None) == 1


@pytest.mark.parametrize(
    "options, text",
    (
        ({"math_roles": 2, "num_stages": 1}, "num_stages must be .*; got num_stages 1"),
        ({"math_roles": 2, "num_turns": 3}, "num_turns must be .*; got num_turns 3"),
        ({"heads_together": 2}, "more slots than heads_together, 2, got 2: num_stages 2"),
        ({"registers": 232, "turn_registers": 256}, "must be at most 504, got 512"),
        ({"math_roles": 2}, "must be at most 512, got 744: turn_registers 240, math_roles 2"),
        ({"registers": 236}, "registers must be a multiple of 8, got 236"),
        ({"turn_registers": 100}, "turn_registers must be a multiple of 8, got 100"),
    ),
)
def test_refuses_launch_constants(options, text):
    with pytest.raises(ValueError, match=text):
        v4a.Config(**options)


# Rows for five units of one program: with two math roles the first has one more than the second.
SMALL = {
    heads: Case("mutants", (130, 0, 70), *heads, rotary=True, rotate_v=True)
    for heads in ((2, 2), (2, 1), (1, 1))
}
WIDE = replace(SMALL[2, 1], head_dim=128)
PIECES = replace(SMALL[1, 1], head_dim=192)
ONE, TWO = {}, {"math_roles": 2, "registers": 184, "turn_registers": 112}


def _launch(case: Case, direction: str, config: v4a.Config, module, schedule) -> None:
    """One direction of v4a or of a changed one: a wrong result is an AssertionError."""
    grad_out, *others = case.tensors(BF16).values()
    batch = Batch(*others, **case.options())
    out, *gradients = of_v4(case)
    with tritonemu.enabled(multiprocessors=1, schedule=schedule, max_steps=50_000):
        if direction == "forward":
            assert torch.equal(module.forward(batch, config=config)[0], out)
        else:
            found = module.backward(grad_out, batch, config=config)
            assert all(torch.equal(a, b) for a, b in zip(found, gradients, strict=True))


# Slots that are given back later, more than a unit has heads, and at once; one math role and two;
# heads of two pieces; backward also with sin and cos left in shared memory.
LAUNCHES = {
    "forward": (
        (SMALL[2, 2], {**TWO, "num_stages": 6}),
        (SMALL[2, 1], {**TWO, "num_stages": 2}),
        (SMALL[2, 2], {**ONE, "num_stages": 4}),
        (SMALL[2, 2], {**ONE, "num_stages": 4, "num_turns": 1}),
        (PIECES, {**ONE, "num_stages": 4, "num_turns": 1, "width": 64}),
    ),
    "backward": (
        (SMALL[2, 2], {**TWO, "num_stages": 4}),
        (SMALL[1, 1], {**TWO, "num_stages": 4}),
        (SMALL[2, 1], {**TWO, "num_stages": 2}),
        (SMALL[2, 2], {**ONE, "num_stages": 4, "num_turns": 1}),
        (SMALL[1, 1], {**ONE, "num_stages": 4}),
        (WIDE, {**ONE, "num_stages": 2}),
        (WIDE, {**ONE, "num_stages": 2, "num_turns": 1}),
        (PIECES, {**ONE, "num_stages": 4, "num_turns": 1, "width": 64}),
    ),
}
# Changes that do no harm.
HARMLESS = {
    "forward": [
        # what is turned has landed
        "math_forward: drop barrier_wait(tiles.full[stage], phase)",
        # O may leave through the slot of K, which S has read too
        "math_forward: tiles.q[stage] -> tiles.k (2)",
        # two blocks end one after the other; that the load role first waits for the later one
        "rotate_role: turns.empty[at] -> next (2)",
    ],
    "backward": [
        "ds[role] -> next",  # the roles trade their tiles
        "math_backward: drop barrier_wait(tiles.full[stage], phase)",
        # of grouped heads dV may leave through the slot of Q, dead since dK
        "math_backward: grad[stage] -> tiles.q (4)",
        # of grouped heads at head_dim 128: no room for slots that race
        "math_backward: turns.empty[at] -> next (2)",
    ],
}


@emulated
@pytest.mark.parametrize("direction", ("forward", "backward"))
def test_every_harmful_mistake_in_synchronisation_is_found(direction):
    calls = [
        partial(_launch, case, direction, v4a.Config(**config))
        for case, config in LAUNCHES[direction]
    ]
    tested, survivors = surviving(v4a, f"{direction}_kernel", calls)
    survivors = [mutant.what for mutant in survivors]
    assert tested > 40 and sorted(survivors) == HARMLESS[direction]


def built(module, direction: str, dtype=BF16, turns=FP32, heads_k=4, config=None, **case):
    """The kernel of one direction, compiled for sm_90a, for 4 heads on the CPU."""
    shape = Case("compiled", (64, 3), num_heads=4, num_heads_k=heads_k, rotary=True, **case)
    grad_out, *others = (t.cpu() for t in shape.tensors(dtype).values())
    options = shape.options()
    options["rotary"] = tuple(t.cpu().to(turns) for t in options["rotary"])
    batch = Batch(*others, **options)
    given = {"config": config, "schedule": (torch.zeros(3, 2, dtype=torch.int32),)}

    with launches(run=False) as seen:
        if direction == "forward":
            module.forward(batch, **given)
        else:
            module.backward(grad_out, batch, **given)
    (only,) = seen
    return build_launch(only)


SHARED_OF_A_PROGRAM = 227 * 1024
OPTIONS = (
    (BF16, FP32, {"head_dim": 64}),
    (BF16, FP32, {"head_dim": 128}),
    (FP16, FP32, {"head_dim": 128}),
    (FP16, FP32, {"head_dim": 64, "heads_k": 2}),
    (BF16, FP32, {"head_dim": 64, "heads_k": 2, "rotate_v": True}),
    (BF16, FP32, {"head_dim": 128, "heads_k": 2, "rotate_v": True}),
    (BF16, FP32, {"head_dim": 128, "rotate_v": True}),
    (FP16, BF16, {"head_dim": 128, "rotate_v": True}),
    (BF16, BF16, {"head_dim": 128, "rotate_v": True, "config": v4a.Config(1, 3, 1)}),
    (BF16, FP32, {"head_dim": 64, "rotate_v": True, "config": v4a.Config(2, 4, 2, 1, 184, 112)}),
    (BF16, FP32, {"head_dim": 96}),
    (BF16, BF16, {"head_dim": 96, "rotate_v": True}),
    (BF16, FP32, {"head_dim": 192, "rotate_v": True}),
    (BF16, FP32, {"head_dim": 256}),
    (BF16, FP32, {"head_dim": 256, "rotate_v": True}),
    (BF16, BF16, {"head_dim": 256, "rotate_v": True}),
)
# Bytes that backward spills where dk and dv of grouped heads are summed at head_dim 128.
SPILLS_OF_GROUPS = 344


@pytest.mark.parametrize("dtype, turns, case", OPTIONS, ids=str)
def test_hopper_code(dtype, turns, case):
    for direction in ("forward", "backward"):
        made = read(built(v4a, direction, dtype, turns, **case))
        groups = direction == "backward" and case.get("heads_k") == 2 and case["head_dim"] == 128
        assert made.spill_bytes <= (SPILLS_OF_GROUPS if groups else 0) and not made.serialised
        assert made.shared_bytes <= SHARED_OF_A_PROGRAM
        for instruction in ("HGMMA", "UTMALDG", "UTMASTG", "USETMAXREG"):
            assert made.instructions[instruction] > 0, instruction
        assert made.wide["LDG"] == made.wide["STG"] == 0


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


@pytest.mark.parametrize("direction, head_dim", INSTRUCTIONS)
def test_roles_share_the_instructions_of_v4(direction, head_dim):
    """Per item: sin and cos are not read, no gradient crosses shared memory, nothing is spilt."""

    def loops(module):
        case = {"heads_k": 4, "head_dim": head_dim, "rotate_v": True}
        return innermost_loops(
            disassemble(built(module, direction, BF16, BF16, **case).asm["cubin"])
        )

    math, turn, both = (
        min((loop for loop in loops(module) if is_it(loop)), key=len)
        for module, is_it in (
            (v4a, lambda loop: "HGMMA" in loop),
            (v4a, lambda loop: "HGMMA" not in loop and loop.count("FFMA") > 50),
            (v4, lambda loop: "HGMMA" in loop),
        )
    )
    most_of_math, most_of_turn = INSTRUCTIONS[direction, head_dim]
    assert len(math) <= most_of_math and len(turn) <= most_of_turn
    assert len(math) < 0.55 * len(both) and len(math) + len(turn) < len(both)
    assert math.count("LDS") == math.count("STS") == math.count("LDSM") == 0
    assert turn.count("LDS") == turn.count("STS") == 3 * head_dim // 16
    assert "LDL" not in math + turn and "STL" not in math + turn
