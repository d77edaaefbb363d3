"""The exercises in their order. Reading the list needs no PyTorch; `grading.exercise_of` does.

An exercise NAME is a folder: `exercise.py`, whose EXERCISE says what is judged, `solution.py`, of
which the reader's file is made, and `wrong.py`, whose WRONG are typical wrong answers.
"""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import NamedTuple

from exercises.blanks import blank_of

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
    "rows": Entry("A first kernel", "operator/gdpa", 10, "blocks that are not whole"),
    "lengths": Entry("A sum per sequence", "operator/workloads", 15, "empty and long sequences"),
    "activate": Entry(
        "GELU in one MUFU an element", "operator/activations", 20, "MUFU instructions"
    ),
    "phases": Entry(
        "One buffer, two barriers", "tools/emulator", 30, "both parities, for 1 to 12 blocks"
    ),
    "tiled": Entry("One tiled kernel", "forward/v1_tiled", 30, "bytes loaded, beside v1"),
    "tma": Entry(
        "Copies that end by themselves", "forward/v2_tma", 25, "TMA instructions; bytes loaded"
    ),
    "list": Entry("A list of tiles", "forward/v3_persistent", 25, "each tile once"),
    "ring": Entry(
        "A producer, two consumers and a ring", "forward/first_tlx_kernel", 60,
        "both parities of every barrier; cycles, beside v4",
    ),
    "predict": Entry(
        "Predict the cycles of a tile", "forward/v4_warp_specialized", 20, "predictions within 15 %"
    ),
    "pingpong": Entry(
        "The activation beside an MMA", "forward/v5_pingpong", 45, "cycles, at most 5 % above ours"
    ),
    "bug": Entry("Find the bug in a ring", "forward/v6_short_kv", 20, "one line may differ"),
    "by_hand": Entry("The gradients of a tile", "backward/by_hand", 45, "each gradient by itself"),
    "dq": Entry(
        "Programs that add to one dQ", "backward/v2_fused_backward", 40,
        "no lost update; whether the bits depend on the order",
    ),
    "block": Entry("Softmax in one tile", "block/v1_one_tile", 30, "short blocks, large scores"),
    "tensor_memory": Entry(
        "S, P and O in tensor memory", "blackwell/tensor_memory", 60,
        "compiled for sm_100; cycles, beside b1",
    ),
}  # fmt: skip


def wrong_of(name: str) -> dict[str, Wrong]:
    return importlib.import_module(f"{__name__}.{name}.wrong").WRONG


def solution_of(name: str) -> str:
    """The text of a solution, with its markers."""
    return (FOLDER / name / "solution.py").read_text(encoding="utf-8")


def blank(name: str) -> str:
    """The file that the reader begins with."""
    return blank_of(solution_of(name))
