"""Which implementations were fastest where, from the records: what `impl="auto"` is made of.

A table of rankings is a CSV file beside an operator's code: columns of a shape, then `impls`,
fastest first, and the record that compared them. `python -m gdpa_kernels choices` writes all of
them anew.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
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


def render(rankings: Iterable[Ranking], columns: Mapping[str, type]) -> str:
    """The text of the table."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow((*columns, "impls", "record"))
    for ranking in rankings:
        writer.writerow((*ranking.shape, " ".join(ranking.impls), ranking.record))
    return out.getvalue()


def from_records(
    data_dir: str | Path, operator: str, shape_of: Callable[[int, str, Mapping], Shape | None]
) -> list[Ranking]:
    """The rankings that the records make: of each shape, the record that compared most
    implementations on it, the newest of several; workloads of one shape count together.

    `shape_of` maps the major compute capability, the direction and a workload's dictionary to a
    shape, or to None for workloads that do not count. Only rows that passed their check do.
    """
    import pandas as pd

    from gdpa_kernels.calling import ladder
    from gdpa_kernels.measuring import record, system
    from gdpa_kernels.report import results

    ladders = [ladder.LADDERS[operator], ladder.LADDERS.get(f"{operator}_backward", ())]
    rungs = {rung.impl for rungs in ladders for rung in rungs[1:]}
    workloads = {
        (found.id, name): workload
        for found in record.load_all(data_dir)[0]
        for name, workload in found.workloads.items()
    }
    table = results.table(data_dir, latest=False).drop_duplicates(
        ["workload", "impl", "variant", "scope", "direction", "record"]
    )
    rows = table[(table["scope"] == "kernel") & (table["variant"] == "")]
    rows = rows[rows["correct"] & rows["impl"].isin(rungs)]
    found: dict[Shape, dict[str, list]] = {}
    for (run, name, direction), group in rows.groupby(
        ["record", "workload", "direction"], sort=True
    ):
        workload = workloads[run, name]
        machine = system.load(Path(data_dir) / "systems" / f"{group['system'].iloc[0]}.json")
        capability = int(machine.compute_capability.split(".")[0])
        shape = shape_of(capability, direction, workload)
        if workload["operator"] == operator and shape is not None and len(group) > 1:
            times = group.set_index("impl")["time_us_p50"]
            found.setdefault(shape, {}).setdefault(run, []).append(times)
    rankings = []
    for shape in sorted(found):
        totals = {
            run: pd.concat(columns, axis=1).dropna().sum(axis=1)
            for run, columns in found[shape].items()
        }
        run = max(totals, key=lambda run: (len(totals[run]), run))
        rankings.append(Ranking(shape, tuple(totals[run].sort_values().index), run))
    return rankings
