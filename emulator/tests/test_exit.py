"""The end of a CTA, whose memory must not be in use any more, and fences before copies."""

import re

import pytest
import torch
import triton
import triton.language as tl

from emulator.tests.checking import PAIR, box, build, everywhere, found, grid2, place, refused, tlx
from tritonemu import EarlyExit, InvalidKernel, MissingFence, run

pytestmark = pytest.mark.tlx

# The end of a CTA of a cluster.


@triton.jit
def store_kernel(y_ptr, TOGETHER: tl.constexpr):
    cell = tlx.local_alloc((16,), tl.float32, 1)
    rank = tlx.cluster_cta_rank()
    if rank == 0:
        for i in range(20):
            tl.store(y_ptr + i, 1.0)
        tlx.remote_shmem_store(cell[0], tl.full((16,), 1.0, tl.float32), 1)
    if TOGETHER:
        tlx.cluster_barrier()


@triton.jit
def arrival_kernel(y_ptr, TOGETHER: tl.constexpr):
    ready, last = tlx.alloc_barriers(1), tlx.alloc_barriers(1)
    rank = tlx.cluster_cta_rank()
    tlx.barrier_arrive(ready, 1, remote_cta_rank=1 - rank)
    tlx.barrier_wait(ready, 0)
    tl.store(y_ptr + rank, 1.0)
    if rank == 0:
        tlx.barrier_arrive(last, 1, remote_cta_rank=1)
    elif TOGETHER:
        tlx.barrier_wait(last, 0)


@triton.jit
def copy_kernel(y_ptr, TOGETHER: tl.constexpr):
    """Each CTA waits for what it gets, and not for what it gives."""
    given = tlx.local_alloc((16,), tl.float32, 1)
    taken = tlx.local_alloc((16,), tl.float32, 1)
    full = tlx.alloc_barriers(1)
    rank = tlx.cluster_cta_rank()
    tlx.local_store(given[0], tl.full((16,), 1.0, tl.float32))
    tlx.fence("async_shared")
    tlx.barrier_expect_bytes(full, 64)
    tlx.async_remote_shmem_copy(taken[0], given[0], 1 - rank, full)
    tlx.barrier_wait(full, 0)
    tl.store(y_ptr + rank * 16 + tl.arange(0, 16), tlx.local_load(taken[0]))
    if TOGETHER:
        tlx.cluster_barrier()


@triton.jit
def _give(bars, rank):
    tlx.barrier_arrive(bars[0], 1, remote_cta_rank=1 - rank)


@triton.jit
def task_kernel(y_ptr, TOGETHER: tl.constexpr):
    """The last of two arrivals comes in a task."""
    bars = tlx.alloc_barriers(1)
    rank = tlx.cluster_cta_rank()
    with tlx.async_tasks():
        with tlx.async_task("default"):
            if TOGETHER:
                tlx.barrier_wait(bars[0], 0)
            tl.store(y_ptr + rank, 1.0)
        with tlx.async_task(num_warps=1):
            _give(bars, rank)


