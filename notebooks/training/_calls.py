"""Costs of a call beside its kernel, from the records of three chapters."""

from __future__ import annotations

import pandas as pd

from gdpa_lab.report.chapter import Chapter

EVENTS = "gdpa-self-ml25m-events-1024"
IMPL = "v8_own_waits"


def costs(chapter: Chapter, host_us: pd.Series) -> tuple[pd.DataFrame, list[str]]:
    """A row for each cost of a forward call with new offsets: what it includes and what was found;
    and the records it was found in.

    `host_us`: host time of calls in a row, by workload. The others are times to the result on an
    idle device (scope "op"), less or over those of the kernel.
    """
    calls, ids = _beside(chapter, "forward/results", "kernel")
    events, more_ids = _beside(chapter, "measuring/production_gap", "sustained")
    events = events.loc[EVENTS]
    rows = [
        (
            "host, until the call returns, in a row",
            "checks, output, descriptors, list, launches",
            f"{host_us.min():.0f} to {host_us.max():.0f} µs",
        ),
        (
            "op - kernel, idle device, median ({doc}`results <../forward/results>`)",
            "the same on a cold host, waiting for offsets, the device's start and end",
            f"{calls['more'].median():.0f} µs",
        ),
        (
            f"op / kernel, {EVENTS} ({{doc}}`gap <../measuring/production_gap>`)",
            "the same beside a short kernel",
            f"{events['times']:.2f} ({events['more']:.0f} µs)",
        ),
    ]
    table = pd.DataFrame(rows, columns=["cost", "includes", "found"]).set_index("cost")
    return table, [*chapter.holders("host"), *ids, *more_ids]


def _beside(chapter: Chapter, of: str, scope: str) -> tuple[pd.DataFrame, list[str]]:
    """Time of a call less that of the kernel, and over it, by workload; and their records."""
    rows = chapter.rows(of, direction="forward", impl=IMPL, scope=["op", scope])
    us = rows.pivot(index="workload", columns="scope", values="time_us_p50").dropna()
    records = rows[rows["workload"].isin(us.index)]["record"].unique()
    columns = {"more": us["op"] - us[scope], "times": us["op"] / us[scope]}
    return pd.DataFrame(columns), [*records]
