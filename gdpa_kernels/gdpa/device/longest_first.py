"""Sequences by falling length, made by one small kernel: the work list of rungs whose items are
whole sequences (v5 and b2 backward), and the order of sequences in ticket_list.py."""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from gdpa_kernels.calling.launch import cdiv, launch
from gdpa_kernels.calling.recipe import Recipe
from gdpa_kernels.device.sequences import sequence
from gdpa_kernels.gdpa.batch import WorkList


@triton.jit
def order_kernel(cu_seqlens_ptr, order_ptr, batch, OWN: tl.constexpr, OTHERS: tl.constexpr):
    """Writes OWN sequences to their slots: after those with more rows, and those with as many and a
    smaller number."""
    index = tl.program_id(0) * OWN + tl.arange(0, OWN)
    offsets = cu_seqlens_ptr + index
    rows = tl.load(offsets + 1, mask=index < batch, other=0) - tl.load(
        offsets, mask=index < batch, other=0
    )
    rank = tl.zeros([OWN], tl.int32)
    for first in tl.range(0, batch, OTHERS):
        others = first + tl.arange(0, OTHERS)
        inside = others < batch
        their_offsets = cu_seqlens_ptr + others
        theirs = tl.load(their_offsets + 1, mask=inside, other=0)
        theirs -= tl.load(their_offsets, mask=inside, other=0)
        equal = (theirs[None, :] == rows[:, None]) & (others[None, :] < index[:, None])
        sooner = (theirs[None, :] > rows[:, None]) | equal
        rank += tl.sum((sooner & inside[None, :]).to(tl.int32), 1)
    tl.store(order_ptr + rank, index, mask=index < batch)


def longest_first(cu_seqlens: torch.Tensor) -> torch.Tensor:
    """The sequences by falling length, int32 `[sequences]`."""
    sequences, device, chunk = cu_seqlens.numel() - 1, cu_seqlens.device, 4
    order = torch.empty(sequences, dtype=torch.int32, device=device)
    launch(
        order_kernel, (cdiv(sequences, chunk),), device,
        cu_seqlens, order, sequences, OWN=chunk, OTHERS=2048, num_warps=4,
    )  # fmt: skip
    return order


@dataclass(frozen=True)
class LongestFirstRecipe(Recipe):
    """The sequences by falling number of queries, as a work list."""

    def make(self, cu_seqlens_k: torch.Tensor, cu_seqlens_q: torch.Tensor) -> WorkList:
        """(order,), int32 `[sequences]`."""
        return (longest_first(cu_seqlens_q),)


@triton.aggregate
class Items:
    """Work items: `count` pairs of a sequence, in this order, and a key head."""

    order_ptr: tl.tensor
    cu_seqlens_q_ptr: tl.tensor
    cu_seqlens_k_ptr: tl.tensor
    count: tl.tensor
    max_seqlen_q: tl.tensor
    NUM_HEADS_K: tl.constexpr


@triton.jit
def sequence_and_head(items, item):
    """(start_q, len_q, start_k, len_k, key head) of one of `Items`."""
    batch = tl.load(items.order_ptr + item // items.NUM_HEADS_K)
    start_q, _, len_q, start_k, len_k = sequence(
        items.cu_seqlens_q_ptr, items.cu_seqlens_k_ptr, batch, items.max_seqlen_q
    )
    return start_q, len_q, start_k, len_k, item % items.NUM_HEADS_K
