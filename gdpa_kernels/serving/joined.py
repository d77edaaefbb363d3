"""[history; candidates] of each user: cached keys and values before those of the candidates.

`PagedCache.read_before` calls `join`, which copies each row once by a kernel, or on devices without
one, and with gradients, `common.join_copies` of what it has copied out of the pages.

Three cached rows of user 0 and two of user 1, with candidates x of 0 and y, z of 1, become

    out   0 1 2 x 0 1 y z      cached offsets [0, 3, 5] + candidates' [0, 1, 3] = [0, 4, 8]

so row i of a user's history goes to the sum of both starts + i, and its candidate j behind the
history, to the sum of both starts + length of the history + j.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from gdpa_kernels.calling.launch import cdiv, launch, next_power_of_2
from gdpa_kernels.gdpa.device import page_layout
from gdpa_kernels.serving.rows import ELEMENTS, row_pointers

key_row = triton.jit(page_layout.key_row)


@triton.jit
def copy_rows(
    pool_ptr, new_ptr, out_ptr, pool_row, is_cached, new_row, is_new, out_row, head, dim, is_dim,
    NEW_STRIDES: tl.constexpr, STRIDES: tl.constexpr,
):  # fmt: skip
    """Copy keys or values of one head to out_row: where is_cached, pool_row of the pool, and where
    is_new, new_row of the candidates."""
    cached = tl.load(
        row_pointers(pool_ptr, pool_row, head, dim, STRIDES), mask=is_cached[:, None] & is_dim
    )
    new = tl.load(
        row_pointers(new_ptr, new_row, head, dim, NEW_STRIDES), mask=is_new[:, None] & is_dim
    )
    pointers = row_pointers(out_ptr, out_row, head, dim, STRIDES)
    mask = (is_cached | is_new)[:, None] & is_dim
    tl.store(pointers, tl.where(is_cached[:, None], cached, new), mask=mask)


@triton.jit(do_not_specialize=["blocks"])
def join_kernel(
    pool_ptr, k_ptr, v_ptr, keys_ptr, values_ptr, slots_ptr, cached_ends_ptr, new_ends_ptr, blocks,
    K_STRIDES: tl.constexpr, V_STRIDES: tl.constexpr, PAGE_SIZE: tl.constexpr,
    NUM_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """ROWS joined rows of one user and one head; a user has `blocks` programs for each head."""
    pid = tl.program_id(0)
    head = pid % NUM_HEADS
    user = pid // NUM_HEADS // blocks
    row = pid // NUM_HEADS % blocks * ROWS + tl.arange(0, ROWS)
    start_cached, start_new = tl.load(cached_ends_ptr + user), tl.load(new_ends_ptr + user)
    length = tl.load(cached_ends_ptr + user + 1) - start_cached
    new_row = row - length
    is_cached = row < length
    is_new = (new_row >= 0) & (new_row < tl.load(new_ends_ptr + user + 1) - start_new)
    slot = tl.load(slots_ptr + (start_cached + row).to(tl.int64), mask=is_cached, other=0)
    pool_row = key_row(slot, PAGE_SIZE)
    dim = tl.arange(0, WIDTH)
    is_dim = (dim < HEAD_DIM)[None, :]
    STRIDES: tl.constexpr = (NUM_HEADS * HEAD_DIM, HEAD_DIM, 1)
    new_row += start_new
    out_row = row + start_cached + start_new
    copy_rows(
        pool_ptr, k_ptr, keys_ptr, pool_row, is_cached, new_row, is_new, out_row, head, dim, is_dim,
        K_STRIDES, STRIDES,
    )  # fmt: skip
    copy_rows(
        pool_ptr, v_ptr, values_ptr, pool_row + PAGE_SIZE, is_cached, new_row, is_new, out_row,
        head, dim, is_dim, V_STRIDES, STRIDES,
    )  # fmt: skip


def join(
    pool: torch.Tensor, slots: torch.Tensor, cached_ends: torch.Tensor, longest_cached: int,
    k: torch.Tensor, v: torch.Tensor, new_ends: torch.Tensor, longest_new: int,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """Keys and values `[tokens, heads, head_dim]`: of each user the cached ones, then its rows of
    k and v.

    pool: of one layer, `[num_pages, 2, page_size, heads, head_dim]`, contiguous. slots,
    cached_ends, longest_cached: slots, cu_seqlens and max_seqlen of the page table. k, v: any
    strides, with offsets new_ends `[batch + 1]`, int32, of at most longest_new rows a user.
    """
    _, _, page_size, heads, head_dim = pool.shape
    keys, values = (k.new_empty(len(slots) + len(k), heads, head_dim) for _ in "kv")
    width = next_power_of_2(head_dim)
    rows = max(1, ELEMENTS // width)
    blocks = cdiv(longest_cached + longest_new, rows)
    launch(
        join_kernel, (blocks * (len(new_ends) - 1) * heads,), pool.device,
        pool, k, v, keys, values, slots, cached_ends, new_ends, blocks,
        K_STRIDES=k.stride(), V_STRIDES=v.stride(), PAGE_SIZE=page_size, NUM_HEADS=heads,
        HEAD_DIM=head_dim, ROWS=rows, WIDTH=width, num_warps=4,
    )  # fmt: skip
    return keys, values
