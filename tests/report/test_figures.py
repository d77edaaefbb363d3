"""Charts: honest axes, the same bytes each time, and an origin under each of them."""

import math
import re
from dataclasses import replace
from itertools import pairwise

import matplotlib as mpl
import numpy as np
import pandas as pd
import pytest

from _lib import published_charts
from gdpa_kernels.calling import ladder
from gdpa_lab.measuring import record, system
from gdpa_lab.measuring.baselines import BASELINES
from gdpa_lab.measuring.workloads import WORKLOADS
from gdpa_lab.report import claims, page, results, roles, strip, style
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
    roofs = {f"gdpa-self-full-{n}": 1.5 * roof for n, roof in ROOFS.items()}
    options = {"rungs": ["v1_tiled", "v2_tma"], "published": claims.published_figures()}
    return published_charts.shares(table, {FIGURE: "full"}, roofs=roofs, **options | changes)


def lines(axis) -> dict[str, list[float]]:
    return {line.get_label(): list(line.get_ydata()) for line in axis.lines}


def test_shares_of_the_own_roofline_stand_over_the_published_bars(table):
    (axis,) = draw(table).axes
    drawn = lines(axis)
    assert drawn["forward v1"] == pytest.approx([100 * 440 / roof for roof in ROOFS.values()])
    assert drawn["best baseline"] == pytest.approx([100 * 390 / roof for roof in ROOFS.values()])
    assert "v0" not in " ".join(drawn), "only the rungs that were asked for"
    first = claims.published_figures().query("figure == @FIGURE and kernel == 'cutedsl_gdpa'")
    bars = [bar.get_height() for bar in axis.patches]
    assert bars[0] == pytest.approx(100 * first.sort_values("length")["tflops"].iloc[0] / 600)
    assert all(bar.get_facecolor()[3] == 0 for bar in axis.patches), "published is hollow"
    assert axis.get_ylim()[0] == 0 and axis.get_ylabel() == "% of the own roofline"


def test_a_missing_time_is_a_gap_and_a_missing_rung_is_refused(table):
    lost = frame(failed("gdpa-self-full-1024", "v1_tiled"))
    kept = table[(table["workload"] != "gdpa-self-full-1024") | (table["impl"] != "v1_tiled")]
    (axis,) = draw(pd.concat([kept, lost])).axes
    assert [math.isnan(x) for x in lines(axis)["forward v1"]] == [False, False, True, False]
    with pytest.raises(ValueError, match="sustained rows of v9_dream"):
        draw(table, rungs=["v1_tiled", "v9_dream"])
    with pytest.raises(ValueError, match="one system"):
        draw(pd.concat([table, table.assign(system="nvidia-h200-11111111")]))
    with pytest.raises(ValueError, match="figure must be one of"):
        published_charts.shares(
            table, {"no-such-figure": ""}, rungs=[], published=claims.published_figures(), roofs={}
        )


def test_times_of_whole_ops_and_of_variants_are_not_drawn(table):
    others = pd.concat([table.assign(scope="op"), table.assign(variant="zigzag")])
    others["percent_of_roofline"] = 1.0
    assert lines(draw(pd.concat([table, others])).axes[0]) == lines(draw(table).axes[0])


TIMES = {"v0_eager": 33.4, "v6_short_kv": 4.8, "v6a_persistent": 4.81, "v8_own_waits": 4.1}
RUNGS = {ladder.rung(impl): ms for impl, ms in TIMES.items()}


