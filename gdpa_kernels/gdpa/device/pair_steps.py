"""A step of the backward rungs for CTA pairs: its loads, P, dS and its exchange, the MMAs of dV and
dK, and the launch.

An item has KEYS keys for each CTA, and a step ROWS rows. In an MMA of a pair each CTA has rows of A
of its own and half of the columns of B (pairs.py). So it loads most operands twice:

- for S^T = K Q^T and dP^T = V dO^T its keys' rows of K and V, and half of the `rows` of Q and dO,
  which are columns of Q^T and dO^T;
- for dK = dS^T Q and dV = P^T dO half of the `columns` of Q and dO, all rows;
- for dQ = dS K, half of the columns of both CTAs' keys. CTA r adds up dQ of the rows of math role
  r, the sum over CTAs c of dS[c, r]^T K[c], with dS[c, r] of the keys of c and those rows. So it
  keeps dS[r, r], and sends dS[r, 1 - r] to the other.
"""

import torch
import triton
import triton.language as tl
import triton.language.extra.tlx as tlx
from triton.tools.tensor_descriptor import TensorDescriptor

from gdpa_kernels.device.groups import OneWay, Ring
from gdpa_kernels.device.pairs import CTAS, fetch_part
from gdpa_kernels.device.ragged import ragged_descriptor, tma_readable
from gdpa_kernels.gdpa.batch import Batch
from gdpa_kernels.gdpa.device.gradients import launch_gradients
from gdpa_kernels.gdpa.device.tensor_memory import (
    HALF,
    KEYS,
    MATH_ROLES,
    PART,
    ROWS,
    store_ds,
    store_p,
)

ITEM = tl.constexpr(KEYS.value * CTAS.value)


@triton.aggregate
class Halves:
    """This CTA's halves of Q or dO of a step: half of the rows, and half of the columns."""

    rows: Ring
    columns: Ring


@triton.aggregate
class ScoreGradients:
    """dS of a step, [keys, rows]. for_dk: of this CTA's keys and all rows, in TMEM.
    for_dq.buffer[c]: of the keys of CTA c and this CTA's half of the rows, in shared memory. peer:
    the same buffers; full completes when what the other CTA writes there has arrived."""

    for_dk: OneWay
    for_dq: OneWay
    peer: OneWay


@triton.aggregate
class Descriptors:
    """TMA descriptors of the loads: of whole rows, and of half of the columns; g: dO."""

    q_rows: tl.tensor_descriptor
    q_columns: tl.tensor_descriptor
    k_rows: tl.tensor_descriptor
    k_columns: tl.tensor_descriptor
    v: tl.tensor_descriptor
    g_rows: tl.tensor_descriptor
    g_columns: tl.tensor_descriptor


@triton.jit
def fetch(desc, ring, empty_phase, BYTES, start, length, head, row, column):
    """Load this CTA's part of a ring of one stage, once its `empty_phase` has passed. The
    leader's barrier expects BYTES, those of both CTAs."""
    rank = tlx.cluster_cta_rank()
    tlx.barrier_wait(ring.empty[0], empty_phase)
    tlx.barrier_expect_bytes(ring.full[0], BYTES, pred=rank == 0)
    fetch_part(desc, ring.buffer[0], ring.full[0], start, length, head, row, column)


@triton.jit
def add_products(weights, columns, sums, use_acc, WIDTH: tl.constexpr):
    """dV += P^T dO, or dK += dS^T Q, of the pair, one MMA for the rows of each math role. weights:
    P^T or dS^T in TMEM, see tensor_memory.py. Not use_acc: sums start here."""
    for half in tl.static_range(MATH_ROLES):
        rows = tlx.local_slice(columns.buffer[0], [half * HALF, 0], [HALF, WIDTH])
        add = use_acc | (half > 0)
        tlx.async_dot(
            weights.buffer[2 * half], rows, sums, use_acc=add, force_async=True, two_ctas=True
        )
    tlx.tcgen05_commit(columns.empty[0], two_ctas=True)


@triton.jit
def exchange_ds(role: tl.constexpr, part: tl.constexpr, ds, d, rank):
    """Store dS of a part of a role's rows, of this CTA's keys, in the CTA that computes their dQ:
    the one whose rank is the role's number. In both CTAs that is the buffer of this one's keys."""
    columns = tlx.local_slice(ds.for_dq.buffer[rank], [0, part * PART], [KEYS, PART])
    if rank == role:
        tlx.local_store(columns, d)
    else:
        tlx.async_remote_shmem_store(columns, d, role, ds.peer.full[0])


@triton.jit
def compute_p_and_ds(
    role: tl.constexpr, s, p, dp, ds, phase, scale, head, row, key, mask, rank, options
):  # fmt: skip
    """P and dS of a math role's rows of a step, in two PARTs. Arrivals are on barriers of the
    leader, which issues the MMAs that read them."""
    tlx.barrier_wait(s.full[0], phase)
    slope = store_p(role, 0, s, p, scale, head, row, key, mask, options)
    second_slope = store_p(role, 1, s, p, scale, head, row, key, mask, options)
    tlx.barrier_arrive(p.full[0], 1, remote_cta_rank=0)
    tlx.barrier_wait(dp.full[0], phase)
    d = store_ds(role, 0, dp, ds.for_dk, slope, options)
    second_d = store_ds(role, 1, dp, ds.for_dk, second_slope, options)
    tlx.barrier_arrive(ds.for_dk.full[0], 1, remote_cta_rank=0)
    if rank == role:
        tlx.barrier_expect_bytes(ds.peer.full[0], KEYS * HALF * tlx.size_of(options.DTYPE))
    exchange_ds(role, 0, ds, d, rank)
    exchange_ds(role, 1, ds, second_d, rank)
    if rank == role:
        tlx.fence("async_shared")
        tlx.barrier_arrive(ds.for_dq.full[0], 1, remote_cta_rank=0)


def pair_descriptors(grad_out: torch.Tensor, batch: Batch) -> tuple[TensorDescriptor, ...]:
    """The fields of `Descriptors`; grad_out is copied where TMA cannot read it."""
    grad_out, columns = tma_readable(grad_out), batch.head_dim // CTAS.value
    return (
        ragged_descriptor(batch.q, HALF.value),
        ragged_descriptor(batch.q, ROWS.value, width=columns),
        ragged_descriptor(batch.k, KEYS.value),
        ragged_descriptor(batch.k, KEYS.value, width=columns),
        ragged_descriptor(batch.v, KEYS.value),
        ragged_descriptor(grad_out, HALF.value),
        ragged_descriptor(grad_out, ROWS.value, width=columns),
    )  # fmt: skip


def launch_backward_pairs(
    kernel: triton.JITFunction, grad_out: torch.Tensor, batch: Batch, config: object,
    entries: torch.Tensor, adds: bool = True,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    """(dq, dk, dv) by `kernel`, in clusters of two CTAs, for the `entries` of a work list; see
    `launch_gradients`."""
    boxes = (HALF.value, None), (KEYS.value, None), (KEYS.value, None)
    return launch_gradients(
        kernel, batch, config, pair_descriptors(grad_out, batch), boxes, (entries,),
        len(entries) - 1, ctas=CTAS.value, adds=adds,
    )  # fmt: skip
