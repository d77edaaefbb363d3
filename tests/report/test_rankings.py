"""The tables of "auto" are what the records say, and reading them needs no record."""

import subprocess
import sys

import pytest

from gdpa_kernels.__main__ import main
from gdpa_kernels.calling.rankings import Ranking, parse
from gdpa_kernels.measuring import record
from gdpa_kernels.report import rankings
from tests.report.test_results import a_row, add  # noqa: F401  (a fixture)

OPERATORS = sorted(rankings.CHOICES)


@pytest.mark.parametrize("operator", OPERATORS)
def test_the_table_is_what_the_records_say(operator):
    """After measuring: python -m gdpa_kernels choices."""
    table = rankings.CHOICES[operator].PATH.read_text()
    assert table == rankings.made_from(record.DATA_DIR, operator)


def test_the_record_that_compared_most_counts(add, tmp_path):  # noqa: F811
    rows = [a_row(impl="v1_tiled"), a_row(impl="v2_tma", samples_us=(8000.0,))]
    both = add(*rows, day=1)
    add(rows[0], a_row(impl="v0_eager"), a_row(impl="fa2_varlen"), day=2)  # one rung beyond v0
    failed = a_row(impl="v3_persistent", samples_us=(), error=None, failure="out of memory")
    newest = add(*rows, failed, day=4)
    shape = (9, "forward", "bfloat16", 128, 1024, 1024)
    (found,) = rankings.from_records(tmp_path, "gdpa")
    assert found == Ranking(shape, ("v2_tma", "v1_tiled"), newest.id)
    three = add(*rows, a_row(impl="v3_persistent", samples_us=(8500.0,)), day=3)
    assert both.id < three.id < newest.id
    (found,) = rankings.from_records(tmp_path, "gdpa")
    assert found == Ranking(shape, ("v2_tma", "v3_persistent", "v1_tiled"), three.id)
    assert rankings.from_records(tmp_path, "block_attention") == []


@pytest.mark.parametrize("operator", OPERATORS)
def test_a_table_is_read_as_it_was_written(operator):
    columns = rankings.CHOICES[operator].COLUMNS
    table = [
        Ranking(tuple(kind(value) for kind in columns.values()), impls, f"record-{value}")
        for value, impls in ((1, ("short", "long")), (2, ("long",)))
    ]
    assert parse(rankings.render(table, columns), columns) == table


def test_nothing_is_written_beside_a_refused_record(tmp_path, monkeypatch, capsys):
    (tmp_path / "records").mkdir()
    (tmp_path / "records" / "cut.json").write_text("{")
    monkeypatch.setattr(record, "DATA_DIR", tmp_path)
    for operator, module in rankings.CHOICES.items():
        monkeypatch.setattr(module, "PATH", tmp_path / operator)
        (tmp_path / operator).write_text("as it was")
    assert main(["choices"]) == 1
    captured = capsys.readouterr()
    assert "refused records/cut.json: not JSON" in captured.err and captured.out == ""
    assert {(tmp_path / operator).read_text() for operator in OPERATORS} == {"as it was"}


def test_an_operator_reads_its_table_without_what_measures():
    modules = ", ".join(module.__name__ for module in rankings.CHOICES.values())
    program = (
        f"import sys, gdpa_kernels.calling.rankings, {modules}\n"
        "upward = ('gdpa_kernels.measuring', 'gdpa_kernels.report', 'pandas')\n"
        "print([name for name in sys.modules if name.startswith(upward)])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.stdout == "[]\n", done.stdout + done.stderr
