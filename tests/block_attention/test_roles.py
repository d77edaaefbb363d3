"""v3 and v4, whose warps have roles: any configuration, any order of events, refusals."""

from __future__ import annotations

from dataclasses import replace
from functools import cache, partial
from unittest import mock

import pytest
import torch
import triton
import triton.language as tl
from hypothesis import given, settings
from hypothesis import strategies as st

import tritonemu
from gdpa_kernels.block_attention import slots
from gdpa_kernels.block_attention.batch import Batch
from gdpa_kernels.block_attention.kernels import v3_warp_specialized as v3
from gdpa_kernels.block_attention.kernels.v3_warp_specialized import Options
from gdpa_kernels.block_attention.ladder import v4_rotary as v4
from gdpa_kernels.block_attention.slots import slot_of
from gdpa_kernels.calling.launch import launch
from tests.block_attention.cases import (
    DEVICE,
    NAMES,
    Case,
    check,
    kernels_run,
    results,
    rotaries,
    suited,
)
from tests.emulator.mutants import surviving

RUNGS = {"v3_warp_specialized": v3, "v4_rotary": v4}
# (math_roles, num_stages, num_turns, whether the loads of all heads, at most three, are issued
# together); three math roles get 160 registers each, as an SM has them.
CONFIGS = (
    *((1, 1, 1, False), (1, 2, 1, False), (1, 2, 3, False), (1, 3, 2, False)),
    *((1, 4, 1, True), (1, 5, 2, True), (2, 6, 2, True)),
    *((2, 2, 2, False), (2, 4, 2, False), (2, 4, 4, False)),
    (3, 3, 3, False),
)
emulated = pytest.mark.skipif(DEVICE == "cuda", reason="is about the emulator")


def configured(module, heads: int, roles: int, stages: int, turns: int, together: bool):
    """A Config of v3, which has no turns, or of v4."""
    options = {
        "math_roles": roles, "num_stages": stages, "registers": 160 if roles == 3 else 240,
        "heads_together": heads if together else 1,
    }  # fmt: skip
    return module.Config(**options, **({} if module is v3 else {"num_turns": turns}))


