"""Sequences of calls on shared objects: those that once gave wrong answers, and random ones."""

import pytest

from tests.stateful.batches import forget_activation
from tests.stateful.machine import LINES_OF_TWO, Step, faults_of, lines_of, shrunk
from tests.stateful.world import World, walked

V4 = "v4_warp_specialized_backward"
ONE_LAYER = {"cache": 1}
BATCH = {"change": ((2, 0, 1), (1, 0, 7))}

FAULTS = {
    "a list without targets, by backward v4": [
        Step("plan", q=3, options="causal", impl=V4),
        Step("plan", q=3, options="targets", impl=V4),
    ],
    "a list without targets, by auto": [
        Step("plan", options="causal", head_dim=256),
        Step("plan", options="targets", head_dim=256),
    ],
    "a list without targets, results": [
        Step("kernel", options="causal", head_dim=256),
        Step("kernel", options="contexts", head_dim=256),
    ],
    "a list whose launch was noted and not made": [
        Step("recorded"),
        Step("kernel"),
    ],
    "two appends, and the first is extended": [
        Step("append", **ONE_LAYER),
        Step("append", **ONE_LAYER),
        Step("extend", at=1, **ONE_LAYER),
    ],
    "two appends, and only the second is extended": [
        Step("append", **ONE_LAYER),
        Step("append", **ONE_LAYER),
        Step("extend", **ONE_LAYER),
    ],
    "pages from before the first append": [
        Step("pages"),
        Step("append"),
        Step("extend", whole=0),
    ],
    "an edit, and not yet its rows": [
        Step("append", count=9, **ONE_LAYER),
        Step("extend", **ONE_LAYER),
        Step("edit", **ONE_LAYER),
        Step("pages", **ONE_LAYER),
        Step("candidates", **ONE_LAYER),
        Step("score", **ONE_LAYER),
    ],
    "an append that nobody wrote": [
        Step("append"),
        Step("pages"),
        Step("read"),
        Step("candidates"),
        Step("score"),
    ],
    "an append that one layer wrote": [
        Step("append"),
        Step("write"),
        Step("pages"),
        Step("candidates", layer=1),
        Step("candidates"),
    ],
    "the pages of another user": [
        Step("append", count=9),
        Step("write"),
        Step("evict"),
        Step("append", users=(1,), count=9),
        Step("read"),
    ],
    "pages of inference mode, and then gradients": [
        Step("append", mode="inference"),
        Step("write"),
        Step("pages", mode="inference"),
        Step("score", learns=True),
    ],
    "a write with a graph": [
        Step("append"),
        Step("write", learns=True),
    ],
    "queries that are trained": [
        Step("change"),
        Step("train"),
        Step("change"),
        Step("value"),
    ],
    "sums of trained queries, stored and loaded": [
        Step("change"),
        Step("train"),
        Step("save"),
        Step("again"),
        Step("load"),
        Step("value"),
    ],
    "an exact sum whose events were not alone": [
        Step("change", at=1, **BATCH),
        Step("value", at=1),
    ],
    "parts of a sum under autocast": [
        Step("change", at=3, mode="autocast"),
        Step("value", at=3),
    ],
}
"""Each gave a wrong answer once; the machine has shortened it."""


def at_night(count: int) -> list:
    """Numbers below `count`, all but the first at night."""
    return [0, *(pytest.param(i, marks=pytest.mark.nightly) for i in range(1, count))]


@pytest.fixture(autouse=True)
def _forgotten():
    yield
    forget_activation()


def said(faults: list, steps: list[Step]) -> str:
    return "\n".join([*(f"{x.operation}: {x.kind}: {x.note}" for x in faults), *map(str, steps)])


@pytest.mark.parametrize("steps", FAULTS.values(), ids=FAULTS)
def test_what_once_was_wrong(steps):
    faults = faults_of(World, steps)
    assert not faults, said(faults, steps)


AGAIN = [
    Step("append", users=(1,), count=9, **ONE_LAYER),
    Step("write", **ONE_LAYER),
    *(Step(name, at=at, **ONE_LAYER) for name in ("read", "score") for at in (0, 1)),
]
INTERRUPTED = {
    "append": (
        [Step("serve", users=(0, 1), **ONE_LAYER)],
        Step("append", users=(1, 0), **ONE_LAYER),
        [Step("pages", users=(0, 1), **ONE_LAYER), *AGAIN],
    ),
    "extend": ([Step("append", **ONE_LAYER)], Step("extend", **ONE_LAYER), AGAIN),
    "write": ([Step("append", **ONE_LAYER)], Step("write", **ONE_LAYER), AGAIN),
    "edit": ([Step("serve", count=9, **ONE_LAYER)], Step("edit", at=1, **ONE_LAYER), AGAIN),
    "evict": ([Step("serve", count=9, **ONE_LAYER)], Step("evict", **ONE_LAYER), AGAIN),
    "sums": ([Step("change", **BATCH)], Step("change", name="delete", **BATCH), [Step("value")]),
    "fp32 sums": (
        [Step("change", at=3, **BATCH)],
        Step("change", at=3, name="delete", **BATCH),
        [Step("value", at=3)],
    ),
    "loaded sums": ([Step("change"), Step("save")], Step("load"), [Step("value")]),
}
"""Steps, one that fails, and others after it."""


@pytest.mark.parametrize("name", INTERRUPTED)
def test_a_call_that_fails_at_any_line(name):
    before, step, after = INTERRUPTED[name]
    count = lines_of(World, before, step)
    for line in {*range(1, count, -(-count // 15)), *range(max(count - 25, 1), count + 1)}:
        steps = [*before, Step(step.name, fail=line, **step.arguments), *after]
        faults = faults_of(World, steps)
        assert not faults, said(faults, steps)


@pytest.mark.parametrize("first", at_night(20))
def test_a_second_thread_at_any_line(first):
    """Each of two requests has what fits the cache alone."""
    for line in LINES_OF_TWO[first::20]:
        steps = [Step("serve", users=(0,)), Step("requests", counts=(13, 25), line=line)]
        faults = faults_of(World, [*steps, Step("requests")])
        assert not faults, said(faults, steps)


@pytest.mark.parametrize("seed", at_night(50))
def test_walks(request, seed):
    """Random steps; at night 50,000."""
    steps = 1000 if request.config.option.nightly else 300
    walks = walked(request.config.option.seed * 1000 + seed, steps)
    for key, (fault, _, taken) in walks.faults.items():
        pytest.fail(said([fault], shrunk(World, taken, key)))
    assert walks.answered.total() > steps / 5, "a machine that refuses everything is no test"
