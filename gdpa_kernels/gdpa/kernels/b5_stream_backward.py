"""b5, backward: one stream of MMAs across items.

Changes from b4_pair_backward: S of the next item comes before dK and dQ of the last step of this
one, as inside an item. K's rows, its columns and V have barriers of their own, and rows and columns
a producer each, so all is loaded when the last MMA that reads its buffer is complete. dV and dK
leave through dQ's staging, dV before the last dQ, dK after it; math goes on with the next item.

Why it should help: a pair of b4 drains at the end of every item, and fills again for the next.
Why it may not: what an item moves through the port of shared memory beside its steps stays.

| role     | warps | registers | work                                                       |
|----------|-------|-----------|------------------------------------------------------------|
| output   | 4     | the rest  | 64 rows of dQ of a step, dV and dK of an item: TMEM to TMA |
| math (2) | 4     | 160       | P and dS of 64 rows                                        |
| mma      | 1     | 64        | leader: all MMAs; peer: tells the leader that dS has come  |
| load (2) | 1     | 64        | rows of K, V, Q and dO; half of the columns of K, Q and dO |

| barrier         | arrivals           | filled by -> drained by                                |
|-----------------|--------------------|--------------------------------------------------------|
| k_rows.full     | 1 and bytes        | TMA loads of K's rows of both CTAs -> mma, S           |
| k_rows.empty    | 1 (commit to both) | the item's last S -> load                              |
| k.full          | 1 and bytes        | TMA loads of K's columns of both CTAs -> mma, dQ       |
| k.empty         | 1 (commit to both) | the item's last dQ -> load                             |
| v.full          | 1 and bytes        | TMA loads of V of both CTAs -> mma, dP                 |
| v.empty         | 1 (commit to both) | the item's last dP -> load                             |
| q.rows.full     | 1 and bytes        | TMA loads of both CTAs' halves of Q's rows -> mma, S   |
| q.rows.empty    | 1 (commit to both) | the step's S -> load                                   |
| q.columns.full  | 1 and bytes        | TMA loads of both halves of Q's columns -> mma, dK     |
| q.columns.empty | 1 (commit to both) | the step's dK -> load                                  |
| g.rows.full     | 1 and bytes        | TMA loads of both CTAs' halves of dO's rows -> mma, dP |
| g.rows.empty    | 1 (commit to both) | the step's dP -> load                                  |
| g.columns.full  | 1 and bytes        | TMA loads of both halves of dO's columns -> mma, dV    |
| g.columns.empty | 1 (commit to both) | the step's dV -> load                                  |
| s.full          | 1 (commit to both) | S -> math                                              |
| p.full          | 4, 2 of each CTA   | math, P is in TMEM and S was read -> mma, dV           |
| dp.full         | 1 (commit to both) | dP -> math                                             |
| ds.for_dk.full  | 4, 2 of each CTA   | math, dS is in TMEM and dP was read -> mma, dK         |
| ds.peer.full    | 1 and bytes        | math of the peer, dS of this CTA's rows -> mma         |
| ds.for_dq.full  | 3                  | a math role of each CTA, its dS is in shared memory;   |
|                 |                    | mma of the peer, its ds.peer.full is done -> mma, dQ   |
| dq.full         | 1 (commit to both) | dQ -> output                                           |
| dq.empty        | 2, 1 of each CTA   | output, dQ is in registers -> mma, the next dP         |
| dv.full         | 1 (commit to both) | the item's last dV -> output                           |
| dk_empty        | 2, 1 of each CTA   | output, dK is in registers -> mma, the next item's dK  |

mma waits in the leader alone, on barriers of the leader; only ds.peer.full is waited for in both
CTAs. `1 and bytes` of the loads is the leader's, which expects the bytes of both CTAs. dV needs no
barrier back, and dK no barrier forth: the barriers of the item's last dQ, which lies between, order
them.
TMEM: S 0-127, P 0-31 and 64-95; dP 128-255, dS 128-159 and 192-223, then dQ 128-191; dV, dK.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
import triton.language.extra.tlx as tlx

from gdpa_kernels.device.groups import OneWay, Ring
from gdpa_kernels.device.pairs import CTAS, fetch_part, pair_index_and_count
from gdpa_kernels.device.ragged import BOUND
from gdpa_kernels.device.rows import keep_runtime
from gdpa_kernels.gdpa.batch import Batch, WorkList
from gdpa_kernels.gdpa.device.derivatives import dk_factor, dv_factor
from gdpa_kernels.gdpa.device.gradients import (
    Gradients,
    sums_commute,
)
from gdpa_kernels.gdpa.device.key_tiles import row_of_step, span_of
from gdpa_kernels.gdpa.device.pair_steps import (
    ITEM,
    Descriptors,
    Halves,
    ScoreGradients,
    add_products,
    compute_p_and_ds,
    fetch,
    launch_backward_pairs,
)
from gdpa_kernels.gdpa.device.segments import entry_mask
from gdpa_kernels.gdpa.device.tensor_memory import HALF, KEYS, MATH_ROLES, ROWS
from gdpa_kernels.gdpa.device.work_list import ZigzagRecipe, count_items, entry, key_list_recipe

PRODUCERS = tl.constexpr(2)


@dataclass(frozen=True)
class Config:
    """Launch constants.

    fold: leave factors of the activation to the sums where `activations.foldable`. registers: of a
    math thread. once: dQ is written and not added to, for at most 256 keys.
    """

    fold: bool = True
    registers: int = 160
    once: bool = False


def default_config(batch: Batch) -> Config:
    """The same for every call."""
    return Config()


def is_deterministic(batch: Batch) -> bool:
    """True with at most two tiles of keys; see `sums_commute`."""
    return sums_commute(batch, ITEM.value)


def work_list_recipe(batch: Batch, config: Config) -> ZigzagRecipe:
    """The list of tiles of keys, those with the most queries first."""
    return key_list_recipe(batch, ITEM.value, ROWS.value, least=int(config.once))


@triton.aggregate
class Options:
    """The constants that the roles share."""

    GROUP: tl.constexpr
    SHARED_Q: tl.constexpr
    ACTIVATION: tl.constexpr
    FOLD: tl.constexpr
    CAUSAL: tl.constexpr
    WINDOW: tl.constexpr
    HEAD_DIM: tl.constexpr
    DTYPE: tl.constexpr
    ONCE: tl.constexpr
    LOWER_RIGHT: tl.constexpr
    SEGMENTS: tl.constexpr
    TARGET_GROUP: tl.constexpr
    FULL_ROWS: tl.constexpr
    OWN_RANKS: tl.constexpr


@triton.jit
def rows_of(key, len_q, len_k, mask, options):
    """(span, steps) of an item, see `key_tiles.span_of`; if its dQ is written once, all rows, seen
    by a key or not."""
    if options.ONCE:
        span, steps = (0, 0, 0), tl.maximum(tl.cdiv(len_q, ROWS), 1)
    else:
        span, steps = span_of(key, len_q, len_k, mask, ROWS, ITEM, options)
    return span, steps


@triton.jit
def load(role: tl.constexpr, descs, k_rows, k, v, q, g, list_ptr, segments_ptr, options):
    """A producer of a CTA, 0 of rows, 1 of columns, in the order in which buffers are free."""
    WIDTH: tl.constexpr = options.HEAD_DIM // CTAS
    TILE: tl.constexpr = CTAS * KEYS * options.HEAD_DIM * tlx.size_of(options.DTYPE)
    STEP: tl.constexpr = TILE // CTAS
    rank = tlx.cluster_cta_rank()
    column = rank * WIDTH
    first, pairs = pair_index_and_count()
    num_items = count_items(list_ptr)
    phase, count = 0, 0
    for item in tl.range(first, num_items, pairs):
        start_k, _, len_k, start_g, len_q, head_k, key = entry(list_ptr, item)
        start_q = 0 if options.SHARED_Q else start_g
        mask = entry_mask(list_ptr, segments_ptr, item, len_q, len_k, options)
        span, steps = rows_of(key, len_q, len_k, mask, options)
        cta_key = key + rank * KEYS
        if role == 0:
            fetch(descs.k_rows, k_rows, phase ^ 1, TILE, start_k, len_k, head_k, cta_key, 0)
        for step in tl.range(0, steps * options.GROUP):
            head, row = row_of_step(step, steps, span, head_k, ROWS, options)
            half = row + rank * HALF
            free = ((count + step) & 1) ^ 1
            if role == 0:
                fetch(descs.q_rows, q.rows, free, STEP, start_q, len_q, head, half, 0)
                if step == 0:
                    fetch(descs.v, v, phase ^ 1, TILE, start_k, len_k, head_k, cta_key, 0)
                fetch(descs.g_rows, g.rows, free, STEP, start_g, len_q, head, half, 0)
            else:
                fetch(descs.g_columns, g.columns, free, STEP, start_g, len_q, head, row, column)
                fetch(descs.q_columns, q.columns, free, STEP, start_q, len_q, head, row, column)
                if step == 0:
                    fetch(descs.k_columns, k, phase ^ 1, TILE, start_k, len_k, head_k, key, column)
                    peer_key, keys = key + KEYS, k.buffer[1]
                    fetch_part(
                        descs.k_columns, keys, k.full[0], start_k, len_k, head_k, peer_key, column
                    )
        count += steps * options.GROUP
        phase ^= 1


@triton.jit
def from_ds(q, k, ds, dk, dk_empty, dq, count, phase, use_acc, ends, zero, options):
    """dK of a step, then dQ over the dS that dK has read. phase: of its item; ends: it is the last
    step there. `zero`: `keep_runtime`."""
    WIDTH: tl.constexpr = options.HEAD_DIM // CTAS
    tlx.barrier_wait(q.columns.full[0], count & 1)
    tlx.barrier_wait(ds.for_dk.full[0], count & 1)
    tlx.barrier_wait(dk_empty[0], phase ^ 1)
    add_products(ds.for_dk, q.columns, dk, use_acc, WIDTH)
    tlx.barrier_wait(ds.for_dq.full[0], count & 1)
    tlx.barrier_wait(ds.peer.full[0], count & 1)
    tlx.fence("async_shared")
    tlx.barrier_wait(k.full[0], phase)
    for owner in tl.static_range(CTAS):
        d = tlx.local_trans(ds.for_dq.buffer[owner + zero])
        tlx.async_dot(
            d, k.buffer[owner + zero], dq.buffer[0], use_acc=owner > 0, force_async=True,
            two_ctas=True,
        )  # fmt: skip
    if ends:
        tlx.tcgen05_commit(k.empty[0], two_ctas=True)
    tlx.tcgen05_commit(dq.full[0], two_ctas=True)


@triton.jit
def mma(k_rows, k, v, q, g, s, p, dp, ds, dv, dk, dk_empty, dq, list_ptr, segments_ptr, options):
    """All MMAs, issued by the leader: S of a step, then dK and dQ of the step before, also across
    the border of two items. The peer's thread tells the leader that dS has arrived there."""
    WIDTH: tl.constexpr = options.HEAD_DIM // CTAS
    first, pairs = pair_index_and_count()
    num_items = count_items(list_ptr)
    leads = tlx.cluster_cta_rank() == 0
    phase, count, previous_steps = 0, 0, 0  # before: steps of the last item
    for item in tl.range(first, num_items, pairs):
        _, _, len_k, _, len_q, _, key = entry(list_ptr, item)
        mask = entry_mask(list_ptr, segments_ptr, item, len_q, len_k, options)
        _, steps = rows_of(key, len_q, len_k, mask, options)
        if leads:
            for step in tl.range(0, steps * options.GROUP, num_stages=0):
                now = count + step
                zero = keep_runtime(step)
                last = step + 1 == steps * options.GROUP
                tlx.barrier_wait(k_rows.full[0], phase)
                tlx.barrier_wait(q.rows.full[0], now & 1)
                tlx.async_dot(
                    k_rows.buffer[zero], tlx.local_trans(q.rows.buffer[zero]), s.buffer[0],
                    use_acc=False, mBarriers=[s.full[0]], two_ctas=True,
                )  # fmt: skip
                tlx.tcgen05_commit(q.rows.empty[0], two_ctas=True)
                if last:
                    tlx.tcgen05_commit(k_rows.empty[0], two_ctas=True)
                if now > 0:
                    border = step == 0
                    item_phase = phase ^ tl.where(border, 1, 0)
                    add = tl.where(border, previous_steps, step) > 1
                    from_ds(
                        q, k, ds, dk, dk_empty, dq, now - 1, item_phase, add, border, zero, options
                    )
                tlx.barrier_wait(v.full[0], phase)
                tlx.barrier_wait(g.rows.full[0], now & 1)
                tlx.barrier_wait(dq.empty[0], (now & 1) ^ 1)
                tlx.async_dot(
                    v.buffer[zero], tlx.local_trans(g.rows.buffer[zero]), dp.buffer[0],
                    use_acc=False, mBarriers=[dp.full[0]], two_ctas=True,
                )  # fmt: skip
                tlx.tcgen05_commit(g.rows.empty[0], two_ctas=True)
                if last:
                    tlx.tcgen05_commit(v.empty[0], two_ctas=True)
                tlx.barrier_wait(g.columns.full[0], now & 1)
                tlx.barrier_wait(p.full[0], now & 1)
                add_products(p, g.columns, dv.buffer[0], step > 0, WIDTH)
                if last:
                    tlx.tcgen05_commit(dv.full[0], two_ctas=True)
        else:
            for step in tl.range(0, steps * options.GROUP):
                tlx.barrier_wait(ds.peer.full[0], (count + step) & 1)
                tlx.fence("async_shared")
                tlx.barrier_arrive(ds.for_dq.full[0], 1, remote_cta_rank=0)
        count += steps * options.GROUP
        previous_steps = steps * options.GROUP
        phase ^= 1
    if leads & (count > 0):
        last = count - 1
        from_ds(q, k, ds, dk, dk_empty, dq, last, phase ^ 1, previous_steps > 1, True, 0, options)


