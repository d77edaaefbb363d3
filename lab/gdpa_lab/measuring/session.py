"""A measuring session, from its first ceiling to its record; chapters in measure mode hold one."""

from __future__ import annotations

import gc
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import torch

from gdpa_lab.measuring import (
    manifest,
    measure,
    probe,
    profiling,
    record,
    sustained,
    system,
    timing,
)
from gdpa_lab.measuring.inputs import BlockInputs, Inputs, make_inputs
from gdpa_lab.measuring.measure import ON_DEVICE, Scopes, asks, free, parts
from gdpa_lab.measuring.operators import math as math_of
from gdpa_lab.measuring.require import require
from gdpa_lab.measuring.rows import LEFT_OUT, reason
from gdpa_lab.measuring.workload import Workload

HANDLE_VARIABLE = "GDPA_KERNELS_HANDLE"
ONLY_VARIABLE = "GDPA_KERNELS_ONLY"
"""Variable with a pattern: a session leaves out all workloads whose names do not match."""


class Session:
    """One measuring run: state before, ceilings, rows and tables, then one record.

    A rung that no record in `data_dir` verifies on such a GPU is measured in a child process; see
    `probe`.

    Attributes: device, notebook, protocol and log, as given; system and before, the machine and its
    state at the start; ceilings, rows, and tables and workloads by name, so far; broken, what
    raised in `launch`, and why.

    >>> session = Session("notebooks/forward/results.py", device)      # doctest: +SKIP
    >>> session.measure(workload("gdpa-self-full-1024"), ["v1_tiled", "fa2_varlen"])
    >>> path = session.write(data_dir)
    """

    def __init__(
        self,
        notebook: str,
        device: torch.device | str,
        protocol: timing.Protocol = timing.DEFAULT,
        log: Callable[[str], None] = lambda text: print(text, file=sys.stderr, flush=True),
        *,
        data_dir: str | Path = record.DATA_DIR,
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
        known = probe.verified(data_dir, self.system.compute_capability)
        self._probe = probe.Probe(self.device, known, log)
        self.ceilings: list[record.Ceiling] = []
        self._limits: set[tuple[Callable, str]] = set()
        self._add_ceilings(timing.limits, "kernel")
        self.rows: list[record.Row] = []
        self._plan: dict[tuple[str, ...], tuple[Workload, str]] = {}
        self._partial: Path | None = None
        self.tables: dict[str, record.Table] = {}
        self.broken: list[str] = []
        self.workloads: dict[str, Workload] = {}

    def measure(
        self,
        workload: Workload,
        impls: Sequence,
        *,
        direction: str = "forward",
        scopes: Scopes = ("kernel",),
        seconds: float = sustained.SECONDS,
    ) -> None:
        """Check and time `impls` on `workload`; see `measure`.

        The first workload of block attention, or the first backward, adds copies of attention's
        mixes to the ceilings; scope "sustained" adds ceilings of that scope.
        """
        if not self.asks(workload):
            return
        self._plan_rows(workload, impls, direction, scopes)
        self._begin_part(f"{workload.name}, {direction}")
        self.prepare(workload, direction, "sustained" in scopes)
        how = {"protocol": self.protocol, "scopes": scopes, "seconds": seconds}
        tried = self._probe.measure(workload, impls, direction, **how)
        for rows in tried.values():
            self.rows += rows
        here = [entry for index, entry in enumerate(impls) if index not in tried]
        if here:
            self.rows += measure.measure(
                workload, here, device=self.device, direction=direction, log=self.log, **how
            )
        free()

    def asks(self, workload: Workload) -> bool:
        """Return whether this session measures a workload at all: see ONLY_VARIABLE."""
        return re.search(os.environ.get(ONLY_VARIABLE) or "", workload.name) is not None

    def _plan_rows(
        self, workload: Workload, impls: Sequence, direction: str, scopes: Scopes
    ) -> None:
        """Plan a row for each of `impls` and each scope; the record will hold them."""
        for impl, variant, _ in map(parts, impls):
            for scope in ON_DEVICE:
                if asks(scopes, scope, impl):
                    key = (workload.name, direction, impl, scope, variant)
                    self._plan[key] = (workload, math_of(workload.operator, impl))

    def _missing(self) -> list[record.Row]:
        """Build a failed row for each planned row that is missing."""
        known = {row.key for row in self.rows}
        return [
            record.Row.of(
                workload, key[1], impl=key[2], scope=key[3], variant=key[4], math=kind,
                failure=f"{LEFT_OUT}the run ended before it",
            )
            for key, (workload, kind) in self._plan.items()
            if key not in known
        ]  # fmt: skip

    def launch(
        self,
        name: str,
        workload: Workload,
        rungs: Sequence[str],
        run: Callable[[Inputs | BlockInputs], None],
        *,
        direction: str = "forward",
    ) -> None:
        """Call `run(inputs)`, which launches `rungs`, or changed copies of them, itself and stores
        its result as `name`.

        Only if all of them run on this GPU and a record or this session has a correct row of each;
        otherwise, or if it raises, the log says why there is no `name`. What raises anything but
        NotImplementedError is `broken`, and the chapter fails once its record is written.
        """
        if not self.asks(workload):
            return
        self._begin_part(f"{workload.name}, {name}")
        try:
            problem = self._probe.problem(rungs, workload.operator, direction)
            if problem is not None:
                raise NotImplementedError(problem)
            run(make_inputs(workload, device=self.device))
        except Exception as error:  # what was measured before must reach the record
            self.log(f"  no {name}: {reason(error)}")
            if not isinstance(error, NotImplementedError):
                self.broken.append(f"{name}: {reason(error)}")
        free()

    def profile(self, calls: Sequence[profiling.Call]) -> None:
        """Profile those of `calls` whose rows are correct as table "profiles", see `profiling`.
        What raises is `broken`, as in `launch`."""
        correct = {(row.workload, row.direction, row.impl) for row in self.rows if row.passed}
        calls = [call for call in calls if (call[0].name, *call[1:]) in correct]
        self._begin_part(f"profiles of {len(calls)} calls")
        try:
            self.tables["profiles"] = profiling.profile(calls)
        except (OSError, ValueError, subprocess.CalledProcessError) as error:
            self.log(f"  no profiles: {reason(error)}")
            self.broken.append(f"profiles: {reason(error)}")

    def _begin_part(self, name: str) -> None:
        gc.freeze()  # or `free` looks through all that was imported, 0.2 s for each implementation
        if self._partial is not None:
            system.save(self.system, self._partial.parents[1])
            record.write_partial(self._record(), self._partial)
        self.log(name)

    def prepare(self, workload: Workload, direction: str, with_sustained: bool = False) -> None:
        """Measure the ceilings for rows of `workload`, unless the session has them."""
        scopes = ON_DEVICE if with_sustained else ("kernel",)
        self._add_ceilings(timing.limits, *scopes)
        if workload.operator == "block_attention" or direction == "backward":
            self._add_ceilings(timing.attention_copies, *scopes)
        self.workloads[workload.name] = workload

    def _add_ceilings(self, make: Callable[..., list[timing.Limit]], *scopes: str) -> None:
        """Measure the limits from `make` in each of `scopes`, once in a session."""
        missing = [scope for scope in scopes if (make, scope) not in self._limits]
        limits = make(self.device) if missing else []
        for scope in missing:
            self._limits.add((make, scope))
            if scope == "kernel":
                self.ceilings += timing.measure_ceilings(limits, self.device, self.protocol)
            else:
                self.ceilings += sustained.measure_ceilings(limits, self.ceilings, self.device)

    def add(self, workload: Workload, *rows: record.Row) -> None:
        """Add rows measured by other means on `workload`."""
        self.workloads[workload.name] = workload
        self.rows += rows

    def tabulate(
        self, name: str, columns: Sequence[str], samples: Mapping[tuple, Sequence[float]]
    ) -> None:
        """Store samples that belong to no workload as a table with one row per sample.

        `samples` maps values of `columns` to microseconds.
        """
        self.tables[name] = record.Table(
            (*columns, "sample", "time_us"),
            tuple((*key, i, t) for key, times in samples.items() for i, t in enumerate(times)),
        )

    def uses(self, gpus: int) -> None:
        """Record in the system that the run uses several GPUs at once."""
        self.system = replace(self.system, gpus=gpus)

    def begin(self, data_dir: str | Path) -> None:
        """Store measurements in data_dir/partial/ until `write`; `record.keep` turns what an
        interrupted run leaves there into a record."""
        self._partial = self._folder(data_dir) / manifest.PARTIAL / f"{self._record().id}.json"

    def write(self, data_dir: str | Path) -> Path:
        """Write the record, and the system's file if it is new; the record's path.

        In a folder that lists the systems it holds (`system.promoted`), records of others go to
        community/<handle>/, where <handle> is the environment variable GDPA_KERNELS_HANDLE, or
        "local". RecordError if the record is refused; what `begin` kept stays then.
        """
        folder = self._folder(data_dir)
        system.save(self.system, folder)
        path = record.write(self._record(), folder)
        if self._partial is not None:
            self._partial.unlink(missing_ok=True)
        return path

    def _folder(self, data_dir: str | Path) -> Path:
        if system.is_promoted(self.system, data_dir):
            return Path(data_dir)
        handle = os.environ.get(HANDLE_VARIABLE) or "local"
        ok = re.fullmatch("[A-Za-z0-9][A-Za-z0-9-]*", handle) is not None
        require(ok, HANDLE_VARIABLE, "letters, digits and hyphens", handle)
        folder = Path(data_dir) / manifest.COMMUNITY / handle
        folder.mkdir(parents=True, exist_ok=True)
        (folder / manifest.NAME).touch()
        return folder

    def _record(self) -> record.Record:
        """Build the record of all measurements so far."""
        slug = self.notebook.removeprefix("notebooks/").removesuffix(".py")
        only = os.environ.get(ONLY_VARIABLE)
        variables = f"{ONLY_VARIABLE}={shlex.quote(only)} " if only else ""
        return record.new_record(
            command=f'{variables}make measure NOTEBOOKS="{slug}"',
            notebook=self.notebook,
            system=self.system,
            state_before=self.before,
            state_after=system.state(self.device.index),
            protocol=record.Protocol(
                timer="cuda events (scopes kernel, sustained), host clock (scopes op, host)",
                statistic="one call; of scope sustained the mean of a chunk of calls",
                **{name: getattr(self.protocol, name) for name in timing.RECORDED},
            ),
            workloads=[*(planned for planned, _ in self._plan.values()), *self.workloads.values()],
            rows=[*self.rows, *self._missing()],
            ceilings=self.ceilings,
            tables=self.tables,
            plan=self._plan,
        )
