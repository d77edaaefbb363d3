"""Page tables: where the keys and values of a batch of histories lie in the page pool.

cache.py makes them of its entries; scores.py and layers.py take them. How a page is laid out stands
in gdpa/device/page_layout.py.
"""

from __future__ import annotations

import functools
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, chain
from typing import NamedTuple

import torch

from gdpa_kernels.calling.launch import cdiv
from gdpa_kernels.calling.lengths import Lengths, unchecked_lengths
from gdpa_kernels.calling.sequences import Sequences, token_positions


@dataclass(frozen=True)
class Pages:
    """A page table of a batch of histories, on the cache's device.

    Of the histories up to these tokens: kv_indptr int32 `[batch + 1]`, into kv_indices int32, the
    pages of each; last_page_len int32 `[batch]`, tokens in the last of them, 0 of an empty history.

    Of the tokens, which from `PagedCache.pages` are all of each history, and from `append` the new
    ones alone: cu_seqlens int32 `[batch + 1]`; max_seqlen; slots int64 `[tokens]`, their places in
    the pool; positions int64 `[tokens]`, of each in its history.

    With pages of 4, a history of 6 tokens in the pages 5 and 2 has kv_indices [5, 2], last_page_len
    [2] and slots [20, 21, 22, 23, 8, 9].

    Valid until a history that is not empty is edited, evicted or given another epoch, and refused
    with ValueError from then on, but not for an append: these are the histories as they were.
    """

    kv_indptr: torch.Tensor
    kv_indices: torch.Tensor
    last_page_len: torch.Tensor
    cu_seqlens: torch.Tensor
    max_seqlen: int
    slots: torch.Tensor
    positions: torch.Tensor
    spans: tuple[HistorySpan, ...] = field(repr=False, compare=False)

    @functools.cached_property
    def is_whole(self) -> bool:
        """Whether the tokens are all of each history, which lacks none that an edit dropped."""
        return all(span.is_whole for span in self.spans)

    @property
    def sequences(self) -> Sequences:
        """The sequences of what `read` copies, for `gdpa`."""
        return Sequences(self.cu_seqlens, self.max_seqlen)

    @functools.cached_property
    def lengths(self) -> Lengths:
        """The same as `Lengths`, which keep work lists for all layers."""
        return unchecked_lengths(Lengths, self.cu_seqlens, len(self.slots), self.max_seqlen)


class HistorySpan(NamedTuple):
    """Tokens [begin, end) of one user's history; events: all of it when the page table was made,
    those included whose rows an edit dropped."""

    user: Hashable
    entry: CacheEntry
    begin: int
    end: int
    events: int

    @property
    def is_whole(self) -> bool:
        return self.begin == 0 and self.end == self.events


@dataclass(eq=False)
class CacheEntry:
    """What a cache holds of a user's history, of which written[layer] <= length <= events.

    epoch: of the history; written: of each layer the rows from the start that hold keys and values,
    raised by `PagedCache.write`; length: the tokens that have a slot, raised by `append`; page_ids:
    their pages, the same in each layer; events: all of the history, more than length while the rows
    that an edit dropped are not appended again.

    An edit makes another entry, so that page tables of the former one are refused.
    """

    epoch: Hashable
    written: list[int]
    length: int = 0
    page_ids: list[int] = field(default_factory=list)
    events: int = 0


@torch.inference_mode(False)  # gradients may follow an evaluation
def page_table(spans: Sequence[HistorySpan], page_size: int, device: torch.device) -> Pages:
    """The page table of these spans, whose entries have the pages."""
    begins, lengths = [x.begin for x in spans], [x.end - x.begin for x in spans]
    pages = [x.entry.page_ids[: cdiv(x.end, page_size)] for x in spans]
    last = [(x.end - 1) % page_size + 1 if x.end else 0 for x in spans]
    kv_indptr, kv_indices, last_page_len, cu_seqlens, starts = _on_device(
        [_ends(map(len, pages)), [*chain(*pages)], last, _ends(lengths), begins], device
    )
    # The slots are counted on the device: lists of all tokens would cost more than the model.
    sequence, position = token_positions(sum(lengths), cu_seqlens)
    positions = (position + starts[sequence]).long()
    page = kv_indices[kv_indptr[sequence] + positions // page_size]
    slots = page.long() * page_size + positions % page_size
    return Pages(
        kv_indptr, kv_indices, last_page_len, cu_seqlens, max(lengths, default=0), slots, positions,
        tuple(spans),
    )  # fmt: skip


def check_whole(name: str, pages: Pages) -> None:
    """Raises ValueError unless these are whole histories, by the first that is not."""
    if not isinstance(pages, Pages):
        raise TypeError(f"{name} must be Pages, got {type(pages).__name__}")
    if not pages.is_whole:
        first = next(span for span in pages.spans if not span.is_whole)
        raise ValueError(
            f"{name} must be PagedCache.pages of whole histories, got rows {first.begin} up to "
            f"{first.end} of {first.user!r}, who has {first.events}"
        )


def _ends(counts: Iterable[int]) -> list[int]:
    return [0, *accumulate(counts)]


def _on_device(lists: list[list[int]], device: torch.device) -> list[torch.Tensor]:
    """The lists as int32 tensors of one copy, for which the host does not wait. Each begins at a
    multiple of 16 bytes: kernels are compiled once for all numbers of pages."""
    padded = [[*each, *[0] * (-len(each) % 4)] for each in lists]
    packed = torch.tensor([*chain(*padded)], dtype=torch.int32, device="cpu")
    if device.type == "cuda":
        packed = packed.pin_memory().to(device, non_blocking=True)
    split = packed.split([len(each) for each in padded])
    return [x[: len(each)] for x, each in zip(split, lists, strict=True)]
