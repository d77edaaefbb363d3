"""Mutants: copies of a kernel file with one mistake in its synchronisation each.

    mutants = enumerate_mutants(path, "kernel")

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

A method of an aggregate, such as the wait of a ring, is changed for one call at a time: the call
takes a changed copy of the method, which stands at the end of the mutated file. What a function
makes of its arguments, such as `ring`, is changed for one call at a time too. Both are read from
their source, wherever it is.

A mutant is named by what is changed, and in which function, so that other changes of the file leave
its name alone; it keeps the line numbers. `judging` tells whether a launch notices.
Where an array has one element, the next one is the same: choose launches with two or more.
"""

import ast
import builtins
import copy
import importlib
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import triton

from emulator.tests.mistakes import (
    ANNOUNCED,
    DROPPED,
    KINDS,
    Array,
    allocated,
    called,
    changes_of,
    names_in,
    operation_of,
    shown,
)

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


def _stored(node: ast.AST) -> set[str]:
    names = (part for part in ast.walk(node) if isinstance(part, ast.Name))
    return {name.id for name in names if isinstance(name.ctx, ast.Store)}


def _local(function: ast.FunctionDef) -> set[str]:
    return _stored(function) | {a.arg for a in function.args.args}


@dataclass(frozen=True)
class _Aggregate:
    """A class under `triton.aggregate`: its members, its compiled methods, and the module, "" if it
    is the file's own, with what its imports bind."""

    members: list[str]
    methods: dict[str, ast.FunctionDef]
    module: str
    imports: dict[str, str]

    @classmethod
    def of(cls, node: ast.ClassDef, module: str, imports: dict[str, str]) -> "_Aggregate":
        members = [part.target.id for part in node.body if isinstance(part, ast.AnnAssign)]
        functions = [part for part in node.body if isinstance(part, ast.FunctionDef)]
        methods = {
            function.name: function
            for function in functions
            if "triton.jit" in map(ast.unparse, function.decorator_list)
        }
        return cls(members, methods, module, imports)


@dataclass(frozen=True)
class _Maker:
    """A function that returns an aggregate, of this name, made of its parameters."""

    name: str
    group: _Aggregate
    function: ast.FunctionDef

    def made(self, call: ast.Call) -> ast.expr:
        """Express the result of a call in its arguments."""
        names = [arg.arg for arg in self.function.args.args]
        defaults = self.function.args.defaults
        values = dict(zip(names[len(names) - len(defaults) :], defaults, strict=True))
        values |= dict(zip(names, call.args, strict=False))
        values |= {keyword.arg: keyword.value for keyword in call.keywords}
        value = self.function.body[-1].value
        used = [
            part for part in ast.walk(value) if isinstance(part, ast.Name) and part.id in values
        ]
        return copy.deepcopy(value, {id(part): values[part.id] for part in used})


class _Inlined(ast.NodeTransformer):
    """Calls of functions that make aggregates, as what they return."""

    def __init__(self, makers: dict[str, _Maker]):
        self.makers = makers

    def visit_Call(self, node: ast.Call) -> ast.expr:
        self.generic_visit(node)
        maker = self.makers.get(ast.unparse(node.func))
        return ast.copy_location(maker.made(node), node) if maker is not None else node


