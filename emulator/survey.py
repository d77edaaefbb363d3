"""Surveys how many kernels of other people's programs the emulator runs.

    python emulator/survey.py [--programs N] [--seconds N] [--masked zero] FILE.py ...

Each file is a program for a GPU that launches kernels, a test for example; it runs in a process of
its own, on a fake GPU. Only the first, the middle and the last programs of a grid run, `--programs`
in all, and only a few launches of each kernel: this shows whether its operations are known, not
whether its results are right, and reads of what the others would have written are let pass. With
`--programs 0` all run. A finding ends its launch and not the program. Then come the kernels
that did not run to the end, by the message of their first launch that did not, what could not be
judged, and barriers that did not go through both parities. Findings after the first of a file are
marked: they may come from what an unfinished kernel left behind.
"""

import argparse
import collections
import json
import os
import re
import runpy
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any, NoReturn

MARK = "@survey "
LAUNCHES = 12


def _name(kernel: Any) -> str:
    while not hasattr(kernel, "params"):
        kernel = kernel.fn
    return f"{Path(kernel.fn.__code__.co_filename).name}:{kernel.fn.__name__}"


def examine(path: str, programs: int, seconds: int, masked: str) -> None:
    """Run one program, and print a line with the outcome of its kernels."""
    import tritonemu
    from tritonemu import launch_hooks
    from tritonemu.launch import Launch, Report
    from tritonemu.messages import Remarks

    class Sample(collections.deque):
        def extend(self, clusters: Any) -> None:
            every, half = list(clusters), programs // 2
            if len(every) > programs > 0:
                middle = len(every) // 2
                every = every[:half] + every[middle : middle + 1] + every[half + 1 - programs :]
            super().extend(every)

    messages: dict[str, str] = {}
    reports: list[Any] = []
    launches: collections.Counter[str] = collections.Counter()
    begin, run = Launch.__init__, launch_hooks.run_enabled

    def begin_few(self: Launch, *args: Any, **kwargs: Any) -> None:
        begin(self, *args, **kwargs)
        self.clusters = Sample()

    def run_and_note(kernel: Any, *args: Any, **kwargs: Any) -> Report:
        opened = launch_hooks._opened()
        if opened.reports is not ours:  # what tuning leaves is asked for, and noted there
            return run(kernel, *args, **kwargs)
        name = _name(kernel)
        launches[name] += 1
        if launches[name] > LAUNCHES and programs:
            return Report(opened.arch)
        try:
            reports.append(run(kernel, *args, **kwargs))
            messages.setdefault(name, "")
            return reports[-1]
        except tritonemu.EmulatorError as error:
            if error.unfit:  # autotuning takes another configuration
                raise
            later = "(later) " * any(messages.values())
            messages[name] = messages.get(name) or f"{later}{type(error).__name__}: {error.args[0]}"
        return Report(opened.arch)

    def answer(ended: str) -> NoReturn:
        summary = Remarks()
        summary.add(reports)
        result = {"ended": ended, "kernels": messages, "remarks": summary.lines()}
        print("\n" + MARK + json.dumps(result), flush=True)
        os._exit(0)

    Launch.__init__, launch_hooks.run_enabled = begin_few, run_and_note
    signal.signal(signal.SIGALRM, lambda *_: answer(f"TimeoutError: after {seconds} s"))
    signal.alarm(seconds)
    ended = ""
    unwritten = "allow" if programs else "error"
    options = {"max_steps": 200_000, "masked": masked, "uninitialized": unwritten}
    sys.argv = [path]
    sys.path.insert(0, str(Path(path).resolve().parent))
    try:
        with tritonemu.fake_gpu(), tritonemu.enabled(**options) as ours:
            runpy.run_path(path, run_name="__main__")
    except BaseException as error:
        ended = f"{type(error).__name__}: {error}"
    answer(ended)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("files", nargs="+", metavar="FILE.py")
    parser.add_argument("--programs", type=int, default=6)
    parser.add_argument("--seconds", type=int, default=60, help="for each file")
    parser.add_argument("--masked", choices=("nan", "zero"), default="nan")
    parser.add_argument("--one", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        examine(options.files[0], options.programs, options.seconds, options.masked)
    kernels: dict[str, str] = {}
    ends: list[str] = []
    said: collections.Counter[str] = collections.Counter()
    for file in options.files:
        command = [sys.executable, __file__, "--one", f"--programs={options.programs}"]
        command += [f"--seconds={options.seconds}", f"--masked={options.masked}", file]
        try:
            process = subprocess.run(
                command, capture_output=True, text=True, timeout=options.seconds + 30
            )
            lines = [line for line in process.stdout.splitlines() if line.startswith(MARK)]
        except subprocess.TimeoutExpired:
            lines = []
        result = {"ended": "no answer", "kernels": {}, "remarks": []}
        if lines:
            result = json.loads(lines[-1].removeprefix(MARK))
        for name, message in result["kernels"].items():
            kernels[name] = kernels.get(name) or message
        said.update(result["remarks"])
        if result["ended"]:
            ends.append(f"{file}: {result['ended'][:150]}")
    ran = sum(not message for message in kernels.values())
    print(f"{ran} of {len(kernels)} kernels ran to the end, of {len(options.files)} programs")
    by_reason: dict[str, list[str]] = collections.defaultdict(list)
    for name, message in kernels.items():
        if message:
            by_reason[re.sub(r"\d+", "#", message)[:110]].append(f"{name}: {message}")
    for reason in sorted(by_reason, key=lambda reason: -len(by_reason[reason])):
        print(*by_reason[reason], sep="\n")
    print("\nremarks:", *(said or ["none"]), sep="\n")
    print("\nprograms that ended early:", *(ends or ["none"]), sep="\n")


if __name__ == "__main__":
    main()
