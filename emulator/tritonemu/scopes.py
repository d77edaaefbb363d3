"""Variables in loops and branches, where the compiler demands more of them than Python does.

A loop or an `if` on runtime values becomes one operation, whatever it does at run time. So a
variable from before it keeps its type (dtype and shape; a constant is its own type), and one that
the loop, or one branch, assigns first ends with it. Loops over `tl.static_range` are unrolled, and
an `if` on constants is decided: they have no such rules.

A variable that both branches assign first gets one type from them. Only one of them runs here, so
it is Triton's own front end that is asked whether the types agree (see `compiler`).
"""

from collections.abc import Sequence
from typing import Any

from .aggregates import Aggregate
from .errors import InvalidKernel, Unsupported
from .launch import current
from .tile import Tile, Unbound


class Scope:
    """A loop or an `if` on runtime values, while it runs.

    what: "loop" or "if". names: the variables that it assigns. previous: their values then. both:
    those that both branches assign.
    """

    def __init__(
        self, what: str, names: Sequence[str], both: Sequence[str], previous: tuple[Any, ...]
    ):
        self.what, self.names, self.both, self.previous = what, names, both, previous
        self.branch = current().role.leader.branch
        values = zip(names, previous, strict=True)
        if both and any(name in both and isinstance(value, Unbound) for name, value in values):
            current().undecided = True

    def leave(self, values: tuple[Any, ...]) -> tuple[Any, ...]:
        """Return the variables after an iteration or a branch. InvalidKernel if a type changes."""
        after = []
        for name, old, new in zip(self.names, self.previous, values, strict=True):
            if isinstance(old, Unbound):
                after.append(new if name in self.both else old)
                continue
            after.append(new)
            if new is not old and current().role.leader.branch is not self.branch:
                raise Unsupported(f"{name} of CTAs that take a branch, and of others that do not")
            if new is old or (self.what == "if" and old is None):
                continue
            if _type(old) != _type(new):
                raise InvalidKernel(
                    f"{name} must keep its type in this {self.what}, which is on runtime values: "
                    f"{_type(old)} before, {_type(new)} after"
                )
        return tuple(after)


def _type(value: Any) -> str:
    """Format a value's type for messages."""
    if isinstance(value, Tile):
        return repr(value)
    if isinstance(value, Aggregate):
        value = tuple(getattr(value, field) for field in value.fields)
    if isinstance(value, tuple):
        return f"({', '.join(map(_type, value))})"
    constant = value is None or isinstance(value, (bool, int, float, str))
    return repr(value) if constant else type(value).__name__
