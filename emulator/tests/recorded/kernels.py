"""Kernels whose compiled forms lie beside this file, one for each compiler."""

import triton
import triton.language as tl


@triton.jit
def lock_kernel(x_ptr, lock_ptr, total_ptr, rows, BLOCK: tl.constexpr):
    lanes = tl.arange(0, BLOCK)
    for row in tl.range(0, rows, num_stages=3):
        x = tl.load(x_ptr + row * BLOCK + lanes)
        tl.store(x_ptr + (row + 1) * BLOCK + lanes, x + 1.0)
    while tl.atomic_cas(lock_ptr, 0, 1) == 1:
        pass
    total = tl.load(total_ptr + lanes) + 1.0
    tl.store(total_ptr + lanes, total)
    tl.debug_barrier()
    tl.atomic_xchg(lock_ptr, 0)


@triton.jit
def column_kernel(x_ptr, y_ptr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    rows, columns = tl.arange(0, ROWS)[:, None], tl.arange(0, COLUMNS)[None, :]
    x = tl.load(x_ptr + rows * COLUMNS + columns)
    tl.store(y_ptr + columns * ROWS + rows, x)
    tl.store(x_ptr + tl.arange(0, ROWS), tl.sum(x, 1))
