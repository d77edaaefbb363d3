"""Inference over histories that are kept: pages, scores of candidates, stored sums."""

from gdpa_kernels.serving.cache import PagedCache
from gdpa_kernels.serving.layers import candidates, extend
from gdpa_kernels.serving.pages import Pages
from gdpa_kernels.serving.scores import score
from gdpa_kernels.serving.sums import StoredSums
from gdpa_kernels.serving.validity import Model

__all__ = ["Model", "PagedCache", "Pages", "StoredSums", "candidates", "extend", "score"]
