"""The norms by PyTorch's operators, with the arguments and results of the kernels.

fp32 arithmetic, fp64 for fp64. `residual`, `heads` and `gated` have the same functions as kernels.
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


def mul_forward(x, u, scale, weight, bias, keep, form, dtype):
    """Compute `gated.forward`."""
    a, mean, rstd, _, n, gate, _ = _gated(x, u, scale, weight, bias, form)
    parts = [part for part, there in ((gate, form.u), (a, form.a), (n, form.n)) if there]
    y = torch.cat([part.flatten(1) for part in (*parts, n * gate)], dim=1)
    y = y if keep is None else torch.where(keep != 0, y * form.dropout_scale, 0)
    mean = mean.flatten() if form.centred else None
    return y.to(dtype), mean, rstd.flatten()


def mul_backward(grad, x, u, scale, weight, bias, keep, mean, rstd, form):
    """Compute `gated.backward`."""
    _, _, rstd, z, n, gate, slope = _gated(x, u, scale, weight, bias, form)
    grad = (
        wide(grad) if keep is None else torch.where(keep != 0, wide(grad) * form.dropout_scale, 0)
    )
    grads = [*grad.view(len(x), form.parts, *z.shape[1:]).unbind(1)]
    grad_product = grads.pop()
    grad_u, grad_a, grad_n = (grads.pop(0) if x else 0 for x in (form.u, form.a, form.n))
    grad_n = grad_n + grad_product * gate
    grad_u = (grad_u + grad_product * n) * slope
    over = (0, 2) if form.weights_of_heads else 0
    sums = ((grad_n * z).sum(over), grad_n.sum(over))
    pairs = zip(sums, (weight, bias), strict=True)
    weights = (None if w is None else s.reshape(w.shape).to(w.dtype) for s, w in pairs)
    if weight is not None:
        grad_n = grad_n * _of_heads(weight, form)
    grad_x = grad_n - z * (grad_n * z).mean(2, keepdim=True)
    if form.centred:
        grad_x = grad_x - grad_n.mean(2, keepdim=True)
    grad_x = (grad_x * rstd + grad_a) * (1.0 if scale is None else wide(scale))
    return grad_x.flatten(1).to(x.dtype), grad_u.flatten(1).to(u.dtype), *weights


def _gated(x, u, scale, weight, bias, form):
    """a, mean, rstd, z, n, c and dc / du of gated.py, `[tokens, heads, width]`."""
    width = x.shape[1] // form.heads
    a, u = (wide(each).unflatten(1, (form.heads, width)) for each in (x, u))
    a = a if scale is None else a * wide(scale)
    mean = a.mean(2, keepdim=True)
    z = a - mean if form.centred else a
    rstd = (z.square().mean(2, keepdim=True) + form.eps).rsqrt()
    z = z * rstd
    n = z if weight is None else z * _of_heads(weight, form)
    n = n if bias is None else n + _of_heads(bias, form)
    gate, slope = u, 1.0
    if form.silu:
        sigmoid = u.sigmoid()
        gate, slope = u * sigmoid, sigmoid * (1 + u * (1 - sigmoid))
    return a, mean, rstd, z, n, gate, slope


def _of_heads(weight, form):
    """A weight or bias, to be multiplied with `[tokens, heads, width]`."""
    return wide(weight).view(1, form.heads, 1 if form.weights_of_heads else -1)
