"""`Chapter`: what it quotes, what it shows, and what it refuses."""

import copy
import html
import math
import re

import pandas as pd
import pytest

from gdpa_kernels.calling import ladder
from gdpa_kernels.gdpa.ladder import v5_pingpong
from gdpa_lab.measuring import record
from gdpa_lab.report import chapter as chapters
from gdpa_lab.report import page, page_blocks, registered, results, style
from gdpa_lab.report.chapter import Chapter


@pytest.fixture
def shown(monkeypatch, tmp_path) -> list:
    """Outputs that a chapter displays, with its downloads in `tmp_path`."""
    outputs: list = []
    monkeypatch.setattr(chapters, "display", lambda shown, **_: outputs.append(shown))
    monkeypatch.setattr(page, "CSV_DIR", tmp_path / "figures")
    monkeypatch.setattr(chapters, "CHANGES_DIR", tmp_path / "changes")
    return outputs


@pytest.fixture(scope="module")
def read() -> Chapter:
    made = Chapter("forward/v5_pingpong", data_dir=record.DATA_DIR)
    made.rows("forward/results")
    return made


@pytest.fixture
def chapter(read) -> Chapter:
    """A new one, whose rows have been read."""
    return copy.copy(read)


def test_a_ladder_stands_beside_every_baseline_of_the_results():
    assert {name: of for name, (of, *_) in chapters.LADDERS.items()} == {
        name: f"{name}/results" for name in ("forward", "backward", "block")
    }


def test_rows_are_those_of_the_run(chapter):
    whole = chapter.record("forward/results").id
    assert set(chapter.rows(whole, direction="forward")["record"]) == {whole}
    rows = chapter.rows("forward/results", direction="forward")
    assert (rows.groupby("workload")["record"].nunique() == 1).all(), "ratios are of one board"
    assert set(rows["scope"]) == {"kernel"} and set(rows["variant"]) == {""}
    assert not rows.duplicated(["workload", "impl"]).any()
    chosen = chapter.rows("forward/results", workload=["gdpa-self-full-256"], impl="v1_tiled")
    assert len(chosen) == 1
    times = chapter.times("forward/results", workload="gdpa-self-full-256")
    assert times.loc["gdpa-self-full-256", "v1_tiled"] == chosen["time_us_p50"].iloc[0]


def test_notes_stand_at_their_lines_in_a_whole_kernel(chapter, shown):
    notes = {"for block in": "A {term}`tile` of keys.", "store_rows(": "Once."}
    chapter.annotated(v5_pingpong.math, notes)
    drawn = shown[0].data
    text = html.unescape(re.sub(r"<[^>]+>", "", drawn))
    for line in page_blocks.source_of(v5_pingpong.math).splitlines():
        assert line in text
    assert not any("\n\n" in code for code in re.findall("<pre>.*?</pre>", drawn, re.DOTALL))
    for number, (words, note) in enumerate(notes.items(), 1):
        place = drawn.index(f'\n\n<b class="mark">{number}</b> {note}\n\n')
        before = re.sub(r"<[^>]+>", "", drawn[:place]).rstrip().splitlines()[-1]
        assert words in before and before.endswith(f" {number}")
    for words, count in (("no such line", 0), ("tl.", 2)):
        with pytest.raises(ValueError, match=f"must have '{words}', got {count}"):
            chapter.annotated("tl.a\ntl.b", {words: "note"})


def test_functions_are_annotated_one_after_another(chapter, shown):
    chapter.annotated(["a = 1\n", "b = 2\n"], {"b =": "Last."})
    text = re.sub(r"<[^>]+>", "", shown[0].data)
    assert text.split() == ["a", "=", "1", "b", "=", "2", "1", "1", "Last."]


def test_a_listing_can_be_folded_with_its_notes(chapter, shown):
    chapter.annotated("a = 1\n", {"a =": "Of {term}`TMA`."}, folded="The <rest>")
    chapter.annotated("a = 1\n", {"a =": "Of {term}`TMA`."})
    opened, closed = shown[0].data.split(shown[1].data)
    assert opened == '<details class="stepper"><summary>The &lt;rest&gt;</summary>\n\n'
    assert closed == "\n\n</details>"


