"""A tile of keys under any mask, for the backward rungs that own keys: the rows that see it, step
by step, and zeros in P and dS where a pair does not count.

A mask is (position of row 0, `Segments` or None), as `entry_mask` returns it; options: GROUP, FOLD,
CAUSAL, WINDOW and those of `entry_mask`. Rungs without segments pass (0, None).
"""

import triton
import triton.language as tl

from gdpa_kernels.gdpa.device.derivatives import mask_slope
from gdpa_kernels.gdpa.device.gradients import head_and_row, steps_of
from gdpa_kernels.gdpa.device.masks import all_visible, mask_transposed
from gdpa_kernels.gdpa.device.segments import row_intervals, sees, sees_all, skip_gap


@triton.jit
def span_of(key, len_q, len_k, mask, ROWS: tl.constexpr, KEYS: tl.constexpr, options):
    """((first row, gap_start, gap_end), steps) of the KEYS keys at `key`; see `skip_gap`."""
    shift, segments = mask
    gap_start, gap_end = 0, 0
    if options.SEGMENTS:
        start, end, gap_start, gap_end = row_intervals(key, KEYS, len_q, len_k, segments, ROWS)
        steps = tl.maximum(tl.cdiv(end - start, ROWS), 1)
    else:
        if options.LOWER_RIGHT:
            key = tl.maximum(key - shift, 0)
        start, steps = steps_of(key, len_q, ROWS, KEYS, options)
    return (start, gap_start, gap_end), steps


@triton.jit
def row_of_step(step, steps, span, head_k, ROWS: tl.constexpr, options):
    """(head, row) of a step; without segments there is one stretch of rows."""
    start, gap_start, gap_end = span
    head, row = head_and_row(step, steps, start, head_k, options.GROUP, ROWS)
    if options.SEGMENTS:
        row = skip_gap(row, gap_start, gap_end)
    return head, row


@triton.jit
def mask_step(p, slope, row, key, mask, options, ASKS: tl.constexpr = False):
    """P and the slope [keys, rows], masked. ASKS: test first whether the tile is seen whole, and
    needs no mask, as is always done with segments."""
    shift, segments = mask
    position = row + shift
    KEYS: tl.constexpr = p.shape[0]
    ROWS: tl.constexpr = p.shape[1]
    if segments is not None:
        if not sees_all(position, key, ROWS, KEYS, segments):
            i = position + tl.arange(0, ROWS)[None, :]
            j = key + tl.arange(0, KEYS)[:, None]
            seen = sees(i, j, segments)
            p = tl.where(seen, p, 0.0)
            slope = tl.where(seen, slope, -1.0 if options.FOLD else 0.0)
    elif not (ASKS and all_visible(position, key, ROWS, KEYS, options.CAUSAL, options.WINDOW)):
        p = mask_transposed(p, row, key - shift, options.CAUSAL, options.WINDOW)
        slope = mask_slope(slope, row, key - shift, options.CAUSAL, options.WINDOW, options.FOLD)
    return p, slope
