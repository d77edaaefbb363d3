"""Work lists in plain integers: orders of tiles, their costs, and how even programs' shares are.

A model of what `device/` makes on the GPU, for tests and chapters; and the few numbers of it that
the host needs before a launch (`max_tiles`, `window_cost`, `zigzag_imbalance`). `TileOrderRecipe`
makes the list of rung v3.

A tile is BLOCK_M query rows of one head of one sequence. Program p of P takes the entries p, p + P,
p + 2 P, ... of a list, or whichever is next when it is free (`build_tickets`). Orders:

- "padded": the whole batch x heads x ceil(max_seqlen_q / BLOCK_M) grid, empty tiles included;
- "valid": only tiles that hold query rows, in the same natural order;
- "longest_first": valid, stably sorted by falling cost;
- "zigzag": longest_first cut into rounds of P, every second one reversed (boustrophedon).

A tile costs its number of K/V blocks, ceil(len_k / BLOCK_N), or fewer under a mask. In the natural
order the sequence is slowest; `fastest` says whether consecutive entries step through the heads of
a row block ("head") or through the row blocks of a head ("block", as an ordinary launch grid).
"""

from __future__ import annotations

import functools
import heapq
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import torch

from gdpa_kernels.calling.checks import check_choice, check_count, check_positive
from gdpa_kernels.calling.launch import cdiv
from gdpa_kernels.calling.recipe import Recipe

ORDERS = ("padded", "valid", "zigzag", "longest_first")
FASTEST = ("head", "block")
EMPTY = 0.15  # of the time of a K/V block, which a program takes to find that a tile is empty


@dataclass(frozen=True)
class ModelledList:
    """A work list for `num_programs` programs.

    The tuples have one item per entry: sequence, head, row block, cost in K/V blocks, and whether
    the tile has no query rows (then it costs 0 blocks).
    """

    order: str
    num_programs: int
    tile_batch: tuple[int, ...]
    tile_head: tuple[int, ...]
    tile_block: tuple[int, ...]
    costs: tuple[int, ...]
    empty: tuple[bool, ...]

    def __len__(self) -> int:
        return len(self.costs)

    def tiles(self) -> list[tuple[int, int, int]]:
        """(sequence, head, row block) in list order."""
        return list(zip(self.tile_batch, self.tile_head, self.tile_block, strict=True))

    def work(self, prologue: float = 1.0) -> list[float]:
        """Modelled time of each tile, in units of one K/V block.

        A tile takes its K/V blocks and `prologue`, by default one block, for loading Q and storing
        O; one that is found to be empty takes EMPTY.
        """
        pairs = zip(self.costs, self.empty, strict=True)
        return [EMPTY if empty else prologue + cost for cost, empty in pairs]

    def loads(self, prologue: float = 1.0, *, dynamic: bool = False) -> list[float]:
        """Modelled time of each program, [num_programs].

        By default entry p goes to program p % num_programs. `dynamic=True` gives each tile in
        turn to the program that is free first: an atomic counter, or an ordinary launch grid.
        """
        work = self.work(prologue)
        if not dynamic:
            return [sum(work[p :: self.num_programs]) for p in range(self.num_programs)]
        free = [0.0] * self.num_programs
        for time in work:
            heapq.heapreplace(free, free[0] + time)
        return free

    def makespan(self, prologue: float = 1.0, *, dynamic: bool = False) -> float:
        """Modelled time of the slowest program, in units of one K/V block."""
        return max(self.loads(prologue, dynamic=dynamic))

    def ideal(self, prologue: float = 1.0) -> float:
        """Useful work (no empty tiles) per program: no assignment has a shorter makespan."""
        return (sum(self.work(prologue)) - EMPTY * sum(self.empty)) / self.num_programs

    def imbalance(self, prologue: float = 1.0, *, dynamic: bool = False) -> float:
        """makespan / ideal: at least 1, and 1 when no program waits and no tile is empty.

        ValueError if the list holds no work.
        """
        ideal = self.ideal(prologue)
        if ideal == 0:
            raise ValueError(f"the list must hold some work, got {len(self)} tiles of no cost")
        return self.makespan(prologue, dynamic=dynamic) / ideal


