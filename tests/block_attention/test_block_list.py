"""The list made by one kernel is the list of the definition."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gdpa_kernels.block_attention import reference
from gdpa_kernels.block_attention.block_list import BlockListRecipe
from gdpa_lab.measuring.inputs import cu_seqlens
from tests.block_attention.cases import DEVICE, kernels_run


def check(lengths, block_size):
    ends = cu_seqlens(lengths, DEVICE)
    with kernels_run():
        (made,) = BlockListRecipe(sum(lengths), block_size).make(ends)
    tokens = reference.tokens_of_blocks(ends, block_size)
    count = int(made[0, 0])
    assert count == len(tokens) <= len(made) - 1
    assert made.dtype == torch.int32
    first_row, rows = made[1 : 1 + count].unbind(1)
    assert torch.equal(first_row.long(), tokens[:, 0])
    assert torch.equal(rows.long(), (tokens >= 0).sum(1))


@settings(deadline=None)
@given(st.lists(st.integers(0, 300), max_size=40), st.sampled_from((16, 32, 64, 128)))
def test_any_lengths(lengths, block_size):
    check(lengths, block_size)


@pytest.mark.parametrize("batch", (1, 15, 16, 17, 33, 1100))
def test_batches_of_many_programs(batch):
    generator = torch.Generator().manual_seed(batch)
    check(torch.randint(0, 200, (batch,), generator=generator).tolist(), 64)


def test_one_long_sequence():
    check([0, 100_000, 0], 64)
