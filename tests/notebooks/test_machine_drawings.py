"""Pictures of the machine: to scale, with the texts they are told, and the same each time."""

import re
import xml.etree.ElementTree as xml

import pytest

from notebooks.operator import _machine_drawings as drawn

SPLIT = [("consumers", 8, 240), ("producer", 4, 24)]


def boxes(svg: str) -> list[tuple[float, float]]:
    """(x, width) of each box."""
    found = re.findall(r'<rect x="([\d.]+)" y="[\d.]+" width="([\d.]+)"', svg)
    return [(float(x), float(width)) for x, width in found]


def texts(svg: str) -> set[str]:
    return {node.text for node in xml.fromstring(svg).iter() if node.tag.endswith("text")}


def test_registers_are_drawn_to_scale():
    (_, whole), (first, wide), (second, narrow) = boxes(drawn.registers({"v8": SPLIT}, 65536))
    assert wide / whole == pytest.approx(8 * 32 * 240 / 65536)
    assert narrow / wide == pytest.approx(0.05) and second == pytest.approx(first + wide)


def test_registers_that_do_not_fit_are_refused():
    with pytest.raises(ValueError, match="must fit into 65536 registers, got 81920"):
        drawn.registers({"too many": [("all", 16, 160)]}, 65536)


def test_a_phase_that_begins_is_coloured():
    before, after = drawn.Moment("full", 0, 64, 0), drawn.Moment("landed", 1, 0, 1)
    svg = drawn.barrier([before, after])
    assert re.findall(r'fill-opacity="([\d.]+)"', svg) == ["0.12", "0.25"]
    assert {"phase 0", "bytes: 64", "parity done: 1", "parity done: 0"} <= texts(svg)


def test_an_sm_shows_what_each_quarter_has():
    unit = drawn.Unit(65536, 227, 128, 16, 4096, 128)
    assert {"16 Ki x 32 bits", "1,024 FLOP/cycle", "x 4", "128 bytes a cycle", "60 MiB"} <= texts(
        drawn.sm(unit, 132, 60)
    )


def test_code_is_escaped_and_pictures_repeat():
    lines = [("PTX", "a line", "setp.lt p, a < b;"), ("SASS", "another", "ISETP")]
    assert "setp.lt p, a < b;" in texts(drawn.stages(lines))
    assert drawn.stages(lines) == drawn.stages(lines) and drawn.operands() == drawn.operands()
