"""`BaseBatch`: q, k and v of a call, and what follows from them. Each operator has its `Batch`."""

from __future__ import annotations

from operator import attrgetter

import torch

GradientTriple = tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]


class BaseBatch:
    """q `[total_q, num_heads, head_dim]`, k and v `[total_k, num_heads_k, head_dim]`; `gradients`:
    where dq, dk and dv are to be written, None for memory of their own; `offsets`: as a `Recipe`
    takes them."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    gradients: GradientTriple
    offsets: tuple[torch.Tensor | None, ...]
    device = property(attrgetter("q.device"))  # asked for so often that a function would count
    dtype = property(attrgetter("q.dtype"))

    def new_gradients(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Memory for dq, dk and dv: where the call wants them, else contiguous."""
        pairs = zip((self.q, self.k, self.v), self.gradients, strict=True)
        return tuple([x.new_empty(x.shape) if buffer is None else buffer for x, buffer in pairs])

    @property
    def extras(self) -> dict[str, str]:
        """What the call asks for that few implementations do: names of options, each with what the
        other implementations need in its place and what they get."""
        return {}

    @property
    def num_heads(self) -> int:
        return self.q.shape[1]

    @property
    def num_heads_k(self) -> int:
        return self.k.shape[1]

    @property
    def group(self) -> int:
        """Query heads of a key head."""
        return self.q.shape[1] // self.k.shape[1]

    @property
    def head_dim(self) -> int:
        return self.q.shape[2]
