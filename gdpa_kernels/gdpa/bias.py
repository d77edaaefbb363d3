"""Relative bias over positions and times (HSTU): arguments, the definition, and its gradients.

Of query i and key j, positions as `causal` and `target_ranks` count them, t in the unit of the
caller's clock:

    S_ij = scale q_i . k_j + position_table[clamp(j - i, -(n - 1), n - 1) + n - 1]
                           + time_table[bucket(t'_i - t_j)],

before the activation. t'_i is the time of the event after i, or of i where it is its sequence's
last (`next_time`), else t_i. bucket(d) counts the thresholds at or below abs(d). HSTU's is
min(floor(ln(max(abs(d), 1)) / 0.301), len(time_table) - 1): its thresholds are whole numbers, and
all that compute a bucket compare with them, so that no rounding of a logarithm tells them apart.
"""

from __future__ import annotations

from dataclasses import dataclass
from decimal import ROUND_CEILING, Decimal, localcontext
from itertools import pairwise
from typing import NamedTuple

import torch

from gdpa_kernels.calling import checks
from gdpa_kernels.calling.sequences import token_positions

MOST_BUCKETS = 146
"""Beyond, HSTU's thresholds exceed int64."""
_LARGEST = torch.iinfo(torch.int64).max


def _least() -> tuple[int, ...]:
    """The least whole numbers whose logarithm over 0.301 is at least 1, 2, ..., exactly."""
    with localcontext() as context:
        context.prec = 60
        edges = [(Decimal("0.301") * b).exp() for b in range(1, MOST_BUCKETS)]
        return tuple(int(x.to_integral_value(ROUND_CEILING)) for x in edges)


_THRESHOLDS = _least()


@dataclass(frozen=True, eq=False)
class RelativeBias:
    """What `gdpa` adds to the scores before the activation, by the distance of two positions and by
    the time between two events. Tables have gradients, the same bits in every run; times have none.

    Args:
        position_table: floating-point `[2 n - 1]`, or `[num_heads_q, 2 n - 1]` for one per query
            head: entry n - 1 + d is added where the key stands d positions after the query; a
            distance of n or more takes the last entry on its side. None: no such term.
        time_table: `[buckets]` or `[num_heads_q, buckets]`, by the time between query and key; a
            later time than the last threshold takes the last entry. None: no such term.
        timestamps: int32 or int64 `[total_k]`, of the keys; given with time_table. In any unit:
            HSTU's are seconds. Differences within a sequence must be less than 2**63 in size, which
            a call that reads values checks.
        query_timestamps: int32 or int64 `[total_q]`, of the queries as they are to be compared.
            None: queries stand at the positions of keys, and take their times.
        time_thresholds: int64 `[buckets - 1]`, rising: a difference, whatever its sign, lies in the
            bucket whose number is that of the thresholds at or below it. None: HSTU's, which is
            floor(ln(max(difference, 1)) / 0.301); made on the host and copied in each call, which
            the capture of a CUDA graph does not allow: it needs what `hstu_thresholds` returns.
        next_time: without query_timestamps, a query takes the time of the event after it, the last
            of a sequence its own, as in HSTU. Then an append changes the bias of the row before.
            False: its own time.

    Shapes, dtypes and devices are checked by the call: TypeError or ValueError with the argument,
    what is expected, what was received.

    Source: HSTU (arXiv 2402.17152) and its code, RelativeBucketedTimeAndPositionBasedBias of
    generative-recommenders, whose time table is `[129]`, whose scale is 1, and which computes the
    logarithm in fp32.
    """

    position_table: torch.Tensor | None = None
    time_table: torch.Tensor | None = None
    timestamps: torch.Tensor | None = None
    query_timestamps: torch.Tensor | None = None
    time_thresholds: torch.Tensor | None = None
    next_time: bool = True


