"""Derives the table of results, with rates, from the records whenever it is read.

Nothing here is stored: delete a record and its rows are gone, `latest_record` fails, and a book
that quotes them does not build.
"""

from __future__ import annotations

import fnmatch
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import pandas as pd

from gdpa_lab.measuring import memory
from gdpa_lab.measuring import system as systems
from gdpa_lab.measuring.record import DATA_DIR, Record, Row, communities, load_all
from gdpa_lab.measuring.require import require
from gdpa_lab.measuring.roofline import Ceilings
from gdpa_lab.measuring.rows import LEFT_OUT
from gdpa_lab.measuring.workloads import figures_of
from gdpa_lab.report import staleness

_IDENTITY = (
    "figure", "workload", "direction", "impl", "math", "scope", "variant", "system", "gpu", "date",
    "record",
)  # fmt: skip
NUMBERS = (
    "time_us_p20", "time_us_p50", "time_us_p80", "tflops", "gbytes_per_s", "percent_of_roofline",
)  # fmt: skip
_LOAD = ("sm_clock_mhz", "power_w", "joules")
COLUMNS = (
    *_IDENTITY, *NUMBERS, "burst_us", "correct", "failure", "stale", "samples", *_LOAD,
    "configuration",
)  # fmt: skip
TIMED = {"kernel": "in bursts", "sustained": "back to back"}
"""Names of the scopes of device time in a text."""


def table(
    data_dir: str | Path = DATA_DIR,
    *,
    gpu: str | None = None,
    record: str | None = None,
    workload: str | None = None,
    latest: bool = True,
    per: str = "system",
) -> pd.DataFrame:
    """Tabulate one row per measured row and figure, with COLUMNS, oldest record first.

    `gpu`: keep systems whose GPU has exactly this name. `record`: keep that with this id.
    `workload`: keep workloads matching this shell pattern. `latest`: of the rows that share
    workload, direction, impl, scope, variant and `per` ("system" or "gpu") keep the newest, failed
    or not; one that its run did not come to only where there is no other.

    time_us_p20, p50, p80: quantiles of the samples in microseconds (linear interpolation). tflops
    (TFLOP/s) and gbytes_per_s (GB/s, 1e9 bytes): useful FLOPs and fewest bytes over the p50 time.
    percent_of_roofline: 100 * max(compute floor, memory floor) / p50 time, with the ceilings of the
    same record: sustained ones for scope "sustained", isolated ones for all others. These are NaN
    without samples, FLOPs or ceilings. `correct`: the check passed; NA where nothing was to be
    checked, as for a schedule. `failure`: why there are no samples, or "". `figure`: the published
    figure that shows the workload, or "". `stale`: what ran is not what our kernel compiles to
    today, or the definition of the workload has changed; see `staleness`. `samples`: how many.
    burst_us: p50 of the isolated samples of the same call in the same record, for each scope.
    sm_clock_mhz, power_w (W), joules (of one call): of scope "sustained", NaN elsewhere.
    `configuration`: of a peer with several the fastest, which was timed; else "".

    RecordError naming every refused file; ValueError for another `per`.
    """
    require(per in ("system", "gpu"), "per", "'system' or 'gpu'", per)
    rows: list[dict[str, Any]] = []
    for run in load_all(data_dir):
        machine = systems.by_id(run.system, data_dir)
        if gpu not in (None, machine.gpu or "") or record not in (None, run.id):
            continue
        floors = {x: cache(most.floor_us) for x in TIMED if (most := ceilings(run, x))}
        bursts = {
            (row.workload, row.direction, row.impl, row.variant): statistics.median(row.samples_us)
            for row in run.rows if row.scope == "kernel" and row.samples_us
        }  # fmt: skip
        selected = [
            row for row in run.rows
            if workload is None or fnmatch.fnmatchcase(row.workload, workload)
        ]  # fmt: skip
        stale = staleness.are_stale(run, selected, machine, data_dir=data_dir)
        rows += [
            derived
            | {"burst_us": bursts.get((row.workload, row.direction, row.impl, row.variant))}
            | {"stale": is_stale}
            for row, is_stale in zip(selected, stale, strict=True)
            for derived in _derive(run, row, floors, machine.gpu or "")
        ]
    memory.save()
    frame = _frame(rows)
    if latest:
        key = ["figure", "workload", "direction", "impl", "scope", "variant", per]
        early = frame["failure"].str.startswith(LEFT_OUT)  # newest only where nothing else is
        frame = pd.concat([frame[early], frame[~early]]).drop_duplicates(key, keep="last")
        frame = frame.sort_index(ignore_index=True)
    return frame