def build(
    order: str,
    seqlens_q: Sequence[int],
    seqlens_k: Sequence[int],
    *,
    num_heads: int,
    block_m: int,
    block_n: int,
    num_programs: int,
    max_seqlen_q: int | None = None,
    fastest: str = "head",
) -> ModelledList:
    """The work list of a batch.

    `seqlens_q` and `seqlens_k` are the rows of each sequence, [batch]; `num_heads` is num_heads_q.
    `max_seqlen_q` (default: the longest sequence) sizes the padded grid. ValueError, naming
    argument, expectation and received value, if an argument is out of range.
    """
    check_choice("order", order, ORDERS)
    check_choice("fastest", fastest, FASTEST)
    check_positive(num_heads=num_heads, block_m=block_m, block_n=block_n, num_programs=num_programs)
    if len(seqlens_k) != len(seqlens_q):
        raise ValueError(
            f"seqlens_k must have the {len(seqlens_q)} entries of seqlens_q, got {len(seqlens_k)}"
        )
    for length in (*seqlens_q, *seqlens_k):
        check_count("every length", length, 0)
    longest = max(seqlens_q, default=0)
    if max_seqlen_q is None:
        max_seqlen_q = longest
    check_count("max_seqlen_q", max_seqlen_q, longest)

    costs = [cdiv(length, block_n) for length in seqlens_k]
    blocks = [cdiv(length, block_m) for length in seqlens_q]
    listed = blocks
    if order == "padded":
        listed = [cdiv(max_seqlen_q, block_m)] * len(blocks)
    sequences = list(range(len(blocks)))
    if order in ("zigzag", "longest_first"):
        sequences.sort(key=lambda b: -costs[b])

    tiles: list[tuple[int, int, int]] = []
    for b in sequences:
        if fastest == "head":
            tiles += [(b, h, m) for m in range(listed[b]) for h in range(num_heads)]
        else:
            tiles += [(b, h, m) for h in range(num_heads) for m in range(listed[b])]
    if order == "zigzag":
        rows = [tiles[i : i + num_programs] for i in range(0, len(tiles), num_programs)]
        tiles = [t for r, row in enumerate(rows) for t in (row[::-1] if r % 2 else row)]
    empty = tuple(m >= blocks[b] for b, _, m in tiles)
    return ModelledList(
        order=order,
        num_programs=num_programs,
        tile_batch=tuple(b for b, _, _ in tiles),
        tile_head=tuple(h for _, h, _ in tiles),
        tile_block=tuple(m for _, _, m in tiles),
        costs=tuple(0 if none else costs[b] for (b, _, _), none in zip(tiles, empty, strict=True)),
        empty=empty,
    )


def masked_cost(
    rank: int, rows: int, keys: int, block: int, *, shifted: bool = False, max_cost: int = 2**30
) -> int:
    """Blocks of keys that a tile of `block` rows sees under a causal mask, 1 to `max_cost`.

    `rank` of the tile in its head counts from 1 at the end that sees the fewest of `keys` keys.
    With `shifted` the last of `rows` rows sees all keys, else row i sees i + 1.
    """
    base = int((keys - rows) / block) if shifted else 0
    return max(min(base + rank, cdiv(keys, block), max_cost), 1)


def window_cost(window: int | None, block: int, *, causal: bool = True) -> int:
    """Blocks of keys that a window lets a tile of `block` rows see, at most."""
    if window is None:
        return 2**30
    return cdiv(window, block) * (1 if causal else 2) + 1


def with_masked_costs(
    tiles: ModelledList, rows: Sequence[int], keys: Sequence[int], *, block: int,
    falling: bool = True, shifted: bool = False, max_cost: int = 2**30,
    num_targets: Sequence[int] | None = None,
) -> ModelledList:  # fmt: skip
    """The same list, each tile with its cost under a causal mask. `falling`: the last rows of a
    head see the most keys, else the first, as keys are seen by queries. `num_targets`, [batch]: so
    many last tokens of each sequence see its history and themselves."""
    costs = []
    for i, _, index in tiles.tiles():
        rank = index + 1 if falling else cdiv(rows[i], block) - index
        cost = masked_cost(rank, rows[i], keys[i], block, shifted=shifted, max_cost=max_cost)
        history = keys[i] - (num_targets[i] if num_targets else 0)
        if falling:
            cost = min(cost, cdiv(history, block) + 1)
        elif index * block >= history:
            cost = 1
        costs.append(cost)
    return replace(tiles, costs=tuple(costs))


@functools.lru_cache(maxsize=4096)  # integers to a number: nothing that can be stale
def zigzag_imbalance(num_heads: int, tiles: int, num_programs: int) -> float:
    """The imbalance, as `ModelledList` has it with a prologue of half a block, of a zigzag list of
    equal heads under a causal mask, `num_heads` over all sequences, of `tiles` tiles each."""
    costs = np.tile(np.arange(1, tiles + 1) + 0.5, num_heads)
    rows = np.append(costs, np.zeros(-len(costs) % num_programs)).reshape(-1, num_programs)
    last = len(costs) - (len(rows) - 1) * num_programs  # tiles of the last row
    if len(rows) % 2 == 0:
        rows[-1, :last] = rows[-1, :last][::-1]
        rows[1:-1:2] = rows[1:-1:2, ::-1]
    else:
        rows[1::2] = rows[1::2, ::-1]
    return float(rows.sum(0).max() * num_programs / costs.sum())


