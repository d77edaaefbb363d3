"""The activations that users have registered by registration.py; activations.py looks them up.

A kernel is compiled for the name with the digest of the sources (`cache_key`), so that another
activation of the same name is another kernel.
"""

from __future__ import annotations

import ast
import copy
from collections.abc import Callable
from dataclasses import dataclass
from types import CellType, FunctionType
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    import triton


@dataclass(frozen=True)
class Custom:
    """A registered activation: jit functions of an fp32 tile, and the definition in PyTorch.

    digest: of the source of both jit functions and of all that they call.
    """

    name: str
    value: triton.JITFunction
    value_and_slope: triton.JITFunction
    definition: Callable[[torch.Tensor], torch.Tensor]
    digest: str


CUSTOM: dict[str, Custom] = {}


def snapshot(
    function: triton.JITFunction, copies: dict[int, triton.JITFunction] | None = None
) -> triton.JITFunction:
    """The function as it is now, and all that it calls by name. Triton looks up names when it
    compiles, for one kernel today and for another tomorrow; a notebook may have defined a helper
    anew by then."""
    from triton import JITFunction

    copies = {} if copies is None else copies
    if id(function) in copies:
        return copies[id(function)]
    result = copies[id(function)] = copy.copy(function)

    def now(value: object) -> object:
        return snapshot(value, copies) if isinstance(value, JITFunction) else value

    raw = function.fn
    names = {node.id for node in ast.walk(function.parse()) if isinstance(node, ast.Name)}
    scope = {
        name: now(raw.__globals__[name])
        for name in names | {"__builtins__", "__name__"} if name in raw.__globals__
    }  # fmt: skip
    cells = tuple(CellType(now(cell.cell_contents)) for cell in raw.__closure__ or ())
    result.fn = FunctionType(raw.__code__, scope, raw.__name__, raw.__defaults__, cells or None)
    result.fn.__qualname__, result.fn.__kwdefaults__ = raw.__qualname__, raw.__kwdefaults__
    result.__globals__, result.hash = scope, None
    return result


def cache_key(name: str) -> str:
    """The name that a kernel is compiled for: with the digest of its source, which Triton's cache
    cannot see, where it is registered."""
    return f"{name}@{CUSTOM[name].digest}" if name in CUSTOM else name
