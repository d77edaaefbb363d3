"""Conversions of registers."""

from typing import Any

import torch
import triton.language as tl

from ..errors import InvalidKernel
from ..tile import Tile, held
from .table import blackwell_only, op

# Of a dtype: fraction bits, and the exponent of its smallest normal number.
_FORMATS = {"bf16": (7, -126), "fp16": (10, -14), "fp8e4nv": (3, -6), "fp8e5": (2, -14)}


@op
def stoch_round(src: Tile, dst_ty: tl.dtype, rand_bits: Any) -> Tile:
    """cvt.rs.satfinite: up if the lower 16 of an element's random bits say so, else down.

    Which bits of the registers the device takes for an element depends on the layout.
    """
    blackwell_only("stoch_round")
    if src.dtype.name != "fp32" or dst_ty.name not in _FORMATS:
        raise InvalidKernel(f"stoch_round takes fp32 to {(*_FORMATS,)}, got {src!r} to {dst_ty}")
    if rand_bits.dtype.int_bitwidth != 32 or rand_bits.shape != src.shape:
        expected = list(src.shape)
        raise InvalidKernel(f"rand_bits of stoch_round must be uint32{expected}, got {rand_bits!r}")
    fraction, least = _FORMATS[dst_ty.name]
    size = src.data.abs().to(torch.float64)
    exponent = (torch.frexp(size).exponent - 1).clamp(min=least)
    step = torch.ldexp(torch.ones_like(size), exponent - fraction)
    rounded = (size / step + (rand_bits.data & 0xFFFF) / 2**16).floor() * step
    limit = torch.finfo(held(dst_ty)).max
    rounded = torch.where(size.isnan(), size, rounded.clamp(max=limit)).copysign(src.data)
    return Tile(rounded.to(torch.float32).to(held(dst_ty)), dst_ty)
