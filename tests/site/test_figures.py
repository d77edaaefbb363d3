"""The figures of the built book: one label one colour, names in words, one number of decimals."""

import re
from collections import defaultdict

import pytest
from bs4 import BeautifulSoup

from gdpa_kernels.calling import ladder
from gdpa_lab.measuring.baselines import BASELINES, BLOCK_BASELINES
from gdpa_lab.report.roles import PUBLISHED, role_colour
from gdpa_lab.report.style import THEMES

NEUTRAL = {"ink", "page"}
CODE_NAMES = {
    name for name in (*(rung.impl for rungs in ladder.LADDERS.values() for rung in rungs),
                      *BASELINES, *BLOCK_BASELINES, *PUBLISHED) if "_" in name
}  # fmt: skip


@pytest.fixture(scope="module")
def charts(site, toc) -> list[tuple[str, BeautifulSoup]]:
    """Every drawing of the book with the page and form that it is on."""
    drawn = []
    for name in toc:
        page = BeautifulSoup((site / name).read_text(encoding="utf-8"), "html.parser")
        drawn += [(f"{name}, {' '.join(svg['class'])}", svg) for svg in page.select("svg.chart")]
    return drawn


def variables(element) -> set[str]:
    return set(re.findall(r"var\(--([\w-]+)\)", str(element)))


def coloured(svg):
    """Pairs of a label and the variables that it, or its mark in a legend, is coloured with."""
    for legend in svg.select('g[id*="legend_"]'):
        marks: set[str] = set()
        for part in legend.find_all("g", recursive=False):
            if "text_" in part.get("id", ""):
                yield part.get_text(" ", strip=True), marks - NEUTRAL or marks & {"ink"}
                marks = set()
            else:
                marks |= variables(part)
    for part in [*svg.select('g[id*="text_"]'), *svg.select("text")]:
        if part.name == "g" or part.find_parent("g", id=re.compile("text_")) is None:
            label = part.get_text(" ", strip=True)
            if shades := variables(part) - NEUTRAL:
                yield label, shades


def test_one_label_has_one_colour_everywhere(charts):
    found = defaultdict(lambda: defaultdict(set))
    for where, svg in charts:
        for label, shades in coloured(svg):
            if re.search("[A-Za-z]", label):
                for shade in shades:
                    found[label][shade].add(where)
    several = {label: dict(by) for label, by in found.items() if len(by) > 1}
    assert not several, "\n".join(f"{label}: {by}" for label, by in several.items())
    for label, by in found.items():
        (shade,) = by
        expected = role_colour(label)
        if expected not in (THEMES["ink"][0],):
            assert THEMES[shade][0] == expected, f"{label} is {shade}: {by}"


def test_no_label_is_a_code_name(charts):
    said = {
        (word, where)
        for where, svg in charts if "timeline" not in where and "steps" not in where
        for text in svg.select("text")
        for word in re.findall(r"\w+", text.get_text()) if word in CODE_NAMES
    }  # fmt: skip
    assert not said, sorted(said)


def test_numbers_in_a_column_have_the_same_decimals(charts):
    mixed = []
    for where, svg in charts:
        for axes in svg.select('g[id*="axes_"]'):
            texts = [t.get_text(strip=True) for t in axes.select('g[id*="text_"] text')
                     if not t.find_parent("g", id=re.compile("axis_|tick"))]  # fmt: skip
            numbers = [x for x in texts if re.fullmatch(r"−?[\d,]+(\.\d+)?", x)]
            decimals = {len(x.partition(".")[2]) for x in numbers}
            sizes = [abs(float(x.replace("−", "-").replace(",", ""))) for x in numbers]
            sizes = [x for x in sizes if x]
            if len(decimals) > 1 and max(sizes) < 100 * min(sizes):
                mixed.append(f"{where}: {numbers[:8]}")
    assert not mixed, "\n".join(mixed)
