"""What `impl="auto"` tries first: the order measured at the nearest shape.

The table, choices.csv, is made from the records by `python -m gdpa_kernels choices`: for each
measured workload the implementations that passed their check, fastest first. A call takes the row
of its device's major compute capability whose head_dim and longest sequences are nearest, by their
ratios; a row of the call's own dtype comes first. Where nothing was measured, and after what was,
come the implementations that run anywhere (`UNMEASURED`).
"""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache, lru_cache
from pathlib import Path

PATH = Path(__file__).with_name("choices.csv")
UNMEASURED = ("v2_tma", "v1_tiled", "v0_eager")
COLUMNS = ("capability", "dtype", "head_dim", "max_seqlen_q", "max_seqlen_k", "impls", "record")


@dataclass(frozen=True)
class Choice:
    """The order measured at one shape. capability: the major version; impls: fastest first."""

    capability: int
    dtype: str
    head_dim: int
    max_seqlen_q: int
    max_seqlen_k: int
    impls: tuple[str, ...]
    record: str

    def distance(self, dtype: str, head_dim: int, max_seqlen_q: int, max_seqlen_k: int) -> tuple:
        """How far a call is from this shape: another dtype first, then doublings of the sizes."""
        pairs = (
            (self.head_dim, head_dim),
            (self.max_seqlen_q, max_seqlen_q),
            (self.max_seqlen_k, max_seqlen_k),
        )
        return self.dtype != dtype, sum(abs(math.log2(a / max(b, 1))) for a, b in pairs)


@lru_cache(maxsize=1024)
def order(
    capability: int | None, dtype: str, head_dim: int, max_seqlen_q: int, max_seqlen_k: int
) -> tuple[str, ...]:
    """Implementations to try for a call, fastest first; capability None: no GPU."""
    rows = [choice for choice in load() if choice.capability == capability]
    if not rows:
        return UNMEASURED
    nearest = min(rows, key=lambda c: c.distance(dtype, head_dim, max_seqlen_q, max_seqlen_k))
    return tuple(dict.fromkeys((*nearest.impls, *UNMEASURED)))


@cache
def load() -> tuple[Choice, ...]:
    """The table as it is in the package."""
    return parse(PATH.read_text())


def parse(text: str) -> tuple[Choice, ...]:
    """The rows of a table's text. ValueError if its columns are others than COLUMNS."""
    reader = csv.DictReader(io.StringIO(text))
    if tuple(reader.fieldnames or ()) != COLUMNS:
        raise ValueError(f"choices.csv must have the columns {COLUMNS}, got {reader.fieldnames}")
    return tuple(
        Choice(
            int(row["capability"]), row["dtype"], int(row["head_dim"]), int(row["max_seqlen_q"]),
            int(row["max_seqlen_k"]), tuple(row["impls"].split()), row["record"],
        )
        for row in reader
    )  # fmt: skip


def render(choices: Iterable[Choice]) -> str:
    """The text of the table."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(COLUMNS)
    for c in choices:
        sizes = (c.head_dim, c.max_seqlen_q, c.max_seqlen_k)
        writer.writerow((c.capability, c.dtype, *sizes, " ".join(c.impls), c.record))
    return out.getvalue()


def from_records(data_dir: str | Path) -> tuple[Choice, ...]:
    """The table that the records make: of each shape, the record that compared most implementations
    on it, the newest of several; workloads of one shape count together."""
    import pandas as pd

    from gdpa_kernels import ladder, record, results, system

    rungs = {rung.impl for rung in ladder.RUNGS}
    workloads = {
        (found.id, name): workload
        for found in record.load_all(data_dir)[0]
        for name, workload in found.workloads.items()
    }
    table = results.table(data_dir, latest=False).drop_duplicates(
        ["workload", "impl", "variant", "scope", "direction", "record"]
    )
    rows = table[
        (table["scope"] == "kernel") & (table["variant"] == "") & (table["direction"] == "forward")
    ]
    rows = rows[rows["correct"] & rows["impl"].isin(rungs)]
    found: dict[tuple, dict[str, list]] = {}
    for (run, name), group in rows.groupby(["record", "workload"], sort=True):
        workload = workloads[run, name]
        if workload["operator"] != "gdpa" or workload["activation"] != "gelu_tanh":
            continue
        machine = system.load(Path(data_dir) / "systems" / f"{group['system'].iloc[0]}.json")
        shape = (
            int(machine.compute_capability.split(".")[0]),
            workload["dtype"],
            *(int(workload[size]) for size in ("head_dim", "max_seqlen_q", "max_seqlen_k")),
        )
        if len(group) > 1:
            found.setdefault(shape, {}).setdefault(run, []).append(
                group.set_index("impl")["time_us_p50"]
            )
    choices = []
    for shape in sorted(found):
        totals = {
            run: pd.concat(columns, axis=1).dropna().sum(axis=1)
            for run, columns in found[shape].items()
        }
        run = max(totals, key=lambda run: (len(totals[run]), run))
        times = totals[run]
        choices.append(Choice(*shape, tuple(times.sort_values().index), run))
    return tuple(choices)
