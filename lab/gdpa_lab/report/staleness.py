"""Decides whether the kernels of a measured row compile to other machine code today.

Unchanged sources, comments aside, need no compilation. Otherwise the row, or data/machine_code.csv,
holds the original code, and the table the code of today's sources. A row is stale until `python -m
gdpa_lab maintain machine-code` has added what the table lacks.
"""

from __future__ import annotations

import ast
import csv
import io
import json
import os
import subprocess
import sys
import tempfile
from collections import ChainMap, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import pandas as pd

from gdpa_lab.measuring import files, git, machine_code, memory, record, system
from gdpa_lab.measuring.record import DATA_DIR, ROOT, Record, Row
from gdpa_lab.measuring.workloads import BLOCK_WORKLOADS, WORKLOADS

NAME = "machine_code.csv"
COLUMNS = ("operator", "impl", "direction", "call", "sources", "compiler", "code")
_LENGTH = 12  # hex digits of `sources` and `call`
_HOST = "gdpa_kernels/calling/"  # host code, which is not compiled


class Key(NamedTuple):
    """Key of a compilation: the digest of a call's `question`, and the digest of the sources."""

    call: str
    sources: str


class Compilation(NamedTuple):
    """Result of a compilation: the code, or why there is none."""

    compiler: str
    code: str


def are_stale(
    run: Record, rows: Sequence[Row], machine: system.System, *,
    data_dir: Path = DATA_DIR, root: Path = ROOT,
) -> list[bool]:  # fmt: skip
    """Return, for rows of a record, whether the sources in `root` compile to other code than ran on
    `machine`, or this is unknown, or the workload is now defined otherwise. Peers and failed rows
    have no code."""
    codes, workloads = ChainMap(table(data_dir), table()), WORKLOADS | BLOCK_WORKLOADS
    other = {x for x in run.workloads if x in workloads and run.workload(x) != workloads[x]}
    package, ran = cache(partial(_package, run)), cache(partial(run.package.ran, root=root))
    known: dict[tuple[Any, ...], bool] = {}  # rows of several scopes launch the same

    def stale(row: Row) -> bool:
        modules = _files(row, root)
        if not modules:
            return run.package.source(row.operator, row.impl) is not None
        if not row.samples_us or ran(modules):
            return False
        call = _digest(question(run, row, machine))
        now = codes.get(Key(call, _closure(modules, root)))
        if now is not None and _compilers(row) == {now.compiler}:
            recorded = [launch["code"] for launch in _launches(row)]
            then = Compilation(now.compiler, machine_code.combined(recorded))
        else:
            then = codes.get(Key(call, package()))
        return now is None or not machine_code.is_code(now.code) or then != now

    calls = [*map(_call, rows)]
    for call, row in zip(calls, rows, strict=True):
        if call not in known:
            known[call] = row.workload in other or stale(row)
    return [known[call] for call in calls]


def _call(row: Row) -> tuple[Any, ...]:
    """Return what the answer may depend on in a row of a record, whose launches are shared."""
    launches = tuple(map(id, row.launches or ()))
    what = row.operator, row.impl, row.direction, row.workload, row.scope == "schedule"
    return *what, bool(row.samples_us), row.launches is None, launches, repr(row.config)


def question(run: Record, row: Row, machine: system.System) -> dict[str, Any]:
    """Build the question of a row for `machine_code.answer`: its recorded launches, or its call."""
    if launches := _launches(row):
        known = ("code", "compiler")
        return {"launches": [{k: v for k, v in x.items() if k not in known} for x in launches]}
    workload = run.workload(row.workload).to_dict()
    for name in ("name", "batch", "lengths_q", "lengths_k", "seed"):
        workload.pop(name, None)
    return {
        **{name: getattr(row, name) for name in ("operator", "impl", "direction")},
        "scope": "schedule" if row.scope == "schedule" else "kernel",
        "config": dict(row.config),
        "workload": workload,
        "arch": int((machine.compute_capability or "0").replace(".", "")),
    }


class Entry(NamedTuple):
    """An entry that the table must hold: a row, and its sources by SHA-256, None for today's."""

    key: Key
    row: Row
    question: Mapping[str, Any]
    sources: Mapping[str, str] | None


def entries(data_dir: Path = DATA_DIR, root: Path = ROOT) -> Iterator[Entry]:
    """Yield the entries that the table must hold for the records in `data_dir`, communities
    included, and the sources in `root`."""
    for folder in (Path(data_dir), *record.communities(data_dir).values()):
        for run in record.load_all(folder):
            machine = system.by_id(run.system, folder)
            for row in run.rows:
                files = _files(row, root)
                if not files or not row.samples_us:
                    continue
                request = question(run, row, machine)
                call = _digest(request)
                yield Entry(Key(call, _closure(files, root)), row, request, None)
                if _compilers(row) != {machine_code.compiler()}:
                    yield Entry(Key(call, _package(run)), row, request, _ours(run.package.sources))


