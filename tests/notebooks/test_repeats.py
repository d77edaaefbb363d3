"""Kernels measured again: what other protocols say, and how far records differ."""

from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest

from gdpa_lab.measuring.record import Package
from notebooks.measuring import _repeats


def run(name: str, times: dict[str, float], chapter: str = "forward/results", **changes):
    """A record with a row for each implementation, one sample each."""
    rows = [
        SimpleNamespace(
            workload="w", impl=impl, scope="kernel", variant=changes.get("variant", ""), config={},
            samples_us=(time,),
        )
        for impl, time in times.items()
    ]  # fmt: skip
    sources = {f"gdpa_kernels/gdpa/{impl}.py": changes.get("source", "a") for impl in times}
    after = {"sm_clock_mhz": 1980, "power_w": 500.0, "temperature_c": 40, "throttle_reasons": []}
    return SimpleNamespace(
        id=name, chapter=f"notebooks/{chapter}.py", rows=rows, state={"after": after},
        package=Package("0.1.0", None, None, sources),
    )  # fmt: skip


RUNS = [
    run("one", {"v1_tiled": 100.0, "v2_tma": 50.0, "cudnn": 1.0}),
    run("two", {"v1_tiled": 110.0, "v2_tma": 55.0}),
    run("new", {"v1_tiled": 300.0}, source="b"),
    run("idea", {"v1_tiled": 300.0}, variant="an idea"),
    run("same", {"v1_tiled": 120.0}, chapter="measuring/protocol", variant="replicate 1"),
]


def test_only_the_same_kernel_is_compared():
    found = _repeats.repeated(RUNS)
    assert set(found["record"]) == {"one", "two", "same"}
    assert found.groupby("impl")["slower"].max().to_dict() == pytest.approx(
        {"v1_tiled": 20, "v2_tma": 10}
    )


def test_a_ratio_may_hold_where_times_move():
    (row,) = _repeats.ratios(_repeats.repeated(RUNS)).to_dict("records")
    assert row["ratio of"] == "v1_tiled / v2_tma"
    assert row["times differ by (%)"] == pytest.approx(10)
    assert row["ratios differ by (%)"] == pytest.approx(0)
    assert row["records"] == 2 and row["deviation (%)"] == pytest.approx(0)


def test_few_runs_need_wide_intervals():
    assert _repeats.students_t(3) == pytest.approx(4.303, abs=0.01)
    assert _repeats.students_t(10) == pytest.approx(2.262, abs=0.01)
    with pytest.raises(ValueError, match="at least 2, got 1"):
        _repeats.students_t(1)


def test_a_protocol_is_held_against_ours_at_its_batch():
    rows = [
        (name, "w", flops, sample, time)
        for name, flops, times in (
            ("ours", 1e8, (10.0, 10.0)),
            ("warm", 1e8, (4.0, 6.0)),
            ("ours, batch 32", 1e7, (2.0, 2.0)),
            ("bare, batch 32", 1e7, (8.0, 8.0)),
        )
        for sample, time in enumerate(times)
    ]
    table = pd.DataFrame(rows, columns=["protocol", "workload", "flops", "sample", "time_us"])
    found = _repeats.apparent(table).xs("w", level="workload")
    assert found["tflops"]["ours"] == 10
    assert found["relative"].to_dict() == {
        "ours": 1, "warm": 2, "ours, batch 32": 1, "bare, batch 32": 0.25
    }  # fmt: skip
    assert found["low"]["warm"] < 2 < found["high"]["warm"]


def test_ceilings_are_those_of_the_newest_record_of_a_chapter():
    def ceiling(kind, scope, us, **size):
        sizes = {"flops": 0, "bytes_read": 0, "bytes_written": 0, **size}
        load = SimpleNamespace(sm_clock_mhz=1500.0)
        return SimpleNamespace(kind=kind, scope=scope, samples_us=[us], load=load, **sizes)

    copy = ceiling("copy", "kernel", 1.0, bytes_read=2000, bytes_written=2000)
    loops = [ceiling("matmul", "sustained", 4.0, flops=2e6)]
    loops.append(ceiling("copy", "sustained", 1.0, bytes_read=2000, bytes_written=2000))
    runs = [
        SimpleNamespace(id=f"run-{us}", chapter="notebooks/a/b.py",
                        ceilings=[ceiling("matmul", "kernel", us, flops=2e6), copy, *more])
        for us, more in ((1.0, []), (2.0, loops))
    ]  # fmt: skip
    runs.append(SimpleNamespace(id="none", chapter="notebooks/a/c.py", ceilings=[]))
    (row,) = _repeats.ceilings(runs).itertuples(name=None)
    assert row == ("a/b", 1.0, 0.5, 1500.0, 4.0, "run-2.0")


def test_luck_is_the_expected_smallest_of_normal_numbers():
    draws = np.random.default_rng(1).standard_normal((200_000, 8))
    assert _repeats.luck(8) == pytest.approx(-draws.min(axis=1).mean(), abs=5e-3)
    assert [_repeats.luck(n) for n in (1, 2)] == pytest.approx([0, np.pi**-0.5], abs=1e-3)


def test_the_chosen_of_equals_is_ahead_until_it_is_timed_again():
    times = 100 + np.random.default_rng(2).standard_normal((8, 60))
    one, many = (_repeats.chosen(times, size) for size in (1, 20))
    for of in (one, many):
        assert of["ahead, %"] == pytest.approx(of["expected, %"], rel=0.1)
        assert abs(of["again, %"]) < of["ahead, %"] / 3
    assert many["ahead, %"] < one["ahead, %"] / 2
    times[3] -= 10
    assert _repeats.chosen(times, 1)["again, %"] > 8, "a faster one is ahead both times"
