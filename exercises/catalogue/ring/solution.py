"""Warp roles: a producer fills a ring of buffers with K and V, two consumers drain it."""

import triton
import triton.language as tl
import triton.language.extra.tlx as tlx

from gdpa_kernels.device.ragged import store_rows
from gdpa_kernels.device.rows import fetch_rows
from gdpa_kernels.gdpa.device.activations import activate

BLOCK_N, STAGES = 64, 2

# >>> Predict, before you run it: how many modelled cycles does one tile of 128 rows take
# against 512 keys at head_dim 128? The tensor core does 4,096 FLOP a cycle. `forward v4` is the
# model.
# blank: CYCLES = None
CYCLES = 4 * 128 * 512 * 128 / 4096 / 0.75  # the tensor core works three quarters of the time
# <<<
ROWS = tl.constexpr(64)  # of a consumer
CONSUMERS = tl.constexpr(2)


@triton.jit
def kernel(
    q_desc, k_desc, v_desc, out_desc, cu_q_ptr, cu_k_ptr, tiles, scale,
    HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_N: tl.constexpr, STAGES: tl.constexpr,
    REGISTERS: tl.constexpr,
):  # fmt: skip
    DTYPE: tl.constexpr = tlx.dtype_of(q_desc)
    pid = tl.program_id(0)
    first_row = pid % tiles * (ROWS * CONSUMERS)
    head = pid // tiles % HEADS
    sequence = pid // tiles // HEADS
    start_q, start_k = tl.load(cu_q_ptr + sequence), tl.load(cu_k_ptr + sequence)
    len_q = tl.load(cu_q_ptr + sequence + 1) - start_q
    len_k = tl.load(cu_k_ptr + sequence + 1) - start_k
    blocks = tl.where(first_row < len_q, tl.cdiv(len_k, BLOCK_N), 0)  # 0: a tile without rows
    q = tlx.local_alloc((ROWS, HEAD_DIM), DTYPE, CONSUMERS)
    k = tlx.local_alloc((BLOCK_N, HEAD_DIM), DTYPE, STAGES)
    v = tlx.local_alloc((BLOCK_N, HEAD_DIM), DTYPE, STAGES)
    q_full = tlx.alloc_barriers(CONSUMERS)
    # >>> The barriers of the ring. A phase of k_full[i] and v_full[i] ends with the one arrival
    # that announces the bytes of a copy, and these bytes. A phase of empty[i] ends when all
    # threads of both consumers (4 warps each) have let go of k[i] and v[i].
    # blank: k_full = q_full
    # blank: v_full = q_full
    # blank: empty = q_full
    k_full = tlx.alloc_barriers(STAGES)
    v_full = tlx.alloc_barriers(STAGES)
    empty = tlx.alloc_warp_barrier(STAGES, 4, CONSUMERS)
    # <<<

    with tlx.async_tasks():
        with tlx.async_task("default"):
            for role in tl.static_range(CONSUMERS):
                row = first_row + role * ROWS
                fetch_rows(q_desc, q[role], q_full[role], start_q, len_q, head, row)
            for block in tl.range(0, blocks):
                key = block * BLOCK_N
                # >>> The producer: the stage of this block and the phase of its barriers; wait
                # until the stage is empty; then fetch_rows(desc, buffer, full, start_k, len_k,
                # head, key) for K and V.
                stage = block % STAGES
                phase = (block // STAGES) & 1
                tlx.barrier_wait(empty[stage], phase ^ 1)
                fetch_rows(k_desc, k[stage], k_full[stage], start_k, len_k, head, key)
                fetch_rows(v_desc, v[stage], v_full[stage], start_k, len_k, head, key)
                # <<<
        with tlx.async_task(num_warps=4, registers=REGISTERS, replicate=CONSUMERS):
            role = tlx.async_task_replica_id()
            acc = tl.zeros([ROWS, HEAD_DIM], tl.float32)
            tlx.barrier_wait(q_full[role], 0)
            for block in tl.range(0, blocks):
                # >>> A consumer: wait for K, S = Q K^T, P = activate(s, scale, "gelu_tanh",
                # True), wait for V, acc += P V, and let go of the stage as soon as nothing
                # reads it any more.
                stage = block % STAGES
                phase = (block // STAGES) & 1
                tlx.barrier_wait(k_full[stage], phase)
                s = tlx.async_dot(q[role], tlx.local_trans(k[stage]))
                s = tlx.async_dot_wait(0, s)
                p = activate(s, scale, "gelu_tanh", True).to(DTYPE)
                tlx.barrier_wait(v_full[stage], phase)
                acc = tlx.async_dot(p, v[stage], acc)
                acc = tlx.async_dot_wait(0, acc)
                tlx.barrier_arrive(empty[stage])
                # <<<
            row = first_row + role * ROWS
            store_rows(out_desc, start_q, len_q, head, row, acc.to(DTYPE))
