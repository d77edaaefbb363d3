"""How an operator is known to PyTorch: opaque functions with shapes, and no more.

`torch.library.custom_op` makes the same, but wraps each call in about 25 us of Python.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable

import torch
from torch.utils._mode_utils import no_dispatch

_LIBRARY = torch.library.Library("gdpa_kernels", "FRAGMENT")  # the operators live as long as this


def define(
    name: str, schema: str, implementation: Callable, fake: Callable, flops: Callable
) -> torch._ops.OpOverload:
    """The operator `gdpa_kernels::name` with `schema`, as `torch.library` has its functions; what
    differentiates it is an `autograd.Function` around it. flops(*arguments): those of a call, for
    `torch.utils.flop_counter`."""
    _LIBRARY.define(f"{name}{schema}", tags=(torch.Tag.pt2_compliant_tag,))
    # A compiled program that calls it must not have Dynamo look into the implementation.
    # `torch.compiler.disable` does the same, and imports Dynamo and Triton with this package.
    implementation = torch._disable_dynamo(implementation)
    _LIBRARY.impl(name, implementation, "CompositeExplicitAutograd")
    torch.library.register_fake(f"gdpa_kernels::{name}", fake, lib=_LIBRARY)
    packet = getattr(torch.ops.gdpa_kernels, name)
    with contextlib.suppress(Exception):  # it imports Triton: if that is broken, ask the doctor
        from torch.utils.flop_counter import register_flop_formula

        register_flop_formula(packet, get_raw=True)(lambda *arguments, out_val: flops(*arguments))
    return packet.default


def check_transforms(operator: str) -> None:
    """Raises RuntimeError inside a transform of `torch.func`, which `operator` does not know."""
    if torch.compiler.is_compiling() or not torch._C._are_functorch_transforms_active():
        return
    raise RuntimeError(
        f"{operator} must be called outside torch.func transforms, got a call inside vmap, grad, "
        "jvp or the like: use torch.autograd, and sequences of one batch in place of vmap"
    )


def is_watched() -> bool:
    """Whether a dispatch mode sees each operator, and may keep its results or skip it the second
    time, as selective checkpointing does. A compiled program has its own ways."""
    return not torch.compiler.is_compiling() and torch._C._len_torch_dispatch_stack() > 0


def unseen() -> contextlib.AbstractContextManager[None]:
    """A context whose operators no dispatch mode sees."""
    return no_dispatch()


def are_fake(*tensors: torch.Tensor) -> bool:
    """Whether one is a fake tensor, or operators make such; `torch._guards.detect_fake_mode` is ten
    times slower."""
    if torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE) is not None:
        return True
    return any(isinstance(x, torch._subclasses.FakeTensor) for x in tensors)


def needed(gradients: tuple, needs: tuple[bool, ...]) -> tuple[torch.Tensor | None, ...]:
    """The gradients, None in place of those that nobody needs."""
    return tuple(x if need else None for x, need in zip(gradients, needs, strict=True))


def distinct(*tensors: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
    """The tensors, a view for each that stood there before: Dynamo does not let one stand for two
    arguments of an `autograd.Function`."""
    if not torch.compiler.is_compiling():
        return tensors
    found: list[torch.Tensor | None] = []
    for x in tensors:
        repeated = x is not None and any(x is other for other in found)
        found.append(x.view_as(x) if repeated else x)
    return tuple(found)


class _Final(torch.autograd.Function):
    @staticmethod
    def forward(ctx, operator, count, *tensors):
        ctx.operator = operator
        return tuple(None if x is None else x.view_as(x) for x in tensors[:count])

    @staticmethod
    def backward(ctx, *_):
        raise RuntimeError(
            f"{ctx.operator} has no second derivative; its gradients cannot be differentiated again"
        )


def final(operator: str, gradients: tuple, inputs: tuple) -> tuple[torch.Tensor | None, ...]:
    """Gradients that depend on `inputs`; differentiating them raises RuntimeError."""
    if not torch.is_grad_enabled():
        return gradients
    return _Final.apply(operator, len(gradients), *gradients, *inputs)