@triton.jit
def put_sum(desc, sums, empty, buffer, factor, start, length, head, key):
    """Start the store of dV or dK of an item, times factor. It leaves TMEM, which `empty` then
    signals, before it waits for `buffer`."""
    first = tlx.local_load(tlx.subslice(sums, 0, 64)) * factor
    first = first.to(tlx.dtype_of(desc))
    if sums.shape[1] > 64:
        second = tlx.local_load(tlx.subslice(sums, 64, 64)) * factor
        second = second.to(tlx.dtype_of(desc))
    if empty is not None:
        tlx.barrier_arrive(empty, 1, remote_cta_rank=0)
    tlx.async_descriptor_store_wait(0)
    tlx.local_store(tlx.local_slice(buffer, [0, 0], [KEYS, 64]), first)
    if sums.shape[1] > 64:
        tlx.local_store(tlx.local_slice(buffer, [0, 64], [KEYS, 64]), second)
    tlx.fence("async_shared")
    coords = [BOUND, start + length, head, BOUND - length + key, 0]
    tlx.async_descriptor_store(desc, buffer, coords)


@triton.jit
def math(role: tl.constexpr, s, p, dp, ds, list_ptr, segments_ptr, scale, options):
    """A consumer: 64 rows of every step."""
    rank = tlx.cluster_cta_rank()
    first, pairs = pair_index_and_count()
    num_items = count_items(list_ptr)
    count = 0
    for item in tl.range(first, num_items, pairs):
        _, _, len_k, _, len_q, head_k, key = entry(list_ptr, item)
        mask = entry_mask(list_ptr, segments_ptr, item, len_q, len_k, options)
        span, steps = rows_of(key, len_q, len_k, mask, options)
        key += rank * KEYS
        for step in tl.range(0, steps * options.GROUP):
            head, row = row_of_step(step, steps, span, head_k, ROWS, options)
            row += role * HALF
            compute_p_and_ds(
                role, s, p, dp, ds, (count + step) & 1, scale, head, row, key, mask, rank, options
            )
        count += steps * options.GROUP


