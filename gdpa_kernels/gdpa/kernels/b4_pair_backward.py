"""b4, backward: pairs of CTAs, which exchange dS.

Changes from b3_dk_first_backward: an item has 256 keys, 128 in each CTA, and all MMAs are of the
pair. S, dP, dV and dK read half of Q and dO from each CTA, S and dP half of the rows, dV and dK
half of the columns. dQ has 64 rows in each CTA: a math role's dS goes to the CTA that has its rows.
dP comes before dV again, since dQ leaves sooner.

Why it should help: a step takes 2,816 clocks of the port of shared memory instead of 3,840, and
half as many additions of dQ. Why it may not: the MMAs of dQ have 64 rows in each CTA, which may
halve their rate; and every step waits for the peer.

| role     | warps | registers | work                                                       |
|----------|-------|-----------|------------------------------------------------------------|
| output   | 4     | the rest  | 64 rows of dQ of a step: TMEM, staging, TMA reduce-add     |
| math (2) | 4     | 152       | P and dS of 64 rows; at the end of an item, one dV, one dK |
| mma      | 1     | 80        | leader: all MMAs; peer: tells the leader that dS has come  |
| load     | 1     | 80        | its keys of K and V, half of the columns of K, halves of a |
|          |       |           | step's Q and dO                                            |

| barrier         | arrivals           | filled by -> drained by                                |
|-----------------|--------------------|--------------------------------------------------------|
| k_rows.full     | 1 and bytes        | TMA loads of K of both CTAs, rows and columns -> mma   |
| k_rows.empty    | 1 (commit to both) | the item's last dQ -> load                             |
| v.full          | 1 and bytes        | TMA loads of V of both CTAs -> mma                     |
| v.empty         | 256 threads        | math of this CTA, dV and dK are stored -> load         |
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
| sums_full       | 1 (commit to both) | the item's last MMA -> both math roles, for dV and dK  |

mma waits in the leader alone, on barriers of the leader; only ds.peer.full is waited for in both
CTAs. `1 and bytes` of the loads is the leader's, which expects the bytes of both CTAs.
TMEM: S 0-127, P 0-31 and 64-95; dP 128-255, dS 128-159 and 192-223, then dQ 128-191; dV, dK.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
import triton.language.extra.tlx as tlx

from gdpa_kernels.device.groups import OneWay, Ring, ring
from gdpa_kernels.device.pairs import CTAS, fetch_part, pair_index_and_count
from gdpa_kernels.device.ragged import BOUND
from gdpa_kernels.device.rows import keep_runtime
from gdpa_kernels.gdpa.batch import Batch, WorkList
from gdpa_kernels.gdpa.device.derivatives import dk_factor, dv_factor
from gdpa_kernels.gdpa.device.gradients import (
    Gradients,
    head_and_row,
    steps_of,
    sums_commute,
)
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
from gdpa_kernels.gdpa.device.tensor_memory import HALF, KEYS, MATH_ROLES, ROWS, store_sum
from gdpa_kernels.gdpa.device.work_list import ZigzagRecipe, count_items, entry, key_list_recipe


@dataclass(frozen=True)
class Config:
    """Launch constants.

    fold: leave factors of the activation to the sums where `activations.foldable`. registers: of a
    math thread.
    """

    fold: bool = True
    registers: int = 152


def default_config(batch: Batch) -> Config:
    """The same for every call."""
    return Config()


def is_deterministic(batch: Batch) -> bool:
    """True with at most two tiles of keys; see `sums_commute`."""
    return sums_commute(batch, ITEM.value)


def work_list_recipe(batch: Batch, config: Config) -> ZigzagRecipe:
    """The list of tiles of keys, those with the most queries first."""
    return key_list_recipe(batch, ITEM.value, ROWS.value)


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


@triton.jit
def load(descs, k_rows, k, v, q, g, list_ptr, options):
    """The producer of a CTA, in the order in which buffers are free again."""
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
        start, steps = steps_of(key, len_q, ROWS, ITEM, options)
        cta_key = key + rank * KEYS
        fetch(descs.k_rows, k_rows, phase ^ 1, 2 * TILE, start_k, len_k, head_k, cta_key, 0)
        for owner in tl.static_range(CTAS):
            keys, owner_key = k[owner], key + owner * KEYS
            fetch_part(
                descs.k_columns, keys, k_rows.full[0], start_k, len_k, head_k, owner_key, column
            )
        for step in tl.range(0, steps * options.GROUP):
            head, row = head_and_row(step, steps, start, head_k, options.GROUP, ROWS)
            half = row + rank * HALF
            free = ((count + step) & 1) ^ 1
            fetch(descs.q_rows, q.rows, free, STEP, start_q, len_q, head, half, 0)
            if step == 0:
                fetch(descs.v, v, phase ^ 1, TILE, start_k, len_k, head_k, cta_key, 0)
            fetch(descs.g_rows, g.rows, free, STEP, start_g, len_q, head, half, 0)
            fetch(descs.g_columns, g.columns, free, STEP, start_g, len_q, head, row, column)
            fetch(descs.q_columns, q.columns, free, STEP, start_q, len_q, head, row, column)
        count += steps * options.GROUP
        phase ^= 1


@triton.jit
def from_ds(q, k, ds, dk, dq, count, use_acc, zero, options):
    """dK of a step, then dQ over the dS that dK has read. `zero`: `keep_runtime`."""
    WIDTH: tl.constexpr = options.HEAD_DIM // CTAS
    tlx.barrier_wait(q.columns.full[0], count & 1)
    tlx.barrier_wait(ds.for_dk.full[0], count & 1)
    add_products(ds.for_dk, q.columns, dk, use_acc, WIDTH)
    tlx.barrier_wait(ds.for_dq.full[0], count & 1)
    tlx.barrier_wait(ds.peer.full[0], count & 1)
    tlx.fence("async_shared")
    for owner in tl.static_range(CTAS):
        d = tlx.local_trans(ds.for_dq.buffer[owner + zero])
        tlx.async_dot(
            d, k[owner + zero], dq.buffer[0], use_acc=owner > 0, force_async=True,
            two_ctas=True,
        )  # fmt: skip
    tlx.tcgen05_commit(dq.full[0], two_ctas=True)


@triton.jit
def mma(k_rows, k, v, q, g, s, p, dp, ds, dv, dk, dq, sums_full, list_ptr, options):
    """All MMAs, issued by the leader alone. The peer's thread tells it that dS has arrived
    there."""
    WIDTH: tl.constexpr = options.HEAD_DIM // CTAS
    first, pairs = pair_index_and_count()
    num_items = count_items(list_ptr)
    leads = tlx.cluster_cta_rank() == 0
    phase, count = 0, 0
    for item in tl.range(first, num_items, pairs):
        _, _, _, _, len_q, _, key = entry(list_ptr, item)
        _, steps = steps_of(key, len_q, ROWS, ITEM, options)
        if leads:
            tlx.barrier_wait(k_rows.full[0], phase)
            for step in tl.range(0, steps * options.GROUP, num_stages=0):
                now = count + step
                zero = keep_runtime(step)
                tlx.barrier_wait(q.rows.full[0], now & 1)
                tlx.async_dot(
                    k_rows.buffer[zero], tlx.local_trans(q.rows.buffer[zero]), s.buffer[0],
                    use_acc=False, mBarriers=[s.full[0]], two_ctas=True,
                )  # fmt: skip
                tlx.tcgen05_commit(q.rows.empty[0], two_ctas=True)
                if step == 0:
                    tlx.barrier_wait(v.full[0], phase)
                else:
                    from_ds(q, k, ds, dk, dq, now - 1, step > 1, zero, options)
                tlx.barrier_wait(g.rows.full[0], now & 1)
                tlx.barrier_wait(dq.empty[0], (now & 1) ^ 1)
                tlx.async_dot(
                    v.buffer[zero], tlx.local_trans(g.rows.buffer[zero]), dp.buffer[0],
                    use_acc=False, mBarriers=[dp.full[0]], two_ctas=True,
                )  # fmt: skip
                tlx.tcgen05_commit(g.rows.empty[0], two_ctas=True)
                tlx.barrier_wait(g.columns.full[0], now & 1)
                tlx.barrier_wait(p.full[0], now & 1)
                add_products(p, g.columns, dv, step > 0, WIDTH)
            last = count + steps * options.GROUP - 1
            more = steps * options.GROUP > 1
            from_ds(q, k, ds, dk, dq, last, more, 0, options)
            tlx.tcgen05_commit(k_rows.empty[0], two_ctas=True)
            tlx.tcgen05_commit(sums_full[0], two_ctas=True)
        else:
            for step in tl.range(0, steps * options.GROUP):
                tlx.barrier_wait(ds.peer.full[0], (count + step) & 1)
                tlx.fence("async_shared")
                tlx.barrier_arrive(ds.for_dq.full[0], 1, remote_cta_rank=0)
        count += steps * options.GROUP
        phase ^= 1


@triton.jit
def math(
    role: tl.constexpr, v, s, p, dp, ds, dv, dk, staged, sums_full, gradients, list_ptr, scale,
    output_scale, options,
):  # fmt: skip
    """A consumer: 64 rows of every step, and dV or dK of this CTA's keys."""
    rank = tlx.cluster_cta_rank()
    first, pairs = pair_index_and_count()
    num_items = count_items(list_ptr)
    phase, count = 0, 0
    for item in tl.range(first, num_items, pairs):
        start_k, _, len_k, _, len_q, head_k, key = entry(list_ptr, item)
        start, steps = steps_of(key, len_q, ROWS, ITEM, options)
        key += rank * KEYS
        for step in tl.range(0, steps * options.GROUP):
            head, row = head_and_row(step, steps, start, head_k, options.GROUP, ROWS)
            row += role * HALF
            compute_p_and_ds(
                role, s, p, dp, ds, (count + step) & 1, scale, head, row, key, (0, None), rank,
                options,
            )  # fmt: skip
        count += steps * options.GROUP
        tlx.barrier_wait(sums_full[0], phase)
        if role == 0:
            factor = dv_factor(scale, output_scale, options.FOLD)
            store_sum(gradients.dv, dv, v.buffer[0], factor, start_k, len_k, head_k, key)
        else:
            factor = dk_factor(scale, output_scale, options.FOLD)
            store_sum(gradients.dk, dk, staged, factor, start_k, len_k, head_k, key)
        tlx.barrier_arrive(v.empty[0])
        phase ^= 1


