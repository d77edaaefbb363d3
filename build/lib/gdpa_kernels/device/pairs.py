"""What the rungs for CTA pairs have in common: two CTAs of sm_100 whose MMAs one thread issues.

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
def pair_and_pairs():
    """The number of this CTA's pair, and how many there are."""
    return tl.program_id(0) // CTAS, tl.num_programs(0) // CTAS


@triton.jit
def fetch_part(desc, buffer, full, start, length, head, first_row, first_column):
    """Start the TMA load of this CTA's part. Rows from `length` on become zero.

    Its bytes arrive on `full` of the leader, which must expect those of both CTAs.
    """
    place = [BOUND, start + length, head, BOUND - length + first_row, first_column]
    tlx.async_descriptor_load(desc, buffer, place, full, two_ctas=True)
