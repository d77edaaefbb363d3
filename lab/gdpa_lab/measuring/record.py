"""Records: one JSON file per run, holding raw quantities and where they came from.

`data/records/<id>.json` is written once and never changed. Rates, speedups and percentages are not
stored; `results` derives them when read. Every key is explained in data/README.md, and
record.schema.json states the structure. A file that is damaged, foreign, edited or of a newer
schema is refused with its name and the reason: see refusals.py, bounds.py and history.py.
"""

from __future__ import annotations

import ast
import json
import os
import re
import tokenize
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass
from datetime import datetime, timezone
from functools import cache, cached_property
from pathlib import Path
from typing import Any

from gdpa_lab.measuring import bounds, files, git, history, memory, refusals
from gdpa_lab.measuring import system as systems
from gdpa_lab.measuring.files import DATA_DIR, RecordError
from gdpa_lab.measuring.refusals import SCHEMA_VERSION
from gdpa_lab.measuring.require import require
from gdpa_lab.measuring.rows import Ceiling, Error, Load, Protocol, Row, Table
from gdpa_lab.measuring.workload import Workload

ROOT = DATA_DIR.parent
SOURCE_FOLDERS = ("gdpa_kernels", "lab/gdpa_lab", "notebooks/_lib")
"""Folders whose source hashes a record stores."""
COMMIT_VARIABLE = "GDPA_KERNELS_COMMIT"


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

    def source(self, operator: str, impl: str) -> str | None:
        """Return the SHA-256 of a rung's file, wherever it was; None if there was none."""
        pattern = re.compile(rf"gdpa_kernels/{operator}/(kernels/|ladder/)?{impl}\.py")
        names = sorted(filter(pattern.fullmatch, self.sources))
        return self.sources[names[0]] if names else None

    def ran(self, names: Iterable[str], root: Path) -> bool:
        """Return whether the code that ran equals that of the same files in `root` now."""
        recorded, now = (self.sources, source_hash) if self.code is None else (self.code, code_hash)
        return all(recorded.get(name) == now(root / name) for name in names)

    def committed(self, root: str | Path = ROOT) -> str | None:
        """Return the commit that holds the files that ran: `commit`, or the first one after it that
        has them all, since what ran may have been committed later. "" if history has none; None
        without a commit, git, or that commit in the clone of `root`."""
        sources = tuple(sorted(self.sources.items()))
        differing = None if self.commit is None else _differing(str(root), self.commit, sources)
        if not differing:
            return None if differing is None else self.commit
        return _later(str(root), self.commit, sources, differing)


@cache
def _differing(
    root: str, commit: str, sources: tuple[tuple[str, str], ...]
) -> tuple[tuple[str, str], ...] | None:
    """The sources that the files of a commit are not; None if the clone lacks it."""
    if git.answer(root, "cat-file", "-e", f"{commit}^{{commit}}") is None:
        return None
    then = git.contents(root, (f"{commit}:{name}" for name, _ in sources))
    return tuple(
        (name, sha256)
        for text, (name, sha256) in zip(then, sources, strict=True)
        if text is None or files.digest(text) != sha256
    )


@cache
def _later(
    root: str, commit: str, sources: tuple[tuple[str, str], ...],
    differing: tuple[tuple[str, str], ...],
) -> str:  # fmt: skip
    """The first commit after another that holds all sources, "" if there is none."""
    names = (name for name, _ in differing)
    commits = git.answer(root, "rev-list", "--reverse", f"{commit}..HEAD", "--", *names)
    for later in (commits or "").split():
        if not _differing(root, later, differing) and not _differing(root, later, sources):
            return later
    return ""


@cache
def renames() -> Mapping[str, str]:
    """Current paths of notebooks by the paths that older records have."""
    return json.loads(Path(__file__).with_name("renames.json").read_text(encoding="utf-8"))


