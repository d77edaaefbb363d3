"""What the chapter on the emulator does with kernels whose module has a `main` that launches them
as kernel[grid] and checks the result: run, check, and step through broken copies."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import ModuleType

import tritonemu
from gdpa_kernels.report import page, studies
from tritonemu import timeline

SCHEDULES = ("modelled", *range(8))
MAX_STEPS = 100_000


def run(
    module: ModuleType, schedule: str | int = "modelled", **options: object
) -> tritonemu.Report:
    """The first launch of `main` under a schedule. `options`: of `tritonemu.run`.

    Raises EmulatorError for a finding, AssertionError for a wrong result.
    """
    with tritonemu.enabled(schedule=schedule, max_steps=MAX_STEPS, **options) as reports:
        module.main()
    return reports[0]


def findings(call: Callable[[], object], schedules: Sequence[str | int] = SCHEDULES) -> list[str]:
    """`studies.findings` under SCHEDULES."""
    return studies.findings(call, schedules)


def wrong_results(module: ModuleType, schedules: Sequence[str | int] = SCHEDULES) -> int:
    """Under how many schedules `main` finds its result wrong, races not being looked for."""
    wrong = 0
    for schedule in schedules:
        try:
            run(module, schedule, races=False)
        except AssertionError:
            wrong += 1
    return wrong


def step_page(
    module: ModuleType, changes: Mapping[str, Sequence[tuple[str, str]]], file: str, title: str
) -> dict[str, str]:
    """Write the page `file` that steps through `main` of each changed copy of `module`, and return
    what is found in each, "" for nothing. `changes`: of `studies.changed`, by name."""
    timelines, sources, found = {}, {}, {}
    for name, pieces in changes.items():
        copy = studies.changed(module, *pieces)
        sources[name] = Path(copy.__file__).read_text(encoding="utf-8")
        (found[name],) = findings(copy.main, ["modelled"])
        try:
            timelines[name] = run(copy, trace=True).timeline
        except tritonemu.EmulatorError as error:
            timelines[name] = error.report.timeline
    outcomes = {
        name: text or "Nothing found, and the right result." for name, text in found.items()
    }
    made = timeline.interactive(timelines, sources, title=title, outcomes=outcomes)
    page.CSV_DIR.mkdir(parents=True, exist_ok=True)
    (page.CSV_DIR / file).write_text(made, encoding="utf-8")
    return found
