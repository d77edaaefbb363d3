"""b7: items of 256 rows for CTA pairs, any number of keys.

Changes from b6_pair_stream: each CTA has one tile of 128 rows of an item, and the math roles take
alternate blocks of its keys, counted over all items. O of an item leaves while the next begins.

Why it should help: of a short sequence b6 computes up to 511 rows that are not there. Why it may
not: a block of K and V serves half as many rows, 96 KB of shared memory a tile of 128 x 128 pairs.

| role     | warps | registers | work                                               |
|----------|-------|-----------|----------------------------------------------------|
| output   | 4     | the rest  | O to Q's slot, its TMA store; the slot is free     |
| math (2) | 4     | 192       | activation of 128 rows x every second block        |
| mma      | 1     | 48        | of the leader: S = Q K^T and O += P V of both CTAs |
| load     | 1     | 48        | its rows of Q, its halves of K and V               |

| barrier             | arrivals           | filled by -> drained by                         |
|---------------------|--------------------|-------------------------------------------------|
| q.full[slot]        | 1 and bytes        | TMA loads of both CTAs -> mma                   |
| q.empty[slot]       | 1                  | output, O's store has read the slot -> load     |
| k.full[stage]       | 1 and bytes        | TMA loads of both CTAs' halves of K -> mma      |
| k.empty[stage]      | 1 (commit to both) | S of the block -> load                          |
| v.full[stage]       | 1 and bytes        | TMA loads of both CTAs' halves of V -> mma      |
| v.empty[stage]      | 1 (commit to both) | P V of the block -> load                        |
| s.full[role]        | 1 (commit to both) | S = Q K^T -> math                               |
| p.full[role, slice] | 2, 1 of each CTA   | math, a slice of P is stored, S was read -> mma |
| o.full[slot]        | 1 (commit to both) | the item's last P V -> output                   |
| o.empty[slot]       | 2, 1 of each CTA   | output, O is in registers -> mma, the next O    |

TMEM: S 0-255 (P over it), O 256-511. SMEM: Q 3 x 32 KB, K and V 4 x 16 KB each.
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

ROWS = tl.constexpr(128)  # of a CTA and item
ROLES = tl.constexpr(2)  # of math, a block of keys each
ITEM = tl.constexpr(ROWS.value * CTAS.value)
Q_SLOTS = tl.constexpr(3)  # of Q, and then O, of an item
O_SLOTS = tl.constexpr(2)
ISSUED, BEGINS, ENDS = tl.constexpr(1), tl.constexpr(2), tl.constexpr(4)  # of a block, its item


@dataclass(frozen=True)
class Config:
    """Launch constants.

    num_stages: blocks of K, and of V, in shared memory. slices: of a block's scores, columns: of
    O, in registers at a time. share: of the scores that take a polynomial.
    """

    BLOCK_N: int = 128
    num_stages: int = 4
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
        slot = q.acquire(tile)
        tlx.barrier_expect_bytes(q.full[slot], Q_BYTES, pred=rank == 0)
        row = first + rank * ROWS
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
    """All MMAs, issued by the leader: P V of a block, then S of the block after the next, which is
    the same role's, also across the border of two items."""
    item, pairs = pair_index_and_count()
    num_items = count_items(list_ptr)
    tile, block, count = 0, 0, 0  # of the next S
    out = 0  # the item of the next P V
    older, newer = 0, 0  # of the two blocks before `count`: ISSUED, and whether BEGINS and ENDS
    if (tlx.cluster_cta_rank() == 0) & (item < num_items):
        first, len_k, mask = keys_of(list_ptr, segments_ptr, item, options)
        _, blocks = span_of(first, len_k, mask, ITEM, options)
        following = tl.minimum(item + pairs, num_items - 1)
        # The next item's, loaded an item ahead.
        first, len_k, mask = keys_of(list_ptr, segments_ptr, following, options)
        while (item < num_items) | (older + newer > 0):
            for role in tl.static_range(ROLES):
                if older > 0:
                    begins = (older & BEGINS) > 0
                    done = count - ROLES
                    stage = v.wait(done)
                    o_slot = out % O_SLOTS
                    if begins:
                        o.acquire(out)
                    weighted_sum(
                        role, p, v.buffer[stage], o.buffer[o_slot], done // ROLES, not begins,
                        options,
                    )  # fmt: skip
                    tlx.tcgen05_commit(v.empty[stage], two_ctas=True)
                    if (older & ENDS) > 0:
                        tlx.tcgen05_commit(o.full[o_slot], two_ctas=True)
                        out += 1
                older = newer
                newer = 0
                if item < num_items:
                    stage = k.wait(count)
                    slot = tile % Q_SLOTS
                    if block == 0:
                        q.wait(tile)
                    scores(role, q.buffer[slot], k.buffer[stage], s)
                    tlx.tcgen05_commit(k.empty[stage], two_ctas=True)
                    last = block + 1 == blocks
                    newer = ISSUED + tl.where(block == 0, BEGINS, 0) + tl.where(last, ENDS, 0)
                    block = tl.where(last, 0, block + 1)
                    if last:
                        tile += 1
                        item += pairs
                        _, blocks = span_of(first, len_k, mask, ITEM, options)
                        following = tl.minimum(item + pairs, num_items - 1)
                        first, len_k, mask = keys_of(list_ptr, segments_ptr, following, options)
                count += 1


