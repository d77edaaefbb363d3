"""Predictions for a B200: the file is the model's, and a record of a B200 judges them."""

from dataclasses import replace
from functools import cache
from pathlib import Path

import pandas as pd
import pytest

from gdpa_kernels.calling import ladder
from gdpa_lab import __main__
from gdpa_lab.measuring import compile_check, cost_model, record
from gdpa_lab.measuring.record import Ceiling, Error, Load, Package, Record, Row
from gdpa_lab.measuring.roofline import Ceilings
from gdpa_lab.measuring.workloads import workload
from gdpa_lab.report import clock_free, predictions, results
from notebooks.blackwell import _tile_law
from tests.records import SELF, a_row, a_system, writer

BLOCK = workload("block-fill70-2000")
MATMUL_US = 1000.0


def loaded(us: float, ghz: float = 1.5) -> Load:
    """Build the load that NVML reports for calls of `us` microseconds."""
    return Load(1e3 * ghz, 990.0, 990.0 * us / 1e6, ())


WRONG = Error.judge(1.0, 2e-3, elements=4)
SUSTAINED = {"scope": "sustained", "load": loaded(1000.0)}
CEILINGS = (
    Ceiling("matmul", "8192^3", (MATMUL_US,), flops=2 * 8192**3, **SUSTAINED),
    Ceiling("copy", "1:1", (1000.0,), bytes_read=3 * 10**9, bytes_written=3 * 10**9, **SUSTAINED),
    Ceiling("copy", "3:1", (1000.0,), bytes_read=45 * 10**8, bytes_written=15 * 10**8, **SUSTAINED),
)
TFLOPS = 2 * 8192**3 / MATMUL_US / 1e6


def add(folder: Path, *rows: Row, day=1, capability="10.0", ceilings=CEILINGS) -> Record:
    """Write a record of `rows` on a B200 limited to 1,000 W to a data folder."""
    on = a_system(
        f"580.{capability}", "NVIDIA B200", compute_capability=capability, num_sms=148,
        max_sm_clock_mhz=1965.0, max_memory_clock_mhz=3996.0, power_limit_w=1000.0,
    )  # fmt: skip
    return writer(folder)(
        *rows, day=day, on=on, notebook="notebooks/forward/results.py", ceilings=ceilings,
        package=Package("0.1.0", "a" * 40, False, {"gdpa_kernels/__init__.py": "b" * 64}),
        workloads={w.name: w.to_dict() for w in (SELF, BLOCK)},
    )  # fmt: skip


def timed(impl: str, of=SELF, direction="forward", us=1000.0, **values) -> Row:
    known = {"scope": "sustained", "samples_us": (us,), "load": loaded(us)}
    known["math"] = "softmax" if of is BLOCK else "activation"
    return a_row(of, impl=impl, direction=direction, **known | values)


def at(tflops: float) -> float:
    """The time of SELF, forward, at a rate."""
    return SELF.flops("forward") / tflops / 1e6


def one(table: pd.DataFrame, impl: str, workload=SELF.name, direction="forward") -> pd.Series:
    return table.set_index(["impl", "workload", "direction"]).loc[impl, workload, direction]


def test_the_committed_file_is_what_the_model_makes():
    text = predictions.PATH.read_text(encoding="utf-8")
    again = "python -m gdpa_lab maintain predictions, under another MODEL"
    assert text == predictions.render(predictions.derive()), again


def test_every_prediction_lies_in_its_interval_and_below_its_ceiling():
    table = predictions.registered()
    assert (table["from"] < table["predicted"]).all() and (table["predicted"] < table["to"]).all()
    assert (table["low"] < 1).all() and (table["high"] > 1).all()
    assert table["of_copy"].between(0.3, 1).all()
    assert table["of_matmul"].dropna().between(0.1, 1).all()
    assert not table.duplicated(["figure", "workload", "direction", "impl"]).any()


@pytest.mark.sweep
@pytest.mark.parametrize("expected", predictions.EXPECTED["forward"], ids=lambda x: x.impl)
def test_issue_slots_are_those_of_the_compiled_loop(expected):
    """The loop is that of a math role, which takes a tile of pairs in each turn."""
    keys = 256 if expected.most_keys == 256 else 1024
    built = compile_check.build_rung(expected.impl, capability=100, max_seqlen_k=keys)
    loop = compile_check.shortest_loop(built, "STTM", 2)
    assert expected.design.pairs["issue"] == len(loop)


