"""Tables of rankings: which implementations were fastest by shape. Each operator's choices.py reads
one for `impl="auto"`.

A table is a CSV file beside the operator's code: columns of a shape, the first of them the compute
capability of the GPU, then `impls`, fastest first, and the record that compared them. The lab makes
it from the records (report/measured_rankings.py). Another minor version is another GPU: 10.3
computes twice as many tanh in a clock as 10.0, and what is fastest on one says nothing of the
other.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

Shape = tuple[object, ...]


def parse_capability(text: str) -> tuple[int, int]:
    """(10, 0) of "10.0", as `rung.capability` has it."""
    major, minor = text.split(".")
    return int(major), int(minor)


class Ranking(NamedTuple):
    """Implementations in the order measured at one shape. `shape`: values of a table's columns."""

    shape: Shape
    impls: tuple[str, ...]
    record: str


def merged(orders: Sequence[Sequence[str]]) -> tuple[str, ...]:
    """Every implementation of some rankings, of which the first ones count most. One that the first
    ranking lacks goes before the first it beat in the next ranking that has it: ("a", "b") and
    ("c", "b") give ("a", "c", "b"). So one that was not compared is not taken for one that lost.
    """
    ranked: list[str] = []
    left = [*orders]
    while left:
        order = next((x for x in left if not ranked or {*x} & {*ranked}), left[0])
        left.remove(order)
        for i, impl in enumerate(order):
            if impl not in ranked:
                slower = [ranked.index(x) for x in order[i + 1 :] if x in ranked]
                ranked.insert(min(slower, default=len(ranked)), impl)
    return tuple(ranked)


def parse(text: str, columns: Mapping[str, Callable]) -> list[Ranking]:
    """The rows of a table with these columns and types. ValueError if its header is another."""
    reader = csv.DictReader(io.StringIO(text))
    expected = (*columns, "impls", "record")
    if tuple(reader.fieldnames or ()) != expected:
        raise ValueError(f"choices.csv must have the columns {expected}, got {reader.fieldnames}")
    return [
        Ranking(
            tuple(kind(row[name]) for name, kind in columns.items()),
            tuple(row["impls"].split()),
            row["record"],
        )
        for row in reader
    ]