@triton.jit
def math(role: tl.constexpr, s, p, list_ptr, segments_ptr, scale, options):
    """The activation of a role's blocks of this CTA's rows."""
    WIDTH: tl.constexpr = options.BLOCK_N // options.SLICES
    rank = tlx.cluster_cta_rank()
    item, pairs = pair_index_and_count()
    num_items = count_items(list_ptr)
    count = 0
    while item < num_items:
        _, _, len_q, _, len_k, head, first = entry(list_ptr, item)
        mask = entry_mask(list_ptr, segments_ptr, item, len_q, len_k, options)
        span, blocks = span_of(first, len_k, mask, ITEM, options)
        row = first + rank * ROWS
        for block in tl.range((count + role) % ROLES, blocks, ROLES):
            key = key_of(span, block, options)
            use = (count + block) // ROLES
            tlx.barrier_wait(s.full[role], use & 1)
            for part in tl.static_range(options.SLICES):
                x = tlx.local_load(tlx.subslice(s.buffer[role], part * WIDTH, WIDTH))
                x = mixed_probabilities(x, scale, head, row, key + part * WIDTH, mask, options)
                tlx.local_store(tlx.subslice(p.buffer[2 * role], part * WIDTH, WIDTH), x)
                tlx.barrier_arrive(p.full[role * options.SLICES + part], 1, remote_cta_rank=0)
        count += blocks
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
        slot = tile % Q_SLOTS
        o_slot = o.wait(tile)
        row = first + rank * ROWS
        put_scaled(
            out_desc, o.buffer[o_slot], out[slot], o.empty[o_slot], output_scale, start_out, len_q,
            head, row, options.COLUMNS,
        )  # fmt: skip
        tlx.async_descriptor_store_wait(0)
        tlx.barrier_arrive(q.empty[slot])
        tile += 1
        item += pairs


@triton.jit
def split_stream_kernel(
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
    out = tlx.local_alloc((ROWS, out_desc.block_shape[4]), tlx.dtype_of(out_desc), Q_SLOTS)
    q = out
    if tlx.dtype_of(out_desc) != DTYPE:  # memory is laid out as the first, in wider elements
        q = tlx.local_alloc((ROWS, BLOCK_D), DTYPE, Q_SLOTS, reuse=out)
    k = tlx.local_alloc((BLOCK_N // CTAS, BLOCK_D), DTYPE, NUM_STAGES)
    v = tlx.local_alloc((BLOCK_N, BLOCK_D // CTAS), DTYPE, NUM_STAGES)
    s = tlx.local_alloc((ROWS, BLOCK_N), tl.float32, ROLES, tlx.storage_kind.tmem)
    p = tlx.local_alloc((ROWS, BLOCK_N), DTYPE, 2 * ROLES, tlx.storage_kind.tmem, reuse=s)
    o = tlx.local_alloc((ROWS, BLOCK_D), tl.float32, O_SLOTS, tlx.storage_kind.tmem)
    q = Ring(q, tlx.alloc_barriers(Q_SLOTS), tlx.alloc_barriers(Q_SLOTS), Q_SLOTS)
    k = Ring(k, tlx.alloc_barriers(NUM_STAGES), tlx.alloc_barriers(NUM_STAGES), NUM_STAGES)
    v = Ring(v, tlx.alloc_barriers(NUM_STAGES), tlx.alloc_barriers(NUM_STAGES), NUM_STAGES)
    s = OneWay(s, tlx.alloc_barriers(ROLES))
    p = OneWay(p, tlx.alloc_barriers(ROLES * SLICES, arrive_count=CTAS))
    o = Ring(
        o, tlx.alloc_barriers(O_SLOTS), tlx.alloc_barriers(O_SLOTS, arrive_count=CTAS), O_SLOTS
    )

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
    return launch_forward_pairs(split_stream_kernel, batch, config, entries, ROWS.value)
