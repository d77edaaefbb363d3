"""The serving calls that a chapter times: right before they are timed, in every way."""

import pytest
import torch

import tritonemu
from notebooks.serving import _times


@pytest.fixture
def calls(monkeypatch):
    """The calls that would be captured, by name."""
    seen = {}

    def times(calls, device):
        seen.update(calls)
        return {name: [1.0] for name in calls}

    monkeypatch.setattr(_times, "_times", times)
    monkeypatch.setattr(_times, "LAYERS", 2)
    with tritonemu.enabled(multiprocessors=8):
        yield seen


def test_scores_are_right_in_every_way(calls):
    assert _times._scores(2, 150, 5, torch.device("cpu")).keys() == _times.WAYS.keys()
    first, second = calls["gathered"]
    assert torch.equal(first(), second()), "layers hold the same rows"


def test_keys_are_split_and_whole(calls):
    taken = _times._splits(1, 64, 600, torch.device("cpu"))
    assert [*taken] == [1, 2] and [len(of) for of in calls.values()] == [2, 2]


def test_a_wrong_output_is_not_timed():
    with pytest.raises(ValueError, match="gathered: error must be at most"):
        _times._check("gathered", torch.ones(3), torch.zeros(3) + 0.5)
