"""Variables in loops and branches: the emulator refuses what Triton's front end refuses."""

import pytest
import torch
import triton
import triton.language as tl

from emulator.tests.checking import box, build, ints, refused, tlx
from tritonemu import InvalidKernel, run
from tritonemu.compiler import ask_front_end

zeros = ints(16, fill=0)

# Each takes (y_ptr, n, C): int32 in memory, a number and a constant of 4.


@triton.jit
def carried(y_ptr, n, C: tl.constexpr):
    x, pair = 1, (n, n + 1)
    for i in range(n):
        x += i
        pair = (pair[1], pair[0] + 1)
        double: tl.constexpr = 2 * C
        tl.store(y_ptr + 3, double)
        y_ptr += 1
    i = 0
    while i < n:
        x, i = x * 2, i + 1
    tl.store(y_ptr, x + pair[0])


@triton.jit
def carried_with_another_type(y_ptr, n, C: tl.constexpr):
    x = 0
    for _ in range(n):  # here
        x = x + 0.5
    tl.store(y_ptr, x)


@triton.jit
def carried_with_another_shape(y_ptr, n, C: tl.constexpr):
    x, i = tl.zeros((16,), tl.int32), 0
    while i < n:  # here
        x, i = x.sum(), i + 1
    tl.store(y_ptr, x)


@triton.jit
def carried_pointer(y_ptr, n, C: tl.constexpr):
    for _ in range(n):  # here
        y_ptr = y_ptr + tl.arange(0, 4)
    tl.store(y_ptr, n)


@triton.jit
def carried_pair(y_ptr, n, C: tl.constexpr):
    pair = (n, n + 1)
    for _ in range(n):  # here
        pair = (pair[1], pair[0] + 1.0)
    tl.store(y_ptr, pair[0])


@triton.jit
def constant_in_a_loop(y_ptr, n, C: tl.constexpr):
    for _ in range(n):  # here
        C = n
    tl.store(y_ptr, C)


@triton.jit
def new_in_a_loop(y_ptr, n, C: tl.constexpr):
    for i in range(n):
        x = i + 1
    tl.store(y_ptr, x)  # here


@triton.jit
def from_the_turn_before(y_ptr, n, C: tl.constexpr):
    for i in range(n):
        if i > 0:
            tl.store(y_ptr, x)  # noqa: F821, here
        x = i + 1  # noqa: F841


@triton.jit
def unrolled(y_ptr, n, C: tl.constexpr):
    x = 1
    for i in tl.static_range(2):
        x, y = x * 2.0, i
        if n == i:
            return
    if C == 4:
        x, z = x.to(tl.int32), 1
    tl.store(y_ptr, x + y + z)


@triton.jit
def return_in_a_loop(y_ptr, n, C: tl.constexpr):
    for i in range(n):
        if i == 2:
            return  # here
        tl.store(y_ptr, i)


@triton.jit
def return_in_a_branch(y_ptr, n, C: tl.constexpr):
    if n > 7:
        return
    tl.store(y_ptr, n)


@triton.jit
def another_type_in_one_branch(y_ptr, n, C: tl.constexpr):
    x = 1
    if n > 1:  # here
        x = 2.0
        tl.store(y_ptr, x)


@triton.jit
def another_type_in_both_branches(y_ptr, n, C: tl.constexpr):
    x = 1
    if n > 1:  # here
        x = 2.0
        tl.store(y_ptr, n)
    else:
        x = 3.0
    tl.store(y_ptr, x)


@triton.jit
def constant_in_a_branch(y_ptr, n, C: tl.constexpr):
    if n > 1:  # here
        C = 5
    tl.store(y_ptr, C)


@triton.jit
def new_in_one_branch(y_ptr, n, C: tl.constexpr):
    if n > 1:
        x = 1
    else:
        y = 2
        tl.store(y_ptr, y)
    tl.store(y_ptr, x)  # here


@triton.jit
def the_other_branch_returns(y_ptr, n, C: tl.constexpr):
    if n > 1:
        x = 1
    else:
        return
    tl.store(y_ptr, x)  # here


@triton.jit
def new_in_both_branches(y_ptr, n, C: tl.constexpr):
    if n > 1:
        x = n + 1
    elif n > 0:
        x = 5
    else:
        x = n
    tl.store(y_ptr, x)


@triton.jit
def types_of_branches(y_ptr, n, C: tl.constexpr):
    if n > 1:
        x = 1
        tl.store(y_ptr, x)
    else:
        x = 2.0
        tl.store(y_ptr, x)


