"""Charts: honest axes, the same bytes each time, and an origin under each of them."""

import math
from dataclasses import replace

import matplotlib as mpl
import numpy as np
import pandas as pd
import pytest

from _lib import published_charts
from gdpa_lab.measuring import record, system
from gdpa_lab.measuring.workloads import WORKLOADS
from gdpa_lab.report import claims, page, rates, results, roles
from tests.records import RESULT, a_row

FIGURE = "gdpa-self-fwd-full"
RATES = {"v0_eager": 60, "v1_tiled": 440, "v2_tma": 430, "fa2": 390, "compiled": 120}
ROOFS = {256: 400, 512: 620, 1024: 790, 2048: 790}
LADDER = "gdpa-self-full-1024"


def row(workload: str, impl: str, **changes) -> dict:
    """A row of the results table: RATES at every length, TFLOP/s."""
    problem = WORKLOADS[workload]
    time = problem.flops("forward") / RATES[impl] / 1e6
    values = {
        "workload": workload, "impl": impl, "math": "softmax" if impl == "fa2" else "activation",
        "date": "2026-11-21", "time_us_p20": time * 0.9, "time_us_p50": time,
        "time_us_p80": time * 1.25, "tflops": float(RATES[impl]),
        "gbytes_per_s": problem.bytes("forward") / time / 1e3,
        "percent_of_roofline": 100 * RATES[impl] / ROOFS[problem.max_seqlen_q], "failure": "",
    }  # fmt: skip
    return {**RESULT, **values, **changes}


def failed(workload: str, impl: str) -> dict:
    numbers = dict.fromkeys(("tflops", *(f"time_us_p{q}" for q in (20, 50, 80))), math.nan)
    return row(workload, impl, **numbers, percent_of_roofline=math.nan, failure="out of memory")


def frame(*rows: dict) -> pd.DataFrame:
    return pd.DataFrame(rows, columns=results.COLUMNS)


@pytest.fixture
def table() -> pd.DataFrame:
    names = [f"gdpa-self-full-{n}" for n in ROOFS]
    return frame(*(row(name, impl) for name in names for impl in RATES))


def draw(table, **changes):
    options = {"gpu": "NVIDIA H200", "impls": list(RATES), "published": claims.published_figures()}
    return published_charts.figure_tflops(table, FIGURE, **options | changes)


def texts(axis) -> list[str]:
    return [t.get_text() for t in axis.texts]


def test_ours_and_theirs_have_their_own_titles_and_one_scale(table):
    left, right = draw(table).axes
    assert left.get_title(loc="left") == "measured back to back, NVIDIA H200, 2026-11-21"
    assert right.get_title(loc="left") == "published, NVIDIA B200"
    bottom, top = left.get_ylim()
    assert right.get_ylim() == (bottom, top) and bottom == 0 and top > 1146
    assert (left.get_ylabel(), left.get_xlabel()) == ("TFLOP/s", "max_seqlen_q (tokens)")


def test_back_to_back_has_its_own_ceiling_and_bursts_are_dashes(table):
    bursts = table.assign(scope="kernel")
    faster = bursts.assign(tflops=1.1 * table["tflops"], percent_of_roofline=1.0)
    axis, _ = draw(pd.concat([faster, table])).axes
    lines = {c.get_label(): c.lines[0].get_ydata() for c in axis.containers}
    assert lines["v1_tiled"] == pytest.approx([440] * 4)
    dashes = [line for line in axis.lines if line.get_gid() == "burst"]
    (tiled,) = (line for line in dashes if line.get_color() == roles.role_colour("v1_tiled"))
    assert tiled.get_ydata() == pytest.approx([1.1 * 440] * 4) and len(dashes) == 3
    (steps,) = (p for p in axis.patches if hasattr(p, "get_data"))
    assert list(steps.get_data().values) == pytest.approx(list(ROOFS.values()))
    assert "roofline" in texts(axis) and axis.get_ylim()[1] > 790
    assert any("dash: burst" in text for text in texts(axis))
    alone, _ = draw(table).axes
    assert not any(line.get_gid() == "burst" for line in alone.lines)
    with pytest.raises(ValueError, match="sustained rows of v1_tiled"):
        draw(bursts, impls=["v1_tiled"])


def test_error_bars_are_the_rates_at_p80_and_p20(table):
    axis, _ = draw(table).axes
    bars = next(c for c in axis.containers if c.get_label() == "v1_tiled")
    segment = bars.lines[2][0].get_segments()[0]
    assert segment[:, 1] == pytest.approx([440 / 1.25, 440 / 0.9])


def test_the_best_baseline_is_ringed_and_named_with_its_mathematics(table):
    axis, _ = draw(table).axes
    (ring,) = (line for line in axis.lines if line.get_gid() == "best-baseline")
    assert list(ring.get_ydata()) == [390] * 4
    assert {"fa2 (softmax)", "compiled (activation)", "v1_tiled"} <= set(texts(axis))


