"""Attention over sequences that are cut between ranks: shards.py cuts, collectives.py moves rows,
attention.py has the calls, and in its docstring who holds what."""

from gdpa_kernels.parallel.attention import (
    STATIONARY,
    context_parallel_gdpa,
    context_parallel_pooling,
    predicted_bytes,
)
from gdpa_kernels.parallel.collectives import counted_bytes
from gdpa_kernels.parallel.shards import LAYOUTS, rows_of_rank, shard, unshard

__all__ = [
    "LAYOUTS",
    "STATIONARY",
    "context_parallel_gdpa",
    "context_parallel_pooling",
    "counted_bytes",
    "predicted_bytes",
    "rows_of_rank",
    "shard",
    "unshard",
]
