"""The law of tiles: what it counts, and that a fit finds the constants that made the times."""

from dataclasses import replace

import pandas as pd
import pytest

from gdpa_lab.measuring.workloads import workload
from gdpa_lab.report import claims
from notebooks.blackwell import _tile_law

NAMES = [f"gdpa-{kind}-full-{n}" for kind in ("self", "cross") for n in (512, 1024, 2048)]
WORKS = [workload(name) for name in NAMES]


def test_a_fit_finds_the_constants_of_its_times_and_no_negative_one():
    done = _tile_law.amounts(WORKS, sms=132)
    law = pd.Series({"queries": 2.0, "keys": 0.5, "pairs": 1.5})
    pd.testing.assert_series_equal(_tile_law.fit(done, done @ law), law)
    without = _tile_law.fit(done, done @ pd.Series({"queries": 2.0, "keys": -0.1, "pairs": 1.5}))
    assert without["keys"] == 0 and without["pairs"] > 1.4
    with pytest.raises(ValueError, match="us must hold at least 3 times, got 2"):
        _tile_law.fit(done[:2], (done @ law)[:2])


def test_an_exact_law_stays_without_any_one_of_its_times():
    done = _tile_law.amounts(WORKS, sms=132)
    law = pd.Series({"queries": 2.0, "keys": 0.5, "pairs": 1.5})
    again = _tile_law.fits_without_one(done, done @ law)
    assert list(again.index) == NAMES
    assert again.to_numpy() == pytest.approx(pd.concat([law] * 6, axis=1).T.to_numpy())
    outlier = (done @ law).mul([1.0] * 5 + [1.2])
    again = _tile_law.fits_without_one(done, outlier)
    assert again.loc[NAMES[-1], "pairs"] == pytest.approx(1.5) and set(again["keys"][:-1]) == {0.0}


def test_amounts_of_a_batch_counted_by_hand():
    done = _tile_law.amounts([workload("gdpa-cross-full-512")], sms=4)
    assert list(done.loc["gdpa-cross-full-512"]) == [1152 * 4, 1152 * 2, 1152 * 8]


def test_steps_of_the_scan_counted_by_hand():
    """31 sequences of 256 rows: a tile each, and 30 programs beyond them (31 x 511 // 256 = 61)."""
    work = replace(workload("gdpa-self-full-256"), batch=31)
    assert _tile_law.scan_steps(work, sms=2) == pytest.approx(4 * (31 * 0.5 + 30) / 2)


def test_the_rate_of_pairs_is_their_work_over_their_time():
    law = pd.Series({"pairs": 2.0})
    assert _tile_law.pair_tflops(law, 100) == pytest.approx(4 * 128**3 * 100 / 2e6)
    assert _tile_law.pair_tflops(law, 100, "backward") == pytest.approx(10 * 128**3 * 100 / 2e6)


def test_the_published_charts_give_the_laws_of_the_study():
    bars = claims.published_figures().query("not suspect")
    laws = _tile_law.published(bars)
    assert len(laws) == 8
    gdpa, fa4 = laws.loc[("forward", "GDPA")], laws.loc[("forward", "FA4")]
    assert gdpa["pairs alone, TFLOP/s"] == pytest.approx(1163, abs=1) and gdpa["keys"] == 0
    assert fa4["steps"] == pytest.approx(0.291, abs=1e-3) and fa4["full, most"] < 3
    assert 0.25 < fa4["steps, least"] < fa4["steps"] < fa4["steps, most"] < 0.31
    assert laws.loc[("forward", "FMHA"), "half 2048"] > 40, "its half chart does not follow"
    assert laws.loc[("backward", "GDPA"), "full, most"] < 1.5