def _frame(rows: list[dict[str, Any]]) -> pd.DataFrame:
    return pd.DataFrame(rows, columns=list(COLUMNS)).astype(
        dict.fromkeys((*NUMBERS, "burst_us", *_LOAD), "float64")
        | {"correct": "boolean", "stale": "bool", "samples": "int64"}
    )


def community(data_dir: str | Path = DATA_DIR, **options: Any) -> pd.DataFrame:
    """Tabulate the records of other machines, data_dir/community/<handle>, with their `handle`.
    Nothing else reads them. RecordError names every refused file."""
    tables = [
        table(folder, **options).assign(handle=handle)
        for handle, folder in communities(data_dir).items()
    ]
    return pd.concat(tables, ignore_index=True) if tables else _frame([]).assign(handle="")


def latest_record(
    data_dir: str | Path = DATA_DIR, *, notebook: str | None = None, gpu: str | None = None
) -> Record:
    """Return the newest record of `notebook` (path relative to the repository) on a GPU of exactly
    this name. LookupError saying what exists if there is none; RecordError naming every refused
    file."""
    return runs(data_dir, notebook=notebook, gpu=gpu)[-1]


def runs(
    data_dir: str | Path = DATA_DIR, *, notebook: str | None = None, gpu: str | None = None
) -> list[Record]:
    """List the records that `latest_record` chooses from, oldest first; errors as there."""
    records = load_all(data_dir)
    matches = [
        r for r in records if notebook in (None, r.chapter) and gpu in (None, gpu_of(r, data_dir))
    ]
    if not matches:
        existing = sorted({f"{r.chapter} on {r.system}" for r in records}) or ["no record"]
        raise LookupError(
            f"a record must match notebook={notebook!r}, gpu={gpu!r}, got none; "
            f"there is: {'; '.join(existing)}"
        )
    return matches


class Run(NamedTuple):
    """The records that a chapter quotes: the newest of those with the most rows, and, for each
    (workload, direction, scope), the newest record that measured all of its plan. So a piece that a
    campaign measured, or a record that was cut off, replaces the part it has."""

    whole: Record
    pieces: Mapping[tuple[str, str, str], Record] = MappingProxyType({})

    @property
    def records(self) -> list[Record]:
        """Records: the whole one, then those that replace parts of it."""
        others = {run.id: run for run in self.pieces.values() if run.id > self.whole.id}
        return [self.whole, *(others[name] for name in sorted(others))]

    def of(self, key: tuple[str, str, str]) -> Record:
        """Return the record that counts for a (workload, direction, scope)."""
        return self.pieces.get(key, self.whole)

    def select(self, rows: pd.DataFrame) -> pd.DataFrame:
        """Select the `rows` of `table`, all of one record, for which this record counts."""
        keys = zip(rows["workload"], rows["direction"], rows["scope"], strict=True)
        return rows[rows["record"].eq([self.of(key).id for key in keys])]


