"""Pieces of FlashAttention-2 that v1 eliminates, put back one at a time.

Not a rung: v1's kernels at one head per key head and no rotary, with a switch for each thing that
FlashAttention-2 needs and one tile does not. All switches off, it is v1.

| switch     | forward                                     | backward                              |
|------------|---------------------------------------------|---------------------------------------|
| key_loop   | a loop over keys, one trip long             | a loop over queries, one trip long    |
| rescale    | running maximum, sum and output             | (none)                                |
| accumulate | P V is added to an accumulator of the loop  | so are dK and dV                      |
| lse        | log-sum-exp is written                      | ... and read: no maximum, no sum      |
| delta      | (none)                                      | rowsum(O * dO) by a kernel of its own |
| two_passes | (none)                                      | dK and dV, then dQ: two kernels       |

The compiler cannot know that the loops have one trip. Without `key_loop` there is nothing to
accumulate over, so `accumulate` implies it.
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
from gdpa_kernels.block_attention.ladder.v0_flash import delta_kernel, load_lane, store_lane
from gdpa_kernels.block_attention.tiles import LOG2_E, load_tile, softmax_parts, store_tile
from gdpa_kernels.calling.launch import launch, next_power_of_2


@dataclass(frozen=True)
class Config:
    """Switches, one for each piece that is put back, and v1's launch constants."""

    key_loop: bool = False
    rescale: bool = False
    accumulate: bool = False
    lse: bool = False
    delta: bool = False
    two_passes: bool = False
    num_warps: int = 4


def default_config(direction: str, batch: Batch) -> Config:
    """Nothing put back."""
    return Config()


def call_problem(batch: Batch) -> str | None:
    """Name what this study needs of a call and does not get, or None."""
    if batch.rotary is not None:
        return "needs a workload without rotary, got (sin, cos)"
    return None


@triton.jit(do_not_specialize=["total"])
def forward_kernel(
    q_ptr, k_ptr, v_ptr, out_ptr, lse_ptr, blocks_ptr, scale, total,
    Q_STRIDES: tl.constexpr, K_STRIDES: tl.constexpr, V_STRIDES: tl.constexpr,
    OUT_STRIDES: tl.constexpr, NUM_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr,
    BLOCK: tl.constexpr, WIDTH: tl.constexpr,
    KEY_LOOP: tl.constexpr, RESCALE: tl.constexpr, ACCUMULATE: tl.constexpr,
):  # fmt: skip
    """v1's forward kernel, and what is put back; lse_ptr None: no log-sum-exp."""
    block, head = tl.program_id(0) // NUM_HEADS, tl.program_id(0) % NUM_HEADS
    first_row, rows = block_entry(blocks_ptr, block)
    if block >= count_blocks(blocks_ptr):
        return
    q = load_tile(q_ptr, first_row, rows, head, 0, BLOCK, Q_STRIDES, HEAD_DIM, WIDTH)
    highest = tl.full([BLOCK], float("-inf"), tl.float32)
    sums = tl.zeros([BLOCK], tl.float32)
    acc = tl.zeros([BLOCK, WIDTH], tl.float32)
    for first_key in tl.range(0, rows if KEY_LOOP else BLOCK, BLOCK, num_stages=1):
        row, left = first_row + first_key, rows - first_key
        k = load_tile(k_ptr, row, left, head, 0, BLOCK, K_STRIDES, HEAD_DIM, WIDTH)
        v = load_tile(v_ptr, row, left, head, 0, BLOCK, V_STRIDES, HEAD_DIM, WIDTH)
        t = tl.dot(q, k.T) * (scale * LOG2_E)
        t = tl.where((tl.arange(0, BLOCK) < left)[None, :], t, float("-inf"))
        higher = tl.max(t, 1)
        if RESCALE:
            higher = tl.maximum(highest, higher)
        p = tl.exp2(t - higher[:, None])
        if RESCALE:
            factor = tl.exp2(highest - higher)
            sums = sums * factor + tl.sum(p, 1)
            acc = tl.dot(p.to(v.dtype), v, acc * factor[:, None])
        elif ACCUMULATE:
            sums += tl.sum(p, 1)
            acc = tl.dot(p.to(v.dtype), v, acc)
        else:
            sums = tl.sum(p, 1)
            acc = tl.dot(p.to(v.dtype), v)
        highest = higher
    store_tile(out_ptr, first_row, rows, head, 0, acc / sums[:, None], OUT_STRIDES, HEAD_DIM)
    if lse_ptr is not None:
        store_lane(lse_ptr, first_row, rows, head, total, highest + tl.log2(sums))


