"""b1: accumulators in tensor memory.

Changes from v4_warp_specialized: on sm_100 one thread issues an MMA, and its accumulator is in
tensor memory (TMEM): 128 lanes, one for each row of a tile, and 512 columns of 4 bytes. So the MMAs
get a role of their own; the consumer, of 128 rows, is left with the activation, v7's in pairs. P is
stored over the S that it was made of, and P V reads it there.

Why it should help: S and O of 128 rows take 256 columns; as registers, 256 in each of 128 threads.
Why it may not: S, activation and P V of a block wait for each other. At head_dim 128 the MMAs take
1024 cycles a block and so do its 16384 tanh, 16 a cycle: at least half of the time no MMA runs.

| role | warps | registers | work                                        |
|------|-------|-----------|---------------------------------------------|
| math | 4     | up to 255 | P = activation(S), one row a thread; output |
| load | 1     | the same  | Q once, then K and V in turn                |
| mma  | 1     | the same  | one thread issues S = Q K^T and O += P V    |

| barrier         | arrivals    | filled by -> drained by                |
|-----------------|-------------|----------------------------------------|
| q.full          | 1 and bytes | TMA load of 128 rows of Q -> mma       |
| kv.full[stage]  | 1 and bytes | TMA load of a block of K or V -> mma   |
| kv.empty[stage] | 1 (commit)  | the MMA that read it, S or P V -> load |
| s.full          | 1 (commit)  | S = Q K^T -> math                      |
| p.full          | 128 threads | math, P is stored, S was read -> mma   |
| o.full          | 1 (commit)  | the last P V -> math                   |

TMEM: S 0-127, P in 0-63, O 128-255.
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


@dataclass(frozen=True)
class Config:
    """Launch constants: keys of a block, buffers of K and V together, parts in which a row of S
    passes through registers."""

    BLOCK_N: int = 128
    num_stages: int = 3
    slices: int = 2


def default_config(batch: Batch) -> Config:
    """Constants that at head_dim 128 take 32 KB for Q, 96 for K and V, 32 for the output."""
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
    if blocks > 0:
        fetch_rows(q_desc, q.buffer[0], q.full[0], start_q, len_q, head, first_row)
    for block in tl.range(0, blocks):
        first_key = block * options.BLOCK_N
        fetch_kv(k_desc, kv, 2 * block, start_k, len_k, head, first_key, options)
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
def mma(q, kv, s, p, o, blocks, options):
    """All MMAs, from one thread: they run in the order of their issue. num_stages 0: else the
    compiler pipelines them too, with commits and waits of its own."""
    if blocks > 0:
        tlx.barrier_wait(q.full[0], 0)
    for block in tl.range(0, blocks, num_stages=0):
        stage = wait_kv(kv, 2 * block, options)
        tlx.async_dot(
            q.buffer[0], tlx.local_trans(kv.buffer[stage]), s.buffer[0], use_acc=False,
            mBarriers=[kv.empty[stage], s.full[0]],
        )  # fmt: skip
        stage = wait_kv(kv, 2 * block + 1, options)
        tlx.barrier_wait(p.full[0], block & 1)
        tlx.async_dot(
            p.buffer[0], kv.buffer[stage], o.buffer[0], use_acc=block > 0,
            mBarriers=[kv.empty[stage]],
        )  # fmt: skip
    tlx.tcgen05_commit(o.full[0])


@triton.jit
def math(s, p, o, out_desc, tile, scale, output_scale, options):
    """The consumer: the activation of every block, and the output."""
    WIDTH: tl.constexpr = options.BLOCK_N // options.SLICES
    blocks, first_row, head, _, len_q, _, start_out, _ = tile
    for block in tl.range(0, blocks):
        tlx.barrier_wait(s.full[0], block & 1)
        for part in tl.static_range(options.SLICES):
            x = tlx.local_load(tlx.subslice(s.buffer[0], part * WIDTH, WIDTH))
            x, t = tanh_packed(x, scale, options.ACTIVATION)
            x = multiply_add_packed(x, t, x)
            tlx.local_store(tlx.subslice(p.buffer[0], part * WIDTH, WIDTH), x)
        tlx.barrier_arrive(p.full[0])
    if blocks > 0:
        tlx.barrier_wait(o.full[0], 0)
        acc = tlx.local_load(o.buffer[0])
        store_rows(
            out_desc, start_out, len_q, head, first_row, (acc * output_scale).to(options.DTYPE)
        )


@triton.jit(do_not_specialize=["max_seqlen_q"])
def tensor_memory_kernel(
    q_desc, k_desc, v_desc, out_desc, cu_seqlens_q_ptr, cu_seqlens_k_ptr,
    max_seqlen_q, scale, output_scale,
    NUM_HEADS: tl.constexpr, ACTIVATION: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr, NUM_STAGES: tl.constexpr, SLICES: tl.constexpr,
):  # fmt: skip
    """output_scale * activation(scale * Q K^T) V for 128 rows of one (sequence, head)."""
    DTYPE: tl.constexpr = tlx.dtype_of(q_desc)
    options = Options(DTYPE, ACTIVATION, BLOCK_N, NUM_STAGES, SLICES)
    blocks = tl.cdiv(max_seqlen_q, ROWS)
    pid = tl.program_id(0)
    first_row = pid % blocks * ROWS
    head = pid // blocks % NUM_HEADS
    start_q, start_out, len_q, start_k, len_k = sequence(
        cu_seqlens_q_ptr, cu_seqlens_k_ptr, pid // blocks // NUM_HEADS, max_seqlen_q
    )
    # Where there are rows, at least one block: without keys it is zero, and writes O. 0: no rows.
    blocks = tl.where(first_row < len_q, tl.maximum(tl.cdiv(len_k, BLOCK_N), 1), 0)
    tile = blocks, first_row, head, len_k, len_q, start_k, start_out, start_q

    q = tlx.local_alloc((ROWS, BLOCK_D), DTYPE, 1)
    kv = tlx.local_alloc((BLOCK_N, BLOCK_D), DTYPE, NUM_STAGES)
    s = tlx.local_alloc((ROWS, BLOCK_N), tl.float32, 1, tlx.storage_kind.tmem)
    p = tlx.local_alloc((ROWS, BLOCK_N), DTYPE, 1, tlx.storage_kind.tmem, reuse=s)
    o = tlx.local_alloc((ROWS, BLOCK_D), tl.float32, 1, tlx.storage_kind.tmem)
    q = OneWay(q, tlx.alloc_barriers(1))
    kv = Ring(kv, tlx.alloc_barriers(NUM_STAGES), tlx.alloc_barriers(NUM_STAGES), NUM_STAGES)
    s = OneWay(s, tlx.alloc_barriers(1))
    p = OneWay(p, tlx.alloc_warp_barrier(1, 4))
    o = OneWay(o, tlx.alloc_barriers(1))

    with tlx.async_tasks():
        with tlx.async_task("default"):
            math(s, p, o, out_desc, tile, scale, output_scale, options)
        with tlx.async_task(num_warps=1):
            load(q_desc, k_desc, v_desc, q, kv, tile, options)
        with tlx.async_task(num_warps=1):
            mma(q, kv, s, p, o, blocks, options)


def forward(batch: Batch, *, config: Config | None = None) -> torch.Tensor:
    """The output, `[total_q, num_heads, head_dim]`."""
    out = batch.new_out()
    config = config or default_config(batch)
    tiles = triton.cdiv(batch.max_seqlen_q, ROWS.value)
    launch(
        tensor_memory_kernel,
        (tiles * batch.num_heads * batch.sequences,), batch.device,
        ragged_descriptor(batch.q, ROWS.value), ragged_descriptor(batch.k, config.BLOCK_N),
        ragged_descriptor(batch.v, config.BLOCK_N), ragged_descriptor(out, ROWS.value),
        batch.cu_seqlens_q, batch.cu_seqlens_k, batch.max_seqlen_q, batch.scale,
        batch.output_scale * batch.scale / 2,
        NUM_HEADS=batch.num_heads, ACTIVATION=batch.names, BLOCK_N=config.BLOCK_N,
        BLOCK_D=batch.head_dim, NUM_STAGES=config.num_stages, SLICES=config.slices, num_warps=4,
    )  # fmt: skip
    return out
