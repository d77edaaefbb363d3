"""Check, time and record implementations on workloads; a notebook in measure mode calls this.

Nothing is timed behind a failed check: an implementation whose output misses its budget, or that
raises, gives a row with the reason and no samples.
"""

from __future__ import annotations

import gc
import math
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

import torch

from gdpa_kernels import operators, record, system, testing, timing
from gdpa_kernels.inputs import BlockInputs, Inputs, make_inputs
from gdpa_kernels.operators import Candidate
from gdpa_kernels.workload import Workload


def candidate(
    impl: str,
    inputs: Inputs | BlockInputs,
    *,
    direction: str = "forward",
    variant: str = "",
    **options: object,
) -> Candidate:
    """A rung or a baseline on `inputs`; `options` go to the rung, e.g. `config` or `schedule`.

    A rung's schedule is made here, outside what is timed, and so is what its backward needs of its
    forward; their cost is a measurement of its own. Raises whatever the baseline or rung raises
    when it cannot take the workload.
    """
    return operators.of(inputs, direction).candidate(impl, variant, **options)


def run_once(ready: Candidate) -> tuple[torch.Tensor | tuple[torch.Tensor, ...], int]:
    """One call on memory full of NaN: its result, and the most device memory it had allocated."""
    result = ready.call()
    with torch.no_grad():
        for tensor in _tensors(result):
            tensor.fill_(float("nan"))  # no earlier right answer for what is allocated next
    poison = [torch.full_like(tensor, float("nan")) for tensor in _tensors(result)]
    del result, poison
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    result = ready.call()
    torch.cuda.synchronize()
    return result, torch.cuda.max_memory_allocated() - before


