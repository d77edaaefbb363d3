"""Check, time and record implementations on workloads; a notebook in measure mode calls this.

Nothing is timed behind a failed check: an implementation whose output misses its budget, or that
raises, gives a row with the reason and no samples.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch

from gdpa_kernels import baselines, ladder, record, system, testing, timing
from gdpa_kernels.gdpa import reference
from gdpa_kernels.inputs import Inputs, make_inputs
from gdpa_kernels.workload import Workload


@dataclass
class Candidate:
    """One implementation ready to run on one workload: the call to be timed, and its constants."""

    impl: str
    math: str
    call: Callable[[], torch.Tensor]
    config: Mapping[str, object] = field(default_factory=dict)
    variant: str = ""


def candidate(impl: str, inputs: Inputs, *, variant: str = "", **options: object) -> Candidate:
    """A rung or a baseline on `inputs`; `options` go to the rung, e.g. `config` or `schedule`.

    A rung's schedule is made here, outside what is timed; its cost is a measurement of its own.
    Raises whatever the baseline or rung raises when it cannot take the workload.
    """
    if impl in baselines.BASELINES:
        baseline = baselines.BASELINES[impl]
        available = baseline.availability()
        if not available.ok:
            raise baselines.Unsupported(available.reason)
        return Candidate(impl, baseline.math, baseline.prepare(inputs), {}, variant)
    module = ladder.rung(impl).module()
    arguments = inputs.rung_arguments()
    config = options.get("config")
    if hasattr(module, "default_config") and config is None:
        workload = inputs.workload
        config = options["config"] = ladder.rung(impl).config(
            workload.head_dim,
            inputs.q.dtype,
            inputs.max_seqlen_k,
            inputs.k.shape[0] / max(inputs.cu_seqlens_k.numel() - 1, 1),
            workload.causal or workload.window is not None,
        )
    if hasattr(module, "make_schedule") and "schedule" not in options:
        options["schedule"] = module.make_schedule(
            inputs.q, inputs.cu_seqlens_q, inputs.cu_seqlens_k, inputs.max_seqlen_q, config
        )
    return Candidate(
        impl,
        "activation",
        lambda: module.forward(**arguments, **options),
        asdict(config) if config is not None else {},
        variant,
    )


class Oracle:
    """The fp64 result and the PyTorch result in the inputs' dtype, per kind of mathematics."""

    def __init__(self, inputs: Inputs) -> None:
        self._inputs = inputs
        self._results: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}

    def check(self, kind: str, out: torch.Tensor) -> testing.Comparison:
        """Compare `out` with the mathematics `kind`, "activation" or "softmax"."""
        if kind not in self._results:
            self._results[kind] = tuple(
                self._compute(kind, dtype) for dtype in (torch.float64, self._inputs.q.dtype)
            )
        expected, baseline = self._results[kind]
        return testing.compare(name="out", actual=out, expected=expected, baseline=baseline)

    def _compute(self, kind: str, dtype: torch.dtype) -> torch.Tensor:
        if kind == "softmax":
            return baselines.softmax_reference(self._inputs, dtype)
        arguments = self._inputs.rung_arguments()
        arguments |= {name: arguments[name].to(dtype) for name in ("q", "k", "v")}
        return reference.forward(**arguments)


def run_once(ready: Candidate) -> tuple[torch.Tensor, int]:
    """One call on memory full of NaN: its output, and the most device memory it had allocated."""
    out = ready.call()
    poison = torch.full_like(out, float("nan"))
    del out, poison  # the next allocation of this size finds NaN, not an earlier right answer
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    out = ready.call()
    torch.cuda.synchronize()
    return out, torch.cuda.max_memory_allocated() - before


def measure(
    workload: Workload,
    impls: Sequence[str | tuple[str, str, Mapping[str, object]]],
    *,
    device: torch.device,
    protocol: timing.Protocol = timing.DEFAULT,
    scopes: Sequence[str] = ("kernel",),
    log: Callable[[str], None] = print,
) -> list[record.Row]:
    """Check and time `impls` on `workload`, forward; one row for each impl and scope.

    An entry of `impls` is a name, or (name, variant, options of the rung).
    """
    inputs = make_inputs(workload, device=device)
    oracle = Oracle(inputs)
    ready: list[tuple[Candidate, record.Error, int]] = []
    rows: list[record.Row] = []
    for entry in impls:
        impl, variant, options = (entry, "", {}) if isinstance(entry, str) else entry
        common = {"impl": impl, "variant": variant, "scope": "kernel", "math": _math(impl)}
        try:
            made = candidate(impl, inputs, variant=variant, **options)
            out, peak = run_once(made)
            comparison = oracle.check(made.math, out)
            del out
        except Exception as error:
            text = f"{type(error).__name__}: {str(error).strip().splitlines()[0][:300]}"
            rows.append(record.Row.of(workload, "forward", **common, failure=text))
            log(f"  {impl}{' ' + variant if variant else ''}: {text}")
            _free()
            continue
        error = record.Error(
            max_abs=comparison.to_dict()["max_abs"],
            budget=comparison.max_abs_budget,
            passed=comparison.passed,
            elements=comparison.elements,
        )
        if comparison.passed:
            ready.append((made, error, peak))
        else:
            text = f"check failed: {comparison}"
            rows.append(record.Row.of(workload, "forward", **common, error=error, failure=text))
            log(f"  {impl}: {text}")
        _free()
    del oracle
    _free()
    functions = {f"{made.impl} {made.variant}": made.call for made, _, _ in ready}
    for scope in scopes:
        sampler = timing.sample_kernels if scope == "kernel" else timing.sample_ops
        if scope == "op":
            functions = _ops(inputs, [made for made, _, _ in ready])
        samples = sampler(functions, device, protocol)
        for made, error, peak in ready:
            times = samples.get(f"{made.impl} {made.variant}")
            if times is None:
                continue
            rows.append(
                record.Row.of(
                    workload, "forward", impl=made.impl, variant=made.variant, scope=scope,
                    math=made.math, config=dict(made.config), samples_us=times, error=error,
                    peak_bytes=peak,
                )
            )  # fmt: skip
            if scope == "kernel":
                median = sorted(times)[len(times) // 2]
                rate = workload.flops("forward") / median / 1e6
                log(f"  {made.impl} {made.variant}: {median:.0f} us, {rate:.0f} TFLOP/s")
    return rows


def _ops(inputs: Inputs, ready: Iterable[Candidate]) -> dict[str, Callable[[], torch.Tensor]]:
    """The whole public call of each rung: checks, schedule, launch."""
    from gdpa_kernels import gdpa

    arguments = inputs.arguments()
    rungs = {rung.impl for rung in ladder.RUNGS}
    return {
        f"{made.impl} {made.variant}": lambda impl=made.impl: gdpa(**arguments, impl=impl)
        for made in ready
        if made.impl in rungs and not made.variant
    }


def _math(impl: str) -> str:
    return baselines.BASELINES[impl].math if impl in baselines.BASELINES else "activation"


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
        self.rows: list[record.Row] = []
        self.tables: dict[str, record.Table] = {}
        self.workloads: dict[str, Workload] = {}

    def measure(
        self, workload: Workload, impls: Sequence, *, scopes: Sequence[str] = ("kernel",)
    ) -> None:
        """Check and time `impls` on `workload`; see `measure`."""
        self.log(f"{workload.name}")
        self.workloads[workload.name] = workload
        self.rows += measure(
            workload, impls, device=self.device, protocol=self.protocol, scopes=scopes, log=self.log
        )
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
