"""What the backward rungs share whose two consumers own 64 keys of a tile each, v4 and v6: loads of
the keys of both, S, dS in shared memory, a consumer's half of dQ. Each rung has its own consumer.
"""

from dataclasses import dataclass

import triton
import triton.language as tl
import triton.language.extra.tlx as tlx

from gdpa_kernels.device.ragged import BOUND
from gdpa_kernels.gdpa.batch import Batch

MATH_ROLES = tl.constexpr(2)
KEYS = tl.constexpr(64)  # of a consumer
TILE = tl.constexpr(MATH_ROLES.value * KEYS.value)


@dataclass(frozen=True)
class Config:
    """Launch constants.

    q_stages, g_stages: steps of Q and of dO in shared memory. k_stages: tiles of K there; 2 loads
    the next one while a tile is worked on. fold: leave factors of the activation to the sums where
    `activations.foldable`. registers: of a consumer thread.
    """

    q_stages: int = 2
    g_stages: int = 2
    k_stages: int = 2
    fold: bool = True
    registers: int = 240


@dataclass(frozen=True)
class TicketConfig(Config):
    """Launch constants, and `tickets`: entries are taken by tickets, not by number."""

    tickets: bool = False


def default_config(batch: Batch) -> Config:
    """The same for every call."""
    return Config()


def columns_of(head_dim: int) -> int:
    """Columns of a tile, 64 or 128; those beyond head_dim are zero."""
    return 64 if head_dim <= 64 else 128


def rows_of(head_dim: int) -> int:
    """Rows of a step: a consumer's half of their dQ is [64, 64]."""
    return 2 * 64 * 64 // columns_of(head_dim)


@triton.jit
def fetch_both(desc, ring, stage, start, length, head, key):
    """Start the copies of both consumers' keys; both arrive on the stage's one barrier."""
    WIDTH: tl.constexpr = desc.block_shape[4]
    BYTES: tl.constexpr = TILE * WIDTH * tlx.size_of(tlx.dtype_of(desc))
    tlx.barrier_expect_bytes(ring.full[stage], BYTES)
    for role in tl.static_range(MATH_ROLES):
        coords = [BOUND, start + length, head, BOUND - length + key + role * KEYS, 0]
        buffer = ring.buffer[stage * MATH_ROLES + role]
        tlx.async_descriptor_load(desc, buffer, coords, ring.full[stage])


@triton.jit
def scores(k, q, count, Q_STAGES: tl.constexpr):
    """S of a step, transposed, in flight."""
    stage = count % Q_STAGES
    tlx.barrier_wait(q.full[stage], (count // Q_STAGES) & 1)
    return tlx.async_dot(k, tlx.local_trans(q.buffer[stage]))


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
    """dS K of a step, in flight: the role's half of 128 columns, or of 64 columns half of the rows.
    One of ROWS and HEAD_DIM is 64 and not divided; the other is 128. k_buffer: of the keys of role
    0; those of role 1 follow."""
    tl.static_assert(options.ROWS * options.HEAD_DIM == 128 * 64)
    ROW: tl.constexpr = role * (options.ROWS - 64)
    COLUMN: tl.constexpr = role * (options.HEAD_DIM - 64)
    stage = count & 1
    tlx.barrier_wait(ds.full[stage], (count // 2) & 1)
    d = tlx.local_slice(ds.buffer[stage * MATH_ROLES], [0, ROW], [KEYS, 64])
    columns = tlx.local_slice(k.buffer[k_buffer], [0, COLUMN], [KEYS, 64])
    dq = tlx.async_dot(tlx.local_trans(d), columns)
    d = tlx.local_slice(ds.buffer[stage * MATH_ROLES + 1], [0, ROW], [KEYS, 64])
    columns = tlx.local_slice(k.buffer[k_buffer + 1], [0, COLUMN], [KEYS, 64])
    return tlx.async_dot(tlx.local_trans(d), columns, dq)


@triton.jit
def stage_tile(buffer, x):
    """Write x [64, 64] into `buffer`, once what it held has been read."""
    tlx.async_descriptor_store_wait(0)
    tlx.local_store(buffer, x)
