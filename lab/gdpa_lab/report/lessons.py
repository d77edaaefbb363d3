"""How large the lessons are, and the steps between them: lines of their jit functions."""

from __future__ import annotations

import ast
import difflib
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from gdpa_kernels.calling import ladder
from gdpa_kernels.calling.rung import Rung


class Step(NamedTuple):
    """From a rung's predecessor to it: lines of jit functions that are new or gone, those of the
    rung, and all of its file."""

    operator: str
    predecessor: str
    impl: str
    changed: int
    jit: int
    file: int


def jit_lines(path: Path) -> list[str]:
    """The lines of the functions and aggregates that Triton compiles, without docstrings, comments
    and blank lines."""
    text = path.read_text(encoding="utf-8")
    lines, found = text.splitlines(), []
    for node in ast.parse(text).body:
        decorators = [ast.unparse(x) for x in getattr(node, "decorator_list", ())]
        if not any(x.startswith(("triton.jit", "triton.aggregate")) for x in decorators):
            continue
        inner = node.body[0]
        told = isinstance(inner, ast.Expr) and isinstance(inner.value, ast.Constant)
        skipped = range(inner.lineno, inner.end_lineno + 1) if told else ()
        numbers = (n for n in range(node.lineno, node.end_lineno + 1) if n not in skipped)
        found += [lines[n - 1] for n in numbers]
    return [line for line in found if line.strip() and not line.lstrip().startswith("#")]


def changed_lines(before: Path, after: Path) -> int:
    """Lines of jit functions that stand in one of two files alone."""
    found = difflib.ndiff(jit_lines(before), jit_lines(after))
    return sum(line[0] in "+-" for line in found)


def kernel_of(rung: Rung) -> Path:
    """Its lesson; of a rung that is a constant of another, that one's."""
    if jit_lines(rung.lesson) or rung.predecessor is None:
        return rung.lesson
    return kernel_of(ladder.rung(rung.predecessor, rung.operator))


def steps() -> Iterator[Step]:
    """Every step of every ladder, as the lessons show it."""
    for operator, rungs in ladder.LADDERS.items():
        for rung in rungs:
            if rung.predecessor is not None:
                yield step(operator, ladder.rung(rung.predecessor, operator), rung)


def step(operator: str, before: Rung, rung: Rung) -> Step:
    """One step."""
    changed = changed_lines(*(kernel_of(each) for each in (before, rung)))
    sizes = len(jit_lines(rung.lesson)), len(rung.lesson.read_text(encoding="utf-8").splitlines())
    return Step(operator, before.impl, rung.impl, changed, *sizes)
