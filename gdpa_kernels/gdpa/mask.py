"""`Mask`: the keys that a query sees; causal, sliding windows, contexts and targets (HSTU)."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace

import numpy as np
import torch

from gdpa_kernels.calling import checks

ALIGNMENTS = ("upper_left", "lower_right")
RANKS = ("shared", "own")


@dataclass(frozen=True, eq=False)
class Mask:
    """Which keys a query sees, as one value for operators, layers, serving and parallel calls.

    Args:
        causal: keep keys at or before the query's position. "upper_left": positions start with
            their sequence. "lower_right": they end with it, so that the last query sees every key,
            as new tokens over a cache do. True: where no sequence has fewer queries than keys,
            "upper_left"; where one has, an error, whose check waits for the device: in each call
            that has two tensors of offsets, once for `Lengths`. It is left out where `validate` is.
        window: keep keys at most this many positions from the query, as `causal` counts them.
        num_targets: int32 or int64 `[batch]`: so many last tokens of each sequence are candidates,
            which see the history and the members of their own group up to themselves, and which
            nothing of the history sees. With `causal`; queries are all of their sequence's tokens,
            or with "lower_right" its last ones.
        num_contexts: int32 or int64 `[batch]`, or one integer for all (less where a sequence is
            shorter): so many first tokens see all of the history, and later tokens see them.
        target_group_size: targets of a group, counted from the first.
        full_rows: the last tokens of the history that `window` does not limit, nor the targets;
            min_full_attn_seq_len of generative-recommenders.
        target_ranks: how a window and a `RelativeBias` of positions count targets. "shared": all
            stand right after the history, as in generative-recommenders, so that a candidate's row
            does not depend on the others. "own": at their positions, as in recsys-examples and
            FBGEMM. To a window contexts stand right before the history in both.

    A layer has a mask without num_targets and num_contexts, which come with each batch.

    Attributes: has_segments, whether sequences are made of contexts, a history and targets; plain,
    whether causal and window say all.

    Raises:
        TypeError, ValueError: an argument is wrong: its name, what is expected, what was received.
    """

    causal: bool | str = False
    window: int | None = None
    num_targets: torch.Tensor | None = None
    num_contexts: torch.Tensor | int | None = None
    target_group_size: int = 1
    full_rows: int = 0
    target_ranks: str = "shared"
    has_segments: bool = field(init=False)
    plain: bool = field(init=False)

    def __post_init__(self) -> None:
        choices = "a bool, 'upper_left' or 'lower_right'"
        if not isinstance(self.causal, bool | str):
            raise TypeError(f"causal must be {choices}, got {self.causal!r}")
        if isinstance(self.causal, str) and self.causal not in ALIGNMENTS:
            raise ValueError(f"causal must be {choices}, got {self.causal!r}")
        counted = self.num_targets is not None or self.num_contexts is not None
        segments = counted or self.full_rows != 0
        plain = not segments and self.grouping == (1, "shared")
        object.__setattr__(self, "has_segments", segments)
        object.__setattr__(self, "plain", plain)
        if not plain:
            self._check_segments()
        if self.window is not None:
            window = checks.check_count("window", self.window, optional=True)
            object.__setattr__(self, "window", checks.clamped_to_int32(window))

    def _check_segments(self) -> None:
        for name, least in (("target_group_size", 1), ("full_rows", 0)):
            value = checks.clamped_to_int32(checks.check_count(name, getattr(self, name), least))
            object.__setattr__(self, name, value)
        checks.check_choice("target_ranks", self.target_ranks, RANKS)
        if self.full_rows and (self.window is None or self.target_ranks == "own"):
            raise ValueError(
                "full_rows must be 0 without a window and with target_ranks='own', "
                f"got {self.full_rows} with window={self.window!r} and "
                f"target_ranks={self.target_ranks!r}"
            )
        if not self.causal:
            raise ValueError(
                "causal must be True, 'upper_left' or 'lower_right' with num_targets, "
                "target_group_size, target_ranks, num_contexts or full_rows, got "
                f"{self.causal!r}"
            )

    @property
    def grouping(self) -> tuple[int, str]:
        """The options of targets."""
        return self.target_group_size, self.target_ranks

    def of_batch(self, num_targets: object, num_contexts: object) -> Mask:
        """A layer's mask with the targets and contexts of a batch."""
        if num_targets is num_contexts is None and self.grouping == (1, "shared"):
            return self
        counts = {"num_targets": num_targets, "num_contexts": num_contexts}
        if num_targets is None:
            counts |= {"target_group_size": 1, "target_ranks": "shared"}
        return replace(self, **counts)

    def rule(self, lower_right: bool) -> str:
        """All but the counts, as an operator of PyTorch takes it and `of_rule` reads it."""
        if self is ALL:
            return ""
        # An int, since torch.compile of PyTorch 2.11 takes no bool as an index.
        causal = "" if not self.causal else ALIGNMENTS[int(lower_right)]
        if self.plain:
            return causal if self.window is None else f"{causal} window={self.window}"
        names = "window", "target_group_size", "full_rows", "target_ranks"
        return " ".join([causal, *(f"{name}={getattr(self, name)}" for name in names)])

    def segments(
        self, cu_seqlens_q: torch.Tensor | None, cu_seqlens_k: torch.Tensor, lower_right: bool,
        validate: bool,
    ) -> torch.Tensor | None:  # fmt: skip
        """The targets and contexts of each sequence, int32 `[sequences, 2]`; None without any.

        Raises TypeError or ValueError unless the counts fit the sequences, and the queries end with
        their sequence. Checking values waits for the device, where `validate` is.
        """
        if self.num_targets is None and self.grouping != (1, "shared"):
            raise ValueError(
                "target_group_size and target_ranks must be 1 and 'shared' without num_targets, "
                f"got {self.target_group_size} and {self.target_ranks!r}"
            )
        if not self.has_segments:
            return None
        if cu_seqlens_q is None:
            raise ValueError(
                "cu_seqlens_q must be given with num_targets, num_contexts or full_rows"
            )
        lengths, contexts = cu_seqlens_k.diff(), self.num_contexts
        targets = lengths.new_zeros(lengths.shape)
        if self.num_targets is not None:
            targets = _counts("num_targets", self.num_targets, lengths)
        if contexts is None:
            contexts = lengths.new_zeros(lengths.shape)
        elif isinstance(contexts, torch.Tensor):
            contexts = _counts("num_contexts", contexts, lengths)
        else:
            checks.check_count("num_contexts", contexts)
            contexts = (lengths - targets).clamp(max=checks.clamped_to_int32(contexts))
        segments = torch.stack((targets, contexts), dim=1)
        if validate and checks.is_readable(cu_seqlens_k):
            check_counts(segments, cu_seqlens_q, cu_seqlens_k, lower_right)
        return segments

    def __repr__(self) -> str:
        changed = [
            f"{x.name}={getattr(self, x.name)!r}"
            for x in fields(self)
            if x.init and getattr(self, x.name) is not x.default
        ]
        return f"Mask({', '.join(changed)})"


