"""Rates of measured rows with their spread and ceiling, and the ladder chart of them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import pandas as pd

from gdpa_lab.measuring.require import require
from gdpa_lab.report import results, style
from gdpa_lab.report.charts import list_rows
from gdpa_lab.report.roles import role_colour
from gdpa_lab.report.style import DASHED, GREY, INK, Figure, canvas, is_rung, note

HEADROOM = 1.08


@style.drawn
def ladder(
    table: pd.DataFrame,
    workload: str,
    rungs: Sequence[str],
    highlight: str,
    direction: str = "forward",
) -> Figure:
    """Draw the ladder so far on one workload, sustained: a bar for each rung, then each baseline.

    `table`: rows of `results.table` of one system. `rungs`: in the order to show; `highlight`: the
    one in colour. Every baseline of the table with a time is shown, slowest first.
    Labels: TFLOP/s and % of roofline; error bars: p20-p80. ValueError if a rung has no row.
    """
    require(highlight in rungs, "highlight", f"one of {', '.join(rungs)}", highlight)
    rows = timed_rows(table[table["workload"] == workload], direction, "sustained")
    rows = rows.drop_duplicates(["impl", "system"], keep="last")
    require_impls(rows, rungs, f"{workload}, {direction}", "sustained")
    others = rows.dropna(subset=["tflops"]).sort_values("tflops")["impl"]
    order = [*rungs, *(impl for impl in others if not is_rung(impl) and impl not in rungs)]
    with canvas(width=7.0, height=1.1 + 0.34 * len(order)) as (chart, axis):
        ceiling = ceiling_of(rows)
        axis.axvline(ceiling, **DASHED)
        note(axis, f"roofline {ceiling:.0f}", (ceiling, 1.0), (-4, 3), ha="right", va="bottom",
             xycoords=("data", "axes fraction"))  # fmt: skip
        for position, impl in enumerate(order):
            row = rows[rows["impl"] == impl].iloc[0]
            rate, strong = float(row["tflops"]), impl == highlight
            if math.isnan(rate):
                note(axis, f"failed: {row['failure']}", (0, position), (4, 0), va="center")
                continue
            shown, (below, above) = role_colour(impl) if strong else GREY, spread_of(row)
            axis.barh(
                position, rate, 0.62, color=shown if is_rung(impl) else "none", edgecolor=shown,
                xerr=[[below], [above]], error_kw={"ecolor": INK, "elinewidth": 1.2, "capsize": 2},
            )  # fmt: skip
            label = f"{rate:.0f}  {row['percent_of_roofline']:.0f} %"
            note(axis, label, (rate + above, position), (5, 0), va="center", color=shown,
                 fontweight="bold" if strong else "normal")  # fmt: skip
        list_rows(axis, [label_of(rows, impl) for impl in order])
        axis.get_yticklabels()[order.index(highlight)].set_color(role_colour(highlight))
        axis.set_xlim(0, ceiling * HEADROOM)
        axis.set_xlabel(f"TFLOP/s {results.TIMED['sustained']}, {workload}, {machine(rows)}")
        return chart


def timed_rows(table: pd.DataFrame, direction: str, scope: str) -> pd.DataFrame:
    keep = (table["scope"] == scope) & (table["variant"] == "")
    return table[keep & (table["direction"] == direction)]


def require_impls(rows: pd.DataFrame, impls: Sequence[str], where: str, scope: str) -> None:
    missing = [impl for impl in impls if impl not in set(rows["impl"])]
    if missing or rows.empty:
        expected = ", ".join(missing) or "at least one impl"
        raise ValueError(f"table must hold {scope} rows of {expected} for {where}, got none")
    only(rows, "system")


def only(rows: pd.DataFrame, column: str) -> str:
    values = sorted(set(rows[column]))
    if len(values) != 1:
        there = ", ".join(map(str, values)) or "none"
        raise ValueError(f"table must hold one {column}, got {there}")
    return str(values[0])


def machine(rows: pd.DataFrame) -> str:
    dates = sorted(set(rows["date"]))
    first, last = dates[0], dates[-1]
    of_a_month = last[:8] == first[:8]  # the title of a chart has no room for two whole dates
    period = first if first == last else f"{first} to {last[8:] if of_a_month else last}"
    return f"{only(rows, 'gpu') or only(rows, 'system')}, {period}"


def ceiling_of(rows: pd.DataFrame) -> float:
    """Return the roofline of one workload (TFLOP/s), from the newest row that has a rate."""
    timed = rows.dropna(subset=["tflops", "percent_of_roofline"]).sort_values(["date", "record"])
    if timed.empty:
        raise ValueError(f"table must hold a correct time for {only(rows, 'workload')}, got none")
    last = timed.iloc[-1]
    return 100 * float(last["tflops"]) / float(last["percent_of_roofline"])


def spread_of(rows: pd.DataFrame | pd.Series) -> Any:
    """Return the distance of the p80 and p20 times from the p50 rate, TFLOP/s: below, above."""
    rate = rows["tflops"]
    below = rate - rate * rows["time_us_p50"] / rows["time_us_p80"]
    return below, rate * rows["time_us_p50"] / rows["time_us_p20"] - rate


def label_of(rows: pd.DataFrame, impl: str) -> str:
    math_of = rows[rows["impl"] == impl]["math"].iloc[0]
    return impl if is_rung(impl) else f"{impl} ({math_of})"
