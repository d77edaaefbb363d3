"""v3_warp_specialized: against the definition, under several schedules, and as Hopper code."""

from __future__ import annotations

from functools import cache, partial
from pathlib import Path

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from gdpa_kernels import emulator
from gdpa_kernels.block_attention import v3_warp_specialized as v3
from gdpa_kernels.block_attention.block_list import BlockList
from tests.block_attention.cases import CASES, DEVICE, NAMES, Case, check, results
from tests.block_attention.compiling import Compiled, compile_launch, launches
from tests.block_attention.test_rungs import strided
from tests.emulator.mutants import enumerate_mutants, executed_lines, import_file, judge

DTYPES = (torch.bfloat16, torch.float16)
OWN_CASES = [
    *(
        case
        for case in CASES
        if case.block_size == 64 and case.head_dim in (64, 128) and not case.rotary
    ),
    Case("edges_128", (0, 1, 63, 64, 65, 130), head_dim=128),
    Case("grouped_128", (0, 1, 63, 64, 65, 130), num_heads=3, num_heads_k=1, head_dim=128),
    Case("one_block_of_one_head", (7,), num_heads=1, num_heads_k=1),
    Case("large_scores", (65, 40), scale=30.0),
]
CONFIGS = (
    {"math_roles": 1, "num_stages": 2},
    {"math_roles": 2, "num_stages": 3},
    {"math_roles": 3, "num_stages": 4, "registers": 160},
)
emulated = pytest.mark.skipif(DEVICE == "cuda", reason="is about the emulator")


@pytest.mark.parametrize(
    "case, dtype",
    [
        *((case, torch.bfloat16) for case in OWN_CASES),
        *((case, torch.float16) for case in (OWN_CASES[0], *OWN_CASES[-4:])),
    ],
    ids=str,
)
def test_matches_the_definition(case, dtype):
    check(v3, case, dtype)


def scheduled(case: Case, schedule: str | int, config: dict | None) -> tuple[torch.Tensor, ...]:
    """(out, dq, dk, dv), the roles ordered by `schedule`."""
    grad_out, *others = case.tensors(torch.bfloat16).values()
    more = {} if config is None else {"config": v3.Config(**config)}
    with emulator.enabled(schedule=schedule, max_steps=50_000):
        out, saved = v3.forward(*others, **case.options(), **more)
        return out, *v3.backward(grad_out, *others, saved, **case.options(), **more)


@emulated
@pytest.mark.parametrize("config", CONFIGS, ids=str)
@pytest.mark.parametrize("heads, heads_k", ((2, 2), (3, 1)))
def test_any_schedule_and_config_gives_the_same_result(heads, heads_k, config):
    """Slots are used several times over, the last round has fewer units than there are roles."""
    case = Case("orders", (130, 0, 300, 64, 1), num_heads=heads, num_heads_k=heads_k)
    expected = scheduled(case, "modelled", None)
    for schedule in ("modelled", 0, 1):
        for name, a, b in zip(NAMES, scheduled(case, schedule, config), expected, strict=True):
            assert torch.equal(a, b), (name, schedule)


def test_strided_arguments():
    def change(tensors):
        changed = strided(tensors)
        wide = torch.cat((tensors["q"], tensors["q"]), 2)[:, :, : tensors["q"].shape[2]]
        return changed | {"v": wide}

    check(v3, Case("strided", (65, 0, 40)), torch.bfloat16, change=change)


def test_expanded_gradient():
    """`out.sum().backward()` gives strides (0, 0, 0)."""

    def change(tensors):
        grad = tensors["grad_out"]
        return tensors | {"grad_out": grad[:1, :1, :1].expand_as(grad)}

    check(v3, Case("expanded", (65, 0, 40)), torch.bfloat16, change=change)


