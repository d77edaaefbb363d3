"""Mutants: copies of a kernel file with one mistake in its synchronisation each.

    mutants = enumerate_mutants(path, "kernel")
    verdict = judge(mutants[0], load, launch)

`enumerate_mutants` makes these changes, one at a time, to the function `kernel` and to those
functions of the file that it uses:

- drop: an operation on a barrier, a wait, or one of the `mBarriers` of an MMA is left out.
- parity: a wait takes the other phase.
- count: arrivals of a barrier, or of one `barrier_arrive`, one more and one less; the threads of a
  named barrier, one warp more and one less.
- bytes: `barrier_expect_bytes` announces twice or half of them.
- early: a `barrier_arrive` or `tcgen05_commit` comes before the operation whose completion it
  announces (the nearest above it; failing that, the nearest wait); a wait leaves one operation more
  in flight.
- swap: one view takes the next buffer, or the next barrier, of its array, or the same buffer of
  another array of that shape.

A mutant is named by what is changed, and in which function, so that other changes of the file leave
its name alone; it keeps the line numbers. A launch that does not execute the changed statement
cannot tell; see `executed_lines`.
Where an array has one element, the next one is the same: choose launches with two or more.
"""

import ast
import copy
import dis
import importlib.util
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import FrameType, ModuleType
from typing import Any, NamedTuple
from unittest import mock

import pytest

import tritonemu

KINDS = ("drop", "parity", "count", "bytes", "early", "swap")
# The modelled schedule finds whatever is found so far: whether an access is ordered does not depend
# on who runs when. The other one looks at the survivors again.
SCHEDULES = ("modelled", 0)

# Operation -> positions of its parameters that matter here.
_PARAMETERS: dict[str, dict[str, int]] = {
    "barrier_wait": {"phase": 1},
    "clc_producer": {"p_producer": 1},
    "clc_consumer": {"p_consumer": 1},
    "barrier_arrive": {"arrive_count": 1},
    "barrier_expect_bytes": {"size": 1},
    "named_barrier_wait": {"arrive_count": 1},
    "named_barrier_arrive": {"arrive_count": 1},
    "alloc_barriers": {"num_barriers": 0, "arrive_count": 1},
    "alloc_warp_barrier": {"num_barriers": 0, "num_warps": 1, "num_arrivals": 2},
    "local_alloc": {"shape": 0, "num": 2},
    "local_view": {"buffers": 0, "index": 1},
    "async_dot": {"mBarriers": 5},
    "async_dot_scaled": {"mBarriers": -1},
    "async_dot_wait": {"pendings": 0, "inp": 1},
    "async_load_wait_group": {"pendings": 0},
    "async_descriptor_store_wait": {"pendings": 0},
}
_DROPPED = (
    *("barrier_wait", "barrier_arrive", "barrier_expect_bytes", "cluster_barrier"),
    *("named_barrier_wait", "named_barrier_arrive", "tcgen05_commit", "clc_producer"),
    *("async_load_commit_group", "async_load_wait_group", "async_descriptor_store_wait"),
)
_PARITIES = ("phase", "p_producer", "p_consumer")
_COUNTS = {
    "barrier_arrive": ("arrive_count",),
    "alloc_barriers": ("arrive_count",),
    "alloc_warp_barrier": ("num_warps", "num_arrivals"),
    "named_barrier_wait": ("arrive_count",),
    "named_barrier_arrive": ("arrive_count",),
}
# Release -> the operations whose completion it may announce.
_ANNOUNCED = {
    "barrier_arrive": (
        *("async_dot_wait", "async_load_wait_group", "async_descriptor_store_wait", "local_load"),
        *("local_store", "remote_shmem_store"),
    ),
    "tcgen05_commit": ("async_dot", "async_dot_scaled"),
}

Edit = tuple[int, int, str]


