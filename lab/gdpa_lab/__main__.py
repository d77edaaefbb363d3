"""The command line, `python -m gdpa_lab COMMAND`; `--help` lists commands and their options."""

from __future__ import annotations

import argparse
import fnmatch
import gc
import sys
from collections.abc import Sequence

from gdpa_lab import maintain
from gdpa_lab.measuring.files import RecordError


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command and return its exit status; refused records are named on stderr, status 1."""
    options = _parser().parse_args(arguments)
    try:
        return COMMANDS[options.command](options)
    except RecordError as error:
        sys.stderr.write(f"{error}\n")
        return 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m gdpa_lab")
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
    keep = commands.add_parser("keep", help="make a record of what an interrupted run measured")
    keep.add_argument("file", help="a file of data/partial, as `doctor` names it")
    maintain.parser(commands)
    predictions_ = commands.add_parser(
        "predictions",
        help="print what is predicted for a B200, and what its records say of it",
        epilog="Exit status: 1 if --record is of no B200 or a record is refused (named on stderr).",
    )
    predictions_.add_argument("--record", metavar="ID", help="scale by its ceilings, judge by it")
    commands.add_parser("steps", help="print how long the lessons are and the steps between them")
    for command in (doctor_, results_, predictions_):
        command.add_argument("--data-dir", help="folder of systems/ and records/")
    form = results_.add_mutually_exclusive_group()
    form.add_argument(
        "--format",
        choices=("summary", "csv", "markdown"),
        help="summary: a line for each workload; default: on a terminal summary, otherwise csv",
    )
    form.add_argument("--csv", action="store_const", const="csv", dest="format", help="every row")
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
    try:
        from gdpa_lab.report import doctor
    except Exception as error:  # the library imports torch
        sys.stdout.write(f"PyTorch must be installed again: {type(error).__name__}: {error}\n")
        return 1
    found = doctor.findings(options.data_dir)
    sys.stdout.write(doctor.report(found))
    broken = any(f.repair is not None or (f.group == "data" and not f.ok) for f in found)
    return 1 if broken else 0


def _keep(options: argparse.Namespace) -> int:
    from gdpa_lab.measuring import record

    sys.stdout.write(f"{record.keep(options.file)}\n")
    return 0


def _predictions(options: argparse.Namespace) -> int:
    from gdpa_lab.measuring import record
    from gdpa_lab.report import clock_free, predictions, terminal

    try:
        data_dir = options.data_dir or record.DATA_DIR
        terminal.show(*predictions.report(data_dir, options.record))
        sys.stdout.write("\n")
        terminal.show(*clock_free.report(data_dir))
    except LookupError as error:
        sys.stderr.write(f"{error.args[0]}\n")
        return 1
    return 0


def _steps(options: argparse.Namespace) -> int:
    from gdpa_lab.report import lessons

    sys.stdout.write(lessons.report())
    return 0


def _results(options: argparse.Namespace) -> int:
    from gdpa_lab.measuring import record
    from gdpa_lab.report import results, terminal

    problem = record.no_records(options.data_dir)
    if problem is not None:
        sys.stderr.write(f"{problem}\n")
        return 1

    data_dir = options.data_dir or record.DATA_DIR
    read = results.community if options.community else results.table
    table = read(data_dir, gpu=options.gpu, workload=options.workload, latest=not options.all)
    if options.figure is not None:
        table = table[[fnmatch.fnmatchcase(f, options.figure) for f in table["figure"]]]
    if options.scope is not None:
        table = table[table["scope"] == options.scope]
    if table.empty:
        sys.stderr.write("no result matches\n")
        return 1
    form = options.format or ("summary" if terminal.is_terminal() else "csv")
    if form == "summary":
        filters = options.workload, options.figure, options.scope
        published = table[table["workload"].isin(terminal.PUBLISHED)]
        terminal.show_summary(table if any(filters) else published)
        sys.stdout.write(f"\nAll {len(table):,} rows: --csv\n")
    else:
        sys.stdout.write(results.to_csv(table) if form == "csv" else results.to_markdown(table))
    return 0


COMMANDS = {
    "doctor": _doctor,
    "results": _results,
    "keep": _keep,
    "predictions": _predictions,
    "steps": _steps,
    "maintain": lambda options: maintain.main(options.file),
}

if __name__ == "__main__":
    gc.disable()  # a fifth of the time of reading records, whose values live as long as the command
    sys.exit(main())
