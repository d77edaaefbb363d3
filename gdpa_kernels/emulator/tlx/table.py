"""The table of TLX operations, and what they all do first."""

from collections.abc import Callable
from typing import Any

from ..errors import InvalidKernel
from ..launch import current
from ..scheduler import Role

OPERATIONS: dict[str, Any] = {}


def op(function: Callable) -> Callable:
    """Make the function what stands for the TLX operation of its name."""
    OPERATIONS[function.__name__] = function
    return function


def point() -> Role:
    """A point that other roles can notice: they may run first. Returns the running role."""
    return current().scheduler.checkpoint()


def holds(pred: Any) -> bool:
    """Whether an operation with this predicate is performed."""
    if isinstance(pred, bool):
        raise InvalidKernel(f"pred must be a runtime value, got the constant {pred}")
    return pred is None or bool(pred)


def blackwell_only(name: str) -> None:
    if current().arch != "sm_100":
        raise InvalidKernel(f"tlx.{name} needs arch sm_100, got {current().arch}")
