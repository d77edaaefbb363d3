"""`python -m gdpa_lab maintain FILE`: what is made from records and sources, made again."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path


def choices() -> Iterator[tuple[Path, bool]]:
    """What `impl="auto"` tries first, from the records."""
    from gdpa_lab.measuring import record
    from gdpa_lab.report import rankings

    yield from rankings.update(record.DATA_DIR).items()


def machine_code() -> Iterator[tuple[Path, bool]]:
    """Which machine code the kernels of every row are, compiled where the table lacks it."""
    from gdpa_lab.measuring import record
    from gdpa_lab.report import staleness

    def log(text: str) -> None:
        sys.stderr.write(f"{text}\n")

    yield record.DATA_DIR / staleness.NAME, staleness.update(log=log)


def manifest() -> Iterator[tuple[Path, bool]]:
    """The files of data/ as they are; lines of records and systems stay."""
    from gdpa_lab.measuring import manifest

    yield manifest.DATA_DIR / manifest.NAME, manifest.update(manifest.DATA_DIR)


def predictions() -> Iterator[tuple[Path, bool]]:
    """What the models say of a B200."""
    from gdpa_lab.report import clock_free, predictions

    for made in (predictions, clock_free):
        yield made.PATH, made.update()


def readme() -> Iterator[tuple[Path, bool]]:
    """The table and the figure of README.md, from the records."""
    from gdpa_lab.measuring import record
    from gdpa_lab.report import readme

    yield record.ROOT / "README.md", readme.update()


def registered() -> Iterator[tuple[Path, bool]]:
    """The chapters' predictions, with the commits that first held them; after `make book`."""
    from gdpa_lab.report import registered

    yield registered.PATH, registered.update()


COMMANDS = {
    function.__name__.replace("_", "-"): function
    for function in (choices, machine_code, manifest, predictions, readme, registered)
}


def parser(commands: argparse._SubParsersAction) -> None:
    """Add the command to those of `python -m gdpa_lab`."""
    parser = commands.add_parser("maintain", help="make again what is made from the records")
    files = parser.add_subparsers(dest="file", required=True)
    for name, function in COMMANDS.items():
        files.add_parser(name, help=function.__doc__)


def main(name: str) -> int:
    """Run one of `COMMANDS` and say of each file whether it changed; the exit status. The manifest
    lists what changed in data/."""
    from gdpa_lab.measuring import manifest, record

    for path, changed in COMMANDS[name]():
        listed = path.is_relative_to(record.DATA_DIR) and manifest.listed(record.DATA_DIR)
        if changed and listed:
            manifest.update(record.DATA_DIR)
        state = "rewritten" if changed else "was up to date"
        sys.stdout.write(f"{path.relative_to(record.ROOT)} {state}\n")
    return 0
