"""Attacks on data/: what is refused and by which name, and what is shown where nothing can tell.

Each is made on a copy with digests redone, once without and once with the history of the folder in
git; or on a record that joins those of the repository.
"""

import json
import re
import shutil
import statistics
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import pytest

from _lib import ratios
from gdpa_lab import __main__
from gdpa_lab.measuring import bounds, files, machine_code, record, refusals, siblings, system
from gdpa_lab.measuring.record import Record
from gdpa_lab.report import measured_rankings, page, peers, results, staleness
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

    def edit(self, change: Callable[[dict], None], digest: bool = True) -> None:
        """Change the newest record."""
        path = self.changed(change, self.root, digest)
        if path != self.newest:
            self.newest.unlink()

    def rewrite(self, name: str, pattern: str, by: str | Callable) -> None:
        """Replace what a pattern finds in a file."""
        path = self.root / name
        text, count = re.subn(pattern, by, path.read_text())
        assert count
        path.write_text(text)

    def pretend(self, root: Path | None = None, share: float = 0.8, **machine: object) -> None:
        """The newest record, `share` of its times, as of another machine; the system with it."""
        other = replace(H200, **machine)
        root = root or self.root
        system.save(other, root)

        def change(data: dict) -> None:
            scale(share)(data)
            data.update(id=data["id"].replace(data["system"], other.id), system=other.id)

        self.changed(change, root)


def scale(
    share: float, parts: tuple[str, ...] = ("rows", "ceilings"), joules: bool = True, impl: str = ""
) -> Callable[[dict], None]:
    """Multiply times, and energies, by `share`; of all or of one implementation."""

    def change(data: dict) -> None:
        for timed in (timed for part in parts for timed in data[part]):
            if impl and timed["impl"] != impl:
                continue
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


def promote_a_stranger(folder: Folder) -> None:
    """Promote a system under the name of the GPU that the book quotes."""
    folder.pretend(gpu="NVIDIA GH200 480GB")
    other = replace(H200, gpu="NVIDIA GH200 480GB").id
    listed = {"NVIDIA H200": [H200.id, other]}
    (folder.root / system.PROMOTED).write_text(json.dumps(listed))


class Attack(NamedTuple):
    """`alone`: the reason without a history, "" if nothing can tell; `history`: that with one,
    "" if it is the same."""

    run: Callable[[Folder], object]
    alone: str
    history: str = ""


def of_table(name: str, pattern: str, by: str | Callable, row: str = "") -> Attack:
    """Replace a pattern in a table, of which then a row is missing."""
    reason = "must hold a row that a commit has, or corrections.csv say why not: .*"
    return Attack(lambda f: f.rewrite(name, pattern, by), "", f"{Path(name).name}: {reason}{row}")


