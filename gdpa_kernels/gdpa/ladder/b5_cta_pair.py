"""b5: CTA pairs; short K and V stay, in halves.

Changes from b4_mixed: clusters of two CTAs and MMAs of 256 rows (cta_group::2). K and V of at most
256 keys stay while Q streams by; a math role owns 128 keys, not rows; a role of its own stores O.

Why it should help: each CTA holds half of K's rows and of V's columns, which the MMAs of both read:
64 KB of shared memory a tile of 128 x 128 pairs where b4 moves 128, and K and V come once.
Why it may not: keys beyond a sequence's are computed too.

| role     | warps | registers | work                                               |
|----------|-------|-----------|----------------------------------------------------|
| output   | 4     | the rest  | O to a buffer, its TMA store                       |
| math (2) | 4     | 192       | activation of 128 rows x its 128 keys              |
| mma      | 1     | 48        | of the leader: S = Q K^T and O += P V of both CTAs |
| load     | 1     | 48        | its rows of Q, its halves of K and V               |

| barrier             | arrivals           | filled by -> drained by                         |
|---------------------|--------------------|-------------------------------------------------|
| q.full[slot]        | 1 and bytes        | TMA loads of Q of both CTAs -> mma              |
| q.empty[slot]       | 1 (commit to both) | both roles' S of the tile -> load               |
| k.full[stage], v's  | 1 and bytes        | TMA loads of K and V of both CTAs -> mma        |
| k.empty[stage], v's | 1 (commit to both) | the item's last P V -> load                     |
| s.full[role]        | 1 (commit to both) | S = Q K^T -> math                               |
| p.full[role, slice] | 2, 1 of each CTA   | math, a slice of P is stored, S was read -> mma |
| o.full[slot]        | 1 (commit to both) | the tile's last P V -> output                   |
| o.empty[slot]       | 2, 1 of each CTA   | output, O is in registers -> mma, the next O    |

TMEM: S 0-255 (P over it), O 256-511. SMEM: Q 2 x 32 KB, O 32, K, V 128.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
import triton.language.extra.tlx as tlx

from gdpa_kernels.calling.launch import launch, multiprocessors
from gdpa_kernels.device.groups import OneWay, Ring
from gdpa_kernels.device.pairs import (
    CTAS,
    fetch_part,
    move_columns,
    pair_index_and_count,
    scores,
    weighted_sum,
)
from gdpa_kernels.device.ragged import BOUND, ragged_descriptor
from gdpa_kernels.gdpa.batch import Batch, WorkList
from gdpa_kernels.gdpa.device.activations import multiply_add_packed
from gdpa_kernels.gdpa.device.polynomial import mixed_packed
from gdpa_kernels.gdpa.device.work_list import ZigzagRecipe, count_items, entry, query_list_recipe
from gdpa_kernels.gdpa.published_form import packed_call_problem

ROWS = tl.constexpr(128)  # of a CTA and tile
KEYS = tl.constexpr(128)  # of a math role
ROLES = tl.constexpr(2)
TILE = tl.constexpr(ROWS.value * CTAS.value)
MOST_KEYS = KEYS.value * ROLES.value
Q_SLOTS = tl.constexpr(2)
NUM_STAGES = tl.constexpr(2)  # of K and V of an item
O_SLOTS = tl.constexpr(2)


@dataclass(frozen=True)
class Config:
    """Launch constants. slices: of a role's scores, columns: of O, in registers at a time. share:
    of the scores that take a polynomial."""

    slices: int = 2
    columns: int = 32
    registers: int = 192
    share: float = 0.25

    def rows_per_item(self, max_seqlen_q: int) -> int:
        """All rows of a sequence: K and V are loaded once."""
        return max(-(-max_seqlen_q // TILE.value), 1) * TILE.value


def call_problem(batch: Batch) -> str | None:
    """The reason why this rung cannot take a call, beyond `Requires`; None if it can."""
    if batch.max_seqlen_k > MOST_KEYS:
        return f"needs a max_seqlen_k of at most {MOST_KEYS}, got {batch.max_seqlen_k}"
    return packed_call_problem(batch)


def default_config(batch: Batch) -> Config:
    """The same for every call."""
    return Config()


def work_list_recipe(batch: Batch, config: Config) -> ZigzagRecipe:
    """The work list of these sequences."""
    rows = config.rows_per_item(batch.max_seqlen_q)
    return query_list_recipe(batch, rows, MOST_KEYS, CTAS.value)


@triton.aggregate
class Options:
    """The constants that the roles share."""

    ACTIVATION: tl.constexpr
    DTYPE: tl.constexpr
    BLOCK_D: tl.constexpr
    SLICES: tl.constexpr
    COLUMNS: tl.constexpr
    SHARE: tl.constexpr


@triton.jit
def tiles_of(len_q, first, rows_per_item):
    """Tiles of an item."""
    return tl.cdiv(tl.minimum(len_q - first, rows_per_item), TILE)


@triton.jit
def load(q_desc, k_desc, v_desc, q, k, v, list_ptr, rows_per_item, options):
    """The producer of a CTA; the leader's also expects the bytes of both."""
    BYTES: tl.constexpr = 2 * ROLES * KEYS * options.BLOCK_D * tlx.size_of(options.DTYPE)
    Q_BYTES: tl.constexpr = CTAS * ROWS * options.BLOCK_D * tlx.size_of(options.DTYPE)
    rank = tlx.cluster_cta_rank()
    item, pairs = pair_index_and_count()
    num_items = count_items(list_ptr)
    tile, count = 0, 0
    while item < num_items:
        start_q, _, len_q, start_k, len_k, head, first = entry(list_ptr, item)
        stage = count % NUM_STAGES
        tlx.barrier_wait(k.empty[stage], ((count // NUM_STAGES) & 1) ^ 1)
        tlx.barrier_expect_bytes(k.full[stage], BYTES, pred=rank == 0)
        for role in tl.static_range(ROLES):
            key = role * KEYS
            cta_key = key + rank * (KEYS // CTAS)
            column = rank * (options.BLOCK_D // CTAS)
            half = stage * ROLES + role
            fetch_part(k_desc, k.buffer[half], k.full[stage], start_k, len_k, head, cta_key, 0)
            fetch_part(v_desc, v.buffer[half], k.full[stage], start_k, len_k, head, key, column)
        count += 1
        for step in tl.range(0, tiles_of(len_q, first, rows_per_item)):
            slot = tile % Q_SLOTS
            tlx.barrier_wait(q.empty[slot], ((tile // Q_SLOTS) & 1) ^ 1)
            tlx.barrier_expect_bytes(q.full[slot], Q_BYTES, pred=rank == 0)
            row = first + step * TILE + rank * ROWS
            fetch_part(q_desc, q.buffer[slot], q.full[slot], start_q, len_q, head, row, 0)
            tile += 1
        item += pairs


@triton.jit
def mma(q, k, v, s, p, o, list_ptr, rows_per_item, options):
    """All MMAs, issued by the leader: for each math role P V of a tile, then S of the next tile,
    also across the border of two items."""
    item, pairs = pair_index_and_count()
    num_items = count_items(list_ptr)
    tile, count, step = 0, 0, 0
    if (tlx.cluster_cta_rank() == 0) & (item < num_items):
        _, _, len_q, _, _, _, first = entry(list_ptr, item)
        tiles = tiles_of(len_q, first, rows_per_item)
        # The next item's, loaded an item ahead.
        _, _, len_q, _, _, _, first = entry(list_ptr, tl.minimum(item + pairs, num_items - 1))
        tlx.barrier_wait(k.full[0], 0)
        tlx.barrier_wait(q.full[0], 0)
        for role in tl.static_range(ROLES):
            scores(role, q.buffer[0], k.buffer[role], s)
        tlx.tcgen05_commit(q.empty[0], two_ctas=True)
        while item < num_items:
            last = step + 1 == tiles
            item_stage = count % NUM_STAGES
            item += tl.where(last, pairs, 0)
            count += tl.where(last, 1, 0)
            step = tl.where(last, 0, step + 1)
            if last:
                tiles = tiles_of(len_q, first, rows_per_item)
                following = tl.minimum(item + pairs, num_items - 1)
                _, _, len_q, _, _, _, first = entry(list_ptr, following)
            stage = count % NUM_STAGES
            slot = (tile + 1) % Q_SLOTS
            out = tile % O_SLOTS
            tlx.barrier_wait(o.empty[out], ((tile // O_SLOTS) & 1) ^ 1)
            for role in tl.static_range(ROLES):
                values = v.buffer[item_stage * ROLES + role]
                weighted_sum(role, p, values, o.buffer[out], tile, role > 0, options)
                if role == ROLES - 1:
                    if last:
                        tlx.tcgen05_commit(k.empty[item_stage], two_ctas=True)
                    tlx.tcgen05_commit(o.full[out], two_ctas=True)
                if item < num_items:
                    if role == 0:
                        tlx.barrier_wait(k.full[stage], (count // NUM_STAGES) & 1)
                        tlx.barrier_wait(q.full[slot], ((tile + 1) // Q_SLOTS) & 1)
                    scores(role, q.buffer[slot], k.buffer[stage * ROLES + role], s)
                    if role == ROLES - 1:
                        tlx.tcgen05_commit(q.empty[slot], two_ctas=True)
            tile += 1


@triton.jit
def math(role: tl.constexpr, s, p, list_ptr, rows_per_item, scale, options):
    """The activation of this CTA's rows for the keys of a role."""
    WIDTH: tl.constexpr = KEYS // options.SLICES
    item, pairs = pair_index_and_count()
    num_items = count_items(list_ptr)
    count = 0
    while item < num_items:
        _, _, len_q, _, _, _, first = entry(list_ptr, item)
        for _ in tl.range(0, tiles_of(len_q, first, rows_per_item)):
            tlx.barrier_wait(s.full[role], count & 1)
            for part in tl.static_range(options.SLICES):
                x = tlx.local_load(tlx.subslice(s.buffer[role], part * WIDTH, WIDTH))
                x, t = mixed_packed(x, scale, options.ACTIVATION, options.SHARE)
                x = multiply_add_packed(x, t, x)
                tlx.local_store(tlx.subslice(p.buffer[2 * role], part * WIDTH, WIDTH), x)
                tlx.barrier_arrive(p.full[role * options.SLICES + part], 1, remote_cta_rank=0)
            count += 1
        item += pairs


@triton.jit
def output(out_desc, out, o, list_ptr, rows_per_item, output_scale, options):
    """O from tensor memory through a buffer to memory; the store goes on beside the next tile."""
    DTYPE: tl.constexpr = options.DTYPE
    rank = tlx.cluster_cta_rank()
    item, pairs = pair_index_and_count()
    num_items = count_items(list_ptr)
    tile = 0
    while item < num_items:
        _, start_out, len_q, _, _, head, first = entry(list_ptr, item)
        for step in tl.range(0, tiles_of(len_q, first, rows_per_item)):
            row = first + step * TILE + rank * ROWS
            slot = tile % O_SLOTS
            tlx.barrier_wait(o.full[slot], (tile // O_SLOTS) & 1)
            tlx.async_descriptor_store_wait(0)
            move_columns(o.buffer[slot], out[0], output_scale, options.COLUMNS, DTYPE)
            tlx.barrier_arrive(o.empty[slot], 1, remote_cta_rank=0)
            tlx.fence("async_shared")
            coords = [BOUND, start_out + len_q, head, BOUND - len_q + row, 0]
            tlx.async_descriptor_store(out_desc, out[0], coords)
            tile += 1
        item += pairs
    tlx.async_descriptor_store_wait(0)


@triton.jit
def cta_pair_kernel(
    q_desc, k_desc, v_desc, out_desc, list_ptr, rows_per_item, scale, output_scale,
    ACTIVATION: tl.constexpr, BLOCK_D: tl.constexpr, SLICES: tl.constexpr, COLUMNS: tl.constexpr,
    SHARE: tl.constexpr, REGISTERS: tl.constexpr,
):  # fmt: skip
    """output_scale * activation(scale * Q K^T) V for the listed work of this pair of CTAs."""
    DTYPE: tl.constexpr = tlx.dtype_of(q_desc)
    options = Options(ACTIVATION, DTYPE, BLOCK_D, SLICES, COLUMNS, SHARE)
    q = tlx.local_alloc((ROWS, BLOCK_D), DTYPE, Q_SLOTS)
    k = tlx.local_alloc((KEYS // CTAS, BLOCK_D), DTYPE, NUM_STAGES * ROLES)
    v = tlx.local_alloc((KEYS, BLOCK_D // CTAS), DTYPE, NUM_STAGES * ROLES)
    s = tlx.local_alloc((ROWS, KEYS), tl.float32, ROLES, tlx.storage_kind.tmem)
    p = tlx.local_alloc((ROWS, KEYS), DTYPE, 2 * ROLES, tlx.storage_kind.tmem, reuse=s)
    o = tlx.local_alloc((ROWS, BLOCK_D), tl.float32, O_SLOTS, tlx.storage_kind.tmem)
    out = tlx.local_alloc((ROWS, BLOCK_D), DTYPE, 1)
    q = Ring(q, tlx.alloc_barriers(Q_SLOTS), tlx.alloc_barriers(Q_SLOTS), Q_SLOTS)
    k = Ring(k, tlx.alloc_barriers(NUM_STAGES), tlx.alloc_barriers(NUM_STAGES), NUM_STAGES)
    v = Ring(v, k.full, k.empty, NUM_STAGES)  # arrives and leaves with K
    s = OneWay(s, tlx.alloc_barriers(ROLES))
    p = OneWay(p, tlx.alloc_barriers(ROLES * SLICES, arrive_count=CTAS))
    o = Ring(
        o, tlx.alloc_barriers(O_SLOTS), tlx.alloc_barriers(O_SLOTS, arrive_count=CTAS), O_SLOTS
    )

    with tlx.async_tasks():
        with tlx.async_task("default"):
            output(out_desc, out, o, list_ptr, rows_per_item, output_scale, options)
        with tlx.async_task(num_warps=4, registers=REGISTERS, replicate=ROLES):
            math(tlx.async_task_replica_id(), s, p, list_ptr, rows_per_item, scale, options)
        with tlx.async_task(num_warps=1, registers=48):
            mma(q, k, v, s, p, o, list_ptr, rows_per_item, options)
        with tlx.async_task(num_warps=1, registers=48):
            load(q_desc, k_desc, v_desc, q, k, v, list_ptr, rows_per_item, options)


def forward(
    batch: Batch, *, config: Config | None = None, work_list: WorkList | None = None
) -> torch.Tensor:
    """The output, `[total_q, num_heads, head_dim]`."""
    out = batch.new_out()
    config = config or default_config(batch)
    (entries,) = work_list or work_list_recipe(batch, config).make(*batch.offsets)
    clusters = min(max(multiprocessors(batch.device) // CTAS.value, 1), len(entries) - 1)
    launch(
        cta_pair_kernel, (CTAS.value * clusters,), batch.device,
        ragged_descriptor(batch.q, ROWS.value),
        ragged_descriptor(batch.k, KEYS.value // CTAS.value),
        ragged_descriptor(batch.v, KEYS.value, width=batch.head_dim // CTAS.value),
        ragged_descriptor(out, ROWS.value),
        entries, config.rows_per_item(batch.max_seqlen_q), batch.scale,
        batch.output_scale * batch.scale / 2, ACTIVATION=batch.names, BLOCK_D=batch.head_dim,
        SLICES=config.slices, COLUMNS=config.columns, SHARE=config.share,
        REGISTERS=config.registers, num_warps=4, ctas_per_cga=(CTAS.value, 1, 1),
    )  # fmt: skip
    return out
