"""The houses and their rooms: imports run one way, and none in a circle."""

import ast
import sys
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

import _lib
import gdpa_kernels
import gdpa_lab

HOUSES = [Path(house.__file__).parent for house in (gdpa_kernels, gdpa_lab, _lib)]
FLOORS = (
    "calling", "device", "norms", ("gdpa", "block_attention"), ("layers", "parallel"), "hstu",
    "serving", "measuring", "report", "_lib", "notebooks",
)  # fmt: skip
"""From below; a room imports from its own floor and from those under it."""


def module_of(path: Path, house: Path) -> str:
    parts = path.relative_to(house.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


FILES = {module_of(path, house): path for house in HOUSES for path in sorted(house.rglob("*.py"))}
NOTEBOOKS = Path(_lib.__file__).parents[1]
FILES |= {module_of(x, NOTEBOOKS): x for x in sorted(NOTEBOOKS.glob("[!_]*/**/*.py"))}
"""Chapters, and beside them the modules of a part, whose names begin with an underscore."""


def imported(name: str, *, at_import: bool) -> set[str]:
    """Modules of the package that a module imports: at_import, when it is imported itself or its
    types are checked."""
    tree = ast.parse(FILES[name].read_text(encoding="utf-8"))
    skipped = set()
    for node in ast.walk(tree):
        inside = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        if at_import and inside:
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


@pytest.mark.parametrize(
    "name", ["parallel", "serving", "hstu", "layers", "norms.api", "calling.jagged"]
)
def test_a_public_module_imports_as_a_module(name):
    """The functions `gdpa` and `block_attention` hide the packages of their names; nobody needs
    another name of these."""
    room, _, module = f"gdpa_kernels.{name}".rpartition(".")
    scope: dict = {}
    exec(f"import gdpa_kernels.{name} as one\nfrom {room} import {module} as other", scope)
    assert scope["one"] is scope["other"] is sys.modules[f"gdpa_kernels.{name}"]


def floor_of(name: str) -> int | None:
    house, *rooms_in = name.split(".")
    room = house if house in ("_lib", "notebooks") else next(iter(rooms_in), "")
    for number, rooms in enumerate(FLOORS):
        if room == rooms or room in rooms and not isinstance(rooms, str):
            return number
    return None


def test_no_room_imports_from_a_floor_above():
    for name in FILES:
        if (floor := floor_of(name)) is not None:
            above = sorted(x for x in imported(name, at_import=False) if (floor_of(x) or 0) > floor)
            assert not above, f"{name} must import nothing from above, got {', '.join(above)}"


@pytest.mark.parametrize("name", [name for name in FILES if name.startswith("notebooks.")])
def test_a_module_beside_chapters_is_imported_by_its_part_alone(name):
    modules = {x for x in imported(name, at_import=False) if "._" in x}
    assert {x.rpartition(".")[0] for x in modules} <= {name.rpartition(".")[0]}


def test_a_module_of_the_library_of_chapters_serves_several_parts():
    """A module that one part uses stands beside the chapters of that part."""
    graph = {name: imported(name, at_import=False) for name in FILES}
    for name in (x for x in FILES if x.startswith("_lib.")):
        parts = {user.rpartition(".")[0] for user, used in graph.items() if name in used}
        assert len(parts) > 1 or parts == {"_lib"}, f"{name} is of {', '.join(parts) or 'nobody'}"


def private_names(tree: ast.Module) -> list[str]:
    """Names of others that begin with one underscore: of modules, and of what is no `self`."""
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            parts = f"{node.module}.{'.'.join(alias.name for alias in node.names)}".split(".")
            found += [ast.unparse(node)] * (
                parts[0] != "__future__" and any(map(_is_private, parts))
            )
        elif isinstance(node, ast.Attribute) and _is_private(node.attr):
            found += [ast.unparse(node)] * (ast.unparse(node.value) not in ("self", "cls"))
    return sorted(found)


def _is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


DOCUMENTED = ("torch._check", "._replace", "._asdict", "._field_defaults")
OWN = ("object.__new__(kind)._set", "super()._compute", "super()._resolve")
OTHERS = ("argparse._SubParsersAction",)  # the type of what add_subparsers() returns
# Its text runs in older trees, alone.
ALONE = {"gdpa_lab.measuring.machine_code"}


def test_private_names_of_pytorch_and_triton_stand_in_one_file_of_a_house():
    for name in FILES.keys() - ALONE:
        names = private_names(ast.parse(FILES[name].read_text(encoding="utf-8")))
        if name in ("gdpa_kernels.calling.private", "gdpa_lab.measuring.private"):
            assert names
        elif name.startswith("gdpa_"):
            others = [each for each in names if not each.endswith((*DOCUMENTED, *OWN, *OTHERS))]
            assert not others, name


@pytest.mark.parametrize(
    "code",
    [
        "import torch; torch._C.x()",
        "from torch._guards import x",
        "from torch.utils import _pytree",
    ],
)
def test_private_names_are_seen(code):
    assert private_names(ast.parse(code))
    assert not private_names(ast.parse("from __future__ import annotations; self._x = y.__dict__"))
