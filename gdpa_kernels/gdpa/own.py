"""The activations that users have registered."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
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
