"""v6, backward for at most 128 keys: a tile has them all, so dQ is complete where it is computed.

Changes from v4_warp_specialized_backward: the consumers round dQ of a step and store it; there is
nothing to sum. So no fp32 sum in memory, no zero fill, no rounding in a launch of its own. A tile
loops over all rows, seen or not, also of sequences without keys: their dQ is written here.

Why it should help, in bytes for a row of head_dim 128: v4 reads 512, fills 512 with zeros, adds
512, reads them again and writes 256. Here 512 are read and 256 written. v5 does as much with two
programs, of which the second has no keys.
Why it may not: rows that see no key are computed too.

| role     | warps | registers | work                                                          |
|----------|-------|-----------|---------------------------------------------------------------|
| load     | 4     | 24        | one thread issues the TMA loads                               |
| math (2) | 4     | 240       | S, dP, activation and derivative, dV, dK, half of dQ; 64 keys |

| barrier          | arrivals    | filled by -> drained by                               |
|------------------|-------------|-------------------------------------------------------|
| k.full[stage]    | 1 and bytes | TMA loads of a tile's K -> both consumers             |
| k.empty[stage]   | 256 threads | consumers, the tile's last dQ is computed -> producer |
| v.full           | 1 and bytes | TMA loads of a tile's V -> both consumers             |
| v.empty          | 256 threads | consumers, dV has left through V's buffer -> producer |
| q.full[stage]    | 1 and bytes | TMA load of a step's Q -> both consumers              |
| q.empty[stage]   | 256 threads | consumers, the step's dK is computed -> producer      |
| g.full[stage]    | 1 and bytes | TMA load of a step's dO -> both consumers             |
| g.empty[stage]   | 256 threads | consumers, the step's dV is computed -> producer      |
| ds.full[2]       | 256 threads | consumers, dS is stored -> consumers                  |
| ds.empty[2]      | 256 threads | consumers, dQ of these rows is computed -> consumers  |
| tickets.full[2]  | 128 threads | load, the entry is drawn -> both consumers            |
| tickets.empty[2] | 256 threads | consumers, the entry is read -> load                  |

Where queries are uneven programs take their entries by tickets, see `device.tickets`.
"""

from dataclasses import replace

import torch
import triton
import triton.language as tl
import triton.language.extra.tlx as tlx

from gdpa_kernels.device.groups import Ring, ring
from gdpa_kernels.device.ragged import BOUND
from gdpa_kernels.device.rows import fetch_rows, keep_runtime, put_rows, uniform
from gdpa_kernels.gdpa.batch import Batch, WorkList
from gdpa_kernels.gdpa.device.derivatives import (
    dk_factor,
    dv_factor,
    mask_slope,
    times_slope,
    value_and_factor,
)
from gdpa_kernels.gdpa.device.gradients import (
    Gradients,
    few_keys_problem,
    head_and_row,
    launch_gradients,
    tile_descriptors,
)
from gdpa_kernels.gdpa.device.masks import mask_transposed
from gdpa_kernels.gdpa.device.tickets import each_tile, new_counter, tickets_of
from gdpa_kernels.gdpa.device.two_consumers import (
    KEYS,
    MATH_ROLES,
    TILE,
    TicketConfig,
    dq_product,
    fetch_both,
    rows_of,
    scores,
    stage_tile,
    store_ds,
)
from gdpa_kernels.gdpa.device.work_list import ZigzagRecipe, entry, key_list_recipe

Config = TicketConfig

UNEVEN = 3


def call_problem(batch: Batch) -> str | None:
    """The reason why this rung cannot take a call, beyond `Requires`; None if it can."""
    return few_keys_problem(batch, TILE.value)


def default_config(batch: Batch) -> Config:
    """Tickets where the longest sequence has more than UNEVEN times the mean's queries."""
    return Config(tickets=batch.max_seqlen_q * batch.sequences > UNEVEN * batch.rows)


def work_list_recipe(batch: Batch, config: Config) -> ZigzagRecipe:
    """A tile for each sequence and key head, those with the most queries first."""
    recipe = key_list_recipe(batch, TILE.value, rows_of(batch.head_dim), least=1)
    return replace(recipe, num_programs=1) if config.tickets else recipe  # no row is reversed


