"""The manifest of a data folder: the SHA-256 of every record and every system in it.

`manifest.sha256` has a line "<64 hex digits>  records/<id>.json" for each file of records/ and
systems/, so `sha256sum -c` checks it too. A folder with this file is held to it: what is not listed
or differs is refused. A folder without it has nothing to be held to, and what is written there is
not listed; the repository's own folder must have one.
"""

from __future__ import annotations

import hashlib
import re
from pathlib import Path

NAME = "manifest.sha256"
DATA_DIR = Path(__file__).resolve().parents[2] / "data"

_LINE = re.compile(r"([0-9a-f]{64})  ((?:records|systems)/[^/\n]+)\n")


class RecordError(ValueError):
    """A file of a data folder that cannot be used: `file` is its path and `reason` says why."""

    def __init__(self, file: str | Path, reason: str) -> None:
        self.file = Path(file)
        self.reason = reason
        super().__init__(f"{self.file.parent.name}/{self.file.name}: {reason}")


def listed(data_dir: str | Path) -> dict[str, str] | None:
    """SHA-256 of each file, by its path in `data_dir`; None if there is no manifest.

    RecordError if a line is damaged or a file is listed twice, or if the repository has none.
    """
    path = Path(data_dir) / NAME
    if not path.exists():
        if path.parent.resolve() == DATA_DIR:
            raise RecordError(path, "must list the files of records/ and systems/, and is missing")
        return None
    found: dict[str, str] = {}
    for number, line in enumerate(_read(path).decode(errors="replace").splitlines(True), 1):
        match = _LINE.fullmatch(line)
        if match is None or match[2] in found:
            expected = "a SHA-256, two spaces and a file of records/ or systems/ not listed before"
            raise RecordError(path, f"line {number} must be {expected}, got {line!r:.120}")
        found[match[2]] = match[1]
    return found


def expected(path: Path) -> str | None:
    """SHA-256 that `path`, a file of records/ or systems/, must have; None without a manifest.

    RecordError if there is a manifest and it does not list the file.
    """
    found = listed(path.parent.parent)
    if found is None:
        return None
    name = f"{path.parent.name}/{path.name}"
    if name not in found:
        raise RecordError(path, f"must be listed in {NAME}, and is not")
    return found[name]


def contents(path: Path, sha256: str | None) -> bytes:
    """What the file holds; RecordError if it cannot be read or its SHA-256 is not `sha256`."""
    found = _read(path)
    if sha256 not in (None, digest(found)):
        raise RecordError(path, f"SHA-256 must be {sha256} ({NAME}), got {digest(found)}")
    return found


def add(path: Path) -> None:
    """List the file in the manifest of its folder, if that has one."""
    manifest = path.parent.parent / NAME
    if listed(manifest.parent) is not None:
        with manifest.open("a", encoding="utf-8") as file:
            file.write(f"{digest(_read(path))}  {path.parent.name}/{path.name}\n")


def digest(contents: bytes) -> str:
    """SHA-256, hex digits."""
    return hashlib.sha256(contents).hexdigest()


def _read(path: Path) -> bytes:
    try:
        if path.exists() and not path.is_file():
            raise RecordError(path, "must be a file")
        return path.read_bytes()
    except OSError as error:
        raise RecordError(path, f"cannot be read: {error.strerror}") from error
