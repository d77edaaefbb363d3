"""Charts of chapters: what each draws, read from the figure."""

import numpy as np
import pandas as pd
import pytest
from matplotlib.colors import to_hex
from matplotlib.patches import Rectangle

from _lib import rare_charts
from gdpa_lab.report import charts
from notebooks import card
from tests.report.extents import crossing


def test_lines_draw_what_is_within_and_mark_the_first():
    frame = pd.DataFrame({"a": [1e-3, 1.0, 1e3], "b": [1.0, 2.0, 3.0]}, index=[0.1, 1.0, 10.0])
    chart = charts.lines(
        frame, xlabel="x", ylabel="y", highlight=["a"], log="xy", ylim=(1e-2, 1e2),
        points={1.0: "one"},
    )  # fmt: skip
    axis = chart.axes[0]
    found = {tuple(np.round(line.get_ydata(), 6)) for line in axis.get_lines()}
    assert found == {(1.0,), (1.0, 2.0, 3.0)} and axis.get_yscale() == "log"
    assert [text.get_text() for text in axis.texts if text.get_text()] == ["a", "b", "one"]


def test_parts_of_a_bar_begin_where_the_one_before_ends():
    frame = pd.DataFrame({"a": [1.0, 2.0], "b": [3.0, 1.0]}, index=["x", "y"])
    chart = rare_charts.stacked(
        frame, xlabel="ms", looks={"a": "filled", "b": "hollow"}, inside=True
    )
    (axis,) = chart.axes
    bars = [(bar.get_x(), bar.get_width()) for bar in axis.patches]
    assert bars == [(0, 1), (0, 2), (1, 3), (2, 1)]
    assert [text.get_text() for text in axis.texts] == ["a\n1.0", "a\n2.0", "b\n3.0", "b\n1.0"]


def test_panels_share_a_scale_and_name_lines_at_their_ends():
    frame = pd.DataFrame({"a": [1.0, 2.0], "b": [3.0, None]}, index=[1000, 2000])
    frames = {"ours": frame, "theirs": frame + 1}
    chart = charts.lines(frames, xlabel="x", ylabel="y", highlight=["a"])
    left, right = chart.axes
    assert left.get_ylim() == right.get_ylim() == (0, 1.08 * 4)
    grey, strong = sorted(left.get_lines(), key=lambda line: len(line.get_xdata()))
    assert grey.get_color() == charts.GREY != strong.get_color()
    assert {text.get_text() for text in left.texts} == {"a", "b", "not timed at 2,000:\n   b"}
    assert (left.get_title("left"), right.get_title("left")) == ("ours", "theirs")


def test_a_missing_value_is_named_where_a_point_would_be():
    frame = pd.DataFrame({"a": [1.0, None, 3.0]}, index=[1, 2, 4])
    lines = charts.lines(frame, xlabel="x", ylabel="y", highlight=["a"])
    drawn = [
        lines,
        charts.dots(frame, xlabel="x"),
        rare_charts.heat(frame, label="x", low=0, high=4),
        charts.bars(pd.Series({"v1": 1.0, "v2": None}), xlabel="x", highlight=["v1"]),
    ]
    for chart in drawn:
        text = " ".join(text.get_text() for text in chart.axes[0].texts)
        assert "not timed" in text.replace("\n", " ")
    assert [len(line.get_xdata()) for line in lines.axes[0].get_lines()] == [1, 1], "no bridge"


def test_verdicts_write_their_words_and_know_no_others():
    frame = pd.DataFrame({"a": ["found", "missed"], "b": ["hangs", "cannot run"]}, index=["x", "y"])
    chart = rare_charts.verdicts(frame)
    texts = [text.get_text() for text in chart.axes[0].texts]
    assert texts == ["found", "hangs", "missed", "cannot run"]
    with pytest.raises(ValueError, match="got \\['perhaps'\\]"):
        rare_charts.verdicts(frame.replace("missed", "perhaps"))


def test_dots_write_each_value_and_draw_its_interval():
    frame = pd.DataFrame({"a": [2.0, 4.0], "b": [3.0, None]}, index=["x", "y"])
    chart = charts.dots(frame, xlabel="x", low=frame - 1, high=frame + 1, levels={"copy": 1})
    texts = [text.get_text() for text in chart.axes[0].texts]
    assert texts == ["copy", "2.00", "4.00", "3.00", "not timed"]
    spans = {tuple(path.vertices[:, 0]) for bars in chart.axes[0].collections
             for path in bars.get_paths()}  # fmt: skip
    assert {(1.0, 3.0), (3.0, 5.0), (2.0, 4.0)} <= spans


