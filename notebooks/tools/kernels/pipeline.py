"""The example of the chapter on the emulator: one role loads keys, another multiplies.

For each query the largest score over all keys, `max_j q . k_j`.

| role   | warps | work                                             |
|--------|------:|--------------------------------------------------|
| `load` |     1 | asks TMA for one block of keys after the other   |
| `math` |     4 | multiplies, releases the buffer, keeps the maxima |

| barrier      | arrivals         | who fills                  | who drains   |
|--------------|------------------|----------------------------|--------------|
| `k_full[i]`  | 1, and the bytes | `load` announces, TMA does | `math` waits |
| `k_empty[i]` | 1                | `math`                     | `load` waits |

Run it with `python -m tritonemu notebooks/tools/kernels/pipeline.py:main`.
"""

import torch
import triton
import triton.language as tl
import triton.language.extra.tlx as tlx
from triton.tools.tensor_descriptor import TensorDescriptor


@triton.jit
def load(k_desc, k, k_full, k_empty, blocks, BLOCK_N: tl.constexpr, BYTES: tl.constexpr):
    """Fill the buffers in turn."""
    for i in tl.range(blocks):
        stage, phase = i % 2, i // 2 % 2
        tlx.barrier_wait(k_empty[stage], phase ^ 1)
        tlx.barrier_expect_bytes(k_full[stage], BYTES)
        tlx.async_descriptor_load(k_desc, k[stage], [i * BLOCK_N, 0], k_full[stage])


@triton.jit
def math(q_ptr, out_ptr, k, k_full, k_empty, blocks, BLOCK_M: tl.constexpr, HEAD_DIM: tl.constexpr):
    """Multiply with the buffers in turn, and store the largest score of each row."""
    rows, dims = tl.arange(0, BLOCK_M), tl.arange(0, HEAD_DIM)
    q = tl.load(q_ptr + rows[:, None] * HEAD_DIM + dims[None, :])
    best = tl.full([BLOCK_M], float("-inf"), tl.float32)
    for i in tl.range(blocks):
        stage, phase = i % 2, i // 2 % 2
        tlx.barrier_wait(k_full[stage], phase)
        scores = tlx.async_dot(q, tlx.local_trans(k[stage]))
        scores = tlx.async_dot_wait(0, scores)
        tlx.barrier_arrive(k_empty[stage])
        best = tl.maximum(best, tl.max(scores, 1))
    tl.store(out_ptr + rows, best)


@triton.jit
def pipeline_kernel(
    q_ptr,
    k_desc,
    out_ptr,
    blocks,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    HEAD_DIM: tl.constexpr,
):
    """Two buffers of BLOCK_N keys between two roles."""
    k = tlx.local_alloc((BLOCK_N, HEAD_DIM), tl.bfloat16, 2)
    k_full = tlx.alloc_barriers(2)
    k_empty = tlx.alloc_barriers(2)
    with tlx.async_tasks():
        with tlx.async_task("default"):
            math(q_ptr, out_ptr, k, k_full, k_empty, blocks, BLOCK_M, HEAD_DIM)
        with tlx.async_task(num_warps=1):
            load(k_desc, k, k_full, k_empty, blocks, BLOCK_N, 2 * BLOCK_N * HEAD_DIM)


def main(blocks: int = 5, device: str = "cpu") -> None:
    """64 queries, `blocks` blocks of 128 keys, head_dim 64; the result must be right."""
    make = torch.Generator().manual_seed(2025)
    q = torch.randn(64, 64, generator=make).to(device, torch.bfloat16)
    k = torch.randn(128 * blocks, 64, generator=make).to(device, torch.bfloat16)
    out = torch.full((64,), float("nan"), device=device)
    k_desc = TensorDescriptor(k, [128 * blocks, 64], [64, 1], [128, 64])
    pipeline_kernel[(1,)](q, k_desc, out, blocks, 64, 128, 64)
    torch.testing.assert_close(out, (q.float() @ k.float().T).amax(1))
