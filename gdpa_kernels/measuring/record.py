"""Records: one JSON file per run, holding raw quantities and where they came from.

`data/records/<id>.json` is written once and never changed. Rates, speedups and percentages are not
stored; `results` derives them when read. Every key is explained in data/README.md, and
record.schema.json states the structure. A file that is damaged, foreign or of a newer schema is
refused with its name and the reason, and the others still load.
"""

from __future__ import annotations

import ast
import hashlib
import json
import math
import os
import re
import subprocess
import tokenize
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass
from datetime import datetime, timezone
from functools import cache
from pathlib import Path
from typing import Any

import jsonschema

import gdpa_kernels
from gdpa_kernels.measuring import system as systems
from gdpa_kernels.measuring.rows import Ceiling, Error, Protocol, Row, Table
from gdpa_kernels.measuring.workload import Workload

SCHEMA_VERSION = 1
ROOT = Path(__file__).resolve().parents[2]
DATA_DIR = ROOT / "data"
COMMIT_VARIABLE = "GDPA_KERNELS_COMMIT"

_CREATED = "%Y-%m-%dT%H:%M:%SZ"
_LONGEST_REASON = 300


class RecordError(ValueError):
    """A record that cannot be used: `file` is its path and `reason` says why."""

    def __init__(self, file: str | Path, reason: str) -> None:
        self.file = Path(file)
        self.reason = reason
        super().__init__(f"{self.file.parent.name}/{self.file.name}: {reason}")


@dataclass(frozen=True)
class Package:
    """The code that ran.

    `commit`: 40 hex digits, or None if unknown. `dirty`: whether the package or the notebook
    differed from that commit, None without a git checkout. `sources`: SHA-256 of every source file,
    by path relative to the repository. `code`: `code_hash` of the same, None in records from before
    it was kept.
    """

    version: str
    commit: str | None
    dirty: bool | None
    sources: Mapping[str, str]
    code: Mapping[str, str] | None = None

    def ran(self, name: str, path: Path) -> bool:
        """Whether the code that ran as `name` is that of the file at `path` now; there may have
        been no such file, and be none."""
        if not path.exists():
            return name not in self.sources
        if self.code is None:
            return self.sources.get(name) == source_hash(path)
        return self.code.get(name) == code_hash(path)


@cache
def renames() -> Mapping[str, Mapping[str, str]]:
    """What older records call by another name: "notebooks", old path -> path now."""
    return json.loads(Path(__file__).with_name("renames.json").read_text(encoding="utf-8"))


@dataclass(frozen=True)
class Record:
    """One run. `created` is UTC, ISO 8601. `system` is the id of a file in data/systems.

    `state` has the GPU's state `before` and `after` the measurement, as `system.state` returns it.
    `workloads` holds `Workload.to_dict()` by name.
    """

    id: str
    created: str
    command: str
    notebook: str | None
    package: Package
    system: str
    state: Mapping[str, Mapping[str, Any]]
    protocol: Protocol
    ceilings: tuple[Ceiling, ...]
    workloads: Mapping[str, Mapping[str, Any]]
    rows: tuple[Row, ...]
    tables: Mapping[str, Table] = field(default_factory=dict)

    @property
    def chapter(self) -> str | None:
        """Where its notebook is now."""
        return renames()["notebooks"].get(self.notebook, self.notebook)

    def workload(self, name: str) -> Workload:
        """The workload called `name` as this record measured it; LookupError if there is none."""
        if name not in self.workloads:
            raise LookupError(f"name must be one of {sorted(self.workloads)}, got {name!r}")
        return Workload.from_dict(self.workloads[name])

    def to_dict(self) -> dict[str, Any]:
        """The record as JSON values."""
        return {"schema_version": SCHEMA_VERSION, **_plain(self)}

    @staticmethod
    def from_dict(data: Mapping[str, Any]) -> Record:
        """Rebuild a record from `to_dict`; ValueError with the reason if it is not a valid one."""
        reason = _refusal(data)
        if reason is not None:
            raise ValueError(reason)
        values = {key: value for key, value in data.items() if key != "schema_version"}
        errors = (row["error"] for row in data["rows"])
        return Record(
            **{
                **values,
                "package": Package(**data["package"]),
                "protocol": Protocol(**data["protocol"]),
                "ceilings": tuple(Ceiling(**ceiling) for ceiling in data["ceilings"]),
                "rows": tuple(
                    Row(**{**row, "error": None if error is None else Error(**error)})
                    for row, error in zip(data["rows"], errors, strict=True)
                ),
                "tables": {name: Table(**table) for name, table in data["tables"].items()},
            }
        )


