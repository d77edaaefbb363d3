"""Runs several programs, each in a process of its own.

These are forks of one that has imported PyTorch and Triton, and has used neither: an import takes
seconds, and a fork none.
"""

import contextlib
import json
import os
import sys
import tempfile
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

# Meanings of the command's exit status.
_MEANINGS = {
    0: "nothing found",
    1: "a finding",
    2: "wrong options",
    3: "not checked",
    4: "out of time",
}


def _end_with(work: Callable[[], int]) -> NoReturn:
    """End this process, a fork, with the status that the work returns."""
    ended = 3
    try:
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        ended = work()
    except SystemExit as error:
        ended = error.code if isinstance(error.code, int) else 3
    except BaseException:
        traceback.print_exc()
    with contextlib.suppress(OSError, ValueError):
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(ended)


def run(command: Callable[[str, str], int], program: str) -> dict[str, Any]:
    """Run a command on one program; return its name, the exit status, and the report, None if there
    is none. The command takes the program, and the path where it writes the report."""
    sys.stdout.flush()
    sys.stderr.flush()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "report.json"
        with warnings.catch_warnings():  # of threads of libraries, which nobody has used yet
            warnings.simplefilter("ignore", DeprecationWarning)
            process = os.fork()
        if not process:
            _end_with(lambda: command(program, str(path)))
        status = os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])
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