def update(
    data_dir: Path = DATA_DIR, root: Path = ROOT, log: Callable[[str], None] = print
) -> bool:
    """Compile what the table lacks, one state of the sources after the other, drop what no record
    needs, and return whether the table changed.

    Older sources come from git's history by their SHA-256. Triton's cache has what is compiled, so
    stopping loses nothing.
    """
    path, compiler = Path(data_dir) / NAME, machine_code.compiler()
    known = {k: v for k, v in table(data_dir).items() if v.compiler == compiler}
    needed = {each.key: each for each in entries(data_dir, root)}
    groups: dict[str, list[Entry]] = defaultdict(list)
    for each in needed.values():
        if each.key not in known:
            groups["today" if each.sources is None else each.key.sources].append(each)
    blobs = _blobs() if groups.keys() - {"today"} else {}
    for name, group in groups.items():
        log(f"sources {name}: {len(group)} calls to compile")
        with tempfile.TemporaryDirectory() as folder:
            sources = group[0].sources
            if sources is not None and {*sources.values()} - blobs.keys():
                codes = ["its sources are not in git's history"] * len(group)
            else:
                tree = root if sources is None else _checkout(sources, blobs, Path(folder))
                codes = _answers(tree, [each.question for each in group])
        known |= {each.key: Compilation(compiler, x) for each, x in zip(group, codes, strict=True)}
    lines = sorted(
        (x.row.operator, x.row.impl, x.row.direction, *x.key, *known[x.key])
        for x in needed.values()
    )
    text = pd.DataFrame(lines, columns=list(COLUMNS)).to_csv(index=False, lineterminator="\n")
    return files.rewrite(path, text)


def _files(row: Row, root: Path) -> tuple[str, ...]:
    """List the modules of a row's kernels, as paths in `root`; none for a peer."""
    kernels = [launch["kernel"].split(":")[0] for launch in row.launches or ()]
    modules = {f"gdpa_kernels.{row.operator}.{row.impl}", *kernels}
    return _of(tuple(sorted(modules)), root)


@cache
def _of(modules: tuple[str, ...], root: Path) -> tuple[str, ...]:
    """Follow imports within the package, except to the code that launches kernels."""
    reached, ahead = set(), [name for module in modules for name in _path(module, root)]
    while ahead:
        name = ahead.pop()
        imports = None if name in reached or name.startswith(_HOST) else _imported(name, root)
        if imports is not None:
            reached.add(name)
            ahead += imports
    return tuple(sorted(reached))


@cache
def _path(module: str, root: Path) -> list[str]:
    """Find the path of a module in `root`, wherever it is today; none if it is nowhere."""
    paths = (f"{name.replace('.', '/')}.py" for name in machine_code.places(module))
    return [path for path in paths if (root / path).exists()][:1]


@cache
def _imported(name: str, root: Path) -> list[str] | None:
    path = root / name
    return _imports(path.read_text(encoding="utf-8")) if path.exists() else None


@memory.remembered
def _imports(text: str) -> list[str]:
    """List the paths of modules that a text may import."""
    names = []
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names += [node.module or "", *(f"{node.module}.{alias.name}" for alias in node.names)]
    return [f"{n.replace('.', '/')}.py" for n in names if n.startswith("gdpa_kernels.")]


@cache
def _closure(files: tuple[str, ...], root: Path) -> str:
    return _digest({name: record.code_hash(root / name) for name in files})


def _package(run: Record) -> str:
    return _digest(_ours(run.package.sources))


def _ours(sources: Mapping[str, str]) -> dict[str, str]:
    """Select the sources of the package and of studies, without the notebook."""
    modules = {name: name.removesuffix(".py").replace("/", ".") for name in sources}
    return {name: sha for name, sha in sources.items() if machine_code.is_ours(modules[name])}


def _digest(value: Any) -> str:
    return files.digest(json.dumps(value, sort_keys=True).encode())[:_LENGTH]


def _launches(row: Row) -> Sequence[Mapping[str, Any]]:
    """Return the recorded launches of a row, or none if they are of a changed copy: nobody has that
    today, and it is as old as its rung."""
    launches = row.launches or ()
    ours = all(machine_code.is_ours(x["kernel"].split(":")[0]) for x in launches)
    return launches if ours else ()


def _compilers(row: Row) -> set[str]:
    return {launch["compiler"] for launch in _launches(row)}


def table(data_dir: str | Path = DATA_DIR) -> Mapping[Key, Compilation]:
    """Read data/machine_code.csv; empty in a folder without it."""
    path = Path(data_dir).absolute() / NAME
    if not path.exists():
        return {}
    seen = path.stat()
    return _parsed(path, seen.st_mtime_ns, seen.st_size)


@cache
def _parsed(path: Path, changed: int, size: int) -> Mapping[Key, Compilation]:
    """Parse the table in `path`, once for each state of the file."""
    lines = csv.DictReader(io.StringIO(path.read_text(encoding="utf-8")))
    return {Key(x["call"], x["sources"]): Compilation(x["compiler"], x["code"]) for x in lines}


def _answers(tree: Path, questions: list[Mapping[str, Any]]) -> list[str]:
    """Ask `machine_code.answer` of the package in `tree`."""
    program = Path(machine_code.__file__).read_text(encoding="utf-8")
    done = subprocess.run(
        [sys.executable, "-c", program],
        input=json.dumps({"root": str(tree.resolve()), "questions": questions}),
        cwd=tree,
        env={k: v for k, v in os.environ.items() if k != "PYTHONSAFEPATH"},
        capture_output=True,
        text=True,
    )
    if done.returncode:
        raise RuntimeError(done.stderr)
    return json.loads(done.stdout)


def _checkout(sources: Mapping[str, str], blobs: Mapping[str, bytes], folder: Path) -> Path:
    """Write the files of these SHA-256 into `folder`."""
    for name, sha in sources.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(blobs[sha])
    return folder


def _blobs() -> dict[str, bytes]:
    """Collect every Python file in git's history, by SHA-256; RuntimeError in a shallow clone."""
    if git.output(ROOT, "rev-parse", "--is-shallow-repository") != "false\n":
        raise RuntimeError("older sources need git's whole history: git fetch --unshallow")
    listed = git.output(ROOT, "rev-list", "--objects", "--all").splitlines()
    ids = [line.split(" ", 1)[0] for line in listed if line.endswith(".py")]
    return {files.digest(content): content for content in git.contents(ROOT, ids)}
