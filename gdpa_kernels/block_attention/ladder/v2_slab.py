"""v2: a program walks over the heads of a block, and over blocks; TMA does the addressing.

Changes from v1_one_tile: programs take `slabs_per_program` slabs of `heads_per_program` heads of a
block, one (block, head) after another, and prefetch the next tiles while they work on these. Tiles
come and go by TMA, clipped at the end of the block (device/ragged.py).

Why it should help: the heads of a token lie side by side, so a slab [64, num_heads * head_dim] is
contiguous memory, and its rows of sin and cos come from memory once: for the other heads they hit
in cache. A program of v1 has loads in flight only until its MMAs start; here they are in flight
all the time. TMA needs no pointers and no masks: the registers go to the tiles.

| role      | warps     | registers | work                                                   |
|-----------|-----------|-----------|--------------------------------------------------------|
| all warps | num_warps | up to 255 | MMAs and softmax; thread 0 issues TMA loads and stores |

| barrier       | arrivals    | filled by -> drained by                                         |
|---------------|-------------|-----------------------------------------------------------------|
| one per stage | 1 and bytes | TMA loads of a head's tiles, num_stages - 1 steps ahead -> work |

The compiler makes the barriers. A grad_out that TMA cannot read is copied first.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from gdpa_kernels.block_attention.batch import Batch, WorkList
from gdpa_kernels.block_attention.block_list import (
    block_entry,
    count_blocks,
    work_list_recipe,
)
from gdpa_kernels.block_attention.problems import tiles_problem
from gdpa_kernels.block_attention.rotary import load_sin_cos, sin_cos_strides
from gdpa_kernels.block_attention.tiles import softmax_parts
from gdpa_kernels.calling.launch import launch, multiprocessors
from gdpa_kernels.device.ragged import load_rows, ragged_descriptor, store_rows, tma_readable
from gdpa_kernels.device.rotation import rotate, rotate_transposed


@dataclass(frozen=True)
class Config:
    """Launch constants.

    heads_per_program: how many heads of a block follow each other in a program, a divisor of their
    number; 0 means all. slabs_per_program: how many such slabs a program takes; 0 means that
    `programs_per_sm` programs on every SM share them all. num_stages: what the compiler's software
    pipeliner is asked for; part of it goes to the loads of the list.
    """

    heads_per_program: int = 0
    slabs_per_program: int = 0
    programs_per_sm: int = 2
    num_warps: int = 4
    num_stages: int = 2

    def programs(self, slabs: int, device: torch.device) -> int:
        """The number of programs that share at most `slabs` slabs on `device`."""
        if self.slabs_per_program:
            return triton.cdiv(slabs, self.slabs_per_program)
        return min(slabs, multiprocessors(device) * self.programs_per_sm)


def default_config(direction: str, batch: Batch) -> Config:
    """Constants that were fastest in runs without a record: two slabs for each of many programs, or
    one persistent program on an SM where its tiles fill it. With rotary at head_dim 128 backward
    spills where v is rotated too."""
    if batch.rotary is not None:
        if direction == "forward":
            return Config(programs_per_sm=2, num_stages=1)
        return Config(programs_per_sm=1, num_stages=2)
    if direction == "backward" and batch.head_dim == 128:
        return Config(programs_per_sm=1, num_stages=3)
    return Config(slabs_per_program=2, num_stages=3)


def call_problem(batch: Batch) -> str | None:
    """The reason why this rung cannot take a call, beyond `Requires`; None if it can."""
    if batch.group > 1:
        return f"needs as many key heads as query heads, got {batch.group} query heads for one"
    return tiles_problem(batch)


@triton.jit
def count_steps(blocks_ptr, NUM_HEADS: tl.constexpr, HEADS: tl.constexpr):
    """The number of (block, head) that this program works on: HEADS of each of its slabs."""
    slabs = count_blocks(blocks_ptr) * (NUM_HEADS // HEADS)
    return tl.cdiv(slabs - tl.program_id(0), tl.num_programs(0)) * HEADS


@triton.jit
def block_and_head(blocks_ptr, step, NUM_HEADS: tl.constexpr, HEADS: tl.constexpr):
    """(first_row, rows, head) of a step; slabs p, p + P, p + 2 P, ... belong to program p of P."""
    slab = tl.program_id(0) + step // HEADS * tl.num_programs(0)
    SLABS: tl.constexpr = NUM_HEADS // HEADS
    first_row, rows = block_entry(blocks_ptr, slab // SLABS)
    return first_row, rows, slab % SLABS * HEADS + step % HEADS


@triton.jit
def rotated(x, sin, cos, ROTATE: tl.constexpr):
    """x rotated if ROTATE, and rounded to its own dtype again."""
    return rotate(x.to(tl.float32), sin, cos).to(x.dtype) if ROTATE else x


@triton.jit
def rotated_back(gradient, sin, cos, ROTATE: tl.constexpr):
    """A gradient, fp32, rotated back (by the transpose) if ROTATE."""
    return rotate_transposed(gradient, sin, cos) if ROTATE else gradient


@triton.jit
def forward_kernel(
    q_desc, k_desc, v_desc, out_desc, sin_ptr, cos_ptr, blocks_ptr, scale,
    TURN_STRIDES: tl.constexpr, NUM_HEADS: tl.constexpr, HEADS: tl.constexpr,
    ROTATE: tl.constexpr, ROTATE_V: tl.constexpr, BLOCK: tl.constexpr, HEAD_DIM: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """softmax(scale Q K^T) V for the slabs of this program."""
    for step in tl.range(0, count_steps(blocks_ptr, NUM_HEADS, HEADS), num_stages=STAGES):
        first_row, rows, head = block_and_head(blocks_ptr, step, NUM_HEADS, HEADS)
        q = load_rows(q_desc, first_row, rows, head, 0)
        k = load_rows(k_desc, first_row, rows, head, 0)
        v = load_rows(v_desc, first_row, rows, head, 0)
        sin, cos = None, None
        if ROTATE:
            sin, cos = load_sin_cos(
                sin_ptr, cos_ptr, first_row, rows, 0, BLOCK, TURN_STRIDES, HEAD_DIM, HEAD_DIM
            )
        s = tl.dot(rotated(q, sin, cos, ROTATE), rotated(k, sin, cos, ROTATE).T)
        p, total = softmax_parts(s, scale, rows)
        out = tl.dot(p.to(v.dtype), rotated(v, sin, cos, ROTATE_V)) / total[:, None]
        store_rows(out_desc, first_row, rows, head, 0, out.to(v.dtype))


@triton.jit
def backward_kernel(
    grad_desc, q_desc, k_desc, v_desc, dq_desc, dk_desc, dv_desc, sin_ptr, cos_ptr, blocks_ptr,
    scale,
    TURN_STRIDES: tl.constexpr, NUM_HEADS: tl.constexpr, HEADS: tl.constexpr,
    ROTATE: tl.constexpr, ROTATE_V: tl.constexpr, BLOCK: tl.constexpr, HEAD_DIM: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """dq, dk and dv for the slabs of this program."""
    for step in tl.range(0, count_steps(blocks_ptr, NUM_HEADS, HEADS), num_stages=STAGES):
        first_row, rows, head = block_and_head(blocks_ptr, step, NUM_HEADS, HEADS)
        q = load_rows(q_desc, first_row, rows, head, 0)
        k = load_rows(k_desc, first_row, rows, head, 0)
        grad = load_rows(grad_desc, first_row, rows, head, 0)
        v = load_rows(v_desc, first_row, rows, head, 0)
        sin, cos = None, None
        if ROTATE:
            sin, cos = load_sin_cos(
                sin_ptr, cos_ptr, first_row, rows, 0, BLOCK, TURN_STRIDES, HEAD_DIM, HEAD_DIM
            )
        q, k = rotated(q, sin, cos, ROTATE), rotated(k, sin, cos, ROTATE)
        v = rotated(v, sin, cos, ROTATE_V)

        p, total = softmax_parts(tl.dot(q, k.T), scale, rows)
        p = p / total[:, None]
        dp = tl.dot(grad, v.T)
        ds = (p * (dp - tl.sum(p * dp, 1)[:, None]) * scale).to(q.dtype)
        dv = rotated_back(tl.dot(tl.trans(p.to(grad.dtype)), grad), sin, cos, ROTATE_V)
        store_rows(dv_desc, first_row, rows, head, 0, dv.to(v.dtype))
        dq = rotated_back(tl.dot(ds, k), sin, cos, ROTATE)
        store_rows(dq_desc, first_row, rows, head, 0, dq.to(q.dtype))
        dk = rotated_back(tl.dot(tl.trans(ds), q), sin, cos, ROTATE)
        store_rows(dk_desc, first_row, rows, head, 0, dk.to(k.dtype))


def forward(
    batch: Batch, *, config: Config | None = None, work_list: WorkList | None = None
) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]:
    """The output, `[total, num_heads_q, head_dim]`, and what backward needs besides q, k, v:
    nothing."""
    q, k, v = batch.q, batch.k, batch.v
    out = q.new_empty(q.shape)
    config = config or default_config("forward", batch)
    (blocks,) = work_list or work_list_recipe(batch, config).make(*batch.offsets)
    heads = config.heads_per_program or batch.num_heads
    slabs = (len(blocks) - 1) * (batch.num_heads // heads)
    sin, cos = batch.rotary or (None, None)
    launch(
        forward_kernel, (config.programs(slabs, batch.device),), batch.device,
        *(ragged_descriptor(x, batch.block_size) for x in (q, k, v, out)),
        sin, cos, blocks, batch.scale,
        TURN_STRIDES=sin_cos_strides(batch.rotary), NUM_HEADS=batch.num_heads, HEADS=heads,
        ROTATE=batch.rotary is not None, ROTATE_V=batch.rotary is not None and batch.rotate_v,
        BLOCK=batch.block_size, HEAD_DIM=batch.head_dim, STAGES=config.num_stages,
        num_warps=config.num_warps, num_stages=config.num_stages,
    )  # fmt: skip
    return out, ()


def backward(
    grad_out: torch.Tensor, batch: Batch, saved: tuple[torch.Tensor, ...] = (), *,
    config: Config | None = None, work_list: WorkList | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    """(dq, dk, dv), shaped as q, k, v and contiguous."""
    q, k, v = batch.q, batch.k, batch.v
    grad_out = tma_readable(grad_out)
    dq, dk, dv = batch.new_gradients()
    config = config or default_config("backward", batch)
    (blocks,) = work_list or work_list_recipe(batch, config).make(*batch.offsets)
    heads = config.heads_per_program or batch.num_heads
    slabs = (len(blocks) - 1) * (batch.num_heads // heads)
    sin, cos = batch.rotary or (None, None)
    launch(
        backward_kernel, (config.programs(slabs, batch.device),), batch.device,
        *(ragged_descriptor(x, batch.block_size) for x in (grad_out, q, k, v, dq, dk, dv)),
        sin, cos, blocks, batch.scale,
        TURN_STRIDES=sin_cos_strides(batch.rotary), NUM_HEADS=batch.num_heads, HEADS=heads,
        ROTATE=batch.rotary is not None, ROTATE_V=batch.rotary is not None and batch.rotate_v,
        BLOCK=batch.block_size, HEAD_DIM=batch.head_dim, STAGES=config.num_stages,
        num_warps=config.num_warps, num_stages=config.num_stages,
    )  # fmt: skip
    return dq, dk, dv
