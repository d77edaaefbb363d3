"""Runs the tutorials and triton_kernels of a Triton repository in the emulator, unedited.

    python emulator/tutorials.py REPOSITORY REVISION [--seconds N] [--cases N] [NAME ...]

REPOSITORY is a clone, with or without its files, of triton-lang/triton or a fork; the tutorials are
those of REVISION, under the Triton that is installed. A file without pytest's tests runs as
`python -m tritonemu FILE.py`, where benchmarks are skipped. In a file with tests the first and the
last case of each test run under the plugin, `--cases` in all without those that skip; its
benchmarks do not run. Each file runs on both GPUs, since cases that need another one skip
themselves, and under the modelled schedule. A case out of time is replaced by one other.

A case is right if each barrier whose parity is computed went through both parities. If one did not,
the file runs again on a GPU of one multiprocessor, so that persistent programs take all tiles; what
that does not help is "not wrapped".

Prints rows for COVERAGE, and what was not judged. With `--known FILE` the exit status is 1 if the
outcome of a file differs from the table there for this Triton; files that ran out of time are not
compared.
"""

import argparse
import collections
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest

PARTS = ("python/tutorials", "python/triton_kernels", "python/conftest.py", "pytest.ini")
FILES = (
    *("python/tutorials/[0-9]*.py", "python/tutorials/gluon/[0-9]*.py"),
    *("python/triton_kernels/tests/test_*.py",),
)
ARCHITECTURES = ("sm_90", "sm_100")
MULTIPROCESSORS = 4, 1  # so few that persistent programs take several tiles, or all
WRAPS = re.compile(r"barrier .*: (one|no) (phase|parity)")
ENDED = {0: "right", 1: "finding", 2: "wrong options", 3: "not checked", 4: "out of time"}
_CASES, _SECONDS, _RESULTS = "TUTORIAL_CASES", "TUTORIAL_SECONDS", "TUTORIAL_RESULTS"


class OutOfTime(BaseException):
    """Raised after a case's time limit; no Exception, so that nothing on the way catches it."""


class Sample:
    """A plugin of pytest: some cases of each test, each with a limit of time."""

    def __init__(self, cases: int, seconds: int, results: str):
        self.cases, self.seconds, self.results = cases, seconds, results
        self.ran: collections.Counter[str] = collections.Counter()
        self.late: set[tuple[str, str]] = set()
        self.ended: list[tuple[str, str, str]] = []

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        """Order the cases: of each test the first, then the last, then the others."""
        tests: dict[str, list[pytest.Item]] = {}
        for item in items:
            tests.setdefault(item.originalname, []).append(item)
        items[:] = [
            item for cases in tests.values() for item in (cases[0], *cases[:0:-1][:1], *cases[1:-1])
        ]

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> bool | None:
        return True if self.ran[item.originalname] >= self.cases else None

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call(self, item: pytest.Item) -> Any:
        def end(*_: Any) -> None:
            raise OutOfTime(f"after {self.seconds} s")

        signal.signal(signal.SIGALRM, end)
        signal.alarm(self.seconds)
        try:
            return (yield)
        finally:
            signal.alarm(0)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item: pytest.Item, call: Any) -> Any:
        report = yield
        if report.when == "call" or not report.passed:
            error = call.excinfo and call.excinfo.value
            ended = outcome(error) if report.failed else report.outcome
            message = f"{type(error).__name__}: {error}".partition("\n")[0] if error else ""
            missed = remarks(item.funcargs.get("_schedule") or ())
            if ended == "passed" and missed:
                ended, message = "not wrapped", missed
            late = ended == "out of time" and (item.originalname, ended) not in self.late
            self.late.add((item.originalname, ended))
            self.ran[item.originalname] += not report.skipped and not late
            self.ended.append((item.originalname, ended, message))
        return report

    def pytest_collectreport(self, report: Any) -> None:
        if report.failed:
            last = str(report.longrepr).rstrip().rpartition("\n")[2]
            self.ended.append((report.nodeid, "fails", last.removeprefix("E").strip()))

    def pytest_runtest_logfinish(self) -> None:
        Path(self.results).write_text(json.dumps(self.ended), encoding="utf-8")

    pytest_sessionfinish = pytest_runtest_logfinish


