"""Reads a git checkout and its history."""

from __future__ import annotations

import io
import subprocess
from collections.abc import Iterable, Iterator
from pathlib import Path


def output(root: str | Path, *arguments: str, stdin: str = "") -> str:
    """Return the output of a git command in `root`; CalledProcessError if it fails."""
    return _run(root, *arguments, stdin=stdin).decode()


def answer(root: str | Path, *arguments: str) -> str | None:
    """Return the output of a git command in `root`, or None if it fails or git is missing."""
    try:
        return output(root, *arguments).strip()
    except (OSError, subprocess.CalledProcessError):
        return None


def contents(root: str | Path, names: Iterable[str]) -> Iterator[bytes | None]:
    """Yield the contents of objects (hashes, or COMMIT:PATH) in order, None for a missing one."""
    stream = io.BytesIO(_run(root, "cat-file", "--batch", stdin="".join(f"{n}\n" for n in names)))
    for head in stream:
        size = head.split()[-1]
        yield None if size == b"missing" else stream.read(int(size) + 1)[:-1]


def _run(root: str | Path, *arguments: str, stdin: str) -> bytes:
    command = ["git", "-C", str(root), *arguments]
    return subprocess.run(command, input=stdin.encode(), capture_output=True, check=True).stdout