@pytest.mark.parametrize(
    "kernel, what, text",
    (
        (store_kernel, "cell[0]|cell", "remote_shmem_store"),
        (arrival_kernel, "last", "arrive(last"),
        (copy_kernel, "given", "async_remote_shmem_copy"),
        (task_kernel, "bars", None),
    ),
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_a_cta_stays_while_another_one_needs_it(kernel, what, text):
    def arguments():
        return (torch.zeros(32),)

    everywhere(kernel, (4,), arguments, TOGETHER=True, **PAIR)
    for error in found(EarlyExit, kernel, (4,), arguments, TOGETHER=False, **PAIR):
        assert re.fullmatch(what.replace("[", r"\["), error.what)
        assert (error.file, error.line) == place(*((kernel, text) if text else (_give, "arrive")))
        assert re.search(r"CTA \d may end before this use of its", str(error))
    run(kernel, (4,), *arguments(), TOGETHER=False, races=False, **PAIR)


@triton.jit
def pair_kernel(x_ptr, TASKS: tl.constexpr, LEAVE: tl.constexpr):
    """The MMA of a pair, and an arrival for which CTA 0 does not wait."""
    a = tlx.local_alloc((128, 16), tl.bfloat16, 1)
    b = tlx.local_alloc((16, 32), tl.bfloat16, 1)
    acc = tlx.local_alloc((128, 64), tl.float32, 1, tlx.storage_kind.tmem)
    done, last = tlx.alloc_barriers(1), tlx.alloc_barriers(1)
    rank = tlx.cluster_cta_rank()
    tlx.local_store(a[0], tl.full((128, 16), 1.0, tl.bfloat16))
    tlx.local_store(b[0], tl.full((16, 32), 1.0, tl.bfloat16))
    tlx.cluster_barrier()
    tlx.async_dot(a[0], b[0], acc[0], use_acc=False, two_ctas=True, mBarriers=[done])
    if TASKS:
        with tlx.async_tasks(no_ending_cluster_sync=LEAVE):
            with tlx.async_task("default"):
                tlx.barrier_wait(done, 0)
                tl.store(x_ptr + rank, 1.0)
            with tlx.async_task(num_warps=1):
                if rank == 1:
                    tlx.barrier_arrive(last, 1, remote_cta_rank=0)  # last
    else:
        tlx.barrier_wait(done, 0)
        tl.store(x_ptr + rank, 1.0)
        if rank == 1:
            tlx.barrier_arrive(last, 1, remote_cta_rank=0)


@pytest.mark.parametrize("tasks, leave", ((False, False), (True, False), (True, True)))
def test_ctas_with_mmas_of_pairs_wait_for_each_other(tasks, leave):
    """The compiler sees to it, unless it is told not to; elsewhere it does not."""
    constants = {"TASKS": tasks, "LEAVE": leave}
    compiled = build(pair_kernel, {"x_ptr": "*fp32"}, constants, capability=100, **PAIR)
    waits = len(re.findall(r"barrier\.cluster\.wait", compiled.asm["ptx"]))
    assert waits == (2 if leave else 3)

    def arguments():
        return (torch.zeros(2),)

    options = {"arch": "sm_100", **constants, **PAIR}
    if not leave:
        everywhere(pair_kernel, (2,), arguments, **options)
        return
    for error in found(EarlyExit, pair_kernel, (2,), arguments, **options, line="# last"):
        assert error.what == "last"


# The end of any CTA.


@triton.jit
def pending_kernel(x_desc, y_desc, y_ptr, HOW: tl.constexpr, WAIT: tl.constexpr):
    tile = tlx.local_alloc((16, 16), tl.float32, 1)
    full = tlx.alloc_barriers(1)
    if HOW == "load":
        tlx.barrier_expect_bytes(full, 1024)
        tlx.async_descriptor_load(x_desc, tile[0], [0, 0], full)  # load
        if WAIT:
            tlx.barrier_wait(full, 0)
    elif HOW == "store":
        tlx.local_store(tile[0], tl.full((16, 16), 1.0, tl.float32))
        tlx.async_descriptor_store(y_desc, tile[0], [0, 0])  # store
        if WAIT:
            tlx.async_descriptor_store_wait(0)
    else:
        lanes = grid2(16, 16)
        tlx.async_load(y_ptr + lanes, tile[0])
        tlx.async_load_commit_group()


@pytest.mark.parametrize("how", ("load", "store", "threads"))
def test_a_copy_ends_before_its_memory(how):
    """A cp.async is its thread's own, and ends with it."""

    def arguments():
        x, y = torch.ones(16, 16), torch.ones(16, 16)
        return box(x, 16, 16), box(y, 16, 16), y

    everywhere(pending_kernel, (2,), arguments, HOW=how, WAIT=True)
    if how == "threads":
        return
    keywords = {"HOW": how, "WAIT": False, "line": f"# {how}"}
    for error in found(EarlyExit, pending_kernel, (2,), arguments, **keywords):
        assert error.what == "tile" and "issued by default of CTA" in error.role


# Fences.


@triton.jit
def fence_kernel(x_ptr, y_ptr, FENCE: tl.constexpr, BULK: tl.constexpr):
    tile = tlx.local_alloc((16, 16), tl.float32, 1)
    inbox = tlx.local_alloc((16, 16), tl.float32, 1)
    full = tlx.alloc_barriers(1)
    rank = tlx.cluster_cta_rank()
    if FENCE == "before the store":
        tlx.fence("async_shared")
    tlx.local_store(tile[0], tl.load(x_ptr + grid2(16, 16)))  # store
    if FENCE == "of another scope":
        tlx.fence("gpu")
    elif FENCE == "of no scope":
        tlx.fence("cta")
    elif FENCE == "deprecated":
        tlx.fence_async_shared()
    elif FENCE == "inline":
        tl.inline_asm_elementwise(
            "fence.proxy.async.shared::cta; mov.b32 $0, 0;", "=r", [], tl.int32, False, 1
        )
    elif FENCE == "right":
        tlx.fence("async_shared")
    if BULK:
        tlx.async_store(y_ptr + rank * 256, tile[0], 1024)
        tlx.async_descriptor_store_wait(0)
    else:
        tlx.barrier_expect_bytes(full, 1024)
        tlx.async_remote_shmem_copy(inbox[0], tile[0], 1 - rank, full)
        tlx.barrier_wait(full, 0)
        lanes = grid2(16, 16)
        tl.store(y_ptr + rank * 256 + lanes, tlx.local_load(inbox[0]))
    tlx.cluster_barrier()


def tiles():
    return torch.arange(256.0).view(16, 16), torch.zeros(2, 16, 16)


@pytest.mark.parametrize("bulk", (False, True))
@pytest.mark.parametrize("fence", ("right", "deprecated"))
def test_fences_before_copies(fence, bulk):
    """The compiler leaves them to the kernel."""
    everywhere(fence_kernel, (2,), tiles, lambda x, _: x, FENCE=fence, BULK=bulk, **PAIR)
    types = {"x_ptr": "*fp32", "y_ptr": "*fp32"}
    for name, fences in (("none", 0), (fence, 1)):
        ptx = build(fence_kernel, types, {"FENCE": name, "BULK": bulk}, **PAIR).asm["ptx"]
        assert len(re.findall(r"fence\.proxy\.async", ptx)) == fences


@pytest.mark.parametrize("bulk", (False, True))
@pytest.mark.parametrize("fence", ("none", "before the store", "of another scope"))
def test_a_missing_fence(fence, bulk):
    keywords = {"FENCE": fence, "BULK": bulk, **PAIR}
    copy = "async_store(" if bulk else "async_remote_shmem_copy("
    message = r'writes at .*; tlx.fence\("async_shared"\) must lie between'
    for error in found(MissingFence, fence_kernel, (2,), tiles, message, line=copy, **keywords):
        assert error.other == place(fence_kernel, "# store") and error.buffer == "tile[0]"
    run(fence_kernel, (2,), *tiles(), races=False, **keywords)


def test_scopes_of_fences():
    message = 'must be "gpu", "sys" or "async_shared", got \'cta\''
    keywords = {"FENCE": "of no scope", "BULK": True, "grid": (2,), **PAIR}
    refused(InvalidKernel, message, fence_kernel, *tiles(), line='tlx.fence("cta")', **keywords)


@triton.jit
def handed_over_kernel(x_ptr, y_ptr, WHERE: tl.constexpr):
    """One role stores, another one copies."""
    tile = tlx.local_alloc((16, 16), tl.float32, 1)
    full = tlx.alloc_barriers(1)
    with tlx.async_tasks():
        with tlx.async_task("default"):
            tlx.local_store(tile[0], tl.load(x_ptr + grid2(16, 16)))
            if WHERE == "at the store":
                tlx.fence("async_shared")
            tlx.barrier_arrive(full)
            if WHERE == "too late":
                tlx.fence("async_shared")
        with tlx.async_task(num_warps=1):
            if WHERE == "too early":
                tlx.fence("async_shared")
            tlx.barrier_wait(full, 0)
            if WHERE == "at the copy":
                tlx.fence("async_shared")
            tlx.async_store(y_ptr, tile[0], 1024)
            tlx.async_descriptor_store_wait(0)


@pytest.mark.parametrize("where", ("at the store", "at the copy"))
def test_a_fence_on_the_way_between_roles(where):
    def once():
        x, y = tiles()
        return x, y[0]

    everywhere(handed_over_kernel, (1,), once, lambda x, _: x, WHERE=where)


@pytest.mark.parametrize("where", ("too early", "too late", "nowhere"))
def test_a_fence_beside_the_way(where):
    found(MissingFence, handed_over_kernel, (1,), tiles, WHERE=where)