def test_the_strip_lights_one_rung_and_leads_to_the_chapters_of_the_others():
    svg = strip.draw(RUNGS, {"cuDNN": 4.8, "FlexAttention": 23.4}, "v8_own_waits", "forward",
                     "forward/v8_own_waits")  # fmt: skip
    wide = svg.partition('data-form="narrow"')[0]
    assert re.findall(r'href="(.+?)"', wide) == [
        "v6_short_kv.html", "v6_short_kv.html", "v0_eager.html",
    ]  # fmt: skip
    assert re.findall(r"<title>(.+?)</title>", wide)[0] == "v8: waits as written, 4.10 ms"
    assert re.findall(r'font-weight="bold" fill="(.+?)">(v\d)', wide) == [("var(--rung-8)", "v8")]
    assert "33.4 ▸" in wide and "FlexAttention, 23.4 ▸" in wide
    places = [float(x) for x in re.findall(r'<text x="([\d.]+)" y="16"', wide)]
    assert all(b - a > 14 for a, b in pairwise(places)), "names lie apart"


@pytest.mark.parametrize(
    ("impl", "operator", "folder", "page"),
    [("v6a_persistent", "gdpa", "forward", "v6_short_kv"),
     ("v2a_ordered_backward", "gdpa", "backward", "v2_fused_backward"),
     ("v7_wide_backward", "gdpa", "backward", "v5_short_kv_backward"),
     ("v2_slab", "block_attention", "block", "v3_warp_specialized")],
)  # fmt: skip
def test_a_rung_leads_to_the_chapter_that_tells_of_it(impl, operator, folder, page):
    assert strip.page_of(ladder.rung(impl, operator), folder) == page


@pytest.mark.parametrize(
    ("values", "form"),
    [([0.995, 1.09], ",.2f"), ([78, 90.5], ",.1f"), ([430, 436.4], ",.0f"),
     ([0.0123, 0.5], ",.3f"), ([0.5, 900], "#.3g"), ([5, 4000], ",.0f"), ([], ",.0f"),
     ([math.nan, 1.5], ",.2f")],
)  # fmt: skip
def test_a_column_of_labels_has_one_number_of_decimals(values, form):
    assert roles.form_of(values) == form


@pytest.mark.parametrize(
    ("names", "colour"),
    [(("v8_own_waits", "forward v8", "v8", "Blackwell forward b8"), style.RUNG_COLOURS[8]),
     (("backward v4", "v4, measured", "Forward v4", "b4_mixed"), style.RUNG_COLOURS[4]),
     (("fa2_varlen", "FlashAttention-2 (torch)"), style.GREYS[0]),
     (("cudnn", "cuDNN, dense"), style.GREYS[1]),
     (("flashinfer", "published Triton GDPA"), style.GREYS[2]), (("anything",), style.INK)],
)  # fmt: skip
def test_one_kernel_has_one_colour(names, colour):
    assert {roles.role_colour(name) for name in names} == {colour}


def test_series_take_no_hue_of_a_rung_and_directions_are_shapes():
    series = roles.palette(["a", "b", "valid"])
    assert len(set(series.values())) == 3 and set(series.values()) <= {*style.SERIES}
    assert roles.palette(["forward v8", "rest"])["rest"] == style.INK
    assert set(roles.palette(["forward", "backward"], "v3_x").values()) == {style.RUNG_COLOURS[3]}
    looks = roles.marks(["forward", "backward", "published, B200"])
    assert [x["marker"] for x in looks][:2] == [">", "<"]
    assert [x["fillstyle"] for x in looks] == ["full", "full", "none"]


def test_the_site_has_every_colour_in_both_themes():
    css = (record.ROOT / "book" / "assets" / "exhibits.css").read_text(encoding="utf-8")
    light, dark = css.split('html[data-theme="dark"]')[:2]
    for name, (day, night) in style.THEMES.items():
        assert f"--{name}: {day};" in light and f"--{name}: {night};" in dark, name


def test_a_kernel_has_one_name_on_pages():
    names = {"v8_own_waits": "forward v8", "b3_stream": "Blackwell forward b3",
             "cutedsl_gdpa": "published kernel"}  # fmt: skip
    assert {impl: roles.display_name(impl, "forward") for impl in names} == names
    assert roles.display_name("v8_own_waits") == "v8"
    assert roles.display_name("fa3") == BASELINES["fa3"].title


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
