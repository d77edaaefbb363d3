"""Whole training steps: the scripts that chapters run are found."""

import pytest

from _lib import steps


def test_the_scripts_of_the_checkout_are_found_and_no_others():
    assert all((steps.EXAMPLES / f"{script}.py").is_file() for script in ("step", "ranks"))
    with pytest.raises(FileNotFoundError, match="one of a checkout's examples/, got .*nothing.py"):
        steps.run("nothing")
