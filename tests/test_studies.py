"""A module with pieces of its source replaced."""

import pytest

from gdpa_kernels import house, studies


def test_every_change_is_made_and_the_module_stays_as_it_is():
    text = house.__doc__
    made = studies.changed(house, (f'"""{text}"""', '"""One."""'), ('"""One."""', '"""Two."""'))
    assert made.__doc__ == "Two." and house.__doc__ == text


@pytest.mark.parametrize("old", ("no such line of it", "\n"))
def test_what_does_not_occur_once_is_refused(old):
    with pytest.raises(ValueError, match="old must occur once in gdpa_kernels.house, got"):
        studies.changed(house, (old, "new"))