def new_record(
    *,
    command: str,
    notebook: str | None,
    system: systems.System,
    state_before: Mapping[str, Any],
    state_after: Mapping[str, Any],
    protocol: Protocol,
    workloads: Iterable[Workload],
    rows: Iterable[Row],
    ceilings: Iterable[Ceiling] = (),
    tables: Mapping[str, Table] | None = None,
    commit: str | None = None,
) -> Record:
    """A record of a run that ends now.

    `command` reproduces the run. `notebook` is its path relative to the repository, None if a
    command measured. `commit` is needed only where there is no git checkout; None then means the
    environment variable GDPA_KERNELS_COMMIT, read now, and if that is not set the commit is
    unknown. `write` checks the record.
    """
    now = datetime.now(timezone.utc)
    name = Path(notebook or "run").with_suffix("").as_posix().removeprefix("notebooks/")
    stem = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")
    return Record(
        id=f"{now:%Y%m%dT%H%M%SZ}-{stem}-{system.id}",
        created=now.strftime(_CREATED),
        command=command,
        notebook=notebook,
        package=package_state(notebook=notebook, commit=commit),
        system=system.id,
        state={"before": dict(state_before), "after": dict(state_after)},
        protocol=protocol,
        ceilings=tuple(ceilings),
        workloads={workload.name: workload.to_dict() for workload in workloads},
        rows=tuple(rows),
        tables=dict(tables or {}),
    )


def package_state(
    *, notebook: str | None = None, commit: str | None = None, root: str | Path = ROOT
) -> Package:
    """Version, commit and source hashes of the package in `root`, plus those of `notebook`.

    The commit is that of the git checkout at `root`; without one it is `commit`, else the
    environment variable GDPA_KERNELS_COMMIT, else None. ValueError if `commit` is not 40 hex digits
    or contradicts the checkout; FileNotFoundError if `notebook` is not in `root`.
    """
    root = Path(root).resolve()
    paths = sorted((root / "gdpa_kernels").rglob("*.py"))
    if notebook is not None:
        paths.append(root / notebook)
    checked_out = _git(root, "rev-parse", "HEAD") if _is_checkout(root) else None
    given = ("commit", commit)
    if checked_out is None and commit is None:
        given = (COMMIT_VARIABLE, os.environ.get(COMMIT_VARIABLE) or None)
    name, value = given
    if value is not None and not re.fullmatch("[0-9a-f]{40}", value):
        raise ValueError(f"{name} must be 40 hex digits, got {value!r}")
    if None not in (checked_out, value) and checked_out != value:
        raise ValueError(f"{name} must be the checkout's {checked_out}, got {value}")
    dirty = None
    if checked_out is not None:
        watched = ["gdpa_kernels"] + ([notebook] if notebook is not None else [])
        status = _git(root, "status", "--porcelain", "--", *watched)
        dirty = None if status is None else bool(status)
    names = [path.relative_to(root).as_posix() for path in paths]
    return Package(
        version=gdpa_kernels.__version__,
        commit=checked_out or value,
        dirty=dirty,
        sources=dict(zip(names, map(source_hash, paths), strict=True)),
        code=dict(zip(names, map(code_hash, paths), strict=True)),
    )


def source_hash(path: str | Path) -> str:
    """SHA-256 of a file, hex digits."""
    return hashlib.sha256(Path(path).read_bytes()).hexdigest()


def code_hash(path: str | Path) -> str:
    """SHA-256 of what runs of a Python file, hex digits: not its docstrings, comments, blank lines
    and spaces at the ends of lines."""
    return _code_hash(Path(path).read_text(encoding="utf-8"))


