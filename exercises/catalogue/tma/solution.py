"""The tiled kernel with TMA: a descriptor's copies end at the sequence's end by themselves."""

import triton
import triton.language as tl

from gdpa_kernels.device.ragged import load_rows, store_rows
from gdpa_kernels.gdpa.device.activations import activate

BLOCK_M, BLOCK_N = 64, 64


@triton.jit
def kernel(
    q_desc, k_desc, v_desc, out_desc, cu_q_ptr, cu_k_ptr, blocks, scale,
    HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    pid = tl.program_id(0)
    first_row = pid % blocks * BLOCK_M
    head = pid // blocks % HEADS
    sequence = pid // blocks // HEADS
    start_q, start_k = tl.load(cu_q_ptr + sequence), tl.load(cu_k_ptr + sequence)
    len_q = tl.load(cu_q_ptr + sequence + 1) - start_q
    len_k = tl.load(cu_k_ptr + sequence + 1) - start_k
    acc = tl.zeros([BLOCK_M, HEAD_DIM], tl.float32)
    # >>> load_rows(desc, start, length, head, first_row) gives BLOCK rows of a sequence from
    # first_row on; rows behind its end are 0. Load Q; for each block of keys, K, S = Q K^T, P =
    # activate(s, scale, "gelu_tanh", True), V, and acc += P V.
    q = load_rows(q_desc, start_q, len_q, head, first_row)
    for first_key in tl.range(0, len_k, BLOCK_N):
        k = load_rows(k_desc, start_k, len_k, head, first_key)
        p = activate(tl.dot(q, k.T), scale, "gelu_tanh", True)
        v = load_rows(v_desc, start_k, len_k, head, first_key)
        acc = tl.dot(p.to(v.dtype), v, acc)
    # <<<
    # >>> store_rows(desc, start, length, head, first_row, rows) drops rows behind the end.
    store_rows(out_desc, start_q, len_q, head, first_row, acc.to(tl.bfloat16))
    # <<<
