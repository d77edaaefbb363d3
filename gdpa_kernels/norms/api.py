"""`add_rms_norm` and `head_norm`: check the arguments, call kernels through PyTorch operators."""

from __future__ import annotations

import torch

from gdpa_kernels.calling import checks
from gdpa_kernels.calling.operators import (
    check_transforms,
    define,
    distinct,
    needed,
    once_differentiable,
)
from gdpa_kernels.calling.private import is_watched
from gdpa_kernels.norms import reference
from gdpa_kernels.norms.common import (
    check_eps,
    check_like,
    check_tensor,
    kernels_take,
    no_flops,
    or_empty,
)

EPSILON = 1e-6
WIDTHS = 64, 8192
"""The least and the largest width of rows that the kernel of `add_rms_norm` takes."""
MAX_HEAD_DIM = 256


def add_rms_norm(
    x: torch.Tensor,
    residual: torch.Tensor | None,
    weight: torch.Tensor | None = None,
    *,
    eps: float = EPSILON,
) -> tuple[torch.Tensor, torch.Tensor]:
    """RMSNorm of x + residual, and the sum itself; differentiable in both results.

    stream = x + residual, y = stream / sqrt(mean(stream ** 2) + eps) * weight, over the last
    dimension. The sum is rounded once, and y is that of the rounded sum, from fp32 arithmetic
    (fp64 for fp64). Backward reads the stream again; only 4 bytes a row are saved beside it. The
    weight's gradient is deterministic. The gradients cannot be differentiated again.

    One kernel in each direction on a GPU for rows of 64 to 8192 elements in bf16, fp16 or fp32;
    PyTorch's operators otherwise.

    Args:
        x: `[..., width]`: what a layer adds to the stream; or the stream, if residual is None.
        residual: of x's shape, the residual stream; its dtype may differ from x's. None: nothing is
            added.
        weight: `[width]`, or None for a norm without.
        eps: added to the mean square.

    Returns:
        y, in x's dtype, under autocast in autocast's (fp64 excepted), as a linear layer would cast
        it next; and the stream in residual's dtype, which autocast does not change. Without a
        residual the stream is x; used in place of x, its gradient is added in the same kernel.

    Raises:
        TypeError, ValueError: an argument is wrong: its name, what is expected, what was received.

    Source: RMSNorm, arXiv 1910.07467; fused with the addition as in vLLM, Liger and quack.
    """
    check_transforms("add_rms_norm")
    _check_rows(x, residual, weight)
    check_eps(eps)
    tensors = distinct(x, residual, weight)
    return _AddRMSNorm.apply(*tensors, float(eps), checks.autocast(x.new_empty(0))[0].dtype)


def head_norm(
    x: torch.Tensor,
    weights: tuple[torch.Tensor, ...],
    counts: tuple[int, ...],
    turns: tuple[torch.Tensor, torch.Tensor] | None = None,
    *,
    eps: float = EPSILON,
    overwrite_gradient: bool = False,
) -> torch.Tensor:
    """RMSNorm of heads, then a rotary embedding, over x where that is safe; differentiable.

    For packed q, k and v: the first counts[0] heads are normalised with weights[0], the next
    counts[1] with weights[1], and the others stay as they are. A head's row becomes
    R(row / sqrt(mean(row ** 2) + eps) * weight), where R rotates its pairs (row[2i], row[2i + 1])
    by (sin[i], cos[i]) of the token. fp32 arithmetic (fp64 for fp64), rounded once.

    The result takes x's memory, and x must not be used again. Only where a dispatch mode of PyTorch
    sees the operators, as in selective checkpointing, which may keep x or skip what wrote to it, is
    x copied first: its bytes once more, read, written and, until x is freed, held.

    Without turns nothing but 4 bytes a row is saved: backward computes the normalised rows from
    the result, so a weight below 2 ** -60 in size (2 ** -14 for fp16) counts as that, zero
    included; and the gradient of a weight, be it fp32, has the relative error of x's rounding, at
    most 2 ** -9 for bf16 and 2 ** -12 for fp16. With turns a copy of these heads is saved. The
    gradients cannot be differentiated again. Autocast changes nothing.

    One kernel in each direction on a GPU for a head_dim up to 256 in bf16, fp16 or fp32; PyTorch's
    operators otherwise.

    Args:
        x: `[total, heads, head_dim]`, or contiguous `[..., heads * head_dim]` as a linear layer
            makes it; no leaf that requires grad, nor one whose elements share memory. Who has kept
            x, a hook for example, may see the result. PyTorch copies the gradient of a view once
            more.
        weights: one or two of `[head_dim]`.
        counts: heads of each weight, at most x's together.
        turns: (sin, cos), each contiguous `[total, head_dim // 2]`, which get no gradient. None: no
            rotation.
        eps: added to the mean square.
        overwrite_gradient: backward may write over the gradient that it is given. Only for an x
            whose gradient comes from one operator that hands out memory of its own, as `gdpa` does;
            False copies it first.

    Returns:
        The result, of x's shape and dtype.

    Raises:
        TypeError, ValueError: an argument is wrong: its name, what is expected, what was received.

    Source: RMSNorm, arXiv 1910.07467; of q and k, arXiv 2010.04245 with an L2 norm; rotary
    embedding, arXiv 2104.09864.
    """
    check_transforms("head_norm")
    _check_heads(x, weights, counts, turns)
    check_eps(eps)
    checks.check_bool(overwrite_gradient=overwrite_gradient)
    second = weights[1] if len(weights) == 2 else None
    counts = (*counts, 0)[:2]
    tensors = distinct(x, weights[0], second, *(turns or (None, None)))
    return _HeadNorm.apply(*tensors, *counts, float(eps), overwrite_gradient)