def test_the_blackwell_rungs_of_the_ladders_are_predicted_and_no_others():
    table = predictions.registered()
    ways = {
        "forward": (*ladder.BLACKWELL_RUNGS, *ladder.BLACKWELL_BLOCK_RUNGS),
        "backward": (*ladder.BLACKWELL_BACKWARD_RUNGS, *ladder.BLACKWELL_BLOCK_RUNGS),
    }
    rungs = {(rung.impl, direction) for direction, listed in ways.items() for rung in listed}
    assert set(zip(table["impl"], table["direction"], strict=True)) == rungs


def test_a_prediction_is_a_share_of_the_ceilings():
    table = predictions.registered()
    same = predictions.scaled(table, cost_model.ASSUMED)
    pd.testing.assert_frame_equal(same[table.columns], table)
    double = Ceilings(2160.0, tuple((mix, 2 * rate) for mix, rate in cost_model.ASSUMED.copies))
    twice = predictions.scaled(table, double)
    rates = table["unit"] == "TFLOP/s"
    assert ((twice["predicted"] - 2 * table["predicted"])[rates].abs() <= 1).all()
    assert (twice["predicted"] / table["predicted"])[~rates].between(0.499, 0.501).all()
    fast = predictions.scaled(table, replace(cost_model.ASSUMED, tflops=1e6))
    row = one(fast, "b6_pair_stream")
    share = SELF.bytes_read("forward"), SELF.bytes_written("forward")
    memory_us = sum(share) / cost_model.ASSUMED.gbytes_per_s(*share) / 1e3 / row["of_copy"]
    assert row["predicted"] == round(SELF.flops("forward") / memory_us / 1e6), "memory bounds it"


def test_without_a_b200_the_ceilings_are_assumed(tmp_path):
    ground = predictions.basis(tmp_path)
    assert ground[:2] == (cost_model.ASSUMED, 750) and "assumed" in ground.origin
    text, table = predictions.report(tmp_path)
    assert "power limit 750 W" in text and "No row is measured" in text
    assert "verdict" not in table


def test_a_record_of_a_b200_scales_and_judges(tmp_path):
    share = one(predictions.registered(), "b6_pair_stream")
    centre = share["of_matmul"] * TFLOPS
    b4 = one(predictions.registered(), "b4_mixed")
    made = add(
        tmp_path,
        timed("b6_pair_stream", us=at(centre)),
        timed("b4_mixed", us=at(1.01 * b4["of_matmul"] * b4["high"] * TFLOPS)),
        timed("b3_stream", us=at(50)),
        timed("b2_two_tiles", samples_us=(), load=None, error=WRONG, failure="no"),
        timed("b1_tensor_memory", us=at(50), variant="other"),
        timed("b1_warp_specialized", BLOCK, us=1e5),
    )
    table = predictions.judged(predictions.registered(), tmp_path)
    found = {impl: one(table, impl)["verdict"] for impl in ("b6_pair_stream", "b4_mixed")}
    assert found == {"b6_pair_stream": "confirmed", "b4_mixed": "refuted, high"}
    assert one(table, "b6_pair_stream")["predicted"] == pytest.approx(centre, abs=1)
    assert one(table, "b3_stream")["verdict"] == "refuted, low"
    assert one(table, "b2_two_tiles")["verdict"] == "", "its output was wrong"
    assert one(table, "b1_tensor_memory")["verdict"] == "", "a variant is not the rung"
    assert one(table, "b1_warp_specialized", BLOCK.name)["verdict"] == "refuted, high", "of time"
    text, _ = predictions.report(tmp_path)
    assert made.id in text and "power limit 1000 W" in text
    assert "1 of 4 measured rows within the 90 % interval" in text


def test_each_row_is_judged_by_its_own_record_and_the_newest_counts(tmp_path):
    share = one(predictions.registered(), "b6_pair_stream")["of_matmul"]
    us = 0.7 * MATMUL_US
    fast = (replace(CEILINGS[0], samples_us=(us,), load=loaded(us)), *CEILINGS[1:])
    row = timed("b6_pair_stream", us=at(share * TFLOPS))
    old = add(tmp_path, row, day=1)
    add(tmp_path, row, day=2, ceilings=fast)
    newest = one(predictions.judged(predictions.registered(), tmp_path), "b6_pair_stream")
    assert newest["verdict"] == "refuted, low" and newest["from"] > share * TFLOPS
    first = predictions.judged(predictions.registered(), tmp_path, old.id)
    assert one(first, "b6_pair_stream")["verdict"] == "confirmed"


