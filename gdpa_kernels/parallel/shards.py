"""How the tokens of a batch are cut into shards, one for each rank (`Sharding`), and the public
functions that cut and join tensors so.

Nothing here communicates: every rank computes the same sharding from the same offsets.
"""

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
from gdpa_kernels.parallel.collectives import pad_rows, select_rows

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
    sharding = sharding_of(read_offsets(cu_seqlens), ranks, layout)
    if rank >= ranks:
        raise ValueError(f"rank must be less than the {ranks} ranks, got {rank}")
    check_rows("x", x, sharding.total, "the batch")
    rows = [torch.arange(first, end, device="cpu") for _, first, end in sharding.spans[rank]]
    index = torch.cat([torch.empty(0, dtype=torch.int64, device="cpu"), *rows])
    return x.index_select(0, index.to(x.device))


def unshard(
    shards: Sequence[torch.Tensor], cu_seqlens: Sequence[int], layout: str = "contiguous"
) -> torch.Tensor:
    """The packed batch `[total, ...]` of all ranks' shards, in order of the ranks: the inverse of
    `shard`, whose arguments and errors it has; differentiable. No collective: of what was gathered.
    """
    checks.check_count("the number of shards", len(shards), least=1)
    sharding = sharding_of(read_offsets(cu_seqlens), len(shards), layout)
    for rank, x in enumerate(shards):
        check_rows(f"shards[{rank}]", x, sharding.num_rows(rank), f"rank {rank}")
    gathered = torch.cat([pad_rows(x, sharding.shard_rows) for x in shards])
    return select_rows(gathered, sharding.gathered_rows([(0, sharding.total)], gathered.device))


class Sharding(NamedTuple):
    """How a batch is cut. Rows are those of the whole packed batch.

    ends: its offsets. spans: of each rank the rows (sequence, first, end) that it holds, none
    empty. shard_rows: of the largest shard, to which collectives pad all. order: for each row its
    index in what is gathered, all shards one behind the other, int64; None where that is its own.

    Of one sequence of 8 rows for 2 ranks in zigzag: spans [[(0, 0, 2), (0, 6, 8)], [(0, 2, 4), (0,
    4, 6)]], shard_rows 4. Gathered are the rows 0 1 6 7 2 3 4 5, so order is [0, 1, 4, 5, 6, 7, 2,
    3].
    """

    ends: tuple[int, ...]
    spans: list[list[tuple[int, int, int]]]
    shard_rows: int
    order: torch.Tensor | None

    @property
    def total(self) -> int:
        return self.ends[-1]

    @property
    def batch(self) -> int:
        return len(self.ends) - 1

    def num_rows(self, rank: int) -> int:
        return sum(end - first for _, first, end in self.spans[rank])

    def partners(self, rank: int, stationary: str, causal: bool) -> tuple[list, list]:
        """(lengths, ranges) of the sequences of a rank's call: of each span the number of its rows,
        and their partners, the rows [first, end) of the batch that they see (queries stay) or are
        seen by (keys stay). With "sequences" those of the whole batch.

        Of the example above, under a causal mask and where queries stay, rank 1 calls with 2 and 2
        own rows, which see the rows 0 to 4 and 0 to 6: ([2, 2], [(0, 4), (0, 6)]).
        """
        if stationary == "sequences":
            ranges = list(pairwise(self.ends))
            return [end - first for first, end in ranges], ranges
        lengths, ranges = [], []
        for i, first, end in self.spans[rank]:
            begin, last = self.ends[i : i + 2]
            if causal:
                begin, last = (begin, end) if stationary == "queries" else (first, last)
            if ranges and ranges[-1] == (begin, last):  # two spans that have the same partners
                lengths[-1] += end - first
            else:
                lengths.append(end - first)
                ranges.append((begin, last))
        return lengths, ranges

    def gathered_rows(self, ranges: list, device: torch.device) -> slice | torch.Tensor:
        """Where the rows of these ranges lie in what is gathered; those of contiguous shards
        adjoin."""
        if not ranges:
            return slice(0, 0)
        if self.order is None:
            return slice(ranges[0][0], ranges[-1][1])
        return torch.cat([self.order[first:end] for first, end in ranges]).to(device)


def sharding_of(ends: tuple[int, ...], ranks: int, layout: str) -> Sharding:
    """The sharding of a batch. Raises TypeError, ValueError unless `layout` is one of LAYOUTS."""
    checks.check_choice("layout", layout, LAYOUTS)
    return _sharding_of(ends, ranks, layout)


@lru_cache(maxsize=4)  # layers of a model ask for the same
def _sharding_of(ends: tuple[int, ...], ranks: int, layout: str) -> Sharding:
    spans = [[] for _ in range(ranks)]
    for i, (begin, end) in enumerate(pairwise(ends)):
        if layout == "contiguous":
            cuts = [min(max(rows_of_rank(ends[-1], r, ranks)[0], begin), end) for r in range(ranks)]
            owners = range(ranks)
        else:
            chunks = 2 * ranks
            cuts = [begin + (end - begin) * c // chunks for c in range(chunks)]
            owners = [(min(c, chunks - 1 - c) + i) % ranks for c in range(chunks)]
        for owner, (first, last) in zip(owners, pairwise([*cuts, end]), strict=True):
            if first < last:
                spans[owner].append((i, first, last))
    shard_rows = max(sum(last - first for _, first, last in held) for held in spans)
    if layout == "contiguous":
        return Sharding(ends, spans, shard_rows, None)
    # Dynamo looks into neither a cache nor into what is unseen.
    with contextlib.nullcontext() if torch.compiler.is_compiling() else reusable():
        order = torch.empty(ends[-1], dtype=torch.int64, device="cpu")
        for rank, held in enumerate(spans):
            position = rank * shard_rows
            for _, first, last in held:
                order[first:last] = torch.arange(position, position + last - first, device="cpu")
                position += last - first
    return Sharding(ends, spans, shard_rows, order)


@contextlib.contextmanager
def reusable() -> Iterator[None]:
    """Tensors made inside serve calls of any kind: training may follow an evaluation, and a mode
    that counts or fakes operators must not see the first call's."""
    with torch.inference_mode(False), unseen():
        yield


def read_offsets(cu_seqlens: Sequence[int]) -> tuple[int, ...]:
    """The offsets as integers. Raises TypeError, ValueError unless they are such, on the host."""
    if isinstance(cu_seqlens, torch.Tensor):
        raise TypeError("cu_seqlens must be numbers of the host, got a tensor: cu_seqlens.tolist()")
    try:
        ends = tuple(map(operator.index, cu_seqlens))
    except TypeError:
        raise TypeError(f"cu_seqlens must be integers of the host, got {cu_seqlens!r}") from None
    if not ends or ends[0] != 0 or list(ends) != sorted(ends):
        raise ValueError(f"cu_seqlens must rise from 0, got {list(cu_seqlens)}")
    return ends


def check_rows(name: str, x: object, rows: int, whose: str) -> None:
    """Raises TypeError, ValueError unless x is a tensor of so many rows."""
    if not isinstance(x, torch.Tensor):
        raise TypeError(f"{name} must be a tensor of rows, got {x!r}")
    if x.dim() < 1:
        raise ValueError(f"{name} must be a tensor of rows, got one of shape []")
    if x.shape[0] != rows:
        raise ValueError(f"{name} must have the {rows} rows of {whose}, got {x.shape[0]} rows")
