"""Attacks on data/: what is refused and by which name, and what is shown where nothing can tell.

Each is made on a copy with digest and manifest redone as data/README.md documents, once without
and once with the history of the folder in git.
"""

import hashlib
import json
import shutil
import statistics
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import pytest

from _lib import ratios
from gdpa_lab import __main__
from gdpa_lab.measuring import manifest, record, refusals, system
from gdpa_lab.report import measured_rankings, page, results
from gdpa_lab.report.chapter import Chapter
from tests.records import H200, committed

OLD = "20261122T133040Z-forward-results-nvidia-h200-62ac9e84"
NEW = "20261122T191500Z-forward-results-nvidia-h200-62ac9e84"
WORKLOADS = ("gdpa-self-full-1024", "gdpa-self-full-256")
PEERS = ("cudnn", "fa4_dense")


class Folder:
    """A copy of data/ with two records, and what an attacker does to it."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def list(self, name: str) -> None:
        """List a file as it is now."""
        sha256 = hashlib.sha256((self.root / name).read_bytes()).hexdigest()
        self.unlist(name)
        with (self.root / manifest.NAME).open("a") as file:
            file.write(f"{sha256}  {name}\n")

    def unlist(self, name: str) -> None:
        path = self.root / manifest.NAME
        lines = path.read_text().splitlines(keepends=True)
        path.write_text("".join(line for line in lines if not line.endswith(f"  {name}\n")))

    @property
    def newest(self) -> Path:
        return self.root / "records" / f"{NEW}.json"

    def changed(self, change: Callable[[dict], None], root: Path, digest: bool = True) -> Path:
        """The newest record, changed, in the data folder `root`."""
        data = json.loads(self.newest.read_text())
        change(data)
        if digest:
            data["digest"] = refusals.digest(data)
        path = root / "records" / f"{data['id']}.json"
        path.parent.mkdir(exist_ok=True)
        path.write_text(json.dumps(data))
        return path

    def edit(self, change: Callable[[dict], None], digest: bool = True, listed: bool = True):
        """Change the newest record."""
        path = self.changed(change, self.root, digest)
        if path != self.newest:
            self.newest.unlink()
        if listed:
            self.unlist(f"records/{NEW}.json")
            self.list(f"records/{path.name}")

    def append(self, name: str) -> None:
        path = self.root / name
        path.write_text(path.read_text().replace("1", "2", 1))

    def pretend(self, root: Path | None = None, share: float = 0.8, **machine: object) -> None:
        """The newest record, `share` of its times, as of another machine; the system with it."""
        other = replace(H200, **machine)
        root = root or self.root
        system.save(other, root)

        def change(data: dict) -> None:
            scale(share)(data)
            data.update(id=data["id"].replace(data["system"], other.id), system=other.id)

        manifest.add(self.changed(change, root))


def scale(share: float, parts: tuple[str, ...] = ("rows", "ceilings"), joules: bool = True):
    """Multiply times, and energies, by `share`."""

    def change(data: dict) -> None:
        for timed in (timed for part in parts for timed in data[part]):
            timed["samples_us"] = [share * us for us in timed["samples_us"]]
            load = timed.get("load")
            if load and joules:
                load["joules"] *= share
                load["power_w"] = load["joules"] / statistics.fmean(timed["samples_us"]) * 1e6

    return change


def first(**values: object) -> Callable[[Folder], None]:
    """Change the error of the first row that was checked."""

    def change(data: dict) -> None:
        next(row for row in data["rows"] if row["error"])["error"].update(values)

    return lambda folder: folder.edit(change)


def one_sample(data: dict) -> None:
    next(row for row in data["rows"] if row["samples_us"])["samples_us"][0] *= 1.5


def without_peers(data: dict) -> None:
    data["rows"] = [row for row in data["rows"] if row["impl"] not in PEERS]


def planned_without_peers(data: dict) -> None:
    names = ("workload", "direction", "impl", "scope", "variant")
    rows = [row for row in data["rows"] if row["scope"] in results.TIMED]
    data["plan"] = [[row[name] for name in names] for row in rows]
    without_peers(data)


def later(data: dict) -> None:
    data.update(created="2999-01-01T00:00:00Z", id=data["id"].replace(NEW[:16], "29990101T000000Z"))


def raise_clock(data: dict) -> None:
    next(row for row in data["rows"] if row.get("load"))["load"]["sm_clock_mhz"] = 2500


def rename(data: dict) -> None:
    data["workloads"]["gdpa-self-full-9"] = data["workloads"].pop("gdpa-self-full-1024")
    for row in data["rows"]:
        row["workload"] = row["workload"].replace("full-1024", "full-9")


def delete_and_unlist(folder: Folder) -> None:
    folder.newest.unlink()
    folder.unlist(f"records/{NEW}.json")


def promote_a_stranger(folder: Folder) -> None:
    """Promote a system under the name of the GPU that the book quotes."""
    folder.pretend(gpu="NVIDIA GH200 480GB")
    other = replace(H200, gpu="NVIDIA GH200 480GB").id
    listed = {"NVIDIA H200": [H200.id, other]}
    (folder.root / system.PROMOTED).write_text(json.dumps(listed))
    manifest.update(folder.root)


class Attack(NamedTuple):
    """`alone`: the reason without a history, "" if nothing can tell; `history`: whether it touches
    a line that was committed, which alone is a reason."""

    run: Callable[[Folder], object]
    alone: str
    history: bool = True


LISTED = "must list records/.*, as a commit of its history does"
ATTACKS = {
    "a sample": Attack(lambda f: f.edit(one_sample, False, False), "SHA-256 must be", False),
    "a sample, digest": Attack(lambda f: f.edit(one_sample, True, False), "SHA-256 must", False),
    "a sample, manifest": Attack(lambda f: f.edit(one_sample, False), "digest must be"),
    "a workload's name": Attack(lambda f: f.edit(rename), "name must be its key"),
    "rows 25 % faster": Attack(lambda f: f.edit(scale(0.75, ("rows",))), "at most 105 % of the"),
    "all 4 times as fast": Attack(lambda f: f.edit(scale(0.25)), "at most 1071 TFLOP/s, 132 SMs"),
    "all times x 0.8": Attack(lambda f: f.edit(scale(0.8)), "at most 4917 GB/s, memory at"),
    "not energies": Attack(lambda f: f.edit(scale(0.95, joules=False)), "power_w must be"),
    "all times and energies x 0.95": Attack(lambda f: f.edit(scale(0.95)), ""),
    "peers dropped": Attack(lambda f: f.edit(without_peers), ""),
    "planned peers dropped": Attack(
        lambda f: f.edit(planned_without_peers), "rows must hold .*/cudnn/.*, which the run planned"
    ),
    "a budget of 1e6": Attack(first(budget=1e6, max_abs=1e5), "budget must be at most"),
    "a budget doubled": Attack(
        first(budget=5.0, max_abs=4.0), "budget must be one of its workload"
    ),
    "a budget not of its parts": Attack(
        first(pytorch=0.5, rounding=0.1), "budget must be 1.1, 2 times pytorch"
    ),
    "a clock beyond the highest": Attack(lambda f: f.edit(raise_clock), "must be at most 1980"),
    "a date to come": Attack(lambda f: f.edit(later), "must be in the past"),
    "a record deleted": Attack(lambda f: f.newest.unlink(), "cannot be read", False),
    "deleted and unlisted": Attack(delete_and_unlist, ""),
    "only unlisted": Attack(lambda f: f.unlist(f"records/{NEW}.json"), "must be listed"),
    "no manifest": Attack(lambda f: (f.root / manifest.NAME).unlink(), "", False),
    "a GH200": Attack(lambda f: f.pretend(gpu="NVIDIA GH200 480GB"), "belong in comm", False),
    "an H200 NVL": Attack(lambda f: f.pretend(gpu="NVIDIA H200 NVL"), "belong in comm", False),
    "an H200 of another clock": Attack(
        lambda f: f.pretend(max_sm_clock_mhz=9e3, max_memory_clock_mhz=2e4, share=0.25),
        "belong in community", False,
    ),
    "a GH200 promoted as H200": Attack(promote_a_stranger, "lists for its GPU", False),
    "a system": Attack(lambda f: f.append(f"systems/{H200.id}.json"), "SHA-256 must be", False),
    **{
        name: Attack(lambda f, name=name: f.append(name), f"{name}: SHA-256", False)
        for name in ("predictions/b200.csv", "published/gdpa_figures.csv", "claims.yml",
                     "tools/seeded.json")
    },
    "a stray file": Attack(
        lambda f: (f.root / "records" / "x.json").write_text("{}"), "x.json: must be listed", False
    ),
}  # fmt: skip


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """Everything in data/ but most records, and of two records two workloads: quickly read."""
    data = tmp_path_factory.mktemp("whole") / "data"
    shutil.copytree(record.DATA_DIR, data, ignore=shutil.ignore_patterns("2*-nvidia-*"))
    shutil.copytree(record.DATA_DIR / "systems", data / "systems", dirs_exist_ok=True)
    lines = (data / manifest.NAME).read_text().splitlines(keepends=True)
    (data / manifest.NAME).write_text("".join(x for x in lines if "  records/" not in x))
    for name in (OLD, NEW):
        run = record.load(record.DATA_DIR / "records" / f"{name}.json")
        rows = (row for row in run.rows if row.workload in WORKLOADS)
        record.write(replace(run, rows=tuple(rows)), data)
    return data


@pytest.fixture
def folder(whole, tmp_path):
    return Folder(Path(shutil.copytree(whole, tmp_path / "data")))


def readers(data_dir: Path) -> list[Callable[[], object]]:
    """List the sources of figures, sentences, README and `auto`."""
    return [
        lambda: results.latest_record(data_dir, notebook="notebooks/forward/results.py"),
        lambda: results.table(data_dir),
        lambda: measured_rankings.from_records(data_dir, "gdpa"),
        lambda: Chapter("forward/results", data_dir=data_dir).record(),
    ]


@pytest.mark.parametrize("name", ATTACKS)
def test_an_attack_on_a_folder_without_a_history(folder, name):
    attack = ATTACKS[name]
    attack.run(folder)
    if attack.alone:
        for read in readers(folder.root):
            with pytest.raises(record.RecordError, match=attack.alone):
                read()
        return
    # Nothing in the folder can tell: what a page says is which record it quotes.
    found = results.latest_record(folder.root, notebook="notebooks/forward/results.py")
    said = page.provenance([found.id], data_dir=folder.root).data
    assert found.id in said and H200.gpu in said and found.package.commit[:10] in said
    assert found.id == (OLD if name == "deleted and unlisted" else NEW)


@pytest.mark.parametrize("in_git", (False, True))
@pytest.mark.parametrize("name", [name for name, attack in ATTACKS.items() if attack.history])
def test_the_history_knows_every_line(folder, name, in_git):
    committed(folder.root.parent)
    ATTACKS[name].run(folder)
    if in_git:
        committed(folder.root.parent)
    with pytest.raises(record.RecordError, match=LISTED):
        results.table(folder.root)


def test_a_manifest_that_was_committed_must_stay(folder):
    committed(folder.root.parent)
    (folder.root / manifest.NAME).unlink()
    with pytest.raises(record.RecordError, match="manifest.sha256: is missing, and was committed"):
        results.table(folder.root)


def test_a_guest_is_shown_and_changes_nothing(folder, capsys, monkeypatch):
    def said() -> list[str]:
        found = [
            measured_rankings.table_text(folder.root, name) for name in measured_rankings.CHOICES
        ]
        found.append(results.to_csv(results.table(folder.root)))
        return [*found, Chapter("forward/results", data_dir=folder.root).record().id]

    before = said()
    guest = folder.root / manifest.COMMUNITY / "somebody"
    guest.mkdir(parents=True)
    (guest / manifest.NAME).touch()
    folder.pretend(guest, 0.95, gpu="NVIDIA GH200 480GB")
    assert said() == before
    manifest.verify(folder.root)
    command = ["results", "--community", "--data-dir", str(folder.root)]
    assert __main__.main(command) == 0
    printed = capsys.readouterr().out
    assert "NVIDIA GH200 480GB" in printed and "somebody" in printed
    assert "NVIDIA H200," not in printed
    assert __main__.main([*command, "--gpu", "NVIDIA H200"]) == 1
    shown = []
    monkeypatch.setattr(ratios, "display", lambda made: shown.append(made.data))
    ratios.others(Chapter("forward/results", data_dir=folder.root), None, "forward")
    assert shown[0].startswith("::::{table} **NVIDIA GH200 480GB, data/community/somebody: ")
    (machine,) = (guest / "systems").iterdir()
    machine.write_text(machine.read_text() + " ")
    with pytest.raises(record.RecordError, match="SHA-256"):
        results.community(folder.root)
