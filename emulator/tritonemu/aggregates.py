"""`@triton.aggregate`: a class of a kernel's, whose values are named members that travel together.

Members are read, never assigned. Constants among them stay constants. A method is a `@triton.jit`
function of the class.
"""

import inspect
from collections.abc import Callable
from typing import Any

import triton.language as tl
from triton.runtime.jit import JITFunction

from .errors import InvalidKernel, Unsupported
from .tile import Tile


class Aggregate:
    """A value of such a class. `fields`: the annotated type of each member."""

    fields: dict[str, Any] = {}

    def call_it(self, name: str) -> None:
        """Name the buffers and barriers that were made for this value: `k` has `k.full`."""
        for field in self.fields:
            member = getattr(self, field)
            if hasattr(type(member), "call_it"):
                member.call_it(f"{name}.{field}")

    def __setattr__(self, name: str, value: Any) -> None:
        if name not in self.fields:
            raise InvalidKernel(f"{type(self).__name__} has no member {name}")
        expected = self.fields[name]
        if expected is tl.constexpr and isinstance(value, Tile):
            raise InvalidKernel(f"{type(self).__name__}.{name} is a constexpr, got {value!r}")
        if expected is tl.tensor and not isinstance(value, Tile):
            raise InvalidKernel(f"{type(self).__name__}.{name} is a tl.tensor, got {value!r}")
        super().__setattr__(name, value)


def lowered(kind: type, convert: Callable[[Any], Any]) -> type[Aggregate]:
    """Build the class that replaces `kind`, one under `triton.aggregate`, in a lowered kernel."""
    fields, written = kind.__annotations__, kind.hash_attrs[0]

    def fill(self: Aggregate, *args: Any, **kwargs: Any) -> None:
        for name, value in signature.bind(*args, **kwargs).arguments.items():
            setattr(self, name, value)

    signature = inspect.Signature(
        [inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD) for name in fields]
    )
    if not getattr(written, "__triton_builtin__", False):
        if {"_semantic", "_generator"} & inspect.signature(written).parameters.keys():
            raise Unsupported(f"{kind.__name__}.__init__ with _semantic or _generator")
        fill = written
    methods = {
        name: convert(member)
        for name, member in vars(kind).items()
        if isinstance(member, JITFunction)
    }
    return type(kind.__name__, (Aggregate,), {**methods, "__init__": fill, "fields": fields})
