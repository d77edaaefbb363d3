"""The order of "auto" is the measured one, for such calls, and only what can be mixed is in it."""

import pytest

from gdpa_kernels.block_attention import choices
from gdpa_kernels.block_attention.choices import UNMEASURED
from gdpa_kernels.calling import ladder
from gdpa_kernels.calling.rankings import Ranking

OPERATOR = "block_attention"


def test_every_row_names_rungs_and_all_shapes_differ():
    rows = choices.load()
    assert {impl for row in rows for impl in row.impls} <= set(ladder.impls(OPERATOR))
    assert len({row.shape for row in rows}) == len(rows)


def test_what_saves_something_for_backward_is_known():
    saves = {
        rung.impl for rung in ladder.LADDERS[OPERATOR] if hasattr(rung.module(), "empty_saved")
    }
    assert saves == choices.SAVES and not saves & set(UNMEASURED)


TABLE = (
    Ranking(((9, 0), "bfloat16", "forward", 0, 64), ("v0_flash", "narrow"), "a"),
    Ranking(((9, 0), "bfloat16", "forward", 0, 128), ("wide", "v0_flash"), "a"),
    Ranking(((9, 0), "float16", "forward", 0, 128), ("half",), "a"),
    Ranking(((9, 0), "bfloat16", "backward", 0, 128), ("back",), "a"),
    Ranking(((9, 0), "bfloat16", "forward", 1, 128), ("turned",), "a"),
)


@pytest.mark.parametrize(
    "call, expected",
    [
        (("bfloat16", "forward", False, 64), ("narrow", *UNMEASURED)),
        (("bfloat16", "forward", False, 256), ("wide", *UNMEASURED)),
        (("float16", "forward", False, 64), ("half", *UNMEASURED)),
        (("bfloat16", "backward", False, 64), ("back", *UNMEASURED)),
        (("bfloat16", "forward", True, 64), ("turned", *UNMEASURED)),
        (("bfloat16", "backward", True, 128), UNMEASURED),
    ],
    ids=str,
)
def test_a_call_gets_the_row_of_its_kind(call, expected, monkeypatch):
    monkeypatch.setattr(choices, "load", lambda: TABLE)
    choices.order.cache_clear()
    found = choices.order((9, 0), *call)
    choices.order.cache_clear()
    assert found == expected


def test_what_was_not_measured_runs_what_runs_anywhere():
    for capability in ((9, 1), (10, 0), (10, 3)):
        assert choices.order(capability, "bfloat16", "forward", False, 128) == UNMEASURED
    assert choices.order(None, "bfloat16", "backward", True, 128) == UNMEASURED