STAYS = "must stay as a commit first held it: git show [0-9a-f]{40}"
ATTACKS = {
    "a sample": Attack(lambda f: f.edit(one_sample, False), "digest must be", STAYS),
    "a sample, digest": Attack(lambda f: f.edit(one_sample), "", STAYS),
    "a workload's name": Attack(lambda f: f.edit(rename), "name must be its key", STAYS),
    "rows 25 % faster": Attack(lambda f: f.edit(scale(0.75, ("rows",))), "at most 105 % of the"),
    "all 4 times as fast": Attack(lambda f: f.edit(scale(0.25)), "at most 1071 TFLOP/s, 132 SMs"),
    "all times x 0.8": Attack(lambda f: f.edit(scale(0.8)), "at most 4917 GB/s, memory at"),
    "not energies": Attack(lambda f: f.edit(scale(0.95, joules=False)), "power_w must be"),
    "all times and energies x 0.95": Attack(lambda f: f.edit(scale(0.95)), "", STAYS),
    "peers dropped": Attack(lambda f: f.edit(without_peers), "", STAYS),
    "planned peers dropped": Attack(
        lambda f: f.edit(planned_without_peers), "rows must hold .*/cudnn/.*, which the run planned"
    ),
    "a budget of 1e6": Attack(
        first(pytorch=5e5, rounding=1.0, budget=1e6 + 1), "pytorch must be at most 64 times round"
    ),
    "a budget doubled": Attack(
        first(budget=5.0, max_abs=4.0), "budget must be one of its workload"
    ),
    "a budget not of its parts": Attack(
        first(pytorch=0.5, rounding=0.1), "budget must be 1.1, 2 times pytorch"
    ),
    "a clock beyond the highest": Attack(lambda f: f.edit(raise_clock), "must be at most 1980"),
    "a date to come": Attack(lambda f: f.edit(later), "must be in the past"),
    "a record deleted": Attack(
        lambda f: f.newest.unlink(), "", "cannot be read: .*, and a commit holds it: git show"
    ),
    "a GH200": Attack(lambda f: f.pretend(gpu="NVIDIA GH200 480GB"), "belong in comm"),
    "an H200 of another clock": Attack(
        lambda f: f.pretend(max_sm_clock_mhz=9e3, max_memory_clock_mhz=2e4, share=0.25),
        "belong in community",
    ),
    "a GH200 promoted as H200": Attack(promote_a_stranger, "lists for its GPU"),
    "a system": Attack(
        lambda f: f.rewrite(f"systems/{H200.id}.json", "132", "133"), "id must be", STAYS
    ),
    "a stray file": Attack(
        lambda f: (f.root / "records" / "x.json").write_text("{}"), "x.json: not a record"
    ),
    "a prediction of a B200": of_table("predictions/b200.csv", ",0.75,", ",0.85,"),
    "what was known erased": of_table(
        "predictions/h200.csv", ",unrecorded runs,", ",,", "known=unrecorded runs"
    ),
    "a commit's date moved": of_table(
        "predictions/h200.csv", ",2026-11-22T2", ",2026-11-22T0", "date=2026-11-22T2"
    ),
    "a prediction's limits moved": of_table(
        "predictions/h200.csv", "at most 1.00", "at most 1.10", "limits=at most 1.00"
    ),
    "a prediction deleted": of_table(
        "predictions/h200.csv", r"\nforward/v5_pingpong#2.*", "", "id=forward/v5_pingpong#2"
    ),
    "a published bar x 0.9": of_table(
        "published/gdpa_figures.csv", "(1024,1024,cutedsl_gdpa,)([0-9.]+)",
        lambda m: f"{m[1]}{0.9 * float(m[2]):.1f}", "kernel=cutedsl_gdpa",
    ),
    "a claim's hardware": of_table("claims.yml", "B200, 750", "H200, 750", "hardware=NVIDIA B200"),
    "a correction withdrawn": of_table(
        "corrections.csv", ".*b3_cta_pair_backward.*\n", "", "b3_cta_pair_backward"
    ),
}  # fmt: skip


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """Everything in data/ but most records, and of two records two workloads: quickly read."""
    data = tmp_path_factory.mktemp("whole") / "data"
    shutil.copytree(record.DATA_DIR, data, ignore=shutil.ignore_patterns("2*-nvidia-*"))
    shutil.copytree(record.DATA_DIR / "systems", data / "systems", dirs_exist_ok=True)
    for name in (OLD, NEW):
        run = record.load(record.DATA_DIR / "records" / f"{name}.json")
        rows = (row for row in run.rows if row.workload in WORKLOADS)
        record.write(replace(run, rows=tuple(rows)), data)
    committed(data.parent)
    return data


@pytest.fixture
def folder(whole, tmp_path):
    shutil.copytree(whole.parent, tmp_path, dirs_exist_ok=True)
    return Folder(tmp_path / "data")


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
    shutil.rmtree(folder.root.parent / ".git")
    if attack.alone:
        for read in readers(folder.root):
            with pytest.raises(record.RecordError, match=attack.alone):
                read()
        return
    # Nothing in the folder can tell: what a page says is which record it quotes.
    quoted = results.latest_record(folder.root, notebook="notebooks/forward/results.py")
    said = page.provenance([quoted.id], data_dir=folder.root).data
    assert quoted.id in said and H200.gpu in said and quoted.package.commit[:10] in said
    assert quoted.id == (OLD if name == "a record deleted" else NEW)


@pytest.mark.parametrize("in_git", (False, True))
@pytest.mark.parametrize("name", [name for name, attack in ATTACKS.items() if attack.history])
def test_the_history_knows_what_was_committed(folder, name, in_git):
    ATTACKS[name].run(folder)
    if in_git:
        committed(folder.root.parent)
    for read in readers(folder.root):
        with pytest.raises(record.RecordError, match=ATTACKS[name].history):
            read()


def test_a_guest_is_shown_and_changes_nothing(folder, capsys, monkeypatch):
    def said() -> list[str]:
        found = [
            measured_rankings.table_text(folder.root, name) for name in measured_rankings.CHOICES
        ]
        found.append(results.to_csv(results.table(folder.root)))
        return [*found, Chapter("forward/results", data_dir=folder.root).record().id]

    before = said()
    guest = folder.root / files.COMMUNITY / "somebody"
    folder.pretend(guest, 0.95, gpu="NVIDIA GH200 480GB")
    assert said() == before
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
    committed(folder.root.parent)
    (guest_record,) = (guest / "records").iterdir()
    guest_record.write_text(f"{guest_record.read_text()} ")
    with pytest.raises(record.RecordError, match=STAYS):
        results.community(folder.root)


NEWEST = "20261128T050638Z-forward-results-nvidia-h200-62ac9e84"
H100 = "20261128T081132Z-forward-results-nvidia-h100-80gb-hbm3-e05d55f3"
STEPS = "20261128T082621Z-training-step-nvidia-h200-62ac9e84"
V7, V8 = "v7_packed", "v8_own_waits"


@pytest.fixture(scope="module")
def runs():
    return {run.id: run for run in record.load_all()}


def relabel(data: dict) -> None:
    data["system"] = H200.id


