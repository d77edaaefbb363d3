"""Operators of PyTorch: how one is defined (`define`, `schema`), and what the `autograd.Function`
around it needs. For the api.py of each operator, and the norms.

`torch.library.custom_op` makes the same, but wraps each call in about 25 us of Python.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import NewType, get_type_hints

import torch

from gdpa_kernels.calling import private

Size = NewType("Size", int)
"""An integer that may be symbolic in a compiled program."""
_TYPES = {
    Size: "SymInt",
    Size | None: "SymInt?",
    int: "int",
    float: "float",
    bool: "bool",
    torch.dtype | None: "ScalarType?",
    str: "str",
}
_LIBRARY = torch.library.Library("gdpa_kernels", "FRAGMENT")  # the operators live as long as this


def schema(arguments: type) -> str:
    """The fields of a NamedTuple, with their defaults, as arguments in an operator's schema."""
    defaults = {name: f"={value}" for name, value in arguments._field_defaults.items()}
    fields = get_type_hints(arguments).items()
    return ", ".join(f"{_TYPES[kind]} {name}{defaults.get(name, '')}" for name, kind in fields)


def define(
    name: str, signature: str, implementation: Callable, fake: Callable, flops: Callable
) -> Callable:
    """Define the operator `gdpa_kernels::name` and return it. It has no derivative.

    signature: in PyTorch's language, "(Tensor q, ...) -> Tensor". fake: gives the shapes of results
    without computing them. flops: those of a call, for `torch.utils.flop_counter`.
    """
    _LIBRARY.define(f"{name}{signature}", tags=(torch.Tag.pt2_compliant_tag,))
    _LIBRARY.impl(name, private.opaque(implementation), "CompositeExplicitAutograd")
    torch.library.register_fake(f"gdpa_kernels::{name}", fake, lib=_LIBRARY)
    packet = getattr(torch.ops.gdpa_kernels, name)
    with contextlib.suppress(Exception):  # it imports Triton: if that is broken, ask the doctor
        from torch.utils.flop_counter import register_flop_formula

        register_flop_formula(packet, get_raw=True)(
            lambda *arguments, out_val, **tensors: flops(*arguments, **tensors)
        )
    return packet.default


def check_transforms(operator: str) -> None:
    """Raises RuntimeError inside a transform of `torch.func`, which `operator` does not know: a
    compiled one would take the gradient for 0."""
    if not private.is_transformed():
        return
    raise RuntimeError(
        f"{operator} must be called outside torch.func transforms, got a call inside vmap, grad, "
        "jvp or the like: use torch.autograd, and sequences of one batch in place of vmap"
    )


def needed(gradients: tuple, needs: tuple[bool, ...]) -> tuple[torch.Tensor | None, ...]:
    """The gradients, None in place of those that nobody needs."""
    return tuple([x if need else None for x, need in zip(gradients, needs, strict=True)])


def distinct(*tensors: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
    """The tensors, a view for each that stood there before: Dynamo does not let one stand for two
    arguments of an `autograd.Function`."""
    if not torch.compiler.is_compiling():
        return tensors
    unique: list[torch.Tensor | None] = []
    for x in tensors:
        repeated = x is not None and any(x is other for other in unique)
        unique.append(x.view_as(x) if repeated else x)
    return tuple(unique)


class _OnceDifferentiable(torch.autograd.Function):
    """The identity of `count` tensors, whose derivative is an error."""

    @staticmethod
    def forward(ctx, operator, count, *tensors):
        ctx.operator = operator
        return tuple(None if x is None else x.view_as(x) for x in tensors[:count])

    @staticmethod
    def backward(ctx, *_):
        raise RuntimeError(
            f"{ctx.operator} has no second derivative; its gradients cannot be differentiated again"
        )


def once_differentiable(
    operator: str, gradients: tuple, inputs: tuple
) -> tuple[torch.Tensor | None, ...]:
    """The gradients, which depend on `inputs`; differentiating them raises RuntimeError."""
    if not torch.is_grad_enabled():
        return gradients
    return _OnceDifferentiable.apply(operator, len(gradients), *gradients, *inputs)
