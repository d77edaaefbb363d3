"""The list of work of `schedule.py`, order "zigzag", made by one small kernel.

`schedule.build_on_device` takes about thirty PyTorch operations; here each program ranks a few
sequences against all others, which is batch ** 2 comparisons in all, and writes their entries.
"""

import torch
import triton
import triton.language as tl

from gdpa_kernels.launch import launch
from gdpa_kernels.schedule import DeviceSchedule


@triton.jit
def rows_and_keys(cu_seqlens_q_ptr, cu_seqlens_k_ptr, index, batch, max_seqlen_q):
    """(query rows, keys) of the sequences at `index`; 0 beyond the batch."""
    inside = index < batch
    start_k = tl.load(cu_seqlens_k_ptr + index, mask=inside, other=0)
    keys = tl.load(cu_seqlens_k_ptr + index + 1, mask=inside, other=0) - start_k
    if cu_seqlens_q_ptr is None:
        rows = tl.where(inside, max_seqlen_q, 0)
    else:
        start_q = tl.load(cu_seqlens_q_ptr + index, mask=inside, other=0)
        rows = tl.load(cu_seqlens_q_ptr + index + 1, mask=inside, other=0) - start_q
        rows = tl.minimum(tl.maximum(rows, 0), max_seqlen_q)
    return rows, keys


@triton.jit
def tile_list_kernel(
    cu_seqlens_q_ptr, cu_seqlens_k_ptr, batch_ptr, head_ptr, block_ptr, count_ptr,
    batch, max_seqlen_q, rows_per_item, max_entries, num_programs,
    NUM_HEADS: tl.constexpr, BLOCK_N: tl.constexpr,
    OWN: tl.constexpr, OTHERS: tl.constexpr, ENTRIES: tl.constexpr,
):  # fmt: skip
    """Entries of OWN sequences, at their places in the list.

    Before a sequence come those with more key blocks, and those with as many and a smaller number.
    """
    mine = tl.program_id(0) * OWN + tl.arange(0, OWN)
    rows, keys = rows_and_keys(cu_seqlens_q_ptr, cu_seqlens_k_ptr, mine, batch, max_seqlen_q)
    blocks = tl.cdiv(rows, rows_per_item)
    cost = tl.cdiv(keys, BLOCK_N)
    before = tl.zeros([OWN], tl.int32)
    total = 0
    for first in tl.range(0, batch, OTHERS):
        others = first + tl.arange(0, OTHERS)
        their_rows, their_keys = rows_and_keys(
            cu_seqlens_q_ptr, cu_seqlens_k_ptr, others, batch, max_seqlen_q
        )
        their_blocks = tl.cdiv(their_rows, rows_per_item)
        their_cost = tl.cdiv(their_keys, BLOCK_N)
        total += tl.sum(their_blocks)
        more = their_cost[None, :] > cost[:, None]
        equal = (their_cost[None, :] == cost[:, None]) & (others[None, :] < mine[:, None])
        before += tl.sum(tl.where(more | equal, their_blocks[None, :], 0), 1)
    count = total * NUM_HEADS
    if tl.program_id(0) == 0:
        tl.store(count_ptr, count)

    for first in tl.range(0, max_entries, ENTRIES):
        entry = first + tl.arange(0, ENTRIES)
        position = before[:, None] * NUM_HEADS + entry[None, :]
        row = position // num_programs
        row_start = row * num_programs
        mirrored = row_start + tl.minimum(row_start + num_programs, count) - 1 - position
        place = tl.where(row % 2 == 1, mirrored, position)
        own = tl.maximum(blocks, 1)[:, None]
        valid = entry[None, :] < (blocks * NUM_HEADS)[:, None]
        tl.store(batch_ptr + place, tl.broadcast_to(mine[:, None], place.shape), mask=valid)
        tl.store(head_ptr + place, entry[None, :] // own, mask=valid)
        tl.store(block_ptr + place, entry[None, :] % own, mask=valid)


def tile_list(
    cu_seqlens_q: torch.Tensor | None,
    cu_seqlens_k: torch.Tensor,
    *,
    batch: int,
    max_tiles: int,
    max_seqlen_q: int,
    num_heads: int,
    block_m: int,
    block_n: int,
    num_programs: int,
) -> DeviceSchedule:
    """As `schedule.build_on_device("zigzag", ..., fastest="block")`; entries beyond num_tiles are
    undefined."""
    device, capacity = cu_seqlens_k.device, max_tiles * num_heads
    lists = torch.empty(3, max(capacity, 1), dtype=torch.int32, device=device)
    count = torch.zeros(1, dtype=torch.int32, device=device)
    own = 16
    launch(
        tile_list_kernel, (triton.cdiv(batch, own) if capacity else 0,), device,
        cu_seqlens_q, cu_seqlens_k, lists[0], lists[1], lists[2], count,
        batch, max_seqlen_q, block_m, triton.cdiv(max_seqlen_q, block_m) * num_heads, num_programs,
        NUM_HEADS=num_heads, BLOCK_N=block_n, OWN=own, OTHERS=256, ENTRIES=64, num_warps=4,
    )  # fmt: skip
    return DeviceSchedule(lists[0], lists[1], lists[2], count, capacity)
