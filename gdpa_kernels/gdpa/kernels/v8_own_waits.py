"""v8: the loop keeps the waits it was written with.

Changes from v7_packed: `num_stages=0` on the loop over blocks. Without it the compiler takes the
loop for one that it has to software-pipeline: after each `async_dot` it inserts a wait for that
MMA, so the scores were complete before P V was issued, in every rung since v4. With it the loop
runs as written: both MMAs are issued, the scores are awaited, and the activation overlaps with P V.

Why it should help: a consumer no longer waits for its scores with nothing else in flight, at least
512 cycles per block of 128 keys, and more while the other consumer has the tensor cores.
Why it may not: ptxas had already moved the activation between the instructions of P V, which hid
some of it; now it moves the last wait up, ahead of half of the activation.

A block that all rows of a tile see is not masked; with a mask that is half of its instructions.
Under a mask programs also take their entries by tickets, see `device.tickets`.

| role     | warps | registers | work                                                     |
|----------|-------|-----------|----------------------------------------------------------|
| load     | 4     | the rest  | Q, K, V of each tile, or K and V of an entry, then its Q |
| math (2) | 4     | 240       | of 64 rows: S of block j + 1, P V of block j, activation |
| math (4) | 4     | 112       | the same, up to head_dim 64                              |
| math (1) | 4     | 232       | the same, in each of two programs of an SM               |

| barrier             | arrivals       | filled by -> drained by                              |
|---------------------|----------------|------------------------------------------------------|
| q.full[role, slot]  | 1 and bytes    | TMA load of 64 rows of Q -> that consumer            |
| q.empty[role, slot] | 128 threads    | that consumer, the tile's last S is complete -> load |
| k.full[stage]       | 1 and bytes    | TMA load of a block of K -> all consumers            |
| k.empty[stage]      | 128 a consumer | consumers, S of the block is complete -> load        |
| v.full[stage]       | 1 and bytes    | TMA load of a block of V -> all consumers            |
| v.empty[stage]      | 128 a consumer | consumers, P V of the block is complete -> load      |
| tickets.full[2]     | 128 threads    | load, the entry is drawn -> all consumers            |
| tickets.empty[2]    | 128 a consumer | consumers, the entry is read -> load                 |

Where K and V are resident, a consumer releases a block of them in the last tile of its entry alone.
With a head_dim over 128 there is room for one tile of Q: a consumer releases it after the tile's
last S, and it is loaded after the next tile's first K, while the last P V is computed; the output
leaves in halves.
"""

from dataclasses import dataclass, replace

import torch
import triton
import triton.language as tl
import triton.language.extra.tlx as tlx

from gdpa_kernels.calling.launch import cdiv, launch, multiprocessors
from gdpa_kernels.device.groups import Ring
from gdpa_kernels.device.ragged import ragged_descriptor
from gdpa_kernels.device.rows import fetch_rows, put_out
from gdpa_kernels.gdpa.batch import Batch, WorkList
from gdpa_kernels.gdpa.device.activations import (
    activate_per_head,
    foldable,
    multiply_add_packed,
    tanh_packed,
)
from gdpa_kernels.gdpa.device.masks import all_visible, mask_probabilities
from gdpa_kernels.gdpa.device.pages import (
    LEAST_PAGE_SIZE,
    entry_keys,
    fetch_tile,
    locate_tile,
)
from gdpa_kernels.gdpa.device.query_tiles import key_of, mask_segments, span_of
from gdpa_kernels.gdpa.device.segments import entry_mask
from gdpa_kernels.gdpa.device.sums import add_up
from gdpa_kernels.gdpa.device.ticket_list import TicketRecipe, ticket_recipe, uses_tickets
from gdpa_kernels.gdpa.device.tickets import follow, new_counter, take, tickets_of
from gdpa_kernels.gdpa.device.work_list import ZigzagRecipe, count_items, entry, query_list_recipe

ROWS = tl.constexpr(64)
WIDE = tl.constexpr(128)  # columns that leave at once, at most
LEAST = 256  # keys of a split


