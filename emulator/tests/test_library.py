"""libdevice, random numbers, 64-bit integers, histograms, atomics and sorting against PyTorch."""

import math
import operator
from functools import reduce

import pytest
import torch
import triton
import triton.language as tl
from triton.language.extra import libdevice

from emulator.tests.checking import grid2, refused
from tritonemu import InvalidKernel, OutOfBounds, Race, UndefinedValue, run


@triton.jit
def apply_kernel(x_ptr, y_ptr, F: tl.constexpr):
    offsets = tl.arange(0, 64)
    tl.store(y_ptr + offsets, F(tl.load(x_ptr + offsets)))


@triton.jit
def cbrt(x):
    return libdevice.cbrt(x)


@triton.jit
def away(x):
    return libdevice.round(x)


@triton.jit
def nearest(x):
    return libdevice.llrint(x)


@triton.jit
def power(x):
    return tl.extra.cuda.libdevice.pow(x * x, 1.5) + libdevice.pow(x, 3)


@triton.jit
def special(x):
    return libdevice.tgamma(x + 0.3) + libdevice.erfcx(x) + libdevice.j0(x) + libdevice.log1p(x * x)


@triton.jit
def classes(x):
    return libdevice.isnan(libdevice.log(x)) + 2 * libdevice.isinf(1 / x).to(tl.int32)


def specials(x):
    gamma = torch.tensor([math.gamma(v + 0.3) for v in x])
    return gamma + torch.special.erfcx(x) + torch.special.bessel_j0(x) + (x * x).log1p()


@pytest.mark.parametrize(
    "function, expected",
    (
        (cbrt, lambda x: x.sign() * x.abs() ** (1 / 3)),
        (away, lambda x: (x.abs() + 0.5).floor() * x.sign()),
        (nearest, lambda x: x.round()),
        (power, lambda x: x.abs() ** 3 + x**3),
        (special, specials),
        (classes, lambda x: (x < 0) + 2 * (x == 0).float()),
    ),
)
def test_libdevice(function, expected):
    x, y = torch.linspace(-4, 3.875, 64), torch.empty(64)
    run(apply_kernel, (1,), x, y, F=function)
    torch.testing.assert_close(y, expected(x), rtol=2e-5, atol=1e-5)


@triton.jit
def integers_kernel(x_ptr, y_ptr):
    offsets = tl.arange(0, 8)
    x = tl.load(x_ptr + offsets)
    tl.store(y_ptr + offsets, libdevice.popc(x))
    tl.store(y_ptr + 8 + offsets, libdevice.clz(x))
    tl.store(y_ptr + 16 + offsets, libdevice.ffs(x))
    tl.store(y_ptr + 24 + offsets, libdevice.brev(libdevice.brev(x)))
    tl.store(y_ptr + 32 + offsets, libdevice.mulhi(x, x))
    tl.store(y_ptr + 40 + offsets, libdevice.byte_perm(x, x, 0x0123))


def test_libdevice_of_integers():
    values = [0, 1, -1, 12345, -98765, 2**31 - 1, -(2**31), 0x01020304]
    y = torch.empty(6, 8, dtype=torch.int32)
    run(integers_kernel, (1,), torch.tensor(values, dtype=torch.int32), y)
    bits = [v & 0xFFFFFFFF for v in values]
    assert y[0].tolist() == [b.bit_count() for b in bits]
    assert y[1].tolist() == [32 - b.bit_length() for b in bits]
    assert y[2].tolist() == [(b & -b).bit_length() for b in bits]
    assert y[3].tolist() == values
    assert y[4].tolist() == [v * v >> 32 for v in values]
    swapped = [int.from_bytes(b.to_bytes(4, "little"), "big") for b in bits]
    assert [v & 0xFFFFFFFF for v in y[5].tolist()] == swapped


@triton.jit
def directed_kernel(x_ptr, y_ptr):
    x = tl.load(x_ptr)
    tl.store(y_ptr, libdevice.div_rd(x, 3.0))
    tl.store(y_ptr + 1, libdevice.div_ru(x, 3.0))
    tl.store(y_ptr + 2, libdevice.div_rz(-x, 3.0))
    tl.store(y_ptr + 3, x.to(tl.float16, fp_downcast_rounding="rtz"))
    tl.store(y_ptr + 4, libdevice.float2int_ru(x))


def test_directed_roundings():
    x, y = torch.tensor([1.9999]), torch.empty(5)
    run(directed_kernel, (1,), x, y)
    exact = x.double() / 3
    assert y[0].double() < exact < y[1].double() and y[2] == -y[0]
    assert torch.nextafter(y[0], y[1]) == y[1]
    assert y[3] == torch.tensor(0x3FFF, dtype=torch.int16).view(torch.float16) and y[4] == 2


