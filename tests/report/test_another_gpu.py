"""A B200 that nobody has here: from a record of it, made up for this test, to the book's pages."""

import re
import shutil
from dataclasses import replace

import pytest

from _lib import published_charts, ratios
from gdpa_kernels.calling import ladder
from gdpa_kernels.calling.rankings import parse
from gdpa_kernels.calling.rung import DIRECTIONS, Requires, Rung
from gdpa_lab import __main__
from gdpa_lab.measuring import probe, record, system
from gdpa_lab.report import claims, measured_rankings, page, readme, results, roles
from gdpa_lab.report.chapter import Chapter
from tests.records import a_system

CLOCKS = {"max_sm_clock_mhz": 4000.0, "max_memory_clock_mhz": 12000.0}
B200 = a_system(gpu="NVIDIA B200", compute_capability="10.0", **CLOCKS)
CHAPTERS = ("forward/results", "backward/results", "block/results")
KEPT = "gdpa-(self-half-jagged|cross-full)-.*|gdpa-self-full-1024|block-fill70-2000|block-rotary-.*"
OWN = ("b90_pretended", "b91_pretended")
GPUS = ((9, 0), (10, 0))
DRAWN = ["v1_tiled", "v8_own_waits", "v5_short_kv_backward"]


def faster(timed: record.Row | record.Ceiling, share: float) -> record.Row | record.Ceiling:
    """Scale it as if it took `share` of the time, with the same power."""
    load = timed.load and replace(timed.load, joules=share * timed.load.joules)
    return replace(timed, samples_us=tuple(share * us for us in timed.samples_us), load=load)


def pretended(of: record.Record) -> record.Record:
    """The record of an H200 as if a B200 had made it: 0.4 times the times, rungs for sm_90 fail,
    and two rungs of its own are faster than v1."""
    rows = []
    for row in of.rows:
        rung = next((r for rs in ladder.LADDERS.values() for r in rs if r.impl == row.impl), None)
        if rung is not None and rung.requires.only_major:
            failure = "needs sm_90, got sm_100"
            rows.append(replace(row, samples_us=(), error=None, failure=failure, load=None))
            continue
        rows.append(faster(row, 0.4))
        if row.impl.startswith("v1_"):
            for share, impl in zip((0.6, 0.5), OWN, strict=True):
                rows.append(replace(faster(row, share * 0.4), impl=impl))
    limits = [faster(ceiling, 0.2) for ceiling in of.ceilings]
    name = of.id.replace(of.system, B200.id)
    return replace(of, id=name, system=B200.id, rows=tuple(rows), ceilings=tuple(limits))


def whole(chapter: str) -> record.Record:
    """The rows of `KEPT` in the whole record of an H200's run of a chapter."""
    notebook = f"notebooks/{chapter}.py"
    run = results.run_of(record.DATA_DIR, notebook=notebook, gpu="NVIDIA H200").whole
    rows = (row for row in run.rows if row.scope in results.TIMED and not row.variant)
    return replace(run, rows=tuple(x for x in rows if re.fullmatch(KEPT, x.workload)), plan=None)


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """A data folder with some of the whole H200 records of three chapters, and one with the same
    of the B200 too."""
    alone, both = (tmp_path_factory.mktemp(name) for name in ("alone", "both"))
    runs = [whole(chapter) for chapter in CHAPTERS]
    with pytest.MonkeyPatch.context() as patch:
        for operator, rungs in ladder.LADDERS.items():
            own = (
                Rung(impl, "", "", None, Requires((10, 0), only_major=True), operator, DIRECTIONS)
                for impl in OWN
            )
            patch.setitem(ladder.LADDERS, operator, (*rungs, *own))
        for folder in (alone, both):
            shutil.copytree(record.DATA_DIR / "systems", folder / "systems")
            shutil.copytree(record.DATA_DIR / "published", folder / "published")
            shutil.copy(record.DATA_DIR / "claims.yml", folder)
        system.save(B200, both)
        for run in runs:
            record.write(run, alone)
            record.write(run, both)
            record.write(pretended(run), both)
        patch.setattr(page, "CSV_DIR", both / "figures")
        yield alone, both


