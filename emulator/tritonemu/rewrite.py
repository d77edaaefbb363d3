"""Lowering: a `@triton.jit` function becomes a Python function that computes on tiles.

The source is parsed again, changed a little, and compiled under its own file name and line numbers.
Triton is Python with other semantics in a few places; those are the changes:

- An assignment turns constants into values (`x = 0` is an int32 scalar from then on) unless it is
  annotated `tl.constexpr`, which leaves all as it is, values too (`x: tl.constexpr = 4 * n`).
  Parameters are left alone: a callee sees the constants of its caller.
- The variable of a `range` or `tl.range` loop is a value, that of `tl.static_range` a constant.
- `and`, `or`, `not` on values are element-wise and evaluate everything.
- What a loop or an `if` does to variables is checked by `scopes`.
- Lists are tuples. `a if c else b` is a value if `c` is one. `assert` is a device assertion.
- The body of `with tlx.async_task(...)` becomes a function of the names it uses; each replica is
  called with the values they have when the task is reached, so every task has its own copies. They
  run when the surrounding `with tlx.async_tasks()` ends, and their assignments stay theirs. Tiles
  do not pass into a task on warps of its own.

Global names are resolved anew for each launch: Triton's modules become the emulator's namespaces,
Triton functions are lowered on demand, constants are unwrapped. What Triton forbids in a kernel (a
global that is no constexpr, `try`, `break`, assignment to elements, ...) is refused here too.
"""

import ast
import dis
import functools
import linecache
import math
import operator
import re
import textwrap
import types
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import triton.language as tl
from triton.compiler.code_generator import CodeGenerator
from triton.runtime import jit
from triton.runtime.jit import JITFunction

from . import suppressions
from .aggregates import lowered
from .errors import MARK, DeviceAssertion, InvalidKernel, Unsupported, current_location, option
from .launch import current
from .scheduler import Turn
from .scopes import Scope
from .spinning import turned
from .tile import Tile, Unbound, promote_integers, scalar, to_tile
from .undefined import cast, logical

# Newer than some supported Tritons; isinstance(x, ()) is False.
ConstexprFunction = getattr(jit, "ConstexprFunction", ())

MAX_TURNS = 100_000

_PLAIN = (
    *(ast.Expr, ast.Return, ast.Pass, ast.Name, ast.Constant, ast.Tuple),
    *(ast.BinOp, ast.UnaryOp, ast.Call, ast.keyword, ast.Starred, ast.Subscript, ast.Slice),
    *(ast.Attribute, ast.JoinedStr, ast.FormattedValue, ast.operator, ast.unaryop, ast.cmpop),
    *(ast.boolop, ast.expr_context, ast.arguments, ast.arg, ast.Dict),
)


