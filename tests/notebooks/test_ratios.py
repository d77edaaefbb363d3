"""The best rung against the best peer, and another machine beside the record."""

import math
from dataclasses import replace
from operator import attrgetter
from pathlib import Path

import pandas as pd
import pytest

from _lib import ratios
from gdpa_kernels.calling import ladder
from gdpa_lab.measuring import record
from gdpa_lab.measuring import system as systems
from gdpa_lab.report import peers, results
from gdpa_lab.report.chapter import Chapter

NAME = "gdpa-self-full-256"
RATIO = "peer / rung (time)"
RATES = {"v1_tiled": 300.0, "v2_tma": 400.0, "cudnn": 500.0, "fa2_varlen": 200.0}


def rows(rates=RATES, name=NAME) -> pd.DataFrame:
    made = [
        {"workload": name, "impl": impl, "tflops": rate, "time_us_p50": 1000 / rate,
         "percent_of_roofline": rate / 8, "burst_us": math.nan}
        for impl, rate in rates.items()
    ]  # fmt: skip
    return pd.DataFrame(made)


def test_the_best_rung_stands_beside_the_best_peer():
    found = ratios.best(rows())
    line = found.loc[NAME]
    assert (line["best rung"], line["best peer"]) == ("v2_tma", "cudnn")
    assert line["roofline"] == pytest.approx(800)
    assert line["peer / rung (time)"] == pytest.approx(0.8)
    assert ratios.glued(found) == {"best_self-full_256": 400, "share_self-full_256": 50}
    (shown,) = ratios.shown(found, "forward").to_dict("records")
    assert shown["workload"] == "full-256" and shown["best kernel"].startswith("forward v")
    assert shown["times as fast"] == round(found["peer / rung (time)"].iloc[0], 2)


def test_all_results_oppose_kernel_and_baseline_in_the_same_words(chapter, monkeypatch):
    frame = ratios.opposed(
        {"batch": ["a"]}, ["k"], ["b"], {"ms": pd.Series([1.5])}, pd.Series([2.0])
    )
    assert list(frame) == ["batch", "best kernel", "ms", "best baseline", "times as fast"]
    tables = []
    monkeypatch.setattr(Chapter, "table", lambda self, frame, **how: tables.append(how))
    ratios.against(chapter, frame, "It wins.", rows(), "tab-it")
    said = "**It wins.** Back to back on the H200; last: the baseline's time over the kernel's."
    assert (tables[0]["caption"], tables[0]["name"]) == (said, "tab-it")


def test_a_row_without_a_time_does_not_count_and_one_of_each_kind_is_needed():
    table = rows()
    table.loc[table["impl"] == "cudnn", "time_us_p50"] = float("nan")
    assert ratios.best(table).loc[NAME, "best peer"] == "fa2_varlen"
    with pytest.raises(LookupError, match=f"a time of a peer on {NAME}"):
        ratios.best(table[table["impl"] != "fa2_varlen"])


def test_the_best_peer_may_be_a_dense_form_and_rows_are_of_one_batch():
    table = rows(RATES | {"fa4": 450.0, "fa4_dense": 550.0}).assign(math="softmax")
    assert ratios.best_peer(table)["impl"] == "fa4_dense"
    table.loc[table["impl"] == "fa2_varlen", "math"] = "activation"
    assert ratios.best_peer(table, "activation")["impl"] == "fa2_varlen"
    assert ratios.best_rung(table)["impl"] == "v2_tma"
    with pytest.raises(ValueError, match="rows must be of one workload, got"):
        ratios.best_peer(pd.concat([table, rows(name="gdpa-self-full-512")]))
    with pytest.raises(LookupError, match="a time of a peer that computes activation"):
        ratios.best_peer(table[table["impl"] == "fa4"], "activation")


def test_peers_without_a_time_are_named_with_the_reason():
    table = rows().assign(direction="forward", failure="", scope="sustained")
    table.loc[len(table)] = {"workload": NAME, "impl": "fa3", "direction": "forward",
                             "failure": "Unsupported: needs the package xformers",
                             "scope": "sustained"}  # fmt: skip
    missing = peers.missing_peers(table)
    assert missing["FlashAttention-3"] == "needs the package xformers"
    assert missing["FlashAttention-4, dense"] == "not in this record"
    assert not {"cuDNN, dense", "FlashAttention-2 (torch)"} & {*missing}
    back = table[table["impl"] != "cudnn"].assign(direction="backward")
    assert "cuDNN, dense (1 of its 2 batches)" in peers.missing_peers(pd.concat([table, back]))
    jagged = peers.missing_peers(table.assign(workload="gdpa-self-half-jagged-256"))
    assert "FlashAttention-4, dense" not in jagged and "HSTU, Triton" not in jagged
    jagged = peers.missing_peers(table.assign(workload="gdpa-self-half-jagged-1024"))
    assert "HSTU, Triton" in jagged
    assert "HSTU, Triton" not in peers.missing_peers(table.assign(workload="gdpa-cross-full-512"))
    blocks = table.assign(workload="block-rotary-1735537", impl="v1_one_tile")
    assert "our rotary kernel, then our attention" in peers.missing_peers(blocks)
    assert "FlashAttention-3, a sequence per block" not in peers.missing_peers(blocks)