def test_a_failed_row_is_a_cross_and_not_a_point(table):
    name = "gdpa-self-full-2048"
    lost = frame(failed(name, "v0_eager"))
    kept = table[(table["workload"] != name) | (table["impl"] != "v0_eager")]
    axis, _ = draw(pd.concat([kept, lost])).axes
    crosses = [line for line in axis.lines if line.get_marker() == "x"]
    assert [list(line.get_xydata()[0]) for line in crosses] == [[3, 0]]
    assert any("cross: not timed" in text for text in texts(axis))
    untried, _ = draw(kept).axes
    assert not any(line.get_marker() == "x" for line in untried.lines)


def test_what_is_missing_or_ambiguous_is_refused(table):
    with pytest.raises(ValueError, match="sustained rows of v9_dream"):
        draw(table, impls=["v1_tiled", "v9_dream"])
    with pytest.raises(ValueError, match="one system"):
        draw(pd.concat([table, table.assign(system="nvidia-h200-11111111")]))
    other = table.assign(workload=table["workload"].str.replace("-full-", "-half-dense-"))
    with pytest.raises(ValueError, match="one workload per length"):
        draw(pd.concat([table, other]))
    with pytest.raises(ValueError, match="figure must be one of"):
        published_charts.figure_tflops(table, "no-such-figure", gpu="", impls=[], published=table)


def test_times_of_whole_ops_and_of_variants_are_not_drawn(table):
    others = pd.concat([table.assign(scope="op", tflops=1.0), table.assign(variant="zigzag")])
    axis, _ = draw(pd.concat([table, others])).axes
    assert all(len(c.lines[0].get_ydata()) == 4 for c in axis.containers)


def test_the_ladder_shows_rungs_in_order_then_baselines_and_colours_one(table):
    rungs = ["v0_eager", "v1_tiled", "v2_tma"]
    (axis,) = rates.ladder(table, LADDER, rungs, "v1_tiled").axes
    names = [label.get_text() for label in axis.get_yticklabels()]
    assert names == [*rungs, "compiled (activation)", "fa2 (softmax)"]
    colours = {c.patches[0].get_facecolor() for c in axis.containers if hasattr(c, "patches")}
    assert len(colours) == 3  # the highlight, grey rungs, hollow baselines
    assert axis.get_xlim()[0] == 0
    assert "roofline 790" in texts(axis)
    with pytest.raises(ValueError, match="highlight must be one of"):
        rates.ladder(table, LADDER, rungs, "v3_persistent")


def test_the_ladder_keeps_failed_rungs(table):
    kept = table[table["impl"] != "v0_eager"]
    table = pd.concat([kept, frame(failed(LADDER, "v0_eager"))])
    (axis,) = rates.ladder(table, LADDER, ["v0_eager", "v1_tiled"], "v1_tiled").axes
    assert "failed: out of memory" in texts(axis)


def test_the_same_data_gives_the_same_svg_and_no_date_and_leaves_matplotlib_alone(table):
    before = dict(mpl.rcParams)
    first, second = (draw(table).to_svg() for _ in range(2))
    assert first == second
    assert "<dc:date>" not in first and "2026-11-21T" not in first
    assert dict(mpl.rcParams) == before


@pytest.fixture
def data_dir(add, tmp_path):
    """A data folder with one record, named in the table that the fixture returns beside it."""
    package = record.Package("0.1.0", "0123456789" * 4, True, {"gdpa_kernels/a.py": "0" * 64})
    return tmp_path, add(a_row(), package=package)


def test_provenance_names_machine_date_commit_record_and_data(data_dir, tmp_path, monkeypatch):
    folder, run = data_dir
    monkeypatch.setattr(page, "CSV_DIR", tmp_path / "figures")
    rows = frame(row(LADDER, "v1_tiled", record=run.id), row(LADDER, "fa2", record=run.id))
    page.save_csv(rows, "ladder-v1")
    line = page.provenance(rows, csv="ladder-v1", data_dir=folder).data
    assert line.startswith('<details class="provenance" data-kind="measured">')
    shown = f"<b>measured</b>: NVIDIA H200, {run.created[:10]}, 1 record</summary>"
    assert shown in line
    assert line.count(f'<a href="../../data/records/{run.id}.json">') == 1
    download = ' <a href="../../figures/ladder-v1.csv">Data of this figure (CSV)</a>.'
    local = "commit <code>0123456789</code> with local changes"
    for text in ("NVIDIA H200", run.created[:10], local, download):
        assert text in line
    assert "stale" not in line
    line = line.replace(", timed back to back", "").replace(download, "")
    assert page.provenance([run.id], data_dir=folder).data in line