def configs(rung: str, heads: int) -> list:
    fit = [c for c in CONFIGS if not c[3] or c[1] // c[0] > heads]
    if rung == "v4_rotary":
        fit = [c for c in fit if c[1] < 6]  # sin and cos leave no room for more
    return list(dict.fromkeys(configured(RUNGS[rung], heads, *config) for config in fit))


def scheduled(module, case: Case, schedule: str | int, config=None) -> tuple[torch.Tensor, ...]:
    """(out, dq, dk, dv), the roles ordered by `schedule`."""
    grad_out, *others = case.tensors(torch.bfloat16).values()
    batch = Batch(*others, **case.options())
    with tritonemu.enabled(schedule=schedule, max_steps=50_000):
        out, saved = module.forward(batch, config=config)
        return out, *module.backward(grad_out, batch, saved, config=config)


@cache
def in_modelled_order(rung: str, case: Case) -> tuple[torch.Tensor, ...]:
    """`scheduled`, of the rung's own configuration."""
    return scheduled(RUNGS[rung], case, "modelled")


@emulated
@pytest.mark.parametrize(
    "rung, heads, heads_k, config, seed",
    [
        (rung, heads, heads_k, config, (config.num_stages + heads) % 2)
        for rung in RUNGS
        for heads, heads_k in ((2, 2), (3, 1))
        for config in configs(rung, heads)
    ],
    ids=str,
)
def test_any_schedule_and_config_gives_the_same_result(heads, heads_k, rung, config, seed):
    """Slots are used several times over, the last round has fewer units than there are roles.

    A configuration meets one seed with two heads, the other with three.
    """
    case = Case("orders", (130, 0, 300, 64, 1), heads, heads_k, rotate_v=rung == "v4_rotary")
    case = suited(rung, case)
    expected = in_modelled_order(rung, case)
    for schedule in ("modelled", seed):
        found = scheduled(RUNGS[rung], case, schedule, config)
        for name, a, b in zip(NAMES, found, expected, strict=True):
            assert torch.equal(a, b), (name, schedule)


# (head_dim, width, math_roles, num_stages): two, three and four pieces, as many slots or one more.
PIECES = ((96, 64, 1, 3), (128, 64, 2, 4), (192, 64, 1, 4), (256, 64, 1, 4), (256, 128, 1, 2))


@emulated
@pytest.mark.parametrize("head_dim, width, roles, stages", PIECES)
@pytest.mark.parametrize("rung", RUNGS)
def test_any_schedule_of_pieces_gives_the_same_result(rung, head_dim, width, roles, stages):
    """A head that takes several slots: right, and the same whoever runs when."""
    module, rotate_v = RUNGS[rung], rung == "v4_rotary"
    case = suited(rung, Case("pieces", (130, 0, 65), head_dim=head_dim, rotate_v=rotate_v))
    config = configured(module, 2, roles, stages, roles, False)
    config = replace(config, width=width)
    check(module, case, torch.bfloat16, config=config)
    expected = scheduled(module, case, "modelled", config)
    for schedule in (0, 1):
        found = scheduled(module, case, schedule, config)
        for name, a, b in zip(NAMES, found, expected, strict=True):
            assert torch.equal(a, b), (name, schedule)


@settings(deadline=None, max_examples=8)
@given(data=st.data())
@pytest.mark.parametrize("rung", RUNGS)
def test_random_batches_and_configs(rung, data):
    group, heads_k = data.draw(st.sampled_from([(1, 1), (1, 2), (1, 3), (2, 1), (2, 2), (3, 1)]))
    case = Case(
        "random",
        tuple(data.draw(st.lists(st.integers(0, 300), min_size=1, max_size=5))),
        num_heads=group * heads_k,
        num_heads_k=heads_k,
        rotary=rotaries(rung)[0],
        rotate_v=rotaries(rung)[0] and data.draw(st.booleans()),
    )
    tensors, options = case.tensors(torch.bfloat16), case.options()
    expected = results(RUNGS[rung], tensors, options)
    heads = min(case.num_heads, 3)
    config = data.draw(st.sampled_from(configs(rung, heads if case.num_heads % heads == 0 else 1)))
    found = results(RUNGS[rung], tensors, options, config=config)
    for name, a, b in zip(NAMES, found, expected, strict=True):
        assert torch.equal(a, b), name


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


@pytest.mark.parametrize("units", range(6))
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
@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float16), ids=str)
@pytest.mark.parametrize("turned", (torch.bfloat16, torch.float16), ids=str)
def test_sin_and_cos_of_any_dtype(turned, dtype, head_dim):
    """Only their values count."""
    case = Case("turns", (65, 0, 130), head_dim=head_dim, rotary=True, rotate_v=True)
    tensors, options = case.tensors(dtype), case.options()
    narrow = tuple(t.to(turned) for t in options["rotary"])
    wide = tuple(t.float() for t in narrow)
    expected = results(v4, tensors, options | {"rotary": wide})
    found = results(v4, tensors, options | {"rotary": narrow})
    for name, a, b in zip(NAMES, found, expected, strict=True):
        assert torch.equal(a, b), name


def test_says_what_it_needs_of_rotary():
    q, turns = torch.zeros(3, 2, 64, dtype=torch.bfloat16), torch.zeros(3, 32)
    plain = Batch(q, q, q, None, 1.0)
    turned = replace(plain, rotary=(turns, turns))
    assert v3.requires(turned) == "needs rotary None, got (sin, cos)"
    assert v4.requires(plain) == "needs rotary (sin, cos), got None"

    def needs(sin, cos):
        return v4.requires(replace(plain, rotary=(sin, cos)))

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


@pytest.mark.parametrize(
    "module, options, text",
    (
        (v3, {"num_stages": 3}, "num_stages must be .*; got num_stages 3, math_roles 2"),
        (v4, {"num_stages": 1}, "num_stages must be .*; got num_stages 1, math_roles 2"),
        (v4, {"num_turns": 3}, "num_turns must be .*; got num_turns 3, math_roles 2"),
    ),
)
def test_refuses_slots_without_an_owner(module, options, text):
    with pytest.raises(ValueError, match=text):
        module.Config(math_roles=2, **options)


