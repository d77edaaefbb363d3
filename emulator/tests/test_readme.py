"""The quick start of the README does what it says."""

import re
from pathlib import Path

import pytest
import torch

import tritonemu
from tritonemu.__main__ import main

README = (Path(__file__).parents[1] / "README.md").read_text(encoding="utf-8")
PROGRAM, FIXTURE, CONTEXTS = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
RACE, CLEAN = re.findall(r"```text\n(.*?)```", README, re.DOTALL)


@pytest.fixture
def racy(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("racy.py").write_text(PROGRAM, encoding="utf-8")


def test_the_race_is_found(racy, capsys):
    assert main(["racy.py"]) == 1
    assert capsys.readouterr().err == RACE


def test_the_mended_program_is_clean(racy, capsys):
    mended = PROGRAM.replace(
        "tl.store(sum_ptr, tl.load(sum_ptr) + part)", "tl.atomic_add(sum_ptr, part)"
    )
    Path("racy.py").write_text(mended, encoding="utf-8")
    assert main(["racy.py"]) == 0
    assert capsys.readouterr().out == CLEAN


def test_the_contexts(racy, tmp_path):
    lines = CONTEXTS.replace("with ", "with pytest.raises(tritonemu.Race), ")
    names = {"pytest": pytest, "__name__": "racy"}
    exec(compile(PROGRAM, str(tmp_path / "racy.py"), "exec"), names)
    exec(lines, names)
    assert not tritonemu.is_enabled() and not torch.ones(1).is_cuda


def test_every_exit_status_is_there():
    from tritonemu.__main__ import CLEAN, FOUND, TIMEOUT, UNCHECKED, USAGE

    rows = re.findall(r"^\| (\d) \|", README, re.MULTILINE)
    assert list(map(int, rows)) == [CLEAN, FOUND, USAGE, UNCHECKED, TIMEOUT]
