"""Of each exercise the blank fails with its hint, the solution passes, wrong answers get theirs."""

import ast
from pathlib import Path

import pytest

from exercises import page
from exercises.blanks import clean, edited, open_lines
from exercises.catalogue import CATALOGUE, blank, solution_of, wrong_of
from exercises.grading import LIMITS, exercise_of, grade
from exercises.hints import RULES, Failure, hint_of
from tests.tiers import sweep

BLANKS = {
    **dict.fromkeys(("rows", "tiled", "tma", "list", "block"), "blank"),
    **dict.fromkeys(("lengths", "phases", "ring", "by_hand"), "zeros"),
    "activate": "activation", "predict": "predict-first", "pingpong": "never-released",
    "bug": "out-of-step", "dq": "lost-update", "tensor_memory": "nothing-written",
}  # fmt: skip
"""The hints of the files that readers begin with."""


def judged(name, text, folder, *, quick=True):
    """The stages of a file that hold, and the failure that ended it, None without one."""
    path = folder.resolve() / f"{name}.py"
    path.write_text(text, encoding="utf-8")
    stages = []
    try:
        for stage in grade(exercise_of(name), path, quick=quick):
            stages.append(stage)
    except Failure as failure:
        return stages, failure
    return stages, None


@pytest.mark.parametrize("name", CATALOGUE)
def test_a_blank_fails_with_its_hint(name, tmp_path):
    _, failure = judged(name, blank(name), tmp_path)
    assert failure is not None
    assert hint_of(failure, exercise_of(name).rules).rule == BLANKS[name], failure


@pytest.mark.parametrize("name", CATALOGUE)
def test_a_solution_passes(name, tmp_path):
    stages, failure = judged(name, clean(solution_of(name)), tmp_path)
    assert failure is None and len(stages) > 1, failure
    assert not open_lines(clean(solution_of(name)), blank(name))


@pytest.mark.sweep
@pytest.mark.parametrize("name", CATALOGUE)
def test_a_solution_passes_every_stage(name, tmp_path):
    stages, failure = judged(name, clean(solution_of(name)), tmp_path, quick=False)
    assert failure is None, failure
    names = {stage.stage for stage in stages}
    assert names >= {"schedules", "compiled"} or "predicted" in names


WRONG = [(name, what) for name in CATALOGUE for what in wrong_of(name)]


@pytest.mark.parametrize("name, what", [sweep(*each, id=f"{each[0]}: {each[1]}") for each in WRONG])
def test_a_wrong_answer_gets_its_hint(name, what, tmp_path, monkeypatch):
    wrong, exercise = wrong_of(name)[what], exercise_of(name)
    if wrong.hint == "endless":
        monkeypatch.setitem(LIMITS, "timeout", 1.0)
    text = clean(edited(solution_of(name), wrong.edits))
    for quick in (True, False):
        _, failure = judged(name, text, tmp_path, quick=quick)
        if failure is not None:
            break
    assert failure is not None
    hint = hint_of(failure, exercise.rules)
    assert hint.rule == wrong.hint, f"{failure} {failure.lines}"
    assert wrong.line in (failure.source[hint.line - 1] if wrong.line else "")


EMPTY = "tlx.alloc_warp_barrier(STAGES, 4, CONSUMERS)"
S_ENDS = "                s = tlx.async_dot_wait(0, s)\n"
V_FETCHED = "                fetch_rows(v_desc"
LETS_GO = "                tlx.barrier_arrive(empty[stage])\n"
RIGHT = {
    "one arrival of each consumer": ("ring", [(EMPTY, "tlx.alloc_barriers(STAGES, 2)")]),
    "three stages": ("ring", [("BLOCK_N, STAGES = 64, 2", "BLOCK_N, STAGES = 64, 3")]),
    "one stage of 128 keys": ("ring", [("BLOCK_N, STAGES = 64, 2", "BLOCK_N, STAGES = 128, 1")]),
    "other names": ("ring", [("stage", "slot"), ("phase", "parity"), ("empty", "free")]),
    "K let go of by itself": (
        "ring",
        [
            (f"    empty = {EMPTY}\n", f"    empty = {EMPTY}\n    v_empty = {EMPTY}\n"),
            (
                V_FETCHED,
                f"                tlx.barrier_wait(v_empty[stage], phase ^ 1)\n{V_FETCHED}",
            ),
            (LETS_GO, LETS_GO.replace("empty", "v_empty")),
            (S_ENDS, S_ENDS + LETS_GO),
        ],
    ),
    "an early return": (
        "tiled",
        [
            (
                "    # >>> Store",
                "    if first_row >= end_q - start_q:\n        return\n    # >>> Store",
            )
        ],
    ),
    "P in fp32": ("tiled", [("p.to(v.dtype), v, acc", "p, v.to(tl.float32), acc")]),
}


@pytest.mark.sweep
@pytest.mark.parametrize("what", RIGHT)
def test_another_right_answer_passes(what, tmp_path):
    name, edits = RIGHT[what]
    _, failure = judged(name, clean(edited(solution_of(name), edits)), tmp_path, quick=False)
    assert failure is None, failure


@pytest.mark.parametrize("name", CATALOGUE)
def test_an_exercise_has_three_wrong_answers(name):
    assert len(wrong_of(name)) >= 3


def test_every_hint_is_that_of_a_blank_or_a_wrong_answer():
    """A rule that nothing shows may say something false."""
    shown = {wrong_of(name)[what].hint for name, what in WRONG} | set(BLANKS.values())
    every = {rule.name for rule in RULES}
    every |= {rule.name for name in CATALOGUE for rule in exercise_of(name).rules}
    assert every == shown


def without_each(name):
    """The solution without each statement of its holes in turn, as far as that is Python."""
    lines, inside = solution_of(name).splitlines(keepends=True), False
    for i, line in enumerate(lines):
        inside = (inside or "# >>>" in line) and "# <<<" not in line
        text = clean("".join(lines[:i] + lines[i + 1 :]))
        if inside and not line.strip().startswith("#"):
            try:
                ast.parse(text)
            except SyntaxError:
                continue
            yield line.strip(), text


@pytest.mark.nightly
@pytest.mark.parametrize("name", [name for name in CATALOGUE if name != "predict"])
def test_no_statement_of_a_hole_can_be_left_out(name, tmp_path):
    passed = [line for line, text in without_each(name) if judged(name, text, tmp_path)[1] is None]
    assert not [line for line in passed if not line.startswith(("CYCLES", "SAME_BITS"))]


ROOT = Path(__file__).parents[2]


def test_the_page_of_the_book_is_that_of_the_catalogue():
    assert page.PATH.read_text(encoding="utf-8") == page.page(), "run python -m exercises.page"


@pytest.mark.parametrize("name", CATALOGUE)
def test_the_chapter_of_an_exercise_and_of_its_hints_exist(name):
    chapter = ROOT / "notebooks" / f"{CATALOGUE[name].chapter}.py"
    assert f"NAME={name}`" in chapter.read_text(encoding="utf-8")
    for rule in (*RULES, *exercise_of(name).rules):
        assert (ROOT / "notebooks" / f"{rule.chapter}.py").exists(), rule.name
