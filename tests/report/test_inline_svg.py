"""The Sphinx extension that puts SVG pictures into the page."""

from __future__ import annotations

import importlib
import re
import sys
from xml.dom import minidom

import pandas as pd
import pytest

from gdpa_lab.measuring import record
from gdpa_lab.report import charts, style

sys.path.append(str(record.ROOT / "book" / "_ext"))
inline_svg = importlib.import_module("inline_svg")
STYLE = "<style>.x { fill: red }</style>"
TIMELINE = f'<svg class="gdpa-timeline" role="img" width="9">{STYLE}</svg>'


@pytest.fixture
def chart() -> str:
    values = pd.Series({"v1": 1.0, "v2": 2.0})
    return charts.bars(values, xlabel="TFLOP/s", highlight=["v1"]).to_svg()


def test_a_file_with_both_forms_is_xml_that_shows_the_wide_one(chart):
    (root,) = minidom.parseString(chart).getElementsByTagName("svg")[:1]
    inner = root.getElementsByTagName("svg")
    assert [one.getAttribute("display") for one in inner] == ["none"]
    timeline = style.both(TIMELINE, TIMELINE)
    assert len(minidom.parseString(timeline).getElementsByTagName("svg")) == 2


def test_both_forms_stand_in_the_page_with_their_text(chart):
    shown = inline_svg.inlined(chart, 'Two "bars" & a line', "p1-")
    forms = re.findall(r"<svg [^>]*>", shown)
    assert [re.search(r'class="chart (\w+)"', form)[1] for form in forms] == ["wide", "narrow"]
    label = 'role="img" aria-label="Two &quot;bars&quot; &amp; a line"'
    assert all(label in form and 'display="none"' not in form for form in forms)
    assert shown.count(">TFLOP/s</text>") == 2


def test_a_page_has_its_own_style_and_ids_once(chart):
    shown = inline_svg.inlined(chart, "", "p1-") + inline_svg.inlined(chart, "", "p2-")
    assert "<style" not in shown and "<metadata" not in shown and "var(--rung-1)" in shown
    ids = re.findall(r'\bid="([^"]+)"', shown)
    assert ids and len(ids) == len(set(ids))
    used = set(re.findall(r"url\(#([^)]+)\)", shown)) | set(re.findall(r'href="#([^"]+)"', shown))
    assert used and used <= set(ids)


def test_a_picture_with_its_own_style_keeps_it_and_its_class():
    shown = inline_svg.inlined(style.both(TIMELINE, TIMELINE), "A", "p1-")
    assert shown.count(STYLE) == 2
    assert 'class="chart narrow gdpa-timeline" role="img" aria-label="A"' in shown
    assert shown.count('role="img"') == 2
