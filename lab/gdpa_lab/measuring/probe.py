"""Measures kernels not yet verified on this GPU architecture in a child process.

A kernel that hangs or corrupts its CUDA context then costs its own rows, not the run. The child
first launches each rung `LAUNCHES` times on a jagged batch and compares every result, since some
faults appear only among consecutive launches (facebookexperimental/triton#3492). A correct row of a
record verifies a rung on GPUs of that compute capability: it is then measured in the parent.
"""

from __future__ import annotations

import importlib.util
import multiprocessing
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from multiprocessing import reduction
from multiprocessing.connection import Connection
from pathlib import Path
from types import MappingProxyType, ModuleType
from typing import Any

import torch

from gdpa_kernels.calling import ladder
from gdpa_kernels.calling.rung import Rung
from gdpa_lab.measuring import measure, operators, record, studies, system
from gdpa_lab.measuring.inputs import make_inputs
from gdpa_lab.measuring.length_distributions import Full, Uniform
from gdpa_lab.measuring.measure import Entry, Stage
from gdpa_lab.measuring.workload import Workload

LIMITS_S: Mapping[str, float | None] = {
    "start": 300.0, "inputs": 300.0, "run": 120.0, "check": None, "launches": 120.0,
    "time": 120.0,
}  # fmt: skip
"""The stages of a child, and time limits until the next one: everything imported, inputs made, a
kernel compiled and run twice, checked, launched `LAUNCHES` times, timed in a scope."""
MOST_LOST_S = 240.0  # with a rung that fails: on every workload it would cost hours
LAUNCHES, IN_A_ROW = 10_000, 50
JAGGED_TOKENS = 2**15

Rungs = set[tuple[str, str, str]]
"""(operator, direction, impl) of each."""


def verified(data_dir: str | Path, capability: str | None) -> Rungs:
    """Collect the rungs of the correct rows in the records of GPUs with a compute capability,
    "10.0". Refused records do not count."""
    rungs: Rungs = set()
    for run in record.survey(data_dir)[0]:
        machine = system.by_id(run.system, data_dir)
        if machine.compute_capability == capability:
            rungs |= _correct(run.rows)
    return rungs


def _correct(rows: Iterable[record.Row]) -> Rungs:
    """Collect the rungs of the correct rows."""
    return {(row.operator, row.direction, row.impl) for row in rows if row.passed}


def _is_usable(row: record.Row) -> bool:
    """Return whether it was timed, or right and not timed since a call waited."""
    return row.failure is None or (row.error is not None and row.error.passed)


def _rung(impl: str, operator: str, direction: str) -> Rung | None:
    rungs = *studies.STUDIES.values(), *ladder.LADDERS[operator]
    return next((x for x in rungs if x.impl == impl and direction in x.directions), None)


def is_unverified(
    impl: str, operator: str, direction: str, device: torch.device, known: Rungs
) -> bool:
    """Return whether `impl` is a rung that `device` can launch, and none of `known`."""
    rung = _rung(impl, operator, direction)
    if rung is None or (operator, direction, impl) in known:
        return False
    return rung.requires.capability is not None and rung.requires.device_problem(device) is None


