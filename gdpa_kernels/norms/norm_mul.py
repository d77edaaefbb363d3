"""`norm_mul`: check the arguments, call kernels through PyTorch operators."""

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
from gdpa_kernels.norms import reference
from gdpa_kernels.norms.common import (
    Form,
    check_eps,
    check_like,
    check_tensor,
    kernels_take,
    no_flops,
    or_empty,
)

EPSILON = 1e-6
WIDEST = 8192
"""The largest width of rows that the kernels take."""
CONCATS = ("un",), ("u", "a", "un"), ("u", "n", "un")


def norm_mul(
    x: torch.Tensor,
    u: torch.Tensor,
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    *,
    norm: str = "layer",
    heads: int | None = None,
    concat: tuple[str, ...] = ("un",),
    silu: bool = False,
    scale: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    eps: float = EPSILON,
) -> torch.Tensor:
    """The norm of x times a gate u, as HSTU's layers have it before their output projection;
    differentiable in x, u, weight and bias.

    y = dropout(concat(parts)), of u, a = scale x, n = norm(a) weight + bias, and un = u n, rounded
    once from fp32 arithmetic (fp64 for fp64). The gradients of weight and bias are deterministic.
    They cannot be differentiated again.

    One kernel in each direction on a GPU, in bf16, fp16 or fp32, up to a width of 8192; PyTorch's
    operators otherwise. Of `[tokens, width]` tensors forward reads 2 and writes len(concat);
    backward reads 2 + len(concat) and writes 2. Dropout's mask, a byte for each element of the
    result, is written once and read twice.

    Args:
        x: `[tokens, width]`, the attention's result. It may be a sum that nobody divided: scale
            then holds 1 / N.
        u: `[tokens, width]`, in x's dtype or fp32; a slice of wider rows is read where it lies.
        weight, bias: `[width]`, or `[heads]` with heads; None for a norm without.
        norm: "layer" for LayerNorm, "rms" for RMSNorm.
        heads: norms of a row, one for each head, with a weight and a bias for each; None for one
            norm of the whole row.
        concat: what the output projection takes: ("un",), ("u", "a", "un") or ("u", "n", "un").
        silu: the gate is SiLU(u), in the part u as well.
        scale: a tensor of one number, of any dtype, multiplied with x; it gets no gradient. A
            tensor, so that a compiled model has one graph for all N; to fold 1 / N into eps,
            eps N ** 2, needs none, but gives another a.
        dropout_p: the probability that an element of the result is 0, drawn from PyTorch's
            generator; the others are multiplied by 1 / (1 - dropout_p). 0.0 in evaluation.
        eps: added to the variance of a, or with "rms" to its mean square.

    Returns:
        `[tokens, len(concat) * width]`, in x's dtype, under autocast in autocast's (fp64 excepted),
        as a linear layer would cast it next.

    Raises:
        TypeError, ValueError: an argument is wrong: its name, what is expected, what was received.

    Source: HSTU (arXiv 2402.17152) and its public code; see the page "Coming from HSTU".
    """
    check_transforms("norm_mul")
    _check(x, u, weight, bias, norm, heads, concat, silu, scale, dropout_p)
    check_eps(eps)
    keep = None
    if dropout_p:
        shape = x.shape[0], len(concat) * x.shape[1]
        keep = torch.empty(shape, dtype=torch.uint8, device=x.device).bernoulli_(1 - dropout_p)
    tensors = distinct(x, u, scale, weight, bias, keep)
    dtype = checks.autocast(x.new_empty(0))[0].dtype
    return _NormMul.apply(
        *tensors, ",".join(concat), silu, norm == "layer", heads or 0, float(eps),
        1 / (1 - dropout_p), dtype,
    )  # fmt: skip


class _NormMul(torch.autograd.Function):
    """The operators of both directions as one differentiable function."""

    @staticmethod
    def forward(ctx, x, u, scale, weight, bias, keep, *options):
        y, mean, rstd = _FORWARD(x, u, scale, weight, bias, keep, *options)
        ctx.save_for_backward(x, u, scale, weight, bias, keep, mean, rstd)
        ctx.options = options[:-1]
        return y

    @staticmethod
    def backward(ctx, grad):
        saved = ctx.saved_tensors  # once: activation checkpointing allows no more
        with torch.no_grad():
            grad_x, grad_u, *weights = _BACKWARD(grad, *saved, *ctx.options)
        needs = ctx.needs_input_grad[0], ctx.needs_input_grad[1], *ctx.needs_input_grad[3:5]
        gradients = needed((grad_x, grad_u, *weights), needs)
        inputs = tuple(t for t in (grad, *saved[:5]) if t is not None)
        grad_x, grad_u, *weights = once_differentiable("norm_mul", gradients, inputs)
        return grad_x, grad_u, None, *weights, *(None,) * 8