def test_libdevice_refuses_16_bit_floats():
    with pytest.raises(InvalidKernel, match=r"libdevice.cbrt takes \(fp32\) or \(fp64\), got"):
        run(apply_kernel, (1,), torch.zeros(64).half(), torch.zeros(64), F=cbrt)


@triton.jit
def put_four(ptr, a, b, c, d):
    tl.store(ptr, a)
    tl.store(ptr + 1, b)
    tl.store(ptr + 2, c)
    tl.store(ptr + 3, d)


@triton.jit
def philox_words_kernel(y_ptr, z_ptr):
    offsets = tl.arange(0, 1)
    a, b, c, d = tl.randint4x(0, offsets)
    put_four(y_ptr + offsets, a, b, c, d)
    zero = tl.zeros((1,), tl.uint64)
    a, b, c, d = tl.philox(0, zero, zero, zero, zero)
    put_four(z_ptr + offsets, a, b, c, d)


def test_philox_gives_the_known_answers_of_random123():
    y, z = torch.zeros(4, dtype=torch.uint32), torch.zeros(4, dtype=torch.uint64)
    run(philox_words_kernel, (1,), y, z)
    assert y.tolist() == [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]
    assert z.tolist() == [
        *(0x16554D9ECA36314C, 0xDB20FE9D672D0FDC),
        *(0xD7E772CEE186176B, 0x7E68B68AEC7BA23B),
    ]


@triton.jit
def random_kernel(u_ptr, n_ptr, SIZE: tl.constexpr):
    offsets = tl.arange(0, SIZE)
    tl.store(u_ptr + offsets, tl.rand(7, offsets))
    tl.store(n_ptr + offsets, tl.randn(7, offsets))


def test_rand_and_randn():
    u, n = torch.empty(4096), torch.empty(4096)
    run(random_kernel, (1,), u, n, SIZE=4096)
    assert 0 <= u.min() < 0.01 and 0.99 < u.max() < 1 and abs(u.mean() - 0.5) < 0.02
    assert abs(n.mean()) < 0.05 and abs(n.std() - 1) < 0.05


