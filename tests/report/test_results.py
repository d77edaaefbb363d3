import csv
import io
from dataclasses import replace
from functools import partial

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gdpa_lab import __main__
from gdpa_lab.measuring import bounds, record, roofline
from gdpa_lab.measuring.record import Ceiling, Error, Package, RecordError
from gdpa_lab.measuring.workload import STEP
from gdpa_lab.measuring.workloads import WORKLOADS, workload
from gdpa_lab.report import results
from tests.records import CEILINGS, LOAD, OTHER, SELF, SHORT, a_row, a_system, sources


def one(table: pd.DataFrame, **filters) -> pd.Series:
    """The only row whose columns equal `filters`."""
    for name, value in filters.items():
        table = table[table[name] == value]
    assert len(table) == 1
    return table.iloc[0]


def test_derived_quantities(add, tmp_path):
    samples = (5000.0, 5100.0, 5200.0, 5400.0, 9000.0)
    made = add(a_row(samples_us=samples))
    row = one(results.table(tmp_path))
    assert list(row.index) == list(results.COLUMNS)
    assert row.figure == "gdpa-self-fwd-full"
    assert (row.system, row.gpu) == (made.system, "NVIDIA H200")
    assert (row.date, row.record) == ("2026-11-01", made.id)
    # Positions 0.8, 2 and 3.2 among five samples.
    assert row.time_us_p20 == pytest.approx(5080.0)
    assert row.time_us_p50 == 5200.0
    assert row.time_us_p80 == pytest.approx(6120.0)
    flops = 4 * 4 * 128 * 1152 * 1024**2
    assert row.tflops == pytest.approx(flops / 5200e-6 / 1e12)
    size = 4 * 1152 * 1024 * 4 * 128 * 2
    assert row.gbytes_per_s == pytest.approx(size / 5200e-6 / 1e9)
    assert (row.correct, row.failure, row.stale, row.samples) == (True, "", False, 5)


def test_the_configuration_of_a_peer_has_a_column(add, tmp_path):
    tried = {"default": 5300.0, "tma": 5200.0, "ws": "RuntimeError: ..."}
    peer = a_row(impl="gdpa_triton", config={"configuration": "tma", "tried": tried})
    add(peer, a_row(config={"BLOCK_M": 128}))
    table = results.table(tmp_path).set_index("impl")
    assert table["configuration"].to_dict() == {"gdpa_triton": "tma", "v1_tiled": ""}


@given(st.lists(st.floats(1e-3, 1e9), min_size=1, max_size=40))
def test_quantiles_are_those_of_numpy(samples):
    assert results.quantiles(samples, (0.2, 0.5, 0.8)) == [*np.quantile(samples, (0.2, 0.5, 0.8))]


def test_ceilings_use_medians_and_the_fastest(add):
    slower = Ceiling("matmul", "4096^3", (1e6,), flops=2 * 4096**3)
    again = Ceiling("copy", "1:1 again", (425.0,), bytes_read=10**9, bytes_written=10**9)
    limits = results.ceilings(add(ceilings=(slower, again, *CEILINGS)))
    assert limits.tflops == pytest.approx(2 * 8192**3 / 1392e-6 / 1e12)
    assert limits.copies == ((1.0, pytest.approx(2e6 / 425)), (3.0, pytest.approx(4e6 / 930)))


BLOCKS = workload("block-fill70-2000")
TURNED = workload("block-rotary-1735537")
MIXES = (
    *CEILINGS,
    Ceiling("copy", "2:1", (700.0,), bytes_read=2 * 10**9, bytes_written=10**9),
    Ceiling("copy", "4:3 slow", (1900.0,), bytes_read=4 * 10**9, bytes_written=3 * 10**9),
    Ceiling("copy", "4:3", (1750.0, 1600.0, 3000.0), 0, 4 * 10**9, 3 * 10**9),
    Ceiling("copy", "3:1 of our own", (900.0,), bytes_read=3 * 10**9, bytes_written=10**9),
)


