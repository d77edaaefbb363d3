"""Ratings in a CSV file as MovieLens has them (20M, 25M, 32M, latest), made into rows to train on.

    userId,movieId,rating,timestamp
    1,296,5.0,1147880044

A user or an item is what its name spells: "01", "1" and "1.0" are three, and "NA" is one. Other
columns are not read; ml-1m and ml-100k need this header and commas first. A user's events are
in the order of their timestamps, equal ones in that of the file. A row is an event, whose history
are the events before it; it is clicked if it was rated `like` or better. In the share `negatives`
of the rows another item is shown, any of the file, and not clicked, though the user may like it.

The last tenth of the time is held out: a row is trained on if it is not after that moment, so no
history has an event from a trained model's future.
"""

from __future__ import annotations

import warnings
from pathlib import Path

import numpy as np
import pandas as pd
import torch

from data import HELD_OUT, Batch, World, places

COLUMNS = ("userId", "movieId", "rating", "timestamp")
STARS = (0.5, 5.0)
TRAINED = 0.9


def read(path: str) -> pd.DataFrame:
    """The ratings of a file, by user and time; a ValueError says what is wrong in which line."""
    if not Path(path).is_file():
        raise ValueError(f"must be a CSV file, got {path}")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error", pd.errors.ParserWarning)  # a loss of data
            table = pd.read_csv(
                path, dtype=dict.fromkeys(COLUMNS[:2], str), index_col=False, low_memory=False,
                keep_default_na=False, na_values=[""],
            )  # fmt: skip
    except pd.errors.ParserWarning as error:
        raise ValueError(
            f"must have a name for each column, got fewer than values in {path}"
        ) from error
    except ValueError as error:  # of pandas: no columns, other encodings, rows that are too long
        raise ValueError(f"must be a CSV file, got {path}: {error}") from error
    if table.empty:
        raise ValueError(f"must have ratings, got none in {path}")
    missing = [name for name in COLUMNS if name not in table]
    if missing:
        raise ValueError(f"must have the columns {', '.join(COLUMNS)}, got {', '.join(table)}")
    low, high = STARS
    numbers = {name: pd.to_numeric(table[name], errors="coerce") for name in COLUMNS[2:]}
    rating, time = numbers["rating"], numbers["timestamp"]
    rules = {
        "userId": ("given", table["userId"].notna()),
        "movieId": ("given", table["movieId"].notna()),
        "rating": (f"a number from {low} to {high}", rating.between(low, high)),
        "timestamp": ("whole seconds since 1970", (time >= 0) & (time % 1 == 0)),
    }
    for name, (wanted, right) in rules.items():
        if not right.all():
            line = int(np.argmin(right))
            got = table[name].iloc[line]
            raise ValueError(f"{name} must be {wanted}, got {got} in row {line + 1}")
    names = {name: _names(table[name]) for name in COLUMNS[:2]}
    table = table[list(COLUMNS)].assign(**numbers, **names)
    return table.sort_values(["userId", "timestamp"], kind="stable", ignore_index=True)


def _names(column: pd.Series) -> pd.Series:
    """Names as they stand in the file; integers, which sort as such, where no two spell the same
    one."""
    integers = pd.Series(column.unique()).str.fullmatch(r"0|-?[1-9]\d{0,17}").all()
    return column.astype(np.int64) if integers else column


class Ratings:
    """The rows of a file, step by step; steps from HELD_OUT on have those that are held out."""

    def __init__(self, path: str, max_seqlen: int, like: float, negatives: float, seed: int):
        table = read(path)
        user, item = (pd.factorize(table[name], sort=True)[0] for name in COLUMNS[:2])
        self.max_seqlen, self.negatives, self.seed = max_seqlen, negatives, seed
        self.before = np.arange(len(user)) - np.searchsorted(user, user)
        self.item, self.liked = item.astype(np.int64), (table["rating"] >= like).to_numpy(np.int64)
        self.world = World(items=int(item.max()) + 1, topics=1, seed=seed)
        time = table["timestamp"].to_numpy()
        held_out = time > np.quantile(time, TRAINED) if len(time) else np.zeros(0, bool)
        self.events = {
            "trained on": np.flatnonzero(~held_out),
            "held out": np.flatnonzero(held_out),
        }
        for name, events in self.events.items():
            liked = int(self.liked[events].sum())
            if not 0 < liked < len(events):
                raise ValueError(
                    f"must have ratings below and from {like} on among those {name}, got {liked} "
                    f"of {len(events)} from {like} on in {path}"
                )

    def _draw(self, step: int, batch: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """The event of each row, what is shown, and whether it is clicked."""
        rng = np.random.default_rng([self.seed, step])
        event = rng.choice(self.events["held out" if step >= HELD_OUT else "trained on"], batch)
        other = rng.random(batch) < self.negatives
        shown = np.where(other, rng.integers(self.world.items, size=batch), self.item[event])
        return event, shown, self.liked[event] * ~other

    def sample(self, step: int, batch: int) -> np.ndarray:
        """The lengths of a step's global batch, int64 `[batch]`: most recent events only."""
        return np.minimum(self.before[self._draw(step, batch)[0]], self.max_seqlen)

    def make_batch(self, lengths, rows, step, device="cpu", max_seqlen=None) -> Batch:
        """The rows `rows` of a step, whose global batch has `lengths`."""
        event, shown, label = (x[rows] for x in self._draw(step, len(lengths)))
        history_lengths = lengths[rows]
        offsets, (_, _, ages) = places(history_lengths, device, max_seqlen)
        history = np.arange(history_lengths.sum()) + np.repeat(
            event - history_lengths.cumsum(), history_lengths
        )
        items, likes, shown, label = (
            torch.from_numpy(x).to(device, non_blocking=True)
            for x in (self.item[history], self.liked[history], shown, label)
        )
        none = torch.zeros_like
        return Batch(
            offsets, items, none(items), likes, ages, shown, none(shown), label.float(), None
        )
