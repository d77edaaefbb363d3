"""Every rung against the definition: on the GPU if there is one, else in the emulator."""

import dataclasses

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from gdpa_kernels.block_attention.batch import Batch
from gdpa_kernels.block_attention.kernels import v1_one_tile
from gdpa_kernels.block_attention.ladder import v2_slab
from gdpa_kernels.calling import ladder
from notebooks.block import _eliminations
from tests.block_attention.cases import (
    BLACKWELL,
    BLOCKS,
    CASES,
    NAMES,
    NEIGHBOURS,
    RUNGS,
    Case,
    check,
    kernels_run,
    poisoned,
    results,
    rotaries,
    suited,
    supports,
)
from tests.calls import GRADIENTS, assert_same_bits, full_of_nan, readable, unreadable
from tests.tiers import examples, sweep, swept

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
# All cases are tested in bf16. In other dtypes those with scores that matter to their range and
# precision, each option, and each block size and head_dim with some of the other.
OTHER_DTYPES = {
    *("edges", "one_kv_head", "rotary", "rotary_v", "head_dim_48_rotary", "large_scores"),
    *("negative_scale", "packed_qkv", "grouped_128", "no_tokens", "one_and_two_tokens"),
    *("block_16_head_dim_128", "block_32_head_dim_64", "block_128_head_dim_16", "head_dim_256"),
    *("rotary_v_96", "rotary_256"),
}
# In bf16, the quick tier has these.
QUICK = {
    *("edges", "no_tokens", "one_and_two_tokens", "one_kv_head", "packed_qkv", "rotary_v"),
    *("head_dim_128", "grouped_128", "rotary_256", "block_16_head_dim_128"),
}
ROLES = ("v3_warp_specialized", "v4_rotary", "v4a_turning_role")
every = pytest.mark.parametrize("rung", RUNGS)
LESSONS = [rung for rung in RUNGS if ladder.rung(rung, "block_attention").is_lesson]
PRODUCTS = [rung for rung in RUNGS if rung not in LESSONS]
products = pytest.mark.parametrize("rung", swept(RUNGS, PRODUCTS))
"""Every rung: lessons in the sweeps alone."""
BY_TMA = ("v2_slab", *ROLES, *BLACKWELL)


@pytest.mark.parametrize(
    "rung, case, dtype",
    swept(
        (
            (rung, case, dtype)
            for rung in RUNGS
            for case in dict.fromkeys(suited(rung, case) for case in CASES)
            for dtype in (BF16, FP16, FP32)
            if (dtype == BF16 or case.name in OTHER_DTYPES) and supports(rung, case, dtype)
        ),
        lambda rung, case, dtype: dtype == BF16 and case.name in QUICK,
    ),
    ids=str,
)
def test_matches_the_definition(rung, case, dtype):
    check(RUNGS[rung], case, dtype)


def turns_of(rung: str, tokens: int, pairs: int) -> tuple[torch.Tensor, torch.Tensor] | None:
    """sin and cos where a rung needs them, else None."""
    return (torch.zeros(tokens, pairs), torch.ones(tokens, pairs)) if rotaries(rung)[0] else None