TYPES = "must keep its type in this {}, which is on runtime values: {}"
ENDED = "x is not defined here; a variable that a loop or one branch on runtime values assigns"
REFUSED = {
    carried_with_another_type: "x " + TYPES.format("loop", "int32[] before, fp32[] after"),
    carried_with_another_shape: "x " + TYPES.format("loop", "int32[16] before, int32[] after"),
    carried_pointer: "y_ptr " + TYPES.format("loop", "pointer<int32>[] before, pointer<int32>[4]"),
    carried_pair: "pair " + TYPES.format("loop", "(int32[], int32[]) before, (int32[], fp32[])"),
    constant_in_a_loop: "C " + TYPES.format("loop", "4 before, int32[] after"),
    new_in_a_loop: ENDED,
    from_the_turn_before: ENDED,
    return_in_a_loop: "a loop on runtime values must run to its end, got a return in it",
    another_type_in_one_branch: "x " + TYPES.format("if", "int32[] before, fp32[] after"),
    another_type_in_both_branches: "x " + TYPES.format("if", "int32[] before, fp32[] after"),
    constant_in_a_branch: "C " + TYPES.format("if", "4 before, int32[] after"),
    new_in_one_branch: ENDED,
    the_other_branch_returns: ENDED,
}


def asked(kernel):
    arguments = {"y_ptr": torch.zeros(16, dtype=torch.int32), "n": 3, "C": 4}
    ask_front_end(kernel, "sm_90", arguments, {"num_warps": 4})


@pytest.mark.parametrize("kernel", REFUSED, ids=lambda kernel: kernel.__name__)
def test_what_the_front_end_refuses(kernel):
    with pytest.raises(InvalidKernel, match="Triton refuses this kernel: "):
        asked(kernel)
    error = refused(InvalidKernel, None, kernel, *zeros(), 3, C=4, line="here")
    assert REFUSED[kernel] in str(error)


@pytest.mark.parametrize(
    "kernel, first",
    (
        (carried, 0),  # one step on
        (unrolled, 6),
        (return_in_a_branch, 3),
        (new_in_both_branches, 4),
    ),
    ids=lambda value: getattr(value, "__name__", None),
)
def test_what_the_front_end_takes(kernel, first):
    asked(kernel)
    (y,) = zeros()
    run(kernel, (1,), y, 3, C=4)
    assert y[0] == first
    if kernel is carried:
        assert y[3] == (1 + 0 + 1 + 2) * 2**3 + 5


@pytest.mark.parametrize("n", (3, 0))
def test_types_of_branches_are_asked_for(n):
    """Only one of them runs."""
    message = "Mismatched type for x between then block"
    refused(InvalidKernel, message, types_of_branches, *zeros(), n, C=4)


@triton.jit
def options_kernel(x_desc, y_ptr, n: tl.int64, ones, scale, nothing, pair, C: tl.constexpr):
    tl.static_assert(n.dtype == tl.int64)
    tl.static_assert(ones == 1)
    tl.static_assert(nothing is None)
    tl.static_assert(x_desc.block_shape[0] == 16)
    if n > 1:
        x = pair[0] * scale
        tl.store(y_ptr + 1, x)
    else:
        x = scale
    tl.store(y_ptr, x + C)


def test_the_front_end_knows_the_arguments():
    x, y = torch.zeros(16), torch.zeros(2)
    run(options_kernel, (1,), box(x, 16), y, 3, 1, 0.5, None, (4, 5), C=2)
    assert y[0] == 4


@triton.jit
def task_kernel(y_ptr, n):
    with tlx.async_tasks():
        with tlx.async_task("default"):
            for i in range(n):
                x = i
                tl.store(y_ptr, x)
        with tlx.async_task(num_warps=4):
            for i in range(n):
                x = i * 0.5
                tl.store(y_ptr + 1, x)


@triton.jit
def unknown_kernel(y_ptr):
    with tlx.async_tasks():
        with tlx.async_task("default"):
            tl.store(y_ptr, x)  # noqa: F821
        with tlx.async_task(num_warps=4):
            x = 1.0
            tl.store(y_ptr + 1, x)


@pytest.mark.tlx
def test_variables_of_tasks_are_their_own():
    y = torch.zeros(2)
    run(task_kernel, (1,), y, 3)
    assert y.tolist() == [2, 1]
    build(task_kernel, {"y_ptr": "*fp32", "n": "i32"})
    refused(InvalidKernel, "x is not defined here", unknown_kernel, y)