class Bias(NamedTuple):
    """A bias as implementations take it, contiguous: tables `[1 or num_heads, entries]`, int64
    times `[total_q]` and `[total_k]`, int64 thresholds `[buckets - 1]`; None for what is absent."""

    position_table: torch.Tensor | None = None
    time_table: torch.Tensor | None = None
    times_q: torch.Tensor | None = None
    times_k: torch.Tensor | None = None
    thresholds: torch.Tensor | None = None

    @property
    def is_given(self) -> bool:
        return self.position_table is not None or self.time_table is not None

    def named(self) -> dict[str, torch.Tensor]:
        """What is not absent, as arguments of the operators."""
        return {name: x for name, x in zip(self._fields, self, strict=True) if x is not None}


NONE = Bias()


def hstu_thresholds(buckets: int, device: torch.device | str | None = None) -> torch.Tensor:
    """int64 `[buckets - 1]`: the least whole numbers d with ln(d) / 0.301 >= 1, 2, ...

    Raises ValueError for less than 1 bucket and for more than 146, beyond int64.
    """
    checks.check_count("buckets", buckets, least=1)
    if buckets > MOST_BUCKETS:
        raise ValueError(f"buckets must be at most {MOST_BUCKETS}, got {buckets}")
    return torch.tensor(_THRESHOLDS[: buckets - 1], dtype=torch.int64, device=device)


def bias_of_call(
    relative_bias: RelativeBias, num_heads: int, rows: int, keys: int,
    cu_seqlens_q: torch.Tensor | None, cu_seqlens_k: torch.Tensor, same: bool, lower_right: bool,
    validate: bool,
) -> Bias:  # fmt: skip
    """The bias of a call. rows, keys: those of q and k. same: q and k have the
    same offsets.

    Raises TypeError or ValueError unless `gdpa` takes it. Checking values waits for the device,
    where `validate` is and there are some to check.
    """
    if not isinstance(relative_bias, RelativeBias):
        raise TypeError(
            f"relative_bias must be a RelativeBias or None, got {type(relative_bias).__name__}"
        )
    if cu_seqlens_q is None:
        raise ValueError("cu_seqlens_q must be given with relative_bias, got None: a shared q")
    checks.check_bool(next_time=relative_bias.next_time)
    device = cu_seqlens_k.device
    position = _table("position_table", relative_bias.position_table, num_heads, device)
    time = _table("time_table", relative_bias.time_table, num_heads, device)
    if position is None and time is None:
        raise ValueError("relative_bias must have a position_table or a time_table, got neither")
    if position is not None and position.shape[1] % 2 == 0:
        raise ValueError(
            "position_table must have an odd number of entries, 2 n - 1, "
            f"got {list(relative_bias.position_table.shape)}"
        )
    if time is None:
        for name in ("timestamps", "query_timestamps", "time_thresholds"):
            if getattr(relative_bias, name) is not None:
                raise ValueError(f"{name} must be None without a time_table, got a value")
        return Bias(position, None, None, None, None)
    times_k = _times("timestamps", relative_bias.timestamps, keys, device)
    readable = validate and checks.is_readable(cu_seqlens_k)
    if relative_bias.query_timestamps is not None:
        times_q = _times("query_timestamps", relative_bias.query_timestamps, rows, device)
    else:
        if not same and readable and bool((cu_seqlens_q.diff() > cu_seqlens_k.diff()).any()):
            raise ValueError(
                "query_timestamps must be given where a sequence has more queries than keys, "
                "got None"
            )
        times_q = _times_of_queries(
            times_k, rows, cu_seqlens_q, cu_seqlens_k, lower_right, relative_bias.next_time
        )
    if readable:
        _check_differences(times_q, times_k, cu_seqlens_q, cu_seqlens_k)
    thresholds = relative_bias.time_thresholds
    if thresholds is None:
        if time.shape[1] > MOST_BUCKETS:
            raise ValueError(
                f"time_table must have at most {MOST_BUCKETS} entries without time_thresholds, "
                f"got {list(relative_bias.time_table.shape)}"
            )
        thresholds = hstu_thresholds(time.shape[1], device)
    else:
        _check_thresholds(thresholds, time.shape[1], device, readable)
    return Bias(position, time, times_q, times_k, thresholds.contiguous())


