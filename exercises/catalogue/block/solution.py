"""Softmax in one tile: a block of 64 tokens attends to itself, and one program holds it."""

import triton
import triton.language as tl

BLOCK = 64


@triton.jit
def kernel(
    q_ptr, k_ptr, v_ptr, out_ptr, first_ptr, rows_ptr, scale,
    HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    pid = tl.program_id(0)
    head = pid % HEADS
    first, rows = tl.load(first_ptr + pid // HEADS), tl.load(rows_ptr + pid // HEADS)
    tokens = tl.arange(0, BLOCK)  # of the block, which has `rows` of them
    offsets = ((first + tokens)[:, None] * HEADS + head) * HEAD_DIM
    offsets += tl.arange(0, HEAD_DIM)[None, :]
    mask = (tokens < rows)[:, None]
    q = tl.load(q_ptr + offsets, mask=mask, other=0.0)
    k = tl.load(k_ptr + offsets, mask=mask, other=0.0)
    v = tl.load(v_ptr + offsets, mask=mask, other=0.0)
    # >>> S = scale Q K^T. Keys that do not exist must get no weight.
    # blank: s = tl.zeros([BLOCK, BLOCK], tl.float32)
    s = scale * tl.dot(q, k.T)
    s = tl.where((tokens < rows)[None, :], s, float("-inf"))
    # <<<
    # >>> P = softmax of each row of S, tl.max(s, 1) and tl.sum(p, 1) are those of rows. Scores
    # may be in the hundreds.
    # blank: p = s
    p = tl.exp(s - tl.max(s, 1)[:, None])
    p = p / tl.sum(p, 1)[:, None]
    # <<<
    # >>> out = P V, where there are tokens.
    tl.store(out_ptr + offsets, tl.dot(p.to(v.dtype), v).to(v.dtype), mask=mask)
    # <<<