@dataclass(frozen=True)
class Mutant:
    """One change of a file.

    lines: first and last line of the changed statement. what: the change, "math: " before it in a
    function math that the kernel uses, " (2)" behind it where the same occurs again. edits: begin,
    end and new text, of the file as bytes.
    """

    path: Path
    kind: str
    lines: tuple[int, int]
    what: str
    edits: tuple[Edit, ...]

    @property
    def span(self) -> tuple[int, int]:
        """The changed lines as a range has them."""
        return self.lines[0], self.lines[1] + 1

    @property
    def source(self) -> str:
        """The changed file."""
        text = self.path.read_bytes()
        for begin, end, new in sorted(self.edits, reverse=True):
            text = text[:begin] + new.encode() + text[end:]
        return text.decode()


@dataclass(frozen=True)
class Verdict:
    """How a mutant was found: the name of the error, "" if it was not, and the schedule."""

    error: str
    schedule: str | int | None = None
    message: str = ""


def enumerate_mutants(path: Path, kernel: str) -> list[Mutant]:
    """All mutants of the function `kernel` of a file, and of the functions that it uses."""
    file = _File(path)
    mutants = []
    for function in file.reached(kernel):
        where = "" if function.name == kernel else f"{function.name}: "
        mutants += [replace(m, what=where + m.what) for m in file.mutants(function)]
    mutants.sort(key=lambda m: (m.lines, KINDS.index(m.kind)))
    seen: Counter[str] = Counter()
    for i, mutant in enumerate(mutants):
        seen[mutant.what] += 1
        if seen[mutant.what] > 1:
            mutants[i] = replace(mutant, what=f"{mutant.what} ({seen[mutant.what]})")
    return mutants


def _operation(node: ast.AST) -> str:
    """The name of the TLX operation that an expression calls, or ""."""
    if not isinstance(node, ast.Call):
        return ""
    name = ast.unparse(node.func)
    return name.removeprefix("tlx.") if "." not in name.removeprefix("tlx.") else ""


def _show(node: ast.AST) -> str:
    return ast.unparse(node).replace("tlx.", "")


def _called(statement: ast.stmt) -> str:
    """The operation that a statement is, or whose result it assigns."""
    return _operation(getattr(statement, "value", None))


def _argument(call: ast.Call, name: str) -> ast.expr | None:
    for keyword in call.keywords:
        if keyword.arg == name:
            return keyword.value
    position = _PARAMETERS[_operation(call)][name]
    return call.args[position] if 0 <= position < len(call.args) else None


def _replace_argument(call: ast.Call, name: str, value: ast.expr) -> None:
    for keyword in call.keywords:
        if keyword.arg == name:
            keyword.value = value
            return
    position = _PARAMETERS[_operation(call)][name]
    if position < len(call.args):
        call.args[position] = value
    else:
        call.keywords.append(ast.keyword(name, value))


def _binary(left: ast.expr, op: ast.operator, right: int) -> ast.expr:
    if isinstance(left, ast.Call) and ast.unparse(left.func) == "tl.constexpr":
        left = left.args[0]
    if isinstance(left, ast.Constant) and isinstance(op, (ast.Add, ast.Sub)):
        return ast.Constant(left.value + (right if isinstance(op, ast.Add) else -right))
    return ast.BinOp(copy.deepcopy(left), op, ast.Constant(right))


def _names(node: ast.AST) -> set[str]:
    return {part.id for part in ast.walk(node) if isinstance(part, ast.Name)}


@dataclass(frozen=True)
class _Array:
    """An array of buffers or barriers: how many, and of buffers the shape, as source."""

    number: ast.expr
    shape: str


