"""The norms by PyTorch's operators, with the arguments and results of the kernels.

fp32 arithmetic, fp64 for fp64. `residual` and `heads` have the same functions as kernels.
"""

from __future__ import annotations

import torch


def wide(x: torch.Tensor) -> torch.Tensor:
    """x in the dtype of the arithmetic."""
    return x if x.dtype == torch.float64 else x.float()


def add_forward(x, residual, weight, eps, dtype):
    """Compute `residual.forward`."""
    stream = x if residual is None else (wide(x) + wide(residual)).to(residual.dtype)
    normalised = wide(stream)
    rstd = (normalised.square().mean(1, keepdim=True) + eps).rsqrt()
    y = normalised * rstd
    y = y if weight is None else y * wide(weight)
    return y.to(dtype), None if residual is None else stream, rstd[:, 0]


def add_backward(grad_y, grad_stream, stream, rstd, weight, x_dtype=None):
    """Compute `residual.backward`."""
    normalised, dy, grad_weight = wide(stream) * rstd[:, None], wide(grad_y), None
    if weight is not None:
        grad_weight = (dy * normalised).sum(0).to(weight.dtype)
        dy = dy * wide(weight)
    mean = (dy * normalised).mean(1, keepdim=True)
    grad = (dy - normalised * mean) * rstd[:, None]
    grad = grad if grad_stream is None else grad + grad_stream
    return grad.to(stream.dtype), None if x_dtype is None else grad.to(x_dtype), grad_weight


def head_forward(x, first, second, counts, sin_cos, eps, floor):
    """Compute `heads.forward`."""
    rows, rotates = x[:, : sum(counts)], sin_cos[0] is not None
    x_copy = rows.clone(memory_format=torch.contiguous_format) if rotates else None
    normalised = wide(rows)
    rstd = (normalised.square().mean(2, keepdim=True) + eps).rsqrt()
    y = normalised * rstd * _per_head(first, second, counts, floor)
    rows.copy_(_rotated(y, *sin_cos) if rotates else y)
    return rstd[..., 0].contiguous(), x_copy


def head_backward(grad, saved, rstd, first, second, counts, sin_cos, floor):
    """Compute `heads.backward`."""
    rows, normalised = grad[:, : sum(counts)], wide(saved[:, : sum(counts)])
    weight, dy = _per_head(first, second, counts, floor), wide(rows)
    if sin_cos[0] is None:
        normalised = normalised / weight
    else:
        dy, normalised = _rotated(dy, -sin_cos[0], sin_cos[1]), normalised * rstd[..., None]
    sums = (dy * normalised).sum(0)
    dy = dy * weight
    mean = (dy * normalised).mean(2, keepdim=True)
    rows.copy_((dy - normalised * mean) * rstd[..., None])
    sums = sums[: counts[0]].sum(0), sums[counts[0] :].sum(0)
    return sums[0].to(first.dtype), None if second is None else sums[1].to(second.dtype)


def _per_head(first, second, counts, floor: float) -> torch.Tensor:
    """The weight of each head, `[heads, head_dim]`."""
    weights = first.expand(counts[0], -1)
    if second is not None:
        weights = torch.cat((weights, second.expand(counts[1], -1)))
    weights = wide(weights)
    return torch.where(weights.abs() < floor, floor, weights)


def _rotated(x: torch.Tensor, sin: torch.Tensor, cos: torch.Tensor) -> torch.Tensor:
    """Pairs of adjacent columns of x `[total, heads, head_dim]`, rotated."""
    even, odd = x.unflatten(-1, (-1, 2)).unbind(-1)
    sin, cos = sin[:, None].to(x.dtype), cos[:, None].to(x.dtype)
    return torch.stack((even * cos - odd * sin, odd * cos + even * sin), dim=-1).flatten(-2)
