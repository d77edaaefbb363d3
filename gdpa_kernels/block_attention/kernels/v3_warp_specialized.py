"""v3: a producer copies, consumers compute, and results leave through the slots they came by.

Changes from v2_slab: warp specialization. The producer (role `load`) fills one of `num_stages`
slots with all tiles of a (block, head); consumers (role `math`), a warp group each, take the slots
in turn. A consumer writes each result over a tile that is dead by then, starts its TMA store, and
releases the slot when the store has read it. With another slot to work on, it does that one item
later, overlapped with its MMAs.

Why it should help: bytes are the bound, and they stay v2's. Specialization saves none; it keeps
more of them in flight, since the producer issues the next loads while a consumer computes.

| role       | warps | registers | work                                                     |
|------------|-------|-----------|----------------------------------------------------------|
| load       | 4     | 24        | one thread issues the TMA loads of a slot                |
| math (1-2) | 4     | 240       | all heads of every (second) block: MMAs, softmax, stores |

| barrier      | arrivals    | filled by -> drained by                                 |
|--------------|-------------|---------------------------------------------------------|
| full[stage]  | 1 and bytes | TMA loads of all tiles of an item -> its consumer       |
| empty[stage] | 128 threads | its consumer, the stores have read the slot -> producer |

Results wait in dead tiles: O over Q; P over V, then dV over P; dQ over grad_out; dK over K. With
grouped heads dQ waits over V and dV over grad_out. A head of more than `width` columns comes in
pieces, a slot each; dK and dV of grouped heads add up in registers. A grad_out that TMA cannot read
is copied first.
"""

from dataclasses import dataclass
from math import gcd

import torch
import triton
import triton.language as tl
import triton.language.extra.tlx as tlx

from gdpa_kernels.block_attention.batch import Batch, WorkList
from gdpa_kernels.block_attention.block_list import work_list_recipe
from gdpa_kernels.block_attention.problems import tiles_problem
from gdpa_kernels.block_attention.slots import (
    Tiles,
    backward_slots,
    block_at,
    check_slots,
    count_units,
    fetch,
    forward_slots,
    put,
    release,
    slot_of,
)
from gdpa_kernels.block_attention.tiles import softmax_parts


@dataclass(frozen=True)
class Config:
    """Launch constants: consumers, slots of all of them, heads of a block whose loads are issued
    together, registers of a consumer thread, columns of a tile."""

    math_roles: int = 1
    num_stages: int = 2
    heads_together: int = 1
    registers: int = 240
    width: int = 128

    def __post_init__(self):
        check_slots(self)


def default_config(direction: str, batch: Batch) -> Config:
    """Constants of one consumer; at head_dim 64 and 128 the slots that were fastest in runs without
    a record, at others as many as fit."""
    forward, two = direction == "forward", gcd(batch.num_heads, 2)
    if batch.head_dim > 192:
        return Config(num_stages=4 if forward else 3)
    if batch.head_dim > 128:
        return Config(num_stages=6, width=64)
    if batch.head_dim == 128:
        return Config(num_stages=3, heads_together=two) if forward else Config(num_stages=2)
    if batch.head_dim > 64:
        return Config(num_stages=4 if forward else 3, heads_together=two)
    return Config(num_stages=5, heads_together=two if forward else gcd(batch.num_heads, 4))


def call_problem(batch: Batch) -> str | None:
    """The reason why this rung cannot take a call, beyond `Requires`; None if it can."""
    if batch.rotary is not None:
        return "needs rotary None, got (sin, cos)"
    return tiles_problem(batch, splits=True)


@triton.aggregate
class Options:
    """The constants that the roles share."""

    NUM_HEADS: tl.constexpr
    GROUP: tl.constexpr
    MATH_ROLES: tl.constexpr
    NUM_STAGES: tl.constexpr
    TOGETHER: tl.constexpr
    PIECES: tl.constexpr


