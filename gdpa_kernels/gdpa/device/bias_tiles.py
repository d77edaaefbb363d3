"""The relative bias of a tile of pairs, for forward and backward v1 (bias.py has the definition).

i and j are positions of queries and keys, int32 of two shapes that go together: [rows, 1] and [1,
keys] or the other way round. The query at position i is row i - shift of its sequence.

BIAS is (entries, head stride) of the table of positions, then of that of times. A head stride of 0:
one table for all heads. 0 entries: no such table.
"""

import triton
import triton.language as tl


@triton.constexpr_function
def search_steps(entries):
    """Steps of a binary search among `entries` buckets."""
    return (entries - 1).bit_length()


@triton.jit
def time_buckets(
    i, j, shift, len_q, len_k, start_q, start_k, times_q_ptr, times_k_ptr, thresholds_ptr,
    BUCKETS: tl.constexpr,
):  # fmt: skip
    """The number of thresholds at or below the time between query and key, by a binary search among
    integers, as the definition. Pairs that do not exist have some bucket."""
    row = i - shift
    query_time = tl.load(times_q_ptr + start_q + row, mask=row < len_q, other=0)
    key_time = tl.load(times_k_ptr + start_k + j, mask=(j >= 0) & (j < len_k), other=0)
    time = tl.abs(query_time - key_time)
    bucket = tl.zeros(time.shape, tl.int32)
    for step in tl.static_range(search_steps(BUCKETS)):
        probe = bucket + (1 << (search_steps(BUCKETS) - 1 - step))
        exists = probe < BUCKETS
        threshold = tl.load(thresholds_ptr + probe - 1, mask=exists, other=0)
        bucket = tl.where(exists & (threshold <= time), probe, bucket)
    return bucket


@triton.jit
def add_bias(
    s, first_row, position, first_key, head, len_q, len_k, start_q, start_k,
    position_ptr, time_ptr, times_q_ptr, times_k_ptr, thresholds_ptr, BIAS: tl.constexpr,
    KEYS_FIRST: tl.constexpr = False, shared_from=None,
):  # fmt: skip
    """s plus the bias of the pairs that exist. s: scaled scores [rows, keys], or with KEYS_FIRST
    [keys, rows]. position: of first_row. shared_from: positions after it count as it, None for
    none."""
    if KEYS_FIRST:
        i = position + tl.arange(0, s.shape[1])[None, :]
        j = first_key + tl.arange(0, s.shape[0])[:, None]
    else:
        i = position + tl.arange(0, s.shape[0])[:, None]
        j = first_key + tl.arange(0, s.shape[1])[None, :]
    shift = position - first_row
    exists = (i - shift < len_q) & (j >= 0) & (j < len_k)
    head = tl.cast(head, tl.int64)
    if position_ptr is not None:
        MOST: tl.constexpr = BIAS[0] // 2  # entries are of distances -MOST .. MOST
        distance = j - i
        if shared_from is not None:
            distance = tl.minimum(j, shared_from) - tl.minimum(i, shared_from)
        distance = tl.minimum(tl.maximum(distance, -MOST), MOST)
        position_ptr += head * BIAS[1] + MOST
        s += tl.load(position_ptr + distance, mask=exists, other=0.0).to(tl.float32)
    if time_ptr is not None:
        bucket = time_buckets(
            i, j, shift, len_q, len_k, start_q, start_k, times_q_ptr, times_k_ptr, thresholds_ptr,
            BIAS[2],
        )  # fmt: skip
        time_ptr += head * BIAS[3]
        s += tl.load(time_ptr + bucket, mask=exists, other=0.0).to(tl.float32)
    return s
