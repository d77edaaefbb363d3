"""Attention over sequences that are cut between ranks.

Nothing is normalised, so attention over all keys is the sum of that over each rank's: no rank needs
a log-sum-exp of another, and the collectives are PyTorch's own. The bytes that a rank receives, of
N tokens on P ranks, f = (P - 1) / P, H query and K key heads of d numbers of e bytes, sums in fp32
(`predicted_bytes`; `counted_bytes` counts them):

| what stays  | forward               | backward           | for                                 |
|-------------|-----------------------|--------------------|-------------------------------------|
| "queries"   | 2 N K d e f           | 2 N K d 4 f        | most calls; grouped heads most      |
| "keys"      | N H d (e + 4) f       | N H d (e + 4) f    | few query heads                     |
| "sequences" | 2 N (H + K) d e f / P | the same           | as many ranks as key heads, or less |

What was gathered is kept for the backward pass. Contiguous shards may end inside a sequence: if one
is cut between all ranks, the last has under a causal mask about twice the mean work, but for
"sequences". Zigzag shards have equal work, and rows that are gathered by an index: they pay where
long sequences are cut between ranks.
"""

from __future__ import annotations

import contextlib
import operator
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from functools import lru_cache
from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple

import torch
import torch.distributed as dist

from gdpa_kernels.calling import checks
from gdpa_kernels.calling.launch import cdiv
from gdpa_kernels.calling.lengths import Lengths
from gdpa_kernels.calling.private import unseen
from gdpa_kernels.gdpa.api import check_causal, gdpa
from gdpa_kernels.gdpa.registration import check_activation

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

STATIONARY = ("queries", "keys", "sequences")
LAYOUTS = ("contiguous", "zigzag")
OPTIONS = ("activation", "scale", "output_scale", "precise", "impl", "backward_impl")
"""Of `gdpa`: what the calls here take and pass on."""


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
    shards = _shards(_offsets(cu_seqlens), ranks, _layout(layout))
    if rank >= ranks:
        raise ValueError(f"rank must be less than the {ranks} ranks, got {rank}")
    _check_rows("x", x, shards.total, "the batch")
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
    known = _shards(_offsets(cu_seqlens), len(shards), _layout(layout))
    for rank, x in enumerate(shards):
        _check_rows(f"shards[{rank}]", x, known.rows(rank), f"rank {rank}")
    padded = torch.cat([_padded(x, known.size) for x in shards])
    return _take(padded, known.places([(0, known.total)], padded.device))


