"""`python -m exercises [NAME]`: opens an exercise, or judges what you have written.

Without NAME: the list. Your files are in mine/; nothing else is written.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
import time
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING

from exercises.blanks import clean
from exercises.catalogue import CATALOGUE, blank, solution_of

if TYPE_CHECKING:
    from exercises.hints import Failure

FOLDER = Path(__file__).parents[1] / "mine"
COLOURS = {"bold": 1, "red": 31, "green": 32, "yellow": 33}
IS_COLOURED = sys.stdout.isatty() or "FORCE_COLOR" in os.environ


def paint(colour: str, text: str) -> str:
    return f"\033[{COLOURS[colour]}m{text}\033[0m" if IS_COLOURED else text


def excerpt(source: list[str], line: int, around: int = 2) -> list[str]:
    """The lines about one of a file, which is marked."""
    shown = range(max(1, line - around), min(len(source), line + around) + 1)
    marks = (paint("red", ">") if i == line else " " for i in shown)
    return [f"  {m} {i:4} | {source[i - 1]}" for m, i in zip(marks, shown, strict=True)]


def describe(failure: Failure, level: int, rules: list) -> list[str]:
    """The lines that are printed of a failure: what was found, where, and a hint."""
    from exercises.hints import hint_of

    hint = hint_of(failure, rules)
    first, *more = failure.message.splitlines() or [""]
    lines = [f"  {paint('red', 'not')}  {failure.stage:15} {failure.kind}: {first[:150]}"]
    lines += [f"{'':23}{line[:150]}" for line in more[:4]]
    lines += excerpt(failure.source, hint.line) if hint.line else []
    for what, line in failure.lines[:6]:
        if line != hint.line:
            lines.append(f"    {line:4} | {failure.source[line - 1].strip()[:76]:76} ({what})")
    levels = zip(("what", "why", "do"), hint.texts[:level], strict=False)
    lines += [f"  {paint('yellow', word):5} {text}" for word, text in levels]
    if hint.rule:
        further = f"--hint {level + 1} says more; " if level < 3 else ""
        lines.append(f"        {further}chapter {hint.chapter} [{hint.rule}]")
    return lines


def judge(name: str, path: Path, *, level: int, quick: bool) -> bool:
    """Judge a file and print what is found; leaves drawings beside it. True if it passed."""
    from exercises.grading import exercise_of, grade
    from exercises.hints import Failure

    exercise, entry = exercise_of(name), CATALOGUE[name]
    print(paint("bold", f"{name}: {entry.title}"), f"({entry.chapter}, {entry.minutes} minutes)")
    begin = time.perf_counter()
    try:
        for stage in grade(exercise, path, quick=quick):
            said = f"{stage.stage:15} {stage.said}  [{stage.seconds:.1f} s]"
            print(f"  {paint('green', 'ok')}   {said}", flush=True)
            if stage.page:
                page = path.with_suffix(".html")
                page.write_text(stage.page, encoding="utf-8")
                print(f"        step through both: {page}")
    except Failure as failure:
        print("\n".join(describe(failure, level, exercise.rules)))
        if failure.drawing:
            drawing = path.with_suffix(".svg")
            drawing.write_text(failure.drawing, encoding="utf-8")
            print(f"        drawn: {drawing}")
        return False
    finally:
        print(f"        {time.perf_counter() - begin:.1f} s")
    print(f"  {paint('green', 'done')} Ours: python -m exercises {name} --solution")
    return True


def remembered(what: str, name: str = "", value: str = "") -> dict[str, str]:
    """Read what is kept of each exercise, after keeping a first value of one."""
    path = FOLDER / f"{what}.json"
    values = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    if value and name not in values:
        values[name] = value
        path.write_text(json.dumps(values, indent=1) + "\n", encoding="utf-8")
    return values


def remember_prediction(name: str, path: Path) -> None:
    """Keep the first prediction in a file, before anything is judged, and show it later."""
    line = re.search(r"^CYCLES = ([^#\n]+)", path.read_text(encoding="utf-8"), re.MULTILINE)
    value = line[1].strip() if line else "None"
    first = remembered("predictions", name, value if value != "None" else "").get(name, value)
    if first != value:
        print(f"        your first prediction: {first} cycles")


def changed(path: Path) -> int:
    """When a file was changed; 0 while an editor replaces it."""
    return path.stat().st_mtime_ns if path.exists() else 0


def print_list() -> None:
    passed = remembered("done")
    for name, entry in CATALOGUE.items():
        state = "begun" if (FOLDER / f"{name}.py").exists() else ""
        state = "done" if name in passed else state
        print(f"{state:5} {name:14} {entry.minutes:3} min  {entry.chapter:34} {entry.title}")


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m exercises", description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    add = parser.add_argument
    add("name", nargs="?", choices=CATALOGUE, metavar="NAME")
    add("--watch", action="store_true", help="judge again whenever the file changes")
    add("--quick", action="store_true", help="neither other schedules nor the compiler")
    add("--hint", type=int, default=1, choices=(1, 2, 3), help="also why, and what to change")
    add("--solution", action="store_true", help="show it")
    add("--reset", action="store_true", help="begin again; what you have is renamed")
    options = parser.parse_args(arguments)
    if options.name is None:
        print_list()
        return 0
    name = options.name
    path = FOLDER / f"{name}.py"
    if options.solution:
        print(clean(solution_of(name)))
        return 0
    if options.reset and path.exists():
        path.rename(path.with_name(f"{name}-{datetime.now():%H%M%S}.py"))
    if not path.exists():
        FOLDER.mkdir(exist_ok=True)
        path.write_text(blank(name), encoding="utf-8")
        print(f"Written: {path}. Edit it, then run this again, or with --watch.")
        if not options.watch:
            return 1
    while True:
        seen = changed(path)
        remember_prediction(name, path)
        passed = judge(name, path, level=options.hint, quick=options.quick)
        if passed and not options.quick:
            remembered("done", name, f"{datetime.now():%Y-%m-%d}")
        if not options.watch:
            return not passed
        print("        waiting for a change of the file ...", flush=True)
        while changed(path) in (0, seen):
            time.sleep(0.2)


if __name__ == "__main__":
    sys.exit(main())
