"""The programs of the site: each prints what stands beside it."""

import re
from pathlib import Path

import pytest
import torch

import tritonemu
from tritonemu import __main__ as command
from tritonemu.__main__ import main

PAGES = Path(__file__).parents[1] / "docs"
START = (PAGES / "index.md").read_text(encoding="utf-8")
REPORTS = (PAGES / "reports.md").read_text(encoding="utf-8")
PROLOGUE = re.search(r"```python\n(.*?)```", REPORTS, re.DOTALL)[1]
SECTIONS = re.findall(
    r"^## (\w+)\n.*?```python\n(.*?)```\n\n```text\n(.*?)\n```", REPORTS, re.DOTALL | re.MULTILINE
)


def program(code):
    *lines, tlx = PROLOGUE.splitlines(keepends=True)
    return "".join([*lines, *([tlx] if "tlx." in code else []), "\n\n", code])


def kinds(error=tritonemu.EmulatorError):
    return [each for kind in error.__subclasses__() for each in (kind.__name__, *kinds(kind))]


def test_every_exit_status_is_there():
    rows = re.findall(r"^\| (\d) \|", (PAGES / "use.md").read_text(), re.MULTILINE)
    names = ("CLEAN", "FOUND", "USAGE", "UNCHECKED", "TIMEOUT")
    assert [*map(int, rows)] == [getattr(command, name) for name in names]


def test_the_contexts(tmp_path):
    (lines,) = re.findall(r"```python\n(.*?)```", (PAGES / "api.md").read_text(), re.DOTALL)
    readme = (PAGES.parent / "README.md").read_text()
    names = {"pytest": pytest, "__name__": "racy"}
    path = tmp_path / "racy.py"
    path.write_text(re.search(r"```python\n(.*?)```", readme, re.DOTALL)[1])
    exec(compile(path.read_text(), str(path), "exec"), names)
    exec(lines.replace("with ", "with pytest.raises(tritonemu.Race), "), names)
    assert not tritonemu.is_enabled() and not torch.ones(1).is_cuda


def test_every_field_of_a_verdict_is_there():
    rows = re.findall(r"^\| `(.*?)` \|", (PAGES / "api.md").read_text(), re.MULTILINE)
    named = {name for row in rows for name in row.split("`, `")}
    public = {name for name in dir(tritonemu.Verdict()) if not name.startswith("_")}
    assert public - {"as_json"} <= named
    reported = tritonemu.Verdict().as_json()
    assert reported.keys() <= {name.removesuffix("[]") for name in named}


@pytest.mark.tlx
def test_the_figure_is_what_its_program_draws(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(PAGES)
    assert main(["--schedule", "modelled", "--svg", str(tmp_path / "race.svg"), "ring.py"]) == 1
    assert "ring.py:29: [task0 of CTA 0] copy issued by task0" in capsys.readouterr().err
    drawn = (PAGES / "_static" / "race.svg").read_text()
    assert (tmp_path / "race.svg").read_text() == drawn


def test_every_kind_of_report_has_a_program():
    assert [name for name, _, _ in SECTIONS] == re.findall(r"^## (.*)", REPORTS, re.MULTILINE)
    assert sorted(name for name, _, _ in SECTIONS) == sorted(kinds())


@pytest.mark.parametrize(
    "kind, code, text",
    [
        pytest.param(*each, id=each[0], marks=[pytest.mark.tlx] * ("tlx." in each[1]))
        for each in SECTIONS
    ],
)
def test_a_report(kind, code, text, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    name = f"{kind.lower()}.py"
    Path(name).write_text(program(code), encoding="utf-8")
    search = kind == "WrongResult"
    options = ["--resident", "2"] if search else ["--schedule", "modelled"]
    assert main([*options, name]) == (3 if kind == "Unsupported" else 1)
    printed = capsys.readouterr().err.rstrip().splitlines()
    shown = text.splitlines()
    assert shown == (printed[:1] if search else printed[:-2])


def test_the_start(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (code,) = re.findall(r"```python\n(.*?)```", START, re.DOTALL)
    finding, clean = re.findall(r"```text\n(.*?)```", START, re.DOTALL)
    Path("sums.py").write_text(code, encoding="utf-8")
    assert main(["sums.py"]) == 1
    assert capsys.readouterr().err == finding
    Path("sums.py").write_text(code.replace("row // 2", "row"), encoding="utf-8")
    assert main(["sums.py"]) == 0
    assert capsys.readouterr().out == clean
