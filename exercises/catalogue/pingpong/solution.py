"""The ring with one consumer, software-pipelined: its activation beside its own MMA."""

import triton
import triton.language as tl
import triton.language.extra.tlx as tlx

from gdpa_kernels.device.ragged import store_rows
from gdpa_kernels.device.rows import fetch_rows
from gdpa_kernels.gdpa.device.activations import activate

BLOCK_N, STAGES = 64, 2

# >>> Predict the modelled cycles of one tile: 128 rows, 512 keys, head_dim 128. The tensor core
# works 8,192 of them; what does not overlap is at both ends.
# blank: CYCLES = None
CYCLES = 8192 + 1000 + 1000  # the first copies, an activation at each end
# <<<

ROWS = tl.constexpr(128)  # of a tile


@triton.jit
def kernel(
    q_desc, k_desc, v_desc, out_desc, cu_q_ptr, cu_k_ptr, tiles, scale,
    HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_N: tl.constexpr, STAGES: tl.constexpr,
    REGISTERS: tl.constexpr,
):  # fmt: skip
    DTYPE: tl.constexpr = tlx.dtype_of(q_desc)
    pid = tl.program_id(0)
    first_row = pid % tiles * ROWS
    head = pid // tiles % HEADS
    sequence = pid // tiles // HEADS
    start_q, start_k = tl.load(cu_q_ptr + sequence), tl.load(cu_k_ptr + sequence)
    len_q = tl.load(cu_q_ptr + sequence + 1) - start_q
    len_k = tl.load(cu_k_ptr + sequence + 1) - start_k
    blocks = tl.where(first_row < len_q, tl.maximum(tl.cdiv(len_k, BLOCK_N), 1), 1)
    q = tlx.local_alloc((ROWS, HEAD_DIM), DTYPE, 1)
    k = tlx.local_alloc((BLOCK_N, HEAD_DIM), DTYPE, STAGES)
    v = tlx.local_alloc((BLOCK_N, HEAD_DIM), DTYPE, STAGES)
    q_full = tlx.alloc_barriers(1)
    k_full = tlx.alloc_barriers(STAGES)
    v_full = tlx.alloc_barriers(STAGES)
    k_empty = tlx.alloc_warp_barrier(STAGES, 8)
    v_empty = tlx.alloc_warp_barrier(STAGES, 8)

    with tlx.async_tasks():
        with tlx.async_task("default"):
            fetch_rows(q_desc, q[0], q_full[0], start_q, len_q, head, first_row)
            for block in tl.range(0, blocks):
                key = block * BLOCK_N
                stage = block % STAGES
                phase = (block // STAGES) & 1
                tlx.barrier_wait(k_empty[stage], phase ^ 1)
                fetch_rows(k_desc, k[stage], k_full[stage], start_k, len_k, head, key)
                tlx.barrier_wait(v_empty[stage], phase ^ 1)
                fetch_rows(v_desc, v[stage], v_full[stage], start_k, len_k, head, key)
        with tlx.async_task(num_warps=8, registers=REGISTERS):
            acc = tl.zeros([ROWS, HEAD_DIM], tl.float32)
            tlx.barrier_wait(q_full[0], 0)
            # There is at least one block; without keys it is zero. Here S and P of block 0.
            tlx.barrier_wait(k_full[0], 0)
            s = tlx.async_dot(q[0], tlx.local_trans(k[0]))
            s = tlx.async_dot_wait(0, s)
            tlx.barrier_arrive(k_empty[0])
            p = activate(s, scale, "gelu_tanh", True)
            # >>> For block 1, 2, ...: issue S of this block, then acc += P V of the block
            # before it, whose P is here; async_dot_wait(1, s) waits until only the last MMA is
            # still in flight. The activation of the new S runs beside P V. Let go of each
            # buffer as soon as its MMA has ended. Write p.to(DTYPE) before the MMAs. Behind the
            # loop comes the last P V.
            for block in tl.range(1, blocks):
                stage = block % STAGES
                v_stage = (block - 1) % STAGES
                tlx.barrier_wait(k_full[stage], (block // STAGES) & 1)
                tlx.barrier_wait(v_full[v_stage], ((block - 1) // STAGES) & 1)
                p = p.to(DTYPE)
                s = tlx.async_dot(q[0], tlx.local_trans(k[stage]))
                acc = tlx.async_dot(p, v[v_stage], acc)
                s = tlx.async_dot_wait(1, s)
                tlx.barrier_arrive(k_empty[stage])
                p = activate(s, scale, "gelu_tanh", True)
                acc = tlx.async_dot_wait(0, acc)
                tlx.barrier_arrive(v_empty[v_stage])
            last = (blocks - 1) % STAGES
            tlx.barrier_wait(v_full[last], ((blocks - 1) // STAGES) & 1)
            acc = tlx.async_dot(p.to(DTYPE), v[last], acc)
            acc = tlx.async_dot_wait(0, acc)
            # <<<
            store_rows(out_desc, start_q, len_q, head, first_row, acc.to(DTYPE))
