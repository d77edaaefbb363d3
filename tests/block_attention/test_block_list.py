"""The list made by one kernel is the list of the definition."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gdpa_kernels.block_attention import reference
from gdpa_kernels.block_attention.block_list import block_list_of, make_block_list
from gdpa_kernels.inputs import cu_seqlens
from tests.block_attention.cases import DEVICE, kernels_run


def check(lengths, block_size):
    ends = cu_seqlens(lengths, DEVICE)
    with kernels_run():
        made = make_block_list(ends, sum(lengths), block_size)
    tokens = reference.tokens_of_blocks(ends, block_size)
    count = int(made.entries[0, 0])
    assert count == len(tokens) <= made.max_blocks == len(made.entries) - 1
    assert made.entries.dtype == torch.int32
    first_row, rows = made.entries[1 : 1 + count].unbind(1)
    assert torch.equal(first_row.long(), tokens[:, 0])
    assert torch.equal(rows.long(), (tokens >= 0).sum(1))


@given(st.lists(st.integers(0, 300), max_size=40), st.sampled_from((16, 32, 64, 128)))
def test_any_lengths(lengths, block_size):
    check(lengths, block_size)


@pytest.mark.parametrize("batch", (1, 15, 16, 17, 33, 1100))
def test_batches_of_many_programs(batch):
    generator = torch.Generator().manual_seed(batch)
    check(torch.randint(0, 200, (batch,), generator=generator).tolist(), 64)


def test_one_long_sequence():
    check([0, 100_000, 0], 64)


@pytest.mark.skipif(DEVICE == "cpu", reason="the emulator makes every list anew")
def test_a_list_is_remembered_until_its_offsets_change():
    ends = cu_seqlens([100, 30], DEVICE)
    first = block_list_of(ends, 130, 64)
    assert block_list_of(ends, 130, 64) is first
    assert block_list_of(ends, 130, 32) is not first
    assert block_list_of(ends.clone(), 130, 64) is not first
    ends[1] = 90
    assert block_list_of(ends, 130, 64) is not first


@pytest.mark.skipif(DEVICE != "cpu", reason="about the emulator")
def test_the_emulator_makes_every_list_anew():
    ends = cu_seqlens([100, 30], DEVICE)
    with kernels_run():
        assert block_list_of(ends, 130, 64) is not block_list_of(ends, 130, 64)
