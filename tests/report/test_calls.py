"""The costs of a call: each with what it includes, from the records that a chapter names."""

import pandas as pd

from gdpa_lab.measuring import record
from gdpa_lab.report import calls
from gdpa_lab.report.chapter import Chapter


def test_three_costs_of_a_call_and_their_records():
    chapter = Chapter("training/host_time", data_dir=record.ROOT / "data")
    costs, ids = calls.costs(chapter, pd.Series([180.0, 279.0]))
    assert costs["found"].iloc[0] == "180 to 279 µs" and costs["includes"].ne("").all()
    op = chapter.times("forward/results", direction="forward", scope="op")[calls.IMPL]
    kernel = chapter.times("forward/results", direction="forward")[calls.IMPL]
    assert costs["found"].iloc[1] == f"{(op - kernel).median():.0f} µs"
    assert [name.split("Z-")[1].partition("-nvidia")[0] for name in ids] == [
        "training-host-time", "forward-results", "measuring-production-gap",
    ]  # fmt: skip
