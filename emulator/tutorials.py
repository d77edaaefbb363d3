"""Which tutorials of a Triton repository run in the emulator, unedited; triton_kernels, too.

    python emulator/tutorials.py REPOSITORY REVISION [--seconds N] [--cases N] [NAME ...]

REPOSITORY is a clone, with or without its files, of triton-lang/triton or a fork; the tutorials are
those of REVISION, under the Triton that is installed. A file without pytest's tests runs as
`python -m tritonemu FILE.py`, where benchmarks are skipped. Of a file with tests the first and the
last case of each run under the plugin, `--cases` in all without those that skip, and its benchmarks
do not. Each file runs on both GPUs, as what needs another one skips itself; all under the modelled
schedule. A case out of time is replaced by one other. Prints rows for COVERAGE. With `--known FILE`
the exit status is 1 if a file ends otherwise than in the table there of this Triton; of those that
ran out of time nothing is known.
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
from pathlib import Path
from typing import Any

import pytest

PARTS = ("python/tutorials", "python/triton_kernels", "python/conftest.py", "pytest.ini")
FILES = (
    *("python/tutorials/[0-9]*.py", "python/tutorials/gluon/[0-9]*.py"),
    *("python/triton_kernels/tests/test_*.py",),
)
ARCHITECTURES = ("sm_90", "sm_100")
ENDED = {0: "right", 1: "finding", 2: "wrong options", 3: "not checked", 4: "out of time"}
_CASES, _SECONDS, _RESULTS = "TUTORIAL_CASES", "TUTORIAL_SECONDS", "TUTORIAL_RESULTS"


class OutOfTime(BaseException):
    """Not an Exception: nothing on the way takes it for its own."""


class Sample:
    """A plugin of pytest: some cases of each test, each with a limit of time."""

    def __init__(self, cases: int, seconds: int, results: str):
        self.cases, self.seconds, self.results = cases, seconds, results
        self.ran: collections.Counter[str] = collections.Counter()
        self.late: set[tuple[str, str]] = set()
        self.ended: list[tuple[str, str, str]] = []

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        """Of each test the first case, then the last, then the others."""
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
            said = f"{type(error).__name__}: {error}".partition("\n")[0] if error else ""
            late = ended == "out of time" and (item.originalname, ended) not in self.late
            self.late.add((item.originalname, ended))
            self.ran[item.originalname] += not report.skipped and not late
            self.ended.append((item.originalname, ended, said))
        return report

    def pytest_collectreport(self, report: Any) -> None:
        if report.failed:
            last = str(report.longrepr).rstrip().rpartition("\n")[2]
            self.ended.append((report.nodeid, "fails", last.removeprefix("E").strip()))

    def pytest_runtest_logfinish(self) -> None:
        Path(self.results).write_text(json.dumps(self.ended), encoding="utf-8")

    pytest_sessionfinish = pytest_runtest_logfinish


def outcome(error: BaseException) -> str:
    """What a table says of a case that ends so."""
    import tritonemu

    if isinstance(error, OutOfTime):
        return "out of time"
    if isinstance(error, tritonemu.Unsupported):
        return "not known"
    return "finding" if isinstance(error, tritonemu.EmulatorError) else "fails"


def pytest_configure(config: pytest.Config) -> None:
    cases, seconds = int(os.environ[_CASES]), int(os.environ[_SECONDS])
    config.pluginmanager.register(Sample(cases, seconds, os.environ[_RESULTS]))


def as_program(path: Path, arch: str, seconds: int) -> tuple[str, str]:
    """How the file ends as a program, and what it says last if not well."""
    command = [sys.executable, "-m", "tritonemu", "--arch", arch, "--schedule", "modelled"]
    command += ["--timeout", str(seconds), path.name]
    done = subprocess.run(command, cwd=path.parent, capture_output=True, text=True)
    said = [line for line in done.stderr.splitlines() if line and not line.startswith("  ")]
    last = said[-1] if said else ""
    if last.endswith("launched no kernel"):
        return "no kernel", (done.stdout.strip().splitlines() or [last])[-1]
    return ENDED.get(done.returncode, "ended by a signal"), last


def as_tests(path: Path, arch: str, seconds: int, cases: int) -> tuple[str, str]:
    """The same for a file of tests: how many cases ended how, and what the first says."""
    with tempfile.TemporaryDirectory() as folder:
        results = Path(folder) / "results.json"
        given = {_CASES: str(cases), _SECONDS: str(seconds), _RESULTS: str(results)}
        above = path.parents[1] if path.parts[-2] == "tests" else path.parent
        search = os.pathsep.join(
            [str(Path(__file__).parent), str(above), os.environ.get("PYTHONPATH", "")]
        )
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
        command += ["-p", "tritonemu.pytest_plugin", "-p", Path(__file__).stem, "--fake-gpu"]
        command += ["--emulated-schedules", "0", "--emulated-arch", arch, path.name]
        command += ["--emulated-bounds", "storage"]  # padded tensors, of triton_kernels
        late = []
        try:
            done = subprocess.run(
                command, cwd=path.parent, env={**os.environ, **given, "PYTHONPATH": search},
                capture_output=True, timeout=6 * seconds,
            )  # fmt: skip
        except subprocess.TimeoutExpired:  # a case that no signal ends, as in PyTorch
            late = [("one of its cases", "out of time", "")]
        else:
            if done.returncode not in (0, 1, 2, 5):
                late = [("one of its cases", "not checked", f"exit status {done.returncode}")]
        known = json.loads(results.read_text(encoding="utf-8")) if results.exists() else []
        ended = [*known, *late]
    ran = [one for one in ended if one[1] != "skipped"]
    if not ran:
        return "skipped", next((said for _, _, said in ended if said), "no test")
    counts = collections.Counter("right" if how == "passed" else how for _, how, _ in ran)
    bad = dict.fromkeys(f"{test}: {said}" for test, how, said in ran if how != "passed")
    return ", ".join(f"{count} {how}" for how, count in counts.items()), "; ".join(bad)


def known(git: list[str], commit: str) -> list[str]:
    """Those of PARTS that the commit has."""
    return subprocess.run(
        [*git, "ls-tree", "--name-only", commit, *PARTS], capture_output=True, text=True, check=True
    ).stdout.split()


def rows(path: Path, version: str) -> dict[str, list[str]]:
    """How files end by the table of this version in a file that holds some."""
    _, found, text = path.read_text(encoding="utf-8").partition(f"under Triton {version}:\n\n")
    cells = [line.split(" | ") for line in text.partition("\n\n")[0].splitlines()]
    return {name.removeprefix("| "): ends[:-1] for name, *ends in cells[2:]} if found else {}


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
    well = True
    with tempfile.TemporaryDirectory() as folder:
        archive = subprocess.run(
            [*git, "archive", commit.stdout.strip(), *known(git, commit.stdout.strip())],
            capture_output=True, check=True,
        )  # fmt: skip
        subprocess.run(["tar", "x", "-C", folder], input=archive.stdout, check=True)
        for files in FILES:
            for path in sorted(Path(folder).glob(files)):
                if options.names and not any(name in str(path) for name in options.names):
                    continue
                tests = re.search(r"^import pytest", path.read_text(encoding="utf-8"), re.M)
                start, row, notes = time.monotonic(), [], []
                for arch in ARCHITECTURES:
                    if tests:
                        ended, said = as_tests(path, arch, options.seconds, options.cases)
                    else:
                        ended, said = as_program(path, arch, options.seconds)
                    row.append(ended)
                    notes += [] if ended.endswith("right") else [f"on {arch}: {said}"]
                name = path.relative_to(Path(folder) / "python")
                expected = table.get(str(name), row)
                if expected != row and not any("out of time" in end for end in expected + row):
                    notes.append(f"expected {expected}")
                    well = False
                taken = round(time.monotonic() - start)
                print(f"| {name} | {' | '.join(row)} | {taken} |", flush=True)
                print(*(f"  {name} {note}" for note in notes), sep="\n", file=sys.stderr)
    return 0 if well else 1


if __name__ == "__main__":
    sys.exit(main())