def context_parallel_gdpa(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens: Sequence[int],
    *,
    stationary: str = "queries",
    layout: str = "contiguous",
    causal: bool = False,
    window: int | None = None,
    group: dist.ProcessGroup | None = None,
    **options,
) -> torch.Tensor:
    """`gdpa(q, k, v, ...)` of a batch whose tokens are spread over ranks; differentiable.

    Args:
        q: this rank's rows by `shard`, `[rows, num_heads, head_dim]`.
        k, v: the same rows, `[rows, num_kv_heads, head_dim]`.
        cu_seqlens: offsets of the whole batch, `[batch + 1]`, as numbers of the host, the same on
            every rank.
        stationary: what no collective moves: "queries" (keys and values are gathered), "keys"
            (queries are gathered and results summed up) or "sequences" (every rank gets all rows of
            some heads; num_kv_heads must be a multiple of the ranks).
        layout: how `shard` cut the batch: "contiguous" or, of equal work under a causal mask,
            "zigzag".
        causal, window: as `gdpa`; a window needs causal, but for "sequences".
        group: of the ranks; None for all.
        options: of `gdpa` (activation, scale, output_scale, precise, impl, backward_impl); names of
            activations are of all heads, whatever stays.

    q, k and v may be `DTensor`s of the whole batch, sharded by tokens on a mesh of one dimension,
    as `distribute_tensor(x, mesh, [Shard(0)])` makes them: shards are contiguous, the group is the
    mesh's, and the result is such a one.

    Returns:
        This rank's rows of the output, `[rows, num_heads, head_dim]`.

    Raises:
        TypeError, ValueError: an argument is wrong: its name, what is expected, what was received.
            Wrong on one rank alone, it leaves the others waiting.

    Source: sums of partial results, as in the chapter "What GDPA computes"; the split of queries
    and the zigzag layout are of all-gather context parallelism (arXiv 2407.21783, section 3.3.2).
    """
    mesh = _mesh_of(q, k, v, layout, group)
    if mesh is not None:
        out = context_parallel_gdpa(
            *(x.to_local() for x in (q, k, v)), cu_seqlens, stationary=stationary, causal=causal,
            window=window, group=mesh.get_group(), **options,
        )  # fmt: skip
        shape = torch.Size((cu_seqlens[-1], *out.shape[1:]))
        return type(q).from_local(
            out, mesh, q.placements, run_check=False, shape=shape,
            stride=(shape[1] * shape[2], shape[2], 1),
        )  # fmt: skip
    q, k, v = checks.autocast(q, k, v)
    shards, rank, ranks, options = _checked(q, k, v, cu_seqlens, layout, group, options)
    _check_masks(stationary, causal, window)
    _check_rows("q", q, shards.rows(rank), f"rank {rank}")
    options = options | {"window": window}
    if stationary == "sequences" and k.shape[1] % ranks:
        raise ValueError(
            f"num_kv_heads must be a multiple of the {ranks} ranks with "
            f"stationary='sequences', got {k.shape[1]}"
        )
    stream = torch.cuda.current_stream(q.device).cuda_stream if q.is_cuda else 0
    own, others, places = _partners(
        shards.ends, ranks, layout, rank, stationary, bool(causal), q.device, stream
    )
    if stationary == "sequences":
        return _by_heads(q, k, v, shards, own, places, causal, group, rank, ranks, options)
    if stationary == "queries":
        k, v = (_Gather.apply(x, places, shards.size, group) for x in (k, v))
        return gdpa(q, k, v, own, others, causal=causal and "lower_right", **options)
    part = gdpa(
        _Gather.apply(q, places, shards.size, group), k, v, others, own,
        causal=causal and "upper_left", out_dtype=_sum_dtype(q), **options,
    )  # fmt: skip
    return _Scatter.apply(part, places, shards.size, q.dtype, group)[: q.shape[0]]


def context_parallel_pooling(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens: Sequence[int],
    *,
    layout: str = "contiguous",
    group: dist.ProcessGroup | None = None,
    **options,
) -> torch.Tensor:
    """`gdpa` of one q shared by the whole batch (PMA seeds) over keys that are spread over ranks;
    differentiable.

    Keys stay: every rank sums over its own, and an all-reduce adds the sums in fp32 (fp64 of fp64).
    A rank receives 2 f 4 bytes a number of the result forward, and of q backward, f = (ranks - 1) /
    ranks.

    Args:
        q: `[seeds, num_heads, head_dim]`, the same on every rank.
        k, v: this rank's rows by `shard`, `[rows, num_kv_heads, head_dim]`.
        cu_seqlens, layout, group, options: as `context_parallel_gdpa`.

    Returns:
        `[batch * seeds, num_heads, head_dim]`, the same on every rank. Its gradient must be the
        same on every rank too, as of a loss that all compute; that of q is then the whole
        batch's, on every rank.

    Raises:
        TypeError, ValueError: as `context_parallel_gdpa`.
    """
    q, k, v = checks.autocast(q, k, v)
    shards, rank, _, options = _checked(q, k, v, cu_seqlens, layout, group, options)
    held = Counter()
    for i, first, end in shards.pieces[rank]:
        held[i] += end - first
    lengths = [held[i] for i in range(shards.batch)]
    part = gdpa(
        _Replicated.apply(q, group), k, v, None, _lengths(lengths, q.device),
        out_dtype=_sum_dtype(q), **options,
    )  # fmt: skip
    return _Sum.apply(part, group).to(q.dtype)


