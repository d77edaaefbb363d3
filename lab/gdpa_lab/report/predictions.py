"""Predictions for a B200, registered before one was measured, and what records say of them.

`registered` reads data/predictions/b200.csv, which `derive` computes; a change is a new `MODEL`. A
rate is predicted as a share of the ceilings in the same record, since those of a B200 depend on its
power limit: `scaled` turns shares into rates, `judged` compares them with records.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pandas as pd

from gdpa_lab.measuring import cost_model, files
from gdpa_lab.measuring import record as records
from gdpa_lab.measuring import system as systems
from gdpa_lab.measuring.cost_model import B200, backward, forward
from gdpa_lab.measuring.roofline import Ceilings
from gdpa_lab.measuring.workload import Workload
from gdpa_lab.measuring.workloads import BLOCK_TABLES, FIGURES, workload
from gdpa_lab.report import results

PATH = records.DATA_DIR / "predictions" / "b200.csv"
MODEL, DATE = "unit ledger 1", "2026-11-22"
CAPABILITY = "10.0"
"""Compute capability of a B200. A GPU of 10.3 differs: its MUFU evaluates `ex2` twice as fast."""
ASSUMED_W = 750
"""Power limit of the machine that `cost_model.ASSUMED` is about."""


class Expected(NamedTuple):
    """A rung in the model: its design, and the ratio of our speed to the cost model's, with a 90 %
    interval. `most_keys`: longest K and V that it takes. Block attention has no design: bytes bound
    it. `date`: of its registration."""

    impl: str
    low: float
    centre: float
    high: float
    design: cost_model.Design | None = None
    most_keys: float = math.inf
    date: str = DATE


# From our records of an H200. Forward, v8 over its modelled cost: .85, one deviation .05. Backward,
# pairs of tiles in v4 and v5 over the matmul ceiling: .83. Start and end of a program, fitted over
# tiles: v4 2.8 us for 128 queries; backward v4 4.5 and v5 3.6 us for 128 keys; v8, which streams,
# 0.5, as is taken for backward b5.
# v8's consumers issue their own MMAs; on sm_100 one thread does, and the published kernel, of one
# CTA with two tiles, is at 1.0 of its cost. Hence .88 for that design, .93 for pairs, which leave
# the port of shared memory idle for 3 clocks of 8, and limits from v8's lowest to a bit over 1.
# b1 waits four times a tile for what a barrier takes; b2 does at the ends of its programs.
EXPECTED = {
    "forward": (
        Expected("b1_tensor_memory", 0.55, 0.75, 0.95, forward(
            "one tile", B200, 96, 64, issue=534, in_turns=("mma", "mufu"), start_us=2.8)),
        Expected("b2_two_tiles", 0.70, 0.86, 1.0, forward(
            "two tiles", B200, 96, 32, issue=535, tile=(256, 128), start_us=1.4)),
        Expected("b3_stream", 0.75, 0.88, 1.02, forward(
            "two tiles, one stream", B200, 96, 32, issue=537, tile=(256, 128))),
        Expected("b4_mixed", 0.75, 0.88, 1.02, forward(
            "the same, mixed", B200, 96, 32, mufu=0.75, issue=602, tile=(256, 128))),
        Expected("b5_cta_pair", 0.80, 0.93, 1.05, forward(
            "pair, K and V stay", B200, 64, 0, keys=64, mufu=0.75, issue=608, tile=(256, 128)),
            most_keys=256),
        Expected("b6_pair_stream", 0.80, 0.93, 1.05, forward(
            "pair, K and V stream", B200, 64, 16, mufu=0.75, issue=608, tile=(512, 128))),
        Expected("b7_split_stream", 0.80, 0.93, 1.05, forward(
            "pair, 256 rows, K and V stream", B200, 64, 32, mufu=0.75, issue=610, tile=(256, 128)),
            date="2026-11-27"),
    ),
    "backward": (
        Expected("b1_tensor_memory_backward", 0.65, 0.83, 1.0, backward(
            "one CTA", B200, 288 + 32 + 64 + 128, 192, start_us=4.5, row_bytes=1280)),
        Expected("b2_short_kv_backward", 0.65, 0.83, 1.0, backward(
            "two CTAs, K and V stay", B200, 288 + 32 + 64 + 96, 192, start_us=3.6,
            tile=(128, 256)), most_keys=256),
        Expected("b3_dk_first_backward", 0.65, 0.83, 1.0, backward(
            "one CTA, dS in tensor memory", B200, 256 + 32 + 64 + 128, 192, start_us=4.5,
            row_bytes=1280), date="2026-11-27"),
        Expected("b4_pair_backward", 0.65, 0.83, 1.0, backward(
            "pair, dS exchanged", B200, 192 + 32 + 64 + 64, 224, start_us=4.5, tile=(128, 256),
            row_bytes=1280), date="2026-11-27"),
        Expected("b5_stream_backward", 0.65, 0.83, 1.0, backward(
            "pair, one stream", B200, 192 + 32 + 64 + 64, 224, start_us=0.5, tile=(128, 256),
            row_bytes=1280), date="2026-11-27"),
        Expected("b6_dq_once_backward", 0.65, 0.83, 1.0, backward(
            "pair, dQ once", B200, 192 + 32 + 64 + 32, 224, start_us=0.5, tile=(128, 256)),
            most_keys=256, date="2026-11-27"),
    ),
}  # fmt: skip
"""Rungs of GDPA by direction. The KiB of a backward design are the operands of the five MMAs; dS,
in a pair also for the other CTA; Q and dO in; dQ out, in b2 half of it to the other CTA.
`row_bytes`: zeros for dQ, read again and rounded, 1,280 bytes a row."""

# Shares of the copy ceiling; on an H200 role designs reach .96 and .92, with rotary .96 and .93.
BLOCK = {
    ("table5", "forward"): Expected("b1_warp_specialized", 0.85, 0.95, 1.02),
    ("table5", "backward"): Expected("b1_warp_specialized", 0.80, 0.91, 0.98),
    ("table7", "forward"): Expected("b1_warp_specialized", 0.80, 0.93, 1.0),
    ("table7", "backward"): Expected("b1_warp_specialized", 0.75, 0.89, 0.98),
}


def _works() -> Iterator[tuple[str, str, Workload, Expected]]:
    for figure, names in FIGURES.items():
        direction = "forward" if "-fwd-" in figure else "backward"
        for name in names:
            work = workload(name)
            for expected in EXPECTED[direction]:
                if "jagged" not in name and work.max_seqlen_k <= expected.most_keys:
                    yield figure, direction, work, expected
    for (table, direction), expected in BLOCK.items():
        yield table, direction, workload(BLOCK_TABLES[table][0]), expected


def derive() -> pd.DataFrame:
    """Predict every published workload for every rung.

    `of_matmul`, `of_copy`: the share of either ceiling that the rung reaches if it is what bounds
    it (`of_matmul` missing for block attention); `low`, `high`: limits of the 90 % interval over
    the prediction. Then the rate or time under `cost_model.ASSUMED`, in `unit`.
    """
    rows = []
    for figure, direction, work, expected in _works():
        of_matmul, bound, of_copy = math.nan, "memory", expected.centre
        if expected.design is not None:
            cost = cost_model.cost(work, expected.design, cost_model.ASSUMED)
            bound, compute_us = cost.bound, work.flops(direction) / cost_model.ASSUMED.tflops / 1e6
            of_matmul = expected.centre * compute_us / (cost.unit_us + cost.more_us)
            of_copy *= cost.memory_us / (cost.memory_us + cost.more_us)
        rows.append(
            {
                "figure": figure, "workload": work.name, "direction": direction,
                "impl": expected.impl, "bound": bound, "of_matmul": round(of_matmul, 3),
                "of_copy": round(of_copy, 3), "low": round(expected.low / expected.centre, 3),
                "high": round(expected.high / expected.centre, 3),
            }
        )  # fmt: skip
    frame = scaled(pd.DataFrame(rows), cost_model.ASSUMED)
    return frame.assign(model=MODEL, date=[expected.date for *_, expected in _works()])


def scaled(shares: pd.DataFrame, ceilings: Ceilings) -> pd.DataFrame:
    """Rescale predictions to other ceilings: `predicted` and `from` .. `to`, the 90 % interval, in
    `unit`: TFLOP/s, or ms for block attention."""
    rates = []
    for row in shares.itertuples():
        work = workload(row.workload)
        flops = work.flops(row.direction)
        read, written = work.bytes_read(row.direction), work.bytes_written(row.direction)
        us = (read + written) / ceilings.gbytes_per_s(read, written) / 1e3 / row.of_copy
        if row.of_matmul == row.of_matmul:
            us = max(us, flops / ceilings.tflops / 1e6 / row.of_matmul)
        in_ms = work.operator == "block_attention"
        most = [us / 1e3 / x if in_ms else flops / us / 1e6 * x for x in (1, row.low, row.high)]
        middle, *ends = (round(x, 3 if in_ms else 0) for x in most)
        rates.append((middle, min(ends), max(ends), "ms" if in_ms else "TFLOP/s"))
    columns = ["predicted", "from", "to", "unit"]
    new = pd.DataFrame(rates, columns=columns, index=shares.index)
    return shares.drop(columns=columns, errors="ignore").join(new)


def render(frame: pd.DataFrame) -> str:
    """Format the predictions as a CSV file."""
    return frame.to_csv(index=False, lineterminator="\n")


def update(path: Path = PATH) -> bool:
    """Write what `derive` returns; return whether the file changed."""
    return files.rewrite(path, render(derive()))


def registered() -> pd.DataFrame:
    """Read the predictions from the file."""
    return pd.read_csv(PATH)


class Basis(NamedTuple):
    """Basis of the rates: ceilings, the power limit (W) they belong to, their origin."""

    ceilings: Ceilings
    power_limit_w: float | None
    origin: str


def basis(data_dir: str | Path = records.DATA_DIR, record: str | None = None) -> Basis:
    """Return the sustained ceilings of `record`, an id; None: of the newest record of a GPU of
    `CAPABILITY`, or the assumed ones if there is none.

    LookupError for an unknown id, for a record of another GPU and for one without ceilings.
    """
    known = {each.id: each for each in records.load_all(data_dir)}
    if record is None:
        ours = [name for name, each in known.items() if _is_ours(each, data_dir)]
        if not ours:
            return Basis(
                cost_model.ASSUMED, ASSUMED_W, "assumed, from outside: no record of a B200"
            )
        record = ours[-1]
    if record not in known:
        raise LookupError(f"record must be the id of a record, got {record!r}")
    on = systems.by_id(known[record].system, data_dir)
    ceilings = results.ceilings(known[record], "sustained")
    if on.compute_capability != CAPABILITY:
        raise LookupError(
            f"record must be of compute capability {CAPABILITY}, got {record} of "
            f"{on.compute_capability}"
        )
    if ceilings is None:
        raise LookupError(f"record must hold sustained ceilings, matmul and copy, got {record}")
    return Basis(ceilings, on.power_limit_w, record)


def _is_ours(record: records.Record, data_dir: str | Path) -> bool:
    """Return whether a record is of a B200 and has the ceilings that scale predictions."""
    capability = systems.by_id(record.system, data_dir).compute_capability
    return capability == CAPABILITY and results.ceilings(record, "sustained") is not None


def timed(data_dir: str | Path, capability: str) -> Iterator[tuple[records.Record, pd.DataFrame]]:
    """Yield records of GPUs with a compute capability, each with its correct sustained rows."""
    rows = results.table(data_dir, latest=False)
    rows = rows[(rows["scope"] == "sustained") & (rows["variant"] == "") & rows["correct"].eq(True)]
    rows = rows.dropna(subset=["time_us_p50"])
    rows = rows.drop_duplicates(["record", "workload", "direction", "impl"])
    known = {each.id: each for each in records.load_all(data_dir)}
    for name, group in rows.groupby("record", sort=True):
        if systems.by_id(known[name].system, data_dir).compute_capability == capability:
            yield known[name], group


def judged(
    shares: pd.DataFrame, data_dir: str | Path = records.DATA_DIR, record: str | None = None
) -> pd.DataFrame:
    """Judge predictions under `basis`; where such records have sustained times of a rung,
    `measured` and the verdict, each under the ceilings of its own record: "confirmed" within the
    interval, or "refuted, low" or "refuted, high", of rate or time. `record`: that one alone."""
    table = scaled(shares, basis(data_dir, record).ceilings)
    table = table.assign(measured=np.nan, verdict="")
    key = ["workload", "direction", "impl"]
    for run, rows in timed(data_dir, CAPABILITY):
        ceilings = results.ceilings(run, "sustained")
        if record not in (None, run.id) or ceilings is None:
            continue
        rows = rows.set_index(key)
        for index, row in scaled(shares, ceilings).iterrows():
            if tuple(row[key]) not in rows.index:
                continue
            got = rows.loc[tuple(row[key])]
            value = got["time_us_p50"] / 1e3 if row["unit"] == "ms" else got["tflops"]
            outside = "low" if value < row["from"] else "high" if value > row["to"] else ""
            verdict = f"refuted, {outside}" if outside else "confirmed"
            table.loc[index, row.index] = row
            table.loc[index, ["measured", "verdict"]] = round(value, 3), verdict
    return table


def report(
    data_dir: str | Path = records.DATA_DIR, record: str | None = None
) -> tuple[str, pd.DataFrame]:
    """Return what `python -m gdpa_lab predictions` prints: where the rates come from, the table."""
    shares = registered()
    ground, table = basis(data_dir, record), judged(shares, data_dir, record)
    watts = "unknown" if ground.power_limit_w is None else f"{ground.power_limit_w:.0f} W"
    copies = [rate for _, rate in ground.ceilings.copies]
    lines = [
        f"Registered {', '.join(sorted(set(shares['date'])))}; model: {MODEL}.",
        f"Ceilings: {ground.origin}; matmul {ground.ceilings.tflops:,.0f} TFLOP/s, copies "
        f"{min(copies):,.0f} to {max(copies):,.0f} GB/s; power limit {watts}.",
    ]
    verdicts = table["verdict"].value_counts()
    timed = int(verdicts.drop("", errors="ignore").sum())
    outcome = f"{verdicts.get('confirmed', 0)} of {timed} measured rows within the 90 % interval."
    lines.append(outcome if timed else "No row is measured: all are predictions.")
    columns = ["workload", "direction", "impl", "bound", "predicted", "from", "to", "unit"]
    if timed:
        columns += ["measured", "verdict"]
    return "\n".join(lines), table[columns]
