"""Joules split over what is counted: the constants come back, and what has none is refused."""

import numpy as np
import pandas as pd
import pytest

from _lib import energy
from gdpa_lab.report import results

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
    found = energy.fit(calls(0.3), TERMS)
    np.testing.assert_allclose(found.terms["value"], TRUE[TERMS], rtol=1e-9)
    assert found.rms_percent < 1e-9 and list(found.residuals.index) == list(range(12))


def test_at_constant_power_time_and_work_are_one_term():
    assert energy.fit(calls(0.001), TERMS).condition > 20 * energy.fit(calls(0.3), TERMS).condition
    with pytest.raises(ValueError, match="3 terms need that rank and more rows, got 2, 12"):
        energy.fit(calls(0.0), TERMS)
    with pytest.raises(ValueError, match="got 2, 2"):
        energy.fit(calls(0.3)[:2], TERMS[1:])


def test_errors_grow_with_the_noise_and_residuals_are_relative():
    made = calls(0.3)
    noise = 1 + 0.02 * np.random.default_rng(1).standard_normal(12)
    small, large = (
        energy.fit(made.assign(joules=made["joules"] * (1 + s * (noise - 1))), TERMS)
        for s in (1, 3)
    )
    assert (large.terms["error"] > 2 * small.terms["error"]).all()
    assert 0.5 < small.rms_percent < 3
    off = (small.terms["value"] - TRUE[TERMS]).abs() / small.terms["error"]
    assert (off < 4).all()


def test_calls_are_counted_as_the_record_has_them():
    record = results.latest_record(notebook="notebooks/measuring/power_wall.py")
    rows = results.table(latest=False).query("record == @record.id and scope == 'sustained'")
    found = energy.counted(rows, record)
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


def test_every_row_has_a_mark():
    rows = pd.DataFrame({"tflops": [500.0, 600.0], "sm_clock_mhz": [1500.0, 1400.0]})
    axis = energy.clocks({"ours": rows, "peers": rows[:1]}, busy=0.5).axes[0]
    assert [len(line.get_xdata()) for line in axis.lines] == [2, 1, 2]
    (low, high), clock = axis.lines[-1].get_xdata(), axis.lines[-1].get_ydata()
    assert (low, high) == pytest.approx((0.9 * 0.5 * 1400, 1.05 * 600))
    assert list(clock) == pytest.approx([low / 0.5, high / 0.5])
