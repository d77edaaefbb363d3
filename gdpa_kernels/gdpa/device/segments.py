"""The HSTU mask of a sequence [contexts | history | targets], for the kernels.

Positions count from the start of the sequence, of queries too (`causal` "lower_right"). Contexts
see all but targets, history what is at or before it, targets all but other groups' targets:

| row, key | contexts | history | targets              |
|----------|----------|---------|----------------------|
| contexts | all      | all     | none                 |
| history  | all      | j <= i  | none                 |
| targets  | all      | all     | of its group, j <= i |

A window limits the distance of ranks: a context has rank 0, the history counts on from there, and
targets share the rank after it, or with OWN_RANKS count on. FULL_ROWS: the last ranks of the
history and those of targets, which no window limits.

A block of rows sees two intervals of keys, of the history and of its targets' groups; a block of
keys is seen by two intervals of rows. With `skip_gap` one loop runs over both.
"""

import triton
import triton.language as tl

from gdpa_kernels.gdpa.device.work_list import number


@triton.jit
def segments_of(segments_ptr, batch, len_k):
    """(contexts, end of the history) of a sequence; segments_ptr: int32 [sequences,
    2], targets and contexts of each."""
    pointer = segments_ptr + batch.to(tl.int64) * 2
    return tl.load(pointer + 1), len_k - tl.load(pointer)


@triton.jit
def parts_of(list_ptr, segments_ptr, item, len_q, len_k, options):
    """(position of row 0, contexts, end of the history) of the sequence of a list's entry."""
    shift, contexts, history = 0, 0, 0
    if options.LOWER_RIGHT:
        shift = len_k - len_q
    if options.SEGMENTS:
        contexts, history = segments_of(segments_ptr, number(list_ptr, item), len_k)
    return shift, contexts, history


@triton.jit
def skip_gap(index, gap_start, gap_end):
    """The position of a loop's index in two intervals: itself before gap_start, then from gap_end
    on."""
    return tl.where(index < gap_start, index, index - gap_start + gap_end)


