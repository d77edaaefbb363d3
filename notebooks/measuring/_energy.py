"""Joules of kernels back to back, split over what is counted, and the clock that power allows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.ticker import FixedLocator, NullLocator

from gdpa_lab.measuring.cost_model import Chip
from gdpa_lab.measuring.record import Record
from gdpa_lab.report import style
from gdpa_lab.report.roles import palette
from gdpa_lab.report.style import DASHED, GREY, INK, Figure, canvas


@dataclass(frozen=True)
class Fit:
    """`value` and standard `error`, by term; relative residuals, by row; the condition number of
    the terms at length one: the larger, the less they can be told apart."""

    terms: pd.DataFrame
    residuals: pd.Series
    condition: float

    @property
    def rms_percent(self) -> float:
        """Root mean square of the residuals."""
        return 100 * float(np.sqrt((self.residuals**2).mean()))


def counted(rows: pd.DataFrame, record: Record) -> pd.DataFrame:
    """The timed rows of scope "sustained" with what one call counts: `seconds`, `flops`, `bytes`
    (fewest), `pairs` (visible scores, of all heads) and whether power `limited` the clock."""
    reasons = {
        (row.workload, row.direction, row.impl): row.load.throttle_reasons
        for row in record.rows
        if row.load is not None
    }
    rows = rows.dropna(subset=["time_us_p50"])
    us, dims = rows["time_us_p50"], [record.workload(name).head_dim for name in rows["workload"]]
    each = 4.0 * np.array(dims) * np.where(rows["direction"] == "backward", 2.5, 1)
    keys = zip(rows["workload"], rows["direction"], rows["impl"], strict=True)
    table = rows.assign(seconds=us / 1e6, flops=rows["tflops"] * us * 1e6)
    return table.assign(
        bytes=rows["gbytes_per_s"] * us * 1e3,
        pairs=table["flops"] / each,
        limited=["sw_power_cap" in (reasons[key] or ()) for key in keys],
    )


def fit(frame: pd.DataFrame, terms: Sequence[str]) -> Fit:
    """Joules as a sum of `terms`, each times a constant: least squares of the relative errors.

    ValueError unless there are more rows than terms and no term is a sum of others.
    """
    scaled = frame[list(terms)].div(frame["joules"], axis=0).to_numpy(float)
    lengths = np.linalg.norm(scaled, axis=0)
    unit = scaled / lengths
    rows, rank = len(frame), np.linalg.matrix_rank(unit)
    if not rank == len(terms) < rows:
        raise ValueError(f"{len(terms)} terms need that rank and more rows, got {rank}, {rows}")
    values = np.linalg.lstsq(unit, np.ones(len(frame)), rcond=None)[0]
    residuals = unit @ values - 1
    variance = (residuals**2).sum() / (len(frame) - len(terms))
    errors = np.sqrt(variance * np.diag(np.linalg.inv(unit.T @ unit)))
    constants = pd.DataFrame({"value": values, "error": errors}, list(terms)).div(lengths, axis=0)
    return Fit(constants, pd.Series(residuals, frame.index), float(np.linalg.cond(unit)))


def busy_share(rows: pd.DataFrame, chip: Chip) -> pd.Series:
    """Useful FLOPs over those of tensor cores that never pause at the clock that was read: the
    share of their cycles in use."""
    return rows["tflops"] * 1e6 / (chip.sms * chip.flops * rows["sm_clock_mhz"])


@dataclass(frozen=True)
class Law:
    """Rate ~ busy ** `exponent` in rows of one workload, so time ~ cycles ** `exponent`.

    `low`, `high`: 95 % of the exponents of workloads drawn again with replacement; `each`: the
    exponent of every workload with five rows. `points`: `busy` and `tflops` over their geometric
    means in the workload; `residuals`: relative, of all rows with another of their workload.
    """

    exponent: float
    low: float
    high: float
    each: pd.Series
    points: pd.DataFrame
    residuals: pd.Series

    @property
    def exponents(self) -> list[float]:
        """The lower end, the exponent, and the upper end."""
        return [self.low, self.exponent, self.high]


def law(rows: pd.DataFrame, by: Sequence[str], draws: int = 4000) -> Law:
    """Fit `Law` to rows with the columns `busy` and `tflops`; a workload: equal values in the
    columns `by`. Least squares of logarithms."""
    groups = [rows[column] for column in by]
    rows = rows[rows.groupby(groups)["busy"].transform("size") > 1]
    groups = [rows[column] for column in by]
    logs = np.log(rows[["busy", "tflops"]])
    logs -= logs.groupby(groups).transform("mean")
    sums = logs.assign(
        both=logs["busy"] * logs["tflops"], squared=logs["busy"] ** 2, rows=1
    ).groupby(groups)[["both", "squared", "rows"]].sum()  # fmt: skip
    exponent = sums["both"].sum() / sums["squared"].sum()
    picked = np.random.default_rng(0).integers(len(sums), size=(draws, len(sums)))
    both, squared = (sums[name].to_numpy()[picked].sum(axis=1) for name in ("both", "squared"))
    low, high = np.percentile(both / squared, [2.5, 97.5])
    whole = sums[sums["rows"] >= 5]
    residuals = np.exp(logs["tflops"] - exponent * logs["busy"]) - 1
    each = whole["both"] / whole["squared"]
    return Law(float(exponent), float(low), float(high), each, np.exp(logs), residuals)


@dataclass(frozen=True)
class Wall:
    """Power at the limit: (clock / 1,500 MHz) ** exponent (base + full * busy) + byte * GB/s, in W;
    `rms_percent`, `most_percent`: how far off the clocks are that it was fitted to."""

    limit: float
    exponent: float
    base: float
    full: float
    byte: float
    rms_percent: float = 0.0
    most_percent: float = 0.0

    def clock(self, busy: Any, gbytes_per_s: Any) -> Any:
        """The clock in MHz at which power meets the limit."""
        left = (self.limit - self.byte * gbytes_per_s) / (self.base + self.full * busy)
        return 1500 * left ** (1 / self.exponent)

    def power(self, busy: float, gbytes_per_s: float, mhz: float) -> float:
        """Watts at a clock that nothing limits."""
        switched = (self.base + self.full * busy) * (mhz / 1500) ** self.exponent
        return switched + self.byte * gbytes_per_s


def fit_wall(rows: pd.DataFrame, limit: float, exponent: float) -> Wall:
    """The three constants of `Wall` by least squares over rows at the limit, which have the columns
    busy, gbytes_per_s and sm_clock_mhz."""
    speed = (rows["sm_clock_mhz"] / 1500) ** exponent
    terms = np.stack([speed, speed * rows["busy"], rows["gbytes_per_s"]], axis=1) / limit
    coefficients = np.linalg.lstsq(terms, np.ones(len(rows)), rcond=None)[0]
    wall = Wall(limit, exponent, *map(float, coefficients))
    off = 100 * (wall.clock(rows["busy"], rows["gbytes_per_s"]) / rows["sm_clock_mhz"] - 1)
    rms, most = float(np.sqrt((off**2).mean())), float(off.abs().max())
    return replace(wall, rms_percent=rms, most_percent=most)


@style.drawn
def at_the_wall(groups: Mapping[str, pd.DataFrame], law: Law) -> Figure:
    """Draw the clock over the share of tensor-core cycles in use, a mark for each row of a group;
    and the rate over that share, both relative to the workload's mean, with `law` and its interval,
    and a dashed line for a clock that does not answer."""
    shades = palette(groups)
    with canvas(1, 2, width=7.4, height=3.7) as (chart, (clock, rate)):
        for (name, rows), mark in zip(groups.items(), "os^D", strict=False):
            marks = {"marker": mark, "color": shades[name], "markersize": 4, "linestyle": "none"}
            clock.plot(100 * rows["busy"], rows["sm_clock_mhz"], label=name, **marks)
            points = law.points.loc[rows.index.intersection(law.points.index)]
            rate.plot(points["busy"], points["tflops"], **marks)
        ends = np.array([law.points["busy"].min(), law.points["busy"].max()])
        along = np.geomspace(*ends, 60)
        rate.fill_between(along, *np.sort([along**law.low, along**law.high], axis=0), color=GREY,
                          alpha=0.35, linewidth=0)  # fmt: skip
        rate.plot(along, along**law.exponent, color=INK, linewidth=1.2, gid="law")
        rate.plot(along, along, **DASHED)
        clock.set(xlabel="tensor-core cycles in use, %, back to back", ylabel="SM clock read, MHz")
        rate.set(xscale="log", yscale="log", xlabel="cycles in use / mean of the workload",
                 ylabel="rate / mean of the workload")  # fmt: skip
        for axis in (rate.xaxis, rate.yaxis):
            axis.set_major_locator(FixedLocator([0.5, 0.7, 1, 1.5, 2]))
            axis.set_major_formatter(lambda x, _: f"{x:g}")
            axis.set_minor_locator(NullLocator())
        clock.legend(loc="lower left", fontsize=8)
        return chart
