"""Generated clicks: they repeat, ranks share them, and nothing predicts them better than Bayes."""

import numpy as np
import pytest
import torch
from metrics import auc, bayes_loss, normalized_entropy

from data import (
    DEALS,
    LAWS,
    ROWS,
    Traffic,
    World,
    cost,
    deal,
    make_batch,
)

WORLD = World(items=60, topics=4)


def parts(batch) -> list[tuple[torch.Tensor, ...]]:
    """Each row: its events, and what is shown."""
    ends = batch.lengths.cu_seqlens.tolist()
    events = torch.stack((batch.items, batch.topics, batch.likes, batch.ages))
    rows = torch.stack((batch.shown, batch.topic, batch.label, batch.logit)).T
    return [(events[:, a:b], row) for a, b, row in zip(ends, ends[1:], rows, strict=False)]


@pytest.mark.parametrize("how", DEALS)
def test_rows_do_not_depend_on_the_ranks(how):
    lengths = Traffic("lognormal", 40, "events", cold=0.2).sample(3, 32)
    whole = parts(make_batch(WORLD, lengths, np.arange(32), 3))
    dealt = deal(lengths, 4, how)
    assert sorted(dealt.flatten()) == list(range(32))
    for rows in dealt:
        for row, own in zip(rows, parts(make_batch(WORLD, lengths[rows], rows, 3)), strict=True):
            assert all(torch.equal(a, b) for a, b in zip(own, whole[row], strict=True))


def test_steps_and_seeds_differ():
    lengths, rows = np.full(8, 30), np.arange(8)
    base = make_batch(WORLD, lengths, rows, 3)
    for world, step in ((WORLD, 4), (World(items=60, topics=4, seed=8), 3)):
        other = make_batch(world, lengths, rows, step)
        same = (other.items == base.items).float().mean()
        assert 0 < same < 0.3, "independent rows agree by chance alone"
    drawn = [
        Traffic(seed=seed).sample(step, 64).tolist() for seed, step in ((0, 0), (0, 1), (1, 0))
    ]
    assert drawn[0] != drawn[1] != drawn[2] != drawn[0]


def test_logits_are_what_the_text_says():
    lengths = np.array([0, 1, 2, 17, 40])
    batch = make_batch(WORLD, lengths, np.arange(5), 0)
    bare = make_batch(WORLD, np.zeros(5, dtype=np.int64), np.arange(5), 0)  # bias and quality
    for i, (events, row) in enumerate(parts(batch)):
        interest, (_, topics, likes, _), (_, shown, _, logit) = 0.0, events.tolist(), row.tolist()
        for j, (topic, like) in enumerate(zip(topics, likes, strict=True)):
            age = np.floor(np.log2(len(topics) - j))
            weight = 2 if j and topics[j - 1] == topic else 1
            interest += (topic == shown) * (1 if like else -1) * weight * 2 ** (-age / 2)
        right = bare.logit[i].item() + WORLD.strength * interest
        assert logit == pytest.approx(right, abs=1e-5)


def test_nothing_predicts_better_than_the_true_probabilities():
    lengths = Traffic("half", 30).sample(0, 20_000)
    batch = make_batch(WORLD, lengths, np.arange(20_000), 0)
    best, loss = (
        bayes_loss(batch.logit).item(),
        torch.nn.functional.binary_cross_entropy_with_logits,
    )
    found = loss(batch.logit, batch.label).item()
    assert found == pytest.approx(best, abs=0.01), "labels are drawn from the probabilities"
    for other in (0.8 * batch.logit, 1.25 * batch.logit, batch.logit + 0.2):
        assert loss(other, batch.label) > found
    assert normalized_entropy(best, batch.label) < 0.8 < auc(batch.logit, batch.label)


@pytest.mark.parametrize("law", LAWS)
@pytest.mark.parametrize("rows", ROWS)
def test_lengths_of_every_law(law, rows):
    lengths = Traffic(law, 100, rows, cold=0.25).sample(0, 64)
    assert lengths.shape == (64,) and lengths.max() <= 100 and (lengths == 0).sum() >= 16


def test_balance_of_ranks():
    lengths = Traffic("ml20m", 2048).sample(0, 128)
    work = {how: cost(lengths, 4096.0)[deal(lengths, 4, how)].sum(1) for how in DEALS}
    skew = {how: loads.max() / loads.mean() for how, loads in work.items()}
    assert skew["balanced"] < 1.02 < skew["snake"] < skew["sorted"], skew