class Probe:
    """Measures unverified rungs in child processes."""

    def __init__(
        self,
        device: torch.device,
        known: Rungs,
        log: Callable[[str], None] = print,
        *,
        limits_s: Mapping[str, float | None] = MappingProxyType(LIMITS_S),
        most_lost_s: float = MOST_LOST_S,
        in_child: Callable[..., list[record.Row]] | None = None,
    ) -> None:
        self._device, self._log, self._in_child = device, log, in_child or trial
        self._known, self._verified = frozenset(known), {*known}
        self._limits_s, self._most_lost_s = limits_s, most_lost_s
        self._launched: set[tuple[str, ...]] = set()
        self._lost_s: Counter[tuple[str, ...]] = Counter()

    def measure(
        self,
        workload: Workload,
        impls: Sequence[Entry],
        direction: str = "forward",
        *,
        scopes: measure.Scopes = ("kernel",),
        **how: Any,
    ) -> dict[int, list[record.Row]]:
        """Measure the unverified entries of `impls` in child processes; return their rows by index.
        See `measure.measure`."""
        child, measured = None, {}
        how |= {"device": self._device, "direction": direction, "scopes": scopes}
        for index, entry in enumerate(impls):
            impl, variant, options = measure.parts(entry)
            if not is_unverified(impl, workload.operator, direction, self._device, self._known):
                continue
            rung, begin = (workload.operator, direction, impl), time.monotonic()
            if self._lost_s[rung] >= self._most_lost_s:
                failure = f"not tried: {self._lost_s[rung]:.0f} s of this run were lost on it"
            else:
                self._log(f"  {impl}: unverified on this GPU, in a child process")
                child = child or _Child(self._in_child, workload, how, self._limits_s, self._log)
                # Modules come first: the rest may refer to what is in them.
                options = sorted(options.items(), key=lambda x: not isinstance(x[1], ModuleType))
                launches = 0 if (*rung, variant) in self._launched else LAUNCHES
                rows, failure = child.run((impl, variant, dict(options)), launches)
                if any(map(_is_usable, rows)):
                    self._launched.add((*rung, variant))
                elif child.may_be_broken:
                    child.end()
                    child = None
                    self._lost_s[rung] += time.monotonic() - begin
            if failure is not None:
                self._log(f"  {impl}: {failure}")
                attempt = measure.Attempt(failure=failure)
                rows = measure.failed_rows(workload, direction, scopes, entry, attempt)
            measured[index] = rows
            self._verified |= _correct(rows)
        if child is not None:
            child.end()
        return measured

    def problem(self, impls: Iterable[str], operator: str, direction: str) -> str | None:
        """Return why one of `impls` must not be launched in this process, or None: the device
        cannot run it, or neither a record nor this run has a correct row of it."""
        for impl in impls:
            rung = _rung(impl, operator, direction)
            wrong = rung and rung.requires.device_problem(self._device)
            if wrong is not None:
                return f"{impl} {wrong}"
            if is_unverified(impl, operator, direction, self._device, self._verified):
                return f"{impl} has not been right on this GPU"
        return None


class _Child:
    """A process that measures entries on a workload."""

    def __init__(
        self,
        in_child: Callable[..., list[record.Row]],
        workload: Workload,
        how: Mapping[str, Any],
        limits_s: Mapping[str, float | None],
        log: Callable[[str], None],
    ) -> None:
        context = multiprocessing.get_context("spawn")
        self._connection, theirs = context.Pipe()
        self._process = context.Process(
            target=_serve, args=(theirs, in_child, workload, how), daemon=True
        )
        self._process.start()
        theirs.close()
        self._limits_s, self._log, self._stage = limits_s, log, "start"
        self.may_be_broken = False
        """Whether the last entry launched kernels, which may have written anywhere, or ended it."""

    def run(self, entry: Entry, launches: int) -> tuple[list[record.Row], str | None]:
        """Return the rows of an entry, and why there are none."""
        self.may_be_broken = False
        try:
            self._connection.send((entry, launches))
            while self._connection.poll(self._limits_s[self._stage]):
                kind, what = self._connection.recv()
                if kind == "rows":
                    return what, None
                if kind == "failure":
                    return [], what
                if kind == "log":
                    self._log(what)
                else:
                    self._stage = what
                    self.may_be_broken |= what == "run"
            limit = f"{self._limits_s[self._stage]:g} s"
            why = f"timeout after {limit} in a child process ({self._stage})"
        except (EOFError, OSError):
            self._process.join(10)
            code = self._process.exitcode or 0
            how = signal.Signals(-code).name if code < 0 else f"status {code}"
            why = f"its child process ended with {how} ({self._stage})"
        except Exception as error:
            why = f"no child process takes it: {measure.reason(error)}"
        self.may_be_broken = True
        return [], why

    def end(self) -> None:
        self._process.kill()
        self._process.join(60)  # a kernel that hangs may keep its process for a while
        self._connection.close()


