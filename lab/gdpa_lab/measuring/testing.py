"""Compares results with an fp64 oracle, within tolerances that are computed, never typed.

The error of an implementation against an fp64 oracle may be at most twice the error that the same
mathematics makes in PyTorch in the implementation's dtype, plus one rounding of the oracle to that
dtype. Both the largest error and the root mean square must hold: the first finds a wrong element,
the second a wrong distribution.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from gdpa_lab.measuring.rows import FACTOR


@dataclass(frozen=True)
class Comparison:
    """Errors of one named tensor against the fp64 oracle, with their budgets. `pytorch`,
    `rounding`: the largest errors that make up `max_abs_budget`."""

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
        """True if both errors keep their budgets; NaN never does."""
        return self.max_abs <= self.max_abs_budget and self.rms <= self.rms_budget

    def __str__(self) -> str:
        verdict = "within" if self.passed else "beyond"
        return (
            f"{self.name}: max error {self.max_abs:.3g} (budget {self.max_abs_budget:.3g}), "
            f"rms {self.rms:.3g} (budget {self.rms_budget:.3g}), {verdict} budget over "
            f"{self.elements} elements"
        )


def error_of(actual: torch.Tensor, exact: torch.Tensor) -> torch.Tensor:
    """Compute (largest, sum of squares) of the errors of `actual` against fp64; a NaN is both."""
    errors = actual.to(torch.float64, copy=True).sub_(exact).flatten()
    if errors.numel() == 0:
        return errors.new_zeros(2)
    return torch.stack(
        (torch.linalg.vector_norm(errors, torch.inf), torch.linalg.vector_norm(errors).square())
    )


def allowed_errors(baseline: torch.Tensor, exact: torch.Tensor) -> torch.Tensor:
    """Compute `error_of` of PyTorch in an implementation's dtype and of rounding alone, [2, 2]."""
    return torch.stack((error_of(baseline, exact), error_of(exact.to(baseline.dtype), exact)))


def comparison(name: str, elements: int, errors: torch.Tensor) -> Comparison:
    """Apply the rule above to a tensor in parts; errors [parts, 3, 2]: `error_of` of the result, of
    PyTorch and of rounding."""
    largest = errors[..., 0].amax(0).tolist()  # hands a NaN on, as the sum does
    rms = (errors[..., 1].sum(0) / max(elements, 1)).sqrt().tolist()
    budgets = [FACTOR * error[1] + error[2] for error in (largest, rms)]
    return Comparison(
        name, elements, largest[0], budgets[0], rms[0], budgets[1], largest[1], largest[2]
    )


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
    errors = torch.cat((error_of(actual, expected)[None], allowed_errors(baseline, expected)))
    return comparison(name, expected.numel(), errors[None])


def assert_close(
    *, name: str, actual: torch.Tensor, expected: torch.Tensor, baseline: torch.Tensor
) -> None:
    """Raise AssertionError with both errors and budgets unless `actual` keeps them."""
    comparison = compare(name=name, actual=actual, expected=expected, baseline=baseline)
    if not comparison.passed:
        raise AssertionError(str(comparison))
