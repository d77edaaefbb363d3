"""Block pointers against slices of PyTorch tensors."""

import pytest
import torch
import triton
import triton.language as tl

from emulator.tests.checking import refused
from tritonemu import InvalidKernel, OutOfBounds, Race, run


@triton.jit
def copy_kernel(x_ptr, y_ptr, m, n, row, column, CHECK: tl.constexpr, PADDING: tl.constexpr):
    x = tl.make_block_ptr(x_ptr, (m, n), (n, 1), (row, column), (8, 16), (1, 0))
    y = tl.make_block_ptr(y_ptr, (8, 16), (16, 1), (0, 0), (8, 16), (1, 0))
    tl.store(y, tl.load(x, boundary_check=CHECK, padding_option=PADDING))


@pytest.mark.parametrize("padding, value", (("", 0.0), ("zero", 0.0), ("nan", float("nan"))))
@pytest.mark.parametrize("row, column", ((0, 0), (3, 5), (-2, 20), (9, -7)))
def test_loads_pad_what_lies_outside(padding, value, row, column):
    x, y = torch.randn(10, 30), torch.empty(8, 16)
    run(copy_kernel, (1,), x, y, 10, 30, row, column, CHECK=(0, 1), PADDING=padding)
    padded = torch.full((40, 80), value)
    padded[15:25, 25:55] = x
    expected = padded[15 + row : 23 + row, 25 + column : 41 + column]
    torch.testing.assert_close(y, expected, rtol=0, atol=0, equal_nan=True)


def test_unchecked_dimensions_must_stay_in_the_tensor():
    arguments = torch.zeros(10, 30), torch.empty(8, 16), 10, 30, 8, 0
    refused(OutOfBounds, "load of x_ptr", copy_kernel, *arguments, CHECK=(1,), PADDING="")


@triton.jit
def matmul_kernel(a_ptr, b_ptr, c_ptr, m, n, k, BLOCK: tl.constexpr):
    row, column = tl.program_id(0) * BLOCK, tl.program_id(1) * BLOCK
    a = tl.make_block_ptr(a_ptr, (m, k), (k, 1), (row, 0), (BLOCK, BLOCK), (1, 0))
    b = tl.make_block_ptr(b_ptr, (k, n), (1, k), (0, column), (BLOCK, BLOCK), (0, 1))
    acc = tl.zeros((BLOCK, BLOCK), tl.float32)
    for _ in range(0, k, BLOCK):
        acc += tl.dot(tl.load(a, boundary_check=(0, 1)), tl.load(b, boundary_check=(0, 1)))
        a, b = tl.advance(a, (0, BLOCK)), tl.advance(b, (BLOCK, 0))
    c = tl.make_block_ptr(c_ptr, (m, n), (n, 1), (row, column), (BLOCK, BLOCK), (1, 0))
    tl.store(c, acc.to(c.dtype.element_ty), boundary_check=(0, 1))


def test_matmul():
    a, b, c = torch.randn(40, 50).half(), torch.randn(20, 50).half(), torch.zeros(40, 20).half()
    run(matmul_kernel, (3, 2), a, b, c, 40, 20, 50, BLOCK=16)
    torch.testing.assert_close(c, (a.float() @ b.float().T).half())


@triton.jit
def overlapping_kernel(y_ptr):
    y = tl.make_block_ptr(y_ptr, (24,), (1,), (8 * tl.program_id(0),), (16,), (0,))
    tl.store(y, tl.zeros((16,), tl.float32) + tl.program_id(0) + 1)


def test_stores_race():
    refused(Race, "y_ptr", overlapping_kernel, torch.zeros(24), grid=(2,))


@triton.jit
def wrong_kernel(x_ptr, CASE: tl.constexpr):
    x = tl.make_block_ptr(x_ptr, (16,), (1,), (0,), (16,), (0,))
    if CASE == "mask":
        tl.load(x, mask=tl.arange(0, 16) < 3)
    elif CASE == "dimension":
        tl.load(x, boundary_check=(1,))
    elif CASE == "padding":
        tl.load(x, boundary_check=(0,), padding_option="one")
    elif CASE == "offsets":
        tl.advance(x, (1, 1))
    elif CASE == "order":
        tl.make_block_ptr(x_ptr, (16,), (1,), (0,), (16,), (1,))
    elif CASE == "plain":
        tl.load(x_ptr, boundary_check=(0,))


@pytest.mark.parametrize(
    "case, message",
    (
        *(
            ("mask", "takes no `mask`"),
            ("dimension", "boundary_check must name dimensions below 1"),
        ),
        *(("padding", "padding_option must be"), ("offsets", "advance needs 1 offsets, got 2")),
        *(("order", "order must name each dimension once"), ("plain", "need a block pointer")),
    ),
)
def test_refusals(case, message):
    refused(InvalidKernel, message, wrong_kernel, torch.zeros(16), CASE=case)
