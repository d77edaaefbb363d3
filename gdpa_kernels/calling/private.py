"""Names that PyTorch and Triton do not document, each with what it is used for; no other file of
the library has any."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from operator import attrgetter

import torch
from torch.utils._mode_utils import no_dispatch


def opaque(function: Callable) -> Callable:
    """The function, into which Dynamo does not look. `torch.compiler.disable` does the same, and
    imports Dynamo and Triton with this package."""
    return torch._disable_dynamo(function)


def is_transformed() -> bool:
    """Whether a transform of `torch.func` is active."""
    return torch._C._are_functorch_transforms_active()


def is_watched() -> bool:
    """Whether a dispatch mode sees each operator, and may keep its results or skip it the second
    time, as selective checkpointing does. A compiled program has its own ways."""
    return not torch.compiler.is_compiling() and torch._C._len_torch_dispatch_stack() > 0


def unseen() -> contextlib.AbstractContextManager[None]:
    """A context whose operators no dispatch mode sees."""
    return no_dispatch()


def are_fake(*tensors: torch.Tensor) -> bool:
    """Whether one is a fake tensor, or operators make such; `torch._guards.detect_fake_mode` is ten
    times slower."""
    if torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE) is not None:
        return True
    return True in [isinstance(x, torch._subclasses.FakeTensor) for x in tensors]


def has_tangents() -> bool:
    """True while forward-mode differentiation is active."""
    return torch.autograd.forward_ad._current_level >= 0


def triton_builder() -> type:
    """The class in Triton's library whose methods a compiler's front end calls."""
    from triton._C.libtriton import ir

    return ir.builder


class Constants(torch.nn.Module):
    """A module that makes its constants, which are buffers, again after what moves, converts or
    empties them; what leaves them, leaves their memory, which a captured graph may read."""

    def _apply(self, fn: Callable, recurse: bool = True) -> torch.nn.Module:
        buffers = dict(self._buffers)
        super()._apply(fn, recurse)
        if any(after is not buffers[name] for name, after in self._buffers.items()):
            self.make_constants()
        return self


version = attrgetter("_version")  # asked for so often that a function would count
"""How often a tensor has been written to."""


def jagged_dim(x: torch.Tensor) -> int:
    """The dimension of a nested tensor whose sizes differ."""
    return x._ragged_idx


def known_lengths(x: torch.Tensor) -> dict[str, int | None]:
    """The arguments of `nested_tensor_from_jagged` for the shortest and the longest sequence that a
    nested tensor knows of, None for what it would compute."""
    return {"min_seqlen": x._maybe_min_seqlen, "max_seqlen": x._maybe_max_seqlen}
