"""A tile of queries under any mask, for the forward rungs that stream keys by: the blocks of keys
that it sees, and zeros where a pair does not count. key_tiles.py is the same for tiles of keys.

A mask is (position of row 0, `Segments` or None), as `entry_mask` returns it; options: BLOCK_N,
CAUSAL, WINDOW and those of `entry_mask`.
"""

import triton
import triton.language as tl

from gdpa_kernels.gdpa.device.masks import key_range, mask_probabilities
from gdpa_kernels.gdpa.device.segments import key_intervals, sees, sees_all, skip_gap


@triton.jit
def span_of(row, len_k, mask, ROWS: tl.constexpr, options):
    """((first key, gap_start, gap_end), blocks) of the ROWS rows from `row` on; see `skip_gap`.

    At least one block: prologue and epilogue need one. Without keys it is zero or masked.
    """
    shift, segments = mask
    gap_start, gap_end = 0, 0
    if options.SEGMENTS:
        start, end, gap_start, gap_end = key_intervals(
            row + shift, ROWS, len_k, segments, options.BLOCK_N
        )
    else:
        start, end = key_range(
            row + shift, len_k, ROWS, options.BLOCK_N, options.CAUSAL, options.WINDOW
        )
    return (start, gap_start, gap_end), tl.maximum(tl.cdiv(end - start, options.BLOCK_N), 1)


@triton.jit
def key_of(span, block, options):
    """The first key of a block of the span; without segments it has no gap."""
    start, gap_start, gap_end = span
    key = start + block * options.BLOCK_N
    if options.SEGMENTS:
        key = skip_gap(key, gap_start, gap_end)
    return key


@triton.jit
def mask_segments(x, position, first_key, segments):
    """x [rows, keys] with zeros where contexts, history and targets do not let a row see a key."""
    if not sees_all(position, first_key, x.shape[0], x.shape[1], segments):
        i = position + tl.arange(0, x.shape[0])[:, None]
        j = first_key + tl.arange(0, x.shape[1])[None, :]
        x = tl.where(sees(i, j, segments), x, 0.0)
    return x


@triton.jit
def mask_pairs(x, row, first_key, mask, options):
    """x [rows, keys] with zeros where a pair does not count."""
    shift, segments = mask
    if segments is not None:
        x = mask_segments(x, row + shift, first_key, segments)
    else:
        x = mask_probabilities(x, row + shift, first_key, options.CAUSAL, options.WINDOW)
    return x
