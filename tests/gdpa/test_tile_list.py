"""The list made by one kernel is the list made with plain integers."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gdpa_kernels import emulator, schedule
from gdpa_kernels.gdpa.tile_list import tile_list
from gdpa_kernels.inputs import cu_seqlens

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def check(lengths_q, lengths_k, *, num_heads, block_m, block_n, num_programs):
    longest = max(lengths_q, default=0)
    sizes = {"num_heads": num_heads, "block_m": block_m, "block_n": block_n}
    expected = schedule.build(
        "zigzag", lengths_q, lengths_k, num_programs=num_programs, fastest="block", **sizes
    )
    bound = schedule.max_tiles(sum(lengths_q), len(lengths_q), longest, block_m)
    with emulator.enabled():
        made = tile_list(
            cu_seqlens(list(lengths_q), DEVICE), cu_seqlens(list(lengths_k), DEVICE),
            batch=len(lengths_q), max_tiles=bound, max_seqlen_q=longest,
            num_programs=num_programs, **sizes,
        )  # fmt: skip
    count = int(made.num_tiles)
    assert count == len(expected)
    columns = (made.tile_batch, made.tile_head, made.tile_block)
    found = list(zip(*(column[:count].tolist() for column in columns), strict=True))
    assert found == expected.tiles()


LENGTHS = st.lists(st.tuples(st.integers(0, 700), st.integers(0, 700)), min_size=1, max_size=40)


@given(LENGTHS, st.integers(1, 5), st.integers(1, 9), st.sampled_from((64, 128, 1024)))
def test_any_lengths(lengths, num_heads, num_programs, block_m):
    queries, keys = zip(*lengths, strict=True)
    check(
        queries, keys, num_heads=num_heads, block_m=block_m, block_n=128, num_programs=num_programs
    )


@pytest.mark.parametrize("batch", (1, 16, 17, 300, 600))
def test_batches_of_many_programs(batch):
    generator = torch.Generator().manual_seed(batch)
    queries, keys = torch.randint(0, 900, (2, batch), generator=generator).tolist()
    check(queries, keys, num_heads=4, block_m=128, block_n=128, num_programs=132)


def test_an_empty_batch_has_an_empty_list():
    none = torch.zeros(1, dtype=torch.int32, device=DEVICE)
    made = tile_list(
        none, none, batch=0, max_tiles=0, max_seqlen_q=0, num_heads=2, block_m=128, block_n=128,
        num_programs=3,
    )  # fmt: skip
    assert int(made.num_tiles) == 0 and made.max_tiles == 0