def floor_of(dtype: torch.dtype) -> float:
    """The least size of a head's weight: its products must not vanish beside others of size 1, nor
    lose their digits."""
    return 2.0**-14 if dtype == torch.float16 else 2.0**-60


class _AddRMSNorm(torch.autograd.Function):
    """The operators of both directions of `add_rms_norm` as one differentiable function."""

    @staticmethod
    def forward(ctx, x, residual, weight, eps, dtype):
        y, stream, rstd = _ADD_FORWARD(x, residual, weight, eps, dtype)
        stream = x.view_as(x) if residual is None else stream
        ctx.save_for_backward(stream, rstd, weight)
        ctx.set_materialize_grads(False)
        ctx.x_dtype = x.dtype
        return y, stream

    @staticmethod
    def backward(ctx, grad_y, grad_stream):
        stream, rstd, weight = ctx.saved_tensors  # once: activation checkpointing allows no more
        need_x, need_residual, need_weight, *_ = ctx.needs_input_grad
        if grad_y is None and grad_stream is None:
            return (None,) * 5
        inputs = tuple(t for t in (grad_y, grad_stream, stream, weight) if t is not None)
        with torch.no_grad():
            if grad_y is None:
                gradients = grad_stream.to(ctx.x_dtype), grad_stream, None
            else:
                differ = need_x and ctx.x_dtype != stream.dtype
                grad, grad_x, grad_weight = _ADD_BACKWARD(
                    grad_y, grad_stream, stream, rstd, weight, ctx.x_dtype if differ else None
                )
                gradients = grad_x if differ else grad, grad, grad_weight
        gradients = needed(gradients, (need_x, need_residual, need_weight))
        return *once_differentiable("add_rms_norm", gradients, inputs), None, None


class _HeadNorm(torch.autograd.Function):
    """The operators of both directions of `head_norm` as one differentiable function."""

    @staticmethod
    def forward(ctx, x, first, second, sin, cos, count_1, count_2, eps, overwrite):
        options = first, second, sin, cos, count_1, count_2, eps
        if is_watched():
            y, rstd, x_copy = _HEAD_COPY(x, *options)
        else:
            rstd, x_copy = _HEAD_FORWARD(x, *options)
            ctx.mark_dirty(x)
            y = x
        ctx.save_for_backward(y if sin is None else x_copy, rstd, first, second, sin, cos)
        ctx.counts, ctx.overwrite = (count_1, count_2), overwrite
        return y

    @staticmethod
    def backward(ctx, grad):
        saved, rstd, first, second, sin, cos = ctx.saved_tensors  # once
        incoming, overwrite = grad, ctx.overwrite and not torch.is_grad_enabled()
        with torch.no_grad():
            if not overwrite or not grad.is_contiguous():
                grad = grad.clone(memory_format=torch.contiguous_format)
            weights = _HEAD_BACKWARD(grad, saved, rstd, first, second, sin, cos, *ctx.counts)
        gradients = grad, weights[0], None if second is None else weights[1]
        gradients = needed(gradients, ctx.needs_input_grad[:3])
        inputs = tuple(t for t in (incoming, saved, first, second) if t is not None)
        return *once_differentiable("head_norm", gradients, inputs), *(None,) * 6


def _row_functions(x: torch.Tensor, *others: torch.Tensor | None):
    """The functions (forward, backward) for these tensors."""
    if WIDTHS[0] <= x.shape[-1] <= WIDTHS[1] and kernels_take(x, *others):
        from gdpa_kernels.norms import residual

        return residual.forward, residual.backward
    return reference.add_forward, reference.add_backward