def test_what_is_no_record_of_a_b200_is_refused(tmp_path, capsys):
    other = add(tmp_path, timed("v8_own_waits", us=at(500)), capability="10.3")
    bare = add(tmp_path, timed("b3_stream", us=at(500)), day=2, ceilings=CEILINGS[:1])
    assert predictions.basis(tmp_path).ceilings == cost_model.ASSUMED
    command = ["predictions", "--data-dir", str(tmp_path), "--record"]
    for name, expectation in (
        ("nothing", "record must be the id of a record, got 'nothing'"),
        (other.id, f"record must be of compute capability 10.0, got {other.id} of 10.3"),
        (bare.id, f"record must hold sustained ceilings, matmul and copy, got {bare.id}"),
    ):
        assert __main__.main([*command, name]) == 1
        assert expectation in capsys.readouterr().err


@pytest.mark.sweep
def test_the_command_prints_and_writes(tmp_path, capsys, monkeypatch):
    assert __main__.main(["predictions", "--data-dir", str(tmp_path)]) == 0
    printed = capsys.readouterr().out
    rows = len(predictions.registered()) + len(clock_free.registered())
    assert printed.count("\n| ") == rows + 4
    monkeypatch.setattr(record, "ROOT", tmp_path)
    modules = {"b200.csv": predictions, "b200_2.csv": clock_free}
    for name, module in modules.items():
        monkeypatch.setattr(module, "PATH", tmp_path / "predictions" / name)
        monkeypatch.setattr(module.update, "__defaults__", (module.PATH,))
        monkeypatch.setattr(module, "derive", cache(module.derive))
    for state in ("rewritten", "was up to date"):
        assert __main__.main(["maintain", "predictions"]) == 0
        said = "".join(f"predictions/{name} {state}\n" for name in modules)
        assert capsys.readouterr().out == said


RUNS = {"forward": "20261121T134948Z-10-figures", "backward": "20261121T225723Z-33-backward"}
"""Record of an H200 that EXPECTED quotes, by direction."""


def quoted(rows: pd.DataFrame, impl: str, direction: str) -> tuple[pd.DataFrame, Ceilings]:
    """The kernel times of a rung on full batches in that record, and its ceilings."""
    (run,) = (r for r in record.load_all() if r.id.startswith(RUNS[direction]))
    rows = rows[(rows["record"] == run.id) & (rows["impl"] == impl) & (rows["scope"] == "kernel")]
    rows = rows[rows["workload"].str.contains("-full-") & (rows["variant"] == "")]
    rows = rows[rows["workload"] != "gdpa-cross-full-256"].dropna(subset=["time_us_p50"])
    return rows.set_index("workload"), results.ceilings(run)


@pytest.mark.sweep
def test_the_speed_of_our_code_is_that_of_a_record(every):
    """EXPECTED: v8 over its ledger, .85, one deviation .05."""
    rows, limits = quoted(every, "v8_own_waits", "forward")
    shares = {}
    for name, tflops in rows["tflops"].items():
        work = workload(name)
        design = cost_model.V8_RESIDENT if work.max_seqlen_k <= 256 else cost_model.V8_STREAM
        shares[name] = tflops / cost_model.cost(work, design, limits).tflops
    shares = pd.Series(shares)
    assert len(shares) == 7 and shares.max() < 1
    assert shares.mean() == pytest.approx(0.855, abs=0.01)
    assert shares.std() == pytest.approx(0.05, abs=0.01)


@pytest.mark.parametrize(
    ("impl", "direction", "terms", "start"),
    [
        ("v4_warp_specialized", "forward", ["queries", "keys", "pairs"], 2.8),
        ("v4_warp_specialized_backward", "backward", ["queries", "keys", "pairs"], 4.5),
        ("v5_short_kv_backward", "backward", ["keys", "pairs"], 3.6),
    ],
)
def test_the_start_of_a_program_is_that_of_a_record(every, impl, direction, terms, start):
    rows, limits = quoted(every, impl, direction)
    done = _tile_law.amounts([workload(name) for name in rows.index], cost_model.H200.sms)
    law = _tile_law.fit(done[terms], rows["time_us_p50"])
    assert law["queries" if direction == "forward" else "keys"] == pytest.approx(start, abs=0.1)
    if direction == "backward":
        share = _tile_law.pair_tflops(law, cost_model.H200.sms, direction) / limits.tflops
        assert share == pytest.approx(0.83, abs=0.01)
