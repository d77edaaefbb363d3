"""The second registration: where its numbers come from, how a record judges it, and its death."""

import numpy as np
import pandas as pd
import pytest

from gdpa_lab.measuring import cost_model, record
from gdpa_lab.report import clock_free, predictions, results
from tests.report.test_predictions import CEILINGS, SELF, add, loaded, timed


@pytest.mark.sweep
def test_the_committed_file_is_what_the_records_make():
    text = clock_free.PATH.read_text(encoding="utf-8")
    assert text == predictions.render(clock_free.derive()), "python -m gdpa_lab predictions"


def test_the_first_registration_and_the_second_are_about_the_same_rungs():
    first, second = predictions.registered(), clock_free.registered()
    alone = second[second["other"] == ""]
    keys = ["workload", "direction", "impl"]
    assert set(map(tuple, alone[keys].values)) == set(map(tuple, first[keys].values))
    assert (second["low"] < second["expected"]).all()
    assert (second["expected"] < second["high"]).all()


def test_an_interval_holds_a_new_group_as_often_as_it_says():
    make = np.random.default_rng(0)
    inside = 0
    for _ in range(400):
        means = make.normal(-0.4, 0.2, size=13)
        logs = means[:, None] + make.normal(0, 0.1, size=(13, 8))
        values = pd.Series(np.exp(logs[:-1]).ravel())
        low, centre, high = clock_free.interval(values, pd.Series(np.repeat(range(12), 8)))
        assert low < centre < high
        inside += low < np.exp(logs[-1, 0]) < high
    assert 0.85 < inside / 400 < 0.95


@pytest.mark.sweep
def test_shares_are_those_of_rows_back_to_back_at_their_own_clock():
    found = clock_free.shares()
    assert set(found[found["operator"] == "gdpa"]["impl"]) == {
        *clock_free.RUN_ON["forward"], *clock_free.RUN_ON["backward"],
    }  # fmt: skip
    row = found[(found["workload"] == SELF.name) & (found["impl"] == "v8_own_waits")].iloc[-1]
    run = next(r for r in record.load_all() if r.id == row["record"])
    timed = next(
        x for x in run.rows
        if (x.workload, x.impl, x.scope, x.variant, x.direction)
        == (SELF.name, "v8_own_waits", "sustained", "", "forward")
    )  # fmt: skip
    clocks = np.median(timed.samples_us) * timed.load.sm_clock_mhz
    assert row["clocks"] == pytest.approx(clocks)
    mmas = SELF.flops("forward") / cost_model.H200.flops / cost_model.H200.sms
    assert row["share"] == pytest.approx(mmas / clocks)


def test_ratios_of_rungs_cancel_the_clock():
    table = clock_free.registered().set_index(["workload", "impl", "other"])
    one = table.loc["gdpa-cross-full-1024", "b5_cta_pair", "b4_mixed"]["expected"]
    assert one == pytest.approx((2 * 1024 + 768) / (2 * 1024)), "the port of b4, the MMAs of b5"
    two = table.loc["gdpa-self-full-2048", "b6_pair_stream", "b4_mixed"]["expected"]
    assert two == pytest.approx((16 * 1024 + 768) / (16 * 1024), abs=1e-3)
    same = table.xs("b3_stream", level="other")["expected"]
    assert (same == 1).all()


def at(impl: str, share: float, ghz: float) -> dict:
    """A row at `share` of the ledger, at a clock."""
    design = clock_free.blackwell("forward")[impl].design
    copies = results.Ceilings.measured(CEILINGS, "sustained")
    us = clock_free.floor_us(SELF, design, ghz, copies) / share
    return {"us": us, "load": loaded(us, ghz)}


def test_a_record_judges_at_the_clock_of_each_row(tmp_path):
    low = clock_free.registered().query("impl == 'b4_mixed' and other == ''")["low"].iloc[0]
    add(
        tmp_path,
        timed("b4_mixed", **at("b4_mixed", 1.01 * low, 1.2)),
        timed("b3_stream", **at("b3_stream", 0.9 * low, 1.9)),
    )
    table = clock_free.judged(tmp_path).set_index(["workload", "impl", "other"])
    b4 = table.loc[SELF.name, "b4_mixed", ""]
    assert b4["verdict"] == "confirmed" and b4["measured"] == pytest.approx(1.01 * low)
    assert table.loc[SELF.name, "b3_stream", ""]["verdict"] == "refuted"
    ratio = table.loc[SELF.name, "b4_mixed", "b3_stream"]["measured"]
    assert ratio == pytest.approx(1.01 / 0.9), "whatever their clocks"
    assert table.loc[SELF.name, "b2_two_tiles", ""]["verdict"] == ""
    assert "2 of 3 groups inside: the model is not refuted" in clock_free.report(tmp_path)[0]


def test_another_gpu_judges_nothing(tmp_path):
    add(tmp_path, timed("b4_mixed", **at("b4_mixed", 0.7, 1.2)), capability="10.3")
    assert clock_free.judged(tmp_path)["measured"].isna().all()
    assert "No row is measured" in clock_free.report(tmp_path)[0]


@pytest.mark.parametrize(("wrong", "dead"), [(0, False), (5, False), (6, True), (19, True)])
def test_a_model_dies_of_too_few_groups(wrong, dead):
    """14 of 19 groups inside have a probability above 1 %, 13 one below."""
    table = clock_free.registered()
    groups = table.groupby(["direction", "impl", "other"]).ngroup()
    assert groups.nunique() == 19
    off = groups < wrong
    table = table.assign(measured=table["expected"].where(~off, 2 * table["high"]))
    assert clock_free.is_dead(table) == (dead, 19 - wrong, 19)
    lone = table.assign(measured=table["measured"].where(table.index == table.index[0]))
    assert not clock_free.is_dead(lone)[0]
