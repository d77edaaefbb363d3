"""The parts of a record: protocol, ceilings, checks, rows and tables; the work a row counts."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from gdpa_lab.measuring.workload import DIRECTIONS, DTYPE_BYTES, STEP, Workload


@dataclass(frozen=True)
class Protocol:
    """How the rows of a record were timed.

    `timer`: what measured it, e.g. "cuda events". `warmup` and `samples`: calls before, and calls
    timed, per row. `l2_flush_bytes`: bytes written before each call to empty the L2 cache, 0 for
    none. `interleaved`: whether rows took turns. `statistic`: what one sample is, e.g. "one call".
    """

    timer: str
    warmup: int
    samples: int
    l2_flush_bytes: int
    interleaved: bool
    statistic: str


@dataclass(frozen=True)
class Load:
    """Load of a GPU during sustained calls; None for what the driver does not report.

    `sm_clock_mhz`: the median. `power_w`: the mean. `joules`: of one call. `throttle_reasons`:
    whatever held at some time.
    """

    sm_clock_mhz: float | None
    power_w: float | None
    joules: float | None
    throttle_reasons: tuple[str, ...] | None

    def __post_init__(self) -> None:
        if self.throttle_reasons is not None:
            object.__setattr__(self, "throttle_reasons", tuple(self.throttle_reasons))


@dataclass(frozen=True)
class Ceiling:
    """A limit of the device, measured in the same run.

    `kind`: "matmul" or "copy". `shape`: what ran, for people. `flops`, `bytes_read`,
    `bytes_written`: per call. `samples_us`: microseconds, one per timed call. `scope`: "kernel" or
    "sustained", as of a row; `load`: what came with the latter.
    """

    kind: str
    shape: str
    samples_us: tuple[float, ...] = ()
    flops: int = 0
    bytes_read: int = 0
    bytes_written: int = 0
    scope: str = "kernel"
    load: Load | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "samples_us", tuple(float(s) for s in self.samples_us))


@dataclass(frozen=True)
class Error:
    """Result of checking an output before it was timed.

    `max_abs`: largest absolute error against `reference`, None if the output was not finite.
    `budget`: largest error allowed. `elements`: numbers compared. `pytorch`, `rounding`: largest
    errors of PyTorch in the same dtype and of rounding alone, which make the budget (`testing`);
    None in older records.
    """

    max_abs: float | None
    budget: float
    passed: bool
    elements: int
    reference: str = "fp64"
    pytorch: float | None = None
    rounding: float | None = None

    @staticmethod
    def judge(max_abs: float, budget: float, *, elements: int) -> Error:
        """Build the error of a `max_abs`, which passes if it is finite and within `budget`."""
        largest = float(max_abs) if math.isfinite(max_abs) else None
        passed = largest is not None and largest <= budget
        return Error(largest, float(budget), passed, elements)


def reason(error: Exception) -> str:
    """Format an exception as the failure of a row."""
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[0][:300]}"


LEFT_OUT = "not measured: "
"""Prefix of the failure of a planned row that its run did not reach."""


@dataclass(frozen=True)
class Row:
    """One implementation on one workload.

    `workload`: a name in the record's `workloads`. `math`: "activation", "softmax", or "rotary" for
    rotary alone. `scope`: what was timed, see `measure.SCOPES`. `variant` tells apart rows that
    share all the rest, e.g. a schedule's order. `config`: constants of the implementation,
    of a peer the configurations that were tried.
    `flops`, `bytes_read`, `bytes_written`: useful FLOPs and fewest bytes of one call. `samples_us`:
    microseconds, one per timed call, of scope "sustained" the means of chunks of calls; empty when
    `failure` says why. `peak_bytes`: most device memory allocated during one call, None if not
    measured. `load`: of the GPU, with samples of scope "sustained" alone. `launches`: of our
    kernels, by one call of what was timed, as `machine_code.describe` has them; None if not known.
    """

    workload: str
    operator: str
    direction: str
    impl: str
    math: str
    scope: str
    flops: int
    bytes_read: int
    bytes_written: int
    samples_us: tuple[float, ...] = ()
    error: Error | None = None
    failure: str | None = None
    variant: str = ""
    config: Mapping[str, Any] = field(default_factory=dict)
    peak_bytes: int | None = None
    load: Load | None = None
    launches: tuple[Mapping[str, Any], ...] | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "samples_us", tuple(float(s) for s in self.samples_us))
        if self.launches is not None:
            object.__setattr__(self, "launches", tuple(self.launches))

    @staticmethod
    def of(workload: Workload, direction: str, **values: Any) -> Row:
        """Build a row with the operator of `workload` and its `work` as FLOPs and bytes.

        `values` are the other fields; a value for one of those replaces it.
        """
        kind = {name: values[name] for name in ("scope", "variant", "math") if name in values}
        derived = {"operator": workload.operator, **work(workload, direction, **kind)}
        return Row(workload=workload.name, direction=direction, **{**derived, **values})

    @property
    def passed(self) -> bool:
        """True if it was measured and its check passed."""
        return self.failure is None and self.error is not None and self.error.passed

    @property
    def is_left_out(self) -> bool:
        """True if the run ended before it reached this row."""
        return (self.failure or "").startswith(LEFT_OUT)

    @property
    def key(self) -> tuple[str, ...]:
        """Identity of a row within its record."""
        return (self.workload, self.direction, self.impl, self.scope, self.variant)


@dataclass(frozen=True)
class Table:
    """Other measurements of a notebook: named columns, rows of plain values."""

    columns: tuple[str, ...]
    rows: tuple[tuple[Any, ...], ...]

    def __post_init__(self) -> None:
        object.__setattr__(self, "columns", tuple(self.columns))
        object.__setattr__(self, "rows", tuple(tuple(row) for row in self.rows))


def work(
    workload: Workload, direction: str, *, scope: str, math: str, variant: str = ""
) -> dict[str, int]:
    """Useful FLOPs and fewest bytes of one call, as fields of a row.

    Those of `workload` in `direction`, with these exceptions: a schedule and the time on the host
    count nothing; an op that is a whole step counts both directions; rotary alone counts three
    FLOPs for each element it rotates, each read and written once, and sines and cosines read once.
    """
    names = ("flops", "bytes_read", "bytes_written")
    if scope in ("schedule", "host"):
        return dict.fromkeys(names, 0)
    if math == "rotary":
        return dict(zip(names, _rotary_alone(workload), strict=True))
    directions = DIRECTIONS if (scope, variant) == ("op", STEP) else (direction,)
    return {name: sum(map(getattr(workload, name), directions)) for name in names}


def _rotary_alone(workload: Workload) -> tuple[int, int, int]:
    """Count FLOPs, bytes read and bytes written of rotary alone."""
    if not workload.rotary:
        raise ValueError(f"workload must have rotary, got {workload.name!r} without")
    heads = workload.num_heads_q + workload.num_heads_k * (2 if workload.rotate_v else 1)
    row = workload.total_q * workload.head_dim  # of one head; of sines and cosines together
    size = DTYPE_BYTES[workload.dtype]
    return 3 * heads * row, (heads + 1) * row * size, heads * row * size
