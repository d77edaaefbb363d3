"""How a call hands its work lists to the implementations behind the operators of PyTorch.

An operator takes tensors and plain values alone. So a public call makes a `CallWorkLists`, and both
of its operators find it in a variable of their thread:

    gdpa -> with_work_lists(work_lists, operator, ...) -> PyTorch -> the operator's implementation
         -> rung.module().forward(batch, **handed_over(rung, "forward", batch))

Only time depends on it: a rung makes the list that it is not given.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable
from typing import Any

import torch

from gdpa_kernels.calling.lengths import Lengths, launch_state
from gdpa_kernels.calling.recipe import Recipe, T
from gdpa_kernels.calling.rung import Rung


class CallWorkLists:
    """The work lists of a call: those that its `Lengths` keep, or what forward made, for a backward
    with the same recipe in the same `LaunchState`.

    offsets: as `Recipe.make` takes them; lengths: what they come from, all or none.
    """

    __slots__ = ("_forward", "_lengths", "offsets")

    def __init__(self, offsets: tuple[torch.Tensor | None, ...], *lengths: Lengths | None):
        self.offsets, self._lengths = offsets, lengths
        self._forward: tuple[Hashable, object] | None = None

    def once(self, recipe: Recipe[T], direction: str) -> T:
        """The list that `recipe` makes of the offsets, for "forward" or "backward"."""
        lengths = self._lengths[0] if self._lengths else None
        state = launch_state(self.offsets[0].device if lengths is None else lengths.device)
        key, forward = (recipe, state), self._forward
        if forward is not None and forward[0] == key:
            return forward[1]
        if lengths is None:
            result = recipe.make(*self.offsets)
        else:
            others = self._lengths[1] if self._lengths[1:] else None
            result = lengths.once(recipe, others, state)
        if direction == "forward":
            self._forward = key, result
        return result


class _HandedOver(threading.local):
    work_lists: CallWorkLists | None = None


_HANDED_OVER = _HandedOver()


def with_work_lists(work_lists: CallWorkLists | None, operator: Callable, *arguments, **named):
    """operator(*arguments, **named), whose implementation finds the work lists. None: it finds
    none, as in a compiled program, to which nothing of one call belongs."""
    if work_lists is None:
        return operator(*arguments, **named)
    outer, _HANDED_OVER.work_lists = _HANDED_OVER.work_lists, work_lists
    try:
        return operator(*arguments, **named)
    finally:
        _HANDED_OVER.work_lists = outer


def handed_over(rung: Rung, direction: str, batch: Any) -> dict[str, object]:
    """The arguments `config` and `work_list` of a rung's function of a direction. Empty without
    work lists, or if they are of other offsets than the batch: something between may have run
    another call, or this one with other tensors."""
    work_lists = _HANDED_OVER.work_lists
    if work_lists is None or [*map(id, work_lists.offsets)] != [*map(id, batch.offsets)]:
        return {}
    module = rung.module()
    config = rung.config(batch, direction, module)
    recipe = rung.recipe(batch, config, module)
    if recipe is None:
        return {}
    return {"config": config, "work_list": work_lists.once(recipe, direction)}