class _Rewriter(ast.NodeTransformer):
    """Makes the changes listed above, by calls to the functions in HELPERS."""

    def __init__(self) -> None:
        self.local, self.in_task = set(), False
        self.regions, self.scopes, self.loops, self.scoped = 0, 0, [], set()
        self.tests: list[str] = []

    def refuse(self, node: ast.AST, what: str) -> None:
        raise Unsupported(what, ("", getattr(node, "lineno", 0)))

    def generic_visit(self, node: ast.AST) -> ast.AST:
        if not isinstance(node, _PLAIN):
            self.refuse(node, f"Python syntax {type(node).__name__}")
        return super().generic_visit(node)

    @staticmethod
    def call(helper: str, node: ast.AST, *arguments: ast.expr) -> ast.expr:
        function = ast.Name(id=helper, ctx=ast.Load())
        return ast.copy_location(ast.Call(func=function, args=list(arguments), keywords=[]), node)

    def later(self, expression: ast.expr) -> ast.Lambda:
        """Return the visited expression as a function, for helpers that choose what to evaluate."""
        (statement,) = self.code(expression, "lambda: 0")
        statement.value.body = self.visit(expression)
        return statement.value

    def function(self, node: ast.FunctionDef) -> ast.FunctionDef:
        node.decorator_list, node.returns = [], None
        for part in ast.walk(node):
            if isinstance(part, ast.arg):
                part.annotation = None
                self.local.add(part.arg)
            elif isinstance(part, ast.Name) and isinstance(part.ctx, ast.Store):
                self.local.add(part.id)
        parameters = {part.arg for part in ast.walk(node.args) if isinstance(part, ast.arg)}
        node.args = self.generic_visit(node.args)
        body = self.block(node.body)
        # The variables of scopes have a value from the start, as it may be asked for early.
        names = sorted(self.scoped - parameters)
        unbound = "\n".join(f"{name} = __unbound__({name!r})" for name in names)
        node.body = [*self.code(node, unbound), *body]
        return node

    def visit_With(self, node: ast.With) -> list[ast.stmt]:
        call = node.items[0].context_expr
        kind = ast.unparse(getattr(call, "func", call)).split(".")[-1]
        if len(node.items) > 1 or kind not in ("async_tasks", "async_task"):
            self.refuse(node, f"with {ast.unparse(call)}")
        if kind == "async_tasks":
            self.regions += 1
        region = f"__region_{self.regions}__"
        outside = self.in_task, self.loops, self.scoped
        if kind == "async_task":
            self.in_task, self.loops, self.scoped = True, [], set()
        body = self.block(node.body)
        inside, (self.in_task, self.loops, self.scoped) = self.scoped, outside
        if kind == "async_tasks":
            (start,) = self.code(node, f"{region} = __tasks__()")
            start.value.keywords = [self.visit(keyword) for keyword in call.keywords]
            return [start, *body, *self.code(node, f"{region}.run()")]
        names = [n for s in body for n in ast.walk(s) if isinstance(n, ast.Name)]
        read = {name.id for name in names if isinstance(name.ctx, ast.Load)}
        parameters = sorted((read | inside) & self.local)
        captured = ", ".join(f"{name}=__unbound__({name!r})" for name in parameters)
        name = f"__{_role_name(node)}__"
        (define,) = self.code(node, f"def {name}({captured}): pass")
        define.body = body
        (add,) = self.code(node, f"{region}.add({name}, __locals__())")
        add.value.args += [self.visit(argument) for argument in call.args]
        add.value.keywords = [self.visit(keyword) for keyword in call.keywords]
        return [define, add]

    def block(self, statements: list[ast.stmt]) -> list[ast.stmt]:
        visited = [self.visit(statement) for statement in statements]
        return [s for part in visited for s in (part if isinstance(part, list) else [part])]

    @staticmethod
    def code(node: ast.AST, source: str) -> list[ast.stmt]:
        """Parse statements from source, placed at the line of `node`."""
        statements = ast.parse(source).body
        for statement in statements:
            for part in ast.walk(statement):
                ast.copy_location(part, node)
                if hasattr(part, "end_lineno"):
                    part.end_lineno, part.end_col_offset = node.lineno, node.col_offset
        return statements

    def assign(self, node: ast.stmt, target: ast.expr, value: ast.expr, helper: str) -> ast.Assign:
        names = target.elts if isinstance(target, (ast.Tuple, ast.List)) else [target]
        if not all(isinstance(name, ast.Name) for name in names):
            self.refuse(node, "assignment to something that is not a name")
        value = self.call(helper, value, self.visit(value))
        called = target.id if isinstance(target, ast.Name) else tuple(name.id for name in names)
        value.args.append(ast.copy_location(ast.Constant(called), node))
        return ast.copy_location(ast.Assign(targets=[target], value=value), node)

    def visit_Assign(self, node: ast.Assign) -> ast.Assign:
        if len(node.targets) != 1:
            self.refuse(node, "assignment to several targets")
        return self.assign(node, node.targets[0], node.value, "__assign__")

    def visit_AugAssign(self, node: ast.AugAssign) -> ast.Assign:
        old = ast.copy_location(ast.Name(id=getattr(node.target, "id", ""), ctx=ast.Load()), node)
        value = ast.copy_location(ast.BinOp(left=old, op=node.op, right=node.value), node)
        return self.assign(node, node.target, value, "__assign__")

    def visit_AnnAssign(self, node: ast.AnnAssign) -> ast.Assign:
        if node.value is None:
            self.refuse(node, "annotation without a value")
        constant = ast.unparse(node.annotation).split(".")[-1] == "constexpr"
        helper = "__constant__" if constant else "__assign__"
        return self.assign(node, node.target, node.value, helper)

    def visit_For(self, node: ast.For) -> list[ast.stmt]:
        if node.orelse or not isinstance(node.target, ast.Name):
            self.refuse(node, "for ... else, or a loop target that is not a name")
        turns = f"__turns_{self.scopes + 1}__"
        (assign,) = self.code(node, f"{turns} = 0")
        assign.value, node.iter = self.visit(node.iter), ast.Name(id=turns, ctx=ast.Load())
        enter = self.loop(node, f"not __is_static__({turns})")
        node.iter = self.call("__loop__", assign.value, node.iter)
        return [assign, *enter, node]

    def visit_While(self, node: ast.While) -> list[ast.stmt]:
        node.test = self.call("__again__", node.test, self.visit(node.test))
        if node.orelse:
            self.refuse(node, "while ... else")
        return [*self.loop(node, "True"), node]

    def loop(self, node: ast.For | ast.While, runtime: str) -> list[ast.stmt]:
        """Visit the body, each iteration of which is a scope; return what comes before the loop."""
        enter, scope, leave = self.scope(node, runtime, "loop", _assigned(node.body), set())
        self.loops = [*self.loops, scope]
        node.body = [*self.block(node.body), *leave]
        self.loops = self.loops[:-1]
        return enter

    def visit_If(self, node: ast.If) -> list[ast.stmt]:
        first, second = _assigned(node.body), _assigned(node.orelse)
        self.scopes += 1
        test = f"__test_{self.scopes}__"
        assign, enter, leave = self.code(
            node, f"{test} = 0\n__enter__({test}, {bool(node.orelse)})\n__leave__({test})"
        )
        assign.value, prologue, epilogue = self.visit(node.test), [], []
        node.test = enter.value
        if first | second:
            runtime = f"__is_value__({test})"
            prologue, _, epilogue = self.scope(node, runtime, "if", first | second, first & second)
        self.tests = [*self.tests, test]
        node.body, node.orelse = self.block(node.body), self.block(node.orelse)
        self.tests = self.tests[:-1]
        return [assign, *prologue, node, *epilogue, leave]

    def scope(
        self, node: ast.stmt, runtime: str, what: str, names: set[str], both: set[str]
    ) -> tuple[list[ast.stmt], str, list[ast.stmt]]:
        """Open a `Scope` if `runtime`: return what comes before it, its variable, what comes at its
        end."""
        self.scopes += 1
        self.scoped |= names
        scope, values = f"__scope_{self.scopes}__", "".join(f"{name}, " for name in sorted(names))
        enter = f"__scope__({what!r}, {sorted(names)}, {sorted(both)}, ({values}))"
        enter = self.code(node, f"{scope} = {enter} if {runtime} else None")
        leave = f"if {scope}: {values}= {scope}.leave(({values}))" if names else "pass"
        return enter, scope, self.code(node, leave)

    def visit_Return(self, node: ast.Return) -> list[ast.stmt]:
        around = f"[{', '.join(self.loops)}], [{', '.join(self.tests)}]"
        check = self.code(node, f"__return__({around})") if self.loops or self.tests else []
        return [*check, self.generic_visit(node)]

    def visit_Raise(self, node: ast.Raise) -> list[ast.stmt]:
        # In a branch on constants that is not taken, it is as if it were not there.
        return self.code(node, f"__raise__({ast.unparse(node)!r})")

    def visit_BoolOp(self, node: ast.BoolOp) -> ast.expr:
        helper = "__and__" if isinstance(node.op, ast.And) else "__or__"
        return self.call(helper, node, *(self.later(value) for value in node.values))

    def visit_UnaryOp(self, node: ast.UnaryOp) -> ast.expr:
        if isinstance(node.op, ast.Not):
            return self.call("__not__", node, self.visit(node.operand))
        return self.generic_visit(node)

    def visit_IfExp(self, node: ast.IfExp) -> ast.expr:
        branches = (self.later(branch) for branch in (node.body, node.orelse))
        return self.call("__choose__", node, self.visit(node.test), *branches)

    def visit_Compare(self, node: ast.Compare) -> ast.expr:
        if len(node.ops) != 1 or isinstance(node.ops[0], (ast.In, ast.NotIn)):
            self.refuse(node, "a chain of comparisons, or `in`")
        return super().generic_visit(node)

    def visit_List(self, node: ast.List) -> ast.expr:
        return self.visit(ast.copy_location(ast.Tuple(elts=node.elts, ctx=ast.Load()), node))

    def visit_Dict(self, node: ast.Dict) -> ast.expr:
        if None in node.keys:
            self.refuse(node, "** in a dict")
        return super().generic_visit(node)

    def visit_ListComp(self, node: ast.ListComp) -> ast.expr:
        for generator in node.generators:
            generator.iter = self.visit(generator.iter)
            generator.ifs = [self.visit(condition) for condition in generator.ifs]
        items = ast.GeneratorExp(elt=self.visit(node.elt), generators=node.generators)
        return self.call("__tuple__", node, ast.copy_location(items, node))

    def visit_Assert(self, node: ast.Assert) -> ast.Expr:
        arguments = [self.visit(part) for part in (node.test, node.msg) if part is not None]
        return ast.copy_location(ast.Expr(self.call("__assert__", node, *arguments)), node)

    def visit_Name(self, node: ast.Name) -> ast.expr:
        if self.in_task and node.id in self.local:
            return self.call("__captured__", node, node, ast.Constant(node.id))
        return node

    def visit_Attribute(self, node: ast.Attribute) -> ast.expr:
        if node.attr == "value":
            return self.call("__value__", node, self.visit(node.value))
        return self.generic_visit(node)


