"""The exercises in their order. Reading the list needs no PyTorch; `exercise_of` does.

An exercise NAME is a folder: `exercise.py`, whose EXERCISE says what is judged, `solution.py`, of
which the reader's file is made, and `wrong.py`, whose WRONG are typical wrong answers.
"""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from exercises.grading import Exercise

FOLDER = Path(__file__).parent


class Entry(NamedTuple):
    """chapter: after which it comes. minutes: for a reader of that. judged: beside right and free
    of findings."""

    title: str
    chapter: str
    minutes: int
    judged: str


class Wrong(NamedTuple):
    """A typical wrong answer: edits of the solution, the hint that it gets, text of the line that
    the hint names."""

    edits: list[tuple[str, str]]
    hint: str
    line: str = ""


CATALOGUE = {
    "tiled": Entry("One tiled kernel", "forward/v1_tiled", 30, "bytes loaded, beside v1"),
    "predict": Entry(
        "Predict the cycles of a tile", "forward/v4_warp_specialized", 20, "predictions within 15 %"
    ),
    "ring": Entry(
        "A producer, two consumers and a ring", "forward/v4_warp_specialized", 60,
        "both parities of every barrier; cycles, beside v4",
    ),
    "bug": Entry(
        "Find the bug: a ring that goes on turning", "forward/v6_short_kv", 20,
        "one line may differ",
    ),
}  # fmt: skip


def exercise_of(name: str) -> Exercise:
    exercise = importlib.import_module(f"{__name__}.{name}.exercise").EXERCISE
    exercise.name = name
    return exercise


def wrong_of(name: str) -> dict[str, Wrong]:
    return importlib.import_module(f"{__name__}.{name}.wrong").WRONG


def solution_of(name: str) -> str:
    """The text of a solution, with its markers."""
    return (FOLDER / name / "solution.py").read_text(encoding="utf-8")
