"""Differences between NVIDIA's GPUs and AMD's, decided while a kernel is compiled."""

import triton
from triton.language.target_info import is_hip


@triton.constexpr_function
def precision(exact):
    """The `input_precision` of a dot; exact: of fp32 operands. For 16-bit ones it changes nothing,
    but gfx950 has no tf32."""
    return "ieee" if exact or is_hip() else "tf32"
