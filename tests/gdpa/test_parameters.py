"""A function of a kernel has few enough parameters to be read; an entry kernel may have more."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import gdpa_kernels

PACKAGE = Path(gdpa_kernels.__file__).parent
MOST = 16
LAUNCHERS = (
    "launch",
    "_launch",
    "forward_slots",
    "backward_slots",
    "launch_gradients",
    "launch_pairs",
    "launch_tiles",
)


def launched(tree: ast.Module) -> set[str]:
    """The kernels that a file launches."""
    return {
        name.id
        for call in ast.walk(tree)
        if isinstance(call, ast.Call) and ast.unparse(call.func) in LAUNCHERS
        for name in ast.walk(call.args[0])
        if isinstance(name, ast.Name)
    }


def functions(tree: ast.Module) -> Iterator[ast.FunctionDef]:
    """The functions under `@triton.jit`, with options or without."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef) and any(
            ast.unparse(getattr(decorator, "func", decorator)) == "triton.jit"
            for decorator in node.decorator_list
        ):
            yield node


def parameters(function: ast.FunctionDef) -> int:
    arguments = function.args
    return len(arguments.posonlyargs + arguments.args + arguments.kwonlyargs)


FILES = {
    path.relative_to(PACKAGE).as_posix(): tree
    for path in sorted(PACKAGE.rglob("*.py"))
    if any(functions(tree := ast.parse(path.read_text(encoding="utf-8"))))
}


@pytest.mark.parametrize("file", FILES)
def test_functions_have_few_parameters(file):
    tree = FILES[file]
    entries = launched(tree)
    wide = {
        function.name: parameters(function)
        for function in functions(tree)
        if function.name not in entries and parameters(function) > MOST
    }
    assert not wide, f"at most {MOST} parameters, or groups of them (device/groups.py)"
