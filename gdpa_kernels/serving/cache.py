"""Keys and values of users' histories, kept in pages.

A user's pages belong to an epoch, any value that changes whenever the past of the history does (its
version or its hash): pages of another epoch are never found. An event of a history is a token of
its sequence and a row of its keys and values.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Sequence

import torch

from gdpa_kernels.calling import checks
from gdpa_kernels.calling.launch import cdiv
from gdpa_kernels.calling.sequences import token_positions
from gdpa_kernels.gdpa.batch import History
from gdpa_kernels.serving import common, joined
from gdpa_kernels.serving.arguments import key, listed, renamed, users_and_epochs
from gdpa_kernels.serving.exclusive import Exclusive, exclusively
from gdpa_kernels.serving.pages import Pages, Part, UserHistory, check_whole, locate, rows_of
from gdpa_kernels.serving.validity import Model


class PagedCache:
    """Keys and values of the histories of many users, for every layer of a model.

    Threads may share it, each on a stream of its own: an answer is that of the calls one after
    another, or the pages are refused that another thread's call gave away. Who asks for a `length`
    and appends behind it says so by `begins`, or is in `exclusive` for both. Replays of CUDA graphs
    are not ordered, and what the capture of one writes counts as written.

    Args:
        model: what its layers do (`validity.Model`): decides which changes keep which rows.
        num_pages, page_size: pages of each layer, and tokens of a page; `score` may read pages of a
            multiple of 64 in place.
        num_kv_heads, head_dim, dtype, device: of keys and values.

    Attributes: data `[num_layers, num_pages, 2, page_size, num_kv_heads, head_dim]`; exclusive, a
    context in which no other thread uses the cache.

    Raises:
        TypeError, ValueError: an argument is wrong: its name, what is expected, what was received.
    """

    def __init__(
        self,
        model: Model,
        num_pages: int,
        page_size: int,
        num_kv_heads: int,
        head_dim: int,
        *,
        dtype: torch.dtype = torch.bfloat16,
        device: torch.device | str | None = None,
    ):
        if not isinstance(model, Model):
            raise TypeError(f"model must be a validity.Model, got {type(model).__name__}")
        names = "num_pages", "page_size", "num_kv_heads", "head_dim"
        sizes = zip(names, (num_pages, page_size, num_kv_heads, head_dim), strict=True)
        num_pages, page_size, *row = (
            checks.check_count(name, size, least=1) for name, size in sizes
        )
        self.model, self.page_size = model, page_size
        shape = (model.num_layers, num_pages, 2, page_size, *row)
        with torch.inference_mode(False):  # gradients may follow an evaluation
            self.data = torch.zeros(shape, dtype=dtype, device=device)
        self.exclusive = Exclusive(self.data.device)
        self._free = list(range(num_pages))[::-1]
        self._users: OrderedDict[Hashable, UserHistory] = OrderedDict()  # least recently used first
        with self.exclusive:
            pass  # other streams wait until the memory is zero

    @exclusively
    def length(self, user: Hashable, epoch: Hashable = 0) -> int:
        """Tokens that are kept of this user's history: 0 if none are, or of another epoch."""
        entry = self._find(key("user", user), key("epoch", epoch))
        return 0 if entry is None else entry.length

    @exclusively
    def append(
        self,
        users: Sequence[Hashable],
        counts: Sequence[int],
        epochs: Sequence[Hashable] | None = None,
        *,
        begins: Sequence[int] | None = None,
    ) -> Pages:
        """Make room for counts[i] more tokens of users[i], and say where it is. `write` fills it,
        layer by layer; if that fails, `evict` these users, whose unwritten rows are refused.

        A history of another epoch is dropped first. If pages are short, users outside of this batch
        are evicted, the least recently used first.

        Args:
            begins: the positions of the first new tokens, for who has them from an earlier
                `length`; None for where each history ends.

        Raises:
            TypeError, ValueError: an argument is wrong, or a history does not end at its begins; or
                the model does not keep rows right when others are appended (`Model.check_append`),
                unless the history had no events, or the new ones are all that an edit dropped.
            MemoryError: the batch alone needs more pages than there are. Nothing has changed.
        """
        users, epochs = users_and_epochs(users, epochs)
        counts = [
            checks.check_count("counts", count) for count in listed("counts", counts, len(users))
        ]
        entries = [self._find(*each) for each in zip(users, epochs, strict=True)]
        lengths = [0 if entry is None else entry.length for entry in entries]
        if begins is not None:
            for user, begin, length in zip(
                users, listed("begins", begins, len(users)), lengths, strict=True
            ):
                if checks.check_count("begins", begin) != length:
                    raise ValueError(
                        f"begins must be where the histories end, {length} of {user!r}, got {begin}"
                    )
        for entry, length, count in zip(entries, lengths, counts, strict=True):
            # Right without a check: the first rows, or exactly those that an edit dropped.
            after_edit = None if entry is None else entry.after_edit
            if count and (length or after_edit) and length + count != after_edit:
                self.model.check_append()
        pages = [cdiv(x + n, self.page_size) for x, n in zip(lengths, counts, strict=True)]
        if sum(pages) > self.data.shape[1]:
            raise MemoryError(
                f"the batch must fit {self.data.shape[1]} pages of {self.page_size} tokens, got "
                f"histories that need {sum(pages)}"
            )
        for user, epoch in zip(users, epochs, strict=True):
            if user in self._users and self._users[user].epoch != epoch:
                self.evict(user)
            self._users.setdefault(user, self._empty(epoch))
            self._users.move_to_end(user)
        for user, length in zip(users, lengths, strict=True):
            self._free_pages(self._users[user], length)  # of a call that was interrupted
        for user, needed in zip(users, pages, strict=True):
            entry = self._users[user]
            while len(entry.pages) < needed:
                while not self._free:  # an empty history has no page to give
                    self.evict(next(iter(self._users)))  # none of this batch: those come last
                entry.pages.append(self._free.pop())
        parts = []
        for user, length, count in zip(users, lengths, counts, strict=True):
            entry, end = self._users[user], length + count
            parts.append(Part(user, entry, length, end, max(end, entry.after_edit or 0)))
        placed = locate(parts, self.page_size, self.data.device)
        for part in parts:  # nothing has changed where making these failed
            part.entry.length = part.end
            if part.events == part.end:
                part.entry.after_edit = None
        return placed

    @renamed("at", "pages")
    @exclusively
    @torch.no_grad()
    def write(self, layer: int, pages: Pages, k: torch.Tensor, v: torch.Tensor) -> None:
        """Store k and v `[tokens, num_kv_heads, head_dim]` of a layer in the slots of `append`,
        without gradients. Rows of an earlier append must have been written before."""
        layer = self._checked_layer(layer, pages)
        self._check_rows(k, v, len(pages.slots))
        for user, entry, begin, end, _ in pages.parts:
            if entry.written[layer] < begin:
                raise ValueError(
                    f"pages must follow rows that are written, got rows {begin} up to {end} of "
                    f"{user!r}, of whom layer {layer} has {entry.written[layer]}: write the "
                    "others first, or evict the user"
                )
        parts = [part for part in pages.parts if part.end > part.begin]
        previous = [part.entry.written[layer] for part in parts]
        for part in parts:  # until both copies are made
            part.entry.written[layer] = part.begin
        for slots, x in zip(rows_of(pages.slots, self.page_size), (k, v), strict=True):
            self.data[layer].view(-1, *self.data.shape[-2:]).index_copy_(0, slots, x)
        for part, most in zip(parts, previous, strict=True):
            part.entry.written[layer] = max(most, part.end)

    @exclusively
    def pages(
        self,
        users: Sequence[Hashable],
        epochs: Sequence[Hashable] | None = None,
        *,
        missing: str = "raise",
    ) -> Pages:
        """Locate these users' histories. Of a user of whom nothing is kept, or nothing of the
        epoch, `missing` raises LookupError, or gives an "empty" history."""
        users, epochs = users_and_epochs(users, epochs)
        checks.check_choice("missing", missing, ("raise", "empty"))
        entries = [self._find(*each) for each in zip(users, epochs, strict=True)]
        absent = [user for user, entry in zip(users, entries, strict=True) if entry is None]
        if absent and missing == "raise":
            raise LookupError(
                "users must have a history of their epoch in the cache, or missing be 'empty', got "
                f"none of {absent}"
            )
        for user, entry in zip(users, entries, strict=True):
            if entry is not None:
                self._users.move_to_end(user)
        parts = []
        for user, epoch, entry in zip(users, epochs, entries, strict=True):
            entry = self._empty(epoch) if entry is None else entry
            parts.append(Part(user, entry, 0, entry.length, entry.events))
        return locate(parts, self.page_size, self.data.device)

    @renamed("at", "pages")
    @exclusively
    def read(self, layer: int, pages: Pages) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values `[tokens, num_kv_heads, head_dim]` of a layer, copied out of the pages in
        order; `pages.cu_seqlens` are their offsets."""
        layer = self._checked_reading(layer, pages)
        flat = self.data[layer].view(-1, *self.data.shape[-2:])
        k, v = (flat.index_select(0, slots) for slots in rows_of(pages.slots, self.page_size))
        return k, v

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
        layer = self._checked_before(layer, pages, k, v, cu_seqlens)
        if common.can_launch(k, v):
            old = self.data[layer], pages.slots, pages.cu_seqlens, pages.max_seqlen
            return joined.join(*old, k, v, cu_seqlens, max_seqlen)
        pairs = zip(self.read(layer, pages), (k, v), strict=True)
        k, v = (_joined(*pair, pages.cu_seqlens, cu_seqlens) for pair in pairs)
        return k, v

    def history(
        self, layer: int, pages: Pages, k: torch.Tensor, v: torch.Tensor, cu_seqlens: torch.Tensor
    ) -> History:
        """A view of what `read_before` copies of whole histories, for a kernel that reads it in the
        pages, and is launched inside of `exclusive`."""
        layer = self._checked_before(layer, pages, k, v, cu_seqlens)
        check_whole("pages", pages)
        rows, indptr, indices = self.data[layer].flatten(0, 2), pages.kv_indptr, pages.kv_indices
        return History(rows, indptr, indices, pages.cu_seqlens, self.page_size, len(pages.slots))

    def _checked_before(
        self, layer: int, pages: Pages, k: torch.Tensor, v: torch.Tensor, cu_seqlens: torch.Tensor
    ) -> int:
        layer = self._checked_reading(layer, pages)
        self._check_rows(k, v, len(k))
        if cu_seqlens.shape != pages.cu_seqlens.shape:
            raise ValueError(
                f"cu_seqlens must have shape {list(pages.cu_seqlens.shape)}, as the histories, got "
                f"{list(cu_seqlens.shape)}"
            )
        return layer

    def _check_rows(self, k: torch.Tensor, v: torch.Tensor, count: int) -> None:
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

    @renamed("at", "position")
    @exclusively
    def edit(
        self, user: Hashable, position: int, epoch: Hashable, was: Hashable = 0, *, added: bool
    ) -> int:
        """Turn a history of epoch `was` into that of `epoch`, in which an event was added at
        `position`, or the one there deleted. Of its rows those from the start are kept that are
        written and stay right (`Model.kept`), the others dropped; without a history of epoch `was`
        the user is evicted.

        Returns how many rows are kept. The caller computes the following ones again: an append of
        all of them at once is refused for no model. Until they are there the history is not whole.
        """
        position, user = checks.check_count("position", position), key("user", user)
        checks.check_bool(added=added)
        if key("epoch", epoch) == key("was", was):
            raise ValueError(f"epoch must differ from that before the edit, got {epoch!r} for both")
        entry = self._find(user, was)
        if entry is None:
            self.evict(user)
            return 0
        events = entry.events + 1 if added else entry.events - 1
        beside = min(events, entry.events)  # events that are there before and after
        if position > beside:
            raise ValueError(
                f"position must be at most {beside} in a history of {entry.events} events where "
                f"one is {'added' if added else 'deleted'}, got {position}"
            )
        right = self.model.kept(beside, position)
        rows = min(position, *entry.written, right)  # rows behind would move
        count, written = cdiv(rows, self.page_size), [rows] * self.model.num_layers
        rest = UserHistory(epoch, written, rows, entry.pages[:count], events)
        free = self._free + entry.pages[count:]
        self._users[user], self._free = rest, free  # together: a page has one holder, or is free
        return rows

    @exclusively
    def evict(self, user: Hashable) -> None:
        """Forget a user's history; one that is not kept is no error."""
        if key("user", user) in self._users:
            self._free += self._users.pop(user).pages

    def _free_pages(self, entry: UserHistory, rows: int) -> None:
        """Take the pages behind these rows from a history."""
        count = cdiv(rows, self.page_size)
        surplus, entry.pages = entry.pages[count:], entry.pages[:count]
        self._free += surplus

    def _empty(self, epoch: Hashable) -> UserHistory:
        return UserHistory(epoch, [0] * self.model.num_layers)

    def _find(self, user: Hashable, epoch: Hashable) -> UserHistory | None:
        """What is kept of this user's history, if it is of this epoch."""
        entry = self._users.get(user)
        return entry if entry is not None and entry.epoch == epoch else None

    def _checked_layer(self, layer: int, pages: Pages) -> int:
        """`layer` as an int, where users still have these pages."""
        if not isinstance(pages, Pages):
            raise TypeError(f"pages must be Pages, got {type(pages).__name__}")
        layer = checks.check_count("layer", layer)
        if layer >= self.model.num_layers:
            raise ValueError(
                f"layer must be below num_layers, {self.model.num_layers}, got {layer}"
            )
        for part in pages.parts:
            if part.end and self._users.get(part.user) is not part.entry:
                raise ValueError(
                    f"pages must be pages that their users still have, got those of {part.user!r} "
                    "before an edit or an eviction"
                )
        return layer

    def _checked_reading(self, layer: int, pages: Pages) -> int:
        layer = self._checked_layer(layer, pages)
        for user, entry, begin, end, _ in pages.parts:
            if begin < end and entry.written[layer] < end:
                raise ValueError(
                    f"pages must be rows that are written, got rows {begin} up to {end} of "
                    f"{user!r}, of whom layer {layer} has {entry.written[layer]}: write the "
                    "others first, or evict the user"
                )
        return layer


def _joined(
    first: torch.Tensor, second: torch.Tensor, first_ends: torch.Tensor, second_ends: torch.Tensor
) -> torch.Tensor:
    """The rows of `first` and then those of `second`, sequence by sequence; waits for no device."""
    out = first.new_empty(first.shape[0] + second.shape[0], *first.shape[1:])
    sequence, position = token_positions(first.shape[0], first_ends)
    out[first_ends[sequence] + second_ends[sequence] + position] = first
    sequence, position = token_positions(second.shape[0], second_ends)
    out[first_ends[sequence + 1] + second_ends[sequence] + position] = second
    return out
