"""Integers that a mask turns off and no `other` fills: what depends on them, and what does not."""

import pytest
import torch
import triton
import triton.language as tl

from emulator.tests.checking import place, refused
from tritonemu import UndefinedValue, run

N, B = 5, 8
DTYPES = (*(torch.int8, torch.int16, torch.int32, torch.int64), torch.uint8, torch.uint32)


@triton.jit
def depends_kernel(x_ptr, table_ptr, out_ptr, n, HOW: tl.constexpr, B: tl.constexpr):
    i = tl.arange(0, B)
    mask = i < n
    x = tl.load(x_ptr + i, mask=mask)  # this one
    if HOW == "copy":
        tl.store(out_ptr + i, x)
    if HOW == "sum":
        tl.store(out_ptr, tl.sum(x))
    if HOW == "maximum":
        tl.store(out_ptr, tl.max(x))
    if HOW == "minimum":
        tl.store(out_ptr, tl.min(x))
    if HOW == "arithmetic":
        tl.store(out_ptr + i, (x * 2 - 7) // 3 % 4 + (x >> 1 & 3))
    if HOW == "comparison":
        tl.store(out_ptr, tl.sum((x == 3).to(tl.int32)))
    if HOW == "float":
        tl.store(out_ptr + i, tl.exp(-(x.to(tl.float32) / 100)))
    if HOW == "scan":
        tl.store(out_ptr + i, tl.cumsum(x, 0, reverse=True), mask=mask)
    if HOW == "sort":
        tl.store(out_ptr + i, tl.sort(x), mask=mask)
    if HOW == "choice":
        tl.store(out_ptr + i, tl.where(x > 2, 1, 0))
    if HOW == "conjunction":
        tl.store(out_ptr + i, (x > 2) and (i < B))
    if HOW == "address":
        tl.store(out_ptr + i, tl.load(table_ptr + x), mask=mask)
    if HOW == "place":
        tl.store(out_ptr + x, i)
    if HOW == "mask":
        tl.store(out_ptr + i, i, mask=x < 3)
    if HOW == "counts":
        tl.atomic_add(out_ptr + x, 1)
    if HOW == "masked load":
        tl.store(out_ptr + i, tl.load(table_ptr + i, mask=x < 3, other=0))
    if HOW == "other":
        tl.store(out_ptr + i, tl.load(x_ptr + i, mask=mask, other=x))
    if HOW == "branch" and tl.sum(x) > 3:
        tl.store(out_ptr, 1)
    if HOW == "turns":
        for j in range(tl.sum(x) & 7):
            tl.store(out_ptr + j, 1)


HOWS = (
    *("copy", "sum", "maximum", "minimum", "arithmetic", "comparison", "float", "scan", "sort"),
    *("choice", "conjunction", "address", "place", "mask", "counts", "masked load", "other"),
    *("branch", "turns"),
)


def arguments(dtype=torch.int32, out=torch.int32):
    return (
        torch.arange(N).to(dtype),
        torch.arange(B, dtype=torch.int32),
        torch.zeros(B, dtype=out),
        N,
    )


@pytest.mark.parametrize("how", HOWS)
def test_what_depends_on_an_undefined_integer_is_found(how):
    out = torch.float32 if how == "float" else torch.int32
    error = refused(UndefinedValue, "from the load at", depends_kernel, *arguments(out=out), how, B)
    assert error.other == place(depends_kernel, "# this one")
    run(depends_kernel, (1,), *arguments(out=out), how, B, masked="zero", races=False)
    x, table, y, _ = arguments(out=out)
    run(depends_kernel, (1,), x.repeat(2), table, y, B, how, B, races=False)  # no lane is off


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("how", ("sum", "maximum", "minimum", "arithmetic", "comparison"))
def test_integers_of_every_width_are_known(dtype, how):
    _, *others = arguments()
    x = torch.arange(1, N + 1).to(dtype)
    refused(UndefinedValue, "from the load at", depends_kernel, x, *others, how, B)


@triton.jit
def clean_kernel(x_ptr, table_ptr, out_ptr, n, HOW: tl.constexpr, B: tl.constexpr):
    i = tl.arange(0, B)
    mask = i < n
    x = tl.load(x_ptr + i, mask=mask)
    if HOW == "copy":
        tl.store(out_ptr + i, x, mask=mask)
    if HOW == "arithmetic":
        tl.store(out_ptr + i, (x * 2 - 7) // 3 % 4 + (x >> 1 & 3), mask=mask)
    if HOW == "where":
        tl.store(out_ptr, tl.sum(tl.where(mask, x, 0)))
    if HOW == "product":
        tl.store(out_ptr, tl.sum(x * mask))
    if HOW == "float product":
        tl.store(out_ptr, tl.sum(x.to(tl.float32) * mask))
    if HOW == "conjunction":
        tl.store(out_ptr, tl.sum((mask & (x == 3)).to(tl.int32)))
    if HOW == "and":
        tl.store(out_ptr, tl.sum((mask and (x == 3)).to(tl.int32)))
    if HOW == "address":
        tl.store(out_ptr + i, tl.load(table_ptr + x, mask=mask, other=0))
    if HOW == "place":
        tl.store(out_ptr + x, i, mask=mask)
    if HOW == "mask":
        tl.store(out_ptr + i, i, mask=mask & (x < 3))
    if HOW == "counts":
        tl.atomic_add(out_ptr + x, 1, mask=mask)
    if HOW == "masked load":
        y = tl.load(table_ptr + i, mask=x < 3, other=0)
        tl.store(out_ptr + i, y, mask=mask)
    if HOW == "rows":
        rows = tl.load(table_ptr + x[:, None] * 0 + i[None, :], mask=mask[:, None], other=0)
        tl.store(out_ptr + i, tl.sum(rows, 0))
    if HOW == "scan":
        tl.store(out_ptr + i, tl.cumsum(x, 0), mask=mask)
    if HOW == "histogram":
        tl.store(out_ptr + i, tl.histogram(x, B, mask=mask))
    if HOW == "other":
        tl.store(out_ptr + i, tl.load(x_ptr + i, mask=mask, other=0))
    if HOW == "branch" and tl.sum(tl.where(mask, x, 0)) > 3:
        tl.store(out_ptr, 1)


CLEAN = {
    "copy": [0, 1, 2, 3, 4, 0, 0, 0],
    "arithmetic": None,
    "where": [10] + [0] * 7,
    "product": [10] + [0] * 7,
    "float product": [10] + [0] * 7,
    "conjunction": [1] + [0] * 7,
    "and": [1] + [0] * 7,
    "address": [0, 1, 2, 3, 4, 0, 0, 0],
    "place": [0, 1, 2, 3, 4, 0, 0, 0],
    "mask": [0, 1, 2, 0, 0, 0, 0, 0],
    "counts": [1, 1, 1, 1, 1, 0, 0, 0],
    "masked load": [0, 1, 2, 0, 0, 0, 0, 0],
    "rows": [0, 5, 10, 15, 20, 25, 30, 35],
    "scan": [0, 1, 3, 6, 10, 0, 0, 0],
    "histogram": [1, 1, 1, 1, 1, 0, 0, 0],
    "other": [0, 1, 2, 3, 4, 0, 0, 0],
    "branch": [1] + [0] * 7,
}


@pytest.mark.parametrize("how", CLEAN)
def test_what_does_not_depend_on_it_is_right(how):
    args = arguments()
    run(clean_kernel, (1,), *args, how, B)
    expected = CLEAN[how]
    if expected is None:
        zero = arguments()
        run(clean_kernel, (1,), *zero, how, B, masked="zero")
        expected = zero[2].tolist()
    assert args[2].tolist() == expected


@triton.jit
def allowed_kernel(x_ptr, out_ptr, n, B: tl.constexpr):
    x = tl.load(x_ptr + tl.arange(0, B), mask=tl.arange(0, B) < n)
    # tritonemu: allow(UndefinedValue) zero on every GPU it runs on
    if tl.max(x) > 3:
        tl.store(out_ptr, 1)


def test_a_comment_allows_a_branch():
    out = torch.zeros(1)
    report = run(allowed_kernel, (1,), torch.arange(N), out, N, B)
    assert sum(report.allowed.values()) == 1


@triton.jit
def largest_kernel(x, y, n, B: tl.constexpr):
    tl.store(y, tl.max(tl.load(x + tl.arange(0, B), mask=tl.arange(0, B) < n)))


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16))
def test_an_extremum_that_zeros_would_change(dtype):
    x, y = torch.arange(-8, 8).to(dtype), torch.zeros(1, dtype=dtype)
    refused(UndefinedValue, "y gets a value", largest_kernel, x, y, 6, 16)
    for n, largest in ((9, 0), (12, 3)):  # a zero more changes nothing
        run(largest_kernel, (1,), x, y, n, 16)
        assert y.item() == largest
    run(largest_kernel, (1,), x, y, 6, 16, masked="zero")
    assert y.item() == 0
