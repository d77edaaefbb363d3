"""Races of TLX kernels that lack one synchronisation."""

import pytest
import torch
import triton
import triton.language as tl

from emulator.tests.checking import (
    B200,
    DEFAULT,
    PAIR,
    TASK,
    box,
    boxes,
    everywhere,
    fill,
    found,
    grid2,
    ints,
    matrices,
    of_first,
    place,
    places,
    raced,
    tlx,
)
from tritonemu import InvalidKernel, Race, run

pytestmark = pytest.mark.tlx

ROLES = (DEFAULT, TASK)

# Kernels. Each is right, or lacks what FAULT says.


@triton.jit
def handover_kernel(out_ptr, FAULT: tl.constexpr):
    cell = tlx.local_alloc((16,), tl.int32, 2)
    full, empty = tlx.alloc_barriers(1), tlx.alloc_barriers(1)
    tlx.local_store(cell[1], tl.zeros((16,), tl.int32))
    with tlx.async_tasks():
        with tlx.async_task("default"):
            tlx.local_store(cell[1], tl.arange(0, 16))  # first
            tlx.barrier_arrive(full)
            tlx.barrier_wait(empty, 0)
            tlx.local_store(cell[1], tl.arange(0, 16) + 100)  # second
            tlx.barrier_arrive(full)
        with tlx.async_task(num_warps=4):
            tlx.barrier_wait(full, 0)
            if FAULT == "early release":
                tlx.barrier_arrive(empty)
            x = tlx.local_load(cell[1])  # early
            if FAULT != "early release":
                tlx.barrier_arrive(empty)
            tl.store(out_ptr + tl.arange(0, 16), x)
            if FAULT != "no wait":
                tlx.barrier_wait(full, 1)
            x = tlx.local_load(cell[1])  # late
            tl.store(out_ptr + 16 + tl.arange(0, 16), x)


@triton.jit
def replicas_kernel(out_ptr, APART: tl.constexpr):
    cell = tlx.local_alloc((16,), tl.int32, 2)
    with tlx.async_tasks():
        with tlx.async_task("default"):
            pass
        with tlx.async_task(num_warps=4, replicate=2):
            replica = tlx.async_task_replica_id()
            tlx.local_store(cell[replica * APART], tl.full((16,), replica, tl.int32))
    x = tlx.local_load(cell[0])
    tl.store(out_ptr + tl.arange(0, 16), x)


def test_replicas():
    everywhere(replicas_kernel, (1,), ints(16), 0, APART=1)
    for error in found(Race, replicas_kernel, (1,), ints(16), APART=0, line="local_store"):
        assert (error.file, error.line) == error.other
        assert error.role in ("task0[0] of CTA 0", "task0[1] of CTA 0")
        assert f"which task0[{'10'[int(error.role[6])]}] of CTA 0 writes" in str(error)


@triton.jit
def bytes_kernel(out_ptr, FIRST: tl.constexpr, SECOND: tl.constexpr, WRITE: tl.constexpr):
    cell = tlx.local_alloc((64,), tl.int8, 1)
    tlx.local_store(cell[0], tl.zeros((64,), tl.int8))
    with tlx.async_tasks():
        with tlx.async_task("default"):
            mine = tlx.local_slice(cell[0], [FIRST], [16])
            tlx.local_store(mine, tl.full((16,), 1, tl.int8))  # mine
        with tlx.async_task(num_warps=4):
            theirs = tlx.local_slice(cell[0], [SECOND], [16])
            if WRITE:
                tlx.local_store(theirs, tl.full((16,), 2, tl.int8))  # write
            else:
                tlx.local_load(theirs)  # read
    tl.store(out_ptr + tl.arange(0, 64), tlx.local_load(cell[0]))


@pytest.mark.parametrize("write", (False, True))
@pytest.mark.parametrize("first, second", ((16, 32), (16, 0), (17, 1), (17, 33)))
def test_neighbouring_bytes_do_not_race(first, second, write):
    expected = torch.zeros(64)
    expected[first : first + 16] = 1
    expected[second : second + 16] = 2 if write else 0
    everywhere(bytes_kernel, (1,), ints(64), expected, FIRST=first, SECOND=second, WRITE=write)


