"""The layout of a page pool: in which rows the keys and values of cached tokens lie.

The layout is that of FlashInfer, FBGEMM and recsys-examples. A page holds PAGE_SIZE tokens of one
user, their keys and then their values, `[2, PAGE_SIZE, heads, dim]`. As rows, `[num_pages * 2 *
PAGE_SIZE, heads, dim]`, page p begins at row 2 p PAGE_SIZE: its token t has its key in row 2 p
PAGE_SIZE + t, and its value PAGE_SIZE rows further. A slot counts tokens: p PAGE_SIZE + t.

With pages of 4 tokens, token 2 of page 1 has slot 6, its key in row 10 and its value in row 14:

    row    0..3     4..7       8  9 10 11   12 13 14 15
    page 0: keys   values   page 1: keys        values

Formulas of numbers and of tensors; kernels take them by `triton.jit`.
"""

import torch


def first_row(page, PAGE_SIZE):
    """The row with the key of a page's first token."""
    return page * (2 * PAGE_SIZE)


def key_row(slot, PAGE_SIZE):
    """The row with the key of a slot: p PAGE_SIZE + t and, for the values of the pages before it,
    p PAGE_SIZE more."""
    return slot + slot // PAGE_SIZE * PAGE_SIZE


def key_and_value_rows(slots: torch.Tensor, page_size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The rows of the keys and of the values in these slots, int64 `[tokens]` each."""
    keys = key_row(slots, page_size)
    return keys, keys + page_size
