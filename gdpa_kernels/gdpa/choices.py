"""The order in which `impl="auto"` tries implementations: as measured at the nearest shape.

The table, choices.csv, is made from the records (report/measured_rankings.py): for each direction
of each measured workload with GELU the implementations, fastest first, without lessons. A call
takes the row of its direction and of its device's compute capability whose head_dim and longest
sequences are nearest, by their ratios; rows of a head_dim on the same side of 128 come first, since
other rungs take those over it, then rows of the call's own dtype. What that row did not compare has
the place that the next nearest rows give it (`rankings.merged`). Another minor version does not
count. Where nothing was measured, and after what was, come the implementations that run anywhere
(`UNMEASURED`). "v0_eager", which rounds in every step, takes no call in 16 bits. A CPU takes the
definition.
"""

from __future__ import annotations

import math
from functools import cache, lru_cache
from pathlib import Path

from gdpa_kernels.calling import rankings
from gdpa_kernels.calling.rankings import Ranking, Shape

PATH = Path(__file__).with_name("choices.csv")
UNMEASURED = {
    "forward": ("v1_tiled", "v0_eager", "reference"),
    "backward": ("v1_tiled_backward", "reference"),
}
COLUMNS = {
    "capability": rankings.parse_capability, "direction": str, "dtype": str, "head_dim": int,
    "max_seqlen_q": int, "max_seqlen_k": int,
}  # fmt: skip


def distance(shape: Shape, dtype: str, head_dim: int, *lengths: int) -> tuple[bool, bool, float]:
    """How far a call of head_dim, max_seqlen_q and max_seqlen_k is from a measured shape: first by
    the side of 128 that its head_dim is on, then by dtype, then by doublings of the sizes."""
    _, _, measured_dtype, measured_dim, *measured = shape
    sizes = zip((measured_dim, *measured), (head_dim, *lengths), strict=True)
    doublings = sum(abs(math.log2(a / max(b, 1))) for a, b in sizes)
    return (measured_dim > 128) != (head_dim > 128), measured_dtype != dtype, doublings


@lru_cache(maxsize=1024)
def order(
    capability: tuple[int, int] | None, direction: str, dtype: str, head_dim: int,
    max_seqlen_q: int, max_seqlen_k: int,
) -> tuple[str, ...]:  # fmt: skip
    """Implementations to try for a call, fastest first; capability None: no GPU."""
    if capability is None:
        return ("reference",)
    rows = [row for row in load() if row.shape[:2] == (capability, direction)]
    call = dtype, head_dim, max_seqlen_q, max_seqlen_k
    rows.sort(key=lambda row: distance(row.shape, *call))
    ranked = dict.fromkeys((*rankings.merged([row.impls for row in rows]), *UNMEASURED[direction]))
    if dtype in ("bfloat16", "float16"):
        ranked.pop("v0_eager", None)
    return tuple(ranked)


@cache
def load() -> tuple[Ranking, ...]:
    """The table as it is in the package."""
    return tuple(rankings.parse(PATH.read_text(), COLUMNS))
