"""b6: CTA pairs for any number of keys.

Changes from b5_cta_pair: K and V stream by in blocks of 128 keys. A math role owns a tile of 128
rows again, two tiles in each CTA and item. O leaves through its Q's slot: there are two for each.

Why it should help: as in b5 each CTA reads half of K and V for itself, and a block that is loaded
once serves 512 rows: 80 KB of shared memory a tile of 128 x 128 pairs, where b4 moves 128.
Why it may not: an item has 512 rows, whatever the sequence has left.

| role     | warps | registers | work                                               |
|----------|-------|-----------|----------------------------------------------------|
| output   | 4     | the rest  | O to Q's slot, its TMA store; the slot is free     |
| math (2) | 4     | 192       | activation of its 128 rows x 128 keys              |
| mma      | 1     | 48        | of the leader: S = Q K^T and O += P V of both CTAs |
| load     | 1     | 48        | its rows of Q, its halves of K and V               |

| barrier             | arrivals           | filled by -> drained by                         |
|---------------------|--------------------|-------------------------------------------------|
| q.full[slot]        | 1 and bytes        | TMA loads of both CTAs -> mma                   |
| q.empty[slot]       | 1                  | output, O's store has read the slot -> load     |
| k.full[stage]       | 1 and bytes        | TMA loads of both CTAs' halves of K -> mma      |
| k.empty[stage]      | 1 (commit to both) | both roles' S of the block -> load              |
| v.full[stage]       | 1 and bytes        | TMA loads of both CTAs' halves of V -> mma      |
| v.empty[stage]      | 1 (commit to both) | both roles' P V of the block -> load            |
| s.full[role]        | 1 (commit to both) | S = Q K^T -> math                               |
| p.full[role, slice] | 2, 1 of each CTA   | math, a slice of P is stored, S was read -> mma |
| o.full[role]        | 1 (commit to both) | the item's last P V -> output                   |
| o.empty[role]       | 2, 1 of each CTA   | output, O is in registers -> mma, the next O    |

TMEM: S 0-255 (P over it), O 256-511. SMEM: Q 4 x 32 KB, K and V 3 x 16 KB each.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
import triton.language.extra.tlx as tlx

from gdpa_kernels.device.groups import OneWay, Ring
from gdpa_kernels.device.pairs import (
    CTAS,
    fetch_part,
    pair_index_and_count,
    put_scaled,
    scores,
    weighted_sum,
)
from gdpa_kernels.gdpa.batch import Batch, WorkList
from gdpa_kernels.gdpa.device.pair_streams import Options, keys_of, launch_forward_pairs
from gdpa_kernels.gdpa.device.polynomial import mixed_probabilities
from gdpa_kernels.gdpa.device.query_tiles import key_of, span_of
from gdpa_kernels.gdpa.device.segments import entry_mask
from gdpa_kernels.gdpa.device.work_list import ZigzagRecipe, count_items, entry, query_list_recipe

ROWS = tl.constexpr(128)  # of a CTA and tile
ROLES = tl.constexpr(2)  # of math, a tile each
ITEM = tl.constexpr(ROWS.value * CTAS.value * ROLES.value)
Q_ITEMS = tl.constexpr(2)  # whose Q, and then O, are in shared memory


@dataclass(frozen=True)
class Config:
    """Launch constants.

    num_stages: blocks of K, and of V, in shared memory. slices: of a tile's scores, columns: of
    O, in registers at a time. share: of the scores that take a polynomial.
    """

    BLOCK_N: int = 128
    num_stages: int = 3
    slices: int = 2
    columns: int = 32
    registers: int = 192
    share: float = 0.25


def default_config(batch: Batch) -> Config:
    """Narrower slices where a mask or a choice of activation takes registers."""
    return Config(slices=4 if batch.masked or len(batch.activation) > 1 else 2)


def work_list_recipe(batch: Batch, config: Config) -> ZigzagRecipe:
    """The work list of these sequences."""
    return query_list_recipe(batch, ITEM.value, config.BLOCK_N, CTAS.value)


@triton.jit
def load(q_desc, k_desc, v_desc, q, k, v, list_ptr, segments_ptr, options):
    """The producer of a CTA; the leader's also expects the bytes of both."""
    BYTES: tl.constexpr = options.BLOCK_N * options.BLOCK_D * tlx.size_of(options.DTYPE)
    Q_BYTES: tl.constexpr = CTAS * ROWS * options.BLOCK_D * tlx.size_of(options.DTYPE)
    rank = tlx.cluster_cta_rank()
    item, pairs = pair_index_and_count()
    num_items = count_items(list_ptr)
    tile, count = 0, 0
    while item < num_items:
        start_q, _, len_q, start_k, len_k, head, first = entry(list_ptr, item)
        mask = entry_mask(list_ptr, segments_ptr, item, len_q, len_k, options)
        span, blocks = span_of(first, len_k, mask, ITEM, options)
        for role in tl.static_range(ROLES):
            slot = tile % Q_ITEMS * ROLES + role
            tlx.barrier_wait(q.empty[slot], ((tile // Q_ITEMS) & 1) ^ 1)
            tlx.barrier_expect_bytes(q.full[slot], Q_BYTES, pred=rank == 0)
            row = first + (role * CTAS + rank) * ROWS
            fetch_part(q_desc, q.buffer[slot], q.full[slot], start_q, len_q, head, row, 0)
        tile += 1
        for block in tl.range(0, blocks):
            stage = count % options.NUM_STAGES
            free = ((count // options.NUM_STAGES) & 1) ^ 1
            kv_head = head // options.GROUP
            key = key_of(span, block, options)
            cta_key = key + rank * (options.BLOCK_N // CTAS)
            column = rank * (options.BLOCK_D // CTAS)
            tlx.barrier_wait(k.empty[stage], free)
            tlx.barrier_expect_bytes(k.full[stage], BYTES, pred=rank == 0)
            fetch_part(k_desc, k.buffer[stage], k.full[stage], start_k, len_k, kv_head, cta_key, 0)
            tlx.barrier_wait(v.empty[stage], free)
            tlx.barrier_expect_bytes(v.full[stage], BYTES, pred=rank == 0)
            fetch_part(v_desc, v.buffer[stage], v.full[stage], start_k, len_k, kv_head, key, column)
            count += 1
        item += pairs


@triton.jit
def mma(q, k, v, s, p, o, list_ptr, segments_ptr, options):
    """All MMAs, issued by the leader: for each tile P V of a block, then S of the next block, also
    across the border of two items."""
    NUM_STAGES: tl.constexpr = options.NUM_STAGES
    item, pairs = pair_index_and_count()
    num_items = count_items(list_ptr)
    tile, count, block = 0, 0, 0
    if (tlx.cluster_cta_rank() == 0) & (item < num_items):
        first, len_k, mask = keys_of(list_ptr, segments_ptr, item, options)
        _, blocks = span_of(first, len_k, mask, ITEM, options)
        following = tl.minimum(item + pairs, num_items - 1)
        # The next item's, loaded an item ahead.
        first, len_k, mask = keys_of(list_ptr, segments_ptr, following, options)
        tlx.barrier_wait(k.full[0], 0)
        for role in tl.static_range(ROLES):
            tlx.barrier_wait(q.full[role], 0)
            scores(role, q.buffer[role], k.buffer[0], s)
        tlx.tcgen05_commit(k.empty[0], two_ctas=True)
        while item < num_items:
            continued = block > 0
            last = block + 1 == blocks
            o_free = (tile & 1) ^ 1
            item += tl.where(last, pairs, 0)
            tile += tl.where(last, 1, 0)
            block = tl.where(last, 0, block + 1)
            if last:
                _, blocks = span_of(first, len_k, mask, ITEM, options)
                following = tl.minimum(item + pairs, num_items - 1)
                first, len_k, mask = keys_of(list_ptr, segments_ptr, following, options)
            v_stage = count % NUM_STAGES
            stage = (count + 1) % NUM_STAGES
            tlx.barrier_wait(v.full[v_stage], (count // NUM_STAGES) & 1)
            for role in tl.static_range(ROLES):
                slot = tile % Q_ITEMS * ROLES + role
                if not continued:
                    tlx.barrier_wait(o.empty[role], o_free)
                weighted_sum(role, p, v.buffer[v_stage], o.buffer[role], count, continued, options)
                if role == ROLES - 1:
                    tlx.tcgen05_commit(v.empty[v_stage], two_ctas=True)
                if last:
                    tlx.tcgen05_commit(o.full[role], two_ctas=True)
                if item < num_items:
                    if role == 0:
                        tlx.barrier_wait(k.full[stage], ((count + 1) // NUM_STAGES) & 1)
                    if last:
                        tlx.barrier_wait(q.full[slot], (tile // Q_ITEMS) & 1)
                    scores(role, q.buffer[slot], k.buffer[stage], s)
                    if role == ROLES - 1:
                        tlx.tcgen05_commit(k.empty[stage], two_ctas=True)
            count += 1


@triton.jit
def math(role: tl.constexpr, s, p, list_ptr, segments_ptr, scale, options):
    """The activation of a role's tile of this CTA."""
    WIDTH: tl.constexpr = options.BLOCK_N // options.SLICES
    rank = tlx.cluster_cta_rank()
    item, pairs = pair_index_and_count()
    num_items = count_items(list_ptr)
    count = 0
    while item < num_items:
        _, _, len_q, _, len_k, head, first = entry(list_ptr, item)
        mask = entry_mask(list_ptr, segments_ptr, item, len_q, len_k, options)
        span, blocks = span_of(first, len_k, mask, ITEM, options)
        row = first + (role * CTAS + rank) * ROWS
        for block in tl.range(0, blocks):
            key = key_of(span, block, options)
            tlx.barrier_wait(s.full[role], count & 1)
            for part in tl.static_range(options.SLICES):
                x = tlx.local_load(tlx.subslice(s.buffer[role], part * WIDTH, WIDTH))
                x = mixed_probabilities(x, scale, head, row, key + part * WIDTH, mask, options)
                tlx.local_store(tlx.subslice(p.buffer[2 * role], part * WIDTH, WIDTH), x)
                tlx.barrier_arrive(p.full[role * options.SLICES + part], 1, remote_cta_rank=0)
            count += 1
        item += pairs


@triton.jit
def output(out_desc, out, q, o, list_ptr, output_scale, options):
    """O from tensor memory to Q's slot, and from there to memory; then the slot is free."""
    rank = tlx.cluster_cta_rank()
    item, pairs = pair_index_and_count()
    num_items = count_items(list_ptr)
    tile = 0
    while item < num_items:
        _, start_out, len_q, _, _, head, first = entry(list_ptr, item)
        for role in tl.static_range(ROLES):
            row = first + (role * CTAS + rank) * ROWS
            slot = tile % Q_ITEMS * ROLES + role
            tlx.barrier_wait(o.full[role], tile & 1)
            put_scaled(
                out_desc, o.buffer[role], out[slot], o.empty[role], output_scale, start_out, len_q,
                head, row, options.COLUMNS,
            )  # fmt: skip
            tlx.async_descriptor_store_wait(0)
            tlx.barrier_arrive(q.empty[slot])
        tile += 1
        item += pairs


@triton.jit
def pair_stream_kernel(
    q_desc, k_desc, v_desc, out_desc, list_ptr, scale, output_scale,
    GROUP: tl.constexpr, ACTIVATION: tl.constexpr, PACKED: tl.constexpr, CAUSAL: tl.constexpr,
    WINDOW: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, NUM_STAGES: tl.constexpr,
    SLICES: tl.constexpr, COLUMNS: tl.constexpr, SHARE: tl.constexpr, REGISTERS: tl.constexpr,
    LOWER_RIGHT: tl.constexpr = False, segments_ptr=None, TARGET_GROUP: tl.constexpr = 1,
    FULL_ROWS: tl.constexpr = 0, OWN_RANKS: tl.constexpr = False,
):  # fmt: skip
    """output_scale * activation(scale * Q K^T) V for the listed work of this pair of CTAs."""
    DTYPE: tl.constexpr = tlx.dtype_of(q_desc)
    options = Options(
        GROUP, ACTIVATION, PACKED, CAUSAL, WINDOW, DTYPE, BLOCK_N, BLOCK_D, NUM_STAGES, SLICES,
        COLUMNS, SHARE, LOWER_RIGHT, segments_ptr is not None, TARGET_GROUP, FULL_ROWS, OWN_RANKS,
    )  # fmt: skip
    out = tlx.local_alloc((ROWS, out_desc.block_shape[4]), tlx.dtype_of(out_desc), Q_ITEMS * ROLES)
    q = out
    if tlx.dtype_of(out_desc) != DTYPE:  # memory is laid out as the first, in wider elements
        q = tlx.local_alloc((ROWS, BLOCK_D), DTYPE, Q_ITEMS * ROLES, reuse=out)
    k = tlx.local_alloc((BLOCK_N // CTAS, BLOCK_D), DTYPE, NUM_STAGES)
    v = tlx.local_alloc((BLOCK_N, BLOCK_D // CTAS), DTYPE, NUM_STAGES)
    s = tlx.local_alloc((ROWS, BLOCK_N), tl.float32, ROLES, tlx.storage_kind.tmem)
    p = tlx.local_alloc((ROWS, BLOCK_N), DTYPE, 2 * ROLES, tlx.storage_kind.tmem, reuse=s)
    o = tlx.local_alloc((ROWS, BLOCK_D), tl.float32, ROLES, tlx.storage_kind.tmem)
    q = Ring(q, tlx.alloc_barriers(Q_ITEMS * ROLES), tlx.alloc_barriers(Q_ITEMS * ROLES), Q_ITEMS)
    k = Ring(k, tlx.alloc_barriers(NUM_STAGES), tlx.alloc_barriers(NUM_STAGES), NUM_STAGES)
    v = Ring(v, tlx.alloc_barriers(NUM_STAGES), tlx.alloc_barriers(NUM_STAGES), NUM_STAGES)
    s = OneWay(s, tlx.alloc_barriers(ROLES))
    p = OneWay(p, tlx.alloc_barriers(ROLES * SLICES, arrive_count=CTAS))
    o = Ring(o, tlx.alloc_barriers(ROLES), tlx.alloc_barriers(ROLES, arrive_count=CTAS), 1)

    with tlx.async_tasks():
        with tlx.async_task("default"):
            output(out_desc, out, q, o, list_ptr, output_scale, options)
        with tlx.async_task(num_warps=4, registers=REGISTERS, replicate=ROLES):
            math(tlx.async_task_replica_id(), s, p, list_ptr, segments_ptr, scale, options)
        with tlx.async_task(num_warps=1, registers=48):
            mma(q, k, v, s, p, o, list_ptr, segments_ptr, options)
        with tlx.async_task(num_warps=1, registers=48):
            load(q_desc, k_desc, v_desc, q, k, v, list_ptr, segments_ptr, options)


def forward(
    batch: Batch, *, config: Config | None = None, work_list: WorkList | None = None
) -> torch.Tensor:
    """The output, `[total_q, num_heads, head_dim]`."""
    config = config or default_config(batch)
    (entries,) = work_list or work_list_recipe(batch, config).make(*batch.offsets)
    return launch_forward_pairs(pair_stream_kernel, batch, config, entries, ROWS.value)
