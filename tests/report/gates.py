"""Finds the coefficients of `report.activation_sequences`: minimax polynomials for gates.

`fit_gate` finds the odd polynomial whose clamped value is nearest to a gate, `fit_tanh` the one
inside a tanh. fp64, on the CPU.
"""

import math
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import torch

from _lib.activation_sequences import normal_gate, odd_polynomial


def tanh_gate(x: np.ndarray) -> np.ndarray:
    """The gate of GELU's tanh form."""
    return logistic_gate(2 * math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))


def logistic_gate(x: np.ndarray) -> np.ndarray:
    """The gate of SiLU."""
    return torch.sigmoid(torch.from_numpy(x)).numpy()


def gate_error(gate: Callable, coefficients: Iterable[float]) -> float:
    """Largest distance of the clamped polynomial from `gate` on 0 <= x <= 60 (it is odd)."""
    x = np.linspace(0, 60, 120_001)
    return float(np.abs(np.clip(0.5 + odd_polynomial(x, coefficients), 0, 1) - gate(x)).max())


def fit_gate(gate: Callable, degree: int) -> tuple[tuple[float, ...], float]:
    """The odd polynomial whose clamped value is nearest to `gate` - 1/2, and the largest error.

    It is the minimax polynomial of a range [0, c], found on the positive half of 400 Chebyshev
    points. c is found by a scan: large enough for the clamp to be right beyond it, small enough to
    fit. The terms alternate in sign, so degree must be 5, 9, 13, ... for the last one to be
    positive; ValueError otherwise.
    """
    if degree % 4 != 1 or degree < 5:
        raise ValueError(f"degree must be 5, 9, 13, ..., got {degree}")
    points = np.sin(np.pi / 2 * np.arange(1, 401) / 400)
    best = ((), math.inf)
    low, high, steps = 1.5, 12.0, 43
    for _ in range(4):
        for c in map(float, np.linspace(low, high, steps)):
            scaled, _ = _minimax(points, gate(c * points) - 0.5, degree, rounds=80)
            coefficients = tuple(float(k / c ** (2 * i + 1)) for i, k in enumerate(scaled))
            error = gate_error(gate, coefficients)
            if coefficients[-1] > 0 and error < best[1]:
                best, at = (coefficients, error), c
        step = (high - low) / (steps - 1)
        low, high, steps = at - step, at + step, 9
    return best


def fit_tanh(limit: float = 5.2) -> tuple[tuple[float, ...], float]:
    """The odd cubic u for which tanh(u(x)) is nearest to erf(x / sqrt(2)) on 0 < x <= limit, and
    the largest error of the gate (1 + tanh(u)) / 2 there."""
    x = np.linspace(limit / 4000, limit, 4000)
    tanh = 2 * normal_gate(x) - 1
    found, error = _minimax(x, np.arctanh(tanh), 3, rounds=400, slope=1 - tanh**2, of=np.tanh)
    return tuple(found), error / 2


def _minimax(
    x: np.ndarray, target: np.ndarray, degree: int, rounds: int, slope: Any = 1.0,
    of: Callable = np.positive,
) -> tuple[np.ndarray, float]:  # fmt: skip
    """The odd polynomial p for which of(p(x)) is nearest to of(target), and the largest distance.

    Lawson's iteration: weighted least squares, in which every weight is multiplied by the error at
    its point. `slope`: that of `of`, at the target.
    """
    powers = np.stack([x ** (2 * i + 1) for i in range(degree // 2 + 1)], axis=1)
    weight = np.full(len(x), 1 / len(x))
    best, least = None, math.inf
    for _ in range(rounds):
        root = np.sqrt(weight) * slope
        found = np.linalg.lstsq(powers * root[:, None], target * root, rcond=None)[0]
        error = np.abs(of(powers @ found) - of(target))
        if error.max() < least:
            best, least = found, error.max()
        weight = weight * error
        weight /= weight.sum()
    return best, least