@cache
def _code_hash(text: str) -> str:
    lines = text.split("\n")  # as ast counts them
    for node in ast.walk(ast.parse(text)):
        if not isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        if ast.get_docstring(node, clean=False) is not None:
            doc = node.body[0]
            before = lines[doc.lineno - 1].encode()[: doc.col_offset].decode()
            after = lines[doc.end_lineno - 1].encode()[doc.end_col_offset :].decode()
            lines[doc.lineno - 1 : doc.end_lineno] = [""] * (doc.end_lineno - doc.lineno + 1)
            lines[doc.lineno - 1] = f'{before}""{after}'
    lines.append("")
    for token in tokenize.generate_tokens(iter([f"{line}\n" for line in lines]).__next__):
        if token.type == tokenize.COMMENT:
            row, column = token.start
            lines[row - 1] = lines[row - 1][:column]
    kept = [line.rstrip() for line in lines if line.strip()]
    return hashlib.sha256("\n".join(kept).encode()).hexdigest()


def write(record: Record, data_dir: str | Path = DATA_DIR) -> Path:
    """Write `data_dir`/records/<id>.json and return its path.

    RecordError if the record is not valid or its system is not in `data_dir`/systems;
    FileExistsError if the file exists: records are append-only.
    """
    path = Path(data_dir) / "records" / f"{record.id}.json"
    data = record.to_dict()
    reason = _refusal(data) or _system_refusal(record.system, data_dir)
    if reason is not None:
        raise RecordError(path, reason)
    text = _dumps(data)
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        file = path.open("x", encoding="utf-8")
    except FileExistsError as error:
        raise FileExistsError(f"records/{path.name} exists, and records are append-only") from error
    with file:
        file.write(text)
    return path


def load(path: str | Path, *, data_dir: str | Path | None = None) -> Record:
    """Read one record; with `data_dir`, its system must be there. RecordError if it is refused."""
    path = Path(path)
    try:
        seen = path.stat()
        record = _parse(path, seen.st_mtime_ns, seen.st_size)
    except OSError as error:
        raise RecordError(path, f"cannot be read: {error.strerror}") from error
    reason = None
    if record.id != path.stem:
        reason = f"id must be the file name {path.stem!r}, got {record.id!r}"
        if path.with_name(f"{record.id}.json").exists():
            reason += f", a duplicate of {record.id}.json"
    elif data_dir is not None:
        reason = _system_refusal(record.system, data_dir)
    if reason is not None:
        raise RecordError(path, reason)
    return record


