"""Peers behind one signature: alternatives that a user could install.

Each computes either the activation or softmax. A softmax peer does the same FLOPs and bytes on a
different function: only its run time is compared, and it is checked against softmax before it is
timed. None of their code is here: each is imported where installed, and says how to get it where
not.
"""

from __future__ import annotations

from gdpa_lab.measuring.baselines import blocks, flash, same_function, torch_peers
from gdpa_lab.measuring.baselines.peer import (
    Availability,
    Baseline,
    Configurations,
    Results,
    Unsupported,
    block_offsets,
    differentiate,
)
from gdpa_lab.measuring.baselines.softmax import softmax_gradients, softmax_reference
from gdpa_lab.measuring.workload import STEP, Workload

__all__ = [
    "BASELINES",
    "BLOCK_BASELINES",
    "STEP",
    "Availability",
    "Baseline",
    "Configurations",
    "Results",
    "Unsupported",
    "block_offsets",
    "differentiate",
    "softmax_gradients",
    "softmax_reference",
    "taking",
]

BASELINES: dict[str, Baseline] = {
    peer.impl: peer for peer in (*same_function.PEERS, *torch_peers.PEERS, *flash.PEERS)
}
"""Peers of GDPA, by impl."""
BLOCK_BASELINES: dict[str, Baseline] = {peer.impl: peer for peer in blocks.PEERS}
"""Peers of block attention, by impl. The last two are about rotary, most others know none."""


def taking(workload: Workload, direction: str, math: str | None = None) -> list[str]:
    """List the peers that take a workload in a direction, installed or not; `math`: only those that
    compute "activation" or "softmax"."""
    peers = BASELINES if workload.operator == "gdpa" else BLOCK_BASELINES
    return [
        impl
        for impl, peer in peers.items()
        if math in (None, peer.math) and peer.problem(workload, direction) is None
    ]
