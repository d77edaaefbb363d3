"""What the tensors of a call say of it, for the `Batch` of either operator."""

from __future__ import annotations

from operator import attrgetter

import torch

Gradients = tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]


class Heads:
    """q `[total_q, num_heads, head_dim]`, k and v `[total_k, num_heads_k, head_dim]`; `gradients`:
    where dq, dk and dv are to be written, None for memory of their own."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    gradients: Gradients
    device = property(attrgetter("q.device"))  # asked for so often that a function would count
    dtype = property(attrgetter("q.dtype"))

    def new_gradients(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Memory for dq, dk and dv: where the call wants them, else contiguous."""
        pairs = zip((self.q, self.k, self.v), self.gradients, strict=True)
        return tuple([x.new_empty(x.shape) if place is None else place for x, place in pairs])

    @property
    def extras(self) -> dict[str, str]:
        """What the call asks for that few implementations do: options of the operator, each with
        what the others need of it and get."""
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
