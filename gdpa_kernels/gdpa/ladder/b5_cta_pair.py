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

| barrier          | arrivals           | filled by -> drained by               |
|------------------|--------------------|---------------------------------------|
| q.full, kv.full  | 1 and bytes        | TMA loads of both CTAs -> mma         |
| q.empty          | 1 (commit to both) | both roles' S of the tile -> load     |
| kv.empty         | 1 (commit to both) | the item's last P V -> load           |
| s.full, o.full   | 1 (commit to both) | S = Q K^T -> math, last P V -> output |
| p.full, o.empty  | 1 of each CTA      | math (and S was read), output -> mma  |

TMEM: S 0-255 (P over it), O 256-511. SMEM: Q 2 x 32 KB, O 32, K, V 128. Needs: b1's, keys <= 256.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
import triton.language.extra.tlx as tlx

from gdpa_kernels.calling.launch import launch, multiprocessors
from gdpa_kernels.device.groups import Handover, Ring
from gdpa_kernels.device.pairs import CTAS, fetch_part, pair_and_pairs
from gdpa_kernels.device.ragged import BOUND, ragged_descriptor
from gdpa_kernels.gdpa.activations import foldable
from gdpa_kernels.gdpa.batch import Batch, Schedule
from gdpa_kernels.gdpa.polynomial import mixed_probabilities
from gdpa_kernels.gdpa.work_list import count_items, entry, list_of_queries

ROWS = tl.constexpr(128)  # of a CTA and tile
KEYS = tl.constexpr(128)  # of a math role
ROLES = tl.constexpr(2)
TILE = tl.constexpr(ROWS.value * CTAS.value)
MOST_KEYS = KEYS.value * ROLES.value
Q_SLOTS = tl.constexpr(2)
KV_SLOTS = tl.constexpr(2)
O_SLOTS = tl.constexpr(2)


