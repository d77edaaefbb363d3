"""Gains of two CTAs over one on a B200: measured by others, and by the unit ledger."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd

from gdpa_lab.measuring import record as records
from gdpa_lab.measuring.cost_model import Design
from gdpa_lab.report import clock_free


def published(data_dir: str | Path = records.DATA_DIR) -> tuple[pd.DataFrame, float]:
    """Ratios of two CTAs to one, measured by others and by the ledger, and the factor that
    FlashAttention-4 gained by evaluating a sixteenth instead of a tenth of its exponentials without
    the MUFU, which no unit of the ledger explains.

    Forward: b6 over b4 without its mixed activation, mean over the lengths of the source. Backward:
    of an SM's clocks for a tile, those of chapter blackwell/backward: b4 over b3.
    """
    table = pd.read_csv(Path(data_dir) / "published" / "blackwell_attention.csv")
    tflops = table.set_index(["source", "kernel"])["tflops"]
    one, two, ex2 = (
        tflops.xs(source)
        for source in (
            "facebookexperimental/triton#2560", "Dao-AILab/flash-attention#2280",
            "Dao-AILab/flash-attention#2398",
        )
    )  # fmt: skip
    designs = clock_free.blackwell("forward")
    pair, single = (designs[x].design for x in ("b6_pair_stream", "b4_mixed"))
    forward = [_clocks(single, n) / _clocks(pair, n) for n in (8, 16, 32, 64, 128)]
    rows = {
        "forward, FA4 with two over TLX with one": (
            one["FA4 2 CTAs"] / one["TLX 1 CTA"], float(np.mean(forward)),
        ),
        "backward, FA4": (two["FA4 2 CTAs"] / two["FA4 1 CTA"], 3840 / 2816),
    }  # fmt: skip
    columns = ["published", "ledger"]
    pairs = pd.DataFrame.from_dict(rows, orient="index", columns=columns)
    return pairs.rename_axis("two CTAs over one"), ex2["FA4 ex2 16"] / ex2["FA4 ex2 10"]


def _clocks(design: Design, blocks: int) -> float:
    """Clocks of the busiest unit for 128 queries and `blocks` times 128 keys."""
    return max(design.pairs[x] * blocks + design.queries.get(x, 0.0) for x in design.pairs)
