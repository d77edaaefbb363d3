"""b2: two tiles of queries.

Changes from b1_tensor_memory: a program has two tiles of 128 queries, each with its S and O in
tensor memory and a math role; the `mma` role issues P V of a tile and then its next S while the
other tile's activation runs. P is handed over in slices of 64 keys. Both tiles share K and V.

Why it should help: a block of both tiles needs 2048 cycles of MMA and 2048 of tanh at head_dim 128;
now they run side by side.
Why it may not: shared memory is as busy (256 KB at 128 bytes a cycle), so any wait shows, and a
program still begins and ends alone: load, S, then at the end P V and the store.

| role     | warps | registers | work                                                   |
|----------|-------|-----------|--------------------------------------------------------|
| math (2) | 4     | up to 168 | of a tile: P = activation(S), one row a thread; output |
| load     | 1     | the same  | Q of both tiles, then K and V in turn                  |
| mma      | 1     | the same  | S = Q K^T and O += P V of both tiles                   |

| barrier             | arrivals    | filled by -> drained by                         |
|---------------------|-------------|-------------------------------------------------|
| q.full[tile]        | 1 and bytes | TMA load of a tile's Q -> mma                   |
| kv.full[stage]      | 1 and bytes | TMA load of a block of K or V -> mma            |
| kv.empty[stage]     | 1 (commit)  | both tiles' MMAs that read it -> load           |
| s.full[tile]        | 1 (commit)  | S = Q K^T -> math                               |
| p.full[tile, slice] | 128 threads | math, a slice of P is stored, S was read -> mma |
| o.full[tile]        | 1 (commit)  | the last P V -> math                            |

TMEM: S 0-255 (P over it), O 256-511.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
import triton.language.extra.tlx as tlx

from gdpa_kernels.calling.launch import launch
from gdpa_kernels.device.groups import OneWay, Ring
from gdpa_kernels.device.ragged import ragged_descriptor, store_rows
from gdpa_kernels.device.rows import fetch_rows
from gdpa_kernels.device.sequences import sequence
from gdpa_kernels.gdpa.batch import Batch
from gdpa_kernels.gdpa.device.activations import multiply_add_packed, tanh_packed
from gdpa_kernels.gdpa.published_form import packed_call_problem

call_problem = packed_call_problem

ROWS = tl.constexpr(128)
TILES = tl.constexpr(2)


@dataclass(frozen=True)
class Config:
    """Launch constants: keys of a block, buffers of K and V together, parts in which P is
    handed over."""

    BLOCK_N: int = 128
    num_stages: int = 3
    slices: int = 2


def default_config(batch: Batch) -> Config:
    """Constants that at head_dim 128 take 64 KB for Q, 96 for K and V, 64 for the output."""
    return Config()


@triton.aggregate
class Options:
    """The constants that the roles share."""

    DTYPE: tl.constexpr
    ACTIVATION: tl.constexpr
    BLOCK_N: tl.constexpr
    NUM_STAGES: tl.constexpr
    SLICES: tl.constexpr


@triton.jit
def load(q_desc, k_desc, v_desc, q, kv, tile, options):
    """The producer: Q once, then K and V of one block after the other, in one ring of buffers."""
    blocks, first_row, head, len_k, len_q, start_k, _, start_q = tile
    for block in tl.range(0, blocks):
        first_key = block * options.BLOCK_N
        fetch_kv(k_desc, kv, 2 * block, start_k, len_k, head, first_key, options)
        if block == 0:
            for role in tl.static_range(TILES):
                row = first_row + role * ROWS
                fetch_rows(q_desc, q.buffer[role], q.full[role], start_q, len_q, head, row)
        fetch_kv(v_desc, kv, 2 * block + 1, start_k, len_k, head, first_key, options)


@triton.jit
def fetch_kv(desc, kv, count, start, length, head, first_key, options):
    """Block `count` of the ring: K of block i is 2 i, V of it 2 i + 1."""
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
def scores(role: tl.constexpr, q, k_buffer, s):
    """S = Q K^T of a tile, over the P that its last P V has read: MMAs run in order."""
    tlx.async_dot(
        q.buffer[role], tlx.local_trans(k_buffer), s.buffer[role], use_acc=False,
        mBarriers=[s.full[role]],
    )  # fmt: skip


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
def mma(q, kv, s, p, o, blocks, options):
    """All MMAs, from one thread: P V of the first tile, its next S, the same of the second."""
    if blocks > 0:
        stage = wait_kv(kv, 0, options)
        for role in tl.static_range(TILES):
            tlx.barrier_wait(q.full[role], 0)
            scores(role, q, kv.buffer[stage], s)
        tlx.tcgen05_commit(kv.empty[stage])
    for block in tl.range(0, blocks, num_stages=0):
        v_stage = wait_kv(kv, 2 * block + 1, options)
        k_stage = (2 * block + 2) % options.NUM_STAGES
        for role in tl.static_range(TILES):
            weighted_sum(role, p, kv.buffer[v_stage], o, block, block == 0, options)
            if role == TILES - 1:
                tlx.tcgen05_commit(kv.empty[v_stage])
            if block + 1 < blocks:
                if role == 0:
                    wait_kv(kv, 2 * block + 2, options)
                scores(role, q, kv.buffer[k_stage], s)
            else:
                tlx.tcgen05_commit(o.full[role])
        if block + 1 < blocks:
            tlx.tcgen05_commit(kv.empty[k_stage])


@triton.jit
def math(role: tl.constexpr, s, p, o, out_desc, tile, scale, output_scale, options):
    """A consumer: the activation of every block of its tile, and the output."""
    WIDTH: tl.constexpr = options.BLOCK_N // options.SLICES
    blocks, first_row, head, _, len_q, _, start_out, _ = tile
    first_row += role * ROWS
    for block in tl.range(0, blocks):
        tlx.barrier_wait(s.full[role], block & 1)
        for part in tl.static_range(options.SLICES):
            x = tlx.local_load(tlx.subslice(s.buffer[role], part * WIDTH, WIDTH))
            x, t = tanh_packed(x, scale, options.ACTIVATION)
            x = multiply_add_packed(x, t, x)
            tlx.local_store(tlx.subslice(p.buffer[TILES * role], part * WIDTH, WIDTH), x)
            tlx.barrier_arrive(p.full[role * options.SLICES + part])
    if blocks > 0:
        tlx.barrier_wait(o.full[role], 0)
        acc = tlx.local_load(o.buffer[role])
        store_rows(
            out_desc, start_out, len_q, head, first_row, (acc * output_scale).to(options.DTYPE)
        )


@triton.jit(do_not_specialize=["max_seqlen_q"])
def two_tiles_kernel(
    q_desc, k_desc, v_desc, out_desc, cu_seqlens_q_ptr, cu_seqlens_k_ptr,
    max_seqlen_q, scale, output_scale,
    NUM_HEADS: tl.constexpr, ACTIVATION: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr, NUM_STAGES: tl.constexpr, SLICES: tl.constexpr,
):  # fmt: skip
    """output_scale * activation(scale * Q K^T) V for 256 rows of one (sequence, head)."""
    BLOCK_M: tl.constexpr = TILES * ROWS
    DTYPE: tl.constexpr = tlx.dtype_of(q_desc)
    options = Options(DTYPE, ACTIVATION, BLOCK_N, NUM_STAGES, SLICES)
    blocks = tl.cdiv(max_seqlen_q, BLOCK_M)
    pid = tl.program_id(0)
    first_row = pid % blocks * BLOCK_M
    head = pid // blocks % NUM_HEADS
    start_q, start_out, len_q, start_k, len_k = sequence(
        cu_seqlens_q_ptr, cu_seqlens_k_ptr, pid // blocks // NUM_HEADS, max_seqlen_q
    )
    # Where there are rows, at least one block: without keys it is zero, and writes O. 0: no rows.
    blocks = tl.where(first_row < len_q, tl.maximum(tl.cdiv(len_k, BLOCK_N), 1), 0)
    tile = blocks, first_row, head, len_k, len_q, start_k, start_out, start_q

    q = tlx.local_alloc((ROWS, BLOCK_D), DTYPE, TILES)
    kv = tlx.local_alloc((BLOCK_N, BLOCK_D), DTYPE, NUM_STAGES)
    s = tlx.local_alloc((ROWS, BLOCK_N), tl.float32, TILES, tlx.storage_kind.tmem)
    p = tlx.local_alloc((ROWS, BLOCK_N), DTYPE, 2 * TILES, tlx.storage_kind.tmem, reuse=s)
    o = tlx.local_alloc((ROWS, BLOCK_D), tl.float32, TILES, tlx.storage_kind.tmem)
    q = OneWay(q, tlx.alloc_barriers(TILES))
    kv = Ring(kv, tlx.alloc_barriers(NUM_STAGES), tlx.alloc_barriers(NUM_STAGES), NUM_STAGES)
    s = OneWay(s, tlx.alloc_barriers(TILES))
    p = OneWay(p, tlx.alloc_warp_barrier(TILES * SLICES, 4))
    o = OneWay(o, tlx.alloc_barriers(TILES))

    with tlx.async_tasks():
        with tlx.async_task("default", replicate=TILES):
            math(
                tlx.async_task_replica_id(), s, p, o, out_desc, tile,
                scale, output_scale, options,
            )  # fmt: skip
        with tlx.async_task(num_warps=1):
            load(q_desc, k_desc, v_desc, q, kv, tile, options)
        with tlx.async_task(num_warps=1):
            mma(q, kv, s, p, o, blocks, options)


def forward(batch: Batch, *, config: Config | None = None) -> torch.Tensor:
    """The output, `[total_q, num_heads, head_dim]`."""
    out = batch.new_out()
    config = config or default_config(batch)
    tiles = triton.cdiv(batch.max_seqlen_q, TILES.value * ROWS.value)
    launch(
        two_tiles_kernel,
        (tiles * batch.num_heads * batch.sequences,), batch.device,
        ragged_descriptor(batch.q, ROWS.value), ragged_descriptor(batch.k, config.BLOCK_N),
        ragged_descriptor(batch.v, config.BLOCK_N), ragged_descriptor(out, ROWS.value),
        batch.cu_seqlens_q, batch.cu_seqlens_k, batch.max_seqlen_q, batch.scale,
        batch.output_scale * batch.scale / 2,
        NUM_HEADS=batch.num_heads, ACTIVATION=batch.names, BLOCK_N=config.BLOCK_N,
        BLOCK_D=batch.head_dim, NUM_STAGES=config.num_stages, SLICES=config.slices, num_warps=4,
    )  # fmt: skip
    return out
