"""The published tables of block attention beside rows made by hand."""

from dataclasses import replace

import pandas as pd
import pytest

from gdpa_kernels.measuring.record import DATA_DIR
from gdpa_kernels.measuring.workloads import workload
from gdpa_kernels.report import block_tables

TIMES = {"v1_one_tile": 1000.0, "v3_warp_specialized": 2000.0, "fa2_varlen": 3000.0}


def rows_of(name, times=TIMES, **changes):
    base = {"workload": name, "percent_of_roofline": 50.0, **changes}
    return pd.DataFrame(
        {**base, "direction": way, "impl": impl, "time_us_p50": time}
        for way in ("forward", "backward")
        for impl, time in times.items()
    )


def test_the_best_rung_stands_beside_the_best_peer():
    times = TIMES | {"cudnn_varlen": 2500.0}
    work = workload("block-fill70-2000")
    made = block_tables.duels(rows_of(work.name, times), [work], list(TIMES)[:2])
    assert list(made["best rung"]) == ["v1_one_tile"] * 2
    assert list(made["best peer"]) == ["cudnn_varlen"] * 2
    assert list(made["peer / rung"]) == [2.5, 2.5] and list(made["ms"]) == [1.0, 1.0]


def test_rates_of_published_kernels_are_shares_of_the_nominal_rate():
    work = workload("block-fill70-2000")
    made = block_tables.machine_rates(rows_of(work.name), work, DATA_DIR)
    assert (made.iloc[0] == 50).all()
    moved = 100 * work.bytes("forward") / 0.98e-3 / 8e12
    assert made.loc["published kernel, of the nominal 8 TB/s", "forward"] == pytest.approx(moved)


def test_lengths_keep_a_batch_on_which_the_baseline_failed():
    failed = TIMES | {"fa2_varlen": float("nan")}
    rows = [rows_of("block-fill70-1000"), rows_of("block-fill100-8000", failed)]
    rows.append(rows_of("block-fill70-2000-d64"))
    made = block_tables.lengths(pd.concat(rows), list(TIMES))
    assert len(made) == 4 and set(made["length"]) == {1000, 8000}
    assert list(made["quotient"].dropna()) == [3.0, 3.0]
    long = made[made["length"] == 8000]
    assert set(long["fill"]) == {1.0} and set(long["blocks"]) == {768 * 125}
    wide = block_tables.by_length(made, "quotient")
    assert wide.loc[1000, "forward, fill 0.7"] == 3.0


def test_a_pair_gains_no_more_than_its_bytes():
    turned = workload("block-rotary-1735537")
    plain = replace(turned, name="plain", rotary=False, rotate_v=False)
    times = pd.Series({"rotary_kernel": 3000.0, "v4_rotary": 2000.0, "v1_one_tile": 2500.0})
    found, bound = block_tables.worth(times, ["v4_rotary", "v1_one_tile"], turned, plain, "forward")
    assert found == 1.5 and bound == pytest.approx(31 / 13)  # thirds of a tensor
    slow = times.replace(3000.0, 6000.0)
    with pytest.raises(ValueError, match="forward, a pair must gain at most 2.38 .* got 3.00"):
        block_tables.worth(slow, ["v4_rotary"], turned, plain, "forward")
    missing, _ = block_tables.worth(times.replace(3000.0, float("nan")), ["v4_rotary"], turned,
                                    plain, "backward")  # fmt: skip
    assert missing != missing


def test_table_7_by_hand():
    back = {"v4_rotary": 2000.0, "rotary": 1500.0, "rotary_kernel": 4000.0}
    back |= {"rotary_eager": 9000.0, "eager_rotary": 12000.0}
    rows = pd.concat([rows_of("plain"), rows_of("rotary", back)])
    made = block_tables.rotary(rows, ("plain", "rotary"), "v4_rotary", DATA_DIR)
    last = made.loc["one after the other / fused"]
    assert list(last) == [pytest.approx(6.436 / 1.819), 6.0, 2.0]
    assert made.loc["attention", "rotary kernel"] == 1.0


def test_table_8_by_hand():
    columns = ["gradient", "roundings", "max_abs", "mean_abs"]
    found = [(x, n, 0.1 * n, 0.01 * n) for x in ("dk", "dq", "dv") for n in (1, 2)]
    made = block_tables.roundings(pd.DataFrame(found, columns=columns), DATA_DIR)
    assert list(made.index) == ["dq", "dk", "dv"]
    assert made["mean"].tolist() == made["largest"].tolist() == [2.0] * 3
    assert made.loc["dk", "largest, published"] == 1