@pytest.mark.parametrize(
    ("of", "direction", "size", "rate"),
    [
        # tensors of 1,609,664 rows x 4 heads x 128 x 2 bytes; the fastest copy of the same mix
        (BLOCKS, "forward", 4 * 1_609_664 * 1024, 4e9 / 900e-6),
        (BLOCKS, "backward", 7 * 1_609_664 * 1024, 7e9 / 1750e-6),
        # of 1,735,537 rows x 3 heads x 128 x 2 bytes, and sin and cos once, a third of one: beyond
        # the outermost mix, and a sixth of the way from 4:3 to 2:1
        (TURNED, "forward", (4 + 1 / 3) * 1_735_537 * 768, 4e9 / 900e-6),
        (TURNED, "backward", (7 + 1 / 3) * 1_735_537 * 768,
         7e9 / 1750e-6 * 5 / 6 + 3e9 / 700e-6 / 6),
    ],
)  # fmt: skip
def test_block_attention_in_percent_of_the_copy_of_its_mix(
    add, tmp_path, of, direction, size, rate
):
    run = a_row(of, impl="v1_one_tile", math="softmax", direction=direction, samples_us=(5000.0,))
    add(run, ceilings=MIXES, workloads={of.name: of.to_dict()})
    row = one(results.table(tmp_path))
    assert row.percent_of_roofline == pytest.approx(100 * size / rate / 5000e-6)
    assert row.gbytes_per_s == pytest.approx(size / 5000e-6 / 1e9)
    assert (row.direction, row.figure, row.correct, row.stale) == (direction, "", True, False)


@pytest.mark.parametrize(
    ("of", "direction", "figure"),
    [
        (SELF, "forward", "gdpa-self-fwd-full"),
        (SHORT, "forward", "gdpa-self-fwd-full"),
        (SELF, "backward", "gdpa-self-bwd-full"),
        (SHORT, "backward", "gdpa-self-bwd-full"),
        (workload("gdpa-cross-full-2048"), "backward", "gdpa-cross-bwd-full"),
    ],
)
def test_percent_of_roofline_is_that_of_the_bracket(add, tmp_path, of, direction, figure):
    impl = "v1_tiled" if direction == "forward" else "v4_warp_specialized_backward"
    run = a_row(of, impl=impl, direction=direction)
    made = add(run, ceilings=MIXES, workloads={of.name: of.to_dict()})
    bracket = roofline.bracket(of, direction, results.ceilings(made))
    row = one(results.table(tmp_path))
    assert row.percent_of_roofline == pytest.approx(bracket.percent_of_roofline(9000.0))
    assert row.tflops == pytest.approx(of.flops(direction) / 9000e-6 / 1e12)
    assert (row.figure, row.direction, row.stale) == (figure, direction, False)


def test_a_step_has_the_flops_of_both_directions(add, tmp_path):
    add(a_row(SHORT, direction="backward", scope="op", variant=STEP))
    step = one(results.table(tmp_path))
    assert step.tflops == pytest.approx(3.5 / 2.5 * SHORT.flops("backward") / 9000e-6 / 1e12)


@pytest.mark.parametrize("kept", [(), CEILINGS[:1], CEILINGS[1:]])
def test_without_ceilings_there_is_no_percentage(add, tmp_path, kept):
    assert results.ceilings(add(a_row(), ceilings=kept)) is None
    row = one(results.table(tmp_path))
    assert np.isnan(row.percent_of_roofline)
    assert row.tflops > 0


