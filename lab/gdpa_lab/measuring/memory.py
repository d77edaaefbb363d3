"""Keeps answers that follow from unchanging contents, so that the next process need not ask again.

The same bytes of a record, checked by the same sources, get the same answer; so does the text of a
module. A question names its contents by their SHA-256; the file, which git ignores, names the
sources that answered. If one of them changes, or the file is deleted, all is asked again.
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Callable
from contextlib import suppress
from functools import cache, wraps
from typing import Any

import numpy as np

from gdpa_lab.measuring import files

PATH = files.DATA_DIR.parent / "build" / "answers.json"
_FOLDERS = ("gdpa_kernels", "lab/gdpa_lab")


@cache
def answers() -> dict[str, Any]:
    """Return the answers that are known, by question; those added are kept by `save`."""
    try:
        sources, known = json.loads(PATH.read_text(encoding="utf-8"))
    except (OSError, TypeError, ValueError):
        return {}
    return known if sources == _sources() else {}


def remembered(function: Callable[[str], Any]) -> Callable[[str], Any]:
    """Keep the answers of a function of a text that returns a JSON value."""

    @cache
    @wraps(function)
    def answer(text: str) -> Any:
        question = f"{function.__name__} {files.digest(text.encode())}"
        if question not in answers():
            answers()[question] = function(text)
        return answers()[question]

    return answer


def save() -> None:
    """Replace the file by what is known now."""
    with suppress(OSError):  # a checkout that cannot be written asks each time
        files.rewrite(PATH, json.dumps([_sources(), answers()]))


@cache
def _sources() -> str:
    """Hash all that an answer may depend on beside its question."""
    root = files.DATA_DIR.parent
    paths = [path for name in _FOLDERS for path in (root / name).rglob("*") if path.is_file()]
    hashed = hashlib.sha256(f"{sys.version} {np.__version__}".encode())
    for path in sorted(path for path in paths if path.suffix in (".py", ".json")):
        hashed.update(f"{path}\n".encode() + path.read_bytes())
    return hashed.hexdigest()
