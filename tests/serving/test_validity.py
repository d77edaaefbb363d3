"""Which rows outlive a change: the rules against models that are computed again, in fp64."""

import itertools

import pytest
import torch
import torch.nn.functional as F

from gdpa_kernels.serving.validity import HistoryRules
from tests.models import rules_of

WIDTH, ROWS, LAYERS, MOST = 8, 12, 3, 40
MAKE = torch.Generator().manual_seed(7)
WEIGHTS = torch.randn(LAYERS, 4, WIDTH, WIDTH, generator=MAKE, dtype=torch.float64) / WIDTH**0.5
PLACES, AGES, BIAS = (
    torch.randn(2 * MOST, WIDTH, generator=MAKE, dtype=torch.float64) for _ in range(3)
)


def pairs(rules: HistoryRules, rows: int, ids: torch.Tensor, targets: int) -> torch.Tensor:
    """Bool `[rows, rows]`: which rows a row sees, by the definition of the masks."""
    history, contexts = rows - targets, rules.mask.num_contexts or 0
    ranks = (ids - max(contexts - 1, 0)).clamp(min=0)
    away = ranks[:, None] - ranks[None]
    seen = torch.ones(rows, rows, dtype=torch.bool)
    if rules.mask.causal:
        seen = (away > 0) | torch.eye(rows, dtype=torch.bool)
    if rules.mask.window is not None:
        seen &= away.abs() <= rules.mask.window
    seen[:contexts, :history] = True
    seen[history:] = torch.eye(rows, dtype=torch.bool)[history:]
    seen[history:, :history] = True
    return seen


def through(
    rules: HistoryRules, events: torch.Tensor, times: torch.Tensor, targets: int = 0
) -> list[torch.Tensor]:
    """What goes into each layer, and what comes out of the last one, `[rows, WIDTH]` each.

    Events carry their first features and a time. The last `targets` rows are candidates, which have
    the history's last position and time.
    """
    rows, history = len(events), len(events) - targets
    ids = torch.arange(rows)
    x = events
    if rules.positions == "index":
        x = x + PLACES[ids]
    if rules.positions == "from_end":
        x = x + PLACES[history - ids.clamp(max=history)]
    if rules.query_time:
        x = x + AGES[(times[history - 1] - times).clamp(0, MOST)]
    bias = torch.zeros(rows, rows, dtype=torch.float64)
    if rules.next_time:
        following = torch.cat((times[1:], times[-1:]))
        bias = BIAS[(following[:, None] - times[None]).abs().clamp(max=MOST), 0]
    seen = pairs(rules, rows, ids, targets)
    found = [x]
    for wq, wk, wv, wo in WEIGHTS[: rules.num_layers]:
        z = (x - x.mean(0)) / x.std(0) if rules.token_statistics else F.layer_norm(x, (WIDTH,))
        scores = F.silu((z @ wq) @ (z @ wk).mT + bias) * seen
        divisor = MOST if rules.constant_divisor else rows
        x = x + scores @ (z @ wv) / divisor @ wo
        found.append(x)
    if rules.token_statistics:  # keys and values are made of what is normalised
        found = [(x - x.mean(0)) / x.std(0) for x in found]
    return found


def inputs(rules: HistoryRules, events: torch.Tensor, times: torch.Tensor) -> list[torch.Tensor]:
    """What goes into each layer: its keys and values are functions of its rows."""
    return through(rules, events, times)[: rules.num_layers]


def wrong_rows(rules: HistoryRules, at: int) -> list[list[int]]:
    """Of each layer, which rows an event added (or deleted) at `at` changed, by computing twice."""
    make = torch.Generator().manual_seed(at)
    events = torch.randn(ROWS + 1, WIDTH, generator=make, dtype=torch.float64)
    times = torch.arange(ROWS + 1) * 2
    others = [i for i in range(ROWS + 1) if i != at]
    with_it = [x[others] for x in inputs(rules, events, times)]
    without = inputs(rules, events[others], times[others])
    return [
        ((one - other).abs().amax(1) > 1e-12).nonzero()[:, 0].tolist()
        for one, other in zip(with_it, without, strict=True)
    ]


OPTIONS = {
    "causal": (True, False), "window": (None, 0, 2), "positions": (None, "index", "from_end"),
    "num_contexts": (0, 2), "next_time": (False, True),
}  # fmt: skip
COMBINED = [
    options
    for values in itertools.product(*OPTIONS.values())
    if (options := dict(zip(OPTIONS, values, strict=True)))["causal"] or not options["num_contexts"]
]
ALONE = [{"query_time": True}, {"constant_divisor": False}, {"token_statistics": True}]


