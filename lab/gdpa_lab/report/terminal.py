"""Output of commands: a formatted table on a terminal, Markdown into a pipe."""

from __future__ import annotations

import sys

import pandas as pd

from gdpa_lab.measuring.workloads import BLOCK_TABLES, FIGURES
from gdpa_lab.report import results
from gdpa_lab.report.style import is_rung

BAR = 8
"""Width of the bar of a whole roofline, letters."""
PUBLISHED = tuple(
    dict.fromkeys(n for group in (FIGURES, BLOCK_TABLES) for each in group.values() for n in each)
)
"""Workloads of published figures and tables."""


def is_terminal() -> bool:
    """Return whether a person reads what is printed."""
    return sys.stdout.isatty()


def show(text: str, table: pd.DataFrame | None = None) -> None:
    """Print lines of text and a table below them."""
    sys.stdout.write(f"{text.rstrip()}\n\n")
    if table is None:
        return
    if not is_terminal():
        sys.stdout.write(results.to_markdown(table))
        return
    from rich.console import Console
    from rich.table import Table

    grid = Table(box=None, pad_edge=False)
    for name in table:
        right = pd.api.types.is_numeric_dtype(table[name])
        grid.add_column(name, justify="right" if right else "left", no_wrap=True)
    for row in table.itertuples(index=False):
        grid.add_row(*map(results.cell, row))
    Console().print(grid)


def summary(rows: pd.DataFrame) -> pd.DataFrame:
    """Summarize rows of `results.table`: the fastest kernel and the fastest peer back to back, by
    GPU, direction and workload.

    A line is of one record: the newest of those in which the most implementations have a time.
    """
    timed = rows[rows["scope"].eq("sustained") & rows["variant"].eq("")]
    timed = timed[timed["time_us_p50"].notna() & timed["math"].isin(["activation", "softmax"])]
    timed = timed.assign(is_rung=timed["impl"].map(is_rung))
    lines = []
    for (gpu, direction, name), call in timed.groupby(["gpu", "direction", "workload"]):
        counts = call.groupby("record")["is_rung"].agg(["size", "any"])
        counts = counts[counts["any"]].sort_index().sort_values("size", kind="stable")
        if counts.empty:
            continue
        fastest = call[call["record"] == counts.index[-1]].sort_values("time_us_p50")
        ours, peers = fastest[fastest["is_rung"]].iloc[0], fastest[~fastest["is_rung"]]
        share = ours["percent_of_roofline"]
        full, (peer, ratio) = round(BAR * min(1.0, share / 100)), ("none timed", "")
        if len(peers):
            peer, peer_us = peers[["impl", "time_us_p50"]].iloc[0]
            ratio = f"{peer_us / ours['time_us_p50']:.2f}"
        lines.append({
            "GPU": gpu,
            "workload": name,
            "direction": direction,
            "kernel": ours["impl"],
            "ms": round(ours["time_us_p50"] / 1e3, 3),
            "of roofline": f"{'█' * full}{'░' * (BAR - full)} {share:.0f} %",
            "faster": ratio,
            "than": peer,
        })  # fmt: skip
    table = pd.DataFrame(lines)
    if table.empty:
        return table
    order = {name: number for number, name in enumerate(PUBLISHED)}
    table = table.sort_values("workload", kind="stable", key=lambda names: names.map(order))
    return table.sort_values(["GPU", "direction"], ascending=[True, False], kind="stable")


def show_summary(rows: pd.DataFrame) -> None:
    """Print `summary` of rows of `results.table`, a table for each GPU and direction."""
    table = summary(rows)
    if table.empty:
        show("No row is a time back to back.")
        return
    for (gpu, direction), lines in table.groupby(["GPU", "direction"], sort=False):
        show(
            f"\n{gpu}, {direction}, back to back, each line from one record",
            lines.drop(columns=["GPU", "direction"]),
        )
