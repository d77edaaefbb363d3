"""The work list under a mask, whose entries programs take by tickets (tickets.py): the kernel that
makes it, its recipe, and whether a call should use it (`uses_tickets`).

Its order: sequences by falling length of the other side (of keys, for tiles of queries), then
heads, then a head's tiles by falling cost: programs read the same K and V at the same time. Its end
is sorted by cost alone, costly tiles first, so that programs finish together. This end is the
fewest last heads that hold the work of all programs during the most costly tile: whoever is busy
with an earlier tile when it begins is free before it is used up. `list_model.build_tickets` makes
the same list with plain integers.

Of one head and 2 programs, three sequences with tiles that cost 3, 2, 1; 2, 1; and 2, 1: the most
costly tile costs 3, so the end must hold 2 * 3 = 6, which the last two sequences do. The list is A3
A2 A1 | B2 C2 B1 C1. The end begins with the sequence at `cut` = 1, in slot `cut_slot` = 3. B1 has
rank 2 in it: B2 and C2 cost more, C1 as much but later. So its slot is 5.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from gdpa_kernels.calling.launch import cdiv, launch
from gdpa_kernels.calling.recipe import Recipe
from gdpa_kernels.gdpa import list_model
from gdpa_kernels.gdpa.batch import Batch, WorkList
from gdpa_kernels.gdpa.device.longest_first import longest_first
from gdpa_kernels.gdpa.device.work_list import WIDTH, load_sequences, store_fields

SHORT = 4096  # rows of a sequence up to which a fixed list can be balanced
BALANCED = 1.05  # work of the slowest program over the mean, up to which it is


class Order(NamedTuple):
    """Sequences in the order in which they are listed, and what their tiles cost."""

    order_ptr: tl.tensor
    cu_seqlens_q_ptr: tl.tensor
    cu_seqlens_k_ptr: tl.tensor
    batch: tl.tensor
    max_seqlen_q: tl.tensor
    rows_per_item: tl.tensor
    max_cost: tl.tensor
    CAUSAL: tl.constexpr
    SHIFTED: tl.constexpr


class HeadCosts(NamedTuple):
    """The `tiles` tiles of one head of a sequence. Tile r, counted from 1 at the cheap end, costs
    max(1, min(base + r, limit)) in blocks of `rows_per_item` of the other side. Contexts and
    targets are not counted: their tiles cost as those of a causal mask."""

    tiles: tl.tensor
    base: tl.tensor
    limit: tl.tensor


@triton.jit
def tiles_at(order, position):
    """((index, start_q, rows, start_k, keys), `HeadCosts`) of sequences at `position`."""
    index = tl.load(order.order_ptr + position, mask=position < order.batch, other=order.batch)
    start_q, _, rows, start_k, keys = load_sequences(
        order.cu_seqlens_q_ptr, order.cu_seqlens_k_ptr, index, order.batch, order.max_seqlen_q,
        None, None, None,
    )  # fmt: skip
    limit = tl.maximum(tl.minimum(tl.cdiv(keys, order.rows_per_item), order.max_cost), 1)
    base = tl.zeros_like(rows)
    if not order.CAUSAL:
        base = limit
    elif order.SHIFTED:
        base = (keys - rows) // order.rows_per_item  # toward 0, as `int()` in list_model.py
    head = HeadCosts(tl.cdiv(rows, order.rows_per_item), base, limit)
    return (index, start_q, rows, start_k, keys), head


@triton.jit
def work_of(head):
    """The cost of all tiles of a head, int64. Tiles up to `low` cost 1, from `high` on `limit`, and
    tile r between them base + r, in all (low + 1 + ... + high) + (high - low) base. Of 5 tiles with
    base -1 and limit 3: low is 1, high 4, and 1 + (1 + 2 + 3) + 3 is 10."""
    tiles, base, limit = head
    low = tl.minimum(tl.maximum(-base, 0), tiles)
    high = tl.maximum(tl.minimum(limit - base, tiles), low).to(tl.int64)
    low = low.to(tl.int64)
    rising = (high * (high + 1) - low * (low + 1)) // 2 + (high - low) * base
    return low + rising + (tiles - high) * limit


@triton.jit
def tiles_over(head, cost):
    """The number of tiles of a head that cost more than `cost`, which is 1 or more: those with
    r > cost - base, if `limit` is more."""
    tiles, base, limit = head
    count = tl.minimum(tl.maximum(tiles - tl.maximum(cost - base, 0), 0), tiles)
    return tl.where(cost < limit, count, 0)


@triton.jit
def tiles_from(head, cost):
    """The number of tiles of a head that cost `cost` or more."""
    return tl.where(cost > 1, tiles_over(head, tl.maximum(cost - 1, 1)), head.tiles)


@triton.jit
def sorted_heads(order, work, need, NUM_HEADS: tl.constexpr, OTHERS: tl.constexpr):
    """(cut, cut_heads, cut_slot) of the sorted end: the last `cut_heads` heads of the sequence at
    `cut`, and all later sequences; its entries begin at `cut_slot`.

    work: of one head of every sequence. The end holds `need` or more, and without its first head
    less: so of one sequence, at most, the work of those that follow is less than `need`, and with
    its own it is not. If the whole list holds less, all of it is sorted: (0, NUM_HEADS, 0).
    """
    cut, cut_heads, cut_slot, cuts = 0, 0, 0, 0
    passed, left = 0, work
    for first in tl.range(0, order.batch, OTHERS):
        others = first + tl.arange(0, OTHERS)
        _, each = tiles_at(order, others)
        works = work_of(each)
        after = (left - tl.cumsum(works, 0)) * NUM_HEADS  # the work of the sequences that follow
        crosses = (after < need) & (after + works * NUM_HEADS >= need)
        heads = tl.cdiv(need - after, tl.maximum(works, 1)).to(tl.int32)
        slots = (passed + tl.cumsum(each.tiles, 0)) * NUM_HEADS - heads * each.tiles
        cut += tl.sum(tl.where(crosses, others, 0))
        cut_heads += tl.sum(tl.where(crosses, heads, 0))
        cut_slot += tl.sum(tl.where(crosses, slots, 0))
        cuts += tl.sum(crosses.to(tl.int32))
        passed += tl.sum(each.tiles)
        left -= tl.sum(works)
    cut_heads = tl.where(cuts > 0, cut_heads, NUM_HEADS)
    return cut, cut_heads, cut_slot


@triton.jit
def sorted_rank(
    order, costs, position, head, nth, cut, cut_heads, NUM_HEADS: tl.constexpr, TAIL: tl.constexpr
):
    """The number of sorted tiles before the nth of a head, [OWN, ENTRIES]: those that cost more,
    and those that cost the same and come earlier in the unsorted order. costs, position: of its
    sequence, [OWN, 1].

    In its own sequence these are `over` of each sorted head, `equal` of each sorted head before
    this one, and nth - over of this one; of a later sequence costlier tiles alone, of an earlier
    one equal ones too.
    """
    own_sorted = tl.where(position == cut, cut_heads, NUM_HEADS)
    cost = tl.maximum(tl.minimum(costs.base + tl.maximum(costs.tiles, 1) - nth, costs.limit), 1)
    over = tiles_over(costs, cost)
    equal = tiles_from(costs, cost) - over
    earlier_heads = head - (NUM_HEADS - own_sorted)
    rank = over * own_sorted + equal * earlier_heads + (nth - over)
    for start in tl.range(cut, order.batch, TAIL):
        others = start + tl.arange(0, TAIL)
        _, each = tiles_at(order, others)
        heads = tl.where(others == cut, cut_heads, NUM_HEADS)[None, None, :]
        other = others[None, None, :]
        plane = HeadCosts(
            each.tiles[None, None, :], each.base[None, None, :], each.limit[None, None, :]
        )
        current = position[:, :, None]
        later = tl.where(other > current, tiles_over(plane, cost[:, :, None]), 0)
        equals = tiles_from(plane, cost[:, :, None])
        rank += tl.sum(tl.where(other < current, equals, later) * heads, 2)
    return rank


@triton.jit(do_not_specialize=["max_seqlen_q", "max_entries", "max_cost"])
def ticket_list_kernel(
    order_ptr, cu_seqlens_q_ptr, cu_seqlens_k_ptr, list_ptr,
    batch, max_seqlen_q, rows_per_item, max_entries, num_programs, max_cost,
    NUM_HEADS: tl.constexpr, CAUSAL: tl.constexpr, SHIFTED: tl.constexpr, FALLING: tl.constexpr,
    NUMBERED: tl.constexpr, OWN: tl.constexpr, OTHERS: tl.constexpr, ENTRIES: tl.constexpr,
    TAIL: tl.constexpr,
):  # fmt: skip
    """Writes the entries of OWN sequences of the order to their slots in the list; the entries of
    one sequence are shared out among the programs of the second axis. What precedes them is counted
    over all sequences, OTHERS at a time, and over those with sorted heads, TAIL at a time."""
    order = Order(
        order_ptr, cu_seqlens_q_ptr, cu_seqlens_k_ptr, batch, max_seqlen_q, rows_per_item, max_cost,
        CAUSAL, SHIFTED,
    )  # fmt: skip
    position = tl.program_id(0) * OWN + tl.arange(0, OWN)
    fields, costs = tiles_at(order, position)
    index, start_q, rows, start_k, keys = fields
    preceding = tl.zeros([OWN], tl.int32)  # tiles of a head of the sequences before
    total, greatest = 0, tl.cast(1, tl.int32)
    work = tl.cast(0, tl.int64)
    for first in tl.range(0, batch, OTHERS):
        others = first + tl.arange(0, OTHERS)
        _, each = tiles_at(order, others)
        total += tl.sum(each.tiles)
        work += tl.sum(work_of(each))
        most = tl.where(each.tiles > 0, tl.minimum(each.base + each.tiles, each.limit), 1)
        greatest = tl.maximum(greatest, tl.max(most))
        earlier = others[None, :] < position[:, None]
        preceding += tl.sum(tl.where(earlier, each.tiles[None, :], 0), 1)
    if tl.program_id(0) + tl.program_id(1) == 0:
        tl.store(list_ptr, total * NUM_HEADS)
    need = greatest.to(tl.int64) * num_programs
    cut, cut_heads, cut_slot = sorted_heads(order, work, need, NUM_HEADS, OTHERS)

    costs = HeadCosts(costs.tiles[:, None], costs.base[:, None], costs.limit[:, None])
    position = position[:, None]
    per_head = tl.maximum(costs.tiles, 1)
    step = ENTRIES * tl.num_programs(1)
    for first in tl.range(tl.program_id(1) * ENTRIES, max_entries, step):
        local = first + tl.arange(0, ENTRIES)[None, :]
        head = local // per_head
        nth = local % per_head  # of its head, from the costly end
        slot = preceding[:, None] * NUM_HEADS + local
        valid = local < costs.tiles * NUM_HEADS
        first_sorted = NUM_HEADS - tl.where(position == cut, cut_heads, NUM_HEADS)
        is_sorted = valid & (position >= cut) & (head >= first_sorted)
        if tl.max(tl.max(is_sorted.to(tl.int32), 1), 0) > 0:
            rank = sorted_rank(order, costs, position, head, nth, cut, cut_heads, NUM_HEADS, TAIL)
            slot = tl.where(is_sorted, cut_slot + rank, slot)
        block = per_head - 1 - nth if FALLING else nth
        ptrs = list_ptr + (slot + 1).to(tl.int64) * WIDTH
        store_fields(ptrs, (start_q, start_q, rows, start_k, keys), valid)
        tl.store(ptrs + 5, head, mask=valid)
        tl.store(ptrs + 6, block * rows_per_item, mask=valid)
        if NUMBERED:
            tl.store(ptrs + 7, tl.broadcast_to(index[:, None], ptrs.shape), mask=valid)


@dataclass(frozen=True)
class TicketRecipe(Recipe[WorkList]):
    """How a work list in the order of this file's docstring is made.

    rows, max_seqlen: of what is listed. transposed: tiles of keys, whose entries name keys where
    others name queries. causal: a tile's cost rises along its head, or falls with tiles of keys;
    else all cost the same. shifted: the r-th cheapest tile goes through base + r blocks, where
    base is the other side's length less this one's, in blocks; else base is 0. max_cost: no tile
    costs more, in blocks.
    """

    rows: int
    max_seqlen: int
    num_heads: int
    rows_per_item: int
    num_programs: int
    causal: bool
    shifted: bool
    max_cost: int
    numbered: bool
    transposed: bool

    def make(self, cu_seqlens_k: torch.Tensor, cu_seqlens_q: torch.Tensor) -> WorkList:
        """(entries,), without waiting for the device."""
        offsets = cu_seqlens_q, cu_seqlens_k
        if self.transposed:
            offsets = cu_seqlens_k, cu_seqlens_q
        device, batch = cu_seqlens_k.device, cu_seqlens_k.numel() - 1
        tiles = list_model.max_tiles(self.rows, batch, self.max_seqlen, self.rows_per_item)
        if tiles == 0:
            return (cu_seqlens_k.new_zeros(1, WIDTH.value),)
        size = 1 + tiles * self.num_heads, WIDTH.value
        entries = torch.empty(size, dtype=torch.int32, device=device)
        order = longest_first(offsets[1])  # by the side that a tile goes through
        share, chunk = 4, 16
        max_entries = cdiv(self.max_seqlen, self.rows_per_item) * self.num_heads
        launch(
            ticket_list_kernel, (cdiv(batch, share), cdiv(max_entries, 2 * chunk)), device,
            order, *offsets, entries, batch, self.max_seqlen, self.rows_per_item, max_entries,
            self.num_programs, self.max_cost, NUM_HEADS=self.num_heads, CAUSAL=self.causal,
            SHIFTED=self.shifted, FALLING=not self.transposed, NUMBERED=self.numbered, OWN=share,
            OTHERS=64 if batch <= 64 else 1024, ENTRIES=chunk, TAIL=64, num_warps=4,
        )  # fmt: skip
        return (entries,)


def uses_tickets(
    batch: Batch, rows_per_item: int, programs: int, *, transposed: bool = False
) -> bool:
    """True where tickets beat a fixed list: under a mask that makes tiles unequal, with more tiles
    than `programs`. Keys in pages keep the list."""
    if not batch.masked or batch.shared_q or batch.paged_kv is not None:
        return False
    rows, longest, heads = listed_side(batch, transposed)
    if list_model.max_tiles(rows, batch.sequences, longest, rows_per_item) * heads <= programs:
        return False
    if batch.window is not None:
        # Equal tiles need none: those of one sequence; forward those under a window of a tile.
        return batch.sequences > 1 and (transposed or batch.window > rows_per_item)
    uneven = rows < batch.sequences * longest
    if uneven or longest > SHORT:
        return True
    tiles = cdiv(longest, rows_per_item)  # of equal sequences, which a fixed list may balance
    return list_model.zigzag_imbalance(batch.sequences * heads, tiles, programs) > BALANCED


def listed_side(batch: Batch, transposed: bool) -> tuple[int, int, int]:
    """(rows, the most of a sequence, heads) of queries or, `transposed`, of keys."""
    if transposed:
        return batch.k.shape[0], batch.max_seqlen_k, batch.num_heads_k
    return batch.rows, batch.max_seqlen_q, batch.num_heads


def ticket_recipe(
    batch: Batch, rows_per_item: int, programs: int, *, transposed: bool = False
) -> TicketRecipe:
    """The list of tiles of queries or, `transposed`, of keys, for `programs` programs.

    Query i sees i + 1 keys, so base is 0, and with "lower_right" len_k - len_q more. Key j is seen
    by len_q - j queries, which for the r-th block from the end are r blocks and len_q - len_k more;
    with "lower_right" by len_k - j, so base is 0. Hence `shifted`.
    """
    return TicketRecipe(
        *listed_side(batch, transposed), rows_per_item, programs, causal=bool(batch.causal),
        shifted=batch.lower_right != transposed,
        max_cost=list_model.window_cost(batch.window, rows_per_item, causal=bool(batch.causal)),
        numbered=batch.segments is not None, transposed=transposed,
    )  # fmt: skip
