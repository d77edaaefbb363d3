"""v4, backward: a producer, two consumers that own 64 keys each, and TMA reduce-adds of dQ.

Changes from v2_fused_backward: warp specialization, in a persistent kernel over tiles of 128 keys.
Each consumer keeps dK and dV of its keys in registers and computes S and dP as [keys, rows]: P and
dS are then A operands in the layout that they have. dS goes through shared memory to the other
consumer, and each computes half of dQ: of 128 columns, or of the 128 rows of a step of 64 columns.
Columns of a tile beyond head_dim are zero.

Why it should help: a step of 64 rows is 2,560 clocks of the tensor cores at head_dim 128 and 770 of
issue slots for the activation, and one consumer's activation overlaps with the other's MMAs.
Why it may not: each step passes two barriers at which the consumers wait for each other's dS.

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

dQ is deterministic up to 256 keys. Under a mask programs take their entries by tickets, see
`device.tickets`.
"""

import torch
import triton
import triton.language as tl
import triton.language.extra.tlx as tlx

from gdpa_kernels.calling.launch import multiprocessors
from gdpa_kernels.device.groups import Ring, ring
from gdpa_kernels.device.ragged import BOUND
from gdpa_kernels.device.rows import fetch_rows, keep_runtime, put_rows, uniform
from gdpa_kernels.gdpa.batch import Batch, WorkList
from gdpa_kernels.gdpa.device.derivatives import (
    dk_factor,
    dv_factor,
    times_slope,
    value_and_factor,
)
from gdpa_kernels.gdpa.device.gradients import (
    Gradients,
    launch_gradients,
    sums_commute,
    tile_descriptors,
)
from gdpa_kernels.gdpa.device.key_tiles import mask_step, row_of_step, span_of
from gdpa_kernels.gdpa.device.segments import entry_mask
from gdpa_kernels.gdpa.device.ticket_list import TicketRecipe, ticket_recipe, uses_tickets
from gdpa_kernels.gdpa.device.tickets import each_tile, new_counter, tickets_of
from gdpa_kernels.gdpa.device.two_consumers import (
    KEYS,
    MATH_ROLES,
    TILE,
    TicketConfig,
    columns_of,
    dq_product,
    fetch_both,
    rows_of,
    scores,
    stage_tile,
    store_ds,
)
from gdpa_kernels.gdpa.device.work_list import ZigzagRecipe, entry, key_list_recipe

Config = TicketConfig


def call_problem(batch: Batch) -> str | None:
    """The reason why this rung cannot take a call, beyond `Requires`; None if it can. With fewer
    columns than 24 the plain kernels are faster."""
    if batch.head_dim <= 16:
        return f"needs a head_dim over 16, got {batch.head_dim}"
    return None


def default_config(batch: Batch) -> Config:
    """Tickets where they pay."""
    programs = multiprocessors(batch.device)
    return Config(tickets=uses_tickets(batch, TILE.value, programs, transposed=True))


def is_deterministic(batch: Batch) -> bool:
    """True with at most two tiles of keys; see `sums_commute`."""
    return sums_commute(batch, TILE.value)


def work_list_recipe(batch: Batch, config: Config) -> ZigzagRecipe | TicketRecipe:
    """The list of tiles of keys, those with the most queries first."""
    if config.tickets:
        return ticket_recipe(batch, TILE.value, multiprocessors(batch.device), transposed=True)
    return key_list_recipe(batch, TILE.value, rows_of(batch.head_dim))


@triton.aggregate
class Options:
    """The constants that the roles share. ROWS: of a step. HEAD_DIM: `columns_of` it. ASKS: a step
    that is seen whole is not masked; with a shift the test would spill."""

    GROUP: tl.constexpr
    ROWS: tl.constexpr
    SHARED_Q: tl.constexpr
    ACTIVATION: tl.constexpr
    FOLD: tl.constexpr
    CAUSAL: tl.constexpr
    WINDOW: tl.constexpr
    HEAD_DIM: tl.constexpr
    Q_STAGES: tl.constexpr
    G_STAGES: tl.constexpr
    K_STAGES: tl.constexpr
    DTYPE: tl.constexpr
    LOWER_RIGHT: tl.constexpr
    SEGMENTS: tl.constexpr
    TARGET_GROUP: tl.constexpr
    FULL_ROWS: tl.constexpr
    OWN_RANKS: tl.constexpr
    ASKS: tl.constexpr


