"""Pictures of the machine: to scale."""

import re

import pytest

from notebooks.operator import _machine_drawings as drawn

SPLIT = [("consumers", 8, 240), ("producer", 4, 24)]


def boxes(svg: str) -> list[tuple[float, float]]:
    """(x, width) of each box."""
    found = re.findall(r'<rect x="([\d.]+)" y="[\d.]+" width="([\d.]+)"', svg)
    return [(float(x), float(width)) for x, width in found]


def test_registers_are_drawn_to_scale():
    (_, whole), (first, wide), (second, narrow) = boxes(drawn.registers({"v8": SPLIT}, 65536))
    assert wide / whole == pytest.approx(8 * 32 * 240 / 65536)
    assert narrow / wide == pytest.approx(0.05) and second == pytest.approx(first + wide)


def test_registers_that_do_not_fit_are_refused():
    with pytest.raises(ValueError, match="must fit into 65536 registers, got 81920"):
        drawn.registers({"too many": [("all", 16, 160)]}, 65536)
