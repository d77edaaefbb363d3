"""Tensor memory (TMEM) in the backward rungs of Blackwell, b1 to b6: where S, P, dP and dS lie, and
how a math role turns S into P and dP into dS there.

A step is S^T and dP^T, [KEYS, ROWS] in fp32: TMEM lanes are keys, columns rows. Each of two math
roles has HALF of the columns, and goes through them in PARTs. P overwrites S, and dS overwrites dP
where it is in TMEM too: both are [KEYS, HALF] in half precision, which are 32 columns of fp32.

| columns | 0 to 31                 | 32 to 63 | 64 to 95  | 96 to 127 |
|---------|-------------------------|----------|-----------|-----------|
| S, dP   | role 0                  | role 0   | role 1    | role 1    |
| P, dS   | buffer[0], of role 0    | free     | buffer[2] | free      |

So a role overwrites only scores of its own, which it has in registers by then.
"""

import triton
import triton.language as tl
import triton.language.extra.tlx as tlx

from gdpa_kernels.device.ragged import BOUND
from gdpa_kernels.gdpa.device.derivatives import times_slope, value_and_factor
from gdpa_kernels.gdpa.device.key_tiles import mask_step

KEYS = tl.constexpr(128)  # of a CTA: TMEM lanes
ROWS = tl.constexpr(128)  # of a step
MATH_ROLES = tl.constexpr(2)
HALF = tl.constexpr(ROWS.value // MATH_ROLES.value)  # rows of a math role
PART = tl.constexpr(HALF.value // 2)  # in registers at a time


@triton.jit
def store_p(
    role: tl.constexpr, part: tl.constexpr, s, p, scale, head, row, key, mask, options
):  # fmt: skip
    """Store P of a part of a role's rows, [keys, rows], over its S; return the slope, from which
    `store_ds` computes dS. row: the role's first; mask: of `key_tiles`."""
    scores = tlx.local_load(tlx.subslice(s.buffer[0], role * HALF + part * PART, PART))
    y, slope = value_and_factor(scores, scale, head, options.ACTIVATION, options.FOLD)
    y, slope = mask_step(y, slope, row + part * PART, key, mask, options)
    tlx.local_store(tlx.subslice(p.buffer[2 * role], part * PART, PART), y.to(options.DTYPE))
    return slope


@triton.jit
def store_ds(role: tl.constexpr, part: tl.constexpr, dp, ds, slope, options):
    """Store dS of a part of a role's rows, in TMEM over its dP, and return it."""
    d = tlx.local_load(tlx.subslice(dp.buffer[0], role * HALF + part * PART, PART))
    d = times_slope(d, slope, options.FOLD).to(options.DTYPE)
    tlx.local_store(tlx.subslice(ds.buffer[2 * role], part * PART, PART), d)
    return d


@triton.jit
def store_sum(desc, sums, buffer, factor, start, length, head, key):
    """Store dV or dK of a tile, times factor, from TMEM through `buffer` by TMA, 64 columns at a
    time, and await the store."""
    WIDTH: tl.constexpr = desc.block_shape[4]
    for part in tl.static_range(WIDTH // 64):
        x = tlx.local_load(tlx.subslice(sums, part * 64, 64)) * factor
        columns = tlx.local_slice(buffer, [0, part * 64], [KEYS, 64])
        tlx.local_store(columns, x.to(tlx.dtype_of(desc)))
    tlx.fence("async_shared")
    coords = [BOUND, start + length, head, BOUND - length + key, 0]
    tlx.async_descriptor_store(desc, buffer, coords)
    tlx.async_descriptor_store_wait(0)
