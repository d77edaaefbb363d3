"""b3, backward: dS in tensor memory too, and dK before dQ.

Changes from b1_tensor_memory_backward: `math` stores dS over dP, as it stores P over S, and dK
reads it there. It stores dS to shared memory as well, since dQ = dS K has queries as rows of its
left operand. dQ still takes dP's columns, so it comes after dK now, and dV comes before dP.

Why it should help: shared memory is b1's bound, and 32 of the 512 KB of a step are dS that dK
reads: 3,840 clocks instead of 4,096. While dQ leaves, dV runs, whose P is ready by then; and dS is
stored to shared memory while dK runs. Why it may not: S alone is overlapped with the making of dS.

| role      | warps | registers | work                                                      |
|-----------|-------|-----------|-----------------------------------------------------------|
| output    | 4     | the rest  | dQ of a step: TMEM, staging, TMA reduce-add               |
| math (2)  | 4     | 152       | P and dS of 64 rows; at the end of a tile, one dV, one dK |
| load, mma | 1     | 48        | TMA loads; all MMAs                                       |

| barrier        | arrivals    | filled by -> drained by                               |
|----------------|-------------|-------------------------------------------------------|
| k.full         | 1 and bytes | TMA load of a tile's K -> mma                         |
| k.empty        | 1 (commit)  | the tile's last dQ -> load                            |
| v.full         | 1 and bytes | TMA load of a tile's V -> mma                         |
| v.empty        | 256 threads | both math roles, dV and dK are stored -> load         |
| q.full[stage]  | 1 and bytes | TMA load of a step's Q -> mma                         |
| q.empty[stage] | 1 (commit)  | the step's dK -> load                                 |
| g.full[stage]  | 1 and bytes | TMA load of a step's dO -> mma                        |
| g.empty[stage] | 1 (commit)  | the step's dP, which follows its dV -> load           |
| s.full         | 1 (commit)  | S -> both math roles                                  |
| p.full         | 256 threads | both math roles, P is stored and S was read -> mma    |
| dp.full        | 1 (commit)  | dP -> both math roles                                 |
| ds.full        | 256 threads | both math roles, dS is in TMEM over dP -> mma, dK     |
| ds_rows.full   | 256 threads | both math roles, dS is in shared memory -> mma, dQ    |
| dq.full        | 1 (commit)  | dQ -> output                                          |
| dq.empty       | 128 threads | output, dQ is in registers -> mma, the next dP        |
| sums_full      | 1 (commit)  | the tile's last MMA -> both math roles, for dV and dK |

TMEM: S 0-127, P 0-31 and 64-95; dP 128-255, dS 128-159 and 192-223, then dQ 128-255; dV, dK.
"""

import torch
import triton
import triton.language as tl
import triton.language.extra.tlx as tlx

from gdpa_kernels.device.groups import OneWay, Ring, ring
from gdpa_kernels.device.rows import keep_runtime
from gdpa_kernels.gdpa.batch import Batch, WorkList
from gdpa_kernels.gdpa.device.derivatives import dk_factor, dv_factor
from gdpa_kernels.gdpa.device.gradients import (
    Gradients,
    head_and_row,
    steps_of,
    sums_commute,
)
from gdpa_kernels.gdpa.device.single_cta import (
    COLUMNS,
    Config,
    Options,
    default_config,
    launch_tiles,
    load,
    output,
)
from gdpa_kernels.gdpa.device.tensor_memory import (
    HALF,
    KEYS,
    MATH_ROLES,
    PART,
    ROWS,
    store_ds,
    store_p,
    store_sum,
)
from gdpa_kernels.gdpa.device.work_list import ZigzagRecipe, count_items, entry, key_list_recipe


def is_deterministic(batch: Batch) -> bool:
    """True with at most two tiles of keys; see `sums_commute`."""
    return sums_commute(batch, KEYS.value)


def work_list_recipe(batch: Batch, config: Config) -> ZigzagRecipe:
    """The list of tiles of keys, those with the most queries first."""
    return key_list_recipe(batch, KEYS.value, ROWS.value)


