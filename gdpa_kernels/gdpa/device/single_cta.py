"""What the backward rungs share whose accumulators are in tensor memory and whose CTA has a tile of
keys of its own (b1, b3; b2 its constants): the producer, the role that writes dQ, and the launch.

The math roles are tensor_memory.py's, the MMAs each rung's own. CTA pairs have pair_steps.py.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
import triton.language.extra.tlx as tlx

from gdpa_kernels.device.ragged import BOUND
from gdpa_kernels.device.rows import fetch_rows
from gdpa_kernels.gdpa.batch import Batch
from gdpa_kernels.gdpa.device.gradients import (
    head_and_row,
    launch_gradients,
    steps_of,
    tile_descriptors,
)
from gdpa_kernels.gdpa.device.tensor_memory import KEYS, ROWS
from gdpa_kernels.gdpa.device.work_list import count_items, entry

COLUMNS = tl.constexpr(32)  # of dQ in staging


@dataclass(frozen=True)
class Config:
    """Launch constants.

    q_stages, g_stages: steps of Q and of dO in shared memory. fold: leave factors of the activation
    to the sums where `activations.foldable`. registers: of a math thread.
    """

    q_stages: int = 2
    g_stages: int = 1
    fold: bool = True
    registers: int = 152


def default_config(batch: Batch) -> Config:
    """Constants with as many steps as fit in shared memory."""
    return Config(q_stages=3, g_stages=2) if batch.head_dim == 64 else Config()


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
    Q_STAGES: tl.constexpr
    G_STAGES: tl.constexpr
    DTYPE: tl.constexpr


@triton.jit
def load(q_desc, k_desc, v_desc, g_desc, q, k, v, g, list_ptr, options):
    """The producer: K of a tile, the first rows of Q, V, then dO and Q in the order of use."""
    num_items = count_items(list_ptr)
    phase, count = 0, 0
    for item in tl.range(tl.program_id(0), num_items, tl.num_programs(0)):
        start_k, _, len_k, start_out, len_q, head_k, key = entry(list_ptr, item)
        start_q = 0 if options.SHARED_Q else start_out
        start, steps = steps_of(key, len_q, ROWS, KEYS, options)
        tlx.barrier_wait(k.empty[0], phase ^ 1)
        fetch_rows(k_desc, k.buffer[0], k.full[0], start_k, len_k, head_k, key)
        for step in tl.range(0, steps * options.GROUP):
            head, row = head_and_row(step, steps, start, head_k, options.GROUP, ROWS)
            stage = (count + step) % options.Q_STAGES
            tlx.barrier_wait(q.empty[stage], (((count + step) // options.Q_STAGES) & 1) ^ 1)
            fetch_rows(q_desc, q.buffer[stage], q.full[stage], start_q, len_q, head, row)
            if step == 0:
                tlx.barrier_wait(v.empty[0], phase ^ 1)
                fetch_rows(v_desc, v.buffer[0], v.full[0], start_k, len_k, head_k, key)
            stage = (count + step) % options.G_STAGES
            tlx.barrier_wait(g.empty[stage], (((count + step) // options.G_STAGES) & 1) ^ 1)
            fetch_rows(g_desc, g.buffer[stage], g.full[stage], start_out, len_q, head, row)
        count += steps * options.GROUP
        phase ^= 1


@triton.jit
def output(dq, staging, dq_desc, list_ptr, options):
    """A role that adds dQ of every step to memory by TMA reduce-adds, COLUMNS at a time: one is
    staged while the one before is read."""
    PARTS: tl.constexpr = options.HEAD_DIM // COLUMNS
    num_items = count_items(list_ptr)
    count = 0
    for item in tl.range(tl.program_id(0), num_items, tl.num_programs(0)):
        _, _, _, start_out, len_q, head_k, key = entry(list_ptr, item)
        start, steps = steps_of(key, len_q, ROWS, KEYS, options)
        for step in tl.range(0, steps * options.GROUP):
            head, row = head_and_row(step, steps, start, head_k, options.GROUP, ROWS)
            tlx.barrier_wait(dq.full[0], (count + step) & 1)
            for part in tl.static_range(PARTS):
                x = tlx.local_load(tlx.subslice(dq.buffer[0], part * COLUMNS, COLUMNS))
                if part == PARTS - 1:
                    tlx.barrier_arrive(dq.empty[0])
                tlx.async_descriptor_store_wait(1)
                tlx.local_store(staging[part % 2], x)
                tlx.fence("async_shared")
                coords = [BOUND, start_out + len_q, head, BOUND - len_q + row, part * COLUMNS]
                tlx.async_descriptor_store(dq_desc, staging[part % 2], coords, store_reduce="add")
        count += steps * options.GROUP
    tlx.async_descriptor_store_wait(0)


def launch_tiles(
    kernel: triton.JITFunction, grad_out: torch.Tensor, batch: Batch, config: Config,
    entries: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    """(dq, dk, dv) by `kernel`, a CTA for a tile of keys, for the `entries` of a work list; see
    `launch_gradients`."""
    boxes = (ROWS.value, COLUMNS.value), (KEYS.value, None), (KEYS.value, None)
    loads = tile_descriptors(grad_out, batch, ROWS.value, KEYS.value)
    return launch_gradients(kernel, batch, config, loads, boxes, (entries,), len(entries) - 1)
