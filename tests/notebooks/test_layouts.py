"""Pictures of layouts: which thread holds a column, and who lies in tensor memory."""

import pytest

from notebooks.blackwell import _columns
from notebooks.block import _layouts


def test_four_threads_hold_two_neighbouring_columns_of_each_eight():
    assert [_layouts.owner(i) for i in range(10)] == [0, 0, 1, 1, 2, 2, 3, 3, 0, 0]


def test_both_partners_of_a_pair_lie_in_one_thread_and_their_sines_do_not():
    axis = _layouts.rotary(16).axes[0]
    names = [text.get_text() for text in axis.texts if text.get_text().startswith("T")]
    needed, loaded = names[16:24], names[24:]
    assert names[:16:2] == names[1:16:2] == needed
    assert loaded == ["T0"] * 4 + ["T1"] * 4


def test_cells_of_tensor_memory_are_drawn_to_scale():
    axis = _columns.over_time({"one": [(0, 128, "S", "a"), (256, 512, "O", "b")]}, ["a", "b"]).axes[
        0
    ]
    assert [box.get_width() for box in axis.patches] == [512, 128, 256]


def test_a_kind_without_a_name_in_the_legend_is_refused():
    with pytest.raises(KeyError):
        _columns.over_time({"one": [(0, 128, "S", "c")]}, ["a"])
