"""Checks that a call has the published form, the only one that lessons compute."""

from __future__ import annotations

from gdpa_kernels.gdpa.batch import Batch
from gdpa_kernels.gdpa.device.activations import foldable


def call_problem(batch: Batch) -> str | None:
    """The reason why a lesson cannot take a call, beyond `Requires`; None if it can."""
    if batch.masked:
        return f"needs no mask, got causal={batch.causal}, window={batch.window}"
    if len(batch.activation) > 1:
        return f"needs one activation for all heads, got {batch.names}"
    if batch.num_heads != batch.num_heads_k:
        return f"needs as many heads of k as of q, got {batch.num_heads_k} and {batch.num_heads}"
    return None


def packed_call_problem(batch: Batch) -> str | None:
    """`call_problem` of a lesson that computes the activation of two bf16 scores at a time."""
    if batch.precise:
        return "needs precise False, got True"
    if not foldable(batch.activation, batch.dtype):
        return f"needs GELU or SiLU, got {batch.names}"
    return call_problem(batch)
