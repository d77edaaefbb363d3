"""v5, backward for short K and V: a cluster of two programs owns all keys; dQ is written once.

Changes from v4_warp_specialized_backward: a cluster of two programs takes all keys, up to 256, of a
(sequence, key head), 128 each, while Q and dO stream by once. They exchange dS through distributed
shared memory, and each computes half of the columns of dQ from the dS of all keys. So dQ leaves in
the output's dtype: no fp32 sum in memory, no zero fill, no conversion; deterministic.

Why it should help, in bytes for a row of head_dim 128: v4 reads 512, fills 512 with zeros, adds 512
twice at 256 keys, reads them again and writes 256. Here 512 are read and 256 written.
Why it may not: every step waits for the dS of the other program.

| role     | warps | registers | work                                                              |
|----------|-------|-----------|-------------------------------------------------------------------|
| load     | 4     | 24        | one thread issues the TMA loads                                   |
| math (2) | 4     | 240       | S, dP, activation and derivative, dV, dK; 64 keys; every other dQ |

| barrier      | arrivals             | filled by -> drained by                                    |
|--------------|----------------------|------------------------------------------------------------|
| k.full       | 1 and bytes          | TMA loads of K and of half of the peer's K -> consumers    |
| k.empty      | 256 threads          | consumers, the item's last dQ is computed -> producer      |
| v.full       | 1 and bytes          | TMA loads of V -> consumers                                |
| v.empty      | 256 threads          | consumers, dV has left through V's buffer -> producer      |
| q.full[2]    | 1 and bytes          | TMA loads of 64 rows of Q, in halves -> consumers          |
| q.empty[2]   | 256 threads          | consumers, the step's dK is computed -> producer           |
| g.full[2]    | 1 and bytes          | TMA load of 64 rows of dO -> consumers                     |
| g.empty[2]   | 256 threads          | consumers, the step's dV is computed -> producer           |
| ds.full[2]   | 256 threads          | consumers, dS is stored -> the consumer with the step's dQ |
| peer.full[2] | 1 and bytes          | the peer's copies of dS -> the consumer with the step's dQ |
| ds.empty[2]  | 2, 1 of each program | consumers with the step's dQ, here and in the peer, dQ is  |
|              |                      | computed -> consumers, the next dS and its copy            |
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
import triton.language.extra.tlx as tlx

from gdpa_kernels.device.groups import OneWay, Ring, ring
from gdpa_kernels.device.ragged import BOUND, ragged_descriptor, tma_readable
from gdpa_kernels.device.rows import fetch_rows, keep_runtime, put_rows
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
)
from gdpa_kernels.gdpa.device.longest_first import Items, LongestFirstRecipe, sequence_and_head
from gdpa_kernels.gdpa.device.masks import mask_transposed

MATH_ROLES = tl.constexpr(2)
KEYS = tl.constexpr(64)  # of a consumer
ROWS = tl.constexpr(64)  # of a step
TILE = tl.constexpr(MATH_ROLES.value * KEYS.value)  # keys of a program
PAIR = tl.constexpr(2)  # steps of an iteration, each in buffers of its own
PROGRAMS = tl.constexpr(2)  # of a cluster
MOST_KEYS = TILE.value * PROGRAMS.value


@dataclass(frozen=True)
class Config:
    """Launch constants: whether factors of the activation are left to the sums where
    `activations.foldable`; registers of a consumer thread."""

    fold: bool = True
    registers: int = 240


def call_problem(batch: Batch) -> str | None:
    """The reason why this rung cannot take a call, beyond `Requires`; None if it can."""
    return few_keys_problem(batch, MOST_KEYS)


def default_config(batch: Batch) -> Config:
    """The same for every call."""
    return Config()


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
    DTYPE: tl.constexpr


@triton.jit
def steps_of(len_q):
    """Steps of 64 rows of one head, in whole pairs, at least one: both roles take part in each. All
    rows count, also those that see no key: their dQ is written here."""
    return tl.maximum(tl.cdiv(len_q, PAIR * ROWS), 1) * PAIR


@triton.jit
def fetch_half(desc, buffer, full, start, length, head, row, column):
    """Start the copy of 64 columns of one head's rows; rows from `length` on become zero."""
    coords = [BOUND, start + length, head, BOUND - length + row, column * 64]
    tlx.async_descriptor_load(desc, buffer, coords, full)


