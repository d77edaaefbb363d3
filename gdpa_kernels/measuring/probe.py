"""Kernels that have not been right on such a GPU yet run in a child process first.

A kernel that hangs, or an illegal address, after which its process can launch nothing more, then
costs one row and not the run. A rung is proven on GPUs of a compute capability (major.minor) by a
correct row of a record or of this run; what is proven is not tried here. The child makes the inputs
itself, and it has ended before anything is timed. What a chapter launches by itself is not covered.
"""

from __future__ import annotations

import importlib.util
import multiprocessing
import signal
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from multiprocessing import reduction
from multiprocessing.connection import Connection
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from gdpa_kernels.calling import ladder
from gdpa_kernels.measuring import measure, operators, record, system
from gdpa_kernels.measuring.inputs import make_inputs
from gdpa_kernels.measuring.measure import Attempt, Entry
from gdpa_kernels.measuring.workload import Workload

START_S = 300.0  # until the child has imported everything and made the inputs
LIMIT_S = 120.0  # until a kernel is compiled and has run twice
MOST_TIMEOUTS = 2  # of one rung in a run: one that hangs on every workload would cost hours

Proven = set[tuple[str, str, str]]


def proven(data_dir: str | Path, capability: str | None) -> Proven:
    """(operator, direction, impl) of the correct rows in the records of GPUs with a compute
    capability, "10.0". A refused record proves nothing."""
    found: Proven = set()
    for run in record.survey(data_dir)[0]:
        machine = system.load(Path(data_dir) / "systems" / f"{run.system}.json")
        if machine.compute_capability == capability:
            found |= _right(run.rows)
    return found


def _right(rows: Iterable[record.Row]) -> Proven:
    """What `rows` prove."""
    return {
        (row.operator, row.direction, row.impl)
        for row in rows
        if row.failure is None and row.error is not None and row.error.passed
    }


def is_unproven(
    impl: str, operator: str, direction: str, device: torch.device, known: Proven
) -> bool:
    """Whether `impl` is a rung with kernels that `device` can launch, and none of `known`."""
    name = "gdpa_backward" if (operator, direction) == ("gdpa", "backward") else operator
    rungs = {**ladder.STUDIES, **{rung.impl: rung for rung in ladder.LADDERS[name]}}
    if impl not in rungs or (operator, direction, impl) in known:
        return False
    needs = rungs[impl].requires
    return needs.capability is not None and needs.of_device(device) is None


class Probe:
    """What unproven rungs do in child processes of a measuring run."""

    def __init__(
        self,
        device: torch.device,
        known: Proven,
        log: Callable[[str], None] = print,
        *,
        limit_s: float = LIMIT_S,
        attempt: Callable[..., Attempt] = measure.attempt,
    ) -> None:
        self._device, self._known, self._log = device, {*known}, log
        self._limit_s, self._attempt = limit_s, attempt
        self._found: dict[tuple[str, str, str, str], Attempt] = {}
        self._timeouts: Counter[tuple[str, str]] = Counter()

    def failures(
        self, workload: Workload, impls: Sequence[Entry], direction: str = "forward"
    ) -> dict[int, Attempt]:
        """Why entries of `impls` must not run in this process, by their places; see `measure`."""
        child, failed = None, {}
        for place, (impl, variant, options) in enumerate(map(measure.parts, impls)):
            if not is_unproven(impl, workload.operator, direction, self._device, self._known):
                continue
            key = workload.name, direction, impl, variant
            if key not in self._found and self._timeouts[direction, impl] >= MOST_TIMEOUTS:
                text = f"not tried: timeouts on {MOST_TIMEOUTS} workloads of this run"
                self._found[key] = Attempt(failure=text)
            elif key not in self._found:
                self._log(f"  {impl}: unproven on this GPU, in a child process first")
                child = child or _Child(self._attempt, workload, direction, self._device)
                # Modules come first: the rest may refer to what is in them.
                options = sorted(options.items(), key=lambda x: not isinstance(x[1], ModuleType))
                self._found[key] = child.run((impl, variant, dict(options)), self._limit_s)
                self._timeouts[direction, impl] += child.timeout
                if self._found[key].failure is not None:
                    child = child.end()  # it may have written anywhere, or can launch nothing more
            if self._found[key].failure is not None:
                failed[place] = self._found[key]
        if child is not None:
            child.end()
        return failed

    def learn(self, rows: Iterable[record.Row]) -> None:
        """Let what the rows of this run prove run without a child process."""
        self._known |= _right(rows)


class _Child:
    """A process with the inputs of a workload."""

    def __init__(self, *what: Any) -> None:
        context = multiprocessing.get_context("spawn")
        self._connection, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs, *what), daemon=True)
        self._process.start()
        theirs.close()
        self._started = self.timeout = False

    def run(self, entry: Entry, limit_s: float) -> Attempt:
        """What comes of an entry; `timeout` is whether it came too late."""
        try:
            self._connection.send(entry)
            if not self._started:
                self._receive(START_S)
                self._started = True
            return self._receive(limit_s) or self._receive(None)  # None: it ran, now the check
        except TimeoutError as error:
            self.timeout = self._started
            return Attempt(failure=f"timeout {error}")
        except (EOFError, OSError):
            self._process.join(10)
            code = self._process.exitcode or 0
            how = signal.Signals(-code).name if code < 0 else f"status {code}"
            return Attempt(failure=f"its child process ended with {how}")
        except Exception as error:
            return Attempt(failure=f"no child process takes it: {measure.reason(error)}")

    def _receive(self, limit_s: float | None) -> Attempt | None:
        if not self._connection.poll(limit_s):
            raise TimeoutError(f"after {limit_s:g} s in a child process")
        return self._connection.recv()

    def end(self) -> None:
        self._process.kill()
        self._process.join(60)  # a kernel that hangs may keep its process for a while
        self._connection.close()


def _serve(
    connection: Connection,
    attempt: Callable[..., Attempt],
    workload: Workload,
    direction: str,
    device: torch.device,
) -> None:
    """What the child does: one entry after another, until it is ended."""
    operator = operators.of(make_inputs(workload, device=device), direction)
    connection.send(None)
    while True:
        found = attempt(connection.recv(), operator, ran=lambda: connection.send(None))
        connection.send(found._replace(made=None))
        del found
        measure.free()


def _module(name: str, file: str) -> ModuleType:
    """A module as it is where an entry comes from, changed copies of rungs included."""
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, file)
        sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[name])
    return sys.modules[name]


reduction.register(ModuleType, lambda module: (_module, (module.__name__, module.__file__)))