@pytest.mark.parametrize("module", (v3, v4))
def test_refuses_loads_that_wait_for_each_other(module):
    with pytest.raises(ValueError, match=r"more slots than heads_together, 2, got 2: num_stages 2"):
        module.Config(num_stages=2, heads_together=2)
    with pytest.raises(ValueError, match=r"heads_together, 2, got 2: num_stages 4, math_roles 2"):
        module.Config(math_roles=2, num_stages=4, heads_together=2)
    case = Case("refused", (5,), num_heads=3, num_heads_k=3, rotary=module is v4)
    grad_out, *others = case.tensors(torch.bfloat16).values()
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
        _, *others = case.tensors(torch.bfloat16).values()
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


# Rows for five units of one program: the first role has one more than the second.
SMALL = {
    (module, heads_k, head_dim): Case(
        "mutants", (130, 0, 70), 2, heads_k, head_dim, rotary=module is v4, rotate_v=module is v4
    )
    for module in (v3, v4)
    for heads_k, head_dim in ((2, 64), (1, 64), (2, 128))
}


def _config(rung, stages: int):
    return rung.Config(math_roles=2, num_stages=stages, width=64)


@cache
def _expected(rung, heads_k: int, head_dim: int) -> tuple[torch.Tensor, ...]:
    case = SMALL[rung, heads_k, head_dim]
    return results(rung, case.tensors(torch.bfloat16), case.options(), config=_config(rung, 4))


def _launch(case: Case, direction: str, stages: int, expected, module, schedule) -> None:
    """One direction of v3 or v4, or of a changed one: a wrong result is an AssertionError."""
    rung = v4 if case.rotary else v3
    grad_out, *others = case.tensors(torch.bfloat16).values()
    batch, config = Batch(*others, **case.options()), _config(rung, stages)
    out, *gradients = expected
    with tritonemu.enabled(multiprocessors=1, schedule=schedule, max_steps=50_000):
        if direction == "forward":
            assert torch.equal(module.forward(batch, config=config)[0], out)
        else:
            found = module.backward(grad_out, batch, config=config)
            assert all(torch.equal(a, b) for a, b in zip(found, gradients, strict=True))


# (heads_k, head_dim, num_stages): slots that are given back later, more than a unit has heads, and
# at once; heads of two pieces.
LAUNCHES = {
    "forward": ((2, 64, 6), (1, 64, 2), (2, 128, 4)),
    "backward": ((2, 64, 4), (1, 64, 2), (2, 128, 4)),
}
# Changes that do no harm, in both rungs.
HARMLESS = {
    # O may leave through the slot of K, which S has read too
    "forward": ["math_forward: tiles.q[stage] -> tiles.k (2)"],
    "backward": [
        "ds[role] -> next",  # the roles trade their tiles
        # of grouped heads dV may leave through the slot of Q, dead since dK
        "math_backward: grad[stage] -> tiles.q (4)",
    ],
}


@emulated
@pytest.mark.parametrize("direction", ("forward", "backward"))
@pytest.mark.parametrize("rung", RUNGS)
def test_every_harmful_mistake_in_synchronisation_is_found(rung, direction):
    module = RUNGS[rung]
    calls = [
        partial(_launch, SMALL[(module, *shape)], direction, stages, _expected(module, *shape))
        for *shape, stages in LAUNCHES[direction]
    ]
    tested, survivors = surviving(module, f"{direction}_kernel", calls)
    survivors = [mutant.what for mutant in survivors]
    assert tested > 30 and sorted(survivors) == HARMLESS[direction]


@emulated
@pytest.mark.parametrize("direction", ("forward", "backward"))
@pytest.mark.parametrize(
    "rung, shared, count",
    [*((rung, "release", 5) for rung in RUNGS), ("v4_rotary", "load", 10)],
)
def test_every_mistake_in_what_rungs_share_is_found(rung, shared, count, direction):
    """`release` gives a slot back; v4 and v4a have one `load`."""
    module = RUNGS[rung]

    def call(heads_k, head_dim, stages, changed, schedule):
        shape = heads_k, head_dim
        case, expected = SMALL[(module, *shape)], _expected(module, *shape)
        with mock.patch.object(module, shared, getattr(changed, shared)):
            _launch(case, direction, stages, expected, module, schedule)

    calls = [partial(call, *options) for options in LAUNCHES[direction]]
    tested, survivors = surviving(slots, shared, calls)
    assert tested == count and survivors == []
