"""The kernels of the chapter on what the emulator found: each mistake shows, and its mend holds."""

import json
import re
from pathlib import Path

import pytest

from notebooks.tools.kernels import compare, published, seeded
from tritonemu import EmulatorError, enabled
from tritonemu.search import Search

MISTAKES = {
    "slot": "Race", "add": "AssertionError", "last": "Race", "threads": "BarrierMisuse",
    "walk": "AssertionError", "early": "Race", "ahead": "EarlyExit",
}  # fmt: skip


def shown(call, search, **options):
    """The kind of what a search finds first, and the schedule; None for nothing."""
    for order in search:
        try:
            with enabled("sm_100", schedule=order, max_steps=20_000, **options):
                call()
        except (EmulatorError, AssertionError) as error:
            return type(error).__name__, str(order)
    return None


@pytest.mark.parametrize("name", MISTAKES)
def test_published_mistakes(name):
    call = getattr(published, name)
    found, _ = shown(call, Search("exhaustive", 50))
    assert found == MISTAKES[name]
    assert shown(lambda: call(mended=True), Search("exhaustive", 50)) is None
    assert shown(lambda: call(mended=True), Search("random", 5)) is None


@pytest.mark.parametrize("fault", seeded.FAULTS)
def test_seeded_mistakes(fault):
    found = shown(lambda: seeded.main(fault), Search("random", 8), resident=6)
    assert (found is None) == (fault in seeded.CORRECT)


def test_races_and_lost_waits_need_no_luck():
    modelled = {
        fault: shown(lambda f=fault: seeded.main(f), Search("random", 0), resident=6)
        for fault in (*seeded.PIPELINE, *seeded.SUM)
    }
    assert all(modelled.values())
    assert [f for f, (kind, _) in modelled.items() if kind == "AssertionError"] == [
        "addition in two atomics"
    ]


@pytest.mark.parametrize(
    "name, status, text, verdict",
    (
        ("tritonemu", 1, "Race", "found"),
        ("tritonemu", 3, "AssertionError: the sum is wrong", "found"),
        ("tritonemu", 3, "Unsupported", "cannot run"),
        ("tritonemu", 0, "", "missed"),
        ("TRITON_INTERPRET", -11, "", "crashes"),
        ("TRITON_INTERPRET", 1, "ValueError", "cannot run"),
        ("result on the GPU", 1, "AssertionError: the doubles are wrong", "found"),
        ("result on the GPU", None, "", "hangs"),
        ("racecheck", 1, "AssertionError\nRACECHECK SUMMARY: 0 hazards", "missed"),
        ("racecheck", 0, "RACECHECK SUMMARY: 2 hazards", "found"),
        ("memcheck", 0, "ERROR SUMMARY: 3 errors", "found"),
        ("memcheck", 1, "no such device", "cannot run"),
        ("TileLens", 0, "ERROR SUMMARY: 1 errors", "found"),
        ("TileLens", 0, "ERROR SUMMARY: 0 errors", "missed"),
        ("TileLens", 1, "AttributeError", "cannot run"),
        ("ConSan", 1, "CUDA error: device-side assert triggered", "found"),
        ("ConSan", 1, "RuntimeError: PassManager::run failed", "cannot run"),
        ("ConSan", 1, "AssertionError: the sum is wrong", "missed"),
    ),
)
def test_verdicts(name, status, text, verdict):
    assert compare.judge(name, status, text) == verdict


def test_answers_are_of_these_mistakes():
    kept = json.loads(compare.FILE.read_text(encoding="utf-8"))
    assert kept.keys() <= compare.TOOLS.keys()
    for answers in kept.values():
        assert answers["found"].keys() == seeded.FAULTS.keys()


def test_lines_of_the_chapter_name_one_commit():
    chapter = Path(published.__file__).parents[1] / "found_bugs.py"
    commits = re.findall(r"/(?:blob|tree)/(\w+)", chapter.read_text(encoding="utf-8"))
    assert len(commits) > 5 and len(set(commits)) == 1 and len(commits[0]) == 40