def remarks(reports: Any) -> str:
    """Name the barriers that did not go through both parities."""
    from tritonemu.messages import Remarks, unwrapped_line

    summary = Remarks()
    summary.add(reports)
    return "; ".join(unwrapped_line(*key, what) for key, what in summary.unwrapped.items())


def report_unjudged(lines: Sequence[str]) -> None:
    for line in lines:
        if line.startswith("could not judge"):
            print(f"  {line}", file=sys.stderr)


def outcome(error: BaseException) -> str:
    """Name the outcome of a case that raised `error`."""
    import tritonemu

    if isinstance(error, OutOfTime):
        return "out of time"
    if isinstance(error, tritonemu.Unsupported):
        return "not known"
    return "finding" if isinstance(error, tritonemu.EmulatorError) else "fails"


def pytest_configure(config: pytest.Config) -> None:
    cases, seconds = int(os.environ[_CASES]), int(os.environ[_SECONDS])
    config.pluginmanager.register(Sample(cases, seconds, os.environ[_RESULTS]))


def as_program(path: Path, arch: str, seconds: int, multiprocessors: int) -> tuple[str, str]:
    """Run a file as a program; return its outcome and, unless it is right, its last message."""
    command = [sys.executable, "-m", "tritonemu", "--arch", arch, "--schedule", "modelled"]
    command += ["--multiprocessors", str(multiprocessors), "--timeout", str(seconds), path.name]
    process = subprocess.run(command, cwd=path.parent, capture_output=True, text=True)
    errors = [line for line in process.stderr.splitlines() if line and not line.startswith("  ")]
    last = errors[-1] if errors else ""
    if last.endswith("launched no kernel"):
        return "no kernel", (process.stdout.strip().splitlines() or [last])[-1]
    lines = process.stdout.splitlines()
    report_unjudged(lines)
    if process.returncode == 0 and (missed := [each for each in lines if WRAPS.match(each)]):
        return "not wrapped", "; ".join(missed)
    return ENDED.get(process.returncode, "ended by a signal"), last


def as_tests(
    path: Path, arch: str, seconds: int, multiprocessors: int, cases: int
) -> tuple[str, str]:
    """Run a file of tests; return the number of cases by outcome, and the messages of failures."""
    with tempfile.TemporaryDirectory() as folder:
        results = Path(folder) / "results.json"
        variables = {_CASES: str(cases), _SECONDS: str(seconds), _RESULTS: str(results)}
        above = path.parents[1] if path.parts[-2] == "tests" else path.parent
        search = os.pathsep.join(
            [str(Path(__file__).parent), str(above), os.environ.get("PYTHONPATH", "")]
        )
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
        command += ["-p", "tritonemu.pytest_plugin", "-p", Path(__file__).stem, "--fake-gpu"]
        command += ["--emulated-schedules", "0", "--emulated-arch", arch, path.name]
        command += ["--emulated-bounds", "storage"]  # padded tensors, of triton_kernels
        command += ["--emulated-multiprocessors", str(multiprocessors)]
        late = []
        try:
            process = subprocess.run(
                command, cwd=path.parent, env={**os.environ, **variables, "PYTHONPATH": search},
                capture_output=True, text=True, timeout=6 * seconds,
            )  # fmt: skip
        except subprocess.TimeoutExpired:  # a case that no signal ends, as in PyTorch
            late = [("one of its cases", "out of time", "")]
        else:
            lines = process.stdout.splitlines()
            report_unjudged(lines)
            if process.returncode not in (0, 1, 2, 5):
                late = [("one of its cases", "not checked", f"exit status {process.returncode}")]
        reported = json.loads(results.read_text(encoding="utf-8")) if results.exists() else []
        ended = [*reported, *late]
    ran = [one for one in ended if one[1] != "skipped"]
    if not ran:
        return "skipped", next((message for _, _, message in ended if message), "no test")
    counts = collections.Counter("right" if how == "passed" else how for _, how, _ in ran)
    bad = dict.fromkeys(f"{test}: {message}" for test, how, message in ran if how != "passed")
    return ", ".join(f"{count} {how}" for how, count in counts.items()), "; ".join(bad)


