"""Who puts the fence before a reader of the asynchronous proxy?

`store` writes a tile with its threads, `send` hands it on, by one of READERS. FENCE: whether
`store` has a fence between its write and its arrival. Any of them gives the tile, or its square.
"""

import torch
import triton
import triton.language as tl
import triton.language.extra.tlx as tlx
from triton.tools.tensor_descriptor import TensorDescriptor

ARCHITECTURES = {"wgmma": 90, "tcgen05.mma": 100}
READERS = (*ARCHITECTURES, "TMA store", "TMA reduce-add", "async_store", "async_remote_shmem_copy")
SIZE = tl.constexpr(64)


@triton.jit
def cells():
    return tl.arange(0, SIZE)[:, None] * SIZE + tl.arange(0, SIZE)[None, :]


@triton.jit
def store(x_ptr, tile, full, FENCE: tl.constexpr):
    tlx.local_store(tile[0], tl.load(x_ptr + cells()))
    if FENCE:
        tlx.fence("async_shared")
    tlx.barrier_arrive(full[0])


@triton.jit
def send(desc, y_ptr, tile, inbox, full, done, READER: tl.constexpr):
    tlx.barrier_wait(full[0], 0)
    if READER == "wgmma":
        product = tlx.async_dot_wait(0, tlx.async_dot(tile[0], tile[0]))
        tl.store(y_ptr + cells(), product.to(tl.bfloat16))
    elif READER == "tcgen05.mma":
        sums = tlx.local_alloc((SIZE, SIZE), tl.float32, 1, tlx.storage_kind.tmem)
        tlx.async_dot(tile[0], tile[0], sums[0], use_acc=False, mBarriers=[done[0]])
        tlx.barrier_wait(done[0], 0)
        tl.store(y_ptr + cells(), tlx.local_load(sums[0]).to(tl.bfloat16))
    elif READER == "async_remote_shmem_copy":  # to itself, in a cluster of one
        tlx.barrier_expect_bytes(done[0], 2 * SIZE * SIZE)
        tlx.async_remote_shmem_copy(inbox[0], tile[0], 0, done[0])
        tlx.barrier_wait(done[0], 0)
        tl.store(y_ptr + cells(), tlx.local_load(inbox[0]))
    else:
        if READER == "TMA store":
            tlx.async_descriptor_store(desc, tile[0], [0, 0])
        elif READER == "TMA reduce-add":
            tlx.async_descriptor_store(desc, tile[0], [0, 0], store_reduce="add")
        else:
            tlx.async_store(y_ptr, tile[0], 2 * SIZE * SIZE)
        tlx.async_descriptor_store_wait(0)


@triton.jit
def fence_kernel(x_ptr, desc, y_ptr, READER: tl.constexpr, FENCE: tl.constexpr):
    tile = tlx.local_alloc((SIZE, SIZE), tl.bfloat16, 1)
    inbox = tlx.local_alloc((SIZE, SIZE), tl.bfloat16, 1)
    full, done = tlx.alloc_barriers(1), tlx.alloc_barriers(1)
    with tlx.async_tasks():
        with tlx.async_task("default"):
            store(x_ptr, tile, full, FENCE)
        with tlx.async_task(num_warps=4):
            send(desc, y_ptr, tile, inbox, full, done, READER)


def main(reader: str, fence: bool = False) -> None:
    x = torch.randn(64, 64, generator=torch.Generator().manual_seed(2025)).bfloat16()
    y = torch.zeros_like(x)
    fence_kernel[(1,)](x, TensorDescriptor(y, [64, 64], [64, 1], [64, 64]), y, reader, fence)
    expected = x if reader not in ARCHITECTURES else (x.float() @ x.float()).bfloat16()
    torch.testing.assert_close(y, expected)
