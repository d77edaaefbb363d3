"""Collectives over rows whose derivatives are collectives too, and the bytes that they bring from
other ranks. attention.py calls them; all ranks of a group must make the same calls.

| function            | a rank has               | and gets                 | its gradient   |
|---------------------|--------------------------|--------------------------|----------------|
| `AllGather`         | its shard                | rows of all shards       | reduce-scatter |
| `ReduceScatter`     | a summand of all rows    | its shard of the sum     | all-gather     |
| `AllToAll`          | its shard of all heads   | all rows of some heads   | all-to-all     |
| `AllReduce`         | a summand                | the sum                  | as it is       |
| `AllReduceGradient` | what every rank has      | the same                 | all-reduce     |

Collectives want shards of one size: smaller ones are padded to `shard_rows`, those of the largest.
In what was gathered the shards lie one behind the other; an argument `rows`, a slice or int64
indices, says which of the gathered rows this rank's call of gdpa takes. Sums are in fp32 at least.
Summands of outputs are too, so that those are rounded once; summands of gradients come from gdpa in
the dtype of the call, so that those of 16 bits are rounded twice.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator

import torch
import torch.distributed as dist

_COUNTERS: list[Counter[str]] = []


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


def sum_dtype(x: torch.Tensor) -> torch.dtype:
    """The dtype in which partial results like x are added."""
    return torch.promote_types(x.dtype, torch.float32)


def select_rows(x: torch.Tensor, rows: slice | torch.Tensor) -> torch.Tensor:
    """The rows of x at `rows`, in their order."""
    return x[rows] if isinstance(rows, slice) else x.index_select(0, rows)


def unselect_rows(
    x: torch.Tensor, rows: slice | torch.Tensor, count: int, dtype: torch.dtype
) -> torch.Tensor:
    """The transpose of `select_rows`: x at `rows` of `count` rows, zeros elsewhere, added where two
    meet."""
    if isinstance(rows, slice) and rows == slice(0, count):  # all of them
        return x.to(dtype)
    out = x.new_zeros(count, *x.shape[1:], dtype=dtype)
    if isinstance(rows, slice):
        out[rows] = x
        return out
    return out.index_add(0, rows, x.to(dtype))


def pad_rows(x: torch.Tensor, count: int) -> torch.Tensor:
    """x with zero rows behind it, `count` in all."""
    if x.shape[0] == count:
        return x
    return torch.nn.functional.pad(x, (0, 0) * (x.dim() - 1) + (0, count - x.shape[0]))


def _count(name: str, x: torch.Tensor, group, times: int = 1) -> None:
    """Counts what a rank receives of the `x` of all ranks together."""
    ranks = dist.get_world_size(group)
    for counter in _COUNTERS:
        counter[name] += times * x.numel() * x.element_size() * (ranks - 1) // ranks


def _all_gather(x: torch.Tensor, shard_rows: int, group) -> torch.Tensor:
    out = x.new_empty(shard_rows * dist.get_world_size(group), *x.shape[1:])
    _count("all_gather", out, group)
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # before 2.13
    gather(out, pad_rows(x, shard_rows).contiguous(), group=group)
    return out


def _reduce_scatter(x: torch.Tensor, shard_rows: int, group) -> torch.Tensor:
    out = x.new_empty(shard_rows, *x.shape[1:])
    _count("reduce_scatter", x, group)
    scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
    scatter(out, x.contiguous(), group=group)
    return out


def _all_reduce(x: torch.Tensor, group) -> torch.Tensor:
    out = x.clone(memory_format=torch.contiguous_format)
    _count("all_reduce", out, group, times=2)  # a ring's: a reduce-scatter, then an all-gather
    dist.all_reduce(out, group=group)
    return out


def _all_to_all(x: torch.Tensor, to_heads: bool, ranks: int, group) -> torch.Tensor:
    """to_heads: `[shard_rows, heads, d]` to `[ranks * shard_rows, heads / ranks, d]`; else back."""
    rows, heads, dim = x.shape
    if to_heads:
        sent = x.view(rows, ranks, heads // ranks, dim).transpose(0, 1).contiguous()
    else:
        sent = x.reshape(ranks, rows // ranks, heads, dim).contiguous()
    received = torch.empty_like(sent)  # `[ranks, ...]`, a part for, or from, each rank
    _count("all_to_all", received, group)
    dist.all_to_all_single(received, sent, group=group)
    if to_heads:
        return received.reshape(ranks * rows, heads // ranks, dim)
    return received.transpose(0, 1).reshape(rows // ranks, ranks * heads, dim)


class AllGather(torch.autograd.Function):
    """Those at `rows` of all ranks' shards x."""

    @staticmethod
    def forward(ctx, x, rows, shard_rows, group):
        ctx.own_rows, ctx.rows, ctx.shard_rows, ctx.group = x.shape[0], rows, shard_rows, group
        return select_rows(_all_gather(x, shard_rows, group), rows)

    @staticmethod
    def backward(ctx, grad):
        count = ctx.shard_rows * dist.get_world_size(ctx.group)
        summand = unselect_rows(grad, ctx.rows, count, sum_dtype(grad))
        summed = _reduce_scatter(summand, ctx.shard_rows, ctx.group)
        return summed[: ctx.own_rows].to(grad.dtype), None, None, None


class ReduceScatter(torch.autograd.Function):
    """This rank's shard, with its padding, of the sum of all ranks' x, which are at `rows`; rounded
    to `dtype`."""

    @staticmethod
    def forward(ctx, x, rows, shard_rows, dtype, group):
        ctx.rows, ctx.shard_rows, ctx.dtype, ctx.group = rows, shard_rows, x.dtype, group
        summand = unselect_rows(x, rows, shard_rows * dist.get_world_size(group), x.dtype)
        return _reduce_scatter(summand, shard_rows, group).to(dtype)

    @staticmethod
    def backward(ctx, grad):
        gathered = select_rows(_all_gather(grad, ctx.shard_rows, ctx.group), ctx.rows)
        return gathered.to(ctx.dtype), None, None, None, None


class AllToAll(torch.autograd.Function):
    """`_all_to_all`, whose gradient is the other way."""

    @staticmethod
    def forward(ctx, x, to_heads, ranks, group):
        ctx.to_heads, ctx.ranks, ctx.group = to_heads, ranks, group
        return _all_to_all(x, to_heads, ranks, group)

    @staticmethod
    def backward(ctx, grad):
        return _all_to_all(grad, not ctx.to_heads, ctx.ranks, ctx.group), None, None, None


class AllReduce(torch.autograd.Function):
    """The sum of all ranks' x, on every rank; the gradient is the same on every rank already."""

    @staticmethod
    def forward(ctx, x, group):
        return _all_reduce(x, group)

    @staticmethod
    def backward(ctx, grad):
        return grad, None


class AllReduceGradient(torch.autograd.Function):
    """x itself, which every rank has; its gradient is the sum of all ranks'."""

    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        return _all_reduce(grad.to(sum_dtype(grad)), ctx.group).to(grad.dtype), None
