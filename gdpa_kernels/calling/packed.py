"""q, k and v, or k and v, packed side by side in one tensor: both operators read them where they
lie, and write their gradients so, where PyTorch would concatenate those of three slices.

The arguments (q, k, v) of a call are three tensors; or (q and k and v, None, None); or (q, k and v,
None). A packed tensor has the heads of q first, then those of k, then those of v.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from gdpa_kernels.calling import checks
from gdpa_kernels.calling.base_batch import GradientTriple


def flatten(
    q: object, k: object, v: object, num_kv_heads: int | None
) -> tuple[tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None], int | None]:
    """The arguments, a packed one of `[total, 2 or 3, num_heads, head_dim]` as `[total, heads,
    head_dim]`; and the key heads of a q that holds all three, None for another q.

    Raises ValueError unless a packed tensor can be divided. Whether its parts are what an operator
    takes is for the caller to check.
    """
    if k is not None and num_kv_heads is not None:
        raise ValueError(f"num_kv_heads must be None unless q holds k and v, got {num_kv_heads!r}")
    name, whole, count = ("q", q, 3) if k is None else ("k", k, 2)
    if v is not None or not isinstance(whole, torch.Tensor):
        return (q, k, v), None
    if whole.dim() == 4 and whole.shape[1] == count:
        if num_kv_heads not in (None, whole.shape[2]):
            raise ValueError(
                f"num_kv_heads must be None or {whole.shape[2]} with a q of shape "
                f"{list(whole.shape)}, got {num_kv_heads!r}"
            )
        whole = whole.flatten(1, 2)
    heads = whole.shape[1] if whole.dim() == 3 else 0
    if heads == 0 or (heads % count and num_kv_heads is None):
        raise ValueError(
            f"{name} must have shape [total, heads, head_dim] with a multiple of {count} heads, "
            f"or [total, {count}, num_heads, head_dim], to hold what is None, "
            f"got {list(whole.shape)}"
        )
    if k is not None:
        return (q, whole, None), None
    num_kv_heads = heads // 3 if num_kv_heads is None else num_kv_heads
    integer = checks.is_integer(num_kv_heads)
    if not integer or not 0 < 3 * num_kv_heads <= heads:
        error = ValueError if integer else TypeError
        raise error(
            f"num_kv_heads must be an integer from 1 to a third of q's {heads} heads, "
            f"got {num_kv_heads!r}"
        )
    return (whole, None, None), num_kv_heads


def unpack(
    q: torch.Tensor, k: torch.Tensor | None, v: torch.Tensor | None, num_kv_heads: int | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """q, k and v, each `[total, heads, head_dim]`: slices of a packed tensor."""
    if v is not None:
        return q, k, v
    if k is not None:
        return q, *k.chunk(2, dim=1)
    return q.split((q.shape[1] - 2 * num_kv_heads, num_kv_heads, num_kv_heads), dim=1)


def needs_of_parts(
    k: torch.Tensor | None, v: torch.Tensor | None, needs: tuple[bool, bool, bool]
) -> tuple[bool, bool, bool]:
    """Whether dq, dk and dv are needed, where `needs` says it of q, k and v as they were given."""
    need_q, need_k, need_v = needs
    need_k = need_q if k is None else need_k
    return need_q, need_k, need_k if v is None else need_v


def gradients(
    backward: Callable[[GradientTriple, tuple[bool, bool, bool]], GradientTriple],
    q: torch.Tensor,
    k: torch.Tensor | None,
    v: torch.Tensor | None,
    num_kv_heads: int | None,
    needs: tuple[bool, bool, bool],
) -> GradientTriple:
    """The gradients of q, k and v as they were given, None for None.

    backward(buffers, needs) returns dq, dk and dv of the slices, in `buffers`, or in memory of its
    own where a buffer is None or it cannot write there.
    """
    if v is not None:
        return backward((None, None, None), needs)
    if k is None:
        whole = q.new_empty(q.shape)
        buffers = unpack(whole, None, None, num_kv_heads)
    else:
        whole = k.new_empty(k.shape)
        buffers = None, *whole.chunk(2, dim=1)
    computed = backward(buffers, needs_of_parts(k, v, needs))
    for part, x in zip(buffers, computed, strict=True):
        if part is not None and x is not None and x is not part:
            part.copy_(x)
    return (whole, None, None) if k is None else (computed[0], whole, None)