def _assigned(statements: list[ast.stmt]) -> set[str]:
    """Collect the variables that statements assign, except in tasks, which have their own."""
    names = set()
    for statement in statements:
        if isinstance(statement, (ast.For, ast.While, ast.If)):
            names |= _assigned(statement.body) | _assigned(statement.orelse)
        targets = getattr(statement, "targets", [getattr(statement, "target", None)])
        if isinstance(statement, (ast.Assign, ast.AugAssign, ast.AnnAssign)):
            names |= {n.id for t in targets for n in ast.walk(t) if isinstance(n, ast.Name)}
    return names


def _role_name(node: ast.With) -> str:
    """Return the name of the function that is all of the task's body, or "task"."""
    if len(node.body) == 1 and isinstance(node.body[0], ast.Expr):
        called = getattr(node.body[0].value, "func", None)
        if isinstance(called, ast.Name):
            return called.id.strip("_")
    return "task"


def _source(function: JITFunction) -> tuple[str, str, str, int]:
    """Return name, file, text and first line of a function; its text may have been replaced."""
    raw, source = function.fn, "".join(function.raw_src)
    begin = re.compile(r"^def\s+(\w+)\s*\(", re.MULTILINE)
    dedented = textwrap.dedent(source)
    match = begin.search(dedented)
    if match and dedented[match.start() :] == function.src:
        return match[1], raw.__code__.co_filename, source, function.starting_line_number
    name = begin.search(function.src)[1]
    file = f"<source of {name}, {hash(function.src):x}>"
    lines = function.src.splitlines(keepends=True)
    linecache.cache[file] = len(function.src), None, lines, file
    return name, file, function.src, 1


