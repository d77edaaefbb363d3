"""Records: one JSON file per run, holding raw quantities and where they came from.

`data/records/<id>.json` is written once and never changed. Rates, speedups and percentages are not
stored; `results` derives them when read. Every key is explained in data/README.md, and
record.schema.json states the structure. A file that is damaged, foreign, edited or of a newer
schema is refused with its name and the reason: see refusals.py, bounds.py and history.py.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from datetime import datetime, timezone
from functools import cache
from pathlib import Path
from typing import Any

from gdpa_lab.measuring import bounds, files, history, memory, refusals
from gdpa_lab.measuring import system as systems
from gdpa_lab.measuring.files import DATA_DIR, RecordError
from gdpa_lab.measuring.rows import Ceiling, Error, Load, Protocol, Row, Table
from gdpa_lab.measuring.run import Record, renames
from gdpa_lab.measuring.sources import (
    COMMIT_VARIABLE,
    ROOT,
    Package,
    code_hash,
    package_state,
    source_hash,
)
from gdpa_lab.measuring.workload import Workload

__all__ = [
    "COMMIT_VARIABLE",
    "DATA_DIR",
    "ROOT",
    "Ceiling",
    "Error",
    "Load",
    "Package",
    "Protocol",
    "Record",
    "RecordError",
    "Row",
    "Table",
    "checked",
    "code_hash",
    "communities",
    "keep",
    "load",
    "load_all",
    "new_record",
    "package_state",
    "problem",
    "renames",
    "source_hash",
    "survey",
    "write",
    "write_partial",
]


def new_record(
    *, notebook: str | None, system: systems.System, workloads: Iterable[Workload], **values: Any
) -> Record:
    """Create the record of a run that ends now, of the package as it is; see `package_state`.

    `notebook`: its path relative to the repository, None if a command measured. `values`: the other
    fields. `write` checks the record.
    """
    now = datetime.now(timezone.utc)
    name = Path(notebook or "run").with_suffix("").as_posix().removeprefix("notebooks/")
    stem = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")
    return Record(
        id=f"{now.strftime(refusals.STAMP)}-{stem}-{system.id}",
        created=now.strftime(refusals.CREATED),
        notebook=notebook,
        package=package_state(notebook=notebook),
        system=system.id,
        workloads={workload.name: workload.to_dict() for workload in workloads},
        **values,
    )


def checked(data: Mapping[str, Any]) -> Record:
    """Rebuild a record from `Record.to_dict`; ValueError with the reason if it is no valid one."""
    reason = refusals.refusal(data) or problem(record := Record.from_dict(data))
    if reason is not None:
        raise ValueError(reason)
    return record


def problem(record: Record, machine: systems.System | None = None) -> str | None:
    """Return why the values of a record cannot be true together, or of `machine`, or None."""
    reasons = bounds.violations(record, machine) if machine else bounds.contradictions(record)
    return next(reasons, None)


def write(record: Record, data_dir: str | Path = DATA_DIR) -> Path:
    """Write `data_dir`/records/<id>.json and return its path.

    RecordError if the record is not valid or its system is not in `data_dir`/systems;
    FileExistsError if the file exists: records are append-only.
    """
    path = Path(data_dir) / "records" / f"{record.id}.json"
    data = record.to_dict()
    reason = refusals.refusal(data) or problem(record) or problem(record, _machine(record, path))
    if reason is not None:
        raise RecordError(path, reason)
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        file = path.open("x", encoding="utf-8")
    except FileExistsError as error:
        raise FileExistsError(f"records/{path.name} exists, and records are append-only") from error
    with file:
        file.write(_text(data))
    return path


def write_partial(record: Record, path: Path) -> None:
    """Replace the file `path`, <folder>/partial/<name>.json, by what a run has measured so far."""
    files.rewrite(path, _text(record.to_dict()))


def keep(partial: str | Path) -> Path:
    """Turn what an interrupted run left, <folder>/partial/<name>.json, into a record; return its
    path. The file stays if RecordError refuses it."""
    partial = Path(partial).absolute()
    try:
        record = checked(refusals.parse(files.read(partial)))
    except ValueError as error:
        raise RecordError(partial, str(error)) from error
    path = write(record, partial.parent.parent)
    partial.unlink()
    return path


def _text(data: Mapping[str, Any]) -> str:
    return _dumps({**data, "digest": refusals.digest(data)})


def load(path: str | Path) -> Record:
    """Read one record of a data folder, <folder>/records/<id>.json.

    RecordError if it is refused: it cannot be read, is not valid, or its system is not in
    <folder>/systems.
    """
    return _load(Path(path).absolute())[0]


def _load(path: Path) -> tuple[Record, str]:
    """Read a record and its SHA-256."""
    try:
        seen = path.stat()
    except OSError as error:
        raise RecordError(path, f"cannot be read: {error.strerror}") from error
    state = path, seen.st_mtime_ns, seen.st_size
    record, sha256 = _parse(*state)
    named = path.with_name(f"{record.id}.json")
    if path != named:
        duplicate = " (a duplicate of that file)" if named.exists() else ""
        raise RecordError(path, f"must be named {named.name}, after its id{duplicate}")
    reason = _beyond(*state, _machine(record, path))
    if reason is not None:
        raise RecordError(path, reason)
    return record, sha256


@cache
def _parse(path: Path, changed: int, size: int) -> tuple[Record, str]:
    """Parse the record in `path`, once for each state of the file, and check it if that is new."""
    text = files.read(path)
    sha256 = files.digest(text)
    try:
        if sha256 in _accepted(path.parent.parent):
            return Record.from_dict(json.loads(text)), sha256
        return checked(refusals.parse(text)), sha256
    except ValueError as error:
        raise RecordError(path, str(error)) from error


@cache
def _beyond(path: Path, changed: int, size: int, machine: systems.System) -> str | None:
    """Check what `_parse` reads against its machine, if that is new."""
    record, sha256 = _parse(path, changed, size)
    return None if sha256 in _accepted(path.parent.parent) else problem(record, machine)


def _accepted(data_dir: Path) -> Mapping[str, Any]:
    """SHA-256 of records, and of all together, that passed every check in the repository's folder,
    where alone they are remembered."""
    return memory.answers() if data_dir.resolve() == DATA_DIR else {}


def no_records(data_dir: str | Path | None) -> str | None:
    """Return why `data_dir` cannot hold a record, or None; None is the repository's own folder."""
    if data_dir is None or (Path(data_dir) / "records").is_dir():
        return None
    return f"--data-dir must be a folder that holds records/, got {str(data_dir)!r}"