def test_dumbbells_lead_from_the_first_column_to_the_last_and_write_the_change():
    frame = pd.DataFrame({"forward v6": [80.0, 78.0], "forward v8": [88.0, 90.5]}, index=["a", "b"])
    (axis,) = charts.dumbbells({"forward v8": frame}, xlabel="%", change=True).axes
    assert [text.get_text() for text in axis.texts] == ["+10 %", "+16 %"]
    ways = [tuple(path.vertices[:, 0]) for path in axis.collections[0].get_paths()]
    assert ways == [(80, 88), (78, 90.5)]
    small, large = axis.lines
    assert small.get_color() == charts.role_colour("v6") != large.get_color()
    (axis,) = charts.dumbbells({"forward v8": frame}, xlabel="%").axes
    assert [text.get_text() for text in axis.texts] == ["80.0", "88.0", "78.0", "90.5"]


@pytest.mark.parametrize(
    "draw",
    [
        lambda x: charts.lines(x, xlabel="x", ylabel="y", highlight=["a"]),
        lambda x: rare_charts.stacked(x, xlabel="x", looks={"a": "filled"}),
        lambda x: rare_charts.scatter({"g": x.assign(b=1.0)}, xlabel="x", ylabel="y"),
        lambda x: rare_charts.swarm(x.assign(row="r").rename(columns={"a": "value"}), xlabel="x"),
    ],
)
def test_a_missing_value_is_refused_by_name(draw):
    frame = pd.DataFrame({"a": [1.0, None, *[3.0] * 20]}, index=range(1, 23))
    with pytest.raises(ValueError, match="every value must be there, got none for .+ at 2"):
        draw(frame)


def test_a_curve_may_end_early():
    frame = pd.DataFrame({"a": 1.0, "b": [3.0] * 12 + [None] * 8}, index=range(20))
    charts.lines(frame, xlabel="x", ylabel="y", highlight=["a"])


def test_a_swarm_counts_its_rows_and_sets_points_apart():
    table = pd.DataFrame({"row": ["one"] * 3 + ["rest"], "value": [1.0, 1.0, 10.0, 2.0]})
    (axis,) = rare_charts.swarm(table, xlabel="x", grey=["rest"], log=True).axes
    one, rest = axis.collections
    assert [label.get_text() for label in axis.get_yticklabels()] == ["one (3)", "rest (1)"]
    assert len({tuple(at) for at in one.get_offsets()}) == 3
    assert to_hex(rest.get_facecolor()[0]) == charts.GREY


@pytest.mark.parametrize(
    "draw",
    [
        lambda x: charts.lines(x, xlabel="x", ylabel="y", highlight=["a"]),
        lambda x: charts.dots(x, xlabel="x", low=x - 1, high=x + 1),
        lambda x: charts.bars(x["a"].set_axis(list("pqr")), xlabel="x", highlight=["q"]),
        lambda x: rare_charts.heat(x, label="x", low=0, high=5),
        lambda x: rare_charts.swarm(x.melt("b", var_name="row"), xlabel="x", levels={"two": 2}),
        lambda x: rare_charts.scatter({"g": x}, xlabel="x", ylabel="y"),
    ],
)
def test_the_same_input_gives_the_same_bytes(draw):
    frame = pd.DataFrame({"a": [1.0, 2.0, 3.0], "b": [2.0, 5.0, 4.0]}, index=[1, 2, 4])
    assert draw(frame).to_svg() == draw(frame.copy()).to_svg()


RUNGS = pd.Series({"v0: eager": 32.0, "v1: fused": 5.0, "v2: slower": 5.5, "v8: waits": 4.0})


def test_a_ladder_breaks_the_long_bar_pales_what_saves_nothing_and_crosses_it_with_peers():
    (axis,) = charts.ladder(
        RUNGS, pd.Series({"cuDNN": 4.5, "FlashAttention-2": 8.0}), xlabel="ms"
    ).axes
    bars = [bar for bar in axis.patches if isinstance(bar, Rectangle)]
    assert [bar.get_width() for bar in bars] == [1.07 * 8, 5, 5.5, 4] and axis.get_xlim()[0] == 0
    assert [bar.get_facecolor()[3] < 1 for bar in bars] == [False, False, True, False]
    texts = {text.get_text() for text in axis.texts}
    assert {"v1  fused", "32.00", "8.0 times as long", "1.12 times as fast as cuDNN"} <= texts
    assert {line.get_xdata()[0] for line in axis.lines} == {4.5, 8.0}


def test_texts_of_the_ladder_and_of_the_card_lie_inside_and_apart():
    peers = pd.Series({"cuDNN": 4.50, "FlashAttention-4": 4.52, "FlashAttention-2": 8.0})
    for figure in (
        charts.ladder(RUNGS, peers, xlabel="ms"),
        card.draw("Title", RUNGS, peers, "day"),
    ):
        assert crossing(figure) == []
    figure = card.draw("Title", RUNGS, peers, "a day " * 20)
    assert any("outside" in said for said in crossing(figure))
