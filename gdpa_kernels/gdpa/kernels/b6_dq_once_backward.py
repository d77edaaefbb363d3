"""b6, backward for short K and V: dQ is written once.

Changes from b5_stream_backward: one constant, so this file has no kernel. With at most 256 keys an
item has all keys of a (sequence, key head), and dQ, which a pair sums over its keys, is complete.
It leaves scaled, in q's dtype: no zeros before, no addition in memory, no kernel after;
deterministic.

Why it should help: 1,280 bytes less of memory for a row of head_dim 128, and 32 KiB less of the
port of shared memory a step: 2,560 clocks, as many as the MMAs.
Why it may not: rows that see no key are computed too; dQ is scaled and converted in `output`.

| role     | warps | registers | work                                                       |
|----------|-------|-----------|------------------------------------------------------------|
| output   | 4     | the rest  | 64 rows of dQ of a step, dV and dK of an item: TMEM to TMA |
| math (2) | 4     | 160       | P and dS of 64 rows                                        |
| mma      | 1     | 64        | leader: all MMAs; peer: tells the leader that dS has come  |
| load (2) | 1     | 64        | rows of K, V, Q and dO; half of the columns of K, Q and dO |

| barrier         | arrivals           | filled by -> drained by                                |
|-----------------|--------------------|--------------------------------------------------------|
| k_rows.full     | 1 and bytes        | TMA loads of K's rows of both CTAs -> mma, S           |
| k_rows.empty    | 1 (commit to both) | the item's last S -> load                              |
| k.full          | 1 and bytes        | TMA loads of K's columns of both CTAs -> mma, dQ       |
| k.empty         | 1 (commit to both) | the item's last dQ -> load                             |
| v.full          | 1 and bytes        | TMA loads of V of both CTAs -> mma, dP                 |
| v.empty         | 1 (commit to both) | the item's last dP -> load                             |
| q.rows.full     | 1 and bytes        | TMA loads of both CTAs' halves of Q's rows -> mma, S   |
| q.rows.empty    | 1 (commit to both) | the step's S -> load                                   |
| q.columns.full  | 1 and bytes        | TMA loads of both halves of Q's columns -> mma, dK     |
| q.columns.empty | 1 (commit to both) | the step's dK -> load                                  |
| g.rows.full     | 1 and bytes        | TMA loads of both CTAs' halves of dO's rows -> mma, dP |
| g.rows.empty    | 1 (commit to both) | the step's dP -> load                                  |
| g.columns.full  | 1 and bytes        | TMA loads of both halves of dO's columns -> mma, dV    |
| g.columns.empty | 1 (commit to both) | the step's dV -> load                                  |
| s.full          | 1 (commit to both) | S -> math                                              |
| p.full          | 4, 2 of each CTA   | math, P is in TMEM and S was read -> mma, dV           |
| dp.full         | 1 (commit to both) | dP -> math                                             |
| ds.for_dk.full  | 4, 2 of each CTA   | math, dS is in TMEM and dP was read -> mma, dK         |
| ds.peer.full    | 1 and bytes        | math of the peer, dS of this CTA's rows -> mma         |
| ds.for_dq.full  | 3                  | a math role of each CTA, its dS is in shared memory;   |
|                 |                    | mma of the peer, its ds.peer.full is done -> mma, dQ   |
| dq.full         | 1 (commit to both) | dQ -> output                                           |
| dq.empty        | 2, 1 of each CTA   | output, dQ is in registers -> mma, the next dP         |
| dv.full         | 1 (commit to both) | the item's last dV -> output                           |
| dk_empty        | 2, 1 of each CTA   | output, dK is in registers -> mma, the next item's dK  |

mma waits in the leader alone, on barriers of the leader; only ds.peer.full is waited for in both
CTAs. `1 and bytes` of the loads is the leader's, which expects the bytes of both CTAs. dV needs no
barrier back, and dK no barrier forth: the barriers of the item's last dQ, which lies between, order
them.
TMEM: S 0-127, P 0-31 and 64-95; dP 128-255, dS 128-159 and 192-223, then dQ 128-191; dV, dK.
"""

from dataclasses import replace

import torch

from gdpa_kernels.gdpa.batch import Batch, WorkList
from gdpa_kernels.gdpa.device.gradients import few_keys_problem
from gdpa_kernels.gdpa.kernels import b5_stream_backward as b5
from gdpa_kernels.gdpa.kernels.b5_stream_backward import Config, work_list_recipe

__all__ = ["Config", "backward", "default_config", "work_list_recipe", "call_problem"]


def default_config(batch: Batch) -> Config:
    """Launch constants of b5, with dQ written once."""
    return replace(b5.default_config(batch), once=True)


def call_problem(batch: Batch) -> str | None:
    """The reason why this rung cannot take a call, beyond `Requires`; None if it can."""
    return few_keys_problem(batch, b5.ITEM.value)


def backward(
    grad_out: torch.Tensor, batch: Batch, *, config: Config | None = None,
    work_list: WorkList | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    """(dq, dk, dv), shaped as q, k and v, contiguous; grad_out may have any strides."""
    config = config or default_config(batch)
    return b5.backward(grad_out, batch, config=config, work_list=work_list)
