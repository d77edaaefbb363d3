"""Keys and values of histories that stay in pages, for the kernels that read them there."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class History:
    """What each sequence's keys begin with.

    rows `[num_pages * 2 * page_size, num_heads_k, head_dim]`, contiguous: page p's keys are the
    rows from 2 * p * page_size on, its values page_size further. Sequence i has the pages indices[
    indptr[i]] up to, not including, indices[indptr[i + 1]], and cu_seqlens[i + 1] - cu_seqlens[i]
    tokens in them; all int32. tokens: those of all sequences.
    """

    rows: torch.Tensor
    indptr: torch.Tensor
    indices: torch.Tensor
    cu_seqlens: torch.Tensor
    page_size: int
    tokens: int
