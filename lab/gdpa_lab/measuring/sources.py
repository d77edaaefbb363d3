"""The code that ran: the version, the commit and the source hashes that a record stores."""

from __future__ import annotations

import ast
import os
import re
import tokenize
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from gdpa_lab.measuring import files, git, memory
from gdpa_lab.measuring.files import DATA_DIR
from gdpa_lab.measuring.require import require

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