@functools.cache
def _compiled(
    name: str, file: str, source: str, first: int
) -> tuple[types.CodeType, set[str], set[str]]:
    """Compile code that defines the rewritten function; return also the globals of its body, and of
    its defaults."""
    suppressions.check(source, file, first)
    try:
        code = compile(_rewritten(source, first), file, "exec")
    except Unsupported as error:
        raise Unsupported(error.args[0], (file, error.line)) from None
    constants = (c for c in code.co_consts if isinstance(c, types.CodeType))
    inner = _global_names(next(c for c in constants if c.co_name == name))
    return code, inner, _global_names(code) - inner


@functools.cache
def _rewritten(source: str, first: int) -> ast.Module:
    """Rewrite once for equal functions at one line of several files, as variants have."""
    tree = ast.parse(textwrap.dedent(source))
    ast.increment_lineno(tree, first - 1)
    tree.body = [_Rewriter().function(tree.body[0])]
    return ast.fix_missing_locations(tree)


def _global_names(code: types.CodeType) -> set[str]:
    names = {
        instruction.argval
        for instruction in dis.get_instructions(code)
        if instruction.opname in ("LOAD_GLOBAL", "LOAD_NAME")
    }
    nested = (c for c in code.co_consts if isinstance(c, types.CodeType))
    return names.union(*map(_global_names, nested))


