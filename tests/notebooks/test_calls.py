"""A table names the records that its numbers are of, also where a part of a run was made anew."""

from __future__ import annotations

import pandas as pd
import pytest

from _lib import calls
from gdpa_lab.report.chapter import Chapter

pytestmark = pytest.mark.sweep


def test_costs_name_the_records_of_their_rows():
    chapter = Chapter("training/host_time")
    _, ids = calls.costs(chapter, pd.Series([1.0, 2.0]))
    own = {"direction": "forward", "impl": calls.IMPL, "scope": "op"}
    for of in ("forward/results", "measuring/production_gap"):
        assert {*chapter.rows(of, **own)["record"]} <= {*ids}
