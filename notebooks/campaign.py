"""Measure every chapter whose records are old, those that matter most first, one a GPU at a time.

    python notebooks/campaign.py --devices 0 1 2 3 --minutes 25

A chapter whose whole run on this kind of GPU is of today's code is left out, so the same command
goes on where the time ran out; what a chapter had measured by then becomes a record.
Output of a chapter goes to the folder of --logs.
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import torch

import execute
from gdpa_lab.measuring import files, record
from gdpa_lab.measuring.session import ONLY_VARIABLE
from gdpa_lab.report import results

FIRST = (
    "forward/results", "backward/results", "block/results", "measuring/other_shapes",
    "measuring/power_wall", "training/step", "forward/v1_tiled", "measuring/production_gap",
)  # fmt: skip
"""Chapters that others quote; the rest follow in the book's order."""


def wanted(gpu: str, data_dir: Path, names: list[str]) -> Iterator[str]:
    """The chapters to measure on such a GPU, first what matters most."""
    slugs = [execute.slug(path) for path in execute.select("measure", names)]
    rank = {name: i for i, name in enumerate(FIRST)}
    for name in sorted(slugs, key=lambda slug: rank.get(slug, len(FIRST))):
        if os.environ.get(ONLY_VARIABLE) or not is_done(name, gpu, data_dir):
            yield name


def is_done(slug: str, gpu: str, data_dir: Path) -> bool:
    """Say whether a chapter's run is of today's code and lacks nothing that was planned."""
    try:
        run = results.run_of(data_dir, notebook=f"notebooks/{slug}.py", gpu=gpu)
    except LookupError:
        return False
    cut = [row for row in run.whole.rows if row.is_left_out]
    left = {(row.workload, row.direction, row.scope) for row in cut} - {*run.pieces}
    return not left and all(map(is_todays, run.records))


def is_todays(run: record.Record) -> bool:
    """Say whether the kernels that ran are those of today."""
    ours = [name for name in run.package.sources if name.startswith("gdpa_kernels/")]
    return run.package.ran(ours, record.ROOT)


def start(slug: str, device: int, data_dir: Path, logs: Path) -> subprocess.Popen:
    """Measure a chapter on one GPU, in a process group of its own, into a copy of the data."""
    log = (logs / f"{slug.replace('/', '-')}.log").open("w")
    copy = logs / f"data-{device}"
    shutil.copytree(data_dir, copy, dirs_exist_ok=True)
    command = [sys.executable, execute.__file__, "--mode", "measure", "--notebooks", slug]
    return subprocess.Popen(
        [*command, "--data-dir", str(copy.absolute())],
        env={**os.environ, "CUDA_VISIBLE_DEVICES": str(device)},
        stdout=log, stderr=subprocess.STDOUT, start_new_session=True,
    )  # fmt: skip


def gather(device: int, data_dir: Path, logs: Path) -> None:
    """Take over what was measured on a GPU."""
    copy = logs / f"data-{device}"
    for partial in sorted(copy.rglob(f"{files.PARTIAL}/*.json")):
        print(f"cut off: {record.keep(partial).name}", flush=True)
    for file in sorted({*copy.rglob("records/*.json"), *copy.rglob("systems/*.json")}):
        target = data_dir / file.relative_to(copy)
        if not target.exists():
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(file, target)


def run(slugs: list[str], devices: list[int], end: float, data_dir: Path, logs: Path) -> None:
    """Measure `slugs`, as many at once as there are devices, until the monotonic time `end`."""
    ahead, running = list(slugs), {}
    while (ahead or running) and time.monotonic() < end:
        for device in [x for x in devices if x not in running][: len(ahead)]:
            slug = ahead.pop(0)
            running[device] = slug, start(slug, device, data_dir, logs)
            print(f"GPU {device}: {slug}", flush=True)
        time.sleep(1)
        for device, (slug, process) in [*running.items()]:
            if process.poll() is not None:
                print(f"GPU {device}: {slug} ended, {process.returncode}", flush=True)
                del running[device]
                gather(device, data_dir, logs)
    for device, (slug, process) in running.items():
        print(f"{slug}: the time is up", flush=True)
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        gather(device, data_dir, logs)
    for slug in ahead:
        print(f"left: {slug}", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--devices", type=int, nargs="+", default=[0], help="numbers of GPUs")
    parser.add_argument("--minutes", type=float, required=True, help="after which it stops")
    parser.add_argument("--notebooks", default="", help="names or parts; default: all")
    parser.add_argument("--only", default="", help="a pattern: leave out all other workloads")
    parser.add_argument("--data-dir", type=Path, default=Path("data"))
    parser.add_argument("--logs", type=Path, default=Path("/tmp"))
    options = parser.parse_args()
    options.logs.mkdir(parents=True, exist_ok=True)
    end = time.monotonic() + 60 * options.minutes
    gpu = torch.cuda.get_device_name(options.devices[0])
    os.environ[ONLY_VARIABLE] = options.only
    slugs = [*wanted(gpu, options.data_dir, options.notebooks.split())]
    run(slugs, options.devices, end, options.data_dir, options.logs)
    return 0


if __name__ == "__main__":
    sys.exit(main())
