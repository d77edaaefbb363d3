"""A batch that is cut between ranks gives what one process gives, and receives what was counted."""

import json
from pathlib import Path

import pytest
import torch

from gdpa_kernels.gdpa import parallel
from tests.examples.ranks import printed

SCRIPT = Path(__file__).with_name("context_parallel.py")
ENDS = {
    "cut": [0, 5, 5, 17, 40, 41],
    "one": [0, 41],
    "few": [0, 1, 3],
    "none": [0, 0],
}


PLAIN = {
    "ends": ENDS["cut"], "dtype": "float64", "shape": (8, 4, 8), "causal": False, "window": None,
    "options": {"impl": "reference"},
}  # fmt: skip
MASKS = {"all": {}, "causal": {"causal": True}, "window": {"causal": True, "window": 6}}
KERNELS = {
    "dtype": "bfloat16", "shape": (4, 4, 16), "causal": True,
    "options": {"impl": "v1_tiled", "backward_impl": "v1_tiled_backward"},
}  # fmt: skip
CASES = {
    **MASKS,
    **{name: {"causal": True, "ends": ends} for name, ends in ENDS.items() if name != "cut"},
    "nan": {"causal": True, "ends": ENDS["few"], "nan": True},
    "kernels": KERNELS,
}


@pytest.fixture(scope="module", params=(2, 4))
def results(request) -> tuple[int, dict]:
    """What processes find, all cases in one start."""
    cases = {
        f"{stationary} {name}": PLAIN | case | {"stationary": stationary}
        for stationary in parallel.STATIONARY for name, case in CASES.items()
    }  # fmt: skip
    return request.param, json.loads(printed(request.param, SCRIPT, json.dumps(cases)))


@pytest.mark.parametrize("stationary", parallel.STATIONARY)
def test_ranks_compute_what_one_process_does(results, stationary):
    """With a sequence across the cut, and a rank that has one piece, or nothing."""
    _, found = results
    for name in CASES:
        worst = torch.tensor(found[f"{stationary} {name}"]["errors"]).max()
        assert worst < (0.02 if name == "kernels" else 1e-14), name
        assert worst > 0 or name != "kernels", "they round"


RECEIVED = {
    "queries": lambda ranks: (2 * 4 * 8, 2 * 4 * 8),
    "keys": lambda ranks: (8 * (8 + 8), 8 * (8 + 8)),
    "sequences": lambda ranks: (2 * (8 + 4) * 8 / ranks,) * 2,
}
"""Bytes a row and number of a head, of 8 query heads and 4 key heads in fp64, summed as such."""


@pytest.mark.parametrize("stationary", parallel.STATIONARY)
def test_a_rank_receives_the_bytes_that_were_counted(results, stationary):
    ranks, found = results
    rows = -(-41 // ranks) * ranks
    scale = rows * 8 * (ranks - 1) / ranks
    forward, backward = (scale * x for x in RECEIVED[stationary](ranks))
    assert found[f"{stationary} all"]["bytes"] == {"forward": forward, "backward": backward}


def test_rows_are_dealt_in_order():
    assert [parallel.rows_of_rank(10, rank, 4) for rank in range(4)] == [
        (0, 3), (3, 6), (6, 9), (9, 10),
    ]  # fmt: skip
    assert [parallel.rows_of_rank(2, rank, 4) for rank in range(4)] == [
        (0, 1), (1, 2), (2, 2), (2, 2),
    ]  # fmt: skip


@pytest.fixture
def alone(tmp_path):
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{tmp_path}/ranks", rank=0, world_size=1
    )
    yield
    torch.distributed.destroy_process_group()


X = torch.zeros(4, 2, 8)
WRONG = (
    (ValueError, "stationary must be one of queries, keys, sequences, got 'ring'",
     (X, X, X, [0, 4]), {"stationary": "ring"}),
    (ValueError, "causal must be a bool here, .* got 'lower_right'",
     (X, X, X, [0, 4]), {"causal": "lower_right"}),
    (ValueError, "window must be None without causal, got 3", (X, X, X, [0, 4]), {"window": 3}),
    (TypeError, "cu_seqlens must be numbers of the host, got a tensor",
     (X, X, X, torch.tensor([0, 4])), {}),
    (ValueError, r"cu_seqlens must rise from 0, got \[0, 5, 4\]", (X, X, X, [0, 5, 4]), {}),
    (ValueError, "q must have the rows 0 to 5 of rank 0, got 4 rows", (X, X, X, [0, 5]), {}),
)  # fmt: skip


@pytest.mark.parametrize("error, message, given, options", WRONG)
def test_what_is_wrong_is_said(alone, error, message, given, options):
    with pytest.raises(error, match=message):
        parallel.context_parallel_gdpa(*given, **options)


def test_there_must_be_ranks():
    with pytest.raises(ValueError, match="group must be one of torch.distributed, which is not"):
        parallel.context_parallel_gdpa(X, X, X, [0, 4])
