"""v4: warp specialization: a producer copies, two consumers compute.

Changes from v2_tma: warps have roles, TLX tasks. The producer (role `load`) issues the TMA loads of
K and V as soon as a buffer is free; two consumers (role `math`) own 64 of the tile's 128 rows each.
Full and empty mbarriers of our own hand buffers over. Registers move from producer to consumers.

Why it should help: in v2 the warps that compute also issue copies and wait for them, and all warps
move in step: while the activation runs, the tensor core idles. Two consumers that run freely can
overlap: one issues MMAs while the other evaluates the activation.
Why it may not: within a consumer the two MMAs and the activation are still serial, and with one
program per SM nothing hides its prologue and epilogue.

| role     | warps | registers | work                                                 |
|----------|-------|-----------|------------------------------------------------------|
| load     | 4     | the rest  | Q once, then K and V of one block after another      |
| math (2) | 4     | 240       | 64 rows each: S = Q K^T, P = activation(S), O += P V |

| barrier        | arrivals    | filled by -> drained by                             |
|----------------|-------------|-----------------------------------------------------|
| q_full[role]   | 1 and bytes | TMA load of 64 rows of Q -> that consumer           |
| k.full[stage]  | 1 and bytes | TMA load of a block of K -> both consumers          |
| k.empty[stage] | 256 threads | consumers, S of the block is complete -> producer   |
| v.full[stage]  | 1 and bytes | TMA load of a block of V -> both consumers          |
| v.empty[stage] | 256 threads | consumers, P V of the block is complete -> producer |
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
import triton.language.extra.tlx as tlx

from gdpa_kernels.calling.launch import launch
from gdpa_kernels.device.groups import Ring
from gdpa_kernels.device.ragged import ragged_descriptor, store_rows
from gdpa_kernels.device.rows import fetch_rows
from gdpa_kernels.device.sequences import sequence
from gdpa_kernels.gdpa.batch import Batch
from gdpa_kernels.gdpa.device.activations import activate
from gdpa_kernels.gdpa.published_form import call_problem as call_problem

MATH_ROLES = tl.constexpr(2)
ROWS = tl.constexpr(64)


@dataclass(frozen=True)
class Config:
    """Launch constants: keys of a block, K/V blocks in flight, registers of a consumer thread."""

    BLOCK_N: int = 128
    num_stages: int = 2
    registers: int = 240


def default_config(batch: Batch) -> Config:
    """Two blocks of 128 keys fill the shared memory of an SM at head_dim 128."""
    return Config()


@triton.aggregate
class Options:
    """The constants that the roles share."""

    ACTIVATION: tl.constexpr
    BLOCK_N: tl.constexpr
    BLOCK_D: tl.constexpr
    NUM_STAGES: tl.constexpr


@triton.jit
def load(q_desc, k_desc, v_desc, q, q_full, k, v, tile, options):
    """The producer: every buffer is filled as soon as both consumers have drained it."""
    NUM_STAGES: tl.constexpr = options.NUM_STAGES
    blocks, first_row, head, len_k, len_q, start_k, _, start_q = tile
    for role in tl.static_range(MATH_ROLES):
        fetch_rows(q_desc, q[role], q_full[role], start_q, len_q, head, first_row + role * ROWS)
    for block in tl.range(0, blocks):
        first_key = block * options.BLOCK_N
        stage = block % NUM_STAGES
        phase = (block // NUM_STAGES) & 1
        tlx.barrier_wait(k.empty[stage], phase ^ 1)
        fetch_rows(k_desc, k.buffer[stage], k.full[stage], start_k, len_k, head, first_key)
        tlx.barrier_wait(v.empty[stage], phase ^ 1)
        fetch_rows(v_desc, v.buffer[stage], v.full[stage], start_k, len_k, head, first_key)


@triton.jit
def math(role: tl.constexpr, q, q_full, k, v, out_desc, tile, scale, output_scale, options):
    """A consumer: 64 rows of the tile against all its keys."""
    NUM_STAGES: tl.constexpr = options.NUM_STAGES
    DTYPE: tl.constexpr = tlx.dtype_of(out_desc)
    blocks, first_row, head, _, len_q, _, start_out, _ = tile
    first_row += role * ROWS
    acc = tl.zeros([ROWS, options.BLOCK_D], tl.float32)
    tlx.barrier_wait(q_full[role], 0)
    for block in tl.range(0, blocks):
        stage = block % NUM_STAGES
        phase = (block // NUM_STAGES) & 1
        tlx.barrier_wait(k.full[stage], phase)
        s = tlx.async_dot(q[role], tlx.local_trans(k.buffer[stage]))
        s = tlx.async_dot_wait(0, s)
        tlx.barrier_arrive(k.empty[stage])
        p = activate(s, scale, options.ACTIVATION, True).to(DTYPE)
        tlx.barrier_wait(v.full[stage], phase)
        acc = tlx.async_dot(p, v.buffer[stage], acc)
        acc = tlx.async_dot_wait(0, acc)
        tlx.barrier_arrive(v.empty[stage])
    store_rows(out_desc, start_out, len_q, head, first_row, (acc * output_scale).to(DTYPE))


@triton.jit(do_not_specialize=["max_seqlen_q"])
def specialized_kernel(
    q_desc, k_desc, v_desc, out_desc, cu_seqlens_q_ptr, cu_seqlens_k_ptr,
    max_seqlen_q, scale, output_scale,
    NUM_HEADS: tl.constexpr, ACTIVATION: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr, NUM_STAGES: tl.constexpr, REGISTERS: tl.constexpr,
):  # fmt: skip
    """output_scale * activation(scale * Q K^T) V for 128 rows of one (sequence, head)."""
    BLOCK_M: tl.constexpr = MATH_ROLES * ROWS
    DTYPE: tl.constexpr = tlx.dtype_of(q_desc)
    options = Options(ACTIVATION, BLOCK_N, BLOCK_D, NUM_STAGES)
    blocks = tl.cdiv(max_seqlen_q, BLOCK_M)
    pid = tl.program_id(0)
    first_row = pid % blocks * BLOCK_M
    head = pid // blocks % NUM_HEADS
    start_q, start_out, len_q, start_k, len_k = sequence(
        cu_seqlens_q_ptr, cu_seqlens_k_ptr, pid // blocks // NUM_HEADS, max_seqlen_q
    )
    blocks = tl.where(first_row < len_q, tl.cdiv(len_k, BLOCK_N), 0)  # 0: a tile without rows
    tile = blocks, first_row, head, len_k, len_q, start_k, start_out, start_q

    q = tlx.local_alloc((ROWS, BLOCK_D), DTYPE, MATH_ROLES)
    k = tlx.local_alloc((BLOCK_N, BLOCK_D), DTYPE, NUM_STAGES)
    v = tlx.local_alloc((BLOCK_N, BLOCK_D), DTYPE, NUM_STAGES)
    q_full = tlx.alloc_barriers(MATH_ROLES)
    k_full = tlx.alloc_barriers(NUM_STAGES)
    v_full = tlx.alloc_barriers(NUM_STAGES)
    k_empty = tlx.alloc_warp_barrier(NUM_STAGES, 4, MATH_ROLES)
    v_empty = tlx.alloc_warp_barrier(NUM_STAGES, 4, MATH_ROLES)
    k = Ring(k, k_full, k_empty, NUM_STAGES)
    v = Ring(v, v_full, v_empty, NUM_STAGES)

    with tlx.async_tasks():
        with tlx.async_task("default"):
            load(q_desc, k_desc, v_desc, q, q_full, k, v, tile, options)
        with tlx.async_task(num_warps=4, registers=REGISTERS, replicate=MATH_ROLES):
            math(
                tlx.async_task_replica_id(), q, q_full, k, v, out_desc, tile, scale, output_scale,
                options,
            )  # fmt: skip


def forward(batch: Batch, *, config: Config | None = None) -> torch.Tensor:
    """The output, `[total_q, num_heads, head_dim]`."""
    out = batch.new_out()
    config = config or default_config(batch)
    tiles = triton.cdiv(batch.max_seqlen_q, MATH_ROLES.value * ROWS.value)
    launch(
        specialized_kernel,
        (tiles * batch.num_heads * batch.sequences,), batch.device,
        ragged_descriptor(batch.q, ROWS.value), ragged_descriptor(batch.k, config.BLOCK_N),
        ragged_descriptor(batch.v, config.BLOCK_N), ragged_descriptor(out, ROWS.value),
        batch.cu_seqlens_q, batch.cu_seqlens_k, batch.max_seqlen_q, batch.scale, batch.output_scale,
        NUM_HEADS=batch.num_heads, ACTIVATION=batch.names, BLOCK_N=config.BLOCK_N,
        BLOCK_D=batch.head_dim, NUM_STAGES=config.num_stages,
        REGISTERS=config.registers, num_warps=4,
    )  # fmt: skip
    return out