def _table(name: str, table: object, num_heads: int, device: torch.device) -> torch.Tensor | None:
    """`[1 or num_heads, entries]`, of which gradients reach the table."""
    if table is None:
        return None
    if not isinstance(table, torch.Tensor) or not table.dtype.is_floating_point:
        what = table.dtype if isinstance(table, torch.Tensor) else type(table).__name__
        raise TypeError(f"{name} must be a floating-point tensor or None, got {what}")
    shapes = table.dim() == 1 or (table.dim() == 2 and table.shape[0] == num_heads)
    if not shapes or table.shape[-1] < 1 or table.device != device:
        raise ValueError(
            f"{name} must have shape [entries] or [{num_heads}, entries], with at least 1 entry, "
            f"on {device}, got {list(table.shape)} on {table.device}"
        )
    return (table[None] if table.dim() == 1 else table).contiguous()


def check_times(name: str, times: object, table: str) -> None:
    """Raises TypeError unless times are a tensor of integers, as `table` needs them."""
    if not isinstance(times, torch.Tensor) or times.dtype not in (torch.int32, torch.int64):
        what = times.dtype if isinstance(times, torch.Tensor) else type(times).__name__
        raise TypeError(f"{name} must be an int32 or int64 tensor with {table}, got {what}")


def _times(name: str, times: object, rows: int, device: torch.device) -> torch.Tensor:
    check_times(name, times, "time_table")
    if times.shape != (rows,) or times.device != device:
        raise ValueError(
            f"{name} must have shape [{rows}] on {device}, "
            f"got {list(times.shape)} on {times.device}"
        )
    return times.to(torch.int64).contiguous()


def _check_differences(
    times_q: torch.Tensor, times_k: torch.Tensor,
    cu_seqlens_q: torch.Tensor, cu_seqlens_k: torch.Tensor,
) -> None:  # fmt: skip
    """Raises ValueError unless int64 holds each difference of a query's and a key's time of one
    sequence. Waits for the device."""
    if _largest_difference(times_q, times_k) <= _LARGEST:
        return
    sequences = zip(pairwise(cu_seqlens_q.tolist()), pairwise(cu_seqlens_k.tolist()), strict=True)
    for i, (rows, keys) in enumerate(sequences):
        difference = _largest_difference(times_q[slice(*rows)], times_k[slice(*keys)])
        if difference > _LARGEST:
            raise ValueError(
                "timestamps must differ by less than 2**63 within a sequence, "
                f"got a difference of {difference} in sequence {i}"
            )


def _largest_difference(times_q: torch.Tensor, times_k: torch.Tensor) -> int:
    """The size, exactly, of the largest; 0 where there is none."""
    if not times_q.numel() or not times_k.numel():
        return 0
    extremes = torch.stack((*times_q.aminmax(), *times_k.aminmax()))
    first_q, last_q, first_k, last_k = extremes.tolist()
    return max(last_q - first_k, last_k - first_q)


def _check_thresholds(
    thresholds: object, buckets: int, device: torch.device, readable: bool
) -> None:
    if not isinstance(thresholds, torch.Tensor) or thresholds.dtype != torch.int64:
        what = thresholds.dtype if isinstance(thresholds, torch.Tensor) else type(thresholds)
        raise TypeError(f"time_thresholds must be an int64 tensor or None, got {what}")
    if thresholds.shape != (buckets - 1,) or thresholds.device != device:
        raise ValueError(
            f"time_thresholds must have shape [{buckets - 1}], one less than time_table, "
            f"on {device}, got {list(thresholds.shape)} on {thresholds.device}"
        )
    if readable and bool((thresholds.diff() < 0).any()):
        raise ValueError(f"time_thresholds must rise, got {thresholds.tolist()}")


