"""The operations of TLX, one by one: tensor cores, copies, clusters, tasks, launch control."""

import json
import re
import textwrap

import pytest
import torch
import triton
import triton.language as tl
import triton.language.extra.tlx as tlx
from triton.tools.tensor_descriptor import TensorDescriptor

from _lib.compile_check import build
from tests.emulator.checking import PAIR, everywhere, fill, found, grid2, place
from tritonemu import (
    Deadlock,
    DescriptorError,
    InvalidKernel,
    OutOfBounds,
    Race,
    UninitializedRead,
    Unsupported,
    enabled,
    run,
)
from tritonemu.__main__ import main


def normal(*shape, dtype=torch.float16, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def box(tensor, *shape):
    return TensorDescriptor.from_tensor(tensor, list(shape))


# wgmma.


@triton.jit
def wgmma_kernel(
    a_ptr, b_ptr, c_ptr, out_ptr,
    TRANS_A: tl.constexpr, TRANS_B: tl.constexpr, REGISTERS: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    if TRANS_B:
        b = tlx.local_alloc((64, 32), tlx.dtype_of(b_ptr), 1)
        fill(b[0], b_ptr, 64, 32)
        right = tlx.local_trans(b[0])
    else:
        b = tlx.local_alloc((32, 64), tlx.dtype_of(b_ptr), 1)
        fill(b[0], b_ptr, 32, 64)
        right = b[0]
    if REGISTERS:
        left = tl.load(a_ptr + grid2(64, 32))
    elif TRANS_A:
        a = tlx.local_alloc((32, 64), tlx.dtype_of(a_ptr), 1)
        fill(a[0], a_ptr, 32, 64)
        left = tlx.local_trans(a[0])
    else:
        a = tlx.local_alloc((64, 32), tlx.dtype_of(a_ptr), 1)
        fill(a[0], a_ptr, 64, 32)
        left = a[0]
    if ACC:
        acc = tlx.async_dot(left, right, tl.load(c_ptr + grid2(64, 64)))
    else:
        acc = tlx.async_dot(left, right)
    acc = tlx.async_dot_wait(0, acc)
    tl.static_assert(acc.dtype == tl.float32)
    tl.store(out_ptr + grid2(64, 64), acc)


@pytest.mark.parametrize("dtype", (torch.float16, torch.bfloat16), ids=str)
@pytest.mark.parametrize("acc", (False, True))
@pytest.mark.parametrize("trans_b", (False, True))
@pytest.mark.parametrize("left", ("shared", "transposed", "registers"))
def test_wgmma(left, trans_b, acc, dtype):
    a, b, c = (
        normal(64, 32, dtype=dtype),
        normal(32, 64, dtype=dtype, seed=1),
        normal(64, 64).float(),
    )
    out = torch.full((64, 64), torch.nan)
    report = run(
        wgmma_kernel, (1,),
        a.T.contiguous() if left == "transposed" else a, b.T.contiguous() if trans_b else b, c, out,
        TRANS_A=left == "transposed", TRANS_B=trans_b, REGISTERS=left == "registers", ACC=acc,
    )  # fmt: skip
    exact = a.double() @ b.double() + (c if acc else 0)
    torch.testing.assert_close(out.double(), exact, rtol=1e-5, atol=1e-5)
    assert report.dots == 1


def test_wgmma_of_fp32_is_tf32():
    a, b = torch.full((64, 32), 1 + 2**-12), torch.ones(32, 64)
    c, out = torch.zeros(64, 64), torch.zeros(64, 64)
    run(
        wgmma_kernel, (1,), a, b, c, out,
        TRANS_A=False, TRANS_B=False, REGISTERS=False, ACC=False,
    )  # fmt: skip
    assert out.eq(32).all()


@triton.jit
def pending_kernel(a_ptr, b_ptr, out_ptr, PENDINGS: tl.constexpr, USE: tl.constexpr):
    a = tlx.local_alloc((64, 32), tl.float16, 1)
    b = tlx.local_alloc((32, 32), tl.float16, 1)
    fill(a[0], a_ptr, 64, 32)
    fill(b[0], b_ptr, 32, 32)
    older = tlx.async_dot(a[0], b[0])  # older
    newer = tlx.async_dot(a[0], b[0])  # newer
    if PENDINGS >= 0:
        older = tlx.async_dot_wait(PENDINGS, older)
        newer = tlx.async_dot_wait(PENDINGS, newer)
    if USE == "older":
        out = older * 2.0  # use older
    elif USE == "operand":
        out = tlx.async_dot_wait(0, tlx.async_dot(newer.to(tl.float16), b[0]))  # use operand
    else:
        out = newer * 2.0  # use newer
    tlx.async_dot_wait(0, newer)
    tl.store(out_ptr + grid2(64, 32), out)


@pytest.mark.parametrize(
    "pendings, use, right",
    (
        *((0, "older", True), (0, "newer", True), (0, "operand", True), (1, "older", True)),
        *((1, "newer", False), (1, "operand", False), (2, "older", False), (-1, "newer", False)),
    ),
)
def test_the_result_of_a_wgmma_is_awaited(pendings, use, right):
    a, b, out = normal(64, 32), normal(32, 32, seed=1), torch.zeros(64, 32)
    if right:
        run(pending_kernel, (1,), a, b, out, PENDINGS=pendings, USE=use)
        product = a.double() @ b.double()
        expected = 2 * product if use != "operand" else product.half().double() @ b.double()
        torch.testing.assert_close(out.double(), expected, rtol=2e-3, atol=2e-2)
        return
    for error in found(
        InvalidKernel, pending_kernel, (1,), lambda: (a, b, out), PENDINGS=pendings, USE=use
    ):
        assert (error.file, error.line) == place(pending_kernel, f"# use {use}")
        issued = place(pending_kernel, "# older" if use == "older" else "# newer")
        assert f"{issued[0]}:{issued[1]} is used before async_dot_wait" in str(error)


@triton.jit
def shapes_kernel(
    M: tl.constexpr, K: tl.constexpr, K2: tl.constexpr, N: tl.constexpr,
    A: tl.constexpr, B: tl.constexpr,
):  # fmt: skip
    a = tlx.local_alloc((M, K), A, 1)
    b = tlx.local_alloc((K2, N), B, 1)
    tlx.local_store(a[0], tl.zeros((M, K), A))
    tlx.local_store(b[0], tl.zeros((K2, N), B))
    tlx.async_dot_wait(0, tlx.async_dot(a[0], b[0]))


def test_shapes_of_wgmma():
    fine = {"M": 64, "K": 16, "K2": 16, "N": 32, "A": tl.float16, "B": tl.float16}
    run(shapes_kernel, (1,), **fine)
    for wrong in ({"M": 32}, {"K": 8, "K2": 8}, {"K": 32}, {"N": 16}):
        with pytest.raises(InvalidKernel, match="async_dot needs"):
            run(shapes_kernel, (1,), **{**fine, **wrong})
    with pytest.raises(InvalidKernel, match="one dtype, got fp16 and bf16"):
        run(shapes_kernel, (1,), **{**fine, "B": tl.bfloat16})
    with pytest.raises(Unsupported, match="async_dot of int32"):
        run(shapes_kernel, (1,), **{**fine, "A": tl.int32, "B": tl.int32})


# tcgen05.


@triton.jit
def tcgen05_kernel(a_ptr, b_ptr, out_ptr, flags, HOW: tl.constexpr, USE: tl.constexpr):
    a = tlx.local_alloc((128, 32), tl.bfloat16, 1)
    b = tlx.local_alloc((32, 64), tl.bfloat16, 1)
    left = tlx.local_alloc((128, 32), tl.bfloat16, 1, tlx.storage_kind.tmem)
    acc = tlx.local_alloc((128, 64), tl.float32, 1, tlx.storage_kind.tmem)
    done = tlx.alloc_barriers(2)
    fill(a[0], a_ptr, 128, 32)
    fill(b[0], b_ptr, 32, 64)
    if USE != "fresh":
        tlx.local_store(acc[0], tl.full((128, 64), 3.0, tl.float32))
    if HOW == "barriers":
        tlx.async_dot(a[0], b[0], acc[0], use_acc=flags != 0, mBarriers=[done[0], done[1]])
        tlx.barrier_wait(done[0], 0)
        tlx.barrier_wait(done[1], 0)
    elif HOW == "commit":
        tlx.async_dot(a[0], b[0], acc[0], use_acc=flags != 0, force_async=True)
        tlx.tcgen05_commit(done[1])
        tlx.barrier_wait(done[1], 0)
    elif HOW == "synchronous":
        tlx.async_dot(a[0], b[0], acc[0], use_acc=flags != 0)
    elif HOW == "empty list":
        tlx.async_dot(a[0], b[0], acc[0], use_acc=flags != 0, mBarriers=[])
    elif HOW == "nothing":
        tlx.async_dot(a[0], b[0], acc[0], use_acc=flags != 0, force_async=True)
    elif HOW == "tensor":
        tlx.local_store(left[0], tl.load(a_ptr + grid2(128, 32)))
        tlx.async_dot(left[0], b[0], acc[0], use_acc=flags != 0)
    else:
        tlx.async_dot(a[0], b[0], acc[0], pred=flags > 5)
    tl.store(out_ptr + grid2(128, 64), tlx.local_load(acc[0]))


def tcgen05_arguments(flags):
    a, b = normal(128, 32, dtype=torch.bfloat16), normal(32, 64, dtype=torch.bfloat16, seed=1)
    return lambda: (a, b, torch.full((128, 64), torch.nan), flags)


@pytest.mark.parametrize("how", ("barriers", "commit", "synchronous", "empty list", "tensor"))
@pytest.mark.parametrize("flags, use", ((0, "fresh"), (0, "old"), (2, "old")))
def test_tcgen05(how, flags, use):
    def check(a, b, out, flags):
        exact = a.double() @ b.double() + (3 if flags else 0)
        torch.testing.assert_close(out.double(), exact, rtol=1e-5, atol=1e-5)

    everywhere(
        tcgen05_kernel, (1,), tcgen05_arguments(flags), check, HOW=how, USE=use, arch="sm_100"
    )


def test_an_accumulator_is_only_read_if_it_is_used():
    for error in found(
        UninitializedRead, tcgen05_kernel, (1,), tcgen05_arguments(2),
        HOW="synchronous", USE="fresh", arch="sm_100",
    ):  # fmt: skip
        assert error.buffer == "acc[0]"


def test_an_asynchronous_product_that_nobody_awaits():
    for error in found(
        Race, tcgen05_kernel, (1,), tcgen05_arguments(2), HOW="nothing", USE="old", arch="sm_100"
    ):
        assert error.buffer == "acc[0]" and error.role == "default of CTA 0"
        assert (error.file, error.line) == place(tcgen05_kernel, "local_load(acc[0])")


def test_a_predicated_product():
    def check(a, b, out, flags):
        torch.testing.assert_close(out, a.float() @ b.float() * (flags > 5) + 3)

    for flags in (2, 6):
        everywhere(
            tcgen05_kernel, (1,), tcgen05_arguments(flags), check,
            HOW="predicate", USE="old", arch="sm_100",
        )  # fmt: skip


@triton.jit
def bad_tcgen05_kernel(HOW: tl.constexpr):
    a = tlx.local_alloc((128, 32), tl.float16, 1)
    b = tlx.local_alloc((32, 64), tl.float16, 1)
    b_tensor = tlx.local_alloc((128, 64), tl.float16, 1, tlx.storage_kind.tmem)
    acc = tlx.local_alloc((128, 64), tl.float32, 1, tlx.storage_kind.tmem)
    wide = tlx.local_alloc((128, 128), tl.float32, 1, tlx.storage_kind.tmem)
    tlx.local_store(a[0], tl.zeros((128, 32), tl.float16))
    tlx.local_store(b[0], tl.zeros((32, 64), tl.float16))
    if HOW == "registers":
        tlx.async_dot(tl.zeros((128, 32), tl.float16), b[0], acc[0], use_acc=False)
    elif HOW == "acc":
        tlx.async_dot(a[0], b[0], tl.zeros((128, 64), tl.float32))
    elif HOW == "wide":
        tlx.async_dot(a[0], b[0], wide[0], use_acc=False)
    elif HOW == "b":
        tlx.async_dot(a[0], b_tensor[0], acc[0], use_acc=False)
    else:
        tlx.async_dot(a[0], b[0], acc[0], use_acc=False)


def test_operands_of_tcgen05():
    run(bad_tcgen05_kernel, (1,), HOW="none", arch="sm_100")
    for how, message in (
        ("registers", "A in memory and acc in tensor memory"),
        ("acc", "A in memory and acc in tensor memory"),
        ("wide", r"acc of async_dot must be \[128, 64\], got \[128, 128\]"),
        ("b", "must be in shared memory"),
    ):
        with pytest.raises(InvalidKernel, match=message):
            run(bad_tcgen05_kernel, (1,), HOW=how, arch="sm_100")


@triton.jit
def commit_kernel(COMMITS: tl.constexpr):
    done = tlx.alloc_barriers(1, arrive_count=2)
    for _ in tl.static_range(COMMITS):
        tlx.tcgen05_commit(done)
    tlx.barrier_wait(done, 0)


def test_a_commit_of_nothing_arrives():
    everywhere(commit_kernel, (1,), COMMITS=2, arch="sm_100")
    for error in found(Deadlock, commit_kernel, (1,), COMMITS=1, arch="sm_100"):
        assert [wait.arrivals for wait in error.waits] == [1]


@triton.jit
def pair_kernel(a_desc, b_desc, out_ptr, COMMIT: tl.constexpr, FAULT: tl.constexpr):
    a = tlx.local_alloc((128, 32), tl.float16, 1)
    b = tlx.local_alloc((32, 32), tl.float16, 1)
    acc = tlx.local_alloc((128, 64), tl.float32, 1, tlx.storage_kind.tmem)
    full, done = tlx.alloc_barriers(1), tlx.alloc_barriers(1)
    both = tlx.alloc_barriers(1, arrive_count=2)
    rank = tlx.cluster_cta_rank()
    tlx.barrier_expect_bytes(full, 2 * (128 * 32 + 32 * 32))
    tlx.async_descriptor_load(a_desc, a[0], [rank * 128, 0], full)
    tlx.async_descriptor_load(b_desc, b[0], [0, rank * 32], full)
    tlx.barrier_wait(full, 0)
    tlx.barrier_arrive(both, 1, remote_cta_rank=0)
    if FAULT == "none":
        tlx.barrier_wait(both, 0, pred=rank == 0)
    if COMMIT:
        tlx.async_dot(a[0], b[0], acc[0], use_acc=False, two_ctas=True, force_async=True)
        tlx.async_dot(a[0], b[0], acc[0], two_ctas=True, force_async=True)
        tlx.tcgen05_commit(done, two_ctas=True)
    else:
        tlx.async_dot(a[0], b[0], acc[0], use_acc=False, two_ctas=True, mBarriers=[done])
    tlx.barrier_wait(done, 0)
    x = tlx.local_load(acc[0])
    tl.store(out_ptr + rank * 128 * 64 + grid2(128, 64), x)


def pair_arguments():
    a, b = normal(256, 32), normal(32, 64, seed=1)
    return box(a, 128, 32), box(b, 32, 32), torch.full((256, 64), torch.nan)


@pytest.mark.parametrize("commit", (False, True))
def test_a_product_of_two_ctas(commit):
    def check(a, b, out):
        exact = a.base.double() @ b.base.double() * (1 + commit)
        torch.testing.assert_close(out.double(), exact, rtol=1e-5, atol=1e-5)

    everywhere(
        pair_kernel, (2,), pair_arguments, check, COMMIT=commit, FAULT="none", arch="sm_100", **PAIR
    )
    report = run(
        pair_kernel, (2,), *pair_arguments(), COMMIT=commit, FAULT="none", arch="sm_100", **PAIR
    )
    assert report.dots == 1 + commit


def test_the_odd_cta_must_be_ready():
    for error in found(
        (Race, UninitializedRead), pair_kernel, (2,), pair_arguments,
        COMMIT=False, FAULT="no wait", arch="sm_100", **PAIR,
    ):  # fmt: skip
        assert error.buffer in ("a[0]", "b[0]")
        assert "of CTA 1" in str(error)


@triton.jit
def pair64_kernel(a_desc, b_desc, out_ptr, lanes_ptr):
    a = tlx.local_alloc((64, 32), tl.float16, 1)
    b = tlx.local_alloc((32, 64), tl.float16, 1)
    spec = tlx.storage_alias_spec(storage=tlx.storage_kind.tmem)
    acc = tlx.local_alloc((64, 128), tl.float32, 1, tlx.storage_kind.tmem, reuse=spec)
    lanes = tlx.local_alloc((128, 64), tl.float32, 1, tlx.storage_kind.tmem, reuse=spec)
    full, done = tlx.alloc_barriers(1), tlx.alloc_barriers(1)
    rank = tlx.cluster_cta_rank()
    # The loads of both CTAs are counted in the leader.
    if rank == 0:
        tlx.barrier_expect_bytes(full, 2 * 2 * (64 * 32 + 32 * 64))
    tlx.async_descriptor_load(a_desc, a[0], [rank * 64, 0], full, two_ctas=tl.constexpr(True))
    tlx.async_descriptor_load(b_desc, b[0], [0, rank * 64], full, two_ctas=tl.constexpr(True))
    if rank == 0:
        tlx.barrier_wait(full, 0)
        tlx.async_dot(a[0], b[0], acc[0], use_acc=False, two_ctas=True, mBarriers=[done])
    tlx.barrier_wait(done, 0)
    tl.store(out_ptr + rank * 64 * 128 + grid2(64, 128), tlx.local_load(acc[0]))
    tl.store(lanes_ptr + rank * 128 * 64 + grid2(128, 64), tlx.local_load(lanes[0]))


def test_64_rows_of_two_ctas_and_loads_counted_in_the_leader():
    def arguments():
        a, b = normal(128, 32), normal(32, 128, seed=1)
        out = torch.full((128, 128), torch.nan)
        return box(a, 64, 32), box(b, 32, 64), out, out.view(2, 128, 64).clone()

    def check(a, b, out, lanes):
        exact = a.base.double() @ b.base.double()
        torch.testing.assert_close(out.double(), exact, rtol=1e-5, atol=1e-5)
        for cta in range(2):
            rows = out[64 * cta : 64 * cta + 64]
            assert torch.equal(lanes[cta], torch.cat([rows[:, :64], rows[:, 64:]]))

    everywhere(pair64_kernel, (2,), arguments, check, arch="sm_100", **PAIR)


# Copies by TMA.


@triton.jit
def copy_kernel(desc, out_desc, row, column, REDUCE: tl.constexpr, LEADING: tl.constexpr):
    tile = tlx.local_alloc((8, 16), tlx.dtype_of(desc), 1)
    full = tlx.alloc_barriers(1)
    tlx.barrier_expect_bytes(full, 8 * 16 * tlx.size_of(tlx.dtype_of(desc)))
    if LEADING:
        tlx.async_descriptor_load(desc, tile[0], [1, 0, row, column], full)
    else:
        tlx.async_descriptor_load(desc, tile[0], [row, column], full)
    tlx.barrier_wait(full, 0)
    if LEADING:
        tlx.async_descriptor_store(out_desc, tile[0], [1, 0, row, column])
    else:
        tlx.async_descriptor_store(out_desc, tile[0], [row, column], store_reduce=REDUCE)
    tlx.async_descriptor_store_wait(0)


@pytest.mark.parametrize("row, column", ((0, 0), (4, 8), (-3, -5), (9, 20), (100, 0)))
@pytest.mark.parametrize("reduce", ("", "add"))
def test_boxes_are_clipped_and_all_bytes_arrive(row, column, reduce):
    x = torch.arange(10 * 24.0).view(10, 24) + 1
    out = torch.full((10, 24), 7.0)
    run(
        copy_kernel, (1,), box(x, 8, 16), box(out, 8, 16), row, column,
        REDUCE=reduce, LEADING=False,
    )  # fmt: skip
    rows, columns = torch.arange(10)[:, None] - row, torch.arange(24) - column
    inside = (rows >= 0) & (rows < 8) & (columns >= 0) & (columns < 16)
    new = x + 7 if reduce else x
    assert torch.equal(out, torch.where(inside, new, 7.0))


def test_elements_outside_read_as_zero():
    @triton.jit
    def padded_kernel(desc, out_ptr):
        tile = tlx.local_alloc((8, 16), tl.float32, 1)
        full = tlx.alloc_barriers(1)
        tlx.barrier_expect_bytes(full, 512)
        tlx.async_descriptor_load(desc, tile[0], [-2, 20], full)
        tlx.barrier_wait(full, 0)
        tl.store(out_ptr + grid2(8, 16), tlx.local_load(tile[0]))

    x, out = torch.arange(10 * 24.0).view(10, 24) + 1, torch.full((8, 16), -1.0)
    run(padded_kernel, (1,), box(x, 8, 16), out)
    expected = torch.zeros(8, 16)
    expected[2:, :4] = x[:6, 20:]
    assert torch.equal(out, expected)


def test_leading_dimensions_of_a_box():
    x = torch.randn(2, 3, 8, 16)
    out = torch.zeros_like(x)
    descs = [box(t, 1, 1, 8, 16) for t in (x, out)]
    run(copy_kernel, (1,), *descs, 0, 0, REDUCE="", LEADING=True)
    assert torch.equal(out[1, 0], x[1, 0]) and out.count_nonzero() == 128


def test_a_copy_into_a_buffer_of_another_type_or_size():
    x = torch.zeros(16, 16)
    with pytest.raises(InvalidKernel, match=r"tile\[0\] must be fp32\[16, 16\] as the descriptor"):
        run(copy_kernel, (1,), box(x, 16, 16), box(x, 8, 16), 0, 0, REDUCE="", LEADING=False)
    with pytest.raises(InvalidKernel, match="value must be fp16"):
        run(copy_kernel, (1,), box(x, 8, 16), box(x.half(), 8, 16), 0, 0, REDUCE="", LEADING=False)
    with pytest.raises(InvalidKernel, match="no reduction 'max' of fp32"):
        run(copy_kernel, (1,), box(x, 8, 16), box(x, 8, 16), 0, 0, REDUCE="max", LEADING=False)


@triton.jit
def multicast_kernel(desc, out_ptr):
    tile = tlx.local_alloc((16, 16), tl.float32, 1)
    full = tlx.alloc_barriers(1)
    rank = tlx.cluster_cta_rank()
    tlx.barrier_expect_bytes(full, 1024)
    half = tlx.local_slice(tile[0], [8 * rank, 0], [8, 16])
    other = rank ^ 1
    tlx.async_descriptor_load(desc, half, [rank * 8, 0], full, multicast_targets=[rank, other])
    tlx.barrier_wait(full, 0)
    tl.store(out_ptr + rank * 256 + grid2(16, 16), tlx.local_load(tile[0]))


def test_multicast():
    def arguments():
        return box(torch.arange(256.0).view(16, 16), 8, 16), torch.full((2, 16, 16), -1.0)

    def check(desc, out):
        assert torch.equal(out, desc.base.expand(2, 16, 16))

    everywhere(multicast_kernel, (2,), arguments, check, **PAIR)
    report = run(multicast_kernel, (2,), *arguments(), **PAIR)
    assert report.bytes_loaded == 1024


@triton.jit
def bulk_kernel(x_ptr, out_ptr, SIZE: tl.constexpr, STORE: tl.constexpr):
    row = tlx.local_alloc((32,), tl.float32, 1)
    full = tlx.alloc_barriers(1)
    tlx.local_store(row[0], tl.full((32,), -5, tl.float32))
    tlx.fence("async_shared")
    tlx.barrier_expect_bytes(full, SIZE)
    tlx.async_load(x_ptr + 8, row[0], bulk=True, bulk_size=SIZE, barrier=full)
    tlx.barrier_wait(full, 0)
    tlx.async_store(out_ptr, row[0], STORE)
    tlx.async_descriptor_store_wait(0)


def test_bulk_copies():
    x = torch.arange(64.0)
    for load, store in ((128, 128), (64, 128), (64, 32)):
        out = torch.full((32,), -1.0)
        run(bulk_kernel, (1,), x, out, SIZE=load, STORE=store)
        row = torch.cat([x[8 : 8 + load // 4], torch.full((32 - load // 4,), -5.0)])
        assert torch.equal(out[: store // 4], row[: store // 4])
        assert out[store // 4 :].eq(-1).all()
    for wrong in (24, 144):
        with pytest.raises(InvalidKernel, match="multiples of 16 bytes of the buffer"):
            run(bulk_kernel, (1,), x, torch.zeros(64), SIZE=128, STORE=wrong)
    with pytest.raises(OutOfBounds):
        run(bulk_kernel, (1,), x[:39], torch.zeros(32), SIZE=128, STORE=128)


@triton.jit
def masked_copy_kernel(x_ptr, out_ptr, n, OTHER: tl.constexpr):
    row = tlx.local_alloc((32,), tl.float32, 1)
    lanes = tl.arange(0, 32)
    tlx.local_store(row[0], tl.full((32,), -5, tl.float32))
    token = tlx.async_load(x_ptr + lanes, row[0], mask=lanes < n, other=OTHER)
    tlx.async_load_commit_group([token])
    tlx.async_load_wait_group(0)
    tl.store(out_ptr + lanes, tlx.local_load(row[0]))


@pytest.mark.parametrize("other", (None, 9.0))
def test_masked_elements_are_filled(other):
    for n in (0, 5, 32):
        x, out = torch.arange(1.0, n + 1), torch.full((32,), -1.0)
        run(masked_copy_kernel, (1,), x, out, n, OTHER=other)
        assert torch.equal(out[:n], x) and out[n:].eq(other or 0).all()


# Other CTAs of the cluster.


@triton.jit
def remote_copy_kernel(x_ptr, out_ptr, EARLY: tl.constexpr):
    source = tlx.local_alloc((8, 16), tl.float32, 1)
    target = tlx.local_alloc((16, 32), tl.float32, 1)
    full = tlx.alloc_barriers(1)
    rank = tlx.cluster_cta_rank()
    fill(source[0], x_ptr + rank * 128, 8, 16)
    tlx.fence("async_shared")
    tlx.local_store(target[0], tl.zeros((16, 32), tl.float32))
    tlx.cluster_barrier()
    window = tlx.local_slice(target[0], [8 * rank, 16], [8, 16])
    if EARLY:
        tlx.async_remote_shmem_copy(window, source[0], 1 - rank, full)
        tlx.barrier_expect_bytes(full, 512)
    else:
        tlx.barrier_expect_bytes(full, 512)
        tlx.async_remote_shmem_copy(
            dst=window, src=source[0], remote_cta_rank=1 - rank, barrier=full
        )
    tlx.barrier_wait(full, 0)
    tl.store(out_ptr + rank * 512 + grid2(16, 32), tlx.local_load(target[0]))
    tlx.cluster_barrier()


@pytest.mark.parametrize("early", (False, True))
def test_copies_to_the_peer(early):
    def arguments():
        return torch.randn(2, 8, 16), torch.full((2, 16, 32), torch.nan)

    def check(x, out):
        expected = torch.zeros(2, 16, 32)
        expected[1, :8, 16:], expected[0, 8:, 16:] = x[0], x[1]
        assert torch.equal(out, expected)

    everywhere(remote_copy_kernel, (2,), arguments, check, EARLY=early, **PAIR)


@triton.jit
def ring_kernel(out_ptr, CTAS: tl.constexpr):
    cells = tlx.local_alloc((16,), tl.int32, CTAS)
    full = tlx.alloc_barriers(1)
    rank = tlx.cluster_cta_rank()
    tl.device_assert(tlx.cluster_size_1d() == CTAS)
    value = tl.full((16,), 10, tl.int32) * (rank + 1)
    tlx.barrier_expect_bytes(full, (CTAS - 1) * 64)
    tlx.local_store(cells[rank], value)
    for i in tl.static_range(CTAS):
        if rank != i:
            tlx.async_remote_shmem_store(
                dst=cells[rank], src=value, remote_cta_rank=i, barrier=full
            )
    tlx.barrier_wait(full, 0)
    total = tl.zeros((16,), tl.int32)
    for i in tl.static_range(CTAS):
        total += tlx.local_load(cells[i])
    tl.store(out_ptr + (tl.program_id(1) * 2 + tl.program_id(0)) * 16 + tl.arange(0, 16), total)


def test_a_sum_over_a_cluster_along_y():
    def check(out):
        assert out.eq(100).all()

    everywhere(
        ring_kernel, (2, 4), lambda: (torch.zeros(8, 16, dtype=torch.int32),), check,
        CTAS=4, ctas_per_cga=(1, 4, 1),
    )  # fmt: skip


@triton.jit
def ranks_kernel(out_ptr):
    linear = tl.program_id(0) + 8 * tl.program_id(1)
    tl.store(out_ptr + linear, tlx.cluster_cta_rank())


def test_ranks_count_x_fastest():
    out = torch.full((4, 8), -1, dtype=torch.int32)
    run(ranks_kernel, (8, 4), out, ctas_per_cga=(4, 2, 1))
    assert torch.equal(out, torch.tensor([[0, 1, 2, 3] * 2, [4, 5, 6, 7] * 2] * 2).int())
    with pytest.raises(ValueError, match="must be divisible by ctas_per_cga"):
        run(ranks_kernel, (6, 4), out, ctas_per_cga=(4, 2, 1))


# Cluster launch control.


@triton.jit
def launch_control_kernel(count_ptr, own_ptr, REPLICAS: tl.constexpr):
    context = tlx.clc_create_context(num_consumers=1 + REPLICAS)
    with tlx.async_tasks():
        with tlx.async_task("default"):
            tile, produce, consume = tl.program_id(0), 1, 0
            while tile != -1:
                tlx.clc_producer(context, produce)
                produce ^= 1
                tl.atomic_add(count_ptr + tile, 1)
                tl.atomic_add(own_ptr + tl.program_id(0), 1)
                tile = tlx.clc_consumer(context, consume)
                consume ^= 1
        with tlx.async_task(num_warps=1, replicate=REPLICAS):
            tile, consume = tl.program_id(0), 0
            while tile != -1:
                tl.atomic_add(count_ptr + tile, 100)
                tile = tlx.clc_consumer(context, consume)
                consume ^= 1


@pytest.mark.parametrize("replicas", (1, 2))
@pytest.mark.parametrize("tiles", (1, 2, 7))
def test_every_tile_is_done_once(tiles, replicas):
    for schedule in ("modelled", *range(30)):
        count, own = torch.zeros(2, tiles, dtype=torch.int32)
        report = run(
            launch_control_kernel, (tiles,), count, own,
            REPLICAS=replicas, arch="sm_100", schedule=schedule,
        )  # fmt: skip
        assert count.tolist() == [1 + 100 * replicas] * tiles
        assert own.sum() == tiles and report.programs == (own > 0).sum()
    if tiles > 2:
        assert report.programs < tiles


@triton.jit
def forgotten_kernel(CONSUMERS: tl.constexpr):
    context = tlx.clc_create_context(num_consumers=CONSUMERS)
    produce, consume, tile = 1, 0, tl.program_id(0)
    while tile != -1:
        tlx.clc_producer(context, produce)
        produce ^= 1
        tile = tlx.clc_consumer(context, consume)
        consume ^= 1


def test_consumers_of_launch_control_are_counted():
    run(forgotten_kernel, (6,), CONSUMERS=1, arch="sm_100")
    for error in found(Deadlock, forgotten_kernel, (6,), CONSUMERS=2, arch="sm_100"):
        (wait,) = error.waits
        assert wait.barrier == "clc_empty of CTA 0" and wait.arrivals == 1
    with pytest.raises(InvalidKernel, match="clc_create_context needs arch sm_100, got sm_90"):
        run(forgotten_kernel, (6,), CONSUMERS=1, arch="sm_90")


# Descriptors made on the device.


@triton.jit
def slots_kernel(x_ptr, out_ptr, rows, index, KIND: tl.constexpr):
    slots = tlx.allocate_tensor_descriptor(num=2)
    tile = tlx.local_alloc((8, 16), tl.float32, 1)
    full = tlx.alloc_barriers(1)
    tlx.make_tensor_descriptor(
        desc_ptr=slots[index], base=x_ptr, shape=[rows, 16], strides=[16, 1], block_shape=[8, 16]
    )
    desc = tlx.reinterpret_tensor_descriptor(
        desc_ptr=slots[1], block_shape=[8, 16] if KIND == "same" else [4, 16], dtype=tl.float32
    )
    tlx.barrier_expect_bytes(full, 512)
    tlx.async_descriptor_load(desc, tile[0], [0, 0], full)
    tlx.barrier_wait(full, 0)
    out = tlx.make_tensor_descriptor(
        desc_ptr=None, base=out_ptr, shape=[8, 16], strides=[16, tl.constexpr(1)],
        block_shape=[8, 16],
    )  # fmt: skip
    tlx.async_descriptor_store(out, tile[0], [0, 0])
    tlx.async_descriptor_store_wait(0)


def test_descriptors_made_on_the_device():
    x, out = torch.randn(8, 16), torch.full((8, 16), -1.0)
    run(slots_kernel, (1,), x, out, 5, 1, KIND="same")
    assert torch.equal(out[:5], x[:5]) and out[5:].eq(0).all()
    with pytest.raises(InvalidKernel, match="no descriptor of box"):
        run(slots_kernel, (1,), x, out, 5, 0, KIND="same")
    with pytest.raises(InvalidKernel, match="no descriptor of box"):
        run(slots_kernel, (1,), x, out, 5, 1, KIND="smaller")
    with pytest.raises(OutOfBounds, match="2 descriptors are allocated, got index 2"):
        run(slots_kernel, (1,), x, out, 5, 2, KIND="same")
    with pytest.raises(DescriptorError):
        run(slots_kernel, (1,), x.view(-1)[1:], out, 5, 1, KIND="same")


# Tasks.


@triton.jit
def private_kernel(out_ptr, start, REPLICAS: tl.constexpr):
    tile = start
    kept = 5
    with tlx.async_tasks():
        with tlx.async_task("default"):
            tile += 1
            tl.store(out_ptr, tile)
            kept = 6
        with tlx.async_task(num_warps=1, num_regs=24, replicate=REPLICAS):
            replica: tl.constexpr = tlx.async_task_replica_id()
            tile += 10 * (replica + 1)
            kept += replica
            if replica == 0:
                tl.store(out_ptr + 1, tile)
            else:
                tl.store(out_ptr + 1 + replica, tile + kept)
    tl.store(out_ptr + 1 + REPLICAS, tile * 1000 + kept)


def test_captured_values_are_private():
    def check(out, _):
        assert out.tolist() == [8, 17, 33, 44, 7005]

    everywhere(
        private_kernel, (2,), lambda: (torch.zeros(5, dtype=torch.int32), 7), check, REPLICAS=3
    )


@triton.jit
def captured_kernel(out_ptr, HOW: tl.constexpr):
    tile = tl.arange(0, 16)
    both = (tile, 3)
    with tlx.async_tasks():
        with tlx.async_task("default"):
            tl.store(out_ptr + tile, 1)
        with tlx.async_task(num_warps=4):
            if HOW == "reads":
                tl.store(out_ptr + 16 + tile, 2)
            elif HOW == "takes a number from a tuple":
                tl.store(out_ptr + 16, both[1])
            elif HOW == "makes its own":
                tile = tl.arange(0, 16)
                tl.store(out_ptr + 16 + tile, 2)
            else:
                lanes = tl.arange(0, 16)
                tl.store(out_ptr + 16 + lanes, 2)


@pytest.mark.parametrize(
    "how, what",
    (
        ("reads", "tile, int32[16]"),
        ("takes a number from a tuple", "both[0], int32[16]"),
        ("makes its own", "tile, int32[16]"),
        ("leaves it alone", None),
    ),
)
def test_tiles_do_not_pass_into_a_task(how, what):
    """Nor does the compiler let them; the default task is part of the kernel."""

    def compiled():
        build(captured_kernel, {"out_ptr": "*i32"}, {"HOW": how}, options={"num_warps": 4})

    def emulated():
        run(captured_kernel, (1,), torch.zeros(32, dtype=torch.int32), HOW=how)

    if what is None:
        compiled(), emulated()
        return
    with pytest.raises(RuntimeError, match="should not capture RankedTensorType"):
        compiled()
    with pytest.raises(
        InvalidKernel, match=re.escape(f"got {what}: compute it in the task, under")
    ):
        emulated()


@triton.jit
def _load(bar, ptr):
    tl.store(ptr, 1)
    tlx.barrier_arrive(bar)


@triton.jit
def _math(bar, ptr):
    tlx.barrier_wait(bar, 0)
    tl.store(ptr + 1 + tlx.async_task_replica_id(), tl.load(ptr))


@triton.jit
def named_kernel(out_ptr, EXTRA: tl.constexpr):
    bar = tlx.alloc_barriers(1)
    with tlx.async_tasks():
        with tlx.async_task("default"):
            _load(bar, out_ptr)
        with tlx.async_task(num_warps=4, registers=160, replicate=2):
            _math(bar, out_ptr)
        if EXTRA:
            with tlx.async_task(num_warps=2, registers=24):
                tl.store(out_ptr + 3, 7)
        with tlx.async_task(num_warps=1, registers=24):
            pass


@pytest.mark.parametrize("extra", (False, True))
def test_roles_are_named_and_guarded(extra):
    out = torch.zeros(4, dtype=torch.int32)
    report = run(named_kernel, (1,), out, EXTRA=extra, num_warps=8)
    assert out.tolist() == [1, 1, 1, 7 if extra else 0]
    tasks = {"task0": 2, "task1": 1} if extra else {"task0": 1}
    assert report.warps == {"load": 8, "math[0]": 4, "math[1]": 4, **tasks}


@triton.jit
def default_kernel(out_ptr, HOW: tl.constexpr):
    with tlx.async_tasks():
        if HOW == "replicate":
            with tlx.async_task("default", replicate=3):
                tl.store(out_ptr + tlx.async_task_replica_id(), 1)
        elif HOW == "registers":
            with tlx.async_task("default", registers=160):
                tl.store(out_ptr, 1)
        elif HOW == "num_regs":
            with tlx.async_task("default", num_regs=160):
                tl.store(out_ptr, 1)
        elif HOW == "two":
            with tlx.async_task("default"):
                tl.store(out_ptr, 1)
            with tlx.async_task("default"):
                tl.store(out_ptr + 1, 1)
        elif HOW == "numbers":
            with tlx.async_task([0]):
                tl.store(out_ptr, 1)
        elif HOW == "no warps":
            with tlx.async_task("default"):
                tl.store(out_ptr, 1)
            with tlx.async_task(registers=24):
                tl.store(out_ptr + 1, 1)
        else:
            with tlx.async_task(num_warps=4):
                tl.store(out_ptr, 1)


def test_a_replicated_default_task():
    out = torch.zeros(4, dtype=torch.int32)
    report = run(default_kernel, (1,), out, HOW="replicate")
    assert out.tolist() == [1, 1, 1, 0]
    assert report.warps == {f"default[{i}]": 4 for i in range(3)}


@pytest.mark.parametrize(
    "how, message",
    (
        *(("registers", "default"), ("num_regs", "default"), ("two", "exactly one default")),
        *(("none", "exactly one default"), ("numbers", '"default" or num_warps=')),
        ("no warps", "needs num_warps"),
    ),
)
def test_tasks_that_triton_refuses(how, message):
    with pytest.raises(InvalidKernel, match=message):
        run(default_kernel, (1,), torch.zeros(4, dtype=torch.int32), HOW=how)


@triton.jit
def outside_kernel(out_ptr):
    tl.store(out_ptr, tlx.async_task_replica_id())


def test_a_replica_id_needs_a_task():
    with pytest.raises(InvalidKernel, match="inside an async_task"):
        run(outside_kernel, (1,), torch.zeros(1))


@triton.jit
def two_regions_kernel(out_ptr):
    bar = tlx.alloc_barriers(1)
    with tlx.async_tasks():
        with tlx.async_task("default"):
            tlx.barrier_arrive(bar)
        with tlx.async_task(num_warps=4):
            tl.store(out_ptr, 3)
    x = tl.load(out_ptr)
    with tlx.async_tasks():
        with tlx.async_task("default"):
            tlx.barrier_wait(bar, 0)
        with tlx.async_task(num_warps=4):
            tl.store(out_ptr, x + 4)


def test_one_region_after_another():
    def check(out):
        assert out.item() == 7

    everywhere(two_regions_kernel, (1,), lambda: (torch.zeros(1, dtype=torch.int32),), check)


@triton.jit
def two_names_kernel():
    full, empty = tlx.alloc_barriers(1), tlx.alloc_barriers(1)
    tlx.barrier_arrive(full)
    tlx.barrier_wait(empty, 0)


@triton.jit
def passed_on(bars, i):
    again = bars
    tlx.barrier_wait(again[i], 0)


@triton.jit
def first_name_kernel():
    k_full = tlx.alloc_barriers(2)
    passed_on(k_full, 1)


def test_names():
    for kernel, name in ((two_names_kernel, "empty"), (first_name_kernel, "k_full[1]")):
        (wait,) = found(Deadlock, kernel, (1,))[0].waits
        assert wait.barrier == f"{name} of CTA 0"


# Other operations.


@triton.jit
def ballot_kernel(x_ptr, out_ptr, SHAPE: tl.constexpr, MASK: tl.constexpr):
    if SHAPE == "column":
        lanes = tl.arange(0, 128)[:, None]
        votes = tlx.vote_ballot_sync(MASK, tl.load(x_ptr + lanes) > 0)
        tl.store(out_ptr + lanes, votes)
    elif SHAPE == "row":
        lanes = tl.arange(0, 128)
        tl.store(out_ptr + lanes, tlx.vote_ballot_sync(MASK, tl.load(x_ptr + lanes) > 0))
    else:
        tlx.vote_ballot_sync(MASK, tl.load(x_ptr + grid2(32, 4)) > 0)


@pytest.mark.parametrize("shape", ("column", "row"))
def test_ballots(shape):
    x, out = normal(128, dtype=torch.float32), torch.zeros(128, dtype=torch.int32)
    x[64:96] = 1
    run(ballot_kernel, (1,), x, out, SHAPE=shape, MASK=0xFFFFFFFF)
    for warp in range(4):
        votes = (x[32 * warp : 32 * warp + 32] > 0).tolist()
        ballot = sum(vote << lane for lane, vote in enumerate(votes))
        assert (out[32 * warp : 32 * warp + 32].long() % 2**32).eq(ballot).all()
    assert out[64] == -1
    for wrong in ({"SHAPE": shape, "MASK": 0xFFFF}, {"SHAPE": "tile", "MASK": 0xFFFFFFFF}):
        with pytest.raises(Unsupported, match="vote_ballot_sync"):
            run(ballot_kernel, (1,), x, out, **wrong)


@triton.jit
def types_kernel(desc, x_ptr, out_ptr):
    tile = tl.zeros((4,), tl.bfloat16)
    tl.static_assert(tlx.dtype_of(desc) == tl.float16)
    tl.static_assert(tlx.dtype_of(x_ptr) == tl.float32)
    tl.static_assert(tlx.dtype_of(tile) == tl.bfloat16)
    size: tl.constexpr = tlx.size_of(tl.float32) * 100 + tlx.size_of(tlx.dtype_of(desc))
    tl.store(out_ptr, size)


def test_types():
    out = torch.zeros(1, dtype=torch.int32)
    run(types_kernel, (1,), box(torch.zeros(8, 16).half(), 8, 16), torch.zeros(4), out)
    assert out.item() == 402


@triton.jit
def unknown_kernel(WHAT: tl.constexpr):
    if WHAT == "tlx.thread_id":
        tlx.thread_id(0)
    else:
        tlx.async_dot_scaled(0, 0)


@pytest.mark.parametrize("what", ("tlx.thread_id", "tlx.async_dot_scaled"))
def test_unsupported_operations_are_named(what):
    with pytest.raises(Unsupported) as caught:
        run(unknown_kernel, (1,), WHAT=what, arch="sm_100")
    error = caught.value
    assert error.args[0] == what and error.role == "default of CTA 0"
    assert (error.file, error.line) == place(unknown_kernel, f"{what}(")


@triton.jit
def blackwell_kernel(WHAT: tl.constexpr):
    if WHAT == "tcgen05_commit":
        tlx.tcgen05_commit(tlx.alloc_barriers(1))
    elif WHAT == "clc_create_context":
        tlx.clc_create_context(num_consumers=1)
    else:
        tlx.local_alloc((128, 32), tl.float32, 1, tlx.storage_kind.tmem)


@pytest.mark.parametrize("what", ("tcgen05_commit", "clc_create_context", "local_alloc"))
def test_operations_of_blackwell_are_refused_on_hopper(what):
    run(blackwell_kernel, (1,), WHAT=what, arch="sm_100")
    with pytest.raises(InvalidKernel, match=f"tlx.{what}.* needs arch sm_100, got sm_90"):
        run(blackwell_kernel, (1,), WHAT=what)


# Launches of host code.


def test_enabled_passes_its_options_on_and_ends_with_an_error():
    with pytest.raises(UninitializedRead), enabled("sm_100", schedule=3) as reports:
        left_over_kernel[(1,)](torch.zeros(4), WRITE=False)
    assert reports == [] and [type(error) for error in reports.findings] == [UninitializedRead]
    with enabled("sm_100", uninitialized="allow", trace=True) as reports:
        left_over_kernel[(1,)](torch.zeros(4), WRITE=False)
    assert reports[0].uninitialized == 1 and reports[0].arch == "sm_100"
    assert reports[0].timeline.events
    with pytest.raises(ValueError, match="arch must be one of"), enabled("sm_80"):
        pass


@triton.jit
def left_over_kernel(out_ptr, WRITE: tl.constexpr):
    cell = tlx.local_alloc((4,), tl.float32, 1)
    if WRITE:
        tlx.local_store(cell[0], tl.zeros((4,), tl.float32))
    tl.store(out_ptr + tl.arange(0, 4), tlx.local_load(cell[0]))


# The command line.

SCRIPT = """
    import torch, triton
    import triton.language as tl
    import triton.language.extra.tlx as tlx

    @triton.jit
    def kernel(x_ptr, WRITE: tl.constexpr):
        cell = tlx.local_alloc((16,), tl.float32, 1)
        full = tlx.alloc_barriers(1)
        if WRITE:
            tlx.local_store(cell[0], tl.zeros((16,), tl.float32))
        with tlx.async_tasks():
            with tlx.async_task("default"):
                if WRITE:
                    tlx.local_store(cell[0], tl.full((16,), 1, tl.float32))
                tlx.barrier_arrive(full)
            with tlx.async_task(num_warps=4):
                tlx.barrier_wait(full, 0)
                tl.store(x_ptr + tl.arange(0, 16), tlx.local_load(cell[0]))

    @triton.jit
    def masked_kernel(x_ptr):
        lanes = tl.arange(0, 16)
        tl.store(x_ptr + lanes, tl.load(x_ptr + lanes, mask=lanes < 5))

    def masked():
        masked_kernel[(1,)](torch.zeros(16))

    def right():
        kernel[(2,)](torch.zeros(16), WRITE=True)

    def unwritten():
        kernel[(1,)](torch.zeros(16), WRITE=False)

    def nothing():
        pass
"""


@pytest.fixture
def script(tmp_path):
    path = tmp_path / "emulated_script.py"
    path.write_text(textwrap.dedent(SCRIPT), encoding="utf-8")
    return path


def test_command_line_with_a_finding(script, capsys):
    assert main([f"{script}:unwritten"]) == 1
    assert capsys.readouterr().err.startswith("UninitializedRead (schedule modelled): ")
    assert main([f"{script}:unwritten", "--allow-uninitialized"]) == 0
    assert main([f"{script}:masked"]) == 1
    assert capsys.readouterr().err.startswith("UndefinedValue (schedule modelled): ")
    assert main([f"{script}:masked", "--masked", "zero"]) == 0
    assert main([f"{script}:nothing"]) == 3
    assert capsys.readouterr().err.startswith(f"{script}:nothing launched no kernel\n")


def test_command_line_writes_traces(script, tmp_path, capsys):
    trace, drawing = tmp_path / "trace.json", tmp_path / "drawing.svg"
    assert main([f"{script}:right", "--trace", str(trace), "--svg", str(drawing)]) == 0
    out = capsys.readouterr().out
    assert "warps: default 4, task0 4; shared memory 72 bytes, tensor memory 0 columns" in out
    events = json.loads(trace.read_text())
    names = {event.get("name") for event in events["traceEvents"]}
    assert {"local_load cell[0]", "wait full", "arrive full"} <= names
    assert drawing.read_text().lstrip().startswith("<svg")
