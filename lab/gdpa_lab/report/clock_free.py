"""Second set of predictions for a B200: shares of the cost model at each row's own SM clock.

NVML reports the clock of a sustained row, so its time is a number of clocks and the power limit of
a B200 drops out. The share of the cost model that a kernel reaches, and its spread, come from all
warp-specialized kernels measured on an H200; program start-up is part of that share. The first set,
in `predictions`, is unchanged.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd

from gdpa_lab.measuring import cost_model, files
from gdpa_lab.measuring import record as records
from gdpa_lab.measuring.cost_model import H200, Design
from gdpa_lab.measuring.roofline import Ceilings
from gdpa_lab.measuring.workload import Workload
from gdpa_lab.measuring.workloads import BLOCK_TABLES, FIGURES, figure_direction, workload
from gdpa_lab.report import predictions, results

PATH = records.DATA_DIR / "predictions" / "b200_2.csv"
MODEL, DATE = "unit ledger 2", "2026-11-23"
UNTIL = "2026-11-23T01:00:00Z"
"""The spread is that of records made until then: later ones do not change what is registered."""
COVERAGE, SURPRISE = 0.90, 0.01

RUN_ON = {"forward": ("v4_warp_specialized", "v5_pingpong", "v6a_persistent", "v6b_stream",
                      "v6_short_kv", "v7_packed", "v8_own_waits"),
          "backward": ("v4_warp_specialized_backward", "v5_short_kv_backward")}  # fmt: skip
"""Kernels of GDPA with roles, in the order in which they were made."""
STAY = ("v6_short_kv", "v7_packed", "v8_own_waits")
BLOCK = ("v3_warp_specialized", "v4_rotary", "v4a_turning_role")
BACKWARD = {
    "v4_warp_specialized_backward": cost_model.backward("v4", H200, 0, 0, row_bytes=1280),
    "v5_short_kv_backward": cost_model.backward("v5", H200, 0, 0),
}
"""Bound by their MMAs: operands of 64 rows, of which three come from registers."""

PAIRS = {
    ("b5_cta_pair", "b4_mixed"): lambda work: work.max_seqlen_k <= 256,
    ("b6_pair_stream", "b4_mixed"): lambda work: work.max_seqlen_k == 2048,
    ("b4_mixed", "b3_stream"): lambda work: True,
    ("b7_split_stream", "b6_pair_stream"): lambda work: work.name == "gdpa-self-half-dense-512",
}
"""Rungs whose rates are compared, and on which workloads."""


def hopper(impl: str, work: Workload) -> Design:
    """Return the design of a rung of `RUN_ON` on a workload."""
    if impl in BACKWARD:
        return BACKWARD[impl]
    return (
        cost_model.V8_RESIDENT
        if impl in STAY and work.max_seqlen_k <= 256
        else cost_model.V8_STREAM
    )


def blackwell(direction: str) -> dict[str, predictions.Expected]:
    """Expected rungs of `predictions.EXPECTED` by name; their start-up is part of the share."""
    return {
        x.impl: x._replace(design=replace(x.design, start_us=0.0))
        for x in predictions.EXPECTED[direction]
    }


def floor_us(work: Workload, design: Design, ghz: float, copies: Ceilings) -> float:
    """Modelled microseconds at a clock; `copies` gives the memory rates."""
    chip = design.chip
    at_clock = replace(copies, tflops=chip.sms * chip.flops * ghz / 1e3)
    return cost_model.cost(work, design, at_clock).us


def _timed(
    data_dir: str | Path, capability: str, until: str = "9"
) -> Iterator[tuple[records.Record, pd.DataFrame]]:
    """Filter `predictions.timed`: records made until then, rows that know their clock."""
    for run, rows in predictions.timed(data_dir, capability):
        rows = rows.dropna(subset=["sm_clock_mhz"])
        if run.created <= until and len(rows):
            yield run, rows


def shares(data_dir: str | Path = records.DATA_DIR) -> pd.DataFrame:
    """Compute the shares that warp-specialized kernels reach on an H200: `share` of the cost model,
    or of the copy ceiling in block attention, and `clocks`, by record, operator, direction,
    workload and impl."""
    lines = []
    for run, rows in _timed(data_dir, "9.0", UNTIL):
        ceilings = results.ceilings(run, "sustained")
        for row in rows.itertuples():
            work, us = Workload.from_dict(run.workloads[row.workload]), row.time_us_p50
            plain = work.activation == "gelu_tanh" and not work.shared_q and work.head_dim == 128
            if work.operator == "block_attention" and row.impl in BLOCK:
                share = row.percent_of_roofline / 100
            elif row.impl in RUN_ON[row.direction] and plain and not work.masked:
                ghz = row.sm_clock_mhz / 1e3
                share = floor_us(work, hopper(row.impl, work), ghz, ceilings) / us
            else:
                continue
            key = run.id, work.operator, row.direction, work.name, row.impl
            lines.append((*key, share, us * row.sm_clock_mhz))
    columns = ["record", "operator", "direction", "workload", "impl", "share", "clocks"]
    return pd.DataFrame(lines, columns=columns)


def interval(values: pd.Series, by: pd.Series) -> tuple[float, float, float]:
    """Estimate (low, centre, high) for positive values in groups: a new group's value lies between
    with probability `COVERAGE`, if logarithms are normal between and within groups. Groups count
    the same."""
    logs = np.log(values.astype(float))
    means = logs.groupby(by).mean()
    within = (logs - by.map(means)).pow(2).groupby(by).mean().mean()
    spread = 1.645 * math.sqrt(means.var(ddof=1) * (1 + 1 / len(means)) + within)
    return tuple(math.exp(means.mean() + x * spread) for x in (-1, 0, 1))


def steps(table: pd.DataFrame) -> pd.DataFrame:
    """Compare forward kernels with their predecessors on one workload of one record: `ratio` of
    their rates over that of the cost model, by `pair`."""
    of = table[(table["operator"] == "gdpa") & (table["direction"] == "forward")]
    by = of.pivot_table(index=["record", "workload"], columns="impl", values="share")
    ratios, impls = [], RUN_ON["forward"]
    for previous, after in zip(impls, impls[1:], strict=False):
        ratio = (by[after] / by[previous]).dropna()
        ratios.append(pd.DataFrame({"pair": f"{after} / {previous}", "ratio": ratio}))
    return pd.concat(ratios, ignore_index=True)


def derive(data_dir: str | Path = records.DATA_DIR) -> pd.DataFrame:
    """Derive the registration: `expected`, `low` and `high` of the share of the cost model (of the
    copy ceiling in block attention), or, with `other`, of a rung's rate over another's at one
    clock."""
    measured, rows = shares(data_dir), []
    middle = {
        key: interval(of["share"], of["impl"])
        for key, of in measured.groupby(["operator", "direction"])
    }
    for figure, names in FIGURES.items():
        direction = figure_direction(figure)
        low, centre, high = middle["gdpa", direction]
        rows += [
            (work.name, direction, impl, "", centre, low, high)
            for work in map(workload, names)
            for impl, expected in blackwell(direction).items()
            if work.max_seqlen_k <= expected.most_keys
        ]
    for (table, direction), expected in predictions.BLOCK.items():
        low, centre, high = middle["block_attention", direction]
        rows.append((BLOCK_TABLES[table][0], direction, expected.impl, "", centre, low, high))
    moved = steps(measured)
    low, _, high = interval(moved["ratio"], moved["pair"])
    width = math.sqrt(high / low)
    for name in dict.fromkeys(n for f in FIGURES if "-fwd-" in f for n in FIGURES[f]):
        for (impl, other), applies in PAIRS.items():
            if applies(workload(name)):
                ratio = expected_ratio(workload(name), impl, other)
                rows.append((name, "forward", impl, other, ratio, ratio / width, ratio * width))
    columns = ["workload", "direction", "impl", "other", "expected", "low", "high"]
    frame = pd.DataFrame(rows, columns=columns).drop_duplicates(columns[:4], ignore_index=True)
    frame = frame[~frame["workload"].str.contains("jagged")]
    dates = {x.impl: x.date for rungs in predictions.EXPECTED.values() for x in rungs}
    date = [max(DATE, dates.get(impl, DATE)) for impl in frame["impl"]]
    return frame.round(3).assign(model=MODEL, date=date)


def expected_ratio(work: Workload, impl: str, other: str) -> float:
    """Ratio of the speed of `impl` to that of `other` by the cost model, without memory."""
    designs = blackwell("forward")
    free = Ceilings(1.0, ((1.0, 1e12), (3.0, 1e12)))
    one, two = (floor_us(work, designs[name].design, 1.0, free) for name in (impl, other))
    return two / one


def update(path: Path = PATH) -> bool:
    """Write what `derive` returns; return whether the file changed."""
    return files.rewrite(path, predictions.render(derive()))


def registered() -> pd.DataFrame:
    """Read the registration from the file."""
    return pd.read_csv(PATH, keep_default_na=False)


def judged(data_dir: str | Path = records.DATA_DIR) -> pd.DataFrame:
    """Judge the registration by records of a B200: `measured`, their median, NaN where there is
    none, and `verdict`, "confirmed" within the interval or "refuted"."""
    table = registered()
    keys = [*map(tuple, table[["workload", "direction", "impl", "other"]].values)]
    values: dict[tuple[str, ...], list[float]] = defaultdict(list)
    for run, rows in _timed(data_dir, predictions.CAPABILITY):
        ceilings = results.ceilings(run, "sustained")
        timed = rows.set_index(["workload", "direction", "impl"])
        clocks = timed["time_us_p50"] * timed["sm_clock_mhz"]
        known = {*timed.index} if ceilings is not None else set()
        for key in keys:
            name, direction, impl, other = key
            if not {(name, direction, impl), (name, direction, other or impl)} <= known:
                continue
            row, work = timed.loc[name, direction, impl], workload(name)
            if other:
                value = clocks[name, direction, other] / clocks[name, direction, impl]
            elif work.operator == "block_attention":
                value = row["percent_of_roofline"] / 100
            else:
                design, ghz = blackwell(direction)[impl].design, row["sm_clock_mhz"] / 1e3
                value = floor_us(work, design, ghz, ceilings) / row["time_us_p50"]
            values[key].append(value)
    measured = [np.median(values.get(key, [math.nan])) for key in keys]
    table = table.assign(measured=measured, verdict="")
    inside = table["measured"].between(table["low"], table["high"])
    table.loc[inside, "verdict"] = "confirmed"
    table.loc[~inside & table["measured"].notna(), "verdict"] = "refuted"
    return table


def is_dead(table: pd.DataFrame) -> tuple[bool, int, int]:
    """Return (whether the model is dead, groups inside, groups measured). A group is a rung in a
    direction, or a pair of rungs: its rows share one error, so its median counts once. Dead: with
    `COVERAGE` so few groups inside have a probability below `SURPRISE`."""
    timed = table.dropna(subset=["measured"])
    over = timed[["measured", "low", "high"]].div(timed["expected"], axis=0)
    groups = over.groupby([timed[name] for name in ("direction", "impl", "other")]).median()
    inside = int(groups["measured"].between(groups["low"], groups["high"]).sum())
    count = len(groups)
    chance = sum(
        math.comb(count, k) * COVERAGE**k * (1 - COVERAGE) ** (count - k) for k in range(inside + 1)
    )
    return count > 0 and chance < SURPRISE, inside, count


def report(data_dir: str | Path = records.DATA_DIR) -> tuple[str, pd.DataFrame]:
    """Return what `python -m gdpa_lab predictions` prints of the second registration."""
    table = judged(data_dir)
    dead, inside, count = is_dead(table)
    outcome = "No row is measured: all are predictions."
    if count:
        word = "dead" if dead else "not refuted"
        outcome = f"{inside} of {count} groups inside: the model is {word}."
    dates = ", ".join(sorted(set(table["date"])))
    head = (
        f"Registered {dates}; model: {MODEL}; shares of the cost model at NVML's clock. {outcome}"
    )
    columns = ["workload", "direction", "impl", "other", "expected", "low", "high"]
    columns += ["measured", "verdict"] if count else []
    return head, table[columns]
