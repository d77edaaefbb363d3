"""Checks a record against its neighbours: rows timed with a row, and records of the same system.

A record can fit the schema and the bounds of its machine and still be of another machine, of
another kernel, hold fewer samples than were taken, or other machine code than ran.
"""

from __future__ import annotations

import json
import statistics
from collections import defaultdict
from collections.abc import Iterator, Sequence
from functools import cache
from typing import TYPE_CHECKING

from gdpa_kernels.calling import ladder
from gdpa_lab.measuring.baselines import BASELINES, BLOCK_BASELINES
from gdpa_lab.measuring.rows import Ceiling, Row
from gdpa_lab.measuring.studies import STUDIES
from gdpa_lab.measuring.sustained import CHUNK_US
from gdpa_lab.measuring.workload import DIRECTIONS, OPERATORS

if TYPE_CHECKING:
    from gdpa_lab.measuring.run import Record

ALIKE = 0.05
"""Most relative difference of a ceiling from the median of the system's other records; 0.036 in the
records of an H200, of several boards."""
LEAST_SHARE = 0.8
"""Least device time of a row's samples over the median of its workload and direction, which one
call timed; 0.90 in the records, whose numbers of calls in a sample are not kept."""
_FEW = 3  # neighbours from which a median says something
_FORMER = {"rotary", "rotary_eager"}
_COMPILED = ("gdpa_kernels/", "lab/gdpa_lab/measuring/machine_code.py")  # and what described it


def problems(runs: Sequence[Record]) -> Iterator[tuple[Record, str]]:
    """Yield the records that their neighbours contradict, with the reason; `runs`: all records."""
    rates = defaultdict(list)
    for run in runs:
        for ceiling in run.ceilings:
            if ceiling.samples_us:
                rates[run.system, _kind(ceiling)].append((run, _rate(ceiling)))
    for (system, kind), measured in rates.items():
        for run, rate in measured:
            others = [x for other, x in measured if other is not run]
            if len(others) >= _FEW and abs(rate / statistics.median(others) - 1) > ALIKE:
                reason = (
                    f"ceilings: the {kind[0]} of scope {kind[1]!r} must be within "
                    f"{100 * ALIKE:.0f} % of the {len(others)} other records of {system}, got "
                    f"{rate / statistics.median(others):.2f} times their median"
                )
                yield run, reason
    codes: dict[tuple[str, str], str] = {}
    for run in runs:
        yield from ((run, reason) for reason in _strange(run.rows))
        yield from ((run, reason) for reason in _other_codes(run, codes))


def _kind(ceiling: Ceiling) -> tuple[object, ...]:
    work = ceiling.flops, ceiling.bytes_read, ceiling.bytes_written
    return ceiling.kind, ceiling.scope, *work


def _rate(ceiling: Ceiling) -> float:
    work = ceiling.flops or ceiling.bytes_read + ceiling.bytes_written
    return work / statistics.median(ceiling.samples_us)


def _other_codes(run: Record, codes: dict[tuple[str, str], str]) -> Iterator[str]:
    """Yield the launches whose machine code is not that in `codes`, by sources and call, to which
    the others are added."""
    package = run.package.code or run.package.sources
    sources = json.dumps(sorted(x for x in package.items() if x[0].startswith(_COMPILED)))
    launches = {id(launch): launch for row in run.rows for launch in row.launches or ()}
    for launch in launches.values():
        call = {name: value for name, value in launch.items() if name != "code"}
        key = sources, json.dumps(call, sort_keys=True)
        if codes.setdefault(key, launch["code"]) != launch["code"]:
            yield (
                f"launches: the code of {launch['kernel']} must be {codes[key]}, as an older "
                f"record has it of the same call and sources, got {launch['code']}"
            )


@cache
def _names() -> tuple[frozenset[str], frozenset[str]]:
    """Rungs, and all implementations that records may hold."""
    rungs = {name for op in OPERATORS for way in DIRECTIONS for name in ladder.impls(op, way)}
    rungs -= {"reference"}
    return frozenset(rungs), frozenset(
        rungs | {"reference"} | {*BASELINES} | {*BLOCK_BASELINES} | {*STUDIES} | _FORMER
    )


def _strange(rows: Sequence[Row]) -> Iterator[str]:
    """Reasons why rows cannot be what they are called, or lack samples."""
    rungs, known = _names()
    spent: dict[tuple[str, str], dict[int, tuple[float, float]]] = defaultdict(dict)
    for i, row in enumerate(rows):
        if row.impl not in known:
            yield f"rows[{i}].impl must be an implementation or a baseline, got {row.impl!r}"
        kernels = (launch["kernel"] for launch in row.launches or ())
        launched = {name.split(":")[0].rpartition(".")[2] for name in kernels} & rungs
        if row.impl in rungs and launched and row.impl not in launched:
            yield f"rows[{i}].launches must be kernels of {row.impl}, got those of {min(launched)}"
        if row.scope == "sustained" and row.samples_us:
            us = statistics.median(row.samples_us)
            calls = CHUNK_US / us  # of a sample, rounded one way or the other
            least, most = (len(row.samples_us) * x * us for x in (int(calls) or 1, int(calls) + 1))
            spent[row.workload, row.direction][i] = least, most
    for times in spent.values():
        median = statistics.median(least for least, _ in times.values())
        for i, (_, most) in times.items():
            if len(times) > _FEW and most < LEAST_SHARE * median:
                yield (
                    f"rows[{i}].samples_us must take as long as those of its workload and "
                    f"direction, {median / 1e6:.2f} s of device time, got {most / 1e6:.2f} s"
                )
