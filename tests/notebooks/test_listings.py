"""_lib/listings.py: a kernel without the branches that a call does not take."""

import pytest

from _lib.listings import decided
from gdpa_kernels.gdpa.kernels import v1_tiled

KERNEL = """def kernel(x, add, FLAG):
    y = x
    if FLAG:
        # what a flag does
        y += 1
    if add is None:
        if x:
            y = 2
    else:
        y += add
    return y
"""


def test_the_branch_that_is_taken_stands_in_place_of_the_question():
    assert decided(KERNEL, add=None, FLAG=False) == (
        "def kernel(x, add, FLAG):\n    y = x\n    if x:\n        y = 2\n    return y"
    )
    assert "    y += add\n    return" in decided(KERNEL, add=1, FLAG=True)


def test_what_remains_of_a_kernel_computes_the_same():
    plain = {"segments_ptr": None, "add_ptr": None, "LOWER_RIGHT": False}
    text = decided(v1_tiled.tiled_kernel, **plain)
    body = text[text.index("EXACT") :]
    assert not any(name in body for name in plain) and "mask_probabilities" in body
    space: dict = {}
    exec(decided(KERNEL, add=None, FLAG=True), space)
    assert space["kernel"](0, None, True) == 1 and space["kernel"](3, None, True) == 2


def test_a_value_that_decides_nothing_is_an_error():
    with pytest.raises(ValueError, match="must be decided by other, got none"):
        decided(KERNEL, other=1)
