"""`PagedCache`: a paged KV cache of the histories of many users, for every layer of a model.

Applications append and look up; layers.py and scores.py write and read. What a cache holds of a
user is a `CacheEntry` (pages.py); `HistoryRules` (validity.py) say what stays right in a change.

With one layer, pages of 4 and rules by which the rows before an edit stay right:

    call                      length   written   events   page_ids
    append 5                       5         0        5   0 1
    write                          5         5        5   0 1
    edit at 3, one added           3         3        6   0
    append 3                       6         3        6   0 1
    write                          6         6        6   0 1

Every method leaves these true, at whatever line it fails or is interrupted:

- written[layer] <= length <= events of each entry, and rows up to written[layer] hold what was
  written last;
- a page is of one entry or free. An append that failed may have left its users pages behind their
  length, which their next append frees;
- entries are in the order of their use, the least recently used first.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Sequence

import torch

from gdpa_kernels.calling import checks
from gdpa_kernels.calling.launch import cdiv
from gdpa_kernels.gdpa.batch import PagedKV
from gdpa_kernels.gdpa.bias import check_times
from gdpa_kernels.gdpa.device.page_layout import key_and_value_rows
from gdpa_kernels.serving import common
from gdpa_kernels.serving.arguments import check_key, check_list, check_users, renamed
from gdpa_kernels.serving.exclusive import Exclusive, exclusively
from gdpa_kernels.serving.pages import CacheEntry, HistorySpan, Pages, check_whole, page_table
from gdpa_kernels.serving.validity import HistoryRules


class PagedCache:
    """Keys and values of the histories of many users, for every layer of a model.

    A history is of an epoch, any value that changes whenever its past does (its version or its
    hash): what is cached of another epoch is never found.

    Threads may share it, each on a stream of its own: an answer is that of the calls one after
    another, or the pages are refused that another thread's call gave away. Who asks for a `length`
    and appends behind it says so by `begins`, or is in `exclusive` for both. Replays of CUDA graphs
    are not ordered, and what the capture of one writes counts as written.

    Args:
        rules: what the model's layers do: decides which changes keep which rows.
        num_pages, page_size: pages of each layer, and tokens of a page; `score` may read pages of a
            multiple of 64 in place.
        num_kv_heads, head_dim, dtype, device: of keys and values.
        with_times: keep the time of each token, int64, once for all layers, for layers with a
            time_bias: 8 bytes a token.

    Attributes: data, the page pool `[num_layers, num_pages, 2, page_size, num_kv_heads, head_dim]`;
    times, `[num_pages * page_size]`, by slot, or None; exclusive, a context in which no other
    thread uses the cache.

    Raises:
        TypeError, ValueError: an argument is wrong: its name, what is expected, what was received.
    """

    def __init__(
        self,
        rules: HistoryRules,
        num_pages: int,
        page_size: int,
        num_kv_heads: int,
        head_dim: int,
        *,
        dtype: torch.dtype = torch.bfloat16,
        device: torch.device | str | None = None,
        with_times: bool = False,
    ):
        if not isinstance(rules, HistoryRules):
            raise TypeError(f"rules must be HistoryRules, got {type(rules).__name__}")
        names = "num_pages", "page_size", "num_kv_heads", "head_dim"
        sizes = zip(names, (num_pages, page_size, num_kv_heads, head_dim), strict=True)
        num_pages, page_size, *row = (
            checks.check_count(name, size, least=1) for name, size in sizes
        )
        checks.check_bool(with_times=with_times)
        self.rules, self.page_size, self.times = rules, page_size, None
        shape = (rules.num_layers, num_pages, 2, page_size, *row)
        with torch.inference_mode(False):  # gradients may follow an evaluation
            self.data = torch.zeros(shape, dtype=dtype, device=device)
            if with_times:
                slots = num_pages * page_size
                self.times = torch.zeros(slots, dtype=torch.int64, device=self.data.device)
        self.exclusive = Exclusive(self.data.device)
        self._free = list(range(num_pages))[::-1]
        self._entries: OrderedDict[Hashable, CacheEntry] = OrderedDict()
        with self.exclusive:
            pass  # other streams wait until the memory is zero

    @exclusively
    def length(self, user: Hashable, epoch: Hashable = 0) -> int:
        """Tokens that are cached of this user's history: 0 if none are, or of another epoch."""
        return self._find(check_key("user", user), check_key("epoch", epoch)).length

    @exclusively
    def append(
        self,
        users: Sequence[Hashable],
        counts: Sequence[int],
        epochs: Sequence[Hashable] | None = None,
        *,
        begins: Sequence[int] | None = None,
        timestamps: torch.Tensor | None = None,
    ) -> Pages:
        """Make room for counts[i] more tokens of users[i], and say where it is. `write` fills it,
        layer by layer; if that fails, `evict` these users, whose unwritten rows are refused.

        A history of another epoch is dropped first. If pages are short, users outside of this batch
        are evicted, the least recently used first.

        Args:
            begins: the positions of the first new tokens, for who has them from an earlier
                `length`; None for where each history ends (0 for an evicted user).
            timestamps: int32 or int64 `[sum(counts)]` on the cache's device, the times of the new
                tokens, user by user; given where the cache has times.

        Raises:
            TypeError, ValueError: an argument is wrong, or a history does not end at its begins; or
                cached rows do not stay right when others follow (`HistoryRules.check_append`),
                unless the history had no events, or the new ones are all that an edit dropped.
            MemoryError: the batch alone needs more pages than there are. Nothing has changed.
        """
        users, epochs = check_users(users, epochs)
        counts = [checks.check_count("counts", x) for x in check_list("counts", counts, len(users))]
        self._check_timestamps(timestamps, sum(counts))
        entries = [self._find(*each) for each in zip(users, epochs, strict=True)]
        if begins is not None:
            _check_begins(users, entries, check_list("begins", begins, len(users)))
        for entry, count in zip(entries, counts, strict=True):
            # Right whatever the model: the first events, or exactly those that an edit dropped.
            if count and entry.events not in (0, entry.length + count):
                self.rules.check_append()
        ends = [entry.length + count for entry, count in zip(entries, counts, strict=True)]
        self._reserve(users, entries, [cdiv(end, self.page_size) for end in ends])
        spans = [
            HistorySpan(user, entry, entry.length, end, max(end, entry.events))
            for user, entry, end in zip(users, entries, ends, strict=True)
        ]
        table = page_table(spans, self.page_size, self.data.device)
        if timestamps is not None:
            self.times.index_copy_(0, table.slots, timestamps.long())
        for span in spans:  # at last: where anything above fails, no history has grown
            span.entry.length, span.entry.events = span.end, span.events
        return table

    @renamed("at", "pages")
    @exclusively
    @torch.no_grad()
    def write(self, layer: int, pages: Pages, k: torch.Tensor, v: torch.Tensor) -> None:
        """Store k and v `[tokens, num_kv_heads, head_dim]` of a layer in the slots of `append`,
        without gradients. Rows of an earlier append must have been written before."""
        layer = self._check_pages(layer, pages)
        self._check_rows(k, v, len(pages.slots))
        for span in pages.spans:
            if span.entry.written[layer] < span.begin:
                raise _not_written("follow rows that are written", layer, span)
        spans = [span for span in pages.spans if span.end > span.begin]
        previous = [span.entry.written[layer] for span in spans]
        # A copy that fails may leave anything in its rows. So they count as not written while they
        # are copied: of 8 written rows, of which 3 to 5 are written again, first 3 and then 8.
        for span in spans:
            span.entry.written[layer] = span.begin
        for rows, x in zip(key_and_value_rows(pages.slots, self.page_size), (k, v), strict=True):
            self._rows(layer).index_copy_(0, rows, x)
        for span, written in zip(spans, previous, strict=True):
            span.entry.written[layer] = max(written, span.end)

    @exclusively
    def pages(
        self,
        users: Sequence[Hashable],
        epochs: Sequence[Hashable] | None = None,
        *,
        missing: str = "raise",
    ) -> Pages:
        """The page table of these users' histories. Of a user of whom nothing is cached, or nothing
        of the epoch, `missing` raises LookupError, or gives an "empty" history."""
        users, epochs = check_users(users, epochs)
        checks.check_choice("missing", missing, ("raise", "empty"))
        pairs = [(user, self._find(user, epoch)) for user, epoch in zip(users, epochs, strict=True)]
        absent = [user for user, entry in pairs if self._entries.get(user) is not entry]
        if absent and missing == "raise":
            raise LookupError(
                "users must have a history of their epoch in the cache, or missing be 'empty', got "
                f"none of {absent}"
            )
        for user in users:
            if user not in absent:
                self._entries.move_to_end(user)
        spans = [HistorySpan(user, entry, 0, entry.length, entry.events) for user, entry in pairs]
        return page_table(spans, self.page_size, self.data.device)

    @renamed("at", "pages")
    @exclusively
    def read(self, layer: int, pages: Pages) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values `[tokens, num_kv_heads, head_dim]` of a layer, copied out of the pages in
        order; `pages.cu_seqlens` are their offsets."""
        layer = self._check_written(layer, pages)
        rows = key_and_value_rows(pages.slots, self.page_size)
        k, v = (self._rows(layer).index_select(0, x) for x in rows)
        return k, v

    @exclusively
    def read_times(self, pages: Pages) -> torch.Tensor | None:
        """The times of the tokens, int64 `[tokens]`, copied in order; None for a cache without."""
        self._check_pages(0, pages)
        return None if self.times is None else self.times.index_select(0, pages.slots)

    @renamed("at", "pages")
    @exclusively
    def read_before(
        self, layer: int, pages: Pages, k: torch.Tensor, v: torch.Tensor, cu_seqlens: torch.Tensor,
        max_seqlen: int,
    ) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
        """`read`, with each user's rows of k and v behind its history; the offsets are
        `pages.cu_seqlens + cu_seqlens`. A GPU copies each row once; with gradients, and elsewhere,
        PyTorch does.

        k, v: `[tokens, num_kv_heads, head_dim]`, of the same users in the same order, with offsets
        cu_seqlens `[batch + 1]`, int32, and max_seqlen, whose values are not checked.
        """
        layer = self._check_candidates(layer, pages, k, v, cu_seqlens)
        if common.can_launch(k, v):
            from gdpa_kernels.serving import joined  # only here Triton is needed

            cached = self.data[layer], pages.slots, pages.cu_seqlens, pages.max_seqlen
            return joined.join(*cached, k, v, cu_seqlens, max_seqlen)
        pairs = zip(self.read(layer, pages), (k, v), strict=True)
        k, v = (common.join_copies(*pair, pages.cu_seqlens, cu_seqlens) for pair in pairs)
        return k, v

    def paged_kv(
        self, layer: int, pages: Pages, k: torch.Tensor, v: torch.Tensor, cu_seqlens: torch.Tensor
    ) -> PagedKV:
        """What `read_before` copies of whole histories, for a kernel that reads it in the pages,
        and is launched inside of `exclusive`."""
        self._check_candidates(layer, pages, k, v, cu_seqlens)
        check_whole("pages", pages)
        table = pages.kv_indptr, pages.kv_indices, pages.cu_seqlens
        return PagedKV(self._rows(layer), *table, self.page_size, len(pages.slots))

    @renamed("at", "position")
    @exclusively
    def edit(
        self, user: Hashable, position: int, epoch: Hashable, was: Hashable = 0, *, added: bool
    ) -> int:
        """Turn a history of epoch `was` into that of `epoch`, in which an event was added at
        `position`, or the one there deleted. Of its rows those from the start are kept that are
        written and stay right (`HistoryRules.kept`), the others dropped; without a history of epoch
        `was` the user is evicted.

        Returns how many rows are kept. The caller computes the following ones again: an append of
        all of them at once is refused for no model. Until they are there the history is not whole.
        """
        position, user = checks.check_count("position", position), check_key("user", user)
        checks.check_bool(added=added)
        if check_key("epoch", epoch) == check_key("was", was):
            raise ValueError(f"epoch must differ from that before the edit, got {epoch!r} for both")
        entry = self._find(user, was)
        if self._entries.get(user) is not entry:
            self.evict(user)
            return 0
        events = entry.events + (1 if added else -1)
        others = min(events, entry.events)  # events that are there before and after
        if position > others:
            raise ValueError(
                f"position must be at most {others} in a history of {entry.events} events where "
                f"one is {'added' if added else 'deleted'}, got {position}"
            )
        # Rows behind the position may be right, but would have to move to other slots.
        rows = min(position, *entry.written, self.rules.kept(others, position))
        count, written = cdiv(rows, self.page_size), [rows] * self.rules.num_layers
        shorter = CacheEntry(epoch, written, rows, entry.page_ids[:count], events)
        free = self._free + entry.page_ids[count:]
        self._entries[user], self._free = shorter, free  # together, so that no page is of both
        return rows

    @exclusively
    def evict(self, user: Hashable) -> None:
        """Forget a user's history; one that is not cached is no error."""
        if check_key("user", user) in self._entries:
            self._free += self._entries.pop(user).page_ids

    def _reserve(self, users: list[Hashable], entries: list[CacheEntry], needed: list[int]) -> None:
        """Hold these entries for their users, with so many pages each. Raises MemoryError, before
        anything has changed, if there are not so many."""
        num_pages = self.data.shape[1]
        if sum(needed) > num_pages:
            raise MemoryError(
                f"the batch must fit {num_pages} pages of {self.page_size} tokens, got "
                f"histories that need {sum(needed)}"
            )
        for user, entry in zip(users, entries, strict=True):
            if self._entries.get(user) is not entry:
                self.evict(user)
                self._entries[user] = entry
            self._entries.move_to_end(user)
            count = cdiv(entry.length, self.page_size)
            if len(entry.page_ids) > count:  # of an append that failed
                surplus = entry.page_ids[count:]
                entry.page_ids, self._free = entry.page_ids[:count], self._free + surplus
        # All of this batch come last now, so the first entry is another's: theirs hold no more than
        # they need, and all that they need fits. An empty history has no page to give.
        for entry, count in zip(entries, needed, strict=True):
            while len(entry.page_ids) < count:
                while not self._free:
                    self.evict(next(iter(self._entries)))
                entry.page_ids.append(self._free.pop())

    def _find(self, user: Hashable, epoch: Hashable) -> CacheEntry:
        """What is cached of this user's history of this epoch; if nothing is, an empty entry, which
        the cache does not hold."""
        entry = self._entries.get(user)
        if entry is not None and entry.epoch == epoch:
            return entry
        return CacheEntry(epoch, [0] * self.rules.num_layers)

    def _check_timestamps(self, timestamps: object, count: int) -> None:
        """Raises TypeError or ValueError unless the cache has times and these are `count` of them,
        or neither."""
        if self.times is None:
            if timestamps is not None:
                raise ValueError("timestamps must be None without with_times, got a value")
            return
        check_times("timestamps", timestamps, "with_times")
        if timestamps.shape != (count,) or timestamps.device != self.times.device:
            raise ValueError(
                f"timestamps must have shape [{count}] on {self.times.device}, got "
                f"{list(timestamps.shape)} on {timestamps.device}"
            )

    def _rows(self, layer: int) -> torch.Tensor:
        """A layer of the pool in the rows of gdpa/device/page_layout.py."""
        return self.data[layer].flatten(0, 2)

    def _check_pages(self, layer: int, pages: Pages) -> int:
        """`layer` as an int. Raises TypeError or ValueError unless there is such a layer, and the
        users still have these pages."""
        if not isinstance(pages, Pages):
            raise TypeError(f"pages must be Pages, got {type(pages).__name__}")
        layer, num_layers = checks.check_count("layer", layer), self.rules.num_layers
        if layer >= num_layers:
            raise ValueError(f"layer must be below num_layers, {num_layers}, got {layer}")
        for span in pages.spans:
            if span.end and self._entries.get(span.user) is not span.entry:
                raise ValueError(
                    f"pages must be pages that their users still have, got those of {span.user!r} "
                    "before an edit or an eviction"
                )
        return layer

    def _check_written(self, layer: int, pages: Pages) -> int:
        """`_check_pages`; raises ValueError unless the rows are written in that layer, too."""
        layer = self._check_pages(layer, pages)
        for span in pages.spans:
            if span.begin < span.end and span.entry.written[layer] < span.end:
                raise _not_written("be rows that are written", layer, span)
        return layer

    def _check_candidates(
        self, layer: int, pages: Pages, k: torch.Tensor, v: torch.Tensor, cu_seqlens: torch.Tensor
    ) -> int:
        """`_check_written`, and of keys and values that follow these histories."""
        layer = self._check_written(layer, pages)
        self._check_rows(k, v, len(k))
        if cu_seqlens.shape != pages.cu_seqlens.shape:
            raise ValueError(
                f"cu_seqlens must have shape {list(pages.cu_seqlens.shape)}, as the histories, got "
                f"{list(cu_seqlens.shape)}"
            )
        return layer

    def _check_rows(self, k: torch.Tensor, v: torch.Tensor, count: int) -> None:
        """Raises TypeError or ValueError unless these are `count` rows as the cache holds them."""
        shape = (count, *self.data.shape[-2:])
        for name, x in (("k", k), ("v", v)):
            if not isinstance(x, torch.Tensor):
                raise TypeError(f"{name} must be a tensor, got {type(x).__name__}")
            received = x.shape, x.dtype, x.device
            if received != (shape, self.data.dtype, self.data.device):
                raise ValueError(
                    f"{name} must be {list(shape)} in {self.data.dtype} on {self.data.device}, got "
                    f"{list(x.shape)} in {x.dtype} on {x.device}"
                )


def _check_begins(users: list[Hashable], entries: list[CacheEntry], begins: list) -> None:
    """Raises TypeError or ValueError unless each history ends where its new tokens begin."""
    for user, entry, begin in zip(users, entries, begins, strict=True):
        if checks.check_count("begins", begin) != entry.length:
            raise ValueError(
                f"begins must be where the histories end, {entry.length} of {user!r}, got {begin}"
            )


def _not_written(must: str, layer: int, span: HistorySpan) -> ValueError:
    """The error for rows of a layer that were not written, or not those before them."""
    return ValueError(
        f"pages must {must}, got rows {span.begin} up to {span.end} of {span.user!r}, of whom "
        f"layer {layer} has {span.entry.written[layer]}: write the others first, or evict the user"
    )
