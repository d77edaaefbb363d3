"""Self-attention over sequences that are cut between ranks.

Nothing is normalised, so attention over all keys is the sum of that over each rank's: no rank needs
a log-sum-exp of another, and the collectives are PyTorch's own. The bytes that a rank receives, of
N tokens on P ranks, f = (P - 1) / P, H query and K key heads of d numbers of e bytes, sums in fp32:

| what stays  | forward               | backward           | for                                 |
|-------------|-----------------------|--------------------|-------------------------------------|
| "queries"   | 2 N K d e f           | 2 N K d 4 f        | most calls; grouped heads most      |
| "keys"      | N H d (e + 4) f       | N H d (4 + 4) f    | few query heads                     |
| "sequences" | 2 N (H + K) d e f / P | the same           | as many ranks as key heads, or less |

What was gathered is kept for the backward pass. With a causal mask the last rank has about twice
the mean work, but for "sequences".
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from gdpa_kernels.calling import checks
from gdpa_kernels.gdpa.api import check_causal, gdpa

STATIONARY = ("queries", "keys", "sequences")


def rows_of_rank(total: int, rank: int, ranks: int) -> tuple[int, int]:
    """The rows [first, end) of `total` packed tokens that a rank holds: all have as many, but the
    last ones, which may have fewer or none."""
    size = -(-total // ranks)
    return min(rank * size, total), min((rank + 1) * size, total)


def context_parallel_gdpa(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens: Sequence[int],
    *,
    stationary: str = "queries",
    causal: bool = False,
    window: int | None = None,
    group: dist.ProcessGroup | None = None,
    **options,
) -> torch.Tensor:
    """`gdpa(q, k, v, ...)` of a batch whose tokens are spread over ranks; differentiable.

    Args:
        q: this rank's rows `rows_of_rank(total, ...)`, `[rows, num_heads, head_dim]`.
        k, v: the same rows, `[rows, num_kv_heads, head_dim]`.
        cu_seqlens: offsets of the whole batch, `[batch + 1]`, as numbers of the host, the same on
            every rank.
        stationary: what no collective moves: "queries" (keys and values are gathered), "keys"
            (queries are gathered and results summed up) or "sequences" (every rank gets all rows of
            some heads; num_kv_heads must be a multiple of the ranks).
        causal, window: as `gdpa`; a window needs causal, but for "sequences".
        group: of the ranks; None for all.
        options: of `gdpa` (activation, scale, output_scale, precise, impl, backward_impl).

    Returns:
        This rank's rows of the output, `[rows, num_heads, head_dim]`.

    Raises:
        TypeError, ValueError: an argument is wrong: its name, what is expected, what was received.
            Wrong on one rank alone, it leaves the others waiting.

    Source: sums of partial results, as in the chapter "What is GDPA"; the split of queries is that
    of all-gather context parallelism (arXiv 2407.21783, section 3.3.2).
    """
    ends, rank, ranks = _checked(q, k, v, cu_seqlens, stationary, causal, window, group)
    options = options | {"validate": False, "window": window}
    if stationary == "sequences":
        return _by_heads(q, k, v, ends, causal, group, ranks, options)
    first, last = rows_of_rank(ends[-1], rank, ranks)
    size = -(-ends[-1] // ranks)
    mine = _overlaps(ends, first, last)
    if stationary == "queries":
        k, v = (_Gather.apply(x, size, group)[: ends[-1]] for x in (k, v))
        if not mine:  # its part of the gradients' sums is zero, and the others wait for it
            return q + k[:0].sum() + v[:0].sum()
        begin = ends[mine[0]]
        end = last if causal else ends[mine[-1] + 1]
        keys = [min(ends[i + 1], end) - ends[i] for i in mine]
        return _attend(
            q, k[begin:end], v[begin:end], _lengths(ends, mine, first, last), keys,
            causal="lower_right" if causal else False, **options,
        )  # fmt: skip
    gathered = _Gather.apply(q, size, group)[: ends[-1]]
    partial = gathered.new_zeros(size * ranks, *q.shape[1:], dtype=_sum_dtype(q))
    if mine:
        begin, end = first if causal else ends[mine[0]], ends[mine[-1] + 1]
        rows = [ends[i + 1] - max(ends[i], begin) for i in mine]
        part = _attend(
            gathered[begin:end], k, v, rows, _lengths(ends, mine, first, last),
            causal="upper_left" if causal else False, out_dtype=partial.dtype, **options,
        )  # fmt: skip
        partial = partial.index_put((torch.arange(begin, end, device=q.device),), part)
    else:
        partial = partial + gathered[:0].sum() + k.sum() + v.sum()  # of no rows: nothing is read
    return _Scatter.apply(partial, size, group)[: last - first].to(q.dtype)


def _checked(q, k, v, cu_seqlens, stationary, causal, window, group):
    """(offsets, rank, ranks)."""
    if not dist.is_available() or not dist.is_initialized():
        raise ValueError("group must be one of torch.distributed, which is not initialized")
    rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    if stationary not in STATIONARY:
        raise ValueError(f"stationary must be one of {', '.join(STATIONARY)}, got {stationary!r}")
    check_causal(causal)
    if isinstance(causal, str):
        raise ValueError(f"causal must be a bool here, where q has k's rows, got {causal!r}")
    if window is not None and not causal and stationary != "sequences":
        raise ValueError(f"window must be None without causal, got {window}")
    if isinstance(cu_seqlens, torch.Tensor):
        raise TypeError("cu_seqlens must be numbers of the host, got a tensor: cu_seqlens.tolist()")
    ends = [int(end) for end in cu_seqlens]
    if not ends or ends[0] != 0 or ends != sorted(ends):
        raise ValueError(f"cu_seqlens must rise from 0, got {list(cu_seqlens)}")
    checks.check_tensors(q, k, v)
    first, last = rows_of_rank(ends[-1], rank, ranks)
    for name, x in (("q", q), ("k", k)):
        if x.shape[0] != last - first:
            raise ValueError(
                f"{name} must have the rows {first} to {last} of rank {rank}, got {x.shape[0]} rows"
            )
    if stationary == "sequences" and k.shape[1] % ranks:
        raise ValueError(
            f"num_kv_heads must be a multiple of the {ranks} ranks with stationary='sequences', "
            f"got {k.shape[1]}"
        )
    return ends, rank, ranks


def _sum_dtype(x: torch.Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)


def _overlaps(ends: list[int], first: int, last: int) -> list[int]:
    """The sequences that have rows in [first, last), and empty ones between them."""
    inside = [i for i in range(len(ends) - 1) if max(ends[i], first) < min(ends[i + 1], last)]
    return list(range(inside[0], inside[-1] + 1)) if inside else []


def _lengths(ends: list[int], sequences: list[int], first: int, last: int) -> list[int]:
    """How many rows of each sequence lie in [first, last)."""
    return [min(ends[i + 1], last) - max(ends[i], first) for i in sequences]


def _attend(q, k, v, rows: list[int], keys: list[int], **options) -> torch.Tensor:
    """`gdpa` of sequences of these lengths."""
    offsets = [
        torch.tensor([0, *lengths]).cumsum(0).to(q.device, torch.int32) for lengths in (rows, keys)
    ]
    return gdpa(q, k, v, *offsets, max(rows), max(keys), **options)


def _by_heads(q, k, v, ends, causal, group, ranks, options) -> torch.Tensor:
    """All rows of a share of the heads on each rank."""
    total, rows, size = ends[-1], q.shape[0], -(-ends[-1] // ranks)
    whole = [_Exchange.apply(_padded(x, size), True, ranks, group)[:total] for x in (q, k, v)]
    lengths = [b - a for a, b in zip(ends, ends[1:], strict=False)] or [0]
    out = _attend(*whole, lengths, lengths, causal="upper_left" if causal else False, **options)
    return _Exchange.apply(_padded(out, size * ranks), False, ranks, group)[:rows]


def _padded(x: torch.Tensor, rows: int) -> torch.Tensor:
    return torch.nn.functional.pad(x, (0, 0, 0, 0, 0, rows - x.shape[0]))


def _gathered(x: torch.Tensor, size: int, group) -> torch.Tensor:
    out = x.new_empty(size * dist.get_world_size(group), *x.shape[1:])
    dist.all_gather_into_tensor(out, _padded(x, size).contiguous(), group=group)
    return out


def _scattered(x: torch.Tensor, size: int, group) -> torch.Tensor:
    out = x.new_empty(size, *x.shape[1:])
    dist.reduce_scatter_tensor(out, x.contiguous(), group=group)
    return out


class _Gather(torch.autograd.Function):
    """Every rank's rows; the gradient of a rank's rows is the sum over all ranks', in fp32."""

    @staticmethod
    def forward(ctx, x, size, group):
        ctx.rows, ctx.size, ctx.group = x.shape[0], size, group
        return _gathered(x, size, group)

    @staticmethod
    def backward(ctx, grad):
        summed = _scattered(grad.to(_sum_dtype(grad)), ctx.size, ctx.group)
        return summed[: ctx.rows].to(grad.dtype), None, None


class _Scatter(torch.autograd.Function):
    """This rank's rows of the sum over all ranks."""

    @staticmethod
    def forward(ctx, x, size, group):
        ctx.size, ctx.group = size, group
        return _scattered(x, size, group)

    @staticmethod
    def backward(ctx, grad):
        return _gathered(grad, ctx.size, ctx.group), None, None


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
    dist.all_to_all_single(got, parts, group=group)
    if to_heads:
        return got.reshape(ranks * rows, heads // ranks, dim)
    return got.transpose(0, 1).reshape(rows // ranks, ranks * heads, dim)
