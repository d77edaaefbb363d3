"""Sequences of contexts, history and targets (HSTU): arguments, the definition, and counting."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from gdpa_kernels.calling import checks

if TYPE_CHECKING:
    from gdpa_kernels.gdpa.batch import Batch

RANKS = ("shared", "own")


def check_targets(
    num_targets: object, num_contexts: object, target_group_size: object, full_rows: object,
    target_ranks: object, causal: object, window: object,
) -> None:  # fmt: skip
    """Raises TypeError or ValueError unless each is what `gdpa` takes, and all go together."""
    for name, value, least in (
        ("target_group_size", target_group_size, 1),
        ("full_rows", full_rows, 0),
    ):
        checks.check_count(name, value, least)
    checks.check_choice("target_ranks", target_ranks, RANKS)
    if full_rows and (window is None or target_ranks == "own"):
        raise ValueError(
            "full_rows must be 0 without a window and with target_ranks='own', "
            f"got {full_rows} with window={window!r} and target_ranks={target_ranks!r}"
        )
    given = num_targets is not None or num_contexts is not None
    if (target_group_size, target_ranks) != (1, "shared") and num_targets is None:
        raise ValueError(
            "target_group_size and target_ranks must be 1 and 'shared' without num_targets, "
            f"got {target_group_size} and {target_ranks!r}"
        )
    if (given or full_rows) and not causal:
        raise ValueError(
            "causal must be True, 'upper_left' or 'lower_right' with num_targets, num_contexts or "
            f"full_rows, got {causal!r}"
        )


def segments_of_call(
    num_targets: torch.Tensor | None, num_contexts: torch.Tensor | int | None, full_rows: int,
    cu_seqlens_q: torch.Tensor | None, cu_seqlens_k: torch.Tensor, lower_right: bool,
    validate: bool,
) -> torch.Tensor | None:  # fmt: skip
    """int32 `[sequences, 2]`, targets and contexts of each sequence; None without any.

    Raises TypeError or ValueError unless the counts fit the sequences, and the queries end with
    their sequence. Checking values waits for the device, where `validate` is.
    """
    if num_targets is None and num_contexts is None and not full_rows:
        return None
    if cu_seqlens_q is None:
        raise ValueError("cu_seqlens_q must be given with num_targets, num_contexts or full_rows")
    lengths = cu_seqlens_k.diff()
    targets = lengths.new_zeros(lengths.shape)
    if num_targets is not None:
        targets = _counts("num_targets", num_targets, lengths)
    if num_contexts is None:
        contexts = lengths.new_zeros(lengths.shape)
    elif isinstance(num_contexts, torch.Tensor):
        contexts = _counts("num_contexts", num_contexts, lengths)
    else:
        checks.check_count("num_contexts", num_contexts)
        contexts = (lengths - targets).clamp(max=checks.int32(num_contexts))
    segments = torch.stack((targets, contexts), dim=1)
    if validate and checks.is_readable(cu_seqlens_k):
        check_counts(segments, cu_seqlens_q, cu_seqlens_k, lower_right)
    return segments


def _counts(name: str, counts: object, lengths: torch.Tensor) -> torch.Tensor:
    """An argument of counts as int32 `[sequences]`; those of 64 bits that int32 does not hold, as
    others that fit no sequence."""
    if not isinstance(counts, torch.Tensor) or counts.dtype not in (torch.int32, torch.int64):
        got = counts.dtype if isinstance(counts, torch.Tensor) else repr(counts)
        also = ", an integer of at least 0" if name == "num_contexts" else ""
        raise TypeError(f"{name} must be an int32 or int64 tensor{also} or None, got {got}")
    if counts.shape != lengths.shape or counts.device != lengths.device:
        raise ValueError(
            f"{name} must have shape {list(lengths.shape)} on {lengths.device}, "
            f"got {list(counts.shape)} on {counts.device}"
        )
    return checks.to_int32(counts, unread=True)


def check_counts(
    segments: torch.Tensor, cu_seqlens_q: torch.Tensor, cu_seqlens_k: torch.Tensor,
    lower_right: bool,
) -> None:  # fmt: skip
    """Raises ValueError unless the counts fit the sequences, and with positions that start with
    their sequence queries are all of its tokens. Waits for the device."""
    keys = cu_seqlens_k.diff().tolist()
    for i, (pair, length) in enumerate(zip(segments.tolist(), keys, strict=True)):
        if min(pair) < 0 or sum(pair) > length:
            raise ValueError(
                "num_targets and num_contexts must be at least 0 and together at most the "
                f"length, got {pair[0]} and {pair[1]} of {length} in sequence {i}"
            )
    if not lower_right and cu_seqlens_q.tolist() != cu_seqlens_k.tolist():
        raise ValueError(
            "causal must be 'lower_right' with num_targets, num_contexts or full_rows where "
            "queries are the last of their sequence, got other offsets for q than for k"
        )


def visible(
    i: torch.Tensor, j: torch.Tensor, targets: int, contexts: int, length: int, batch: Batch
) -> torch.Tensor:
    """Which pairs of positions i and j (of any two shapes that go together) count, of a sequence of
    `length` tokens."""
    history = length - targets

    def rank(at: torch.Tensor) -> torch.Tensor:
        at = at if batch.own_ranks else at.clamp(max=history)
        return (at - contexts + 1).clamp(min=0) if contexts else at

    group = batch.target_group_size
    same = (i - history).div(group, rounding_mode="floor") == (j - history).div(
        group, rounding_mode="floor"
    )
    keep = (j <= i) & ((j < history) | same)
    if batch.window is not None:
        near = rank(i) - rank(j) <= batch.window
        if batch.full_rows:
            top = torch.tensor(history)
            near |= rank(i) >= (top - contexts + 1 if contexts else top) - batch.full_rows
        keep &= near
    return keep | ((i < contexts) & (j < history))


def pairs(batch: Batch) -> int:
    """Pairs that count, of one head. Reads the offsets, which waits for the device."""
    rows = np.diff(batch.cu_seqlens_q.tolist())
    keys = np.diff(batch.cu_seqlens_k.tolist())
    total = 0
    for n, length, (m, c) in zip(rows, keys, batch.segments.tolist(), strict=True):
        i, h = np.arange(length - n, length), length - m
        r = i if batch.own_ranks else np.minimum(i, h)
        r = np.maximum(r - c + 1, 0) if c else r
        history = np.minimum(i + 1, h)
        own = np.where(i >= h, (i - h) % batch.target_group_size + 1, 0)
        if batch.window is not None:
            least = r - batch.window
            if batch.full_rows:
                least = np.where(r >= (h - c + 1 if c else h) - batch.full_rows, 0, least)
            before = np.where(least > 0, least + c - 1, 0) if c else np.maximum(least, 0)
            history = np.maximum(history - before, 0)
            own = np.minimum(own, batch.window + 1) if batch.own_ranks else own
        total += int(np.where(i < c, h, history + own).sum())
    return total