@triton.jit
def load(grad_desc, q_desc, k_desc, v_desc, grad, tiles, blocks_ptr, options):
    """The producer: slot after slot, those of TOGETHER heads of a block at a time, tensor by
    tensor. grad_desc None: forward."""
    TILES: tl.constexpr = 3 if grad_desc is None else 4
    WIDTH: tl.constexpr = q_desc.block_shape[4]
    BYTES: tl.constexpr = q_desc.block_shape[3] * WIDTH * 2
    PIECES: tl.constexpr = options.PIECES
    units = count_units(blocks_ptr)
    for first in tl.range(0, units, options.MATH_ROLES):
        for part in tl.range(0, options.NUM_HEADS * PIECES, options.TOGETHER):
            column = part % PIECES * WIDTH
            for unit in tl.range(first, tl.minimum(first + options.MATH_ROLES, units)):
                block = block_at(blocks_ptr, unit)
                for i in tl.static_range(options.TOGETHER):
                    stage, phase = slot_of(unit, part + i, options, PIECES)
                    tlx.barrier_wait(tiles.empty[stage], phase ^ 1)
                    tlx.barrier_expect_bytes(tiles.full[stage], TILES * BYTES)
                for tile in tl.static_range(TILES):
                    for i in tl.static_range(options.TOGETHER):
                        stage, _ = slot_of(unit, part + i, options, PIECES)
                        full = tiles.full[stage]
                        head = (part + i) // PIECES
                        head_k = head // options.GROUP
                        if tile == 0:
                            fetch(q_desc, tiles.q[stage], full, block, head, column)
                        elif tile == 1:
                            fetch(k_desc, tiles.k[stage], full, block, head_k, column)
                        elif tile == 2:
                            fetch(v_desc, tiles.v[stage], full, block, head_k, column)
                        else:
                            fetch(grad_desc, grad[stage], full, block, head, column)


@triton.jit
def math_forward(role: tl.constexpr, tiles, out_desc, blocks_ptr, scale, options):
    """A consumer: all heads of units role, role + MATH_ROLES, ..."""
    DTYPE: tl.constexpr = tlx.dtype_of(out_desc)
    WIDTH: tl.constexpr = out_desc.block_shape[4]
    PIECES: tl.constexpr = options.PIECES
    LATER: tl.constexpr = options.NUM_STAGES > options.MATH_ROLES
    units = count_units(blocks_ptr)
    previous_stage = -1
    for unit in tl.range(role, units, options.MATH_ROLES, num_stages=0):
        block = block_at(blocks_ptr, unit)
        for head in tl.range(0, options.NUM_HEADS, num_stages=0):
            s = None
            for piece in tl.static_range(PIECES):
                stage, phase = slot_of(unit, head * PIECES + piece, options, PIECES)
                tlx.barrier_wait(tiles.full[stage], phase)
                s = tlx.async_dot(tiles.q[stage], tlx.local_trans(tiles.k[stage]), s)
                s = tlx.async_dot_wait(0, s)
                if LATER and piece == 0:
                    release(tiles.empty, previous_stage)
            p, total = softmax_parts(s, scale, block.rows)
            for piece in tl.static_range(PIECES):
                stage, _ = slot_of(unit, head * PIECES + piece, options, PIECES)
                out = tlx.async_dot(p.to(DTYPE), tiles.v[stage])
                if piece > 0:
                    release(tiles.empty, previous_stage)
                out = tlx.async_dot_wait(0, out) * (1 / total)[:, None]
                put(out_desc, tiles.q[stage], block, head, out, piece * WIDTH)
                if not LATER:
                    release(tiles.empty, stage)
                previous_stage = stage
    if LATER:
        release(tiles.empty, previous_stage)