@pytest.mark.parametrize("write", (False, True))
@pytest.mark.parametrize("first, second", ((16, 31), (17, 2), (5, 5)))
def test_one_common_byte_races(first, second, write):
    raced(
        bytes_kernel, (1,), ints(64), FIRST=first, SECOND=second, WRITE=write, buffer="cell[0]",
        between=("# mine", "# write" if write else "# read"), roles=ROLES,
    )  # fmt: skip


@triton.jit
def windows_kernel(ROW: tl.constexpr, COLUMN: tl.constexpr, TENSOR: tl.constexpr):
    if TENSOR:
        cell = tlx.local_alloc((128, 32), tl.float32, 1, tlx.storage_kind.tmem)
    else:
        cell = tlx.local_alloc((128, 32), tl.float32, 1)
    with tlx.async_tasks():
        with tlx.async_task("default"):
            mine = tlx.local_slice(cell[0], [0, 8], [128, 8])
            tlx.local_store(mine, tl.zeros((128, 8), tl.float32))  # mine
        with tlx.async_task(num_warps=4):
            theirs = tlx.local_slice(cell[0], [ROW, COLUMN], [128 - ROW, 8])
            tlx.local_store(theirs, tl.zeros((128 - ROW, 8), tl.float32))  # theirs


@pytest.mark.parametrize("tensor", (False, True))
def test_windows_race_where_they_overlap(tensor):
    options = {"TENSOR": tensor, **B200}
    for column in (0, 16):
        everywhere(windows_kernel, (1,), ROW=0, COLUMN=column, **options)
    finding = {"buffer": "cell[0]", "between": ("# mine", "# theirs")}
    for row, column in ((0, 1), (0, 8), (0, 15), *([] if tensor else [(64, 15)])):
        raced(windows_kernel, (1,), ROW=row, COLUMN=column, **finding, **options)


@triton.jit
def alias_kernel(ALIAS: tl.constexpr, TENSOR: tl.constexpr, PART: tl.constexpr):
    where: tl.constexpr = tlx.storage_kind.tmem if TENSOR else tlx.storage_kind.smem
    qk = tlx.local_alloc((128, 32), tl.float32, 1, where)
    if ALIAS:
        p = tlx.local_alloc((128, 32), tl.float16, 2, where, reuse=qk)
    else:
        p = tlx.local_alloc((128, 32), tl.float16, 2, where)
    with tlx.async_tasks():
        with tlx.async_task("default"):
            half = tlx.local_slice(qk[0], [0, 0], [128, 16]) if TENSOR else qk[0]
            tlx.local_store(half, tl.zeros(half.shape, tl.float32))  # qk
        with tlx.async_task(num_warps=4):
            tlx.local_store(p[PART], tl.zeros((128, 32), tl.float16))  # p


# Asynchronous copies.


@triton.jit
def load_kernel(desc, out_desc, FAULT: tl.constexpr):
    tile = tlx.local_alloc((8, 16), tl.float32, 1)
    full, empty = tlx.alloc_barriers(1), tlx.alloc_barriers(1)
    tlx.local_store(tile[0], tl.zeros((8, 16), tl.float32))
    with tlx.async_tasks():
        with tlx.async_task("default"):
            for i in tl.static_range(2):
                tlx.barrier_wait(empty, 1 - i)
                tlx.barrier_expect_bytes(full, 512)
                tlx.async_descriptor_load(desc, tile[0], [i * 8, 0], full)
        with tlx.async_task(num_warps=4):
            for i in tl.static_range(2):
                if i == 0 or FAULT != "no full":
                    tlx.barrier_wait(full, i)
                out_desc.store([i * 8, 0], tlx.local_load(tile[0]))  # read
                if i == 0:
                    tlx.barrier_arrive(empty)


