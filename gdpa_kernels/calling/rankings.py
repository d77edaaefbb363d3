"""Which implementations were fastest where: what `impl="auto"` reads.

A table of rankings is a CSV file beside an operator's code: columns of a shape, then `impls`,
fastest first, and the record that compared them. report/rankings.py makes it from the records.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping
from typing import NamedTuple

Shape = tuple[object, ...]


class Ranking(NamedTuple):
    """Implementations in the order measured at one shape. `shape`: values of a table's columns."""

    shape: Shape
    impls: tuple[str, ...]
    record: str


def parse(text: str, columns: Mapping[str, type]) -> list[Ranking]:
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
