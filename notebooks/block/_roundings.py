"""Errors of each rounding in the backward pass of block attention, switched on one by one.

The mathematics runs in fp32 on the CPU over full blocks, and rounds to bf16 only where it is told
to. Errors are against fp64.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import pandas as pd
import torch

PLACES = ("rotary", "P", "dS", "D", "stored", "stored twice")
"""q, k and v once rotary is applied; operands of MMAs; D from an output rounded when it was stored;
a gradient at the end; a gradient before rotary is applied to it in a kernel of its own."""
GRADIENTS = ("dq", "dk", "dv")
FUSED = ("rotary", "P", "dS", "stored")
TWICE, ONCE = "all, gradient rounded twice", "all, gradient rounded once"
STUDIES: dict[str, tuple[str, ...]] = {
    TWICE: (*FUSED, "stored twice"),
    ONCE: FUSED,
    "only rotary": ("rotary",),
    "only dS": ("dS",),
    "only stored": ("stored",),
    "only D": ("D",),
    "only P": ("P",),
    "only stored, twice": ("stored", "stored twice"),
    "all and D": (*FUSED, "D"),
    "no rotary before, twice": (*FUSED[1:], "stored twice"),
    "no rotary before, once": FUSED[1:],
}
"""Roundings that `study` is asked for: all of a kernel, one alone, all but one."""


def rounded(x: torch.Tensor) -> torch.Tensor:
    """x as bf16 would have it, in its own dtype."""
    return x.bfloat16().to(x.dtype)


def apply_rotary(x: torch.Tensor, by: torch.Tensor) -> torch.Tensor:
    """Pairs of columns of x times complex numbers, cos + i sin."""
    pairs = torch.view_as_complex(x.unflatten(-1, (-1, 2)).contiguous())
    return torch.view_as_real(pairs * by).flatten(-2)


def gradients(
    inputs: Sequence[torch.Tensor], dtype: torch.dtype, places: Sequence[str]
) -> tuple[torch.Tensor, ...]:
    """(dq, dk, dv) of blocks `[blocks, heads, 64, dim]`, computed in dtype, rounded at `places`.

    inputs: q, k, v, dO, and cos + i sin `[blocks, 1, 64, dim / 2]`. ValueError for a place that is
    none of `PLACES`.
    """
    if unknown := set(places) - set(PLACES):
        raise ValueError(f"places must be of {PLACES}, got {sorted(unknown)}")

    def at(step: str, x: torch.Tensor) -> torch.Tensor:
        return rounded(x) if step in places else x

    *tensors, by = inputs
    by = by.to(torch.complex128 if dtype == torch.float64 else torch.complex64)
    q, k, v, dO = (x.to(dtype) for x in tensors)
    q, k, v = (at("rotary", apply_rotary(x, by)) for x in (q, k, v))
    scale = q.shape[-1] ** -0.5
    P = (scale * q @ k.mT).softmax(-1)
    dP = dO @ v.mT
    terms = rounded(at("P", P) @ v) * dO if "D" in places else P * dP
    dS = at("dS", P * (dP - terms.sum(-1, keepdim=True)) * scale)
    three = dS @ k, dS.mT @ q, at("P", P).mT @ dO
    return tuple(at("stored", apply_rotary(at("stored twice", x), by.conj())) for x in three)


def draw(blocks: int, *, angles: bool = True, heads: int = 4, dim: int = 128) -> list[torch.Tensor]:
    """Seeded inputs of `gradients`: N(0, 1) in bf16; sin and cos of angles, or from N(0, 1)."""
    make = torch.Generator().manual_seed(2025)
    shape = (blocks, heads, 64, dim)
    tensors = [torch.randn(shape, generator=make).bfloat16() for _ in range(4)]
    shape = (blocks, 1, 64, dim // 2)
    if angles:
        angle = 2 * math.pi * torch.rand(shape, generator=make)
        sin, cos = angle.sin(), angle.cos()
    else:
        sin, cos = (torch.randn(shape, generator=make) for _ in range(2))
    return [*tensors, torch.complex(rounded(cos), rounded(sin))]


def study(
    inputs: Sequence[torch.Tensor], studies: Mapping[str, Sequence[str]], groups: int = 1
) -> pd.DataFrame:
    """Errors against fp64, a row for each study (its places by name) and gradient, indexed by both:
    `mean`, `largest`, and `by_group`, the largest in each of `groups` equal parts of the blocks."""
    exact = gradients(inputs, torch.float64, ())
    rows = []
    for name, places in studies.items():
        computed = gradients(inputs, torch.float32, places)
        for gradient, a, b in zip(GRADIENTS, computed, exact, strict=True):
            error = (a.double() - b).abs()
            parts = error.unflatten(0, (groups, -1)).flatten(1).amax(1)
            rows.append((name, gradient, error.mean().item(), parts.max().item(), parts.tolist()))
    columns = ["study", "gradient", "mean", "largest", "by_group"]
    return pd.DataFrame(rows, columns=columns).set_index(["study", "gradient"])