def build_tickets(
    rows: Sequence[int],
    keys: Sequence[int],
    *,
    num_heads: int,
    block: int,
    num_programs: int,
    causal: bool = True,
    shifted: bool = False,
    max_cost: int = 2**30,
    falling: bool = True,
) -> ModelledList:
    """The work list that programs take by tickets; see `device/ticket_list.py`.

    `rows` and `keys` are the lengths of what is listed and of what each tile goes through, [batch].
    A tile is `block` rows and costs `masked_cost`; all that a head's most costly one can, if not
    `causal`. `falling`: see `with_masked_costs`.

    Sequences by falling keys, then heads, costly tiles first; the last heads, which hold the cost
    of num_programs of the most costly tile, sorted by falling cost.
    """
    tiles = []
    for i in sorted(range(len(rows)), key=lambda i: -keys[i]):
        count = cdiv(rows[i], block)
        for head in range(num_heads):
            for nth in range(count):
                rank = count - nth if causal else 2**30
                cost = masked_cost(
                    rank, rows[i], keys[i], block, shifted=shifted, max_cost=max_cost
                )
                tiles.append((i, head, count - 1 - nth if falling else nth, cost))
    need = num_programs * max((tile[3] for tile in tiles), default=0)
    cut = len(tiles)
    while cut and (need > 0 or tiles[cut - 1][:2] == tiles[cut][:2]):
        cut -= 1
        need -= tiles[cut][3]
    tiles[cut:] = sorted(tiles[cut:], key=lambda tile: -tile[3])
    batches, heads, blocks, costs = zip(*tiles, strict=True) if tiles else ((), (), (), ())
    empty = (False,) * len(tiles)
    return ModelledList("tickets", num_programs, batches, heads, blocks, costs, empty)


def max_tiles(total_q: int, batch: int, max_seqlen_q: int, block_m: int) -> int:
    """An upper bound, known on the host, on the row blocks of a batch (one head).

    A sequence has at most ceil(max_seqlen_q / BLOCK_M) of them, and each adds at most one partial
    block to the total_q // BLOCK_M whole ones. With a shared q, total_q = batch * max_seqlen_q.
    """
    return min(batch * cdiv(max_seqlen_q, block_m), total_q // block_m + batch)


class TileTensors(NamedTuple):
    """The list as int32 tensors `[max_tiles * num_heads]`, whose items from num_tiles, int32 `[1]`,
    on are 0 and stand for no tile."""

    tile_batch: torch.Tensor
    tile_head: torch.Tensor
    tile_block: torch.Tensor
    num_tiles: torch.Tensor


@dataclass(frozen=True)
class TileOrderRecipe(Recipe[TileTensors]):
    """How the list of `build` is made on a device, by PyTorch, without waiting for it.

    `batch` sequences. max_tiles: the bound of the function `max_tiles`, row blocks of one head, not
    less than the true number, which only the device knows; order "padded" lists the whole grid and
    does not consult it. Rows of a sequence from max_seqlen_q on are given no tile.

    All tiles of a sequence cost the same, so the device sorts sequences, not tiles: `batch` keys.
    """

    order: str
    batch: int
    max_tiles: int
    max_seqlen_q: int
    num_heads: int
    block_m: int
    block_n: int
    num_programs: int
    fastest: str = "block"

    def make(self, cu_seqlens_k: torch.Tensor, cu_seqlens_q: torch.Tensor | None) -> TileTensors:
        """The list of offsets int32 `[batch + 1]`, on their device; cu_seqlens_q None: every
        sequence has max_seqlen_q rows, of a shared q."""
        order, batch, num_heads = self.order, self.batch, self.num_heads
        check_choice("order", order, ORDERS)
        device = cu_seqlens_k.device
        grid = cdiv(self.max_seqlen_q, self.block_m)
        if order == "padded" or cu_seqlens_q is None:
            blocks = torch.full((batch,), grid, dtype=torch.int32, device=device)
        else:
            rows = cu_seqlens_q.diff().clamp(0, self.max_seqlen_q)
            blocks = (rows + (self.block_m - 1)) // self.block_m
        capacity = (batch * grid if order == "padded" else self.max_tiles) * num_heads
        if batch == 0 or capacity == 0:
            none = torch.zeros(capacity, dtype=torch.int32, device=device)
            return TileTensors(none, none.clone(), none.clone(), none.new_zeros(1))

        sequences = None
        if order in ("zigzag", "longest_first"):
            costs = (cu_seqlens_k.diff() + (self.block_n - 1)) // self.block_n
            sequences = costs.sort(descending=True, stable=True).indices
            blocks = blocks[sequences]
        ends = blocks.cumsum(0, dtype=torch.int32) * num_heads
        count = ends[-1:]

        position = torch.arange(capacity, dtype=torch.int32, device=device)
        listed = position < count
        source = position
        if order == "zigzag":
            row_start = position // self.num_programs * self.num_programs
            row_end = torch.minimum(row_start + self.num_programs, count)
            odd = position // self.num_programs % 2 == 1
            source = torch.where(odd & listed, row_start + row_end - 1 - position, position)
        sequence = torch.searchsorted(ends, source, right=True, out_int32=True).clamp(max=batch - 1)
        tiles = blocks[sequence]
        local = source - (ends[sequence] - tiles * num_heads)
        if self.fastest == "head":
            head, block = local % num_heads, local // num_heads
        else:
            tiles = tiles.clamp(min=1)
            head, block = local // tiles, local % tiles
        sequence = sequence if sequences is None else sequences[sequence].to(torch.int32)
        return TileTensors(sequence * listed, head * listed, block * listed, count.clone())
