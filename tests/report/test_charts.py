"""Charts of chapters: what each draws, read from the figure."""

import numpy as np
import pandas as pd
import pytest

from gdpa_lab.report import charts


def test_tiles_fill_one_tile_and_the_sums_and_frame_what_is_held():
    strips = [("Q", "left", False), ("dQ", "right", True)]
    panel = charts.Tiles((1, 0), [(1, 1)], strips)
    (axis,) = charts.tiles({"owns queries": panel}, count=2).axes
    opacity = [patch.get_facecolor()[3] for patch in axis.patches]
    assert len(opacity) == 4 + 2 * 2
    assert opacity.count(1) == 2 and opacity.count(0.3) == 1
    assert [text.get_text() for text in axis.texts] == ["Q", "dQ"]
    framed = [patch for patch in axis.patches if patch.get_linewidth() > 1]
    assert len(framed) == 2


def test_curves_colour_the_highlighted_and_draw_levels():
    frame = pd.DataFrame({"a": [1.0, 2.0], "b": [3.0, 4.0]}, index=[0.0, 1.0])
    chart = charts.curves(frame, xlabel="x", ylabel="y", highlight=["b"], levels={"top": 5.0})
    grey, strong, level = chart.axes[0].get_lines()
    assert grey.get_color() == charts.GREY != strong.get_color()
    assert list(strong.get_ydata()) == [3.0, 4.0] and level.get_ydata()[0] == 5.0


def test_scatter_names_its_points():
    groups = {
        "one": pd.DataFrame({"x": [1e-3], "y": [4.0]}, index=["p"]),
        "two": pd.DataFrame({"x": [1e-2], "y": [8.0]}, index=["q"]),
    }
    chart = charts.scatter(groups, xlabel="x", ylabel="y", levels={"need": 6.0})
    assert [text.get_text() for text in chart.axes[0].texts] == ["p", "q", "need"]
    assert chart.axes[0].get_xscale() == "log" and chart.axes[0].get_ylim()[0] == 0


def test_loglog_draws_what_is_within_and_marks_the_first_line():
    frame = pd.DataFrame({"a": [1e-3, 1.0, 1e3], "b": [1.0, 2.0, 3.0]}, index=[0.1, 1.0, 10.0])
    chart = charts.loglog(
        frame, xlabel="x", ylabel="y", highlight=["a"], ylim=(1e-2, 1e2), marks={1.0: "one"}
    )
    first, second, mark = chart.axes[0].get_lines()
    assert list(first.get_ydata()) == [1.0] and len(second.get_ydata()) == 3
    assert mark.get_color() == first.get_color() != second.get_color()
    assert [text.get_text() for text in chart.axes[0].texts] == ["a", "b", "one"]


def test_dots_on_a_logarithmic_axis_show_plain_numbers():
    frame = pd.DataFrame({"ratio": [0.25, 64.0]}, index=["a", "b"])
    (axis,) = charts.dots(frame, xlabel="x", log=True).axes
    assert axis.get_xscale() == "log"
    assert axis.xaxis.get_major_formatter()(0.25, 0) == "0.25"


def test_strips_draw_a_cell_for_each_step_and_label_waits():
    rows = {"v7": ["S", "wait 0", "tanh"], "v8": ["S", "tanh"]}
    (axis,) = charts.strips(rows, xlabel="x", highlight=["S", "tanh"]).axes
    assert sum(patch.get_width() > 0 for patch in axis.patches) == 5
    assert [text.get_text() for text in axis.texts if text.get_text()] == ["0"]
    assert [text.get_text() for text in axis.get_legend().get_texts()] == ["S", "tanh", "wait"]


def test_parts_of_a_bar_begin_where_the_one_before_ends():
    frame = pd.DataFrame({"a": [1.0, 2.0], "b": [3.0, 1.0]}, index=["x", "y"])
    chart = charts.stacked(frame, xlabel="ms", looks={"a": "filled", "b": "hollow"}, inside=True)
    (axis,) = chart.axes
    assert [(bar.get_x(), bar.get_width()) for bar in axis.patches] == [
        (0, 1),
        (0, 2),
        (1, 3),
        (2, 1),
    ]
    assert [text.get_text() for text in axis.texts] == ["a\n1.0", "a\n2.0", "b\n3.0", "b\n1.0"]