def predicted_bytes(
    stationary: str,
    rows: int,
    ranks: int,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    dtype: torch.dtype,
) -> tuple[int, int]:
    """(forward, backward): bytes that each rank receives in `context_parallel_gdpa`.

    Args:
        stationary: as there.
        rows: of the largest shard, to which the collectives fill up all: N / ranks of the table.
        ranks, num_heads, num_kv_heads, head_dim, dtype: of the call.

    Raises:
        ValueError: stationary is none of these.

    Source: the table at the head of this module.
    """
    _check_stationary(stationary)
    numbers, size = rows * (ranks - 1) * head_dim, dtype.itemsize
    sums = torch.promote_types(dtype, torch.float32).itemsize
    return {
        "queries": (2 * numbers * num_kv_heads * size, 2 * numbers * num_kv_heads * sums),
        "keys": (numbers * num_heads * (size + sums),) * 2,
        "sequences": (2 * numbers * (num_heads + num_kv_heads) * size // ranks,) * 2,
    }[stationary]


@contextlib.contextmanager
def counted_bytes() -> Iterator[Counter[str]]:
    """Counts the bytes that the collectives of this module, in all threads of this process, bring
    from other ranks, by the collective's name; a ring sends as many as it receives."""
    counter = Counter()
    _COUNTERS.append(counter)
    try:
        yield counter
    finally:
        _COUNTERS[:] = [each for each in _COUNTERS if each is not counter]


_COUNTERS: list[Counter[str]] = []


class _Shards(NamedTuple):
    """How a batch is cut. `pieces`: of each rank (sequence, first, end) in packed rows, none empty;
    `size`: rows of the largest shard; `order`: None where packed rows lie in order of the ranks,
    else where each has its place in what is gathered."""

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

    def places(self, ranges: list, device: torch.device) -> slice | torch.Tensor:
        """Where packed rows lie in what is gathered; ranges of contiguous shards adjoin."""
        if not ranges:
            return slice(0, 0)
        if self.order is None:
            return slice(ranges[0][0], ranges[-1][1])
        return torch.cat([self.order[first:end] for first, end in ranges]).to(device)


@lru_cache(maxsize=4)  # layers of a model ask for the same
def _shards(ends: tuple[int, ...], ranks: int, layout: str) -> _Shards:
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
    size = max(sum(last - first for _, first, last in mine) for mine in pieces)
    if layout == "contiguous":
        return _Shards(ends, pieces, size, None)
    # Dynamo looks into neither a cache nor into what is unseen.
    with contextlib.nullcontext() if torch.compiler.is_compiling() else _lasting():
        order = torch.empty(ends[-1], dtype=torch.int64, device="cpu")
        for rank, mine in enumerate(pieces):
            place = rank * size
            for _, first, last in mine:
                order[first:last] = torch.arange(place, place + last - first, device="cpu")
                place += last - first
    return _Shards(ends, pieces, size, order)


@lru_cache(maxsize=8)
def _partners(
    ends: tuple[int, ...], ranks: int, layout: str, rank: int, stationary: str, causal: bool,
    device: torch.device, stream: int,
) -> tuple[Lengths, Lengths, slice | torch.Tensor]:  # fmt: skip
    """(Lengths of own rows, of their partners, `places` of those) of a rank's call, for all layers
    on a stream, which brings them to the device: places are a number for each token."""
    shards = _shards(ends, ranks, layout)
    own, others = shards.parts(rank, stationary, causal)
    lengths = own, [end - first for first, end in others]
    with _lasting():
        return *(_lengths(each, device) for each in lengths), shards.places(others, device)


@contextlib.contextmanager
def _lasting() -> Iterator[None]:
    """What is made inside serves calls of any kind: training may follow an evaluation, and a mode
    that counts or fakes operators must not see the first call's."""
    with torch.inference_mode(False), unseen():
        yield


def _lengths(lengths: list[int], device: torch.device) -> Lengths:
    return Lengths(torch.tensor([0, *lengths], device="cpu").cumsum(0), device=device)


def _offsets(cu_seqlens: Sequence[int]) -> tuple[int, ...]:
    if isinstance(cu_seqlens, torch.Tensor):
        raise TypeError("cu_seqlens must be numbers of the host, got a tensor: cu_seqlens.tolist()")
    try:
        ends = tuple(map(operator.index, cu_seqlens))
    except TypeError:
        raise TypeError(f"cu_seqlens must be integers of the host, got {cu_seqlens!r}") from None
    if not ends or ends[0] != 0 or list(ends) != sorted(ends):
        raise ValueError(f"cu_seqlens must rise from 0, got {list(cu_seqlens)}")
    return ends


def _layout(layout: object) -> str:
    checks.check_choice("layout", layout, LAYOUTS)
    return layout


def _check_rows(name: str, x: torch.Tensor, rows: int, whose: str) -> None:
    if not isinstance(x, torch.Tensor):
        raise TypeError(f"{name} must be a tensor of rows, got {x!r}")
    if x.dim() < 1:
        raise ValueError(f"{name} must be a tensor of rows, got one of shape []")
    if x.shape[0] != rows:
        raise ValueError(f"{name} must have the {rows} rows of {whose}, got {x.shape[0]} rows")


def _check_stationary(stationary: object) -> None:
    checks.check_choice("stationary", stationary, STATIONARY)


def _check_masks(stationary: object, causal: object, window: object) -> None:
    _check_stationary(stationary)
    check_causal(causal)
    if isinstance(causal, str):
        raise ValueError(f"causal must be a bool here, where q has k's rows, got {causal!r}")
    if window is not None and not causal and stationary != "sequences":
        raise ValueError(f"window must be None without causal, got {window}")


def _checked(q, k, v, cu_seqlens, layout, group, options) -> tuple[_Shards, int, int, dict]:
    """(shards, rank, ranks, options), of arguments that both calls have."""
    if not dist.is_available() or not dist.is_initialized():
        raise ValueError("group must be one of torch.distributed, which is not initialized")
    rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    if rank < 0:
        raise ValueError(f"group must have rank {dist.get_rank()} in it, got one of other ranks")
    shards = _shards(_offsets(cu_seqlens), ranks, _layout(layout))
    for name in options:
        if name not in OPTIONS:
            raise TypeError(f"options must be of {', '.join(OPTIONS)}, got {name}")
    checks.check_tensors(q, k, v)
    _check_rows("k", k, shards.rows(rank), f"rank {rank}")
    if "activation" in options:
        options = options | {"activation": check_activation(options["activation"], q.shape[1])}
    return shards, rank, ranks, options


def _mesh_of(q, k, v, layout: str, group: dist.ProcessGroup | None) -> DeviceMesh | None:
    """The mesh of DTensors; None of other tensors."""
    tensors = sys.modules.get("torch.distributed.tensor")  # else there is no DTensor
    if tensors is None or not any(isinstance(x, tensors.DTensor) for x in (q, k, v)):
        return None
    if layout != "contiguous" or group is not None:
        raise ValueError(
            "layout must be 'contiguous' and group None for DTensors, whose mesh says both, got "
            f"{layout!r} and {group}"
        )
    placements = (tensors.Shard(0),)
    for name, x in (("q", q), ("k", k), ("v", v)):
        if not isinstance(x, tensors.DTensor):
            raise TypeError(f"{name} must be a DTensor as others are, got {type(x).__name__}")
        if x.placements != placements or x.device_mesh != q.device_mesh:
            raise ValueError(
                f"{name} must be sharded by tokens, (Shard(dim=0),), on one mesh, got "
                f"{x.placements} on {x.device_mesh}"
            )
    if q.device_mesh.get_coordinate() is None:
        raise ValueError(f"q must have rank {dist.get_rank()} in its mesh, got {q.device_mesh}")
    return q.device_mesh


def _sum_dtype(x: torch.Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)


def _by_heads(
    q, k, v, shards, lengths, places, causal, group, rank, ranks, options
) -> torch.Tensor:
    """All rows of a share of the heads on each rank."""
    names = options.get("activation", ())
    if len(names) > 1:
        heads = len(names) // ranks
        options = options | {"activation": names[rank * heads : (rank + 1) * heads]}
    exchanged = [_Exchange.apply(_padded(x, shards.size), True, ranks, group) for x in (q, k, v)]
    out = gdpa(
        *(_take(x, places) for x in exchanged), lengths, lengths,
        causal=causal and "upper_left", **options,
    )  # fmt: skip
    out = _put(out, places, shards.size * ranks, out.dtype)
    return _Exchange.apply(out, False, ranks, group)[: q.shape[0]]


def _take(x: torch.Tensor, places: slice | torch.Tensor) -> torch.Tensor:
    return x[places] if isinstance(places, slice) else x.index_select(0, places)


def _put(
    x: torch.Tensor, places: slice | torch.Tensor, rows: int, dtype: torch.dtype
) -> torch.Tensor:
    """The transpose of `_take`: rows at their places among zeros, added where two meet."""
    if isinstance(places, slice) and places == slice(0, rows):  # all of them
        return x.to(dtype)
    out = x.new_zeros(rows, *x.shape[1:], dtype=dtype)
    if isinstance(places, slice):
        out[places] = x
        return out
    return out.index_add(0, places, x.to(dtype))


def _padded(x: torch.Tensor, rows: int) -> torch.Tensor:
    if x.shape[0] == rows:
        return x
    return torch.nn.functional.pad(x, (0, 0) * (x.dim() - 1) + (0, rows - x.shape[0]))


def _count(name: str, x: torch.Tensor, group, times: int = 1) -> None:
    """Counts what a rank receives of the `x` of all ranks together."""
    ranks = dist.get_world_size(group)
    for counter in _COUNTERS:
        counter[name] += times * x.numel() * x.element_size() * (ranks - 1) // ranks


def _gathered(x: torch.Tensor, size: int, group) -> torch.Tensor:
    out = x.new_empty(size * dist.get_world_size(group), *x.shape[1:])
    _count("all_gather", out, group)
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # before 2.13
    gather(out, _padded(x, size).contiguous(), group=group)
    return out


def _scattered(x: torch.Tensor, size: int, group) -> torch.Tensor:
    out = x.new_empty(size, *x.shape[1:])
    _count("reduce_scatter", x, group)
    scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
    scatter(out, x.contiguous(), group=group)
    return out


def _summed(x: torch.Tensor, group) -> torch.Tensor:
    out = x.clone(memory_format=torch.contiguous_format)
    _count("all_reduce", out, group, times=2)  # a ring's: scattered sums, which are gathered
    dist.all_reduce(out, group=group)
    return out


class _Gather(torch.autograd.Function):
    """Rows of all ranks, from their places; the gradient of a rank's rows is the sum over all
    ranks', in fp32."""

    @staticmethod
    def forward(ctx, x, places, size, group):
        ctx.rows, ctx.places, ctx.size, ctx.group = x.shape[0], places, size, group
        return _take(_gathered(x, size, group), places)

    @staticmethod
    def backward(ctx, grad):
        ranks = dist.get_world_size(ctx.group)
        full = _put(grad, ctx.places, ctx.size * ranks, _sum_dtype(grad))
        summed = _scattered(full, ctx.size, ctx.group)
        return summed[: ctx.rows].to(grad.dtype), None, None, None


class _Scatter(torch.autograd.Function):
    """This rank's rows of the sum over all ranks, of rows at their places, rounded to `dtype`."""

    @staticmethod
    def forward(ctx, x, places, size, dtype, group):
        ctx.places, ctx.size, ctx.dtype, ctx.group = places, size, x.dtype, group
        full = _put(x, places, size * dist.get_world_size(group), x.dtype)
        return _scattered(full, size, group).to(dtype)

    @staticmethod
    def backward(ctx, grad):
        gathered = _take(_gathered(grad, ctx.size, ctx.group), ctx.places)
        return gathered.to(ctx.dtype), None, None, None, None


class _Replicated(torch.autograd.Function):
    """What all ranks have; its gradient is the sum over all ranks', in fp32."""

    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        return _summed(grad.to(_sum_dtype(grad)), ctx.group).to(grad.dtype), None


class _Sum(torch.autograd.Function):
    """The sum over all ranks, on all; so is its gradient there already."""

    @staticmethod
    def forward(ctx, x, group):
        return _summed(x, group)

    @staticmethod
    def backward(ctx, grad):
        return grad, None


class _Exchange(torch.autograd.Function):
    """From some rows of all heads to all rows of some heads, or back."""

    @staticmethod
    def forward(ctx, x, to_heads, ranks, group):
        ctx.to_heads, ctx.ranks, ctx.group = to_heads, ranks, group
        return _exchanged(x, to_heads, ranks, group)

    @staticmethod
    def backward(ctx, grad):
        return _exchanged(grad, not ctx.to_heads, ctx.ranks, ctx.group), None, None, None


def _exchanged(x: torch.Tensor, to_heads: bool, ranks: int, group) -> torch.Tensor:
    rows, heads, dim = x.shape
    if to_heads:  # [rows, ranks, heads / ranks, d] -> a part for each rank
        parts = x.view(rows, ranks, heads // ranks, dim).transpose(0, 1).contiguous()
    else:
        parts = x.reshape(ranks, rows // ranks, heads, dim).contiguous()
    got = torch.empty_like(parts)
    _count("all_to_all", got, group)
    dist.all_to_all_single(got, parts, group=group)
    if to_heads:
        return got.reshape(ranks * rows, heads // ranks, dim)
    return got.transpose(0, 1).reshape(rows // ranks, ranks * heads, dim)
