"""Functions of the warp-specialized rungs: checks of their launch constants, the blocks that a
program works on, the slot of an item, loads into a slot and its release, the producer with sin and
cos. Each rung has its own other roles.
"""

from collections.abc import Sequence
from typing import Protocol

import torch
import triton
import triton.language as tl
import triton.language.extra.tlx as tlx

from gdpa_kernels.block_attention.batch import Batch
from gdpa_kernels.block_attention.block_list import block_entry, count_blocks
from gdpa_kernels.calling.launch import cdiv, launch, multiprocessors, next_power_of_2
from gdpa_kernels.device.ragged import BOUND, ragged_descriptor, tma_readable
from gdpa_kernels.device.rows import keep_runtime


class Slots(Protocol):
    """Launch constants with consumers, slots of all of them, and heads whose loads are issued
    together."""

    math_roles: int
    num_stages: int
    heads_together: int


class WideSlots(Slots, Protocol):
    """`Slots` with the columns of a tile, of which a wider head takes several, and the registers of
    a consumer thread."""

    width: int
    registers: int


def check_slots(config: Slots, *others: str) -> None:
    """Raise ValueError where a slot would have two owners, or where loads that are issued together
    would wait for each other: the kernel would compute nonsense, or deadlock.

    others: the launch constants that count slots of another kind. A consumer releases a slot when
    the next one has arrived.
    """
    for name in ("num_stages", *others):
        if getattr(config, name) % config.math_roles:
            raise ValueError(
                f"{name} must be a multiple of math_roles, so that a slot has one owner; "
                f"got {name} {getattr(config, name)}, math_roles {config.math_roles}"
            )
    role_slots = config.num_stages // config.math_roles
    if role_slots <= config.heads_together > 1:
        raise ValueError(
            f"a math role must have more slots than heads_together, {config.heads_together}, got "
            f"{role_slots}: num_stages {config.num_stages}, math_roles {config.math_roles}"
        )


def heads_together(config: Slots, num_heads: int) -> int:
    """config.heads_together; ValueError unless it divides the number of query heads."""
    if num_heads % config.heads_together:
        raise ValueError(
            f"heads_together must divide the number of query heads, {num_heads}, got "
            f"{config.heads_together}"
        )
    return config.heads_together


def split(config: WideSlots, batch: Batch) -> tuple[int, int]:
    """(WIDTH, PIECES): the columns of a tile, and how many slots a head takes. Columns beyond
    head_dim are padding: TMA loads zeros there and stores nothing.

    ValueError where pieces of a head would wait for each other or for another head, or would have
    to share the registers that sum the gradients of grouped heads.
    """
    if config.width not in (64, 128):
        raise ValueError(f"width must be 64 or 128, got {config.width}")
    width = min(config.width, next_power_of_2(batch.head_dim))
    pieces = cdiv(batch.head_dim, width)
    role_slots = config.num_stages // config.math_roles
    if pieces > 1 and (role_slots < pieces or config.heads_together > 1 or batch.group > 1):
        raise ValueError(
            f"a head of {pieces} pieces must have as many slots of its math role, heads_together 1 "
            f"and a key head of its own; got {role_slots} slots, "
            f"heads_together {config.heads_together}, "
            f"{batch.group} query heads for a key head"
        )
    return width, pieces


