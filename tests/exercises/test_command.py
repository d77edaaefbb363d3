"""`python -m exercises`: opens, judges, remembers; files that are no answers."""

import json
import os
import re

import pytest

from exercises import __main__ as command
from exercises.blanks import blank_of, clean, edited, open_lines
from exercises.catalogue import CATALOGUE, blank, solution_of
from exercises.grading import exercise_of, grade
from exercises.hints import Failure, hint_of


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.setattr(command, "FOLDER", tmp_path / "mine")
    return tmp_path / "mine"


def test_an_exercise_is_opened_judged_and_listed_as_done(folder, capsys):
    assert command.main(["rows"]) == 1
    assert (folder / "rows.py").read_text() == blank("rows")
    assert command.main(["rows", "--quick", "--hint", "3"]) == 1
    printed = capsys.readouterr().out
    hole = open_lines(blank("rows"), blank("rows"))[0]
    assert f"Begin with the hole in line {hole}." in printed
    (folder / "rows.py").write_text(clean(solution_of("rows")))
    assert command.main(["rows"]) == 0
    capsys.readouterr()
    assert command.main([]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == len(CATALOGUE) and lines[0].startswith("done  rows")


def test_a_file_is_kept_when_an_exercise_begins_again(folder):
    command.main(["rows"])
    (folder / "rows.py").write_text("x = 1\n")
    assert command.main(["rows", "--reset"]) == 1
    assert sorted(path.read_text() for path in folder.glob("rows*.py")) == sorted(
        ["x = 1\n", blank("rows")]
    )


def test_the_solution_is_shown_without_markers(capsys):
    assert command.main(["bug", "--solution"]) == 0
    shown = capsys.readouterr().out
    assert "used += blocks" in shown and not re.search("# (>>>|<<<|blank: )", shown)


def test_the_first_prediction_is_kept(folder, capsys):
    command.main(["ring"])
    path = folder / "ring.py"
    command.remember_prediction("ring", path)
    assert command.remembered("predictions") == {}
    for cycles in (9000, 11_000):
        path.write_text(blank("ring").replace("CYCLES = None", f"CYCLES = {cycles}"))
        command.remember_prediction("ring", path)
    assert json.loads((folder / "predictions.json").read_text()) == {"ring": "9000"}
    assert "your first prediction: 9000 cycles" in capsys.readouterr().out


def test_a_watched_file_is_judged_again_when_it_changes(folder, monkeypatch):
    command.main(["rows"])
    path, judged = folder / "rows.py", []

    def judge(name, path, **options):
        judged.append(path.stat().st_mtime_ns)
        if len(judged) == 2:
            raise KeyboardInterrupt
        return False

    monkeypatch.setattr(command, "judge", judge)
    monkeypatch.setattr(command.time, "sleep", lambda seconds: os.utime(path, (1, 1)))
    with pytest.raises(KeyboardInterrupt):
        command.main(["rows", "--watch"])
    assert judged[1] == 10**9 != judged[0]


@pytest.mark.parametrize(
    "edits, kind, line",
    [
        ([("def kernel(", "def kernel(:")], "SyntaxError", "def kernel("),
        ([("BLOCK_M, BLOCK_N = 64, 32", "BLOCK_M = 64")], "AttributeError", ""),
        ([("BLOCK_M, BLOCK_N = 64, 32", "BLOCK_M, BLOCK_N = 64")], "TypeError", "BLOCK_N = 64"),
        ([("def kernel(", "def other(")], "AttributeError", ""),
        ([("    q_ptr, k_ptr,", "    q_ptr,")], "TypeError", ""),
        ([("acc = tl.dot(p.to(v.dtype), v, acc)", "acc += nothing")], "InvalidKernel", "nothing"),
    ],
)
def test_what_is_no_answer_is_said_by_its_line(edits, kind, line, tmp_path):
    path = tmp_path / "tiled.py"
    path.write_text(clean(edited(solution_of("tiled"), edits)))
    with pytest.raises(Failure) as caught:
        list(grade(exercise_of("tiled"), path))
    failure = caught.value
    assert failure.kind == kind
    shown = hint_of(failure).line
    assert bool(shown) == bool(line) and line in (failure.source[shown - 1] if shown else "")


def test_a_hole_without_a_text_is_a_planted_mistake():
    solution = "a = 1\n# >>>\n# blank: b = 3\nb = 2\n# <<<\n# >>> Add.\n# All.\nc = a + b\n# <<<\n"
    blanked = "a = 1\nb = 3\n# 1. Add.\n#    All.\npass  # your code\n"
    assert blank_of(solution) == blanked
    assert clean(solution) == "a = 1\nb = 2\n# Add.\n# All.\nc = a + b\n"
    assert open_lines(blanked, blanked) == [5] and open_lines("pass\n", blanked) == []
