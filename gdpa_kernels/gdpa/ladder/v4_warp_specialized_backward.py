"""v4, backward: a producer, two consumers that own 64 keys each, and TMA reduce-adds of dQ.

Changes from v2_fused_backward: warp specialization, in a persistent kernel over tiles of 128 keys.
Each consumer keeps dK and dV of its keys in registers and computes S and dP as [keys, rows]: P and
dS are then A operands in the layout that they have. dS goes through shared memory to the other
consumer, and each computes half of dQ: of the columns, at head_dim 64 of the 128 rows of a step.

Why it should help: a step of 64 rows is 2,560 clocks of the tensor cores at head_dim 128 and 770 of
issue slots for the activation, and one consumer's activation overlaps with the other's MMAs.
Why it may not: each step passes two barriers at which the consumers wait for each other's dS.

| role     | warps | registers | work                                                          |
|----------|-------|-----------|---------------------------------------------------------------|
| load     | 4     | 24        | one thread issues the TMA loads                               |
| math (2) | 4     | 240       | S, dP, activation and derivative, dV, dK, half of dQ; 64 keys |

| barrier        | arrivals    | filled by -> drained by                               |
|----------------|-------------|-------------------------------------------------------|
| k.full[stage]  | 1 and bytes | TMA loads of a tile's K -> both consumers             |
| k.empty[stage] | 256 threads | consumers, the tile's last dQ is computed -> producer |
| v.full         | 1 and bytes | TMA loads of a tile's V -> both consumers             |
| v.empty        | 256 threads | consumers, dV has left through V's buffer -> producer |
| q.full[stage]  | 1 and bytes | TMA load of a step's Q -> both consumers              |
| q.empty[stage] | 256 threads | consumers, the step's dK is computed -> producer      |
| g.full[stage]  | 1 and bytes | TMA load of a step's dO -> both consumers             |
| g.empty[stage] | 256 threads | consumers, the step's dV is computed -> producer      |
| ds.full[2]     | 256 threads | consumers, dS is stored -> consumers                  |
| ds.empty[2]    | 256 threads | consumers, dQ of these rows is computed -> consumers  |

dQ is deterministic up to 256 keys.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
import triton.language.extra.tlx as tlx

from gdpa_kernels.device.groups import Ring, ring
from gdpa_kernels.device.ragged import BOUND
from gdpa_kernels.device.rows import fetch_rows, keep_runtime, put_rows, uniform
from gdpa_kernels.gdpa.batch import Batch, WorkList
from gdpa_kernels.gdpa.device.derivatives import times_slope, value_and_factor
from gdpa_kernels.gdpa.device.gradients import Gradients, launch_gradients, tile_descriptors
from gdpa_kernels.gdpa.device.two_consumers import (
    KEYS,
    MATH_ROLES,
    TILE,
    fetch_both,
    rows_of,
    scores,
    stage_tile,
)
from gdpa_kernels.gdpa.device.work_list import ZigzagRecipe, count_items, entry, key_list_recipe


@dataclass(frozen=True)
class Config:
    """Launch constants.

    q_stages, g_stages: steps of Q and of dO in shared memory. k_stages: tiles of K there; 2 loads
    the next one while a tile is worked on. registers: of a consumer thread.
    """

    q_stages: int = 2
    g_stages: int = 2
    k_stages: int = 2
    registers: int = 240


def default_config(batch: Batch) -> Config:
    """The same for every call."""
    return Config()


def is_deterministic(batch: Batch) -> bool:
    """Two additions to zero commute; with a third their order shows. A tile of keys makes one."""
    return batch.max_seqlen_k <= 2 * TILE.value


def work_list_recipe(batch: Batch, config: Config) -> ZigzagRecipe:
    """The list of tiles of keys, those with the most queries first."""
    return key_list_recipe(batch, TILE.value, rows_of(batch.head_dim))


@triton.aggregate
class Options:
    """The constants that the roles share. ROWS: of a step."""

    ROWS: tl.constexpr
    ACTIVATION: tl.constexpr
    HEAD_DIM: tl.constexpr
    Q_STAGES: tl.constexpr
    G_STAGES: tl.constexpr
    K_STAGES: tl.constexpr
    DTYPE: tl.constexpr


@triton.jit
def steps_of(len_q, options):
    """Steps of a tile. At least one: prologue and epilogue need one. Without rows it adds zero."""
    return tl.maximum(tl.cdiv(len_q, options.ROWS), 1)


@triton.jit
def load(q_desc, k_desc, v_desc, g_desc, q, k, v, g, list_ptr, options):
    """The producer: K of a tile, the first rows of Q, V, then dO and Q in the order of use."""
    num_items = count_items(list_ptr)
    count = 0
    for item in tl.range(tl.program_id(0), num_items, tl.num_programs(0)):
        start_k, _, len_k, start_q, len_q, head, key = entry(list_ptr, item)
        steps = steps_of(len_q, options)
        tile = item // tl.num_programs(0)
        stage = tile % options.K_STAGES
        tlx.barrier_wait(k.empty[stage], (tile // options.K_STAGES & 1) ^ 1)
        fetch_both(k_desc, k, stage, start_k, len_k, head, key)
        for step in tl.range(0, steps):
            row = step * options.ROWS
            stage = (count + step) % options.Q_STAGES
            tlx.barrier_wait(q.empty[stage], (((count + step) // options.Q_STAGES) & 1) ^ 1)
            fetch_rows(q_desc, q.buffer[stage], q.full[stage], start_q, len_q, head, row)
            if step == 0:
                tlx.barrier_wait(v.empty[0], (tile & 1) ^ 1)
                fetch_both(v_desc, v, 0, start_k, len_k, head, key)
            stage = (count + step) % options.G_STAGES
            tlx.barrier_wait(g.empty[stage], (((count + step) // options.G_STAGES) & 1) ^ 1)
            fetch_rows(g_desc, g.buffer[stage], g.full[stage], start_q, len_q, head, row)
        count += steps


@triton.jit
def differentiate(s, v, g, dv, count, scale, head, options):
    """dS of a step, and dv with its MMA in flight. `count` counts steps of all tiles."""
    stage = count % options.G_STAGES
    p, slope = value_and_factor(s, scale, head, options.ACTIVATION, True)
    tlx.barrier_wait(g.full[stage], (count // options.G_STAGES) & 1)
    dp = tlx.async_dot(v, tlx.local_trans(g.buffer[stage]))
    dv = tlx.async_dot(p.to(options.DTYPE), g.buffer[stage], dv)
    dp = tlx.async_dot_wait(1, dp)
    return times_slope(dp, slope, True).to(options.DTYPE), dv


@triton.jit
def store_ds(ds, ds_tile, d, count):
    """Store dS of a step in ds_tile, a buffer of ds, for both roles to read."""
    stage = count & 1
    tlx.barrier_wait(ds.empty[stage], ((count // 2) & 1) ^ 1)
    tlx.local_store(ds_tile, d)
    tlx.fence("async_shared")
    tlx.barrier_arrive(ds.full[stage])


@triton.jit
def dq_product(role: tl.constexpr, ds, k, k_buffer, count, options):
    """dS K of a step, in flight: the role's half of the columns, at head_dim 64 of the rows."""
    ROW: tl.constexpr = role * (options.ROWS - 64)
    COLUMN: tl.constexpr = role * (options.HEAD_DIM - 64)
    stage = count & 1
    tlx.barrier_wait(ds.full[stage], (count // 2) & 1)
    d = tlx.local_slice(ds.buffer[stage * MATH_ROLES], [0, ROW], [KEYS, 64])
    here = tlx.local_slice(k.buffer[k_buffer], [0, COLUMN], [KEYS, 64])
    dq = tlx.async_dot(tlx.local_trans(d), here)
    d = tlx.local_slice(ds.buffer[stage * MATH_ROLES + 1], [0, ROW], [KEYS, 64])
    here = tlx.local_slice(k.buffer[k_buffer + 1], [0, COLUMN], [KEYS, 64])
    return tlx.async_dot(tlx.local_trans(d), here, dq)


@triton.jit
def add_rows(role: tl.constexpr, desc, buffer, start, length, head, row, options):
    """Start the TMA reduce-add of a half of a step's dQ. A fence must follow `stage_tile`."""
    row += role * (options.ROWS - 64)
    coords = [BOUND, start + length, head, BOUND - length + row, role * (options.HEAD_DIM - 64)]
    tlx.async_descriptor_store(desc, buffer, coords, store_reduce="add")


@triton.jit
def math(
    role: tl.constexpr, q, k, v, g, ds, staging, staged, gradients, list_ptr, scale, output_scale,
    options,
):  # fmt: skip
    """A consumer: 64 keys of every tile."""
    HEAD_DIM: tl.constexpr = options.HEAD_DIM
    Q_STAGES: tl.constexpr = options.Q_STAGES
    K_STAGES: tl.constexpr = options.K_STAGES
    num_items = count_items(list_ptr)
    count = 0
    for item in tl.range(tl.program_id(0), num_items, tl.num_programs(0), num_stages=0):
        tile = item // tl.num_programs(0)
        k_buffer = tile % K_STAGES * MATH_ROLES
        start_k, _, len_k, start_q, len_q, head, key = entry(list_ptr, item)
        steps = uniform(steps_of(len_q, options))
        key += role * KEYS
        dk = tl.zeros([KEYS, HEAD_DIM], tl.float32)
        dv = tl.zeros([KEYS, HEAD_DIM], tl.float32)
        tlx.barrier_wait(k.full[tile % K_STAGES], tile // K_STAGES & 1)
        last = count + steps - 1
        s = scores(k.buffer[k_buffer + role], q, count, Q_STAGES)
        s = tlx.async_dot_wait(0, s)
        tlx.barrier_wait(v.full[0], tile & 1)
        ds_tile = ds.buffer[(count & 1) * MATH_ROLES + role]
        d, dv = differentiate(s, v.buffer[role], g, dv, count, scale, head, options)
        store_ds(ds, ds_tile, d, count)
        dk = tlx.async_dot(d, q.buffer[count % Q_STAGES], dk)
        dv = tlx.async_dot_wait(0, dv)
        dk = tlx.async_dot_wait(0, dk)
        tlx.barrier_arrive(g.empty[count % options.G_STAGES])
        s = scores(k.buffer[k_buffer + role], q, tl.minimum(count + 1, last), Q_STAGES)
        s = tlx.async_dot_wait(0, s)
        tlx.barrier_arrive(q.empty[count % Q_STAGES])
        for step in tl.range(1, steps, num_stages=0):
            now = count + step
            zero = keep_runtime(step)
            ds_tile = ds.buffer[(now & 1) * MATH_ROLES + role]
            d, dv = differentiate(s, v.buffer[role + zero], g, dv, now, scale, head, options)
            store_ds(ds, ds_tile, d, now)
            if step > 1:
                staged_dq, row = staging[role + zero], (step - 2) * options.ROWS
                add_rows(role, gradients.dq, staged_dq, start_q, len_q, head, row, options)
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
        count += steps
        dq = dq_product(role, ds, k, k_buffer, count - 1, options)
        dq = tlx.async_dot_wait(0, dq)
        tlx.barrier_arrive(k.empty[tile % K_STAGES])
        tlx.barrier_arrive(ds.empty[(count - 1) & 1])
        tlx.fence("async_shared")
        if steps > 1:
            row = (steps - 2) * options.ROWS
            add_rows(role, gradients.dq, staging[role], start_q, len_q, head, row, options)
        stage_tile(staging[role], dq)
        dv = dv * (0.5 * scale * output_scale)
        put_rows(gradients.dv, v.buffer[role], start_k, len_k, head, key, dv.to(options.DTYPE))
        row = (steps - 1) * options.ROWS
        add_rows(role, gradients.dq, staging[role], start_q, len_q, head, row, options)
        dk = dk * (0.5 * scale * output_scale)
        tlx.async_descriptor_store_wait(0)
        dk_staging = staged[role * (128 // HEAD_DIM)]
        put_rows(gradients.dk, dk_staging, start_k, len_k, head, key, dk.to(options.DTYPE))
        tlx.barrier_arrive(v.empty[0])
    tlx.async_descriptor_store_wait(0)


@triton.jit
def backward_kernel(
    q_desc, k_desc, v_desc, g_desc, dq_desc, dk_desc, dv_desc, list_ptr, scale, output_scale,
    ROWS: tl.constexpr, ACTIVATION: tl.constexpr, HEAD_DIM: tl.constexpr, Q_STAGES: tl.constexpr,
    G_STAGES: tl.constexpr, K_STAGES: tl.constexpr, REGISTERS: tl.constexpr,
):  # fmt: skip
    """dK and dV of the listed tiles of this program, and what their keys add to dQ."""
    DTYPE: tl.constexpr = tlx.dtype_of(q_desc)
    options = Options(ROWS, ACTIVATION, HEAD_DIM, Q_STAGES, G_STAGES, K_STAGES, DTYPE)
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

    with tlx.async_tasks():
        with tlx.async_task("default"):
            load(q_desc, k_desc, v_desc, g_desc, q, k, v, g, list_ptr, options)
        with tlx.async_task(num_warps=4, registers=REGISTERS, replicate=MATH_ROLES):
            math(
                tlx.async_task_replica_id(), q, k, v, g, ds, staging, staged, gradients,
                list_ptr, scale, output_scale, options,
            )  # fmt: skip


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
        backward_kernel, batch, config, loads, boxes, (entries,), len(entries) - 1, ROWS=rows
    )
