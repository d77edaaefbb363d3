"""Mutants of kernels in Gluon: copies of a file with one mistake in its synchronisation each.

`enumerate_mutants(path, names)` makes the changes that `mutants` makes to TLX, of these kinds, in
the functions of these names:

- drop: an operation on a barrier, a wait or a fence is left out.
- parity: a wait takes the other phase.
- count: a barrier expects one arrival more, or an arrival counts as two.
- bytes: `expect` announces twice or half of them.
- early: a wait leaves one operation more in flight; an arrival, a commit or a fence comes before
  the statement above it.
- ctas: a barrier of a pair of CTAs is one of each; a load is not multicast.
- swap: `x.index(i)` is the next one of STAGES; not in an `init`, whose loop takes all of them.
"""

import ast
import copy
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

from emulator.tests.mutants import Mutant

_DROPPED = (
    *("mbarrier.wait", "mbarrier.arrive", "mbarrier.expect", "mbarrier.init", "tma.store_wait"),
    *("tcgen05_commit", "fence_async_shared"),
)
_IN_FLIGHT = ("tma.store_wait", "warpgroup_mma_wait")
_RELEASES = ("mbarrier.arrive", "tcgen05_commit", "fence_async_shared")


def _operation(node: ast.AST) -> str:
    return ast.unparse(node.func) if isinstance(node, ast.Call) else ""


def _binary(value: ast.expr, operator: ast.operator, other: int) -> ast.BinOp:
    return ast.BinOp(copy.deepcopy(value), operator, ast.Constant(other))


def _with(node: ast.Call, position: int, value: ast.expr) -> ast.Call:
    changed = copy.deepcopy(node)
    changed.args[position] = value
    return changed


def _with_keyword(node: ast.Call, name: str, value: bool) -> ast.Call:
    changed = copy.deepcopy(node)
    others = [keyword for keyword in changed.keywords if keyword.arg != name]
    changed.keywords = [*others, ast.keyword(name, ast.Constant(value))]
    return changed


def _with_count(node: ast.Call, count: int) -> ast.Call:
    changed = copy.deepcopy(node)
    changed.keywords = [ast.keyword("count", ast.Constant(count))]
    return changed


def _replacements(node: ast.AST) -> Iterator[tuple[str, ast.expr]]:
    """Yield replacements of an expression, each after its kind of mistake."""
    operation = _operation(node)
    if operation == "mbarrier.wait":
        yield "parity", _with(node, 1, _binary(node.args[1], ast.BitXor(), 1))
    elif operation in ("mbarrier.init", "mbarrier.arrive"):
        yield "count", _with_count(node, 2)
    elif operation == "mbarrier.expect":
        yield "bytes", _with(node, 1, _binary(node.args[1], ast.Mult(), 2))
        yield "bytes", _with(node, 1, _binary(node.args[1], ast.FloorDiv(), 2))
    elif operation == "mbarrier.allocate_mbarrier" and len(node.keywords) == 2:
        yield "ctas", _with_keyword(node, "two_ctas", False)
    elif operation == "tma.async_load" and node.keywords:
        yield "ctas", _with_keyword(node, "multicast", False)
    elif operation in _IN_FLIGHT:
        yield "early", _with(node, 0, _binary(node.args[0], ast.Add(), 1))
    elif operation.endswith(".index"):
        following = ast.BinOp(
            _binary(node.args[0], ast.Add(), 1), ast.Mod(), ast.Name("STAGES", ast.Load())
        )
        yield "swap", _with(node, 0, following)


def _changes(block: list[ast.stmt], i: int) -> Iterator[tuple[str, str, list[ast.stmt]]]:
    """The kind of each change of the statement `block[i]`, its name, and what stands for the
    statement and, if there are two, the one above it."""
    statement = block[i]
    name = ast.unparse(statement)
    if not isinstance(statement, (ast.Expr, ast.Assign)):
        return
    if isinstance(statement, ast.Expr) and _operation(statement.value) in _DROPPED:
        yield "drop", f"drop {name}", [ast.Pass()]
    inits = _operation(getattr(statement, "value", statement)) == "mbarrier.init"
    for node in ast.walk(statement):
        for kind, new in _replacements(node):
            if inits and kind == "swap":
                continue
            changed = copy.deepcopy(statement, {id(node): new})
            yield kind, f"{name} -> {ast.unparse(new)}", [changed]
    release = isinstance(statement, ast.Expr) and _operation(statement.value) in _RELEASES
    if release and i > 0 and isinstance(block[i - 1], (ast.Expr, ast.Assign)):
        above = block[i - 1]
        yield "early", f"{name} before {ast.unparse(above)}", [statement, above]


def enumerate_mutants(path: Path, names: Sequence[str]) -> list[Mutant]:
    text = path.read_bytes()
    starts = [0]
    for line in text.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))
    seen: Counter[str] = Counter()
    mutants = []
    for function in ast.parse(text).body:
        if not isinstance(function, ast.FunctionDef) or function.name not in names:
            continue
        blocks = [getattr(node, "body", []) for node in ast.walk(function)]
        for block, i in ((b, i) for b in blocks if isinstance(b, list) for i in range(len(b))):
            for kind, change, new in _changes(block, i):
                old = block[i + 1 - len(new) : i + 1]
                begin = starts[old[0].lineno - 1] + old[0].col_offset
                end = starts[old[-1].end_lineno - 1] + old[-1].end_col_offset
                lines = old[0].lineno, old[-1].end_lineno
                line = "; ".join(ast.unparse(ast.fix_missing_locations(each)) for each in new)
                what = f"{function.name}: {change}"
                seen[what] += 1
                what += f" ({seen[what]})" if seen[what] > 1 else ""
                edit = begin, end, line + "\n" * (lines[1] - lines[0])
                mutants.append(Mutant(path, kind, lines, what, (edit,)))
    return mutants
