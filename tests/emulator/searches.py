"""Counts how often searches find: `python -m tests.emulator.searches [SUBJECT ...]`.

First mistakes that show in some orders only (the kernels of `test_search`), each under 300 random
schedules, and after how many executions exhaustive search finds them. Then mutants that are not
harmless, of the pipelines named (see `test_mutants`): how many the modelled order finds, and on
average one of four random schedules.
"""

import sys
import tempfile
from collections import Counter
from pathlib import Path

from emulator.tests.test_search import outcome
from tests.emulator import test_mutants
from tritonemu import EmulatorError
from tritonemu.search import Search, _Tree

SEEDS = 300
MISTAKES = (("count", 2), ("locks", 1), ("named", 1), ("delay", 6), ("delay", 12), ("delay", 24))


def print_mistakes() -> None:
    """Per kernel: finds of random orders; exhaustive: first find, classes."""
    print("| kernel | random | exhaustive | of the right |")
    for name, turns in MISTAKES:

        def wrong(order, name=name, turns=turns):
            return not outcome(name, order, turns=turns)[1]

        share = sum(map(wrong, range(SEEDS))) / SEEDS
        first = next(i for i, order in enumerate(_Tree().executions(3000), 1) if wrong(order))
        search = Search("exhaustive", 3000)
        for order in search:
            outcome(name, order, True, turns)
        print(f"| {name} {turns} | {share:.1%} | execution {first} | {search} |", flush=True)


def _finds(launches, module, schedule) -> bool:
    for launch in launches:
        try:
            launch(module, schedule)
        except (EmulatorError, AssertionError):
            return True
    return False


def print_mutants(name: str) -> None:
    """Harmful mutants of one subject that each kind of schedule finds."""
    harmless = test_mutants.HARMLESS.get(name, {})
    tested = [
        (mutant, launches)
        for mutant, launches in test_mutants._executed(name)
        if launches and mutant.what not in harmless
    ]
    found: Counter[str] = Counter()
    for mutant, launches in tested:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / mutant.path.name
            path.write_text(mutant.source)
            module = test_mutants._import(path)
            found["modelled"] += _finds(launches, module, "modelled")
            for seed in range(4):
                found["random"] += _finds(launches, module, seed)
    shares = found["modelled"], found["random"] / 4
    print(f"| {name} | {len(tested)} | {' | '.join(f'{s:g}' for s in shares)} |", flush=True)


if __name__ == "__main__":
    print_mistakes()
    print("| pipeline | mutants | modelled | random, one |")
    for subject in sys.argv[1:]:
        print_mutants(subject)