@pytest.mark.parametrize(
    "change, text",
    [
        ({}, None),
        ({"block_size": 32}, "needs block_size 64, got 32"),
        ({"head_dim": 48}, "needs a head_dim of 64 {}, got 48"),
        ({"dtype": FP32}, "needs dtype bfloat16 or float16, got float32"),
    ],
    ids=str,
)
@pytest.mark.parametrize("rung", BY_TMA)
def test_says_what_it_needs(rung, change, text):
    block_size, head_dim = change.get("block_size", 64), change.get("head_dim", 64)
    q = torch.zeros(3, 2, head_dim, dtype=change.get("dtype", BF16))
    turns = turns_of(rung, 3, head_dim // 2)
    text = text and text.format("to 256, a multiple of 8" if rung in ROLES else "or 128")
    batch = Batch(q, q, q, None, 1.0, block_size, turns)
    assert ladder.rung(rung, "block_attention").call_problem(batch) == text


@pytest.mark.parametrize(
    "rung, head_dim, text",
    [
        ("v2_slab", 64, "needs as many key heads as query heads, got 2 query heads for one"),
        *((rung, 256, "got 2 query heads for one at head_dim 256") for rung in ROLES),
    ],
)
def test_says_which_groups_it_does_not_take(rung, head_dim, text):
    """Two pieces of dK and dV, summed over the members of a group, are more registers than a
    thread has."""
    q, turns = torch.zeros(3, 2, head_dim, dtype=BF16), turns_of(rung, 3, head_dim // 2)
    found = RUNGS[rung].call_problem(Batch(q, q[:, :1], q[:, :1], None, 1.0, 64, turns))
    assert found.endswith(text)
    assert RUNGS[rung].call_problem(Batch(q, q, q, None, 1.0, 64, turns)) is None


@pytest.mark.parametrize("rung", BY_TMA)
def test_says_which_tensor_it_cannot_read(rung):
    q, turns = torch.zeros(3, 2, 64, dtype=BF16), turns_of(rung, 3, 32)
    shifted = torch.zeros(3, 2, 72, dtype=BF16)[..., 1:65]
    crossed = torch.zeros(3, 64, 2, dtype=BF16).transpose(1, 2)

    def needs(k, v):
        batch = Batch(q, k, v, None, 1.0, 64, turns)
        return ladder.rung(rung, "block_attention").call_problem(batch)

    assert needs(shifted, q).startswith("needs k at a multiple of 16 bytes")
    assert needs(q, crossed).startswith("needs v with contiguous rows")


# Beside head_dim 64: tiles with padding, and heads in pieces.
AND_OTHER_WIDTHS = [*((rung, 64) for rung in RUNGS), *((r, d) for r in ROLES for d in (96, 256))]


@pytest.mark.parametrize(
    "rung, head_dim, change",
    [
        *((*each, readable) for each in AND_OTHER_WIDTHS),
        *((rung, 64, unreadable) for rung in ("v0_flash", "v1_one_tile")),
    ],
)
def test_strided_arguments(rung, head_dim, change):
    rotary = change is readable and rotaries(rung)[-1]
    case = Case("strided", (65, 0, 40), head_dim=head_dim, rotary=rotary)
    check(RUNGS[rung], case, BF16, change=change)


@pytest.mark.parametrize("kind", swept(GRADIENTS, ("sum",)))
@products
def test_any_strides_of_the_gradient(rung, kind):
    case = suited(rung, Case("expanded", (65, 0, 40)))
    tensors, options = case.tensors(BF16), case.options()
    strange = GRADIENTS[kind](tensors["grad_out"])
    found, plain = (
        results(RUNGS[rung], tensors | {"grad_out": grad}, options)
        for grad in (strange, strange.clone(memory_format=torch.contiguous_format))
    )
    assert_same_bits(found, plain)


@pytest.mark.parametrize("rung", [rung for rung in RUNGS if True in rotaries(rung)])
def test_strided_sin_and_cos(rung):
    """Halves of one tensor, as positions are often stored, in the dtype of q."""
    case = Case("halves", (65, 3), rotary=True)
    tensors, options = case.tensors(BF16), case.options()
    plain = tuple(t.bfloat16() for t in options["rotary"])
    halves = torch.cat(plain, 1).split(32, dim=1)
    expected = results(RUNGS[rung], tensors, options | {"rotary": plain})
    assert_same_bits(results(RUNGS[rung], tensors, options | {"rotary": halves}), expected)


@pytest.mark.parametrize(
    "rung, rotary, heads_k",
    [
        *((rung, rotary, 1) for rung in PRODUCTS for rotary in rotaries(rung)),
        *(sweep(rung, rotary, 1) for rung in LESSONS for rotary in rotaries(rung)),
        *(sweep(rung, *rotaries(rung), 2) for rung in ROLES),
    ],
)
def test_neighbours_do_not_leak(rung, rotary, heads_k):
    """Other blocks hold NaN, infinities, large values: this one's results are bitwise equal."""
    case = Case("neighbours", (5, 70, 64, 3), 2, heads_k, rotary=rotary, rotate_v=rotary)
    tensors, options = case.tensors(BF16), case.options()
    before = results(RUNGS[rung], tensors, options)
    for own, finite in NEIGHBOURS:
        changed = {
            name: tensor if name == "cu_seqlens" else poisoned(tensor, own, finite)
            for name, tensor in tensors.items()
        }
        turns = tuple(poisoned(turn, own, finite) for turn in options["rotary"]) if rotary else None
        after = results(RUNGS[rung], changed, options | {"rotary": turns})
        rows = BLOCKS[own]
        assert_same_bits([x[rows] for x in after], [x[rows] for x in before], (own, finite))


@pytest.mark.parametrize("name", ("q", "k", "v", "grad_out"))
@pytest.mark.parametrize(
    "rung, head_dim", swept(AND_OTHER_WIDTHS, lambda rung, dim: dim != 96 and rung in PRODUCTS)
)
def test_own_nan_stays_visible(rung, head_dim, name):
    """A NaN of the block's own reaches what depends on it, and nothing else."""
    case = suited(rung, Case("nan", (6, 70), head_dim=head_dim))
    tensors = case.tensors(BF16)
    tensors[name][2, 0, 3] = float("nan")
    out, dq, dk, dv = results(RUNGS[rung], tensors, case.options())
    reached = {
        "q": (out[2, 0], dq[2, 0], dk[:6, 0], dv[:6, 0]),
        "k": (out[:6, 0], dq[:6, 0], dk[:6, 0], dv[:6, 0]),
        "v": (out[:6, 0, 3], dq[:6, 0], dk[:6, 0]),
        "grad_out": (dq[2, 0], dk[:6, 0], dv[:6, 0, 3]),
    }[name]
    assert all(part.isnan().all() for part in reached)
    for result in (out, dq, dk, dv):
        assert result[6:].isfinite().all() and result[:, 1].isfinite().all()


@every
def test_one_token(rung):
    """P is 1 whatever the score: out is v, dv is grad_out, dq and dk vanish. One tile gets an exact
    zero; v0 subtracts two sums of the same products in different orders."""
    case = suited(rung, Case("one", (1,)))
    tensors = case.tensors(BF16)
    out, dq, dk, dv = results(RUNGS[rung], tensors, case.options())
    assert torch.equal(out, tensors["v"]) and torch.equal(dv, tensors["grad_out"])
    limit = 1e-4 if rung == "v0_flash" else 0
    assert dq.abs().max() <= limit and dk.abs().max() <= limit


@every
def test_results_are_written_whole(rung):
    """Memory is full of NaN before the call, and every element is finite after it."""
    case = suited(rung, CASES[0])
    with full_of_nan():
        found = results(RUNGS[rung], case.tensors(BF16), case.options())
    assert all(result.isfinite().all() for result in found)


@products
def test_deterministic(rung):
    rotary = rotaries(rung)[-1]
    case = Case("twice", (65, 130), 4, 2, rotary=rotary, rotate_v=rotary)
    tensors, options = case.tensors(FP16), case.options()
    assert_same_bits(*(results(RUNGS[rung], tensors, options) for _ in range(2)))


@pytest.mark.parametrize("rung", [rung for rung in RUNGS if rung != "v0_flash"])
def test_backward_needs_nothing_of_forward(rung):
    case = suited(rung, Case("saved", (65, 3)))
    tensors = case.tensors(BF16)
    _, *others = tensors.values()
    with kernels_run(RUNGS[rung]):
        assert RUNGS[rung].forward(Batch(*others, **case.options()))[1] == ()


V1_CONFIGS = (
    {"WIDTH": 64},
    {"WIDTH": 32, "heads_inner": False},
    {"WIDTH": 16, "num_warps": 8, "registers": 168},
)


@pytest.mark.parametrize("config", swept(V1_CONFIGS, V1_CONFIGS[-1:]), ids=str)
def test_any_v1_config(config):
    case = Case("config", (130, 0, 5), num_heads=4, num_heads_k=2, head_dim=48, rotary=True)
    check(v1_one_tile, case, BF16, config=v1_one_tile.Config(**config))


V2_CONFIGS = (
    {"heads_per_program": 2, "programs_per_sm": 1},
    {"heads_per_program": 4, "slabs_per_program": 1},
    {"slabs_per_program": 3, "num_stages": 3},
    {"heads_per_program": 2, "slabs_per_program": 100, "num_stages": 1},
)


@pytest.mark.parametrize("config", swept(V2_CONFIGS, V2_CONFIGS[:1]), ids=str)
def test_any_v2_config_gives_the_same_result(config):
    case = Case("config", (130, 0, 5, 200), num_heads=4, num_heads_k=4, rotary=True)
    tensors, options = case.tensors(BF16), case.options()
    plain = results(v2_slab, tensors, options)
    other = results(v2_slab, tensors, options, config=v2_slab.Config(**config))
    assert_same_bits(plain, other)


SWITCHES = [field.name for field in dataclasses.fields(_eliminations.Config)][:-1]


@pytest.mark.parametrize("on", [(), *((name,) for name in SWITCHES), tuple(SWITCHES)], ids=str)
def test_eliminations(on):
    case = Case("eliminations", (65, 0, 64, 7), head_dim=64)
    tensors, options = case.tensors(BF16), case.options()
    del options["rotary"], options["rotate_v"]
    config = _eliminations.Config(**dict.fromkeys(on, True))
    actual = results(_eliminations, tensors, options, config=config)
    plain = results(v1_one_tile, tensors, case.options())
    for name, a, b in zip(NAMES, actual, plain, strict=True):
        if not on:
            assert torch.equal(a, b), name
        torch.testing.assert_close(a.float(), b.float(), atol=0.02, rtol=0.02)


@examples(10)
@given(data=st.data())
@products
def test_random_batches_and_options(rung, data):
    groups = [(1, 1), (1, 2), (2, 1), (3, 1)][: 2 if rung == "v2_slab" else None]
    group, heads_k = data.draw(st.sampled_from(groups))
    fast = rung in BY_TMA
    rotary = data.draw(st.sampled_from(rotaries(rung)))
    case = Case(
        "random",
        tuple(data.draw(st.lists(st.integers(0, 140), min_size=1, max_size=4))),
        num_heads=group * heads_k,
        num_heads_k=heads_k,
        head_dim=64 if fast else data.draw(st.sampled_from([16, 32, 48, 64])),
        block_size=64 if fast else data.draw(st.sampled_from([16, 32, 64, 128])),
        packed=data.draw(st.booleans()),
        rotary=rotary,
        rotate_v=rotary and data.draw(st.booleans()),
    )
    assume(max(case.seqlens) != 1)  # see test_one_token
    # in fp32 the largest of a few errors is now and then more than twice the largest of others
    dtype = data.draw(st.sampled_from((BF16, FP16)))
    check(RUNGS[rung], case, dtype, seed=data.draw(st.integers(0, 2**16)))