@triton.jit
def load(q_desc, k_desc, v_desc, g_desc, q, k, v, g, half, items, options):
    """The producer: K of an item, the first rows of Q, V, then dO and Q in the order of use."""
    GROUP: tl.constexpr = options.GROUP
    HALF_BYTES: tl.constexpr = ROWS * 64 * 2
    rank = tlx.cluster_cta_rank()
    peer = 1 - rank
    clusters = tl.num_programs(0) // PROGRAMS
    count = 0
    for item in tl.range(tl.program_id(0) // PROGRAMS, items.count, clusters):
        start_q, len_q, start_k, len_k, head_k = sequence_and_head(items, item)
        steps = steps_of(len_q)
        free = (item // clusters & 1) ^ 1
        tlx.barrier_wait(k.empty[0], free)
        tlx.barrier_expect_bytes(k.full[0], 6 * HALF_BYTES)
        for role in tl.static_range(MATH_ROLES):
            key = rank * TILE + role * KEYS
            other = peer * TILE + role * KEYS
            fetch_half(k_desc, k.buffer[role * 2], k.full[0], start_k, len_k, head_k, key, rank)
            fetch_half(k_desc, k.buffer[role * 2 + 1], k.full[0], start_k, len_k, head_k, key, peer)
            fetch_half(k_desc, half[role], k.full[0], start_k, len_k, head_k, other, rank)
        for step in tl.range(0, steps * GROUP):
            head, row = head_and_row(step, steps, 0, head_k, GROUP, ROWS)
            stage = step % PAIR
            unused = ((count + step // PAIR) & 1) ^ 1
            tlx.barrier_wait(q.empty[stage], unused)
            tlx.barrier_expect_bytes(q.full[stage], 2 * HALF_BYTES)
            fetch_half(q_desc, q.buffer[stage * 2], q.full[stage], start_q, len_q, head, row, rank)
            fetch_half(
                q_desc, q.buffer[stage * 2 + 1], q.full[stage], start_q, len_q, head, row, peer
            )
            if step == 0:
                tlx.barrier_wait(v.empty[0], free)
                tlx.barrier_expect_bytes(v.full[0], 4 * HALF_BYTES)
                for role in tl.static_range(MATH_ROLES):
                    row_of_v = BOUND - len_k + rank * TILE + role * KEYS
                    coords = [BOUND, start_k + len_k, head_k, row_of_v, 0]
                    tlx.async_descriptor_load(v_desc, v.buffer[role], coords, v.full[0])
            tlx.barrier_wait(g.empty[stage], unused)
            fetch_rows(g_desc, g.buffer[stage], g.full[stage], start_q, len_q, head, row)
        count += steps * GROUP // PAIR


@triton.jit
def scores(role: tl.constexpr, k, q, stage: tl.constexpr, zero, phase):
    """S of a step, transposed, in flight: the sum over both halves of the columns.

    `stage`: the step of the pair; `zero`: `keep_runtime`; `phase` counts pairs of all items.
    """
    tlx.barrier_wait(q.full[stage], phase)
    s = tlx.async_dot(k.buffer[role * 2 + zero], tlx.local_trans(q.buffer[stage * 2 + zero]))
    s = tlx.async_dot(
        k.buffer[role * 2 + 1 + zero], tlx.local_trans(q.buffer[stage * 2 + 1 + zero]), s
    )
    return s


@triton.jit
def differentiate(
    role: tl.constexpr, s, v, g, dv, stage: tl.constexpr, zero, phase, scale, head, row, key,
    options,
):  # fmt: skip
    """dS of a step, and dv with its MMA in flight."""
    p, slope = value_and_factor(s, scale, head, options.ACTIVATION, options.FOLD)
    p = mask_transposed(p, row, key, options.CAUSAL, options.WINDOW)
    slope = mask_slope(slope, row, key, options.CAUSAL, options.WINDOW, options.FOLD)
    tlx.barrier_wait(g.full[stage], phase)
    dp = tlx.async_dot(v.buffer[role + zero], tlx.local_trans(g.buffer[stage + zero]))
    dv = tlx.async_dot(p.to(options.DTYPE), g.buffer[stage + zero], dv)
    dp = tlx.async_dot_wait(1, dp)
    return times_slope(dp, slope, options.FOLD).to(options.DTYPE), dv


@triton.jit
def exchange_ds(role: tl.constexpr, ds, peer, d, stage: tl.constexpr, zero, phase, rank):
    """Store dS of a step for both roles to read, here and in the other program."""
    tlx.barrier_wait(ds.empty[stage], phase ^ 1)
    if role == 0:
        tlx.barrier_expect_bytes(peer.full[stage], TILE * ROWS * 2)
    index = stage * MATH_ROLES + role + zero
    tlx.local_store(ds.buffer[index], d)
    tlx.fence("async_shared")
    tlx.async_remote_shmem_copy(peer.buffer[index], ds.buffer[index], 1 - rank, peer.full[stage])
    tlx.barrier_arrive(ds.full[stage])


@triton.jit
def dq_product(role: tl.constexpr, ds, peer, k, half, zero, phase):
    """dS K of the role's step of the pair, in flight: half of the columns, from all keys."""
    first = role * MATH_ROLES + zero
    tlx.barrier_wait(ds.full[role], phase)
    dq = tlx.async_dot(tlx.local_trans(ds.buffer[first]), k.buffer[zero])
    dq = tlx.async_dot(tlx.local_trans(ds.buffer[first + 1]), k.buffer[2 + zero], dq)
    tlx.barrier_wait(peer.full[role], phase)
    dq = tlx.async_dot(tlx.local_trans(peer.buffer[first]), half[zero], dq)
    dq = tlx.async_dot(tlx.local_trans(peer.buffer[first + 1]), half[1 + zero], dq)
    return dq


@triton.jit
def put_half(desc, buffer, start, length, head, row, column, x):
    """Start the store of 64 columns x, [rows, 64], through `buffer`."""
    tlx.local_store(buffer, x.to(tlx.dtype_of(desc)))
    tlx.fence("async_shared")
    coords = [BOUND, start + length, head, BOUND - length + row, column * 64]
    tlx.async_descriptor_store(desc, buffer, coords)


@triton.jit
def math(
    role: tl.constexpr, q, k, v, g, half, ds, peer, staging, gradients, items, scale, output_scale,
    options,
):  # fmt: skip
    """A consumer: 64 keys of every item, and dQ of a step of each pair. `count` counts pairs."""
    GROUP: tl.constexpr = options.GROUP
    HEAD_DIM: tl.constexpr = options.HEAD_DIM
    rank = tlx.cluster_cta_rank()
    clusters = tl.num_programs(0) // PROGRAMS
    key = rank * TILE + role * KEYS
    factor = dk_factor(scale, output_scale, options.FOLD)
    count = 0
    for item in tl.range(tl.program_id(0) // PROGRAMS, items.count, clusters, num_stages=0):
        start_q, len_q, start_k, len_k, head_k = sequence_and_head(items, item)
        steps = steps_of(len_q)
        phase = item // clusters & 1
        dk_local = tl.zeros([KEYS, 64], tl.float32)
        dk_peer = tl.zeros([KEYS, 64], tl.float32)
        dv = tl.zeros([KEYS, HEAD_DIM], tl.float32)
        tlx.barrier_wait(k.full[0], phase)
        tlx.barrier_wait(v.full[0], phase)
        for step in tl.range(0, steps * GROUP, PAIR, num_stages=0):
            zero = keep_runtime(step)
            now = (count + step // PAIR) & 1
            for stage in tl.static_range(PAIR):
                head, row = head_and_row(step + stage, steps, 0, head_k, GROUP, ROWS)
                s = scores(role, k, q, stage, zero, now)
                s = tlx.async_dot_wait(0, s)
                d, dv = differentiate(
                    role, s, v, g, dv, stage, zero, now, scale, head, row, key, options
                )
                exchange_ds(role, ds, peer, d, stage, zero, now, rank)
                dk_local = tlx.async_dot(d, q.buffer[stage * 2 + zero], dk_local)
                dk_peer = tlx.async_dot(d, q.buffer[stage * 2 + 1 + zero], dk_peer)
                dv = tlx.async_dot_wait(0, dv)
                dk_local = tlx.async_dot_wait(0, dk_local)
                dk_peer = tlx.async_dot_wait(0, dk_peer)
                tlx.barrier_arrive(q.empty[stage])
                tlx.barrier_arrive(g.empty[stage])
            head, row = head_and_row(step + role, steps, 0, head_k, GROUP, ROWS)
            dq = dq_product(role, ds, peer, k, half, zero, now)
            dq = tlx.async_dot_wait(0, dq)
            tlx.barrier_arrive(ds.empty[role])
            tlx.barrier_arrive(ds.empty[role], 1, remote_cta_rank=1 - rank)
            tlx.async_descriptor_store_wait(0)
            put_half(gradients.dq, staging[role], start_q, len_q, head, row, rank, dq * factor)
        count += steps * GROUP // PAIR
        tlx.barrier_arrive(k.empty[0])
        dv = dv * dv_factor(scale, output_scale, options.FOLD)
        put_rows(gradients.dv, v.buffer[role], start_k, len_k, head_k, key, dv.to(options.DTYPE))
        dk_local = dk_local * factor
        dk_peer = dk_peer * factor
        tlx.async_descriptor_store_wait(0)
        tlx.barrier_arrive(v.empty[0])
        put_half(gradients.dk, staging[role], start_k, len_k, head_k, key, rank, dk_local)
        tlx.async_descriptor_store_wait(0)
        put_half(gradients.dk, staging[role], start_k, len_k, head_k, key, 1 - rank, dk_peer)
    tlx.async_descriptor_store_wait(0)
    # The other program still arrives here: this one's memory must not go before it has.
    for stage in tl.static_range(PAIR):
        tlx.barrier_wait(ds.empty[stage], (count & 1) ^ 1)


@triton.jit(do_not_specialize=["num_items", "max_seqlen_q"])
def backward_kernel(
    q_desc, k_desc, v_desc, g_desc, dq_desc, dk_desc, dv_desc,
    order_ptr, cu_seqlens_q_ptr, cu_seqlens_k_ptr, num_items, max_seqlen_q, scale, output_scale,
    NUM_HEADS_K: tl.constexpr, GROUP: tl.constexpr, ACTIVATION: tl.constexpr, FOLD: tl.constexpr,
    CAUSAL: tl.constexpr, WINDOW: tl.constexpr, HEAD_DIM: tl.constexpr, REGISTERS: tl.constexpr,
):  # fmt: skip
    """dQ, dK and dV of this cluster's items."""
    DTYPE: tl.constexpr = tlx.dtype_of(q_desc)
    options = Options(GROUP, ACTIVATION, FOLD, CAUSAL, WINDOW, HEAD_DIM, DTYPE)
    q = tlx.local_alloc((ROWS, 64), DTYPE, PAIR * 2)
    k = tlx.local_alloc((KEYS, 64), DTYPE, MATH_ROLES * 2)
    v = tlx.local_alloc((KEYS, HEAD_DIM), DTYPE, MATH_ROLES)
    g = tlx.local_alloc((ROWS, HEAD_DIM), DTYPE, PAIR)
    half = tlx.local_alloc((KEYS, 64), DTYPE, MATH_ROLES)
    ds = tlx.local_alloc((KEYS, ROWS), DTYPE, PAIR * MATH_ROLES)
    peer = tlx.local_alloc((KEYS, ROWS), DTYPE, PAIR * MATH_ROLES)
    staging = tlx.local_alloc((ROWS, 64), DTYPE, MATH_ROLES)
    q = ring(q, PAIR, MATH_ROLES)
    k = ring(k, 1, MATH_ROLES)
    v = ring(v, 1, MATH_ROLES)
    g = ring(g, PAIR, MATH_ROLES)
    ds_full = tlx.alloc_warp_barrier(PAIR, 4, MATH_ROLES)
    ds = Ring(ds, ds_full, tlx.alloc_barriers(PAIR, arrive_count=PROGRAMS), PAIR)
    peer = OneWay(peer, tlx.alloc_barriers(PAIR))
    gradients = Gradients(dq_desc, dk_desc, dv_desc)
    items = Items(
        order_ptr, cu_seqlens_q_ptr, cu_seqlens_k_ptr, num_items, max_seqlen_q, NUM_HEADS_K
    )

    with tlx.async_tasks():
        with tlx.async_task("default"):
            load(q_desc, k_desc, v_desc, g_desc, q, k, v, g, half, items, options)
        with tlx.async_task(num_warps=4, registers=REGISTERS, replicate=MATH_ROLES):
            math(
                tlx.async_task_replica_id(), q, k, v, g, half, ds, peer, staging, gradients,
                items, scale, output_scale, options,
            )  # fmt: skip


def backward(
    grad_out: torch.Tensor, batch: Batch, *, config: Config | None = None,
    work_list: WorkList | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    """(dq, dk, dv), shaped as q, k and v, contiguous; grad_out may have any strides."""
    config = config or default_config(batch)
    (order,) = work_list or work_list_recipe(batch, config).make(*batch.offsets)
    items = batch.sequences * batch.num_heads_k
    loads = (
        ragged_descriptor(batch.q, ROWS.value, width=64),
        ragged_descriptor(batch.k, KEYS.value, width=64),
        ragged_descriptor(batch.v, KEYS.value),
        ragged_descriptor(tma_readable(grad_out), ROWS.value),
    )
    boxes = (ROWS.value, 64), (KEYS.value, 64), (KEYS.value, None)
    return launch_gradients(
        backward_kernel, batch, config, loads, boxes,
        (order, batch.cu_seqlens_q, batch.cu_seqlens_k, items, batch.max_seqlen_q), items,
        ctas=PROGRAMS.value, adds=False,
    )  # fmt: skip
