"""Layouts: Gluon's own classes, which a kernel calls with tuples where Gluon has lists."""

from types import ModuleType
from typing import Any

from ..launch import current


def _listed(value: Any) -> Any:
    return [_listed(item) for item in value] if isinstance(value, (tuple, list)) else value


class Layout:
    """Replacement of a layout class; equal ones are equal, made in a kernel or outside."""

    def __init__(self, kind: type):
        self.kind = kind

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        named = {name: _listed(value) for name, value in kwargs.items()}
        return self.kind(*map(_listed, args), **named)

    def __instancecheck__(self, value: Any) -> bool:
        return isinstance(value, self.kind)

    def __getattr__(self, name: str) -> Any:
        return current().lowering.convert(getattr(self.kind, name))


def named(module: ModuleType) -> dict[str, Layout]:
    """Collect the layouts of one of Gluon's modules."""
    return {
        name: Layout(value)
        for name, value in vars(module).items()
        if isinstance(value, type) and name.endswith("Layout")
    }
