"""`python -m gdpa_lab maintain FILE`: regenerates what is derived from records and sources."""

from __future__ import annotations

import argparse
import functools
import sys
from pathlib import Path

FILES = {
    "choices": 'what `impl="auto"` tries first, from the records',
    "every-gpu": "what the plain products compile to for GPUs that nobody measured",
    "machine-code": "the machine code of every row's kernels, compiled where the table lacks it",
    "predictions": "what the models say of a B200",
    "readme": "the table and the figure of README.md, from the records and the ladders",
    "registered": "the chapters' predictions, and their first commits; after `make book`",
}


def parser(commands: argparse._SubParsersAction) -> None:
    """Add the command to those of `python -m gdpa_lab`."""
    parser = commands.add_parser("maintain", help="regenerate what is derived from the records")
    files = parser.add_subparsers(dest="file", required=True)
    for name, text in FILES.items():
        files.add_parser(name, help=text)


def main(name: str) -> int:
    """Regenerate one of `FILES`, print whether each file changed, and return the exit status."""
    from gdpa_lab.measuring.record import ROOT

    for path, changed in _update(name).items():
        state = "rewritten" if changed else "was up to date"
        sys.stdout.write(f"{path.relative_to(ROOT)} {state}\n")
    return 0


def _update(name: str) -> dict[Path, bool]:
    """Regenerate the files of `name` and return whether each changed."""
    from gdpa_lab.measuring import every_gpu, record
    from gdpa_lab.report import (
        clock_free,
        measured_rankings,
        predictions,
        readme,
        registered,
        staleness,
    )

    match name:
        case "choices":
            return measured_rankings.update(record.DATA_DIR)
        case "every-gpu":
            return {record.DATA_DIR / every_gpu.NAME: every_gpu.update()}
        case "machine-code":
            log = functools.partial(print, file=sys.stderr)
            return {record.DATA_DIR / staleness.NAME: staleness.update(log=log)}
        case "predictions":
            return {module.PATH: module.update() for module in (predictions, clock_free)}
        case "readme":
            return readme.update()
        case "registered":
            return {registered.PATH: registered.update()}
