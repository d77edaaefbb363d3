"""The backward pass of one tile: P = relu(S)^2 with S = scale Q K^T, O = P V; given dO."""

import triton
import triton.language as tl

BLOCK = 64


@triton.jit
def kernel(
    q_ptr, k_ptr, v_ptr, grad_ptr, dq_ptr, dk_ptr, dv_ptr, cu_ptr, scale,
    HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """A sequence of at most BLOCK rows and a head are one tile."""
    pid = tl.program_id(0)
    head = pid % HEADS
    start, end = tl.load(cu_ptr + pid // HEADS), tl.load(cu_ptr + pid // HEADS + 1)
    rows = start + tl.arange(0, BLOCK)
    offsets = (rows[:, None] * HEADS + head) * HEAD_DIM + tl.arange(0, HEAD_DIM)[None, :]
    mask = (rows < end)[:, None]
    q = tl.load(q_ptr + offsets, mask=mask, other=0.0)
    k = tl.load(k_ptr + offsets, mask=mask, other=0.0)
    v = tl.load(v_ptr + offsets, mask=mask, other=0.0)
    grad = tl.load(grad_ptr + offsets, mask=mask, other=0.0)
    s = scale * tl.dot(q, k.T)
    positive = tl.maximum(s, 0.0)
    # >>> dV = P^T dO. A product of tl.dot takes bf16: (...).to(v.dtype).
    # blank: dv = tl.zeros([BLOCK, HEAD_DIM], tl.float32)
    p = (positive * positive).to(v.dtype)
    dv = tl.dot(p.T, grad)
    # <<<
    # >>> dP = dO V^T, and dS = dP times the derivative of relu(S)^2.
    # blank: ds = tl.zeros([BLOCK, BLOCK], tl.bfloat16)
    dp = tl.dot(grad, v.T)
    ds = (dp * 2.0 * positive).to(v.dtype)
    # <<<
    # >>> dQ = scale dS K, dK = scale dS^T Q.
    # blank: dq = tl.zeros([BLOCK, HEAD_DIM], tl.float32)
    # blank: dk = tl.zeros([BLOCK, HEAD_DIM], tl.float32)
    dq = scale * tl.dot(ds, k)
    dk = scale * tl.dot(ds.T, q)
    # <<<
    tl.store(dq_ptr + offsets, dq.to(q.dtype), mask=mask)
    tl.store(dk_ptr + offsets, dk.to(q.dtype), mask=mask)
    tl.store(dv_ptr + offsets, dv.to(q.dtype), mask=mask)
