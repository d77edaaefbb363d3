"""The operations of TLX, one by one: tensor cores, copies, clusters, tasks, launch control."""

import re

import pytest
import torch
import triton
import triton.language as tl

from emulator.tests.checking import (
    B200,
    DEFAULT,
    PAIR,
    box,
    build,
    everywhere,
    fill,
    found,
    grid2,
    ints,
    matrices,
    normal,
    place,
    refused,
    stuck,
    tlx,
)
from tritonemu import (
    DescriptorError,
    InvalidKernel,
    OutOfBounds,
    Race,
    UninitializedRead,
    Unsupported,
    run,
)

pytestmark = pytest.mark.tlx

BF16 = torch.bfloat16

# wgmma.


@triton.jit
def shared(ptr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, TRANS: tl.constexpr):
    """A buffer of [ROWS, COLUMNS], which memory holds so, or TRANS: transposed."""
    if TRANS:
        stored = tlx.local_alloc((COLUMNS, ROWS), tlx.dtype_of(ptr), 1)
        fill(stored[0], ptr, COLUMNS, ROWS)
        buffer = tlx.local_trans(stored[0])
    else:
        stored = tlx.local_alloc((ROWS, COLUMNS), tlx.dtype_of(ptr), 1)
        fill(stored[0], ptr, ROWS, COLUMNS)
        buffer = stored[0]
    return buffer


@triton.jit
def wgmma_kernel(
    a_ptr, b_ptr, c_ptr, out_ptr, LEFT: tl.constexpr, TRANS_B: tl.constexpr, ACC: tl.constexpr
):  # fmt: skip
    right = shared(b_ptr, 32, 64, TRANS_B)
    if LEFT == "registers":
        left = tl.load(a_ptr + grid2(64, 32))
    else:
        left = shared(a_ptr, 64, 32, LEFT == "transposed")
    if ACC:
        acc = tlx.async_dot(left, right, tl.load(c_ptr + grid2(64, 64)))
    else:
        acc = tlx.async_dot(left, right)
    acc = tlx.async_dot_wait(0, acc)
    tl.static_assert(acc.dtype == tl.float32)
    tl.store(out_ptr + grid2(64, 64), acc)


@pytest.mark.parametrize("dtype", (torch.float16, BF16), ids=str)
@pytest.mark.parametrize("acc", (False, True))
@pytest.mark.parametrize("trans_b", (False, True))
@pytest.mark.parametrize("left", ("shared", "transposed", "registers"))
def test_wgmma(left, trans_b, acc, dtype):
    a, b = normal(64, 32, dtype=dtype), normal(32, 64, dtype=dtype, seed=1)
    c, out = normal(64, 64).float(), torch.full((64, 64), torch.nan)
    stored_a = a.T.contiguous() if left == "transposed" else a
    stored_b = b.T.contiguous() if trans_b else b
    constants = {"LEFT": left, "TRANS_B": trans_b, "ACC": acc}
    report = run(wgmma_kernel, (1,), stored_a, stored_b, c, out, **constants)
    exact = a.double() @ b.double() + (c if acc else 0)
    torch.testing.assert_close(out.double(), exact, rtol=1e-5, atol=1e-5)
    assert report.dots == 1


def test_wgmma_of_fp32_is_tf32():
    a, b, out = torch.full((64, 32), 1 + 2**-12), torch.ones(32, 64), torch.zeros(64, 64)
    run(wgmma_kernel, (1,), a, b, None, out, LEFT="shared", TRANS_B=False, ACC=False)
    assert out.eq(32).all()


@triton.jit
def pending_kernel(a_ptr, b_ptr, out_ptr, PENDINGS: tl.constexpr, USE: tl.constexpr):
    a, b = shared(a_ptr, 64, 32, False), shared(b_ptr, 32, 32, False)
    older = tlx.async_dot(a, b)  # older
    newer = tlx.async_dot(a, b)  # newer
    if PENDINGS >= 0:
        older = tlx.async_dot_wait(PENDINGS, older)
        newer = tlx.async_dot_wait(PENDINGS, newer)
    if USE == "older":
        out = older * 2.0  # use older
    elif USE == "operand":
        out = tlx.async_dot_wait(0, tlx.async_dot(newer.to(tl.float16), b))  # use operand
    else:
        out = newer * 2.0  # use newer
    tlx.async_dot_wait(0, newer)
    tl.store(out_ptr + grid2(64, 32), out)


