"""Published exhibits beside ours: sentences that follow the numbers, links that lead somewhere."""

import math
import re
from pathlib import Path

import pandas as pd
import pytest

from gdpa_lab.report import style
from gdpa_lab.report.chapter import Chapter
from notebooks.tools import _published
from notebooks.tools._published import Exhibit, compared

NOTEBOOKS = Path(__file__).resolve().parents[2] / "notebooks"
LENGTHS = [256, 1024, 2048]


def lead(*values: float) -> pd.Series:
    return pd.Series(values, LENGTHS)


@pytest.mark.parametrize(
    ("ours", "theirs", "holds", "differs"),
    [
        (lead(1.5, 1.2, 1.1), lead(1.9, 1.3, 1.2), "at every length, most at 256.",
         "1.10 to 1.50 times as fast, not 1.20 to 1.90."),
        (lead(1.5, 1.2, 0.9), lead(1.1, 1.3, 1.2), "at 256 and 1,024.",
         "Behind at 2,048; 0.90 to 1.50 times as fast, not 1.10 to 1.30."),
        (lead(0.9, 0.9, 0.8), lead(1.1, 1.3, 1.2), "Nothing.",
         "Behind at 256, 1,024 and 2,048; 0.80 to 0.90 times as fast, not 1.10 to 1.30."),
    ],
)  # fmt: skip
def test_the_sentences_follow_the_leads(ours, theirs, holds, differs):
    said = compared(ours, theirs)
    assert said[0].removeprefix("Ahead of every baseline ") == holds
    assert said[1] == differs


def exhibit(**changes) -> Exhibit:
    frame = pd.DataFrame({"lead": [1.5, 1.2]}, ["256", "512"])
    of = {"title": "a chart", "target": "forward/results#fig-x", "measured": frame,
          "published": 2 * frame, "holds": "", "differs": "", "records": ()}  # fmt: skip
    return Exhibit(**of | changes)


def test_a_small_chart_has_both_lines_and_a_link_for_both_widths():
    names = pd.DataFrame({"gain": [1.7, 10.0]}, ["a kernel", "PyTorch"])
    gap = pd.DataFrame({"gain": [3.5, math.nan]}, names.index)
    chart = _published.small_multiples([exhibit(), exhibit(measured=names, published=gap)])
    first, second = chart.axes
    marked = {line.get_label(): line for line in first.lines if line.get_marker() in "os"}
    ours, theirs = (marked[source] for source in _published.SOURCES)
    assert list(ours.get_ydata()) == [1.5, 1.2] and list(theirs.get_ydata()) == [3.0, 2.4]
    assert ours.get_linewidth() > 0 and {x.get_linewidth() for x in second.lines[:2]} == {0}
    assert second.get_ylim()[0] == 0 and second.get_ylim()[1] > 10
    svg = chart.to_svg()
    assert svg.count('href="../forward/results.html#fig-x"') == 4 and 'data-form="narrow"' in svg
    with pytest.raises(ValueError, match="shown must hold an exhibit, got none"):
        _published.small_multiples([])


def test_lines_of_several_kinds_are_named_once():
    columns = ["forward, fill 0.7", "backward, fill 0.7", "forward, fill 1.0"]
    table = pd.DataFrame([[1.0, 2.0, 1.1]] * 2, ["1k", "2k"], columns)
    (axis,) = _published.small_multiples([exhibit(measured=table, published=table)]).axes
    assert [text.get_text() for text in axis.texts] == ["forward", "backward"]


@pytest.fixture(scope="module")
def every() -> list[Exhibit]:
    return _published.exhibits(Chapter("tools/published"))


def test_all_charts_and_tables_are_shown_and_lead_to_an_exhibit(every):
    assert [x.title.partition(":")[0] for x in every[6:]] == [f"table {n}" for n in (5, 6, 7, 8)]
    assert len(every) == 10 and len({x.target for x in every}) == 6
    for x in every:
        page, _, name = x.target.partition("#")
        source = (NOTEBOOKS / f"{page}.py").read_text()
        assert re.search(rf'name: {name}\b|"{name}"', source), x.target
        assert x.records and x.measured.notna().any(axis=None)
        assert list(x.measured) == list(x.published)
        for sentence in (x.holds, x.differs):
            assert sentence.endswith(".") and len(sentence.split()) < 20


def test_a_doubtful_bar_is_no_baseline(every):
    cross = next(x for x in every if x.title == "cross backward, full")
    bars = pd.read_csv(NOTEBOOKS.parent / "data/published/gdpa_figures.csv")
    bars = bars[bars["figure"] == "gdpa-cross-bwd-full"].pivot(
        index="length", columns="kernel", values="tflops"
    )
    sound = bars["cutedsl_gdpa"] / bars[["triton_gdpa", "cutlass_fmha"]].max(axis=1)
    assert cross.published["lead"].tolist() == pytest.approx(sound.tolist())


def test_the_narrow_form_is_one_column(every):
    with style.narrowed():
        chart = _published.small_multiples(every[:3])
    chart.draw_without_rendering()
    assert len({round(axis.get_position().x0, 2) for axis in chart.axes}) == 1
