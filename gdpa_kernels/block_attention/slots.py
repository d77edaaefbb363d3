"""What the warp-specialized rungs share: what they need of a call and of their launch constants,
which blocks a program works on, which slot an item takes, how a slot is filled and released.

The roles themselves, and what a slot holds when, are each rung's own.
"""

from typing import Protocol

import torch
import triton
import triton.language as tl
import triton.language.extra.tlx as tlx

from gdpa_kernels.block_attention.batch import Batch
from gdpa_kernels.block_attention.block_list import block_entry, count_blocks
from gdpa_kernels.device.ragged import BOUND, is_readable
from gdpa_kernels.device.rows import opaque_zero

BLOCK = 64


class Slots(Protocol):
    """Launch constants with consumers, slots of all of them, and heads whose loads are issued
    together."""

    math_roles: int
    num_stages: int
    heads_together: int


class WideSlots(Slots, Protocol):
    """With the columns of a tile: a wider head takes several slots."""

    width: int


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
    own = config.num_stages // config.math_roles
    if own <= config.heads_together > 1:
        raise ValueError(
            f"a math role must have more slots than heads_together, {config.heads_together}, got "
            f"{own}: num_stages {config.num_stages}, math_roles {config.math_roles}"
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
    width = min(config.width, triton.next_power_of_2(batch.head_dim))
    pieces = triton.cdiv(batch.head_dim, width)
    own = config.num_stages // config.math_roles
    if pieces > 1 and (own < pieces or config.heads_together > 1 or batch.group > 1):
        raise ValueError(
            f"a head of {pieces} pieces must have as many slots of its math role, heads_together 1 "
            f"and a key head of its own; got {own} slots, heads_together {config.heads_together}, "
            f"{batch.group} query heads for a key head"
        )
    return width, pieces


def requires_tiles(batch: Batch, splits: bool = False) -> str | None:
    """What loading the tiles of a call by TMA needs and does not get, or None.

    splits: of a rung that pads tiles and splits heads, as `split` says.
    """
    if batch.block_size != BLOCK:
        return f"needs block_size {BLOCK}, got {batch.block_size}"
    if batch.dtype not in (torch.bfloat16, torch.float16):
        return f"needs dtype bfloat16 or float16, got {str(batch.dtype).removeprefix('torch.')}"
    if not splits and batch.head_dim not in (64, 128):
        return f"needs a head_dim of 64 or 128, got {batch.head_dim}"
    if splits and batch.head_dim not in range(64, 257, 8):
        return f"needs a head_dim of 64 to 256, a multiple of 8, got {batch.head_dim}"
    if splits and batch.head_dim > 128 and batch.group > 1:
        return (
            f"needs a key head for each query head where head_dim is above 128, got {batch.group} "
            f"query heads for one at head_dim {batch.head_dim}"
        )
    for name, tensor in (("q", batch.q), ("k", batch.k), ("v", batch.v)):
        if not is_readable(tensor):
            return (
                f"needs {name} with contiguous rows whose address and strides are multiples of 16 "
                f"bytes, got strides {tensor.stride()}"
            )
    return None


def requires_turns(rotary: tuple[torch.Tensor, torch.Tensor]) -> str | None:
    """What loading sin and cos by TMA needs and does not get, or None."""
    for name, turns in zip(("sin", "cos"), rotary, strict=True):
        if turns.dtype not in (torch.float32, torch.bfloat16, torch.float16):
            dtype = str(turns.dtype).removeprefix("torch.")
            return f"needs {name} of dtype float32, bfloat16 or float16, got {dtype}"
        if not is_readable(turns[:, None]):
            return (
                f"needs {name} with contiguous rows whose address and stride are multiples of 16 "
                f"bytes, got strides {turns.stride()}"
            )
    return None


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
class Turns:
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
    """How many blocks this program works on: p, p + P, p + 2 P, ... belong to program p of P."""
    return tl.cdiv(count_blocks(blocks_ptr) - tl.program_id(0), tl.num_programs(0))


@triton.jit
def place(blocks_ptr, unit):
    """One of this program's blocks."""
    first_row, rows = block_entry(blocks_ptr, tl.program_id(0) + unit * tl.num_programs(0))
    return Block(first_row, rows)


@triton.jit
def slot_of(unit, part, options, PIECES: tl.constexpr = 1):
    """(stage, phase) of a head of a unit, or of piece part % PIECES of head part // PIECES: its
    role takes slots role, role + MATH_ROLES, ... in turn, whether or not other roles have units
    left."""
    MATH_ROLES: tl.constexpr = options.MATH_ROLES
    OWN: tl.constexpr = options.NUM_STAGES // MATH_ROLES
    turn = unit // MATH_ROLES * (options.NUM_HEADS * PIECES) + part
    if PIECES > 1:
        turn += opaque_zero(part)
    return unit % MATH_ROLES + turn % OWN * MATH_ROLES, (turn // OWN) & 1


@triton.jit
def fetch(desc, buffer, full, block, head, column=0):
    """Start the TMA load of a block of one head, from a column on; the rows beyond it become
    zero."""
    at = [BOUND, block.first_row + block.rows, head, BOUND - block.rows, column]
    tlx.async_descriptor_load(desc, buffer, at, full)


@triton.jit
def put(desc, buffer, block, head, values, column=0):
    """Start the TMA store of `values`, rounded once, through `buffer`, from a column on; rows
    beyond the block are dropped."""
    tlx.local_store(buffer, values.to(tlx.dtype_of(desc)))
    tlx.fence("async_shared")
    at = [BOUND, block.first_row + block.rows, head, BOUND - block.rows, column]
    tlx.async_descriptor_store(desc, buffer, at)


@triton.jit
def release(empty, stage):
    """Release a slot once its stores have read it; -1: there is none."""
    tlx.async_descriptor_store_wait(0)
    tlx.barrier_arrive(empty[tl.maximum(stage, 0)], pred=stage >= 0)
