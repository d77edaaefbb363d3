"""Bytes of kernels of block attention, and the published tables beside rows made by hand."""

import math
from dataclasses import replace

import pandas as pd
import pytest

from _lib import block_bytes, block_tables, ratios
from gdpa_lab.measuring.record import DATA_DIR
from gdpa_lab.measuring.roofline import Ceilings
from gdpa_lab.measuring.workloads import workload
from gdpa_lab.report import peers

WORK = workload("block-fill70-2000")
ONE_TILE = {"forward": [("q k v", "out")], "backward": [("q k v dO", "dq dk dv")]}


@pytest.mark.parametrize("work", (WORK, replace(WORK, name="grouped", num_heads_k=1)))
@pytest.mark.parametrize("direction", ("forward", "backward"))
def test_one_tile_moves_what_the_workload_counts(work, direction):
    counted = work.bytes_read(direction), work.bytes_written(direction)
    assert block_bytes.moved(ONE_TILE[direction], work) == counted


def test_rows_of_four_bytes_and_kernels_add_up():
    kernels = [("dO out", "D"), *ONE_TILE["backward"]]
    assert block_bytes.tensors(kernels, WORK) == 9 + 4 / (2 * WORK.head_dim)
    limits = Ceilings(tflops=700.0, copies=((1.0, 4000.0), (3.0, 4500.0)))
    parts = [block_bytes.floor_us([kernel], WORK, limits) for kernel in kernels]
    assert block_bytes.floor_us(kernels, WORK, limits) == pytest.approx(sum(parts))
    read, written = block_bytes.moved(kernels[:1], WORK)
    assert parts[0] == (read + written) / 4500.0 / 1e3


def test_the_charts_are_drawn():
    drawn = block_bytes.boxes({"a": ONE_TILE["forward"], "b": ONE_TILE["backward"]}, WORK)
    assert len(drawn.axes[0].patches) == 11 + 2, "two of them are for the legend"
    grid = pd.DataFrame([[0.0, 1.0], [0.5, 0.0]])
    drawn = block_bytes.cells(
        {"x": grid}, xlabel="key", ylabel="query", frames=[(0, 2, "all")], numbers={"x": grid}
    )
    assert len(drawn.axes[0].patches) == 5


TIMES = {"v1_one_tile": 1000.0, "v3_warp_specialized": 2000.0, "fa2_varlen": 3000.0}


def rows_of(name, times=TIMES, **changes):
    base = {"workload": name, "percent_of_roofline": 50.0, **changes}
    return pd.DataFrame(
        {**base, "direction": way, "impl": impl, "time_us_p50": time, "burst_us": math.nan}
        for way in ("forward", "backward")
        for impl, time in times.items()
    )


def test_the_best_rung_stands_beside_the_best_peer():
    times = TIMES | {"cudnn_varlen": 2500.0}
    made = block_tables.duels(rows_of(WORK.name, times), [WORK], list(TIMES)[:2])
    assert list(made["best rung"]) == ["v1_one_tile"] * 2
    assert list(made["best peer"]) == ["cudnn_varlen"] * 2
    assert list(made["peer / rung"]) == [2.5, 2.5] and list(made["ms"]) == [1.0, 1.0]


def test_both_machines_are_held_against_their_nominal_rate():
    rates = block_tables.machine_rates(rows_of(WORK.name), WORK, DATA_DIR)["forward"]
    published = 100 * WORK.bytes("forward") / 0.98e-3 / 8e12
    assert rates["published kernel, B200"] == pytest.approx(published)
    ours = 100 * WORK.bytes("forward") / TIMES["v1_one_tile"] / 4.8e6
    assert rates["our kernel, H200"] == pytest.approx(ours)
    assert ours / rates["FlashAttention-2, H200"] == pytest.approx(3)


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


@pytest.mark.parametrize(("direction", "most"), (("forward", 2.385), ("backward", 1.815)))
def test_fusing_is_worth_no_more_than_its_bytes(direction, most):
    name = "block-rotary-1735537"
    work = workload(name)
    assert peers.bytes_of_two(work, direction) / work.bytes(direction) == pytest.approx(
        most, abs=0.005
    )
    assert peers.checked(1.02 * most, "rotary_kernel", name, direction) == 1.02 * most
    assert peers.checked(3.27, "eager_rotary", name, direction) == 3.27
    rows = rows_of(name, {"v4_rotary": 1.0, "rotary_kernel": 3.27}, tflops=1.0)
    rows = rows[rows["direction"] == direction]
    for told in (
        lambda: peers.checked(3.27, "rotary_kernel", name, direction),
        lambda: ratios.best(rows),
    ):
        with pytest.raises(ValueError, match="by their bytes, got 3.27"):
            told()


def test_a_duel_that_bytes_forbid_is_refused():
    work = workload("block-rotary-1735537")
    rows = rows_of(work.name, {"v4_rotary": 1.0, "rotary_kernel": 3.27})
    with pytest.raises(ValueError, match="times as fast as rotary_kernel by their bytes"):
        block_tables.duels(rows, [work], ["v4_rotary"])


def test_half_the_heads_of_keys_and_an_unrotated_v_move_less():
    work = replace(workload("block-rotary-1735537"), num_heads_k=1, rotate_v=False)
    q, k = work.total_q * 3 * 256, work.total_q * 256
    turns = work.total_q * 256
    assert peers.bytes_of_two(work, "forward") == (2 * q + 2 * k) + 2 * (q + k) + turns


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
