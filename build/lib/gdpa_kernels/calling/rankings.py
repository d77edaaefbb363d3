"""Which implementations were fastest where: what `impl="auto"` reads.

A table of rankings is a CSV file beside an operator's code: columns of a shape, the first of them
the compute capability of the GPU, then `impls`, fastest first, and the record that compared them.
report/rankings.py makes it from the records. Another minor version is another GPU: 10.3 computes
twice as many tanh in a clock as 10.0, and what is fastest on one says nothing of the other.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Callable, Mapping
from typing import NamedTuple

Shape = tuple[object, ...]


def capability(text: str) -> tuple[int, int]:
    """A compute capability, "10.0", as `calling.rung.capability` has it."""
    major, minor = text.split(".")
    return int(major), int(minor)


class Ranking(NamedTuple):
    """Implementations in the order measured at one shape. `shape`: values of a table's columns."""

    shape: Shape
    impls: tuple[str, ...]
    record: str


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
