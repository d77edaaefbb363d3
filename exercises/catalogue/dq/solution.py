"""Programs that add to one dQ: each has a block of keys, and their part of every row of dQ."""

import triton
import triton.language as tl

BLOCK = 32

# >>> Does your kernel give the same bits in whatever order its programs run? True or False.
# blank: SAME_BITS = None
SAME_BITS = False
# <<<


@triton.jit
def kernel(ds_ptr, k_ptr, dq_ptr, rows, keys, HEAD_DIM: tl.constexpr, BLOCK: tl.constexpr):
    """dQ = dS K in fp32, which is 0 before the launch: dS [rows, keys], K [keys, HEAD_DIM]."""
    key = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    dims = tl.arange(0, HEAD_DIM)
    k = tl.load(
        k_ptr + key[:, None] * HEAD_DIM + dims[None, :], mask=(key < keys)[:, None], other=0.0
    )
    for first in tl.range(0, rows, BLOCK):
        row = first + tl.arange(0, BLOCK)
        mask = (row < rows)[:, None]
        ds = tl.load(
            ds_ptr + row[:, None] * keys + key[None, :],
            mask=mask & (key < keys)[None, :], other=0.0,
        )  # fmt: skip
        part = tl.dot(ds, k)
        offsets = row[:, None] * HEAD_DIM + dims[None, :]
        # >>>
        # blank: dq = tl.load(dq_ptr + offsets, mask=mask, other=0.0)
        # blank: tl.store(dq_ptr + offsets, dq + part, mask=mask)
        tl.atomic_add(dq_ptr + offsets, part, mask=mask)
        # <<<