@pytest.mark.parametrize(
    "pendings, use", ((0, "older"), (0, "newer"), (0, "operand"), (1, "older"))
)
def test_the_result_of_a_wgmma_that_was_awaited(pendings, use):
    a, b, out = matrices()()
    run(pending_kernel, (1,), a, b, out, PENDINGS=pendings, USE=use)
    product = a.double() @ b.double()
    expected = 2 * product if use != "operand" else product.half().double() @ b.double()
    torch.testing.assert_close(out.double(), expected, rtol=2e-3, atol=2e-2)


@pytest.mark.parametrize(
    "pendings, use", ((1, "newer"), (1, "operand"), (2, "older"), (-1, "newer"))
)
def test_the_result_of_a_wgmma_must_be_awaited(pendings, use):
    keywords = {"PENDINGS": pendings, "USE": use, "line": f"# use {use}"}
    issued = place(pending_kernel, "# older" if use == "older" else "# newer")
    for error in found(InvalidKernel, pending_kernel, (1,), matrices(), **keywords):
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
        refused(InvalidKernel, "async_dot needs", shapes_kernel, **fine | wrong)
    other = fine | {"B": tl.bfloat16}
    refused(InvalidKernel, "one dtype, got fp16 and bf16", shapes_kernel, **other)
    integers = fine | {"A": tl.int32, "B": tl.int32}
    refused(Unsupported, "async_dot of int32", shapes_kernel, **integers)


# tcgen05.


@triton.jit
def tcgen05_kernel(a_ptr, b_ptr, flags, out_ptr, HOW: tl.constexpr, USE: tl.constexpr):
    a, b = shared(a_ptr, 128, 32, False), shared(b_ptr, 32, 64, False)
    left = tlx.local_alloc((128, 32), tl.bfloat16, 1, tlx.storage_kind.tmem)
    acc = tlx.local_alloc((128, 64), tl.float32, 1, tlx.storage_kind.tmem)
    done = tlx.alloc_barriers(2)
    if USE != "fresh":
        tlx.local_store(acc[0], tl.full((128, 64), 3.0, tl.float32))
    if HOW == "barriers":
        tlx.async_dot(a, b, acc[0], use_acc=flags != 0, mBarriers=[done[0], done[1]])
        tlx.barrier_wait(done[0], 0)
        tlx.barrier_wait(done[1], 0)
    elif HOW == "commit":
        tlx.async_dot(a, b, acc[0], use_acc=flags != 0, force_async=True)
        tlx.tcgen05_commit(done[1])
        tlx.barrier_wait(done[1], 0)
    elif HOW == "synchronous":
        tlx.async_dot(a, b, acc[0], use_acc=flags != 0)
    elif HOW == "empty list":
        tlx.async_dot(a, b, acc[0], use_acc=flags != 0, mBarriers=[])
    elif HOW == "nothing":
        tlx.async_dot(a, b, acc[0], use_acc=flags != 0, force_async=True)
    elif HOW == "tensor":
        tlx.local_store(left[0], tl.load(a_ptr + grid2(128, 32)))
        tlx.async_dot(left[0], b, acc[0], use_acc=flags != 0)
    else:
        tlx.async_dot(a, b, acc[0], pred=flags > 5)
    tl.store(out_ptr + grid2(128, 64), tlx.local_load(acc[0]))


def tcgen05_arguments(flags):
    a, b = normal(128, 32, dtype=BF16), normal(32, 64, dtype=BF16, seed=1)
    return lambda: (a, b, flags, torch.full((128, 64), torch.nan))


@pytest.mark.parametrize("how", ("barriers", "commit", "synchronous", "empty list", "tensor"))
@pytest.mark.parametrize("flags, use", ((0, "fresh"), (0, "old"), (2, "old")))
def test_tcgen05(how, flags, use):
    def product(a, b, flags, out):
        return a.double() @ b.double() + (3 if flags else 0)

    keywords = {"HOW": how, "USE": use, **B200}
    everywhere(tcgen05_kernel, (1,), tcgen05_arguments(flags), product, 1e-5, **keywords)


