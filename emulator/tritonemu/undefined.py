"""Values of lanes that a mask turns off and no `other` fills.

On NVIDIA GPUs they happen to be zero. Here a float is NaN by default and an integer a large odd
number, each with a mark: the number of the load, from 1 on. In a NaN the mark is in the upper bits
of the fraction, where arithmetic and conversions leave it, so the load is known when a NaN that
grew out of it is stored to memory. The mark of an integer is gone after any arithmetic; floats of 8
and integers of fewer than 32 bits have none.
"""

import torch
import triton.language as tl

from .tile import RAW

MODES = ("nan", "zero", "random")
# Marks that fit; all ones are not one of them, as a NaN without a mark has them, too.
MOST = 62

# Pattern of a dtype without a mark, and the lowest bit of the mark.
_PATTERNS = {
    "bf16": (0x7FC0, 0),
    "fp16": (0x7E00, 3),
    "fp32": (0x7FC00000, 16),
    "fp64": (0x7FF8 << 48, 45),
    **{f"{sign}int32": (0x5A5A5A00, 0) for sign in ("", "u")},
    "int64": (0x5A5A5A5A5A5A5A00, 0),
}
_INTEGERS = {2: torch.int16, 4: torch.int32, 8: torch.int64}


def fill(
    dtype: tl.dtype, shape: torch.Size, mode: str, mark: int, random: torch.Generator
) -> torch.Tensor:
    """Create undefined elements, in memory's representation. mode: of MODES; mark: 0 for none."""
    raw = RAW[dtype.name]
    if mode == "zero":
        return torch.zeros(shape, dtype=raw)
    if mode == "random" and raw.is_floating_point:
        return torch.randn(shape, generator=random).to(raw)
    if mode == "random":
        bits = torch.randint(-(2**31), 2**31, shape, generator=random)
        return (bits % 2 if raw == torch.bool else bits).to(raw)
    if dtype.name in _PATTERNS:
        pattern, shift = _PATTERNS[dtype.name]
        value = torch.tensor(pattern | mark << shift, dtype=_INTEGERS[raw.itemsize]).view(raw)
    else:
        pattern = 0x7F if dtype.is_fp8() else 0x5A5A >> 16 - max(8, dtype.int_bitwidth)
        value = torch.tensor(pattern, dtype=raw)
    return value.expand(shape)


def marks(raw: torch.Tensor, dtype: tl.dtype) -> torch.Tensor:
    """Extract the mark of each element, 0 where there is none; MOST + 1 is none."""
    pattern, shift = _PATTERNS.get(dtype.name, (0, 0))
    if not pattern:
        return torch.zeros((), dtype=torch.int64)
    bits = raw.view(_INTEGERS[raw.itemsize])
    if raw.is_floating_point():
        return torch.where(raw.isnan(), bits >> shift & MOST + 1, 0)
    return torch.where((bits > pattern) & (bits <= pattern + MOST), bits - pattern, 0)
