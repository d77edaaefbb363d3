"""Modules with a `main` in the emulator: what is found in copies, and the page that steps."""

from pathlib import Path

import pytest

from _lib import studies
from gdpa_lab.report import page
from notebooks.tools.kernels import deadlock, fences, phase, pipeline, planted, race

RELEASE = "        tlx.barrier_arrive(k_empty[stage])\n"
WAIT = "        tlx.barrier_wait(k_full[stage], phase)\n"
EARLY = [(RELEASE, ""), (WAIT, WAIT + RELEASE)]


def test_an_early_release_is_found_under_every_schedule_and_seldom_in_the_result():
    early = studies.changed(pipeline, *EARLY)
    assert {text.split(":")[0] for text in studies.findings(early.main, studies.SCHEDULES)} == {
        "Race"
    }
    assert 0 < studies.wrong_results(early) < len(studies.SCHEDULES)
    assert studies.findings(pipeline.main, ["modelled", 0]) == ["", ""]
    assert studies.wrong_results(pipeline, [0]) == 0


def test_the_page_holds_every_copy_and_no_folder_of_this_machine(tmp_path, monkeypatch):
    monkeypatch.setattr(page, "CSV_DIR", tmp_path)
    found = studies.step_page(pipeline, {"right": [], "early": EARLY}, "steps.html", "Steps")
    assert found["right"] == "" and found["early"].startswith("Race: pipeline.py:")
    text = Path(tmp_path, "steps.html").read_text()
    assert "Nothing found, and the right result." in text
    assert studies.__file__.split("/gdpa_kernels")[0] not in text and str(tmp_path) not in text


def test_timelines_step_on_a_page_that_a_button_opens(tmp_path, monkeypatch):
    monkeypatch.setattr(page, "CSV_DIR", tmp_path)
    right, early = (
        studies.run_main(studies.changed(pipeline, *pieces), trace=True, races=False).timeline
        for pieces in ([], EARLY)
    )
    shown = studies.stepper({"v<1": right, "v2": early}, "a-b-steps", title="Two & one").data
    text = Path(tmp_path, "a-b-steps.html").read_text()
    assert f"CTA 0 has ended after {right.events[-1].end:,.0f} modelled cycles." in text
    assert "<title>Two &amp; one</title>" in text and RELEASE.strip() in text
    assert 'data-src="../../figures/a-b-steps.html"' in shown and 'title="Two &amp; one"' in shown
    assert '<details class="stepper">' in shown
    assert "open" in studies.framed("a.html", "A", opened=True).data.split(">")[0]


def found(call) -> str:
    (text,) = studies.findings(call, ["modelled"])
    return text.split(":")[0]


def test_the_exercises_have_the_answers_of_the_chapter():
    assert found(deadlock.main) == "Deadlock" and found(race.main) == "Race"
    assert found(lambda: deadlock.main(64)) == found(lambda: deadlock.main(128)) == ""
    ceil = ("tl.range(rows // BLOCK)", "tl.range(tl.cdiv(rows, BLOCK))")
    repaired = studies.changed(deadlock, ceil)
    assert [found(lambda rows=rows: repaired.main(rows)) for rows in (1, 31, 100)] == [""] * 3
    release = "        tlx.barrier_arrive(empty[stage])\n"
    previous = "        if i > 0:\n            tlx.barrier_arrive(empty[(i + 1) % 2])\n"
    assert found(studies.changed(race, (release, previous)).main) == ""
    assert [n for n in range(1, 13) if not found(lambda n=n: phase.main(n))] == [4, 8, 12]


def test_the_planted_mistake_shows_with_one_block_and_a_barrier_mends_it():
    assert [found(lambda n=n: planted.main(n)) for n in (1, 2, 4)] == ["BarrierMisuse", "", ""]
    barrier = "    q_full = tlx.alloc_barriers(2)\n"
    wait = "        tlx.barrier_expect_bytes(q_full[slot]"
    store = "        out_desc.store"
    started = [
        "math(out_desc, q, k, v, q_full, kv",
        "load(q_desc, k_desc, v_desc, q, k, v, q_full, kv",
    ]
    calls = [(f"    {x}", f"    {x.replace('q_full,', 'q_full, q_empty,')}") for x in started]
    defined = [(f"def {x}", f"def {x.replace('q_full,', 'q_full, q_empty,')}") for x in started]
    repaired = studies.changed(
        planted,
        *defined,
        *calls,
        (barrier, barrier + barrier.replace("full", "empty")),
        (wait, f"        tlx.barrier_wait(q_empty[slot], tile // 2 % 2 ^ 1)\n{wait}"),
        (store, f"        tlx.barrier_arrive(q_empty[slot])\n{store}"),
    )
    assert [found(lambda n=n: repaired.main(n)) for n in (1, 2, 4)] == [""] * 3


@pytest.mark.parametrize("reader", fences.READERS)
def test_a_fence_of_its_own_is_right_before_any_reader(reader):
    arch = f"sm_{fences.ARCHITECTURES.get(reader, 90)}"
    assert studies.findings(lambda: fences.main(reader, fence=True), arch=arch) == [""] * 4
