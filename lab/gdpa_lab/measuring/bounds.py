"""Refuses records of the right structure that cannot be true: contradictions and physical bounds.

Rates are bounded by the ceilings of the same record, and by the machine (`systems/`): all tensor
cores at the highest clock, all pins of the memory at theirs. Mean power is energy over time. An
error budget cannot be recomputed without the tensors; it is made of PyTorch's error, which is of a
few roundings.
"""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Iterator, Mapping
from functools import cache
from typing import TYPE_CHECKING, Any

from gdpa_lab.measuring.roofline import Ceilings
from gdpa_lab.measuring.rows import FACTOR, Ceiling, Row, Table, work
from gdpa_lab.measuring.system import System

if TYPE_CHECKING:
    from gdpa_lab.measuring.run import Record

MOST_PERCENT = 105
"""Of the roofline, at the median. Kernels and ceilings are timed minutes apart, at clocks that
differ by a few percent; the records of an H200 reach 100.6."""

_MOST_SEQUENCES = 1 << 20

FLOPS = {
    "8.0": 2048, "8.6": 1024, "8.9": 1024, "9.0": 4096, "10.0": 8192, "10.3": 8192, "12.0": 1024,
}  # fmt: skip
"""Dense 16-bit FLOPs of an SM per clock, by compute capability; others get the maximum. From the
data sheets of A100, A40, L40S, H100, B200, B300, RTX PRO 6000: rate over SMs and boost clock."""

BUS_BITS = {
    "8.0": 5120, "8.6": 384, "8.9": 384, "9.0": 6144, "10.0": 8192, "10.3": 8192, "12.0": 512,
}  # fmt: skip
"""Bits of the widest memory bus sold, by compute capability; others get the maximum. From the data
sheets of A100, A40, L40S, H200, B200, B300, RTX PRO 6000. Two bits per pin and clock."""

SAME = 1e-12
"""Tolerance between two ways to compute a number in double precision."""

MOST_ROUNDINGS = 64
"""Most of PyTorch's error over the rounding of what is right; 14 in the records."""


def contradictions(run: Record) -> Iterator[str]:
    """Yield why the values of a record do not fit each other; a later reason may need that there is
    no earlier one."""
    yield from _wrong_rows(run)
    yield from _wrong_work(run)
    yield from _wrong_tables(run.tables)
    scopes = {ceiling.scope for ceiling in run.ceilings} | {"kernel"}
    limits = {scope: Ceilings.measured(run.ceilings, scope) for scope in scopes}
    for i, row in enumerate(run.rows):
        limit = limits.get("sustained" if row.scope == "sustained" else "kernel")
        if limit is None or not row.samples_us or not row.flops:
            continue
        floor = limit.floor_us(row.flops, row.bytes_read, row.bytes_written)
        percent = 100 * floor / statistics.median(row.samples_us)
        if percent > MOST_PERCENT:
            yield (
                f"rows[{i}].samples_us must be at most {MOST_PERCENT} % of the roofline that the "
                f"ceilings make, got {percent:.0f} %"
            )
    yield from _wrong_budgets(run)


def violations(run: Record, machine: System) -> Iterator[str]:
    """Yield why a record cannot be of `machine`."""
    timed = [(f"ceilings[{i}]", ceiling) for i, ceiling in enumerate(run.ceilings)]
    timed += [(f"rows[{i}]", row) for i, row in enumerate(run.rows)]
    for where, what in timed:
        if what.samples_us:
            yield from _too_fast(f"{where}.samples_us", what, machine)
            yield from _wrong_load(f"{where}.load", what, machine)


def _wrong_rows(run: Record) -> Iterator[str]:
    """Check that workloads, rows and the plan fit each other."""
    for name in run.workloads:
        try:
            workload = run.workload(name)
        except (TypeError, ValueError) as error:
            yield f"workloads.{name}: {error}"
            return
        if workload.name != name:
            yield f"workloads.{name}: name must be its key, got {workload.name!r}"
        if workload.batch > _MOST_SEQUENCES:  # its lengths are drawn one by one
            yield f"workloads.{name}.batch must be at most {_MOST_SEQUENCES}"
    seen: dict[tuple[str, ...], int] = {}
    for i, row in enumerate(run.rows):
        if row.workload not in run.workloads:
            known = sorted(run.workloads)
            yield f"rows[{i}].workload must be one of {known}, got {row.workload!r}"
        error = row.error
        if error and error.passed and (error.max_abs is None or error.max_abs > error.budget):
            yield (
                f"rows[{i}].error: max_abs must be at most the budget {error.budget} to pass, got "
                f"{error.max_abs}"
            )
        if row.key in seen:
            yield f"rows[{i}] must differ from rows[{seen[row.key]}], got {'/'.join(row.key)} twice"
        seen[row.key] = i
    for key in run.plan or ():
        if key not in seen:
            yield f"rows must hold {'/'.join(key)}, which the run planned, if only its failure"


def _wrong_work(run: Record) -> Iterator[str]:
    """Check operator, FLOPs and bytes of rows against those of their workload."""
    counted = cache(work)  # rows share the work of their workload
    for i, row in enumerate(run.rows):
        workload = run.workload(row.workload)
        kind = {name: getattr(row, name) for name in ("scope", "variant", "math")}
        try:
            expected = counted(workload, row.direction, **kind)
        except (ArithmeticError, ValueError) as error:
            yield f"rows[{i}]: the work of {workload.name!r} cannot be counted: {error}"
            continue
        for name, value in {"operator": workload.operator, **expected}.items():
            if getattr(row, name) != value:
                received = getattr(row, name)
                yield f"rows[{i}].{name} must be {value!r}, its workload's, got {received!r}"


