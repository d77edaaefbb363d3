"""Peers in a record: those without a time, the reasons, and the most that fusion can gain."""

from __future__ import annotations

from dataclasses import replace

import pandas as pd

from gdpa_lab.measuring.baselines import BASELINES, BLOCK_BASELINES
from gdpa_lab.measuring.workload import DTYPE_BYTES, Workload
from gdpa_lab.measuring.workloads import BLOCK_WORKLOADS, WORKLOADS, of_hstu, workload

PAIR = "rotary_kernel"
"""Peer of two passes: our rotary kernel, then our attention, each moving its bytes once."""
SLACK = 1.03
"""Tolerated ratio of the bandwidth shares of two kernels near the rate of a copy."""


def missing_peers(rows: pd.DataFrame) -> dict[str, str]:
    """Collect the peers without a time in `rows`, with the reason, by title; the title names the
    direction if the other one has a time. Only peers that take one of the batches count, for GDPA
    also with the function of HSTU.

    `rows`: of `Chapter.rows`, of any number of workloads, directions and scopes; give it all rows
    that a sentence speaks of, failed ones included. The reason is that of the newest failed row, or
    "not in this record".
    """
    reasons = {}
    for peers, works in ((BASELINES, WORKLOADS), (BLOCK_BASELINES, BLOCK_WORKLOADS)):
        ours = rows[rows["workload"].isin(works)]
        calls = {*zip(ours["workload"], ours["direction"], strict=True)}
        batches = [(works[name], direction) for name, direction in calls]
        if peers is BASELINES:
            batches += [(of_hstu(x, causal), to) for x, to in batches for causal in (True, False)]
        for impl, peer in peers.items():
            theirs = ours[ours["impl"] == impl]
            directions = {to for work, to in batches if peer.problem(work, to) is None}
            missing = directions - {*theirs["direction"][theirs["time_us_p50"].notna()]}
            if missing:
                failed = theirs[theirs["direction"].isin(missing) & (theirs["failure"] != "")]
                why = failed["failure"].iloc[-1] if len(failed) else "not in this record"
                some = "" if missing == directions else f" ({', '.join(missing)})"
                reasons[f"{peer.title}{some}"] = why.removeprefix("Unsupported: ")
    return reasons


def bytes_of_two(work: Workload, direction: str) -> int:
    """Count the fewest bytes of two passes, rotary and attention, on a workload with rotary."""
    plain = replace(work, rotary=False, rotate_v=False)
    v = work.total_k * work.num_heads_k * work.head_dim * DTYPE_BYTES[work.dtype]
    rotated = plain.bytes_written("backward") - (not work.rotate_v) * v
    sin_cos = work.bytes(direction) - plain.bytes(direction)
    return plain.bytes(direction) + 2 * rotated + sin_cos


def checked(ratio: float, peer: str, name: str, direction: str) -> float:
    """Return `ratio`, a peer's time over a rung's on the workload `name`, if bytes allow it.
    ValueError if fused rotary beats `PAIR` by more than the bytes it saves: then something else
    than kernels was timed."""
    if peer == PAIR:
        work = workload(name)
        most = bytes_of_two(work, direction) / work.bytes(direction)
        if ratio > SLACK * most:
            raise ValueError(
                f"{name}, {direction}: one pass can be {most:.2f} times as fast as {PAIR} by "
                f"their bytes, got {ratio:.2f}"
            )
    return ratio
