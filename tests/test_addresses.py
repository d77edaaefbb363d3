"""Addresses are 64-bit: by reading every kernel, and by running every rung on sparse memory, or on
a GPU that can hold it."""

import ast
from collections.abc import Collection, Iterable
from pathlib import Path

import pytest
import torch

from gdpa_kernels.block_attention import reference as block_reference
from gdpa_kernels.block_attention import rotary
from gdpa_kernels.norms import heads
from gdpa_kernels.norms import reference as norms
from gdpa_kernels.norms.api import EPSILON, floor_of
from tests import rungs
from tests.calls import DEVICE, kernels_run

ROOT = Path(__file__).parents[1]
SOURCES = [
    path
    for room in ("gdpa_kernels", "lab", "notebooks/_lib", "examples")
    for path in (ROOT / room).rglob("*.py")
]
SOURCES += (ROOT / "notebooks").glob("[!_]*/_*.py")


class Products(ast.NodeVisitor):
    """The 32-bit products of one kernel that an address is made of.

    A value is a "pointer", "wide" (visibly int64), "constant", "narrow", or a "product": narrow,
    and a runtime value times something. A product may be cast when it counts rows; one with a
    stride may not, and none may be added to a pointer as it is.
    """

    def __init__(self, kernel: ast.FunctionDef) -> None:
        self.kinds: dict[str, str] = {}
        self.found: list[str] = []
        for statement in kernel.body:
            self.visit(statement)

    def visit_For(self, node: ast.For) -> None:
        static = "static_range" in ast.unparse(node.iter)
        self._bind(node.target, "constant" if static else "narrow")
        for statement in node.body:
            self.visit(statement)

    def visit_Assign(self, node: ast.Assign) -> None:
        kind = self.kind(node.value)
        for target in node.targets:
            self._bind(target, kind)

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        self._bind(node.target, self.kind(node.value))

    def visit_AugAssign(self, node: ast.AugAssign) -> None:
        self._bind(node.target, self.kind(ast.BinOp(node.target, node.op, node.value)))

    def visit_Expr(self, node: ast.Expr | ast.Return) -> None:
        if node.value is not None:
            self.kind(node.value)

    visit_Return = visit_Expr

    def _bind(self, target: ast.expr, kind: str) -> None:
        for name in ast.walk(target):
            if isinstance(name, ast.Name):
                self.kinds[name.id] = kind

    def kind(self, node: ast.expr) -> str:
        match node:
            case ast.Constant():
                return "constant"
            case ast.Name(id=name) | ast.Attribute(attr=name):
                if name.isupper():
                    return "constant"
                known = self.kinds.get(name, "narrow")
                return "pointer" if name == "ptr" or name.endswith("_ptr") else known
            case ast.Subscript(value=value) | ast.UnaryOp(operand=value):
                return self.kind(value)
            case ast.BinOp():
                return self._of_operation(node)
            case ast.Call():
                return self._of_call(node)
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.expr):
                self.kind(child)
        return "narrow"

    def _of_call(self, node: ast.Call) -> str:
        called = ast.unparse(node.func)
        given = (*node.args, *(keyword.value for keyword in node.keywords))
        kinds = {self.kind(each) for each in given} | {"narrow"}
        if isinstance(node.func, ast.Attribute):
            self.kind(node.func.value)
        if called.endswith((".to", ".cast")):
            return "wide" if any("int64" in ast.unparse(each) for each in given) else "narrow"
        keeps = called.startswith("tl.") and called != "tl.load"
        return _first(kinds) if keeps else "narrow"

    def _of_operation(self, node: ast.BinOp) -> str:
        kinds = {self.kind(node.left), self.kind(node.right)}
        if isinstance(node.op, ast.Mult) and not kinds & {"wide", "pointer"}:
            if kinds == {"constant"}:
                return "constant"
            if "STRIDE" in ast.unparse(node):
                self.found.append(ast.unparse(node))
            return "product"
        if {"pointer", "product"} <= kinds:
            self.found.append(ast.unparse(node))
        return _first(kinds)


def _first(kinds: Collection[str]) -> str:
    order = ("pointer", "wide", "product", "narrow", "constant")
    return next((kind for kind in order if kind in kinds), "narrow")


def narrow_products(source: str) -> list[str]:
    """Of every function under `triton.jit` in a source."""
    kernels = [
        node
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.FunctionDef)
        and any("triton.jit" in ast.unparse(each) for each in node.decorator_list)
    ]
    return [f"{kernel.name}: {each}" for kernel in kernels for each in Products(kernel).found]


# A 32-bit product that no launch can make too large, by kernel.
BOUNDED = {
    "add_rms_norm_backward_kernel": "a row of partial sums for each of a few programs on an SM",
    "head_norm_backward_kernel": "the same",
    "order_kernel": "sequences, counted in int32",
    "repeat_kernel": "a study of one wave of programs",
}


def test_every_product_in_an_address_is_64_bit():
    found = {
        each: path.relative_to(ROOT).as_posix()
        for path in SOURCES
        for each in narrow_products(path.read_text())
    }
    bounded = {each for each in found if each.split(":")[0] in BOUNDED}
    assert {each.split(":")[0] for each in bounded} == set(BOUNDED)
    assert not {each: path for each, path in found.items() if each not in bounded}


