"""Joules of kernels back to back, split over what is counted, and the clock that power allows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pandas as pd

from gdpa_lab.measuring.cost_model import Chip
from gdpa_lab.measuring.record import Record
from gdpa_lab.report.style import INK, RUNG_COLOURS, Figure, canvas


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


def elasticity(rows: pd.DataFrame, by: Sequence[str]) -> tuple[float, pd.Series]:
    """By how many per cent the rate rises when the share `busy` rises by one: the slope of
    logarithms within groups of the columns `by`, of all together and of each with five rows."""
    logs = np.log(rows[["busy", "tflops"]])
    groups = [rows[column] for column in by]
    centred = logs - logs.groupby(groups).transform("mean")
    whole = (centred["busy"] * centred["tflops"]).sum() / (centred["busy"] ** 2).sum()
    slopes = {
        name: np.polyfit(group["busy"], group["tflops"], 1)[0]
        for name, group in logs.groupby(groups)
        if len(group) >= 5
    }
    return float(whole), pd.Series(slopes)


@dataclass(frozen=True)
class Wall:
    """Power at the limit: (clock / 1,500 MHz) ** exponent (base + full * busy) + byte * GB/s, in W;
    `rms_percent`: of the clocks that it was fitted to."""

    limit: float
    exponent: float
    base: float
    full: float
    byte: float
    rms_percent: float = 0.0

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
    off = wall.clock(rows["busy"], rows["gbytes_per_s"]) / rows["sm_clock_mhz"] - 1
    return replace(wall, rms_percent=100 * float(np.sqrt((off**2).mean())))


def clocks(groups: Mapping[str, pd.DataFrame], wall: Wall, gbytes_per_s: float) -> Figure:
    """Clock over the share of busy tensor-core cycles, a mark for each row of a group, and what
    `wall` says of that memory traffic."""
    shades = (RUNG_COLOURS[3], RUNG_COLOURS[1], INK, RUNG_COLOURS[2])
    with canvas(width=7.2, height=3.9) as (chart, axis):
        for (name, rows), shade, mark in zip(groups.items(), shades, "os^D", strict=False):
            axis.plot(100 * rows["busy"], rows["sm_clock_mhz"], mark, color=shade, label=name)
        drawn = pd.concat(list(groups.values()))["busy"]
        along = np.linspace(drawn.min(), drawn.max(), 60)
        axis.plot(100 * along, wall.clock(along, gbytes_per_s), color=INK, linestyle=(0, (4, 2)))
        axis.set_xlabel("tensor-core cycles in use, %, back to back")
        axis.set_ylabel("SM clock read, MHz")
        axis.legend(loc="lower left", fontsize=8.5)
        return chart