@triton.jit(do_not_specialize=["total"])
def backward_kernel(
    grad_ptr, q_ptr, k_ptr, v_ptr, dq_ptr, dk_ptr, dv_ptr, lse_ptr, delta_ptr, blocks_ptr,
    scale, total,
    GRAD_STRIDES: tl.constexpr, Q_STRIDES: tl.constexpr, K_STRIDES: tl.constexpr,
    V_STRIDES: tl.constexpr, OUT_STRIDES: tl.constexpr,
    NUM_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK: tl.constexpr, WIDTH: tl.constexpr,
    KEY_LOOP: tl.constexpr, ACCUMULATE: tl.constexpr,
):  # fmt: skip
    """v1's backward kernel, and what is put back.

    lse_ptr or delta_ptr None: computed here. dq_ptr None, or dk_ptr and dv_ptr None: the other pass
    of two.
    """
    block, head = tl.program_id(0) // NUM_HEADS, tl.program_id(0) % NUM_HEADS
    first_row, rows = block_entry(blocks_ptr, block)
    if block >= count_blocks(blocks_ptr):
        return
    k = load_tile(k_ptr, first_row, rows, head, 0, BLOCK, K_STRIDES, HEAD_DIM, WIDTH)
    v = load_tile(v_ptr, first_row, rows, head, 0, BLOCK, V_STRIDES, HEAD_DIM, WIDTH)
    dk = tl.zeros([BLOCK, WIDTH], tl.float32)
    dv = tl.zeros([BLOCK, WIDTH], tl.float32)
    for first_query in tl.range(0, rows if KEY_LOOP else BLOCK, BLOCK, num_stages=1):
        row, left = first_row + first_query, rows - first_query
        q = load_tile(q_ptr, row, left, head, 0, BLOCK, Q_STRIDES, HEAD_DIM, WIDTH)
        grad = load_tile(grad_ptr, row, left, head, 0, BLOCK, GRAD_STRIDES, HEAD_DIM, WIDTH)
        s = tl.dot(q, k.T)
        dp = tl.dot(grad, v.T)
        if lse_ptr is not None:
            lse = load_lane(lse_ptr, row, left, head, total, BLOCK)
            t = tl.where((tl.arange(0, BLOCK) < rows)[None, :], s * (scale * LOG2_E), float("-inf"))
            p = tl.exp2(t - lse[:, None])
        else:
            p, sums = softmax_parts(s, scale, rows)
            p = p / sums[:, None]
        if ACCUMULATE and dv_ptr is not None:
            dv = tl.dot(tl.trans(p.to(grad.dtype)), grad, dv)
        elif dv_ptr is not None:
            dv = tl.dot(tl.trans(p.to(grad.dtype)), grad)
            store_tile(dv_ptr, first_row, rows, head, 0, dv, OUT_STRIDES, HEAD_DIM)
        if delta_ptr is not None:
            delta = load_lane(delta_ptr, row, left, head, total, BLOCK)
        else:
            delta = tl.sum(p * dp, 1)
        ds = (p * (dp - delta[:, None]) * scale).to(q.dtype)
        if dq_ptr is not None:
            store_tile(dq_ptr, row, left, head, 0, tl.dot(ds, k), OUT_STRIDES, HEAD_DIM)
        if ACCUMULATE and dk_ptr is not None:
            dk = tl.dot(tl.trans(ds), q, dk)
        elif dk_ptr is not None:
            dk = tl.dot(tl.trans(ds), q)
            store_tile(dk_ptr, first_row, rows, head, 0, dk, OUT_STRIDES, HEAD_DIM)
    if ACCUMULATE and dk_ptr is not None:
        store_tile(dv_ptr, first_row, rows, head, 0, dv, OUT_STRIDES, HEAD_DIM)
        store_tile(dk_ptr, first_row, rows, head, 0, dk, OUT_STRIDES, HEAD_DIM)


