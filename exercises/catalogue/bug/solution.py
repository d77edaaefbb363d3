"""The ring, persistent: a program computes one tile after another, and the ring goes on turning."""

import triton
import triton.language as tl
import triton.language.extra.tlx as tlx

from gdpa_kernels.device.ragged import store_rows
from gdpa_kernels.device.rows import fetch_rows
from gdpa_kernels.gdpa.device.activations import activate

BLOCK_N, STAGES = 64, 2
ROWS = tl.constexpr(64)  # of a consumer
CONSUMERS = tl.constexpr(2)


@triton.jit
def locate(cu_q_ptr, cu_k_ptr, tile, tiles, HEADS: tl.constexpr, BLOCK_N: tl.constexpr):
    """Where a tile lies; blocks is 0 if it has no rows."""
    first_row = tile % tiles * (ROWS * CONSUMERS)
    head = tile // tiles % HEADS
    sequence = tile // tiles // HEADS
    start_q, start_k = tl.load(cu_q_ptr + sequence), tl.load(cu_k_ptr + sequence)
    len_q = tl.load(cu_q_ptr + sequence + 1) - start_q
    len_k = tl.load(cu_k_ptr + sequence + 1) - start_k
    blocks = tl.where(first_row < len_q, tl.cdiv(len_k, BLOCK_N), 0)
    return start_q, len_q, start_k, len_k, head, first_row, blocks


@triton.jit
def kernel(
    q_desc, k_desc, v_desc, out_desc, cu_q_ptr, cu_k_ptr, tiles, all_tiles, scale,
    HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_N: tl.constexpr, STAGES: tl.constexpr,
    REGISTERS: tl.constexpr,
):  # fmt: skip
    DTYPE: tl.constexpr = tlx.dtype_of(q_desc)
    q = tlx.local_alloc((ROWS, HEAD_DIM), DTYPE, CONSUMERS)
    k = tlx.local_alloc((BLOCK_N, HEAD_DIM), DTYPE, STAGES)
    v = tlx.local_alloc((BLOCK_N, HEAD_DIM), DTYPE, STAGES)
    q_full = tlx.alloc_barriers(CONSUMERS)
    q_empty = tlx.alloc_warp_barrier(CONSUMERS, 4)
    k_full = tlx.alloc_barriers(STAGES)
    v_full = tlx.alloc_barriers(STAGES)
    empty = tlx.alloc_warp_barrier(STAGES, 4, CONSUMERS)

    with tlx.async_tasks():
        with tlx.async_task("default"):
            used = 0  # blocks that the ring has carried
            phase_q = 0  # of the tile that it has begun
            for tile in tl.range(tl.program_id(0), all_tiles, tl.num_programs(0)):
                start_q, len_q, start_k, len_k, head, first_row, blocks = locate(
                    cu_q_ptr, cu_k_ptr, tile, tiles, HEADS, BLOCK_N
                )
                for role in tl.static_range(CONSUMERS):
                    tlx.barrier_wait(q_empty[role], phase_q ^ 1)
                    row = first_row + role * ROWS
                    fetch_rows(q_desc, q[role], q_full[role], start_q, len_q, head, row)
                for block in tl.range(0, blocks):
                    stage = (used + block) % STAGES
                    phase = ((used + block) // STAGES) & 1
                    key = block * BLOCK_N
                    tlx.barrier_wait(empty[stage], phase ^ 1)
                    fetch_rows(k_desc, k[stage], k_full[stage], start_k, len_k, head, key)
                    fetch_rows(v_desc, v[stage], v_full[stage], start_k, len_k, head, key)
                used += blocks
                phase_q ^= 1
        with tlx.async_task(num_warps=4, registers=REGISTERS, replicate=CONSUMERS):
            role = tlx.async_task_replica_id()
            used = 0
            phase_q = 0
            for tile in tl.range(tl.program_id(0), all_tiles, tl.num_programs(0)):
                start_q, len_q, start_k, len_k, head, first_row, blocks = locate(
                    cu_q_ptr, cu_k_ptr, tile, tiles, HEADS, BLOCK_N
                )
                acc = tl.zeros([ROWS, HEAD_DIM], tl.float32)
                tlx.barrier_wait(q_full[role], phase_q)
                for block in tl.range(0, blocks):
                    stage = (used + block) % STAGES
                    phase = ((used + block) // STAGES) & 1
                    tlx.barrier_wait(k_full[stage], phase)
                    s = tlx.async_dot(q[role], tlx.local_trans(k[stage]))
                    s = tlx.async_dot_wait(0, s)
                    p = activate(s, scale, "gelu_tanh", True).to(DTYPE)
                    tlx.barrier_wait(v_full[stage], phase)
                    acc = tlx.async_dot(p, v[stage], acc)
                    acc = tlx.async_dot_wait(0, acc)
                    tlx.barrier_arrive(empty[stage])
                tlx.barrier_arrive(q_empty[role])
                row = first_row + role * ROWS
                store_rows(out_desc, start_q, len_q, head, row, acc.to(DTYPE))
                # >>>
                used += blocks
                # <<<
                phase_q ^= 1
