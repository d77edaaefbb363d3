"""The houses and their rooms: imports run one way, and none in a circle."""

from __future__ import annotations

import ast
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

import _lib
import gdpa_kernels
import gdpa_lab

HOUSES = [Path(house.__file__).parent for house in (gdpa_kernels, gdpa_lab, _lib)]
FLOORS = ("calling", "device", "norms", ("gdpa", "block_attention"), "measuring", "report", "_lib")
"""From below; a room imports from its own floor and from those under it."""


def module_of(path: Path, house: Path) -> str:
    parts = path.relative_to(house.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


FILES = {module_of(path, house): path for house in HOUSES for path in sorted(house.rglob("*.py"))}


def imported(name: str, *, at_import: bool) -> set[str]:
    """Modules of the package that a module imports: at_import, when it is imported itself."""
    tree = ast.parse(FILES[name].read_text(encoding="utf-8"))
    skipped = set()
    for node in ast.walk(tree):
        inside = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        typing = isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
        if at_import and (inside or typing):
            skipped |= set(map(id, ast.walk(node)))
    package = name if FILES[name].name == "__init__.py" else name.rpartition(".")[0]
    found = set()
    for node in ast.walk(tree):
        if id(node) in skipped:
            continue
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                above = package.split(".")[: len(package.split(".")) - node.level + 1]
                base = ".".join([*above, *filter(None, [node.module])])
            names = {f"{base}.{alias.name}" for alias in node.names}
            found |= {each if each in FILES else base for each in names}
    return {each for each in found if each in FILES and each != name}


def test_no_module_imports_itself_by_way_of_others():
    graph = {name: imported(name, at_import=True) for name in FILES}
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        pytest.fail(f"imports must not run in a circle, got {' -> '.join(error.args[1])}")


def floor_of(name: str) -> int | None:
    house, *rooms_in = name.split(".")
    room = house if house == "_lib" else next(iter(rooms_in), "")
    for number, rooms in enumerate(FLOORS):
        if room == rooms or room in rooms and not isinstance(rooms, str):
            return number
    return None


@pytest.mark.parametrize("name", [name for name in FILES if floor_of(name) is not None])
def test_no_room_imports_from_a_floor_above(name):
    own = floor_of(name)
    above = sorted(x for x in imported(name, at_import=False) if (floor_of(x) or 0) > own)
    assert not above, f"{name} must import nothing from above, got {', '.join(above)}"


PRIVATE = {"gdpa_kernels.calling.operators"}


@pytest.mark.parametrize("name", FILES)
def test_private_names_of_pytorch_stand_in_one_file(name):
    text = FILES[name].read_text(encoding="utf-8")
    assert "triton._C" not in text
    for private in ("torch._C", "_subclasses", "_mode_utils"):
        assert name in PRIVATE or private not in text, private
