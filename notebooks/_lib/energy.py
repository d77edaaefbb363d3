"""Joules of kernels back to back, split over what is counted, and the clocks that they run at."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd

from gdpa_lab.measuring.record import Record
from gdpa_lab.report.house import INK, RUNG_COLOURS, Figure, canvas


@dataclass(frozen=True)
class Fit:
    """`value` and standard `error`, by term; relative residuals, by row; the condition number of
    the terms at length one: the larger, the less they can be told apart."""

    terms: pd.DataFrame
    residuals: pd.Series
    condition: float

    @property
    def rms_percent(self) -> float:
        """Of the residuals."""
        return 100 * float(np.sqrt((self.residuals**2).mean()))


def counted(rows: pd.DataFrame, record: Record) -> pd.DataFrame:
    """Rows of scope "sustained" with what one call counts: `seconds`, `flops`, `bytes` (fewest),
    `pairs` (visible scores, of all heads) and whether power `limited` the clock."""
    reasons = {
        (row.workload, row.direction, row.impl): row.load.throttle_reasons
        for row in record.rows
        if row.load is not None
    }
    us, dims = rows["time_us_p50"], [record.workload(name).head_dim for name in rows["workload"]]
    each = 4.0 * np.array(dims) * np.where(rows["direction"] == "backward", 2.5, 1)
    keys = zip(rows["workload"], rows["direction"], rows["impl"], strict=True)
    found = rows.assign(seconds=us / 1e6, flops=rows["tflops"] * us * 1e6)
    return found.assign(
        bytes=rows["gbytes_per_s"] * us * 1e3,
        pairs=found["flops"] / each,
        limited=["sw_power_cap" in (reasons[key] or ()) for key in keys],
    )


def fit(frame: pd.DataFrame, terms: Sequence[str], of: str = "joules") -> Fit:
    """Least squares of the relative errors of `of` as a sum of `terms`, each times a constant.

    ValueError unless there are more rows than terms and no term is a sum of others.
    """
    scaled = frame[list(terms)].div(frame[of], axis=0).to_numpy(float)
    lengths = np.linalg.norm(scaled, axis=0)
    unit = scaled / lengths
    rows, rank = len(frame), np.linalg.matrix_rank(unit)
    if not rank == len(terms) < rows:
        raise ValueError(f"{len(terms)} terms need that rank and more rows, got {rank}, {rows}")
    values = np.linalg.lstsq(unit, np.ones(len(frame)), rcond=None)[0]
    residuals = unit @ values - 1
    variance = (residuals**2).sum() / (len(frame) - len(terms))
    errors = np.sqrt(variance * np.diag(np.linalg.inv(unit.T @ unit)))
    found = pd.DataFrame({"value": values, "error": errors}, list(terms)).div(lengths, axis=0)
    return Fit(found, pd.Series(residuals, frame.index), float(np.linalg.cond(unit)))


def clocks(groups: Mapping[str, pd.DataFrame], busy: float) -> Figure:
    """Clock over rate, a mark for each row of a group; a line where tensor cores that do `busy`
    TFLOP/s a MHz never pause: below it nothing can be."""
    shades = (RUNG_COLOURS[3], RUNG_COLOURS[1], INK, RUNG_COLOURS[2])
    with canvas(width=7.2, height=3.9) as (chart, axis):
        for (name, rows), shade, mark in zip(groups.items(), shades, "os^D", strict=False):
            axis.plot(rows["tflops"], rows["sm_clock_mhz"], mark, color=shade, label=name)
        drawn = pd.concat(list(groups.values()))
        ends = 0.9 * busy * drawn["sm_clock_mhz"].min(), 1.05 * drawn["tflops"].max()
        axis.plot(ends, [rate / busy for rate in ends], color=INK, linestyle=(0, (4, 2)))
        axis.set_xlabel("TFLOP/s, back to back")
        axis.set_ylabel("SM clock read, MHz")
        axis.legend(loc="lower left", fontsize=8.5)
        return chart
