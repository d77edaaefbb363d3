"""Predictions of the chapters: their outcomes, and whether git had each before its record.

data/predictions/h200.csv has a line for each `Chapter.predict`. `derive` writes it: `text` and
`limits` are those of the executed chapters, `commit` and `date` of the first commit in which the
file `path` has the words `quote`. Reviewed are `path` and `quote`; `record`, the first one that
could judge; `known`, from what the answer was known before; `cause` and `lesson` of a refuted one.

    python -m gdpa_lab maintain registered        # after `make book`: rewrites the file
"""

from __future__ import annotations

from datetime import datetime
from pathlib import Path
from typing import NamedTuple

import pandas as pd

from gdpa_lab.measuring import files, git
from gdpa_lab.measuring import record as records

PATH = records.DATA_DIR / "predictions" / "h200.csv"
EXECUTED = records.ROOT / "book" / "executed"
EVIDENCE = ["path", "quote", "record"]
COLUMNS = ["id", "text", "limits", "commit", "date", *EVIDENCE, "known", "cause", "lesson"]


class Verdict(NamedTuple):
    """Verdict on a prediction. `word`: "confirmed" or "refuted". `margin`: distance to the nearest
    limit as a share of it, negative outside; None beside a limit of 0."""

    word: str
    margin: float | None

    def __str__(self) -> str:
        if self.margin is None:
            return f"**{self.word}**"
        side, share = "outside" if self.word == "refuted" else "inside", 100 * abs(self.margin)
        return f"**{self.word}**, {share:.{0 if share >= 10 else 1}f} % {side}"


def verdict(result: float, least: float, most: float) -> Verdict:
    """Judge a finite `result` by its limits."""
    limit = least if result - least < most - result else most
    slack = min(result - least, most - result)
    return Verdict("refuted" if slack < 0 else "confirmed", slack / abs(limit) if limit else None)


def decisive(values: pd.Series, least: float, most: float) -> object:
    """Return the label of the value farthest outside the limits, or nearest to one."""
    return pd.concat([values - least, most - values], axis=1).min(axis=1).idxmin()


def load(path: Path = PATH) -> pd.DataFrame:
    """Read the lines of the file by id, "" where nothing stands."""
    return pd.read_csv(path, dtype=str, keep_default_na=False).set_index("id")


def standing(line: pd.Series | None) -> str:
    """Classify a prediction: "predicted" if git had it before its record and nothing had revealed
    it, "known before" if something had, else "expected"."""
    if line is None:
        return "expected"
    if line["known"]:
        return "known before"
    return "predicted" if line["date"] and _precedes(line["date"], line["record"]) else "expected"


def line(name: str, limits: str) -> pd.Series | None:
    """Return the line of this id, if it has these limits."""
    lines = load()
    same = name in lines.index and lines.loc[name, "limits"] == limits
    return lines.loc[name] if same else None


def message(line: pd.Series | None) -> str:
    """Format `standing` for a page, with commit and date."""
    word = standing(line)
    if word == "predicted":
        return f"Predicted (commit {line['commit'][:7]}, {line['date'][:10]})"
    return f"Known before ({line['known']})" if word == "known before" else "Expected"


def _precedes(date: str, record: str) -> bool:
    recorded = datetime.strptime(f"{record[:16]}+0000", "%Y%m%dT%H%M%SZ%z")
    return datetime.fromisoformat(date) < recorded


def collected(executed: Path = EXECUTED) -> pd.DataFrame:
    """Collect the predictions of executed chapters: id, text, limits, found, word, margin; as
    numbers value, least and most, None for none; and the chapter, which an id may name by an older
    one."""
    import nbformat  # of the extra "book"

    predictions = [
        {**output.metadata["prediction"], "chapter": f"{path.parent.name}/{path.stem}"}
        for path in sorted(executed.glob("*/*.ipynb"))
        for cell in nbformat.read(path, as_version=4).cells
        for output in cell.get("outputs", [])
        if "prediction" in output.get("metadata", {})
    ]
    numbers = ["value", "least", "most"]
    columns = ["id", "text", "limits", "found", "word", "margin", *numbers, "chapter"]
    return pd.DataFrame(predictions, columns=columns)


def derive(predictions: pd.DataFrame, lines: pd.DataFrame) -> pd.DataFrame:
    """Derive the file: text and limits of `predictions` (`collected`), reviewed columns from
    `lines`, commits from git. A change of limits clears the evidence for review."""
    rows = predictions.set_index("id")[["text", "limits"]].join(
        lines.drop(columns=["text", "limits"])
    )
    rows = rows.fillna("")
    previous = lines["limits"].reindex(rows.index)
    rows.loc[previous.notna() & (previous != rows["limits"]), EVIDENCE] = ""
    held = [_first(row["path"], row["quote"]) for _, row in rows.iterrows()]
    rows["commit"], rows["date"] = zip(*held, strict=True)
    return rows.reset_index()[COLUMNS]


def _first(path: str, quote: str) -> tuple[str, str]:
    """Return hash and date of the first commit whose `path` has the words `quote`; "" without
    words. LookupError if there is none."""
    if not quote:
        return "", ""
    search = ("log", "--reverse", "--format=%H %cI", "-S", quote, "--", path)
    log = git.output(records.ROOT, *search).splitlines()
    if not log:
        raise LookupError(f"a commit must add {quote!r} to {path}, got none")
    commit, date = log[0].split()
    return commit, date


def update() -> bool:
    """Rewrite the file; return whether it changed."""
    text = derive(collected(), load()).to_csv(index=False, lineterminator="\n")
    return files.rewrite(PATH, text)
