"""The tables of "auto" are what the records say, and reading them needs no record."""

import subprocess
import sys
from dataclasses import replace

import pytest

from gdpa_kernels.calling import ladder
from gdpa_kernels.calling.rankings import Ranking, parse
from gdpa_kernels.calling.rung import Requires, Rung
from gdpa_kernels.gdpa import choices
from gdpa_lab.__main__ import main
from gdpa_lab.measuring import record
from gdpa_lab.report import measured_rankings
from tests.records import LOAD, SHORT, a_row, a_system

OPERATORS = sorted(measured_rankings.CHOICES)
LATER = {
    (10, 0): "b90_stand_in", (10, 3): "b6_pair_stream", (10, 1): "v1_tiled", (12, 0): "v1_tiled",
}  # fmt: skip


@pytest.mark.sweep
@pytest.mark.parametrize("operator", OPERATORS)
def test_the_table_is_what_the_records_say(operator):
    """After measuring: python -m gdpa_lab maintain choices."""
    table = measured_rankings.CHOICES[operator].PATH.read_text()
    assert table == measured_rankings.table_text(record.DATA_DIR, operator)


def test_the_record_that_compared_most_counts(add, tmp_path):
    rows = [a_row(impl="v1_tiled"), a_row(impl="b6_pair_stream", samples_us=(8000.0,))]
    both = add(*rows, day=1)
    add(rows[0], a_row(impl="v0_eager"), a_row(impl="fa2_varlen"), day=2)  # one rung beyond v0
    failed = a_row(impl="v8_own_waits", samples_us=(), error=None, failure="out of memory")
    newest = add(*rows, failed, day=4)
    shape = ((9, 0), "forward", "bfloat16", 128, 1024, 1024)
    (found,) = measured_rankings.from_records(tmp_path, "gdpa")
    assert found == Ranking(shape, ("b6_pair_stream", "v1_tiled"), newest.id)
    three = add(*rows, a_row(impl="v8_own_waits", samples_us=(8500.0,)), day=3)
    assert both.id < three.id < newest.id
    (found,) = measured_rankings.from_records(tmp_path, "gdpa")
    assert found == Ranking(shape, ("b6_pair_stream", "v8_own_waits", "v1_tiled"), three.id)
    assert measured_rankings.from_records(tmp_path, "block_attention") == []


def test_times_back_to_back_decide_among_those_that_have_them(add, tmp_path):
    bursts = {"v1_tiled": 5.0, "b6_pair_stream": 6.0, "v8_own_waits": 7.0, "v0_eager": 8.0}
    bursts["v5_pingpong"] = 4.0  # a lesson: not listed, however fast
    loops = {"v8_own_waits": 7.5, "v1_tiled": 8.5}
    narrow = replace(SHORT, name="narrow", head_dim=64)
    masked = replace(SHORT, name="masked", head_dim=32, causal=True)
    windowed = replace(SHORT, name="windowed", head_dim=32, window=5)
    works = SHORT, narrow, masked, windowed
    rows = [
        replace(
            a_row(work, impl=impl, samples_us=(1e4 * us,)), scope=scope,
            load=LOAD if scope == "sustained" else None,
        )
        for scope, times in (("kernel", bursts), ("sustained", loops))
        for impl, us in times.items()
        for work in works
        if (work, scope) != (narrow, "kernel")
    ]  # fmt: skip
    add(*rows, workloads={work.name: work.to_dict() for work in works})
    found = {row.shape[3]: row.impls for row in measured_rankings.from_records(tmp_path, "gdpa")}
    assert found == {
        128: ("v8_own_waits", "b6_pair_stream", "v1_tiled", "v0_eager"),
        64: ("v8_own_waits", "v1_tiled"),
    }


@pytest.mark.parametrize("operator", OPERATORS)
def test_a_table_is_read_as_it_was_written(operator):
    columns = measured_rankings.CHOICES[operator].COLUMNS
    table = [
        Ranking((gpu, *(kind(value) for kind in [*columns.values()][1:])), impls, f"record-{value}")
        for gpu, value, impls in (((9, 0), 1, ("short", "long")), ((10, 3), 2, ("long",)))
    ]
    assert parse(measured_rankings.render(table, columns), columns) == table


def test_nothing_is_written_beside_a_refused_record(tmp_path, monkeypatch, capsys):
    (tmp_path / "records").mkdir()
    (tmp_path / "records" / "cut.json").write_text("{")
    monkeypatch.setattr(record, "DATA_DIR", tmp_path)
    for operator, module in measured_rankings.CHOICES.items():
        monkeypatch.setattr(module, "PATH", tmp_path / operator)
        (tmp_path / operator).write_text("as it was")
    assert main(["maintain", "choices"]) == 1
    captured = capsys.readouterr()
    assert "refused records/cut.json: not JSON" in captured.err and captured.out == ""
    assert {(tmp_path / operator).read_text() for operator in OPERATORS} == {"as it was"}


def test_an_operator_reads_its_table_without_what_measures():
    modules = ", ".join(module.__name__ for module in measured_rankings.CHOICES.values())
    program = (
        f"import sys, gdpa_kernels.calling.rankings, {modules}\n"
        "upward = ('gdpa_lab.measuring', 'gdpa_lab.report', 'pandas')\n"
        "print([name for name in sys.modules if name.startswith(upward)])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.stdout == "[]\n", done.stdout + done.stderr


def test_a_gpu_has_a_table_of_its_own(add, tmp_path, monkeypatch):
    """The records are made up for this test, of a rung that does not exist."""
    stand_in = Rung("b90_stand_in", "", "", None, Requires((10, 0), only_major=True))
    monkeypatch.setitem(ladder.LADDERS, "gdpa", (*ladder.LADDERS["gdpa"], stand_in))
    for gpu, capability, times in (
        ("H200", "9.0", {"b6_pair_stream": 9500.0}),
        ("B200", "10.0", {"b6_pair_stream": 5000.0, stand_in.impl: 4000.0}),
        ("B300", "10.3", {"b6_pair_stream": 4000.0, stand_in.impl: 5000.0}),
    ):
        rows = [a_row(impl=impl, samples_us=(us,)) for impl, us in times.items()]
        on = a_system(gpu=f"NVIDIA {gpu}", compute_capability=capability)
        add(a_row(impl="v1_tiled"), *rows, on=on)
    text = measured_rankings.table_text(tmp_path, "gdpa")
    table = parse(text, measured_rankings.CHOICES["gdpa"].COLUMNS)
    assert [(row.shape[0], row.impls) for row in table] == [
        ((9, 0), ("v1_tiled", "b6_pair_stream")),
        ((10, 0), ("b90_stand_in", "b6_pair_stream", "v1_tiled")),
        ((10, 3), ("b6_pair_stream", "b90_stand_in", "v1_tiled")),
    ]
    assert text.splitlines()[2].startswith("10.0,forward,bfloat16,128,1024,1024,b90_stand_in ")
    monkeypatch.setattr(choices, "load", lambda: tuple(table))
    choices.order.cache_clear()
    found = {gpu: choices.order(gpu, "forward", "bfloat16", 128, 900, 900)[0] for gpu in LATER}
    choices.order.cache_clear()
    assert found == LATER
