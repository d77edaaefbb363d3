"""Judges whether a launch notices what `mutants` changes: run mutants, find the survivors.

    verdict = judge(mutant, load, launches)

A launch that does not execute the changed statement cannot tell; see `executed_lines`.
"""

import dis
import importlib.util
import sys
import tempfile
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import FrameType, ModuleType
from typing import Any, NamedTuple
from unittest import mock

import pytest

import tritonemu
from emulator.tests.mistakes import KINDS
from emulator.tests.mutants import Mutant, enumerate_mutants

# The modelled schedule finds whatever is found so far: whether an access is ordered does not depend
# on who runs when. The other one looks at the survivors again.
SCHEDULES = ("modelled", 0)


@dataclass(frozen=True)
class Verdict:
    """Outcome for a mutant: the name of the error, "" if it was not found, and the schedule."""

    error: str
    schedule: str | int | None = None
    message: str = ""


def import_file(path: Path) -> ModuleType:
    """A file as a module of its own, which nobody else imports; it may import the project's."""
    name = f"mutant_{path.stem}".replace("-", "_")
    spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    with mock.patch.dict(sys.modules, {name: module}):
        spec.loader.exec_module(module)
    return module


def _starts(code: bytes) -> bool:
    """Return whether code begins as a statement does.

    The jump at the end of a loop, and the call that lowering adds after a task, are counted as the
    last line before them, which need not have been executed.
    """
    names = (dis.opname[operation] for operation in code[::2])
    first = next(name for name in names if name != "EXTENDED_ARG")
    return not first.startswith(("JUMP", "LOAD_METHOD", "PRECALL"))


def executed_lines(path: Path, launch: Callable[[], Any]) -> set[int]:
    """The lines of a file that are executed while `launch` is called."""
    lines: set[int] = set()
    file = str(path)

    def note(frame: FrameType, event: str, arg: Any) -> Callable | None:
        if frame.f_code.co_filename != file:
            return None
        if event == "line" and _starts(frame.f_code.co_code[frame.f_lasti :]):
            lines.add(frame.f_lineno)
        return note

    previous = sys.gettrace()
    sys.settrace(note)
    try:
        launch()
    finally:
        sys.settrace(previous)
    return lines


def judge(
    mutant: Mutant,
    load: Callable[[Path], ModuleType],
    launches: Iterable[Callable[[ModuleType, str | int], Any]],
    schedules: Iterable[str | int] = SCHEDULES,
) -> Verdict:
    """Run the mutant until somebody notices.

    load: imports the changed file. launches: each runs the kernel of such a module under a
    schedule, and raises EmulatorError, or AssertionError for a wrong result, if it finds something;
    they should pass `max_steps`, since a mutant may loop for ever.
    """
    launches = list(launches)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / mutant.path.name
        path.write_text(mutant.source)
        module = load(path)
        for schedule in schedules:
            for launch in launches:
                try:
                    launch(module, schedule)
                except tritonemu.EmulatorError as error:
                    return Verdict(type(error).__name__, schedule, str(error))
                except AssertionError as error:
                    return Verdict("wrong result", schedule, str(error))
    return Verdict("")


SAMPLED = pytest.mark.parametrize(
    "every",
    (
        pytest.param(False, id="sample", marks=pytest.mark.sweep),
        pytest.param(True, id="all_mutants", marks=pytest.mark.nightly),
    ),
)
"""For a test that judges mutants: a fixed sample of them in the sweeps, all of them at night."""

SCHEDULES = pytest.mark.parametrize(
    "seeds",
    (
        pytest.param(range(2), id="two"),
        pytest.param(range(2, 6), id="some", marks=pytest.mark.sweep),
        pytest.param(range(6, 24), id="others", marks=pytest.mark.nightly),
    ),
)
"""For a test of many schedules: seeds of random ones, more in the sweeps and more at night."""


def sampled(mutants: list[Mutant]) -> list[Mutant]:
    """The first mutant of each kind and every sixth after it."""
    return [m for kind in KINDS for m in [m for m in mutants if m.kind == kind][::6]]


def executed(
    path: Path,
    kernel: str,
    module: ModuleType,
    launches: Iterable[Callable[[ModuleType, str | int], Any]],
) -> list[tuple[Mutant, list[Callable[[ModuleType, str | int], Any]]]]:
    """All mutants of `kernel`, each with the launches that execute what it changes."""
    seen = [
        (launch, executed_lines(path, partial(launch, module, "modelled"))) for launch in launches
    ]
    return [
        (mutant, [launch for launch, lines in seen if not lines.isdisjoint(range(*mutant.span))])
        for mutant in enumerate_mutants(path, kernel)
    ]


class Judged(NamedTuple):
    """executed: how many mutants some launch executes. what: those of them that were judged.
    survivors: those that none noticed."""

    executed: int
    what: list[str]
    survivors: list[str]

    def known(self, harmless: Iterable[str]) -> list[str]:
        """List those of `harmless` that were judged."""
        return sorted(what for what in harmless if what in self.what)


def surviving(
    module: ModuleType,
    kernel: str,
    launches: Iterable[Callable[[ModuleType, str | int], Any]],
    every: bool = True,
) -> Judged:
    """Judge all mutants of `kernel`, or a sample, by the launches that execute what they change."""
    executing = executed(Path(module.__file__), kernel, module, list(launches))
    used = {mutant: launches for mutant, launches in executing if launches}
    chosen = list(used) if every else sampled(list(used))
    survivors = [m.what for m in chosen if not judge(m, import_file, used[m]).error]
    return Judged(len(used), [mutant.what for mutant in chosen], sorted(survivors))
