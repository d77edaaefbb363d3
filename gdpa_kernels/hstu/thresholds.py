"""The thresholds of a trained model's buckets, and its padded times as jagged ones."""

from __future__ import annotations

from collections.abc import Callable

import torch

MOST = 2**62


def thresholds_of(
    bucketization: Callable[[torch.Tensor], torch.Tensor],
    buckets: int,
    device: torch.device | str | None = None,
) -> torch.Tensor:
    """int64 `[buckets - 1]` for `RelativeBias`: the least whole numbers that a rising function
    takes to bucket 1, 2, ..., by bisection.

    A model learns the buckets that its own function computes, fp32 logarithm and all: HSTU's exact
    thresholds differ from these by a few seconds. Call it on the device that trained the model; it
    waits for the device some thousand times.

    bucketization: int64 tensor of differences to buckets, of any integer dtype. A bucket that no
    difference below 2 ** 62 reaches has that as its threshold.
    """
    thresholds = []
    for bucket in range(1, buckets):
        low, high = thresholds[-1] if thresholds else 0, MOST
        while low < high:
            middle = (low + high) // 2
            reaches = int(bucketization(torch.tensor([middle], device=device))[0]) >= bucket
            low, high = (low, middle) if reaches else (middle + 1, high)
        thresholds.append(low)
    return torch.tensor(thresholds, dtype=torch.int64, device=device)


def jagged_times(
    timestamps: torch.Tensor, cu_seqlens: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """timestamps and query_timestamps `[total]` for `RelativeBias`, of padded times `[batch, N]` as
    the research code of generative-recommenders has them: a row is compared by the time in the
    column after it, the last column by its own. Waits for the device."""
    column = torch.arange(timestamps.shape[1], device=timestamps.device)
    real = column < cu_seqlens.diff()[:, None]
    following = torch.cat((timestamps[:, 1:], timestamps[:, -1:]), dim=1)
    return timestamps[real], following[real]
