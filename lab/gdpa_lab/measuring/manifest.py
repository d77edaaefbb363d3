"""The manifest of a data folder: the SHA-256 of every file in it.

`manifest.sha256` has a line "<64 hex digits>  <path>" for each file, as `sha256sum -c` reads it,
except *.md and community/<handle>/, which has its own. If present, it is enforced: files that are
not listed, differ or are missing are refused. The repository's own folder must have one.

Lines of records/ and systems/ are append-only: a line that a commit of the folder's history has and
the file lacks is refused too. This detects accidents, not authors: whoever rewrites the history can
write anything.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator
from pathlib import Path

from gdpa_lab.measuring import git

NAME = "manifest.sha256"
DATA_DIR = Path(__file__).resolve().parents[3] / "data"

COMMUNITY = "community"
PARTIAL = "partial"

_LINE = re.compile(r"([0-9a-f]{64})  ([^/\s.][^\s]*)\n")
_APPENDED = ("records/", "systems/")


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
            raise RecordError(path, "must list the files of the folder, and is missing")
        return None
    digests: dict[str, str] = {}
    for number, line in enumerate(_read(path).decode(errors="replace").splitlines(True), 1):
        match = _LINE.fullmatch(line)
        if match is None or match[2] in digests:
            expected = "a SHA-256, two spaces and a file not listed before"
            raise RecordError(path, f"line {number} must be {expected}, got {line!r:.120}")
        digests[match[2]] = match[1]
    return digests


def problems(data_dir: str | Path) -> list[RecordError]:
    """What is wrong with a folder beside its records: a file that is not listed, differs or is
    gone, and a line of records/ or systems/ that its history has and the manifest has not."""
    data_dir = Path(data_dir)
    try:
        lines = listed(data_dir)
    except RecordError as error:
        return [error]
    if lines is None:
        if any(_history(data_dir)):
            return [RecordError(data_dir / NAME, "is missing, and was committed")]
        return []
    errors = []
    for name in sorted({*_others(data_dir), *(n for n in lines if not n.startswith("records/"))}):
        try:
            contents(data_dir / name, _expected(data_dir / name, lines.get(name)))
        except RecordError as error:
            errors.append(error)
    for name, sha256 in _history(data_dir):
        if lines.get(name) != sha256:
            reason = f"must list {name} with {sha256}, as a commit of its history does"
            errors.append(RecordError(data_dir / NAME, f"{reason}: lines are only added"))
    return errors


def verify(data_dir: str | Path) -> None:
    """RecordError naming everything in `problems`."""
    errors = problems(data_dir)
    if errors:
        named = "".join(f"\nrefused {error}" for error in errors)
        raise RecordError(Path(data_dir), f"{len(errors)} refused{named}")


def expected(path: Path) -> str | None:
    """SHA-256 that `path`, a file of records/ or systems/, must have; None without a manifest.

    RecordError if there is a manifest and it does not list the file.
    """
    digests = listed(path.parent.parent)
    if digests is None:
        return None
    return _expected(path, digests.get(f"{path.parent.name}/{path.name}"))


def _expected(path: Path, sha256: str | None) -> str:
    if sha256 is None:
        raise RecordError(path, f"must be listed in {NAME}, and is not")
    return sha256


def _others(data_dir: Path) -> Iterator[str]:
    """Paths of the files that the manifest must list, but for records."""
    for path in data_dir.rglob("*"):
        name = path.relative_to(data_dir).as_posix()
        apart = name.split("/")[0] in ("records", COMMUNITY, PARTIAL)
        hidden = any(part.startswith(".") for part in name.split("/"))
        if path.is_file() and name != NAME and path.suffix != ".md" and not apart and not hidden:
            yield name


def _history(data_dir: Path) -> Iterator[tuple[str, str]]:
    """(path, SHA-256) of each record and system that a commit added to the manifest; nothing
    outside a git checkout, and in a shallow one only what its oldest commit has."""
    options = ("--format=", "-p", "--unified=0", "--no-ext-diff", "--", NAME)
    for line in (git.answer(data_dir, "log", *options) or "").splitlines():
        match = _LINE.fullmatch(f"{line[1:]}\n") if line.startswith("+") else None
        if match is not None and match[2].startswith(_APPENDED):
            yield match[2], match[1]


def contents(path: Path, sha256: str | None) -> bytes:
    """What the file holds; RecordError if it cannot be read or its SHA-256 is not `sha256`."""
    data = _read(path)
    if sha256 not in (None, digest(data)):
        raise RecordError(path, f"SHA-256 must be {sha256} ({NAME}), got {digest(data)}")
    return data


def add(path: Path) -> None:
    """List a new file of records/ or systems/ in the manifest of its folder, if that has one."""
    manifest = path.parent.parent / NAME
    if listed(manifest.parent) is not None:
        with manifest.open("a", encoding="utf-8") as file:
            file.write(f"{digest(_read(path))}  {path.parent.name}/{path.name}\n")


def update(data_dir: str | Path) -> bool:
    """List all files that may change as they are now; whether the manifest changed. Lines of
    records/ and systems/ stay as they are."""
    data_dir = Path(data_dir)
    matches = map(_LINE.fullmatch, _read(data_dir / NAME).decode().splitlines(True))
    appended = {line[2]: line[1] for line in matches if line and line[2].startswith(_APPENDED)}
    names = sorted(name for name in _others(data_dir) if not name.startswith(_APPENDED))
    lines = {name: digest(_read(data_dir / name)) for name in names} | appended
    text = "".join(f"{sha256}  {name}\n" for name, sha256 in lines.items())
    return rewrite(data_dir / NAME, text)


def rewrite(path: Path, text: str) -> bool:
    """Write a file that is made from others; whether that changed it."""
    changed = not path.exists() or path.read_text(encoding="utf-8") != text
    if changed:  # others may be reading it
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    return changed


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
