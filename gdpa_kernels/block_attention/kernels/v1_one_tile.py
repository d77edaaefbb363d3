"""v1: a block is one tile, so everything FlashAttention-2 does across tiles goes.

Changes from v0_flash: one program owns one block of one head (of one key head, backward) and holds
its whole score matrix. Five things disappear: the loop over keys; the running maximum and its
rescaling; the log-sum-exp written forward and read backward; the kernel that computes rowsum(O *
dO) from the output; the accumulation of gradients over tiles. Backward is one kernel that needs q,
k, v and grad_out alone; rotary is fused into both kernels.

Why it should help: at 32 (forward) and 46 (backward) FLOP per byte only bytes count. v0 backward
reads q, k, v and grad_out twice, out once and grad_out a third time: 13 tensors' worth of traffic
with what it writes. Here it is 7. rowsum(P * dP) equals rowsum(O * dO), and P and dP are here.

| role      | warps     | registers | work                                      |
|-----------|-----------|-----------|-------------------------------------------|
| all warps | num_warps | up to 255 | loads of all tiles, MMAs, softmax, stores |

There is no barrier of our own: a program loads, computes, stores and ends. Overlap comes from the
programs that share an SM.

A head_dim above `Config.WIDTH` is cut: a program sums the scores over all pieces and writes the
piece of the results that its third coordinate names, so the scores are computed once per piece.

This is the general rung: it takes any strides, grouped heads and rotary. Deterministic: no atomics.
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
from gdpa_kernels.block_attention.rotary import load_sin_cos, sin_cos_strides
from gdpa_kernels.block_attention.tiles import load_tile, softmax_parts, store_tile
from gdpa_kernels.calling.launch import cdiv, launch, next_power_of_2, shared_memory
from gdpa_kernels.device.rotation import rotate, rotate_transposed
from gdpa_kernels.device.vendor import precision


@dataclass(frozen=True)
class Config:
    """Launch constants: columns of a tile, warps of a program, and the order of the programs.

    heads_inner: the heads of a block follow each other, as in memory; else the blocks of a head do.
    registers: the most a thread may use, so that more programs share an SM; None leaves it to the
    compiler.
    """

    WIDTH: int = 128
    num_warps: int = 4
    heads_inner: bool = True
    registers: int | None = None


def default_config(direction: str, batch: Batch) -> Config:
    """A tile as wide as the head; narrower or with more warps where registers run out, or shared
    memory, as on sm_86, sm_89 and sm_120: the bytes below are what a kernel takes, compiled.

    Chosen in runs without a record, for blocks of 64 in bf16. Backward with rotary spills at
    head_dim 128 and was faster than with more warps all the same.
    """
    width = next_power_of_2(batch.head_dim)
    if batch.dtype == torch.float32:
        fits = batch.block_size < 128 or shared_memory(batch.device) >= 114_688
        num_warps = {64: 8, 128: 16}.get(batch.block_size, 4)
        return Config(WIDTH=min(width, 32 if fits else 16), num_warps=num_warps)
    if batch.block_size == 128:
        widest = 128 if shared_memory(batch.device) >= 139_264 else 64
        return Config(WIDTH=width if width <= widest else 64, num_warps=8)
    wide = direction == "backward" and width > 64 and batch.block_size == 64
    plain = batch.group == 1 and batch.rotary is None
    return Config(
        WIDTH=min(width, 128),
        num_warps=8 if wide and batch.group > 1 else 4,
        registers=168 if wide and width == 128 and plain else None,
    )


@triton.jit
def block_and_head(blocks_ptr, NUM_HEADS: tl.constexpr, HEADS_INNER: tl.constexpr):
    """(first_row, rows, head) of this program; no rows where the list has ended."""
    pid = tl.program_id(0)
    if HEADS_INNER:
        block, head = pid // NUM_HEADS, pid % NUM_HEADS
    else:
        slots = tl.num_programs(0) // NUM_HEADS
        block, head = pid % slots, pid // slots
    first_row, rows = block_entry(blocks_ptr, block)
    return first_row, tl.where(block < count_blocks(blocks_ptr), rows, 0), head


@triton.jit
def load_rotated(
    ptr, sin_ptr, cos_ptr, first_row, rows, head, first_dim,
    BLOCK: tl.constexpr, STRIDES: tl.constexpr, TURN_STRIDES: tl.constexpr,
    HEAD_DIM: tl.constexpr, WIDTH: tl.constexpr, ROTATE: tl.constexpr,
):  # fmt: skip
    """A tile [BLOCK, WIDTH], rotated if ROTATE and rounded to its own dtype again."""
    x = load_tile(ptr, first_row, rows, head, first_dim, BLOCK, STRIDES, HEAD_DIM, WIDTH)
    if ROTATE:
        sin, cos = load_sin_cos(
            sin_ptr, cos_ptr, first_row, rows, first_dim, BLOCK, TURN_STRIDES, HEAD_DIM, WIDTH
        )
        x = rotate(x.to(tl.float32), sin, cos).to(x.dtype)
    return x


@triton.jit
def forward_kernel(
    q_ptr, k_ptr, v_ptr, out_ptr, sin_ptr, cos_ptr, blocks_ptr, scale,
    Q_STRIDES: tl.constexpr, K_STRIDES: tl.constexpr, V_STRIDES: tl.constexpr,
    OUT_STRIDES: tl.constexpr, TURN_STRIDES: tl.constexpr,
    NUM_HEADS: tl.constexpr, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr,
    ROTATE: tl.constexpr, ROTATE_V: tl.constexpr, HEADS_INNER: tl.constexpr,
    BLOCK: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """softmax(scale Q K^T) V for WIDTH columns of one (block, head)."""
    first_row, rows, head = block_and_head(blocks_ptr, NUM_HEADS, HEADS_INNER)
    if rows == 0:
        return
    PRECISION: tl.constexpr = precision(q_ptr.dtype.element_ty == tl.float32)
    program_dim = tl.program_id(1) * WIDTH if HEAD_DIM > WIDTH else 0
    v = load_rotated(
        v_ptr, sin_ptr, cos_ptr, first_row, rows, head // GROUP, program_dim,
        BLOCK, V_STRIDES, TURN_STRIDES, HEAD_DIM, WIDTH, ROTATE_V,
    )  # fmt: skip
    s = tl.zeros([BLOCK, BLOCK], tl.float32)
    for first_dim in tl.range(0, HEAD_DIM, WIDTH, num_stages=1):
        q = load_rotated(
            q_ptr, sin_ptr, cos_ptr, first_row, rows, head, first_dim,
            BLOCK, Q_STRIDES, TURN_STRIDES, HEAD_DIM, WIDTH, ROTATE,
        )  # fmt: skip
        k = load_rotated(
            k_ptr, sin_ptr, cos_ptr, first_row, rows, head // GROUP, first_dim,
            BLOCK, K_STRIDES, TURN_STRIDES, HEAD_DIM, WIDTH, ROTATE,
        )  # fmt: skip
        s = tl.dot(q, k.T, s, input_precision=PRECISION)
    p, total = softmax_parts(s, scale, rows)
    out = tl.dot(p.to(v.dtype), v, input_precision=PRECISION) / total[:, None]
    store_tile(out_ptr, first_row, rows, head, program_dim, out, OUT_STRIDES, HEAD_DIM)


@triton.jit
def store_gradient(
    ptr, sin_ptr, cos_ptr, first_row, rows, head, first_dim, gradient,
    STRIDES: tl.constexpr, TURN_STRIDES: tl.constexpr, HEAD_DIM: tl.constexpr,
    ROTATE: tl.constexpr,
):  # fmt: skip
    """Write a gradient [rows, width], fp32, rotated back if ROTATE and rounded once."""
    if ROTATE:
        ROWS: tl.constexpr = gradient.shape[0]
        WIDTH: tl.constexpr = gradient.shape[1]
        sin, cos = load_sin_cos(
            sin_ptr, cos_ptr, first_row, rows, first_dim, ROWS, TURN_STRIDES, HEAD_DIM, WIDTH
        )
        gradient = rotate_transposed(gradient, sin, cos)
    store_tile(ptr, first_row, rows, head, first_dim, gradient, STRIDES, HEAD_DIM)


@triton.jit
def backward_kernel(
    grad_ptr, q_ptr, k_ptr, v_ptr, dq_ptr, dk_ptr, dv_ptr, sin_ptr, cos_ptr, blocks_ptr, scale,
    GRAD_STRIDES: tl.constexpr, Q_STRIDES: tl.constexpr, K_STRIDES: tl.constexpr,
    V_STRIDES: tl.constexpr, DQ_STRIDES: tl.constexpr, DK_STRIDES: tl.constexpr,
    TURN_STRIDES: tl.constexpr,
    NUM_HEADS_K: tl.constexpr, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr,
    ROTATE: tl.constexpr, ROTATE_V: tl.constexpr, HEADS_INNER: tl.constexpr,
    BLOCK: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """WIDTH columns of dk and dv of one (block, key head), and of dq of its query heads."""
    first_row, rows, head_k = block_and_head(blocks_ptr, NUM_HEADS_K, HEADS_INNER)
    if rows == 0:
        return
    PRECISION: tl.constexpr = precision(q_ptr.dtype.element_ty == tl.float32)
    program_dim = tl.program_id(1) * WIDTH if HEAD_DIM > WIDTH else 0
    dk = tl.zeros([BLOCK, WIDTH], tl.float32)
    dv = tl.zeros([BLOCK, WIDTH], tl.float32)
    for member in tl.range(0, GROUP, num_stages=1):
        head = head_k * GROUP + member
        s = tl.zeros([BLOCK, BLOCK], tl.float32)
        dp = tl.zeros([BLOCK, BLOCK], tl.float32)
        for first_dim in tl.range(0, HEAD_DIM, WIDTH, num_stages=1):
            q = load_rotated(
                q_ptr, sin_ptr, cos_ptr, first_row, rows, head, first_dim,
                BLOCK, Q_STRIDES, TURN_STRIDES, HEAD_DIM, WIDTH, ROTATE,
            )  # fmt: skip
            k = load_rotated(
                k_ptr, sin_ptr, cos_ptr, first_row, rows, head_k, first_dim,
                BLOCK, K_STRIDES, TURN_STRIDES, HEAD_DIM, WIDTH, ROTATE,
            )  # fmt: skip
            grad = load_tile(
                grad_ptr, first_row, rows, head, first_dim, BLOCK, GRAD_STRIDES, HEAD_DIM, WIDTH
            )
            v = load_rotated(
                v_ptr, sin_ptr, cos_ptr, first_row, rows, head_k, first_dim,
                BLOCK, V_STRIDES, TURN_STRIDES, HEAD_DIM, WIDTH, ROTATE_V,
            )  # fmt: skip
            s = tl.dot(q, k.T, s, input_precision=PRECISION)
            dp = tl.dot(grad, v.T, dp, input_precision=PRECISION)
        # This program's own columns again; with one piece the compiler keeps those it has.
        q = load_rotated(
            q_ptr, sin_ptr, cos_ptr, first_row, rows, head, program_dim,
            BLOCK, Q_STRIDES, TURN_STRIDES, HEAD_DIM, WIDTH, ROTATE,
        )  # fmt: skip
        k = load_rotated(
            k_ptr, sin_ptr, cos_ptr, first_row, rows, head_k, program_dim,
            BLOCK, K_STRIDES, TURN_STRIDES, HEAD_DIM, WIDTH, ROTATE,
        )  # fmt: skip
        grad = load_tile(
            grad_ptr, first_row, rows, head, program_dim, BLOCK, GRAD_STRIDES, HEAD_DIM, WIDTH
        )

        p, total = softmax_parts(s, scale, rows)
        p = p / total[:, None]
        dv = tl.dot(tl.trans(p.to(grad.dtype)), grad, dv, input_precision=PRECISION)
        if member == GROUP - 1:
            store_gradient(
                dv_ptr, sin_ptr, cos_ptr, first_row, rows, head_k, program_dim, dv,
                DK_STRIDES, TURN_STRIDES, HEAD_DIM, ROTATE_V,
            )  # fmt: skip
        ds = (p * (dp - tl.sum(p * dp, 1)[:, None]) * scale).to(q.dtype)
        dq = tl.dot(ds, k, input_precision=PRECISION)
        store_gradient(
            dq_ptr, sin_ptr, cos_ptr, first_row, rows, head, program_dim, dq,
            DQ_STRIDES, TURN_STRIDES, HEAD_DIM, ROTATE,
        )  # fmt: skip
        dk = tl.dot(tl.trans(ds), q, dk, input_precision=PRECISION)
    store_gradient(
        dk_ptr, sin_ptr, cos_ptr, first_row, rows, head_k, program_dim, dk,
        DK_STRIDES, TURN_STRIDES, HEAD_DIM, ROTATE,
    )  # fmt: skip


def forward(
    batch: Batch, *, config: Config | None = None, work_list: WorkList | None = None
) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]:
    """The output, `[total, num_heads_q, head_dim]`, and what backward needs besides q, k, v:
    nothing."""
    q, k, v = batch.q, batch.k, batch.v
    out = q.new_empty(q.shape)
    config = config or default_config("forward", batch)
    (blocks,) = work_list or work_list_recipe(batch, config).make(*batch.offsets)
    sin, cos = batch.rotary or (None, None)
    launch(
        forward_kernel,
        ((len(blocks) - 1) * batch.num_heads, cdiv(batch.head_dim, config.WIDTH)),
        batch.device, q, k, v, out, sin, cos, blocks, batch.scale,
        Q_STRIDES=q.stride(), K_STRIDES=k.stride(), V_STRIDES=v.stride(), OUT_STRIDES=out.stride(),
        TURN_STRIDES=sin_cos_strides(batch.rotary),
        NUM_HEADS=batch.num_heads, GROUP=batch.group, HEAD_DIM=batch.head_dim,
        ROTATE=batch.rotary is not None, ROTATE_V=batch.rotary is not None and batch.rotate_v,
        HEADS_INNER=config.heads_inner, BLOCK=batch.block_size, WIDTH=config.WIDTH,
        num_warps=config.num_warps, maxnreg=config.registers,
    )  # fmt: skip
    return out, ()


def backward(
    grad_out: torch.Tensor, batch: Batch, saved: tuple[torch.Tensor, ...] = (), *,
    config: Config | None = None, work_list: WorkList | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    """(dq, dk, dv), shaped as q, k, v and contiguous."""
    q, k, v = batch.q, batch.k, batch.v
    dq, dk, dv = batch.new_gradients()
    config = config or default_config("backward", batch)
    (blocks,) = work_list or work_list_recipe(batch, config).make(*batch.offsets)
    sin, cos = batch.rotary or (None, None)
    launch(
        backward_kernel,
        ((len(blocks) - 1) * batch.num_heads_k, cdiv(batch.head_dim, config.WIDTH)),
        batch.device, grad_out, q, k, v, dq, dk, dv, sin, cos, blocks, batch.scale,
        GRAD_STRIDES=grad_out.stride(), Q_STRIDES=q.stride(), K_STRIDES=k.stride(),
        V_STRIDES=v.stride(), DQ_STRIDES=dq.stride(), DK_STRIDES=dk.stride(),
        TURN_STRIDES=sin_cos_strides(batch.rotary),
        NUM_HEADS_K=batch.num_heads_k, GROUP=batch.group, HEAD_DIM=batch.head_dim,
        ROTATE=batch.rotary is not None, ROTATE_V=batch.rotary is not None and batch.rotate_v,
        HEADS_INNER=config.heads_inner, BLOCK=batch.block_size, WIDTH=config.WIDTH,
        num_warps=config.num_warps, maxnreg=config.registers,
    )  # fmt: skip
    return dq, dk, dv
