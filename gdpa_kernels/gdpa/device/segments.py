"""The HSTU mask of a sequence [contexts | history | targets], for the kernels.

Positions of queries and keys count from the start of the sequence; with `causal` "lower_right" the
last query stands at the last key. Query i sees key j:

| query, key | contexts | history | targets                    |
|------------|----------|---------|----------------------------|
| contexts   | all      | all     | none                       |
| history    | all      | j <= i  | none                       |
| targets    | all      | all     | of the same group, j <= i  |

A window hides keys whose rank is more than WINDOW below the query's. Contexts have rank 0, the
history counts on from there; all targets share the rank after it, or count on with OWN_RANKS. Of 2
contexts, 4 events and 2 targets:

    position            0 1   2 3 4 5   6 7
    rank                0 0   1 2 3 4   5 5
    with OWN_RANKS      0 0   1 2 3 4   5 6

The last line is max(p - C + 1, 0) for C contexts, or p where there are none; the line above it is
the same of min(p, T), with the first target at T (`rank`). Backward, a rank r > 0 is position r +
max(C - 1, 0), and rank 0 the last context (`position_of_rank`). With WINDOW = 2 the targets, rank
5, see ranks from 3 on: positions 4 and 5 of the history. With FULL_ROWS a window limits neither the
last FULL_ROWS queries of the history nor targets.

So a block of queries sees two intervals of keys, one of the history and one of targets, and a block
of keys is seen by two intervals of queries. One loop runs over both: its index t is a position up
to gap_start, and from there on the position is t - gap_start + gap_end (`skip_gap`). No block comes
twice, since gap_end >= gap_start; one with both kinds is left to `sees`. In blocks of 4:

    keys from    0     4     8    12    16         of queries 16 to 19, with targets from 6 on in
    they are     h     h, t  t     t     t         groups of 1: gap_start is 8, the history rounded
    t            0     4     -     -     8         up, and gap_end 16, the group rounded down

    rows from    0     4     8    12    16    20   of keys 12 to 15, with 3 contexts and targets
    they are     c, h  h     h     h     h     t   from 20 on: gap_start is 4, the contexts rounded
    t            0     -     -     4     8    12   up, and gap_end 12

`Requires` of each rung says whether it takes these masks.
"""

from typing import NamedTuple

import triton
import triton.language as tl

from gdpa_kernels.gdpa.device.work_list import sequence_of


class Segments(NamedTuple):
    """The mask of one sequence: the number of contexts, the position of the first target (which is
    the sequence's length where it has none), and the constants of the call. FULL_ROWS is 0 without
    WINDOW and with OWN_RANKS, as `Mask` has it."""

    contexts: tl.tensor
    first_target: tl.tensor
    WINDOW: tl.constexpr
    TARGET_GROUP: tl.constexpr
    FULL_ROWS: tl.constexpr
    OWN_RANKS: tl.constexpr


@triton.jit
def load_segments(
    segments_ptr, batch, len_k, WINDOW: tl.constexpr, TARGET_GROUP: tl.constexpr,
    FULL_ROWS: tl.constexpr, OWN_RANKS: tl.constexpr,
):  # fmt: skip
    """`Segments` of a sequence; segments_ptr: int32 [sequences, 2], targets and contexts."""
    pointer = segments_ptr + batch.to(tl.int64) * 2
    contexts, first_target = tl.load(pointer + 1), len_k - tl.load(pointer)
    return Segments(contexts, first_target, WINDOW, TARGET_GROUP, FULL_ROWS, OWN_RANKS)


@triton.jit
def entry_mask(list_ptr, segments_ptr, item, len_q, len_k, options):
    """(position of row 0, `Segments` or None) of the sequence of a list's entry."""
    shift, segments = 0, None
    if options.LOWER_RIGHT:
        shift = len_k - len_q
    if options.SEGMENTS:
        segments = load_segments(
            segments_ptr, sequence_of(list_ptr, item), len_k,
            options.WINDOW, options.TARGET_GROUP, options.FULL_ROWS, options.OWN_RANKS,
        )  # fmt: skip
    return shift, segments


@triton.jit
def skip_gap(index, gap_start, gap_end):
    """The key, of `key_intervals`, or row, of `row_intervals`, at a loop's index."""
    return tl.where(index < gap_start, index, index - gap_start + gap_end)