def test_a_predicated_product():
    def product(a, b, flags, out):
        return a.float() @ b.float() * (flags > 5) + 3

    keywords = {"HOW": "predicate", "USE": "old", **B200}
    for flags in (2, 6):
        everywhere(tcgen05_kernel, (1,), tcgen05_arguments(flags), product, 1e-5, **keywords)


def test_an_accumulator_is_only_read_if_it_is_used():
    keywords = {"HOW": "synchronous", "USE": "fresh", **B200}
    for error in found(UninitializedRead, tcgen05_kernel, (1,), tcgen05_arguments(2), **keywords):
        assert error.buffer == "acc[0]"


def test_an_asynchronous_product_that_nobody_awaits():
    keywords = {"HOW": "nothing", "USE": "old", "line": "local_load(acc[0])", **B200}
    for error in found(Race, tcgen05_kernel, (1,), tcgen05_arguments(2), **keywords):
        assert error.buffer == "acc[0]" and error.role == DEFAULT


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
    run(bad_tcgen05_kernel, (1,), HOW="none", **B200)
    for how, message in (
        ("registers", "A in memory and acc in tensor memory"),
        ("acc", "A in memory and acc in tensor memory"),
        ("wide", r"acc of async_dot must be \[128, 64\], got \[128, 128\]"),
        ("b", "must be in shared memory"),
    ):
        refused(InvalidKernel, message, bad_tcgen05_kernel, HOW=how, **B200)


@triton.jit
def commit_kernel(COMMITS: tl.constexpr):
    done = tlx.alloc_barriers(1, arrive_count=2)
    for _ in tl.static_range(COMMITS):
        tlx.tcgen05_commit(done)
    tlx.barrier_wait(done, 0)


def test_a_commit_of_nothing_arrives():
    everywhere(commit_kernel, (1,), COMMITS=2, **B200)
    stuck([(DEFAULT, "done of CTA 0", 0, 1, 0)], commit_kernel, (1,), COMMITS=1, **B200)


@triton.jit
def pair_kernel(a_desc, b_desc, out_ptr, COMMIT: tl.constexpr, WAIT: tl.constexpr):
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
    if WAIT:
        tlx.barrier_wait(both, 0, pred=rank == 0)
    if COMMIT:
        tlx.async_dot(a[0], b[0], acc[0], use_acc=False, two_ctas=True, force_async=True)
        tlx.async_dot(a[0], b[0], acc[0], two_ctas=True, force_async=True)
        tlx.tcgen05_commit(done, two_ctas=True)
    else:
        tlx.async_dot(a[0], b[0], acc[0], use_acc=False, two_ctas=True, mBarriers=[done])
    tlx.barrier_wait(done, 0)
    tl.store(out_ptr + rank * 128 * 64 + grid2(128, 64), tlx.local_load(acc[0]))


def pair_arguments():
    a, b = normal(256, 32), normal(32, 64, seed=1)
    return box(a, 128, 32), box(b, 32, 32), torch.full((256, 64), torch.nan)


@pytest.mark.parametrize("commit", (False, True))
def test_a_product_of_two_ctas(commit):
    def product(a, b, out):
        return a.base.double() @ b.base.double() * (1 + commit)

    keywords = {"COMMIT": commit, "WAIT": True, **B200, **PAIR}
    everywhere(pair_kernel, (2,), pair_arguments, product, 1e-5, **keywords)
    assert run(pair_kernel, (2,), *pair_arguments(), **keywords).dots == 1 + commit


def test_the_odd_cta_must_be_ready():
    keywords = {"COMMIT": False, "WAIT": False, **B200, **PAIR}
    for error in found((Race, UninitializedRead), pair_kernel, (2,), pair_arguments, **keywords):
        assert error.buffer in ("a[0]", "b[0]")
        assert "of CTA 1" in str(error)


