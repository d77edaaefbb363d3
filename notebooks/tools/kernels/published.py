"""Seven mistakes of published kernels, each in a kernel of our own as small as it can be.

Each function launches its kernel on CPU tensors, as it was with `mended=False`, and checks the
result. `python -m tritonemu notebooks/tools/kernels/published.py:slot` says what is found.
"""

import torch
import triton
import triton.language as tl
import triton.language.extra.tlx as tlx
from triton.tools.tensor_descriptor import TensorDescriptor

PAIR = (2, 1, 1)


@triton.jit
def slot_kernel(x_ptr, out_ptr, STEPS: tl.constexpr, MENDED: tl.constexpr):
    rank, rows = tlx.cluster_cta_rank(), tl.arange(0, 16)
    slot = tlx.local_alloc((16,), tl.float32, 1)
    full, empty = tlx.alloc_barriers(1), tlx.alloc_barriers(1)
    tlx.cluster_barrier()
    for i in tl.range(STEPS):
        part = tl.load(x_ptr + (i * 2 + rank) * 16 + rows)
        tlx.barrier_expect_bytes(full, 64)
        if MENDED:
            tlx.barrier_wait(empty, i % 2 ^ 1)
        tlx.async_remote_shmem_store(slot[0], part, 1 - rank, full)
        tlx.barrier_wait(full, i % 2)
        total = part + tlx.local_load(slot[0])
        if MENDED:
            tlx.barrier_arrive(empty, 1, 1 - rank)
        tl.store(out_ptr + (i * 2 + rank) * 16 + rows, total)
    tlx.cluster_barrier()


def slot(mended: bool = False, steps: int = 3) -> None:
    """Two CTAs exchange partial sums through one slot of shared memory."""
    x = torch.arange(2.0 * steps).reshape(steps, 2, 1).expand(steps, 2, 16).contiguous()
    out = torch.full_like(x, torch.nan)
    slot_kernel[(2,)](x, out, STEPS=steps, MENDED=mended, ctas_per_cga=PAIR)
    expected = x.sum(1, keepdim=True).expand_as(x)
    assert torch.equal(out, expected), _told(out[:, :, 0], expected[:, :, 0])


@triton.jit
def add_kernel(x_ptr, out_desc):
    rows = tl.arange(0, 16)[:, None] * 16 + tl.arange(0, 16)[None, :]
    block = tl.load(x_ptr + tl.program_id(0) * 256 + rows)
    out_desc.atomic_add([0, 0], block)


def add(mended: bool = False) -> None:
    """Two programs add their parts to a gradient, which `torch.empty` has made."""
    x, out = torch.ones(2, 16, 16), torch.full((16, 16), 7.0)  # what was in memory before
    if mended:
        out.zero_()
    add_kernel[(2,)](x, TensorDescriptor.from_tensor(out, [16, 16]))
    assert torch.equal(out, x.sum(0)), _told(out[0, :1], x.sum(0)[0, :1])


@triton.jit
def last_kernel(x_ptr, out_desc, MENDED: tl.constexpr):
    rows = tl.arange(0, 16)[:, None] * 16 + tl.arange(0, 16)[None, :]
    block = tl.load(x_ptr + tl.program_id(0) * 256 + rows)
    if MENDED:
        out_desc.atomic_add([0, 0], block)
    else:
        out_desc.store([0, 0], block)


def last(mended: bool = False) -> None:
    """Two programs have a part each of one gradient, and store it."""
    x, out = torch.ones(2, 16, 16), torch.zeros(16, 16)
    x[1] = 2
    last_kernel[(2,)](x, TensorDescriptor.from_tensor(out, [16, 16]), MENDED=mended)
    assert torch.equal(out, x.sum(0)), _told(out[0, :1], x.sum(0)[0, :1])


@triton.jit
def threads_kernel(out_ptr, THREADS: tl.constexpr):
    with tlx.async_tasks():
        with tlx.async_task("default"):
            tlx.named_barrier_wait(9, THREADS)
        with tlx.async_task(num_warps=4):
            tlx.named_barrier_arrive(9, THREADS)


def threads(mended: bool = False) -> None:
    """A role of eight warps waits for one of four, on a barrier of 256 threads."""
    threads_kernel[(1,)](None, THREADS=384 if mended else 256, num_warps=8)