def test_a_time_in_bursts_is_none_back_to_back():
    """One batch, or one scope, says nothing of another."""
    table = rows().assign(direction="forward", failure="", scope="kernel")
    timed = table.assign(scope="sustained")
    other = timed.assign(workload="gdpa-self-full-512")
    missing = peers.missing_peers(pd.concat([table, other[other["impl"] != "cudnn"], timed]))
    assert "cuDNN, dense (1 of its 2 batches)" in missing


def test_a_planned_peer_without_a_time_keeps_its_place():
    """Its burst over the rung's counts where it is closer than all peers that have times."""
    table = rows(RATES).assign(math="softmax", direction="forward")
    table["burst_us"] = table["time_us_p50"]
    closest = ratios.best_peer(table)["impl"]
    standing = ratios.best(table)
    assert not standing["open"].any() and ratios.ahead(standing) == ratios.spread(standing[RATIO])
    failed = table.copy()
    failed.loc[failed["impl"] == closest, ["time_us_p50", "tflops"]] = math.nan
    there = ratios.best(failed)
    assert there["open"].all() and there["best peer"].eq(closest).all()
    assert there[RATIO].eq(standing[RATIO]).all()
    with_other = pd.concat([there, standing.rename({NAME: "gdpa-b"})])
    alone = f"{there[RATIO].iloc[0]:.2f} on {ratios.short(NAME)}"
    assert ratios.ahead(with_other).endswith(f" (by bursts alone {alone})")
    failed["burst_us"] = math.nan
    assert not ratios.best(failed)["open"].any()
    elsewhere = table.assign(record="b", time_us_p50=2 * table["time_us_p50"])
    older = table.assign(record="a", time_us_p50=table["impl"].ne(closest) + 1.0)
    there = ratios.best(failed, pd.concat([older, elsewhere]))
    assert there[RATIO].eq(standing[RATIO]).all() and there["open"].eq("in another run").all()
    assert ratios.ahead(there).endswith(" (1 of 1 in another run)")
    assert ratios.shown(there, "forward")["best baseline"][0].endswith(", in another run")
    both = ratios.behind(failed, there, pd.concat([older, elsewhere]))
    assert {*both["record"].dropna()} == {"b"} and len(both) == len(failed) + 2
    assert not ratios.best(table, elsewhere)["open"].any(), "it has a time in this run"


def test_a_step_is_from_the_predecessor_and_ranges_say_where():
    times = pd.DataFrame(
        {"v2_tma": [4.0, 6.0], "v3_persistent": [2.0, 2.0], "v4_warp_specialized": [8.0, 6.0]},
        index=["gdpa-a", "gdpa-b"],
    )
    steps = ratios.steps(times, ladder.RUNGS)
    assert list(steps) == ["v2 / v3", "v2 / v4"]
    first, second = ratios.ranges(steps, "step").to_dict("records")
    assert (first["least"], first["on"], first["most"], first["on "]) == (2, "a", 3, "b")
    assert (second["least"], second["median"], second["workloads"]) == (0.5, 0.75, 2)


def test_sentences():
    assert ratios.listed(["a", "b", "c"]) == "a, b and c"
    assert (ratios.listed(["a"]), ratios.listed([])) == ("a", "none")
    assert ratios.spread(pd.Series([1.234, 2])) == "1.23 to 2.00"
    assert ratios.spread(pd.Series([1.234])) == "1.23"
    assert ratios.counted(pd.Series([1.234, 2])) == "1.23 to 2.00 (n = 2)"
    for values, missing in ((pd.Series([1.2, None], ["a", "b"]), "b"), (pd.Series([]), "anything")):
        with pytest.raises(ValueError, match=f"values must all be there, got none for {missing}"):
            ratios.spread(values)


