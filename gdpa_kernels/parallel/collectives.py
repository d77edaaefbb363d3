"""Differentiable collectives over rows, and the bytes that they bring from other ranks."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator

import torch
import torch.distributed as dist


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


def sum_dtype(x: torch.Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)


def take(x: torch.Tensor, indices: slice | torch.Tensor) -> torch.Tensor:
    return x[indices] if isinstance(indices, slice) else x.index_select(0, indices)


def put(
    x: torch.Tensor, indices: slice | torch.Tensor, rows: int, dtype: torch.dtype
) -> torch.Tensor:
    """The transpose of `take`: rows at their indices among zeros, added where two meet."""
    if isinstance(indices, slice) and indices == slice(0, rows):  # all of them
        return x.to(dtype)
    out = x.new_zeros(rows, *x.shape[1:], dtype=dtype)
    if isinstance(indices, slice):
        out[indices] = x
        return out
    return out.index_add(0, indices, x.to(dtype))


def pad_rows(x: torch.Tensor, rows: int) -> torch.Tensor:
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
    gather(out, pad_rows(x, size).contiguous(), group=group)
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


class Gather(torch.autograd.Function):
    """Rows of all ranks, from their indices; the gradient of a rank's rows is the sum over all
    ranks', in fp32."""

    @staticmethod
    def forward(ctx, x, indices, size, group):
        ctx.rows, ctx.indices, ctx.size, ctx.group = x.shape[0], indices, size, group
        return take(_gathered(x, size, group), indices)

    @staticmethod
    def backward(ctx, grad):
        ranks = dist.get_world_size(ctx.group)
        full = put(grad, ctx.indices, ctx.size * ranks, sum_dtype(grad))
        summed = _scattered(full, ctx.size, ctx.group)
        return summed[: ctx.rows].to(grad.dtype), None, None, None


class Scatter(torch.autograd.Function):
    """This rank's rows of the sum over all ranks, of rows at their indices, rounded to `dtype`."""

    @staticmethod
    def forward(ctx, x, indices, size, dtype, group):
        ctx.indices, ctx.size, ctx.dtype, ctx.group = indices, size, x.dtype, group
        full = put(x, indices, size * dist.get_world_size(group), x.dtype)
        return _scattered(full, size, group).to(dtype)

    @staticmethod
    def backward(ctx, grad):
        gathered = take(_gathered(grad, ctx.size, ctx.group), ctx.indices)
        return gathered.to(ctx.dtype), None, None, None, None


class Replicated(torch.autograd.Function):
    """A tensor that all ranks have; its gradient is the sum over all ranks', in fp32."""

    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        return _summed(grad.to(sum_dtype(grad)), ctx.group).to(grad.dtype), None


class Sum(torch.autograd.Function):
    """The sum over all ranks, on all; so is its gradient there already."""

    @staticmethod
    def forward(ctx, x, group):
        return _summed(x, group)

    @staticmethod
    def backward(ctx, grad):
        return grad, None


class Exchange(torch.autograd.Function):
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