@triton.jit
def from_ds(q, k, ds, ds_rows, dk, dq, count, use_acc, zero, options):
    """dK of a step, then dQ over the dS that dK has read. `zero`: `keep_runtime`."""
    stage = count % options.Q_STAGES
    tlx.barrier_wait(ds.full[0], count & 1)
    for half in tl.static_range(MATH_ROLES):
        rows = tlx.local_slice(q.buffer[stage], [half * HALF, 0], [HALF, options.HEAD_DIM])
        add = use_acc | (half > 0)
        tlx.async_dot(ds.buffer[2 * half], rows, dk, use_acc=add, force_async=True)
    tlx.tcgen05_commit(q.empty[stage])
    tlx.barrier_wait(ds_rows.full[0], count & 1)
    d = tlx.local_trans(ds_rows.buffer[zero])
    tlx.async_dot(d, k.buffer[zero], dq.buffer[0], use_acc=False, mBarriers=[dq.full[0]])


@triton.jit
def mma(q, k, v, g, s, p, dp, ds, ds_rows, dv, dk, dq, sums_full, list_ptr, options):
    """All MMAs, from one thread: they run in the order of their issue. S of a step comes before dK
    and dQ of the step before, for which dS may not be ready, and dV before dP, for which dQ may not
    have left."""
    HEAD_DIM: tl.constexpr = options.HEAD_DIM
    num_items = count_items(list_ptr)
    phase, count = 0, 0
    for item in tl.range(tl.program_id(0), num_items, tl.num_programs(0)):
        _, _, _, _, len_q, _, key = entry(list_ptr, item)
        _, steps = steps_of(key, len_q, ROWS, KEYS, options)
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
                from_ds(q, k, ds, ds_rows, dk, dq, now - 1, step > 1, zero, options)
            stage = now % options.G_STAGES + zero
            tlx.barrier_wait(g.full[stage], (now // options.G_STAGES) & 1)
            tlx.barrier_wait(p.full[0], now & 1)
            for half in tl.static_range(MATH_ROLES):
                rows = tlx.local_slice(g.buffer[stage], [half * HALF, 0], [HALF, HEAD_DIM])
                add = (step > 0) | (half > 0)
                tlx.async_dot(p.buffer[2 * half], rows, dv, use_acc=add, force_async=True)
            tlx.barrier_wait(dq.empty[0], (now & 1) ^ 1)
            keys, rows = v.buffer[zero], tlx.local_trans(g.buffer[stage])
            tlx.async_dot(
                keys, rows, dp.buffer[0], use_acc=False, mBarriers=[dp.full[0], g.empty[stage]]
            )
        count += steps * options.GROUP
        from_ds(q, k, ds, ds_rows, dk, dq, count - 1, steps * options.GROUP > 1, 0, options)
        tlx.tcgen05_commit(k.empty[0])
        tlx.tcgen05_commit(sums_full[0])
        phase ^= 1


@triton.jit
def stage_ds(role: tl.constexpr, part: tl.constexpr, ds_rows, d):
    """Store dS of a part of a role's rows where dQ reads it."""
    FIRST: tl.constexpr = role * HALF + part * PART
    tlx.local_store(tlx.local_slice(ds_rows.buffer[0], [0, FIRST], [KEYS, PART]), d)


@triton.jit
def math(
    role: tl.constexpr, v, s, p, dp, ds, ds_rows, dv, dk, staged, sums_full, gradients, list_ptr,
    scale, output_scale, options,
):  # fmt: skip
    """A consumer: 64 rows of every step, and dV or dK of a tile."""
    num_items = count_items(list_ptr)
    phase, count = 0, 0
    for item in tl.range(tl.program_id(0), num_items, tl.num_programs(0)):
        start_k, _, len_k, _, len_q, head_k, key = entry(list_ptr, item)
        start, steps = steps_of(key, len_q, ROWS, KEYS, options)
        for step in tl.range(0, steps * options.GROUP):
            head, row = head_and_row(step, steps, start, head_k, options.GROUP, ROWS)
            row += role * HALF
            tlx.barrier_wait(s.full[0], (count + step) & 1)
            slope = store_p(role, 0, s, p, scale, head, row, key, (0, None), options)
            slope_of_second = store_p(role, 1, s, p, scale, head, row, key, (0, None), options)
            tlx.barrier_arrive(p.full[0])
            tlx.barrier_wait(dp.full[0], (count + step) & 1)
            d = store_ds(role, 0, dp, ds, slope, options)
            d_of_second = store_ds(role, 1, dp, ds, slope_of_second, options)
            tlx.barrier_arrive(ds.full[0])
            stage_ds(role, 0, ds_rows, d)
            stage_ds(role, 1, ds_rows, d_of_second)
            tlx.fence("async_shared")
            tlx.barrier_arrive(ds_rows.full[0])
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
def backward_kernel(
    q_desc, k_desc, v_desc, g_desc, dq_desc, dk_desc, dv_desc, list_ptr, scale, output_scale,
    GROUP: tl.constexpr, SHARED_Q: tl.constexpr, ACTIVATION: tl.constexpr, FOLD: tl.constexpr,
    CAUSAL: tl.constexpr, WINDOW: tl.constexpr, HEAD_DIM: tl.constexpr, Q_STAGES: tl.constexpr,
    G_STAGES: tl.constexpr, REGISTERS: tl.constexpr,
):  # fmt: skip
    """dK and dV of the listed tiles of this program, and what their keys add to dQ."""
    DTYPE: tl.constexpr = tlx.dtype_of(q_desc)
    options = Options(
        GROUP, SHARED_Q, ACTIVATION, FOLD, CAUSAL, WINDOW, HEAD_DIM, Q_STAGES, G_STAGES, DTYPE
    )
    q = tlx.local_alloc((ROWS, HEAD_DIM), DTYPE, Q_STAGES)
    k = tlx.local_alloc((KEYS, HEAD_DIM), DTYPE, 1)
    v = tlx.local_alloc((KEYS, HEAD_DIM), DTYPE, 1)
    g = tlx.local_alloc((ROWS, HEAD_DIM), DTYPE, G_STAGES)
    ds_rows = tlx.local_alloc((KEYS, ROWS), DTYPE, 1)
    staged = tlx.local_alloc((KEYS, HEAD_DIM), DTYPE, 1, reuse=ds_rows)  # dK, after the last dS
    staging = tlx.local_alloc((ROWS, COLUMNS), tl.float32, 2)
    s = tlx.local_alloc((KEYS, ROWS), tl.float32, 1, tlx.storage_kind.tmem)
    # P and dS are in columns 0-31 and 64-95 of S and dP: a role overwrites no scores but its own.
    p = tlx.local_alloc((KEYS, HALF), DTYPE, 4, tlx.storage_kind.tmem, reuse=s)
    dp = tlx.local_alloc((KEYS, ROWS), tl.float32, 1, tlx.storage_kind.tmem)
    ds = tlx.local_alloc((KEYS, HALF), DTYPE, 4, tlx.storage_kind.tmem, reuse=dp)
    dq = tlx.local_alloc((ROWS, HEAD_DIM), tl.float32, 1, tlx.storage_kind.tmem, reuse=dp)
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
    ds_rows = OneWay(ds_rows, tlx.alloc_warp_barrier(1, 4, MATH_ROLES))
    dq = ring(dq, 1)
    sums_full = tlx.alloc_barriers(1)
    gradients = Gradients(dq_desc, dk_desc, dv_desc)

    with tlx.async_tasks():
        with tlx.async_task("default"):
            output(dq, staging, dq_desc, list_ptr, options)
        with tlx.async_task(num_warps=4, registers=REGISTERS, replicate=MATH_ROLES):
            math(
                tlx.async_task_replica_id(), v, s, p, dp, ds, ds_rows, dv[0], dk[0], staged[0],
                sums_full, gradients, list_ptr, scale, output_scale, options,
            )  # fmt: skip
        with tlx.async_task(num_warps=1, registers=48):
            load(q_desc, k_desc, v_desc, g_desc, q, k, v, g, list_ptr, options)
        with tlx.async_task(num_warps=1, registers=48):
            mma(q, k, v, g, s, p, dp, ds, ds_rows, dv[0], dk[0], dq, sums_full, list_ptr, options)


def backward(
    grad_out: torch.Tensor, batch: Batch, *, config: Config | None = None,
    work_list: WorkList | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    """(dq, dk, dv), shaped as q, k and v, contiguous; grad_out may have any strides."""
    config = config or default_config(batch)
    (entries,) = work_list or work_list_recipe(batch, config).make(*batch.offsets)
    return launch_tiles(backward_kernel, grad_out, batch, config, entries)