@triton.jit
def own_copy_kernel(desc, out_desc, FAULT: tl.constexpr):
    tile = tlx.local_alloc((8, 16), tl.float32, 1)
    full = tlx.alloc_barriers(1)
    tlx.barrier_expect_bytes(full, 512)
    tlx.async_descriptor_load(desc, tile[0], [0, 0], full)
    if FAULT == "none":
        tlx.barrier_wait(full, 0)
    if FAULT == "write":
        tlx.local_store(tile[0], tl.zeros((8, 16), tl.float32))  # write
    else:
        out_desc.store([0, 0], tlx.local_load(tile[0]))  # read


@triton.jit
def store_kernel(out_desc, PENDING: tl.constexpr, STAGES: tl.constexpr):
    tile = tlx.local_alloc((8, 16), tl.float32, STAGES)
    for i in tl.static_range(4):
        tlx.async_descriptor_store_wait(PENDING)
        tlx.local_store(tile[i % STAGES], tl.full((8, 16), i, tl.float32))
        tlx.async_descriptor_store(out_desc, tile[i % STAGES], [i * 8, 0])
    tlx.async_descriptor_store_wait(0)


@triton.jit
def wait_until_written():
    tl.inline_asm_elementwise(
        "cp.async.bulk.wait_group 0; mov.b32 $0, $1;", "=r,r", [tl.program_id(0)], dtype=tl.int32,
        is_pure=False, pack=1,
    )  # fmt: skip


@triton.jit
def written_kernel(out_desc, back_ptr, HOW: tl.constexpr):
    tile = tlx.local_alloc((8, 16), tl.float32, 2)
    full = tlx.alloc_barriers(1)
    tlx.local_store(tile[0], tl.full((8, 16), 7, tl.float32))
    tlx.async_descriptor_store(out_desc, tile[0], [0, 0])
    if HOW == "landed":
        wait_until_written()
    else:
        tlx.async_descriptor_store_wait(0)
    if HOW == "copy":
        tlx.barrier_expect_bytes(full, 512)
        tlx.async_descriptor_load(out_desc, tile[1], [0, 0], full)  # copy
        tlx.barrier_wait(full, 0)
    if HOW == "load" or HOW == "landed":
        place = grid2(8, 16)
        tl.load(back_ptr + place)  # load


@triton.jit
def groups_kernel(x_ptr, out_ptr, PENDING: tl.constexpr):
    tile = tlx.local_alloc((32,), tl.int32, 3)
    lanes = tl.arange(0, 32)
    for i in tl.static_range(3):
        token = tlx.async_load(x_ptr + i * 32 + lanes, tile[i])
        tlx.async_load_commit_group([token])
    for i in tl.static_range(3):
        tlx.async_load_wait_group(2 - i + PENDING)
        tl.store(out_ptr + i * 32 + lanes, tlx.local_load(tile[i]))


# Tensor cores.


def twice(a, b, out):
    return 2 * (a.float() @ b.float())


@triton.jit
def wgmma_kernel(a_ptr, b_ptr, out_ptr, FAULT: tl.constexpr):
    a = tlx.local_alloc((64, 32), tl.float16, 1)
    b = tlx.local_alloc((32, 32), tl.float16, 2)
    fill(a[0], a_ptr, 64, 32)
    fill(b[0], b_ptr, 32, 32)
    fill(b[1], b_ptr, 32, 32)
    first = tlx.async_dot(a[0], b[0])  # first
    acc = tlx.async_dot(a[0], b[1], first)  # second
    if FAULT == "a":
        acc = tlx.async_dot_wait(1, acc)
        tlx.local_store(a[0], tl.zeros((64, 32), tl.float16))  # a
    if FAULT == "b1":
        acc = tlx.async_dot_wait(1, acc)
        tlx.local_store(b[1], tl.zeros((32, 32), tl.float16))  # b1
    if FAULT == "b0":
        tlx.local_store(b[0], tl.zeros((32, 32), tl.float16))  # b0
    acc = tlx.async_dot_wait(1, acc)
    tlx.local_store(b[0], tl.zeros((32, 32), tl.float16))
    acc = tlx.async_dot_wait(0, acc)
    tlx.local_store(a[0], tl.zeros((64, 32), tl.float16))
    tlx.local_store(b[1], tl.zeros((32, 32), tl.float16))
    tl.store(out_ptr + grid2(64, 32), acc)


