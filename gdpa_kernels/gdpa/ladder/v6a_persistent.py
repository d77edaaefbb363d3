"""v6a: a persistent kernel: a list of tiles, loads that run ahead, asynchronous stores.

Changes from v5_pingpong: as in v3, only as many programs as the device has SMs, and each takes its
tiles from a list of those that exist. The producer runs on into the next tile while the consumers
finish this one; O has a buffer of its own, and its TMA store is overlapped with the next tile. An
entry of the list says all about its tile and is prefetched one tile ahead.

Why it should help: with one program of v5 per SM, nothing hides its prologue (barriers,
descriptors, the first copies) or its epilogue (the store of O). A list has no tiles without rows.
Why it may not: two tiles of Q and the output take 96 KiB of shared memory; the list costs a launch.

| role     | warps | registers | work                                                      |
|----------|-------|-----------|-----------------------------------------------------------|
| load     | 4     | the rest  | Q, K, V of one tile after another, ahead of the consumers |
| math (2) | 4     | 240       | of 64 rows: S of block j + 1, P V of block j, activation  |

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


@triton.jit
def fetch_q(q_desc, q, tile, start, length, head, row):
    """The rows of the tile-th tile for both consumers."""
    for role in tl.static_range(MATH_ROLES):
        slot = q.acquire(tile, role * Q_SLOTS)
        fetch_rows(q_desc, q.buffer[slot], q.full[slot], start, length, head, row + role * ROWS)


@triton.jit
def math(role: tl.constexpr, q, k, v, out_desc, out, list_ptr, scale, output_scale, options):
    """A consumer: 64 rows of every tile. `kv` counts blocks of K and V, `tile` tiles of Q."""
    NUM_STAGES: tl.constexpr = options.NUM_STAGES
    DTYPE: tl.constexpr = tlx.dtype_of(out_desc)
    item = tl.program_id(0)
    num_items = count_items(list_ptr)
    tile, kv = 0, 0
    if item < num_items:
        _, start_out, len_q, _, len_k, head, row = entry(list_ptr, item)
        while item < num_items:
            item += tl.num_programs(0)
            # Prefetched: the loop over blocks hides the latency.
            following = entry(list_ptr, tl.minimum(item, num_items - 1))
            blocks = blocks_of(len_k, options)
            row += role * ROWS
            q_slot = q.wait(tile, role * Q_SLOTS)
            stage = k.wait(kv)
            s = tlx.async_dot(q.buffer[q_slot], tlx.local_trans(k.buffer[stage]))
            s = tlx.async_dot_wait(0, s)
            tlx.barrier_arrive(k.empty[stage])
            p = activate(s, scale, options.ACTIVATION, True)
            acc = tl.zeros([ROWS, options.BLOCK_D], tl.float32)
            for block in tl.range(1, blocks):
                stage = (kv + block) % NUM_STAGES
                v_stage = (kv + block - 1) % NUM_STAGES
                tlx.barrier_wait(k.full[stage], ((kv + block) // NUM_STAGES) & 1)
                tlx.barrier_wait(v.full[v_stage], ((kv + block - 1) // NUM_STAGES) & 1)
                p = p.to(DTYPE)
                s = tlx.async_dot(q.buffer[q_slot], tlx.local_trans(k.buffer[stage]))
                acc = tlx.async_dot(p, v.buffer[v_stage], acc)
                s = tlx.async_dot_wait(1, s)
                tlx.barrier_arrive(k.empty[stage])
                p = activate(s, scale, options.ACTIVATION, True)
                acc = tlx.async_dot_wait(0, acc)
                tlx.barrier_arrive(v.empty[v_stage])
            tlx.barrier_arrive(q.empty[q_slot])
            tile += 1
            kv += blocks
            v_stage = v.wait(kv - 1)
            acc = tlx.async_dot(p.to(DTYPE), v.buffer[v_stage], acc)
            acc = tlx.async_dot_wait(0, acc)
            tlx.barrier_arrive(v.empty[v_stage])
            tlx.async_descriptor_store_wait(0)
            rows = (acc * output_scale).to(DTYPE)
            put_rows(out_desc, out[role], start_out, len_q, head, row, rows)
            _, start_out, len_q, _, len_k, head, row = following
        tlx.async_descriptor_store_wait(0)


@triton.jit
def persistent_pipeline_kernel(
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
        persistent_pipeline_kernel, (programs,), batch.device,
        ragged_descriptor(batch.q, ROWS.value), ragged_descriptor(batch.k, config.BLOCK_N),
        ragged_descriptor(batch.v, config.BLOCK_N), ragged_descriptor(out, ROWS.value),
        entries, batch.scale, batch.output_scale,
        ACTIVATION=batch.names, BLOCK_N=config.BLOCK_N, BLOCK_D=batch.head_dim,
        NUM_STAGES=config.num_stages, REGISTERS=config.registers, num_warps=4,
    )  # fmt: skip
    return out
