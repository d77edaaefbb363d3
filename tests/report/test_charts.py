"""Charts of chapters: what each draws, read from the figure."""

from itertools import combinations, pairwise

import numpy as np
import pandas as pd
import pytest
from matplotlib.colors import to_hex
from matplotlib.text import Text

from _lib import drawings, rare_charts
from gdpa_lab.report import charts, style
from notebooks.blackwell import _columns


def test_smooth_lines_colour_the_highlighted_and_name_levels():
    frame = pd.DataFrame({"a": np.arange(20.0), "b": 3.0}, index=np.arange(20.0))
    chart = charts.lines(frame, xlabel="x", ylabel="y", highlight=["b"], levels={"top": 5.0})
    grey, strong, level = chart.axes[0].get_lines()
    assert grey.get_color() == charts.GREY != strong.get_color()
    assert list(strong.get_ydata()) == [3.0] * 20 and level.get_ydata()[0] == 5.0
    assert {text.get_text() for text in chart.axes[0].texts} == {"a", "b", "top"}


def test_scatter_names_its_points():
    groups = {
        "one": pd.DataFrame({"x": [1e-3], "y": [4.0]}, index=["p"]),
        "two": pd.DataFrame({"x": [1e-2], "y": [8.0]}, index=["q"]),
    }
    chart = rare_charts.scatter(groups, xlabel="x", ylabel="y", levels={"need": 6.0})
    assert [text.get_text() for text in chart.axes[0].texts] == ["need", "p", "q"]
    assert chart.axes[0].get_xscale() == "log" and chart.axes[0].get_ylim()[0] == 0


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


def test_dots_on_a_logarithmic_axis_show_plain_numbers():
    frame = pd.DataFrame({"ratio": [0.25, 64.0]}, index=["a", "b"])
    (axis,) = charts.dots(frame, xlabel="x", log=True).axes
    assert axis.get_xscale() == "log"
    assert axis.xaxis.get_major_formatter()(0.25, 0) == "0.25"


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
        rare_charts.heat(frame, label="x"),
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
    spans = {tuple(line.get_xdata()) for line in chart.axes[0].get_lines()}
    assert {(1.0, 3.0), (3.0, 5.0), (2.0, 4.0)} <= spans


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
        lambda x: rare_charts.heat(x, label="x"),
        lambda x: rare_charts.swarm(x.melt("b", var_name="row"), xlabel="x", levels={"two": 2}),
        lambda x: rare_charts.scatter({"g": x}, xlabel="x", ylabel="y"),
    ],
)
def test_the_same_input_gives_the_same_bytes(draw):
    frame = pd.DataFrame({"a": [1.0, 2.0, 3.0], "b": [2.0, 5.0, 4.0]}, index=[1, 2, 4])
    assert draw(frame).to_svg() == draw(frame.copy()).to_svg()


def test_names_stand_at_the_ends_of_lines():
    frame = pd.DataFrame({"a": [8.0, 2.0, 1.0], "b": [1.0, 1.0, 1.0]}, index=[1, 2, 4])
    (axis,) = charts.lines(frame, xlabel="keys", ylabel="ratio", highlight=["a"]).axes
    name = next(text for text in axis.texts if text.get_text() == "a")
    assert name.xy == (1, pytest.approx(1 / axis.get_ylim()[1]))


def test_a_waterfall_leads_from_each_time_to_the_next_and_to_the_peers():
    steps = pd.Series({"v0: eager": 32.0, "v1: fused": 5.0, "v2: slower": 5.5, "v8: waits": 4.0})
    (axis,) = charts.waterfall(steps, pd.Series({"cuDNN": 4.5}), xlabel="ms").axes
    names = [label.get_text() for label in axis.get_yticklabels()]
    assert names == ["v8", *steps.index, "cuDNN"]
    ways = [(bar.get_x(), bar.get_x() + bar.get_width()) for bar in axis.patches]
    assert ways == [(32, 4), (32, 32), (32, 5), (5, 5.5), (5.5, 4), (4, 4.5)]
    texts = [text.get_text() for text in axis.texts]
    assert texts == ["4.00", "32.00", "5.00", "5.50", "4.00", "4.50", "8.0 times as fast"]
    assert axis.get_xscale() == "log"


def test_a_text_on_a_pale_part_has_the_ink_of_the_page():
    frame = pd.DataFrame({"a": [1.0], "b": [1.0], "c": [1.0]}, index=["x"])
    looks = {"a": "filled", "b": "pale", "c": "hollow"}
    (axis,) = rare_charts.stacked(frame, xlabel="ms", looks=looks, inside=True).axes
    colours = [text.get_color() for text in axis.texts]
    assert colours == [style.PAGE, style.INK, style.RUNG_COLOURS[1]]


