"""Mistakes of one operation: what an operation on a barrier, an MMA or a view may be replaced by.

The kinds of mistakes are those of `mutants`.
"""

import ast
import copy
from collections.abc import Iterator
from dataclasses import dataclass

KINDS = ("drop", "parity", "count", "bytes", "early", "swap")
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
DROPPED = (
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
ANNOUNCED = {
    "barrier_arrive": (
        *("async_dot_wait", "async_load_wait_group", "async_descriptor_store_wait", "local_load"),
        *("local_store", "remote_shmem_store"),
    ),
    "tcgen05_commit": ("async_dot", "async_dot_scaled"),
}


def operation_of(node: ast.AST) -> str:
    """The name of the TLX operation that an expression calls, or ""."""
    if not isinstance(node, ast.Call):
        return ""
    name = ast.unparse(node.func)
    return name.removeprefix("tlx.") if "." not in name.removeprefix("tlx.") else ""


def shown(node: ast.AST) -> str:
    return ast.unparse(node).replace("tlx.", "")


def called(statement: ast.stmt) -> str:
    """The operation that a statement is, or whose result it assigns."""
    return operation_of(getattr(statement, "value", None))


def _argument(call: ast.Call, name: str) -> ast.expr | None:
    for keyword in call.keywords:
        if keyword.arg == name:
            return keyword.value
    position = _PARAMETERS[operation_of(call)][name]
    return call.args[position] if 0 <= position < len(call.args) else None


def _replace_argument(call: ast.Call, name: str, value: ast.expr) -> None:
    for keyword in call.keywords:
        if keyword.arg == name:
            keyword.value = value
            return
    position = _PARAMETERS[operation_of(call)][name]
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


def names_in(node: ast.AST) -> set[str]:
    return {part.id for part in ast.walk(node) if isinstance(part, ast.Name)}


@dataclass(frozen=True)
class Array:
    """An array of buffers or barriers: how many, and of buffers the shape, as source."""

    number: ast.expr
    shape: str


def allocated(call: ast.AST) -> Array | None:
    """The array that a call allocates, if it does."""
    kind = operation_of(call)
    if kind == "local_alloc":
        return Array(_argument(call, "num"), ast.unparse(_argument(call, "shape")))
    if kind in ("alloc_barriers", "alloc_warp_barrier"):
        return Array(_argument(call, "num_barriers"), "")
    return None


def changes_of(
    statement: ast.stmt, arrays: dict[str, Array]
) -> Iterator[tuple[str, str, ast.stmt]]:
    """Yield replacements of a statement: the kind of mistake, its description, the new one."""
    if called(statement) in DROPPED and isinstance(statement, ast.Expr):
        yield "drop", f"drop {shown(statement)}", ast.Pass()
    for node in ast.walk(statement):
        for kind, what, new in _replacements(node, arrays):
            # The copy of a statement takes `new` for the copy of `node`.
            yield kind, what, copy.deepcopy(statement, {id(node): new})


def _replacements(node: ast.AST, arrays: dict[str, Array]) -> Iterator[tuple[str, str, ast.expr]]:
    """Yield replacements of an expression: the kind of mistake, its description, the new one."""
    operation = operation_of(node)
    parameters = _PARAMETERS.get(operation, ())

    def other(kind: str, name: str, value: ast.expr) -> tuple[str, str, ast.expr]:
        changed = copy.deepcopy(node)
        _replace_argument(changed, name, value)
        subject = "" if operation.startswith("alloc") else f"({shown(_subject(node))})"
        return kind, f"{operation}{subject}: {name}={shown(value)}", changed

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
        yield "drop", f"drop {shown(node)}", copy.deepcopy(_argument(node, "inp"))
    if "pendings" in parameters:
        yield other("early", "pendings", _binary(_argument(node, "pendings"), ast.Add(), 1))
    if "mBarriers" in parameters:
        elements = getattr(_argument(node, "mBarriers"), "elts", [])
        for i in range(len(elements)):
            rest = [copy.deepcopy(e) for e in elements if e is not elements[i]]
            kind, what, new = other("drop", "mBarriers", ast.List(rest, ast.Load()))
            yield kind, f"{what}, without {shown(elements[i])}", new
    for what, new in _other_views(node, operation, arrays):
        yield "swap", f"{shown(node)} -> {what}", new


def _subject(call: ast.Call) -> ast.expr:
    """The argument of an operation that tells best which one it is."""
    if operation_of(call) == "async_dot_wait":
        return _argument(call, "inp")
    return call.args[0] if call.args else call.keywords[0].value


def _other_views(
    node: ast.AST, operation: str, arrays: dict[str, Array]
) -> Iterator[tuple[str, ast.expr]]:
    """Yield the next element of an array, and that of a similar array, for such an expression."""
    if operation == "local_view":
        base, index = _argument(node, "buffers"), _argument(node, "index")
    elif isinstance(node, ast.Subscript):
        base, index = node.value, node.slice
    else:
        return
    named = ast.unparse(base)
    if named not in arrays:
        return

    def view(name: str, index: ast.expr) -> ast.expr:
        array = ast.parse(name, mode="eval").body
        if operation:
            return ast.Call(copy.deepcopy(node.func), [array, index], [])
        return ast.Subscript(array, index, ast.Load())

    array = arrays[named]
    if not isinstance(array.number, ast.Constant) or array.number.value > 1:
        number = copy.deepcopy(array.number)
        yield "next", view(named, ast.BinOp(_binary(index, ast.Add(), 1), ast.Mod(), number))
    alike = [name for name, a in arrays.items() if array.shape and a.shape == array.shape]
    if len(alike) > 1:
        following = alike[(alike.index(named) + 1) % len(alike)]
        yield following, view(following, copy.deepcopy(index))
