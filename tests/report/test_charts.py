"""Charts of chapters: what each draws, read from the figure."""

from gdpa_kernels.report import charts


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
