"""The register of the chapters' predictions: what counts, and whether git held it first."""

import ast
import subprocess
from collections import Counter
from functools import cache

import nbformat
import pandas as pd
import pytest

from gdpa_lab.measuring import record
from gdpa_lab.report import registered
from notebooks.measuring import _refuted
from tests.records import committed

LINES = registered.load()
RECORD = "20261122T120000Z-a-chapter"


def git(*arguments: str) -> subprocess.CompletedProcess:
    return subprocess.run(["git", *arguments], cwd=record.ROOT, capture_output=True, text=True)


@cache
def shown(*arguments: str) -> str:
    return git("show", *arguments).stdout


@pytest.mark.parametrize(
    "found, least, most, word, margin",
    [
        (1.2, 0.5, 1.0, "refuted", -0.2),
        (0.4, 0.5, 1.0, "refuted", -0.2),
        (0.6, 0.5, 1.0, "confirmed", 0.2),
        (0.5, 0.5, 1.0, "confirmed", 0),
        (3.0, 0.0, float("inf"), "confirmed", None),
    ],
)
def test_a_verdict_has_a_margin(found, least, most, word, margin):
    says = registered.verdict(found, least, most)
    assert says.word == word and says.margin == (None if margin is None else pytest.approx(margin))


@pytest.mark.parametrize(
    "changes, standing",
    [
        ({}, "predicted"),
        ({"date": "2026-11-22T13:00:00+01:00"}, "expected"),  # the second of the record
        ({"date": "2026-11-22T12:59:59+01:00"}, "predicted"),
        ({"commit": "", "date": ""}, "expected"),
        ({"known": "published bars"}, "known before"),
    ],
)
def test_only_what_git_held_before_the_record_was_predicted(changes, standing):
    line = {"commit": "a" * 40, "date": "2026-11-22T11:00:00+00:00", "record": RECORD, "known": ""}
    assert registered.standing(pd.Series(line | changes)) == standing


@pytest.fixture
def executed(tmp_path):
    """A folder of one executed chapter with a refuted and a confirmed prediction."""
    known = {"text": "So.", "limits": "at most 1", "found": "2"}
    facts = [
        {**known, "id": f"a/b#{n}", "word": word, "margin": margin}
        for n, word, margin in ((1, "refuted", -1.0), (2, "confirmed", None))
    ]
    outputs = [
        nbformat.v4.new_output("display_data", {"text/plain": ""}, metadata={"prediction": fact})
        for fact in facts
    ]
    cell = nbformat.v4.new_code_cell("", outputs=outputs)
    (tmp_path / "executed" / "a").mkdir(parents=True)
    nbformat.write(nbformat.v4.new_notebook(cells=[cell]), tmp_path / "executed/a/b.ipynb")
    return tmp_path / "executed"


def lines(*rows: dict) -> pd.DataFrame:
    return pd.DataFrame(rows, columns=registered.COLUMNS, dtype=object).fillna("")


def test_the_page_has_every_verdict_with_its_cause(executed, tmp_path):
    path = tmp_path / "h200.csv"
    good = [
        {"id": "a/b#1", "limits": "at most 1", "cause": "host", "lesson": "x"},
        {"id": "a/b#2", "limits": "at most 1", "known": "published bars"},
    ]
    lines(*good).to_csv(path, index=False)
    table = _refuted.judged(executed, path)
    assert list(table["standing"]) == ["expected", "known before"]
    assert list(table["cause"]) == ["host", ""]
    for wrong, named in (
        ([good[0] | {"cause": ""}, good[1]], "a/b#1"),
        ([good[0], good[1] | {"limits": "at most 2"}], "a/b#2"),
        (good[:1], "a/b#2"),
        ([*good, {"id": "a/b#3", "limits": "at most 1"}], "a/b#3"),
    ):
        lines(*wrong).to_csv(path, index=False)
        with pytest.raises(ValueError, match=f"registered; not so for {named}$"):
            _refuted.judged(executed, path)


def test_the_command_finds_the_first_commit_and_drops_evidence_of_other_limits(
    executed, tmp_path, monkeypatch
):
    commits = []
    for text in ("nothing", "at most 1", "at most 1, again"):
        (tmp_path / "note.md").write_text(text)
        commits.append(committed(tmp_path))
    monkeypatch.setattr(registered.records, "ROOT", tmp_path)
    evidence = {"path": "note.md", "quote": "at most 1", "record": RECORD}
    old = lines(
        {"id": "a/b#1", "limits": "at most 1", "cause": "host"} | evidence,
        {"id": "a/b#2", "limits": "at most 2"} | evidence,
    ).set_index("id")
    first, other = registered.derive(registered.collected(executed), old).to_dict("records")
    assert first["commit"] == commits[1] and first["cause"] == "host"
    assert (other["quote"], other["commit"], other["limits"]) == ("", "", "at most 1")
    old.loc["a/b#1", "quote"] = "never said"
    with pytest.raises(LookupError, match="a commit must add 'never said' to note.md"):
        registered.derive(registered.collected(executed), old)


def test_every_chapter_that_predicts_has_its_lines():
    calls, named = Counter(), set()
    for path in (record.ROOT / "notebooks").glob("*/*.py"):
        slug = path.relative_to(record.ROOT / "notebooks").with_suffix("").as_posix()
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            calls[slug] += isinstance(node, ast.Attribute) and node.attr == "predict"
            if isinstance(node, ast.keyword) and node.arg == "registered":
                named.add(ast.literal_eval(node.value))
                calls[slug] -= 1
    counts = Counter(name.partition("#")[0] for name in LINES.index)
    assert named <= set(LINES.index)
    assert set(+calls) | {name.partition("#")[0] for name in named} == set(counts)
    assert all(counts[slug] >= count for slug, count in calls.items())
    for slug, count in counts.items():
        assert {f"{slug}#{n + 1}" for n in range(count)} <= set(LINES.index)


@cache
def added(path: str) -> str:
    """The commit that added a file."""
    return git("log", "--diff-filter=A", "--format=%H", "--", path).stdout.split()[-1]


def test_git_holds_what_the_file_says():
    """Needs the history: a shallow clone has the file alone."""
    held = LINES[LINES["commit"] != ""]
    if git("cat-file", "-e", held["commit"].iloc[0]).returncode:
        pytest.skip("this clone has no history")
    for name, line in held.iterrows():
        assert line["quote"] in shown(f"{line['commit']}:{line['path']}"), name
        assert shown("-s", "--format=%cI", line["commit"]).strip() == line["date"], name
        path = f"data/records/{line['record']}.json"
        assert (record.ROOT / path).exists(), name
        if registered.standing(line) == "predicted":
            order = git("merge-base", "--is-ancestor", line["commit"], added(path))
            assert order.returncode == 0, name


def test_causes_are_named_and_taught():
    lines = LINES[LINES["cause"] != ""]
    assert set(lines["cause"]) <= set(_refuted.CAUSES)
    assert (lines["lesson"].str.len() > 20).all()