ALL = Mask()
"""Every query sees every key."""
FIELDS = frozenset(x.name for x in fields(Mask) if x.init)


def mask_of(mask: object, keywords: Mapping[str, object]) -> Mask:
    """`mask`, or the one whose fields are given as keywords, as before version 0.2.

    Raises TypeError unless it is a Mask, or the keywords are fields of one beside no other mask.
    """
    if not isinstance(mask, Mask):
        raise TypeError(f"mask must be a Mask, got {mask!r}")
    if not keywords:
        return mask
    unknown = keywords.keys() - FIELDS
    if unknown or mask is not ALL:
        names = ", ".join(sorted(unknown or keywords))
        expected = f"be fields of Mask ({', '.join(sorted(FIELDS))})" if unknown else "be left out"
        raise TypeError(f"keywords must {expected}{'' if unknown else ' beside mask'}, got {names}")
    return Mask(**keywords)


@functools.lru_cache(maxsize=256)
def of_rule(rule: str) -> Mask:
    """The mask of a call, without its counts, from `Mask.rule`."""
    causal, *options = rule.split(" ")
    values = dict(option.split("=") for option in options)
    ranks = values.pop("target_ranks", "shared")
    window = values.pop("window", "None")
    numbers = {name: int(value) for name, value in values.items()}
    window = None if window == "None" else int(window)
    return Mask(causal or False, window, target_ranks=ranks, **numbers)


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
    i: torch.Tensor, j: torch.Tensor, targets: int, contexts: int, length: int, mask: Mask
) -> torch.Tensor:
    """The pairs of positions i and j, of shapes that broadcast, that count in a sequence of so many
    tokens."""
    history = length - targets
    by_position = mask.target_ranks == "own"

    def rank(position: torch.Tensor) -> torch.Tensor:
        position = position if by_position else position.clamp(max=history)
        return (position - contexts + 1).clamp(min=0) if contexts else position

    group = mask.target_group_size
    same = (i - history).div(group, rounding_mode="floor") == (j - history).div(
        group, rounding_mode="floor"
    )
    keep = (j <= i) & ((j < history) | same)
    if mask.window is not None:
        near = rank(i) - rank(j) <= mask.window
        if mask.full_rows:
            top = torch.tensor(history)
            near |= rank(i) >= (top - contexts + 1 if contexts else top) - mask.full_rows
        keep &= near
    return keep | ((i < contexts) & (j < history))


def segment_pairs(rows: np.ndarray, keys: np.ndarray, segments: list, mask: Mask) -> int:
    """The pairs that count in sequences of `rows` queries and `keys` keys, of one head."""
    total, by_position = 0, mask.target_ranks == "own"
    for n, length, (m, c) in zip(rows, keys, segments, strict=True):
        i, h = np.arange(length - n, length), length - m
        r = i if by_position else np.minimum(i, h)
        r = np.maximum(r - c + 1, 0) if c else r
        history = np.minimum(i + 1, h)
        group = np.where(i >= h, (i - h) % mask.target_group_size + 1, 0)
        if mask.window is not None:
            least = r - mask.window
            if mask.full_rows:
                least = np.where(r >= (h - c + 1 if c else h) - mask.full_rows, 0, least)
            hidden = np.where(least > 0, least + c - 1, 0) if c else np.maximum(least, 0)
            history = np.maximum(history - hidden, 0)
            group = np.minimum(group, mask.window + 1) if by_position else group
        total += int(np.where(i < c, h, history + group).sum())
    return total
