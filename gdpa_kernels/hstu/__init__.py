"""HSTU: its layer, the weights and the attention functions of the public code bases.

`HSTULayer` (layer.py) in the forms that are published, `load_weights` and `save_weights`
(weights.py), the functions of others by their names (adapters.py), `replace_stu` (replace.py), and
the thresholds of trained buckets (thresholds.py). serving/layers.py runs the layer over histories.
"""

from gdpa_kernels.hstu.adapters import (
    delta_hstu_mha,
    hstu_attention_forward,
    hstu_attn_varlen_func,
    hstu_mha,
)
from gdpa_kernels.hstu.layer import RECSYS_EXAMPLES, RESEARCH, STU, Form, HSTULayer
from gdpa_kernels.hstu.replace import STULayer, replace_stu
from gdpa_kernels.hstu.thresholds import jagged_times, thresholds_of
from gdpa_kernels.hstu.weights import load_weights, save_weights

__all__ = [
    "RECSYS_EXAMPLES",
    "RESEARCH",
    "STU",
    "Form",
    "HSTULayer",
    "STULayer",
    "delta_hstu_mha",
    "hstu_attention_forward",
    "hstu_attn_varlen_func",
    "hstu_mha",
    "jagged_times",
    "load_weights",
    "replace_stu",
    "save_weights",
    "thresholds_of",
]
