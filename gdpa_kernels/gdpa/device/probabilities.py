"""Probabilities from scores, for the rungs with accumulators in tensor memory."""

import triton

from gdpa_kernels.gdpa.device.activations import (
    activate_per_head,
    multiply_add_pairs,
    tanh_of_pairs,
)
from gdpa_kernels.gdpa.device.masks import mask_probabilities


@triton.jit
def probabilities(s, scale, head, first_row, first_key, options):
    """activation(scale * s) in options.DTYPE, masked pairs zero; options.PAIRS: over scale / 2.

    GELU and SiLU of 0 are 0: masking the scores is as good, and leaves the pairs of bf16 whole.
    """
    if options.PAIRS:
        s = mask_probabilities(s, first_row, first_key, options.CAUSAL, options.WINDOW)
        x, t = tanh_of_pairs(s, scale, options.ACTIVATION)
        p = multiply_add_pairs(x, t, x)
    else:
        p = activate_per_head(s, scale, head, options.ACTIVATION, True)
        p = mask_probabilities(p, first_row, first_key, options.CAUSAL, options.WINDOW)
        p = p.to(options.DTYPE)
    return p
