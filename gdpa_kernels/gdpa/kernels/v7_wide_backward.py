"""v7, backward for wide heads: one consumer computes dS and dV, the other dK and dQ.

Changes from v4_warp_specialized_backward: the work is divided by product instead of by keys. With
256 columns, dK and dV of 64 keys take 256 registers of a thread: no consumer can hold both. So one
computes S, dP and dV, the other dK and dQ from dS, all that passes between them; a tile is 64 keys.

Why it should help: no product is computed twice; dV and dK take 256 columns at a time. A step of 64
rows is 2,560 clocks of the tensor cores. Why it may not: shared memory moves 448 KiB a step, 3,584
clocks: S and dP 128, dV 32, dK 40, dQ 48, dS 8, dQ out and in again 128, TMA loads 64.

| role   | warps | registers | work                                                      |
|--------|-------|-----------|-----------------------------------------------------------|
| load   | 4     | 24        | one thread issues the TMA loads                           |
| scores | 4     | 240       | S, dP, activation and derivative, dS to shared memory; dV |
| sums   | 4     | 240       | dK, dQ in halves; TMA reduce-adds                         |

| barrier          | arrivals    | filled by -> drained by                        |
|------------------|-------------|------------------------------------------------|
| k.full           | 1 and bytes | TMA load of a tile's K -> scores and sums      |
| k.empty          | 128 threads | sums, dK has left through K's buffer -> load   |
| v.full           | 1 and bytes | TMA load of a tile's V -> scores               |
| v.empty          | 128 threads | scores, dV has left through V's buffer -> load |
| q.full[stage]    | 1 and bytes | TMA load of 64 rows of Q -> scores and sums    |
| q.empty[stage]   | 128 threads | sums, the step's dK is computed -> load        |
| g.full[stage]    | 1 and bytes | TMA load of 64 rows of dO -> scores            |
| g.empty[stage]   | 128 threads | scores, the step's dV is computed -> load      |
| ds.full[2]       | 128 threads | scores, dS is stored -> sums                   |
| ds.empty[2]      | 128 threads | sums, dK and dQ have read dS -> scores         |
| tickets.full[2]  | 128 threads | load, the entry is drawn -> scores and sums    |
| tickets.empty[2] | 256 threads | scores and sums, the entry is read -> load     |

`sums` releases K and Q for both: the dS that it waited for says that `scores` has read them. dQ is
deterministic up to 128 keys. Under a mask programs take their entries by tickets, see
`device.tickets`.
"""

from dataclasses import dataclass

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
from gdpa_kernels.gdpa.device.work_list import ZigzagRecipe, entry, key_list_recipe

KEYS = tl.constexpr(64)  # of a tile
ROWS = tl.constexpr(64)  # of a step
COLUMNS = tl.constexpr(256)  # of a tile; those beyond head_dim are zero
PIECE = tl.constexpr(128)  # columns of dQ that leave at once
DS_STAGES = tl.constexpr(2)  # steps of dS in shared memory


@dataclass(frozen=True)
class Config:
    """Launch constants.

    q_stages, g_stages: steps of Q and of dO in shared memory, together at most 3. fold: leave
    factors of the activation to the sums where `activations.foldable`. registers: of a consumer
    thread. tickets: entries are taken by tickets, not by number.
    """

    q_stages: int = 2
    g_stages: int = 1
    fold: bool = True
    registers: int = 240
    tickets: bool = False


def call_problem(batch: Batch) -> str | None:
    """The reason why this rung cannot take a call, beyond `Requires`; None if it can."""
    if batch.head_dim <= 128:
        return f"needs a head_dim over 128, got {batch.head_dim}"
    return None


def default_config(batch: Batch) -> Config:
    """Tickets where they pay."""
    programs = multiprocessors(batch.device)
    return Config(tickets=uses_tickets(batch, KEYS.value, programs, transposed=True))


def is_deterministic(batch: Batch) -> bool:
    """True with at most two tiles of keys; see `sums_commute`."""
    return sums_commute(batch, KEYS.value)


def work_list_recipe(batch: Batch, config: Config) -> ZigzagRecipe | TicketRecipe:
    """The list of tiles of keys, those with the most queries first."""
    if config.tickets:
        return ticket_recipe(batch, KEYS.value, multiprocessors(batch.device), transposed=True)
    return key_list_recipe(batch, KEYS.value, ROWS.value)


