"""Table of TLX operations, and the steps they have in common."""

import functools
from collections.abc import Callable
from typing import Any

from ..errors import InvalidKernel
from ..launch import current
from ..scheduler import Role
from ..tile import WORK

OPERATIONS: dict[str, Any] = {}


def uncharged(function: Callable) -> Callable:
    """Exclude the tiles that the emulator makes to carry an operation out from the role's
    arithmetic: the operation charges its own cost."""

    @functools.wraps(function)
    def apply(*args: Any, **kwargs: Any) -> Any:
        launch = current()
        work, steps = WORK[0], launch.scheduler.numbers["steps"]
        result = function(*args, **kwargs)
        charged = launch.scheduler.numbers["steps"] > steps
        WORK[0] = 0 if charged else work
        return result

    return apply


def op(function: Callable, name: str = "") -> Callable:
    """Register the function as the TLX operation of its name, or this one; `uncharged`, too."""
    OPERATIONS[name or function.__name__] = apply = uncharged(function)
    return apply


def point() -> Role:
    """Mark a point that other roles can notice: they may run first. Returns the running role."""
    return current().scheduler.checkpoint()


def holds(pred: Any) -> bool:
    """Return whether an operation with this predicate is performed."""
    if isinstance(pred, bool):
        raise InvalidKernel(f"pred must be a runtime value, got the constant {pred}")
    return pred is None or bool(pred)


def blackwell_only(name: str) -> None:
    if current().arch != "sm_100":
        raise InvalidKernel(f"tlx.{name} needs arch sm_100, got {current().arch}")
