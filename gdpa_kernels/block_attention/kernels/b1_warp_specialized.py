"""b1: the accumulators are in tensor memory, and every step of an item has a role of its own.

Changes from v4_rotary: sm_100. One thread issues all MMAs; roles work on different items at a time.
Without rotary there is no role `rotate`. dK and dV of grouped heads are summed in tensor memory.

Why it should help: bytes are the bound, so loads must always be in flight. With tl.dot accumulators
are in tensor memory too, and half as many programs of v1_one_tile share an SM as on Hopper.

| role    | warps | registers | work                                                        |
|---------|-------|-----------|-------------------------------------------------------------|
| load    | 1     | 48        | TMA loads of a slot, and of sin and cos of a block          |
| mma     | 1     | 48        | S (dP) of an item, after softmax its O (dV, dQ, dK)         |
| rotate  | 4     | 152       | rotary of q and k (and v), in place                         |
| softmax | 4     | 128       | P over K (P and dS over V), from tensor memory              |
| output  | 4     | the rest  | O, or dQ, dK, dV rotated back, over the tiles of the inputs |
| store   | 1     | 48        | their TMA stores; releases the slot                         |

| barrier             | arrivals     | filled by -> drained by                                     |
|---------------------|--------------|-------------------------------------------------------------|
| tiles.full[stage]   | 1 and bytes  | load, all tiles of an item -> rotate; without rotary mma    |
| tiles.empty[stage]  | 32 threads   | store, the stores have read the slot -> load                |
| ready[stage]        | 128 threads  | rotate, the tiles are rotated -> mma                        |
| out_full[stage]     | 128 threads  | output, the results are in the slot -> store                |
| sin_cos.full[slot]  | 1 and bytes  | load, sin and cos of a block -> rotate; backward output too |
| sin_cos.empty[slot] | forward 128  | rotate, they are in registers -> load                       |
|                     | backward 256 | rotate and output, they are in registers -> load            |
| s_full[2]           | 1 (commit)   | mma, S; backward S and dP -> softmax                        |
| p_full[2]           | 128 threads  | softmax, P (and dS) is stored, S was read -> mma            |
| o.full[2]           | 1 (commit)   | mma, O; backward (`results`) dQ, dK and dV -> output        |
| o.empty[2]          | 128 threads  | output, these are in registers -> mma                       |

Without rotary `ready` is tiles.full. Tensor memory, 64 rows each: 2 S and 2 O; backward 2 each of
S, dP, dQ, dK, dV.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
import triton.language.extra.tlx as tlx

from gdpa_kernels.block_attention.batch import Batch, WorkList
from gdpa_kernels.block_attention.block_list import work_list_recipe
from gdpa_kernels.block_attention.problems import BLOCK, sin_cos_problem, tiles_problem
from gdpa_kernels.block_attention.slots import (
    SinCos,
    Tiles,
    block_at,
    count_units,
    fetch,
)
from gdpa_kernels.block_attention.tiles import softmax_parts
from gdpa_kernels.calling.launch import launch, multiprocessors
from gdpa_kernels.device.groups import Ring
from gdpa_kernels.device.ragged import BOUND, ragged_descriptor, tma_readable
from gdpa_kernels.device.rotation import rotate, rotate_back

ACCUMULATORS = tl.constexpr(2)  # of each kind
SHARED = 232_448 - 1024
"""Bytes of shared memory of a program, without those of barriers."""


@dataclass(frozen=True)
class Config:
    """Launch constants: slots of tiles, slots of sin and cos, registers of a thread of `rotate` and
    of `softmax`."""

    num_stages: int = 4
    num_turns: int = 1
    turn_registers: int = 152
    softmax_registers: int = 128


def default_config(direction: str, batch: Batch) -> Config:
    """Constants with as many slots as shared memory holds."""
    tile = BLOCK * batch.head_dim * 2
    left = SHARED
    if batch.rotary is not None:
        left -= tile // 4 * sum(turns.itemsize for turns in batch.rotary)
    if direction == "backward" and batch.head_dim == BLOCK:
        left -= ACCUMULATORS.value * tile  # dS, where V's tile has no room for it
    tiles = 3 if direction == "forward" else 4
    return Config(num_stages=min(left // (tiles * tile), 8))


def call_problem(batch: Batch) -> str | None:
    """The reason why this rung cannot take a call, beyond `Requires`; None if it can."""
    return tiles_problem(batch) or (sin_cos_problem(batch.rotary) if batch.rotary else None)


@triton.aggregate
class Options:
    """The constants that the roles share. PIECES: score tiles that fit a tile of V."""

    NUM_HEADS: tl.constexpr
    GROUP: tl.constexpr
    NUM_STAGES: tl.constexpr
    NUM_TURNS: tl.constexpr
    PIECES: tl.constexpr
    ROTATE_V: tl.constexpr
    DTYPE: tl.constexpr


@triton.aggregate
class Results:
    """Accumulators of dQ of an item, dK and dV of a group of them.

    full[i] completes when what an item adds has been computed, empty[i] when it has been read.
    """

    q: tlx.buffered_tensor
    k: tlx.buffered_tensor
    v: tlx.buffered_tensor
    full: tlx.mbarrier
    empty: tlx.mbarrier


@triton.jit
def ring_slot(count, SIZE: tl.constexpr):
    """(index, phase) of use `count` of a ring of SIZE."""
    return count % SIZE, (count // SIZE) & 1


@triton.jit
def load(
    grad_desc, q_desc, k_desc, v_desc, sin_desc, cos_desc, grad, tiles, sin_cos, blocks_ptr, options
):
    """The producer: slot after slot, all heads of a block. grad_desc None: forward; sin_desc None:
    no rotary."""
    TILES: tl.constexpr = 3 if grad_desc is None else 4
    BYTES: tl.constexpr = q_desc.block_shape[3] * q_desc.block_shape[4] * 2
    for unit in tl.range(0, count_units(blocks_ptr)):
        block = block_at(blocks_ptr, unit)
        for head in tl.range(0, options.NUM_HEADS):
            stage, phase = ring_slot(unit * options.NUM_HEADS + head, options.NUM_STAGES)
            head_k = head // options.GROUP
            tlx.barrier_wait(tiles.empty[stage], phase ^ 1)
            tlx.barrier_expect_bytes(tiles.full[stage], TILES * BYTES)
            fetch(q_desc, tiles.q[stage], tiles.full[stage], block, head)
            fetch(k_desc, tiles.k[stage], tiles.full[stage], block, head_k)
            if sin_desc is not None:  # noqa: SIM102, known when compiled
                if head == 0:
                    fetch_sin_cos(sin_desc, cos_desc, sin_cos, block, unit, options)
            fetch(v_desc, tiles.v[stage], tiles.full[stage], block, head_k)
            if grad_desc is not None:
                fetch(grad_desc, grad[stage], tiles.full[stage], block, head)


@triton.jit
def fetch_sin_cos(sin_desc, cos_desc, sin_cos, block, unit, options):
    """sin and cos of a block."""
    BYTES: tl.constexpr = (
        sin_desc.block_shape[3] * sin_desc.block_shape[4]
        * (tlx.size_of(tlx.dtype_of(sin_desc)) + tlx.size_of(tlx.dtype_of(cos_desc)))
    )  # fmt: skip
    slot, phase = ring_slot(unit, options.NUM_TURNS)
    tlx.barrier_wait(sin_cos.empty[slot], phase ^ 1)
    tlx.barrier_expect_bytes(sin_cos.full[slot], BYTES)
    fetch(sin_desc, sin_cos.sin[slot], sin_cos.full[slot], block, 0)
    fetch(cos_desc, sin_cos.cos[slot], sin_cos.full[slot], block, 0)


@triton.jit
def load_sin_cos(sin_cos, unit, options):
    """sin and cos of a block, fp32, in registers; their slot is released."""
    slot, phase = ring_slot(unit, options.NUM_TURNS)
    tlx.barrier_wait(sin_cos.full[slot], phase)
    sin, cos = tlx.local_load(sin_cos.sin[slot]), tlx.local_load(sin_cos.cos[slot])
    tlx.barrier_arrive(sin_cos.empty[slot])
    return sin.to(tl.float32), cos.to(tl.float32)


@triton.jit
def rotate_tile(buffer, sin, cos):
    """Apply rotary to a tile in place; rounded to its own dtype."""
    x = tlx.local_load(buffer)
    tlx.local_store(buffer, rotate(x.to(tl.float32), sin, cos).to(x.dtype))


@triton.jit
def rotate_role(tiles, sin_cos, ready, blocks_ptr, options):
    """The rotary role."""
    for unit in tl.range(0, count_units(blocks_ptr)):
        sin, cos = load_sin_cos(sin_cos, unit, options)
        for head in tl.range(0, options.NUM_HEADS):
            stage, phase = ring_slot(unit * options.NUM_HEADS + head, options.NUM_STAGES)
            tlx.barrier_wait(tiles.full[stage], phase)
            rotate_tile(tiles.q[stage], sin, cos)
            rotate_tile(tiles.k[stage], sin, cos)
            if options.ROTATE_V:
                rotate_tile(tiles.v[stage], sin, cos)
            tlx.fence("async_shared")
            tlx.barrier_arrive(ready[stage])


@triton.jit
def mma_forward(tiles, ready, s, p, o, s_full, p_full, blocks_ptr, options):
    """S of an item, then its O. num_stages 0: else the compiler pipelines the MMAs too, and waits
    for each by a barrier of its own."""
    for item in tl.range(0, count_units(blocks_ptr) * options.NUM_HEADS, num_stages=0):
        stage, phase = ring_slot(item, options.NUM_STAGES)
        tlx.barrier_wait(ready[stage], phase)
        slot, phase = ring_slot(item, ACCUMULATORS)
        tlx.async_dot(
            tiles.q[stage], tlx.local_trans(tiles.k[stage]), s[slot], use_acc=False,
            mBarriers=[s_full[slot]],
        )  # fmt: skip
        tlx.barrier_wait(p_full[slot], phase)
        tlx.barrier_wait(o.empty[slot], phase ^ 1)
        tlx.async_dot(
            p[stage * options.PIECES], tiles.v[stage], o.buffer[slot], use_acc=False,
            mBarriers=[o.full[slot]],
        )  # fmt: skip


@triton.jit
def softmax_forward(s, p, s_full, p_full, blocks_ptr, scale, options):
    """P, over K."""
    for unit in tl.range(0, count_units(blocks_ptr)):
        block = block_at(blocks_ptr, unit)
        for head in tl.range(0, options.NUM_HEADS):
            item = unit * options.NUM_HEADS + head
            stage, _ = ring_slot(item, options.NUM_STAGES)
            slot, phase = ring_slot(item, ACCUMULATORS)
            tlx.barrier_wait(s_full[slot], phase)
            weights, total = softmax_parts(tlx.local_load(s[slot]), scale, block.rows)
            weights = weights * (1 / total)[:, None]
            tlx.local_store(p[stage * options.PIECES], weights.to(options.DTYPE))
            tlx.fence("async_shared")
            tlx.barrier_arrive(p_full[slot])


@triton.jit
def output_forward(tiles, o, out_full, blocks_ptr, options):
    """O, over Q."""
    for item in tl.range(0, count_units(blocks_ptr) * options.NUM_HEADS, num_stages=0):
        stage, _ = ring_slot(item, options.NUM_STAGES)
        slot, phase = ring_slot(item, ACCUMULATORS)
        tlx.barrier_wait(o.full[slot], phase)
        out = tlx.local_load(o.buffer[slot])
        tlx.barrier_arrive(o.empty[slot])
        tlx.local_store(tiles.q[stage], out.to(options.DTYPE))
        tlx.fence("async_shared")
        tlx.barrier_arrive(out_full[stage])


@triton.jit
def send(desc, buffer, block, head):
    """Start the TMA store of a tile; rows beyond the block are dropped."""
    coords = [BOUND, block.first_row + block.rows, head, BOUND - block.rows, 0]
    tlx.async_descriptor_store(desc, buffer, coords)


@triton.jit
def store(q_desc, k_desc, v_desc, tiles, out_full, blocks_ptr, options):
    """The stores of what is in a slot; k_desc None: forward."""
    for unit in tl.range(0, count_units(blocks_ptr)):
        block = block_at(blocks_ptr, unit)
        for head in tl.range(0, options.NUM_HEADS):
            stage, phase = ring_slot(unit * options.NUM_HEADS + head, options.NUM_STAGES)
            tlx.barrier_wait(out_full[stage], phase)
            send(q_desc, tiles.q[stage], block, head)
            if k_desc is not None:  # noqa: SIM102, known when compiled
                if head % options.GROUP == options.GROUP - 1:
                    send(k_desc, tiles.k[stage], block, head // options.GROUP)
                    send(v_desc, tiles.v[stage], block, head // options.GROUP)
            tlx.async_descriptor_store_wait(0)
            tlx.barrier_arrive(tiles.empty[stage])


@triton.jit
def mma_backward(tiles, grad, ready, s, dp, p, ds, results, s_full, p_full, blocks_ptr, options):
    """S and dP of an item, then its dV, dQ and dK."""
    for item in tl.range(0, count_units(blocks_ptr) * options.NUM_HEADS, num_stages=0):
        stage, phase = ring_slot(item, options.NUM_STAGES)
        tlx.barrier_wait(ready[stage], phase)
        slot, phase = ring_slot(item, ACCUMULATORS)
        tlx.async_dot(
            tiles.q[stage], tlx.local_trans(tiles.k[stage]), s[slot], use_acc=False,
            force_async=True,
        )  # fmt: skip
        tlx.async_dot(
            grad[stage], tlx.local_trans(tiles.v[stage]), dp[slot], use_acc=False,
            mBarriers=[s_full[slot]],
        )  # fmt: skip
        sums, _ = ring_slot(item // options.GROUP, ACCUMULATORS)
        add = item % options.GROUP > 0
        p_tile = p[stage * options.PIECES]
        ds_tile = ds_of(ds, item, options)
        tlx.barrier_wait(p_full[slot], phase)
        tlx.barrier_wait(results.empty[slot], phase ^ 1)
        tlx.async_dot(
            tlx.local_trans(p_tile), grad[stage], results.v[sums], use_acc=add, force_async=True
        )
        tlx.async_dot(ds_tile, tiles.k[stage], results.q[slot], use_acc=False, force_async=True)
        tlx.async_dot(
            tlx.local_trans(ds_tile), tiles.q[stage], results.k[sums], use_acc=add,
            mBarriers=[results.full[slot]],
        )  # fmt: skip


@triton.jit
def ds_of(ds, item, options):
    """The tile of dS of an item: the second half of V's, if V's is that wide."""
    if options.PIECES == 1:
        index = item % ACCUMULATORS
    else:
        index = item % options.NUM_STAGES * options.PIECES + 1
    return ds[index]


@triton.jit
def softmax_backward(s, dp, p, ds, s_full, p_full, blocks_ptr, scale, options):
    """P and dS, over V."""
    for unit in tl.range(0, count_units(blocks_ptr)):
        block = block_at(blocks_ptr, unit)
        for head in tl.range(0, options.NUM_HEADS):
            item = unit * options.NUM_HEADS + head
            stage, _ = ring_slot(item, options.NUM_STAGES)
            slot, phase = ring_slot(item, ACCUMULATORS)
            tlx.barrier_wait(s_full[slot], phase)
            weights, total = softmax_parts(tlx.local_load(s[slot]), scale, block.rows)
            weights = weights * (1 / total)[:, None]
            tlx.local_store(p[stage * options.PIECES], weights.to(options.DTYPE))
            grads = tlx.local_load(dp[slot])
            grads = weights * (grads - tl.sum(weights * grads, 1)[:, None]) * scale
            tlx.local_store(ds_of(ds, item, options), grads.to(options.DTYPE))
            tlx.fence("async_shared")
            tlx.barrier_arrive(p_full[slot])


@triton.jit
def store_rotated(buffer, x, sin, cos, DTYPE: tl.constexpr, ROTATE: tl.constexpr):
    """A gradient x, fp32, rotated back if ROTATE, to shared memory."""
    if ROTATE:
        x = rotate_back(x, sin, cos)
    tlx.local_store(buffer, x.to(DTYPE))


@triton.jit
def output_backward(tiles, sin_cos, results, out_full, blocks_ptr, options, ROTARY: tl.constexpr):
    """dQ over Q; after the last head of a group dK over K and dV over V."""
    DTYPE: tl.constexpr = options.DTYPE
    for unit in tl.range(0, count_units(blocks_ptr)):
        sin, cos = 0.0, 0.0
        if ROTARY:
            sin, cos = load_sin_cos(sin_cos, unit, options)
        for head in tl.range(0, options.NUM_HEADS):
            item = unit * options.NUM_HEADS + head
            stage, _ = ring_slot(item, options.NUM_STAGES)
            slot, phase = ring_slot(item, ACCUMULATORS)
            sums, _ = ring_slot(item // options.GROUP, ACCUMULATORS)
            tlx.barrier_wait(results.full[slot], phase)
            dq = tlx.local_load(results.q[slot])
            store_rotated(tiles.q[stage], dq, sin, cos, DTYPE, ROTARY)
            if head % options.GROUP == options.GROUP - 1:
                dk = tlx.local_load(results.k[sums])
                store_rotated(tiles.k[stage], dk, sin, cos, DTYPE, ROTARY)
                dv = tlx.local_load(results.v[sums])
                store_rotated(tiles.v[stage], dv, sin, cos, DTYPE, options.ROTATE_V)
            tlx.barrier_arrive(results.empty[slot])
            tlx.fence("async_shared")
            tlx.barrier_arrive(out_full[stage])


@triton.jit
def forward_kernel(
    q_desc, k_desc, v_desc, out_desc, sin_desc, cos_desc, blocks_ptr, scale,
    NUM_HEADS: tl.constexpr, GROUP: tl.constexpr, ROTATE_V: tl.constexpr, BLOCK: tl.constexpr,
    HEAD_DIM: tl.constexpr, NUM_STAGES: tl.constexpr, NUM_TURNS: tl.constexpr,
    TURN_REGISTERS: tl.constexpr, SOFTMAX_REGISTERS: tl.constexpr,
):  # fmt: skip
    """softmax(scale Q K^T) V for the blocks of this program."""
    DTYPE: tl.constexpr = tlx.dtype_of(q_desc)
    ROTARY: tl.constexpr = sin_desc is not None
    PIECES: tl.constexpr = HEAD_DIM // BLOCK
    options = Options(NUM_HEADS, GROUP, NUM_STAGES, NUM_TURNS, PIECES, ROTATE_V, DTYPE)
    q = tlx.local_alloc((BLOCK, HEAD_DIM), DTYPE, NUM_STAGES)
    k = tlx.local_alloc((BLOCK, HEAD_DIM), DTYPE, NUM_STAGES)
    v = tlx.local_alloc((BLOCK, HEAD_DIM), DTYPE, NUM_STAGES)
    p = tlx.local_alloc((BLOCK, BLOCK), DTYPE, NUM_STAGES * PIECES, reuse=k)
    s = tlx.local_alloc((BLOCK, BLOCK), tl.float32, ACCUMULATORS, tlx.storage_kind.tmem)
    o = tlx.local_alloc((BLOCK, HEAD_DIM), tl.float32, ACCUMULATORS, tlx.storage_kind.tmem)
    full = tlx.alloc_barriers(NUM_STAGES)
    empty = tlx.alloc_warp_barrier(NUM_STAGES, 1)
    out_full = tlx.alloc_warp_barrier(NUM_STAGES, 4)
    s_full = tlx.alloc_barriers(ACCUMULATORS)
    p_full = tlx.alloc_warp_barrier(ACCUMULATORS, 4)
    o_full = tlx.alloc_barriers(ACCUMULATORS)
    o_empty = tlx.alloc_warp_barrier(ACCUMULATORS, 4)
    tiles = Tiles(q, k, v, full, empty)
    outputs = Ring(o, o_full, o_empty, ACCUMULATORS)
    sin_cos, ready = None, full
    if ROTARY:
        sin = tlx.local_alloc((BLOCK, HEAD_DIM // 2), tlx.dtype_of(sin_desc), NUM_TURNS)
        cos = tlx.local_alloc((BLOCK, HEAD_DIM // 2), tlx.dtype_of(cos_desc), NUM_TURNS)
        sin_cos_full = tlx.alloc_barriers(NUM_TURNS)
        sin_cos_empty = tlx.alloc_warp_barrier(NUM_TURNS, 4)
        sin_cos = SinCos(sin, cos, sin_cos_full, sin_cos_empty)
        ready = tlx.alloc_warp_barrier(NUM_STAGES, 4)

    with tlx.async_tasks():
        with tlx.async_task("default"):
            output_forward(tiles, outputs, out_full, blocks_ptr, options)
        with tlx.async_task(num_warps=4, registers=SOFTMAX_REGISTERS):
            softmax_forward(s, p, s_full, p_full, blocks_ptr, scale, options)
        if ROTARY:
            with tlx.async_task(num_warps=4, registers=TURN_REGISTERS):
                rotate_role(tiles, sin_cos, ready, blocks_ptr, options)
        with tlx.async_task(num_warps=1, registers=48):
            mma_forward(tiles, ready, s, p, outputs, s_full, p_full, blocks_ptr, options)
        with tlx.async_task(num_warps=1, registers=48):
            load(
                None, q_desc, k_desc, v_desc, sin_desc, cos_desc, None, tiles, sin_cos, blocks_ptr,
                options,
            )  # fmt: skip
        with tlx.async_task(num_warps=1, registers=48):
            store(out_desc, None, None, tiles, out_full, blocks_ptr, options)


@triton.jit
def backward_kernel(
    grad_desc, q_desc, k_desc, v_desc, dq_desc, dk_desc, dv_desc, sin_desc, cos_desc, blocks_ptr,
    scale,
    NUM_HEADS: tl.constexpr, GROUP: tl.constexpr, ROTATE_V: tl.constexpr, BLOCK: tl.constexpr,
    HEAD_DIM: tl.constexpr, NUM_STAGES: tl.constexpr, NUM_TURNS: tl.constexpr,
    TURN_REGISTERS: tl.constexpr, SOFTMAX_REGISTERS: tl.constexpr,
):  # fmt: skip
    """dq, dk and dv for the blocks of this program."""
    DTYPE: tl.constexpr = tlx.dtype_of(q_desc)
    ROTARY: tl.constexpr = sin_desc is not None
    PIECES: tl.constexpr = HEAD_DIM // BLOCK
    options = Options(NUM_HEADS, GROUP, NUM_STAGES, NUM_TURNS, PIECES, ROTATE_V, DTYPE)
    grad = tlx.local_alloc((BLOCK, HEAD_DIM), DTYPE, NUM_STAGES)
    q = tlx.local_alloc((BLOCK, HEAD_DIM), DTYPE, NUM_STAGES)
    k = tlx.local_alloc((BLOCK, HEAD_DIM), DTYPE, NUM_STAGES)
    v = tlx.local_alloc((BLOCK, HEAD_DIM), DTYPE, NUM_STAGES)
    p = tlx.local_alloc((BLOCK, BLOCK), DTYPE, NUM_STAGES * PIECES, reuse=v)
    ds = p
    if PIECES == 1:
        ds = tlx.local_alloc((BLOCK, BLOCK), DTYPE, ACCUMULATORS)
    dq = tlx.local_alloc((BLOCK, HEAD_DIM), tl.float32, ACCUMULATORS, tlx.storage_kind.tmem)
    dk = tlx.local_alloc((BLOCK, HEAD_DIM), tl.float32, ACCUMULATORS, tlx.storage_kind.tmem)
    dv = tlx.local_alloc((BLOCK, HEAD_DIM), tl.float32, ACCUMULATORS, tlx.storage_kind.tmem)
    s = tlx.local_alloc((BLOCK, BLOCK), tl.float32, ACCUMULATORS, tlx.storage_kind.tmem)
    dp = tlx.local_alloc((BLOCK, BLOCK), tl.float32, ACCUMULATORS, tlx.storage_kind.tmem)
    full = tlx.alloc_barriers(NUM_STAGES)
    empty = tlx.alloc_warp_barrier(NUM_STAGES, 1)
    out_full = tlx.alloc_warp_barrier(NUM_STAGES, 4)
    s_full = tlx.alloc_barriers(ACCUMULATORS)
    p_full = tlx.alloc_warp_barrier(ACCUMULATORS, 4)
    o_full = tlx.alloc_barriers(ACCUMULATORS)
    o_empty = tlx.alloc_warp_barrier(ACCUMULATORS, 4)
    tiles = Tiles(q, k, v, full, empty)
    results = Results(dq, dk, dv, o_full, o_empty)
    sin_cos, ready = None, full
    if ROTARY:
        sin = tlx.local_alloc((BLOCK, HEAD_DIM // 2), tlx.dtype_of(sin_desc), NUM_TURNS)
        cos = tlx.local_alloc((BLOCK, HEAD_DIM // 2), tlx.dtype_of(cos_desc), NUM_TURNS)
        sin_cos_full = tlx.alloc_barriers(NUM_TURNS)
        sin_cos_empty = tlx.alloc_warp_barrier(NUM_TURNS, 4, 2)
        sin_cos = SinCos(sin, cos, sin_cos_full, sin_cos_empty)
        ready = tlx.alloc_warp_barrier(NUM_STAGES, 4)

    with tlx.async_tasks():
        with tlx.async_task("default"):
            output_backward(tiles, sin_cos, results, out_full, blocks_ptr, options, ROTARY)
        with tlx.async_task(num_warps=4, registers=SOFTMAX_REGISTERS):
            softmax_backward(s, dp, p, ds, s_full, p_full, blocks_ptr, scale, options)
        if ROTARY:
            with tlx.async_task(num_warps=4, registers=TURN_REGISTERS):
                rotate_role(tiles, sin_cos, ready, blocks_ptr, options)
        with tlx.async_task(num_warps=1, registers=48):
            mma_backward(
                tiles, grad, ready, s, dp, p, ds, results, s_full, p_full, blocks_ptr, options
            )
        with tlx.async_task(num_warps=1, registers=48):
            load(
                grad_desc, q_desc, k_desc, v_desc, sin_desc, cos_desc, grad, tiles, sin_cos,
                blocks_ptr, options,
            )  # fmt: skip
        with tlx.async_task(num_warps=1, registers=48):
            store(dq_desc, dk_desc, dv_desc, tiles, out_full, blocks_ptr, options)


def _launch(kernel, direction: str, batch: Batch, tensors, config, work_list) -> None:
    """Launch a kernel on `tensors`; each program takes every grid-th of the listed blocks."""
    config = config or default_config(direction, batch)
    (blocks,) = work_list or work_list_recipe(batch, config).make(*batch.offsets)
    sin_cos = (None, None)
    if batch.rotary is not None:
        sin_cos = [ragged_descriptor(t[:, None], batch.block_size) for t in batch.rotary]
    launch(
        kernel, (min(multiprocessors(batch.device), len(blocks) - 1),), batch.device,
        *(ragged_descriptor(x, batch.block_size) for x in tensors), *sin_cos, blocks, batch.scale,
        NUM_HEADS=batch.num_heads, GROUP=batch.group,
        ROTATE_V=batch.rotary is not None and batch.rotate_v, BLOCK=batch.block_size,
        HEAD_DIM=batch.head_dim, NUM_STAGES=config.num_stages, NUM_TURNS=config.num_turns,
        TURN_REGISTERS=config.turn_registers, SOFTMAX_REGISTERS=config.softmax_registers,
        num_warps=4,
    )  # fmt: skip


def forward(
    batch: Batch, *, config: Config | None = None, work_list: WorkList | None = None
) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]:
    """The output, `[total, num_heads_q, head_dim]`, and what backward needs besides q, k, v:
    nothing."""
    out = batch.q.new_empty(batch.q.shape)
    tensors = batch.q, batch.k, batch.v, out
    _launch(forward_kernel, "forward", batch, tensors, config, work_list)
    return out, ()


def backward(
    grad_out: torch.Tensor, batch: Batch, saved: tuple[torch.Tensor, ...] = (), *,
    config: Config | None = None, work_list: WorkList | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    """(dq, dk, dv), shaped as q, k, v and contiguous."""
    gradients = batch.new_gradients()
    tensors = tma_readable(grad_out), batch.q, batch.k, batch.v, *gradients
    _launch(backward_kernel, "backward", batch, tensors, config, work_list)
    return gradients
