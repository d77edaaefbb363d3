"""Values of `@triton.aggregate`: members, constants among them, methods, and names in findings."""

import pytest
import torch
import triton
import triton.language as tl

from emulator.tests.checking import box, refused, tlx
from tritonemu import InvalidKernel, Race, Unsupported, run


@triton.aggregate
class Ring:
    buffer: tlx.buffered_tensor
    full: tlx.mbarrier
    empty: tlx.mbarrier

    @triton.jit
    def await_full(self, count, NUM: tl.constexpr):
        tlx.barrier_wait(self.full[count % NUM], count // NUM & 1)


@triton.aggregate
class Options:
    ROWS: tl.constexpr
    RELU: tl.constexpr
    LIMIT: tl.constexpr


@triton.aggregate
class Place:
    ptr: tl.tensor
    row: tl.tensor


@triton.aggregate
class Work:
    x: Ring
    desc: tl.tensor_descriptor
    place: Place
    options: Options


@triton.jit
def below(place, rows):
    return Place(place.ptr, place.row + rows)


@triton.jit
def load(work, blocks):
    ROWS: tl.constexpr = work.options.ROWS
    for block in tl.range(0, blocks):
        slot = block % 2
        tlx.barrier_wait(work.x.empty[slot], block // 2 & 1 ^ 1)
        tlx.barrier_expect_bytes(work.x.full[slot], ROWS * 64)
        x = work.x
        tlx.async_descriptor_load(work.desc, x.buffer[slot], [block * ROWS, 0], x.full[slot])


@triton.jit
def total(work, blocks, EARLY: tl.constexpr):
    acc = tl.zeros([work.options.ROWS], tl.float32)
    place = work.place
    for block in tl.range(0, blocks):
        work.x.await_full(block, 2)
        if EARLY:
            tlx.barrier_arrive(work.x.empty[block % 2])
        rows = tlx.local_load(work.x.buffer[block % 2])
        if work.options.RELU and work.options.LIMIT is None:
            rows = tl.maximum(rows, 0)
        acc += tl.sum(rows, 1)
        if not EARLY:
            tlx.barrier_arrive(work.x.empty[block % 2])
        place = below(place, 1)
    tl.store(place.ptr + tl.arange(0, work.options.ROWS), acc + place.row)


@triton.jit
def sums_kernel(
    desc, out_ptr, row, blocks, ROWS: tl.constexpr, RELU: tl.constexpr, EARLY: tl.constexpr,
    NAMED: tl.constexpr,
):  # fmt: skip
    if NAMED:
        x = tlx.local_alloc((ROWS, 16), tl.float32, 2)
        x_full, x_empty = tlx.alloc_barriers(2), tlx.alloc_warp_barrier(2, 4)
        x = Ring(x, x_full, x_empty)
    else:
        x = Ring(
            tlx.local_alloc((ROWS, 16), tl.float32, 2),
            empty=tlx.alloc_warp_barrier(2, 4),
            full=tlx.alloc_barriers(2),
        )
    work = Work(x, desc, Place(out_ptr, row), Options(ROWS, RELU, None))
    with tlx.async_tasks():
        with tlx.async_task("default"):
            load(work, blocks)
        with tlx.async_task(num_warps=4):
            total(work, blocks, EARLY)


def launched(early=False, named=True, **options):
    x, out = torch.randn(80, 16), torch.zeros(16)
    constants = {"ROWS": 16, "RELU": True, "EARLY": early, "NAMED": named}
    report = run(sums_kernel, (1,), box(x, 16, 16), out, 7, 5, **constants, **options)
    return x, out, report


@pytest.mark.tlx
def test_members_of_tasks_and_functions():
    x, out, report = launched()
    expected = x.relu().reshape(5, 16, 16).sum((0, 2)) + 12
    torch.testing.assert_close(out, expected)
    assert report.barriers == 4 and set(report.warps) == {"load", "total"}


@pytest.mark.tlx
@pytest.mark.parametrize(
    "named, names", [(True, ("x", "x_full", "x_empty")), (False, ("x.buffer", "x.full", "x.empty"))]
)
def test_names(named, names):
    """A value with a name of its own keeps it; one made for another value is its member."""
    _, _, report = launched(named=named, trace=True)
    targets = {event.target for event in report.timeline.events if event.target}
    assert targets == {f"{name}[{i}]" for name in names for i in (0, 1)}


@pytest.mark.tlx
def test_races_through_members():
    with pytest.raises(Race, match=r"writes x\[0\] of CTA 0, which total of CTA 0 reads"):
        launched(early=True)


@triton.jit
def constant_of_value_kernel(n):
    Options(n, True, None)


@triton.jit
def value_of_constant_kernel(n):
    Place(n, 1)


@triton.jit
def missing_member_kernel(n):
    Place(n)


@triton.jit
def unknown_member_kernel(n):
    place = Place(n, n)
    tl.store(place.column, 0)


@pytest.mark.parametrize(
    "kernel, message",
    [
        (constant_of_value_kernel, "Options.ROWS is a constexpr"),
        (value_of_constant_kernel, "Place.row is a tl.tensor, got 1"),
        (missing_member_kernel, "missing a required argument: 'row'"),
        (unknown_member_kernel, "column"),
    ],
)
def test_misuse(kernel, message):
    refused(InvalidKernel, message, kernel, 5)


@triton.aggregate
class Doubled:
    first: tl.constexpr
    second: tl.constexpr

    def __init__(self, first):
        self.first = first
        self.second = first


@triton.aggregate
class Builtin:
    first: tl.constexpr

    def __init__(self, first, _semantic=None):
        self.first = first


@triton.jit
def doubled_kernel(out_ptr, N: tl.constexpr):
    both = Doubled(N)
    tl.store(out_ptr + tl.arange(0, both.first), both.second)


@triton.jit
def builtin_kernel():
    Builtin(1)


def test_constructors():
    out = torch.zeros(4, dtype=torch.int32)
    run(doubled_kernel, (1,), out, N=4)
    assert out.tolist() == [4] * 4
    refused(Unsupported, "Builtin.__init__", builtin_kernel)
