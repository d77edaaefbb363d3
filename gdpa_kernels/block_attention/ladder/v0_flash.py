"""v0: FlashAttention-2 on this mask, the fair baseline.

Each block of tokens is treated as a sequence of its own. Forward, a program owns BLOCK_M query rows
and loops over keys in steps of BLOCK_N with a running maximum, and writes the log-sum-exp of every
row. Backward takes three kernels: rowsum(O * dO), then dK and dV by tiles of keys, then dQ by tiles
of queries. Rotary is a kernel of its own, before and after (see rotary.py).

What it costs: with E elements in q, forward moves 4 E. Backward reads out and grad_out for the row
sums, then q, k, v and grad_out twice, and writes three gradients: 13 E where 7 E would do, if no
tile hits in L2. At 32 to 46 FLOP per byte nothing else matters.

| role      | warps     | registers | work                                            |
|-----------|-----------|-----------|-------------------------------------------------|
| all warps | num_warps | up to 255 | loads, both MMAs of a step, the running maximum |

There is no barrier of our own. Deterministic: no atomics.
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
from gdpa_kernels.block_attention.rotary import rotary as rotate_tensors
from gdpa_kernels.block_attention.tiles import LOG2_E, load_tile, store_tile
from gdpa_kernels.calling.launch import cdiv, launch, next_power_of_2


@dataclass(frozen=True)
class Config:
    """Launch constants: rows a program owns, rows of a step of its loop, warps, steps in flight.

    Tiles are never larger than a block.
    """

    BLOCK_M: int = 64
    BLOCK_N: int = 64
    num_warps: int = 4
    num_stages: int = 1


def default_config(direction: str, batch: Batch) -> Config:
    """Tiles of 64 rows; smaller where registers or shared memory run out. Forward, two steps in
    flight, which was faster in runs without a record."""
    rows = min(batch.block_size, 32 if batch.head_dim > 128 else 64)
    stages = 2 if direction == "forward" and batch.head_dim <= 128 else 1
    return Config(BLOCK_M=rows, BLOCK_N=rows, num_stages=stages)


@triton.jit
def tile_of_program(blocks_ptr, TILES: tl.constexpr, TILE: tl.constexpr):
    """(first_row, rows, first): the block of this program and the first of its TILE rows; no rows
    are left from there on where the list or the block has ended."""
    pid = tl.program_id(0)
    block = pid // TILES
    first_row, rows = block_entry(blocks_ptr, block)
    return first_row, tl.where(block < count_blocks(blocks_ptr), rows, 0), pid % TILES * TILE


@triton.jit
def load_lane(ptr, first_row, rows, head, total, ROWS: tl.constexpr):
    """[ROWS] numbers of one head of a contiguous fp32 `[num_heads, total]`; zero beyond `rows`."""
    local = tl.arange(0, ROWS)
    pointers = ptr + (tl.cast(head, tl.int64) * total + first_row)
    return tl.load(pointers + local, mask=local < rows, other=0.0)


@triton.jit
def store_lane(ptr, first_row, rows, head, total, values):
    """The counterpart of `load_lane`."""
    local = tl.arange(0, values.shape[0])
    tl.store(ptr + (tl.cast(head, tl.int64) * total + first_row) + local, values, mask=local < rows)


@triton.jit(do_not_specialize=["total"])
def forward_kernel(
    q_ptr, k_ptr, v_ptr, out_ptr, lse_ptr, blocks_ptr, scale, total,
    Q_STRIDES: tl.constexpr, K_STRIDES: tl.constexpr, V_STRIDES: tl.constexpr,
    OUT_STRIDES: tl.constexpr, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, TILES: tl.constexpr,
):  # fmt: skip
    """out and log2(sum exp) for BLOCK_M queries of one (block, head)."""
    first_row, rows, first_query = tile_of_program(blocks_ptr, TILES, BLOCK_M)
    if first_query >= rows:
        return
    head = tl.program_id(1)
    tile_row, tile_rows = first_row + first_query, rows - first_query
    q = load_tile(q_ptr, tile_row, tile_rows, head, 0, BLOCK_M, Q_STRIDES, HEAD_DIM, BLOCK_D)
    highest = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total_p = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    for first_key in tl.range(0, rows, BLOCK_N):
        row, left = first_row + first_key, rows - first_key
        k = load_tile(k_ptr, row, left, head // GROUP, 0, BLOCK_N, K_STRIDES, HEAD_DIM, BLOCK_D)
        v = load_tile(v_ptr, row, left, head // GROUP, 0, BLOCK_N, V_STRIDES, HEAD_DIM, BLOCK_D)
        t = tl.dot(q, k.T) * (scale * LOG2_E)
        t = tl.where((tl.arange(0, BLOCK_N) < left)[None, :], t, float("-inf"))
        higher = tl.maximum(highest, tl.max(t, 1))
        p = tl.exp2(t - higher[:, None])
        rescale = tl.exp2(highest - higher)
        total_p = total_p * rescale + tl.sum(p, 1)
        acc = tl.dot(p.to(v.dtype), v, acc * rescale[:, None])
        highest = higher
    store_tile(out_ptr, tile_row, tile_rows, head, 0, acc / total_p[:, None], OUT_STRIDES, HEAD_DIM)
    store_lane(lse_ptr, tile_row, tile_rows, head, total, highest + tl.log2(total_p))


@triton.jit(do_not_specialize=["total"])
def delta_kernel(
    out_ptr, grad_ptr, delta_ptr, blocks_ptr, total,
    OUT_STRIDES: tl.constexpr, GRAD_STRIDES: tl.constexpr, HEAD_DIM: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr, TILES: tl.constexpr,
):  # fmt: skip
    """delta = rowsum(out * grad_out) for BLOCK_M queries of one (block, head)."""
    first_row, rows, first_query = tile_of_program(blocks_ptr, TILES, BLOCK_M)
    if first_query >= rows:
        return
    head = tl.program_id(1)
    row, left = first_row + first_query, rows - first_query
    out = load_tile(out_ptr, row, left, head, 0, BLOCK_M, OUT_STRIDES, HEAD_DIM, BLOCK_D)
    grad = load_tile(grad_ptr, row, left, head, 0, BLOCK_M, GRAD_STRIDES, HEAD_DIM, BLOCK_D)
    delta = tl.sum(out.to(tl.float32) * grad.to(tl.float32), 1)
    store_lane(delta_ptr, row, left, head, total, delta)


@triton.jit(do_not_specialize=["total"])
def dk_dv_kernel(
    grad_ptr, q_ptr, k_ptr, v_ptr, dk_ptr, dv_ptr, lse_ptr, delta_ptr, blocks_ptr, scale, total,
    GRAD_STRIDES: tl.constexpr, Q_STRIDES: tl.constexpr, K_STRIDES: tl.constexpr,
    V_STRIDES: tl.constexpr, DK_STRIDES: tl.constexpr,
    GROUP: tl.constexpr, HEAD_DIM: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, TILES: tl.constexpr,
):  # fmt: skip
    """dk and dv for BLOCK_M keys of one (block, key head), looping over BLOCK_N queries.

    Scores are held transposed, [keys, queries], the layout that both MMAs need.
    """
    first_row, rows, first_key = tile_of_program(blocks_ptr, TILES, BLOCK_M)
    if first_key >= rows:
        return
    head_k = tl.program_id(1)
    tile_row, tile_rows = first_row + first_key, rows - first_key
    k = load_tile(k_ptr, tile_row, tile_rows, head_k, 0, BLOCK_M, K_STRIDES, HEAD_DIM, BLOCK_D)
    v = load_tile(v_ptr, tile_row, tile_rows, head_k, 0, BLOCK_M, V_STRIDES, HEAD_DIM, BLOCK_D)
    dk = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    dv = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    for member in tl.range(0, GROUP, num_stages=1):
        head = head_k * GROUP + member
        for first_query in tl.range(0, rows, BLOCK_N):
            row, left = first_row + first_query, rows - first_query
            q = load_tile(q_ptr, row, left, head, 0, BLOCK_N, Q_STRIDES, HEAD_DIM, BLOCK_D)
            grad = load_tile(grad_ptr, row, left, head, 0, BLOCK_N, GRAD_STRIDES, HEAD_DIM, BLOCK_D)
            lse = load_lane(lse_ptr, row, left, head, total, BLOCK_N)
            delta = load_lane(delta_ptr, row, left, head, total, BLOCK_N)
            t = tl.dot(k, q.T) * (scale * LOG2_E)
            p = tl.exp2(t - lse[None, :])
            dv = tl.dot(p.to(grad.dtype), grad, dv)
            dp = tl.dot(v, grad.T)
            ds = p * (dp - delta[None, :]) * scale
            dk = tl.dot(ds.to(q.dtype), q, dk)
    store_tile(dk_ptr, tile_row, tile_rows, head_k, 0, dk, DK_STRIDES, HEAD_DIM)
    store_tile(dv_ptr, tile_row, tile_rows, head_k, 0, dv, DK_STRIDES, HEAD_DIM)


@triton.jit(do_not_specialize=["total"])
def dq_kernel(
    grad_ptr, q_ptr, k_ptr, v_ptr, dq_ptr, lse_ptr, delta_ptr, blocks_ptr, scale, total,
    GRAD_STRIDES: tl.constexpr, Q_STRIDES: tl.constexpr, K_STRIDES: tl.constexpr,
    V_STRIDES: tl.constexpr, DQ_STRIDES: tl.constexpr,
    GROUP: tl.constexpr, HEAD_DIM: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, TILES: tl.constexpr,
):  # fmt: skip
    """dq for BLOCK_M queries of one (block, head), looping over BLOCK_N keys."""
    first_row, rows, first_query = tile_of_program(blocks_ptr, TILES, BLOCK_M)
    if first_query >= rows:
        return
    head = tl.program_id(1)
    tile_row, tile_rows = first_row + first_query, rows - first_query
    q = load_tile(q_ptr, tile_row, tile_rows, head, 0, BLOCK_M, Q_STRIDES, HEAD_DIM, BLOCK_D)
    grad = load_tile(
        grad_ptr, tile_row, tile_rows, head, 0, BLOCK_M, GRAD_STRIDES, HEAD_DIM, BLOCK_D
    )
    lse = load_lane(lse_ptr, tile_row, tile_rows, head, total, BLOCK_M)
    delta = load_lane(delta_ptr, tile_row, tile_rows, head, total, BLOCK_M)
    dq = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    for first_key in tl.range(0, rows, BLOCK_N):
        row, left = first_row + first_key, rows - first_key
        k = load_tile(k_ptr, row, left, head // GROUP, 0, BLOCK_N, K_STRIDES, HEAD_DIM, BLOCK_D)
        v = load_tile(v_ptr, row, left, head // GROUP, 0, BLOCK_N, V_STRIDES, HEAD_DIM, BLOCK_D)
        t = tl.dot(q, k.T) * (scale * LOG2_E)
        t = tl.where((tl.arange(0, BLOCK_N) < left)[None, :], t, float("-inf"))
        p = tl.exp2(t - lse[:, None])
        dp = tl.dot(grad, v.T)
        ds = p * (dp - delta[:, None]) * scale
        dq = tl.dot(ds.to(k.dtype), k, dq)
    store_tile(dq_ptr, tile_row, tile_rows, head, 0, dq, DQ_STRIDES, HEAD_DIM)


def forward(
    batch: Batch, *, config: Config | None = None, work_list: WorkList | None = None
) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]:
    """The output, `[total, num_heads_q, head_dim]`, and what backward needs besides q, k, v: the
    output, the log-sum-exp fp32 `[num_heads_q, total]`, and what was rotated of q, k and v."""
    q, k, v = batch.q, batch.k, batch.v
    rotated = ()
    if batch.rotary is not None:
        q, k, rotated_v = rotate_tensors(q, k, v if batch.rotate_v else None, batch.rotary)
        rotated = (q, k, rotated_v) if batch.rotate_v else (q, k)
        v = rotated_v if batch.rotate_v else v
    out = q.new_empty(q.shape)
    lse = q.new_empty(batch.num_heads, batch.total, dtype=torch.float32)
    config = config or default_config("forward", batch)
    (blocks,) = work_list or work_list_recipe(batch, config).make(*batch.offsets)
    tiles = cdiv(batch.block_size, config.BLOCK_M)
    launch(
        forward_kernel, ((len(blocks) - 1) * tiles, batch.num_heads), batch.device,
        q, k, v, out, lse, blocks, batch.scale, batch.total,
        Q_STRIDES=q.stride(), K_STRIDES=k.stride(), V_STRIDES=v.stride(), OUT_STRIDES=out.stride(),
        GROUP=batch.group, HEAD_DIM=batch.head_dim,
        BLOCK_M=config.BLOCK_M, BLOCK_N=config.BLOCK_N,
        BLOCK_D=next_power_of_2(batch.head_dim), TILES=tiles,
        num_warps=config.num_warps, num_stages=config.num_stages,
    )  # fmt: skip
    return out, (out, lse, *rotated)


def empty_saved(batch: Batch) -> tuple[torch.Tensor, ...]:
    """Empty tensors of the shapes and dtypes that `forward` saves after the output."""
    lse = batch.q.new_empty(batch.num_heads, batch.total, dtype=torch.float32)
    rotated = () if batch.rotary is None else (batch.q, batch.k, batch.v)[: 2 + batch.rotate_v]
    return lse, *(tensor.new_empty(tensor.shape) for tensor in rotated)


def backward(
    grad_out: torch.Tensor, batch: Batch, saved: tuple[torch.Tensor, ...], *,
    config: Config | None = None, work_list: WorkList | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    """(dq, dk, dv), shaped as q, k, v and contiguous."""
    q, k, v = batch.q, batch.k, batch.v
    out, lse = saved[:2]
    if batch.rotary is not None:
        q, k, *rotated_v = saved[2:]
        v = rotated_v[0] if batch.rotate_v else v
    dq, dk, dv = batch.new_gradients()
    delta = torch.empty_like(lse)
    config = config or default_config("backward", batch)
    (blocks,) = work_list or work_list_recipe(batch, config).make(*batch.offsets)
    tiles = cdiv(batch.block_size, config.BLOCK_M)
    programs = (len(blocks) - 1) * tiles
    width = next_power_of_2(batch.head_dim)
    launch(
        delta_kernel, (programs, batch.num_heads), batch.device,
        out, grad_out, delta, blocks, batch.total,
        OUT_STRIDES=out.stride(), GRAD_STRIDES=grad_out.stride(), HEAD_DIM=batch.head_dim,
        BLOCK_M=config.BLOCK_M, BLOCK_D=width, TILES=tiles, num_warps=4,
    )  # fmt: skip
    common = {
        "GRAD_STRIDES": grad_out.stride(), "Q_STRIDES": q.stride(), "K_STRIDES": k.stride(),
        "V_STRIDES": v.stride(), "GROUP": batch.group, "HEAD_DIM": batch.head_dim,
        "BLOCK_M": config.BLOCK_M, "BLOCK_N": config.BLOCK_N, "BLOCK_D": width, "TILES": tiles,
        "num_warps": config.num_warps, "num_stages": config.num_stages,
    }  # fmt: skip
    launch(
        dk_dv_kernel, (programs, batch.num_heads_k), batch.device,
        grad_out, q, k, v, dk, dv, lse, delta, blocks, batch.scale, batch.total,
        DK_STRIDES=dk.stride(), **common,
    )  # fmt: skip
    launch(
        dq_kernel, (programs, batch.num_heads), batch.device,
        grad_out, q, k, v, dq, lse, delta, blocks, batch.scale, batch.total,
        DQ_STRIDES=dq.stride(), **common,
    )  # fmt: skip
    if batch.rotary is not None:
        rotate_tensors(
            dq, dk, dv if batch.rotate_v else None, batch.rotary, transposed=True, in_place=True
        )
    return dq, dk, dv