def _times_of_queries(
    times: torch.Tensor, rows: int, cu_seqlens_q: torch.Tensor, cu_seqlens_k: torch.Tensor,
    lower_right: bool, next_time: bool,
) -> torch.Tensor:  # fmt: skip
    """The times of queries at the positions of keys; waits for no device."""
    if rows == 0 or times.shape[0] == 0 or len(cu_seqlens_k) == 1:  # nothing looks at them
        return times.new_zeros(rows)
    sequence, position = token_positions(rows, cu_seqlens_q)
    sequence = sequence.clamp(max=len(cu_seqlens_k) - 2)  # for rows behind the last sequence
    lengths = cu_seqlens_k.diff()[sequence]
    if lower_right:
        position = position + lengths - cu_seqlens_q.diff()[sequence]
    position = torch.minimum(position + int(next_time), lengths - 1)
    return times[(cu_seqlens_k[sequence] + position).clamp(min=0)]


def bucket(difference: torch.Tensor, thresholds: torch.Tensor) -> torch.Tensor:
    """The bucket of each difference of times, int64, in any shape."""
    return torch.bucketize(difference.abs(), thresholds, right=True)


def index_of(distance: torch.Tensor, entries: int) -> torch.Tensor:
    """Where the table of positions has the entry of each j - i."""
    most = entries // 2
    return distance.clamp(-most, most) + most


def of_sequence(
    bias: Bias, i: torch.Tensor, j: torch.Tensor, rows: slice, keys: slice, dtype: torch.dtype
) -> torch.Tensor:
    """The bias `[1 or num_heads, rows, keys]` of one sequence; i `[rows, 1]` and j `[1, keys]` are
    positions."""
    total = torch.zeros((), dtype=dtype, device=j.device)
    if bias.position_table is not None:
        index = index_of(j - i, bias.position_table.shape[1])
        total = total + bias.position_table.to(dtype)[:, index]
    if bias.time_table is not None:
        total = total + bias.time_table.to(dtype)[:, buckets_of_sequence(bias, rows, keys)]
    return total


def buckets_of_sequence(bias: Bias, rows: slice, keys: slice) -> torch.Tensor:
    """The bucket of each pair of one sequence, `[rows, keys]`."""
    difference = bias.times_q[rows][:, None] - bias.times_k[keys][None]
    return bucket(difference, bias.thresholds)


def by_distance(ds: torch.Tensor) -> torch.Tensor:
    """Sums of ds `[heads, rows, keys]` over the pairs of each distance key - row, from 1 - rows to
    keys - 1, in a fixed order."""
    heads, rows, keys = ds.shape
    # Row r of the flipped rows, shifted by r: what had one distance now has one column.
    wide = torch.nn.functional.pad(ds.flip(1), (0, rows)).flatten(1)
    width = rows + keys - 1
    return wide[:, : rows * width].view(heads, rows, width).sum(1)


def onto_table(sums: torch.Tensor, first: int, entries: int) -> torch.Tensor:
    """Sums `[heads, distances]` of the distances from `first` on, `[heads, entries]`: those beyond
    the table are added to its ends."""
    count, least = sums.shape[1], -(entries // 2)
    skipped = min(max(least - first, 0), count)
    after = min(max(first + count - 1 + least, 0), count)
    table = sums.new_zeros(sums.shape[0], entries)
    middle = sums[:, skipped : max(count - after, skipped)]
    table[:, max(first + skipped - least, 0) :][:, : middle.shape[1]] = middle
    table[:, 0] += sums[:, :skipped].sum(1)
    table[:, -1] += sums[:, count - after :].sum(1)
    return table


def by_bucket(ds: torch.Tensor, buckets: torch.Tensor, entries: int) -> torch.Tensor:
    """Sums of ds `[heads, rows, keys]` over the pairs of each bucket, `[heads, entries]`, in a
    fixed order. Waits for the device."""
    table = ds.new_zeros(ds.shape[0], entries)
    for entry in buckets.unique().tolist():
        table[:, entry] = torch.where(buckets == entry, ds, 0).sum((1, 2))
    return table
