"""A data folder beside its history: what a commit held stays, unless a correction says why."""

import shutil

import pytest

from gdpa_lab.measuring import history, record, system
from gdpa_lab.report import doctor
from tests.measuring.test_record import a_record
from tests.records import committed, git

TABLE = "published/table.csv"
FIRST = "bar,value,note\na,1.5,\nb,2.5,\n"


@pytest.fixture
def data_dir(tmp_path):
    """A folder with a record and a table, in one commit."""
    folder = tmp_path / "clone" / "data"
    system.save(system.describe(), folder)
    record.write(a_record(), folder)
    write(folder, FIRST)
    committed(folder.parent)
    return folder


def write(data_dir, text: str, name: str = TABLE):
    (data_dir / name).parent.mkdir(exist_ok=True)
    (data_dir / name).write_text(text)


def reasons(data_dir) -> list[str]:
    return [f"{error.file.name}: {error.reason}" for error in history.problems(data_dir)]


def lacks(row: str) -> list[str]:
    said = "table.csv: must hold a row that a commit has, or corrections.csv say why not: "
    return [f"{said}{row}"]


@pytest.mark.parametrize(
    "text",
    (
        f"{FIRST}c,3.5,\n",
        "bar,value,note\nb,2.5,\na,1.5,read twice\n",  # in another order, a cell filled
        "bar,value,note,error\na,1.5,,0.1\nb,2.5,,0.1\n",  # a column
    ),
)
def test_what_is_added_is_no_change(data_dir, text):
    write(data_dir, "{}", "records/another.json")
    write(data_dir, text)
    assert reasons(data_dir) == []


@pytest.mark.parametrize("in_git", (False, True))
@pytest.mark.parametrize("text", ("bar,value,note\nb,2.5,\na,1.4,\n", "bar,value,note\nb,2.5,\n"))
def test_a_correction_says_why_a_row_changed(data_dir, text, in_git):
    write(data_dir, text)
    if in_git:
        committed(data_dir.parent)
    assert reasons(data_dir) == lacks("bar=a; value=1.5")
    for file, held, left in ((TABLE, "bar=b; *", 1), ("other.csv", "*", 1), (TABLE, "bar=a; *", 0)):
        write(data_dir, f"file,held,reason\n{file},{held},misread\n", history.CORRECTIONS)
        assert len(reasons(data_dir)) == left


def test_a_merge_that_drops_a_record_is_found(data_dir):
    clone = data_dir.parent
    main = git(clone, "branch", "--show-current")
    git(clone, "checkout", "-qb", "another")
    write(data_dir, "{}", "records/another.json")
    committed(clone)
    git(clone, "checkout", "-q", main)
    git(clone, "commit", "-q", "--allow-empty", "-m", "later")
    git(clone, "merge", "-q", "--strategy=ours", "-m", "merged", "another")
    (reason,) = reasons(data_dir)
    assert reason.startswith(
        "another.json: cannot be read: No such file or directory, and a commit"
    )


def test_a_shallow_clone_compares_with_what_it_has(data_dir, tmp_path):
    write(data_dir, FIRST.replace("1.5", "1.4"))
    committed(data_dir.parent)
    git(tmp_path, "clone", "-q", "--depth=1", data_dir.parent.as_uri(), "shallow")
    shallow = tmp_path / "shallow" / "data"
    assert reasons(data_dir) == lacks("bar=a; value=1.5") and reasons(shallow) == []
    write(shallow, FIRST)
    assert reasons(shallow) == lacks("bar=a; value=1.4")


def test_without_a_history_nothing_is_compared(data_dir, tmp_path):
    copy = shutil.copytree(data_dir, tmp_path / "copy")
    write(copy, "bar,value,note\n")
    assert reasons(copy) == []
    finding = doctor.check_records(copy)
    assert finding.ok and finding.detail == "1 read, 0 refused; no history in git to hold them to"
    assert doctor.check_records(data_dir).detail == "1 read, 0 refused"
    untracked = shutil.copytree(copy, data_dir.parent / "build")
    assert reasons(untracked) == []
