"""Logs of a run: a CSV file, TensorBoard and a bar have what is printed."""

import csv
import io
import sys
import types

import pytest
import train

from tests.examples.test_train import FEW

GIVEN = [*FEW, "--attention", "eager", "--eval-every", "4"]


def test_a_csv_file(tmp_path):
    path = tmp_path / "log.csv"
    given = [*GIVEN, "--log-csv", str(path), "--checkpoint", str(tmp_path / "saved")]
    found = train.main([*given, "--candidates", "5"])
    rows = list(csv.DictReader(path.open()))
    trained = {int(row["step"]): float(row["loss"]) for row in rows if row["loss"]}
    assert trained == found["losses"]
    assert all(float(row["rows_per_s"]) > 0 < float(row["lr"]) for row in rows if row["loss"])
    for name in ("ne", "auc", "hr", "ndcg", "bayes_ne"):
        held_out = {int(row["step"]): float(row[name]) for row in rows if row["ne"]}
        assert held_out == {step: values[name] for step, values in found["curve"].items()}
    assert list(found["curve"]) == [0, 4, 6]
    train.main([*given, "--resume", "--steps", "8"])
    later = [row["step"] for row in csv.DictReader(path.open())][len(rows) :]
    assert later == ["7", "8", "8"]


def test_a_csv_file_is_not_overwritten(tmp_path, capsys):
    path = tmp_path / "log.csv"
    path.write_text("mine")
    with pytest.raises(SystemExit):
        train.main([*GIVEN, "--log-csv", str(path)])
    said = capsys.readouterr().err
    assert said.endswith(f": --log-csv must be a new file without --resume, got {path}\n")
    assert path.read_text() == "mine"


def test_tensorboard_gets_the_same(tmp_path, monkeypatch):
    scalars = []

    class SummaryWriter:
        def __init__(self, folder, purge_step):
            assert folder == str(tmp_path) and purge_step is None

        def add_scalar(self, *values):
            scalars.append(values)

        def close(self):
            scalars.append("closed")

    module = types.SimpleNamespace(SummaryWriter=SummaryWriter)
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", module)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: name == "tensorboard")
    found = train.main([*GIVEN, "--tensorboard", str(tmp_path)])
    losses = {step: value for name, value, step in scalars[:-1] if name == "loss"}
    nes = {step: value for name, value, step in scalars[:-1] if name == "ne"}
    assert losses == found["losses"] and scalars[-1] == "closed"
    assert nes == {step: values["ne"] for step, values in found["curve"].items()}


def test_tensorboard_is_named_where_it_lacks(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(SystemExit):
        train.main([*GIVEN, "--tensorboard", str(tmp_path)])
    assert capsys.readouterr().err.endswith(
        ": --tensorboard needs the package tensorboard, which is not installed: "
        "pip install tensorboard\n"
    )


def test_a_bar_on_a_terminal_alone(monkeypatch, capsys):
    terminal = io.StringIO()
    monkeypatch.setattr(sys, "stderr", terminal)
    train.main(GIVEN)
    assert terminal.getvalue() == ""
    terminal.isatty = lambda: True
    train.main(GIVEN)
    assert "96.0/96.0" in terminal.getvalue() and " rows/s" in terminal.getvalue()
    assert "step 6, held out: NE " in capsys.readouterr().out