def run_of(data_dir: str | Path, *, notebook: str, gpu: str) -> Run:
    """Combine the records of a chapter on a GPU of exactly this name; LookupError as in
    `latest_record` if there is none.

    Chapters that moved to their present path were planned anew: a record under a former path gives
    way to the first run under this path that measured its whole plan.
    """
    whole = latest_record(data_dir, notebook=notebook, gpu=gpu)
    pieces: dict[tuple[str, str, str], Record] = {}
    most = 0
    for run in runs(data_dir, notebook=notebook, gpu=gpu):
        measured = {(row.workload, row.direction, row.scope) for row in run.rows}
        left = {(x.workload, x.direction, x.scope) for x in run.rows if x.is_left_out}
        measured -= left
        pieces |= dict.fromkeys(measured, run)
        full = run.plan and not left and run.command.startswith("make ")  # a piece says of what
        anew = whole.notebook != notebook and run.notebook == notebook and full
        if len(measured) >= most or anew:
            most, whole = len(measured), run
    return Run(whole, {key: x for key, x in pieces.items() if x.id >= whole.id})


def gpu_of(record: Record, data_dir: str | Path = DATA_DIR) -> str:
    """Return the name of the GPU that made a record, "" without one."""
    return systems.by_id(record.system, data_dir).gpu or ""


def ceilings(record: Record, scope: str = "kernel") -> Ceilings | None:
    """Return the ceilings of a scope measured in `record`; None if either kind is missing."""
    return Ceilings.measured(record.ceilings, scope)


def to_csv(table: pd.DataFrame) -> str:
    """Format the table as CSV: six significant digits, empty fields for missing numbers."""
    return table.to_csv(index=False, float_format="%.6g", lineterminator="\n")


def to_markdown(table: pd.DataFrame) -> str:
    """Format the table in Markdown, numbers with four significant digits."""
    lines = [list(table.columns), ["---"] * len(table.columns)]
    lines += [[cell(value) for value in row] for row in table.itertuples(index=False)]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def cell(value: Any) -> str:
    """Format a value of a table: numbers with four significant digits, nothing for none."""
    if pd.isna(value):
        return ""
    if isinstance(value, float):
        return f"{value:.4g}" if abs(value) < 1e4 else f"{value:.0f}"
    return " ".join(str(value).split()).replace("|", "\\|")


def quantiles(samples: Sequence[float], shares: Sequence[float]) -> list[float]:
    """Return the quantiles that `np.quantile` does, for a twentieth of its time on few samples; NaN
    of none."""
    ordered, values = sorted(samples) or [math.nan], []
    for share in shares:
        index = share * (len(ordered) - 1)
        low, high = ordered[math.floor(index)], ordered[math.ceil(index)]
        part, step = index - math.floor(index), high - low
        values.append(low + step * part if part < 0.5 else high - step * (1 - part))
    return values


def _derive(
    record: Record, row: Row, floors: Mapping[str, Callable[..., float]], gpu: str
) -> list[dict[str, Any]]:
    times = quantiles(row.samples_us, (0.2, 0.5, 0.8))
    p50 = times[1]
    size = row.bytes_read + row.bytes_written
    checked = row.error is not None or row.failure is not None
    floor_us = floors.get("sustained" if row.scope == "sustained" else "kernel")
    floor = math.nan
    if floor_us is not None and row.flops:
        floor = floor_us(row.flops, row.bytes_read, row.bytes_written)
    values = {
        **{name: getattr(row, name) for name in _IDENTITY[1:7]},
        "system": record.system,
        "gpu": gpu,
        "date": record.created[:10],
        "record": record.id,
        **dict(zip(NUMBERS, times, strict=False)),
        "tflops": row.flops / p50 / 1e6 if row.flops else math.nan,
        "gbytes_per_s": size / p50 / 1e3 if size else math.nan,
        "percent_of_roofline": 100 * floor / p50,
        "correct": row.passed if checked else None,
        "failure": row.failure or "",
        "samples": len(row.samples_us),
        **{name: getattr(row.load, name, None) for name in _LOAD},
        "configuration": row.config.get("configuration", ""),
    }
    return [{"figure": f, **values} for f in figures_of(row.workload, row.direction) or ("",)]