def _form(concat, silu, centred, heads, eps, dropout_scale):
    """`gated.Form` of an operator's options."""
    parts = concat.split(",")
    first = "u" in parts, "a" in parts, "n" in parts
    return Form(*first, silu, centred, heads or 1, heads > 0, eps, dropout_scale)


def _functions(form, x: torch.Tensor, *others: torch.Tensor | None):
    """The functions (forward, backward) for these tensors."""
    if x.shape[1] // form.heads <= WIDEST and kernels_take(x, *others):
        from gdpa_kernels.norms import gated

        return gated.forward, gated.backward
    return reference.mul_forward, reference.mul_backward


def _adjacent(u: torch.Tensor) -> torch.Tensor:
    """u, whose columns lie beside each other."""
    return u if u.stride(1) == 1 or u.shape[1] == 1 else u.contiguous()


def _forward(x, u, scale, weight, bias, keep, *options_and_dtype):
    *options, dtype = options_and_dtype
    form = _form(*options)
    forward, _ = _functions(form, x, u, weight, bias)
    tensors = x.contiguous(), _adjacent(u), scale, weight, bias, keep
    y, mean, rstd = forward(*tensors, form, dtype)
    return y, or_empty(mean, rstd), rstd


def _fake_forward(x, u, scale, weight, bias, keep, *options_and_dtype):
    *options, dtype = options_and_dtype
    form = _form(*options)
    y = x.new_empty(x.shape[0], form.parts * x.shape[1], dtype=dtype)
    rstd = x.new_empty(x.shape[0] * form.heads, dtype=reference.wide(x[:0]).dtype)
    return y, rstd.new_empty(rstd.shape if form.centred else 0), rstd


def _backward(grad, x, u, scale, weight, bias, keep, mean, rstd, *options):
    form = _form(*options)
    _, backward = _functions(form, x, grad, u, weight, bias)
    tensors = x.contiguous(), _adjacent(u), scale, weight, bias, keep
    gradients = backward(grad.contiguous(), *tensors, mean if form.centred else None, rstd, form)
    return tuple(or_empty(each, x) for each in gradients)


def _fake_backward(grad, x, u, scale, weight, bias, *_):
    weights = (x.new_empty(0) if w is None else w.new_empty(w.shape) for w in (weight, bias))
    return x.new_empty(x.shape), u.new_empty(u.shape), *weights


_TENSORS = "Tensor x, Tensor u, Tensor? scale, Tensor? weight, Tensor? bias, Tensor? keep"
_OPTIONS = "str concat, bool silu, bool centred, int heads, float eps, float dropout_scale"
_FORWARD = define(
    "norm_mul_forward",
    f"({_TENSORS}, {_OPTIONS}, ScalarType dtype) -> (Tensor, Tensor, Tensor)",
    _forward,
    _fake_forward,
    no_flops,
)
_BACKWARD = define(
    "norm_mul_backward",
    f"(Tensor grad, {_TENSORS}, Tensor mean, Tensor rstd, {_OPTIONS}) "
    "-> (Tensor, Tensor, Tensor, Tensor)",
    _backward,
    _fake_backward,
    no_flops,
)


def _check(
    x: object, u: object, weight: object, bias: object, norm: object, heads: object,
    concat: object, silu: object, scale: object, dropout_p: object,
) -> None:  # fmt: skip
    check_tensor("x", x)
    if x.dim() != 2 or x.shape[1] < 1:
        raise ValueError(f"x must have shape [tokens, width], got {list(x.shape)}")
    check_like("u", u, x.shape, x.device)
    checks.check_choice("norm", norm, ("layer", "rms"))
    if heads is not None and x.shape[1] % checks.check_count("heads", heads, least=1):
        raise ValueError(f"heads must divide x's width {x.shape[1]}, got {heads}")
    shape = (x.shape[1] if heads is None else heads,)
    for name, other in (("weight", weight), ("bias", bias)):
        if other is not None:
            check_like(name, other, shape, x.device)
    for name, other in (("u", u), ("weight", weight), ("bias", bias)):
        if other is not None and (other.dtype == torch.float64) != (x.dtype == torch.float64):
            raise TypeError(f"{name} must be float64 like x or neither, got {other.dtype}")
    if not isinstance(concat, tuple | list) or tuple(concat) not in CONCATS:
        raise ValueError(f"concat must be one of {', '.join(map(str, CONCATS))}, got {concat!r}")
    checks.check_bool(silu=silu)
    if scale is not None:
        check_tensor("scale", scale)
        if scale.numel() != 1 or scale.device != x.device:
            raise ValueError(
                f"scale must hold one number on {x.device}, got {list(scale.shape)} on "
                f"{scale.device}"
            )
    checks.check_float("dropout_p", dropout_p)
    if not 0 <= dropout_p < 1:
        raise ValueError(f"dropout_p must be at least 0 and less than 1, got {dropout_p!r}")
