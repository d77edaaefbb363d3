"""Exercise: this kernel runs, and its result is right for four blocks of keys. What is missing?

GDPA with ReLU, persistent: several tiles of 64 queries, one after the other, over the same keys.
Q has two slots, K and V have two slots each.

| role   | warps | work                                                    |
|--------|------:|---------------------------------------------------------|
| `load` |     1 | Q of a tile, then K and V of one block after another    |
| `math` |     4 | S = Q K^T, P = relu(S), O += P V; the output of a tile  |

| barrier       | arrivals         | who fills                  | who drains   |
|---------------|------------------|----------------------------|--------------|
| `q_full[i]`   | 1, and the bytes | `load` announces, TMA does | `math` waits |
| `kv_full[i]`  | 1, and the bytes | `load` announces, TMA does | `math` waits |
| `kv_empty[i]` | 1                | `math`                     | `load` waits |

Run it with `python -m tritonemu notebooks/tools/kernels/planted.py:main`.
"""

import torch
import triton
import triton.language as tl
import triton.language.extra.tlx as tlx
from triton.tools.tensor_descriptor import TensorDescriptor


@triton.jit
def load(q_desc, k_desc, v_desc, q, k, v, q_full, kv_full, kv_empty, tiles, blocks):
    step = 0
    for tile in tl.range(tiles):
        slot = tile % 2
        tlx.barrier_expect_bytes(q_full[slot], 2 * 64 * 64)
        tlx.async_descriptor_load(q_desc, q[slot], [tile * 64, 0], q_full[slot])
        for i in tl.range(blocks):
            stage, phase = step % 2, step // 2 % 2
            tlx.barrier_wait(kv_empty[stage], phase ^ 1)
            tlx.barrier_expect_bytes(kv_full[stage], 2 * 2 * 64 * 64)
            tlx.async_descriptor_load(k_desc, k[stage], [i * 64, 0], kv_full[stage])
            tlx.async_descriptor_load(v_desc, v[stage], [i * 64, 0], kv_full[stage])
            step += 1


@triton.jit
def math(out_desc, q, k, v, q_full, kv_full, kv_empty, tiles, blocks):
    step = 0
    for tile in tl.range(tiles):
        slot = tile % 2
        tlx.barrier_wait(q_full[slot], tile // 2 % 2)
        out = tl.zeros([64, 64], tl.float32)
        for _ in tl.range(blocks):
            stage, phase = step % 2, step // 2 % 2
            tlx.barrier_wait(kv_full[stage], phase)
            scores = tlx.async_dot(q[slot], tlx.local_trans(k[stage]))
            scores = tlx.async_dot_wait(0, scores)
            p = tl.maximum(scores, 0.0).to(tl.bfloat16)
            out = tlx.async_dot(p, v[stage], out)
            out = tlx.async_dot_wait(0, out)
            tlx.barrier_arrive(kv_empty[stage])
            step += 1
        out_desc.store([tile * 64, 0], out)


@triton.jit
def relu_kernel(q_desc, k_desc, v_desc, out_desc, tiles, blocks):
    q = tlx.local_alloc((64, 64), tl.bfloat16, 2)
    k = tlx.local_alloc((64, 64), tl.bfloat16, 2)
    v = tlx.local_alloc((64, 64), tl.bfloat16, 2)
    q_full = tlx.alloc_barriers(2)
    kv_full = tlx.alloc_barriers(2)
    kv_empty = tlx.alloc_barriers(2)
    with tlx.async_tasks():
        with tlx.async_task("default"):
            math(out_desc, q, k, v, q_full, kv_full, kv_empty, tiles, blocks)
        with tlx.async_task(num_warps=1):
            load(q_desc, k_desc, v_desc, q, k, v, q_full, kv_full, kv_empty, tiles, blocks)


def main(blocks: int = 4, tiles: int = 5) -> None:
    make = torch.Generator().manual_seed(2025)
    q = torch.randn(64 * tiles, 64, generator=make).bfloat16()
    k, v = (torch.randn(64 * blocks, 64, generator=make).bfloat16() for _ in range(2))
    out = torch.full((64 * tiles, 64), float("nan"))
    descriptors = [
        TensorDescriptor(x, list(x.shape), list(x.stride()), [64, 64]) for x in (q, k, v, out)
    ]
    relu_kernel[(1,)](*descriptors, tiles, blocks)
    p = (q.float() @ k.float().T).relu().bfloat16().float()
    torch.testing.assert_close(out, p @ v.float(), atol=1e-1, rtol=1e-2)
