"""What the chapters do to a rung to show what a line of it is for: a changed copy of it."""

from __future__ import annotations

import importlib.util
import sys
import tempfile
from functools import cache
from pathlib import Path
from types import ModuleType


@cache
def _folder() -> tempfile.TemporaryDirectory:
    """Where changed sources lie until the process ends: Triton reads them when it compiles."""
    return tempfile.TemporaryDirectory()


def changed(module: ModuleType, *changes: tuple[str, str]) -> ModuleType:
    """A copy of `module`, pieces of its source replaced: (old, new), one after the other.

    `measure.measure`, as the option `module` of a rung, and `compile_check` take it for the rung.
    Raises ValueError unless each `old` occurs once.
    """
    text = Path(module.__file__).read_text(encoding="utf-8")
    for old, new in changes:
        if text.count(old) != 1:
            raise ValueError(f"old must occur once in {module.__name__}, got {old!r}")
        text = text.replace(old, new)
    path = Path(tempfile.mkdtemp(dir=_folder().name)) / Path(module.__file__).name
    path.write_text(text, encoding="utf-8")
    spec = importlib.util.spec_from_file_location(f"changed_{path.parent.name}", path)
    made = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = made
    spec.loader.exec_module(made)
    return made
