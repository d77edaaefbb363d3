"""v4a: rotary in a role of its own, overlapped with the MMAs of another item.

Changes from v4_rotary: between producer and consumer stands a rotary role, `rotate_role`, which
rotates q, k (and v) of a slot in place. Each role reads sin and cos of a block once and keeps them
in registers, or reads them for each piece of a head.

Why it should help: v4's consumer applies rotary, runs the MMAs and applies rotary to the gradients,
one after the other, with one warp on each scheduler. Here one item is rotated while the MMAs of
another run, and v4's conversion of every gradient to the layout of sin and cos is gone.

| role       | warps | registers | work                                                          |
|------------|-------|-----------|---------------------------------------------------------------|
| load       | 4     | 24        | one thread issues the TMA loads of a slot, and of sin and cos |
| rotate     | 4     | 240       | rotary of q, k (and v) of every slot, in place                |
| math (1-2) | 4     | 240       | all heads of every (second) block: MMAs, rotary of gradients  |

| barrier             | arrivals     | filled by -> drained by                                   |
|---------------------|--------------|-----------------------------------------------------------|
| tiles.full[stage]   | 1 and bytes  | TMA loads of all tiles of an item -> rotate, its consumer |
| ready[stage]        | 128 threads  | rotate, the tiles are rotated -> the item's consumer      |
| tiles.empty[stage]  | 128 threads  | its consumer, the stores have read the slot -> producer   |
| sin_cos.full[slot]  | 1 and bytes  | TMA loads of sin and cos of a block -> rotate; backward   |
|                     |              | the block's consumer too                                  |
| sin_cos.empty[slot] | forward 128  | rotate, it has read them for the last time -> producer    |
|                     | backward 256 | rotate and the block's consumer, likewise -> producer     |
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
import triton.language.extra.tlx as tlx

from gdpa_kernels.block_attention.batch import Batch, WorkList
from gdpa_kernels.block_attention.block_list import work_list_recipe
from gdpa_kernels.block_attention.problems import sin_cos_problem, tiles_problem
from gdpa_kernels.block_attention.slots import (
    SinCos,
    Tiles,
    backward_slots,
    block_at,
    check_slots,
    count_units,
    forward_slots,
    load,
    put,
    release,
    slot_of,
)
from gdpa_kernels.block_attention.tiles import softmax_parts
from gdpa_kernels.device.rotation import rotate, rotate_back

LOAD_REGISTERS = 24
REGISTERS = 512  # of an SM, for each of the 128 threads of a role


@dataclass(frozen=True)
class Config:
    """Launch constants: consumers, slots of all of them, slots of sin and cos, heads of a block
    whose loads are issued together, registers of a consumer thread and of a rotary thread, columns
    of a tile."""

    math_roles: int = 1
    num_stages: int = 2
    num_turns: int = 2
    heads_together: int = 1
    registers: int = 240
    turn_registers: int = 240
    width: int = 128

    def __post_init__(self):
        check_slots(self, "num_turns")
        for name in ("registers", "turn_registers"):
            if getattr(self, name) % 8:
                raise ValueError(f"{name} must be a multiple of 8, got {getattr(self, name)}")
        groups = self.math_roles + 2
        most = REGISTERS // groups // 8 * 8 * groups
        taken = LOAD_REGISTERS + self.turn_registers + self.math_roles * self.registers
        if taken > most:
            raise ValueError(
                f"{LOAD_REGISTERS} + turn_registers + math_roles * registers must be at most {most}"
                f", got {taken}: turn_registers {self.turn_registers}, math_roles "
                f"{self.math_roles}, registers {self.registers}"
            )


def default_config(direction: str, batch: Batch) -> Config:
    """Constants of one consumer; at head_dim 64 and 128 the slots that were fastest in runs without
    a record, beyond as many as fit. sin and cos in 16 bits leave room for one more."""
    forward, narrow = direction == "forward", batch.rotary[0].dtype.itemsize == 2
    if batch.head_dim == 64:
        return Config(num_stages=6 if forward else 3)
    if batch.head_dim <= 128:
        return Config(num_stages=3 if forward or narrow else 2, num_turns=1)
    if batch.head_dim <= 192:
        return Config(num_stages=6 if forward else 4, num_turns=1, width=64)
    if forward:
        return Config(num_stages=4 if narrow else 3, num_turns=1)
    return Config(num_stages=2, num_turns=2 if narrow else 1)


def call_problem(batch: Batch) -> str | None:
    """The reason why this rung cannot take a call, beyond `Requires`; None if it can."""
    if batch.rotary is None:
        return "needs rotary (sin, cos), got None"
    return tiles_problem(batch, splits=True) or sin_cos_problem(batch.rotary)


@triton.aggregate
class Options:
    """The constants that the roles share."""

    NUM_HEADS: tl.constexpr
    GROUP: tl.constexpr
    ROTATE_V: tl.constexpr
    MATH_ROLES: tl.constexpr
    NUM_STAGES: tl.constexpr
    NUM_TURNS: tl.constexpr
    TOGETHER: tl.constexpr
    PIECES: tl.constexpr


@triton.jit
def load_sin_cos(sin, cos):
    """sin and cos of a block, from shared memory, as fp32."""
    return tlx.local_load(sin).to(tl.float32), tlx.local_load(cos).to(tl.float32)


@triton.jit
def rotate_tile(buffer, sin, cos):
    """Apply rotary to a tile in place; rounded to its own dtype."""
    x = tlx.local_load(buffer)
    tlx.local_store(buffer, rotate(x.to(tl.float32), sin, cos).to(x.dtype))


@triton.jit
def rotate_role(tiles, sin_cos, ready, blocks_ptr, options):
    """The rotary role: slot after slot, in the order of the producer."""
    MATH_ROLES: tl.constexpr = options.MATH_ROLES
    NUM_TURNS: tl.constexpr = options.NUM_TURNS
    PIECES: tl.constexpr = options.PIECES
    PARTS: tl.constexpr = options.NUM_HEADS * PIECES
    KEPT: tl.constexpr = MATH_ROLES == 1 and PIECES == 1
    units = count_units(blocks_ptr)
    for first in tl.range(0, units, MATH_ROLES, num_stages=0):
        if KEPT:
            slot = first % NUM_TURNS
            tlx.barrier_wait(sin_cos.full[slot], (first // NUM_TURNS) & 1)
            sin, cos = load_sin_cos(sin_cos.sin[slot], sin_cos.cos[slot])
            tlx.barrier_arrive(sin_cos.empty[slot])
        for part in tl.range(0, PARTS, num_stages=0):
            for unit in tl.range(first, tl.minimum(first + MATH_ROLES, units), num_stages=0):
                stage, phase = slot_of(unit, part, options, PIECES)
                tlx.barrier_wait(tiles.full[stage], phase)
                if not KEPT:
                    slot = unit % NUM_TURNS
                    tlx.barrier_wait(sin_cos.full[slot], (unit // NUM_TURNS) & 1)
                    piece = slot * PIECES + part % PIECES
                    sin, cos = load_sin_cos(sin_cos.sin[piece], sin_cos.cos[piece])
                    tlx.barrier_arrive(sin_cos.empty[slot], pred=part == PARTS - 1)
                rotate_tile(tiles.q[stage], sin, cos)
                rotate_tile(tiles.k[stage], sin, cos)
                if options.ROTATE_V:
                    rotate_tile(tiles.v[stage], sin, cos)
                tlx.fence("async_shared")
                tlx.barrier_arrive(ready[stage])


@triton.jit
def unbound(buffer):
    """The content of a buffer [rows, width], as fp32, in the register layout that its use needs.

    A shared-memory load has a register layout of its own, and what is computed from it keeps it: an
    accumulator that meets it is converted to it, through shared memory, rather than the reverse. A
    gather, here of every row by its own number, ends that: the buffer's values are converted to the
    accumulator's layout instead, once for all uses.
    """
    ROWS: tl.constexpr = buffer.shape[0]
    WIDTH: tl.constexpr = buffer.shape[1]
    rows = tl.broadcast_to(tl.arange(0, ROWS)[:, None], [ROWS, WIDTH])
    return tl.gather(tlx.local_load(buffer).to(tl.float32), rows, 0)


@triton.jit
def store_rotated(
    desc, buffer, block, head, x, sin, cos, piece, ROTATE: tl.constexpr, KEPT: tl.constexpr
):
    """Start the store of a piece x of a gradient, fp32, rotated back if ROTATE, through `buffer`.

    KEPT: sin and cos are in registers; else in these two buffers.
    """
    if ROTATE:
        if not KEPT:
            sin, cos = load_sin_cos(sin, cos)
        x = rotate_back(x, sin, cos)
    put(desc, buffer, block, head, x, piece * desc.block_shape[4])


@triton.jit
def math_forward(role: tl.constexpr, tiles, ready, out_desc, blocks_ptr, scale, options):
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
                tlx.barrier_wait(ready[stage], phase)
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
    role: tl.constexpr, tiles, sin_cos, ready, dq_desc, dk_desc, dv_desc, grad, p, ds_tile,
    blocks_ptr, scale, options,
):  # fmt: skip
    """A consumer: all heads of units role, role + MATH_ROLES, ..."""
    DTYPE: tl.constexpr = tlx.dtype_of(dq_desc)
    BLOCK: tl.constexpr = dq_desc.block_shape[3]
    WIDTH: tl.constexpr = dq_desc.block_shape[4]
    GROUP: tl.constexpr = options.GROUP
    PIECES: tl.constexpr = options.PIECES
    ROTATE_V: tl.constexpr = options.ROTATE_V
    LATER: tl.constexpr = options.NUM_STAGES > options.MATH_ROLES
    FITS: tl.constexpr = WIDTH == 64 or (GROUP == 1 and options.MATH_ROLES == 1)
    KEPT: tl.constexpr = FITS and PIECES == 1
    units = count_units(blocks_ptr)
    previous_stage = -1
    for unit in tl.range(role, units, options.MATH_ROLES, num_stages=0):
        block = block_at(blocks_ptr, unit)
        slot = unit % options.NUM_TURNS
        tlx.barrier_wait(sin_cos.full[slot], (unit // options.NUM_TURNS) & 1)
        if KEPT:
            sin, cos = unbound(sin_cos.sin[slot]), unbound(sin_cos.cos[slot])
            tlx.barrier_arrive(sin_cos.empty[slot])
        for head_k in tl.range(0, options.NUM_HEADS // GROUP, num_stages=0):
            dk = tl.zeros([BLOCK, WIDTH], tl.float32)
            dv = tl.zeros([BLOCK, WIDTH], tl.float32)
            for member in tl.range(0, GROUP, num_stages=0):
                head = head_k * GROUP + member
                s, dp = None, None
                for piece in tl.static_range(PIECES):
                    stage, phase = slot_of(unit, head * PIECES + piece, options, PIECES)
                    tlx.barrier_wait(tiles.full[stage], phase)
                    tlx.barrier_wait(ready[stage], phase)
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
                    if not KEPT:
                        index = slot * PIECES + piece
                        sin, cos = sin_cos.sin[index], sin_cos.cos[index]
                    if FITS and not KEPT:
                        sin, cos = unbound(sin), unbound(cos)
                    by = sin, cos, piece
                    if piece > 0:
                        dk, dv = tl.zeros_like(dk), tl.zeros_like(dv)
                    dv = tlx.async_dot(tlx.local_trans(p_tile), grad[stage], dv)
                    dq = tlx.async_dot(ds_tile, tiles.k[stage])
                    if piece > 0:
                        release(tiles.empty, previous_stage)
                    dv = tlx.async_dot_wait(1, dv)
                    if GROUP == 1:
                        store_rotated(
                            dv_desc, tiles.v[stage], block, head_k, dv, *by, ROTATE_V, FITS
                        )
                    dk = tlx.async_dot(tlx.local_trans(ds_tile), tiles.q[stage], dk)
                    dq = tlx.async_dot_wait(1, dq)
                    dead = grad[stage] if GROUP == 1 else tiles.v[stage]
                    store_rotated(dq_desc, dead, block, head, dq, *by, True, FITS)
                    dk = tlx.async_dot_wait(0, dk)
                    if member == GROUP - 1:
                        if GROUP > 1:
                            store_rotated(
                                dv_desc, grad[stage], block, head_k, dv, *by, ROTATE_V, FITS
                            )
                        store_rotated(dk_desc, tiles.k[stage], block, head_k, dk, *by, True, FITS)
                    if not LATER:
                        release(tiles.empty, stage)
                    previous_stage = stage
        if not KEPT:
            tlx.barrier_arrive(sin_cos.empty[slot])
    if LATER:
        release(tiles.empty, previous_stage)


@triton.jit
def forward_kernel(
    q_desc, k_desc, v_desc, out_desc, sin_desc, cos_desc, blocks_ptr, scale,
    NUM_HEADS: tl.constexpr, GROUP: tl.constexpr, ROTATE_V: tl.constexpr, BLOCK: tl.constexpr,
    WIDTH: tl.constexpr, PIECES: tl.constexpr, MATH_ROLES: tl.constexpr,
    NUM_STAGES: tl.constexpr, NUM_TURNS: tl.constexpr, TOGETHER: tl.constexpr,
    REGISTERS: tl.constexpr, TURN_REGISTERS: tl.constexpr,
):  # fmt: skip
    """softmax(scale Q K^T) V for the blocks of this program."""
    DTYPE: tl.constexpr = tlx.dtype_of(q_desc)
    options = Options(
        NUM_HEADS, GROUP, ROTATE_V, MATH_ROLES, NUM_STAGES, NUM_TURNS, TOGETHER, PIECES
    )
    q = tlx.local_alloc((BLOCK, WIDTH), DTYPE, NUM_STAGES)
    k = tlx.local_alloc((BLOCK, WIDTH), DTYPE, NUM_STAGES)
    v = tlx.local_alloc((BLOCK, WIDTH), DTYPE, NUM_STAGES)
    sin = tlx.local_alloc((BLOCK, WIDTH // 2), tlx.dtype_of(sin_desc), NUM_TURNS * PIECES)
    cos = tlx.local_alloc((BLOCK, WIDTH // 2), tlx.dtype_of(cos_desc), NUM_TURNS * PIECES)
    full = tlx.alloc_barriers(NUM_STAGES)
    ready = tlx.alloc_warp_barrier(NUM_STAGES, 4)
    empty = tlx.alloc_warp_barrier(NUM_STAGES, 4)
    tiles = Tiles(q, k, v, full, empty)
    sin_cos = SinCos(sin, cos, tlx.alloc_barriers(NUM_TURNS), tlx.alloc_warp_barrier(NUM_TURNS, 4))

    with tlx.async_tasks():
        with tlx.async_task("default"):
            load(
                None, q_desc, k_desc, v_desc, sin_desc, cos_desc, None, tiles, sin_cos,
                blocks_ptr, options,
            )  # fmt: skip
        with tlx.async_task(num_warps=4, registers=TURN_REGISTERS):
            rotate_role(tiles, sin_cos, ready, blocks_ptr, options)
        with tlx.async_task(num_warps=4, registers=REGISTERS, replicate=MATH_ROLES):
            math_forward(
                tlx.async_task_replica_id(), tiles, ready, out_desc, blocks_ptr, scale, options
            )


@triton.jit
def backward_kernel(
    grad_desc, q_desc, k_desc, v_desc, dq_desc, dk_desc, dv_desc, sin_desc, cos_desc, blocks_ptr,
    scale,
    NUM_HEADS_K: tl.constexpr, GROUP: tl.constexpr, ROTATE_V: tl.constexpr, BLOCK: tl.constexpr,
    WIDTH: tl.constexpr, PIECES: tl.constexpr, MATH_ROLES: tl.constexpr,
    NUM_STAGES: tl.constexpr, NUM_TURNS: tl.constexpr, TOGETHER: tl.constexpr,
    REGISTERS: tl.constexpr, TURN_REGISTERS: tl.constexpr,
):  # fmt: skip
    """dq, dk and dv for the blocks of this program."""
    DTYPE: tl.constexpr = tlx.dtype_of(q_desc)
    options = Options(
        NUM_HEADS_K * GROUP, GROUP, ROTATE_V, MATH_ROLES, NUM_STAGES, NUM_TURNS, TOGETHER, PIECES
    )
    grad = tlx.local_alloc((BLOCK, WIDTH), DTYPE, NUM_STAGES)
    q = tlx.local_alloc((BLOCK, WIDTH), DTYPE, NUM_STAGES)
    k = tlx.local_alloc((BLOCK, WIDTH), DTYPE, NUM_STAGES)
    v = tlx.local_alloc((BLOCK, WIDTH), DTYPE, NUM_STAGES)
    p = tlx.local_alloc((BLOCK, BLOCK), DTYPE, NUM_STAGES * (WIDTH // BLOCK), reuse=v)
    ds = tlx.local_alloc((BLOCK, BLOCK), DTYPE, MATH_ROLES)
    sin = tlx.local_alloc((BLOCK, WIDTH // 2), tlx.dtype_of(sin_desc), NUM_TURNS * PIECES)
    cos = tlx.local_alloc((BLOCK, WIDTH // 2), tlx.dtype_of(cos_desc), NUM_TURNS * PIECES)
    full = tlx.alloc_barriers(NUM_STAGES)
    ready = tlx.alloc_warp_barrier(NUM_STAGES, 4)
    empty = tlx.alloc_warp_barrier(NUM_STAGES, 4)
    tiles = Tiles(q, k, v, full, empty)
    sin_cos_full = tlx.alloc_barriers(NUM_TURNS)
    sin_cos = SinCos(sin, cos, sin_cos_full, tlx.alloc_warp_barrier(NUM_TURNS, 4, 2))

    with tlx.async_tasks():
        with tlx.async_task("default"):
            load(
                grad_desc, q_desc, k_desc, v_desc, sin_desc, cos_desc, grad, tiles, sin_cos,
                blocks_ptr, options,
            )  # fmt: skip
        with tlx.async_task(num_warps=4, registers=TURN_REGISTERS):
            rotate_role(tiles, sin_cos, ready, blocks_ptr, options)
        with tlx.async_task(num_warps=4, registers=REGISTERS, replicate=MATH_ROLES):
            role: tl.constexpr = tlx.async_task_replica_id()
            math_backward(
                role, tiles, sin_cos, ready, dq_desc, dk_desc, dv_desc, grad, p, ds[role],
                blocks_ptr, scale, options,
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
