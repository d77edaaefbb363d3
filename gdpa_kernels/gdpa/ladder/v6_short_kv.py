"""v6: short K and V stay in shared memory.

Changes from v6b_stream: where the keys of a sequence fit in the buffers (`resident`), an entry of
the list is a whole (sequence, head): K and V are loaded once and stay in shared memory while its
tiles of Q stream by.

Why it should help: with 256 keys every tile of 128 rows of v6b loads 128 KiB of K and V to produce
32 KiB of output: L2 traffic, and energy that the tensor cores then lack.
Why it may not: whole heads are coarser than tiles, and balance worse; an entry's first tile still
waits for its K and V.

| role     | warps | registers | work                                                     |
|----------|-------|-----------|----------------------------------------------------------|
| load     | 4     | the rest  | Q, K, V of each tile, or K and V of an entry, then its Q |
| math (2) | 4     | 240       | of 64 rows: S of the next block or tile, P V, activation |

| barrier             | arrivals    | filled by -> drained by                                  |
|---------------------|-------------|----------------------------------------------------------|
| q.full[role, slot]  | 1 and bytes | TMA load of 64 rows of Q -> that consumer                |
| q.empty[role, slot] | 128 threads | that consumer, the tile's last S is complete -> producer |
| k.full[stage]       | 1 and bytes | TMA load of a block of K -> both consumers               |
| k.empty[stage]      | 256 threads | consumers, S of the block is complete -> producer        |
| v.full[stage]       | 1 and bytes | TMA load of a block of V -> both consumers               |
| v.empty[stage]      | 256 threads | consumers, P V of the block is complete -> producer      |

Where K and V are resident, a consumer releases a block of them in the last tile of its entry alone.
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
    """Launch constants of v6b; resident: K and V of an entry stay in shared memory."""

    BLOCK_N: int = 128
    num_stages: int = 2
    registers: int = 240
    resident: bool = False

    def rows_per_item(self, max_seqlen_q: int) -> int:
        """Query rows that an entry of the list stands for."""
        return max(-(-max_seqlen_q // 128), 1) * 128 if self.resident else 128


def default_config(batch: Batch) -> Config:
    """K and V stay where all keys of a sequence fit in the buffers; beyond that as v6b."""
    if batch.max_seqlen_k <= 256:
        return Config(resident=True)
    return Config(BLOCK_N=64, num_stages=4) if batch.mean_seqlen_k <= 640 else Config()


def work_list_recipe(batch: Batch, config: Config) -> ZigzagRecipe:
    """The work list of these sequences."""
    return query_list_recipe(batch, config.rows_per_item(batch.max_seqlen_q), config.BLOCK_N)


@triton.aggregate
class Options:
    """The constants that the roles share."""

    ACTIVATION: tl.constexpr
    BLOCK_N: tl.constexpr
    BLOCK_D: tl.constexpr
    NUM_STAGES: tl.constexpr
    RESIDENT: tl.constexpr


@triton.jit
def tile_of(len_q, len_k, first, step, rows_per_item, options):
    """Tile `step` of an entry: (first row, blocks of keys, tiles of the entry). At least one block:
    without keys it is zero."""
    steps = tl.cdiv(tl.minimum(len_q - first, rows_per_item), TILE)
    row = first + step * TILE
    return row, tl.maximum(tl.cdiv(len_k, options.BLOCK_N), 1), steps


@triton.jit
def load(q_desc, k_desc, v_desc, q, k, v, list_ptr, rows_per_item, options):
    """The producer: Q, K and V in the order of their use, as far ahead as there are buffers."""
    item = tl.program_id(0)
    num_items = count_items(list_ptr)
    tile, kv = 0, 0
    if item < num_items:
        start_q, _, len_q, start_k, len_k, head, first = entry(list_ptr, item)
        while item < num_items:
            item += tl.num_programs(0)
            following = entry(list_ptr, tl.minimum(item, num_items - 1))
            steps = tl.cdiv(tl.minimum(len_q - first, rows_per_item), TILE)
            for step in tl.range(0, steps):
                row, blocks, _ = tile_of(len_q, len_k, first, step, rows_per_item, options)
                fetch_q(q_desc, q, tile, start_q, len_q, head, row)
                if options.RESIDENT:
                    blocks = tl.where(step == 0, blocks, 0)
                for block in tl.range(0, blocks):
                    key = block * options.BLOCK_N
                    stage = k.acquire(kv + block)
                    fetch_rows(k_desc, k.buffer[stage], k.full[stage], start_k, len_k, head, key)
                    stage = v.acquire(kv + block)
                    fetch_rows(v_desc, v.buffer[stage], v.full[stage], start_k, len_k, head, key)
                kv += blocks
                tile += 1
            start_q, _, len_q, start_k, len_k, head, first = following
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
def release(empty, last, RESIDENT: tl.constexpr):
    """Release a buffer of K or V; where they stay, only after the last tile of the entry."""
    if RESIDENT:
        tlx.barrier_arrive(empty, pred=last)
    else:
        tlx.barrier_arrive(empty)


@triton.jit
def math(
    role: tl.constexpr, q, k, v, out_desc, out, list_ptr, rows_per_item, scale, output_scale,
    options,
):  # fmt: skip
    """A consumer: 64 rows of every tile. `kv` counts blocks of K and V, `tile` tiles of Q."""
    NUM_STAGES: tl.constexpr = options.NUM_STAGES
    DTYPE: tl.constexpr = tlx.dtype_of(out_desc)
    item = tl.program_id(0)
    num_items = count_items(list_ptr)
    step, tile, kv = 0, 0, 0
    if item < num_items:
        _, start_out, len_q, _, len_k, head, first = entry(list_ptr, item)
        row, blocks, steps = tile_of(len_q, len_k, first, step, rows_per_item, options)
        row += role * ROWS
        tlx.barrier_wait(q.full[role * Q_SLOTS], 0)
        tlx.barrier_wait(k.full[0], 0)
        s = tlx.async_dot(q.buffer[role * Q_SLOTS], tlx.local_trans(k.buffer[0]))
        s = tlx.async_dot_wait(0, s)
        release(k.empty[0], steps == 1, options.RESIDENT)
        p = activate(s, scale, options.ACTIVATION, True)
        while item < num_items:
            last = step + 1 == steps
            if options.RESIDENT:
                item += tl.where(last, tl.num_programs(0), 0)
                step = tl.where(last, 0, step + 1)
            else:
                item += tl.num_programs(0)
            # Prefetched: the loop over blocks hides the latency.
            following = entry(list_ptr, tl.minimum(item, num_items - 1))
            q_slot = role * Q_SLOTS + tile % Q_SLOTS
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
                release(k.empty[stage], last, options.RESIDENT)
                p = activate(s, scale, options.ACTIVATION, True)
                acc = tlx.async_dot_wait(0, acc)
                release(v.empty[v_stage], last, options.RESIDENT)
            tlx.barrier_arrive(q.empty[q_slot])

            # The first scores of the next tile, overlapped with the last P V of this one.
            _, next_out, next_len_q, _, len_k, next_head, first = following
            next_row, next_blocks, steps = tile_of(
                next_len_q, len_k, first, step, rows_per_item, options
            )
            next_row += role * ROWS
            tile += 1
            v_stage = (kv + blocks - 1) % NUM_STAGES
            v_phase = ((kv + blocks - 1) // NUM_STAGES) & 1
            if options.RESIDENT:
                kv += tl.where(last, blocks, 0)
            else:
                kv += blocks
            q_slot = q.wait(tile, role * Q_SLOTS)
            stage = k.wait(kv)
            tlx.barrier_wait(v.full[v_stage], v_phase)
            p = p.to(DTYPE)
            s = tlx.async_dot(q.buffer[q_slot], tlx.local_trans(k.buffer[stage]))
            acc = tlx.async_dot(p, v.buffer[v_stage], acc)
            s = tlx.async_dot_wait(1, s)
            release(k.empty[stage], step + 1 == steps, options.RESIDENT)
            p = activate(s, scale, options.ACTIVATION, True)
            acc = tlx.async_dot_wait(0, acc)
            release(v.empty[v_stage], last, options.RESIDENT)
            tlx.async_descriptor_store_wait(0)
            rows = (acc * output_scale).to(DTYPE)
            put_rows(out_desc, out[role], start_out, len_q, head, row, rows)
            start_out, len_q, head, row, blocks = (
                next_out, next_len_q, next_head, next_row, next_blocks
            )  # fmt: skip
        tlx.async_descriptor_store_wait(0)


@triton.jit
def short_kv_kernel(
    q_desc, k_desc, v_desc, out_desc, list_ptr, rows_per_item, scale, output_scale,
    ACTIVATION: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
    NUM_STAGES: tl.constexpr, REGISTERS: tl.constexpr, RESIDENT: tl.constexpr,
):  # fmt: skip
    """output_scale * activation(scale * Q K^T) V for the listed work of this program."""
    DTYPE: tl.constexpr = tlx.dtype_of(q_desc)
    options = Options(ACTIVATION, BLOCK_N, BLOCK_D, NUM_STAGES, RESIDENT)
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
            load(q_desc, k_desc, v_desc, q, k, v, list_ptr, rows_per_item, options)
        with tlx.async_task(num_warps=4, registers=REGISTERS, replicate=MATH_ROLES):
            math(
                tlx.async_task_replica_id(), q, k, v, out_desc, out, list_ptr, rows_per_item,
                scale, output_scale, options,
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
        short_kv_kernel, (programs,), batch.device,
        ragged_descriptor(batch.q, ROWS.value), ragged_descriptor(batch.k, config.BLOCK_N),
        ragged_descriptor(batch.v, config.BLOCK_N), ragged_descriptor(out, ROWS.value),
        entries, config.rows_per_item(batch.max_seqlen_q), batch.scale, batch.output_scale,
        ACTIVATION=batch.names, BLOCK_N=config.BLOCK_N, BLOCK_D=batch.head_dim,
        NUM_STAGES=config.num_stages, REGISTERS=config.registers, RESIDENT=config.resident,
        num_warps=4,
    )  # fmt: skip
    return out