def test_a_heat_map_is_more_saturated_for_more_and_frames_holes():
    frame = pd.DataFrame({"a": [1.0, 5.0], "b": [9.0, None]}, index=["x", "y"])
    cells = rare_charts.heat(frame, label="%").axes[0].patches
    shares = [cell.get_alpha() for cell in cells]
    assert shares[0] < shares[2] < shares[1] <= 0.45 and shares[3] is None
    assert to_hex(cells[0].get_facecolor()) == style.RUNG_COLOURS[1]
    assert cells[3].get_facecolor()[3] == 0


def test_long_names_of_rows_do_not_overlap_on_a_phone():
    names = [f"half-jagged-{n}-d64 of a kind, backward" for n in range(20)]
    with style.narrowed():
        chart = charts.dots(pd.DataFrame({"x": range(1, 21)}, names), xlabel="x")
    chart.draw_without_rendering()
    boxes = [label.get_window_extent() for label in chart.axes[0].get_yticklabels()]
    assert all(below.y1 <= above.y0 + 1 for above, below in pairwise(boxes))


KINDS = ["attention", "norm", "matmul", "rest"]
PARTS = pd.DataFrame(
    [[37.7, 44.3, 22.2, 41.1], [19.3, 13.9, 23.4, 6.1]], ["v1, eager", "ours, fused, bf16"], KINDS
)
NAMED = {
    "names at the ends of lines": lambda: charts.lines(
        pd.DataFrame({f"backward, fill {x}": [2.4, 2.5 + x / 100] for x in (0.7, 1.0, 1.3)}),
        xlabel="x", ylabel="y", highlight=["backward, fill 0.7"],
    ),
    "columns": lambda: _columns.over_time(
        {"dQ of step i+1": [(0, 128, "S → P(i+1)", "with math"),
                            (128, 256, "dP(i) → dS(i)", "kept"), (256, 384, "dV", "kept"),
                            (384, 512, "dK +=", "written by the MMA")]},
        ["kept", "with math", "written by the MMA", "kept or read by an MMA"],
    ),
    "verdicts": lambda: rare_charts.verdicts(pd.DataFrame(
        {name: ["cannot run", "crashes", "missed"] for name in
         ("emulator", "interpreter", "TileLens", "program", "racecheck", "ConSan")},
        ["one arrival too many expected", "no wait before the next copy", "no mask"],
    )),
    "parts": lambda: rare_charts.stacked(
        PARTS, xlabel="ms", looks=dict.fromkeys(KINDS, "hollow"), inside=True
    ),
    "strips": lambda: drawings.strips(
        {"v7": ["S", *["tanh"] * 80, "wait 1", "wait 0"]}, xlabel="x", highlight=["S", "tanh"]
    ),
}  # fmt: skip


@pytest.mark.parametrize("draw", NAMED.values(), ids=NAMED)
def test_texts_do_not_cover_one_another_on_a_phone(draw):
    with style.narrowed():
        chart = draw()
    chart.draw_without_rendering()
    texts = [text for text in chart.findobj(Text) if text.get_visible() and text.get_text()]
    inside = [(x.get_text(), Text.get_window_extent(x)) for x in texts]  # without arrows
    assert not [(a, b) for (a, one), (b, other) in combinations(inside, 2) if _covers(one, other)]


def _covers(one, other) -> bool:
    across = min(one.x1, other.x1) - max(one.x0, other.x0)
    down = min(one.y1, other.y1) - max(one.y0, other.y0)
    return min(across, down) > 0.2 * min(one.width, one.height, other.width, other.height)


def test_only_panels_with_ticks_name_the_axis_on_a_phone():
    bar = pd.DataFrame([(0, 0, 1, "a")], columns=["lane", "start", "time", "label"])
    with style.narrowed():
        chart = drawings.gantt({"one": bar, "two": bar}, xlabel="ms", hue="v1_tiled")
    assert [axis.get_xlabel() for axis in chart.axes] == ["", "ms"]


def test_long_ticks_keep_their_distance_on_a_phone():
    rates = pd.DataFrame({"a": range(7)}, [36, 144, 288, 576, 1152, 2304, 4608])
    with style.narrowed():
        chart = charts.lines(rates, xlabel="x", ylabel="y", highlight=["a"], log="x")
    labels = [label.get_text() for label in chart.axes[0].get_xticklabels()]
    assert labels == ["36", "", "288", "", "1,152", "", "4,608"]
