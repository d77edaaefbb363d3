"""The order of "auto" is the measured one, at the nearest measured shape."""

import pytest
import torch

from gdpa_kernels import ladder, record
from gdpa_kernels.gdpa import choices
from gdpa_kernels.gdpa.choices import UNMEASURED, Choice


def test_the_table_is_what_the_records_say():
    """After measuring: python -m gdpa_kernels choices."""
    assert choices.PATH.read_text() == choices.render(choices.from_records(record.DATA_DIR))


def test_every_row_names_rungs_and_all_shapes_differ():
    rows = choices.load()
    assert rows
    assert {impl for row in rows for impl in row.impls} <= set(ladder.impls())
    assert len({row[:5] for row in map(_fields, rows)}) == len(rows)


def _fields(choice: Choice) -> tuple:
    sizes = choice.head_dim, choice.max_seqlen_q, choice.max_seqlen_k
    return (choice.capability, choice.dtype, *sizes, choice.impls)


TABLE = (
    Choice(9, "bfloat16", 128, 256, 256, ("short", "long"), "a"),
    Choice(9, "bfloat16", 128, 2048, 2048, ("long", "short"), "a"),
    Choice(9, "bfloat16", 64, 2048, 2048, ("narrow",), "a"),
    Choice(9, "float16", 128, 512, 512, ("half",), "a"),
)


@pytest.mark.parametrize(
    "call, first",
    [
        (("bfloat16", 128, 256, 256), "short"),
        (("bfloat16", 128, 700, 700), "short"),  # 1.45 doublings from 256, 1.55 from 2048
        (("bfloat16", 128, 760, 760), "long"),
        (("bfloat16", 128, 0, 0), "short"),
        (("bfloat16", 72, 2000, 2000), "narrow"),
        (("float16", 128, 4096, 4096), "half"),
    ],
)
def test_the_nearest_shape_decides(call, first, monkeypatch):
    monkeypatch.setattr(choices, "load", lambda: TABLE)
    choices.order.cache_clear()
    found = choices.order(9, *call)
    choices.order.cache_clear()
    assert found[0] == first and found[-len(UNMEASURED) :] == UNMEASURED


def test_what_was_not_measured_runs_what_runs_anywhere():
    assert choices.order(10, "bfloat16", 128, 1024, 1024) == UNMEASURED
    assert choices.order(None, "float32", 64, 10, 10) == UNMEASURED
    general = ladder.rung(UNMEASURED[-1]).requires
    tensor = torch.zeros(1, 1, 3)
    assert general.of_device(torch.device("cpu")) is None
    assert general.of_call(tensor, tensor, tensor) is None


def test_another_header_is_refused():
    with pytest.raises(ValueError, match="choices.csv must have the columns .*, got"):
        choices.parse("capability,impl\n9,v0_eager\n")
