"""Compares a data folder with its git history, so that what a commit first held stays.

Files of records/ and systems/ stay byte for byte. Of the tables in published/ and predictions/ and
of claims.yml each row stays: a cell that was empty may be filled, a row may be added. A change that
was reviewed stands in corrections.csv: the file, a pattern of what it held, and the reason.

Only what is in the folder's own history is compared: nothing without git, and in a shallow clone
what its oldest commit has. This finds accidents, not authors, who can rewrite a history.
"""

from __future__ import annotations

import csv
import hashlib
import io
import re
from collections.abc import Iterator
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path

from gdpa_lab.measuring import files, git
from gdpa_lab.measuring.files import RecordError

CORRECTIONS = "corrections.csv"
_FILES = ("records/", "systems/")
_TABLES = ("published/", "predictions/", "claims.yml", CORRECTIONS)
_SAID = {"text", "cause", "lesson"}  # of a prediction, in words that may improve
_CLAIM = re.compile(r"^    (value|unit|hardware): (.+)$", re.MULTILINE)


def problems(data_dir: str | Path) -> list[RecordError]:
    """List what is not as a commit of the folder's history first held it."""
    data_dir = Path(data_dir).absolute()
    head = git.answer(data_dir, "rev-parse", "HEAD")
    held = _held(data_dir, head) if head else {}
    return [RecordError(data_dir / x, why) for x in held for why in _changes(data_dir, x, held[x])]


@cache
def _held(data_dir: Path, head: str) -> dict[str, list[str]]:
    """Names of files that a commit up to `head` has, with the objects that they were, oldest
    first."""
    options = ("--full-history", "--raw", "--no-abbrev", "--no-renames", "--relative", "--format=")
    log = git.answer(data_dir, "log", "--reverse", *options, "--", *_FILES, *_TABLES)
    held: dict[str, list[str]] = {}
    for line in (log or "").splitlines():
        values, name = line.split("\t")
        new = values.split()[3]
        if new.strip("0") and not name.endswith(".md"):
            held.setdefault(name, []).append(new)
    return held


def _changes(data_dir: Path, name: str, ids: list[str]) -> Iterator[str]:
    """Say what a file lacks of what it held."""
    try:
        contents = files.read(data_dir / name)
    except RecordError as error:
        yield f"{error.reason}, and a commit holds it: git show {ids[0]}"
        return
    if name.startswith(_FILES):
        kind = "sha1" if len(ids[0]) == 40 else "sha256"
        if hashlib.new(kind, b"blob %d\0" % len(contents) + contents).hexdigest() != ids[0]:
            yield f"must stay as a commit first held it: git show {ids[0]}"
        return
    rows = _rows(name, contents)
    for text, row in _old_rows(data_dir, name, tuple(ids)).items():
        if text in rows or any(row.items() <= now.items() for now in rows.values()):
            continue
        if not any(fnmatchcase(text, pattern) for pattern in _corrected(data_dir, name)):
            yield f"must hold a row that a commit has, or {CORRECTIONS} say why not: {text}"


@cache
def _old_rows(data_dir: Path, name: str, ids: tuple[str, ...]) -> dict[str, dict[str, str]]:
    """Collect the rows that the versions of a table have."""
    versions = git.contents(data_dir, dict.fromkeys(ids))
    return {k: row for contents in versions for k, row in _rows(name, contents or b"").items()}


def _rows(name: str, contents: bytes) -> dict[str, dict[str, str]]:
    """Read the facts of each row of a table, or of each claim, as a text and by column."""
    text = contents.decode(errors="replace")
    if name == "claims.yml":
        claims = text.split("\n  - id: ")[1:]
        rows = [{"id": x.split("\n", 1)[0], **dict(_CLAIM.findall(x))} for x in claims]
    else:
        said = _SAID if name.startswith("predictions/") else ()
        table = csv.DictReader(io.StringIO(text))
        rows = [{k: v for k, v in row.items() if k and v and k not in said} for row in table]
    return {"; ".join(f"{k}={v}" for k, v in row.items()): row for row in rows}


def _corrected(data_dir: Path, name: str) -> list[str]:
    """Read the patterns of the rows that a table need not hold any more."""
    path = data_dir / CORRECTIONS
    rows = _rows(CORRECTIONS, files.read(path) if path.exists() else b"").values()
    return [row.get("held", "") for row in rows if row.get("file") == name]
