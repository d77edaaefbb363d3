"""The order in which `impl="auto"` tries implementations: as measured for such a call.

The table, choices.csv, is made from the records (report/measured_rankings.py): for each direction,
with and without rotary, at each measured head_dim, the implementations, fastest first. A call takes
the row of its device's compute capability, major and minor, with the nearest head_dim, of its own
dtype if there is one; what that row did not compare has the place that the next nearest rows give
it (`rankings.merged`). Where nothing was measured, and after what was, come the implementations
that run anywhere (`UNMEASURED`).
"""

from __future__ import annotations

import math
from functools import cache, lru_cache
from pathlib import Path

from gdpa_kernels.calling import rankings
from gdpa_kernels.calling.rankings import Ranking

PATH = Path(__file__).with_name("choices.csv")
UNMEASURED = ("v1_one_tile", "reference")
COLUMNS = {
    "capability": rankings.parse_capability, "dtype": str, "direction": str, "rotary": int,
    "head_dim": int,
}  # fmt: skip


@lru_cache(maxsize=1024)
def order(
    capability: tuple[int, int] | None, dtype: str, direction: str, rotary: bool, head_dim: int
) -> tuple[str, ...]:
    """Implementations to try for a call, fastest first; capability None: no GPU."""
    rows = [
        row
        for row in load()
        if (row.shape[0], row.shape[2], row.shape[3]) == (capability, direction, int(rotary))
    ]

    def distance(row: Ranking) -> tuple[bool, float]:
        return row.shape[1] != dtype, abs(math.log2(row.shape[4] / head_dim))

    measured = rankings.merged([row.impls for row in sorted(rows, key=distance)])
    return tuple(dict.fromkeys((*measured, *UNMEASURED)))


@cache
def load() -> tuple[Ranking, ...]:
    """The table as it is in the package."""
    return tuple(rankings.parse(PATH.read_text(), COLUMNS))
