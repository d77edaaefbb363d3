"""Commands on a terminal: a summary of the records, a line of which is of one record."""

import pandas as pd
import pytest

from gdpa_lab import __main__
from gdpa_lab.report import terminal


@pytest.fixture
def rows() -> pd.DataFrame:
    """Two runs: an old one of three implementations, a newer one of two."""
    fixed = {
        "gpu": "G", "workload": "gdpa-self-full-256", "direction": "forward", "scope": "sustained",
        "variant": "", "math": "activation", "percent_of_roofline": 50.0,
    }  # fmt: skip
    times = {
        "1": {"v1_tiled": 4000.0, "v8_own_waits": 2000.0, "fa4": 3000.0},
        "2": {"v8_own_waits": 1000.0, "fa4": 4000.0},
    }
    return pd.DataFrame([
        fixed | {"record": record, "impl": impl, "time_us_p50": us}
        for record, impls in times.items() for impl, us in impls.items()
    ])  # fmt: skip


def test_a_line_is_of_the_newest_of_the_fullest_records(rows):
    (line,) = terminal.summary(rows).to_dict("records")
    assert line["kernel"] == "v8_own_waits" and line["ms"] == 2 and line["faster"] == "1.50"
    assert line["of roofline"] == "████░░░░ 50 %"
    (line,) = terminal.summary(rows[rows["impl"] != "v1_tiled"]).to_dict("records")
    assert line["ms"] == 1 and line["faster"] == "4.00", "both have two: the newer one"
    alone = terminal.summary(rows[rows["impl"] == "v1_tiled"]).to_dict("records")
    assert alone[0]["than"] == "none timed"
    assert terminal.summary(rows[rows["impl"] == "fa4"]).empty


def test_a_person_reads_a_summary_and_a_program_every_row(monkeypatch, capsys):
    command = ["results", "--gpu", "NVIDIA H200", "--workload", "gdpa-self-full-256"]
    assert __main__.main(command) == 0
    assert capsys.readouterr().out.startswith("figure,workload,direction,impl")
    monkeypatch.setattr(terminal, "is_terminal", lambda: True)
    assert __main__.main(command) == 0
    said = capsys.readouterr().out
    assert "NVIDIA H200, forward" in said and "gdpa-self-full-256" in said
    assert said.count("\n") < 20 and "rows: --csv" in said
    assert __main__.main([*command, "--csv"]) == 0
    assert capsys.readouterr().out.startswith("figure,workload,direction,impl")
