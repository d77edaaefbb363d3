"""Tables of the lab notes, which chapters quote: what no record holds is measured there."""

from __future__ import annotations

from pathlib import Path

import pandas as pd

NOTES = Path(__file__).resolve().parents[1] / "notes"


def table(page: str, column: str, other: str) -> pd.DataFrame:
    """The table of notes/<page>.md whose first column is called `column` and which has the column
    `other`; cells that are numbers are floats. LookupError unless there is one such table."""
    lines = (NOTES / f"{page}.md").read_text(encoding="utf-8").splitlines()
    heads = [
        number for number, line in enumerate(lines)
        if line.startswith(f"| {column} |") and other in _cells(line)
    ]  # fmt: skip
    if len(heads) != 1:
        raise LookupError(
            f"{page}.md must have one table of {column!r} with {other!r}, got {len(heads)}"
        )
    rows = [_cells(lines[heads[0]])]
    for line in lines[heads[0] + 2 :]:
        if not line.startswith("|"):
            break
        rows.append(_cells(line))
    return pd.DataFrame(rows[1:], columns=rows[0]).map(_number)


def _cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip().strip("|").split("|")]


def _number(cell: str) -> float | str:
    try:
        return float(cell.replace(",", ""))
    except ValueError:
        return cell
