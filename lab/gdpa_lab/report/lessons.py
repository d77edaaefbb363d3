"""Counts the lines of compiled code of lessons and of the steps between them."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from difflib import SequenceMatcher, unified_diff
from pathlib import Path
from typing import NamedTuple

from gdpa_kernels.calling import ladder
from gdpa_kernels.calling.rung import PACKAGE, Rung


class Step(NamedTuple):
    """A step from a rung's predecessor to the rung, in lines of their lessons. `changed`: compiled
    code that only one of them has; `jit`: compiled code of the rung; `file`: its whole file."""

    operator: str
    predecessor: str
    impl: str
    is_rewrite: bool
    changed: int
    jit: int
    file: int


def steps() -> Iterator[Step]:
    """Yield every step of every ladder."""
    for operator, rungs in ladder.LADDERS.items():
        for rung in rungs:
            if rung.predecessor is None or not rung.requires.capability:
                continue
            predecessor = ladder.rung(rung.predecessor, operator)
            jit, file = len(jit_lines(rung.lesson)), len(rung.lesson.read_text().splitlines())
            changed = changed_lines(kernel_of(predecessor), kernel_of(rung))
            yield Step(operator, predecessor.impl, rung.impl, rung.is_rewrite, changed, jit, file)


def kernel_of(rung: Rung) -> Path:
    """Return the file of its lesson; a rung that only changes a constant has its predecessor's."""
    if jit_lines(rung.lesson) or rung.predecessor is None:
        return rung.lesson
    return kernel_of(ladder.rung(rung.predecessor, rung.operator))


def file_diff(rung: Rung) -> str:
    """Return what changed from the lesson of a rung's predecessor to its own, as a unified diff."""
    files = [ladder.rung(rung.predecessor, rung.operator).lesson, rung.lesson]
    lines = [file.read_text().splitlines(keepends=True) for file in files]
    return "".join(unified_diff(*lines, *(x.relative_to(PACKAGE).as_posix() for x in files), n=2))


def report() -> str:
    """Format the steps as a Markdown table."""
    rows = ["| step | changed jit lines | jit lines | file lines |", "|:--|--:|--:|--:|"]
    for step in steps():
        name = f"{step.operator}: {step.predecessor} -> {step.impl}"
        name += ", a rewrite" if step.is_rewrite else ""
        rows.append(f"| {name} | {step.changed} | {step.jit} | {step.file} |")
    return "\n".join(rows) + "\n"


def changed_lines(old: Path, new: Path) -> int:
    """Count lines of compiled code that only one of two files has."""
    one, other = jit_lines(old), jit_lines(new)
    match = SequenceMatcher(None, one, other, autojunk=False)
    return len(one) + len(other) - 2 * sum(block.size for block in match.get_matching_blocks())


def jit_lines(path: Path) -> list[str]:
    """List the lines of `jit_functions` without docstrings, comments and blank lines."""
    code: list[str] = []
    for node, lines in jit_functions(path):
        doc = node.body[0] if ast.get_docstring(node) is not None else None
        begin = node.lineno
        skipped = range(doc.lineno - begin, doc.end_lineno - begin + 1) if doc else ()
        code += [line for n, line in enumerate(lines) if n not in skipped]
    return [line for line in code if line.strip() and not line.lstrip().startswith("#")]


def jit_functions(path: Path) -> list[tuple[ast.FunctionDef | ast.ClassDef, list[str]]]:
    """List the functions and aggregates of a file that Triton compiles, with their lines."""
    lines = path.read_text(encoding="utf-8").splitlines()
    return [
        (node, lines[node.lineno - 1 : node.end_lineno])
        for node in ast.parse("\n".join(lines)).body
        if any(
            ast.unparse(each).startswith(("triton.jit", "triton.aggregate"))
            for each in getattr(node, "decorator_list", ())
        )
    ]