@dataclass(frozen=True)
class Config:
    """Launch constants.

    resident: K and V of an entry stay in shared memory. math_roles: consumers; a tile has 64 rows
    for each. registers: of a consumer thread. pairs: packed arithmetic where
    `activations.foldable`. q_slots: tiles of Q in shared memory. programs: of a multiprocessor,
    which share its registers. splits: parts of a sequence's keys, whose fp32 results are added up
    afterwards. ahead: a tile's Q, which comes from HBM, is loaded during the tile before, where
    keys are not resident and there is room. tickets: entries are taken by tickets, with one tile of
    Q in shared memory, so that the next one is drawn late.
    """

    BLOCK_N: int = 128
    num_stages: int = 2
    registers: int = 240
    resident: bool = False
    math_roles: int = 2
    pairs: bool = True
    q_slots: int = 2
    programs: int = 1
    splits: int = 1
    ahead: bool = False
    tickets: bool = False

    def rows_per_item(self, max_seqlen_q: int) -> int:
        """Query rows that an entry of the list stands for."""
        tile = self.math_roles * 64
        return max(-(-max_seqlen_q // tile), 1) * tile if self.resident else tile


def default_config(batch: Batch) -> Config:
    """The constants for the shape of a call.

    With 256 columns two blocks of 64 keys fit beside one tile of Q. Keys are split where tiles are
    too few for the device. Two programs of one consumer each share an SM if no sequence has over 64
    rows, but many keys, and where the rows of a tile see different intervals of keys. Pages that
    128 does not divide are read in twice as many blocks of 64.
    """
    chosen = _of_keys_at_hand(batch)
    if batch.masked:
        programs = chosen.programs * multiprocessors(batch.device)
        if uses_tickets(batch, chosen.math_roles * ROWS.value, programs):
            return replace(chosen, tickets=True, q_slots=1)
    if batch.paged_kv is not None and batch.paged_kv.page_size % chosen.BLOCK_N:
        return replace(chosen, BLOCK_N=64, num_stages=2 * chosen.num_stages, ahead=False)
    return chosen


def _of_keys_at_hand(batch: Batch) -> Config:
    if batch.head_dim > WIDE.value:
        return Config(BLOCK_N=64, q_slots=1)
    splits = splits_of(batch)
    if batch.max_seqlen_q <= ROWS.value and batch.max_seqlen_k > 256 and not batch.masked:
        return one_role(splits)
    if batch.segments is not None:
        return one_role() if batch.window is not None or batch.head_dim <= 64 else Config()
    if splits > 1:
        return Config(BLOCK_N=64, num_stages=4, splits=splits)
    if batch.masked:
        return Config(BLOCK_N=64, num_stages=4)
    if batch.head_dim <= 64:
        return Config(BLOCK_N=64, num_stages=4, registers=112, math_roles=4)
    if batch.max_seqlen_k <= 256:
        return Config(resident=True)
    if batch.mean_seqlen_k <= 640:
        return Config(BLOCK_N=64, num_stages=4)
    return Config(ahead=True)


def one_role(splits: int = 1) -> Config:
    """Constants of one consumer in each of two programs of a multiprocessor."""
    return Config(BLOCK_N=64, registers=232, math_roles=1, programs=2, splits=splits)


def splits_of(batch: Batch) -> int:
    """Pieces of keys that let all multiprocessors work, of LEAST keys at least; 1 under a mask."""
    tiles = cdiv(batch.max_seqlen_q, 2 * ROWS.value) * batch.num_heads * batch.sequences
    if batch.masked or not tiles:
        return 1
    return max(min(multiprocessors(batch.device) // tiles, batch.max_seqlen_k // LEAST), 1)


def work_list_recipe(batch: Batch, config: Config) -> ZigzagRecipe | TicketRecipe:
    """The work list of these sequences."""
    rows = config.rows_per_item(batch.max_seqlen_q)
    if config.tickets:
        return ticket_recipe(batch, rows, config.programs * multiprocessors(batch.device))
    return query_list_recipe(batch, rows, config.BLOCK_N, 1, config.programs, config.splits)


@triton.aggregate
class Options:
    """The constants that the roles share."""

    GROUP: tl.constexpr
    ACTIVATION: tl.constexpr
    PACKED: tl.constexpr
    CAUSAL: tl.constexpr
    WINDOW: tl.constexpr
    BLOCK_N: tl.constexpr
    BLOCK_D: tl.constexpr
    NUM_STAGES: tl.constexpr
    RESIDENT: tl.constexpr
    MATH_ROLES: tl.constexpr
    Q_SLOTS: tl.constexpr
    DTYPE: tl.constexpr
    LOWER_RIGHT: tl.constexpr
    SEGMENTS: tl.constexpr
    TARGET_GROUP: tl.constexpr
    FULL_ROWS: tl.constexpr
    OWN_RANKS: tl.constexpr
    AHEAD: tl.constexpr
    PAGE_SIZE: tl.constexpr
    HAS_PACKED: tl.constexpr


@triton.jit
def tile_of(len_q, len_k, first, step, rows_per_item, mask, options):
    """Tile `step` of an entry: (first row, span, blocks of keys, tiles of the entry); span is
    (first key, gap_start, gap_end), see `skip_gap`.

    At least one block: prologue and epilogue need one. Without keys it is zero or masked.
    """
    TILE: tl.constexpr = options.MATH_ROLES * ROWS
    steps = tl.cdiv(tl.minimum(len_q - first, rows_per_item), TILE)
    row = first + step * TILE
    if options.RESIDENT and not options.SEGMENTS:
        span, blocks = (0, 0, 0), tl.maximum(tl.cdiv(len_k, options.BLOCK_N), 1)
    else:
        span, blocks = span_of(row, len_k, mask, TILE, options)
    return row, span, blocks, steps


@triton.jit
def load(
    q_desc, k_desc, v_desc, pool_desc, q, k, v, tickets, list_ptr, segments_ptr, kv_indices_ptr,
    kv_indptr_ptr, paged_ends_ptr, rows_per_item, options,
):  # fmt: skip
    """The producer: Q, K and V in the order of their use, as far ahead as there are buffers."""
    tl.static_assert(options.Q_SLOTS > 1 or not options.RESIDENT, "one Q comes after K")
    tl.static_assert(not options.AHEAD or options.Q_SLOTS > 1, "the next Q needs a buffer")
    tl.static_assert(not options.AHEAD or not options.RESIDENT, "an entry has one tile")
    item = tl.program_id(0)
    num_items = count_items(list_ptr)
    tile, kv = 0, 0
    if item < num_items:
        start_q, _, len_q, start_k, len_k, head, first = entry(list_ptr, item)
        while item < num_items:
            mask = entry_mask(list_ptr, segments_ptr, item, len_q, len_k, options)
            packed, paged = entry_keys(
                list_ptr, item, start_q, len_q, start_k, len_k, kv_indptr_ptr, paged_ends_ptr,
                options,
            )  # fmt: skip
            if tickets is None:
                item += tl.num_programs(0)
                following = entry(list_ptr, tl.minimum(item, num_items - 1))
            steps = tl.cdiv(tl.minimum(len_q - first, rows_per_item), options.MATH_ROLES * ROWS)
            for step in tl.range(0, steps):
                row, span, blocks, _ = tile_of(
                    len_q, len_k, first, step, rows_per_item, mask, options
                )
                if (tile == 0) if options.AHEAD else options.Q_SLOTS > 1:
                    fetch_q(q_desc, q, tile, start_q, len_q, head, row, options)
                if options.RESIDENT:
                    blocks = tl.where(step == 0, blocks, 0)
                kv_head = head // options.GROUP
                for block in tl.range(0, blocks):
                    key = key_of(span, block, options)
                    # The page is looked up before the wait.
                    pool_row, left = locate_tile(kv_indices_ptr, paged, key, options)
                    stage = k.acquire(kv + block)
                    fetch_tile(
                        k_desc, pool_desc, k.buffer[stage], k.full[stage], packed, pool_row, left,
                        kv_head, key, False, options,
                    )  # fmt: skip
                    if options.Q_SLOTS == 1 and block == 0:  # K's buffer was free long before
                        fetch_q(q_desc, q, tile, start_q, len_q, head, row, options)
                    stage = v.acquire(kv + block)
                    fetch_tile(
                        v_desc, pool_desc, v.buffer[stage], v.full[stage], packed, pool_row, left,
                        kv_head, key, True, options,
                    )  # fmt: skip
                    # From the third block on, the tile before has been done with its Q.
                    if options.AHEAD and block == tl.minimum(2, blocks - 1):
                        ahead(q_desc, q, tile + 1, item < num_items, following, options)
                kv += blocks
                tile += 1
            if tickets is not None:
                item = take(tickets, tile - 1)
                following = entry(list_ptr, tl.minimum(item, num_items - 1))
            start_q, _, len_q, start_k, len_k, head, first = following
    # The scores of a dummy tile, overlapped with the last P V.
    if tile > 0:
        if not options.AHEAD:
            fetch_q(q_desc, q, tile, 0, 0, 0, 0, options)
        stage = k.acquire(kv)
        fetch_rows(k_desc, k.buffer[stage], k.full[stage], 0, 0, 0, 0)


@triton.jit
def ahead(q_desc, q, tile, there, following, options):
    """The next tile's Q, which comes from HBM: with the first blocks of this one. Without a next
    entry a dummy tile's."""
    start, _, length, _, _, head, row = following
    fetch_q(q_desc, q, tile, start, tl.where(there, length, 0), head, row, options)


@triton.jit
def fetch_q(q_desc, q, tile, start, length, head, row, options):
    """The rows of the tile-th tile for all consumers."""
    Q_SLOTS: tl.constexpr = options.Q_SLOTS
    for role in tl.static_range(options.MATH_ROLES):
        slot = q.acquire(tile, role * Q_SLOTS)
        fetch_rows(q_desc, q.buffer[slot], q.full[slot], start, length, head, row + role * ROWS)


@triton.jit
def release(empty, last, RESIDENT: tl.constexpr):
    """Release a buffer of K or V; where they stay, only after the last tile of the entry."""
    if RESIDENT:
        tlx.barrier_arrive(empty, pred=last)
    else:
        tlx.barrier_arrive(empty)


@triton.jit
def release_scores(k_empty, q_empty, last, done, options):
    """Release K's buffer, and after a tile's last block (`done`) Q's, if it is the only one."""
    release(k_empty, last, options.RESIDENT)
    if options.Q_SLOTS == 1:
        tlx.barrier_arrive(q_empty, pred=done)


@triton.jit
def activation_prologue(s, scale, head, row, first_key, mask, options):
    """(x, t), from which `activation_epilogue` computes activation(scale * s); masked pairs are
    zero.

    GELU and SiLU of 0 are 0: masking the scores is as good, and leaves the pairs of bf16 whole.
    """
    x = s if options.PACKED else activate_per_head(s, scale, head, options.ACTIVATION, True)
    shift, segments = mask
    position = row + shift
    if options.SEGMENTS:
        x = mask_segments(x, position, first_key, segments)
    elif not all_visible(
        position, first_key, ROWS, options.BLOCK_N, options.CAUSAL, options.WINDOW
    ):
        x = mask_probabilities(x, position, first_key, options.CAUSAL, options.WINDOW)
    t = 0
    if options.PACKED:
        x, t = tanh_packed(x, scale, options.ACTIVATION)
    return x, t


@triton.jit
def activation_epilogue(x, t, DTYPE: tl.constexpr, PACKED: tl.constexpr):
    """The probabilities, in registers that an MMA reads: only when none is in flight."""
    return multiply_add_packed(x, t, x) if PACKED else x.to(DTYPE)


@triton.jit
def math(
    role: tl.constexpr, q, k, v, tickets, out_desc, out, list_ptr, segments_ptr, rows_per_item,
    scale, output_scale, options,
):  # fmt: skip
    """A consumer: 64 rows of every tile. `kv` counts blocks of K and V, `tile` tiles of Q."""
    NUM_STAGES: tl.constexpr = options.NUM_STAGES
    Q_SLOTS: tl.constexpr = options.Q_SLOTS
    OUT: tl.constexpr = tlx.dtype_of(out_desc)
    item = tl.program_id(0)
    num_items = count_items(list_ptr)
    step, tile, kv = 0, 0, 0
    if item < num_items:
        _, start_out, len_q, _, len_k, head, first = entry(list_ptr, item)
        mask = entry_mask(list_ptr, segments_ptr, item, len_q, len_k, options)
        row, span, blocks, steps = tile_of(len_q, len_k, first, step, rows_per_item, mask, options)
        row += role * ROWS
        tlx.barrier_wait(q.full[role * Q_SLOTS], 0)
        tlx.barrier_wait(k.full[0], 0)
        s = tlx.async_dot(q.buffer[role * Q_SLOTS], tlx.local_trans(k.buffer[0]))
        s = tlx.async_dot_wait(0, s)
        release_scores(k.empty[0], q.empty[role * Q_SLOTS], steps == 1, blocks == 1, options)
        x, t = activation_prologue(s, scale, head, row, key_of(span, 0, options), mask, options)
        while item < num_items:
            last = step + 1 == steps
            if options.RESIDENT:
                item += tl.where(last, tl.num_programs(0), 0)
                step = tl.where(last, 0, step + 1)
            elif tickets is None:
                item += tl.num_programs(0)
            # Prefetched: the loop over blocks hides the latency, or the last P V.
            if options.Q_SLOTS > 1:
                following = entry(list_ptr, tl.minimum(item, num_items - 1))
            q_slot = role * Q_SLOTS + tile % Q_SLOTS
            acc = tl.zeros([ROWS, options.BLOCK_D], tl.float32)
            for block in tl.range(1, blocks, num_stages=0):
                stage = (kv + block) % NUM_STAGES
                v_stage = (kv + block - 1) % NUM_STAGES
                tlx.barrier_wait(k.full[stage], ((kv + block) // NUM_STAGES) & 1)
                tlx.barrier_wait(v.full[v_stage], ((kv + block - 1) // NUM_STAGES) & 1)
                p = activation_epilogue(x, t, options.DTYPE, options.PACKED)
                s = tlx.async_dot(q.buffer[q_slot], tlx.local_trans(k.buffer[stage]))
                acc = tlx.async_dot(p, v.buffer[v_stage], acc)
                s = tlx.async_dot_wait(1, s)
                release_scores(k.empty[stage], q.empty[q_slot], last, block + 1 == blocks, options)
                key = key_of(span, block, options)
                x, t = activation_prologue(s, scale, head, row, key, mask, options)
                acc = tlx.async_dot_wait(0, acc)
                release(v.empty[v_stage], last, options.RESIDENT)
            if options.Q_SLOTS > 1:
                tlx.barrier_arrive(q.empty[q_slot])

            # The first scores of the next tile, overlapped with the last P V of this one.
            if options.Q_SLOTS == 1:
                v_stage = (kv + blocks - 1) % NUM_STAGES
                tlx.barrier_wait(v.full[v_stage], ((kv + blocks - 1) // NUM_STAGES) & 1)
                p = activation_epilogue(x, t, options.DTYPE, options.PACKED)
                acc = tlx.async_dot(p, v.buffer[v_stage], acc)
                if tickets is not None:
                    item = follow(tickets, tile)
                following = entry(list_ptr, tl.minimum(item, num_items - 1))
            _, next_out, next_len_q, _, len_k, next_head, first = following
            next_item = tl.minimum(item, num_items - 1)
            mask = entry_mask(list_ptr, segments_ptr, next_item, next_len_q, len_k, options)
            next_row, span, next_blocks, steps = tile_of(
                next_len_q, len_k, first, step, rows_per_item, mask, options
            )
            next_row += role * ROWS
            tile += 1
            v_stage = (kv + blocks - 1) % NUM_STAGES
            v_phase = ((kv + blocks - 1) // NUM_STAGES) & 1
            if options.RESIDENT:
                kv += tl.where(last, blocks, 0)
            else:
                kv += blocks
            q_slot = role * Q_SLOTS + tile % Q_SLOTS
            stage = kv % NUM_STAGES
            if options.Q_SLOTS == 1:
                tlx.barrier_wait(q.full[q_slot], tile & 1)
                tlx.barrier_wait(k.full[stage], (kv // NUM_STAGES) & 1)
                s = tlx.async_dot(q.buffer[q_slot], tlx.local_trans(k.buffer[stage]))
                acc = tlx.async_dot_wait(1, acc)
                release(v.empty[v_stage], last, options.RESIDENT)
                rows = (acc * output_scale).to(OUT)
                put_out(out_desc, out[role], start_out, len_q, head, row, rows)
                s = tlx.async_dot_wait(0, s)
                release_scores(
                    k.empty[stage], q.empty[q_slot], step + 1 == steps, next_blocks == 1, options
                )
                key = key_of(span, 0, options)
                x, t = activation_prologue(s, scale, next_head, next_row, key, mask, options)
            else:
                tlx.barrier_wait(q.full[q_slot], (tile // Q_SLOTS) & 1)
                tlx.barrier_wait(k.full[stage], (kv // NUM_STAGES) & 1)
                tlx.barrier_wait(v.full[v_stage], v_phase)
                p = activation_epilogue(x, t, options.DTYPE, options.PACKED)
                s = tlx.async_dot(q.buffer[q_slot], tlx.local_trans(k.buffer[stage]))
                acc = tlx.async_dot(p, v.buffer[v_stage], acc)
                s = tlx.async_dot_wait(1, s)
                release(k.empty[stage], step + 1 == steps, options.RESIDENT)
                key = key_of(span, 0, options)
                x, t = activation_prologue(s, scale, next_head, next_row, key, mask, options)
                acc = tlx.async_dot_wait(0, acc)
                release(v.empty[v_stage], last, options.RESIDENT)
                rows = (acc * output_scale).to(OUT)
                put_out(out_desc, out[role], start_out, len_q, head, row, rows)
            start_out, len_q, head, row, blocks = (
                next_out, next_len_q, next_head, next_row, next_blocks
            )  # fmt: skip
        tlx.async_descriptor_store_wait(0)


@triton.jit(do_not_specialize_on_alignment=["kv_indices_ptr", "kv_indptr_ptr", "paged_ends_ptr"])
def own_waits_kernel(
    q_desc, k_desc, v_desc, out_desc, list_ptr, rows_per_item, scale, output_scale,
    GROUP: tl.constexpr, ACTIVATION: tl.constexpr, PAIRS: tl.constexpr, CAUSAL: tl.constexpr,
    WINDOW: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, NUM_STAGES: tl.constexpr,
    REGISTERS: tl.constexpr, RESIDENT: tl.constexpr, MATH_ROLES: tl.constexpr,
    Q_SLOTS: tl.constexpr, LOWER_RIGHT: tl.constexpr = False, segments_ptr=None,
    TARGET_GROUP: tl.constexpr = 1, FULL_ROWS: tl.constexpr = 0, OWN_RANKS: tl.constexpr = False,
    AHEAD: tl.constexpr = False, pool_desc=None, kv_indices_ptr=None, kv_indptr_ptr=None,
    paged_ends_ptr=None, PAGE_SIZE: tl.constexpr = None, HAS_PACKED: tl.constexpr = False,
    counter_ptr=None,
):  # fmt: skip
    """output_scale * activation(scale * Q K^T) V for the listed work of this program. PAIRS:
    `PACKED` of the options, by the name that records know."""
    tl.static_assert(PAGE_SIZE is None or PAGE_SIZE % BLOCK_N == 0, "a tile lies in one page")
    DTYPE: tl.constexpr = tlx.dtype_of(q_desc)
    options = Options(
        GROUP, ACTIVATION, PAIRS, CAUSAL, WINDOW, BLOCK_N, BLOCK_D, NUM_STAGES, RESIDENT,
        MATH_ROLES, Q_SLOTS, DTYPE, LOWER_RIGHT, segments_ptr is not None, TARGET_GROUP, FULL_ROWS,
        OWN_RANKS, AHEAD, PAGE_SIZE, HAS_PACKED,
    )  # fmt: skip
    q = tlx.local_alloc((ROWS, BLOCK_D), DTYPE, MATH_ROLES * Q_SLOTS)
    k = tlx.local_alloc((BLOCK_N, BLOCK_D), DTYPE, NUM_STAGES)
    v = tlx.local_alloc((BLOCK_N, BLOCK_D), DTYPE, NUM_STAGES)
    out = tlx.local_alloc((ROWS, out_desc.block_shape[4]), tlx.dtype_of(out_desc), MATH_ROLES)
    q_full = tlx.alloc_barriers(MATH_ROLES * Q_SLOTS)
    q_empty = tlx.alloc_warp_barrier(MATH_ROLES * Q_SLOTS, 4)
    k_full = tlx.alloc_barriers(NUM_STAGES)
    v_full = tlx.alloc_barriers(NUM_STAGES)
    k_empty = tlx.alloc_warp_barrier(NUM_STAGES, 4, MATH_ROLES)
    v_empty = tlx.alloc_warp_barrier(NUM_STAGES, 4, MATH_ROLES)
    q = Ring(q, q_full, q_empty, Q_SLOTS)
    k = Ring(k, k_full, k_empty, NUM_STAGES)
    v = Ring(v, v_full, v_empty, NUM_STAGES)

    tickets = None
    if counter_ptr is not None:
        tl.static_assert(Q_SLOTS == 1, "the next entry is known when this one's loads are issued")
        tickets = tickets_of(counter_ptr, MATH_ROLES)

    with tlx.async_tasks():
        with tlx.async_task("default"):
            load(
                q_desc, k_desc, v_desc, pool_desc, q, k, v, tickets, list_ptr, segments_ptr,
                kv_indices_ptr, kv_indptr_ptr, paged_ends_ptr, rows_per_item, options,
            )  # fmt: skip
        with tlx.async_task(num_warps=4, registers=REGISTERS, replicate=MATH_ROLES):
            math(
                tlx.async_task_replica_id(), q, k, v, tickets, out_desc, out, list_ptr,
                segments_ptr, rows_per_item, scale, output_scale, options,
            )  # fmt: skip


def forward(
    batch: Batch, *, config: Config | None = None, work_list: WorkList | None = None
) -> torch.Tensor:
    """The output, `[total_q, num_heads, head_dim]`."""
    out = batch.new_out()
    config = config or default_config(batch)
    if config.splits > 1 or batch.add_to is not None:
        return add_up(partial_sums(batch, config=config, work_list=work_list), batch.add_to, out)
    return _launched(batch, config, work_list, out)


def partial_sums(
    batch: Batch, *, config: Config | None = None, work_list: WorkList | None = None
) -> torch.Tensor:
    """fp32 `[splits, total_q, num_heads, head_dim]`, of the splits of each sequence's keys: the
    output without `add_to` is their sum. The other arguments: as `forward`."""
    config = config or default_config(batch)
    shape = config.splits, batch.rows, *batch.q.shape[1:]
    sums = batch.q.new_empty(shape, dtype=torch.float32)
    _launched(batch, config, work_list, sums.flatten(0, 1))
    return sums


def _launched(
    batch: Batch, config: Config, work_list: WorkList | None, out: torch.Tensor
) -> torch.Tensor:
    """`out` `[splits * total_q, num_heads, head_dim]`, written."""
    (entries,) = work_list or work_list_recipe(batch, config).make(*batch.offsets)
    packed = config.pairs and not batch.precise and foldable(batch.activation, batch.dtype)
    programs = min(config.programs * multiprocessors(batch.device), len(entries) - 1)
    threads = (1 + config.math_roles) * 128
    shared = {"maxnreg": 65_536 // (config.programs * threads)} if config.programs > 1 else {}
    q_desc = ragged_descriptor(batch.q, ROWS.value, min_width=32)
    width = q_desc.block_shape[-1]
    most = WIDE.value * 2 // out.element_size()
    keys, paged = [batch.k, batch.v], batch.paged_kv_options
    if batch.paged_kv is not None:
        keys = [*keys, batch.paged_kv.pool] if paged["HAS_PACKED"] else [batch.paged_kv.pool] * 2
    k_desc, v_desc, *pool_desc = [ragged_descriptor(x, config.BLOCK_N, min_width=32) for x in keys]
    launch(
        own_waits_kernel, (programs,), batch.device,
        q_desc,
        k_desc, v_desc,
        ragged_descriptor(out, ROWS.value, width=min(width, most)),
        entries, config.rows_per_item(batch.max_seqlen_q), batch.scale,
        batch.output_scale * batch.scale / 2 if packed else batch.output_scale,
        GROUP=batch.group, ACTIVATION=batch.names, PAIRS=packed,
        CAUSAL=bool(batch.causal), WINDOW=batch.window, LOWER_RIGHT=batch.lower_right,
        BLOCK_N=config.BLOCK_N, BLOCK_D=width, NUM_STAGES=config.num_stages,
        REGISTERS=config.registers, RESIDENT=config.resident,
        MATH_ROLES=config.math_roles, Q_SLOTS=config.q_slots, **batch.segment_options,
        AHEAD=config.ahead and config.q_slots > 1 and not config.resident,
        pool_desc=pool_desc[0] if pool_desc else None, **paged,
        counter_ptr=new_counter(batch) if config.tickets else None, num_warps=4, **shared,
    )  # fmt: skip
    return out


def call_problem(batch: Batch) -> str | None:
    """The reason why this rung cannot take a call, beyond `Requires`; None if it can."""
    sums = batch.add_to is not None or batch.out_dtype not in (None, batch.dtype)
    if sums and batch.head_dim > WIDE.value:
        return f"needs a head_dim of at most {WIDE.value} for a sum in fp32, got {batch.head_dim}"
    paged = batch.paged_kv
    if paged is not None and paged.page_size % LEAST_PAGE_SIZE:
        return f"needs pages of a multiple of {LEAST_PAGE_SIZE} tokens, got {paged.page_size}"
    if paged is not None and batch.window is not None:
        return f"needs window None with keys in pages, got {batch.window}"
    return None