@triton.jit
def output(
    dq, dv, dk, dk_empty, staging, staged, gradients, list_ptr, segments_ptr, scale, output_scale,
    options,
):  # fmt: skip
    """Adds this CTA's 64 rows of dQ of every step to memory, or writes them; stores dV and dK of
    its keys."""
    of_dv = dv_factor(scale, output_scale, options.FOLD)
    of_dk = dk_factor(scale, output_scale, options.FOLD)
    rank = tlx.cluster_cta_rank()
    first, pairs = pair_index_and_count()
    num_items = count_items(list_ptr)
    phase, count = 0, 0
    for item in tl.range(first, num_items, pairs):
        start_k, _, len_k, start_out, len_q, head_k, key = entry(list_ptr, item)
        mask = entry_mask(list_ptr, segments_ptr, item, len_q, len_k, options)
        span, steps = rows_of(key, len_q, len_k, mask, options)
        key += rank * KEYS
        for step in tl.range(0, steps * options.GROUP):
            if step + 1 == steps * options.GROUP:
                tlx.barrier_wait(dv.full[0], phase)
                put_sum(
                    gradients.dv, dv.buffer[0], None, staged, of_dv, start_k, len_k, head_k, key
                )
            head, row = row_of_step(step, steps, span, head_k, ROWS, options)
            tlx.barrier_wait(dq.full[0], (count + step) & 1)
            x = tlx.local_load(dq.buffer[0])
            tlx.barrier_arrive(dq.empty[0], 1, remote_cta_rank=0)
            tlx.async_descriptor_store_wait(0)
            coords = [BOUND, start_out + len_q, head, BOUND - len_q + row + rank * HALF, 0]
            if options.ONCE:
                tlx.local_store(staging, (x * of_dk).to(options.DTYPE))
                tlx.fence("async_shared")
                tlx.async_descriptor_store(gradients.dq, staging, coords)
            else:
                tlx.local_store(staging, x)
                tlx.fence("async_shared")
                tlx.async_descriptor_store(gradients.dq, staging, coords, store_reduce="add")
        put_sum(gradients.dk, dk, dk_empty[0], staged, of_dk, start_k, len_k, head_k, key)
        count += steps * options.GROUP
        phase ^= 1
    tlx.async_descriptor_store_wait(0)


