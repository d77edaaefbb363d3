"""Lowering: where Triton differs from Python, what it forbids, and the lines errors point to."""

import math
from collections import namedtuple

import pytest
import torch
import triton
import triton.language as tl

from emulator.tests.checking import build, refused
from tritonemu import DeviceAssertion, InvalidKernel, Unsupported, run

SIZE = tl.constexpr(4)
NOT_A_CONSTANT = 4
Pair = namedtuple("Pair", ("first", "second"))


def zeros(n=16, dtype=torch.int32):
    return torch.zeros(n, dtype=dtype)


@triton.jit
def assignment_kernel(x_ptr, out_ptr):
    x = tl.load(x_ptr)
    variable = 0.1
    constant: tl.constexpr = 0.1
    tl.static_assert((x * variable).dtype == tl.float32)
    tl.static_assert((x * constant).dtype == tl.bfloat16)
    count = 2147483647
    count += 1
    tl.store(out_ptr, count)


@triton.jit
def control_kernel(n, out_ptr):
    pid = tl.program_id(0)
    if pid >= n:
        return
    total = 0
    for i in range(pid, n):
        total += i
    while total > 10:
        total -= 10
    big = total if total > 5 else -1
    tl.store(out_ptr + pid, big)


@triton.jit
def condition_of_several_lines_kernel(n, out_ptr):
    # fmt: off
    if n + n + n + n == 0 or (
        n
    ) > 1:
        tl.store(out_ptr, n)
    # fmt: on


def test_a_condition_may_end_on_a_later_line_further_left():
    run(condition_of_several_lines_kernel, (1,), 2, out := zeros())
    assert out[0] == 2


@triton.jit
def product(x, FACTORS: tl.constexpr, STEP: tl.constexpr = 1):
    for i in tl.static_range(0, len(FACTORS), STEP):
        x = x * FACTORS[i]
    return x, STEP


@triton.jit
def constexpr_of_a_value_kernel(x_ptr, out_ptr, n):
    size: tl.constexpr = 4 * n
    tl.static_assert(size.dtype == tl.int32)
    tl.store(out_ptr, tl.load(x_ptr) / size)


def test_constexpr_of_a_value_is_that_value():
    """fbtriton 3.7.4 compiles it."""
    types = {"x_ptr": "*fp32", "out_ptr": "*fp32", "n": "i32"}
    build(constexpr_of_a_value_kernel, types)
    out = torch.zeros(1)
    run(constexpr_of_a_value_kernel, (1,), torch.ones(1), out, 2)
    assert out[0] == 1 / 8


@triton.jit
def tuple_kernel(out_ptr, FACTORS: tl.constexpr, OPERATION: tl.constexpr):
    first, step = OPERATION(tl.program_id(0) + 1, FACTORS)
    second, _ = OPERATION(first, FACTORS[1:], STEP=2)
    tl.static_assert(OPERATION(first, ())[1] == 1 and step.dtype == tl.int32)
    shape: tl.constexpr = [SIZE] + [1] * 0
    tl.static_assert(len(shape) == 1)
    sizes = [i * 2 for i in range(3)]
    tl.store(out_ptr + tl.arange(0, shape[0]), second + sizes[2])


@triton.jit
def logic_kernel(flags_ptr, out_ptr, PRESENT: tl.constexpr):
    flag = tl.load(flags_ptr) != 0
    lanes = tl.arange(0, 4)
    both = (lanes > 0) and (lanes < 3)
    tl.store(out_ptr + lanes, both.to(tl.int32))
    if flag and not PRESENT or False:
        tl.store(out_ptr + 4, 1)
    tl.store(out_ptr + 5, max(min(lanes.sum(), 3), 1))
    tl.store(out_ptr + 6, min(7, 5))


@triton.jit
def eager_kernel(x_ptr, n, out_ptr):
    if n > 100 and tl.load(x_ptr + 100) > 0:
        tl.store(out_ptr, 1)


