"""The order of "auto" is the measured one, at the nearest measured shape."""

from types import SimpleNamespace

import pytest
import torch

from gdpa_kernels.calling import ladder, rankings, rung
from gdpa_kernels.calling.rankings import Ranking
from gdpa_kernels.gdpa import choices
from gdpa_kernels.gdpa.choices import UNMEASURED


def test_every_row_names_products_and_all_shapes_differ():
    rows = choices.load()
    assert rows
    products = {rung.impl for rung in ladder.LADDERS["gdpa"] if not rung.is_lesson}
    assert {impl for row in rows for impl in row.impls} <= products
    assert {impl for impls in UNMEASURED.values() for impl in impls} <= products
    assert len({row.shape for row in rows}) == len(rows)


TABLE = (
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
def test_the_nearest_shape_decides(call, first, monkeypatch):
    monkeypatch.setattr(choices, "load", lambda: TABLE)
    choices.order.cache_clear()
    found = choices.order((9, 0), "forward", *call)
    backward = choices.order((9, 0), "backward", *call)
    choices.order.cache_clear()
    assert found[0] == first and found[-2:] == ("v1_tiled", "reference")
    assert backward == UNMEASURED["backward"]


@pytest.mark.parametrize("direction", rung.DIRECTIONS)
def test_what_was_not_measured_runs_what_runs_anywhere(direction):
    last = UNMEASURED[direction]
    for capability in ((9, 1), (10, 0), (10, 3)):
        found = choices.order(capability, direction, "bfloat16", 128, 1024, 1024)
        assert found == tuple(impl for impl in last if impl != "v0_eager")
    assert choices.order(None, direction, "float32", 64, 10, 10) == last
    general = ladder.rung(last[-1]).requires
    tensor = torch.zeros(1, 1, 3)
    assert general.of_device(torch.device("cpu")) is None
    assert general.of_call(tensor, tensor, tensor) is None


@pytest.mark.parametrize("dtype", ("bfloat16", "float16"))
def test_auto_never_takes_what_rounds_in_every_step(dtype):
    for device in (None, (8, 0), (9, 0), (10, 0)):
        assert "v0_eager" not in choices.order(device, "forward", dtype, 264, 1024, 1024)


@pytest.mark.parametrize("measured_on", [(9, 0), (10, 0)])
def test_a_record_of_another_minor_version_does_not_count(measured_on, monkeypatch):
    """On a pretended 10.3, plain rungs until that GPU has been measured."""
    first, last = (
        (Ranking((gpu, "forward", "bfloat16", 64, 9, 9), ("b6_pair_stream",), "a"),)
        for gpu in (measured_on, (10, 3))
    )
    monkeypatch.setattr(rung, "_capability", lambda index: (10, 3))
    q = torch.zeros(9, 1, 64, dtype=torch.bfloat16)
    batch = SimpleNamespace(device=torch.device("cuda", 0), dtype=q.dtype, q=q, k=q, v=q)

    def order():
        return choices.order(rung.capability(batch.device), "forward", "bfloat16", 64, 9, 9)

    for table, expected in ((first, "v1_tiled"), (first + last, "b6_pair_stream")):
        monkeypatch.setattr(choices, "load", lambda table=table: table)
        choices.order.cache_clear()
        assert ladder.resolve("auto", "gdpa", "forward", batch, order).impl == expected
    choices.order.cache_clear()


def test_another_header_is_refused():
    with pytest.raises(ValueError, match="choices.csv must have the columns .*, got"):
        rankings.parse("capability,impl\n9,v0_eager\n", choices.COLUMNS)
