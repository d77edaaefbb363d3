"""Context parallelism: attention over a batch whose tokens are cut into shards, one for each rank.

Nothing is normalised, so attention over all keys is the sum of that over each rank's: no rank needs
a log-sum-exp of another, and the collectives are PyTorch's own. Of 2 ranks with shards 0 and 1, and
heads a and b, a rank has in the forward pass:

    what stays       rank 0                 rank 1

    "queries"        q0 k0 v0               q1 k1 v1
      all-gather     q0 k0 k1 v0 v1         q1 k0 k1 v0 v1
      gdpa           o0                     o1

    "keys"           q0 k0 v0               q1 k1 v1
      all-gather     q0 q1 k0 v0            q0 q1 k1 v1
      gdpa           o0' o1'                o0" o1"           sums over the keys of one shard
      reduce-scatter o0 = o0' + o0"         o1 = o1' + o1"

    "sequences"      q0a q0b k0a k0b ...    q1a q1b k1a k1b ...
      all-to-all     q0a q1a k0a k1a ...    q0b q1b k0b k1b ...
      gdpa           o0a o1a                o0b o1b
      all-to-all     o0a o0b                o1a o1b

The backward pass has the transposed collectives in the other order; what was gathered is kept for
it. The bytes that a rank receives of N tokens on P ranks (`predicted_bytes`; `counted_bytes` counts
them), with H query and K key heads of d numbers. A number takes e bytes in the dtype of the call,
and 4 in sums. Of what is gathered or summed, f = (P - 1) / P comes from other ranks:

| what stays  | forward               | backward           | for                                 |
|-------------|-----------------------|--------------------|-------------------------------------|
| "queries"   | 2 N K d e f           | 2 N K d 4 f        | most calls; grouped heads most      |
| "keys"      | N H d (e + 4) f       | N H d (e + 4) f    | few query heads                     |
| "sequences" | 2 N (H + K) d e f / P | the same           | as many ranks as key heads, or less |

Contiguous shards may end inside a sequence: if one is cut between all ranks, under a causal mask
the last with "queries", the first with "keys", has almost twice the mean work of many ranks; with
"sequences" all have the same. Zigzag shards have equal work, and rows that are gathered by an
index: they pay where long sequences are cut between ranks.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

import torch
import torch.distributed as dist

from gdpa_kernels.calling import checks
from gdpa_kernels.calling.lengths import Lengths, launch_state
from gdpa_kernels.gdpa.api import check_shared_options, gdpa
from gdpa_kernels.gdpa.mask import ALL, Mask, mask_of
from gdpa_kernels.gdpa.registration import check_activation
from gdpa_kernels.parallel.collectives import (
    AllGather,
    AllReduce,
    AllReduceGradient,
    AllToAll,
    ReduceScatter,
    pad_rows,
    select_rows,
    sum_dtype,
    unselect_rows,
)
from gdpa_kernels.parallel.shards import Sharding, check_rows, read_offsets, reusable, sharding_of

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

STATIONARY = ("queries", "keys", "sequences")


def context_parallel_gdpa(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens: Sequence[int],
    *,
    stationary: str = "queries",
    layout: str = "contiguous",
    mask: Mask = ALL,
    group: dist.ProcessGroup | None = None,
    **options,
) -> torch.Tensor:
    """`gdpa(q, k, v, ...)` of a batch whose tokens are spread over ranks; differentiable.

    Args:
        q: this rank's rows by `shard`, `[rows, num_heads, head_dim]`.
        k, v: the same rows, `[rows, num_kv_heads, head_dim]`.
        cu_seqlens: offsets of the whole batch, `[batch + 1]`, as numbers of the host, the same on
            every rank.
        stationary: what is not cut or not moved: "queries" (all-gather of keys and values), "keys"
            (all-gather of queries, reduce-scatter of results) or "sequences" (all-to-all, as
            DeepSpeed-Ulysses: every rank gets all rows of some heads; num_kv_heads must be a
            multiple of the ranks).
        layout: how `shard` cut the batch: "contiguous" or, of equal work under a causal mask,
            "zigzag".
        mask: `Mask` with causal False or True, and window, which needs causal, but for "sequences".
        group: of the ranks; None for all.
        options: of `gdpa`, those in `gdpa.api.SHARED_OPTIONS`; names of activations are of all
            heads, whatever stays. And causal and window as keywords, in place of mask, until
            version 0.3.

    q, k and v may be `DTensor`s of the whole batch, sharded by tokens on a mesh of one dimension,
    as `distribute_tensor(x, mesh, [Shard(0)])` makes them: shards are contiguous, the group is the
    mesh's, and the result is such a one.

    Returns:
        This rank's rows of the output, `[rows, num_heads, head_dim]`.

    Raises:
        TypeError, ValueError: an argument is wrong: its name, what is expected, what was received.
            Wrong on one rank alone, it leaves the others waiting. And the call is in the capture of
            a CUDA graph.

    Source: sums of partial results, as in the chapter "What GDPA computes"; the split of queries
    and the zigzag layout are of all-gather context parallelism (arXiv 2407.21783, section 3.3.2).
    """
    names = {"causal", "window"} & options.keys()
    mask = mask_of(mask, {name: options.pop(name) for name in names})
    mesh = _mesh_of(q, k, v, layout, group)
    if mesh is not None:
        out = context_parallel_gdpa(
            *(x.to_local() for x in (q, k, v)), cu_seqlens, stationary=stationary, mask=mask,
            group=mesh.get_group(), **options,
        )  # fmt: skip
        shape = torch.Size((cu_seqlens[-1], *out.shape[1:]))
        return type(q).from_local(
            out, mesh, q.placements, run_check=False, shape=shape,
            stride=(shape[1] * shape[2], shape[2], 1),
        )  # fmt: skip
    q, k, v = checks.autocast(q, k, v)
    sharding, rank, ranks, options = _checked(q, k, v, cu_seqlens, layout, group, options)
    _check_mask(stationary, mask)
    check_rows("q", q, sharding.num_rows(rank), f"rank {rank}")
    if stationary == "sequences" and k.shape[1] % ranks:
        raise ValueError(
            f"num_kv_heads must be a multiple of the {ranks} ranks with "
            f"stationary='sequences', got {k.shape[1]}"
        )
    stream = launch_state(q.device).stream
    call = _rank_call(sharding.ends, ranks, layout, rank, stationary, mask.causal, q.device, stream)
    if stationary == "sequences":
        return _by_heads(q, k, v, call, mask, group, rank, ranks, options)
    if stationary == "queries":
        k, v = (AllGather.apply(x, call.rows, call.shard_rows, group) for x in (k, v))
        mask = _aligned(mask, "lower_right")
        return gdpa(q, k, v, call.local, call.partners, mask=mask, **options)
    part = gdpa(
        AllGather.apply(q, call.rows, call.shard_rows, group), k, v, call.partners, call.local,
        mask=_aligned(mask, "upper_left"), out_dtype=sum_dtype(q), **options,
    )  # fmt: skip
    return ReduceScatter.apply(part, call.rows, call.shard_rows, q.dtype, group)[: q.shape[0]]


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
    sharding, rank, _, options = _checked(q, k, v, cu_seqlens, layout, group, options)
    own_keys = Counter()
    for i, first, end in sharding.spans[rank]:
        own_keys[i] += end - first
    lengths = _lengths([own_keys[i] for i in range(sharding.batch)], q.device)
    part = gdpa(
        AllReduceGradient.apply(q, group), k, v, None, lengths, out_dtype=sum_dtype(q), **options
    )
    return AllReduce.apply(part, group).to(q.dtype)


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
    checks.check_choice("stationary", stationary, STATIONARY)
    numbers, size = rows * (ranks - 1) * head_dim, dtype.itemsize
    sums = torch.promote_types(dtype, torch.float32).itemsize
    return {
        "queries": (2 * numbers * num_kv_heads * size, 2 * numbers * num_kv_heads * sums),
        "keys": (numbers * num_heads * (size + sums),) * 2,
        "sequences": (2 * numbers * (num_heads + num_kv_heads) * size // ranks,) * 2,
    }[stationary]


class RankCall(NamedTuple):
    """What a rank passes to `gdpa`, as `Sharding.partners` finds it: lengths of sequences on both
    sides of attention. local: of what stays, its shard (all rows of its heads with "sequences");
    partners: of what is gathered, whose rows of all shards, of shard_rows each, are at `rows`."""

    local: Lengths
    partners: Lengths
    rows: slice | torch.Tensor
    shard_rows: int


@lru_cache(maxsize=8)
def _rank_call(
    ends: tuple[int, ...], ranks: int, layout: str, rank: int, stationary: str, causal: bool,
    device: torch.device, stream: int | None,
) -> RankCall:  # fmt: skip
    """A rank's call, made once for all layers on a stream, which brings it to the device: rows may
    be a number for each token. It depends on the arguments alone; what is dropped is made again."""
    sharding = sharding_of(ends, ranks, layout)
    lengths, ranges = sharding.partners(rank, stationary, causal)
    with reusable():
        partners = _lengths([end - first for first, end in ranges], device)
        rows = sharding.gathered_rows(ranges, device)
        return RankCall(_lengths(lengths, device), partners, rows, sharding.shard_rows)


def _check_mask(stationary: object, mask: Mask) -> None:
    checks.check_choice("stationary", stationary, STATIONARY)
    if not mask.plain or isinstance(mask.causal, str):
        raise ValueError(
            "mask must have causal False or True, where q has k's rows, and window alone, got "
            f"{mask}"
        )
    if mask.window is not None and not mask.causal and stationary != "sequences":
        raise ValueError(f"window must be None without causal, got {mask.window}")


def _aligned(mask: Mask, alignment: str) -> Mask:
    """The mask, if causal with an alignment. Queries that stay are the last of the keys that they
    see, "lower_right"; queries that see keys that stay begin with them, "upper_left"."""
    return replace(mask, causal=alignment) if mask.causal else mask


def _checked(q, k, v, cu_seqlens, layout, group, options) -> tuple[Sharding, int, int, dict]:
    """(sharding, rank, ranks, options), of arguments that both calls have."""
    if not dist.is_available() or not dist.is_initialized():
        raise ValueError("group must be one of torch.distributed, which is not initialized")
    rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    if rank < 0:
        raise ValueError(f"group must have rank {dist.get_rank()} in it, got one of other ranks")
    sharding = sharding_of(read_offsets(cu_seqlens), ranks, layout)
    check_shared_options(options)
    checks.check_tensors(q, k, v)
    if launch_state(q.device).capturing:  # the graph would read what `_rank_call` may drop
        raise ValueError(
            "cu_seqlens must be brought to the device outside of the capture of a CUDA graph, got "
            "a call in one"
        )
    check_rows("k", k, sharding.num_rows(rank), f"rank {rank}")
    if "activation" in options:
        options = options | {"activation": check_activation(options["activation"], q.shape[1])}
    return sharding, rank, ranks, options


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


def _by_heads(q, k, v, call: RankCall, mask, group, rank, ranks, options) -> torch.Tensor:
    """All rows of a share of the heads on each rank."""
    names = options.get("activation", ())
    if len(names) > 1:
        heads = len(names) // ranks
        options = options | {"activation": names[rank * heads : (rank + 1) * heads]}
    gathered = [AllToAll.apply(pad_rows(x, call.shard_rows), True, ranks, group) for x in (q, k, v)]
    out = gdpa(
        *(select_rows(x, call.rows) for x in gathered), call.local, call.local,
        mask=_aligned(mask, "upper_left"), **options,
    )  # fmt: skip
    out = unselect_rows(out, call.rows, call.shard_rows * ranks, out.dtype)
    return AllToAll.apply(out, False, ranks, group)[: q.shape[0]]


def _lengths(lengths: list[int], device: torch.device) -> Lengths:
    return Lengths(torch.tensor([0, *lengths], device="cpu").cumsum(0), device=device)
