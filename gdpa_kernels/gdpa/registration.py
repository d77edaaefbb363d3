"""Which activations a call may name: those of the definition, and those that users register."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

from gdpa_kernels.calling import checks
from gdpa_kernels.gdpa.device.custom import CUSTOM, Custom, cache_key, snapshot
from gdpa_kernels.gdpa.reference import ACTIVATIONS, Activation

if TYPE_CHECKING:
    import triton

BOUND = 2.0**-10
"""Errors of a registered function and of its slope may be BOUND (1 + abs(x)): half of the rounding
to bf16 that follows."""
NEAR = 20.0
"""Up to which size of x that holds; beyond, y stands for x."""
FARTHEST = 43
"""The logarithm to base 2 of the largest x, up to which the package's own slopes hold."""

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
    (1 + abs(x)) of the reference and its derivative by autograd; on 1,000 more, up to 2**43 in size
    and closer to each other near 20, within 2**-10 (1 + abs(y) + 2**-10 abs(x)) of a y that fp32
    can hold. A name goes through `torch.compile` and may stand for one head among others. Lessons
    compute the package's own activations alone; constants belong into the functions, which take no
    other parameter. Names in them keep what they stand for now, whatever is defined later.

    The same again is fine, as of a cell of a notebook that is run again or of a module that is
    reloaded: jit functions of the same source, in the same line of their file or cell, and a
    reference that gives the same on all these points, as its derivative does.

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
    if not name.isidentifier() or (name in ACTIVATIONS and name not in CUSTOM):
        taken = ", ".join(known for known in ACTIVATIONS if known not in CUSTOM)
        raise ValueError(f"name must be an identifier other than {taken}, got {name!r}")
    for given, function in (("value", value), ("value_and_slope", value_and_slope)):
        if not isinstance(function, JITFunction) or len(function.arg_names) != 1:
            raise TypeError(f"{given} must be a @triton.jit function of x alone, got {function!r}")
    if not callable(reference):
        raise TypeError(f"reference must be callable, got {type(reference).__name__}")
    value, value_and_slope = snapshot(value), snapshot(value_and_slope)
    source = value.cache_key + value_and_slope.cache_key
    digest = hashlib.sha256(source.encode()).hexdigest()
    custom = Custom(name, value, value_and_slope, reference, digest)
    slope = _derivative(reference)
    x = torch.tensor([0.0, 1.0, -1.0], dtype=torch.float64, device="cpu")
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
    activation = Activation(name, reference, slope)
    if name not in CUSTOM:
        CUSTOM[name], ACTIVATIONS[name] = custom, activation
    elif CUSTOM[name].digest != custom.digest or not _equal(ACTIVATIONS[name], activation):
        raise ValueError(f"name must be new, got {name!r}, which is registered differently")


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
        key = cache_key(name), device.type
        if name not in CUSTOM or key in _proved:
            continue
        x = _points().to(device)
        if not checks.is_readable(x):
            raise RuntimeError(f"activation {name!r} must be used once before a graph is captured")
        from gdpa_kernels.gdpa.device.derivatives import evaluate_both

        computed = evaluate_both(x, key[0])
        exact = x.double().cpu()
        wanted = _definition(ACTIVATIONS[name], exact)
        near = exact.abs() <= NEAR
        parts = ("value", 0, 0), ("value_and_slope's value", 1, 0), ("slope", 2, 1)
        for part, row, of in parts:
            y = wanted[of]
            size = torch.where(near, exact.abs(), y.abs() + BOUND * exact.abs())
            over = (computed[row].double().cpu() - y).abs() / (1 + size)
            compared = near | (y.abs() <= checks.LARGEST)
            wrong = (compared & ~(over <= BOUND)).nonzero().flatten()
            if len(wrong):
                worst = wrong[exact[wrong].abs().argmin()]
                size = "abs(x)" if near[worst] else f"abs(y) + {BOUND:.2g} abs(x)"
                raise ValueError(
                    f"the {part} of activation {name!r} must be within {BOUND:.2g} (1 + {size}) of "
                    f"its reference, got {computed[row, worst]:.6g} for {y[worst]:.6g} at "
                    f"x = {exact[worst]:.6g}"
                )
        _proved.add(key)


def _points() -> torch.Tensor:
    """Where a registered activation is compared with its reference, fp32, on the CPU."""
    of = {"dtype": torch.float32, "device": "cpu"}  # whatever the defaults are
    far = torch.logspace(math.log2(NEAR), FARTHEST, 501, base=2, **of)[1:]
    return torch.cat((torch.linspace(-NEAR, NEAR, 4096, **of), torch.zeros(1, **of), -far, far))


def _definition(activation: Activation, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The value and the slope at `x`."""
    return activation.function(x), activation.derivative(x)


def _equal(one: Activation, other: Activation) -> bool:
    """Whether two definitions give the same, NaN or not, on all points."""
    x = _points().double()
    pairs = zip(_definition(one, x), _definition(other, x), strict=True)
    return all(torch.allclose(*pair, rtol=0, atol=0, equal_nan=True) for pair in pairs)


def _derivative(reference: Callable[[torch.Tensor], torch.Tensor]) -> Callable:
    def derivative(x: torch.Tensor) -> torch.Tensor:
        with torch.inference_mode(False), torch.enable_grad():
            leaf = x.detach().clone().requires_grad_()
            (slope,) = torch.autograd.grad(reference(leaf).sum(), leaf)
        return slope

    return derivative