def survey(data_dir: str | Path = DATA_DIR) -> tuple[list[Record], list[RecordError]]:
    """Read every record in `data_dir`/records, oldest first, with an error for each refused file:
    any other file there, one that its `siblings` contradict where systems are promoted, and those
    of `history.problems`."""
    data_dir = Path(data_dir)
    folder = data_dir / "records"
    try:
        paths = [*folder.iterdir()] if folder.exists() else []
    except OSError as error:
        return [], [RecordError(folder, f"cannot be read: {error.strerror}")]
    records, errors, passed = [], history.problems(data_dir), []
    for path in sorted(path for path in paths if not path.name.startswith(".")):
        try:
            record, sha256 = _load(path.absolute())
        except RecordError as error:
            errors.append(error)
        else:
            records.append(record)
            passed.append(sha256)
    passed.append(files.digest("".join(passed).encode()))  # all of them, beside each other
    if passed[-1] not in _accepted(data_dir) and (data_dir / systems.PROMOTED).exists():
        from gdpa_lab.measuring import siblings  # of torch, which reading alone does not need

        strange = [*siblings.problems(records)]
        errors += [RecordError(folder / f"{run.id}.json", reason) for run, reason in strange]
        if not strange and data_dir.resolve() == DATA_DIR:
            memory.answers().update(dict.fromkeys(passed))
            memory.save()
    return sorted(records, key=lambda r: (r.created, r.id)), errors


def load_all(data_dir: str | Path = DATA_DIR) -> list[Record]:
    """Read all records in `data_dir`/records, oldest first; RecordError names refused files."""
    if not Path(data_dir).is_dir():
        raise RecordError(data_dir, "must be a folder with records/ and systems/")
    records, errors = survey(data_dir)
    if errors:
        named = "".join(f"\nrefused {error}" for error in errors)
        raise RecordError(Path(data_dir) / "records", f"{len(errors)} refused{named}")
    return records


def communities(data_dir: str | Path = DATA_DIR) -> dict[str, Path]:
    """Folders with records of other machines, `data_dir`/community/<handle>, by handle: laid out
    like `data_dir`."""
    folder = Path(data_dir) / files.COMMUNITY
    return {path.name: path for path in sorted(folder.glob("*/")) if path.is_dir()}


def _dumps(data: Mapping[str, Any]) -> str:
    """Format as JSON with one key per line, and lists of numbers on one line."""
    text = json.dumps(data, indent=1, allow_nan=False)
    # JSON strings hold no line break, so a bracket followed by one opens a list.
    numbers = re.compile(r"\[\n[^\[\]{}\"]*\]")
    return numbers.sub(lambda m: re.sub(r"\n\s*", " ", m[0]), text) + "\n"


def _machine(record: Record, path: Path) -> systems.System:
    """Load the system of the record in `path`; RecordError if it is unknown or not promoted."""
    data_dir = path.parent.parent
    file = data_dir / "systems" / f"{record.system}.json"
    if not file.exists():
        raise RecordError(path, f"system must be in systems/, got {record.system!r}, which is not")
    try:
        machine = systems.load(file)
    except ValueError as error:
        raise RecordError(path, str(error)) from error
    if not systems.is_promoted(machine, data_dir):
        raise RecordError(
            path,
            f"system must be one that {systems.PROMOTED} lists for its GPU, got {machine.id!r} of "
            f"{machine.gpu!r}: its records belong in {files.COMMUNITY}/<handle>/",
        )
    return machine
