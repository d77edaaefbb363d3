"""`python -m tritonemu FILE.py:FUNCTION`: run what a function launches in the emulator.

The function takes no argument and launches kernels on CPU tensors. They run under the modelled
schedule and those of a `--search` (see `search`), or under one named by `--schedule`, as findings
name it. `--arch` names the device. `--svg`, `--html` and `--trace` keep a timeline: of the launch
with the finding, or else of the first. `--json` writes what was found and what was covered (see
`messages`). The exit status is 0 if nothing was found, 1 after a finding, 2 for a
wrong command line.
"""

import argparse
import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

from . import ARCHITECTURES, EmulatorError, Report, intercept
from .messages import cta_of, explain, page, write_json
from .orders import order_of
from .search import KINDS, Search
from .undefined import MODES


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message}\n")


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be an integer of at least 1, got {text!r}")
    return int(text)


def _schedule(text: str) -> str:
    try:
        return str(order_of(text)) and text
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def load(target: str) -> Callable[[], object]:
    """The function FUNCTION of `FILE.py:FUNCTION`; ArgumentTypeError if there is none."""
    path, _, name = target.rpartition(":")
    if not path.endswith(".py") or not name:
        raise argparse.ArgumentTypeError(f"target must be FILE.py:FUNCTION, got {target!r}")
    if not Path(path).is_file():
        raise argparse.ArgumentTypeError(f"target must name an existing file, got {path!r}")
    spec = importlib.util.spec_from_file_location(Path(path).stem, path)
    module = importlib.util.module_from_spec(spec)
    sys.path.insert(0, str(Path(path).resolve().parent))
    sys.modules[spec.name] = module
    try:
        spec.loader.exec_module(module)
    except SyntaxError as error:
        place = f"{error.filename}:{error.lineno}"
        raise argparse.ArgumentTypeError(
            f"target must be valid Python, got {error.msg} at {place}"
        ) from None
    found = getattr(module, name, None)
    if not callable(found):
        got = type(found).__name__ if hasattr(module, name) else "none"
        raise argparse.ArgumentTypeError(f"{path} must define a function {name!r}, got {got}")
    return found


def summary(report: Report) -> str:
    """One launch in a few lines."""
    lines = [
        f"{report.programs} CTAs on {report.arch}: {report.dots} MMAs, "
        f"{report.bytes_loaded} bytes loaded, {report.bytes_stored} stored"
    ]
    if report.warps:
        roles = ", ".join(f"{role} {warps}" for role, warps in report.warps.items())
        lines.append(
            f"  warps: {roles}; shared memory {report.shared_bytes} bytes, tensor memory "
            f"{report.tensor_columns} columns, {report.barriers} mbarriers"
        )
    checks = ", ".join(f"{kind} {count}" for kind, count in report.checks.items() if count)
    lines.append(f"  checked: {checks}")
    return "\n".join(lines)


def _draw(options: argparse.Namespace, report: Report, error: EmulatorError | None = None) -> None:
    """Write what was asked for of a launch, which may have ended with a finding."""
    timeline = report.timeline
    if timeline is None or not timeline.events:
        return
    if options.trace:
        timeline.save_chrome_trace(options.trace)
    if options.svg:
        cta = cta_of(error) if error else min(event.cta for event in timeline.events)
        Path(options.svg).write_text(timeline.svg(cta), encoding="utf-8")
    if options.html:
        Path(options.html).write_text(page(report, error), encoding="utf-8")


def _command(options: argparse.Namespace, schedule: str) -> str:
    """The command that shows a finding again."""
    parts = ["python -m tritonemu", options.target, f"--arch {options.arch}"]
    parts += ["--allow-uninitialized"] * options.allow_uninitialized
    parts += [f"--masked {options.masked}"] * (options.masked != "nan")
    return " ".join([*parts, f"--schedule {schedule}"])


def main(arguments: list[str] | None = None) -> int:
    """Exit status 0 if nothing was found, 1 with a finding, 2 for a bad command line."""
    parser = _Parser(
        prog="python -m tritonemu",
        description="Call FUNCTION() of FILE.py; every kernel it launches on CPU tensors, as "
        "kernel[grid](...), runs in the emulator, under the modelled schedule and random ones.",
    )
    parser.add_argument("target", metavar="FILE.py:FUNCTION", help="a function without arguments")
    parser.add_argument("--arch", choices=ARCHITECTURES, default="sm_90")
    parser.add_argument("--search", choices=KINDS, default="random", help="(default random)")
    parser.add_argument(
        "--schedules", type=_positive, default=4, metavar="N", help="to search (default 4)"
    )
    parser.add_argument("--depth", type=_positive, default=3, help="of --search pct (default 3)")
    parser.add_argument("--schedule", type=_schedule, metavar="NAME", help="this one only")
    parser.add_argument("--json", metavar="FILE", help="write what was found, for machines")
    parser.add_argument("--html", metavar="FILE", help="write a page that steps through a launch")
    parser.add_argument("--trace", metavar="FILE", help="write a Chrome trace of the first launch")
    parser.add_argument("--svg", metavar="FILE", help="draw the first CTA of the first launch")
    parser.add_argument(
        "--allow-uninitialized", action="store_true", help="reads of unwritten memory yield NaN"
    )
    parser.add_argument(
        "--masked", choices=MODES, default="nan", help="lanes off without `other` (default nan)"
    )
    options = parser.parse_args(arguments)
    try:
        function = load(options.target)
    except argparse.ArgumentTypeError as error:
        parser.error(str(error))

    wanted = bool(options.trace or options.svg or options.html)
    uninitialized = "allow" if options.allow_uninitialized else "error"
    more = {"uninitialized": uninitialized, "masked": options.masked}
    search = Search(options.search, options.schedules, options.depth, only=options.schedule)
    for order in search:
        first = search.tried == 1
        try:
            with intercept(options.arch, schedule=order, trace=wanted and first, **more) as reports:
                function()
        except EmulatorError as error:
            replay = _command(options, error.schedule)
            print(f"{type(error).__name__} (schedule {order}): {error}", file=sys.stderr)
            print(f"{explain(error)}\n  {replay}", file=sys.stderr)
            if wanted:
                traced = error if first else _traced(function, options.arch, error, more)
                _draw(options, traced.report, traced)
            if options.json:
                write_json(options.json, error, replay, search)
            return 1
        except Exception as error:
            if hasattr(error, "add_note"):
                error.add_note(f"  {_command(options, str(order))}")
            raise
        if not reports:
            print(f"{options.target} launched no kernel", file=sys.stderr)
            return 1
        if first:
            print("\n".join(map(summary, reports)))
            if wanted:
                _draw(options, reports[0])
    print(f"nothing found under {search}")
    if options.json:
        write_json(options.json, None, "", search)
    return 0


def _traced(
    function: Callable[[], object], arch: str, error: EmulatorError, more: dict[str, str]
) -> EmulatorError:
    """The same finding once more, with a timeline."""
    try:
        with intercept(arch, schedule=error.schedule, trace=True, **more):
            function()
    except EmulatorError as again:
        return again
    return error


if __name__ == "__main__":
    sys.exit(main())
