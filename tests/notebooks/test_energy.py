"""Joules split over what is counted: the constants come back, and what has none is refused."""

import numpy as np
import pandas as pd
import pytest

from gdpa_lab.measuring import cost_model
from gdpa_lab.measuring.files import DATA_DIR
from gdpa_lab.report import results
from notebooks.measuring import _energy

TERMS = ["seconds", "flops", "bytes"]
TRUE = pd.Series({"seconds": 120.0, "flops": 8e-13, "bytes": 5e-11})


def calls(spread: float) -> pd.DataFrame:
    """Twelve calls whose times are those of a constant power of 700 W, but for `spread`."""
    random = np.random.default_rng(0)
    work = pd.DataFrame({"flops": random.uniform(1, 9, 12), "bytes": random.uniform(1, 9, 12)})
    work = work * [1e12, 1e10]
    seconds = (work @ TRUE[["flops", "bytes"]]) / (700 - TRUE["seconds"])
    work = work.assign(seconds=seconds * (1 + spread * random.standard_normal(12)))
    return work.assign(joules=work[TERMS] @ TRUE)


def test_a_fit_finds_the_constants_of_its_joules():
    found = _energy.fit(calls(0.3), TERMS)
    np.testing.assert_allclose(found.terms["value"], TRUE[TERMS], rtol=1e-9)
    assert found.rms_percent < 1e-9 and list(found.residuals.index) == list(range(12))


def test_at_constant_power_time_and_work_are_one_term():
    assert (
        _energy.fit(calls(0.001), TERMS).condition > 20 * _energy.fit(calls(0.3), TERMS).condition
    )
    with pytest.raises(ValueError, match="3 terms need that rank and more rows, got 2, 12"):
        _energy.fit(calls(0.0), TERMS)
    with pytest.raises(ValueError, match="got 2, 2"):
        _energy.fit(calls(0.3)[:2], TERMS[1:])


def test_errors_grow_with_the_noise_and_residuals_are_relative():
    made = calls(0.3)
    noise = 1 + 0.02 * np.random.default_rng(1).standard_normal(12)
    small, large = (
        _energy.fit(made.assign(joules=made["joules"] * (1 + s * (noise - 1))), TERMS)
        for s in (1, 3)
    )
    assert (large.terms["error"] > 2 * small.terms["error"]).all()
    assert 0.5 < small.rms_percent < 3
    off = (small.terms["value"] - TRUE[TERMS]).abs() / small.terms["error"]
    assert (off < 4).all()


@pytest.mark.sweep
def test_calls_are_counted_as_the_record_has_them():
    notebook = "notebooks/measuring/power_wall.py"
    record = results.run_of(DATA_DIR, notebook=notebook, gpu="NVIDIA H200").whole
    rows = results.table(latest=False).query("record == @record.id and scope == 'sustained'")
    found = _energy.counted(rows, record)
    kept = {(r.workload, r.direction, r.impl): r for r in record.rows if r.scope == "sustained"}
    for row in found.itertuples():
        raw, work = (
            kept[row.workload, row.direction, row.impl],
            record.workload(row.workload),
        )
        assert row.flops == pytest.approx(raw.flops)
        assert row.bytes == pytest.approx(raw.bytes_read + raw.bytes_written)
        assert row.pairs * 4 * work.head_dim == pytest.approx(work.flops("forward"))
        assert row.limited == ("sw_power_cap" in raw.load.throttle_reasons)
    assert 0 < found["limited"].mean() < 1


WALL = _energy.Wall(700.0, 2.4, 180.0, 630.0, 0.06)


def at_the_wall() -> pd.DataFrame:
    """Four kernels on each of three workloads, at the clock that WALL allows."""
    busy = np.array([0.3, 0.45, 0.6, 0.8] * 3)
    rows = pd.DataFrame({"busy": busy, "gbytes_per_s": np.repeat([500.0, 1500, 3000], 4)})
    rows["sm_clock_mhz"] = WALL.clock(rows["busy"], rows["gbytes_per_s"])
    rows["tflops"] = rows["busy"] * rows["sm_clock_mhz"] * 132 * 4096 / 1e6
    return rows.assign(workload=np.repeat(list("abc"), 4))


def test_the_wall_is_found_again_and_meets_its_limit():
    rows = at_the_wall()
    found = _energy.fit_wall(rows, 700.0, 2.4)
    assert (found.base, found.full, found.byte) == pytest.approx((180, 630, 0.06), rel=1e-6)
    assert found.rms_percent <= found.most_percent < 1e-6
    clock = WALL.clock(0.8, 1500)
    assert WALL.power(0.8, 1500, clock) == pytest.approx(700)
    assert _energy.fit_wall(rows, 700.0, 1.4).rms_percent > 0.1


def test_a_rate_rises_less_than_the_cycles_in_use():
    rows = at_the_wall()
    chip = cost_model.Chip("x", 132, 4096)
    pd.testing.assert_series_equal(_energy.busy_share(rows, chip), rows["busy"], check_names=False)
    law = _energy.law(rows, ["workload"])
    assert law.low <= law.exponent <= law.high and 0.65 < law.exponent < 0.8 and law.each.empty
    many = pd.concat([rows, rows.assign(busy=rows["busy"] * 1.1)], ignore_index=True)
    assert len(_energy.law(many, ["workload"]).each) == 3


def rates(exponent: float, noise: float = 0.0) -> pd.DataFrame:
    """Six kernels on each of eight workloads, and a workload with one."""
    random = np.random.default_rng(0)
    rows = pd.DataFrame({"busy": random.uniform(0.2, 0.8, 49), "workload": [*range(8)] * 6 + [9]})
    factor = np.exp(noise * random.standard_normal(49)) * (1 + rows["workload"])
    return rows.assign(tflops=factor * rows["busy"] ** exponent)


def test_the_exponent_comes_back_with_its_interval_and_residuals():
    exact = _energy.law(rates(0.6), ["workload"])
    assert exact.exponents == pytest.approx([0.6] * 3) and len(exact.residuals) == 48
    assert exact.residuals.abs().max() < 1e-12 and exact.each.tolist() == pytest.approx([0.6] * 8)
    noisy, noisier = (_energy.law(rates(0.6, x), ["workload"]) for x in (0.03, 0.1))
    assert noisy.low < 0.6 < noisy.high and noisier.high - noisier.low > noisy.high - noisy.low
    assert noisier.residuals.std() > 2 * noisy.residuals.std() > 0.02
    again = _energy.law(rates(0.6, 0.03), ["workload"])
    assert again.exponents == noisy.exponents


def test_the_law_is_drawn_through_its_points():
    rows = rates(0.6).assign(sm_clock_mhz=1500.0)
    law = _energy.law(rows, ["workload"])
    clock, rate = _energy.at_the_wall({"all": rows}, law).axes
    assert len(clock.lines[0].get_xdata()) == 49 and len(rate.lines[0].get_xdata()) == 48
    (line,) = (line for line in rate.lines if line.get_gid() == "law")
    x, y = line.get_data()
    assert y == pytest.approx(x**0.6) and rate.get_xscale() == rate.get_yscale() == "log"
