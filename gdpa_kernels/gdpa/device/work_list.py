"""The work list that most rungs read: its format (`entry`), the kernel that makes it in order
"zigzag", and the recipes by which rungs ask for it (`query_list_recipe`, `key_list_recipe`).

Its order: sequences by falling number of key blocks, then heads, then tiles. The list is cut into
rounds of P = `num_programs` entries, of which every second is reversed, and program p of the kernel
that reads it takes entries p, p + P, ...: so programs have nearly equal work. With P = 1 nothing is
reversed. For P = 3 and tiles that cost 9, 8, 7, 6, 5, 4 the list is 9 8 7 | 4 5 6: each program has
13. `list_model.build("zigzag", ..., fastest="block")` makes the same list with plain integers.

Each program of the kernel ranks a few sequences against all others, batch ** 2 comparisons in all,
and writes their entries. With splits the keys of a sequence are cut, and each part (split) is
listed as a sequence of its own, whose output is added to the others' later.

The list is int32 `[1 + max_items, 8]`. The first row holds the number of entries. An entry holds
all that a role must know of its tile, so that one load finds it; rows are of the packed tensors:

| field | of tiles of queries | of tiles of keys |
|-------|---------------------|------------------|
| 0     | start_q             | start_k          |
| 1     | start_out           | start_k          |
| 2     | len_q               | len_k            |
| 3     | start_k             | start_out        |
| 4     | len_k               | len_q            |
| 5     | head                | key head         |
| 6     | first row           | first key        |
| 7     | sequence            | sequence         |

The last field stands there if a rung asks for it (`numbered`).
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from gdpa_kernels.calling.launch import cdiv, launch, multiprocessors
from gdpa_kernels.calling.recipe import Recipe
from gdpa_kernels.gdpa import list_model
from gdpa_kernels.gdpa.batch import Batch, WorkList

WIDTH = tl.constexpr(8)


@triton.jit
def count_items(list_ptr):
    """The number of entries of the list."""
    return tl.load(list_ptr)


@triton.jit
def entry(list_ptr, item):
    """The first seven fields of an entry, by their names for tiles of queries: (start_q, start_out,
    len_q, start_k, len_k, head, first_row)."""
    ptr = list_ptr + (item + 1).to(tl.int64) * WIDTH
    return (
        tl.load(ptr), tl.load(ptr + 1), tl.load(ptr + 2), tl.load(ptr + 3), tl.load(ptr + 4),
        tl.load(ptr + 5), tl.load(ptr + 6),
    )  # fmt: skip


@triton.jit
def sequence_of(list_ptr, item):
    """The sequence of an entry, in a list that is `numbered`."""
    return tl.load(list_ptr + (item + 1).to(tl.int64) * WIDTH + 7)


@triton.jit
def store_fields(ptrs, fields, valid):
    """Write five fields, [sequences] each, of the entries at ptrs [sequences, entries]."""
    for i in tl.static_range(5):
        tl.store(ptrs + i, tl.broadcast_to(fields[i][:, None], ptrs.shape), mask=valid)


@triton.jit
def load_sequences(
    cu_seqlens_q_ptr, cu_seqlens_k_ptr, index, batch, max_seqlen_q,
    splits, split_keys, rows_out, PADDED: tl.constexpr = 1,
):  # fmt: skip
    """(start_q, start_out, rows, start_k, keys) of the sequences at `index`; none beyond the batch.

    cu_seqlens_q_ptr None: one q for all sequences. Unless splits is None `index` counts splits, of
    `split_keys` keys; the j-th of each sequence writes the j-th `rows_out` rows of the output.
    PADDED > 1: keys before the last ones, which are as many as rows, count up to the next multiple.
    """
    split = 0
    if splits is not None:
        split = index % splits
        index = index // splits
    inside = index < batch
    start_k = tl.load(cu_seqlens_k_ptr + index, mask=inside, other=0)
    keys = tl.load(cu_seqlens_k_ptr + index + 1, mask=inside, other=0) - start_k
    if cu_seqlens_q_ptr is None:
        rows = tl.where(inside, max_seqlen_q, 0)
        start_q = tl.zeros_like(start_k)
        start_out = index * max_seqlen_q
    else:
        start_q = tl.load(cu_seqlens_q_ptr + index, mask=inside, other=0)
        rows = tl.load(cu_seqlens_q_ptr + index + 1, mask=inside, other=0) - start_q
        rows = tl.minimum(tl.maximum(rows, 0), max_seqlen_q)
        start_out = start_q
    if PADDED > 1:
        keys = tl.cdiv(keys - rows, PADDED) * PADDED + rows
    if splits is not None:
        start_out += split * rows_out
        start_k += split * split_keys
        keys = tl.minimum(tl.maximum(keys - split * split_keys, 0), split_keys)
    return start_q, start_out, rows, start_k, keys


@triton.jit(do_not_specialize=["max_seqlen_q", "max_entries", "splits", "split_keys", "rows_out"])
def work_list_kernel(
    cu_seqlens_q_ptr, cu_seqlens_k_ptr, list_ptr,
    batch, max_seqlen_q, rows_per_item, max_entries, num_programs,
    NUM_HEADS: tl.constexpr, BLOCK_N: tl.constexpr, LEAST: tl.constexpr,
    OWN: tl.constexpr, OTHERS: tl.constexpr, ENTRIES: tl.constexpr,
    splits=None, split_keys=None, rows_out=None, NUMBERED: tl.constexpr = False,
    PADDED: tl.constexpr = 1,
):  # fmt: skip
    """Writes the entries of OWN sequences, or of OWN splits, to their slots in the list.

    Before a sequence come those with more key blocks, and those with as many and a smaller number.
    One with keys has LEAST tiles or more. A `batch` that is a multiple of 16 makes loads wide, so
    it is specialized.
    """
    index = tl.program_id(0) * OWN + tl.arange(0, OWN)
    start_q, start_out, rows, start_k, keys = load_sequences(
        cu_seqlens_q_ptr, cu_seqlens_k_ptr, index, batch, max_seqlen_q, splits, split_keys,
        rows_out, PADDED,
    )  # fmt: skip
    cost = tl.cdiv(keys, BLOCK_N)
    tiles = tl.maximum(tl.cdiv(rows, rows_per_item), tl.minimum(cost, LEAST))
    preceding = tl.zeros([OWN], tl.int32)
    total = 0
    num_listed, sequence = batch, index
    if splits is not None:
        num_listed, sequence = batch * splits, index // splits
    for first in tl.range(0, num_listed, OTHERS):
        others = first + tl.arange(0, OTHERS)
        _, _, their_rows, _, their_keys = load_sequences(
            cu_seqlens_q_ptr, cu_seqlens_k_ptr, others, batch, max_seqlen_q, splits, split_keys,
            rows_out, PADDED,
        )  # fmt: skip
        their_cost = tl.cdiv(their_keys, BLOCK_N)
        their_tiles = tl.cdiv(their_rows, rows_per_item)
        their_tiles = tl.maximum(their_tiles, tl.minimum(their_cost, LEAST))
        total += tl.sum(their_tiles)
        more = their_cost[None, :] > cost[:, None]
        equal = (their_cost[None, :] == cost[:, None]) & (others[None, :] < index[:, None])
        preceding += tl.sum(tl.where(more | equal, their_tiles[None, :], 0), 1)
    count = total * NUM_HEADS
    if tl.program_id(0) == 0:
        tl.store(list_ptr, count)

    for first in tl.range(0, max_entries, ENTRIES):
        local = first + tl.arange(0, ENTRIES)[None, :]
        position = preceding[:, None] * NUM_HEADS + local
        nth_round = position // num_programs
        round_start = nth_round * num_programs
        mirrored = round_start + tl.minimum(round_start + num_programs, count) - 1 - position
        slot = tl.where(nth_round % 2 == 1, mirrored, position)
        tiles_per_head = tl.maximum(tiles, 1)[:, None]
        valid = local < (tiles * NUM_HEADS)[:, None]
        ptrs = list_ptr + (slot + 1).to(tl.int64) * WIDTH
        store_fields(ptrs, (start_q, start_out, rows, start_k, keys), valid)
        tl.store(ptrs + 5, local // tiles_per_head, mask=valid)
        tl.store(ptrs + 6, local % tiles_per_head * rows_per_item, mask=valid)
        if NUMBERED:
            tl.store(ptrs + 7, tl.broadcast_to(sequence[:, None], ptrs.shape), mask=valid)


@dataclass(frozen=True)
class ZigzagRecipe(Recipe):
    """How a work list in the order of this file's docstring is made.

    rows, max_seqlen: of what is listed. num_programs: of the kernel that reads the list. least: a
    sequence with something on the other side has that many tiles or more, 0 or 1; 1 where a kernel
    that writes dQ once must write zeros for a sequence without keys. splits: (splits of a sequence,
    keys of one, rows of the output). numbered: entries name their sequence. padded: keys before the
    last ones, which are as many as queries, count up to the next multiple, where keys in pages
    precede packed ones. transposed: tiles of keys, whose entries name keys where others name
    queries; rows_of_q: of a shared q then.
    """

    rows: int
    max_seqlen: int
    num_heads: int
    rows_per_item: int
    block_n: int
    num_programs: int
    least: int = 0
    splits: tuple[int, int, int] = (1, 0, 0)
    numbered: bool = False
    padded: int = 1
    transposed: bool = False
    rows_of_q: int = 0

    def make(self, cu_seqlens_k: torch.Tensor, cu_seqlens_q: torch.Tensor | None) -> WorkList:
        """(entries,), made without waiting for the device."""
        device, batch = cu_seqlens_k.device, cu_seqlens_k.numel() - 1
        splits, split_keys, rows_out = self.splits
        longest = max(self.max_seqlen, self.least)
        tiles = list_model.max_tiles(self.rows, batch, longest, self.rows_per_item)
        capacity = tiles * self.num_heads * splits
        if capacity == 0:
            return (cu_seqlens_k.new_zeros(1, WIDTH.value),)
        offsets = cu_seqlens_q, cu_seqlens_k
        if self.transposed:
            if cu_seqlens_q is None:
                starts = torch.arange(batch + 1, dtype=torch.int32, device=device)
                cu_seqlens_q = starts * self.rows_of_q
            offsets = cu_seqlens_k, cu_seqlens_q
        entries = torch.empty(1 + capacity, WIDTH.value, dtype=torch.int32, device=device)
        chunk = 4
        cut = {"splits": splits, "split_keys": split_keys, "rows_out": rows_out}
        most = max(cdiv(self.max_seqlen, self.rows_per_item), self.least) * self.num_heads
        launch(
            work_list_kernel, (cdiv(batch * splits, chunk),), device,
            *offsets, entries, batch, self.max_seqlen, self.rows_per_item,
            most, self.num_programs, NUM_HEADS=self.num_heads, BLOCK_N=self.block_n,
            LEAST=self.least, OWN=chunk, OTHERS=2048, ENTRIES=16, **(cut if splits > 1 else {}),
            NUMBERED=self.numbered, PADDED=self.padded, num_warps=4,
        )  # fmt: skip
        return (entries,)


def query_list_recipe(
    batch: Batch, rows_per_item: int, block_n: int, ctas: int = 1, programs: int = 1,
    splits: int = 1,
) -> ZigzagRecipe:  # fmt: skip
    """The list of tiles of queries, those with the most keys first, for clusters of `ctas`, of
    which a multiprocessor holds `programs`. With `splits` the output is `[splits * rows, ...]`: row
    i of split j is row j * rows + i."""
    rows, cut = batch.rows, (1, 0, 0)
    if splits > 1:
        cut = splits, cdiv(cdiv(batch.max_seqlen_k, block_n), splits) * block_n, rows
    return ZigzagRecipe(
        rows, batch.max_seqlen_q, batch.num_heads, rows_per_item, block_n,
        max(programs * multiprocessors(batch.device) // ctas, 1), splits=cut,
        numbered=batch.segments is not None or batch.paged_kv is not None,
        padded=block_n if batch.paged_kv is not None and batch.k.shape[0] else 1,
    )  # fmt: skip


def key_list_recipe(batch: Batch, keys_per_item: int, block_m: int, least: int = 0) -> ZigzagRecipe:
    """The list of tiles of keys, those with the most queries first: an entry's queries are keys
    and its keys are queries. `least`: tiles of a sequence with queries, at least."""
    return ZigzagRecipe(
        batch.k.shape[0], batch.max_seqlen_k, batch.num_heads_k, keys_per_item, block_m,
        multiprocessors(batch.device), least=least, numbered=batch.segments is not None,
        transposed=True, rows_of_q=batch.max_seqlen_q if batch.shared_q else 0,
    )  # fmt: skip