def _tensors(result: torch.Tensor | tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
    return result if isinstance(result, tuple) else (result,)


def _error(comparisons: Sequence[testing.Comparison]) -> record.Error:
    """The comparison that comes closest to its budget, or exceeds it most, for all of them."""

    def share(comparison: testing.Comparison) -> tuple[bool, float]:
        share = comparison.max_abs / max(comparison.max_abs_budget, sys.float_info.min)
        return not comparison.passed, share if math.isfinite(share) else math.inf

    worst = max(comparisons, key=share)
    return record.Error(
        max_abs=worst.to_dict()["max_abs"],
        budget=worst.max_abs_budget,
        passed=all(comparison.passed for comparison in comparisons),
        elements=sum(comparison.elements for comparison in comparisons),
    )


def measure(
    workload: Workload,
    impls: Sequence[str | tuple[str, str, Mapping[str, object]]],
    *,
    device: torch.device,
    direction: str = "forward",
    protocol: timing.Protocol = timing.DEFAULT,
    scopes: Sequence[str] = ("kernel",),
    log: Callable[[str], None] = print,
) -> list[record.Row]:
    """Check and time `impls` on `workload` in `direction`; one row for each impl and scope.

    An entry of `impls` is a name, or (name, variant, options of the rung). Scopes: "kernel", all
    kernels of the pass; "op", the public call of a rung, or autograd's backward of it; "schedule",
    what makes the lists and offsets that the kernels were given. The error of a backward row is
    that of the gradient closest to its budget.
    """
    inputs = make_inputs(workload, device=device)
    operator = operators.of(inputs, direction)
    ready: list[tuple[Candidate, record.Error, int]] = []
    rows: list[record.Row] = []
    for entry in impls:
        impl, variant, options = (entry, "", {}) if isinstance(entry, str) else entry
        common = {"impl": impl, "variant": variant, "scope": "kernel", "math": operator.math(impl)}
        try:
            made = candidate(impl, inputs, direction=direction, variant=variant, **options)
            result, peak = run_once(made)
            comparisons = operator.check(made.math, _tensors(result))
            del result
        except Exception as error:
            lines = str(error).strip().splitlines() or [""]
            text = f"{type(error).__name__}: {lines[0][:300]}"
            rows.append(record.Row.of(workload, direction, **common, failure=text))
            log(f"  {impl}{' ' + variant if variant else ''}: {text}")
            _free()
            continue
        error = _error(comparisons)
        if error.passed:
            ready.append((made, error, peak))
        else:
            failed = "; ".join(str(c) for c in comparisons if not c.passed)
            text = f"check failed: {failed}"
            rows.append(record.Row.of(workload, direction, **common, error=error, failure=text))
            log(f"  {impl}: {text}")
        _free()
    operator = operators.of(inputs, direction)  # without what it remembered to check
    _free()
    for scope in scopes:
        functions = _functions(scope, operator, [made for made, _, _ in ready])
        sampler = timing.sample_ops if scope == "op" else timing.sample_kernels
        samples = sampler(functions, device, protocol)
        for made, error, peak in ready:
            times = samples.get(f"{made.impl} {made.variant}")
            if times is None:
                continue
            what = {"error": error, "peak_bytes": peak, "config": dict(made.config)}
            if scope == "schedule":
                what = {"flops": 0, "bytes_read": 0, "bytes_written": 0}
            rows.append(
                record.Row.of(
                    workload, direction, impl=made.impl, variant=made.variant, scope=scope,
                    math=made.math, samples_us=times, **what,
                )
            )  # fmt: skip
            if scope == "kernel":
                median = sorted(times)[len(times) // 2]
                rate = workload.flops(direction) / median / 1e6
                speed = workload.bytes(direction) / median / 1e3
                log(
                    f"  {made.impl} {made.variant}: {median:.0f} us, {rate:.0f} TFLOP/s, "
                    f"{speed:.0f} GB/s"
                )
    return rows


def _functions(
    scope: str, operator: operators.Gdpa | operators.BlockAttention, ready: Iterable[Candidate]
) -> dict[str, Callable[[], object]]:
    """What is timed in `scope`, by implementation and variant; variants have no public call."""
    if scope == "kernel":
        return {f"{made.impl} {made.variant}": made.call for made in ready}
    if scope not in ("op", "schedule"):
        raise ValueError(f"scopes must be among 'kernel', 'op', 'schedule', got {scope!r}")
    make = operator.op if scope == "op" else operator.schedule
    found = {made.impl: make(made.impl) for made in ready if not made.variant}
    return {f"{impl} ": function for impl, function in found.items() if function is not None}


def _free() -> None:
    gc.collect()
    torch.cuda.empty_cache()


class Session:
    """One measuring run: state before, ceilings, rows and tables, then one record.

    >>> session = Session("notebooks/10_figures.py", device)      # doctest: +SKIP
    >>> session.measure(workload("gdpa-self-full-1024"), ["v1_tiled", "fa2_varlen"])
    >>> path = session.write(data_dir)
    """

    def __init__(
        self,
        notebook: str,
        device: torch.device | str,
        protocol: timing.Protocol = timing.DEFAULT,
        log: Callable[[str], None] = lambda text: print(text, file=sys.stderr, flush=True),
    ) -> None:
        self.device = torch.device(device)
        if self.device.type != "cuda":
            raise ValueError(f"device must be a CUDA device to measure, got {device!r}")
        if self.device.index is None:
            self.device = torch.device("cuda", torch.cuda.current_device())
        self.notebook = notebook
        self.protocol = protocol
        self.log = log
        self.system = system.describe(self.device.index)
        self.before = system.state(self.device.index)
        self.ceilings = timing.measure_ceilings(self.device, protocol)
        self._has_attention_copies = False
        self.rows: list[record.Row] = []
        self.tables: dict[str, record.Table] = {}
        self.workloads: dict[str, Workload] = {}

    def measure(
        self,
        workload: Workload,
        impls: Sequence,
        *,
        direction: str = "forward",
        scopes: Sequence[str] = ("kernel",),
    ) -> None:
        """Check and time `impls` on `workload`; see `measure`.

        The first workload of block attention adds copies of its mixes to the ceilings.
        """
        self.log(f"{workload.name}, {direction}")
        if workload.operator == "block_attention" and not self._has_attention_copies:
            self.ceilings += timing.measure_attention_copies(self.device, self.protocol)
            self._has_attention_copies = True
        self.workloads[workload.name] = workload
        self.rows += measure(
            workload, impls, device=self.device, direction=direction, protocol=self.protocol,
            scopes=scopes, log=self.log,
        )  # fmt: skip
        _free()

    def add(self, workload: Workload, *rows: record.Row) -> None:
        """Add rows measured by other means on `workload`."""
        self.workloads[workload.name] = workload
        self.rows += rows

    def tabulate(
        self, name: str, columns: Sequence[str], samples: Mapping[tuple, Sequence[float]]
    ) -> None:
        """Keep samples that belong to no workload: a table with one row for each of them.

        `samples` maps values of `columns` to microseconds.
        """
        self.tables[name] = record.Table(
            (*columns, "sample", "time_us"),
            tuple((*key, i, t) for key, times in samples.items() for i, t in enumerate(times)),
        )

    def write(self, data_dir: str | Path) -> Path:
        """Write the record, and the system's file if it is new; the record's path."""
        stem = Path(self.notebook).stem
        system.save(self.system, data_dir)
        return record.write(
            record.new_record(
                command=f'make measure NOTEBOOKS="{stem.split("_")[0]}"',
                notebook=self.notebook,
                system=self.system,
                state_before=self.before,
                state_after=system.state(self.device.index),
                protocol=record.Protocol(
                    timer="cuda events (scope kernel), host clock (scope op)",
                    warmup=self.protocol.warmup,
                    samples=self.protocol.samples,
                    l2_flush_bytes=self.protocol.l2_flush_bytes,
                    interleaved=self.protocol.interleaved,
                    statistic="one call",
                ),
                workloads=self.workloads.values(),
                rows=self.rows,
                ceilings=[record.Ceiling(**asdict(ceiling)) for ceiling in self.ceilings],
                tables=self.tables,
            ),
            data_dir,
        )
