"""Metrics of clicks and of rankings, against their definitions."""

import itertools
import math

import pytest
import torch
from metrics import auc, hit_rate_and_ndcg


def test_auc_counts_pairs():
    score, label = torch.tensor([0.1, 0.4, 0.4, 0.8]), torch.tensor([0.0, 1, 0, 1])
    assert auc(score, label) == (1 + 0.5 + 1 + 1) / 4


def by_definition(own: float, others: list[float], k: int) -> tuple[float, float]:
    """The mean over all orders in which sorting by score may leave the candidates."""
    candidates, hits, gains = [(own, True), *((score, False) for score in others)], [], []
    for order in itertools.permutations(candidates):
        scores = [score for score, _ in order]
        if scores == sorted(scores, reverse=True):
            relevant = [found for _, found in order[:k]]
            hits.append(any(relevant))
            gains.append(sum(found / math.log2(i + 2) for i, found in enumerate(relevant)))
    return sum(hits) / len(hits), sum(gains) / len(gains)


@pytest.mark.parametrize("k", (1, 2, 5, 9))
def test_hr_and_ndcg_are_means_over_the_orders_of_ties(k):
    generator = torch.Generator().manual_seed(k)
    own = torch.randint(3, (12,), generator=generator).float()
    others = torch.randint(3, (12, 5), generator=generator).float()
    rows = zip(own.tolist(), others.tolist(), strict=True)
    wanted = torch.tensor([by_definition(*row, k) for row in rows], dtype=torch.float64).mean(0)
    assert hit_rate_and_ndcg(own, others, k) == pytest.approx(wanted.tolist(), rel=1e-12)


def test_a_constant_score_has_the_hit_rate_of_chance():
    own, others = torch.zeros(3), torch.zeros(3, 19)
    assert hit_rate_and_ndcg(own, others, 5)[0] == pytest.approx(5 / 20)
    others[:, 9:] = -torch.inf  # ten that do not count
    assert hit_rate_and_ndcg(own, others, 5)[0] == pytest.approx(5 / 10)
    assert all(math.isnan(x) for x in hit_rate_and_ndcg(own[:0], others[:0], 5))


@pytest.mark.parametrize(
    ("own", "k", "message"),
    ((0.0, 0, "k must be at least 1, got 0"), (math.nan, 1, "must be numbers, got NaN")),
)
def test_what_has_no_rank_is_refused(own, k, message):
    with pytest.raises(ValueError, match=message):
        hit_rate_and_ndcg(torch.tensor([own]), torch.zeros(1, 3), k)
