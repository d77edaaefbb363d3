"""Pictures of batches: what they must show stands in them, and nothing else is asked."""

import pandas as pd

from _lib import drawings
from gdpa_lab.measuring.roofline import Ceilings
from tritonemu import Timeline
from tritonemu.timeline import Event


def texts(axis) -> list[str]:
    return [text.get_text() for text in axis.texts]


def test_scores_are_drawn_to_scale():
    axis = drawings.scores({"self": [(6, 6)], "pooled": [(4, 9), (4, 2)]}).axes[1]
    assert [(box.get_width(), box.get_height()) for box in axis.patches] == [(9, 4), (2, 4)]


def test_kernels_stand_under_the_roof_as_arrows_of_their_family():
    names = ["gdpa-self-full-256", "gdpa-cross-full-512"]
    brackets = pd.DataFrame(
        {"intensity": [128.0, 256.0], "low": [300.0, 400.0], "high": [568.0, 796.0]}, index=names
    )
    climbs = pd.DataFrame(
        {"intensity": [128.0, 256.0], "first": [200.0, 250.0], "last": [400.0, 500.0]}, index=names
    )
    limits = Ceilings(796.0, ((1.0, 4221.0), (3.0, 4440.0)))
    chart = drawings.roofline(brackets, climbs, limits, {"tanh": 2141.0}, {names[0]: "256"})
    (axis,) = chart.axes
    marks = {line.get_label(): list(line.get_ydata()) for line in axis.lines}
    assert marks["self, full"] == [200.0] and marks["cross, 256 keys"] == [250.0]
    arrows = [text for text in axis.texts if text.get_text() == ""]
    assert sorted(arrow.xy[1] for arrow in arrows) == [400.0, 500.0]
    assert {"tanh", "256", "bf16 matmul: 796"} <= set(texts(axis))


def line(shift: float) -> Timeline:
    """A load, an MMA, the math, and an MMA that ends after 100 cycles and `shift`."""
    parts = [
        ("TMA", "copy", 0, 20), ("tensor core", "mma", 20, 40), ("math[0]", "compute", 40, 60),
        ("math[0]", "wait", 60, 100 + shift), ("tensor core", "mma", 80 + shift, 100 + shift),
    ]  # fmt: skip
    return Timeline("kernel.py", [Event(0, lane, kind, "", a, b, 1) for lane, kind, a, b in parts])


def test_timelines_share_an_axis_and_tell_idle_and_saved_cycles():
    first, second = drawings.timelines({"v4": line(0), "v5": line(-20)}).axes
    assert first.get_xlim() == second.get_xlim()
    assert first.get_title("left") == "v4: 100 cycles, tensor core busy 40 %"
    assert second.get_title("left") == "v5: 80 cycles, tensor core busy 50 %"
    idle = [path.vertices[:, 0] for path in first.collections[0].get_paths()]
    assert [(x.min(), x.max()) for x in idle] == [(0, 20), (40, 80), (100, 100)]
    assert [text.get_text() for text in second.texts if text.get_text()] == ["−20 cycles"]
    assert not any(text.get_text() for text in first.texts)
    assert len(first.patches) == 4, "a wait is what is left free"


def test_a_ring_shows_a_phase_for_each_use_and_a_dot_for_each_wait():
    (axis,) = drawings.ring(5).axes
    names = [label.get_text() for label in axis.get_yticklabels()]
    assert names == ["slot[0]", "full[0]", "empty[0]", "slot[1]", "full[1]", "empty[1]"]
    said = {name: [] for name in names}
    for text in sorted(axis.texts, key=lambda text: text.get_position()):
        said[names[int(text.get_position()[1])]].append(text.get_text())
    assert said["slot[0]"] == ["copy 0", "read 0", "copy 2", "read 2", "copy 4", "read 4"]
    assert said["full[0]"] == ["0", "1", "2"] and said["empty[1]"] == ["−1", "0", "1"]
    dots = [(line.get_xdata()[0], names[line.get_ydata()[0]]) for line in axis.lines]
    assert [x for x, of in dots if of == "empty[0]"] == [0, 2, 4], (
        "load copies three blocks into it"
    )
    assert [x for x, of in dots if of == "full[1]"] == [2, 4]
    colours = {line.get_color() for line in axis.lines if names[line.get_ydata()[0]] == "full[0]"}
    assert len(colours) == 2, "one for each parity"
