"""Work lists: coverage, balance, the device list, and what the book says about them."""

from collections import Counter

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode

from gdpa_kernels.gdpa.list_model import (
    FASTEST,
    ORDERS,
    TileOrderRecipe,
    build,
    max_tiles,
    window_cost,
)
from gdpa_lab.measuring.inputs import cu_seqlens
from gdpa_lab.measuring.workloads import workload
from tests.tiers import examples

lengths = st.integers(0, 40) | st.sampled_from([0, 1, 7, 8, 9, 16, 17])
batches = st.lists(st.tuples(lengths, lengths), max_size=9)
sizes = st.fixed_dictionaries(
    {
        "num_heads": st.integers(1, 4),
        "block_m": st.sampled_from([1, 8, 16]),
        "block_n": st.sampled_from([1, 8, 16]),
        "num_programs": st.integers(1, 12),
        "fastest": st.sampled_from(FASTEST),
    }
)
orders = st.sampled_from(ORDERS)


def split(batch):
    return [lq for lq, _ in batch], [lk for _, lk in batch]


def on_device(order, seqlens_q, seqlens_k, *, max_seqlen_q, shared=False, spare=0, **sizes):
    bound = max_tiles(sum(seqlens_q), len(seqlens_q), max_seqlen_q, sizes["block_m"])
    recipe = TileOrderRecipe(order, len(seqlens_q), bound + spare, max_seqlen_q, **sizes)
    ends_q = None if shared else cu_seqlens(seqlens_q, "cpu")
    return recipe.make(cu_seqlens(seqlens_k, "cpu"), ends_q)


def listed(tensors):
    count = tensors.num_tiles.item()
    columns = (getattr(tensors, f"tile_{name}") for name in ("batch", "head", "block"))
    return list(zip(*(column[:count].tolist() for column in columns), strict=True))