def _serve(
    connection: Connection,
    in_child: Callable[..., list[record.Row]],
    workload: Workload,
    how: Mapping[str, Any],
) -> None:
    """Run the loop of a child: measure one entry after another until it is killed."""
    tell = {
        kind: lambda what, kind=kind: connection.send((kind, what)) for kind in ("stage", "log")
    }
    while True:
        entry, launches = connection.recv()
        try:
            answer = "rows", in_child(entry, workload, launches=launches, **how, **tell)
        except Exception as error:
            answer = "failure", measure.reason(error)
        connection.send(answer)
        measure.free()


def trial(
    entry: Entry,
    workload: Workload,
    *,
    launches: int,
    **how: Any,
) -> list[record.Row]:
    """Measure an entry after launching it `launches` times."""
    if launches:
        launching = {name: how[name] for name in ("device", "direction", "stage")}
        launch_often(entry, workload, launches, **launching)
    return measure.measure(workload, [entry], **how)


def launch_often(
    entry: Entry,
    workload: Workload,
    launches: int = LAUNCHES,
    *,
    device: torch.device,
    direction: str = "forward",
    stage: Stage = lambda name: None,
) -> None:
    """Launch an entry again and again on a small `jagged` batch of a workload's kind, `IN_A_ROW`
    times between comparisons, each in memory full of NaN. ValueError if a result is wrong: the
    first is compared with fp64, the others with the first."""
    impl, variant, options = measure.parts(entry)
    stage("inputs")
    operator = operators.of(make_inputs(jagged(workload), device=device), direction)
    ready = operator.candidate(impl, variant, **options)
    stage("run")
    first = measure.tensors(ready.call())
    stage("check")
    checks = operator.check(ready.math, first)
    wrong = [str(check) for check in checks if not check.passed]
    if wrong:
        raise ValueError(f"launch 1 of {launches:,} on a jagged batch: {'; '.join(wrong)}")
    stage("launches")
    for begin in range(1, launches, IN_A_ROW):
        count = min(IN_A_ROW, launches - begin)
        results = [measure.tensors(ready.call()) for _ in range(count)]
        distances = [
            (one.float() - right.float()).abs().max()
            for result in results
            for one, right in zip(result, first, strict=True)
        ]
        for index, most in enumerate(torch.stack(distances).tolist()):
            number, check = begin + 1 + index // len(first), checks[index % len(first)]
            budget = 2 * check.max_abs_budget
            if not most <= budget:
                where = f"launch {number:,} of {launches:,} on a jagged batch: {check.name}"
                raise ValueError(
                    f"{where} must be within {budget:.3g} of the first, got {most:.3g}"
                )
        for result in results:
            for tensor in result:
                tensor.fill_(float("nan"))


def jagged(workload: Workload) -> Workload:
    """Derive a workload of the same kind with few sequences of 1 to the most tokens."""
    longest = max(workload.max_seqlen_q, workload.max_seqlen_k)
    few = min(4, 2 * JAGGED_TOKENS // longest)
    return replace(
        workload,
        name=f"{workload.name}-jagged",
        batch=max(few, min(workload.batch, JAGGED_TOKENS // longest)),
        lengths_q=Full() if workload.shared_q else Uniform(0.5),
        lengths_k=None if workload.lengths_k is None else Uniform(0.5),
    )


def _module(name: str, file: str) -> ModuleType:
    """Import a module from its file, changed copies of rungs included."""
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, file)
        sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[name])
    return sys.modules[name]


reduction.register(ModuleType, lambda module: (_module, (module.__name__, module.__file__)))
