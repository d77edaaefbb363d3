"""Functions of the rungs for CTA pairs: two CTAs of sm_100 whose MMAs one thread issues.

The even CTA is the leader. `async_dot(..., two_ctas=True)` multiplies the rows of A of each CTA
with all of B, of which each CTA holds half of the columns; accumulators stay where the rows of A
are. A commit with `two_ctas=True` arrives in both CTAs.
"""

import triton
import triton.language as tl
import triton.language.extra.tlx as tlx

from gdpa_kernels.device.ragged import BOUND

CTAS = tl.constexpr(2)


@triton.jit
def pair_index_and_count():
    """The number of this CTA's pair, and the number of pairs."""
    return tl.program_id(0) // CTAS, tl.num_programs(0) // CTAS


@triton.jit
def fetch_part(desc, buffer, full, start, length, head, first_row, first_column):
    """Start the TMA load of this CTA's part. Rows from `length` on become zero.

    Its bytes arrive on `full` of the leader, which must expect those of both CTAs.
    """
    coords = [BOUND, start + length, head, BOUND - length + first_row, first_column]
    tlx.async_descriptor_load(desc, buffer, coords, full, two_ctas=True)


@triton.jit
def scores(role: tl.constexpr, q_buffer, k_buffer, s):
    """S = Q K^T of a role, over the P that its last P V has read: MMAs run in order."""
    tlx.async_dot(
        q_buffer, tlx.local_trans(k_buffer), s.buffer[role], use_acc=False,
        mBarriers=[s.full[role]], two_ctas=True,
    )  # fmt: skip


@triton.jit
def weighted_sum(role: tl.constexpr, p, v_buffer, o_buffer, step, continued, options):
    """O += P V of a role, slice by slice of the keys; not continued: O = P V."""
    WIDTH: tl.constexpr = v_buffer.shape[0] // options.SLICES
    HALF: tl.constexpr = options.BLOCK_D // CTAS
    for part in tl.static_range(options.SLICES):
        tlx.barrier_wait(p.full[role * options.SLICES + part], step & 1)
        weights = tlx.subslice(p.buffer[2 * role], part * WIDTH, WIDTH)
        values = tlx.local_slice(v_buffer, [part * WIDTH, 0], [WIDTH, HALF])
        use_acc = continued if part == 0 else True
        tlx.async_dot(weights, values, o_buffer, use_acc=use_acc, force_async=True, two_ctas=True)


@triton.jit
def move_columns(
    source, buffer, factor, COLUMNS: tl.constexpr, DTYPE: tl.constexpr, FIRST: tl.constexpr = 0
):
    """factor * source, as many columns from FIRST on as `buffer` has, from tensor memory to shared
    memory in DTYPE, COLUMNS at a time."""
    for part in tl.static_range(buffer.shape[1] // COLUMNS):
        columns = tlx.subslice(source, FIRST + part * COLUMNS, COLUMNS)
        here = tlx.local_slice(buffer, [0, part * COLUMNS], [source.shape[0], COLUMNS])
        tlx.local_store(here, (tlx.local_load(columns) * factor).to(DTYPE))


@triton.jit
def put_scaled(
    desc, source, buffer, read, factor, start, length, head, first_row, COLUMNS: tl.constexpr
):  # fmt: skip
    """Start the store of factor * source, rows in tensor memory, through `buffer`, in halves where
    that is half as wide; arrive on `read` of the leader when source was read. Rows from `length` on
    are dropped."""
    WIDTH: tl.constexpr = desc.block_shape[4]
    PARTS: tl.constexpr = source.shape[1] // WIDTH
    for part in tl.static_range(PARTS):
        if part > 0:
            tlx.async_descriptor_store_wait(0)
        move_columns(source, buffer, factor, COLUMNS, tlx.dtype_of(desc), part * WIDTH)
        if part == PARTS - 1:
            tlx.barrier_arrive(read, 1, remote_cta_rank=0)
        tlx.fence("async_shared")
        coords = [BOUND, start + length, head, BOUND - length + first_row, part * WIDTH]
        tlx.async_descriptor_store(desc, buffer, coords)