@triton.aggregate
class Options:
    """The constants that the roles share."""

    GROUP: tl.constexpr
    SHARED_Q: tl.constexpr
    ACTIVATION: tl.constexpr
    FOLD: tl.constexpr
    CAUSAL: tl.constexpr
    WINDOW: tl.constexpr
    Q_STAGES: tl.constexpr
    G_STAGES: tl.constexpr
    DTYPE: tl.constexpr
    LOWER_RIGHT: tl.constexpr
    SEGMENTS: tl.constexpr
    TARGET_GROUP: tl.constexpr
    FULL_ROWS: tl.constexpr
    OWN_RANKS: tl.constexpr


@triton.jit
def load(
    item, tile, count, q_desc, k_desc, v_desc, g_desc, q, k, v, g, list_ptr, segments_ptr, options
):  # fmt: skip
    """The producer: K of a tile, the first rows of Q, V, then dO and Q in the order of use."""
    GROUP: tl.constexpr = options.GROUP
    start_k, _, len_k, start_out, len_q, head_k, key = entry(list_ptr, item)
    start_q = 0 if options.SHARED_Q else start_out
    mask = entry_mask(list_ptr, segments_ptr, item, len_q, len_k, options)
    span, steps = span_of(key, len_q, len_k, mask, ROWS, KEYS, options)
    tlx.barrier_wait(k.empty[0], (tile & 1) ^ 1)
    fetch_rows(k_desc, k.buffer[0], k.full[0], start_k, len_k, head_k, key)
    for step in tl.range(0, steps * GROUP):
        head, row = row_of_step(step, steps, span, head_k, ROWS, options)
        stage = (count + step) % options.Q_STAGES
        tlx.barrier_wait(q.empty[stage], (((count + step) // options.Q_STAGES) & 1) ^ 1)
        fetch_rows(q_desc, q.buffer[stage], q.full[stage], start_q, len_q, head, row)
        if step == 0:
            tlx.barrier_wait(v.empty[0], (tile & 1) ^ 1)
            fetch_rows(v_desc, v.buffer[0], v.full[0], start_k, len_k, head_k, key)
        stage = (count + step) % options.G_STAGES
        tlx.barrier_wait(g.empty[stage], (((count + step) // options.G_STAGES) & 1) ^ 1)
        fetch_rows(g_desc, g.buffer[stage], g.full[stage], start_out, len_q, head, row)
    count += steps * GROUP
    return count


@triton.jit
def scores(k, q, count, zero, Q_STAGES: tl.constexpr):
    """S of a step, transposed, in flight. `count`: of steps of all tiles; zero: `keep_runtime`."""
    stage = count % Q_STAGES
    tlx.barrier_wait(q.full[stage], (count // Q_STAGES) & 1)
    return tlx.async_dot(k.buffer[zero], tlx.local_trans(q.buffer[stage + zero]))


@triton.jit
def differentiate(s, v, g, dv, count, zero, scale, head, row, key, mask, options):
    """dS of a step, and dv with its MMA in flight. zero: `keep_runtime`."""
    stage = count % options.G_STAGES
    p, slope = value_and_factor(s, scale, head, options.ACTIVATION, options.FOLD)
    p, slope = mask_step(p, slope, row, key, mask, options)
    tlx.barrier_wait(g.full[stage], (count // options.G_STAGES) & 1)
    dp = tlx.async_dot(v.buffer[zero], tlx.local_trans(g.buffer[stage + zero]))
    dv = tlx.async_dot(p.to(options.DTYPE), g.buffer[stage + zero], dv)
    dp = tlx.async_dot_wait(1, dp)
    return times_slope(dp, slope, options.FOLD).to(options.DTYPE), dv


@triton.jit
def store_ds(ds, d, count):
    """Store dS of a step for the role `sums`."""
    stage = count % DS_STAGES
    tlx.barrier_wait(ds.empty[stage], ((count // DS_STAGES) & 1) ^ 1)
    tlx.local_store(ds.buffer[stage], d)
    tlx.fence("async_shared")
    tlx.barrier_arrive(ds.full[stage])


@triton.jit
def score_role(
    item, tile, count, q, k, v, g, ds, dv_desc, list_ptr, segments_ptr, scale, output_scale,
    options,
):  # fmt: skip
    """S, dP, dS and dV of every tile. The next step's S is issued beside this one's dV."""
    GROUP: tl.constexpr = options.GROUP
    Q_STAGES: tl.constexpr = options.Q_STAGES
    G_STAGES: tl.constexpr = options.G_STAGES
    start_k, _, len_k, _, len_q, head_k, key = entry(list_ptr, item)
    mask = entry_mask(list_ptr, segments_ptr, item, len_q, len_k, options)
    span, steps = span_of(key, len_q, len_k, mask, ROWS, KEYS, options)
    steps = uniform(steps)
    last = uniform(steps * GROUP) - 1  # the compiler must not know that it is odd
    dv = tl.zeros([KEYS, COLUMNS], tl.float32)
    tlx.barrier_wait(k.full[0], tile & 1)
    s = scores(k, q, count, 0, Q_STAGES)
    s = tlx.async_dot_wait(0, s)
    tlx.barrier_wait(v.full[0], tile & 1)
    for step in tl.range(0, last, num_stages=0):
        now = count + step
        zero = keep_runtime(now)
        head, row = row_of_step(step, steps, span, head_k, ROWS, options)
        d, dv = differentiate(s, v, g, dv, now, zero, scale, head, row, key, mask, options)
        store_ds(ds, d, now)
        s = scores(k, q, now + 1, zero, Q_STAGES)
        dv = tlx.async_dot_wait(1, dv)
        tlx.barrier_arrive(g.empty[now % G_STAGES])
        s = tlx.async_dot_wait(0, s)
    count += last
    head, row = row_of_step(last, steps, span, head_k, ROWS, options)
    d, dv = differentiate(s, v, g, dv, count, 0, scale, head, row, key, mask, options)
    store_ds(ds, d, count)
    dv = tlx.async_dot_wait(0, dv)
    tlx.barrier_arrive(g.empty[count % G_STAGES])
    count += 1
    dv = dv * dv_factor(scale, output_scale, options.FOLD)
    put_rows(dv_desc, v.buffer[0], start_k, len_k, head_k, key, dv.to(options.DTYPE))
    tlx.async_descriptor_store_wait(0)
    tlx.barrier_arrive(v.empty[0])
    return count


@triton.jit
def dq_product(ds, k, column: tl.constexpr):
    """PIECE columns of dS K of a step from `column` on, in flight."""
    columns = tlx.local_slice(k, [0, column], [KEYS, PIECE])
    return tlx.async_dot(tlx.local_trans(ds), columns)


@triton.jit
def add_columns(desc, buffer, start, length, head, row, column, x):
    """Start the TMA reduce-add of x [ROWS, PIECE], fp32, once `buffer` has been read."""
    tlx.async_descriptor_store_wait(0)
    tlx.local_store(buffer, x)
    tlx.fence("async_shared")
    coords = [BOUND, start + length, head, BOUND - length + row, column]
    tlx.async_descriptor_store(desc, buffer, coords, store_reduce="add")


@triton.jit
def sum_role(
    item, tile, count, q, k, ds, staging, gradients, list_ptr, segments_ptr, scale, output_scale,
    options,
):  # fmt: skip
    """dK of every tile, and what it adds to dQ: halves, the first overlapped with dK."""
    GROUP: tl.constexpr = options.GROUP
    Q_STAGES: tl.constexpr = options.Q_STAGES
    start_k, _, len_k, start_out, len_q, head_k, key = entry(list_ptr, item)
    mask = entry_mask(list_ptr, segments_ptr, item, len_q, len_k, options)
    span, steps = span_of(key, len_q, len_k, mask, ROWS, KEYS, options)
    steps = uniform(steps)
    dk = tl.zeros([KEYS, COLUMNS], tl.float32)
    tlx.barrier_wait(k.full[0], tile & 1)
    for step in tl.range(0, steps * GROUP, num_stages=0):
        now = count + step
        zero = keep_runtime(now)
        ds_stage = now % DS_STAGES
        q_stage = now % Q_STAGES
        head, row = row_of_step(step, steps, span, head_k, ROWS, options)
        tlx.barrier_wait(q.full[q_stage], (now // Q_STAGES) & 1)
        tlx.barrier_wait(ds.full[ds_stage], (now // DS_STAGES) & 1)
        dq = dq_product(ds.buffer[ds_stage], k.buffer[zero], 0)
        dk = tlx.async_dot(ds.buffer[ds_stage], q.buffer[q_stage], dk)
        dq = tlx.async_dot_wait(1, dq)
        add_columns(gradients.dq, staging[zero], start_out, len_q, head, row, 0, dq)
        dq = dq_product(ds.buffer[ds_stage], k.buffer[zero], PIECE)
        dk = tlx.async_dot_wait(1, dk)
        tlx.barrier_arrive(q.empty[q_stage])
        dq = tlx.async_dot_wait(0, dq)
        tlx.barrier_arrive(ds.empty[ds_stage])
        add_columns(gradients.dq, staging[zero], start_out, len_q, head, row, PIECE, dq)
    count += steps * GROUP
    dk = dk * dk_factor(scale, output_scale, options.FOLD)
    put_rows(gradients.dk, k.buffer[0], start_k, len_k, head_k, key, dk.to(options.DTYPE))
    tlx.async_descriptor_store_wait(0)
    tlx.barrier_arrive(k.empty[0])
    return count


@triton.jit
def backward_kernel(
    q_desc, k_desc, v_desc, g_desc, dq_desc, dk_desc, dv_desc, list_ptr, scale, output_scale,
    GROUP: tl.constexpr, SHARED_Q: tl.constexpr, ACTIVATION: tl.constexpr, FOLD: tl.constexpr,
    CAUSAL: tl.constexpr, WINDOW: tl.constexpr, Q_STAGES: tl.constexpr, G_STAGES: tl.constexpr,
    REGISTERS: tl.constexpr, LOWER_RIGHT: tl.constexpr = False, segments_ptr=None,
    TARGET_GROUP: tl.constexpr = 1, FULL_ROWS: tl.constexpr = 0, OWN_RANKS: tl.constexpr = False,
    counter_ptr=None,
):  # fmt: skip
    """dK and dV of the listed tiles of this program, and what their keys add to dQ."""
    DTYPE: tl.constexpr = tlx.dtype_of(q_desc)
    options = Options(
        GROUP, SHARED_Q, ACTIVATION, FOLD, CAUSAL, WINDOW, Q_STAGES, G_STAGES, DTYPE,
        LOWER_RIGHT, segments_ptr is not None, TARGET_GROUP, FULL_ROWS, OWN_RANKS,
    )  # fmt: skip
    q = tlx.local_alloc((ROWS, COLUMNS), DTYPE, Q_STAGES)
    k = tlx.local_alloc((KEYS, COLUMNS), DTYPE, 1)
    v = tlx.local_alloc((KEYS, COLUMNS), DTYPE, 1)
    g = tlx.local_alloc((ROWS, COLUMNS), DTYPE, G_STAGES)
    ds = tlx.local_alloc((KEYS, ROWS), DTYPE, DS_STAGES)
    staging = tlx.local_alloc((ROWS, PIECE), tl.float32, 1)
    q = ring(q, Q_STAGES)
    k = ring(k, 1)
    v = ring(v, 1)
    g = ring(g, G_STAGES)
    ds_full = tlx.alloc_warp_barrier(DS_STAGES, 4)
    ds = Ring(ds, ds_full, tlx.alloc_warp_barrier(DS_STAGES, 4), DS_STAGES)
    gradients = Gradients(dq_desc, dk_desc, dv_desc)
    tickets = None
    if counter_ptr is not None:
        tickets = tickets_of(counter_ptr, 2)

    with tlx.async_tasks():
        with tlx.async_task("default"):
            each_tile(
                load, tickets, list_ptr, True,
                (q_desc, k_desc, v_desc, g_desc, q, k, v, g, list_ptr, segments_ptr, options),
            )  # fmt: skip
        with tlx.async_task(num_warps=4, registers=REGISTERS):
            each_tile(
                score_role, tickets, list_ptr, False,
                (q, k, v, g, ds, dv_desc, list_ptr, segments_ptr, scale, output_scale, options),
            )  # fmt: skip
        with tlx.async_task(num_warps=4, registers=REGISTERS):
            each_tile(
                sum_role, tickets, list_ptr, False,
                (q, k, ds, staging, gradients, list_ptr, segments_ptr, scale, output_scale,
                 options),
            )  # fmt: skip


def backward(
    grad_out: torch.Tensor, batch: Batch, *, config: Config | None = None,
    work_list: WorkList | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    """(dq, dk, dv), shaped as q, k and v, contiguous; grad_out may have any strides."""
    config = config or default_config(batch)
    (entries,) = work_list or work_list_recipe(batch, config).make(*batch.offsets)
    boxes = (ROWS.value, PIECE.value), (KEYS.value, None), (KEYS.value, None)
    loads = tile_descriptors(grad_out, batch, ROWS.value, KEYS.value)
    return launch_gradients(
        backward_kernel, batch, config, loads, boxes, (entries,), len(entries) - 1,
        counter_ptr=new_counter(batch) if config.tickets else None,
    )  # fmt: skip
