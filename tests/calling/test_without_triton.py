"""Where Triton cannot be imported, as on macOS and Windows, models still run: by the definition."""

import subprocess
import sys
from pathlib import Path

SMOKE = Path(__file__).parents[1] / "packages" / "smoke.py"
PROGRAM = """
import runpy, sys

class Block:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "triton":
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Block())
import importlib.util

find = importlib.util.find_spec
importlib.util.find_spec = lambda name: None if name == "triton" else find(name)
"""


def test_the_definition_runs_without_triton():
    program = f"{PROGRAM}\nrunpy.run_path({str(SMOKE)!r})['main']('none')"
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    assert "Triton cannot be imported" in ran.stdout and ran.stdout.endswith("runs\n")