@triton.jit
def tcgen05_kernel(a_ptr, b_ptr, out_ptr, FAULT: tl.constexpr):
    a = tlx.local_alloc((128, 32), tl.float16, 1)
    b = tlx.local_alloc((32, 32), tl.float16, 1)
    acc = tlx.local_alloc((128, 32), tl.float32, 1, tlx.storage_kind.tmem)
    done = tlx.alloc_barriers(1)
    fill(a[0], a_ptr, 128, 32)
    fill(b[0], b_ptr, 32, 32)
    with tlx.async_tasks():
        with tlx.async_task("default"):
            tlx.async_dot(a[0], b[0], acc[0], use_acc=False, force_async=True)
            tlx.async_dot(a[0], b[0], acc[0], mBarriers=[done])
            if FAULT == "operand":
                tlx.local_store(b[0], tl.zeros((32, 32), tl.float16))  # operand
            tlx.barrier_wait(done, 0)
            tlx.local_store(b[0], tl.zeros((32, 32), tl.float16))
        with tlx.async_task(num_warps=4):
            if FAULT != "acc":
                tlx.barrier_wait(done, 0)
            x = tlx.local_load(acc[0])  # read
            tl.store(out_ptr + grid2(128, 32), x)


@triton.jit
def two_issuers_kernel(a_ptr, b_ptr, out_ptr, ORDERED: tl.constexpr):
    a = tlx.local_alloc((128, 32), tl.float16, 1)
    b = tlx.local_alloc((32, 32), tl.float16, 1)
    acc = tlx.local_alloc((128, 32), tl.float32, 1, tlx.storage_kind.tmem)
    done, all_done = tlx.alloc_barriers(1), tlx.alloc_barriers(1)
    fill(a[0], a_ptr, 128, 32)
    fill(b[0], b_ptr, 32, 32)
    tlx.local_store(acc[0], tl.zeros((128, 32), tl.float32))
    with tlx.async_tasks():
        with tlx.async_task("default"):
            tlx.async_dot(a[0], b[0], acc[0], mBarriers=[done])  # first
        with tlx.async_task(num_warps=1):
            if ORDERED:
                tlx.barrier_wait(done, 0)
            tlx.async_dot(a[0], b[0], acc[0], mBarriers=[all_done])  # second
            tlx.barrier_wait(all_done, 0)


# Clusters.


@triton.jit
def exchange_kernel(out_ptr, FAULT: tl.constexpr):
    cell = tlx.local_alloc((16,), tl.int32, 1)
    full = tlx.alloc_barriers(1)
    rank = tlx.cluster_cta_rank()
    tlx.local_store(cell[0], tl.zeros((16,), tl.int32))  # clear
    if FAULT != "no cluster barrier":
        tlx.cluster_barrier()
    tlx.barrier_expect_bytes(full, 64)
    value = tl.full((16,), 5, tl.int32) + rank
    tlx.async_remote_shmem_store(dst=cell[0], src=value, remote_cta_rank=1 - rank, barrier=full)
    if FAULT != "no wait":
        tlx.barrier_wait(full, 0)
    x = tlx.local_load(cell[0])  # read
    tl.store(out_ptr + tl.program_id(0) * 16 + tl.arange(0, 16), x)
    tlx.cluster_barrier()


