"""Lists that programs take by tickets: their order, when they are used, and results."""

import dataclasses

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import tritonemu
from gdpa_kernels.calling import ladder
from gdpa_kernels.calling.launches import launches
from gdpa_kernels.gdpa import list_model
from gdpa_kernels.gdpa.batch import Batch
from gdpa_kernels.gdpa.device import ticket_list
from gdpa_kernels.gdpa.mask import Mask, visible
from gdpa_lab.measuring.inputs import cu_seqlens
from tests.tiers import examples

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
FORWARD = ladder.rung("v8_own_waits").module()
BACKWARD = ladder.rung("v4_warp_specialized_backward").module()
FEW_KEYS = ladder.rung("v6_one_tile_backward").module()
WIDE = ladder.rung("v7_wide_backward").module()
LENGTH = st.just(0) | st.integers(0, 60)


@examples(40)
@given(
    st.lists(st.tuples(LENGTH, LENGTH), min_size=1, max_size=9), st.integers(1, 3),
    st.integers(1, 6), st.booleans(), st.booleans(), st.sampled_from((2**30, 2, 3)),
    st.booleans(),
)  # fmt: skip
def test_the_list_is_the_one_made_with_plain_integers(
    lengths, num_heads, num_programs, causal, shifted, max_cost, transposed
):
    queries, keys = zip(*lengths, strict=True)
    rows, others = (keys, queries) if transposed else (queries, keys)
    recipe = ticket_list.TicketRecipe(
        sum(rows), max(rows), num_heads, 4, num_programs, causal=causal, shifted=shifted,
        max_cost=max_cost, numbered=True, transposed=transposed,
    )  # fmt: skip
    with tritonemu.enabled():
        (entries,) = recipe.make(cu_seqlens(keys, DEVICE), cu_seqlens(queries, DEVICE))
    expected = list_model.build_tickets(
        rows, others, num_heads=num_heads, block=4, num_programs=num_programs, causal=causal,
        shifted=shifted, max_cost=max_cost, falling=not transposed,
    )  # fmt: skip
    count, *listed = entries.tolist()
    assert count[0] == len(expected) <= len(listed)
    starts, other_starts = (cu_seqlens(each, "cpu").tolist() for each in (rows, others))
    assert listed[: len(expected)] == [
        [starts[i], starts[i], rows[i], other_starts[i], others[i], head, 4 * block, i]
        for i, head, block in expected.tiles()
    ]


def test_a_short_sorted_tail_balances_one_long_sequence():
    lengths = [16384]
    options = {"num_heads": 4, "block": 128, "num_programs": 132}
    by_tickets = list_model.build_tickets(lengths, lengths, **options)
    assert by_tickets.imbalance(dynamic=True) < 1.03 < 1.2 < by_tickets.imbalance()


@examples(60)
@given(st.integers(1, 40), st.integers(1, 12), st.integers(1, 9))
def test_the_imbalance_of_equal_heads_is_that_of_the_list(num_heads, tiles, num_programs):
    options = {"block_m": 1, "block_n": 1, "fastest": "block"}
    tiles_listed = list_model.build(
        "zigzag", [tiles], [tiles], num_heads=num_heads, num_programs=num_programs, **options
    )
    tiles_listed = list_model.with_masked_costs(tiles_listed, [tiles], [tiles], block=1)
    expected = tiles_listed.imbalance(prologue=0.5)
    actual = list_model.zigzag_imbalance(num_heads, tiles, num_programs)
    assert actual == pytest.approx(expected)


@examples(40)
@given(st.integers(1, 60), st.floats(0, 1), st.integers(1, 9), st.booleans())
def test_costs_with_targets_are_the_blocks_that_a_tile_sees(length, share, block, falling):
    targets = int(share * length)
    order = {"num_heads": 1, "block_m": block, "block_n": block, "num_programs": 2}
    tiles_listed = list_model.build("valid", [length], [length], **order)
    tiles_listed = list_model.with_masked_costs(
        tiles_listed, [length], [length], block=block, falling=falling, num_targets=[targets]
    )
    i, j = torch.arange(length)[:, None], torch.arange(length)[None]
    seen = visible(i, j, targets, 0, length, Mask(causal=True))
    seen = seen if falling else seen.T
    for (_, _, tile), cost in zip(tiles_listed.tiles(), tiles_listed.costs, strict=True):
        keys = seen[tile * block : (tile + 1) * block].any(0)
        blocks = sum(bool(part.any()) for part in keys.split(block))
        assert cost == blocks


