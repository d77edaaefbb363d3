"""A row is stale if its kernels compile to other machine code today, and for no other reason."""

import shutil
from dataclasses import replace

import pytest

from gdpa_kernels.calling.launches import launches
from gdpa_kernels.gdpa.kernels import v1_tiled
from gdpa_kernels.gdpa.ladder import v7_packed
from gdpa_lab import __main__
from gdpa_lab.measuring import machine_code, record, system
from gdpa_lab.measuring.inputs import make_inputs
from gdpa_lab.measuring.workloads import workload
from gdpa_lab.report import staleness
from tests.calls import pretended
from tests.records import PROTOCOL, STATE, a_row

SELF = replace(workload("gdpa-self-full-256"), name="self", batch=2)
BLOCK = replace(workload("block-fill70-1000"), name="block", batch=2)


def runs() -> dict[str, record.Record]:
    return {run.id.split("-")[0]: run for run in record.load_all()}


def found(stamp: str, **values) -> set[bool]:
    """Return whether the rows of a record with these values are stale."""
    run = runs()[stamp]
    machine = system.load(record.DATA_DIR / "systems" / f"{run.system}.json")
    rows = [row for row in run.rows if all(getattr(row, k) == v for k, v in values.items())]
    assert rows
    return {*staleness.are_stale(run, [row for row in rows if row.samples_us], machine)}


def test_the_table_is_that_of_the_records_and_the_sources():
    wanted = {each.key for each in staleness.entries()}
    assert staleness.table().keys() == wanted, "python -m gdpa_lab maintain machine-code"


@pytest.mark.parametrize(("changed", "said"), [(True, "rewritten"), (False, "was up to date")])
def test_a_command_writes_the_table(monkeypatch, capsys, changed, said):
    monkeypatch.setattr(staleness, "update", lambda log: changed)
    assert __main__.main(["maintain", "machine-code"]) == 0
    assert capsys.readouterr().out == f"data/machine_code.csv {said}\n"


def test_every_older_row_could_be_compiled():
    reasons = {found.code for found in staleness.table().values()}
    assert [text for text in reasons if not machine_code.is_code(text)] == []


@pytest.mark.parametrize(
    ("stamp", "impl", "workload", "expected"),
    [
        # before it asked whether to mask
        ("20261122T191500Z", "v8_own_waits", "gdpa-self-full-1024-causal", True),
        ("20261122T191500Z", "v8_own_waits", "gdpa-self-full-1024", False),
        # another text of the same code
        ("20261121T134948Z", "v8_own_waits", "", False),
        ("20261121T134948Z", "v7_packed", "", False),
        ("20261121T200132Z", "v3_warp_specialized", "", False),
        # changed copies, which nobody has today, and lists that launch nothing
        ("20261127T191938Z", "v8_own_waits", "gdpa-self-full-1024-causal", False),
        ("20261127T192737Z", "v3_persistent", "gdpa-self-full-1024", False),
    ],
)
def test_rows_of_the_repository(stamp, impl, workload, expected):
    values = {"workload": workload} if workload else {"scope": "kernel", "variant": ""}
    assert found(stamp, impl=impl, **values) == {expected}


def edited(folder, name: str, old: str, new: str):
    """A copy of the package in `folder`, one piece of one file replaced."""
    ignored = shutil.ignore_patterns("__pycache__")
    shutil.copytree(record.ROOT / "gdpa_kernels", folder / "gdpa_kernels", ignore=ignored)
    path = folder / "gdpa_kernels" / name
    text = path.read_text()
    assert text.count(old) == 1
    path.write_text(text.replace(old, new))
    return folder


MACHINE = replace(system.describe(), compute_capability="9.0")


@pytest.fixture
def measured(tmp_path):
    """A record of the package as it is, of kernels with activations and without: of v7 and v1 with
    what they launched, and of block attention's v1 without."""
    rows = [a_row(BLOCK, impl="v1_one_tile", math="softmax", samples_us=[9e6])]
    for impl, module in (("v7_packed", v7_packed), ("v1_tiled", v1_tiled)):
        with launches(run=False) as seen:
            module.forward(make_inputs(SELF, device="cpu").batch())
        with pretended(90):
            own = [machine_code.describe(x) for x in seen if x.kernel.__module__ == module.__name__]
        rows.append(a_row(SELF, impl=impl, samples_us=[9e6], launches=own))
    run = record.new_record(
        command="make measure", notebook=None, system=MACHINE, protocol=PROTOCOL, ceilings=(),
        state={"before": STATE, "after": STATE}, workloads=[SELF, BLOCK], rows=rows,
    )  # fmt: skip
    system.save(MACHINE, tmp_path)
    return record.load(record.write(run, tmp_path))


def stale(run: record.Record, folder, root) -> list[str]:
    answers = staleness.are_stale(run, run.rows, MACHINE, data_dir=folder, root=root)
    return [row.impl for row, answer in zip(run.rows, answers, strict=True) if answer]


def test_a_comment_changes_nothing(measured, tmp_path):
    place = "@triton.jit\ndef multiply_add_packed("
    comment = f"# Another comment.\n\n\n{place}"
    root = edited(tmp_path / "tree", "gdpa/device/activations.py", place, comment)
    assert stale(measured, tmp_path, root) == []


@pytest.mark.sweep
def test_an_edit_counts_where_it_changes_machine_code(measured, tmp_path, monkeypatch):
    root = edited(
        tmp_path / "tree", "gdpa/device/activations.py", "fma.rn.bf16x2 u, u, $5, $4;",
        "mul.bf16x2 u, u, $5;\n        add.rn.bf16x2 u, u, $4;",
    )  # fmt: skip
    assert stale(measured, tmp_path, root) == ["v7_packed", "v1_tiled"]  # as far as anyone knows
    monkeypatch.setattr(staleness, "_package", lambda run: "sources of then")
    monkeypatch.setattr(staleness, "_blobs", lambda: {})
    assert staleness.update(tmp_path, root, log=lambda text: None)
    assert stale(measured, tmp_path, root) == ["v7_packed"]
    assert not staleness.update(tmp_path, root, log=lambda text: None)


@pytest.mark.sweep
def test_older_sources_come_from_the_history_of_git(tmp_path):
    run = runs()["20261122T200316Z"]
    for name in (f"records/{run.id}.json", f"systems/{run.system}.json"):
        (tmp_path / name).parent.mkdir()
        shutil.copy(record.DATA_DIR / name, tmp_path / name)
    assert staleness.update(tmp_path, log=lambda text: None)
    made, kept = staleness.table(tmp_path), staleness.table()
    assert made and made == {key: kept[key] for key in made}


def test_sources_that_git_never_had_say_so(measured, tmp_path, monkeypatch):
    monkeypatch.setattr(staleness, "_blobs", lambda: {})
    monkeypatch.setattr(staleness, "_answers", lambda tree, questions: ["0" * 16] * len(questions))
    staleness.update(tmp_path, log=lambda text: None)
    reasons = {found.code for found in staleness.table(tmp_path).values()}
    assert "its sources are not in git's history" in reasons