@triton.jit
def load(
    item, tile, count, q_desc, k_desc, v_desc, g_desc, q, k, v, g, list_ptr, segments_ptr, options
):  # fmt: skip
    """The producer: K of a tile, the first rows of Q, V, then dO and Q in the order of use."""
    GROUP: tl.constexpr = options.GROUP
    start_k, _, len_k, start_out, len_q, head_k, key = entry(list_ptr, item)
    start_q = 0 if options.SHARED_Q else start_out
    mask = entry_mask(list_ptr, segments_ptr, item, len_q, len_k, options)
    span, steps = span_of(key, len_q, len_k, mask, options.ROWS, TILE, options)
    stage = tile % options.K_STAGES
    tlx.barrier_wait(k.empty[stage], (tile // options.K_STAGES & 1) ^ 1)
    fetch_both(k_desc, k, stage, start_k, len_k, head_k, key)
    for step in tl.range(0, steps * GROUP):
        head, row = row_of_step(step, steps, span, head_k, options.ROWS, options)
        stage = (count + step) % options.Q_STAGES
        tlx.barrier_wait(q.empty[stage], (((count + step) // options.Q_STAGES) & 1) ^ 1)
        fetch_rows(q_desc, q.buffer[stage], q.full[stage], start_q, len_q, head, row)
        if step == 0:
            tlx.barrier_wait(v.empty[0], (tile & 1) ^ 1)
            fetch_both(v_desc, v, 0, start_k, len_k, head_k, key)
        stage = (count + step) % options.G_STAGES
        tlx.barrier_wait(g.empty[stage], (((count + step) // options.G_STAGES) & 1) ^ 1)
        fetch_rows(g_desc, g.buffer[stage], g.full[stage], start_out, len_q, head, row)
    return count + steps * GROUP


@triton.jit
def differentiate(s, v, g, dv, count, scale, head, row, key, mask, options):
    """dS of a step, and dv with its MMA in flight. `count` counts steps of all tiles."""
    stage = count % options.G_STAGES
    p, slope = value_and_factor(s, scale, head, options.ACTIVATION, options.FOLD)
    p, slope = mask_step(p, slope, row, key, mask, options, options.ASKS)
    tlx.barrier_wait(g.full[stage], (count // options.G_STAGES) & 1)
    dp = tlx.async_dot(v, tlx.local_trans(g.buffer[stage]))
    dv = tlx.async_dot(p.to(options.DTYPE), g.buffer[stage], dv)
    dp = tlx.async_dot_wait(1, dp)
    return times_slope(dp, slope, options.FOLD).to(options.DTYPE), dv


@triton.jit
def add_rows(role: tl.constexpr, desc, buffer, start, length, head, row, options):
    """Start the TMA reduce-add of a half of a step's dQ. A fence must follow `stage_tile`."""
    row += role * (options.ROWS - 64)
    coords = [BOUND, start + length, head, BOUND - length + row, role * (options.HEAD_DIM - 64)]
    tlx.async_descriptor_store(desc, buffer, coords, store_reduce="add")


@triton.jit
def math(
    item, tile, count, role: tl.constexpr, q, k, v, g, ds, staging, staged, gradients, list_ptr,
    segments_ptr, scale, output_scale, options,
):  # fmt: skip
    """A consumer: 64 keys of every tile."""
    GROUP: tl.constexpr = options.GROUP
    HEAD_DIM: tl.constexpr = options.HEAD_DIM
    Q_STAGES: tl.constexpr = options.Q_STAGES
    K_STAGES: tl.constexpr = options.K_STAGES
    k_buffer = tile % K_STAGES * MATH_ROLES
    start_k, _, len_k, start_out, len_q, head_k, key = entry(list_ptr, item)
    mask = entry_mask(list_ptr, segments_ptr, item, len_q, len_k, options)
    span, steps = span_of(key, len_q, len_k, mask, options.ROWS, TILE, options)
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
    head, row = row_of_step(0, steps, span, head_k, options.ROWS, options)
    d, dv = differentiate(s, v.buffer[role], g, dv, count, scale, head, row, key, mask, options)
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
        head, row = row_of_step(step, steps, span, head_k, options.ROWS, options)
        ds_tile = ds.buffer[(now & 1) * MATH_ROLES + role]
        d, dv = differentiate(
            s, v.buffer[role + zero], g, dv, now, scale, head, row, key, mask, options
        )
        store_ds(ds, ds_tile, d, now)
        if step > 1:
            head, row = row_of_step(step - 2, steps, span, head_k, options.ROWS, options)
            staged_dq = staging[role + zero]
            add_rows(role, gradients.dq, staged_dq, start_out, len_q, head, row, options)
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
        stage_tile(staging[role + zero], dq)
    count += all_steps
    dq = dq_product(role, ds, k, k_buffer, count - 1, options)
    dq = tlx.async_dot_wait(0, dq)
    tlx.barrier_arrive(k.empty[tile % K_STAGES])
    tlx.barrier_arrive(ds.empty[(count - 1) & 1])
    tlx.fence("async_shared")
    if all_steps > 1:
        head, row = row_of_step(all_steps - 2, steps, span, head_k, options.ROWS, options)
        add_rows(role, gradients.dq, staging[role], start_out, len_q, head, row, options)
    stage_tile(staging[role], dq)
    dv = dv * dv_factor(scale, output_scale, options.FOLD)
    put_rows(gradients.dv, v.buffer[role], start_k, len_k, head_k, key, dv.to(options.DTYPE))
    head, row = row_of_step(all_steps - 1, steps, span, head_k, options.ROWS, options)
    add_rows(role, gradients.dq, staging[role], start_out, len_q, head, row, options)
    dk = dk * dk_factor(scale, output_scale, options.FOLD)
    tlx.async_descriptor_store_wait(0)
    dk_staging = staged[role * (128 // HEAD_DIM)]
    put_rows(gradients.dk, dk_staging, start_k, len_k, head_k, key, dk.to(options.DTYPE))
    tlx.barrier_arrive(v.empty[0])
    return count


@triton.jit
def backward_kernel(
    q_desc, k_desc, v_desc, g_desc, dq_desc, dk_desc, dv_desc, list_ptr, scale, output_scale,
    GROUP: tl.constexpr, ROWS: tl.constexpr, SHARED_Q: tl.constexpr, ACTIVATION: tl.constexpr,
    FOLD: tl.constexpr, CAUSAL: tl.constexpr, WINDOW: tl.constexpr, HEAD_DIM: tl.constexpr,
    Q_STAGES: tl.constexpr, G_STAGES: tl.constexpr, K_STAGES: tl.constexpr, REGISTERS: tl.constexpr,
    LOWER_RIGHT: tl.constexpr = False, segments_ptr=None,
    TARGET_GROUP: tl.constexpr = 1, FULL_ROWS: tl.constexpr = 0, OWN_RANKS: tl.constexpr = False,
    counter_ptr=None,
):  # fmt: skip
    """dK and dV of the listed tiles of this program, and what their keys add to dQ."""
    DTYPE: tl.constexpr = tlx.dtype_of(q_desc)
    options = Options(
        GROUP, ROWS, SHARED_Q, ACTIVATION, FOLD, CAUSAL, WINDOW, HEAD_DIM, Q_STAGES, G_STAGES,
        K_STAGES, DTYPE, LOWER_RIGHT, segments_ptr is not None, TARGET_GROUP, FULL_ROWS, OWN_RANKS,
        (CAUSAL or WINDOW is not None) and not LOWER_RIGHT,
    )  # fmt: skip
    q = tlx.local_alloc((ROWS, HEAD_DIM), DTYPE, Q_STAGES)
    k = tlx.local_alloc((KEYS, HEAD_DIM), DTYPE, K_STAGES * MATH_ROLES)
    v = tlx.local_alloc((KEYS, HEAD_DIM), DTYPE, MATH_ROLES)
    g = tlx.local_alloc((ROWS, HEAD_DIM), DTYPE, G_STAGES)
    ds = tlx.local_alloc((KEYS, ROWS), DTYPE, 2 * MATH_ROLES)
    staging = tlx.local_alloc((64, 64), tl.float32, MATH_ROLES)
    # The same memory, for dK.
    staged = tlx.local_alloc((KEYS, HEAD_DIM), DTYPE, MATH_ROLES * (128 // HEAD_DIM), reuse=staging)
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
                (q_desc, k_desc, v_desc, g_desc, q, k, v, g, list_ptr, segments_ptr, options),
            )  # fmt: skip
        with tlx.async_task(num_warps=4, registers=REGISTERS, replicate=MATH_ROLES):
            each_tile(
                math, tickets, list_ptr, False,
                (tlx.async_task_replica_id(), q, k, v, g, ds, staging, staged, gradients, list_ptr,
                 segments_ptr, scale, output_scale, options),
            )  # fmt: skip
            tlx.async_descriptor_store_wait(0)


def backward(
    grad_out: torch.Tensor, batch: Batch, *, config: Config | None = None,
    work_list: WorkList | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    """(dq, dk, dv), shaped as q, k and v, contiguous; grad_out may have any strides."""
    config, columns = config or default_config(batch), columns_of(batch.head_dim)
    (entries,) = work_list or work_list_recipe(batch, config).make(*batch.offsets)
    rows = rows_of(batch.head_dim)
    boxes = (64, 64), (KEYS.value, columns), (KEYS.value, columns)
    loads = tile_descriptors(grad_out, batch, rows, KEYS.value, columns)
    return launch_gradients(
        backward_kernel, batch, config, loads, boxes, (entries,), len(entries) - 1, ROWS=rows,
        HEAD_DIM=columns, counter_ptr=new_counter(batch) if config.tickets else None,
    )  # fmt: skip
