"""The state of one kernel launch: architecture, grid, running program, memory, and the report."""

import contextvars
from dataclasses import dataclass, field
from typing import Any

from .errors import EmulatorError


def _no_checks() -> dict[str, int]:
    return {"bounds": 0, "race": 0, "descriptor": 0}


@dataclass
class Report:
    """What one launch did.

    bytes_loaded and bytes_stored count active lanes and unclipped elements of boxes; atomics count
    as both. checks counts the accesses examined, by kind.
    """

    arch: str
    programs: int = 0
    bytes_loaded: int = 0
    bytes_stored: int = 0
    dots: int = 0
    checks: dict[str, int] = field(default_factory=_no_checks)


@dataclass
class Launch:
    """One launch; `program` is the id of the program that runs now."""

    arch: str
    grid: tuple[int, int, int]
    report: Report
    races: bool
    lowering: Any
    memory: Any = None
    program: tuple[int, int, int] = (0, 0, 0)


CURRENT: contextvars.ContextVar[Launch] = contextvars.ContextVar("emulator_launch")


def current() -> Launch:
    """The launch being executed."""
    launch = CURRENT.get(None)
    if launch is None:
        raise EmulatorError("operations must be called inside emulator.run, got no launch")
    return launch
