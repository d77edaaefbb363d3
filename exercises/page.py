"""The page of the book on the exercises, made from the catalogue: `python -m exercises.page`."""

from pathlib import Path

from exercises.catalogue import CATALOGUE, wrong_of
from exercises.grading import exercise_of
from exercises.hints import RULES, Rule

PATH = Path(__file__).parents[1] / "book" / "exercises.md"
FAULTS = (
    "released-too-early", "never-released", "arrival-count", "count-too-high", "first-wait-parity",
    "passed-unfilled", "stale-phase", "phase-per-turn", "never-filled", "filled-twice",
    "read-before-full", "ring-restarts", "p-unguarded", "said-early", "lost-update",
)  # fmt: skip
"""The rules of hints on synchronisation."""

TEXT = """# Write kernels

Each exercise is a file with holes, and your CPU judges what you write in them: right against fp64
on jagged batches with empty sequences, free of races and deadlocks under several schedules, every
barrier used in both parities, compiled without spills and with the instructions that make the
kernel, its modelled timeline beside ours. What is wrong is named by its line; hints have three
levels. No GPU is needed.

```bash
make exercise NAME=rows            # writes mine/rows.py; again: judges it
make exercise NAME=rows WATCH=1    # judges every change of the file
.venv/bin/python -m exercises rows --hint 3
.venv/bin/python -m exercises rows --solution
```

Begin with `rows`, even if you have never written a kernel.

{exercises}

## What goes wrong between roles

Each mistake below is one of the wrong answers that a test holds the hints to.

{faults}
"""


def exercises() -> str:
    """The exercises as a table."""
    rows = (
        f"| {name} | {x.title} | {{doc}}`executed/{x.chapter}` | {x.minutes} | {x.judged} |"
        for name, x in CATALOGUE.items()
    )
    head = "| name | exercise | after | minutes | judged besides |", "|---|---|---|--:|---|"
    return "\n".join((*head, *rows))


def faults() -> str:
    """The faults of synchronisation as a table: mistakes, why they fail, and their repair."""
    rules: dict[str, Rule] = {rule.name: rule for rule in RULES}
    mistakes: dict[str, list[str]] = {name: [] for name in FAULTS}
    for name in CATALOGUE:
        rules |= {rule.name: rule for rule in exercise_of(name).rules}
        for what, wrong in wrong_of(name).items():
            if what not in mistakes.get(wrong.hint, [what]):
                mistakes[wrong.hint].append(what)
    rows = (
        f"| {'; '.join(shown)} | {rules[name].why} | {rules[name].change} |"
        for name, shown in mistakes.items()
        if shown
    )
    return "\n".join(("| mistake | why it fails | repair |", "|---|---|---|", *rows))


def page() -> str:
    return TEXT.format(exercises=exercises(), faults=faults())


if __name__ == "__main__":
    PATH.write_text(page(), encoding="utf-8")
