"""The package stands alone."""

import ast
from pathlib import Path

import pytest

import tritonemu

PACKAGE = Path(tritonemu.__file__).parent
FOREIGN = {"gdpa_kernels", "gdpa_lab", "tests", "notebooks"}


def imported(path: Path) -> set[str]:
    """The first parts of all modules that a file imports by their whole names."""
    modules = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            modules |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            modules.add(node.module.partition(".")[0])
    return modules


@pytest.mark.parametrize("folder", (PACKAGE, Path(__file__).parent), ids=lambda path: path.name)
def test_it_and_its_tests_import_nothing_of_the_repository_they_lie_in(folder):
    for path in folder.rglob("*.py"):
        assert not imported(path) & FOREIGN, path
        named = "gdpa_kernels" in path.read_text(encoding="utf-8")
        assert not named or path == Path(__file__), path


def test_tests_that_need_tlx_are_told_by_their_marker():
    """Files take TLX from `checking`, where a call fails without fbtriton: no test is skipped."""
    upstream = 0
    for path in Path(__file__).parent.glob("test_*.py"):
        text = path.read_text(encoding="utf-8")
        modules = {
            alias.name
            for node in ast.walk(ast.parse(text))
            if isinstance(node, ast.Import)
            for alias in node.names
        }
        assert not any(module.endswith("tlx") for module in modules), path
        assert path == Path(__file__) or 'importorskip("triton' not in text, path
        upstream += "\npytestmark = pytest.mark.tlx\n" not in text
    assert upstream >= 20


def test_versions_agree():
    for name, line in (("pyproject.toml", 'version = "{}"\n'), ("CHANGELOG.md", "## {}\n")):
        text = (PACKAGE.parent / name).read_text(encoding="utf-8")
        assert line.format(tritonemu.__version__) in text