def test_failures_have_no_times_and_are_not_correct(add, tmp_path):
    wrong = {"error": Error.judge(1.0, 1e-3, elements=1), "failure": "error 1 exceeds 0.001"}
    add(
        a_row(impl="oom", samples_us=(), error=None, failure="out of memory"),
        a_row(impl="wrong", samples_us=(), **wrong),
        a_row(impl="zigzag", scope="schedule", error=None),
    )
    found = results.table(tmp_path)
    for impl in ("oom", "wrong"):
        row = one(found, impl=impl)
        assert row.correct is np.False_ or row.correct is False
        assert np.isnan(row.time_us_p50) and np.isnan(row.tflops) and row.samples == 0
    assert one(found, impl="wrong").failure == "error 1 exceeds 0.001"
    schedule = one(found, impl="zigzag")
    assert schedule.correct is pd.NA and schedule.time_us_p50 == 9000.0
    assert np.isnan(schedule.tflops) and np.isnan(schedule.percent_of_roofline)


def test_a_workload_appears_in_the_figure_of_its_direction(add, tmp_path):
    add(a_row(), a_row(direction="backward"), a_row(OTHER))
    found = results.table(tmp_path)
    assert list(found.figure) == ["gdpa-self-fwd-full", "gdpa-self-bwd-full", ""]


def test_latest_keeps_the_newest_of_each_row(add, tmp_path):
    add(a_row(samples_us=(9100.0,)), a_row(impl="v2_tma", samples_us=(9200.0,)), day=2)
    add(a_row(samples_us=(9300.0,)), day=3)
    add(a_row(samples_us=(9400.0,)), a_row(variant="again", samples_us=(9500.0,)), day=1)
    assert sorted(results.table(tmp_path).time_us_p50) == [9200.0, 9300.0, 9500.0]
    every = [9100.0, 9200.0, 9300.0, 9400.0, 9500.0]
    assert sorted(results.table(tmp_path, latest=False).time_us_p50) == every
    add(a_row(samples_us=(), error=None, failure="does not compile"), day=4)
    row = one(results.table(tmp_path), impl="v1_tiled", variant="")
    assert row.failure == "does not compile", "a newer failure replaces an older time"


def test_systems_stay_apart_unless_asked_per_gpu(add, tmp_path):
    add(a_row(samples_us=(9100.0,)), day=1, on=a_system("580.1"))
    add(a_row(samples_us=(9200.0,)), day=2, on=a_system("580.2"))
    add(a_row(samples_us=(9300.0,)), day=3, on=a_system(gpu="NVIDIA B200"))
    assert list(results.table(tmp_path).time_us_p50) == [9100.0, 9200.0, 9300.0]
    assert list(results.table(tmp_path, per="gpu").time_us_p50) == [9200.0, 9300.0]
    assert list(results.table(tmp_path, gpu="NVIDIA H200", per="gpu").time_us_p50) == [9200.0]
    with pytest.raises(ValueError, match="per must be"):
        results.table(tmp_path, per="driver")


def test_filters(add, tmp_path):
    add(a_row(), a_row(SHORT), a_row(OTHER))
    assert len(results.table(tmp_path, workload="gdpa-self-full-*")) == 2
    assert list(results.table(tmp_path, workload=SHORT.name).workload) == [SHORT.name]
    assert results.table(tmp_path, workload="nothing").empty
    assert results.table(tmp_path, gpu="NVIDIA B200").empty


OF_V1 = {"v1_tiled": True, "v2_tma": False, "fa2": False}


@pytest.mark.parametrize(
    ("name", "recorded", "stale"),
    [
        ("v1_tiled", "0" * 64, OF_V1),
        ("v1_tiled", None, OF_V1),
        ("v1_tiled_backward", "0" * 64, {"v1_tiled": False, "v1_tiled_backward": True}),
        ("v9_removed", "0" * 64, {"v9_removed": True, "reference": False}),
    ],
)
def test_stale_after_a_change_of_the_kernel(add, tmp_path, name, recorded, stale):
    files = sources() | {f"gdpa_kernels/gdpa/kernels/{name}.py": recorded}
    package = Package("0.1.0", None, None, {file: h for file, h in files.items() if h})
    backward = {"reference": "backward", "v1_tiled_backward": "backward"}
    add(*(a_row(impl=x, direction=backward.get(x, "forward")) for x in stale), package=package)
    found = results.table(tmp_path)
    assert dict(zip(found.impl, found.stale, strict=True)) == stale


