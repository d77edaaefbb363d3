"""`Recipe`: what is made from the offsets of a batch, above all a work list, and how."""

from __future__ import annotations

from typing import Generic, TypeVar

import torch

T = TypeVar("T")
WorkList = tuple[torch.Tensor, ...]
"""int32 tensors on a device that list the tiles which the programs of a kernel compute."""


class Recipe(Generic[T]):
    """How something is made from the offsets of a batch, and from what else.

    A subclass is a frozen dataclass of plain values, and `make` reads nothing but these and its
    arguments. So equal recipes make equal results of the same offsets, and `Lengths.once` may keep
    one for all of them.
    """

    def make(self, cu_seqlens: torch.Tensor, others: torch.Tensor | None = None) -> T:
        """The result for offsets, int32 `[batch + 1]`, and `others` of the same batch: in `gdpa`
        those of the keys, and of the queries, None if one q is shared."""
        raise NotImplementedError
