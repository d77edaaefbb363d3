"""Checks of arguments: the error names the argument, what was expected and what was received."""

from __future__ import annotations

import math


def require(ok: bool, name: str, expectation: object, value: object) -> None:
    """Raise ValueError "`name` must be `expectation`, got `value`" unless `ok`."""
    if not ok:
        raise ValueError(f"{name} must be {expectation}, got {value!r}")


def require_int(name: str, value: object, least: int) -> None:
    """Raise ValueError unless `value` is an integer, not a bool, of at least `least`."""
    require(type(value) is int and value >= least, name, f"an integer of at least {least}", value)


def is_finite(value: object) -> bool:
    """Return whether `value` is a finite number, not a bool."""
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