def test_provenance_says_what_else_than_the_pins_and_the_commit_ran(data_dir, monkeypatch):
    folder, run = data_dir
    clean = replace(run.package, dirty=None)
    other = replace(run, id=f"{run.id[:17]}other-{run.system}", package=clean)
    record.write(other, folder)
    line = page.provenance([other.id], data_dir=folder).data
    assert "(" not in line and "local changes" not in line
    monkeypatch.setattr(record.Package, "committed", lambda package: "")
    monkeypatch.setattr(page.doctor, "TORCH", "torch==2.14.0")
    line = page.provenance([other.id, run.id], data_dir=folder).data
    machine = system.load(folder / "systems" / f"{run.system}.json")
    assert line.count(f"(torch {machine.torch}, not 2.14.0; driver {machine.driver})") == 1
    assert line.count("</code> with local changes, record") == 2


def test_provenance_warns_of_changed_kernels_and_refuses_a_missing_record(data_dir):
    folder, run = data_dir
    rows = frame(row(LADDER, "v1_tiled", record=run.id, stale=True))
    assert "machine code of <code>v1_tiled</code>" in page.provenance(rows, data_dir=folder).data
    with pytest.raises(record.RecordError):
        page.provenance(["no-such-run"], data_dir=folder)
    with pytest.raises(ValueError, match="at least one record"):
        page.provenance(frame(), data_dir=folder)
    with pytest.raises(ValueError, match="csv must be a name"):
        page.provenance(rows, csv="never-saved", data_dir=folder)


def test_a_figure_without_measurements_says_what_it_is():
    line = page.source("modelled", "a < b").data
    assert line == '<p class="provenance" data-kind="modelled"><b>modelled</b>: a &lt; b</p>'


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: page.source("guessed", "x"), "kind must be one of measured, profiled, published"),
        (lambda: page.save_csv(pd.DataFrame(), "../elsewhere"), "name must be"),
        (lambda: page.glue("speedup", math.nan), "finite number, got nan"),
        (lambda: page.glue("best", ""), "must be a word"),
    ],
)
def test_what_a_page_could_not_print_is_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_save_csv_writes_the_table(tmp_path, monkeypatch):
    monkeypatch.setattr(page, "CSV_DIR", tmp_path / "figures")
    path = page.save_csv(pd.DataFrame({"a": [1, 2], "b": [0.1, math.nan]}), "a-table")
    assert path.read_text() == "a,b\n1,0.1\n2,\n"


@pytest.mark.parametrize(
    "values, digits, shown",
    (
        ([123.456, 98.7], None, ["123", "99"]),
        ([1.234, 12.5, 0.031], None, ["1.23", "12.50", "0.03"]),
        ([1.5, 2.0], None, ["1.5", "2.0"]),
        ([20480, 1], None, ["20,480", "1"]),
        ([1.23456e-8, 2e-6, 0.0], None, ["1.23e-08", "2.00e-06", "0.00e+00"]),
        ([1.234, math.nan], 1, ["1.2", "none"]),
        ([math.nan, math.nan], None, ["none", "none"]),
        (["a | b", 0.12345], None, ["a \\| b", "0.123"]),
        ([True, False], None, ["True", "False"]),
    ),
)
def test_a_column_of_a_table_has_the_same_decimals(values, digits, shown):
    frame = pd.DataFrame({"impl": [f"r{n}" for n in range(len(values))], "x": values})
    chosen = {"x": digits} if digits is not None else None
    lines = page.show_table(frame, digits=chosen, missing="none").data.splitlines()
    right = "--:" if not isinstance(values[0], (str, bool)) else ":--"
    assert lines[:2] == ["| impl | x |", f"| :-- | {right} |"]
    assert lines[2:] == [f"| r{n} | {text} |" for n, text in enumerate(shown)]


@pytest.mark.parametrize(
    "options, message",
    (
        ({"caption": "Times."}, "caption must begin with the finding in bold, got 'Times.'"),
        ({"digits": {"y": 1}}, r"digits must be of columns of the table, got \['y'\]"),
    ),
)
def test_a_table_without_a_finding_or_with_unknown_digits_is_refused(options, message):
    with pytest.raises(ValueError, match=message):
        page.show_table(pd.DataFrame({"x": [1]}), **options)


def test_glue_displays_what_myst_nb_would(monkeypatch):
    import IPython.display
    from myst_nb.ext import glue as library

    shown = []

    def keep(data, raw, metadata):
        shown.append((data, raw, metadata))

    monkeypatch.setattr(IPython.display, "display", keep)
    monkeypatch.setattr(library, "ipy_display", keep)
    formatter = IPython.core.formatters.DisplayFormatter()
    monkeypatch.setattr(IPython.core.formatters, "format_display_data", formatter.format)
    for name, given, number in (("speedup", np.float32(1.5), 1.5), ("best", "fa2", "fa2")):
        page.glue(name, given)
        library.glue(name, number, display=False)
    assert len(shown) == 4 and shown[::2] == shown[1::2]