@triton.jit
def pair64_kernel(a_desc, b_desc, lanes_ptr, out_ptr):
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
    a, b = normal(128, 32), normal(32, 128, seed=1)
    lanes, out = torch.zeros(2, 128, 64), torch.zeros(128, 128)

    def product(*arguments):
        for cta in range(2):
            rows = out[64 * cta : 64 * cta + 64]
            assert torch.equal(lanes[cta], torch.cat([rows[:, :64], rows[:, 64:]]))
        return a.double() @ b.double()

    def arguments():
        return box(a, 64, 32), box(b, 32, 64), lanes.fill_(torch.nan), out.fill_(torch.nan)

    everywhere(pair64_kernel, (2,), arguments, product, 1e-5, **B200, **PAIR)


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
        # One row below and one column before, so that padding lands inside.
        offsets = [row + 1, column - 1]
        tlx.async_descriptor_store(out_desc, tile[0], offsets, store_reduce=REDUCE)
    tlx.async_descriptor_store_wait(0)


@pytest.mark.parametrize("row, column", ((0, 0), (4, 8), (-3, -5), (9, 20), (100, 0)))
@pytest.mark.parametrize("reduce", ("", "add"))
def test_boxes_are_padded_and_clipped_and_all_bytes_arrive(row, column, reduce):
    x, out = torch.arange(10 * 24.0).view(10, 24) + 1, torch.full((10, 24), 7.0)
    descs = box(x, 8, 16), box(out, 8, 16)
    run(copy_kernel, (1,), *descs, row, column, REDUCE=reduce, LEADING=False)
    rows, columns = torch.arange(10)[:, None] - row - 1, torch.arange(24) - column + 1
    inside = (rows >= 0) & (rows < 8) & (columns >= 0) & (columns < 16)
    moved = torch.nn.functional.pad(x, (0, 1, 1, 0))[:-1, 1:]
    assert torch.equal(out, torch.where(inside, moved + 7 if reduce else moved, 7.0))


def test_leading_dimensions_of_a_box():
    x = torch.randn(2, 3, 8, 16)
    out = torch.zeros_like(x)
    descs = [box(t, 1, 1, 8, 16) for t in (x, out)]
    run(copy_kernel, (1,), *descs, 0, 0, REDUCE="", LEADING=True)
    assert torch.equal(out[1, 0], x[1, 0]) and out.count_nonzero() == 128


def test_a_copy_into_a_buffer_of_another_type_or_size():
    x = torch.zeros(16, 16)
    right = box(x, 8, 16)
    for reduce, descs, message in (
        ("", (box(x, 16, 16), right), r"tile\[0\] must be fp32\[16, 16\] as the descriptor"),
        ("", (right, box(x.half(), 8, 16)), "value must be fp16"),
        ("max", (right, right), "no reduction 'max' of fp32"),
    ):
        keywords = {"REDUCE": reduce, "LEADING": False}
        refused(InvalidKernel, message, copy_kernel, *descs, 0, 0, **keywords)


@triton.jit
def multicast_kernel(desc, out_ptr):
    halves = tlx.local_alloc((8, 16), tl.float32, 2)
    full = tlx.alloc_barriers(1)
    rank = tlx.cluster_cta_rank()
    tlx.barrier_expect_bytes(full, 1024)
    own, other = halves[rank], rank ^ 1
    tlx.async_descriptor_load(desc, own, [rank * 8, 0], full, multicast_targets=[rank, other])
    tlx.barrier_wait(full, 0)
    for i in tl.static_range(2):
        tl.store(out_ptr + rank * 256 + i * 128 + grid2(8, 16), tlx.local_load(halves[i]))