def existing_parts(git: list[str], commit: str) -> list[str]:
    """List those of PARTS that the commit has."""
    return subprocess.run(
        [*git, "ls-tree", "--name-only", commit, *PARTS], capture_output=True, text=True, check=True
    ).stdout.split()


def rows(path: Path, version: str) -> dict[str, list[str]]:
    """Read the outcomes of files from the table for a Triton version, {} without one."""
    _, heading, text = path.read_text(encoding="utf-8").partition(f"under Triton {version}:\n\n")
    cells = [line.split(" | ") for line in text.partition("\n\n")[0].splitlines()]
    return {name.removeprefix("| "): ends[:-1] for name, *ends in cells[2:]} if heading else {}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("repository", type=Path)
    parser.add_argument("revision")
    parser.add_argument("names", nargs="*", metavar="NAME", help="of files, if not all: 05-layer")
    parser.add_argument("--seconds", type=int, default=120, help="for a program, or a case")
    parser.add_argument("--cases", type=int, default=2, help="of each test")
    parser.add_argument("--known", type=Path, help="a file with tables of this command")
    options = parser.parse_args()

    git = ["git", "-C", str(options.repository)]
    commit = subprocess.run(
        [*git, "rev-parse", f"{options.revision}^{{commit}}"], capture_output=True, text=True
    )
    if commit.returncode:
        parser.error(f"{options.repository} has no commit {options.revision}")
    import triton

    print(f"Commit {commit.stdout[:12]} under Triton {triton.__version__}:\n")
    table = rows(options.known, triton.__version__) if options.known else {}
    print("| tutorial | sm_90 | sm_100 | seconds |\n|---|---|---|--:|")
    as_expected = True
    with tempfile.TemporaryDirectory() as folder:
        archive = subprocess.run(
            [*git, "archive", commit.stdout.strip(), *existing_parts(git, commit.stdout.strip())],
            capture_output=True, check=True,
        )  # fmt: skip
        subprocess.run(["tar", "x", "-C", folder], input=archive.stdout, check=True)
        for files in FILES:
            for path in sorted(Path(folder).glob(files)):
                if options.names and not any(name in str(path) for name in options.names):
                    continue
                tests = re.search(r"^import pytest", path.read_text(encoding="utf-8"), re.M)
                start, row, notes = time.monotonic(), [], []
                run = partial(as_tests, cases=options.cases) if tests else as_program
                for arch in ARCHITECTURES:
                    ended, message = run(path, arch, options.seconds, MULTIPROCESSORS[0])
                    if "not wrapped" in ended:
                        ended, message = run(path, arch, options.seconds, MULTIPROCESSORS[1])
                    row.append(ended)
                    notes += [] if ended.endswith("right") else [f"on {arch}: {message}"]
                name = path.relative_to(Path(folder) / "python")
                expected = table.get(str(name), row)
                if expected != row and not any("out of time" in end for end in expected + row):
                    notes.append(f"expected {expected}")
                    as_expected = False
                elapsed = round(time.monotonic() - start)
                print(f"| {name} | {' | '.join(row)} | {elapsed} |", flush=True)
                for note in notes:
                    print(f"  {name} {note}", file=sys.stderr)
    return 0 if as_expected else 1


if __name__ == "__main__":
    sys.exit(main())
