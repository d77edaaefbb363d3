"""The package stands alone."""

import ast
from pathlib import Path

import pytest

import tritonemu

PACKAGE = Path(tritonemu.__file__).parent
FOREIGN = {"gdpa_kernels", "tests", "notebooks"}


def imported(path: Path) -> set[str]:
    """The first parts of all modules that a file imports by their whole names."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            found.add(node.module.partition(".")[0])
    return found


@pytest.mark.parametrize("path", sorted(PACKAGE.rglob("*.py")), ids=lambda path: path.stem)
def test_it_imports_nothing_of_the_repository_it_lies_in(path):
    assert not imported(path) & FOREIGN
    assert "gdpa_kernels" not in path.read_text(encoding="utf-8")


def test_versions_agree():
    for name, line in (("pyproject.toml", 'version = "{}"\n'), ("CHANGELOG.md", "## {}\n")):
        text = (PACKAGE.parent / name).read_text(encoding="utf-8")
        assert line.format(tritonemu.__version__) in text
