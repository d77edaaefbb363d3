"""Ten mistakes, one at a time, in two kernels: what tools find is compared on them.

    python notebooks/tools/kernels/seeded.py FAULT [DEVICE]     # AssertionError: a wrong result

`pipeline_kernel` doubles a matrix: `load` fills two buffers by TMA, the default task doubles them
into one of two others, from where TMA stores them. `sum_kernel` adds up a vector, each program its
part.
"""

import sys

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

try:
    import triton.language.extra.tlx as tlx
except ImportError:  # Triton itself has none, and can run the sum
    tlx = None

PIPELINE = {
    "no wait before the read": "the copy may not have come",
    "no wait before the next copy": "it overwrites what is being read",
    "release before the read": "the next copy overwrites what is being read",
    "no wait for the store": "the buffer changes while TMA reads it",
    "wait for the other phase": "it passes at once, and blocks later",
    "twice the bytes": "the barrier waits for more than comes",
    "one arrival too many expected": "the barrier waits for more than come",
}
SUM = {
    "no mask": "a store behind the end of the tensor",
    "plain addition": "programs load and store one element",
    "addition in two atomics": "one program's part is lost, rarely",
}
CORRECT = {"none": "the pipeline", "none in the sum": "the sum"}
FAULTS = {**CORRECT, **PIPELINE, **SUM}
ROWS, COLUMNS = 64, 64


@triton.jit
def load(x_desc, x, full, empty, steps, FAULT: tl.constexpr):
    for i in tl.range(steps):
        stage, phase = i % 2, i // 2 % 2
        if FAULT != "no wait before the next copy":
            tlx.barrier_wait(empty[stage], phase ^ 1)
        tlx.barrier_expect_bytes(full[stage], 16384 * (2 if FAULT == "twice the bytes" else 1))
        tlx.async_descriptor_load(x_desc, x[stage], [i * 64, 0], full[stage])


@triton.jit
def double(out_desc, x, y, full, empty, steps, FAULT: tl.constexpr):
    for i in tl.range(steps):
        stage, phase = i % 2, i // 2 % 2
        if FAULT == "wait for the other phase":
            tlx.barrier_wait(full[stage], phase ^ 1)
        elif FAULT != "no wait before the read":
            tlx.barrier_wait(full[stage], phase)
        if FAULT == "release before the read":
            tlx.barrier_arrive(empty[stage])
        value = tlx.local_load(x[stage]) * 2
        if FAULT != "release before the read":
            tlx.barrier_arrive(empty[stage])
        if FAULT != "no wait for the store":
            tlx.async_descriptor_store_wait(1)
        tlx.local_store(y[stage], value)
        tlx.fence_async_shared()
        tlx.async_descriptor_store(out_desc, y[stage], [i * 64, 0])
    tlx.async_descriptor_store_wait(0)


@triton.jit
def pipeline_kernel(x_desc, out_desc, steps, FAULT: tl.constexpr):
    x = tlx.local_alloc((64, 64), tl.float32, 2)
    y = tlx.local_alloc((64, 64), tl.float32, 2)
    full = tlx.alloc_barriers(2)
    empty = tlx.alloc_barriers(2, 2 if FAULT == "one arrival too many expected" else 1)
    with tlx.async_tasks():
        with tlx.async_task("default"):
            double(out_desc, x, y, full, empty, steps, FAULT)
        with tlx.async_task(num_warps=1):
            load(x_desc, x, full, empty, steps, FAULT)


@triton.jit
def sum_kernel(x_ptr, each_ptr, sum_ptr, n, FAULT: tl.constexpr):
    offsets = tl.program_id(0) * 64 + tl.arange(0, 64)
    x = tl.load(x_ptr + offsets, mask=offsets < n, other=0)
    if FAULT == "no mask":
        tl.store(each_ptr + offsets, x)
    else:
        tl.store(each_ptr + offsets, x, mask=offsets < n)
    part = tl.sum(x)
    if FAULT == "plain addition":
        tl.store(sum_ptr, tl.load(sum_ptr) + part)
    elif FAULT == "addition in two atomics":
        old = tl.atomic_add(sum_ptr, 0)
        tl.atomic_xchg(sum_ptr, old + part)
    else:
        tl.atomic_add(sum_ptr, part)


def main(fault: str = "none", device: str = "cpu", steps: int = 6) -> None:
    """Launch the kernel that may have this fault. Raises AssertionError for a wrong result."""
    if fault in ("none in the sum", *SUM):
        x = torch.arange(64 * steps - 10, device=device, dtype=torch.int32)
        each, total = torch.empty_like(x), torch.zeros(1, device=device, dtype=torch.int32)
        sum_kernel[(steps,)](x, each, total, len(x), FAULT=fault)
        assert int(total) == int(x.sum()) and torch.equal(each, x), "the sum is wrong"
        return
    x = torch.arange(ROWS * steps * COLUMNS, device=device, dtype=torch.float32)
    x, out = x.reshape(-1, COLUMNS), torch.zeros(ROWS * steps, COLUMNS, device=device)
    descriptors = (TensorDescriptor.from_tensor(t, [ROWS, COLUMNS]) for t in (x, out))
    pipeline_kernel[(1,)](*descriptors, steps, FAULT=fault)
    assert torch.equal(out, 2 * x), "the doubles are wrong"


if __name__ == "__main__":
    # ConSan keeps its state in memory that the launch has to give.
    triton.set_allocator(lambda size, *_: torch.empty(size, device="cuda", dtype=torch.int8))
    main(*sys.argv[1:])
