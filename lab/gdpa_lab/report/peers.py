"""Peers in a record: those without a time, the reasons, and the most that fusion can gain."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import pandas as pd

from gdpa_lab.measuring.baselines import BASELINES, BLOCK_BASELINES, Baseline
from gdpa_lab.measuring.workload import DTYPE_BYTES, Workload
from gdpa_lab.measuring.workloads import BLOCK_WORKLOADS, HSTU, WORKLOADS, of_hstu, workload

PAIR = "rotary_kernel"
"""Peer of two passes: our rotary kernel, then our attention, each moving its bytes once."""
MANY = 3
"""Records of a system whose times of a peer make a record without one strange."""
SLACK = 1.03
"""Tolerated ratio of the bandwidth shares of two kernels near the rate of a copy."""


def missing_peers(rows: pd.DataFrame) -> dict[str, str]:
    """Collect the peers that lack a time back to back on batches of `rows` that they take, with the
    reason. A key is the peer's title, with "(m of its n batches)" if it has times on the others; a
    batch counts in each direction. Of a peer that takes none of GDPA's those with the function of
    HSTU count.

    `rows`: of `Chapter.rows`, of any number of workloads, directions and scopes; give it all rows
    that a sentence speaks of, failed ones included. The reason is that of the newest failed row, or
    "not in this record".
    """
    reasons = {}
    rows = rows[rows["scope"] == "sustained"]
    for peers, works in ((BASELINES, WORKLOADS), (BLOCK_BASELINES, BLOCK_WORKLOADS)):
        ours = rows[rows["workload"].isin(works)]
        calls = {*zip(ours["workload"], ours["direction"], strict=True)}
        batches = {(name, to): works[name] for name, to in calls if name not in HSTU}
        hstu = {}
        for (_, to), work in batches.items() if peers is BASELINES else ():
            alike = (of_hstu(work, causal) for causal in (True, False))
            hstu |= {(x.name, to): x for x in alike if x.name in works}
        for impl, peer in peers.items():
            theirs = ours[ours["impl"] == impl]
            timed = theirs[theirs["time_us_p50"].notna()]
            takes = _taken(peer, batches) or _taken(peer, hstu)
            missing = takes - {*zip(timed["workload"], timed["direction"], strict=True)}
            if missing:
                failed = theirs[theirs["time_us_p50"].isna() & (theirs["failure"] != "")]
                why = failed["failure"].iloc[-1] if len(failed) else "not in this record"
                some = "" if missing == takes else f" ({len(missing)} of its {len(takes)} batches)"
                reasons[f"{peer.title}{some}"] = why.removeprefix("Unsupported: ")
    return reasons


def lost_peers(rows: pd.DataFrame, table: pd.DataFrame) -> list[str]:
    """List the peers that lack a time back to back in `rows` on a batch where at least `MANY` other
    records of the same system have one, with the reason: "cuDNN on ..., forward: ...".

    `rows`: of `Chapter.rows`, failed ones included; `table`: of `results.table`, not only the
    latest. A peer that a record of many fails on, or does not have, may be wrong in that record.
    """
    batch = ["system", "workload", "direction"]
    rows, timed = (frame[frame["scope"] == "sustained"] for frame in (rows, table))
    timed = timed[timed["time_us_p50"].notna() & ~timed["record"].isin(rows["record"])]
    timed = timed[timed["impl"].isin({**BASELINES, **BLOCK_BASELINES}) & timed["variant"].eq("")]
    others = timed.groupby([*batch, "impl"])["record"].nunique()
    lines = []
    for (*call, impl), count in others[others >= MANY].items():
        here = rows[(rows[batch] == call).all(axis=1)]
        same = here[here["impl"] == impl]
        if len(here) and not same["time_us_p50"].notna().any():
            peer = (BLOCK_BASELINES if call[1] in BLOCK_WORKLOADS else BASELINES)[impl]
            why = same["failure"].iloc[-1] if len(same) else "not in this record"
            lines.append(
                f"{peer.title} on {', '.join(call[1:])}: {why}; {count} other records time it"
            )
    return lines


def _taken(peer: Baseline, batches: Mapping[tuple[str, str], Workload]) -> set[tuple[str, str]]:
    """The (workload, direction) that a peer takes."""
    return {key for key, work in batches.items() if peer.problem(work, key[1]) is None}


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
