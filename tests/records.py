"""Machines, rows and records made up for tests, and the folder that they are written to."""

import subprocess
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from gdpa_lab.measuring import baselines, record, system
from gdpa_lab.measuring.length_distributions import Full
from gdpa_lab.measuring.record import Ceiling, Error, Load, Package, Protocol, Record, Row
from gdpa_lab.measuring.system import System
from gdpa_lab.measuring.workload import Workload
from gdpa_lab.measuring.workloads import workload

SELF = workload("gdpa-self-full-1024")
SHORT = workload("gdpa-self-full-256")
OTHER = Workload(
    name="not-published", batch=2, num_heads_q=1, num_heads_k=1, head_dim=64, max_seqlen_q=100,
    max_seqlen_k=100, lengths_q=Full(),
)  # fmt: skip
STATE = dict.fromkeys(
    ("sm_clock_mhz", "memory_clock_mhz", "temperature_c", "power_w", "throttle_reasons",
     "other_processes")
)  # fmt: skip
"""Of a machine without a GPU."""
H200 = system.load(record.DATA_DIR / "systems" / "nvidia-h200-62ac9e84.json")
LOAD = Load(1500.0, None, 0.35, ("sw_power_cap",))
GOOD = Error.judge(1e-3, 2e-3, elements=64)
PROTOCOL = Protocol("cuda events", 5, 30, 0, True, "one call")
CEILINGS = (
    Ceiling("matmul", "8192^3", (1392.0, 1391.0, 2000.0), flops=2 * 8192**3),
    Ceiling("copy", "3:1", (930.0,), bytes_read=3 * 10**9, bytes_written=10**9),
    Ceiling("copy", "1:1", (465.0, 460.0, 900.0), bytes_read=10**9, bytes_written=10**9),
)


def a_system(driver: str = "580.1", gpu: str | None = "NVIDIA H200", **values) -> System:
    known = {
        "compute_capability": "9.0", "num_sms": 132, "memory_bytes": 1, "l2_bytes": 1,
        "max_sm_clock_mhz": 1980.0, "max_memory_clock_mhz": 3201.0, "power_limit_w": 700.0,
        "cuda": "13.0", "torch": "2.13.0", "triton": "3.7.4+fb", "fbtriton": "3.7.4",
        "python": "3.12.3", "platform": "linux-x86_64", "cpu": None,
    }  # fmt: skip
    return System(gpu=gpu, driver=driver, **known | values)


def a_row(of: Workload = SELF, *, impl="v1_tiled", direction="forward", **values) -> Row:
    known = {"math": "activation", "scope": "kernel", "samples_us": (9000.0,), "error": GOOD}
    return Row.of(of, direction, impl=impl, **known | values)


def sources() -> dict[str, str]:
    return {
        path.relative_to(record.ROOT).as_posix(): record.source_hash(path)
        for path in (record.ROOT / "gdpa_kernels").rglob("*.py")
    }


def writer(folder: Path) -> Callable[..., Record]:
    """A function that writes a record of rows, made on a day, to a folder and returns it."""

    def write(*rows: Row, day=1, on=None, notebook="notebooks/04_v1.py", **values) -> Record:
        on = on or a_system()
        system.save(on, folder)
        made = Record(
            id=f"202611{day:02}T120000Z-run-{on.id}", created=f"2026-11-{day:02}T12:00:00Z",
            command="make measure", notebook=notebook,
            package=Package("0.1.0", "a" * 40, False, sources()),
            system=on.id, state={"before": STATE, "after": STATE}, protocol=PROTOCOL,
            ceilings=CEILINGS, rows=rows,
            workloads={w.name: w.to_dict() for w in (SELF, SHORT, OTHER)},
        )  # fmt: skip
        made = replace(made, **values)
        record.write(made, folder)
        return made

    return write


def available(monkeypatch) -> None:
    """This machine has what every peer needs."""
    for table in (baselines.BASELINES, baselines.BLOCK_BASELINES):
        for name, baseline in table.items():
            monkeypatch.setitem(table, name, replace(baseline, needs=lambda: None))


def git(folder: Path, *arguments: str) -> str:
    """What git prints in a folder; it knows nobody there."""
    identity = ["-c", "user.name=a", "-c", "user.email=a@b", "-c", "commit.gpgsign=false"]
    done = subprocess.run(
        ["git", "-C", str(folder), *identity, *arguments], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def committed(folder: Path) -> str:
    """All of a folder, in a new commit of a repository of its own; the commit."""
    git(folder, "init", "-q")
    git(folder, "add", "-A")
    git(folder, "commit", "-qm", "as it is")
    return git(folder, "rev-parse", "HEAD")


RESULT = {
    "figure": "gdpa-self-fwd-full",
    "workload": SELF.name,
    "direction": "forward",
    "impl": "v1_tiled",
    "math": "activation",
    "scope": "sustained",
    "variant": "",
    "system": "nvidia-h200-00000000",
    "gpu": "NVIDIA H200",
    "date": "2026-01-01",
    "record": "record-a",
    "time_us_p20": 5900.0,
    "time_us_p50": 6000.0,
    "time_us_p80": 6100.0,
    "tflops": 400.0,
    "gbytes_per_s": 800.0,
    "percent_of_roofline": 50.0,
    "correct": True,
    "failure": None,
    "stale": False,
    "samples": 30,
}
"""A row of the table of results."""