@triton.jit
def relay_kernel(desc, out_desc, OWN: tl.constexpr):
    """Each half is multicast; CTA 1 may wait for its own bytes, or be told by CTA 0."""
    tile = tlx.local_alloc((8, 16), tl.float32, 1)
    full, told = tlx.alloc_barriers(1), tlx.alloc_barriers(1)
    rank = tlx.cluster_cta_rank()
    tlx.local_store(tile[0], tl.zeros((8, 16), tl.float32))
    tlx.barrier_expect_bytes(full, 512)
    tlx.cluster_barrier()
    if rank == 0:
        tlx.async_descriptor_load(desc, tile[0], [0, 0], full, multicast_targets=[0, 1])
        tlx.barrier_wait(full, 0)
        tlx.barrier_arrive(told, 1, remote_cta_rank=1)
    else:
        if OWN:
            tlx.barrier_wait(full, 0)
        else:
            tlx.barrier_wait(told, 0)
        out_desc.store([0, 0], tlx.local_load(tile[0]))  # read
    tlx.cluster_barrier()


# Global memory.


@triton.jit
def global_roles_kernel(x_ptr, out_ptr, ORDERED: tl.constexpr):
    full = tlx.alloc_barriers(1)
    with tlx.async_tasks():
        with tlx.async_task("default"):
            lanes = tl.arange(0, 16)
            tl.store(x_ptr + lanes, lanes)
            tlx.barrier_arrive(full)
        with tlx.async_task(num_warps=4):
            lanes = tl.arange(0, 16)
            if ORDERED:
                tlx.barrier_wait(full, 0)
            x = tl.load(x_ptr + lanes)
            tl.store(out_ptr + lanes, x)


@triton.jit
def global_ctas_kernel(x_ptr, out_ptr, ORDERED: tl.constexpr):
    bar = tlx.alloc_barriers(1)
    lanes = tl.arange(0, 16)
    if tlx.cluster_cta_rank() == 1:
        tl.store(x_ptr + lanes, lanes)
        tlx.barrier_arrive(bar, 1, remote_cta_rank=0)
    else:
        if ORDERED:
            tlx.barrier_wait(bar, 0)
        tl.store(out_ptr + lanes, tl.load(x_ptr + lanes))


@triton.jit
def summed_kernel(sum_desc, sum_ptr, count_ptr, n, out_ptr, FAULT: tl.constexpr):
    """Every program adds a tile by TMA; the first waits for all of them and reads the sum."""
    tile = tlx.local_alloc((8, 16), tl.float32, 1)
    pid = tl.program_id(0)
    place = grid2(8, 16)
    tlx.local_store(tile[0], tl.zeros((8, 16), tl.float32) + pid + 1)
    tlx.async_descriptor_store(sum_desc, tile[0], [0, 0], store_reduce="add")  # add
    if FAULT == "read":
        tlx.async_descriptor_store_wait(0)
    else:
        wait_until_written()
    tl.atomic_add(count_ptr, 1, sem="relaxed" if FAULT == "relaxed" else "release")
    if pid == 0:
        while tl.atomic_add(count_ptr, 0, sem="acquire") < n:
            pass
        tl.store(out_ptr + place, tl.load(sum_ptr + place))  # load


def sums():
    total = torch.zeros(8, 16)
    count, out = torch.zeros(1, dtype=torch.int32), torch.zeros(8, 16)
    return box(total, 8, 16), total, count, 3, out


# What each of them gives when it is right, and between which lines it races when it is not.


def of_x(x, _):
    return x


def copied():
    return torch.arange(96, dtype=torch.int32), *ints(96)()


def two_of_16():
    return ints(16)() + ints(16)()


def of_boxes():
    (desc,) = boxes(1)()
    return desc, desc.base


