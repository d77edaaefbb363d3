"""Files of a data folder: where they are, how one is read, hashed and rewritten."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

DATA_DIR = Path(__file__).resolve().parents[3] / "data"
COMMUNITY = "community"
PARTIAL = "partial"


class RecordError(ValueError):
    """A file of a data folder that cannot be used: `file` is its path and `reason` says why."""

    def __init__(self, file: str | Path, reason: str) -> None:
        self.file = Path(file)
        self.reason = reason
        super().__init__(f"{self.file.parent.name}/{self.file.name}: {reason}")


def read(path: Path) -> bytes:
    """Return what a file holds; RecordError if it is none or cannot be read."""
    try:
        if path.exists() and not path.is_file():
            raise RecordError(path, "must be a file")
        return path.read_bytes()
    except OSError as error:
        raise RecordError(path, f"cannot be read: {error.strerror}") from error


def rewrite(path: Path, text: str) -> bool:
    """Write a file that is made from others, at once; return whether that changed it."""
    changed = not path.exists() or path.read_text(encoding="utf-8") != text
    if changed:  # others may be reading it
        path.parent.mkdir(parents=True, exist_ok=True)
        written = path.with_suffix(f".{os.getpid()}")
        written.write_text(text, encoding="utf-8")
        written.replace(path)
    return changed


def digest(contents: bytes) -> str:
    """Return the SHA-256, hex digits."""
    return hashlib.sha256(contents).hexdigest()