class Again:
    """A session that has just measured what a record holds."""

    def __init__(self, of: record.Record):
        self.of = of

    def write(self, folder) -> Path:
        self.folder = Path(folder)
        machine = f"systems/{self.of.system}.json"
        (self.folder / machine).write_text((record.DATA_DIR / machine).read_text())
        return record.write(self.of, folder)


@pytest.fixture(scope="module")
def chapter() -> Chapter:
    return Chapter("backward/results")


@pytest.fixture
def shown(monkeypatch) -> list[str]:
    displayed = []
    monkeypatch.setattr(ratios, "display", lambda made, **_: displayed.append(made.data))
    return displayed


@pytest.mark.sweep
def test_a_session_is_shown_beside_the_record_and_nothing_is_kept(chapter, shown):
    at = {"notebook": "notebooks/backward/results.py", "gpu": "NVIDIA H200"}
    run = results.run_of(record.DATA_DIR, **at)
    place = attrgetter("workload", "direction", "scope")
    rows = [x for made in run.records for x in made.rows if run.of(place(x)) == made]
    works = {name: work for made in run.records for name, work in made.workloads.items()}
    session = Again(replace(run.whole, rows=tuple(rows), workloads=works, plan=None))
    ratios.others(chapter, session, "backward", scope="kernel")
    title, printed = shown
    assert title == "**This machine**, TFLOP/s in bursts, next to those of the record."
    last = [line.split("|")[-2].strip() for line in printed.splitlines()[2:]]
    assert len(last) > 50 and set(last) <= {"1", ""}
    assert not session.folder.exists()


@pytest.mark.sweep
def test_without_a_session_the_best_kernels_of_other_boards_are_shown(shown):
    ratios.others(Chapter("forward/results"), None, "forward")
    others = systems.promoted(record.DATA_DIR).keys() - {"NVIDIA H200"}
    titles = [text for text in shown if text.startswith("::::{table} **")]
    assert others and all(any(gpu in text for text in titles) for gpu in others)
    assert not any("**NVIDIA H200:" in text for text in titles)


def test_workloads_left_out_of_another_board_are_counted(shown, monkeypatch):
    """Of three that were timed, a kernel of one has changed since; a fourth has no peer."""
    names = [f"gdpa-self-full-{n}" for n in (256, 512, 1024, 2048)]
    table = pd.concat([rows(name=name) for name in names], ignore_index=True)
    table = table.assign(gpu="NVIDIA X", direction="forward", scope="sustained", stale=False,
                         variant="", figure="f", handle="", math="softmax")  # fmt: skip
    table.loc[(table["workload"] == names[1]) & (table["impl"] == "v2_tma"), "stale"] = True
    no_peer = (table["workload"] == names[3]) & table["impl"].isin(["cudnn", "fa2_varlen"])
    monkeypatch.setattr(results, "table", lambda *a, **how: table[~no_peer])
    monkeypatch.setattr(results, "community", lambda *a, **how: table.iloc[:0])
    monkeypatch.setattr(ratios.page, "provenance", lambda *a, **how: pd.Series(dtype=object))
    monkeypatch.setattr(ratios, "display", lambda x: shown.append(getattr(x, "data", "")))
    ratios.others(Chapter("forward/results"), None, "forward")
    assert "**NVIDIA X: " in shown[0] and "since a kernel has changed: 1." in shown[0]
    assert "full-512" not in shown[0] and "full-2048" not in shown[0] and "full-1024" in shown[0]


def test_boards_show_no_workload_on_which_a_kernel_has_changed_since():
    each = pd.concat([rows(), rows(name="gdpa-self-full-512")], ignore_index=True)
    each = each.assign(gpu="a board", direction="forward", scope="sustained", stale=False)
    each.loc[5, "stale"] = True  # v2_tma at 512
    assert set(ratios.of_today(each)["workload"]) == {NAME}
    each.loc[each["workload"] != NAME, "gpu"] = "another"  # with that alone: shown, and said so
    assert len(ratios.of_today(each)) == len(each)


@pytest.mark.sweep
def test_published_quotients_stand_beside_measured_ones():
    chapter = Chapter("backward/results")
    found = ratios.best(chapter.rows(scope="sustained", direction="backward"))
    made = ratios.beside_published(chapter, found, "backward")
    assert list(made) == ["measured, NVIDIA H200", "published, NVIDIA B200"]
    assert made.notna().all(axis=None) and not made.index.str.contains("jagged").any()
    assert made.loc["cross-full-256"].iloc[1] == pytest.approx(340 / 229, rel=0.5)
