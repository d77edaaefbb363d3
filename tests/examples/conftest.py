"""The examples are scripts beside each other: their folder is where they find one another."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples"))