@dataclass(frozen=True)
class _Copy:
    """A changed copy of a method: a call of it in place of the call of the method, and what has to
    stand at the end of the file."""

    call: ast.Call
    text: str


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
        self.end = len(source)
        self.imports = _imports(self.tree)
        makers = dict(_makers(self.tree))
        self.tree = _Inlined(makers).visit(self.tree)
        self.groups = {m.name: m.group for m in makers.values()} | dict(_groups(self.tree))
        # `k = Ring(...)`: the instance k; other functions have it under the same name.
        self.instances = {
            node.targets[0].id: node.value
            for node in ast.walk(self.tree)
            if isinstance(node, ast.Assign) and operation_of(node.value) in self.groups
        }
        self.globals = {
            part.id
            for node in self.tree.body
            if not isinstance(node, (ast.FunctionDef, ast.ClassDef))
            for part in ast.walk(node)
            if isinstance(part, ast.Name) and isinstance(part.ctx, ast.Store)
        }
        # What inlined calls name.
        self.tail = "".join(sorted({self.imported({m.name}, m.group) for m in makers.values()}))

    def reached(self, kernel: str) -> Iterator[ast.FunctionDef]:
        names, seen = [kernel], set()
        while names:
            name = names.pop()
            if name in self.functions and name not in seen:
                seen.add(name)
                function = self.functions[name]
                yield function
                names += sorted(names_in(ast.Module(function.body, [])))

    def arrays(self) -> dict[str, Array]:
        """The arrays that the file allocates; other functions use them under the same names.

        After `k = Ring(k, k_full, tlx.alloc_barriers(2))` they are k.buffer, k.full and k.empty.
        """
        arrays = {}
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
                array = allocated(node.value)
                if array is not None:
                    arrays[node.targets[0].id] = array
        grouped = {
            f"{instance}.{member}": part
            for instance, call in self.instances.items()
            for member, part in self.parts(call)
        }
        for name, part in grouped.items():
            array = allocated(part) or arrays.get(ast.unparse(part))
            if array is not None:
                arrays[name] = array
            if isinstance(part, ast.Name):
                arrays.pop(part.id, None)
        return arrays

    def parts(self, call: ast.Call) -> Iterator[tuple[str, ast.expr]]:
        """The members of the aggregate that a call makes, and what they are given."""
        return zip(self.groups[operation_of(call)].members, call.args, strict=True)

    def reached_as(self, number: ast.expr, known: set[str]) -> ast.expr:
        """`number`, with names that a function does not know read from an aggregate that it knows:
        after `options = Options(ROWS)` it is options.ROWS."""
        number = copy.deepcopy(number)
        for part in ast.walk(number):
            if isinstance(part, ast.Name) and part.id not in known:
                members = (
                    f"{instance}.{member}"
                    for instance in sorted(self.instances.keys() & known)
                    for member, argument in self.parts(self.instances[instance])
                    if ast.unparse(argument) == part.id
                )
                part.id = next(members, part.id)
        return ast.parse(ast.unparse(number), mode="eval").body

    def method(self, node: ast.AST) -> tuple[_Aggregate, ast.FunctionDef] | None:
        """The method of an aggregate that an expression calls, if it does."""
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
            return None
        name, instance = node.func.attr, self.instances.get(ast.unparse(node.func.value))
        groups = [self.groups[operation_of(instance)]] if instance else self.groups.values()
        owners = [group for group in groups if name in group.methods]
        if len(owners) > 1:
            raise ValueError(f"{ast.unparse(node)} must call a method that one aggregate has")
        return (owners[0], owners[0].methods[name]) if owners else None

    def operations(self, statement: ast.stmt) -> set[str]:
        """The operations that a statement is, or assigns the result of; those of a method."""
        called_method = self.method(getattr(statement, "value", None))
        if called_method is None:
            return {called(statement)}
        return {operation_of(node) for node in ast.walk(called_method[1])}

    def copied(self, call: ast.Call, name: str, changes: dict[int, ast.AST]) -> _Copy:
        """The method of a call under another name; `changes` are nodes by the id of those that they
        replace. Names that it then needs of the caller become parameters."""
        group, method = self.method(call)
        new = copy.deepcopy(method, dict(changes))
        new.name = name
        old_names, new_names = names_in(method), names_in(new)
        needed = sorted(new_names - old_names - self.globals)
        if _local(method) & set(needed):
            raise ValueError(f"{ast.unparse(call)} must not hide {needed} of its caller")
        new.args.args[1:1] = [ast.arg(each) for each in needed]
        others = [ast.Name(each, ast.Load()) for each in needed]
        arguments = [call.func.value, *others, *call.args]
        text = ast.unparse(ast.fix_missing_locations(new))
        if group.module:
            free = old_names - _local(method) - vars(builtins).keys()
            text = f"{self.imported(free, group)}{text}"
        return _Copy(ast.Call(ast.Name(name, ast.Load()), arguments, call.keywords), f"\n{text}\n")

    def imported(self, names: set[str], group: _Aggregate) -> str:
        """The line that imports names of the module of an aggregate, where the file lacks them."""
        bound = self.imports.keys() | self.globals | self.functions.keys()
        for name in names & bound:
            if self.imports.get(name) != group.imports.get(name, f"{group.module}:{name}"):
                raise ValueError(
                    f"{name} must mean in {self.path.name} what it does in {group.module}"
                )
        missing = ", ".join(sorted(names - bound))
        return f"from {group.module} import {missing}\n\n" if missing else ""

    def mutants(self, function: ast.FunctionDef) -> Iterator[Mutant]:
        known = _local(function) | self.globals
        arrays = {
            name: replace(array, number=self.reached_as(array.number, known))
            for name, array in self.arrays().items()
            if name.split(".")[0] in known
        }
        arrays = {name: array for name, array in arrays.items() if names_in(array.number) <= known}
        for block in _blocks(function):
            for i, statement in enumerate(block):
                if _is_simple(statement):
                    for kind, what, new in changes_of(statement, arrays):
                        yield self._mutant(kind, statement, what, self._edit(statement, new))
                    for node in ast.walk(statement):
                        if self.method(node) is not None:
                            yield from self._changes_of_method(statement, node, arrays)
                    yield from self._moves(block, i)

    def _edit(self, statement: ast.stmt, new: ast.stmt | str) -> Edit:
        """Replace a statement by a line of source, and keep the lines below where they are."""
        begin = self.starts[statement.lineno - 1] + statement.col_offset
        end = self.starts[statement.end_lineno - 1] + statement.end_col_offset
        line = new if isinstance(new, str) else ast.unparse(ast.fix_missing_locations(new))
        return begin, end, line + "\n" * (statement.end_lineno - statement.lineno)

    def _mutant(self, kind: str, statement: ast.stmt, what: str, *edits: Edit) -> Mutant:
        edits = (*edits, (self.end, self.end, self.tail))
        return Mutant(self.path, kind, (statement.lineno, statement.end_lineno), what, edits)

    def _changes_of_method(
        self, statement: ast.stmt, call: ast.Call, arrays: dict[str, Array]
    ) -> Iterator[Mutant]:
        """A call takes a copy of its method with one change."""
        _, method = self.method(call)
        instance = f"{ast.unparse(call.func.value)}."
        inside = {
            f"self.{name.removeprefix(instance)}" if name.startswith(instance) else name: array
            for name, array in arrays.items()
        }
        for block in _blocks(method):
            for part in block:
                for kind, what, new in changes_of(part, inside) if _is_simple(part) else ():
                    changed = self.copied(call, f"changed_{method.name}", {id(part): new})
                    line = copy.deepcopy(statement, {id(call): changed.call})
                    edits = self._edit(statement, line), (self.end, self.end, changed.text)
                    yield self._mutant(kind, statement, f"{shown(call)}: {what}", *edits)

    def _without_operations(self, statement: ast.Assign) -> tuple[ast.Assign, str]:
        """The assignment alone, if its value is that of a method; what has to stand at the end."""
        if self.method(statement.value) is None:
            return statement, ""
        _, method = self.method(statement.value)
        dropped = {
            id(part): ast.Pass()
            for block in _blocks(method)
            for part in block
            if isinstance(part, ast.Expr) and called(part) in DROPPED
        }
        value = self.copied(statement.value, f"value_of_{method.name}", dropped)
        return copy.deepcopy(statement, {id(statement.value): value.call}), value.text

    def _moves(self, block: list[ast.stmt], i: int) -> Iterator[Mutant]:
        """The release `block[i]` before the operation that it announces.

        Names that it needs, and which are assigned in between, are assigned before it too.
        """
        release = block[i]
        announced = {x for name in self.operations(release) for x in ANNOUNCED.get(name, ())}
        above = range(i - 1, -1, -1)
        target = next((j for j in above if self.operations(block[j]) & announced), None)
        if target is None and announced:
            target = next((j for j in above if "barrier_wait" in self.operations(block[j])), None)
        if target is None:
            return
        operation, needed, moved, texts = block[target], names_in(release), [release], set()
        for statement in reversed(block[target:i]):
            if _stored(statement) & needed:
                is_method = self.method(getattr(statement, "value", None)) is not None
                if not isinstance(statement, ast.Assign) or (
                    statement is operation and not is_method
                ):
                    return
                alone, text = self._without_operations(statement)
                moved.insert(0, alone)
                texts.add(text)
                needed |= names_in(statement)
        first = "; ".join(map(ast.unparse, map(ast.fix_missing_locations, [*moved, operation])))
        yield self._mutant(
            "early",
            release,
            f"{shown(release)} before {shown(operation)}",
            self._edit(operation, first),
            self._edit(release, "pass"),
            (self.end, self.end, "".join(sorted(texts))),
        )