@triton.jit
def key_stretches(
    position, rows, len_k, contexts, history,
    BLOCK_N: tl.constexpr, TARGET_GROUP: tl.constexpr,
    WINDOW: tl.constexpr, FULL_ROWS: tl.constexpr, OWN_RANKS: tl.constexpr,
):  # fmt: skip
    """(start, end, gap_start, gap_end) of the loop over keys that `rows` rows from `position` on
    see."""
    end = tl.minimum(position + rows, len_k)
    seen = tl.where(position < contexts, history, tl.minimum(end, history))
    gap_start = tl.cdiv(seen, BLOCK_N) * BLOCK_N
    target = tl.maximum(position, history) - history
    gap_end = (history + target // TARGET_GROUP * TARGET_GROUP) // BLOCK_N * BLOCK_N
    gap_end = tl.maximum(gap_end, gap_start)
    more = tl.where(end > history, tl.maximum(tl.cdiv(end - gap_end, BLOCK_N), 0), 0) * BLOCK_N
    start = 0
    if WINDOW is not None:  # from the key of the least rank that the first row sees
        least = rank(position, contexts, history, OWN_RANKS) - WINDOW
        limited = (position >= contexts) & (least > 0)
        if FULL_ROWS > 0:
            last = rank(position + rows - 1, contexts, history, OWN_RANKS)
            limited = limited & (last < rank(history, contexts, history, False) - FULL_ROWS)
        key = least + tl.maximum(contexts - 1, 0)
        start = tl.minimum(tl.where(limited, key // BLOCK_N * BLOCK_N, 0), gap_start)
    return start, gap_start + more, gap_start, gap_end


@triton.jit
def row_stretches(
    first_key, keys, len_q, len_k, contexts, history,
    BLOCK_M: tl.constexpr, TARGET_GROUP: tl.constexpr,
    WINDOW: tl.constexpr, FULL_ROWS: tl.constexpr, OWN_RANKS: tl.constexpr,
):  # fmt: skip
    """(start, end, gap_start, gap_end) of the loop over rows that see any of `keys` keys."""
    shift = len_k - len_q
    gap_start = 0
    end = len_q
    if first_key < history:
        gap_start = tl.cdiv(tl.maximum(tl.minimum(contexts - shift, len_q), 0), BLOCK_M) * BLOCK_M
    else:
        last = (tl.minimum(first_key + keys, len_k) - 1 - history) // TARGET_GROUP + 1
        end = tl.minimum(len_q, history + last * TARGET_GROUP - shift)
    if WINDOW is not None and FULL_ROWS == 0:  # to the row of the greatest rank that sees a key
        last_key = tl.minimum(first_key + keys, len_k) - 1
        most = rank(last_key, contexts, history, OWN_RANKS) + WINDOW
        limited = last_key < history
        if not OWN_RANKS:
            limited = limited & (most < rank(history, contexts, history, False))
        row = most + tl.maximum(contexts - 1, 0) - shift
        end = tl.where(limited, tl.minimum(end, tl.maximum(row + 1, 0)), end)
    gap_end = tl.maximum(tl.maximum(first_key - shift, 0) // BLOCK_M * BLOCK_M, gap_start)
    more = tl.maximum(tl.cdiv(end - gap_end, BLOCK_M), 0) * BLOCK_M
    return 0, gap_start + more, gap_start, gap_end


@triton.jit
def rank(position, contexts, history, OWN_RANKS: tl.constexpr):
    """The rank of a position, by which a window measures distance."""
    if not OWN_RANKS:
        position = tl.minimum(position, history)
    return tl.where(contexts > 0, tl.maximum(position - contexts + 1, 0), position)


@triton.jit
def counts(
    i, j, contexts, history,
    WINDOW: tl.constexpr, TARGET_GROUP: tl.constexpr, FULL_ROWS: tl.constexpr,
    OWN_RANKS: tl.constexpr,
):  # fmt: skip
    """True where query i sees key j; i and j have shapes that broadcast.

    With a window, i sees an interval of the history and one of targets: a pair is four comparisons
    (a mask without one is faster as written here).
    """
    if WINDOW is None:
        same = (i - history) // TARGET_GROUP == (j - history) // TARGET_GROUP
        seen = ((j <= i) & ((j < history) | same)) | ((i < contexts) & (j < history))
    else:
        last = tl.where(i < contexts, history - 1, tl.minimum(i, history - 1))
        query_rank = rank(i, contexts, history, OWN_RANKS)
        least = query_rank - WINDOW
        first = tl.where(least > 0, least + tl.maximum(contexts - 1, 0), 0)
        if FULL_ROWS > 0:
            full = query_rank >= rank(history, contexts, history, False) - FULL_ROWS
            first = tl.where(full, 0, first)
        group = tl.maximum(history + (i - history) // TARGET_GROUP * TARGET_GROUP, history)
        if OWN_RANKS:
            group = tl.maximum(group, i - WINDOW)
        seen = ((j >= first) & (j <= last)) | ((j >= group) & (j <= i))
    return seen


@triton.jit
def counted(i, j, contexts, history, options):
    """`counts` with the constants of `options`."""
    return counts(
        i, j, contexts, history,
        options.WINDOW, options.TARGET_GROUP, options.FULL_ROWS, options.OWN_RANKS,
    )  # fmt: skip


@triton.jit
def all_count(
    position, first_key, ROWS: tl.constexpr, KEYS: tl.constexpr, contexts, history, options
):  # fmt: skip
    """True only if ROWS rows see each of KEYS keys, all of the history."""
    whole = (position >= first_key + KEYS - 1) & (first_key + KEYS <= history)
    if options.WINDOW is not None:
        most = rank(position + ROWS - 1, contexts, history, options.OWN_RANKS)
        near = most - rank(first_key, contexts, history, options.OWN_RANKS) <= options.WINDOW
        if options.FULL_ROWS > 0:
            least = rank(position, contexts, history, options.OWN_RANKS)
            near = near | (least >= rank(history, contexts, history, False) - options.FULL_ROWS)
        whole = whole & near
    return whole
