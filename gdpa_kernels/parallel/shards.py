"""Shards: the cut of a packed batch's tokens between ranks."""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Iterator, Sequence
from functools import lru_cache
from itertools import pairwise
from typing import NamedTuple

import torch

from gdpa_kernels.calling import checks
from gdpa_kernels.calling.launch import cdiv
from gdpa_kernels.calling.private import unseen
from gdpa_kernels.parallel.collectives import pad_rows, take

LAYOUTS = ("contiguous", "zigzag")


def rows_of_rank(total: int, rank: int, ranks: int) -> tuple[int, int]:
    """The rows [first, end) of `total` packed tokens in a contiguous shard: all have as many, but
    the last ones, which may have fewer or none."""
    size = cdiv(total, ranks)
    return min(rank * size, total), min((rank + 1) * size, total)


def shard(
    x: torch.Tensor, cu_seqlens: Sequence[int], rank: int, ranks: int, layout: str = "contiguous"
) -> torch.Tensor:
    """The rows of a packed batch that a rank holds, `[rows, ...]`; differentiable.

    Args:
        x: `[total, ...]`, anything with a row for each token: also positions, or timestamps.
        cu_seqlens: offsets of the batch, `[batch + 1]`, as numbers of the host.
        rank, ranks: whose rows, and among how many.
        layout: "contiguous": `rows_of_rank`. "zigzag": every sequence is cut into 2 * ranks chunks,
            of which rank r holds chunks r and 2 * ranks - 1 - r, so that all ranks have as many
            pairs of a causal mask; r goes round with each sequence, so that short ones do too.

    Raises:
        TypeError, ValueError: an argument is wrong: its name, what is expected, what was received.
    """
    checks.check_count("ranks", ranks, least=1)
    checks.check_count("rank", rank)
    shards = shards_of(offsets_of(cu_seqlens), ranks, checked_layout(layout))
    if rank >= ranks:
        raise ValueError(f"rank must be less than the {ranks} ranks, got {rank}")
    check_rows("x", x, shards.total, "the batch")
    rows = [torch.arange(first, end, device="cpu") for _, first, end in shards.pieces[rank]]
    index = torch.cat([torch.empty(0, dtype=torch.int64, device="cpu"), *rows])
    return x.index_select(0, index.to(x.device))


def unshard(
    shards: Sequence[torch.Tensor], cu_seqlens: Sequence[int], layout: str = "contiguous"
) -> torch.Tensor:
    """The packed batch `[total, ...]` of all ranks' shards, in order of the ranks: the inverse of
    `shard`, whose arguments and errors it has; differentiable. No collective: of what was gathered.
    """
    checks.check_count("the number of shards", len(shards), least=1)
    known = shards_of(offsets_of(cu_seqlens), len(shards), checked_layout(layout))
    for rank, x in enumerate(shards):
        check_rows(f"shards[{rank}]", x, known.rows(rank), f"rank {rank}")
    padded = torch.cat([pad_rows(x, known.size) for x in shards])
    return take(padded, known.indices([(0, known.total)], padded.device))