def _is_simple(statement: ast.stmt) -> bool:
    return isinstance(statement, (ast.Expr, ast.Assign, ast.AnnAssign, ast.AugAssign))


def _imports(tree: ast.Module) -> dict[str, str]:
    """Map each name that a file imports to its module and name there."""
    names = {}
    for node in tree.body:
        if isinstance(node, ast.Import):
            names |= {alias.asname or alias.name: f"{alias.name}:" for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names |= {a.asname or a.name: f"{node.module}:{a.name}" for a in node.names}
    return names


def _imported(tree: ast.Module) -> Iterator[tuple[str, ModuleType, Any]]:
    """Yield the imports of a file from modules: the name, the module, the value."""
    for node in tree.body:
        if isinstance(node, ast.ImportFrom) and not node.level:
            module = importlib.import_module(node.module)
            for alias in node.names:
                yield alias.asname or alias.name, module, getattr(module, alias.name, None)


def _groups(tree: ast.Module) -> Iterator[tuple[str, _Aggregate]]:
    """The classes under `triton.aggregate` that a file defines or imports."""
    for node in tree.body:
        if isinstance(node, ast.ClassDef):
            yield node.name, _Aggregate.of(node, "", {})
    for name, _, value in _imported(tree):
        if getattr(value, "__triton_aggregate__", False):
            yield name, _defined(value)


def _makers(tree: ast.Module) -> Iterator[tuple[str, _Maker]]:
    """The functions that a file imports, and that do nothing but return an aggregate."""
    for name, module, value in _imported(tree):
        if isinstance(value, triton.JITFunction):
            function = _definition(value.fn, ast.FunctionDef)
            *docstring, last = function.body
            call = getattr(last, "value", None)
            aggregate = getattr(module, operation_of(call), None)
            if len(docstring) <= 1 and getattr(aggregate, "__triton_aggregate__", False):
                yield name, _Maker(operation_of(call), _defined(aggregate), function)


def _definition(value: Any, kind: type) -> ast.FunctionDef | ast.ClassDef:
    """A function or class as its module's source has it."""
    tree = _parsed(sys.modules[value.__module__].__file__)
    return next(x for x in tree.body if isinstance(x, kind) and x.name == value.__name__)


@cache
def _parsed(file: str) -> ast.Module:
    return ast.parse(Path(file).read_bytes())


def _defined(aggregate: type) -> _Aggregate:
    """An imported aggregate, as its source has it."""
    module = aggregate.__module__
    imports = _imports(_parsed(sys.modules[module].__file__))
    return _Aggregate.of(_definition(aggregate, ast.ClassDef), module, imports)


def _blocks(node: ast.AST) -> Iterator[list[ast.stmt]]:
    for part in ast.walk(node):
        for name in ("body", "orelse"):
            block = getattr(part, name, None)
            if isinstance(block, list):
                yield block