def swap(data: dict) -> None:
    for row in data["rows"]:
        row["impl"] = {V7: V8, V8: V7}.get(row["impl"], row["impl"])


def invent(data: dict) -> None:
    peer = next(row for row in data["rows"] if row["impl"] == "fa3")
    data["rows"].append({**peer, "impl": "fa5"})


def halve(data: dict) -> None:
    """Keep the faster half of the samples of one kernel."""
    for row in data["rows"]:
        if row["impl"] == V8 and row["scope"] == "sustained" and len(row["samples_us"]) >= 20:
            row["samples_us"] = sorted(row["samples_us"])[: len(row["samples_us"]) // 2]


def recode(code: str) -> Callable[[dict], None]:
    def change(data: dict) -> None:
        for launch in data["launches"]:
            launch["code"] = code if V8 in launch["kernel"] else launch["code"]

    return change


def shorten(*names: str) -> Callable[[dict], None]:
    """Multiply all columns of seconds by 0.9, also the rate "per second"."""

    def change(data: dict) -> None:
        for table in map(data["tables"].get, names):
            for row in table["rows"]:
                for i, name in enumerate(table["columns"]):
                    row[i] = 0.9 * row[i] if name.endswith("_s") and row[i] else row[i]

    return change


JOINING = {
    "an H100's record relabelled": (H100, relabel, "copy of scope 'kernel' must be within 5 %"),
    "ceilings 8 % slower": (NEWEST, scale(1.08, ("ceilings",)), "got 0.93 times their median"),
    "two kernels' names swapped": (NEWEST, swap, f"must be kernels of {V8}, got those of {V7}"),
    "an invented peer": (NEWEST, invent, "must be an implementation or a baseline, got 'fa5'"),
    "the faster half of the samples": (NEWEST, halve, "must take as long as those of its workload"),
    "machine code zeroed": (NEWEST, recode("0" * 16), r"launches\[.*code must match"),
    "other machine code": (NEWEST, recode("0123456789abcdef"), "older record has it of the same"),
    "a step's tables x 0.9": (
        STEPS, shorten("steps", "samples"), "samples_per_s must be a batch over step_s, got 933"
    ),
    "a step's medians x 0.9": (STEPS, shorten("steps"), "step_s must be .*, of its samples, got"),
    "one kernel 3 % faster": (NEWEST, scale(0.97, ("rows",), impl=V8), ""),
    "nothing": (NEWEST, lambda data: None, ""),
}  # fmt: skip


def reasons(data: dict, runs: list[Record]) -> Iterator[str]:
    """The reasons against one more record."""
    yield from filter(None, [refusals.refusal(data)])
    run = Record.from_dict(data)
    yield from (*bounds.contradictions(run), *bounds.violations(run, H200))
    yield from (reason for other, reason in siblings.problems([*runs, run]) if other is run)


@pytest.mark.parametrize("name", JOINING)
def test_a_record_joins_its_siblings(runs, name):
    source, change, reason = JOINING[name]
    data = runs[source].to_dict()
    change(data)
    data.update(id=f"20261129T170000Z{source[16:]}", created="2026-11-29T17:00:00Z")
    seen = [*reasons(data, [*runs.values()])]
    if reason:
        assert any(re.search(reason, text) for text in seen), seen[:3]
    else:
        assert seen == [], "as README of data/ says, nothing can tell"


def test_a_data_folder_with_a_strange_record_is_refused(folder, monkeypatch):
    monkeypatch.setattr(siblings, "problems", lambda runs: iter([(runs[0], "it differs")]))
    with pytest.raises(record.RecordError, match=f"{OLD}.json: it differs"):
        record.load_all(folder.root)


@pytest.mark.parametrize("failure", (None, "HostTooSlow: the device was not busy all the time"))
def test_a_peer_that_many_records_time_is_missed_where_it_has_none(failure):
    """Left out of a record and its plan, or a failure there."""
    table = results.table(latest=False)
    rows = table[table["record"] == NEWEST]
    assert peers.lost_peers(rows, table) == []
    lost = rows["impl"].isin(PEERS)
    rows = rows.assign(time_us_p50=rows["time_us_p50"].mask(lost), failure=failure)
    lines = peers.lost_peers(rows if failure else rows[~lost], table)
    why = failure or "not in this record"
    line = f"cuDNN, dense on gdpa-self-full-1024, forward: {why}; [0-9]+ other records time it"
    assert any(re.fullmatch(line, text) for text in lines)
    assert {line.split(" on ")[0] for line in lines} == {"cuDNN, dense", "FlashAttention-4, dense"}


def test_machine_code_of_one_digit_is_none(folder):
    """A row is stale if its code in the table is none, and a test of the table fails."""
    folder.rewrite("machine_code.csv", f"(,{V8},.*,)[0-9a-f]{{16}}\n", rf"\g<1>{'0' * 16}\n")
    codes = {found.code for found in staleness.table(folder.root).values()}
    assert not all(map(machine_code.is_code, codes))
    assert all(machine_code.is_code(found.code) for found in staleness.table().values())
