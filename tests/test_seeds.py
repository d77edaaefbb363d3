"""What a test draws depends on its name and on --seed, and on nothing that ran before."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

DRAWS = """
import json, pathlib, pytest, torch
from hypothesis import given, strategies as st

draws = {}

@pytest.mark.parametrize("name", ("a", "b"))
def test_draw(name):
    draws[name] = torch.rand(()).item()

@given(st.integers())
def test_example(example):
    draws.setdefault("examples", []).append(example)

def test_written():
    pathlib.Path("draws.json").write_text(json.dumps(draws))
"""
BACKWARDS = [f"test_draws.py::test_{name}" for name in ("example", "draw[b]", "draw[a]", "written")]


def drawn(folder: Path, *arguments: str) -> dict:
    """What the tests of DRAWS draw, in a process of their own."""
    shutil.copy(Path(__file__).parents[1] / "conftest.py", folder)
    (folder / "test_draws.py").write_text(DRAWS)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *arguments]
    subprocess.run(command, cwd=folder, check=True, stdout=subprocess.DEVNULL)
    return json.loads((folder / "draws.json").read_text())


def test_the_name_and_the_seed_decide(tmp_path):
    first, other = drawn(tmp_path), drawn(tmp_path, "--seed", "7")
    assert first["a"] != first["b"]
    assert all(first[name] != other[name] for name in ("a", "b", "examples"))
    assert drawn(tmp_path, *BACKWARDS) == first
    assert drawn(tmp_path, *BACKWARDS, "--seed", "7") == other
