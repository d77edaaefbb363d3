"""Several programs a command, and the hook of pre-commit, which hands over many files."""

import json
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from tritonemu.__main__ import main

ROOT = Path(__file__).resolve().parents[2]
PROGRAM = """
import sys
import torch, triton
import triton.language as tl

@triton.jit
def sum_kernel(out_ptr):
    RACE

def total():
    sum_kernel[(3,)](torch.zeros(1, device="cuda"))

if __name__ == "__main__":
    assert len(sys.argv) == 1
    total()
"""
TEXTS = {
    "right.py": PROGRAM.replace("RACE", "tl.atomic_add(out_ptr, 1.0)"),
    "racy.py": PROGRAM.replace("RACE", "tl.store(out_ptr, tl.load(out_ptr) + 1)"),
    "noted.py": PROGRAM.replace("RACE", "tl.store(out_ptr, 0.0)"),
    "broken.py": "raise RuntimeError",
    "endless.py": f"{PROGRAM.replace('RACE', 'pass')}    while True: pass",
    "killed.py": "import os, signal\nos.kill(os.getpid(), signal.SIGKILL)",
}


@pytest.fixture
def programs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name, text in TEXTS.items():
        Path(name).write_text(text)


def each(*arguments):
    return main(["--each", "--schedules", "1", "--json", "all.json", *arguments])


def written(path="all.json"):
    return json.loads(Path(path).read_text())


@pytest.mark.parametrize(
    "names, status",
    (
        (["right.py", "racy.py", "broken.py"], 1),
        (["killed.py"], 3),
        pytest.param(["right.py", "right.py:total"], 0, marks=pytest.mark.sweep),
        pytest.param(["broken.py", "right.py"], 3, marks=pytest.mark.sweep),
    ),
)
def test_the_worst_status_counts(names, status, programs, capfd):
    assert each(*names) == status
    printed = capfd.readouterr().out
    assert f"{len(names)} programs: " in printed
    assert ("  broken.py: not checked" in printed) == ("broken.py" in names)
    assert ("  killed.py: ended by signal 9" in printed) == ("killed.py" in names)
    assert [one["program"] for one in written()["programs"]] == names


def test_programs_start_with_what_is_imported_and_end_alone(programs, capfd):
    imported = "import sys\nassert 'pytest' in sys.modules\nsys.modules['left'] = sys\n"
    for name in ("one.py", "two.py"):
        Path(name).write_text(f"{imported}{TEXTS['right.py']}")
    assert each("one.py", "two.py") == 0 and "left" not in sys.modules
    assert capfd.readouterr().out.count("nothing found under") == 2


def test_one_report_has_all(programs, capfd):
    names = ["racy.py", "noted.py", "broken.py"]
    assert each("--arch", "sm_100", "--sarif", "all.sarif", *names) == 1
    racy, noted, broken = written()["programs"]
    assert [one["status"] for one in (racy, noted, broken)] == [1, 0, 3]
    assert racy["report"]["found"]["kind"] == "Race" and noted["report"]["notes"]
    assert "--arch sm_100" in racy["report"]["found"]["replay"] and broken["report"] is None
    (run,) = written("all.sarif")["runs"]
    (result,) = run["results"]
    assert result["locations"][0]["physicalLocation"]["artifactLocation"]["uri"] == "racy.py"
    (invocation,) = run["invocations"]
    levels = [each["level"] for each in invocation["toolExecutionNotifications"]]
    assert levels == ["note", "error"] and not invocation["executionSuccessful"]
    assert "racy.py:8" in capfd.readouterr().err


@pytest.mark.sweep
def test_what_all_find_stands_once_in_sarif(programs):
    assert each("--sarif", "all.sarif", "racy.py:total", "racy.py:total") == 1
    (run,) = written("all.sarif")["runs"]
    assert len(run["results"]) == 1 and run["invocations"][0]["executionSuccessful"]


@pytest.mark.sweep
def test_the_limit_of_time_is_of_each(programs):
    assert each("--timeout", "20", "endless.py") == 4
    (one,) = written()["programs"]
    assert one["report"]["timeout"]["seconds"] == 20


@pytest.mark.parametrize(
    "arguments, said",
    (
        (["right.py", "none.py"], "target must name an existing file, got 'none.py'"),
        (["right.py", "--strict"], "target must be FILE.py or FILE.py:FUNCTION, got '--strict'"),
        (["--svg", "x.svg", "right.py"], "--each takes no --svg, which draws one program"),
    ),
)
def test_a_wrong_command_line_runs_nothing(arguments, said, programs, capsys):
    with pytest.raises(SystemExit) as ended:
        each(*arguments)
    assert ended.value.code == 2
    assert said in capsys.readouterr().err and not Path("all.json").exists()


@pytest.mark.sweep
def test_the_hook_runs_as_pre_commit_runs_it(programs):
    """Its entry and the changed files of its types, in the folder of the repository."""
    (hook,) = yaml.safe_load((ROOT / ".pre-commit-hooks.yaml").read_text())
    assert hook["language"] == "system" and hook["types"] == ["python"]
    assert hook["require_serial"] and hook.get("pass_filenames", True)
    program, *words = shlex.split(hook["entry"])
    assert program == "python"
    for names, status in ((["right.py"], 0), (["right.py", "racy.py"], 1)):
        command = [sys.executable, *words, "--schedules", "1", *names]  # the last are its `args`
        ended = subprocess.run(command, capture_output=True, text=True)
        assert ended.returncode == status, ended.stderr
        assert (": a finding" in ended.stdout) == bool(status)
