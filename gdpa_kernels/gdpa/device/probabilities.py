"""Probabilities from scores in fp32, for the rungs with accumulators in tensor memory."""

import triton

from gdpa_kernels.gdpa.device.activations import activate_per_head
from gdpa_kernels.gdpa.device.masks import mask_probabilities


@triton.jit
def probabilities(s, scale, head, first_row, first_key, options):
    """activation(scale * s) in options.DTYPE, masked pairs zero."""
    p = activate_per_head(s, scale, head, options.ACTIVATION, True)
    p = mask_probabilities(p, first_row, first_key, options.CAUSAL, options.WINDOW)
    return p.to(options.DTYPE)
