"""`HistoryRules`: which cached keys and values stay right when a history changes.

Keys and values of a layer are functions of the rows that go into it, so those of an unchanged row
stay right. A change is an event added between the rows position - 1 and position, or deleted there;
at the end (position = rows) it is an append. `rows` counts the events that are there before and
after. Candidates change nothing of a history that depends on nothing of theirs, and a model's new
weights change everything.

`PagedCache` asks `kept` for an edit and `check_append`, layers.py `check_candidates`; who uses
`StoredSums` asks `check_subtraction`. Tests compare each rule with models by brute force.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from gdpa_kernels.calling import checks
from gdpa_kernels.gdpa.mask import Mask
from gdpa_kernels.serving.arguments import renamed


@dataclass(frozen=True)
class HistoryRules:
    """What decides whether keys and values stay right, of a model of `num_layers` attention layers.

    Everything else between two of them must treat each row alone, as linear layers, norms of a row
    and gates do.

    Args:
        num_layers: attention layers, whose keys and values are cached.
        mask: `Mask` of causal, window and num_contexts as an integer.
        positions: None; "kept", ids that an event keeps when others go; "index", places counted
            from the start; "from_end", from the end, as dlrm_v3 of generative-recommenders.
        query_time: what a row gets depends on the time from its event to the last one, or to a
            query that moves with it. A query's own time belongs to the epoch of a `PagedCache`.
        next_time: row i's bias takes the time of event i + 1, as in the code of the HSTU paper and
            by default in `RelativeBias`, whose bias of positions is positions="index".
        constant_divisor: sums are divided by the same number whatever the length (max_seqlen as a
            constant); False for the present length or the batch's longest.
        token_statistics: a norm over tokens, as batch norm.

    Raises:
        TypeError, ValueError: an argument is wrong: its name, what is expected, what was received.

    Source: the definitions of HSTU (arXiv 2402.17152) and of its public code.
    """

    num_layers: int
    mask: Mask = Mask(causal=True)
    positions: str | None = None
    query_time: bool = False
    next_time: bool = False
    constant_divisor: bool = True
    token_statistics: bool = False

    def __post_init__(self) -> None:
        layers = checks.check_count("num_layers", self.num_layers, least=1)
        object.__setattr__(self, "num_layers", layers)
        mask = self.mask
        if not isinstance(mask, Mask):
            raise TypeError(f"mask must be a Mask, got {mask!r}")
        if mask.num_contexts == 0:
            mask = replace(mask, num_contexts=None)
            object.__setattr__(self, "mask", mask)
        grouped = mask.num_targets is not None or mask.grouping != (1, "shared") or mask.full_rows
        if grouped or isinstance(mask.causal, str) or isinstance(mask.num_contexts, torch.Tensor):
            raise ValueError(
                "mask must have causal False or True, window and an integer num_contexts alone, "
                f"got {mask}"
            )
        if self.positions is not None:
            checks.check_choice("positions", self.positions, ("kept", "index", "from_end"))
        checks.check_bool(
            query_time=self.query_time, next_time=self.next_time,
            constant_divisor=self.constant_divisor, token_statistics=self.token_statistics,
        )  # fmt: skip

    @property
    def _contexts(self) -> int:
        return self.mask.num_contexts or 0

    @property
    def _grows(self) -> bool:
        """Whether the divisor grows with the length."""
        return not self.constant_divisor

    @renamed("at", "position")
    def changed(self, rows: int, position: int) -> list[range]:
        """A range for each layer that holds all rows whose keys and values a change at `position`
        makes wrong, of the `rows` rows that are there before and after it.

        Of a causal model with a window of 3, for a change at 50: nothing in the first layer, rows
        50 to 52 in the second, since these see the event, and 50 to 55 in the third."""
        rows = checks.check_count("rows", rows)
        position = checks.check_count("position", position)
        if position > rows:
            raise ValueError(f"position must be at most rows, {rows}, got {position}")
        ranges = [self._changed_at_first(rows, position)]
        for _ in range(self.num_layers - 1):
            ranges.append(self._changed_behind(ranges[-1], rows, position))
        return ranges

    @renamed("at", "position")
    def kept(self, rows: int, position: int) -> int:
        """The rows from the start that stay right in every layer after a change at `position`."""
        return min((x.start for x in self.changed(rows, position) if x), default=rows)

    def check_append(self) -> None:
        """Raises ValueError, with the reasons, if an append makes any of the cached rows wrong."""
        # All histories that are long enough are alike: an append reaches back at most a window and
        # a row in each layer, and to the contexts. These are twice as many rows.
        rows = 2 * self.num_layers * ((self.mask.window or 0) + 2) + self._contexts
        if not any(self.changed(rows, rows)):
            return
        _refuse(
            "rules must keep cached rows right when others are appended",
            (not self.mask.causal, "with causal=False old rows see the new ones"),
            (self._contexts > 0, "contexts see the new rows, and old rows see the contexts"),
            (self.positions == "from_end", "positions from_end change with every append"),
            (self.query_time, "the time until the query changes with every append"),
            (self.next_time, "the last old row's bias takes the time of the next event"),
            (self._grows, "a divisor that grows with the length changes every old row"),
            (self.token_statistics, "statistics over tokens change every old row"),
        )

    def check_candidates(self) -> None:
        """Raises ValueError, with the reasons, if candidates behind a history, which each see it
        and their own group, change its keys and values: those cached are then not those of
        training."""
        deep = self.num_layers > 1
        bidirectional = not self.mask.causal and self.mask.window != 0
        _refuse(
            "rules must keep a history right when candidates follow",
            (deep and bidirectional, "with causal=False the history sees them"),
            (deep and self.next_time, "the last row's bias takes the time of the first of them"),
            (deep and self._grows, "a divisor that grows with the length counts them"),
            (self.token_statistics, "statistics over tokens contain them"),
        )

    def check_subtraction(self) -> None:
        """Raises ValueError, with the reasons, unless an event's term of a sum is the same whatever
        the other events are, so that deleting it is subtracting that term: for the fixed queries of
        a PMA over per-event features (`sums.StoredSums`), or the later rows of a single layer.
        Otherwise the rows from `kept` on are computed again."""
        counted = self.positions in ("index", "from_end")
        _refuse(
            "rules must give sums of terms that stay",
            (self.num_layers > 1, "behind another layer keys and values change with the event"),
            (bool(self.mask.window), "a window takes another event for one that goes"),  # not of 0
            (counted, "positions that are counted change with every event"),
            (self.query_time, "the time until the query changes with the last event"),
            (self.next_time, "the bias of the event before takes the time of the next one"),
            (self._grows, "a divisor that grows with the length changes every term"),
            (self.token_statistics, "statistics over tokens change every term"),
        )

    def _changed_at_first(self, rows: int, position: int) -> range:
        """Rows that go changed into the first layer: places counted from the end are others before
        the position, those counted from the start behind it; the time until the query is another
        for all rows where the last event is."""
        if self.token_statistics or (self.query_time and position == rows):
            return range(rows)
        if self.positions == "from_end":
            return range(position)
        return range(position if self.positions == "index" else rows, rows)

    def _changed_behind(self, inputs: range, rows: int, position: int) -> range:
        """Rows that come changed out of a layer into which `inputs` went changed: these, and those
        that see one of them, or the event.

        With a window of w, w later rows see a row, and w earlier ones unless it is causal. An event
        added at p moves row p to place p + 1, so the old rows p to p + w - 1 see it. Contexts see
        the whole history, so all of them change, and a row sees all or none of them, as if the c
        contexts stood in place c - 1: rows up to c - 1 + w do. With w = 2, one context and an event
        added at 4:

            row                    0 1 2 3 + 4 5 6 7
            changed into layer 0   . . . .   . . . .
            changed into layer 1   x . . .   x x . .   the context; 4 and 5 see the event
            changed into layer 2   x x x .   x x x x   1 and 2 see the context, 6 and 7 see 4 or 5
        """
        if self.token_statistics or self._grows:
            return range(rows)
        later = rows if self.mask.window is None else self.mask.window
        earlier = 0 if self.mask.causal else later
        ranges = [
            inputs,
            range(position - earlier, max(position, self._contexts) + later),
            range(self._contexts),
        ]
        if inputs:
            ranges.append(range(inputs.start - earlier, inputs.stop + later))
        if self.next_time:
            ranges.append(range(position - 1, position))
        inside = [range(max(x.start, 0), min(x.stop, rows)) for x in ranges]
        starts, stops = [x.start for x in inside if x], [x.stop for x in inside if x]
        return range(min(starts, default=0), max(stops, default=0))  # with the rows between them


def _refuse(must: str, *reasons: tuple[bool, str]) -> None:
    """Raises ValueError with the reasons that hold, if any does."""
    because = "; ".join(reason for holds, reason in reasons if holds)
    if because:
        raise ValueError(f"{must}, but {because}")