class Shards(NamedTuple):
    """How a batch is cut. `pieces`: of each rank (sequence, first, end) in packed rows, none empty;
    `size`: rows of the largest shard; `order`: None where packed rows lie in order of the ranks,
    else the index of each in what is gathered.

    Of one sequence of 8 rows for 2 ranks in zigzag: pieces [[(0, 0, 2), (0, 6, 8)],
    [(0, 2, 4), (0, 4, 6)]], size 4, order [0, 1, 4, 5, 6, 7, 2, 3]. Under a causal mask rank 1
    calls with 2 and 2 rows of its own, beside the rows 0 to 4 and 0 to 6: its `parts`, where
    queries stay.
    """

    ends: tuple[int, ...]
    pieces: list[list[tuple[int, int, int]]]
    size: int
    order: torch.Tensor | None

    @property
    def total(self) -> int:
        return self.ends[-1]

    @property
    def batch(self) -> int:
        return len(self.ends) - 1

    def rows(self, rank: int) -> int:
        return sum(end - first for _, first, end in self.pieces[rank])

    def parts(self, rank: int, stationary: str, causal: bool) -> tuple[list, list]:
        """(lengths, ranges): of each sequence of the rank's call the number of own rows, and the
        packed rows [first, end) of others that they see or are seen by."""
        if stationary == "sequences":
            ranges = list(pairwise(self.ends))
            return [end - first for first, end in ranges], ranges
        lengths, ranges = [], []
        for i, first, end in self.pieces[rank]:
            begin, last = self.ends[i : i + 2]
            if causal:
                begin, last = (begin, end) if stationary == "queries" else (first, last)
            if ranges and ranges[-1] == (begin, last):  # two pieces that have the same partners
                lengths[-1] += end - first
            else:
                lengths.append(end - first)
                ranges.append((begin, last))
        return lengths, ranges

    def indices(self, ranges: list, device: torch.device) -> slice | torch.Tensor:
        """Where packed rows lie in what is gathered; ranges of contiguous shards adjoin."""
        if not ranges:
            return slice(0, 0)
        if self.order is None:
            return slice(ranges[0][0], ranges[-1][1])
        return torch.cat([self.order[first:end] for first, end in ranges]).to(device)


@lru_cache(maxsize=4)  # layers of a model ask for the same
def shards_of(ends: tuple[int, ...], ranks: int, layout: str) -> Shards:
    pieces = [[] for _ in range(ranks)]
    for i, (begin, end) in enumerate(pairwise(ends)):
        if layout == "contiguous":
            cuts = [min(max(rows_of_rank(ends[-1], r, ranks)[0], begin), end) for r in range(ranks)]
            owners = range(ranks)
        else:
            cuts = [begin + (end - begin) * c // (2 * ranks) for c in range(2 * ranks)]
            owners = [(min(c, 2 * ranks - 1 - c) + i) % ranks for c in range(2 * ranks)]
        for owner, (first, last) in zip(owners, pairwise([*cuts, end]), strict=True):
            if first < last:
                pieces[owner].append((i, first, last))
    size = max(sum(last - first for _, first, last in held) for held in pieces)
    if layout == "contiguous":
        return Shards(ends, pieces, size, None)
    # Dynamo looks into neither a cache nor into what is unseen.
    with contextlib.nullcontext() if torch.compiler.is_compiling() else lasting():
        order = torch.empty(ends[-1], dtype=torch.int64, device="cpu")
        for rank, held in enumerate(pieces):
            position = rank * size
            for _, first, last in held:
                order[first:last] = torch.arange(position, position + last - first, device="cpu")
                position += last - first
    return Shards(ends, pieces, size, order)


@contextlib.contextmanager
def lasting() -> Iterator[None]:
    """What is made inside serves calls of any kind: training may follow an evaluation, and a mode
    that counts or fakes operators must not see the first call's."""
    with torch.inference_mode(False), unseen():
        yield


def offsets_of(cu_seqlens: Sequence[int]) -> tuple[int, ...]:
    if isinstance(cu_seqlens, torch.Tensor):
        raise TypeError("cu_seqlens must be numbers of the host, got a tensor: cu_seqlens.tolist()")
    try:
        ends = tuple(map(operator.index, cu_seqlens))
    except TypeError:
        raise TypeError(f"cu_seqlens must be integers of the host, got {cu_seqlens!r}") from None
    if not ends or ends[0] != 0 or list(ends) != sorted(ends):
        raise ValueError(f"cu_seqlens must rise from 0, got {list(cu_seqlens)}")
    return ends


def checked_layout(layout: object) -> str:
    checks.check_choice("layout", layout, LAYOUTS)
    return layout


def check_rows(name: str, x: torch.Tensor, rows: int, whose: str) -> None:
    if not isinstance(x, torch.Tensor):
        raise TypeError(f"{name} must be a tensor of rows, got {x!r}")
    if x.dim() < 1:
        raise ValueError(f"{name} must be a tensor of rows, got one of shape []")
    if x.shape[0] != rows:
        raise ValueError(f"{name} must have the {rows} rows of {whose}, got {x.shape[0]} rows")
