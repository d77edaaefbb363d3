"""Operations of the language against torch."""

import pytest
import torch
import triton
import triton.language as tl
from triton.language.extra import libdevice

from emulator.tests.checking import grid2, refused
from tritonemu import DeviceAssertion, InvalidKernel, run


@triton.jit
def load_2d(ptr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    return tl.load(ptr + grid2(ROWS, COLUMNS))


@triton.jit
def store_2d(ptr, x):
    tl.store(ptr + grid2(x.shape[0], x.shape[1]), x)


@triton.jit
def dot_kernel(
    a_ptr, b_ptr, out_ptr, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr,
    PRECISION: tl.constexpr, ACCUMULATE: tl.constexpr,
):  # fmt: skip
    a, b = load_2d(a_ptr, M, K), load_2d(b_ptr, N, K)
    acc = tl.full([M, N], 1.0, tl.float32)
    if ACCUMULATE:
        acc = tl.dot(a, b.T, acc, input_precision=PRECISION)
    else:
        acc += tl.dot(a, tl.trans(b), input_precision=PRECISION, out_dtype=tl.float32)
    store_2d(out_ptr, acc)


@pytest.mark.parametrize("accumulate", (False, True))
@pytest.mark.parametrize(
    "dtype, precision, tolerance",
    (
        (torch.bfloat16, None, 1e-6),
        (torch.float16, None, 1e-6),
        (torch.float8_e5m2, None, 1e-6),
        (torch.float32, "ieee", 1e-6),
        (torch.float32, "tf32", 1e-3),
        (torch.float32, None, 1e-3),
    ),
)
def test_dot(dtype, precision, tolerance, accumulate):
    a, b = torch.randn(32, 64).to(dtype), torch.randn(16, 64).to(dtype)
    out = torch.zeros(32, 16)
    report = run(
        dot_kernel, (1,), a, b, out, M=32, N=16, K=64, PRECISION=precision, ACCUMULATE=accumulate
    )
    exact = a.double() @ b.double().T + 1
    error = (out - exact).abs().max() / (a.double().abs() @ b.double().abs().T).max()
    assert error < tolerance
    assert (error > 1e-5) == (tolerance == 1e-3)
    assert report.dots == 1


@triton.jit
def shapes_kernel(x_ptr, out_ptr):
    x = load_2d(x_ptr, 4, 8)
    tl.static_assert(x.T.shape == (8, 4))
    tl.static_assert(tl.permute(tl.reshape(x, 2, 2, 8), (2, 0, 1)).shape == (8, 2, 2))
    tl.static_assert(tl.expand_dims(x, (0, -1)).shape == (1, 4, 8, 1))
    tl.static_assert(x.reshape([32]).type == tl.block_type(tl.float32, [32]))
    tl.static_assert(tl.broadcast_to(tl.program_id(0), 4, 4).shape == (4, 4))
    even, odd = tl.split(x.reshape(4, 4, 2))
    joined = tl.interleave(odd, even)
    store_2d(out_ptr, joined)
    both = tl.cat(x, tl.zeros_like(x), dim=1)
    tl.static_assert(both.shape == (4, 16) and both.numel == 64)


def test_shapes():
    x, out = torch.randn(4, 8), torch.zeros(4, 8)
    run(shapes_kernel, (1,), x, out)
    assert torch.equal(out, x.view(4, 4, 2).flip(-1).reshape(4, 8))


@triton.jit
def sum_and_largest(sum_a, max_a, sum_b, max_b):
    return sum_a + sum_b, tl.maximum(max_a, max_b)


@triton.jit
def reductions_kernel(x_ptr, out_ptr):
    x = load_2d(x_ptr, 8, 16)
    lanes = tl.arange(0, 8)
    tl.store(out_ptr + lanes, tl.sum(x, axis=1))
    tl.store(out_ptr + 8 + lanes, x.max(1))
    tl.store(out_ptr + 16 + lanes, tl.argmin(x, axis=1))
    total, largest = tl.reduce((x, x), 1, sum_and_largest)
    tl.store(out_ptr + 24 + lanes, total + largest)
    tl.store(out_ptr + 32, tl.sum(x))
    backwards = tl.sum(tl.cumsum(x, 1, reverse=True), 1, keep_dims=True)
    tl.store(out_ptr + 40 + lanes, backwards.reshape(8))
    tl.store(out_ptr + 48 + lanes, tl.sort(tl.sum(x, 1)))
    tl.store(out_ptr + 56 + lanes, tl.max(tl.softmax(x, 1, keep_dims=True), 1))


def test_reductions_scans_and_library_functions():
    x, out = torch.randn(8, 16), torch.zeros(64)
    run(reductions_kernel, (1,), x, out)
    expected = (
        *(x.sum(1), x.amax(1), x.argmin(1).float(), x.sum(1) + x.amax(1)),
        torch.nn.functional.pad(x.sum()[None], (0, 7)),
        *(x.flip(1).cumsum(1).sum(1), x.sum(1).sort().values, x.softmax(1).amax(1)),
    )
    torch.testing.assert_close(out.view(8, 8), torch.stack(expected), rtol=1e-5, atol=1e-5)


@triton.jit
def sum_kernel(x_ptr, out_ptr, N: tl.constexpr):
    tl.store(out_ptr, tl.sum(tl.load(x_ptr + tl.arange(0, N))))


def test_fp16_sums_round_at_each_step_and_bf16_sums_do_not():
    x = torch.full((4096,), 1 + 2.0**-10).half()
    out = torch.zeros(1)
    run(sum_kernel, (1,), x, out, N=4096)
    assert out[0] == x.double().sum().half()
    x[0] = 30000.0
    run(sum_kernel, (1,), x, out, N=4096)
    assert out[0] != x.double().sum()
    x = torch.ones(4096).bfloat16()
    run(sum_kernel, (1,), x + 2.0**-7, out, N=4096)
    assert out[0] == 4096 + 32


@triton.jit
def elementwise_kernel(x_ptr, out_ptr, N: tl.constexpr):
    lanes = tl.arange(0, N)
    x = tl.load(x_ptr + lanes)
    tl.store(out_ptr + lanes, tl.exp(x) + tl.exp2(x) + tl.log(x) + tl.log2(x) + tl.sqrt(x))
    tl.store(out_ptr + N + lanes, tl.rsqrt(x) + tl.abs(-x) + tl.sigmoid(x) + tl.erf(x))
    tl.store(out_ptr + 2 * N + lanes, tl.fma(x, x, -x) + tl.cos(x) * tl.sin(x) + x.exp())
    tl.store(out_ptr + 3 * N + lanes, libdevice.tanh(x) + tl.clamp(x, 0.5, 1.0) + tl.floor(x))
    tl.store(out_ptr + 4 * N + lanes, tl.where(x > 1, x, -1.0) + tl.cdiv(N, 3) + tl.fdiv(x, x + 1))


def test_elementwise():
    x, out = torch.rand(64) * 3 + 0.1, torch.zeros(5, 64)
    run(elementwise_kernel, (1,), x, out, N=64)
    expected = (
        x.exp() + x.exp2() + x.log() + x.log2() + x.sqrt(),
        x.rsqrt() + x + x.sigmoid() + x.erf(),
        x * x - x + x.cos() * x.sin() + x.exp(),
        x.tanh() + x.clamp(0.5, 1) + x.floor(),
        torch.where(x > 1, x, -1) + 22 + x / (x + 1),
    )
    torch.testing.assert_close(out, torch.stack(expected))


@triton.jit
def hints_kernel(n, out_ptr):
    tl.assume(n > 0)
    offsets = tl.max_contiguous(tl.multiple_of(tl.arange(0, 8), 8), 8)
    tl.device_assert(offsets < n, "within", mask=offsets < 4)
    tl.debug_barrier()
    tl.static_print("n is", n)
    tl.store(out_ptr + offsets, tl.gather(offsets, 7 - offsets, 0))


def test_hints_and_assertions(capsys):
    out = torch.zeros(8, dtype=torch.int32)
    run(hints_kernel, (1,), 4, out)
    assert out.tolist() == list(range(8))[::-1]
    assert "n is" in capsys.readouterr().out
    refused(DeviceAssertion, "tl.assume", hints_kernel, -4, out)
    refused(DeviceAssertion, "within", hints_kernel, 3, out)


@triton.jit
def refused_kernel(x_ptr, CASE: tl.constexpr):
    x = load_2d(x_ptr, 16, 16)
    if CASE == "dtype":
        tl.dot(x, x.to(tl.float32))
    elif CASE == "shape":
        tl.dot(x, tl.reshape(x, 8, 32))
    elif CASE == "acc":
        tl.dot(x, x, tl.zeros([16, 16], tl.float16))
    elif CASE == "inner":
        tl.dot(tl.reshape(x, 32, 8), tl.reshape(x, 8, 32))
    elif CASE == "precision":
        tl.dot(x, x, input_precision="fp64")
    elif CASE == "16-bit floats":
        tl.exp(x)


@pytest.mark.parametrize(
    "case, message",
    (
        *(("dtype", "one dtype"), ("shape", "shapes of tl.dot"), ("inner", "inner size")),
        ("acc", "acc of tl.dot must be fp32"),
        ("precision", "input_precision must be one of"),
        ("16-bit floats", "tl.exp takes fp32 or fp64, got bf16"),
    ),
)
def test_refusals(case, message):
    refused(InvalidKernel, message, refused_kernel, torch.ones(16, 16).bfloat16(), CASE=case)
