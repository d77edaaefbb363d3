"""Loads of keys and values whose first ones, the history, lie in pages (`batch.History`), for
forward v8.

PAGE tokens have 2 PAGE consecutive rows: their keys, then their values. A tile of BLOCK_N keys lies
in one page, and is one copy; rows beyond the history, which may hold anything, read as zero. Keys
in the tensors k and v (OWN_KEYS) follow from the next whole tile on. The zero keys between add
nothing, since what multiplies their values is finite.
"""

from typing import NamedTuple

import triton
import triton.language as tl

from gdpa_kernels.device.rows import fetch_rows
from gdpa_kernels.gdpa.device.work_list import sequence_of

LEAST = 64  # keys of the smallest tile


class Jagged(NamedTuple):
    """An entry's keys in the tensors k and v: first row, number, and how many keys precede them."""

    start: tl.tensor
    length: tl.tensor
    first_key: tl.tensor


class Paged(NamedTuple):
    """An entry's keys in pages: index of its sequence's first page in the list of pages, the token
    that is the entry's first key, and tokens of the whole history."""

    first_page: tl.tensor
    first_token: tl.tensor
    tokens: tl.tensor


@triton.jit
def keys_of(list_ptr, item, start_q, len_q, start_k, len_k, indptr_ptr, cu_seqlens_ptr, options):
    """(`Jagged`, `Paged`) of an entry. With a history, jagged ones have the offsets of queries."""
    jagged, paged = Jagged(start_k, len_k, 0), Paged(0, 0, 0)
    if options.PAGE is not None:
        sequence = sequence_of(list_ptr, item)
        start = tl.load(cu_seqlens_ptr + sequence)
        tokens = tl.load(cu_seqlens_ptr + sequence + 1) - start
        first_token = 0
        if not options.OWN_KEYS:  # start_k counts history alone, of which an entry may be a split
            first_token = start_k - start
        jagged = Jagged(start_q, len_q, tl.cdiv(tokens, options.BLOCK_N) * options.BLOCK_N)
        paged = Paged(tl.load(indptr_ptr + sequence), first_token, tokens)
    return jagged, paged


@triton.jit
def row_in_pages(pages_ptr, paged, key, options):
    """(row of a tile's first key, tokens of the history from there on, which may be none)."""
    row, tokens_left = 0, 0
    if options.PAGE is not None:
        token = paged.first_token + key
        tokens_left = tl.maximum(paged.tokens - token, 0)
        page_ptr = pages_ptr + paged.first_page + token // options.PAGE
        page = tl.load(page_ptr, mask=tokens_left > 0, other=0)
        row = page * (2 * options.PAGE) + token % options.PAGE
    return row, tokens_left


@triton.jit
def fetch_keys(
    desc, history_desc, buffer, full, jagged, row, tokens_left, head, key, VALUES: tl.constexpr,
    options,
):  # fmt: skip
    """`fetch_rows` of a tile of keys, or of their VALUES, from a page or from tensors k and v; row,
    tokens_left: of `row_in_pages`. desc: of tensors k and v, without OWN_KEYS of pages."""
    if options.PAGE is None:
        fetch_rows(desc, buffer, full, jagged.start, jagged.length, head, key)
    else:
        if VALUES:
            row += options.PAGE
        if not options.OWN_KEYS:
            fetch_rows(desc, buffer, full, row, tokens_left, head, 0)
        elif key < jagged.first_key:
            fetch_rows(history_desc, buffer, full, row, tokens_left, head, 0)
        else:
            key -= jagged.first_key
            fetch_rows(desc, buffer, full, jagged.start, jagged.length, head, key)
