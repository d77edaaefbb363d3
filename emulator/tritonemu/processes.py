"""Runs several programs, or schedules of one, each in its own process."""

import contextlib
import json
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

# Meanings of the command's exit status.
_MEANINGS = {
    0: "nothing found",
    1: "a finding",
    2: "wrong options",
    3: "not checked",
    4: "out of time",
}


def run(options: Sequence[str], program: str) -> dict[str, Any]:
    """Run the command on one program; return its name, its exit status, and its report, None if it
    wrote none.

    options: of the command line. What the program prints appears here, too.
    """
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "report.json"
        command = [sys.executable, "-m", __package__, *options, "--json", str(path), program]
        sys.stdout.flush()
        status = subprocess.run(command, stdin=subprocess.DEVNULL).returncode
        report = json.loads(path.read_text(encoding="utf-8")) if path.exists() else None
    return {"program": program, "status": status, "report": report}


def status(ran: Sequence[dict[str, Any]]) -> int:
    """Combine exit statuses: 1 if there is a finding, else the greatest; 3 for a signal."""
    each = {one["status"] if one["status"] in _MEANINGS else 3 for one in ran}
    return 1 if 1 in each else max(each)


def summary(ran: Sequence[dict[str, Any]]) -> str:
    """Summarize how many programs ended how, and list the failed ones."""

    def ended(one: dict[str, Any]) -> str:
        meaning = _MEANINGS.get(one["status"], f"ended by signal {-one['status']}")
        return meaning + ", not all judged" * bool(not one["status"] and one["report"]["unjudged"])

    counts = Counter(map(ended, ran))
    outcomes = ", ".join(f"{count} {how}" for how, count in counts.items())
    bad = [f"  {one['program']}: {ended(one)}" for one in ran if one["status"]]
    return "\n".join([f"{len(ran)} programs: {outcomes}", *bad])


@contextlib.contextmanager
def ahead(commands: Mapping[str, Sequence[str]], processes: int) -> Iterator[Callable[[str], bool]]:
    """Run these commands in the background, at most `processes` at a time; yields a function that
    waits for a command and returns whether its status was 0. At the end none is left."""
    alive: list[subprocess.Popen] = []

    def status(command: Sequence[str]) -> int:
        quiet = subprocess.DEVNULL
        process = subprocess.Popen(command, stdin=quiet, stdout=quiet, stderr=quiet)
        alive.append(process)
        return process.wait()

    with ThreadPoolExecutor(processes) as pool:
        ended = {name: pool.submit(status, command) for name, command in commands.items()}
        try:
            yield lambda name: name in ended and ended[name].result() == 0
        finally:
            for each in ended.values():
                each.cancel()
            for process in alive:
                process.kill()
