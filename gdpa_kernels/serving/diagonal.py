"""The term of candidates that see themselves alone: one product of a row of q with its own of k.

out = add_to + output_scale activation(scale q.k) v, row by row; `score` calls `add_diagonal` with
the attention over the history as add_to. Nothing is multiplied as matrices, so memory is the bound:
q, k and v are read in the call's dtype, the sum in fp32 and the result in `out_dtype`, each once.
P stays in fp32.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from gdpa_kernels.calling.launch import cdiv, launch, next_power_of_2
from gdpa_kernels.gdpa.device.activations import activate_per_head
from gdpa_kernels.gdpa.device.custom import cache_key
from gdpa_kernels.gdpa.registration import check_activation, prove
from gdpa_kernels.serving.rows import ELEMENTS, row_pointers


@triton.jit(do_not_specialize=["total", "addends"])
def diagonal_kernel(
    q_ptr, k_ptr, v_ptr, add_ptr, out_ptr, total, addends, size, scale, output_scale,
    Q_STRIDES: tl.constexpr, K_STRIDES: tl.constexpr, V_STRIDES: tl.constexpr,
    ADD_STRIDES: tl.constexpr, OUT_STRIDES: tl.constexpr,
    NUM_HEADS: tl.constexpr, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr,
    ACTIVATION: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr, MOST_ADDENDS: tl.constexpr,
):  # fmt: skip
    """ROWS rows of one head, of `total`. add_ptr: tensors of `size` elements each, `addends` of
    them and at most MOST_ADDENDS, for which the loop is unrolled."""
    pid = tl.program_id(0)
    head = pid % NUM_HEADS
    row = pid // NUM_HEADS * ROWS + tl.arange(0, ROWS)
    dim = tl.arange(0, WIDTH)
    mask = (row < total)[:, None] & (dim < HEAD_DIM)[None, :]
    q = tl.load(row_pointers(q_ptr, row, head, dim, Q_STRIDES), mask=mask, other=0.0)
    k = tl.load(row_pointers(k_ptr, row, head // GROUP, dim, K_STRIDES), mask=mask, other=0.0)
    v = tl.load(row_pointers(v_ptr, row, head // GROUP, dim, V_STRIDES), mask=mask, other=0.0)
    out = tl.load(row_pointers(add_ptr, row, head, dim, ADD_STRIDES), mask=mask, other=0.0)
    out = out.to(tl.float32)
    for index in tl.static_range(1, MOST_ADDENDS):  # in the order of gdpa.device.sums.add_up
        pointers = row_pointers(add_ptr + index * size.to(tl.int64), row, head, dim, ADD_STRIDES)
        out += tl.load(pointers, mask=mask & (index < addends), other=0.0).to(tl.float32)
    EXACT: tl.constexpr = q_ptr.dtype.element_ty == tl.float32
    s = tl.sum(q.to(tl.float32) * k.to(tl.float32), axis=1)
    p = activate_per_head(s, scale, head, ACTIVATION, not EXACT) * output_scale
    out += p[:, None] * v.to(tl.float32)
    pointers = row_pointers(out_ptr, row, head, dim, OUT_STRIDES)
    tl.store(pointers, out.to(out_ptr.dtype.element_ty), mask=mask)


def add_diagonal(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    add_to: torch.Tensor,
    *,
    activation: str | tuple[str, ...] | list[str] = "gelu_tanh",
    scale: float | None = None,
    output_scale: float = 1.0,
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """add_to + output_scale activation(scale q.k) v of each row, `[tokens, heads, head_dim]`.

    q and add_to `[tokens, heads, head_dim]`, k and v `[tokens, kv_heads, head_dim]`, any strides,
    as `common.can_launch` allows; add_to may also be partial sums, contiguous `[addends, tokens,
    heads, head_dim]`; the options: as `gdpa`.
    """
    tokens, heads, head_dim = q.shape
    names = tuple(check_activation(activation, heads))
    prove(names, q.device)
    out = torch.empty(q.shape, dtype=out_dtype or q.dtype, device=q.device)
    width = next_power_of_2(head_dim)
    rows = max(1, ELEMENTS // width)
    addends = add_to.shape[0] if add_to.dim() == 4 else 1
    launch(
        diagonal_kernel, (cdiv(tokens, rows) * heads,), q.device,
        q, k, v, add_to, out, tokens, addends, out.numel(),
        head_dim**-0.5 if scale is None else float(scale), float(output_scale),
        Q_STRIDES=q.stride(), K_STRIDES=k.stride(), V_STRIDES=v.stride(),
        ADD_STRIDES=add_to.stride()[-3:], OUT_STRIDES=out.stride(),
        NUM_HEADS=heads, GROUP=heads // k.shape[1], HEAD_DIM=head_dim,
        ACTIVATION=",".join(map(cache_key, names)), ROWS=rows, WIDTH=width,
        MOST_ADDENDS=next_power_of_2(addends), num_warps=4,
    )  # fmt: skip
    return out