@dataclass(frozen=True)
class Config:
    """slices: of a role's scores, columns: of O, in registers at a time."""

    slices: int = 2
    columns: int = 32
    registers: int = 192

    def rows_per_item(self, max_seqlen_q: int) -> int:
        """All rows of a sequence: K and V are loaded once."""
        return max(-(-max_seqlen_q // TILE.value), 1) * TILE.value


def requires(batch: Batch) -> str | None:
    """Why it cannot take a call: keys of a sequence beyond those that stay, or None."""
    if batch.max_seqlen_k > MOST_KEYS:
        return f"needs a max_seqlen_k of at most {MOST_KEYS}, got {batch.max_seqlen_k}"
    return None


def default_config(batch: Batch) -> Config:
    """Narrower slices where a mask or a choice of activation takes registers."""
    return Config(slices=4 if batch.masked or len(batch.activation) > 1 else 2)


def make_schedule(batch: Batch, config: Config) -> Schedule:
    """The work list of these sequences, made on their device without waiting for it."""
    rows = config.rows_per_item(batch.max_seqlen_q)
    return list_of_queries(batch, rows, MOST_KEYS, CTAS.value)


@triton.aggregate
class Options:
    """The constants that the roles share."""

    GROUP: tl.constexpr
    ACTIVATION: tl.constexpr
    PAIRS: tl.constexpr
    CAUSAL: tl.constexpr
    WINDOW: tl.constexpr
    DTYPE: tl.constexpr
    BLOCK_D: tl.constexpr
    SLICES: tl.constexpr
    COLUMNS: tl.constexpr


@triton.aggregate
class KeysAndValues:
    """K and V of an item: this CTA's halves for each math role."""

    k: tlx.buffered_tensor
    v: tlx.buffered_tensor
    full: tlx.mbarrier
    empty: tlx.mbarrier


@triton.jit
def tiles_of(len_q, first, rows_per_item):
    """Tiles of an item."""
    return tl.cdiv(tl.minimum(len_q - first, rows_per_item), TILE)


@triton.jit
def load(q_desc, k_desc, v_desc, q, kv, list_ptr, rows_per_item, options):
    """The producer of a CTA; the leader's also says how many bytes come from both."""
    BYTES: tl.constexpr = 2 * ROLES * KEYS * options.BLOCK_D * tlx.size_of(options.DTYPE)
    Q_BYTES: tl.constexpr = CTAS * ROWS * options.BLOCK_D * tlx.size_of(options.DTYPE)
    rank = tlx.cluster_cta_rank()
    item, pairs = pair_and_pairs()
    num_items = count_items(list_ptr)
    tile, count = 0, 0
    while item < num_items:
        start_q, _, len_q, start_k, len_k, head, first = entry(list_ptr, item)
        kv_head = head // options.GROUP
        at = count % KV_SLOTS
        tlx.barrier_wait(kv.empty[at], ((count // KV_SLOTS) & 1) ^ 1)
        tlx.barrier_expect_bytes(kv.full[at], BYTES, pred=rank == 0)
        for role in tl.static_range(ROLES):
            key = role * KEYS
            half = at * ROLES + role
            fetch_part(
                k_desc, kv.k[half], kv.full[at], start_k, len_k, kv_head,
                key + rank * (KEYS // CTAS), 0,
            )  # fmt: skip
            fetch_part(
                v_desc, kv.v[half], kv.full[at], start_k, len_k, kv_head, key,
                rank * (options.BLOCK_D // CTAS),
            )  # fmt: skip
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
def scores(role: tl.constexpr, q_buffer, k_buffer, s):
    """S = Q K^T of a role, over the P that its last P V has read: MMAs run in order."""
    tlx.async_dot(
        q_buffer, tlx.local_trans(k_buffer), s.buffer[role], use_acc=False,
        mBarriers=[s.full[role]], two_ctas=True,
    )  # fmt: skip


@triton.jit
def weighted_sum(role: tl.constexpr, p, v_buffer, o_buffer, step, continued, options):
    """O += P V of a role, slice by slice of the keys; not continued: O = P V."""
    WIDTH: tl.constexpr = KEYS // options.SLICES
    HALF: tl.constexpr = options.BLOCK_D // CTAS
    for part in tl.static_range(options.SLICES):
        tlx.barrier_wait(p.full[role * options.SLICES + part], step & 1)
        weights = tlx.subslice(p.buffer[2 * role], part * WIDTH, WIDTH)
        values = tlx.local_slice(v_buffer, [part * WIDTH, 0], [WIDTH, HALF])
        use_acc = continued if part == 0 else True
        tlx.async_dot(weights, values, o_buffer, use_acc=use_acc, force_async=True, two_ctas=True)


@triton.jit
def mma(q, kv, s, p, o, list_ptr, rows_per_item, options):
    """All MMAs, of the leader alone: for each math role P V of a tile, then S of the next tile,
    also across the border of two items."""
    item, pairs = pair_and_pairs()
    num_items = count_items(list_ptr)
    tile, count, step = 0, 0, 0
    if (tlx.cluster_cta_rank() == 0) & (item < num_items):
        _, _, len_q, _, _, _, first = entry(list_ptr, item)
        tiles = tiles_of(len_q, first, rows_per_item)
        # The next item's, loaded an item ahead.
        _, _, len_q, _, _, _, first = entry(list_ptr, tl.minimum(item + pairs, num_items - 1))
        tlx.barrier_wait(kv.full[0], 0)
        tlx.barrier_wait(q.full[0], 0)
        for role in tl.static_range(ROLES):
            scores(role, q.buffer[0], kv.k[role], s)
        tlx.tcgen05_commit(q.empty[0], two_ctas=True)
        while item < num_items:
            last = step + 1 == tiles
            mine = count % KV_SLOTS
            item += tl.where(last, pairs, 0)
            count += tl.where(last, 1, 0)
            step = tl.where(last, 0, step + 1)
            if last:
                tiles = tiles_of(len_q, first, rows_per_item)
                following = tl.minimum(item + pairs, num_items - 1)
                _, _, len_q, _, _, _, first = entry(list_ptr, following)
            at = count % KV_SLOTS
            slot = (tile + 1) % Q_SLOTS
            out = tile % O_SLOTS
            tlx.barrier_wait(o.empty[out], ((tile // O_SLOTS) & 1) ^ 1)
            for role in tl.static_range(ROLES):
                values = kv.v[mine * ROLES + role]
                weighted_sum(role, p, values, o.buffer[out], tile, role > 0, options)
                if role == ROLES - 1:
                    tlx.tcgen05_commit(o.full[out], two_ctas=True)
                    if last:
                        tlx.tcgen05_commit(kv.empty[mine], two_ctas=True)
                if item < num_items:
                    if role == 0:
                        tlx.barrier_wait(kv.full[at], (count // KV_SLOTS) & 1)
                        tlx.barrier_wait(q.full[slot], ((tile + 1) // Q_SLOTS) & 1)
                    scores(role, q.buffer[slot], kv.k[at * ROLES + role], s)
                    if role == ROLES - 1:
                        tlx.tcgen05_commit(q.empty[slot], two_ctas=True)
            tile += 1


@triton.jit
def math(role: tl.constexpr, s, p, list_ptr, rows_per_item, scale, options):
    """The activation of this CTA's rows for the keys of a role."""
    WIDTH: tl.constexpr = KEYS // options.SLICES
    rank = tlx.cluster_cta_rank()
    item, pairs = pair_and_pairs()
    num_items = count_items(list_ptr)
    tile = 0
    while item < num_items:
        _, _, len_q, _, _, head, first = entry(list_ptr, item)
        for step in tl.range(0, tiles_of(len_q, first, rows_per_item)):
            row = first + step * TILE + rank * ROWS
            tlx.barrier_wait(s.full[role], tile & 1)
            for part in tl.static_range(options.SLICES):
                x = tlx.local_load(tlx.subslice(s.buffer[role], part * WIDTH, WIDTH))
                x = mixed_probabilities(x, scale, head, row, role * KEYS + part * WIDTH, options)
                tlx.local_store(tlx.subslice(p.buffer[2 * role], part * WIDTH, WIDTH), x)
                tlx.barrier_arrive(p.full[role * options.SLICES + part], 1, remote_cta_rank=0)
            tile += 1
        item += pairs


@triton.jit
def output(out_desc, out, o, list_ptr, rows_per_item, output_scale, options):
    """O from tensor memory through a buffer to memory; the store goes on beside the next tile."""
    rank = tlx.cluster_cta_rank()
    item, pairs = pair_and_pairs()
    num_items = count_items(list_ptr)
    tile = 0
    while item < num_items:
        _, start_out, len_q, _, _, head, first = entry(list_ptr, item)
        for step in tl.range(0, tiles_of(len_q, first, rows_per_item)):
            row = first + step * TILE + rank * ROWS
            at = tile % O_SLOTS
            tlx.barrier_wait(o.full[at], (tile // O_SLOTS) & 1)
            tlx.async_descriptor_store_wait(0)
            for part in tl.static_range(options.BLOCK_D // options.COLUMNS):
                x = tlx.local_load(
                    tlx.subslice(o.buffer[at], part * options.COLUMNS, options.COLUMNS)
                )
                window = tlx.local_slice(
                    out[0], [0, part * options.COLUMNS], [ROWS, options.COLUMNS]
                )
                tlx.local_store(window, (x * output_scale).to(options.DTYPE))
            tlx.barrier_arrive(o.empty[at], 1, remote_cta_rank=0)
            tlx.fence("async_shared")
            place = [BOUND, start_out + len_q, head, BOUND - len_q + row, 0]
            tlx.async_descriptor_store(out_desc, out[0], place)
            tile += 1
        item += pairs
    tlx.async_descriptor_store_wait(0)


@triton.jit
def cta_pair_kernel(
    q_desc, k_desc, v_desc, out_desc, list_ptr, rows_per_item, scale, output_scale,
    GROUP: tl.constexpr, ACTIVATION: tl.constexpr, PAIRS: tl.constexpr, CAUSAL: tl.constexpr,
    WINDOW: tl.constexpr, BLOCK_D: tl.constexpr, SLICES: tl.constexpr, COLUMNS: tl.constexpr,
    REGISTERS: tl.constexpr,
):  # fmt: skip
    """output_scale * activation(scale * Q K^T) V for the listed work of this pair of CTAs."""
    DTYPE: tl.constexpr = tlx.dtype_of(q_desc)
    options = Options(
        GROUP, ACTIVATION, PAIRS, CAUSAL, WINDOW, DTYPE, BLOCK_D, SLICES, COLUMNS
    )  # fmt: skip
    q = tlx.local_alloc((ROWS, BLOCK_D), DTYPE, Q_SLOTS)
    k = tlx.local_alloc((KEYS // CTAS, BLOCK_D), DTYPE, KV_SLOTS * ROLES)
    v = tlx.local_alloc((KEYS, BLOCK_D // CTAS), DTYPE, KV_SLOTS * ROLES)
    s = tlx.local_alloc((ROWS, KEYS), tl.float32, ROLES, tlx.storage_kind.tmem)
    p = tlx.local_alloc((ROWS, KEYS), DTYPE, 2 * ROLES, tlx.storage_kind.tmem, reuse=s)
    o = tlx.local_alloc((ROWS, BLOCK_D), tl.float32, O_SLOTS, tlx.storage_kind.tmem)
    out = tlx.local_alloc((ROWS, BLOCK_D), DTYPE, 1)
    q_full = tlx.alloc_barriers(Q_SLOTS)
    q_empty = tlx.alloc_barriers(Q_SLOTS)
    kv_full = tlx.alloc_barriers(KV_SLOTS)
    kv_empty = tlx.alloc_barriers(KV_SLOTS)
    s_full = tlx.alloc_barriers(ROLES)
    p_full = tlx.alloc_barriers(ROLES * SLICES, arrive_count=CTAS)
    o_full = tlx.alloc_barriers(O_SLOTS)
    o_empty = tlx.alloc_barriers(O_SLOTS, arrive_count=CTAS)
    q = Ring(q, q_full, q_empty)
    kv = KeysAndValues(k, v, kv_full, kv_empty)
    s = Handover(s, s_full)
    p = Handover(p, p_full)
    o = Ring(o, o_full, o_empty)

    with tlx.async_tasks():
        with tlx.async_task("default"):
            output(out_desc, out, o, list_ptr, rows_per_item, output_scale, options)
        with tlx.async_task(num_warps=4, registers=REGISTERS, replicate=ROLES):
            math(tlx.async_task_replica_id(), s, p, list_ptr, rows_per_item, scale, options)
        with tlx.async_task(num_warps=1, registers=48):
            mma(q, kv, s, p, o, list_ptr, rows_per_item, options)
        with tlx.async_task(num_warps=1, registers=48):
            load(q_desc, k_desc, v_desc, q, kv, list_ptr, rows_per_item, options)


def forward(
    batch: Batch, *, config: Config | None = None, schedule: Schedule | None = None
) -> torch.Tensor:
    """The output, `[total_q, num_heads, head_dim]`.

    `schedule` is `make_schedule`'s for the same sequences and config; None makes it here.
    """
    out = batch.new_out()
    config = config or default_config(batch)
    (entries,) = schedule or make_schedule(batch, config)
    pairs = not batch.precise and foldable(batch.activation, batch.dtype)
    clusters = min(max(multiprocessors(batch.device) // CTAS.value, 1), len(entries) - 1)
    out_desc = ragged_descriptor(out, ROWS.value, min_width=64)
    width = out_desc.block_shape[-1]
    launch(
        cta_pair_kernel, (CTAS.value * clusters,), batch.device,
        ragged_descriptor(batch.q, ROWS.value, min_width=64),
        ragged_descriptor(batch.k, KEYS.value // CTAS.value, min_width=64),
        ragged_descriptor(batch.v, KEYS.value, width=width // CTAS.value), out_desc,
        entries, config.rows_per_item(batch.max_seqlen_q), batch.scale,
        batch.output_scale * batch.scale / 2 if pairs else batch.output_scale,
        GROUP=batch.group, ACTIVATION=batch.names, PAIRS=pairs, CAUSAL=batch.causal,
        WINDOW=batch.window, BLOCK_D=width, SLICES=config.slices, COLUMNS=config.columns,
        REGISTERS=config.registers, num_warps=4, ctas_per_cga=(CTAS.value, 1, 1),
    )  # fmt: skip
    return out
