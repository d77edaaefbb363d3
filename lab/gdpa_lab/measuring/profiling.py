"""Profiles calls: counters of each launch from NVIDIA Nsight Compute, `ncu`.

Profiled, not timed: ncu replays a kernel once for each group of counters, with cold caches and one
launch at a time, so a duration here is not that of a record's row. Counters are documented in
Nsight Compute's "Kernel Profiling Guide".
"""

from __future__ import annotations

import csv
import io
import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import torch

from gdpa_lab.measuring import operators, private
from gdpa_lab.measuring.inputs import make_inputs
from gdpa_lab.measuring.record import Table
from gdpa_lab.measuring.workload import Workload

Call = tuple[Workload, str, str]
"""A workload, a direction, and the name of an implementation."""

_SHARED = "l1tex__data_pipe_lsu_wavefronts_mem_shared"
COUNTERS: Mapping[str, str] = {
    "duration_ns": "gpu__time_duration.sum",
    "sm_hz": "sm__cycles_elapsed.avg.per_second",
    "tensor_percent": "sm__pipe_tensor_op_hmma_cycles_active.avg.pct_of_peak_sustained_elapsed",
    "issue_percent": "smsp__issue_active.avg.pct_of_peak_sustained_active",
    "mufu_percent": "sm__inst_executed_pipe_xu.avg.pct_of_peak_sustained_active",
    "active_warps": "smsp__warps_active.avg.per_cycle_active",
    "eligible_warps": "smsp__warps_eligible.avg.per_cycle_active",
    "instructions": "sm__inst_executed.sum",
    "shared_percent": f"{_SHARED}.avg.pct_of_peak_sustained_elapsed",
    "l2_hit_percent": "lts__t_sector_hit_rate.pct",
    "dram_read_bytes": "dram__bytes_read.sum",
    "dram_write_bytes": "dram__bytes_write.sum",
    "dram_percent": "dram__throughput.avg.pct_of_peak_sustained_elapsed",
    "local_sectors_read": "l1tex__t_sectors_pipe_lsu_mem_local_op_ld.sum",
    "local_sectors_written": "l1tex__t_sectors_pipe_lsu_mem_local_op_st.sum",
    "registers": "launch__registers_per_thread",
}  # fmt: skip
"""Counter of each column. Percent: of the peak rate, over all cycles (tensor, shared, dram) or over
those in which the SM has a warp (issue, mufu). Warps: a scheduler's, per cycle."""

STATES = (
    "barrier", "branch_resolving", "dispatch_stall", "drain", "gmma", "imc_miss", "lg_throttle",
    "long_scoreboard", "math_pipe_throttle", "membar", "mio_throttle", "misc", "no_instruction",
    "not_selected", "selected", "short_scoreboard", "sleeping", "tex_throttle", "wait",
)  # fmt: skip
"""States of a warp in a cycle, by the profiler's names: it issues (selected) or waits."""
_STATE = "smsp__average_warps_issue_stalled_{}_per_issue_active.ratio"

COLUMNS = ("workload", "direction", "impl", "launch", "kernel", *COUNTERS, *STATES)
_MARKER = "spin_kernel"  # of private.sleep, which nothing else launches here


def profile(calls: Sequence[Call]) -> Table:
    """Profile one launch of every kernel of each call, after two calls that are not profiled.

    A row per launch: counters as `COUNTERS` has them, in their base units (ns, Hz, bytes), and the
    percentage of its warps' time in each of `STATES`. FileNotFoundError without ncu;
    subprocess.CalledProcessError if it or a call fails.
    """
    ncu = shutil.which("ncu")
    if ncu is None:
        raise FileNotFoundError("ncu must be in PATH to profile (NVIDIA Nsight Compute)")
    plan = json.dumps([(workload.to_dict(), *rest) for workload, *rest in calls])
    metrics = ",".join([*COUNTERS.values(), *map(_STATE.format, STATES)])
    with tempfile.TemporaryDirectory() as folder:
        report = str(Path(folder) / "report.ncu-rep")
        options = "--clock-control", "none", "--profile-from-start", "off", "--metrics", metrics
        child = sys.executable, "-m", __spec__.name
        command = [ncu, *options, "-o", report, *child]
        subprocess.run(command, input=plan, text=True, check=True, stdout=sys.stderr)
        read = ncu, "--import", report, "--csv", "--page", "raw", "--print-units", "base"
        text = subprocess.run(read, text=True, check=True, stdout=subprocess.PIPE).stdout
    return Table(COLUMNS, tuple(_rows(text, calls)))


def _rows(text: str, calls: Sequence[Call]) -> Iterator[tuple[str | float, ...]]:
    """Read ncu's CSV, in which a marker precedes the launches of each call."""
    call, launch = -1, 0
    lines = csv.DictReader(io.StringIO(text[text.index('"ID"') :]))
    next(lines)  # the units
    for line in lines:
        if _MARKER in line["Kernel Name"]:
            call, launch = call + 1, 0
            continue
        workload, direction, impl = calls[call]
        counters = [float(line[name].replace(",", "")) for name in COUNTERS.values()]
        states = [float(line[_STATE.format(name)].replace(",", "")) for name in STATES]
        shares = [100 * state / sum(states) for state in states]
        yield workload.name, direction, impl, launch, line["Kernel Name"], *counters, *shares
        launch += 1


def _main() -> None:
    """Run the calls that stdin lists under a profiler that waits for its start."""
    inputs: dict[str, object] = {}
    for plan, direction, impl in json.load(sys.stdin):
        workload = Workload.from_dict(plan)
        if workload.name not in inputs:
            inputs.clear()
            inputs[workload.name] = make_inputs(workload, device="cuda")
        call = operators.of(inputs[workload.name], direction).candidate(impl, "").call
        call(), call()
        torch.cuda.synchronize()
        torch.cuda.profiler.start()
        private.sleep(100)
        call()
        torch.cuda.synchronize()
        torch.cuda.profiler.stop()


if __name__ == "__main__":
    _main()
