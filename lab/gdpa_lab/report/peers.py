"""Peers in a record: which have no time and why, and the most a fused kernel can gain over two."""

from __future__ import annotations

from dataclasses import replace

import pandas as pd

from gdpa_lab.measuring.baselines import BASELINES, BLOCK_BASELINES
from gdpa_lab.measuring.workload import DTYPE_BYTES, Workload
from gdpa_lab.measuring.workloads import BLOCK_WORKLOADS, WORKLOADS, of_hstu, workload

PAIR = "rotary_kernel"
"""Our rotary kernel, then our attention: two passes, each of which moves its bytes once."""
SLACK = 1.03
"""By how much two kernels near the rate of a copy may differ in their shares of it."""


def missing_peers(rows: pd.DataFrame) -> dict[str, str]:
    """Titles of the peers that take a batch of `rows`, of GDPA also with the function of HSTU, and
    have no time in them, and why; with the direction, if the other one has a time.

    `rows`: of `Chapter.rows`, of any number of workloads, directions and scopes; give it all rows
    that a sentence speaks of, failed ones included. The reason is that of the newest failed row, or
    "not in this record".
    """
    reasons = {}
    for peers, works in ((BASELINES, WORKLOADS), (BLOCK_BASELINES, BLOCK_WORKLOADS)):
        ours = rows[rows["workload"].isin(works)]
        asked = {*zip(ours["workload"], ours["direction"], strict=True)}
        batches = [(works[name], way) for name, way in asked]
        if peers is BASELINES:
            batches += [(of_hstu(x, causal), way) for x, way in batches for causal in (True, False)]
        for impl, peer in peers.items():
            theirs = ours[ours["impl"] == impl]
            taken = {way for work, way in batches if peer.problem(work, way) is None}
            missing = taken - {*theirs["direction"][theirs["time_us_p50"].notna()]}
            if missing:
                failed = theirs[theirs["direction"].isin(missing) & (theirs["failure"] != "")]
                why = failed["failure"].iloc[-1] if len(failed) else "not in this record"
                title = peer.title if missing == taken else f"{peer.title} ({', '.join(missing)})"
                reasons[title] = why.removeprefix("Unsupported: ")
    return reasons


def bytes_of_two(work: Workload, direction: str) -> int:
    """Fewest bytes of two passes, rotary and attention, on a workload with rotary."""
    plain = replace(work, rotary=False, rotate_v=False)
    v = work.total_k * work.num_heads_k * work.head_dim * DTYPE_BYTES[work.dtype]
    rotated = plain.bytes_written("backward") - (not work.rotate_v) * v
    sin_cos = work.bytes(direction) - plain.bytes(direction)
    return plain.bytes(direction) + 2 * rotated + sin_cos


def checked(ratio: float, peer: str, name: str, direction: str) -> float:
    """A peer's time over that of a rung on the workload `name`, back if bytes allow it. ValueError
    if fused rotary is faster than `PAIR` by more than what it saves: something else than kernels
    was timed."""
    if peer == PAIR:
        work = workload(name)
        most = bytes_of_two(work, direction) / work.bytes(direction)
        if ratio > SLACK * most:
            raise ValueError(
                f"{name}, {direction}: one pass can be {most:.2f} times as fast as {PAIR} by "
                f"their bytes, got {ratio:.2f}"
            )
    return ratio
