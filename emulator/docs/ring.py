"""A ring of two slots: a producer copies tiles in, a consumer adds them up."""

import torch
import triton
import triton.language as tl
import triton.language.extra.tlx as tlx
from triton.tools.tensor_descriptor import TensorDescriptor


@triton.jit
def total_kernel(x_desc, out_ptr, TILES: tl.constexpr, SLOTS: tl.constexpr):
    x = tlx.local_alloc((64, 64), tl.float16, SLOTS)
    full = tlx.alloc_barriers(SLOTS)
    empty = tlx.alloc_barriers(SLOTS)
    with tlx.async_tasks():
        with tlx.async_task("default"):
            total = tl.zeros([64], tl.float32)
            for i in tl.range(0, TILES):
                slot, phase = i % SLOTS, i // SLOTS & 1
                tlx.barrier_wait(full[slot], phase)
                tlx.barrier_arrive(empty[slot])  # too early: the slot is still to be read
                total += tl.sum(tlx.local_load(x[slot]).to(tl.float32), 1)
            tl.store(out_ptr + tl.arange(0, 64), total)
        with tlx.async_task(num_warps=1):
            for i in tl.range(0, TILES):
                slot, phase = i % SLOTS, i // SLOTS & 1
                tlx.barrier_wait(empty[slot], phase ^ 1)
                tlx.barrier_expect_bytes(full[slot], 64 * 64 * 2)
                tlx.async_descriptor_load(x_desc, x[slot], [64 * i, 0], full[slot])


def main():
    x, out = torch.ones(256, 64, device="cuda").half(), torch.empty(64, device="cuda")
    total_kernel[(1,)](TensorDescriptor.from_tensor(x, [64, 64]), out, TILES=4, SLOTS=2)
    assert torch.equal(out, torch.full_like(out, 256))


if __name__ == "__main__":
    main()
