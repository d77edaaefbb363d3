"""v7: two scores in one instruction.

Changes from v6_short_kv: GELU and SiLU of bf16 inputs are computed in packed bf16, two scores at a
time, and without the factor scale / 2, which goes into the output. A score costs 3 instructions and
one tanh where v6 spends 5.5 and one tanh. The last of them, p = x + x t, waits until no MMA is in
flight, where v6 converts P; until then a consumer holds x and t, as many registers as P in fp32.
Up to head_dim 64 a program has four consumers.

Why it should help: an instruction costs an issue slot, and at the power limit energy that the
tensor cores then lack.
Why it may not: sm_90 has no packed tanh, a pair takes two; and the result is less accurate, about
as PyTorch's in bf16, which rounds the scores in the same way. Other activations and fp16 are
computed as in v6.

| role     | warps | registers | work                                                     |
|----------|-------|-----------|----------------------------------------------------------|
| load     | 4     | the rest  | Q, K, V of each tile, or K and V of an entry, then its Q |
| math (2) | 4     | 240       | of 64 rows: S of block j + 1, P V of block j, activation |
| math (4) | 4     | 112       | the same, up to head_dim 64                              |

| barrier             | arrivals           | filled by -> drained by                              |
|---------------------|--------------------|------------------------------------------------------|
| q.full[role, slot]  | 1 and bytes        | TMA load of 64 rows of Q -> that consumer            |
| q.empty[role, slot] | 128 threads        | that consumer, the tile's last S is complete -> load |
| k.full[stage]       | 1 and bytes        | TMA load of a block of K -> all consumers            |
| k.empty[stage]      | 256 or 512 threads | consumers, S of the block is complete -> load        |
| v.full[stage]       | 1 and bytes        | TMA load of a block of V -> all consumers            |
| v.empty[stage]      | 256 or 512 threads | consumers, P V of the block is complete -> load      |

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
from gdpa_kernels.device.rows import fetch_rows, put_out
from gdpa_kernels.gdpa.batch import Batch, Schedule
from gdpa_kernels.gdpa.device.activations import (
    activate_per_head,
    foldable,
    multiply_add_pairs,
    tanh_of_pairs,
)
from gdpa_kernels.gdpa.device.masks import key_range, mask_probabilities
from gdpa_kernels.gdpa.device.sums import add_up
from gdpa_kernels.gdpa.device.work_list import WorkList, count_items, entry, list_of_queries

ROWS = tl.constexpr(64)
Q_SLOTS = tl.constexpr(2)


@dataclass(frozen=True)
class Config:
    """Launch constants.

    resident: K and V of an entry stay in shared memory. math_roles: consumers; a tile has 64 rows
    for each. registers: of a consumer thread. pairs: packed arithmetic where
    `activations.foldable`.
    """

    BLOCK_N: int = 128
    num_stages: int = 2
    registers: int = 240
    resident: bool = False
    math_roles: int = 2
    pairs: bool = True

    def rows_per_item(self, max_seqlen_q: int) -> int:
        """Query rows that an entry of the list stands for."""
        tile = self.math_roles * 64
        return max(-(-max_seqlen_q // tile), 1) * tile if self.resident else tile


def default_config(batch: Batch) -> Config:
    """K and V stay where they fit, as in v6. Up to head_dim 64 the registers suffice for four
    consumers, which hide more of each other's latency. A mask takes registers too: blocks of 64
    keys, of which it also skips more."""
    if batch.masked:
        return Config(BLOCK_N=64, num_stages=4)
    if batch.head_dim <= 64:
        return Config(BLOCK_N=64, num_stages=4, registers=112, math_roles=4)
    if batch.max_seqlen_k <= 256:
        return Config(resident=True)
    return Config(BLOCK_N=64, num_stages=4) if batch.mean_seqlen_k <= 640 else Config()


def plan_schedule(batch: Batch, config: Config) -> WorkList:
    """The work list of these sequences."""
    rows = config.rows_per_item(batch.max_seqlen_q)
    return list_of_queries(batch, rows, config.BLOCK_N)


@triton.aggregate
class Options:
    """The constants that the roles share."""

    GROUP: tl.constexpr
    ACTIVATION: tl.constexpr
    PAIRS: tl.constexpr
    CAUSAL: tl.constexpr
    WINDOW: tl.constexpr
    BLOCK_N: tl.constexpr
    BLOCK_D: tl.constexpr
    NUM_STAGES: tl.constexpr
    RESIDENT: tl.constexpr
    MATH_ROLES: tl.constexpr
    DTYPE: tl.constexpr


@triton.jit
def tile_of(len_q, len_k, first, step, rows_per_item, options):
    """Tile `step` of an entry: (first row, first key, blocks of keys, tiles of the entry).

    At least one block: prologue and epilogue need one. Without keys it is zero or masked.
    """
    TILE: tl.constexpr = options.MATH_ROLES * ROWS
    steps = tl.cdiv(tl.minimum(len_q - first, rows_per_item), TILE)
    row = first + step * TILE
    start, end = 0, len_k
    if not options.RESIDENT:
        start, end = key_range(row, len_k, TILE, options.BLOCK_N, options.CAUSAL, options.WINDOW)
    return row, start, tl.maximum(tl.cdiv(end - start, options.BLOCK_N), 1), steps


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
            steps = tl.cdiv(tl.minimum(len_q - first, rows_per_item), options.MATH_ROLES * ROWS)
            for step in tl.range(0, steps):
                row, start, blocks, _ = tile_of(len_q, len_k, first, step, rows_per_item, options)
                fetch_q(q_desc, q, tile, start_q, len_q, head, row, options)
                if options.RESIDENT:
                    blocks = tl.where(step == 0, blocks, 0)
                kv_head = head // options.GROUP
                for block in tl.range(0, blocks):
                    key = start + block * options.BLOCK_N
                    stage = k.acquire(kv + block)
                    fetch_rows(k_desc, k.buffer[stage], k.full[stage], start_k, len_k, kv_head, key)
                    stage = v.acquire(kv + block)
                    fetch_rows(v_desc, v.buffer[stage], v.full[stage], start_k, len_k, kv_head, key)
                kv += blocks
                tile += 1
            start_q, _, len_q, start_k, len_k, head, first = following
    # The scores of a dummy tile, overlapped with the last P V.
    if tile > 0:
        fetch_q(q_desc, q, tile, 0, 0, 0, 0, options)
        stage = k.acquire(kv)
        fetch_rows(k_desc, k.buffer[stage], k.full[stage], 0, 0, 0, 0)


@triton.jit
def fetch_q(q_desc, q, tile, start, length, head, row, options):
    """The rows of the tile-th tile for all consumers."""
    for role in tl.static_range(options.MATH_ROLES):
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
def activation_prologue(s, scale, head, first_row, first_key, options):
    """(x, t), from which `activation_epilogue` computes activation(scale * s); masked pairs are
    zero.

    GELU and SiLU of 0 are 0: masking the scores is as good, and leaves the pairs of bf16 whole.
    """
    if options.PAIRS:
        s = mask_probabilities(s, first_row, first_key, options.CAUSAL, options.WINDOW)
        x, t = tanh_of_pairs(s, scale, options.ACTIVATION)
    else:
        x, t = activate_per_head(s, scale, head, options.ACTIVATION, True), 0
        x = mask_probabilities(x, first_row, first_key, options.CAUSAL, options.WINDOW)
    return x, t


@triton.jit
def activation_epilogue(x, t, DTYPE: tl.constexpr, PAIRS: tl.constexpr):
    """The probabilities, in registers that an MMA reads: only when none is in flight."""
    return multiply_add_pairs(x, t, x) if PAIRS else x.to(DTYPE)


@triton.jit
def math(
    role: tl.constexpr, q, k, v, out_desc, out, list_ptr, rows_per_item, scale, output_scale,
    options,
):  # fmt: skip
    """A consumer: 64 rows of every tile. `kv` counts blocks of K and V, `tile` tiles of Q."""
    NUM_STAGES: tl.constexpr = options.NUM_STAGES
    DTYPE: tl.constexpr = options.DTYPE
    OUT: tl.constexpr = tlx.dtype_of(out_desc)
    item = tl.program_id(0)
    num_items = count_items(list_ptr)
    step, tile, kv = 0, 0, 0
    if item < num_items:
        _, start_out, len_q, _, len_k, head, first = entry(list_ptr, item)
        row, start, blocks, steps = tile_of(len_q, len_k, first, step, rows_per_item, options)
        row += role * ROWS
        tlx.barrier_wait(q.full[role * Q_SLOTS], 0)
        tlx.barrier_wait(k.full[0], 0)
        s = tlx.async_dot(q.buffer[role * Q_SLOTS], tlx.local_trans(k.buffer[0]))
        s = tlx.async_dot_wait(0, s)
        release(k.empty[0], steps == 1, options.RESIDENT)
        x, t = activation_prologue(s, scale, head, row, start, options)
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
                p = activation_epilogue(x, t, DTYPE, options.PAIRS)
                s = tlx.async_dot(q.buffer[q_slot], tlx.local_trans(k.buffer[stage]))
                acc = tlx.async_dot(p, v.buffer[v_stage], acc)
                s = tlx.async_dot_wait(1, s)
                release(k.empty[stage], last, options.RESIDENT)
                key = start + block * options.BLOCK_N
                x, t = activation_prologue(s, scale, head, row, key, options)
                acc = tlx.async_dot_wait(0, acc)
                release(v.empty[v_stage], last, options.RESIDENT)
            tlx.barrier_arrive(q.empty[q_slot])

            # The first scores of the next tile, overlapped with the last P V of this one.
            _, next_out, next_len_q, _, len_k, next_head, first = following
            next_row, start, next_blocks, steps = tile_of(
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
            p = activation_epilogue(x, t, DTYPE, options.PAIRS)
            s = tlx.async_dot(q.buffer[q_slot], tlx.local_trans(k.buffer[stage]))
            acc = tlx.async_dot(p, v.buffer[v_stage], acc)
            s = tlx.async_dot_wait(1, s)
            release(k.empty[stage], step + 1 == steps, options.RESIDENT)
            x, t = activation_prologue(s, scale, next_head, next_row, start, options)
            acc = tlx.async_dot_wait(0, acc)
            release(v.empty[v_stage], last, options.RESIDENT)
            rows = (acc * output_scale).to(OUT)
            put_out(out_desc, out[role], start_out, len_q, head, row, rows)
            start_out, len_q, head, row, blocks = (
                next_out, next_len_q, next_head, next_row, next_blocks
            )  # fmt: skip
        tlx.async_descriptor_store_wait(0)


@triton.jit
def packed_kernel(
    q_desc, k_desc, v_desc, out_desc, list_ptr, rows_per_item, scale, output_scale,
    GROUP: tl.constexpr, ACTIVATION: tl.constexpr, PAIRS: tl.constexpr, CAUSAL: tl.constexpr,
    WINDOW: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, NUM_STAGES: tl.constexpr,
    REGISTERS: tl.constexpr, RESIDENT: tl.constexpr, MATH_ROLES: tl.constexpr,
):  # fmt: skip
    """output_scale * activation(scale * Q K^T) V for the listed work of this program."""
    DTYPE: tl.constexpr = tlx.dtype_of(q_desc)
    options = Options(
        GROUP, ACTIVATION, PAIRS, CAUSAL, WINDOW, BLOCK_N, BLOCK_D, NUM_STAGES, RESIDENT,
        MATH_ROLES, DTYPE,
    )  # fmt: skip
    q = tlx.local_alloc((ROWS, BLOCK_D), DTYPE, MATH_ROLES * Q_SLOTS)
    k = tlx.local_alloc((BLOCK_N, BLOCK_D), DTYPE, NUM_STAGES)
    v = tlx.local_alloc((BLOCK_N, BLOCK_D), DTYPE, NUM_STAGES)
    out = tlx.local_alloc((ROWS, out_desc.block_shape[4]), tlx.dtype_of(out_desc), MATH_ROLES)
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
    batch: Batch, *, config: Config | None = None, schedule: Schedule | None = None
) -> torch.Tensor:
    """The output, `[total_q, num_heads, head_dim]`.

    `schedule` is that of `plan_schedule` for the same sequences and config; None makes it here.
    """
    out = batch.new_out()
    config = config or default_config(batch)
    (entries,) = schedule or plan_schedule(batch, config).make(*batch.offsets)
    pairs = config.pairs and not batch.precise and foldable(batch.activation, batch.dtype)
    programs = min(multiprocessors(batch.device), len(entries) - 1)
    q_desc = ragged_descriptor(batch.q, ROWS.value, min_width=32)
    kernel_out = out
    if batch.add_to is not None:
        kernel_out = out.new_empty(1, *out.shape, dtype=torch.float32)
    width = q_desc.block_shape[-1]
    stored = min(width, 256 // kernel_out.element_size())
    launch(
        packed_kernel, (programs,), batch.device,
        q_desc,
        ragged_descriptor(batch.k, config.BLOCK_N, min_width=32),
        ragged_descriptor(batch.v, config.BLOCK_N, min_width=32),
        ragged_descriptor(kernel_out.view(out.shape), ROWS.value, width=stored),
        entries, config.rows_per_item(batch.max_seqlen_q), batch.scale,
        batch.output_scale * batch.scale / 2 if pairs else batch.output_scale,
        GROUP=batch.group, ACTIVATION=batch.names, PAIRS=pairs,
        CAUSAL=batch.causal, WINDOW=batch.window,
        BLOCK_N=config.BLOCK_N, BLOCK_D=width, NUM_STAGES=config.num_stages,
        REGISTERS=config.registers, RESIDENT=config.resident,
        MATH_ROLES=config.math_roles, num_warps=4,
    )  # fmt: skip
    if kernel_out is not out:
        add_up(kernel_out, batch.add_to, out)
    return out
