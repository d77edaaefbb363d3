"""How an operator is known to PyTorch: opaque functions with shapes, and no more.

`torch.library.custom_op` makes the same, but wraps each call in about 25 us of Python.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

_LIBRARY = torch.library.Library("gdpa_kernels", "FRAGMENT")  # the operators live as long as this


def define(
    name: str, schema: str, implementation: Callable, fake: Callable
) -> torch._ops.OpOverload:
    """The operator `gdpa_kernels::name` with `schema`, as `torch.library` has its functions; what
    differentiates it is an `autograd.Function` around it."""
    _LIBRARY.define(f"{name}{schema}", tags=(torch.Tag.pt2_compliant_tag,))
    # A compiled program that calls it must not have Dynamo look into the implementation.
    implementation = torch.compiler.disable(implementation)
    _LIBRARY.impl(name, implementation, "CompositeExplicitAutograd")
    torch.library.register_fake(f"gdpa_kernels::{name}", fake, lib=_LIBRARY)
    return getattr(torch.ops.gdpa_kernels, name).default


def needed(gradients: tuple, needs: tuple[bool, ...]) -> tuple[torch.Tensor | None, ...]:
    """The gradients, None in place of those that nobody needs."""
    return tuple(x if need else None for x, need in zip(gradients, needs, strict=True))
