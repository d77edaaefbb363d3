"""The ledger as a reader sees it: nothing is left out, and what is said has a place."""

import re
from pathlib import Path

import pandas as pd
import pytest
import yaml

from gdpa_lab.measuring.workloads import FIGURES
from gdpa_lab.report import claims
from notebooks.tools import _answers

ROOT = Path(__file__).resolve().parents[2]
CLAIMS = claims.load()
BY_ID = {claim.id: claim for claim in CLAIMS}
ROWS = pd.DataFrame(columns=list(claims._RESULT_COLUMNS))
LEDGER = claims.judged(ROWS, claims=CLAIMS)
ANSWERED = {claim.id: claim for claim in CLAIMS if claim.answer}
NAMES = set(re.findall(r"\{(\w+)\}", " ".join(claim.answer for claim in CLAIMS)))


@pytest.fixture
def found():
    return dict.fromkeys(NAMES, "1.00 to 2.00")


def test_every_claim_is_shown_once(found):
    listed = set(_answers.answered(LEDGER, found)["id"])
    in_tables = {claim.id for claim in CLAIMS if _answers.in_tables(claim.id)}
    assert listed | in_tables == set(BY_ID) and not listed & in_tables
    charts = {
        f"{figure}-{end}" for figure in FIGURES for end in (*_answers.SERIES.values(), "rate")
    }
    assert len(charts) == 24 and charts < in_tables and len(in_tables) == 24 + 9
    assert _answers.plotted(LEDGER).shape == (6, 4) and _answers.tabulated(LEDGER).shape == (3, 3)


@pytest.mark.parametrize("claim", ANSWERED.values(), ids=ANSWERED)
def test_an_answer_is_a_sentence_of_a_chapter(claim):
    assert claim.answer.endswith(".") and len(ANSWERED) > 30
    place = claim.answered_in
    assert not place or (ROOT / "notebooks" / f"{place}.py").exists()


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"answer": {"in": "a/b"}}, r"answer must contain \['text'\]"),
        ({"answer": {"text": "", "in": "a/b"}}, "answer.text must match .* got ''"),
        ({"answer": {"text": "True."}}, "status must be .*: refuted_by_arithmetic, got"),
        ({"status": "refuted_by_arithmetic"}, "status must be .*: open, got 'refuted"),
    ],
    ids=str,
)
def test_an_answer_that_cannot_be_is_refused(changes, said):
    entries = yaml.safe_load((ROOT / "data" / "claims.yml").read_text())["claims"]
    entry = next(entry for entry in entries if entry["id"] == "gdpa-one-operator")
    claims._parse_claim(entry)
    with pytest.raises(claims.ClaimError, match=said):
        claims._parse_claim({**entry, **changes})


def test_every_refuted_claim_has_a_reason():
    refuted = {claim.id for claim in CLAIMS if claim.status == "refuted_by_arithmetic"}
    assert refuted <= set(ANSWERED)


def test_what_is_open_says_what_is_missing(found):
    """Whatever a command could decide is measured or answered."""
    shown = _answers.answered(LEDGER, found)
    selected = {claim.id for claim in CLAIMS if claim.ours is not None}
    waiting = shown[(shown["status"] == "open") & ~shown["id"].isin(selected)]
    assert len(waiting) and waiting["where"].str.startswith("missing: ").all()
    assert shown["where"].ne("").all()
    letters = shown["claim"].str.extract(r"<sup>(\w)</sup>$")[0]
    assert set(letters) <= set(_answers.sources(LEDGER).values())


def test_a_measured_claim_names_what_was_compared(found):
    row = LEDGER[LEDGER["id"] == "gdpa-forward-over-triton"].assign(
        status="measured", ours=1.5, ours_impl="v9", ours_baseline="v1", ours_workload="w",
        ours_scope="sustained",
    )  # fmt: skip
    (shown,) = _answers.answered(row, found).itertuples()
    assert (shown.status, shown.ours) == ("measured", "1.50×: v9 over v1, w, back to back")
    assert shown.where == "{doc}`forward/results <../forward/results>`"


@pytest.mark.parametrize(
    ("changes", "shown"),
    [
        ({"status": "measured", "ours": 1.5, "stale": False}, "2.08× → 1.50×"),
        ({"status": "measured", "ours": 12.0, "stale": True}, "2.08× → 12.0× (stale)"),
        ({"status": "open"}, "2.08× → open"),
        ({"status": "refuted_by_arithmetic"}, "2.08× → refuted"),
        ({"status": "not_comparable"}, "2.08× → not comparable"),
        ({"status": "not_comparable", "ours": 1.5, "stale": False}, "2.08×; 1.50× here"),
    ],
    ids=str,
)
def test_cells_of_the_charts(changes, shown):
    row = LEDGER.set_index("id").loc["gdpa-self-fwd-full-over-triton"]
    assert _answers.both(pd.Series({**row, **changes})) == shown


def test_a_rate_of_another_machine_says_so(found):
    row = LEDGER[LEDGER["id"] == "gdpa-forward-peak"].assign(
        status="not_comparable", ours=600.0, ours_impl="v9", ours_workload="w",
        ours_scope="sustained", ours_gpu="NVIDIA H200",
    )  # fmt: skip
    (shown,) = _answers.answered(row, found).itertuples()
    assert shown.status == "not comparable"
    assert shown.ours == "600 TFLOP/s: v9, w, back to back, NVIDIA H200"


@pytest.mark.sweep
def test_numbers_come_from_the_records():
    from gdpa_lab.report.chapter import Chapter

    quoted = _answers.numbers(Chapter("tools/claims", data_dir=ROOT / "data"))
    assert set(quoted) == NAMES
    least, most, count = re.fullmatch(r"(.+) to (.+) \(n = (\d+)\)", quoted["stay"]).groups()
    assert 1 < float(least) <= float(most) and int(count) == 5


def test_the_download_has_every_claim_and_the_statuses_of_the_page(found):
    shown = _answers.answered(LEDGER, found)
    told = _answers.told(LEDGER, shown).set_index("id")["status"]
    assert set(told.index) == set(BY_ID)
    assert (told[shown["id"]] == shown.set_index("id")["status"]).all()
    assert (told == "answered").sum() == sum(bool(claim.answered_in) for claim in CLAIMS)