@pytest.mark.parametrize("heads_k", (2, 1))
def test_neighbours_do_not_leak(heads_k):
    """Other blocks hold NaN, or large values: this one's results are bitwise equal."""
    case = Case("neighbours", (5, 70, 64, 3), num_heads=2, num_heads_k=heads_k)
    tensors, options = case.tensors(torch.bfloat16), case.options()
    before = results(v3, tensors, options)
    for own in (slice(0, 5), slice(5, 69), slice(69, 75), slice(139, 142)):
        for poison in (float("nan"), -3e38):

            def poisoned(tensor, own=own, poison=poison):
                changed = torch.full_like(tensor, poison)
                changed[own] = tensor[own]
                return changed

            changed = {
                name: tensor if name == "cu_seqlens" else poisoned(tensor)
                for name, tensor in tensors.items()
            }
            after = results(v3, changed, options)
            for name, a, b in zip(NAMES, after, before, strict=True):
                assert torch.equal(a[own], b[own]), name


@pytest.mark.parametrize("name", ("q", "k", "v", "grad_out"))
def test_own_nan_stays_visible(name):
    """A NaN of the block's own reaches what depends on it, and nothing else."""
    tensors = (case := Case("nan", (6, 70))).tensors(torch.bfloat16)
    tensors[name][2, 0, 3] = float("nan")
    out, dq, dk, dv = results(v3, tensors, case.options())
    reached = {
        "q": (out[2, 0], dq[2, 0], dk[:6, 0], dv[:6, 0]),
        "k": (out[:6, 0], dq[:6, 0], dk[:6, 0], dv[:6, 0]),
        "v": (out[:6, 0, 3], dq[:6, 0], dk[:6, 0]),
        "grad_out": (dq[2, 0], dk[:6, 0], dv[:6, 0, 3]),
    }[name]
    assert all(part.isnan().all() for part in reached)
    for result in (out, dq, dk, dv):
        assert result[6:].isfinite().all() and result[:, 1].isfinite().all()


def test_one_token():
    """P is 1 whatever the score: out is v, dv is grad_out, dq and dk vanish."""
    tensors = (case := Case("one", (1,))).tensors(torch.bfloat16)
    out, dq, dk, dv = results(v3, tensors, case.options())
    assert torch.equal(out, tensors["v"]) and torch.equal(dv, tensors["grad_out"])
    assert not dq.any() and not dk.any()


def test_results_are_written_whole(monkeypatch):
    """Memory is full of NaN before the call, and every element is finite after it."""
    empty = torch.Tensor.new_empty
    monkeypatch.setattr(
        torch.Tensor,
        "new_empty",
        lambda self, *shape, **options: empty(self, *shape, **options).fill_(float("nan")),
    )
    case = CASES[0]
    for name, result in zip(
        NAMES, results(v3, case.tensors(torch.bfloat16), case.options()), strict=True
    ):
        assert result.isfinite().all(), name


@settings(deadline=None, max_examples=5)
@given(data=st.data())
def test_random_batches_and_options(data):
    group, heads_k = data.draw(st.sampled_from([(1, 1), (1, 2), (1, 3), (2, 1), (2, 2), (3, 1)]))
    case = Case(
        "random",
        tuple(data.draw(st.lists(st.integers(0, 140), min_size=1, max_size=4))),
        num_heads=group * heads_k,
        num_heads_k=heads_k,
        packed=data.draw(st.booleans()),
    )
    assume(max(case.seqlens) != 1)  # see test_one_token
    config = data.draw(st.sampled_from([None, *CONFIGS]))
    more = {} if config is None else {"config": v3.Config(**config)}
    check(v3, case, data.draw(st.sampled_from(DTYPES)), seed=data.draw(st.integers(0, 99)), **more)


@pytest.mark.parametrize(
    "change, text",
    [
        ({"block_size": 32}, "needs block_size 64, got 32"),
        ({"head_dim": 96}, "needs a head_dim of 64 or 128, got 96"),
        ({"dtype": torch.float32}, "needs dtype bfloat16 or float16, got float32"),
        ({"rotary": ()}, "needs rotary None, got (sin, cos)"),
        ({}, None),
    ],
    ids=str,
)
def test_says_what_it_needs(change, text):
    q = torch.zeros(3, 2, change.get("head_dim", 64), dtype=change.get("dtype", torch.bfloat16))
    assert v3.requires(change.get("block_size", 64), q, q, q, change.get("rotary")) == text


def test_says_which_tensor_it_cannot_read():
    q = torch.zeros(3, 2, 64, dtype=torch.bfloat16)
    shifted = torch.zeros(3, 2, 72, dtype=torch.bfloat16)[..., 1:65]
    assert v3.requires(64, q, shifted, q).startswith("needs k with contiguous rows")