def test_what_no_record_holds_is_refused(chapter):
    with pytest.raises(LookupError, match="must hold rows of .*nothing"):
        chapter.rows(impl="nothing")
    with pytest.raises(LookupError, match="notebook='notebooks/forward/none.py'"):
        chapter.record("forward/none")
    with pytest.raises(LookupError, match=r"table must be one of .*'bits'.*, got 'nothing'"):
        chapter.recorded("nothing", "backward/v2_fused_backward")


def test_nothing_is_measured_in_replay(chapter):
    chapter.measure(lambda session: pytest.fail("measured"))
    assert chapter.compare(lambda session: pytest.fail("measured")) is None


def test_an_exhibit_has_its_data_and_its_origin(chapter, shown, tmp_path):
    rows = chapter.rows("forward/results", workload="gdpa-self-full-256")
    chapter.table(rows[["impl", "tflops"]], measured=rows)
    table, origin = (output.data for output in shown)
    assert table.startswith("| impl | tflops |")
    assert 'data-kind="measured"' in origin and rows["record"].iloc[0] in origin
    (csv,) = (tmp_path / "figures").iterdir()
    assert csv.name == "forward-v5_pingpong-1.csv" and csv.name in origin
    assert len(pd.read_csv(csv)) == len(rows)


@pytest.mark.parametrize("origin", ({}, {"guessed": "x"}, {"measured": [], "typed": "x"}))
def test_an_exhibit_without_a_known_origin_is_refused(chapter, shown, origin):
    with pytest.raises(TypeError, match="origin must be among measured, profiled, published"):
        chapter.figure(style.Figure(), **origin)


def test_a_table_has_its_finding_and_says_what_was_not_timed(chapter, shown):
    rows = chapter.rows("forward/results", workload="gdpa-self-full-256")
    frame = pd.DataFrame({"rung": ["v1", "v2"], "us": [1.5, math.nan]})
    chapter.table(frame, caption="**v1 is fast.** Times.", name="tab-v1", measured=rows)
    assert shown[0].data.startswith(
        "::::{table} **v1 is fast.** Times.\n:class: exhibit\n:name: tab-v1"
    )
    assert "| v2 | not timed |" in shown[0].data
    chapter.table(frame, measured=rows, published="a paper")
    chapter.table(frame, measured=rows, missing="none")
    assert "| v2 |  |" in shown[2].data and "| v2 | none |" in shown[4].data


def test_an_exhibit_names_each_kind_of_its_numbers(chapter, shown):
    rows = chapter.rows("block/results", scope="sustained", direction="forward")
    chapter.table(rows[["impl"]], measured=rows, published="table 5, NVIDIA B200")
    origin = shown[1].data
    assert re.findall(r'data-kind="(\w+)"', origin) == ["measured", "published"]
    assert re.search(r", timed back to back \(matmul \d+ TFLOP/s\)\.", origin)
    assert origin.count("(CSV)") == 1


def test_an_exhibit_is_back_to_back_if_the_record_has_all_of_it(chapter):
    five = {"workload": "block-fill70-2000", "impl": ["v1_one_tile", "fa2_varlen"]}
    assert chapter.scope("block/results", **five) == "sustained"
    assert chapter.scope("forward/v1_tiled", variant=None) == "kernel"


def test_host_time_is_no_burst(chapter):
    """A call that waits for the device is timed on the host, whatever the pause before it."""
    slow = {"workload": "gdpa-self-half-jagged-256", "impl": "cudnn_varlen"}
    of = "20261122T191500Z-forward-results-nvidia-h200-62ac9e84"
    (row,) = chapter.rows(of, direction="forward", **slow).itertuples()
    assert math.isnan(row.tflops) and row.failure.startswith("HostTooSlow")
    fast = chapter.rows(of, workload="gdpa-self-full-256", direction="forward")
    assert fast["tflops"].notna().sum() > 10