@dataclass(frozen=True)
class Record:
    """One run. `created` is UTC, ISO 8601. `system` is the id of a file in data/systems.

    `state` has the GPU's state `before` and `after` the measurement, as `system.state` returns it.
    `workloads` holds `Workload.to_dict()` by name. `plan`: keys of the rows that the run set out to
    measure in the scopes kernel and sustained, each of which has a row; None in older records.
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
    plan: tuple[tuple[str, ...], ...] | None = None

    def __post_init__(self) -> None:
        plan = None if self.plan is None else map(tuple, self.plan)
        for name, value in {"ceilings": self.ceilings, "rows": self.rows, "plan": plan}.items():
            object.__setattr__(self, name, None if value is None else tuple(value))

    @property
    def chapter(self) -> str | None:
        """Current path of its notebook."""
        return renames().get(self.notebook, self.notebook)

    def workload(self, name: str) -> Workload:
        """Return the workload `name` as this record measured it; LookupError if there is none."""
        if name not in self.workloads:
            raise LookupError(f"name must be one of {sorted(self.workloads)}, got {name!r}")
        if name not in self._built:
            self._built[name] = Workload.from_dict(self.workloads[name])
        return self._built[name]

    @cached_property
    def _built(self) -> dict[str, Workload]:
        return {}

    def problem(self, machine: systems.System | None = None) -> str | None:
        """Return why these values cannot be true together, or of `machine`, or None."""
        reasons = bounds.violations(self, machine) if machine else bounds.contradictions(self)
        return next(reasons, None)

    def to_dict(self) -> dict[str, Any]:
        """Convert to JSON values; launches shared by several rows are stored once."""
        data = {"schema_version": SCHEMA_VERSION, **_plain(self)}
        launches: list[dict[str, Any]] = []
        for row in data["rows"]:
            for launch in row["launches"] or ():
                if launch not in launches:
                    launches.append(launch)
            row["launches"] = row["launches"] and [*map(launches.index, row["launches"])]
        return {**data, "launches": launches}

    @staticmethod
    def from_dict(data: Mapping[str, Any]) -> Record:
        """Rebuild a record from `to_dict`; ValueError with the reason if it is not a valid one."""
        reason = refusals.refusal(data) or (record := Record.unchecked(data)).problem()
        if reason is not None:
            raise ValueError(reason)
        return record

    @staticmethod
    def unchecked(data: Mapping[str, Any]) -> Record:
        """Rebuild a record from values that passed all checks of their structure."""
        values = dict(data)
        launches = values.pop("launches", ())
        for added in ("schema_version", "digest"):
            values.pop(added, None)
        values |= {
            "package": Package(**data["package"]),
            "protocol": Protocol(**data["protocol"]),
            "ceilings": [_rebuilt(Ceiling, ceiling) for ceiling in data["ceilings"]],
            "rows": [_rebuilt(Row, row, launches) for row in data["rows"]],
            "tables": {name: Table(**table) for name, table in data["tables"].items()},
        }
        return Record(**values)


def _rebuilt(kind: type, values: Mapping[str, Any], launches: Sequence[Any] = ()) -> Any:
    """Rebuild a row or a ceiling from its JSON values; a row refers to its launches by index."""
    values, parts = dict(values), {"error": Error, "load": Load}
    for name in parts.keys() & values.keys():
        values[name] = values[name] and parts[name](**values[name])
    if values.get("launches") is not None:
        values["launches"] = tuple(launches[index] for index in values["launches"])
    return kind(**values)


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


def package_state(
    *, notebook: str | None = None, commit: str | None = None, root: str | Path = ROOT
) -> Package:
    """Version, commit and source hashes of the package in `root`, plus those of `notebook` and of
    the modules beside it.

    The commit is that of the git checkout at `root`; without one it is `commit`, else the
    environment variable GDPA_KERNELS_COMMIT, else None. ValueError if `commit` is not 40 hex digits
    or contradicts the checkout; FileNotFoundError if `notebook` is not in `root`.
    """
    import gdpa_kernels

    root = Path(root).resolve()
    paths = sorted(path for folder in SOURCE_FOLDERS for path in (root / folder).rglob("*.py"))
    beside = []
    if notebook is not None:
        beside = [*sorted((root / notebook).parent.glob("_*.py")), root / notebook]
    paths += beside
    top = git.answer(root, "rev-parse", "--show-toplevel")
    is_checkout = top is not None and Path(top).resolve() == root  # not inside another project's
    checked_out = git.answer(root, "rev-parse", "HEAD") if is_checkout else None
    name, value = "commit", commit
    if checked_out is None and commit is None:
        name, value = COMMIT_VARIABLE, os.environ.get(COMMIT_VARIABLE) or None
    is_hash = value is None or re.fullmatch("[0-9a-f]{40}", value) is not None
    require(is_hash, name, "40 hex digits", value)
    if None not in (checked_out, value) and checked_out != value:
        raise ValueError(f"{name} must be the checkout's {checked_out}, got {value}")
    watched = [*SOURCE_FOLDERS, *map(str, beside)]
    status = git.answer(root, "status", "--porcelain", "--", *watched) if checked_out else None
    names = [path.relative_to(root).as_posix() for path in paths]
    return Package(
        version=gdpa_kernels.__version__,
        commit=checked_out or value,
        dirty=None if status is None else bool(status),
        sources=dict(zip(names, map(source_hash, paths), strict=True)),
        code=dict(zip(names, map(code_hash, paths), strict=True)),
    )


def source_hash(path: str | Path) -> str:
    """SHA-256 of a file, hex digits."""
    return files.digest(Path(path).read_bytes())


def code_hash(path: str | Path) -> str:
    """SHA-256 of the code of a Python file, hex digits, without docstrings, comments, blank lines
    and trailing spaces."""
    return _code_hash(Path(path).read_text(encoding="utf-8"))


@memory.remembered
def _code_hash(text: str) -> str:
    lines = text.split("\n")  # as ast counts them
    for node in ast.walk(ast.parse(text)):
        if not isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        if ast.get_docstring(node, clean=False) is not None:
            doc = node.body[0]
            prefix = lines[doc.lineno - 1].encode()[: doc.col_offset].decode()
            suffix = lines[doc.end_lineno - 1].encode()[doc.end_col_offset :].decode()
            lines[doc.lineno - 1 : doc.end_lineno] = [""] * (doc.end_lineno - doc.lineno + 1)
            lines[doc.lineno - 1] = f'{prefix}""{suffix}'
    lines.append("")
    for token in tokenize.generate_tokens(iter([f"{line}\n" for line in lines]).__next__):
        if token.type == tokenize.COMMENT:
            row, column = token.start
            lines[row - 1] = lines[row - 1][:column]
    code_lines = [line.rstrip() for line in lines if line.strip()]
    return files.digest("\n".join(code_lines).encode())


def write(record: Record, data_dir: str | Path = DATA_DIR) -> Path:
    """Write `data_dir`/records/<id>.json and return its path.

    RecordError if the record is not valid or its system is not in `data_dir`/systems;
    FileExistsError if the file exists: records are append-only.
    """
    path = Path(data_dir) / "records" / f"{record.id}.json"
    data = record.to_dict()
    reason = refusals.refusal(data) or record.problem() or record.problem(_machine(record, path))
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
        record = Record.from_dict(refusals.parse(files.read(partial)))
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
            return Record.unchecked(json.loads(text)), sha256
        return Record.from_dict(refusals.parse(text)), sha256
    except ValueError as error:
        raise RecordError(path, str(error)) from error


@cache
def _beyond(path: Path, changed: int, size: int, machine: systems.System) -> str | None:
    """Check what `_parse` reads against its machine, if that is new."""
    record, sha256 = _parse(path, changed, size)
    return None if sha256 in _accepted(path.parent.parent) else record.problem(machine)


def _accepted(data_dir: Path) -> Mapping[str, Any]:
    """SHA-256 of records, and of all together, that passed every check in the repository's folder,
    where alone they are remembered."""
    return memory.answers() if data_dir.resolve() == DATA_DIR else {}


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


def _plain(value: Any) -> Any:
    if is_dataclass(value) and not isinstance(value, type):
        return {f.name: _plain(getattr(value, f.name)) for f in fields(value)}
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value


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
