"""The manifest: what it lists is there, is what was written, and nothing else counts."""

import re
import shutil
import subprocess
from dataclasses import replace

import pytest

from gdpa_lab.measuring import manifest, record, system
from gdpa_lab.measuring.manifest import RecordError
from gdpa_lab.report import doctor
from tests.measuring.test_record import a_record


@pytest.fixture
def data_dir(tmp_path):
    """A folder with an empty manifest."""
    (tmp_path / manifest.NAME).touch()
    return tmp_path


def fill(data_dir):
    """Write a system and a record; the record's path."""
    system.save(system.describe(), data_dir)
    return record.write(a_record(), data_dir)


def test_what_is_written_is_listed(data_dir):
    path = fill(data_dir)
    system.save(system.describe(), data_dir)  # there already
    (machine,) = (data_dir / "systems").iterdir()
    assert manifest.listed(data_dir) == {
        f"systems/{machine.name}": manifest.digest(machine.read_bytes()),
        f"records/{path.name}": manifest.digest(path.read_bytes()),
    }
    assert [r.id for r in record.load_all(data_dir)] == [path.stem]
    assert doctor.check_records(data_dir).detail == "1 read, 0 refused"
    if shutil.which("sha256sum"):
        command = ["sha256sum", "--check", "--strict", manifest.NAME]
        subprocess.run(command, cwd=data_dir, check=True)


def test_a_folder_without_a_manifest_gets_none(tmp_path):
    path = fill(tmp_path)
    assert not (tmp_path / manifest.NAME).exists()
    assert manifest.expected(path) is None
    record.load(path)
    finding = doctor.check_records(tmp_path)
    assert finding.ok and finding.detail == "1 read, 0 refused; no manifest.sha256 to hold them to"
    finding = doctor.check_records(tmp_path / "elsewhere")
    assert not finding.ok and "must be a folder that holds records/, got" in finding.detail


@pytest.mark.parametrize("folder", ("records", "systems"))
def test_an_edit_is_refused(data_dir, folder):
    path = fill(data_dir)
    record.load(path)
    (edited,) = (data_dir / folder).iterdir()
    edited.write_bytes(edited.read_bytes() + b"\n")  # the same values
    with pytest.raises(RecordError, match=f"{folder}/{edited.name}: SHA-256 must be .*, got "):
        record.load(path)


def test_what_is_not_listed_is_refused(data_dir):
    path = fill(data_dir)
    lines = (data_dir / manifest.NAME).read_text().splitlines(keepends=True)
    (data_dir / manifest.NAME).write_text(lines[0])
    with pytest.raises(RecordError, match="must be listed in manifest.sha256, and is not"):
        record.load(path)
    with pytest.raises(RecordError, match="1 refused\nrefused records/.*must be listed"):
        record.load_all(data_dir)


@pytest.mark.parametrize("name", [None, "elsewhere.JSON", ".hidden.json"])
def test_what_is_listed_must_be_there(data_dir, name):
    path = fill(data_dir)
    if name is None:
        path.unlink()
    else:
        path.rename(path.with_name(name))
    loaded, errors = record.survey(data_dir)
    assert loaded == []
    assert f"records/{path.name}: cannot be read: No such file or directory" in map(str, errors)


@pytest.mark.parametrize(
    ("damage", "line"),
    [
        (lambda text: text[:-1], 2),  # the last line break
        (lambda text: text.upper(), 1),
        (lambda text: text + text.splitlines(keepends=True)[1], 3),  # a file listed twice
        (lambda text: text.replace("  records/", "  ../records/"), 2),
        (lambda text: text.replace("  records/", "  /records/"), 2),
        (lambda text: "\n" + text, 1),
        (lambda text: text.encode("utf-16").decode("latin-1"), 1),
    ],
)
def test_a_damaged_manifest_is_named(data_dir, damage, line):
    path = fill(data_dir)
    made = record.load(path)
    file = data_dir / manifest.NAME
    file.write_bytes(damage(file.read_text()).encode("latin-1"))
    reason = f"{re.escape(data_dir.name)}/{manifest.NAME}: line {line} must be a SHA-256, two"
    for read in (lambda: record.load(path), lambda: record.load_all(data_dir)):
        with pytest.raises(RecordError, match=reason):
            read()
    with pytest.raises(RecordError, match=reason):
        record.write(replace(made, id=f"{made.id}-again"), data_dir)
    assert list((data_dir / "records").iterdir()) == [path]


def test_the_repository_must_have_one(tmp_path, monkeypatch):
    path = fill(tmp_path)
    monkeypatch.setattr(manifest, "DATA_DIR", tmp_path.resolve())
    for read in (lambda: record.load(path), lambda: record.load_all(tmp_path)):
        with pytest.raises(RecordError, match=f"{manifest.NAME}: must list .*, and is missing"):
            read()


def test_the_repositorys_manifest_lists_its_files():
    """After an edit: python -m gdpa_lab maintain manifest."""
    manifest.verify(manifest.DATA_DIR)
    there = {
        path.relative_to(manifest.DATA_DIR).as_posix()
        for path in manifest.DATA_DIR.rglob("*")
        if path.is_file() and path.suffix != ".md" and path.name != manifest.NAME
    }
    listed = set(manifest.listed(manifest.DATA_DIR))
    assert listed == {name for name in there if not name.startswith(("community/", "partial/"))}
    assert {"claims.yml", "promoted.json", "predictions/b200.csv", "tools/seeded.json"} < listed


def test_other_files_are_held_to_the_manifest_and_listed_again(data_dir):
    path = fill(data_dir)
    claims, table = data_dir / "claims.yml", data_dir / "published" / "table.csv"
    table.parent.mkdir()
    for file in (claims, table, data_dir / "README.md"):
        file.write_text("1")
    refused = [str(error).partition(":")[0] for error in manifest.problems(data_dir)]
    assert refused == [f"{data_dir.name}/claims.yml", "published/table.csv"]
    assert manifest.update(data_dir)
    before = (data_dir / manifest.NAME).stat()
    assert not manifest.update(data_dir), "others may be reading it"
    assert (data_dir / manifest.NAME).stat() == before
    manifest.verify(data_dir)
    assert [r.id for r in record.load_all(data_dir)] == [path.stem]
    table.write_text("2")
    refused = "1 refused\nrefused published/table.csv: SHA-256 must be"
    with pytest.raises(RecordError, match=refused):
        record.load_all(data_dir)
    listed = data_dir / manifest.NAME
    listed.write_text(f"{'0' * 64}  claims.yml\n{listed.read_text()}")  # as a merge leaves it
    assert manifest.update(data_dir)
    table.unlink()
    with pytest.raises(RecordError, match="table.csv: cannot be read"):
        manifest.verify(data_dir)
    assert manifest.update(data_dir)
    manifest.verify(data_dir)
    path.write_text("edited")
    assert not manifest.update(data_dir)
