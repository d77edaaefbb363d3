"""Which stored keys and values outlive a change of a history.

Keys and values of a layer are functions of the rows that go into it, so those of an unchanged row
stay right. A change is named by its position: between the kept rows position - 1 and position. It
is an event added there or deleted there; at the end (position = rows) it is an append. Candidates
change nothing of a history that depends on nothing of theirs, and a model's new weights change
everything.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from gdpa_kernels.calling import checks
from gdpa_kernels.gdpa.mask import Mask
from gdpa_kernels.serving.arguments import renamed

CAUSAL = Mask(causal=True)

POSITIONS = ("kept", "index", "from_end")
_BREAKS_APPEND = {
    "causal": "with causal=False old rows see the new ones",
    "num_contexts": "contexts see the new rows, and old rows see the contexts",
    "positions": "positions from_end change with every append",
    "query_time": "the time until the query changes with every append",
    "next_time": "the last old row's bias takes the time of the next event",
    "divisor": "a divisor that grows with the length changes every old row",
    "token_statistics": "statistics over tokens change every old row",
}
_BREAKS_CANDIDATES = {
    "causal": "with causal=False the history sees them",
    "next_time": "the last row's bias takes the time of the first of them",
    "divisor": "a divisor that grows with the length counts them",
    "token_statistics": "statistics over tokens contain them",
}
_BREAKS_SUBTRACTION = {
    "layers": "behind another attention layer keys and values change with the event",
    "window": "a window takes another event for one that goes",
    "positions": "positions that are counted change with every event",
    "query_time": "the time until the query changes with the last event",
    "next_time": "the bias of the event before takes the time of the next one",
    "divisor": "a divisor that grows with the length changes every part",
    "token_statistics": "statistics over tokens change every part",
}


@dataclass(frozen=True)
class Model:
    """What decides whether keys and values stay right, of a model of `num_layers` attention layers.

    Everything else between two of them must treat each row alone, as linear layers, norms of a row
    and gates do.

    Args:
        num_layers: attention layers, whose keys and values are kept.
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

    Source: the definitions of HSTU (arXiv 2402.17152) and of its public code; each rule is compared
    with models by brute force in the tests.
    """

    num_layers: int
    mask: Mask = CAUSAL
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
            checks.check_choice("positions", self.positions, POSITIONS)
        checks.check_bool(
            query_time=self.query_time, next_time=self.next_time,
            constant_divisor=self.constant_divisor, token_statistics=self.token_statistics,
        )  # fmt: skip

    @property
    def _contexts(self) -> int:
        return self.mask.num_contexts or 0

    @renamed("at", "position")
    def changed(self, rows: int, position: int) -> list[range]:
        """A range for each layer that holds all rows whose keys and values a change at `position`
        makes wrong, of the `rows` rows that are there before and after it."""
        rows = checks.check_count("rows", rows)
        position = checks.check_count("position", position)
        if position > rows:
            raise ValueError(f"position must be at most rows, {rows}, got {position}")
        ranges = [self._inputs(rows, position)]
        for _ in range(self.num_layers - 1):
            ranges.append(self._behind(ranges[-1], rows, position))
        return ranges

    @renamed("at", "position")
    def kept(self, rows: int, position: int) -> int:
        """The rows from the start that stay right in every layer after a change at `position`."""
        return min((x.start for x in self.changed(rows, position) if x), default=rows)

    def check_append(self) -> None:
        """Raises ValueError, with the reasons, if an append makes any of the kept rows wrong."""
        # An append reaches back at most a window and a row in each layer: these are twice as many,
        # and the contexts.
        rows = 2 * self.num_layers * ((self.mask.window or 0) + 2) + self._contexts
        if not any(self.changed(rows, rows)):
            return
        broken = {
            "causal": not self.mask.causal,
            "num_contexts": self._contexts > 0,
            "positions": self.positions == "from_end",
            "query_time": self.query_time,
            "next_time": self.next_time,
            "divisor": not self.constant_divisor,
            "token_statistics": self.token_statistics,
        }
        _refuse("keep its rows right when others are appended", _BREAKS_APPEND, broken)

    def check_candidates(self) -> None:
        """Raises ValueError, with the reasons, if candidates behind a history, which each see it
        and their own group, change its keys and values: those kept are then not those of training.
        """
        behind = self.num_layers > 1
        broken = {
            "causal": behind and not self.mask.causal and self.mask.window != 0,
            "next_time": behind and self.next_time,
            "divisor": behind and not self.constant_divisor,
            "token_statistics": self.token_statistics,
        }
        _refuse("keep a history right when candidates follow", _BREAKS_CANDIDATES, broken)

    def check_subtraction(self) -> None:
        """Raises ValueError, with the reasons, unless an event's part in a sum is the same whatever
        the other events are, so that deleting it is subtracting that part: for the fixed queries of
        a PMA over per-event features (`sums.StoredSums`), or the later rows of a single layer.
        Otherwise the rows from `kept` on are computed again."""
        broken = {
            "layers": self.num_layers > 1,
            "window": bool(self.mask.window),  # 0: a row alone
            "positions": self.positions in ("index", "from_end"),
            "query_time": self.query_time,
            "next_time": self.next_time,
            "divisor": not self.constant_divisor,
            "token_statistics": self.token_statistics,
        }
        _refuse("give sums of parts that stay", _BREAKS_SUBTRACTION, broken)

    def _inputs(self, rows: int, position: int) -> range:
        """Rows that go into the first layer changed."""
        if self.token_statistics or (self.query_time and position == rows):
            return range(rows)
        if self.positions == "from_end":
            return range(position)
        return range(position if self.positions == "index" else rows, rows)

    def _behind(self, inputs: range, rows: int, position: int) -> range:
        """Rows that changed behind a layer that took `inputs` changed."""
        if self.token_statistics or not self.constant_divisor:
            return range(rows)
        # So many later rows see a row, and so many earlier ones.
        later = rows if self.mask.window is None else self.mask.window
        earlier = 0 if self.mask.causal else later
        # Rows that see the event, or a context that it changes. One added before row p moves row p
        # to p + 1: with a window of w it is seen by rows up to p + w - 1.
        ranges = [range(position - earlier, max(position, self._contexts) + later)]
        if self.next_time:
            ranges.append(range(position - 1, position))
        if inputs:
            ranges.append(range(inputs.start - earlier, inputs.stop + later))
        if self._contexts:
            ranges.append(range(self._contexts))
        inside = [range(max(x.start, 0), min(x.stop, rows)) for x in ranges]
        return _hull([inputs, *inside])


def _refuse(must: str, reasons: dict[str, str], broken: dict[str, bool]) -> None:
    because = "; ".join(reasons[name] for name, is_so in broken.items() if is_so)
    if because:
        raise ValueError(f"model must {must}, but {because}")


def _hull(ranges: list[range]) -> range:
    some = [x for x in ranges if x]
    return range(min(x.start for x in some), max(x.stop for x in some)) if some else range(0)