HANDED = torch.stack([torch.arange(16), torch.arange(100, 116)])
ROWS = torch.arange(4).repeat_interleave(8)[:, None]
EXCHANGED = torch.tensor([6, 5, 6, 5])[:, None]
SMEM, TMEM = ({"TENSOR": tensor, **B200} for tensor in (False, True))
RIGHT = (
    (handover_kernel, 1, ints(2, 16), HANDED, {"FAULT": "none"}),
    *((alias_kernel, 1, tuple, None, {"ALIAS": False, "PART": 0, **o}) for o in (SMEM, TMEM)),
    # p[1] is the right half of the columns of qk, of which the other role takes the left.
    (alias_kernel, 1, tuple, None, {"ALIAS": True, "PART": 1, **TMEM}),
    (load_kernel, 1, boxes(rows=16), of_first, {"FAULT": "none"}),
    (own_copy_kernel, 1, boxes(), None, {"FAULT": "none"}),
    *((store_kernel, 1, boxes(1, 32), ROWS, {"PENDING": n - 1, "STAGES": n}) for n in (1, 2, 3)),
    *((written_kernel, 1, of_boxes, None, {"HOW": how}) for how in ("none", "landed")),
    (groups_kernel, 1, copied, of_x, {"PENDING": 0}),
    (wgmma_kernel, 1, matrices(), twice, {"FAULT": "none"}),
    (tcgen05_kernel, 1, matrices(128), twice, {"FAULT": "none", **B200}),
    (two_issuers_kernel, 1, matrices(128), None, {"ORDERED": True, **B200}),
    (exchange_kernel, 4, ints(4, 16), EXCHANGED, {"FAULT": "none", **PAIR}),
    (relay_kernel, 2, boxes(), of_first, {"OWN": True, **PAIR}),
    (global_roles_kernel, 1, two_of_16, range(16), {"ORDERED": True}),
    (global_ctas_kernel, 2, two_of_16, range(16), {"ORDERED": True, **PAIR}),
    (summed_kernel, 3, sums, 6, {"FAULT": "none", "resident": 3}),
    (summed_kernel, 3, sums, 6, {"FAULT": "none"}),
)


def named(value):
    return value.fn.__name__ if hasattr(value, "fn") else None


@pytest.mark.parametrize("kernel, ctas, arguments, gives, options", RIGHT, ids=named)
def test_what_is_right(kernel, ctas, arguments, gives, options):
    tolerance = 1e-5 if gives is twice else 0
    everywhere(kernel, (ctas,), arguments, gives, tolerance, **options)


LOAD, SEND = "async_descriptor_load", "async_remote_shmem_store"
STORE, GROUP = "tlx.async_descriptor_store(", "tlx.async_load("


def race(buffer, *between, roles=(), programs=None):
    return {"buffer": buffer, "between": between, "roles": roles, "programs": programs}


@pytest.mark.parametrize(
    "kernel, ctas, arguments, options, finding",
    (
        *(
            (handover_kernel, 1, ints(2, 16), {"FAULT": fault},
             race("cell[1]", "# second", at, roles=ROLES))
            for fault, at in (("no wait", "# late"), ("early release", "# early"))
        ),
        *(
            (alias_kernel, 1, tuple, {"ALIAS": True, "PART": 0, **options},
             race(("qk[0]", "p[0]"), "# qk", "# p", roles=ROLES))
            for options in (SMEM, TMEM)
        ),
        (load_kernel, 1, boxes(rows=16), {"FAULT": "no full"},
         race("tile[0]", LOAD, "# read", roles=ROLES)),
        # The source of a store is kept until it has been read.
        *(
            (store_kernel, 1, boxes(1, 32), {"PENDING": n, "STAGES": n},
             race("tile[0]", "local_store", STORE))
            for n in (1, 2, 3)
        ),
        # A wait for a store says nothing about global memory.
        *(
            (written_kernel, 1, of_boxes, {"HOW": how},
             race(("out_desc", "back_ptr"), STORE, f"# {how}"))
            for how in ("copy", "load")
        ),
        (groups_kernel, 1, copied, {"PENDING": 1}, race("tile[0]", GROUP, "local_load")),
        (tcgen05_kernel, 1, matrices(128), {"FAULT": "acc", "uninitialized": "allow", **B200},
         race("acc[0]", "async_dot(", "# read")),
        (two_issuers_kernel, 1, matrices(128), {"ORDERED": False, **B200},
         race("acc[0]", "# first", "# second", roles=ROLES)),
        *(
            (exchange_kernel, 2, ints(4, 16), {"FAULT": fault, **PAIR}, race("cell[0]", SEND, at))
            for fault, at in (("no wait", "# read"), ("no cluster barrier", "# clear"))
        ),
        # The bytes that CTA 0 has waited for are those in CTA 0.
        (relay_kernel, 2, boxes(), {"OWN": False, **PAIR}, race("tile[0]", LOAD, "# read")),
        (global_roles_kernel, 1, two_of_16, {"ORDERED": False},
         race("x_ptr", "store(x_ptr", "load(x_ptr", roles=ROLES, programs=[(0, 0, 0)] * 2)),
        (global_ctas_kernel, 2, two_of_16, {"ORDERED": False, **PAIR},
         race("x_ptr", "store(x_ptr", "load(x_ptr", programs=[(0, 0, 0), (1, 0, 0)])),
        # No reduction of TMA hides another: a load comes after all of them, whose order is free.
        *(
            (summed_kernel, 3, sums, {"FAULT": fault, "resident": 3},
             race(("sum_desc", "sum_ptr"), "# add", "# load"))
            for fault in ("read", "relaxed")
        ),
    ),
    ids=named,
)  # fmt: skip
def test_what_races(kernel, ctas, arguments, options, finding):
    raced(kernel, (ctas,), arguments, **finding, **options)


