"""Checks of measured rows before they are drawn."""

from __future__ import annotations

from collections.abc import Sequence

import pandas as pd


def timed_rows(table: pd.DataFrame, direction: str, scope: str) -> pd.DataFrame:
    keep = (table["scope"] == scope) & (table["variant"] == "")
    return table[keep & (table["direction"] == direction)]


def require_impls(rows: pd.DataFrame, impls: Sequence[str], where: str, scope: str) -> None:
    missing = [impl for impl in impls if impl not in set(rows["impl"])]
    if missing or rows.empty:
        expected = ", ".join(missing) or "at least one impl"
        raise ValueError(f"table must hold {scope} rows of {expected} for {where}, got none")
    only(rows, "system")


def only(rows: pd.DataFrame, column: str) -> str:
    values = sorted(set(rows[column]))
    if len(values) != 1:
        there = ", ".join(map(str, values)) or "none"
        raise ValueError(f"table must hold one {column}, got {there}")
    return str(values[0])
