"""Loads of keys and values from pages (batch.History).

A tile of keys lies in one page where BLOCK_N divides page_size, and is one copy: rows beyond the
history, which may hold anything, read as zero. The keys in packed tensors start at the next whole
tile.
The zero rows between add nothing, since what multiplies their values is finite.
"""

import triton
import triton.language as tl

from gdpa_kernels.device.rows import fetch_rows
from gdpa_kernels.gdpa.device.work_list import number

LEAST = 64  # keys of the smallest tile


@triton.jit
def keys_of(list_ptr, item, start_q, len_q, start_k, len_k, indptr_ptr, ends_ptr, options):
    """(start, length, first key) of an entry's keys in packed tensors, which have its queries'
    offsets where a history comes first; and of those in pages (index of the first page in the list,
    first token, tokens)."""
    packed = start_k, len_k, 0
    paged = 0, 0, 0
    if options.PAGE is not None:
        sequence = number(list_ptr, item)
        start = tl.load(ends_ptr + sequence)
        tokens = tl.load(ends_ptr + sequence + 1) - start
        first = 0
        if not options.OWN_KEYS:  # an entry may be a piece of the history
            first = start_k - start
        packed = start_q, len_q, tl.cdiv(tokens, options.BLOCK_N) * options.BLOCK_N
        paged = tl.load(indptr_ptr + sequence), first, tokens
    return packed, paged


@triton.jit
def page_of(pages_ptr, paged, key, options):
    """(row of a tile's first key, tokens of the history from there on, which may be none)."""
    row, left = 0, 0
    if options.PAGE is not None:
        listed, first, tokens = paged
        token = first + key
        left = tl.maximum(tokens - token, 0)
        page = tl.load(pages_ptr + listed + token // options.PAGE, mask=left > 0, other=0)
        row = page * (2 * options.PAGE) + token % options.PAGE
    return row, left


@triton.jit
def fetch_keys(
    desc, history_desc, buffer, full, packed, row, left, head, key, VALUES: tl.constexpr, options
):
    """`fetch_rows` of a tile of keys or VALUES from a page or from the packed tensors. Without the
    latter `desc` is of the pages."""
    start, length, first = packed
    if options.PAGE is None:
        fetch_rows(desc, buffer, full, start, length, head, key)
    else:
        if VALUES:
            row += options.PAGE
        if not options.OWN_KEYS:
            fetch_rows(desc, buffer, full, row, left, head, 0)
        elif key < first:
            fetch_rows(history_desc, buffer, full, row, left, head, 0)
        else:
            fetch_rows(desc, buffer, full, start, length, head, key - first)
