"""Which activations a call may name: those of the definition, and those that users register."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

from gdpa_kernels.calling import checks
from gdpa_kernels.gdpa.own import OWN, Own, keyed
from gdpa_kernels.gdpa.reference import ACTIVATIONS, Activation

if TYPE_CHECKING:
    import triton

BOUND = 2.0**-10
"""Errors of a registered function and of its slope may be BOUND (1 + abs(x)): half of the rounding
to bf16 that follows."""

_proved: set[tuple[str, str]] = set()


def register_activation(
    name: str,
    value: triton.JITFunction,
    value_and_slope: triton.JITFunction,
    reference: Callable[[torch.Tensor], torch.Tensor],
) -> None:
    """Make `activation=name` known to `gdpa`, its layers and all products, forward and backward.

    >>> @triton.jit
    ... def sigmoid(x):
    ...     return 1 / (1 + tl.exp(-x))
    >>> @triton.jit
    ... def sigmoid_and_slope(x):
    ...     y = sigmoid(x)
    ...     return y, y * (1 - y)
    >>> register_activation("sigmoid", sigmoid, sigmoid_and_slope, torch.sigmoid)

    `reference` is checked here. The jit functions are checked before the first kernel that needs
    them on a kind of device: on 4,097 points from -20 to 20 value and slope must be within 2**-10
    (1 + abs(x)) of the reference and its derivative by autograd. A name goes through
    `torch.compile` and may stand for one head among others. Lessons compute the package's own
    activations alone; constants belong into the functions, which take no other parameter.

    Args:
        name: a Python identifier that no activation has.
        value: `@triton.jit` function of an fp32 tile, x -> y. It need not be 0 at 0: masked pairs
            and rows beyond a sequence count as 0 all the same; but it must be finite there.
        value_and_slope: `@triton.jit` function, x -> (y, dy/dx).
        reference: the same in PyTorch, element by element, in any floating dtype; differentiable.

    Raises:
        TypeError, ValueError: an argument is wrong; the name has another source already; the
            reference, or its derivative, is not finite at 0 or has another shape or dtype.
    """
    from triton import JITFunction

    if not isinstance(name, str):
        raise TypeError(f"name must be a string, got {type(name).__name__}")
    if not name.isidentifier() or (name in ACTIVATIONS and name not in OWN):
        taken = ", ".join(known for known in ACTIVATIONS if known not in OWN)
        raise ValueError(f"name must be an identifier other than {taken}, got {name!r}")
    for given, function in (("value", value), ("value_and_slope", value_and_slope)):
        if not isinstance(function, JITFunction) or len(function.arg_names) != 1:
            raise TypeError(f"{given} must be a @triton.jit function of x alone, got {function!r}")
    if not callable(reference):
        raise TypeError(f"reference must be callable, got {type(reference).__name__}")
    source = value.cache_key + value_and_slope.cache_key
    own = Own(name, value, value_and_slope, reference, hashlib.sha256(source.encode()).hexdigest())
    if name in OWN:
        if OWN[name] != own:
            raise ValueError(f"name must be new, got {name!r}, which is registered differently")
        return
    slope = _derivative(reference)
    x = torch.tensor([0.0, 1.0, -1.0], dtype=torch.float64)
    for what, function in (("reference", reference), ("its derivative", slope)):
        try:
            found, alone = function(x), torch.cat([function(one) for one in x.split(1)])
        except Exception as error:
            raise ValueError(f"{what} must be a differentiable function, got {error}") from error
        if found.shape != x.shape or found.dtype != x.dtype or not found[0].isfinite():
            raise ValueError(f"{what} must be finite at 0 in the dtype of x, got {found}")
        if not torch.allclose(found, alone, equal_nan=True):
            raise ValueError(
                f"{what} must be computed element by element, got {found.tolist()} of "
                f"{x.tolist()} and {alone.tolist()} one by one"
            )
    OWN[name] = own
    ACTIVATIONS[name] = Activation(name, reference, slope)


def check_activation(activation: object, num_heads: int) -> tuple[str, ...]:
    """The names of the activations, one or one for each query head. Raises TypeError or ValueError
    for anything else."""
    if isinstance(activation, str) and activation in ACTIVATIONS:
        return (activation,)
    names = (activation,) if isinstance(activation, str) else activation
    if not isinstance(names, tuple | list) or not all(isinstance(name, str) for name in names):
        raise TypeError(f"activation must be a name or a tuple of names, got {activation!r}")
    for name in names:
        if name not in ACTIVATIONS:
            raise ValueError(
                f"activation must be one of {', '.join(ACTIVATIONS)}, or one that "
                f"register_activation has made known, got {name!r}"
            )
    if len(names) != 1 and len(names) != num_heads:
        raise ValueError(
            f"activation must be one name or one per query head ({num_heads}), got {len(names)}"
        )
    return tuple(names) if len(set(names)) > 1 else tuple(names[:1])


def prove(names: tuple[str, ...], device: torch.device) -> None:
    """Run the registered ones among `names` on `device` against their references, once.

    Raises ValueError for one that is wrong, RuntimeError in the capture of a CUDA graph.
    """
    for name in names:
        key = keyed(name), device.type
        if name not in OWN or key in _proved:
            continue
        x = torch.cat((torch.linspace(-20, 20, 4096), torch.zeros(1))).to(device)
        if not checks.is_readable(x):
            raise RuntimeError(f"activation {name!r} must be used once before a graph is captured")
        from gdpa_kernels.gdpa.derivatives import evaluate

        found = evaluate(x, key[0])
        exact = x.double().cpu()
        wanted = ACTIVATIONS[name].function(exact), ACTIVATIONS[name].derivative(exact)
        parts = ("value", 0, 0), ("value_and_slope's value", 1, 0), ("slope", 2, 1)
        for part, row, of in parts:
            over = (found[row].double().cpu() - wanted[of]).abs() / (1 + exact.abs())
            worst = int(over.nan_to_num(torch.inf).argmax())
            if not over[worst] <= BOUND:
                raise ValueError(
                    f"the {part} of activation {name!r} must be within {BOUND:.2g} (1 + abs(x)) of "
                    f"its reference, got {found[row, worst]:.6g} for {wanted[of][worst]:.6g} at "
                    f"x = {exact[worst]:.6g}"
                )
        _proved.add(key)


def _derivative(reference: Callable[[torch.Tensor], torch.Tensor]) -> Callable:
    def derivative(x: torch.Tensor) -> torch.Tensor:
        with torch.inference_mode(False), torch.enable_grad():
            leaf = x.detach().clone().requires_grad_()
            (slope,) = torch.autograd.grad(reference(leaf).sum(), leaf)
        return slope

    return derivative
