"""`python -m tritonemu FILE.py [ARGUMENT ...]`: run a GPU program in the emulator, unedited.

Also `python -m tritonemu FILE.py:FUNCTION`, which calls one function without arguments, and
`python -m tritonemu --each FILE.py ...`, each program in a process of its own. Every
kernel that is launched as `kernel[grid](...)` runs under the modelled schedule and those of a
`--search` (see `search`), or under one named by `--schedule`, as findings name it; the program is
run once for each, and prints the first time. There seems to be a GPU (`--arch`), whose tensors
lie on the CPU. `--svg` and `--html` keep a timeline: of the launch with the finding,
or else of the first. `--json` writes what was found and what was covered (its fields: docs/api.md).
Options stand before FILE.py; what follows it belongs to the program.

The exit status is 0 if nothing was found, 1 after a finding (also if the program itself fails under
some schedule, and not under the modelled one), 2 for a wrong command line, 3 if the program could
not be checked (it fails by itself, launches no kernel, or uses an operation that the
emulator does not know), 4 after `--timeout` seconds.
"""

import argparse
import contextlib
import importlib.util
import io
import json
import os
import re
import runpy
import shlex
import signal
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn
from unittest import mock

import torch
import triton

from . import EmulatorError, Report, Unsupported, WrongResult, fake_gpu, gpu, processes
from .errors import COMMAND, flags
from .launch_hooks import current_reports
from .messages import page, painted
from .options import add_options, keywords, positive, repeated
from .orders import order_of
from .sarif import as_sarif
from .search import KINDS, Search
from .verdict import Verdict, check

CLEAN, FOUND, USAGE, UNCHECKED, TIMEOUT = range(5)

_PACKAGE = os.path.join(os.path.dirname(__file__), "")
_OURS = (_PACKAGE, "<frozen ")
_MACHINERY = (
    *_OURS,
    *(os.path.join(os.path.dirname(module.__file__), "") for module in (torch, triton)),
)


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        self.exit(USAGE, f"{self.prog}: {message}\n")


def _seconds(text: str) -> float:
    with contextlib.suppress(ValueError):
        if 0 < float(text) < float("inf"):
            return float(text)
    raise argparse.ArgumentTypeError(f"must be a number of seconds above 0, got {text!r}")


