"""Made-up users: what they are, and the losses that nobody can go below."""

import pytest
import torch
import torch.nn.functional as F

from notebooks.training import _histories


def test_users_are_the_same_for_a_seed_and_count_their_events():
    one, other = _histories.users(50, 3), _histories.users(50, 3)
    assert all(map(torch.equal, one, other))
    for user in range(50):
        own = one.events[one.offsets[user] : one.offsets[user + 1]]
        assert (own == one.shown[user]).sum() == one.same[user]


def test_best_losses_are_those_of_many_users():
    best = _histories.best_losses()
    assert best["counts"] < best["shares"] < best["no history"]
    many = _histories.users(200_000, 0)
    right = torch.sigmoid(many.logit)
    assert F.binary_cross_entropy(right, right).item() == pytest.approx(best["counts"], abs=2e-3)
    mean = right.mean()
    assert F.binary_cross_entropy(mean, mean).item() == pytest.approx(best["no history"], abs=2e-3)
