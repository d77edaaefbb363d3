"""The definition of block attention in PyTorch: the mathematics, all blocks at once.

A sequence is cut into blocks of `block_size` consecutive tokens from its start; the last one may be
shorter. For each block and head, with Q, K, V [rows, head_dim], rotated first if asked for:

    S = scale Q K^T,   P = softmax of each row of S,   O = P V.

The gradients of dO need nothing but Q, K and V:

    dV = P^T dO,   dP = dO V^T,   dS = P * (dP - rowsum(P * dP)),
    dQ = scale dS K,   dK = scale dS^T Q,

rotated back by the transpose. `forward` and `backward` compute in fp32, in fp64 of fp64 tensors,
and round once, beside q, k and v after a rotation: fp64 tensors make them the oracle.
`forward_in_dtype` and `backward_in_dtype` do every step in the dtype of the arguments: the honest
low-precision baseline that the error budget of `testing` is computed from. No kernel imports this.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from gdpa_kernels.gdpa.reference import wide

if TYPE_CHECKING:
    from gdpa_kernels.block_attention.batch import Batch


def rotate(x: torch.Tensor, sin: torch.Tensor, cos: torch.Tensor) -> torch.Tensor:
    """Rotate the pairs (x[..., 2i], x[..., 2i + 1]) of x `[total, num_heads, head_dim]`.

    sin, cos `[total, head_dim // 2]`: y[2i] = cos x[2i] - sin x[2i + 1] and y[2i + 1] = cos x[2i +
    1] + sin x[2i]. Nothing is assumed of them. Rounded once, to the dtype of x.
    """
    even, odd = x[..., 0::2], x[..., 1::2]
    sin, cos = sin[:, None], cos[:, None]
    turned = torch.stack((even * cos - odd * sin, odd * cos + even * sin), dim=-1)
    return turned.flatten(-2).to(x.dtype)


def rotate_transposed(g: torch.Tensor, sin: torch.Tensor, cos: torch.Tensor) -> torch.Tensor:
    """The transpose of `rotate`, which carries gradients back; its inverse only where sin^2 + cos^2
    = 1."""
    return rotate(g, -sin, cos)


def tokens_of_blocks(cu_seqlens: torch.Tensor, block_size: int) -> torch.Tensor:
    """The tokens of every block, int64 `[num_blocks, block_size]`; -1 beyond a block's end."""
    device, lengths = cu_seqlens.device, cu_seqlens.diff().long()
    blocks = (lengths + block_size - 1) // block_size
    ends = cu_seqlens[1:].long().repeat_interleave(blocks)
    first = (
        torch.arange(int(blocks.sum()), device=device)
        - (blocks.cumsum(0) - blocks)[
            torch.arange(len(blocks), device=device).repeat_interleave(blocks)
        ]
    )
    starts = cu_seqlens[:-1].long().repeat_interleave(blocks) + first * block_size
    tokens = starts[:, None] + torch.arange(block_size, device=device)
    return tokens.masked_fill(tokens >= ends[:, None], -1)


def _gather(x: torch.Tensor, tokens: torch.Tensor, group: int = 1) -> torch.Tensor:
    """x `[total, num_heads, head_dim]` by blocks, `[num_blocks, num_heads * group, block_size,
    head_dim]`; zero beyond a block's end."""
    blocks = x[tokens.clamp(min=0)] if len(x) else x.new_zeros(*tokens.shape, *x.shape[1:])
    blocks = torch.where((tokens >= 0)[..., None, None], blocks, 0)
    return blocks.transpose(1, 2).repeat_interleave(group, dim=1)


def _scatter(blocks: torch.Tensor, tokens: torch.Tensor, total: int) -> torch.Tensor:
    """The inverse of `_gather` for group 1: `[total, num_heads, head_dim]`, zero behind the last
    sequence."""
    rows = blocks.transpose(1, 2)[tokens >= 0]
    return torch.nn.functional.pad(rows, (0, 0, 0, 0, 0, total - len(rows))).contiguous()