class _Module:
    """A module of the user's as a kernel sees it: its attributes are converted like globals."""

    def __init__(self, lowering: "Lowering", module: types.ModuleType):
        self._lowering, self._module = lowering, module

    def __getattr__(self, name: str) -> Any:
        return self._lowering.convert(getattr(self._module, name))


class Lowering:
    """Turns the Python objects a kernel refers to into the emulator's, for one launch.

    modules: name of a Triton module -> what stands for it.
    names: what `range`, `min`, ... mean in a kernel; there are no other builtins.
    """

    def __init__(self, modules: Mapping[str, Any], names: Mapping[str, Any]):
        self._modules, self._names = modules, names
        self._functions: dict[int, Callable] = {}
        self._aggregate = functools.cache(lambda kind: lowered(kind, self.convert))

    def convert(self, value: Any) -> Any:
        """Convert a global, an argument or an attribute to what the kernel sees."""
        if isinstance(value, tl.constexpr):
            return self.convert(value.value)
        if isinstance(value, JITFunction):
            return self.function(value)
        if isinstance(value, ConstexprFunction):
            return on_constants(value.fn, self.convert)
        if getattr(value, "__triton_aggregate__", False):
            return self._aggregate(value)
        if isinstance(value, types.ModuleType):
            return self._modules.get(value.__name__) or _Module(self, value)
        if isinstance(value, (tuple, list, tl.tuple)):
            return map_tuple(self.convert, value)
        module = getattr(value, "__module__", None)
        if callable(value) and module in self._modules:
            return getattr(self._modules[module], value.__name__)
        return value

    def function(self, function: JITFunction) -> Callable:
        """Return the lowered function; it is defined when first called, so cycles are harmless."""
        if id(function) not in self._functions:
            defined = functools.cache(lambda: self._define(function))

            def call(*args: Any, **kwargs: Any) -> Any:
                return defined()(*args, **kwargs)

            call.__name__, call.__module__ = function.__name__, function.fn.__module__
            self._functions[id(function)] = call
        return self._functions[id(function)]

    def _define(self, function: JITFunction) -> Callable:
        name, file, source, first = _source(function)
        code, inner, outer = _compiled(name, file, source, first)
        scope = function.get_capture_scope()
        namespace = {MARK: True, "__builtins__": dict(self._names), **HELPERS}
        for each in (inner | outer) & scope.keys():
            value = namespace[each] = self.convert(scope[each])
            plain = isinstance(value, (bool, int, float, str, types.FunctionType))
            if plain and value is scope[each] and each in inner:
                what = f"global {each} must be a constexpr or jitted, got {value}"
                raise InvalidKernel(what, (file, first))
        exec(code, namespace)
        return namespace[name]


