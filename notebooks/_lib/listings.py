"""Kernels as a chapter shows them: what its calls do not ask for is left out."""

from __future__ import annotations

import ast
import textwrap
from typing import Any

from gdpa_lab.report.page_blocks import source_of


def decided(function: Any, **values: object) -> str:
    """The source of a kernel, each `if` that these values of its arguments decide replaced by the
    branch that is taken. ValueError if they decide none."""
    text = source_of(function)
    count = 0
    while branch := _first(text, values):
        node, taken = branch
        lines = text.splitlines()
        body = lines[taken[0].lineno - 1 : taken[-1].end_lineno] if taken else []
        body = textwrap.indent(textwrap.dedent("\n".join(body)), " " * node.col_offset)
        text = "\n".join([
            *lines[: node.lineno - 1], *body.splitlines(), *lines[node.end_lineno :]
        ])  # fmt: skip
        count += 1
    if not count:
        raise ValueError(f"an `if` must be decided by {', '.join(values)}, got none")
    return text


def _first(text: str, values: dict[str, object]) -> tuple[ast.If, list[ast.stmt]] | None:
    """The first `if` whose condition needs these names alone, and what it does."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.If):
            names = {x.id for x in ast.walk(node.test) if isinstance(x, ast.Name)}
            if names and names <= values.keys():
                return node, node.body if _is_true(node.test, values) else node.orelse
    return None


def _is_true(test: ast.expr, values: dict[str, object]) -> bool:
    return bool(eval(compile(ast.Expression(test), "<if>", "eval"), {"__builtins__": {}}, values))
