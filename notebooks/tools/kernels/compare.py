"""Compare what tools find in `seeded`: `python -m notebooks.tools.kernels.compare [FILE]`.

A process for each mistake and tool, ended after MOST_S on a GPU, else after MOST_CPU_S; those that
need a GPU only where there is one. Writes what was found into `seeded.json` (or FILE), beside what
it has of other tools, which the chapter reads. On a GPU machine it takes less than a minute.

TileLens works with Triton 3.8 at most, and its race detector is not released: it is asked where the
environment variable TILELENS names a Python with the packages

    torch pytest triton==3.8.0
    git+https://github.com/Deep-Learning-Profiling-Tools/triton-viz@4e2af488e91ac71e2672094d48cc339a1634bca5
"""

import datetime
import json
import os
import platform
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from gdpa_lab.measuring import files

from . import seeded

FILE = files.DATA_DIR / "tools" / "seeded.json"
PROGRAM = Path(seeded.__file__)
UNDER_TILELENS = f"{PROGRAM.with_name('under_tilelens.py')}"
MOST_S, MOST_CPU_S, ALL_S = 18.0, 60.0, 52.0
AT_ONCE = 14


@dataclass(frozen=True)
class Tool:
    """A tool: the command before the program, the environment, and what the program is given."""

    command: tuple[str, ...] = (sys.executable,)
    environment: tuple[tuple[str, str], ...] = ()
    gpu: bool = True


def _sanitizer(tool: str) -> Tool:
    options = ("--print-limit", "3", "--kernel-regex", "kns=_kernel", "--tool", tool)
    return Tool(("compute-sanitizer", *options, sys.executable))


EMULATOR = (sys.executable, "-m", "tritonemu", "--resident", "6", "--schedules", "8")
TOOLS = {
    "tritonemu": Tool(EMULATOR, gpu=False),
    "TRITON_INTERPRET": Tool(environment=(("TRITON_INTERPRET", "1"),), gpu=False),
    "TileLens": Tool((os.environ.get("TILELENS", ""), UNDER_TILELENS), gpu=False),
    "result on the GPU": Tool(),
    "racecheck": _sanitizer("racecheck"),
    "synccheck": _sanitizer("synccheck"),
    "memcheck": _sanitizer("memcheck"),
    "ConSan": Tool(environment=(("TRITON_INSTRUMENTATION_MODE", "consan"),)),
}


@dataclass(frozen=True)
class Said:
    """found, missed, hangs (until it was ended), crashes, cannot run, or not run; and its words."""

    verdict: str
    seconds: float
    said: str = ""


def judge(name: str, status: int | None, text: str) -> str:
    """The verdict from the exit status, None if it was ended, and what was printed."""
    wrong = re.search(r"AssertionError: the .* wrong", text)
    if status is None:
        return "hangs"
    if status < 0 or (name != "ConSan" and "unspecified launch failure" in text):
        return "crashes"
    if name in ("racecheck", "synccheck", "memcheck", "TileLens"):
        errors = re.findall(r"(?:ERROR|RACECHECK) SUMMARY: (\d+)", text)
        return ("found" if int(errors[-1]) else "missed") if errors else "cannot run"
    if name == "ConSan":
        if "device-side assert" in text:
            return "found"
        return "missed" if status == 0 or wrong else "cannot run"
    if name == "tritonemu" and status == 1:
        return "found"
    return "missed" if status == 0 else "found" if wrong else "cannot run"


def ask(name: str, fault: str, left: float) -> Said:
    """Verdict of one tool on one mistake."""
    tool, begin = TOOLS[name], time.monotonic()
    if left < 2:
        return Said("not run", 0.0)
    device = ("cuda",) if tool.gpu else ()
    environment = {**os.environ, **dict(tool.environment), "PYTHONPATH": _path()}
    with tempfile.TemporaryFile("w+", errors="replace") as printed:
        program = subprocess.Popen(
            [*tool.command, str(PROGRAM), fault, *device], env=environment, stdout=printed,
            stderr=subprocess.STDOUT, start_new_session=True,
        )  # fmt: skip
        try:
            status = program.wait(left)
        except subprocess.TimeoutExpired:
            os.killpg(program.pid, signal.SIGKILL)
            status = None
        printed.seek(0)
        text = printed.read().replace(f"{PROGRAM.parents[3]}{os.sep}", "")
    lines = [line.strip() for line in text.splitlines() if re.search(r"Error|Race|SUMMARY", line)]
    seconds = round(time.monotonic() - begin, 1)
    return Said(judge(name, status, text), seconds, " / ".join(lines[:2])[:300])


def _path() -> str:
    root = PROGRAM.parents[3]
    return os.pathsep.join([str(root), str(root / "emulator"), os.environ.get("PYTHONPATH", "")])


def main(file: str | Path = FILE) -> None:
    """Ask all tools that this machine has, print a line for each answer, and keep them."""
    begin, gpu = time.monotonic(), torch.cuda.is_available()
    names = [
        name for name, tool in TOOLS.items() if tool.gpu == gpu and shutil.which(tool.command[0])
    ]
    jobs = [(name, fault) for name in names for fault in seeded.FAULTS]

    def left() -> float:
        return min(MOST_S, ALL_S - (time.monotonic() - begin)) if gpu else MOST_CPU_S

    with ThreadPoolExecutor(AT_ONCE if gpu else 1) as pool:
        answers = list(pool.map(lambda job: ask(*job, left()), jobs))
    for (name, fault), said in zip(jobs, answers, strict=True):
        print(f"{name:18} {fault:30} {said.verdict:10} {said.seconds:5.1f} s  {said.said[:120]}")
    machine = torch.cuda.get_device_name() if gpu else f"{platform.machine()} CPU"
    answers_by_tool: dict[str, Any] = json.loads(FILE.read_text()) if FILE.exists() else {}
    for name in names:
        by_fault = {
            fault: asdict(a) for (n, fault), a in zip(jobs, answers, strict=True) if n == name
        }
        answers_by_tool[name] = {
            "machine": machine, "date": f"{datetime.date.today()}", "found": by_fault,
        }  # fmt: skip
    Path(file).write_text(json.dumps(answers_by_tool, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
