"""v6b: one software pipeline from tile to tile.

Changes from v6a_persistent: the loops over tiles and blocks become one. The first scores of the
next tile are issued before the last P V of this one, so a consumer always has an MMA to overlap its
activation with, at the boundary of two tiles too. After the last tile the consumer computes the
scores of a dummy tile, for which the producer supplies zeros.

Why it should help: v6a waits twice per tile with nothing in flight, for the first scores and for
the last P V: about one block's time, of a tile that has two or four. The shorter the keys, the
more.
Why it may not: the other consumer may have filled the gap already.

| role     | warps | registers | work                                                      |
|----------|-------|-----------|-----------------------------------------------------------|
| load     | 4     | the rest  | Q, K, V of one tile after another, ahead of the consumers |
| math (2) | 4     | 240       | of 64 rows: S of the next block or tile, P V, activation  |

| barrier             | arrivals    | filled by -> drained by                                  |
|---------------------|-------------|----------------------------------------------------------|
| q.full[role, slot]  | 1 and bytes | TMA load of 64 rows of Q -> that consumer                |
| q.empty[role, slot] | 128 threads | that consumer, the tile's last S is complete -> producer |
| k.full[stage]       | 1 and bytes | TMA load of a block of K -> both consumers               |
| k.empty[stage]      | 256 threads | consumers, S of the block is complete -> producer        |
| v.full[stage]       | 1 and bytes | TMA load of a block of V -> both consumers               |
| v.empty[stage]      | 256 threads | consumers, P V of the block is complete -> producer      |
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
import triton.language.extra.tlx as tlx

from gdpa_kernels.calling.launch import launch, multiprocessors
from gdpa_kernels.device.groups import Ring
from gdpa_kernels.device.ragged import ragged_descriptor
from gdpa_kernels.device.rows import fetch_rows, put_rows
from gdpa_kernels.gdpa.batch import Batch, WorkList
from gdpa_kernels.gdpa.device.activations import activate
from gdpa_kernels.gdpa.device.work_list import ZigzagRecipe, count_items, entry, query_list_recipe
from gdpa_kernels.gdpa.published_form import call_problem as call_problem

MATH_ROLES = tl.constexpr(2)
ROWS = tl.constexpr(64)
TILE = tl.constexpr(128)
Q_SLOTS = tl.constexpr(2)


@dataclass(frozen=True)
class Config:
    """Launch constants: keys of a block, K/V blocks in flight, registers of a consumer thread."""

    BLOCK_N: int = 128
    num_stages: int = 2
    registers: int = 240


def default_config(batch: Batch) -> Config:
    """Short sequences take blocks of 64 keys, which waste less at their ends, and long ones blocks
    of 128, which cost less shared-memory bandwidth."""
    return Config(BLOCK_N=64, num_stages=4) if batch.mean_seqlen_k <= 640 else Config()


def work_list_recipe(batch: Batch, config: Config) -> ZigzagRecipe:
    """The work list of these sequences."""
    return query_list_recipe(batch, TILE.value, config.BLOCK_N)


@triton.aggregate
class Options:
    """The constants that the roles share."""

    ACTIVATION: tl.constexpr
    BLOCK_N: tl.constexpr
    BLOCK_D: tl.constexpr
    NUM_STAGES: tl.constexpr


@triton.jit
def blocks_of(len_k, options):
    """Blocks of keys. At least one: prologue and epilogue need one. Without keys it is zero."""
    return tl.maximum(tl.cdiv(len_k, options.BLOCK_N), 1)


@triton.jit
def load(q_desc, k_desc, v_desc, q, k, v, list_ptr, options):
    """The producer: Q, K and V in the order of their use, as far ahead as there are buffers."""
    item = tl.program_id(0)
    num_items = count_items(list_ptr)
    tile, kv = 0, 0
    if item < num_items:
        start_q, _, len_q, start_k, len_k, head, row = entry(list_ptr, item)
        while item < num_items:
            item += tl.num_programs(0)
            following = entry(list_ptr, tl.minimum(item, num_items - 1))
            blocks = blocks_of(len_k, options)
            fetch_q(q_desc, q, tile, start_q, len_q, head, row)
            for block in tl.range(0, blocks):
                key = block * options.BLOCK_N
                stage = k.acquire(kv + block)
                fetch_rows(k_desc, k.buffer[stage], k.full[stage], start_k, len_k, head, key)
                stage = v.acquire(kv + block)
                fetch_rows(v_desc, v.buffer[stage], v.full[stage], start_k, len_k, head, key)
            kv += blocks
            tile += 1
            start_q, _, len_q, start_k, len_k, head, row = following
    # The scores of a dummy tile, overlapped with the last P V.
    if tile > 0:
        fetch_q(q_desc, q, tile, 0, 0, 0, 0)
        stage = k.acquire(kv)
        fetch_rows(k_desc, k.buffer[stage], k.full[stage], 0, 0, 0, 0)


@triton.jit
def fetch_q(q_desc, q, tile, start, length, head, row):
    """The rows of the tile-th tile for both consumers."""
    for role in tl.static_range(MATH_ROLES):
        slot = q.acquire(tile, role * Q_SLOTS)
        fetch_rows(q_desc, q.buffer[slot], q.full[slot], start, length, head, row + role * ROWS)


@triton.jit
def math(role: tl.constexpr, q, k, v, out_desc, out, list_ptr, scale, output_scale, options):
    """A consumer: 64 rows of every tile. `kv` counts blocks of K and V, `tile` tiles of Q."""
    DTYPE: tl.constexpr = tlx.dtype_of(out_desc)
    item = tl.program_id(0)
    num_items = count_items(list_ptr)
    tile, kv = 0, 0
    if item < num_items:
        _, start_out, len_q, _, len_k, head, row = entry(list_ptr, item)
        blocks = blocks_of(len_k, options)
        row += role * ROWS
        tlx.barrier_wait(q.full[role * Q_SLOTS], 0)
        tlx.barrier_wait(k.full[0], 0)
        s = tlx.async_dot(q.buffer[role * Q_SLOTS], tlx.local_trans(k.buffer[0]))
        s = tlx.async_dot_wait(0, s)
        tlx.barrier_arrive(k.empty[0])
        p = activate(s, scale, options.ACTIVATION, True)
        while item < num_items:
            item += tl.num_programs(0)
            # Prefetched: the loop over blocks hides the latency.
            following = entry(list_ptr, tl.minimum(item, num_items - 1))
            q_slot = role * Q_SLOTS + tile % Q_SLOTS
            acc = tl.zeros([ROWS, options.BLOCK_D], tl.float32)
            for block in tl.range(1, blocks):
                stage = k.wait(kv + block)
                v_stage = v.wait(kv + block - 1)
                p = p.to(DTYPE)
                s = tlx.async_dot(q.buffer[q_slot], tlx.local_trans(k.buffer[stage]))
                acc = tlx.async_dot(p, v.buffer[v_stage], acc)
                s = tlx.async_dot_wait(1, s)
                tlx.barrier_arrive(k.empty[stage])
                p = activate(s, scale, options.ACTIVATION, True)
                acc = tlx.async_dot_wait(0, acc)
                tlx.barrier_arrive(v.empty[v_stage])
            tlx.barrier_arrive(q.empty[q_slot])

            # The first scores of the next tile, overlapped with the last P V of this one.
            _, next_out, next_len_q, _, len_k, next_head, next_row = following
            next_blocks = blocks_of(len_k, options)
            next_row += role * ROWS
            tile += 1
            kv += blocks
            q_slot = q.wait(tile, role * Q_SLOTS)
            stage = k.wait(kv)
            v_stage = v.wait(kv - 1)
            p = p.to(DTYPE)
            s = tlx.async_dot(q.buffer[q_slot], tlx.local_trans(k.buffer[stage]))
            acc = tlx.async_dot(p, v.buffer[v_stage], acc)
            s = tlx.async_dot_wait(1, s)
            tlx.barrier_arrive(k.empty[stage])
            p = activate(s, scale, options.ACTIVATION, True)
            acc = tlx.async_dot_wait(0, acc)
            tlx.barrier_arrive(v.empty[v_stage])
            tlx.async_descriptor_store_wait(0)
            rows = (acc * output_scale).to(DTYPE)
            put_rows(out_desc, out[role], start_out, len_q, head, row, rows)
            start_out, len_q, head, row, blocks = (
                next_out, next_len_q, next_head, next_row, next_blocks
            )  # fmt: skip
        tlx.async_descriptor_store_wait(0)


@triton.jit
def stream_kernel(
    q_desc, k_desc, v_desc, out_desc, list_ptr, scale, output_scale,
    ACTIVATION: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
    NUM_STAGES: tl.constexpr, REGISTERS: tl.constexpr,
):  # fmt: skip
    """output_scale * activation(scale * Q K^T) V for the listed tiles of this program."""
    DTYPE: tl.constexpr = tlx.dtype_of(q_desc)
    options = Options(ACTIVATION, BLOCK_N, BLOCK_D, NUM_STAGES)
    q = tlx.local_alloc((ROWS, BLOCK_D), DTYPE, MATH_ROLES * Q_SLOTS)
    k = tlx.local_alloc((BLOCK_N, BLOCK_D), DTYPE, NUM_STAGES)
    v = tlx.local_alloc((BLOCK_N, BLOCK_D), DTYPE, NUM_STAGES)
    out = tlx.local_alloc((ROWS, BLOCK_D), DTYPE, MATH_ROLES)
    q_full = tlx.alloc_barriers(MATH_ROLES * Q_SLOTS)
    q_empty = tlx.alloc_warp_barrier(MATH_ROLES * Q_SLOTS, 4)
    k_full = tlx.alloc_barriers(NUM_STAGES)
    v_full = tlx.alloc_barriers(NUM_STAGES)
    k_empty = tlx.alloc_warp_barrier(NUM_STAGES, 4, MATH_ROLES)
    v_empty = tlx.alloc_warp_barrier(NUM_STAGES, 4, MATH_ROLES)
    q = Ring(q, q_full, q_empty, Q_SLOTS)
    k = Ring(k, k_full, k_empty, NUM_STAGES)
    v = Ring(v, v_full, v_empty, NUM_STAGES)

    with tlx.async_tasks():
        with tlx.async_task("default"):
            load(q_desc, k_desc, v_desc, q, k, v, list_ptr, options)
        with tlx.async_task(num_warps=4, registers=REGISTERS, replicate=MATH_ROLES):
            math(
                tlx.async_task_replica_id(), q, k, v, out_desc, out, list_ptr, scale, output_scale,
                options,
            )  # fmt: skip


def forward(
    batch: Batch, *, config: Config | None = None, work_list: WorkList | None = None
) -> torch.Tensor:
    """The output, `[total_q, num_heads, head_dim]`."""
    out = batch.new_out()
    config = config or default_config(batch)
    (entries,) = work_list or work_list_recipe(batch, config).make(*batch.offsets)
    programs = min(multiprocessors(batch.device), len(entries) - 1)
    launch(
        stream_kernel, (programs,), batch.device,
        ragged_descriptor(batch.q, ROWS.value), ragged_descriptor(batch.k, config.BLOCK_N),
        ragged_descriptor(batch.v, config.BLOCK_N), ragged_descriptor(out, ROWS.value),
        entries, batch.scale, batch.output_scale,
        ACTIVATION=batch.names, BLOCK_N=config.BLOCK_N, BLOCK_D=batch.head_dim,
        NUM_STAGES=config.num_stages, REGISTERS=config.registers, num_warps=4,
    )  # fmt: skip
    return out
