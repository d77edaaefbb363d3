"""Rows behind the figures: each is the newest of its chapter that can stand beside the others."""

import pandas as pd
import pytest

from gdpa_lab.measuring import record
from gdpa_lab.report import page, results

PART = ["workload", "direction", "scope", "system"]
CALL = ["impl", "variant"]


def timed(rows: pd.DataFrame, chapters: dict[str, str]) -> pd.DataFrame:
    rows = rows[rows["time_us_p50"].notna()].assign(chapter=rows["record"].map(chapters))
    return rows.assign(variant=rows["variant"].astype(object).fillna(""))


def outdated(shown: pd.DataFrame, every: pd.DataFrame) -> list[tuple[str, str, str]]:
    """List (record, newer record, workload) where a newer record of the chapter times all that is
    shown of a workload, direction and scope from one record."""
    newer = []
    for (chapter, name, *part), group in shown.groupby(["chapter", "record", *PART]):
        calls = {*group[CALL].itertuples(index=False, name=None)}
        twins = every[(every["chapter"] == chapter) & (every[PART] == part).all(axis=1)]
        for other, rows in twins[twins["record"] > name].groupby("record"):
            if calls <= {*rows[CALL].itertuples(index=False, name=None)}:
                newer.append((name, other, part[0]))
    return newer


@pytest.fixture(scope="module")
def chapters() -> dict[str, str]:
    return {run.id: run.chapter for run in record.load_all()}


@pytest.fixture(scope="module")
def every(chapters) -> pd.DataFrame:
    return timed(results.table(latest=False), chapters)


def test_no_figure_shows_a_row_that_a_newer_record_of_its_chapter_replaces(site, chapters, every):
    newer = {}
    for path in sorted(page.CSV_DIR.glob("*.csv")):
        rows = pd.read_csv(path)
        if {"record", "time_us_p50", *PART, *CALL} <= {*rows}:
            newer[path.name] = outdated(timed(rows, chapters), every)
    assert len(newer) > 50, "the figures' data are where the site offers them"
    assert {name: pairs for name, pairs in newer.items() if pairs} == {}


def test_outdated_rows_are_found_and_those_that_were_compared_stay():
    first, second = "1-a", "2-a"
    every = pd.DataFrame(
        {
            "chapter": "a", "workload": "w", "direction": "forward", "scope": "sustained",
            "system": "s", "variant": "", "impl": ["x", "y", "x"],
            "record": [first, first, second],
        }
    )  # fmt: skip
    both, alone = every[:2], every[:1]
    assert outdated(alone, every) == [(first, second, "w")]
    assert outdated(both, every) == [], "the newer one does not time what x is compared with"
