"""Causal and window masks: which keys or rows a tile goes through, and zeros where a pair does not
count. For all kernels; segments.py has the masks with contexts and targets.

Positions count from the start of a sequence; with "lower_right" callers shift those of queries.
"""

import triton
import triton.language as tl


@triton.jit
def key_range(
    first_row, len_k, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    CAUSAL: tl.constexpr, WINDOW: tl.constexpr,
):  # fmt: skip
    """The keys [start, end) seen by any of the rows first_row .. first_row + BLOCK_M - 1.

    `start` is a multiple of BLOCK_N; blocks outside the range are skipped, not masked.
    """
    start = 0
    end = len_k
    if CAUSAL:
        end = tl.minimum(end, first_row + BLOCK_M)
    if WINDOW is not None:
        start = tl.maximum(first_row - WINDOW, 0) // BLOCK_N * BLOCK_N
        end = tl.minimum(end, first_row + BLOCK_M + WINDOW)
    return start, end


@triton.jit
def all_visible(
    first_row, first_key, ROWS: tl.constexpr, KEYS: tl.constexpr,
    CAUSAL: tl.constexpr, WINDOW: tl.constexpr,
):  # fmt: skip
    """True if each of ROWS rows sees each of KEYS keys, so that nothing is to be masked."""
    whole = True
    least, most = first_row - first_key - (KEYS - 1), first_row - first_key + ROWS - 1
    if CAUSAL:
        whole = least >= 0
    if WINDOW is not None:
        whole = whole & (least >= -WINDOW) & (most <= WINDOW)
    return whole


@triton.jit
def mask_probabilities(p, first_row, first_key, CAUSAL: tl.constexpr, WINDOW: tl.constexpr):
    """Zero the elements [rows, keys] of pairs that do not count."""
    if CAUSAL or WINDOW is not None:
        rows = first_row + tl.arange(0, p.shape[0])
        keys = first_key + tl.arange(0, p.shape[1])
        distance = rows[:, None] - keys[None, :]
        if CAUSAL:
            p = tl.where(distance >= 0, p, 0.0)
        if WINDOW is not None:
            p = tl.where((distance <= WINDOW) & (distance >= -WINDOW), p, 0.0)
    return p


@triton.jit
def row_range(
    first_key, len_q, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    CAUSAL: tl.constexpr, WINDOW: tl.constexpr,
):  # fmt: skip
    """The rows [start, end) that see any of the keys first_key .. first_key + BLOCK_N - 1.

    `start` is a multiple of BLOCK_M; blocks outside the range are skipped, not masked.
    """
    start = 0
    end = len_q
    if CAUSAL:
        start = first_key // BLOCK_M * BLOCK_M
    if WINDOW is not None:
        start = tl.maximum(start, tl.maximum(first_key - WINDOW, 0) // BLOCK_M * BLOCK_M)
        end = tl.minimum(end, first_key + BLOCK_N + WINDOW)
    return start, end


@triton.jit
def mask_transposed(p, first_row, first_key, CAUSAL: tl.constexpr, WINDOW: tl.constexpr):
    """`mask_probabilities` of a tile [keys, rows]."""
    if CAUSAL or WINDOW is not None:
        keys = first_key + tl.arange(0, p.shape[0])
        rows = first_row + tl.arange(0, p.shape[1])
        distance = rows[None, :] - keys[:, None]
        if CAUSAL:
            p = tl.where(distance >= 0, p, 0.0)
        if WINDOW is not None:
            p = tl.where((distance <= WINDOW) & (distance >= -WINDOW), p, 0.0)
    return p