@pytest.mark.sweep
def test_what_is_said_of_the_h200_stays(folders):
    def said(data_dir):
        every = results.table(folders[1], gpu="NVIDIA H200", latest=False)
        tables = [
            measured_rankings.from_records(data_dir, operator)
            for operator in measured_rankings.CHOICES
        ]
        kept = [row for table in tables for row in table if row.shape[0] == (9, 0)]
        ledger = claims.judged(every, claims=claims.load(data_dir))
        assert kept and len(ledger)
        return ledger.to_csv(), kept, readme.block(data_dir)

    alone, both = folders
    assert said(both) == said(alone)
    readme.hero(both)


def test_its_own_results_choices_and_claims(folders, monkeypatch, capsys):
    _, both = folders
    assert ("gdpa", "forward", "v8_own_waits") in probe.verified(both, "9.0")
    known = probe.verified(both, "10.0")
    assert ("gdpa", "forward", OWN[0]) in known and ("gdpa", "forward", "v8_own_waits") not in known
    assert __main__.main(["results", "--data-dir", str(both), "--gpu", "NVIDIA B200"]) == 0
    printed = capsys.readouterr().out
    assert OWN[1] in printed and '"needs sm_90, got sm_100"' in printed

    monkeypatch.setattr(record, "DATA_DIR", both)
    monkeypatch.setattr(record, "ROOT", both)
    for operator, module in measured_rankings.CHOICES.items():
        monkeypatch.setattr(module, "PATH", both / operator)
    assert __main__.main(["maintain", "choices"]) == 0
    for operator, module in measured_rankings.CHOICES.items():
        rows = parse(module.PATH.read_text(), module.COLUMNS)
        first = {gpu: {row.impls[0] for row in rows if row.shape[0] == gpu} for gpu in GPUS}
        assert first[10, 0] == {OWN[1]}, operator
        assert first[9, 0] and not first[9, 0] & {*OWN}

    ledger = claims.judged(results.table(both, gpu="NVIDIA B200"), claims=claims.load(both))
    assert (ledger["ours_gpu"] == "NVIDIA B200").any()


@pytest.mark.parametrize(
    ("chapter", "figure"),
    [("forward/results", "gdpa-cross-fwd-full"), ("backward/results", "gdpa-cross-bwd-full")],
)
def test_it_is_drawn_beside_the_published_bars(folders, monkeypatch, chapter, figure):
    drawn, shown, draw = [], [], published_charts.shares
    monkeypatch.setattr(published_charts, "shares", lambda *a, **how: drawn.append(draw(*a, **how)))
    monkeypatch.setattr("gdpa_lab.report.chapter.display", shown.append)
    monkeypatch.setattr(ratios, "display", shown.append)
    direction = chapter.partition("/")[0]
    for folder in folders:
        both = Chapter(chapter, data_dir=folder)
        ratios.redrawn(both, {figure: "256 keys"}, DRAWN, "")
    before, after = ({line.get_label() for line in chart.axes[0].lines} for chart in drawn)
    of_b200 = {f"{roles.display_name(impl, direction)}, B200" for impl in OWN}
    assert {x for x in after - before if not x.startswith("_")} == {
        *of_b200, "best baseline, B200",
    }  # fmt: skip
    first = {"forward": "v1", "backward": "v5"}[direction]
    assert f"{direction} {first}" in before and "best baseline" in before
    assert "NVIDIA B200" in shown[-1].data and "NVIDIA H200" in shown[-1].data
    ratios.others(both, None, direction)
    table = shown[-2].data
    assert (
        "**NVIDIA B200: " in table and f"Blackwell {direction} {OWN[1].partition('_')[0]}" in table
    )
