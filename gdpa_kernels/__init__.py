"""Attention kernels of recommendation models, and what measures them; importing touches no GPU."""

from gdpa_kernels.gdpa.api import gdpa

__all__ = ["gdpa"]
__version__ = "0.1.0"