@triton.jit
def backward_kernel(
    q_rows_desc, q_columns_desc, k_rows_desc, k_columns_desc, v_desc, g_rows_desc, g_columns_desc,
    dq_desc, dk_desc, dv_desc, list_ptr, scale, output_scale,
    GROUP: tl.constexpr, SHARED_Q: tl.constexpr, ACTIVATION: tl.constexpr, FOLD: tl.constexpr,
    CAUSAL: tl.constexpr, WINDOW: tl.constexpr, HEAD_DIM: tl.constexpr, ONCE: tl.constexpr,
    REGISTERS: tl.constexpr, LOWER_RIGHT: tl.constexpr = False, segments_ptr=None,
    TARGET_GROUP: tl.constexpr = 1, FULL_ROWS: tl.constexpr = 0, OWN_RANKS: tl.constexpr = False,
):  # fmt: skip
    """dK and dV of the listed items of this pair, and what their keys add to dQ."""
    DTYPE: tl.constexpr = tlx.dtype_of(q_rows_desc)
    WIDTH: tl.constexpr = HEAD_DIM // CTAS
    options = Options(
        GROUP, SHARED_Q, ACTIVATION, FOLD, CAUSAL, WINDOW, HEAD_DIM, DTYPE, ONCE, LOWER_RIGHT,
        segments_ptr is not None, TARGET_GROUP, FULL_ROWS, OWN_RANKS,
    )  # fmt: skip
    k_rows = tlx.local_alloc((KEYS, HEAD_DIM), DTYPE, 1)
    k = tlx.local_alloc((KEYS, WIDTH), DTYPE, CTAS)  # of both CTAs
    v = tlx.local_alloc((KEYS, HEAD_DIM), DTYPE, 1)
    q_rows = tlx.local_alloc((HALF, HEAD_DIM), DTYPE, 1)
    q_columns = tlx.local_alloc((ROWS, WIDTH), DTYPE, 1)
    g_rows = tlx.local_alloc((HALF, HEAD_DIM), DTYPE, 1)
    g_columns = tlx.local_alloc((ROWS, WIDTH), DTYPE, 1)
    ds_rows = tlx.local_alloc((KEYS, HALF), DTYPE, CTAS)  # of each CTA's keys
    staging = tlx.local_alloc((HALF, HEAD_DIM), tl.float32, 1)
    staged = tlx.local_alloc((KEYS, HEAD_DIM), DTYPE, 1, reuse=staging)  # dV, dK
    if ONCE:
        staging = tlx.local_alloc((HALF, HEAD_DIM), DTYPE, 1, reuse=staging)
    s = tlx.local_alloc((KEYS, ROWS), tl.float32, 1, tlx.storage_kind.tmem)
    # P and dS are in columns 0-31 and 64-95 of S and dP: a role overwrites no scores but its own.
    p = tlx.local_alloc((KEYS, HALF), DTYPE, 4, tlx.storage_kind.tmem, reuse=s)
    dp = tlx.local_alloc((KEYS, ROWS), tl.float32, 1, tlx.storage_kind.tmem)
    ds = tlx.local_alloc((KEYS, HALF), DTYPE, 4, tlx.storage_kind.tmem, reuse=dp)
    dq = tlx.local_alloc((HALF, HEAD_DIM), tl.float32, 1, tlx.storage_kind.tmem, reuse=dp)
    dv = tlx.local_alloc((KEYS, HEAD_DIM), tl.float32, 1, tlx.storage_kind.tmem)
    dk = tlx.local_alloc((KEYS, HEAD_DIM), tl.float32, 1, tlx.storage_kind.tmem)
    k_rows = Ring(k_rows, tlx.alloc_barriers(1), tlx.alloc_barriers(1), 1)
    k = Ring(k, tlx.alloc_barriers(1), tlx.alloc_barriers(1), 1)
    v = Ring(v, tlx.alloc_barriers(1), tlx.alloc_barriers(1), 1)
    q = Halves(
        Ring(q_rows, tlx.alloc_barriers(1), tlx.alloc_barriers(1), 1),
        Ring(q_columns, tlx.alloc_barriers(1), tlx.alloc_barriers(1), 1),
    )
    g = Halves(
        Ring(g_rows, tlx.alloc_barriers(1), tlx.alloc_barriers(1), 1),
        Ring(g_columns, tlx.alloc_barriers(1), tlx.alloc_barriers(1), 1),
    )
    s = OneWay(s, tlx.alloc_barriers(1))
    p = OneWay(p, tlx.alloc_barriers(1, arrive_count=CTAS * MATH_ROLES))
    dp = OneWay(dp, tlx.alloc_barriers(1))
    ds = ScoreGradients(
        OneWay(ds, tlx.alloc_barriers(1, arrive_count=CTAS * MATH_ROLES)),
        OneWay(ds_rows, tlx.alloc_barriers(1, arrive_count=CTAS + 1)),
        OneWay(ds_rows, tlx.alloc_barriers(1)),
    )
    dq = Ring(dq, tlx.alloc_barriers(1), tlx.alloc_barriers(1, arrive_count=CTAS), 1)
    dv = OneWay(dv, tlx.alloc_barriers(1))
    dk_empty = tlx.alloc_barriers(1, arrive_count=CTAS)
    gradients = Gradients(dq_desc, dk_desc, dv_desc)
    descs = Descriptors(
        q_rows_desc, q_columns_desc, k_rows_desc, k_columns_desc, v_desc, g_rows_desc,
        g_columns_desc,
    )  # fmt: skip

    with tlx.async_tasks():
        with tlx.async_task("default"):
            output(
                dq, dv, dk[0], dk_empty, staging[0], staged[0], gradients, list_ptr,
                segments_ptr, scale, output_scale, options,
            )  # fmt: skip
        with tlx.async_task(num_warps=4, registers=REGISTERS, replicate=MATH_ROLES):
            math(tlx.async_task_replica_id(), s, p, dp, ds, list_ptr, segments_ptr, scale, options)
        with tlx.async_task(num_warps=1, registers=64, replicate=PRODUCERS):
            load(
                tlx.async_task_replica_id(), descs, k_rows, k, v, q, g, list_ptr, segments_ptr,
                options,
            )  # fmt: skip
        with tlx.async_task(num_warps=1, registers=64):
            mma(
                k_rows, k, v, q, g, s, p, dp, ds, dv, dk[0], dk_empty, dq, list_ptr, segments_ptr,
                options,
            )  # fmt: skip


def backward(
    grad_out: torch.Tensor, batch: Batch, *, config: Config | None = None,
    work_list: WorkList | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    """(dq, dk, dv), shaped as q, k and v, contiguous; grad_out may have any strides."""
    config = config or default_config(batch)
    (entries,) = work_list or work_list_recipe(batch, config).make(*batch.offsets)
    adds = not config.once
    return launch_backward_pairs(backward_kernel, grad_out, batch, config, entries, adds=adds)
