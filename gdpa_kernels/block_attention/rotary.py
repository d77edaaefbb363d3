"""Interleaved rotary embedding: pieces for the kernels, and a kernel of its own.

The pair (x[2i], x[2i + 1]) of a token is rotated by its (sin[i], cos[i]), the same for every head.
The transpose of that map carries gradients back; nothing is assumed of sin and cos, so it need not
be the inverse.

`rotary` is the baseline that a fused kernel must beat: it reads and writes every element once, 16
bytes at a time, and reads sin and cos once for all heads of all tensors.
"""

import torch
import triton
import triton.language as tl

from gdpa_kernels.calling.launch import cdiv, launch, next_power_of_2
from gdpa_kernels.device.rotation import rotate


@triton.jit
def load_sin_cos(
    sin_ptr, cos_ptr, first_row, rows, first_dim,
    ROWS: tl.constexpr, STRIDES: tl.constexpr, HEAD_DIM: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """sin and cos [ROWS, WIDTH // 2], fp32, for columns first_dim .. of the rows from first_row on.

    STRIDES are (token, dim) of sin, then of cos, in elements. What does not exist reads as zero.
    """
    local = tl.arange(0, ROWS)
    pairs = first_dim // 2 + tl.arange(0, WIDTH // 2).to(tl.int64)
    mask = (local < rows)[:, None]
    if HEAD_DIM % WIDTH != 0:
        mask = mask & (pairs < HEAD_DIM // 2)[None, :]
    row = (first_row.to(tl.int64) + local)[:, None]
    sin = tl.load(sin_ptr + (row * STRIDES[0] + pairs[None, :] * STRIDES[1]), mask=mask, other=0.0)
    cos = tl.load(cos_ptr + (row * STRIDES[2] + pairs[None, :] * STRIDES[3]), mask=mask, other=0.0)
    return sin.to(tl.float32), cos.to(tl.float32)


def sin_cos_strides(rotary: tuple[torch.Tensor, torch.Tensor] | None) -> tuple[int, ...]:
    """STRIDES of `load_sin_cos`; zeros where nothing is rotated."""
    return (0, 0, 0, 0) if rotary is None else (*rotary[0].stride(), *rotary[1].stride())


@triton.jit
def _rotate_heads(
    x_ptr, y_ptr, row, mask, sin, cos,
    X_STRIDES: tl.constexpr, Y_STRIDES: tl.constexpr, NUM_HEADS: tl.constexpr,
    WIDTH: tl.constexpr,
):  # fmt: skip
    """All heads of some rows of one tensor."""
    row = row.to(tl.int64)
    dims = tl.arange(0, WIDTH).to(tl.int64)[None, :]
    for head in tl.static_range(NUM_HEADS):
        x_ptrs = x_ptr + (row * X_STRIDES[0] + head * X_STRIDES[1] + dims * X_STRIDES[2])
        y = rotate(tl.load(x_ptrs, mask=mask, other=0.0).to(tl.float32), sin, cos)
        y_ptrs = y_ptr + (row * Y_STRIDES[0] + head * Y_STRIDES[1] + dims * Y_STRIDES[2])
        tl.store(y_ptrs, y.to(y_ptr.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["total"])
def rotary_kernel(
    q_ptr, k_ptr, v_ptr, q_out_ptr, k_out_ptr, v_out_ptr, sin_ptr, cos_ptr, total,
    Q_STRIDES: tl.constexpr, K_STRIDES: tl.constexpr, V_STRIDES: tl.constexpr,
    Q_OUT_STRIDES: tl.constexpr, K_OUT_STRIDES: tl.constexpr, V_OUT_STRIDES: tl.constexpr,
    TURN_STRIDES: tl.constexpr, NUM_HEADS_Q: tl.constexpr, NUM_HEADS_K: tl.constexpr,
    HEAD_DIM: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr, TRANSPOSED: tl.constexpr,
):  # fmt: skip
    """All heads of ROWS tokens of q, k and v; v_ptr None: of q and k alone."""
    first_row = tl.program_id(0) * ROWS
    rows = total - first_row
    sin, cos = load_sin_cos(
        sin_ptr, cos_ptr, first_row, rows, 0, ROWS, TURN_STRIDES, HEAD_DIM, WIDTH
    )
    if TRANSPOSED:
        sin = -sin
    local = tl.arange(0, ROWS)
    row = (first_row.to(tl.int64) + local)[:, None]
    mask = (local < rows)[:, None]
    if WIDTH != HEAD_DIM:
        mask = mask & (tl.arange(0, WIDTH) < HEAD_DIM)[None, :]
    _rotate_heads(
        q_ptr, q_out_ptr, row, mask, sin, cos, Q_STRIDES, Q_OUT_STRIDES, NUM_HEADS_Q, WIDTH
    )
    _rotate_heads(
        k_ptr, k_out_ptr, row, mask, sin, cos, K_STRIDES, K_OUT_STRIDES, NUM_HEADS_K, WIDTH
    )
    if v_ptr is not None:
        _rotate_heads(
            v_ptr, v_out_ptr, row, mask, sin, cos, V_STRIDES, V_OUT_STRIDES, NUM_HEADS_K, WIDTH
        )


def rotary(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor | None,
    sin_cos: tuple[torch.Tensor, torch.Tensor],
    *,
    transposed: bool = False,
    in_place: bool = False,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """q `[total, num_heads_q, head_dim]`, k and v `[total, num_heads_k, head_dim]`, rotated by
    sin_cos = (sin, cos), each `[total, head_dim // 2]`; v None stays None.

    transposed: the map that carries gradients back. in_place: over the arguments themselves.
    """
    total, num_heads_q, head_dim = q.shape
    tensors = (q, k, v)
    outs = tensors
    if not in_place:
        outs = tuple(None if x is None else x.new_empty(x.shape) for x in tensors)
    strides = [(0, 0, 0) if x is None else x.stride() for x in (*tensors, *outs)]
    rows = 32
    launch(
        rotary_kernel, (cdiv(total, rows),), q.device,
        *tensors, *outs, *sin_cos, total,
        Q_STRIDES=strides[0], K_STRIDES=strides[1], V_STRIDES=strides[2],
        Q_OUT_STRIDES=strides[3], K_OUT_STRIDES=strides[4], V_OUT_STRIDES=strides[5],
        TURN_STRIDES=sin_cos_strides(sin_cos), NUM_HEADS_Q=num_heads_q, NUM_HEADS_K=k.shape[1],
        HEAD_DIM=head_dim, WIDTH=next_power_of_2(head_dim), ROWS=rows,
        TRANSPOSED=transposed, num_warps=4,
    )  # fmt: skip
    return outs
