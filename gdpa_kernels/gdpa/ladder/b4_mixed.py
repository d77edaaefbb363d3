"""b4: a quarter of the scores by a polynomial.

Changes from b3_stream: one constant, so this file has no kernel. Two of every eight scores of a row
take their GELU or SiLU from a polynomial on the FMA units, two at a time (`fma.rn.f32x2`, new on
sm_100); the other six take their tanh from MUFU, in pairs. The polynomial saturates, so that its
error has a bound for every score (see polynomial.py).

Why it should help: MUFU evaluates 16 tanh a cycle of an SM, 1024 cycles for a block of 128 x 128
pairs: exactly as long as its MMAs at head_dim 128, and longer at head_dim 64, where they take 512.
Three quarters of the scores take 768 cycles.
Why it may not: each pair of scores costs 10 instructions instead of 3, of the 128 lanes a cycle
that an SM can issue; and if waits set the pace, not MUFU, nothing is gained.

| role     | warps | registers | work                                                   |
|----------|-------|-----------|--------------------------------------------------------|
| math (2) | 4     | up to 168 | of a tile: P = activation(S), one row a thread; output |
| load     | 1     | the same  | Q of both tiles, then K and V in turn                  |
| mma      | 1     | the same  | S = Q K^T and O += P V of both tiles                   |

| barrier             | arrivals    | filled by -> drained by                         |
|---------------------|-------------|-------------------------------------------------|
| q.full[tile]        | 1 and bytes | TMA load of a tile's Q -> mma                   |
| q.empty[tile]       | 1 (commit)  | the tile's last S -> load                       |
| kv.full[stage]      | 1 and bytes | TMA load of a block of K or V -> mma            |
| kv.empty[stage]     | 1 (commit)  | both tiles' MMAs that read it -> load           |
| s.full[tile]        | 1 (commit)  | S = Q K^T -> math                               |
| p.full[tile, slice] | 128 threads | math, a slice of P is stored, S was read -> mma |
| o.full[tile]        | 1 (commit)  | the item's last P V -> math                     |

O needs no barrier back: a math role reads it before it stores the P that overwrites it.
TMEM: S 0-255 (P over it), O 256-511.
"""

from dataclasses import replace

import torch

from gdpa_kernels.gdpa.batch import Batch, WorkList
from gdpa_kernels.gdpa.ladder import b3_stream
from gdpa_kernels.gdpa.ladder.b3_stream import Config, call_problem, work_list_recipe

__all__ = ["Config", "default_config", "forward", "work_list_recipe", "call_problem"]


def default_config(batch: Batch) -> Config:
    """Launch constants of b3, with the polynomial for a quarter of the scores."""
    return replace(b3_stream.default_config(batch), share=0.25)


def forward(
    batch: Batch, *, config: Config | None = None, work_list: WorkList | None = None
) -> torch.Tensor:
    """The output, `[total_q, num_heads, head_dim]`."""
    return b3_stream.forward(batch, config=config or default_config(batch), work_list=work_list)