def _head_functions(x: torch.Tensor, *others: torch.Tensor | None):
    """The functions (forward, backward) for these tensors."""
    if x.shape[-1] <= MAX_HEAD_DIM and kernels_take(x, *others):
        from gdpa_kernels.norms import heads

        return heads.forward, heads.backward
    return reference.head_forward, reference.head_backward


def _rows(x: torch.Tensor | None) -> torch.Tensor | None:
    return None if x is None else x.reshape(-1, x.shape[-1]).contiguous()


def _add_forward(x, residual, weight, eps, dtype):
    forward, _ = _row_functions(x, residual, weight)
    y, stream, rstd = forward(_rows(x), _rows(residual), weight, eps, dtype)
    stream = None if stream is None else stream.view(x.shape)
    return y.view(x.shape), or_empty(stream, x), rstd


def _fake_add_forward(x, residual, weight, eps, dtype):
    stream = x.new_empty(0) if residual is None else residual.new_empty(x.shape)
    rows = 1
    for size in x.shape[:-1]:
        rows = rows * size
    rstd = x.new_empty(rows, dtype=reference.wide(stream[:0]).dtype)
    return x.new_empty(x.shape, dtype=dtype), stream, rstd


def _add_backward(grad_y, grad_stream, stream, rstd, weight, x_dtype):
    _, backward = _row_functions(stream, grad_y, grad_stream, weight)
    rows = _rows(grad_y), _rows(grad_stream), _rows(stream)
    grad, grad_x, grad_weight = backward(*rows, rstd, weight, x_dtype)
    grad_x = None if grad_x is None else grad_x.view(stream.shape)
    return grad.view(stream.shape), or_empty(grad_x, stream), or_empty(grad_weight, stream)


def _fake_add_backward(grad_y, grad_stream, stream, rstd, weight, x_dtype):
    shape = stream.shape
    return (
        stream.new_empty(shape),
        stream.new_empty(0) if x_dtype is None else stream.new_empty(shape, dtype=x_dtype),
        stream.new_empty(0) if weight is None else weight.new_empty(weight.shape),
    )