def test_and_evaluates_both_sides():
    refused(Exception, "load of x_ptr", eager_kernel, zeros(4), 4, zeros(4))


@triton.jit
def scalar_kernel(one, small, large, ratio, nothing, pair, out_ptr):
    tl.static_assert(one == 1)
    tl.static_assert(nothing is None)
    tl.static_assert(small.dtype == tl.int32)
    tl.static_assert(large.dtype == tl.int64)
    tl.static_assert(ratio.dtype == tl.float32)
    tl.store(out_ptr, pair.first + pair[1] + small)
    tl.store(out_ptr + one, small * small)


@triton.jit
def annotated_kernel(n: tl.int64, out_ptr):
    tl.static_assert(n.dtype == tl.int64)
    tl.store(out_ptr, n * n)


@triton.jit
def wide_range_kernel(end, out_ptr):
    for i in range(end - 1, end):
        tl.static_assert(i.dtype == tl.int64)
        tl.store(out_ptr, i)


@triton.jit
def module_kernel(out_ptr):
    tl.store(out_ptr, math.pi)


@triton.constexpr_function
def twice(n):
    return 2 * n


def make_closure(offset):
    @triton.jit
    def kernel(out_ptr, N: tl.constexpr):
        tl.store(out_ptr + tl.arange(0, twice(N)), offset)

    return kernel


@triton.jit
def scaled(x, factor, offset):
    return x * factor + offset


@triton.constexpr_function
def chosen(name):
    return scaled if name == "scaled" else None


@triton.jit
def chosen_kernel(out_ptr, NAME: tl.constexpr):
    tl.store(out_ptr, chosen(NAME)(2, 3, 1))


@triton.jit
def dictionary_kernel(out_ptr):
    options = {"factor": 3, "offset": 1}
    tl.store(out_ptr, options["factor"])
    tl.store(out_ptr + 1, scaled(2, **{"factor": 3, "offset": 1}))


@triton.jit
def scalar_index_kernel(n, out_ptr):
    inside = n > 3
    lanes = tl.arange(0, 4)
    tl.store(out_ptr + lanes, lanes, (lanes < 2) & inside[:, None])


TOTALS = [sum(range(p, 6)) for p in range(6)]
TOTALS = [(t - 1) % 10 + 1 if t > 10 else t for t in TOTALS]
SCALARS = (1, 65536, 2**31, 0.5, None, Pair(3, 4))


@pytest.mark.parametrize(
    "kernel, arguments, constants, expected",
    (
        # Assignment makes values of constants.
        (assignment_kernel, (torch.ones(1).bfloat16(),), {}, [-(2**31)]),
        (control_kernel, (6,), {}, [t if t > 5 else -1 for t in TOTALS] + [99, 99]),
        (tuple_kernel, (), {"FACTORS": (2, 3, 5), "OPERATION": product}, [30 * 3 + 4] * 4 + [99]),
        # and, or and not are elementwise.
        (logic_kernel, (zeros() + 1,), {"PRESENT": False}, [0, 1, 1, 0, 1, 3, 5]),
        (logic_kernel, (zeros() + 1,), {"PRESENT": True}, [0, 1, 1, 0, 99, 3, 5]),
        (scalar_kernel, SCALARS, {}, [65543, 0]),
        (annotated_kernel, (2**20,), {}, [2**40]),
        # A range has the type of its bounds.
        (wide_range_kernel, (2**40,), {}, [2**40 - 1]),
        (make_closure(tl.constexpr(7)), (), {"N": 2}, [7] * 4 + [99] * 4),
        (module_kernel, (), {}, [torch.tensor(math.pi).item()]),
        (dictionary_kernel, (), {}, [3, 7]),
        (chosen_kernel, (), {"NAME": "scaled"}, [7]),
        # A scalar takes any new dimension.
        (scalar_index_kernel, (5,), {}, [0, 1, 99, 99]),
    ),
    ids=lambda value: value.fn.__name__ if hasattr(value, "fn") else None,
)
def test_what_is_stored(kernel, arguments, constants, expected):
    out = torch.full((8,), 99, dtype=torch.float32 if kernel is module_kernel else torch.int64)
    run(kernel, (8 if kernel is control_kernel else 1,), *arguments, out, **constants)
    assert out[: len(expected)].tolist() == expected


