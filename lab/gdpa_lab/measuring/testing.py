"""Is a result right? A tolerance computed from data, never typed.

The error of an implementation against an fp64 oracle may be at most twice the error that the same
mathematics makes in PyTorch in the implementation's dtype, plus one rounding of the oracle to that
dtype. Both the largest error and the root mean square must hold: the first finds a wrong element,
the second a wrong distribution.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

FACTOR = 2.0


@dataclass(frozen=True)
class Comparison:
    """Errors of one named tensor against the fp64 oracle, and what they may be; `pytorch`,
    `rounding`: the largest errors that `max_abs_budget` is made of."""

    name: str
    elements: int
    max_abs: float
    max_abs_budget: float
    rms: float
    rms_budget: float
    pytorch: float | None = None
    rounding: float | None = None

    @property
    def passed(self) -> bool:
        """Whether both errors keep their budgets; NaN never does."""
        return self.max_abs <= self.max_abs_budget and self.rms <= self.rms_budget

    def __str__(self) -> str:
        verdict = "within" if self.passed else "beyond"
        return (
            f"{self.name}: max error {self.max_abs:.3g} (budget {self.max_abs_budget:.3g}), "
            f"rms {self.rms:.3g} (budget {self.rms_budget:.3g}), {verdict} budget over "
            f"{self.elements} elements"
        )

    def to_dict(self) -> dict:
        """As a record stores it."""
        return {
            "max_abs": self.max_abs if math.isfinite(self.max_abs) else None,
            "budget": self.max_abs_budget,
            "rms": self.rms if math.isfinite(self.rms) else None,
            "rms_budget": self.rms_budget,
            "reference": "fp64",
            "passed": self.passed,
            "elements": self.elements,
        }


def _max_and_rms(error: torch.Tensor) -> tuple[float, float]:
    if error.numel() == 0:
        return 0.0, 0.0
    return error.abs().max().item(), error.square().mean().sqrt().item()


def compare(
    *, name: str, actual: torch.Tensor, expected: torch.Tensor, baseline: torch.Tensor
) -> Comparison:
    """Compare `actual` with the fp64 oracle `expected`; `baseline` is PyTorch in actual's dtype.

    The three have one shape. Raises ValueError where shapes or dtypes do not fit.
    """
    if expected.dtype != torch.float64:
        raise ValueError(f"expected must be float64, got {expected.dtype}")
    if actual.shape != expected.shape or baseline.shape != expected.shape:
        raise ValueError(
            f"actual and baseline must have expected's shape {list(expected.shape)}, got "
            f"{list(actual.shape)} and {list(baseline.shape)}"
        )
    if baseline.dtype != actual.dtype:
        raise ValueError(f"baseline must have actual's dtype {actual.dtype}, got {baseline.dtype}")
    rounding = _max_and_rms(expected.to(actual.dtype).double() - expected)
    allowed = _max_and_rms(baseline.double() - expected)
    errors = _max_and_rms(actual.double() - expected)
    return Comparison(
        name,
        expected.numel(),
        errors[0],
        FACTOR * allowed[0] + rounding[0],
        errors[1],
        FACTOR * allowed[1] + rounding[1],
        allowed[0],
        rounding[0],
    )


def assert_close(
    *, name: str, actual: torch.Tensor, expected: torch.Tensor, baseline: torch.Tensor
) -> None:
    """Raise AssertionError with both errors and budgets unless `actual` keeps them."""
    comparison = compare(name=name, actual=actual, expected=expected, baseline=baseline)
    if not comparison.passed:
        raise AssertionError(str(comparison))
