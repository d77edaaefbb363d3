"""Where the keys and values of histories lie in pages.

The layout is that of FlashInfer, FBGEMM and recsys-examples: a page holds `page_size` tokens of one
user, keys and then values, `[2, page_size, heads, dim]`; `kv_indptr`, `kv_indices` and
`last_page_len` say which pages hold a batch. A layer's pages are rows, `[num_pages * 2 * page_size,
heads, dim]`: the key of slot s, which is page * page_size + offset, is row s + s // page_size *
page_size (`rows_of`), and its value page_size rows on.
"""

from __future__ import annotations

import functools
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import NamedTuple

import torch

from gdpa_kernels.calling.launch import cdiv
from gdpa_kernels.calling.lengths import Lengths, unchecked_lengths
from gdpa_kernels.calling.sequences import Sequences


@dataclass(frozen=True)
class Pages:
    """Where a batch of histories lies, on the cache's device.

    kv_indptr int32 `[batch + 1]`, into kv_indices int32; last_page_len int32 `[batch]`, 1 to
    page_size, and 0 of an empty history; cu_seqlens int32 `[batch + 1]`, tokens; max_seqlen; slots
    int64 `[tokens]`, page * page_size + offset; positions int64 `[tokens]`, of each in its history.

    Fields of pages are of the histories up to these tokens; those of tokens are, from
    `PagedCache.pages`, of all of them, and from `append` of the new ones alone.

    Valid until one of the users is edited, evicted or given another epoch; later use raises
    ValueError. A later append does not invalidate it: these are the histories as they were.
    """

    kv_indptr: torch.Tensor
    kv_indices: torch.Tensor
    last_page_len: torch.Tensor
    cu_seqlens: torch.Tensor
    max_seqlen: int
    slots: torch.Tensor
    positions: torch.Tensor
    parts: tuple[Part, ...] = field(repr=False, compare=False)

    @functools.cached_property
    def is_whole(self) -> bool:
        """Whether the tokens are all of each history, which lacks none that an edit dropped."""
        return all(part.is_whole for part in self.parts)

    @property
    def sequences(self) -> Sequences:
        """The sequences of what `read` copies, for `gdpa`."""
        return Sequences(self.cu_seqlens, self.max_seqlen)

    @functools.cached_property
    def lengths(self) -> Lengths:
        """The same as `Lengths`, which keep work lists for all layers."""
        return unchecked_lengths(Lengths, self.cu_seqlens, len(self.slots), self.max_seqlen)


class Part(NamedTuple):
    """Rows [begin, end) of one user's history; events: its tokens when these `Pages` were made,
    those included whose rows an edit dropped."""

    user: Hashable
    entry: UserHistory
    begin: int
    end: int
    events: int

    @property
    def is_whole(self) -> bool:
        return self.begin == 0 and self.end == self.events


@dataclass(eq=False)
class UserHistory:
    """What a cache holds of a user's history, of which written[layer] <= length <= events.

    epoch: of the history; written: of each layer the rows from the start that hold keys and values,
    raised by `PagedCache.write`; length: the rows that have room in `pages`, raised by `append`;
    after_edit: the events that an edit left, until all of them have room again.
    """

    epoch: Hashable
    written: list[int]
    length: int = 0
    pages: list[int] = field(default_factory=list)
    after_edit: int | None = None

    @property
    def events(self) -> int:
        """Length of the history, dropped rows included."""
        return self.length if self.after_edit is None else self.after_edit


def rows_of(slots: torch.Tensor, page_size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The rows of the keys and of the values in these slots, int64 `[tokens]` each."""
    keys = slots + slots // page_size * page_size
    return keys, keys + page_size


@torch.inference_mode(False)  # gradients may follow an evaluation
def locate(parts: Sequence[Part], page_size: int, device: torch.device) -> Pages:
    """The `Pages` of these rows, of which each user's entry has the pages."""
    counts, begins = [part.end - part.begin for part in parts], [part.begin for part in parts]
    last = [(part.end - 1) % page_size + 1 if part.end else 0 for part in parts]
    pages = [part.entry.pages[: cdiv(part.end, page_size)] for part in parts]
    indptr, indices = _ends([*map(len, pages)]), [page for each in pages for page in each]
    lists = indptr, indices, last, _ends(counts), begins
    # Each at a multiple of 16 bytes: kernels are compiled once for all numbers of pages.
    padded = [[*each, *[0] * (-len(each) % 4)] for each in lists]
    packed = torch.tensor([x for each in padded for x in each], dtype=torch.int32, device="cpu")
    if device.type == "cuda":  # from pinned memory, so that the host does not wait
        packed = packed.pin_memory().to(device, non_blocking=True)
    split = zip(packed.split([*map(len, padded)]), lists, strict=True)
    kv_indptr, kv_indices, last_page_len, ends, starts = (x[: len(y)] for x, y in split)
    # The slots are counted on the device: lists of all tokens would cost more than the model.
    tokens = torch.arange(sum(counts), device=device)
    sequence = torch.searchsorted(ends[1:], tokens, right=True)
    position = tokens - ends[sequence] + starts[sequence]
    page = kv_indices[kv_indptr[sequence] + position // page_size]
    slots = page.long() * page_size + position % page_size
    longest, parts = max(counts, default=0), tuple(parts)
    return Pages(kv_indptr, kv_indices, last_page_len, ends, longest, slots, position, parts)


def check_whole(name: str, pages: Pages) -> None:
    """Raises ValueError unless these are whole histories, by the first that is not."""
    if not isinstance(pages, Pages):
        raise TypeError(f"{name} must be Pages, got {type(pages).__name__}")
    for part in () if pages.is_whole else pages.parts:
        if not part.is_whole:
            raise ValueError(
                f"{name} must be PagedCache.pages of whole histories, got rows {part.begin} up to "
                f"{part.end} of {part.user!r}, who has {part.events}"
            )


def _ends(counts: Sequence[int]) -> list[int]:
    return [0, *accumulate(counts)]
