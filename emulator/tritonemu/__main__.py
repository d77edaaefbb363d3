"""`python -m tritonemu FILE.py:FUNCTION`: run what a function launches in the emulator.

The function takes no argument and launches kernels on CPU tensors. They run under the modelled and
some random schedules (`--schedules`); `--arch` names the device, `--svg` and `--trace` keep a
timeline of the first launch. The exit status is 0 if nothing was found, 1 after a finding, 2 for a
wrong command line.
"""

import argparse
import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

from . import ARCHITECTURES, EmulatorError, Report, intercept
from .undefined import MODES


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message}\n")


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be an integer of at least 1, got {text!r}")
    return int(text)


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


def _draw(report: Report, trace: str | None, svg: str | None) -> None:
    """Write what was asked for of a launch, which may have ended with a finding."""
    if trace:
        report.timeline.save_chrome_trace(trace)
    if svg and report.timeline.events:
        cta = min(event.cta for event in report.timeline.events)
        Path(svg).write_text(report.timeline.svg(cta), encoding="utf-8")


def main(arguments: list[str] | None = None) -> int:
    """Exit status 0 if nothing was found, 1 with a finding, 2 for a bad command line."""
    parser = _Parser(
        prog="python -m tritonemu",
        description="Call FUNCTION() of FILE.py; every kernel it launches on CPU tensors, as "
        "kernel[grid](...), runs in the emulator, under the modelled schedule and random ones.",
    )
    parser.add_argument("target", metavar="FILE.py:FUNCTION", help="a function without arguments")
    parser.add_argument("--arch", choices=ARCHITECTURES, default="sm_90")
    parser.add_argument(
        "--schedules", type=_positive, default=4, metavar="N", help="random schedules (default 4)"
    )
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

    wanted = bool(options.trace or options.svg)
    uninitialized = "allow" if options.allow_uninitialized else "error"
    for schedule in ("modelled", *range(options.schedules)):
        first = schedule == "modelled"
        try:
            with intercept(
                options.arch,
                schedule=schedule,
                trace=wanted and first,
                uninitialized=uninitialized,
                masked=options.masked,
            ) as reports:
                function()
        except EmulatorError as error:
            if error.report is not None and error.report.timeline:
                _draw(error.report, options.trace, options.svg)
            print(f"{type(error).__name__} (schedule {schedule}): {error}", file=sys.stderr)
            return 1
        if not reports:
            print(f"{options.target} launched no kernel", file=sys.stderr)
            return 1
        if first:
            print("\n".join(map(summary, reports)))
            if wanted:
                _draw(reports[0], options.trace, options.svg)
    print(f"nothing found under the modelled and {options.schedules} random schedules")
    return 0


if __name__ == "__main__":
    sys.exit(main())
