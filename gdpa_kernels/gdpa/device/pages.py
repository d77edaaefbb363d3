"""Tiles of keys and values of which a sequence's first ones lie in a page pool (`batch.PagedKV`).

The producer of forward v8 calls `entry_keys` for an entry of its work list, and for each tile
`locate_tile` and then `fetch_tile`, for keys and for values. The keys of a sequence are the cached
ones, in pages, and with HAS_PACKED those of the packed tensors k and v behind them (candidates).

A tile of BLOCK_N keys lies in one page, of which BLOCK_N is a divisor, and so is one copy by TMA;
rows behind the last cached token, which may hold anything, read as zero. Packed keys begin with a
tile of their own: behind 70 cached tokens, with tiles of 64, key 128 is the first packed one. Keys
70 to 127 are zeros and add nothing, since what multiplies their values is finite.
"""

from typing import NamedTuple

import triton
import triton.language as tl

from gdpa_kernels.device.rows import fetch_rows
from gdpa_kernels.gdpa.device import page_layout
from gdpa_kernels.gdpa.device.work_list import sequence_of

first_row = triton.jit(page_layout.first_row)
LEAST_PAGE_SIZE = 64  # the keys of the smallest tile


class PackedKeys(NamedTuple):
    """An entry's keys in packed tensors: first row, number, and how many keys precede them."""

    start: tl.tensor
    length: tl.tensor
    first_key: tl.tensor


class PagedKeys(NamedTuple):
    """An entry's keys in pages: where its sequence begins in the list of pages, the cached token
    that is the entry's first key, and all cached tokens of the sequence."""

    first_index: tl.tensor
    first_token: tl.tensor
    tokens: tl.tensor


@triton.jit
def entry_keys(
    list_ptr, item, start_q, len_q, start_k, len_k, kv_indptr_ptr, paged_ends_ptr, options
):  # fmt: skip
    """(`PackedKeys`, `PagedKeys`) of an entry. paged_ends_ptr: cu_seqlens of the cached tokens."""
    packed, paged = PackedKeys(start_k, len_k, 0), PagedKeys(0, 0, 0)
    if options.PAGE_SIZE is not None:
        sequence = sequence_of(list_ptr, item)
        start = tl.load(paged_ends_ptr + sequence)
        tokens = tl.load(paged_ends_ptr + sequence + 1) - start
        first_token = 0
        if not options.HAS_PACKED:
            # start_k counts cached tokens, and the entry may be a split of them: of those from 300
            # on, a split that starts at 428 has token 128 as its first key.
            first_token = start_k - start
        # Packed keys have the offsets of the queries, which are the candidates as well.
        packed = PackedKeys(start_q, len_q, tl.cdiv(tokens, options.BLOCK_N) * options.BLOCK_N)
        paged = PagedKeys(tl.load(kv_indptr_ptr + sequence), first_token, tokens)
    return packed, paged


@triton.jit
def locate_tile(kv_indices_ptr, paged, key, options):
    """(row in the pool of the tile's first key, cached tokens from there on, which may be none)."""
    row, tokens_left = 0, 0
    if options.PAGE_SIZE is not None:
        token = paged.first_token + key
        tokens_left = tl.maximum(paged.tokens - token, 0)
        index_ptr = kv_indices_ptr + paged.first_index + token // options.PAGE_SIZE
        page = tl.load(index_ptr, mask=tokens_left > 0, other=0)
        row = first_row(page, options.PAGE_SIZE) + token % options.PAGE_SIZE
    return row, tokens_left


@triton.jit
def fetch_tile(
    desc, pool_desc, buffer, full, packed, row, tokens_left, head, key, VALUES: tl.constexpr,
    options,
):  # fmt: skip
    """`fetch_rows` of a tile of keys, or of their VALUES, from a page or from packed tensors; row,
    tokens_left: of `locate_tile`. desc: of the packed tensor; without HAS_PACKED of the pool."""
    if options.PAGE_SIZE is None:
        fetch_rows(desc, buffer, full, packed.start, packed.length, head, key)
    else:
        if VALUES:
            row += options.PAGE_SIZE
        if not options.HAS_PACKED:
            fetch_rows(desc, buffer, full, row, tokens_left, head, 0)
        elif key < packed.first_key:
            fetch_rows(pool_desc, buffer, full, row, tokens_left, head, 0)
        else:
            key -= packed.first_key
            fetch_rows(desc, buffer, full, packed.start, packed.length, head, key)