@triton.jit
def unsigned_kernel(x_ptr, y_ptr, f_ptr):
    offsets = tl.arange(0, 4)
    x = tl.load(x_ptr + offsets)
    tl.store(y_ptr + offsets, x // 10)
    tl.store(y_ptr + 4 + offsets, x % 1000003)
    tl.store(y_ptr + 8 + offsets, x >> 61)
    tl.store(y_ptr + 12 + offsets, tl.maximum(x, 2**63))
    tl.store(y_ptr + 16 + offsets, tl.where(x > 2**63, 1, 0))
    tl.store(y_ptr + 20 + offsets, tl.umulhi(x, x))
    tl.store(y_ptr + 24 + offsets, x.to(tl.float64).to(tl.uint64))
    tl.store(f_ptr + offsets, x)


def test_unsigned_integers_of_64_bits():
    values = [3, 2**63 + 12345, 2**64 - 1, 2**62 + 999]
    x = torch.tensor(values, dtype=torch.uint64)
    y, f = torch.zeros(7, 4, dtype=torch.uint64), torch.zeros(4)
    run(unsigned_kernel, (1,), x, y, f)
    expected = (
        [v // 10 for v in values],
        [v % 1000003 for v in values],
        [v >> 61 for v in values],
        [max(v, 2**63) for v in values],
        [int(v > 2**63) for v in values],
        [v * v >> 64 for v in values],
        [min(int(float(v)), 2**64 - 1) for v in values],
    )
    assert [row.tolist() for row in y] == list(map(list, expected))
    assert f.tolist() == torch.tensor(values, dtype=torch.float64).float().tolist()


@triton.jit
def histogram_kernel(x_ptr, y_ptr, n):
    offsets = tl.arange(0, 64)
    tl.store(y_ptr + tl.arange(0, 8), tl.histogram(tl.load(x_ptr + offsets), 8))
    tl.store(
        y_ptr + 8 + tl.arange(0, 8), tl.histogram(tl.load(x_ptr + offsets), 8, mask=offsets < n)
    )


def test_histogram():
    x, y = torch.randint(0, 8, (64,), dtype=torch.int32), torch.zeros(2, 8, dtype=torch.int32)
    run(histogram_kernel, (1,), x, y, 20)
    assert y.tolist() == [torch.bincount(v, minlength=8).tolist() for v in (x, x[:20])]
    x[3] = 8
    refused(UndefinedValue, "which got", histogram_kernel, x, y, 20)


@triton.jit
def sort_kernel(x_ptr, y_ptr, i_ptr, N: tl.constexpr, K: tl.constexpr):
    x = tl.load(x_ptr + grid2(4, N))
    tl.store(y_ptr + grid2(4, N), tl.sort(x))
    tl.store(y_ptr + 4 * N + grid2(4, K), tl.topk(x, K))
    tl.store(y_ptr + 5 * N + grid2(4, N), tl.flip(tl.cumsum(x, 1), 1))
    tl.store(i_ptr + tl.arange(0, 4), tl.argmax(x, 1))


def test_sort_topk_and_flip():
    x, y, i = torch.randn(4, 16), torch.zeros(9, 16), torch.zeros(4, dtype=torch.int32)
    run(sort_kernel, (1,), x, y, i, N=16, K=4)
    torch.testing.assert_close(y[:4], x.sort(1).values)
    torch.testing.assert_close(y[4].reshape(4, 4), x.topk(4, 1).values)
    torch.testing.assert_close(y[5:], x.cumsum(1).flip(1))
    assert i.tolist() == x.argmax(1).tolist()


@triton.jit
def atomics_kernel(p, x_ptr, ATOMIC: tl.constexpr):
    x = tl.load(x_ptr + tl.arange(0, 8))
    if ATOMIC is None:
        tl.atomic_cas(p + tl.arange(0, 8), x, x + 1)
    else:
        ATOMIC(p + tl.arange(0, 8) % 2, x)


_REDUCE = {
    **{"add": operator.add, "max": max, "min": min},
    **{"and": operator.and_, "or": operator.or_, "xor": operator.xor},
}


@pytest.mark.parametrize(
    "kind, dtype",
    [
        *((kind, d) for kind in _REDUCE for d in (torch.int32, torch.int64, torch.uint32)),
        *((kind, torch.uint64) for kind in ("max", "min")),
        *(("add", d) for d in (torch.float16, torch.bfloat16, torch.float32, torch.float64)),
        *((kind, torch.float32) for kind in ("max", "min")),
    ],
)
def test_atomics(kind, dtype):
    x = torch.tensor([9, 2, 12, 5, 7, 6, 14, 3]).to(dtype)
    p = torch.tensor([5, 8]).to(dtype)
    if dtype == torch.uint64:
        large = [[v + 2**63 * (v > 8) for v in t.tolist()] for t in (x, p)]
        x, p = (torch.tensor(values, dtype=dtype) for values in large)
    expected = [reduce(_REDUCE[kind], [p.tolist()[i], *x.tolist()[i::2]]) for i in range(2)]
    run(atomics_kernel, (1,), p, x, ATOMIC=getattr(tl, f"atomic_{kind}"))
    assert p.tolist() == expected


@pytest.mark.parametrize("dtype", (torch.int16, torch.int32, torch.int64, torch.uint64))
def test_compare_and_swap(dtype):
    p, x = torch.arange(8).to(dtype), (torch.arange(8) // 2 * 2).to(dtype)
    run(atomics_kernel, (1,), p, x, ATOMIC=None)
    assert p.tolist() == [1, 1, 3, 3, 5, 5, 7, 7]


@pytest.mark.parametrize(
    "kind, dtype", (("max", torch.bfloat16), ("add", torch.int16), ("or", torch.float32))
)
def test_atomics_that_the_device_has_not(kind, dtype):
    arguments, atomic = (torch.zeros(n).to(dtype) for n in (2, 8)), getattr(tl, f"atomic_{kind}")
    refused(InvalidKernel, f"tl.atomic_{kind} has no", atomics_kernel, *arguments, ATOMIC=atomic)


@triton.jit
def eight_bits_kernel(x_ptr, y_ptr):
    offsets = tl.arange(0, 16)
    tl.store(y_ptr + offsets, tl.load(x_ptr + offsets).to(tl.float32) * 2)


def test_arguments_under_another_type():
    x, y = torch.randn(16).to(torch.float8_e5m2), torch.zeros(16)
    run(eight_bits_kernel, (1,), triton.reinterpret(x.view(torch.int8), tl.float8e5), y)
    torch.testing.assert_close(y, x.float() * 2)


class Window:
    """Stand-in for a tensor as FlagGems passes it: an object with a `data_ptr()` and a dtype."""

    def __init__(self, base: torch.Tensor, first: int):
        self.base, self.first, self.dtype = base, first, base.dtype

    def data_ptr(self) -> int:
        return self.base.data_ptr() + self.first * self.base.itemsize


@triton.jit
def chosen_kernel(x_ptr, y_ptr, out_ptr, n, KIND: tl.constexpr):
    offsets = tl.arange(0, 4)
    tl.store(out_ptr + offsets, tl.load(tl.where(n > 3, x_ptr, y_ptr) + offsets))
    if KIND == "other":
        raise ValueError("no such kind")


def test_pointers_that_are_no_tensors_and_choices_between_them():
    x, out = torch.arange(8.0), torch.zeros(4)
    run(chosen_kernel, (1,), Window(x, 3), torch.zeros(4), out, 5, KIND="")
    assert out.tolist() == [3, 4, 5, 6]
    run(chosen_kernel, (1,), Window(x, 3), torch.ones(4), out, 2, KIND="")
    assert out.tolist() == [1, 1, 1, 1]
    refused(OutOfBounds, "x_ptr", chosen_kernel, Window(x, 6), torch.zeros(4), out, 5, KIND="")
    with pytest.raises(InvalidKernel, match="must not raise, got raise ValueError"):
        run(chosen_kernel, (1,), Window(x, 3), torch.ones(4), out, 2, KIND="other")


@triton.jit
def rows_kernel(x_ptr, y_ptr, step):
    offsets = tl.arange(0, 4)
    dtype = x_ptr.dtype.element_ty
    if dtype is tl.float32:
        inside = (offsets < 3).logical_and(offsets > 0).logical_or(offsets == 3)
        tl.store(y_ptr + offsets, tl.load(x_ptr + offsets * step, mask=inside, other=9.0))


def test_an_expanded_tensor_may_be_read_with_strides_of_the_kernel():
    x, y = torch.arange(8.0).reshape(4, 2), torch.zeros(4)
    run(rows_kernel, (1,), x[:1].expand(4, 2), y, 2)
    assert y.tolist() == [9, 2, 4, 6]
    refused(OutOfBounds, "x_ptr", rows_kernel, x[:1].expand(4, 2), y, 3)
    refused(OutOfBounds, "x_ptr", rows_kernel, x[:1], y, 2)


@triton.jit
def flag_kernel(x_ptr, flag_ptr, y_ptr, SEM: tl.constexpr):
    if tl.program_id(0) == 0:
        reached = tl.atomic_poll(flag_ptr, 1, sem=SEM)
        tl.store(y_ptr, tl.load(x_ptr) + reached.to(tl.int32))
    else:
        tl.store(x_ptr, 5)
        tl.atomic_store(flag_ptr, 1)


@triton.jit
def timeout_kernel(flag_ptr, y_ptr):
    tl.store(y_ptr, tl.atomic_poll(flag_ptr, 1, timeout_ns=5000).to(tl.int32) + 3)


def test_a_poll_waits_for_an_atomic_store():
    x, flag, y = (torch.zeros(1, dtype=torch.int32) for _ in range(3))
    run(flag_kernel, (2,), x, flag, y, SEM="acquire", resident=2)
    assert y.item() == 6
    with pytest.raises(Race, match="x_ptr"):
        run(flag_kernel, (2,), x.zero_(), flag.zero_(), y, SEM="relaxed", resident=2)
    run(timeout_kernel, (1,), flag.zero_(), y)
    assert y.item() == 3


@triton.jit
def counts_kernel(x, y, n, ALL: tl.constexpr, BLOCK: tl.constexpr, BINS: tl.constexpr):
    i, bins = tl.arange(0, BLOCK), tl.arange(0, BINS)
    counts = tl.histogram(tl.load(x + i, mask=i < n, other=-1), BINS)
    tl.store(y + bins, counts, mask=(bins < BINS - 1) | ALL)


def test_values_without_a_bin_make_one_bin_undefined():
    """The last one for -1, with which programs pad; they need not store it."""
    x, y = torch.tensor([0, 1, 1, 2], dtype=torch.int32), torch.zeros(8, dtype=torch.int32)
    run(counts_kernel, (1,), x, y, 4, ALL=False, BLOCK=8, BINS=8)
    assert y.tolist() == [1, 2, 1, 0, 0, 0, 0, 0]
    match = r"y gets a value .* tl.histogram .* got -1 and has bins \[0, 8\); give it a `mask`"
    keywords = {"ALL": True, "BLOCK": 8, "BINS": 8}
    refused(UndefinedValue, match, counts_kernel, x, y, 4, line="tl.store", **keywords)
    run(counts_kernel, (1,), x, y, 4, masked="zero", **keywords)
    assert y.tolist() == [1, 2, 1, 0, 0, 0, 0, 0]  # as on NVIDIA GPUs: -1 is in bin 31
    y = torch.zeros(64, dtype=torch.int32)
    run(counts_kernel, (1,), x, y, 4, ALL=True, BLOCK=8, BINS=64, masked="zero")
    assert y[:3].tolist() == [1, 2, 1] and y[63] == 4
