"""The sum of each sequence's rows: x is packed, one sequence behind the other."""

import triton
import triton.language as tl

BLOCK = 32


@triton.jit
def kernel(x_ptr, out_ptr, cu_ptr, DIM: tl.constexpr, BLOCK: tl.constexpr):
    sequence = tl.program_id(0)
    dims = tl.arange(0, DIM)
    total = tl.zeros([DIM], tl.float32)
    # >>> Rows cu[sequence] up to, not including, cu[sequence + 1] are this sequence's; row r
    # has its DIM numbers from r * DIM on. Add them up in total, BLOCK rows at a time.
    start = tl.load(cu_ptr + sequence)
    end = tl.load(cu_ptr + sequence + 1)
    for first in tl.range(start, end, BLOCK):
        rows = first + tl.arange(0, BLOCK)
        mask = (rows < end)[:, None]
        x = tl.load(x_ptr + rows[:, None] * DIM + dims[None, :], mask=mask, other=0.0)
        total += tl.sum(x.to(tl.float32), 0)
    # <<<
    tl.store(out_ptr + sequence * DIM + dims, total.to(out_ptr.dtype.element_ty))