def map_tuple(function: Callable, values: Any) -> tuple[Any, ...]:
    """Map `function` over items; a named tuple stays one, a list becomes a tuple."""
    items = [function(value) for value in values]
    return type(values)(*items) if hasattr(values, "_fields") else tuple(items)


def _type_alone(value: Any) -> Any:
    """Return Triton's own tensor for a tile, without a value, for functions of compile time."""
    if not isinstance(value, Tile):
        return value
    shape = value.shape
    return tl.tensor(None, tl.block_type(value.dtype, shape) if shape else value.dtype)


def on_constants(
    function: Callable, convert: Callable[[Any], Any] = lambda value: value
) -> Callable:
    """Wrap a function of compile time, which sees types of the kernel's values, and no values;
    `convert`: its result as the kernel sees it."""

    def call(*args: Any, **kwargs: Any) -> Any:
        values = any(isinstance(value, Tile) for value in (*args, *kwargs.values()))
        named = {name: _type_alone(value) for name, value in kwargs.items()}
        try:
            result = convert(function(*map(_type_alone, args), **named))
        except Exception as error:
            if not values:
                raise
            needs = f"{function.__name__} needs constants, got runtime values"
            raise InvalidKernel(f"{needs} ({type(error).__name__}: {error})") from error
        if values and isinstance(result, tl.tensor):
            raise InvalidKernel(f"{function.__name__} needs constants, got runtime values")
        return tuple(result) if isinstance(result, list) else result

    return call


def static_int(value: Any) -> int:
    if not isinstance(value, int):
        raise InvalidKernel(f"a constant integer is needed here, got {value!r}")
    return value


class Range:
    """`range` or `tl.range`; scheduling hints have no effect on the result."""

    def __init__(self, start: Any, end: Any = None, step: Any = None, **hints: Any):
        self.bounds = (0, start) if end is None else (start, end)
        self.step = 1 if step is None else step

    def __iter__(self) -> Iterator[int]:
        return iter(range(*(static_int(bound) for bound in (*self.bounds, self.step))))

    def values(self) -> Iterator[Tile]:
        """Yield the loop variable: a scalar of the integer type that start, end and step share."""
        start, end, step = (to_tile(bound) for bound in (*self.bounds, self.step))
        for bound in (start, end, step):
            if not bound.dtype.is_int() or bound.shape:
                raise InvalidKernel(f"bounds of a range must be integer scalars, got {bound!r}")
        dtype = promote_integers(promote_integers(start.dtype, end.dtype), step.dtype)
        start, end, step = (int(cast(bound, dtype)) for bound in (start, end, step))
        if step <= 0 and isinstance(self.step, Tile):
            raise Unsupported(f"a range with a runtime step of {step}")
        check_time, role = current().scheduler.check_time, current().role
        loop, location, outside = object(), current_location(), role.turns
        for number, value in enumerate(range(start, end, step)):
            check_time()
            role.turns = (*outside, Turn(loop, location, number))
            yield scalar(value, dtype)
        role.turns = outside


class StaticRange(Range):
    """`tl.static_range`: unrolled, over constants."""


def _loop(iterable: Any) -> Iterator[Any]:
    if not isinstance(iterable, Range):
        raise Unsupported(f"a for loop over {type(iterable).__name__} instead of a range")
    return iter(iterable) if isinstance(iterable, StaticRange) else iterable.values()


def again(condition: Any) -> bool:
    """Test the condition of a while loop; a role that spins lets the others run."""
    launch = current()
    launch.scheduler.checkpoint(1.0)
    launch.loops[launch.role] = turns = launch.loops.get(launch.role, 0) + 1
    if turns > MAX_TURNS:
        together = math.prod(launch.grid) // math.prod(launch.cluster_shape)
        raise Unsupported(
            f"more than {MAX_TURNS} turns of while loops in one role; does it wait, and count? "
            f"Clusters run one after another, unless {option('resident', together)} says otherwise"
        )
    holds = bool(condition)
    if holds:
        turned(launch, 1)
    return holds


