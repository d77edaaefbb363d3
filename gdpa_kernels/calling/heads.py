"""What the tensors of a call say of it, for the `Batch` of either operator."""

from __future__ import annotations

import torch


class Heads:
    """q `[total_q, num_heads, head_dim]` and k `[total_k, num_heads_k, head_dim]`."""

    q: torch.Tensor
    k: torch.Tensor

    @property
    def device(self) -> torch.device:
        return self.q.device

    @property
    def dtype(self) -> torch.dtype:
        return self.q.dtype

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
