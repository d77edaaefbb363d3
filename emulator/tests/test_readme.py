"""The quick start of the README does what it says."""

import re
from pathlib import Path

import pytest

from tritonemu.__main__ import main

README = (Path(__file__).parents[1] / "README.md").read_text(encoding="utf-8")
PROGRAM, CHECK, FIXTURE = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
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


def test_the_check_says_line_and_cycles(racy, monkeypatch, capsys):
    monkeypatch.syspath_prepend(".")
    exec(CHECK, {})
    line = 1 + PROGRAM.splitlines().index("    tl.store(sum_ptr, tl.load(sum_ptr) + part)")
    assert re.fullmatch(rf"False {line} {{}} {{}} [1-9]\d*\.\d+\n", capsys.readouterr().out)


def test_its_size_and_its_sentences():
    assert len(README.splitlines()) <= 110 and len(CHECK.strip().splitlines()) == 6
    prose = re.sub(r"```.*?```|^(?:\||    |#).*?$|\]\([^)]*\)", "", README, flags=re.S | re.M)
    sentences = re.split(r"(?<=[.:])\s", " ".join(prose.split()))
    assert max(len(sentence.split()) for sentence in sentences) <= 25