@triton.jit
def key_intervals(position, rows, len_k, segments, BLOCK_N: tl.constexpr):
    """(start, end, gap_start, gap_end), start and end of the loop's index: `skip_gap` of start,
    start + BLOCK_N, ... are the blocks of keys that any of `rows` rows from `position` on sees."""
    contexts, first_target = segments.contexts, segments.first_target
    end = tl.minimum(position + rows, len_k)
    history_end = tl.where(position < contexts, first_target, tl.minimum(end, first_target))
    gap_start = tl.cdiv(history_end, BLOCK_N) * BLOCK_N
    target = tl.maximum(position, first_target) - first_target
    group_start = first_target + target // segments.TARGET_GROUP * segments.TARGET_GROUP
    gap_end = tl.maximum(group_start // BLOCK_N * BLOCK_N, gap_start)
    blocks = tl.where(end > first_target, tl.maximum(tl.cdiv(end - gap_end, BLOCK_N), 0), 0)
    of_targets = blocks * BLOCK_N
    start = 0
    if segments.WINDOW is not None:  # from the key of the least rank that the first row sees
        least = rank(position, segments) - segments.WINDOW
        limited = (position >= contexts) & (least > 0)
        if segments.FULL_ROWS > 0:
            last = rank(position + rows - 1, segments)
            limited = limited & (last < target_rank(segments) - segments.FULL_ROWS)
        key = position_of_rank(least, contexts)
        start = tl.minimum(tl.where(limited, key // BLOCK_N * BLOCK_N, 0), gap_start)
    return start, gap_start + of_targets, gap_start, gap_end


@triton.jit
def row_intervals(first_key, keys, len_q, len_k, segments, BLOCK_M: tl.constexpr):
    """(start, end, gap_start, gap_end), start and end of the loop's index: `skip_gap` of start,
    start + BLOCK_M, ... are the blocks of rows that see any of `keys` keys from first_key on."""
    contexts, first_target = segments.contexts, segments.first_target
    shift = len_k - len_q
    gap_start = 0
    end = len_q
    if first_key < first_target:  # the gap: rows after the contexts and before the key's own
        gap_start = tl.cdiv(tl.maximum(tl.minimum(contexts - shift, len_q), 0), BLOCK_M) * BLOCK_M
    else:  # targets are seen up to the end of the last key's group
        last_key = tl.minimum(first_key + keys, len_k) - 1
        groups = (last_key - first_target) // segments.TARGET_GROUP + 1
        end = tl.minimum(len_q, first_target + groups * segments.TARGET_GROUP - shift)
    if segments.WINDOW is not None and segments.FULL_ROWS == 0:
        # The row whose rank is the last that sees the last key. Targets as keys have no end here,
        # nor have targets that share a rank from which it is still seen.
        last_key = tl.minimum(first_key + keys, len_k) - 1
        greatest = rank(last_key, segments) + segments.WINDOW
        limited = last_key < first_target
        if not segments.OWN_RANKS:
            limited = limited & (greatest < target_rank(segments))
        row = position_of_rank(greatest, contexts) - shift
        end = tl.where(limited, tl.minimum(end, tl.maximum(row + 1, 0)), end)
    gap_end = tl.maximum(tl.maximum(first_key - shift, 0) // BLOCK_M * BLOCK_M, gap_start)
    blocks = tl.maximum(tl.cdiv(end - gap_end, BLOCK_M), 0)
    return 0, gap_start + blocks * BLOCK_M, gap_start, gap_end


@triton.jit
def rank(position, segments):
    """The rank of a position, by which a window measures distance."""
    if not segments.OWN_RANKS:
        position = tl.minimum(position, segments.first_target)
    contexts = segments.contexts
    return tl.where(contexts > 0, tl.maximum(position - contexts + 1, 0), position)


@triton.jit
def position_of_rank(rank, contexts):
    """The position of a rank, 0 or more, the last one of rank 0, which all contexts have; of the
    ranks from the first target's on as if targets counted on."""
    return rank + tl.maximum(contexts - 1, 0)


@triton.jit
def target_rank(segments):
    """The rank of the first target, which all share without OWN_RANKS."""
    return rank(segments.first_target, segments)


@triton.jit
def sees(i, j, segments):
    """True where query i sees key j; i and j have shapes that broadcast. With a window, i sees an
    interval of the history and one of targets; without one the comparisons below are faster."""
    contexts, first_target = segments.contexts, segments.first_target
    TARGET_GROUP: tl.constexpr = segments.TARGET_GROUP
    if segments.WINDOW is None:
        same_group = (i - first_target) // TARGET_GROUP == (j - first_target) // TARGET_GROUP
        seen = (j <= i) & ((j < first_target) | same_group)
        seen = seen | ((i < contexts) & (j < first_target))
    else:
        last = tl.where(i < contexts, first_target - 1, tl.minimum(i, first_target - 1))
        query_rank = rank(i, segments)
        least = query_rank - segments.WINDOW
        first = tl.where(least > 0, position_of_rank(least, contexts), 0)
        if segments.FULL_ROWS > 0:
            full = query_rank >= target_rank(segments) - segments.FULL_ROWS
            first = tl.where(full, 0, first)
        group = first_target + (i - first_target) // TARGET_GROUP * TARGET_GROUP
        first_of_group = tl.maximum(group, first_target)
        if segments.OWN_RANKS:
            first_of_group = tl.maximum(first_of_group, i - segments.WINDOW)
        seen = ((j >= first) & (j <= last)) | ((j >= first_of_group) & (j <= i))
    return seen


@triton.jit
def sees_all(position, first_key, ROWS: tl.constexpr, KEYS: tl.constexpr, segments):
    """True only if ROWS rows see each of KEYS keys, all of the history. False may be wrong, and
    costs a mask."""
    whole = (position >= first_key + KEYS - 1) & (first_key + KEYS <= segments.first_target)
    if segments.WINDOW is not None:
        greatest = rank(position + ROWS - 1, segments)
        near = greatest - rank(first_key, segments) <= segments.WINDOW
        if segments.FULL_ROWS > 0:
            least = rank(position, segments)
            near = near | (least >= target_rank(segments) - segments.FULL_ROWS)
        whole = whole & near
    return whole