def batch(lengths, *, heads=(2, 2), head_dim=128, share=None, dtype=torch.bfloat16, **mask):
    generator = torch.Generator().manual_seed(0)
    q, k, v = (
        torch.randn(sum(lengths), each, head_dim, generator=generator).to(DEVICE, dtype)
        for each in (heads[0], heads[1], heads[1])
    )
    segments = None
    if share:
        rows = [[int(share * length), 0] for length in lengths]
        segments = torch.tensor(rows, dtype=torch.int32, device=DEVICE)
    ends = cu_seqlens(list(lengths), DEVICE)
    longest = max(lengths)
    return Batch(
        q, k, v, ends, ends, longest, longest, ("gelu_tanh",), head_dim**-0.5, 1 / 64,
        mask=Mask(**mask), segments=segments,
    )  # fmt: skip


@pytest.mark.parametrize(
    "lengths, options, forward, backward",
    [
        ([16384], {"causal": True}, True, True),
        ([16384], {}, False, False),
        ([16384], {"causal": True, "window": 1024}, False, False),
        ([2048] * 16, {"causal": True}, False, False),
        ([4096] * 4, {"causal": True}, True, True),
        ([2048] * 4, {"causal": True, "heads": (8, 8)}, False, False),
        ([2048] * 16 + [64], {"causal": True}, True, True),
        ([2048] * 16 + [64], {"causal": True, "window": 128}, False, True),
        ([512], {"causal": True}, False, False),
    ],
)
def test_tickets_are_taken_where_they_pay(lengths, options, forward, backward):
    call = batch(lengths, **{"heads": (4, 4)} | options)
    with tritonemu.enabled(multiprocessors=132):
        assert FORWARD.default_config(call).tickets is forward
        assert BACKWARD.default_config(call).tickets is backward


@pytest.mark.parametrize(
    "lengths, options",
    [
        ([200, 0, 333, 64], {"causal": True}),
        ([300, 130], {"causal": True, "heads": (4, 1)}),
        ([200, 333, 64], {"causal": True, "window": 200, "head_dim": 64}),
        ([200, 333, 64], {"causal": "lower_right", "share": 0.3}),
        ([200, 133], {"causal": True, "head_dim": 256}),
        ([200, 333], {"window": 140, "dtype": torch.float16}),
    ],
)
def test_results_are_those_of_the_fixed_list_and_launches_may_share_one(lengths, options):
    call = batch(lengths, **options)
    rung = BACKWARD if call.head_dim <= 128 else WIDE
    grad = torch.randn(call.q.shape, generator=torch.Generator().manual_seed(1))
    grad = grad.to(DEVICE, call.q.dtype)
    with tritonemu.enabled(multiprocessors=2):
        config = dataclasses.replace(FORWARD.default_config(call), tickets=True, q_slots=1)
        work_list = FORWARD.work_list_recipe(call, config).make(*call.offsets)
        shared = [FORWARD.forward(call, config=config, work_list=work_list) for _ in range(2)]
        fixed = FORWARD.forward(call, config=dataclasses.replace(config, tickets=False))
        assert torch.equal(shared[0], fixed) and torch.equal(*shared)

        config = dataclasses.replace(rung.default_config(call), tickets=True)
        work_list = rung.work_list_recipe(call, config).make(*call.offsets)
        shared = [rung.backward(grad, call, config=config, work_list=work_list) for _ in range(2)]
        fixed = rung.backward(grad, call, config=dataclasses.replace(config, tickets=False))
    for first, second, expected in zip(*shared, fixed, strict=True):
        torch.testing.assert_close(first, expected, rtol=2e-2, atol=1e-3)  # dq in another order
        torch.testing.assert_close(second, expected, rtol=2e-2, atol=1e-3)


@pytest.mark.parametrize("lengths, taken", [([800, 60, 50, 40, 30], True), ([200, 150], False)])
def test_few_keys_take_tickets_where_queries_are_uneven(lengths, taken):
    call = batch(lengths)
    keys = cu_seqlens([70, 0, 128, 1, 100][: len(lengths)], DEVICE)
    k, v = (x[: int(keys[-1])] for x in (call.k, call.v))
    call = dataclasses.replace(call, k=k, v=v, cu_seqlens_k=keys, max_seqlen_k=128)
    config = FEW_KEYS.default_config(call)
    assert config.tickets is taken
    with tritonemu.enabled(multiprocessors=2):
        results = FEW_KEYS.backward(call.q, call, config=config)
        fixed = dataclasses.replace(config, tickets=not taken)
        others = FEW_KEYS.backward(call.q, call, config=fixed)
    assert all(map(torch.equal, results, others))


def test_each_launch_has_a_counter_of_its_own():
    call = batch([300, 200], causal=True)
    config = dataclasses.replace(FORWARD.default_config(call), tickets=True, q_slots=1)
    with tritonemu.enabled(multiprocessors=2):
        work_list = FORWARD.work_list_recipe(call, config).make(*call.offsets)
        with launches(run=False) as seen:
            for _ in range(2):
                FORWARD.forward(call, config=config, work_list=work_list)
    counters = [launch.arguments["counter_ptr"] for launch in seen]
    assert len({counter.data_ptr() for counter in counters}) == 2
