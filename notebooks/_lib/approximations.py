"""Accuracy of formulas for GELU: where one leaves GELU, and its error over normal scores."""

from __future__ import annotations

import math
from collections.abc import Callable

import pandas as pd
import torch

from _lib.activation_sequences import ERF_3
from gdpa_kernels.gdpa import reference

Formula = Callable[[torch.Tensor], torch.Tensor]

HALF_ULP = 2.0**-9
"""The least half distance of bfloat16 neighbours, relative to the value: the yardstick."""

NODES = torch.linspace(-14, 14, 14_001, dtype=torch.float64)
DENSITY = torch.exp(-0.5 * NODES**2)
ENDS = math.log10(0.05), math.log10(16.0)
GRID = torch.linspace(0, 20, 200_001, dtype=torch.float64)[1:]

gelu: Formula = reference.ACTIVATIONS["gelu"].function
gelu_tanh: Formula = reference.ACTIVATIONS["gelu_tanh"].function
taylor6: Formula = reference.ACTIVATIONS["gelu_taylor6"].function


def fitted_tanh(x: torch.Tensor) -> torch.Tensor:
    """GELU as the kernels compute it in bf16: by the tanh of a cubic that is nearest to erf."""
    linear, cubic = ERF_3.value
    return 0.5 * x * (1 + torch.tanh(linear * x + cubic * x**3))


def fitted(x: torch.Tensor) -> torch.Tensor:
    """x/2 and three even powers with the least L2 error against GELU for standard normal x."""
    weight = DENSITY.sqrt()[:, None]
    target = (gelu(NODES) - 0.5 * NODES)[:, None]
    coefficients = torch.linalg.lstsq(weight * _powers(NODES), weight * target).solution[:, 0]
    return 0.5 * x + _powers(x) @ coefficients


def documented(x: torch.Tensor) -> torch.Tensor:
    """Error that PTX allows `gelu_tanh` by one tanh.approx: 2**-11 of tanh(u), times x / 2."""
    return 2.0**-12 * (x * torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))).abs()


def relative_l2(error: torch.Tensor, value: torch.Tensor) -> float:
    """Root of E[error^2] / E[value^2] for a standard normal variable, both given on `NODES`."""
    return math.sqrt((error**2 * DENSITY).sum() / (value**2 * DENSITY).sum())


def normal_l2(formula: Formula, std: float = 1.0) -> float:
    """Relative L2 error of `formula` against GELU for scores of N(0, std^2)."""
    return relative_l2(formula(std * NODES) - gelu(std * NODES), gelu(std * NODES))


def worst(formula: Formula, limit: float = 20.0) -> float:
    """Largest error of `formula` against GELU for |x| <= limit, at most 20."""
    inside = GRID[: int(limit / 20 * len(GRID))]
    both = torch.cat([inside, -inside])
    return (formula(both) - gelu(both)).abs().max().item()


def within(formula: Formula, allowed: float) -> float:
    """The smallest x above 0 at which `formula` is more than `allowed` off GELU."""
    return GRID[(formula(GRID) - gelu(GRID)).abs() > allowed].min().item()


def leaves(error: torch.Tensor, value: torch.Tensor) -> float:
    """The smallest |x| at which `error` exceeds the yardstick of `value`, both given on `GRID`;
    infinity if nowhere."""
    beyond = GRID[error > HALF_ULP * value.abs()]
    return beyond[0].item() if len(beyond) else math.inf


def reach(formula: Formula, sign: int = 1) -> float:
    """The x of this sign at which `formula` leaves GELU by more than the yardstick."""
    x = sign * GRID
    return sign * leaves((formula(x) - gelu(x)).abs(), gelu(x))


def by_std(formulas: dict[str, Formula]) -> pd.DataFrame:
    """`normal_l2` of each formula by standard deviation, and the yardstick."""
    deviations = torch.logspace(*ENDS, 200).tolist()
    errors = {name: [normal_l2(f, std) for std in deviations] for name, f in formulas.items()}
    return pd.DataFrame(errors, index=deviations).assign(**{"half a bf16 unit": HALF_ULP})


def by_score(formulas: dict[str, Formula]) -> pd.DataFrame:
    """The larger of the errors of each formula at x and -x, by |x|, and the yardstick at +x."""
    x = torch.logspace(*ENDS, 400, dtype=torch.float64)
    sides = torch.stack([x, -x])
    errors = {name: (f(sides) - gelu(sides)).abs().amax(0) for name, f in formulas.items()}
    return pd.DataFrame(errors | {"half a bf16 unit": HALF_ULP * gelu(x)}, index=x.tolist())


def _powers(x: torch.Tensor) -> torch.Tensor:
    return torch.stack([x**2, x**4, x**6], dim=-1)