@triton.jit
def math_backward(
    role: tl.constexpr, tiles, dq_desc, dk_desc, dv_desc, grad, p, ds_tile, blocks_ptr, scale,
    options,
):  # fmt: skip
    """A consumer: all heads of units role, role + MATH_ROLES, ..."""
    DTYPE: tl.constexpr = tlx.dtype_of(dq_desc)
    BLOCK: tl.constexpr = dq_desc.block_shape[3]
    WIDTH: tl.constexpr = dq_desc.block_shape[4]
    GROUP: tl.constexpr = options.GROUP
    PIECES: tl.constexpr = options.PIECES
    LATER: tl.constexpr = options.NUM_STAGES > options.MATH_ROLES
    units = count_units(blocks_ptr)
    previous_stage = -1
    for unit in tl.range(role, units, options.MATH_ROLES, num_stages=0):
        block = block_at(blocks_ptr, unit)
        for head_k in tl.range(0, options.NUM_HEADS // GROUP, num_stages=0):
            dk = tl.zeros([BLOCK, WIDTH], tl.float32)
            dv = tl.zeros([BLOCK, WIDTH], tl.float32)
            for member in tl.range(0, GROUP, num_stages=0):
                head = head_k * GROUP + member
                s, dp = None, None
                for piece in tl.static_range(PIECES):
                    stage, phase = slot_of(unit, head * PIECES + piece, options, PIECES)
                    tlx.barrier_wait(tiles.full[stage], phase)
                    s = tlx.async_dot(tiles.q[stage], tlx.local_trans(tiles.k[stage]), s)
                    dp = tlx.async_dot(grad[stage], tlx.local_trans(tiles.v[stage]), dp)
                    if LATER and piece == 0:
                        release(tiles.empty, previous_stage)
                s = tlx.async_dot_wait(1, s)
                weights, total = softmax_parts(s, scale, block.rows)
                weights = weights * (1 / total)[:, None]
                dp = tlx.async_dot_wait(0, dp)
                p_tile = p[stage * (WIDTH // BLOCK)]
                tlx.local_store(p_tile, weights.to(DTYPE))
                ds = weights * (dp - tl.sum(weights * dp, 1)[:, None]) * scale
                tlx.local_store(ds_tile, ds.to(DTYPE))
                tlx.fence("async_shared")
                for piece in tl.static_range(PIECES):
                    stage, _ = slot_of(unit, head * PIECES + piece, options, PIECES)
                    column = piece * WIDTH
                    if piece > 0:
                        dk, dv = tl.zeros_like(dk), tl.zeros_like(dv)
                    dv = tlx.async_dot(tlx.local_trans(p_tile), grad[stage], dv)
                    dq = tlx.async_dot(ds_tile, tiles.k[stage])
                    if piece > 0:
                        release(tiles.empty, previous_stage)
                    dv = tlx.async_dot_wait(1, dv)
                    if GROUP == 1:
                        put(dv_desc, tiles.v[stage], block, head_k, dv, column)
                    dk = tlx.async_dot(tlx.local_trans(ds_tile), tiles.q[stage], dk)
                    dq = tlx.async_dot_wait(1, dq)
                    dead = grad[stage] if GROUP == 1 else tiles.v[stage]
                    put(dq_desc, dead, block, head, dq, column)
                    dk = tlx.async_dot_wait(0, dk)
                    if member == GROUP - 1:
                        if GROUP > 1:
                            put(dv_desc, grad[stage], block, head_k, dv, column)
                        put(dk_desc, tiles.k[stage], block, head_k, dk, column)
                    if not LATER:
                        release(tiles.empty, stage)
                    previous_stage = stage
    if LATER:
        release(tiles.empty, previous_stage)


@triton.jit
def forward_kernel(
    q_desc, k_desc, v_desc, out_desc, blocks_ptr, scale,
    NUM_HEADS: tl.constexpr, GROUP: tl.constexpr, BLOCK: tl.constexpr, WIDTH: tl.constexpr,
    PIECES: tl.constexpr, MATH_ROLES: tl.constexpr, NUM_STAGES: tl.constexpr,
    TOGETHER: tl.constexpr, REGISTERS: tl.constexpr,
):  # fmt: skip
    """softmax(scale Q K^T) V for the blocks of this program."""
    DTYPE: tl.constexpr = tlx.dtype_of(q_desc)
    options = Options(NUM_HEADS, GROUP, MATH_ROLES, NUM_STAGES, TOGETHER, PIECES)
    q = tlx.local_alloc((BLOCK, WIDTH), DTYPE, NUM_STAGES)
    k = tlx.local_alloc((BLOCK, WIDTH), DTYPE, NUM_STAGES)
    v = tlx.local_alloc((BLOCK, WIDTH), DTYPE, NUM_STAGES)
    tiles = Tiles(q, k, v, tlx.alloc_barriers(NUM_STAGES), tlx.alloc_warp_barrier(NUM_STAGES, 4))

    with tlx.async_tasks():
        with tlx.async_task("default"):
            load(None, q_desc, k_desc, v_desc, None, tiles, blocks_ptr, options)
        with tlx.async_task(num_warps=4, registers=REGISTERS, replicate=MATH_ROLES):
            math_forward(tlx.async_task_replica_id(), tiles, out_desc, blocks_ptr, scale, options)


@triton.jit
def backward_kernel(
    grad_desc, q_desc, k_desc, v_desc, dq_desc, dk_desc, dv_desc, blocks_ptr, scale,
    NUM_HEADS_K: tl.constexpr, GROUP: tl.constexpr, BLOCK: tl.constexpr, WIDTH: tl.constexpr,
    PIECES: tl.constexpr, MATH_ROLES: tl.constexpr, NUM_STAGES: tl.constexpr,
    TOGETHER: tl.constexpr, REGISTERS: tl.constexpr,
):  # fmt: skip
    """dq, dk and dv for the blocks of this program."""
    DTYPE: tl.constexpr = tlx.dtype_of(q_desc)
    options = Options(NUM_HEADS_K * GROUP, GROUP, MATH_ROLES, NUM_STAGES, TOGETHER, PIECES)
    grad = tlx.local_alloc((BLOCK, WIDTH), DTYPE, NUM_STAGES)
    q = tlx.local_alloc((BLOCK, WIDTH), DTYPE, NUM_STAGES)
    k = tlx.local_alloc((BLOCK, WIDTH), DTYPE, NUM_STAGES)
    v = tlx.local_alloc((BLOCK, WIDTH), DTYPE, NUM_STAGES)
    p = tlx.local_alloc((BLOCK, BLOCK), DTYPE, NUM_STAGES * (WIDTH // BLOCK), reuse=v)
    ds = tlx.local_alloc((BLOCK, BLOCK), DTYPE, MATH_ROLES)
    tiles = Tiles(q, k, v, tlx.alloc_barriers(NUM_STAGES), tlx.alloc_warp_barrier(NUM_STAGES, 4))

    with tlx.async_tasks():
        with tlx.async_task("default"):
            load(grad_desc, q_desc, k_desc, v_desc, grad, tiles, blocks_ptr, options)
        with tlx.async_task(num_warps=4, registers=REGISTERS, replicate=MATH_ROLES):
            role: tl.constexpr = tlx.async_task_replica_id()
            math_backward(
                role, tiles, dq_desc, dk_desc, dv_desc, grad, p, ds[role], blocks_ptr, scale,
                options,
            )  # fmt: skip


def forward(
    batch: Batch, *, config: Config | None = None, work_list: WorkList | None = None
) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]:
    """The output, `[total, num_heads_q, head_dim]`, and what backward needs besides q, k, v:
    nothing."""
    config = config or default_config("forward", batch)
    (blocks,) = work_list or work_list_recipe(batch, config).make(*batch.offsets)
    return forward_slots(forward_kernel, batch, config, blocks)


def backward(
    grad_out: torch.Tensor, batch: Batch, saved: tuple[torch.Tensor, ...] = (), *,
    config: Config | None = None, work_list: WorkList | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    """(dq, dk, dv), shaped as q, k, v and contiguous."""
    config = config or default_config("backward", batch)
    (blocks,) = work_list or work_list_recipe(batch, config).make(*batch.offsets)
    return backward_slots(backward_kernel, grad_out, batch, config, blocks)
