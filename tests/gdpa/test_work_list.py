"""The list made by one kernel is the list made with plain integers."""

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import tritonemu
from gdpa_kernels.calling.launches import launches
from gdpa_kernels.gdpa import list_model
from gdpa_kernels.gdpa.device import work_list as lists
from gdpa_kernels.gdpa.device.longest_first import LongestFirstRecipe
from gdpa_lab.measuring import compile_check
from gdpa_lab.measuring.inputs import cu_seqlens
from tests.tiers import examples

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def check(
    lengths_q, lengths_k, *, num_heads, rows_per_item, block_n, num_programs, shared=False, least=0
):  # fmt: skip
    longest = max(lengths_q, default=0)
    rows = [max(q, least) if k else q for q, k in zip(lengths_q, lengths_k, strict=True)]
    expected = list_model.build(
        "zigzag", rows, lengths_k, num_programs=num_programs, fastest="block",
        num_heads=num_heads, block_m=rows_per_item, block_n=block_n,
    )  # fmt: skip
    with tritonemu.enabled():
        recipe = lists.ZigzagRecipe(
            sum(lengths_q), longest, num_heads, rows_per_item, block_n, num_programs, least
        )
        (made,) = recipe.make(
            cu_seqlens(list(lengths_k), DEVICE),
            None if shared else cu_seqlens(list(lengths_q), DEVICE),
        )
    entries = made.tolist()
    count = entries[0][0]
    assert count == len(expected) <= len(made) - 1
    starts_q = [0, *itertools.accumulate(lengths_q)]
    starts_k = [0, *itertools.accumulate(lengths_k)]
    assert [tuple(row[:7]) for row in entries[1 : 1 + count]] == [
        (
            0 if shared else starts_q[i], starts_q[i], lengths_q[i], starts_k[i], lengths_k[i],
            head, block * rows_per_item,
        )
        for i, head, block in expected.tiles()
    ]  # fmt: skip
    return entries[1 : 1 + count]


LENGTH = st.just(0) | st.integers(0, 700)
LENGTHS = st.lists(st.tuples(LENGTH, LENGTH), min_size=1, max_size=40)


@examples(150)
@given(
    LENGTHS, st.integers(1, 5), st.integers(1, 9), st.sampled_from((64, 128, 1024)),
    st.sampled_from((64, 128)), st.sampled_from((0, 1)), st.none() | st.sampled_from((1, 70, 300)),
)  # fmt: skip
def test_any_lengths(lengths, num_heads, num_programs, rows_per_item, block_n, least, shared_rows):
    """Queries of their own, or `shared_rows` for all sequences."""
    queries, keys = zip(*lengths, strict=True)
    shared = shared_rows is not None
    check(
        [shared_rows] * len(keys) if shared else queries, keys, num_heads=num_heads,
        num_programs=num_programs, rows_per_item=rows_per_item, block_n=block_n, shared=shared,
        least=least,
    )  # fmt: skip


@pytest.mark.parametrize("least, tiles", ((0, 0), (1, 2)))
def test_least_is_one_tile_for_each_head_where_there_is_something_to_see(least, tiles):
    """Two heads: the first sequence has rows, the second only keys, the third neither."""
    entries = check((3, 0, 0), (4, 5, 0), num_heads=2, rows_per_item=64, block_n=64,
                    num_programs=2, least=least)  # fmt: skip
    alone = [row for row in entries if row[4] == 5]
    assert len(alone) == tiles and all(row[2] == row[6] == 0 for row in alone)
    assert len(entries) == 2 + tiles


@pytest.mark.parametrize("batch", (1, 16, 17, 300, 1100))
def test_batches_of_many_programs(batch):
    generator = torch.Generator().manual_seed(batch)
    queries, keys = torch.randint(0, 900, (2, batch), generator=generator).tolist()
    check(queries, keys, num_heads=4, rows_per_item=128, block_n=128, num_programs=132)


def test_an_empty_batch_has_an_empty_list():
    none = torch.zeros(1, dtype=torch.int32, device=DEVICE)
    (made,) = lists.ZigzagRecipe(0, 0, 2, 128, 128, 3).make(none, none)
    assert int(made[0, 0]) == 0 and len(made) == 1


@examples(20)
@given(st.lists(st.integers(0, 9), min_size=1, max_size=40))
def test_longest_first_is_a_stable_sort(lengths):
    with tritonemu.enabled():
        ends = cu_seqlens(lengths, DEVICE)
        (order,) = LongestFirstRecipe().make(ends, ends)
    expected = sorted(range(len(lengths)), key=lambda i: -lengths[i])
    assert order.tolist() == expected and order.dtype == torch.int32


def test_longest_first_of_more_sequences_than_one_pass_compares():
    lengths = torch.randint(0, 50, (2500,), generator=torch.Generator().manual_seed(0))
    with tritonemu.enabled():
        ends = cu_seqlens(lengths.tolist(), DEVICE)
        (order,) = LongestFirstRecipe().make(ends, ends)
    assert torch.equal(order.cpu().long(), lengths.argsort(descending=True, stable=True))


@pytest.mark.parametrize("recipe", (LongestFirstRecipe(), lists.ZigzagRecipe(8, 8, 2, 4, 4, 2)))
def test_the_kernels_that_make_lists_compile(recipe):
    """The emulator takes what the compiler refuses, such as a name of two shapes in a loop."""
    ends = torch.tensor([0, 3, 8], dtype=torch.int32)
    with launches(run=False) as seen:
        recipe.make(ends, ends)
    assert compile_check.read(compile_check.build_launch(seen[-1])).spill_bytes == 0