def test_multicast():
    def arguments():
        return box(torch.arange(256.0).view(16, 16), 8, 16), torch.full((2, 16, 16), -1.0)

    everywhere(multicast_kernel, (2,), arguments, lambda desc, out: desc.base, **PAIR)
    assert run(multicast_kernel, (2,), *arguments(), **PAIR).bytes_loaded == 1024


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
    x, message = torch.arange(64.0), "multiples of 16 bytes of the buffer"
    for load, store in ((128, 128), (64, 128), (64, 32)):
        out = torch.full((32,), -1.0)
        run(bulk_kernel, (1,), x, out, SIZE=load, STORE=store)
        row = torch.cat([x[8 : 8 + load // 4], torch.full((32 - load // 4,), -5.0)])
        assert torch.equal(out[: store // 4], row[: store // 4])
        assert out[store // 4 :].eq(-1).all()
    for wrong in (24, 144):
        refused(InvalidKernel, message, bulk_kernel, x, torch.zeros(64), SIZE=128, STORE=wrong)
    refused(OutOfBounds, None, bulk_kernel, x[:39], torch.zeros(32), SIZE=128, STORE=128)


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
    window = tlx.local_slice(target[0], [8, 16], [8, 16])
    if not EARLY:
        tlx.barrier_expect_bytes(full, 512)
    tlx.async_remote_shmem_copy(dst=window, src=source[0], remote_cta_rank=1 - rank, barrier=full)
    if EARLY:
        tlx.barrier_expect_bytes(full, 512)
    tlx.barrier_wait(full, 0)
    tl.store(out_ptr + rank * 512 + grid2(16, 32), tlx.local_load(target[0]))
    tlx.cluster_barrier()


@pytest.mark.parametrize("early", (False, True))
def test_copies_to_the_peer(early):
    def moved(x, out):
        expected = torch.zeros(2, 16, 32)
        expected[1, 8:, 16:], expected[0, 8:, 16:] = x[0], x[1]
        return expected

    def arguments():
        return torch.randn(2, 8, 16), torch.full((2, 16, 32), torch.nan)

    everywhere(remote_copy_kernel, (2,), arguments, moved, EARLY=early, **PAIR)


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
            tlx.async_remote_shmem_store(cells[rank], value, i, full)
    tlx.barrier_wait(full, 0)
    total = tl.zeros((16,), tl.int32)
    for i in tl.static_range(CTAS):
        total += tlx.local_load(cells[i])
    tl.store(out_ptr + (tl.program_id(1) * 2 + tl.program_id(0)) * 16 + tl.arange(0, 16), total)


def test_a_sum_over_a_cluster_along_y():
    everywhere(ring_kernel, (2, 4), ints(8, 16), 100, CTAS=4, ctas_per_cga=(1, 4, 1))


@triton.jit
def ranks_kernel(out_ptr):
    linear = tl.program_id(0) + 8 * tl.program_id(1)
    tl.store(out_ptr + linear, tlx.cluster_cta_rank())


def test_ranks_count_x_fastest():
    (out,) = ints(4, 8)()
    cluster = {"ctas_per_cga": (4, 2, 1)}
    run(ranks_kernel, (8, 4), out, **cluster)
    assert torch.equal(out, torch.tensor([[0, 1, 2, 3] * 2, [4, 5, 6, 7] * 2] * 2).int())
    message = "must be divisible by ctas_per_cga"
    refused(ValueError, message, ranks_kernel, out, grid=(6, 4), **cluster)


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
        keywords = {"REPLICAS": replicas, "schedule": schedule, **B200}
        report = run(launch_control_kernel, (tiles,), count, own, **keywords)
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
    run(forgotten_kernel, (6,), CONSUMERS=1, **B200)
    lacks = (DEFAULT, "clc_empty of CTA 0", 0, 1, 0)
    stuck([lacks], forgotten_kernel, (6,), CONSUMERS=2, **B200)


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
    for error, message, base, index, kind in (
        (InvalidKernel, "no descriptor of box", x, 0, "same"),
        (InvalidKernel, "no descriptor of box", x, 1, "smaller"),
        (OutOfBounds, "2 descriptors are allocated, got index 2", x, 2, "same"),
        (DescriptorError, None, x.view(-1)[1:], 1, "same"),
    ):
        refused(error, message, slots_kernel, base, out, 5, index, KIND=kind)


# Tasks.


@triton.jit
def private_kernel(start, out_ptr, REPLICAS: tl.constexpr):
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
    def arguments():
        return 7, *ints(5)()

    everywhere(private_kernel, (2,), arguments, [8, 17, 33, 44, 7005], REPLICAS=3)


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
    out = torch.zeros(32, dtype=torch.int32)
    if what is None:
        build(captured_kernel, {"out_ptr": "*i32"}, {"HOW": how})
        run(captured_kernel, (1,), out, HOW=how)
        return
    with pytest.raises(RuntimeError, match="should not capture RankedTensorType"):
        build(captured_kernel, {"out_ptr": "*i32"}, {"HOW": how})
    message = re.escape(f"got {what}: compute it in the task, under")
    refused(InvalidKernel, message, captured_kernel, out, HOW=how)


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
    (out,) = ints(4, fill=0)()
    report = run(named_kernel, (1,), out, EXTRA=extra, num_warps=8)
    assert out.tolist() == [1, 1, 1, 7 if extra else 0]
    tasks = {"task0": 2, "task1": 1} if extra else {"task0": 1}
    assert report.warps == {"load": 8, "math[0]": 4, "math[1]": 4, **tasks}


@triton.jit
def default_kernel(out_ptr, HOW: tl.constexpr):
    if HOW == "outside":
        tl.store(out_ptr, tlx.async_task_replica_id())
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
    (out,) = ints(4, fill=0)()
    report = run(default_kernel, (1,), out, HOW="replicate")
    assert out.tolist() == [1, 1, 1, 0]
    assert report.warps == {f"default[{i}]": 4 for i in range(3)}


@pytest.mark.parametrize(
    "how, message",
    (
        *(("registers", "default"), ("num_regs", "default"), ("two", "exactly one default")),
        *(("none", "exactly one default"), ("numbers", '"default" or num_warps=')),
        *(("no warps", "needs num_warps"), ("outside", "inside an async_task")),
    ),
)
def test_tasks_that_triton_refuses(how, message):
    refused(InvalidKernel, message, default_kernel, *ints(4)(), HOW=how)


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
    everywhere(two_regions_kernel, (1,), ints(1), 7)


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
        stuck([(DEFAULT, f"{name} of CTA 0", 0, 1, 0)], kernel, (1,))


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
        refused(Unsupported, "vote_ballot_sync", ballot_kernel, x, out, **wrong)


@triton.jit
def types_kernel(desc, x_ptr, out_ptr):
    tile = tl.zeros((4,), tl.bfloat16)
    tl.static_assert(tlx.dtype_of(desc) == tl.float16)
    tl.static_assert(tlx.dtype_of(x_ptr) == tl.float32)
    tl.static_assert(tlx.dtype_of(tile) == tl.bfloat16)
    size: tl.constexpr = tlx.size_of(tl.float32) * 100 + tlx.size_of(tlx.dtype_of(desc))
    tl.store(out_ptr, size)


def test_types():
    (out,) = ints(1)()
    run(types_kernel, (1,), box(torch.zeros(8, 16).half(), 8, 16), torch.zeros(4), out)
    assert out.item() == 402


@triton.jit
def some_kernel(WHAT: tl.constexpr):
    if WHAT == "thread_id":
        tlx.thread_id(0)
    elif WHAT == "async_dot_scaled":
        tlx.async_dot_scaled(0, 0)
    elif WHAT == "tcgen05_commit":
        tlx.tcgen05_commit(tlx.alloc_barriers(1))
    elif WHAT == "clc_create_context":
        tlx.clc_create_context(num_consumers=1)
    else:
        tlx.local_alloc((128, 32), tl.float32, 1, tlx.storage_kind.tmem)


@pytest.mark.parametrize("what", ("thread_id", "async_dot_scaled"))
def test_unsupported_operations_are_named(what):
    error = refused(Unsupported, None, some_kernel, WHAT=what, line=f"tlx.{what}(", **B200)
    assert error.args[0] == f"tlx.{what}" and error.role == DEFAULT


@pytest.mark.parametrize("what", ("tcgen05_commit", "clc_create_context", "local_alloc"))
def test_operations_of_blackwell_are_refused_on_hopper(what):
    run(some_kernel, (1,), WHAT=what, **B200)
    refused(InvalidKernel, f"tlx.{what}.* needs arch sm_100, got sm_90", some_kernel, WHAT=what)