def test_stale_after_a_change_of_the_workload(add, tmp_path, monkeypatch):
    add(a_row(), a_row(SHORT), a_row(OTHER))
    monkeypatch.setitem(WORKLOADS, SHORT.name, replace(SHORT, seed=1))
    found = results.table(tmp_path)
    assert list(found.workload[found.stale]) == [SHORT.name]


def test_nothing_is_read_beside_a_refused_record(add, tmp_path):
    add(a_row(), day=1)
    made = add(a_row(), day=2)
    newest = tmp_path / "records" / f"{made.id}.json"
    newest.write_text(newest.read_text()[:-100])
    (tmp_path / "records" / "foreign.json").write_text("{}")
    first, second = f"records/{newest.name}: not JSON.*", "records/foreign.json: not a record"
    named = f"records: 2 refused\nrefused {first}\nrefused {second}"
    of_chapter = partial(results.latest_record, notebook="notebooks/06_v3.py")
    for read in (results.table, results.latest_record, of_chapter):
        with pytest.raises(RecordError, match=named):
            read(tmp_path)


def test_latest_record(add, tmp_path):
    old = add(day=1)
    new = add(day=2)
    other = add(day=3, notebook="notebooks/05_v2.py", on=a_system(gpu="NVIDIA B200"))
    assert results.latest_record(tmp_path) == other
    assert results.latest_record(tmp_path, notebook=old.notebook) == new
    assert results.latest_record(tmp_path, gpu="NVIDIA H200") == new
    with pytest.raises(LookupError, match=r"there is: .*notebooks/05_v2.py on nvidia-b200-"):
        results.latest_record(tmp_path, notebook="notebooks/06_v3.py")
    (tmp_path / "empty").mkdir()
    with pytest.raises(LookupError, match="there is: no record"):
        results.latest_record(tmp_path / "empty")


LEFT_OUT = {"samples_us": (), "error": None, "failure": "not measured: the time was up"}


def test_pieces_stand_in_for_what_they_measured_whole(add, tmp_path):
    at = {"notebook": "notebooks/forward/results.py"}
    run_of = partial(results.run_of, tmp_path, notebook=at["notebook"], gpu="NVIDIA H200")
    add(a_row(OTHER), day=1, **at)
    loop = {"scope": "sustained", "load": LOAD}
    whole = add(a_row(), a_row(SHORT), a_row(**loop), a_row(SHORT, **loop), day=2, **at)
    assert run_of().records == [whole], "an older record adds nothing"
    piece = add(a_row(SHORT, samples_us=(9001.0,)), day=3, **at)
    cut = add(a_row(samples_us=(9002.0,)), a_row(impl="fa4", **LEFT_OUT), day=4, **at)
    add(a_row(SHORT), day=5, on=a_system(gpu="NVIDIA B200"), **at)
    run = run_of()
    assert run.whole == whole and run.records == [whole, piece]
    assert run.of((SHORT.name, "forward", "kernel")) == piece
    assert run.of((SHORT.name, "forward", "sustained")) == whole
    assert run.of((SELF.name, "forward", "kernel")) == whole, "the newest lacks a planned row"
    table = results.table(tmp_path, gpu="NVIDIA H200", latest=False)
    shown = pd.concat(run.select(table[table["record"] == made.id]) for made in (whole, piece, cut))
    assert sorted(shown["time_us_p50"]) == [9000.0, 9000.0, 9000.0, 9001.0]
    again = add(a_row(), a_row(SHORT), a_row(**loop), a_row(SHORT, **loop), day=6, **at)
    assert run_of().whole == again and run_of().records == [again]
    with pytest.raises(LookupError, match="there is: "):
        results.run_of(tmp_path, notebook="notebooks/06_v3.py", gpu="NVIDIA H200")


