"""An example of the chapter on the emulator: two roles take the slots of a ring in turn.

The sum of each row of `x`. `load` asks TMA for one row after the other, into three slots in turn;
two roles `add` take every second row, so that each slot goes from one role to the other.

| role     | warps | work                                         |
|----------|------:|----------------------------------------------|
| `load`   |     4 | asks TMA for one row after the other         |
| `add[r]` |     4 | every second row: adds up, releases the slot |

| barrier    | arrivals         | who fills                  | who drains      |
|------------|------------------|----------------------------|-----------------|
| `full[i]`  | 1, and the bytes | `load` announces, TMA does | one `add` waits |
| `empty[i]` | 1                | the same `add`             | `load` waits    |

Run it with `python -m tritonemu notebooks/tools/kernels/turns.py:main`.
"""

import torch
import triton
import triton.language as tl
import triton.language.extra.tlx as tlx
from triton.tools.tensor_descriptor import TensorDescriptor


@triton.jit
def load(x_desc, x, full, empty, rows, COLUMNS: tl.constexpr, SLOTS: tl.constexpr):
    for i in tl.range(rows):
        slot, phase = i % SLOTS, i // SLOTS % 2
        tlx.barrier_wait(empty[slot], phase ^ 1)
        tlx.barrier_expect_bytes(full[slot], 4 * COLUMNS)
        tlx.async_descriptor_load(x_desc, x[slot], [i * COLUMNS], full[slot])


@triton.jit
def add(role, out_ptr, x, full, empty, rows, ROLES: tl.constexpr, SLOTS: tl.constexpr):
    for i in tl.range(role, rows, ROLES):
        slot, phase = i % SLOTS, i // SLOTS % 2
        tlx.barrier_wait(full[slot], phase)
        row = tlx.local_load(x[slot])
        tlx.barrier_arrive(empty[slot])
        tl.store(out_ptr + i, tl.sum(row, 0))


@triton.jit
def turns_kernel(
    x_desc, out_ptr, rows, COLUMNS: tl.constexpr, ROLES: tl.constexpr, SLOTS: tl.constexpr
):
    """A ring of SLOTS slots from one role to ROLES."""
    x = tlx.local_alloc((COLUMNS,), tl.float32, SLOTS)
    full = tlx.alloc_barriers(SLOTS)
    empty = tlx.alloc_barriers(SLOTS)
    with tlx.async_tasks():
        with tlx.async_task("default"):
            load(x_desc, x, full, empty, rows, COLUMNS, SLOTS)
        with tlx.async_task(num_warps=4, replicate=ROLES):
            add(tlx.async_task_replica_id(), out_ptr, x, full, empty, rows, ROLES, SLOTS)


def main(slots: int = 3, roles: int = 2, rows: int = 8) -> None:
    """`rows` rows of 128 columns; the result must be right."""
    x = torch.randn(rows, 128, generator=torch.Generator().manual_seed(2025))
    out = torch.full((rows,), float("nan"))
    x_desc = TensorDescriptor(x.flatten(), [x.numel()], [1], [128])
    turns_kernel[(1,)](x_desc, out, rows, 128, roles, slots)
    torch.testing.assert_close(out, x.sum(1))
