"""The predictions of all chapters, judged: why some were refuted, and what that teaches."""

from __future__ import annotations

from pathlib import Path

import pandas as pd

from gdpa_lab.report import registered

CAUSES = (
    "dependency chain", "overlap", "instructions", "compiler", "L2 and memory", "fixed cost",
    "power", "host", "lengths", "numerics", "noise", "model", "baseline", "code changed",
)  # fmt: skip
"""Why predictions were refuted."""


def judged(executed: Path = registered.EXECUTED, path: Path = registered.PATH) -> pd.DataFrame:
    """`registered.collected` by id, with `standing`, `cause` and `lesson` of the file. ValueError
    naming the predictions whose line is missing, has other limits or, if refuted, no cause, and
    those lines that no chapter shows."""
    lines, predictions = registered.load(path), registered.collected(executed).set_index("id")
    wrong = [
        name
        for name, row in predictions.iterrows()
        if name not in lines.index
        or lines.loc[name, "limits"] != row["limits"]
        or (row["word"] == "refuted" and lines.loc[name, "cause"] not in CAUSES)
    ]
    wrong += [name for name in lines.index if name not in predictions.index]
    if wrong:
        raise ValueError(
            f"{path.name} must have a line for each prediction, with its limits and, if refuted, "
            f"a cause: python -m gdpa_lab maintain registered; not so for {', '.join(wrong)}"
        )
    lines = lines.loc[predictions.index]
    return predictions.assign(
        standing=[registered.standing(line) for _, line in lines.iterrows()],
        cause=lines["cause"].where(predictions["word"] == "refuted", ""),
        lesson=lines["lesson"],
    )
