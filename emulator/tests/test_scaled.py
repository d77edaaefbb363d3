"""Microscaling formats, gathers of descriptors, copies to tensor memory, stochastic rounding."""

import pytest
import torch
import triton
import triton.language as tl

from emulator.tests.checking import B200, box, grid2, refused, tlx
from tritonemu import InvalidKernel, Race, UninitializedRead, run

E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6])


@triton.jit
def scaled_kernel(
    a_ptr, a_scale_ptr, b_ptr, b_scale_ptr, c_ptr, A: tl.constexpr, B: tl.constexpr,
    M: tl.constexpr, N: tl.constexpr, K: tl.constexpr, AK: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    a, b = tl.load(a_ptr + grid2(M, AK)), tl.load(b_ptr + grid2(BK, N))
    a_scale = tl.load(a_scale_ptr + grid2(M, K // 32))
    b_scale = tl.load(b_scale_ptr + grid2(N, K // 32))
    c = tl.dot_scaled(a, a_scale, A, b, b_scale, B)
    tl.store(c_ptr + grid2(M, N), tl.dot_scaled(a, a_scale, A, b, b_scale, B, c))


def operand(element: str, rows: int, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Random elements [rows, k] as memory holds them, and their values."""
    if element == "e2m1":
        nibbles = torch.randint(0, 16, (rows, k))
        packed = nibbles[:, 0::2] | nibbles[:, 1::2] << 4
        return packed.to(torch.uint8), E2M1[nibbles]
    dtype = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2, "bf16": torch.bfloat16}
    x = torch.randn(rows, k).to(dtype[element])
    return (x if element == "bf16" else x.view(torch.uint8)), x.float()


@pytest.mark.parametrize("arch", ("sm_90", "sm_100"))
@pytest.mark.parametrize("a, b", (("e2m1", "e2m1"), ("e4m3", "e5m2"), ("bf16", "e2m1")))
def test_dot_scaled(a, b, arch):
    (x, x_value), (y, y_value) = operand(a, 16, 64), operand(b, 32, 64)
    scales = [torch.randint(122, 132, (size, 2)).to(torch.uint8) for size in (16, 32)]
    c, stored = torch.zeros(16, 32), y.T.contiguous()
    sizes = {"M": 16, "N": 32, "K": 64, "AK": x.shape[1], "BK": len(stored)}
    arguments = x, scales[0], stored, scales[1], c
    run(scaled_kernel, (1,), *arguments, A=a, B=b, **sizes, arch=arch)
    factors = [torch.exp2(s.float() - 127).repeat_interleave(32, 1) for s in scales]
    torch.testing.assert_close(c, 2 * (x_value * factors[0]) @ (y_value * factors[1]).T)


@triton.jit
def gather_kernel(x_desc, y_desc, rows_ptr, out_ptr):
    rows = tl.load(rows_ptr + tl.arange(0, 8))
    x = x_desc.gather(rows, 4)
    tl.store(out_ptr + grid2(8, 8), x)
    y_desc.scatter(x, rows + 1, 0)


def test_gather_and_scatter_of_descriptors():
    x, y, out = torch.randn(20, 16), torch.zeros(24, 8), torch.zeros(8, 8)
    rows = torch.tensor([3, 0, 19, 7, 8, 2, 5, 21], dtype=torch.int32)
    boxes = box(x, 1, 8), box(y, 1, 8)
    refused(InvalidKernel, "gather needs arch sm_100", gather_kernel, *boxes, rows, out)
    run(gather_kernel, (1,), *boxes, rows, out, **B200)
    padded = torch.cat((x, torch.zeros(4, 16)))
    torch.testing.assert_close(out, padded[rows.long(), 4:12])
    expected = torch.zeros(24, 8)
    expected[rows.long() + 1] = out
    torch.testing.assert_close(y, expected)


@triton.jit
def copy_kernel(x_ptr, y_ptr, WAIT: tl.constexpr):
    source = tlx.local_alloc((128, 64), tl.float32, 1)
    target = tlx.local_alloc((128, 64), tl.float32, 1, tlx.storage_kind.tmem)
    done = tlx.alloc_barriers(1)
    tlx.local_store(source[0], tl.load(x_ptr + grid2(128, 64)))
    tlx.tmem_copy(source[0], target[0])
    tlx.tcgen05_commit(done[0])
    if WAIT:
        tlx.barrier_wait(done[0], 0)
    tl.store(y_ptr + grid2(128, 64), tlx.local_load(target[0]))


@pytest.mark.tlx
def test_copies_to_tensor_memory():
    x, y = torch.randn(128, 64), torch.zeros(128, 64)
    run(copy_kernel, (1,), x, y, WAIT=True, **B200)
    torch.testing.assert_close(y, x)
    refused((Race, UninitializedRead), "target", copy_kernel, x, y, WAIT=False, **B200)


@triton.jit
def round_kernel(x_ptr, bits_ptr, y_ptr, N: tl.constexpr):
    offsets = tl.arange(0, N)
    x, bits = tl.load(x_ptr + offsets), tl.load(bits_ptr + offsets)
    tl.store(y_ptr + offsets, tlx.stoch_round(x, y_ptr.dtype.element_ty, bits))


@pytest.mark.tlx
@pytest.mark.parametrize(
    "dtype", (torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float8_e5m2)
)
def test_stochastic_rounding(dtype):
    x = torch.full((4096,), 1 + torch.finfo(dtype).eps * 0.25)
    x[:4] = torch.tensor([1e30, -1e30, 0.0, 1.0])
    bits, y = torch.randint(0, 2**32, (4096,)).to(torch.uint32), torch.zeros(4096, dtype=dtype)
    run(round_kernel, (1,), x, bits, y, N=4096, **B200)
    y, limit = y.float(), torch.finfo(dtype).max
    if dtype != torch.bfloat16:
        assert y[:4].tolist() == [limit, -limit, 0, 1]
    up = 1 + torch.finfo(dtype).eps
    assert set(y[4:].tolist()) == {1.0, up}
    assert abs((y[4:] == up).float().mean() - 0.25) < 0.04


@triton.jit
def precision_kernel(x_ptr, y_ptr, PRECISION: tl.constexpr):
    x = tl.load(x_ptr + grid2(32, 32))
    tl.store(y_ptr + grid2(32, 32), tl.dot(x, x, input_precision=PRECISION))


def test_precisions_of_fp32_products():
    x, errors = torch.randn(32, 32), {}
    for precision in ("tf32", "bf16x3", "tf32x3", "bf16x6", "ieee"):
        y = torch.zeros(32, 32)
        run(precision_kernel, (1,), x, y, PRECISION=precision)
        errors[precision] = float((y - x.double() @ x.double()).abs().max())
    assert errors["tf32"] > 10 * errors["bf16x3"] > 10 * errors["tf32x3"]
    assert errors["tf32x3"] < 1e-4 and errors["bf16x6"] < 1e-5 and errors["ieee"] < 1e-5
