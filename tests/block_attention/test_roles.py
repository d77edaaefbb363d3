"""v3, v4 and v4a, whose warps have roles: any configuration, any order of events, mistakes,
refusals."""

import itertools
from collections.abc import Iterator
from dataclasses import replace
from functools import cache, partial
from unittest import mock

import pytest
import torch
import triton
import triton.language as tl
from hypothesis import given
from hypothesis import strategies as st

import tritonemu
from emulator.tests.judging import SAMPLED, surviving
from gdpa_kernels.block_attention import slots
from gdpa_kernels.block_attention.batch import Batch
from gdpa_kernels.block_attention.kernels import b1_warp_specialized as b1
from gdpa_kernels.block_attention.kernels import v3_warp_specialized as v3
from gdpa_kernels.block_attention.kernels import v4a_turning_role as v4a
from gdpa_kernels.block_attention.kernels.v3_warp_specialized import Options
from gdpa_kernels.block_attention.ladder import v4_rotary as v4
from gdpa_kernels.block_attention.slots import slot_of
from gdpa_kernels.calling.launch import launch
from tests.block_attention.cases import DEVICE, Case, check, kernels_run, results, suited
from tests.calls import assert_same_bits
from tests.tiers import examples, sweep, swept

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
RUNGS = {"v3_warp_specialized": v3, "v4_rotary": v4, "v4a_turning_role": v4a}
# (math_roles, num_stages, num_turns, whether the loads of all heads, at most three, are issued
# together).
CONFIGS = (
    *((1, 1, 1, False), (1, 2, 1, False), (1, 2, 3, False), (1, 3, 2, False)),
    *((1, 4, 1, True), (1, 5, 2, True), (2, 6, 2, True)),
    *((2, 2, 2, False), (2, 4, 2, False), (2, 4, 4, False)),
    (3, 3, 3, False),
)
# Of a math role and of the turn role in v4a, by how many math roles there are.
REGISTERS = {1: (240, 240), 2: (184, 112), 3: (120, 96)}
emulated = pytest.mark.skipif(DEVICE == "cuda", reason="is about the emulator")
every = pytest.mark.parametrize("rung", RUNGS)


def configured(module, roles: int, stages: int, turns: int = 1, **options):
    """A Config of v3, which has no turns, of v4, or of v4a, which has another role."""
    options |= {"math_roles": roles, "num_stages": stages}
    options |= {} if module is v3 else {"num_turns": turns}
    if module is v4a:
        options["registers"], options["turn_registers"] = REGISTERS[roles]
    else:
        options["registers"] = 160 if roles == 3 else 240
    return module.Config(**options)