@cache
def _parse(path: Path, changed: int, size: int) -> Record:
    """The record in `path`, read once for each state of the file."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"), object_pairs_hook=_unique_keys)
        return Record.from_dict(data)
    except json.JSONDecodeError as error:
        raise RecordError(path, f"not JSON, or cut short: {error}") from error
    except ValueError as error:
        raise RecordError(path, str(error)) from error


def load_all(data_dir: str | Path = DATA_DIR) -> tuple[list[Record], list[RecordError]]:
    """Every record in `data_dir`/records, oldest first, and an error for each refused file."""
    records, errors = [], []
    for path in sorted((Path(data_dir) / "records").glob("*.json")):
        try:
            records.append(load(path, data_dir=data_dir))
        except RecordError as error:
            errors.append(error)
    return sorted(records, key=lambda r: (r.created, r.id)), errors


def _plain(value: Any) -> Any:
    if is_dataclass(value) and not isinstance(value, type):
        return {f.name: _plain(getattr(value, f.name)) for f in fields(value)}
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value


def _dumps(data: Mapping[str, Any]) -> str:
    """JSON with one key per line, and lists of numbers on one line."""
    text = json.dumps(data, indent=1, allow_nan=False)
    # JSON strings hold no line break, so a bracket followed by one opens a list.
    numbers = re.compile(r"\[\n[^\[\]{}\"]*\]")
    return numbers.sub(lambda m: re.sub(r"\n\s*", " ", m[0]), text) + "\n"


def _unique_keys(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    keys = [key for key, _ in pairs]
    repeated = sorted({key for key in keys if keys.count(key) > 1})
    if repeated:
        raise ValueError(f"every key of an object must be unique, got {repeated} twice")
    return dict(pairs)


@cache
def _validator() -> jsonschema.protocols.Validator:
    schema = json.loads(Path(__file__).with_name("record.schema.json").read_text(encoding="utf-8"))
    times = schema["$defs"]["samples_us"]["items"]
    every_item = jsonschema.Draft202012Validator.VALIDATORS["items"]

    def items(validator: Any, rule: Any, found: Any, parent: Any) -> Iterator[Any]:
        # One by one, the library takes 0.5 s for a record of 12,000 samples; this, 0.1 s.
        if rule == times and all(type(x) in (int, float) and x > 0 for x in found):
            return iter(())
        return every_item(validator, rule, found, parent)

    return jsonschema.validators.extend(jsonschema.Draft202012Validator, {"items": items})(schema)


def _refusal(data: Any) -> str | None:
    """Why `data` is no valid record, None if it is one."""
    version = data.get("schema_version") if isinstance(data, Mapping) else None
    if type(version) is not int:
        return "not a record: it has no schema_version"
    if version > SCHEMA_VERSION:
        return f"schema_version must be at most {SCHEMA_VERSION}, got the newer {version}"
    reason = next(_not_json(data, ""), None)
    if reason is not None:
        return reason
    error = jsonschema.exceptions.best_match(_validator().iter_errors(data))
    if error is not None:
        where = "".join(f"[{p}]" if isinstance(p, int) else f".{p}" for p in error.absolute_path)
        reason = error.schema.get("$comment", error.message)
        if len(reason) > _LONGEST_REASON:
            reason = f"{reason[:_LONGEST_REASON]}..."
        return f"{where.lstrip('.') or 'record'}: {reason}"
    return next(_contradictions(data), None)


def _not_json(value: Any, where: str) -> Iterator[str]:
    """Reasons why `value`, found at `where`, would not come back from a JSON file as it is."""
    if isinstance(value, Mapping):
        for key, item in value.items():
            if not isinstance(key, str):
                yield f"{where} must have strings as keys, got {key!r}"
            yield from _not_json(item, f"{where}.{key}" if where else str(key))
    elif isinstance(value, list):
        for i, item in enumerate(value):
            yield from _not_json(item, f"{where}[{i}]")
    elif isinstance(value, float) and not math.isfinite(value):
        yield f"{where} must be a finite number, got {value}"
    elif not isinstance(value, str | int | float | None):
        yield f"{where} must be a JSON value, got {value!r} of type {type(value).__name__}"


def _contradictions(data: Mapping[str, Any]) -> Iterator[str]:
    """Reasons to refuse a record of the right structure."""
    try:
        datetime.strptime(data["created"], _CREATED)
    except ValueError:
        yield f"created must be a date and time, got {data['created']!r}"
    for name, values in data["workloads"].items():
        try:
            workload = Workload.from_dict(values)
        except (TypeError, ValueError) as error:
            yield f"workloads.{name}: {error}"
        else:
            if workload.name != name:
                yield f"workloads.{name}: name must be its key, got {workload.name!r}"
    seen: dict[tuple[str, ...], int] = {}
    for i, row in enumerate(data["rows"]):
        if row["workload"] not in data["workloads"]:
            yield (
                f"rows[{i}].workload must be one of {sorted(data['workloads'])}, "
                f"got {row['workload']!r}"
            )
        error = row["error"] or {"passed": False}
        if error["passed"] and (error["max_abs"] is None or error["max_abs"] > error["budget"]):
            yield (
                f"rows[{i}].error: max_abs must be at most the budget {error['budget']} to pass, "
                f"got {error['max_abs']}"
            )
        key = tuple(row[name] for name in ("workload", "direction", "impl", "scope", "variant"))
        if key in seen:
            yield f"rows[{i}] must differ from rows[{seen[key]}], got {'/'.join(key)} twice"
        seen[key] = i
    for name, table in data["tables"].items():
        for i, row in enumerate(table["rows"]):
            if len(row) != len(table["columns"]):
                yield (
                    f"tables.{name}.rows[{i}] must have {len(table['columns'])} values, "
                    f"got {len(row)}"
                )


def _system_refusal(system: str, data_dir: str | Path) -> str | None:
    path = Path(data_dir) / "systems" / f"{system}.json"
    if not path.exists():
        return f"system must be in systems/, got {system!r}, which is not"
    try:
        systems.load(path)
    except ValueError as error:
        return str(error)
    return None


def _git(root: Path, *arguments: str) -> str | None:
    command = ["git", "-C", str(root), *arguments]
    try:
        done = subprocess.run(command, capture_output=True, text=True)
    except OSError:
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def _is_checkout(root: Path) -> bool:
    """Whether `root` itself is a git checkout, not a folder inside another project's."""
    top = _git(root, "rev-parse", "--show-toplevel")
    return top is not None and Path(top).resolve() == root
