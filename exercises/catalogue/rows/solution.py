"""A first kernel: relu(x) squared of n numbers, BLOCK of them by each program."""

import triton
import triton.language as tl

BLOCK = 128


@triton.jit
def kernel(x_ptr, out_ptr, n, BLOCK: tl.constexpr):
    # >>> Which elements are this program's? Programs are numbered from 0: tl.program_id(0). The
    # last program may have fewer than BLOCK: which lanes have an element? Load x.
    # blank: x = tl.zeros([BLOCK], tl.float32)
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = offsets < n
    x = tl.load(x_ptr + offsets, mask=mask, other=0.0)
    # <<<
    y = tl.maximum(x, 0.0)
    # >>> Store y squared, where there are elements.
    tl.store(out_ptr + offsets, y * y, mask=mask)
    # <<<
