"""Names of locals that say nothing of what they hold: at most so many in each room.

Run by `make lint`. A room's number may only fall: where fewer are left, the table here must say so.
"""

import ast
import sys
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).parents[1]
VAGUE = {"found", "made", "kept", "given", "own", "at", "place", "before", "mine", "told"}
ALLOWED = {
    "gdpa_kernels/gdpa": 2,
    "lab/gdpa_lab": 1,
}
"""The stores of these names that are left in each room, by its folder."""


def stores(tree: ast.AST) -> Counter:
    """Count the assignments of each name, as a variable, an argument or a loop's target."""
    names = Counter()
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names[node.id] += 1
        elif isinstance(node, ast.arg):
            names[node.arg] += 1
    return names


def main() -> int:
    counts, totals = Counter(), Counter()
    for folder in (
        "gdpa_kernels",
        "lab",
        "emulator/tritonemu",
        "notebooks",
        "examples",
        "exercises",
    ):
        for path in sorted((ROOT / folder).rglob("*.py")):
            names = stores(ast.parse(path.read_text(encoding="utf-8")))
            room = path.parent.relative_to(ROOT).as_posix()
            counts[room] += sum(names[name] for name in VAGUE)
            totals[room] += names.total()
    if "--table" in sys.argv:
        for room in counts:
            print(f"    {room!r}: {counts[room]},  # {counts[room] / totals[room]:.1%}")
        return 0
    wrong = {room: n for room, n in counts.items() if n != ALLOWED.get(room, 0)}
    for room, n in wrong.items():
        print(
            f"{room}: {n} locals named one of {', '.join(sorted(VAGUE))}; the table in "
            f"{Path(__file__).relative_to(ROOT)} says {ALLOWED.get(room, 0)}"
        )
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())