def _wrong_tables(tables: Mapping[str, Table]) -> Iterator[str]:
    """Check the shape of tables and, of training steps, medians and rates against the samples."""
    rows = [
        (f"tables.{name}.rows[{i}]", table.columns, row)
        for name, table in tables.items() for i, row in enumerate(table.rows)
    ]  # fmt: skip
    for where, columns, row in rows:
        if len(row) != len(columns):
            yield f"{where} must have {len(columns)} values, got {len(row)}"
    times: dict[tuple[Any, ...], list[float]] = defaultdict(list)
    samples = tables.get("samples", Table((), ()))
    *keys, part = samples.columns[:-2] or [""]
    for *key, _, time_s in samples.rows if part == "part" else ():
        times[tuple(key)].append(time_s if isinstance(time_s, float) else math.nan)
    for where, columns, row in rows:
        values = dict(zip(columns, row, strict=True))
        for column in columns if columns[: len(keys)] == tuple(keys) else ():
            measured = times.get((*row[: len(keys)], column.removesuffix("_s")))
            if measured and values[column] != (median := statistics.median(measured)):
                yield f"{where}.{column} must be {median}, of its samples, got {values[column]}"
        step_s, rate, batch = map(values.get, ("step_s", "samples_per_s", "batch"))
        if isinstance(step_s, float) and isinstance(rate, float):
            count = step_s * rate
            whole = batch if isinstance(batch, int) else float(f"{count:.0f}")
            if not math.isclose(count, whole, rel_tol=SAME):
                yield f"{where}.samples_per_s must be a batch over step_s, got {count:.6g}"


def peak_tflops(machine: System) -> float:
    """TFLOP/s of all tensor cores at the highest clock; infinite where the machine is unknown."""
    if machine.num_sms is None or machine.max_sm_clock_mhz is None:
        return math.inf
    flops = FLOPS.get(machine.compute_capability or "", max(FLOPS.values()))
    return machine.num_sms * flops * machine.max_sm_clock_mhz / 1e6


def peak_gbytes_per_s(machine: System) -> float:
    """GB/s of the memory's pins at their highest clock; infinite where the machine is unknown."""
    if machine.max_memory_clock_mhz is None:
        return math.inf
    bits = BUS_BITS.get(machine.compute_capability or "", max(BUS_BITS.values()))
    return 2 * bits / 8 * machine.max_memory_clock_mhz / 1e3


def _too_fast(where: str, what: Ceiling | Row, machine: System) -> Iterator[str]:
    fastest, size = min(what.samples_us), what.bytes_read + what.bytes_written
    if (rate := what.flops / fastest / 1e6) > (most := peak_tflops(machine)):
        units = f"{machine.num_sms} SMs at {machine.max_sm_clock_mhz:.0f} MHz"
        yield f"{where} must be at most {most:.0f} TFLOP/s, {units}, got {rate:.0f}"
    size -= machine.l2_bytes or 0  # bytes that L2 may hold have not come from memory
    if (rate := size / fastest / 1e3) > (most := peak_gbytes_per_s(machine)):
        pins = f"memory at {machine.max_memory_clock_mhz:.0f} MHz"
        yield f"{where} must be at most {most:.0f} GB/s, {pins}, got {rate:.0f}"


def _wrong_load(where: str, what: Ceiling | Row, machine: System) -> Iterator[str]:
    load, most = what.load, machine.max_sm_clock_mhz
    if load and None not in (load.joules, load.power_w):
        watts = load.joules / statistics.fmean(what.samples_us) * 1e6
        if not math.isclose(watts, load.power_w, rel_tol=SAME):
            expected = f"{watts}, joules over the mean of samples_us"
            yield f"{where}.power_w must be {expected}, got {load.power_w}"
    if load and None not in (most, load.sm_clock_mhz) and load.sm_clock_mhz > most:
        yield f"{where}.sm_clock_mhz must be at most {most:.0f}, got {load.sm_clock_mhz:.0f}"


def _wrong_budgets(run: Record) -> Iterator[str]:
    """Check budgets against their bound and their number against the tensors compared: they depend
    on the inputs alone, so all rows of one mathematics share them."""
    budgets: dict[tuple[str, str, str], set[float]] = defaultdict(set)
    for i, row in enumerate(run.rows):
        if row.error is None:
            continue
        budget, must = row.error.budget, f"rows[{i}].error.budget must be"
        pytorch, rounding = row.error.pytorch, row.error.rounding
        if None not in (pytorch, rounding):
            expected = FACTOR * pytorch + rounding
            if not math.isclose(expected, budget, rel_tol=SAME):
                why = f"{FACTOR:g} times pytorch and rounding"
                yield f"{must} {expected:.6g}, {why}, got {budget:.6g}"
            if pytorch > MOST_ROUNDINGS * rounding:
                most = f"at most {MOST_ROUNDINGS} times rounding"
                yield f"rows[{i}].error.pytorch must be {most}, {rounding}, got {pytorch}"
        seen = budgets[row.workload, row.direction, row.math]
        seen.add(budget)
        tensors = 1 if row.direction == "forward" and row.math != "rotary" else 3
        if len(seen) > tensors:
            of = f"one of its workload, direction and math, of which {tensors} can differ"
            yield f"{must} {of}, got {budget:.6g} as another"