@pytest.mark.parametrize(
    "kernel, arguments, fault, buffer, issued, accesses",
    (
        *(
            (own_copy_kernel, boxes(), fault, "tile[0]", LOAD, "copy issued by {} writes")
            for fault in ("read", "write")
        ),
        *(
            (wgmma_kernel, matrices(), fault, buffer, f"# {dot}", "async_dot issued by {} reads")
            for fault, buffer, dot in (
                *(("a", "a[0]", "second"), ("b1", "b[1]", "second"), ("b0", "b[0]", "first")),
            )
        ),
        (
            *(tcgen05_kernel, matrices(128), "operand", "b[0]"),
            *("async_dot(", "async_dot issued by {} reads"),
        ),
    ),
    ids=named,
)
def test_a_role_races_with_what_it_issued(kernel, arguments, fault, buffer, issued, accesses):
    options = B200 if kernel is tcgen05_kernel else {}
    between = (issued, f"# {fault}")
    raced(kernel, (1,), arguments, FAULT=fault, buffer=buffer, between=between, **options)
    for error in found(Race, kernel, (1,), arguments, FAULT=fault, **options):
        assert error.other in places(kernel, issued)
        assert "which " + accesses.format(DEFAULT) in str(error)


def test_a_race_is_an_error_with_a_report():
    error = found(Race, handover_kernel, (1,), ints(2, 16), FAULT="no wait", trace=True)[0]
    assert error.report.timeline.events and error.report.programs == 0
    assert not issubclass(Race, InvalidKernel)


@triton.jit
def total_kernel(x, out, n, B: tl.constexpr):
    i = tl.program_id(0) * B + tl.arange(0, B)
    tl.store(out, tl.sum(tl.load(x + i, mask=i < n, other=0.0)))


def test_one_value_from_several_programs_is_a_note_or_a_race():
    report = run(total_kernel, (4,), torch.ones(64), torch.zeros(1), 64, 16)
    (note,) = report.notes
    line = place(total_kernel, "tl.store")[1]
    assert f"programs (0, 0, 0), at {__file__}:{line}, and (1, 0, 0)" in note
    assert "element of out" in note and note.endswith("(strict=True)")
    raced(
        total_kernel, (4,), lambda: (torch.ones(64), torch.zeros(1), 64, 16), buffer="out",
        between=("tl.store", "tl.store"), strict=True,
    )  # fmt: skip


def test_one_program_may_store_a_value_again():
    out = torch.zeros(2)
    assert not run(total_kernel, (1,), torch.zeros(64), out, 64, 16, strict=True).notes
    assert not run(total_kernel, (1,), torch.zeros(64), out, 64, 16).notes
