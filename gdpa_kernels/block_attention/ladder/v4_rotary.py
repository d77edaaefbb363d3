"""v4: rotary inside the kernels: no tensor is read or written once more for it.

Changes from v3_warp_specialized: the producer loads sin and cos of a block too, once for all its
heads, into one of `num_turns` slots of their own. A consumer applies rotary to q and k (and v, if
asked) in place, in shared memory, before the first MMA, and its transpose to the fp32 accumulators
dq and dk (and dv), on their way into the slots they leave by. One rounding, as without rotary.

Why it should help, in tensors of q's size: attention moves 4 forward and 7 backward. A rotary
kernel of its own moves 4 more, 6 if v is rotated; here only sin and cos are read besides.

| role       | warps | registers | work                                                          |
|------------|-------|-----------|---------------------------------------------------------------|
| load       | 4     | 24        | one thread issues the TMA loads of a slot, and of sin and cos |
| math (1-2) | 4     | 240       | all heads of every (second) block: rotary, MMAs, stores       |

| barrier             | arrivals    | filled by -> drained by                                 |
|---------------------|-------------|---------------------------------------------------------|
| tiles.full[stage]   | 1 and bytes | TMA loads of all tiles of an item -> its consumer       |
| tiles.empty[stage]  | 128 threads | its consumer, the stores have read the slot -> producer |
| sin_cos.full[slot]  | 1 and bytes | TMA loads of sin and cos of a block -> its consumer     |
| sin_cos.empty[slot] | 128 threads | its consumer, done with the block -> producer           |
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


@dataclass(frozen=True)
class Config:
    """Launch constants: consumers, slots of all of them, slots of sin and cos, heads of a block
    whose loads are issued together, registers of a consumer thread, columns of a tile."""

    math_roles: int = 1
    num_stages: int = 2
    num_turns: int = 2
    heads_together: int = 1
    registers: int = 240
    width: int = 128

    def __post_init__(self):
        check_slots(self, "num_turns")


def default_config(direction: str, batch: Batch) -> Config:
    """Constants of one consumer; at head_dim 64 and 128 the slots that were fastest in runs without
    a record, beyond as many as fit beside sin and cos."""
    forward = direction == "forward"
    if batch.head_dim > 128:
        narrow = batch.rotary[0].dtype.itemsize == 2
        if batch.head_dim <= 192:
            return Config(num_stages=6 if forward else 4, num_turns=1, width=64)
        if forward:
            return Config(num_stages=4 if narrow else 3, num_turns=1)
        return Config(num_stages=2, num_turns=2 if narrow else 1)
    if batch.head_dim > 64:
        return Config(num_stages=3 if forward else 2)
    return Config(num_stages=4)


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
def rotated(x, sin, cos, BACK: tl.constexpr):
    """x [rows, width], fp32, its pairs of columns rotated by sin and cos [rows, width // 2],
    buffers in shared memory; BACK: by the transpose."""
    ROWS: tl.constexpr = x.shape[0]
    WIDTH: tl.constexpr = x.shape[1]
    sin = tlx.local_load(sin).to(tl.float32)
    cos = tlx.local_load(cos).to(tl.float32)
    by_sin = x * tl.reshape(tl.join(sin, sin), [ROWS, WIDTH])
    by_cos = x * tl.reshape(tl.join(cos, cos), [ROWS, WIDTH])
    even_sin, odd_sin = tl.split(tl.reshape(by_sin, [ROWS, WIDTH // 2, 2]))
    even_cos, odd_cos = tl.split(tl.reshape(by_cos, [ROWS, WIDTH // 2, 2]))
    if BACK:
        pairs = tl.join(even_cos + odd_sin, odd_cos - even_sin)
    else:
        pairs = tl.join(even_cos - odd_sin, odd_cos + even_sin)
    return tl.reshape(pairs, [ROWS, WIDTH])


@triton.jit
def rotate_tile(buffer, sin, cos):
    """Apply rotary to a tile in place; rounded to its own dtype."""
    x = tlx.local_load(buffer)
    tlx.local_store(buffer, rotated(x.to(tl.float32), sin, cos, False).to(x.dtype))


@triton.jit
def rotate_slot(tiles, stage, sin_cos, index, options):
    """Apply rotary to q and k (and v, if asked) of a slot in place, for MMAs to read."""
    rotate_tile(tiles.q[stage], sin_cos.sin[index], sin_cos.cos[index])
    rotate_tile(tiles.k[stage], sin_cos.sin[index], sin_cos.cos[index])
    if options.ROTATE_V:
        rotate_tile(tiles.v[stage], sin_cos.sin[index], sin_cos.cos[index])
    tlx.fence("async_shared")


@triton.jit
def store_rotated(desc, buffer, block, head, x, sin_cos, index, piece, ROTATE: tl.constexpr):
    """Start the store of a piece x of a gradient, fp32, rotated back if ROTATE, via `buffer`."""
    if ROTATE:
        x = rotated(x, sin_cos.sin[index], sin_cos.cos[index], True)
    put(desc, buffer, block, head, x, piece * desc.block_shape[4])


@triton.jit
def math_forward(role: tl.constexpr, tiles, sin_cos, out_desc, blocks_ptr, scale, options):
    """A consumer: all heads of units role, role + MATH_ROLES, ..."""
    DTYPE: tl.constexpr = tlx.dtype_of(out_desc)
    WIDTH: tl.constexpr = out_desc.block_shape[4]
    PIECES: tl.constexpr = options.PIECES
    LATER: tl.constexpr = options.NUM_STAGES > options.MATH_ROLES
    units = count_units(blocks_ptr)
    previous_stage = -1
    for unit in tl.range(role, units, options.MATH_ROLES, num_stages=0):
        block = block_at(blocks_ptr, unit)
        slot = unit % options.NUM_TURNS
        tlx.barrier_wait(sin_cos.full[slot], (unit // options.NUM_TURNS) & 1)
        for head in tl.range(0, options.NUM_HEADS, num_stages=0):
            s = None
            for piece in tl.static_range(PIECES):
                stage, phase = slot_of(unit, head * PIECES + piece, options, PIECES)
                tlx.barrier_wait(tiles.full[stage], phase)
                rotate_slot(tiles, stage, sin_cos, slot * PIECES + piece, options)
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
        tlx.barrier_arrive(sin_cos.empty[slot])
    if LATER:
        release(tiles.empty, previous_stage)


@triton.jit
def math_backward(
    role: tl.constexpr, tiles, sin_cos, dq_desc, dk_desc, dv_desc, grad, p, ds_tile, blocks_ptr,
    scale, options,
):  # fmt: skip
    """A consumer: all heads of units role, role + MATH_ROLES, ..."""
    DTYPE: tl.constexpr = tlx.dtype_of(dq_desc)
    BLOCK: tl.constexpr = dq_desc.block_shape[3]
    WIDTH: tl.constexpr = dq_desc.block_shape[4]
    GROUP: tl.constexpr = options.GROUP
    PIECES: tl.constexpr = options.PIECES
    ROTATE_V: tl.constexpr = options.ROTATE_V
    LATER: tl.constexpr = options.NUM_STAGES > options.MATH_ROLES
    units = count_units(blocks_ptr)
    previous_stage = -1
    for unit in tl.range(role, units, options.MATH_ROLES, num_stages=0):
        block = block_at(blocks_ptr, unit)
        slot = unit % options.NUM_TURNS
        tlx.barrier_wait(sin_cos.full[slot], (unit // options.NUM_TURNS) & 1)
        for head_k in tl.range(0, options.NUM_HEADS // GROUP, num_stages=0):
            dk = tl.zeros([BLOCK, WIDTH], tl.float32)
            dv = tl.zeros([BLOCK, WIDTH], tl.float32)
            for member in tl.range(0, GROUP, num_stages=0):
                head = head_k * GROUP + member
                s, dp = None, None
                for piece in tl.static_range(PIECES):
                    stage, phase = slot_of(unit, head * PIECES + piece, options, PIECES)
                    tlx.barrier_wait(tiles.full[stage], phase)
                    rotate_slot(tiles, stage, sin_cos, slot * PIECES + piece, options)
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
                    by = sin_cos, slot * PIECES + piece, piece
                    if piece > 0:
                        dk, dv = tl.zeros_like(dk), tl.zeros_like(dv)
                    dv = tlx.async_dot(tlx.local_trans(p_tile), grad[stage], dv)
                    dq = tlx.async_dot(ds_tile, tiles.k[stage])
                    if piece > 0:
                        release(tiles.empty, previous_stage)
                    dv = tlx.async_dot_wait(1, dv)
                    if GROUP == 1:
                        store_rotated(dv_desc, tiles.v[stage], block, head_k, dv, *by, ROTATE_V)
                    dk = tlx.async_dot(tlx.local_trans(ds_tile), tiles.q[stage], dk)
                    dq = tlx.async_dot_wait(1, dq)
                    dead = grad[stage] if GROUP == 1 else tiles.v[stage]
                    store_rotated(dq_desc, dead, block, head, dq, *by, True)
                    dk = tlx.async_dot_wait(0, dk)
                    if member == GROUP - 1:
                        if GROUP > 1:
                            store_rotated(dv_desc, grad[stage], block, head_k, dv, *by, ROTATE_V)
                        store_rotated(dk_desc, tiles.k[stage], block, head_k, dk, *by, True)
                    if not LATER:
                        release(tiles.empty, stage)
                    previous_stage = stage
        tlx.barrier_arrive(sin_cos.empty[slot])
    if LATER:
        release(tiles.empty, previous_stage)


@triton.jit
def forward_kernel(
    q_desc, k_desc, v_desc, out_desc, sin_desc, cos_desc, blocks_ptr, scale,
    NUM_HEADS: tl.constexpr, GROUP: tl.constexpr, ROTATE_V: tl.constexpr, BLOCK: tl.constexpr,
    WIDTH: tl.constexpr, PIECES: tl.constexpr, MATH_ROLES: tl.constexpr,
    NUM_STAGES: tl.constexpr, NUM_TURNS: tl.constexpr, TOGETHER: tl.constexpr,
    REGISTERS: tl.constexpr,
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
    tiles = Tiles(q, k, v, tlx.alloc_barriers(NUM_STAGES), tlx.alloc_warp_barrier(NUM_STAGES, 4))
    sin_cos = SinCos(sin, cos, tlx.alloc_barriers(NUM_TURNS), tlx.alloc_warp_barrier(NUM_TURNS, 4))

    with tlx.async_tasks():
        with tlx.async_task("default"):
            load(
                None, q_desc, k_desc, v_desc, sin_desc, cos_desc, None, tiles, sin_cos,
                blocks_ptr, options,
            )  # fmt: skip
        with tlx.async_task(num_warps=4, registers=REGISTERS, replicate=MATH_ROLES):
            math_forward(
                tlx.async_task_replica_id(), tiles, sin_cos, out_desc, blocks_ptr, scale, options
            )


@triton.jit
def backward_kernel(
    grad_desc, q_desc, k_desc, v_desc, dq_desc, dk_desc, dv_desc, sin_desc, cos_desc, blocks_ptr,
    scale,
    NUM_HEADS_K: tl.constexpr, GROUP: tl.constexpr, ROTATE_V: tl.constexpr, BLOCK: tl.constexpr,
    WIDTH: tl.constexpr, PIECES: tl.constexpr, MATH_ROLES: tl.constexpr,
    NUM_STAGES: tl.constexpr, NUM_TURNS: tl.constexpr, TOGETHER: tl.constexpr,
    REGISTERS: tl.constexpr,
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
    tiles = Tiles(q, k, v, tlx.alloc_barriers(NUM_STAGES), tlx.alloc_warp_barrier(NUM_STAGES, 4))
    sin_cos = SinCos(sin, cos, tlx.alloc_barriers(NUM_TURNS), tlx.alloc_warp_barrier(NUM_TURNS, 4))

    with tlx.async_tasks():
        with tlx.async_task("default"):
            load(
                grad_desc, q_desc, k_desc, v_desc, sin_desc, cos_desc, grad, tiles, sin_cos,
                blocks_ptr, options,
            )  # fmt: skip
        with tlx.async_task(num_warps=4, registers=REGISTERS, replicate=MATH_ROLES):
            role: tl.constexpr = tlx.async_task_replica_id()
            math_backward(
                role, tiles, sin_cos, dq_desc, dk_desc, dv_desc, grad, p, ds[role], blocks_ptr,
                scale, options,
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