def launch_slots(
    kernel: triton.JITFunction, batch: Batch, config: WideSlots, blocks: torch.Tensor,
    tensors: Sequence[torch.Tensor],
) -> None:  # fmt: skip
    """Launch a kernel on `tensors`, and on sin and cos if the call has them: a program on every SM,
    which takes every grid-th of the listed blocks. The kernel takes those constants of `batch` and
    `config` that it has a parameter for, num_turns as NUM_TURNS."""
    width, pieces = split(config, batch)
    sin_cos = [x[:, None] for x in batch.rotary or ()]
    known = {
        **{name.upper(): value for name, value in vars(config).items()},
        "NUM_HEADS": batch.num_heads, "NUM_HEADS_K": batch.num_heads_k, "GROUP": batch.group,
        "ROTATE_V": batch.rotate_v, "BLOCK": batch.block_size, "WIDTH": width, "PIECES": pieces,
        "TOGETHER": heads_together(config, batch.num_heads),
    }  # fmt: skip
    launch(
        kernel, (min(multiprocessors(batch.device), len(blocks) - 1),), batch.device,
        *(ragged_descriptor(x, batch.block_size, width=width) for x in tensors),
        *(ragged_descriptor(x, batch.block_size, width=width // 2) for x in sin_cos),
        blocks, batch.scale, num_warps=4,
        **{name: known[name] for name in kernel.arg_names if name in known},
    )  # fmt: skip


def forward_slots(
    kernel: triton.JITFunction, batch: Batch, config: WideSlots, blocks: torch.Tensor
) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]:
    """The output, `[total, num_heads_q, head_dim]`, and what backward needs besides q, k, v:
    nothing."""
    out = batch.q.new_empty(batch.q.shape)
    launch_slots(kernel, batch, config, blocks, (batch.q, batch.k, batch.v, out))
    return out, ()


def backward_slots(
    kernel: triton.JITFunction, grad_out: torch.Tensor, batch: Batch, config: WideSlots,
    blocks: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    """(dq, dk, dv), shaped as q, k, v."""
    gradients = batch.new_gradients()
    tensors = tma_readable(grad_out), batch.q, batch.k, batch.v, *gradients
    launch_slots(kernel, batch, config, blocks, tensors)
    return gradients


@triton.aggregate
class Tiles:
    """Slots of an item's tiles, and their barriers.

    full[i] completes when all tiles of slot i have arrived, empty[i] when it may be filled again.
    """

    q: tlx.buffered_tensor
    k: tlx.buffered_tensor
    v: tlx.buffered_tensor
    full: tlx.mbarrier
    empty: tlx.mbarrier


@triton.aggregate
class SinCos:
    """Slots of sin and cos of a block, and their barriers, as those of `Tiles`."""

    sin: tlx.buffered_tensor
    cos: tlx.buffered_tensor
    full: tlx.mbarrier
    empty: tlx.mbarrier


@triton.aggregate
class Block:
    """A block of tokens."""

    first_row: tl.tensor
    rows: tl.tensor


@triton.jit
def count_units(blocks_ptr):
    """The number of blocks that this program works on: p, p + P, p + 2 P, ... belong to program p
    of P."""
    return tl.cdiv(count_blocks(blocks_ptr) - tl.program_id(0), tl.num_programs(0))


@triton.jit
def block_at(blocks_ptr, unit):
    """Block `unit` of this program."""
    first_row, rows = block_entry(blocks_ptr, tl.program_id(0) + unit * tl.num_programs(0))
    return Block(first_row, rows)


@triton.jit
def slot_of(unit, part, options, PIECES: tl.constexpr = 1):
    """(stage, phase) of a head of a unit, or of piece part % PIECES of head part // PIECES: its
    role takes slots role, role + MATH_ROLES, ... in turn, independent of the units that other
    roles have left."""
    MATH_ROLES: tl.constexpr = options.MATH_ROLES
    ROLE_SLOTS: tl.constexpr = options.NUM_STAGES // MATH_ROLES
    use = unit // MATH_ROLES * (options.NUM_HEADS * PIECES) + part
    if PIECES > 1:
        use += keep_runtime(part)
    return unit % MATH_ROLES + use % ROLE_SLOTS * MATH_ROLES, (use // ROLE_SLOTS) & 1


@triton.jit
def fetch(desc, buffer, full, block, head, column=0):
    """Start the TMA load of a block of one head, from a column on; the rows beyond it become
    zero."""
    coords = [BOUND, block.first_row + block.rows, head, BOUND - block.rows, column]
    tlx.async_descriptor_load(desc, buffer, coords, full)


@triton.jit
def put(desc, buffer, block, head, values, column=0):
    """Start the TMA store of `values`, rounded once, through `buffer`, from a column on; rows
    beyond the block are dropped."""
    tlx.local_store(buffer, values.to(tlx.dtype_of(desc)))
    tlx.fence("async_shared")
    coords = [BOUND, block.first_row + block.rows, head, BOUND - block.rows, column]
    tlx.async_descriptor_store(desc, buffer, coords)


@triton.jit
def release(empty, stage):
    """Release a slot once its stores have read it; -1: there is none."""
    tlx.async_descriptor_store_wait(0)
    tlx.barrier_arrive(empty[tl.maximum(stage, 0)], pred=stage >= 0)


@triton.jit
def load(
    grad_desc, q_desc, k_desc, v_desc, sin_desc, cos_desc, grad, tiles, sin_cos, blocks_ptr, options
):
    """The producer of v3, which also loads sin and cos of a block, after q and k of its first
    head."""
    TILES: tl.constexpr = 3 if grad_desc is None else 4
    WIDTH: tl.constexpr = q_desc.block_shape[4]
    BYTES: tl.constexpr = q_desc.block_shape[3] * WIDTH * 2
    PIECES: tl.constexpr = options.PIECES
    TURN_BYTES: tl.constexpr = (
        sin_desc.block_shape[3] * sin_desc.block_shape[4]
        * (tlx.dtype_of(sin_desc).primitive_bitwidth + tlx.dtype_of(cos_desc).primitive_bitwidth)
        // 8 * PIECES
    )  # fmt: skip
    NUM_TURNS: tl.constexpr = options.NUM_TURNS
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
                    if tile == 1:  # noqa: SIM102, known when compiled
                        if part == 0:
                            slot = unit % NUM_TURNS
                            tlx.barrier_wait(sin_cos.empty[slot], ((unit // NUM_TURNS) & 1) ^ 1)
                            tlx.barrier_expect_bytes(sin_cos.full[slot], TURN_BYTES)
                            for j in tl.static_range(PIECES):
                                index, pair = slot * PIECES + j, j * (WIDTH // 2)
                                fetch(
                                    sin_desc, sin_cos.sin[index], sin_cos.full[slot], block, 0, pair
                                )
                                fetch(
                                    cos_desc, sin_cos.cos[index], sin_cos.full[slot], block, 0, pair
                                )
