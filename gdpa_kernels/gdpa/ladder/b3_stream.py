"""b3: one stream of MMAs across tiles.

Changes from b2_two_tiles: the programs are persistent, one for each SM, and take their items from
v8's work list. Where b2 ends, the `mma` role goes on with the first S of the next item: after a
tile's own last P V and before the other tile's. Loads run ahead across items; the output leaves
through a buffer of its own, by an asynchronous store.

Why it should help: b2 begins and ends each tile with nothing to overlap: Q, K, S at the start, the
last P V and the store at the end. With 256 keys, two blocks, that is most of a tile's time.
Why it may not: there is room for one Q of each tile, so the next one is loaded only when the last S
of this one is complete: at two blocks of keys the stream waits for that load.

| role     | warps | registers | work                                                   |
|----------|-------|-----------|--------------------------------------------------------|
| math (2) | 4     | up to 168 | of a tile: P = activation(S), one row a thread; output |
| load     | 1     | the same  | Q of both tiles, then K and V in turn                  |
| mma      | 1     | the same  | S = Q K^T and O += P V of both tiles                   |

| barrier             | arrivals    | filled by -> drained by                         |
|---------------------|-------------|-------------------------------------------------|
| q.full[tile]        | 1 and bytes | TMA load of a tile's Q -> mma                   |
| q.empty[tile]       | 1 (commit)  | the tile's last S -> load                       |
| kv.full[stage]      | 1 and bytes | TMA load of a block of K or V -> mma            |
| kv.empty[stage]     | 1 (commit)  | both tiles' MMAs that read it -> load           |
| s.full[tile]        | 1 (commit)  | S = Q K^T -> math                               |
| p.full[tile, slice] | 128 threads | math, a slice of P is stored, S was read -> mma |
| o.full[tile]        | 1 (commit)  | the item's last P V -> math                     |

O needs no barrier back: a math role reads it before it stores the P that overwrites it.
TMEM: S 0-255 (P over it), O 256-511.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
import triton.language.extra.tlx as tlx

from gdpa_kernels.calling.launch import launch, multiprocessors
from gdpa_kernels.device.groups import OneWay, Ring
from gdpa_kernels.device.ragged import ragged_descriptor
from gdpa_kernels.device.rows import fetch_rows, put_rows
from gdpa_kernels.gdpa.batch import Batch, WorkList
from gdpa_kernels.gdpa.device.activations import multiply_add_packed
from gdpa_kernels.gdpa.device.polynomial import mixed_packed
from gdpa_kernels.gdpa.device.work_list import ZigzagRecipe, count_items, entry, query_list_recipe
from gdpa_kernels.gdpa.published_form import packed_call_problem

call_problem = packed_call_problem

ROWS = tl.constexpr(128)
TILES = tl.constexpr(2)
BLOCK_M = tl.constexpr(TILES.value * ROWS.value)


@dataclass(frozen=True)
class Config:
    """Launch constants: keys of a block, buffers of K and V together, parts in which P is
    handed over; the share of the scores that takes a polynomial, 0.25 in b4_mixed."""

    BLOCK_N: int = 128
    num_stages: int = 3
    slices: int = 2
    share: float = 0.0


def default_config(batch: Batch) -> Config:
    """Constants that at head_dim 128 take 64 KB for Q, 96 for K and V, 64 for the output."""
    return Config()


def work_list_recipe(batch: Batch, config: Config) -> ZigzagRecipe:
    """The work list of these sequences."""
    return query_list_recipe(batch, BLOCK_M.value, config.BLOCK_N)


@triton.aggregate
class Options:
    """The constants that the roles share."""

    DTYPE: tl.constexpr
    ACTIVATION: tl.constexpr
    BLOCK_N: tl.constexpr
    NUM_STAGES: tl.constexpr
    SLICES: tl.constexpr
    SHARE: tl.constexpr


@triton.jit
def blocks_of(len_k, options):
    """Blocks of keys of an item. At least one: without keys it is zero."""
    return tl.maximum(tl.cdiv(len_k, options.BLOCK_N), 1)


@triton.jit
def load(q_desc, k_desc, v_desc, q, kv, list_ptr, options):
    """The producer: K and V in turn, as far ahead as there are buffers; Q after its first K."""
    item = tl.program_id(0)
    num_items = count_items(list_ptr)
    tile, step = 0, 0
    while item < num_items:
        start_q, _, len_q, start_k, len_k, head, first_row = entry(list_ptr, item)
        for block in tl.range(0, blocks_of(len_k, options)):
            first_key = block * options.BLOCK_N
            fetch_kv(k_desc, kv, 2 * step, start_k, len_k, head, first_key, options)
            if block == 0:  # a buffer for K is free before those of Q are
                for role in tl.static_range(TILES):
                    tlx.barrier_wait(q.empty[role], (tile & 1) ^ 1)
                    row = first_row + role * ROWS
                    fetch_rows(q_desc, q.buffer[role], q.full[role], start_q, len_q, head, row)
            fetch_kv(v_desc, kv, 2 * step + 1, start_k, len_k, head, first_key, options)
            step += 1
        tile += 1
        item += tl.num_programs(0)


@triton.jit
def fetch_kv(desc, kv, count, start, length, head, first_key, options):
    """Block `count` of the ring: K of step i is 2 i, V of it 2 i + 1."""
    stage = count % options.NUM_STAGES
    tlx.barrier_wait(kv.empty[stage], ((count // options.NUM_STAGES) & 1) ^ 1)
    fetch_rows(desc, kv.buffer[stage], kv.full[stage], start, length, head, first_key)


@triton.jit
def wait_kv(kv, count, options):
    """The buffer of block `count` of the ring, once it is filled."""
    stage = count % options.NUM_STAGES
    tlx.barrier_wait(kv.full[stage], (count // options.NUM_STAGES) & 1)
    return stage


@triton.jit
def scores(role: tl.constexpr, q, k_buffer, s, last):
    """S = Q K^T of a tile, over the P that its last P V has read: MMAs run in order."""
    tlx.async_dot(
        q.buffer[role], tlx.local_trans(k_buffer), s.buffer[role], use_acc=False,
        mBarriers=[s.full[role]],
    )  # fmt: skip
    if last:
        tlx.tcgen05_commit(q.empty[role])


@triton.jit
def weighted_sum(role: tl.constexpr, p, v_buffer, o, step, first, options):
    """O += P V of a tile, slice by slice of the keys; first: O = P V."""
    WIDTH: tl.constexpr = options.BLOCK_N // options.SLICES
    for part in tl.static_range(options.SLICES):
        tlx.barrier_wait(p.full[role * options.SLICES + part], step & 1)
        weights = tlx.subslice(p.buffer[TILES * role], part * WIDTH, WIDTH)
        values = tlx.local_slice(v_buffer, [part * WIDTH, 0], [WIDTH, v_buffer.shape[1]])
        fresh = first if part == 0 else False
        tlx.async_dot(weights, values, o.buffer[role], use_acc=not fresh, force_async=True)


@triton.jit
def mma(q, kv, s, p, o, list_ptr, options):
    """All MMAs, from one thread: P V of the first tile, its next S, the same of the second.

    The next S is that of the next block, or of the next item. `step` counts blocks, `tile` items.
    """
    item = tl.program_id(0)
    num_items = count_items(list_ptr)
    tile, step = 0, 0
    if item < num_items:
        _, _, _, _, len_k, _, _ = entry(list_ptr, item)
        blocks = blocks_of(len_k, options)
        stage = wait_kv(kv, 0, options)
        for role in tl.static_range(TILES):
            tlx.barrier_wait(q.full[role], 0)
            scores(role, q, kv.buffer[stage], s, blocks == 1)
        tlx.tcgen05_commit(kv.empty[stage])
        while item < num_items:
            item += tl.num_programs(0)
            _, _, _, _, len_k, _, _ = entry(list_ptr, tl.minimum(item, num_items - 1))
            next_blocks = blocks_of(len_k, options)
            for block in tl.range(0, blocks, num_stages=0):
                border = block + 1 == blocks
                more = (item < num_items) | (block + 1 < blocks)
                last = tl.where(border, next_blocks == 1, block + 2 == blocks)
                v_stage = wait_kv(kv, 2 * step + 1, options)
                k_stage = (2 * step + 2) % options.NUM_STAGES
                for role in tl.static_range(TILES):
                    weighted_sum(role, p, kv.buffer[v_stage], o, step, block == 0, options)
                    if role == TILES - 1:
                        tlx.tcgen05_commit(kv.empty[v_stage])
                    if border:
                        tlx.tcgen05_commit(o.full[role])
                    if more:
                        if border:
                            tlx.barrier_wait(q.full[role], (tile & 1) ^ 1)
                        if role == 0:
                            wait_kv(kv, 2 * step + 2, options)
                        scores(role, q, kv.buffer[k_stage], s, last)
                if more:
                    tlx.tcgen05_commit(kv.empty[k_stage])
                step += 1
            blocks = next_blocks
            tile += 1


@triton.jit
def math(role: tl.constexpr, s, p, o, out_desc, out, list_ptr, scale, output_scale, options):
    """A consumer: the activation of every block of its tiles, and their output."""
    WIDTH: tl.constexpr = options.BLOCK_N // options.SLICES
    item = tl.program_id(0)
    num_items = count_items(list_ptr)
    tile, step = 0, 0
    while item < num_items:
        _, start_out, len_q, _, len_k, head, first_row = entry(list_ptr, item)
        first_row += role * ROWS
        for _ in tl.range(0, blocks_of(len_k, options)):
            tlx.barrier_wait(s.full[role], step & 1)
            for part in tl.static_range(options.SLICES):
                x = tlx.local_load(tlx.subslice(s.buffer[role], part * WIDTH, WIDTH))
                x, t = mixed_packed(x, scale, options.ACTIVATION, options.SHARE)
                x = multiply_add_packed(x, t, x)
                tlx.local_store(tlx.subslice(p.buffer[TILES * role], part * WIDTH, WIDTH), x)
                tlx.barrier_arrive(p.full[role * options.SLICES + part])
            step += 1
        tlx.barrier_wait(o.full[role], tile & 1)
        acc = tlx.local_load(o.buffer[role])
        tlx.async_descriptor_store_wait(0)
        rows = (acc * output_scale).to(options.DTYPE)
        put_rows(out_desc, out[role], start_out, len_q, head, first_row, rows)
        tile += 1
        item += tl.num_programs(0)
    tlx.async_descriptor_store_wait(0)


@triton.jit
def stream_kernel(
    q_desc, k_desc, v_desc, out_desc, list_ptr, scale, output_scale,
    ACTIVATION: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
    NUM_STAGES: tl.constexpr, SLICES: tl.constexpr, SHARE: tl.constexpr,
):  # fmt: skip
    """output_scale * activation(scale * Q K^T) V for the listed work of this program."""
    DTYPE: tl.constexpr = tlx.dtype_of(q_desc)
    options = Options(DTYPE, ACTIVATION, BLOCK_N, NUM_STAGES, SLICES, SHARE)
    q = tlx.local_alloc((ROWS, BLOCK_D), DTYPE, TILES)
    kv = tlx.local_alloc((BLOCK_N, BLOCK_D), DTYPE, NUM_STAGES)
    out = tlx.local_alloc((ROWS, BLOCK_D), DTYPE, TILES)
    s = tlx.local_alloc((ROWS, BLOCK_N), tl.float32, TILES, tlx.storage_kind.tmem)
    p = tlx.local_alloc((ROWS, BLOCK_N), DTYPE, 2 * TILES, tlx.storage_kind.tmem, reuse=s)
    o = tlx.local_alloc((ROWS, BLOCK_D), tl.float32, TILES, tlx.storage_kind.tmem)
    q = Ring(q, tlx.alloc_barriers(TILES), tlx.alloc_barriers(TILES), 1)
    kv = Ring(kv, tlx.alloc_barriers(NUM_STAGES), tlx.alloc_barriers(NUM_STAGES), NUM_STAGES)
    s = OneWay(s, tlx.alloc_barriers(TILES))
    p = OneWay(p, tlx.alloc_warp_barrier(TILES * SLICES, 4))
    o = OneWay(o, tlx.alloc_barriers(TILES))

    with tlx.async_tasks():
        with tlx.async_task("default", replicate=TILES):
            math(
                tlx.async_task_replica_id(), s, p, o, out_desc, out, list_ptr,
                scale, output_scale, options,
            )  # fmt: skip
        with tlx.async_task(num_warps=1):
            load(q_desc, k_desc, v_desc, q, kv, list_ptr, options)
        with tlx.async_task(num_warps=1):
            mma(q, kv, s, p, o, list_ptr, options)


def forward(
    batch: Batch, *, config: Config | None = None, work_list: WorkList | None = None
) -> torch.Tensor:
    """The output, `[total_q, num_heads, head_dim]`."""
    out = batch.new_out()
    config = config or default_config(batch)
    (entries,) = work_list or work_list_recipe(batch, config).make(*batch.offsets)
    programs = min(multiprocessors(batch.device), len(entries) - 1)
    launch(
        stream_kernel, (programs,), batch.device,
        ragged_descriptor(batch.q, ROWS.value), ragged_descriptor(batch.k, config.BLOCK_N),
        ragged_descriptor(batch.v, config.BLOCK_N), ragged_descriptor(out, ROWS.value),
        entries, batch.scale, batch.output_scale * batch.scale / 2,
        ACTIVATION=batch.names, BLOCK_N=config.BLOCK_N, BLOCK_D=batch.head_dim,
        NUM_STAGES=config.num_stages, SLICES=config.slices, SHARE=config.share, num_warps=4,
    )  # fmt: skip
    return out
