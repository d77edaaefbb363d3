"""Checkpoints of a run: folders step-N, each with the SHA-256 of its files, which is written last.

So what was not written to its end, or has changed since, is not resumed from; PyTorch's distributed
checkpoints have no checksum. `sha256sum -c SHA256SUMS` in such a folder checks it by hand.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable
from pathlib import Path

SUMS = "SHA256SUMS"


def sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while part := file.read(2**20):
            digest.update(part)
    return digest.hexdigest()


def step_of(checkpoint: Path) -> float:
    """The N of step-N, infinite for another name."""
    number = checkpoint.name.removeprefix("step-")
    return int(number) if number.isdecimal() else math.inf


def newest(folder: Path, say: Callable[[str], None]) -> Path | None:
    """The newest checkpoint whose files are those that were written; says what is wrong with those
    that it skips."""
    for checkpoint in sorted(folder.glob("step-*"), key=step_of, reverse=True):
        problem = _problem(checkpoint)
        if problem is None:
            return checkpoint
        say(f"{checkpoint} cannot be read, so an older one is looked for: {problem}")
    return None


def seal(checkpoint: Path) -> None:
    """Writes down what the files are, now that all are written."""
    lines = (f"{digest}  {name}\n" for name, digest in _sums(checkpoint).items())
    (checkpoint / SUMS).write_text("".join(lines))


def unseal(checkpoint: Path) -> None:
    """Makes the folder, or what it holds no checkpoint."""
    checkpoint.mkdir(parents=True, exist_ok=True)
    (checkpoint / SUMS).unlink(missing_ok=True)


def _sums(checkpoint: Path) -> dict[str, str]:
    files = (path for path in checkpoint.iterdir() if path.is_file() and path.name != SUMS)
    return {path.name: sha256(path) for path in files}


def _problem(checkpoint: Path) -> str | None:
    if step_of(checkpoint) == math.inf:
        return "its name has no number of a step"
    sums = checkpoint / SUMS
    if not sums.is_file():
        return f"{SUMS} is missing, which is written last"
    try:
        lines = sums.read_text(errors="replace").splitlines()
        written = {name: digest for digest, _, name in (line.partition("  ") for line in lines)}
        differ = sorted({name for name, _ in written.items() ^ _sums(checkpoint).items()})
    except OSError as error:
        return str(error)
    return f"{', '.join(differ)} must be as {SUMS} has it" if differ else None
