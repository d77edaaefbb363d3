"""Attention kernels of recommendation models, and what measures them; importing touches no GPU."""

from gdpa_kernels.block_attention.api import block_attention
from gdpa_kernels.calling import jagged
from gdpa_kernels.calling.compiler import CompilerWarning
from gdpa_kernels.calling.lengths import Lengths
from gdpa_kernels.gdpa.api import gdpa
from gdpa_kernels.gdpa.bias import RelativeBias
from gdpa_kernels.gdpa.mask import Mask
from gdpa_kernels.gdpa.registration import register_activation
from gdpa_kernels.layers import PFFN, PMA, BlockAttention, GDPASelfAttention, Tokenwise

__all__ = [
    "PFFN",
    "PMA",
    "BlockAttention",
    "CompilerWarning",
    "GDPASelfAttention",
    "Lengths",
    "Mask",
    "RelativeBias",
    "Tokenwise",
    "block_attention",
    "gdpa",
    "jagged",
    "register_activation",
]
__version__ = "0.1.0"