@triton.jit
def output(dq, staging, dq_desc, list_ptr, options):
    """Adds this CTA's 64 rows of dQ of every step to memory."""
    rank = tlx.cluster_cta_rank()
    first, pairs = pair_index_and_count()
    num_items = count_items(list_ptr)
    count = 0
    for item in tl.range(first, num_items, pairs):
        _, _, _, start_out, len_q, head_k, key = entry(list_ptr, item)
        start, steps = steps_of(key, len_q, ROWS, ITEM, options)
        for step in tl.range(0, steps * options.GROUP):
            head, row = head_and_row(step, steps, start, head_k, options.GROUP, ROWS)
            tlx.barrier_wait(dq.full[0], (count + step) & 1)
            x = tlx.local_load(dq.buffer[0])
            tlx.barrier_arrive(dq.empty[0], 1, remote_cta_rank=0)
            tlx.async_descriptor_store_wait(0)
            tlx.local_store(staging, x)
            tlx.fence("async_shared")
            coords = [BOUND, start_out + len_q, head, BOUND - len_q + row + rank * HALF, 0]
            tlx.async_descriptor_store(dq_desc, staging, coords, store_reduce="add")
        count += steps * options.GROUP
    tlx.async_descriptor_store_wait(0)


@triton.jit
def backward_kernel(
    q_rows_desc, q_columns_desc, k_rows_desc, k_columns_desc, v_desc, g_rows_desc, g_columns_desc,
    dq_desc, dk_desc, dv_desc, list_ptr, scale, output_scale,
    GROUP: tl.constexpr, SHARED_Q: tl.constexpr, ACTIVATION: tl.constexpr, FOLD: tl.constexpr,
    CAUSAL: tl.constexpr, WINDOW: tl.constexpr, HEAD_DIM: tl.constexpr, REGISTERS: tl.constexpr,
):  # fmt: skip
    """dK and dV of the listed items of this pair, and what their keys add to dQ."""
    DTYPE: tl.constexpr = tlx.dtype_of(q_rows_desc)
    WIDTH: tl.constexpr = HEAD_DIM // CTAS
    options = Options(GROUP, SHARED_Q, ACTIVATION, FOLD, CAUSAL, WINDOW, HEAD_DIM, DTYPE)
    k_rows = tlx.local_alloc((KEYS, HEAD_DIM), DTYPE, 1)
    k = tlx.local_alloc((KEYS, WIDTH), DTYPE, CTAS)  # of both CTAs; comes and goes with k_rows
    v = tlx.local_alloc((KEYS, HEAD_DIM), DTYPE, 1)
    q_rows = tlx.local_alloc((HALF, HEAD_DIM), DTYPE, 1)
    q_columns = tlx.local_alloc((ROWS, WIDTH), DTYPE, 1)
    g_rows = tlx.local_alloc((HALF, HEAD_DIM), DTYPE, 1)
    g_columns = tlx.local_alloc((ROWS, WIDTH), DTYPE, 1)
    ds_rows = tlx.local_alloc((KEYS, HALF), DTYPE, CTAS)  # of each CTA's keys
    staged = tlx.local_alloc((KEYS, HEAD_DIM), DTYPE, 1, reuse=ds_rows)  # dK, after the last dS
    staging = tlx.local_alloc((HALF, HEAD_DIM), tl.float32, 1)
    s = tlx.local_alloc((KEYS, ROWS), tl.float32, 1, tlx.storage_kind.tmem)
    # P and dS are in columns 0-31 and 64-95 of S and dP: a role overwrites no scores but its own.
    p = tlx.local_alloc((KEYS, HALF), DTYPE, 4, tlx.storage_kind.tmem, reuse=s)
    dp = tlx.local_alloc((KEYS, ROWS), tl.float32, 1, tlx.storage_kind.tmem)
    ds = tlx.local_alloc((KEYS, HALF), DTYPE, 4, tlx.storage_kind.tmem, reuse=dp)
    dq = tlx.local_alloc((HALF, HEAD_DIM), tl.float32, 1, tlx.storage_kind.tmem, reuse=dp)
    dv = tlx.local_alloc((KEYS, HEAD_DIM), tl.float32, 1, tlx.storage_kind.tmem)
    dk = tlx.local_alloc((KEYS, HEAD_DIM), tl.float32, 1, tlx.storage_kind.tmem)
    k_rows = Ring(k_rows, tlx.alloc_barriers(1), tlx.alloc_barriers(1), 1)
    v = ring(v, 1, MATH_ROLES)
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
    sums_full = tlx.alloc_barriers(1)
    gradients = Gradients(dq_desc, dk_desc, dv_desc)
    descs = Descriptors(
        q_rows_desc, q_columns_desc, k_rows_desc, k_columns_desc, v_desc, g_rows_desc,
        g_columns_desc,
    )  # fmt: skip

    with tlx.async_tasks():
        with tlx.async_task("default"):
            output(dq, staging[0], dq_desc, list_ptr, options)
        with tlx.async_task(num_warps=4, registers=REGISTERS, replicate=MATH_ROLES):
            math(
                tlx.async_task_replica_id(), v, s, p, dp, ds, dv[0], dk[0], staged[0], sums_full,
                gradients, list_ptr, scale, output_scale, options,
            )  # fmt: skip
        with tlx.async_task(num_warps=1, registers=80):
            load(descs, k_rows, k, v, q, g, list_ptr, options)
        with tlx.async_task(num_warps=1, registers=80):
            mma(k_rows, k, v, q, g, s, p, dp, ds, dv[0], dk[0], dq, sums_full, list_ptr, options)


def backward(
    grad_out: torch.Tensor, batch: Batch, *, config: Config | None = None,
    work_list: WorkList | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    """(dq, dk, dv), shaped as q, k and v, contiguous; grad_out may have any strides."""
    config = config or default_config(batch)
    (entries,) = work_list or work_list_recipe(batch, config).make(*batch.offsets)
    return launch_backward_pairs(backward_kernel, grad_out, batch, config, entries)