def _probabilities(
    q: torch.Tensor, k: torch.Tensor, tokens: torch.Tensor, scale: float
) -> torch.Tensor:
    """softmax(scale Q K^T) over the keys that exist; 0 for the others."""
    scores = q @ k.transpose(-1, -2) * scale
    return scores.masked_fill((tokens < 0)[:, None, None], -torch.inf).softmax(-1)


def _rotated(batch: Batch) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    if batch.rotary is None:
        return batch.q, batch.k, batch.v
    q, k = (rotate(x, *batch.rotary) for x in (batch.q, batch.k))
    return q, k, rotate(batch.v, *batch.rotary) if batch.rotate_v else batch.v


def _widened(batch: Batch) -> Batch:
    """A batch that needs no rotation: q, k and v rotated and rounded to their dtype before."""
    turns = None if batch.rotary is None else tuple(wide(turn) for turn in batch.rotary)
    tensors = {name: wide(getattr(batch, name)) for name in "qkv"}
    turned = _rotated(replace(batch, **tensors, rotary=turns))
    q, k, v = (wide(x.to(batch.dtype)) for x in turned)
    return replace(batch, q=q, k=k, v=v, rotary=None, rotate_v=False)


def forward(batch: Batch) -> tuple[torch.Tensor, tuple[()]]:
    """The output, `[total, num_heads, head_dim]`, rounded once, and what backward needs of it:
    nothing."""
    return forward_in_dtype(_widened(batch))[0].to(batch.dtype), ()


def backward(
    grad_out: torch.Tensor, batch: Batch, saved: tuple[()] = ()
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(dq, dk, dv), shaped as q, k, v, rounded once; dk and dv are sums over the query heads of a
    group."""
    dq, dk, dv = backward_in_dtype(wide(grad_out), _widened(batch))
    if batch.rotary is not None:
        turns = tuple(wide(turn) for turn in batch.rotary)
        dq, dk = rotate_transposed(dq, *turns), rotate_transposed(dk, *turns)
        dv = rotate_transposed(dv, *turns) if batch.rotate_v else dv
    return tuple(x.to(batch.dtype) for x in (dq, dk, dv))


def forward_in_dtype(batch: Batch) -> tuple[torch.Tensor, tuple[()]]:
    """`forward` by PyTorch's operators in the dtype of the arguments, rounded in every step."""
    tokens = tokens_of_blocks(batch.cu_seqlens, batch.block_size)
    q, k, v = _rotated(batch)
    q_b, k_b, v_b = _gather(q, tokens), *(_gather(x, tokens, batch.group) for x in (k, v))
    p = _probabilities(q_b, k_b, tokens, batch.scale)
    return _scatter(p @ v_b, tokens, batch.total), ()


def backward_in_dtype(
    grad_out: torch.Tensor, batch: Batch, saved: tuple[()] = ()
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """`backward` by PyTorch's operators in the dtype of the arguments, rounded in every step."""
    tokens = tokens_of_blocks(batch.cu_seqlens, batch.block_size)
    q, k, v = _rotated(batch)
    q_b, k_b, v_b = _gather(q, tokens), *(_gather(x, tokens, batch.group) for x in (k, v))
    grad_b = _gather(grad_out, tokens)
    p = _probabilities(q_b, k_b, tokens, batch.scale)
    dp = grad_b @ v_b.transpose(-1, -2)
    ds = p * (dp - (p * dp).sum(-1, keepdim=True)) * batch.scale
    dq = _scatter(ds @ k_b, tokens, batch.total)
    dk, dv = (
        _scatter(x.unflatten(1, (batch.num_heads_k, batch.group)).sum(2), tokens, batch.total)
        for x in (ds.transpose(-1, -2) @ q_b, p.transpose(-1, -2) @ grad_b)
    )
    if batch.rotary is not None:
        dq, dk = rotate_transposed(dq, *batch.rotary), rotate_transposed(dk, *batch.rotary)
        dv = rotate_transposed(dv, *batch.rotary) if batch.rotate_v else dv
    return dq, dk, dv
