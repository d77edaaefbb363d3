"""The list of blocks of a jagged batch: made by one small kernel, read by the rungs.

int32 `[1 + max_blocks, 2]`. The first row holds the number of blocks. The others hold (first_row,
rows) of a block, in the order of the tokens; rows beyond the count are undefined. The host knows
only the bound `max_blocks`, and does not wait for the device.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from gdpa_kernels.block_attention.batch import Batch, WorkList
from gdpa_kernels.calling.launch import cdiv, launch
from gdpa_kernels.calling.recipe import Recipe


@triton.jit
def count_blocks(blocks_ptr):
    """The number of blocks in the list."""
    return tl.load(blocks_ptr)


@triton.jit
def block_entry(blocks_ptr, index):
    """(first_row, rows) of a block."""
    ptr = blocks_ptr + (index + 1).to(tl.int64) * 2
    return tl.load(ptr), tl.load(ptr + 1)


@triton.jit
def _blocks_of(cu_seqlens_ptr, index, batch, block_size):
    """(start, length, blocks) of the sequences at `index`; none beyond the batch."""
    inside = index < batch
    start = tl.load(cu_seqlens_ptr + index, mask=inside, other=0)
    length = tl.load(cu_seqlens_ptr + index + 1, mask=inside, other=0) - start
    return start, length, tl.cdiv(length, block_size)


@triton.jit(do_not_specialize=["batch"])
def block_list_kernel(
    cu_seqlens_ptr, blocks_ptr, batch, block_size,
    OWN: tl.constexpr, OTHERS: tl.constexpr, ENTRIES: tl.constexpr,
):  # fmt: skip
    """Writes the entries of OWN sequences, after those of all sequences before them."""
    first_own = tl.program_id(0) * OWN
    preceding = 0
    for first in tl.range(0, first_own, OTHERS):
        others = first + tl.arange(0, OTHERS)
        _, _, theirs = _blocks_of(cu_seqlens_ptr, others, tl.minimum(batch, first_own), block_size)
        preceding += tl.sum(theirs)
    start, length, blocks = _blocks_of(
        cu_seqlens_ptr, first_own + tl.arange(0, OWN), batch, block_size
    )
    first_slot = 1 + preceding + tl.cumsum(blocks, 0) - blocks
    if tl.program_id(0) == tl.num_programs(0) - 1:
        tl.store(blocks_ptr, preceding + tl.sum(blocks))
    for first in tl.range(0, tl.max(blocks, 0), ENTRIES):
        local = first + tl.arange(0, ENTRIES)[None, :]
        ptrs = blocks_ptr + (first_slot[:, None] + local).to(tl.int64) * 2
        valid = local < blocks[:, None]
        tl.store(ptrs, start[:, None] + local * block_size, mask=valid)
        tl.store(ptrs + 1, tl.minimum(length[:, None] - local * block_size, block_size), mask=valid)


@dataclass(frozen=True)
class BlockListRecipe(Recipe):
    """The list of blocks of `block_size` tokens, of sequences that have at most `total`."""

    total: int
    block_size: int

    def make(self, cu_seqlens: torch.Tensor, _: None = None) -> WorkList:
        """(blocks,), on the device of cu_seqlens int32 `[batch + 1]`.

        Every full block has block_size tokens, and every sequence at most one shorter block.
        """
        batch, device = cu_seqlens.numel() - 1, cu_seqlens.device
        max_blocks = min(self.total, self.total // self.block_size + batch)
        if max_blocks == 0:
            return (torch.zeros(1, 2, dtype=torch.int32, device=device),)
        entries = torch.empty(1 + max_blocks, 2, dtype=torch.int32, device=device)
        sequences_per_program = 16
        launch(
            block_list_kernel, (cdiv(batch, sequences_per_program),), device,
            cu_seqlens, entries, batch, self.block_size,
            OWN=sequences_per_program, OTHERS=1024, ENTRIES=64, num_warps=4,
        )  # fmt: skip
        return (entries,)


def work_list_recipe(batch: Batch, config: object) -> BlockListRecipe:
    """The list of blocks of a call, the same for all launch constants."""
    return BlockListRecipe(batch.total, batch.block_size)
