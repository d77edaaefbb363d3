"""b2, backward for short K and V: two CTAs own all keys and exchange halves of dQ; written once.

Changes from b1_tensor_memory_backward: a cluster of two CTAs takes all keys, up to 256, of a
(sequence, key head), 128 each, while Q and dO stream by, as in v5_short_kv_backward. Each computes
dQ of its keys, sends one half of the columns to the other CTA and adds what arrives to the other
half. So dQ is complete where it is added: no fp32 sum in memory, no zero fill, no rounding kernel;
deterministic.

Why it should help, in bytes for a row of head_dim 128: b1 reads 512, fills 512 with zeros, adds 512
twice at 256 keys, reads them again and writes 256. Here 512 are read and 256 written.
Why it may not: half of dQ in fp32 is 32 KB a step, as much as dS in bf16, which v5 exchanges; but
an exchange of dS needs half of the peer's K too, 16 KB, and 3 KB are left.

| role      | warps | registers | work                                                       |
|-----------|-------|-----------|------------------------------------------------------------|
| output    | 4     | the rest  | half of dQ to the peer, half with the peer's to memory     |
| math (2)  | 4     | 152       | P and dS of 64 rows; at the end of an item, one dV, one dK |
| load, mma | 1     | 48        | TMA loads; all MMAs of this CTA                            |

| barrier        | arrivals    | filled by -> drained by                               |
|----------------|-------------|-------------------------------------------------------|
| k.full         | 1 and bytes | TMA load of this CTA's K of an item -> mma            |
| k.empty        | 1 (commit)  | the item's last dQ and dK -> load                     |
| v.full         | 1 and bytes | TMA load of this CTA's V of an item -> mma            |
| v.empty        | 256 threads | both math roles, dV and dK are stored -> load         |
| q.full[stage]  | 1 and bytes | TMA load of a step's Q -> mma                         |
| q.empty[stage] | 1 (commit)  | the step's dK -> load                                 |
| g.full[stage]  | 1 and bytes | TMA load of a step's dO -> mma                        |
| g.empty[stage] | 1 (commit)  | the step's dV -> load                                 |
| s.full         | 1 (commit)  | S -> both math roles                                  |
| p.full         | 256 threads | both math roles, P is stored and S was read -> mma    |
| dp.full        | 1 (commit)  | dP -> both math roles                                 |
| ds.full        | 256 threads | both math roles, dS is stored and dP was read -> mma  |
| dq.full        | 1 (commit)  | dQ of this CTA's keys -> output                       |
| dq.empty       | 128 threads | output, dQ is in registers -> mma, the next dP        |
| inbox.full     | 1 and bytes | the peer's output, its half of dQ -> output           |
| inbox.empty    | 1           | the peer's output, its inbox is stored -> output      |
| sums_full      | 1 (commit)  | the item's last MMA -> both math roles, for dV and dK |

TMEM: S 0-127, P 0-31 and 64-95; dP, then dQ 128-255; dV, dK.
"""

import torch
import triton
import triton.language as tl
import triton.language.extra.tlx as tlx

from gdpa_kernels.device.groups import OneWay, Ring, ring
from gdpa_kernels.device.ragged import BOUND
from gdpa_kernels.device.rows import fetch_rows, keep_runtime
from gdpa_kernels.gdpa.batch import Batch, WorkList
from gdpa_kernels.gdpa.device.derivatives import dk_factor, dv_factor, times_slope
from gdpa_kernels.gdpa.device.gradients import (
    Gradients,
    few_keys_problem,
    head_and_row,
    launch_gradients,
    tile_descriptors,
)
from gdpa_kernels.gdpa.device.longest_first import Items, LongestFirstRecipe, sequence_and_head
from gdpa_kernels.gdpa.device.single_cta import Config, default_config
from gdpa_kernels.gdpa.device.tensor_memory import (
    HALF,
    KEYS,
    MATH_ROLES,
    PART,
    ROWS,
    store_p,
    store_sum,
)