@triton.jit
def assertion_kernel(x_ptr):
    x = tl.load(x_ptr)
    assert x > 0, "x is positive"


def test_assert_is_checked():
    run(assertion_kernel, (1,), torch.ones(1))
    given = torch.zeros(1)
    refused(DeviceAssertion, "x is positive", assertion_kernel, given, line="assert x > 0")


@triton.jit
def break_kernel(out_ptr):
    for i in range(4):
        if i == 2:
            break


@triton.jit
def three_of(x, SIZES: tl.constexpr):
    a, b = SIZES
    return x, x + a, x + b


@triton.jit
def unpack_kernel(out_ptr):
    a, b = three_of(tl.program_id(0) + 10, (3, 4, 5))
    tl.store(out_ptr, a * 100 + b)


def test_of_more_values_than_names_the_rest_is_dropped_or_refused():
    """The compiler of this Triton does the same."""
    out = zeros()
    try:
        run(unpack_kernel, (1,), out, compile=True)
        assert out[0] == 1013
    except InvalidKernel as error:  # since 3.9
        assert "Triton refuses" in str(error)
        refused(InvalidKernel, "too many values to unpack", unpack_kernel, out)


@triton.jit
def chain_kernel(out_ptr):
    x = tl.program_id(0)
    if 0 < x < 2:
        tl.store(out_ptr, 1)


@triton.jit
def element_kernel(out_ptr):
    x = tl.zeros([4], tl.int32)
    x[0] = 1


@triton.jit
def unknown_kernel(out_ptr):
    x = tl.zeros([4], tl.int32)
    y = tl.no_such_thing(x, 4)
    tl.store(out_ptr + y, y)


@triton.jit
def loop_kernel(out_ptr):
    for x in tl.zeros([4], tl.int32):
        tl.store(out_ptr, x)


@pytest.mark.parametrize(
    "kernel, text, message",
    (
        (break_kernel, "    break", "Python syntax Break"),
        (chain_kernel, "0 < x < 2", "chain of comparisons"),
        (element_kernel, "x[0] = 1", "not a name"),
        (unknown_kernel, "tl.no_such_thing", "tl.no_such_thing"),
        (loop_kernel, "for x in", "for loop over Tile"),
    ),
)
def test_unsupported_names_the_operation_and_the_line(kernel, text, message):
    refused(Unsupported, message, kernel, zeros(), line=text)


@triton.jit
def global_kernel(out_ptr):
    tl.store(out_ptr, NOT_A_CONSTANT)


def plain_function(x):
    return x + 1


@triton.jit
def plain_function_kernel(out_ptr):
    tl.store(out_ptr, plain_function(1))


@triton.jit
def builtin_kernel(out_ptr):
    tl.store(out_ptr, abs(-1))  # noqa: F821


@triton.jit
def runtime_shape_kernel(out_ptr):
    tl.store(out_ptr + tl.arange(0, 4 * tl.num_programs(0)), 0)


@triton.jit
def odd_shape_kernel(out_ptr):
    tl.store(out_ptr + tl.arange(0, 3), 0)


@pytest.mark.parametrize(
    "kernel, message",
    (
        (global_kernel, "global NOT_A_CONSTANT must be a constexpr"),
        (plain_function_kernel, "global plain_function must be a constexpr or jitted"),
        (builtin_kernel, "name 'abs' is not defined"),
        (runtime_shape_kernel, "constant integer"),
        (odd_shape_kernel, "constant powers of two"),
    ),
)
def test_what_triton_refuses_is_refused(kernel, message):
    refused(InvalidKernel, message, kernel, zeros())
