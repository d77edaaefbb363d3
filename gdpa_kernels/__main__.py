"""`python -m gdpa_kernels COMMAND`; `--help` after a command lists its options.

- `doctor`: what runs on this machine, why the rest does not, and what mends it.
- `results`: every measured row as CSV or Markdown; `--gpu`, `--workload`, `--figure`, `--scope`,
  `--all`; `--community`: those of other machines, in data/community.
- `choices`: rewrite from the records what `impl="auto"` tries first.
- `readme`: rewrite from the records the table and the figure of README.md.
- `machine-code`: compile what data/machine_code.csv lacks, to tell which rows are of older code.
- `keep`: make a record of what a measuring run left that did not end (`doctor` names it).
- `manifest`: list in data/manifest.sha256 the files as they are; lines of records and systems stay.
- `steps`: how many lines of compiled code a lesson has and changes of its predecessor's.
- `predictions`: what is predicted for a B200, and what records confirm; `--record`, `--write`.
"""

from __future__ import annotations

import argparse
import fnmatch
import sys
from collections.abc import Sequence

from gdpa_kernels.measuring.manifest import RecordError
from gdpa_kernels.report import doctor


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command and return its exit status; refused records are named on stderr, status 1."""
    options = _parser().parse_args(arguments)
    commands = {
        "doctor": _doctor,
        "results": _results,
        "choices": _choices,
        "machine-code": _machine_code,
        "readme": _readme,
        "keep": _keep,
        "manifest": _manifest,
        "steps": _steps,
        "predictions": _predictions,
    }
    try:
        return commands[options.command](options)
    except RecordError as error:
        sys.stderr.write(f"{error}\n")
        return 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m gdpa_kernels")
    commands = parser.add_subparsers(dest="command", required=True)
    doctor_ = commands.add_parser(
        "doctor",
        help="say what this machine can run and how to repair it",
        epilog="Exit status: 1 if something needs repair or the records cannot all be read.",
    )
    results_ = commands.add_parser(
        "results",
        help="print what the records say",
        epilog="Exit status: 1 if nothing matches or a record is refused (named on stderr).",
    )
    commands.add_parser("choices", help="rewrite what impl='auto' tries first from the records")
    commands.add_parser("machine-code", help="rewrite which machine code the records' kernels are")
    commands.add_parser("readme", help="rewrite the results in README.md from the records")
    keep = commands.add_parser("keep", help="make a record of what a run left that did not end")
    keep.add_argument("file", help="a file of data/partial")
    commands.add_parser("manifest", help="list the files of data/ as they are; records stay")
    commands.add_parser("steps", help="print how long the lessons are and the steps between them")
    predictions_ = commands.add_parser(
        "predictions",
        help="print what is predicted for a B200, and what its records say of it",
        epilog="Exit status: 1 if --record is of no B200 or a record is refused (named on stderr).",
    )
    predictions_.add_argument("--record", metavar="ID", help="scale by its ceilings, judge by it")
    predictions_.add_argument(
        "--write", action="store_true", help="rewrite data/predictions from the models"
    )
    for command in (doctor_, results_, predictions_):
        command.add_argument("--data-dir", help="folder of systems/ and records/")
    results_.add_argument("--format", choices=("csv", "markdown"), default="csv")
    results_.add_argument("--gpu", metavar="G", help="GPUs of exactly this name: 'NVIDIA H200'")
    results_.add_argument(
        "--community", action="store_true", help="records of other machines: data/community"
    )
    results_.add_argument("--workload", metavar="W", help="a workload, or a pattern: 'gdpa-self-*'")
    results_.add_argument("--figure", metavar="F", help="a figure, or a pattern: '*-fwd-*'")
    results_.add_argument("--scope", metavar="S", help="kernel (bursts), sustained, op, ...")
    results_.add_argument("--all", action="store_true", help="every row, not only the newest")
    return parser


def _doctor(options: argparse.Namespace) -> int:
    found = doctor.findings(options.data_dir)
    sys.stdout.write(doctor.report(found))
    broken = any(f.repair is not None or (f.group == "data" and not f.ok) for f in found)
    return 1 if broken else 0


def _choices(options: argparse.Namespace) -> int:
    from gdpa_kernels.measuring import record
    from gdpa_kernels.report import rankings

    for path, changed in rankings.update(record.DATA_DIR).items():
        name = path.relative_to(record.ROOT)
        sys.stdout.write(f"{name} {'rewritten' if changed else 'was up to date'}\n")
    return 0


def _machine_code(options: argparse.Namespace) -> int:
    from gdpa_kernels.report import staleness

    def log(text: str) -> None:
        sys.stderr.write(f"{text}\n")

    changed = staleness.update(log=log)
    sys.stdout.write(f"data/{staleness.NAME} {'rewritten' if changed else 'was up to date'}\n")
    return 0


def _readme(options: argparse.Namespace) -> int:
    from gdpa_kernels.report import readme

    sys.stdout.write("README.md rewritten\n" if readme.update() else "README.md was up to date\n")
    return 0


def _keep(options: argparse.Namespace) -> int:
    from gdpa_kernels.measuring import record

    sys.stdout.write(f"{record.keep(options.file)}\n")
    return 0


def _manifest(options: argparse.Namespace) -> int:
    from gdpa_kernels.measuring import manifest

    changed = manifest.update(manifest.DATA_DIR)
    sys.stdout.write(f"data/{manifest.NAME} {'rewritten' if changed else 'was up to date'}\n")
    return 0


def _steps(options: argparse.Namespace) -> int:
    from gdpa_kernels.report import lessons

    sys.stdout.write(lessons.report())
    return 0


def _predictions(options: argparse.Namespace) -> int:
    from gdpa_kernels.measuring import record
    from gdpa_kernels.report import clock_free, predictions

    if options.write:
        for made in (predictions, clock_free):
            state = "rewritten" if made.update() else "was up to date"
            sys.stdout.write(f"{made.PATH.relative_to(record.ROOT)} {state}\n")
        return 0
    try:
        data_dir = options.data_dir or record.DATA_DIR
        sys.stdout.write(predictions.report(data_dir, options.record))
        sys.stdout.write(f"\n{clock_free.report(data_dir)}")
    except LookupError as error:
        sys.stderr.write(f"{error.args[0]}\n")
        return 1
    return 0


def _results(options: argparse.Namespace) -> int:
    problem = doctor.no_records(options.data_dir)
    if problem is not None:
        sys.stderr.write(f"{problem}\n")
        return 1
    from gdpa_kernels.measuring import record
    from gdpa_kernels.report import results

    data_dir = options.data_dir or record.DATA_DIR
    read = results.community if options.community else results.table
    table = read(data_dir, gpu=options.gpu, workload=options.workload, latest=not options.all)
    if options.figure is not None:
        table = table[[fnmatch.fnmatchcase(f, options.figure) for f in table["figure"]]]
    if options.scope is not None:
        table = table[table["scope"] == options.scope]
    convert = results.to_csv if options.format == "csv" else results.to_markdown
    sys.stdout.write(convert(table))
    if table.empty:
        sys.stderr.write("no result matches\n")
    return 1 if table.empty else 0


if __name__ == "__main__":
    sys.exit(main())
