"""The law of tiles: a kernel's time as a sum of a few constants times what it has to do.

T = (queries / 128 * a + keys / 128 * b + pairs / 128^2 * c) / SMs, constants in microseconds of an
SM. It is fitted to times, so it explains them and predicts nothing of another kernel; what it shows
is where a kernel spends its time, and which batches do not follow it.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations

import numpy as np
import pandas as pd

from gdpa_lab.measuring import cost_model
from gdpa_lab.measuring.workload import Workload
from gdpa_lab.measuring.workloads import workload

COLUMNS = ("queries", "keys", "pairs")
SCAN_WIDTH = 31
"""Sequences that FlashAttention-4's tile scheduler passes in a step: one for each lane but the
last, which holds their sum (flash_attn/cute/tile_scheduler.py, VarlenDecoder)."""


def amounts(
    works: Sequence[Workload], sms: int, tile: tuple[int, int] = (128, 128)
) -> pd.DataFrame:
    """Count the work of an SM on average: 128 queries, 128 keys and 128 x 128 pairs, lengths padded
    to `tile`; a row for each workload, by name."""
    rows = {work.name: [x / sms for x in cost_model.counts(work, tile)] for work in works}
    return pd.DataFrame.from_dict(rows, orient="index", columns=list(COLUMNS))


def scan_steps(work: Workload, sms: int, tile: int = 256) -> float:
    """Steps that the scheduler's scan takes on an SM, if each program walks over the batch.

    A program with a tile of queries passes half of the batch on average, one beyond the end all of
    it. There are as many as the batch could need: `total_q` and `tile` - 1 rows for each sequence.
    """
    tiles = sum(-(-n // tile) for n in work.seqlens_q)
    programs = (work.total_q + work.batch * (tile - 1)) // tile
    steps = work.batch / SCAN_WIDTH
    return work.num_heads_q * (tiles * steps / 2 + (programs - tiles) * steps) / sms


def fit(done: pd.DataFrame, us: pd.Series) -> pd.Series:
    """Microseconds for each column of `done`, none negative: the least squares of relative errors
    of the times `us`. ValueError with fewer times than columns."""
    if len(us) < done.shape[1]:
        raise ValueError(f"us must hold at least {done.shape[1]} times, got {len(us)}")
    best, least = pd.Series(0.0, index=done.columns), np.inf
    scaled = done.div(us, axis=0)
    for count in range(1, done.shape[1] + 1):
        for subset in map(list, combinations(done.columns, count)):
            coefficients = np.linalg.lstsq(scaled[subset], np.ones(len(us)), rcond=None)[0]
            error = float(((scaled[subset] @ coefficients - 1) ** 2).sum())
            if (coefficients >= 0).all() and error < least:
                best, least = pd.Series(0.0, index=done.columns), error
                best[subset] = coefficients
    return best


def fits_without_one(done: pd.DataFrame, us: pd.Series) -> pd.DataFrame:
    """`fit` without each of the times in turn: a row for the one left out."""
    return pd.DataFrame({name: fit(done.drop(name), us.drop(name)) for name in us.index}).T


def pair_tflops(law: pd.Series, sms: int, direction: str = "forward") -> float:
    """The rate at which a kernel would run if pairs were all its work, TFLOP/s."""
    products = {"forward": 2, "backward": 5}[direction]
    return products * 2 * cost_model.TILE**3 * sms / law["pairs"] / 1e6


KERNELS = {"cutedsl_gdpa": "GDPA", "triton_gdpa": "Triton", "cutlass_fmha": "FMHA",
           "cutedsl_fa4": "FA4"}  # fmt: skip


def published(bars: pd.DataFrame) -> pd.DataFrame:
    """The laws of published kernels, a row for each direction and kernel, from the bars of
    `claims.published_figures` that are not suspect.

    Microseconds for what the columns say (`steps`: of FA4's scan, forward; `steps, least` and
    `most`: if one bar is left out), the rate of pairs alone, and by how many percent published
    times exceed the law's: the most of any full batch, which the fit is made of, and each of the
    half chart, which it is not.
    """
    laws, sms = {}, cost_model.B200.sms
    bars = bars[bars["workload"] != "gdpa-cross-full-256"]  # self-256 under another name
    for (direction, kernel), group in bars.groupby(["direction", "kernel"], sort=False):
        forward, fa4 = direction == "forward", kernel == "cutedsl_fa4"
        tile = (256, 128) if forward and kernel != "triton_gdpa" else (128, 128)
        terms = ["queries", "pairs", "steps"] if forward else ["keys", "pairs"]
        terms = terms if fa4 else list(COLUMNS)
        works = [workload(name) for name in group["workload"]]
        done = amounts(works, sms, tile).assign(steps=[scan_steps(work, sms) for work in works])
        flops = pd.Series([work.flops(direction) for work in works], index=done.index)
        us = flops / group.set_index("workload")["tflops"] / 1e6
        full = us.index.str.contains("full")
        law = fit(done.loc[full, terms], us[full])
        more = 100 * (us / (done[terms] @ law) - 1)
        again = fits_without_one(done.loc[full, terms], us[full])
        ends = (
            {"steps, least": again["steps"].min(), "steps, most": again["steps"].max()}
            if "steps" in again
            else {}
        )
        laws[direction, KERNELS[kernel]] = {
            **law,
            **ends,
            "pairs alone, TFLOP/s": pair_tflops(law, sms, direction),
            "full, most": more[full].abs().max(),
            **{f"half {name.rsplit('-')[-1]}": more[name] for name in us.index[~full]},
        }
    return pd.DataFrame(laws).T.rename_axis(["direction", "kernel"])