@pytest.mark.parametrize(
    "limits, verdict, said",
    (
        ({"most": 1.0}, "✗&nbsp;refuted</b>, 25 % outside", "at most 1.00"),
        ({"least": 1.0}, "✓&nbsp;confirmed</b>, 25 % inside", "at least 1.00"),
        ({"least": 1.0, "most": 1.1}, "✗&nbsp;refuted</b>, 14 % outside", "1.00 to 1.10"),
        ({"least": 0}, "✓&nbsp;confirmed</b> |", "at least 0.00"),
    ),
)
def test_a_prediction_stands_with_its_verdict_and_margin(chapter, shown, limits, verdict, said):
    chapter.predict("It is so.", 1.25, **limits)
    chapter.predictions()
    text = shown[1].data
    assert f"{said}<br>found **1.25**" in text and verdict in text
    assert "It is so.<br><small>Expected</small>" in text
    word = verdict[len("✗&nbsp;") :].partition("<")[0]
    assert f'aria-label="Interval {said}; found 1.25, {word}"' in text


def test_of_a_series_the_value_farthest_out_decides(chapter, shown):
    found = pd.Series({"a": 1.2, "b": 0.8, "c": 1.0})
    chapter.predict("It is so.", found, least=0.9, most=1.15)
    chapter.predictions()
    assert "found **0.80** (b, of 3)" in shown[1].data


def test_what_is_predicted_is_kept_unseen_and_three_are_shown(chapter, monkeypatch):
    outputs = []
    monkeypatch.setattr(chapters, "display", lambda *data, **rest: outputs.append((data, rest)))
    with pytest.raises(ValueError, match="forward/v5_pingpong must show one to 3 .* got 0"):
        chapter.predictions()
    for number in range(4):
        chapter.predict("It is so.", number, most=1.0, shown=number > 0)
    (data,), rest = outputs[0]
    assert data == {"text/markdown": ""} and rest["raw"]
    assert rest["metadata"]["prediction"] == {
        "id": "forward/v5_pingpong#1", "text": "It is so.", "limits": "at most 1.00",
        "found": "0.00", "word": "confirmed", "margin": 1.0, "value": 0.0, "least": None,
        "most": 1.0,
    }  # fmt: skip
    chapter.predictions()
    (table,) = outputs[-1][0]
    assert table.data.startswith("::::{table} **Confirmed: 1 of 3 predictions.**")
    assert "Others: 1 of 1 confirmed" in table.data
    chapter.predict("It is so.", 1, most=1.0)
    with pytest.raises(ValueError, match="got 4$"):
        chapter.predictions()


def test_an_id_may_be_that_of_another_chapter_and_is_given_once(chapter, shown, monkeypatch):
    lines = registered.load().loc[["forward/v0_eager#1"]]
    line = {"limits": "at most 1.00", "lesson": "A step was not counted.", "known": "a paper"}
    monkeypatch.setattr(registered, "load", lambda: lines.assign(**line))
    chapter.predict("It is so.", 2, most=1.0, registered="forward/v0_eager#1")
    chapter.predict("This too.", 2, most=1.0)
    assert [one.id for one in chapter._predictions] == ["forward/v0_eager#1", f"{chapter.slug}#1"]
    chapter.predictions()
    told = "Known before (a paper)</small><br><small>**What the model left out:** A step"
    assert told in shown[-1].data and "This too.<br><small>Expected</small> |" in shown[-1].data
    with pytest.raises(ValueError, match="must have its own id, got forward/v5_pingpong#1 twice"):
        chapter.predict("Again.", 2, most=1.0, registered=f"{chapter.slug}#1")