class _File:
    def __init__(self, path: Path):
        self.path = path
        source = path.read_bytes()
        self.tree = ast.parse(source)
        self.starts = [0]
        for line in source.splitlines(keepends=True):
            self.starts.append(self.starts[-1] + len(line))
        functions = (n for n in self.tree.body if isinstance(n, ast.FunctionDef))
        self.functions = {node.name: node for node in functions}
        self.groups = dict(_groups(self.tree))
        # `options.BLOCK_N` is the member BLOCK_N of the group Options.
        self.members = {
            (group.lower(), member) for group, members in self.groups.items() for member in members
        }
        self.globals = {
            part.id
            for node in self.tree.body
            if not isinstance(node, (ast.FunctionDef, ast.ClassDef))
            for part in ast.walk(node)
            if isinstance(part, ast.Name) and isinstance(part.ctx, ast.Store)
        }

    def reached(self, kernel: str) -> Iterator[ast.FunctionDef]:
        names, seen = [kernel], set()
        while names:
            name = names.pop()
            if name in self.functions and name not in seen:
                seen.add(name)
                function = self.functions[name]
                yield function
                names += sorted(_names(ast.Module(function.body, [])))

    def arrays(self) -> dict[str, _Array]:
        """The arrays that the file allocates; other functions use them under the same names.

        After `k = Ring(k, k_full, tlx.alloc_barriers(2))` they are k.buffer, k.full and k.empty.
        """
        found = {}
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
                array = _allocated(node.value)
                if array is not None:
                    found[node.targets[0].id] = array
        grouped = {
            f"{node.targets[0].id}.{member}": part
            for node in ast.walk(self.tree)
            if isinstance(node, ast.Assign) and _operation(node.value) in self.groups
            for member, part in zip(
                self.groups[_operation(node.value)], node.value.args, strict=True
            )
        }
        for name, part in grouped.items():
            array = _allocated(part) or found.get(ast.unparse(part))
            if array is not None:
                found[name] = array
            if isinstance(part, ast.Name):
                found.pop(part.id, None)
        return found

    def reached_as(self, number: ast.expr, known: set[str]) -> ast.expr:
        """`number`, with names that a function does not know read from a group that it knows."""
        number = copy.deepcopy(number)
        for part in ast.walk(number):
            if isinstance(part, ast.Name) and part.id not in known:
                groups = (group for group, name in self.members if name == part.id)
                part.id = next((f"{g}.{part.id}" for g in groups if g in known), part.id)
        return ast.parse(ast.unparse(number), mode="eval").body

    def mutants(self, function: ast.FunctionDef) -> Iterator[Mutant]:
        stored = {
            n.id
            for n in ast.walk(function)
            if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)
        }
        known = stored | self.globals | {a.arg for a in function.args.args}
        arrays = {
            name: replace(array, number=self.reached_as(array.number, known))
            for name, array in self.arrays().items()
            if name.split(".")[0] in known
        }
        arrays = {name: array for name, array in arrays.items() if _names(array.number) <= known}
        for block in _blocks(function):
            for i, statement in enumerate(block):
                if isinstance(statement, (ast.Expr, ast.Assign, ast.AnnAssign, ast.AugAssign)):
                    yield from self._changes(statement, arrays)
                    yield from self._moves(block, i)

    def _edit(self, statement: ast.stmt, new: str) -> Edit:
        """Replace a statement by a line of source, and keep the lines below where they are."""
        begin = self.starts[statement.lineno - 1] + statement.col_offset
        end = self.starts[statement.end_lineno - 1] + statement.end_col_offset
        return begin, end, new + "\n" * (statement.end_lineno - statement.lineno)

    def _mutant(self, kind: str, statement: ast.stmt, what: str, *edits: Edit) -> Mutant:
        return Mutant(self.path, kind, (statement.lineno, statement.end_lineno), what, edits)

    def _changes(self, statement: ast.stmt, arrays: dict[str, _Array]) -> Iterator[Mutant]:
        if _called(statement) in _DROPPED and isinstance(statement, ast.Expr):
            what = f"drop {_show(statement)}"
            yield self._mutant("drop", statement, what, self._edit(statement, "pass"))
        for node in ast.walk(statement):
            for kind, what, new in _replacements(node, arrays):
                # The copy of a statement takes `new` for the copy of `node`.
                changed = copy.deepcopy(statement, {id(node): new})
                source = ast.unparse(ast.fix_missing_locations(changed))
                yield self._mutant(kind, statement, what, self._edit(statement, source))

    def _moves(self, block: list[ast.stmt], i: int) -> Iterator[Mutant]:
        """The release `block[i]` before the operation that it announces.

        Names that it needs, and which are assigned in between, are assigned before it too.
        """
        release = block[i]
        announced = _ANNOUNCED.get(_called(release), ())
        above = range(i - 1, -1, -1)
        before = next((j for j in above if _called(block[j]) in announced), None)
        if before is None and announced:
            before = next((j for j in above if _called(block[j]) == "barrier_wait"), None)
        if before is None:
            return
        operation, needed, moved = block[before], _names(release), [release]
        for statement in reversed(block[before + 1 : i]):
            targets = {
                n.id
                for n in ast.walk(statement)
                if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)
            }
            if targets & needed:
                if not isinstance(statement, ast.Assign):
                    return
                moved.insert(0, statement)
                needed |= _names(statement)
        if isinstance(operation, ast.Assign) and _names(operation.targets[0]) & needed:
            return
        first = "; ".join(ast.unparse(statement) for statement in [*moved, operation])
        yield self._mutant(
            "early",
            release,
            f"{_show(release)} before {_show(operation)}",
            self._edit(operation, first),
            self._edit(release, "pass"),
        )


