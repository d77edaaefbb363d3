"""GDPA in one tiled kernel: BLOCK_M query rows of one (sequence, head) against all its keys."""

import triton
import triton.language as tl

BLOCK_M, BLOCK_N = 64, 32


@triton.jit
def silu(x):
    return x / (1.0 + tl.exp(-x))


@triton.jit
def kernel(
    q_ptr, k_ptr, v_ptr, out_ptr, cu_q_ptr, cu_k_ptr, blocks, scale,
    HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    pid = tl.program_id(0)
    first_row = pid % blocks * BLOCK_M
    head = pid // blocks % HEADS
    sequence = pid // blocks // HEADS
    start_q, end_q = tl.load(cu_q_ptr + sequence), tl.load(cu_q_ptr + sequence + 1)
    start_k, end_k = tl.load(cu_k_ptr + sequence), tl.load(cu_k_ptr + sequence + 1)
    dims = tl.arange(0, HEAD_DIM)

    # >>> The rows of Q, [BLOCK_M, HEAD_DIM]: row r of a packed tensor begins at (r * HEADS +
    # head) * HEAD_DIM. Which of the BLOCK_M rows belong to this sequence?
    # blank: rows = start_q + first_row + tl.arange(0, BLOCK_M)
    # blank: offsets_q = (rows[:, None] * HEADS + head) * HEAD_DIM + dims[None, :]
    # blank: q = tl.zeros([BLOCK_M, HEAD_DIM], tl.bfloat16)
    rows = start_q + first_row + tl.arange(0, BLOCK_M)
    offsets_q = (rows[:, None] * HEADS + head) * HEAD_DIM + dims[None, :]
    mask_q = (rows < end_q)[:, None]
    q = tl.load(q_ptr + offsets_q, mask=mask_q, other=0.0)
    # <<<
    acc = tl.zeros([BLOCK_M, HEAD_DIM], tl.float32)

    # >>> For each block of BLOCK_N keys: S = Q K^T, P = silu(scale * S), acc += P V.
    for first_key in tl.range(0, end_k - start_k, BLOCK_N):
        keys = start_k + first_key + tl.arange(0, BLOCK_N)
        offsets_k = (keys[:, None] * HEADS + head) * HEAD_DIM + dims[None, :]
        mask_k = (keys < end_k)[:, None]
        k = tl.load(k_ptr + offsets_k, mask=mask_k, other=0.0)
        v = tl.load(v_ptr + offsets_k, mask=mask_k, other=0.0)
        p = silu(scale * tl.dot(q, k.T))
        acc = tl.dot(p.to(v.dtype), v, acc)
    # <<<

    # >>> Store the rows of this sequence, and no others.
    tl.store(out_ptr + offsets_q, acc.to(out_ptr.dtype.element_ty), mask=mask_q)
    # <<<
