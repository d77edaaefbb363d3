"""What is remembered of records and sources never changes an answer."""

import shutil

import pytest

from gdpa_lab.measuring import bounds, files, memory, record, refusals, sources
from gdpa_lab.report import results
from tests.measuring.test_record import a_record

NAME = "records/20261128T050638Z-forward-results-nvidia-h200-62ac9e84.json"
SOURCES = ("gdpa_kernels/gdpa/mask.py", "lab/gdpa_lab/measuring/record.schema.json")


@pytest.fixture
def forget(monkeypatch, tmp_path):
    """Return a function that starts the memory of another process, with a file of its own."""
    monkeypatch.setattr(memory, "PATH", tmp_path / "build" / "answers.json")
    caches = memory.answers, memory._sources, record._parse, record._beyond, sources._code_hash

    def start() -> None:
        for cached in caches:
            cached.cache_clear()

    start()
    yield start
    monkeypatch.undo()
    start()


@pytest.fixture
def data(forget, monkeypatch, tmp_path):
    """A folder that is taken for the repository's, with one of its records."""
    folder = tmp_path / "data"
    shutil.copytree(files.DATA_DIR / "systems", folder / "systems")
    (folder / "records").mkdir()
    for name in (NAME, "promoted.json"):
        shutil.copy(files.DATA_DIR / name, folder / name)
    monkeypatch.setattr(record, "DATA_DIR", folder)
    return folder


def asked(data, forget, monkeypatch) -> bool:
    """Whether another process checks the records again."""
    forget()
    with monkeypatch.context() as patched:
        seen = []
        for module, name in ((refusals, "_reasons"), (bounds, "contradictions")):
            check = getattr(module, name)
            patched.setattr(module, name, lambda x, f=check: [seen.append(x), f(x)][1])
        assert [run.id for run in record.load_all(data)] == [NAME[8:-5]]
    return bool(seen)


def test_records_are_checked_once(data, forget, monkeypatch):
    answers = []
    for first in (True, False):
        assert asked(data, forget, monkeypatch) is first
        answers.append(record.load_all(data))
    (data / NAME).write_text(f"{(data / NAME).read_text()} ")  # the same values in other bytes
    assert asked(data, forget, monkeypatch) and not asked(data, forget, monkeypatch)
    monkeypatch.setattr(memory, "_sources", lambda: "of another state")
    memory._sources.cache_clear = lambda: None
    assert asked(data, forget, monkeypatch) and not asked(data, forget, monkeypatch)
    for damage in ("", "[", "[1, 2]", "5"):
        memory.PATH.write_text(damage)
        assert asked(data, forget, monkeypatch) and not asked(data, forget, monkeypatch)
    assert record.load_all(data) == answers[0] == answers[1]


def test_a_machine_that_changed_is_refused_though_its_record_is_known(data, forget, monkeypatch):
    """Its name is a digest of what it is."""
    assert asked(data, forget, monkeypatch) and not asked(data, forget, monkeypatch)
    (run,) = record.load_all(data)
    path = data / "systems" / f"{run.system}.json"
    path.write_text(path.read_text().replace('"num_sms": 132', '"num_sms": 1'))
    forget()
    with pytest.raises(record.RecordError):
        record.load_all(data)


def test_the_sources_are_all_that_checks(forget, monkeypatch, tmp_path):
    monkeypatch.setattr(files, "DATA_DIR", tmp_path / "data")
    hashes = {memory._sources()}
    for name in SOURCES:
        (tmp_path / name).parent.mkdir(parents=True)
        for text in ("one", "another"):
            (tmp_path / name).write_text(text)
            memory._sources.cache_clear()
            hashes.add(memory._sources())
    assert len(hashes) == 5


def test_nothing_is_remembered_of_another_folder(forget, tmp_path):
    machine = record.systems.describe()
    record.systems.save(machine, tmp_path)
    (tmp_path / "promoted.json").write_text(f'{{"": ["{machine.id}"]}}')
    record.write(a_record(), tmp_path)
    record.load_all(tmp_path)
    assert not memory.PATH.exists()


def test_results_are_the_same_with_and_without(forget):
    first = results.table()
    assert memory.PATH.exists()
    forget()
    again = results.table()
    assert first.equals(again) and results.to_csv(first) == results.to_csv(again)