def _allocated(call: ast.AST) -> _Array | None:
    """The array that a call allocates, if it does."""
    kind = _operation(call)
    if kind == "local_alloc":
        return _Array(_argument(call, "num"), ast.unparse(_argument(call, "shape")))
    if kind in ("alloc_barriers", "alloc_warp_barrier"):
        return _Array(_argument(call, "num_barriers"), "")
    return None


def _groups(tree: ast.Module) -> Iterator[tuple[str, list[str]]]:
    """The classes under `triton.aggregate` that a file defines or imports, with their members."""
    for node in tree.body:
        if isinstance(node, ast.ClassDef):
            yield node.name, [p.target.id for p in node.body if isinstance(p, ast.AnnAssign)]
        elif isinstance(node, ast.ImportFrom) and not node.level:
            module = importlib.import_module(node.module)
            for name in node.names:
                found = getattr(module, name.name, None)
                if getattr(found, "__triton_aggregate__", False):
                    yield name.asname or name.name, list(found.__annotations__)


def _blocks(node: ast.AST) -> Iterator[list[ast.stmt]]:
    for part in ast.walk(node):
        for name in ("body", "orelse"):
            block = getattr(part, name, None)
            if isinstance(block, list):
                yield block


def _replacements(node: ast.AST, arrays: dict[str, _Array]) -> Iterator[tuple[str, str, ast.expr]]:
    """What an expression may be replaced by: the kind of mistake, its description, the new one."""
    operation = _operation(node)
    parameters = _PARAMETERS.get(operation, ())

    def other(kind: str, name: str, value: ast.expr) -> tuple[str, str, ast.expr]:
        changed = copy.deepcopy(node)
        _replace_argument(changed, name, value)
        subject = "" if operation.startswith("alloc") else f"({_show(_subject(node))})"
        return kind, f"{operation}{subject}: {name}={_show(value)}", changed

    for name in _PARITIES:
        parity = _argument(node, name) if name in parameters else None
        if parity is not None:
            yield other("parity", name, _binary(parity, ast.BitXor(), 1))
    for name in _COUNTS.get(operation, ()):
        step = 32 if operation.startswith("named_barrier") else 1
        count = _argument(node, name) or ast.Constant(1)
        yield other("count", name, _binary(count, ast.Add(), step))
        if not isinstance(count, ast.Constant) or count.value > step:
            yield other("count", name, _binary(count, ast.Sub(), step))
    if operation == "barrier_expect_bytes":
        size = _argument(node, "size")
        yield other("bytes", "size", _binary(size, ast.Mult(), 2))
        yield other("bytes", "size", _binary(size, ast.FloorDiv(), 2))
    if operation == "async_dot_wait":
        yield "drop", f"drop {_show(node)}", copy.deepcopy(_argument(node, "inp"))
    if "pendings" in parameters:
        yield other("early", "pendings", _binary(_argument(node, "pendings"), ast.Add(), 1))
    if "mBarriers" in parameters:
        elements = getattr(_argument(node, "mBarriers"), "elts", [])
        for i in range(len(elements)):
            rest = [copy.deepcopy(e) for e in elements if e is not elements[i]]
            kind, what, new = other("drop", "mBarriers", ast.List(rest, ast.Load()))
            yield kind, f"{what}, without {_show(elements[i])}", new
    for what, new in _other_views(node, operation, arrays):
        yield "swap", f"{_show(node)} -> {what}", new


