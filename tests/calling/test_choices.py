"""The order of "auto" is the measured one, for such calls, at the nearest measured shape."""

from types import SimpleNamespace

import pytest
import torch

from gdpa_kernels.block_attention import choices as of_blocks
from gdpa_kernels.calling import ladder, rankings, rung
from gdpa_kernels.calling.rankings import Ranking
from gdpa_kernels.gdpa import choices as of_gdpa

UNMEASURED = of_blocks.UNMEASURED


@pytest.fixture
def order(monkeypatch):
    """`order` of an operator that reads a table."""

    def ordered(choices, table, *call):
        monkeypatch.setattr(choices, "load", lambda: table)
        choices.order.cache_clear()
        found = choices.order(*call)
        choices.order.cache_clear()
        return found

    return ordered


@pytest.mark.parametrize("choices", (of_gdpa, of_blocks))
def test_every_row_names_rungs_and_all_shapes_differ(choices):
    rows = choices.load()
    named = {impl for row in rows for impl in row.impls}
    if choices is of_gdpa:
        named |= {impl for impls in choices.UNMEASURED.values() for impl in impls}
    operator = "gdpa" if choices is of_gdpa else "block_attention"
    assert named <= {rung.impl for rung in ladder.LADDERS[operator] if not rung.is_lesson}
    assert rows and len({row.shape for row in rows}) == len(rows)


def test_only_a_lesson_saves_something_for_backward():
    """So what "auto" takes can be mixed."""
    for of in ladder.LADDERS["block_attention"]:
        assert of.saves == hasattr(of.module(), "empty_saved") <= of.is_lesson, of.impl


GDPA = (
    Ranking(((9, 0), "forward", "bfloat16", 128, 256, 256), ("short", "long"), "a"),
    Ranking(((9, 0), "forward", "bfloat16", 128, 2048, 2048), ("long", "short"), "a"),
    Ranking(((9, 0), "forward", "bfloat16", 64, 2048, 2048), ("narrow",), "a"),
    Ranking(((9, 0), "forward", "float16", 128, 512, 512), ("half",), "a"),
    Ranking(((9, 0), "forward", "bfloat16", 256, 512, 512), ("wide",), "a"),
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
        (("bfloat16", 136, 2048, 2048), "wide"),
        (("float16", 256, 512, 512), "wide"),
    ],
)
def test_the_nearest_shape_of_gdpa_decides(call, first, order):
    found = order(of_gdpa, GDPA, (9, 0), "forward", *call)
    assert found[0] == first and found[-2:] == ("v1_tiled", "reference")
    backward = order(of_gdpa, GDPA, (9, 0), "backward", *call)
    assert backward == of_gdpa.UNMEASURED["backward"]


@pytest.mark.parametrize("orders, expected", (
    ((), ""), (("ab",), "ab"), (("b", "abc"), "abc"), (("bd", "abcd"), "abcd"),
    (("ba", "abc"), "bac"), (("c", "ab"), "cab"), (("b", "ac", "cb"), "acb"),
))  # fmt: skip
def test_what_was_not_compared_did_not_lose(orders, expected):
    """It has its place from the nearest ranking that has it."""
    assert "".join(rankings.merged(orders)) == expected


BLOCKS = (
    Ranking(((9, 0), "bfloat16", "forward", 0, 64), ("narrow",), "a"),
    Ranking(((9, 0), "bfloat16", "forward", 0, 128), ("wide", "narrow"), "a"),
    Ranking(((9, 0), "float16", "forward", 0, 128), ("half",), "a"),
    Ranking(((9, 0), "bfloat16", "backward", 0, 128), ("back",), "a"),
    Ranking(((9, 0), "bfloat16", "forward", 1, 128), ("turned",), "a"),
)


@pytest.mark.parametrize(
    "call, expected",
    [
        (("bfloat16", "forward", False, 64), ("wide", "narrow", "half", *UNMEASURED)),
        (("bfloat16", "forward", False, 256), ("wide", "narrow", "half", *UNMEASURED)),
        (("float16", "forward", False, 64), ("half", "wide", "narrow", *UNMEASURED)),
        (("bfloat16", "backward", False, 64), ("back", *UNMEASURED)),
        (("bfloat16", "forward", True, 64), ("turned", *UNMEASURED)),
        (("bfloat16", "backward", True, 128), UNMEASURED),
    ],
    ids=str,
)
def test_a_call_of_blocks_gets_the_row_of_its_kind(call, expected, order):
    assert order(of_blocks, BLOCKS, (9, 0), *call) == expected


@pytest.mark.parametrize("direction", rung.DIRECTIONS)
def test_what_was_not_measured_runs_what_runs_anywhere(direction):
    last = of_gdpa.UNMEASURED[direction]
    for capability in ((9, 1), (10, 0), (10, 3)):
        found = of_gdpa.order(capability, direction, "bfloat16", 128, 1024, 1024)
        assert found == tuple(impl for impl in last if impl != "v0_eager")
        assert of_blocks.order(capability, "bfloat16", direction, False, 128) == UNMEASURED
    assert of_gdpa.order(None, direction, "float32", 64, 10, 10) == ("reference",)
    assert of_blocks.order(None, "bfloat16", direction, True, 128) == UNMEASURED
    general = ladder.rung(last[-1]).requires
    tensor = torch.zeros(1, 1, 3)
    assert general.device_problem(torch.device("cpu")) is None
    assert general.tensors_problem(tensor, tensor, tensor) is None


@pytest.mark.parametrize("dtype", ("bfloat16", "float16"))
def test_auto_never_takes_what_rounds_in_every_step(dtype):
    for device in (None, (8, 0), (9, 0), (10, 0)):
        assert "v0_eager" not in of_gdpa.order(device, "forward", dtype, 264, 1024, 1024)


@pytest.mark.parametrize("measured_on", [(9, 0), (10, 0)])
def test_a_record_of_another_minor_version_does_not_count(measured_on, monkeypatch, order):
    """On a pretended 10.3, plain rungs until that GPU has been measured."""
    first, last = (
        (Ranking((gpu, "forward", "bfloat16", 64, 9, 9), ("b6_pair_stream",), "a"),)
        for gpu in (measured_on, (10, 3))
    )
    monkeypatch.setattr(rung, "_gpu_capability", lambda index: (10, 3))
    q = torch.zeros(9, 1, 64, dtype=torch.bfloat16)
    batch = SimpleNamespace(device=torch.device("cuda", 0), dtype=q.dtype, q=q, k=q, v=q, extras={})
    call = rung.capability(batch.device), "forward", "bfloat16", 64, 9, 9
    for table, expected in ((first, "v1_tiled"), (first + last, "b6_pair_stream")):
        found = order(of_gdpa, table, *call)
        assert ladder.resolve("auto", "gdpa", "forward", batch, lambda f=found: f).impl == expected


def test_another_header_is_refused():
    with pytest.raises(ValueError, match="choices.csv must have the columns .*, got"):
        rankings.parse("capability,impl\n9,v0_eager\n", of_gdpa.COLUMNS)
