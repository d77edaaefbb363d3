"""Layers: the operators with their projections, on jagged batches."""

from gdpa_kernels.layers.block_attention import BlockAttention
from gdpa_kernels.layers.common import Tokenwise
from gdpa_kernels.layers.gdpa import PFFN, PMA, GDPASelfAttention, Options

__all__ = ["PFFN", "PMA", "BlockAttention", "GDPASelfAttention", "Options", "Tokenwise"]
