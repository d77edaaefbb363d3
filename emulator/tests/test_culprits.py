"""A finding names the mistake: of 28 planted ones, for how many a line in the report is near."""

import re
import sys
from unittest import mock

import pytest

import tritonemu
from tritonemu.messages import explain, finding_as_json

from .planted import MISTAKES, PIPELINES
from .tutorials import cases

NEAR = 5
# Of 28: with the lines that use the barriers of a report, and by its places alone.
FOUND_NEAR, FOUND_NEAR_BY_PLACES = 27, 23


def _named(error: tritonemu.EmulatorError, file: str) -> tuple[set[int], set[int]]:
    """Lines of a file that a report names: its places, and those where its barriers are used."""
    said = f"{error}\n{explain(error)}"
    places = {int(line) for line in re.findall(rf"{re.escape(file)}:(\d+)", said)}
    uses: set[int] = set()
    for barrier in finding_as_json(error)["barriers"]:
        assert f"{barrier['name']}: {barrier['count']} arrival" in said
        uses |= {*barrier["lines"]}
    return places, uses


def _distances(mistake, folder) -> tuple[str, int, int]:
    """The class of the finding, and how far its nearest line is: in all, and of the places."""
    pipeline = PIPELINES[mistake.pipeline]
    source, planted = mistake.planted()
    path = folder / pipeline.path.name
    path.write_text(source)
    with mock.patch.dict(sys.modules):
        module = cases.load.__wrapped__(str(path))
    with pytest.raises(tritonemu.EmulatorError) as raised:
        pipeline.run(module)
    places, uses = _named(raised.value, str(path))
    nearest = (min(abs(line - planted) for line in lines) for lines in (places | uses, places))
    return raised.type.__name__, *nearest


@pytest.mark.sweep
@pytest.mark.tlx
def test_reports_name_a_line_near_the_mistake(tmp_path):
    assert len(MISTAKES) == 28
    distances = []
    for mistake in MISTAKES:
        distances.append(_distances(mistake, tmp_path))
        print(mistake.pipeline, mistake.kind, *distances[-1], sep=", ")
    assert sum(distance <= NEAR for _, distance, _ in distances) >= FOUND_NEAR
    assert sum(distance <= NEAR for _, _, distance in distances) >= FOUND_NEAR_BY_PLACES


@pytest.mark.tlx
@pytest.mark.parametrize("name", PIPELINES)
def test_the_pipelines_are_right_without_a_mistake(name):
    pipeline = PIPELINES[name]
    with mock.patch.dict(sys.modules):
        pipeline.run(cases.load.__wrapped__(str(pipeline.path)))