def configs(rung: str, heads: int) -> list:
    fit = [c for c in CONFIGS if not c[3] or c[1] // c[0] > heads]
    if rung != "v3_warp_specialized":
        fit = [c for c in fit if c[1] < 6]  # sin and cos leave no room for more
    made = (
        configured(RUNGS[rung], *config, heads_together=heads if together else 1)
        for *config, together in fit
    )
    return list(dict.fromkeys(made))


def scheduled(module, case: Case, schedule: str | int, config=None) -> tuple[torch.Tensor, ...]:
    """(out, dq, dk, dv), the roles ordered by `schedule`."""
    grad_out, *others = case.tensors(BF16).values()
    batch = Batch(*others, **case.options())
    with tritonemu.enabled(schedule=schedule, max_steps=50_000):
        out, saved = module.forward(batch, config=config)
        return out, *module.backward(grad_out, batch, saved, config=config)


@cache
def expected_of(rung: str, case: Case, config=None) -> tuple[torch.Tensor, ...]:
    """`scheduled` as modelled, in four slots where there is a configuration; of v4a those of v4."""
    if rung == "v4a_turning_role":
        rung, config = "v4_rotary", None
    config = config and replace(config, num_stages=4)
    return scheduled(RUNGS[rung], case, "modelled", config)


def scheduled_configs() -> Iterator:
    """(rung, heads, heads_k, config, seed); the quick tier has the first and last config of a rung
    with grouped heads."""
    for rung, (heads, heads_k) in itertools.product(RUNGS, ((2, 2), (3, 1))):
        first, *others, last = configs(rung, heads)
        for config in (first, *others, last):
            quick = heads_k == 1 and config in (first, last)
            marks = () if quick else pytest.mark.sweep
            seed = (config.num_stages + heads) % 2
            yield pytest.param(rung, heads, heads_k, config, seed, marks=marks)


@emulated
@pytest.mark.parametrize("rung, heads, heads_k, config, seed", [*scheduled_configs()], ids=str)
def test_any_schedule_and_config_gives_the_same_bits(heads, heads_k, rung, config, seed):
    """Slots are used several times over, the last round has fewer units than there are roles.

    A configuration meets one seed with two heads, the other with three.
    """
    case = Case("orders", (130, 0, 300, 64, 1), heads, heads_k, rotate_v=RUNGS[rung] is not v3)
    case = suited(rung, case)
    found = scheduled(RUNGS[rung], case, seed, config)
    assert_same_bits(found, expected_of(rung, case))


# (head_dim, width, math_roles, num_stages): two, three and four pieces, as many slots or one more.
PIECES = ((96, 64, 1, 3), (128, 64, 2, 4), (192, 64, 1, 4), (256, 64, 1, 4), (256, 128, 1, 2))


@emulated
@pytest.mark.parametrize("head_dim, width, roles, stages", swept(PIECES, PIECES[1:2]))
@pytest.mark.parametrize("rung", ("v3_warp_specialized", "v4_rotary"))
def test_any_schedule_of_pieces_gives_the_same_result(rung, head_dim, width, roles, stages):
    """A head that takes several slots: right, and the same whoever runs when."""
    module, rotate_v = RUNGS[rung], rung == "v4_rotary"
    case = suited(rung, Case("pieces", (130, 0, 65), head_dim=head_dim, rotate_v=rotate_v))
    config = configured(module, roles, stages, roles, width=width)
    check(module, case, BF16, config=config)
    expected = scheduled(module, case, "modelled", config)
    for schedule in (0, 1):
        assert_same_bits(scheduled(module, case, schedule, config), expected, schedule)


@emulated
@pytest.mark.parametrize(
    "head_dim, heads_k", (sweep(128, 2), (128, 1), sweep(192, 2), sweep(256, 2))
)
def test_any_schedule_of_wide_heads(head_dim, heads_k):
    """Grouped heads, two math roles, or pieces leave sin and cos in shared memory in v4a."""
    case = Case("orders", (130, 70), 2, heads_k, head_dim, rotary=True, rotate_v=True)
    expected = results(v4, case.tensors(BF16), case.options())
    for config in (None, configured(v4a, 2, 2, 2)) if head_dim == 128 else (None,):
        for schedule in (0, 1):
            assert_same_bits(scheduled(v4a, case, schedule, config), expected, (config, schedule))


@examples(8)
@given(data=st.data())
@every
def test_random_batches_and_configs(rung, data):
    group, heads_k = data.draw(st.sampled_from([(1, 1), (1, 2), (1, 3), (2, 1), (2, 2), (3, 1)]))
    turned = rung != "v3_warp_specialized"
    case = Case(
        "random",
        tuple(data.draw(st.lists(st.integers(0, 300), min_size=1, max_size=5))),
        num_heads=group * heads_k,
        num_heads_k=heads_k,
        rotary=turned,
        rotate_v=turned and data.draw(st.booleans()),
    )
    heads = min(case.num_heads, 3)
    config = data.draw(st.sampled_from(configs(rung, heads if case.num_heads % heads == 0 else 1)))
    if DEVICE == "cuda" and rung == "v4a_turning_role":
        check(v4a, case, BF16, config=config)  # its bits are not v4's
        return
    tensors, options = case.tensors(BF16), case.options()
    expected = results(v4 if turned else v3, tensors, options)
    assert_same_bits(results(RUNGS[rung], tensors, options, config=config), expected)


@triton.jit
def deal_kernel(
    out_ptr, units,
    NUM_HEADS: tl.constexpr, PIECES: tl.constexpr, MATH_ROLES: tl.constexpr,
    NUM_STAGES: tl.constexpr,
):  # fmt: skip
    """(unit, part, stage, phase) of every load, in the order of the load roles."""
    options = Options(NUM_HEADS, 1, MATH_ROLES, NUM_STAGES, 1, PIECES)
    item = 0
    for first in tl.range(0, units, MATH_ROLES):
        for part in tl.range(0, NUM_HEADS * PIECES):
            for unit in tl.range(first, tl.minimum(first + MATH_ROLES, units)):
                stage, phase = slot_of(unit, part, options, PIECES)
                tl.store(out_ptr + item * 4, unit)
                tl.store(out_ptr + item * 4 + 1, part)
                tl.store(out_ptr + item * 4 + 2, stage)
                tl.store(out_ptr + item * 4 + 3, phase)
                item += 1


@pytest.mark.parametrize("units", (0, 5, *map(sweep, range(1, 5))))
@pytest.mark.parametrize("roles, stages", ((1, 3), (2, 2), (2, 6), (3, 6)))
@pytest.mark.parametrize("heads, pieces", ((3, 1), (2, 2)))
def test_a_slot_belongs_to_one_role(heads, pieces, roles, stages, units):
    """Also at the end, when roles have no units left: a load may land late, and a role that took
    over its slot would take the load before for its own."""
    parts = heads * pieces
    loads = torch.full((units * parts, 4), -1, dtype=torch.int32, device=DEVICE)
    with kernels_run():
        launch(
            deal_kernel, (1,), loads.device, loads, units,
            NUM_HEADS=heads, PIECES=pieces, MATH_ROLES=roles, NUM_STAGES=stages, num_warps=4,
        )  # fmt: skip
    fills, own = [0] * stages, [[] for _ in range(roles)]
    for unit, part, stage, phase in loads.tolist():
        assert stage % roles == unit % roles
        assert phase == fills[stage] % 2
        fills[stage] += 1
        own[unit % roles].append((unit, part))
    for role, dealt in enumerate(own):
        assert dealt == [
            (unit, part) for unit in range(role, units, roles) for part in range(parts)
        ]


@pytest.mark.parametrize("head_dim", (64, 128))
@pytest.mark.parametrize("dtype", (BF16, FP16), ids=str)
@pytest.mark.parametrize("turned", (BF16, FP16), ids=str)
def test_sin_and_cos_of_any_dtype(turned, dtype, head_dim):
    """Only their values count."""
    case = Case("turns", (65, 0, 130), head_dim=head_dim, rotary=True, rotate_v=True)
    tensors, options = case.tensors(dtype), case.options()
    narrow = tuple(t.to(turned) for t in options["rotary"])
    wide = tuple(t.float() for t in narrow)
    expected = results(v4, tensors, options | {"rotary": wide})
    assert_same_bits(results(v4, tensors, options | {"rotary": narrow}), expected)


@emulated  # on a GPU the compiler decides in each kernel which products and sums it fuses
@pytest.mark.parametrize(
    "dtype, turns", ((BF16, FP32), sweep(BF16, FP16), sweep(FP16, BF16)), ids=str
)
@pytest.mark.parametrize(
    "head_dim, heads_k",
    (
        *((64, 1), (128, 2), sweep(64, 2), sweep(96, 2), sweep(96, 1), sweep(128, 1)),
        *(sweep(192, 2), sweep(256, 2)),
    ),
)
def test_same_bits_as_v4(head_dim, heads_k, dtype, turns):
    """Whatever the dtype of sin and cos: one rounding, in the same place."""
    for rotate_v in (False, True):
        case = Case("bits", (65, 0, 40), 2, heads_k, head_dim, rotary=True, rotate_v=rotate_v)
        tensors, options = case.tensors(dtype), case.options()
        options["rotary"] = tuple(t.to(turns) for t in options["rotary"])
        expected = results(v4, tensors, options)
        assert_same_bits(results(v4a, tensors, options), expected, rotate_v)


@pytest.mark.parametrize("module", (v4, v4a, b1))
def test_says_what_it_needs_of_sin_and_cos(module):
    q, turns = torch.zeros(3, 2, 64, dtype=BF16), torch.zeros(3, 32)

    def needs(*rotary):
        return module.call_problem(Batch(q, q, q, None, 1.0, rotary=rotary))

    halves = torch.zeros(3, 64).split(32, dim=1)
    assert needs(turns, turns) is needs(*halves) is needs(*(t.half() for t in halves)) is None
    of_dtype = "of dtype float32, bfloat16 or float16, got float64"
    assert needs(turns.double(), turns) == f"needs sin {of_dtype}"
    assert needs(turns, turns.double()) == f"needs cos {of_dtype}"
    unreadable = "with contiguous rows whose address and stride are multiples of 16 bytes, got"
    assert needs(turns, turns[:1].expand(3, 32)) == f"needs cos {unreadable} strides (0, 1)"
    assert needs(turns.mT.contiguous().mT, turns) == f"needs sin {unreadable} strides (1, 3)"
    assert needs(torch.zeros(3, 33)[:, 1:], turns) == f"needs sin {unreadable} strides (33, 1)"
    shifted = torch.zeros(3, 36)[:, 1:33]
    assert needs(turns, shifted) == f"needs cos {unreadable} strides (36, 1)"


def test_says_whether_it_needs_rotary():
    q, turns = torch.zeros(3, 2, 64, dtype=BF16), torch.zeros(3, 32)
    plain = Batch(q, q, q, None, 1.0)
    turned = replace(plain, rotary=(turns, turns))
    assert v3.call_problem(turned) == "needs rotary None, got (sin, cos)"
    assert v4.call_problem(plain) == v4a.call_problem(plain) == "needs rotary (sin, cos), got None"
    assert b1.call_problem(plain) is b1.call_problem(turned) is None


def test_loads_as_v4():
    assert v4a.load.src == v4.load.src


OF_TWO = {"math_roles": 2}
REFUSED = (
    (v3, {**OF_TWO, "num_stages": 3}, "num_stages must be .*; got num_stages 3, math_roles 2"),
    *((module, OF_TWO | {name: got}, f"{name} must be .*; got {name} {got}, math_roles 2")
      for module in (v4, v4a)
      for name, got in (("num_stages", 1), ("num_turns", 3))),
    *((module, {**options, "heads_together": 2}, f"more slots than heads_together, 2, got 2: {got}")
      for module in RUNGS.values()
      for options, got in (({"num_stages": 2}, "num_stages 2"),
                           ({**OF_TWO, "num_stages": 4}, "num_stages 4, math_roles 2"))),
    (v4a, {"registers": 232, "turn_registers": 256}, "must be at most 504, got 512"),
    (v4a, OF_TWO, "must be at most 512, got 744: turn_registers 240, math_roles 2"),
    (v4a, {"registers": 236}, "registers must be a multiple of 8, got 236"),
    (v4a, {"turn_registers": 100}, "turn_registers must be a multiple of 8, got 100"),
)  # fmt: skip


@pytest.mark.parametrize("module, options, text", REFUSED)
def test_refuses_launch_constants(module, options, text):
    """Slots without an owner, loads that wait for each other, too many registers."""
    with pytest.raises(ValueError, match=text):
        module.Config(**options)


@pytest.mark.parametrize("module", (v3, v4))
def test_refuses_heads_that_do_not_divide(module):
    case = Case("refused", (5,), num_heads=3, num_heads_k=3, rotary=module is v4)
    grad_out, *others = case.tensors(BF16).values()
    batch, config = Batch(*others, **case.options()), module.Config(num_stages=3, heads_together=2)
    text = "heads_together must divide the number of query heads, 3, got 2"
    with kernels_run():
        with pytest.raises(ValueError, match=text):
            module.forward(batch, config=config)
        with pytest.raises(ValueError, match=text):
            module.backward(grad_out, batch, config=config)


@pytest.mark.parametrize("module", (v3, v4))
def test_refuses_pieces_that_wait_for_each_other(module):
    def run(heads_k=2, **config):
        case = Case("refused", (5,), 2, heads_k, 128, rotary=module is v4)
        _, *others = case.tensors(BF16).values()
        with kernels_run():
            module.forward(Batch(*others, **case.options()), config=module.Config(**config))

    text = "of 2 pieces must have .*; got {} slots, heads_together {}, {} query heads for a key"
    for heads_k, config, got in (
        (2, {"num_stages": 1}, (1, 1, 1)),
        (2, {"math_roles": 2, "num_stages": 2}, (1, 1, 1)),
        (2, {"num_stages": 4, "heads_together": 2}, (4, 2, 1)),
        (1, {"num_stages": 3}, (3, 1, 2)),
    ):
        with pytest.raises(ValueError, match=text.format(*got)):
            run(heads_k, width=64, **config)
    with pytest.raises(ValueError, match="width must be 64 or 128, got 32"):
        run(width=32)


# Rows for five units of one program: with two math roles the first has one more than the second.
def small(heads: int = 2, heads_k: int = 2, head_dim: int = 64, turned: bool = True) -> Case:
    return Case("mutants", (130, 0, 70), heads, heads_k, head_dim, rotary=turned, rotate_v=turned)


def of_two(module, heads_k: int, head_dim: int, stages: int) -> tuple:
    config = module.Config(math_roles=2, num_stages=stages, width=64)
    return small(2, heads_k, head_dim, module is not v3), config


# By rung and direction. Slots that are given back later, more than a unit has heads, and at once;
# one math role and two; heads of two pieces; backward also with sin and cos left in shared memory.
LAUNCHES = {
    **{
        (rung, direction): [of_two(RUNGS[rung], *shape) for shape in shapes]
        for rung in ("v3_warp_specialized", "v4_rotary")
        for direction, shapes in (
            ("forward", ((2, 64, 6), (1, 64, 2), (2, 128, 4))),
            ("backward", ((2, 64, 4), (1, 64, 2), (2, 128, 4))),
        )
    },
    ("v4a_turning_role", "forward"): [
        (small(), configured(v4a, 2, 6, 2)),
        (small(2, 1), configured(v4a, 2, 2, 2)),
        (small(), configured(v4a, 1, 4, 2)),
        (small(), configured(v4a, 1, 4, 1)),
        (small(1, 1, 192), configured(v4a, 1, 4, 1, width=64)),
    ],
    ("v4a_turning_role", "backward"): [
        (small(), configured(v4a, 2, 4, 2)),
        (small(1, 1), configured(v4a, 2, 4, 2)),
        (small(2, 1), configured(v4a, 2, 2, 2)),
        (small(), configured(v4a, 1, 4, 1)),
        (small(1, 1), configured(v4a, 1, 4, 2)),
        (small(2, 1, 128), configured(v4a, 1, 2, 2)),
        (small(2, 1, 128), configured(v4a, 1, 2, 1)),
        (small(1, 1, 192), configured(v4a, 1, 4, 1, width=64)),
    ],
}
# Changes that do no harm, in all of them and in v4a.
HARMLESS = {
    "forward": [
        # O may leave through the slot of K, which S has read too
        "math_forward: tiles.q[stage] -> tiles.k (2)",
    ],
    "backward": [
        "ds[role] -> next",  # the roles trade their tiles
        # of grouped heads dV may leave through the slot of Q, dead since dK
        "math_backward: grad[stage] -> tiles.q (4)",
    ],
}
HARMLESS_IN_V4A = {
    "forward": [
        # what is turned has landed
        "math_forward: drop barrier_wait(tiles.full[stage], phase)",
        # two blocks end one after the other; that the load role first waits for the later one
        "rotate_role: sin_cos.empty[slot] -> next (2)",
    ],
    "backward": [
        "math_backward: drop barrier_wait(tiles.full[stage], phase)",
        # of grouped heads at head_dim 128: no room for slots that race
        "math_backward: sin_cos.empty[slot] -> next (2)",
    ],
}


def _launch(rung: str, direction: str, case: Case, config, module, schedule) -> None:
    """One direction of a rung or of a changed one: a wrong result is an AssertionError."""
    grad_out, *others = case.tensors(BF16).values()
    batch = Batch(*others, **case.options())
    out, *gradients = expected_of(rung, case, config)
    with tritonemu.enabled(multiprocessors=1, schedule=schedule, max_steps=50_000):
        if direction == "forward":
            assert torch.equal(module.forward(batch, config=config)[0], out)
        else:
            assert_same_bits(module.backward(grad_out, batch, config=config), gradients)


@emulated
@SAMPLED
@pytest.mark.parametrize("rung, direction", LAUNCHES)
def test_every_harmful_mistake_in_synchronisation_is_found(rung, direction, every):
    launches = LAUNCHES[rung, direction]
    for each in launches:
        expected_of(rung, *each)  # it executes lines of both directions
    calls = [partial(_launch, rung, direction, *each) for each in launches]
    judged = surviving(RUNGS[rung], f"{direction}_kernel", calls, every)
    of_v4a = rung == "v4a_turning_role"
    harmless = HARMLESS[direction] + (HARMLESS_IN_V4A[direction] if of_v4a else [])
    assert judged.executed > (40 if of_v4a else 30)
    assert judged.survivors == judged.known(harmless)


@emulated
@pytest.mark.sweep
@pytest.mark.parametrize(
    "rung, direction, shared, count",
    [
        *((*key, "release", 5) for key in LAUNCHES if key[0] != "v4a_turning_role"),
        *(("v4_rotary", direction, "load", 10) for direction in ("forward", "backward")),
    ],
)
def test_every_mistake_in_what_rungs_share_is_found(rung, direction, shared, count):
    """`release` gives a slot back; v4 and v4a have one `load`."""
    module = RUNGS[rung]

    def call(case, config, changed, schedule):
        with mock.patch.object(module, shared, getattr(changed, shared)):
            _launch(rung, direction, case, config, module, schedule)

    calls = [partial(call, *launch) for launch in LAUNCHES[rung, direction]]
    judged = surviving(slots, shared, calls)
    assert judged.executed == count and judged.survivors == []
