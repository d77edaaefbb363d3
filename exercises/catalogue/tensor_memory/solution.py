"""Blackwell: S, P and O in tensor memory, and a role of its own that issues the MMAs."""

import triton
import triton.language as tl
import triton.language.extra.tlx as tlx

from gdpa_kernels.device.ragged import store_rows
from gdpa_kernels.device.rows import fetch_rows
from gdpa_kernels.gdpa.device.activations import activate

BLOCK_N, STAGES = 64, 2

# >>> Predict the modelled cycles of one tile: 128 rows, 512 keys, head_dim 64. The tensor core
# does 8,192 FLOP a cycle here, the MUFU 16 tanh; S, activation and P V of a block wait for each
# other.
# blank: CYCLES = None
CYCLES = 4 * 128 * 512 * 64 / 8192 + 128 * 512 / 16 + 1500  # and the first copies
# <<<
ROWS = tl.constexpr(128)  # of a tile: the lanes of tensor memory


@triton.jit
def kernel(
    q_desc, k_desc, v_desc, out_desc, cu_q_ptr, cu_k_ptr, tiles, scale,
    HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_N: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    DTYPE: tl.constexpr = tlx.dtype_of(q_desc)
    pid = tl.program_id(0)
    first_row = pid % tiles * ROWS
    head = pid // tiles % HEADS
    sequence = pid // tiles // HEADS
    start_q, start_k = tl.load(cu_q_ptr + sequence), tl.load(cu_k_ptr + sequence)
    len_q = tl.load(cu_q_ptr + sequence + 1) - start_q
    len_k = tl.load(cu_k_ptr + sequence + 1) - start_k
    # At least one block where there are rows: without keys it is zero. 0: no rows.
    blocks = tl.where(first_row < len_q, tl.maximum(tl.cdiv(len_k, BLOCK_N), 1), 0)
    q = tlx.local_alloc((ROWS, HEAD_DIM), DTYPE, 1)
    k = tlx.local_alloc((BLOCK_N, HEAD_DIM), DTYPE, STAGES)
    v = tlx.local_alloc((BLOCK_N, HEAD_DIM), DTYPE, STAGES)
    s = tlx.local_alloc((ROWS, BLOCK_N), tl.float32, 1, tlx.storage_kind.tmem)
    p = tlx.local_alloc((ROWS, BLOCK_N), DTYPE, 1, tlx.storage_kind.tmem, reuse=s)  # over S
    o = tlx.local_alloc((ROWS, HEAD_DIM), tl.float32, 1, tlx.storage_kind.tmem)
    q_full = tlx.alloc_barriers(1)
    k_full = tlx.alloc_barriers(STAGES)
    v_full = tlx.alloc_barriers(STAGES)
    k_empty = tlx.alloc_barriers(STAGES)
    v_empty = tlx.alloc_barriers(STAGES)
    s_full = tlx.alloc_barriers(1)
    p_full = tlx.alloc_warp_barrier(1, 4)
    o_full = tlx.alloc_barriers(1)

    with tlx.async_tasks():
        with tlx.async_task("default"):
            for block in tl.range(0, blocks):
                # >>> The activation: wait until S is there, load it from s[0] with
                # tlx.local_load, store P = activate(x, scale, "gelu_tanh", True) in p[0], and
                # say so on p_full[0].
                tlx.barrier_wait(s_full[0], block & 1)
                x = tlx.local_load(s[0])
                y = activate(x, scale, "gelu_tanh", True)
                tlx.local_store(p[0], y.to(DTYPE))
                tlx.barrier_arrive(p_full[0])
                # <<<
            if blocks > 0:
                tlx.barrier_wait(o_full[0], 0)
                acc = tlx.local_load(o[0])
                store_rows(out_desc, start_q, len_q, head, first_row, acc.to(DTYPE))
        with tlx.async_task(num_warps=1):
            if blocks > 0:
                fetch_rows(q_desc, q[0], q_full[0], start_q, len_q, head, first_row)
            for block in tl.range(0, blocks):
                stage = block % STAGES
                phase = (block // STAGES) & 1
                key = block * BLOCK_N
                tlx.barrier_wait(k_empty[stage], phase ^ 1)
                fetch_rows(k_desc, k[stage], k_full[stage], start_k, len_k, head, key)
                tlx.barrier_wait(v_empty[stage], phase ^ 1)
                fetch_rows(v_desc, v[stage], v_full[stage], start_k, len_k, head, key)
        with tlx.async_task(num_warps=1):
            if blocks > 0:
                tlx.barrier_wait(q_full[0], 0)
            for block in tl.range(0, blocks, num_stages=0):
                stage = block % STAGES
                phase = (block // STAGES) & 1
                # >>> The MMAs. tlx.async_dot(a, b, out, use_acc=..., mBarriers=[...])
                # multiplies into tensor memory and arrives on each of mBarriers when it has
                # ended. Wait for K; S = Q K^T into s[0]: who waits for its end? Wait for V and
                # P; O (+)= P V into o[0].
                tlx.barrier_wait(k_full[stage], phase)
                tlx.async_dot(
                    q[0], tlx.local_trans(k[stage]), s[0], use_acc=False,
                    mBarriers=[k_empty[stage], s_full[0]],
                )  # fmt: skip
                tlx.barrier_wait(v_full[stage], phase)
                tlx.barrier_wait(p_full[0], block & 1)
                tlx.async_dot(p[0], v[stage], o[0], use_acc=block > 0, mBarriers=[v_empty[stage]])
                # <<<
            tlx.tcgen05_commit(o_full[0])