_DROPS = not hasattr(CodeGenerator, "_sanitize_target_value")


def _assign(value: Any, called: str | tuple[str, ...] = "") -> Any:
    """Convert a value to what a variable holds; `called`: the name, or names, it is assigned to.

    Items of a longer tuple without a name are dropped, where Triton does so (before 3.9).
    """
    if isinstance(value, (bool, int, float, Unbound)):
        return to_tile(value)
    both = isinstance(called, tuple) and isinstance(value, tuple)
    if both and (len(called) == len(value) or (_DROPS and len(called) < len(value))):
        return tuple(_assign(each, name) for each, name in zip(value, called, strict=False))
    if isinstance(called, str) and called and hasattr(type(value), "call_it"):
        value.call_it(called)
    return map_tuple(_assign, value) if isinstance(value, tuple) else value


def constant(value: Any) -> Any:
    if isinstance(value, Tile):
        raise InvalidKernel(f"a tl.constexpr needs a constant, got {value!r}")
    return value


def _connective(stop: bool, op: Callable) -> Callable:
    """Build `and` or `or`: a constant equal to `stop` decides; values are combined element-wise."""

    def evaluate(*operands: Callable) -> Any:
        result = value = None
        for operand in operands:
            value = operand()
            if isinstance(value, Tile):
                result = value if result is None else logical(op, result, value)
            elif bool(value) is stop:
                return value
        return value if result is None else result

    return evaluate


def _choose(condition: Any, first: Callable, second: Callable) -> Any:
    chosen = first() if condition else second()
    return _assign(chosen) if isinstance(condition, Tile) else chosen


def _captured(value: Any, name: str) -> Any:
    """Check a variable that a task reads; a tile of that name outside the task would be passed."""
    if name in current().role.tiles:
        raise InvalidKernel(
            f"a task takes scalars, buffers and barriers from the kernel around it, got "
            f"{current().role.tiles[name]}: compute it in the task, under another name"
        )
    return value


def _return(loops: list[Scope | None], tests: list[Any]) -> None:
    for condition in tests:
        if hasattr(condition, "end"):
            condition.end()
    if any(loops):
        raise InvalidKernel("a loop on runtime values must run to its end, got a return in it")


def check(condition: Any, message: str = "") -> None:
    """Check a device assertion: every element must hold."""
    holds = condition.data.all() if isinstance(condition, Tile) else condition
    if not bool(holds):
        raise DeviceAssertion(f"assertion must hold, got a false element: {message}")


def _raise(what: str) -> None:
    raise InvalidKernel(f"a kernel must not raise, got {what}")


def _enter(condition: Any, otherwise: bool) -> Any:
    """Enter the condition of an `if`; some CTAs of a program alone may take it."""
    return condition.enter(otherwise) if hasattr(condition, "enter") else condition


def _leave(condition: Any) -> None:
    if hasattr(condition, "leave"):
        condition.leave()


HELPERS: dict[str, Callable] = {
    "__enter__": _enter,
    "__leave__": _leave,
    "__raise__": _raise,
    "__assign__": _assign,
    "__constant__": lambda value, called: value,
    "__loop__": _loop,
    "__and__": _connective(False, operator.and_),
    "__or__": _connective(True, operator.or_),
    "__not__": lambda x: logical(operator.invert, x) if isinstance(x, Tile) else not x,
    "__choose__": _choose,
    "__tuple__": tuple,
    "__assert__": check,
    "__captured__": _captured,
    "__return__": _return,
    "__scope__": Scope,
    "__unbound__": functools.cache(Unbound),
    "__is_value__": lambda x: isinstance(x, Tile),
    "__is_static__": lambda x: isinstance(x, StaticRange),
    "__value__": lambda x: getattr(x, "value", x),
    "__locals__": locals,
    "__again__": again,
}
