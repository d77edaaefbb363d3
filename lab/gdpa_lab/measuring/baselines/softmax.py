"""Softmax attention by definition, the reference of softmax peers."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch

from gdpa_kernels.gdpa import reference
from gdpa_lab.measuring.inputs import Inputs


def _sequences(inputs: Inputs, dtype: torch.dtype) -> Iterator[tuple[torch.Tensor, ...]]:
    """Yield (q, k, v, grad_out) of each sequence, `[num_heads_q, length, head_dim]`."""
    q, k, v, grad = (t.to(dtype) for t in (inputs.q, inputs.k, inputs.v, inputs.grad_out))
    group = inputs.workload.num_heads_q // inputs.workload.num_heads_k
    ends_q, ends_k = inputs.cu_seqlens_q.tolist(), inputs.cu_seqlens_k.tolist()
    for i in range(len(ends_q) - 1):
        rows, keys = slice(ends_q[i], ends_q[i + 1]), slice(ends_k[i], ends_k[i + 1])
        k_b, v_b = (t[keys].repeat_interleave(group, dim=1) for t in (k, v))
        yield tuple(t.transpose(0, 1) for t in (q[rows], k_b, v_b, grad[rows]))


def _probabilities(inputs: Inputs, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    """Compute the softmax of the visible scores of a sequence."""
    scores, workload = q @ k.mT * inputs.scale(), inputs.workload
    if workload.masked:
        keep = reference.visible(
            *scores.shape[1:], causal=workload.causal, window=workload.window, device=scores.device
        )
        scores = scores.masked_fill(~keep, -math.inf)
    return torch.softmax(scores, dim=-1)


def softmax_reference(inputs: Inputs, dtype: torch.dtype) -> torch.Tensor:
    """Compute softmax attention by sequence in `dtype`; `[total_q, num_heads, head_dim]`."""
    return torch.cat(
        [
            (_probabilities(inputs, q, k) @ v).transpose(0, 1)
            for q, k, v, _ in _sequences(inputs, dtype)
        ]
    )


def softmax_gradients(
    inputs: Inputs, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Compute (dq, dk, dv) of `softmax_reference` for the gradient grad_out, in `dtype`."""
    gradients = ([], [], [])
    heads = (inputs.workload.num_heads_k, -1)
    for q, k, v, grad in _sequences(inputs, dtype):
        p = _probabilities(inputs, q, k)
        dp = grad @ v.mT
        ds = p * (dp - (p * dp).sum(-1, keepdim=True)) * inputs.scale()
        dk, dv = (part.unflatten(0, heads).sum(1) for part in (ds.mT @ q, p.mT @ grad))
        for parts, part in zip(gradients, (ds @ k, dk, dv), strict=True):
            parts.append(part.transpose(0, 1))
    dq, dk, dv = (torch.cat(parts) for parts in gradients)
    return dq, dk, dv
