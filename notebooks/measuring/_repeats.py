"""The same kernel measured again: by other protocols, and in other records of one machine."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from itertools import combinations
from statistics import NormalDist

import numpy as np
import pandas as pd

from gdpa_kernels.calling import ladder
from gdpa_lab.measuring.record import Record
from gdpa_lab.measuring.roofline import Ceilings

KEY = ["workload", "impl", "config", "source"]
"""Columns in which two forward rows of different records agree if they are of the same kernel."""

DRAWS = 1_000
"""Random draws of the samples by which one of several equal configurations is chosen."""

REPLICATES = "notebooks/measuring/protocol.py"
"""Its variants are replicates of one kernel; those of other chapters are other kernels."""


def apparent(table: pd.DataFrame) -> pd.DataFrame:
    """Times that protocols would have printed, by protocol and workload, from a table of samples.

    Columns: time_us (median), tflops, and relative, low and high: the rate at p50, p80 and p20 over
    that of "ours" at the same batch, where a protocol's name ends in ", batch 32" or does not.
    """
    samples = table.groupby(["protocol", "workload", "flops"], sort=False)["time_us"]
    times = samples.quantile([0.2, 0.5, 0.8]).unstack().reset_index("flops")
    rates = pd.DataFrame({"time_us": times[0.5], "tflops": times["flops"] / times[0.5] / 1e6})
    ours = [
        rates["tflops"]["ours, batch 32" if name.endswith(", batch 32") else "ours", workload]
        for name, workload in rates.index
    ]
    rates["relative"] = rates["tflops"] / ours
    rates["low"] = rates["relative"] * times[0.5] / times[0.8]
    rates["high"] = rates["relative"] * times[0.5] / times[0.2]
    return rates


def repeated(runs: Sequence[Record]) -> pd.DataFrame:
    """Rungs that ran in more than one of `runs` with the same source, configuration and workload.

    A row for each kernel and record: KEY, record, notebook, time_us_p50 (of replicates the median)
    and slower: the time over that in the fastest record, in per cent.
    """
    rungs = {rung.impl for rung in ladder.RUNGS}
    seen = [
        {
            "workload": row.workload,
            "impl": row.impl,
            "config": json.dumps(row.config, sort_keys=True),
            "source": run.package.source("gdpa", row.impl),
            "record": run.id,
            "notebook": run.chapter.removeprefix("notebooks/").removesuffix(".py"),
            "time_us_p50": float(np.median(row.samples_us)),
        }
        for run in runs
        for row in run.rows
        if row.impl in rungs and row.scope == "kernel" and row.samples_us
        if not row.variant or run.chapter == REPLICATES
    ]
    columns = [*KEY, "record", "notebook", "time_us_p50"]
    table = pd.DataFrame(seen, columns=columns)
    table = table.groupby(columns[:-1], as_index=False).median()
    table = table[table.groupby(KEY)["record"].transform("nunique") > 1]
    fastest = table.groupby(KEY)["time_us_p50"].transform("min")
    return table.assign(slower=100 * (table["time_us_p50"] / fastest - 1))


def ceilings(runs: Sequence[Record]) -> pd.DataFrame:
    """Ceilings that the newest of `runs` of each chapter measured, by chapter: matmul in bursts and
    back to back (TFLOP/s), the SM clock then (MHz), and the copy with one byte read for each
    written (GB/s). NaN where a record has none."""
    newest = {run.chapter.removeprefix("notebooks/").removesuffix(".py"): run for run in runs}
    rows = {}
    for chapter, run in newest.items():
        bursts, loops = (Ceilings.measured(run.ceilings, x) for x in ("kernel", "sustained"))
        if bursts is None:
            continue
        loads = [c.load for c in run.ceilings if c.scope == "sustained" and c.kind == "matmul"]
        rows[chapter] = {
            "matmul, burst": bursts.tflops,
            "matmul, back to back": loops.tflops if loops else np.nan,
            "clock (MHz)": loads[0].sm_clock_mhz if loads else np.nan,
            "copy 1:1, burst (GB/s)": bursts.copies[0][1],
            "record": run.id,
        }
    return pd.DataFrame(rows).T.infer_objects().rename_axis("chapter")


def ratios(table: pd.DataFrame) -> pd.DataFrame:
    """For each pair of rungs that met on a workload in two or more records of `repeated`: in how
    many, by how many per cent the time of either, and their ratio, differ between records, and the
    standard deviation of the ratio over records in per cent."""
    rows = []
    for workload, kernels in table.groupby("workload"):
        wide = kernels.pivot_table(index="record", columns=KEY[1:], values="time_us_p50")
        for first, second in combinations(wide.columns, 2):
            met = wide[[first, second]].dropna()
            if first[0] != second[0] and len(met) > 1:
                ratio = met[first] / met[second]
                times = (met.max() / met.min()).max()
                moved = (100 * (x - 1) for x in (times, ratio.max() / ratio.min()))
                deviation = 100 * float(np.log(ratio).std())
                pair = workload, f"{first[0]} / {second[0]}", len(met)
                rows.append((*pair, *moved, deviation))
    columns = ["workload", "ratio of", "records", "times differ by (%)", "ratios differ by (%)"]
    return pd.DataFrame(rows, columns=[*columns, "deviation (%)"])


def students_t(runs: int) -> float:
    """Number of standard errors either side of a mean of `runs` values that hold the true mean with
    a confidence of 95 %. ValueError for fewer than two runs."""
    if runs < 2:
        raise ValueError(f"runs must be at least 2, got {runs}")
    freedom, x = runs - 1, np.linspace(0, 700, 700_001)
    scale = math.gamma((freedom + 1) / 2) / math.sqrt(freedom * math.pi) / math.gamma(freedom / 2)
    density = scale * (1 + x**2 / freedom) ** (-(freedom + 1) / 2)
    inside = (2 * np.cumsum(density) - density[0]) * (x[1] - x[0])
    return float(x[np.searchsorted(inside, 0.95)])


def luck(configurations: int) -> float:
    """Expected distance of the smallest of so many independent normal numbers from their mean, in
    standard deviations."""
    x = (np.arange(-800, 800) + 0.5) / 100
    below = np.array([NormalDist().cdf(each) for each in x])
    return float(((x > 0) - below**configurations).sum() / 100)


def chosen(times: np.ndarray, size: int) -> dict[str, float]:
    """Choosing the fastest of equal configurations, `[configurations, samples]`, by the median of
    `size` samples of each: standard deviation of these medians, how far the chosen one is ahead of
    the mean of all, as expected and found, and in the median of its other samples, in per cent;
    means of `DRAWS` random draws."""
    draw, rows = np.random.default_rng(0), []
    for _ in range(DRAWS):
        mixed = draw.permuted(times, axis=1)
        first, others = (np.median(x, axis=1) for x in (mixed[:, :size], mixed[:, size:]))
        best = first.argmin()
        leads = (1 - x[best] / x.mean() for x in (first, others))
        rows.append((first.std(ddof=1) / first.mean(), *leads))
    sigma, ahead, again = 100 * np.mean(rows, axis=0)
    expected = luck(len(times)) * sigma
    return {"σ, %": sigma, "expected, %": expected, "ahead, %": ahead, "again, %": again}
