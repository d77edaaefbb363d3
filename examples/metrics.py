"""Metrics of models of click-through rate: NE, AUC, HR@k and NDCG@k."""

from __future__ import annotations

import torch
from torch.nn import functional as F


def bayes_loss(logit: torch.Tensor) -> torch.Tensor:
    """The expected log loss of the true probabilities: the smallest that any model can have."""
    return F.binary_cross_entropy_with_logits(logit, logit.sigmoid())


def normalized_entropy(loss: float, label: torch.Tensor) -> float:
    """NE: a log loss over that of the mean of the labels; below 1 if anything was learned."""
    rate = label.double().mean()
    return loss / torch.distributions.Bernoulli(rate).entropy().item()


def auc(score: torch.Tensor, label: torch.Tensor) -> float:
    """The share of pairs (clicked, not clicked) that the score puts in order; ties count half."""
    _, group, count = score.unique(return_inverse=True, return_counts=True)
    rank = (count.cumsum(0) - (count - 1) / 2)[group].double()
    clicked = label.sum().item()
    below = (rank * label).sum().item() - clicked * (clicked + 1) / 2
    return below / (clicked * (len(label) - clicked))


def hit_rate_and_ndcg(clicked: torch.Tensor, others: torch.Tensor, k: int) -> tuple[float, float]:
    """HR@k and NDCG@k of rows with one relevant candidate each; NaN without rows.

    clicked: its scores `[rows]`. others: those of the other candidates `[rows, n]`, -inf for one
    that does not count. A rank r <= k is a hit, with a gain of 1 / log2(r + 1). Candidates that tie
    with the relevant one are in random order, and both are the expected values over it: a constant
    score has the HR of chance, k / (n + 1).
    """
    if k < 1:
        raise ValueError(f"k must be at least 1, got {k}")
    if clicked.isnan().any() or others.isnan().any():
        raise ValueError("clicked and others must be numbers, got NaN")
    above = (others > clicked[:, None]).sum(1)
    ties = 1 + (others == clicked[:, None]).sum(1)
    rank = torch.arange(1, others.shape[1] + 2, device=clicked.device, dtype=torch.float64)
    hit = (rank <= k).double()

    def mean(gain: torch.Tensor) -> float:
        sums = torch.cat((gain.new_zeros(1), gain.cumsum(0)))
        return ((sums[above + ties] - sums[above]) / ties).mean().item()

    return mean(hit), mean(hit / (rank + 1).log2())