@triton.aggregate
class Options:
    """The constants that the roles share. ROWS: of a step."""

    GROUP: tl.constexpr
    ROWS: tl.constexpr
    ACTIVATION: tl.constexpr
    FOLD: tl.constexpr
    CAUSAL: tl.constexpr
    WINDOW: tl.constexpr
    HEAD_DIM: tl.constexpr
    Q_STAGES: tl.constexpr
    G_STAGES: tl.constexpr
    K_STAGES: tl.constexpr
    DTYPE: tl.constexpr


@triton.jit
def steps_of(len_q, options):
    """Steps of one head, at least one: prologue and epilogue need one."""
    return tl.maximum(tl.cdiv(len_q, options.ROWS), 1)


@triton.jit
def load(item, tile, count, q_desc, k_desc, v_desc, g_desc, q, k, v, g, list_ptr, options):
    """The producer: K of a tile, the first rows of Q, V, then dO and Q in the order of use."""
    GROUP: tl.constexpr = options.GROUP
    start_k, _, len_k, start_q, len_q, head_k, key = entry(list_ptr, item)
    steps = steps_of(len_q, options)
    stage = tile % options.K_STAGES
    tlx.barrier_wait(k.empty[stage], (tile // options.K_STAGES & 1) ^ 1)
    fetch_both(k_desc, k, stage, start_k, len_k, head_k, key)
    for step in tl.range(0, steps * GROUP):
        head, row = head_and_row(step, steps, 0, head_k, GROUP, options.ROWS)
        stage = (count + step) % options.Q_STAGES
        tlx.barrier_wait(q.empty[stage], (((count + step) // options.Q_STAGES) & 1) ^ 1)
        fetch_rows(q_desc, q.buffer[stage], q.full[stage], start_q, len_q, head, row)
        if step == 0:
            tlx.barrier_wait(v.empty[0], (tile & 1) ^ 1)
            fetch_both(v_desc, v, 0, start_k, len_k, head_k, key)
        stage = (count + step) % options.G_STAGES
        tlx.barrier_wait(g.empty[stage], (((count + step) // options.G_STAGES) & 1) ^ 1)
        fetch_rows(g_desc, g.buffer[stage], g.full[stage], start_q, len_q, head, row)
    return count + steps * GROUP


@triton.jit
def differentiate(s, v, g, dv, count, scale, head, row, key, options):
    """dS of a step, and dv with its MMA in flight. `count` counts steps of all tiles."""
    stage = count % options.G_STAGES
    p, slope = value_and_factor(s, scale, head, options.ACTIVATION, options.FOLD)
    p = mask_transposed(p, row, key, options.CAUSAL, options.WINDOW)
    slope = mask_slope(slope, row, key, options.CAUSAL, options.WINDOW, options.FOLD)
    tlx.barrier_wait(g.full[stage], (count // options.G_STAGES) & 1)
    dp = tlx.async_dot(v, tlx.local_trans(g.buffer[stage]))
    dv = tlx.async_dot(p.to(options.DTYPE), g.buffer[stage], dv)
    dp = tlx.async_dot_wait(1, dp)
    return times_slope(dp, slope, options.FOLD).to(options.DTYPE), dv


@triton.jit
def put_half(role: tl.constexpr, desc, buffer, start, length, head, row, options):
    """Start the TMA store of a half of a step's dQ. A fence must follow `stage_tile`."""
    row += role * (options.ROWS - 64)
    coords = [BOUND, start + length, head, BOUND - length + row, role * (options.HEAD_DIM - 64)]
    tlx.async_descriptor_store(desc, buffer, coords)


@triton.jit
def math(
    item, tile, count, role: tl.constexpr, q, k, v, g, ds, staging, staged, gradients, list_ptr,
    scale, output_scale, options,
):  # fmt: skip
    """A consumer: 64 keys of every tile."""
    GROUP: tl.constexpr = options.GROUP
    HEAD_DIM: tl.constexpr = options.HEAD_DIM
    Q_STAGES: tl.constexpr = options.Q_STAGES
    K_STAGES: tl.constexpr = options.K_STAGES
    FIRST: tl.constexpr = role * (HEAD_DIM // 64)
    factor = dk_factor(scale, output_scale, options.FOLD)
    k_buffer = tile % K_STAGES * MATH_ROLES
    start_k, _, len_k, start_q, len_q, head_k, key = entry(list_ptr, item)
    steps = steps_of(len_q, options)
    all_steps = uniform(steps * GROUP)  # the compiler must not know that it is even
    key += role * KEYS
    dk = tl.zeros([KEYS, HEAD_DIM], tl.float32)
    dv = tl.zeros([KEYS, HEAD_DIM], tl.float32)
    tlx.barrier_wait(k.full[tile % K_STAGES], tile // K_STAGES & 1)
    last = count + all_steps - 1
    s = scores(k.buffer[k_buffer + role], q, count, Q_STAGES)
    s = tlx.async_dot_wait(0, s)
    tlx.barrier_wait(v.full[0], tile & 1)
    ds_tile = ds.buffer[(count & 1) * MATH_ROLES + role]
    d, dv = differentiate(s, v.buffer[role], g, dv, count, scale, head_k * GROUP, 0, key, options)
    store_ds(ds, ds_tile, d, count)
    dk = tlx.async_dot(d, q.buffer[count % Q_STAGES], dk)
    dv = tlx.async_dot_wait(0, dv)
    dk = tlx.async_dot_wait(0, dk)
    tlx.barrier_arrive(g.empty[count % options.G_STAGES])
    s = scores(k.buffer[k_buffer + role], q, tl.minimum(count + 1, last), Q_STAGES)
    s = tlx.async_dot_wait(0, s)
    tlx.barrier_arrive(q.empty[count % Q_STAGES])
    for step in tl.range(1, all_steps, num_stages=0):
        now = count + step
        zero = keep_runtime(step)
        head, row = head_and_row(step, steps, 0, head_k, GROUP, options.ROWS)
        ds_tile = ds.buffer[(now & 1) * MATH_ROLES + role]
        d, dv = differentiate(s, v.buffer[role + zero], g, dv, now, scale, head, row, key, options)
        store_ds(ds, ds_tile, d, now)
        if step > 1:
            head, row = head_and_row(step - 2, steps, 0, head_k, GROUP, options.ROWS)
            staged_dq = staging[FIRST + zero]
            put_half(role, gradients.dq, staged_dq, start_q, len_q, head, row, options)
        dk = tlx.async_dot(d, q.buffer[now % Q_STAGES], dk)
        dv = tlx.async_dot_wait(0, dv)
        dk = tlx.async_dot_wait(0, dk)
        tlx.barrier_arrive(g.empty[now % options.G_STAGES])
        s = scores(k.buffer[k_buffer + role + zero], q, tl.minimum(now + 1, last), Q_STAGES)
        dq = dq_product(role, ds, k, k_buffer + zero, now - 1, options)
        s = tlx.async_dot_wait(0, s)
        dq = tlx.async_dot_wait(0, dq)
        tlx.barrier_arrive(q.empty[now % Q_STAGES])
        tlx.barrier_arrive(ds.empty[(now - 1) & 1])
        stage_tile(staging[FIRST + zero], (dq * factor).to(options.DTYPE))
    count += all_steps
    dq = dq_product(role, ds, k, k_buffer, count - 1, options)
    dq = tlx.async_dot_wait(0, dq)
    tlx.barrier_arrive(k.empty[tile % K_STAGES])
    tlx.barrier_arrive(ds.empty[(count - 1) & 1])
    tlx.fence("async_shared")
    if all_steps > 1:
        head, row = head_and_row(all_steps - 2, steps, 0, head_k, GROUP, options.ROWS)
        put_half(role, gradients.dq, staging[FIRST], start_q, len_q, head, row, options)
    stage_tile(staging[FIRST], (dq * factor).to(options.DTYPE))
    dv = dv * dv_factor(scale, output_scale, options.FOLD)
    put_rows(gradients.dv, v.buffer[role], start_k, len_k, head_k, key, dv.to(options.DTYPE))
    head, row = head_and_row(all_steps - 1, steps, 0, head_k, GROUP, options.ROWS)
    put_half(role, gradients.dq, staging[FIRST], start_q, len_q, head, row, options)
    dk = dk * factor
    tlx.async_descriptor_store_wait(0)
    put_rows(gradients.dk, staged[role], start_k, len_k, head_k, key, dk.to(options.DTYPE))
    tlx.barrier_arrive(v.empty[0])
    return count


@triton.jit
def backward_kernel(
    q_desc, k_desc, v_desc, g_desc, dq_desc, dk_desc, dv_desc, list_ptr, scale, output_scale,
    GROUP: tl.constexpr, ROWS: tl.constexpr, ACTIVATION: tl.constexpr,
    FOLD: tl.constexpr, CAUSAL: tl.constexpr, WINDOW: tl.constexpr, HEAD_DIM: tl.constexpr,
    Q_STAGES: tl.constexpr, G_STAGES: tl.constexpr, K_STAGES: tl.constexpr, REGISTERS: tl.constexpr,
    counter_ptr=None,
):  # fmt: skip
    """dQ, dK and dV of the listed tiles of this program."""
    DTYPE: tl.constexpr = tlx.dtype_of(q_desc)
    options = Options(
        GROUP, ROWS, ACTIVATION, FOLD, CAUSAL, WINDOW, HEAD_DIM, Q_STAGES, G_STAGES,
        K_STAGES, DTYPE,
    )  # fmt: skip
    q = tlx.local_alloc((ROWS, HEAD_DIM), DTYPE, Q_STAGES)
    k = tlx.local_alloc((KEYS, HEAD_DIM), DTYPE, K_STAGES * MATH_ROLES)
    v = tlx.local_alloc((KEYS, HEAD_DIM), DTYPE, MATH_ROLES)
    g = tlx.local_alloc((ROWS, HEAD_DIM), DTYPE, G_STAGES)
    ds = tlx.local_alloc((KEYS, ROWS), DTYPE, 2 * MATH_ROLES)
    staged = tlx.local_alloc((KEYS, HEAD_DIM), DTYPE, MATH_ROLES)  # dK
    # The same memory, for a half of dQ.
    staging = tlx.local_alloc((64, 64), DTYPE, MATH_ROLES * (HEAD_DIM // 64), reuse=staged)
    q = ring(q, Q_STAGES, MATH_ROLES)
    k = ring(k, K_STAGES, MATH_ROLES)
    v = ring(v, 1, MATH_ROLES)
    g = ring(g, G_STAGES, MATH_ROLES)
    ds_full = tlx.alloc_warp_barrier(2, 4, MATH_ROLES)
    ds = Ring(ds, ds_full, tlx.alloc_warp_barrier(2, 4, MATH_ROLES), 2)
    gradients = Gradients(dq_desc, dk_desc, dv_desc)

    tickets = None
    if counter_ptr is not None:
        tickets = tickets_of(counter_ptr, MATH_ROLES)

    with tlx.async_tasks():
        with tlx.async_task("default"):
            each_tile(
                load, tickets, list_ptr, True,
                (q_desc, k_desc, v_desc, g_desc, q, k, v, g, list_ptr, options),
            )  # fmt: skip
        with tlx.async_task(num_warps=4, registers=REGISTERS, replicate=MATH_ROLES):
            each_tile(
                math, tickets, list_ptr, False,
                (tlx.async_task_replica_id(), q, k, v, g, ds, staging, staged, gradients, list_ptr,
                 scale, output_scale, options),
            )  # fmt: skip
            tlx.async_descriptor_store_wait(0)


def backward(
    grad_out: torch.Tensor, batch: Batch, *, config: Config | None = None,
    work_list: WorkList | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    """(dq, dk, dv), shaped as q, k and v, contiguous; grad_out may have any strides."""
    config, rows = config or default_config(batch), rows_of(batch.head_dim)
    (entries,) = work_list or work_list_recipe(batch, config).make(*batch.offsets)
    boxes = (64, 64), (KEYS.value, None), (KEYS.value, None)
    loads = tile_descriptors(grad_out, batch, rows, KEYS.value)
    return launch_gradients(
        backward_kernel, batch, config, loads, boxes, (entries,), len(entries) - 1,
        adds=False, ROWS=rows, counter_ptr=new_counter(batch) if config.tickets else None,
    )  # fmt: skip