def _heads(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    head_dim = weight.shape[0]
    if x.dim() == 3 and x.shape[2] == head_dim:
        return x
    return x.view(-1, x.shape[-1] // head_dim, head_dim)


def _floor(x: torch.Tensor, sin: torch.Tensor | None) -> float:
    return floor_of(x.dtype) if sin is None else 0.0


def _head_forward(x, first, second, sin, cos, count_1, count_2, eps):
    x, counts = _heads(x, first), (count_1, count_2)
    forward, _ = _head_functions(x, first, second, sin, cos)
    rstd, x_copy = forward(x, first, second, counts, (sin, cos), eps, _floor(x, sin))
    return rstd, or_empty(x_copy, x)


def _fake_head_forward(x, first, second, sin, cos, count_1, count_2, eps):
    sizes = _heads(x, first).shape[0], count_1 + count_2
    x_copy = x.new_empty(0) if sin is None else x.new_empty(*sizes, first.shape[0])
    return x.new_empty(sizes, dtype=reference.wide(x[:0]).dtype), x_copy


def _head_copy(x, *options):
    y = x.clone(memory_format=torch.contiguous_format)
    return y, *_head_forward(y, *options)


def _fake_head_copy(x, *options):
    return x.new_empty(x.shape), *_fake_head_forward(x, *options)


def _head_backward(grad, saved, rstd, first, second, sin, cos, count_1, count_2):
    grad, saved, counts = _heads(grad, first), _heads(saved, first), (count_1, count_2)
    _, backward = _head_functions(saved, grad, first, second, sin, cos)
    weight_gradients = backward(
        grad, saved, rstd, first, second, counts, (sin, cos), _floor(saved, sin)
    )
    return weight_gradients[0], or_empty(weight_gradients[1], first)


def _fake_head_backward(grad, saved, rstd, first, second, sin, cos, count_1, count_2):
    second_gradient = first.new_empty(0) if second is None else second.new_empty(second.shape)
    return first.new_empty(first.shape), second_gradient


_ADD_FORWARD = define(
    "add_rms_norm_forward",
    "(Tensor x, Tensor? residual, Tensor? weight, float eps, ScalarType dtype) "
    "-> (Tensor, Tensor, Tensor)",
    _add_forward,
    _fake_add_forward,
    no_flops,
)
_ADD_BACKWARD = define(
    "add_rms_norm_backward",
    "(Tensor grad_y, Tensor? grad_stream, Tensor stream, Tensor rstd, Tensor? weight, "
    "ScalarType? x_dtype) -> (Tensor, Tensor, Tensor)",
    _add_backward,
    _fake_add_backward,
    no_flops,
)
_HEAD_SCHEMA = "Tensor first, Tensor? second, Tensor? sin, Tensor? cos, SymInt count_1, SymInt "
_HEAD_FORWARD = define(
    "head_norm_forward",
    f"(Tensor(a!) x, {_HEAD_SCHEMA}count_2, float eps) -> (Tensor, Tensor)",
    _head_forward,
    _fake_head_forward,
    no_flops,
)
_HEAD_COPY = define(
    "head_norm_copy",
    f"(Tensor x, {_HEAD_SCHEMA}count_2, float eps) -> (Tensor, Tensor, Tensor)",
    _head_copy,
    _fake_head_copy,
    no_flops,
)
_HEAD_BACKWARD = define(
    "head_norm_backward",
    f"(Tensor(a!) grad, Tensor saved, Tensor rstd, {_HEAD_SCHEMA}count_2) -> (Tensor, Tensor)",
    _head_backward,
    _fake_head_backward,
    no_flops,
)


def _check_rows(x: object, residual: object, weight: object) -> None:
    check_tensor("x", x)
    if x.dim() < 1 or x.shape[-1] < 1:
        raise ValueError(f"x must have shape [..., width], got {list(x.shape)}")
    if residual is not None:
        check_like("residual", residual, x.shape, x.device)
    if weight is not None:
        check_like("weight", weight, x.shape[-1:], x.device)
    for name, other in (("residual", residual), ("weight", weight)):
        if other is not None and (other.dtype == torch.float64) != (x.dtype == torch.float64):
            raise TypeError(f"{name} must be float64 like x or neither, got {other.dtype}")


def _overlaps(x: torch.Tensor) -> bool:
    """True if a step along a dimension stays within the reach of smaller steps."""
    reach = int(x.numel() > 0)
    for step, size in sorted(zip(x.stride(), x.shape, strict=True)):
        if size > 1 and step < reach:
            return True
        reach += (size - 1) * step
    return False


def _check_heads(x: object, weights: object, counts: object, turns: object) -> None:
    check_tensor("x", x)
    if not isinstance(weights, tuple | list) or len(weights) not in (1, 2):
        raise TypeError(f"weights must be a tuple of one or two tensors, got {weights!r}")
    check_tensor("weights[0]", weights[0])
    head_dim = weights[0].shape[0] if weights[0].dim() == 1 else 0
    if head_dim < 1:
        raise ValueError(f"weights[0] must have shape [head_dim], got {list(weights[0].shape)}")
    of_heads = x.dim() == 3 and x.shape[2] == head_dim
    if not of_heads and (x.dim() < 2 or x.shape[-1] % head_dim):
        raise ValueError(
            f"x must have shape [total, heads, {head_dim}] or [..., heads * {head_dim}], "
            f"got {list(x.shape)}"
        )
    if not of_heads and not x.is_contiguous():
        raise ValueError(
            f"x must be contiguous unless it is [total, heads, {head_dim}], "
            f"got strides {x.stride()}"
        )
    if not torch.compiler.is_compiling() and _overlaps(x):
        raise ValueError(
            f"x must have memory of its own for each element, got strides {x.stride()} "
            f"of shape {list(x.shape)}"
        )
    if not isinstance(counts, tuple | list) or len(counts) != len(weights):
        raise TypeError(f"counts must be a tuple of {len(weights)} integers, got {counts!r}")
    for count in counts:
        integer = checks.is_integer(count)
        if not integer or count < 1:
            error = ValueError if integer else TypeError
            raise error(f"counts must be integers of at least 1, got {counts!r}")
    heads = x.shape[1] if of_heads else x.shape[-1] // head_dim
    if sum(counts) > heads:
        raise ValueError(f"counts must sum to at most x's {heads} heads, got {counts!r}")
    for index, weight in enumerate(weights):
        name = f"weights[{index}]"
        check_like(name, weight, (head_dim,), x.device)
        if (weight.dtype == torch.float64) != (x.dtype == torch.float64):
            raise TypeError(f"{name} must be float64 like x or neither, got {weight.dtype}")
    if turns is None:
        return
    if not isinstance(turns, tuple | list) or len(turns) != 2:
        raise TypeError(f"turns must be None or (sin, cos), got {type(turns).__name__}")
    if head_dim % 2:
        raise ValueError(f"weights[0] must have an even head_dim for turns, got {head_dim}")
    total = x.shape[0] if of_heads else x.numel() // x.shape[-1]
    for name, turn in zip(("sin", "cos"), turns, strict=True):
        check_like(name, turn, (total, head_dim // 2), x.device)
        if not turn.is_contiguous():
            raise ValueError(f"{name} must be contiguous, got strides {turn.stride()}")
        if turn.requires_grad and torch.is_grad_enabled():
            raise ValueError(
                f"turns must not require gradients, which they do not get; got a {name} that does: "
                f"use {name}.detach()"
            )
