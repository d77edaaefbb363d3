"""The drawing of the protocol of two CTAs: its barriers are those of the kernel."""

import ast
import re

from gdpa_kernels.calling import ladder
from notebooks.blackwell import _protocol


def test_its_barriers_stand_in_the_kernels_table_and_every_number_is_drawn():
    text = ast.get_docstring(ast.parse(ladder.rung("b4_pair_backward").path.read_text()))
    assert set(_protocol.BARRIERS.values()) <= set(re.findall(r"^\| ([\w.]+) ", text, re.MULTILINE))
    (axis,) = _protocol.two_ctas().axes
    dots = {text.get_text() for text in axis.texts if text.get_text().isdigit()}
    assert dots == set(" ".join(_protocol.BARRIERS).replace(" and ", " ").split())