def _schedule(text: str) -> str:
    try:
        order_of(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    return text


def split(target: str) -> tuple[str, str | None]:
    """Split `FILE.py` or `FILE.py:FUNCTION`; ArgumentTypeError for others."""
    match = re.fullmatch(r"(.*\.py)(?::(\w+))?", target)
    if match is None:
        raise argparse.ArgumentTypeError(
            f"target must be FILE.py or FILE.py:FUNCTION, got {target!r}"
        )
    path, name = match.groups()
    if not Path(path).is_file():
        raise argparse.ArgumentTypeError(f"target must name an existing file, got {path!r}")
    return path, name


def load(path: str, name: str) -> Callable[[], object]:
    """Load the function `name` of the file at `path`; ArgumentTypeError if there is none."""
    spec = importlib.util.spec_from_file_location(Path(path).stem, path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    function = getattr(module, name, None)
    if not callable(function):
        got = type(function).__name__ if hasattr(module, name) else "none"
        raise argparse.ArgumentTypeError(f"{path} must define a function {name!r}, got {got}")
    return function


def _summary(verdict: Verdict) -> str:
    """Summarize the first launch of each kernel, with its name if there are others; and remarks."""
    kernels: dict[str, list[Report]] = {}
    for report in verdict.reports:
        kernels.setdefault(report.kernel, []).append(report)
    lines = []
    for name, (report, *others) in kernels.items():
        if len(verdict.reports) > 1:
            times = f", the first of {1 + len(others)} launches" if others else ""
            lines.append(f"{name}{times}:")
        lines.append(
            f"{report.programs} CTAs on {report.arch}: {report.dots} MMAs, "
            f"{report.bytes_loaded} bytes loaded, {report.bytes_stored} stored"
        )
        if report.warps:
            roles = ", ".join(f"{role} {warps}" for role, warps in report.warps.items())
            memory = f"{report.shared_bytes} bytes, tensor memory {report.tensor_columns} columns"
            lines.append(f"  warps: {roles}; shared memory {memory}, {report.barriers} mbarriers")
        checks = ", ".join(f"{kind} {count}" for kind, count in report.checks.items() if count)
        lines.append(f"  checked: {checks}")
    return "\n".join([*lines, *verdict.lines()])


def _draw(options: argparse.Namespace, report: Report | None, error: EmulatorError | None) -> None:
    """Write the requested pictures of a launch, which may have ended with a finding."""
    timeline = report.timeline if report else None
    if timeline is None or not timeline.events:
        print("tritonemu: nothing is drawn of a launch that did nothing", file=sys.stderr)
        return
    if options.svg:
        Path(options.svg).write_text(timeline.finding(), encoding="utf-8")
    if options.html:
        Path(options.html).write_text(page(report, error), encoding="utf-8")


def _save(path: str | None, value: Any) -> None:
    if path:
        Path(path).write_text(json.dumps(value, indent=1) + "\n", encoding="utf-8")


def _command(options: argparse.Namespace, schedule: str) -> str:
    command = ["python", "-m", "tritonemu", *repeated(options, "--", "arch")]
    return shlex.join([*command, "--schedule", schedule, options.target, *options.arguments])


def _place(frames: list[tuple[FrameType, int]]) -> str:
    """Return file and line of the innermost frame, outermost first, that is the program's."""
    locations = [(frame.f_code.co_filename, line) for frame, line in frames]
    in_program = [location for location in locations if not location[0].startswith(_MACHINERY)]
    return "{}:{}".format(*in_program[-1]) if in_program else "the start"


def _failure(error: BaseException) -> str:
    """Explain why the program failed: a line for a launch refused here, else its traceback."""
    frames = list(traceback.walk_tb(error.__traceback__))
    inner = frames[-1][0].f_code.co_filename if frames else ""
    if inner.startswith(_PACKAGE) and inner != gpu.__file__:
        return f"{_place(frames)}: {type(error).__name__}: {error}"
    shown = traceback.TracebackException.from_exception(error)
    shown.stack[:] = [each for each in shown.stack if not each.filename.startswith(_OURS)]
    return "".join(shown.format()).rstrip()


def _end_after(seconds: float, report: str | None) -> None:
    """End this process with TIMEOUT after this time, whatever it does; report: for `--json`."""

    def end(number: int, frame: FrameType | None) -> None:
        frames = list(traceback.walk_stack(frame))[::-1]
        location = _place(frames)
        print(f"tritonemu: timeout after {seconds:g} s at {location}", file=sys.stderr)
        _save(report, {"found": None, "timeout": {"seconds": seconds, "place": location}})
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(TIMEOUT)

    signal.signal(signal.SIGALRM, end)
    signal.setitimer(signal.ITIMER_REAL, seconds)


def _parser() -> _Parser:
    parser = _Parser(
        prog="python -m tritonemu",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("target", metavar="FILE.py[:FUNCTION]", help="a program, or a function without arguments")
    add("arguments", nargs=argparse.REMAINDER, metavar="ARGUMENT", help="of the program")
    many = "FILE.py ...: the arguments are programs, too, each run in its own process"
    add("--each", action="store_true", help=many)
    add("--search", choices=KINDS, default="random", help="(default random)")
    several = "to search (default 4 random, at most 1000 exhaustive)"
    add("--schedules", type=positive, metavar="N", help=several)
    add("--schedule", type=_schedule, metavar="NAME", help="this one only")
    add_options(add)
    add("--timeout", type=_seconds, metavar="SECONDS", help="end then, with exit status 4")
    add("--json", metavar="FILE", help="write what was found, for machines")
    add("--sarif", metavar="FILE", help="write what was found, for code hosts")
    add("--html", metavar="FILE", help="write a page that steps through a launch")
    add("--svg", metavar="FILE", help="draw the finding, or the first CTA of the first launch")
    return parser


def _parse(arguments: list[str]) -> argparse.Namespace:
    """Parse the options, with `path` and `name` of the target; options may follow a function."""
    parser = _parser()
    options = parser.parse_args(arguments)
    target, rest = options.target, options.arguments
    try:
        path, name = split(target)
    except argparse.ArgumentTypeError as error:
        parser.error(str(error))
    if name is not None:
        leading = arguments[: len(arguments) - len(rest) - 1]
        options = parser.parse_args([*leading, *rest, target])
        if options.target != target:
            parser.error(f"{target} takes no arguments, got {options.target!r}")
    options.path, options.name, options.function = path, name, None
    return options


def _run_each(options: argparse.Namespace, arguments: list[str]) -> int:
    """Run all programs of `--each`; return the exit status."""
    programs = [options.target, *options.arguments]
    leading = arguments[: len(arguments) - len(programs)]
    if drawn := [f"--{name}" for name in ("html", "svg") if getattr(options, name)]:
        _parser().error(f"--each takes no {drawn[0]}, which draws one program")
    try:
        for program in programs:
            split(program)
    except argparse.ArgumentTypeError as error:
        _parser().error(str(error))

    def run(program: str, report: str) -> int:
        one = _parse([*leading, program])
        one.json, one.sarif = report, None
        return _run_program(one)

    ran = [processes.run(run, program) for program in programs]
    print(processes.summary(ran))
    _save(options.json, {"programs": ran})
    if options.sarif:
        unchecked = [each["program"] for each in ran if each["status"] not in (CLEAN, FOUND)]
        reports = [each["report"] for each in ran if each["report"]]
        _save(options.sarif, as_sarif(reports, Path.cwd(), unchecked))
    return processes.status(ran)


def main(arguments: list[str] | None = None) -> int:
    arguments = sys.argv[1:] if arguments is None else arguments
    options = _parser().parse_args(arguments)
    return _run_each(options, arguments) if options.each else _run_program(_parse(arguments))


def _run_program(options: argparse.Namespace) -> int:
    """Run one program where there seems to be a GPU; return the exit status."""
    folder, argv = Path(options.path).resolve().parent, [options.path, *options.arguments]
    device = fake_gpu(options.arch, multiprocessors=options.multiprocessors)
    as_program = mock.patch.multiple(sys, argv=argv, path=[str(folder), *sys.path])
    with device, as_program, flags(COMMAND):
        if options.timeout:
            _end_after(options.timeout, options.json)
        try:
            return _check(options)
        except argparse.ArgumentTypeError as error:
            _parser().error(str(error))
        finally:
            if options.timeout:
                signal.setitimer(signal.ITIMER_REAL, 0)


class _NotChecked(Exception):
    """The program fails by itself, under the modelled schedule."""


def _check(options: argparse.Namespace) -> int:
    """Run the program under each schedule; return the exit status."""
    draws = bool(options.svg or options.html)
    search = Search(options.search, options.schedules, only=options.schedule)

    def program() -> None:
        quiet = contextlib.redirect_stdout(io.StringIO()) if search.tried > 1 else None
        with quiet or contextlib.nullcontext():
            failed = _run(options)
        reports = current_reports()
        if not failed and not reports:
            failed = f"{options.target} launched no kernel"
        if failed and not reports.findings:
            if search.order.modelled:
                raise _NotChecked(failed)
            message = f"the program fails under this schedule:\n{failed}"
            report = reports[0] if reports else Report(options.arch)
            raise WrongResult(message, ("", 0), report=report)

    try:
        verdict = check(program, search=search, trace=draws, **keywords(options))
    except _NotChecked as failed:
        print(f"{failed}\n  {_command(options, str(search.order))}", file=sys.stderr)
        return UNCHECKED
    error = verdict.finding
    replay = _command(options, error.schedule) if error else ""
    if error:
        print(painted(f"{verdict}\n  {replay}", sys.stderr), file=sys.stderr)
    else:
        count = sum(verdict.unjudged.values())
        said = f"nothing found under {search}{f'; {count} not judged' * bool(count)}"
        print(painted(f"{said}\n{_summary(verdict)}", sys.stdout))
    if draws:
        _draw(options, error.report if error else verdict.reports[0], error)
    written = verdict.as_json(replay)
    _save(options.json, written)
    if options.sarif:
        _save(options.sarif, as_sarif([written], Path.cwd()))
    return CLEAN if not error else UNCHECKED if isinstance(error, Unsupported) else FOUND


def _run(options: argparse.Namespace) -> str:
    """Run the program once; return why it failed."""
    torch.manual_seed(0)
    try:
        if options.name is None:
            runpy.run_path(options.path, run_name="__main__")
        else:
            options.function = options.function or load(options.path, options.name)
            options.function()
    except argparse.ArgumentTypeError:
        raise
    except SystemExit as error:
        if error.code not in (None, 0):
            return f"{options.target} ended with exit status {error.code}"
    except EmulatorError as error:
        if error.report is not None:
            raise
        return _failure(error)
    except Exception as error:
        return _failure(error)
    return ""


if __name__ == "__main__":
    sys.exit(main())