@pytest.mark.parametrize(
    "found, missing",
    (
        (float("nan"), "nan"),
        (pd.Series({"a": 1.0, "gdpa-b": float("nan")}), "gdpa-b"),
        (pd.Series(dtype=float), "anything"),
    ),
)
def test_a_prediction_of_a_missing_value_is_refused_by_name(chapter, shown, found, missing):
    said = rf"forward/v5_pingpong, prediction 1 \(It is so.\): .* got no value for {missing}"
    with pytest.raises(ValueError, match=said):
        chapter.predict("It is so.", found, most=1.0)
    with pytest.raises(ValueError, match="least or most must be given"):
        chapter.predict("It cannot fail.", 1.0)
    assert shown == []


def test_what_is_compared_is_of_the_newest_run_that_times_it_all(chapter):
    """Of each workload: no old record where a newer one holds the rungs, too."""
    rungs = ["v5_pingpong", "v6b_stream"]
    rows = chapter.together("forward/results", rungs, direction="forward")
    everything = results.table("data", gpu=chapter.gpu, latest=False)
    parts = ["workload", "direction", "scope"]
    everything = everything[everything["record"].str.contains("forward-results|10-figures")]
    timed = everything[everything["impl"].isin(rungs) & everything["time_us_p50"].notna()]
    timed = timed[(timed["variant"] == "") & (timed["scope"] == "kernel")]
    both = timed.groupby([*parts, "record"])["impl"].nunique() == len(rungs)
    newest = both[both].reset_index().groupby(parts)["record"].max()
    assert rows.groupby(parts)["record"].agg(set).eq(newest.map(lambda name: {name})).all()
    assert len(newest) == 16 and newest.nunique() > 1
    us = chapter.times("forward/results", together=rungs, direction="forward")
    assert us[rungs].notna().all(axis=None)
    with pytest.raises(LookupError, match="must time nothing together, got none"):
        chapter.together("forward/results", ["nothing"])


def test_code_is_shown_between_two_lines(chapter, shown):
    chapter.code(v5_pingpong.math, "for block in", "store_rows")
    lines = shown[0].data.splitlines()
    assert lines[0] == "```python" and lines[1].startswith("for block in")
    assert "store_rows" not in shown[0].data
    with pytest.raises(ValueError, match="must have a line with 'no such line'"):
        chapter.code(v5_pingpong.math, "no such line")


@pytest.mark.parametrize(
    "operator, impl",
    [(o, r.impl) for o in ladder.LADDERS for r in ladder.LADDERS[o] if r.predecessor],
)
def test_changes_are_of_the_kernel_and_short(chapter, shown, tmp_path, operator, impl):
    chapter.changes(impl, operator)
    code = [output.data for output in shown if output.data.startswith("```diff")]
    assert sum(len(text.splitlines()) - 2 for text in code) <= chapters.MOST_CHANGED
    assert "def forward(" not in "".join(code)
    link = shown[-1].data
    (file,) = (tmp_path / "changes").iterdir()
    assert file.name in link and file.read_text().startswith("--- ")


def test_glue_gives_numbers_and_words(chapter, monkeypatch):
    given = {}
    monkeypatch.setattr(page, "_display", lambda _, key, value: given.update({key: value}))
    chapter.glue(number=2, word="kept")
    assert given == {"number": "2.0", "word": "'kept'"}
    rows = chapter.rows("forward/results", workload="gdpa-self-full-256")
    monkeypatch.setattr(page, "glue_html", given.__setitem__)
    chapter.glue_origin("front", rows)
    assert f'href="data/records/{rows["record"].iloc[0]}.json"' in given["front"]
    assert "../" not in given["front"] and 'data-kind="measured"' in given["front"]
    with pytest.raises(ValueError, match="value of 'bad' must be a finite number"):
        chapter.glue(bad=float("nan"))


def test_a_bar_in_a_prediction_does_not_end_its_cell(chapter, shown):
    chapter.predict("The error per |x| is small.", 0.5, most=1.0)
    chapter.predictions()
    row = shown[1].data.splitlines()[-2]
    assert r"per \|x\| is" in row and len(re.findall(r"(?<!\\)\|", row)) == 4