def test_refuses_rotary_and_slots_that_do_not_suffice():
    case = Case("rotary", (5,), rotary=True)
    with pytest.raises(NotImplementedError, match="needs rotary None"):
        results(v3, case.tensors(torch.bfloat16), case.options())
    with pytest.raises(ValueError, match="num_stages must be more than math_roles, 3, got 3"):
        v3.Config(math_roles=3, num_stages=3)


SMALL = {heads_k: Case("mutants", (130, 0, 300, 5), num_heads_k=heads_k) for heads_k in (2, 1)}


@cache
def _expected(heads_k: int) -> tuple[torch.Tensor, ...]:
    return results(v3, SMALL[heads_k].tensors(torch.bfloat16), SMALL[heads_k].options())


def _launch(direction: str, heads_k: int, module, schedule: str | int) -> None:
    """One direction of a changed v3: a wrong result is an AssertionError."""
    options = SMALL[heads_k].options() | {"config": module.Config(math_roles=2, num_stages=3)}
    grad_out, *others = SMALL[heads_k].tensors(torch.bfloat16).values()
    out, *gradients = _expected(heads_k)
    with emulator.enabled(schedule=schedule, max_steps=50_000):
        if direction == "forward":
            assert torch.equal(module.forward(*others, **options)[0], out)
        else:
            found = module.backward(grad_out, *others, **options)
            assert all(torch.equal(a, b) for a, b in zip(found, gradients, strict=True))


# Changes that do no harm: another slot that is dead by then, and tiles that trade places.
HARMLESS = {
    "forward": {"q[stage] -> k"},
    "backward": {"grad[before] -> q", "p[role] -> next", "ds[role] -> next"},
}


@emulated
@pytest.mark.parametrize("direction", ("forward", "backward"))
def test_every_harmful_mistake_in_synchronisation_is_found(direction):
    path = Path(v3.__file__)
    calls = [partial(_launch, direction, heads_k) for heads_k in SMALL if _expected(heads_k)]
    executed = [executed_lines(path, partial(call, v3, "modelled")) for call in calls]
    survivors, tested = set(), 0
    for mutant in enumerate_mutants(path, f"{direction}_kernel"):
        lines = range(mutant.lines[0], mutant.lines[1] + 1)
        used = [
            call for call, seen in zip(calls, executed, strict=True) if not seen.isdisjoint(lines)
        ]
        tested += bool(used)
        if used and not judge(mutant, import_file, used).error:
            survivors.add(mutant.description.split(": ", 1)[1])
    assert tested > 30 and survivors == HARMLESS[direction]


def compiled(head_dim: int, dtype: torch.dtype, heads_k: int) -> dict[str, Compiled]:
    """Both kernels for 4 query heads."""
    case = Case("compiled", (64, 3), num_heads=4, num_heads_k=heads_k, head_dim=head_dim)
    grad_out, *others = (t.cpu() for t in case.tensors(dtype).values())
    options = case.options() | {"schedule": BlockList(torch.zeros(3, 2, dtype=torch.int32), 2)}

    def call():
        v3.forward(*others, **options)
        v3.backward(grad_out, *others, **options)

    return {
        kernel.__name__: compile_launch(kernel, args, options)
        for kernel, args, options in launches(v3, call)
    }


SMEM_OF_A_PROGRAM = 227 * 1024


@pytest.mark.parametrize(
    "head_dim, dtype, heads_k",
    [
        (64, torch.bfloat16, 4),
        (64, torch.float16, 2),
        (128, torch.bfloat16, 4),
        (128, torch.bfloat16, 2),
    ],
    ids=str,
)
def test_hopper_code(head_dim, dtype, heads_k):
    for name, made in compiled(head_dim, dtype, heads_k).items():
        assert made.spill_bytes == 0 and not made.serialised, name
        assert made.shared_bytes <= SMEM_OF_A_PROGRAM, name
        for instruction in ("HGMMA", "UTMALDG", "UTMASTG", "USETMAXREG"):
            assert made.instructions[instruction] > 0, (name, instruction)
        assert made.wide["LDG"] == made.wide["STG"] == 0, name