def test_a_chapter_that_moved_was_planned_anew(add, tmp_path):
    at = {"notebook": "notebooks/forward/results.py", "plan": (a_row().key,)}
    run_of = partial(results.run_of, tmp_path, notebook=at["notebook"], gpu="NVIDIA H200")
    before = add(a_row(), a_row(SHORT), day=1, notebook="notebooks/10_figures.py")
    asked = {"command": "GDPA_KERNELS_ONLY=1024 make measure"}
    piece = add(a_row(samples_us=(9001.0,)), day=2, **at | asked)
    assert run_of().records == [before, piece]
    lacking = a_row(impl="fa4", **LEFT_OUT)
    add(a_row(), lacking, day=3, **at | {"plan": (a_row().key, lacking.key)})
    older = add(a_row(), day=4, **at | {"plan": None})
    assert run_of().records == [before, older], "nobody knows what it lacks"
    whole = add(a_row(), day=5, **at)
    assert run_of().records == [whole]
    larger = add(a_row(), a_row(SHORT), day=6, **at)
    smaller = add(a_row(), day=7, **at)
    assert run_of().records == [larger, smaller], "under one path the most to show is whole"


def test_command_line(add, tmp_path, capsys):
    add(a_row(samples_us=(5200.0,)), a_row(SHORT, direction="backward"), day=1)
    add(a_row(samples_us=(5000.0,)), day=2)
    base = ["results", "--data-dir", str(tmp_path)]

    def printed(*options: str) -> list[dict]:
        assert __main__.main([*base, *options]) == 0
        return list(csv.DictReader(io.StringIO(capsys.readouterr().out)))

    (row,) = printed("--format", "csv", "--gpu", "NVIDIA H200", "--figure", "*-fwd-*")
    assert (row["impl"], row["time_us_p50"], row["correct"]) == ("v1_tiled", "5000", "True")
    assert float(row["tflops"]) == pytest.approx(494.78, rel=1e-4)
    assert len(printed("--all", "--workload", SELF.name)) == 2
    assert len(printed("--scope", "kernel")) == 2
    assert __main__.main([*base, "--format", "markdown"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("| figure | workload |")
    assert len(lines) == 4 and {line.count("|") for line in lines} == {len(results.COLUMNS) + 1}


def test_command_line_says_when_nothing_matches_or_a_file_is_refused(add, tmp_path, capsys):
    add(a_row())
    base = ["results", "--data-dir", str(tmp_path)]
    for option in (("--gpu", "NVIDIA B200"), ("--scope", "sustained"), ("--scope", "wall")):
        assert __main__.main([*base, *option]) == 1
        assert capsys.readouterr().err == "no result matches\n"
    (tmp_path / "records" / "foreign.json").write_text("{}")
    assert __main__.main(base) == 1
    captured = capsys.readouterr()
    assert "refused records/foreign.json: not a record" in captured.err and captured.out == ""


@pytest.mark.parametrize(
    "path", sorted((record.DATA_DIR / "records").iterdir()), ids=lambda path: path.stem
)
def test_every_record_of_the_repository_loads_and_can_be_evaluated(every, path):
    made = record.load(path)
    found = every[every["record"] == made.id]
    assert set(found.workload) == {row.workload for row in made.rows}
    timed = found[found.samples > 0]
    assert (timed.time_us_p50 > 0).all() and (found[found.samples == 0].failure != "").all()
    counted = timed[~timed.scope.isin(["schedule", "host"])]
    assert counted.correct.all()
    assert counted.percent_of_roofline.between(0, bounds.MOST_PERCENT).all()


def test_markdown_cells():
    frame = pd.DataFrame({"a": [1.23456, 123456.7, np.nan], "b": ["x|y", "two\nlines", ""]})
    rows = ["| 1.235 | x\\|y |", "| 123457 | two lines |", "|  |  |"]
    assert results.to_markdown(frame).splitlines()[2:] == rows