@given(order=orders, batch=batches, sizes=sizes, spare=st.integers(0, 30))
def test_every_tile_is_listed_exactly_once(order, batch, sizes, spare):
    seqlens_q, seqlens_k = split(batch)
    limit = max(seqlens_q, default=0) + spare
    work_list = build(order, seqlens_q, seqlens_k, max_seqlen_q=limit, **sizes)
    span = (lambda n: limit) if order == "padded" else (lambda n: n)
    expected = Counter(
        (b, h, start // sizes["block_m"])
        for b, n in enumerate(seqlens_q)
        for h in range(sizes["num_heads"])
        for start in range(0, span(n), sizes["block_m"])
    )
    assert Counter(work_list.tiles()) == expected
    for (b, _, m), cost, empty in zip(
        work_list.tiles(), work_list.costs, work_list.empty, strict=True
    ):
        assert empty == (m * sizes["block_m"] >= seqlens_q[b])
        assert cost == (0 if empty else len(range(0, seqlens_k[b], sizes["block_n"])))


@examples(200)
@given(
    order=orders, batch=batches, sizes=sizes, spare=st.integers(0, 30), bound=st.integers(0, 5),
    shared=st.booleans(),
)  # fmt: skip
def test_device_list_equals_plain_list(order, batch, sizes, spare, bound, shared):
    seqlens_q, seqlens_k = split(batch)
    limit = max(seqlens_q, default=0) + spare
    seqlens_q = [limit] * len(batch) if shared else seqlens_q
    plain = build(order, seqlens_q, seqlens_k, max_seqlen_q=limit, **sizes)
    made = on_device(
        order, seqlens_q, seqlens_k, max_seqlen_q=limit, spare=bound, shared=shared, **sizes
    )
    assert listed(made) == plain.tiles()
    for column in made[:3]:
        assert column.dtype == torch.int32 and column.shape == made.tile_batch.shape
        assert not column[len(plain) :].any()
    assert made.num_tiles.dtype == torch.int32 and made.num_tiles.shape == (1,)


@given(order=orders, batch=batches, sizes=sizes, prologue=st.floats(0, 3), dynamic=st.booleans())
def test_makespan_is_at_least_the_ideal(order, batch, sizes, prologue, dynamic):
    work_list = build(order, *split(batch), **sizes)
    makespan = work_list.makespan(prologue=prologue, dynamic=dynamic)
    ideal = work_list.ideal(prologue)
    assert makespan >= ideal * (1 - 1e-12)
    loads = work_list.loads(prologue=prologue, dynamic=dynamic)
    assert len(loads) == sizes["num_programs"]
    assert sum(loads) == pytest.approx(sum(work_list.work(prologue=prologue)))
    if ideal:
        assert work_list.imbalance(prologue=prologue, dynamic=dynamic) >= 1 - 1e-12


@given(
    total=st.lists(lengths, max_size=9), block=st.sampled_from([1, 8, 16]), spare=st.integers(0, 9)
)
def test_max_tiles_is_an_upper_bound(total, block, spare):
    needed = sum(-(-n // block) for n in total)
    assert needed <= max_tiles(sum(total), len(total), max(total, default=0) + spare, block)


@settings(deadline=None)
@given(order=orders, sizes=sizes, shared=st.booleans())
def test_the_host_never_waits_for_the_device(order, sizes, shared):
    # fake tensors hold no values: anything that read one on the host would raise
    with FakeTensorMode():
        offsets = torch.empty(8, dtype=torch.int32)
        recipe = TileOrderRecipe(order, batch=7, max_tiles=50, max_seqlen_q=30, **sizes)
        made = recipe.make(offsets, None if shared else offsets)
    assert made.num_tiles.shape == (1,)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("fastest", FASTEST)
def test_cuda_list_equals_plain_list_without_synchronizing(order, fastest):
    w = workload("gdpa-self-ml20m-2048")
    sizes = {"num_heads": 4, "block_m": 128, "block_n": 128, "num_programs": 132}
    sizes["fastest"] = fastest
    offsets = cu_seqlens(w.seqlens_q, "cuda")
    bound = max_tiles(w.total_q, w.batch, 2048, 128)
    torch.cuda.set_sync_debug_mode("error")
    try:
        made = TileOrderRecipe(order, w.batch, bound, 2048, **sizes).make(offsets, offsets)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    plain = build(order, w.seqlens_q, w.seqlens_k, max_seqlen_q=2048, **sizes)
    assert listed(made) == plain.tiles()


def test_orders_by_hand():
    # two heads, BLOCK 10: sequences of 1, 0 and 2 row blocks, with 1, 3 and 2 K/V blocks
    arguments = {"num_heads": 2, "block_m": 10, "block_n": 10, "num_programs": 2}
    seqlens = ([10, 0, 11], [10, 30, 20])
    valid = build("valid", *seqlens, **arguments)
    assert valid.tiles() == [(0, 0, 0), (0, 1, 0), (2, 0, 0), (2, 1, 0), (2, 0, 1), (2, 1, 1)]
    assert valid.costs == (1, 1, 2, 2, 2, 2)
    by_block = build("valid", *seqlens, **arguments, fastest="block")
    assert by_block.tiles()[2:] == [(2, 0, 0), (2, 0, 1), (2, 1, 0), (2, 1, 1)]
    padded = build("padded", *seqlens, **arguments)
    assert len(padded) == 3 * 2 * 2
    assert padded.tiles()[:4] == [(0, 0, 0), (0, 1, 0), (0, 0, 1), (0, 1, 1)]
    assert padded.costs[:8] == (1, 1, 0, 0, 0, 0, 0, 0)
    longest = build("longest_first", *seqlens, **arguments)
    assert longest.tiles() == [*valid.tiles()[2:], *valid.tiles()[:2]]
    zigzag = build("zigzag", *seqlens, **arguments)
    # rows of two: (2,0,0) (2,1,0) | (2,1,1) (2,0,1) | (0,0,0) (0,1,0)
    assert zigzag.tiles() == [(2, 0, 0), (2, 1, 0), (2, 1, 1), (2, 0, 1), (0, 0, 0), (0, 1, 0)]


def test_times_by_hand():
    work_list = build(
        "valid", [10, 10, 10], [30, 10, 20], num_heads=1, block_m=10, block_n=10, num_programs=2
    )
    # prologue 1: tiles of 4, 2 and 3; program 0 takes the first and third
    assert work_list.loads() == [7.0, 2.0]
    assert work_list.makespan() == 7.0
    assert work_list.ideal() == 4.5
    assert work_list.imbalance() == pytest.approx(7 / 4.5)
    assert work_list.loads(prologue=0.0) == [5.0, 1.0]
    # the third tile goes to the program that is free first
    assert sorted(work_list.loads(dynamic=True)) == [4.0, 5.0]
    padded = build(
        "padded", [20, 10], [10, 10], num_heads=1, block_m=10, block_n=10, num_programs=2
    )
    # tiles 2, 2, 2 and an empty one of 0.15
    assert padded.loads() == pytest.approx([4.0, 2.15])
    assert padded.ideal() == 3.0


def simulate(name, order, *, block_m, num_programs, **options):
    w = workload(name)
    return build(
        order, w.seqlens_q, w.seqlens_k, num_heads=4, block_m=block_m, block_n=128,
        num_programs=num_programs, max_seqlen_q=w.max_seqlen_q, **options,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("length", "expected"), [(256, 1.34), (512, 1.61), (1024, 1.41), (2048, 1.24)]
)
def test_padded_grid_resonates_with_132_programs(length, expected):
    # 132 shares a factor with the row blocks of a sequence, so some programs meet mostly empty
    # tiles; the expected values come from an independent simulation, the mean of six draws
    work_list = simulate(
        f"gdpa-self-half-dense-{length}", "padded", block_m=128, num_programs=132, fastest="block"
    )
    assert work_list.imbalance() == pytest.approx(expected, abs=0.03)


def test_a_prime_number_of_programs_does_not_resonate():
    options = {"block_m": 128, "fastest": "block"}
    even = simulate("gdpa-self-half-dense-512", "padded", num_programs=132, **options)
    prime = simulate("gdpa-self-half-dense-512", "padded", num_programs=131, **options)
    assert prime.makespan() < 0.8 * even.makespan()


def test_zigzag_balances_real_lengths():
    balance = {
        order: simulate("gdpa-self-ml20m-2048", order, block_m=128, num_programs=132).imbalance()
        for order in ORDERS
    }
    assert balance["zigzag"] < 1.03 < 1.1 < balance["valid"] < balance["padded"]
    assert balance["zigzag"] <= balance["longest_first"]


@pytest.mark.parametrize("causal", (True, False))
@pytest.mark.parametrize("window", (0, 1, 7, 8, 9, 16))
def test_a_window_lets_a_tile_see_so_many_blocks(window, causal):
    block, first = 8, 800
    ahead = 0 if causal else window
    keys = {j for i in range(first, first + block) for j in range(i - window, i + ahead + 1)}
    assert window_cost(window, block, causal=causal) == len({j // block for j in keys})


def test_ordering_cannot_help_when_every_tile_costs_the_same():
    valid, zigzag = (
        simulate("gdpa-self-half-dense-512", order, block_m=128, num_programs=132).makespan()
        for order in ("valid", "zigzag")
    )
    assert valid == zigzag


SIZES = {"num_heads": 1, "block_m": 8, "block_n": 8, "num_programs": 4}


@pytest.mark.parametrize(("make", "message"), [
    (lambda: build("random", [1], [1], **SIZES), "order must be one of .*, got 'random'"),
    (lambda: build("valid", [1], [1], **SIZES, fastest="batch"),
     "fastest must be one of .*, got 'batch'"),
    (lambda: build("valid", [1], [1], **SIZES | {"num_programs": 0}),
     "num_programs must be an integer of at least 1, got 0"),
    (lambda: build("valid", [1], [], **SIZES), "seqlens_k must have the 1 entries"),
    (lambda: build("valid", [-1], [1], **SIZES), "every length must be .* at least 0, got -1"),
    (lambda: build("padded", [9], [9], **SIZES, max_seqlen_q=8),
     "max_seqlen_q must be an integer of at least 9, got 8"),
    (lambda: build("valid", [], [], **SIZES).imbalance(), "the list must hold some work"),
    (lambda: on_device("sorted", [1], [1], max_seqlen_q=1, **SIZES), "order must be one of"),
])  # fmt: skip
def test_errors(make, message):
    with pytest.raises(ValueError, match=message):
        make()