@triton.jit
def walk_kernel(out_ptr, ends_ptr, tiles, BLOCK: tl.constexpr, MENDED: tl.constexpr):
    sequence, row, lanes = 0, tl.load(ends_ptr), tl.arange(0, BLOCK)
    end = tl.load(ends_ptr + 1)
    if MENDED:
        while row >= end:
            sequence += 1
            end = tl.load(ends_ptr + sequence + 1)
    for i in tl.range(tiles):
        tl.store(out_ptr + row + lanes, lanes * 0 + 1.0, mask=row + lanes < end)
        row += BLOCK
        if row >= end and i < tiles - 1:
            row, sequence = end, sequence + 1
            end = tl.load(ends_ptr + sequence + 1)
            if MENDED:
                while row >= end:
                    sequence += 1
                    end = tl.load(ends_ptr + sequence + 1)


def walk(mended: bool = False, lengths: tuple[int, ...] = (16, 0, 16)) -> None:
    """A persistent program walks over tiles of sequences, one of which is empty."""
    ends = torch.tensor((0, *lengths)).cumsum(0).int()
    out, tiles = torch.zeros(sum(lengths)), sum(-(-length // 16) for length in lengths)
    walk_kernel[(1,)](out, ends, tiles, BLOCK=16, MENDED=mended)
    assert out.eq(1).all(), f"{int(out.eq(0).sum())} of {len(out)} rows are not written"


@triton.jit
def early_kernel(a_desc, b_desc, out_ptr, MENDED: tl.constexpr):
    a = tlx.local_alloc((128, 64), tl.bfloat16, 2)
    b = tlx.local_alloc((64, 64), tl.bfloat16, 2)
    acc = tlx.local_alloc((128, 64), tl.float32, 1, tlx.storage_kind.tmem)
    full, done = tlx.alloc_barriers(2), tlx.alloc_barriers(2)
    with tlx.async_tasks():
        with tlx.async_task("default"):
            tlx.barrier_wait(done[1 if MENDED else 0], 0)
            offsets = tl.arange(0, 128)[:, None] * 64 + tl.arange(0, 64)[None, :]
            tl.store(out_ptr + offsets, tlx.local_load(acc[0]))
        with tlx.async_task(num_warps=1):
            for i in tl.static_range(2):
                tlx.barrier_expect_bytes(full[i], 2 * 64 * (128 + 64))
                tlx.async_descriptor_load(a_desc, a[i], [0, i * 64], full[i])
                tlx.async_descriptor_load(b_desc, b[i], [i * 64, 0], full[i])
                tlx.barrier_wait(full[i], 0)
                tlx.async_dot(a[i], b[i], acc[0], use_acc=i > 0, mBarriers=[done[i]])


def early(mended: bool = False) -> None:
    """A product in two steps, read after the first; for sm_100."""
    a, b, out = torch.ones(128, 128), torch.ones(128, 64), torch.zeros(128, 64)
    a_desc = TensorDescriptor.from_tensor(a.bfloat16(), [128, 64])
    b_desc = TensorDescriptor.from_tensor(b.bfloat16(), [64, 64])
    early_kernel[(1,)](a_desc, b_desc, out, MENDED=mended)
    assert torch.equal(out, a @ b), _told(out, a @ b)


@triton.jit
def ahead_kernel(x_desc, out_ptr, TILES: tl.constexpr, MENDED: tl.constexpr):
    tiles, full = tlx.local_alloc((16,), tl.float32, 2), tlx.alloc_barriers(2)
    for i in tl.static_range(TILES + 1):
        if i < TILES or not MENDED:
            tlx.barrier_expect_bytes(full[i % 2], 64)
            tlx.async_descriptor_load(x_desc, tiles[i % 2], [i * 16], full[i % 2])
        if i > 0:
            tlx.barrier_wait(full[(i - 1) % 2], (i - 1) // 2 % 2)
            tile = tlx.local_load(tiles[(i - 1) % 2])
            tl.store(out_ptr + (i - 1) * 16 + tl.arange(0, 16), tile)


def ahead(mended: bool = False, tiles: int = 3) -> None:
    """A program loads the tile after the one that it reads, and one more than there are."""
    x, out = torch.arange(16.0 * tiles), torch.zeros(16 * tiles)
    x_desc = TensorDescriptor.from_tensor(x, [16])
    ahead_kernel[(1,)](x_desc, out, TILES=tiles, MENDED=mended)
    assert torch.equal(out, x), _told(out, x)


def _told(got: torch.Tensor, expected: torch.Tensor) -> str:
    """The first element that is wrong."""
    index = got.ne(expected).nonzero()[0].tolist()
    return f"element {index} is {got[tuple(index)]:g}, not {expected[tuple(index)]:g}"