@pytest.mark.parametrize(
    "line, found",
    (
        ("at = x_ptr + head * X_STRIDES[1]", 2),
        ("x_ptr += head // GROUP * STRIDES[1]", 2),
        ("at = (head * STRIDES[1]).to(tl.int64)", 1),
        ("at = head.to(tl.int64) * STRIDES[1] + tl.arange(0, 16) * STRIDES[2]", 1),
        ("tl.store(x_ptr + tl.program_id(0) * WIDTH, 0)", 1),
        ("at = tl.arange(0, 16)[None, :] * HEAD_DIM; x = tl.load(x_ptr + at).to(tl.float32)", 1),
        ("at = x_ptr + head.to(tl.int64) * STRIDES[1]", 0),
        ("at = x_ptr + tl.cast(head, tl.int64)[:, None] * HEAD_DIM", 0),
        ("row = tl.program_id(0) * ROWS; at = x_ptr + row.to(tl.int64) * STRIDES[0]", 0),
        ("for i in tl.static_range(4): x = tl.load(x_ptr + i * STRIDES[1])", 0),
        ("for i in tl.range(4): x = tl.load(x_ptr + i * STRIDES[1])", 2),
    ),
)
def test_what_is_found(line, found):
    source = f"@triton.jit\ndef kernel(x_ptr, head):\n    {line}"
    assert len(narrow_products(source)) == found


BEYOND, LENGTHS, HEADS = 2**31, (3, 5), 3
TOKENS = sum(LENGTHS)
# Tokens, heads or elements of a head so far apart that the last begins BEYOND; or all of it does.
LAYOUTS = ("tokens", "heads", "dims", "all")


def far(layout: str, count: int, head_dim: int, dtype: torch.dtype) -> list[torch.Tensor]:
    """`count` tensors `[TOKENS, HEADS, head_dim]` of N(0, 1) in one memory, of whose pages only
    those that hold an element exist, of a CPU's."""
    sizes = (TOKENS, HEADS, head_dim)
    order = {"tokens": (0, 1, 2), "heads": (1, 0, 2), "dims": (2, 0, 1), "all": (0, 1, 2)}[layout]
    inner = sizes[order[1]] * sizes[order[2]]
    steps = (-(-BEYOND // (sizes[order[0]] - 1) // 64) * 64, sizes[order[2]], 1)
    first = 0
    if layout == "all":
        steps, inner, first = (inner, *steps[1:]), TOKENS * inner, BEYOND
    strides = tuple(steps[order.index(dim)] for dim in range(3))
    size = first + (sizes[order[0]] - 1) * steps[0] + count * inner
    memory = torch.empty(size, dtype=dtype, device=DEVICE)
    places = [memory.as_strided(sizes, strides, first + i * inner) for i in range(count)]
    return [place.copy_(torch.randn(sizes)) for place in places]


def near(tensors: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    return [x.double().contiguous() for x in tensors]


def far_turns(layout: str, head_dim: int) -> list[torch.Tensor]:
    return [x[:, 0] for x in far(layout, 2, head_dim // 2, torch.float32)]


def assert_near(actual, expected) -> None:
    """bf16 results of values of size 1: what is read or written elsewhere is off by as much."""
    for one, other in zip(actual, expected, strict=True):
        torch.testing.assert_close(one.double(), other.double(), rtol=0.03, atol=0.1)


@pytest.mark.parametrize(
    "rung, layout",
    [
        pytest.param(
            *(rung, layout),
            id=f"{rung.impl}-{layout}",
            marks=pytest.mark.sweep if rung.is_lesson or layout in ("dims", "all") else (),
        )
        for rung in rungs.KERNELS
        for layout in LAYOUTS
        if layout != "dims" or not rung.requires.aligned
    ],
)
def test_rung(rung, layout):
    if DEVICE == "cuda" and (problem := rung.device_problem(torch.device(DEVICE))):
        pytest.skip(problem)
    head_dim, turns = rungs.head_dim_of(rung), None
    grad, *qkv = far(layout, 4, head_dim, torch.bfloat16)
    if rungs.takes_turns(rung):
        turns = far_turns(layout, head_dim)
    with kernels_run(rung.impl):
        actual = rungs.results(rung, rungs.batch_of(rung, qkv, turns, LENGTHS), grad)
    (exact_grad,), exact_turns = near([grad]), turns and near(turns)
    batch = rungs.batch_of(rung, near(qkv), exact_turns, LENGTHS)
    assert_near(actual, rungs.defined(rung, batch, exact_grad))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_rotary(layout):
    given, turns = far(layout, 3, 64, torch.bfloat16), far_turns(layout, 64)
    expected = [block_reference.rotate(x, *near(turns)) for x in near(given)]
    with kernels_run():
        rotary.rotary(*given, turns, in_place=True)
    assert_near(given, expected)


@pytest.mark.parametrize("turned", (False, True))
@pytest.mark.parametrize("layout", LAYOUTS)
def test_norm_of_heads(layout, turned):
    x, grad = far(layout, 2, 64, torch.bfloat16)
    weight, turns = torch.rand(64, device=DEVICE) + 0.5, (None, None)
    if turned:
        turns = tuple(torch.randn(2, TOKENS, 32, device=DEVICE))
    options = {"counts": (1, 2), "sin_cos": turns, "floor": floor_of(x.dtype)}
    exact_x, exact_grad = near([x, grad])
    rstd, kept = norms.head_forward(exact_x, weight, weight, eps=EPSILON, **options)
    saved = exact_x if kept is None else kept
    expected = norms.head_backward(exact_grad, saved, rstd, weight, weight, **options)
    with kernels_run():
        rstd, kept = heads.forward(x, weight, weight, eps=EPSILON, **options)
        saved = x if kept is None else kept
        actual = heads.backward(grad, saved, rstd, weight, weight, **options)
    assert_near([x, grad, *actual], [exact_x, exact_grad, *expected])
