"""Gains of two CTAs over one on a B200: measured by others, and by the unit ledger."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd

from gdpa_lab.measuring import record as records
from gdpa_lab.measuring.cost_model import Design
from gdpa_lab.report.predictions import EXPECTED


def published(data_dir: str | Path = records.DATA_DIR) -> pd.DataFrame:
    """Rates of two CTAs over those of one, by direction: measured by others, and by the ledger.

    Forward: FlashAttention-4 with two over TLX with one, beside b6 over b4, a mean over the lengths
    of the source. Backward: FlashAttention-4, beside b4 over b3 for a tile.
    """
    table = pd.read_csv(Path(data_dir) / "published" / "blackwell_attention.csv")
    tflops = table.set_index(["source", "kernel"])["tflops"]
    one, two = (
        tflops.xs(source)
        for source in ("facebookexperimental/triton#2560", "Dao-AILab/flash-attention#2280")
    )
    designs = {x.impl: x.design for way in EXPECTED for x in EXPECTED[way]}
    single, pair = designs["b4_mixed"], designs["b6_pair_stream"]
    forward = [_clocks(single, n) / _clocks(pair, n) for n in (8, 16, 32, 64, 128)]
    ports = [designs[x].pairs["smem"] for x in ("b3_dk_first_backward", "b4_pair_backward")]
    rows = {
        "forward": (one["FA4 2 CTAs"] / one["TLX 1 CTA"], float(np.mean(forward))),
        "backward": (two["FA4 2 CTAs"] / two["FA4 1 CTA"], ports[0] / ports[1]),
    }
    return pd.DataFrame.from_dict(rows, orient="index", columns=["published", "ledger"])


def _clocks(design: Design, blocks: int) -> float:
    """Clocks of the busiest unit for 128 queries and `blocks` times 128 keys."""
    return max(design.pairs[x] * blocks + design.queries.get(x, 0.0) for x in design.pairs)
