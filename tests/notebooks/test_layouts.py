"""Picture of a layout: which thread holds a column."""

from notebooks.block import _layouts


def test_both_partners_of_a_pair_lie_in_one_thread_and_their_sines_do_not():
    axis = _layouts.rotary(16).axes[0]
    names = [text.get_text() for text in axis.texts if text.get_text().startswith("T")]
    needed, loaded = names[16:24], names[24:]
    assert names[:16:2] == names[1:16:2] == needed
    assert loaded == ["T0"] * 4 + ["T1"] * 4