def _subject(call: ast.Call) -> ast.expr:
    """The argument of an operation that tells best which one it is."""
    if _operation(call) == "async_dot_wait":
        return _argument(call, "inp")
    return call.args[0] if call.args else call.keywords[0].value


def _other_views(
    node: ast.AST, operation: str, arrays: dict[str, _Array]
) -> Iterator[tuple[str, ast.expr]]:
    """If the expression is an element of an array: the next one, and that of a similar array."""
    if operation == "local_view":
        base, index = _argument(node, "buffers"), _argument(node, "index")
    elif isinstance(node, ast.Subscript):
        base, index = node.value, node.slice
    else:
        return
    named = ast.unparse(base)
    if named not in arrays:
        return

    def view(name: str, at: ast.expr) -> ast.expr:
        array = ast.parse(name, mode="eval").body
        if operation:
            return ast.Call(copy.deepcopy(node.func), [array, at], [])
        return ast.Subscript(array, at, ast.Load())

    array = arrays[named]
    if not isinstance(array.number, ast.Constant) or array.number.value > 1:
        number = copy.deepcopy(array.number)
        yield "next", view(named, ast.BinOp(_binary(index, ast.Add(), 1), ast.Mod(), number))
    alike = [name for name, a in arrays.items() if array.shape and a.shape == array.shape]
    if len(alike) > 1:
        following = alike[(alike.index(named) + 1) % len(alike)]
        yield following, view(following, copy.deepcopy(index))


def import_file(path: Path) -> ModuleType:
    """A file as a module of its own, which nobody else imports; it may import the project's."""
    name = f"mutant_{path.stem}".replace("-", "_")
    spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    with mock.patch.dict(sys.modules, {name: module}):
        spec.loader.exec_module(module)
    return module


def _starts(code: bytes) -> bool:
    """Whether code begins as a statement does.

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

    before = sys.gettrace()
    sys.settrace(note)
    try:
        launch()
    finally:
        sys.settrace(before)
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
        pytest.param(False, id="sample"),
        pytest.param(True, id="all_mutants", marks=pytest.mark.nightly),
    ),
)
"""For a test that judges mutants: a fixed sample of them in each run, all of them at night."""


def sampled(mutants: list[Mutant]) -> list[Mutant]:
    """The first mutant of each kind and every fourth after it."""
    return [m for kind in KINDS for m in [m for m in mutants if m.kind == kind][::4]]


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
        """Those of `harmless` that were judged."""
        return sorted(what for what in harmless if what in self.what)


def surviving(
    module: ModuleType,
    kernel: str,
    launches: Iterable[Callable[[ModuleType, str | int], Any]],
    every: bool = True,
) -> Judged:
    """Judge all mutants of `kernel`, or a sample, by the launches that execute what they change."""
    found = executed(Path(module.__file__), kernel, module, list(launches))
    used = {mutant: launches for mutant, launches in found if launches}
    chosen = list(used) if every else sampled(list(used))
    survivors = [m.what for m in chosen if not judge(m, import_file, used[m]).error]
    return Judged(len(used), [mutant.what for mutant in chosen], sorted(survivors))
