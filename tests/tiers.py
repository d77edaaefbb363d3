"""Tiers: `make test` runs the representative cases of a table, `make test-sweeps` the others."""

from collections.abc import Callable, Collection, Iterable
from typing import Any

import pytest
from hypothesis import settings

OF_A_PROFILE = 100
"""Examples that hypothesis draws where nothing says how many, in the sweeps."""


def sweep(*values: Any, id: str | None = None):
    """A case for the sweeps."""
    return pytest.param(*values, id=id, marks=pytest.mark.sweep)


def swept(cases: Iterable, quick: Callable[..., bool] | Collection) -> list:
    """All cases of a table, as `parametrize` takes them; the quick tier has those in `quick`, or
    those of whose values `quick` says so. At least one must be."""
    chosen = []
    for case in cases:
        values = case if isinstance(case, tuple) else (case,)
        stays = quick(*values) if callable(quick) else case in quick
        chosen.append(case if stays else sweep(*values))
    assert any(not hasattr(case, "marks") for case in chosen), "a table needs a quick case"
    return chosen


def examples(count: int) -> settings:
    """Settings of a test that draws `count` examples in the sweeps, a quarter in the quick tier."""
    share = settings.default.max_examples / OF_A_PROFILE
    return settings(deadline=None, max_examples=max(1, round(count * share)))