def forward(
    batch: Batch, *, config: Config | None = None, work_list: WorkList | None = None
) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]:
    """As v1's; with `delta` the output and with `lse` the log-sum-exp are kept for backward."""
    q, k, v = batch.q, batch.k, batch.v
    config = config or default_config("", batch)
    (blocks,) = work_list or work_list_recipe(batch, config).make(*batch.offsets)
    out = q.new_empty(q.shape)
    lse = q.new_empty(batch.num_heads, batch.total, dtype=torch.float32) if config.lse else None
    launch(
        forward_kernel, ((len(blocks) - 1) * batch.num_heads,), batch.device,
        q, k, v, out, lse, blocks, batch.scale, batch.total,
        Q_STRIDES=q.stride(), K_STRIDES=k.stride(), V_STRIDES=v.stride(), OUT_STRIDES=out.stride(),
        NUM_HEADS=batch.num_heads, HEAD_DIM=batch.head_dim, BLOCK=batch.block_size,
        WIDTH=next_power_of_2(batch.head_dim),
        KEY_LOOP=config.key_loop or config.accumulate, RESCALE=config.rescale,
        ACCUMULATE=config.accumulate, num_warps=config.num_warps,
    )  # fmt: skip
    return out, (*((out,) if config.delta else ()), *((lse,) if config.lse else ()))


def backward(
    grad_out: torch.Tensor,
    batch: Batch,
    saved: tuple[torch.Tensor, ...] = (),
    *,
    config: Config | None = None,
    work_list: WorkList | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """As v1's, from what `forward` kept with the same config."""
    q, k, v = batch.q, batch.k, batch.v
    config = config or default_config("", batch)
    (blocks,) = work_list or work_list_recipe(batch, config).make(*batch.offsets)
    width = next_power_of_2(batch.head_dim)
    dq, dk, dv = batch.new_gradients()
    lse, delta = saved[-1] if config.lse else None, None
    if config.delta:
        delta = q.new_empty(batch.num_heads, batch.total, dtype=torch.float32)
        launch(
            delta_kernel, ((len(blocks) - 1), batch.num_heads), batch.device,
            saved[0], grad_out, delta, blocks, batch.total,
            OUT_STRIDES=saved[0].stride(), GRAD_STRIDES=grad_out.stride(), HEAD_DIM=batch.head_dim,
            BLOCK_M=batch.block_size, BLOCK_D=width, TILES=1, num_warps=4,
        )  # fmt: skip
    passes = [(None, dk, dv), (dq, None, None)] if config.two_passes else [(dq, dk, dv)]
    for outputs in passes:
        launch(
            backward_kernel, ((len(blocks) - 1) * batch.num_heads,), batch.device,
            grad_out, q, k, v, *outputs, lse, delta, blocks, batch.scale, batch.total,
            GRAD_STRIDES=grad_out.stride(), Q_STRIDES=q.stride(), K_STRIDES=k.stride(),
            V_STRIDES=v.stride(), OUT_STRIDES=dq.stride(), NUM_HEADS=batch.num_heads,
            HEAD_DIM=batch.head_dim, BLOCK=batch.block_size, WIDTH=width,
            KEY_LOOP=config.key_loop or config.accumulate,
            ACCUMULATE=config.accumulate, num_warps=config.num_warps,
        )  # fmt: skip
    return dq, dk, dv
