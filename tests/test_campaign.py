"""notebooks/campaign.py: what it leaves out and measures first, and what is kept when it ends."""

import importlib.util
import subprocess
import sys
import time
from pathlib import Path

import pytest

from gdpa_lab.measuring import record
from tests.records import SHORT, a_row, writer

FOLDER = record.ROOT / "notebooks"


@pytest.fixture
def campaign(monkeypatch):
    monkeypatch.syspath_prepend(str(FOLDER))
    spec = importlib.util.spec_from_file_location("campaign", FOLDER / "campaign.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def data(tmp_path):
    folder = tmp_path / "data"
    folder.mkdir()
    return folder


def stands_in(monkeypatch, campaign, program: str) -> list[tuple[str, int]]:
    """Run `program`, with its copy of the data as argument, for every chapter; who ran where."""
    seen = []

    def start(slug: str, device: int, data_dir: Path, logs: Path) -> subprocess.Popen:
        seen.append((slug, device))
        (logs / f"data-{device}").mkdir(exist_ok=True)
        command = [sys.executable, "-c", program, str(logs / f"data-{device}"), slug]
        return subprocess.Popen(command, start_new_session=True)

    monkeypatch.setattr(campaign, "start", start)
    return seen


WRITES = """
import pathlib, sys
folder = pathlib.Path(sys.argv[1], "records")
folder.mkdir(exist_ok=True)
(folder / f"{sys.argv[2]}.json").write_text("{}")
"""


def test_what_others_quote_comes_first_and_what_is_done_is_left_out(campaign, data):
    write = writer(data)
    write(a_row(), notebook="notebooks/backward/results.py")
    failed = a_row(samples_us=(), error=None, failure="not measured: the time was up")
    write(failed, day=2, notebook="notebooks/block/results.py")
    found = [*campaign.wanted("NVIDIA H200", data, [])]
    assert "backward/results" not in found
    assert found[:2] == ["forward/results", "block/results"], "a record that was cut off is not one"
    assert "backward/results" in campaign.wanted("NVIDIA H100", data, [])
    assert [*campaign.wanted("NVIDIA H200", data, ["training/step"])] == ["training/step"]


def test_a_record_of_other_code_is_measured_again(campaign, data, monkeypatch):
    writer(data)(a_row(), notebook="notebooks/block/results.py")
    monkeypatch.setattr(record.Package, "ran", lambda self, names, root: False)
    assert "block/results" in campaign.wanted("NVIDIA H200", data, [])


def test_a_piece_of_today_does_not_finish_a_chapter(campaign, data, monkeypatch):
    write, at = writer(data), {"notebook": "notebooks/block/results.py"}
    old = write(a_row(), a_row(SHORT), **at)
    piece = write(a_row(SHORT), day=2, **at)
    monkeypatch.setattr(campaign, "is_todays", lambda made: made.id == piece.id)
    assert "block/results" in campaign.wanted("NVIDIA H200", data, [])
    write(a_row(), day=3, **at)
    monkeypatch.setattr(campaign, "is_todays", lambda made: made.id != old.id)
    assert "block/results" in campaign.wanted("NVIDIA H200", data, []), "the whole one is old"
    write(a_row(), a_row(SHORT), day=4, **at)
    assert "block/results" not in campaign.wanted("NVIDIA H200", data, [])


def test_each_gpu_takes_the_next_and_its_records_are_kept(campaign, data, tmp_path, monkeypatch):
    seen = stands_in(monkeypatch, campaign, WRITES)
    campaign.run(["a", "b", "c"], [4, 7], time.monotonic() + 60, data, tmp_path)
    assert [slug for slug, _ in seen] == ["a", "b", "c"] and {x for _, x in seen} == {4, 7}
    assert {path.stem for path in data.glob("records/*.json")} == {"a", "b", "c"}


def test_when_the_time_is_up_nothing_runs_on(campaign, data, tmp_path, monkeypatch, capsys):
    stands_in(monkeypatch, campaign, "import time; time.sleep(600)")
    begun = time.monotonic()
    campaign.run(["a", "b"], [0], begun + 1.5, data, tmp_path)
    assert time.monotonic() - begun < 30
    said = capsys.readouterr().out
    assert "a: the time is up" in said and "left: b" in said
