"""Offsets in int32 into tensors that have more elements than an int32 counts."""

import pytest
import torch
import triton
import triton.language as tl

from emulator.tests.checking import place
from tritonemu import OutOfBounds, run

WIDTH = 2**16
ROWS = 2**15 + 2**16  # a row more than 2**15 begins where an int32 is negative


@triton.jit
def rows_kernel(x, out, first, stride, KIND: tl.constexpr, B: tl.constexpr):
    row = first + tl.program_id(0)
    columns = tl.arange(0, B)
    if KIND == "int64":
        row = row.to(tl.int64)
    if KIND == "late":
        pointers = x + (row * stride).to(tl.int64) + columns  # late
    elif KIND == "block":
        rows = row + tl.arange(0, 2)
        offsets = rows[:, None] * stride  # block
        pointers = x + (tl.broadcast_to(offsets, [2, B]) + columns[None, :])
    elif KIND == "pointer":
        x += row * stride  # pointer
        pointers = x + columns
    else:
        pointers = x + (row * stride + columns)  # plain
    mask = columns >= 0
    if KIND == "masked":
        mask = (row * stride).to(tl.int64) + columns >= 0
        tl.store(out + columns, tl.load(pointers, mask=mask, other=0))
    elif KIND == "hash":
        slot = (row * stride) % B
        tl.store(out + columns, tl.load(x + tl.abs(slot) + columns))
    elif KIND == "block":
        tl.store(out + columns, tl.max(tl.load(pointers), 0))  # loads two
    else:
        tl.store(out + columns, tl.load(pointers))  # loads one


@pytest.fixture(scope="module")
def rows():
    # Not touched, it takes no memory.
    return torch.empty(ROWS, WIDTH, dtype=torch.int8)


def launch(x, kind, first):
    out = torch.zeros(16, dtype=torch.int8)
    run(rows_kernel, (1,), x, out, first, WIDTH, KIND=kind, B=16)
    return out.tolist()


@pytest.mark.parametrize("kind", ["plain", "late", "block", "pointer"])
@pytest.mark.parametrize("first", [2**15, 2**16 + 1], ids=["negative", "another row"])
def test_an_offset_that_overflows(rows, kind, first):
    with pytest.raises(OutOfBounds, match=f"must be at element {first * WIDTH}, got") as caught:
        launch(rows, kind, first)
    here = place(rows_kernel, f"# loads {'two' if kind == 'block' else 'one'}")
    assert (caught.value.file, caught.value.line) == here
    assert caught.value.other[1] == place(rows_kernel, f"# {kind}")[1]


@pytest.mark.parametrize("kind, first", [("int64", 2**16 + 1), ("plain", 2**15 - 1)])
def test_an_offset_that_does_not(rows, kind, first):
    rows[first, :16] = 7
    assert launch(rows, kind, first) == [7] * 16


@pytest.mark.parametrize("kind", ["masked", "hash"])
def test_what_is_no_address(rows, kind):
    rows[0, :32] = 3
    assert launch(rows, kind, 2**15) == [0 if kind == "masked" else 3] * 16


def test_small_tensors_are_not_watched():
    """An int32 that wraps around on purpose, and an offset that is right after that."""
    x = torch.full((4, 16), 5, dtype=torch.int8)
    assert launch(x, "plain", 2**16) == [5] * 16