def test_bars_on_lanes_lie_at_their_times():
    bars = pd.DataFrame({"lane": [0, 1], "start": [0, 2], "time": [2, 1], "label": ["7", ""]})
    chart = charts.gantt({"one": bars}, xlabel="blocks", hue="v3_persistent")
    axis, _ = chart.axes
    assert [(bar.get_x(), bar.get_width()) for bar in axis.patches] == [(0, 2), (2, 1)]
    assert axis.patches[0].get_height() > axis.patches[1].get_height()


def test_panels_share_a_scale_and_name_lines_at_their_ends():
    frame = pd.DataFrame({"a": [1.0, 2.0], "b": [3.0, None]}, index=[1000, 2000])
    frames = {"ours": frame, "theirs": frame + 1}
    chart = charts.panels(frames, xlabel="x", ylabel="y", highlight=["a"])
    left, right = chart.axes
    assert left.get_ylim() == right.get_ylim() == (0, 1.1 * 4)
    strong, grey = left.get_lines()
    assert grey.get_color() == charts.GREY != strong.get_color()
    assert grey.get_ydata()[0] == 3 and np.isnan(grey.get_ydata()[1])
    assert {text.get_text() for text in left.texts} == {"a", "b", "not timed: b"}
    assert (left.get_title("left"), right.get_title("left")) == ("ours", "theirs")


def test_a_missing_value_is_named_where_a_point_would_be():
    frame = pd.DataFrame({"a": [1.0, None, 3.0]}, index=[1, 2, 4])
    drawn = [
        charts.lines(frame, xlabel="x", ylabel="y", highlight=["a"]),
        charts.dots(frame, xlabel="x"),
        charts.bars(pd.Series({"v1": 1.0, "v2": None}), xlabel="x", highlight=["v1"]),
    ]
    for chart in drawn:
        assert any("not timed" in text.get_text() for text in chart.axes[0].texts)
    (line, *_) = charts.lines(frame, xlabel="x", ylabel="y", highlight=["a"]).axes[0].get_lines()
    assert len(line.get_xdata()) == 3, "the line has a gap, not a bridge"


@pytest.mark.parametrize(
    "draw",
    [
        lambda x: charts.curves(x, xlabel="x", ylabel="y", highlight=["a"]),
        lambda x: charts.stacked(x, xlabel="x", looks={"a": "filled"}),
        lambda x: charts.scatter({"g": x.assign(b=1.0)}, xlabel="x", ylabel="y"),
        lambda x: charts.loglog(x, xlabel="x", ylabel="y", highlight=["a"], ylim=(1, 9)),
        lambda x: charts.swarm({"a": x["a"]}, xlabel="x"),
    ],
)
def test_a_missing_value_is_refused_by_name(draw):
    frame = pd.DataFrame({"a": [1.0, None, 3.0]}, index=[1, 2, 4])
    with pytest.raises(ValueError, match="every value must be there, got none for .+ at 2"):
        draw(frame)


def test_a_curve_may_end_early():
    frame = pd.DataFrame({"a": [1.0, 2.0], "b": [3.0, None]}, index=[0.0, 1.0])
    charts.curves(frame, xlabel="x", ylabel="y", highlight=["a"])


def test_swarm_counts_its_rows_and_sets_points_apart():
    groups = {"one": pd.Series([1.0, 1.0, 10.0]), "rest": pd.Series([2.0])}
    (axis,) = charts.swarm(groups, xlabel="x", grey=["rest"]).axes
    one, rest = axis.get_lines()
    assert [label.get_text() for label in axis.get_yticklabels()] == ["one (3)", "rest (1)"]
    assert len(set(one.get_ydata())) == 3 and rest.get_color() == charts.GREY
