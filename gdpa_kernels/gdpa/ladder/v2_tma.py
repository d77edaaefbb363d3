"""v2: let the copy engine do the addressing.

Changes from v1_tiled: q, k, v and out are accessed through TMA descriptors. One thread issues the
copy of a whole tile; rows beyond the sequence read as zero and are not written (device/ragged.py),
so no mask and no pointer is left.

Why it should help: v1 computes a 64-bit pointer and a predicate for every 16 bytes it copies, in
every thread, for every block of keys; the instructions compete with the activation for issue slots,
the values for registers. Without them one warp group can own 128 rows and 64 keys: its accumulator
and scores take 192 of a thread's 255 registers, and every K or V block read from shared memory
feeds twice the rows.
Why it may not: all warps still wait for a copy and compute in step.

| role      | warps     | registers | work                                                   |
|-----------|-----------|-----------|--------------------------------------------------------|
| all warps | num_warps | up to 255 | both MMAs; thread 0 issues TMA loads and the TMA store |

| barrier       | arrivals    | filled by -> drained by                                |
|---------------|-------------|--------------------------------------------------------|
| one per stage | 1 and bytes | TMA load of K or V, num_stages - 1 blocks ahead -> MMA |

The compiler makes the barriers; v4 will make its own.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from gdpa_kernels.calling.launch import launch
from gdpa_kernels.device.ragged import load_rows, ragged_descriptor, store_rows
from gdpa_kernels.device.sequences import sequence
from gdpa_kernels.gdpa.batch import Batch
from gdpa_kernels.gdpa.device.activations import activate
from gdpa_kernels.gdpa.published_form import call_problem as call_problem


@dataclass(frozen=True)
class Config:
    """Launch constants: query rows and keys of a tile, warps of a program, K/V blocks in flight."""

    BLOCK_M: int = 128
    BLOCK_N: int = 64
    num_warps: int = 4
    num_stages: int = 2


def default_config(batch: Batch) -> Config:
    """The fastest of the swept constants at head_dim 128."""
    if batch.max_seqlen_k <= 512:
        return Config(BLOCK_N=32, num_warps=8, num_stages=4)
    return Config()


@triton.jit(do_not_specialize=["max_seqlen_q"])
def tma_kernel(
    q_desc, k_desc, v_desc, out_desc, cu_seqlens_q_ptr, cu_seqlens_k_ptr,
    max_seqlen_q, scale, output_scale,
    NUM_HEADS: tl.constexpr, ACTIVATION: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """output_scale * activation(scale * Q K^T) V for BLOCK_M rows of one (sequence, head).

    cu_seqlens_q_ptr None: one q for all sequences.
    """
    blocks = tl.cdiv(max_seqlen_q, BLOCK_M)
    pid = tl.program_id(0)
    first_row = pid % blocks * BLOCK_M
    head = pid // blocks % NUM_HEADS
    batch = pid // blocks // NUM_HEADS

    start_q, start_out, len_q, start_k, len_k = sequence(
        cu_seqlens_q_ptr, cu_seqlens_k_ptr, batch, max_seqlen_q
    )
    if first_row >= len_q:
        return

    q = load_rows(q_desc, start_q, len_q, head, first_row)
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    for first_key in tl.range(0, len_k, BLOCK_N):
        k = load_rows(k_desc, start_k, len_k, head, first_key)
        s = tl.dot(q, k.T)
        p = activate(s, scale, ACTIVATION, True)
        v = load_rows(v_desc, start_k, len_k, head, first_key)
        acc = tl.dot(p.to(v.dtype), v, acc)

    store_rows(out_desc, start_out, len_q, head, first_row, (acc * output_scale).to(q.dtype))


def forward(batch: Batch, *, config: Config | None = None) -> torch.Tensor:
    """The output, `[total_q, num_heads, head_dim]`."""
    out = batch.new_out()
    config = config or default_config(batch)
    tiles = triton.cdiv(batch.max_seqlen_q, config.BLOCK_M)
    launch(
        tma_kernel, (tiles * batch.num_heads * batch.sequences,), batch.device,
        ragged_descriptor(batch.q, config.BLOCK_M), ragged_descriptor(batch.k, config.BLOCK_N),
        ragged_descriptor(batch.v, config.BLOCK_N), ragged_descriptor(out, config.BLOCK_M),
        batch.cu_seqlens_q, batch.cu_seqlens_k, batch.max_seqlen_q, batch.scale, batch.output_scale,
        NUM_HEADS=batch.num_heads, ACTIVATION=batch.names, BLOCK_M=config.BLOCK_M,
        BLOCK_N=config.BLOCK_N, BLOCK_D=batch.head_dim,
        num_warps=config.num_warps, num_stages=config.num_stages,
    )  # fmt: skip
    return out