@pytest.mark.parametrize("options", COMBINED + ALONE, ids=str)
def test_no_row_changes_that_is_called_right(options):
    rules = rules_of(LAYERS, **options)
    for at in range(ROWS + 1):
        for found, told in zip(wrong_rows(rules, at), rules.changed(ROWS, at), strict=True):
            assert set(found) <= set(told), (at, found, told)


@pytest.mark.parametrize("options", COMBINED + ALONE, ids=str)
def test_an_append_is_refused_exactly_where_it_changes_a_row(options):
    rules = rules_of(LAYERS, **options)
    if any(wrong_rows(rules, ROWS)):
        with pytest.raises(ValueError, match="rules must keep cached rows right .* but "):
            rules.check_append()
        assert rules.kept(ROWS, ROWS) < ROWS
    else:
        rules.check_append()
        assert rules.kept(ROWS, ROWS) == ROWS


PRECISE = (
    {}, {"window": 2}, {"positions": "index"}, {"next_time": True}, {"causal": False},
    {"causal": False, "window": 2}, {"constant_divisor": False}, {"window": 2, "next_time": True},
)  # fmt: skip


@pytest.mark.parametrize("options", PRECISE, ids=str)
def test_what_is_called_wrong_is_wrong(options):
    """Where the wrong rows are one piece, the ranges are no wider than they must be."""
    rules = rules_of(LAYERS, **options)
    for at in (5, ROWS):
        found = wrong_rows(rules, at)
        assert [[x[0], x[-1]] if x else [] for x in found] == [
            [x.start, x.stop - 1] if x else [] for x in rules.changed(ROWS, at)
        ]


@pytest.mark.parametrize("layers", (1, LAYERS))
@pytest.mark.parametrize("options", COMBINED + ALONE, ids=str)
def test_candidates_are_refused_exactly_where_they_change_a_history(options, layers):
    rules, targets = rules_of(layers, **options), 3
    make = torch.Generator().manual_seed(2)
    events = torch.randn(ROWS + targets, WIDTH, generator=make, dtype=torch.float64)
    times = torch.arange(ROWS + targets) * 2
    alone = inputs(rules, events[:ROWS], times[:ROWS])
    followed = through(rules, events, times, targets)
    error = max((y[:ROWS] - x).abs().max() for x, y in zip(alone, followed, strict=False))
    if error > 1e-12:
        with pytest.raises(ValueError, match="a history right when candidates follow, but "):
            rules.check_candidates()
    else:
        rules.check_candidates()


@pytest.mark.parametrize("layers", (1, LAYERS))
@pytest.mark.parametrize("options", COMBINED + ALONE, ids=str)
def test_subtraction_is_refused_exactly_where_terms_depend_on_other_events(options, layers):
    """What an event gives to the other rows is the same with and without another event."""
    rules = rules_of(layers, **options)
    make = torch.Generator().manual_seed(3)
    events = torch.randn(ROWS, WIDTH, generator=make, dtype=torch.float64)
    times = torch.arange(ROWS) * 2

    def rows(*gone: int) -> torch.Tensor:
        left = [i for i in range(ROWS) if i not in gone]
        out = torch.full_like(events, torch.nan)
        out[left] = through(rules, events[left], times[left])[-1]
        return out

    worst = 0.0
    for one, other in ((5, 6), (ROWS - 2, ROWS - 1)):
        terms = (rows() - rows(one)) - (rows(other) - rows(one, other))
        worst = max(worst, terms[~terms.isnan()].abs().max().item())
    alone = rules.mask.window == 0 and not rules.mask.num_contexts  # no row sees another
    if worst > 1e-12 or (alone and layers > 1):
        with pytest.raises(ValueError, match="must give sums of terms that stay, but "):
            rules.check_subtraction()
    else:
        rules.check_subtraction()


def test_a_window_lets_a_deletion_go_only_so_far():
    rules = rules_of(4, window=3)
    assert rules.changed(100, 50) == [range(0), range(50, 53), range(50, 56), range(50, 59)]
    assert rules.kept(100, 50) == rules.kept(100, at=50) == 50  # its name until 0.3


@pytest.mark.parametrize(
    "options, told",
    [
        ({"num_layers": 0}, "num_layers must be an integer of at least 1, got 0"),
        ({"window": -1}, "window must be None or an integer of at least 0, got -1"),
        ({"positions": "end"}, "positions must be one of .*, got 'end'"),
        ({"causal": 1}, "causal must be"),
    ],
)
def test_wrong_arguments(options, told):
    with pytest.raises((TypeError, ValueError), match=told):
        rules_of(**options)


def test_a_place_lies_inside_the_history():
    with pytest.raises(ValueError, match="position must be at most rows, 3, got 4"):
        HistoryRules(1).changed(3, 4)
