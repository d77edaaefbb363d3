"""Semantics that Triton leaves open: scopes of atomics, orders of reductions, lanes with one value,
descriptors in global memory."""

import pytest
import torch
import triton
import triton.language as tl

from emulator.tests.checking import box, refused, tlx
from tritonemu import InvalidKernel, Race, UndefinedValue, run

# Scopes.


@triton.jit
def handed_kernel(x, flag, y, RELEASE: tl.constexpr, ACQUIRE: tl.constexpr):
    if tl.program_id(0) == 0:
        tl.store(x, 1)
        tl.atomic_xchg(flag, 1, sem="release", scope=RELEASE)
    else:
        while tl.atomic_cas(flag, 1, 1, sem="acquire", scope=ACQUIRE) == 0:
            pass
        tl.store(y, tl.load(x))


@pytest.mark.parametrize(
    "release, acquire", (("gpu", "sys"), (None, "gpu"), ("cta", "gpu"), ("gpu", "cta"))
)
def test_scopes(release, acquire):
    x, flag, y = (torch.zeros(1, dtype=torch.int32) for _ in range(3))
    if "cta" in (release, acquire):
        refused(
            Race,
            "an element of (flag|x) that program",
            handed_kernel,
            x,
            flag,
            y,
            release,
            acquire,
            grid=(2,),
        )
    else:
        run(handed_kernel, (2,), x, flag, y, release, acquire)
        assert y.item() == 1


@triton.jit
def count_kernel(x, n, SCOPE: tl.constexpr):
    i = tl.arange(0, 8) + tl.program_id(0) * n
    tl.atomic_add(x + i, 1, scope=SCOPE)
    tl.atomic_add(x + i, 1, scope=SCOPE)


def test_atomics_of_a_program_of_its_own():
    x = torch.zeros(16, dtype=torch.int32)
    run(count_kernel, (2,), x, 8, "cta")
    assert x.eq(2).all()
    error = refused(Race, "element of x that program", count_kernel, x, 4, "cta", grid=(2,))
    assert error.programs == ((0, 0, 0), (1, 0, 0))
    refused(InvalidKernel, "scope of an atomic must be", count_kernel, x, 4, "block", grid=(1,))


# Orders.


@triton.jit
def minus(a, b):
    return a - b


@triton.jit
def plus(a, b):
    return a + b


@triton.jit
def last(a, b):
    return b


@triton.jit
def affine(a1, b1, a2, b2):
    return a1 * a2, b1 * a2 + b2


@triton.jit
def welford(mean1, m21, n1, mean2, m22, n2):
    delta, n = mean2 - mean1, n1 + n2
    return mean1 + delta * n2 / n, m21 + m22 + delta * delta * n1 * n2 / n, n


@triton.jit
def reduce_kernel(x, y, KIND: tl.constexpr, B: tl.constexpr):
    i = tl.arange(0, B)
    value = tl.load(x + i)
    if KIND == "minus":
        tl.store(y, tl.reduce(value, 0, minus))
    elif KIND == "plus":
        tl.store(y, tl.reduce(value, 0, plus))
    elif KIND == "last":
        tl.store(y, tl.reduce(value, 0, last))
    elif KIND == "welford":
        mean, m2, n = tl.reduce((value, value * 0, value * 0 + 1), 0, welford)
        tl.store(y, m2 / n)
    elif KIND == "scan minus":
        tl.store(y + i, tl.associative_scan(value, 0, minus))
    elif KIND == "scan last":
        tl.store(y + i, tl.associative_scan(value, 0, last))
    elif KIND == "scan affine":
        _, values = tl.associative_scan((value, value), 0, affine)
        tl.store(y + i, values)
    else:
        tl.store(y, tl.max(value) + tl.sum(value) + tl.argmin(value, 0))


@pytest.mark.parametrize("dtype", (torch.float32, torch.float16, torch.int32))
@pytest.mark.parametrize("kind", ("minus", "last", "scan minus"))
def test_operators_that_depend_on_the_order(kind, dtype):
    x, y = (1 + torch.arange(64) % 5).to(dtype), torch.zeros(64, dtype=dtype)
    refused(UndefinedValue, "must be associative", reduce_kernel, x, y, kind, 64)


@pytest.mark.parametrize("offset", (0.0, 100.0))
@pytest.mark.parametrize("kind", ("plus", "welford", "scan last", "scan affine", "triton's"))
def test_operators_that_do_not(kind, offset):
    x = torch.randn(256, generator=torch.Generator().manual_seed(0)) + offset * (
        kind != "scan affine"
    )
    run(reduce_kernel, (1,), x, torch.zeros(256), kind, 256)


def test_lanes_whose_order_does_not_matter():
    run(reduce_kernel, (1,), torch.zeros(64), torch.zeros(64), "minus", 64)


# Lanes.


@triton.jit
def histogram_kernel(x, bins, B: tl.constexpr):
    i = tl.load(x + tl.arange(0, B))
    tl.store(bins + i, tl.load(bins + i) + 1)


def test_lanes_that_count_once():
    x, bins = torch.arange(64, dtype=torch.int32) % 8, torch.zeros(64, dtype=torch.int32)
    (note,) = run(histogram_kernel, (1,), x, bins, 64).notes
    assert "give element 0 of bins, which the program has loaded, one and the same new" in note
    refused(Race, "takes an atomic", histogram_kernel, x, bins, 64, strict=True)
    assert not run(histogram_kernel, (1,), torch.arange(64), bins, 64).notes


# Descriptors in global memory.


@triton.jit
def maps_kernel(x, y_desc, SLOTS: tl.constexpr, WAIT: tl.constexpr):
    slots = tlx.allocate_tensor_descriptor(num=SLOTS)
    tiles, full = tlx.local_alloc((8, 16), tl.float32, 2), tlx.alloc_barriers(2)
    for i in tl.static_range(2):
        desc = tlx.make_tensor_descriptor(
            desc_ptr=slots[i % SLOTS], base=x + i * 128, shape=[8, 16],
            strides=[16, tl.constexpr(1)], block_shape=[8, 16],
        )  # fmt: skip
        tlx.barrier_expect_bytes(full[i], 512)
        tlx.async_descriptor_load(desc, tiles[i], [0, 0], full[i])
        if WAIT:
            tlx.barrier_wait(full[i], 0)
    tlx.barrier_wait(full[0], 0)
    tlx.barrier_wait(full[1], 0)
    y_desc.store([0, 0], tlx.local_load(tiles[1]))


@pytest.mark.tlx
@pytest.mark.parametrize("slots, wait", ((2, False), (1, True), (1, False)))
def test_a_descriptor_is_made_where_one_is_in_use(slots, wait):
    x, y = torch.randn(16, 16), torch.zeros(8, 16)
    if slots == 2 or wait:
        run(maps_kernel, (1,), x, box(y, 8, 16), slots, wait)
        assert torch.equal(y, x[8:])
    else:
        error = refused(
            Race, "may still read the one before", maps_kernel, x, box(y, 8, 16), slots, wait
        )
        assert error.line_in(__file__) and error.other[1] > error.line