CTAS = tl.constexpr(2)  # of a cluster
MOST_KEYS = KEYS.value * CTAS.value


def call_problem(batch: Batch) -> str | None:
    """The reason why this rung cannot take a call, beyond `Requires`; None if it can."""
    return few_keys_problem(batch, MOST_KEYS)


def work_list_recipe(batch: Batch, config: Config) -> LongestFirstRecipe:
    """(order,): the sequences, int32 `[sequences]`, those with the most queries first."""
    return LongestFirstRecipe()


@triton.aggregate
class Options:
    """The constants that the roles share."""

    GROUP: tl.constexpr
    ACTIVATION: tl.constexpr
    FOLD: tl.constexpr
    CAUSAL: tl.constexpr
    WINDOW: tl.constexpr
    HEAD_DIM: tl.constexpr
    Q_STAGES: tl.constexpr
    G_STAGES: tl.constexpr
    DTYPE: tl.constexpr


@triton.jit
def steps_of(len_q):
    """Steps of one head, at least one, over all rows, seen by a key or not: their dQ is written
    here."""
    return tl.maximum(tl.cdiv(len_q, ROWS), 1)


@triton.jit
def load(q_desc, k_desc, v_desc, g_desc, q, k, v, g, items, options):
    """The producer: K of an item, the first rows of Q, V, then dO and Q in the order of use."""
    clusters = tl.num_programs(0) // CTAS
    key = tlx.cluster_cta_rank() * KEYS
    phase, count = 0, 0
    for item in tl.range(tl.program_id(0) // CTAS, items.count, clusters):
        start_q, len_q, start_k, len_k, head_k = sequence_and_head(items, item)
        steps = steps_of(len_q)
        tlx.barrier_wait(k.empty[0], phase ^ 1)
        fetch_rows(k_desc, k.buffer[0], k.full[0], start_k, len_k, head_k, key)
        for step in tl.range(0, steps * options.GROUP):
            head, row = head_and_row(step, steps, 0, head_k, options.GROUP, ROWS)
            stage = (count + step) % options.Q_STAGES
            tlx.barrier_wait(q.empty[stage], (((count + step) // options.Q_STAGES) & 1) ^ 1)
            fetch_rows(q_desc, q.buffer[stage], q.full[stage], start_q, len_q, head, row)
            if step == 0:
                tlx.barrier_wait(v.empty[0], phase ^ 1)
                fetch_rows(v_desc, v.buffer[0], v.full[0], start_k, len_k, head_k, key)
            stage = (count + step) % options.G_STAGES
            tlx.barrier_wait(g.empty[stage], (((count + step) // options.G_STAGES) & 1) ^ 1)
            fetch_rows(g_desc, g.buffer[stage], g.full[stage], start_q, len_q, head, row)
        count += steps * options.GROUP
        phase ^= 1


@triton.jit
def from_ds(q, k, ds, dk, dq, count, use_acc, zero, options):
    """dQ of a step, then dK: both read its dS. `zero`: `keep_runtime`."""
    stage = count % options.Q_STAGES
    tlx.barrier_wait(ds.full[0], count & 1)
    d = tlx.local_trans(ds.buffer[zero])
    tlx.async_dot(d, k.buffer[zero], dq.buffer[0], use_acc=False, mBarriers=[dq.full[0]])
    tlx.async_dot(ds.buffer[zero], q.buffer[stage], dk, use_acc=use_acc, mBarriers=[q.empty[stage]])


@triton.jit
def mma(q, k, v, g, s, p, dp, ds, dv, dk, dq, sums_full, items, options):
    """All MMAs, from one thread: they run in the order of their issue. S of a step comes before dQ
    and dK of the step before, for which dS may not be ready."""
    HEAD_DIM: tl.constexpr = options.HEAD_DIM
    clusters = tl.num_programs(0) // CTAS
    phase, count = 0, 0
    for item in tl.range(tl.program_id(0) // CTAS, items.count, clusters):
        _, len_q, _, _, _ = sequence_and_head(items, item)
        steps = steps_of(len_q)
        tlx.barrier_wait(k.full[0], phase)
        for step in tl.range(0, steps * options.GROUP, num_stages=0):
            now = count + step
            zero = keep_runtime(step)
            stage = now % options.Q_STAGES
            tlx.barrier_wait(q.full[stage], (now // options.Q_STAGES) & 1)
            keys, rows = k.buffer[zero], tlx.local_trans(q.buffer[stage])
            tlx.async_dot(keys, rows, s.buffer[0], use_acc=False, mBarriers=[s.full[0]])
            if step == 0:
                tlx.barrier_wait(v.full[0], phase)
            else:
                from_ds(q, k, ds, dk, dq, now - 1, step > 1, zero, options)
            stage = now % options.G_STAGES + zero
            tlx.barrier_wait(g.full[stage], (now // options.G_STAGES) & 1)
            tlx.barrier_wait(dq.empty[0], (now & 1) ^ 1)
            keys, rows = v.buffer[zero], tlx.local_trans(g.buffer[stage])
            tlx.async_dot(keys, rows, dp.buffer[0], use_acc=False, mBarriers=[dp.full[0]])
            tlx.barrier_wait(p.full[0], now & 1)
            for half in tl.static_range(MATH_ROLES):
                rows = tlx.local_slice(g.buffer[stage], [half * HALF, 0], [HALF, HEAD_DIM])
                add = (step > 0) | (half > 0)
                tlx.async_dot(p.buffer[2 * half], rows, dv, use_acc=add, force_async=True)
            tlx.tcgen05_commit(g.empty[stage])
        count += steps * options.GROUP
        from_ds(q, k, ds, dk, dq, count - 1, steps * options.GROUP > 1, 0, options)
        tlx.tcgen05_commit(k.empty[0])
        tlx.tcgen05_commit(sums_full[0])
        phase ^= 1


@triton.jit
def store_ds(role: tl.constexpr, part: tl.constexpr, dp, ds, slope, options):
    """dS of a part of a role's rows."""
    FIRST: tl.constexpr = role * HALF + part * PART
    d = tlx.local_load(tlx.subslice(dp.buffer[0], FIRST, PART))
    d = times_slope(d, slope, options.FOLD).to(options.DTYPE)
    tlx.local_store(tlx.local_slice(ds.buffer[0], [0, FIRST], [KEYS, PART]), d)


@triton.jit
def math(
    role: tl.constexpr, v, s, p, dp, ds, dv, dk, staged, sums_full, gradients, items, scale,
    output_scale, options,
):  # fmt: skip
    """A consumer: 64 rows of every step, and dV or dK of an item."""
    clusters = tl.num_programs(0) // CTAS
    key = tlx.cluster_cta_rank() * KEYS
    phase, count = 0, 0
    for item in tl.range(tl.program_id(0) // CTAS, items.count, clusters):
        _, len_q, start_k, len_k, head_k = sequence_and_head(items, item)
        steps = steps_of(len_q)
        for step in tl.range(0, steps * options.GROUP):
            head, row = head_and_row(step, steps, 0, head_k, options.GROUP, ROWS)
            row += role * HALF
            tlx.barrier_wait(s.full[0], (count + step) & 1)
            slope = store_p(role, 0, s, p, scale, head, row, key, (0, None), options)
            slope_of_second = store_p(role, 1, s, p, scale, head, row, key, (0, None), options)
            tlx.barrier_arrive(p.full[0])
            tlx.barrier_wait(dp.full[0], (count + step) & 1)
            store_ds(role, 0, dp, ds, slope, options)
            store_ds(role, 1, dp, ds, slope_of_second, options)
            tlx.fence("async_shared")
            tlx.barrier_arrive(ds.full[0])
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
def output(dq, halves, inbox, staged, dq_desc, items, factor, options):
    """Writes half of the columns of dQ of every step; the other half goes to the peer."""
    WIDTH: tl.constexpr = options.HEAD_DIM // CTAS
    clusters = tl.num_programs(0) // CTAS
    rank = tlx.cluster_cta_rank()
    count = 0
    for item in tl.range(tl.program_id(0) // CTAS, items.count, clusters):
        start_q, len_q, _, _, head_k = sequence_and_head(items, item)
        steps = steps_of(len_q)
        for step in tl.range(0, steps * options.GROUP):
            now = (count + step) & 1
            head, row = head_and_row(step, steps, 0, head_k, options.GROUP, ROWS)
            tlx.barrier_expect_bytes(inbox.full[0], ROWS * WIDTH * 4)
            tlx.barrier_wait(dq.full[0], now)
            tlx.barrier_wait(inbox.empty[0], now ^ 1)
            peer_half = tlx.local_load(halves[1 - rank])
            tlx.async_remote_shmem_store(inbox.buffer[0], peer_half, 1 - rank, inbox.full[0])
            local_half = tlx.local_load(halves[rank])
            tlx.barrier_arrive(dq.empty[0])
            tlx.barrier_wait(inbox.full[0], now)
            local_half = (local_half + tlx.local_load(inbox.buffer[0])) * factor
            tlx.local_store(staged, local_half.to(options.DTYPE))
            tlx.fence("async_shared")
            coords = [BOUND, start_q + len_q, head, BOUND - len_q + row, rank * WIDTH]
            tlx.async_descriptor_store(dq_desc, staged, coords)
            tlx.async_descriptor_store_wait(0)
            tlx.barrier_arrive(inbox.empty[0], 1, remote_cta_rank=1 - rank)
        count += steps * options.GROUP
    # The peer still arrives here: this CTA's memory must not go before it has.
    tlx.barrier_wait(inbox.empty[0], (count & 1) ^ 1)


@triton.jit(do_not_specialize=["num_items", "max_seqlen_q"])
def backward_kernel(
    q_desc, k_desc, v_desc, g_desc, dq_desc, dk_desc, dv_desc,
    order_ptr, cu_seqlens_q_ptr, cu_seqlens_k_ptr, num_items, max_seqlen_q, scale, output_scale,
    NUM_HEADS_K: tl.constexpr, GROUP: tl.constexpr, ACTIVATION: tl.constexpr, FOLD: tl.constexpr,
    CAUSAL: tl.constexpr, WINDOW: tl.constexpr, HEAD_DIM: tl.constexpr, Q_STAGES: tl.constexpr,
    G_STAGES: tl.constexpr, REGISTERS: tl.constexpr,
):  # fmt: skip
    """dQ, dK and dV of this cluster's items."""
    DTYPE: tl.constexpr = tlx.dtype_of(q_desc)
    options = Options(GROUP, ACTIVATION, FOLD, CAUSAL, WINDOW, HEAD_DIM, Q_STAGES, G_STAGES, DTYPE)
    q = tlx.local_alloc((ROWS, HEAD_DIM), DTYPE, Q_STAGES)
    k = tlx.local_alloc((KEYS, HEAD_DIM), DTYPE, 1)
    v = tlx.local_alloc((KEYS, HEAD_DIM), DTYPE, 1)
    g = tlx.local_alloc((ROWS, HEAD_DIM), DTYPE, G_STAGES)
    ds = tlx.local_alloc((KEYS, ROWS), DTYPE, 1)
    staged = tlx.local_alloc((KEYS, HEAD_DIM), DTYPE, 1, reuse=ds)  # dK, after the last dS
    inbox = tlx.local_alloc((ROWS, HEAD_DIM // CTAS), tl.float32, 1)
    half = tlx.local_alloc((ROWS, HEAD_DIM // CTAS), DTYPE, 1, reuse=inbox)  # the sum, of dQ
    s = tlx.local_alloc((KEYS, ROWS), tl.float32, 1, tlx.storage_kind.tmem)
    # In columns 0-31 and 64-95 of S: a role overwrites no S but its own.
    p = tlx.local_alloc((KEYS, HALF), DTYPE, 4, tlx.storage_kind.tmem, reuse=s)
    dp = tlx.local_alloc((KEYS, ROWS), tl.float32, 1, tlx.storage_kind.tmem)
    dq = tlx.local_alloc((ROWS, HEAD_DIM), tl.float32, 1, tlx.storage_kind.tmem, reuse=dp)
    halves = tlx.local_alloc(
        (ROWS, HEAD_DIM // CTAS), tl.float32, CTAS, tlx.storage_kind.tmem, reuse=dp
    )
    dv = tlx.local_alloc((KEYS, HEAD_DIM), tl.float32, 1, tlx.storage_kind.tmem)
    dk = tlx.local_alloc((KEYS, HEAD_DIM), tl.float32, 1, tlx.storage_kind.tmem)
    q = Ring(q, tlx.alloc_barriers(Q_STAGES), tlx.alloc_barriers(Q_STAGES), Q_STAGES)
    k = Ring(k, tlx.alloc_barriers(1), tlx.alloc_barriers(1), 1)
    v = ring(v, 1, MATH_ROLES)
    g = Ring(g, tlx.alloc_barriers(G_STAGES), tlx.alloc_barriers(G_STAGES), G_STAGES)
    s = OneWay(s, tlx.alloc_barriers(1))
    p = OneWay(p, tlx.alloc_warp_barrier(1, 4, MATH_ROLES))
    dp = OneWay(dp, tlx.alloc_barriers(1))
    ds = OneWay(ds, tlx.alloc_warp_barrier(1, 4, MATH_ROLES))
    dq = ring(dq, 1)
    inbox = Ring(inbox, tlx.alloc_barriers(1), tlx.alloc_barriers(1), 1)
    sums_full = tlx.alloc_barriers(1)
    gradients = Gradients(dq_desc, dk_desc, dv_desc)
    items = Items(
        order_ptr, cu_seqlens_q_ptr, cu_seqlens_k_ptr, num_items, max_seqlen_q, NUM_HEADS_K
    )
    factor = dk_factor(scale, output_scale, FOLD)

    with tlx.async_tasks():
        with tlx.async_task("default"):
            output(dq, halves, inbox, half[0], dq_desc, items, factor, options)
        with tlx.async_task(num_warps=4, registers=REGISTERS, replicate=MATH_ROLES):
            math(
                tlx.async_task_replica_id(), v, s, p, dp, ds, dv[0], dk[0], staged[0], sums_full,
                gradients, items, scale, output_scale, options,
            )  # fmt: skip
        with tlx.async_task(num_warps=1, registers=48):
            load(q_desc, k_desc, v_desc, g_desc, q, k, v, g, items, options)
        with tlx.async_task(num_warps=1, registers=48):
            mma(q, k, v, g, s, p, dp, ds, dv[0], dk[0], dq, sums_full, items, options)


def backward(
    grad_out: torch.Tensor, batch: Batch, *, config: Config | None = None,
    work_list: WorkList | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    """(dq, dk, dv), shaped as q, k and v, contiguous; grad_out may have any strides."""
    config = config or default_config(batch)
    (order,) = work_list or work_list_recipe(batch, config).make(*batch.offsets)
    items = batch.sequences * batch.num_heads_k
    boxes = (ROWS.value, batch.head_dim // CTAS.value), (KEYS.value, None), (KEYS.value, None)
    loads = tile_descriptors(grad_out, batch, ROWS.value, KEYS.value)
    return launch_gradients(
        backward_kernel, batch, config, loads, boxes,
        (order, batch.cu_seqlens_q, batch.cu_seqlens_k, items, batch.max_seqlen_q), items,
        ctas=CTAS.value, adds=False,
    )  # fmt: skip
