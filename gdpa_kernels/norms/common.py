"""Parts that the norms share: checks of arguments, when kernels take a call, and `Form`."""

from __future__ import annotations

from typing import NamedTuple

import torch

from gdpa_kernels.calling import checks
from gdpa_kernels.calling.rung import capability


class Form(NamedTuple):
    """Options of `norm_mul`.

    u, a, n: whether that part stands before un, which always does. heads: norms of a row;
    weights_of_heads: their weights are `[heads]`, not `[width]`. eps: added to the variance.
    dropout_scale: what dropout multiplies by.
    """

    u: bool = False
    a: bool = False
    n: bool = False
    silu: bool = False
    centred: bool = True
    heads: int = 1
    weights_of_heads: bool = False
    eps: float = 1e-6
    dropout_scale: float = 1.0

    @property
    def parts(self) -> int:
        return 1 + self.u + self.a + self.n


def kernels_take(x: torch.Tensor, *others: torch.Tensor | None) -> bool:
    """True if kernels run on x's device and compute with these dtypes."""
    compute_capability = capability(x.device)
    return (
        compute_capability is not None
        and compute_capability >= (8, 0)
        and all(t.dtype in checks.DTYPES for t in (x, *others) if t is not None)
    )


def or_empty(x: torch.Tensor | None, like: torch.Tensor) -> torch.Tensor:
    """x, or for None a tensor without elements, which an operator can return."""
    return like.new_empty(0) if x is None else x


def no_flops(*_) -> int:
    """The FLOPs of matmuls, which `FlopCounterMode` counts: none."""
    return 0


def check_eps(eps: object) -> None:
    checks.check_float("eps", eps)
    if eps < 0:
        raise ValueError(f"eps must be at least 0, got {eps!r}")


def check_tensor(name: str, x: object) -> None:
    """Raises TypeError unless x is a dense tensor of floating-point numbers."""
    if not isinstance(x, torch.Tensor):
        raise TypeError(f"{name} must be a tensor, got {type(x).__name__}")
    if x.layout != torch.strided or x.is_nested:
        kind = "nested" if x.is_nested else str(x.layout).removeprefix("torch.")
        raise TypeError(f"{name} must be a dense tensor, got a {kind} one")
    if not x.dtype.is_floating_point:
        raise TypeError(f"{name} must have a floating-point dtype, got {x.dtype}")


def check_like(name: str, x: object, shape: tuple[int, ...], device: torch.device) -> None:
    """Raises TypeError or ValueError unless x is a tensor of `shape` on `device`."""
    check_tensor(name, x)
    if x.shape != shape:
        raise ValueError(f"{name} must have shape {list(shape)}, got {list(x.shape)}")
    if x.device != device:
        raise ValueError(f"{name} must be on x's device {device}, got {x.device}")
