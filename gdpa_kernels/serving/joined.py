"""[history; candidates] of each user: keys and values from pages before new ones, in one copy."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from gdpa_kernels.calling.launch import cdiv, launch, next_power_of_2
from gdpa_kernels.serving.common import ELEMENTS, pointers_of


@triton.jit
def join_rows(
    old_ptr, new_ptr, out_ptr, old_row, is_old, new_row, is_new, out_row, head, dim, is_dim,
    NEW_STRIDES: tl.constexpr, STRIDES: tl.constexpr,
):  # fmt: skip
    """Copy keys or values of one head to out_row: where is_old, old_row of the pages, and where
    is_new, new_row of the new ones."""
    old = tl.load(pointers_of(old_ptr, old_row, head, dim, STRIDES), mask=is_old[:, None] & is_dim)
    new = tl.load(
        pointers_of(new_ptr, new_row, head, dim, NEW_STRIDES), mask=is_new[:, None] & is_dim
    )
    pointers = pointers_of(out_ptr, out_row, head, dim, STRIDES)
    tl.store(
        pointers, tl.where(is_old[:, None], old, new), mask=(is_old | is_new)[:, None] & is_dim
    )


@triton.jit(do_not_specialize=["blocks"])
def join_kernel(
    data_ptr, k_ptr, v_ptr, keys_ptr, values_ptr, slots_ptr, cu_seqlens_old_ptr,
    cu_seqlens_new_ptr, blocks,
    K_STRIDES: tl.constexpr, V_STRIDES: tl.constexpr, PAGE: tl.constexpr,
    NUM_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """ROWS joined rows of one user and one head; those in pages as `pages.rows_of` counts them."""
    pid = tl.program_id(0)
    head = pid % NUM_HEADS
    user = pid // NUM_HEADS // blocks
    row = pid // NUM_HEADS % blocks * ROWS + tl.arange(0, ROWS)
    start_old, start_new = tl.load(cu_seqlens_old_ptr + user), tl.load(cu_seqlens_new_ptr + user)
    length = tl.load(cu_seqlens_old_ptr + user + 1) - start_old
    new_row = row - length
    is_old = row < length
    is_new = (new_row >= 0) & (new_row < tl.load(cu_seqlens_new_ptr + user + 1) - start_new)
    slot = tl.load(slots_ptr + (start_old + row).to(tl.int64), mask=is_old, other=0)
    old_row = slot + slot // PAGE * PAGE
    dim = tl.arange(0, WIDTH)
    is_dim = (dim < HEAD_DIM)[None, :]
    STRIDES: tl.constexpr = (NUM_HEADS * HEAD_DIM, HEAD_DIM, 1)
    new_row += start_new
    out_row = row + start_old + start_new
    join_rows(
        data_ptr, k_ptr, keys_ptr, old_row, is_old, new_row, is_new, out_row, head, dim, is_dim,
        K_STRIDES, STRIDES,
    )  # fmt: skip
    join_rows(
        data_ptr, v_ptr, values_ptr, old_row + PAGE, is_old, new_row, is_new, out_row, head, dim,
        is_dim, V_STRIDES, STRIDES,
    )  # fmt: skip


def join(
    data: torch.Tensor, slots: torch.Tensor, cu_seqlens_history: torch.Tensor,
    max_seqlen_history: int, k: torch.Tensor, v: torch.Tensor, cu_seqlens: torch.Tensor,
    max_seqlen: int,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """Keys and values `[tokens, heads, head_dim]`: of each user those in its pages, then its rows
    of k and v.

    data: one layer, `[num_pages, 2, page_size, heads, head_dim]`, contiguous. slots,
    cu_seqlens_history, max_seqlen_history: of the histories, as `Pages` has them. k, v: any
    strides, with offsets cu_seqlens `[batch + 1]`, int32, of at most max_seqlen rows a user.
    """
    _, _, page, heads, head_dim = data.shape
    keys, values = (k.new_empty(len(slots) + len(k), heads, head_dim) for _ in "kv")
    width = next_power_of_2(head_dim)
    rows = max(1, ELEMENTS // width)
    blocks = cdiv(max_seqlen_history + max_seqlen, rows)
    launch(
        join_kernel, (blocks * (len(cu_seqlens) - 1) * heads,), data.device,
        data, k, v, keys, values, slots, cu_seqlens_history, cu_seqlens, blocks,
        K_STRIDES=k.stride(), V_STRIDES=v.stride(), PAGE=page, NUM_HEADS=heads,
        HEAD_DIM=head_dim, ROWS=rows, WIDTH=width, num_warps=4,
    )  # fmt: skip
    return keys, values
