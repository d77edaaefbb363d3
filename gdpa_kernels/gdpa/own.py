"""The activations that users have registered, as kernels look them up while they are compiled."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import triton


@dataclass(frozen=True)
class Own:
    """A registered activation: jit functions of an fp32 tile, and the definition in PyTorch.

    digest: of the source of both jit functions and of all that they call.
    """

    name: str
    value: triton.JITFunction
    value_and_slope: triton.JITFunction
    definition: Callable[[torch.Tensor], torch.Tensor]
    digest: str


OWN: dict[str, Own] = {}


def keyed(name: str) -> str:
    """The name that a kernel is compiled for: with the digest of its source, which Triton's cache
    cannot see, where it is registered."""
    return f"{name}@{OWN[name].digest}" if name in OWN else name


def _of(key: str) -> Own:
    return OWN[key.partition("@")[0]]


# A kernel's hash is not to hold the table, which changes: the names hold what it needs of it.
_of.__triton_builtin__ = True


@triton.constexpr_function
def is_own(name):
    """Whether this name, as `keyed` made it, is of a registered activation."""
    return "@" in name


@triton.constexpr_function
def own_value(name):
    """The registered jit function x -> y of a name as `keyed` made it."""
    return _of(name).value


@triton.constexpr_function
def own_pair(name):
    """The registered jit function x -> (y, slope) of a name as `keyed` made it."""
    return _of(name).value_and_slope
